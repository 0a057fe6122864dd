//! Cases: operations on the memory of the peer, and their order.

use super::world::*;
use crate::error::Error;
use crate::mr::Access;
use crate::wc::{WcOpcode, WcStatus};
use crate::wr::{RemoteAddress, SendFlags, SendOp};

const BOTH: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// A pattern that tells its places, and one seed from another.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at ^ (seed * 41)) as u32).wrapping_mul(0x9E37_79B1).to_be_bytes()[0]).collect()
}

/// A Read sees the Write before it, and both leave what is beside it alone.
pub(super) fn writes_and_reads_have_any_length(world: &mut World) {
    const MOST: usize = 64 << 10;
    let [active, passive] = world.pair();
    let target = world.side(passive.side).room(MOST + 64);
    let (_, remote) = world.side(PASSIVE).expose(&target, BOTH);
    let (source, sink) = (world.side(ACTIVE).room(MOST), world.side(ACTIVE).room(MOST));
    for (seed, len) in [1, 8, 1000, 4096, MOST].into_iter().enumerate() {
        let bytes = pattern(len, seed);
        world.side(ACTIVE).station.write(source.start, &bytes).expect("memory");
        let write = world.post(&active, SendOp::Write(remote), &(source.start..source.start + len));
        let read = world.post(&active, SendOp::Read(remote), &(sink.start..sink.start + len));
        world.success(&active, write);
        let wc = world.success(&active, read);
        assert_eq!(wc.opcode, WcOpcode::Read);
        assert!(world.side(ACTIVE).bytes(&(sink.start..sink.start + len)) == bytes, "{len} bytes read");
        assert!(world.side(PASSIVE).bytes(&(target.start..target.start + len)) == bytes, "{len} bytes written");
        let beyond = world.side(PASSIVE).bytes(&(target.start + len..target.end));
        assert!(beyond.iter().all(|&byte| byte == 0), "bytes behind the {len} that were written");
    }
}

/// The ledger checks the order: sends and Writes among themselves, and Reads behind those before them.
pub(super) fn a_send_queue_completes_in_order(world: &mut World) {
    let [active, passive] = world.pair();
    let target = world.side(PASSIVE).place(&pattern(4096, 1));
    let (_, remote) = world.side(PASSIVE).expose(&target, BOTH);
    let sink = world.side(ACTIVE).room(4096);
    let part = world.side(ACTIVE).place(b"in order");
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
        let (numbers, result) = world.post_sends(&active, &chain);
        result.expect("a chain");
        for at in [0, 1, 2, 3, 5] {
            world.success(&active, numbers[at]);
        }
        for _ in 0..2 {
            world.expect(&passive, b"in order");
        }
    }
    assert!(world.side(ACTIVE).bytes(&(sink.start..sink.start + 2048)) == pattern(2048, 1));
}

/// A fenced send carries what the Read before it has brought.
pub(super) fn a_fenced_send_waits_for_reads(world: &mut World) {
    const LEN: usize = 64 << 10;
    let [active, passive] = world.pair();
    let target = world.side(PASSIVE).room(LEN);
    let (_, remote) = world.side(PASSIVE).expose(&target, Access::REMOTE_READ);
    let sink = world.side(ACTIVE).room(LEN);
    for round in 0..4 {
        let bytes = pattern(LEN, round);
        world.side(PASSIVE).station.write(target.start, &bytes).expect("memory");
        let fenced = SendFlags::SIGNALED | SendFlags::FENCE;
        let chain = [
            (SendOp::Read(remote), sink.clone(), SendFlags::SIGNALED),
            (SendOp::Send, sink.end - 64..sink.end, fenced),
        ];
        let (numbers, result) = world.post_sends(&active, &chain);
        result.expect("a chain");
        world.expect(&passive, &bytes[LEN - 64..]);
        world.success(&active, numbers[0]);
        world.success(&active, numbers[1]);
    }
}

/// The receive says the length of the write, and is not written.
pub(super) fn immediate_data_follows_its_write(world: &mut World) {
    let pair = world.pair();
    world.extend(&pair);
    let [active, passive] = pair;
    let target = world.side(PASSIVE).room(1024);
    let (_, remote) = world.side(PASSIVE).expose(&target, Access::REMOTE_WRITE);
    for (round, len) in [0, 5, 1000].into_iter().enumerate() {
        let bytes = pattern(len, round);
        let part = world.side(ACTIVE).place(&bytes);
        let wr_id = world.post(&active, SendOp::WriteWithImmediate(remote, 77), &part);
        let (wc, _, places) = world.received(&passive);
        let got = (wc.status, wc.opcode, wc.immediate, wc.byte_len as usize);
        assert_eq!(got, (WcStatus::Success, WcOpcode::RecvWriteWithImmediate, Some(77), len));
        assert!(world.side(PASSIVE).bytes(&(target.start..target.start + len)) == bytes);
        assert_eq!(world.side(PASSIVE).bytes(&places[0]), [0; SLOT]);
        world.success(&active, wr_id);
    }
}

pub(super) fn atomics_return_the_old_value(world: &mut World) {
    let pair = world.pair();
    world.extend(&pair);
    let active = pair[0];
    let target = world.side(PASSIVE).room(64);
    let (_, remote) = world.side(PASSIVE).expose(&target, Access::REMOTE_ATOMIC);
    let old_value = world.side(ACTIVE).room(8);
    let word = |bytes: Vec<u8>| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    for (op, old, new) in [
        (SendOp::FetchAdd { remote, add: 7 }, 0, 7),
        (SendOp::FetchAdd { remote, add: u64::MAX }, 7, 6),
        (SendOp::CompareSwap { remote, expected: 1, swap: 9 }, 6, 6),
        (SendOp::CompareSwap { remote, expected: 6, swap: 1 << 63 }, 6, 1 << 63),
    ] {
        world.good(&active, op, &old_value);
        let got = word(world.side(ACTIVE).bytes(&old_value));
        let there = word(world.side(PASSIVE).bytes(&(target.start..target.start + 8)));
        assert_eq!((got, there), (old, new), "{op:?}");
    }
    assert_eq!(world.side(PASSIVE).bytes(&(target.start + 8..target.end)), [0; 56]);
}

/// Where both programs have to agree on the extensions, none is taken before they have.
pub(super) fn extensions_need_an_agreement(world: &mut World) {
    let pair = world.pair();
    let active = pair[0];
    let target = world.side(PASSIVE).room(64);
    let (_, remote) = world.side(PASSIVE).expose(&target, Access::REMOTE_WRITE);
    let part = world.side(ACTIVE).place(b"early");
    let chain = [(SendOp::WriteWithImmediate(remote, 1), part.clone(), SendFlags::SIGNALED)];
    let (_, result) = world.post_sends(&active, &chain);
    assert!(result.is_err_and(|error| error.posted == 0 && matches!(error.error, Error::Unsupported { .. })));
    world.extend(&pair);
    world.good(&active, chain[0].0, &part);
}
