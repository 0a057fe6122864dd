//! Datagrams and multicast groups on rxe. Siw supports neither of them, and the provider refuses them on siw.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rdma_transport::cm::ConnectFailure;
use rdma_transport::cm::ListenParam;
use rdma_transport::cq::CqAttr;
use rdma_transport::datagram::GRH_LEN;
use rdma_transport::provider::PostError;
use rdma_transport::{
    Access, AddressId, CmEvent, CmEventKind, CmId, ConnectParam, CqId, DatagramPeer, Destination, DeviceId, Features,
    Provider, QpAttr, QpId, RecvWr, SendFlags, SendOp, SendWr, SgeList, TransportError, WcOpcode, WcStatus,
    WorkCompletion,
};

use crate::world::*;

pub(crate) const ROOM: usize = GRH_LEN + 4096;

/// A connection-manager id for datagrams with its queue pair, on which receives are posted.
pub(crate) struct Datagrams {
    pub(crate) id: CmId,
    pub(crate) device: DeviceId,
    pub(crate) qp: QpId,
    pub(crate) cq: CqId,
    pub(crate) received: Area,
    pub(crate) sent: Area,
}

impl World {
    pub(crate) fn datagrams(&mut self, id: CmId, device: DeviceId) -> Datagrams {
        self.watch(device);
        let cq = self.provider.create_cq(device, &CqAttr::new(2 * DEPTH)).unwrap();
        let attr = QpAttr {
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_inline: 0,
            max_recv_sge: 0,
            srq: None,
        };
        let qp = self.provider.create_qp(id, &attr).unwrap();
        let received = self.area_on(device, DEPTH as usize * ROOM, Access::LOCAL_WRITE);
        let sent = self.area_on(device, ROOM, Access::LOCAL_WRITE);
        let end = Datagrams { id, device, qp, cq, received, sent };
        for slot in 0..DEPTH as usize {
            self.post(&end, slot);
        }
        end
    }

    pub(crate) fn post(&mut self, end: &Datagrams, slot: usize) {
        let sges = SgeList::one(end.received.sge(slot * ROOM, ROOM));
        self.provider.post_recv(end.qp, &[RecvWr { wr_id: slot as u64, sges }]).unwrap();
    }

    pub(crate) fn to(&mut self, end: &Datagrams, peer: &DatagramPeer) -> Destination {
        let address = self.provider.datagrams().unwrap().create_address(end.device, &peer.route).unwrap();
        Destination { address, qp_number: peer.qp_number, queue_key: peer.queue_key }
    }

    pub(crate) fn tell(&mut self, end: &Datagrams, op: SendOp, payload: &[u8]) {
        for (at, &byte) in payload.iter().enumerate() {
            // SAFETY: the byte is within the memory, and no part of the memory is posted.
            unsafe { end.sent.memory.as_ptr().add(at).write(byte) }
        }
        let sges = SgeList::one(end.sent.sge(0, payload.len()));
        let wr = SendWr { wr_id: 99, op, sges, flags: SendFlags::SIGNALED };
        self.provider.post_send(end.qp, &[wr]).unwrap();
    }

    /// Waits for the next datagram that `end` receives. Returns its completion, its route header and its payload, and posts the receive
    /// again.
    pub(crate) fn hear(&mut self, end: &Datagrams) -> (WorkCompletion, Vec<u8>, Vec<u8>) {
        loop {
            let mut heard = None;
            for wc in self.completions(end.cq) {
                assert_eq!(wc.status, WcStatus::Success);
                if wc.opcode == WcOpcode::Recv {
                    assert!(heard.is_none(), "more than one datagram");
                    let at = wc.wr_id as usize * ROOM;
                    let bytes = &end.received.bytes()[at..at + wc.byte_len as usize];
                    heard = Some((wc, bytes[..GRH_LEN].to_vec(), bytes[GRH_LEN..].to_vec()));
                }
            }
            if let Some(heard) = heard {
                self.post(end, heard.0.wr_id as usize);
                return heard;
            }
        }
    }

    pub(crate) fn forget(&mut self, end: Datagrams) {
        self.provider.disconnect(end.id, Instant::now()).unwrap();
        self.provider.destroy_id(end.id, Instant::now()).unwrap();
        self.provider.destroy_cq(end.cq).unwrap();
        self.provider.deregister(end.received.region.id).unwrap();
        self.provider.deregister(end.sent.region.id).unwrap();
    }

    pub(crate) fn resolved_datagram(&mut self, to: SocketAddr, from: Option<SocketAddr>) -> (CmId, DeviceId) {
        let id = self.provider.datagrams().unwrap().resolve_datagram(to, from, Instant::now() + TIMEOUT).unwrap();
        match self.news() {
            CmEvent { id: of, kind: CmEventKind::Resolved { device } } if of == id => (id, device),
            other => panic!("{other:?}"),
        }
    }
}

fn a_question_an_answer_and_a_talk(kind: Kind) {
    let mut world = World::new();
    let (id, device) = if kind == Kind::Siw {
        // Siw has no queue pairs for datagrams. On some systems the address does not resolve, and the test ends here.
        // On others it resolves.
        let to = SocketAddr::new(kind.address(), 9);
        let id = world.provider.datagrams().unwrap().resolve_datagram(to, None, Instant::now() + TIMEOUT);
        println!("{id:?}");
        let Ok(id) = id else { return };
        match world.news() {
            CmEvent { kind: CmEventKind::Resolved { device }, .. } => (id, device),
            CmEvent { kind: CmEventKind::ConnectFailed(why), .. } => return println!("{why}"),
            other => panic!("{other:?}"),
        }
    } else {
        let listener = world
            .provider
            .datagrams()
            .unwrap()
            .listen_datagram(SocketAddr::new(kind.address(), 0), &ListenParam::default())
            .unwrap();
        let port = world.provider.local_address(listener).unwrap().port();
        world.resolved_datagram(SocketAddr::new(kind.address(), port), None)
    };
    let capabilities = world.provider.device(device).unwrap().capabilities;
    assert_eq!(capabilities.features.contains(Features::DATAGRAMS | Features::MULTICAST), kind == Kind::Rxe);
    if kind == Kind::Siw {
        assert_eq!(capabilities.max_datagram, 0);
        let cq = world.provider.create_cq(device, &CqAttr::new(2)).unwrap();
        let attr = QpAttr {
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: 1,
            max_recv_wr: 1,
            max_inline: 0,
            max_recv_sge: 0,
            srq: None,
        };
        let refused = world.provider.create_qp(id, &attr);
        assert!(
            matches!(refused, Err(TransportError::Unsupported { feature: "datagrams on this device", .. })),
            "{refused:?}"
        );
        return;
    }
    assert_eq!(capabilities.max_datagram, 1024);
    let active = world.datagrams(id, device);
    world.provider.connect(id, &ConnectParam { private_data: b"question", ..ConnectParam::default() }).unwrap();
    let (id, _, device, _, private_data) = world.connect_request();
    assert!(private_data.starts_with(b"question"));
    let passive = world.datagrams(id, device);
    let param = ConnectParam { private_data: b"answer", ..ConnectParam::default() };
    world.provider.accept(id, &param, Instant::now()).unwrap();
    let mut reached = None;
    for _ in 0..2 {
        match world.news() {
            CmEvent { id, kind: CmEventKind::Reached { private_data, peer } } if id == active.id => {
                assert!(private_data.starts_with(b"answer"));
                reached = Some(peer);
            }
            CmEvent { id, kind: CmEventKind::Established { .. } } if id == passive.id => {}
            other => panic!("{other:?}"),
        }
    }
    let peer = reached.unwrap();
    assert_eq!(peer.qp_number, world.provider.datagrams().unwrap().qp_number(passive.qp).unwrap());
    let there = world.to(&active, &peer);
    let mut back = None;
    for len in [0, 1, 512, capabilities.max_datagram as usize] {
        let payload: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
        world.tell(&active, SendOp::DatagramWithImmediate(there, 0xfeed_f00d), &payload);
        let (wc, header, heard) = world.hear(&passive);
        assert_eq!((heard == payload, wc.immediate), (true, Some(0xfeed_f00d)), "{len}");
        assert!(wc.source.has_route_header());
        assert_eq!(wc.source.qp_number, world.provider.datagrams().unwrap().qp_number(active.qp).unwrap());
        assert_eq!(world.completion(active.cq).status, WcStatus::Success);
        // The received datagram contains the route to its sender.
        let back = *back.get_or_insert_with(|| {
            let route = world
                .provider
                .datagrams()
                .unwrap()
                .route_back(passive.id, &wc, header[..].try_into().unwrap())
                .unwrap();
            let peer = DatagramPeer { route, qp_number: wc.source.qp_number, queue_key: peer.queue_key };
            world.to(&passive, &peer)
        });
        world.tell(&passive, SendOp::Datagram(back), &payload);
        let (wc, _, heard) = world.hear(&active);
        assert_eq!((heard == payload, wc.immediate), (true, None), "{len}");
        assert_eq!(world.completion(passive.cq).status, WcStatus::Success);
    }
    let sges = SgeList::one(active.sent.sge(0, capabilities.max_datagram as usize + 1));
    let wr = |op, sges| SendWr { wr_id: 1, op, sges, flags: SendFlags::SIGNALED };
    let refused = world.provider.post_send(active.qp, &[wr(SendOp::Datagram(there), sges)]);
    assert!(
        matches!(refused, Err(PostError { error: TransportError::OutOfRange { value: 1025, .. }, .. })),
        "{refused:?}"
    );
    let refused = world.provider.post_send(active.qp, &[wr(SendOp::Send, SgeList::default())]);
    assert!(matches!(refused, Err(PostError { error: TransportError::Unsupported { .. }, .. })), "{refused:?}");
    world.provider.datagrams().unwrap().destroy_address(there.address).unwrap();
    assert!(matches!(
        world.provider.datagrams().unwrap().destroy_address(there.address),
        Err(TransportError::Stale { .. })
    ));
    let refused = world.provider.post_send(active.qp, &[wr(SendOp::Datagram(there), SgeList::default())]);
    assert!(matches!(refused, Err(PostError { error: TransportError::Stale { .. }, .. })), "{refused:?}");
    world.forget(active);
    world.forget(passive);
}

fn nobody_there_and_a_no(kind: Kind) {
    if kind == Kind::Siw {
        return assert!(siw_has_none());
    }
    let mut world = World::new();
    let listener = world
        .provider
        .datagrams()
        .unwrap()
        .listen_datagram(SocketAddr::new(kind.address(), 0), &ListenParam::default())
        .unwrap();
    let port = world.provider.local_address(listener).unwrap().port();
    for (port, refused) in [(9, true), (port, false)] {
        let (id, device) = world.resolved_datagram(SocketAddr::new(kind.address(), port), None);
        let end = world.datagrams(id, device);
        world.provider.connect(id, &ConnectParam::default()).unwrap();
        if !refused {
            let (request, ..) = world.connect_request();
            world.provider.reject(request, b"no", Instant::now()).unwrap();
        }
        match world.news() {
            CmEvent { kind: CmEventKind::ConnectFailed(ConnectFailure::Refused), .. } => assert!(refused),
            CmEvent { kind: CmEventKind::Rejected { .. }, .. } => assert!(!refused),
            other => panic!("{other:?}"),
        }
        world.forget(end);
    }
}

/// Checks that siw supports neither datagrams nor multicast groups, and that it refuses to join a group. Returns true
/// if the capabilities of siw do not include these features.
fn siw_has_none() -> bool {
    let mut world = World::new();
    let (id, device) = {
        let (_, to) = world.listen(Kind::Siw.address());
        world.resolved(to)
    };
    let refused = world.provider.datagrams().unwrap().join(id, "239.1.2.3".parse().unwrap());
    assert!(matches!(refused, Err(TransportError::InvalidState { .. })), "{refused:?}");
    !world.provider.device(device).unwrap().capabilities.features.intersects(Features::DATAGRAMS | Features::MULTICAST)
}

fn groups_reach_everyone_in_them(kind: Kind) {
    if kind == Kind::Siw {
        return assert!(siw_has_none());
    }
    let mut world = World::new();
    let group: IpAddr = "239.77.2.9".parse().unwrap();
    let from = Some(SocketAddr::new(kind.address(), 0));
    let mut ends = Vec::new();
    let mut peer = None;
    for _ in 0..3 {
        let (id, device) = world.resolved_datagram(SocketAddr::new(group, 0), from);
        let early = world.provider.datagrams().unwrap().join(id, group);
        assert!(matches!(early, Err(TransportError::InvalidState { .. })), "without a queue pair: {early:?}");
        let end = world.datagrams(id, device);
        world.provider.datagrams().unwrap().join(id, group).unwrap();
        assert!(matches!(
            world.provider.datagrams().unwrap().join(id, group),
            Err(TransportError::InvalidState { .. })
        ));
        match world.news() {
            CmEvent { id: of, kind: CmEventKind::Joined { group: joined, peer: at } } if of == id => {
                assert_eq!((joined, at.qp_number), (group, 0x00ff_ffff));
                peer = Some(at);
            }
            other => panic!("{other:?}"),
        }
        ends.push(end);
    }
    let there = world.to(&ends[0], &peer.unwrap());
    for round in 0..10u8 {
        world.tell(&ends[0], SendOp::Datagram(there), &[round; 100]);
        for end in &ends[1..] {
            assert_eq!(world.hear(end).2, [round; 100]);
        }
        // The sender is a member of the group, too. So it receives its own datagram, in addition to the completion of
        // its send.
        while world.hear(&ends[0]).2 != [round; 100] {}
        let _ = world.poll(ends[0].cq);
    }
    // A member that has left the group receives no more datagrams. The other members still do.
    world.provider.datagrams().unwrap().leave(ends[2].id, group).unwrap();
    assert!(matches!(
        world.provider.datagrams().unwrap().leave(ends[2].id, group),
        Err(TransportError::InvalidState { .. })
    ));
    world.tell(&ends[0], SendOp::Datagram(there), b"the rest of us");
    assert_eq!(world.hear(&ends[1]).2, b"the rest of us");
    let late = world.event_within(Duration::from_millis(50));
    assert!(late.is_none(), "{late:?}");
    assert!(world.poll(ends[2].cq).is_empty());
    let _: AddressId = there.address;
    world.provider.datagrams().unwrap().destroy_address(there.address).unwrap();
    // Destroy the remaining two members while they are in the group.
    for end in ends {
        world.forget(end);
    }
}

on_each_device! {
    a_question_an_answer_and_a_talk
    nobody_there_and_a_no
    groups_reach_everyone_in_them
}
