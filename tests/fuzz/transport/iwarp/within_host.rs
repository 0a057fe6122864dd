//! The fuzz target of shared memory within the host: a provider, and a hostile peer that is a
//! process of the same user. The peer connects to the provider, or the provider to the peer. The
//! tape (the fuzzer's input) chooses what the peer does: hellos, packets, announcements with files
//! of any kind, records, words of the segment, bytes on the TCP stream, the ends of its sockets,
//! and time. It also chooses the work requests of the provider.
//!
//! The target checks these promises:
//!
//! - Only a hello with the secret of its offer moves a connection.
//! - Each work request completes once.
//! - No bytes are written that the peer may not write, neither of regions nor beside receives.
//! - The windows stay within their limits.
//! - No socket and no window remains at the end.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::super::config::{CrcPolicy, IwarpConfig, SharedMemoryPolicy};
use super::super::endpoint::{CmEndpoint, Work};
use super::super::endpoints::PARTING;
use super::super::hub::DEVICE;
use super::super::net::{LocalSockets, NetChannel, PacketSockets, Ready, SocketId, StreamSockets};
use super::super::provider::Iwarp;
use super::super::startup::{self, FrameReader, Judgement, StartupTerms};
use super::super::wire::StartupKind;
use super::tape::Tape;
use crate::packets::Packets;
use crate::shm::greeting::{Hello, OFFER_LEN, Offer};
use crate::shm::hostile_file::HostileFile;
use crate::shm::packet::{ACCEPTED_PACKET, CALL_PACKET, MAX_PACKET};
use crate::shm::segment::{CALL, CAPACITY, HALF, HEAD, LEN, RING, SLOTS, SegmentSide, TABLE, TAIL};
use crate::shm::{MappedSegment, Segment, SegmentPayload, Words};
use crate::test_memory::{TestEntry, TestMemory};
use rdma_transport::cm::{CmEventKind, CmId, ConnectParam, ListenParam, PathOptions};
use rdma_transport::cq::CqAttr;
use rdma_transport::mem::{Memory, RecvSlice, SendSlice, Sharing, Window};
use rdma_transport::mr::{Access, LocalKey, RemoteKey};
use rdma_transport::provider::{CqId, Drive, Provider};
use rdma_transport::qp::{QpAttr, QpId};
use rdma_transport::roles::{Extensions, RemoteKeys};
use rdma_transport::slab::{Key, Slab};
use rdma_transport::sockets::Interface;
use rdma_transport::wr::{RecvWr, RemoteAddress, SendFlags, SendOp, SendWr, SgeList};

/// The largest number of steps of a tape.
const STEPS: usize = 400;
/// The hash of each TCP connection.
const PATH_HASH: u32 = 0x5eed;
/// The depth of the queues of the provider's queue pair.
const DEPTH: u32 = 8;
/// The length of a region, and of the place of a receive. Half of such a place is the receive.
const ROOM: usize = 2048;
/// The value of the bytes of regions, and of those beside receives.
const CANARY: u8 = 0xc5;
/// The limits of windows: their bytes, and their number.
const LIMITS: (u64, usize) = (1 << 20, 8);
/// The largest number of Unix sockets of the peer.
const MOST: usize = 6;
/// The address of the listener.
const ADDRESS: ([u8; 4], u16) = ([127, 0, 0, 1], 7);
/// The word length in bytes, and the numbers of words of the kinds of records, from 1 on
/// (`docs/wire.md`).
const WORD: usize = 8;
const WORDS: [usize; 13] = [0, 0, 0, 1, 2, 1, 2, 4, 3, 0, 1, 1, 1];

/// A packet on a Unix socket.
type Packet = (Vec<u8>, Option<OwnedFd>);

/// A socket of the provider.
#[derive(Debug)]
enum HostSocket {
    /// The listener for TCP.
    Listener,
    /// The TCP stream: bytes to the provider, and bytes from it.
    Stream(VecDeque<u8>, Vec<u8>),
    /// The listener for Unix sockets, and the sockets that wait in its backlog.
    Door(VecDeque<Key>),
    /// A Unix socket: packets to the provider.
    Unix(VecDeque<Packet>),
}

/// The sockets of the provider. `ended` are those whose peer has ended them.
#[derive(Debug, Default)]
struct Host {
    sockets: Slab<(HostSocket, NetChannel)>,
    ended: BTreeSet<Key>,
    edges: Vec<(SocketId, Ready)>,
    stream: Option<Key>,
    is_accepted: bool,
    /// The Unix sockets of the peer, and those on which a hello with the right secret was sent
    /// first.
    peers: Vec<Key>,
    entitled: BTreeSet<Key>,
    /// The Unix sockets on which the provider has accepted a segment, or has sent a hello.
    accepted: Vec<Key>,
    /// The file of the segment that the provider has sent.
    file: Option<OwnedFd>,
    is_full: bool,
}

impl Host {
    fn insert(&mut self, socket: HostSocket) -> Key {
        self.sockets.insert((socket, NetChannel::Cm))
    }

    fn edge(&mut self, key: Key) {
        let closed = self.ended.contains(&key);
        self.edges.push((SocketId(key), Ready { readable: true, writable: true, closed }));
    }

    fn pass(&mut self, nth: u8, packet: Packet) {
        let Some(&key) = self.peers.get(usize::from(nth) % self.peers.len().max(1)) else { return };
        if let Some((HostSocket::Unix(packets), _)) = self.sockets.get_mut(key) {
            packets.push_back(packet);
            self.edge(key);
        }
    }
}

#[derive(Clone, Debug, Default)]
struct HostNet(Arc<Mutex<Host>>);

impl HostNet {
    fn host(&self) -> MutexGuard<'_, Host> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn nothing<T>() -> io::Result<T> {
    Err(io::ErrorKind::WouldBlock.into())
}

fn gone() -> io::Error {
    io::ErrorKind::BrokenPipe.into()
}

impl StreamSockets for HostNet {
    fn channel(&self, _: NetChannel) -> RawFd {
        -1
    }

    fn wake(&mut self, _: NetChannel) {}

    fn poll(&mut self, channel: NetChannel, edges: &mut Vec<(SocketId, Ready)>) -> io::Result<bool> {
        let mut host = self.host();
        let Host { sockets, edges: all, .. } = &mut *host;
        all.retain(|&(socket, ready)| match sockets.get(socket.0) {
            Some((_, of)) if *of == channel => {
                edges.push((socket, ready));
                false
            }
            socket => socket.is_some(),
        });
        Ok(false)
    }

    fn listen(&mut self, _: SocketAddr, _: u32) -> io::Result<SocketId> {
        Ok(SocketId(self.host().insert(HostSocket::Listener)))
    }

    fn accept(&mut self, _: SocketId) -> io::Result<(SocketId, SocketAddr)> {
        let mut host = self.host();
        let Some(stream) = host.stream.filter(|_| !host.is_accepted) else { return nothing() };
        host.is_accepted = true;
        host.edge(stream);
        Ok((SocketId(stream), SocketAddr::from(ADDRESS)))
    }

    fn connect(&mut self, _: SocketAddr) -> io::Result<SocketId> {
        let mut host = self.host();
        let key = host.insert(HostSocket::Stream(VecDeque::new(), Vec::new()));
        host.stream = Some(key);
        host.edge(key);
        Ok(SocketId(key))
    }

    fn connected(&mut self, _: SocketId) -> io::Result<()> {
        Ok(())
    }

    fn promote(&mut self, socket: SocketId) -> io::Result<()> {
        let mut host = self.host();
        host.sockets.get_mut(socket.0).ok_or_else(gone)?.1 = NetChannel::Completion;
        host.edge(socket.0);
        Ok(())
    }

    fn local_address(&self, _: SocketId) -> io::Result<SocketAddr> {
        Ok(SocketAddr::from(ADDRESS))
    }

    fn max_segment(&self, _: SocketId) -> io::Result<usize> {
        Ok(1460)
    }

    fn all_acknowledged(&self, _: SocketId) -> bool {
        true
    }

    fn recv(&mut self, socket: SocketId, bufs: &mut [RecvSlice<'_>]) -> io::Result<usize> {
        let mut host = self.host();
        let ended = host.ended.contains(&socket.0);
        let Some((HostSocket::Stream(bytes, _), _)) = host.sockets.get_mut(socket.0) else { return Err(gone()) };
        let mut count = 0;
        for buf in bufs {
            let len = buf.fill(bytes.make_contiguous());
            bytes.drain(..len);
            count += len;
        }
        if count == 0 && !ended { nothing() } else { Ok(count) }
    }

    fn send(&mut self, socket: SocketId, bufs: &[SendSlice<'_>]) -> io::Result<usize> {
        let mut host = self.host();
        let Some((HostSocket::Stream(_, sent), _)) = host.sockets.get_mut(socket.0) else { return Err(gone()) };
        Ok(bufs.iter().map(|buf| buf.append_to(sent, usize::MAX)).sum())
    }

    fn shutdown(&mut self, _: SocketId) {}

    fn close(&mut self, socket: SocketId, _: bool) {
        let mut host = self.host();
        let waiting = match host.sockets.remove(socket.0) {
            Some((HostSocket::Door(waiting), _)) => waiting,
            _ => VecDeque::new(),
        };
        for key in waiting {
            host.sockets.remove(key);
        }
    }

    fn release(&mut self, _: SocketId) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn adopt(&mut self, _: OwnedFd) -> io::Result<SocketId> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl LocalSockets for HostNet {
    type Segment = MappedSegment;

    fn local_path(&self, _: SocketId) -> Option<u32> {
        Some(PATH_HASH)
    }

    fn segment(&mut self, memory: Memory) -> MappedSegment {
        MappedSegment::new(memory)
    }

    fn listen_local(&mut self, _: &[u8]) -> io::Result<SocketId> {
        Ok(SocketId(self.host().insert(HostSocket::Door(VecDeque::new()))))
    }

    fn accept_local(&mut self, listener: SocketId) -> io::Result<SocketId> {
        match self.host().sockets.get_mut(listener.0) {
            Some((HostSocket::Door(waiting), _)) => waiting.pop_front().map_or_else(nothing, |key| Ok(SocketId(key))),
            _ => Err(gone()),
        }
    }

    fn connect_local(&mut self, _: &[u8]) -> io::Result<SocketId> {
        let mut host = self.host();
        let key = host.insert(HostSocket::Unix(VecDeque::new()));
        host.peers.push(key);
        Ok(SocketId(key))
    }

    fn pass(&mut self, socket: SocketId, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut host = self.host();
        if host.ended.contains(&socket.0) {
            return Err(gone());
        }
        if host.is_full && packet != ACCEPTED_PACKET {
            return nothing();
        }
        if packet == ACCEPTED_PACKET {
            host.accepted.push(socket.0);
        }
        if let Some(file) = file.filter(|_| host.file.is_none()) {
            host.file = Some(file.try_clone_to_owned()?);
        }
        Ok(())
    }

    fn take(&mut self, socket: SocketId, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        let mut host = self.host();
        let ended = host.ended.contains(&socket.0);
        let Some((HostSocket::Unix(packets), _)) = host.sockets.get_mut(socket.0) else { return Err(gone()) };
        match packets.pop_front() {
            Some((packet, file)) => {
                let len = packet.len().min(room.len());
                room[..len].copy_from_slice(&packet[..len]);
                Ok((len, file))
            }
            None if ended => Ok((0, None)),
            None => nothing(),
        }
    }

    fn renew_local(&mut self) {}
}

impl PacketSockets for HostNet {
    fn has_packets(&self) -> bool {
        false
    }

    fn interface(&self, _: SocketAddr) -> io::Result<Interface> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn source(&self, _: SocketAddr) -> io::Result<IpAddr> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn open_packets(&mut self, _: SocketAddr) -> io::Result<SocketId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn open_group(&mut self, _: SocketAddr, _: IpAddr, _: Interface) -> io::Result<SocketId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn send_packets(&mut self, _: SocketId, _: &Packets, _: usize) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn receive_packets(&mut self, _: SocketId, _: &mut Packets) -> io::Result<(usize, bool)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn take_refusal(&mut self, _: SocketId) -> io::Result<(Option<SocketAddr>, io::Error)> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The provider, its work requests, and the state of the peer.
struct World<'a> {
    tape: Tape<'a>,
    net: HostNet,
    iwarp: Iwarp<HostNet>,
    now: Instant,
    cq: CqId,
    /// The provider's connection. `None` before it exists.
    id: Option<CmId>,
    /// The side of the provider in the segment.
    side: SegmentSide,
    offer: Option<Offer>,
    /// The peer's mapping of the segment, and the position of its last record.
    segment: Option<MappedSegment>,
    published: u64,
    open: BTreeSet<u64>,
    next: u64,
    inbox: Memory,
    /// The memory of sends, into which Reads write as well, and its key once it is registered.
    out: (Arc<Memory>, LocalKey),
    regions: Vec<(Arc<Memory>, RemoteKey)>,
}

/// Runs a tape. Returns two numbers: the connections that moved to shared memory (0 or 1), and the
/// messages that the provider received.
#[allow(
    clippy::missing_panics_doc,
    clippy::disallowed_methods,
    reason = "a target panics, and its time begins with the system's"
)]
pub fn within_host(octets: &[u8]) -> (usize, usize) {
    let mut tape = Tape::new(octets);
    let options = tape.byte();
    let mut config = IwarpConfig { crc: CrcPolicy::Off, extensions: true, ..IwarpConfig::default() };
    let policies = [SharedMemoryPolicy::Prefer, SharedMemoryPolicy::Require];
    config.shared_memory = policies[usize::from(options & 1)];
    let within = &mut config.within_host;
    (within.window_bytes, within.max_windows) = LIMITS;
    let net = HostNet::default();
    let mut counter = 0_u8;
    let entropy =
        move |bytes: &mut [u8]| bytes.iter_mut().for_each(|b| (counter, *b) = (counter.wrapping_add(1), counter));
    let mut iwarp = Iwarp::new(config, net.clone(), Box::new(entropy)).expect("settings in range");
    let cq = iwarp.create_cq(DEVICE, &CqAttr::new(64)).expect("a queue");
    let side = if options & 2 == 0 { SegmentSide::Passive } else { SegmentSide::Active };
    let inbox = Memory::new(DEPTH as usize * ROOM).expect("memory");
    inbox.write(0, &vec![CANARY; inbox.len()]);
    let mut world = World {
        tape,
        net,
        iwarp,
        now: Instant::now(),
        cq,
        id: None,
        side,
        offer: None,
        segment: None,
        published: 0,
        open: BTreeSet::new(),
        next: 0,
        inbox,
        out: (Arc::new(Memory::new(ROOM).expect("memory")), LocalKey(0)),
        regions: Vec::new(),
    };
    let mut heard = world.begin();
    for _ in 0..STEPS {
        if world.tape.is_over() {
            break;
        }
        world.step();
        heard += world.turn();
    }
    (world.end(), heard)
}

impl World<'_> {
    /// Sets up the TCP connection up to the offer of shared memory. Returns 0: no message was
    /// received.
    fn begin(&mut self) -> usize {
        let address = SocketAddr::from(ADDRESS);
        if self.side == SegmentSide::Passive {
            let terms = StartupTerms { local: true, ..StartupTerms::new(false, 4, 4, false) };
            let request = startup::request(&terms, &[]);
            let mut host = self.net.host();
            host.stream = Some(host.insert(HostSocket::Stream(request.into(), Vec::new())));
            drop(host);
            self.iwarp.listen(address, &ListenParam::default()).expect("a listener");
            let listener = self.net.host().sockets.keys()[1];
            self.net.host().edge(listener);
        } else {
            let until = self.now + Duration::from_secs(10);
            self.iwarp.resolve(address, &PathOptions::default(), until).expect("an attempt");
        }
        self.turn();
        self.turn();
        self.register();
        if self.side == SegmentSide::Passive {
            let sent = self.sent();
            self.offer = Offer::split(&sent).map(|(_, offer)| offer);
            assert_eq!(sent.len(), 20 + 4 + OFFER_LEN, "an offer");
        } else {
            self.reply();
            self.turn();
            self.map();
        }
        0
    }

    /// Returns the bytes that the provider has sent on the TCP stream.
    fn sent(&self) -> Vec<u8> {
        let host = self.net.host();
        match host.stream.and_then(|key| host.sockets.get(key)) {
            Some((HostSocket::Stream(_, sent), _)) => sent.clone(),
            _ => Vec::new(),
        }
    }

    /// Accepts the provider's MPA request, with an offer. The tape chooses if the offer is damaged.
    fn reply(&mut self) {
        let (mut reader, sent) = (FrameReader::new(StartupKind::Request), self.sent());
        let mut rest = &sent[..];
        let header = loop {
            let room = reader.space();
            let len = room.len().min(rest.len());
            assert!(len > 0, "the provider has sent no request");
            room[..len].copy_from_slice(&rest[..len]);
            rest = &rest[len..];
            if let Some(header) = reader.filled(len).expect("a request") {
                break header;
            }
        };
        let Judgement::Acceptable(asked) = startup::judge_request(&header, reader.body().0, false) else {
            panic!("the provider's own request: {header:?}")
        };
        let required = self.rarely();
        let offer = Offer { name: *b"rdma-0123456789a", secret: [7; 16], key: Key::new(1, 1), required };
        let mut data = offer.emit();
        if self.rarely() {
            data[usize::from(self.tape.byte()) % OFFER_LEN] ^= 1 << (self.tape.byte() % 8);
        }
        let (frame, _) = startup::accept(&StartupTerms::new(false, 4, 4, false), &asked, &data);
        let mut host = self.net.host();
        let Some(stream) = host.stream else { return };
        if let Some((HostSocket::Stream(bytes, _), _)) = host.sockets.get_mut(stream) {
            bytes.extend(frame);
        }
        host.edge(stream);
    }

    /// Registers regions: the peer may read and write the first, and only read the second. It has
    /// no right to the third and the fourth.
    fn register(&mut self) {
        let rights = [Access::REMOTE, Access::REMOTE_READ, Access::REMOTE, Access::LOCAL_WRITE];
        for (nth, access) in rights.into_iter().enumerate() {
            let memory = Arc::new(Memory::new(ROOM).expect("memory"));
            memory.write(0, &[CANARY; ROOM]);
            let region = self.iwarp.register(DEVICE, &memory, 0..ROOM, access).expect("a region");
            if nth == 2 {
                self.iwarp.restrict(region.id, QpId(Key::new(70, 1))).expect("a region that exists");
            }
            self.regions.push((memory, region.remote_key));
        }
        let sink = self.iwarp.register(DEVICE, &self.out.0, 0..ROOM, Access::LOCAL_WRITE).expect("a region");
        self.out.1 = sink.local_key;
    }

    fn step(&mut self) {
        match self.tape.byte() % 24 {
            0 if self.net.host().peers.len() < MOST => self.meet(),
            1 => self.hello(),
            2 => {
                let packet = self.tape.octets(MAX_PACKET + 8).to_vec();
                let file = if self.rarely() { Some(self.file().0) } else { None };
                let nth = self.peer();
                self.net.host().pass(nth, (packet, file));
            }
            3 => {
                let (nth, packet) = (self.peer(), if self.tape.below(128) { CALL_PACKET } else { ACCEPTED_PACKET });
                self.net.host().pass(nth, (packet.to_vec(), None));
            }
            4..=6 => self.announce(),
            7..=13 => self.record(),
            14 if self.rarely() => self.word(),
            15 if self.published == 0 => self.put(2, &[], WORD),
            16..=18 => self.post(),
            19 => self.now += Duration::from_millis(u64::from(self.tape.number())),
            20 if self.rarely() => {
                let bytes = self.tape.octets(64).to_vec();
                let mut host = self.net.host();
                let Some(stream) = host.stream else { return };
                if let Some((HostSocket::Stream(received, _), _)) = host.sockets.get_mut(stream) {
                    received.extend(bytes);
                    host.edge(stream);
                }
            }
            21 if self.rarely() => {
                let mut host = self.net.host();
                let nth = usize::from(self.tape.byte());
                let key =
                    if nth % 4 == 0 { host.stream } else { host.peers.get(nth % host.peers.len().max(1)).copied() };
                if let Some(key) = key {
                    host.ended.insert(key);
                    host.edge(key);
                }
            }
            22 => {
                let mut host = self.net.host();
                host.is_full = !host.is_full;
                for key in host.peers.clone() {
                    host.edge(key);
                }
            }
            _ => {}
        }
    }

    /// Connects to the provider's Unix listener.
    fn meet(&mut self) {
        let mut host = self.net.host();
        let is_door = |key: &Key| matches!(host.sockets.get(*key), Some((HostSocket::Door(_), _)));
        let Some(door) = host.sockets.keys().into_iter().find(is_door) else { return };
        let key = host.insert(HostSocket::Unix(VecDeque::new()));
        if let Some((HostSocket::Door(waiting), _)) = host.sockets.get_mut(door) {
            waiting.push_back(key);
        }
        host.peers.push(key);
        host.edge(door);
    }

    /// Sends a hello, which is damaged or has another file sometimes.
    fn hello(&mut self) {
        let Some(offer) = self.offer else { return };
        let mut packet = Hello { secret: offer.secret, key: offer.key, path: PATH_HASH }.emit().to_vec();
        let mut valid = true;
        if self.rarely() {
            let at = usize::from(self.tape.byte()) % packet.len();
            packet[at] ^= 1 << (self.tape.byte() % 8);
            // Bytes 5 to 7 are reserved.
            valid = (5..8).contains(&at);
        }
        let (file, segment) = if !self.rarely() {
            let mut memory = Memory::new_shared(LEN, Sharing::Lent).expect("memory");
            (memory.take_file().expect("a file"), Some(MappedSegment::new(memory)))
        } else {
            (self.file().0, None)
        };
        let nth = self.tape.byte();
        let mut host = self.net.host();
        let key = host.peers.get(usize::from(nth) % host.peers.len().max(1)).copied();
        let Some(key) = key.filter(|_| valid && segment.is_some()) else {
            return host.pass(nth, (packet, Some(file)));
        };
        host.entitled.insert(key);
        host.pass(nth, (packet, Some(file)));
        drop(host);
        (self.segment, self.published) = (segment, 0);
    }

    /// Maps the segment that the provider has made, if it is the active side.
    fn map(&mut self) {
        let file = self.net.host().file.take();
        let window = file.and_then(|file| Window::map(&file, LEN, Sharing::Lent).ok());
        self.segment = window.and_then(|window| window.into_memory().ok()).map(MappedSegment::new);
    }

    /// Returns true with a chance of 1 in 6, and false if the tape has ended.
    fn rarely(&mut self) -> bool {
        !self.tape.below(213)
    }

    /// Returns the index of the connection's Unix socket, or sometimes that of another one.
    fn peer(&mut self) -> u8 {
        if self.rarely() {
            return self.tape.byte();
        }
        let host = self.net.host();
        let of_connection = host.peers.iter().position(|key| host.accepted.contains(key));
        of_connection.unwrap_or(0) as u8
    }

    /// Makes a file. Returns it and its length.
    fn file(&mut self) -> (OwnedFd, u64) {
        const SMALL: u64 = 64 << 10;
        match self.tape.byte() % 7 {
            0 => (HostileFile::with_pages(SMALL), SMALL),
            1 => (HostileFile::sparse(SMALL), SMALL),
            2 => (HostileFile::sparse(1 << 40), 1 << 40),
            3 => (HostileFile::unsealed(SMALL), SMALL),
            4 => (HostileFile::lent(SMALL), SMALL),
            _ => (HostileFile::fixed(SMALL), SMALL),
        }
    }

    /// Returns the first value most of the time.
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        let octet = usize::from(self.tape.byte());
        if octet < 232 { of[0] } else { of[octet % of.len()] }
    }

    /// Announces memory, in the table of the segment and by a packet.
    fn announce(&mut self) {
        let (file, len) = self.file();
        let slot = self.tape.byte() % 36;
        let key = self.pick(&[0, self.regions[0].1.0, 77]);
        let word = u64::from(self.tape.byte() & 3) << 32 | u64::from(key);
        let rights = self.pick(&[Access::empty(), Access::REMOTE, Access::REMOTE_READ, Access::all()]);
        let len = self.pick(&[len, 0, 1, 1 << 40, u64::MAX]);
        let base = self.pick(&[0x1_0000, 0, u64::MAX - 8]);
        let table = TABLE + WORD * usize::from(slot);
        if let Some(segment) = self.segment.as_ref().filter(|_| usize::from(slot) < SLOTS) {
            segment.store(self.side.incoming() + table, word);
        }
        let mut packet = vec![0; MAX_PACKET];
        (packet[0], packet[1]) = (2, slot);
        packet[4..8].copy_from_slice(&rights.bits().to_le_bytes());
        packet[8..16].copy_from_slice(&word.to_le_bytes());
        packet[16..24].copy_from_slice(&base.to_le_bytes());
        packet[24..32].copy_from_slice(&len.to_le_bytes());
        if self.rarely() {
            HostileFile::punch(&file, 0, 4096);
        }
        let nth = self.peer();
        self.net.host().pass(nth, (packet, Some(file)));
    }

    /// Writes a record to the ring, which may have a wrong key, length, flag or window.
    fn record(&mut self) {
        let usual = [3, 5, 7, 9][usize::from(self.tape.byte() % 4)];
        let kind = self.pick(&[usual, 1, 2, 4, 6, 8, 10, 11, 12, 13, 14_u64]);
        let len = self.pick(&[100_u32, 0, 1, 8, 1024, ROOM as u32, 1 << 20, u32::MAX]);
        let flags = self.pick(&[1_u64, 0, 3, 2, 0xff]);
        let slot = self.pick(&[0_u64, 1, 31, 32, 255]);
        let nth = usize::from(self.pick(&[0_u8, 1, 2, 3]));
        let (memory, key) = &self.regions[nth];
        let (address, key) = (memory.as_ptr() as u64, u64::from(key.0));
        let offset = self.pick(&[0, 8, 1, ROOM as u64 - 8, u64::MAX, 1 << 63]);
        let words = [key, address.wrapping_add(offset), self.tape.number().into(), self.tape.number().into()];
        let count = WORDS.get(kind as usize - 1).copied().unwrap_or(0);
        // The payload of a record that is too long is cut off.
        let payload = if flags & 2 != 0 || len as usize > 2 * ROOM { 1 } else { len as usize };
        let has_payload = [3, 4, 5, 10].contains(&kind);
        let size = WORD * (1 + count) + if has_payload { payload.next_multiple_of(WORD) } else { 0 };
        self.put(kind | flags << 8 | slot << 16 | u64::from(len) << 32, &words[..count], size);
    }

    /// Publishes a record with this header, these words and this size. Consumes all that the
    /// provider has published, so that its ring is never full, and rings its doorbell.
    fn put(&mut self, mut header: u64, mut words: &[u64], mut size: usize) {
        let Some(segment) = &self.segment else { return };
        let half = self.side.incoming();
        let at = self.published as usize % CAPACITY;
        if at + size > CAPACITY {
            // The record does not fit in front of the end of the ring, so a Pad fills the ring.
            size = CAPACITY - at;
            (header, words) = (1 | (size as u64) << 32, &[]);
        }
        segment.poke(half + RING + at, header);
        for (nth, &word) in words.iter().enumerate() {
            segment.poke(half + RING + at + WORD * (1 + nth), word);
        }
        self.published += size as u64;
        segment.store(half + HEAD, self.published);
        let out = self.side.outgoing();
        segment.store(out + TAIL, segment.load(out + HEAD));
        let mut host = self.net.host();
        for key in host.peers.clone() {
            host.edge(key);
        }
    }

    /// Writes any value to any word, or any bytes to any place.
    fn word(&mut self) {
        let (number, value) = (self.tape.word() as usize, u64::from(self.tape.word()) << (self.tape.byte() % 33));
        let Some(segment) = &self.segment else { return };
        let half = (number >> 16 & 1) * HALF;
        match number % 4 {
            0 => segment.store((number >> 2) % (LEN / WORD) * WORD, value),
            1 => segment.store(half + [HEAD, TAIL, CALL][(number >> 2) % 3], value),
            2 => segment.store(half + TABLE + WORD * ((number >> 2) % SLOTS), value),
            _ => segment.put((number >> 2) % LEN, &SegmentPayload::Bytes(&value.to_ne_bytes())),
        }
    }

    /// Posts one valid work request.
    fn post(&mut self) {
        let Some(id) = self.id else { return };
        self.next += 1;
        let (wr_id, random, qp) = (self.next, self.tape.word(), QpId(id.0));
        let part = SgeList::one(self.out.0.sge(0, 1 + random as usize % ROOM).keyed(self.out.1));
        let remote = RemoteAddress { address: 0x1_0000, key: self.regions[0].1 };
        let op = match random >> 16 & 7 {
            0 => SendOp::Write(remote),
            1 => SendOp::Read(remote),
            2..=4 => SendOp::Send,
            _ => {
                let slot = random as usize % DEPTH as usize;
                let sges = SgeList::one(self.inbox.sge(slot * ROOM + ROOM / 4, ROOM / 2));
                if self.iwarp.post_recv(qp, &[RecvWr { wr_id, sges }]).is_ok() {
                    self.open.insert(wr_id);
                }
                return;
            }
        };
        let wr = SendWr { wr_id, op, sges: part, flags: SendFlags::SIGNALED };
        if self.iwarp.post_send(qp, &[wr]).is_ok() {
            self.open.insert(wr_id);
        }
    }

    /// Lets the provider work, and checks the promises. Returns the number of received messages.
    fn turn(&mut self) -> usize {
        self.iwarp.progress(self.now, Drive::Full);
        while let Some(event) = self.iwarp.next_cm_event(self.now).expect("an event") {
            match event.kind {
                CmEventKind::ConnectRequest { .. } | CmEventKind::Resolved { .. } => self.join(event.id, &event.kind),
                _ => {}
            }
        }
        let (mut done, mut heard) = (Vec::new(), 0);
        self.iwarp.poll_cq(self.cq, 64, &mut done).expect("a queue");
        for wc in done {
            assert!(self.open.remove(&wc.wr_id), "{wc:?} completes what is not posted");
            heard += usize::from(wc.opcode.is_receive() && wc.status.is_success());
        }
        for (nth, (memory, _)) in self.regions.iter().enumerate().skip(1) {
            assert!(memory.read(0, ROOM) == [CANARY; ROOM], "region {nth} was written");
        }
        for slot in 0..DEPTH as usize {
            for at in [0, 3 * ROOM / 4] {
                assert!(self.inbox.read(slot * ROOM + at, ROOM / 4) == [CANARY; ROOM / 4], "beside a receive");
            }
        }
        let (bytes, count) = self.iwarp.hub.account.used();
        assert!(bytes <= LIMITS.0 && count <= LIMITS.1, "{bytes} {count}");
        let host = self.net.host();
        assert!(host.accepted.len() <= 1 && host.accepted.iter().all(|key| host.entitled.contains(key)));
        heard
    }

    /// Makes a queue pair for a connection, and accepts or connects.
    fn join(&mut self, id: CmId, kind: &CmEventKind) {
        let (send_cq, recv_cq) = (self.cq, self.cq);
        let (max_send_wr, max_recv_wr) = (DEPTH, DEPTH);
        let attr = QpAttr { send_cq, recv_cq, max_send_wr, max_recv_wr, max_inline: 0, max_recv_sge: 0, srq: None };
        let qp = self.iwarp.create_qp(id, &attr).expect("a queue pair");
        self.iwarp.enable_extensions(qp).expect("they are on");
        self.id = Some(id);
        let param = ConnectParam::default();
        match kind {
            CmEventKind::Resolved { .. } => self.iwarp.connect(id, &param).expect("a socket"),
            _ => self.iwarp.accept(id, &param, self.now).expect("shared memory is possible"),
        }
    }

    /// Ends the connection, and checks that nothing remains. Returns 1 if it moved to shared
    /// memory.
    fn end(mut self) -> usize {
        let Some(id) = self.id else { return 0 };
        let moved = matches!(
            self.iwarp.endpoints.get(id.0),
            Some(CmEndpoint::Ring(_) | CmEndpoint::Dead(Some(Work::Ring(..))))
        );
        let _ = self.iwarp.disconnect(id, self.now);
        self.turn();
        self.turn();
        assert!(self.open.is_empty(), "{:?} are left", self.open);
        self.iwarp.destroy_id(id, self.now).expect("an id of this side");
        self.now += PARTING;
        self.turn();
        self.turn();
        assert_eq!(self.iwarp.hub.account.used(), (0, 0), "windows");
        assert_eq!(self.iwarp.sockets(), 0);
        let host = self.net.host();
        let left =
            host.sockets.iter().filter(|(_, socket)| !matches!(socket.0, HostSocket::Listener | HostSocket::Door(_)));
        assert_eq!(left.count(), 0, "sockets stay open");
        usize::from(moved)
    }
}
