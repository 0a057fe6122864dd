//! The tests of many connections, open at the same time or opened sequentially.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::harness::{Event, PATIENCE, Pair, Probe, Scale, Setup, now, open_descriptors};

/// Many connections are open in one reactor (1,000 on the embedded provider), with echoes on each. Afterwards all resources must be
/// released.
pub fn many_connections(setup: &Setup) {
    let Scale { connections, echoes, .. } = setup.scale;
    let _alone = alone();
    raise_descriptor_limit();
    // librdmacm opens a device on its first use, and keeps it open. So the device is used once before the descriptors are counted.
    drop(Pair::new(setup, setup.config(), Probe::default(), Probe::default()));
    let descriptors = open_descriptors();
    {
        let config =
            setup.config().receive_depth(8).send_depth(8).buffer_size(256).completions(|c| c.queue = Some(4096));
        let progress: Rc<RefCell<BTreeMap<usize, u32>>> = Rc::default();
        let counts = Rc::clone(&progress);
        let mut c = Probe::new(move |cx, event| match event {
            Event::Connect(conn, _) => {
                cx.send(*conn, &0_u32.to_le_bytes()).expect("room");
            }
            Event::Recv(conn, bytes) => {
                let mut counts = counts.borrow_mut();
                let count = counts.entry(conn.slot()).or_insert(0);
                assert_eq!(bytes[..], count.to_le_bytes(), "{conn}: echoes in order");
                *count += 1;
                if *count < echoes {
                    cx.send(*conn, &count.to_le_bytes()).expect("room");
                }
            }
            _ => {}
        });
        c.record_messages = false;
        let mut p = Pair::new(setup, config, Probe::echo(), c);
        for _ in 0..connections {
            p.client.context().connect(p.address).expect("connecting");
        }
        let total = connections as u64 * u64::from(echoes);
        p.until("all echoes", |p| p.c.received == total);
        assert!(progress.borrow().values().all(|&count| count == echoes));
        assert_eq!(p.c.live(), connections);
        p.finish();
    }
    until_descriptors(descriptors);
}

/// Connections that are opened and closed sequentially must leave no resources.
pub fn connect_and_close_cycles(setup: &Setup) {
    let _alone = alone();
    let mut p = Pair::new(setup, setup.config(), Probe::echo(), Probe::default());
    p.c.record_messages = false;
    let mut descriptors = 0;
    for cycle in 0..setup.scale.cycles {
        let conn = p.connect();
        p.client.context().send(conn, b"x").expect("room");
        p.until("the echo", |p| p.c.received == cycle + 1);
        p.client.context().close(conn);
        p.until("the end", |p| p.c.live() == 0 && p.s.live() == 0);
        p.s.events.clear();
        p.c.events.clear();
        if cycle == 50 {
            descriptors = open_descriptors();
        }
    }
    // A few connections may still exist for a moment, to deliver their last messages.
    assert!(open_descriptors() <= descriptors + 4, "{descriptors} descriptors at first, {} now", open_descriptors());
    let (all, free) = p.client.pool_levels();
    assert_eq!(all, free);
    p.finish();
}

/// Waits until the process has at most `most` open descriptors. On siw, a thread that has connected keeps a descriptor until it has been
/// idle for a second.
#[allow(clippy::disallowed_methods, reason = "other threads close descriptors without an event")]
fn until_descriptors(most: usize) {
    let deadline = now() + PATIENCE;
    loop {
        let left = open_descriptors();
        if left <= most {
            return;
        }
        assert!(now() < deadline, "{most} descriptors at first, {left} now");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until no other test of this module runs, because the tests of this module count the descriptors of the process. Returns a guard.
/// The next test can run when the guard is dropped.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Raises the limit of descriptors, because both ends of a thousand connections are in this process.
fn raise_descriptor_limit() {
    let limit = rlimit::increase_nofile_limit(1 << 16).expect("the limit of open files");
    assert!(limit > 2300, "this test needs 2,300 descriptors, the limit is {limit}: raise it with `ulimit -n`");
}
