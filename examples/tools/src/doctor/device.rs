//! An RDMA device, as the kernel describes it in sysfs.

use std::net::IpAddr;

use serde::Serialize;

use super::finding::Finding;
use super::module::{ModuleState, Modules};
use super::netdev::Netdevs;
use super::port::{Port, word};
use super::tree::SystemTree;

const CLASS: &str = "/sys/class/infiniband";

/// An RDMA device.
// local: devices of this host
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Device {
    /// The device's name.
    pub name: String,
    /// The type of the device: `InfiniBand`, `RoCE`, `iWARP`, or the kernel's own word for another type.
    pub kind: String,
    /// The kernel driver of an adapter; `None` for a software device.
    pub driver: Option<String>,
    /// The firmware version, if the device reports one.
    pub firmware: Option<String>,
    /// The name of the device file, such as `uverbs0`; `None` if it is missing.
    pub node: Option<String>,
    /// The device's ports.
    pub ports: Vec<Port>,
}

impl Device {
    /// Returns all RDMA devices of the machine.
    #[must_use]
    pub fn all(tree: &SystemTree, netdevs: &Netdevs) -> Vec<Self> {
        tree.names(CLASS).into_iter().map(|name| Self::read(tree, name, netdevs)).collect()
    }

    fn read(tree: &SystemTree, name: String, netdevs: &Netdevs) -> Self {
        let directory = format!("{CLASS}/{name}");
        let ports = Port::all(tree, &directory, netdevs);
        let node_type = word(&tree.text_or_empty(&format!("{directory}/node_type")));
        let kind = match (node_type.as_str(), ports.first().map(|port| port.link_layer.as_str())) {
            ("RNIC", _) => "iWARP".into(),
            ("CA", Some("Ethernet")) => "RoCE".into(),
            ("CA", Some("InfiniBand")) => "InfiniBand".into(),
            (other, _) => other.to_owned(),
        };
        let verbs = "/sys/class/infiniband_verbs";
        let is_ours = |node: &String| tree.text_or_empty(&format!("{verbs}/{node}/ibdev")) == name;
        Self {
            kind,
            driver: tree.link_name(&format!("{directory}/device/driver")),
            firmware: tree.text(&format!("{directory}/fw_ver")).ok().filter(|version| !version.is_empty()),
            node: tree.names(verbs).into_iter().find(is_ours),
            ports,
            name,
        }
    }

    /// Returns true if an active port of the device has this address.
    #[must_use]
    pub fn has_address(&self, address: IpAddr) -> bool {
        self.ports.iter().any(|port| port.is_active() && port.addresses.contains(&address))
    }

    fn describe(&self) -> String {
        match (&self.driver, &self.firmware) {
            (Some(driver), Some(firmware)) => format!("{} ({driver}, firmware {firmware})", self.kind),
            (Some(driver), None) => format!("{} ({driver})", self.kind),
            (None, _) => format!("{} in software", self.kind),
        }
    }
}

/// Returns the findings about the devices.
#[must_use]
pub fn findings(devices: &[Device], modules: &Modules, netdevs: &Netdevs) -> Vec<Finding> {
    if devices.is_empty() {
        return vec![none(modules, netdevs)];
    }
    let ports = devices.iter().flat_map(|device| {
        let kind = device.describe();
        device.ports.iter().map(move |port| port.finding(&device.name, &kind)).collect::<Vec<_>>()
    });
    ports.collect()
}

fn none(modules: &Modules, netdevs: &Netdevs) -> Finding {
    let netdev = netdevs.candidate().map_or("NETDEV", |netdev| netdev.name.as_str());
    let finding = Finding::note("device", "no RDMA device: connections use the embedded provider");
    let add = |kind: &str| format!("rdma link add {kind}0 type {kind} netdev {netdev}");
    for (module, kind) in [("siw", "siw"), ("rdma_rxe", "rxe")] {
        match modules.state(module) {
            ModuleState::Loaded | ModuleState::BuiltIn => return finding.fix(add(kind)),
            ModuleState::Loadable => return finding.fix(format!("modprobe -a {module} rdma_ucm && {}", add(kind))),
            ModuleState::Missing => {}
        }
    }
    // A container does not see the modules that its host has loaded or can load. So these modules may exist on the host although they seem
    // to be missing.
    modules.load(finding, &["siw".into(), "rdma_ucm".into()], &format!(" && {}", add("siw")))
}
