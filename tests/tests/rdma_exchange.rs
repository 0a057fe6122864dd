//! Connecting by exchange (over a TCP stream instead of rdma_cm) on the kernel's rxe. `tests/vm/exchange.sh` unloads the kernel's module
//! rdma_ucm, and then runs these tests. They need the feature `verbs`; `make test-rdma` runs them.
#![cfg(feature = "verbs")]

/// The suite of the `Provider` contract, with connections by exchange.
mod contract {
    use rdma_reactor_tests::contract::Real;
    use rdma_reactor_tests::device::RXE;
    use rdma_reactor_tests::exchanged;
    use rdma_transport::conformance::Need;
    use rdma_transport::provider_conformance;

    fn real() -> Real {
        Real {
            device: "rxe by exchange",
            address: RXE.address(),
            providers: |sides| (0..sides).map(|_| exchanged::provider()).collect(),
            missing: &[
                Need::RemoteInvalidation,
                Need::Liveness,
                Need::Extensions,
                Need::ImmediateSends,
                Need::SharedMemory,
            ],
            deviations: &[],
        }
    }

    provider_conformance!(rxe, real());
}

rdma_reactor_tests::conformance!(sample rxe, rdma_reactor_tests::conformance::Setup {
    reactor: rdma_reactor_tests::exchanged::reactor,
    datagrams: false,
    ..rdma_reactor_tests::conformance::Setup::device("RXE")
});

/// Tests of the reactor's options for connecting by exchange, and of errors. The peer is another process, or the test itself, which writes
/// the bytes of the TCP stream.
mod faults {
    use std::io::{self, Read, Write};
    use std::net::{Shutdown, SocketAddr, TcpListener};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use rdma_reactor::{
        Config, ConnectError, ConnectFailure, ConnectOptions, DisconnectReason, ExchangeOptions, ListenOptions,
        ProviderChoice, Reactor, Retries, Timeouts,
    };
    use rdma_reactor_tests::conformance::harness::{Event, PATIENCE, Pair, Probe, now, with_watchdog};
    use rdma_reactor_tests::device::{Peer, RXE, SIW, config};

    const PEER: &str = env!("CARGO_BIN_EXE_rdma-peer");

    fn by_exchange() -> ConnectOptions {
        ConnectOptions::new().exchange(ExchangeOptions::default())
    }

    /// Returns a server that does not listen yet, and a client. A flush has no short time limit, because a busy machine may exceed the
    /// default, and [`Pair::finish`] fails if a flush has exceeded its limit.
    fn pair_at(config: &Config, s: Probe, address: SocketAddr) -> Pair {
        let config = config.clone().timeouts(|t| t.flush = PATIENCE);
        let [server, client] = [0; 2].map(|_| Reactor::new(config.clone()).expect("a reactor"));
        Pair { server, s, client, c: Probe::default(), address, flushes: true, witness: None }
    }

    /// Returns a server that listens for exchanges with these options, and a client.
    fn pair(options: ListenOptions) -> Pair {
        let mut p = pair_at(&config().timeouts(|t| t.keepalive = PATIENCE), Probe::echo(), RXE.address());
        let listener = p.server.context().listen_with(RXE.address(), options).expect("a listener");
        p.address = p.server.context().listeners().local_address(listener).expect("its address");
        p
    }

    fn error(p: &Pair) -> Option<ConnectError> {
        p.c.events.iter().find_map(|event| match event {
            Event::ConnectError(_, error) => Some(error.clone()),
            _ => None,
        })
    }

    #[test]
    fn rdma_cm_is_not_there_and_is_not_needed() {
        with_watchdog("rdma_cm_is_not_there_and_is_not_needed", || {
            assert!(!std::path::Path::new("/dev/infiniband/rdma_cm").exists(), "tests/vm/exchange.sh takes it away");
            let mut p = pair(ListenOptions::new().exchange(ExchangeOptions::default()));
            let without = p.client.context().connect(p.address).expect_err("no rdma_cm").to_string();
            assert!(without.contains("rdma_ucm") && without.contains("by exchange"), "{without}");
            let conn = p.client.context().connect_with(p.address, by_exchange()).expect("an attempt");
            p.until("both sides are connected", |p| (p.s.live(), p.c.live()) == (1, 1));
            assert_eq!(p.client.context().connection(conn).device(), Some(&*RXE.name()));
            for nth in 1..=20 {
                p.client.context().send(conn, &[7; 5000]).expect("room");
                p.until("it is back", |p| p.c.received == nth);
            }
            p.finish();
        });
    }

    /// With `ProviderChoice::Auto` and without rdma_cm, connections and listeners without the option `exchange` use TCP.
    #[test]
    fn auto_without_rdma_cm_is_on_tcp() {
        with_watchdog("auto_without_rdma_cm_is_on_tcp", || {
            let auto = config().provider(ProviderChoice::Auto);
            let mut p = pair_at(&auto, Probe::echo(), RXE.address());
            for any in [RXE.address(), SocketAddr::from(([0, 0, 0, 0], 0))] {
                let listener = p.server.context().listen(any).expect("a listener");
                p.address.set_port(p.server.context().listeners().local_address(listener).expect("its address").port());
                let conn = p.client.context().connect(p.address).expect("an attempt");
                p.until("the client is connected", |p| p.c.live() == 1);
                assert_eq!(p.client.context().connection(conn).device(), Some("iwarp0"));
                p.client.context().close(conn);
                p.until("it has ended", |p| p.s.live() + p.c.live() == 0);
            }
            p.finish();
        });
    }

    /// A killed peer is noticed immediately, because its TCP stream ends. The keepalive would take longer.
    #[test]
    fn a_killed_peer_is_lost_at_once() {
        with_watchdog("a_killed_peer_is_lost_at_once", || {
            let (mut peer, addresses) = Peer::serve_by(PEER, "exchange", &[RXE.address()]);
            let mut p = pair_at(&config().timeouts(|t| t.keepalive = PATIENCE), Probe::default(), addresses[0]);
            p.client.context().connect_with(p.address, by_exchange()).expect("an attempt");
            p.until("the client is connected", |p| p.c.live() == 1);
            let killed = now();
            peer.kill();
            p.until("the end", |p| p.c.live() == 0);
            println!("a killed peer is noticed after {:?}; the keepalive is {PATIENCE:?}", killed.elapsed());
            let end = p.c.events.iter().find_map(|event| match event {
                Event::Disconnect(_, reason) => Some(reason.clone()),
                _ => None,
            });
            assert!(matches!(end, Some(DisconnectReason::Lost)), "{end:?}");
            p.finish();
        });
    }

    /// The TCP stream of a stopped peer stays open, so only the keepalive notices the peer.
    #[test]
    fn a_stopped_peer_is_lost_by_the_keepalive() {
        with_watchdog("a_stopped_peer_is_lost_by_the_keepalive", || {
            let (peer, addresses) = Peer::serve_by(PEER, "exchange", &[RXE.address()]);
            let mut p = pair_at(&config(), Probe::default(), addresses[0]);
            p.client.context().connect_with(p.address, by_exchange()).expect("an attempt");
            p.until("the client is connected", |p| p.c.live() == 1);
            peer.signal("STOP");
            p.until("the end", |p| p.c.live() == 0);
            let lost = |event: &Event| matches!(event, Event::Disconnect(_, DisconnectReason::KeepaliveTimeout));
            assert!(p.c.events.iter().any(lost), "{:?}", p.c.events);
            p.finish();
        });
    }

    /// Wrong options fail immediately. A connect to a peer that does not listen, or that speaks another protocol, fails within the time
    /// limit. The text of each error names the cause.
    #[test]
    fn what_is_wrong_is_named() {
        with_watchdog("what_is_wrong_is_named", || {
            let mut p = pair(ListenOptions::new().exchange(ExchangeOptions::default()));
            let at = |index| ExchangeOptions { gid_index: Some(index), ..ExchangeOptions::default() };
            for (options, wanted) in [
                (at(255), "is empty"),
                (ExchangeOptions { device: Some("rxe77".into()), ..at(0) }, "rxe77 is not there"),
                (ExchangeOptions { device: Some(SIW.name()), ..ExchangeOptions::default() }, "iWARP"),
            ] {
                let refused = p.client.context().connect_with(p.address, ConnectOptions::new().exchange(options));
                let text = refused.expect_err("an option that is wrong").to_string();
                assert!(text.contains(wanted), "{text}");
            }
            let refused = p.client.context().connect_with(SIW.address(), by_exchange()).expect_err("iWARP").to_string();
            assert!(refused.contains("iWARP"), "{refused}");
            // First nobody listens at the address, and then a server listens that speaks another protocol.
            let mut nobody = p.address;
            nobody.set_port(1);
            p.client.context().connect_with(nobody, by_exchange()).expect("an attempt");
            p.until("a refusal", |p| error(p).is_some());
            assert_eq!(error(&p), Some(ConnectError::Transport(ConnectFailure::Refused)));
            p.c.events.clear();
            let other = TcpListener::bind(RXE.address()).expect("a port");
            p.client
                .context()
                .connect_with(other.local_addr().expect("its address"), by_exchange())
                .expect("an attempt");
            other.set_nonblocking(true).expect("a socket");
            let accepted = std::cell::RefCell::new(None);
            p.until("the request", |_| {
                let mut accepted = accepted.borrow_mut();
                *accepted = accepted.take().or_else(|| Some(other.accept().ok()?.0));
                accepted.is_some()
            });
            let mut stream = accepted.into_inner().expect("a stream");
            stream.set_nonblocking(false).expect("a socket");
            let mut request = [0; 8];
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n").expect("it is sent");
            p.until("a failure", |p| error(p).is_some());
            let named = matches!(error(&p), Some(ConnectError::Transport(ConnectFailure::Protocol(_))));
            assert!(named, "{:?}", error(&p));
            stream.read_exact(&mut request).expect("the request");
            assert!(request.starts_with(b"RdXg"));
            p.finish();
        });
    }

    /// Passes the bytes of an exchange from the passive side to the active side. In the message Accept, names a queue pair that does not
    /// exist.
    fn misdirect(mut passive: UnixStream, mut active: UnixStream) -> io::Result<()> {
        let mut header = [0; 8];
        passive.read_exact(&mut header)?;
        assert!(header.starts_with(b"RdXg") && header[5] == 2, "{header:?} is an Accept");
        let mut body = vec![0; usize::from(u16::from_be_bytes([header[6], header[7]]))];
        passive.read_exact(&mut body)?;
        body[12..16].copy_from_slice(&0x00ab_cdef_u32.to_be_bytes());
        active.write_all(&header)?;
        active.write_all(&body)?;
        io::copy(&mut passive, &mut active).map(drop)
    }

    /// If the packets of the queue pair do not arrive, the active side never calls `on_connect`:
    /// the attempt fails after the last retransmission, or at the time limit if that is earlier.
    #[test]
    fn a_queue_pair_that_is_not_there_fails_the_attempt() {
        with_watchdog("a_queue_pair_that_is_not_there_fails_the_attempt", || {
            let exchange = ExchangeOptions { device: Some(RXE.name()), ..ExchangeOptions::default() };
            // With an ack timeout of 67 ms the device fails first, also with 7 retransmissions,
            // which rxe would treat as no limit. With an ack timeout of 2 s the time limit is
            // earlier.
            for (path, ack, limit) in [(2, 14, None), (7, 14, None), (7, 19, Some(Duration::from_secs(2)))] {
                let within = |timeouts: &mut Timeouts| timeouts.connect = limit.unwrap_or(timeouts.connect);
                let mut p = pair_at(&config().timeouts(within), Probe::echo(), RXE.address());
                let any = SocketAddr::from(([127, 0, 0, 1], 0));
                let listener = ListenOptions::new().exchange(exchange.clone());
                let listener = p.server.context().listen_with(any, listener).expect("a listener");
                let [(active, from_active), (passive, from_passive)] =
                    [0; 2].map(|_| UnixStream::pair().expect("two ends"));
                let [mut back, mut forth] =
                    [&from_passive, &from_active].map(|end| end.try_clone().expect("a descriptor"));
                let thread = std::thread::Builder::new;
                let answers = thread().spawn(move || misdirect(from_passive, from_active)).expect("a thread");
                let copy = move || io::copy(&mut forth, &mut back).and(back.shutdown(Shutdown::Both));
                let requests = thread().spawn(copy).expect("a thread");
                p.server.context().listeners().accept_over(listener, passive.into()).expect("a stream");
                let retries = Retries { path, ..Retries::default() };
                let options = ConnectOptions::new().exchange(exchange.clone()).retries(retries).ack_timeout(ack);
                p.client.context().connect_over(active.into(), options).expect("a stream");
                p.until("a failure", |p| error(p).is_some());
                match (limit, error(&p)) {
                    (None, Some(ConnectError::Transport(ConnectFailure::Unreachable(_)))) => {}
                    (Some(_), Some(ConnectError::Timeout)) => {}
                    (_, other) => panic!("{other:?}"),
                }
                assert_eq!(p.c.events.len(), 1, "{:?}", p.c.events);
                p.finish();
                // The active side has shut its stream down, so both threads have ended or end now.
                // A thread may return an error, because its stream was shut down.
                let _ = (answers.join().expect("no panic"), requests.join().expect("no panic"));
            }
        });
    }

    /// The program brings its own stream for the exchange. The stream has no IP address, so the options must name the device.
    #[test]
    fn the_program_brings_the_stream() {
        with_watchdog("the_program_brings_the_stream", || {
            let options = ExchangeOptions { device: Some(RXE.name()), ..ExchangeOptions::default() };
            let mut p = pair_at(&config(), Probe::echo(), RXE.address());
            let any = SocketAddr::from(([127, 0, 0, 1], 0));
            let listener = ListenOptions::new().exchange(options.clone());
            let listener = p.server.context().listen_with(any, listener).expect("a listener");
            let (one, other) = UnixStream::pair().expect("two ends");
            p.server.context().listeners().accept_over(listener, one.into()).expect("a stream");
            let conn = p
                .client
                .context()
                .connect_over(other.into(), ConnectOptions::new().exchange(options))
                .expect("a stream");
            p.until("both sides are connected", |p| (p.s.live(), p.c.live()) == (1, 1));
            p.client.context().send(conn, b"over a stream of its own").expect("room");
            p.until("it is back", |p| p.c.received == 1);
            p.finish();
        });
    }

    /// After many connections by exchange, no object remains on the device.
    #[test]
    fn connections_leave_nothing() {
        with_watchdog("connections_leave_nothing", || {
            let before = RXE.resources();
            let mut p = pair(ListenOptions::new().exchange(ExchangeOptions::default()));
            for _ in 0..50 {
                let conn = p.client.context().connect_with(p.address, by_exchange()).expect("an attempt");
                p.until("both sides are connected", |p| (p.s.live(), p.c.live()) == (1, 1));
                p.client.context().close(conn);
                p.until("both have ended", |p| p.s.live() + p.c.live() == 0);
            }
            p.finish();
            assert_eq!(RXE.resources(), before);
        });
    }
}
