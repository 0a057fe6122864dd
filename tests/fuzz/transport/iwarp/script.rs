//! The fuzz target of a queue pair that posts work requests while its peer sends frames. The tape (the fuzzer's input) chooses the actions
//! of both.
//!
//! Most frames of the peer are well formed, because the queue pair ends at the first violation; the tape makes single fields wrong. The
//! target checks that each work request completes once and in order. It checks that nothing is written outside of posted memory and of the
//! regions that the peer may write, and that the output of the queue pair can be parsed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::super::fault::Fault;
use super::super::queue_pair::Role;
use super::super::startup::{Agreement, ReadyToReceive};
use super::super::wire::atomic::emit_response;
use super::super::wire::ddp::{TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use super::super::wire::mpa::{CRC_LEN, fpdu_len};
use super::super::wire::{
    AtomicRequest, Opcode, ReadRequest, SegmentHeader, Tagged, Terminate, TerminateCause, Untagged, crc32c,
};
use super::end::{End, seal};
use super::tape::Tape;
use crate::test_memory::{TestEntry, TestMemory};
use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, LocalKey, MrId, RemoteKey};
use rdma_transport::wc::WcStatus;
use rdma_transport::wr::{RecvWr, RemoteAddress, SendFlags, SendOp, SendWr, SgeList};

/// The number of bytes from the beginning of one slot for a receive to the beginning of the next slot.
const ROOM: usize = 512;
/// The length of the longest posted receive, in bytes.
const RECEIVE: usize = 400;
/// The largest number of posted receives.
const PLACES: usize = 8;
/// The value of the bytes that must not be written.
const CANARY: u8 = 0xc5;
/// The regions that the peer knows: the STag and the access rights of each.
const REGIONS: [(u32, Access); 3] =
    [(0x100, Access::REMOTE), (0x200, Access::REMOTE_READ), (0x300, Access::REMOTE_WRITE)];
const REGION_LEN: usize = 512;
/// The Tagged Offset of the first byte of each region.
const BASE: u64 = 0x1000;
/// The STag of the local memory into which the responses to Reads and atomics are placed.
const SINK: u32 = 0x400;
const SINK_LEN: usize = 1280;
/// The number of bytes directly after each memory under test that must not be written.
const MARGIN: usize = 64;
/// The length of the memory from which the queue pair sends, in bytes. It is also the largest length of a sent message.
const SOURCE: usize = 2100;

/// A local request (a Read or an atomic) that the peer has received and may answer.
#[derive(Clone, Copy)]
enum Asked {
    Read(ReadRequest),
    Atomic(u32),
}

struct Script<'a> {
    end: End,
    tape: Tape<'a>,
    memories: Memories,
    work: Work,
    peer: Peer,
    /// The agreement of both sides about CRCs, markers and depths.
    agreement: Agreement,
    /// The number of bytes of the queue pair's output that the target has already parsed.
    checked: usize,
    over: bool,
}

/// The memory of the side under test.
struct Memories {
    inbox: Memory,
    source: Memory,
    sink: Arc<Memory>,
    regions: Vec<(Arc<Memory>, Option<MrId>)>,
}

/// The work requests of the side under test.
struct Work {
    /// The length of the longest receive that was ever posted in each slot. The bytes of the slot behind this length must not be written.
    longest: [usize; PLACES],
    /// The receive that is posted in each slot: the id of its work request, and its length.
    places: [Option<(u64, usize)>; PLACES],
    /// The ids of the posted sends that have not completed. The value is true if the send must have a completion, and false if it may
    /// complete silently.
    sends: BTreeMap<u64, bool>,
    next: u64,
    last_done: Option<u64>,
}

/// The state of the peer.
struct Peer {
    /// The length of the pieces in which the peer's bytes arrive, in bytes.
    piece: usize,
    /// The MSN of the peer's next message on each queue.
    msn: [u32; 4],
    /// The message offset of the peer's next segment.
    offset: u32,
    asked: VecDeque<Asked>,
    /// The number of bytes of the response to the oldest Read that the peer has already sent.
    answered: u32,
    /// The position of the bit to invert in the next bytes that the peer sends. `None` if no bit is to be inverted.
    damage: Option<usize>,
}

impl<'a> Script<'a> {
    fn new(mut tape: Tape<'a>) -> Self {
        let choice = tape.byte();
        let role = if choice & 1 != 0 { Role::Initiator } else { Role::Responder };
        let rtr = match (choice >> 1) & 3 {
            0 => None,
            1 => Some(ReadyToReceive::Write),
            2 => Some(ReadyToReceive::Read),
            _ => Some(ReadyToReceive::Send),
        };
        let (crc, markers) = (choice & 8 != 0, choice & 0xc0 == 0xc0);
        let agreement = Agreement { crc, ird: 2, ord: 2, rtr, markers };
        let segment = 128 + usize::from(tape.byte()) * 8;
        let mut end = End::new(role, &agreement, segment, choice & 16 != 0, choice & 32 == 0);
        let piece = match tape.byte() {
            0..=150 => usize::MAX,
            octet => usize::from(octet - 150),
        };
        let memory = |len| {
            let memory = Memory::new(len + MARGIN).expect("memory");
            memory.write(0, &vec![CANARY; len + MARGIN]);
            memory
        };
        let mut regions = Vec::new();
        for (stag, access) in REGIONS {
            let memory = Arc::new(memory(REGION_LEN));
            end.resources.keys.register_at(&memory, BASE, REGION_LEN, access, stag);
            regions.push((memory, None));
        }
        let sink = Arc::new(memory(SINK_LEN));
        let (_, stag) = end
            .resources
            .keys
            .register(&sink, 0..SINK_LEN, Access::LOCAL_WRITE, || SINK)
            .expect("a part of the memory");
        assert_eq!(stag, SINK);
        let memories = Memories { inbox: memory(ROOM * PLACES), source: memory(SOURCE), sink, regions };
        let work =
            Work { longest: [0; PLACES], places: [None; PLACES], sends: BTreeMap::new(), next: 0, last_done: None };
        let peer = Peer { piece, msn: [1; 4], offset: 0, asked: VecDeque::new(), answered: 0, damage: None };
        Self { end, tape, memories, work, peer, agreement, checked: 0, over: false }
    }

    fn number(&mut self) -> u64 {
        self.work.next += 1;
        self.work.next
    }

    /// Ends the stream after a fault, as the provider does: with a Terminate if the fault requires one.
    fn broke(&mut self, fault: Fault) {
        let terminate = match fault {
            Fault::Violation(cause, quote) => Some((cause, quote)),
            Fault::Terminated(_) => None,
            Fault::WorkRequest(_) => Some((TerminateCause::LOCAL_CATASTROPHIC, None)),
        };
        let rest = self.end.qp.end(terminate, &mut self.end.resources.cqs);
        self.end.wire.extend_from_slice(&rest);
        self.over = true;
        self.check_own_stream();
        assert!(self.agreement.markers || self.checked == self.end.wire.len(), "the stream ends within an FPDU");
    }

    /// Delivers bytes of the peer to the queue pair, in pieces. A fault ends the stream.
    fn deliver(&mut self, mut octets: Vec<u8>) {
        if let Some(at) = self.peer.damage.take().filter(|_| !octets.is_empty()) {
            let at = at % (octets.len() * 8);
            octets[at / 8] ^= 1 << (at % 8);
        }
        for piece in octets.chunks(self.peer.piece.min(octets.len()).max(1)) {
            if self.over {
                return;
            }
            if let Err(fault) = self.end.deliver(piece) {
                self.broke(fault);
            }
        }
    }

    fn untagged(&mut self, header: &Untagged, payload: &[u8]) {
        let mut octets = [0; UNTAGGED_FPDU_HEADER_LEN];
        header.emit_into((18 + payload.len()) as u16, &mut octets);
        self.deliver(seal([&octets, payload].concat()));
    }

    fn tagged(&mut self, header: &Tagged, payload: &[u8]) {
        let mut octets = [0; TAGGED_FPDU_HEADER_LEN];
        header.emit_into((14 + payload.len()) as u16, &mut octets);
        self.deliver(seal([&octets, payload].concat()));
    }

    /// Returns the header of the peer's next untagged message on the queue `queue`. With a chance of 20 in 256, one field is wrong.
    fn header(&mut self, opcode: Opcode, queue: u32) -> Untagged {
        let at = queue as usize;
        let mut header = Untagged { last: true, opcode, reserved_or_stag: 0, queue, msn: self.peer.msn[at], offset: 0 };
        match self.tape.byte() {
            0..=3 => header.queue = self.tape.number(),
            4..=7 => header.msn = self.tape.word(),
            8..=11 => header.offset = self.tape.number(),
            12..=15 => header.last = false,
            16..=19 => header.reserved_or_stag = self.tape.word(),
            _ => {}
        }
        self.peer.msn[at] = self.peer.msn[at].wrapping_add(1);
        header
    }

    /// Sends a segment of a Send message from the peer.
    fn peer_sends(&mut self) {
        let opcode = match self.tape.byte() {
            0..=19 => Opcode::SendInvalidate,
            20..=29 => Opcode::SendSolicitedInvalidate,
            30..=39 => Opcode::SendSolicited,
            _ => Opcode::Send,
        };
        let mut header = self.header(opcode, 0);
        header.offset = header.offset.wrapping_add(self.peer.offset);
        if opcode.invalidates() {
            header.reserved_or_stag = self.stag();
        }
        if self.tape.below(60) {
            header.last = false;
        }
        let payload = self.tape.octets(1400).to_vec();
        if header.last {
            self.peer.offset = 0;
        } else {
            self.peer.offset = self.peer.offset.wrapping_add(payload.len() as u32);
            self.peer.msn[0] = self.peer.msn[0].wrapping_sub(1);
        }
        self.untagged(&header, &payload);
    }

    fn stag(&mut self) -> u32 {
        match self.tape.byte() {
            0..=79 => 0x100,
            80..=139 => 0x200,
            140..=199 => 0x300,
            200..=219 => SINK,
            _ => self.tape.word(),
        }
    }

    /// Returns a Tagged Offset that is inside of a region most of the time.
    fn place(&mut self) -> u64 {
        match self.tape.byte() {
            octet @ 0..=199 => BASE + u64::from(octet) * 2,
            200..=229 => BASE + u64::from(self.tape.number()),
            230..=240 => u64::MAX - u64::from(self.tape.byte()),
            _ => u64::from(self.tape.word()) << 16,
        }
    }

    fn peer_asks(&mut self) {
        if self.tape.below(160) {
            let header = self.header(Opcode::ReadRequest, 1);
            let read = ReadRequest {
                sink_stag: self.tape.word(),
                sink_offset: u64::from(self.tape.word()) << if self.tape.below(40) { 32 } else { 0 },
                size: self.tape.number(),
                source_stag: self.stag(),
                source_offset: self.place(),
            };
            return self.untagged(&header, &read.emit());
        }
        let header = self.header(Opcode::AtomicRequest, 1);
        let mut request = [0; 52];
        for octet in &mut request {
            *octet = if self.tape.below(200) { 0 } else { self.tape.byte() };
        }
        let mut request = AtomicRequest::parse(&request);
        request.stag = self.stag();
        request.offset = self.place() & !7 | u64::from(self.tape.below(10));
        self.untagged(&header, &request.emit());
    }

    /// Sends a response of the peer to the oldest request, or a response without a request.
    fn peer_answers(&mut self) {
        match self.peer.asked.front().copied() {
            Some(Asked::Read(read)) => {
                let left = read.size.saturating_sub(self.peer.answered) as usize;
                let mut payload = self.tape.octets(1400).to_vec();
                if self.tape.below(200) {
                    payload.resize(left.min(1400), 9);
                }
                let last = (payload.len() == left) ^ self.tape.below(10);
                let mut header = Tagged {
                    last,
                    opcode: Opcode::ReadResponse,
                    stag: read.sink_stag,
                    offset: read.sink_offset.wrapping_add(u64::from(self.peer.answered)),
                };
                match self.tape.byte() {
                    0..=5 => header.stag = self.stag(),
                    6..=11 => header.offset = self.place(),
                    _ => {}
                }
                self.peer.answered = self.peer.answered.wrapping_add(payload.len() as u32);
                if last {
                    self.peer.asked.pop_front();
                    self.peer.answered = 0;
                }
                self.tagged(&header, &payload);
            }
            Some(Asked::Atomic(id)) => {
                self.peer.asked.pop_front();
                let header = self.header(Opcode::AtomicResponse, 3);
                let id = if self.tape.below(10) { self.tape.word() } else { id };
                let old = u64::from(self.tape.word());
                self.untagged(&header, &emit_response(id, old));
            }
            None => {
                let (stag, offset) = (self.stag(), self.place());
                let opcode = Opcode::ReadResponse;
                let payload = self.tape.octets(300).to_vec();
                self.tagged(&Tagged { last: true, opcode, stag, offset }, &payload);
            }
        }
    }

    /// Posts a receive in a free slot, if there is one.
    fn receive(&mut self) {
        let Some(at) = self.work.places.iter().position(Option::is_none) else { return };
        let len = (self.tape.number() as usize * 4).min(RECEIVE);
        let parts = 1 + usize::from(self.tape.byte() & 3);
        let sges = scattered(&self.memories.inbox, at * ROOM, len, parts);
        let wr_id = self.number();
        let wr = RecvWr { wr_id, sges };
        let posted = match self.end.srq {
            Some(srq) => self.end.resources.srq(srq).and_then(|queue| queue.post(wr)).is_ok(),
            None => self.end.qp.post_recv(&[wr], &mut self.end.resources.cqs).is_ok(),
        };
        if posted {
            self.work.places[at] = Some((wr_id, len));
            self.work.longest[at] = self.work.longest[at].max(len);
        }
    }

    /// Posts a send of a kind that the tape chooses.
    fn send(&mut self) {
        let remote = RemoteAddress { address: u64::from(self.tape.number()), key: RemoteKey(self.tape.number()) };
        let op = match self.tape.byte() % 10 {
            0 | 1 => SendOp::Read(remote),
            2 => SendOp::FetchAdd { remote, add: 1 },
            3 => SendOp::CompareSwap { remote, expected: 0, swap: 1 },
            4 => SendOp::Write(remote),
            5 => SendOp::WriteWithImmediate(remote, 5),
            6 => SendOp::SendInvalidate(RemoteKey(self.tape.word())),
            7 => SendOp::SendWithImmediate(5),
            _ => SendOp::Send,
        };
        let flags = SendFlags::from_bits_truncate(self.tape.byte() >> 3);
        let sges = match op {
            SendOp::Read(_) | SendOp::FetchAdd { .. } | SendOp::CompareSwap { .. } => {
                let len = match op {
                    SendOp::Read(_) => (self.tape.number() as usize).min(SINK_LEN - 1020),
                    _ => 8,
                };
                let start = usize::from(self.tape.byte()) * 4;
                let key = if self.tape.below(245) { LocalKey(SINK) } else { LocalKey(self.tape.word()) };
                SgeList::one(self.memories.sink.shared_sge(start, len).keyed(key))
            }
            _ => {
                let len = (self.tape.number() as usize).min(SOURCE);
                scattered(&self.memories.source, 0, len, 1 + usize::from(self.tape.byte() & 3))
            }
        };
        let wr_id = self.number();
        let wr = SendWr { wr_id, op, sges, flags };
        if self.end.qp.post_send(&[wr], &mut self.end.resources).is_ok() {
            self.work.sends.insert(wr_id, flags.contains(SendFlags::SIGNALED));
        }
    }

    /// Transmits up to `window` bytes of output.
    fn transmit(&mut self, window: usize) {
        if self.over {
            return;
        }
        if let Err(fault) = self.end.transmit(window) {
            self.broke(fault);
        }
        self.check_own_stream();
    }

    /// Parses the complete FPDUs that were sent since the last call, as a peer would. Notes the requests, so that the peer can answer them.
    fn check_own_stream(&mut self) {
        if self.agreement.markers {
            return;
        }
        let wire = std::mem::take(&mut self.end.wire);
        while let Some(&[high, low]) = wire[self.checked..].first_chunk::<2>() {
            let len = fpdu_len(usize::from(u16::from_be_bytes([high, low])));
            let Some(fpdu) = wire.get(self.checked..self.checked + len) else { break };
            self.checked += len;
            let (body, sum) = fpdu.split_at(len - CRC_LEN);
            assert_eq!(sum, if self.agreement.crc { crc32c(body) } else { 0 }.to_le_bytes(), "{body:02x?}");
            let header = SegmentHeader::parse(body).unwrap_or_else(|error| panic!("{error}: {body:02x?}"));
            match header.opcode() {
                Opcode::ReadRequest => {
                    let request = body[UNTAGGED_FPDU_HEADER_LEN..].first_chunk().expect("the whole request");
                    self.peer.asked.push_back(Asked::Read(ReadRequest::parse(request)));
                }
                Opcode::AtomicRequest => {
                    let request = body[UNTAGGED_FPDU_HEADER_LEN..].first_chunk().expect("the whole request");
                    self.peer.asked.push_back(Asked::Atomic(AtomicRequest::parse(request).request_id));
                }
                Opcode::Terminate => {
                    assert!(self.over, "a Terminate, and the stream continues");
                    let payload = &body[UNTAGGED_FPDU_HEADER_LEN..];
                    assert!(Terminate::parse(payload).is_some(), "{payload:02x?}");
                }
                _ => {}
            }
        }
        self.end.wire = wire;
    }

    /// Polls at most `max` completions, and checks that each belongs to a posted work request.
    fn poll(&mut self, max: usize) {
        for wc in self.end.poll(max) {
            if wc.opcode.is_receive() {
                let place = self.work.places.iter_mut().find(|place| place.is_some_and(|(wr_id, _)| wr_id == wc.wr_id));
                let place = place.unwrap_or_else(|| panic!("a receive that was not posted, or twice: {wc:?}"));
                let (_, len) = place.take().expect("just found");
                let is_write = wc.immediate.is_some();
                assert!(is_write || wc.status != WcStatus::Success || wc.byte_len as usize <= len, "{wc:?} of {len}");
            } else {
                let signaled = self.work.sends.remove(&wc.wr_id);
                let signaled = signaled.unwrap_or_else(|| panic!("a send that was not posted, or twice: {wc:?}"));
                assert!(signaled || wc.status != WcStatus::Success, "nobody asked for {wc:?}");
                assert!(self.work.last_done < Some(wc.wr_id), "{wc:?} behind {:?}", self.work.last_done);
                self.work.last_done = Some(wc.wr_id);
            }
        }
    }

    /// Carries out the operation that the tape selects.
    fn act(&mut self) {
        match self.tape.byte() % 24 {
            0 => {
                let octets = self.tape.octets(300).to_vec();
                self.deliver(octets);
            }
            1 => {
                // The peer sends any bytes as an FPDU with a valid CRC.
                let body = self.tape.octets(300);
                let fpdu = [&(body.len() as u16).to_be_bytes()[..], body].concat();
                self.deliver(seal(fpdu));
            }
            2..=5 => self.peer_sends(),
            6 | 7 => {
                let (stag, offset, last) = (self.stag(), self.place(), !self.tape.below(50));
                let payload = self.tape.octets(1400).to_vec();
                self.tagged(&Tagged { last, opcode: Opcode::Write, stag, offset }, &payload);
            }
            8 | 9 => self.peer_asks(),
            10 | 11 => self.peer_answers(),
            12 => {
                let opcode = match self.tape.byte() % 4 {
                    0 => Opcode::Terminate,
                    1 => Opcode::ImmediateSolicited,
                    _ => Opcode::Immediate,
                };
                let queue = if opcode == Opcode::Terminate { 2 } else { 0 };
                let header = self.header(opcode, queue);
                let payload = if self.tape.below(200) { vec![3; 8] } else { self.tape.octets(60).to_vec() };
                self.untagged(&header, &payload);
            }
            13..=15 => self.receive(),
            16..=18 => self.send(),
            19 => {
                let window = self.tape.number() as usize;
                self.transmit(window);
            }
            20 => self.transmit(usize::MAX),
            21 => {
                let max = usize::from(self.tape.byte());
                self.poll(max);
            }
            22 => match self.tape.byte() % 3 {
                0 => self.peer.damage = Some(self.tape.word() as usize),
                1 => {
                    let segment = 128 + usize::from(self.tape.byte()) * 8;
                    self.end.qp.tx.set_max_segment(segment);
                }
                _ => self.end.qp.tx.release(),
            },
            _ => self.reregister(),
        }
    }

    /// Invalidates the key of a region, or deregisters the region. If the region was deregistered earlier, registers it again.
    fn reregister(&mut self) {
        let at = usize::from(self.tape.byte()) % REGIONS.len();
        let (memory, id) = &mut self.memories.regions[at];
        let keys = &mut self.end.resources.keys;
        *id = match id.take() {
            Some(id) if self.tape.below(128) => {
                keys.invalidate(id).expect("it is registered");
                Some(id)
            }
            Some(id) => {
                keys.deregister(id).expect("it is registered");
                None
            }
            None => {
                // The new region allows the peer only to read, even if the peer could write the old one. So a Write by the peer is a fault.
                let (stag, access) = (0x500 + at as u32, Access::REMOTE_READ);
                keys.register(memory, 0..REGION_LEN, access, || stag).ok().map(|(id, _)| id)
            }
        };
    }

    fn finish(mut self) {
        self.transmit(usize::MAX);
        self.poll(usize::MAX);
        if !self.over {
            let rest = self.end.qp.end(None, &mut self.end.resources.cqs);
            self.end.wire.extend_from_slice(&rest);
            self.over = true;
        }
        // A work request that is posted to an ended queue pair is flushed.
        self.send();
        self.poll(usize::MAX);
        assert!(self.work.sends.values().all(|signaled| !signaled), "sends without an end: {:?}", self.work.sends);
        let left = self.work.places.iter().flatten().count();
        assert!(self.end.srq.is_some() || left == 0, "receives without an end: {:?}", self.work.places);
        self.end.qp.completions.release(&mut self.end.qp.rx.queue, &mut self.end.resources);
        for (place, longest) in self.work.longest.iter().enumerate() {
            clean(&self.memories.inbox, place * ROOM + longest..(place + 1) * ROOM);
        }
        clean(&self.memories.source, 0..SOURCE + MARGIN);
        clean(&self.memories.sink, SINK_LEN..SINK_LEN + MARGIN);
        for ((memory, _), (_, access)) in self.memories.regions.iter().zip(REGIONS) {
            let may_write = access.contains(Access::REMOTE_WRITE);
            clean(memory, if may_write { REGION_LEN } else { 0 }..REGION_LEN + MARGIN);
        }
    }
}

/// Returns a scatter/gather list of `parts` entries over `len` bytes of `memory`. Every second entry does not promise that nobody else
/// accesses its memory while the list is posted. The others promise it.
fn scattered(memory: &Memory, start: usize, len: usize, parts: usize) -> SgeList {
    let mut list = SgeList::default();
    let mut at = 0;
    for part in 0..parts {
        let now = if part + 1 == parts { len - at } else { (len - at) / 3 };
        let entry = if part % 2 == 1 { memory.shared_sge(start + at, now) } else { memory.sge(start + at, now) };
        list.push(entry).expect("at most four");
        at += now;
    }
    list
}

/// Checks that nobody has written a range of a memory.
fn clean(memory: &Memory, range: std::ops::Range<usize>) {
    let start = range.start;
    let octets = memory.read(start, range.len());
    if let Some(at) = octets.iter().position(|&octet| octet != CANARY) {
        panic!("byte {} was written in {range:?}, which no work request covers", start + at);
    }
}

/// Runs a tape.
///
/// # Panics
/// Panics if the queue pair breaks a promise.
pub fn script(tape: &[u8]) {
    let mut script = Script::new(Tape::new(tape));
    while !script.tape.is_over() {
        script.act();
    }
    script.finish();
}
