//! The tests of secured connections: accepted peers, refused peers, and encrypted data.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::transport::mr::Access;
use rdma_reactor::{
    ConnectError, ConnectOptions, ConnectionId, Context, Decision, DisconnectReason, Error, Framing, Handler,
    ListenOptions, Message, PeerIdentity, Piece, Reactor, RegionOptions, RejectReason, Security, SecurityError,
    SecurityMode, SendErrorKind, Transfer, TransferOptions,
};

use super::harness::{Event, PATIENCE, Pair, Probe, Setup, pattern};
use super::one_sided::once_there_is_room;
use super::violations::{WINDOW, greeting};
use crate::identities::{security, stranger};

fn mode(setup: &Setup) -> SecurityMode {
    setup.secured.expect("these tests are for secured connections")
}

/// Returns the error with which the client's only connection has failed, or `None` if it has not failed.
fn refused(p: &Pair) -> Option<&ConnectError> {
    p.c.events.iter().find_map(|event| if let Event::ConnectError(_, error) = event { Some(error) } else { None })
}

/// When `on_connect` is called, each side must be able to get the identity of its peer.
pub fn both_learn_who_the_other_is(setup: &Setup) {
    let mode = mode(setup);
    let check = move |cx: &mut Context<'_>, event: &Event| {
        if let Event::Connect(conn, _) = event {
            match (mode, cx.connection(*conn).identity()) {
                (SecurityMode::Tls, Some(PeerIdentity::Certificates(chain))) => assert_eq!(chain.len(), 1),
                (SecurityMode::Psk, Some(PeerIdentity::Psk(name))) => assert_eq!(name, "tests"),
                other => panic!("{other:?}"),
            }
        }
    };
    let mut p = Pair::new(setup, setup.config(), Probe::new(check), Probe::new(check));
    let conn = p.connect();
    once_there_is_room(&mut p, |cx| cx.send(conn, b"sealed")).expect("it is open");
    p.until("the message", |p| p.s.received == 1);
    assert_eq!(p.s.messages(), [b"sealed"]);
    // As on plain connections, a goodbye must be distinguished from an abort.
    p.client.context().close(conn);
    p.until("the end", |p| p.s.live() + p.c.live() == 0);
    assert_eq!(p.s.count(|e| matches!(e, Event::Disconnect(_, DisconnectReason::Closed))), 1);
    p.finish();
}

/// If the two sides have different authorities or keys, the connection must be refused, with a typed error on both sides. No message may be
/// delivered.
pub fn a_peer_that_is_not_accepted_hears_why(setup: &Setup) {
    let mode = mode(setup);
    for stranger_listens in [false, true] {
        let (known, stranger) = (setup.config(), setup.config().security(stranger(mode)));
        let (server, client) = if stranger_listens { (stranger, known) } else { (known, stranger) };
        let mut p = Pair::with_configs(setup, server, client, Probe::default(), Probe::default());
        p.client.context().connect(p.address).expect("connecting");
        p.until("the error", |p| refused(p).is_some());
        let error = refused(&p).expect("just seen").clone();
        match (mode, error) {
            // The accepting side sends its certificate first. So the connecting side detects the unknown authority, and reports that as the
            // reason.
            (SecurityMode::Tls, ConnectError::Security(SecurityError::Peer(why))) => {
                assert!(why.contains("UnknownIssuer"), "{why}");
            }
            (SecurityMode::Psk, ConnectError::Security(SecurityError::Refused(why))) => {
                assert!(why.contains("keys differ"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!((p.s.live(), p.c.live(), p.s.received), (0, 0, 0));
        let insecure = |reactor: &Reactor| reactor.stats().connections.insecure;
        assert_eq!(insecure(&p.server) + insecure(&p.client), 1);
        assert!(p.s.events.iter().all(|event| matches!(event, Event::Request(_))), "{:?}", p.s.events);
        p.until("nothing is left of it", |p| {
            p.server.stats().connections.current + p.client.stats().connections.current == 0
        });
        p.finish();
    }
    if mode == SecurityMode::Tls {
        // A client has no certificate, although the server requires one. The server must refuse it.
        let authority = crate::identities::Authority::new();
        let anonymous = rdma_reactor::Tls::client(authority.pem().as_bytes()).expect("settings");
        let anonymous = Security::Tls(anonymous.server_name("node").expect("a name"));
        let (server, client) = (setup.config().security(authority.tls("node")), setup.config().security(anonymous));
        let mut p = Pair::with_configs(setup, server, client, Probe::default(), Probe::default());
        p.client.context().connect(p.address).expect("connecting");
        p.until("the error", |p| refused(p).is_some());
        let error = refused(&p).expect("just seen");
        assert_eq!(*error, ConnectError::Security(SecurityError::Refused("CertificateRequired".into())));
        assert_eq!((p.s.live(), p.c.live()), (0, 0), "the client was not told that it is connected");
        p.finish();
    }
}

/// A handler that refuses every peer after the handshake.
#[derive(Default)]
struct Distrustful {
    probe: Probe,
    asked: Rc<RefCell<u32>>,
}

impl Handler for Distrustful {
    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, peer: &PeerIdentity) -> Result<(), String> {
        assert_eq!(cx.connection(conn).identity(), Some(peer));
        assert_eq!(cx.send(conn, b"too early"), Err(SendErrorKind::Closed));
        *self.asked.borrow_mut() += 1;
        Err("not on the list".into())
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.probe.on_connect(cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.probe.on_recv(cx, conn, message);
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.probe.on_connect_error(cx, conn, error);
    }
}

/// After a peer has proven its identity, the handler must still be able to refuse the peer. The peer must get the reason.
pub fn handlers_have_the_last_word(setup: &Setup) {
    for server_refuses in [true, false] {
        let mut server = (setup.reactor)(setup.config()).expect("a reactor");
        let mut client = (setup.reactor)(setup.config()).expect("a reactor");
        let listener = server.context().listen(setup.address).expect("listening");
        let address = server.context().listeners().local_address(listener).expect("an address");
        client.context().connect(address).expect("connecting");
        let (mut strict, mut open) = (Distrustful::default(), Probe::default());
        let deadline = super::harness::now() + PATIENCE;
        let errors = |strict: &Distrustful, open: &Probe| {
            [&strict.probe, open].map(|probe| probe.count(|event| matches!(event, Event::ConnectError(..))))
        };
        while errors(&strict, &open) != if server_refuses { [0, 1] } else { [1, 0] }
            || server.context().connections() > 0
        {
            assert!(super::harness::now() < deadline, "{:?} {:?}", strict.probe, open);
            if server_refuses {
                server.turn(&mut strict, Some(Duration::ZERO)).expect("a turn");
                client.turn(&mut open, Some(Duration::ZERO)).expect("a turn");
            } else {
                server.turn(&mut open, Some(Duration::ZERO)).expect("a turn");
                client.turn(&mut strict, Some(Duration::ZERO)).expect("a turn");
            }
        }
        assert_eq!((strict.probe.live(), open.live(), *strict.asked.borrow()), (0, 0, 1));
        let heard = strict.probe.events.iter().chain(&open.events).find_map(|event| match event {
            Event::ConnectError(_, error) => Some(error.clone()),
            _ => None,
        });
        let why = "not on the list".to_owned();
        let error = if server_refuses { SecurityError::Refused(why) } else { SecurityError::Peer(why) };
        assert_eq!(heard, Some(ConnectError::Security(error)));
    }
}

/// A plain peer, a peer with another security mode, and a peer with raw framing must be refused. The errors on both sides must name the
/// setting to change.
pub fn modes_are_not_mixed(setup: &Setup) {
    let mode = mode(setup);
    let other = if mode == SecurityMode::Tls { SecurityMode::Psk } else { SecurityMode::Tls };
    for theirs in [SecurityMode::Plain, other] {
        for (server, client) in [(mode, theirs), (theirs, mode)] {
            let config = |mode| setup.config().security(security(mode));
            let mut p = Pair::with_configs(setup, config(server), config(client), Probe::default(), Probe::default());
            p.client.context().connect(p.address).expect("connecting");
            p.until("the refusal", |p| refused(p).is_some());
            let reason = RejectReason::Security(server);
            assert_eq!(refused(&p), Some(&ConnectError::Rejected { reason, private_data: Vec::new() }));
            assert!(p.s.events.is_empty(), "the program is not asked: {:?}", p.s.events);
            p.finish();
        }
    }
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let raw = ConnectOptions::new().framing(Framing::Raw);
    let error = p.client.context().connect_with(p.address, raw).expect_err("it cannot be secured");
    assert!(matches!(&error, Error::Security(SecurityError::Settings(why)) if why.contains("Framing::Raw")), "{error}");
    let raw = ListenOptions::new().framing(Framing::Raw);
    assert!(matches!(p.server.context().listen_with(setup.address, raw), Err(Error::Security(_))));
    // The server accepts, but its greeting offers no security, as if an attacker had changed the
    // greeting. The client must refuse.
    let raw = ListenOptions::new().framing(Framing::Raw).security(Security::Plain);
    let listener = p.server.context().listen_with(setup.address, raw).expect("listening");
    let address = p.server.context().listeners().local_address(listener).expect("an address");
    p.s.decision = Decision::AcceptWith(greeting(WINDOW));
    p.client.context().connect(address).expect("connecting");
    p.until("the refusal", |p| refused(p).is_some());
    let reason = RejectReason::Security(SecurityMode::Plain);
    assert_eq!(refused(&p), Some(&ConnectError::Rejected { reason, private_data: Vec::new() }));
    p.until("its end", |p| p.s.live() == 0 && p.server.stats().connections.current == 0);
    assert_eq!((p.c.live(), p.s.received), (0, 0));
    p.s.decision = Decision::Accept;
    // A listener or a connect may have other security settings than its reactor.
    let open = ListenOptions::new().security(Security::Plain);
    let listener = p.server.context().listen_with(setup.address, open).expect("listening");
    let address = p.server.context().listeners().local_address(listener).expect("an address");
    let options = ConnectOptions::new().security(Security::Plain);
    p.client.context().connect_with(address, options).expect("connecting");
    p.until("both are connected", |p| (p.s.live(), p.c.live()) == (1, 1));
    p.connect();
    p.finish();
}

/// One-sided operations and regions for peers must be refused, unless the program permits them.
pub fn remote_memory_is_refused_unless_allowed(setup: &Setup) {
    let config = setup.config().allow_plain_remote_memory(false);
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    let conn = p.connect();
    let mut cx = p.client.context();
    let open = RegionOptions::new().allow(Access::REMOTE_READ);
    assert!(matches!(cx.regions().register(conn, 4096, &open), Err(Error::Security(_))));
    let mut own = cx.regions().register(conn, 4096, &RegionOptions::new()).expect("a region that no peer reaches");
    let remote = own.remote();
    assert_eq!(cx.remote(conn).read(remote, &mut own, 0..8), Err(SendErrorKind::PlainRemoteMemory));
    assert_eq!(cx.remote(conn).write(remote, &own, 0..8), Err(SendErrorKind::PlainRemoteMemory));
    assert_eq!(cx.remote(conn).write_with_immediate(remote, &own, 0..8, 1), Err(SendErrorKind::PlainRemoteMemory));
    assert_eq!(cx.remote(conn).fetch_add(remote, &mut own, 0, 1), Err(SendErrorKind::PlainRemoteMemory));
    let (list, within) = (vec![Piece::new(0, remote)], TransferOptions::within(PATIENCE));
    let listed = cx.remote(conn).transfer(Transfer::Write(&[&own]), list, &within);
    assert_eq!(listed, Err(SendErrorKind::PlainRemoteMemory));
    once_there_is_room(&mut p, |cx| cx.send(conn, b"messages go")).expect("it is open");
    p.until("the message", |p| p.s.received == 1);
    drop(own);
    p.finish();
}

/// When a message is sent from a region on a secured connection, the reactor must send an encrypted copy. So the peer needs no right to
/// read the region, and the program can reuse the region immediately.
pub fn regions_are_sent_as_sealed_copies(setup: &Setup) {
    let config = setup.config().buffer_size(4096);
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    (p.s.large, p.c.large) = (true, true);
    let conn = p.connect();
    let len = 3_000_000;
    let mut cx = p.client.context();
    let mut region = cx.regions().register_vec(conn, pattern(8, len), &RegionOptions::new()).expect("a region");
    cx.send_region(conn, &region, 7..4096 + 7).expect("it fits a buffer");
    cx.send_region(conn, &region, 0..0).expect("nothing, either");
    cx.send_region(conn, &region, 100..len).expect("room");
    region.copy_from(0, &vec![0; len]).expect("it is not lent");
    p.until("all three", |p| p.s.received == 3 && p.c.sent == 3);
    let got = p.s.messages();
    assert!(got[0] == &pattern(8, len)[7..4096 + 7] && got[1].is_empty() && got[2] == &pattern(8, len)[100..]);
    drop(region);
    p.finish();
}

/// A handshake must succeed even with buffers of one byte and the smallest windows.
pub fn the_smallest_buffers_carry_a_handshake(setup: &Setup) {
    for (window, size) in [(5, 1), (5, 100), (6, 1), (64, 1)] {
        let config = setup.config().receive_depth(window).send_depth(1).buffer_size(size).shared_receives(None);
        let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
        let conn = p.connect();
        // On a device, the last message of the handshake may still occupy the only slot of the send
        // queue.
        once_there_is_room(&mut p, |cx| cx.send(conn, b"x")).expect("it is open");
        p.until("the message", |p| p.s.received == 1);
        p.finish();
    }
}

/// A limit must apply to the number of connections from one host that are being established.
pub fn handshakes_of_one_host_are_limited(setup: &Setup) {
    let config = setup.config().max_handshakes_per_peer(Some(2));
    let mut p = Pair::with_configs(setup, config, setup.config(), Probe::default(), Probe::default());
    for _ in 0..12 {
        p.client.context().connect(p.address).expect("connecting");
    }
    // The server may drop a slow handshake in favour of newer ones, even after the client's `on_connect` was called for the slow one.
    p.until("each is up or refused", |p| {
        let done = p.c.count(|event| matches!(event, Event::Connect(..) | Event::ConnectError(..)));
        done == 12 && p.c.live() == p.s.live()
    });
    for event in &p.c.events {
        if let Event::ConnectError(_, error) = event {
            assert!(
                matches!(error, ConnectError::Rejected { reason: RejectReason::Busy, .. } | ConnectError::Transport(_)),
                "{error}"
            );
        }
    }
    assert!(p.c.live() >= 2, "some are up");
    // Established connections must not count towards this limit, so a further connect must succeed.
    p.connect();
    p.finish();
}
