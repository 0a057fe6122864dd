//! A test of [`Link`] with a hostile peer, which writes random values anywhere in the shared segment.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use proptest::prelude::RngCore;
use proptest::test_runner::{RngAlgorithm, TestRng};

use super::account::{WindowAccount, WindowLimits, account};
use super::link::{Link, PartedLink, QueuePairParts};
use super::packet::{ACCEPTED_PACKET, CALL_PACKET, Packet, ReceivedAnnouncement};
use super::record::{IN_WINDOW, LAST, RecordHeader, RecordKind, WORD};
use super::segment::{
    CALL, CAPACITY, HALF, HEAD, LEN, MappedSegment, RING, SLOTS, Segment, SegmentPayload, SegmentSide, TABLE, TAIL,
    Words,
};
use crate::shm::hostile_file::HostileFile;
use crate::soft::completions::Completions;
use crate::soft::receive_queue::ReceiveQueue;
use crate::soft::resources::Resources;
use crate::soft::send_queue::SendQueue;
use crate::test_memory::{TestEntry, TestMemory};
use rdma_transport::cm::ReadDepth;
use rdma_transport::mem::{Memory, Sharing, Window};
use rdma_transport::mr::{Access, LocalKey, RemoteKey};
use rdma_transport::provider::CqId;
use rdma_transport::qp::{QpAttr, QpId};
use rdma_transport::slab::Key;
use rdma_transport::wr::{RecvWr, RemoteAddress, SendFlags, SendOp, SendWr, SgeList};

const DEPTH: u32 = 16;
const ROOM: usize = 4096;
/// The longest payload of an inline send, in bytes.
const INLINE: usize = 64;
/// The keys of four regions. The peer may read and write the first, and only read the second. The third is restricted
/// to another connection, and the fourth has no rights for peers.
const KEYS: [u32; 4] = [0x10, 0x11, 0x12, 0x13];
/// The key of the region that contains the payloads of sends and the responses to Reads and atomic
/// operations.
const SINK: u32 = 0x14;

/// The side that is attacked.
struct Victim {
    link: Link<MappedSegment>,
    resources: Resources,
    cq: CqId,
    /// The `wr_id`s of the work requests that have been posted and have not completed.
    open: BTreeSet<u64>,
    next: u64,
    /// The memory of receives. Before and after each receive are bytes that the link must not write.
    inbox: Memory,
    out: Arc<Memory>,
    regions: Vec<Arc<Memory>>,
    /// The number of Reads and atomic operations that were posted.
    requests: u64,
}

impl Victim {
    fn new(segment: MappedSegment, account: &Arc<WindowAccount>) -> Self {
        let mut resources = Resources::default();
        let cq = resources.cqs.create(8 * DEPTH as usize);
        resources.cqs.reserve(cq, 2 * DEPTH).unwrap();
        let (send_cq, recv_cq) = (cq, cq);
        let attr = QpAttr {
            send_cq,
            recv_cq,
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_inline: INLINE as u32,
            max_recv_sge: 0,
            srq: None,
        };
        let rights = [Access::REMOTE, Access::REMOTE_READ, Access::REMOTE, Access::LOCAL_WRITE];
        let mut regions = Vec::new();
        for (key, access) in KEYS.into_iter().zip(rights) {
            let memory = Arc::new(Memory::new(ROOM).unwrap());
            memory.write(0, &[key as u8; ROOM]);
            let (id, _) = resources.keys.register(&memory, 0..ROOM, access, || key).unwrap();
            if key == KEYS[2] {
                resources.keys.restrict(id, Key::new(7, 7)).unwrap();
            }
            regions.push(memory);
        }
        let out = Arc::new(Memory::new(ROOM).unwrap());
        resources.keys.register(&out, 0..ROOM, Access::LOCAL_WRITE, || SINK).unwrap();
        let parts = QueuePairParts {
            completions: Completions::new(QpId(Key::new(1, 1)), attr),
            receives: ReceiveQueue::new(DEPTH as usize),
            extensions: true,
            sends: SendQueue::new(DEPTH as usize, INLINE),
        };
        let depths = ReadDepth { responder_resources: 4, initiator_depth: 4 };
        Self {
            link: Link::new(segment, SegmentSide::Passive, depths, parts, account),
            resources,
            cq,
            open: BTreeSet::new(),
            next: 0,
            inbox: Memory::new(DEPTH as usize * ROOM).unwrap(),
            out,
            regions,
            requests: 0,
        }
    }

    /// Posts one random valid work request.
    fn post(&mut self, random: u32) {
        self.next += 1;
        let wr_id = self.next;
        let remote = RemoteAddress { address: 0x1_0000, key: RemoteKey(KEYS[0]) };
        let op = match random >> 16 & 15 {
            0 => SendOp::Write(remote),
            1 | 2 => SendOp::Read(remote),
            3 => SendOp::FetchAdd { remote, add: 1 },
            4 => SendOp::WriteWithImmediate(remote, random),
            5..=8 => SendOp::Send,
            _ => {
                let slot = random as usize % DEPTH as usize;
                let sges = SgeList::one(self.inbox.sge(slot * ROOM + ROOM / 4, ROOM / 2));
                if self.link.post_recv(&[RecvWr { wr_id, sges }], &mut self.resources.cqs).is_ok() {
                    self.open.insert(wr_id);
                }
                return;
            }
        };
        let len = if let SendOp::FetchAdd { .. } = op { 8 } else { 1 + random as usize % ROOM };
        let sges = SgeList::one(self.out.sge(0, len).keyed(LocalKey(SINK)));
        let mut flags = SendFlags::SIGNALED;
        if random >> 20 & 7 == 0 {
            flags |= SendFlags::FENCE;
        }
        if random >> 23 & 3 == 0 && len <= INLINE && !op.answered() {
            flags |= SendFlags::INLINE;
        }
        if self.link.post_send(&[SendWr { wr_id, op, sges, flags }], &mut self.resources).is_ok() {
            self.open.insert(wr_id);
            self.requests += u64::from(op.answered());
        }
    }

    /// Sends a message of [`ROOM`] bytes. Its payload is in the staging buffer if the peer has
    /// mapped the buffer, and otherwise in the ring.
    fn send_long(&mut self) {
        let sges = SgeList::one(self.out.sge(0, ROOM));
        let wr = SendWr { wr_id: 1, op: SendOp::Send, sges, flags: SendFlags::SIGNALED };
        self.link.post_send(&[wr], &mut self.resources).unwrap();
        self.link.transmit(&mut self.resources);
        self.link.publish();
    }

    /// Lets the victim receive, transmit and poll once. Returns false if the connection has ended.
    fn turn(&mut self, budget: usize) -> bool {
        self.link.wake(false);
        let received = self.link.receive(budget, &mut self.resources);
        if let Err(super::fault::LinkFault::Violation(refusal)) = &received {
            self.link.refuse(*refusal);
        }
        if received.is_ok_and(|received| received.unknown_window) {
            self.link.find_refusal();
        }
        let goes_on = received.is_ok_and(|received| !received.unknown_window);
        if goes_on {
            self.link.transmit(&mut self.resources);
            while self.link.lendings.announcements.pop().is_some() {}
            self.link.publish();
            self.link.release();
            self.link.arm();
        } else {
            self.link.end(&mut self.resources.cqs);
        }
        let mut done = Vec::new();
        self.resources.cqs.poll(self.cq, usize::MAX, &mut done).unwrap();
        for wc in done {
            self.link.polled(wc.opcode);
            assert!(self.open.remove(&wc.wr_id), "{wc:?} completes what is not posted");
            assert!(wc.byte_len as usize <= ROOM || wc.immediate.is_some(), "{wc:?}");
        }
        goes_on
    }

    fn check(&self) {
        for (memory, key) in self.regions.iter().zip(KEYS).skip(1) {
            assert_eq!(memory.read(0, ROOM), [key as u8; ROOM], "the region of key {key:#x} was written");
        }
        for slot in 0..DEPTH as usize {
            for at in [0, 3 * ROOM / 4] {
                assert_eq!(self.inbox.read(slot * ROOM + at, ROOM / 4), [0; ROOM / 4], "beside receive {slot}");
            }
        }
    }
}

/// Returns one of the values in `of`: seven times in eight the first value, otherwise a random one.
fn pick<T: Copy>(rng: &mut TestRng, of: &[T]) -> T {
    let any = rng.next_u32() as usize;
    if any % 8 != 0 { of[0] } else { of[any / 8 % of.len()] }
}

/// Writes a record that is mostly valid, but may have a wrong key, length, flag or window. Sometimes writes a random
/// value to a random word instead.
fn attack(segment: &MappedSegment, rng: &mut TestRng, published: &mut u64, address: u64) {
    let half = SegmentSide::Passive.incoming();
    match rng.next_u32() % 64 {
        0 => return segment.store(rng.next_u32() as usize % (LEN / WORD) * WORD, rng.next_u64()),
        1 => {
            let words = [HEAD, TAIL, CALL, TABLE + WORD * (rng.next_u32() as usize % SLOTS)];
            let at = (rng.next_u32() as usize & 1) * HALF + words[rng.next_u32() as usize % 4];
            return segment.store(at, rng.next_u64() >> (rng.next_u32() % 64));
        }
        2 => return segment.put(rng.next_u32() as usize % LEN, &SegmentPayload::Bytes(&rng.next_u64().to_ne_bytes())),
        _ => {}
    }
    let usual = [3, 5, 7, 9][rng.next_u32() as usize % 4];
    let kind = pick(rng, &[usual, 1, 2, 4, 6, 8, 10, 11, 12, 13, 14]);
    let len = pick(rng, &[100_u32, 0, 1, 8, 2048, ROOM as u32, ROOM as u32 + 1, 1 << 20, u32::MAX]);
    let Some(mut header) = RecordHeader::parse(kind | u64::from(len) << 32) else { return };
    header.flags = pick(rng, &[LAST, 0, LAST | IN_WINDOW, IN_WINDOW, 0xff]);
    header.slot = pick(rng, &[0, 1, 31, 32, 255]);
    let at = *published as usize % CAPACITY;
    if at + header.body() + 2 * WORD > CAPACITY {
        // The record does not fit in front of the end of the ring, so a Pad fills the ring up to its end.
        header = RecordHeader::new(RecordKind::Pad, (CAPACITY - at) as u32);
    }
    let offset = pick(rng, &[0, 8, 1, ROOM as u64 - 8, ROOM as u64, u64::MAX, 1 << 63]);
    let words = [u64::from(pick(rng, &KEYS)), address.wrapping_add(offset), rng.next_u64(), rng.next_u64()];
    segment.poke(half + RING + at, header.emit());
    for (nth, word) in words.into_iter().enumerate().take(header.kind.words()) {
        segment.poke(half + RING + at + WORD * (1 + nth), word);
    }
    *published += header.size().next_multiple_of(WORD).min(CAPACITY - at) as u64;
    segment.store(half + HEAD, *published);
    // Consume everything that the victim has published, so that the ring in which the victim produces is never full.
    segment.store(SegmentSide::Passive.outgoing() + TAIL, segment.load(SegmentSide::Passive.outgoing() + HEAD));
}

/// Returns two mappings of one new segment: the victim's and the peer's.
fn segments() -> (MappedSegment, MappedSegment) {
    let mut ours = Memory::new_shared(LEN, Sharing::Lent).unwrap();
    let file = ours.take_file().unwrap();
    let theirs = Window::map(&file, LEN, Sharing::Lent).unwrap().into_memory().unwrap();
    (MappedSegment::new(ours), MappedSegment::new(theirs))
}

/// The peer's random writes must have no effect that its rights do not allow. The process survives, memory that the
/// peer may not write is unchanged, and each work request completes exactly once.
#[test]
fn whatever_a_peer_writes_it_uses_only_what_it_may() {
    let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let (mut ends, mut written, mut turns, mut requests) = (0, 0, 0_u64, 0);
    let (account, mut mapped) = (account(), 0);
    while ends < 3000 {
        let (ours, theirs) = segments();
        let mut victim = Victim::new(ours, &account);
        let mut published = 0;
        let nth = pick(&mut rng, &[0, 1, 2, 3]);
        let address = victim.regions[nth].as_ptr() as u64;
        for _ in 0..500 {
            victim.post(rng.next_u32());
            if rng.next_u32() % 4 != 0 {
                attack(&theirs, &mut rng, &mut published, address);
            }
            if rng.next_u32() % 64 == 0 {
                let packets: [&[u8]; 4] = [&CALL_PACKET, &ACCEPTED_PACKET, &[2; 40], &[]];
                victim.link.packet(Packet::parse(packets[rng.next_u32() as usize % 4]), None);
            }
            if rng.next_u32() % 8 == 0 {
                let (make, len) = FILES[rng.next_u32() as usize % FILES.len()];
                let file = make(len);
                let slot = pick(&mut rng, &[0, 1, 31, 32]);
                let word = pick(&mut rng, &[KEYS[0], 0, KEYS[1], 77]).into();
                let rights = pick(&mut rng, &[Access::empty(), Access::REMOTE, Access::REMOTE_READ]);
                let len = pick(&mut rng, &[len, 0, 1, 1 << 40, u64::MAX]);
                let announced = ReceivedAnnouncement { slot, word, rights, base: 0x1_0000, len };
                lend(&theirs, &mut victim, announced, &file);
                HostileFile::punch(&file, 0, 4096);
            }
            account.begin_turn();
            turns += 1;
            if !victim.turn(1 + rng.next_u32() as usize % 100_000) {
                break;
            }
        }
        victim.link.end(&mut victim.resources.cqs);
        victim.turn(0);
        assert!(victim.open.is_empty(), "{:?} are left", victim.open);
        victim.check();
        mapped += account.used().1;
        written += usize::from(victim.regions[0].read(0, ROOM) != [KEYS[0] as u8; ROOM]);
        requests += victim.requests;
        ends += 1;
    }
    println!("{ends} connections, {turns} turns, {mapped} windows, {written} with writes that were allowed");
    assert!(requests > 3000, "hardly any response was expected: {requests} requests");
    assert!(mapped > 100 && account.used() == (0, 0), "{mapped} windows, {:?} are left", account.used());
    assert!(written > 300, "the attacks do not get far: {written} writes, {turns} turns");
}

/// Announces memory to the victim in the table of the segment, and by a packet.
fn lend(segment: &MappedSegment, victim: &mut Victim, announced: ReceivedAnnouncement, file: &OwnedFd) {
    let table = SegmentSide::Passive.incoming() + TABLE;
    if usize::from(announced.slot) < SLOTS {
        segment.store(table + WORD * usize::from(announced.slot), announced.word);
    }
    victim.link.packet(Packet::Window(announced), Some(file));
}

/// A function that creates a hostile peer's file of the given length.
type MakeFile = fn(u64) -> OwnedFd;

/// Files of a hostile peer, and their lengths.
const FILES: [(MakeFile, u64); 6] = [
    (HostileFile::fixed, 64 << 10),
    (HostileFile::lent, 64 << 10),
    (HostileFile::with_pages, 64 << 10),
    (HostileFile::sparse, 64 << 10),
    (HostileFile::sparse, 1 << 40),
    (HostileFile::unsealed, 64 << 10),
];

/// A hostile peer keeps the files of the segment and of the staging buffer, and mappings of both.
/// When the process that lent the files frees the ended link, the kernel frees all their pages.
/// Until then, the peer can read the last message.
#[test]
fn the_memory_of_a_connection_comes_back_whatever_its_peer_keeps() {
    let mut segment = Memory::new_shared(LEN, Sharing::Lent).unwrap();
    let of_segment = segment.take_file().unwrap();
    let theirs = Window::map(&of_segment, LEN, Sharing::Lent).unwrap().into_memory().unwrap();
    theirs.keep_pages();
    let theirs = MappedSegment::new(theirs);
    let mut victim = Victim::new(MappedSegment::new(segment), &account());
    victim.send_long();
    let announced = victim.link.lendings.announcements.pop().expect("a staging buffer");
    let kept = announced.file().unwrap().try_clone_to_owned().unwrap();
    let mapped = Window::map(&kept, announced.len, Sharing::Read).unwrap();
    drop(announced);
    victim.link.end(&mut victim.resources.cqs);
    victim.link.part(&mut victim.resources);
    // The last message is in the ring and not in the staging buffer, because the peer has not
    // replied that it has mapped the buffer.
    assert_eq!([HostileFile::allocated(&kept), HostileFile::allocated(&of_segment)], [0, LEN as u64]);
    assert!(theirs.load(SegmentSide::Passive.outgoing() + HEAD) > 0, "the last message is gone");
    Box::new(victim.link).free();
    assert_eq!([HostileFile::allocated(&kept), HostileFile::allocated(&of_segment)], [0, 0]);
    drop(mapped);
}

/// If the peer has consumed all messages, the staging buffer is freed when the connection ends, and
/// only the segment stays allocated for the peer.
#[test]
fn a_staging_buffer_that_was_read_comes_back_before_the_segment() {
    for is_read in [true, false] {
        let (ours, theirs) = segments();
        let mut victim = Victim::new(ours, &account());
        victim.send_long();
        let announced = victim.link.lendings.announcements.pop().expect("a staging buffer");
        // The peer replies that it has mapped the buffer.
        let half = SegmentSide::Passive.incoming();
        let mut header = RecordHeader::new(RecordKind::Mapped, 1);
        header.slot = announced.slot;
        theirs.poke(half + RING, header.emit());
        theirs.poke(half + RING + WORD, announced.word);
        theirs.store(half + HEAD, header.size() as u64);
        drop(announced);
        victim.link.receive(usize::MAX, &mut victim.resources).unwrap();
        victim.send_long();
        if is_read {
            let half = SegmentSide::Passive.outgoing();
            theirs.store(half + TAIL, theirs.load(half + HEAD));
        }
        victim.link.part(&mut victim.resources);
        let expected = if is_read { LEN } else { LEN + (256 << 10) };
        assert_eq!(PartedLink::len(&victim.link), expected);
    }
}

/// The peer has ended the connection, and removes the pages of the segment after a time limit,
/// although the local side still uses them. The local side detects the end of the connection, and
/// no violation of the protocol.
#[test]
fn a_removed_segment_is_no_violation() {
    let (ours, theirs) = segments();
    let mut victim = Victim::new(ours, &account());
    let half = SegmentSide::Passive.incoming();
    theirs.poke(half + RING, RecordHeader::new(RecordKind::Ready, 0).emit());
    theirs.store(half + HEAD, WORD as u64);
    victim.link.receive(usize::MAX, &mut victim.resources).unwrap();
    assert!(!victim.link.is_removed());
    drop(theirs);
    assert!(victim.link.receive(usize::MAX, &mut victim.resources).is_err() && victim.link.is_removed());
}

/// The peer removes the pages of the segment before the local side has consumed a record. Then the
/// ring looks empty to the local side. It detects the removal, because the position that it has
/// published itself is 0 again.
#[test]
fn a_side_that_has_read_nothing_notices_a_removed_segment() {
    let (ours, theirs) = segments();
    let mut victim = Victim::new(ours, &account());
    victim.link.begin();
    victim.link.publish();
    assert!(!victim.link.is_removed());
    let half = SegmentSide::Passive.incoming();
    theirs.poke(half + RING, RecordHeader::new(RecordKind::Ready, 0).emit());
    theirs.store(half + HEAD, WORD as u64);
    drop(theirs);
    assert!(!victim.link.receive(usize::MAX, &mut victim.resources).unwrap().news);
    assert!(victim.link.is_at_boundary() && victim.link.is_removed());
}

/// Peers announce as much memory as they can. The victim maps no more than the limits allow,
/// however long, sparse or numerous the windows are. A part of each limit is reserved for staging
/// buffers. All windows are unmapped at the end of their connections, or when their lendings end.
#[test]
fn what_peers_lend_is_limited() {
    const PIECE: u64 = 16 << 20;
    let account = account();
    let (large, sparse) = (HostileFile::fixed(PIECE), HostileFile::sparse(1 << 40));
    let long = HostileFile::fixed(65 << 20);
    let (staging, small) = (HostileFile::fixed(256 << 10), HostileFile::fixed(4096));
    let removable = [Access::empty(), Access::REMOTE].map(|rights| (rights, HostileFile::with_pages(PIECE)));
    let mut victims: Vec<_> = (0..6)
        .map(|_| {
            let (ours, theirs) = segments();
            (Victim::new(ours, &account), theirs)
        })
        .collect();
    let mut announce = |nth: usize, slot: u8, key: u64, rights, len, file| {
        let (victim, theirs) = &mut victims[nth];
        lend(theirs, victim, ReceivedAnnouncement { slot, word: 1 << 32 | key, rights, base: 0, len }, file);
    };
    announce(0, 0, 5, Access::empty(), 65 << 20, &long);
    for slot in 0..32 {
        announce(0, slot, 5, Access::empty(), 1 << 40, &sparse);
        announce(0, slot, 5, Access::REMOTE, 1 << 40, &sparse);
        announce(0, slot, 0, Access::empty(), PIECE, &large);
    }
    assert_eq!(account.used(), (0, 0), "memory without pages, or a window or a staging buffer that is too long");
    for (rights, file) in &removable {
        announce(0, 0, 5, *rights, PIECE, file);
        assert!(account.used() == (PIECE, 1) && !HostileFile::punch(file, 0, PIECE), "{rights:?}");
        announce(1, 0, 5, Access::REMOTE, PIECE, file);
        assert_eq!(account.used(), (PIECE, 1), "memory that a second peer can write");
    }
    for nth in 0..6 {
        (0..32).for_each(|slot| announce(nth, slot, 5, Access::empty(), PIECE, &large));
        let expected = ((nth as u64 + 1) * (256 << 20)).min(768 << 20);
        assert_eq!(account.used(), (expected, (expected / PIECE) as usize), "connection {nth}");
    }
    for nth in 0..6 {
        announce(nth, 30, 0, Access::empty(), 256 << 10, &staging);
        announce(nth, 31, 0, Access::empty(), 256 << 10, &staging);
    }
    assert_eq!(account.used(), ((768 << 20) + 6 * (256 << 10), 48 + 6), "one staging buffer for each connection");
    account.begin_turn();
    // The peers end all lendings but those of the staging buffers.
    for (victim, theirs) in &mut victims {
        (0..30).for_each(|slot| theirs.store(SegmentSide::Passive.incoming() + TABLE + WORD * slot, 2 << 32));
        let refused = ReceivedAnnouncement { slot: 0, word: 2 << 32, rights: Access::empty(), base: 0, len: 1 << 40 };
        lend(theirs, victim, refused, &sparse);
    }
    // In each turn, 64 MiB are unmapped.
    for turn in 0.. {
        let left = (768 - 64 * (turn + 1).min(12)) << 20;
        assert_eq!(account.used(), (left + 6 * (256 << 10), (left / PIECE) as usize + 6), "turn {turn}");
        if left == 0 {
            break;
        }
        account.begin_turn();
    }
    account.begin_turn();
    drop(victims);
    assert_eq!(account.used(), (0, 0));

    let few = Arc::new(WindowAccount::new(WindowLimits { bytes: 1 << 30, count: 8 }));
    let (ours, theirs) = segments();
    let mut victim = Victim::new(ours, &few);
    for slot in 0..32 {
        let announced = ReceivedAnnouncement { slot, word: 5, rights: Access::empty(), base: 0, len: 4096 };
        lend(&theirs, &mut victim, announced, &small);
    }
    assert_eq!(few.used().1, 6, "two of eight windows are reserved for staging buffers");
}
