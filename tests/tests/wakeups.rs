//! No wake-up may be lost. Messages are sent at random times, in each wait mode, over TCP and in shared memory, and a watchdog counts late
//! messages. In shared memory, a side reads a word that both sides write, to decide if it must wake the other one.
//!
//! `WAKEUP_MESSAGES=N` sets the number of messages per mode (default: 20,000; `make soak` uses 1,000,000). In shared memory with
//! `Wait::Event`, each side must also sleep more than `N` times.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor, TimerId, Wait,
};
use rdma_reactor_tests::conformance::harness::{now, with_watchdog_of};
use rdma_reactor_tests::patience::patient;
use rdma_reactor_tests::sim::rng::Rng;

/// The longest time that a message and its echo may take on a busy machine. After a lost wake-up, nothing wakes the side until the next
/// keepalive, and no keepalive occurs in this test.
const LATE: Duration = Duration::from_secs(60);

/// A program that echoes, and records how often its reactor has slept.
struct Echo(Arc<AtomicU64>);

impl Handler for Echo {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.0.store(cx.stats().turns.waits, Ordering::Relaxed);
        cx.send(conn, &message).expect("an echo has room");
    }
}

/// A client that sends one message at a time. Before each message, the client pauses for a random time: not at all, shorter than a spin,
/// about as long as arming takes, or so long that both sides sleep. The client ends when enough messages are sent and both sides have slept
/// often enough.
struct Pacer {
    rng: Rng,
    least: u64,
    /// The number of times that each side must have slept.
    sleeps: u64,
    sent: u64,
    echoes: Arc<AtomicU64>,
    server_sleeps: Arc<AtomicU64>,
    conn: Option<ConnectionId>,
}

impl Pacer {
    fn go_on(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // Both sides must have slept often, because a wake-up of either one could be lost.
        let often = self.sleeps;
        let have_slept = cx.stats().turns.waits > often && self.server_sleeps.load(Ordering::Relaxed) > often;
        if self.sent >= self.least && have_slept {
            return cx.close(conn);
        }
        self.sent += 1;
        match self.rng.below(100) {
            // The delay is a multiple of a millisecond, the resolution of timers.
            0 => {
                cx.timers().set(Duration::from_micros(self.rng.below(1_500)), 0);
            }
            kind @ 1..60 => {
                let until = now() + Duration::from_nanos(self.rng.skewed(1..=if kind < 50 { 20_000 } else { 150_000 }));
                while now() < until {
                    std::hint::spin_loop();
                }
                self.send(cx, conn);
            }
            _ => self.send(cx, conn),
        }
    }

    fn send(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        cx.send(conn, b"x").expect("one at a time");
    }
}

impl Handler for Pacer {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
        self.go_on(cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: Message<'_>) {
        self.echoes.fetch_add(1, Ordering::Relaxed);
        self.go_on(cx, conn);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if let Some(conn) = self.conn {
            self.send(cx, conn);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        cx.stop();
    }
}

#[allow(clippy::disallowed_methods, reason = "two processors, and a watchdog")]
fn paced(provider: ProviderChoice, wait: Wait) {
    let text = std::env::var("WAKEUP_MESSAGES").unwrap_or_else(|_| "20000".into());
    let count: u64 = text.parse().unwrap_or_else(|error| panic!("WAKEUP_MESSAGES={text}: {error}"));
    let config = patient(Config::default().provider(provider).wait(wait));
    let mut server = Reactor::new(config.clone()).expect("a reactor");
    let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a port");
    let address = server.context().listeners().local_address(listener).expect("it listens");
    let mut client = Reactor::new(config).expect("a reactor");
    client.context().connect(address).expect("a peer");
    let (stop, wake) = (server.handle(), client.handle());
    let [echoes, server_sleeps] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let mut pacer = Pacer {
        rng: Rng::new(count, "pace"),
        least: count,
        sleeps: if (provider, wait) == (ProviderChoice::Shm, Wait::Event) { count } else { count / 500 },
        sent: 0,
        echoes: Arc::clone(&echoes),
        server_sleeps: Arc::clone(&server_sleeps),
        conn: None,
    };

    let server = thread::spawn(move || server.run(&mut Echo(server_sleeps)).map(|()| server.stats()));
    let (over, watch) = std::sync::mpsc::channel::<()>();
    // When a message is late, the watchdog counts it, and wakes both reactors so that they find the event that they have missed.
    let help = stop.clone();
    let watchdog = thread::spawn(move || {
        let (mut late, mut seen) = (0, 0);
        while watch.recv_timeout(LATE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let now = echoes.load(Ordering::Relaxed);
            if now == seen {
                late += 1;
                help.wake();
                wake.wake();
            }
            seen = now;
        }
        (late, echoes.load(Ordering::Relaxed))
    });
    client.run(&mut pacer).expect("the client's run");
    drop(over);
    stop.stop();
    let (late, echoes) = watchdog.join().expect("the watchdog");
    let (c, s) = (client.stats(), server.join().expect("the server").expect("the server's run"));
    println!("{provider:?}, {wait:?}: {echoes} echoes, {late} late; client {c:?}; server {s:?}");
    assert_eq!((echoes, late), (pacer.sent, 0));
}

/// Runs the test in each wait mode.
fn nothing_is_late(name: &'static str, provider: ProviderChoice) {
    for wait in [Wait::Event, Wait::Spin(Duration::from_micros(20)), Wait::Adaptive] {
        with_watchdog_of(Duration::from_secs(20 * 60), name, || paced(provider, wait));
    }
}

#[test]
fn nothing_is_late_over_tcp() {
    nothing_is_late("nothing_is_late_over_tcp", ProviderChoice::Iwarp);
}

#[test]
fn nothing_is_late_in_shared_memory() {
    nothing_is_late("nothing_is_late_in_shared_memory", ProviderChoice::Shm);
}
