//! Opens and closes 10,000 connections on each of the kernel's RDMA devices. Memory and descriptors must not grow in
//! the second half. `RDMA_CYCLES` sets another number of connections. It must be at least 4,000, because the first half
//! fills pools, arenas and lists of the kernel.
#![cfg(feature = "verbs")]

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor_tests::conformance::Setup;
use rdma_reactor_tests::conformance::harness::{Event, PATIENCE, Pair, Probe, now, open_descriptors, with_watchdog_of};
use rdma_reactor_tests::device::{Device, RXE, SIW, config};
use rdma_reactor_tests::usage::resident_kib;

/// The number of connections that are open at the same time.
const AT_ONCE: u64 = 16;
/// The smallest allowed number of connections.
const LEAST: u64 = 4000;
/// The memory that may be added after the first half, in KiB. It is far less than one page per connection. It is not
/// zero, because the kernel may turn used memory into huge pages of 2 MiB at any time.
const SLACK: u64 = 8 << 10;

/// Opens connections on a device. Each one receives one echo, and is closed and replaced by another one.
fn churn(device: Device) {
    let cycles: u64 = std::env::var("RDMA_CYCLES").map_or(10_000, |n| n.parse().expect("RDMA_CYCLES is a number"));
    assert!(cycles >= LEAST, "RDMA_CYCLES is {cycles}: it must be {LEAST} at least");
    let warm = cycles / 2;
    let before = device.resources();
    let address: Rc<Cell<Option<SocketAddr>>> = Rc::default();
    let done = Rc::new(Cell::new(0_u64));
    let (to, count) = (Rc::clone(&address), Rc::clone(&done));
    let mut c = Probe::new(move |cx, event| match event {
        Event::Connect(conn, _) => drop(cx.send(*conn, b"x").expect("a new connection has room")),
        Event::Recv(conn, _) => cx.close(*conn),
        Event::Disconnect(..) => {
            count.set(count.get() + 1);
            if count.get() + AT_ONCE <= cycles {
                cx.connect(to.get().expect("set before")).expect("connecting");
            }
        }
        Event::ConnectError(conn, error) => panic!("{conn}: {error}"),
        _ => {}
    });
    c.record_messages = false;
    let setup = Setup::on(device);
    // A busy machine may exceed the default limit of a flush. On siw, a flush may end only when its limit is over, so that limit is kept.
    let config = if setup.flushes { config().timeouts(|t| t.flush = PATIENCE) } else { config() };
    let mut p = Pair::new(&setup, config, Probe::echo(), c);
    address.set(Some(p.address));
    let start = now();
    for _ in 0..AT_ONCE {
        p.client.context().connect(p.address).expect("connecting");
    }
    let mut first = (0, 0);
    while done.get() < cycles {
        let next = done.get() + cycles / 10;
        p.until("cycles", |_| done.get() >= next.min(cycles));
        p.s.events.clear();
        p.c.events.clear();
        let now = (open_descriptors(), resident_kib().expect("/proc/self/status"));
        println!("{} cycles, {:?}: {} descriptors, {} KiB", done.get(), start.elapsed(), now.0, now.1);
        if first == (0, 0) && done.get() >= warm {
            first = now;
        }
    }
    p.until("the server has noticed", |p| p.s.live() == 0);
    let last = (open_descriptors(), resident_kib().expect("/proc/self/status"));
    assert!(last.0 <= first.0 && last.1 <= first.1 + SLACK, "{first:?} after {warm} cycles, now {last:?}");
    p.finish();
    assert_eq!(device.resources(), before);
}

#[test]
fn siw() {
    with_watchdog_of(Duration::from_secs(300), "churn on siw", || churn(SIW));
}

#[test]
fn rxe() {
    with_watchdog_of(Duration::from_secs(300), "churn on rxe", || churn(RXE));
}
