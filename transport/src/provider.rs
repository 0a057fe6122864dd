//! The seam between the loop and the hardware: [`Provider`] and its contract.
//!
//! # Contract
//!
//! *Thread.* One thread drives a provider. No call blocks. Time is an argument and never runs backwards.
//!
//! *Channels.* Each channel is one descriptor for an edge-triggered registration. It becomes readable when there is
//! something to get from it that was not there when the getter last said `None`. Spurious edges are allowed, lost ones
//! are not. Call a getter until it says `None`. A getter copies an event and acknowledges it before it returns, so
//! destroying an object never waits for the caller.
//!
//! *Arming.* [`Provider::req_notify`] asks for one event on the completion queue's next completion. A completion that
//! is already in the queue raises none: arm, poll once more, and only then sleep.
//!
//! *Driving.* [`Provider::progress`] moves bytes where the data path runs on the caller's thread, and runs the
//! provider's timers; on hardware it does nothing. Call it when a channel had an edge, when [`Provider::next_deadline`]
//! has passed, while spinning, and again soon when it says that there is more.
//!
//! *Order.* Completions of one send queue come in posting order, and so do those of one receive queue. An unsignaled
//! send is done when a later one of its queue completes. Reads and atomics are an exception on some devices (siw),
//! where later sends may complete before them: signal each of them, and wait for its own completion. A receive may
//! complete before `Established` is delivered.
//!
//! *Posting.* A chain is taken from front to back; on failure [`PostError::posted`] says how many were taken. Post
//! receives before `connect` and `accept`.
//!
//! *Teardown.* [`Provider::disconnect`] flushes: every work request that is not done completes, with
//! [`crate::WcStatus::Flushed`] if it was not started. What was handed to the network before is still delivered to the
//! peer if possible. [`Provider::destroy_id`] drops the queue pair and the work requests that are left on it, without
//! further completions. A receive that the queue pair had taken from a shared queue and not filled completes as
//! flushed, or is posted to the shared queue again. `Disconnected` may be delivered late, twice or never. Completions
//! of a destroyed queue pair may still be polled from its completion queue.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

pub use crate::caps::DeviceInfo;
use crate::caps::Moderation;
use crate::cm::{CmEvent, ConnectParam, Detached, ListenOptions, PathOptions, Source};
use crate::datagram::{AddressId, GRH_LEN, Route};
use crate::error::{Error, Result};
use crate::event::DeviceEvent;
use crate::handle::{CmId, MrId, QpId, SrqId};
pub use crate::handle::{CqId, DeviceId};
use crate::mem::Memory;
use crate::mr::{Access, MemoryRegion};
use crate::place::Place;
use crate::qp::QpAttr;
use crate::registrar::{Registrar, Registration};
use crate::wc::WorkCompletion;
use crate::wr::{RecvWr, SendWr};

const DATAGRAMS: &str = "datagrams";
const IB_ADDRESSES: &str = "addresses of InfiniBand";
const HANDING_OVER: &str = "connect requests to hand over";

/// What a queue pair uses to reach its peer (`ibv_query_qp`(3)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathState {
    /// Port of the device, from 1.
    pub port: u8,
    /// Payload of the largest packet, bytes; 0 where the device does not say.
    pub mtu: u32,
    /// Type of service of every packet, with the DSCP in the upper six bits.
    pub type_of_service: u8,
    /// Code of the ack timeout.
    pub ack_timeout: u8,
    /// Times that a request is sent again without an answer.
    pub retry_count: u8,
    /// Times that a request is sent again to a peer without a receive, as the peer has asked; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Code of the receiver-not-ready timer.
    pub min_rnr_timer: u8,
    /// RDMA Reads that the peer may have outstanding here.
    pub responder_resources: u8,
    /// RDMA Reads that may be outstanding at the peer.
    pub initiator_depth: u8,
}

/// Why [`Provider::progress`] is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drive {
    /// An edge, a deadline, or the promise of more: everything that is ready is looked at.
    Full,
    /// One round of a busy poll: the provider may look at the busiest connections only, if it looks at all of
    /// them every few rounds.
    Spin,
}

/// A chain that was not taken whole.
#[derive(Debug)]
pub struct PostError {
    /// Work requests that were taken before the one that failed.
    pub posted: usize,
    /// Why that one failed.
    pub error: Error,
}

/// A source of queue pairs: see the [module](self) for the contract.
///
/// # Safety
/// Programs give memory away when they post a work request or register a region, and take it back, as references, when
/// the provider says so. An implementation, one that forwards to another included, therefore guarantees:
///
/// 1. *Work requests.* The provider and its device use the bytes that a work request's entries name from its post until
///    it is done, and at no other time. They only read them for sends and writes, and only write them for receives,
///    reads and atomics. A work request is done when [`poll_cq`](Provider::poll_cq) has returned its completion; an
///    unsignaled send or write, when it has returned the completion of a later send or write of the same queue pair;
///    each one at the latest when [`destroy_id`](Provider::destroy_id) of its queue pair has returned; a receive of a
///    shared queue that no queue pair has taken, when [`destroy_srq`](Provider::destroy_srq) has returned. The bytes of
///    an inline send are not used after [`post_send`](Provider::post_send) has returned. What a failed post did not
///    take ([`PostError::posted`]) is not used at all.
/// 2. *Completions.* `poll_cq` returns a completion only for a work request that was posted and is done, at most one
///    for each, with its `wr_id`, its queue pair, and of a receive a `byte_len` of at most the length of its entries.
/// 3. *Regions.* The provider holds a share of the registered [`Memory`] until [`deregister`](Provider::deregister) has
///    returned or the provider is dropped, and longer if a device can still reach it. Besides work requests, only peers
///    use the memory: within the registered range, with the rights that were given, and those peers only that
///    [`restrict`](Provider::restrict) leaves. They do not use it after [`invalidate`](Provider::invalidate) or
///    `deregister` has returned. No reference to a region's bytes is ever made for them: see [`crate::mem`].
/// 4. *The end.* After the provider is dropped nothing uses memory that was posted or registered there.
/// 5. *Handles.* A handle names one object. Once that is gone no other object gets it.
///
/// It does not guarantee that a peer or a device writes what it should: any bytes may arrive.
pub unsafe trait Provider: Send + fmt::Debug {
    /// Name, as in `--provider NAME`.
    fn name(&self) -> &'static str;

    /// The device behind a handle; `None` when it was removed.
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo>;

    /// Descriptor of the connection-manager channel.
    fn cm_channel(&self) -> RawFd;

    /// Descriptor of a device's completion channel.
    fn completion_channel(&self, device: DeviceId) -> Result<RawFd>;

    /// When [`Provider::progress`] must be called at the latest.
    fn next_deadline(&self) -> Option<Instant>;

    /// Moves bytes and runs timers. Returns `true` when it stopped at its budget with work left.
    fn progress(&mut self, now: Instant, drive: Drive) -> bool;

    /// Listens on an address; port 0 takes a free one.
    fn listen(&mut self, address: SocketAddr, backlog: u32) -> Result<CmId>;

    /// The address an id is bound to.
    fn local_address(&self, id: CmId) -> Option<SocketAddr>;

    /// Starts resolving a peer's address, which ends in `Resolved` or `ConnectFailed`. The attempt fails if it is not
    /// `Established` by `deadline`.
    fn resolve(&mut self, peer: SocketAddr, deadline: Instant) -> Result<CmId>;

    /// Connects a resolved id; ends in `Established`, `Rejected` or `ConnectFailed`.
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()>;

    /// Accepts a connect request; ends in `Established`, `ConnectFailed` or `Disconnected`.
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()>;

    /// Rejects a connect request; the id is gone afterwards.
    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()>;

    /// Ends a connection: flushes its queues and tells the peer. Calling it again does no harm.
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()>;

    /// Destroys an id and its queue pair.
    fn destroy_id(&mut self, id: CmId, now: Instant);

    /// The next connection-manager event.
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>>;

    /// The next event of a device itself. These events come over the connection-manager channel, so ask for them when
    /// [`Provider::next_cm_event`] has said `None`. At most a thousand are kept for a caller who does not ask. Where
    /// devices have no such events it is always `None`.
    fn next_device_event(&mut self) -> Option<DeviceEvent> {
        None
    }

    /// Registers memory. The region keeps the memory alive until it is deregistered. On devices this **blocks** while the pages
    /// are pinned: about a quarter of a second for a gibibyte, and several times as long when nothing has touched them yet.
    /// For much memory see [`Provider::registrar`].
    fn register(&mut self, device: DeviceId, memory: &Arc<Memory>, access: Access) -> Result<MemoryRegion>;

    /// Takes a region back. No work request may name it any more.
    fn deregister(&mut self, region: MrId) -> Result<()>;

    /// Makes a completion queue. It must have room for every work request of the queue pairs on it.
    fn create_cq(&mut self, device: DeviceId, entries: u32) -> Result<CqId>;

    /// Destroys a completion queue that no queue pair uses.
    fn destroy_cq(&mut self, cq: CqId) -> Result<()>;

    /// Whether a completion queue has failed, such as by an overrun: nothing completes on it any more. Its connections are told that
    /// they have ended; it is to be destroyed, and another one made.
    fn has_failed(&self, cq: CqId) -> bool {
        let _ = cq;
        false
    }

    /// Makes the queue pair of a resolved or requested id.
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId>;

    /// Posts receives.
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError>;

    /// Posts sends and rings the doorbell once.
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<(), PostError>;

    /// Moves up to `max` completions to `out`; returns how many. No system call.
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize>;

    /// Arms a completion queue: its next completion raises one event on the device's completion channel.
    fn req_notify(&mut self, cq: CqId) -> Result<()>;

    /// The next completion queue that had an event.
    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>>;

    /// Calls that acknowledged completion events so far, each for a batch of them (`ibv_ack_cq_events`(3)).
    fn acknowledgements(&self) -> u64 {
        0
    }

    // Not every provider has what follows. Where it is missing, the call is an error that names the provider.

    /// As [`Provider::listen`], with options. Those that the provider cannot follow are ignored, with one line in the log.
    fn listen_with(&mut self, address: SocketAddr, backlog: u32, options: &ListenOptions) -> Result<CmId> {
        let ListenOptions { type_of_service, ack_timeout, .. } = *options;
        let path = PathOptions { type_of_service, ack_timeout, source: Source::Any };
        path.check()?;
        path.note_ignored(self.name());
        if options.ipv6_only.is_some() {
            log::info!("the provider {} has no choice between IPv6 alone and both: ignored", self.name());
        }
        self.listen(address, backlog)
    }

    /// As [`Provider::resolve`], with options. Those that the provider cannot follow are ignored, with one line in the log; a
    /// source that it cannot choose is an error, as the connection would leave from elsewhere.
    fn resolve_with(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        options.check()?;
        if options.source != Source::Any {
            return Err(Error::Unsupported { provider: self.name(), feature: "choice of the source of a connection" });
        }
        options.note_ignored(self.name());
        self.resolve(peer, deadline)
    }

    /// As [`Provider::listen_with`], at an address of any kind.
    fn listen_at(&mut self, place: Place, backlog: u32, options: &ListenOptions) -> Result<CmId> {
        match place {
            Place::Ip(address) => self.listen_with(address, backlog, options),
            Place::Ib(_) => Err(Error::Unsupported { provider: self.name(), feature: IB_ADDRESSES }),
        }
    }

    /// As [`Provider::resolve_with`], for an address of any kind.
    fn resolve_to(&mut self, place: Place, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        match place {
            Place::Ip(address) => self.resolve_with(address, options, deadline),
            Place::Ib(_) => Err(Error::Unsupported { provider: self.name(), feature: IB_ADDRESSES }),
        }
    }

    /// As [`Provider::create_cq`], on one of the device's completion vectors, 0 to
    /// [`Capabilities::completion_vectors`](crate::Capabilities::completion_vectors) - 1. Queues on different vectors raise their events on different processors.
    fn create_cq_on(&mut self, device: DeviceId, entries: u32, vector: u32) -> Result<CqId> {
        if vector > 0 {
            let range = "below the device's completion_vectors";
            return Err(Error::OutOfRange { what: "completion vector", value: vector.into(), range });
        }
        self.create_cq(device, entries)
    }

    /// Registers `len` bytes of a dma-buf from `offset` on, such as memory of a GPU that its driver has exported. Work
    /// requests name the bytes by addresses from `address` on: take one from [`Sge::DEVICE`](crate::Sge::DEVICE) on, where nothing is mapped, so that
    /// small sends are not copied by the processor. The descriptor may be closed afterwards. May block as [`Provider::register`] does.
    fn register_dmabuf(
        &mut self,
        device: DeviceId,
        buffer: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        let _ = (device, buffer, offset, len, address, access);
        Err(Error::Unsupported { provider: self.name(), feature: "regions over a dma-buf" })
    }

    /// Registers memory of a device on other threads, for what takes too long for a turn of the loop. Memory registered in
    /// pieces between turns ([`Provider::register_range`]) does as well, with a key for each piece.
    fn registrar(&self, device: DeviceId) -> Result<Box<dyn Registrar>> {
        let _ = device;
        Err(Error::Unsupported { provider: self.name(), feature: "registration on other threads, nor a need for it" })
    }

    /// Makes a region of what a registrar of this provider's device has registered.
    fn adopt(&mut self, registration: Registration) -> Result<MemoryRegion> {
        let _ = registration;
        Err(Error::Unsupported { provider: self.name(), feature: "registration on other threads" })
    }

    /// What the device really uses on a connection, where it can be asked.
    fn path_of(&self, qp: QpId) -> Result<PathState> {
        let _ = qp;
        Err(Error::Unsupported { provider: self.name(), feature: "path to ask for" })
    }

    /// Takes a connect request, which has no queue pair yet, out of this provider, to be attached to another of the
    /// same kind. The id is gone afterwards. On failure nothing has changed.
    fn detach(&mut self, id: CmId) -> Result<Detached> {
        let _ = id;
        Err(Error::Unsupported { provider: self.name(), feature: HANDING_OVER })
    }

    /// Takes a detached connect request in. Go on as after `ConnectRequest`: make a queue pair and `accept`, or
    /// `reject`. On failure the peer's attempt ends.
    fn attach(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)> {
        let _ = (request, now);
        Err(Error::Unsupported { provider: self.name(), feature: HANDING_OVER })
    }

    /// The device that has an address of this host, from now on ready for [`Provider::register`]. Port and queue pair need not
    /// exist yet. An unspecified address is on no device, but for the embedded provider, which has only one.
    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId> {
        let _ = address;
        Err(Error::Unsupported { provider: self.name(), feature: "devices by address" })
    }

    /// As [`Provider::register`], for a part of the memory. The rest cannot be reached by the region's keys.
    fn register_range(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion> {
        let _ = (device, memory, range, access);
        Err(Error::Unsupported { provider: self.name(), feature: "regions of part of a memory" })
    }

    /// Lets only the peer of `qp` use the region's remote key. To every other peer it is as if there were no such key.
    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<()> {
        let _ = (region, qp);
        Err(Error::Unsupported { provider: self.name(), feature: "regions of one connection" })
    }

    /// Takes a region's remote key back at once; no peer touches the memory after the call. (The kernel's siw may still place
    /// the part of a frame that it was placing on another processor during the call.) The region stays registered
    /// for the program's own work requests, under the same local key. A peer that uses the key afterwards gets the same
    /// answer as for a key that never existed. Calling it again does no harm.
    fn invalidate(&mut self, region: MrId) -> Result<()> {
        let _ = region;
        Err(Error::Unsupported { provider: self.name(), feature: "local invalidation" })
    }

    /// Lets the device hold events of a completion queue back, within [`Capabilities::completion_moderation`](crate::Capabilities::completion_moderation).
    fn moderate_cq(&mut self, cq: CqId, to: Moderation) -> Result<()> {
        let _ = (cq, to);
        Err(Error::Unsupported { provider: self.name(), feature: "completion moderation" })
    }

    /// Makes a shared receive queue for up to `max_wr` receives. A receive counts from its post until its completion
    /// is polled.
    fn create_srq(&mut self, device: DeviceId, max_wr: u32) -> Result<SrqId> {
        let _ = (device, max_wr);
        Err(Error::Unsupported { provider: self.name(), feature: "shared receive queues" })
    }

    /// As [`Provider::create_srq`], for receives of up to `max_sge` scatter/gather entries; 0 for as many as the device has. With
    /// 1 the entries of an adapter's queue are a quarter as long.
    fn create_srq_of(&mut self, device: DeviceId, max_wr: u32, max_sge: u32) -> Result<SrqId> {
        let _ = max_sge;
        self.create_srq(device, max_wr)
    }

    /// Destroys a shared receive queue that no queue pair uses. Receives that are still posted are dropped without
    /// completion. Its completion queues can only be destroyed afterwards.
    fn destroy_srq(&mut self, srq: SrqId) -> Result<()> {
        let _ = srq;
        Err(Error::Unsupported { provider: self.name(), feature: "shared receive queues" })
    }

    /// Posts receives for whichever queue pair needs them first.
    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        let _ = (srq, chain);
        let error = Error::Unsupported { provider: self.name(), feature: "shared receive queues" };
        Err(PostError { posted: 0, error })
    }

    /// As [`Provider::create_qp`], with receives from a shared queue. `attr.max_recv_wr` is ignored, and `attr.recv_cq`
    /// must have room for the whole shared queue.
    fn create_qp_with_srq(&mut self, id: CmId, attr: &QpAttr, srq: SrqId) -> Result<QpId> {
        let _ = (id, attr, srq);
        Err(Error::Unsupported { provider: self.name(), feature: "shared receive queues" })
    }

    /// Asks for one [`crate::DeviceEventKind::SharedReceivesLow`] when the shared queue holds fewer than `limit`
    /// receives: 1 to its `max_wr`, or 0 to ask no more. With fewer in it already, the event comes at once or with the
    /// next receive.
    fn arm_srq(&mut self, srq: SrqId, limit: u32) -> Result<()> {
        let _ = (srq, limit);
        Err(Error::Unsupported { provider: self.name(), feature: "limits of shared receive queues" })
    }

    /// Makes an id for datagrams at an address of this host, which names a device; port 0 takes a free one. Make its
    /// queue pair; then it may join groups. Peers cannot find it by its address; to be found, listen with another id.
    fn bind_datagram(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId)> {
        let _ = address;
        Err(Error::Unsupported { provider: self.name(), feature: DATAGRAMS })
    }

    /// Accepts a connect request for datagrams on behalf of `qp`, of the same device. The id is gone afterwards,
    /// whether or not that worked, since no more events of the peer will come.
    fn answer_datagram(&mut self, id: CmId, qp: QpId, private_data: &[u8], now: Instant) -> Result<()> {
        let _ = (id, qp, private_data, now);
        Err(Error::Unsupported { provider: self.name(), feature: DATAGRAMS })
    }

    /// As [`Provider::listen`], for datagrams. A connect request asks where to send datagrams to; `accept` tells the
    /// peer and ends in `Established`. Where the peer sends from is known when its first datagram has come.
    fn listen_datagram(&mut self, address: SocketAddr, backlog: u32) -> Result<CmId> {
        let _ = (address, backlog);
        Err(Error::Unsupported { provider: self.name(), feature: DATAGRAMS })
    }

    /// As [`Provider::resolve`], for datagrams to `peer`, which may be a multicast group; `from` is an address of this
    /// host, or `None` for any that leads there. It ends in `Resolved` or `ConnectFailed`. Then `connect`, with or
    /// without a queue pair of its own, which ends in `Reached`, `Rejected` or `ConnectFailed`. For a group, make the
    /// queue pair and `join` instead.
    fn resolve_datagram(&mut self, peer: SocketAddr, from: Option<SocketAddr>, deadline: Instant) -> Result<CmId> {
        let _ = (peer, from, deadline);
        Err(Error::Unsupported { provider: self.name(), feature: DATAGRAMS })
    }

    /// Joins a multicast group with a datagram id that was bound, or resolved for a group, and has a queue pair; ends
    /// in `Joined` or `JoinFailed`.
    fn join(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let _ = (id, group);
        Err(Error::Unsupported { provider: self.name(), feature: "multicast groups" })
    }

    /// Leaves a group, or gives up joining it.
    fn leave(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let _ = (id, group);
        Err(Error::Unsupported { provider: self.name(), feature: "multicast groups" })
    }

    /// Number of a queue pair, which a peer needs to send datagrams to it.
    fn qp_number(&self, qp: QpId) -> Result<u32> {
        let _ = qp;
        Err(Error::Unsupported { provider: self.name(), feature: DATAGRAMS })
    }

    /// Makes an address handle for the way to a port, to send datagrams there from any queue pair of `device`.
    fn create_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId> {
        let _ = (device, route);
        Err(Error::Unsupported { provider: self.name(), feature: DATAGRAMS })
    }

    /// Destroys an address handle. Datagrams that are still to be sent with it may be lost.
    fn destroy_address(&mut self, address: AddressId) -> Result<()> {
        let _ = address;
        Err(Error::Unsupported { provider: self.name(), feature: DATAGRAMS })
    }

    /// The way back to the sender of a datagram; `header` is the first [`crate::datagram::GRH_LEN`] bytes of its
    /// receive. A datagram to a group names no address of this host, so there is no way back, which is an error.
    fn route_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
        let _ = (id, received, header);
        Err(Error::Unsupported { provider: self.name(), feature: DATAGRAMS })
    }

    /// When something last came for a connected queue pair, unfinished messages included: the `now` of the call that read it,
    /// first of the one that connected it. A provider may wait for a whole frame or some hundred octets of one. `None` where the device does not tell, and before.
    fn last_heard(&self, qp: QpId) -> Option<Instant> {
        let _ = qp;
        None
    }

    /// Whether something has come for a queue pair that is not read and processed yet. While that is so, an old
    /// [`Provider::last_heard`] does not mean that the peer is silent. It is complete when [`Provider::progress`] has
    /// returned from a full round ([`Drive::Full`]), for what had come before that was called; every queue pair that
    /// has something is read from in each full round, whatever the others have. `false` always where the device does
    /// not tell.
    fn has_unread(&self, qp: QpId) -> bool {
        let _ = qp;
        false
    }

    /// Allows the extensions of RFC 7306 (immediate data, atomics) on a connection. iWARP has no negotiation for them,
    /// so the programs must agree. Call it on both sides before the first of them is used.
    fn enable_extensions(&mut self, qp: QpId) -> Result<()> {
        let _ = qp;
        Err(Error::Unsupported { provider: self.name(), feature: "extensions to agree on" })
    }
}
