//! The seam between the loop and the hardware: [`Provider`] and its contract. `docs/writing-a-provider.md` shows how to write one.
//!
//! # Contract
//!
//! *Thread.* One thread drives a provider. No call waits for a peer, but those that register memory block while a device pins
//! its pages. Time is an argument and never runs backwards.
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
//! receives before `connect` and `accept`. [`Posted`] says whether a poll may find what was posted. It is a hint: a provider that
//! completes in [`Provider::post_send`] and returns [`Posted::Pending`] delays the user, who finds these completions when it polls next,
//! at the latest after it has armed the queue. [`ImmediateSends::send_now`] sends behind all sends that were posted to the queue pair
//! before, and in front of all that are posted afterwards. It adds no work request: nothing completes, and no place in the send queue
//! is taken.
//!
//! *Teardown.* [`Provider::disconnect`] flushes: every work request that is not done completes, with
//! [`crate::WcStatus::Flushed`] if it was not started; a receive that is posted afterwards need not complete. What was handed to the network before is still delivered to the
//! peer if possible. [`Provider::destroy_id`] drops the queue pair and the work requests that are left on it. The completions that are
//! in its completion queue by then may still be polled, and name that queue pair or none (siw flushes the queue pair for that); no
//! others come. A device may refuse: then its user never touches again what was posted there. A receive that the queue
//! pair had taken from a shared queue and not filled completes as flushed, or is posted to the shared queue again. `Disconnected`
//! may be delivered late, twice or never.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

pub use crate::caps::DeviceInfo;
use crate::cm::{CmEvent, ConnectParam, ListenOptions, PathOptions};
use crate::cq::{CqAttr, Notify};
use crate::error::Result;
use crate::handle::{CmId, MrId, QpId};
pub use crate::handle::{CqId, DeviceId};
use crate::mem::Memory;
use crate::mr::{Access, MemoryRegion};
use crate::qp::QpAttr;
use crate::roles::{
    Adapter, Datagrams, DeviceEvents, Extensions, ForeignMemory, Handover, ImmediateSends, Liveness,
    OffLoopRegistration, Paths, RemoteKeys, SharedMemory, SharedReceives,
};
use crate::wc::WorkCompletion;
pub use crate::wr::{PostError, Posted};
use crate::wr::{RecvWr, SendWr};

/// A descriptor of a provider that becomes readable when there are events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Events of the connection manager, and of devices.
    ConnectionManager,
    /// Events of the completion queues of a device.
    Completions(DeviceId),
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

/// A source of queue pairs: see the [module](self) for the contract.
///
/// # Safety
/// Programs give memory away when they post a work request or register a region, and take it back, as references, when
/// the provider says so. An implementation, one that forwards to another included, therefore guarantees, also for the roles that it
/// returns:
///
/// 1. *Work requests.* The provider and its device use the bytes that a work request's entries name from its post until
///    it is done, and at no other time. They only read them for sends and writes, and only write them for receives,
///    reads and atomics. A work request is done when [`poll_cq`](Provider::poll_cq) has returned its completion; an
///    unsignaled send or write, when it has returned the completion of a later send or write of the same queue pair;
///    each one at the latest when [`destroy_id`](Provider::destroy_id) of its queue pair has succeeded; a receive of a
///    shared queue that no queue pair has taken, when [`destroy_srq`](SharedReceives::destroy_srq) has succeeded. The bytes of
///    an inline send are not used after [`post_send`](Provider::post_send) has returned, nor those of an immediate send after
///    [`send_now`](ImmediateSends::send_now) has. What a failed post did not take ([`PostError::posted`]) is not used at all.
/// 2. *Completions.* `poll_cq` returns a completion only for a work request that was posted and is done, at most one
///    for each, with its `wr_id` and its queue pair, unless that is destroyed. The `byte_len` of a receive that has succeeded is at most the length of
///    its entries; that of a receive which a Write with immediate data has taken
///    ([`WcOpcode::RecvWriteWithImmediate`](crate::WcOpcode::RecvWriteWithImmediate)) is the length of the write, and says
///    nothing of the entries, which are not written.
/// 3. *Order.* Receives that were posted to a queue pair complete in the order of their posts. Of the sends and writes of
///    a queue pair, none completes before an earlier one; a read or an atomic completes after the sends and writes before
///    it, and may complete after those behind it. Receives of a shared queue complete in any order.
/// 4. *Regions.* The provider holds a share of the registered [`Memory`] until [`deregister`](Provider::deregister) has
///    succeeded or the provider is dropped, and longer if a device can still reach it. Besides work requests, only peers
///    use the memory: within the registered range, with the rights that were given, and those peers only that
///    [`restrict`](RemoteKeys::restrict) leaves. They do not use it after [`invalidate`](RemoteKeys::invalidate) or
///    `deregister` has succeeded; on a device with [`Features::LATE_PLACEMENT`](crate::Features::LATE_PLACEMENT) the part of a
///    frame that was being placed at that moment is still written. No reference to a region's bytes is ever made for them: see
///    [`crate::mem`].
/// 5. *The end.* After the provider is dropped nothing uses memory that was posted or registered there, unless a device refuses
///    to give it back: then `destroy_id`, `destroy_srq` or `deregister` has failed before, or was not called, and the memory is never
///    freed.
/// 6. *Handles.* A handle names one object. Once that is gone no other object gets it.
///
/// It does not guarantee that a peer or a device writes what it should: any bytes may arrive.
pub unsafe trait Provider: Send + fmt::Debug {
    /// Name, as in `--provider NAME`.
    fn name(&self) -> &'static str;

    // Devices.

    /// The device behind a handle; `None` when it was removed.
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo>;

    /// The device that has an address of this host, from now on ready for [`Provider::register`]. Port and queue pair need not
    /// exist yet. An unspecified address is on no device, but for providers that have only one.
    ///
    /// # Errors
    /// No device of this provider has the address, or its port is down; the error names the reason.
    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId>;

    // Channels and time.

    /// Returns the descriptor of a channel, which lives as long as the provider. Each call returns the same one.
    ///
    /// # Errors
    /// The device of the channel is gone.
    fn channel(&self, channel: Channel) -> Result<RawFd>;

    /// Returns the time at which [`Provider::progress`] must be called at the latest; `None` if no timer runs.
    fn next_deadline(&self) -> Option<Instant>;

    /// Moves bytes and runs timers. Returns `true` when it stopped at its budget with work left.
    fn progress(&mut self, now: Instant, drive: Drive) -> bool;

    // Connections.

    /// Listens on an address; port 0 takes a free one. Options that the provider cannot follow are ignored, with one line in the log.
    ///
    /// # Errors
    /// [`Error::Listen`](crate::Error::Listen) if the address is in use or is not of this host.
    fn listen(&mut self, address: SocketAddr, options: &ListenOptions) -> Result<CmId>;

    /// Returns the address that an id is bound to: for a listener with its port. `None` if there is no such id, or no address is known.
    fn local_address(&self, id: CmId) -> Option<SocketAddr>;

    /// Starts resolving a peer's address, which ends in `Resolved` or `ConnectFailed`. The attempt fails if it is not
    /// `Established` by `deadline`. Options that the provider cannot follow are ignored, with one line in the log.
    ///
    /// # Errors
    /// A source that the provider cannot choose is an error, as the connection would leave from elsewhere.
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId>;

    /// Connects a resolved id that has a queue pair; ends in `Established`, `Rejected` or `ConnectFailed`.
    ///
    /// # Errors
    /// [`Error::PrivateDataTooLong`](crate::Error::PrivateDataTooLong); [`Error::InvalidState`](crate::Error::InvalidState) for an id
    /// that is not resolved, or has no queue pair. Nothing has changed then.
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()>;

    /// Accepts a connect request whose id has a queue pair; ends in `Established`, `ConnectFailed` or `Disconnected`.
    ///
    /// # Errors
    /// As [`Provider::connect`], for an id that is not of a connect request, or whose peer has gone meanwhile.
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()>;

    /// Rejects a connect request; the id and its queue pair are gone afterwards.
    ///
    /// # Errors
    /// As [`Provider::accept`]. The id is not gone then.
    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()>;

    /// Ends a connection, or an attempt: flushes its queues and notifies the peer. Calling it again does no harm.
    ///
    /// # Errors
    /// [`Error::InvalidState`](crate::Error::InvalidState) for a listener.
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()>;

    /// Destroys an id and its queue pair. The id is gone afterwards, whether or not that worked; calling it again does no harm.
    ///
    /// # Errors
    /// The device keeps the queue pair: it may go on using the memory of its work requests for as long as the process lives. None
    /// of them is done.
    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()>;

    /// Returns the next connection-manager event; `None` if there is none at the moment.
    ///
    /// # Errors
    /// The channel has failed. The failure of one connection is an event of its id instead.
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>>;

    // Memory.

    /// Registers a part of a memory. The rest cannot be reached by the region's keys. The region keeps the memory alive until it is
    /// deregistered. On devices this **blocks** while the pages are pinned: about a quarter of a second for a gibibyte, and several
    /// times as long when nothing has touched them yet. For much memory see [`OffLoopRegistration`].
    fn register(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion>;

    /// Takes a region back. No work request may name it any more.
    ///
    /// # Errors
    /// The device keeps the region: peers may go on using the memory. The provider keeps its share of the memory and the handle,
    /// so that the call may be repeated.
    fn deregister(&mut self, region: MrId) -> Result<()>;

    // Queues.

    /// Makes a completion queue. It must have room for every work request of the queue pairs on it.
    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId>;

    /// Destroys a completion queue that no queue pair uses, with the completions that were not polled.
    ///
    /// # Errors
    /// [`Error::InvalidState`](crate::Error::InvalidState) if a queue pair uses it.
    fn destroy_cq(&mut self, cq: CqId) -> Result<()>;

    /// Makes the queue pair of a resolved or requested id, which has none yet.
    ///
    /// # Errors
    /// [`Error::InvalidState`](crate::Error::InvalidState) for another id; [`Error::OutOfRange`](crate::Error::OutOfRange) for a depth
    /// of 0 or past the device's limit, and for a completion queue without room for both depths. Nothing has changed then.
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId>;

    // The data path.

    /// Posts receives, also before the connection is up.
    ///
    /// # Errors
    /// [`Error::QueueFull`](crate::Error::QueueFull) is backpressure, and goes away when a completion is polled. Any other error is
    /// that of a connection that has to end. See [`PostError::posted`].
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError>;

    /// Posts sends of a connection that is up, and rings the doorbell once. Says whether the call has completed something already; after
    /// a failure it may have.
    ///
    /// # Errors
    /// As [`Provider::post_recv`].
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError>;

    /// Appends up to `max` completions to `out`; returns how many. 0 means that the queue is empty. No system call. If `out` is empty, a
    /// provider in software may exchange its buffer for that of the queue, so that nothing is copied: then the capacity of `out` changes.
    /// The completions are the caller's, and not lent: whoever handles them needs the provider.
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize>;

    /// Arms a completion queue: its next completion of that kind raises one event on the device's completion channel.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for solicited completions on a device without
    /// [`Features::SOLICITED_EVENTS`](crate::Features::SOLICITED_EVENTS).
    fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()>;

    /// Returns the next completion queue that had an event since it was armed; `None` if there is none at the moment.
    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>>;

    // Roles. A provider that does not have one returns `None`; so does one that forwards to such a provider.

    /// Receives that several queue pairs share.
    fn shared_receives(&mut self) -> Option<&mut dyn SharedReceives>;

    /// Remote keys that are taken back while their region stays registered.
    fn remote_keys(&mut self) -> Option<&mut dyn RemoteKeys>;

    /// The time at which something last came from a peer.
    fn liveness(&self) -> Option<&dyn Liveness>;

    /// Extensions that both programs must agree on.
    fn extensions(&mut self) -> Option<&mut dyn Extensions>;

    /// Connect requests that another provider of the same kind accepts.
    fn handover(&mut self) -> Option<&mut dyn Handover>;

    /// Registration on other threads.
    fn off_loop_registration(&mut self) -> Option<&mut dyn OffLoopRegistration>;

    /// Memory that is not the process's, such as that of a GPU.
    fn foreign_memory(&mut self) -> Option<&mut dyn ForeignMemory>;

    /// Datagrams.
    fn datagrams(&mut self) -> Option<&mut dyn Datagrams>;

    /// What queue pairs use to reach their peers.
    fn paths(&self) -> Option<&dyn Paths>;

    /// States of RDMA devices.
    fn adapter(&self) -> Option<&dyn Adapter>;

    /// Sends that end with their post.
    fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends>;

    /// Connections within the host, in memory that both processes map.
    fn shared_memory(&mut self) -> Option<&mut dyn SharedMemory>;

    /// Events of devices that belong to no connection.
    fn device_events(&mut self) -> Option<&mut dyn DeviceEvents>;
}
