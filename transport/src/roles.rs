//! Roles of providers: groups of operations that only some providers support. [`Provider`](crate::Provider) has a getter for each role,
//! which returns `None` if the provider does not have the role.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use crate::cm::{Detached, ExchangeOptions, ListenParam, PathOptions};
use crate::datagram::{AddressId, GRH_LEN, Route};
use crate::error::Result;
use crate::event::AsyncEvent;
use crate::handle::{CmId, CqId, DeviceId, MrId, QpId, SrqId};
use crate::mr::{Access, MemoryRegion};
use crate::registrar::{Registrar, Registration};
use crate::srq::SrqAttr;
use crate::wc::WorkCompletion;
use crate::wr::{PostError, Posted, RecvWr, RemoteAddress, Sge};

/// The role of shared receive queues: several queue pairs consume the receives of one queue
/// ([`QpAttr::srq`](crate::QpAttr::srq)).
pub trait SharedReceives {
    /// Creates a shared receive queue. A receive occupies an entry of the queue from its post until its completion is
    /// polled.
    fn create_srq(&mut self, device: DeviceId, attr: &SrqAttr) -> Result<SrqId>;

    /// Destroys a shared receive queue that no queue pair uses. Receives that are still posted are dropped without completion. Destroy the
    /// shared queue before the completion queues of its receives.
    ///
    /// # Errors
    /// A queue pair uses the queue; or the device has not released the queue, and may still use the memory of the posted receives.
    fn destroy_srq(&mut self, srq: SrqId) -> Result<()>;

    /// Posts receives. The queue pairs that use the queue consume the receives in the order in which messages arrive.
    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError>;
}

/// The role of remote keys that can be restricted to one peer, and invalidated while their region stays registered.
pub trait RemoteKeys {
    /// Restricts the region's remote key to the peer of `qp`: other peers are refused as if the key did not exist. Returns `true` if the
    /// key is now restricted. Returns `false`, and changes nothing, if the device cannot restrict a key to one peer.
    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<bool>;

    /// Invalidates a region's remote key immediately. No peer accesses the memory after the call has returned, except on devices with
    /// [`Features::LATE_PLACEMENT`](crate::Features::LATE_PLACEMENT). The region stays registered for the program's own work requests,
    /// under its local key. A peer that uses the remote key later gets the same answer as for a key that never existed. Invalidating the
    /// key again has no effect.
    ///
    /// # Errors
    /// The device has not released the key: peers may still access the memory.
    fn invalidate(&mut self, region: MrId) -> Result<()>;
}

/// The role that reports when data last arrived from a peer.
pub trait Liveness {
    /// Returns the time at which data last arrived for a connected queue pair, including parts of
    /// unfinished messages. The time is the `now` of the call that read the data. If no data has
    /// arrived, it is the `now` of the call that connected the queue pair. A provider may count a
    /// frame only when the frame is complete, or when a few hundred bytes of it have arrived. If
    /// the socket was full, a provider may also count an acknowledgement that makes room in it.
    ///
    /// Returns `None` if the queue pair is not connected, or if the device does not report the time.
    fn last_heard(&self, qp: QpId) -> Option<Instant>;

    /// Returns true if the provider still has to process some of the data that has arrived for a queue pair. In this case the peer is not
    /// silent, even if [`Liveness::last_heard`] is old. Always returns `false` if the device does not report unprocessed data.
    ///
    /// The answer covers all data that arrived before the last call of [`Provider::progress`](crate::Provider::progress) with
    /// [`Drive::Full`](crate::Drive::Full), because such a call reads from every queue pair that has data.
    fn has_unread(&self, qp: QpId) -> bool;
}

/// The role of the extensions of RFC 7306 (immediate data, atomics). iWARP does not negotiate these extensions.
pub trait Extensions {
    /// Enables the extensions on a connection. The programs of both sides must call this function before one of them
    /// uses an extension.
    fn enable_extensions(&mut self, qp: QpId) -> Result<()>;
}

/// The role of connections within the host that use memory mapped by both processes.
pub trait SharedMemory {
    /// Returns true if an established connection uses shared memory.
    fn is_shared(&self, qp: QpId) -> bool;

    /// Allows the peer of `qp` to map a region. The region's memory must be from
    /// [`Memory::new_shared`](crate::Memory::new_shared). Before the peer has mapped the region,
    /// the provider copies all payloads. From then on, the peer reads the payloads of sends from
    /// this memory in place, and each of these sends completes only after the peer has read its
    /// payload. The provider still copies payloads of at most 1 KiB, of several entries, and of
    /// inline sends. If the connection ends before the peer has read the payload of a send, the
    /// peer does not receive that message. Lend a memory to one connection only. The peer may read
    /// the memory at any time, even after the region is deregistered.
    ///
    /// Memory with [`Sharing::Lent`](crate::mem::Sharing::Lent) is only for RDMA Reads of the peer,
    /// which the peer executes on its mapping. The payloads of sends from this memory are copied.
    /// The peer may also write to the memory, and removes its pages when it drops its mapping.
    ///
    /// `file` is the descriptor of the memory, from
    /// [`Memory::take_file`](crate::Memory::take_file). The provider closes it once it is sent to
    /// the peer, so that lent memory occupies no descriptor. With `None`, the memory must still
    /// contain its descriptor.
    ///
    /// Returns `false`, and lends nothing, if the connection does not use shared memory, if it has
    /// reached its limit of lent regions, if the region is already lent, or if there is no
    /// descriptor.
    ///
    /// # Errors
    /// The region does not exist.
    fn lend(&mut self, qp: QpId, region: MrId, file: Option<OwnedFd>) -> Result<bool>;
}

/// The role that moves connect requests to another provider of the same kind, which usually runs on another thread.
pub trait Handover {
    /// Detaches a connect request from this provider, so that another provider of the same kind can attach it. The request must not have a
    /// queue pair yet. The id is invalid afterwards. After an error nothing has changed.
    fn detach(&mut self, id: CmId) -> Result<Detached>;

    /// Attaches a detached connect request, and returns its new id and its device. Continue as after the event `ConnectRequest`: create a
    /// queue pair and `accept`, or `reject`. After an error the peer's connection attempt fails.
    fn attach(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)>;
}

/// The role of connections without a connection manager. The two sides exchange the attributes of their queue pairs over a TCP connection,
/// or over another stream that the program supplies (`docs/guide/exchange.md`). The ids receive the same events and support the same calls
/// as ids of the connection manager. The stream stays open as long as the connection. If the stream ends, the connection ends.
pub trait Exchange {
    /// Listens like [`Provider::listen`](crate::Provider::listen), but for peers that connect by out-of-band exchange. The address may be
    /// any address of this host.
    ///
    /// # Errors
    /// [`TransportError::Listen`](crate::TransportError::Listen) if the address is in use or is not of this host.
    fn listen_exchange(
        &mut self,
        address: SocketAddr,
        options: &ListenParam,
        exchange: &ExchangeOptions,
    ) -> Result<CmId>;

    /// Adds a stream that the program has accepted, as if `listener` had accepted it. The provider takes ownership of the stream and makes
    /// it non-blocking. It closes the stream if the peer sends no request within 10 s.
    ///
    /// # Errors
    /// The descriptor is not a stream socket, or `listener` was not created by [`Exchange::listen_exchange`].
    fn accept_stream(&mut self, listener: CmId, stream: OwnedFd, now: Instant) -> Result<()>;

    /// Resolves a peer like [`Provider::resolve`](crate::Provider::resolve). The peer must listen with [`Exchange::listen_exchange`].
    ///
    /// # Errors
    /// No port of a device has the local address from which the system reaches the peer; or the device, the port or the GID index in
    /// `exchange` does not exist.
    fn resolve_exchange(
        &mut self,
        peer: SocketAddr,
        options: &PathOptions,
        exchange: &ExchangeOptions,
        deadline: Instant,
    ) -> Result<CmId>;

    /// Resolves a peer like [`Exchange::resolve_exchange`], but over a stream that the program has connected. The provider takes ownership
    /// of the stream and makes it non-blocking. It closes the stream when the id is destroyed.
    ///
    /// # Errors
    /// The errors of [`Exchange::resolve_exchange`]; also an error if the descriptor is not a stream socket.
    fn resolve_exchange_over(
        &mut self,
        stream: OwnedFd,
        options: &PathOptions,
        exchange: &ExchangeOptions,
        deadline: Instant,
    ) -> Result<CmId>;
}

/// The role that registers memory on other threads. Use it if pinning the pages would block the event loop for too long. The alternative is
/// to register the memory in pieces, one per turn of the loop, with a key for each piece.
pub trait OffLoopRegistration {
    /// Returns an object that registers memory for `device` on any thread.
    fn registrar(&self, device: DeviceId) -> Result<Box<dyn Registrar>>;

    /// Makes a region of a registration. The registration must be from a registrar of this provider.
    fn adopt(&mut self, registration: Registration) -> Result<MemoryRegion>;
}

/// The role that registers memory that is not mapped into the process.
pub trait ForeignMemory {
    /// Registers `len` bytes of a dma-buf, from `offset` on. A dma-buf is, for example, memory of a GPU that the GPU's driver has exported.
    /// Work requests name the bytes by addresses from `address` on. Choose an `address` of at least [`Sge::DEVICE`](crate::Sge::DEVICE),
    /// where nothing is mapped: then the processor does not try to copy the bytes of small sends. The descriptor may be closed afterwards.
    /// May block like [`Provider::register`](crate::Provider::register).
    fn register_dmabuf(
        &mut self,
        device: DeviceId,
        buffer: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        access: Access,
    ) -> Result<MemoryRegion>;
}

/// The role of unreliable datagrams (UD queue pairs).
pub trait Datagrams {
    /// Creates an id for datagrams, bound to `address`, an address of this host. The address selects the device. Port 0 selects a free
    /// port. Next, create the id's queue pair; the id may then join multicast groups.
    ///
    /// Peers cannot resolve the queue pair by this address. To make the queue pair known to peers, listen with another
    /// id.
    ///
    /// Returns the id, its device, and the length of the largest datagram that the id can send, in bytes. The MTU of the address's port or
    /// network interface limits this length, so it may differ from the device's
    /// [`max_datagram`](crate::Capabilities::max_datagram).
    fn bind_datagram(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId, u32)>;

    /// Answers a peer's connect request for datagrams with the number of the queue pair `qp`, to
    /// which the peer then sends its datagrams. `qp` must be on the device of the request. The call
    /// destroys the id of the request, even if it returns an error. The provider reports no further
    /// events of this peer.
    fn answer_datagram(&mut self, id: CmId, qp: QpId, private_data: &[u8], now: Instant) -> Result<()>;

    /// Listens like [`Provider::listen`](crate::Provider::listen), but for peers that send
    /// datagrams. With a connect request, a peer requests the number of the queue pair to which it
    /// sends its datagrams. `accept` answers with the number of the queue pair of the request's id.
    /// The result is the event `Established`. The peer's own queue pair is unknown until its first
    /// datagram arrives.
    fn listen_datagram(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId>;

    /// Resolves a peer like [`Provider::resolve`](crate::Provider::resolve), but for datagrams to `peer`, which may be a multicast group.
    /// `from` is an address of this host; with `None`, the system's routes decide. The result is the event `Resolved` or `ConnectFailed`.
    ///
    /// After `Resolved`, call `connect`. The id needs no queue pair for this call. The result of `connect` is the event `Reached`,
    /// `Rejected` or `ConnectFailed`. For a multicast group, create the queue pair and call `join` instead.
    fn resolve_datagram(&mut self, peer: SocketAddr, from: Option<SocketAddr>, deadline: Instant) -> Result<CmId>;

    /// Joins a multicast group. The id must have a queue pair, and must have been created by `bind_datagram`, or by
    /// `resolve_datagram` for a group. The result is the event `Joined` or `JoinFailed`.
    fn join(&mut self, id: CmId, group: IpAddr) -> Result<()>;

    /// Leaves a multicast group, or cancels a join that is in progress.
    fn leave(&mut self, id: CmId, group: IpAddr) -> Result<()>;

    /// Returns the number of a queue pair. A peer needs this number to send datagrams to the queue pair.
    fn qp_number(&self, qp: QpId) -> Result<u32>;

    /// Creates an address handle for the route to a peer's port. Any queue pair of `device` can send datagrams with
    /// this handle.
    fn create_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId>;

    /// Destroys an address handle. Datagrams that were posted with the handle but not sent yet may be lost.
    fn destroy_address(&mut self, address: AddressId) -> Result<()>;

    /// Returns the route to the sender of a received datagram. `header` is the first [`crate::datagram::GRH_LEN`] bytes of the receive.
    ///
    /// # Errors
    /// The datagram was sent to a multicast group: its header does not contain an address of this host.
    fn route_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route>;
}

/// The role of sends that need no work request. The provider copies the bytes before the call returns, and no
/// completion follows.
pub trait ImmediateSends {
    /// Sends `header` and `payload` as one message, like a Send without flags. The provider may hold the message until
    /// [`ImmediateSends::ring`] or the next [`post_send`](crate::Provider::post_send) of the queue pair. So call one of these two functions
    /// at the end of a batch of messages.
    ///
    /// Returns `false`, and sends nothing, in the following cases. The program can then post the message as a work
    /// request.
    ///
    /// - The message is too long.
    /// - The connection is not established or has ended.
    /// - Earlier sends are still queued.
    /// - The send window to the peer is full.
    fn send_now(&mut self, qp: QpId, header: &[u8], payload: &[u8]) -> bool;

    /// Writes the bytes of `local` to the peer's memory, like an RDMA Write without flags. The provider does not use the entry after the
    /// call. The provider may hold the write like a message of [`ImmediateSends::send_now`], so call [`ImmediateSends::ring`] or
    /// [`post_send`](crate::Provider::post_send) at the end of a batch.
    ///
    /// Returns `false`, and writes nothing, in the same cases as [`ImmediateSends::send_now`]. Also returns `false` if the provider cannot
    /// write to this peer without a work request, for example because the connection uses shared memory.
    fn write_now(&mut self, qp: QpId, local: &Sge, remote: RemoteAddress) -> bool;

    /// Passes the messages of [`ImmediateSends::send_now`], and the writes of [`ImmediateSends::write_now`], to the network. If the network
    /// does not accept all of them now, the provider sends the remaining ones later, without another call. Returns [`Posted::Completed`] if
    /// the call may have completed earlier work requests.
    fn ring(&mut self, qp: QpId) -> Posted;
}

/// The role that reports the failures of completion queues on RDMA devices.
pub trait Adapter {
    /// Returns true if a completion queue has failed, for example because it overran. A failed queue receives no more completions, and the
    /// connections that use the queue receive `Disconnected`. Destroy the queue, and create another one.
    fn has_failed(&self, cq: CqId) -> bool;

    /// Returns the total number of `ibv_ack_cq_events`(3) calls so far. Each call acknowledges a batch of completion events.
    fn acknowledgements(&self) -> u64;
}

/// The role of device events that do not concern a single connection.
pub trait DeviceEvents {
    /// Returns the next event of a device. Returns `None` if no event is available. These events
    /// make the connection-manager channel readable, so call this function when
    /// [`Provider::next_cm_event`](crate::Provider::next_cm_event) has returned `None`. The
    /// provider keeps at most 1000 unread events. At this limit, each new event replaces the oldest
    /// [`LastReceive`](crate::DeviceEventKind::LastReceive), or the oldest event if no
    /// `LastReceive` is unread.
    fn next_device_event(&mut self) -> Option<AsyncEvent>;
}
