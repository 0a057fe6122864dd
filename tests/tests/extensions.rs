//! Immediate data and atomics of the embedded provider. The reactor offers these extensions in its greeting, and uses them only if the
//! peer's greeting offers them, too. A connection with raw framing has no greeting, so the program states if its peer has the extensions.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rdma_reactor::transport::Features;
use rdma_reactor::transport::iwarp::wire::mpa::fpdu_len;
use rdma_reactor::transport::iwarp::wire::{Opcode, SegmentHeader};
use rdma_reactor::{
    Config, ConnectOptions, ConnectionId, Context, Framing, Handler, Message, ProviderChoice, Reactor, Region,
    RegionOptions, RemoteRegion, SendErrorKind,
};
use rdma_reactor_tests::patience::{PATIENCE, patient};

/// The length of the greeting, in bytes.
const GREETING: usize = 20;
/// The offset of the feature bits in the greeting.
const FEATURES: usize = 7;
/// The feature bits that the reactor offers. Bit 0: immediate data and atomics. Bits 4 and 5: the
/// kind of security, which is off here.
const OFFERED: u8 = 1;

#[derive(Default)]
struct Client {
    conn: Option<ConnectionId>,
}

impl Handler for Client {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {}
}

/// A peer that is a plain socket. If `accept` is called with feature bits, the peer's greeting has these bits. If `accept` is called with
/// `None`, the peer uses raw framing, which has no greeting.
struct Peer {
    stream: TcpStream,
}

impl Peer {
    fn accept(listener: &TcpListener, features: Option<u8>) -> Self {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut request = vec![0; 20];
        stream.read_exact(&mut request).unwrap();
        // The private data ends with the hash of the path within the host, if there is a greeting.
        request.resize(20 + usize::from(u16::from_be_bytes([request[18], request[19]])), 0);
        stream.read_exact(&mut request[20..]).unwrap();
        assert_eq!(request.len(), 24 + features.map_or(0, |_| GREETING + 4));
        // The reply repeats the request, and announces that the client's first message is a Write.
        let mut reply = request.clone();
        reply[..16].copy_from_slice(b"MPA ID Rep Frame");
        reply[22] &= 0xbf;
        if let Some(features) = features {
            assert_eq!((&request[24..28], request[24 + FEATURES]), (&b"RDXR"[..], OFFERED));
            reply[24 + FEATURES] = features;
        }
        stream.write_all(&reply).unwrap();
        Self { stream }
    }

    /// Reads the next FPDU, and returns its opcode.
    fn opcode(&mut self) -> Opcode {
        let mut frame = vec![0; 2];
        self.stream.read_exact(&mut frame).unwrap();
        frame.resize(fpdu_len(usize::from(u16::from_be_bytes([frame[0], frame[1]]))), 0);
        self.stream.read_exact(&mut frame[2..]).unwrap();
        SegmentHeader::parse(&frame).unwrap().opcode()
    }
}

fn connected(features: u8, config: Config) -> (Reactor, Client, Peer, ConnectionId) {
    connected_with(Some(features), config, ConnectOptions::new())
}

#[allow(clippy::disallowed_methods)]
fn connected_with(
    features: Option<u8>,
    config: Config,
    options: ConnectOptions,
) -> (Reactor, Client, Peer, ConnectionId) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut reactor = Reactor::new(config.provider(ProviderChoice::Iwarp)).unwrap();
    let mut client = Client::default();
    let peer = listener.local_addr().unwrap();
    let answers = std::thread::spawn(move || Peer::accept(&listener, features));
    reactor.context().connect_with(peer, options).unwrap();
    let end = Instant::now() + PATIENCE;
    while client.conn.is_none() {
        assert!(Instant::now() < end, "not connected");
        reactor.turn(&mut client, Some(Duration::from_millis(10))).unwrap();
    }
    let conn = client.conn.unwrap();
    (reactor, client, answers.join().unwrap(), conn)
}

fn use_them(reactor: &mut Reactor, conn: ConnectionId) -> (Region, Option<SendErrorKind>) {
    let mut cx = reactor.context();
    let mut local = cx.regions().register(conn, 64, &RegionOptions::new()).unwrap();
    let remote = RemoteRegion { address: 0x1000, len: 64, key: 7 };
    let refused = cx.remote(conn).fetch_add(remote, &mut local, 0, 1).err();
    if refused.is_some() {
        cx.remote(conn).write_with_immediate(remote, &local, 0..8, 9).unwrap();
    }
    (local, refused)
}

#[test]
fn not_without_the_peers_word() {
    // These greetings lack bit 0, the extensions. Bits 4 and 5 are 0, which means that the peer
    // uses no security. The other bits have no meaning.
    for features in [0, 0xce] {
        let (mut reactor, mut client, mut peer, conn) = connected(features, patient(Config::default()));
        let has = reactor.context().connection(conn).capabilities().unwrap().features;
        assert!(!has.intersects(Features::ATOMICS | Features::WRITE_WITH_IMMEDIATE), "{has:?}");
        let (_local, refused) = use_them(&mut reactor, conn);
        assert!(matches!(refused, Some(SendErrorKind::Unsupported { .. })), "{refused:?}");
        for _ in 0..10 {
            reactor.turn(&mut client, Some(Duration::ZERO)).unwrap();
        }
        // Four frames have arrived: the zero-length RDMA Write that completes the MPA handshake, the hello, and the two frames by which the
        // reactor replaces the program's Write with immediate data: a Write, and a message with the immediate data.
        let got = [peer.opcode(), peer.opcode(), peer.opcode(), peer.opcode()];
        assert_eq!(got, [Opcode::Write, Opcode::Send, Opcode::Write, Opcode::Send]);
    }
}

#[test]
fn with_the_peers_word() {
    let (mut reactor, mut client, mut peer, conn) = connected(1, patient(Config::default()));
    let has = reactor.context().connection(conn).capabilities().unwrap().features;
    assert!(has.contains(Features::ATOMICS | Features::WRITE_WITH_IMMEDIATE), "{has:?}");
    let (_local, refused) = use_them(&mut reactor, conn);
    assert!(refused.is_none(), "{refused:?}");
    for _ in 0..10 {
        reactor.turn(&mut client, Some(Duration::ZERO)).unwrap();
    }
    assert_eq!([peer.opcode(), peer.opcode(), peer.opcode()], [Opcode::Write, Opcode::Send, Opcode::AtomicRequest]);
}

#[test]
fn with_raw_framing_the_program_knows() {
    for known in [false, true] {
        let options = ConnectOptions::new().framing(Framing::Raw).extensions(known);
        let (mut reactor, mut client, mut peer, conn) = connected_with(None, patient(Config::default()), options);
        let mut cx = reactor.context();
        let has = cx.connection(conn).capabilities().unwrap().features;
        assert_eq!(has.contains(Features::ATOMICS | Features::WRITE_WITH_IMMEDIATE), known, "{has:?}");
        let local = cx.regions().register(conn, 64, &RegionOptions::new()).unwrap();
        let remote = RemoteRegion { address: 0x1000, len: 64, key: 7 };
        let written = cx.remote(conn).write_with_immediate(remote, &local, 0..8, 9);
        assert_eq!(matches!(written, Err(SendErrorKind::Unsupported { .. })), !known, "{written:?}");
        cx.send(conn, b"a message").unwrap();
        for _ in 0..10 {
            reactor.turn(&mut client, Some(Duration::ZERO)).unwrap();
        }
        // The zero-length RDMA Write that completes the MPA handshake precedes the program's messages.
        let wanted = if known {
            &[Opcode::Write, Opcode::Write, Opcode::Immediate, Opcode::Send][..]
        } else {
            &[Opcode::Write, Opcode::Send]
        };
        wanted.iter().for_each(|&opcode| assert_eq!(peer.opcode(), opcode, "{known}"));
    }
}

/// With a greeting, the peer's feature bits decide, and the program's `ConnectOptions::extensions` has no effect.
#[test]
fn with_a_greeting_the_peer_knows() {
    let options = ConnectOptions::new().extensions(true);
    let (mut reactor, _, _peer, conn) = connected_with(Some(0), patient(Config::default()), options);
    let has = reactor.context().connection(conn).capabilities().unwrap().features;
    assert!(!has.intersects(Features::ATOMICS | Features::WRITE_WITH_IMMEDIATE), "{has:?}");
}

/// After `Context::solicit`, only the next message of the program solicits an event at the peer. RDMA Writes do not, and pings of the
/// reactor do not.
#[test]
fn the_next_message_solicits_an_event() {
    for features in [0, 1] {
        let config = patient(Config::default())
            .timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_millis(50), Duration::from_secs(600)));
        let (mut reactor, mut client, mut peer, conn) = connected(features, config);
        let mut cx = reactor.context();
        cx.send(conn, b"nothing is asked for").unwrap();
        cx.solicit(conn);
        let before = reactor.stats().connections.pings;
        while reactor.stats().connections.pings == before {
            reactor.turn(&mut client, Some(Duration::from_millis(10))).unwrap();
        }
        let mut cx = reactor.context();
        cx.send(conn, b"this one").unwrap();
        cx.send(conn, b"not this one").unwrap();
        let local = cx.regions().register(conn, 64, &RegionOptions::new()).unwrap();
        let remote = RemoteRegion { address: 0x1000, len: 64, key: 7 };
        cx.solicit(conn);
        cx.remote(conn).write(remote, &local, 0..8).unwrap();
        cx.remote(conn).write_with_immediate(remote, &local, 0..8, 9).unwrap();
        for _ in 0..10 {
            reactor.turn(&mut client, Some(Duration::ZERO)).unwrap();
        }
        // The first four frames are the zero-length RDMA Write that completes the MPA handshake, the hello, the message that the program
        // sent before `solicit`, and a ping.
        assert_eq!([(); 4].map(|()| peer.opcode()), [Opcode::Write, Opcode::Send, Opcode::Send, Opcode::Send]);
        let mut next = peer.opcode();
        while next == Opcode::Send {
            next = peer.opcode();
        }
        assert_eq!(next, Opcode::SendSolicited);
        assert_eq!([(); 3].map(|()| peer.opcode()), [Opcode::Send, Opcode::Write, Opcode::Write]);
        let last = if features == 0 { Opcode::SendSolicited } else { Opcode::ImmediateSolicited };
        assert_eq!(peer.opcode(), last);
    }
}
