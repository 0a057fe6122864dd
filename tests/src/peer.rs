//! A peer of the embedded provider that is only a TCP socket. It sends exactly the bytes that a test wants.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use rdma_transport::cm::ListenParam;
use rdma_transport::cq::CqAttr;
use rdma_transport::wr::SgeList;
use rdma_transport::{
    Access, CmEvent, CmEventKind, CmId, ConnectParam, CqId, DeviceId, Drive, Memory, MemoryRegion, Provider, QpAttr,
    QpId, RecvWr, WorkCompletion,
};
use rdma_transport_embedded::iwarp::wire::ddp::{TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use rdma_transport_embedded::iwarp::wire::mpa::fpdu_len;
use rdma_transport_embedded::iwarp::wire::{
    Opcode, ReadRequest, SegmentHeader, Tagged, Terminate, TerminateCause, Untagged, crc32c,
};
use rdma_transport_embedded::iwarp::{CrcPolicy, Iwarp, IwarpConfig, TcpNet};

use crate::patience::PATIENCE;

/// The provider under test, with a listener.
#[derive(Debug)]
pub struct Target {
    /// The embedded provider.
    pub iwarp: Iwarp<TcpNet>,
    /// The completion queue that all queue pairs use.
    pub cq: CqId,
    /// The address of the listener.
    pub address: SocketAddr,
    /// The time that the tests pass to the provider as the current time.
    pub now: Instant,
    /// The events that no test has consumed yet, the oldest first.
    pub events: Vec<CmEvent>,
}

impl Target {
    /// Returns a provider that listens on a port of 127.0.0.1.
    ///
    /// # Panics
    /// Panics if the system has no sockets.
    pub fn new(config: IwarpConfig) -> Self {
        Self::on(config, TcpNet::new().expect("sockets"))
    }

    /// Returns a target with these settings that uses the sockets `net`.
    ///
    /// # Panics
    /// Panics if the system has no sockets.
    #[allow(clippy::disallowed_methods)]
    pub fn on(config: IwarpConfig, net: TcpNet) -> Self {
        let mut seed = 0x9e37_79b9_u32;
        let entropy = move |bytes: &mut [u8]| {
            for byte in bytes {
                seed = seed.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
                *byte = (seed >> 24) as u8;
            }
        };
        let mut iwarp = Iwarp::new(config, net, Box::new(entropy)).expect("settings");
        let cq = iwarp.create_cq(DeviceId(0), &CqAttr::new(4096)).expect("a completion queue");
        let listener = iwarp.listen(SocketAddr::from(([127, 0, 0, 1], 0)), &ListenParam::default()).expect("a port");
        let address = iwarp.local_address(listener).expect("an address");
        Self { iwarp, cq, address, now: Instant::now(), events: Vec::new() }
    }

    /// Drives the provider once.
    ///
    /// # Panics
    /// Panics if the provider fails.
    pub fn turn(&mut self) {
        self.iwarp.progress(self.now, Drive::Full);
        while let Some(event) = self.iwarp.next_cm_event(self.now).expect("events") {
            self.events.push(event);
        }
    }

    /// Drives the provider until `ready` returns a value, and returns that value.
    ///
    /// # Panics
    /// Panics if this takes too long.
    #[allow(clippy::disallowed_methods)]
    pub fn until<T>(&mut self, what: &str, mut ready: impl FnMut(&mut Self) -> Option<T>) -> T {
        let end = Instant::now() + PATIENCE;
        loop {
            self.turn();
            if let Some(value) = ready(self) {
                return value;
            }
            assert!(Instant::now() < end, "no {what}: {:?}", self.events);
        }
    }

    /// Waits for the next event, and returns it.
    pub fn event(&mut self) -> CmEvent {
        self.until("event", |target| (!target.events.is_empty()).then(|| target.events.remove(0)))
    }

    /// Polls and returns the available completions.
    ///
    /// # Panics
    /// Panics if the provider fails.
    pub fn completions(&mut self) -> Vec<WorkCompletion> {
        let mut out = Vec::new();
        self.iwarp.poll_cq(self.cq, usize::MAX, &mut out).expect("a completion queue");
        out
    }

    /// Returns a region of `len` bytes. The memory extends beyond the region by [`MARGIN`] bytes at both ends, so that a test can detect
    /// writes outside of the region.
    ///
    /// # Panics
    /// Panics if the memory cannot be allocated.
    pub fn region(&mut self, len: usize, access: Access) -> Region {
        let memory = Arc::new(Memory::new(len + 2 * MARGIN).expect("memory"));
        let base = memory.as_ptr() as u64 + MARGIN as u64;
        let inner = self.iwarp.register(DeviceId(0), &memory, MARGIN..MARGIN + len, access).expect("a region");
        let whole = self.iwarp.register(DeviceId(0), &memory, 0..memory.len(), Access::REMOTE_READ).expect("a region");
        Region { stag: inner.remote_key.0, base, len, inner, whole, total: memory.len() }
    }

    /// Connects a peer. The provider posts `receives` receives without buffers. `crc` is true if FPDUs must have a CRC.
    ///
    /// # Panics
    /// Panics if the connection fails.
    pub fn connect(&mut self, receives: usize, crc: bool) -> Peer {
        let mut peer = Peer::open(self.address, crc);
        let flags = if crc { 0x50 } else { 0x10 };
        peer.send(&request(&[flags, 2, 0, 4, 0, 16, 0, 16]));
        let id = self.offered();
        self.accept(id, receives);
        let reply = peer.read(self, 24);
        assert_eq!(reply[..16], *b"MPA ID Rep Frame");
        peer.id = Some(id);
        self.until("established", |target| {
            target.events.iter().position(|e| matches!(e.kind, CmEventKind::Established { .. }))
        });
        self.events.clear();
        peer
    }

    /// Waits for a connect request. Returns its id.
    ///
    /// # Panics
    /// Panics if another event arrives first.
    pub fn offered(&mut self) -> CmId {
        let event = self.event();
        assert!(matches!(event.kind, CmEventKind::ConnectRequest { .. }), "{event:?}");
        event.id
    }

    /// Accepts a connect request, and posts `receives` receives without buffers. Returns the queue pair.
    ///
    /// # Panics
    /// Panics if the provider refuses.
    pub fn accept(&mut self, id: CmId, receives: usize) -> QpId {
        let attr = QpAttr {
            send_cq: self.cq,
            recv_cq: self.cq,
            max_send_wr: 4,
            max_recv_wr: 8,
            max_inline: 0,
            max_recv_sge: 0,
            srq: None,
        };
        let qp = self.iwarp.create_qp(id, &attr).expect("a queue pair");
        for wr_id in 0..receives as u64 {
            self.iwarp.post_recv(qp, &[RecvWr { wr_id, sges: SgeList::default() }]).expect("room");
        }
        let param = ConnectParam { responder_resources: 4, initiator_depth: 4, ..ConnectParam::default() };
        self.iwarp.accept(id, &param, self.now).expect("accept");
        qp
    }

    /// Returns the bytes of a region, with the [`MARGIN`] bytes before it and after it. Reads these bytes by RDMA Read on another
    /// connection.
    pub fn inspect(&mut self, region: &Region) -> Vec<u8> {
        let mut peer = self.connect(0, false);
        let read = ReadRequest {
            sink_stag: 7,
            sink_offset: 0,
            size: region.total as u32,
            source_stag: region.whole.remote_key.0,
            source_offset: region.base - MARGIN as u64,
        };
        peer.send(&fpdu_read(1, &read, false));
        let mut bytes = Vec::new();
        loop {
            let fpdu = peer.fpdu(self);
            assert_eq!(SegmentHeader::parse(&fpdu).expect("a header").opcode(), Opcode::ReadResponse);
            let len = usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]]));
            bytes.extend_from_slice(&fpdu[TAGGED_FPDU_HEADER_LEN..2 + len]);
            if bytes.len() >= region.total {
                break;
            }
        }
        peer.finish(self);
        bytes
    }
}

/// The number of additional bytes before a region, and the number of additional bytes after it. No peer may change these bytes.
pub const MARGIN: usize = 128;

/// A region of the provider under test.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// The STag of the region.
    pub stag: u32,
    /// The Tagged Offset of the region's first byte.
    pub base: u64,
    /// The length of the region.
    pub len: usize,
    /// The region, for deregistering it.
    pub inner: MemoryRegion,
    /// A larger region, which consists of this region and the [`MARGIN`] bytes before and after it.
    pub whole: MemoryRegion,
    /// The length of the larger region.
    pub total: usize,
}

/// Returns an MPA request that consists of the 16-byte key of MPA and `tail`.
pub fn request(tail: &[u8]) -> Vec<u8> {
    [b"MPA ID Req Frame".as_slice(), tail].concat()
}

/// Completes an FPDU: adds the padding, and the CRC if `crc` is true.
pub fn seal(mut fpdu: Vec<u8>, crc: bool) -> Vec<u8> {
    fpdu.resize(fpdu.len().next_multiple_of(4), 0);
    let sum = if crc { crc32c(&fpdu) } else { 0 };
    fpdu.extend_from_slice(&sum.to_le_bytes());
    fpdu
}

/// Returns an untagged FPDU.
pub fn fpdu_untagged(header: &Untagged, payload: &[u8], crc: bool) -> Vec<u8> {
    let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
    header.emit_into((18 + payload.len()) as u16, &mut bytes);
    seal([&bytes, payload].concat(), crc)
}

/// Returns a tagged FPDU.
pub fn fpdu_tagged(header: &Tagged, payload: &[u8], crc: bool) -> Vec<u8> {
    let mut bytes = [0; TAGGED_FPDU_HEADER_LEN];
    header.emit_into((14 + payload.len()) as u16, &mut bytes);
    seal([&bytes, payload].concat(), crc)
}

/// The header of a Send with one segment.
pub const SEND: Untagged =
    Untagged { last: true, opcode: Opcode::Send, reserved_or_stag: 0, queue: 0, msn: 1, offset: 0 };

/// Returns an FPDU with an RDMA Read Request.
pub fn fpdu_read(msn: u32, read: &ReadRequest, crc: bool) -> Vec<u8> {
    fpdu_untagged(&Untagged { opcode: Opcode::ReadRequest, queue: 1, msn, ..SEND }, &read.emit(), crc)
}

/// A peer, which is a TCP socket.
#[derive(Debug)]
pub struct Peer {
    stream: TcpStream,
    /// The bytes that are still to be sent, because the socket has not accepted them.
    unsent: VecDeque<u8>,
    /// True if FPDUs have a CRC.
    pub crc: bool,
    /// The provider's id of the connection.
    pub id: Option<CmId>,
}

impl Peer {
    /// Opens a TCP connection to `address`.
    ///
    /// # Panics
    /// Panics if the connection is refused.
    pub fn open(address: SocketAddr, crc: bool) -> Self {
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_nonblocking(true).expect("non-blocking");
        stream.set_nodelay(true).expect("no delay");
        Self { stream, unsent: VecDeque::new(), crc, id: None }
    }

    /// Sends bytes. If the socket does not accept all of them, later calls of [`Peer::read`] send the others. Bytes for a connection that
    /// the provider has closed are dropped.
    pub fn send(&mut self, bytes: &[u8]) {
        self.unsent.extend(bytes);
        self.flush();
    }

    fn flush(&mut self) {
        while !self.unsent.is_empty() {
            match self.stream.write(self.unsent.make_contiguous()) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.unsent.clear(),
            }
        }
    }

    /// Reads `len` bytes. Drives the provider until they have arrived.
    ///
    /// # Panics
    /// Panics if the stream ends earlier.
    pub fn read(&mut self, target: &mut Target, len: usize) -> Vec<u8> {
        let (mut bytes, mut at) = (vec![0; len], 0);
        target.until("bytes", |_| {
            self.flush();
            match self.stream.read(&mut bytes[at..]) {
                Ok(0) if at < len => panic!("the end after {at} of {len} bytes"),
                Ok(n) => at += n,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            (at == len).then_some(())
        });
        bytes
    }

    /// Reads one FPDU. Drives the provider until the FPDU has arrived.
    pub fn fpdu(&mut self, target: &mut Target) -> Vec<u8> {
        let mut fpdu = self.read(target, 2);
        let len = fpdu_len(usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]])));
        fpdu.extend(self.read(target, len - 2));
        if self.crc {
            let (body, sum) = fpdu.split_at(len - 4);
            assert_eq!(crc32c(body).to_le_bytes(), sum);
        }
        fpdu
    }

    /// Checks that the next FPDU is a Terminate, and that the stream ends after it. Returns the cause in the Terminate.
    ///
    /// # Panics
    /// Panics if something else arrives.
    pub fn terminated(&mut self, target: &mut Target) -> TerminateCause {
        let fpdu = self.fpdu(target);
        assert_eq!(SegmentHeader::parse(&fpdu), Ok(SegmentHeader::Untagged(Untagged::TERMINATE)));
        let len = usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]]));
        let terminate = Terminate::parse(&fpdu[UNTAGGED_FPDU_HEADER_LEN..2 + len]).expect("a Terminate");
        assert_eq!(terminate.other_reading.is_some(), terminate.raw & 0xff00 == 0 && terminate.raw != 0);
        self.ended(target);
        terminate.cause
    }

    /// Waits for the end of the stream.
    ///
    /// # Panics
    /// Panics if bytes arrive before the end.
    pub fn ended(&mut self, target: &mut Target) {
        target.until("end", |_| {
            self.flush();
            match self.stream.read(&mut [0]) {
                Ok(0) => Some(()),
                Ok(_) => panic!("bytes behind the end"),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                Err(_) => Some(()),
            }
        });
    }

    /// Closes the socket, and waits until the provider has released the connection.
    pub fn finish(self, target: &mut Target) {
        drop(self.stream);
        if let Some(id) = self.id {
            target.until("disconnect", |target| {
                target.events.iter().any(|e| e.id == id && matches!(e.kind, CmEventKind::Disconnected(_))).then_some(())
            });
            target.events.retain(|event| event.id != id);
            target.iwarp.destroy_id(id, target.now).unwrap();
        }
    }
}

/// Returns settings without CRC, for tests that send invalid FPDUs.
pub fn plain() -> IwarpConfig {
    let mut config = IwarpConfig::default();
    config.crc = CrcPolicy::Off;
    config
}
