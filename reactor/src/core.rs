//! What the loop's stages and the callbacks share: the tables, and the operations of [`crate::Context`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use rdma_transport::cm::CmId;
use rdma_transport::provider::{DeviceId, Provider};
use rdma_transport::slab::{Key, Slab};
use rdma_transport::wr::RecvWr;

use crate::buffer::{Home, Returned};
use crate::choose::{self, Use};
use crate::config::{Config, ConnectOptions, Framing};
use crate::connection::{Connection, Owes, Phase};
use crate::credit::{ReceiveWindow, SendWindow};
use crate::datagram::{EndpointId, Endpoints};
use crate::device::Device;
use crate::drain::Drain;
use crate::error::Error;
use crate::fair::{Allowance, Fair};
use crate::frame::MAX_USER_PRIVATE_DATA;
use crate::id::{ConnectionId, GENERATION_BITS, ListenerId};
use crate::io::Registrations;
use crate::listener::Listener;
use crate::one_sided::Registration;
use crate::poller::Poller;
use crate::reactors::Membership;
use crate::remote::WakeFlag;
use crate::stats::Stats;

/// Bytes that are copied into a work request at most, where the device takes so many: the device need not fetch them.
const MAX_INLINE: u32 = 256;

/// What a timer is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TimerKind {
    /// A user's, with its token.
    User(u64),
    /// The current phase of a connection has lasted long enough.
    Phase(ConnectionId),
    /// Look whether a connection is still alive.
    Keepalive(ConnectionId),
    /// The lifetime of a peer's rights is over.
    Region(Key),
    /// Look whether a listener's device is back.
    Listen(ListenerId),
    /// The time to drain is over.
    Drain,
    /// Look whether pools have memory that nobody needs.
    Trim,
    /// A closed endpoint had its time to send.
    Endpoint(EndpointId),
    /// Nobody has said where datagrams are taken.
    Lookup(Key),
}

/// Whose a connection-manager id is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owner {
    Connection(ConnectionId),
    Listener(ListenerId),
    Endpoint(EndpointId),
    /// A question where datagrams are taken.
    Lookup(Key),
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) provider: Box<dyn Provider>,
    pub(crate) poller: Box<dyn Poller>,
    /// Descriptors of the program's own.
    pub(crate) io: Registrations,
    /// The first address used decides on another provider.
    undecided: bool,
    /// The provider's connection-manager channel is not registered yet.
    pub(crate) new_provider: bool,
    pub(crate) connections: Slab<Connection>,
    pub(crate) listeners: Slab<Listener>,
    pub(crate) endpoints: Endpoints,
    pub(crate) regions: Slab<Registration>,
    /// Copies of messages that peers are to fetch.
    pub(crate) copied_bytes: usize,
    /// Messages that were or are being fetched.
    pub(crate) fetched_bytes: usize,
    /// Connections that wait for memory for such a message.
    pub(crate) starved: Vec<ConnectionId>,
    /// By slot of the connection-manager id.
    owners: Vec<Option<(CmId, Owner)>>,
    /// By device number.
    pub(crate) devices: Vec<Option<Device>>,
    /// Devices that came into use and whose channels are not registered yet.
    pub(crate) new_devices: Vec<DeviceId>,
    pub(crate) timers: crate::timer::Timers<TimerKind>,
    /// One of them is to trim pools.
    pub(crate) trimming: bool,
    pub(crate) fair: Fair,
    /// Connections with something to post.
    pub(crate) dirty: Vec<ConnectionId>,
    /// Connections that were refused a send and may have room again.
    pub(crate) writable: Vec<ConnectionId>,
    /// Connections on their way out.
    pub(crate) ending: Vec<ConnectionId>,
    /// One of them may have come to its end: stage 10 is to look before anything sleeps.
    pub(crate) endings_moved: bool,
    /// Accepted and not announced yet.
    pub(crate) pending: u32,
    pub(crate) returned: Receiver<Returned>,
    pub(crate) return_to: Sender<Returned>,
    pub(crate) wake: Arc<WakeFlag>,
    pub(crate) stats: Stats,
    pub(crate) now: Instant,
    pub(crate) stop: bool,
    pub(crate) drain: Drain,
    /// The group of reactors this one is in.
    pub(crate) membership: Option<Membership>,
    pub(crate) receive_chain: Vec<RecvWr>,
}

impl Core {
    pub(crate) fn new(
        config: Config,
        provider: Box<dyn Provider>,
        poller: Box<dyn Poller>,
        wake: Arc<WakeFlag>,
        now: Instant,
    ) -> Self {
        let (return_to, returned) = crossbeam_channel::unbounded();
        Self {
            undecided: false,
            new_provider: true,
            config,
            provider,
            poller,
            io: Registrations::default(),
            connections: Slab::with_generation_bits(GENERATION_BITS),
            listeners: Slab::default(),
            endpoints: Endpoints::default(),
            regions: Slab::default(),
            copied_bytes: 0,
            fetched_bytes: 0,
            starved: Vec::new(),
            owners: Vec::new(),
            devices: Vec::new(),
            new_devices: Vec::new(),
            timers: crate::timer::Timers::default(),
            trimming: false,
            fair: Fair::default(),
            dirty: Vec::new(),
            writable: Vec::new(),
            ending: Vec::new(),
            endings_moved: false,
            pending: 0,
            returned,
            return_to,
            wake,
            stats: Stats::default(),
            now,
            stop: false,
            drain: Drain::default(),
            membership: None,
            receive_chain: Vec::new(),
        }
    }

    /// The counters, and the levels of now.
    pub(crate) fn snapshot(&self) -> Stats {
        let pools = self.devices.iter().flatten().map(|device| &device.pool);
        let (pool_buffers, pool_free) =
            pools.fold((0, 0), |(all, free), pool| (all + pool.capacity(), free + pool.available()));
        let (connections, acknowledgements) = (self.connections.len(), self.provider.acknowledgements());
        let shared = self.devices.iter().flatten().filter_map(Device::shared_levels);
        let (shared_posted, shared_unclaimed) =
            shared.fold((0, 0), |(all, free), (posted, unclaimed)| (all + posted, free + unclaimed));
        Stats { connections, acknowledgements, pool_buffers, pool_free, shared_posted, shared_unclaimed, ..self.stats }
    }

    /// Lets the first address that is used decide on the provider.
    pub(crate) const fn stay_undecided(&mut self) {
        self.undecided = true;
    }

    pub(crate) fn decide(&mut self, address: SocketAddr, usage: Use) {
        if std::mem::take(&mut self.undecided)
            && let Some(provider) = choose::for_address(address, usage)
        {
            self.change_provider(provider);
        }
    }

    /// Lets another reactor's choice of a provider decide.
    pub(crate) fn follow(&mut self, name: &'static str) {
        if std::mem::take(&mut self.undecided) && name != self.provider.name() {
            match choose::named(name) {
                Ok(provider) => self.change_provider(provider),
                Err(error) => log::warn!("{error}"),
            }
        }
    }

    fn change_provider(&mut self, provider: Box<dyn Provider>) {
        // Nothing was made on the old one yet.
        self.provider = provider;
        self.new_provider = true;
    }

    // Connection-manager ids.

    pub(crate) fn own(&mut self, cm: CmId, owner: Owner) {
        let slot = cm.0.slot() as usize;
        if self.owners.len() <= slot {
            self.owners.resize(slot + 1, None);
        }
        self.owners[slot] = Some((cm, owner));
    }

    pub(crate) fn disown(&mut self, cm: CmId) {
        if self.owner(cm).is_some() {
            self.owners[cm.0.slot() as usize] = None;
        }
    }

    pub(crate) fn owner(&self, cm: CmId) -> Option<Owner> {
        self.owners.get(cm.0.slot() as usize)?.filter(|(id, _)| *id == cm).map(|(_, owner)| owner)
    }

    // Connections.

    pub(crate) fn connect(&mut self, peer: SocketAddr, options: ConnectOptions) -> Result<ConnectionId, Error> {
        let ConnectOptions { private_data, framing } = options;
        if framing == Framing::Credits && private_data.len() > MAX_USER_PRIVATE_DATA {
            return Err(Error::PrivateDataTooLong { len: private_data.len(), max: MAX_USER_PRIVATE_DATA });
        }
        if matches!(self.drain, Drain::Overdue | Drain::Done) {
            return Err(Error::Drained);
        }
        if self.connections.len() >= self.config.max_connections as usize {
            return Err(Error::Limit { limit: "max_connections", value: self.config.max_connections.into() });
        }
        self.decide(peer, Use::Connect);
        let deadline = self.now + self.config.connect_timeout;
        let cm = self.provider.resolve(peer, deadline)?;
        let id = self.insert(cm, peer, framing, Phase::Resolving, private_data);
        self.set_phase_timer(id, self.config.connect_timeout);
        Ok(id)
    }

    /// Adds a connection to the tables.
    pub(crate) fn insert(
        &mut self,
        cm: CmId,
        peer: SocketAddr,
        framing: Framing,
        phase: Phase,
        private_data: Vec<u8>,
    ) -> ConnectionId {
        let key = self.connections.insert(Connection {
            id: ConnectionId(Key::new(0, 0)),
            cm,
            qp: None,
            equipped: false,
            announced: false,
            closed_here: false,
            device: 0,
            cq: 0,
            peer,
            active: phase == Phase::Resolving,
            framing,
            extensions: false,
            phase,
            ending: None,
            private_data,
            user: 0,
            tx: SendWindow::new(0),
            rx: ReceiveWindow::new(self.config.receive_depth),
            max_message: 0,
            largest_message: 0,
            transfers: crate::rendezvous::Transfers::default(),
            send_slots: self.config.send_slots() as usize,
            sends: std::collections::VecDeque::new(),
            answers: 0,
            holds: std::collections::VecDeque::new(),
            sends_done: 0,
            chain: Vec::new(),
            chained_message: false,
            corked: false,
            fence: false,
            solicited: false,
            unsignaled: 0,
            receives: std::collections::VecDeque::new(),
            reposts: Vec::new(),
            detached: 0,
            share: None,
            flush: crate::device::Mark::default(),
            overdue: None,
            provisional: false,
            next_send: 0,
            blocked: false,
            blocked_for_slot: false,
            blocked_copy: 0,
            regions: Vec::new(),
            blocked_since: self.now,
            stalled: Duration::ZERO,
            fair: Allowance::default(),
            dirty: false,
            owes: Owes::default(),
            last_heard: self.now,
            pinged: false,
            unheard: false,
            phase_timer: None,
            keepalive_timer: None,
        });
        let id = ConnectionId(key);
        if let Some(c) = self.connections.get_mut(key) {
            c.id = id;
        }
        self.own(cm, Owner::Connection(id));
        if let Some(membership) = &mut self.membership {
            membership.gained();
        }
        id
    }

    /// Restarts the deadline of a connection's phase.
    pub(crate) fn set_phase_timer(&mut self, id: ConnectionId, timeout: Duration) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if let Some(timer) = c.phase_timer.take() {
            self.timers.cancel(timer);
        }
        c.phase_timer = Some(self.timers.insert(self.now + timeout, TimerKind::Phase(id)));
    }

    /// A connection that the user has been told of.
    pub(crate) fn announced(&self, id: ConnectionId) -> Option<&Connection> {
        self.connections.get(id.0).filter(|c| c.announced)
    }

    /// The device of an index, made on first use.
    pub(crate) fn device(&mut self, id: DeviceId) -> &mut Device {
        let index = id.0 as usize;
        if self.devices.len() <= index {
            self.devices.resize_with(index + 1, || None);
        }
        let new_devices = &mut self.new_devices;
        let parts = || Home { pool: index, channel: self.return_to.clone(), wake: Arc::clone(&self.wake) };
        let home = || Arc::new(parts());
        self.devices[index].get_or_insert_with(|| {
            new_devices.push(id);
            Device::new(id, &*self.provider, &self.config, home())
        })
    }

    /// Gives a connection its queue pair and posts its receives.
    pub(crate) fn equip(&mut self, id: ConnectionId, device: DeviceId) -> Result<(), Error> {
        self.device(device);
        let index = device.0 as usize;
        let (Some(c), Some(dev)) = (self.connections.get_mut(id.0), self.devices[index].as_mut()) else {
            return Err(Error::Gone("connection"));
        };
        let sharing = self.config.shared_receives.filter(|_| c.framing == Framing::Credits);
        if let Some(receives) = sharing {
            dev.share_receives(&mut *self.provider, receives)?;
            self.settle_shared();
        }
        let (Some(c), Some(dev)) = (self.connections.get_mut(id.0), self.devices[index].as_mut()) else {
            return Err(Error::Gone("connection"));
        };
        let cq = dev.claim(&mut *self.provider, &self.config, sharing)?;
        let cq_id = dev.cqs[cq].id;
        let inline = self.provider.device(device).map_or(0, |info| info.capabilities.max_inline);
        let attr = rdma_transport::QpAttr {
            send_cq: cq_id,
            recv_cq: cq_id,
            max_send_wr: self.config.send_slots(),
            max_recv_wr: self.config.receive_depth,
            max_inline: inline.min(MAX_INLINE),
            max_recv_sge: 0,
        };
        let share = match &mut dev.shared {
            Some(shared) if sharing.is_some() => match shared.pot.join(self.now) {
                Some(share) => Some(share),
                None => {
                    dev.release(cq, &self.config, 0, true);
                    let value = sharing.unwrap_or_default().into();
                    return Err(Error::Limit { limit: "shared_receives", value });
                }
            },
            _ => None,
        };
        let made = match &dev.shared {
            Some(shared) if share.is_some() => self.provider.create_qp_with_srq(c.cm, &attr, shared.srq()),
            _ => self.provider.create_qp(c.cm, &attr),
        };
        let qp = match made {
            Ok(qp) => qp,
            Err(error) => {
                dev.release(cq, &self.config, 0, share.is_some());
                if let (Some(shared), Some(share)) = (&mut dev.shared, share) {
                    shared.pot.take_back(share.claim());
                }
                return Err(error.into());
            }
        };
        (c.device, c.cq, c.equipped) = (index, cq, true);
        c.qp = Some(qp);
        if let (Some(shared), Some(share)) = (&mut dev.shared, share) {
            shared.own(qp, id);
            c.rx = ReceiveWindow::new(share.claim());
            c.share = Some(share);
            return Ok(());
        }
        let depth = self.config.receive_depth as usize;
        c.receives.reserve(depth);
        c.reposts.reserve(depth);
        c.sends.reserve(c.send_slots);
        c.chain.reserve(c.send_slots);
        c.reposts.extend((0..depth).map_while(|_| dev.pool.take()));
        // These are the receives that the greeting grants: they are not news for the peer.
        self.post_receives(id)?;
        if let Some(c) = self.connections.get_mut(id.0) {
            c.rx = ReceiveWindow::new(self.config.receive_depth);
        }
        Ok(())
    }
}
