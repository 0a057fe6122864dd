//! Tests of the setup of shared memory, with the sockets of the system.

use super::super::bench::{Bench, entropy, send};
use super::super::endpoint::AttemptStep;
use super::super::forward_net::forward_net;
use super::super::net::{LocalSockets, PacketSockets, StreamSockets};
use super::super::startup::{self, StartupTerms};
use super::super::{CrcPolicy, Iwarp, IwarpConfig, TcpNet, unix};
use super::*;
use crate::passing;
use crate::patience::until;
use crate::shm::greeting::OFFER_LEN;
use crate::test_memory::TestMemory;
use rdma_transport::cm::{CmEvent, CmEventKind, CmId, ConnectParam, ListenParam};
use rdma_transport::error::TransportError;
use rdma_transport::provider::{Drive, Provider};
use rdma_transport::qp::QpId;
use rdma_transport::wc::WcStatus;
use rdma_transport::wr::{RecvWr, SgeList};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc;
use std::time::Duration;

/// The sockets of the system, with injected failures.
#[derive(Debug)]
struct FaultyNet {
    inner: TcpNet,
    /// False if no Unix socket can be accepted any more.
    accepts: bool,
    /// False if the Unix socket that was accepted cannot move to the completion channel, because
    /// the system watches too many descriptors.
    promotes: bool,
    /// True if each peer that connects to the Unix listener belongs to another user.
    refuses: bool,
    /// True if the process has no descriptor left for a Unix socket.
    is_exhausted: bool,
    accepted: Option<SocketId>,
}

impl StreamSockets for FaultyNet {
    forward_net!(
        channel wake poll listen accept connect connected local_address max_segment all_acknowledged recv send
        shutdown close release adopt
    );

    fn promote(&mut self, socket: SocketId) -> io::Result<()> {
        if self.accepted == Some(socket) && !self.promotes {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.inner.promote(socket)
    }
}

impl LocalSockets for FaultyNet {
    forward_net!(segment connect_local);

    fn local_path(&self, socket: SocketId) -> Option<u32> {
        self.inner.local_path(socket)
    }

    fn listen_local(&mut self, name: &[u8]) -> io::Result<SocketId> {
        self.inner.listen_local(name)
    }

    fn accept_local(&mut self, listener: SocketId) -> io::Result<SocketId> {
        if !self.accepts {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        if self.is_exhausted {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        let socket = self.inner.accept_local(listener)?;
        if self.refuses {
            self.inner.close(socket, false);
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        self.accepted = Some(socket);
        Ok(socket)
    }

    fn renew_local(&mut self) {
        self.accepts = true;
        self.inner.renew_local();
    }

    fn pass(&mut self, socket: SocketId, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        self.inner.pass(socket, packet, file)
    }

    fn take(&mut self, socket: SocketId, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        self.inner.take(socket, room)
    }
}

impl PacketSockets for FaultyNet {
    forward_net!(has_packets interface source open_packets open_group send_packets receive_packets take_refusal);
}

/// A provider that listens, and another one that connects to it. Both have the same policy for shared memory.
struct SetupWorld {
    server: Bench<FaultyNet>,
    client: Bench,
    address: SocketAddr,
}

impl SetupWorld {
    /// `tag` is an argument of [`entropy`].
    fn new(tag: u8, accepts: bool) -> Self {
        Self::with(tag, accepts, SharedMemoryPolicy::Require)
    }

    fn with(tag: u8, accepts: bool, shared_memory: SharedMemoryPolicy) -> Self {
        let config = IwarpConfig { shared_memory, ..IwarpConfig::default() };
        let inner = TcpNet::new().unwrap();
        let net = FaultyNet { inner, accepts, promotes: false, refuses: false, is_exhausted: false, accepted: None };
        let mut server = Bench::of(Iwarp::new(config.clone(), net, entropy(tag)).unwrap());
        let listener = server.iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
        let address = server.iwarp.local_address(listener).unwrap();
        Self { server, client: Bench::new(config), address }
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        until(what, || {
            self.client.turn();
            self.server.turn();
            holds(self).then_some(())
        });
    }

    /// Waits until the client has sent its hello. The server does not run meanwhile.
    fn until_hello(&mut self) {
        until("the hello", || {
            self.client.turn();
            let sets_up = |key: &Key| match self.client.iwarp.endpoints.get(*key) {
                Some(CmEndpoint::Attempt(attempt)) => matches!(attempt.step, AttemptStep::SettingUp(..)),
                _ => false,
            };
            self.client.iwarp.endpoints.keys().iter().any(sets_up).then_some(())
        });
    }

    /// Connects, and returns the server's id of the request.
    fn request(&mut self) -> CmId {
        self.client.connect_to(self.address);
        self.until("a request", |world| !world.server.events.is_empty());
        self.server.request()
    }
}

/// A connection moves to shared memory on the passive side and fails in the same step. The program is notified of the failure only.
#[test]
fn a_connection_that_fails_while_it_moves_was_never_up() {
    let mut world = SetupWorld::new(1, true);
    let id = world.request();
    world.server.iwarp.accept(id, &ConnectParam::default(), world.server.now).unwrap();
    world.until("the end of the connection", |world| {
        world.client.events.iter().any(|event| matches!(event.kind, CmEventKind::Disconnected(_)))
    });
    let events = &world.server.events[..];
    let failed = |event: &CmEvent| matches!(event.kind, CmEventKind::ConnectFailed(ConnectFailure::System(_)));
    assert!(events.len() == 1 && events[0].id == id && failed(&events[0]), "{events:?}");
}

/// The server does not run for longer than `ready_timeout`. A connection whose hello has arrived
/// meanwhile is established. One without a hello fails after another `ready_timeout`.
#[test]
fn a_hello_that_has_arrived_keeps_its_connection() {
    for (tag, says_hello) in [(8, true), (9, false)] {
        let mut world = SetupWorld::new(tag, true);
        world.server.iwarp.hub.net.promotes = true;
        let id = world.request();
        world.server.iwarp.accept(id, &ConnectParam::default(), world.server.now).unwrap();
        if says_hello {
            world.until_hello();
        }
        world.server.now += Duration::from_secs(60);
        world.server.turn();
        if says_hello {
            let is_up = |event: &CmEvent| matches!(event.kind, CmEventKind::Established { .. });
            world.until("the connection", |world| world.server.events.iter().any(is_up));
        } else {
            // The deadline is handled late, so the client gets another `ready_timeout`.
            assert!(world.server.events.is_empty());
            world.server.now += Duration::from_secs(10);
            let ended = world.server.event().kind;
            assert!(matches!(ended, CmEventKind::ConnectFailed(ConnectFailure::Timeout)), "{ended:?}");
        }
    }
}

/// No descriptor is free for the Unix socket of the client, which waits in the backlog of the
/// listener. No edge reports it again, so it is accepted after a pause.
#[test]
fn a_peer_without_a_descriptor_is_accepted_after_a_pause() {
    let mut world = SetupWorld::new(31, true);
    let net = &mut world.server.iwarp.hub.net;
    (net.promotes, net.is_exhausted) = (true, true);
    let id = world.request();
    world.server.iwarp.accept(id, &ConnectParam::default(), world.server.now).unwrap();
    let pause = |world: &SetupWorld| world.server.iwarp.hub.deadlines.of(Owner::SetupListener);
    world.until("an attempt", |world| pause(world).is_some());
    world.server.iwarp.hub.net.is_exhausted = false;
    for _ in 0..100 {
        world.server.turn();
    }
    let Some(CmEndpoint::Stream(flow)) = world.server.iwarp.endpoints.get(id.0) else { panic!() };
    assert!(flow.awaits_hello(), "it was accepted during the pause");
    world.server.now += IwarpConfig::default().accept_backoff;
    world.server.turn();
    assert!(pause(&world).is_none(), "the pause does not end");
    let is_up = |event: &CmEvent| matches!(event.kind, CmEventKind::Established { .. });
    world.until("the connection", |world| world.server.events.iter().any(is_up));
}

/// The client does not run for longer than `meeting_timeout`. If the answer to its hello has
/// arrived meanwhile, its connection moves to shared memory.
#[test]
fn an_answer_that_has_arrived_keeps_shared_memory() {
    let mut world = SetupWorld::with(10, true, SharedMemoryPolicy::Prefer);
    world.server.iwarp.hub.net.promotes = true;
    let id = world.request();
    world.server.iwarp.accept(id, &ConnectParam::default(), world.server.now).unwrap();
    world.until_hello();
    until("the answer", || {
        world.server.turn();
        match world.server.iwarp.endpoints.get(id.0)? {
            CmEndpoint::Stream(flow) => matches!(flow.offer.as_deref(), Some(Offered::Accepted(..))).then_some(()),
            _ => None,
        }
    });
    world.client.now += Duration::from_secs(2);
    // The deadline passes before the edge of the Unix socket is read.
    world.client.iwarp.progress(world.client.now, Drive::Full);
    world.until("the connection", |world| world.server.events.iter().any(|event| event.id == id));
    assert!(matches!(world.server.iwarp.endpoints.get(id.0), Some(CmEndpoint::Ring(_))), "it is on TCP");
}

/// The limit of kept sockets of other users is reached, so the setup pauses. The connection that
/// waits for its hello fails on both sides, and no other one is accepted during the pause. After
/// the pause, the server opens a new listener. The next pause is twice as long.
#[test]
fn the_setup_pauses_while_other_users_use_up_its_sockets() {
    let mut world = SetupWorld::new(2, false);
    world.server.iwarp.hub.net.promotes = true;
    let failed = |event: &CmEvent| match &event.kind {
        CmEventKind::ConnectFailed(ConnectFailure::Unreachable(why)) => why.contains("no shared memory"),
        _ => false,
    };
    let is_up = |event: &CmEvent| matches!(event.kind, CmEventKind::Established { .. });
    for pause in [1, 2] {
        world.server.iwarp.hub.net.accepts = false;
        let id = world.request();
        world.server.iwarp.accept(id, &ConnectParam::default(), world.server.now).unwrap();
        world.until("the end of the connection", |world| {
            world.client.events.iter().any(failed) && world.server.events.iter().any(failed)
        });
        assert!(world.server.iwarp.rendezvous.open.is_none());
        world.server.now += Duration::from_secs(pause) - Duration::from_millis(1);
        for is_over in [false, true] {
            world.server.now += Duration::from_millis(u64::from(is_over));
            world.server.events.clear();
            world.client.events.clear();
            let next = world.request();
            let accepted = world.server.iwarp.accept(next, &ConnectParam::default(), world.server.now);
            if is_over {
                assert!(accepted.is_ok(), "after {pause} s: {accepted:?}");
                world.until("the connection", |world| {
                    world.client.events.iter().any(is_up) && world.server.events.iter().any(is_up)
                });
            } else {
                let is_temporary = matches!(accepted, Err(TransportError::SharedMemoryOnly { is_temporary: true, .. }));
                assert!(is_temporary, "{accepted:?}");
            }
        }
        world.server.events.clear();
        world.client.events.clear();
    }
}

/// A peer that ignores the demand for shared memory sends a message on the stream. The message
/// completes no receive, and the program is not notified of the connection. A peer that does not
/// send first cannot use shared memory, so `accept` fails.
#[test]
fn a_message_on_the_stream_completes_nothing_where_shared_memory_is_required() {
    for (tag, speaks_first) in [(5, true), (6, false)] {
        let config =
            IwarpConfig { shared_memory: SharedMemoryPolicy::Require, crc: CrcPolicy::Off, ..IwarpConfig::default() };
        let mut server = Bench::of(Iwarp::new(config, TcpNet::new().unwrap(), entropy(tag)).unwrap());
        let (_, mut peer) = server.listen();
        let terms = StartupTerms { local: true, ..StartupTerms::new(false, 4, 4, false) };
        let mut request = startup::request(&terms, &[]);
        if !speaks_first {
            // The flag A of RFC 6581 §6, in the first octet behind the header.
            request[20] &= 0x7f;
        }
        peer.write_all(&request).unwrap();
        let id = server.request();
        let (qp, memory) = (QpId(id.0), Memory::new(64).unwrap());
        server.iwarp.post_recv(qp, &[RecvWr { wr_id: 1, sges: SgeList::one(memory.sge(0, 64)) }]).unwrap();
        let accepted = server.iwarp.accept(id, &ConnectParam::default(), server.now);
        if !speaks_first {
            assert!(matches!(accepted, Err(TransportError::SharedMemoryOnly { .. })), "{accepted:?}");
            continue;
        }
        let reply = server.read(&mut peer, 20 + 4 + OFFER_LEN);
        assert!(Offer::split(&reply).is_some_and(|(_, offer)| offer.required), "{accepted:?} {reply:?}");
        // Before the first message of the peer, no amount of time establishes the connection.
        server.now += Duration::from_secs(1);
        server.turn();
        assert!(server.events.is_empty(), "{:?}", server.events);
        peer.write_all(&send(1)).unwrap();
        let CmEventKind::ConnectFailed(ConnectFailure::Protocol(why)) = server.event().kind else {
            panic!("not refused")
        };
        assert!(why.contains("TCP") && server.events.is_empty(), "{why} {:?}", server.events);
        let mut completions = Vec::new();
        server.iwarp.poll_cq(server.cq, 8, &mut completions).unwrap();
        let statuses: Vec<_> = completions.iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(statuses, [(1, WcStatus::Flushed)]);
    }
}

/// The passive side requires shared memory and refuses the hello, because the peer belongs to
/// another user. The active side prefers shared memory. It fails its attempt with this reason.
/// Neither side reports an established connection.
#[test]
fn an_attempt_ends_where_the_peer_requires_shared_memory_in_vain() {
    let mut world = SetupWorld::new(7, true);
    let config = IwarpConfig { shared_memory: SharedMemoryPolicy::Prefer, ..IwarpConfig::default() };
    world.client = Bench::new(config);
    let id = world.request();
    world.server.iwarp.hub.net.refuses = true;
    world.server.iwarp.accept(id, &ConnectParam::default(), world.server.now).unwrap();
    let failed = |event: &CmEvent| matches!(event.kind, CmEventKind::ConnectFailed(_));
    world.until("the end of the attempt", |world| world.client.events.iter().any(failed));
    world.until("the end of the request", |world| !world.server.events.is_empty());
    let reason =
        |event: &CmEvent| matches!(event.kind, CmEventKind::ConnectFailed(ConnectFailure::SharedMemoryOnly(_)));
    assert!(world.client.events.len() == 2 && reason(&world.client.events[1]), "{:?}", world.client.events);
    assert!(world.server.events.iter().all(failed), "{:?}", world.server.events);
}

/// The passive side does not answer the hello. A connection that requires shared memory waits for
/// the answer until the deadline of the attempt. Any other one waits only for `meeting_timeout`,
/// and then continues on TCP.
#[test]
fn an_attempt_times_out_while_shared_memory_is_set_up() {
    for (tag, policy) in [(3, SharedMemoryPolicy::Prefer), (4, SharedMemoryPolicy::Require)] {
        let mut world = SetupWorld::with(tag, true, policy);
        let id = world.request();
        world.server.iwarp.accept(id, &ConnectParam::default(), world.server.now).unwrap();
        world.until_hello();
        let mut events_after = |seconds| {
            world.client.now += Duration::from_secs(seconds);
            world.client.turn();
            std::mem::take(&mut world.client.events)
        };
        events_after(0);
        let early = events_after(2);
        let late = events_after(59);
        let is_up = |event: &CmEvent| matches!(event.kind, CmEventKind::Established { .. });
        let timed_out = |event: &CmEvent| matches!(event.kind, CmEventKind::ConnectFailed(ConnectFailure::Timeout));
        match policy {
            SharedMemoryPolicy::Require => {
                assert!(early.is_empty() && late.iter().any(timed_out), "{early:?} {late:?}")
            }
            _ => assert!(early.iter().any(is_up) && late.is_empty(), "{early:?} {late:?}"),
        }
    }
}

/// Forwards one connection to `to`, as a proxy does. Returns the address of the proxy. Sends the
/// flags of the MPA reply to `flags`.
fn proxy(to: SocketAddr, flags: mpsc::Sender<u8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let forward = move || -> io::Result<()> {
        let (mut near, _) = listener.accept()?;
        let mut far = TcpStream::connect(to)?;
        let (mut asks, mut server) = (near.try_clone()?, far.try_clone()?);
        std::thread::Builder::new().spawn(move || io::copy(&mut asks, &mut server))?;
        let mut reply = [0; 20];
        far.read_exact(&mut reply)?;
        let _ = flags.send(reply[16]);
        near.write_all(&reply)?;
        io::copy(&mut far, &mut near).map(drop)
    };
    std::thread::Builder::new().spawn(forward).unwrap();
    address
}

/// Both ends of each TCP connection of a proxy are on this host. But a proxy may count or cut what
/// it forwards, and two proxies may be on two hosts. So the connection stays on its stream, with a
/// CRC.
#[test]
fn a_connection_through_a_proxy_is_one_between_hosts() {
    let cases = [(0, true), (0, false), (1, true), (1, false), (2, true), (2, false)];
    for (tag, (proxies, self_delimiting)) in (20..).zip(cases) {
        let config = IwarpConfig { shared_memory: SharedMemoryPolicy::Prefer, ..IwarpConfig::default() };
        let net = TcpNet::new().unwrap();
        let mut server = Bench::of(Iwarp::new(config.clone(), net, entropy(tag)).unwrap());
        let listener = server.iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
        let mut address = server.iwarp.local_address(listener).unwrap();
        let (tell, flags) = mpsc::channel();
        (0..proxies).for_each(|_| address = proxy(address, tell.clone()));
        let mut client = Bench::new(config);
        let param = ConnectParam { private_data: b"hello", self_delimiting, ..ConnectParam::default() };
        let here = client.connect_with(address, &param);
        until("a request", || {
            client.turn();
            server.turn();
            (!server.events.is_empty()).then_some(())
        });
        let there = server.request();
        server.iwarp.accept(there, &ConnectParam::default(), server.now).unwrap();
        let (mut up, mut begun) = (false, false);
        until("the connection is up", || {
            client.turn();
            server.turn();
            let is_up = |event: &CmEvent| matches!(event.kind, CmEventKind::Established { .. });
            up |= client.events.iter().any(is_up);
            begun |= server.events.iter().any(is_up);
            (up && begun).then_some(())
        });
        let links = [client.iwarp.endpoints.get(here.0), server.iwarp.endpoints.get(there.0)]
            .map(|endpoint| matches!(endpoint, Some(CmEndpoint::Ring(_))));
        assert_eq!(links, [proxies == 0; 2], "{proxies} {self_delimiting}");
        for _ in 0..proxies {
            assert_eq!(flags.recv().unwrap() & 0x40, 0x40, "{proxies} {self_delimiting}");
        }
    }
}

/// Hellos with another secret, for another connection, over another path, and of the wrong length
/// are refused, and the connection still waits for its hello. Only the hello with all values of the
/// offer is accepted.
#[test]
fn a_hello_without_the_secret_changes_nothing() {
    let config = IwarpConfig { shared_memory: SharedMemoryPolicy::Prefer, ..IwarpConfig::default() };
    let mut server = Bench::of(Iwarp::new(config, TcpNet::new().unwrap(), entropy(32)).unwrap());
    let (_, mut peer) = server.listen();
    let terms = StartupTerms { local: true, ..StartupTerms::new(false, 4, 4, false) };
    peer.write_all(&startup::request(&terms, &[])).unwrap();
    let id = server.request();
    server.iwarp.accept(id, &ConnectParam::default(), server.now).unwrap();
    let reply = server.read(&mut peer, 20 + 4 + OFFER_LEN);
    let (_, offer) = Offer::split(&reply).unwrap();
    let stream = |server: &Bench| match server.iwarp.endpoints.get(id.0) {
        Some(CmEndpoint::Stream(flow)) => (flow.socket, flow.awaits_hello()),
        other => panic!("{other:?}"),
    };
    let socket = stream(&server).0;
    let path = server.iwarp.hub.net.local_path(socket).unwrap();
    let hello = Hello { secret: offer.secret, key: offer.key, path };
    let mut guess = hello.secret;
    guess[15] ^= 1;
    let other = Key::new(hello.key.slot() + 1, hello.key.generation());
    let wrong = [Hello { secret: guess, ..hello }, Hello { key: other, ..hello }, Hello { path: path ^ 1, ..hello }];
    let mut packets: Vec<_> = wrong.iter().map(|hello| hello.emit().to_vec()).collect();
    packets.extend([hello.emit()[1..].to_vec(), [&hello.emit()[..], b"x"].concat(), hello.emit().to_vec()]);
    let last = packets.len() - 1;
    for (nth, packet) in packets.iter().enumerate() {
        let near = unix::connect(&offer.name, &mut unix::Strangers::default()).unwrap();
        let mut memory = Memory::new_shared(segment::LEN, Sharing::Lent).unwrap();
        let file = memory.take_file();
        passing::send_with_descriptor(near.as_fd(), packet, file.as_ref().map(AsFd::as_fd)).unwrap();
        let mut answer = [0; 8];
        let len = until("an answer", || {
            server.turn();
            passing::receive_with_descriptor(near.as_fd(), &mut answer).map(|(len, _)| len).ok()
        });
        let expected = if nth == last { &ACCEPTED_PACKET[..] } else { &[] };
        assert_eq!(&answer[..len], expected, "{nth}");
        assert_eq!(stream(&server).1, nth != last, "{nth}");
        assert!(server.events.is_empty(), "{:?}", server.events);
    }
}

#[test]
fn a_proxy_is_the_reason_where_shared_memory_is_required() {
    let mut world = SetupWorld::new(30, true);
    let (tell, _) = mpsc::channel();
    let address = proxy(world.address, tell);
    let param = ConnectParam { self_delimiting: true, ..ConnectParam::default() };
    world.client.connect_with(address, &param);
    world.until("a request", |world| !world.server.events.is_empty());
    let id = world.server.request();
    let result = world.server.iwarp.accept(id, &ConnectParam::default(), world.server.now);
    assert!(matches!(result, Err(TransportError::SharedMemoryOnly { why, .. }) if why.contains("proxy")), "{result:?}");
}

#[test]
fn the_oldest_peer_without_a_hello_gives_way() {
    let mut listener = Rendezvous::default();
    for slot in 0..1000 {
        let (_, oldest) = listener.add(SocketId(Key::new(slot, 1)));
        let expected = slot.checked_sub(MAX_NEW_PEERS as u32).map(|slot| SocketId(Key::new(slot, 1)));
        assert_eq!(oldest.map(|(_, socket)| socket), expected);
        assert!(listener.by_age.len() <= 4 * MAX_NEW_PEERS + 1);
    }
}
