//! Every fallible call below a reactor fails once, with each error that it can return, at each step of a script. In the script, a node
//! listens, and connections are established in both directions and use every operation ([`rdma_reactor_tests::life`]). Meanwhile another
//! connection requests echoes. In other runs a callback of the program panics instead.
//!
//! After each failure, nothing may panic or hang. Each connection must have ended once, with the actual reason. Connections that did not
//! use the failed call must have continued. New connections must work, and no state may remain.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rdma_reactor::{Config, ConnectError, DisconnectReason, Error, Stats};
use rdma_reactor_tests::gate::handler::GatedHandler;
use rdma_reactor_tests::gate::{Call, Failure, Gate, Objects};
use rdma_reactor_tests::life::{self, Book, How, Kind, Program};
use rdma_reactor_tests::sim::fabric::{Shared, lock};
use rdma_reactor_tests::sim::quiet::{Node, gated, network, reactor, step};
use rdma_reactor_tests::sim::tcp::address;
use rdma_transport::cm::{ConnectFailure, DisconnectCause};

use Failure::{Errno, Full, LastErrno, LastFull};

/// The node whose calls fail. Connections of `PEER` use every operation, and a connection of `NEIGHBOUR` requests echoes.
const UNDER_TEST: usize = 0;
const PEER: usize = 1;
const NEIGHBOUR: usize = 2;
/// The time limit of a drain at the end. It is short, because nothing is left to drain.
const PAUSE: Duration = Duration::from_millis(1);
/// The virtual time in which a condition of a test must become true, in ns.
const PATIENCE: u64 = 30_000_000_000;
/// The virtual time that the test waits after a failure, in ns. Within this time, each connection that must end because of the failure
/// begins to end.
const CALM: u64 = 200_000_000;
/// The number of simulation steps in which a condition must become true.
const STEPS: u32 = 300_000;

fn port(node: usize) -> SocketAddr {
    address(node, 7471)
}

fn config(shared: Option<u32>) -> Config {
    life::config()
        .completions(|c| c.queue = Some(64 + shared.unwrap_or(0)))
        .shared_receives(shared)
        .contain_panics(true)
}

/// The most that a failed call may cost the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cost {
    /// The program notices nothing.
    Nothing,
    /// One connection ends, or one call of the program returns an error.
    One,
    /// All connections of the device end.
    Device,
    /// One turn returns an error. The next turn continues.
    Turn,
}

/// The calls that can fail, each with its possible errors and the cost of an error. The errors are those of the manual pages of librdmacm,
/// libibverbs and the system calls.
#[rustfmt::skip]
const FAILURES: &[(Call, &[Failure], Cost)] = &[
    (Call::Listen, &[Errno(libc::EADDRINUSE), Errno(libc::EADDRNOTAVAIL), Errno(libc::ENOMEM), Errno(libc::ENODEV)], Cost::Nothing),
    (Call::Resolve, &[Errno(libc::ENOMEM), Errno(libc::EMFILE), Errno(libc::ENODEV), Errno(libc::ENETUNREACH)], Cost::One),
    (Call::Connect, &[Errno(libc::EINVAL), Errno(libc::ENOMEM), Errno(libc::EIO), Errno(libc::EBUSY)], Cost::One),
    (Call::Accept, &[Errno(libc::EINVAL), Errno(libc::ENOMEM), Errno(libc::EIO), Errno(libc::ECONNRESET)], Cost::One),
    (Call::Reject, &[Errno(libc::EINVAL), Errno(libc::ENOTCONN)], Cost::One),
    (Call::Disconnect, &[Errno(libc::EINVAL), Errno(libc::ENOTCONN), Errno(libc::EIO)], Cost::Nothing),
    (Call::DestroyQp, &[Errno(libc::EBUSY), Errno(libc::EIO)], Cost::Nothing),
    (Call::NextCmEvent, &[Errno(libc::ENOMEM), Errno(libc::EIO), Errno(libc::ENODEV)], Cost::Turn),
    (Call::CompletionChannel, &[Errno(libc::ENOMEM), Errno(libc::EMFILE)], Cost::Turn),
    (Call::Register, &[Errno(libc::ENOMEM), Errno(libc::EAGAIN), Errno(libc::EPERM), Errno(libc::EINVAL)], Cost::One),
    (Call::Deregister, &[Errno(libc::EBUSY), Errno(libc::EINVAL), Errno(libc::EIO)], Cost::Nothing),
    (Call::Restrict, &[Errno(libc::EINVAL), Errno(libc::ENOMEM)], Cost::One),
    (Call::Invalidate, &[Errno(libc::EBUSY), Errno(libc::EINVAL), Errno(libc::EIO)], Cost::Nothing),
    (Call::CreateCq, &[Errno(libc::ENOMEM), Errno(libc::EINVAL), Errno(libc::EMFILE)], Cost::One),
    (Call::DestroyCq, &[Errno(libc::EBUSY), Errno(libc::EIO)], Cost::Nothing),
    (Call::CreateQp, &[Errno(libc::ENOMEM), Errno(libc::EINVAL), Errno(libc::EPERM), Errno(libc::EAGAIN)], Cost::One),
    (Call::CreateSrq, &[Errno(libc::ENOMEM), Errno(libc::EINVAL), Errno(libc::ENOSYS)], Cost::One),
    (Call::DestroySrq, &[Errno(libc::EBUSY), Errno(libc::EIO)], Cost::Nothing),
    (Call::PostRecv, &[Errno(libc::EINVAL), Errno(libc::EIO), LastErrno(libc::EIO), Full, LastFull], Cost::One),
    (Call::PostSend, &[Errno(libc::EINVAL), Errno(libc::EIO), LastErrno(libc::EIO), Full, LastFull], Cost::One),
    (Call::PostSrqRecv, &[Errno(libc::EINVAL), Errno(libc::EIO), LastErrno(libc::EIO), Full, LastFull], Cost::Device),
    (Call::PollCq, &[Errno(libc::EIO), Errno(libc::EINVAL)], Cost::Device),
    (Call::ReqNotify, &[Errno(libc::EIO), Errno(libc::EINVAL)], Cost::Device),
    (Call::NextCompletionEvent, &[Errno(libc::EIO), Errno(libc::EBADF)], Cost::Device),
    (Call::EnableExtensions, &[Errno(libc::EINVAL)], Cost::Nothing),
    (Call::NetPoll, &[Errno(libc::EBADF), Errno(libc::ENOMEM)], Cost::Turn),
    (Call::NetListen, &[Errno(libc::EADDRINUSE), Errno(libc::EACCES), Errno(libc::EMFILE), Errno(libc::ENOBUFS)], Cost::Nothing),
    (Call::NetAccept, &[Errno(libc::EMFILE), Errno(libc::ENFILE), Errno(libc::ENOBUFS), Errno(libc::ENOMEM), Errno(libc::ECONNABORTED), Errno(libc::EPERM), Errno(libc::EPROTO), Errno(libc::EINTR)], Cost::Nothing),
    (Call::NetConnect, &[Errno(libc::EMFILE), Errno(libc::EADDRNOTAVAIL), Errno(libc::ENETUNREACH), Errno(libc::EACCES), Errno(libc::EPERM), Errno(libc::ENOBUFS)], Cost::One),
    (Call::NetConnected, &[Errno(libc::ECONNREFUSED), Errno(libc::ETIMEDOUT), Errno(libc::EHOSTUNREACH)], Cost::One),
    (Call::NetPromote, &[Errno(libc::ENOMEM), Errno(libc::ENOSPC)], Cost::One),
    (Call::NetLocalAddress, &[Errno(libc::ENOBUFS)], Cost::Nothing),
    (Call::NetMaxSegment, &[Errno(libc::ENOPROTOOPT), Errno(libc::EINVAL)], Cost::One),
    (Call::NetRecv, &[Errno(libc::ECONNRESET), Errno(libc::ETIMEDOUT), Errno(libc::ENOMEM), Errno(libc::EHOSTUNREACH)], Cost::One),
    (Call::NetSend, &[Errno(libc::EPIPE), Errno(libc::ECONNRESET), Errno(libc::ETIMEDOUT), Errno(libc::ENOBUFS), Errno(libc::EHOSTUNREACH)], Cost::One),
    (Call::NetListenLocal, &[Errno(libc::EADDRINUSE), Errno(libc::EMFILE), Errno(libc::EPERM)], Cost::Nothing),
    (Call::NetAcceptLocal, &[Errno(libc::EMFILE), Errno(libc::ENOBUFS), Errno(libc::ECONNABORTED)], Cost::Nothing),
    (Call::NetConnectLocal, &[Errno(libc::EMFILE), Errno(libc::ECONNREFUSED), Errno(libc::EAGAIN), Errno(libc::EACCES), Errno(libc::ENOBUFS)], Cost::Nothing),
    (Call::NetPass, &[Errno(libc::ENOBUFS), Errno(libc::ENOMEM), Errno(libc::EINTR)], Cost::Nothing),
    (Call::NetTake, &[Errno(libc::ENOMEM), Errno(libc::ENOBUFS), Errno(libc::EINTR), Errno(libc::ECONNRESET)], Cost::One),
    (Call::PollerRegister, &[Errno(libc::ENOMEM), Errno(libc::ENOSPC)], Cost::Turn),
    (Call::PollerWait, &[Errno(libc::EBADF), Errno(libc::EINVAL)], Cost::Turn),
    (Call::Callback, &[Errno(libc::EIO)], Cost::One),
];

/// The settings of the reactors, and true if all nodes are on one host and share memory.
type Setting = (Config, bool);

/// The nodes and programs of one run of the script.
struct World {
    fabric: Shared,
    nodes: Vec<Node>,
    programs: Vec<Program>,
    /// The errors of failed turns of the node under test.
    turns_failed: Vec<String>,
}

impl World {
    fn new((config, one_host): &Setting, gate: &Gate) -> Self {
        let mut world = Self { fabric: network(3), nodes: Vec::new(), programs: Vec::new(), turns_failed: Vec::new() };
        lock(&world.fabric).one_host = *one_host;
        for node in 0..3 {
            let program = Program::default();
            let reactor = if node == UNDER_TEST {
                gated(UNDER_TEST, &world.fabric, gate, config.clone()).or_else(|error| {
                    world.turns_failed.push(error.to_string());
                    gated(UNDER_TEST, &world.fabric, gate, config.clone())
                })
            } else {
                Ok(reactor(node, &world.fabric, config.clone()))
            };
            let reactor = reactor.expect("one call fails");
            let gate = if node == UNDER_TEST { gate.clone() } else { Gate::default() };
            world.nodes.push(Node::new(reactor, Box::new(GatedHandler::new(program.clone(), gate))));
            world.programs.push(program);
        }
        for node in 0..2 {
            let mut cx = world.nodes[node].reactor.context();
            if let Err(error) = cx.listen(port(node)) {
                assert_eq!(node, UNDER_TEST, "{error}");
                cx.listen(port(node)).expect("one call fails");
            }
        }
        world
    }

    fn open(&mut self, from: usize, to: usize, kind: Kind) {
        self.programs[from].open(&mut self.nodes[from].reactor.context(), port(to), kind);
    }

    fn books(&self, kind: Kind) -> usize {
        self.programs.iter().map(|program| program.0.borrow().open(kind)).sum()
    }

    /// Runs steps until a condition holds. Fails after `PATIENCE` of virtual time, or after `STEPS` steps.
    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let end = lock(&self.fabric).now() + PATIENCE;
        for _ in 0..STEPS {
            if done(self) {
                return;
            }
            assert!(lock(&self.fabric).now() < end, "{what}: not in 30 s: {:#?}", self.state());
            if let Err((node, error)) = step(&self.fabric, &mut self.nodes) {
                assert_eq!(node, UNDER_TEST, "{what}: {error}");
                self.turns_failed.push(error.to_string());
            }
        }
        panic!("{what}: not in {STEPS} steps: {:#?}", self.state());
    }

    fn state(&self) -> Vec<std::cell::Ref<'_, Book>> {
        self.programs.iter().map(|program| program.0.borrow()).collect()
    }

    /// Runs the script on two connections at the same time: `UNDER_TEST` opens one of them, and `PEER` opens the other.
    fn round(&mut self, what: &str) {
        self.open(PEER, UNDER_TEST, Kind::Life);
        self.open(UNDER_TEST, PEER, Kind::Life);
        self.until(what, |world| world.books(Kind::Life) == 0);
    }

    /// Ends the neighbour's connection, and drains all reactors.
    fn end(&mut self) {
        for program in &self.programs {
            program.0.borrow_mut().quiet = true;
        }
        self.until("the neighbour's end", |world| world.books(Kind::Ping) == 0);
        for node in &mut self.nodes {
            node.reactor.context().drain(PAUSE);
        }
        self.until("drained", |world| world.nodes.iter().all(|node| node.reactor.is_drained()));
    }

    /// For each node, takes the number of calls that returned an error, or the number of connections that ended before their script was
    /// complete, whichever is larger. Returns the largest of these numbers.
    fn undone(&self) -> usize {
        let of = |program: &Program| {
            let book = program.0.borrow();
            book.refused.len().max(book.ended.iter().filter(|ended| !ended.done).count())
        };
        self.programs.iter().map(of).max().unwrap_or(0)
    }

    fn reasons(&self) -> String {
        let of = |program: &Program| {
            let book = program.0.borrow();
            let ended: Vec<_> = book.ended.iter().filter(|ended| !ended.done).map(|ended| &ended.how).collect();
            format!("{ended:?} {:?}", book.refused)
        };
        self.programs.iter().map(of).collect::<Vec<_>>().join(" | ")
    }
}

/// Runs the script on new nodes, with one failing call if `fault` is given: the call of this kind and number. Returns how many calls of
/// each kind were made.
fn live(config: &Setting, fault: Option<(Call, u32, Failure, Cost)>) -> BTreeMap<Call, u32> {
    let gate = Gate::default();
    if let Some((call, nth, failure, _)) = fault {
        gate.fail_nth(call, nth, failure);
    }
    let mut world = World::new(config, &gate);
    world.open(NEIGHBOUR, UNDER_TEST, Kind::Ping);
    world.round("the first round");
    let echoes = |world: &World| world.programs[NEIGHBOUR].0.borrow().echoes;
    let before = echoes(&world);
    world.until("the neighbour's echoes", |world| {
        let open = world.books(Kind::Ping);
        open == 0 || open == 2 && world.programs[NEIGHBOUR].0.borrow().echoes > before + 5
    });
    // A failed device accepts no connections until all connections that used it have ended, so the test waits until they have.
    let calm = lock(&world.fabric).now() + CALM;
    world.until("the ends", |world| {
        let open = world.programs[UNDER_TEST].0.borrow().open(Kind::Ping);
        lock(&world.fabric).now() > calm && world.nodes[UNDER_TEST].reactor.stats().connections.current == open
    });
    let (failed, undone) = (gate.failed() > 0, world.undone());
    if let Some((call, _, _, cost)) = fault.filter(|_| failed) {
        match cost {
            Cost::Nothing | Cost::Turn => assert_eq!(undone, 0, "nothing ends: {}", world.reasons()),
            Cost::One => assert!(undone <= 1, "one connection: {}", world.reasons()),
            Cost::Device => {}
        }
        // A failed poll of the sockets need not fail the turn, because the embedded provider polls the sockets of connections again.
        let may_fail = usize::from(cost == Cost::Turn);
        let must_fail = if call == Call::NetPoll { 0 } else { may_fail };
        assert!((must_fail..=may_fail).contains(&world.turns_failed.len()), "{:?}", world.turns_failed);
        // Nothing fails in the second run of the script, so this run shows that the node still serves new connections.
        if world.books(Kind::Ping) == 0 {
            world.open(NEIGHBOUR, UNDER_TEST, Kind::Ping);
        }
        world.round("the second round");
        assert_eq!(world.undone(), undone, "service afterwards: {}", world.reasons());
    } else {
        assert_eq!(undone, 0, "{}", world.reasons());
        world.round("the second round");
    }
    world.end();
    check_truth(&world, fault);
    for node in &world.nodes {
        let (all, free) = node.reactor.pool_levels();
        let stats = node.reactor.stats();
        assert_eq!(stats.connections.current, 0, "{stats:?}");
        // If the device refuses to destroy a queue pair, the reactor never releases the buffers of the connection, nor the regions that its
        // operations use. Otherwise everything must be released.
        if stats.connections.undestroyed == 0 {
            assert_eq!((all, stats.memory.regions), (free, 0), "{stats:?}");
            assert_eq!((stats.memory.fetched_bytes, stats.memory.copied_bytes), (0, 0), "{stats:?}");
        }
    }
    let of = |count: fn(&Stats) -> u64| world.nodes.iter().map(|node| count(&node.reactor.stats())).sum::<u64>();
    let counted = match fault {
        Some((Call::DestroyQp, ..)) => [u64::from(gate.failed()), 0, 0],
        Some((Call::Deregister, ..)) => [0, u64::from(gate.failed()), 0],
        Some((Call::Invalidate, ..)) => [0, 0, u64::from(gate.failed())],
        _ => [0; 3],
    };
    let kept = [
        of(|stats| stats.connections.undestroyed),
        of(|stats| stats.memory.unreleased as u64),
        of(|stats| stats.memory.unrevoked as u64),
    ];
    assert_eq!(kept, counted);
    let World { fabric, nodes, .. } = world;
    drop(nodes);
    assert_eq!(lock(&fabric).sockets(), 0, "sockets");
    let left = gate.objects();
    let undestroyed = left.ids.abs() + left.regions.abs() + left.completion_queues.abs() + left.shared_queues.abs();
    // An object that could not be destroyed remains.
    let allowed = match fault {
        Some((Call::Deregister | Call::DestroyCq, ..)) => 1,
        // The completion queue and the memory that the undestroyed object uses remain with it.
        Some((Call::DestroySrq | Call::DestroyQp, ..)) => 3,
        _ => 0,
    };
    assert!(undestroyed <= allowed, "{left:?}");
    gate.counts()
}

/// Without `Config::contain_panics`, a panic of a callback propagates out of the turn, and unwinding drops the reactors. Whichever callback
/// panics, no state remains.
#[test]
fn dropped_in_an_unwind() {
    let config = (config(None).contain_panics(false), false);
    for nth in 0.. {
        let gate = Gate::default();
        gate.fail_nth(Call::Callback, nth, Errno(libc::EIO));
        let mut world = World::new(&config, &gate);
        let fabric = Arc::clone(&world.fabric);
        let life = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            world.open(NEIGHBOUR, UNDER_TEST, Kind::Ping);
            world.round("the first round");
            world.round("the second round");
            world.end();
        }));
        assert_eq!(life.is_err(), gate.failed() == 1, "callback {nth} has panicked");
        // One connection-manager id may remain: the id of a connect request that was not answered yet. It is destroyed with the provider.
        let Objects { ids, regions, completion_queues, shared_queues } = gate.objects();
        assert!((0..=1).contains(&ids), "{ids} ids after a panic of callback {nth}");
        assert_eq!((regions, completion_queues, shared_queues), (0, 0, 0), "after a panic of callback {nth}");
        assert_eq!(lock(&fabric).sockets(), 0, "after a panic of callback {nth}");
        if life.is_ok() {
            assert!(nth > 30, "{nth} callbacks in a whole life");
            return;
        }
    }
}

/// If a program catches a panic that has propagated out of a turn, it cannot use the reactor any more: each further turn is an error.
#[test]
fn a_turn_that_a_panic_has_ended_is_the_last() {
    let config = (config(None).contain_panics(false), false);
    let gate = Gate::default();
    gate.fail_nth(Call::Callback, 3, Errno(libc::EIO));
    let mut world = World::new(&config, &gate);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.round("a round")));
    assert!(panicked.is_err() && gate.failed() == 1, "a callback has panicked");
    let node = &mut world.nodes[UNDER_TEST];
    let again = node.reactor.turn(&mut *node.handler, Duration::ZERO);
    assert!(matches!(again, Err(Error::Panicked)), "{again:?}");
    let again = node.reactor.run(&mut *node.handler);
    assert!(matches!(again, Err(Error::Panicked)), "{again:?}");
}

/// Checks the connections of the node under test that ended before their script was complete: each must have a reason that fits the
/// failure.
fn check_truth(world: &World, fault: Option<(Call, u32, Failure, Cost)>) {
    let Some((_, _, failure, cost)) = fault else { return };
    let text = failure.system().to_string();
    let names = |why: &str| [&text, "queue is full", "no memory for a message"].iter().any(|text| why.contains(*text));
    let book = world.programs[UNDER_TEST].0.borrow();
    for ended in book.ended.iter().filter(|ended| !ended.done) {
        let is_true = match &ended.how {
            // The program was notified of the failure, and has closed the connection because of it.
            How::Disconnected(DisconnectReason::Local { .. }) => book.refused.iter().any(|why| names(why)),
            How::Disconnected(DisconnectReason::DeviceRemoved) => cost == Cost::Device,
            How::NotConnected(ConnectError::Local(why)) if cost == Cost::Device => names(why) || why.contains("device"),
            How::Disconnected(DisconnectReason::Internal(why)) | How::NotConnected(ConnectError::Local(why)) => {
                names(why)
            }
            How::Disconnected(DisconnectReason::Transport(DisconnectCause::Path(why)))
            | How::NotConnected(ConnectError::Transport(
                ConnectFailure::System(why) | ConnectFailure::Unreachable(why),
            )) => names(why),
            // The failed call returned an error that says that the peer has closed or refused the connection.
            How::Disconnected(DisconnectReason::Lost)
            | How::NotConnected(ConnectError::Transport(ConnectFailure::Refused | ConnectFailure::PeerClosed)) => {
                matches!(failure, Errno(libc::ECONNRESET | libc::EPIPE | libc::ECONNREFUSED))
            }
            How::NotConnected(ConnectError::Timeout) => matches!(failure, Errno(libc::ETIMEDOUT)),
            _ => false,
        };
        assert!(is_true, "the reason: {:?}", ended.how);
    }
}

/// Runs the script once for each call and each of the call's errors. `FAIL_ONCE='PostSend 3 1'` selects a single run by three values: the
/// kind of the failing call, the number of calls of this kind before it, and the index of its error.
fn every_call_fails_once(config: &Setting) {
    let only = std::env::var("FAIL_ONCE").ok();
    let counts = live(config, None);
    println!("calls: {counts:?}");
    let mut lives = 0;
    for &(call, failures, cost) in FAILURES {
        for nth in 0..counts.get(&call).copied().unwrap_or(0) {
            for (which, &failure) in failures.iter().enumerate() {
                let name = format!("{call:?} {nth} {which}");
                if only.as_ref().is_none_or(|only| *only == name) {
                    let failed = std::panic::catch_unwind(|| live(config, Some((call, nth, failure, cost)))).is_err();
                    assert!(!failed, "{failure:?}; again by FAIL_ONCE='{name}'");
                    lives += 1;
                }
            }
        }
    }
    println!("{lives} lives");
    assert!(lives > 1_000 || only.is_some(), "{lives} lives");
}

#[test]
fn with_receives_of_each_connection() {
    every_call_fails_once(&(config(None), false));
}

#[test]
fn with_shared_receives() {
    every_call_fails_once(&(config(Some(64)), false));
}

#[test]
fn within_one_host() {
    every_call_fails_once(&(config(None), true));
}
