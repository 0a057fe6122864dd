//! Tests of the handshake. The peers are plain TCP sockets, to which the tests write octets.

use super::super::bench::{Bench, entropy, request_v1};
use super::super::hub::Owner;
use super::*;
use crate::iwarp::forward_net::forward_net;
use crate::iwarp::net::{LocalSockets, PacketSockets, StreamSockets};
use crate::iwarp::unix::{host, path_within_host};
use crate::iwarp::{CrcPolicy, IwarpConfig};
use crate::iwarp::{Iwarp, SharedMemoryPolicy, TcpConfig, TcpNet};
use crate::patience::until;
use crate::test_memory::TestMemory;
use rdma_transport::cm::{CmEvent, ConnectParam, DisconnectCause, ListenParam, PathOptions};
use rdma_transport::mem::Memory;
use rdma_transport::provider::{Drive, Provider};
use rdma_transport::qp::QpId;
use rdma_transport::wc::WcStatus;
use rdma_transport::wr::{SendFlags, SendOp, SendWr, SgeList};
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::time::Duration;

#[test]
fn a_server_may_send_first_to_an_old_client() {
    let mut bench = Bench::new(IwarpConfig { crc: CrcPolicy::Off, ..Default::default() });
    let (_, mut peer) = bench.listen();
    peer.write_all(&request_v1()).unwrap();
    let id = bench.request();
    let memory = Memory::new(16).unwrap();
    memory.write(0, b"first");
    let sges = SgeList::one(memory.sge(0, 5));
    let wr = SendWr { wr_id: 1, op: SendOp::Send, sges, flags: SendFlags::SIGNALED };
    bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
    bench.iwarp.post_send(QpId(id.0), &[wr]).unwrap();
    assert!(matches!(bench.event().kind, CmEventKind::Established { .. }));
    assert_eq!(bench.read(&mut peer, 20)[..], *b"MPA ID Rep Frame\0\x01\0\0");
    bench.turn();
    // The Send must not follow the MPA reply immediately, because some peers fail if they receive both in one read.
    assert_eq!(peer.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    assert!(bench.iwarp.next_deadline().is_some());
    bench.now += Duration::from_millis(11);
    assert_eq!(&bench.read(&mut peer, 32)[20..25], b"first");
    drop(peer);
    assert!(matches!(bench.event().kind, CmEventKind::Disconnected(DisconnectCause::Peer)));
}

#[test]
fn violations_are_answered_with_a_terminate() {
    let mut bench = Bench::new(IwarpConfig { crc: CrcPolicy::Off, ..Default::default() });
    let (_, mut peer) = bench.listen();
    peer.write_all(&request_v1()).unwrap();
    let id = bench.request();
    bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
    bench.read(&mut peer, 20);
    // The peer sends a Send for which no receive is posted.
    peer.write_all(&[0, 18, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    assert!(matches!(bench.event().kind, CmEventKind::Established { .. }));
    let CmEventKind::Disconnected(DisconnectCause::PeerViolation(what)) = bench.event().kind else { panic!() };
    assert!(what.contains("1/2/2"), "{what}");
    assert_eq!(bench.read(&mut peer, 48)[20..24], [0x12, 2, 0xc0, 0]);
    bench.end(&mut peer);
    bench.iwarp.destroy_id(id, bench.now).unwrap();
    drop(peer);
    assert!(bench.events.is_empty());
}

#[test]
fn markers_noise_and_silence() {
    let mut bench = Bench::new(IwarpConfig { markers: false, ..Default::default() });
    let (id, mut markers) = bench.listen();
    let address = bench.iwarp.local_address(id).unwrap();
    markers.write_all(&[b"MPA ID Req Frame".as_slice(), &[0x90, 2, 0, 4, 0, 0, 0, 0]].concat()).unwrap();
    assert_eq!(bench.read(&mut markers, 24)[16..], [0x30, 2, 0, 4, 0, 0, 0, 0]);
    bench.end(&mut markers);
    let mut noise = TcpStream::connect(address).unwrap();
    noise.set_nonblocking(true).unwrap();
    noise.write_all(b"GET / HTTP/1.1\r\n\r\nand more").unwrap();
    bench.end(&mut noise);
    let mut silence = TcpStream::connect(address).unwrap();
    silence.set_nonblocking(true).unwrap();
    until("the handshake begins", || {
        bench.turn();
        (bench.iwarp.endpoints.handshakes.unfinished > 0).then_some(())
    });
    bench.now += Duration::from_secs(6);
    bench.end(&mut silence);
    assert_eq!((bench.iwarp.endpoints.handshakes.unfinished, bench.events.len()), (0, 0));
}

#[test]
fn an_undecided_request_is_rejected_in_time() {
    let mut bench = Bench::new(IwarpConfig { max_handshakes: 1, ..Default::default() });
    let (listener, mut peer) = bench.listen();
    peer.write_all(&request_v1()).unwrap();
    let id = bench.request();
    // The limit of one handshake is reached, so a second connection waits in the backlog.
    let mut other = TcpStream::connect(bench.iwarp.local_address(listener).unwrap()).unwrap();
    other.write_all(&request_v1()).unwrap();
    for _ in 0..10 {
        bench.turn();
    }
    assert_eq!((bench.iwarp.endpoints.handshakes.unfinished, bench.events.len()), (1, 0));
    bench.now += Duration::from_secs(11);
    assert!(matches!(bench.event().kind, CmEventKind::ConnectFailed(ConnectFailure::Timeout)));
    assert_eq!(bench.read(&mut peer, 20)[16], 0x20);
    bench.end(&mut peer);
    assert!(bench.iwarp.accept(id, &ConnectParam::default(), bench.now).is_err());
    bench.iwarp.destroy_id(id, bench.now).unwrap();
    assert!(matches!(bench.iwarp.disconnect(id, bench.now), Err(TransportError::Stale { .. })));
    let other = bench.request();
    bench.iwarp.accept(other, &ConnectParam::default(), bench.now).unwrap();
}

/// For a connection within the host, the policy decides if this side requests a CRC. A peer that
/// does not send the same hash of the path counts as one on another host. The connection uses a CRC
/// if either peer requests it.
#[test]
fn a_crc_within_the_host_is_asked_for_by_either_side() {
    let path = |peer: &TcpStream| {
        let peer = socket2::Socket::from(peer.try_clone().unwrap());
        path_within_host(&peer, &host()).unwrap().to_le_bytes()
    };
    for policy in [CrcPolicy::BetweenHosts, CrcPolicy::Off, CrcPolicy::Require] {
        let asks = |is_direct: bool| match policy {
            CrcPolicy::BetweenHosts => !is_direct,
            policy => policy == CrcPolicy::Require,
        };
        let config = IwarpConfig { crc: policy, ..IwarpConfig::default() };
        for self_delimiting in [true, false] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut bench = Bench::new(config.clone());
            let param = ConnectParam { private_data: b"hi", self_delimiting, ..ConnectParam::default() };
            bench.connect_with(listener.local_addr().unwrap(), &param);
            let mut peer = bench.accept(&listener);
            let tail = if self_delimiting { path(&peer).to_vec() } else { Vec::new() };
            let request = bench.read(&mut peer, 26 + tail.len());
            assert_eq!(request[16] & 0x40 != 0, asks(self_delimiting), "{policy:?}");
            assert_eq!((request[16] & 2 != 0, usize::from(request[19])), (self_delimiting, 6 + tail.len()));
            assert_eq!(request[24..], [b"hi", &tail[..]].concat());
        }
        for (peer_asks, shown) in [(false, None), (false, Some(0)), (false, Some(1)), (true, Some(0))] {
            let mut bench = Bench::new(config.clone());
            let (_, mut peer) = bench.listen();
            let mut request = [&b"MPA ID Req Frame"[..], &[0x10, 2, 0, 6, 0, 0, 0, 0], b"hi"].concat();
            request[16] |= if peer_asks { 0x40 } else { 0 };
            if let Some(error) = shown {
                let mut path = path(&peer);
                path[3] ^= error;
                request.extend(path);
                (request[16], request[19]) = (request[16] | 2, 10);
            }
            peer.write_all(&request).unwrap();
            let CmEvent { id, kind: CmEventKind::ConnectRequest { private_data, .. } } = bench.event() else {
                panic!()
            };
            assert_eq!(*private_data, *b"hi");
            bench.qp(id);
            bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
            let expected = peer_asks || asks(shown == Some(0));
            assert_eq!(bench.read(&mut peer, 20)[16] & 0x40 != 0, expected, "{policy:?} {shown:?}");
        }
    }
}

#[test]
fn a_peer_that_hangs_up_is_asked_again_with_revision_1() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut bench = Bench::new(IwarpConfig::default());
    let id = bench.connect(&listener);
    assert!(matches!(bench.event().kind, CmEventKind::Resolved { .. }));
    let mut first = bench.accept(&listener);
    // The request has the C bit, because it does not contain the hash of the path.
    assert_eq!(bench.read(&mut first, 24)[16..20], [0x50, 2, 0, 4]);
    drop(first);
    listener.set_nonblocking(true).unwrap();
    let (mut second, _) = until("the second connection", || {
        bench.turn();
        listener.accept().ok()
    });
    second.set_nonblocking(true).unwrap();
    assert_eq!(bench.read(&mut second, 20)[16..], [0x40, 1, 0, 0]);
    drop(second);
    assert!(matches!(bench.event().kind, CmEventKind::ConnectFailed(ConnectFailure::PeerClosed)));
    bench.iwarp.destroy_id(id, bench.now).unwrap();
}

/// The peer closes the first connection, and no longer listens when the second connection is tried. The reported failure is that the peer
/// closed the first connection.
#[test]
fn a_second_try_that_finds_nobody_does_not_hide_the_reason() {
    let mut bench = Bench::new(IwarpConfig::default());
    let (listener, _, peer) = bench.dial();
    bench.now += Duration::from_secs(13);
    drop((listener, peer));
    bench.events.clear();
    assert!(matches!(bench.event().kind, CmEventKind::ConnectFailed(ConnectFailure::PeerClosed)));
}

#[test]
fn replies_of_all_kinds() {
    let reply = |tail: &[u8]| [b"MPA ID Rep Frame".as_slice(), tail].concat();
    let cases: [(Vec<u8>, &str); 6] = [
        (reply(&[0x70, 2, 0, 6, 0, 0, 0, 0, b'n', b'o']), "Rejected { private_data: [110, 111] }"),
        (reply(&[0xd0, 2, 0, 4, 0, 0, 0, 0]), "markers"),
        (reply(&[0x50, 2, 0, 4, 0x80, 16, 0x00, 16]), "ready-to-receive"),
        (reply(&[0x50, 2, 0, 4, 0x80, 16, 0x80, 200]), "more RDMA Reads"),
        (reply(&[0x50, 2, 0, 0]), "Protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "Protocol"),
    ];
    for (bytes, want) in cases {
        let mut bench = Bench::new(IwarpConfig { markers: false, ..Default::default() });
        let (_listener, id, mut peer) = bench.dial();
        peer.write_all(&bytes).unwrap();
        bench.events.clear();
        let event = bench.event();
        assert!(format!("{event:?}").contains(want), "{event:?}");
        bench.iwarp.destroy_id(id, bench.now).unwrap();
    }
}

#[test]
fn no_answer_and_nobody_there() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut bench = Bench::new(IwarpConfig::default());
    bench.connect(&listener);
    assert!(matches!(bench.event().kind, CmEventKind::Resolved { .. }));
    bench.now += Duration::from_secs(61);
    assert!(matches!(bench.event().kind, CmEventKind::ConnectFailed(ConnectFailure::Timeout)));
    // A bound socket that does not listen refuses connections. As long as it is bound, no other test gets its port.
    let bound = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    bound.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = bound.local_addr().unwrap().as_socket().unwrap();
    bench.connect_to(address);
    bench.turn();
    bench.events.retain(|event| !matches!(event.kind, CmEventKind::Resolved { .. }));
    assert!(matches!(bench.event().kind, CmEventKind::ConnectFailed(ConnectFailure::Refused)));
}

#[test]
fn data_behind_the_reply_and_an_end_in_the_middle() {
    let mut bench = Bench::new(IwarpConfig { crc: CrcPolicy::Off, ..Default::default() });
    let (_listener, id, mut peer) = bench.dial();
    let memory = Memory::new(4096).unwrap();
    let wr = rdma_transport::wr::RecvWr { wr_id: 5, sges: SgeList::one(memory.sge(0, 4096)) };
    bench.iwarp.post_recv(QpId(id.0), &[wr, wr]).unwrap();
    let mut bytes = [b"MPA ID Rep Frame".as_slice(), &[0x10, 2, 0, 4, 0x80, 16, 0x80, 16]].concat();
    bytes.extend([0, 20, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, b'h', b'i', 0, 0, 0, 0, 0, 0]);
    bytes.extend([0, 20, 0x41, 0x43, 0, 0]);
    peer.write_all(&bytes).unwrap();
    assert_eq!(bench.read(&mut peer, 20)[..8], [0, 14, 0xc1, 0x40, 0, 0, 0, 1]);
    drop(peer);
    bench.events.retain(|event| !matches!(event.kind, CmEventKind::Resolved { .. }));
    assert!(matches!(bench.event().kind, CmEventKind::Established { .. }));
    assert!(matches!(bench.event().kind, CmEventKind::Disconnected(DisconnectCause::Truncated)));
    let mut done = Vec::new();
    bench.iwarp.poll_cq(bench.cq, 9, &mut done).unwrap();
    let statuses: Vec<_> = done.iter().map(|wc| wc.status).collect();
    assert_eq!(statuses, [WcStatus::Success, WcStatus::Flushed]);
    assert_eq!(memory.read(0, 2), b"hi");
}

#[test]
fn a_destroyed_connection_still_delivers() {
    let mut bench = Bench::new(IwarpConfig { crc: CrcPolicy::Off, ..Default::default() });
    let (_, peer) = bench.listen();
    let total = delivered_after_destroy(bench, peer, |_, _| {});
    assert!(total > 65536 && total % 4 == 0, "{total}");
}

/// A peer that has ended its own stream still reads. The buffers of the sockets are small, so most
/// of the framed bytes wait for TCP when it does so.
#[test]
fn a_destroyed_connection_still_delivers_to_a_peer_that_sends_no_more() {
    let config = IwarpConfig { crc: CrcPolicy::Off, ..Default::default() };
    let small = TcpConfig { send_buffer: Some(4096), ..TcpConfig::default() };
    let mut bench = Bench::of(Iwarp::new(config, TcpNet::with_config(small).unwrap(), entropy(0)).unwrap());
    let listener = bench.iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(&bench.iwarp.local_address(listener).unwrap().into()).unwrap();
    socket.set_nonblocking(true).unwrap();
    let total = delivered_after_destroy(bench, TcpStream::from(socket), |bench, peer| {
        peer.shutdown(Shutdown::Write).unwrap();
        (0..3).for_each(|_| bench.turn());
        assert_eq!(bench.iwarp.hub.lingers.len(), 1, "the peer has read nothing");
    });
    assert!(total > 32768, "{total}");
}

/// Destroys a connection with `peer` that has bytes which TCP has not accepted, and calls `then`.
/// The peer receives complete FPDUs, and then the end of the stream. Returns the number of its
/// octets.
fn delivered_after_destroy(mut bench: Bench, mut peer: TcpStream, then: impl FnOnce(&mut Bench, &TcpStream)) -> usize {
    peer.write_all(&request_v1()).unwrap();
    let id = bench.request();
    bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
    bench.read(&mut peer, 20);
    bench.now += Duration::from_millis(11);
    bench.turn();
    let len = 8 << 20;
    let memory = Memory::new(len).unwrap();
    let wr = SendWr { wr_id: 1, op: SendOp::Send, sges: SgeList::one(memory.sge(0, len)), flags: SendFlags::SIGNALED };
    bench.iwarp.post_send(QpId(id.0), &[wr]).unwrap();
    bench.iwarp.destroy_id(id, bench.now).unwrap();
    drop(memory);
    assert!(bench.iwarp.hub.lingers.len() == 1 && bench.iwarp.endpoints.len() == 1);
    then(&mut bench, &peer);
    let (mut stream, mut bytes) = (Vec::new(), vec![0; 1 << 20]);
    until("the end", || {
        bench.turn();
        match peer.read(&mut bytes) {
            Ok(0) => return Some(()),
            Ok(n) => stream.extend_from_slice(&bytes[..n]),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
        None
    });
    let mut left = &stream[..];
    while let Some((len, _)) = left.split_first_chunk() {
        // The length, the ULPDU, the padding, and the CRC.
        let len = (2 + usize::from(u16::from_be_bytes(*len))).next_multiple_of(4) + 4;
        left = left.get(len..).unwrap_or_else(|| panic!("{} of {len} octets of the last FPDU", left.len()));
    }
    drop(peer);
    until("nothing lingers", || {
        bench.turn();
        (bench.iwarp.hub.lingers.len() == 0).then_some(())
    });
    stream.len()
}

/// If no socket may linger, the reply of a reject is still sent.
#[test]
fn a_reject_is_sent_even_if_nothing_may_linger() {
    let mut bench = Bench::new(IwarpConfig { max_lingering: 0, ..Default::default() });
    let (_, mut peer) = bench.listen();
    peer.write_all(&request_v1()).unwrap();
    let id = bench.request();
    bench.iwarp.reject(id, &[], bench.now).unwrap();
    assert_eq!(bench.read(&mut peer, 20)[16], 0x20);
    bench.end(&mut peer);
    assert_eq!(bench.iwarp.hub.lingers.len(), 0);
}

/// At the limit of lingering sockets, a socket that need not linger does not evict another one.
#[test]
fn only_a_socket_that_lingers_takes_the_place_of_another() {
    let (mut bench, _, address) = listening(IwarpConfig { max_lingering: 1, ..Default::default() });
    let mut rejected = Vec::new();
    for closes in [false, true, false] {
        let mut peer = connect_from(1, address);
        peer.write_all(&request_v1()).unwrap();
        let id = bench.request();
        if closes {
            peer.shutdown(Shutdown::Write).unwrap();
            until("the end of the peer's stream", || {
                bench.turn();
                bench
                    .iwarp
                    .endpoints
                    .get(id.0)
                    .is_some_and(|endpoint| matches!(endpoint, CmEndpoint::Request(request) if request.closed))
                    .then_some(())
            });
        }
        let socket = bench.iwarp.endpoints.get(id.0).and_then(CmEndpoint::socket).unwrap();
        bench.iwarp.reject(id, &[], bench.now).unwrap();
        rejected.push((peer, socket));
        let lingers: Vec<_> = rejected.iter().map(|(_, socket)| bench.iwarp.hub.owner(*socket).is_some()).collect();
        let expected: &[bool] = match lingers.len() {
            1 => &[true],
            2 => &[true, false],
            _ => &[false, false, true],
        };
        assert_eq!(lingers, expected);
    }
}

#[test]
fn replaced_deadlines_do_not_pile_up() {
    let (mut bench, id, _) = listening(IwarpConfig::default());
    for later in 0..10_000 {
        bench.iwarp.hub.deadlines.set(Owner::Endpoint(id.0), bench.now + Duration::from_millis(later));
    }
    assert_eq!(bench.iwarp.hub.deadlines.len(), 1);
}

/// Connects a socket whose own address is `127.0.0.host`.
fn connect_from(host: u8, to: SocketAddr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, host], 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.into()
}

/// Creates a provider with these settings and starts a listener. Returns the provider, the listener's id and its address.
fn listening(config: IwarpConfig) -> (Bench, CmId, SocketAddr) {
    let mut bench = Bench::new(config);
    let id = bench.iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
    let address = bench.iwarp.local_address(id).unwrap();
    (bench, id, address)
}

/// Returns true if the provider has closed the connection.
fn is_closed(peer: &mut TcpStream) -> bool {
    match peer.read(&mut [0]) {
        Ok(n) => n == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

#[test]
fn a_new_client_is_served_though_silent_ones_hold_all_places() {
    let request_grace = Duration::from_millis(50);
    let config = IwarpConfig { max_handshakes: 32, request_grace, ..Default::default() };
    let (mut bench, _, address) = listening(config.clone());
    let mut silent: Vec<_> = (0..400).map(|_| connect_from(1, address)).collect();
    bench.turn();
    assert_eq!(
        bench.iwarp.endpoints.handshakes.unfinished,
        config.handshakes_per_peer() + 1,
        "the rest waits in the backlog"
    );
    assert!(silent.iter_mut().all(|peer| !is_closed(peer)), "nobody gives way before its time");
    let mut client = connect_from(1, address);
    client.write_all(&request_v1()).unwrap();
    // In each round of one `request_grace`, the provider evicts `handshakes_per_peer` silent peers. So this number of rounds suffices for
    // 400 silent peers.
    let rounds = 400 / config.handshakes_per_peer() as u32 + 1;
    let start = bench.now;
    while bench.events.is_empty() {
        bench.now += config.request_grace;
        bench.turn();
        assert!(
            bench.now <= start + rounds * config.request_grace,
            "{} are closed",
            silent.iter_mut().map(is_closed).filter(|&c| c).count()
        );
        assert!(bench.iwarp.endpoints.handshakes.unfinished <= config.max_handshakes);
    }
    assert!(matches!(bench.events[0].kind, CmEventKind::ConnectRequest { .. }));
    let closed: Vec<bool> = silent.iter_mut().map(is_closed).collect();
    assert!(closed[0] && closed.is_sorted_by(|a, b| a >= b), "the oldest first");
}

#[test]
fn one_address_does_not_keep_the_others_out() {
    let request_grace = Duration::from_millis(50);
    let (mut bench, _, address) = listening(IwarpConfig { max_handshakes: 8, request_grace, ..Default::default() });
    let mut others: Vec<_> = (10..13).map(|host| connect_from(host, address)).collect();
    bench.turn();
    let mut crowd: Vec<_> = (0..50).map(|_| connect_from(1, address)).collect();
    for _ in 0..20 {
        bench.now += Duration::from_millis(51);
        bench.turn();
    }
    until("all but its share are closed", || {
        let closed = crowd.iter_mut().map(is_closed).filter(|&closed| closed).count();
        assert!(closed <= 46, "{closed} are closed");
        (closed == 46).then_some(())
    });
    for other in &mut others {
        assert!(!is_closed(other), "older, and not too many");
        other.write_all(&request_v1()).unwrap();
    }
    for _ in 0..3 {
        assert!(matches!(bench.event().kind, CmEventKind::ConnectRequest { .. }));
    }
}

#[test]
fn a_burst_of_honest_clients_is_served_in_full() {
    let (mut bench, _, address) = listening(IwarpConfig { max_handshakes: 16, ..Default::default() });
    let mut clients: Vec<_> = (0..100).map(|_| connect_from(1, address)).collect();
    bench.turn();
    // The clients send their requests after all of them have connected.
    bench.now += Duration::from_millis(1);
    let mut served = 0;
    clients.iter_mut().for_each(|client| client.write_all(&request_v1()).unwrap());
    while served < 100 {
        let id = bench.request();
        bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
        bench.events.retain(|event| !matches!(event.kind, CmEventKind::Established { .. }));
        bench.iwarp.destroy_id(id, bench.now).unwrap();
        served += 1;
    }
    assert_eq!((bench.iwarp.endpoints.handshakes.unfinished, bench.iwarp.endpoints.handshakes.paused.len()), (0, 0));
}

#[test]
fn only_allowed_networks_may_connect() {
    let networks = vec!["127.0.0.8/29".parse().unwrap(), "2001:db8::/32".parse().unwrap()];
    let (mut bench, _, address) = listening(IwarpConfig { allowed_peers: Some(networks), ..Default::default() });
    let (mut stranger, mut friend) = (connect_from(7, address), connect_from(9, address));
    for peer in [&mut stranger, &mut friend] {
        peer.write_all(&request_v1()).unwrap();
    }
    assert!(
        matches!(bench.event().kind, CmEventKind::ConnectRequest { peer, .. } if peer.ip() == IpAddr::from([127, 0, 0, 9]))
    );
    bench.end(&mut stranger);
    assert_eq!((bench.iwarp.endpoints.len(), bench.events.len()), (2, 0));
    let refused = Iwarp::new(
        IwarpConfig { max_handshakes_per_peer: Some(0), ..Default::default() },
        TcpNet::new().unwrap(),
        Box::new(|_| {}),
    );
    assert!(matches!(refused, Err(TransportError::OutOfRange { what: "max_handshakes_per_peer", .. })));
}

#[test]
fn a_half_open_handshake_takes_little() {
    let bytes = size_of::<CmEndpoint<crate::shm::MappedSegment>>()
        + size_of::<FrameReader>()
        + 4 * size_of::<rdma_transport::newcomers::NewcomerEntry<Key>>();
    assert!(bytes < 2048, "{bytes}");
}

/// Sockets whose `accept` always fails, because the system has no descriptors left. If `then_aborted` is true, each attempt after the first
/// one fails because the peer has closed its connection.
#[derive(Debug)]
struct Exhausted {
    inner: TcpNet,
    attempts: usize,
    then_aborted: bool,
}

impl StreamSockets for Exhausted {
    forward_net!(
        channel wake poll listen connect connected promote local_address max_segment all_acknowledged recv
        send shutdown close release adopt
    );

    fn accept(&mut self, _: SocketId) -> io::Result<(SocketId, SocketAddr)> {
        self.attempts += 1;
        let aborted = self.then_aborted && self.attempts > 1;
        Err(io::Error::from_raw_os_error(if aborted { libc::ECONNABORTED } else { libc::EMFILE }))
    }
}

impl LocalSockets for Exhausted {
    forward_net!(local_path segment listen_local accept_local connect_local renew_local pass take);
}

impl PacketSockets for Exhausted {
    forward_net!(has_packets interface source open_packets open_group send_packets receive_packets take_refusal);
}

/// Without descriptors, there is one attempt to accept (and one warning) per back-off, however many peers connect.
#[test]
fn without_descriptors_it_tries_once_per_back_off() {
    let net = Exhausted { inner: TcpNet::new().unwrap(), attempts: 0, then_aborted: false };
    let mut iwarp = Iwarp::new(IwarpConfig::default(), net, Box::new(|_| {})).unwrap();
    let listener = iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
    let address = iwarp.local_address(listener).unwrap();
    let mut now = Instant::now();
    let mut peers = Vec::new();
    for step in 0..50 {
        peers.push(connect_from(1, address));
        // The edge on the listener may arrive some time after the peer has connected.
        until("an attempt", || {
            assert!(iwarp.next_cm_event(now).unwrap().is_none());
            (iwarp.hub.net.attempts > step / 10).then_some(())
        });
        assert_eq!(iwarp.hub.net.attempts, 1 + step / 10, "step {step}");
        assert!(iwarp.next_deadline().is_some_and(|at| at <= now + Duration::from_millis(100)));
        now += Duration::from_millis(10);
    }
}

/// A pause of a listener ends during `progress`. If more connections wait than one call accepts,
/// the CM channel is woken, because no edge reports them.
#[test]
fn progress_reports_connections_that_wait_behind_a_pause() {
    let net = Exhausted { inner: TcpNet::new().unwrap(), attempts: 0, then_aborted: true };
    let mut iwarp = Iwarp::new(IwarpConfig::default(), net, Box::new(|_| {})).unwrap();
    let listener = iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
    let mut now = Instant::now();
    let _peer = connect_from(1, iwarp.local_address(listener).unwrap());
    until("the first attempt", || {
        assert!(iwarp.next_cm_event(now).unwrap().is_none());
        (iwarp.hub.net.attempts == 1).then_some(())
    });
    let is_woken = |iwarp: &Iwarp<Exhausted>| {
        let (mut poll, mut events) = (mio::Poll::new().unwrap(), mio::Events::with_capacity(1));
        let channel = iwarp.hub.net.channel(NetChannel::Cm);
        let interest = mio::Interest::READABLE;
        poll.registry().register(&mut mio::unix::SourceFd(&channel), mio::Token(0), interest).unwrap();
        poll.poll(&mut events, Some(Duration::ZERO)).unwrap();
        !events.is_empty()
    };
    assert!(!is_woken(&iwarp));
    now += IwarpConfig::default().accept_backoff;
    iwarp.progress(now, Drive::Full);
    assert_eq!((iwarp.hub.net.attempts, iwarp.endpoints.handshakes.backlog.len()), (1 + ACCEPTS, 1));
    assert!(is_woken(&iwarp));
    // A further edge of the listener does not add it to the backlog again.
    iwarp.endpoints.accept_some(&mut iwarp.hub, listener.0, now);
    assert_eq!((iwarp.hub.net.attempts, iwarp.endpoints.handshakes.backlog.len()), (1 + 2 * ACCEPTS, 1));
}

/// Connects one socket from each of `hosts`, and sends its MPA request. Returns the sockets when
/// the provider has queued all requests.
fn queued(bench: &mut Bench, address: SocketAddr, hosts: &[u8]) -> Vec<TcpStream> {
    let mut peers: Vec<_> = hosts.iter().map(|&host| connect_from(host, address)).collect();
    peers.iter_mut().for_each(|peer| peer.write_all(&request_v1()).unwrap());
    until("all requests are queued", || {
        bench.iwarp.collect(NetChannel::Cm, bench.now).unwrap();
        let handshakes = &bench.iwarp.endpoints.handshakes;
        (handshakes.unfinished == hosts.len() && handshakes.half_open.is_empty()).then_some(())
    });
    peers
}

#[test]
fn a_host_does_not_wait_for_all_requests_of_another() {
    let (mut bench, _, address) = listening(IwarpConfig::default());
    let hosts = [[1; 50].as_slice(), &[2]].concat();
    let _peers = queued(&mut bench, address, &hosts);
    bench.turn();
    let came = bench.events.iter().position(|event| {
        matches!(event.kind, CmEventKind::ConnectRequest { peer, .. } if peer.ip() == IpAddr::from([127, 0, 0, 2]))
    });
    assert_eq!((bench.events.len(), came), (hosts.len(), Some(1)));
}

/// The program receives the event of one request, and that of the other one an hour later. The
/// second request must not be rejected meanwhile.
#[test]
fn a_program_that_is_slow_to_take_requests_refuses_nobody() {
    let (mut bench, _, address) = listening(IwarpConfig::default());
    let mut peers = queued(&mut bench, address, &[1, 1]);
    for _ in 0..2 {
        let id = until("a request", || {
            let event = bench.iwarp.next_cm_event(bench.now).unwrap()?;
            matches!(event.kind, CmEventKind::ConnectRequest { .. }).then_some(event.id)
        });
        bench.qp(id);
        bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
        bench.now += Duration::from_secs(3600);
    }
    for peer in &mut peers {
        assert_eq!(bench.read(peer, 20)[16] & 0x20, 0, "it is accepted");
    }
}

/// A program opens eight connections at the same time, and needs one second for each. The request of the first connection must not wait
/// for the others to start, because the server waits 5 s for it.
#[test]
fn a_connection_does_not_wait_for_others_to_start() {
    const COUNT: usize = 8;
    let (mut server, _, address) = listening(IwarpConfig::default());
    let mut client = Bench::new(IwarpConfig::default());
    let deadline = client.now + Duration::from_secs(60);
    for _ in 0..COUNT {
        client.iwarp.resolve(address, &PathOptions::default(), deadline).unwrap();
    }
    let (mut started, mut up) = (0, 0);
    until("all connections", || {
        if let Some(event) = client.iwarp.next_cm_event(client.now).unwrap() {
            match event.kind {
                CmEventKind::Resolved { .. } => {
                    client.qp(event.id);
                    client.iwarp.connect(event.id, &ConnectParam::default()).unwrap();
                    client.now += Duration::from_secs(1);
                    started += 1;
                }
                CmEventKind::Established { .. } => up += 1,
                other => panic!("{up} of {started} are up: {other:?}"),
            }
        }
        server.now = client.now;
        server.turn();
        for event in std::mem::take(&mut server.events) {
            if let CmEventKind::ConnectRequest { .. } = event.kind {
                server.qp(event.id);
                server.iwarp.accept(event.id, &ConnectParam::default(), server.now).unwrap();
            }
        }
        (up == COUNT).then_some(())
    });
}

/// Twice, the server does not run for an hour while a message of the client is unread: first its
/// MPA request, then its ready-to-receive message. The server must read the message before it
/// applies its time limit.
#[test]
fn what_a_client_sent_in_time_is_read_before_its_time_is_over() {
    let hour = Duration::from_secs(3600);
    let (mut bench, _, address) = listening(IwarpConfig { crc: CrcPolicy::Off, ..Default::default() });
    let mut peer = connect_from(1, address);
    peer.set_nonblocking(true).unwrap();
    until("the handshake begins", || {
        bench.turn();
        (bench.iwarp.endpoints.handshakes.unfinished > 0).then_some(())
    });
    let enhanced = [b"MPA ID Req Frame".as_slice(), &[0x10, 2, 0, 4, 0x80, 16, 0x80, 16]].concat();
    peer.write_all(&enhanced).unwrap();
    bench.now += hour;
    let id = bench.request();
    bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
    assert_eq!(bench.read(&mut peer, 24)[16..18], [0x10, 2]);
    // An empty RDMA Write is the peer's ready-to-receive message.
    peer.write_all(&[0, 14, 0xc1, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    bench.now += hour;
    assert!(matches!(bench.event().kind, CmEventKind::Established { .. }));
}

#[test]
fn a_request_that_is_taken_back_reaches_nobody() {
    let (mut bench, _, address) = listening(IwarpConfig::default());
    let reset = |peer: TcpStream| socket2::SockRef::from(&peer).set_linger(Some(Duration::ZERO)).unwrap();
    // The first peer resets its connection before the provider accepts the connection, and the others when their requests are queued.
    let mut early = connect_from(1, address);
    early.write_all(&request_v1()).unwrap();
    reset(early);
    queued(&mut bench, address, &[1; 5]).into_iter().for_each(reset);
    until("the connections are gone", || {
        bench.iwarp.collect(NetChannel::Cm, bench.now).unwrap();
        (bench.iwarp.endpoints.handshakes.unfinished == 0).then_some(())
    });
    bench.turn();
    assert_eq!((bench.events.len(), bench.iwarp.endpoints.len()), (0, 1));
}

/// From the call of `connect` to the event `Established`, the active side looks its endpoint up
/// eight times.
#[test]
fn a_connect_looks_its_endpoint_up_eight_times() {
    let config = || IwarpConfig { shared_memory: SharedMemoryPolicy::Off, ..IwarpConfig::default() };
    let (mut server, mut client) = (Bench::new(config()), Bench::new(config()));
    let listener = server.iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
    let address = server.iwarp.local_address(listener).unwrap();
    let look_ups = |bench: &Bench| bench.iwarp.endpoints.look_ups.get();
    let id = client.resolve(address);
    let before = look_ups(&client);
    client.iwarp.connect(id, &ConnectParam::default()).unwrap();
    let mut seen = look_ups(&client) - before;
    until("the connection", || {
        server.turn();
        let before = look_ups(&client);
        client.iwarp.collect(NetChannel::Cm, client.now).unwrap();
        seen += look_ups(&client) - before;
        if let Some(CmEvent { id, kind: CmEventKind::ConnectRequest { .. } }) = server.events.pop() {
            server.qp(id);
            server.iwarp.accept(id, &ConnectParam::default(), server.now).unwrap();
        }
        (client.iwarp.hub.events.len() == 1).then_some(())
    });
    assert!(matches!(client.iwarp.hub.events[0].kind, CmEventKind::Established { .. }));
    assert_eq!(seen, 8);
}
