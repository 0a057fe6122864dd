//! The state machine of one connection. It does no I/O. Its inputs are completions, events of the connection manager, timers and calls of
//! the program. Its outputs are callbacks and actions ([`effects`]). It uses no provider, no handler and no clock.
//!
//! - [`state`]: the states, with their data in [`setup`] and [`handshake`].
//! - [`life`]: the start and the end of a connection. [`evidence`]: the reason of the end.
//! - [`securing`]: the handshake of a secured connection, between the start and the first message.
//! - [`credit`]: the windows of both directions.
//! - [`send_queue`], [`recv_queue`]: the two queues.
//! - [`fragments`], [`transfer`], [`shortage`]: messages longer than one buffer.
//! - [`list`], [`batch`]: lists of Reads and Writes.
//! - [`keepalive`]: the keepalive.
//! - [`frame`], [`greeting`]: the layouts of messages and of private data.
//! - [`admit`]: the messages that are legal in each stage.

mod admit;
mod batch;
pub(crate) mod credit;
pub(crate) mod deadlines;
pub(crate) mod effects;
pub(crate) mod evidence;
pub(crate) mod fragments;
pub(crate) mod frame;
pub(crate) mod greeting;
pub(crate) mod handshake;
mod incoming;
pub(crate) mod keepalive;
pub(crate) mod life;
pub(crate) mod list;
mod nudge;
pub(crate) mod recv_queue;
pub(crate) mod securing;
pub(crate) mod send_queue;
mod sending;
pub(crate) mod setup;
pub(crate) mod shortage;
pub(crate) mod state;
pub(crate) mod transfer;

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use self::credit::{ReceiveWindow, SendWindow};
use self::deadlines::ConnectionDeadlines;
use self::effects::{Action, Effects, Event};
use self::keepalive::Keepalive;
use self::recv_queue::RecvQueue;
use self::send_queue::SendQueue;
use self::setup::Setup;
use self::state::State;
use self::transfer::Transfers;
use crate::config::{Config, Framing};
use crate::device::Buffers;
use crate::error::Blocked;
use crate::id::{ConnectionId, ListenerId};
use crate::security::{Opener, PeerIdentity, Sealer, Security};
use crate::stats::Stats;

/// The context in which a connection processes an input: the time, the configuration, the buffers, and the lists to which the connection
/// adds its outputs.
#[derive(Debug)]
pub(crate) struct Env<'a> {
    pub(crate) now: Instant,
    pub(crate) config: &'a Config,
    /// The index of the connection's device.
    pub(crate) device: usize,
    /// The buffer pools of the connection's device.
    pub(crate) buffers: &'a mut Buffers,
    pub(crate) effects: &'a mut Effects,
    pub(crate) stats: &'a mut Stats,
}

/// The role of the local side: active if it opened the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Active,
    Passive,
}

impl Role {
    pub(crate) const fn is_active(self) -> bool {
        matches!(self, Self::Active)
    }
}

/// The capacity that a refused send needs. Each variant includes the capacity that the variants before it need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A slot in the send queue.
    Slot,
    /// A send queue slot and a credit.
    Message,
    /// A message longer than one buffer. It can be sent in two ways. To send it as fragments, slots and credits for `parts` messages are
    /// needed. To offer it to the peer, a slot, a credit, one of the limited transfers in flight, and `copy` bytes of memory for a copy are
    /// needed.
    Transfer { parts: usize, copy: usize },
}

impl Need {
    /// Returns the smaller of two needs: with this capacity, at least one of the two refused sends succeeds.
    fn either(self, other: Self) -> Self {
        match (self, other) {
            (Self::Transfer { parts, copy }, Self::Transfer { parts: others, copy: other }) => {
                Self::Transfer { parts: parts.min(others), copy: copy.min(other) }
            }
            (Self::Transfer { .. }, less) | (less, Self::Transfer { .. }) => less,
            (Self::Slot, _) | (_, Self::Slot) => Self::Slot,
            (Self::Message, Self::Message) => Self::Message,
        }
    }
}

/// The state while the program waits for `on_writable`, because sends were refused for lack of capacity.
#[derive(Clone, Copy, Debug)]
struct SendRefusal {
    /// The smallest need of the sends that were refused since the last `on_writable`.
    need: Need,
    since: Instant,
}

/// The terms that the two sides have agreed on in their greetings.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// The largest payload of a message in one buffer, in bytes: the smaller of the limits of the two sides. `Framing::Raw` uses the limit
    /// of the local side.
    pub(crate) buffer_size: usize,
    /// The largest message that the peer reads from the local side's memory, in bytes.
    pub(crate) max_message: u64,
    /// The largest message that is sent as fragments, in several buffers of the peer, in bytes.
    pub(crate) eager: usize,
    /// True if both sides use the extensions of the embedded provider: immediate data and atomics.
    pub(crate) extensions: bool,
}

/// The peer of a connection.
#[derive(Debug)]
struct Peer {
    address: SocketAddr,
    /// The listener that accepted the peer's connect request. `None` if the local side opened the connection.
    listener: Option<ListenerId>,
    /// The private data of the peer's program.
    private_data: Vec<u8>, // bound: private-data
    /// The security mode of the connection, with the local keys or certificates.
    security: Security,
    /// The peer's identity. `None` until the peer has proven its identity.
    identity: Option<PeerIdentity>,
}

/// The parameters of a new connection, on either side.
#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) framing: Framing,
    pub(crate) peer: SocketAddr,
    /// The host name of the peer, if the connection was opened by name.
    pub(crate) host: Option<Box<str>>,
    pub(crate) private_data: Vec<u8>, // local: private data of the program
    /// True if the connection comes up only when the peer's device has acknowledged the hello.
    pub(crate) probes: bool,
    pub(crate) security: Security,
}

/// One connection. The comment of the [module](self) has an overview.
#[derive(Debug)]
pub(crate) struct Connection {
    id: ConnectionId,
    role: Role,
    framing: Framing,
    /// True if the connection is in the list `to_post` of [`Effects`].
    marked: bool,
    /// True if the program has called `cork`, so that sends are collected over several turns and posted together.
    pub(crate) corked: bool,
    state: State,
    tx: SendWindow,
    rx: ReceiveWindow,
    /// The keys that encrypt the local messages. Set when the local side starts to encrypt.
    sealer: Option<Box<Sealer>>,
    /// The keys that decrypt the peer's messages. Set when the peer starts to encrypt.
    opener: Option<Box<Opener>>,
    terms: Terms,
    pub(crate) sends: SendQueue,
    pub(crate) receives: RecvQueue,
    refused: Option<SendRefusal>,
    transfers: Transfers,
    keepalive: Keepalive,
    pub(crate) deadlines: ConnectionDeadlines,
    /// The total time that the program has waited from a refused send to the following `on_writable`. A wait that has not ended is not
    /// included.
    stalled: Duration,
    /// A number that the program has stored with the connection.
    pub(crate) user: u64,
    peer: Box<Peer>,
}

impl Connection {
    pub(crate) fn new(id: ConnectionId, role: Role, opening: Opening, config: &Config, now: Instant) -> Self {
        let Opening { framing, peer, host, private_data, probes, security } = opening;
        let setup = Box::new(Setup { host, probes, private_data, ..Setup::default() });
        let state = match role {
            Role::Active => State::Resolving(setup),
            Role::Passive => State::Accepting(setup),
        };
        Self {
            id,
            role,
            framing,
            marked: false,
            corked: false,
            state,
            tx: SendWindow::new(0),
            rx: ReceiveWindow::new(0),
            sealer: None,
            opener: None,
            terms: Terms::default(),
            sends: SendQueue::new(id, config.send_slots(), config.quiet_sends && framing == Framing::Credits),
            receives: RecvQueue::none(),
            refused: None,
            transfers: Transfers::default(),
            keepalive: Keepalive::new(now),
            deadlines: ConnectionDeadlines::default(),
            stalled: Duration::ZERO,
            user: 0,
            peer: Box::new(Peer { address: peer, listener: None, private_data: Vec::new(), security, identity: None }),
        }
    }

    pub(crate) const fn id(&self) -> ConnectionId {
        self.id
    }

    pub(crate) const fn framing(&self) -> Framing {
        self.framing
    }

    pub(crate) const fn state(&self) -> &State {
        &self.state
    }

    pub(crate) const fn terms(&self) -> &Terms {
        &self.terms
    }

    pub(crate) const fn is_active(&self) -> bool {
        self.role.is_active()
    }

    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer.address
    }

    pub(crate) fn listener(&self) -> Option<ListenerId> {
        self.peer.listener
    }

    /// Stores the listener that accepted the peer's connect request.
    pub(crate) fn came_to(&mut self, listener: ListenerId) {
        self.peer.listener = Some(listener);
    }

    /// Returns the private data of the peer's program.
    pub(crate) fn private_data(&self) -> &[u8] {
        &self.peer.private_data
    }

    /// Returns the keys that encrypt the local messages. `None` if the connection is not secured, or if the local side has not started to
    /// encrypt.
    pub(crate) fn sealer_mut(&mut self) -> Option<&mut Sealer> {
        self.sealer.as_deref_mut()
    }

    /// Returns true if the connection is encrypted, or will be after the handshake.
    pub(crate) fn is_secured(&self) -> bool {
        !self.peer.security.is_plain()
    }

    /// Returns the parameters for another attempt to open this connection. `None` if the connection was up.
    pub(crate) fn reopening(&self) -> Option<Opening> {
        let setup = self.state.setup()?;
        Some(Opening {
            framing: self.framing,
            peer: self.peer.address,
            host: setup.host.clone(),
            private_data: setup.private_data.clone(),
            probes: setup.probes,
            security: self.peer.security.clone(),
        })
    }

    /// Copies the settings of the program from `failed`, an earlier attempt to open this
    /// connection: `user`, the cork, and the flags for the next send.
    pub(crate) fn inherit(&mut self, failed: &Self) {
        (self.user, self.corked) = (failed.user, failed.corked);
        self.sends.inherit(&failed.sends);
    }

    /// Returns the number of posted sends, and the number of posted receives, whose completions have not arrived. An unsignaled send is not
    /// counted if no later signaled send is posted, because no completion will report it.
    pub(crate) fn unflushed(&self) -> (usize, usize) {
        let planted = crate::planted("an-end-waits-for-quiet-sends");
        let sends = if planted { self.sends.posted() } else { self.sends.awaited() };
        (sends, self.receives.posted())
    }

    /// Returns true if completions of posted sends or receives have not arrived yet.
    pub(crate) fn is_outstanding(&self) -> bool {
        self.unflushed() != (0, 0)
    }

    /// Adds the connection to the list of connections with work requests to post, unless it is in that list already.
    #[inline]
    pub(crate) fn mark(&mut self, env: &mut Env<'_>) {
        if !std::mem::replace(&mut self.marked, true) {
            env.effects.to_post.push(self.id);
            if env.effects.outside {
                self.want(env, Action::Ring);
            }
        }
    }

    /// Returns true if the connection is in the list of connections with work requests to post.
    #[inline]
    pub(crate) const fn is_marked(&self) -> bool {
        self.marked
    }

    /// Notes that the connection was removed from the list of connections with work requests to post.
    pub(crate) const fn unmark(&mut self) {
        self.marked = false;
    }

    /// Adds a callback to the outputs.
    #[inline]
    fn tell(&self, env: &mut Env<'_>, event: Event) {
        env.effects.push_event(self.id, event);
    }

    /// Adds an action to the outputs.
    fn want(&self, env: &mut Env<'_>, action: Action) {
        env.effects.actions.push_back((self.id, action));
    }

    /// Sets the deadline `step`: the timeout of the current step, or the next check of the peer of
    /// an open connection.
    fn wait_until(&mut self, at: Option<Instant>, env: &mut Env<'_>) {
        self.deadlines.step = at;
        self.want(env, Action::Deadline);
    }

    /// Schedules a check of the peer for `at`, unless an earlier check is scheduled.
    fn look_by(&mut self, at: Instant, env: &mut Env<'_>) {
        if self.deadlines.step.is_none_or(|earlier| at < earlier) {
            self.wait_until(Some(at), env);
        }
    }

    /// If a send was refused, requests that the driver checks whether that send would be accepted now.
    #[inline]
    fn ask_writable(&self, env: &mut Env<'_>) {
        if self.refused.is_some() {
            env.effects.to_ask.push_back(self.id);
        }
    }

    /// Returns `Ok` if a message can be queued now, or an error that names what is missing: a credit of the peer or a slot in the send
    /// queue.
    #[inline(always)]
    fn room_for_message(&self) -> Result<(), Blocked> {
        match (self.credits() > 0, self.has_slot()) {
            (false, _) => Err(Blocked::Window),
            (_, false) => Err(Blocked::Queue),
            _ => Ok(()),
        }
    }

    /// Returns the number of credits that messages of the program may use now, without the credits
    /// that are reserved for reports and lists. `Framing::Raw` has no window, so there is no limit.
    #[inline]
    fn credits(&self) -> usize {
        match self.framing {
            Framing::Credits => {
                let reserved = self.transfers.credits() + self.sends.lists.reserved_credits();
                (self.tx.available_for_data() as usize).saturating_sub(reserved)
            }
            Framing::Raw => usize::MAX,
        }
    }

    #[inline]
    fn has_slot(&self) -> bool {
        self.sends.room(self.transfers.slots()) > 0
    }

    /// Returns the number of messages that the program could send now.
    pub(crate) fn writable(&self) -> usize {
        self.free_slots().min(self.credits())
    }

    /// Returns the number of work requests that the program could queue now.
    pub(crate) fn free_slots(&self) -> usize {
        if self.state.is_open() { self.sends.room(self.transfers.slots()) } else { 0 }
    }

    /// Requests an `on_writable` for the time at which `need` can be met, as if a send had been
    /// refused, even if the capacity is available now. Returns false if the connection is not open.
    pub(crate) fn await_room(&mut self, need: Need, env: &mut Env<'_>) -> bool {
        if self.state.is_open() {
            self.refuse(need, env);
        }
        self.state.is_open()
    }

    /// Notes that a send with this need was refused for lack of capacity.
    pub(crate) fn refuse(&mut self, need: Need, env: &mut Env<'_>) {
        env.stats.messages.send_stalls += 1;
        let refused = self.refused.get_or_insert(SendRefusal { need, since: env.now });
        refused.need = refused.need.either(need);
        self.sends.lists.reserve();
        if self.corked {
            // The cork has delayed the sends in the chain. These sends are posted now, because they must end before the refused send can be
            // accepted.
            self.mark(env);
        }
        if need == Need::Slot && !self.sends.request_signal() {
            // No completion will report the posted sends, because all of them are unsignaled. So a signaled ping is sent, and its
            // completion frees the slots of these sends.
            self.keepalive.owes_ping = true;
            self.mark(env);
        }
    }

    /// Returns the need of the refused send if enough credits, send queue slots and transfers are
    /// available now. If the need includes memory for a copy, the caller must check that this
    /// memory is available. `None` if no send was refused, or if the send would be refused again.
    pub(crate) fn is_unblocked(&self) -> Option<Need> {
        let need = self.refused.filter(|_| self.state.is_open())?.need;
        let met = match need {
            Need::Slot => self.has_slot(),
            Need::Message => self.room_for_message().is_ok(),
            // There is capacity to send the message as fragments. This needs neither a transfer in flight nor memory for a copy.
            Need::Transfer { parts, .. } if parts <= self.writable() => return Some(Need::Message),
            Need::Transfer { .. } => self.room_for_message().is_ok() && self.transfers.has_room(),
        };
        met.then_some(need)
    }

    /// Calls `on_writable`, because the capacity that a refused send needs is available.
    pub(crate) fn unblock(&mut self, env: &mut Env<'_>) {
        if let Some(refused) = self.refused.take() {
            let stall = env.now.saturating_duration_since(refused.since);
            self.stalled += stall;
            env.stats.messages.stall_time += stall;
            self.tell(env, Event::Writable);
        }
    }

    /// Returns the total time that the program has waited for `on_writable` after a refused send, including the current wait if it has not
    /// ended.
    pub(crate) fn stall_time(&self, now: Instant) -> Duration {
        let open = self.refused.map_or(Duration::ZERO, |refused| now.saturating_duration_since(refused.since));
        self.stalled + open
    }
}
