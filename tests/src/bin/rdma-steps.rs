//! Measures the processor time of a round trip for many message sizes, and prints the ratios of neighbouring sizes. A high ratio shows a
//! size at which the library changes its way of sending.
//!
//! ```text
//! rdma-steps                    sizes up to 1 MiB; most are near a size at which the way of sending changes
//! rdma-steps EAGER              the same sizes, with EAGER bytes as `LargeMessageSettings::eager_limit`
//! rdma-steps EAGER SIZE         at least 10,000 round trips of SIZE bytes, for strace(1) or perf(1)
//! ```
//!
//! Two reactors on the embedded provider take turns in one thread, whose processor time is measured. So the scheduler does not influence
//! the results, and other programs influence them little. In each of many rounds, the program measures every size once. The result of a
//! size is its shortest time in all rounds. Only the ratios of results are meaningful.

use std::time::Duration;

use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor};

/// The number of rounds.
const ROUNDS: usize = 15;
/// The time for each size in each round.
const SHARE: Duration = Duration::from_millis(8);
/// The number of round trips between two readings of the clock.
const AT_ONCE: u64 = 16;

/// A side that sends every message back until its number of round trips is reached.
#[derive(Debug, Default)]
struct Program {
    conn: Option<ConnectionId>,
    answers: bool,
    back: u64,
    /// The number of round trips that this side must still begin.
    left: u64,
}

impl Handler for Program {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.back += 1;
        if self.answers || self.left > 0 {
            self.left = self.left.saturating_sub(1);
            cx.send(conn, &message).expect("room for an answer");
        }
    }
}

/// Returns the processor time that this thread has used. It does not include the time of other programs.
fn on_processor() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the system writes one `timespec`, which outlives the call.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(rc, 0, "a clock that every Linux has");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Two reactors, and one connection between them.
struct Ends {
    client: (Reactor, Program),
    server: (Reactor, Program),
}

impl Ends {
    fn new(config: &Config) -> Self {
        let end = |answers| {
            let program = Program { answers, ..Program::default() };
            (Reactor::new(config.clone()).expect("a reactor"), program)
        };
        let mut ends = Self { client: end(false), server: end(true) };
        let mut server = ends.server.0.context();
        let listener = server.listen("127.0.0.1:0".parse().expect("an address")).expect("a listener");
        let address = server.listeners().local_address(listener).expect("it listens");
        ends.client.0.context().connect(address).expect("connecting");
        while ends.client.1.conn.is_none() || ends.server.1.conn.is_none() {
            ends.turn();
        }
        ends
    }

    fn turn(&mut self) {
        for (reactor, program) in [&mut self.client, &mut self.server] {
            reactor.turn(program, Some(Duration::ZERO)).expect("a turn");
        }
    }

    /// Sends `message` back and forth for the time `share`. Returns the mean processor time of a round trip, in ns.
    fn measure(&mut self, message: &[u8], share: Duration) -> f64 {
        let (begun, before) = (on_processor(), self.client.1.back);
        loop {
            let conn = self.client.1.conn.expect("it is up");
            self.client.0.context().send(conn, message).expect("room for a question");
            self.client.1.left = AT_ONCE - 1;
            let last = self.client.1.back + AT_ONCE;
            while self.client.1.back < last {
                self.turn();
            }
            if on_processor() - begun >= share {
                break;
            }
        }
        (on_processor() - begun).as_nanos() as f64 / (self.client.1.back - before) as f64
    }
}

fn main() {
    let bytes = |nth| std::env::args().nth(nth).map(|bytes| bytes.parse::<usize>().expect("a number of bytes"));
    let eager = bytes(1);
    let mut config = Config::default().provider(ProviderChoice::Iwarp);
    if let Some(limit) = eager {
        config = config.large_messages(|l| l.eager_limit = limit);
    }
    let sizes: Vec<usize> = [4 << 10, 6 << 10, 8 << 10]
        .into_iter()
        .chain([(8 << 10) + 1, 12 << 10, 16 << 10, (16 << 10) + 1, 24 << 10, 32 << 10, 48 << 10, 64 << 10])
        .chain([96 << 10, 128 << 10, (128 << 10) + 1, 192 << 10, 256 << 10, (256 << 10) + 1, 320 << 10, 384 << 10])
        .chain([480 << 10, (488 << 10) + 1, 512 << 10, 640 << 10, 768 << 10, 896 << 10, 1 << 20])
        .collect();
    let mut ends = Ends::new(&config);
    if let Some(size) = bytes(2) {
        let message = vec![7; size];
        while ends.client.1.back < 10_000 {
            ends.measure(&message, Duration::ZERO);
        }
        return;
    }
    let message = vec![7; 1 << 20];
    let mut best = vec![f64::INFINITY; sizes.len()];
    for round in 0..ROUNDS {
        for (&size, best) in sizes.iter().zip(&mut best) {
            let time = ends.measure(&message[..size], SHARE);
            if round > 0 {
                *best = best.min(time);
            }
        }
    }
    println!("{:>9}  {:>10}  {:>8}  {:>9}", "bytes", "half, us", "step", "ns / KiB");
    for (nth, (&size, &time)) in sizes.iter().zip(&best).enumerate() {
        let step = if nth == 0 { 1.0 } else { time / best[nth - 1] };
        println!("{size:>9}  {:>10.2}  {step:>8.2}  {:>9.0}", time / 2000.0, time / 2.0 / (size as f64 / 1024.0));
    }
}
