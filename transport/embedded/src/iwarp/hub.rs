//! [`Hub`]: the state that the engines of the embedded provider share. An engine is the part of a
//! provider that serves one kind of wire: a TCP stream, a ring in shared memory, or a UDP port.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::config::{IwarpConfig, SharedMemoryPolicy};
use super::intake::Intake;
use super::linger::{Linger, Lingers};
use super::net::{Net, NetChannel, SocketId};
use super::start_queue::StartQueue;
use super::startup::StartupTerms;
use super::{NAME, WITHIN_HOST};
use crate::shm::account::WindowAccount;
use crate::soft::resources::Resources;
use rdma_transport::cm::{CmEvent, CmEventKind, CmId, ConnectParam};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, LocalKey, MemoryRegion, RemoteKey};
use rdma_transport::newcomers::Host;
use rdma_transport::provider::{DeviceId, Entropy};
use rdma_transport::slab::Key;

/// The only device of a provider.
pub(super) const DEVICE: DeviceId = DeviceId(0);

pub(super) const STALE_ID: TransportError = TransportError::Stale { object: "connection id" };
pub(super) const STALE_QP: TransportError = TransportError::Stale { object: "queue pair" };
/// With one connection, a busy poll checks all sockets only in every `SPIN_FULL`-th round. In the
/// other rounds, a busy poll only reads from that connection.
pub(super) const SPIN_FULL: u32 = 8;

/// The object to which a socket or a deadline belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    Endpoint(Key),
    Linger(Key),
    /// The Unix listener to which peers on this host connect for shared memory.
    SetupListener,
    /// A peer that has connected to the Unix listener and has sent no hello.
    NewPeer(Key),
    /// The Unix socket of a connection that is still on its TCP stream.
    Setup(Key),
    /// An id for datagrams.
    Datagram(Key),
    /// A UDP port for datagrams.
    Port(Key),
}

/// The deadlines of a provider. Each owner has at most one deadline.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    by_time: BTreeSet<(Instant, Owner)>, // bound: deadlines
    by_owner: BTreeMap<Owner, Instant>,  // bound: deadlines
}

impl Deadlines {
    /// Sets the deadline of an owner. Replaces the previous deadline of the owner.
    pub(super) fn set(&mut self, owner: Owner, at: Instant) {
        if let Some(before) = self.by_owner.insert(owner, at) {
            self.by_time.remove(&(before, owner));
        }
        self.by_time.insert((at, owner));
    }

    pub(super) fn clear(&mut self, owner: Owner) {
        if let Some(at) = self.by_owner.remove(&owner) {
            self.by_time.remove(&(at, owner));
        }
    }

    /// Returns the deadline of an owner.
    pub(super) fn of(&self, owner: Owner) -> Option<Instant> {
        self.by_owner.get(&owner).copied()
    }

    /// Returns the earliest deadline.
    #[inline]
    pub(super) fn next(&self) -> Option<Instant> {
        self.by_time.first().map(|&(at, _)| at)
    }

    /// Removes and returns the earliest deadline that has passed.
    #[inline]
    pub(super) fn pop_passed(&mut self, now: Instant) -> Option<(Instant, Owner)> {
        let &(at, owner) = self.by_time.first().filter(|(at, _)| *at <= now)?;
        self.clear(owner);
        Some((at, owner))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_time.len()
    }
}

/// The part of a provider that its engines share: the sockets and their owners, the objects that
/// work requests name, the events for the program, the deadlines, and the connections to serve.
pub(super) struct Hub<N: Net> {
    pub(super) config: IwarpConfig,
    pub(super) net: N,
    pub(super) entropy: Entropy,
    pub(super) resources: Resources,
    pub(super) deadlines: Deadlines,
    /// The ready queue: connections that may have something to read or to send.
    pub(super) ready: VecDeque<Key>, // bound: connections
    /// The connection that received most recently. A busy poll reads from this connection first.
    pub(super) hot: Option<Key>,
    pub(super) intake: Intake,
    /// The memory of peers that the provider has mapped.
    pub(super) account: Arc<WindowAccount>,
    pub(super) lingers: Lingers,
    /// The owner of each socket. The slot of a socket's key is the index in this vector.
    // bound: connections, half-open, lingering, local-newcomers
    owners: Vec<Option<(SocketId, Owner)>>,
    pub(super) events: VecDeque<CmEvent>, // bound: events
    /// The events with which connections start: connect requests and resolved addresses. The
    /// program receives one event of each host in turn.
    pub(super) starts: StartQueue,
    /// The `now` of the last call of `progress` or `next_cm_event`, for calls that have no `now`.
    /// `None` before the first of these calls.
    pub(super) now: Option<Instant>,
    /// True during a call that returns the next event of the CM channel. An event that is raised
    /// meanwhile need not wake the channel.
    pub(super) within_cm: bool,
}

impl<N: Net> Hub<N> {
    pub(super) fn new(config: IwarpConfig, net: N, entropy: Entropy) -> Self {
        let account = Arc::new(WindowAccount::new(config.within_host.limits()));
        Self {
            config,
            net,
            entropy,
            resources: Resources::default(),
            deadlines: Deadlines::default(),
            ready: VecDeque::new(),
            hot: None,
            intake: Intake::new(),
            account,
            lingers: Lingers::default(),
            owners: Vec::new(),
            events: VecDeque::new(),
            starts: StartQueue::default(),
            now: None,
            within_cm: false,
        }
    }

    /// Returns the name of the provider.
    pub(super) fn name(&self) -> &'static str {
        if self.requires_shared_memory() { WITHIN_HOST } else { NAME }
    }

    /// Returns true if connections must not use their TCP stream after the handshake.
    #[inline]
    pub(super) fn requires_shared_memory(&self) -> bool {
        self.config.shared_memory == SharedMemoryPolicy::Require
    }

    pub(super) fn owner(&self, socket: SocketId) -> Option<Owner> {
        let (id, owner) = (*self.owners.get(socket.0.slot() as usize)?)?;
        (id == socket).then_some(owner)
    }

    pub(super) fn own(&mut self, socket: SocketId, owner: Owner) {
        let slot = socket.0.slot() as usize;
        if slot >= self.owners.len() {
            self.owners.resize(slot + 1, None);
        }
        self.owners[slot] = Some((socket, owner));
    }

    pub(super) fn disown(&mut self, socket: SocketId) {
        let owner = self.owners.get_mut(socket.0.slot() as usize);
        if let Some(owner) = owner.filter(|owner| owner.is_some_and(|(id, _)| id == socket)) {
            *owner = None;
        }
    }

    pub(super) fn close(&mut self, socket: SocketId, reset: bool) {
        self.disown(socket);
        self.net.close(socket, reset);
    }

    /// Sends the last bytes of an ended connection, `rest`. Closes the socket when the peer has
    /// ended its stream, or after the time [`IwarpConfig::linger`].
    pub(super) fn linger(&mut self, socket: SocketId, rest: Vec<u8>, now: Instant) {
        self.add_linger(Linger::new(socket, rest), now + self.config.linger);
    }

    /// Adds a lingering socket, or closes it immediately if it has nothing left to do. At
    /// `deadline`, the socket is closed. At the limit of lingering sockets, the oldest ones are
    /// closed.
    pub(super) fn add_linger(&mut self, mut linger: Linger, deadline: Instant) {
        if linger.serve(&mut self.net, self.intake.scratch()) {
            return self.close(linger.end(), false);
        }
        while self.lingers.is_full(&linger, self.config.max_lingering) {
            let Some((key, oldest)) = self.lingers.remove_oldest() else { return self.close(linger.end(), false) };
            self.deadlines.clear(Owner::Linger(key));
            self.close(oldest.end(), false);
        }
        let socket = linger.socket;
        let owner = Owner::Linger(self.lingers.insert(linger));
        self.own(socket, owner);
        self.deadlines.set(owner, deadline);
    }

    /// Continues to send the last bytes of an ended connection. Closes the socket if the peer has
    /// ended its stream.
    pub(super) fn serve_linger(&mut self, key: Key) {
        let Some(linger) = self.lingers.get_mut(key) else { return };
        if linger.serve(&mut self.net, self.intake.scratch()) {
            self.end_linger(key);
        }
    }

    /// Closes a lingering socket, and clears its deadline.
    pub(super) fn end_linger(&mut self, key: Key) {
        self.deadlines.clear(Owner::Linger(key));
        if let Some(linger) = self.lingers.remove(key) {
            self.close(linger.end(), false);
        }
    }

    /// Appends a connection to the ready queue, unless `queued` is true. Sets `queued`, the
    /// connection's flag that it is in the queue.
    #[inline]
    pub(super) fn enqueue(&mut self, key: Key, queued: &mut bool) {
        if !std::mem::replace(queued, true) {
            self.ready.push_back(key);
        }
    }

    /// Queues an event of the CM channel, and wakes the channel if necessary.
    pub(super) fn raise(&mut self, key: Key, kind: CmEventKind) {
        self.wake_for_event();
        self.events.push_back(CmEvent { id: CmId(key), kind });
    }

    /// Adds an event to `starts`, the queue of the events with which connections start.
    pub(super) fn enqueue_start(&mut self, host: Host, key: Key, kind: CmEventKind) {
        self.wake_for_event();
        self.starts.push(host, CmEvent { id: CmId(key), kind });
    }

    /// Wakes the CM channel for an event, unless another event is queued or a call that returns the
    /// next event is running (`within_cm`).
    fn wake_for_event(&mut self) {
        if self.events.is_empty() && self.starts.is_empty() && !self.within_cm {
            self.net.wake(NetChannel::Cm);
        }
    }

    /// Wakes the completion channel if an armed completion queue has a new completion. Used by
    /// every call that may add completions, except `progress`.
    pub(super) fn wake_completions(&mut self) {
        if self.resources.cqs.take_edge() {
            self.net.wake(NetChannel::Completion);
        }
    }

    /// Registers memory, under a key that no peer can predict.
    pub(super) fn register(
        &mut self,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion> {
        if access.contains(Access::ON_DEMAND) {
            return Err(TransportError::Unsupported { provider: NAME, feature: "on-demand paging" });
        }
        let entropy = &mut self.entropy;
        let (id, stag) = self.resources.keys.register(memory, range, access, || {
            let mut bytes = [0; 4];
            entropy(&mut bytes);
            u32::from_ne_bytes(bytes)
        })?;
        Ok(MemoryRegion { id, local_key: LocalKey(stag), remote_key: RemoteKey(stag) })
    }

    /// Returns the terms of a startup frame. There may be no socket yet, so these terms treat the
    /// peer as remote. The caller applies the CRC policy again after TCP has connected.
    pub(super) fn terms(&self, param: &ConnectParam<'_>) -> StartupTerms {
        let or_default = |depth| if depth == 0 { self.config.read_depth } else { depth };
        let (ird, ord) = (or_default(param.responder_resources), or_default(param.initiator_depth));
        StartupTerms::new(self.config.crc.is_requested(false), ird, ord, self.config.markers)
    }
}
