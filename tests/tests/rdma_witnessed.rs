//! Faults on the kernel's siw and rxe, with an honest connection on the same reactors and the same
//! device. Each connection must end once, in time, and with the actual reason. Each accepted send
//! must complete once, before its connection ends. The honest connection must not be affected, and
//! all open objects on the device must be released. `make test-rdma-full` runs these tests.
#![cfg(feature = "verbs")]
#![allow(clippy::disallowed_methods, reason = "the process around a reactor is what is tested")]

use std::mem;
use std::process::Command;
use std::time::Duration;

use rdma_reactor::transport::cm::PathOptions;
use rdma_reactor::transport::verbs::Verbs;
use rdma_reactor::{ConnectError, DisconnectReason, Reactor, Wait};
use rdma_reactor_tests::conformance;
use rdma_reactor_tests::conformance::Setup;
use rdma_reactor_tests::conformance::harness::{Event, PATIENCE, Pair, Probe, SERVER, now};
use rdma_reactor_tests::conformance::violations::{HELLO, WINDOW, greeting, message};
use rdma_reactor_tests::device::{Device, RXE, SIW};
use rdma_reactor_tests::ends::End;
use rdma_reactor_tests::signals::Signals;
use rdma_transport::{CmEventKind, ConnectParam, SendFlags, SendOp};

conformance!(faults siw, super::Setup::witnessed(super::SIW));
conformance!(faults rxe, super::Setup::witnessed(super::RXE));

fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

fn echoing(device: Device) -> Pair {
    let setup = Setup::witnessed(device);
    Pair::new(&setup, setup.config(), Probe::echo(), Probe::default())
}

/// Row 12 of `docs/reliability.md`. A connect without an answer ends at its time limit. The reactor serves an honest connection meanwhile.
fn nobody_answers(device: Device) {
    let mut p = echoing(device);
    // The server is replaced by a reactor with a short limit. The limit applies only to the connects of this reactor. No honest connection
    // is among them: the client opens it.
    let limit = ms(1500);
    let config = Setup::on(device).config().timeouts(|t| t.connect = limit);
    p.witness.iter_mut().for_each(|witness| witness.excuse(SERVER));
    (p.server, p.s) = (Reactor::new(config).expect("a reactor"), Probe::echo());
    let listener = p.server.context().listen(device.address()).expect("listening");
    p.address = p.server.context().listeners().local_address(listener).expect("it listens");
    let honest = p.connect();
    let silent = device.silent_address();
    let errors = |p: &Pair| p.s.count(|event| matches!(event, Event::ConnectError(..)));
    let echoed = |p: &mut Pair| {
        let received = p.c.received + 1;
        p.client.context().send(honest, b"somebody").expect("room");
        p.until("the echo", |p| p.c.received == received);
    };
    // On a very slow machine, the connects may end before the echo arrives. Such a round proves
    // nothing, so it is repeated with new connects.
    let (deadline, mut meanwhile) = (now() + PATIENCE, false);
    while !meanwhile {
        assert!(now() < deadline, "no echo while a connect waits: {:?}", p.s);
        let (already, begun) = (errors(&p), now());
        let conns: Vec<_> = (0..3).map(|_| p.server.context().connect(silent).expect("connecting")).collect();
        p.turn();
        echoed(&mut p);
        meanwhile = errors(&p) == already;
        p.until("the ends", |p| errors(p) == already + conns.len());
        assert!(begun.elapsed() >= limit);
        for conn in &conns {
            assert!(p.s.events.contains(&Event::ConnectError(*conn, ConnectError::Timeout)), "{conn}: {:?}", p.s);
        }
    }
    echoed(&mut p);
    p.finish();
}

/// Row 7 of `docs/reliability.md`. The connection to a peer without posted receives ends. On siw the reason is a failed message, and on rxe
/// it is the silence of the peer.
fn no_receive_is_posted(device: Device) {
    let setup = Setup::witnessed(device);
    let server = setup.config().timeouts(|t| (t.keepalive_interval, t.keepalive) = (ms(500), ms(20_000)));
    let mut p = Pair::with_configs(&setup, server, setup.config(), Probe::echo(), Probe::default());
    let mut peer = End::new(Box::new(Verbs::open().expect("the device")), 4096);
    let hello = message(HELLO, WINDOW, &[]);
    let private_data = greeting(WINDOW);
    let id = peer.station.provider().resolve(p.address, &PathOptions::default(), now() + PATIENCE).expect("an id");
    let turn = |p: &mut Pair, peer: &mut End| {
        p.turn();
        peer.turn();
        mem::take(&mut peer.events)
    };
    let deadline = now() + PATIENCE;
    let mut ended = None;
    while ended.is_none() {
        assert!(now() < deadline, "no end: {:?}", p.s);
        for event in turn(&mut p, &mut peer) {
            match event.kind {
                CmEventKind::Resolved { device } => {
                    peer.equip(id, device);
                    let param = ConnectParam { private_data: &private_data, ..ConnectParam::default() };
                    peer.station.provider().connect(id, &param).expect("a connect");
                }
                CmEventKind::Established { .. } => {
                    peer.station.write(0, &hello).expect("memory");
                    peer.post(1, SendOp::Send, &[0..hello.len()], SendFlags::empty());
                }
                _ => {}
            }
        }
        let up = p.s.connection();
        if let Some(conn) = up.filter(|_| p.s.sent == 0 && p.s.received == 0) {
            // The send fails once the connection has ended.
            let _ = p.server.context().send(conn, b"to the void");
        }
        ended = p.s.events.iter().find_map(|event| match event {
            Event::Disconnect(_, reason) => Some(reason.clone()),
            _ => None,
        });
    }
    let reason = ended.expect("just seen");
    println!("{}: {reason}", device.kind());
    match reason {
        DisconnectReason::KeepaliveTimeout => assert_eq!(device, RXE),
        DisconnectReason::WorkRequest { .. } | DisconnectReason::Transport(_) => {}
        DisconnectReason::Lost => assert_eq!(device, SIW),
        other => panic!("{other:?}"),
    }
    peer.station.provider().destroy_id(id, now()).unwrap();
    drop(peer);
    let conn = p.connect();
    p.client.context().send(conn, b"with a receive").expect("room");
    p.until("the echo", |p| p.c.received == 1);
    p.finish();
}

/// A lowered resource limit of the process. When this value is dropped, the old limit is restored.
struct Limit {
    resource: rlimit::Resource,
    before: (u64, u64),
}

impl Limit {
    fn lower(resource: rlimit::Resource, to: u64) -> Self {
        let before = resource.get().expect("a limit");
        resource.set(to, before.1).expect("lowering a limit");
        Self { resource, before }
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        self.resource.set(self.before.0, self.before.1).expect("raising it again");
    }
}

/// Row 40 of `docs/reliability.md`. The process runs out of file descriptors. Creating a reactor or a connection may fail, with an error
/// that names the reason. Existing reactors and connections continue.
fn no_descriptors(device: Device) {
    let mut p = echoing(device);
    let old = p.connect();
    let open = rdma_reactor_tests::conformance::harness::open_descriptors() as u64;
    for more in 0..6 {
        let limit = Limit::lower(rlimit::Resource::NOFILE, open - 1 + more);
        let setup = Setup::on(device);
        let made = Reactor::new(setup.config()).and_then(|mut reactor| reactor.context().listen(device.address()));
        let conn = p.client.context().connect(p.address).expect("connecting");
        let answer = |p: &Pair| {
            p.c.events.iter().any(|event| match event {
                Event::Connect(of, _) | Event::ConnectError(of, _) => *of == conn,
                _ => false,
            })
        };
        p.until("an answer", answer);
        drop(limit);
        if let Err(error) = made {
            println!("{more} more: {error}");
        } else {
            assert!(more > 0, "nothing was missing");
        }
        p.client.context().close(conn);
        p.until("its end", |p| (p.s.live(), p.c.live()) == (1, 1));
    }
    p.client.context().send(old, b"still there").expect("room");
    p.until("the echo", |p| p.c.received == 1);
    p.finish();
}

/// Row 79 of `docs/reliability.md`. Many signals arrive, each of which interrupts the current system call. No message is lost or
/// duplicated.
fn signals_interrupt_nothing(device: Device) {
    let setup = Setup::witnessed(device);
    let mut p = Pair::new(&setup, setup.config().wait(Wait::Event), Probe::echo(), Probe::default());
    let signals = Signals::start(Duration::from_micros(500));
    // The test establishes and closes connections while the signals arrive. It ends after five connections or more, when more than 100
    // signals have arrived.
    let (mut cycles, begun) = (0, now());
    while cycles < 5 || signals.caught() <= 100 {
        assert!(begun.elapsed() < PATIENCE, "there were few signals: {}", signals.caught());
        cycles += 1;
        let conn = p.connect();
        let before = p.c.events.len();
        for nth in 0..60_u32 {
            p.client.context().send(conn, &nth.to_le_bytes()).expect("one message is out");
            let received = p.c.received + 1;
            p.until("the answer", |p| p.c.received == received);
        }
        let answers = p.c.events[before..].iter().filter_map(|event| match event {
            Event::Recv(_, bytes) => Some(bytes.clone()),
            _ => None,
        });
        assert!(answers.eq((0..60_u32).map(|nth| nth.to_le_bytes().to_vec())));
        p.client.context().close(conn);
        p.until("the end", |p| (p.s.live(), p.c.live()) == (0, 0));
    }
    drop(signals);
    p.finish();
}

/// Row 80 of `docs/reliability.md`. The whole process stalls for longer than the keepalive timeout, the transfer timeout, and the times of
/// its pending timers. No connection ends, and each timer fires once.
fn the_process_stands_still(device: Device) {
    let setup = Setup::witnessed(device);
    let config = setup
        .config()
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (ms(400), ms(2000)))
        .timeouts(|t| t.transfer = ms(2000));
    let mut p = Pair::new(&setup, config, Probe::echo(), Probe::default());
    let conns: Vec<_> = (0..4).map(|_| p.connect()).collect();
    for nth in 0..100 {
        p.client.context().timers().set(ms(20 * nth), nth);
    }
    p.client.context().send(conns[0], b"on its way").expect("room");
    let me = std::process::id();
    for _ in 0..2 {
        let (mut last, mut longest) = (now(), Duration::ZERO);
        let mut waker = Command::new("sh")
            .args(["-c", &format!("kill -STOP {me}; sleep 2.5; kill -CONT {me}")])
            .spawn()
            .expect("a shell");
        let mut is_over = false;
        while !is_over {
            is_over = waker.try_wait().expect("it can be waited for").is_some();
            p.turn();
            let at = now();
            (last, longest) = (at, longest.max(at - last));
        }
        waker.wait().expect("it has ended");
        assert!(longest >= ms(2400), "it did not stall: at most {longest:?}");
        p.turn_for(ms(100));
    }
    assert_eq!((p.s.live(), p.c.live()), (4, 4));
    p.until("all timers", |p| p.c.count(|event| matches!(event, Event::Timer(_))) == 100);
    for conn in &conns {
        p.client.context().send(*conn, b"after it").expect("room");
    }
    p.until("all echoes", |p| p.c.received == 5);
    let timers = p.c.events.iter().filter_map(|event| if let Event::Timer(n) = event { Some(*n) } else { None });
    assert!(timers.eq(0..100));
    p.finish();
}

rdma_reactor_tests::on_each_device! {
    on_siw on_rxe:
    nobody_answers no_receive_is_posted no_descriptors signals_interrupt_nothing
    the_process_stands_still
}
