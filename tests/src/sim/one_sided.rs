//! What the program on a node does with remote memory: shares regions, operates on those of peers, takes rights back;
//! and checks who may look at which memory when.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use rdma_reactor::transport::caps::Features;
use rdma_reactor::{
    Access, ConnectionId, Context, Outcome, Region, RegionOptions, RemoteRegion, SendErrorKind, SendId, SendKind,
};

use super::audit::{Arrival, Stand, is_stream};
use super::memory::{Reading, Shared, WORDS, Who};
use super::program::Program;
use super::rng::Rng;
use super::swarm::MS;

/// Regions of its own that a node has at most.
const LOCALS: usize = 5;
/// Regions that a node shares at most.
const SHARED: usize = 6;

/// A one-sided operation that was accepted.
#[derive(Clone, Debug)]
pub struct Operation {
    /// Which region of the audit.
    shared: usize,
    /// Which memory of the node's own.
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

/// Memory of the node's own, and how many operations read and write it.
#[derive(Debug)]
struct Local {
    region: Region,
    content: Vec<u8>,
    readers: u32,
    writers: u32,
    /// An operation may be done with it before it ends: the first part of a read in two, or a write that a message
    /// follows in the place of immediate data.
    early: bool,
}

/// A region that peers may use, and when that ends on its own: the time, and how long the node had been paused until
/// it was set.
#[derive(Debug)]
struct Own {
    region: Region,
    expires: Option<(u64, u64)>,
}

/// The memory of a node.
#[derive(Debug, Default)]
pub struct Memories {
    locals: BTreeMap<u64, Local>,
    next: u64,
    shared: BTreeMap<usize, Own>,
    /// Calls that are left.
    pub budget: u32,
}

fn random(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

/// A range of at least one byte, seldom none, within another that is not empty.
fn within(rng: &mut Rng, range: Range<usize>) -> Range<usize> {
    let start = range.start + rng.index(range.len());
    let most = (range.end - start) as u64;
    start..start + if rng.chance(30) { 0 } else { rng.skewed(1..=most) as usize }
}

impl Memories {
    /// None yet, and this many calls to make.
    #[must_use]
    pub fn new(budget: u32) -> Self {
        Self { budget, ..Self::default() }
    }
}

impl Local {
    const fn is_idle(&self) -> bool {
        self.readers + self.writers == 0
    }
}

impl Program<'_> {
    /// Does something with remote memory, about a connection or any.
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

    /// Registers memory for operations of its own.
    fn register(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        let state = &mut *self.state;
        let len = WORDS + state.rng.range(1..=2 * state.work.region) as usize;
        let content = random(&mut state.rng, len);
        match cx.register_vec(id, content.clone(), &RegionOptions::new()) {
            Ok(region) => {
                let number = state.memories.next;
                state.memories.next += 1;
                state.note(format_args!("memory {number} of {len} bytes"));
                state.memories.locals.insert(number, Local { region, content, readers: 0, writers: 0, early: false });
            }
            Err(error) => state.check(false, format_args!("{id}: registering {len} bytes: {error}")),
        }
    }

    /// Shares memory with the peer of a connection, or with all.
    fn share(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        let Some(&(cookie, side)) = self.state.live.get(&id) else { return };
        let state = &mut *self.state;
        let len = WORDS + state.rng.range(1..=state.work.region) as usize;
        let mut bytes = random(&mut state.rng, len);
        bytes[..WORDS].fill(0);
        let mut access = Access::empty();
        for right in [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
            access |= if state.rng.chance(600) { right } else { Access::empty() };
        }
        let mut options = RegionOptions::new().allow(access);
        let any_peer = state.rng.chance(300);
        options = if any_peer { options.any_peer() } else { options };
        let lifetime = state.rng.chance(50).then(|| state.rng.skewed(MS..=300 * MS));
        options = if let Some(ns) = lifetime { options.lifetime(Duration::from_nanos(ns)) } else { options };
        match cx.register_vec(id, bytes.clone(), &options) {
            Ok(region) => {
                let number = self.audit.memory.len();
                state.note(format_args!("{id} shares {number}, {len} bytes, {access:?}, with all: {any_peer}"));
                let mut shared = Shared::new((cookie, side), state.node, region.remote(), access, any_peer, bytes);
                shared.mortal = lifetime.is_some();
                self.audit.memory.push(shared);
                let (now, paused) = state.times();
                let expires = lifetime.filter(|_| !access.is_empty()).map(|ns| (now + ns, paused));
                state.memories.shared.insert(number, Own { region, expires });
            }
            Err(error) => state.check(false, format_args!("{id}: sharing {len} bytes: {error}")),
        }
    }

    /// Changes memory that peers may read at most.
    fn store(&mut self) {
        let nth = self.state.rng.index(self.state.memories.shared.len());
        let (&number, own) = self.state.memories.shared.iter_mut().nth(nth).expect("as many");
        let shared = &mut self.audit.memory[number];
        if shared.access.contains(Access::REMOTE_WRITE) {
            return;
        }
        let range = within(&mut self.state.rng, WORDS..own.region.len());
        let bytes = random(&mut self.state.rng, range.len());
        own.region.copy_from(range.start, &bytes);
        self.state.note(format_args!("changes {range:?} of {number}"));
        self.audit.memory[number].store(range.start, bytes);
    }

    /// Takes the rights to a region back, or drops it.
    fn withdraw(&mut self, cx: &mut Context<'_>, number: usize) {
        self.note_withdrawn(number);
        if self.state.rng.chance(500) {
            self.state.note(format_args!("drops {number}"));
            self.state.memories.shared.remove(&number);
        } else {
            self.state.note(format_args!("takes {number} back"));
            let Some(own) = self.state.memories.shared.get(&number) else { return };
            cx.revoke(&own.region);
            self.hide(number);
        }
    }

    /// Who is at work on a region that is going may fail.
    fn note_withdrawn(&mut self, number: usize) {
        let mut users: Vec<Who> = self.audit.memory[number].writers();
        for (&cookie, pair) in &self.audit.pairs {
            for (side, end) in pair.ends.iter().enumerate() {
                let uses = |stand: &Stand| matches!(stand, Stand::Operation(op) if op.shared == number);
                if end.sends.values().any(uses) {
                    users.push((cookie, side));
                }
            }
        }
        for (cookie, _) in users {
            self.audit.pairs.get_mut(&cookie).expect("it was opened").trespass = true;
        }
        self.audit.memory[number].withdrawn = true;
    }

    /// No peer reaches a region any more: what is there is what was written, and from now on it is something else.
    fn hide(&mut self, number: usize) {
        let Some(own) = self.state.memories.shared.get_mut(&number) else { return };
        let mut bytes = vec![0; own.region.len()];
        own.region.copy_to(0, &mut bytes);
        let wrong = self.audit.memory[number].judge(&bytes);
        self.state.rng.fill(&mut bytes[WORDS..]);
        match own.region.bytes_mut() {
            Some(place) => place.copy_from_slice(&bytes),
            None => self.state.check(false, format_args!("region {number} was taken back, and is in use")),
        }
        self.audit.memory[number].hide(bytes);
        if let Some(wrong) = wrong {
            self.state.check(false, format_args!("region {number} when it was taken back: {wrong}"));
        }
    }

    /// A connection of this node is gone, and with it the rights of its peer alone.
    pub fn forget_regions_of(&mut self, who: Who) {
        for number in self.state.memories.shared.keys().copied().collect::<Vec<_>>() {
            let shared = &self.audit.memory[number];
            if shared.owner == who && !shared.any_peer && !shared.withdrawn {
                self.audit.memory[number].withdrawn = true;
                self.hide(number);
            }
        }
    }

    /// The reactor of this node is gone: its memory is its own again.
    pub fn forget_regions(&mut self) {
        for number in self.state.memories.shared.keys().copied().collect::<Vec<_>>() {
            self.note_withdrawn(number);
            self.hide(number);
        }
        self.state.memories.locals.clear();
    }

    /// Drops all memory.
    pub fn drop_regions(&mut self) {
        for number in self.state.memories.shared.keys().copied().collect::<Vec<_>>() {
            self.note_withdrawn(number);
        }
        self.state.memories.shared.clear();
        self.state.memories.locals.clear();
    }

    /// Starts an operation on a region of the peer's.
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
            cx.fence(id);
            self.end(id).expect("it is live").2.fence = true;
        }
        self.start(cx, id, number, range, remote, kind);
        if let Some((_, _, end)) = self.end(id) {
            end.fence = false;
        }
    }

    /// Memory of the node's own for `len` bytes that an operation reads or, alone, writes: in one or two parts.
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
        let features = cx.capabilities(id).map_or(Features::empty(), |capabilities| capabilities.features);
        let amount = self.state.rng.range(1..=9);
        let (expected, swap) = self.audit.memory[number].swap(&mut self.state.rng);
        let immediate = (kind == SendKind::Write && self.state.rng.chance(300)).then(|| self.state.rng.bits() as u32);
        let memories = &mut self.state.memories.locals;
        let (result, operation) = match kind {
            SendKind::Write => {
                let parts: Vec<_> = locals.iter().map(|(n, range)| (&memories[n].region, range.clone())).collect();
                let result = match (&parts[..], immediate) {
                    ([(local, range)], Some(value)) => cx.write_with_immediate(id, remote, local, range.clone(), value),
                    _ => cx.write_vectored(id, remote, &parts),
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
                let result = cx.read_vectored(id, remote, &mut parts);
                memories.extend(lent);
                (result, Kind::Read(reading))
            }
            _ => {
                let (n, range) = &locals[0];
                let local = &mut memories.get_mut(n).expect("chosen").region;
                if kind == SendKind::FetchAdd {
                    (cx.fetch_add(id, remote, local, range.start, amount), Kind::Add(amount))
                } else {
                    (cx.compare_swap(id, remote, local, range.start, expected, swap), Kind::Swap { expected })
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
            Err(SendErrorKind::WouldBlock) => room < needs,
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
            Err(SendErrorKind::WouldBlock) => {
                let Some((_, _, end)) = self.end(id) else { return };
                end.refused(immediate.is_none());
            }
            Err(_) => {}
        }
    }

    /// An operation was accepted.
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

    /// An operation has ended.
    pub fn operated(&mut self, id: ConnectionId, send: SendId, operation: Operation, outcome: Outcome) {
        let Some(&who) = self.state.live.get(&id) else { return };
        let answered = match operation.kind {
            Kind::Write => false,
            // Nothing has to be asked for nothing.
            Kind::Read(_) => operation.locals.iter().any(|(_, range)| !range.is_empty()),
            Kind::Add(_) | Kind::Swap { .. } => true,
        };
        if outcome.is_sent() && answered {
            // What went before it has arrived before it was answered.
            self.audit.arrived(who, send.sequence());
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
        // The memory is the program's again, which uses it at once.
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

    /// Immediate data has come.
    pub fn immediate(&mut self, id: ConnectionId, value: u32, len: u32) {
        let Some(&(cookie, side)) = self.state.live.get(&id) else {
            return self.state.check(false, format_args!("{id}: immediate data on a connection that is gone"));
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
        self.state.check(kept, format_args!("{id}: immediate {value:#x} of {len} bytes, {next:?} was to come"));
        self.look_at_memory(false);
    }

    /// Looks at all memory of the node: who may reach it, and what is there. All of it, or what something is new of.
    pub fn look_at_memory(&mut self, all: bool) {
        let state = &mut *self.state;
        let (now, _) = state.times();
        for (n, local) in &mut state.memories.locals {
            let (idle, readable) = (local.is_idle(), local.writers == 0);
            let look = readable && (all || state.rng.chance(10));
            let same = !look || local.region.bytes().is_none_or(|bytes| bytes == local.content);
            let (mutable, borrowed) = (local.region.bytes_mut().is_some(), local.region.bytes().is_some());
            let lent = mutable == idle && borrowed == readable || local.early && !idle && mutable;
            if !lent || !same {
                let (readers, writers) = (local.readers, local.writers);
                super::fabric::lock(&state.fabric).violation(format!(
                    "node{}: memory {n}, read by {readers} and written by {writers}: to borrow: {borrowed}, to change: \
                     {mutable}, as it should be: {same}",
                    state.node
                ));
            }
        }
        let mut expired = Vec::new();
        for (&number, own) in &mut state.memories.shared {
            let shared = &mut self.audit.memory[number];
            let written = shared.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            let used = !shared.withdrawn && !shared.access.is_empty();
            let (mutable, borrowed) = (own.region.bytes_mut().is_some(), own.region.bytes().is_some());
            let ended = own.expires.is_some() && mutable;
            if ended && !shared.withdrawn {
                expired.push(number);
            } else if mutable == used || borrowed == (used && written) {
                super::fabric::lock(&state.fabric).violation(format!(
                    "node{}: region {number}, used: {used}: to borrow: {borrowed}, to change: {mutable}",
                    state.node
                ));
            }
            if shared.look || all || state.rng.chance(10) {
                shared.look = false;
                let mut bytes = vec![0; own.region.len()];
                own.region.copy_to(0, &mut bytes);
                if let Some(wrong) = shared.judge(&bytes) {
                    let who = state.node;
                    super::fabric::lock(&state.fabric).violation(format!("node{who}: region {number}: {wrong}"));
                }
            }
        }
        for (number, own) in &state.memories.shared {
            if let Some((at, paused)) = own.expires.filter(|_| !self.audit.memory[*number].withdrawn && now > 0)
                && !expired.contains(number)
            {
                state.check(state.is_within((at, paused), 0), format_args!("region {number} outlives its lifetime"));
            }
        }
        for number in expired {
            self.note_withdrawn(number);
            self.hide(number);
        }
    }
}
