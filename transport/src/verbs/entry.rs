//! [`IdEntry`]: what the provider knows of a connection-manager id.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::exchange_socket::{ExchangeListener, ExchangeStream};
use super::id::RawId;
use super::qp::Qp;
use crate::cm::ReadDepth;
use crate::provider::DeviceId;
use crate::slab::Key;

/// Where an id is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdState {
    /// Waits for connect requests.
    Listening,
    /// Bound to an address of ours, for datagrams.
    Bound,
    /// Watches a device, for the provider itself.
    WatchingDevice,
    /// Resolves the peer's address, then the route.
    Resolving,
    /// On a device, and free to connect.
    Resolved,
    /// The stream of a peer that has sent no request yet, of which the user knows nothing.
    AwaitingRequest,
    /// Has asked the peer.
    Connecting,
    /// Was asked by a peer.
    RequestReceived,
    /// Has accepted the peer.
    Accepting,
    /// Up.
    Established,
    /// Disconnected by this side.
    Disconnecting {
        /// The queue pair is put into the error state when the peer has closed, or now at the latest (iWARP only).
        flush_at: Option<Instant>,
    },
    /// Over: only to be destroyed.
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
    /// The device that it is on.
    pub(super) device: Option<DeviceId>,
    pub(super) qp: Option<Qp>,
    /// When an active connection must be up.
    pub(super) deadline: Option<Instant>,
    /// The read depths that the peer asked for, and later those that were agreed on.
    pub(super) read_depth: ReadDepth,
    /// The code of the receiver-not-ready timer to set when the connection is up.
    pub(super) min_rnr_timer: u8,
    /// Type of service and ack timeout that a listener sets on the ids of its connect requests.
    pub(super) inherited: (Option<u8>, Option<u8>),
    /// Set on iWARP while destroying the id may block until its handshake is over.
    pub(super) handshaking: bool,
    /// Whether the user was told that the device goes away.
    pub(super) removal_reported: bool,
    /// Multicast groups that it is in or joins, and the numbers of the joins.
    pub(super) groups: Vec<Option<(IpAddr, usize)>>,
    /// The stream of a peer that is reached by exchange, or where such streams come in.
    pub(super) exchange: Option<ExchangeSocket>,
}

/// What an id has for an exchange.
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

/// An id without a user, whose queue pair is about to be destroyed.
#[derive(Debug)]
pub(super) struct RetiringQp {
    pub(super) key: Key,
    pub(super) qp: Qp,
    pub(super) raw: Arc<RawId>,
    pub(super) device: DeviceId,
    pub(super) state: IdState,
    /// When it is destroyed at the latest.
    pub(super) until: Instant,
}

/// How long a peer waits that found no receive posted, as a code: 0.64 ms. The connection manager would leave it at 655 ms.
pub(super) const MIN_RNR_TIMER: u8 = 12;
