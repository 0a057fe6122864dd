//! Tests of shared memory: the bytes that a peer can read in the buffers that it maps, and the
//! number of descriptors for memory that a peer fetches from.
//!
//! All reactors of a test are in this process. So the test finds the mappings of a peer in
//! `/proc/self/maps`, and reads in `/proc/self/mem` what the peer could read. The tests run one at
//! a time, so that no other test maps memory.
#![allow(clippy::disallowed_methods, reason = "files of the system are read")]

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectOptions, ConnectionId, Context, Handler, ListenOptions, Message, Outcome, ProviderChoice, Reactor,
    Security, SecurityMode, SendBuffer, SendId,
};
use rdma_reactor_tests::conformance::harness::with_watchdog;
use rdma_reactor_tests::identities::security;
use rdma_reactor_tests::patience::patient;
use rlimit::Resource;

/// A payload that is in the memory of the process only where a test writes it.
const SECRET: [u8; 64] = *b"only the peer of the second connection may read this message: B.";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[derive(Default)]
struct Program {
    up: Vec<ConnectionId>,
    got: Vec<Vec<u8>>,
    /// The number of messages that have completed.
    fetched: usize,
}

impl Handler for Program {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.up.push(conn);
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.got.push(message.to_vec());
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, _: ConnectionId, _: SendId, outcome: Outcome) {
        self.fetched += usize::from(outcome == Outcome::Sent);
    }
}

/// A mapping of shared memory: its first address, and its length in bytes.
type Mapping = (u64, usize);

/// Returns the read-only mappings of shared memory in this process. Only peers have such mappings:
/// the owner of the memory may write to it.
fn mapped_by_peers() -> Vec<Mapping> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the mappings of this process");
    let mapping = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let (from, to) = (u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?);
        (rest.starts_with("r--s") && rest.contains("memfd:rdma-shared")).then_some((from, (to - from) as usize))
    };
    maps.lines().filter_map(mapping).collect()
}

fn are_readable(mappings: &[Mapping], wanted: &[u8]) -> bool {
    let memory = File::open("/proc/self/mem").expect("the memory of this process");
    mappings.iter().any(|&(from, len)| {
        let mut bytes = vec![0; len];
        memory.read_exact_at(&mut bytes, from).expect("it is mapped");
        bytes.windows(wanted.len()).any(|part| part == wanted)
    })
}

/// A server with a listener for each of two peers. Each listener has its own security.
struct Setup {
    nodes: Vec<(Reactor, Program)>,
    /// The node whose process has stopped: its reactor runs no turns.
    stopped: Option<usize>,
}

const SERVER: usize = 0;

impl Setup {
    fn new() -> Self {
        let config = patient(Config::default()).provider(ProviderChoice::Shm);
        let node = || (Reactor::new(config.clone()).expect("a reactor"), Program::default());
        Self { nodes: (0..3).map(|_| node()).collect(), stopped: None }
    }

    fn until(&mut self, there: impl Fn(&[(Reactor, Program)]) -> bool) {
        while !there(&self.nodes) {
            let running = self.nodes.iter_mut().enumerate().filter(|&(node, _)| self.stopped != Some(node));
            for (_, (reactor, program)) in running {
                reactor.turn(program, Duration::from_millis(1)).expect("the reactor runs");
            }
        }
    }

    /// Connects the node `peer` to the server. Returns the connection at the server.
    fn connect(&mut self, peer: usize, security: &Security) -> ConnectionId {
        let mut cx = self.nodes[SERVER].0.context();
        let options = ListenOptions::new().security(security.clone());
        let listener = cx.listen_with(SocketAddr::from(([127, 0, 0, 1], 0)), options).expect("a port");
        let address = cx.listeners().local_address(listener).expect("it listens");
        let options = ConnectOptions::new().security(security.clone());
        self.nodes[peer].0.context().connect_with(address, options).expect("connecting");
        let before = self.nodes[SERVER].1.up.len();
        self.until(|nodes| nodes[SERVER].1.up.len() > before && !nodes[peer].1.up.is_empty());
        self.nodes[SERVER].1.up[before]
    }

    fn filled(&mut self, conn: ConnectionId, payload: &[u8]) -> SendBuffer {
        let mut buffer = self.nodes[SERVER].0.context().buffer(conn).expect("memory");
        buffer.set_len(payload.len());
        buffer.copy_from_slice(payload);
        buffer
    }

    fn send(&mut self, conn: ConnectionId, buffer: SendBuffer) {
        self.nodes[SERVER].0.context().send_buffer(conn, buffer).expect("room");
    }

    /// Sends a buffer of the connection to the node 1, and waits until the message has arrived.
    /// Returns the connection, and the memory that its peer has mapped.
    fn connect_and_map(&mut self, security: &Security) -> (ConnectionId, Vec<Mapping>) {
        let conn = self.connect(1, security);
        let first = self.filled(conn, &[7; 2000]);
        self.send(conn, first);
        self.until(|nodes| !nodes[1].1.got.is_empty());
        (conn, mapped_by_peers())
    }
}

/// Fills a buffer of one connection, and sends it on another one. Checks when the peer of the first
/// connection can read the message: never if `first` is secured, and otherwise only until the
/// buffer is sent.
fn a_message_for_another_peer(name: &'static str, first: SecurityMode, second: SecurityMode) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    with_watchdog(name, || {
        let mut setup = Setup::new();
        let (a, mapped) = setup.connect_and_map(&security(first));
        let buffer = setup.filled(a, &SECRET);
        assert_eq!(are_readable(&mapped, &SECRET), first == SecurityMode::Plain, "while it is filled");
        let b = setup.connect(2, &security(second));
        setup.send(b, buffer);
        assert!(!are_readable(&mapped, &SECRET), "after the call of `send_buffer`");
        setup.until(|nodes| !nodes[2].1.got.is_empty());
        assert!(!are_readable(&mapped, &SECRET), "after the message has arrived");
        assert_eq!(setup.nodes[2].1.got, [SECRET]);
    });
}

#[test]
fn a_buffer_of_one_connection_is_copied_on_another() {
    a_message_for_another_peer("plain", SecurityMode::Plain, SecurityMode::Plain);
}

#[test]
fn a_buffer_of_one_connection_is_copied_on_a_secured_one() {
    for second in [SecurityMode::Tls, SecurityMode::Psk] {
        a_message_for_another_peer("plain, then secured", SecurityMode::Plain, second);
    }
}

#[test]
fn no_peer_reads_the_buffers_of_a_secured_connection() {
    for first in [SecurityMode::Tls, SecurityMode::Psk] {
        a_message_for_another_peer("secured, then plain", first, SecurityMode::Plain);
        a_message_for_another_peer("both secured", first, first);
    }
}

/// A stopped peer still maps the buffers of its connection after the connection has ended at the
/// server. So the server must copy such a buffer before it sends the message to another peer.
#[test]
fn a_buffer_is_copied_after_its_connection_has_ended() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    with_watchdog("ended", || {
        let mut setup = Setup::new();
        let (a, mapped) = setup.connect_and_map(&Security::Plain);
        let buffer = setup.filled(a, &SECRET);
        setup.stopped = Some(1);
        setup.nodes[SERVER].0.context().abort(a);
        setup.until(|nodes| nodes[SERVER].0.stats().connections.current == 0);
        let b = setup.connect(2, &Security::Plain);
        assert!(are_readable(&mapped, &SECRET), "the peer still maps the buffer");
        setup.send(b, buffer);
        assert!(!are_readable(&mapped, &SECRET), "after the call of `send_buffer`");
        setup.until(|nodes| !nodes[2].1.got.is_empty());
        assert_eq!(setup.nodes[2].1.got, [SECRET]);
    });
}

/// A buffer that is sent on its own connection is not copied.
#[test]
fn a_buffer_is_not_copied_on_its_own_connection() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    with_watchdog("own", || {
        let mut setup = Setup::new();
        let (a, mapped) = setup.connect_and_map(&Security::Plain);
        let buffer = setup.filled(a, &SECRET);
        setup.send(a, buffer);
        assert!(are_readable(&mapped, &SECRET), "the peer maps the buffer");
        setup.until(|nodes| nodes[1].1.got.len() == 2);
        assert_eq!(setup.nodes[1].1.got[1], SECRET);
    });
}

/// Returns the number of memory files that this process has open.
fn memory_files() -> usize {
    let all = std::fs::read_dir("/proc/self/fd").expect("the descriptors of this process");
    let is_memory = |path| std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("memfd:"));
    all.filter(|entry| entry.as_ref().is_ok_and(|entry| is_memory(entry.path()))).count()
}

/// The memory of messages that a peer fetches occupies no descriptor, neither in flight nor when it
/// is kept for later messages. Such messages also arrive if the process has no descriptor left.
#[test]
fn messages_that_a_peer_fetches_need_no_descriptors() {
    const MESSAGES: usize = 16;
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    with_watchdog("descriptors", || {
        let mut setup = Setup::new();
        let conn = setup.connect(1, &Security::Plain);
        let (soft, hard) = Resource::NOFILE.get().expect("a limit");
        // Each round has another length, so that no kept memory fits.
        for (len, limit) in [(300_000, soft), (700_000, 0)] {
            assert_eq!(memory_files(), 0);
            Resource::NOFILE.set(limit, hard).expect("a limit");
            let sent: Vec<_> =
                (0..MESSAGES).map(|nth| setup.nodes[SERVER].0.context().send(conn, &vec![nth as u8; len])).collect();
            Resource::NOFILE.set(soft, hard).expect("a limit");
            assert!(sent.iter().all(Result::is_ok), "{sent:?}");
            assert_eq!(memory_files(), 0, "messages in flight occupy descriptors");
            Resource::NOFILE.set(limit, hard).expect("a limit");
            setup.until(|nodes| nodes[1].1.got.len() == MESSAGES && nodes[SERVER].1.fetched == MESSAGES);
            Resource::NOFILE.set(soft, hard).expect("a limit");
            setup.nodes[SERVER].1.fetched = 0;
            let got = std::mem::take(&mut setup.nodes[1].1.got);
            assert!(got.iter().enumerate().all(|(nth, bytes)| *bytes == vec![nth as u8; len]));
        }
        assert_eq!(memory_files(), 0);
    });
}
