//! Two providers as one: the devices are a fake library's, and the embedded provider is on the loopback.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};

use super::Dual;
use super::ids::{Outer, Side};
use crate::cm::{CmEventKind, ConnectFailure, ConnectParam, PathOptions, Source};
use crate::handle::{CqId, DeviceId, QpId};
use crate::iwarp::{Iwarp, IwarpConfig, TcpNet};
use crate::mem::Memory;
use crate::mr::Access;
use crate::provider::Provider;
use crate::qp::QpAttr;
use crate::slab::Key;
use crate::verbs::fake::{Fake, Personality};
use crate::wr::{RecvWr, SendFlags, SendOp, SendWr, SgeList};
use crate::{CmEvent, CmId, Drive, Error};

const PATIENCE: Duration = Duration::from_millis(200);
/// A real peer on the loopback answers within this time, however busy the machine is.
const LIMIT: Duration = Duration::from_secs(30);

fn embedded() -> Iwarp<TcpNet> {
    let mut seed = 0_u8;
    let entropy = Box::new(move |bytes: &mut [u8]| {
        bytes.iter_mut().for_each(|byte| {
            seed = seed.wrapping_mul(5).wrapping_add(77);
            *byte = seed;
        });
    });
    Iwarp::new(IwarpConfig::default(), TcpNet::new().unwrap(), entropy).unwrap()
}

struct World {
    fake: &'static Fake,
    dual: Dual<Iwarp<TcpNet>>,
    now: Instant,
}

impl World {
    fn new() -> Self {
        let fake = Fake::new(Personality::default());
        #[expect(clippy::disallowed_methods, reason = "virtual time needs a beginning")]
        let now = Instant::now();
        let mut dual = Dual::new(Fake::provider(), embedded(), PATIENCE).unwrap();
        dual.progress(now, Drive::Full);
        Self { fake, dual, now }
    }

    fn events(&mut self) -> Vec<CmEvent> {
        std::iter::from_fn(|| self.dual.next_cm_event(self.now).unwrap()).collect()
    }

    fn resolve(&mut self, peer: &str) -> CmId {
        self.dual.resolve(peer.parse().unwrap(), self.now + LIMIT).unwrap()
    }

    /// Waits for a real peer.
    fn await_event(&mut self) -> CmEvent {
        for _ in 0..LIMIT.as_millis() {
            self.dual.progress(self.now, Drive::Full);
            if let Some(event) = self.dual.next_cm_event(self.now).unwrap() {
                return event;
            }
            #[expect(clippy::disallowed_methods, reason = "the peer is real")]
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("no event");
    }

    /// Makes the queue pair of an id, with a queue for both directions.
    fn equip(&mut self, id: CmId, device: DeviceId) -> (QpId, CqId) {
        let cq = self.dual.create_cq(device, 64).unwrap();
        let attr = QpAttr { send_cq: cq, recv_cq: cq, max_send_wr: 4, max_recv_wr: 4, max_inline: 0, max_recv_sge: 0 };
        (self.dual.create_qp(id, &attr).unwrap(), cq)
    }
}

fn side(id: CmId) -> Side {
    id.inner().0
}

/// A port that nobody has in TCP.
fn free_port() -> u16 {
    TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn ids_of_two_providers_differ_in_one_bit() {
    let key = Key::new(7, 3);
    for side in [Side::Devices, Side::Embedded] {
        assert_eq!(QpId(key).outer(side).inner(), (side, QpId(key)));
    }
    assert_ne!(QpId(key).outer(Side::Devices), QpId(key).outer(Side::Embedded));
    // The name of no queue pair stays one.
    let none = QpId(Key::NONE);
    assert_eq!(none.outer(Side::Devices).0.generation(), 0);
}

/// H10: one listener on an unspecified address takes a client over the device and one over TCP, which are told from each other by
/// their devices only.
#[test]
fn a_wildcard_listener_takes_clients_of_both() {
    let mut world = World::new();
    let address = SocketAddr::from(([0, 0, 0, 0], free_port()));
    let listener = world.dual.listen(address, 16).unwrap();
    assert_eq!((side(listener), world.dual.name()), (Side::Devices, "verbs+iwarp"));
    // Over TCP, from another provider.
    let mut client = embedded();
    let loopback = SocketAddr::from(([127, 0, 0, 1], address.port()));
    let id = client.resolve(loopback, world.now + LIMIT).unwrap();
    let event = client.next_cm_event(world.now).unwrap().unwrap();
    let CmEventKind::Resolved { device } = event.kind else { panic!("{event:?}") };
    let cq = client.create_cq(device, 64).unwrap();
    let attr = QpAttr { send_cq: cq, recv_cq: cq, max_send_wr: 4, max_recv_wr: 4, max_inline: 0, max_recv_sge: 0 };
    let client_qp = client.create_qp(id, &attr).unwrap();
    client.connect(id, &ConnectParam { private_data: b"by TCP", ..ConnectParam::default() }).unwrap();
    let mut connected = None;
    let tcp = loop {
        client.progress(world.now, Drive::Full);
        assert!(client.next_cm_event(world.now).unwrap().is_none());
        world.dual.progress(world.now, Drive::Full);
        match world.dual.next_cm_event(world.now).unwrap() {
            Some(event) => break event,
            #[expect(clippy::disallowed_methods, reason = "the peer is real")]
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    let CmEventKind::ConnectRequest { listener: of, device: over_tcp, private_data, .. } = &tcp.kind else {
        panic!("{tcp:?}")
    };
    assert_eq!((*of, &private_data[..], side(tcp.id)), (listener, &b"by TCP"[..], Side::Embedded));
    assert_eq!(world.dual.device(*over_tcp).unwrap().name, "iwarp0");
    // Over the device.
    world.fake.request(Fake::id_of(&world.dual.devices, listener.inner().1), 1);
    let [rdma] = &world.events()[..] else { panic!("one request") };
    let CmEventKind::ConnectRequest { listener: of, device: over_rdma, .. } = &rdma.kind else { panic!("{rdma:?}") };
    assert_eq!((*of, side(rdma.id)), (listener, Side::Devices));
    assert_eq!(world.dual.device(*over_rdma).unwrap().name, "fake0");
    assert_ne!(over_tcp, over_rdma);
    // Both are accepted.
    let (rdma_qp, _) = world.equip(rdma.id, *over_rdma);
    let (tcp_qp, tcp_cq) = world.equip(tcp.id, *over_tcp);
    assert_ne!(rdma_qp, tcp_qp);
    let memory = Arc::new(Memory::new(4096).unwrap());
    let region = world.dual.register(*over_tcp, &memory, Access::LOCAL_WRITE).unwrap();
    let sges = SgeList::one(memory.sge(0, 64).with_key(region.local_key));
    world.dual.post_recv(tcp_qp, &[RecvWr { wr_id: 5, sges }]).unwrap();
    for id in [rdma.id, tcp.id] {
        world.dual.accept(id, &ConnectParam::default(), world.now).unwrap();
    }
    let up: Vec<_> = world.events().into_iter().map(|event| event.id).collect();
    assert!(up.contains(&rdma.id), "{up:?}");
    // A message over TCP ends in a completion that names the queue pair by its id of both.
    let sends = Arc::new(Memory::new(4096).unwrap());
    let source = client.register(DeviceId(0), &sends, Access::empty()).unwrap();
    let mut done = Vec::new();
    while done.is_empty() {
        client.progress(world.now, Drive::Full);
        if let Some(event) = client.next_cm_event(world.now).unwrap() {
            assert!(matches!(event.kind, CmEventKind::Established { .. }), "{event:?}");
            connected = Some(event);
            let sges = SgeList::one(sends.sge(0, 16).with_key(source.local_key));
            let wr = SendWr { wr_id: 1, op: SendOp::Send, sges, flags: SendFlags::SIGNALED };
            client.post_send(client_qp, &[wr]).unwrap();
        }
        world.dual.progress(world.now, Drive::Full);
        world.dual.poll_cq(tcp_cq, 16, &mut done).unwrap();
        #[expect(clippy::disallowed_methods, reason = "the peer is real")]
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(connected.is_some());
    assert_eq!((done[0].wr_id, done[0].qp, done[0].byte_len), (5, tcp_qp, 16));
    // Closing the listener closes it on both.
    world.dual.destroy_id(listener, world.now);
    TcpListener::bind(address).unwrap();
    assert_eq!(world.dual.local_address(listener), None);
}

/// An iWARP device has the port of TCP for itself. Then the devices listen alone.
#[test]
fn a_port_that_is_taken_in_tcp_leaves_the_devices_alone() {
    let mut world = World::new();
    let other = TcpListener::bind("0.0.0.0:0").unwrap();
    let listener = world.dual.listen(other.local_addr().unwrap(), 16).unwrap();
    assert_eq!((side(listener), world.dual.name()), (Side::Devices, "verbs"));
    world.dual.destroy_id(listener, world.now);
}

#[test]
fn each_address_is_listened_on_where_it_is() {
    let mut world = World::new();
    // The fake's addresses end in the number of a port, and this one in none.
    let nowhere = world.dual.listen("127.0.0.0:0".parse().unwrap(), 16);
    let nowhere = nowhere.unwrap();
    assert_eq!((side(nowhere), world.dual.name()), (Side::Embedded, "iwarp"));
    let port = free_port();
    let on_device = world.dual.listen(SocketAddr::from(([10, 0, 0, 1], port)), 16).unwrap();
    assert_eq!(side(on_device), Side::Devices);
    assert!(TcpListener::bind(SocketAddr::from(([0, 0, 0, 0], port))).is_ok(), "the embedded provider is left out");
}

#[test]
fn a_device_that_resolves_carries_the_connection() {
    let mut world = World::new();
    let id = world.resolve("10.0.0.1:7");
    let events = world.events();
    assert!(
        matches!(&events[..], [CmEvent { id: of, kind: CmEventKind::Resolved { device: DeviceId(1) } }] if *of == id)
    );
    assert_eq!((world.dual.name(), world.dual.next_deadline()), ("verbs", None));
    // Its queue pair is the device's, and a completion queue of the other provider is not taken for one of the device.
    let foreign = world.dual.create_cq(DeviceId(0), 16).unwrap();
    let attr =
        QpAttr { send_cq: foreign, recv_cq: foreign, max_send_wr: 4, max_recv_wr: 4, max_inline: 0, max_recv_sge: 0 };
    assert!(matches!(world.dual.create_qp(id, &attr), Err(Error::Stale { .. })));
    let (qp, cq) = world.equip(id, DeviceId(1));
    assert_eq!((qp.inner().0, cq.inner().0), (Side::Devices, Side::Devices));
    world.dual.connect(id, &ConnectParam::default()).unwrap();
    assert!(matches!(world.events()[..], [CmEvent { kind: CmEventKind::Established { .. }, .. }]));
    // What fails from here on is a failure.
    world.dual.destroy_id(id, world.now);
}

/// What no device leads to goes over TCP at once, under another id.
#[test]
fn an_address_that_no_device_leads_to_goes_over_tcp() {
    let mut world = World::new();
    let id = world.resolve("10.0.0.99:7");
    let events = world.events();
    let [
        CmEvent { id: from, kind: CmEventKind::Moved { to } },
        CmEvent { id: of, kind: CmEventKind::Resolved { device } },
    ] = &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!((*from, of, *device, side(*to)), (id, to, DeviceId(0), Side::Embedded));
    assert_eq!(world.dual.name(), "iwarp");
    world.dual.destroy_id(id, world.now);
    world.dual.destroy_id(*to, world.now);
}

/// What does not resolve in time goes over TCP, and makes the channel readable for that.
#[test]
fn an_address_that_does_not_resolve_in_time_goes_over_tcp() {
    let mut world = World::new();
    let [late, given_up] = ["10.0.0.98:7", "10.0.1.98:7"].map(|peer| world.resolve(peer));
    assert_eq!(world.dual.next_deadline(), Some(world.now), "the time is to be told");
    world.now += Duration::from_millis(1);
    world.dual.progress(world.now, Drive::Full);
    let until = world.now + PATIENCE;
    assert_eq!(world.dual.next_deadline(), Some(until));
    assert!(world.events().is_empty());
    world.dual.destroy_id(given_up, world.now);
    let mut poll = Poll::new().unwrap();
    let mut edges = Events::with_capacity(4);
    // SAFETY: the provider, which owns the descriptor, outlives the use.
    let channel = unsafe { BorrowedFd::borrow_raw(world.dual.cm_channel()) };
    let fd = std::os::fd::AsRawFd::as_raw_fd(&channel);
    poll.registry().register(&mut SourceFd(&fd), Token(0), Interest::READABLE).unwrap();
    poll.poll(&mut edges, Some(Duration::ZERO)).unwrap();
    world.now = until;
    world.dual.progress(world.now, Drive::Full);
    poll.poll(&mut edges, Some(Duration::ZERO)).unwrap();
    assert!(!edges.is_empty(), "an edge for the event");
    let events = world.events();
    let [CmEvent { id, kind: CmEventKind::Moved { to } }, CmEvent { kind: CmEventKind::Resolved { .. }, .. }] =
        &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!((*id, side(*to)), (late, Side::Embedded));
    world.dual.destroy_id(late, world.now);
    // The deadline that is left is the whole attempt's.
    assert_eq!(world.dual.next_deadline(), Some(world.now - PATIENCE - Duration::from_millis(1) + LIMIT));
}

#[test]
fn the_loopback_is_left_to_the_embedded_provider_and_a_source_to_the_devices() {
    let mut world = World::new();
    let port = free_port();
    let id = world.resolve(&format!("127.0.0.1:{port}"));
    assert_eq!(side(id), Side::Embedded);
    assert!(matches!(world.await_event().kind, CmEventKind::Resolved { device: DeviceId(0) }));
    let (qp, _) = world.equip(id, DeviceId(0));
    assert_eq!(qp.inner().0, Side::Embedded);
    world.dual.connect(id, &ConnectParam::default()).unwrap();
    assert!(matches!(world.await_event().kind, CmEventKind::ConnectFailed(ConnectFailure::Refused)));
    // The embedded provider cannot choose a source, so that there is nothing to fall back to.
    let options = PathOptions { source: Source::Address("10.0.0.1".parse().unwrap()), ..PathOptions::default() };
    let id = world.dual.resolve_with("10.0.0.99:7".parse().unwrap(), &options, world.now + LIMIT).unwrap();
    let events = world.events();
    let [CmEvent { id: of, kind: CmEventKind::ConnectFailed(ConnectFailure::Unreachable(_)) }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(*of, id);
}

/// A connect request goes to the provider that it came from, whichever reactor takes it.
#[test]
fn a_request_that_is_handed_over_stays_with_its_provider() {
    let mut first = World::new();
    let mut second = World::new();
    let address = SocketAddr::from(([0, 0, 0, 0], free_port()));
    let listener = first.dual.listen(address, 16).unwrap();
    let mut client = embedded();
    let id = client.resolve(SocketAddr::from(([127, 0, 0, 1], address.port())), first.now + LIMIT).unwrap();
    client.next_cm_event(first.now).unwrap().unwrap();
    let cq = client.create_cq(DeviceId(0), 64).unwrap();
    let attr = QpAttr { send_cq: cq, recv_cq: cq, max_send_wr: 4, max_recv_wr: 4, max_inline: 0, max_recv_sge: 0 };
    client.create_qp(id, &attr).unwrap();
    client.connect(id, &ConnectParam::default()).unwrap();
    let request = loop {
        client.progress(first.now, Drive::Full);
        client.next_cm_event(first.now).unwrap();
        first.dual.progress(first.now, Drive::Full);
        match first.dual.next_cm_event(first.now).unwrap() {
            Some(event) => break event,
            #[expect(clippy::disallowed_methods, reason = "the peer is real")]
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    let detached = first.dual.detach(request.id).unwrap();
    assert_eq!(detached.provider(), "iwarp");
    let (taken, device) = second.dual.attach(detached, second.now).unwrap();
    assert_eq!((side(taken), device), (Side::Embedded, DeviceId(0)));
    second.dual.reject(taken, &[], second.now).unwrap();
    first.dual.destroy_id(listener, first.now);
}

/// A call with a default in the trait that is not forwarded would be refused as unknown.
#[test]
fn every_call_is_forwarded() {
    let calls = |text: &'static str, from: &str| -> BTreeSet<&'static str> {
        let body = &text[text.find(from).unwrap()..];
        body.split("\n    fn ").skip(1).filter_map(|rest| rest.split('(').next()).collect()
    };
    let promised = calls(include_str!("../provider.rs"), "pub unsafe trait Provider");
    let forwarded = calls(include_str!("provider.rs"), "unsafe impl<E: Provider> Provider");
    assert!(promised.len() > 50, "{promised:?}");
    assert_eq!(promised.difference(&forwarded).collect::<Vec<_>>(), [&""; 0]);
}

#[test]
fn memory_is_registered_where_an_address_is() {
    let mut world = World::new();
    let memory = Arc::new(Memory::new(4096).unwrap());
    for (address, device) in [("10.0.0.1", DeviceId(1)), ("127.0.0.0", DeviceId(0))] {
        assert_eq!(world.dual.device_at(address.parse().unwrap()).unwrap(), device);
        let region = world.dual.register(device, &memory, Access::LOCAL_WRITE).unwrap();
        world.dual.deregister(region.id).unwrap();
        assert!(world.dual.deregister(region.id).is_err());
    }
}
