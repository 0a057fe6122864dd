//! The tests of peers that violate the protocol. Such a peer uses raw framing, and the test builds its frames by hand. The connection of
//! such a peer must end, with the violation as the reason. All other connections must continue.

use std::time::Duration;

use rdma_reactor::{
    Blocked, ConnectError, ConnectOptions, ConnectionId, Decision, DisconnectReason, Framing, ListenOptions,
    PeerViolation, ProviderChoice, RejectReason, SecurityMode, SendErrorKind,
};

use super::harness::{Event, Pair, Probe, Setup};
use super::one_sided::once_there_is_room;

/// Returns a valid greeting with this window, see `docs/wire.md`.
#[must_use]
pub fn greeting(window: u32) -> Vec<u8> {
    let mut bytes = b"RDXR\x02\0\0\0".to_vec();
    for word in [window, 8192, 1024] {
        bytes.extend_from_slice(&u32::to_le_bytes(word));
    }
    bytes
}

/// Returns a frame of the protocol, see `docs/wire.md`.
#[must_use]
pub fn message(kind: u8, grant: u32, payload: &[u8]) -> Vec<u8> {
    [&[kind, 0, 0, 0], &grant.to_le_bytes()[..], payload].concat()
}

pub(super) const DATA: u8 = 0;
/// The kind of the first message of the side that connects.
pub const HELLO: u8 = 1;
const CREDIT: u8 = 2;
const IMMEDIATE: u8 = 5;
const OFFER: u8 = 6;
const FETCHED: u8 = 7;
const REFUSED: u8 = 12;
/// The window in the false peer's greeting: the number of receives that it claims to have.
pub const WINDOW: u32 = 64;

/// Returns a frame that offers a message of `len` bytes.
fn offer(id: u32, len: u64) -> Vec<u8> {
    let words = [&id.to_le_bytes()[..], &[0; 4], &0x1000_u64.to_le_bytes(), &len.to_le_bytes(), &[0; 4]];
    message(OFFER, WINDOW, &words.concat())
}

/// Connects a false peer with raw framing, and sends a hello from it. Returns the false peer's id of the connection, and the honest side's
/// id.
pub(super) fn rude(p: &mut Pair) -> (ConnectionId, ConnectionId) {
    let known = p.s.count(|e| matches!(e, Event::Connect(..)));
    let options = ConnectOptions::new().framing(Framing::Raw).private_data(greeting(WINDOW));
    let here = p.client.context().connect_with(p.address, options).expect("connecting");
    p.until("the rude side is connected", |p| {
        p.c.count(|e| matches!(e, Event::Connect(conn, _) if *conn == here)) == 1
    });
    p.client.context().send(here, &message(HELLO, WINDOW, &[])).expect("room");
    p.until("the honest side is connected", |p| p.s.count(|e| matches!(e, Event::Connect(..))) == known + 1);
    let there = p.s.events.iter().rev().find_map(|e| if let Event::Connect(conn, _) = e { Some(*conn) } else { None });
    (here, there.expect("just seen"))
}

pub(super) fn reason(p: &Pair, conn: ConnectionId) -> Option<DisconnectReason> {
    p.s.events.iter().find_map(|event| match event {
        Event::Disconnect(of, reason) if *of == conn => Some(reason.clone()),
        _ => None,
    })
}

/// Returns the number of messages that the server's handler has received, and of its other
/// callbacks about messages.
fn delivered(p: &Pair) -> (u64, usize) {
    let about = |event: &Event| matches!(event, Event::Immediate(..) | Event::Offered(..) | Event::Landed(..));
    (p.s.received, p.s.count(about))
}

/// If a peer sends a frame that no honest peer sends, its connection must end with the violation as
/// the reason. Nothing of the frame may reach the handler. All other connections must continue.
pub fn rude_messages_end_their_connection(setup: &Setup) {
    let mut p =
        Pair::new(setup, setup.config().large_messages(|l| l.max_message = 1 << 20), Probe::echo(), Probe::default());
    p.c.record_messages = false;
    let honest = p.connect();
    let (_, first) = rude(&mut p);
    let malformed = PeerViolation::MalformedMessage;
    let cases = [
        ("an unknown kind", vec![message(99, WINDOW, &[])], malformed),
        ("a reserved bit", vec![vec![DATA, 1, 0, 0, 64, 0, 0, 0]], malformed),
        ("no whole header", vec![vec![DATA, 0, 0]], malformed),
        ("nothing at all", vec![vec![]], malformed),
        ("a second hello", vec![message(HELLO, WINDOW, &[])], malformed),
        ("a credit with a payload", vec![message(CREDIT, WINDOW, b"x")], malformed),
        ("half an immediate", vec![message(IMMEDIATE, WINDOW, b"1234567")], malformed),
        ("half an offer", vec![message(OFFER, WINDOW, b"1234567")], malformed),
        ("fetched what was not offered", vec![message(FETCHED, WINDOW, &7_u32.to_le_bytes())], malformed),
        ("an absurd grant", vec![message(DATA, 1 << 20, &[])], PeerViolation::InvalidGrant),
        ("an offer of nothing", vec![offer(0, 0)], PeerViolation::InvalidOffer),
        ("an offer past the limit", vec![offer(0, (1 << 20) + 1)], PeerViolation::InvalidOffer),
        ("an offer of half of all memory", vec![offer(0, 1 << 63)], PeerViolation::InvalidOffer),
        ("an offer that wraps around", vec![offer(0, u64::MAX)], malformed),
        ("half a tag", vec![[&offer(0, 1 << 10)[..], b"1234"].concat()], malformed),
        ("refused what was not offered", vec![message(REFUSED, WINDOW, &7_u32.to_le_bytes())], malformed),
    ];
    for (what, messages, violation) in cases {
        let (here, there) = rude(&mut p);
        let before = delivered(&p);
        for bytes in &messages {
            p.client.context().send(here, bytes).expect("room");
        }
        p.until(what, |p| reason(p, there).is_some());
        assert_eq!(reason(&p, there), Some(DisconnectReason::PeerViolation(violation)), "{what}");
        assert_eq!(delivered(&p), before, "{what}: it reached the handler");
    }
    // The connection of an honest peer must still echo.
    let before = p.c.received;
    once_there_is_room(&mut p, |cx| cx.send(honest, b"still here")).expect("it is open");
    p.until("the echo", |p| p.c.received == before + 1);
    assert_eq!(reason(&p, first), None);
    p.finish();
}

/// If a peer has more offers in flight than the limit, its connection must end before the reactor uses memory for the excess offers. The
/// connection must also end if an offer has the number of another offer in flight.
pub fn a_flood_of_offers_is_refused(setup: &Setup) {
    for numbers in [(0..17).collect::<Vec<u32>>(), vec![3, 3]] {
        // The memory for large messages is too small for any of these offers, so the first offer stays in flight.
        let config = setup.config().large_messages(|l| l.max_message = 1 << 20).large_messages(|l| l.memory = 1 << 20);
        let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
        let (here, there) = rude(&mut p);
        for number in &numbers {
            p.client.context().send(here, &offer(*number, 1 << 20)).expect("room");
        }
        p.until("the end", |p| reason(p, there).is_some());
        // The keys in the offers are invalid. So the connection may also end because the server fails to read the first message.
        let reason = reason(&p, there).expect("just seen");
        let refused = reason == DisconnectReason::PeerViolation(PeerViolation::InvalidOffer);
        let failed = matches!(reason, DisconnectReason::Transport(_) | DisconnectReason::Lost);
        assert!(refused || failed && setup.provider != ProviderChoice::Iwarp, "{reason:?}");
        p.until("its memory is free", |p| p.server.stats().memory.regions == 0);
        p.finish();
    }
}

/// A peer that sends without credits must lose its connection, because the reactor detects the violation, or because the device reports an
/// error. A neighbour must not be affected.
pub fn sending_without_credits_is_noticed(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config().receive_depth(5), Probe::echo(), Probe::default());
    p.c.record_messages = false;
    let honest = p.connect();
    let (here, there) = rude(&mut p);
    // The peer sends far more messages than the server has receives.
    let mut cx = p.client.context();
    for _ in 0..40 {
        cx.send(here, &message(DATA, WINDOW, b"flood")).expect("room");
    }
    // On some networks, a send waits until the receiver posts a receive. There, all messages may arrive without a detected violation.
    p.until("it ended, or all arrived", |p| reason(p, there).is_some() || p.s.received >= 40);
    if let Some(reason) = reason(&p, there) {
        let blamed = !matches!(reason, DisconnectReason::Local { .. } | DisconnectReason::KeepaliveTimeout);
        assert!(blamed, "{reason:?}");
    }
    let before = p.c.received;
    // On a slow machine, a ping may use one of the two credits for a moment, so the send is retried.
    while p.client.context().send(honest, b"still here").is_err() {
        p.turn();
    }
    p.until("the echo", |p| p.c.received > before);
    p.finish();
}

/// A peer that never grants credits must receive nothing beyond its first window. The connection must end because the peer does not answer
/// pings.
pub fn a_peer_that_never_grants_is_given_up(setup: &Setup) {
    let config = setup
        .config()
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_millis(200), Duration::from_millis(1500)));
    let mut p = Pair::with_configs(setup, config, setup.config(), Probe::default(), Probe::default());
    let (_, there) = rude(&mut p);
    let mut taken = 0;
    while p.server.context().send(there, b"to the void").is_ok() {
        taken += 1;
        if taken % 16 == 0 {
            p.turn();
        }
    }
    // On a slow machine, the server may have sent pings. Each ping uses a credit of the window, so fewer messages may have been sent.
    let (window, pings) = (u64::from(WINDOW) - 3, p.server.stats().connections.pings);
    let expected = window.saturating_sub(pings)..=window;
    assert!(expected.contains(&taken), "{taken} of the window without what is kept for control, {expected:?}");
    assert_eq!(p.server.context().send(there, b"more"), Err(SendErrorKind::WouldBlock(Blocked::Window)));
    p.until("it is given up", |p| reason(p, there).is_some());
    assert_eq!(reason(&p, there), Some(DisconnectReason::KeepaliveTimeout));
    p.finish();
}

/// A wrong greeting must be refused with the reason, on either side, before the handler learns of
/// the peer.
pub fn wrong_greetings_are_refused(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let with = |at: usize, byte: u8| {
        let mut bytes = greeting(WINDOW);
        bytes[at] = byte;
        bytes
    };
    // A greeting with the feature bit of a pre-shared key. The reject reason names the mode of the
    // accepting side.
    let sealed = with(7, (SecurityMode::Psk as u8) << 4);
    let cases = [
        (b"hello".to_vec(), RejectReason::NotOurs),
        (Vec::new(), RejectReason::NotOurs),
        (with(0, b'X'), RejectReason::NotOurs),
        (with(4, 1), RejectReason::Version),
        (greeting(3), RejectReason::Limits),
        (greeting(1 << 20), RejectReason::Limits),
        (greeting(0), RejectReason::Limits),
    ];
    fn is_refused(p: &mut Pair, conn: ConnectionId, wanted: RejectReason) {
        let answer = |p: &Pair| {
            p.c.events.iter().find_map(|event| match event {
                Event::ConnectError(of, error) if *of == conn => Some(error.clone()),
                _ => None,
            })
        };
        p.until("the answer", |p| answer(p).is_some());
        let error = answer(p).expect("just seen");
        assert!(matches!(&error, ConnectError::Rejected { reason, .. } if *reason == wanted), "{wanted:?}: {error:?}");
    }
    let plain = (sealed.clone(), RejectReason::Security(SecurityMode::Plain));
    for (bytes, wanted) in cases.iter().cloned().chain([plain]) {
        let options = ConnectOptions::new().framing(Framing::Raw).private_data(bytes);
        let conn = p.client.context().connect_with(p.address, options).expect("connecting");
        is_refused(&mut p, conn, wanted);
    }
    assert_eq!(p.s.count(|e| matches!(e, Event::Request(_) | Event::Connect(..))), 0, "the handler was not asked");
    let raw = ListenOptions::new().framing(Framing::Raw);
    let listener = p.server.context().listen_with(setup.address, raw).expect("listening");
    let address = p.server.context().listeners().local_address(listener).expect("an address");
    for (bytes, wanted) in cases.into_iter().chain([(sealed, RejectReason::Security(SecurityMode::Psk))]) {
        p.s.decision = Decision::AcceptWith(bytes);
        let conn = p.client.context().connect(address).expect("connecting");
        is_refused(&mut p, conn, wanted);
    }
    assert_eq!(p.c.live(), 0, "the client was told that it is connected");
    p.until("their ends", |p| p.s.live() == 0);
    p.finish();
}
