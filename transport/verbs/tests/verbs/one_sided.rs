//! All operations of a send queue: sends, one-sided operations, immediate data and atomics.

use rdma_transport::provider::PostError;
use rdma_transport::wr::RemoteAddress;
use rdma_transport::{
    Access, CmEventKind, Features, Provider, ReadDepth, RemoteKey, SendFlags, SendOp, SendWr, SgeList, TransportError,
    WcOpcode, WcStatus,
};

use crate::world::*;

const SIZES: [usize; 6] = [0, 1, 1 << 10, 64 << 10, 1 << 20, 16 << 20];

fn connected(kind: Kind) -> (World, End, End) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (active, passive) = world.pair(to);
    (world, active, passive)
}

/// Returns up to three scatter/gather entries. Together they name the first `len` bytes of the area.
fn pieces(area: &Area, len: usize) -> SgeList {
    let cut = [0, len / 3, len / 2 + len % 2, len];
    let mut list = SgeList::default();
    for pair in cut.windows(2).filter(|pair| pair[1] > pair[0]) {
        list.push(area.sge(pair[0], pair[1] - pair[0])).unwrap();
    }
    list
}

fn every_size_both_ways(kind: Kind) {
    let (mut world, active, passive) = connected(kind);
    let largest = SIZES[SIZES.len() - 1];
    let source = world.area(&active, largest, Access::LOCAL_WRITE);
    let target = world.area(&passive, largest + 4096, Access::REMOTE_READ | Access::REMOTE_WRITE);
    let back = world.area(&active, largest, Access::LOCAL_WRITE);
    let entries = world.provider.device(active.device).unwrap().capabilities.max_read_sge;
    assert_eq!(entries, if kind == Kind::Siw { 1 } else { 4 });
    let many =
        SendWr { wr_id: 1, op: SendOp::Read(target.remote(0)), sges: pieces(&back, 9), flags: SendFlags::empty() };
    if entries == 1 {
        let refused = world.provider.post_send(active.qp, &[many]);
        assert!(
            matches!(refused, Err(PostError { error: TransportError::OutOfRange { value: 3, .. }, .. })),
            "{refused:?}"
        );
    }
    for (round, len) in SIZES.into_iter().enumerate() {
        source.fill(round as u32);
        target.fill(100 + round as u32);
        let beyond = target.bytes()[len..].to_vec();
        let wc = world.done(&active, SendOp::Write(target.remote(0)), pieces(&source, len), SendFlags::empty());
        assert_eq!((wc.status, wc.opcode), (WcStatus::Success, WcOpcode::Write), "{len}");
        // The read was posted after the write, so it returns the bytes of the write.
        let into = if entries == 1 { SgeList::one(back.sge(0, len)) } else { pieces(&back, len) };
        let wc = world.done(&active, SendOp::Read(target.remote(0)), into, SendFlags::empty());
        let opcode = if len == 0 { WcOpcode::Write } else { WcOpcode::Read };
        assert_eq!((wc.status, wc.opcode), (WcStatus::Success, opcode), "{len}");
        assert!(back.bytes()[..len] == source.bytes()[..len], "{len} bytes read");
        assert!(target.bytes()[..len] == source.bytes()[..len], "{len} bytes written");
        assert!(target.bytes()[len..] == beyond, "bytes behind the first {len} have changed");
    }
}

fn sends_of_every_size(kind: Kind) {
    let (mut world, active, passive) = connected(kind);
    let largest = SIZES[SIZES.len() - 1];
    let source = world.area(&active, largest, Access::LOCAL_WRITE);
    let target = world.area(&passive, largest, Access::LOCAL_WRITE);
    // First consume the receives that `pair` has posted, because they are in front of the receives of this test.
    for slot in 0..DEPTH as usize {
        world.provider.post_send(active.qp, &[active.send(DEPTH as usize, 1)]).unwrap();
        assert_eq!(world.completion(passive.cq).wr_id, slot as u64);
        world.completion(active.cq);
    }
    for (round, len) in SIZES.into_iter().enumerate() {
        source.fill(round as u32);
        let receive = rdma_transport::RecvWr { wr_id: 5, sges: pieces(&target, len) };
        world.provider.post_recv(passive.qp, &[receive]).unwrap();
        let sent = world.done(&active, SendOp::Send, pieces(&source, len), SendFlags::SOLICITED);
        assert_eq!(sent.status, WcStatus::Success, "{len}");
        let got = world.completion(passive.cq);
        assert_eq!((got.status, got.wr_id, got.byte_len as usize), (WcStatus::Success, 5, len));
        assert!(target.bytes()[..len] == source.bytes()[..len], "{len} bytes sent");
    }
}

fn immediate_data(kind: Kind) {
    let (mut world, active, passive) = connected(kind);
    let target = world.area(&passive, 4096, Access::REMOTE_WRITE);
    let slot = DEPTH as usize;
    active.write(slot, b"payload");
    let operations = [
        (SendOp::SendWithImmediate(0x0102_0304), Features::SEND_WITH_IMMEDIATE, "Send with immediate data"),
        (
            SendOp::WriteWithImmediate(target.remote(9), 0x0102_0304),
            Features::WRITE_WITH_IMMEDIATE,
            "RDMA Write with immediate data",
        ),
    ];
    let features = world.provider.device(active.device).unwrap().capabilities.features;
    for (op, needed, name) in operations {
        assert_eq!(features.contains(needed), kind == Kind::Rxe);
        let posted = world.provider.post_send(active.qp, &[active.op(op, slot, 7)]);
        if kind == Kind::Siw {
            match posted {
                Err(PostError { posted: 0, error: TransportError::Unsupported { feature, .. } }) => {
                    assert_eq!(feature, name)
                }
                other => panic!("{other:?}"),
            }
            continue;
        }
        posted.unwrap();
        assert_eq!(world.completion(active.cq).status, WcStatus::Success);
        let got = world.completion(passive.cq);
        assert_eq!((got.status, got.immediate, got.byte_len), (WcStatus::Success, Some(0x0102_0304), 7));
        if got.opcode == WcOpcode::RecvWriteWithImmediate {
            assert_eq!(&target.bytes()[9..16], b"payload");
        } else {
            assert_eq!(passive.read(got.wr_id as usize, 7), b"payload");
        }
    }
}

fn atomics(kind: Kind) {
    let (mut world, active, passive) = connected(kind);
    let local = world.area(&active, 4096, Access::LOCAL_WRITE);
    let somewhere = RemoteAddress { address: 0, key: RemoteKey(1) };
    if kind == Kind::Siw {
        assert!(!world.provider.device(active.device).unwrap().capabilities.features.contains(Features::ATOMICS));
        for op in [
            SendOp::FetchAdd { remote: somewhere, add: 1 },
            SendOp::CompareSwap { remote: somewhere, expected: 1, swap: 2 },
        ] {
            let wr = SendWr { wr_id: 1, op, sges: SgeList::one(local.sge(0, 8)), flags: SendFlags::SIGNALED };
            let refused = world.provider.post_send(active.qp, &[wr]);
            assert!(
                matches!(refused, Err(PostError { posted: 0, error: TransportError::Unsupported { .. } })),
                "{refused:?}"
            );
        }
        let refused =
            world.provider.register(passive.device, &local.memory, 0..local.memory.len(), Access::REMOTE_ATOMIC);
        assert!(matches!(refused, Err(TransportError::Unsupported { .. })), "{refused:?}");
        return;
    }
    let target = world.area(&passive, 4096, Access::REMOTE_ATOMIC);
    target.set_word(64, u64::MAX);
    let remote = target.remote(64);
    for (op, old, new) in [
        (SendOp::FetchAdd { remote, add: 3 }, u64::MAX, 2),
        (SendOp::CompareSwap { remote, expected: 1, swap: 9 }, 2, 2),
        (SendOp::CompareSwap { remote, expected: 2, swap: 1 << 63 }, 2, 1 << 63),
        (SendOp::FetchAdd { remote, add: 0 }, 1 << 63, 1 << 63),
    ] {
        let wc = world.done(&active, op, SgeList::one(local.sge(8, 8)), SendFlags::FENCE);
        assert_eq!((wc.status, wc.opcode), (WcStatus::Success, WcOpcode::Atomic), "{op:?}");
        assert_eq!((local.word(8), target.word(64)), (old, new), "{op:?}");
    }
    assert!(target.bytes()[..64].iter().all(|&byte| byte == 0));
}

/// Both ends agree on the read depth. Reads beyond this depth wait in the send queue, and all reads complete in order.
fn read_depth_is_agreed_and_kept(kind: Kind) {
    for (requested, wanted) in [(1, 1), (3, 3), (0, 0)] {
        let mut world = World::new();
        world.read_depth = ReadDepth { responder_resources: requested, initiator_depth: requested };
        let (_, to) = world.listen(kind.address());
        let (id, device) = world.resolved(to);
        let active = world.equip(id, device);
        let ReadDepth { responder_resources, initiator_depth } = world.read_depth;
        let param = rdma_transport::ConnectParam {
            responder_resources,
            initiator_depth,
            ..rdma_transport::ConnectParam::default()
        };
        world.provider.connect(id, &param).unwrap();
        let event = world.news();
        let CmEventKind::ConnectRequest { device, read_depth, .. } = event.kind else { panic!("{event:?}") };
        println!("wanted {requested}: requested {read_depth:?}");
        let passive = world.equip(event.id, device);
        // By default the passive end supports a larger read depth, but it grants only the depth that the active end
        // requests.
        world.provider.accept(event.id, &rdma_transport::ConnectParam::default(), std::time::Instant::now()).unwrap();
        let mut depths = [ReadDepth::default(); 2];
        for _ in 0..2 {
            let event = world.news();
            let CmEventKind::Established { read_depth, .. } = event.kind else { panic!("{event:?}") };
            depths[usize::from(event.id == passive.id)] = read_depth;
        }
        println!("wanted {requested}: active {:?}, passive {:?}", depths[0], depths[1]);
        if wanted > 0 {
            assert_eq!(read_depth.responder_resources, wanted);
            assert_eq!(depths[0].initiator_depth, wanted);
            assert_eq!(depths[1].responder_resources, wanted);
        } else {
            let most = world.provider.device(device).unwrap().capabilities.max_read_depth;
            assert_eq!((depths[0].initiator_depth, depths[1].responder_resources), (most, most));
        }
        let target = world.area(&passive, 1 << 20, Access::REMOTE_READ);
        let local = world.area(&active, 1 << 20, Access::LOCAL_WRITE);
        target.fill(7);
        let part = (1 << 20) / DEPTH as usize;
        let chain: Vec<_> = (0..DEPTH as usize)
            .map(|at| SendWr {
                wr_id: at as u64,
                op: SendOp::Read(target.remote(at * part)),
                sges: SgeList::one(local.sge(at * part, part)),
                flags: SendFlags::SIGNALED,
            })
            .collect();
        world.provider.post_send(active.qp, &chain).unwrap();
        let mut got = Vec::new();
        while got.len() < chain.len() {
            got.extend(world.completions(active.cq));
        }
        for (at, wc) in got.iter().enumerate() {
            assert_eq!((wc.wr_id, wc.status), (at as u64, WcStatus::Success));
        }
        assert!(local.bytes() == target.bytes());
    }
}

on_each_device! {
    every_size_both_ways
    sends_of_every_size
    immediate_data
    atomics
    read_depth_is_agreed_and_kept
}
