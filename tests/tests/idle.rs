//! The processor time of a reactor that has little to do. It is measured for the reactor's thread, so that a busy
//! machine makes no difference.
#![allow(clippy::disallowed_methods, reason = "threads and time are what is measured")]

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor, SendErrorKind, TimerId, Wait,
};
use rdma_reactor_tests::conformance::harness::with_watchdog;

/// Processor time of this thread.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("the scheduler's account of this thread");
    Duration::from_nanos(text.split(' ').next().and_then(|word| word.parse().ok()).expect("a number"))
}

fn config(wait: Wait) -> Config {
    Config::default().provider(ProviderChoice::Iwarp).wait(wait).receive_depth(8).send_depth(4).buffer_size(64)
}

/// A program that counts its connections and messages, echoes if it is told to, and sends one message per `pace`.
struct Count {
    echo: bool,
    up: usize,
    pace: Option<Duration>,
    conn: Option<ConnectionId>,
    messages: u32,
}

impl Count {
    const fn new(echo: bool, pace: Option<Duration>) -> Self {
        Self { echo, up: 0, pace, conn: None, messages: 0 }
    }
}

fn sends(cx: &mut Context<'_>, conn: ConnectionId, payload: &[u8]) {
    let result = cx.send(conn, payload);
    // The peer may have ended its time already, and reads no more.
    assert!(matches!(result, Ok(_) | Err(SendErrorKind::WouldBlock(_) | SendErrorKind::Closed)), "{result:?}");
}

impl Handler for Count {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.up += 1;
        self.conn = Some(conn);
        if let Some(pace) = self.pace {
            cx.set_timer(pace, 0);
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.messages += 1;
        if self.echo {
            sends(cx, conn, &message);
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if let (Some(pace), Some(conn)) = (self.pace, self.conn) {
            cx.set_timer(pace, 0);
            sends(cx, conn, b"tick");
        }
    }
}

/// Measures the processor time of both sides while `connections` connections are open for `time`, one of them with a
/// message per `pace`.
fn measure(wait: Wait, connections: usize, time: Duration, pace: Option<Duration>) -> ([Duration; 2], u32) {
    let mut server = Reactor::new(config(wait)).expect("a reactor");
    let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a port");
    let address = server.context().local_address(listener).expect("it listens");
    let (tell, told) = mpsc::channel();
    let run = move |mut reactor: Reactor, mut handler: Count, tell: mpsc::Sender<()>| {
        while handler.up < connections {
            reactor.turn(&mut handler, None).expect("a turn");
        }
        // Connections come up at once; their last messages are not what is measured.
        let mut until = |span: Duration| {
            let end = std::time::Instant::now() + span;
            while let left = end.saturating_duration_since(std::time::Instant::now())
                && !left.is_zero()
            {
                reactor.turn(&mut handler, left).expect("a turn");
            }
        };
        until(Duration::from_millis(300));
        let before = processor_time();
        until(time);
        let taken = processor_time() - before;
        tell.send(()).expect("somebody waits");
        (taken, handler.messages, reactor)
    };
    let ready = tell.clone();
    let server = thread::spawn(move || run(server, Count::new(true, None), ready));
    let mut client = Reactor::new(config(wait)).expect("a reactor");
    for _ in 0..connections {
        client.context().connect(address).expect("a peer");
    }
    let client = thread::spawn(move || run(client, Count::new(false, pace), tell));
    (0..2).for_each(|_| told.recv_timeout(Duration::from_secs(60)).expect("both sides are done"));
    let (server, client) = (server.join().expect("the server"), client.join().expect("the client"));
    ([server.0, client.0], client.1)
}

#[test]
fn a_thousand_idle_connections_take_next_to_nothing() {
    with_watchdog("a_thousand_idle_connections_take_next_to_nothing", || {
        rlimit::increase_nofile_limit(1 << 16).expect("the limit of open files");
        // Longer than a round of keepalive.
        let time = Duration::from_secs(6);
        for wait in [Wait::Event, Wait::Adaptive] {
            let (taken, _) = measure(wait, 1000, time, None);
            let percent = taken.map(|taken| 100.0 * taken.as_secs_f64() / time.as_secs_f64());
            println!("{wait:?}: server {:.3} %, client {:.3} %", percent[0], percent[1]);
            assert!(percent[0] < 1.0 && percent[1] < 1.0, "{wait:?}: {percent:?} % of a processor");
        }
    });
}

#[test]
fn rare_messages_take_what_sleeping_takes() {
    with_watchdog("rare_messages_take_what_sleeping_takes", || {
        let (time, pace) = (Duration::from_secs(5), Duration::from_millis(10));
        // The two measurements follow each other, and other work of the machine disturbs one of them now and then.
        let found = (0..3).find(|_| {
            let [event, adaptive] = [Wait::Event, Wait::Adaptive].map(|wait| {
                let (taken, messages) = measure(wait, 1, time, Some(pace));
                assert!(messages > 100, "{messages} echoes in {time:?}");
                let each = taken.map(|taken| taken.as_secs_f64() / f64::from(messages) * 1e6);
                println!("{wait:?}: server {:.1} us, client {:.1} us per message", each[0], each[1]);
                each[0] + each[1]
            });
            // The ratio should be 1.1; the rest is noise.
            adaptive < 1.3 * event
        });
        assert!(found.is_some(), "more than asleep, each time");
    });
}
