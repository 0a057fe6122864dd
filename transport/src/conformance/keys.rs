//! Cases: what a peer may do with a remote key, and how it is taken back.

use super::world::*;
use crate::error::Error;
use crate::mr::{Access, MemoryRegion, RemoteKey};
use crate::wr::{RemoteAddress, SendOp};

const BOTH: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const LEN: usize = 4096;

/// A connection, and a region of the passive side.
fn exposed(world: &mut World, access: Access) -> ([End; 2], std::ops::Range<usize>, MemoryRegion, RemoteAddress) {
    let pair = world.pair();
    let target = world.side(PASSIVE).room(LEN);
    let (region, remote) = world.side(PASSIVE).expose(&target, access);
    (pair, target, region, remote)
}

/// Writes, and reads what is there, so that nothing is on its way afterwards.
fn write(world: &mut World, end: &End, remote: RemoteAddress, byte: u8) {
    let part = world.side(ACTIVE).place(&[byte; 64]);
    world.good(end, SendOp::Write(remote), &part);
    let sink = world.side(ACTIVE).room(64);
    world.good(end, SendOp::Read(remote), &sink);
    assert_eq!(world.side(ACTIVE).bytes(&sink), [byte; 64]);
}

/// Tries what must be refused. Neither the target nor the sink changes.
fn refuse(world: &mut World, pair: &[End; 2], target: &std::ops::Range<usize>, op: SendOp) {
    let before = world.side(PASSIVE).bytes(target);
    let local = world.side(ACTIVE).place(&[3; 64]);
    world.refused(&pair[0], op, &local);
    world.settle();
    assert!(world.side(PASSIVE).bytes(target) == before, "{op:?}: the target has changed");
    assert_eq!(world.side(ACTIVE).bytes(&local), [3; 64], "{op:?}: the sink has changed");
}

pub(super) fn a_write_without_the_right_is_refused(world: &mut World) {
    let (pair, target, _, remote) = exposed(world, Access::REMOTE_READ);
    refuse(world, &pair, &target, SendOp::Write(remote));
}

pub(super) fn a_read_without_the_right_is_refused(world: &mut World) {
    let (pair, target, _, remote) = exposed(world, Access::REMOTE_WRITE);
    refuse(world, &pair, &target, SendOp::Read(remote));
}

pub(super) fn a_key_that_never_was_is_refused(world: &mut World) {
    for op in [SendOp::Write, SendOp::Read] {
        let (pair, target, _, remote) = exposed(world, BOTH);
        let wrong = RemoteAddress { key: RemoteKey(remote.key.0 ^ 0x5500), ..remote };
        refuse(world, &pair, &target, op(wrong));
    }
}

/// Memory beside a region cannot be reached by its key.
pub(super) fn a_range_is_all_that_a_peer_reaches(world: &mut World) {
    for (offset, allowed) in [(1000, true), (1936, true), (999, false), (1937, false)] {
        let pair = world.pair();
        let target = world.side(PASSIVE).room(LEN);
        let (_, remote) = world.side(PASSIVE).expose(&(target.start + 1000..target.start + 2000), BOTH);
        let at = RemoteAddress { address: remote.address - 1000 + offset as u64, ..remote };
        if allowed {
            write(world, &pair[0], at, 5);
            let there = target.start + offset..target.start + offset + 64;
            assert_eq!(world.side(PASSIVE).bytes(&there), [5; 64]);
        } else {
            refuse(world, &pair, &target, SendOp::Write(at));
        }
    }
}

pub(super) fn a_deregistered_key_never_works_again(world: &mut World) {
    for op in [SendOp::Write, SendOp::Read] {
        let (pair, target, region, remote) = exposed(world, BOTH);
        write(world, &pair[0], remote, 1);
        world.provider(PASSIVE).deregister(region.id).expect("a deregister");
        // Another region of the same memory does not bring the key back.
        let (other, _) = world.side(PASSIVE).expose(&target, BOTH);
        assert_ne!(other.remote_key, region.remote_key);
        refuse(world, &pair, &target, op(remote));
    }
}

/// The key is gone for the peer at once; for this side's own work requests the region stays registered.
pub(super) fn an_invalidated_key_never_works_again(world: &mut World) {
    for op in [SendOp::Write, SendOp::Read] {
        let (pair, target, region, remote) = exposed(world, BOTH);
        write(world, &pair[0], remote, 2);
        for _ in 0..2 {
            invalidate(world, region).expect("an invalidate");
        }
        own_use(world, &pair, region, &target);
        refuse(world, &pair, &target, op(remote));
        world.provider(PASSIVE).deregister(region.id).expect("a deregister");
        assert!(matches!(invalidate(world, region), Err(Error::Stale { .. })));
    }
}

fn invalidate(world: &mut World, region: MemoryRegion) -> crate::error::Result<()> {
    world.provider(PASSIVE).remote_keys().expect("the role").invalidate(region.id)
}

/// Sends from a region, and receives into it, under its local key.
fn own_use(world: &mut World, pair: &[End; 2], region: MemoryRegion, target: &std::ops::Range<usize>) {
    let [active, passive] = pair;
    let kept = world.side(PASSIVE).use_key(region);
    let wr_id = world.post(passive, SendOp::Send, &(target.start..target.start + 64));
    let bytes = world.side(PASSIVE).bytes(&(target.start..target.start + 64));
    world.expect(active, &bytes);
    world.success(passive, wr_id);
    // The receives that were posted before come first.
    for _ in 0..DEPTH {
        let part = world.side(ACTIVE).place(b"first");
        world.good(active, SendOp::Send, &part);
        world.received(passive);
    }
    world.post_recv(passive, &[target.start + 128..target.end]);
    world.message(active, passive, b"into the region");
    world.side(PASSIVE).station.use_key(kept);
}

/// Only the peer of one connection may use the key, where the device tells peers apart; elsewhere nothing changes.
pub(super) fn a_restricted_key_is_good_for_one_peer(world: &mut World) {
    let (first, target, region, remote) = exposed(world, BOTH);
    let second = world.pair();
    let keys = world.provider(PASSIVE).remote_keys().expect("the role");
    let restricted = keys.restrict(region.id, first[1].qp).expect("an answer");
    write(world, &first[0], remote, 4);
    if restricted {
        refuse(world, &second, &target, SendOp::Write(remote));
    } else {
        write(world, &second[0], remote, 5);
    }
    write(world, &first[0], remote, 6);
}

pub(super) fn a_send_with_invalidate_takes_the_key_back(world: &mut World) {
    let (pair, target, region, remote) = exposed(world, BOTH);
    let [active, passive] = pair;
    let part = world.side(ACTIVE).place(b"take it back");
    let wr_id = world.post(&active, SendOp::SendInvalidate(remote.key), &part);
    let wc = world.expect(&passive, b"take it back");
    assert!(wc.invalidated.is_none_or(|key| key == remote.key), "{wc:?}");
    world.success(&active, wr_id);
    own_use(world, &pair, region, &target);
    refuse(world, &pair, &target, SendOp::Write(remote));
}

/// A peer writes without end while the key is taken back: nothing changes once the call has returned.
pub(super) fn nothing_is_written_after_an_invalidate(world: &mut World) {
    let (pair, target, region, remote) = exposed(world, BOTH);
    let part = world.side(ACTIVE).place(&[6; LEN]);
    let numbers: Vec<u64> = (0..DEPTH).map(|_| world.post(&pair[0], SendOp::Write(remote), &part)).collect();
    world.until("first of the writes", |world| world.done(&pair[0], numbers[0]));
    invalidate(world, region).expect("an invalidate");
    world.side(PASSIVE).station.write(target.start, &[0; LEN]).expect("memory");
    world.settle();
    assert_eq!(world.side(PASSIVE).bytes(&target), [0; LEN]);
}

pub(super) fn a_region_lies_within_its_memory(world: &mut World) {
    let len = 4096;
    let memory = std::sync::Arc::new(crate::mem::Memory::new(len).expect("memory"));
    let device = world.side(ACTIVE).device;
    let mut register = |range| world.provider(ACTIVE).register(device, &memory, range, Access::empty());
    for wrong in [0..memory.len() + 1, memory.len() + 1..memory.len() + 2] {
        let refused = register(wrong);
        assert!(matches!(refused, Err(Error::OutOfRange { .. })), "{refused:?}");
    }
    let region = register(0..memory.len()).expect("a region");
    // The region keeps the memory alive until it is deregistered.
    assert!(std::sync::Arc::strong_count(&memory) > 1);
    world.provider(ACTIVE).deregister(region.id).expect("a deregister");
    assert_eq!(std::sync::Arc::strong_count(&memory), 1, "the share of the region is given back");
}
