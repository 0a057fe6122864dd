//! The one-sided operations of the simulated program, and the checks of every operation.

use std::ops::Range;

use rdma_reactor::transport::caps::Features;
use rdma_reactor::{Access, ConnectionId, Context, Outcome, RemoteRegion, SendErrorKind, SendId, SendKind};

use super::audit::{Arrival, Stand, is_stream};
use super::fabric::lock;
use super::memory::{Reading, Shared, WORDS};
use super::program::Program;
use super::regions::Local;
use super::rng::Rng;

/// The largest number of local regions that a node has for its own operations.
const LOCALS: usize = 5;
/// The largest number of regions that a node shares with peers.
const SHARED: usize = 6;

/// A one-sided operation that was accepted and has not completed.
#[derive(Clone, Debug)]
pub struct Operation {
    /// The index of the remote region in the audit.
    pub(super) shared: usize,
    /// The local memory of the operation: for each part, the number of its region, and the range in it.
    locals: Vec<(u64, Range<usize>)>,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Write,
    Read(Reading),
    Add(u64),
    Swap { expected: u64 },
}

/// Returns a random range within `range`. `range` must not be empty. The returned range is empty in rare cases.
pub(super) fn within(rng: &mut Rng, range: Range<usize>) -> Range<usize> {
    let start = range.start + rng.index(range.len());
    let most = (range.end - start) as u64;
    start..start + if rng.chance(30) { 0 } else { rng.skewed(1..=most) as usize }
}

impl Program<'_> {
    /// Makes random calls about remote memory, on the connection `about` or on a random connection.
    pub fn operate(&mut self, cx: &mut Context<'_>, about: Option<ConnectionId>) {
        for _ in 0..self.state.rng.range(0..=self.state.work.operations_burst) {
            if self.state.calm || self.state.memories.budget == 0 {
                return;
            }
            self.state.memories.budget -= 1;
            let one = self.any();
            let Some(id) = about.filter(|_| self.state.rng.chance(700)).or(one) else { return };
            let Some((cookie, _, end)) = self.end(id) else { return };
            if end.announced && end.closed.is_none() && !is_stream(cookie) {
                self.operate_on(cx, id);
            }
        }
    }

    fn operate_on(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        let memories = &self.state.memories;
        let (locals, shared) = (memories.locals.len(), memories.shared.len());
        match self.state.rng.below(100) {
            n if locals < LOCALS && (locals < 2 || n < 5) => self.register(cx, id),
            n if shared < SHARED && (shared < 2 || n < 15) => self.share(cx, id),
            15..18 if shared > 0 => {
                let nth = self.state.rng.index(shared);
                let number = *self.state.memories.shared.keys().nth(nth).expect("as many");
                self.withdraw(cx, number);
            }
            18..20 => {
                let nth = self.state.rng.index(locals);
                let (&number, _) = self.state.memories.locals.iter().nth(nth).expect("as many");
                self.state.note(format_args!("drops memory {number}"));
                self.state.memories.locals.remove(&number);
            }
            20..28 if shared > 0 => self.store(),
            _ => self.operation(cx, id),
        }
    }

    /// Starts a random operation on a region of the peer.
    fn operation(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        let Some(&who) = self.state.live.get(&id) else { return };
        let peer = self.audit.pairs[&who.0].ends[1 - who.1].node;
        let trespass = self.state.rng.chance(self.state.work.trespass);
        let rng = &mut self.state.rng;
        let (right, kind) = match rng.below(10) {
            0..3 => (Access::REMOTE_READ, SendKind::Read),
            3..7 => (Access::REMOTE_WRITE, SendKind::Write),
            7..9 => (Access::REMOTE_ATOMIC, SendKind::FetchAdd),
            _ => (Access::REMOTE_ATOMIC, SendKind::CompareSwap),
        };
        let fits = |shared: &Shared| shared.node == peer && (trespass || shared.allows(who, right));
        let count = self.audit.memory.iter().filter(|shared| fits(shared)).count();
        if count == 0 {
            return;
        }
        let nth = rng.index(count);
        let (number, shared) =
            self.audit.memory.iter_mut().enumerate().filter(|(_, shared)| fits(shared)).nth(nth).expect("as many");
        let len = shared.remote.len as usize;
        let range = match kind {
            SendKind::Read => within(rng, WORDS..len),
            SendKind::Write => match shared.part(who) {
                part if part.is_empty() => return,
                part => within(rng, part),
            },
            SendKind::FetchAdd => 0..8,
            _ => 8..16,
        };
        let remote = shared.remote.part(range.start as u64, range.len() as u64).expect("inside");
        if rng.chance(150) {
            cx.remote(id).fence();
            self.end(id).expect("it is live").2.fence = true;
        }
        self.start(cx, id, number, range, remote, kind);
        if let Some((_, _, end)) = self.end(id) {
            end.fence = false;
        }
    }

    /// Chooses local memory of `len` bytes for an operation, in one or two parts. If `writes` is true, no other operation uses the chosen
    /// memory. Returns the number of the region and the range for each part, or `None` if there is no such memory.
    fn choose(&mut self, len: usize, writes: bool, align: usize) -> Option<Vec<(u64, Range<usize>)>> {
        let memories = &self.state.memories;
        let free = |local: &Local| if writes { local.is_idle() } else { local.writers == 0 };
        let fits: Vec<(u64, usize)> = memories
            .locals
            .iter()
            .filter(|(_, local)| free(local))
            .map(|(&n, local)| (n, local.content.len()))
            .collect();
        let rng = &mut self.state.rng;
        let cut = if align == 1 && fits.len() > 1 && rng.chance(200) { rng.index(len + 1) } else { len };
        let mut parts = Vec::new();
        let first = rng.index(fits.len().max(1));
        for (nth, len) in [cut, len - cut].into_iter().enumerate() {
            if nth == 1 && len == 0 {
                break;
            }
            let &(number, room) = fits.get((first + nth) % fits.len().max(1))?;
            let slack = room.checked_sub(len)?;
            let start = rng.index(slack + 1) / align * align;
            parts.push((number, start..start + len));
        }
        Some(parts)
    }

    fn start(
        &mut self,
        cx: &mut Context<'_>,
        id: ConnectionId,
        number: usize,
        range: Range<usize>,
        remote: RemoteRegion,
        kind: SendKind,
    ) {
        let writes = kind != SendKind::Write;
        let atomic = matches!(kind, SendKind::FetchAdd | SendKind::CompareSwap);
        let Some(locals) = self.choose(range.len(), writes, if atomic { 8 } else { 1 }) else { return };
        let Some(&who) = self.state.live.get(&id) else { return };
        let fenced = |end: &super::audit::End| end.fences + u64::from(end.fence);
        let fences = fenced(&self.audit.pairs[&who.0].ends[who.1]);
        let room = cx.writable(id);
        let features = cx.connection(id).capabilities().map_or(Features::empty(), |capabilities| capabilities.features);
        let amount = self.state.rng.range(1..=9);
        let (expected, swap) = self.audit.memory[number].swap(&mut self.state.rng);
        let immediate = (kind == SendKind::Write && self.state.rng.chance(300)).then(|| self.state.rng.bits() as u32);
        let memories = &mut self.state.memories.locals;
        let (result, operation) = match kind {
            SendKind::Write => {
                let parts: Vec<_> = locals.iter().map(|(n, range)| (&memories[n].region, range.clone())).collect();
                let result = match (&parts[..], immediate) {
                    ([(local, range)], Some(value)) => {
                        cx.remote(id).write_with_immediate(remote, local, range.clone(), value)
                    }
                    _ => cx.remote(id).write_vectored(remote, &parts),
                };
                (result, Kind::Write)
            }
            SendKind::Read => {
                let reading = self.audit.memory[number].read(who, fences, range.clone());
                let mut lent: Vec<_> = locals.iter().map(|(n, _)| memories.remove_entry(n).expect("chosen")).collect();
                let mut parts: Vec<_> = lent
                    .iter_mut()
                    .zip(&locals)
                    .map(|((_, local), (_, range))| (&mut local.region, range.clone()))
                    .collect();
                let result = cx.remote(id).read_vectored(remote, &mut parts);
                memories.extend(lent);
                (result, Kind::Read(reading))
            }
            _ => {
                let (n, range) = &locals[0];
                let local = &mut memories.get_mut(n).expect("chosen").region;
                if kind == SendKind::FetchAdd {
                    (cx.remote(id).fetch_add(remote, local, range.start, amount), Kind::Add(amount))
                } else {
                    (cx.remote(id).compare_swap(remote, local, range.start, expected, swap), Kind::Swap { expected })
                }
            }
        };
        let immediate = immediate.filter(|_| locals.len() == 1);
        let parts = locals.len();
        let Some((_, _, end)) = self.end(id) else { return };
        let next = end.posted;
        let native = features.contains(Features::WRITE_WITH_IMMEDIATE);
        let needs = match kind {
            SendKind::Read => parts,
            _ if immediate.is_some() && !native => 2,
            _ => 1,
        };
        let depth = self.state.options.send_depth as usize;
        let expected = match result {
            Ok(send) => send.sequence() == next && send.kind() == kind,
            Err(SendErrorKind::WouldBlock(_)) => room < needs,
            Err(SendErrorKind::TooManyRegions { count, max }) => {
                kind == SendKind::Read && count == parts && max == depth
            }
            Err(SendErrorKind::Unsupported { .. }) => {
                atomic && !features.contains(Features::ATOMICS) || immediate.is_some() && !native && depth < 2
            }
            Err(SendErrorKind::Closed) => room == 0,
            _ => false,
        };
        self.state.note(format_args!("{kind:?} of {range:?} of {number} on {id}, immediate {immediate:?}: {result:?}"));
        self.state.check(expected, format_args!("{kind:?} on {id}: {result:?} with room for {room}"));
        match result {
            Ok(send) => {
                let operation = Operation { shared: number, locals, kind: operation };
                self.started(id, send, range, operation, immediate, swap);
            }
            Err(SendErrorKind::WouldBlock(_)) => {
                let Some((_, _, end)) = self.end(id) else { return };
                end.refused(immediate.is_none());
            }
            Err(_) => {}
        }
    }

    /// Records that an operation was accepted.
    fn started(
        &mut self,
        id: ConnectionId,
        send: SendId,
        range: Range<usize>,
        operation: Operation,
        immediate: Option<u32>,
        swap: u64,
    ) {
        let Some(&who) = self.state.live.get(&id) else { return };
        let mut written = Vec::new();
        for (nth, (n, part)) in operation.locals.iter().enumerate() {
            let local = self.state.memories.locals.get_mut(n).expect("just used");
            local.early |= nth + 1 < operation.locals.len() || immediate.is_some();
            if let Kind::Write = operation.kind {
                local.readers += 1;
                written.extend_from_slice(&local.content[part.clone()]);
            } else {
                local.writers += 1;
            }
        }
        let right = match operation.kind {
            Kind::Write => Access::REMOTE_WRITE,
            Kind::Read(_) => Access::REMOTE_READ,
            _ => Access::REMOTE_ATOMIC,
        };
        let shared = &mut self.audit.memory[operation.shared];
        let pair = self.audit.pairs.get_mut(&who.0).expect("it was opened");
        pair.trespass |= shared.mortal || !shared.allows(who, right);
        let end = &mut pair.ends[who.1];
        let len = written.len() as u32;
        let sequence = end.posted;
        match operation.kind {
            Kind::Write => {
                shared.write(who, sequence, end.fences + u64::from(end.fence), range.start, written);
            }
            Kind::Read(_) => {}
            Kind::Add(amount) => shared.add(amount),
            Kind::Swap { .. } => shared.swapping(swap),
        }
        end.take(Stand::Operation(operation));
        if let Some(value) = immediate {
            end.coming.push_back((sequence, Arrival::Immediate(value, len)));
        }
        self.state.check(send.sequence() == sequence, format_args!("{id}: {send:?} is number {sequence}"));
    }

    /// Checks an operation that has completed.
    pub fn operated(&mut self, id: ConnectionId, send: SendId, operation: Operation, outcome: Outcome) {
        let Some(&who) = self.state.live.get(&id) else { return };
        let answered = match operation.kind {
            Kind::Write => false,
            // A read of zero bytes sends no request to the peer, so its completion proves nothing.
            Kind::Read(_) => operation.locals.iter().any(|(_, range)| !range.is_empty()),
            Kind::Add(_) | Kind::Swap { .. } => true,
        };
        if outcome.is_sent() && answered {
            // The peer answers this operation only after all earlier sends of this connection have arrived.
            self.audit.arrived(who, send.sequence());
        }
        if !outcome.is_sent() {
            self.audit.memory[operation.shared].strays.push(who);
            self.forget_kept(&operation);
        }
        let mut got = Vec::new();
        let mut whole = true;
        let mut wrong = None;
        for (n, range) in &operation.locals {
            let Some(local) = self.state.memories.locals.get_mut(n) else {
                whole = false;
                continue;
            };
            if let Kind::Write = operation.kind {
                local.readers -= 1;
                continue;
            }
            local.writers -= 1;
            let Some(bytes) = local.region.bytes().filter(|_| local.writers == 0) else {
                wrong = Some(format!("memory {n} is still lent when {send:?} has ended"));
                continue;
            };
            let beside = bytes[..range.start] != local.content[..range.start]
                || bytes[range.end..] != local.content[range.end..];
            if beside {
                wrong = Some(format!("{send:?} has changed memory {n} outside of {range:?}"));
            }
            got.extend_from_slice(&bytes[range.clone()]);
            local.content[range.clone()].copy_from_slice(&bytes[range.clone()]);
        }
        if outcome.is_sent() {
            self.audit.operations += 1;
            let shared = &mut self.audit.memory[operation.shared];
            let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
            let odd = match &operation.kind {
                Kind::Read(reading) if whole => {
                    shared.judge_read(reading, &got).map(|at| format!("has read byte {at}, which never was so"))
                }
                Kind::Add(amount) if whole && !shared.added(*amount, word(&got)) => {
                    Some(format!("has added {amount} to {}, which it never was", word(&got)))
                }
                Kind::Swap { expected } if whole && !shared.swapped(*expected, word(&got)) => {
                    Some(format!("has swapped {expected:#x}, it was {:#x}", word(&got)))
                }
                _ => None,
            };
            wrong = wrong.or(odd.map(|odd| format!("{send:?} on region {} {odd}", operation.shared)));
        }
        if let Some(wrong) = wrong {
            self.state.check(false, format_args!("{id}: {wrong}"));
        }
        // The program may use the memory again. It overwrites the memory immediately, so that a late access of the device is detected.
        for (n, _) in &operation.locals {
            let Some(local) = self.state.memories.locals.get_mut(n).filter(|local| local.is_idle()) else { continue };
            local.early = false;
            self.state.rng.fill(&mut local.content);
            match local.region.bytes_mut() {
                Some(bytes) => bytes.copy_from_slice(&local.content),
                None => self.state.check(false, format_args!("{id}: {send:?} has ended, and memory {n} is lent")),
            }
        }
    }

    /// If the device has refused to release the queue pair of an operation, the program never gets access to the operation's memory again.
    /// In this case, removes that memory from the list of local regions.
    fn forget_kept(&mut self, operation: &Operation) {
        let fabric = lock(&self.state.fabric);
        let hardware = &fabric.ports[self.state.node].hardware;
        for (n, _) in &operation.locals {
            let kept = self.state.memories.locals.get(n).is_some_and(|local| {
                let start = local.region.remote().address as usize;
                hardware.uses(start, start + local.region.len())
            });
            if kept {
                self.state.memories.locals.remove(n);
            }
        }
    }

    /// Checks immediate data that has arrived.
    pub fn immediate(&mut self, id: ConnectionId, value: u32, len: u32) {
        let Some(&(cookie, side)) = self.state.live.get(&id) else {
            return self.state.check(false, format_args!("{id}: immediate data on a connection that does not exist"));
        };
        self.state.note(format_args!("on_immediate {id}: {value:#x}, {len} bytes"));
        let pair = self.audit.pairs.get_mut(&cookie).expect("it was opened");
        let open = pair.ends[side].announced && pair.ends[side].closed.is_none();
        pair.ends[side].immediates += 1;
        let from = (cookie, 1 - side);
        let next = pair.ends[from.1].coming.pop_front();
        let sequence = next.map_or(0, |(sequence, _)| sequence);
        self.audit.arrived(from, sequence);
        let kept = open && next.is_some_and(|(_, arrival)| arrival == Arrival::Immediate(value, len));
        self.state.check(kept, format_args!("{id}: immediate {value:#x} of {len} bytes, expected {next:?}"));
        self.look_at_shared(false);
    }
}
