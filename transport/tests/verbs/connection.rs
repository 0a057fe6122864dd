//! Connections: how they come, carry messages, and end.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rdma_transport::cm::ConnectFailure;
use rdma_transport::provider::PostError;
use rdma_transport::verbs::Reach;
use rdma_transport::{
    CmEvent, CmEventKind, CmId, ConnectParam, DeviceId, DisconnectCause, Error, Features, Provider, QpAttr, SendFlags,
    WcOpcode, WcStatus,
};

use crate::world::*;

fn open_and_reach(kind: Kind) {
    let mut world = World::new();
    let address = kind.address();
    let device = kind.variable("DEV");
    let to = SocketAddr::new(kind.variable("PEER").parse().unwrap(), 1);
    assert_eq!(world.provider.reaches(to, TIMEOUT).unwrap(), Reach::Yes { device: device.clone() });
    assert_eq!(world.provider.serves(to).unwrap(), Reach::Yes { device });
    let nowhere = "192.0.2.1:1".parse().unwrap();
    assert!(matches!(world.provider.reaches(nowhere, Duration::from_secs(2)).unwrap(), Reach::No { .. }));
    let info = world.provider.device(DeviceId(0)).unwrap();
    assert_eq!(info.name, kind.variable("DEV"));
    let iwarp = kind == Kind::Siw;
    let caps = info.capabilities;
    println!("{caps:?}");
    assert_eq!(caps.features.contains(Features::ATOMICS | Features::WRITE_WITH_IMMEDIATE), !iwarp);
    assert!(caps.features.contains(Features::READ | Features::WRITE));
    assert_eq!(caps.max_private_data, if iwarp { 251 } else { 56 });
    assert!(caps.max_inline > 0 && caps.max_sge == 4 && caps.max_message >= 1 << 20);
    let (listener, _) = world.listen(address);
    let again = world.provider.local_address(listener).unwrap();
    assert!(matches!(world.provider.listen(again, 1), Err(Error::Listen { .. })));
}

fn a_thousand_messages(kind: Kind) {
    for max_inline in [0, 64] {
        let mut world = World::new();
        world.max_inline = max_inline;
        let (_, to) = world.listen(kind.address());
        let (active, passive) = world.pair(to);
        let start = Instant::now();
        for turn in 0..1000u32 {
            let (from, to) = if turn % 2 == 0 { (&active, &passive) } else { (&passive, &active) };
            let text = format!("message {turn}");
            from.write(DEPTH as usize, text.as_bytes());
            world.provider.post_send(from.qp, &[from.send(DEPTH as usize, text.len())]).unwrap();
            let got = world.completion(to.cq);
            assert_eq!((got.status, got.opcode, got.qp), (WcStatus::Success, WcOpcode::Recv, to.qp));
            assert_eq!(to.read(got.wr_id as usize, got.byte_len as usize), text.as_bytes());
            world.provider.post_recv(to.qp, &[to.recv(got.wr_id as usize)]).unwrap();
            let sent = world.completion(from.cq);
            assert_eq!((sent.wr_id, sent.status, sent.qp), (1000 + u64::from(DEPTH), WcStatus::Success, from.qp));
        }
        println!("1000 messages, inline {max_inline}: {:?}", start.elapsed());
    }
}

fn a_chain_is_one_post(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (active, passive) = world.pair(to);
    for _ in 0..20 {
        let mut chain: Vec<_> = (0..DEPTH as usize).map(|i| active.send(DEPTH as usize + i, 1 + i)).collect();
        for wr in &mut chain[..DEPTH as usize - 1] {
            wr.flags = SendFlags::empty();
        }
        world.provider.post_send(active.qp, &chain).unwrap();
        let mut got = Vec::new();
        while got.len() < DEPTH as usize {
            got.extend(world.completions(passive.cq));
        }
        for (i, wc) in got.iter().enumerate() {
            assert_eq!((wc.wr_id, wc.byte_len, wc.status), (i as u64, 1 + i as u32, WcStatus::Success));
        }
        let sent = world.completion(active.cq);
        assert_eq!(sent.wr_id, chain.last().unwrap().wr_id);
        let receives: Vec<_> = (0..DEPTH as usize).map(|slot| passive.recv(slot)).collect();
        world.provider.post_recv(passive.qp, &receives).unwrap();
    }
}

fn limits_are_errors(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (id, device) = world.resolved(to);
    let provider = &mut world.provider;
    assert!(matches!(provider.create_cq(device, 0), Err(Error::OutOfRange { .. })));
    assert!(matches!(provider.create_cq(device, u32::MAX), Err(Error::OutOfRange { .. })));
    let cq = provider.create_cq(device, 16).unwrap();
    let attr = |send, recv| QpAttr {
        send_cq: cq,
        recv_cq: cq,
        max_send_wr: send,
        max_recv_wr: recv,
        max_inline: 0,
        max_recv_sge: 0,
    };
    assert!(matches!(provider.create_qp(id, &attr(16, 1)), Err(Error::OutOfRange { .. })));
    assert!(matches!(provider.create_qp(id, &attr(1, u32::MAX)), Err(Error::OutOfRange { .. })));
    assert!(matches!(provider.create_qp(id, &attr(0, 1)), Err(Error::OutOfRange { .. })));
    assert!(matches!(provider.connect(id, &ConnectParam::default()), Err(Error::InvalidState { .. })));
    let qp = provider.create_qp(id, &attr(8, 8)).unwrap();
    assert!(matches!(provider.destroy_cq(cq), Err(Error::InvalidState { .. })));
    assert!(matches!(provider.create_qp(id, &attr(1, 1)), Err(Error::InvalidState { .. })));
    let long = [0; 252];
    let param = ConnectParam { private_data: &long, ..Default::default() };
    assert!(matches!(provider.connect(id, &param), Err(Error::PrivateDataTooLong { len: 252, .. })));
    provider.destroy_id(id, Instant::now());
    provider.destroy_id(id, Instant::now());
    assert!(matches!(provider.post_send(qp, &[]), Err(PostError { error: Error::Stale { .. }, .. })));
    provider.destroy_cq(cq).unwrap();
    assert!(matches!(provider.destroy_cq(cq), Err(Error::Stale { .. })));
    let mut out = Vec::new();
    assert!(matches!(provider.poll_cq(cq, 1, &mut out), Err(Error::Stale { .. })));
}

/// A queue that is full takes what fits and says how much that was; the device may round its depth up.
fn a_full_queue_is_backpressure(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (active, _passive) = world.pair(to);
    let chain = vec![active.recv(0); 4096];
    match world.provider.post_recv(active.qp, &chain) {
        Err(PostError { posted, error: Error::QueueFull { queue: "receive", depth: DEPTH } }) => {
            println!("{posted} more receives than {DEPTH} were taken");
            assert!(posted < chain.len());
        }
        other => panic!("{other:?}"),
    }
}

fn reject_with_private_data(kind: Kind) {
    let mut world = World::new();
    let (listener, to) = world.listen(kind.address());
    for data in [&b"not today"[..], b""] {
        let (id, device) = world.resolved(to);
        let end = world.equip(id, device);
        world.provider.connect(id, &ConnectParam::default()).unwrap();
        let (request, of, _, peer, _) = world.connect_request();
        assert_eq!((of, peer.ip()), (listener, kind.address()));
        let too_long = world.provider.reject(request, &[0; 252], Instant::now());
        assert!(matches!(too_long, Err(Error::PrivateDataTooLong { .. })));
        world.provider.reject(request, data, Instant::now()).unwrap();
        match world.news() {
            CmEvent { id: of, kind: CmEventKind::Rejected { private_data } } if of == id => {
                assert!(private_data.starts_with(data), "{private_data:?}");
            }
            other => panic!("{other:?}"),
        }
        world.provider.disconnect(id, Instant::now()).unwrap();
        let flushed = world.flushed(&end, DEPTH as usize);
        assert!(flushed.iter().all(|wc| wc.status == WcStatus::Flushed));
        world.drop_end(&end);
    }
}

fn nobody_listens(kind: Kind) {
    let mut world = World::new();
    let (id, device) = world.resolved(SocketAddr::new(kind.address(), 9));
    let end = world.equip(id, device);
    quick("connect", || world.provider.connect(id, &ConnectParam::default())).unwrap();
    match world.news() {
        CmEvent { id: of, kind: CmEventKind::ConnectFailed(ConnectFailure::Refused) } if of == id => {}
        other => panic!("{other:?}"),
    }
    world.drop_end(&end);
}

fn no_route(kind: Kind) {
    let mut world = World::new();
    // The first is in no network of this host, the second is in one but is nobody.
    let beside = kind.variable("ADDR").rsplit_once('.').map(|(net, _)| format!("{net}.77")).unwrap();
    for nowhere in ["192.0.2.1".to_string(), beside] {
        let peer = SocketAddr::new(nowhere.parse().unwrap(), 9);
        let id = world.provider.resolve(peer, Instant::now() + Duration::from_secs(2)).unwrap();
        match world.event() {
            CmEvent { id: of, kind: CmEventKind::ConnectFailed(ConnectFailure::Unreachable(why)) } if of == id => {
                println!("{peer}: {why}");
            }
            other => panic!("{other:?}"),
        }
        world.provider.destroy_id(id, Instant::now());
    }
}

fn disconnect_flushes_everything_once(kind: Kind) {
    for (active_first, posted) in [(true, 0), (false, 0), (true, 8), (false, 8)] {
        let mut world = World::new();
        let (_, to) = world.listen(kind.address());
        let (active, passive) = world.pair(to);
        let (first, second) = if active_first { (active, passive) } else { (passive, active) };
        let sends: Vec<_> = (0..posted).map(|i| first.send(DEPTH as usize + i, 100)).collect();
        if !sends.is_empty() {
            world.provider.post_send(first.qp, &sends).unwrap();
        }
        world.provider.disconnect(first.id, Instant::now()).unwrap();
        world.provider.disconnect(first.id, Instant::now()).unwrap();
        world.flushed(&first, DEPTH as usize + posted);
        // On InfiniBand the first hears of its own disconnect when the second has answered.
        let mut told = Vec::new();
        while told.len() < 2 {
            match world.news() {
                CmEvent { id, kind: CmEventKind::Disconnected(cause) } if id == first.id => {
                    assert_eq!(cause, DisconnectCause::Local);
                    told.push(id);
                }
                CmEvent { id, kind: CmEventKind::Disconnected(cause) } => {
                    assert_eq!((id, cause), (second.id, DisconnectCause::Peer));
                    world.provider.disconnect(second.id, Instant::now()).unwrap();
                    told.push(id);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_ne!(told[0], told[1]);
        let got = world.flushed(&second, DEPTH as usize);
        println!("{} of {posted} arrived", got.iter().filter(|wc| wc.status.is_success()).count());
        world.drop_end(&first);
        world.drop_end(&second);
    }
}

fn destroying_without_disconnect_tells_the_peer(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (active, passive) = world.pair(to);
    quick("destroy_id", || world.drop_end(&active));
    world.disconnected(passive.id, &DisconnectCause::Peer);
    quick("destroy_id", || world.drop_end(&passive));
}

fn churn_leaves_nothing(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let mut baseline = 0;
    let start = Instant::now();
    for cycle in 0..210 {
        let (active, passive) = world.pair(to);
        let (first, second) = if cycle % 2 == 0 { (&active, &passive) } else { (&passive, &active) };
        if cycle % 3 == 0 {
            world.provider.disconnect(first.id, Instant::now()).unwrap();
            world.disconnected_either(&[first.id, second.id]);
        }
        world.drop_end(first);
        world.drop_end(second);
        world.memories.clear();
        while world.provider.next_cm_event(Instant::now()).unwrap().is_some() {}
        if cycle == 9 {
            baseline = descriptors();
        }
    }
    println!("200 cycles in {:?}", start.elapsed());
    assert!(descriptors() <= baseline, "{} of {baseline}", descriptors());
    drop(world);
    assert!(descriptors() < baseline);
}

impl World {
    fn disconnected_either(&mut self, ids: &[CmId]) {
        match self.news() {
            CmEvent { id, kind: CmEventKind::Disconnected(_) } if ids.contains(&id) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn every_family(kind: Kind) {
    let mut world = World::new();
    let six: IpAddr = kind.variable("ADDR6").parse().unwrap();
    let (_, to) = world.listen(six);
    let (active, passive) = world.pair(to);
    world.drop_end(&active);
    world.drop_end(&passive);
    // A wildcard serves every device.
    let listener = world.provider.listen("0.0.0.0:0".parse().unwrap(), 4).unwrap();
    let port = world.provider.local_address(listener).unwrap().port();
    while world.event_within(Duration::from_millis(100)).is_some() {}
    world.pair(SocketAddr::new(kind.address(), port));
}

on_each_device! {
    open_and_reach
    a_thousand_messages
    a_chain_is_one_post
    limits_are_errors
    a_full_queue_is_backpressure
    reject_with_private_data
    nobody_listens
    no_route
    disconnect_flushes_everything_once
    destroying_without_disconnect_tells_the_peer
    churn_leaves_nothing
    every_family
}
