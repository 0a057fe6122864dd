//! The target of the tests: a provider with a listener. A test connects to it by a plain socket, and reads its answers.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rdma_reactor_tests::ends::End;
use rdma_reactor_tests::peer::{SEND, fpdu_read, fpdu_tagged, fpdu_untagged, plain, request};
use rdma_transport::{CmEventKind, CmId, ConnectParam};
use rdma_transport_embedded::iwarp::wire::ddp::UNTAGGED_FPDU_HEADER_LEN;
use rdma_transport_embedded::iwarp::wire::mpa::fpdu_len;
use rdma_transport_embedded::iwarp::wire::{Opcode, ReadRequest, SegmentHeader, Tagged, Terminate, Untagged};
use rdma_transport_embedded::iwarp::{Iwarp, TcpNet};
use rdma_transport_verbs::Verbs;

pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
pub(crate) const MEMORY: usize = 1 << 20;

/// The end of a connection, as the peer's socket sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The stream ended with a Terminate that had this control word.
    Terminate(u32),
    /// The stream ended without a Terminate.
    Close,
    /// The stream did not end. The target waits for more bytes.
    Waits,
}

/// A provider under test, with a listener.
pub(crate) struct Target {
    pub(crate) end: End,
    listener: CmId,
    pub(crate) address: SocketAddr,
    /// If the stream has not ended after this time, the outcome is `Waits`.
    patience: Duration,
}

fn address(name: &str) -> SocketAddr {
    let value = std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run `make test-rdma-full`"));
    let ip: IpAddr = value.parse().unwrap_or_else(|_| panic!("{name} is no address: {value}"));
    SocketAddr::new(ip, 0)
}

impl Target {
    pub(crate) fn ours() -> Self {
        let mut next = 77_u8;
        let entropy = move |bytes: &mut [u8]| {
            for byte in bytes {
                next = next.wrapping_mul(29).wrapping_add(71);
                *byte = next;
            }
        };
        let iwarp = Iwarp::new(plain(), TcpNet::new().unwrap(), Box::new(entropy)).unwrap();
        Self::new(End::new(Box::new(iwarp), MEMORY), PATIENCE)
    }

    pub(crate) fn siw() -> Self {
        // The patience of 6 s is longer than the kernel's time limit for a handshake, so siw closes the connection
        // first.
        Self::new(End::new(Box::new(Verbs::open().unwrap()), MEMORY), Duration::from_secs(6))
    }

    fn new(mut end: End, patience: Duration) -> Self {
        let (listener, address) = end.listen(address("RDMA_SIW_PEER"));
        Self { end, listener, address, patience }
    }

    #[track_caller]
    pub(crate) fn until<T>(&mut self, what: &str, mut ready: impl FnMut(&mut End) -> Option<T>) -> T {
        let end = Instant::now() + PATIENCE;
        loop {
            self.end.turn();
            if let Some(value) = ready(&mut self.end) {
                return value;
            }
            assert!(Instant::now() < end, "no {what}: {:?}", self.end.events);
            std::thread::yield_now();
        }
    }

    /// Connects a plain socket to the target, with `receives` posted receives of zero bytes. Returns the socket after
    /// the handshake.
    #[track_caller]
    pub(crate) fn connect(&mut self, receives: usize, crc: bool) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream.write_all(&request(&[if crc { 0x50 } else { 0x10 }, 2, 0, 4, 0, 16, 0, 16])).unwrap();
        let listener = self.listener;
        let (id, device) = self.until("request", |end| {
            let event = end.events.pop()?;
            match event.kind {
                CmEventKind::ConnectRequest { listener: to, device, .. } if to == listener => Some((event.id, device)),
                other => panic!("{other:?}"),
            }
        });
        self.end.equip(id, device);
        for wr_id in 0..receives as u64 {
            self.end.recv(wr_id, &[0..0]);
        }
        let param = ConnectParam { responder_resources: 4, initiator_depth: 4, ..ConnectParam::default() };
        self.end.station.provider().accept(id, &param, Instant::now()).unwrap();
        let mut reply = [0; 24];
        self.read(&mut stream, &mut reply);
        assert_eq!((&reply[..16], reply[17]), (&b"MPA ID Rep Frame"[..], 2));
        self.until("connection", |end| {
            end.events.pop().map(|event| assert!(matches!(event.kind, CmEventKind::Established { .. }), "{event:?}"))
        });
        stream
    }

    pub(crate) fn read(&mut self, stream: &mut TcpStream, bytes: &mut [u8]) {
        let mut at = 0;
        self.until("bytes", |_| {
            match stream.read(&mut bytes[at..]) {
                Ok(0) if at < bytes.len() => panic!("the end after {at} bytes"),
                Ok(n) => at += n,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            (at == bytes.len()).then_some(())
        });
    }

    /// Reads the socket until the stream ends or the patience is exhausted. Returns the last Terminate, or `Close` if
    /// there was none, or `Waits` if the stream did not end.
    pub(crate) fn outcome(&mut self, stream: &mut TcpStream) -> Outcome {
        let mut octets = Vec::new();
        let patience = Instant::now() + self.patience;
        let mut waits = false;
        self.until("end of the stream", |_| {
            let is_over = Instant::now() > patience;
            let mut some = [0; 65_536];
            match stream.read(&mut some) {
                Ok(0) => return Some(()),
                Ok(n) => octets.extend_from_slice(&some[..n]),
                // Bytes that have arrived within the patience are read, even if this process got no processor meanwhile.
                Err(error) if error.kind() == ErrorKind::WouldBlock => waits = is_over,
                Err(_) => return Some(()),
            }
            waits.then_some(())
        });
        if waits {
            stream.shutdown(Shutdown::Both).unwrap();
            return Outcome::Waits;
        }
        let (mut rest, mut outcome) = (&octets[..], Outcome::Close);
        while rest.len() >= UNTAGGED_FPDU_HEADER_LEN {
            let len = usize::from(u16::from_be_bytes([rest[0], rest[1]]));
            if rest.len() < fpdu_len(len) {
                break;
            }
            if let Ok(SegmentHeader::Untagged(Untagged { opcode: Opcode::Terminate, .. })) = SegmentHeader::parse(rest)
            {
                let terminate = Terminate::parse(&rest[UNTAGGED_FPDU_HEADER_LEN..2 + len]).unwrap();
                outcome = Outcome::Terminate(terminate.raw);
            }
            rest = &rest[fpdu_len(len)..];
        }
        outcome
    }

    /// Waits until the target reports the disconnect, and then destroys the id of the connection.
    pub(crate) fn drop_connection(&mut self) {
        let id = self.end.id;
        self.until("disconnect", |end| {
            end.events.iter().any(|event| matches!(event.kind, CmEventKind::Disconnected(_))).then_some(())
        });
        self.end.station.provider().destroy_id(id, Instant::now()).unwrap();
        self.end.turn();
        self.end.events.clear();
        self.end.done.clear();
    }

    /// Checks that the target still serves a correct connection.
    pub(crate) fn still_serves(&mut self) {
        let mut stream = self.connect(1, true);
        let target = self.end.remote(MEMORY - 8);
        let header = Tagged { last: true, opcode: Opcode::Write, stag: target.key.0, offset: target.address };
        let read = ReadRequest {
            sink_stag: 7,
            sink_offset: 0,
            size: 8,
            source_stag: target.key.0,
            source_offset: target.address,
        };
        stream.write_all(&fpdu_tagged(&header, b"all well", true)).unwrap();
        stream.write_all(&fpdu_untagged(&SEND, b"", true)).unwrap();
        stream.write_all(&fpdu_read(1, &read, true)).unwrap();
        let mut answer = [0; 16 + 8 + 4];
        self.read(&mut stream, &mut answer);
        assert_eq!(answer[16..24], *b"all well");
        drop(stream);
        self.drop_connection();
        self.end.clear(MEMORY - 8..MEMORY);
    }
}
