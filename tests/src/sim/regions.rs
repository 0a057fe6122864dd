//! The memory of a simulated node: local regions, and regions that it shares with peers and later revokes. The module checks the content of
//! the regions. It also checks that the program has access to a region only while no peer may use the region.

use std::collections::BTreeMap;
use std::time::Duration;

use rdma_reactor::{Access, ConnectionId, Context, Error, Region, RegionOptions};

use super::audit::Stand;
use super::fabric::lock;
use super::memory::{Shared, WORDS, Who};
use super::one_sided::within;
use super::program::Program;
use super::rng::Rng;
use super::swarm::MS;

/// A local region of the node, with the number of operations that read it, and the number of operations that write to it.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) region: Region,
    pub(super) content: Vec<u8>,
    pub(super) readers: u32,
    pub(super) writers: u32,
    /// True if an operation may have completed in part before the program is notified. Examples: the first half of a read in two parts has
    /// completed, or a write has completed, but not the message that replaces its immediate data.
    pub(super) early: bool,
}

/// A region that peers may use. If its rights expire, `expires` has two times in ns: the virtual time at which they expire, and the total
/// time for which the node had been paused when the lifetime was set.
#[derive(Debug)]
pub(super) struct Own {
    region: Region,
    expires: Option<(u64, u64)>,
}

/// All regions of a node.
#[derive(Debug, Default)]
pub struct Memories {
    pub(super) locals: BTreeMap<u64, Local>,
    next: u64,
    pub(super) shared: BTreeMap<usize, Own>,
    /// The number of calls about memory that the program may still make.
    pub budget: u32,
}

fn random(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

impl Memories {
    /// Returns the state of a node without regions, whose program may make `budget` calls.
    #[must_use]
    pub fn new(budget: u32) -> Self {
        Self { budget, ..Self::default() }
    }
}

impl Local {
    pub(super) const fn is_idle(&self) -> bool {
        self.readers + self.writers == 0
    }
}

/// Returns true if memory could not be registered only because its connection is ending.
fn is_gone(error: &Error, cx: &Context<'_>, id: ConnectionId) -> bool {
    matches!(error, Error::Gone("connection")) && cx.writable(id) == 0
}

/// Returns true if the device of a node has refused to end the rights of peers to a region.
fn is_kept(fabric: &super::fabric::Shared, node: usize, region: &Region) -> bool {
    lock(fabric).ports[node].hardware.keeps(region.remote().key)
}

impl Program<'_> {
    /// Registers a local region for the node's own operations.
    pub(super) fn register(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        let state = &mut *self.state;
        let len = WORDS + state.rng.range(1..=2 * state.work.region) as usize;
        let content = random(&mut state.rng, len);
        match cx.regions().register_vec(id, content.clone(), &RegionOptions::new()) {
            Ok(region) => {
                let number = state.memories.next;
                state.memories.next += 1;
                state.note(format_args!("memory {number} of {len} bytes"));
                state.memories.locals.insert(number, Local { region, content, readers: 0, writers: 0, early: false });
            }
            Err(error) => state.check(is_gone(&error, cx, id), format_args!("{id}: registering {len} bytes: {error}")),
        }
    }

    /// Registers a region for the peer of a connection, or for all peers.
    pub(super) fn share(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
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
        match cx.regions().register_vec(id, bytes.clone(), &options) {
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
            Err(error) => state.check(is_gone(&error, cx, id), format_args!("{id}: sharing {len} bytes: {error}")),
        }
    }

    /// Changes a region that peers may read but not write to.
    pub(super) fn store(&mut self) {
        let nth = self.state.rng.index(self.state.memories.shared.len());
        let (&number, own) = self.state.memories.shared.iter_mut().nth(nth).expect("as many");
        let shared = &mut self.audit.memory[number];
        if shared.access.contains(Access::REMOTE_WRITE) {
            return;
        }
        let range = within(&mut self.state.rng, WORDS..own.region.len());
        let bytes = random(&mut self.state.rng, range.len());
        own.region.copy_from(range.start, &bytes).expect("this range is not lent");
        self.state.note(format_args!("changes {range:?} of {number}"));
        self.audit.memory[number].store(range.start, bytes);
    }

    /// Revokes the rights to a region, or drops the region.
    pub(super) fn withdraw(&mut self, cx: &mut Context<'_>, number: usize) {
        self.note_withdrawn(number);
        if self.state.rng.chance(500) {
            self.state.note(format_args!("drops {number}"));
            self.state.memories.shared.remove(&number);
        } else {
            self.state.note(format_args!("takes {number} back"));
            let Some(own) = self.state.memories.shared.get(&number) else { return };
            // The result is ignored: the device may refuse to release the key. The simulated hardware counts such a refusal.
            let _ = cx.regions().revoke(&own.region);
            self.hide(number);
        }
    }

    /// Records that the rights to a region have ended. From then on, operations on the region may fail.
    fn note_withdrawn(&mut self, number: usize) {
        let shared = &self.audit.memory[number];
        let mut users: Vec<Who> = shared.writers();
        users.extend(&shared.strays);
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

    /// Checks a region that no peer can use any more, and overwrites it. If the device has refused to release the key of the region, peers
    /// may still use the region, so it is not overwritten.
    fn hide(&mut self, number: usize) {
        let Some(own) = self.state.memories.shared.get_mut(&number) else { return };
        if is_kept(&self.state.fabric, self.state.node, &own.region) {
            let lent = own.region.bytes_mut().is_some();
            return self.state.check(!lent, format_args!("region {number} is lent, though its device keeps it"));
        }
        let mut bytes = vec![0; own.region.len()];
        own.region.copy_to(0, &mut bytes);
        let wrong = self.audit.memory[number].judge(&bytes);
        self.state.rng.fill(&mut bytes[WORDS..]);
        match own.region.bytes_mut() {
            Some(place) => place.copy_from_slice(&bytes),
            None => self.state.check(false, format_args!("region {number} was revoked, but is in use")),
        }
        self.audit.memory[number].hide(bytes);
        if let Some(wrong) = wrong {
            self.state.check(false, format_args!("region {number} when it was revoked: {wrong}"));
        }
    }

    /// When a connection has ended, ends the rights that only the peer of this connection had.
    pub fn forget_regions_of(&mut self, who: Who) {
        for number in self.state.memories.shared.keys().copied().collect::<Vec<_>>() {
            let shared = &self.audit.memory[number];
            if shared.owner == who && !shared.any_peer && !shared.withdrawn {
                self.audit.memory[number].withdrawn = true;
                self.hide(number);
            }
        }
    }

    /// Ends all rights, because the reactor of this node was dropped.
    pub fn forget_regions(&mut self) {
        for number in self.state.memories.shared.keys().copied().collect::<Vec<_>>() {
            self.note_withdrawn(number);
            self.hide(number);
        }
        self.state.memories.locals.clear();
    }

    /// Drops all regions.
    pub fn drop_regions(&mut self) {
        for number in self.state.memories.shared.keys().copied().collect::<Vec<_>>() {
            self.note_withdrawn(number);
        }
        self.state.memories.shared.clear();
        self.state.memories.locals.clear();
    }

    /// Checks the regions of the node: whether the program has access, and the content. If `all` is false, checks the content only of a
    /// part of the regions.
    pub fn look_at_memory(&mut self, all: bool) {
        self.look_at_own(all);
        self.look_at_shared(all);
    }

    /// Checks the local regions. When an operation has completed, the program may get access to the operation's memory before the callback
    /// of the operation, because the callbacks of earlier completions in the same batch are called first.
    fn look_at_own(&mut self, all: bool) {
        let state = &mut *self.state;
        for (n, local) in &mut state.memories.locals {
            let (idle, readable) = (local.is_idle(), local.writers == 0);
            let look = readable && (all || state.rng.chance(10));
            let same = !look || local.region.bytes().is_none_or(|bytes| bytes == local.content);
            let (mutable, borrowed) = (local.region.bytes_mut().is_some(), local.region.bytes().is_some());
            let lent = mutable == idle && borrowed == readable || local.early && !idle && mutable;
            if !lent || !same {
                let (readers, writers) = (local.readers, local.writers);
                lock(&state.fabric).violation(format!(
                    "node{}: memory {n}, read by {readers} and written by {writers}: to borrow: {borrowed}, to change: \
                     {mutable}, as it should be: {same}",
                    state.node
                ));
            }
        }
    }

    /// Checks the regions that peers may use.
    pub fn look_at_shared(&mut self, all: bool) {
        let state = &mut *self.state;
        let (now, _) = state.times();
        let mut expired = Vec::new();
        for (&number, own) in &mut state.memories.shared {
            let shared = &mut self.audit.memory[number];
            let written = shared.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            let kept = is_kept(&state.fabric, state.node, &own.region);
            let used = (!shared.withdrawn || kept) && !shared.access.is_empty();
            let (mutable, borrowed) = (own.region.bytes_mut().is_some(), own.region.bytes().is_some());
            let ended = own.expires.is_some() && mutable;
            if ended && !shared.withdrawn {
                expired.push(number);
            } else if mutable == used || borrowed == (used && written) {
                lock(&state.fabric).violation(format!(
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
                    lock(&state.fabric).violation(format!("node{who}: region {number}: {wrong}"));
                }
            }
        }
        for (number, own) in &state.memories.shared {
            let kept = is_kept(&state.fabric, state.node, &own.region);
            let end = own.expires.filter(|_| !kept && !self.audit.memory[*number].withdrawn && now > 0);
            if let Some((at, paused)) = end.filter(|_| !expired.contains(number)) {
                state.check(state.is_within((at, paused), 0), format_args!("region {number} outlives its lifetime"));
            }
        }
        for number in expired {
            self.note_withdrawn(number);
            self.hide(number);
        }
    }
}
