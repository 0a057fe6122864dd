//! The removal of devices, and several providers in one process.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use rdma_transport::cm::ListenParam;
use rdma_transport::cq::Notify;
use rdma_transport::{CmEventKind, ConnectParam, DisconnectCause, Provider, WcStatus};

use crate::world::*;

/// Two providers of one process can connect with each other. They share the library's context of the device, and its
/// asynchronous events.
fn two_providers(kind: Kind) {
    let (mut first, mut second) = (World::new(), World::new());
    for (here, there) in [(&mut first, &mut second), (&mut World::new(), &mut World::new())] {
        let (_, to) = there.listen(kind.address());
        let (id, device) = here.resolved(to);
        let active = here.equip(id, device);
        here.provider.connect(id, &ConnectParam::default()).unwrap();
        let (id, _, device, _, _) = there.connect_request();
        let passive = there.equip(id, device);
        there.provider.accept(id, &ConnectParam::default(), Instant::now()).unwrap();
        assert!(matches!(here.news().kind, CmEventKind::Established { .. }));
        assert!(matches!(there.news().kind, CmEventKind::Established { .. }));
        here.provider.post_send(active.qp, &[active.send(DEPTH as usize, 5)]).unwrap();
        assert_eq!(here.completion(active.cq).status, WcStatus::Success);
        assert_eq!(there.completion(passive.cq).byte_len, 5);
        here.drop_end(&active);
        there.disconnected(passive.id, &DisconnectCause::Peer);
    }
}

/// Two providers lose the same device. The kernel finishes the removal when both providers have released their objects. Then the other
/// device, which neither provider has used, is removed.
fn removal_under_two_providers(kind: Kind) {
    let mut worlds = [World::new(), World::new()];
    let other = if kind == Kind::Siw { Kind::Rxe } else { Kind::Siw };
    for world in &mut worlds {
        let (listener, to) = world.listen(kind.address());
        let (active, passive) = world.pair(to);
        for id in [active.id, passive.id, listener] {
            world.provider.destroy_id(id, Instant::now()).unwrap();
        }
        while world.provider.next_cm_event(Instant::now()).unwrap().is_some() {}
    }
    for kind in [kind, other] {
        let device = kind.variable("DEV");
        let start = Instant::now();
        let mut removal = Command::new("rdma").args(["link", "del", &device]).spawn().unwrap();
        while removal.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < TIMEOUT, "the device is not released");
            for world in &mut worlds {
                let _ = world.event_within(Duration::from_millis(20));
            }
        }
        println!("{device}: removed after {:?}", start.elapsed());
    }
    for kind in [kind, other] {
        add_device(kind);
    }
}

fn add_device(kind: Kind) {
    let (device, netdev) = (kind.variable("DEV"), kind.variable("NETDEV"));
    let add = ["link", "add", &device, "type", &kind.name().to_lowercase(), "netdev", &netdev];
    assert!(Command::new("rdma").args(add).status().unwrap().success());
    wait_until_active(&device);
}

fn removal_with_everything_open(kind: Kind) {
    let device = kind.variable("DEV");
    let mut world = World::new();
    let wildcard = world.provider.listen("0.0.0.0:0".parse().unwrap(), &ListenParam::default()).unwrap();
    let port = world.provider.local_address(wildcard).unwrap().port();
    for round in 0..3 {
        let (listener, to) = world.listen(kind.address());
        let mut expected = vec![listener];
        let mut ends = Vec::new();
        if round < 2 {
            let (active, passive) = world.pair(to);
            expected.extend([active.id, passive.id]);
            ends = vec![active, passive];
        } else {
            // Destroy all ids, those of a new connection included, so that only regions and completion queues remain on
            // the device.
            let (active, passive) = world.pair(to);
            for id in [active.id, passive.id, listener] {
                world.provider.destroy_id(id, Instant::now()).unwrap();
            }
            expected.clear();
        }
        let start = Instant::now();
        let mut removal = Command::new("rdma").args(["link", "del", &device]).spawn().unwrap();
        while !expected.is_empty() {
            let event = world.event();
            match event.kind {
                CmEventKind::DeviceRemoval => expected.retain(|&id| id != event.id),
                CmEventKind::Disconnected(_) | CmEventKind::TimewaitExit => {}
                other => panic!("{other:?}"),
            }
        }
        println!("{device}: all ids have received the removal after {:?}", start.elapsed());
        for end in &ends {
            quick("disconnect", || world.provider.disconnect(end.id, Instant::now())).unwrap();
            quick("destroy_id", || world.provider.destroy_id(end.id, Instant::now()).unwrap());
        }
        if round < 2 {
            quick("destroy_id", || world.provider.destroy_id(listener, Instant::now()).unwrap());
        }
        // The removal finishes while this process runs, because the loop drives the provider until it has released the
        // device.
        while removal.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < TIMEOUT, "the device is not released");
            let _ = world.event_within(Duration::from_millis(20));
        }
        println!("{device}: removed after {:?}", start.elapsed());
        for end in &ends {
            // The handles of objects on the removed device are still valid: polls return nothing, and destroying the objects succeeds.
            assert!(world.poll(end.cq).is_empty());
            world.provider.req_notify(end.cq, Notify::Any).unwrap();
            world.provider.destroy_cq(end.cq).unwrap();
            world.provider.deregister(end.region.id).unwrap();
        }
        world.memories.clear();
        world.watched.clear();
        add_device(kind);
        // The listener on the wildcard address also accepts connections on the device that was added again.
        let (active, passive) = world.pair(SocketAddr::new(kind.address(), port));
        world.drop_end(&active);
        world.drop_end(&passive);
        while world.event_within(Duration::from_millis(100)).is_some() {}
    }
}

on_each_device! {
    two_providers
    removal_under_two_providers
    removal_with_everything_open
}
