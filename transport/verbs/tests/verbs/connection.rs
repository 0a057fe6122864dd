//! Connections: resolution, refusals, repeated connects, and every address family.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rdma_transport::cm::{ConnectFailure, ListenParam, PathOptions};
use rdma_transport::{CmEvent, CmEventKind, CmId, DeviceId, Features, Provider, TransportError};
use rdma_transport_verbs::Reach;

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
    assert!(matches!(world.provider.listen(again, &ListenParam::default()), Err(TransportError::Listen { .. })));
}

fn no_route(kind: Kind) {
    let mut world = World::new();
    // The first address is in no network of this host. The second address is in such a network, but no host has it.
    let beside = kind.variable("ADDR").rsplit_once('.').map(|(net, _)| format!("{net}.77")).unwrap();
    for nowhere in ["192.0.2.1".to_string(), beside] {
        let peer = SocketAddr::new(nowhere.parse().unwrap(), 9);
        let id =
            world.provider.resolve(peer, &PathOptions::default(), Instant::now() + Duration::from_secs(2)).unwrap();
        match world.event() {
            CmEvent { id: of, kind: CmEventKind::ConnectFailed(ConnectFailure::Unreachable(why)) } if of == id => {
                println!("{peer}: {why}");
            }
            other => panic!("{other:?}"),
        }
        world.provider.destroy_id(id, Instant::now()).unwrap();
    }
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
    // A listener on the wildcard address is on every device.
    let listener = world.provider.listen("0.0.0.0:0".parse().unwrap(), &ListenParam::default()).unwrap();
    let port = world.provider.local_address(listener).unwrap().port();
    while world.event_within(Duration::from_millis(100)).is_some() {}
    world.pair(SocketAddr::new(kind.address(), port));
}

on_each_device! {
    open_and_reach
    no_route
    churn_leaves_nothing
    every_family
}
