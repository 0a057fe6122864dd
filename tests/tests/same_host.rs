//! Connections in shared memory with another process, which is killed, stopped, or has no shared memory.
#![allow(clippy::disallowed_methods, reason = "other processes are what is tested")]

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rdma_reactor::transport::iwarp::net::SocketId;
use rdma_reactor::transport::iwarp::{Iwarp, IwarpConfig, SharedMemoryPolicy, TcpNet};
use rdma_reactor::transport::mem::Memory;
use rdma_reactor::transport::mr::Access;
use rdma_reactor::transport::shm::segment::{self, SLOTS, SegmentSide, TABLE};
use rdma_reactor::transport::shm::{MappedSegment, Words};
use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, MioPoller, Parts, ProviderChoice,
    Reactor, SendErrorKind, SystemClock, system_entropy,
};
use rdma_reactor_tests::conformance::harness::with_watchdog;
use rdma_reactor_tests::gate::net::{GatedNet, Onlooker};
use rdma_reactor_tests::hostile_run::lender::{announce, hostile_file};
use rdma_reactor_tests::patience::{PATIENCE, limited_to};
use rdma_reactor_tests::usage::mapped;
use rustix::fs::{SealFlags, fstat};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, getpeername};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

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
        self.carriers.push(cx.connection(conn).provider());
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
        let address = reactor.context().listeners().local_address(listener).expect("it listens");
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

    /// Runs `limit` in a shell, then starts a process that connects.
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
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("its descriptors");
        Usage { descriptors: descriptors.count(), segments: self.mapped("memfd:rdma-shared").iter().sum() }
    }

    /// Returns copies of all descriptors of the process, as a forked child would have them.
    fn descriptors(&self) -> Vec<OwnedFd> {
        let process = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()).expect("the process");
        let folder = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("its descriptors");
        let numbers = folder.map(|entry| entry.expect("an entry").file_name());
        let copy = |number: std::ffi::OsString| {
            let number = number.to_str().and_then(|number| number.parse().ok()).expect("a number");
            pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).expect("a copy")
        };
        numbers.map(copy).collect()
    }

    /// Returns the lengths of all mappings of files whose names contain `name`.
    fn mapped(&self, name: &str) -> Vec<u64> {
        mapped(&self.child.id().to_string(), name).expect("its mappings")
    }

    /// Starts a process that listens and echoes. Returns it and its address.
    fn serve() -> (Self, SocketAddr) {
        let mut server = Self::start(&["shm", "serve", "127.0.0.1:0"]);
        let line = server.lines(1).remove(0);
        let address = line.strip_prefix("listening ").and_then(|to| to.parse().ok()).expect("an address");
        (server, address)
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
            // Waits for both counts, because the echoes may come from some connections while
            // another one is not established yet.
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

/// A killed process has forked a child, which lives on with copies of all descriptors. So the
/// kernel closes no socket of the connections, in shared memory or over TCP, and the server detects
/// the end of the connections by the keepalive. In this test, this process acts as the child.
#[test]
fn a_killed_peer_whose_child_lives_is_found_by_the_keepalive() {
    with_watchdog("a_killed_peer_whose_child_lives_is_found_by_the_keepalive", || {
        let second = Duration::from_secs(1);
        for (word, provider) in [("shm", ProviderChoice::Shm), ("tcp", ProviderChoice::Iwarp)] {
            let mut host = Host::new(|config| {
                config.provider(provider).timeouts(|t| (t.keepalive_interval, t.keepalive) = (second, 3 * second))
            });
            let mut peer = Peer::connect(&[word], host.address, 1);
            host.until(|server, _| server.up.len() == CONNECTIONS && server.echoes >= 100);
            let copies = peer.descriptors();
            peer.signal(libc::SIGKILL);
            peer.child.wait().expect("it is dead");
            host.until(|server, _| server.ends.len() == CONNECTIONS);
            assert_eq!(host.server.ends, vec![DisconnectReason::KeepaliveTimeout; CONNECTIONS], "{word}");
            drop(copies);
        }
    });
}

/// A connection costs each of its two processes one descriptor. It also costs 32 KiB of memory, which both processes map.
#[test]
fn an_idle_connection_costs_its_rings_and_a_descriptor_of_each_side() {
    const FEW: usize = 10;
    const MANY: usize = 310;
    with_watchdog("an_idle_connection_costs_its_rings_and_a_descriptor_of_each_side", || {
        let (mut server, address) = Peer::serve();
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

/// A side that requires shared memory does not fall back to TCP if its peer has no shared memory.
/// This holds for the connecting side and for the listening side. The listening side reports no
/// such connection and receives no message. The connecting side gets the reason before the
/// connection is up. `tests/same-host.sh`, which needs root, tests a peer of another user.
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

/// A program that sends long messages, and checks their echoes.
#[derive(Default)]
struct Client {
    up: usize,
    echoes: usize,
    /// The number of received bytes.
    received: usize,
    others: Vec<String>,
}

/// The length of a message that its receiver fetches, in bytes.
const LONG: usize = 300_000;

fn long(conn: ConnectionId) -> Vec<u8> {
    (0..LONG).map(|at| (at / 7 + conn.slot()) as u8).collect()
}

impl Handler for Client {
    fn on_connect(&mut self, _: &mut Context<'_>, _: ConnectionId) {
        self.up += 1;
    }

    fn on_recv(&mut self, _: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.echoes += usize::from(*message == *long(conn));
        self.received += message.len();
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.others.push(format!("{reason:?}"));
    }
}

/// Connects `count` times to `address`, and waits for the connections.
fn connect(reactor: &mut Reactor, client: &mut Client, address: SocketAddr, count: usize) -> Vec<ConnectionId> {
    let conns = (0..count).map(|_| reactor.context().connect(address).expect("an attempt")).collect();
    while client.up < count {
        reactor.turn(client, Some(Duration::from_millis(20))).expect("the reactor runs");
        assert_eq!(client.others, Vec::<String>::new());
    }
    conns
}

/// Sends a long message on each of `count` connections, and waits for the echoes.
fn echo(config: Config, provider: ProviderChoice, address: SocketAddr, count: usize) {
    let config = limited_to(PATIENCE, config).provider(provider).timeouts(|t| t.keepalive = PATIENCE);
    let (mut reactor, mut client) = (Reactor::new(config).expect("a reactor"), Client::default());
    for conn in connect(&mut reactor, &mut client, address, count) {
        reactor.context().send(conn, &long(conn)).expect("there is memory");
    }
    while client.echoes < count {
        reactor.turn(&mut client, Some(Duration::from_millis(20))).expect("the reactor runs");
        assert_eq!(client.others, Vec::<String>::new());
    }
}

/// Messages of any length arrive even if a side has reached its limit of mapped peer memory, here 1
/// MiB on both sides.
#[test]
fn peers_whose_memory_is_not_mapped_are_served() {
    with_watchdog("peers_whose_memory_is_not_mapped_are_served", || {
        const COUNT: usize = 40;
        let few = |config: Config| config.iwarp(|iwarp| iwarp.within_host.window_bytes = 1 << 20);
        let mut host = Host::new(few);
        let address = host.address;
        let client = thread::spawn(move || echo(few(Config::default()), ProviderChoice::Shm, address, COUNT));
        host.until(|_, _| client.is_finished());
        client.join().expect("all echoes");
        assert_eq!(host.server.echoes, COUNT as u64);
    });
}

/// Starts a proxy that forwards one connection to `to`. Returns its address and its thread. The
/// thread returns the first 20 bytes of the server's reply, and the number of bytes that the client
/// has sent.
fn proxy(to: SocketAddr) -> (SocketAddr, thread::JoinHandle<(Vec<u8>, u64)>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let forward = move || {
        let (mut near, _) = listener.accept().expect("a client");
        let mut far = TcpStream::connect(to).expect("the server");
        let (mut asks, mut server) = (near.try_clone().expect("a copy"), far.try_clone().expect("a copy"));
        let there = thread::spawn(move || {
            let count = io::copy(&mut asks, &mut server).unwrap_or(0);
            let _ = server.shutdown(Shutdown::Write);
            count
        });
        let mut reply = vec![0; 20];
        far.read_exact(&mut reply).expect("a reply");
        near.write_all(&reply).expect("the client");
        let _ = io::copy(&mut far, &mut near);
        let _ = near.shutdown(Shutdown::Both);
        (reply, there.join().expect("it copies"))
    };
    (address, thread::spawn(forward))
}

/// If a proxy on this host is between the two sides, they do not switch to shared memory: the proxy
/// carries all bytes of the connection, and the connection uses CRCs.
#[test]
fn a_proxy_is_not_left_behind() {
    with_watchdog("a_proxy_is_not_left_behind", || {
        let mut host = Host::new(|config| config.provider(ProviderChoice::Auto));
        let (address, proxy) = proxy(host.address);
        let client = thread::spawn(move || echo(Config::default(), ProviderChoice::Auto, address, 1));
        host.until(|_, _| client.is_finished());
        client.join().expect("an echo");
        host.until(|_, _| proxy.is_finished());
        let (reply, bytes) = proxy.join().expect("it copies");
        assert_eq!(host.server.carriers, [Some("iwarp")]);
        assert!(reply[16] & 0x40 != 0 && bytes > LONG as u64, "{reply:?} {bytes}");
    });
}

/// The segments of the attacker's connections, and the name of the server's Unix listener.
#[derive(Debug, Default)]
struct Segments(Mutex<Vec<MappedSegment>>, Mutex<Vec<u8>>);

impl Onlooker for Segments {
    fn met(&self, _: SocketId, name: &[u8]) {
        *self.1.lock().unwrap() = name.to_vec();
    }

    fn passing(&self, _: SocketId, _: &[u8], file: BorrowedFd<'_>) -> Option<OwnedFd> {
        let memory = Memory::map_file(file, 0, segment::LEN).ok()?;
        self.0.lock().unwrap().push(MappedSegment::new(memory));
        None
    }

    fn took(&self, _: SocketId, _: &[u8], _: BorrowedFd<'_>) {}

    fn closing(&self, _: SocketId) {}
}

/// Returns a duplicate of each Unix socket of this process that has connected to the listener with
/// this name.
fn doorbells(listener: &[u8]) -> Vec<OwnedFd> {
    let numbers = std::fs::read_dir("/proc/self/fd").expect("the descriptors");
    let numbers = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    // The keys are inodes, because a socket may be found twice: other tests close descriptors
    // meanwhile, so a duplicate may get a number that the loop has not reached yet.
    let mut found = BTreeMap::new();
    for number in numbers {
        // SAFETY: the number belonged to a descriptor when the directory was read. If another test
        // has closed that one, the number is used only if it is such a socket.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let is_local = socket_type(fd) == Ok(SocketType::SEQPACKET) && socket_domain(fd) == Ok(AddressFamily::UNIX);
        let peer = getpeername(fd).ok().flatten().and_then(|peer| SocketAddrUnix::try_from(peer).ok());
        if is_local && peer.is_some_and(|peer| peer.abstract_name() == Some(listener)) {
            let inode = fstat(fd).expect("its state").st_ino;
            found.extend(fd.try_clone_to_owned().ok().map(|duplicate| (inode, duplicate)));
        }
    }
    found.into_values().collect()
}

/// The memory files that this process has received from its peers or sent to them, each with its
/// mapping.
#[derive(Debug, Default)]
struct Keeper(Mutex<Vec<(OwnedFd, Option<Memory>)>>);

impl Keeper {
    fn keep(&self, file: BorrowedFd<'_>) {
        let file = file.try_clone_to_owned().expect("a descriptor");
        let len = usize::try_from(fstat(&file).expect("its state").st_size).expect("its length");
        let memory = Memory::map_file(file.as_fd(), 0, len).ok();
        self.0.lock().unwrap().push((file, memory));
    }

    /// Returns the total size of the allocated pages of all files, in bytes, and the number of
    /// files.
    fn allocated(&self) -> (u64, usize) {
        let files = self.0.lock().unwrap();
        let blocks = |(file, _): &(OwnedFd, _)| fstat(file).expect("its state").st_blocks as u64;
        (files.iter().map(blocks).sum::<u64>() * 512, files.len())
    }
}

impl Onlooker for Keeper {
    fn met(&self, _: SocketId, _: &[u8]) {}

    fn passing(&self, _: SocketId, _: &[u8], file: BorrowedFd<'_>) -> Option<OwnedFd> {
        self.keep(file);
        None
    }

    fn took(&self, _: SocketId, _: &[u8], file: BorrowedFd<'_>) {
        self.keep(file);
    }

    fn closing(&self, _: SocketId) {}
}

/// Returns a reactor that connects in shared memory only, and whose files `onlooker` sees.
fn seen_by(onlooker: Arc<dyn Onlooker>) -> Reactor {
    let mut settings = IwarpConfig::default();
    (settings.extensions, settings.shared_memory) = (true, SharedMemoryPolicy::Require);
    let net = GatedNet::seen_by(TcpNet::new().expect("sockets"), onlooker);
    let provider = Iwarp::new(settings, net, system_entropy()).expect("a provider");
    let parts = Parts {
        providers: vec![Box::new(provider)],
        poller: Box::new(MioPoller::new().expect("a poller")),
        clock: Box::new(SystemClock),
    };
    Reactor::with_parts(limited_to(PATIENCE, Config::default()), parts).expect("a reactor")
}

/// A client keeps all files of its connections to a server that echoes messages of 8 MiB: the
/// rings, the staging buffers and the copies of messages. After each connection, no file has any
/// pages, so the server is charged for none, however often the client connects.
#[test]
fn a_server_gets_back_what_it_has_lent_to_a_client_that_keeps_it() {
    with_watchdog("a_server_gets_back_what_it_has_lent_to_a_client_that_keeps_it", || {
        const LEN: usize = 8 << 20;
        let (_server, address) = Peer::serve();
        let keeper = Arc::new(Keeper::default());
        let (mut reactor, mut client) = (seen_by(Arc::clone(&keeper) as _), Client::default());
        for round in 0..6 {
            (client.up, client.others) = (0, Vec::new());
            let conn = connect(&mut reactor, &mut client, address, 1)[0];
            for len in [LEN, 5000, 5000] {
                let echoes = client.received;
                reactor.context().send(conn, &vec![round as u8; len]).expect("there is memory");
                while client.received < echoes + len {
                    reactor.turn(&mut client, Some(Duration::from_millis(20))).expect("the reactor runs");
                }
            }
            let (bytes, files) = keeper.allocated();
            assert!(bytes >= LEN as u64, "{bytes} bytes in {files} files: nothing was lent");
            reactor.context().close(conn);
            while keeper.allocated().0 > 0 {
                reactor.turn(&mut client, Some(Duration::from_millis(20))).expect("the reactor runs");
            }
        }
        assert!(keeper.allocated().1 >= 6 * 4, "{:?}", keeper.allocated());
    });
}

/// The word of each lending of the attacker: a generation, and the key of a region.
const WORD: u64 = 1 << 32 | 77;

/// The connections of one process lend files of 1 TiB and files of 16 MiB in all slots, again and
/// again. The server maps at most 1 GiB, and only the files whose pages are allocated. Another
/// client is served.
#[test]
fn a_peer_that_lends_without_end_disturbs_nobody() {
    with_watchdog("a_peer_that_lends_without_end_disturbs_nobody", || {
        const COUNT: usize = 8;
        const PIECE: u64 = 16 << 20;
        let (server, address) = Peer::serve();
        let segments = Arc::new(Segments::default());
        let mut attacker = seen_by(Arc::clone(&segments) as _);
        connect(&mut attacker, &mut Client::default(), address, COUNT);
        let doorbells = doorbells(&segments.1.lock().unwrap());
        assert_eq!((doorbells.len(), segments.0.lock().unwrap().len()), (COUNT, COUNT));
        for segment in segments.0.lock().unwrap().iter() {
            (0..SLOTS).for_each(|slot| segment.store(SegmentSide::Active.outgoing() + TABLE + 8 * slot, WORD));
        }

        let sparse = hostile_file(1 << 40, false, SealFlags::FUTURE_WRITE);
        let fixed = hostile_file(PIECE, true, SealFlags::FUTURE_WRITE);
        let lend = |doorbell: &OwnedFd, slot, file| assert!(announce(doorbell, (slot, WORD), Access::empty(), file));
        let check = |expected: &dyn Fn(u64) -> bool| {
            loop {
                let mapped = server.mapped("memfd:rdma-hostile");
                let bytes = mapped.iter().sum();
                assert!(bytes <= 1 << 30 && mapped.iter().all(|&len| len == PIECE), "{mapped:?}");
                if expected(bytes) {
                    return;
                }
                thread::sleep(Duration::from_millis(20));
            }
        };
        for doorbell in &doorbells {
            (0..32).for_each(|slot| lend(doorbell, slot, (&sparse, 1 << 40)));
        }
        for doorbell in &doorbells {
            (0..32).for_each(|slot| lend(doorbell, slot, (&fixed, PIECE)));
        }
        // A quarter of 1 GiB stays for the staging buffers of others.
        check(&|bytes| bytes == 768 << 20);
        for doorbell in &doorbells {
            (0..2000).for_each(|_| lend(doorbell, 0, (&fixed, PIECE)));
        }
        echo(Config::default(), ProviderChoice::Shm, address, 4);
        // Windows that are not unmapped yet count towards the limit, so a slot that was lent again
        // may have no mapped memory.
        check(&|bytes| (720 << 20..=768 << 20).contains(&bytes));
    });
}
