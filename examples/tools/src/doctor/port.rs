//! The ports of an RDMA device.

use std::net::IpAddr;

use serde::Serialize;

use super::finding::Finding;
use super::gid::Gid;
use super::netdev::Netdevs;
use super::tree::SystemTree;

/// A port of an RDMA device.
// local: ports of this host
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Port {
    /// The port's number, from 1.
    pub number: u32,
    /// The port's state, such as `ACTIVE`.
    pub state: String,
    /// The link layer: `Ethernet`, `InfiniBand`, or the kernel's own word for another one.
    pub link_layer: String,
    /// The port's rate, formatted by the kernel.
    pub rate: String,
    /// The name of the port's network device, if it is known.
    pub netdev: Option<String>,
    /// The addresses of that network device.
    pub addresses: Vec<IpAddr>,
    /// The port's GID table.
    pub gids: Vec<Gid>,
}

/// Returns the word that follows a number in the kernel's text, as in `4: ACTIVE`.
pub(super) fn word(text: &str) -> String {
    text.split_once(": ").map_or(text, |(_, word)| word).to_owned()
}

impl Port {
    /// Returns the ports of a device.
    pub(super) fn all(tree: &SystemTree, device: &str, netdevs: &Netdevs) -> Vec<Self> {
        let names = tree.names(&format!("{device}/ports"));
        names.iter().filter_map(|name| Self::read(tree, device, name, netdevs)).collect()
    }

    fn read(tree: &SystemTree, device: &str, name: &str, netdevs: &Netdevs) -> Option<Self> {
        let port = format!("{device}/ports/{name}");
        let text = |what: &str| tree.text_or_empty(&format!("{port}/{what}"));
        let gids = Gid::all(tree, &port);
        // The name of the port's network device is in the GID table for RoCE devices, in the file `parent` for rxe devices, and in the
        // directory `device/net` for adapters. For siw devices and older adapters, the name is missing. Their GUID is derived from the
        // hardware address of the network device, so the network device is found by the GUID.
        let netdev = gids
            .iter()
            .find_map(|gid| gid.netdev.clone())
            .or_else(|| tree.text(&format!("{device}/parent")).ok())
            .or_else(|| tree.names(&format!("{device}/device/net")).into_iter().next())
            .or_else(|| {
                let guid = tree.text(&format!("{device}/node_guid")).ok()?;
                netdevs.with_guid(&guid).map(|netdev| netdev.name.clone())
            });
        let addresses = netdev.as_deref().and_then(|name| netdevs.named(name)).map(|netdev| netdev.addresses.clone());
        Some(Self {
            number: name.parse().ok()?,
            state: word(&text("state")),
            link_layer: text("link_layer"),
            rate: text("rate"),
            netdev,
            addresses: addresses.unwrap_or_default(),
            gids,
        })
    }

    /// Returns true if the port is active, so that connections can be made over it.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }

    pub(super) fn finding(&self, device: &str, kind: &str) -> Finding {
        let place = format!("{device} port {}", self.number);
        let netdev = self.netdev.as_deref().unwrap_or("NETDEV");
        if !self.is_active() {
            let text = format!("{place} is {} ({kind} on {})", self.state, self.link_layer);
            let finding = Finding::problem("device", text);
            return match self.link_layer.as_str() {
                "InfiniBand" if self.state == "INIT" => {
                    finding.hint("it waits for a subnet manager").fix("systemctl start opensm")
                }
                "InfiniBand" => finding.hint("check the cable and its other end").fix("ibstat"),
                _ => finding.fix(format!("ip link set {netdev} up")),
            };
        }
        let addresses: Vec<_> = self.addresses.iter().map(ToString::to_string).collect();
        let gids = match self.gids.as_slice() {
            [] => "no GIDs".into(),
            [gid] => format!("GID {}", gid.gid),
            [gid, rest @ ..] => format!("GID {} and {} more", gid.gid, rest.len()),
        };
        let text = format!("{place}: {kind}, {}, {}, {gids}", self.state, self.rate);
        match (&self.netdev, addresses.as_slice()) {
            (None, _) => Finding::problem("device", format!("{text}; it has no network device"))
                .fix(if self.link_layer == "InfiniBand" { "modprobe ib_ipoib" } else { "rdma link show" }),
            (Some(netdev), []) => Finding::problem("device", format!("{text}; {netdev} has no address"))
                .fix(format!("ip addr add ADDRESS/24 dev {netdev}")),
            (Some(netdev), some) => Finding::ok("device", format!("{text}; {netdev} with {}", some.join(", "))),
        }
    }
}
