//! Roles of providers: what some of them do and others do not. A [`Provider`](crate::Provider) returns each role that it has, and `None` for the others.

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

/// Receives that several queue pairs share ([`QpAttr::srq`](crate::QpAttr::srq)).
pub trait SharedReceives {
    /// Makes a shared receive queue. A receive counts from its post until its completion is polled.
    fn create_srq(&mut self, device: DeviceId, attr: &SrqAttr) -> Result<SrqId>;

    /// Destroys a shared receive queue that no queue pair uses. Receives that are still posted are dropped without
    /// completion. Its completion queues can only be destroyed afterwards.
    ///
    /// # Errors
    /// A queue pair uses the queue; or the device keeps it, and may go on using what is posted to it.
    fn destroy_srq(&mut self, srq: SrqId) -> Result<()>;

    /// Posts receives for whichever queue pair needs them first.
    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError>;
}

/// Remote keys that end before their region.
pub trait RemoteKeys {
    /// Lets only the peer of `qp` use the region's remote key: to every other peer it is as if there were no such key. Returns `false`,
    /// and changes nothing, where the device cannot tell peers apart.
    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<bool>;

    /// Takes a region's remote key back at once; no peer touches the memory after the call, but on devices with
    /// [`Features::LATE_PLACEMENT`](crate::Features::LATE_PLACEMENT). The region stays registered
    /// for the program's own work requests, under the same local key. A peer that uses the key afterwards gets the same
    /// answer as for a key that never existed. Calling it again does no harm.
    ///
    /// # Errors
    /// The device keeps the key: peers may go on using the memory.
    fn invalidate(&mut self, region: MrId) -> Result<()>;
}

/// What is known of the silence of peers.
pub trait Liveness {
    /// When something last came for a connected queue pair, unfinished messages included: the `now` of the call that read it,
    /// first of the one that connected it. A provider may wait for a whole frame or some hundred octets of one. `None` where the device does not tell, and before.
    fn last_heard(&self, qp: QpId) -> Option<Instant>;

    /// Whether something has come for a queue pair that is not read and processed yet. While that is so, an old
    /// [`Liveness::last_heard`] does not mean that the peer is silent. It is complete when [`Provider::progress`](crate::Provider::progress) has
    /// returned from a full round ([`Drive::Full`](crate::Drive::Full)), for what had come before that was called; every queue pair that
    /// has something is read from in each full round, whatever the others have. `false` always where the device does
    /// not tell.
    fn has_unread(&self, qp: QpId) -> bool;
}

/// Extensions of RFC 7306 (immediate data, atomics), for which iWARP has no negotiation.
pub trait Extensions {
    /// Allows the extensions on a connection. The programs must agree: call it on both sides before the first of them is used.
    fn enable_extensions(&mut self, qp: QpId) -> Result<()>;
}

/// Connections within the host, in memory that both processes map.
pub trait SharedMemory {
    /// Whether a connection that is up is in shared memory.
    fn is_shared(&self, qp: QpId) -> bool;

    /// Lets the peer of `qp` map a registered region of a memory of its own ([`Memory::new_shared`](crate::Memory::new_shared)), and read it
    /// from then on: a send from there is read where it is, instead of being copied before. Until the peer has mapped it, sends from there
    /// are copied. Give such memory to one connection only. Its peer may read it at any time, and keeps its pages when the region is
    /// deregistered. Returns `false`, and changes nothing, if the connection is not in shared memory or has lent as much as it can.
    ///
    /// # Errors
    /// The region is gone.
    fn lend(&mut self, qp: QpId, region: MrId) -> Result<bool>;
}

/// Connect requests that are accepted by another provider of the same kind, as a rule on another thread.
pub trait Handover {
    /// Takes a connect request, which has no queue pair yet, out of this provider, to be attached to another of the
    /// same kind. The id is gone afterwards. On failure nothing has changed.
    fn detach(&mut self, id: CmId) -> Result<Detached>;

    /// Takes a detached connect request in. Go on as after `ConnectRequest`: make a queue pair and `accept`, or
    /// `reject`. On failure the peer's attempt ends.
    fn attach(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)>;
}

/// Connections without a connection manager: the two sides tell each other of their queue pairs over a TCP connection, or over
/// another stream that the program brings (`docs/guide/exchange.md`). The ids behave as any others from then on: the same events come, and
/// the same calls follow. The stream stays open for as long as the connection does, and its end is that of the connection.
pub trait Exchange {
    /// As [`Provider::listen`](crate::Provider::listen), for peers that connect by exchange. The address may be any of this host.
    ///
    /// # Errors
    /// [`Error::Listen`](crate::Error::Listen) if the address is in use or is not of this host.
    fn listen_exchange(
        &mut self,
        address: SocketAddr,
        options: &ListenOptions,
        exchange: &ExchangeOptions,
    ) -> Result<CmId>;

    /// Takes a stream that the program has accepted, as if it had come to `listener`. A peer that sends no request for 10 s is dropped.
    ///
    /// # Errors
    /// The descriptor is no stream socket; `listener` does not listen for exchange.
    fn accept_stream(&mut self, listener: CmId, stream: OwnedFd, now: Instant) -> Result<()>;

    /// As [`Provider::resolve`](crate::Provider::resolve), for a peer that listens for exchange.
    ///
    /// # Errors
    /// No port of a device has the address that leads to the peer, or what the options name; the error says which ports there are.
    fn resolve_exchange(
        &mut self,
        peer: SocketAddr,
        options: &PathOptions,
        exchange: &ExchangeOptions,
        deadline: Instant,
    ) -> Result<CmId>;

    /// As [`Exchange::resolve_exchange`], over a stream that the program has connected. It is made non-blocking, and is closed with the id.
    ///
    /// # Errors
    /// As there; and the descriptor is no stream socket.
    fn resolve_exchange_over(
        &mut self,
        stream: OwnedFd,
        options: &PathOptions,
        exchange: &ExchangeOptions,
        deadline: Instant,
    ) -> Result<CmId>;
}

/// Registration on other threads, for memory that takes too long to pin within a turn of the loop. Memory registered in pieces between
/// turns does as well, with a key for each piece.
pub trait OffLoopRegistration {
    /// Returns a registrar for memory of a device.
    fn registrar(&self, device: DeviceId) -> Result<Box<dyn Registrar>>;

    /// Makes a region of what a registrar of this provider's device has registered.
    fn adopt(&mut self, registration: Registration) -> Result<MemoryRegion>;
}

/// Memory that is not mapped into the process.
pub trait ForeignMemory {
    /// Registers `len` bytes of a dma-buf from `offset` on, such as memory of a GPU that its driver has exported. Work
    /// requests name the bytes by addresses from `address` on: take one from [`Sge::DEVICE`](crate::Sge::DEVICE) on, where nothing is mapped, so that
    /// small sends are not copied by the processor. The descriptor may be closed afterwards. May block as [`Provider::register`](crate::Provider::register) does.
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
    /// Makes an id for datagrams at an address of this host, which names a device; port 0 takes a free one. Make its
    /// queue pair; then it may join groups. Peers cannot find it by its address; to be found, listen with another id.
    /// The number is the length of the largest datagram that it sends, bytes: at most the device's
    /// [`max_datagram`](crate::Capabilities::max_datagram), and less where the interface of the address carries less.
    fn bind_datagram(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId, u32)>;

    /// Accepts a connect request for datagrams on behalf of `qp`, of the same device. The id is gone afterwards,
    /// whether or not that worked, since no more events of the peer will come.
    fn answer_datagram(&mut self, id: CmId, qp: QpId, private_data: &[u8], now: Instant) -> Result<()>;

    /// As [`Provider::listen`](crate::Provider::listen), for datagrams. A connect request asks where to send datagrams to; `accept` tells the
    /// peer and ends in `Established`. Where the peer sends from is known when its first datagram has come.
    fn listen_datagram(&mut self, address: SocketAddr, options: &ListenOptions) -> Result<CmId>;

    /// As [`Provider::resolve`](crate::Provider::resolve), for datagrams to `peer`, which may be a multicast group; `from` is an address of this
    /// host, or `None` for any that leads there. It ends in `Resolved` or `ConnectFailed`. Then `connect`, with or
    /// without a queue pair of its own, which ends in `Reached`, `Rejected` or `ConnectFailed`. For a group, make the
    /// queue pair and `join` instead.
    fn resolve_datagram(&mut self, peer: SocketAddr, from: Option<SocketAddr>, deadline: Instant) -> Result<CmId>;

    /// Joins a multicast group with a datagram id that was bound, or resolved for a group, and has a queue pair; ends
    /// in `Joined` or `JoinFailed`.
    fn join(&mut self, id: CmId, group: IpAddr) -> Result<()>;

    /// Leaves a group, or gives up joining it.
    fn leave(&mut self, id: CmId, group: IpAddr) -> Result<()>;

    /// Number of a queue pair, which a peer needs to send datagrams to it.
    fn qp_number(&self, qp: QpId) -> Result<u32>;

    /// Makes an address handle for the way to a port, to send datagrams there from any queue pair of `device`.
    fn create_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId>;

    /// Destroys an address handle. Datagrams that are still to be sent with it may be lost.
    fn destroy_address(&mut self, address: AddressId) -> Result<()>;

    /// The way back to the sender of a datagram; `header` is the first [`crate::datagram::GRH_LEN`] bytes of its
    /// receive. A datagram to a group names no address of this host, so there is no way back, which is an error.
    fn route_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route>;
}

/// Sends that end with their post: the provider has copied the bytes when the call returns, so there is no work request to complete.
pub trait ImmediateSends {
    /// Sends `header` and `payload` as one message, as a Send without flags would. It may wait for [`ImmediateSends::ring`], or for the
    /// next [`post_send`](crate::Provider::post_send) of the queue pair, which may come as late as the end of a batch.
    ///
    /// Returns `false`, and sends nothing, if that is not possible now: the message is too long, the connection is not up or has ended,
    /// sends before it wait, or the peer's window of the network is full. Post the message then.
    fn send_now(&mut self, qp: QpId, header: &[u8], payload: &[u8]) -> bool;

    /// Writes the bytes of `local` to the peer's memory, as an RDMA Write without flags would, and otherwise as
    /// [`ImmediateSends::send_now`] sends. The entry is not used any more when this returns.
    fn write_now(&mut self, qp: QpId, local: &Sge, remote: RemoteAddress) -> bool;

    /// Hands what [`ImmediateSends::send_now`] has sent to the network, as far as the network takes it; the rest follows by itself.
    fn ring(&mut self, qp: QpId) -> Posted;
}

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

/// What queue pairs use to reach their peers.
pub trait Paths {
    /// Returns the attributes that the device uses on a connection.
    fn path_of(&self, qp: QpId) -> Result<PathState>;
}

/// States of RDMA devices.
pub trait Adapter {
    /// Returns `true` if a completion queue has failed, such as by an overrun: nothing completes on it any more. Its connections are
    /// told that they have ended; it is to be destroyed, and another one made.
    fn has_failed(&self, cq: CqId) -> bool;

    /// Calls that acknowledged completion events so far, each for a batch of them (`ibv_ack_cq_events`(3)).
    fn acknowledgements(&self) -> u64;
}

/// Events of devices that belong to no connection.
pub trait DeviceEvents {
    /// The next event of a device. These events come over the connection-manager channel, so ask for them when
    /// [`Provider::next_cm_event`](crate::Provider::next_cm_event) has said `None`. At most a thousand are kept for a caller who does not ask.
    fn next_device_event(&mut self) -> Option<DeviceEvent>;
}
