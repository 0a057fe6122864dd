//! Connections in shared memory with another process, which is killed, stopped, or has no shared memory.
#![allow(clippy::disallowed_methods, reason = "other processes are what is tested")]

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor,
    SendErrorKind,
};
use rdma_reactor_tests::conformance::harness::with_watchdog;
use rdma_reactor_tests::patience::{PATIENCE, limited_to};

const CONNECTIONS: usize = 3;

/// A program that echoes, and records its events.
#[derive(Default)]
struct Server {
    up: Vec<ConnectionId>,
    carriers: Vec<Option<&'static str>>,
    echoes: u64,
    ends: Vec<DisconnectReason>,
    errors: Vec<ConnectError>,
}

impl Handler for Server {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.up.push(conn);
        self.carriers.push(cx.provider(conn));
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        // The send may fail only if the connection has ended. Otherwise the window has room, because the peer waits for each echo.
        let _ = cx.send(conn, &message);
        self.echoes += 1;
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.ends.push(reason);
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.errors.push(error);
    }
}

struct Host {
    reactor: Reactor,
    server: Server,
    address: SocketAddr,
}

impl Host {
    fn new(change: impl FnOnce(Config) -> Config) -> Self {
        let config = limited_to(PATIENCE, Config::default())
            .provider(ProviderChoice::Shm)
            .timeouts(|t| (t.keepalive_interval, t.keepalive) = (PATIENCE, 2 * PATIENCE));
        let mut reactor = Reactor::new(change(config)).expect("a reactor");
        let listener = reactor.context().listen(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let address = reactor.context().local_address(listener).expect("it listens");
        Self { reactor, server: Server::default(), address }
    }

    fn until(&mut self, mut there: impl FnMut(&mut Server, &mut Reactor) -> bool) {
        while !there(&mut self.server, &mut self.reactor) {
            self.reactor.turn(&mut self.server, Some(Duration::from_millis(20))).expect("the reactor runs");
        }
    }
}

/// Another process with connections to this one. When this value is dropped, the process is killed.
struct Peer {
    child: Child,
    said: Option<BufReader<ChildStdout>>,
}

/// The file descriptors and the shared memory of a process.
#[derive(Clone, Copy, Debug)]
struct Usage {
    descriptors: usize,
    /// The total length of the shared memory that the process has mapped, in bytes.
    segments: u64,
}

impl Peer {
    fn connect(words: &[&str], to: SocketAddr, messages: usize) -> Self {
        Self::connect_within(":", words, to, messages)
    }

    /// Starts a process that connects, after the shell command `limit`.
    fn connect_within(limit: &str, words: &[&str], to: SocketAddr, messages: usize) -> Self {
        let (to, count, messages) = (to.to_string(), CONNECTIONS.to_string(), messages.to_string());
        Self::start_within(limit, &[words, &["connect", &to, &count, &messages]].concat())
    }

    fn start(words: &[&str]) -> Self {
        Self::start_within(":", words)
    }

    fn start_within(limit: &str, words: &[&str]) -> Self {
        let mut child = Command::new("sh")
            .args(["-c", &format!("{limit} && exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_rdma-peer")])
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let said = child.stdout.take().map(BufReader::new);
        Self { child, said }
    }

    /// Waits for the next `count` lines of the process's output, and returns them.
    fn lines(&mut self, count: usize) -> Vec<String> {
        let said = self.said.as_mut().expect("nobody else reads it");
        said.lines().take(count).map(|line| line.expect("its output")).collect()
    }

    fn usage(&self) -> Usage {
        let of = |what: &str| format!("/proc/{}/{what}", self.child.id());
        let maps = std::fs::read_to_string(of("maps")).expect("its mappings");
        let length = |line: &str| {
            let (from, to) = line.split_once(' ')?.0.split_once('-')?;
            Some(u64::from_str_radix(to, 16).ok()? - u64::from_str_radix(from, 16).ok()?)
        };
        let shared = maps.lines().filter(|line| line.contains("memfd:rdma-shared"));
        let descriptors = std::fs::read_dir(of("fd")).expect("its descriptors").count();
        Usage { descriptors, segments: shared.filter_map(length).sum() }
    }

    fn signal(&self, signal: libc::c_int) {
        let pid = libc::pid_t::try_from(self.child.id()).expect("a process id");
        // SAFETY: this process has started the child and has not waited for it yet, so the process id is still that of the child.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// If a peer's process is killed, the kernel closes its socket. So the server notices the end of the connections without a timeout, and
/// continues.
#[test]
fn a_killed_peer_is_lost_at_once() {
    with_watchdog("a_killed_peer_is_lost_at_once", || {
        let mut host = Host::new(|config| config);
        for round in 1..=3 {
            let mut peer = Peer::connect(&["shm"], host.address, 4);
            // The echoes may be those of some connections, while another one is not up yet.
            host.until(|server, _| server.up.len() == CONNECTIONS * round && server.echoes >= 1000 * round as u64);
            peer.signal(libc::SIGKILL);
            peer.child.wait().expect("it is dead");
            host.until(|server, _| server.ends.len() == CONNECTIONS * round);
        }
        assert_eq!(host.server.carriers, vec![Some("shm"); 3 * CONNECTIONS]);
        assert_eq!(host.server.ends, vec![DisconnectReason::Lost; 3 * CONNECTIONS]);
        assert_eq!(host.reactor.provider_name(), "shm");
    });
}

/// A connection costs each of its two processes one descriptor. It also costs 32 KiB of memory, which both processes map.
#[test]
fn an_idle_connection_costs_its_rings_and_a_descriptor_of_each_side() {
    const FEW: usize = 10;
    const MANY: usize = 310;
    with_watchdog("an_idle_connection_costs_its_rings_and_a_descriptor_of_each_side", || {
        let mut server = Peer::start(&["shm", "serve", "127.0.0.1:0"]);
        let line = server.lines(1).remove(0);
        let address: SocketAddr = line.strip_prefix("listening ").and_then(|to| to.parse().ok()).expect("an address");
        let mut seen = Vec::new();
        let mut clients = Vec::new();
        for count in [FEW, MANY - FEW] {
            let mut client = Peer::start(&["shm", "connect", &format!("{address}"), &count.to_string(), "0"]);
            assert_eq!(client.lines(count), vec!["up shm".to_owned(); count]);
            server.lines(count);
            seen.push((server.usage(), client.usage()));
            clients.push(client);
        }
        let [(server_few, client_few), (server_many, client_many)] = seen[..] else { panic!() };
        let added = |many: Usage, few: Usage, count: usize| {
            assert_eq!(many.segments - few.segments, (count * (32 << 10)) as u64);
            assert!(many.descriptors <= few.descriptors + count, "{many:?} {few:?}");
            println!("{count} connections: {many:?} {few:?}");
        };
        added(server_many, server_few, MANY - FEW);
        added(client_many, client_few, MANY - 2 * FEW);
    });
}

/// A stopped peer consumes nothing. So the ring fills up, further sends are refused, and the connections end only by the keepalive.
#[test]
fn a_stopped_peer_fills_its_ring_and_is_found_by_the_keepalive() {
    with_watchdog("a_stopped_peer_fills_its_ring_and_is_found_by_the_keepalive", || {
        let second = Duration::from_secs(1);
        let mut host = Host::new(|config| {
            config.timeouts(|t| (t.keepalive_interval, t.keepalive) = (second, 10 * second)).buffer_size(64 << 10)
        });
        let peer = Peer::connect(&["shm"], host.address, 1);
        host.until(|server, _| server.up.len() == CONNECTIONS && server.echoes >= 100);
        peer.signal(libc::SIGSTOP);
        let conn = host.server.up[0];
        let mut refused = 0;
        host.until(|server, reactor| {
            loop {
                match reactor.context().send(conn, &[1; 3000]) {
                    Ok(_) => {}
                    Err(error) => {
                        refused += u32::from(matches!(error, SendErrorKind::WouldBlock(_)));
                        break;
                    }
                }
            }
            server.ends.len() == CONNECTIONS
        });
        assert!(refused > 0, "a peer that takes nothing has taken everything");
        assert_eq!(host.server.ends, vec![DisconnectReason::KeepaliveTimeout; CONNECTIONS]);
        peer.signal(libc::SIGCONT);
    });
}

/// A side that requires shared memory does not fall back to TCP if its peer has no shared memory. This holds for the connecting side and
/// for the listening side. The listening side reports no such connection and receives no message, and the connecting side gets the reason
/// before the connection is up. A peer of another user, which needs root, is in `tests/same-host.sh`.
#[test]
fn a_peer_without_shared_memory_is_not_talked_to_where_it_is_required() {
    with_watchdog("a_peer_without_shared_memory_is_not_talked_to_where_it_is_required", || {
        let only = "failed: rejected: the peer accepts only peers in shared memory";
        // A process that may write no file cannot make the memory for a segment.
        let no_files = "ulimit -f 0";
        for (here, there, limit, why) in [
            (ProviderChoice::Iwarp, "shm", ":", "no shared memory"),
            (ProviderChoice::Shm, "tcp", ":", only),
            (ProviderChoice::Shm, "auto", no_files, only),
        ] {
            let mut host = Host::new(|config| config.provider(here));
            let mut client = Peer::connect_within(limit, &[there], host.address, 1);
            let (tell, told) = channel();
            let mut said = client.said.take().expect("nobody reads it");
            let reader = thread::spawn(move || {
                for _ in 0..CONNECTIONS {
                    let mut line = String::new();
                    said.read_line(&mut line).expect("its output");
                    tell.send(line).expect("the test waits");
                }
                said
            });
            let mut lines = Vec::new();
            host.until(|_, _| {
                lines.extend(told.try_iter());
                lines.len() == CONNECTIONS
            });
            client.said = Some(reader.join().expect("no panic"));
            assert!(lines.iter().all(|line| line.starts_with("failed: ") && line.contains(why)), "{lines:?}");
            let Server { up, echoes, ends, errors, .. } = &host.server;
            assert!(up.is_empty() && ends.is_empty(), "{there}: {up:?} {ends:?}");
            assert_eq!((*echoes, errors.len()), (0, 0), "{there}: {errors:?}");
        }
    });
}
