//! The test bench of the embedded provider: a provider under test, and peers that are plain sockets.
#![allow(clippy::disallowed_methods, reason = "sockets of the system are driven by its clock")]

use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::{Iwarp, IwarpConfig, Net, TcpNet};
use crate::patience::until;
use rdma_transport::cm::{CmEvent, CmEventKind, CmId, ConnectParam, ListenParam, PathOptions};
use rdma_transport::cq::CqAttr;
use rdma_transport::provider::{CqId, DeviceId, Drive, Entropy, Provider};
use rdma_transport::qp::{QpAttr, QpId};

/// The provider under test and its completion queue. `now` is the time that is passed to the provider. `events` are the events that the
/// provider has raised.
pub(super) struct Bench<N: Net = TcpNet> {
    pub(super) iwarp: Iwarp<N>,
    pub(super) cq: CqId,
    pub(super) now: Instant,
    pub(super) events: Vec<CmEvent>,
}

impl Bench {
    pub(super) fn new(config: IwarpConfig) -> Self {
        Self::of(Iwarp::new(config, TcpNet::new().unwrap(), Box::new(|bytes| bytes.fill(0))).unwrap())
    }
}

impl<N: Net> Bench<N> {
    pub(super) fn of(mut iwarp: Iwarp<N>) -> Self {
        let cq = iwarp.create_cq(DeviceId(0), &CqAttr::new(64)).unwrap();
        Self { iwarp, cq, now: Instant::now(), events: Vec::new() }
    }

    pub(super) fn turn(&mut self) {
        self.iwarp.progress(self.now, Drive::Full);
        while let Some(event) = self.iwarp.next_cm_event(self.now).unwrap() {
            self.events.push(event);
        }
    }

    pub(super) fn qp(&mut self, id: CmId) -> QpId {
        let (send_cq, recv_cq) = (self.cq, self.cq);
        let attr =
            QpAttr { send_cq, recv_cq, max_send_wr: 4, max_recv_wr: 4, max_inline: 0, max_recv_sge: 0, srq: None };
        self.iwarp.create_qp(id, &attr).unwrap()
    }

    pub(super) fn listen(&mut self) -> (CmId, TcpStream) {
        let id = self.iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
        let peer = TcpStream::connect(self.iwarp.local_address(id).unwrap()).unwrap();
        peer.set_nonblocking(true).unwrap();
        (id, peer)
    }

    /// Starts a connection of the provider to `listener`. Returns the connection's id.
    pub(super) fn connect(&mut self, listener: &TcpListener) -> CmId {
        self.connect_to(listener.local_addr().unwrap())
    }

    pub(super) fn connect_to(&mut self, address: SocketAddr) -> CmId {
        self.connect_with(address, &ConnectParam::default())
    }

    pub(super) fn connect_with(&mut self, address: SocketAddr, param: &ConnectParam<'_>) -> CmId {
        let id = self.resolve(address);
        self.iwarp.connect(id, param).unwrap();
        id
    }

    /// Resolves the address of a peer. Returns an id with a queue pair, which can connect.
    pub(super) fn resolve(&mut self, address: SocketAddr) -> CmId {
        let deadline = self.now + Duration::from_secs(60);
        let id = self.iwarp.resolve(address, &PathOptions::default(), deadline).unwrap();
        until("the resolved address", || {
            self.turn();
            self.events.iter().any(|event| event.id == id).then_some(())
        });
        self.qp(id);
        id
    }

    /// Starts a connection of the provider to a plain socket, and reads the MPA request, which
    /// contains no hash of the path. Returns the listener, the connection's id, and the socket.
    pub(super) fn dial(&mut self) -> (TcpListener, CmId, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let id = self.connect(&listener);
        let mut peer = self.accept(&listener);
        self.read(&mut peer, 24);
        (listener, id, peer)
    }

    pub(super) fn accept(&mut self, listener: &TcpListener) -> TcpStream {
        let (peer, _) = listener.accept().unwrap();
        peer.set_nonblocking(true).unwrap();
        peer
    }

    /// Reads exactly `len` bytes from the peer's socket. Drives the provider meanwhile.
    pub(super) fn read(&mut self, peer: &mut TcpStream, len: usize) -> Vec<u8> {
        let (mut bytes, mut at) = (vec![0; len], 0);
        until("bytes", || {
            self.turn();
            match peer.read(&mut bytes[at..]) {
                Ok(0) => panic!("end after {at} of {len} bytes"),
                Ok(n) => at += n,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            (at == len).then_some(())
        });
        bytes
    }

    /// Waits until the provider has ended the stream to the peer. Drives the provider meanwhile.
    pub(super) fn end(&mut self, peer: &mut TcpStream) {
        until("the end", || {
            self.turn();
            match peer.read(&mut [0]) {
                Ok(0) => return Some(()),
                Ok(_) => panic!("bytes before the end"),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Some(()),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            None
        });
    }

    pub(super) fn event(&mut self) -> CmEvent {
        until("an event", || {
            if self.events.is_empty() {
                self.turn();
            }
            (!self.events.is_empty()).then(|| self.events.remove(0))
        })
    }

    pub(super) fn request(&mut self) -> CmId {
        let event = self.event();
        assert!(matches!(event.kind, CmEventKind::ConnectRequest { .. }), "{event:?}");
        self.qp(event.id);
        event.id
    }
}

/// Returns the entropy of a provider that listens for peers on this host. The name of its Unix listener is made of `tag` and the process
/// id, so `tag` must differ between the tests of a process.
pub(super) fn entropy(tag: u8) -> Entropy {
    Box::new(move |bytes: &mut [u8]| {
        for (byte, nibble) in bytes.iter_mut().zip(0..) {
            // The low four bits of each byte become a hexadecimal digit of the name.
            *byte = std::process::id().checked_shr(4 * nibble).map_or(tag >> (4 * (nibble % 2)), |id| id as u8);
        }
    })
}

/// Returns an MPA request of revision 1 without private data.
pub(super) fn request_v1() -> Vec<u8> {
    [b"MPA ID Req Frame".as_slice(), &[0, 1, 0, 0]].concat()
}

/// Returns the octets of a Send with two octets of payload. The CRC field is 0.
pub(super) fn send(msn: u8) -> Vec<u8> {
    vec![0, 20, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, msn, 0, 0, 0, 0, b'h', b'i', 0, 0, 0, 0, 0, 0]
}
