//! Roles of providers: operations that only some providers have. A [`Provider`](crate::Provider) returns each role that it has, and
//! `None` for the others.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use crate::cm::{Detached, ExchangeOptions, ListenOptions, PathOptions};
use crate::datagram::{AddressId, GRH_LEN, Route};
use crate::error::Result;
use crate::event::DeviceEvent;
use crate::handle::{CmId, CqId, DeviceId, MrId, QpId, SrqId};
use crate::mr::{Access, MemoryRegion};
use crate::registrar::{Registrar, Registration};
use crate::srq::SrqAttr;
use crate::wc::WorkCompletion;
use crate::wr::{PostError, Posted, RecvWr, RemoteAddress, Sge};

/// Shared receive queues, from which several queue pairs consume receives ([`QpAttr::srq`](crate::QpAttr::srq)).
pub trait SharedReceives {
    /// Creates a shared receive queue. A receive counts against its depth from its post until its completion is polled.
    fn create_srq(&mut self, device: DeviceId, attr: &SrqAttr) -> Result<SrqId>;

    /// Destroys a shared receive queue that no queue pair uses. Receives that are still posted are dropped without
    /// completion. Its completion queues can only be destroyed afterwards.
    ///
    /// # Errors
    /// A queue pair uses the queue; or the device has not released it, and may still use the receives that are posted to it.
    fn destroy_srq(&mut self, srq: SrqId) -> Result<()>;

    /// Posts receives. The queue pairs of the queue consume them in the order in which messages arrive.
    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError>;
}

/// Remote keys that can be restricted to one peer, and invalidated while their region stays registered.
pub trait RemoteKeys {
    /// Restricts the region's remote key to the peer of `qp`. For every other peer the key does not exist. Returns `false`, and changes
    /// nothing, if the device cannot restrict a key to one peer.
    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<bool>;

    /// Invalidates a region's remote key immediately. No peer accesses the memory after the call, except on devices with
    /// [`Features::LATE_PLACEMENT`](crate::Features::LATE_PLACEMENT). The region stays registered for the program's own work requests,
    /// under the same local key. A peer that uses the key afterwards gets the same answer as for a key that never existed. Further
    /// calls have no effect.
    ///
    /// # Errors
    /// The device has not released the key: peers may still access the memory.
    fn invalidate(&mut self, region: MrId) -> Result<()>;
}

/// The times at which data last arrived from peers.
pub trait Liveness {
    /// Returns the time at which data last arrived for a connected queue pair, unfinished messages included: the `now` of the call that
    /// read the data, or of the call that connected the queue pair if none has arrived. A provider may count a frame only when it is
    /// complete, or when some hundred bytes of it have arrived. `None` if the queue pair is not connected, or if the device does not
    /// report the time.
    fn last_heard(&self, qp: QpId) -> Option<Instant>;

    /// Returns true if data has arrived for a queue pair that the provider has not processed yet. While it does, an old
    /// [`Liveness::last_heard`] does not mean that the peer is silent. The answer is complete for data that arrived before the last call of
    /// [`Provider::progress`](crate::Provider::progress) with [`Drive::Full`](crate::Drive::Full): each full round reads from every queue
    /// pair that has data, regardless of the others. Always `false` if the device does not report it.
    fn has_unread(&self, qp: QpId) -> bool;
}

/// Extensions of RFC 7306 (immediate data, atomics), for which iWARP has no negotiation.
pub trait Extensions {
    /// Enables the extensions on a connection. Both programs must call it before either of them uses an extension.
    fn enable_extensions(&mut self, qp: QpId) -> Result<()>;
}

/// Connections within the host, in memory that both processes map.
pub trait SharedMemory {
    /// Returns true if an established connection is in shared memory.
    fn is_shared(&self, qp: QpId) -> bool;

    /// Allows the peer of `qp` to map a region, whose memory is from [`Memory::new_shared`](crate::Memory::new_shared). Once the peer has
    /// mapped it, the peer reads sends from this memory in place; until then they are copied. Lend a memory to one connection only. The
    /// peer may read it at any time, and keeps its pages when the region is deregistered. Returns `false`, and changes nothing, if the
    /// connection is not in shared memory or has reached its limit of lent regions.
    ///
    /// # Errors
    /// The region does not exist.
    fn lend(&mut self, qp: QpId, region: MrId) -> Result<bool>;
}

/// Connect requests that move to another provider of the same kind, which usually runs on another thread.
pub trait Handover {
    /// Detaches a connect request, which has no queue pair yet, from this provider. Another provider of the same kind can attach it. The
    /// id is invalid afterwards. After an error nothing has changed.
    fn detach(&mut self, id: CmId) -> Result<Detached>;

    /// Attaches a detached connect request. Continue as after `ConnectRequest`: create a queue pair and `accept`, or `reject`. After an
    /// error the peer's attempt ends.
    fn attach(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)>;
}

/// Connections without a connection manager: the two sides exchange the attributes of their queue pairs over a TCP connection, or over
/// another stream that the program supplies (`docs/guide/exchange.md`). The ids have the same events and calls as any others. The stream
/// stays open as long as the connection. If the stream ends, the connection ends.
pub trait Exchange {
    /// Listens like [`Provider::listen`](crate::Provider::listen), for peers that connect by exchange, on any address of this host.
    ///
    /// # Errors
    /// [`Error::Listen`](crate::Error::Listen) if the address is in use or is not of this host.
    fn listen_exchange(
        &mut self,
        address: SocketAddr,
        options: &ListenOptions,
        exchange: &ExchangeOptions,
    ) -> Result<CmId>;

    /// Adds a stream that the program has accepted, as if `listener` had accepted it. The provider takes ownership of the stream, makes it
    /// non-blocking, and closes it if the peer sends no request for 10 s.
    ///
    /// # Errors
    /// The descriptor is not a stream socket, or `listener` does not listen for exchange.
    fn accept_stream(&mut self, listener: CmId, stream: OwnedFd, now: Instant) -> Result<()>;

    /// Resolves like [`Provider::resolve`](crate::Provider::resolve), for a peer that listens for exchange.
    ///
    /// # Errors
    /// No port has the local address of the route to the peer, or the device, port or GID index in the options does not exist.
    fn resolve_exchange(
        &mut self,
        peer: SocketAddr,
        options: &PathOptions,
        exchange: &ExchangeOptions,
        deadline: Instant,
    ) -> Result<CmId>;

    /// Resolves like [`Exchange::resolve_exchange`], over a stream that the program has connected. The provider takes ownership of the
    /// stream, makes it non-blocking, and closes it when the id is destroyed.
    ///
    /// # Errors
    /// As [`Exchange::resolve_exchange`]; also if the descriptor is not a stream socket.
    fn resolve_exchange_over(
        &mut self,
        stream: OwnedFd,
        options: &PathOptions,
        exchange: &ExchangeOptions,
        deadline: Instant,
    ) -> Result<CmId>;
}

/// Registration on other threads, for memory whose pages take longer to pin than a turn of the loop may last. The alternative is to
/// register the memory in pieces between turns, with a key for each piece.
pub trait OffLoopRegistration {
    /// Returns a registrar for memory of a device.
    fn registrar(&self, device: DeviceId) -> Result<Box<dyn Registrar>>;

    /// Turns a registration of a registrar of this provider's device into a region.
    fn adopt(&mut self, registration: Registration) -> Result<MemoryRegion>;
}

/// Memory that is not mapped into the process.
pub trait ForeignMemory {
    /// Registers `len` bytes of a dma-buf from `offset` on, such as memory of a GPU that its driver has exported. Work requests name the
    /// bytes by addresses from `address` on. Choose an address from [`Sge::DEVICE`](crate::Sge::DEVICE) on, where nothing is mapped: then
    /// the processor does not copy small sends. The descriptor may be closed afterwards. May block like
    /// [`Provider::register`](crate::Provider::register).
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

/// Datagrams (UD queue pairs).
pub trait Datagrams {
    /// Creates an id for datagrams at an address of this host, which selects the device; port 0 selects a free port. Create its queue
    /// pair; then it may join groups. Peers cannot look it up by its address: for that, listen with another id. The returned number is the
    /// length of the largest datagram that it sends, in bytes: at most the device's
    /// [`max_datagram`](crate::Capabilities::max_datagram), or less if the MTU of the address's interface is smaller.
    fn bind_datagram(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId, u32)>;

    /// Accepts a connect request for datagrams on behalf of `qp`, which is on the same device. The id is invalid afterwards, even after an
    /// error, because no more events of the peer follow.
    fn answer_datagram(&mut self, id: CmId, qp: QpId, private_data: &[u8], now: Instant) -> Result<()>;

    /// Listens like [`Provider::listen`](crate::Provider::listen), for datagrams. A connect request asks for the queue pair to send
    /// datagrams to. `accept` answers it and ends in `Established`. The peer's own queue pair is known when its first datagram arrives.
    fn listen_datagram(&mut self, address: SocketAddr, options: &ListenOptions) -> Result<CmId>;

    /// Resolves like [`Provider::resolve`](crate::Provider::resolve), for datagrams to `peer`, which may be a multicast group. `from` is an
    /// address of this host; `None` lets the system's routes decide. It ends in `Resolved` or `ConnectFailed`. Then `connect`, with or
    /// without a queue pair of the id, which ends in `Reached`, `Rejected` or `ConnectFailed`. For a group, create the queue pair and
    /// call `join` instead.
    fn resolve_datagram(&mut self, peer: SocketAddr, from: Option<SocketAddr>, deadline: Instant) -> Result<CmId>;

    /// Joins a multicast group with a datagram id that was bound, or resolved for a group, and has a queue pair; ends
    /// in `Joined` or `JoinFailed`.
    fn join(&mut self, id: CmId, group: IpAddr) -> Result<()>;

    /// Leaves a group, or cancels a join.
    fn leave(&mut self, id: CmId, group: IpAddr) -> Result<()>;

    /// Returns the number of a queue pair, which a peer needs to send datagrams to it.
    fn qp_number(&self, qp: QpId) -> Result<u32>;

    /// Creates an address handle for the route to a port. Any queue pair of `device` can send datagrams with it.
    fn create_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId>;

    /// Destroys an address handle. Datagrams that were posted with it and are not sent yet may be lost.
    fn destroy_address(&mut self, address: AddressId) -> Result<()>;

    /// Returns the route to the sender of a datagram. `header` is the first [`crate::datagram::GRH_LEN`] bytes of its receive.
    ///
    /// # Errors
    /// The datagram was sent to a group: its header has no address of this host.
    fn route_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route>;
}

/// Sends without a work request: the provider has copied the bytes when the call returns, and no completion follows.
pub trait ImmediateSends {
    /// Sends `header` and `payload` as one message, like a Send without flags. The provider may hold the message until
    /// [`ImmediateSends::ring`] or the next [`post_send`](crate::Provider::post_send) of the queue pair, so call one of them at the end of
    /// a batch.
    ///
    /// Returns `false`, and sends nothing, if the message is too long, the connection is not established or has ended, earlier sends are
    /// still queued, or the network's window to the peer is full. Post the message then.
    fn send_now(&mut self, qp: QpId, header: &[u8], payload: &[u8]) -> bool;

    /// Writes the bytes of `local` to the peer's memory, like an RDMA Write without flags, and otherwise like
    /// [`ImmediateSends::send_now`]. The provider does not use the entry after the call.
    fn write_now(&mut self, qp: QpId, local: &Sge, remote: RemoteAddress) -> bool;

    /// Passes the messages of [`ImmediateSends::send_now`] to the network. Messages that the network does not accept yet follow later,
    /// without another call.
    fn ring(&mut self, qp: QpId) -> Posted;
}

/// The path attributes of a queue pair (`ibv_query_qp`(3)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathState {
    /// The port of the device, from 1.
    pub port: u8,
    /// The path MTU: the largest payload of a packet, in bytes. 0 if the device does not report it.
    pub mtu: u32,
    /// The type of service of every packet, with the DSCP in the upper six bits.
    pub type_of_service: u8,
    /// The code of the ack timeout.
    pub ack_timeout: u8,
    /// The number of times that the device retransmits an unanswered request.
    pub retry_count: u8,
    /// The number of times that the device retransmits a message that found no receive posted at the peer, as the peer requested. 7
    /// stands for no limit.
    pub rnr_retry_count: u8,
    /// The code of the receiver-not-ready timer.
    pub min_rnr_timer: u8,
    /// The number of RDMA Reads that the peer may have outstanding here.
    pub responder_resources: u8,
    /// The number of RDMA Reads that may be outstanding at the peer.
    pub initiator_depth: u8,
}

/// The path attributes of queue pairs.
pub trait Paths {
    /// Returns the attributes that the device uses on a connection.
    fn path_of(&self, qp: QpId) -> Result<PathState>;
}

/// States of RDMA devices.
pub trait Adapter {
    /// Returns true if a completion queue has failed, for example because it overran: nothing completes on it any more. Its connections
    /// receive `Disconnected`. Destroy the queue, and create another one.
    fn has_failed(&self, cq: CqId) -> bool;

    /// Returns the number of calls so far that acknowledged completion events, each for a batch of them (`ibv_ack_cq_events`(3)).
    fn acknowledgements(&self) -> u64;
}

/// Events of devices that belong to no connection.
pub trait DeviceEvents {
    /// Returns the next event of a device; `None` if there is none at the moment. These events arrive over the connection-manager channel,
    /// so call this when [`Provider::next_cm_event`](crate::Provider::next_cm_event) has returned `None`. The provider keeps at most 1000
    /// events, and then drops the oldest.
    fn next_device_event(&mut self) -> Option<DeviceEvent>;
}
