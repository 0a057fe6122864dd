//! The streams of a reactor, by connection.

use std::collections::BTreeMap;

use rdma_transport::slab::Key;

use super::inbox::Inbox;
use crate::buffer::DetachedMessage;
use crate::context::Context;
use crate::core::Core;
use crate::error::{DisconnectReason, SendErrorKind};
use crate::id::{ConnectionId, TimerId};

/// Whether this side still writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writing {
    Open,
    /// It has finished; there was no room yet to say so.
    Finishing,
    /// It has finished, and said so.
    Finished,
}

/// One stream.
#[derive(Debug)]
pub(crate) struct Record {
    id: ConnectionId,
    pub(crate) inbox: Inbox<DetachedMessage>,
    pub(crate) writing: Writing,
    /// The peer writes no more.
    pub(crate) peer_finished: bool,
    /// Shut down for reading here.
    pub(crate) deaf: bool,
    /// Closed here: nothing but its last callback concerns the program any more.
    pub(crate) closed: bool,
    /// Ends the wait for room to say that this side has finished.
    linger: Option<TimerId>,
    /// Why the connection is gone.
    pub(crate) reason: Option<DisconnectReason>,
    /// The program has read to the end.
    pub(crate) read_out: bool,
}

impl Record {
    fn new(id: ConnectionId) -> Self {
        Self {
            id,
            inbox: Inbox::default(),
            writing: Writing::Open,
            peer_finished: false,
            deaf: false,
            closed: false,
            linger: None,
            reason: None,
            read_out: false,
        }
    }

    /// Whether what comes is kept to be read.
    pub(crate) const fn listens(&self) -> bool {
        !self.closed && !self.deaf
    }

    /// Drops what was not read; whether there was any.
    fn discard(&mut self, core: &mut Core) -> bool {
        let some = !self.inbox.is_empty();
        while let Some(message) = self.inbox.pop() {
            message.give_back(core);
        }
        some
    }
}

/// The streams of a reactor.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Those with a connection, by its slot.
    live: Vec<Option<Record>>,
    /// Those whose connection is gone and that have something to read.
    ended: BTreeMap<ConnectionId, Record>,
}

impl Table {
    pub(crate) fn open(&mut self, id: ConnectionId) {
        if self.live.len() <= id.slot() {
            self.live.resize_with(id.slot() + 1, || None);
        }
        self.live[id.slot()] = Some(Record::new(id));
    }

    /// A stream whose connection is there.
    #[inline]
    pub(crate) fn live(&mut self, id: ConnectionId) -> Option<&mut Record> {
        self.live.get_mut(id.slot())?.as_mut().filter(|record| record.id == id)
    }

    /// A stream that the program may use.
    #[inline]
    pub(crate) fn get(&self, id: ConnectionId) -> Option<&Record> {
        let live = self.live.get(id.slot()).and_then(Option::as_ref).filter(|record| record.id == id);
        live.or_else(|| self.ended.get(&id)).filter(|record| !record.closed)
    }

    /// A stream that the program may use.
    #[inline]
    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Record> {
        let live = self.live.get_mut(id.slot()).and_then(Option::as_mut).filter(|record| record.id == id);
        live.or_else(|| self.ended.get_mut(&id)).filter(|record| !record.closed)
    }

    /// This side writes no more: says so when there is room.
    pub(crate) fn shut_down_writing(&mut self, core: &mut Core, id: ConnectionId) {
        if let Some(record) = self.live(id).filter(|record| record.writing == Writing::Open) {
            record.writing = Writing::Finishing;
            self.finish(core, id);
        }
    }

    /// Drops what is not read, and all that is still to come.
    pub(crate) fn shut_down_reading(&mut self, core: &mut Core, id: ConnectionId) {
        if let Some(record) = self.get_mut(id) {
            record.deaf = true;
            record.discard(core);
        }
    }

    /// The program wants no more of a stream.
    pub(crate) fn close(&mut self, core: &mut Core, id: ConnectionId) {
        self.ended.remove(&id).into_iter().for_each(|mut record| _ = record.discard(core));
        let Some(record) = self.live(id).filter(|record| !record.closed) else { return };
        record.closed = true;
        if record.discard(core) {
            // As TCP: who throws bytes away does not say that all is well.
            core.close(id);
            return;
        }
        self.shut_down_writing(core, id);
        match self.live(id).map(|record| record.writing) {
            Some(Writing::Finishing) => {
                let delay = core.config.close_timeout;
                let timer = Context { core }.set_timer(delay, token(id));
                self.live(id).expect("just seen").linger = Some(timer);
            }
            _ => core.close(id),
        }
    }

    /// Says that this side writes no more, if that is to be said; whether this side had finished.
    pub(crate) fn finish(&mut self, core: &mut Core, id: ConnectionId) -> bool {
        let Some(record) = self.live(id).filter(|record| record.writing != Writing::Open) else { return false };
        if record.writing == Writing::Finishing && core.send(id, &[]) != Err(SendErrorKind::WouldBlock) {
            // Said, or the connection is going and nobody is to be told.
            record.writing = Writing::Finished;
            if record.closed {
                core.close(id);
            }
            self.close_if_finished(core, id);
        }
        true
    }

    /// Closes the connection when nobody will write any more.
    pub(crate) fn close_if_finished(&mut self, core: &mut Core, id: ConnectionId) {
        if self.live(id).is_some_and(|record| record.peer_finished && record.writing == Writing::Finished) {
            core.close(id);
        }
    }

    /// The connection is gone; whether in order. What is not read stays until it is.
    pub(crate) fn ended(&mut self, core: &mut Core, id: ConnectionId, reason: &DisconnectReason) -> Option<bool> {
        self.live(id)?;
        let mut record = self.live[id.slot()].take()?;
        if let Some(timer) = record.linger.take() {
            core.timers.cancel(timer.0);
        }
        let orderly = match reason {
            DisconnectReason::Local => true,
            DisconnectReason::Peer => record.peer_finished,
            _ => false,
        };
        record.reason = Some(reason.clone());
        if !record.closed {
            // Those that nobody will come back for make room.
            self.ended.retain(|_, record| !record.read_out);
            self.ended.insert(id, record);
        }
        Some(orderly)
    }

    /// The last callback of a stream has returned: it stays only if there is something to read.
    pub(crate) fn forget_read(&mut self, id: ConnectionId) {
        if self.ended.get(&id).is_some_and(|record| record.inbox.is_empty()) {
            self.ended.remove(&id);
        }
    }

    /// A timer; `true` if it was that of a stream which was closed and waited for room.
    pub(crate) fn lingered(&mut self, core: &mut Core, timer: TimerId, token: u64) -> bool {
        let id = connection(token);
        let lingers = self.live(id).is_some_and(|record| record.linger == Some(timer));
        if lingers {
            self.live(id).expect("just seen").linger = None;
            core.close(id);
        }
        lingers
    }
}

fn token(id: ConnectionId) -> u64 {
    (u64::from(id.0.generation()) << 32) | u64::from(id.0.slot())
}

fn connection(token: u64) -> ConnectionId {
    ConnectionId(Key::new(token as u32, (token >> 32) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_found_by_its_own_name_only() {
        let mut table = Table::default();
        let (old, new) = (ConnectionId(Key::new(7, 1)), ConnectionId(Key::new(7, 2)));
        assert!(table.get(old).is_none());
        table.open(old);
        assert!(table.get(old).is_some() && table.get(new).is_none());
        table.open(new);
        assert!(table.get(old).is_none() && table.get_mut(new).is_some());
        table.live(new).unwrap().closed = true;
        assert!(table.get(new).is_none() && table.live(new).is_some());
    }

    #[test]
    fn a_timer_names_its_stream() {
        for (slot, generation) in [(0, 1), (0xff_ffff, 0xf_ffff), (1, 7)] {
            let id = ConnectionId(Key::new(slot, generation));
            assert_eq!(connection(token(id)), id);
        }
    }
}
