//! Tests of Writes, Reads and atomic operations between two queue pairs. Each test delivers the output of one queue pair to the other one.

use std::sync::Arc;

use super::super::super::markers::tests::strip;
use super::super::super::wire::{ReadRequest, SegmentHeader, Tagged, Untagged};
use super::*;
use crate::test_memory::{TestEntry, TestMemory};
use rdma_transport::mr::{Access, LocalKey, RemoteKey};
use rdma_transport::qp::SrqId;
use rdma_transport::wr::{RemoteAddress, Sge};

const REMOTE: Access = Access::REMOTE;

/// Two connected queue pairs.
pub(super) struct Pair {
    pub(super) a: TestQueuePair,
    pub(super) b: TestQueuePair,
}

/// A region with canaries: bytes before and after the region. The canaries must not change.
#[derive(Clone)]
pub(super) struct Area {
    pub(super) memory: Arc<Memory>,
    pub(super) len: usize,
    pub(super) id: rdma_transport::mr::MrId,
    pub(super) stag: u32,
}

pub(super) const CANARY: usize = 64;

impl Area {
    pub(super) fn sge(&self, offset: usize, len: usize) -> SgeList {
        assert!(offset + len <= self.len);
        // Areas with an even STag use `shared_sge`: entries for memory that other threads or processes may write at the same time. The
        // received bytes must be the same.
        let at = CANARY + offset;
        let entry = if self.stag % 2 == 0 { self.memory.shared_sge(at, len) } else { self.memory.sge(at, len) };
        SgeList::one(entry.keyed(LocalKey(self.stag)))
    }

    pub(super) fn remote(&self, offset: usize) -> RemoteAddress {
        let address = self.memory.as_ptr() as u64 + (CANARY + offset) as u64;
        RemoteAddress { address, key: RemoteKey(self.stag) }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.memory.read(CANARY, self.len)
    }

    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        self.memory.write(CANARY + offset, bytes);
    }

    pub(super) fn canaries(&self) -> bool {
        let after = self.memory.len() - CANARY - self.len;
        self.memory.read(0, CANARY).iter().all(|&byte| byte == 0xc5)
            && self.memory.read(CANARY + self.len, after).iter().all(|&byte| byte == 0xc5)
    }
}

impl TestQueuePair {
    pub(super) fn area(&mut self, len: usize, access: Access, stag: u32) -> Area {
        let memory = Arc::new(Memory::new(len + 2 * CANARY).unwrap());
        memory.write(0, &vec![0xc5; memory.len()]);
        memory.write(CANARY, &vec![0; len]);
        let range = CANARY..CANARY + len;
        let (id, stag) = self.resources.keys.register(&memory, range, access, || stag).unwrap();
        Area { memory, len, id, stag }
    }

    pub(super) fn take_wire(&mut self) -> Vec<u8> {
        self.transmit(usize::MAX);
        std::mem::take(&mut self.wire)
    }

    fn statuses(&mut self) -> Vec<(u64, WcStatus, WcOpcode)> {
        self.done().iter().map(|wc| (wc.wr_id, wc.status, wc.opcode)).collect()
    }
}

impl Pair {
    pub(super) fn new(agreement: Agreement, emss: usize) -> Self {
        let back = Agreement { ird: agreement.ord, ord: agreement.ird, ..agreement };
        let mut pair = Self {
            a: TestQueuePair::new(Role::Initiator, agreement, emss),
            b: TestQueuePair::new(Role::Responder, back, emss),
        };
        pair.b.qp.tx.release();
        pair
    }

    /// Delivers the output of each side to the other side, until neither side has output.
    pub(super) fn settle(&mut self) -> std::result::Result<(), Fault> {
        loop {
            let (there, back) = (self.a.take_wire(), self.b.take_wire());
            if there.is_empty() && back.is_empty() {
                return Ok(());
            }
            self.b.deliver(&there)?;
            self.a.deliver(&back)?;
        }
    }
}

const SIGNALED: SendFlags = SendFlags::SIGNALED;

fn success(wr_id: u64, opcode: WcOpcode) -> (u64, WcStatus, WcOpcode) {
    (wr_id, WcStatus::Success, opcode)
}

#[test]
fn writes_and_reads_of_all_sizes() {
    for crc in [true, false] {
        for emss in [1448, 65483] {
            let mut pair = Pair::new(agreement(crc, Some(ReadyToReceive::Write)), emss);
            for (index, &len) in SIZES.iter().enumerate() {
                let remote = pair.b.area(len, REMOTE, 1000 + index as u32);
                let local = pair.a.area(len, Access::LOCAL_WRITE, 2000 + index as u32);
                let source = Memory::new(len.max(1)).unwrap();
                source.write(0, &pattern(len, index));
                let inline = if len <= 64 { SendFlags::INLINE } else { SendFlags::empty() };
                let sges = scattered(&source, len, 1 + index % 4);
                pair.a.post(1, SendOp::Write(remote.remote(0)), sges, SIGNALED | inline).unwrap();
                pair.a.post(2, SendOp::Read(remote.remote(0)), local.sge(0, len), SIGNALED).unwrap();
                pair.settle().unwrap();
                let done = pair.a.done();
                assert_eq!(
                    done.iter().map(|wc| (wc.wr_id, wc.opcode)).collect::<Vec<_>>(),
                    [(1, WcOpcode::Write), (2, WcOpcode::Read)]
                );
                assert_eq!(done[1].byte_len as usize, len);
                assert_eq!((remote.bytes(), local.bytes()), (pattern(len, index), pattern(len, index)));
                assert!(remote.canaries() && local.canaries());
            }
            assert!(pair.b.done().is_empty());
        }
    }
}

/// A program may change shared memory while a Send or a Write transmits that memory. In that case, the peer may receive a mixture of old
/// and new bytes. But the CRC of every FPDU matches its octets.
#[test]
fn memory_that_changes_while_it_is_sent_breaks_no_stream() {
    for one_sided in [false, true] {
        let mut pair = Pair::new(agreement(true, None), 1448);
        let remote = pair.b.area(9000, REMOTE, 77);
        let (source, inbox) = (Memory::new(9000).unwrap(), Memory::new(9000).unwrap());
        pair.b.recv(5, SgeList::one(inbox.sge(0, 9000)));
        source.write(0, &[1; 9000]);
        let op = if one_sided { SendOp::Write(remote.remote(0)) } else { SendOp::Send };
        pair.a.post(0, op, SgeList::one(source.shared_sge(0, 9000)), SIGNALED).unwrap();
        // TCP first accepts only the first 700 octets of the output, a part of the first FPDU. Then the memory changes.
        let TestQueuePair { qp, resources, wire, .. } = &mut pair.a;
        let mut room = 700;
        let sent = qp.transmit(
            &mut |bufs| {
                for buf in bufs {
                    room -= buf.append_to(wire, room);
                }
                if wire.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(wire.len()) }
            },
            resources,
        );
        assert_eq!(sent.unwrap(), Sent::Blocked);
        source.write(0, &[2; 9000]);
        pair.a.transmit(usize::MAX);
        let wire = std::mem::take(&mut pair.a.wire);
        pair.b.deliver(&wire).unwrap();
        let got = if one_sided { remote.bytes() } else { inbox.read(0, 9000) };
        assert!(got.iter().all(|byte| [1, 2].contains(byte)), "whatever it is, it was sent");
        assert_eq!(pair.a.done().len(), 1);
    }
}

/// The result of a Write does not depend on where its stream is cut. A Write segment with a wrong
/// bit changes no memory.
#[test]
fn one_sided_split_at_every_byte() {
    for crc in [true, false] {
        let mut pair = Pair::new(agreement(crc, None), 1448);
        let source = Memory::new(5000).unwrap();
        source.write(0, &pattern(5000, 1));
        let remote = pair.b.area(5000, REMOTE, 77);
        pair.a.post(1, SendOp::Write(remote.remote(0)), SgeList::one(source.sge(0, 5000)), SIGNALED).unwrap();
        let wire = pair.a.take_wire();
        for split in 1..wire.len() {
            remote.write(0, &[0; 5000]);
            let mut fresh = Pair::new(agreement(crc, None), 1448);
            std::mem::swap(&mut fresh.b.resources, &mut pair.b.resources);
            fresh.b.deliver(&wire[..split]).unwrap();
            fresh.b.deliver(&wire[split..]).unwrap();
            assert_eq!(remote.bytes(), pattern(5000, 1), "{split}");
            std::mem::swap(&mut fresh.b.resources, &mut pair.b.resources);
        }
        if crc {
            for bit in (0..wire.len() * 8).step_by(61) {
                remote.write(0, &[0; 5000]);
                let mut damaged = wire.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                let mut fresh = Pair::new(agreement(true, None), 1448);
                std::mem::swap(&mut fresh.b.resources, &mut pair.b.resources);
                let segment = bit / 8 / 1448;
                let result = damaged.chunks(1 + bit % 3000).try_for_each(|chunk| fresh.b.deliver(chunk));
                assert!(result.is_err() || !fresh.b.qp.is_at_boundary(), "bit {bit}");
                if let Err(fault) = result {
                    assert_eq!(fault, TerminateCause::LLP_CRC.into(), "bit {bit}");
                }
                // The segments in front of the damaged segment are placed. The damaged segment and the segments behind it are not placed.
                let good = segment * 1428;
                assert_eq!(remote.bytes()[..good], pattern(5000, 1)[..good]);
                assert!(remote.bytes()[good..].iter().all(|&byte| byte == 0), "bit {bit}");
                std::mem::swap(&mut fresh.b.resources, &mut pair.b.resources);
            }
        }
    }
}

/// The peer limits the number of outstanding Reads. A Read above this limit waits, and the work requests behind it wait, too. All of them
/// complete in order.
#[test]
fn reads_queue_behind_the_limit() {
    let mut pair = Pair::new(agreement(true, None), 1448);
    let remote = pair.b.area(64, REMOTE, 77);
    let local = pair.a.area(64, Access::LOCAL_WRITE, 78);
    for wr_id in 0..5 {
        pair.a.post(wr_id, SendOp::Read(remote.remote(0)), local.sge(0, 8), SIGNALED).unwrap();
    }
    let memory = Memory::new(8).unwrap();
    pair.a.send(5, SgeList::one(memory.sge(0, 8)), SIGNALED);
    pair.b.recv(0, SgeList::one(memory.sge(0, 8)));
    let wire = pair.a.take_wire();
    // Only two Read Requests of 52 bytes each are sent, because the agreed depth is 2.
    assert_eq!(wire.len(), 104);
    assert!(!pair.a.qp.tx.has_work() && pair.a.done().is_empty());
    pair.b.deliver(&wire).unwrap();
    pair.settle().unwrap();
    let opcodes: Vec<_> = pair.a.statuses();
    assert_eq!(opcodes[..5], [0, 1, 2, 3, 4].map(|wr_id| success(wr_id, WcOpcode::Read)));
    assert_eq!(opcodes[5], success(5, WcOpcode::Send));
}

#[test]
fn a_read_holds_back_completions_and_a_fence_holds_back_sends() {
    let mut pair = Pair::new(agreement(true, None), 1448);
    let remote = pair.b.area(64, REMOTE, 77);
    let local = pair.a.area(64, Access::LOCAL_WRITE, 78);
    let memory = Memory::new(64).unwrap();
    pair.b.recv(0, SgeList::one(memory.sge(0, 8)));
    pair.b.recv(1, SgeList::one(memory.sge(0, 8)));
    pair.a.post(0, SendOp::Read(remote.remote(0)), local.sge(0, 8), SIGNALED).unwrap();
    pair.a.send(1, SgeList::one(memory.sge(8, 8)), SIGNALED);
    pair.a.send(2, SgeList::one(memory.sge(16, 8)), SIGNALED | SendFlags::FENCE);
    let wire = pair.a.take_wire();
    assert_eq!(wire.len(), 52 + 32, "the fenced one waits");
    assert!(pair.a.done().is_empty(), "the Read is first");
    pair.b.deliver(&wire).unwrap();
    assert_eq!(pair.b.statuses(), [success(0, WcOpcode::Recv)]);
    pair.settle().unwrap();
    let want = [success(0, WcOpcode::Read), success(1, WcOpcode::Send), success(2, WcOpcode::Send)];
    assert_eq!(pair.a.statuses(), want);
}

/// Reads of length 0 are never sent, because siw answers some of them with data of other Reads.
#[test]
fn siw_never_sees_a_zero_length_read() {
    let mut pair = Pair::new(agreement(true, None), 1448);
    let remote = pair.b.area(64, REMOTE, 77);
    let local = pair.a.area(64, Access::LOCAL_WRITE, 78);
    pair.a.post(0, SendOp::Read(remote.remote(0)), SgeList::default(), SIGNALED).unwrap();
    assert!(pair.a.take_wire().is_empty());
    assert_eq!(pair.a.statuses(), [success(0, WcOpcode::Read)]);
    pair.a.post(1, SendOp::Read(remote.remote(0)), local.sge(0, 8), SIGNALED).unwrap();
    pair.a.post(2, SendOp::Read(remote.remote(0)), local.sge(0, 0), SIGNALED).unwrap();
    let wire = pair.a.take_wire();
    assert_eq!(wire.len(), 52);
    assert!(pair.a.done().is_empty(), "in the order of the queue");
    pair.b.deliver(&wire).unwrap();
    pair.settle().unwrap();
    assert_eq!(pair.a.statuses(), [success(1, WcOpcode::Read), success(2, WcOpcode::Read)]);
}

/// siw may have more requests outstanding than agreed: it rounds the depth up to the next power of two.
#[test]
fn siw_may_exceed_our_depth_as_it_does() {
    let mut end = TestQueuePair::new(Role::Responder, Agreement { ird: 3, ..agreement(false, None) }, 1448);
    let area = end.area(64, REMOTE, 77);
    for msn in 1..=5 {
        end.deliver(&read_request(msn, area.remote(0), 8)).unwrap();
    }
    let Err(Fault::Violation(cause, Some(quote))) = end.deliver(&read_request(6, area.remote(0), 8)) else { panic!() };
    assert_eq!(cause, TerminateCause::RDMAP_STREAM_CATASTROPHIC);
    assert_eq!(quote.read_request().unwrap().source_stag, 77);
}

pub(super) fn read_request(msn: u32, source: RemoteAddress, size: u32) -> Vec<u8> {
    let request = ReadRequest {
        sink_stag: 0xabcd,
        sink_offset: 0x1000,
        size,
        source_stag: source.key.0,
        source_offset: source.address,
    };
    let header = Untagged { last: true, opcode: Opcode::ReadRequest, reserved_or_stag: 0, queue: 1, msn, offset: 0 };
    let mut bytes = [0; 20];
    header.emit_into(46, &mut bytes);
    let mut fpdu = [&bytes[..], &request.emit()].concat();
    fpdu.extend([0; 4]);
    fpdu
}

fn tagged(opcode: Opcode, last: bool, stag: u32, offset: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [0; 16];
    Tagged { last, opcode, stag, offset }.emit_into((14 + payload.len()) as u16, &mut bytes);
    let mut fpdu = [&bytes[..], payload].concat();
    fpdu.resize(fpdu.len().next_multiple_of(4) + 4, 0);
    fpdu
}

/// A Read Response that differs from the expected response in any way ends the stream. Nothing is written outside of the sink.
#[test]
fn responses_that_were_not_asked_for() {
    let response = |last, stag, offset, len: usize| tagged(Opcode::ReadResponse, last, stag, offset, &vec![7; len]);
    type Make = dyn Fn(u64) -> Vec<u8>;
    let stag = 78;
    let cases: &[(&str, Box<Make>, TerminateCause)] = &[
        ("longer", Box::new(move |to| response(true, stag, to, 101)), TerminateCause::DDP_TAGGED_BOUNDS),
        (
            "longer in all",
            Box::new(move |to| [response(false, stag, to, 60), response(true, stag, to + 60, 41)].concat()),
            TerminateCause::DDP_TAGGED_BOUNDS,
        ),
        ("other STag", Box::new(move |to| response(true, 79, to, 100)), TerminateCause::DDP_TAGGED_INVALID_STAG),
        ("other place", Box::new(move |to| response(true, stag, to + 4, 100)), TerminateCause::DDP_TAGGED_BOUNDS),
        (
            "gap",
            Box::new(move |to| [response(false, stag, to, 40), response(true, stag, to + 44, 56)].concat()),
            TerminateCause::DDP_TAGGED_BOUNDS,
        ),
        ("short", Box::new(move |to| response(true, stag, to, 99)), TerminateCause::RDMAP_STREAM_CATASTROPHIC),
        ("no end", Box::new(move |to| response(false, stag, to, 100)), TerminateCause::RDMAP_STREAM_CATASTROPHIC),
        ("empty", Box::new(move |to| response(true, stag, to, 0)), TerminateCause::RDMAP_STREAM_CATASTROPHIC),
        (
            "twice",
            Box::new(move |to| [response(true, stag, to, 100), response(true, stag, to, 100)].concat()),
            TerminateCause::DDP_LOCAL_CATASTROPHIC,
        ),
    ];
    for (name, make, want) in cases {
        for step in [1, 30, usize::MAX] {
            let mut a = TestQueuePair::new(Role::Initiator, agreement(false, None), 1448);
            let local = a.area(100, Access::LOCAL_WRITE, stag);
            let other = a.area(100, REMOTE, 79);
            let remote = RemoteAddress { address: 0x5000, key: RemoteKey(5) };
            a.post(0, SendOp::Read(remote), local.sge(0, 100), SIGNALED).unwrap();
            a.take_wire();
            let bytes = make(local.remote(0).address);
            let result = bytes.chunks(step.min(bytes.len())).try_for_each(|chunk| a.deliver(chunk));
            let Err(Fault::Violation(cause, Some(quote))) = result else { panic!("{name}: {result:?}") };
            assert_eq!((cause, quote.ddp_header().len()), (*want, 14), "{name}");
            assert!(local.canaries() && other.canaries() && other.bytes() == [0; 100], "{name}");
        }
    }
    let mut a = TestQueuePair::new(Role::Initiator, agreement(false, None), 1448);
    let Err(Fault::Violation(cause, _)) = a.deliver(&response(true, 78, 0, 4)) else { panic!() };
    assert_eq!(cause, TerminateCause::DDP_LOCAL_CATASTROPHIC);
}

/// The Read of a ready-to-receive message has length 0 and no sink, so a response with payload is
/// refused.
#[test]
fn the_response_to_a_read_of_nothing_has_no_bytes() {
    for (stag, want) in [(1, TerminateCause::DDP_TAGGED_BOUNDS), (0, TerminateCause::DDP_TAGGED_INVALID_STAG)] {
        let rtr = Some(ReadyToReceive::Read);
        let mut a = TestQueuePair::new(Role::Initiator, agreement(false, rtr), 1448);
        a.take_wire();
        let result = a.deliver(&tagged(Opcode::ReadResponse, true, stag, 0, &[7; 4]));
        let Err(Fault::Violation(cause, _)) = result else { panic!("{stag}: {result:?}") };
        assert_eq!(cause, want, "{stag}");
    }
}

/// Each access that a peer has no right to is refused with the code of the RFCs, changes no memory,
/// and is not answered.
#[test]
fn memory_that_is_not_the_peers() {
    let mut end = TestQueuePair::new(Role::Responder, agreement(false, None), 1448);
    let both = end.area(100, REMOTE, 10);
    let readable = end.area(100, Access::REMOTE_READ, 11);
    let writable = end.area(100, Access::REMOTE_WRITE, 12);
    let local = end.area(100, Access::LOCAL_WRITE, 13);
    let other = end.area(100, REMOTE, 14);
    let revoked = end.area(100, REMOTE, 15);
    let gone = end.area(100, REMOTE, 16);
    end.resources.keys.restrict(other.id, Key::new(9, 9)).unwrap();
    end.resources.keys.invalidate(revoked.id).unwrap();
    end.resources.keys.deregister(gone.id).unwrap();
    let wrap = RemoteAddress { address: u64::MAX - 3, key: RemoteKey(10) };
    let unknown = RemoteAddress { key: RemoteKey(99), ..both.remote(0) };
    use TerminateCause as Cause;
    let cases = [
        (both.remote(0), 100, None, None),
        (both.remote(1), 100, Some(Cause::DDP_TAGGED_BOUNDS), Some(Cause::RDMAP_BOUNDS)),
        (wrap, 8, Some(Cause::DDP_TAGGED_TO_WRAP), Some(Cause::RDMAP_TO_WRAP)),
        (unknown, 8, Some(Cause::DDP_TAGGED_INVALID_STAG), Some(Cause::RDMAP_INVALID_STAG)),
        (readable.remote(0), 8, Some(Cause::DDP_TAGGED_INVALID_STAG), None),
        (writable.remote(0), 8, None, Some(Cause::RDMAP_ACCESS)),
        (local.remote(0), 8, Some(Cause::DDP_TAGGED_INVALID_STAG), Some(Cause::RDMAP_INVALID_STAG)),
        (other.remote(0), 8, Some(Cause::DDP_TAGGED_INVALID_STAG), Some(Cause::RDMAP_INVALID_STAG)),
        (revoked.remote(0), 8, Some(Cause::DDP_TAGGED_INVALID_STAG), Some(Cause::RDMAP_INVALID_STAG)),
        (gone.remote(0), 8, Some(Cause::DDP_TAGGED_INVALID_STAG), Some(Cause::RDMAP_INVALID_STAG)),
    ];
    let areas = [&both, &readable, &writable, &local, &other, &revoked, &gone];
    let got = |result| match result {
        Ok(()) => None,
        Err(Fault::Violation(cause, Some(_))) => Some(cause),
        Err(other) => panic!("{other:?}"),
    };
    for (index, (at, len, write, read)) in cases.into_iter().enumerate() {
        let before: Vec<_> = areas.iter().map(|area| area.bytes()).collect();
        let mut fresh = TestQueuePair::new(Role::Responder, agreement(false, None), 1448);
        std::mem::swap(&mut fresh.resources.keys, &mut end.resources.keys);
        assert_eq!(got(fresh.deliver(&read_request(1, at, len))), read, "Read {index}");
        assert!(read.is_none() || fresh.take_wire().is_empty(), "Read {index} was answered");
        let mut fresh2 = TestQueuePair::new(Role::Responder, agreement(false, None), 1448);
        std::mem::swap(&mut fresh2.resources.keys, &mut fresh.resources.keys);
        let bytes = tagged(Opcode::Write, true, at.key.0, at.address, &vec![7; len as usize]);
        assert_eq!(got(fresh2.deliver(&bytes)), write, "Write {index}");
        std::mem::swap(&mut fresh2.resources.keys, &mut end.resources.keys);
        for (area, before) in areas.iter().zip(before) {
            assert!(area.canaries());
            assert!(write.is_none() || area.bytes() == before, "Write {index}");
        }
    }
    // The STags and offsets of these messages are invalid. The provider must not check them, because the messages have no payload.
    end.deliver(&tagged(Opcode::Write, true, 99, 5, b"")).unwrap();
    end.deliver(&read_request(1, unknown, 0)).unwrap();
}

/// A region is revoked during an access. After that, the region is neither read nor written.
#[test]
fn regions_taken_back_in_the_middle() {
    for crc in [true, false] {
        // Case 1: the peer's Write has partly arrived.
        let mut pair = Pair::new(agreement(crc, None), 9000);
        let remote = pair.b.area(8000, REMOTE, 77);
        let source = Memory::new(8000).unwrap();
        source.write(0, &[7; 8000]);
        pair.a.post(0, SendOp::Write(remote.remote(0)), SgeList::one(source.sge(0, 8000)), SIGNALED).unwrap();
        let wire = pair.a.take_wire();
        pair.b.deliver(&wire[..3000]).unwrap();
        let before = remote.bytes();
        pair.b.resources.keys.deregister(remote.id).unwrap();
        assert_eq!(Arc::strong_count(&remote.memory), 1);
        let Err(Fault::Violation(cause, Some(quote))) = pair.b.deliver(&wire[3000..]) else { panic!() };
        assert_eq!((cause, quote.segment_len()), (TerminateCause::DDP_TAGGED_INVALID_STAG, 8014));
        assert_eq!(remote.bytes(), before);
        // Case 2: the response to the peer's Read is partly sent.
        let mut pair = Pair::new(agreement(crc, None), 1448);
        let remote = pair.b.area(1 << 20, REMOTE, 77);
        let local = pair.a.area(1 << 20, Access::LOCAL_WRITE, 78);
        pair.a.post(0, SendOp::Read(remote.remote(0)), local.sge(0, 1 << 20), SIGNALED).unwrap();
        let wire = pair.a.take_wire();
        pair.b.deliver(&wire).unwrap();
        let mut out = Vec::new();
        let TestQueuePair { qp, resources, .. } = &mut pair.b;
        let sent = qp.transmit(
            &mut |bufs| match out.len() {
                0 => {
                    for buf in bufs {
                        buf.append_to(&mut out, usize::MAX);
                    }
                    Ok(out.len())
                }
                _ => Err(io::ErrorKind::WouldBlock.into()),
            },
            resources,
        );
        assert_eq!(sent.unwrap(), Sent::Blocked);
        resources.keys.invalidate(remote.id).unwrap();
        let rest = pair.b.take_wire();
        let Some(Fault::Violation(cause, quote)) = pair.b.qp.take_fault() else { panic!() };
        assert_eq!(cause, TerminateCause::RDMAP_INVALID_STAG);
        let read = quote.unwrap().read_request().unwrap();
        assert!(read.size < 1 << 20 && read.source_offset > remote.remote(0).address);
        assert_eq!(read.source_offset + u64::from(read.size), remote.remote(1 << 20).address);
        pair.a.deliver(&[out, rest].concat()).unwrap();
        let terminate = pair.b.qp.end(Some((cause, quote)), &mut pair.b.resources.cqs);
        assert!(matches!(pair.a.deliver(&terminate), Err(Fault::Terminated(Some(_)))));
        pair.a.qp.end(None, &mut pair.a.resources.cqs);
        assert_eq!(pair.a.statuses(), [(0, WcStatus::RemoteAccessError, WcOpcode::Read)]);
        // Case 3: the sink of a local Read is revoked before the response arrives.
        let mut pair = Pair::new(agreement(crc, None), 1448);
        let remote = pair.b.area(8, REMOTE, 77);
        let local = pair.a.area(8, Access::LOCAL_WRITE, 78);
        pair.a.post(0, SendOp::Read(remote.remote(0)), local.sge(0, 8), SIGNALED).unwrap();
        let wire = pair.a.take_wire();
        pair.b.deliver(&wire).unwrap();
        pair.a.resources.keys.deregister(local.id).unwrap();
        let fault = pair.settle().unwrap_err();
        assert_eq!(fault, Fault::WorkRequest(WcStatus::LocalProtectionError));
        pair.a.qp.end(None, &mut pair.a.resources.cqs);
        assert_eq!(pair.a.statuses(), [(0, WcStatus::LocalProtectionError, WcOpcode::Read)]);
    }
}

#[test]
fn a_send_takes_an_stag_back() {
    for (flags, stag, owner, want) in [
        (SIGNALED, 77, None, None),
        (SIGNALED | SendFlags::SOLICITED, 77, Some(Key::new(1, 1)), None),
        (SIGNALED, 77, Some(Key::new(5, 1)), Some(TerminateCause::RDMAP_CANNOT_INVALIDATE)),
        (SIGNALED, 78, None, Some(TerminateCause::RDMAP_CANNOT_INVALIDATE)),
        (SIGNALED, 79, None, Some(TerminateCause::RDMAP_CANNOT_INVALIDATE)),
    ] {
        let mut pair = Pair::new(agreement(true, None), 1448);
        let region = pair.b.area(8, REMOTE, 77);
        let local = pair.b.area(8, Access::LOCAL_WRITE, 79);
        if let Some(owner) = owner {
            pair.b.resources.keys.restrict(region.id, owner).unwrap();
        }
        let memory = Memory::new(4096).unwrap();
        pair.b.recv(4, SgeList::one(memory.sge(0, 4000)));
        let op = SendOp::SendInvalidate(RemoteKey(stag));
        pair.a.post(0, op, SgeList::one(memory.sge(0, 3000)), flags).unwrap();
        match (pair.settle(), want) {
            (Ok(()), None) => {
                assert_eq!(pair.b.done()[0].invalidated, Some(RemoteKey(77)));
                pair.a.post(1, SendOp::Write(region.remote(0)), SgeList::one(memory.sge(0, 8)), SIGNALED).unwrap();
                let Err(Fault::Violation(cause, _)) = pair.settle() else { panic!() };
                assert_eq!(cause, TerminateCause::DDP_TAGGED_INVALID_STAG);
            }
            (Err(Fault::Violation(cause, Some(_))), Some(want)) => {
                assert_eq!(cause, want);
                assert!(pair.b.done().is_empty());
            }
            other => panic!("{other:?}"),
        }
        assert!(region.canaries() && local.canaries());
    }
}

#[test]
fn what_cannot_be_posted() {
    let mut end = TestQueuePair::new(Role::Initiator, Agreement { ord: 0, ..agreement(true, None) }, 1448);
    let local = end.area(16, Access::LOCAL_WRITE, 78);
    let remote = RemoteAddress { address: 0, key: RemoteKey(5) };
    let sge = local.sge(0, 8);
    assert!(matches!(
        end.post(0, SendOp::Read(remote), sge, SIGNALED),
        Err(TransportError::OutOfRange { value: 0, .. })
    ));
    let mut end = TestQueuePair::new(Role::Initiator, agreement(true, None), 1448);
    let local = end.area(16, Access::LOCAL_WRITE, 78);
    let fixed = end.area(16, REMOTE, 79);
    let mut two = local.sge(0, 8);
    two.push(local.sge(8, 8).as_slice()[0]).unwrap();
    assert!(matches!(
        end.post(0, SendOp::Read(remote), two, SIGNALED),
        Err(TransportError::OutOfRange { value: 2, .. })
    ));
    let bad = [fixed.sge(0, 8), SgeList::one(local.memory.sge(CANARY, 8)), SgeList::one(Sge::default())];
    for sges in bad.into_iter().take(2) {
        assert!(matches!(end.post(0, SendOp::Read(remote), sges, SIGNALED), Err(TransportError::InvalidState { .. })));
    }
    for op in [
        SendOp::WriteWithImmediate(remote, 1),
        SendOp::FetchAdd { remote, add: 1 },
        SendOp::CompareSwap { remote, expected: 1, swap: 2 },
    ] {
        assert!(matches!(end.post(0, op, local.sge(0, 8), SIGNALED), Err(TransportError::Unsupported { .. })));
    }
    assert!(end.take_wire().is_empty());
}

/// The peer serves no Reads. The local side only learns this in the handshake, so a Read that was posted before the handshake fails.
#[test]
fn a_read_that_nobody_serves() {
    let mut cqs_end = TestQueuePair::new(Role::Initiator, Agreement { ord: 0, ..agreement(true, None) }, 1448);
    let local = cqs_end.area(16, Access::LOCAL_WRITE, 78);
    cqs_end.qp.live = false;
    let remote = RemoteAddress { address: 0, key: RemoteKey(5) };
    cqs_end.post(3, SendOp::Read(remote), local.sge(0, 8), SendFlags::empty()).unwrap();
    assert!(cqs_end.take_wire().is_empty());
    let fault = cqs_end.qp.take_fault();
    assert_eq!(fault, Some(Fault::WorkRequest(WcStatus::LocalQpOperationError)));
    cqs_end.qp.end(None, &mut cqs_end.resources.cqs);
    assert_eq!(cqs_end.statuses(), [(3, WcStatus::LocalQpOperationError, WcOpcode::Read)]);
}

/// Responses and local messages alternate, but a message is complete before the next one begins.
#[test]
fn answers_and_sends_take_turns() {
    let mut end = TestQueuePair::new(Role::Responder, Agreement { ird: 8, ..agreement(false, None) }, 1448);
    end.qp.tx.release();
    let area = end.area(4000, REMOTE, 77);
    for msn in 1..=4 {
        end.deliver(&read_request(msn, area.remote(0), 4000)).unwrap();
    }
    let memory = Memory::new(3000).unwrap();
    for wr_id in 0..4 {
        end.send(wr_id, SgeList::one(memory.sge(0, 3000)), SIGNALED);
    }
    let wire = end.take_wire();
    let mut kinds = Vec::new();
    let mut at = 0;
    while at < wire.len() {
        let header = SegmentHeader::parse(&wire[at..]).unwrap();
        kinds.push((header.opcode() == Opcode::ReadResponse, header.last()));
        at += super::super::super::wire::mpa::fpdu_len(usize::from(u16::from_be_bytes([wire[at], wire[at + 1]])));
    }
    let message = |response| [(response, false), (response, false), (response, true)];
    let want: Vec<_> = (0..4).flat_map(|_| [message(false), message(true)].concat()).collect();
    assert_eq!(kinds, want);
}

#[test]
fn immediate_data_and_atomics_where_agreed() {
    for crc in [true, false] {
        let mut pair = Pair::new(agreement(crc, None), 1448);
        pair.a.qp.extensions = true;
        pair.b.qp.extensions = true;
        let remote = pair.b.area(4096, Access::REMOTE, 77);
        let local = pair.a.area(64, Access::LOCAL_WRITE, 78);
        let source = Memory::new(4096).unwrap();
        source.write(0, &pattern(4000, 3));
        let receive = Memory::new(8).unwrap();
        pair.b.recv(9, SgeList::one(receive.sge(0, 8)));
        pair.b.recv(10, SgeList::default());
        let op = SendOp::WriteWithImmediate(remote.remote(0), 0xdead_beef);
        pair.a.post(0, op, SgeList::one(source.sge(0, 4000)), SIGNALED).unwrap();
        let op = SendOp::WriteWithImmediate(remote.remote(0), 7);
        pair.a.post(1, op, SgeList::default(), SIGNALED | SendFlags::SOLICITED).unwrap();
        remote.write(4000, &5u64.to_ne_bytes());
        let word = remote.remote(4000);
        pair.a.post(2, SendOp::FetchAdd { remote: word, add: 10 }, local.sge(0, 8), SIGNALED).unwrap();
        let swap = SendOp::CompareSwap { remote: word, expected: 15, swap: 99 };
        pair.a.post(3, swap, local.sge(8, 8), SIGNALED).unwrap();
        pair.a.post(4, swap, local.sge(16, 8), SIGNALED).unwrap();
        pair.a.post(5, SendOp::Read(word), local.sge(24, 8), SIGNALED).unwrap();
        pair.settle().unwrap();
        let done = pair.b.done();
        let got: Vec<_> = done.iter().map(|wc| (wc.wr_id, wc.opcode, wc.immediate, wc.byte_len)).collect();
        let opcode = WcOpcode::RecvWriteWithImmediate;
        assert_eq!(got, [(9, opcode, Some(0xdead_beef), 4000), (10, opcode, Some(7), 0)]);
        assert_eq!(remote.bytes()[..4000], pattern(4000, 3));
        let opcodes: Vec<_> = pair.a.done().iter().map(|wc| (wc.wr_id, wc.opcode, wc.byte_len)).collect();
        let (write, atomic, read) = (WcOpcode::Write, WcOpcode::Atomic, WcOpcode::Read);
        let want = [(0, write, 0), (1, write, 0), (2, atomic, 8), (3, atomic, 8), (4, atomic, 8), (5, read, 8)];
        assert_eq!(opcodes, want);
        let words: Vec<_> =
            local.bytes().chunks(8).take(4).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, [5, 15, 99, 99]);
        // The address of this atomic operation is not a multiple of 8.
        pair.a.post(6, SendOp::FetchAdd { remote: remote.remote(4), add: 1 }, local.sge(0, 8), SIGNALED).unwrap();
        let Err(Fault::Violation(cause, Some(_))) = pair.settle() else { panic!() };
        assert_eq!(cause, TerminateCause::RDMAP_STREAM_CATASTROPHIC);
    }
}

/// If only the sender has enabled the extensions, the receiver refuses their opcodes as unexpected.
#[test]
fn extensions_without_agreement() {
    let mut pair = Pair::new(agreement(true, None), 1448);
    pair.a.qp.extensions = true;
    let remote = pair.b.area(64, REMOTE, 77);
    let local = pair.a.area(64, Access::LOCAL_WRITE, 78);
    for op in [SendOp::WriteWithImmediate(remote.remote(0), 1), SendOp::FetchAdd { remote: remote.remote(0), add: 1 }] {
        let mut pair = Pair::new(agreement(true, None), 1448);
        pair.a.qp.extensions = true;
        let _ = pair.a.area(64, Access::LOCAL_WRITE, 78);
        let _ = pair.b.area(64, REMOTE, 77);
        let sges = if matches!(op, SendOp::FetchAdd { .. }) {
            let again = pair.a.area(64, Access::LOCAL_WRITE, 80);
            again.sge(0, 8)
        } else {
            SgeList::default()
        };
        pair.a.post(0, op, sges, SIGNALED).unwrap();
        let Err(Fault::Violation(cause, _)) = pair.settle() else { panic!() };
        assert_eq!(cause, TerminateCause::RDMAP_OPCODE);
    }
    assert!(remote.canaries() && local.canaries() && remote.bytes() == [0; 64]);
}

#[test]
fn markers_where_they_are_required() {
    for crc in [true, false] {
        let mut marked = TestQueuePair::new(Role::Initiator, Agreement { markers: true, ..agreement(crc, None) }, 1448);
        let mut plain = TestQueuePair::new(Role::Initiator, agreement(crc, None), 1448);
        // Each segment of the stream with markers contains three markers of 4 octets. If the segments of the stream without markers are 12
        // octets shorter, the payloads of both streams have the same length.
        plain.qp.tx.set_max_segment(1448 - 12);
        let memory = Memory::new(1 << 20).unwrap();
        memory.write(0, &pattern(1 << 20, 3));
        let remote = RemoteAddress { address: 0x1000, key: RemoteKey(5) };
        for end in [&mut marked, &mut plain] {
            let local = end.area(64, Access::LOCAL_WRITE, 78);
            let area = end.area(5000, REMOTE, 79);
            area.write(0, &pattern(5000, 9));
            for (wr_id, &len) in [0usize, 1, 7, 300, 5000, 70_000].iter().enumerate() {
                let sges = scattered(&memory, len, 1 + wr_id % 4);
                end.send(wr_id as u64, sges, SIGNALED);
                end.post(9, SendOp::Write(remote), sges, SendFlags::empty()).unwrap();
            }
            end.deliver(&{
                let mut request = read_request(1, area.remote(0), 5000);
                if crc {
                    let sum = super::super::super::wire::crc32c(&request[..48]).to_le_bytes();
                    request[48..].copy_from_slice(&sum);
                }
                request
            })
            .unwrap();
            end.transmit(777);
            let rest = end.qp.end(Some((TerminateCause::LLP_CRC, None)), &mut end.resources.cqs);
            end.wire.extend(rest);
            // The two queue pairs have a region `local` each, at different addresses. The comparison below shows that no sent octet depends
            // on these addresses.
            drop(local);
        }
        assert_eq!(marked.wire.len().div_ceil(512), (marked.wire.len() - plain.wire.len()) / 4);
        assert_eq!(strip(&marked.wire), plain.wire);
    }
}

#[test]
fn receives_from_a_shared_queue() {
    let mut end = TestQueuePair::new(Role::Responder, agreement(true, None), 1448);
    let srq = end.resources.create_srq(3);
    let attr = *end.qp.attr();
    let mut qps: Vec<QueuePair> = (0..2)
        .map(|slot| {
            let id = QpId(Key::new(10 + slot, 1));
            end.resources.attach(srq, end.cq).unwrap();
            end.resources.cqs.reserve(end.cq, attr.max_send_wr).unwrap();
            let mut qp = QueuePair::new(id, &QpAttr { srq: Some(srq), ..attr });
            qp.establish(Role::Responder, &agreement(true, None), 1448);
            qp
        })
        .collect();
    let memory = Memory::new(4096).unwrap();
    let post = |resources: &mut Resources, srq: SrqId, wr_id| {
        resources.srq(srq).and_then(|queue| queue.post(RecvWr { wr_id, sges: SgeList::one(memory.sge(0, 100)) }))
    };
    for wr_id in 0..3 {
        post(&mut end.resources, srq, wr_id).unwrap();
    }
    assert!(matches!(post(&mut end.resources, srq, 3), Err(TransportError::QueueFull { .. })));
    assert!(qps[0].post_recv(&[RecvWr { wr_id: 1, sges: SgeList::default() }], &mut end.resources.cqs).is_err());
    let wire = stream(&[5, 6, 7], true, 1448, 1, usize::MAX);
    // The first queue pair receives the peer's ready-to-receive message and two messages. The second queue pair receives one message. This
    // message consumes the last receive of the shared queue.
    deliver(&mut qps[0], &mut end.intake, &wire[..20 + 32 + 32], &mut end.resources).unwrap();
    deliver(&mut qps[1], &mut end.intake, &wire[..20 + 32], &mut end.resources).unwrap();
    let fault = deliver(&mut qps[1], &mut end.intake, &wire[20 + 32..], &mut end.resources).unwrap_err();
    assert!(matches!(fault, Fault::Violation(TerminateCause::DDP_UNTAGGED_NO_BUFFER, _)));
    assert!(post(&mut end.resources, srq, 3).is_err(), "not polled yet");
    let mut out = Vec::new();
    end.resources.cqs.poll(end.cq, 1, &mut out).unwrap();
    let srq_of = qps[0].polled(out[0].opcode).unwrap();
    end.resources.receive_polled(srq_of);
    post(&mut end.resources, srq, 3).unwrap();
    // One of three completions was polled above. The other two are polled after the queues of the queue pairs are released.
    assert!(end.resources.destroy_srq(srq).is_err());
    for qp in &mut qps {
        qp.completions.release(&mut qp.rx.queue, &mut end.resources);
    }
    out.clear();
    end.resources.cqs.poll(end.cq, 9, &mut out).unwrap();
    assert_eq!(out.iter().map(|wc| (wc.wr_id, wc.byte_len)).collect::<Vec<_>>(), [(1, 6), (2, 5)]);
    end.resources.orphan_polled(end.cq, out[0].qp, true);
    post(&mut end.resources, srq, 4).unwrap();
    assert!(post(&mut end.resources, srq, 5).is_err());
    end.resources.destroy_srq(srq).unwrap();
    end.resources.orphan_polled(end.cq, out[1].qp, true);
    end.resources.cqs.destroy(end.cq).unwrap();
}

/// A queue pair with a partly filled receive of a shared queue is destroyed. The receive returns to the front of the shared queue.
#[test]
fn a_shared_receive_that_was_begun_goes_back() {
    let mut end = TestQueuePair::new(Role::Responder, agreement(true, None), 1448);
    let srq = end.resources.create_srq(1);
    let attr = *end.qp.attr();
    let memory = Memory::new(4096).unwrap();
    let wr = RecvWr { wr_id: 7, sges: SgeList::one(memory.sge(0, 4096)) };
    end.resources.srq(srq).and_then(|queue| queue.post(wr)).unwrap();
    for slot in 0..2 {
        end.resources.attach(srq, end.cq).unwrap();
        end.resources.cqs.reserve(end.cq, attr.max_send_wr).unwrap();
        let mut qp = QueuePair::new(QpId(Key::new(10 + slot, 1)), &QpAttr { srq: Some(srq), ..attr });
        qp.establish(Role::Responder, &agreement(true, None), 1448);
        let wire = stream(&[3000], true, 1448, 1, usize::MAX);
        let part = if slot == 0 { 2000 } else { wire.len() };
        deliver(&mut qp, &mut end.intake, &wire[..part], &mut end.resources).unwrap();
        qp.completions.release(&mut qp.rx.queue, &mut end.resources);
        let mut out = Vec::new();
        end.resources.cqs.poll(end.cq, 9, &mut out).unwrap();
        let got: Vec<_> = out.iter().map(|wc| (wc.wr_id, wc.byte_len)).collect();
        assert_eq!(got, if slot == 0 { vec![] } else { vec![(7, 3000)] });
    }
}
