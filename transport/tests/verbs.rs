//! The provider `verbs` on the devices of the system. Every test runs on an iWARP device (`siw`) and on a RoCE device
//! (`rxe`), both ends in this process unless it says otherwise.
//!
//! These tests need the devices: `tests/vm/run.sh` brings them up and sets the variables `RDMA_SIW_ADDR` and so on.
//! Without them the tests fail. Nothing here is skipped.
#![cfg(feature = "verbs")]
#![allow(clippy::disallowed_methods, reason = "tests on real devices need the real clock, and wait")]

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rdma_transport::cm::ConnectFailure;
use rdma_transport::provider::PostError;
use rdma_transport::verbs::{Reach, Verbs};
use rdma_transport::wr::RemoteAddress;
use rdma_transport::{
    Access, CmEvent, CmEventKind, CmId, ConnectParam, CqId, DeviceId, DisconnectCause, Error, Features, Memory,
    MemoryRegion, Provider, QpAttr, QpId, RecvWr, SendFlags, SendOp, SendWr, Sge, SgeList, WcOpcode, WcStatus,
    WorkCompletion,
};

const TIMEOUT: Duration = Duration::from_secs(20);
const DEPTH: u32 = 32;
const SLOT: usize = 256;
/// Receives of an end, then its sends.
const MEMORY: usize = 2 * DEPTH as usize * SLOT;

/// A kind of device, as `tests/vm/run.sh` names it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Siw,
    Rxe,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Siw => "SIW",
            Self::Rxe => "RXE",
        }
    }

    fn variable(self, what: &str) -> String {
        let name = format!("RDMA_{}_{what}", self.name());
        std::env::var(&name).unwrap_or_else(|_| panic!("{name} is not set: run this with tests/vm/run.sh"))
    }

    fn address(self) -> IpAddr {
        self.variable("ADDR").parse().unwrap()
    }
}

/// One test at a time: they share the context of a device, count descriptors, and remove devices.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let _ = env_logger_free();
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Warnings of the library go to standard error.
fn env_logger_free() -> Result<(), log::SetLoggerError> {
    struct Stderr;
    impl log::Log for Stderr {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            metadata.target().starts_with("rdma_transport")
        }
        fn log(&self, record: &log::Record<'_>) {
            if self.enabled(record.metadata()) {
                eprintln!("{} {}", record.level(), record.args());
            }
        }
        fn flush(&self) {}
    }
    static LOGGER: Stderr = Stderr;
    log::set_max_level(std::env::var("RDMA_TEST_LOG").map_or(log::LevelFilter::Warn, |level| level.parse().unwrap()));
    log::set_logger(&LOGGER)
}

/// One end of a connection.
#[derive(Clone, Copy, Debug)]
struct End {
    id: CmId,
    qp: QpId,
    cq: CqId,
    region: MemoryRegion,
    base: NonNull<u8>,
}

impl End {
    fn sge(&self, slot: usize, len: usize) -> Sge {
        assert!((slot + 1) * SLOT <= MEMORY && len <= SLOT);
        // SAFETY: within the end's memory, which lives as long as the world; the tests leave posted slots alone.
        unsafe { Sge::new(self.base.add(slot * SLOT), len as u32, self.region.local_key) }
    }

    fn write(&self, slot: usize, bytes: &[u8]) {
        // SAFETY: within the slot, which is not posted.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.sge(slot, bytes.len()).address(), bytes.len()) }
    }

    fn read(&self, slot: usize, len: usize) -> Vec<u8> {
        // SAFETY: within the slot, whose receive has completed.
        unsafe { std::slice::from_raw_parts(self.sge(slot, len).address(), len) }.to_vec()
    }

    fn recv(&self, slot: usize) -> RecvWr {
        RecvWr { wr_id: slot as u64, sges: SgeList::one(self.sge(slot, SLOT)) }
    }

    fn send(&self, slot: usize, len: usize) -> SendWr {
        self.op(SendOp::Send, slot, len)
    }

    fn op(&self, op: SendOp, slot: usize, len: usize) -> SendWr {
        let sges = SgeList::one(self.sge(slot, len));
        SendWr { wr_id: 1000 + slot as u64, op, sges, flags: SendFlags::SIGNALED }
    }

    fn remote(&self, slot: usize) -> RemoteAddress {
        RemoteAddress { address: self.sge(slot, 0).address() as u64, key: self.region.remote_key }
    }
}

/// A provider, and the loop that a reactor would be.
struct World {
    provider: Verbs,
    poll: Poll,
    events: Events,
    memories: Vec<Arc<Memory>>,
    watched: Vec<DeviceId>,
    access: Access,
    max_inline: u32,
}

impl World {
    fn new() -> Self {
        let provider = Verbs::open().unwrap();
        let poll = Poll::new().unwrap();
        let fd = provider.cm_channel();
        poll.registry().register(&mut SourceFd(&fd), Token(0), Interest::READABLE).unwrap();
        let (events, access) = (Events::with_capacity(8), Access::LOCAL_WRITE);
        Self { provider, poll, events, memories: Vec::new(), watched: Vec::new(), access, max_inline: 0 }
    }

    /// The next event, slept for on the channel's edge.
    fn event_within(&mut self, timeout: Duration) -> Option<CmEvent> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(event) = self.provider.next_cm_event(Instant::now()).unwrap() {
                return Some(event);
            }
            let left = until.checked_duration_since(Instant::now())?;
            self.poll.poll(&mut self.events, Some(left)).unwrap();
        }
    }

    fn event(&mut self) -> CmEvent {
        self.event_within(TIMEOUT).expect("an event within the time limit")
    }

    /// The next event that is not about old connections.
    fn news(&mut self) -> CmEvent {
        loop {
            let event = self.event();
            if !matches!(event.kind, CmEventKind::TimewaitExit) {
                return event;
            }
        }
    }

    fn listen(&mut self, address: IpAddr) -> (CmId, SocketAddr) {
        let listener = self.provider.listen(SocketAddr::new(address, 0), 16).unwrap();
        let bound = self.provider.local_address(listener).unwrap();
        assert_ne!(bound.port(), 0);
        (listener, SocketAddr::new(address, bound.port()))
    }

    fn resolve(&mut self, peer: SocketAddr) -> CmId {
        self.provider.resolve(peer, Instant::now() + TIMEOUT).unwrap()
    }

    fn resolved(&mut self, peer: SocketAddr) -> (CmId, DeviceId) {
        let id = self.resolve(peer);
        match self.news() {
            CmEvent { id: of, kind: CmEventKind::Resolved { device } } if of == id => (id, device),
            other => panic!("{other:?}"),
        }
    }

    /// Gives an id a queue pair of its own memory and completion queue, and posts receives.
    fn equip(&mut self, id: CmId, device: DeviceId) -> End {
        if !self.watched.contains(&device) {
            let fd = self.provider.completion_channel(device).unwrap();
            let token = Token(1 + device.0 as usize);
            self.poll.registry().register(&mut SourceFd(&fd), token, Interest::READABLE).unwrap();
            self.watched.push(device);
        }
        let memory = Arc::new(Memory::new(MEMORY).unwrap());
        let region = self.provider.register(device, &memory, self.access).unwrap();
        let base = NonNull::new(memory.as_ptr()).unwrap();
        self.memories.push(memory);
        let cq = self.provider.create_cq(device, 2 * DEPTH).unwrap();
        let attr =
            QpAttr { send_cq: cq, recv_cq: cq, max_send_wr: DEPTH, max_recv_wr: DEPTH, max_inline: self.max_inline };
        let qp = self.provider.create_qp(id, &attr).unwrap();
        let end = End { id, qp, cq, region, base };
        let receives: Vec<_> = (0..DEPTH as usize).map(|slot| end.recv(slot)).collect();
        self.provider.post_recv(qp, &receives).unwrap();
        end
    }

    fn connect_request(&mut self) -> (CmId, CmId, DeviceId, SocketAddr, Box<[u8]>) {
        match self.news() {
            CmEvent { id, kind: CmEventKind::ConnectRequest { listener, device, peer, private_data } } => {
                (id, listener, device, peer, private_data)
            }
            other => panic!("{other:?}"),
        }
    }

    /// A connection, active end first.
    fn pair(&mut self, to: SocketAddr) -> (End, End) {
        let (id, device) = self.resolved(to);
        let active = self.equip(id, device);
        let param = ConnectParam { private_data: b"question", ..Default::default() };
        self.provider.connect(id, &param).unwrap();
        let (id, _, device, _, private_data) = self.connect_request();
        assert!(private_data.starts_with(b"question"));
        let passive = self.equip(id, device);
        let param = ConnectParam { private_data: b"answer", ..Default::default() };
        self.provider.accept(id, &param, Instant::now()).unwrap();
        for _ in 0..2 {
            match self.news() {
                CmEvent { id, kind: CmEventKind::Established { private_data } } if id == active.id => {
                    assert!(private_data.starts_with(b"answer"));
                }
                CmEvent { id, kind: CmEventKind::Established { private_data } } if id == passive.id => {
                    assert!(private_data.is_empty());
                }
                other => panic!("{other:?}"),
            }
        }
        (active, passive)
    }

    fn poll(&mut self, cq: CqId) -> Vec<WorkCompletion> {
        let mut out = Vec::new();
        while self.provider.poll_cq(cq, 7, &mut out).unwrap() > 0 {}
        out
    }

    /// Completions of one queue, slept for on the completion channel's edge.
    fn completions(&mut self, cq: CqId) -> Vec<WorkCompletion> {
        let until = Instant::now() + TIMEOUT;
        loop {
            let out = self.poll(cq);
            if !out.is_empty() {
                return out;
            }
            self.provider.req_notify(cq).unwrap();
            let out = self.poll(cq);
            if !out.is_empty() {
                return out;
            }
            let left = until.checked_duration_since(Instant::now()).expect("completions within the time limit");
            self.poll.poll(&mut self.events, Some(left)).unwrap();
            for device in self.watched.clone() {
                while self.provider.next_completion_event(device).unwrap().is_some() {}
            }
        }
    }

    fn completion(&mut self, cq: CqId) -> WorkCompletion {
        let mut all = self.completions(cq);
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    /// Every work request of an end that was disconnected; fails when one is missing or comes twice.
    fn flushed(&mut self, end: &End, wanted: usize) -> Vec<WorkCompletion> {
        let mut out = Vec::new();
        while out.len() < wanted {
            out.extend(self.completions(end.cq));
        }
        thread::sleep(Duration::from_millis(50));
        out.extend(self.poll(end.cq));
        assert_eq!(out.len(), wanted, "{out:?}");
        let mut ids: Vec<_> = out.iter().map(|wc| wc.wr_id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), wanted, "each work request completes once");
        assert!(out.iter().all(|wc| wc.qp == end.qp));
        out
    }

    fn drop_end(&mut self, end: &End) {
        self.provider.destroy_id(end.id, Instant::now());
        self.provider.destroy_cq(end.cq).unwrap();
        self.provider.deregister(end.region.id).unwrap();
    }

    fn disconnected(&mut self, id: CmId, wanted: &DisconnectCause) {
        match self.news() {
            CmEvent { id: of, kind: CmEventKind::Disconnected(cause) } => assert_eq!((of, &cause), (id, wanted)),
            other => panic!("{other:?}"),
        }
    }
}

fn quick<T>(what: &str, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = call();
    let took = start.elapsed();
    assert!(took < Duration::from_millis(500), "{what} took {took:?}");
    result
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn open_and_reach(kind: Kind) {
    let mut world = World::new();
    let address = kind.address();
    let device = kind.variable("DEV");
    let to = SocketAddr::new(kind.variable("PEER").parse().unwrap(), 1);
    assert_eq!(world.provider.reaches(to, Duration::from_secs(2)).unwrap(), Reach::Yes { device: device.clone() });
    assert_eq!(world.provider.serves(to).unwrap(), Reach::Yes { device });
    let nowhere = "192.0.2.1:1".parse().unwrap();
    assert!(matches!(world.provider.reaches(nowhere, Duration::from_secs(2)).unwrap(), Reach::No { .. }));
    let info = world.provider.device(DeviceId(0)).unwrap();
    assert_eq!(info.name, kind.variable("DEV"));
    let iwarp = kind == Kind::Siw;
    let caps = info.capabilities;
    println!("{caps:?}");
    assert_eq!(caps.features.contains(Features::ATOMICS | Features::WRITE_WITH_IMMEDIATE), !iwarp);
    assert!(caps.features.contains(Features::READ | Features::WRITE));
    assert_eq!(caps.max_private_data, if iwarp { 251 } else { 56 });
    assert!(caps.max_inline > 0 && caps.max_sge == 4 && caps.max_message >= 1 << 20);
    let (listener, _) = world.listen(address);
    let again = world.provider.local_address(listener).unwrap();
    assert!(matches!(world.provider.listen(again, 1), Err(Error::Listen { .. })));
}

fn a_thousand_messages(kind: Kind) {
    for max_inline in [0, 64] {
        let mut world = World::new();
        world.max_inline = max_inline;
        let (_, to) = world.listen(kind.address());
        let (active, passive) = world.pair(to);
        let start = Instant::now();
        for turn in 0..1000u32 {
            let (from, to) = if turn % 2 == 0 { (&active, &passive) } else { (&passive, &active) };
            let text = format!("message {turn}");
            from.write(DEPTH as usize, text.as_bytes());
            world.provider.post_send(from.qp, &[from.send(DEPTH as usize, text.len())]).unwrap();
            let got = world.completion(to.cq);
            assert_eq!((got.status, got.opcode, got.qp), (WcStatus::Success, WcOpcode::Recv, to.qp));
            assert_eq!(to.read(got.wr_id as usize, got.byte_len as usize), text.as_bytes());
            world.provider.post_recv(to.qp, &[to.recv(got.wr_id as usize)]).unwrap();
            let sent = world.completion(from.cq);
            assert_eq!((sent.wr_id, sent.status, sent.qp), (1000 + u64::from(DEPTH), WcStatus::Success, from.qp));
        }
        println!("1000 messages, inline {max_inline}: {:?}", start.elapsed());
    }
}

fn a_chain_is_one_post(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (active, passive) = world.pair(to);
    for _ in 0..20 {
        let mut chain: Vec<_> = (0..DEPTH as usize).map(|i| active.send(DEPTH as usize + i, 1 + i)).collect();
        for wr in &mut chain[..DEPTH as usize - 1] {
            wr.flags = SendFlags::empty();
        }
        world.provider.post_send(active.qp, &chain).unwrap();
        let mut got = Vec::new();
        while got.len() < DEPTH as usize {
            got.extend(world.completions(passive.cq));
        }
        for (i, wc) in got.iter().enumerate() {
            assert_eq!((wc.wr_id, wc.byte_len, wc.status), (i as u64, 1 + i as u32, WcStatus::Success));
        }
        let sent = world.completion(active.cq);
        assert_eq!(sent.wr_id, chain.last().unwrap().wr_id);
        let receives: Vec<_> = (0..DEPTH as usize).map(|slot| passive.recv(slot)).collect();
        world.provider.post_recv(passive.qp, &receives).unwrap();
    }
}

fn one_sided(kind: Kind) {
    let mut world = World::new();
    world.access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let (_, to) = world.listen(kind.address());
    let (active, passive) = world.pair(to);
    let slot = DEPTH as usize;
    active.write(slot, b"written");
    passive.write(slot + 1, b"to be read");
    let post = |world: &mut World, op, slot, len| world.provider.post_send(active.qp, &[active.op(op, slot, len)]);
    post(&mut world, SendOp::Write(passive.remote(slot)), slot, 7).unwrap();
    assert_eq!(world.completion(active.cq).opcode, WcOpcode::Write);
    post(&mut world, SendOp::Read(passive.remote(slot + 1)), slot + 1, 10).unwrap();
    let read = world.completion(active.cq);
    assert_eq!((read.status, read.opcode), (WcStatus::Success, WcOpcode::Read));
    assert_eq!(active.read(slot + 1, 10), b"to be read");
    assert_eq!(passive.read(slot, 7), b"written");
    let immediate = post(&mut world, SendOp::WriteWithImmediate(passive.remote(slot), 0x0102_0304), slot, 7);
    let atomic = SendOp::FetchAdd { remote: passive.remote(slot), add: 1 };
    if kind == Kind::Siw {
        for refused in [immediate, post(&mut world, atomic, slot, 8)] {
            assert!(matches!(refused, Err(PostError { posted: 0, error: Error::Unsupported { .. } })));
        }
        return;
    }
    immediate.unwrap();
    let got = world.completion(passive.cq);
    assert_eq!((got.opcode, got.immediate), (WcOpcode::RecvWriteWithImmediate, Some(0x0102_0304)));
    assert_eq!(world.completion(active.cq).status, WcStatus::Success);
}

fn limits_are_errors(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (id, device) = world.resolved(to);
    let provider = &mut world.provider;
    assert!(matches!(provider.create_cq(device, 0), Err(Error::OutOfRange { .. })));
    assert!(matches!(provider.create_cq(device, u32::MAX), Err(Error::OutOfRange { .. })));
    let cq = provider.create_cq(device, 16).unwrap();
    let attr = |send, recv| QpAttr { send_cq: cq, recv_cq: cq, max_send_wr: send, max_recv_wr: recv, max_inline: 0 };
    assert!(matches!(provider.create_qp(id, &attr(16, 1)), Err(Error::OutOfRange { .. })));
    assert!(matches!(provider.create_qp(id, &attr(1, u32::MAX)), Err(Error::OutOfRange { .. })));
    assert!(matches!(provider.create_qp(id, &attr(0, 1)), Err(Error::OutOfRange { .. })));
    assert!(matches!(provider.connect(id, &ConnectParam::default()), Err(Error::InvalidState { .. })));
    let qp = provider.create_qp(id, &attr(8, 8)).unwrap();
    assert!(matches!(provider.destroy_cq(cq), Err(Error::InvalidState { .. })));
    assert!(matches!(provider.create_qp(id, &attr(1, 1)), Err(Error::InvalidState { .. })));
    let long = [0; 252];
    let param = ConnectParam { private_data: &long, ..Default::default() };
    assert!(matches!(provider.connect(id, &param), Err(Error::PrivateDataTooLong { len: 252, .. })));
    provider.destroy_id(id, Instant::now());
    provider.destroy_id(id, Instant::now());
    assert!(matches!(provider.post_send(qp, &[]), Err(PostError { error: Error::Stale { .. }, .. })));
    provider.destroy_cq(cq).unwrap();
    assert!(matches!(provider.destroy_cq(cq), Err(Error::Stale { .. })));
    let mut out = Vec::new();
    assert!(matches!(provider.poll_cq(cq, 1, &mut out), Err(Error::Stale { .. })));
}

/// A queue that is full takes what fits and says how much that was; the device may round its depth up.
fn a_full_queue_is_backpressure(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (active, _passive) = world.pair(to);
    let chain = vec![active.recv(0); 4096];
    match world.provider.post_recv(active.qp, &chain) {
        Err(PostError { posted, error: Error::QueueFull { queue: "receive", depth: DEPTH } }) => {
            println!("{posted} more receives than {DEPTH} were taken");
            assert!(posted < chain.len());
        }
        other => panic!("{other:?}"),
    }
}

fn reject_with_private_data(kind: Kind) {
    let mut world = World::new();
    let (listener, to) = world.listen(kind.address());
    for data in [&b"not today"[..], b""] {
        let (id, device) = world.resolved(to);
        let end = world.equip(id, device);
        world.provider.connect(id, &ConnectParam::default()).unwrap();
        let (request, of, _, peer, _) = world.connect_request();
        assert_eq!((of, peer.ip()), (listener, kind.address()));
        let too_long = world.provider.reject(request, &[0; 252], Instant::now());
        assert!(matches!(too_long, Err(Error::PrivateDataTooLong { .. })));
        world.provider.reject(request, data, Instant::now()).unwrap();
        match world.news() {
            CmEvent { id: of, kind: CmEventKind::Rejected { private_data } } if of == id => {
                assert!(private_data.starts_with(data), "{private_data:?}");
            }
            other => panic!("{other:?}"),
        }
        world.provider.disconnect(id, Instant::now()).unwrap();
        let flushed = world.flushed(&end, DEPTH as usize);
        assert!(flushed.iter().all(|wc| wc.status == WcStatus::Flushed));
        world.drop_end(&end);
    }
}

fn nobody_listens(kind: Kind) {
    let mut world = World::new();
    let (id, device) = world.resolved(SocketAddr::new(kind.address(), 9));
    let end = world.equip(id, device);
    quick("connect", || world.provider.connect(id, &ConnectParam::default())).unwrap();
    match world.news() {
        CmEvent { id: of, kind: CmEventKind::ConnectFailed(ConnectFailure::Refused) } if of == id => {}
        other => panic!("{other:?}"),
    }
    world.drop_end(&end);
}

fn no_route(kind: Kind) {
    let mut world = World::new();
    // The first is in no network of this host, the second is in one but is nobody.
    let beside = kind.variable("ADDR").rsplit_once('.').map(|(net, _)| format!("{net}.77")).unwrap();
    for nowhere in ["192.0.2.1".to_string(), beside] {
        let peer = SocketAddr::new(nowhere.parse().unwrap(), 9);
        let id = world.provider.resolve(peer, Instant::now() + Duration::from_secs(2)).unwrap();
        match world.event() {
            CmEvent { id: of, kind: CmEventKind::ConnectFailed(ConnectFailure::Unreachable(why)) } if of == id => {
                println!("{peer}: {why}");
            }
            other => panic!("{other:?}"),
        }
        world.provider.destroy_id(id, Instant::now());
    }
}

fn disconnect_flushes_everything_once(kind: Kind) {
    for (active_first, posted) in [(true, 0), (false, 0), (true, 8), (false, 8)] {
        let mut world = World::new();
        let (_, to) = world.listen(kind.address());
        let (active, passive) = world.pair(to);
        let (first, second) = if active_first { (active, passive) } else { (passive, active) };
        let sends: Vec<_> = (0..posted).map(|i| first.send(DEPTH as usize + i, 100)).collect();
        if !sends.is_empty() {
            world.provider.post_send(first.qp, &sends).unwrap();
        }
        world.provider.disconnect(first.id, Instant::now()).unwrap();
        world.provider.disconnect(first.id, Instant::now()).unwrap();
        world.flushed(&first, DEPTH as usize + posted);
        // On InfiniBand the first hears of its own disconnect when the second has answered.
        let mut told = Vec::new();
        while told.len() < 2 {
            match world.news() {
                CmEvent { id, kind: CmEventKind::Disconnected(cause) } if id == first.id => {
                    assert_eq!(cause, DisconnectCause::Local);
                    told.push(id);
                }
                CmEvent { id, kind: CmEventKind::Disconnected(cause) } => {
                    assert_eq!((id, cause), (second.id, DisconnectCause::Peer));
                    world.provider.disconnect(second.id, Instant::now()).unwrap();
                    told.push(id);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_ne!(told[0], told[1]);
        let got = world.flushed(&second, DEPTH as usize);
        println!("{} of {posted} arrived", got.iter().filter(|wc| wc.status.is_success()).count());
        world.drop_end(&first);
        world.drop_end(&second);
    }
}

fn destroying_without_disconnect_tells_the_peer(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (active, passive) = world.pair(to);
    quick("destroy_id", || world.drop_end(&active));
    world.disconnected(passive.id, &DisconnectCause::Peer);
    quick("destroy_id", || world.drop_end(&passive));
}

fn churn_leaves_nothing(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let mut baseline = 0;
    let start = Instant::now();
    for cycle in 0..210 {
        let (active, passive) = world.pair(to);
        let (first, second) = if cycle % 2 == 0 { (&active, &passive) } else { (&passive, &active) };
        if cycle % 3 == 0 {
            world.provider.disconnect(first.id, Instant::now()).unwrap();
            world.disconnected_either(&[first.id, second.id]);
        }
        world.drop_end(first);
        world.drop_end(second);
        world.memories.clear();
        while world.provider.next_cm_event(Instant::now()).unwrap().is_some() {}
        if cycle == 9 {
            baseline = descriptors();
        }
    }
    println!("200 cycles in {:?}", start.elapsed());
    assert!(descriptors() <= baseline, "{} of {baseline}", descriptors());
    drop(world);
    assert!(descriptors() < baseline);
}

impl World {
    fn disconnected_either(&mut self, ids: &[CmId]) {
        match self.news() {
            CmEvent { id, kind: CmEventKind::Disconnected(_) } if ids.contains(&id) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Starts this program again as a peer that echoes one connection and waits to be killed.
fn peer(kind: Kind) -> (Child, SocketAddr) {
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program)
        .args(["--exact", "peer_process", "--ignored", "--nocapture", "--test-threads=1"])
        .env("RDMA_TEST_PEER", kind.address().to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let address = loop {
        let line = lines.next().expect("the peer says where it listens").unwrap();
        if let Some(at) = line.find("listening ") {
            break line[at + 10..].trim().parse().unwrap();
        }
    };
    thread::spawn(move || lines.for_each(drop));
    (child, address)
}

#[test]
#[ignore = "the other process of killed_peer"]
fn peer_process() {
    let address = std::env::var("RDMA_TEST_PEER").expect("started by another test").parse().unwrap();
    let mut world = World::new();
    let (_, to) = world.listen(address);
    println!("\nlistening {to}");
    let (id, _, device, _, _) = world.connect_request();
    let end = world.equip(id, device);
    world.provider.accept(id, &ConnectParam::default(), Instant::now()).unwrap();
    loop {
        for wc in world.completions(end.cq) {
            if wc.opcode == WcOpcode::Recv && wc.status.is_success() {
                world.provider.post_recv(end.qp, &[end.recv(wc.wr_id as usize)]).unwrap();
                world.provider.post_send(end.qp, &[end.send(DEPTH as usize, 4)]).unwrap();
            }
        }
    }
}

fn killed_peer(kind: Kind) {
    let mut world = World::new();
    let (mut child, to) = peer(kind);
    let (id, device) = world.resolved(to);
    let end = world.equip(id, device);
    world.provider.connect(id, &ConnectParam::default()).unwrap();
    assert!(matches!(world.news().kind, CmEventKind::Established { .. }));
    for _ in 0..100 {
        world.provider.post_send(end.qp, &[end.send(DEPTH as usize, 4)]).unwrap();
        let mut left = 2;
        while left > 0 {
            for wc in world.completions(end.cq) {
                assert_eq!(wc.status, WcStatus::Success);
                if wc.opcode == WcOpcode::Recv {
                    world.provider.post_recv(end.qp, &[end.recv(wc.wr_id as usize)]).unwrap();
                }
                left -= 1;
            }
        }
    }
    child.kill().unwrap();
    let killed = Instant::now();
    loop {
        let event = world.news();
        println!("after {:?}: {event:?}", killed.elapsed());
        if let CmEventKind::Disconnected(cause) = event.kind {
            assert_eq!((event.id, cause), (id, DisconnectCause::Peer));
            break;
        }
    }
    assert!(killed.elapsed() < Duration::from_secs(2), "{:?}", killed.elapsed());
    world.provider.disconnect(id, Instant::now()).unwrap();
    world.flushed(&end, DEPTH as usize);
    world.drop_end(&end);
    child.wait().unwrap();
}

/// A peer that takes the TCP connection and never answers, and one whose SYN is lost: nothing may block meanwhile.
fn a_silent_peer_blocks_nothing(kind: Kind) {
    // The library opens a device once and keeps it.
    World::new().provider.reaches(SocketAddr::new(kind.address(), 9), TIMEOUT).unwrap();
    let before = descriptors();
    let mut world = World::new();
    let silent = TcpListener::bind((kind.variable("PEER").parse::<IpAddr>().unwrap(), 0)).unwrap();
    let lost = kind.variable("ADDR").rsplit_once('.').map(|(net, _)| format!("{net}.78")).unwrap();
    let neighbour = format!("neigh replace {lost} lladdr 02:00:00:00:00:78 dev {}", kind.variable("NETDEV"));
    assert!(Command::new("ip").args(neighbour.split(' ')).status().unwrap().success());
    let mut ends = Vec::new();
    let mut peers = vec![SocketAddr::new(lost.parse().unwrap(), 9)];
    if kind == Kind::Siw {
        peers.push(silent.local_addr().unwrap());
    }
    for to in peers {
        let (id, device) = world.resolved(to);
        let end = world.equip(id, device);
        quick("connect", || world.provider.connect(id, &ConnectParam::default())).unwrap();
        ends.push(end);
    }
    let early = world.event_within(Duration::from_secs(1));
    assert!(early.is_none(), "{early:?}");
    // Others go on as if nothing was.
    let (_, to) = world.listen(kind.address());
    quick("another connection", || world.pair(to));
    quick("disconnect", || world.provider.disconnect(ends[0].id, Instant::now())).unwrap();
    world.flushed(&ends[0], DEPTH as usize);
    for end in &ends {
        quick("destroy_id", || world.provider.destroy_id(end.id, Instant::now()));
    }
    quick("drop", || drop(world));
    drop(silent);
    // What still waited in the kernel ends, too: the lost SYN is interrupted, the handshake has a time limit there.
    let dropped = Instant::now();
    while descriptors() > before {
        assert!(dropped.elapsed() < Duration::from_secs(15), "{} of {before}", descriptors());
        thread::sleep(Duration::from_millis(20));
    }
    println!("all is given back after {:?}", dropped.elapsed());
}

/// Two providers of one process share the library's device, and its asynchronous events.
fn two_providers(kind: Kind) {
    let (mut first, mut second) = (World::new(), World::new());
    for (here, there) in [(&mut first, &mut second), (&mut World::new(), &mut World::new())] {
        let (_, to) = there.listen(kind.address());
        let (id, device) = here.resolved(to);
        let active = here.equip(id, device);
        here.provider.connect(id, &ConnectParam::default()).unwrap();
        let (id, _, device, _, _) = there.connect_request();
        let passive = there.equip(id, device);
        there.provider.accept(id, &ConnectParam::default(), Instant::now()).unwrap();
        assert!(matches!(here.news().kind, CmEventKind::Established { .. }));
        assert!(matches!(there.news().kind, CmEventKind::Established { .. }));
        here.provider.post_send(active.qp, &[active.send(DEPTH as usize, 5)]).unwrap();
        assert_eq!(here.completion(active.cq).status, WcStatus::Success);
        assert_eq!(there.completion(passive.cq).byte_len, 5);
        here.drop_end(&active);
        there.disconnected(passive.id, &DisconnectCause::Peer);
    }
}

/// Both lose the device; the last one lets it go. Then the other device goes, too, which nobody has used.
fn removal_under_two_providers(kind: Kind) {
    let mut worlds = [World::new(), World::new()];
    let other = if kind == Kind::Siw { Kind::Rxe } else { Kind::Siw };
    for world in &mut worlds {
        let (listener, to) = world.listen(kind.address());
        let (active, passive) = world.pair(to);
        for id in [active.id, passive.id, listener] {
            world.provider.destroy_id(id, Instant::now());
        }
        while world.provider.next_cm_event(Instant::now()).unwrap().is_some() {}
    }
    for kind in [kind, other] {
        let device = kind.variable("DEV");
        let start = Instant::now();
        let mut removal = Command::new("rdma").args(["link", "del", &device]).spawn().unwrap();
        while removal.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(10), "the device is not released");
            for world in &mut worlds {
                let _ = world.event_within(Duration::from_millis(20));
            }
        }
        println!("{device}: gone after {:?}", start.elapsed());
    }
    for kind in [kind, other] {
        add_device(kind);
    }
}

fn add_device(kind: Kind) {
    let (device, netdev) = (kind.variable("DEV"), kind.variable("NETDEV"));
    let add = ["link", "add", &device, "type", &kind.name().to_lowercase(), "netdev", &netdev];
    assert!(Command::new("rdma").args(add).status().unwrap().success());
    wait_until_active(&device);
}

fn every_family(kind: Kind) {
    let mut world = World::new();
    let six: IpAddr = kind.variable("ADDR6").parse().unwrap();
    let (_, to) = world.listen(six);
    let (active, passive) = world.pair(to);
    world.drop_end(&active);
    world.drop_end(&passive);
    // A wildcard serves every device.
    let listener = world.provider.listen("0.0.0.0:0".parse().unwrap(), 4).unwrap();
    let port = world.provider.local_address(listener).unwrap().port();
    while world.event_within(Duration::from_millis(100)).is_some() {}
    world.pair(SocketAddr::new(kind.address(), port));
}

fn removal_with_everything_open(kind: Kind) {
    let device = kind.variable("DEV");
    let mut world = World::new();
    let wildcard = world.provider.listen("0.0.0.0:0".parse().unwrap(), 4).unwrap();
    let port = world.provider.local_address(wildcard).unwrap().port();
    for round in 0..3 {
        let (listener, to) = world.listen(kind.address());
        let mut told = vec![listener];
        let mut ends = Vec::new();
        if round < 2 {
            let (active, passive) = world.pair(to);
            told.extend([active.id, passive.id]);
            ends = vec![active, passive];
        } else {
            // Only what the provider keeps for itself is left: regions, queues.
            let (active, passive) = world.pair(to);
            for id in [active.id, passive.id, listener] {
                world.provider.destroy_id(id, Instant::now());
            }
            told.clear();
        }
        let start = Instant::now();
        let mut removal = Command::new("rdma").args(["link", "del", &device]).spawn().unwrap();
        while !told.is_empty() {
            let event = world.event();
            match event.kind {
                CmEventKind::DeviceRemoval => told.retain(|&id| id != event.id),
                CmEventKind::Disconnected(_) | CmEventKind::TimewaitExit => {}
                other => panic!("{other:?}"),
            }
        }
        println!("{device}: told after {:?}", start.elapsed());
        for end in &ends {
            quick("disconnect", || world.provider.disconnect(end.id, Instant::now())).unwrap();
            quick("destroy_id", || world.provider.destroy_id(end.id, Instant::now()));
        }
        if round < 2 {
            quick("destroy_id", || world.provider.destroy_id(listener, Instant::now()));
        }
        // The loop goes on, and the removal ends while this process lives.
        while removal.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(10), "the device is not released");
            let _ = world.event_within(Duration::from_millis(20));
        }
        println!("{device}: gone after {:?}", start.elapsed());
        for end in &ends {
            // Handles of what went with the device are still good to be given back, and queues are empty.
            assert!(world.poll(end.cq).is_empty());
            world.provider.req_notify(end.cq).unwrap();
            world.provider.destroy_cq(end.cq).unwrap();
            world.provider.deregister(end.region.id).unwrap();
        }
        world.memories.clear();
        world.watched.clear();
        add_device(kind);
        // The wildcard listener serves the device that came back.
        let (active, passive) = world.pair(SocketAddr::new(kind.address(), port));
        world.drop_end(&active);
        world.drop_end(&passive);
        while world.event_within(Duration::from_millis(100)).is_some() {}
    }
}

fn wait_until_active(device: &str) {
    let state = format!("/sys/class/infiniband/{device}/ports/1/state");
    let until = Instant::now() + TIMEOUT;
    while !std::fs::read_to_string(&state).is_ok_and(|state| state.contains("ACTIVE")) {
        assert!(Instant::now() < until, "{device} does not come up");
        thread::sleep(Duration::from_millis(20));
    }
}

macro_rules! on_each_device {
    ($($test:ident)*) => {
        mod siw {
            $(#[test] fn $test() { let _alone = super::alone(); super::$test(super::Kind::Siw); })*
        }
        mod rxe {
            $(#[test] fn $test() { let _alone = super::alone(); super::$test(super::Kind::Rxe); })*
        }
    };
}

on_each_device! {
    open_and_reach
    a_thousand_messages
    a_chain_is_one_post
    one_sided
    limits_are_errors
    a_full_queue_is_backpressure
    reject_with_private_data
    nobody_listens
    no_route
    disconnect_flushes_everything_once
    destroying_without_disconnect_tells_the_peer
    churn_leaves_nothing
    killed_peer
    a_silent_peer_blocks_nothing
    every_family
    two_providers
    removal_under_two_providers
    removal_with_everything_open
}
