//! A simulation of all connects in a cluster, on virtual time. It runs the code of `rdma-mesh` (`mesh::storm`) with a model of hosts. A
//! host accepts connections sequentially and has a limited queue of requests. Packets may be lost.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::time::Duration;

use rdma_reactor_tools::mesh::storm::{RetryDecision, Storm};

/// The time that a packet takes between two hosts.
const WAY: Duration = Duration::from_micros(20);
/// The time that a host needs to accept a connection. An adapter needs about this time to create a queue pair.
const SERVICE: Duration = Duration::from_micros(200);
/// The time after which an unanswered connect fails.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The size of the simulated cluster, and its faults.
#[derive(Clone, Copy, Debug)]
struct World {
    ranks: usize,
    at_once: usize,
    /// The probability, per thousand, that a request or its answer is lost.
    loss: u64,
    /// The largest number of requests that a host queues. It drops further ones.
    backlog: usize,
    /// The time within which all ranks start, each at a random moment.
    spread: Duration,
    patience: Duration,
}

/// An event of the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The rank checks whether it must connect to another rank.
    Turn(usize),
    /// A connect request arrives at the host `to`.
    Request { from: usize, to: usize },
    /// The host `to` has handled a request.
    Served { from: usize, to: usize },
    /// The outcome of a connect arrives at the rank `from`, which has requested the connection. `up` is true if the connection is
    /// established.
    Answer { from: usize, to: usize, up: bool },
}

/// The results of a simulation.
#[derive(Debug, Default)]
struct WorldFigures {
    up: BTreeSet<(usize, usize)>,
    given_up: usize,
    attempts: u64,
    refused: u64,
    lost: u64,
    /// The largest number of requests that were queued at one host.
    queue: usize,
    time: Duration,
}

/// A generator of pseudo-random numbers (Splitmix64). The same seed gives the same numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

fn live(world: World, seed: u64) -> WorldFigures {
    let World { ranks, at_once, loss, backlog, spread, patience } = world;
    let (mut random, mut seen) = (Random(seed), WorldFigures::default());
    let mut storms: Vec<_> = (0..ranks).map(|rank| Storm::new(rank, ranks, at_once, patience)).collect();
    let starts: Vec<_> = (0..ranks).map(|_| spread.mul_f64(random.next() as f64 / u64::MAX as f64)).collect();
    let mut waiting = vec![0_usize; ranks];
    let mut free_at = vec![Duration::ZERO; ranks];
    // The time of the next scheduled turn of each rank.
    let mut looks: Vec<Option<Duration>> = starts.iter().copied().map(Some).collect();
    let mut events: BinaryHeap<_> = (0..ranks).map(|rank| Reverse((starts[rank], Event::Turn(rank)))).collect();
    while let Some(Reverse((now, event))) = events.pop() {
        // A turn does not count as activity of the cluster, because a rank may have nothing to do in it.
        if !matches!(event, Event::Turn(_)) {
            seen.time = now;
        }
        let turn = match event {
            Event::Turn(rank) => {
                looks[rank] = looks[rank].filter(|&at| at > now);
                rank
            }
            Event::Request { from, to } => {
                if waiting[to] >= backlog {
                    seen.refused += 1;
                    events.push(Reverse((now + WAY, Event::Answer { from, to, up: false })));
                } else {
                    waiting[to] += 1;
                    seen.queue = seen.queue.max(waiting[to]);
                    free_at[to] = free_at[to].max(now) + SERVICE;
                    events.push(Reverse((free_at[to], Event::Served { from, to })));
                }
                continue;
            }
            Event::Served { from, to } => {
                waiting[to] -= 1;
                let lost = random.next() % 1000 < loss;
                seen.lost += u64::from(lost);
                let answer = if lost { now + TIMEOUT } else { now + WAY };
                events.push(Reverse((answer, Event::Answer { from, to, up: !lost })));
                continue;
            }
            Event::Answer { from, to, up } => {
                if up {
                    assert!(seen.up.insert((from.min(to), from.max(to))), "{from} and {to} are connected twice");
                    storms[from].succeeded();
                } else if storms[from].failed(to, now - starts[from], random.next()) == RetryDecision::GiveUp {
                    seen.given_up += 1;
                }
                from
            }
        };
        let since = now - starts[turn];
        while let Some(to) = storms[turn].next(since) {
            let lost = random.next() % 1000 < loss;
            seen.lost += u64::from(lost);
            events.push(Reverse(match lost {
                true => (now + TIMEOUT, Event::Answer { from: turn, to, up: false }),
                false => (now + WAY, Event::Request { from: turn, to }),
            }));
        }
        if let Some(at) = storms[turn].wake_at() {
            let at = starts[turn] + at.max(since + Duration::from_millis(1));
            if looks[turn].is_none_or(|earlier| at < earlier) {
                looks[turn] = Some(at);
                events.push(Reverse((at, Event::Turn(turn))));
            }
        }
    }
    seen.attempts = storms.iter().map(Storm::attempts).sum();
    assert!(storms.iter().all(Storm::is_over));
    seen
}

const CLUSTER: World = World {
    ranks: 1000,
    at_once: 32,
    loss: 20,
    backlog: 128,
    spread: Duration::from_millis(500),
    patience: Duration::from_secs(120),
};

fn tell(what: &str, seen: &WorldFigures) {
    let WorldFigures { up, attempts, refused, lost, queue, time, .. } = seen;
    let pairs = up.len();
    println!(
        "{what}: {pairs} pairs in {time:.2?}; {attempts} connects, {refused} refused, {lost} lost, up to {queue} waiting at a host"
    );
}

#[test]
fn a_thousand_ranks_are_all_connected_in_spite_of_losses() {
    let pairs = CLUSTER.ranks * (CLUSTER.ranks - 1) / 2;
    for seed in 0..3 {
        let seen = live(CLUSTER, seed);
        tell("paced", &seen);
        assert_eq!((seen.up.len(), seen.given_up), (pairs, 0), "seed {seed}: {} connects", seen.attempts);
        assert!(seen.lost > 10_000, "seed {seed}: {} losses", seen.lost);
        // A connect is repeated only if it was lost or refused.
        assert_eq!(seen.attempts, pairs as u64 + seen.lost + seen.refused, "seed {seed}");
        assert!(seen.time < Duration::from_secs(60), "seed {seed}: {:?}", seen.time);
    }
}

#[test]
fn the_bound_keeps_the_queues_of_hosts_short() {
    let quiet = World { loss: 0, spread: Duration::ZERO, ..CLUSTER };
    let paced = live(quiet, 1);
    tell("32 at the same time", &paced);
    assert_eq!((paced.refused, paced.given_up), (0, 0));
    assert!(paced.queue <= 2 * quiet.at_once, "{}", paced.queue);
    let all = live(World { at_once: 1000, ..quiet }, 1);
    tell("all at the same time", &all);
    assert!(all.refused > 10_000, "{}", all.refused);
    assert_eq!(all.up.len(), paced.up.len(), "refusals are repeated");
    assert!(paced.time < all.time, "{:?} and {:?}", paced.time, all.time);
}

#[test]
fn a_cluster_that_cannot_be_connected_ends_in_time() {
    let world = World { ranks: 20, loss: 1000, patience: Duration::from_secs(20), ..CLUSTER };
    let seen = live(world, 1);
    assert_eq!((seen.up.len(), seen.given_up), (0, 190));
    assert!(seen.time < world.patience + TIMEOUT + world.spread, "{:?}", seen.time);
}
