//! How reactors use the queues and the memory of a device: completion vectors, one completion queue for all connections, and memory for
//! large messages that is kept for later ones. The tests use the kernel's siw and rxe; `make test-rdma-full` runs them.
#![cfg(feature = "verbs")]

use std::time::Duration;

use rdma_reactor::{Config, Wait};
use rdma_reactor_tests::conformance::Setup;
use rdma_reactor_tests::conformance::harness::{Pair, Probe, now, pattern};
use rdma_reactor_tests::device::Device;

fn pair(device: Device, config: Config, s: Probe) -> Pair {
    Pair::new(&Setup::on(device), config, s, Probe::default())
}

/// A completion on any completion vector wakes a sleeping reactor that uses this vector.
fn each_vector_wakes_its_reactor(device: Device) {
    let mut p = pair(device, Setup::on(device).config(), Probe::default());
    let conn = p.connect();
    let vectors = p.client.context().connection(conn).capabilities().expect("it is up").completion_vectors;
    p.finish();
    println!("{}: {vectors} completion vectors", device.kind());
    assert!(vectors > 1, "one vector proves nothing: the guest has two processors");
    for vector in 0..vectors {
        let config = Setup::on(device).config().completions(|c| c.vector = Some(vector)).wait(Wait::Event);
        let mut p = pair(device, config, Probe::echo());
        let conn = p.connect();
        for nth in 1..=200 {
            p.client.context().send(conn, &[7; 100]).expect("room");
            p.until("it is back", |p| p.c.received == nth);
        }
        p.finish();
    }
}

/// All connections of a reactor use one completion queue, as long as it has room for their completions. (On siw, each reactor has a further
/// queue on which nothing completes.)
fn connections_share_one_completion_queue(device: Device) {
    let mut p = pair(device, Setup::on(device).config(), Probe::echo());
    p.connect();
    let first = device.resources();
    for _ in 1..50 {
        p.connect();
    }
    let grown = |kind: &str| device.resources()[kind] - first[kind];
    println!("{}: {} more queue pairs, {} more completion queues", device.kind(), grown("qp"), grown("cq"));
    assert_eq!((grown("qp"), grown("cq")), (98, 0));
    p.finish();
}

/// One connection on which messages of one length are sent sequentially. Its reactors keep the memory of large messages for later ones, or
/// release it.
struct Run {
    pair: Pair,
    conn: rdma_reactor::ConnectionId,
    /// The duration in seconds and the number of memory registrations of each call of `send`.
    parts: Vec<(f64, u64)>,
}

impl Run {
    fn new(device: Device, kept: bool) -> Self {
        let config = Setup::on(device)
            .config()
            .timeouts(|t| t.close = Duration::from_secs(60))
            .timeouts(|t| t.pool_idle = Duration::from_secs(600));
        let mut pair =
            pair(device, if kept { config } else { config.large_messages(|l| l.cache = 0) }, Probe::default());
        (pair.s.large, pair.c.large) = (true, true);
        (pair.s.record_messages, pair.c.record_messages) = (false, false);
        let conn = pair.connect();
        Self { pair, conn, parts: Vec::new() }
    }

    fn send(&mut self, message: &[u8], count: u64) {
        let registered = |p: &Pair| [&p.client, &p.server].map(|side| side.stats().messages.large_registrations);
        let (p, started) = (&mut self.pair, now());
        let before: u64 = registered(p).iter().sum();
        for _ in 0..count {
            let sent = p.c.sent + 1;
            p.client.context().send(self.conn, message).expect("room");
            p.until("it has arrived and ended", |p| p.c.sent == sent && p.s.received == sent);
        }
        let after: u64 = registered(p).iter().sum();
        self.parts.push((started.elapsed().as_secs_f64(), after - before));
    }
}

/// A reactor that keeps the memory of large messages uses it for later messages, and registers no other memory. A reactor that releases
/// this memory registers memory for each message, on both sides. The test sends with both kinds of reactors alternately, and prints their
/// rates.
fn kept_memory_is_registered_once(device: Device) {
    const ROUNDS: usize = 5;
    for (len, count) in [(1 << 20, 16), (64 << 20, 1)] {
        let message = pattern(1, len);
        let mut runs = [true, false].map(|kept| Run::new(device, kept));
        for _ in 0..=ROUNDS {
            runs.iter_mut().for_each(|run| run.send(&message, count));
        }
        let messages = ROUNDS as u64 * count;
        let steady = runs.each_ref().map(|run| &run.parts[1..]);
        let registrations = steady.map(|parts| parts.iter().map(|part| part.1).sum::<u64>());
        let rate = |parts: &[(f64, u64)]| {
            let mut times: Vec<_> = parts.iter().map(|part| part.0).collect();
            times.sort_by(f64::total_cmp);
            count as f64 * (len >> 20) as f64 / times[times.len() / 2]
        };
        let [kept, fresh] = steady.map(rate);
        println!(
            "{}, {} MiB: kept {kept:.0} MiB/s, {:.2} registrations a message; not kept {fresh:.0} MiB/s, {:.2}; ratio {:.2}",
            device.kind(),
            len >> 20,
            registrations[0] as f64 / messages as f64,
            registrations[1] as f64 / messages as f64,
            kept / fresh,
        );
        assert_eq!(registrations, [0, 2 * messages], "in {messages} messages of {len} bytes");
        runs.into_iter().for_each(|run| run.pair.finish());
    }
}

rdma_reactor_tests::on_each_device! {
    siw rxe:
    each_vector_wakes_its_reactor connections_share_one_completion_queue kept_memory_is_registered_once
}
