//! Shared receive queues.

use std::time::Instant;

use rdma_transport::provider::PostError;
use rdma_transport::{
    Access, CmEventKind, CmId, CqId, DeviceEventKind, DeviceId, Error, Features, Provider, QpAttr, QpId, RecvWr,
    SendOp, SgeList, SrqId, WcOpcode, WcStatus, WorkCompletion,
};

use crate::world::*;

/// Receives of the shared queue.
const SHARED: u32 = 8;

/// The passive side: connections that take their receives from one queue.
struct Server {
    world: World,
    srq: SrqId,
    cq: CqId,
    area: Area,
    to: std::net::SocketAddr,
    device: DeviceId,
}

impl Server {
    fn new(kind: Kind) -> Self {
        let mut world = World::new();
        let (_, to) = world.listen(kind.address());
        let (id, device) = world.resolved(to);
        let any = world.equip(id, device);
        let capabilities = world.provider.device(device).unwrap().capabilities;
        assert!(capabilities.features.contains(Features::SHARED_RECEIVE_QUEUE));
        println!("{} shared receives", capabilities.max_shared_receives);
        for wrong in [0, capabilities.max_shared_receives + 1] {
            assert!(matches!(world.provider.create_srq(device, wrong), Err(Error::OutOfRange { .. })));
        }
        let srq = world.provider.create_srq(device, SHARED).unwrap();
        let cq = world.provider.create_cq(device, SHARED + 8 * DEPTH).unwrap();
        let area = world.area(&any, SHARED as usize * SLOT, Access::LOCAL_WRITE);
        world.drop_end(&any);
        Self { world, srq, cq, area, to, device }
    }

    fn receive(&self, slot: u64) -> RecvWr {
        RecvWr { wr_id: slot, sges: SgeList::one(self.area.sge(slot as usize * SLOT, SLOT)) }
    }

    fn post(&mut self, slots: impl Iterator<Item = u64>) -> Result<(), PostError> {
        let chain: Vec<_> = slots.map(|slot| self.receive(slot)).collect();
        self.world.provider.post_srq_recv(self.srq, &chain)
    }

    /// A connection; the passive end is on the shared queue.
    fn pair(&mut self) -> (End, CmId, QpId) {
        let (id, device) = self.world.resolved(self.to);
        let active = self.world.equip(id, device);
        self.world.provider.connect(id, &rdma_transport::ConnectParam::default()).unwrap();
        let (id, ..) = self.world.connect_request();
        let attr = QpAttr {
            send_cq: self.cq,
            recv_cq: self.cq,
            max_send_wr: 4,
            max_recv_wr: 0,
            max_inline: 0,
            max_recv_sge: 0,
        };
        let qp = self.world.provider.create_qp_with_srq(id, &attr, self.srq).unwrap();
        self.world.provider.accept(id, &rdma_transport::ConnectParam::default(), Instant::now()).unwrap();
        for _ in 0..2 {
            let event = self.world.news();
            assert!(matches!(event.kind, CmEventKind::Established { .. }), "{event:?}");
        }
        (active, id, qp)
    }

    /// One message from an active end; the completion of its receive.
    fn message(&mut self, from: &End, text: &[u8]) -> WorkCompletion {
        from.write(DEPTH as usize, text);
        self.world.good(from, SendOp::Send, from.sge(DEPTH as usize, text.len()));
        let got = self.world.completion(self.cq);
        assert_eq!((got.status, got.opcode, got.byte_len as usize), (WcStatus::Success, WcOpcode::Recv, text.len()));
        let at = got.wr_id as usize * SLOT;
        assert_eq!(&self.area.bytes()[at..at + text.len()], text);
        got
    }
}

fn one_queue_serves_all_connections(kind: Kind) {
    let mut server = Server::new(kind);
    server.post(0..u64::from(SHARED)).unwrap();
    let full = server.post(0..1);
    assert!(matches!(full, Err(PostError { posted: 0, error: Error::QueueFull { depth: SHARED, .. } })), "{full:?}");
    let ends: Vec<_> = (0..3).map(|_| server.pair()).collect();
    for turn in 0..100 {
        let (active, _, qp) = &ends[turn % ends.len()];
        let got = server.message(active, format!("message {turn}").as_bytes());
        assert_eq!(got.qp, *qp, "the completion says whose it was");
        let again = server.post(std::iter::once(got.wr_id));
        assert!(again.is_ok(), "{again:?}");
    }
    let (_, _, qp) = ends[0];
    let refused = server.world.provider.post_recv(qp, &[server.receive(0)]);
    assert!(matches!(refused, Err(PostError { error: Error::InvalidState { .. }, .. })), "{refused:?}");
    // A receive counts until its completion is polled, not until it has arrived.
    server.world.good(&ends[0].0, SendOp::Send, ends[0].0.sge(DEPTH as usize, 1));
    assert!(server.post(0..1).is_err(), "no place is free before the completion is polled");
    let got = server.world.completion(server.cq);
    server.post(std::iter::once(got.wr_id)).unwrap();
}

fn it_goes_in_order(kind: Kind) {
    let mut server = Server::new(kind);
    server.post(0..u64::from(SHARED)).unwrap();
    let (active, id, _) = server.pair();
    let provider = &mut server.world.provider;
    assert!(matches!(provider.destroy_srq(server.srq), Err(Error::InvalidState { .. })));
    provider.destroy_id(id, Instant::now());
    assert!(
        matches!(provider.destroy_cq(server.cq), Err(Error::InvalidState { .. })),
        "the shared queue has room there"
    );
    provider.destroy_srq(server.srq).unwrap();
    assert!(matches!(provider.destroy_srq(server.srq), Err(Error::Stale { .. })));
    provider.destroy_cq(server.cq).unwrap();
    server.world.drop_end(&active);
    // A completion queue without room for the whole shared queue is refused, and nothing is left behind.
    let mut server = Server::new(kind);
    let small = server.world.provider.create_cq(server.device, SHARED + 3).unwrap();
    let (id, _) = server.world.resolved(server.to);
    let attr =
        QpAttr { send_cq: small, recv_cq: small, max_send_wr: 4, max_recv_wr: 0, max_inline: 0, max_recv_sge: 0 };
    let refused = server.world.provider.create_qp_with_srq(id, &attr, server.srq);
    assert!(matches!(refused, Err(Error::OutOfRange { value: 12, .. })), "{refused:?}");
    let attr = QpAttr { max_send_wr: 3, ..attr };
    server.world.provider.create_qp_with_srq(id, &attr, server.srq).unwrap();
}

/// Few receives left are told once, when that was asked for.
fn low_water_is_told(kind: Kind) {
    let mut server = Server::new(kind);
    server.post(0..u64::from(SHARED)).unwrap();
    assert!(matches!(server.world.provider.arm_srq(server.srq, SHARED + 1), Err(Error::OutOfRange { .. })));
    let (active, ..) = server.pair();
    for _ in 0..2 {
        server.world.provider.arm_srq(server.srq, 4).unwrap();
        let mut taken = Vec::new();
        for turn in 0..5 {
            assert!(server.world.provider.next_device_event().is_none(), "{turn} receives are taken");
            taken.push(server.message(&active, b"water").wr_id);
            // What there is of events is in by now, if the message is.
            let _ = server.world.provider.next_cm_event(Instant::now()).unwrap();
            if turn < 3 {
                assert!(server.world.provider.next_device_event().is_none(), "{turn} receives are taken");
            }
        }
        let srq = server.srq;
        server.world.device_event(|event| (event.kind == DeviceEventKind::SharedReceivesLow(srq)).then_some(()));
        server.post(taken.into_iter()).unwrap();
    }
}

/// A queue pair that ends leaves the queue to the others. (Adapters say when it has taken its last receive; siw and rxe
/// of Linux 6.1 do not.)
fn the_end_of_one_does_not_end_the_queue(kind: Kind) {
    let mut server = Server::new(kind);
    server.post(0..u64::from(SHARED)).unwrap();
    let (_, leaver, _) = server.pair();
    let (active, ..) = server.pair();
    server.world.provider.disconnect(leaver, Instant::now()).unwrap();
    server.world.provider.destroy_id(leaver, Instant::now());
    for _ in 0..SHARED {
        server.message(&active, b"the queue is still whole");
    }
    let leftovers = server.world.poll(server.cq);
    assert!(leftovers.is_empty(), "{leftovers:?}");
}

/// Connections that die while a message arrives: their receives come back, as completions, and the places are free.
fn no_place_is_lost_with_a_connection(kind: Kind) {
    let mut server = Server::new(kind);
    let mut free: Vec<u64> = (0..u64::from(SHARED)).collect();
    for round in 0..40 {
        server.post(free.drain(..)).unwrap();
        let (active, id, _) = server.pair();
        let chain: Vec<_> = (0..4).map(|i| active.send(DEPTH as usize + i, SLOT)).collect();
        server.world.provider.post_send(active.qp, &chain).unwrap();
        if round % 2 == 0 {
            server.world.completions(server.cq).iter().for_each(|wc| free.push(wc.wr_id));
        }
        if round % 3 == 0 {
            server.world.drop_end(&active);
            server.world.provider.destroy_id(id, Instant::now());
        } else {
            server.world.provider.destroy_id(id, Instant::now());
            server.world.drop_end(&active);
        }
        free.extend(server.world.poll(server.cq).iter().map(|wc| wc.wr_id));
        while server.world.provider.next_cm_event(Instant::now()).unwrap().is_some() {}
        free.sort_unstable();
        free.dedup();
        server.world.memories.clear();
    }
    // Every place is either free or holds a receive that is posted: as many messages arrive as there are receives.
    let posted = u64::from(SHARED) - free.len() as u64;
    server.post(free.drain(..)).unwrap();
    println!("{posted} receives were still posted");
    let (active, ..) = server.pair();
    let mut slots: Vec<u64> = (0..SHARED).map(|_| server.message(&active, b"all there").wr_id).collect();
    slots.sort_unstable();
    assert_eq!(slots, (0..u64::from(SHARED)).collect::<Vec<_>>());
}

on_each_device! {
    one_queue_serves_all_connections
    it_goes_in_order
    low_water_is_told
    the_end_of_one_does_not_end_the_queue
    no_place_is_lost_with_a_connection
}
