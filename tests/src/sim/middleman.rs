//! An attacker on the network path between two secured reactors. The attacker knows the transport protocol: it parses frames, changes them,
//! and sends them with valid numbers and checksums. So a reactor can detect a change only because messages are encrypted and authenticated.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, PeerViolation,
    SecurityMode, SendId, Wait,
};
use rdma_transport_embedded::iwarp::wire::crc32c;
use rdma_transport_embedded::iwarp::wire::mpa::fpdu_len;

use super::fabric::lock;
use super::quiet::{Node, network_of, reactor, step};
use super::swarm::MS;
use super::tcp::address;
use crate::conformance::harness::pattern;
use crate::identities::security;

/// The node that listens.
pub const SERVER: usize = 0;
/// The node that connects.
pub const CLIENT: usize = 1;

/// The number of bytes before the payload of a Send: the FPDU's length field, and the DDP and RDMAP headers.
const FRAME: usize = 2 + 18;
/// The length of the CRC of an FPDU, in bytes.
const CRC: usize = 4;
/// The length of the header of a message, in bytes.
const HEADER: usize = 8;

/// The way in which the attacker changes a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The message is dropped.
    Drop,
    /// The message arrives twice.
    Repeat,
    /// The message is sent after the next message.
    Swap,
    /// This number of bytes is removed from the end of the message.
    Truncate(usize),
    /// The bit at this position of the message is inverted.
    Flip(usize),
    /// The first encrypted message of the same sender is sent again before this message.
    Replay,
    /// A hello and data, both unencrypted, are sent before the message.
    Plain,
    /// This message and everything after it are dropped, in both directions. The end of the connection is dropped, too.
    Stall,
    /// The message is replaced by the beginning of a handshake that never ends.
    Flood,
}

/// The attack on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// Nothing is changed.
    None,
    /// One bit of a byte is inverted, and the CRC is recomputed.
    Octet {
        /// The node that has sent the byte.
        from: usize,
        /// The position of the byte among all bytes that the node sends.
        at: usize,
    },
    /// One message is changed.
    Message {
        /// The node that has sent the message.
        from: usize,
        /// The number of the message among all messages that the node sends.
        nth: usize,
        /// The way in which the message is changed.
        how: How,
    },
}

/// The kind of data that the attack has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hit {
    /// The greeting, in the private data of the startup frame.
    Greeting,
    /// An encrypted message.
    Sealed,
    /// The response to an RDMA Read.
    Fetched,
    /// A message of the handshake.
    Handshake,
    /// Headers and other data of the transport.
    Transport,
}

/// The state of one direction of the path.
#[derive(Debug, Default)]
struct Stream {
    waiting: Vec<u8>,
    started: bool,
    /// The frames of the current message that have arrived. The last frame of the message has not arrived yet.
    message: Vec<Vec<u8>>,
    /// The number of complete messages that have arrived.
    count: usize,
    /// The MSN (message sequence number) of the last message that was forwarded.
    number: u32,
    /// The number of bytes that were forwarded.
    gone: usize,
    /// A message that the attacker forwards only after the next message.
    held: Option<Vec<Vec<u8>>>,
    /// The first message after the handshake. The attacker may send it again later.
    recorded: Option<Vec<Vec<u8>>>,
    /// True if the last part of the handshake has arrived, so that later messages are encrypted.
    sealed: bool,
}

/// The attacker, see the [module](self).
#[derive(Debug)]
pub struct Middleman {
    attack: Attack,
    streams: [Stream; 2],
    /// The kind of data that the attack has changed; `None` if it has not changed anything yet.
    pub hit: Option<Hit>,
    /// True if nothing is forwarded any more.
    pub silent: bool,
}

/// Returns a copy of a frame with the message sequence number `number` and a valid CRC.
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

/// Returns the payload of a frame that is part of a Send, or `None` for other frames.
fn payload(frame: &[u8]) -> Option<&[u8]> {
    let len = usize::from(u16::from_be_bytes([frame[0], frame[1]]));
    let sends = len >= FRAME - 2 && frame[2] & 0x80 == 0 && matches!(frame[3] & 0xf, 3..=6) && frame[8..12] == [0; 4];
    sends.then(|| &frame[FRAME..2 + len])
}

/// Returns a copy of a frame with this payload, as the only frame of its message.
fn with_payload(frame: &[u8], payload: &[u8]) -> Vec<u8> {
    let len = FRAME - 2 + payload.len();
    let mut out = (len as u16).to_be_bytes().to_vec();
    out.extend_from_slice(&frame[2..FRAME]);
    out.extend_from_slice(payload);
    out.resize(fpdu_len(len), 0);
    // Marks the frame as the last one of its message, and sets its offset to 0.
    out[2] |= 0x40;
    out[2 + 14..2 + 18].fill(0);
    mend(&mut out);
    out
}

impl Middleman {
    /// Returns an attacker that carries out this attack.
    #[must_use]
    pub fn new(attack: Attack) -> Self {
        Self { attack, streams: Default::default(), hit: None, silent: false }
    }

    /// Returns the number of bytes, and the number of messages, that each node has sent so far.
    #[must_use]
    pub fn passed(&self) -> [(usize, usize); 2] {
        [0, 1].map(|node| (self.streams[node].gone, self.streams[node].count))
    }

    /// Processes bytes that the node `from` has sent. Returns the bytes that the attacker forwards to the other node.
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

    /// Forwards a frame. If the frame has the byte that the attack targets, changes this byte first.
    fn emit(&mut self, from: usize, mut frame: Vec<u8>, startup: bool, out: &mut Vec<u8>) {
        let stream = &mut self.streams[from];
        if let Attack::Octet { from: of, at } = self.attack {
            if of == from && (stream.gone..stream.gone + frame.len()).contains(&at) {
                let inside = at - stream.gone;
                let end = 2 + usize::from(u16::from_be_bytes([frame[0], frame[1]]));
                let tagged = !startup && frame[2] & 0x80 != 0;
                self.hit = Some(match () {
                    // In a startup frame, the greeting follows the fixed part and the limits of RDMA Reads.
                    () if startup && inside >= 24 => Hit::Greeting,
                    () if startup => Hit::Transport,
                    // In a tagged frame, the first 16 bytes are the length field and the DDP header.
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
        // 9 is the kind of a handshake message. In the last part of a handshake message, the byte after the header is 1.
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
                    // The payload begins with the header of a TLS record of 65,535 bytes. The rest of such a record would follow in further
                    // parts, which never arrive.
                    let part = [&[9, 0, 0, 0], &grant[..], &[0], &[0xff; 1390]].concat();
                    self.send(from, &[with_payload(&first, &part)], out);
                }
            }
        }
    }
}

/// The callbacks of one side.
#[derive(Clone, Default)]
pub struct Seen {
    /// True if `on_connect` was called.
    pub connected: bool,
    /// The received messages, in order.
    pub messages: Vec<Vec<u8>>,
    /// The reason of the disconnect; `None` if there was none.
    pub ended: Option<String>,
    /// True if the reactor has reported that a message is not authentic.
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
    /// Closes the connection if this side has opened it and everything was sent and received.
    fn close_if_done(&self, cx: &mut Context<'_>, conn: ConnectionId) {
        let seen = self.0.borrow();
        let active = cx.connection(conn).listener().is_none();
        if active && seen.sent == said().len() && seen.messages.len() == said().len() {
            cx.close(conn);
        }
    }
}

/// Returns the messages that each side sends. The peer fetches one of them by RDMA Read, because it is long, and the next one needs two
/// buffers. With the headers of the transport, they are more than 10,000 bytes in total.
#[must_use]
pub fn said() -> Vec<Vec<u8>> {
    [40, 0, 700, 9, 5000, 2500, 1800, 900].iter().enumerate().map(|(nth, &len)| pattern(nth, len)).collect()
}

impl Handler for Program {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.0.borrow_mut().connected = true;
        for message in said() {
            // The result is ignored: the peer may have ended the connection.
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

/// The results of a connection with an attacker on its path.
#[derive(Clone, Debug)]
pub struct History {
    /// The callbacks of each side. The index is the node.
    pub seen: [Seen; 2],
    /// The kind of data that the attack has changed, if it has changed anything.
    pub hit: Option<Hit>,
    /// The number of bytes, and the number of messages, that were forwarded. The index is the sending node.
    pub passed: [(usize, usize); 2],
}

impl History {
    /// Returns true if both sides have received all messages and the goodbye.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let ends = [(SERVER, DisconnectReason::Closed), (CLIENT, DisconnectReason::Local { complete: true })];
        self.seen.iter().all(|seen| seen.messages == said())
            && ends.iter().all(|(node, reason)| self.seen[*node].ended == Some(reason.to_string()))
    }

    /// If a side has received a message that differs from the message that the peer has sent at this position, returns a description.
    /// Otherwise returns `None`.
    #[must_use]
    pub fn wrong(&self) -> Option<String> {
        let said = said();
        self.seen.iter().enumerate().find_map(|(node, seen)| {
            let right = said.starts_with(&seen.messages) && (seen.connected || seen.messages.is_empty());
            (!right).then(|| format!("node {node} has got {} messages, not as they were sent", seen.messages.len()))
        })
    }
}

/// Runs two reactors. The attacker is on the path of their connection. TCP segments have `segment` bytes.
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
