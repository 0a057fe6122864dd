//! Two connected ends. Each end has its own provider. One thread drives both ends in alternation.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Instant;

use rdma_transport::cm::{ListenParam, PathOptions};
use rdma_transport::cq::CqAttr;
use rdma_transport::wr::RemoteAddress;
use rdma_transport::{
    Access, CmEvent, CmEventKind, CmId, ConnectParam, CqId, DeviceId, DisconnectCause, Drive, MemoryRegion, Provider,
    QpAttr, QpId, SendFlags, SendOp, SrqId, Station, WcOpcode, WcStatus, WorkCompletion,
};

use crate::patience::PATIENCE;

/// The largest number of attempts to connect.
const TRIES: u32 = 5;
/// The number of work requests that each queue can hold.
pub const DEPTH: u32 = 128;
/// All access rights.
pub const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_WRITE);

/// One end: a provider with memory, and the events and completions that it has returned.
#[derive(Debug)]
pub struct End {
    /// The provider, with the memory of this end.
    pub station: Station,
    /// The events that no test has consumed yet, the oldest first.
    pub events: Vec<CmEvent>,
    /// The completions that no test has consumed yet, the oldest first.
    pub done: Vec<WorkCompletion>,
    /// The id of the current connection.
    pub id: CmId,
    /// The queue pair of the current connection.
    pub qp: QpId,
    /// The device of the current connection.
    pub device: DeviceId,
    cq: Option<CqId>,
    /// A memory region that covers the whole memory, with all rights.
    region: Option<MemoryRegion>,
    /// The shared receive queue; `None` if the queue pair has its own receives.
    pub srq: Option<SrqId>,
}

impl End {
    /// Returns an end whose memory has `memory` bytes.
    ///
    /// # Panics
    /// Panics if the memory cannot be allocated.
    #[must_use]
    pub fn new(provider: Box<dyn Provider>, memory: usize) -> Self {
        let station = Station::new(provider, memory).expect("memory");
        let key = rdma_transport::slab::Key::new(u32::MAX, u32::MAX);
        let (events, done) = (Vec::new(), Vec::new());
        Self {
            station,
            events,
            done,
            id: CmId(key),
            qp: QpId(key),
            device: DeviceId(0),
            cq: None,
            region: None,
            srq: None,
        }
    }

    /// Polls the available events and completions.
    ///
    /// # Panics
    /// Panics if the provider fails.
    #[allow(clippy::disallowed_methods)]
    pub fn turn(&mut self) {
        let provider = self.station.provider();
        provider.progress(Instant::now(), Drive::Full);
        while let Some(event) = provider.next_cm_event(Instant::now()).expect("events") {
            self.events.push(event);
        }
        if let Some(cq) = self.cq {
            provider.poll_cq(cq, 64, &mut self.done).expect("completions");
        }
    }

    /// Listens on a free port of `address`. Returns the listener, and its address with the port.
    ///
    /// # Panics
    /// Panics if the provider cannot listen.
    pub fn listen(&mut self, address: SocketAddr) -> (CmId, SocketAddr) {
        let listener = self.station.provider().listen(address, &ListenParam::default()).expect("a listener");
        let port = self.station.provider().local_address(listener).expect("an address").port();
        (listener, SocketAddr::new(address.ip(), port))
    }

    /// Creates a queue pair for the connection `id`. The first call also creates the queues and the memory region.
    ///
    /// # Panics
    /// Panics if a call of the provider fails.
    pub fn equip(&mut self, id: CmId, device: DeviceId) {
        let cq = self
            .cq
            .unwrap_or_else(|| self.station.provider().create_cq(device, &CqAttr::new(16 * DEPTH)).expect("a queue"));
        self.cq = Some(cq);
        if self.region.is_none() {
            let region = self.station.expose(device, ALL).expect("a region");
            self.station.use_key(region.local_key);
            self.region = Some(region);
        }
        let attr = QpAttr {
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_inline: 0,
            max_recv_sge: 0,
            srq: None,
        };
        let provider = self.station.provider();
        self.qp = match self.srq {
            Some(srq) => provider.create_qp(id, &QpAttr { srq: Some(srq), ..attr }).expect("a queue pair"),
            None => provider.create_qp(id, &attr).expect("a queue pair"),
        };
        (self.id, self.device) = (id, device);
    }

    /// Returns the completion queue that all queue pairs use, or `None` before the first queue pair is created.
    #[must_use]
    pub const fn cq(&self) -> Option<CqId> {
        self.cq
    }

    /// Returns the remote address of a position in this end's memory, for operations of the peer.
    ///
    /// # Panics
    /// Panics if this end has no queue pair yet.
    #[must_use]
    pub fn remote(&self, offset: usize) -> RemoteAddress {
        let region = self.region.expect("a region");
        RemoteAddress { address: self.station.address(offset), key: region.remote_key }
    }

    /// Registers the memory of this end again, with the rights `access` and with a new key. Returns the new region, and the remote address
    /// of position `offset` in it.
    ///
    /// # Panics
    /// Panics if the device refuses.
    pub fn expose(&mut self, access: Access, offset: usize) -> (MemoryRegion, RemoteAddress) {
        let region = self.station.expose(self.device, access).expect("a region");
        (region, RemoteAddress { address: self.station.address(offset), key: region.remote_key })
    }

    /// Posts a receive into these parts of the memory.
    ///
    /// # Panics
    /// Panics if the provider refuses.
    pub fn recv(&mut self, wr_id: u64, parts: &[Range<usize>]) {
        match self.srq {
            Some(srq) => self.station.post_srq_recv(srq, wr_id, parts).expect("room"),
            None => self.station.post_recv(self.qp, wr_id, parts).expect("room"),
        }
    }

    /// Posts a signaled work request to the send queue.
    ///
    /// # Panics
    /// Panics if the provider refuses.
    pub fn post(&mut self, wr_id: u64, op: SendOp, parts: &[Range<usize>], flags: SendFlags) {
        let flags = flags | SendFlags::SIGNALED;
        self.station.post_send(self.qp, wr_id, op, parts, flags).unwrap_or_else(|error| panic!("{op:?}: {error}"));
    }

    /// Fills a range of the memory with bytes that depend on their position and on `salt`.
    ///
    /// # Panics
    /// Panics if the range is outside of the memory.
    pub fn fill(&mut self, range: Range<usize>, salt: u8) {
        let bytes: Vec<u8> = (0..range.len()).map(|at| octet(at, salt)).collect();
        self.station.write(range.start, &bytes).expect("a part of the memory");
    }

    /// Sets a range of the memory to zero.
    ///
    /// # Panics
    /// Panics if the range is outside of the memory.
    pub fn clear(&mut self, range: Range<usize>) {
        self.station.write(range.start, &vec![0; range.len()]).expect("a part of the memory");
    }

    /// Checks that a range of the memory has the bytes that [`End::fill`] writes.
    ///
    /// # Panics
    /// Panics if it has other bytes.
    #[track_caller]
    pub fn check(&mut self, range: Range<usize>, salt: u8, what: &str) {
        let mut bytes = Vec::new();
        self.station.read(range, &mut bytes).expect("a part of the memory");
        let wrong = bytes.iter().enumerate().find(|&(at, &byte)| byte != octet(at, salt));
        assert_eq!(wrong, None, "{what}: byte {:?} of {}", wrong.map(|(at, _)| at), bytes.len());
    }

    /// Checks that a range of the memory is zero.
    ///
    /// # Panics
    /// Panics if a byte of the range is not zero.
    #[track_caller]
    pub fn check_clear(&mut self, range: Range<usize>, what: &str) {
        let mut bytes = Vec::new();
        self.station.read(range, &mut bytes).expect("a part of the memory");
        assert_eq!(bytes.iter().position(|&byte| byte != 0), None, "{what}: memory outside was touched");
    }

    /// Removes and returns the completion of a work request, or returns `None` if it has not completed.
    fn take(&mut self, wr_id: u64) -> Option<WorkCompletion> {
        let at = self.done.iter().position(|wc| wc.wr_id == wr_id)?;
        Some(self.done.remove(at))
    }

    fn take_event(&mut self, is: impl Fn(&CmEventKind) -> bool) -> Option<CmEvent> {
        let at = self.events.iter().position(|event| is(&event.kind))?;
        Some(self.events.remove(at))
    }
}

/// Returns the byte for position `at`. It differs from the bytes for neighbouring positions, from the bytes one segment before and after,
/// and from the byte for the same position with another salt.
fn octet(at: usize, salt: u8) -> u8 {
    (at as u8).wrapping_mul(31) ^ ((at >> 8) as u8).wrapping_mul(7) ^ ((at >> 16) as u8) ^ salt
}

/// Two ends with a connection between them.
#[derive(Debug)]
pub struct Pair {
    /// The end that connects.
    pub active: End,
    /// The end that listens.
    pub passive: End,
}

/// The name of one of the ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The end that has connected.
    Active,
    /// The end that has listened.
    Passive,
}

impl Pair {
    /// Connects two ends. `depth` is the IRD and the ORD of both (the limits of RDMA Reads in flight).
    ///
    /// # Panics
    /// Panics if the connection fails, or is not established in time.
    #[must_use]
    pub fn connect(active: End, passive: End, address: SocketAddr, depth: u16) -> Self {
        Self::connect_through(active, passive, address, depth, |listening| listening)
    }

    /// Connects two ends. `through` converts the listener's address to the address at which the active end can reach it.
    ///
    /// # Panics
    /// Panics if the connection fails, or is not established in time.
    #[must_use]
    pub fn connect_through(
        active: End,
        passive: End,
        address: SocketAddr,
        depth: u16,
        through: impl FnOnce(SocketAddr) -> SocketAddr,
    ) -> Self {
        let mut pair = Self { active, passive };
        let (listener, listening) = pair.passive.listen(address);
        pair.join(listener, through(listening), depth);
        #[allow(clippy::disallowed_methods)]
        pair.passive.station.provider().destroy_id(listener, Instant::now()).unwrap();
        pair
    }

    /// Opens another connection between the two ends. The new connection becomes the current connection of both ends.
    ///
    /// # Panics
    /// Panics if the connection fails, or is not established in time.
    #[allow(clippy::disallowed_methods)]
    pub fn join(&mut self, listener: CmId, to: SocketAddr, depth: u16) {
        let param = ConnectParam {
            private_data: b"question",
            responder_resources: depth,
            initiator_depth: depth,
            ..ConnectParam::default()
        };
        let (id, device) = (0..TRIES).find_map(|_| self.ask(listener, to, &param)).expect("a port that TCP has free");
        self.passive.equip(id, device);
        let param = ConnectParam { private_data: b"answer", ..param };
        self.passive.station.provider().accept(id, &param, Instant::now()).expect("an accept");
        for side in [Side::Active, Side::Passive] {
            self.until("connection", |pair| {
                pair.end(side).take_event(|kind| matches!(kind, CmEventKind::Established { .. }))
            });
        }
    }

    /// Begins to connect. Returns the connect request that arrives at the passive end. Returns `None` if the local port is in use; the
    /// caller must then retry. The kernel's connection manager chooses a local port that no other RDMA connection uses. siw connects over
    /// TCP, so the connect fails if an ordinary TCP connection already uses that port.
    #[allow(clippy::disallowed_methods)]
    fn ask(&mut self, listener: CmId, to: SocketAddr, param: &ConnectParam<'_>) -> Option<(CmId, DeviceId)> {
        let id = self
            .active
            .station
            .provider()
            .resolve(to, &PathOptions::default(), Instant::now() + PATIENCE)
            .expect("an id");
        let device = self.until("address", |pair| {
            let event = pair.active.take_event(|kind| matches!(kind, CmEventKind::Resolved { .. }))?;
            if let CmEventKind::Resolved { device } = event.kind { Some(device) } else { None }
        });
        self.active.equip(id, device);
        self.active.station.provider().connect(id, param).expect("a connect");
        let in_use = format!("(os error {})", libc::EADDRINUSE);
        let asked = self.until("request", |pair| {
            let failed = |kind: &CmEventKind| matches!(kind, CmEventKind::ConnectFailed(why) if why.to_string().contains(&in_use));
            if pair.active.take_event(failed).is_some() {
                return Some(None);
            }
            let event = pair.passive.take_event(|kind| matches!(kind, CmEventKind::ConnectRequest { .. }))?;
            let CmEventKind::ConnectRequest { listener: to, device, private_data, .. } = event.kind else {
                return None;
            };
            assert_eq!((to, private_data.get(..8)), (listener, Some(&b"question"[..])));
            Some(Some((event.id, device)))
        });
        if asked.is_none() {
            println!("{to}: the port that the connection manager has chosen is in use, another one is tried");
            self.active.station.provider().destroy_id(id, Instant::now()).unwrap();
        }
        asked
    }

    /// Returns the end with this name.
    pub fn end(&mut self, side: Side) -> &mut End {
        match side {
            Side::Active => &mut self.active,
            Side::Passive => &mut self.passive,
        }
    }

    /// Returns the end `from`, and then the other end.
    pub fn ends(&mut self, from: Side) -> (&mut End, &mut End) {
        match from {
            Side::Active => (&mut self.active, &mut self.passive),
            Side::Passive => (&mut self.passive, &mut self.active),
        }
    }

    /// Drives both ends until `ready` returns a value, and returns that value.
    ///
    /// # Panics
    /// Panics if this takes too long.
    #[track_caller]
    #[allow(clippy::disallowed_methods)]
    pub fn until<T>(&mut self, what: &str, mut ready: impl FnMut(&mut Self) -> Option<T>) -> T {
        let end = Instant::now() + PATIENCE;
        loop {
            self.active.turn();
            self.passive.turn();
            if let Some(value) = ready(self) {
                return value;
            }
            assert!(
                Instant::now() < end,
                "no {what}: active {:?} {:?}, passive {:?} {:?}",
                self.active.events,
                self.active.done,
                self.passive.events,
                self.passive.done
            );
            // The kernel thread of the other end may need this processor.
            std::thread::yield_now();
        }
    }

    /// Waits for the completion of a work request, and returns it.
    #[track_caller]
    pub fn completion(&mut self, side: Side, wr_id: u64) -> WorkCompletion {
        self.until(&format!("completion of {wr_id} at the {side:?} end"), |pair| pair.end(side).take(wr_id))
    }

    /// Waits for the completion of a work request, and checks that it is a success.
    ///
    /// # Panics
    /// Panics if it is a failure.
    #[track_caller]
    pub fn success(&mut self, side: Side, wr_id: u64, opcode: WcOpcode) -> WorkCompletion {
        let wc = self.completion(side, wr_id);
        if wc.status != WcStatus::Success || wc.opcode != opcode {
            let causes = self.until("an end", |pair| {
                let causes = [pair.active.events.first(), pair.passive.events.first()];
                causes.iter().any(Option::is_some).then(|| format!("{causes:?}"))
            });
            panic!("{wr_id} at the {side:?} end: {:?} {:?}: {causes}", wc.status, wc.opcode);
        }
        wc
    }

    /// Waits until the connection has ended at one side. Returns the reason.
    #[track_caller]
    pub fn disconnected(&mut self, side: Side) -> DisconnectCause {
        self.until("disconnect", |pair| {
            let event = pair.end(side).take_event(|kind| matches!(kind, CmEventKind::Disconnected(_)))?;
            if let CmEventKind::Disconnected(cause) = event.kind { Some(cause) } else { None }
        })
    }

    /// Ends the connection from one side, and waits until both sides have reported its end.
    ///
    /// # Panics
    /// Panics if this takes too long.
    #[allow(clippy::disallowed_methods)]
    pub fn close(mut self, by: Side) {
        let (from, to) = self.ends(by);
        let (id, other) = (from.id, to.id);
        from.station.provider().disconnect(id, Instant::now()).expect("a disconnect");
        self.disconnected(Side::Active);
        self.disconnected(Side::Passive);
        let (from, to) = self.ends(by);
        from.station.provider().destroy_id(id, Instant::now()).unwrap();
        to.station.provider().destroy_id(other, Instant::now()).unwrap();
    }
}
