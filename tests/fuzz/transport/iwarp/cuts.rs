//! The fuzz target of streams of FPDUs: a stream must have the same result however TCP cuts it into reads.

use std::sync::Arc;

use super::super::fault::Fault;
use super::super::queue_pair::Role;
use super::super::startup::Agreement;
use super::end::{DEPTH, End, repair};
use super::tape::Tape;
use crate::test_memory::TestMemory;
use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, RemoteKey};
use rdma_transport::wc::{WcOpcode, WcStatus};
use rdma_transport::wr::{RecvWr, SgeList};

/// The length of each posted receive, in bytes.
const RECEIVE: usize = 8192;
/// The region that the peer may use: its STag, its first Tagged Offset and its length.
const REGION: (u32, u64, usize) = (0x100, 0x1000, 8192);
/// The number of posted receives.
const RECEIVES: usize = 4;

/// The fields of a completion that are compared between two deliveries of a stream.
type Said = (u64, WcStatus, WcOpcode, u32, Option<u32>, Option<RemoteKey>);

/// The result of a stream that was delivered to a queue pair.
#[derive(Debug, PartialEq)]
struct Outcome {
    fault: Option<Fault>,
    completions: Vec<Said>,
    messages: Vec<Vec<u8>>,
    region: Vec<u8>,
    answers: Vec<u8>,
    at_boundary: bool,
}

/// Delivers a stream to a new queue pair, in pieces whose lengths `next` chooses. Returns the result. `choice` is a set of flags: use CRCs
/// (1), use a shared receive queue (4), use the extensions (8).
fn take(stream: &[u8], choice: u8, mut next: impl FnMut() -> usize) -> Outcome {
    let agreement = Agreement { crc: choice & 1 != 0, ird: 4, ord: 4, rtr: None, markers: false };
    let mut end = End::new(Role::Responder, &agreement, 1448, choice & 4 != 0, choice & 8 != 0);
    let region = Arc::new(Memory::new(REGION.2).expect("memory"));
    end.resources.keys.register_at(&region, REGION.1, REGION.2, Access::REMOTE, REGION.0);
    let inbox = Memory::new(RECEIVES * RECEIVE).expect("memory");
    for wr_id in 0..RECEIVES.min(DEPTH as usize) {
        // The scatter list of each receive has two entries. The first one promises that nobody else accesses its memory while the receive
        // is posted. The second one does not promise this.
        let (start, half) = (wr_id * RECEIVE, RECEIVE / 2);
        let mut sges = SgeList::one(inbox.sge(start, half));
        sges.push(inbox.shared_sge(start + half, half)).expect("room for two");
        let wr = RecvWr { wr_id: wr_id as u64, sges };
        match end.srq {
            Some(srq) => end.resources.srq(srq).and_then(|queue| queue.post(wr)).expect("room"),
            None => end.qp.post_recv(&[wr], &mut end.resources.cqs).expect("room"),
        }
    }
    let (mut rest, mut fault) = (stream, None);
    while !rest.is_empty() && fault.is_none() {
        let (now, later) = rest.split_at(next().clamp(1, rest.len()));
        fault = end.deliver(now).err();
        rest = later;
    }
    let at_boundary = fault.is_some() || end.qp.is_at_boundary();
    if fault.is_none() {
        fault = end.transmit(usize::MAX).err();
    }
    let completions = end.poll(usize::MAX);
    let messages = completions.iter().filter(|wc| wc.status == WcStatus::Success).map(|wc| {
        assert!(wc.byte_len as usize <= RECEIVE);
        inbox.read(wc.wr_id as usize * RECEIVE, wc.byte_len as usize)
    });
    let messages = messages.collect();
    let completions = completions
        .iter()
        .map(|wc| (wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.immediate, wc.invalidated))
        .collect();
    let answers = std::mem::take(&mut end.wire);
    Outcome { fault, completions, messages, region: region.read(0, REGION.2), answers, at_boundary }
}

/// Delivers a stream as a whole, then in pieces, and, if it is short, byte by byte. The first two bytes of the tape choose the options and
/// the lengths of the pieces. One option corrects the CRCs of the stream first. Without it, nearly every input of a fuzzer would end at its
/// first CRC.
///
/// # Panics
/// Panics if the result depends on the pieces.
pub fn cuts(tape: &[u8]) {
    let mut tape = Tape::new(tape);
    let (choice, mut seed) = (tape.byte(), u32::from(tape.byte()) | 1 << 8);
    let mut stream = tape.rest().to_vec();
    if choice & 2 != 0 {
        repair(&mut stream);
    }
    let whole = take(&stream, choice, || usize::MAX);
    let pieces = take(&stream, choice, || {
        seed = seed.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
        let len = (seed >> 16) as usize;
        if len & 0x300 == 0 { len % 6000 } else { 1 + len % 50 }
    });
    assert_eq!(whole, pieces);
    if stream.len() < 200 {
        assert_eq!(whole, take(&stream, choice, || 1));
    }
}
