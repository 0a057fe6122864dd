//! Events of the process around a reactor: signals, a fork, and ten thousand timers for the same time.
#![allow(clippy::disallowed_methods, reason = "threads are what is tested")]

use std::cell::RefCell;
use std::io;
use std::os::unix::net::UnixStream;
use std::ptr;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::{Config, Context, DisconnectReason, Handler, Reactor, TimerId, Wait};
use rdma_reactor_tests::conformance::harness::{Event, Pair, Probe, Setup, with_watchdog};
use rdma_reactor_tests::signals::Signals;
use rdma_reactor_tests::sim::fabric::lock;
use rdma_reactor_tests::sim::quiet::{Node, network, reactor, until};
use rdma_reactor_tests::sim::swarm::MS;

/// Many signals arrive, each of which interrupts the current system call. No message is lost or duplicated.
#[test]
fn signals_interrupt_nothing() {
    with_watchdog("signals_interrupt_nothing", || {
        let mut p =
            Pair::new(&Setup::iwarp(), Setup::iwarp().config().wait(Wait::Event), Probe::echo(), Probe::default());
        let conn = p.connect();
        let signals = Signals::start(Duration::from_micros(100));
        let mut sent = 0_u32;
        while signals.caught() < 2000 || sent < 2000 {
            p.client.context().send(conn, &sent.to_le_bytes()).expect("one message is out");
            sent += 1;
            p.until("the answer", |p| p.c.received == u64::from(sent));
        }
        drop(signals);
        for (nth, message) in p.c.messages().iter().enumerate() {
            assert_eq!(*message, (nth as u32).to_le_bytes());
        }
        p.finish();
    });
}

/// A forked child has copies of all descriptors of its parent, and outlives the connection. If the parent closes the connection or drops
/// its reactor, the peer must still be notified of the end.
#[test]
fn a_forked_child_keeps_no_connection_alive() {
    with_watchdog("a_forked_child_keeps_no_connection_alive", || {
        for drops in [false, true] {
            let mut p = Pair::new(&Setup::iwarp(), Setup::iwarp().config(), Probe::default(), Probe::default());
            let conn = p.connect();
            let (reader, writer) = UnixStream::pair().expect("two sockets");
            // SAFETY: this process has several threads, so the child may only call async-signal-safe functions. It calls `read` and
            // `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let mut byte = 0_u8;
                // The child has a copy of `writer`, too, so the read never returns. The child runs until the parent kills it.
                // SAFETY: the pointer is valid for a write of one byte.
                unsafe {
                    libc::read(std::os::fd::AsRawFd::as_raw_fd(&reader), (&raw mut byte).cast(), 1);
                    libc::_exit(0);
                }
            }
            assert!(child > 0, "{}", io::Error::last_os_error());
            let reason = if drops {
                p.client = Reactor::new(Setup::iwarp().config()).expect("a reactor");
                DisconnectReason::Lost
            } else {
                p.client.context().close(conn);
                DisconnectReason::Closed
            };
            p.until("the peer knows", |p| p.s.live() == 0);
            let told = p.s.events.iter().find_map(|event| match event {
                Event::Disconnect(_, reason) => Some(reason.clone()),
                _ => None,
            });
            assert_eq!(told, Some(reason));
            drop(writer);
            // SAFETY: this process has forked the child, and has not waited for it yet. So the process id is still that of the child.
            let ended = unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, ptr::null_mut(), 0)
            };
            assert_eq!(ended, child);
        }
    });
}

/// A program that records the numbers of the timers that have fired.
#[derive(Clone, Default)]
struct Fired(Rc<RefCell<Vec<u64>>>);

impl Handler for Fired {
    fn on_timer(&mut self, _: &mut Context<'_>, _: TimerId, number: u64) {
        self.0.borrow_mut().push(number);
    }
}

/// Ten thousand timers for the same time fire once each, in the order in which they were set. A turn handles at most 1,024 of them.
#[test]
fn ten_thousand_timers_at_one_time() {
    const TIMERS: u64 = 10_000;
    let fabric = network(1);
    let mut reactor = reactor(0, &fabric, Config::default());
    let mut cx = reactor.context();
    for number in 0..TIMERS {
        cx.timers().set(Duration::from_secs(1), number);
    }
    // Each timer is due a little later than the previous one, because the clock advances with each call. `all_due` is later than all of
    // these times.
    let all_due = lock(&fabric).now() + 2_000 * MS;
    lock(&fabric).advance(all_due);
    let fired = Fired::default();
    let mut nodes = [Node::new(reactor, Box::new(fired.clone()))];
    let (mut before, mut most) = (0, 0);
    until(&fabric, &mut nodes, "all timers", |_| {
        let now = fired.0.borrow().len();
        most = most.max(now - before);
        before = now;
        now as u64 == TIMERS
    });
    assert!(fired.0.borrow().iter().copied().eq(0..TIMERS));
    assert_eq!(most, 1024);
}
