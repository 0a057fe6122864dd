//! [`Verbs`]: the provider's tables, and the functions that look up their entries.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};

use super::NAME;
use super::address::Address;
use super::chains::Chains;
use super::channel::EventChannel;
use super::connector::Connector;
use super::cq::{Batch, Cq};
use super::devices::Device;
use super::entry::{IdEntry, IdState, RetiringQp};
use super::ffi::check;
use super::gid::{PortGid, SYSFS};
use super::id::ConnectOffer;
use super::mr::RegisteredRegion;
use super::srq::Srq;
use super::sys::ibv_fork_init;
use crate::cm::{CmId, ConnectParam, ExchangeOptions, ReadDepth};
use crate::error::{Result, TransportError};
use crate::event::AsyncEvent;
use crate::log_limit::LogLimit;
use crate::newcomers::Newcomers;
use crate::provider::{DeviceId, Entropy};
use crate::slab::{Key, Slab};

pub(super) const STALE_ID: TransportError = TransportError::Stale { object: "connection id" };
pub(super) const STALE_QP: TransportError = TransportError::Stale { object: "queue pair" };
pub(super) const STALE_CQ: TransportError = TransportError::Stale { object: "completion queue" };
pub(super) const STALE_SRQ: TransportError = TransportError::Stale { object: "shared receive queue" };

/// The tokens of the epoll set: `CM` for the event channel and `WAKE` for the waker. A device's asynchronous events
/// have the token `ASYNC` plus the number of the device.
pub(super) const CM: Token = Token(0);
const WAKE: Token = Token(1);
pub(super) const ASYNC: usize = 2;

/// The read depth (IRD and ORD) that every iWARP device supports: a number of outstanding RDMA Reads.
const DEFAULT_READ_DEPTH: u16 = 16;

/// The time limit for resolving an address while the program has not passed a time to the provider.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The epoll set whose descriptor is the provider's connection-manager channel, and the sources that are ready and not
/// processed yet.
pub(super) struct CmEventSet {
    pub(super) poll: Poll,
    pub(super) ready: Events,
    /// True if the event channel of librdmacm may have events.
    pub(super) channel: bool,
    /// The numbers of devices that may have asynchronous events.
    pub(super) devices: Vec<u32>, // local: the devices
    /// The ids whose socket epoll has reported as ready: the listening socket of a listener, or the stream of a
    /// connection by out-of-band exchange.
    pub(super) streams: VecDeque<Key>, // bound: connections, exchange-newcomers
}

/// A local address and options, and the port and GID that were found for them: an entry of a cache.
pub(super) type CachedPortGid = (Option<SocketAddr>, ExchangeOptions, PortGid);

/// A local address and options for which a search has found no port, and the time from which on connect requests cause the next search.
pub(super) type FailedSearch = (Option<SocketAddr>, ExchangeOptions, Instant);

/// The state that all connections by out-of-band exchange share.
pub(super) struct Exchanges {
    /// The source of random bytes for the sequence numbers of first packets. Without it the provider does not have the
    /// role [`Exchange`](crate::roles::Exchange).
    pub(super) entropy: Option<Entropy>,
    /// The folder in which the kernel lists the devices and their GIDs (sysfs).
    pub(super) sysfs: PathBuf,
    /// Accepted streams on which the peer has not sent a request yet.
    pub(super) newcomers: Newcomers<Key>, // bound: exchange-newcomers
    /// The deadlines of connections that are being set up, and the times at which listeners end their pauses. Each
    /// entry has the key of the connection's or the listener's id.
    pub(super) deadlines: BTreeSet<(Instant, Key)>, // bound: connections, exchange-newcomers
    /// A cache of the last searches for a port and a GID. It avoids reading whole GID tables for each connect.
    pub(super) port_gids: VecDeque<CachedPortGid>, // bound: exchange-searches
    /// The searches for the ports of connect requests that have failed recently.
    pub(super) failed_searches: VecDeque<FailedSearch>, // bound: exchange-searches
}

/// The provider of RDMA devices, through librdmacm and libibverbs. [`Verbs::open`] opens it.
///
/// The descriptor of its connection-manager channel is an epoll set. The set covers the event channel of librdmacm, the asynchronous events
/// of the devices in use, the streams of connections by out-of-band exchange, and the results of the private threads for iWARP.
pub struct Verbs {
    /// The connection manager, or the reason why it cannot be used. Without it, queue pairs connect by out-of-band
    /// exchange only.
    manager: std::result::Result<Arc<EventChannel>, String>, // local: the text of one error
    pub(super) event_set: CmEventSet,
    pub(super) connector: Connector,
    pub(super) ids: Slab<IdEntry>, // bound: connections, pending, exchange-newcomers
    pub(super) log_limit: LogLimit,
    pub(super) cqs: Slab<Cq>,                   // bound: completions
    pub(super) srqs: Slab<Srq>,                 // local: one for each device
    pub(super) regions: Slab<RegisteredRegion>, // bound: pool, large-messages, copies, kept-blocks
    pub(super) addresses: Slab<Address>,        // local: peers that the program has looked up
    /// The number of multicast joins so far, which is also the number of the last join.
    pub(super) joins: usize,
    pub(super) batch: Batch,
    pub(super) devices: Vec<Device>, // local: the devices
    /// Queue pairs that are destroyed when their last shared receive has completed, or when their time limit has
    /// passed. The list is in the order of the time limits.
    pub(super) retiring: VecDeque<RetiringQp>, // bound: ending-ids
    pub(super) exchanges: Exchanges,
    /// Ids that wait until their peer closes the connection, each with its time limit, in the order of the time limits. The list may
    /// contain ids that the program has destroyed.
    pub(super) closing: VecDeque<(Instant, Key)>, // bound: ending-ids
    /// Events that the program has not read yet.
    pub(super) events: VecDeque<crate::cm::CmEvent>, // bound: events
    pub(super) device_events: VecDeque<AsyncEvent>, // bound: device-events
    pub(super) chains: Chains,
    pub(super) acknowledgements: u64,
    /// The latest time that the program has passed to the provider.
    pub(super) now: Option<Instant>,
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verbs")
            .field("devices", &self.devices)
            .field("ids", &self.ids.len())
            .field("cqs", &self.cqs.len())
            .field("regions", &self.regions.len())
            .finish_non_exhaustive()
    }
}

/// Returns the time from `now` to `deadline` in milliseconds, but at least 1. If `now` or `deadline` is `None`, returns
/// [`RESOLVE_TIMEOUT`].
pub(super) fn milliseconds_to(deadline: Option<Instant>, now: Option<Instant>) -> i32 {
    let left = match (deadline, now) {
        (Some(deadline), Some(now)) => deadline.saturating_duration_since(now),
        _ => RESOLVE_TIMEOUT,
    };
    i32::try_from(left.as_millis()).unwrap_or(i32::MAX).max(1)
}

impl Verbs {
    /// Makes a provider. `manager` is the channel of the connection manager. If the connection manager cannot be used,
    /// `manager` is the reason.
    pub(super) fn on_channel(manager: std::result::Result<Arc<EventChannel>, String>) -> Result<Self> {
        protect_from_forks();
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
            log_limit: LogLimit::default(),
            cqs: Slab::default(),
            srqs: Slab::default(),
            regions: Slab::default(),
            addresses: Slab::default(),
            joins: 0,
            batch: Batch::default(),
            devices: Vec::new(),
            retiring: VecDeque::new(),
            exchanges: Exchanges {
                entropy: None,
                sysfs: SYSFS.into(),
                newcomers: Newcomers::default(),
                deadlines: BTreeSet::new(),
                port_gids: VecDeque::new(),
                failed_searches: VecDeque::new(),
            },
            closing: VecDeque::new(),
            events: VecDeque::new(),
            device_events: VecDeque::new(),
            chains: Chains::default(),
            acknowledgements: 0,
            now: None,
        })
    }

    /// Sets the source of random bytes. Connections by out-of-band exchange use it for the sequence numbers of their first packets. After
    /// this call the provider has the role [`Exchange`](crate::roles::Exchange). Use a source that peers cannot predict.
    #[must_use]
    pub fn with_entropy(mut self, entropy: Entropy) -> Self {
        self.exchanges.entropy = Some(entropy);
        self
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
        self.ids
            .get(id.0)
            .filter(|id| !matches!(id.state, IdState::WatchingDevice | IdState::AwaitingRequest))
            .ok_or(STALE_ID)
    }

    pub(super) fn id_mut(&mut self, id: CmId) -> Result<&mut IdEntry> {
        self.ids
            .get_mut(id.0)
            .filter(|id| !matches!(id.state, IdState::WatchingDevice | IdState::AwaitingRequest))
            .ok_or(STALE_ID)
    }

    pub(super) fn live_device(&self, device: DeviceId) -> Result<&Device> {
        let device = self.devices.get(device.0 as usize).ok_or(TransportError::Stale { object: "device" })?;
        device.live()?;
        Ok(device)
    }

    pub(super) fn add(&mut self, id: IdEntry) -> Key {
        let key = self.ids.insert(id);
        if let Some(id) = self.ids.get(key) {
            id.raw.set_key(key);
        }
        key
    }

    /// Returns the parameters that the local side offers to a peer. `asked` is the read depth that the peer has
    /// requested; `None` if the local side connects, or answers a request for datagrams, which has no read depth.
    pub(super) fn offer(
        &self,
        id: &IdEntry,
        param: &ConnectParam<'_>,
        asked: Option<ReadDepth>,
    ) -> Result<ConnectOffer> {
        let device = id.device.ok_or(TransportError::InvalidState { call: "connect", state: "on no device" })?;
        let device = &self.devices[device.0 as usize];
        device.info.capabilities.check_private_data(NAME, param.private_data)?;
        param.retries.check()?;
        let limits = &device.limits;
        let within = |what: &str, wanted: u16, limit: u8, asked: Option<u16>| {
            if wanted > limit.into() {
                local_log!(Info, "{}: {what} is {wanted}; the device has {limit}, which is used", device.info.name);
            }
            let wanted = if wanted == 0 { limit.into() } else { wanted.min(limit.into()) };
            match asked {
                // A peer with MPA revision 1 sends no read depths (IRD, ORD), so `asked` is 0. Assume the read depth
                // that every iWARP device supports.
                Some(0) if limits.iwarp => wanted.min(DEFAULT_READ_DEPTH),
                Some(asked) => wanted.min(asked),
                None => wanted,
            }
        };
        let read_depth = ReadDepth {
            responder_resources: within(
                "the number of responder resources",
                param.responder_resources,
                limits.responder_resources,
                asked.map(|asked| asked.responder_resources),
            ),
            initiator_depth: within(
                "the initiator depth",
                param.initiator_depth,
                limits.initiator_depth,
                asked.map(|asked| asked.initiator_depth),
            ),
        };
        Ok(ConnectOffer {
            private_data: param.private_data.into(),
            read_depth,
            retry_count: limits.retry_count(param.retries.path),
            rnr_retry_count: param.retries.receiver_not_ready,
        })
    }

    pub(super) fn is_iwarp(&self, id: &IdEntry) -> bool {
        id.device.is_some_and(|device| self.devices[device.0 as usize].limits.iwarp)
    }
}

/// Makes libibverbs exclude registered memory from child processes. It must be called before the first registration. Otherwise,
/// copy-on-write after a `fork` could give this process other pages than those that the device uses. Since version 5.12 the kernel copies
/// such memory for the child during the fork. On such kernels this call does nothing (rdma-core asks the kernel, since version 33).
fn protect_from_forks() {
    // SAFETY: the call has no arguments, and may be repeated at any time.
    let rc = unsafe { ibv_fork_init() };
    if let Err(error) = check("ibv_fork_init", rc) {
        local_log!(
            Warn,
            "{error}: this process must not fork while it has RDMA devices open, unless the child only executes another program"
        );
    }
}

impl Drop for Verbs {
    fn drop(&mut self) {
        for key in self.ids.keys() {
            if let Err(error) = self.remove(key) {
                local_log!(Error, "{error}: the device keeps the posted work requests");
            }
        }
        for device in 0..self.devices.len() {
            self.retire_now(DeviceId(device as u32));
            self.release_waiting(DeviceId(device as u32));
        }
    }
}
