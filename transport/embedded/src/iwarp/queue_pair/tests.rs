//! Tests of queue pairs without sockets: Sends, and all violations of the protocol. Vectors of
//! bytes replace the TCP streams.

mod bulk;
mod model;
mod operations;
mod replay;

use super::super::startup::ReadyToReceive;
use super::super::wire::Opcode;
use super::*;
use crate::test_memory::TestMemory;
use proptest::prelude::*;
use rdma_transport::error::TransportError;
use rdma_transport::mem::Memory;
use rdma_transport::provider::CqId;
use rdma_transport::slab::Key;
use rdma_transport::wc::WorkCompletion;
use rdma_transport::wr::{SendFlags, SendOp, SgeList};

const SIZES: [usize; 14] = [0, 1, 3, 4, 256, 257, 1423, 1424, 1425, 1426, 1428, 1429, 65536, (1 << 20) + 1];

/// A queue pair. The bytes that it has sent are in `wire`.
struct TestQueuePair {
    qp: QueuePair,
    resources: Resources,
    cq: CqId,
    intake: Intake,
    wire: Vec<u8>,
}

fn agreement(crc: bool, rtr: Option<ReadyToReceive>) -> Agreement {
    Agreement { crc, ird: 2, ord: 2, rtr, markers: false }
}

impl TestQueuePair {
    fn new(role: Role, agreement: Agreement, emss: usize) -> Self {
        let mut resources = Resources::default();
        let cq = resources.cqs.create(256);
        let attr = QpAttr {
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: 64,
            max_recv_wr: 64,
            max_inline: 64,
            max_recv_sge: 0,
            srq: None,
        };
        let mut qp = QueuePair::new(QpId(Key::new(1, 1)), &attr);
        qp.establish(role, &agreement, emss);
        Self { qp, resources, cq, intake: Intake::new(), wire: Vec::new() }
    }

    fn done(&mut self) -> Vec<WorkCompletion> {
        let mut out = Vec::new();
        self.resources.cqs.poll(self.cq, usize::MAX, &mut out).unwrap();
        for wc in &out {
            self.qp.polled(wc.opcode);
        }
        out
    }

    /// Transmits everything. In every second send call, TCP accepts at most `window` bytes. In the other calls, TCP accepts nothing, unless
    /// `window` is `usize::MAX`.
    fn transmit(&mut self, window: usize) {
        let Self { qp, resources, wire, .. } = self;
        let mut blocked = false;
        loop {
            let result = qp.transmit(
                &mut |bufs| {
                    blocked = !blocked && window < usize::MAX;
                    if blocked {
                        return Err(io::ErrorKind::WouldBlock.into());
                    }
                    let before = wire.len();
                    for buf in bufs {
                        buf.append_to(wire, usize::MAX);
                    }
                    wire.truncate(wire.len().min(before.saturating_add(window)));
                    Ok(wire.len() - before)
                },
                resources,
            );
            if result.unwrap() == Sent::All {
                return;
            }
        }
    }

    fn send(&mut self, wr_id: u64, sges: SgeList, flags: SendFlags) {
        let wr = SendWr { wr_id, op: SendOp::Send, sges, flags };
        self.qp.post_send(&[wr], &mut self.resources).unwrap();
    }

    fn post(&mut self, wr_id: u64, op: SendOp, sges: SgeList, flags: SendFlags) -> rdma_transport::error::Result<()> {
        self.qp.post_send(&[SendWr { wr_id, op, sges, flags }], &mut self.resources).map_err(|error| error.error)
    }

    fn recv(&mut self, wr_id: u64, sges: SgeList) {
        self.qp.post_recv(&[RecvWr { wr_id, sges }], &mut self.resources.cqs).unwrap();
    }

    /// Passes received bytes to the queue pair, as a socket does.
    fn deliver(&mut self, bytes: &[u8]) -> std::result::Result<(), Fault> {
        deliver(&mut self.qp, &mut self.intake, bytes, &mut self.resources)
    }
}

/// Passes received bytes to a queue pair, as a socket does.
fn deliver(
    qp: &mut QueuePair,
    intake: &mut Intake,
    mut bytes: &[u8],
    resources: &mut Resources,
) -> std::result::Result<(), Fault> {
    while !bytes.is_empty() {
        let received = qp.receive(intake, 256 * 1024, &resources.keys, &mut |slices| {
            let before = bytes.len();
            for slice in slices {
                bytes = &bytes[slice.fill(bytes)..];
            }
            Ok(before - bytes.len())
        });
        qp.input(intake, received.unwrap().0, resources)?;
    }
    Ok(())
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251 + seed * 31) as u8).collect()
}

/// Returns `parts` scatter-gather entries, which cover `len` bytes of `memory`.
fn scattered(memory: &Memory, len: usize, parts: usize) -> SgeList {
    let mut list = SgeList::default();
    let mut at = 0;
    for part in 0..parts {
        let n = if part + 1 == parts { len - at } else { (len - at) / 3 };
        list.push(if part % 2 == 1 { memory.shared_sge(at, n) } else { memory.sge(at, n) }).unwrap();
        at += n;
    }
    list
}

/// Returns the bytes that a queue pair sends for messages of these sizes.
fn stream(sizes: &[usize], crc: bool, emss: usize, parts: usize, window: usize) -> Vec<u8> {
    let mut sender = TestQueuePair::new(Role::Initiator, agreement(crc, Some(ReadyToReceive::Write)), emss);
    for (index, &len) in sizes.iter().enumerate() {
        let memory = Memory::new(len.max(1)).unwrap();
        memory.write(0, &pattern(len, index));
        let inline = if len <= 64 && index % 2 == 1 { SendFlags::INLINE } else { SendFlags::empty() };
        sender.send(index as u64, scattered(&memory, len, parts), SendFlags::SIGNALED | inline);
        if inline.is_empty() {
            sender.transmit(window);
        } else {
            drop(memory);
            sender.transmit(window);
        }
    }
    let done = sender.done();
    assert_eq!(done.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), (0..sizes.len() as u64).collect::<Vec<_>>());
    assert!(!sender.qp.tx.has_work());
    sender.wire
}

/// Receives the bytes of `wire` in pieces. `next` chooses the length of each piece. Checks that every message arrives.
fn receive(wire: &[u8], sizes: &[usize], crc: bool, parts: usize, mut next: impl FnMut(usize) -> usize) {
    let mut receiver = TestQueuePair::new(Role::Responder, agreement(crc, Some(ReadyToReceive::Write)), 1448);
    let memories: Vec<_> = sizes.iter().map(|&len| Memory::new(len.max(1)).unwrap()).collect();
    for (index, memory) in memories.iter().enumerate() {
        receiver.recv(index as u64, scattered(memory, sizes[index], parts));
    }
    let mut at = 0;
    while at < wire.len() {
        let n = next(at).clamp(1, wire.len() - at);
        receiver.deliver(&wire[at..at + n]).unwrap();
        at += n;
    }
    assert!(receiver.qp.is_at_boundary() && receiver.qp.rx.has_seen());
    let done = receiver.done();
    assert_eq!(done.len(), sizes.len());
    for (index, wc) in done.iter().enumerate() {
        assert_eq!((wc.wr_id, wc.status, wc.byte_len as usize), (index as u64, WcStatus::Success, sizes[index]));
        assert_eq!(memories[index].read(0, sizes[index]), pattern(sizes[index], index), "{}", sizes[index]);
    }
}

#[test]
fn all_sizes_whole_and_in_pieces() {
    for crc in [true, false] {
        for (emss, parts, window) in [(1448, 1, usize::MAX), (65483, 2, 100_000), (536, 4, 777)] {
            let wire = stream(&SIZES, crc, emss, parts, window);
            receive(&wire, &SIZES, crc, parts, |_| usize::MAX);
            receive(&wire, &SIZES, crc, 5 - parts, |_| 1460);
            receive(&wire, &SIZES, crc, 1, |at| 1 + at % 9001);
        }
    }
}

#[test]
fn split_at_every_byte() {
    let sizes = [0, 1, 3, 4, 256, 257, 1423, 5000];
    let wire = stream(&sizes, true, 1448, 1, usize::MAX);
    for split in 1..wire.len() {
        receive(&wire, &sizes, true, 2, |at| if at == 0 { split } else { usize::MAX });
    }
    receive(&wire, &sizes, true, 2, |_| 1);
}

/// The expected octets were recorded from real peers: a ready-to-receive Write, and a Send of five bytes.
#[test]
fn bytes_on_the_wire() {
    let mut sender = TestQueuePair::new(Role::Initiator, agreement(true, Some(ReadyToReceive::Write)), 1448);
    let memory = Memory::new(5).unwrap();
    memory.write(0, &[0, 1, 2, 3, 4]);
    sender.send(1, SgeList::one(memory.sge(0, 5)), SendFlags::SIGNALED);
    sender.transmit(usize::MAX);
    let hex: String = sender.wire.iter().map(|byte| format!("{byte:02x}")).collect();
    let send = "001741430000000000000000000000010000000000010203040000008cc20490";
    assert_eq!(hex, format!("000ec140000000010000000000000000ebd34c5f{send}"));
}

#[test]
fn one_flipped_bit_delivers_nothing_wrong() {
    let sizes = [5, 300, 0, 1500, 64];
    let wire = stream(&sizes, true, 1448, 1, usize::MAX);
    for bit in 0..wire.len() * 8 {
        let mut damaged = wire.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let mut receiver = TestQueuePair::new(Role::Responder, agreement(true, Some(ReadyToReceive::Write)), 1448);
        let memories: Vec<_> = sizes.iter().map(|_| Memory::new(4096).unwrap()).collect();
        for (index, memory) in memories.iter().enumerate() {
            receiver.recv(index as u64, SgeList::one(memory.sge(0, 4096)));
        }
        let whole = bit % 2 == 0;
        let result = damaged.chunks(if whole { damaged.len() } else { 100 }).try_for_each(|c| receiver.deliver(c));
        let done = receiver.done();
        assert!(done.len() < sizes.len(), "bit {bit}");
        assert!(result.is_err() || !receiver.qp.is_at_boundary(), "bit {bit} went unnoticed");
        for (index, wc) in done.iter().enumerate() {
            let len = wc.byte_len as usize;
            assert_eq!((wc.wr_id, len), (index as u64, sizes[index]));
            assert_eq!(memories[index].read(0, len), pattern(len, index), "bit {bit}");
        }
    }
}

/// Each violation of the protocol ends the stream with the right Terminate.
#[test]
fn violations() {
    use super::super::wire::{ReadRequest, Tagged, Untagged};
    let send = Untagged { last: true, opcode: Opcode::Send, reserved_or_stag: 0, queue: 0, msn: 1, offset: 0 };
    let untagged = |header: Untagged, payload: &[u8]| {
        let mut bytes = [0; 20];
        header.emit_into((18 + payload.len()) as u16, &mut bytes);
        let mut fpdu = [&bytes, payload].concat();
        fpdu.resize(fpdu.len().next_multiple_of(4) + 4, 0);
        fpdu
    };
    let tagged = |opcode, payload: &[u8]| {
        let mut bytes = [0; 16];
        let header = Tagged { last: true, opcode, stag: 7, offset: 0 };
        header.emit_into((14 + payload.len()) as u16, &mut bytes);
        let mut fpdu = [&bytes, payload].concat();
        fpdu.resize(fpdu.len().next_multiple_of(4) + 4, 0);
        fpdu
    };
    let read = |size| {
        let request = ReadRequest { sink_stag: 1, sink_offset: 2, size, source_stag: 3, source_offset: 4 };
        untagged(Untagged { opcode: Opcode::ReadRequest, queue: 1, ..send }, &request.emit())
    };
    let cases = [
        (untagged(Untagged { queue: 1, ..send }, b""), Some((1, 2, 1))),
        (untagged(Untagged { msn: 2, ..send }, b""), Some((1, 2, 3))),
        (untagged(Untagged { offset: 4, ..send }, b""), Some((1, 2, 4))),
        (untagged(send, &[0; 101]), Some((1, 2, 5))),
        (untagged(send, &[0; 100]), None),
        (untagged(send, &[0; 9]), None),
        (untagged(Untagged { opcode: Opcode::SendInvalidate, ..send }, b""), Some((0, 1, 9))),
        (untagged(Untagged { opcode: Opcode::Immediate, ..send }, &[0; 8]), Some((0, 2, 6))),
        (tagged(Opcode::Write, b"x"), Some((1, 1, 0))),
        (tagged(Opcode::Write, b""), None),
        (tagged(Opcode::ReadResponse, b""), Some((1, 0, 0))),
        (read(1), Some((0, 1, 0))),
        (read(0), None),
        (vec![0, 17, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], Some((2, 0, 3))),
    ];
    for (index, (fpdu, want)) in cases.iter().enumerate() {
        for step in [1, 7, usize::MAX] {
            let mut end = TestQueuePair::new(Role::Responder, agreement(false, None), 1448);
            let memory = Memory::new(4096).unwrap();
            end.recv(1, SgeList::one(memory.sge(0, 100)));
            let result = fpdu.chunks(step.min(fpdu.len())).try_for_each(|chunk| end.deliver(chunk));
            let got = match result {
                Ok(()) => None,
                Err(Fault::Violation(cause, _)) => Some((cause.layer.raw(), cause.etype, cause.code)),
                Err(other) => panic!("{other:?}"),
            };
            assert_eq!(got, *want, "case {index}");
            assert!(want.is_none() || end.done().is_empty(), "case {index} has completed a receive");
        }
    }
    let mut end = TestQueuePair::new(Role::Responder, agreement(false, None), 1448);
    let Err(Fault::Violation(cause, _)) = end.deliver(&untagged(send, b"")) else { panic!() };
    assert_eq!(cause, TerminateCause::DDP_UNTAGGED_NO_BUFFER);
}

#[test]
fn a_terminate_ends_the_stream_behind_what_was_begun() {
    let mut a = TestQueuePair::new(Role::Initiator, agreement(true, None), 1448);
    let memory = Memory::new(8192).unwrap();
    memory.write(0, &pattern(3000, 0));
    for wr_id in 0..2 {
        a.send(wr_id, SgeList::one(memory.sge(0, 3000)), SendFlags::SIGNALED);
    }
    let mut taken = Vec::new();
    let mut calls = 0;
    let sent = a.qp.transmit(
        &mut |bufs| {
            calls += 1;
            let mut all = Vec::new();
            for buf in bufs {
                buf.append_to(&mut all, usize::MAX);
            }
            taken.extend_from_slice(&all[..3100]);
            Ok(3100)
        },
        &mut a.resources,
    );
    assert_eq!((sent.unwrap(), calls), (Sent::Blocked, 1));
    let rest = a.qp.end(Some((TerminateCause::LLP_CRC, None)), &mut a.resources.cqs);
    // The work requests have completed, so the program may change the memory. The bytes that are still to be sent must not change.
    memory.write(0, &[0xee; 3000]);
    let statuses: Vec<_> = a.done().iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(statuses, [(0, WcStatus::Success), (1, WcStatus::Flushed)]);
    let mut b = TestQueuePair::new(Role::Responder, agreement(true, None), 1448);
    let sink = Memory::new(8192).unwrap();
    b.recv(0, SgeList::one(sink.sge(0, 4096)));
    b.recv(1, SgeList::one(sink.sge(4096, 4096)));
    b.deliver(&taken).unwrap();
    let Err(Fault::Terminated(Some(what))) = b.deliver(&rest) else { panic!("no Terminate") };
    assert_eq!(what.cause, TerminateCause::LLP_CRC);
    assert_eq!(sink.read(0, 3000), pattern(3000, 0));
    // Work requests that are posted after the end of the stream are flushed.
    a.send(7, SgeList::default(), SendFlags::empty());
    a.recv(8, SgeList::default());
    assert!(a.done().iter().all(|wc| wc.status == WcStatus::Flushed));
}

#[test]
fn reads_of_nothing_are_answered_and_bounded() {
    let mut a = TestQueuePair::new(Role::Initiator, agreement(true, Some(ReadyToReceive::Read)), 1448);
    let mut b = TestQueuePair::new(Role::Responder, agreement(true, Some(ReadyToReceive::Read)), 1448);
    a.transmit(usize::MAX);
    b.deliver(&a.wire).unwrap();
    b.qp.tx.release();
    b.transmit(usize::MAX);
    assert_eq!(b.wire.len(), 20);
    a.deliver(&b.wire).unwrap();
    assert!(!a.qp.has_outstanding());
    assert!(matches!(a.deliver(&b.wire), Err(Fault::Violation(..))));
}

#[test]
fn queues_are_full_until_their_completions_are_polled() {
    let mut a = TestQueuePair::new(Role::Initiator, agreement(true, None), 1448);
    for wr_id in 0..64 {
        a.send(wr_id, SgeList::default(), SendFlags::SIGNALED);
    }
    a.transmit(usize::MAX);
    let wr = SendWr { wr_id: 64, op: SendOp::Send, sges: SgeList::default(), flags: SendFlags::empty() };
    let full = a.qp.post_send(&[wr], &mut a.resources).unwrap_err();
    assert!(matches!(full.error, TransportError::QueueFull { depth: 64, .. }));
    assert_eq!(a.done().len(), 64);
    a.qp.post_send(&[wr], &mut a.resources).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..Default::default() })]

    #[test]
    fn any_split_is_the_same(
        sizes in prop::collection::vec(prop::sample::select(&SIZES[..13]), 1..12),
        crc: bool, emss in 128usize..65536, parts in 1usize..=4, window in 200usize..100_000,
        cuts in prop::collection::vec(prop_oneof![1usize..40, 1000usize..20_000], 1..40),
    ) {
        let wire = stream(&sizes, crc, emss, parts, window);
        let mut cut = cuts.iter().cycle();
        receive(&wire, &sizes, crc, 5 - parts, |_| *cut.next().unwrap());
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(
        crc: bool, chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..200), 1..20),
    ) {
        let mut end = TestQueuePair::new(Role::Responder, agreement(crc, None), 1448);
        let memory = Memory::new(4096).unwrap();
        end.recv(0, SgeList::one(memory.sge(0, 4096)));
        let _ = chunks.iter().try_for_each(|chunk| end.deliver(chunk));
    }

    /// A valid stream in which a few bytes are changed reaches more code than random bytes do.
    #[test]
    fn mutated_streams_do_no_harm(
        crc in Just(false), edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        step in 1usize..5000,
    ) {
        let mut wire = stream(&[0, 5, 300, 5000, 64], crc, 1448, 1, usize::MAX);
        for (at, byte) in &edits {
            let at = at.index(wire.len());
            wire[at] = *byte;
        }
        let mut end = TestQueuePair::new(Role::Responder, agreement(crc, None), 1448);
        let memory = Memory::new(4096).unwrap();
        for wr_id in 0..5 {
            end.recv(wr_id, SgeList::one(memory.sge(0, 4096)));
        }
        let _ = wire.chunks(step).try_for_each(|chunk| end.deliver(chunk));
    }
}
