//! The network devices of the machine, and their addresses.

use std::net::IpAddr;

use super::tree::SystemTree;

/// A network device.
// local: interfaces of this host
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Netdev {
    /// The device's name.
    pub name: String,
    /// The device's hardware address, if it has one.
    pub mac: Option<[u8; 6]>,
    /// The device's addresses.
    pub addresses: Vec<IpAddr>,
}

/// The network devices of the machine.
// local: interfaces of this host
#[derive(Clone, Debug, Default)]
pub struct Netdevs(Vec<Netdev>);

impl Netdevs {
    /// Reads the network devices of the machine. In a test, the addresses are read from a file called `addresses`; each line has a device's
    /// name and an address.
    #[must_use]
    pub fn read(tree: &SystemTree) -> Self {
        let addresses = if tree.is_real() { of_machine() } else { listed(&tree.text_or_empty("/addresses")) };
        let devices = tree.names("/sys/class/net").into_iter().map(|name| Netdev {
            mac: parse_mac(&tree.text_or_empty(&format!("/sys/class/net/{name}/address"))),
            addresses: addresses.iter().filter(|(of, _)| *of == name).map(|(_, address)| *address).collect(),
            name,
        });
        Self(devices.collect())
    }

    /// Returns the network device with this name, if there is one.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Netdev> {
        self.0.iter().find(|device| device.name == name)
    }

    /// Returns the network device that has this address, if there is one.
    #[must_use]
    pub fn with_address(&self, address: IpAddr) -> Option<&Netdev> {
        self.0.iter().find(|device| device.addresses.contains(&address))
    }

    /// Finds a network device by the GUID of an RDMA device. Such a GUID is derived from the hardware address of the network device.
    /// Returns `None` if no network device has this hardware address.
    #[must_use]
    pub fn with_guid(&self, guid: &str) -> Option<&Netdev> {
        let bytes = parse_guid(guid)?;
        self.0.iter().find(|device| device.mac.map(eui64) == Some(bytes))
    }

    /// Returns the network device that suits a new software RDMA device: the first one with an IPv4 address that is not a loopback
    /// address.
    #[must_use]
    pub fn candidate(&self) -> Option<&Netdev> {
        let routable = |address: &IpAddr| address.is_ipv4() && !address.is_loopback();
        self.0.iter().find(|device| device.addresses.iter().any(routable))
    }
}

fn of_machine() -> Vec<(String, IpAddr)> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    all.filter_map(|entry| {
        let address = entry.address?;
        let ip = address
            .as_sockaddr_in()
            .map(|v4| IpAddr::from(v4.ip()))
            .or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::from(v6.ip())))?;
        Some((entry.interface_name, ip))
    })
    .collect()
}

fn listed(text: &str) -> Vec<(String, IpAddr)> {
    let entry = |line: &str| {
        let (name, address) = line.split_once(' ')?;
        Some((name.to_owned(), address.trim().parse().ok()?))
    };
    text.lines().filter_map(entry).collect()
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect::<Option<_>>()?;
    bytes.try_into().ok()
}

fn parse_guid(text: &str) -> Option<[u8; 8]> {
    u64::from_str_radix(&text.replace(':', ""), 16).ok().map(u64::to_be_bytes)
}

/// Returns the EUI-64 identifier that is derived from a hardware address.
const fn eui64(mac: [u8; 6]) -> [u8; 8] {
    let [a, b, c, d, e, f] = mac;
    [a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_known_by_its_hardware_address() {
        let mac = parse_mac("f2:72:54:8d:f0:25").unwrap();
        assert_eq!(Some(eui64(mac)), parse_guid("f072:54ff:fe8d:f025"));
        assert_eq!(parse_mac("00:00"), None);
        assert_eq!(parse_guid("none"), None);
    }

    #[test]
    fn this_machine_has_a_loopback() {
        let netdevs = Netdevs::read(&SystemTree::new("/"));
        assert_eq!(netdevs.with_address([127, 0, 0, 1].into()).map(|device| device.name.as_str()), Some("lo"));
    }
}
