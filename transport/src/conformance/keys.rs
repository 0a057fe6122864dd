//! Cases: the rights of a remote key, and its invalidation.

use super::harness::*;
use crate::error::TransportError;
use crate::mr::{Access, MemoryRegion, RemoteKey};
use crate::wr::{RemoteAddress, SendOp};

const BOTH: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const LEN: usize = 4096;

pub(super) fn a_write_without_the_right_is_refused(harness: &mut Harness) {
    let (pair, target, _, remote) = exposed(harness, Access::REMOTE_READ);
    refuse(harness, &pair, &target, SendOp::Write(remote));
}

pub(super) fn a_read_without_the_right_is_refused(harness: &mut Harness) {
    let (pair, target, _, remote) = exposed(harness, Access::REMOTE_WRITE);
    refuse(harness, &pair, &target, SendOp::Read(remote));
}

pub(super) fn a_key_that_never_was_is_refused(harness: &mut Harness) {
    for op in [SendOp::Write, SendOp::Read] {
        let (pair, target, _, remote) = exposed(harness, BOTH);
        let wrong = RemoteAddress { key: RemoteKey(remote.key.0 ^ 0x5500), ..remote };
        refuse(harness, &pair, &target, op(wrong));
    }
}

/// With the key of a region, a peer can access only the region, and not the memory around the region.
pub(super) fn a_range_is_all_that_a_peer_reaches(harness: &mut Harness) {
    for (offset, allowed) in [(1000, true), (1936, true), (999, false), (1937, false)] {
        let pair = harness.pair();
        let target = harness.side(PASSIVE).allocate(LEN);
        let (_, remote) = harness.side(PASSIVE).expose(&(target.start + 1000..target.start + 2000), BOTH);
        let at = RemoteAddress { address: remote.address - 1000 + offset as u64, ..remote };
        if allowed {
            write(harness, &pair[0], at, 5);
            let there = target.start + offset..target.start + offset + 64;
            assert_eq!(harness.side(PASSIVE).bytes(&there), [5; 64]);
        } else {
            refuse(harness, &pair, &target, SendOp::Write(at));
        }
    }
}

pub(super) fn a_deregistered_key_never_works_again(harness: &mut Harness) {
    for op in [SendOp::Write, SendOp::Read] {
        let (pair, target, region, remote) = exposed(harness, BOTH);
        write(harness, &pair[0], remote, 1);
        harness.provider(PASSIVE).deregister(region.id).expect("a deregister");
        // Registering the same memory again does not make the old key valid again.
        let (other, _) = harness.side(PASSIVE).expose(&target, BOTH);
        assert_ne!(other.remote_key, region.remote_key);
        refuse(harness, &pair, &target, op(remote));
    }
}

/// After `invalidate` has returned, the peer cannot use the key any more. The region stays registered for work requests
/// of its owner.
pub(super) fn an_invalidated_key_never_works_again(harness: &mut Harness) {
    for op in [SendOp::Write, SendOp::Read] {
        let (pair, target, region, remote) = exposed(harness, BOTH);
        write(harness, &pair[0], remote, 2);
        for _ in 0..2 {
            invalidate(harness, region).expect("an invalidate");
        }
        own_use(harness, &pair, region, &target);
        refuse(harness, &pair, &target, op(remote));
        harness.provider(PASSIVE).deregister(region.id).expect("a deregister");
        assert!(matches!(invalidate(harness, region), Err(TransportError::Stale { .. })));
    }
}

fn invalidate(harness: &mut Harness, region: MemoryRegion) -> crate::error::Result<()> {
    harness.provider(PASSIVE).remote_keys().expect("the role").invalidate(region.id)
}

/// Sends from the memory of a region and receives into it, with the region's local key.
fn own_use(harness: &mut Harness, pair: &[ConnectionEnd; 2], region: MemoryRegion, target: &std::ops::Range<usize>) {
    let [active, passive] = pair;
    let kept = harness.side(PASSIVE).use_key(region);
    let wr_id = harness.post(passive, SendOp::Send, &(target.start..target.start + 64));
    let bytes = harness.side(PASSIVE).bytes(&(target.start..target.start + 64));
    harness.expect_message(active, &bytes);
    harness.success(passive, wr_id);
    // Messages fill the receives in the order of their posts. So first fill the `DEPTH` receives that were posted
    // earlier.
    for _ in 0..DEPTH {
        let part = harness.side(ACTIVE).allocate_with(b"first");
        harness.post_and_wait(active, SendOp::Send, &part);
        harness.received(passive);
    }
    harness.post_recv(passive, &[target.start + 128..target.end]);
    harness.message(active, passive, b"into the region");
    harness.side(PASSIVE).station.use_key(kept);
}

/// If the device can restrict a key to one peer, the peer of another connection cannot use the key. If the device
/// cannot do this, both peers can still use the key.
pub(super) fn a_restricted_key_is_good_for_one_peer(harness: &mut Harness) {
    let (first, target, region, remote) = exposed(harness, BOTH);
    let second = harness.pair();
    let keys = harness.provider(PASSIVE).remote_keys().expect("the role");
    let restricted = keys.restrict(region.id, first[1].qp).expect("an answer");
    write(harness, &first[0], remote, 4);
    if restricted {
        refuse(harness, &second, &target, SendOp::Write(remote));
    } else {
        write(harness, &second[0], remote, 5);
    }
    write(harness, &first[0], remote, 6);
}

pub(super) fn a_send_with_invalidate_takes_the_key_back(harness: &mut Harness) {
    let (pair, target, region, remote) = exposed(harness, BOTH);
    let [active, passive] = pair;
    let part = harness.side(ACTIVE).allocate_with(b"take it back");
    let wr_id = harness.post(&active, SendOp::SendInvalidate(remote.key), &part);
    let wc = harness.expect_message(&passive, b"take it back");
    assert!(wc.invalidated.is_none_or(|key| key == remote.key), "{wc:?}");
    harness.success(&active, wr_id);
    own_use(harness, &pair, region, &target);
    refuse(harness, &pair, &target, SendOp::Write(remote));
}

/// After `invalidate` has returned, no byte of the region changes, although the peer writes to it continuously.
pub(super) fn nothing_is_written_after_an_invalidate(harness: &mut Harness) {
    let (pair, target, region, remote) = exposed(harness, BOTH);
    let part = harness.side(ACTIVE).allocate_with(&[6; LEN]);
    let numbers: Vec<u64> = (0..DEPTH).map(|_| harness.post(&pair[0], SendOp::Write(remote), &part)).collect();
    harness.wait_for("first of the writes", |harness| harness.take_completion(&pair[0], numbers[0]));
    invalidate(harness, region).expect("an invalidate");
    harness.side(PASSIVE).station.write(target.start, &[0; LEN]).expect("memory");
    harness.settle();
    assert_eq!(harness.side(PASSIVE).bytes(&target), [0; LEN]);
}

pub(super) fn a_region_lies_within_its_memory(harness: &mut Harness) {
    let len = 4096;
    let memory = std::sync::Arc::new(crate::mem::Memory::new(len).expect("memory"));
    let device = harness.side(ACTIVE).device;
    let mut register = |range| harness.provider(ACTIVE).register(device, &memory, range, Access::empty());
    for wrong in [0..memory.len() + 1, memory.len() + 1..memory.len() + 2] {
        let refused = register(wrong);
        assert!(matches!(refused, Err(TransportError::OutOfRange { .. })), "{refused:?}");
    }
    let region = register(0..memory.len()).expect("a region");
    // A region keeps its memory alive until the region is deregistered.
    assert!(std::sync::Arc::strong_count(&memory) > 1);
    harness.provider(ACTIVE).deregister(region.id).expect("a deregister");
    assert_eq!(std::sync::Arc::strong_count(&memory), 1, "the share of the region is released");
}

/// Establishes a connection, and registers a region of the passive side. Returns both ends, the
/// part of the memory, the region, and the address by which the peer names the region.
fn exposed(
    harness: &mut Harness,
    access: Access,
) -> ([ConnectionEnd; 2], std::ops::Range<usize>, MemoryRegion, RemoteAddress) {
    let pair = harness.pair();
    let target = harness.side(PASSIVE).allocate(LEN);
    let (region, remote) = harness.side(PASSIVE).expose(&target, access);
    (pair, target, region, remote)
}

/// Writes to the peer's memory, and reads the bytes back. Afterwards no write is in flight.
fn write(harness: &mut Harness, end: &ConnectionEnd, remote: RemoteAddress, byte: u8) {
    let part = harness.side(ACTIVE).allocate_with(&[byte; 64]);
    harness.post_and_wait(end, SendOp::Write(remote), &part);
    let sink = harness.side(ACTIVE).allocate(64);
    harness.post_and_wait(end, SendOp::Read(remote), &sink);
    assert_eq!(harness.side(ACTIVE).bytes(&sink), [byte; 64]);
}

/// Posts an operation that the peer must refuse. Checks that neither the peer's memory nor the
/// local memory changes.
fn refuse(harness: &mut Harness, pair: &[ConnectionEnd; 2], target: &std::ops::Range<usize>, op: SendOp) {
    let before = harness.side(PASSIVE).bytes(target);
    let local = harness.side(ACTIVE).allocate_with(&[3; 64]);
    harness.refused(&pair[0], op, &local);
    harness.settle();
    assert!(harness.side(PASSIVE).bytes(target) == before, "{op:?}: the target has changed");
    assert_eq!(harness.side(ACTIVE).bytes(&local), [3; 64], "{op:?}: the sink has changed");
}
