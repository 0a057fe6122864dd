//! A simulated world with one server, an honest client of the server, and a hostile peer. A tape of bytes controls the hostile peer. Time
//! is virtual.
//!
//! The bytes of the tape are not sent directly. They select operations. Most operations send a message that is valid except for one wrong
//! field, so that the server does not refuse it at the first check. So even a short tape gets past the startup, the CRC and the greeting.
//! Any sequence of bytes is a valid tape.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, Reactor, Wait};
use rdma_transport::mem::{RecvSlice, SendSlice};
use rdma_transport_embedded::iwarp::net::{NetChannel, SocketId, StreamSockets};
use rdma_transport_embedded::iwarp::wire::{Opcode, ReadRequest, Tagged, Untagged};

use super::fabric::{Shared, lock};
use super::net::SimNet;
use super::quiet::{Node, network, reactor, step};
use super::swarm::MS;
use super::tcp::address;
use crate::conformance::violations::{HELLO, greeting, message};
use crate::life::{Kind, Program};
use crate::peer::{SEND, fpdu_read, fpdu_tagged, fpdu_untagged, request, seal};

/// The node of the honest server.
const SERVER: usize = 0;
/// The node of the honest client.
const CLIENT: usize = 1;
/// The node of the hostile peer, which has no reactor.
pub const HOSTILE: usize = 2;
/// The depth of the receive queue, and of the send queue, of each connection of the server.
const DEPTH: u32 = 16;
const BUFFER: u32 = 512;
/// The server's memory for large messages, in each direction.
const TRANSFER_MEMORY: usize = 256 << 10;
/// The virtual time within which a hostile connection must end after the hostile peer has become silent, in ns.
const PATIENCE: u64 = 60_000 * MS;
/// The time limit of the honest client's echo while the hostile peer is active, in ns. Without a hostile peer, an echo takes 40 us. The
/// client pauses for 5 ms between echoes.
const ECHO: u64 = 2 * MS;

/// The results of a tape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The number of connections of the hostile peer for which the server called `on_connect`.
    pub connected: u64,
    /// The number of messages of the hostile peer that the server's program has received.
    pub messages: u64,
    /// The number of bytes that the server has sent to the hostile peer.
    pub answered: u64,
}

struct Tape<'a>(&'a [u8]);

impl Tape<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Returns a number that the next bytes of the tape determine. For most bytes it is below 20.
    fn small(&mut self) -> u32 {
        match self.byte() {
            byte @ 0..=199 => u32::from(byte) % 20,
            200..=229 => u32::from(self.byte()) * 16,
            _ => self.word(),
        }
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        let len = (self.small() as usize).min(most);
        (0..len).map(|_| self.byte()).collect()
    }
}

/// The handler of the server. It echoes the messages of the honest client, and reads those of the hostile peer.
#[derive(Default)]
struct Server {
    messages: u64,
}

impl Handler for Server {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if message.first() == Some(&b'p') && message.len() == 9 {
            // The result is ignored: the request may come from the hostile peer, and the send fails if this peer grants no credits.
            let _ = cx.send(conn, &message);
        } else {
            self.messages += 1;
            cx.connection(conn).set_user(self.messages);
        }
    }
}

fn config(pace: u32) -> Config {
    let ms = |time| Duration::from_millis(time) / pace;
    Config::default()
        .wait(Wait::Event)
        .buffer_size(BUFFER)
        .large_messages(|l| l.max_message = 64 << 10)
        .large_messages(|l| l.memory = TRANSFER_MEMORY)
        .large_messages(|l| l.cache = 0)
        .receive_depth(DEPTH)
        .send_depth(DEPTH)
        .timeouts(|t| (t.connect, t.handshake) = (ms(10_000), ms(5_000)))
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (ms(1_000), ms(3_000)))
        .timeouts(|t| (t.transfer, t.flush, t.close) = (ms(3_000), ms(50), ms(500)))
}

/// The hostile peer: its socket, and the counters that it needs for valid frames.
#[derive(Debug)]
pub struct Hostile {
    net: SimNet,
    /// The buffer for received bytes. It is reused, because a new buffer for each read would be slow.
    buffer: Box<[u8]>,
    socket: Option<SocketId>,
    /// The MSNs (message sequence numbers) of the next message and of the next RDMA Read Request.
    msn: [u32; 2],
    /// The position of the byte that is changed in the next frame; `None` if the next frame is not damaged.
    damage: Option<usize>,
    answered: u64,
}

impl Hostile {
    /// Returns a hostile peer that is not connected.
    #[must_use]
    pub fn new(fabric: &Shared) -> Self {
        Self::at(HOSTILE, fabric)
    }

    /// Returns a hostile peer on this node that is not connected.
    #[must_use]
    pub fn at(node: usize, fabric: &Shared) -> Self {
        let (net, buffer) = (SimNet::new(node, Arc::clone(fabric)), vec![0; 4096].into_boxed_slice());
        Self { net, buffer, socket: None, msn: [1; 2], damage: None, answered: 0 }
    }

    /// Opens a connection to `peer`. Resets the previous one first.
    pub fn open(&mut self, peer: SocketAddr) {
        self.close(true);
        self.msn = [1; 2];
        self.socket = self.net.connect(peer).ok();
    }

    /// Closes the connection, by a reset if `reset` is true.
    pub fn close(&mut self, reset: bool) {
        if let Some(socket) = self.socket.take() {
            self.net.close(socket, reset);
        }
    }

    /// Sends as many of the bytes as the socket accepts.
    pub fn send(&mut self, mut octets: Vec<u8>) {
        if let Some(at) = self.damage.take().filter(|_| !octets.is_empty()) {
            let at = at % (octets.len() * 8);
            octets[at / 8] ^= 1 << (at % 8);
        }
        if let Some(socket) = self.socket {
            // If the socket does not accept all bytes, the rest is dropped, because a hostile peer need not send complete frames.
            let _ = self.net.send(socket, &[SendSlice::new(&octets)]);
        }
    }

    /// Reads the received bytes and drops them.
    ///
    /// # Panics
    /// Never: a poll in the simulation cannot fail.
    pub fn read(&mut self) {
        let mut edges = Vec::new();
        for channel in [NetChannel::Cm, NetChannel::Completion] {
            self.net.poll(channel, &mut edges).expect("the simulation polls");
        }
        while let Some(Ok(count @ 1..)) =
            self.socket.map(|socket| self.net.recv(socket, &mut [RecvSlice::new(&mut self.buffer)]))
        {
            self.answered += count as u64;
        }
    }

    /// Sends a message of the reactors' protocol, as a Send with one FPDU.
    pub fn message(&mut self, message: &[u8]) {
        let header = Untagged { msn: self.msn[0], ..SEND };
        self.msn[0] = self.msn[0].wrapping_add(1);
        self.send(fpdu_untagged(&header, message, true));
    }

    /// Returns the number of bytes that the server has sent to this peer.
    #[must_use]
    pub const fn answered(&self) -> u64 {
        self.answered
    }

    /// Sends what an honest client sends first: the startup frame, and then the hello.
    pub fn greet(&mut self) {
        self.send(startup_frame(&greeting(GRANT)));
        self.message(&message(HELLO, GRANT, &[]));
    }

    fn startup(&mut self, tape: &mut Tape<'_>) {
        let mut greeting = greeting(GRANT);
        let choice = tape.byte();
        if choice >= 250 {
            greeting = tape.bytes(600);
        } else if choice >= 220 {
            let at = usize::from(tape.byte()) % greeting.len();
            greeting[at] = tape.byte();
        }
        let mut frame = startup_frame(&greeting);
        if (200..220).contains(&choice) {
            let at = usize::from(tape.byte()) % frame.len();
            frame[at] ^= tape.byte();
        }
        if choice == 199 {
            frame = tape.bytes(200);
        }
        self.send(frame);
        if choice < 190 {
            self.message(&message(HELLO, GRANT, &[]));
        }
    }

    /// Carries out the next operation of the tape. Returns the pause that follows the operation, in ns.
    fn act(&mut self, tape: &mut Tape<'_>, pace: u32) -> u64 {
        match tape.byte() % 40 {
            0 => self.startup(tape),
            1 => self.open(address(SERVER, 7471)),
            2 => {
                self.close(tape.byte() > 127);
                self.open(address(SERVER, 7471));
                self.startup(tape);
            }
            3 => self.close(tape.byte() > 127),
            4 => {
                if let Some(socket) = self.socket {
                    self.net.shutdown(socket);
                }
            }
            5 => self.damage = Some(tape.word() as usize),
            6 => return u64::from(tape.byte()) * 20 * MS / u64::from(pace),
            7 => {
                let octets = tape.bytes(300);
                self.send(octets);
            }
            8 => {
                // Sends an FPDU with random content and a valid CRC.
                let body = tape.bytes(300);
                let fpdu = [&(body.len() as u16).to_be_bytes()[..], &body].concat();
                self.send(seal(fpdu, true));
            }
            9 | 10 => {
                let opcode = match tape.byte() % 10 {
                    0 => Opcode::SendInvalidate,
                    1 => Opcode::SendSolicited,
                    2 => Opcode::SendSolicitedInvalidate,
                    3 => Opcode::Terminate,
                    4 => Opcode::Immediate,
                    5 => Opcode::AtomicRequest,
                    6 => Opcode::AtomicResponse,
                    7 => Opcode::Other(12),
                    _ => Opcode::Send,
                };
                let header = Untagged {
                    last: tape.byte() > 60,
                    opcode,
                    reserved_or_stag: tape.small(),
                    queue: tape.small() % 5,
                    msn: if tape.byte() > 60 { self.msn[0] } else { tape.small() },
                    offset: if tape.byte() > 60 { 0 } else { tape.small() },
                };
                self.msn[0] = self.msn[0].wrapping_add(u32::from(header.last));
                let payload = tape.bytes(1400);
                self.send(fpdu_untagged(&header, &payload, true));
            }
            11 => {
                let opcode = if tape.byte() > 127 { Opcode::Write } else { Opcode::ReadResponse };
                let (stag, offset) = (tape.word(), u64::from(tape.word()));
                let header = Tagged { last: tape.byte() > 60, opcode, stag, offset };
                let payload = tape.bytes(1400);
                self.send(fpdu_tagged(&header, &payload, true));
            }
            12 => {
                let read = ReadRequest {
                    sink_stag: tape.word(),
                    sink_offset: u64::from(tape.word()),
                    size: tape.small(),
                    source_stag: tape.word(),
                    source_offset: u64::from(tape.word()),
                };
                let msn = self.msn[1];
                self.msn[1] = self.msn[1].wrapping_add(1);
                self.send(fpdu_read(msn, &read, true));
            }
            13 => {
                // Sends RDMA Writes without data, which need no right.
                let nothing = Tagged { last: true, opcode: Opcode::Write, stag: 0, offset: 0 };
                let count = usize::from(tape.byte());
                self.send(fpdu_tagged(&nothing, &[], true).repeat(count));
            }
            14 | 15 => {
                let offer: Vec<u8> = [
                    &header(6, tape)[..],
                    &tape.small().to_le_bytes(),
                    &tape.word().to_le_bytes(),
                    &u64::from(tape.word()).to_le_bytes(),
                    &u64::from(tape.small()).saturating_mul(1000).to_le_bytes(),
                    &[0; 4],
                ]
                .concat();
                self.message(&offer);
            }
            16 => {
                let fetched = [&header(7, tape)[..], &tape.small().to_le_bytes()].concat();
                self.message(&fetched);
            }
            17..=33 => {
                // Sends a request of the kind that an honest program sends.
                let ask = [&header(0, tape)[..], b"p", &[0; 8]].concat();
                self.message(&ask);
            }
            _ => {
                let kind = tape.byte() % 11;
                let mut header = header(kind, tape);
                if kind == FRAGMENT {
                    header[1] = tape.byte() % 8;
                }
                let message = [&header[..], &tape.bytes(700)].concat();
                self.message(&message);
            }
        }
        MS / 10
    }
}

/// Returns the first frame of a client, with this private data.
#[must_use]
pub fn startup_frame(private_data: &[u8]) -> Vec<u8> {
    let len = (4 + private_data.len()) as u16;
    request(&[&[0x50, 2], &len.to_be_bytes()[..], &[0, 16, 0, 16], private_data].concat())
}

/// The number of receives that the hostile peer claims to have posted.
const GRANT: u32 = 16;

/// The kind of a frame that carries a part of a message. Its header has the number of parts that follow.
const FRAGMENT: u8 = 10;

/// Returns the header of a frame of the kind `kind`. In most cases, the grant in the header is correct.
fn header(kind: u8, tape: &mut Tape<'_>) -> [u8; 8] {
    let grant = if tape.byte() > 40 { 16 } else { tape.small() };
    let mut header = [kind, 0, 0, 0, 0, 0, 0, 0];
    header[4..].copy_from_slice(&grant.to_le_bytes());
    header
}

struct World {
    fabric: Shared,
    nodes: Vec<Node>,
    client: Program,
    hostile: Hostile,
    /// The virtual time of the honest client's last echo in ns, and the number of its echoes so far.
    last: (u64, u64),
}

impl World {
    fn server(&mut self) -> &mut Reactor {
        &mut self.nodes[SERVER].reactor
    }

    /// Advances the time by `time` ns, and gives turns to all nodes. Checks that the honest client gets its echoes in time.
    fn pass(&mut self, time: u64) {
        let end = lock(&self.fabric).now() + time;
        loop {
            let now = lock(&self.fabric).now();
            let echoes = self.client.0.borrow().echoes;
            if echoes > self.last.1 {
                self.last = (now, echoes);
            }
            assert!(now - self.last.0 < 5 * MS + ECHO, "no echo for {} us", (now - self.last.0) / 1000);
            self.hostile.read();
            let stats = self.server().stats();
            let (memory, connections) = (stats.memory, stats.connections.current);
            assert!(memory.fetched_bytes <= TRANSFER_MEMORY && memory.copied_bytes <= TRANSFER_MEMORY, "{memory:?}");
            assert!(connections <= 64, "{connections} connections of two peers");
            if now >= end {
                return;
            }
            step(&self.fabric, &mut self.nodes).unwrap_or_else(|(node, error)| panic!("node {node}: {error}"));
        }
    }
}

/// Plays a tape. `pace` divides the time limits and the hostile peer's pauses, so that fewer echoes of the honest client are simulated.
///
/// # Panics
/// Panics if the hostile peer has disturbed the server or the honest client, or if the server still has a connection or memory of the
/// hostile peer when the time limit after the last operation is over.
#[must_use]
pub fn play(tape: &[u8], pace: u32) -> Outcome {
    let (fabric, client) = (network(3), Program::default());
    let nodes = vec![
        Node::new(reactor(SERVER, &fabric, config(pace)), Box::<Server>::default()),
        Node::new(reactor(CLIENT, &fabric, config(pace)), Box::new(client.clone())),
    ];
    let hostile = Hostile::new(&fabric);
    let mut world = World { fabric, nodes, client, hostile, last: (0, 0) };
    world.server().context().listen(address(SERVER, 7471)).expect("a free port");
    world.client.open(&mut world.nodes[CLIENT].reactor.context(), address(SERVER, 7471), Kind::Ping);
    world.hostile.open(address(SERVER, 7471));
    world.pass(MS);
    let mut tape = Tape(tape);
    world.hostile.startup(&mut tape);
    world.pass(MS);
    while !tape.0.is_empty() {
        let pause = world.hostile.act(&mut tape, pace);
        world.pass(pause);
    }
    // From now on, the hostile peer is silent.
    let end = lock(&world.fabric).now() + PATIENCE / u64::from(pace);
    while world.server().stats().connections.current > 1 {
        assert!(lock(&world.fabric).now() < end, "the hostile connection still exists");
        world.pass(100 * MS / u64::from(pace));
    }
    let stats = world.server().stats();
    let memory = stats.memory;
    assert_eq!((memory.regions, memory.fetched_bytes, memory.copied_bytes), (0, 0, 0), "{memory:?}");
    let kept = memory.pool_buffers - memory.pool_free;
    assert!(kept <= 2 * DEPTH as usize + 2, "{kept} buffers of one connection");
    assert!(world.client.0.borrow().ended.is_empty(), "the honest client is connected");
    Outcome {
        connected: stats.connections.connected - 1,
        messages: stats.messages.received - world.client.0.borrow().echoes,
        answered: world.hostile.answered,
    }
}
