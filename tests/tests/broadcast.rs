//! Tests of `broadcast`, which sends one message to many connections, on virtual time: with receivers that keep up, and with slow ones.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::broadcast::{Broadcast, OverflowPolicy, PublishError, Published, Tally};
use rdma_reactor::{
    Config, ConnectOptions, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message, Outcome,
    SecurityMode, SendId, TimerId,
};
use rdma_reactor_tests::identities::security;
use rdma_reactor_tests::sim::fabric::lock;
use rdma_reactor_tests::sim::quiet::{Node, network, reactor, until};
use rdma_reactor_tests::sim::tcp::address;

const DEPTH: usize = 16;
const MESSAGES: u64 = 400;

/// The time between two messages of a publisher. After the broadcast has refused a message, the publisher no longer waits for this time: it
/// publishes whenever the broadcast has room.
const PERIOD: Duration = Duration::from_millis(1);

/// Returns the content of a message: its number, and bytes that depend on the number.
fn message(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![number as u8; len];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// The results of the publisher.
#[derive(Debug, Default)]
struct Log {
    up: usize,
    published: u64,
    refused: u64,
    /// The sum of the results of all calls of `publish`.
    outcomes: Published,
    tallies: BTreeMap<u8, Tally>,
    /// True if all messages were published and no message is in flight to a connected receiver.
    done: bool,
}

/// A program that publishes `MESSAGES` messages once all receivers are connected. A receiver sends its policy (the first letter of drop,
/// close or wait) and its number in the private data of its connect request.
struct Publisher {
    broadcast: Broadcast,
    receivers: usize,
    len: usize,
    connections: BTreeMap<ConnectionId, u8>,
    log: Rc<RefCell<Log>>,
}

impl Publisher {
    fn publish(&mut self, cx: &mut Context<'_>) -> bool {
        let mut log = self.log.borrow_mut();
        let full = self.broadcast.is_full();
        match self.broadcast.publish(cx, &message(log.published, self.len)) {
            Ok(of) => {
                assert!(!full);
                log.published += 1;
                let all = &mut log.outcomes;
                all.accepted += of.accepted;
                all.lost += of.lost;
                all.queued += of.queued;
                all.dropped += of.dropped;
                all.closed += of.closed;
                true
            }
            Err(PublishError::Full) => {
                assert!(full);
                log.refused += 1;
                false
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Sets `done` in the log if all messages are published and sent. If the broadcast has ever refused a message, this function first
    /// publishes messages until the next refusal, because the broadcast may have room now.
    fn go_on(&mut self, cx: &mut Context<'_>) {
        if self.log.borrow().refused > 0 {
            while self.log.borrow().published < MESSAGES && self.publish(cx) {}
        }
        let mut tallies = self.connections.keys().filter_map(|&conn| self.broadcast.tally(conn));
        let mut log = self.log.borrow_mut();
        log.done = log.published == MESSAGES && tallies.all(|tally| tally.pending == 0);
    }
}

impl Handler for Publisher {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let [slow, number] = *cx.connection(conn).private_data() else { panic!("two bytes") };
        let slow = match slow {
            b'd' => OverflowPolicy::Drop,
            b'c' => OverflowPolicy::Close,
            _ => OverflowPolicy::Wait,
        };
        self.broadcast.join(cx, conn, slow).expect("memory");
        self.connections.insert(conn, number);
        let mut log = self.log.borrow_mut();
        log.up += 1;
        if log.up == self.receivers {
            cx.timers().set(PERIOD, 0);
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let published = self.publish(cx);
        if published && self.log.borrow().published < MESSAGES {
            cx.timers().set(PERIOD, 0);
        }
        self.go_on(cx);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.broadcast.on_writable(cx, conn);
        self.go_on(cx);
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        assert!(self.broadcast.on_send_complete(conn, send, outcome), "nothing else is sent");
        self.go_on(cx);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        let (number, tally) = (self.connections.remove(&conn), self.broadcast.on_disconnect(conn));
        self.log.borrow_mut().tallies.insert(number.expect("it was up"), tally.expect("it has joined"));
        self.go_on(cx);
    }
}

/// The numbers of the messages that a receiver got, and the reason of its disconnect.
#[derive(Debug, Default)]
struct Got {
    numbers: Vec<u64>,
    end: Option<DisconnectReason>,
}

/// A receiver. With a `pace`, it keeps each message, and releases one kept message per `pace`. Without a `pace`, it releases each message
/// immediately.
struct Reader {
    pace: Option<Duration>,
    kept: Vec<DetachedMessage>,
    got: Rc<RefCell<Got>>,
}

impl Handler for Reader {
    fn on_connect(&mut self, cx: &mut Context<'_>, _: ConnectionId) {
        self.pace.into_iter().for_each(|pace| _ = cx.timers().set(pace, 0));
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, arrived: Message<'_>) {
        let number = u64::from_le_bytes(*arrived.first_chunk().expect("a number"));
        assert!(arrived[..] == message(number, arrived.len()), "the bytes of another message");
        self.got.borrow_mut().numbers.push(number);
        if self.pace.is_some() {
            self.kept.push(arrived.detach());
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if !self.kept.is_empty() {
            self.kept.remove(0);
        }
        self.pace.into_iter().for_each(|pace| _ = cx.timers().set(pace, 0));
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.got.borrow_mut().end = Some(reason);
    }
}

/// The results of one broadcast.
struct History {
    log: Log,
    got: Vec<Vec<u64>>,
    /// The virtual time from the first published message to the last one.
    took: Duration,
    /// The largest number of memory regions that the publisher had registered at the same time.
    regions: usize,
    /// The largest value of `MemoryStats::copied_bytes` at the publisher: the bytes of the copies that it makes of a large message for each
    /// receiver separately.
    copied: usize,
}

/// Runs a broadcast to receivers that each have a policy and a pace. `meanwhile` is called again and again during the broadcast, with the
/// number of messages that are published so far, and may change the nodes.
fn broadcast(
    config: &Config,
    broadcast: Broadcast,
    len: usize,
    readers: &[(u8, Option<Duration>)],
    mut meanwhile: impl FnMut(u64, &mut [Node]),
) -> History {
    let fabric = network(readers.len() + 1);
    let (log, receivers) = (Rc::<RefCell<Log>>::default(), readers.len());
    let publisher = Publisher { broadcast, receivers, len, connections: BTreeMap::new(), log: Rc::clone(&log) };
    let mut nodes = vec![Node::new(reactor(0, &fabric, config.clone()), Box::new(publisher))];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let mut all_got = Vec::new();
    for (number, &(slow, pace)) in (1..).zip(readers) {
        let got = Rc::<RefCell<Got>>::default();
        all_got.push(Rc::clone(&got));
        let reader = Reader { pace, kept: Vec::new(), got };
        let mut node = Node::new(reactor(number, &fabric, config.clone()), Box::new(reader));
        let options = ConnectOptions::new().private_data([slow, number as u8]);
        node.reactor.context().connect_with(address(0, 7471), options).expect("connecting");
        nodes.push(node);
    }
    let (mut begin, mut end, mut regions, mut copied) = (0, 0, 0, 0);
    // The publisher borrows `log` only within turns, so the test can read `log` between two turns.
    while !log.borrow().done {
        let (published, before) = (log.borrow().published, lock(&fabric).now());
        meanwhile(published, &mut nodes);
        until(&fabric, &mut nodes, "something happens", |_| {
            let log = log.borrow();
            log.published > published || log.done || lock(&fabric).now() > before
        });
        let memory = nodes[0].reactor.stats().memory;
        (regions, copied) = (regions.max(memory.regions), copied.max(memory.copied_bytes));
        let now = lock(&fabric).now();
        if published == 0 {
            begin = now;
        }
        if log.borrow().published < MESSAGES {
            end = now;
        }
    }
    nodes[0].reactor.context().close_all();
    until(&fabric, &mut nodes, "the end", |nodes| nodes[0].reactor.stats().connections.current == 0);
    until(&fabric, &mut nodes, "the ends of those who live", |nodes| {
        all_got.iter().zip(&nodes[1..]).all(|(got, node)| node.dead || got.borrow().end.is_some())
    });
    drop(nodes);
    let log = Rc::into_inner(log).expect("the publisher is gone").into_inner();
    let got = all_got.into_iter().map(|got| got.take().numbers).collect();
    History { log, got, took: Duration::from_nanos(end - begin), regions, copied }
}

fn all() -> Vec<u64> {
    (0..MESSAGES).collect()
}

const FAST: Option<Duration> = None;
/// A slow receiver handles one message while the publisher publishes ten.
const SLOW: Option<Duration> = Some(Duration::from_millis(10));

fn config() -> Config {
    Config::default().receive_depth(16)
}

/// The longest time that the publisher may need if no receiver delays it. It includes a margin for the resolution of timers.
const UNDISTURBED: Duration = PERIOD.saturating_mul(MESSAGES as u32 * 3 / 2);

#[test]
fn a_slow_receiver_that_drops_has_gaps_and_holds_nobody_back() {
    let readers = [(b'd', FAST), (b'd', SLOW), (b'w', FAST), (b'c', FAST)];
    let of = broadcast(&config(), Broadcast::new(DEPTH, 100), 100, &readers, |_, _| {});
    for fast in [0, 2, 3] {
        assert_eq!(of.got[fast], all(), "reader {fast}");
    }
    let (got, tally) = (&of.got[1], of.log.tallies[&2]);
    assert!(got.is_sorted_by(|a, b| a < b) && got.last() == Some(&(MESSAGES - 1)), "{got:?}");
    assert_eq!((tally.sent, tally.dropped), (got.len() as u64, MESSAGES - got.len() as u64), "{tally:?}");
    assert!(tally.dropped > MESSAGES / 2 && tally.dropped == of.log.outcomes.dropped as u64, "{tally:?}");
    assert!(of.log.refused == 0 && of.took < UNDISTURBED, "{:?}", of.took);
    // The four receivers share one copy of each message. The broadcast has `3 * DEPTH` slots for
    // copies, and each slot is one region.
    assert_eq!((of.regions, of.copied), (3 * DEPTH, 0));
}

#[test]
fn a_slow_receiver_that_is_closed_ends_without_a_gap() {
    let readers = [(b'c', SLOW), (b'd', FAST), (b'c', FAST)];
    let of = broadcast(&config(), Broadcast::new(DEPTH, 100), 100, &readers, |_, _| {});
    let (got, tally) = (&of.got[0], of.log.tallies[&1]);
    assert_eq!(got[..], all()[..got.len()], "a gap");
    assert!(got.len() < all().len() / 2, "{}", got.len());
    assert_eq!((of.log.outcomes.closed, tally.dropped, tally.lost), (1, 0, DEPTH as u64), "{tally:?}");
    assert!(of.got[1] == all() && of.got[2] == all() && of.took < UNDISTURBED, "{:?}", of.took);
}

#[test]
fn a_slow_receiver_that_is_waited_for_holds_the_publisher_back() {
    let readers = [(b'w', SLOW), (b'd', FAST), (b'c', FAST)];
    let of = broadcast(&config(), Broadcast::new(DEPTH, 100), 100, &readers, |_, _| {});
    for (reader, got) in of.got.iter().enumerate() {
        assert_eq!(*got, all(), "reader {reader}");
    }
    // When the publisher is done, the slow receiver has not yet handled the messages in its window, nor the messages that are queued for
    // it.
    let handled = MESSAGES as u32 - 3 * DEPTH as u32;
    assert!(of.log.refused > 0 && of.took > SLOW.unwrap_or_default() * handled, "{:?}", of.took);
    assert_eq!((of.log.outcomes.dropped, of.log.outcomes.closed), (0, 0));
}

/// Returns the settings of the tests in which a receiver has more messages in flight than the
/// broadcast has slots.
fn deep() -> Config {
    Config::default().receive_depth(200).send_depth(200)
}

/// The length of the messages in these tests. TCP does not accept all of the messages in flight.
const LONG: usize = 8000;

/// The processes of two receivers stall, one early and one later, so no send to them completes. The
/// other receivers still get every message in time, also those for which the publisher would wait.
#[test]
fn receivers_that_are_stuck_hold_nobody_back() {
    for healthy in [b'd', b'w'] {
        let readers = [(b'd', FAST), (healthy, FAST), (b'c', FAST), (healthy, FAST)];
        let of = broadcast(&deep(), Broadcast::new(DEPTH, LONG), LONG, &readers, |published, nodes| {
            nodes[1].dead = published > 20;
            nodes[3].dead = published > 150;
        });
        assert!(of.got[1] == all() && of.got[3] == all() && of.took < UNDISTURBED, "{:?}", of.took);
        assert_eq!(of.log.refused, 0);
        let [first, second] = [1, 3].map(|number| of.log.tallies[&number]);
        // The messages that were lost in flight to the first receiver outnumber the slots of the
        // broadcast.
        assert!(first.sent > 20 && first.dropped > 0 && first.lost > 3 * DEPTH as u64, "{first:?}");
        assert_eq!(first.sent + first.dropped + first.lost, MESSAGES, "{first:?}");
        assert!(second.sent > 150 && second.dropped == 0 && second.lost > 0, "{second:?}");
        assert_eq!(of.log.outcomes.closed, 1);
    }
}

/// One receiver is stuck, and its messages in flight outnumber the slots. Two other receivers stall
/// for so long that their connections refuse a few messages, fewer than their queues hold. These
/// two lose nothing, and the one with the policy `Close` is not closed.
#[test]
fn a_stuck_receiver_costs_the_others_no_message() {
    const STALL: u64 = 165;
    let readers = [(b'd', FAST), (b'c', FAST), (b'd', FAST), (b'w', FAST)];
    let of = broadcast(&deep(), Broadcast::new(DEPTH, LONG), LONG, &readers, |published, nodes| {
        nodes[1].dead = published > 20;
        nodes[2].dead = (40..40 + STALL).contains(&published);
        nodes[3].dead = (40..40 + STALL).contains(&published);
    });
    for healthy in 1..4 {
        assert_eq!(of.got[healthy], all(), "reader {healthy}");
    }
    let stuck = of.log.tallies[&1];
    assert!(stuck.dropped > 0 && stuck.lost > 3 * DEPTH as u64, "{stuck:?}");
    // The connections of the two stalled receivers have refused messages, too: more messages were
    // queued than the stuck receiver alone accounts for.
    assert!(of.log.outcomes.queued as u64 > stuck.dropped + DEPTH as u64, "{:?}", of.log.outcomes);
    assert_eq!((of.log.outcomes.closed, of.log.outcomes.dropped as u64, of.log.refused), (0, stuck.dropped, 0));
    assert!(of.took < UNDISTURBED, "{:?}", of.took);
}

/// If the receivers may fetch from the publisher's memory, the publisher keeps one copy of a message that is longer than one buffer, and
/// all receivers fetch this copy. Otherwise the publisher makes a copy of such a message for each receiver.
#[test]
fn long_messages_are_copied_once_if_receivers_may_fetch_them() {
    const LEN: usize = 100 << 10;
    let config = Config::default().receive_depth(32).large_messages(|large| large.eager_limit = 0);
    for fetchable in [true, false] {
        let memory = Broadcast::new(DEPTH, LEN);
        let memory = if fetchable { memory.fetchable() } else { memory };
        let of = broadcast(&config, memory, LEN, &[(b'w', FAST), (b'w', FAST), (b'd', FAST)], |_, _| {});
        assert!(of.got.iter().all(|got| *got == all()), "fetchable: {fetchable}");
        assert_eq!(of.copied == 0, fetchable, "{} bytes", of.copied);
    }
}

#[test]
fn secured_receivers_get_the_same() {
    for mode in [SecurityMode::Psk, SecurityMode::Tls] {
        let config = config().security(security(mode));
        let readers = [(b'd', SLOW), (b'w', FAST), (b'c', FAST)];
        let of = broadcast(&config, Broadcast::new(DEPTH, 3000), 3000, &readers, |_, _| {});
        assert!(of.got[1] == all() && of.got[2] == all(), "{mode:?}");
        assert!(of.log.tallies[&1].dropped > 0 && of.got[0].last() == Some(&(MESSAGES - 1)), "{mode:?}");
    }
}

/// A connection that leaves a broadcast gets no more messages, and it may join again with another policy.
#[test]
fn a_receiver_may_leave_and_come_back() {
    use rdma_reactor_tests::conformance::Setup;
    use rdma_reactor_tests::conformance::harness::{Pair, Probe};

    let setup = Setup::iwarp();
    let mut pair = Pair::new(&setup, setup.config(), Probe::default(), Probe::default());
    let here = pair.connect();
    let mut broadcast = Broadcast::new(2, 8);
    assert_eq!(broadcast.tally(here), None);
    let mut cx = pair.client.context();
    let publish = |broadcast: &mut Broadcast, cx: &mut Context<'_>, bytes: &[u8]| {
        broadcast.publish(cx, bytes).expect("nobody waits").accepted
    };
    assert_eq!(publish(&mut broadcast, &mut cx, b"nobody"), 0);
    broadcast.join(&mut cx, here, OverflowPolicy::Drop).expect("memory");
    assert_eq!(publish(&mut broadcast, &mut cx, b""), 1);
    assert_eq!(broadcast.publish_except(&mut cx, here, b"own"), Ok(Published::default()), "all but itself");
    broadcast.leave(here);
    assert_eq!(publish(&mut broadcast, &mut cx, b"nobody"), 0);
    broadcast.join(&mut cx, here, OverflowPolicy::Wait).expect("memory");
    assert_eq!(publish(&mut broadcast, &mut cx, b"8 bytes!"), 1);
    let refused = broadcast.publish(&mut cx, b"9 bytes!!");
    assert_eq!(refused, Err(PublishError::TooLong { len: 9, max: 8 }));
    pair.until("both messages", |pair| pair.s.received == 2);
    assert_eq!(broadcast.tally(here).expect("it has joined").pending, 2, "the callbacks were not passed on");
    let mut cx = pair.client.context();
    cx.close(here);
    let published = broadcast.publish(&mut cx, b"too late").expect("nobody waits");
    assert_eq!((published.accepted, published.lost), (0, 1), "the connection is closing");
    pair.finish();
}
