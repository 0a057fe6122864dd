//! An attacker on the path between two secured reactors, with knowledge of the transport: it takes frames apart and rebuilds them with
//! valid numbers and checksums, so that only the seal of a message can reveal a change.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, PeerViolation,
    SecurityMode, SendId, Wait,
};
use rdma_transport::iwarp::wire::crc32c;
use rdma_transport::iwarp::wire::mpa::fpdu_len;

use super::fabric::lock;
use super::quiet::{Node, network_of, reactor, step};
use super::swarm::MS;
use super::tcp::address;
use crate::conformance::harness::pattern;
use crate::identities::security;

/// The node that listens, and the one that connects.
pub const SERVER: usize = 0;
/// The node that connects. See [`SERVER`].
pub const CLIENT: usize = 1;

/// The number of bytes of a frame in front of the payload of a Send: length, DDP and RDMAP.
const FRAME: usize = 2 + 18;
/// Length of the checksum of a frame.
const CRC: usize = 4;
/// The header of a message.
const HEADER: usize = 8;

/// The attack on a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The message is dropped.
    Drop,
    /// The message arrives twice.
    Repeat,
    /// The message behind it arrives first.
    Swap,
    /// The last bytes of the message are removed; the number of bytes.
    Truncate(usize),
    /// A bit of the message is flipped; its position.
    Flip(usize),
    /// The first sealed message of the same sender arrives again in front of the message.
    Replay,
    /// A hello and data without a seal arrive in front of the message.
    Plain,
    /// The message and all that follow are dropped, in both directions, including the end of the connection.
    Stall,
    /// Bytes of a handshake that does not end arrive in the place of the message.
    Flood,
}

/// The attack on the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// No attack.
    None,
    /// A bit of a byte from a node is flipped, and the checksum is recomputed.
    Octet {
        /// The sending node.
        from: usize,
        /// The position of the byte.
        at: usize,
    },
    /// A message from a node is attacked.
    Message {
        /// The sending node.
        from: usize,
        /// Number of the message.
        nth: usize,
        /// The attack on it.
        how: How,
    },
}

/// The target that an attack has hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hit {
    /// The private data of the startup frame.
    Greeting,
    /// A sealed message.
    Sealed,
    /// The response to an RDMA Read.
    Fetched,
    /// A message of the handshake.
    Handshake,
    /// Other parts that the transport adds.
    Transport,
}

/// One direction of the path.
#[derive(Debug, Default)]
struct Stream {
    waiting: Vec<u8>,
    started: bool,
    /// The frames of a message whose last frame has not arrived.
    message: Vec<Vec<u8>>,
    /// The number of messages that have arrived.
    count: usize,
    /// The number of the last forwarded message.
    number: u32,
    /// The number of forwarded bytes.
    gone: usize,
    /// A message that is forwarded behind the next one.
    held: Option<Vec<Vec<u8>>>,
    /// The first message behind the last part of the handshake.
    recorded: Option<Vec<Vec<u8>>>,
    /// The last part of the handshake has arrived.
    sealed: bool,
}

/// The attacker. See the [module](self).
#[derive(Debug)]
pub struct Middleman {
    attack: Attack,
    streams: [Stream; 2],
    /// The target of the attack, once it was hit.
    pub hit: Option<Hit>,
    /// Nothing is forwarded any more.
    pub silent: bool,
}

/// Returns a frame with another message number and a valid checksum.
fn renumbered(frame: &[u8], number: u32) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[2 + 10..2 + 14].copy_from_slice(&number.to_be_bytes());
    mend(&mut frame);
    frame
}

fn mend(frame: &mut [u8]) {
    let end = frame.len() - CRC;
    let sum = crc32c(&frame[..end]).to_le_bytes();
    frame[end..].copy_from_slice(&sum);
}

/// Returns the payload of a frame that is a part of a Send, else `None`.
fn payload(frame: &[u8]) -> Option<&[u8]> {
    let len = usize::from(u16::from_be_bytes([frame[0], frame[1]]));
    let sends = len >= FRAME - 2 && frame[2] & 0x80 == 0 && matches!(frame[3] & 0xf, 3..=6) && frame[8..12] == [0; 4];
    sends.then(|| &frame[FRAME..2 + len])
}

/// Returns a frame with another payload.
fn with_payload(frame: &[u8], payload: &[u8]) -> Vec<u8> {
    let len = FRAME - 2 + payload.len();
    let mut out = (len as u16).to_be_bytes().to_vec();
    out.extend_from_slice(&frame[2..FRAME]);
    out.extend_from_slice(payload);
    out.resize(fpdu_len(len), 0);
    // The frame is the only one of its message.
    out[2] |= 0x40;
    out[2 + 14..2 + 18].fill(0);
    mend(&mut out);
    out
}

impl Middleman {
    /// Returns a middleman with this attack.
    #[must_use]
    pub fn new(attack: Attack) -> Self {
        Self { attack, streams: Default::default(), hit: None, silent: false }
    }

    /// Returns the numbers of bytes and of messages that each node has sent.
    #[must_use]
    pub fn passed(&self) -> [(usize, usize); 2] {
        [0, 1].map(|node| (self.streams[node].gone, self.streams[node].count))
    }

    /// Consumes bytes from a node, and returns the bytes to forward to the other one.
    pub fn pass(&mut self, from: usize, octets: &[u8]) -> Vec<u8> {
        self.streams[from].waiting.extend_from_slice(octets);
        let mut out = Vec::new();
        while let Some(frame) = self.next_frame(from) {
            if !std::mem::replace(&mut self.streams[from].started, true) {
                self.emit(from, frame, true, &mut out);
            } else if payload(&frame).is_none() {
                self.emit(from, frame, false, &mut out);
            } else {
                let last = frame[2] & 0x40 != 0;
                self.streams[from].message.push(frame);
                if last {
                    let message = std::mem::take(&mut self.streams[from].message);
                    self.message(from, message, &mut out);
                }
            }
        }
        if self.silent { Vec::new() } else { out }
    }

    fn next_frame(&mut self, from: usize) -> Option<Vec<u8>> {
        let Stream { waiting, started, .. } = &mut self.streams[from];
        let len = match started {
            false if waiting.len() >= 20 => 20 + usize::from(u16::from_be_bytes([waiting[18], waiting[19]])),
            true if waiting.len() >= 2 => fpdu_len(usize::from(u16::from_be_bytes([waiting[0], waiting[1]]))),
            _ => return None,
        };
        (waiting.len() >= len).then(|| waiting.drain(..len).collect())
    }

    /// Forwards a frame, changed if it is the target.
    fn emit(&mut self, from: usize, mut frame: Vec<u8>, startup: bool, out: &mut Vec<u8>) {
        let stream = &mut self.streams[from];
        if let Attack::Octet { from: of, at } = self.attack {
            if of == from && (stream.gone..stream.gone + frame.len()).contains(&at) {
                let inside = at - stream.gone;
                let end = 2 + usize::from(u16::from_be_bytes([frame[0], frame[1]]));
                let tagged = !startup && frame[2] & 0x80 != 0;
                self.hit = Some(match () {
                    // The greeting is behind the fixed part and the limits of RDMA Reads.
                    () if startup && inside >= 24 => Hit::Greeting,
                    () if startup => Hit::Transport,
                    // The first 16 bytes of a tagged frame are the length and DDP.
                    () if tagged && (16..end).contains(&inside) => Hit::Fetched,
                    () if payload(&frame).is_none() || !(FRAME..end).contains(&inside) => Hit::Transport,
                    () if stream.sealed => Hit::Sealed,
                    () => Hit::Handshake,
                });
                frame[inside] ^= 1 << (at % 8);
                if !startup && inside < frame.len() - CRC {
                    mend(&mut frame);
                }
            }
        }
        self.streams[from].gone += frame.len();
        out.extend_from_slice(&frame);
    }

    fn send(&mut self, from: usize, message: &[Vec<u8>], out: &mut Vec<u8>) {
        self.streams[from].number += 1;
        let number = self.streams[from].number;
        for frame in message {
            self.emit(from, renumbered(frame, number), false, out);
        }
    }

    fn message(&mut self, from: usize, message: Vec<Vec<u8>>, out: &mut Vec<u8>) {
        let nth = self.streams[from].count;
        self.streams[from].count += 1;
        let text = payload(&message[0]).map(<[u8]>::to_vec).unwrap_or_default();
        let was_sealed = self.streams[from].sealed;
        if was_sealed && self.streams[from].recorded.is_none() {
            self.streams[from].recorded = Some(message.clone());
        }
        match self.attack {
            Attack::Message { from: of, nth: which, how } if of == from && which == nth => {
                self.hit = Some(if was_sealed { Hit::Sealed } else { Hit::Handshake });
                self.tamper(from, message, how, out);
            }
            _ => {
                self.send(from, &message, out);
                if let Some(held) = self.streams[from].held.take() {
                    self.send(from, &held, out);
                }
            }
        }
        // The kind of a handshake message, and its last part.
        self.streams[from].sealed |= text.first() == Some(&9) && text.get(HEADER) == Some(&1);
    }

    fn tamper(&mut self, from: usize, message: Vec<Vec<u8>>, how: How, out: &mut Vec<u8>) {
        let first = message[0].clone();
        let text = payload(&first).map(<[u8]>::to_vec).unwrap_or_default();
        match how {
            How::Drop => {}
            How::Repeat => {
                self.send(from, &message, out);
                self.send(from, &message, out);
            }
            How::Swap => self.streams[from].held = Some(message),
            How::Truncate(octets) => {
                let cut = with_payload(&first, &text[..text.len().saturating_sub(octets)]);
                self.send(from, &[cut], out);
            }
            How::Flip(bit) => {
                let mut text = text;
                let at = bit / 8 % text.len();
                text[at] ^= 1 << (bit % 8);
                self.send(from, &[with_payload(&first, &text)], out);
            }
            How::Replay => {
                if let Some(recorded) = self.streams[from].recorded.clone() {
                    self.send(from, &recorded, out);
                }
                self.send(from, &message, out);
            }
            How::Plain => {
                let grant = text.get(4..HEADER).unwrap_or_default().to_vec();
                for (kind, body) in [(1, &b""[..]), (0, b"made by somebody else")] {
                    let plain = [&[kind, 0, 0, 0], &grant[..], body].concat();
                    self.send(from, &[with_payload(&first, &plain)], out);
                }
                self.send(from, &message, out);
            }
            How::Stall => self.silent = true,
            How::Flood => {
                let grant = text.get(4..HEADER).unwrap_or_default().to_vec();
                for _ in 0..50 {
                    // A record of 65,535 bytes that continues.
                    let part = [&[9, 0, 0, 0], &grant[..], &[0], &[0xff; 1390]].concat();
                    self.send(from, &[with_payload(&first, &part)], out);
                }
            }
        }
    }
}

/// The callbacks of a side.
#[derive(Clone, Default)]
pub struct Seen {
    /// `on_connect` was called.
    pub connected: bool,
    /// The received messages, in order.
    pub messages: Vec<Vec<u8>>,
    /// The reason of the disconnect.
    pub ended: Option<String>,
    /// The reactor reported a message that is not authentic.
    pub noticed: bool,
    sent: usize,
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { connected, messages, ended, noticed, .. } = self;
        write!(f, "connected: {connected}, {} messages, ended: {ended:?}, noticed: {noticed}", messages.len())
    }
}

#[derive(Clone, Default)]
struct Program(Rc<RefCell<Seen>>);

impl Program {
    /// Closes the connection at the side that has opened it when everything was sent and received.
    fn close_if_done(&self, cx: &mut Context<'_>, conn: ConnectionId) {
        let seen = self.0.borrow();
        let active = cx.listener(conn).is_none();
        if active && seen.sent == said().len() && seen.messages.len() == said().len() {
            cx.close(conn);
        }
    }
}

/// Returns the messages of each side: one is fetched with an RDMA Read, and the next one occupies two buffers, which is more than 10,000
/// bytes with what the transport adds.
#[must_use]
pub fn said() -> Vec<Vec<u8>> {
    [40, 0, 700, 9, 5000, 2500, 1800, 900].iter().enumerate().map(|(nth, &len)| pattern(nth, len)).collect()
}

impl Handler for Program {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.0.borrow_mut().connected = true;
        for message in said() {
            // An ended connection on the peer's side counts as a refusal.
            let _ = cx.send(conn, &message);
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.0.borrow_mut().messages.push(message.to_vec());
        self.close_if_done(cx, conn);
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: SendId, outcome: Outcome) {
        self.0.borrow_mut().sent += usize::from(outcome.is_sent());
        self.close_if_done(cx, conn);
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        let mut seen = self.0.borrow_mut();
        seen.noticed = reason == DisconnectReason::PeerViolation(PeerViolation::NotAuthentic);
        seen.ended = Some(reason.to_string());
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.0.borrow_mut().ended = Some(error.to_string());
    }
}

/// The result of a connection with an attacker on its path.
#[derive(Clone, Debug)]
pub struct History {
    /// The callbacks of the sides, by node.
    pub seen: [Seen; 2],
    /// The target of the attack, if it was hit.
    pub hit: Option<Hit>,
    /// The number of forwarded bytes and of messages, by node.
    pub passed: [(usize, usize); 2],
}

impl History {
    /// Returns true if both sides have received everything, including the goodbye.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let ends = [(SERVER, DisconnectReason::Closed), (CLIENT, DisconnectReason::Local { complete: true })];
        self.seen.iter().all(|seen| seen.messages == said())
            && ends.iter().all(|(node, reason)| self.seen[*node].ended == Some(reason.to_string()))
    }

    /// Describes a message that a side has received and the other side has not sent, or not at this position.
    #[must_use]
    pub fn wrong(&self) -> Option<String> {
        let said = said();
        self.seen.iter().enumerate().find_map(|(node, seen)| {
            let right = said.starts_with(&seen.messages) && (seen.connected || seen.messages.is_empty());
            (!right).then(|| format!("node {node} has got {} messages, not as they were sent", seen.messages.len()))
        })
    }
}

/// Runs two reactors that communicate through a middleman, in TCP segments of `segment` bytes.
///
/// # Panics
/// Panics if a turn fails, or if the connection neither ends nor delivers everything within a minute.
#[must_use]
pub fn live(mode: SecurityMode, attack: Attack, segment: usize) -> History {
    let fabric = network_of(2, segment);
    lock(&fabric).middleman = Some(Middleman::new(attack));
    let programs = [Program::default(), Program::default()];
    let config = Config::default().wait(Wait::Event).buffer_size(2048).max_memory(8 << 20).security(security(mode));
    let config = config
        .large_messages(|l| l.eager_limit = 4 << 10)
        .timeouts(|t| t.connect = Duration::from_secs(10))
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_secs(1), Duration::from_secs(3)));
    let node = |node: usize| Node::new(reactor(node, &fabric, config.clone()), Box::new(programs[node].clone()));
    let mut nodes = vec![node(SERVER), node(CLIENT)];
    nodes[SERVER].reactor.context().listen(address(SERVER, 7471)).expect("a free port");
    nodes[CLIENT].reactor.context().connect(address(SERVER, 7471)).expect("connecting");
    let outcome = || {
        let fabric = lock(&fabric);
        let middleman = fabric.middleman.as_ref().expect("just put there");
        History {
            seen: [0, 1].map(|node| programs[node].0.borrow().clone()),
            hit: middleman.hit,
            passed: middleman.passed(),
        }
    };
    let end = 60_000 * MS;
    loop {
        let over = nodes.iter().all(|node| node.reactor.stats().connections.current == 0)
            && programs[CLIENT].0.borrow().ended.is_some();
        if over {
            return outcome();
        }
        assert!(lock(&fabric).now() < end, "{attack:?} keeps a connection half alive: {:?}", outcome());
        step(&fabric, &mut nodes).unwrap_or_else(|(node, error)| panic!("{attack:?}: node {node}: {error}"));
    }
}
