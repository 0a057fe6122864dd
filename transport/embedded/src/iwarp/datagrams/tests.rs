//! Tests of datagrams between two providers, on the system's sockets.

use std::io;
use std::net::UdpSocket;
use std::time::Duration;

use super::super::hub::DEVICE;
use super::super::provider::Iwarp;
use super::*;
use crate::iwarp::forward_net::forward_net;
use crate::iwarp::net::{LocalSockets, PacketSockets, StreamSockets};
use crate::iwarp::{IwarpConfig, TcpNet};
use crate::patience;
use crate::roce::frame::{HEADROOM, ROOM};
use crate::roce::packet::{DatagramHeader, MAX_PAYLOAD};
use crate::test_memory::TestMemory;
use rdma_transport::cm::{CmEvent, ConnectParam};
use rdma_transport::cq::CqAttr;
use rdma_transport::datagram::{Destination, QUEUE_KEY};
use rdma_transport::mem::Memory;
use rdma_transport::provider::{CqId, Drive, PostError, Provider};
use rdma_transport::roles::Datagrams;
use rdma_transport::sockets::Interface;
use rdma_transport::srq::SrqAttr;
use rdma_transport::wc::WcOpcode;
use rdma_transport::wr::{RecvWr, SendFlags, SendOp, SendWr, SgeList};

const DEPTH: usize = 8;
const STRIDE: usize = 4160;

struct DatagramNode {
    iwarp: Iwarp<TcpNet>,
    cq: CqId,
    memory: Memory,
    events: Vec<CmEvent>,
    done: Vec<WorkCompletion>,
}

impl DatagramNode {
    fn new(config: IwarpConfig) -> Self {
        let mut seed = 0_u8;
        let entropy =
            move |bytes: &mut [u8]| bytes.iter_mut().for_each(|byte| (seed, *byte) = (seed.wrapping_add(7), seed));
        let mut iwarp = Iwarp::new(config, TcpNet::new().unwrap(), Box::new(entropy)).unwrap();
        let cq = iwarp.create_cq(DEVICE, &CqAttr::new(64)).unwrap();
        let memory = Memory::new(STRIDE * (DEPTH + 1)).unwrap();
        Self { iwarp, cq, memory, events: Vec::new(), done: Vec::new() }
    }

    fn turn(&mut self) {
        let now = Instant::now();
        self.iwarp.progress(now, Drive::Full);
        while let Some(event) = self.iwarp.next_cm_event(now).unwrap() {
            self.events.push(event);
        }
        self.iwarp.poll_cq(self.cq, 64, &mut self.done).unwrap();
    }

    fn qp(&mut self, id: CmId, depth: usize) -> QpId {
        let attr = QpAttr { max_inline: 64, ..QpAttr::new(self.cq, self.cq, 4, DEPTH as u32) };
        let qp = self.iwarp.create_qp(id, &attr).unwrap();
        (0..depth).for_each(|slot| self.post(qp, slot));
        qp
    }

    fn post(&mut self, qp: QpId, slot: usize) {
        let sges = SgeList::one(self.memory.sge(slot * STRIDE, STRIDE));
        self.iwarp.post_recv(qp, &[RecvWr { wr_id: slot as u64, sges }]).unwrap();
    }

    fn to(&mut self, peer: &DatagramPeer) -> Destination {
        let address = self.iwarp.create_address(DEVICE, &peer.route).unwrap();
        Destination { address, qp_number: peer.qp_number, queue_key: peer.queue_key }
    }

    fn tell(&mut self, qp: QpId, op: SendOp, payload: &[u8]) -> std::result::Result<(), PostError> {
        self.memory.write(DEPTH * STRIDE, payload);
        let sges = SgeList::one(self.memory.sge(DEPTH * STRIDE, payload.len()));
        self.iwarp.post_send(qp, &[SendWr { wr_id: 99, op, sges, flags: SendFlags::SIGNALED }]).map(drop)
    }

    /// Returns the completion and the bytes of the next received datagram, with its route header.
    /// Posts the receive again for the next datagram. Returns `None` if no datagram has arrived.
    fn heard(&mut self) -> Option<(WorkCompletion, Vec<u8>)> {
        self.done.retain(|wc| wc.opcode != WcOpcode::Send);
        let wc = (!self.done.is_empty()).then(|| self.done.remove(0))?;
        let bytes = self.memory.read(wc.wr_id as usize * STRIDE, wc.byte_len as usize);
        self.post(wc.qp, wc.wr_id as usize);
        Some((wc, bytes))
    }
}

fn until<T>(sides: &mut [&mut DatagramNode], mut found: impl FnMut(&mut [&mut DatagramNode]) -> Option<T>) -> T {
    patience::until("what the test waits for", || {
        sides.iter_mut().for_each(|side| side.turn());
        found(sides)
    })
}

fn next(sides: &mut [&mut DatagramNode], of: usize) -> CmEvent {
    until(sides, |sides| (!sides[of].events.is_empty()).then(|| sides[of].events.remove(0)))
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

/// Returns settings with one UDP port for all queue pairs of an address. The port must be less than 32768: Linux gives higher ports to
/// other sockets (`ip_local_port_range`).
fn common(port: u16) -> IwarpConfig {
    let mut config = IwarpConfig::default();
    config.roce.port = Some(port);
    config
}

/// Lets `active` query the service at which `passive` listens. Returns the queue pair of `active`, the queue pair of `passive`, and the
/// destination to which `active` sends.
fn meet(
    active: &mut DatagramNode,
    passive: &mut DatagramNode,
    at: SocketAddr,
    from: SocketAddr,
) -> (QpId, QpId, DatagramPeer) {
    let listener = passive.iwarp.listen_datagram(at, &ListenParam::default()).unwrap();
    let at = passive.iwarp.local_address(listener).unwrap();
    let id = active.iwarp.resolve_datagram(at, Some(from), far()).unwrap();
    let mut sides = [active, passive];
    assert!(matches!(next(&mut sides, 0).kind, CmEventKind::Resolved { device: DEVICE }));
    let here = sides[0].qp(id, DEPTH);
    sides[0].iwarp.connect(id, &ConnectParam { private_data: b"question", ..ConnectParam::default() }).unwrap();
    let CmEvent { id: query, kind: CmEventKind::ConnectRequest { listener: of, private_data, peer, .. } } =
        next(&mut sides, 1)
    else {
        panic!("no question")
    };
    assert_eq!((of, &private_data[..9], peer.ip()), (listener, &b"question\0"[..], from.ip()));
    let there = sides[1].qp(query, DEPTH);
    sides[1].iwarp.accept(query, &ConnectParam { private_data: b"answer", ..ConnectParam::default() }, far()).unwrap();
    assert!(matches!(next(&mut sides, 1).kind, CmEventKind::Established { .. }));
    let CmEventKind::Reached { private_data, peer } = next(&mut sides, 0).kind else { panic!("no answer") };
    assert_eq!(&private_data[..7], b"answer\0");
    assert_eq!(peer.qp_number, sides[1].iwarp.qp_number(there).unwrap());
    (here, there, peer)
}

#[test]
fn a_question_an_answer_and_a_talk() {
    let own = IwarpConfig::default;
    for (config, at, from) in [
        (own(), "127.0.0.1:0", "127.0.0.1:0"),
        (own(), "[::1]:0", "[::1]:0"),
        // The two sides have different addresses, because only one socket can use a UDP port of an address.
        (common(27911), "127.0.0.1:0", "127.0.0.2:0"),
        (common(27911), "127.0.0.1:7", "127.0.0.2:0"),
    ] {
        let (mut active, mut passive) = (DatagramNode::new(config.clone()), DatagramNode::new(config));
        let (at, from): (SocketAddr, SocketAddr) = (at.parse().unwrap(), from.parse().unwrap());
        let (here, there, peer) = meet(&mut active, &mut passive, at, from);
        let max = MAX_PAYLOAD;
        let to = active.to(&peer);
        for len in [0, 1, 2, 3, 511, max] {
            let payload: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
            active.tell(here, SendOp::DatagramWithImmediate(to, 0xfeed_f00d), &payload).unwrap();
            let (wc, bytes) = until(&mut [&mut active, &mut passive], |sides| sides[1].heard());
            let (header, heard) = bytes.split_first_chunk().unwrap();
            assert_eq!((heard, wc.immediate, wc.opcode), (&payload[..], Some(0xfeed_f00d), WcOpcode::Recv));
            assert_eq!(wc.source.qp_number, active.iwarp.qp_number(here).unwrap());
            assert_eq!(frame::parties(header), Some((from.ip(), at.ip())));
            let route = passive.iwarp.route_back(CmId(there.0), &wc, header).unwrap();
            let back = passive.to(&DatagramPeer { route, qp_number: wc.source.qp_number, queue_key: QUEUE_KEY });
            passive.tell(there, SendOp::Datagram(back), &payload).unwrap();
            let (wc, bytes) = until(&mut [&mut active, &mut passive], |sides| sides[0].heard());
            assert_eq!((&bytes[GRH_LEN..], wc.immediate), (&payload[..], None));
            passive.iwarp.destroy_address(back.address).unwrap();
        }
        let long = active.tell(here, SendOp::Datagram(to), &[0; MAX_PAYLOAD + 1]);
        assert!(
            matches!(long, Err(PostError { error: TransportError::OutOfRange { value: 4097, .. }, .. })),
            "{long:?}"
        );
        let other = active.tell(here, SendOp::Send, &[]);
        assert!(matches!(other, Err(PostError { error: TransportError::Unsupported { .. }, .. })), "{other:?}");
        active.iwarp.destroy_address(to.address).unwrap();
        assert!(matches!(active.iwarp.destroy_address(to.address), Err(TransportError::Stale { .. })));
        let stale = active.tell(here, SendOp::Datagram(to), &[]);
        assert!(matches!(stale, Err(PostError { error: TransportError::Stale { .. }, .. })), "{stale:?}");
        // A disconnect flushes the posted work requests. After the ids are destroyed, the provider has no port and no query.
        active.iwarp.disconnect(CmId(here.0), far()).unwrap();
        active.turn();
        assert_eq!(active.done.drain(..).filter(|wc| !wc.status.is_success()).count(), DEPTH);
        active.iwarp.destroy_id(CmId(here.0), far()).unwrap();
        active.iwarp.destroy_cq(active.cq).unwrap();
        assert!(active.iwarp.datagrams.tables.ports.is_empty() && active.iwarp.datagrams.tables.queries.is_empty());
        assert_eq!(active.iwarp.sockets(), 0);
    }
}

#[test]
fn nobody_there_and_a_no() {
    for config in [IwarpConfig::default(), common(27912)] {
        let shared = config.roce.port.is_some();
        let (mut active, mut passive) = (DatagramNode::new(config.clone()), DatagramNode::new(config));
        let at: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let listener = passive.iwarp.listen_datagram(at, &ListenParam::default()).unwrap();
        let there = passive.iwarp.local_address(listener).unwrap();
        let taken = passive.iwarp.listen_datagram(there, &ListenParam::default());
        assert!(matches!(taken, Err(TransportError::Listen { .. })), "{taken:?}");
        let from = Some("127.0.0.3:0".parse().unwrap());
        for (to, refused) in [(SocketAddr::new(there.ip(), 9), true), (there, false)] {
            let mut sides = [&mut active, &mut passive];
            let id = sides[0].iwarp.resolve_datagram(to, from, far()).unwrap();
            assert!(matches!(next(&mut sides, 0).kind, CmEventKind::Resolved { .. }));
            sides[0].iwarp.connect(id, &ConnectParam::default()).unwrap();
            if !refused {
                let query = next(&mut sides, 1).id;
                sides[1].iwarp.reject(query, b"no", far()).unwrap();
            }
            match next(&mut sides, 0).kind {
                CmEventKind::ConnectFailed(ConnectFailure::Refused) => assert!(refused, "{shared}"),
                CmEventKind::Rejected { private_data } => {
                    assert_eq!((refused, &private_data[..3]), (false, &b"no\0"[..]))
                }
                other => panic!("{other:?}"),
            }
            sides[0].iwarp.destroy_id(id, far()).unwrap();
        }
        assert!(passive.iwarp.datagrams.tables.received_queries.is_empty());
    }
}

/// Only queries that the program has not answered count toward the limit. The queries that it has accepted are no reason to drop others.
#[test]
fn accepted_questions_leave_room_for_others() {
    let few = IwarpConfig { max_handshakes: 1, ..IwarpConfig::default() };
    let (mut active, mut passive) = (DatagramNode::new(IwarpConfig::default()), DatagramNode::new(few));
    let (at, from) = ("127.0.0.1:0".parse().unwrap(), "127.0.0.3:0".parse().unwrap());
    for count in 1..=2 {
        meet(&mut active, &mut passive, at, from);
        let datagrams = &passive.iwarp.datagrams.tables;
        assert_eq!((datagrams.unanswered, datagrams.received_queries.len()), (0, count));
    }
}

/// Queries that the program has not answered are limited. Later ones are dropped.
#[test]
fn questions_without_an_answer_are_limited() {
    let mut active = DatagramNode::new(IwarpConfig::default());
    let mut passive = DatagramNode::new(IwarpConfig { max_handshakes: 2, ..IwarpConfig::default() });
    let at: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let listener = passive.iwarp.listen_datagram(at, &ListenParam::default()).unwrap();
    let at = passive.iwarp.local_address(listener).unwrap();
    for _ in 0..3 {
        let id = active.iwarp.resolve_datagram(at, None, far()).unwrap();
        active.iwarp.connect(id, &ConnectParam::default()).unwrap();
    }
    until(&mut [&mut passive], |sides| (sides[0].events.len() >= 2).then_some(()));
    (0..10).for_each(|_| passive.turn());
    let datagrams = &passive.iwarp.datagrams.tables;
    assert_eq!((passive.events.len(), datagrams.unanswered, datagrams.received_queries.len()), (2, 2, 2));
}

/// A query that gets no reply is sent again and again. At the deadline of the query, the id fails.
#[test]
fn questions_are_asked_again_until_their_deadline() {
    let mut active = DatagramNode::new(IwarpConfig::default());
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let start = Instant::now();
    let until = start + Duration::from_millis(900);
    let id = active.iwarp.resolve_datagram(peer.local_addr().unwrap(), None, until).unwrap();
    active.iwarp.connect(id, &ConnectParam::default()).unwrap();
    let mut queries = 0;
    let mut now = start;
    // The provider has no clock of its own. So this loop can advance the time from deadline to deadline.
    for _ in 0..20 {
        active.iwarp.progress(now, Drive::Full);
        peer.set_nonblocking(true).unwrap();
        while peer.recv(&mut [0; 512]).is_ok() {
            queries += 1;
        }
        now = active.iwarp.next_deadline().unwrap_or(now).max(now);
    }
    // The query was sent immediately, after 200 ms, and after another 400 ms.
    assert_eq!((queries, now), (3, until));
    let failed = |event: CmEvent| matches!(event.kind, CmEventKind::ConnectFailed(ConnectFailure::Timeout));
    let mut events = std::iter::from_fn(|| active.iwarp.next_cm_event(now).unwrap());
    assert!(events.any(failed));
}

#[test]
fn groups_reach_everyone_in_them() {
    let mut config = IwarpConfig::default();
    config.roce.group_port = 27913;
    // Other processes of the host, which run this test as well, use other groups.
    let [.., high, low] = std::process::id().to_be_bytes();
    let group = format!("239.{high}.{low}.9");
    for (group, from) in [(group.as_str(), "127.0.0.1:0"), ("ff15::4d:209", "[::1]:0")] {
        let (group, from): (IpAddr, SocketAddr) = (group.parse().unwrap(), from.parse().unwrap());
        let (mut one, mut other) = (DatagramNode::new(config.clone()), DatagramNode::new(config.clone()));
        let join = |side: &mut DatagramNode| {
            let id = side.iwarp.resolve_datagram(SocketAddr::new(group, 0), Some(from), far()).unwrap();
            assert!(
                matches!(side.iwarp.join(id, group), Err(TransportError::InvalidState { .. })),
                "without a queue pair"
            );
            let qp = side.qp(id, 4);
            assert!(side.iwarp.join(id, from.ip()).is_err(), "no group");
            side.iwarp.join(id, group).unwrap();
            assert!(matches!(side.iwarp.join(id, group), Err(TransportError::InvalidState { .. })));
            side.turn();
            match side.events.drain(..).next_back().map(|event| event.kind) {
                Some(CmEventKind::Joined { group: joined, peer }) if joined == group => (qp, peer),
                event => panic!("{event:?}"),
            }
        };
        let (first, peer) = join(&mut one);
        let (second, _) = join(&mut other);
        assert_eq!(peer.qp_number, GROUP);
        let to = one.to(&peer);
        // On the loopback interface, Linux has no route to IPv6 multicast groups, so no datagrams are sent there.
        let rounds = if from.is_ipv4() { 10 } else { 0 };
        for round in 0..rounds {
            one.tell(first, SendOp::Datagram(to), &[round; 100]).unwrap();
            let mut heard = [false; 2];
            until(&mut [&mut one, &mut other], |sides| {
                for (side, heard) in sides.iter_mut().zip(&mut heard) {
                    if let Some((wc, bytes)) = side.heard() {
                        assert_eq!(bytes[GRH_LEN..], [round; 100]);
                        let header = bytes.first_chunk().unwrap();
                        assert!(side.iwarp.route_back(CmId(wc.qp.0), &wc, header).is_err(), "it came to a group");
                        *heard = true;
                    }
                }
                (heard == [true; 2]).then_some(())
            });
        }
        other.iwarp.leave(CmId(second.0), group).unwrap();
        assert!(matches!(other.iwarp.leave(CmId(second.0), group), Err(TransportError::InvalidState { .. })));
        one.tell(first, SendOp::Datagram(to), b"the rest of us").unwrap();
        if rounds > 0 {
            until(&mut [&mut one, &mut other], |sides| sides[0].heard());
        }
        assert!(other.heard().is_none());
        one.iwarp.destroy_id(CmId(first.0), far()).unwrap();
        other.iwarp.destroy_id(CmId(second.0), far()).unwrap();
        assert!(one.iwarp.datagrams.tables.ports.is_empty() && other.iwarp.datagrams.tables.ports.is_empty());
    }
}

/// Sends a packet to `to` from a plain socket. If `damage` is not 0, one bit of the octet at that offset is wrong.
fn send(socket: &UdpSocket, to: SocketAddr, header: DatagramHeader, payload: &[u8], damage: usize) {
    let mut buffer = [0; ROOM];
    let start = HEADROOM + header.len();
    buffer[start..start + payload.len()].copy_from_slice(payload);
    let len = header.emit(0, payload.len(), &mut buffer[HEADROOM..]);
    let range = frame::seal(&mut buffer, len, socket.local_addr().unwrap(), to);
    buffer[range.start + damage] ^= u8::from(damage > 0);
    socket.send_to(&buffer[range], to).unwrap();
}

#[test]
fn what_is_wrong_is_dropped_without_a_word() {
    for queue_key in [QUEUE_KEY, 0x1111_1111] {
        strangers_meet(queue_key);
    }
}

fn strangers_meet(queue_key: u32) {
    let mut config =
        IwarpConfig { allowed_peers: Some(vec!["127.0.0.1/32".parse().unwrap()]), ..IwarpConfig::default() };
    config.roce.queue_key = queue_key;
    let mut side = DatagramNode::new(config);
    let (id, _, max) = side.iwarp.bind_datagram("127.0.0.1:0".parse().unwrap()).unwrap();
    assert_eq!(max as usize, MAX_PAYLOAD, "the loopback carries the longest");
    let qp = side.qp(id, DEPTH);
    let to = side.iwarp.local_address(id).unwrap();
    let socket = |ip: &str| UdpSocket::bind((ip, 0)).unwrap();
    let (friend, stranger) = (socket("127.0.0.1"), socket("127.0.0.9"));
    let number = side.iwarp.qp_number(qp).unwrap();
    let good = DatagramHeader { destination: number, source: 77, queue_key, immediate: None, solicited: false };
    send(&stranger, to, good, b"from elsewhere", 0);
    send(&friend, to, DatagramHeader { queue_key: queue_key + 1, ..good }, b"another key", 0);
    send(&friend, to, DatagramHeader { destination: number + 1, ..good }, b"nobody", 0);
    send(&friend, to, DatagramHeader { destination: GROUP, ..good }, b"no group", 0);
    send(&friend, to, good, b"damaged", 21);
    let mad = DatagramHeader { destination: mad::QUEUE_PAIR, source: 1, queue_key: mad::QUEUE_KEY, ..good };
    send(&friend, to, mad, &[0xff; mad::LEN], 0);
    send(&friend, to, mad, b"too short", 0);
    friend.send_to(&[0; 3], to).unwrap();
    friend.send_to(&[0x64; 9000], to).unwrap();
    // A valid query for an unknown service is the only packet that gets a reply. The reply is as long as the query.
    let data = [0; mad::REQUEST_DATA];
    let query = SidrRequest { transaction: 1, request: 2, service: 3, from: to, to: to.ip(), data };
    send(&friend, to, mad, &query.emit(), 0);
    send(&friend, to, good, b"good", 0);
    let (wc, bytes) = until(&mut [&mut side], |sides| sides[0].heard());
    assert_eq!((&bytes[GRH_LEN..], wc.source.qp_number), (&b"good"[..], 77));
    assert!(side.heard().is_none() && side.events.is_empty());
    let mut reply = [0; 9000];
    friend.set_nonblocking(true).unwrap();
    let (len, from) = friend.recv_from(&mut reply).unwrap();
    assert_eq!((len, from), (20 + mad::LEN + 4, to));
    assert!(matches!(
        mad::parse(&reply[20..20 + mad::LEN]),
        Some(mad::SidrMessage::Reply(reply)) if reply.status == SidrStatus::Unsupported && reply.request == 2
    ));
    assert!(friend.recv_from(&mut reply).is_err(), "one answer, and nothing else");
    stranger.set_nonblocking(true).unwrap();
    assert!(stranger.recv_from(&mut reply).is_err());
}

/// Sockets of a host whose only address is fe80::1, on each of its interfaces. Like the system, refuses this address without its scope.
/// Internally the sockets are bound to the loopback interface.
#[derive(Debug)]
struct LinkLocalNet {
    inner: TcpNet,
    bound: BTreeMap<SocketId, SocketAddr>,
}

impl StreamSockets for LinkLocalNet {
    forward_net!(
        channel wake poll listen accept connect connected promote max_segment all_acknowledged recv send
        shutdown release adopt
    );

    fn local_address(&self, socket: SocketId) -> io::Result<SocketAddr> {
        self.bound.get(&socket).copied().ok_or(io::ErrorKind::NotConnected.into())
    }

    fn close(&mut self, socket: SocketId, reset: bool) {
        self.bound.remove(&socket);
        self.inner.close(socket, reset);
    }
}

impl LocalSockets for LinkLocalNet {
    forward_net!(local_path segment listen_local accept_local connect_local renew_local pass take);
}

impl PacketSockets for LinkLocalNet {
    forward_net!(send_packets receive_packets take_refusal);

    fn has_packets(&self) -> bool {
        true
    }

    fn interface(&self, address: SocketAddr) -> io::Result<Interface> {
        match address {
            SocketAddr::V6(v6) if v6.scope_id() > 0 => Ok(Interface { index: v6.scope_id(), mtu: 65536 }),
            _ => Err(io::ErrorKind::AddrNotAvailable.into()),
        }
    }

    fn source(&self, _: SocketAddr) -> io::Result<IpAddr> {
        Ok("fe80::1".parse().unwrap())
    }

    fn open_packets(&mut self, mut address: SocketAddr) -> io::Result<SocketId> {
        if !matches!(address, SocketAddr::V6(v6) if v6.scope_id() > 0) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let socket = self.inner.open_packets("127.0.0.1:0".parse().unwrap())?;
        if address.port() == 0 {
            address.set_port(self.inner.local_address(socket)?.port());
        }
        self.bound.insert(socket, address);
        Ok(socket)
    }

    fn open_group(&mut self, group: SocketAddr, _: IpAddr, _: Interface) -> io::Result<SocketId> {
        let socket = self.inner.open_packets("127.0.0.1:0".parse().unwrap())?;
        self.bound.insert(socket, group);
        Ok(socket)
    }
}

/// Each socket at a link-local address is bound with the scope of the address, and belongs to the interface with that index. Ids share a
/// socket only if their addresses have the same scope.
#[test]
fn link_local_addresses_keep_their_scope() {
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    for config in [IwarpConfig::default(), common(27914)] {
        let net = LinkLocalNet { inner: TcpNet::new().unwrap(), bound: BTreeMap::new() };
        let mut iwarp = Iwarp::new(config, net, Box::new(|bytes| bytes.fill(7))).unwrap();
        let (bound, ..) = iwarp.bind_datagram(at("[fe80::1%3]:0")).unwrap();
        let listener = iwarp.listen_datagram(at("[fe80::1%3]:7"), &ListenParam::default()).unwrap();
        let (other, ..) = iwarp.bind_datagram(at("[fe80::1%4]:0")).unwrap();
        let asking = iwarp.resolve_datagram(at("[fe80::2%3]:7"), Some(at("[fe80::1%3]:0")), far()).unwrap();
        let routed = iwarp.resolve_datagram(at("[fe80::2%4]:7"), None, far()).unwrap();
        for (id, scope) in [(bound, 3), (listener, 3), (other, 4), (asking, 3), (routed, 4)] {
            let local = iwarp.local_address(id).unwrap();
            assert_eq!(local.to_string(), format!("[fe80::1%{scope}]:{}", local.port()));
            let port = iwarp.datagrams.ids.get(iwarp.endpoints.datagrams_of(id).unwrap()).unwrap().port;
            assert_eq!(iwarp.datagrams.tables.ports.get(port).unwrap().interface.index, scope);
        }
        assert_eq!(iwarp.local_address(asking), iwarp.local_address(bound), "one socket");
        assert_eq!(iwarp.local_address(routed), iwarp.local_address(other), "one socket");
        // A socket at another kind of address does not know the interface of the peer.
        let refused = iwarp.resolve_datagram(at("[fe80::2%3]:7"), Some(at("[fd00::1]:0")), far());
        assert!(matches!(refused, Err(TransportError::InvalidState { .. })), "{refused:?}");
        // Each interface has its own membership in a group.
        let (group, cq) = ("ff15::4d:214".parse().unwrap(), iwarp.create_cq(DEVICE, &CqAttr::new(64)).unwrap());
        let joined = [bound, asking, other].map(|id| {
            iwarp.create_qp(id, &QpAttr::new(cq, cq, 4, 4)).unwrap();
            iwarp.join(id, group).unwrap();
            let (_, port) = iwarp.datagrams.ids.get(iwarp.endpoints.datagrams_of(id).unwrap()).unwrap().groups[0];
            (port, iwarp.datagrams.tables.ports.get(port).unwrap().interface.index)
        });
        assert_eq!(joined.map(|(_, interface)| interface), [3, 3, 4]);
        assert!(joined[0] == joined[1] && joined[0].0 != joined[2].0);
    }
}

/// Two ids share a UDP port, and one of them is disconnected. A datagram to its queue pair consumes
/// no receive of its shared receive queue.
#[test]
fn nothing_is_delivered_after_a_disconnect() {
    let mut side = DatagramNode::new(IwarpConfig::default());
    let (ended, ..) = side.iwarp.bind_datagram("127.0.0.1:0".parse().unwrap()).unwrap();
    let (other, ..) = side.iwarp.bind_datagram("127.0.0.1:0".parse().unwrap()).unwrap();
    let to = side.iwarp.local_address(ended).unwrap();
    assert_eq!(side.iwarp.local_address(other), Some(to), "one socket");
    let shared = side.iwarp.shared_receives().unwrap();
    let srq = shared.create_srq(DEVICE, &SrqAttr::new(4)).unwrap();
    let attr = QpAttr { srq: Some(srq), ..QpAttr::new(side.cq, side.cq, 4, DEPTH as u32) };
    let gone = side.iwarp.create_qp(ended, &attr).unwrap();
    let sges = SgeList::one(side.memory.sge(DEPTH * STRIDE, STRIDE));
    side.iwarp.shared_receives().unwrap().post_srq_recv(srq, &[RecvWr { wr_id: 77, sges }]).unwrap();
    let qp = side.qp(other, 4);
    side.iwarp.disconnect(ended, far()).unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    for (qp, payload) in [(gone, b"late"), (qp, b"good")] {
        let destination = side.iwarp.qp_number(qp).unwrap();
        let header =
            DatagramHeader { destination, source: 77, queue_key: QUEUE_KEY, immediate: None, solicited: false };
        send(&socket, to, header, payload, 0);
    }
    let (wc, bytes) = until(&mut [&mut side], |sides| sides[0].heard());
    assert_eq!((wc.qp, &bytes[GRH_LEN..]), (qp, &b"good"[..]));
    assert!(side.done.is_empty(), "{:?}", side.done);
}

#[test]
fn addresses_of_no_device_are_refused() {
    let mut side = DatagramNode::new(IwarpConfig::default());
    for address in ["0.0.0.0:0", "[::]:7", "239.1.2.3:0"] {
        let refused = side.iwarp.bind_datagram(address.parse().unwrap());
        assert!(matches!(refused, Err(TransportError::NoDevice { .. })), "{address}: {refused:?}");
    }
    let (peer, from) = ("127.0.0.1:9".parse().unwrap(), "[::1]:0".parse().unwrap());
    assert!(side.iwarp.resolve_datagram(peer, Some(from), far()).is_err());
    let elsewhere = side.iwarp.bind_datagram("203.0.113.77:0".parse().unwrap());
    assert!(matches!(elsewhere, Err(TransportError::Listen { .. })), "{elsewhere:?}");
    let zero = Iwarp::new(common(0), TcpNet::new().unwrap(), Box::new(|_| {}));
    assert!(matches!(zero, Err(TransportError::OutOfRange { .. })));
}
