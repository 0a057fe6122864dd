//! The trait between the event loop and the hardware: [`Provider`] and its contract. `docs/writing-a-provider.md` shows
//! how to write a provider.
//!
//! # Contract
//!
//! *Thread.* One thread drives a provider. No call waits for a peer. With shared memory, a hostile process of the same
//! user can make calls wait (`docs/guide/same-host.md`). A call that registers memory blocks while the device pins the
//! pages. Time is an argument and never runs backwards.
//!
//! *Channels.* A channel is a descriptor that the program registers edge-triggered, for example with epoll. It becomes
//! readable when an event arrives. The program then reads the events with a getter, such as
//! [`Provider::next_cm_event`], until the getter returns `None`. An event that arrives later makes the channel readable
//! again. Spurious edges are allowed, lost edges are not. A getter copies an event and acknowledges it before it
//! returns. So no call that destroys an object waits for the program to acknowledge events.
//!
//! *Arming.* [`Provider::req_notify`] requests one event for the next completion of the completion queue. A completion
//! that is already in the queue raises no event: arm the queue, poll it once more, and only then sleep.
//!
//! *Driving.* [`Provider::progress`] runs the provider's timers. It also moves bytes if the data path runs on the
//! caller's thread; on hardware, the device moves the bytes. Call `progress` when a channel had an edge, when
//! [`Provider::next_deadline`] has passed, and while spinning. Call it again soon if it returned true.
//!
//! *Order.* Completions of one send queue are reported in posting order. So are the completions of one receive queue.
//! An unsignaled send is done when a later send of its queue completes. Reads and atomics are an exception on some
//! devices (siw), where later sends may complete before them: signal each of them, and wait for its own completion. A
//! receive may complete before `Established` is delivered.
//!
//! *Posting.* A chain is posted from front to back. After an error, [`PostError::posted`] is the number of work
//! requests that were posted. Post receives before `connect` and `accept`.
//!
//! [`Posted`] is a hint about completions of the chain. A provider may complete work requests in
//! [`Provider::post_send`] although it returns [`Posted::Pending`]. The program then finds these completions when it
//! polls next, at the latest after it has armed the queue.
//!
//! A message of [`ImmediateSends::send_now`] is sent after all sends that were posted to the queue pair earlier, and
//! before all sends that are posted later. It is no work request: it has no completion, and occupies no entry of the
//! send queue.
//!
//! *Teardown.* [`Provider::disconnect`] flushes: each outstanding work request completes, with
//! [`crate::WcStatus::Flushed`] if it was not started. A receive that is posted afterwards need not complete. Messages
//! that were passed to the network earlier are still delivered to the peer if possible.
//!
//! [`Provider::destroy_id`] drops the queue pair and its remaining work requests. Completions of the queue pair that
//! are already in the completion queue when the call returns may still be polled. They include the completions of work
//! requests that siw flushes during the call. Each of these completions names the destroyed queue pair or none. No
//! other completions of the queue pair follow. A device may refuse to destroy the queue pair: then the program must
//! never again use the memory that was posted to it. A receive that the queue pair had consumed from a shared queue and
//! not filled completes as flushed, or returns to the shared queue.
//!
//! `Disconnected` may be delivered late, twice or never.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

pub use crate::caps::DeviceInfo;
use crate::cm::{CmEvent, ConnectParam, ListenParam, PathOptions};
use crate::cq::{CqAttr, Notify};
use crate::error::Result;
use crate::handle::{CmId, MrId, QpId};
pub use crate::handle::{CqId, DeviceId};
use crate::mem::Memory;
use crate::mr::{Access, MemoryRegion};
use crate::qp::QpAttr;
use crate::roles::{
    Adapter, Datagrams, DeviceEvents, Exchange, Extensions, ForeignMemory, Handover, ImmediateSends, Liveness,
    OffLoopRegistration, RemoteKeys, SharedMemory, SharedReceives,
};
use crate::wc::WorkCompletion;
pub use crate::wr::{PostError, Posted};
use crate::wr::{RecvWr, SendWr};

/// A source of random bytes: it fills the slice that it is called with.
pub type Entropy = Box<dyn FnMut(&mut [u8]) + Send>;

/// A descriptor of a provider, which becomes readable when events arrive.
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
    /// An edge, a deadline, or remaining work. The provider processes everything that is ready.
    Full,
    /// One round of a busy poll. To save time, the provider may process only the busiest connections, if it processes
    /// all of them every few rounds.
    Spin,
}

/// The devices of one kind, and the operations on them. The [module](self) has the contract.
///
/// # Safety
/// A program stops using memory through references when it posts a work request or registers a region. It uses the
/// memory through references again when the work request is done, or when peers cannot use the region any more. So an
/// implementation guarantees the following. This also applies to an implementation that forwards calls to another
/// provider, and to the roles that an implementation returns:
///
/// 1. *Work requests.* The entries of a work request name bytes in memory. The provider and its device use these bytes
///    from the post of the work request until it is done, and at no other time. They only read the bytes for sends and
///    writes, and only write them for receives, reads and atomics. The bytes of an inline send are not used after
///    [`post_send`](Provider::post_send) has returned. The bytes of a send or write without a work request are not used
///    after [`send_now`](ImmediateSends::send_now) or [`write_now`](ImmediateSends::write_now) has returned. The bytes
///    of work requests that a failed post has not posted ([`PostError::posted`]) are not used at all. A work request is
///    done:
///    - when [`poll_cq`](Provider::poll_cq) has returned its completion;
///    - for an unsignaled send or write, when `poll_cq` has returned the completion of a later send or write of the
///      same queue pair;
///    - for a receive of a shared queue that no queue pair has consumed, when
///      [`destroy_srq`](SharedReceives::destroy_srq) has succeeded;
///    - at the latest, when [`destroy_id`](Provider::destroy_id) of its queue pair has succeeded.
/// 2. *Completions.* `poll_cq` returns a completion only for a work request that was posted and is done, and at most
///    one for each. The completion has the work request's `wr_id`, and its queue pair unless the queue pair is
///    destroyed. The `byte_len` of a receive that has succeeded is at most the length of its entries. The exception is
///    a receive that a Write with immediate data has consumed
///    ([`WcOpcode::RecvWriteWithImmediate`](crate::WcOpcode::RecvWriteWithImmediate)): its `byte_len` is the length of
///    the write, and its entries are not written.
/// 3. *Order.* Receives that were posted to a queue pair complete in the order of their posts. Sends and writes of a
///    queue pair also complete in the order of their posts. A read or an atomic completes after all sends and writes
///    that were posted before it. It may complete after sends and writes that were posted later. Receives of a shared
///    queue complete in any order.
/// 4. *Regions.* The provider keeps an `Arc` of the registered [`Memory`] until [`deregister`](Provider::deregister)
///    has succeeded or the provider is dropped. It keeps the `Arc` longer if a device can still access the memory.
///    Besides work requests, only peers use the memory: within the registered range, with the granted rights, and only
///    those peers that [`restrict`](RemoteKeys::restrict) allows. They do not use it after
///    [`invalidate`](RemoteKeys::invalidate) or `deregister` has succeeded. On a device with
///    [`Features::LATE_PLACEMENT`](crate::Features::LATE_PLACEMENT), the part of a frame that was being placed at that
///    moment is still written. The provider never makes a reference to the bytes of a region for a peer's access: see
///    [`crate::mem`].
/// 5. *The end.* After the provider is dropped, nothing uses memory that was posted to it or registered with it. The
///    exception is memory that a device has not released: `destroy_id`, `destroy_srq` or `deregister` has failed, or
///    was not called. That memory is never freed.
/// 6. *Handles.* A handle names one object. After the object is destroyed, no other object gets the same handle.
///
/// The contract does not cover the values of data: a peer or a device may write any bytes.
pub unsafe trait Provider: Send + fmt::Debug {
    /// Returns the name of the provider, as in `--provider NAME`.
    fn name(&self) -> &'static str;

    // Methods for devices.

    /// Returns the device with this handle. Returns `None` if the device was removed.
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo>;

    /// Returns the device that has this address of the local host, and prepares the device for [`Provider::register`].
    /// A program can call this function before it has listened or connected. An unspecified address, such as `0.0.0.0`,
    /// matches no device, except with providers that have only one device.
    ///
    /// # Errors
    /// The error names the reason: no device of this provider has the address, or the device port
    /// with the address is down.
    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId>;

    // Methods for channels and time.

    /// Returns the descriptor of a channel. Each call returns the same descriptor, which stays open as long as the
    /// provider exists.
    ///
    /// # Errors
    /// The device of the channel was removed.
    fn channel(&self, channel: Channel) -> Result<RawFd>;

    /// Returns the time by which [`Provider::progress`] must be called. Returns `None` if no timer runs.
    fn next_deadline(&self) -> Option<Instant>;

    /// Moves bytes and runs timers. Returns true if the call has reached its limit of work, and work remains: call
    /// `progress` again soon. Otherwise returns false.
    fn progress(&mut self, now: Instant, drive: Drive) -> bool;

    // Methods for connections.

    /// Listens on an address; port 0 selects a free port. The provider ignores options that it does not support, and
    /// logs their names in one line.
    ///
    /// # Errors
    /// [`TransportError::Listen`](crate::TransportError::Listen) if the address is in use or is not
    /// of this host. The call also fails if an option is outside its range.
    fn listen(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId>;

    /// Returns the local address of an id. For a listener, the address includes the port number on
    /// which it listens. Returns `None` if the id does not exist or its address is unknown.
    fn local_address(&self, id: CmId) -> Option<SocketAddr>;

    /// Starts to resolve a peer's address. The result is the event `Resolved` or `ConnectFailed`. The attempt fails if
    /// the connection is not `Established` by `deadline`. The provider ignores options that it does not support, and
    /// logs their names in one line.
    ///
    /// # Errors
    /// The provider cannot use the local address or device that [`PathOptions::source`] requires, or an option is
    /// outside its range.
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId>;

    /// Connects a resolved id that has a queue pair. The result is the event `Established`, `Rejected` or
    /// `ConnectFailed`.
    ///
    /// # Errors
    /// [`TransportError::PrivateDataTooLong`](crate::TransportError::PrivateDataTooLong);
    /// [`TransportError::InvalidState`](crate::TransportError::InvalidState) for an id that is not resolved, or has no
    /// queue pair; [`TransportError::NoDevice`](crate::TransportError::NoDevice) if the device's
    /// port went down after the id was resolved. After an error nothing has changed.
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()>;

    /// Accepts a connect request whose id has a queue pair. The result is the event `Established`, `ConnectFailed` or
    /// `Disconnected`.
    ///
    /// # Errors
    /// The errors of [`Provider::connect`]; also an error if the id does not belong to a connect request, or if the
    /// peer has disconnected.
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()>;

    /// Rejects a connect request, and destroys its id and queue pair.
    ///
    /// # Errors
    /// The errors of [`Provider::accept`]. After an error the id still exists.
    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()>;

    /// Ends a connection or a connection attempt: flushes the queues of its queue pair and notifies the peer. Calling
    /// it again has no effect.
    ///
    /// # Errors
    /// [`TransportError::InvalidState`](crate::TransportError::InvalidState) for a listener.
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()>;

    /// Destroys an id and its queue pair. The id is invalid afterwards, even after an error. Calling it again has no
    /// effect.
    ///
    /// # Errors
    /// The device has not released the queue pair. The device may use the memory of the posted work requests for as
    /// long as the process exists, so none of these work requests is done.
    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()>;

    /// Returns the next connection-manager event. Returns `None` if no event is available.
    ///
    /// # Errors
    /// The channel has failed. The failure of one connection is an event of its id instead.
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>>;

    // Methods for memory.

    /// Registers a part of a memory. The keys of the region give access to this part only. The region keeps the memory
    /// alive until the region is deregistered. On devices, the call **blocks** while the pages are pinned: about 250 ms
    /// per GiB, and several times as long if the pages were never accessed before. For large memories use
    /// [`OffLoopRegistration`].
    fn register(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion>;

    /// Deregisters a region. No outstanding work request may name the region.
    ///
    /// # Errors
    /// The device has not released the region, and peers may still use the memory. The provider keeps its `Arc` of the
    /// memory, and the handle stays valid, so the call may be repeated.
    fn deregister(&mut self, region: MrId) -> Result<()>;

    // Methods for the creation of queues.

    /// Creates a completion queue. The queue must have at least one entry for each work request that may be outstanding
    /// on the queue pairs that use it.
    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId>;

    /// Destroys a completion queue that no queue pair uses. Completions that are still in the queue are dropped.
    ///
    /// # Errors
    /// [`TransportError::InvalidState`](crate::TransportError::InvalidState) if a queue pair uses it.
    fn destroy_cq(&mut self, cq: CqId) -> Result<()>;

    /// Creates the queue pair of an id. The id is resolved, or belongs to a connect request, and has no queue pair yet.
    ///
    /// # Errors
    /// [`TransportError::InvalidState`](crate::TransportError::InvalidState) if the id is in another state.
    /// [`TransportError::OutOfRange`](crate::TransportError::OutOfRange) for a depth that is 0 or above the device's limit, and for a
    /// completion queue without room for both depths. After an error nothing has changed.
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId>;

    // Methods of the data path.

    /// Posts receives. This is possible before the connection is established.
    ///
    /// # Errors
    /// [`TransportError::QueueFull`](crate::TransportError::QueueFull) is backpressure: post again after a completion was polled. After
    /// any other error the program must end the connection. [`PostError::posted`] is the number of receives that were
    /// posted before the error.
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError>;

    /// Posts sends on an established connection, and rings the doorbell once. Returns [`Posted::Completed`] if the call
    /// may already have completed a work request. Even if the call returns an error, it may have completed work
    /// requests.
    ///
    /// # Errors
    /// The errors of [`Provider::post_recv`].
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError>;

    /// Appends up to `max` completions to `out`, without a system call. Returns the number of appended completions; 0
    /// means that the queue is empty. If `out` is empty, a provider in software may swap the buffer of `out` with that
    /// of the queue, to save a copy. A swap changes the capacity of `out`.
    ///
    /// The call copies the completions. If it returned a borrow of them, the caller could not call the provider while
    /// it processes the completions.
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize>;

    /// Arms a completion queue: the next completion of the given kind raises one event on the completion channel of the
    /// device.
    ///
    /// # Errors
    /// [`TransportError::Unsupported`](crate::TransportError::Unsupported) for [`Notify::Solicited`] on a device without
    /// [`Features::SOLICITED_EVENTS`](crate::Features::SOLICITED_EVENTS).
    fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()>;

    /// Returns the next completion queue of the device for which an event has arrived. After its event, the queue is no
    /// longer armed. Returns `None` if no event is available.
    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>>;

    // Roles. A provider returns `None` for a role that it does not have. A provider that forwards calls to another
    // provider returns the roles of that other provider.

    /// Returns the role of receive queues that several queue pairs share.
    fn shared_receives(&mut self) -> Option<&mut dyn SharedReceives>;

    /// Returns the role that invalidates remote keys while their region stays registered, and restricts a key to one
    /// peer.
    fn remote_keys(&mut self) -> Option<&mut dyn RemoteKeys>;

    /// Returns the role that reports when data last arrived from a peer.
    fn liveness(&self) -> Option<&dyn Liveness>;

    /// Returns the role of iWARP extensions that both programs must agree on.
    fn extensions(&mut self) -> Option<&mut dyn Extensions>;

    /// Returns the role that moves a connect request to another provider of the same kind.
    fn handover(&mut self) -> Option<&mut dyn Handover>;

    /// Returns the role that registers memory on other threads.
    fn off_loop_registration(&mut self) -> Option<&mut dyn OffLoopRegistration>;

    /// Returns the role that registers memory that is not mapped into the process, such as memory of a GPU.
    fn foreign_memory(&mut self) -> Option<&mut dyn ForeignMemory>;

    /// Returns the role of unreliable datagrams.
    fn datagrams(&mut self) -> Option<&mut dyn Datagrams>;

    /// Returns the role that reports the failures of completion queues on RDMA devices.
    fn adapter(&self) -> Option<&dyn Adapter>;

    /// Returns the role of sends and writes without a work request: each of them is done when its call returns.
    fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends>;

    /// Returns the role of connections within the host that use memory mapped by both processes.
    fn shared_memory(&mut self) -> Option<&mut dyn SharedMemory>;

    /// Returns the role that connects queue pairs without a connection manager.
    fn exchange(&mut self) -> Option<&mut dyn Exchange>;

    /// Returns the role of device events that do not concern a single connection.
    fn device_events(&mut self) -> Option<&mut dyn DeviceEvents>;
}
