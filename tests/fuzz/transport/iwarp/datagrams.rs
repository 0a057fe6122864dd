//! The fuzz target of datagrams: a provider sends and receives datagrams on a network in memory that loses, duplicates, damages and delays
//! packets. A stranger on the network sends arbitrary packets. The tape (the fuzzer's input) chooses all of this.
//!
//! The provider has connection-manager ids at two addresses. The target checks these promises:
//!
//! - Each work request completes once and in order.
//! - Each received payload was on the network unchanged.
//! - Nothing is written outside of a posted receive.
//! - The provider sends at most one reply to each query, and no reply is longer than its query.
//! - No object remains at the end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::super::config::IwarpConfig;
use super::super::hub::DEVICE;
use super::super::net::{LocalSockets, NetChannel, PacketSockets, Ready, SocketId, StreamSockets};
use super::super::provider::Iwarp;
use super::tape::Tape;
use crate::packets::Packets;
use crate::roce::frame::{self, HEADROOM, ROOM};
use crate::roce::mad::{self, SidrRequest, SidrStatus};
use crate::roce::packet::{DatagramHeader, GROUP, VARIANT};
use crate::shm::MappedSegment;
use crate::test_memory::TestMemory;
use rdma_transport::cm::{CmEventKind, CmId, ConnectParam, ListenParam};
use rdma_transport::cq::CqAttr;
use rdma_transport::datagram::{AddressId, DatagramPeer, Destination, GRH_LEN, QUEUE_KEY};
use rdma_transport::mem::{Memory, RecvSlice, SendSlice};
use rdma_transport::provider::{CqId, Drive, Provider};
use rdma_transport::qp::{QpAttr, QpId};
use rdma_transport::roles::Datagrams;
use rdma_transport::slab::{Key, Slab};
use rdma_transport::sockets::Interface;
use rdma_transport::wc::{WcOpcode, WcStatus};
use rdma_transport::wr::{RecvWr, SendFlags, SendOp, SendWr, SgeList};

/// The largest number of packets in flight.
const ON_THE_WAY: usize = 64;
/// The largest number of posted receives of a queue pair.
const PLACES: usize = 4;
/// The length of the buffer of a receive, in bytes.
const RECEIVE: usize = 160;
/// The number of bytes after each buffer that must not be written.
const MARGIN: usize = 32;
/// The value of the bytes that must not be written.
const CANARY: u8 = 0xc5;
/// The longest payload that the provider sends, in bytes.
const SOURCE: usize = 300;
/// The largest number of steps of a tape.
const STEPS: usize = 400;
/// The largest number of connection-manager ids at the same time.
const IDS: usize = 6;

/// A packet in flight: the sender's address, the receiver's address, and the content.
type Packet = (SocketAddr, SocketAddr, Vec<u8>);

/// A socket: its address, its local address if it is a member of a group, and the packets in its receive queue.
type Socket = (SocketAddr, Option<IpAddr>, VecDeque<(SocketAddr, Vec<u8>)>);

/// The network: the sockets, and the packets in flight.
#[derive(Debug, Default)]
struct Wire {
    sockets: Slab<Socket>,
    edges: Vec<(SocketId, Ready)>,
    on_the_way: VecDeque<Packet>,
    refusals: VecDeque<SocketAddr>,
    full: bool,
    next_port: u16,
}

#[derive(Clone, Debug, Default)]
struct Post(Arc<Mutex<Wire>>);

impl Post {
    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, mut address: SocketAddr, member: Option<IpAddr>) -> io::Result<SocketId> {
        let mut wire = self.wire();
        if address.port() == 0 {
            wire.next_port += 1;
            address.set_port(1000 + wire.next_port);
        }
        if wire.sockets.iter().any(|(_, (other, at, _))| *other == address && *at == member) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Ok(SocketId(wire.sockets.insert((address, member, VecDeque::new()))))
    }

    /// Puts a packet into the receive queue of each socket whose address is the packet's destination.
    fn deliver(&self, (from, to, octets): &Packet) {
        let mut wire = self.wire();
        for key in wire.sockets.keys() {
            let Some((address, _, queue)) = wire.sockets.get_mut(key) else { continue };
            if address == to && queue.len() < ON_THE_WAY {
                queue.push_back((*from, octets.clone()));
                wire.edges.push((SocketId(key), Ready { readable: true, ..Ready::default() }));
            }
        }
    }
}

fn nothing<T>() -> io::Result<T> {
    Err(io::ErrorKind::WouldBlock.into())
}

impl StreamSockets for Post {
    fn channel(&self, _: NetChannel) -> RawFd {
        -1
    }

    fn wake(&mut self, _: NetChannel) {}

    fn poll(&mut self, channel: NetChannel, edges: &mut Vec<(SocketId, Ready)>) -> io::Result<bool> {
        if channel == NetChannel::Completion {
            edges.append(&mut self.wire().edges);
        }
        Ok(false)
    }

    fn listen(&mut self, _: SocketAddr, _: u32) -> io::Result<SocketId> {
        nothing()
    }

    fn accept(&mut self, _: SocketId) -> io::Result<(SocketId, SocketAddr)> {
        nothing()
    }

    fn connect(&mut self, _: SocketAddr) -> io::Result<SocketId> {
        nothing()
    }

    fn connected(&mut self, _: SocketId) -> io::Result<()> {
        nothing()
    }

    fn promote(&mut self, _: SocketId) -> io::Result<()> {
        nothing()
    }

    fn local_address(&self, socket: SocketId) -> io::Result<SocketAddr> {
        self.wire().sockets.get(socket.0).map(|(address, ..)| *address).ok_or(io::ErrorKind::NotFound.into())
    }

    fn max_segment(&self, _: SocketId) -> io::Result<usize> {
        nothing()
    }

    fn all_acknowledged(&self, _: SocketId) -> bool {
        true
    }

    fn recv(&mut self, _: SocketId, _: &mut [RecvSlice<'_>]) -> io::Result<usize> {
        nothing()
    }

    fn send(&mut self, _: SocketId, _: &[SendSlice<'_>]) -> io::Result<usize> {
        nothing()
    }

    fn shutdown(&mut self, _: SocketId) {}

    fn close(&mut self, socket: SocketId, _: bool) {
        self.wire().sockets.remove(socket.0);
    }

    fn release(&mut self, _: SocketId) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn adopt(&mut self, _: OwnedFd) -> io::Result<SocketId> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl LocalSockets for Post {
    type Segment = MappedSegment;

    fn segment(&mut self, memory: Memory) -> MappedSegment {
        MappedSegment::new(memory)
    }

    fn local_path(&self, _: SocketId) -> Option<u32> {
        None
    }

    fn listen_local(&mut self, _: &[u8]) -> io::Result<SocketId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn accept_local(&mut self, _: SocketId) -> io::Result<SocketId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn connect_local(&mut self, _: &[u8]) -> io::Result<SocketId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn renew_local(&mut self) {}

    fn pass(&mut self, _: SocketId, _: &[u8], _: Option<BorrowedFd<'_>>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn take(&mut self, _: SocketId, _: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl PacketSockets for Post {
    fn has_packets(&self) -> bool {
        true
    }

    fn interface(&self, _: SocketAddr) -> io::Result<Interface> {
        Ok(Interface { index: 1, mtu: 700 })
    }

    fn source(&self, _: SocketAddr) -> io::Result<IpAddr> {
        Ok(address(0).ip())
    }

    fn open_packets(&mut self, address: SocketAddr) -> io::Result<SocketId> {
        self.open(address, None)
    }

    fn open_group(&mut self, group: SocketAddr, at: IpAddr, _: Interface) -> io::Result<SocketId> {
        self.open(group, Some(at))
    }

    fn send_packets(&mut self, socket: SocketId, packets: &Packets, first: usize) -> io::Result<usize> {
        let mut wire = self.wire();
        let Some(&(from, ..)) = wire.sockets.get(socket.0) else { return Err(io::ErrorKind::NotFound.into()) };
        if wire.full {
            return nothing();
        }
        // This function sends at most three packets of a batch, so the provider must call it again for the remaining ones.
        let some = first..packets.len().min(first + 3);
        let sent = some.clone().filter_map(|nth| packets.read(nth).map(|(octets, to)| (from, to, octets.to_vec())));
        wire.on_the_way.extend(sent);
        Ok(some.len())
    }

    fn receive_packets(&mut self, socket: SocketId, packets: &mut Packets) -> io::Result<(usize, bool)> {
        packets.clear();
        let mut wire = self.wire();
        let Some((.., queue)) = wire.sockets.get_mut(socket.0) else { return nothing() };
        while let Some((from, octets)) = (!packets.is_full()).then(|| queue.pop_front()).flatten() {
            packets.arrive(from, &octets);
        }
        if packets.is_empty() { nothing() } else { Ok((packets.len(), queue.is_empty())) }
    }

    fn take_refusal(&mut self, _: SocketId) -> io::Result<(Option<SocketAddr>, io::Error)> {
        let refused = self.wire().refusals.pop_front();
        refused.map_or_else(nothing, |peer| Ok((Some(peer), io::ErrorKind::ConnectionRefused.into())))
    }
}

/// Returns the address that `which % 4` selects: the first (0) or the second (1) address of the provider, that of the stranger (2), or an
/// IPv6 address (3).
fn address(which: u8) -> SocketAddr {
    match which % 4 {
        0 => "10.0.0.1:7".parse(),
        1 => "10.0.0.2:9".parse(),
        2 => "10.0.0.9:1234".parse(),
        _ => "[fd00::1]:7".parse(),
    }
    .unwrap_or(SocketAddr::from(([10, 0, 0, 1], 7)))
}

/// The work requests of a queue pair of the provider. `places` has the id of the receive that is posted in each slot. `receives` (ids and
/// lengths) and `sends` (ids) have the work requests that have not completed, in the order of posting.
#[derive(Default)]
struct Work {
    places: [Option<u64>; PLACES],
    receives: VecDeque<(u64, usize)>,
    sends: VecDeque<u64>,
}

struct World<'a> {
    tape: Tape<'a>,
    post: Post,
    iwarp: Iwarp<Post>,
    now: Instant,
    cq: CqId,
    memory: Memory,
    ids: Vec<CmId>,
    work: BTreeMap<Key, (usize, Work)>,
    addresses: Vec<(AddressId, DatagramPeer)>,
    /// Payloads that were on the network undamaged. The provider may deliver these and no others.
    said: BTreeSet<Vec<u8>>,
    questions: usize,
    heard: usize,
    /// Request and transaction ids of the queries that the provider has sent. The stranger puts these ids into its own messages.
    seen: Vec<(u32, u64)>,
    next: u64,
}

/// Runs a tape. Returns two numbers: the datagrams that the provider received, and the lookup queries that arrived at the provider.
#[allow(
    clippy::missing_panics_doc,
    clippy::disallowed_methods,
    reason = "a target panics, and its time begins with the system's"
)]
pub fn datagrams(octets: &[u8]) -> (usize, usize) {
    let mut tape = Tape::new(octets);
    let mut config = IwarpConfig { max_handshakes: 3, ..IwarpConfig::default() };
    match tape.byte() % 4 {
        1 => config.roce.port = Some(4791),
        2 => config.allowed_peers = Some(vec!["10.0.0.0/29".parse().expect("a network")]),
        _ => {}
    }
    let post = Post::default();
    let mut counter = 0_u8;
    let entropy =
        move |bytes: &mut [u8]| bytes.iter_mut().for_each(|b| (counter, *b) = (counter.wrapping_add(1), counter));
    let mut iwarp = Iwarp::new(config, post.clone(), Box::new(entropy)).expect("settings in range");
    let cq = iwarp.create_cq(DEVICE, &CqAttr::new(512)).expect("a queue");
    let memory = Memory::new(IDS * PLACES * (RECEIVE + MARGIN) + SOURCE).expect("memory");
    memory.write(0, &vec![CANARY; memory.len()]);
    let mut world = World {
        tape,
        post,
        iwarp,
        now: Instant::now(),
        cq,
        memory,
        ids: Vec::new(),
        work: BTreeMap::new(),
        addresses: Vec::new(),
        said: BTreeSet::new(),
        questions: 0,
        heard: 0,
        seen: Vec::new(),
        next: 0,
    };
    world.settle();
    for _ in 0..STEPS {
        if world.tape.is_over() {
            break;
        }
        world.step();
        world.turn(Drive::Full);
    }
    world.end()
}

impl World<'_> {
    fn id(&mut self) -> Option<CmId> {
        let nth = usize::from(self.tape.byte());
        (!self.ids.is_empty()).then(|| self.ids[nth % self.ids.len()])
    }

    fn deadline(&self) -> Instant {
        self.now + Duration::from_secs(3)
    }

    fn step(&mut self) {
        match self.tape.byte() % 20 {
            0 | 1 if self.ids.len() < IDS => self.open(),
            2 | 3 => self.receive(),
            4 | 5 => self.send(),
            6..=10 => self.carry(),
            11 | 12 => self.strange_datagram(),
            13 => self.strange_question(),
            14 => self.strange_answer(),
            15 => {
                let octets = self.tape.octets(400).to_vec();
                let to = self.somewhere();
                self.post.deliver(&(address(2), to, octets));
            }
            16 => {
                self.now += Duration::from_millis(u64::from(self.tape.byte()) * 20);
                let drive = if self.tape.below(128) { Drive::Full } else { Drive::Spin };
                self.turn(drive);
            }
            17 => self.socket(),
            18 => self.user(),
            _ => {
                if let Some(id) = self.id() {
                    if self.tape.below(100) {
                        self.destroy(id);
                    } else {
                        let _ = self.iwarp.disconnect(id, self.now);
                    }
                }
            }
        }
    }

    /// Creates two connection-manager ids, one at each address of the provider. Each has a queue pair with posted receives, and an address
    /// handle through which the provider can send datagrams to it.
    fn settle(&mut self) {
        for which in [0, 1] {
            let at = SocketAddr::new(address(which).ip(), 0);
            let (id, ..) = self.iwarp.bind_datagram(at).expect("a free port");
            self.ids.push(id);
            self.queue_pair(id);
            for _ in 0..PLACES {
                self.post(id, RECEIVE);
            }
            let local = self.iwarp.local_address(id).expect("it is bound");
            let qp_number = self.iwarp.qp_number(QpId(id.0)).expect("it has one");
            let peer = DatagramPeer { route: crate::iwarp::ports::route_to(local), qp_number, queue_key: QUEUE_KEY };
            self.addresses.push((self.iwarp.create_address(DEVICE, &peer.route).expect("a route"), peer));
        }
    }

    /// Creates a connection-manager id that is bound to a free port or to a given port, listens, or looks up another endpoint.
    fn open(&mut self) {
        let (which, kind) = (self.tape.byte(), self.tape.byte());
        let at = address(which & 1);
        let id = match kind % 4 {
            0 => self.iwarp.bind_datagram(SocketAddr::new(at.ip(), 0)).map(|(id, ..)| id),
            1 => self.iwarp.listen_datagram(at, &ListenParam::default()),
            2 => self.iwarp.resolve_datagram(address(kind >> 2), Some(at), self.deadline()),
            _ => self.iwarp.bind_datagram(address(which)).map(|(id, ..)| id),
        };
        let Ok(id) = id else { return };
        self.ids.push(id);
        if kind & 0x80 == 0 {
            self.queue_pair(id);
        }
    }

    fn queue_pair(&mut self, id: CmId) {
        let used: BTreeSet<usize> = self.work.values().map(|(place, _)| *place).collect();
        let Some(place) = (0..IDS).find(|place| !used.contains(place)) else { return };
        let attr = QpAttr { max_inline: 64, ..QpAttr::new(self.cq, self.cq, 4, PLACES as u32) };
        if self.iwarp.create_qp(id, &attr).is_ok() {
            self.work.insert(id.0, (place, Work::default()));
        }
    }

    fn place(at: usize, nth: usize) -> usize {
        (at * PLACES + nth) * (RECEIVE + MARGIN)
    }

    fn receive(&mut self) {
        if let (Some(id), len) = (self.id(), usize::from(self.tape.byte()).min(RECEIVE)) {
            self.post(id, len);
        }
    }

    fn post(&mut self, id: CmId, len: usize) {
        let Some((at, work)) = self.work.get_mut(&id.0) else { return };
        let Some(nth) = work.places.iter().position(Option::is_none) else { return };
        self.next += 1;
        let sges = SgeList::one(self.memory.sge(Self::place(*at, nth), len));
        if self.iwarp.post_recv(QpId(id.0), &[RecvWr { wr_id: self.next, sges }]).is_ok() {
            work.places[nth] = Some(self.next);
            work.receives.push_back((self.next, len));
        }
    }

    fn send(&mut self) {
        let Some(id) = self.id() else { return };
        let len = (self.tape.number() as usize).min(SOURCE);
        let (nth, flags, value) = (self.tape.byte(), self.tape.byte(), self.tape.byte());
        if self.addresses.is_empty() {
            return;
        }
        let (handle, peer) = self.addresses[usize::from(nth) % self.addresses.len()];
        let to = Destination { address: handle, qp_number: peer.qp_number, queue_key: peer.queue_key };
        let op = if value < 128 { SendOp::Datagram(to) } else { SendOp::DatagramWithImmediate(to, value.into()) };
        let start = self.memory.len() - SOURCE;
        let payload: Vec<u8> = (0..len).map(|at| (at as u8).wrapping_mul(value | 1)).collect();
        self.memory.write(start, &payload);
        self.next += 1;
        let flags = SendFlags::from_bits_truncate(flags) | SendFlags::SIGNALED;
        let wr = SendWr { wr_id: self.next, op, sges: SgeList::one(self.memory.sge(start, len)), flags };
        if self.iwarp.post_send(QpId(id.0), &[wr]).is_ok() {
            let Some((_, work)) = self.work.get_mut(&id.0) else { panic!("a send without a queue pair") };
            work.sends.push_back(self.next);
        }
    }

    /// Takes one of the packets in flight, and drops it or delivers it. A delivered packet may be damaged. It may also stay in flight, so
    /// that it is delivered again.
    fn carry(&mut self) {
        let (nth, fate, damage) = (usize::from(self.tape.byte()), self.tape.byte(), usize::from(self.tape.byte()));
        let mut packet = {
            let mut wire = self.post.wire();
            while wire.on_the_way.len() > ON_THE_WAY {
                wire.on_the_way.pop_front();
            }
            let count = wire.on_the_way.len();
            if count == 0 {
                return;
            }
            let nth = nth % count;
            if fate & 3 == 3 { wire.on_the_way.get(nth).cloned() } else { wire.on_the_way.remove(nth) }
        }
        .expect("it is there");
        self.note(&packet);
        if fate >= 240 {
            return;
        }
        let damaged = (fate >= 220).then(|| damage % packet.2.len());
        if let Some(at) = damaged {
            // Exactly one bit is flipped. The CRC covers the identification field of the IPv4 header, which a socket does not expose. So
            // the provider accepts a packet whose CRC is correct for any identification. After a single flipped bit, it is correct for
            // none.
            packet.2[at] ^= 1 << (fate & 7);
        }
        // Routers may change the byte at `VARIANT`, so the CRC does not cover it. The provider accepts the packet if a bit of this byte is
        // flipped.
        if damaged.is_none_or(|at| at == VARIANT) {
            self.count(&packet);
        }
        self.post.deliver(&packet);
    }

    /// Checks the CRC of a packet that the provider has sent, and the packet's length if it is a lookup. Records the content of the packet.
    fn note(&mut self, (from, to, octets): &Packet) {
        let (header, place) = DatagramHeader::parse(octets).expect("what is sent is a datagram");
        let mut buffer = vec![0; HEADROOM + octets.len()];
        buffer[HEADROOM..].copy_from_slice(octets);
        assert!(frame::fits(&mut buffer, octets.len(), *from, *to), "a wrong CRC");
        if header.destination == mad::QUEUE_PAIR && header.queue_key == mad::QUEUE_KEY {
            assert_eq!(place.len(), mad::LEN, "the only length there is");
            if let Some(mad::SidrMessage::Request(query)) = mad::parse(&octets[place]) {
                self.seen.push((query.request, query.transaction));
            }
        } else {
            self.said.insert(octets[place].to_vec());
        }
    }

    /// Counts the packet if it is a lookup query. The provider may send at most one reply to each query.
    fn count(&mut self, (.., octets): &Packet) {
        let Some((header, place)) = DatagramHeader::parse(octets) else { return };
        let asks = header.destination == mad::QUEUE_PAIR;
        self.questions += usize::from(asks && matches!(mad::parse(&octets[place]), Some(mad::SidrMessage::Request(_))));
    }

    /// Returns the address of one of the provider's sockets, or a fixed address if the provider has no sockets.
    fn somewhere(&mut self) -> SocketAddr {
        let nth = usize::from(self.tape.byte());
        let wire = self.post.wire();
        let all: Vec<SocketAddr> = wire.sockets.iter().map(|(_, (address, ..))| *address).collect();
        if all.is_empty() { address(0) } else { all[nth % all.len()] }
    }

    /// Sends a packet from the stranger with a valid CRC, so that the provider parses the packet's content.
    fn strange(&mut self, header: DatagramHeader, payload: &[u8]) {
        let (to, from) = (self.somewhere(), self.tape.byte());
        let mut from = address(if from < 200 { 2 } else { from });
        if from.is_ipv4() != to.is_ipv4() {
            from = address(2);
        }
        let mut buffer = vec![0; ROOM];
        let start = HEADROOM + header.len();
        buffer[start..start + payload.len()].copy_from_slice(payload);
        let len = header.emit(7, payload.len(), &mut buffer[HEADROOM..]);
        let place = frame::seal(&mut buffer, len, from, to);
        let packet = (from, to, buffer[place].to_vec());
        self.count(&packet);
        self.said.insert(payload.to_vec());
        self.post.deliver(&packet);
    }

    fn strange_datagram(&mut self) {
        let (to, key, value) = (self.tape.byte(), self.tape.byte(), self.tape.byte());
        let ids: Vec<Key> = self.work.keys().copied().collect();
        let known = ids.get(usize::from(to) % ids.len().max(1)).and_then(|id| self.iwarp.qp_number(QpId(*id)).ok());
        let destination = match to {
            0..=199 => known.unwrap_or(GROUP),
            200..=229 => GROUP,
            _ => self.tape.word(),
        };
        let header = DatagramHeader {
            destination,
            source: self.tape.number(),
            queue_key: if key < 240 { QUEUE_KEY } else { self.tape.word() },
            immediate: (value & 1 == 1).then_some(value.into()),
            solicited: value & 2 == 2,
        };
        let payload = self.tape.octets(400).to_vec();
        self.strange(header, &payload);
    }

    fn strange_mad(&mut self, octets: &mut [u8; mad::LEN]) {
        // With a chance of 60 in 256, one byte of the valid message is changed.
        if self.tape.below(60) {
            let (at, value) = (usize::from(self.tape.byte()), self.tape.byte());
            octets[at % mad::LEN] = value;
        }
        let (destination, source) = (mad::QUEUE_PAIR, mad::QUEUE_PAIR);
        let header =
            DatagramHeader { destination, source, queue_key: mad::QUEUE_KEY, immediate: None, solicited: false };
        self.strange(header, &octets[..]);
    }

    fn query(&mut self) -> SidrRequest {
        let seen = usize::from(self.tape.byte());
        let (request, transaction) = match self.seen.get(seen) {
            Some(seen) => *seen,
            None => (self.tape.number(), u64::from(self.tape.number())),
        };
        let service = [7, 9, 1001, 3][usize::from(self.tape.byte() & 3)];
        let data = [self.tape.byte(); mad::REQUEST_DATA];
        SidrRequest { transaction, request, service, from: address(2), to: address(0).ip(), data }
    }

    fn strange_question(&mut self) {
        let mut octets = self.query().emit();
        self.strange_mad(&mut octets);
    }

    fn strange_answer(&mut self) {
        let status = match self.tape.byte() % 4 {
            0 | 1 => SidrStatus::Known { number: self.tape.word() & GROUP, queue_key: self.tape.word() },
            2 => SidrStatus::Unsupported,
            _ => SidrStatus::Rejected,
        };
        let mut octets = self.query().reply(status, &[9; 300]).emit();
        self.strange_mad(&mut octets);
    }

    /// Changes the state of the sockets: they become full or writable, or they report that a peer refused a packet.
    fn socket(&mut self) {
        let what = self.tape.byte();
        let to = self.somewhere();
        let mut wire = self.post.wire();
        wire.full = what & 1 == 1;
        let closed = what & 2 == 2;
        if closed && wire.refusals.len() < 4 {
            wire.refusals.push_back(if what & 4 == 4 { address(what >> 3) } else { to });
        }
        let ready = Ready { writable: !wire.full, closed, ..Ready::default() };
        let edges: Vec<_> = wire.sockets.keys().into_iter().map(|key| (SocketId(key), ready)).collect();
        wire.edges.extend(edges);
    }

    /// Makes one of the program's calls on a connection-manager id, which may be in any state. The tape chooses the call.
    fn user(&mut self) {
        let (Some(id), what) = (self.id(), self.tape.byte()) else { return };
        let param = ConnectParam { private_data: b"from here", ..ConnectParam::default() };
        let group: IpAddr = if what & 0x40 == 0 { [239, 1, 2, 3].into() } else { [239, 1, 2, 4].into() };
        match what % 8 {
            0 => self.queue_pair(id),
            1 => drop(self.iwarp.connect(id, &param)),
            2 => drop(self.iwarp.accept(id, &param, self.now)),
            3 => {
                if self.iwarp.reject(id, b"no", self.now).is_ok() {
                    self.forget(id);
                }
            }
            4 => {
                let owner = self.id().unwrap_or(id);
                if !self.work.contains_key(&id.0) && owner != id {
                    let _ = self.iwarp.answer_datagram(id, QpId(owner.0), b"yes", self.now);
                    if self.iwarp.local_address(id).is_none() {
                        self.forget(id);
                    }
                }
            }
            5 => drop(self.iwarp.join(id, group)),
            6 => drop(self.iwarp.leave(id, group)),
            _ => {
                if let Some((handle, _)) = self.addresses.pop() {
                    self.iwarp.destroy_address(handle).expect("it was made");
                }
            }
        }
    }

    fn forget(&mut self, id: CmId) {
        self.ids.retain(|other| *other != id);
        self.work.remove(&id.0);
    }

    fn destroy(&mut self, id: CmId) {
        if self.iwarp.destroy_id(id, self.now).is_ok() {
            self.forget(id);
        }
    }

    /// Runs one turn of the provider: progress, connection-manager events, and completions. Checks each completion.
    fn turn(&mut self, drive: Drive) {
        self.iwarp.progress(self.now, drive);
        while let Some(event) = self.iwarp.next_cm_event(self.now).expect("the channel works") {
            match event.kind {
                CmEventKind::ConnectRequest { .. } => {
                    if self.ids.len() < IDS {
                        self.ids.push(event.id);
                    } else {
                        self.iwarp.reject(event.id, &[], self.now).expect("it was asked");
                    }
                }
                CmEventKind::Reached { peer, .. } | CmEventKind::Joined { peer, .. } if self.addresses.len() < 8 => {
                    let handle = self.iwarp.create_address(DEVICE, &peer.route).expect("a route of this provider");
                    self.addresses.push((handle, peer));
                }
                CmEventKind::Resolved { .. } if self.tape.below(200) => {
                    let _ = self.iwarp.connect(event.id, &ConnectParam::default());
                }
                _ => {}
            }
        }
        let mut done = Vec::new();
        self.iwarp.poll_cq(self.cq, 64, &mut done).expect("a queue");
        for wc in done {
            // The completions of a destroyed id are not checked: when the id was destroyed, the target removed its record of the id's work
            // requests.
            let Some((at, work)) = self.work.get_mut(&wc.qp.0) else { continue };
            if wc.opcode != WcOpcode::Recv {
                assert_eq!(Some(wc.wr_id), work.sends.pop_front(), "sends complete once, and in order");
                continue;
            }
            let (wr_id, room) = work.receives.pop_front().expect("as many as were posted");
            assert_eq!(wc.wr_id, wr_id, "receives complete once, and in order");
            let nth = work.places.iter().position(|place| *place == Some(wr_id)).expect("it was posted");
            work.places[nth] = None;
            let (start, len) = (Self::place(*at, nth), wc.byte_len as usize);
            let octets = self.memory.read(start, RECEIVE + MARGIN);
            if wc.status == WcStatus::Success {
                self.heard += 1;
                assert!((GRH_LEN..=room).contains(&len), "{len} of {room}");
                assert!(self.said.contains(&octets[GRH_LEN..len]), "a payload that was on no wire");
                let header: &[u8; GRH_LEN] = octets.first_chunk().expect("a route header");
                let (from, to) = frame::parties(header).expect("both ends");
                if let Ok(route) = self.iwarp.route_back(CmId(wc.qp.0), &wc, header) {
                    assert!(!to.is_multicast() && route.lid > 0, "{from}");
                }
            }
            assert!(octets[room..].iter().all(|octet| *octet == CANARY), "beyond the receive");
            self.memory.write(start, &[CANARY; RECEIVE]);
        }
        let wire = self.post.wire();
        let answers = wire.on_the_way.iter().filter(|(.., octets)| is_answer(octets)).count();
        // Replies that are no longer in flight are not counted here, so this check is weaker than the promise of at most one reply to each
        // query.
        assert!(answers <= self.questions, "{answers} answers to {} questions", self.questions);
    }

    /// Disconnects and destroys all ids, and checks that no object of the provider remains. Returns two numbers: the datagrams that the
    /// provider received, and the lookup queries that arrived at the provider.
    fn end(mut self) -> (usize, usize) {
        self.post.wire().full = false;
        for id in self.ids.clone() {
            let _ = self.iwarp.disconnect(id, self.now);
        }
        for _ in 0..20 {
            self.turn(Drive::Full);
        }
        for (_, work) in self.work.values() {
            let live = work.sends.len() + work.receives.len();
            assert_eq!(live, 0, "what is posted is flushed when its id ends");
        }
        while let Some(id) = self.ids.first().copied() {
            self.iwarp.destroy_id(id, self.now).expect("an id of this side");
            self.forget(id);
            self.turn(Drive::Full);
        }
        for (handle, _) in std::mem::take(&mut self.addresses) {
            self.iwarp.destroy_address(handle).expect("it was made");
        }
        self.iwarp.destroy_cq(self.cq).expect("nobody uses it");
        let tables = &self.iwarp.datagrams.tables;
        assert!(tables.ports.is_empty() && tables.queries.is_empty() && tables.received_queries.is_empty());
        assert!(tables.addresses.is_empty() && self.post.wire().sockets.is_empty());
        assert_eq!(self.iwarp.sockets(), 0);
        (self.heard, self.questions)
    }
}

fn is_answer(octets: &[u8]) -> bool {
    let parsed = DatagramHeader::parse(octets).filter(|(header, _)| header.destination == mad::QUEUE_PAIR);
    parsed.is_some_and(|(_, place)| matches!(mad::parse(&octets[place]), Some(mad::SidrMessage::Reply(_))))
}
