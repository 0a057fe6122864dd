//! Ports that go down and up again, and the events of devices.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use rdma_transport::DeviceEventKind;
use rdma_transport_verbs::Reach;

use crate::world::*;

fn link(kind: Kind, state: &str) {
    let set = Command::new("ip").args(["link", "set", &kind.variable("NETDEV"), state]).status().unwrap();
    assert!(set.success());
}

fn why_not(reach: Reach) -> String {
    match reach {
        Reach::No { reason } => reason,
        Reach::Yes { device } => panic!("{device}"),
    }
}

/// A port that is down is not used: `serves` and `reaches` return the reason, and the device reports the changes of the port as events.
fn a_port_that_is_down_is_not_chosen(kind: Kind) {
    let mut world = World::new();
    let device = kind.variable("DEV");
    let here = SocketAddr::new(kind.address(), 0);
    assert_eq!(world.provider.serves(here).unwrap(), Reach::Yes { device: device.clone() });
    link(kind, "down");
    let port = world.device_event(|event| match event.kind {
        DeviceEventKind::PortDown { port } => Some(port),
        _ => None,
    });
    assert_eq!(port, 1);
    let reason = why_not(world.provider.serves(here).unwrap());
    assert!(reason.contains(&device) && reason.contains("down"), "{reason}");
    // On some systems the address does not resolve while the port is down. `reaches` returns `No` whether it resolves
    // or not.
    let reason = why_not(world.provider.reaches(here, Duration::from_secs(1)).unwrap());
    println!("{reason}");
    // A listener on all devices can still use the other device.
    let other = if kind == Kind::Siw { Kind::Rxe } else { Kind::Siw };
    let any = "0.0.0.0:0".parse().unwrap();
    assert_eq!(world.provider.serves(any).unwrap(), Reach::Yes { device: other.variable("DEV") });
    link(other, "down");
    let reason = why_not(world.provider.serves(any).unwrap());
    assert!(reason.contains("down"), "{reason}");
    for kind in [kind, other] {
        link(kind, "up");
        wait_until_active(&kind.variable("DEV"));
    }
    world.device_event(|event| matches!(event.kind, DeviceEventKind::PortActive { port: 1 }).then_some(()));
    assert_eq!(world.provider.serves(here).unwrap(), Reach::Yes { device });
    // The kernel has removed the IPv6 addresses when the link went down. Add them again.
    restore_addresses(kind);
    restore_addresses(other);
}

/// The providers of a process share a device's queue of asynchronous events. Each provider receives every change of the
/// port.
fn every_provider_hears_of_its_port(kind: Kind) {
    let mut worlds = [World::new(), World::new(), World::new()];
    let here = SocketAddr::new(kind.address(), 0);
    for world in &mut worlds {
        assert!(matches!(world.provider.serves(here).unwrap(), Reach::Yes { .. }));
    }
    for round in 0..4 {
        link(kind, "down");
        for world in &mut worlds {
            world.device_event(|event| matches!(event.kind, DeviceEventKind::PortDown { port: 1 }).then_some(()));
        }
        link(kind, "up");
        wait_until_active(&kind.variable("DEV"));
        for world in &mut worlds {
            world.device_event(|event| matches!(event.kind, DeviceEventKind::PortActive { port: 1 }).then_some(()));
        }
        println!("round {round}: all providers have received the events");
    }
    restore_addresses(kind);
}

/// Adds the IPv6 addresses of a network device again. The kernel removes them when the link goes down.
fn restore_addresses(kind: Kind) {
    for which in ["ADDR6", "PEER6"] {
        let address = format!("{}/64", kind.variable(which));
        let netdev = kind.variable("NETDEV");
        let args = ["-6", "address", "replace", &address, "dev", &netdev, "nodad"];
        assert!(Command::new("ip").args(args).status().unwrap().success());
    }
}

on_each_device! {
    a_port_that_is_down_is_not_chosen
    every_provider_hears_of_its_port
}
