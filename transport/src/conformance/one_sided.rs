//! Cases: operations on the peer's memory, and their order.

use super::harness::*;
use crate::error::TransportError;
use crate::mr::Access;
use crate::wc::{WcOpcode, WcStatus};
use crate::wr::{RemoteAddress, SendFlags, SendOp};

const BOTH: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// A Read returns the bytes of an earlier Write. Neither operation changes memory outside its range.
pub(super) fn writes_and_reads_have_any_length(harness: &mut Harness) {
    const MOST: usize = 64 << 10;
    let [active, passive] = harness.pair();
    let target = harness.side(passive.side).allocate(MOST + 64);
    let (_, remote) = harness.side(PASSIVE).expose(&target, BOTH);
    let (source, sink) = (harness.side(ACTIVE).allocate(MOST), harness.side(ACTIVE).allocate(MOST));
    for (seed, len) in [1, 8, 1000, 4096, MOST].into_iter().enumerate() {
        let bytes = pattern(len, seed);
        harness.side(ACTIVE).station.write(source.start, &bytes).expect("memory");
        let write = harness.post(&active, SendOp::Write(remote), &(source.start..source.start + len));
        let read = harness.post(&active, SendOp::Read(remote), &(sink.start..sink.start + len));
        harness.success(&active, write);
        let wc = harness.success(&active, read);
        assert_eq!(wc.opcode, WcOpcode::Read);
        assert!(harness.side(ACTIVE).bytes(&(sink.start..sink.start + len)) == bytes, "{len} bytes read");
        assert!(harness.side(PASSIVE).bytes(&(target.start..target.start + len)) == bytes, "{len} bytes written");
        let beyond = harness.side(PASSIVE).bytes(&(target.start + len..target.end));
        assert!(beyond.iter().all(|&byte| byte == 0), "bytes behind the {len} that were written");
    }
}

/// Sends and Writes complete in the order of their posts. A Read completes after the earlier sends and Writes. The
/// ledger checks the order.
pub(super) fn a_send_queue_completes_in_order(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    let target = harness.side(PASSIVE).allocate_with(&pattern(4096, 1));
    let (_, remote) = harness.side(PASSIVE).expose(&target, BOTH);
    let sink = harness.side(ACTIVE).allocate(4096);
    let part = harness.side(ACTIVE).allocate_with(b"in order");
    let behind = RemoteAddress { address: remote.address + 2048, ..remote };
    for _ in 0..8 {
        let chain = [
            (SendOp::Read(remote), sink.start..sink.start + 2048, SendFlags::SIGNALED),
            (SendOp::Write(behind), part.clone(), SendFlags::SIGNALED),
            (SendOp::Send, part.clone(), SendFlags::SIGNALED),
            (SendOp::Read(remote), sink.start + 2048..sink.end, SendFlags::SIGNALED),
            (SendOp::Send, part.clone(), SendFlags::empty()),
            (SendOp::Write(behind), part.clone(), SendFlags::SIGNALED),
        ];
        let (numbers, result) = harness.post_sends(&active, &chain);
        result.expect("a chain");
        for at in [0, 1, 2, 3, 5] {
            harness.success(&active, numbers[at]);
        }
        for _ in 0..2 {
            harness.expect_message(&passive, b"in order");
        }
    }
    assert!(harness.side(ACTIVE).bytes(&(sink.start..sink.start + 2048)) == pattern(2048, 1));
}

/// A fenced send carries the bytes that an earlier Read has fetched.
pub(super) fn a_fenced_send_waits_for_reads(harness: &mut Harness) {
    const LEN: usize = 64 << 10;
    let [active, passive] = harness.pair();
    let target = harness.side(PASSIVE).allocate(LEN);
    let (_, remote) = harness.side(PASSIVE).expose(&target, Access::REMOTE_READ);
    let sink = harness.side(ACTIVE).allocate(LEN);
    for round in 0..4 {
        let bytes = pattern(LEN, round);
        harness.side(PASSIVE).station.write(target.start, &bytes).expect("memory");
        let fenced = SendFlags::SIGNALED | SendFlags::FENCE;
        let chain = [
            (SendOp::Read(remote), sink.clone(), SendFlags::SIGNALED),
            (SendOp::Send, sink.end - 64..sink.end, fenced),
        ];
        let (numbers, result) = harness.post_sends(&active, &chain);
        result.expect("a chain");
        harness.expect_message(&passive, &bytes[LEN - 64..]);
        harness.success(&active, numbers[0]);
        harness.success(&active, numbers[1]);
    }
}

/// A Write with Immediate consumes a receive of the peer. The completion of this receive has the length of the Write,
/// and the memory of the receive is not written.
pub(super) fn immediate_data_follows_its_write(harness: &mut Harness) {
    let pair = harness.pair();
    harness.enable_extensions(&pair);
    let [active, passive] = pair;
    let target = harness.side(PASSIVE).allocate(1024);
    let (_, remote) = harness.side(PASSIVE).expose(&target, Access::REMOTE_WRITE);
    for (round, len) in [0, 5, 1000].into_iter().enumerate() {
        let bytes = pattern(len, round);
        let part = harness.side(ACTIVE).allocate_with(&bytes);
        let wr_id = harness.post(&active, SendOp::WriteWithImmediate(remote, 77), &part);
        let (wc, _, ranges) = harness.received(&passive);
        let got = (wc.status, wc.opcode, wc.immediate, wc.byte_len as usize);
        assert_eq!(got, (WcStatus::Success, WcOpcode::RecvWriteWithImmediate, Some(77), len));
        assert!(harness.side(PASSIVE).bytes(&(target.start..target.start + len)) == bytes);
        assert_eq!(harness.side(PASSIVE).bytes(&ranges[0]), [0; SLOT]);
        harness.success(&active, wr_id);
    }
}

pub(super) fn atomics_return_the_old_value(harness: &mut Harness) {
    let pair = harness.pair();
    harness.enable_extensions(&pair);
    let active = pair[0];
    let target = harness.side(PASSIVE).allocate(64);
    let (_, remote) = harness.side(PASSIVE).expose(&target, Access::REMOTE_ATOMIC);
    let old_value = harness.side(ACTIVE).allocate(8);
    let word = |bytes: Vec<u8>| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    for (op, old, new) in [
        (SendOp::FetchAdd { remote, add: 7 }, 0, 7),
        (SendOp::FetchAdd { remote, add: u64::MAX }, 7, 6),
        (SendOp::CompareSwap { remote, expected: 1, swap: 9 }, 6, 6),
        (SendOp::CompareSwap { remote, expected: 6, swap: 1 << 63 }, 6, 1 << 63),
    ] {
        harness.post_and_wait(&active, op, &old_value);
        let got = word(harness.side(ACTIVE).bytes(&old_value));
        let there = word(harness.side(PASSIVE).bytes(&(target.start..target.start + 8)));
        assert_eq!((got, there), (old, new), "{op:?}");
    }
    assert_eq!(harness.side(PASSIVE).bytes(&(target.start + 8..target.end)), [0; 56]);
}

/// If a provider has the role `Extensions`, it refuses an operation of the extensions before the program has enabled
/// them. After both sides have enabled them, the operation succeeds.
pub(super) fn extensions_need_an_agreement(harness: &mut Harness) {
    let pair = harness.pair();
    let active = pair[0];
    let target = harness.side(PASSIVE).allocate(64);
    let (_, remote) = harness.side(PASSIVE).expose(&target, Access::REMOTE_WRITE);
    let part = harness.side(ACTIVE).allocate_with(b"early");
    let chain = [(SendOp::WriteWithImmediate(remote, 1), part.clone(), SendFlags::SIGNALED)];
    let (_, result) = harness.post_sends(&active, &chain);
    assert!(result.is_err_and(|error| error.posted == 0 && matches!(error.error, TransportError::Unsupported { .. })));
    harness.enable_extensions(&pair);
    harness.post_and_wait(&active, chain[0].0, &part);
}

/// Returns test data: bytes that depend on their position and on `seed`.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at ^ (seed * 41)) as u32).wrapping_mul(0x9E37_79B1).to_be_bytes()[0]).collect()
}
