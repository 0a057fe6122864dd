//! One connection, without I/O. Its inputs are completions, events of the connection manager, timers and calls of the
//! program; its outputs are callbacks and actions ([`effects`]). It knows no provider, no handler and no clock.
//!
//! A connection consists of a [`state`] with its data ([`setup`], [`handshake`]), the windows of both directions ([`credit`]), the two
//! queues ([`send_queue`], [`recv_queue`]), the messages longer than one buffer ([`fragments`], [`transfer`], [`shortage`]), the lists of
//! reads and writes ([`list`], [`batch`]) and the keepalive ([`keepalive`]). [`frame`] and [`greeting`] define the layouts of its messages
//! and private data, and [`admit`] the messages that are legal in each stage. [`life`] implements its beginning and its end, [`evidence`]
//! the reasons of the end, and [`securing`] the handshake between them and the first message, if the connection is secured.

mod admit;
mod batch;
pub(crate) mod credit;
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
pub(crate) mod recv_queue;
pub(crate) mod securing;
pub(crate) mod send_queue;
pub(crate) mod setup;
pub(crate) mod shortage;
pub(crate) mod state;
pub(crate) mod transfer;

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use self::credit::{ReceiveWindow, SendWindow};
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

/// The environment of every input of a connection.
#[derive(Debug)]
pub(crate) struct Env<'a> {
    pub(crate) now: Instant,
    pub(crate) config: &'a Config,
    /// The index of the connection's device.
    pub(crate) device: usize,
    /// The buffers of that device.
    pub(crate) buffers: &'a mut Buffers,
    pub(crate) effects: &'a mut Effects,
    pub(crate) stats: &'a mut Stats,
}

/// The side that opened the connection.
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

/// The needs of a refused send. Each variant includes the needs of the variants above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A slot in the send queue.
    Place,
    /// A slot and a credit.
    Message,
    /// Either slots and credits for `parts` messages, or a slot and a credit, an end of one of the transfers in flight, and memory for a
    /// copy of `copy` bytes unless that is 0.
    Transfer { parts: usize, copy: usize },
}

impl Need {
    /// Returns the smaller of two needs: enough for at least one of the two refused sends.
    fn either(self, other: Self) -> Self {
        match (self, other) {
            (Self::Transfer { parts, copy }, Self::Transfer { parts: others, copy: other }) => {
                Self::Transfer { parts: parts.min(others), copy: copy.min(other) }
            }
            (Self::Transfer { .. }, less) | (less, Self::Transfer { .. }) => less,
            (Self::Place, _) | (_, Self::Place) => Self::Place,
            (Self::Message, Self::Message) => Self::Message,
        }
    }
}

/// A refusal: a send found no capacity, and an `on_writable` is due.
#[derive(Clone, Copy, Debug)]
struct SendRefusal {
    /// The smallest need of all the sends refused since then.
    need: Need,
    since: Instant,
}

/// The terms that both sides have agreed on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// The largest payload that the peer accepts in one buffer, in bytes.
    pub(crate) buffer_size: usize,
    /// The largest message that the peer fetches, in bytes.
    pub(crate) max_message: u64,
    /// The largest message that is sent in several buffers of the peer, in bytes; 0 if the peer does not join them.
    pub(crate) eager: usize,
    /// True if the peer wants notifications of the parts of its large messages that were fetched.
    pub(crate) progress: bool,
    /// True if the peer ends the connection when it receives a goodbye.
    pub(crate) parting: bool,
    /// True if the peer understands that the local side waits for memory before it fetches a message.
    pub(crate) waiting: bool,
    /// True if the peer understands tags of offers, and refusals of its offers.
    pub(crate) landings: bool,
    /// True if both sides know the extensions of the embedded provider.
    pub(crate) extensions: bool,
}

/// The peer of a connection.
#[derive(Debug)]
struct Peer {
    address: SocketAddr,
    /// The listener that accepted the peer's connect request.
    listener: Option<ListenerId>,
    /// The private data of the peer's program.
    private_data: Vec<u8>,
    /// The way in which the two sides prove their identities.
    security: Security,
    /// The peer's identity. Set once it is proven.
    identity: Option<PeerIdentity>,
}

/// The parameters with which a connection is opened, on either side.
#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) framing: Framing,
    pub(crate) peer: SocketAddr,
    /// The host name of the peer, if the connection was opened by name.
    pub(crate) host: Option<Box<str>>,
    pub(crate) private_data: Vec<u8>,
    pub(crate) security: Security,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Connection {
    id: ConnectionId,
    role: Role,
    framing: Framing,
    /// True if the connection is on the list of those with something to post.
    marked: bool,
    /// True if the program gathers sends over several turns.
    corked: bool,
    state: State,
    tx: SendWindow,
    rx: ReceiveWindow,
    /// The keys for the local messages, once they are sealed.
    sealer: Option<Box<Sealer>>,
    /// The keys for the messages of the peer, once they are sealed.
    opener: Option<Box<Opener>>,
    /// The time of the last sign of life: a message, the end of a Read, or bytes that the transport received.
    heard: Instant,
    terms: Terms,
    sends: SendQueue,
    receives: RecvQueue,
    refused: Option<SendRefusal>,
    transfers: Transfers,
    keepalive: Keepalive,
    /// The total time in which sends were refused, up to the last `on_writable`.
    stalled: Duration,
    /// The program's number.
    user: u64,
    peer: Box<Peer>,
}

impl Connection {
    pub(crate) fn new(id: ConnectionId, role: Role, opening: Opening, config: &Config, now: Instant) -> Self {
        let Opening { framing, peer, host, private_data, security } = opening;
        let setup = Box::new(Setup { host, private_data, ..Setup::default() });
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
            heard: now,
            terms: Terms::default(),
            sends: SendQueue::new(id, config.send_slots(), config.quiet_sends && framing == Framing::Credits),
            receives: RecvQueue::none(),
            refused: None,
            transfers: Transfers::default(),
            keepalive: Keepalive::new(now),
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

    /// Notes the listener that accepted the peer's connect request.
    pub(crate) fn came_to(&mut self, listener: ListenerId) {
        self.peer.listener = Some(listener);
    }

    /// Returns the private data of the peer's program.
    pub(crate) fn private_data(&self) -> &[u8] {
        &self.peer.private_data
    }

    /// Returns the keys for the local messages, if they are sealed.
    pub(crate) fn sealer_mut(&mut self) -> Option<&mut Sealer> {
        self.sealer.as_deref_mut()
    }

    /// Returns true if the messages of the connection are to be sealed.
    pub(crate) fn is_secured(&self) -> bool {
        !self.peer.security.is_plain()
    }

    /// Returns the parameters for another attempt of the same connection, or `None` if the connection was up.
    pub(crate) fn reopening(&self) -> Option<Opening> {
        let setup = self.state.setup()?;
        Some(Opening {
            framing: self.framing,
            peer: self.peer.address,
            host: setup.host.clone(),
            private_data: setup.private_data.clone(),
            security: self.peer.security.clone(),
        })
    }

    pub(crate) const fn user(&self) -> u64 {
        self.user
    }

    pub(crate) const fn set_user(&mut self, value: u64) {
        self.user = value;
    }

    pub(crate) const fn receives(&self) -> &RecvQueue {
        &self.receives
    }

    pub(crate) fn receives_mut(&mut self) -> &mut RecvQueue {
        &mut self.receives
    }

    pub(crate) fn sends_mut(&mut self) -> &mut SendQueue {
        &mut self.sends
    }

    /// Returns the number of sends and of receives that the queue pair still has, and that a completion will report.
    pub(crate) fn unflushed(&self) -> (usize, usize) {
        let planted = cfg!(planted = "an-end-waits-for-quiet-sends");
        let sends = if planted { self.sends.posted() } else { self.sends.awaited() };
        (sends, self.receives.posted())
    }

    /// Returns true if completions of the queue pair are outstanding.
    pub(crate) fn is_outstanding(&self) -> bool {
        self.unflushed() != (0, 0)
    }

    /// Adds the connection to the list of those with something to post, unless it is in it.
    #[inline]
    pub(crate) fn mark(&mut self, env: &mut Env<'_>) {
        if !std::mem::replace(&mut self.marked, true) {
            env.effects.to_post.push(self.id);
            if env.effects.outside {
                self.want(env, Action::Ring);
            }
        }
    }

    /// Returns true if the connection is on the list of those with something to post.
    #[inline]
    pub(crate) const fn is_marked(&self) -> bool {
        self.marked
    }

    /// Notes that the connection was removed from the list of those with something to post.
    pub(crate) const fn unmark(&mut self) {
        self.marked = false;
    }

    /// Requests a callback.
    #[inline]
    fn tell(&self, env: &mut Env<'_>, event: Event) {
        env.effects.events.push_back((self.id, event));
    }

    /// Requests an action.
    fn want(&self, env: &mut Env<'_>, action: Action) {
        env.effects.actions.push_back((self.id, action));
    }

    /// Requests a check if a refused send would be accepted now.
    #[inline]
    fn ask_writable(&self, env: &mut Env<'_>) {
        if self.refused.is_some() {
            env.effects.to_ask.push_back(self.id);
        }
    }

    /// Returns true if credits and slots allow a message to be queued now.
    #[inline(always)]
    fn room_for_message(&self) -> Result<(), Blocked> {
        match (self.credits() > 0, self.has_place()) {
            (false, _) => Err(Blocked::Window),
            (_, false) => Err(Blocked::Queue),
            _ => Ok(()),
        }
    }

    /// Returns the number of messages that the peer's window allows now. Without credits there is no window.
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
    fn has_place(&self) -> bool {
        self.sends.room(self.transfers.places()) > 0
    }

    /// Returns the number of messages that would be accepted now.
    pub(crate) fn writable(&self) -> usize {
        self.places().min(self.credits())
    }

    /// Returns the number of work requests that would be accepted now.
    pub(crate) fn places(&self) -> usize {
        if self.state.is_open() { self.sends.room(self.transfers.places()) } else { 0 }
    }

    /// Requests an `on_writable` as after a refused send, even if there is capacity. Returns false if the connection is
    /// not open.
    pub(crate) fn await_room(&mut self, need: Need, env: &mut Env<'_>) -> bool {
        if self.state.is_open() {
            self.refuse(need, env);
        }
        self.state.is_open()
    }

    /// Notes that a send was refused for lack of capacity.
    pub(crate) fn refuse(&mut self, need: Need, env: &mut Env<'_>) {
        env.stats.messages.send_stalls += 1;
        let refused = self.refused.get_or_insert(SendRefusal { need, since: env.now });
        refused.need = refused.need.either(need);
        self.sends.lists.reserve();
        if self.corked {
            // The cork releases the chain: only sends that go out and end can free capacity.
            self.mark(env);
        }
        if need == Need::Place && !self.sends.request_signal() {
            // The posted sends end with the ping.
            self.keepalive.owes_ping = true;
            self.mark(env);
        }
    }

    /// Returns the need of a refused send if the credits, slots and transfers for it are available; the caller checks
    /// memory. `None` if no send was refused, or it would be refused again.
    pub(crate) fn is_unblocked(&self) -> Option<Need> {
        let need = self.refused.filter(|_| self.state.is_open())?.need;
        let met = match need {
            Need::Place => self.has_place(),
            Need::Message => self.room_for_message().is_ok(),
            // In several buffers it needs neither a transfer nor memory.
            Need::Transfer { parts, .. } if parts <= self.writable() => return Some(Need::Message),
            Need::Transfer { .. } => self.room_for_message().is_ok() && self.transfers.has_room(),
        };
        met.then_some(need)
    }

    /// Reports to the program that there is capacity again.
    pub(crate) fn unblock(&mut self, env: &mut Env<'_>) {
        if let Some(refused) = self.refused.take() {
            let stall = env.now.saturating_duration_since(refused.since);
            self.stalled += stall;
            env.stats.messages.stall_time += stall;
            self.tell(env, Event::Writable);
        }
    }

    /// Returns the total time in which sends were refused.
    pub(crate) fn stall_time(&self, now: Instant) -> Duration {
        let open = self.refused.map_or(Duration::ZERO, |refused| now.saturating_duration_since(refused.since));
        self.stalled + open
    }

    /// Starts to gather sends over several turns.
    pub(crate) const fn cork(&mut self) {
        self.corked = true;
    }

    /// Ends [`Connection::cork`].
    pub(crate) const fn uncork(&mut self) {
        self.corked = false;
    }
}
