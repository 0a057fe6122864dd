//! [`IdEntry`]: the provider's entry of a connection-manager id.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::exchange_socket::{ExchangeListener, ExchangeStream};
use super::id::RawId;
use super::qp::Qp;
use rdma_transport::cm::ReadDepth;
use rdma_transport::provider::DeviceId;
use rdma_transport::slab::Key;

/// The state of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdState {
    /// The id listens for connect requests.
    Listening,
    /// The id is bound to a local address, for datagrams.
    Bound,
    /// The id is a private id of the provider on a device. It receives the event of the device's removal.
    WatchingDevice,
    /// The id resolves the peer's address, and then the route.
    Resolving,
    /// The id is on a device, and is ready to connect.
    Resolved,
    /// The id has an accepted stream on which the peer has not sent its request yet. The program has not been notified
    /// of the id.
    AwaitingRequest,
    /// The id has sent a connect request that the peer has not answered.
    Connecting,
    /// The id belongs to a connect request that the program has not answered.
    RequestReceived,
    /// The program has accepted the connect request, but the connection is not established yet.
    Accepting,
    /// The connection is established.
    Established,
    /// The program has disconnected.
    Disconnecting {
        /// The time at which the provider puts the queue pair into the error state, if the peer has not closed the
        /// connection before. `None` if the queue pair is in the error state already. Always `None` on InfiniBand and
        /// RoCE, because there the provider does not wait for the peer.
        flush_at: Option<Instant>,
    },
    /// The connection has ended. The program can only destroy the id.
    Closed,
}

impl IdState {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Listening => "listening",
            Self::Bound => "bound",
            Self::WatchingDevice => "watching a device",
            Self::Resolving => "resolving",
            Self::Resolved => "resolved",
            Self::AwaitingRequest => "arriving",
            Self::Connecting => "connecting",
            Self::RequestReceived => "waiting for accept or reject",
            Self::Accepting => "being accepted",
            Self::Established => "established",
            Self::Disconnecting { .. } => "disconnecting",
            Self::Closed => "over",
        }
    }
}

/// An id in the provider's table.
#[derive(Debug)]
pub(super) struct IdEntry {
    pub(super) raw: Arc<RawId>,
    pub(super) state: IdState,
    /// The device of the id; `None` before it is known.
    pub(super) device: Option<DeviceId>,
    pub(super) qp: Option<Qp>,
    /// The deadline that the program has passed for an active connection. For an id of rdma_cm, it
    /// limits only the time to resolve the address and the route.
    pub(super) deadline: Option<Instant>,
    /// The read depths (IRD and ORD) that the peer has requested. After the connection is established, the negotiated
    /// read depths.
    pub(super) read_depth: ReadDepth,
    /// The receiver-not-ready timer, as a code. It is set when the connection is established.
    pub(super) min_rnr_timer: u8,
    /// For a listener: the type of service and the ack timeout that it sets on the ids of its connect requests.
    pub(super) inherited: (Option<u8>, Option<u8>),
    /// True while destroying the id may block until the end of its handshake (iWARP only).
    pub(super) handshaking: bool,
    /// True after the id has received the event of its device's removal.
    pub(super) removal_reported: bool,
    /// The multicast groups that the id has joined or is joining, each with the number of the join. `None` is a free
    /// slot.
    pub(super) groups: Vec<Option<(IpAddr, usize)>>, // local: groups of the program
    /// The listening socket or the stream of an id that connects by out-of-band exchange; `None` for other ids.
    pub(super) exchange: Option<ExchangeSocket>,
}

/// The socket of an id that connects by out-of-band exchange.
#[derive(Debug)]
pub(super) enum ExchangeSocket {
    Listener(Box<ExchangeListener>),
    Stream(Box<ExchangeStream>),
}

impl ExchangeSocket {
    /// Returns the deadline for the peer's next message, or the end of a listener's pause.
    pub(super) fn deadline_mut(&mut self) -> &mut Option<Instant> {
        match self {
            Self::Listener(listening) => &mut listening.deadline,
            Self::Stream(stream) => &mut stream.deadline,
        }
    }
}

impl IdEntry {
    pub(super) const fn new(raw: Arc<RawId>, state: IdState) -> Self {
        Self {
            raw,
            state,
            device: None,
            qp: None,
            deadline: None,
            read_depth: ReadDepth { responder_resources: 0, initiator_depth: 0 },
            min_rnr_timer: MIN_RNR_TIMER,
            inherited: (None, None),
            handshaking: false,
            removal_reported: false,
            groups: Vec::new(),
            exchange: None,
        }
    }

    /// Returns true if the program knows the id.
    pub(super) fn is_public(&self) -> bool {
        !matches!(self.state, IdState::WatchingDevice | IdState::AwaitingRequest)
    }

    /// Returns the device whose number of ids (`Device::ids`) includes this id. Returns `None` for
    /// a private id of the provider, and if the id has no device yet.
    pub(super) fn device_in_use(&self) -> Option<DeviceId> {
        self.device.filter(|_| self.state != IdState::WatchingDevice)
    }

    pub(super) fn stream(&self) -> Option<&ExchangeStream> {
        match &self.exchange {
            Some(ExchangeSocket::Stream(stream)) => Some(stream),
            _ => None,
        }
    }

    pub(super) fn stream_mut(&mut self) -> Option<&mut ExchangeStream> {
        match &mut self.exchange {
            Some(ExchangeSocket::Stream(stream)) => Some(stream),
            _ => None,
        }
    }

    pub(super) fn listener_mut(&mut self) -> Option<&mut ExchangeListener> {
        match &mut self.exchange {
            Some(ExchangeSocket::Listener(listening)) => Some(listening),
            _ => None,
        }
    }
}

/// A queue pair whose id the program has destroyed. It is kept until the last shared receive that
/// it has consumed has completed.
#[derive(Debug)]
pub(super) struct RetiringQp {
    pub(super) key: Key,
    pub(super) qp: Qp,
    pub(super) raw: Arc<RawId>,
    pub(super) device: DeviceId,
    pub(super) state: IdState,
    /// The time limit. When it passes, the queue pair is destroyed even if its last shared receive
    /// has not completed.
    pub(super) until: Instant,
}

/// The default of the receiver-not-ready timer, as a code: 0.64 ms. The connection manager's own default is 655 ms.
pub(super) const MIN_RNR_TIMER: u8 = 12;
