//! The trait between the event loop and the hardware: [`Provider`] and its contract. `docs/writing-a-provider.md` shows
//! how to write a provider.
//!
//! # Contract
//!
//! *Thread.* One thread drives a provider. No call waits for a peer, but those that register memory block while a
//! device pins its pages. Time is an argument and never runs backwards.
//!
//! *Channels.* Each channel is one descriptor for an edge-triggered registration. It becomes readable when an event has
//! arrived since its getter last returned `None`. Spurious edges are allowed, lost ones are not. Call a getter until it
//! returns `None`. A getter copies an event and acknowledges it before it returns, so destroying an object never waits
//! for the caller.
//!
//! *Arming.* [`Provider::req_notify`] requests one event for the next completion of the completion queue. A completion
//! that is already in the queue raises no event: arm, poll once more, and only then sleep.
//!
//! *Driving.* [`Provider::progress`] moves bytes if the data path runs on the caller's thread, and runs the provider's
//! timers; on hardware it does nothing. Call it when a channel had an edge, when [`Provider::next_deadline`] has
//! passed, while spinning, and again soon if it returned true.
//!
//! *Order.* Completions of one send queue are reported in posting order, and so are those of one receive queue. An
//! unsignaled send is done when a later send of its queue completes. Reads and atomics are an exception on some devices
//! (siw), where later sends may complete before them: signal each of them, and wait for its own completion. A receive
//! may complete before `Established` is delivered.
//!
//! *Posting.* A chain is posted from front to back; after an error, [`PostError::posted`] is the number of work
//! requests that were posted. Post receives before `connect` and `accept`. [`Posted`] says whether a poll may find
//! completions of the chain. It is a hint: if a provider completes work requests in [`Provider::post_send`] and returns
//! [`Posted::Pending`], the program only finds these completions when it polls next, at the latest after it has armed
//! the queue. [`ImmediateSends::send_now`] sends behind all sends that were posted to the queue pair before, and in
//! front of all that are posted afterwards. It adds no work request: nothing completes, and no entry of the send queue
//! is taken.
//!
//! *Teardown.* [`Provider::disconnect`] flushes: each work request that is not done completes, with
//! [`crate::WcStatus::Flushed`] if it was not started; a receive that is posted afterwards need not complete. Messages
//! that were handed to the network before are still delivered to the peer if possible. [`Provider::destroy_id`] drops
//! the queue pair and its remaining work requests. The completions that are in its completion queue by then may still
//! be polled, and name that queue pair or none (siw flushes the queue pair when it destroys it); no others follow. A
//! device may refuse: then the program must never again use the memory that was posted there. A receive that the queue
//! pair had taken from a shared queue and not filled completes as flushed, or returns to the shared queue.
//! `Disconnected` may be delivered late, twice or never.

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
    Adapter, Datagrams, DeviceEvents, Exchange, Extensions, ForeignMemory, Handover, ImmediateSends, Liveness,
    OffLoopRegistration, Paths, RemoteKeys, SharedMemory, SharedReceives,
};
use crate::wc::WorkCompletion;
pub use crate::wr::{PostError, Posted};
use crate::wr::{RecvWr, SendWr};

/// A source of randomness, which fills the slice that it gets.
pub type Entropy = Box<dyn FnMut(&mut [u8]) + Send>;

/// A descriptor of a provider, which becomes readable when there are events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// The events of the connection manager, and of devices.
    ConnectionManager,
    /// The events of the completion queues of a device.
    Completions(DeviceId),
}

/// The reason for a call of [`Provider::progress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drive {
    /// An edge, a deadline, or remaining work: the provider looks at everything that is ready.
    Full,
    /// One round of a busy poll: the provider may look at the busiest connections only, if it looks at all of them
    /// every few rounds.
    Spin,
}

/// A source of queue pairs. The [module](self) has the contract.
///
/// # Safety
/// A program gives up the use of memory when it posts a work request or registers a region, and uses the memory again,
/// by references, when the provider allows it. So an implementation, including one that forwards to another, guarantees
/// the following, also for the roles that it returns:
///
/// 1. *Work requests.* The provider and its device use the bytes that the entries of a work request name from its post
///    until it is done, and at no other time. They only read them for sends and writes, and only write them for
///    receives, reads and atomics. A work request is done when [`poll_cq`](Provider::poll_cq) has returned its
///    completion; an unsignaled send or write, when it has returned the completion of a later send or write of the same
///    queue pair; each one at the latest when [`destroy_id`](Provider::destroy_id) of its queue pair has succeeded; a
///    receive of a shared queue that no queue pair has taken, when [`destroy_srq`](SharedReceives::destroy_srq) has
///    succeeded. The bytes of an inline send are not used after [`post_send`](Provider::post_send) has returned, nor
///    those of an immediate send after [`send_now`](ImmediateSends::send_now) has. The bytes of work requests that a
///    failed post has not posted ([`PostError::posted`]) are not used at all.
/// 2. *Completions.* `poll_cq` returns a completion only for a work request that was posted and is done, at most one
///    for each, with its `wr_id` and with its queue pair unless that is destroyed. The `byte_len` of a receive that has
///    succeeded is at most the length of its entries. The exception is a receive that a Write with immediate data has
///    consumed ([`WcOpcode::RecvWriteWithImmediate`](crate::WcOpcode::RecvWriteWithImmediate)): its `byte_len` is the
///    length of the write, and its entries are not written.
/// 3. *Order.* Receives that were posted to a queue pair complete in the order of their posts. Of the sends and writes of
///    a queue pair, none completes before an earlier one; a read or an atomic completes after the sends and writes before
///    it, and may complete after those behind it. Receives of a shared queue complete in any order.
/// 4. *Regions.* The provider holds a share of the registered [`Memory`] until [`deregister`](Provider::deregister) has
///    succeeded or the provider is dropped, and longer if a device can still access it. Besides work requests, only
///    peers use the memory: within the registered range, with the granted rights, and only those peers that
///    [`restrict`](RemoteKeys::restrict) allows. They do not use it after [`invalidate`](RemoteKeys::invalidate) or
///    `deregister` has succeeded; on a device with [`Features::LATE_PLACEMENT`](crate::Features::LATE_PLACEMENT) the
///    part of a frame that was being placed at that moment is still written. No reference to the bytes of a region is
///    ever made for peers: see [`crate::mem`].
/// 5. *The end.* After the provider is dropped, nothing uses memory that was posted or registered there. The exception
///    is memory that a device refuses to release: then `destroy_id`, `destroy_srq` or `deregister` has failed before,
///    or was not called, and the memory is never freed.
/// 6. *Handles.* A handle names one object. After the object is destroyed, no other object gets the handle.
///
/// An implementation does not guarantee that a peer or a device writes valid data: any bytes may arrive.
pub unsafe trait Provider: Send + fmt::Debug {
    /// Returns the name of the provider, as in `--provider NAME`.
    fn name(&self) -> &'static str;

    // Devices.

    /// Returns the device with this handle; `None` if it was removed.
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo>;

    /// Returns the device that has an address of this host, and makes it ready for [`Provider::register`]. No port or
    /// queue pair needs to exist yet. An unspecified address belongs to no device, except with providers that have only
    /// one device.
    ///
    /// # Errors
    /// No device of this provider has the address, or its port is down; the error names the reason.
    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId>;

    // Channels and time.

    /// Returns the descriptor of a channel, which lives as long as the provider. Each call returns the same one.
    ///
    /// # Errors
    /// The device of the channel was removed.
    fn channel(&self, channel: Channel) -> Result<RawFd>;

    /// Returns the time by which [`Provider::progress`] must be called; `None` if no timer runs.
    fn next_deadline(&self) -> Option<Instant>;

    /// Moves bytes and runs timers. Returns true if it has used up its budget and work is left.
    fn progress(&mut self, now: Instant, drive: Drive) -> bool;

    // Connections.

    /// Listens on an address; port 0 selects a free port. The provider ignores options that it cannot follow, and logs
    /// them in one line.
    ///
    /// # Errors
    /// [`Error::Listen`](crate::Error::Listen) if the address is in use or is not of this host.
    fn listen(&mut self, address: SocketAddr, options: &ListenOptions) -> Result<CmId>;

    /// Returns the address that an id is bound to, for a listener with its port. `None` if there is no such id, or its
    /// address is unknown.
    fn local_address(&self, id: CmId) -> Option<SocketAddr>;

    /// Starts to resolve a peer's address; ends in `Resolved` or `ConnectFailed`. The attempt fails if it is not
    /// `Established` by `deadline`. The provider ignores options that it cannot follow, and logs them in one line.
    ///
    /// # Errors
    /// The provider cannot use the source that the options name, so the connection would leave from elsewhere.
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
    /// As [`Provider::connect`]; also for an id that is not of a connect request, or whose peer is gone.
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()>;

    /// Rejects a connect request. The id and its queue pair are destroyed afterwards.
    ///
    /// # Errors
    /// As [`Provider::accept`]. The id is not destroyed then.
    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()>;

    /// Ends a connection, or an attempt: flushes its queues and notifies the peer. Further calls have no effect.
    ///
    /// # Errors
    /// [`Error::InvalidState`](crate::Error::InvalidState) for a listener.
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()>;

    /// Destroys an id and its queue pair. The id is invalid afterwards, even after an error. Further calls have no
    /// effect.
    ///
    /// # Errors
    /// The device has not released the queue pair, and may use the memory of its work requests for as long as the
    /// process lives. None of them is done.
    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()>;

    /// Returns the next connection-manager event; `None` if there is none at the moment.
    ///
    /// # Errors
    /// The channel has failed. The failure of one connection is an event of its id instead.
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>>;

    // Memory.

    /// Registers a part of a memory. The keys of the region give access to this part only. The region keeps the memory
    /// alive until it is deregistered. On devices this **blocks** while the pages are pinned: about 250 ms per GiB, and
    /// several times as long if nothing has touched the pages yet. For much memory see [`OffLoopRegistration`].
    fn register(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion>;

    /// Deregisters a region. No outstanding work request may name it.
    ///
    /// # Errors
    /// The device has not released the region, and peers may still use the memory. The provider keeps its share of the
    /// memory and the handle, so the call may be repeated.
    fn deregister(&mut self, region: MrId) -> Result<()>;

    // Queues.

    /// Creates a completion queue. It must have room for all work requests of its queue pairs.
    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId>;

    /// Destroys a completion queue that no queue pair uses. Completions in it are dropped.
    ///
    /// # Errors
    /// [`Error::InvalidState`](crate::Error::InvalidState) if a queue pair uses it.
    fn destroy_cq(&mut self, cq: CqId) -> Result<()>;

    /// Creates the queue pair of an id that is resolved or of a connect request, and has none yet.
    ///
    /// # Errors
    /// [`Error::InvalidState`](crate::Error::InvalidState) for another id;
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) for a depth of 0 or past the device's limit, and for a
    /// completion queue without room for both depths. Nothing has changed then.
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId>;

    // The data path.

    /// Posts receives, which is possible before the connection is established.
    ///
    /// # Errors
    /// [`Error::QueueFull`](crate::Error::QueueFull) is backpressure, and ends when a completion is polled. After any
    /// other error the connection must be ended. See [`PostError::posted`].
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError>;

    /// Posts sends on an established connection, and rings the doorbell once. Returns whether the call may have
    /// completed a work request already; after an error it may have, too.
    ///
    /// # Errors
    /// As [`Provider::post_recv`].
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError>;

    /// Appends up to `max` completions to `out`, without a system call. Returns their number; 0 means that the queue is
    /// empty. If `out` is empty, a provider in software may exchange the buffer of `out` for that of the queue, to save
    /// a copy: then the capacity of `out` changes. The completions belong to the caller and are not borrowed from the
    /// provider, because the caller needs the provider to process them.
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize>;

    /// Arms a completion queue: its next completion of the given kind raises one event on the completion channel of the
    /// device.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for solicited completions on a device without
    /// [`Features::SOLICITED_EVENTS`](crate::Features::SOLICITED_EVENTS).
    fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()>;

    /// Returns the next completion queue that had an event since it was armed; `None` if there is none at the moment.
    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>>;

    // Roles. A provider returns `None` for a role that it does not have. So does one that forwards to such a provider.

    /// Returns the role of receives that several queue pairs share.
    fn shared_receives(&mut self) -> Option<&mut dyn SharedReceives>;

    /// Returns the role of remote keys that can be invalidated while their region stays registered.
    fn remote_keys(&mut self) -> Option<&mut dyn RemoteKeys>;

    /// Returns the role that reports when a peer was last heard from.
    fn liveness(&self) -> Option<&dyn Liveness>;

    /// Returns the role of extensions that both programs must agree on.
    fn extensions(&mut self) -> Option<&mut dyn Extensions>;

    /// Returns the role of connect requests that another provider of the same kind accepts.
    fn handover(&mut self) -> Option<&mut dyn Handover>;

    /// Returns the role of registration on other threads.
    fn off_loop_registration(&mut self) -> Option<&mut dyn OffLoopRegistration>;

    /// Returns the role of memory outside the process, such as that of a GPU.
    fn foreign_memory(&mut self) -> Option<&mut dyn ForeignMemory>;

    /// Returns the role of datagrams.
    fn datagrams(&mut self) -> Option<&mut dyn Datagrams>;

    /// Returns the role of the paths of queue pairs.
    fn paths(&self) -> Option<&dyn Paths>;

    /// Returns the role of the states of RDMA devices.
    fn adapter(&self) -> Option<&dyn Adapter>;

    /// Returns the role of sends that are done when they are posted.
    fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends>;

    /// Returns the role of connections within the host, in memory that both processes map.
    fn shared_memory(&mut self) -> Option<&mut dyn SharedMemory>;

    /// Returns the role of connecting without a connection manager.
    fn exchange(&mut self) -> Option<&mut dyn Exchange>;

    /// Returns the role of device events that belong to no connection.
    fn device_events(&mut self) -> Option<&mut dyn DeviceEvents>;
}
