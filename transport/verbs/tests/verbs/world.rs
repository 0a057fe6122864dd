//! The helpers of all tests: devices, connected pairs of ends, memory, and a loop that drives the provider in place of
//! a reactor.

use std::net::{IpAddr, SocketAddr};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rdma_transport::cm::{ListenParam, PathOptions};
use rdma_transport::cq::{CqAttr, Notify};
use rdma_transport::provider::Channel;
use rdma_transport::wr::RemoteAddress;
use rdma_transport::{
    Access, AsyncEvent, CmEvent, CmEventKind, CmId, ConnectParam, CqId, DeviceId, DisconnectCause, Memory,
    MemoryRegion, Provider, QpAttr, QpId, ReadDepth, RecvWr, SendFlags, SendOp, SendWr, Sge, SgeList, WcStatus,
    WorkCompletion,
};
use rdma_transport_verbs::Verbs;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);
pub(crate) const DEPTH: u32 = 32;
pub(crate) const SLOT: usize = 256;
/// The length of an end's memory, in bytes. The first half has the slots of its receives, the second half those of its
/// sends.
pub(crate) const MEMORY: usize = 2 * DEPTH as usize * SLOT;

/// A kind of device. The names of the kinds are those in `tests/vm/run.sh`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Siw,
    Rxe,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Siw => "SIW",
            Self::Rxe => "RXE",
        }
    }

    pub(crate) fn variable(self, what: &str) -> String {
        let name = format!("RDMA_{}_{what}", self.name());
        std::env::var(&name).unwrap_or_else(|_| panic!("{name} is not set: run this with tests/vm/run.sh"))
    }

    /// Returns the full name of a test on this kind of device, so that another process can run only that test.
    pub(crate) fn test(self, module: &str, test: &str) -> String {
        format!("{module}::{}::{test}", self.name().to_lowercase())
    }

    pub(crate) fn address(self) -> IpAddr {
        self.variable("ADDR").parse().unwrap()
    }
}

/// If a test has started this process, returns the address that the process must use. Returns `None` if a user has
/// started the process.
pub(crate) fn other_process() -> Option<IpAddr> {
    Some(std::env::var("RDMA_TEST_PEER").ok()?.parse().unwrap())
}

/// Waits until no other test runs. Other tests wait until the guard is dropped. Tests must not run at the same time, because they share the
/// context of a device, count descriptors, and remove devices.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let _ = env_logger_free();
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the library log its warnings to standard error. The variable `RDMA_TEST_LOG` can select another level.
pub(crate) fn env_logger_free() -> Result<(), log::SetLoggerError> {
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
pub(crate) struct End {
    pub(crate) id: CmId,
    pub(crate) device: DeviceId,
    pub(crate) qp: QpId,
    pub(crate) cq: CqId,
    pub(crate) region: MemoryRegion,
    pub(crate) base: NonNull<u8>,
}

impl End {
    pub(crate) fn sge(&self, slot: usize, len: usize) -> Sge {
        assert!((slot + 1) * SLOT <= MEMORY && len <= SLOT);
        // SAFETY: the slot is within the end's memory, which exists as long as the world. The tests do not use a slot while it is posted.
        unsafe { Sge::new(self.base.add(slot * SLOT), len as u32, self.region.local_key) }
    }

    pub(crate) fn write(&self, slot: usize, bytes: &[u8]) {
        // SAFETY: the bytes are within the slot, and the slot is not posted.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.sge(slot, bytes.len()).address(), bytes.len()) }
    }

    pub(crate) fn read(&self, slot: usize, len: usize) -> Vec<u8> {
        // SAFETY: the bytes are within the slot, and the receive into it has completed.
        unsafe { std::slice::from_raw_parts(self.sge(slot, len).address(), len) }.to_vec()
    }

    pub(crate) fn recv(&self, slot: usize) -> RecvWr {
        RecvWr { wr_id: slot as u64, sges: SgeList::one(self.sge(slot, SLOT)) }
    }

    pub(crate) fn send(&self, slot: usize, len: usize) -> SendWr {
        self.op(SendOp::Send, slot, len)
    }

    pub(crate) fn op(&self, op: SendOp, slot: usize, len: usize) -> SendWr {
        let sges = SgeList::one(self.sge(slot, len));
        SendWr { wr_id: 1000 + slot as u64, op, sges, flags: SendFlags::SIGNALED }
    }
}

/// A registered memory of a test.
#[derive(Debug)]
pub(crate) struct Area {
    pub(crate) memory: Arc<Memory>,
    pub(crate) region: MemoryRegion,
}

impl Area {
    pub(crate) fn sge(&self, offset: usize, len: usize) -> Sge {
        assert!(offset + len <= self.memory.len());
        // SAFETY: the entry is within the memory, which the region keeps alive. The tests do not use the bytes while they are posted.
        unsafe { Sge::new(NonNull::new(self.memory.as_ptr().add(offset)).unwrap(), len as u32, self.region.local_key) }
    }

    pub(crate) fn remote(&self, offset: usize) -> RemoteAddress {
        RemoteAddress { address: self.memory.as_ptr() as u64 + offset as u64, key: self.region.remote_key }
    }

    /// Returns the bytes of the memory. The caller ensures that no part of it is posted.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the region keeps the memory alive, and the caller ensures that no part of it is posted.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.memory.len()) }
    }

    /// Fills the memory with bytes that depend on their offset and on `seed`.
    pub(crate) fn fill(&self, seed: u32) {
        for at in 0..self.memory.len() {
            let byte = (at as u32 ^ seed).wrapping_mul(0x9E37_79B1) >> 24;
            // SAFETY: the byte is within the memory, and no part of the memory is posted.
            unsafe { self.memory.as_ptr().add(at).write(byte as u8) }
        }
    }

    pub(crate) fn word(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.bytes()[offset..offset + 8].try_into().unwrap())
    }

    pub(crate) fn set_word(&self, offset: usize, value: u64) {
        assert!(offset + 8 <= self.memory.len());
        // SAFETY: the word is within the memory, and no part of the memory is posted.
        unsafe { self.memory.as_ptr().add(offset).cast::<u64>().write_unaligned(value) }
    }
}

/// A provider, and a loop that drives it in place of a reactor.
pub(crate) struct World {
    pub(crate) provider: Verbs,
    pub(crate) poll: Poll,
    pub(crate) events: Events,
    pub(crate) memories: Vec<Arc<Memory>>,
    pub(crate) watched: Vec<DeviceId>,
    pub(crate) access: Access,
    pub(crate) max_inline: u32,
    /// The read depth (IRD and ORD) that both ends request.
    pub(crate) read_depth: ReadDepth,
    /// The ids whose events [`World::news`] ignores.
    pub(crate) ignored: Vec<CmId>,
}

impl World {
    pub(crate) fn new() -> Self {
        let provider = Verbs::open().unwrap().with_entropy(Box::new(|octets| octets.fill(0x5a)));
        let poll = Poll::new().unwrap();
        let fd = provider.channel(Channel::ConnectionManager).unwrap();
        poll.registry().register(&mut SourceFd(&fd), Token(0), Interest::READABLE).unwrap();
        let (events, access) = (Events::with_capacity(8), Access::LOCAL_WRITE);
        Self {
            provider,
            poll,
            events,
            memories: Vec::new(),
            watched: Vec::new(),
            access,
            max_inline: 0,
            read_depth: ReadDepth::default(),
            ignored: Vec::new(),
        }
    }

    /// Waits for the next event, and sleeps until the channel is readable. Returns `None` if no event arrives within
    /// `timeout`.
    pub(crate) fn event_within(&mut self, timeout: Duration) -> Option<CmEvent> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(event) = self.provider.next_cm_event(Instant::now()).unwrap() {
                return Some(event);
            }
            let left = until.checked_duration_since(Instant::now())?;
            self.poll.poll(&mut self.events, Some(left)).unwrap();
        }
    }

    pub(crate) fn event(&mut self) -> CmEvent {
        self.event_within(TIMEOUT).expect("an event within the time limit")
    }

    /// Waits for the next event. Ignores `TimewaitExit` and the events of the ids in `ignored`.
    pub(crate) fn news(&mut self) -> CmEvent {
        loop {
            let event = self.event();
            if !matches!(event.kind, CmEventKind::TimewaitExit) && !self.ignored.contains(&event.id) {
                return event;
            }
        }
    }

    pub(crate) fn listen(&mut self, address: IpAddr) -> (CmId, SocketAddr) {
        let listener = self.provider.listen(SocketAddr::new(address, 0), &ListenParam::default()).unwrap();
        let bound = self.provider.local_address(listener).unwrap();
        assert_ne!(bound.port(), 0);
        (listener, SocketAddr::new(address, bound.port()))
    }

    pub(crate) fn resolve(&mut self, peer: SocketAddr) -> CmId {
        self.provider.resolve(peer, &PathOptions::default(), Instant::now() + TIMEOUT).unwrap()
    }

    pub(crate) fn resolved(&mut self, peer: SocketAddr) -> (CmId, DeviceId) {
        let id = self.resolve(peer);
        match self.news() {
            CmEvent { id: of, kind: CmEventKind::Resolved { device } } if of == id => (id, device),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn watch(&mut self, device: DeviceId) {
        if !self.watched.contains(&device) {
            let fd = self.provider.channel(Channel::Completions(device)).unwrap();
            let token = Token(1 + device.0 as usize);
            self.poll.registry().register(&mut SourceFd(&fd), token, Interest::READABLE).unwrap();
            self.watched.push(device);
        }
    }

    /// Creates a queue pair for `id`, with separate memory and a separate completion queue, and posts receives.
    pub(crate) fn equip(&mut self, id: CmId, device: DeviceId) -> End {
        self.watch(device);
        let memory = Arc::new(Memory::new(MEMORY).unwrap());
        let region = self.provider.register(device, &memory, 0..memory.len(), self.access).unwrap();
        let base = NonNull::new(memory.as_ptr()).unwrap();
        self.memories.push(memory);
        let cq = self.provider.create_cq(device, &CqAttr::new(2 * DEPTH)).unwrap();
        let attr = QpAttr {
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_inline: self.max_inline,
            max_recv_sge: 0,
            srq: None,
        };
        let qp = self.provider.create_qp(id, &attr).unwrap();
        let end = End { id, device, qp, cq, region, base };
        let receives: Vec<_> = (0..DEPTH as usize).map(|slot| end.recv(slot)).collect();
        self.provider.post_recv(qp, &receives).unwrap();
        end
    }

    pub(crate) fn connect_request(&mut self) -> (CmId, CmId, DeviceId, SocketAddr, Box<[u8]>) {
        match self.news() {
            CmEvent { id, kind: CmEventKind::ConnectRequest { listener, device, peer, private_data, .. } } => {
                (id, listener, device, peer, private_data)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Connects to `to`, and accepts the connection. Returns both ends, the active one first.
    pub(crate) fn pair(&mut self, to: SocketAddr) -> (End, End) {
        let (id, device) = self.resolved(to);
        let active = self.equip(id, device);
        let ReadDepth { responder_resources, initiator_depth } = self.read_depth;
        let param =
            ConnectParam { private_data: b"question", responder_resources, initiator_depth, ..ConnectParam::default() };
        self.provider.connect(id, &param).unwrap();
        let (id, _, device, _, private_data) = self.connect_request();
        assert!(private_data.starts_with(b"question"));
        let passive = self.equip(id, device);
        let param = ConnectParam { private_data: b"answer", ..param };
        self.provider.accept(id, &param, Instant::now()).unwrap();
        for _ in 0..2 {
            match self.news() {
                CmEvent { id, kind: CmEventKind::Established { private_data, .. } } if id == active.id => {
                    assert!(private_data.starts_with(b"answer"));
                }
                CmEvent { id, kind: CmEventKind::Established { private_data, .. } } if id == passive.id => {
                    assert!(private_data.is_empty());
                }
                other => panic!("{other:?}"),
            }
        }
        (active, passive)
    }

    /// Posts an operation, and waits for its completion. The completion may have an error status.
    pub(crate) fn done(&mut self, end: &End, op: SendOp, sges: SgeList, flags: SendFlags) -> WorkCompletion {
        let wr = SendWr { wr_id: 4711, op, sges, flags: SendFlags::SIGNALED | flags };
        self.provider.post_send(end.qp, &[wr]).unwrap();
        loop {
            for wc in self.completions(end.cq) {
                if wc.wr_id == wr.wr_id {
                    return wc;
                }
                assert_eq!(wc.status, WcStatus::Flushed, "{wc:?}");
            }
        }
    }

    /// Posts an operation like [`World::done`], and fails the test if the operation fails.
    pub(crate) fn good(&mut self, end: &End, op: SendOp, sge: Sge) {
        let wc = self.done(end, op, SgeList::one(sge), SendFlags::empty());
        assert_eq!(wc.status, WcStatus::Success, "{op:?}");
    }

    /// Allocates memory, and registers it on the device of `end`.
    pub(crate) fn area(&mut self, end: &End, len: usize, access: Access) -> Area {
        self.area_on(end.device, len, access)
    }

    pub(crate) fn area_on(&mut self, device: DeviceId, len: usize, access: Access) -> Area {
        let memory = Arc::new(Memory::new(len.max(1)).unwrap());
        let region = self.provider.register(device, &memory, 0..memory.len(), access).unwrap();
        Area { memory, region }
    }

    /// Waits for an event of a device for which `wanted` returns `Some`, and returns the value.
    pub(crate) fn device_event<T>(&mut self, wanted: impl Fn(AsyncEvent) -> Option<T>) -> T {
        let until = Instant::now() + TIMEOUT;
        loop {
            while let Some(event) = self.provider.device_events().unwrap().next_device_event() {
                println!("{event:?}");
                if let Some(found) = wanted(event) {
                    return found;
                }
            }
            assert!(Instant::now() < until, "the device does not report the event");
            let _ = self.event_within(Duration::from_millis(10));
        }
    }

    pub(crate) fn poll(&mut self, cq: CqId) -> Vec<WorkCompletion> {
        let mut out = Vec::new();
        while self.provider.poll_cq(cq, 7, &mut out).unwrap() > 0 {}
        out
    }

    /// Waits until `cq` has completions, and returns them. Sleeps until the completion channel is readable.
    pub(crate) fn completions(&mut self, cq: CqId) -> Vec<WorkCompletion> {
        let until = Instant::now() + TIMEOUT;
        loop {
            let out = self.poll(cq);
            if !out.is_empty() {
                return out;
            }
            self.provider.req_notify(cq, Notify::Any).unwrap();
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

    /// Arms `cq`, and sleeps until its event arrives, but at most for 20 ms. The limit is necessary because a completion from before the
    /// queue was armed raises no event.
    pub(crate) fn await_completion(&mut self, cq: CqId) {
        self.provider.req_notify(cq, Notify::Any).unwrap();
        self.poll.poll(&mut self.events, Some(Duration::from_millis(20))).unwrap();
        for device in self.watched.clone() {
            while self.provider.next_completion_event(device).unwrap().is_some() {}
        }
    }

    pub(crate) fn completion(&mut self, cq: CqId) -> WorkCompletion {
        let mut all = self.completions(cq);
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    /// Waits until all `wanted` work requests of a disconnected end have completed, and returns the completions. Fails the test if a work
    /// request does not complete, or completes twice.
    pub(crate) fn flushed(&mut self, end: &End, wanted: usize) -> Vec<WorkCompletion> {
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

    pub(crate) fn drop_end(&mut self, end: &End) {
        self.provider.destroy_id(end.id, Instant::now()).unwrap();
        self.provider.destroy_cq(end.cq).unwrap();
        self.provider.deregister(end.region.id).unwrap();
    }

    pub(crate) fn disconnected(&mut self, id: CmId, wanted: &DisconnectCause) {
        match self.news() {
            CmEvent { id: of, kind: CmEventKind::Disconnected(cause) } => assert_eq!((of, &cause), (id, wanted)),
            other => panic!("{other:?}"),
        }
    }
}

/// Runs `call`, and fails the test if the call slept for 4.5 s or more. A call that waits for a peer would sleep longer, because the kernel
/// waits at least five seconds. The time for which this thread waited for a processor does not count, because it may be long on a busy
/// machine.
pub(crate) fn quick<T>(what: &str, call: impl FnOnce() -> T) -> T {
    let (start, before) = (Instant::now(), busy());
    let result = call();
    let slept = start.elapsed().saturating_sub(busy() - before);
    assert!(slept < Duration::from_millis(4500), "{what} slept for {slept:?}");
    result
}

/// Returns the time for which this thread has run or has waited for a processor.
fn busy() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let times = text.split_whitespace().take(2).map(|word| word.parse::<u64>().unwrap());
    Duration::from_nanos(times.sum())
}

pub(crate) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

pub(crate) fn wait_until_active(device: &str) {
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
            $(#[test] fn $test() { let _alone = crate::world::alone(); super::$test(crate::world::Kind::Siw); })*
        }
        mod rxe {
            $(#[test] fn $test() { let _alone = crate::world::alone(); super::$test(crate::world::Kind::Rxe); })*
        }
    };
}
pub(crate) use on_each_device;
