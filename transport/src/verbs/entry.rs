//! [`IdEntry`]: the provider's entry of a connection-manager id.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::exchange_socket::{ExchangeListener, ExchangeStream};
use super::id::RawId;
use super::qp::Qp;
use crate::cm::ReadDepth;
use crate::provider::DeviceId;
use crate::slab::Key;

/// The state of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdState {
    /// Waits for connect requests.
    Listening,
    /// Bound to a local address, for datagrams.
    Bound,
    /// The provider's own id on a device, which receives the event of a removal.
    WatchingDevice,
    /// Resolves the peer's address, then the route.
    Resolving,
    /// On a device, and ready to connect.
    Resolved,
    /// The stream of a peer that has sent no request yet. The program does not know this id.
    AwaitingRequest,
    /// Connects; the peer has not answered.
    Connecting,
    /// A connect request that the program has not answered.
    RequestReceived,
    /// Accepted, but not established yet.
    Accepting,
    /// Established.
    Established,
    /// Disconnected by the program.
    Disconnecting {
        /// The queue pair is put into the error state when the peer has closed, or now at the latest (iWARP only).
        flush_at: Option<Instant>,
    },
    /// Ended: the program can only destroy it.
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
    /// The device of the id.
    pub(super) device: Option<DeviceId>,
    pub(super) qp: Option<Qp>,
    /// The time by which an active connection must be established.
    pub(super) deadline: Option<Instant>,
    /// The read depths that the peer has requested, and later the negotiated ones.
    pub(super) read_depth: ReadDepth,
    /// The code of the receiver-not-ready timer to set when the connection is established.
    pub(super) min_rnr_timer: u8,
    /// Type of service and ack timeout that a listener sets on the ids of its connect requests.
    pub(super) inherited: (Option<u8>, Option<u8>),
    /// True on iWARP while destroying the id may block until its handshake ends.
    pub(super) handshaking: bool,
    /// True once the program was notified of the device's removal.
    pub(super) removal_reported: bool,
    /// The multicast groups that it is in or joins, and the numbers of the joins.
    pub(super) groups: Vec<Option<(IpAddr, usize)>>,
    /// The listener or the stream of an id that connects by exchange.
    pub(super) exchange: Option<ExchangeSocket>,
}

/// The socket of an id that connects by exchange.
#[derive(Debug)]
pub(super) enum ExchangeSocket {
    Listener(Box<ExchangeListener>),
    Stream(Box<ExchangeStream>),
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

/// A queue pair whose id the program has destroyed, and which waits for its last shared receive.
#[derive(Debug)]
pub(super) struct RetiringQp {
    pub(super) key: Key,
    pub(super) qp: Qp,
    pub(super) raw: Arc<RawId>,
    pub(super) device: DeviceId,
    pub(super) state: IdState,
    /// The time at which it is destroyed at the latest.
    pub(super) until: Instant,
}

/// The code of the default receiver-not-ready timer: 0.64 ms. The default of the connection manager is 655 ms.
pub(super) const MIN_RNR_TIMER: u8 = 12;
