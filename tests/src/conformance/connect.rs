//! The tests of successful and failed attempts to connect.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use rdma_reactor::transport::cm::ConnectFailure;
use rdma_reactor::{
    ConnectError, ConnectOptions, Decision, DisconnectReason, Error, Framing, ListenOptions, MAX_USER_PRIVATE_DATA,
    RejectReason,
};
use socket2::{Domain, Socket, Type};

use super::clock;
use super::harness::{Event, Pair, Probe, Setup};

/// Private data must arrive on both sides with its exact length.
pub fn exchanges_private_data(setup: &Setup) {
    for len in [0, 1, MAX_USER_PRIVATE_DATA] {
        let mut s = Probe::default();
        s.decision = Decision::AcceptWith(vec![7; len]);
        let mut p = Pair::new(setup, setup.config(), s, Probe::default());
        let options = ConnectOptions::new().private_data(vec![9; len]);
        let conn = p.client.context().connect_with(p.address, options).expect("connecting");
        p.until("connected", |p| p.s.live() == 1 && p.c.live() == 1);
        assert_eq!(p.c.events, [Event::Connect(conn, vec![7; len])]);
        assert_eq!(p.s.events[0], Event::Request(vec![9; len]));
        assert!(p.client.context().connection(conn).peer_address().is_some_and(|peer| peer == p.address));
        p.finish();
    }
}

/// The passive side may send in `on_connect`, even before the active side has called its own `on_connect`.
pub fn passive_side_may_speak_first(setup: &Setup) {
    let s = Probe::new(|cx, event| {
        if let Event::Connect(conn, _) = event {
            for i in 0..10 {
                cx.send(*conn, &[i]).expect("the window is open");
            }
        }
    });
    let mut p = Pair::new(setup, setup.config(), s, Probe::default());
    p.connect();
    p.until("ten messages", |p| p.c.received == 10);
    let expected: Vec<Vec<u8>> = (0..10).map(|i| vec![i]).collect();
    assert_eq!(p.c.messages(), expected);
    p.finish();
}

/// A reject must carry the private data that the handler returned. After the reject, no state of the connection may remain.
pub fn reject_carries_its_reason(setup: &Setup) {
    let mut s = Probe::default();
    s.decision = Decision::Reject(b"not today".to_vec());
    let mut p = Pair::new(setup, setup.config(), s, Probe::default());
    let conn = p.client.context().connect(p.address).expect("connecting");
    p.until("the reject", |p| !p.c.events.is_empty());
    let error = ConnectError::Rejected { reason: RejectReason::Refused, private_data: b"not today".to_vec() };
    assert_eq!(p.c.events, [Event::ConnectError(conn, error)]);
    assert_eq!(p.s.events, [Event::Request(vec![])]);
    p.finish();
}

/// A connect to an address without a listener must fail quickly, with the error `ConnectFailure::Refused`.
pub fn nothing_listening_is_refused(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let gone = Deserted::new(setup);
    let conn = p.client.context().connect(gone.address).expect("connecting starts");
    p.until("the refusal", |p| !p.c.events.is_empty());
    let refused = ConnectError::Transport(ConnectFailure::Refused);
    assert_eq!(p.c.events, [Event::ConnectError(conn, refused)]);
    p.finish();
}

/// Private data that is too long must be refused immediately, and must never be truncated.
pub fn too_much_private_data_is_refused(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let options = ConnectOptions::new().private_data(vec![0; MAX_USER_PRIVATE_DATA + 1]);
    let error = p.client.context().connect_with(p.address, options).expect_err("it does not fit");
    assert!(matches!(error, Error::PrivateDataTooLong { .. }), "{error}");
    assert_eq!(p.client.context().connections(), 0);
    // If the private data in a handler's decision is too long, it must not be truncated. The reactor must not accept the connection, and
    // the peer must get no part of the data.
    for (answers, decision) in [Decision::AcceptWith, Decision::Reject].into_iter().enumerate() {
        p.s.decision = decision(vec![1; MAX_USER_PRIVATE_DATA + 1]);
        p.client.context().connect(p.address).expect("connecting");
        p.until("the refusal", |p| p.client.stats().connections.connect_errors == answers as u64 + 1);
        let Some(Event::ConnectError(_, ConnectError::Rejected { private_data, reason })) = p.c.events.last() else {
            panic!("{:?}", p.c.events);
        };
        assert_eq!((&private_data[..], *reason), (&[][..], RejectReason::Refused));
    }
    p.finish();
}

/// A second listener on the same address must be refused. The error must contain the address.
pub fn address_in_use_is_named(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let address = p.address;
    let error = p.client.context().listen(address).expect_err("it is taken");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    p.finish();
}

/// If the program closes a connection before it is established, `on_connect_error` must be called, and the peer must keep no state.
pub fn cancelled_before_it_is_up(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    for turns in 0..6 {
        let conn = p.client.context().connect(p.address).expect("connecting");
        for _ in 0..turns {
            p.turn();
        }
        let announced = p.c.live() == 1;
        p.client.context().close(conn);
        p.until("the end", |p| {
            p.client.stats().connections.connect_errors + p.client.stats().connections.disconnected == turns + 1
        });
        match p.c.events.pop().expect("the last event") {
            Event::ConnectError(id, ConnectError::Cancelled) => assert!(id == conn && !announced),
            Event::Disconnect(id, DisconnectReason::Local { .. }) => assert!(id == conn && announced),
            other => panic!("{other:?}"),
        }
    }
    p.until("the server forgets them", |p| p.s.live() == 0);
    p.finish();
}

/// When `max_connections` is reached, another connection must be refused with `Busy`. Existing ones must continue.
pub fn connections_are_limited(setup: &Setup) {
    let server = setup.config().max_connections(2 + setup.neighbours());
    let mut p = Pair::with_configs(setup, server, setup.config(), Probe::echo(), Probe::default());
    let first = p.connect();
    p.connect();
    let third = p.client.context().connect(p.address).expect("connecting");
    p.until("the refusal", |p| p.client.stats().connections.connect_errors == 1);
    let busy = ConnectError::Rejected { reason: RejectReason::Busy, private_data: vec![] };
    assert_eq!(p.c.events.last(), Some(&Event::ConnectError(third, busy)));
    let asked = p.s.count(|event| matches!(event, Event::Request(_)));
    assert_eq!(asked, 2 + setup.neighbours() as usize, "the handler was asked about the third");
    p.client.context().send(first, b"still here").expect("open");
    p.until("the echo", |p| p.c.received == 1);
    p.finish();
}

/// With raw framing, messages must be sent unchanged, and nothing else may be sent.
pub fn raw_framing_talks_plain_messages(setup: &Setup) {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let sink = Rc::clone(&seen);
    let s = Probe::new(move |cx, event| {
        if let Event::Recv(conn, bytes) = event {
            sink.borrow_mut().push(bytes.clone());
            cx.send(*conn, bytes).expect("room");
        }
    });
    let mut p = Pair::new(setup, setup.config(), s, Probe::default());
    let listener =
        p.server.context().listen_with(setup.address, ListenOptions::new().framing(Framing::Raw)).expect("listening");
    let address = p.server.context().listeners().local_address(listener).expect("an address");
    let options = ConnectOptions::new().framing(Framing::Raw).private_data(b"as it is".to_vec());
    let conn = p.client.context().connect_with(address, options).expect("connecting");
    p.until("the active side is up", |p| p.c.live() == 1);
    let mut buffer = p.client.context().buffer(conn).expect("a buffer");
    buffer.set_len(3);
    buffer.copy_from_slice(b"abc");
    p.client.context().send_buffer(conn, buffer).expect("room");
    p.client.context().send(conn, b"").expect("room");
    p.until("two echoes", |p| p.c.received == 2);
    assert_eq!(*seen.borrow(), [b"abc".to_vec(), vec![]]);
    // Some connection managers pad private data with zeros. With raw framing, the length of the private data is not sent, so the
    // padding remains.
    let Event::Request(data) = &p.s.events[0] else { panic!("{:?}", p.s) };
    assert!(data.starts_with(b"as it is") && data[8..].iter().all(|&b| b == 0), "{data:?}");
    p.finish();
}

/// A port of this host that has no listener. A bound socket reserves it, so that no other program,
/// and no other test, listens there. On a simulated network there is nobody else.
pub(super) struct Deserted {
    pub(super) address: SocketAddr,
    _socket: Option<Socket>,
}

impl Deserted {
    pub(super) fn new(setup: &Setup) -> Self {
        Self::at(setup.address).expect("a port")
    }

    /// Reserves the port of `address`, or any free port if that is 0.
    pub(super) fn at(address: SocketAddr) -> io::Result<Self> {
        if let Some(address) = clock::deserted(address) {
            return Ok(Self { address, _socket: None });
        }
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.bind(&address.into())?;
        let address = socket.local_addr()?.as_socket().expect("an IP address");
        Ok(Self { address, _socket: Some(socket) })
    }
}

/// A connect with several addresses must try them in order until a listener answers. The connection's id must not change between the
/// attempts. If a listener refuses the connection, or the program closes it, no further address may be tried. If all attempts fail, the
/// program must get the error of the last one.
pub fn the_next_address_is_tried(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let deserted = [Deserted::new(setup), Deserted::new(setup)];
    let (nobody, here) = ([deserted[0].address, deserted[1].address], p.address);
    let options = ConnectOptions::new().private_data(b"for each".to_vec());
    let empty = p.client.context().connect_any(&[], options.clone());
    assert!(matches!(empty, Err(Error::NoAddress)), "{empty:?}");

    let conn =
        p.client.context().connect_any(&[nobody[0], nobody[1], here, nobody[0]], options.clone()).expect("connecting");
    p.client.context().connection(conn).set_user(77);
    p.until("both sides are connected", |p| p.s.live() + p.c.live() == 2);
    assert_eq!(p.c.events, [Event::Connect(conn, Vec::new())]);
    assert_eq!(p.s.events[0], Event::Request(b"for each".to_vec()));
    let mut cx = p.client.context();
    assert_eq!((cx.connection(conn).peer_address(), cx.connection(conn).user()), (Some(here), Some(77)));
    let device = cx.connection(conn).device();
    assert!(device.is_some_and(|name| !name.is_empty()), "{device:?}");
    p.c.events.clear();

    let last = p.client.context().connect_any(&nobody, options.clone()).expect("connecting");
    let failed = |p: &Pair| p.c.count(|event| matches!(event, Event::ConnectError(..)));
    p.until("the error", |p| failed(p) == 1);
    assert!(matches!(p.c.events[0], Event::ConnectError(id, ConnectError::Transport(_)) if id == last), "{:?}", p.c);
    assert_eq!(p.client.context().connection(last).device(), None);

    p.s.decision = Decision::Reject(b"no".to_vec());
    p.c.events.clear();
    let asked = p.s.events.len();
    p.client.context().connect_any(&[nobody[0], here, here], options.clone()).expect("connecting");
    p.until("the refusal", |p| failed(p) == 1);
    assert!(matches!(&p.c.events[0], Event::ConnectError(_, ConnectError::Rejected { .. })), "{:?}", p.c);
    assert_eq!(p.s.events.len(), asked + 1, "it is asked once");

    p.c.events.clear();
    let given_up = p.client.context().connect_any(&[nobody[0], here], options).expect("connecting");
    p.client.context().close(given_up);
    p.until("the end", |p| failed(p) == 1);
    assert_eq!(p.c.events, [Event::ConnectError(given_up, ConnectError::Cancelled)]);
    p.c.events.clear();
    p.client.context().close(conn);
    p.until("the first one's end", |p| p.c.live() == 0);
}

/// A connect by host name must try all addresses of the host in order. If the name is unknown, the error must contain the name.
pub fn a_host_is_found_by_its_name(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let (host, port) = (p.address.ip().to_string(), p.address.port());
    let conn = p.client.context().connect_host(&host, port, ConnectOptions::new()).expect("looking up");
    p.until("connected", |p| p.s.live() == 1 && p.c.live() == 1);
    assert_eq!(p.client.context().connection(conn).peer_address(), Some(p.address));
    if p.address.ip().is_loopback() {
        // The first address of this name may be `::1`, on which nothing listens.
        p.client.context().connect_host("localhost", port, ConnectOptions::new()).expect("looking up");
        p.until("connected", |p| p.s.live() == 2 && p.c.live() == 2);
    }
    let nobody = p.client.context().connect_host("no host", port, ConnectOptions::new()).expect("looking up");
    let told = |p: &Pair| p.c.count(|event| matches!(event, Event::ConnectError(..)));
    p.until("the error", |p| told(p) == 1);
    let said = |event: &Event| match event {
        Event::ConnectError(of, ConnectError::Lookup { host, .. }) => *of == nobody && host == "no host",
        _ => false,
    };
    assert_eq!(p.c.count(said), 1, "{:?}", p.c);
    // If the program closes the connection during the name lookup, `on_connect_error` must still be called.
    p.c.events.clear();
    let given_up = p.client.context().connect_host(&host, port, ConnectOptions::new()).expect("looking up");
    p.client.context().close(given_up);
    p.until("the end", |p| told(p) == 1);
    assert_eq!(p.c.events, [Event::ConnectError(given_up, ConnectError::Cancelled)]);
    p.finish();
}
