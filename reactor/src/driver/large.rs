//! Memory for messages past one buffer: copies that peers are to fetch, and messages that are being fetched.

use std::ops::Range;

use super::Driver;
use crate::config::Framing;
use crate::conn::Need;
use crate::conn::transfer::Source;
use crate::error::{Blocked, SendErrorKind};
use crate::id::{ConnectionId, SendId};
use crate::memory::budget::{Account, Budget};
use crate::memory::joins::Joins;
use crate::memory::operations::outside;
use crate::memory::region::{Region, RemoteRegion};
use crate::security::Sealer;
use crate::security::channel::{SEGMENT, TAG, segment, segments};

/// How much of it is in use.
#[derive(Debug)]
pub(crate) struct LargeMessages {
    copied: Budget,
    fetched: Budget,
    /// Memory in which messages in several buffers are joined.
    pub(super) joins: Joins,
}

impl LargeMessages {
    pub(super) const fn new(limit: usize, keep: usize) -> Self {
        Self { copied: Budget::new(limit), fetched: Budget::new(limit), joins: Joins::new(keep) }
    }

    /// Bytes fetched, and bytes copied.
    pub(super) const fn levels(&self) -> (usize, usize) {
        (self.fetched.used(), self.copied.used())
    }

    /// A connection wants no memory any more.
    pub(super) fn leave(&mut self, id: ConnectionId) {
        self.copied.leave(id);
        self.fetched.leave(id);
    }
}

/// What a large message is made of.
#[derive(Debug)]
pub(super) enum Payload<'a> {
    Bytes(&'a [u8]),
    /// A range inside of a region.
    Region(&'a Region, Range<usize>),
}

impl Payload<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Region(_, range) => range.len(),
        }
    }

    /// Copies a part; `false` if this side cannot look at the memory.
    fn part(&self, range: Range<usize>, out: &mut [u8]) -> bool {
        match self {
            Self::Bytes(bytes) => {
                out.copy_from_slice(&bytes[range]);
                true
            }
            Self::Region(region, within) => region.try_copy_to(within.start + range.start, out),
        }
    }

    /// Copies all of it into memory that nobody else writes.
    fn copy_to(&self, to: &mut Region) -> bool {
        match self {
            Self::Bytes(bytes) => to.copy_from(0, bytes).is_ok(),
            // It is fetched from where it is.
            Self::Region(..) => false,
        }
    }
}

/// Puts the sealed segments of a large message into a region, and their tags behind them. The peer, and whoever knows its key,
/// may read the region at any time, so nothing gets there that is not sealed.
fn seal(sealer: &mut Sealer, payload: &Payload<'_>, to: &mut Region) -> bool {
    let len = payload.len() as u64;
    let message = sealer.begin(len);
    let mut scratch = vec![0; SEGMENT.min(payload.len())];
    (0..segments(len)).all(|index| {
        let range = segment(index, len);
        let bytes = &mut scratch[..range.len()];
        payload.part(range.clone(), bytes)
            && sealer.seal_segment(message, index, bytes).is_some_and(|tag| {
                to.copy_from(range.start, bytes).is_ok()
                    && to.copy_from(payload.len() + index as usize * TAG, &tag).is_ok()
            })
    })
}

impl Driver {
    /// Sends `payload`, which is too long for one buffer, in several ones if there is room for all of it. Otherwise offers a copy,
    /// or a sealed copy if the connection is secured.
    #[cold]
    pub(super) fn send_large(&mut self, id: ConnectionId, payload: Payload<'_>) -> Result<SendId, SendErrorKind> {
        // A program waits to use its region again.
        let told = matches!(payload, Payload::Region(..));
        let cut = self.input(id, |conn, env| {
            let len = payload.len();
            conn.may_cut(len).then(|| conn.send_cut(len, told, env, |range, room| payload.part(range, room)))
        });
        if let Some(sent) = cut.flatten() {
            return sent;
        }
        let (len, most) = (payload.len(), self.large.copied.limit());
        if len > most {
            return Err(SendErrorKind::TooLong { len, max: most });
        }
        let (seat, mut env) = self.at(id).ok_or(SendErrorKind::Closed)?;
        seat.conn.check_offer(len, true, &mut env)?;
        let own = seat.conn.copies();
        if !self.large.copied.request(id, len, own) {
            let (seat, mut env) = self.at(id).ok_or(SendErrorKind::Closed)?;
            seat.conn.refuse_transfer(len, true, &mut env);
            return Err(SendErrorKind::WouldBlock(Blocked::Memory));
        }
        let mut region = match self.block(id, len, Account::Copied) {
            Ok(region) => Box::new(region),
            Err(error) => {
                self.large.copied.give_back(len);
                log::warn!("{id}: memory for a message of {len} bytes: {error}");
                return Err(SendErrorKind::NoMemory { len });
            }
        };
        let (seat, _) = self.at(id).ok_or(SendErrorKind::Closed)?;
        // The region that is dropped gives the memory back.
        let copied = match seat.conn.sealer_mut() {
            Some(sealer) => seal(sealer, &payload, &mut region),
            None => payload.copy_to(&mut region),
        };
        if !copied {
            return Err(SendErrorKind::Sealed);
        }
        let remote = RemoteRegion { len: len as u64, ..region.remote() };
        self.input(id, |conn, env| conn.offer(remote, Source::Copy { region, told }, env)).ok_or(SendErrorKind::Closed)
    }

    /// Sends a part of a region without a copy.
    pub(crate) fn send_region(
        &mut self,
        id: ConnectionId,
        region: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        let conn = self.table.get(id).map(|seat| &seat.conn).filter(|conn| conn.state().is_open());
        let conn = conn.ok_or(SendErrorKind::Closed)?;
        let (max, raw, secured) = (conn.terms().buffer_size, conn.framing() == Framing::Raw, conn.is_secured());
        self.check_local(id, region, &range)?;
        if range.len() <= max || raw {
            return self.input(id, |conn, env| conn.send_from(region, range, env)).ok_or(SendErrorKind::Closed)?;
        }
        if secured {
            // The peer fetches a sealed copy: what it could read in the region itself would travel in the clear.
            let max = usize::try_from(conn.terms().max_message).unwrap_or(usize::MAX);
            if range.len() > max {
                return Err(SendErrorKind::TooLong { len: range.len(), max });
            }
            return self.send_large(id, Payload::Region(region, range));
        }
        if !self.registry.readable_by(region.key(), id) {
            return Err(SendErrorKind::NotReadable { max });
        }
        if let Some(conn) = self.table.get(id).map(|seat| &seat.conn)
            && conn.may_cut(range.len())
        {
            return self.input(id, |conn, env| conn.send_cut_from(region, &range, env)).ok_or(SendErrorKind::Closed)?;
        }
        let (start, len) = (range.start as u64, range.len());
        let remote = region.remote().part(start, len as u64).ok_or_else(|| outside(region, &range))?;
        self.input(id, |conn, env| {
            conn.check_offer(len, false, env)?;
            let hold = region.lend_to_peer(range);
            Ok(conn.offer(remote, Source::Lent(region.key(), hold), env))
        })
        .ok_or(SendErrorKind::Closed)?
    }

    /// Gives the transfers of a connection memory, in order, while there is any.
    pub(super) fn find_memory(&mut self, id: ConnectionId) {
        while let Some(seat) = self.table.get_mut(id).filter(|seat| seat.conn.state().is_open())
            && let Some(len) = seat.conn.wants_memory()
        {
            if !self.large.fetched.request(id, len, seat.link.fetched) {
                return;
            }
            seat.link.fetched += len;
            match self.block(id, len, Account::Fetched) {
                Ok(region) => {
                    self.input(id, |conn, _| conn.give_memory(region));
                }
                Err(error) => {
                    self.give_back_fetched(Some(id), len);
                    log::warn!("{id}: memory to fetch a message of {len} bytes: {error}");
                    self.input(id, |conn, env| conn.posting_failed(error.to_string(), env));
                    return;
                }
            }
        }
    }

    /// Takes memory for a message of a connection that has arrived, if there is some.
    pub(super) fn take_fetched(&mut self, id: ConnectionId, len: usize) -> bool {
        let Some(seat) = self.table.get_mut(id) else { return false };
        let taken = self.large.fetched.take(id, len, seat.link.fetched);
        seat.link.fetched += if taken { len } else { 0 };
        taken
    }

    /// Gives the memory back in which a message of a connection was, if that is still there.
    fn give_back_fetched(&mut self, id: Option<ConnectionId>, len: usize) {
        self.large.fetched.give_back(len);
        if let Some(seat) = id.and_then(|id| self.table.get_mut(id)) {
            seat.link.fetched = seat.link.fetched.saturating_sub(len);
        }
    }

    /// The memory of a message past one buffer is free. `id`: the connection that it went over.
    pub(super) fn settle(&mut self, account: Account, len: usize, id: Option<ConnectionId>) {
        match account {
            Account::Program => {}
            Account::Copied => {
                self.large.copied.give_back(len);
                self.effects.to_ask.extend(self.large.copied.in_line());
            }
            Account::Fetched => {
                self.give_back_fetched(id, len);
                for id in self.large.fetched.in_line().collect::<Vec<_>>() {
                    self.input(id, |conn, env| conn.mark(env));
                }
            }
        }
    }

    /// Tells the program of the next connection that was refused a send and would not be now: once per refusal. `false`:
    /// there is none. One at a time, as each callback may use what the next one hopes for.
    #[inline]
    pub(crate) fn next_writable(&mut self) -> bool {
        !self.effects.to_ask.is_empty() && self.ask_writable()
    }

    fn ask_writable(&mut self) -> bool {
        while let Some(id) = self.effects.to_ask.pop_front() {
            let Some(seat) = self.table.get(id) else { continue };
            let memory = match seat.conn.is_unblocked() {
                None => continue,
                Some(Need::Transfer { copy, .. }) if copy > 0 => {
                    self.large.copied.would_grant(id, copy, seat.conn.copies())
                }
                Some(_) => true,
            };
            if memory && let Some((seat, mut env)) = self.at(id) {
                seat.conn.unblock(&mut env);
                self.large.copied.leave(id);
                return true;
            }
        }
        false
    }

    /// Whether a message of `len` bytes would be taken now.
    pub(crate) fn is_writable_for(&self, id: ConnectionId, len: usize) -> bool {
        let Some(seat) = self.table.get(id) else { return false };
        let conn = &seat.conn;
        if conn.writable() == 0 || len <= conn.terms().buffer_size {
            return conn.writable() > 0;
        }
        conn.may_cut(len) || (conn.may_offer(len) && self.large.copied.would_grant(id, len, conn.copies()))
    }
}
