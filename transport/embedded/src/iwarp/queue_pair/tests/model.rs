//! A test of two queue pairs with random operations and random cuts of their streams. At the end, all memory must have the contents that a
//! model predicts.

use super::operations::{Area, CANARY, Pair};
use super::*;
use crate::test_memory::TestMemory;
use rdma_transport::mr::{Access, RemoteKey};

const LEN: usize = 20_000;
const WORDS: usize = 64;

#[derive(Clone, Debug)]
enum ModelStep {
    Send { len: usize, parts: usize, invalidate: bool },
    Write { to: usize, from: usize, len: usize, immediate: bool },
    Read { from: usize, to: usize, len: usize },
    Add { word: usize, to: usize, add: u64 },
    Swap { word: usize, to: usize, expected: u64, swap: u64 },
}

fn step() -> impl Strategy<Value = (bool, bool, bool, ModelStep)> {
    let len = prop_oneof![Just(0usize), 1usize..40, 1400usize..1500, 4000usize..9000];
    let offset = 0usize..(LEN - 9000);
    let word = 0usize..WORDS;
    let op = prop_oneof![
        (len.clone(), 1usize..=4, any::<bool>()).prop_map(|(len, parts, invalidate)| ModelStep::Send {
            len,
            parts,
            invalidate
        }),
        (offset.clone(), offset.clone(), len.clone(), any::<bool>())
            .prop_map(|(to, from, len, immediate)| ModelStep::Write { to, from, len, immediate }),
        (offset.clone(), offset.clone(), len).prop_map(|(from, to, len)| ModelStep::Read { from, to, len }),
        (word.clone(), offset.clone(), 0u64..9).prop_map(|(word, to, add)| ModelStep::Add { word, to, add }),
        (word, offset, 0u64..9, 0u64..9).prop_map(|(word, to, expected, swap)| ModelStep::Swap {
            word,
            to,
            expected,
            swap
        }),
    ];
    (any::<bool>(), any::<bool>(), any::<bool>(), op)
}

/// The memory of one side, and the contents that the model expects.
struct ModelNode {
    /// The region that the peer reads and writes. Its first words are for atomic operations.
    shared: Area,
    /// The region to which the responses of local Reads and atomic operations are written.
    sink: Area,
    /// The data of local Sends and Writes. This data does not change.
    source: Memory,
    /// The memory of the receives, one behind the other.
    inbox: Memory,
    inbox_used: usize,
    model_shared: Vec<u8>,
    model_sink: Vec<u8>,
    expected_inbox: Vec<u8>,
    posted: Vec<(u64, WcOpcode)>,
    keys: Vec<u32>,
}

impl ModelNode {
    fn new(end: &mut TestQueuePair, seed: u32) -> Self {
        let shared = end.area(LEN, Access::REMOTE, seed + 2);
        let sink = end.area(LEN, Access::LOCAL_WRITE, seed + 3);
        let source = Memory::new(LEN).unwrap();
        source.write(0, &pattern(LEN, seed as usize));
        let inbox = Memory::new(60 * 9000).unwrap();
        let mut keys: Vec<u32> = (0..60).map(|n| end.area(8, Access::REMOTE_WRITE, seed + 100 + n).stag).collect();
        keys.reverse();
        for wr_id in 0..60 {
            end.recv(wr_id, SgeList::one(inbox.sge(wr_id as usize * 9000, 9000)));
        }
        let (model_shared, model_sink) = (vec![0; LEN], vec![0; LEN]);
        let (expected_inbox, posted) = (Vec::new(), Vec::new());
        Self { shared, sink, source, inbox, inbox_used: 0, model_shared, model_sink, expected_inbox, posted, keys }
    }

    fn word(&mut self, word: usize, update: impl Fn(u64) -> u64) -> u64 {
        let at = (CANARY + 8 * word)..(CANARY + 8 * word + 8);
        let old = u64::from_ne_bytes(self.model_shared[at.clone()].try_into().unwrap());
        self.model_shared[at].copy_from_slice(&update(old).to_ne_bytes());
        old
    }
}

/// Posts the work request of one step. `end` is the queue pair that posts it, and `own` is the memory on the same side. Changes the model
/// immediately.
///
/// The model has the same result as the queue pairs, because the operations of one side take effect in order. The order between the two
/// sides does not matter: only the peer changes the shared area of a side.
fn post(
    end: &mut TestQueuePair,
    own: &mut ModelNode,
    peer: &mut ModelNode,
    wr_id: u64,
    flags: SendFlags,
    step: &ModelStep,
) {
    let remote = |offset: usize| peer.shared.remote(offset);
    let (op, sges) = match *step {
        ModelStep::Send { len, parts, invalidate } => {
            let op = match peer.keys.pop().filter(|_| invalidate) {
                Some(key) => SendOp::SendInvalidate(RemoteKey(key)),
                None => SendOp::Send,
            };
            peer.expected_inbox.extend_from_slice(&own.source.read(0, len));
            peer.inbox_used += 1;
            (op, scattered(&own.source, len, parts))
        }
        ModelStep::Write { to, from, len, immediate } => {
            peer.model_shared[to..to + len].copy_from_slice(&own.source.read(from, len));
            if immediate {
                peer.inbox_used += 1;
            }
            let address = remote(to);
            let op = if immediate { SendOp::WriteWithImmediate(address, to as u32) } else { SendOp::Write(address) };
            (op, SgeList::one(own.source.sge(from, len)))
        }
        ModelStep::Read { from, to, len } => {
            own.model_sink[to..to + len].copy_from_slice(&peer.model_shared[from..from + len]);
            (SendOp::Read(remote(from)), own.sink.sge(to, len))
        }
        ModelStep::Add { word, to, add } => {
            let address = remote(CANARY + 8 * word);
            let old = peer.word(word, |old| old.wrapping_add(add));
            own.model_sink[to..to + 8].copy_from_slice(&old.to_ne_bytes());
            (SendOp::FetchAdd { remote: address, add }, own.sink.sge(to, 8))
        }
        ModelStep::Swap { word, to, expected, swap } => {
            let address = remote(CANARY + 8 * word);
            let old = peer.word(word, |old| if old == expected { swap } else { old });
            own.model_sink[to..to + 8].copy_from_slice(&old.to_ne_bytes());
            (SendOp::CompareSwap { remote: address, expected, swap }, own.sink.sge(to, 8))
        }
    };
    let opcode = match op {
        SendOp::Send | SendOp::SendInvalidate(_) => WcOpcode::Send,
        SendOp::Write(_) | SendOp::WriteWithImmediate(..) => WcOpcode::Write,
        SendOp::Read(_) => WcOpcode::Read,
        _ => WcOpcode::Atomic,
    };
    own.posted.push((wr_id, opcode));
    end.post(wr_id, op, sges, flags | SendFlags::SIGNALED).unwrap();
}

/// Transmits the output of `from` into the pipe, in calls of at most `window` bytes. Delivers at most `cut` bytes of the pipe to `to`.
fn pump(from: &mut TestQueuePair, to: &mut TestQueuePair, pipe: &mut Vec<u8>, cut: usize, window: usize) {
    from.transmit(window);
    pipe.append(&mut from.wire);
    let n = cut.min(pipe.len());
    let bytes: Vec<u8> = pipe.drain(..n).collect();
    to.deliver(&bytes).unwrap();
}

proptest! {
    #[test]
    fn any_mix_of_operations(
        crc: bool, emss in prop_oneof![Just(536usize), Just(1448), Just(9000), Just(65483)],
        steps in prop::collection::vec(step(), 1..50),
        cuts in prop::collection::vec(prop_oneof![1usize..60, 1000usize..20_000], 1..40),
        window in prop_oneof![100usize..3000, Just(usize::MAX)], depth in 1u16..5,
    ) {
        let terms = Agreement { ird: depth, ord: 5 - depth, ..agreement(crc, Some(ReadyToReceive::Read)) };
        let mut pair = Pair::new(terms, emss);
        pair.a.qp.extensions = true;
        pair.b.qp.extensions = true;
        let (mut a, mut b) = (ModelNode::new(&mut pair.a, 1000), ModelNode::new(&mut pair.b, 5000));
        let (mut there, mut back) = (Vec::new(), Vec::new());
        let mut cut = cuts.iter().cycle().copied();
        let mut done = [Vec::new(), Vec::new()];
        for (wr_id, (by_a, fence, solicited, step)) in steps.iter().enumerate() {
            // Without a fence, a Write may take effect before the response to an earlier Read is sent (RFC 5040 §5.5). So every Write gets
            // a fence.
            let fence = *fence || matches!(step, ModelStep::Write { .. });
            let mut flags = if fence { SendFlags::FENCE } else { SendFlags::empty() };
            flags |= if *solicited { SendFlags::SOLICITED } else { SendFlags::empty() };
            if *by_a {
                post(&mut pair.a, &mut a, &mut b, wr_id as u64, flags, step);
            } else {
                post(&mut pair.b, &mut b, &mut a, wr_id as u64, flags, step);
            }
            pump(&mut pair.a, &mut pair.b, &mut there, cut.next().unwrap(), window);
            pump(&mut pair.b, &mut pair.a, &mut back, cut.next().unwrap(), window);
            done[0].extend(pair.a.done());
            done[1].extend(pair.b.done());
        }
        for _ in 0..100_000 {
            if there.is_empty() && back.is_empty() && !pair.a.qp.tx.has_work() && !pair.b.qp.tx.has_work() {
                break;
            }
            pump(&mut pair.a, &mut pair.b, &mut there, cut.next().unwrap(), window);
            pump(&mut pair.b, &mut pair.a, &mut back, cut.next().unwrap(), window);
        }
        done[0].extend(pair.a.done());
        done[1].extend(pair.b.done());
        for (side, done) in [a, b].iter().zip(done) {
            prop_assert!(done.iter().all(|wc| wc.status == WcStatus::Success));
            let (received, sent): (Vec<&WorkCompletion>, Vec<&WorkCompletion>) = done.iter().partition(|wc| wc.opcode.is_receive());
            prop_assert_eq!(sent.iter().map(|wc| (wc.wr_id, wc.opcode)).collect::<Vec<_>>(), side.posted.clone());
            prop_assert_eq!(received.len(), side.inbox_used);
            let mut inbox = Vec::new();
            for wc in received.iter().filter(|wc| wc.opcode == WcOpcode::Recv) {
                inbox.extend(side.inbox.read(wc.wr_id as usize * 9000, wc.byte_len as usize));
            }
            prop_assert!(inbox == side.expected_inbox);
            prop_assert!(side.shared.bytes() == side.model_shared, "shared memory");
            prop_assert!(side.sink.bytes() == side.model_sink, "sinks");
            prop_assert!(side.shared.canaries() && side.sink.canaries());
        }
    }
}
