//! [`DeviceHub`]: the state that all parts of the provider share: the ids, the devices, and the
//! events that the program has not read yet. A part, such as the queues or the regions, owns its
//! own state and takes the hub as an argument. The hub does not know the parts.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};

use super::NAME;
use super::channel::EventChannel;
use super::connector::Connector;
use super::devices::Device;
use super::entry::IdEntry;
use super::exchange_socket;
use super::id::ConnectOffer;
use rdma_transport::cm::{CmEvent, CmEventKind, CmId, ConnectParam, DisconnectCause, ReadDepth};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::event::AsyncEvent;
use rdma_transport::log_limit::LogLimit;
use rdma_transport::provider::DeviceId;
use rdma_transport::slab::{Key, Slab};

pub(super) const STALE_ID: TransportError = TransportError::Stale { object: "connection id" };

/// The tokens of the epoll set: `CM` for the event channel and `WAKE` for the waker. A device's
/// asynchronous events have the token `ASYNC` plus the number of the device.
const CM: Token = Token(0);
const WAKE: Token = Token(1);
pub(super) const ASYNC: usize = 2;

/// The read depth (IRD and ORD) that every iWARP device supports: a number of outstanding RDMA
/// Reads.
const DEFAULT_READ_DEPTH: u16 = 16;

/// The time limit for resolving an address while the program has not passed a time to the provider.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The epoll set whose descriptor is the provider's connection-manager channel, and the sources
/// that are ready and not processed yet.
pub(super) struct CmEventSet {
    pub(super) poll: Poll,
    pub(super) ready: Events,
    /// True if the event channel of librdmacm may have events.
    pub(super) channel: bool,
    /// The numbers of devices that may have asynchronous events.
    pub(super) devices: Vec<u32>, // local: the devices
    /// The ids whose socket epoll has reported as ready: the listening socket of a listener, or the
    /// stream of a connection by out-of-band exchange.
    pub(super) streams: VecDeque<Key>, // bound: connections, exchange-newcomers
}

impl CmEventSet {
    /// Polls the descriptors, and records which of them are ready. The first flag of the result is
    /// true if any descriptor may be ready, and the second if the waker is ready.
    pub(super) fn poll(&mut self) -> Result<(bool, bool)> {
        match self.poll.poll(&mut self.ready, Some(Duration::ZERO)) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => return Ok((true, false)),
            other => other.map_err(|source| TransportError::io("epoll_wait", source))?,
        }
        let mut any = false;
        let mut woken = false;
        for event in self.ready.iter() {
            any = true;
            match event.token() {
                CM => self.channel = true,
                token if exchange_socket::key_of(token).is_some() => {
                    self.streams.extend(exchange_socket::key_of(token))
                }
                token if token.0 >= ASYNC => self.devices.push((token.0 - ASYNC) as u32),
                _ => woken = true,
            }
        }
        Ok((any, woken))
    }
}

/// The state that all parts of the provider share. The comment of the [module](self) has an
/// overview.
pub(super) struct DeviceHub {
    /// The connection manager, or the reason why it cannot be used. Without it, queue pairs connect
    /// by out-of-band exchange only.
    manager: std::result::Result<Arc<EventChannel>, String>, // local: the text of one error
    pub(super) event_set: CmEventSet,
    pub(super) connector: Connector,
    pub(super) ids: Slab<IdEntry>,   // bound: connections, pending, exchange-newcomers
    pub(super) devices: Vec<Device>, // local: the devices
    /// Removed devices whose last id may be gone. `Verbs::settle` closes those that have no id.
    pub(super) left: Vec<DeviceId>, // local: the devices
    /// Events that the program has not read yet.
    pub(super) events: VecDeque<CmEvent>, // bound: events
    pub(super) device_events: VecDeque<AsyncEvent>, // bound: device-events
    pub(super) log_limit: LogLimit,
    /// The latest time that the program has passed to the provider.
    pub(super) now: Option<Instant>,
}

/// Returns the time from `now` to `deadline` in milliseconds, but at least 1. If `now` or
/// `deadline` is `None`, returns [`RESOLVE_TIMEOUT`].
pub(super) fn milliseconds_to(deadline: Option<Instant>, now: Option<Instant>) -> i32 {
    let left = match (deadline, now) {
        (Some(deadline), Some(now)) => deadline.saturating_duration_since(now),
        _ => RESOLVE_TIMEOUT,
    };
    i32::try_from(left.as_millis()).unwrap_or(i32::MAX).max(1)
}

impl DeviceHub {
    /// Makes a hub. `manager` is the channel of the connection manager. If the connection manager
    /// cannot be used, `manager` is the reason.
    pub(super) fn new(manager: std::result::Result<Arc<EventChannel>, String>) -> Result<Self> {
        let io = |source| TransportError::io("opening the connection-manager channel", source);
        let poll = Poll::new().map_err(io)?;
        if let Ok(channel) = &manager {
            poll.registry().register(&mut SourceFd(&channel.fd()), CM, Interest::READABLE).map_err(io)?;
        }
        let waker = Waker::new(poll.registry(), WAKE).map_err(io)?;
        Ok(Self {
            event_set: CmEventSet {
                poll,
                ready: Events::with_capacity(64),
                channel: manager.is_ok(),
                devices: Vec::new(),
                streams: VecDeque::new(),
            },
            manager,
            connector: Connector::new(waker),
            ids: Slab::default(),
            devices: Vec::new(),
            left: Vec::new(),
            events: VecDeque::new(),
            device_events: VecDeque::new(),
            log_limit: LogLimit::default(),
            now: None,
        })
    }

    /// Returns the connection manager.
    ///
    /// # Errors
    /// The connection manager cannot be used. The error contains the reason.
    pub(super) fn manager(&self) -> Result<&Arc<EventChannel>> {
        self.manager.as_ref().map_err(|why| TransportError::NoDevice {
            reason: format!("{why}; connecting by exchange works without it (docs/guide/exchange.md)"),
        })
    }

    pub(super) fn id(&self, id: CmId) -> Result<&IdEntry> {
        self.ids.get(id.0).filter(|id| id.is_public()).ok_or(STALE_ID)
    }

    pub(super) fn id_mut(&mut self, id: CmId) -> Result<&mut IdEntry> {
        self.ids.get_mut(id.0).filter(|id| id.is_public()).ok_or(STALE_ID)
    }

    pub(super) fn live_device(&self, device: DeviceId) -> Result<&Device> {
        let device = self.devices.get(device.0 as usize).ok_or(TransportError::Stale { object: "device" })?;
        device.live()?;
        Ok(device)
    }

    pub(super) fn add(&mut self, id: IdEntry) -> Key {
        let raw = Arc::clone(&id.raw);
        let key = self.ids.insert(id);
        raw.set_key(key);
        key
    }

    /// Returns the parameters that the local side offers to a peer. `requested` is the read depth
    /// that the peer has requested; `None` if the local side connects, or answers a request for
    /// datagrams, which has no read depth.
    pub(super) fn offer(
        &self,
        id: &IdEntry,
        param: &ConnectParam<'_>,
        requested: Option<ReadDepth>,
    ) -> Result<ConnectOffer> {
        let device = id.device.ok_or(TransportError::InvalidState { call: "connect", state: "on no device" })?;
        let device = &self.devices[device.0 as usize];
        device.info.capabilities.check_private_data(NAME, param.private_data)?;
        param.retries.check()?;
        let limits = &device.limits;
        let within = |what: &str, wanted: u16, limit: u8, requested: Option<u16>| {
            if wanted > limit.into() {
                local_log!(Info, "{}: {what} is {wanted}; the device has {limit}, which is used", device.info.name);
            }
            let wanted = if wanted == 0 { limit.into() } else { wanted.min(limit.into()) };
            match requested {
                // A peer with MPA revision 1 sends no read depths (IRD, ORD), so `requested` is 0.
                // Assume the read depth that every iWARP device supports.
                Some(0) if limits.iwarp => wanted.min(DEFAULT_READ_DEPTH),
                Some(requested) => wanted.min(requested),
                None => wanted,
            }
        };
        let read_depth = ReadDepth {
            responder_resources: within(
                "the number of responder resources",
                param.responder_resources,
                limits.responder_resources,
                requested.map(|requested| requested.responder_resources),
            ),
            initiator_depth: within(
                "the initiator depth",
                param.initiator_depth,
                limits.initiator_depth,
                requested.map(|requested| requested.initiator_depth),
            ),
        };
        Ok(ConnectOffer {
            private_data: param.private_data.into(),
            read_depth,
            retry_count: limits.retry_count(param.retries.path),
            rnr_retry_count: param.retries.receiver_not_ready,
            min_rnr_timer: param.retries.min_rnr_timer,
        })
    }

    pub(super) fn is_iwarp(&self, id: &IdEntry) -> bool {
        id.device.is_some_and(|device| self.devices[device.0 as usize].limits.iwarp)
    }

    pub(super) fn push(&mut self, key: Key, kind: CmEventKind) {
        self.events.push_back(CmEvent { id: CmId(key), kind });
    }

    /// Reports to each id for which `concerned` returns true that its path has failed. `why` is the
    /// reason in the event.
    pub(super) fn path_failed(&mut self, concerned: impl Fn(&IdEntry) -> bool, why: &str) {
        for (key, _) in self.ids.iter().filter(|(_, id)| concerned(id)) {
            let kind = CmEventKind::Disconnected(DisconnectCause::Path(why.into()));
            self.events.push_back(CmEvent { id: CmId(key), kind });
        }
    }

    pub(super) fn disconnected(&mut self, key: Key, cause: DisconnectCause) {
        if let Some(id) = self.ids.get_mut(key) {
            let event = id.disconnected(cause);
            self.push(key, event);
        }
    }

    pub(super) fn set_min_rnr_timer(&self, key: Key) {
        let Some(id) = self.ids.get(key) else { return };
        let Some(device) = id.device.and_then(|device| self.devices.get(device.0 as usize)) else { return };
        if !device.limits.iwarp {
            if let Err(error) = id.raw.set_min_rnr_timer(id.min_rnr_timer) {
                log::debug!("{}: the receiver-not-ready timer stays long: {error}", device.info.name);
            }
        }
    }

    /// Returns an error if the port is down. Never returns an error for iWARP, or if `device` is
    /// `None`.
    pub(super) fn check_port(&mut self, device: Option<DeviceId>, port: u8) -> Result<()> {
        let device = device.and_then(|device| self.devices.get_mut(device.0 as usize));
        device.map_or(Ok(()), |device| device.check_port(port))
    }
}
