//! Tests of the provider on adapters that behave differently from siw and rxe. The adapter is a fake (`fake`). Each test names the source
//! code of the driver that the fake imitates in this test.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};

use super::fake::{Fake, Handle, Personality};
use super::parts::Verbs;
use super::sys::{
    ibv_async_event_element_t, ibv_event_type as ev, ibv_port_state as port_state, ibv_wc, rdma_cm_event_type as cm,
};
use crate::patience::until;
use crate::test_memory::{TestEntry, TestMemory};
use rdma_transport::cm::{
    CmEventKind, ConnectFailure, ConnectParam, DisconnectCause, ListenParam, PathOptions, Retries, Source,
};
use rdma_transport::cq::{CqAttr, Notify};
use rdma_transport::datagram::{Destination, QUEUE_KEY, Route};
use rdma_transport::event::DeviceEventKind;
use rdma_transport::mem::Memory;
use rdma_transport::mr::Access;
use rdma_transport::provider::{Channel, CqId, DeviceId, Provider};
use rdma_transport::qp::{QpAttr, QpId, SrqId};
use rdma_transport::slab::Key;
use rdma_transport::srq::SrqAttr;
use rdma_transport::wc::{WcOpcode, WcStatus, WorkCompletion};
use rdma_transport::wr::{RecvWr, RemoteAddress, SendFlags, SendOp, SendWr, SgeList};
use rdma_transport::{CmId, RemoteKey, TransportError};

/// A connection on the fake device.
#[derive(Clone, Copy, Debug)]
struct TestConnection {
    id: CmId,
    qp: QpId,
    cq: CqId,
    handle: Handle,
}

/// A provider on the fake device, and the virtual time.
struct AdapterTest {
    fake: &'static Fake,
    verbs: Verbs,
    now: Instant,
}

impl AdapterTest {
    fn on(fake: &'static Fake) -> Self {
        // The virtual time begins at a reading of the real clock. All later times are computed.
        #[expect(clippy::disallowed_methods, reason = "virtual time needs a beginning")]
        let now = Instant::now();
        let verbs = Fake::provider();
        fake.noted();
        Self { fake, verbs, now }
    }

    fn new(personality: Personality) -> Self {
        Self::on(Fake::new(personality))
    }

    fn events(&mut self) -> Vec<CmEventKind> {
        std::iter::from_fn(|| self.verbs.next_cm_event(self.now).unwrap()).map(|event| event.kind).collect()
    }

    fn device_events(&mut self) -> Vec<DeviceEventKind> {
        self.events();
        std::iter::from_fn(|| self.verbs.device_events().unwrap().next_device_event()).map(|event| event.kind).collect()
    }

    fn resolved(&mut self, port: u8) -> (CmId, DeviceId) {
        let peer = format!("10.0.0.{port}:7").parse().unwrap();
        let id = self.verbs.resolve(peer, &PathOptions::default(), self.now + Duration::from_secs(5)).unwrap();
        let events = self.events();
        let [CmEventKind::Resolved { device }] = events[..] else { panic!("{events:?}") };
        (id, device)
    }

    fn handle(&self, id: CmId) -> Handle {
        let raw = self.verbs.hub.id(id).unwrap().raw.as_ptr();
        // SAFETY: the fake never frees an id.
        Handle { qp: unsafe { (*raw).qp }, id: raw }
    }

    fn connect(&mut self, id: CmId, device: DeviceId, srq: Option<SrqId>, cq: Option<CqId>) -> TestConnection {
        let cq = cq.unwrap_or_else(|| self.verbs.create_cq(device, &CqAttr::new(64)).unwrap());
        let attr = QpAttr {
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: 4,
            max_recv_wr: 4,
            max_inline: 0,
            max_recv_sge: 0,
            srq: None,
        };
        let qp = match srq {
            Some(srq) => self.verbs.create_qp(id, &QpAttr { srq: Some(srq), ..attr }).unwrap(),
            None => self.verbs.create_qp(id, &attr).unwrap(),
        };
        self.verbs.connect(id, &ConnectParam::default()).unwrap();
        // Wait for the event: on iWARP, a private thread calls `rdma_connect`.
        until("the connection is up", || {
            let events = self.events();
            let is_up = matches!(events[..], [CmEventKind::Established { .. }]);
            assert!(is_up || events.is_empty(), "{events:?}");
            is_up.then_some(())
        });
        TestConnection { id, qp, cq, handle: self.handle(id) }
    }

    fn pair(&mut self) -> (TestConnection, DeviceId) {
        let (id, device) = self.resolved(1);
        (self.connect(id, device, None, None), device)
    }

    fn poll(&mut self, cq: CqId) -> Vec<WorkCompletion> {
        let mut out = Vec::new();
        while self.verbs.poll_cq(cq, 16, &mut out).unwrap() > 0 {}
        out
    }

    fn later(&mut self, by: Duration) {
        self.now += by;
        self.verbs.progress(self.now, rdma_transport::Drive::Full);
    }
}

fn failed(wr_id: u64) -> ibv_wc {
    // SAFETY: all fields are numbers, for which zeros are valid.
    ibv_wc { wr_id, status: 5, vendor_err: 0x77, ..unsafe { std::mem::zeroed() } }
}

/// An iWARP adapter answers a Read by a write to the Read's local memory. So this memory needs the remote right to write, which SPDK and
/// the kernel grant (the kernel's drivers/infiniband/core/rw.c). Siw does not check this right.
#[test]
fn reads_need_a_sink_that_is_open_to_the_answer() {
    let mut world =
        AdapterTest::new(Personality { iwarp: true, sink_needs_remote_write: true, ..Personality::default() });
    let (end, device) = world.pair();
    let memory = Arc::new(Memory::new(4096).unwrap());
    for (access, wanted) in
        [(Access::READ_SINK, WcStatus::Success), (Access::LOCAL_WRITE, WcStatus::LocalProtectionError)]
    {
        let region = world.verbs.register(device, &memory, 0..memory.len(), access).unwrap();
        let sges = SgeList::one(memory.sge(0, 8).keyed(region.local_key));
        let op = SendOp::Read(RemoteAddress { address: 0, key: RemoteKey(1) });
        world.verbs.post_send(end.qp, &[SendWr { wr_id: 9, op, sges, flags: SendFlags::SIGNALED }]).unwrap();
        let done = world.poll(end.cq);
        assert_eq!((done.len(), done[0].wr_id, done[0].status), (1, 9, wanted), "{access:?}");
        assert_eq!(done[0].vendor_error, if wanted == WcStatus::Success { 0 } else { 0x104 });
    }
}

/// When a queue pair goes into the error state, irdma resets the TCP connection, and the messages that were sent last
/// are lost (`reset_tcp_conn` in drivers/infiniband/hw/irdma/verbs.c, `irdma_modify_qp`). So the provider waits until
/// the peer has closed the connection, or until a time limit has passed.
#[test]
fn a_close_on_iwarp_waits_for_the_peer_before_it_resets() {
    let mut world = AdapterTest::new(Personality { iwarp: true, ..Personality::default() });
    let (end, _) = world.pair();
    world.fake.noted();
    world.verbs.disconnect(end.id, world.now).unwrap();
    world.verbs.disconnect(end.id, world.now).unwrap();
    assert_eq!(world.fake.noted(), ["disconnect"], "told once, and nothing else is done");
    world.fake.cm_event(&end.handle, cm::RDMA_CM_EVENT_DISCONNECTED);
    assert!(matches!(world.events()[..], [CmEventKind::Disconnected(DisconnectCause::Local)]));
    assert_eq!(world.fake.noted(), ["error state"], "flushed as soon as the peer has closed");
    // If the peer never closes the connection, the provider waits until a time limit, which `next_deadline` returns.
    let (end, _) = world.pair();
    world.fake.noted();
    let closed = world.now;
    world.verbs.disconnect(end.id, closed).unwrap();
    let until = world.verbs.next_deadline().unwrap();
    world.later(until - closed - Duration::from_millis(1));
    assert_eq!(world.fake.noted(), ["disconnect"]);
    world.later(Duration::from_millis(1));
    assert_eq!(world.fake.noted(), ["error state, connection reset"]);
    assert_eq!(world.verbs.next_deadline(), None);
}

/// While a connection closes, cxgb4 refuses the error state with `EINVAL` (drivers/infiniband/hw/cxgb4/qp.c,
/// `c4iw_modify_rc_qp`, state CLOSING). A request at this time would fail, so the provider waits until the connection
/// is closed.
#[test]
fn the_error_state_is_not_asked_for_while_a_connection_closes() {
    let personality = Personality { iwarp: true, refuses_error_while_closing: true, ..Personality::default() };
    let mut world = AdapterTest::new(personality);
    let (end, _) = world.pair();
    world.verbs.disconnect(end.id, world.now).unwrap();
    world.fake.cm_event(&end.handle, cm::RDMA_CM_EVENT_DISCONNECTED);
    world.events();
    assert!(world.fake.qp(&end.handle, |qp| qp.in_error), "{:?}", world.fake.noted());
}

/// On InfiniBand and RoCE the provider does not wait for the peer.
#[test]
fn a_close_on_roce_flushes_at_once() {
    let mut world = AdapterTest::new(Personality::default());
    let (end, _) = world.pair();
    world.fake.noted();
    world.verbs.disconnect(end.id, world.now).unwrap();
    assert_eq!(world.fake.noted(), ["disconnect", "error state"]);
    assert_eq!(world.verbs.next_deadline(), None);
}

/// Creates a shared receive queue with four entries, and a completion queue.
fn shared(world: &mut AdapterTest) -> (SrqId, CqId, DeviceId) {
    let (id, device) = world.resolved(1);
    let srq = world.verbs.shared_receives().unwrap().create_srq(device, &SrqAttr::new(4)).unwrap();
    let cq = world.verbs.create_cq(device, &CqAttr::new(64)).unwrap();
    world.verbs.destroy_id(id, world.now).unwrap();
    (srq, cq, device)
}

fn post(world: &mut AdapterTest, srq: SrqId, numbers: impl Iterator<Item = u64>) -> Result<(), TransportError> {
    let chain: Vec<_> = numbers.map(|wr_id| RecvWr { wr_id, sges: SgeList::default() }).collect();
    world.verbs.shared_receives().unwrap().post_srq_recv(srq, &chain).map_err(|error| error.error)
}

/// In a completion with an error, mlx5 leaves the opcode of an earlier completion (rdma-core, providers/mlx5/cq.c,
/// `mlx5_handle_error_cqe`). If both queues of a connection share a completion queue, only the `wr_id` shows if the failed work request was
/// a receive or a send.
#[test]
fn no_place_of_a_shared_queue_is_lost_to_an_opcode() {
    let mut world = AdapterTest::new(Personality::default());
    let (srq, cq, _) = shared(&mut world);
    let (id, device) = world.resolved(1);
    let end = world.connect(id, device, Some(srq), Some(cq));
    post(&mut world, srq, 0..4).unwrap();
    for round in 0..100 {
        let taken = world.fake.take_shared(&end.handle);
        // In each round a failed send completes before a failed receive. So a failed send is always in the first entry
        // of the provider's poll buffer, and a failed receive in the second. The device never writes the opcodes in
        // these entries.
        world.fake.complete(&end.handle, failed(77));
        world.fake.complete(&end.handle, failed(taken));
        let done = world.poll(cq);
        let kinds: Vec<_> = done.iter().map(|wc| (wc.wr_id, wc.opcode, wc.vendor_error)).collect();
        assert_eq!(kinds, [(77, WcOpcode::Send, 0x77), (round % 4, WcOpcode::Recv, 0x77)], "round {round}");
        let again = post(&mut world, srq, std::iter::once(done[1].wr_id));
        assert!(again.is_ok(), "round {round}: {again:?}");
        assert!(matches!(post(&mut world, srq, 0..1), Err(TransportError::QueueFull { .. })), "a send returned a slot");
    }
}

/// The providers of a process share a device's queue of asynchronous events. Each provider receives every event of the
/// device.
#[test]
fn every_provider_hears_of_a_device_whoever_reads_first() {
    let mut first = AdapterTest::new(Personality::default());
    let mut second = AdapterTest::on(first.fake);
    let ends = [first.pair().0, second.pair().0];
    first.fake.port_event(ev::IBV_EVENT_PORT_ERR, 1);
    let down = [DeviceEventKind::PortDown { port: 1 }];
    assert_eq!(first.device_events(), down);
    assert_eq!(second.device_events(), down);
    // An event of a queue pair is reported only by the provider that has the queue pair.
    let element = ibv_async_event_element_t { qp: ends[1].handle.qp };
    first.fake.async_event(ev::IBV_EVENT_QP_FATAL, element);
    assert!(first.events().is_empty());
    let events = second.events();
    let [CmEventKind::Disconnected(DisconnectCause::Path(why))] = &events[..] else { panic!("{events:?}") };
    assert_eq!(why, "fake0: the queue pair failed");
    first.fake.port_event(ev::IBV_EVENT_PORT_ACTIVE, 1);
    assert_eq!(second.device_events(), [DeviceEventKind::PortActive { port: 1 }]);
    assert_eq!(first.device_events(), [DeviceEventKind::PortActive { port: 1 }]);
}

/// If one of two ports is down, the other port still works. The provider does not query a port for each connect, because on mlx5 a query is
/// a command to the firmware (drivers/infiniband/hw/mlx5/mad.c, `mlx5_query_mad_ifc_port`).
#[test]
fn one_port_that_is_down_does_not_block_the_other() {
    let mut world = AdapterTest::new(Personality::default());
    world.pair();
    world.resolved(2);
    world.fake.noted();
    world.fake.port_event(ev::IBV_EVENT_PORT_ERR, 1);
    world.events();
    for _ in 0..10 {
        let (id, device) = world.resolved(2);
        let end = world.connect(id, device, None, None);
        world.verbs.disconnect(end.id, world.now).unwrap();
        world.verbs.destroy_id(end.id, world.now).unwrap();
    }
    let queries = world.fake.noted().iter().filter(|line| line.starts_with("query port")).count();
    assert_eq!(queries, 0, "the events say how a port is");
    let peer = "10.0.0.1:7".parse().unwrap();
    world.verbs.resolve(peer, &PathOptions::default(), world.now + Duration::from_secs(5)).unwrap();
    let events = world.events();
    let refused =
        matches!(&events[..], [CmEventKind::ConnectFailed(why)] if why.to_string().contains("port 1 of fake0 is down"));
    assert!(refused, "{events:?}");
}

/// Some drivers send no event when the carrier of a port changes (irdma: drivers/infiniband/hw/irdma/utils.c, `irdma_netdevice_event`), and
/// the event that a port is up may be lost. So a port that was down is queried again.
#[test]
fn a_port_that_comes_up_without_an_event_is_used_again() {
    let mut world = AdapterTest::new(Personality::default());
    world.fake.set_port(1, port_state::IBV_PORT_DOWN);
    let peer = "10.0.0.1:7".parse().unwrap();
    for _ in 0..2 {
        world.verbs.resolve(peer, &PathOptions::default(), world.now + Duration::from_secs(5)).unwrap();
        let events = world.events();
        let [CmEventKind::ConnectFailed(why)] = &events[..] else { panic!("{events:?}") };
        assert!(why.to_string().contains("port 1 of fake0 is down"), "{why}");
    }
    world.fake.set_port(1, port_state::IBV_PORT_ACTIVE);
    world.resolved(1);
    world.fake.noted();
    world.resolved(1);
    assert!(world.fake.noted().is_empty(), "a port that was up is not queried");
}

/// No connect request is sent through a port that has gone down since the address was resolved. On
/// rxe, such a request can break the connection manager of the device (`port.rs`).
#[test]
fn a_port_that_goes_down_before_the_connect_refuses_it() {
    let mut world = AdapterTest::new(Personality::default());
    let (id, device) = world.resolved(1);
    let cq = world.verbs.create_cq(device, &CqAttr::new(64)).unwrap();
    world.verbs.create_qp(id, &QpAttr::new(cq, cq, 4, 4)).unwrap();
    world.fake.port_event(ev::IBV_EVENT_PORT_ERR, 1);
    assert!(world.events().is_empty());
    world.fake.noted();
    let refused = world.verbs.connect(id, &ConnectParam::default()).unwrap_err().to_string();
    assert!(refused.contains("port 1 of fake0 is down"), "{refused}");
    assert_eq!(world.fake.noted(), ["query port 1"], "nothing is sent");
    // The failed call has changed nothing: the id connects when its port is up again.
    world.fake.port_event(ev::IBV_EVENT_PORT_ACTIVE, 1);
    assert!(world.events().is_empty());
    world.verbs.connect(id, &ConnectParam::default()).unwrap();
    let events = world.events();
    assert!(matches!(events[..], [CmEventKind::Established { .. }]), "{events:?}");
}

/// An id with a local address is bound to a device before the address of its peer is resolved. If
/// the device is removed in the meantime, the kernel reports only the removal, and no result of the
/// resolution (the kernel's drivers/infiniband/core/cma.c, `addr_handler`).
#[test]
fn a_device_that_is_removed_ends_the_resolving_from_its_address() {
    let mut world = AdapterTest::new(Personality::default());
    let source = Source::Address("10.0.0.1".parse().unwrap());
    let options = PathOptions { source, ..PathOptions::default() };
    let never = "10.0.0.98:7".parse().unwrap();
    let id = world.verbs.resolve(never, &options, world.now + Duration::from_secs(5)).unwrap();
    assert!(world.events().is_empty());
    let raw = world.verbs.hub.id(id).unwrap().raw.as_ptr();
    world.fake.id_event(raw, cm::RDMA_CM_EVENT_DEVICE_REMOVAL);
    let events = world.events();
    assert!(matches!(events[..], [CmEventKind::ConnectFailed(ConnectFailure::Unreachable(_))]), "{events:?}");
    world.fake.id_event(raw, cm::RDMA_CM_EVENT_DEVICE_REMOVAL);
    assert!(world.events().is_empty(), "told once");
    world.verbs.destroy_id(id, world.now).unwrap();
}

/// A device that has failed counts as removed, although the kernel still has it, and would not
/// report the removal to a new id. So the provider refuses new ids on the device until it has
/// closed the device. It closes the device after the program has destroyed the last id on it.
#[test]
fn no_new_id_is_on_a_device_that_has_failed() {
    let mut world = AdapterTest::new(Personality::default());
    let (end, failed) = world.pair();
    world.fake.async_event(ev::IBV_EVENT_DEVICE_FATAL, ibv_async_event_element_t { port_num: 0 });
    let events = world.events();
    assert!(matches!(events[..], [CmEventKind::DeviceRemoval]), "{events:?}");
    let address = "10.0.0.1:7".parse().unwrap();
    let refused = world.verbs.listen(address, &ListenParam::default()).unwrap_err();
    assert!(matches!(&refused, TransportError::NoDevice { reason } if reason == "fake0 was removed"), "{refused}");
    world.verbs.destroy_id(end.id, world.now).unwrap();
    let gone = world.verbs.path_of(end.qp);
    assert!(matches!(gone, Err(TransportError::Stale { object: "queue pair" })), "{gone:?}");
    let listener = world.verbs.listen(address, &ListenParam::default()).unwrap();
    let device = world.verbs.hub.id(listener).unwrap().device.unwrap();
    assert!(device != failed && world.verbs.device(device).is_some(), "{device:?}");
}

/// Several network interfaces may have the same link-local address. The id of a connection is bound
/// to the interface that the scope of the peer's address names.
#[test]
fn an_id_at_a_link_local_source_has_the_scope_of_the_peer() {
    let mut world = AdapterTest::new(Personality::default());
    let source = Source::Address("fe80::1".parse().unwrap());
    let options = PathOptions { source, ..PathOptions::default() };
    let peer = "[fe80::2%3]:7".parse().unwrap();
    let id = world.verbs.resolve(peer, &options, world.now + Duration::from_secs(5)).unwrap();
    assert_eq!(world.verbs.local_address(id), Some("[fe80::1%3]:0".parse().unwrap()));
    let events = world.events();
    assert!(matches!(events[..], [CmEventKind::Resolved { .. }]), "{events:?}");
}

/// Each id at a link-local address is bound with the scope of the address, also the provider's own id that watches the device.
#[test]
fn link_local_addresses_are_bound_with_their_scope() {
    let mut world = AdapterTest::new(Personality::default());
    let (with_port, local) = ("[fe80::1%3]:7".parse().unwrap(), "[fe80::1%3]:0".parse().unwrap());
    let listener = world.verbs.listen(with_port, &ListenParam::default()).unwrap();
    assert_eq!(world.verbs.local_address(listener), Some(with_port));
    let (id, ..) = world.verbs.datagrams().unwrap().bind_datagram(local).unwrap();
    assert_eq!(world.verbs.local_address(id), Some(local));
    let refused = world.verbs.listen("[fe80::1]:7".parse().unwrap(), &ListenParam::default());
    assert!(matches!(refused, Err(TransportError::Listen { .. })), "{refused:?}");
    // The program may name an address of this host without a scope.
    for own in super::ffi::local_addresses() {
        // On the fake, an address that ends in 0 is on no port.
        if matches!(own.ip(), IpAddr::V6(v6) if v6.is_unicast_link_local() && v6.octets()[15] > 0) {
            world.verbs.device_at(own.ip()).unwrap();
        }
    }
}

/// The ports of an adapter may have different MTUs. The MTU of the queue pair's own port limits its
/// datagrams, even if another port of the device was used first (`ibv_query_port`(3)).
#[test]
fn the_longest_datagram_is_that_of_its_port() {
    let mut world = AdapterTest::new(Personality::default());
    world.fake.set_mtu(1, 4);
    world.fake.set_mtu(2, 3);
    let memory = Arc::new(Memory::new(8192).unwrap());
    for (port, wanted) in [(1, 2048), (2, 1024), (3, 4096)] {
        let address = format!("10.0.0.{port}:0").parse().unwrap();
        let (id, device, longest) = world.verbs.datagrams().unwrap().bind_datagram(address).unwrap();
        assert_eq!(longest, wanted, "port {port}");
        let cq = world.verbs.create_cq(device, &CqAttr::new(64)).unwrap();
        let qp = world.verbs.create_qp(id, &QpAttr::new(cq, cq, 4, 4)).unwrap();
        let region = world.verbs.register(device, &memory, 0..memory.len(), Access::LOCAL_WRITE).unwrap();
        let address = world.verbs.datagrams().unwrap().create_address(device, &Route::default()).unwrap();
        let op = SendOp::Datagram(Destination { address, qp_number: 7, queue_key: QUEUE_KEY });
        let datagram = |len: u32| {
            let sges = SgeList::one(memory.sge(0, len as usize).keyed(region.local_key));
            [SendWr { wr_id: 1, op, sges, flags: SendFlags::SIGNALED }]
        };
        world.verbs.post_send(qp, &datagram(longest)).unwrap();
        let refused = world.verbs.post_send(qp, &datagram(longest + 1)).unwrap_err().error;
        assert!(matches!(refused, TransportError::OutOfRange { .. }), "{refused}");
    }
}

/// Queue pairs can be destroyed while their port is down. Only rxe is an exception.
#[test]
fn ids_are_destroyed_while_their_port_is_down() {
    let mut world = AdapterTest::new(Personality::default());
    let (end, _) = world.pair();
    world.fake.port_event(ev::IBV_EVENT_PORT_ERR, 1);
    world.events();
    world.verbs.disconnect(end.id, world.now).unwrap();
    world.verbs.destroy_id(end.id, world.now).unwrap();
    assert!(world.fake.qp(&end.handle, |qp| qp.destroyed));
}

/// If a bond fails over and its address moves to another device, the ids on the old device are notified (the kernel's
/// drivers/infiniband/core/cma.c, `cma_netdev_change`).
#[test]
fn an_address_that_moves_is_told() {
    let mut world = AdapterTest::new(Personality::default());
    let (end, _) = world.pair();
    let listener = world.verbs.listen("10.0.0.1:7".parse().unwrap(), &ListenParam::default()).unwrap();
    let raw = world.verbs.hub.id(listener).unwrap().raw.as_ptr();
    world.fake.cm_event(&end.handle, cm::RDMA_CM_EVENT_ADDR_CHANGE);
    world.fake.id_event(raw, cm::RDMA_CM_EVENT_ADDR_CHANGE);
    let first = world.verbs.next_cm_event(world.now).unwrap().unwrap();
    let second = world.verbs.next_cm_event(world.now).unwrap().unwrap();
    assert!(matches!((first.kind, second.kind), (CmEventKind::AddressChange, CmEventKind::AddressChange)));
    assert_eq!((first.id, second.id), (end.id, listener));
}

/// Since Linux 6.0 the connection manager may report an established connection as unreachable
/// (drivers/infiniband/core/cma.c, `cma_netevent_work_handler`). The provider reports this once, as the end of the
/// connection with a failure of its path.
#[test]
fn unreachable_after_it_was_established() {
    let mut world = AdapterTest::new(Personality::default());
    let (end, _) = world.pair();
    world.fake.cm_event(&end.handle, cm::RDMA_CM_EVENT_UNREACHABLE);
    world.fake.cm_event(&end.handle, cm::RDMA_CM_EVENT_UNREACHABLE);
    let events = world.events();
    let [CmEventKind::Disconnected(DisconnectCause::Path(why))] = &events[..] else { panic!("{events:?}") };
    assert!(why.starts_with("the peer became unreachable: "), "{why}");
}

/// A queue pair in the error state may hold a shared receive until the device reports the event
/// `IBV_EVENT_QP_LAST_WQE_REACHED` (InfiniBand Architecture Specification, volume 1, 10.2.9.2; SPDK waits for this
/// event in lib/nvmf/rdma.c).
#[test]
fn a_shared_receive_in_progress_comes_back() {
    let mut world = AdapterTest::new(Personality { holds_a_receive: true, ..Personality::default() });
    let (srq, cq, _) = shared(&mut world);
    post(&mut world, srq, 0..4).unwrap();
    for round in 0..8 {
        let (id, device) = world.resolved(1);
        let end = world.connect(id, device, Some(srq), Some(cq));
        if round % 2 == 0 {
            world.verbs.disconnect(end.id, world.now).unwrap();
        }
        world.verbs.destroy_id(end.id, world.now).unwrap();
        assert!(
            matches!(world.verbs.disconnect(end.id, world.now), Err(TransportError::Stale { .. })),
            "gone for the user"
        );
        assert!(!world.fake.qp(&end.handle, |qp| qp.destroyed), "it waits for the event");
        world.fake.last_receive(&end.handle);
        world.events();
        assert!(world.fake.qp(&end.handle, |qp| qp.destroyed));
        let done = world.poll(cq);
        assert_eq!((done.len(), done[0].status, done[0].opcode), (1, WcStatus::Flushed, WcOpcode::Recv));
        let again = post(&mut world, srq, std::iter::once(done[0].wr_id));
        assert!(again.is_ok(), "round {round}: {again:?}");
    }
    assert!(!world.fake.noted().iter().any(|line| line.contains("lost")));
    assert_eq!(world.verbs.next_deadline(), None);
}

/// Not every driver reports the event `IBV_EVENT_QP_LAST_WQE_REACHED`, so the provider waits for this event only until
/// a time limit.
#[test]
fn the_last_receive_is_not_waited_for_for_ever() {
    let mut world = AdapterTest::new(Personality::default());
    let (srq, cq, device) = shared(&mut world);
    let (id, _) = world.resolved(1);
    let end = world.connect(id, device, Some(srq), Some(cq));
    world.verbs.destroy_id(end.id, world.now).unwrap();
    // Until then, the queue pair may complete sends, although a poll finds the queue empty.
    let (id, _) = world.resolved(1);
    let room = world.verbs.create_cq(device, &CqAttr::new(8)).unwrap();
    let small = world.connect(id, device, Some(srq), Some(room));
    world.verbs.destroy_id(small.id, world.now).unwrap();
    assert!(world.poll(room).is_empty());
    let (id, _) = world.resolved(1);
    let attr = QpAttr { srq: Some(srq), ..QpAttr::new(room, room, 4, 4) };
    assert!(matches!(world.verbs.create_qp(id, &attr), Err(TransportError::OutOfRange { .. })));
    let until = world.verbs.next_deadline().unwrap();
    assert!(until - world.now <= Duration::from_secs(1));
    world.later(until - world.now);
    assert!(world.fake.qp(&end.handle, |qp| qp.destroyed) && world.fake.qp(&small.handle, |qp| qp.destroyed));
    assert!(world.poll(room).is_empty());
    world.verbs.create_qp(id, &attr).unwrap();
    // If the event `IBV_EVENT_QP_LAST_WQE_REACHED` arrives before `destroy_id`, then `destroy_id` destroys the queue
    // pair immediately.
    let (id, _) = world.resolved(1);
    let end = world.connect(id, device, Some(srq), Some(cq));
    world.verbs.disconnect(end.id, world.now).unwrap();
    world.fake.last_receive(&end.handle);
    assert_eq!(world.device_events(), [DeviceEventKind::LastReceive(end.qp)]);
    world.verbs.destroy_id(end.id, world.now).unwrap();
    assert!(world.fake.qp(&end.handle, |qp| qp.destroyed));
}

/// If the device is removed or the provider is dropped, queue pairs on a shared queue are destroyed without waiting for
/// the event `IBV_EVENT_QP_LAST_WQE_REACHED`.
#[test]
fn nothing_is_left_waiting_when_the_provider_goes() {
    let mut world = AdapterTest::new(Personality::default());
    let (srq, cq, device) = shared(&mut world);
    let (id, _) = world.resolved(1);
    let end = world.connect(id, device, Some(srq), Some(cq));
    world.verbs.destroy_id(end.id, world.now).unwrap();
    let fake = world.fake;
    drop(world);
    assert!(fake.qp(&end.handle, |qp| qp.destroyed));
}

/// If the device fails to create a queue pair, the entries that were reserved for it in its queues
/// become free. The entries of other queue pairs stay reserved.
#[test]
fn a_queue_pair_that_is_not_created_leaves_its_queues_free() {
    let mut world = AdapterTest::new(Personality::default());
    let (srq, cq, device) = shared(&mut world);
    let (id, _) = world.resolved(1);
    let refused = |world: &mut AdapterTest, id: CmId, cq: CqId| {
        world.fake.fail("create_qp", libc::ENOMEM);
        let attr = QpAttr { srq: Some(srq), ..QpAttr::new(cq, cq, 4, 4) };
        let why = world.verbs.create_qp(id, &attr).unwrap_err().to_string();
        assert!(why.starts_with("fake0: rdma_create_qp failed: "), "{why}");
        world.fake.fail("create_qp", 0);
    };
    refused(&mut world, id, cq);
    world.verbs.destroy_cq(cq).unwrap();
    // Eight entries are enough for the shared receives and the sends of one queue pair.
    let cq = world.verbs.create_cq(device, &CqAttr::new(8)).unwrap();
    refused(&mut world, id, cq);
    let end = world.connect(id, device, Some(srq), Some(cq));
    let cq = world.verbs.create_cq(device, &CqAttr::new(12)).unwrap();
    let (id, _) = world.resolved(1);
    let other = world.connect(id, device, Some(srq), Some(cq));
    let (id, _) = world.resolved(1);
    refused(&mut world, id, cq);
    for used in [end.cq, other.cq] {
        assert!(matches!(world.verbs.destroy_cq(used), Err(TransportError::InvalidState { .. })));
    }
    let destroyed = world.verbs.shared_receives().unwrap().destroy_srq(srq);
    assert!(matches!(destroyed, Err(TransportError::InvalidState { .. })), "{destroyed:?}");
}

/// If polling a completion queue fails, the connections that use the queue end, and no others.
#[test]
fn one_bad_queue_ends_its_connections_only() {
    let mut world = AdapterTest::new(Personality::default());
    let (bad, device) = world.pair();
    let (id, _) = world.resolved(1);
    let good = world.connect(id, device, None, None);
    world.verbs.req_notify(bad.cq, Notify::Any).unwrap();
    world.fake.break_queue(&bad.handle);
    assert!(world.poll(bad.cq).is_empty());
    let events: Vec<_> = std::iter::from_fn(|| world.verbs.next_cm_event(world.now).unwrap()).collect();
    assert_eq!((events.len(), events[0].id), (1, bad.id), "{events:?}");
    assert!(
        matches!(&events[0].kind, CmEventKind::Disconnected(DisconnectCause::Path(why)) if why.starts_with("fake0: "))
    );
    // The failure of the completion queue is reported only once. The failed queue can still be armed, polled and
    // destroyed.
    world.verbs.req_notify(bad.cq, Notify::Any).unwrap();
    assert!(world.poll(bad.cq).is_empty() && world.events().is_empty());
    world.verbs.destroy_id(bad.id, world.now).unwrap();
    world.verbs.destroy_cq(bad.cq).unwrap();
    world.fake.complete(&good.handle, failed(3));
    assert_eq!(world.poll(good.cq).len(), 1);
}

/// If a poll finds that a completion queue has failed, the connection-manager channel becomes
/// readable, so that a program that sleeps reads the ends of the connections. The poll still
/// returns the completions that it took before the failure.
#[test]
fn a_queue_that_fails_in_a_poll_wakes_the_program() {
    let mut world = AdapterTest::new(Personality::default());
    let (bad, _) = world.pair();
    let mut channel = Poll::new().unwrap();
    let fd = world.verbs.channel(Channel::ConnectionManager).unwrap();
    channel.registry().register(&mut SourceFd(&fd), Token(0), Interest::READABLE).unwrap();
    let mut edges = Events::with_capacity(1);
    assert!(world.events().is_empty());
    channel.poll(&mut edges, Some(Duration::ZERO)).unwrap();
    // The provider polls the queue for 32 completions at a time.
    for number in 0..32 {
        world.fake.complete(&bad.handle, failed(number));
    }
    world.fake.break_queue(&bad.handle);
    let mut out = Vec::new();
    let count = world.verbs.poll_cq(bad.cq, 64, &mut out).unwrap();
    assert_eq!((count, out.len()), (32, 32));
    assert_eq!(world.verbs.poll_cq(bad.cq, 64, &mut out).unwrap(), 0);
    channel.poll(&mut edges, Some(Duration::ZERO)).unwrap();
    assert!(!edges.is_empty(), "the failure makes an edge");
    let events = world.events();
    assert!(matches!(events[..], [CmEventKind::Disconnected(DisconnectCause::Path(_))]), "{events:?}");
}

/// On iWARP, a private thread calls `rdma_connect`. If the call fails, the connection manager
/// reports no event, so the provider must wake the program itself. The test starts more connects
/// than there are threads: the surplus ones wait for a thread, and then fail, too.
#[test]
fn a_connect_that_fails_on_a_thread_wakes_the_program() {
    const CONNECTS: usize = 200;
    let mut world = AdapterTest::new(Personality { iwarp: true, ..Personality::default() });
    let mut channel = Poll::new().unwrap();
    let fd = world.verbs.channel(Channel::ConnectionManager).unwrap();
    channel.registry().register(&mut SourceFd(&fd), Token(0), Interest::READABLE).unwrap();
    let ids: Vec<_> = (0..CONNECTS).map(|_| world.resolved(1)).collect();
    let cq = world.verbs.create_cq(ids[0].1, &CqAttr::new(8 * CONNECTS as u32)).unwrap();
    for &(id, _) in &ids {
        world.verbs.create_qp(id, &QpAttr::new(cq, cq, 4, 4)).unwrap();
    }
    let mut edges = Events::with_capacity(1);
    assert!(world.events().is_empty());
    channel.poll(&mut edges, Some(Duration::ZERO)).unwrap();
    world.fake.fail("connect", libc::ENETUNREACH);
    for &(id, _) in &ids {
        world.verbs.connect(id, &ConnectParam::default()).unwrap();
    }
    // The loop reads events only after an edge, as a program does.
    let mut failed = 0;
    until("each connect has failed", || {
        channel.poll(&mut edges, Some(Duration::from_millis(10))).unwrap();
        if !edges.is_empty() {
            let events = world.events();
            assert!(events.iter().all(|event| matches!(event, CmEventKind::ConnectFailed(_))), "{events:?}");
            failed += events.len();
        }
        (failed == CONNECTS).then_some(())
    });
}

/// On rxe, an id whose port is down is destroyed when the port is up again, or when the provider is
/// dropped (`port.rs`).
#[test]
fn on_rxe_an_id_waits_for_its_port_and_not_for_ever() {
    for comes_up in [true, false] {
        let mut world = AdapterTest::new(Personality { rxe: true, ..Personality::default() });
        let (pair, _) = world.pair();
        world.fake.port_event(ev::IBV_EVENT_PORT_ERR, 1);
        world.events();
        world.verbs.destroy_id(pair.id, world.now).unwrap();
        let fake = world.fake;
        assert!(!fake.qp(&pair.handle, |qp| qp.destroyed), "it waits for the port");
        if comes_up {
            fake.port_event(ev::IBV_EVENT_PORT_ACTIVE, 1);
            world.device_events();
            assert!(fake.qp(&pair.handle, |qp| qp.destroyed));
        } else {
            drop(world);
            until("a thread destroys it", || fake.qp(&pair.handle, |qp| qp.destroyed).then_some(()));
        }
    }
}

/// The failure of a queue pair, and the overrun of a completion queue, end only the connections that use the failed queue. The provider
/// reports the end of each of these connections once, with the reason. The completion queue is marked as failed.
#[test]
fn queues_that_fail_are_told_to_their_connections() {
    let mut world = AdapterTest::new(Personality::default());
    let (bad, device) = world.pair();
    let (id, _) = world.resolved(1);
    let full = world.connect(id, device, None, None);
    let (id, _) = world.resolved(1);
    let good = world.connect(id, device, None, None);
    world.fake.queue_pair_failed(&bad.handle);
    world.fake.overrun(&full.handle);
    world.fake.overrun(&full.handle);
    let events: Vec<_> = std::iter::from_fn(|| world.verbs.next_cm_event(world.now).unwrap()).collect();
    let reported: Vec<_> = events.iter().map(|event| (event.id, format!("{:?}", event.kind))).collect();
    assert_eq!(reported.len(), 2, "{reported:?}");
    for ((id, kind), (of, why)) in reported.iter().zip([(bad.id, "the queue pair failed"), (full.id, "overran")]) {
        assert!(*id == of && kind.contains("Path(\"fake0: ") && kind.contains(why), "{kind}");
    }
    let failed = [&bad, &full, &good].map(|end| world.verbs.adapter().unwrap().has_failed(end.cq));
    assert_eq!(failed, [false, true, false]);
}

/// The ends of many connections do not push the failure of their device out of the list of events that the program has not read.
#[test]
fn the_failure_of_a_device_is_told_whatever_follows() {
    let mut world = AdapterTest::new(Personality::default());
    let (end, _) = world.pair();
    world.fake.async_event(ev::IBV_EVENT_DEVICE_FATAL, ibv_async_event_element_t { port_num: 0 });
    for _ in 0..1100 {
        world.fake.last_receive(&end.handle);
    }
    let events = world.device_events();
    assert_eq!((events.len(), &events[..2]), (1000, &[DeviceEventKind::Fatal, DeviceEventKind::Removed][..]));
    assert!(events[2..].iter().all(|event| *event == DeviceEventKind::LastReceive(end.qp)));
}

/// If a completion channel cannot be read, the provider treats its device as failed. The call does
/// not fail, so a reactor can continue with other devices.
#[test]
fn a_bad_completion_channel_ends_the_device_only() {
    let mut world = AdapterTest::new(Personality::default());
    let (end, device) = world.pair();
    world.verbs.req_notify(end.cq, Notify::Any).unwrap();
    world.fake.break_channel();
    assert_eq!(world.verbs.next_completion_event(device).unwrap(), None);
    let events = world.events();
    assert!(matches!(events[..], [CmEventKind::DeviceRemoval]), "{events:?}");
    assert_eq!(world.device_events(), [DeviceEventKind::Fatal, DeviceEventKind::Removed]);
    assert_eq!(world.verbs.next_completion_event(device).unwrap(), None);
    world.verbs.destroy_id(end.id, world.now).unwrap();
    world.verbs.destroy_cq(end.cq).unwrap();
}

/// Registering gigabytes takes seconds on every adapter, because the kernel pins each page (`ib_umem_get`). Another thread can register the
/// memory while the event loop continues.
#[test]
fn the_loop_goes_on_while_another_thread_registers_memory() {
    let mut world = AdapterTest::new(Personality::default());
    let (end, device) = world.pair();
    let registrar = world.verbs.off_loop_registration().unwrap().registrar(device).unwrap();
    let memory = Arc::new(Memory::new(8192).unwrap());
    world.fake.hold_registrations(true);
    let shared = Arc::clone(&memory);
    #[expect(clippy::disallowed_methods, reason = "the thread is what this is about")]
    let thread = std::thread::spawn(move || registrar.register(&shared, 0..4096, Access::LOCAL_WRITE));
    until("the thread registers", || world.fake.is_registering().then_some(()));
    let (another, _) = world.pair();
    for (end, number) in [(end, 3), (another, 4)] {
        world.fake.complete(&end.handle, failed(number));
        assert_eq!(world.poll(end.cq).len(), 1);
    }
    assert!(!thread.is_finished());
    world.fake.hold_registrations(false);
    let region = world.verbs.off_loop_registration().unwrap().adopt(thread.join().unwrap().unwrap()).unwrap();
    world.verbs.deregister(region.id).unwrap();
    assert!(matches!(world.verbs.deregister(region.id), Err(TransportError::Stale { .. })));
}

/// A device may refuse to release a registration: with `EBUSY` while memory windows are bound to it, or with `EIO` if the device does not
/// respond. The registration is then still valid, so peers may write to the memory. Each call returns the error, and the memory is not
/// freed.
#[test]
fn a_registration_that_is_not_given_back_keeps_its_memory() {
    let mut world = AdapterTest::new(Personality::default());
    let (_, device) = world.pair();
    let memory = Arc::new(Memory::new(4096).unwrap());
    for error in [libc::EBUSY, libc::EIO] {
        let region = world.verbs.register(device, &memory, 0..memory.len(), Access::REMOTE_WRITE).unwrap();
        world.fake.fail("dereg_mr", error);
        for _ in 0..2 {
            let results = [world.verbs.remote_keys().unwrap().invalidate(region.id), world.verbs.deregister(region.id)];
            for result in results {
                let why = result.unwrap_err().to_string();
                assert!(why.starts_with("fake0: ibv_dereg_mr failed: "), "{why}");
            }
        }
        assert_eq!((Arc::strong_count(&memory), world.fake.registered().len()), (3, 2), "both registrations hold it");
        // When the device no longer refuses to release a registration, `invalidate` and `deregister` succeed.
        world.fake.fail("dereg_mr", 0);
        world.verbs.remote_keys().unwrap().invalidate(region.id).unwrap();
        assert_eq!((Arc::strong_count(&memory), world.fake.registered().len()), (2, 1), "the remote key is gone");
        world.verbs.deregister(region.id).unwrap();
        assert_eq!((Arc::strong_count(&memory), world.fake.registered().len()), (1, 0));
    }
    // If the device refuses to release a registration when the provider is dropped, the memory is not freed.
    let weak = Arc::downgrade(&memory);
    world.verbs.register(device, &memory, 0..memory.len(), Access::REMOTE_WRITE).unwrap();
    drop(memory);
    world.fake.fail("dereg_mr", libc::EBUSY);
    drop(world);
    assert_eq!(weak.strong_count(), 2);
}

/// After the kernel has torn down a removed device, the process has no objects on it any more, although each command
/// fails with `EIO` (`ib_uverbs_remove_one` in the kernel's drivers/infiniband/core/uverbs_main.c; rdma-core has
/// `RDMAV_ALLOW_DISASSOC_DESTROY` for this case). `EIO` from a device that was not removed is a failure.
#[test]
fn what_the_kernel_has_torn_down_counts_as_given_back() {
    let mut world = AdapterTest::new(Personality::default());
    let (end, device) = world.pair();
    let memory = Arc::new(Memory::new(4096).unwrap());
    let region = world.verbs.register(device, &memory, 0..memory.len(), Access::REMOTE_WRITE).unwrap();
    world.fake.fail("dereg_mr", libc::EIO);
    assert!(world.verbs.deregister(region.id).is_err(), "the device is there");
    world.fake.cm_event(&end.handle, cm::RDMA_CM_EVENT_DEVICE_REMOVAL);
    world.events();
    assert!(world.verbs.deregister(region.id).is_err(), "it is going, and not gone");
    world.fake.tear_down();
    world.fake.fail("dereg_mr", libc::EBUSY);
    assert!(world.verbs.deregister(region.id).is_err(), "that is not the error of a device that is gone");
    world.fake.fail("dereg_mr", libc::EIO);
    world.verbs.deregister(region.id).unwrap();
    world.verbs.destroy_id(end.id, world.now).unwrap();
    assert_eq!(Arc::strong_count(&memory), 1);
}

/// If the device does not destroy a queue pair, the queue pair may still use the memory that was posted to it. So `destroy_id` fails. The
/// entries that the queue pair has reserved in its completion queue and shared queue stay reserved, and these queues cannot be destroyed
/// before the queue pair.
#[test]
fn a_queue_pair_that_is_not_destroyed_is_reported() {
    let mut world = AdapterTest::new(Personality::default());
    let (srq, cq, device) = shared(&mut world);
    let (id, _) = world.resolved(1);
    let own = world.connect(id, device, None, None);
    // A queue pair on a shared queue is destroyed immediately if its last receive has already completed.
    let (id, _) = world.resolved(1);
    let on_shared = world.connect(id, device, Some(srq), Some(cq));
    world.verbs.disconnect(on_shared.id, world.now).unwrap();
    world.fake.last_receive(&on_shared.handle);
    world.events();
    world.fake.fail("destroy_qp", libc::EBUSY);
    for end in [own, on_shared] {
        let why = world.verbs.destroy_id(end.id, world.now).unwrap_err().to_string();
        assert!(why.starts_with("fake0: ibv_destroy_qp failed: "), "{why}");
        assert!(
            matches!(world.verbs.disconnect(end.id, world.now), Err(TransportError::Stale { .. })),
            "the id is gone"
        );
        world.verbs.destroy_id(end.id, world.now).unwrap();
    }
    assert!(matches!(world.verbs.destroy_cq(own.cq), Err(TransportError::InvalidState { .. })));
    assert!(matches!(
        world.verbs.shared_receives().unwrap().destroy_srq(srq),
        Err(TransportError::InvalidState { .. })
    ));
    let fake = world.fake;
    fake.noted();
    drop(world);
    let freed: Vec<_> = fake.noted().into_iter().filter(|line| line.contains("freed")).collect();
    assert!(freed.is_empty(), "what the queue pairs use is kept: {freed:?}");
}

/// If the device does not destroy a shared receive queue, it may still use the receives that are posted to the queue. So each `destroy_srq`
/// fails, and the device stays open. After the kernel has torn down the device, the queue counts as destroyed.
#[test]
fn a_shared_queue_that_is_not_destroyed_is_reported() {
    for (error, repeats) in [(libc::EBUSY, true), (libc::EIO, false)] {
        let mut world = AdapterTest::new(Personality::default());
        let (srq, cq, device) = shared(&mut world);
        let (id, _) = world.resolved(1);
        let end = world.connect(id, device, Some(srq), Some(cq));
        post(&mut world, srq, 0..4).unwrap();
        world.verbs.disconnect(end.id, world.now).unwrap();
        world.fake.last_receive(&end.handle);
        world.events();
        world.verbs.destroy_id(end.id, world.now).unwrap();
        world.fake.fail("destroy_srq", error);
        for _ in 0..2 {
            let why = world.verbs.shared_receives().unwrap().destroy_srq(srq).unwrap_err().to_string();
            assert!(why.starts_with("fake0: ibv_destroy_srq failed: "), "{why}");
        }
        assert!(
            matches!(world.verbs.destroy_cq(cq), Err(TransportError::InvalidState { .. })),
            "its completions go there"
        );
        world.fake.noted();
        if repeats {
            world.fake.fail("destroy_srq", 0);
        } else {
            world.fake.tear_down();
        }
        world.verbs.shared_receives().unwrap().destroy_srq(srq).unwrap();
        assert_eq!(world.fake.noted().contains(&"shared queue freed".to_owned()), repeats);
        world.verbs.destroy_cq(cq).unwrap();
        assert!(matches!(world.verbs.shared_receives().unwrap().destroy_srq(srq), Err(TransportError::Stale { .. })));
    }
    // If the device refuses to destroy a shared receive queue when the provider is dropped, the queue is not freed.
    let mut world = AdapterTest::new(Personality::default());
    shared(&mut world);
    world.fake.fail("destroy_srq", libc::EBUSY);
    let fake = world.fake;
    fake.noted();
    drop(world);
    let freed: Vec<_> = fake.noted().into_iter().filter(|line| line.contains("freed")).collect();
    assert!(freed.is_empty(), "what the queue uses is kept: {freed:?}");
}

/// If another thread has an `Arc` of an id, the id's queue pair is destroyed only when that thread drops the `Arc`. Until then, the queue
/// pair must be in the error state. If the device refuses the error state, the queue pair may still use the posted memory, so `destroy_id`
/// fails.
#[test]
fn an_error_state_that_is_refused_is_reported() {
    let mut world = AdapterTest::new(Personality::default());
    let (srq, cq, _) = shared(&mut world);
    let (id, device) = world.resolved(1);
    let end = world.connect(id, device, Some(srq), Some(cq));
    // Share the id, as a private thread that connects on iWARP does.
    let held = Arc::clone(&world.verbs.hub.id(end.id).unwrap().raw);
    world.fake.fail("modify_qp", libc::EIO);
    let why = world.verbs.destroy_id(end.id, world.now).unwrap_err().to_string();
    assert!(why.contains("ibv_modify_qp failed: "), "{why}");
    assert!(!world.fake.qp(&end.handle, |qp| qp.destroyed));
    drop(held);
    assert!(world.fake.qp(&end.handle, |qp| qp.destroyed), "destroyed by the last owner");
    // In the error state the queue pair accesses no memory, so `destroy_id` succeeds.
    world.fake.fail("modify_qp", 0);
    let (end, _) = world.pair();
    let held = Arc::clone(&world.verbs.hub.id(end.id).unwrap().raw);
    world.verbs.destroy_id(end.id, world.now).unwrap();
    assert!(world.fake.qp(&end.handle, |qp| qp.in_error && !qp.destroyed));
    drop(held);
}

/// One provider reads an event from the device and passes a copy to the other. The queue pair of the event may be destroyed before the
/// second provider processes the copy. A new queue pair of the second provider may have the same key, because every provider counts keys in
/// the same way. It may also have the same address. The event must not be reported for the new queue pair.
#[test]
fn a_late_event_is_not_taken_for_one_of_a_new_queue_pair() {
    let mut first = AdapterTest::new(Personality { reuses_memory: true, ..Personality::default() });
    let mut second = AdapterTest::on(first.fake);
    let (active, device) = first.resolved(1);
    let (waiting, same) = second.resolved(1);
    assert_eq!(active, waiting, "both number alike");
    let old = first.connect(active, device, None, None);
    let srq = first.verbs.shared_receives().unwrap().create_srq(device, &SrqAttr::new(4)).unwrap();
    first.fake.queue_pair_failed(&old.handle);
    first.fake.overrun(&old.handle);
    assert_eq!(first.events().len(), 2);
    first.verbs.destroy_id(old.id, first.now).unwrap();
    first.verbs.shared_receives().unwrap().destroy_srq(srq).unwrap();
    let new = second.connect(waiting, same, None, None);
    assert_eq!((new.qp, new.handle.qp), (old.qp, old.handle.qp), "the same key, at the same address");
    assert!(second.events().is_empty());
    second.fake.queue_pair_failed(&new.handle);
    assert_eq!(second.events().len(), 1, "its own events arrive");
}

/// When a removed device has no id any more, the library may close it. Other threads may then get its descriptor numbers for new files,
/// even for files with the same name, such as the files of a device that replaces the removed one. The provider must not close these files.
#[test]
fn files_of_others_are_left_alone_when_the_last_device_goes() {
    let mut world = AdapterTest::new(Personality { last_device: true, ..Personality::default() });
    let (end, _) = world.pair();
    world.fake.cm_event(&end.handle, cm::RDMA_CM_EVENT_DEVICE_REMOVAL);
    world.events();
    world.verbs.destroy_id(end.id, world.now).unwrap();
    drop(world.verbs);
    let file = std::fs::read_link(format!("/proc/self/fd/{}", world.fake.descriptor())).unwrap();
    assert!(file.to_string_lossy().contains("infiniband"), "{file:?} is where another thread has opened a file");
}

/// On kernels before 5.12, registered memory must be excluded from child processes before the first registration
/// (`ibv_fork_init`(3)). If `ibv_fork_init` fails, the provider works nevertheless.
#[test]
fn forks_are_provided_for_before_anything_is_registered() {
    for error in [0, libc::EINVAL, libc::ENOSYS] {
        let fake = Fake::new(Personality::default());
        fake.fail("fork_init", error);
        drop(Fake::provider());
        assert_eq!(fake.noted().first().map(String::as_str), Some("fork init"));
        AdapterTest::on(fake).pair();
    }
}

/// With mlx5, the queues in a thread domain have separate doorbells (rdma-core, providers/mlx5/verbs.c,
/// `mlx5_alloc_td`).
#[test]
fn queue_pairs_are_made_in_a_thread_domain_where_there_is_one() {
    let mut world = AdapterTest::new(Personality { thread_domains: true, ..Personality::default() });
    let (first, device) = world.pair();
    let (id, _) = world.resolved(1);
    let second = world.connect(id, device, None, None);
    assert_eq!(Fake::domain(&first.handle), Fake::domain(&second.handle));
    let fake = world.fake;
    fake.noted();
    drop(world);
    let freed: Vec<_> = fake.noted().into_iter().filter(|line| line.contains("freed")).collect();
    assert_eq!(freed, ["parent domain freed", "thread domain freed", "domain freed"]);
}

/// The settings of a program are passed to the library.
#[test]
fn settings_reach_the_library() {
    let mut world = AdapterTest::new(Personality::default());
    let options = PathOptions { type_of_service: Some(0x68), ack_timeout: Some(14), ..PathOptions::default() };
    let peer = "10.0.0.2:7".parse().unwrap();
    let id = world.verbs.resolve(peer, &options, world.now + Duration::from_secs(5)).unwrap();
    assert_eq!(world.fake.noted()[..2], ["option 0 = [104]", "option 3 = [14]"]);
    let events = world.events();
    let [CmEventKind::Resolved { device }] = events[..] else { panic!("{events:?}") };
    assert_eq!(world.verbs.device(device).unwrap().capabilities.completion_vectors, 2);
    let cq = world.verbs.create_cq(device, &CqAttr { vector: 1, ..CqAttr::new(16) }).unwrap();
    assert!(world.fake.noted().contains(&"queue on vector 1".to_owned()));
    assert!(matches!(
        world.verbs.create_cq(device, &CqAttr { vector: 2, ..CqAttr::new(16) }),
        Err(TransportError::OutOfRange { value: 2, .. })
    ));
    let attr =
        QpAttr { send_cq: cq, recv_cq: cq, max_send_wr: 4, max_recv_wr: 4, max_inline: 0, max_recv_sge: 0, srq: None };
    world.verbs.create_qp(id, &attr).unwrap();
    let retries = Retries { path: 3, receiver_not_ready: 5, min_rnr_timer: 8 };
    let wrong = ConnectParam { retries: Retries { path: 8, ..retries }, ..ConnectParam::default() };
    assert!(matches!(world.verbs.connect(id, &wrong), Err(TransportError::OutOfRange { value: 8, .. })));
    world.verbs.connect(id, &ConnectParam { retries, ..ConnectParam::default() }).unwrap();
    world.events();
    assert_eq!(world.fake.noted(), ["connect retry 3 rnr 5", "min rnr timer 8"]);
    let wrong = PathOptions { ack_timeout: Some(32), ..PathOptions::default() };
    let refused = world.verbs.resolve(peer, &wrong, world.now);
    assert!(matches!(refused, Err(TransportError::OutOfRange { value: 32, .. })), "{refused:?}");
}

/// rxe takes a retry count of 7 as no limit (`rxe_completer` in drivers/infiniband/sw/rxe/rxe_comp.c), so it gets 6.
#[test]
fn rxe_retransmits_with_a_limit() {
    for (rxe, path, used) in [(false, 7, 7), (true, 7, 6), (true, 6, 6), (true, 0, 0)] {
        let mut world = AdapterTest::new(Personality { rxe, ..Personality::default() });
        let (id, device) = world.resolved(1);
        let cq = world.verbs.create_cq(device, &CqAttr::new(64)).unwrap();
        world.verbs.create_qp(id, &QpAttr::new(cq, cq, 4, 4)).unwrap();
        world.fake.noted();
        let retries = Retries { path, ..Retries::default() };
        world.verbs.connect(id, &ConnectParam { retries, ..ConnectParam::default() }).unwrap();
        let notes = world.fake.noted();
        assert!(notes.contains(&format!("connect retry {used} rnr 7")), "{path}: {notes:?}");
    }
}

/// If no queue pair has the number in a completion, the program gets the completion with the handle `QpId(Key::NONE)`.
#[test]
fn a_completion_of_an_unknown_queue_pair_names_none() {
    let mut world = AdapterTest::new(Personality::default());
    let (end, _) = world.pair();
    let handle = end.handle;
    world.verbs.destroy_id(end.id, world.now).unwrap();
    world.fake.complete(&handle, failed(1));
    let done = world.poll(end.cq);
    assert_eq!(done[0].qp, QpId(Key::NONE));
}
