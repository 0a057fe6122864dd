//! Bonds of network devices. If a bond fails over to its other network device, each id on the bond receives
//! [`CmEventKind::AddressChange`].

use std::process::Command;
use std::time::{Duration, Instant};

use rdma_transport::{CmEventKind, Provider};

use crate::world::*;

fn run(line: &str) {
    let mut words = line.split(' ');
    let done = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
}

/// A bond of two network devices with an RDMA device on it.
struct Bond {
    device: String,
    address: std::net::IpAddr,
}

impl Bond {
    fn new(kind: Kind) -> Self {
        let device = format!("{}9", kind.name().to_lowercase());
        run("modprobe bonding");
        run("ip link add bond9 type bond mode active-backup fail_over_mac active miimon 0");
        for slave in ["f0", "g0"] {
            run(&format!("ip link add {slave} type veth peer name {slave}p"));
            run(&format!("ip link set {slave}p up"));
            run(&format!("ip link set {slave} master bond9"));
        }
        run("ip link set bond9 up");
        run("ip addr add 10.77.9.1/24 dev bond9");
        run(&format!("rdma link add {device} type {} netdev bond9", kind.name().to_lowercase()));
        wait_until_active(&device);
        Self { device, address: "10.77.9.1".parse().unwrap() }
    }
}

impl Bond {
    /// Removes the network devices. The kernel waits until the provider has released the RDMA device, so this function drives the provider
    /// until then.
    fn remove(self, world: &mut World) {
        let start = Instant::now();
        let mut removal = Command::new("rdma").args(["link", "del", &self.device]).spawn().unwrap();
        while removal.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < TIMEOUT, "the device is not released");
            let _ = world.event_within(Duration::from_millis(20));
        }
        for netdev in ["bond9", "f0", "g0"] {
            run(&format!("ip link del {netdev}"));
        }
    }
}

/// If a bond fails over, a listener on the bond receives an event. Without the event, the listener would wait forever on a device that no
/// peer reaches. A new listener on the same address can be reached.
fn a_failover_is_told_to_the_listener(kind: Kind) {
    let bond = Bond::new(kind);
    let mut world = World::new();
    let (listener, _) = world.listen(bond.address);
    run("ip link set bond9 type bond active_slave g0");
    let event = world.event();
    assert!(matches!(event.kind, CmEventKind::AddressChange) && event.id == listener, "{event:?}");
    world.provider.destroy_id(listener, Instant::now()).unwrap();
    if kind == Kind::Siw {
        // A siw device keeps the hardware address of its first network device, and no id can be bound while the bond has another hardware
        // address. So the bond must return to its first network device.
        run("ip link set bond9 type bond active_slave f0");
    }
    let (listener, to) = world.listen(bond.address);
    let (active, passive) = world.pair(to);
    world.drop_end(&active);
    world.drop_end(&passive);
    world.provider.destroy_id(listener, Instant::now()).unwrap();
    bond.remove(&mut world);
}

on_each_device! {
    a_failover_is_told_to_the_listener
}
