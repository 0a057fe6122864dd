//! One connection, without I/O: completions, events of the connection manager, timers and calls of the program go in;
//! callbacks and things to do come out ([`effects`]). It knows no provider, no handler and no clock.
//!
//! A connection consists of a [`state`] with its data ([`setup`], [`handshake`]), the windows of both directions ([`credit`]), the two
//! queues ([`send_queue`], [`recv_queue`]), the messages past one buffer ([`fragments`], [`transfer`], [`shortage`]), the lists of reads
//! and writes ([`list`], [`batch`]) and the account of the peer's silence ([`keepalive`]). [`frame`] and [`greeting`] have the layouts of
//! its messages and private data, and [`admit`] has the messages that are legal in each stage. [`life`] has its beginning and its end,
//! [`evidence`] the reasons of the end, and [`securing`] the handshake between them and the first message, if the connection is secured.

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

/// The surroundings that every input of a connection works with.
#[derive(Debug)]
pub(crate) struct Env<'a> {
    pub(crate) now: Instant,
    pub(crate) config: &'a Config,
    /// Index of the connection's device.
    pub(crate) device: usize,
    /// The buffers of that device.
    pub(crate) buffers: &'a mut Buffers,
    pub(crate) effects: &'a mut Effects,
    pub(crate) stats: &'a mut Stats,
}

/// Which side asked for the connection.
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

/// The things that a refused send needs. Each variant needs everything that the variants above it need, and more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A place in the send queue.
    Place,
    /// A place and a credit.
    Message,
    /// Either places and credits for `parts` messages, or a place and a credit, an end of one of the transfers under way, and
    /// memory for a copy of `copy` bytes unless that is 0.
    Transfer { parts: usize, copy: usize },
}

impl Need {
    /// What is enough for one of two sends.
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

/// A refusal: a send found no room, and the program is owed an `on_writable`.
#[derive(Clone, Copy, Debug)]
struct Refused {
    /// The smallest need of all the sends refused since then.
    need: Need,
    since: Instant,
}

/// The terms that both sides have agreed on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// Largest payload that the peer takes in one buffer, bytes.
    pub(crate) buffer_size: usize,
    /// Largest message that the peer fetches, bytes.
    pub(crate) max_message: u64,
    /// Largest message that this side sends in several buffers of the peer, bytes; 0: the peer does not join them.
    pub(crate) eager: usize,
    /// The peer wants to hear of the parts of its large messages that this side has fetched.
    pub(crate) progress: bool,
    /// The peer ends the connection when it gets a goodbye.
    pub(crate) parting: bool,
    /// The peer understands that this side waits for memory before it fetches a message.
    pub(crate) waiting: bool,
    /// The peer understands tags of offers, and refusals of its offers.
    pub(crate) landings: bool,
    /// Both sides know the extensions of the embedded provider.
    pub(crate) extensions: bool,
}

/// The peer of a connection.
#[derive(Debug)]
struct Peer {
    address: SocketAddr,
    /// The listener that the peer came to.
    listener: Option<ListenerId>,
    /// The private data of the peer's program.
    private_data: Vec<u8>,
    /// How the two sides prove who they are.
    security: Security,
    /// Set once the peer has proven who it is.
    identity: Option<PeerIdentity>,
}

/// What a connection is opened with, on either side.
#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) framing: Framing,
    pub(crate) peer: SocketAddr,
    /// The name of the host that this side connects to, if it was given by its name.
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
    /// The connection is on the list of those with something to post.
    marked: bool,
    /// The program gathers sends over several turns.
    corked: bool,
    state: State,
    tx: SendWindow,
    rx: ReceiveWindow,
    /// The keys for what this side sends, as soon as that is sealed.
    sealer: Option<Box<Sealer>>,
    /// The keys for what the peer sends, as soon as that is sealed.
    opener: Option<Box<Opener>>,
    /// Time of the last sign of life: a message, a read that ended, or octets that the transport got.
    heard: Instant,
    terms: Terms,
    sends: SendQueue,
    receives: RecvQueue,
    refused: Option<Refused>,
    transfers: Transfers,
    keepalive: Keepalive,
    /// Total time in which sends were refused, up to the last `on_writable`.
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

    /// Notes the listener that the peer came to.
    pub(crate) fn came_to(&mut self, listener: ListenerId) {
        self.peer.listener = Some(listener);
    }

    /// The private data of the peer's program.
    pub(crate) fn private_data(&self) -> &[u8] {
        &self.peer.private_data
    }

    /// The keys for what this side sends, if that is sealed.
    pub(crate) fn sealer_mut(&mut self) -> Option<&mut Sealer> {
        self.sealer.as_deref_mut()
    }

    /// Whether the messages of the connection are to be sealed.
    pub(crate) fn is_secured(&self) -> bool {
        !self.peer.security.is_plain()
    }

    /// Returns what another attempt of the same connection is opened with, or `None` if the connection was up.
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

    /// Number of sends and of receives that the queue pair still has, and of which a completion is to tell.
    pub(crate) fn unflushed(&self) -> (usize, usize) {
        let planted = cfg!(planted = "an-end-waits-for-quiet-sends");
        let sends = if planted { self.sends.posted() } else { self.sends.awaited() };
        (sends, self.receives.posted())
    }

    /// Whether completions of the queue pair are still to come.
    pub(crate) fn is_outstanding(&self) -> bool {
        self.unflushed() != (0, 0)
    }

    /// Puts the connection on the list of those with something to post, once.
    #[inline]
    pub(crate) fn mark(&mut self, env: &mut Env<'_>) {
        if !std::mem::replace(&mut self.marked, true) {
            env.effects.to_post.push(self.id);
            if env.effects.outside {
                self.want(env, Action::Ring);
            }
        }
    }

    /// Whether the connection is on the list of those with something to post.
    #[inline]
    pub(crate) const fn is_marked(&self) -> bool {
        self.marked
    }

    /// Notes that the connection was taken off the list of those with something to post.
    pub(crate) const fn unmark(&mut self) {
        self.marked = false;
    }

    /// Asks for a callback.
    #[inline]
    fn tell(&self, env: &mut Env<'_>, event: Event) {
        env.effects.events.push_back((self.id, event));
    }

    /// Asks for an action.
    fn want(&self, env: &mut Env<'_>, action: Action) {
        env.effects.actions.push_back((self.id, action));
    }

    /// Asks for a check whether a send that was refused would be taken now.
    #[inline]
    fn ask_writable(&self, env: &mut Env<'_>) {
        if self.refused.is_some() {
            env.effects.to_ask.push_back(self.id);
        }
    }

    /// Whether a message may be queued now, as far as credits and places go.
    #[inline(always)]
    fn room_for_message(&self) -> Result<(), Blocked> {
        match (self.credits() > 0, self.has_place()) {
            (false, _) => Err(Blocked::Window),
            (_, false) => Err(Blocked::Queue),
            _ => Ok(()),
        }
    }

    /// Number of messages that the peer's window takes now. Without credits there is no window.
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

    /// Number of messages that would be taken now.
    pub(crate) fn writable(&self) -> usize {
        self.places().min(self.credits())
    }

    /// Number of work requests that would be taken now.
    pub(crate) fn places(&self) -> usize {
        if self.state.is_open() { self.sends.room(self.transfers.places()) } else { 0 }
    }

    /// As after a send that was refused, though there may be room. Returns false if the connection is not open.
    pub(crate) fn await_room(&mut self, need: Need, env: &mut Env<'_>) -> bool {
        if self.state.is_open() {
            self.refuse(need, env);
        }
        self.state.is_open()
    }

    /// Notes that a send was refused for want of room.
    pub(crate) fn refuse(&mut self, need: Need, env: &mut Env<'_>) {
        env.stats.messages.send_stalls += 1;
        let refused = self.refused.get_or_insert(Refused { need, since: env.now });
        refused.need = refused.need.either(need);
        self.sends.lists.reserve();
        if self.corked {
            // The cork lets go of the chain: only sends that go out and end can make room.
            self.mark(env);
        }
        if need == Need::Place && !self.sends.request_signal() {
            // What is posted ends with the ping.
            self.keepalive.owes_ping = true;
            self.mark(env);
        }
    }

    /// Returns the need of a refused send if the credits, places and transfers for it are there; the caller looks after
    /// memory. `None`: no send was refused, or it would be refused again.
    pub(crate) fn is_unblocked(&self) -> Option<Need> {
        let need = self.refused.filter(|_| self.state.is_open())?.need;
        let met = match need {
            Need::Place => self.has_place(),
            Need::Message => self.room_for_message().is_ok(),
            // In several buffers it takes neither a transfer nor memory.
            Need::Transfer { parts, .. } if parts <= self.writable() => return Some(Need::Message),
            Need::Transfer { .. } => self.room_for_message().is_ok() && self.transfers.has_room(),
        };
        met.then_some(need)
    }

    /// Tells the program that there is room again.
    pub(crate) fn unblock(&mut self, env: &mut Env<'_>) {
        if let Some(refused) = self.refused.take() {
            let stall = env.now.saturating_duration_since(refused.since);
            self.stalled += stall;
            env.stats.messages.stall_time += stall;
            self.tell(env, Event::Writable);
        }
    }

    /// Total time in which sends were refused.
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
