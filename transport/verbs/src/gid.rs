//! The GID tables of this host's ports, as the kernel lists them in `/sys/class/infiniband`. Connections by out-of-band exchange choose
//! their GID from these tables. If a connection used a GID of another address, or of RoCE version 1, the peer would not receive its
//! packets.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use super::NAME;
use crate::exchange::message::Network;
use rdma_transport::cm::ExchangeOptions;
use rdma_transport::error::{Result, TransportError};
use rdma_transport::sockets;

/// The folder in which the kernel lists the devices.
pub(super) const SYSFS: &str = "/sys/class/infiniband";

/// The error for an iWARP device, whose queue pairs cannot connect by out-of-band exchange.
pub(super) const IWARP: TransportError = TransportError::Unsupported {
    provider: NAME,
    feature: "exchange on an iWARP device, whose queue pairs connect by rdma_cm only",
};

/// A port, and the GID from its table that a queue pair uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortGid {
    pub(super) device: String, // local: the name of a device
    pub(super) port: u8,
    pub(super) network: Network,
    pub(super) gid_index: u8,
    pub(super) gid: [u8; 16],
}

/// Returns the GID that RoCE version 2 uses for an IP address.
pub(super) fn gid_of(address: IpAddr) -> [u8; 16] {
    sockets::mapped(address).octets()
}

/// A port of a device, with the folder in which the kernel lists the port's attributes.
struct Port<'a> {
    folder: PathBuf,
    device: &'a str,
    number: u8,
}

fn line(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Returns the names of the entries of a folder, sorted.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let Ok(list) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = list.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

impl<'a> Port<'a> {
    fn all(root: &Path, device: &'a str) -> Vec<Self> {
        let ports = root.join(device).join("ports");
        let port = |name: String| Some(Port { folder: ports.join(&name), device, number: name.parse().ok()? });
        names(&ports).into_iter().filter_map(port).collect()
    }

    fn is_ethernet(&self) -> bool {
        line(&self.folder.join("link_layer")).is_some_and(|layer| layer == "Ethernet")
    }

    /// Returns true if the port is active, or if the kernel does not list its state.
    fn is_active(&self) -> bool {
        // The line consists of the number and the name of a state of `ibv_port_state`: 4 is ACTIVE, and 5 is ACTIVE_DEFER.
        line(&self.folder.join("state")).is_none_or(|state| state.starts_with(['4', '5']))
    }

    /// Returns the GID with this index. Returns `None` if the entry of the table is empty.
    fn gid(&self, index: u8) -> Option<[u8; 16]> {
        let text = line(&self.folder.join("gids").join(index.to_string()))?;
        let gid = text.parse::<Ipv6Addr>().ok()?;
        (!gid.is_unspecified()).then_some(gid.octets())
    }

    fn is_roce_v2(&self, index: u8) -> bool {
        let of = self.folder.join("gid_attrs/types").join(index.to_string());
        line(&of).is_some_and(|text| text == "RoCE v2")
    }

    /// Returns true if the GID with this index belongs to the network interface with the index `interface`. With 0, any
    /// network interface matches.
    fn is_of(&self, index: u8, interface: u32) -> bool {
        let name = || line(&self.folder.join("gid_attrs/ndevs").join(index.to_string()));
        let number = |name: String| line(&Path::new("/sys/class/net").join(name).join("ifindex"))?.parse().ok();
        interface == 0 || name().and_then(number) == Some(interface)
    }

    /// Returns the entries that are not empty, as indexes and GIDs.
    fn entries(&self) -> impl Iterator<Item = (u8, [u8; 16])> + '_ {
        let mut indexes: Vec<u8> =
            names(&self.folder.join("gids")).iter().filter_map(|name| name.parse().ok()).collect();
        indexes.sort_unstable();
        indexes.into_iter().filter_map(|index| Some((index, self.gid(index)?)))
    }

    /// Returns the entries of the type RoCE version 2, as indexes and GIDs.
    fn usable(&self) -> impl Iterator<Item = (u8, [u8; 16])> + '_ {
        self.entries().filter(|entry| self.is_roce_v2(entry.0))
    }

    fn port_gid(&self, network: Network, (gid_index, gid): (u8, [u8; 16])) -> PortGid {
        PortGid { device: self.device.into(), port: self.number, network, gid_index, gid }
    }

    /// Returns true if the network interface with the index `interface` is on this port (IPoIB).
    fn has(&self, root: &Path, interface: u32) -> bool {
        let interfaces = root.join(self.device).join("device/net");
        names(&interfaces).iter().any(|name| {
            let number = |file: &str| line(&interfaces.join(name).join(file))?.parse::<u32>().ok();
            number("ifindex") == Some(interface) && number("dev_port").map(|port| port + 1) == Some(self.number.into())
        })
    }

    /// Returns the entry of the port's GID table whose GID belongs to `source`, an address of this
    /// host. Returns `None` if the table has no such entry.
    fn entry_of(&self, source: SocketAddr) -> Option<(u8, [u8; 16])> {
        let scope = if let SocketAddr::V6(v6) = source { v6.scope_id() } else { 0 };
        let wanted = gid_of(source.ip());
        self.usable().find(|&(index, gid)| gid == wanted && self.is_of(index, scope))
    }

    /// Returns true if an address of this host is on this port.
    fn is_at(&self, root: &Path, source: SocketAddr) -> bool {
        if self.is_ethernet() {
            self.entry_of(source).is_some()
        } else {
            interface_of(source).is_some_and(|found| self.has(root, found))
        }
    }

    /// Returns the GID that a connection uses on this port. Returns `None` if the port does not match `source` and
    /// `options`.
    fn choose(&self, root: &Path, source: Option<SocketAddr>, options: &ExchangeOptions) -> Result<Option<PortGid>> {
        let named = options.device.is_some();
        if !self.is_ethernet() {
            let on_it = source.is_some_and(|source| self.is_at(root, source));
            let index = options.gid_index.unwrap_or(0);
            let port_gid = self.gid(index).map(|gid| self.port_gid(Network::InfiniBand, (index, gid)));
            return match port_gid.filter(|_| named || on_it) {
                None if named => Err(self.empty(index)),
                port_gid => Ok(port_gid),
            };
        }
        let found = source.and_then(|source| self.entry_of(source));
        if !named && found.is_none() {
            return Ok(None);
        }
        let Some(index) = options.gid_index else {
            // If the port has no GID for the stream's address, the program has named a device on
            // another network than the stream. Then prefer a GID whose address has the same family
            // as the stream's address, and never use the GID of a link-local address.
            let same_family = |gid: [u8; 16]| source.is_none_or(|source| is_v4(gid) == source.is_ipv4());
            let by_family = || {
                let wide = |gid: [u8; 16]| !Ipv6Addr::from(gid).is_unicast_link_local();
                self.usable()
                    .find(|&(_, gid)| wide(gid) && same_family(gid))
                    .or_else(|| self.usable().find(|&(_, gid)| wide(gid)))
            };
            return match found.or_else(by_family) {
                Some(entry) => Ok(Some(self.port_gid(Network::RoceV2, entry))),
                None => Err(TransportError::NoDevice {
                    reason: format!(
                        "port {} of {} has no GID of RoCE version 2: give its network interface an address",
                        self.number, self.device
                    ),
                }),
            };
        };
        let gid = self.gid(index).ok_or_else(|| self.empty(index))?;
        if !self.is_roce_v2(index) {
            let usable: Vec<String> = self.usable().map(|entry| entry.0.to_string()).collect();
            let reason = format!(
                "the GID index {index} of port {} of {} is not of RoCE version 2; those that are: {}",
                self.number,
                self.device,
                usable.join(", ")
            );
            return Err(TransportError::NoDevice { reason });
        }
        Ok(Some(self.port_gid(Network::RoceV2, (index, gid))))
    }

    fn empty(&self, index: u8) -> TransportError {
        let Self { device, number, .. } = self;
        TransportError::NoDevice {
            reason: format!(
                "the GID index {index} of port {number} of {device} is empty; `show_gids` or /sys/class/infiniband/{device}/ports/{number}/gids show the table"
            ),
        }
    }
}

fn is_v4(gid: [u8; 16]) -> bool {
    Ipv6Addr::from(gid).to_ipv4_mapped().is_some()
}

/// Returns the index of the network interface that has an address. Returns `None` if no interface has the address.
fn interface_of(address: SocketAddr) -> Option<u32> {
    let any: IpAddr = if address.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    Some(sockets::interface_of(socket.as_fd(), address).ok()?.index)
}

/// Returns the hardware address of the network interface that has an IP address. For a link-local address with a scope,
/// only the interface with that index counts. Returns `None` if no interface with a hardware address has the IP address.
fn hardware_address(address: SocketAddr) -> Option<Vec<u8>> {
    let (wanted, interfaces) = (interface_of(address)?, Path::new("/sys/class/net"));
    let is_it =
        |name: &String| line(&interfaces.join(name).join("ifindex")).is_some_and(|text| text == wanted.to_string());
    let name = names(interfaces).into_iter().find(is_it)?;
    line(&interfaces.join(name).join("address"))?.split(':').map(|octet| u8::from_str_radix(octet, 16).ok()).collect()
}

/// Returns the local address from which the system would send to `peer`.
pub(super) fn source_for(peer: SocketAddr) -> io::Result<SocketAddr> {
    let any: IpAddr = if peer.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((any, 0))?;
    // Connecting a UDP socket sends nothing. It only selects the socket's local address.
    socket.connect(peer)?;
    socket.local_addr()
}

/// Returns the port and the GID for a connection by out-of-band exchange. `source` is the local address of the connection's stream; `None`
/// if the stream has no IP address.
pub(super) fn choose(root: &Path, source: Option<SocketAddr>, options: &ExchangeOptions) -> Result<PortGid> {
    // An IPv4 stream may have an IPv4-mapped address. Convert it to the IPv4 address.
    let source = source.map(|source| match source.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::new(v4.into(), 0),
        IpAddr::V6(_) => source,
    });
    let devices = match &options.device {
        Some(name) => vec![name.clone()],
        None => names(root),
    };
    let mut failed = None;
    for device in &devices {
        let is_iwarp = line(&root.join(device).join("node_type")).is_some_and(|kind| kind.starts_with("4:"));
        let mut ports = Port::all(root, device);
        if options.device.is_some() && ports.len() > 1 {
            // Of the ports of a named device, try the one with the address of the stream first, and then the active ones.
            ports.sort_by_cached_key(|port| (source.is_none_or(|source| !port.is_at(root, source)), !port.is_active()));
        }
        for port in ports {
            if is_iwarp {
                // The GID of an iWARP port contains the hardware address of the port's network interface.
                let own = || {
                    source.and_then(hardware_address).filter(|own| port.gid(0).is_some_and(|gid| gid[..6] == own[..]))
                };
                if options.device.is_some() || own().is_some() {
                    return Err(IWARP);
                }
                continue;
            }
            if options.port.is_some_and(|wanted| wanted != port.number) {
                continue;
            }
            match port.choose(root, source, options) {
                Ok(Some(port_gid)) => return Ok(port_gid),
                Ok(None) => {}
                Err(error) if source.is_some_and(|source| port.is_at(root, source)) => return Err(error),
                // Another port may have a GID, so try the other ports before returning the error.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    let reason = match (&options.device, source) {
        (Some(name), _) => {
            let port = options.port.map_or_else(String::new, |port| format!("port {port} of "));
            format!("{port}{name} is not there; `rdma link` shows the devices")
        }
        (None, Some(source)) => format!(
            "no port has a GID of RoCE version 2 for {}, the address of this host on the stream; name the device to exchange over another network",
            source.ip()
        ),
        (None, None) => "the stream has no address of this host: name the device of the connection".into(),
    };
    Err(TransportError::NoDevice { reason })
}

impl PortGid {
    /// Returns true if the port's table still has this GID at this index.
    pub(super) fn holds(&self, root: &Path) -> bool {
        let port = Port {
            folder: root.join(&self.device).join("ports").join(self.port.to_string()),
            device: &self.device,
            number: self.port,
        };
        port.gid(self.gid_index) == Some(self.gid)
            && (self.network == Network::InfiniBand || port.is_roce_v2(self.gid_index))
    }

    /// Returns the IP address that the GID contains.
    pub(super) fn address(&self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from(self.gid)).to_canonical()
    }
}

#[cfg(test)]
mod tests {
    use super::super::ffi::local_addresses;
    use super::*;

    /// Several interfaces may have the same link-local address. The scope selects one of them.
    #[test]
    fn an_interface_outside_of_the_scope_has_no_hardware_address() {
        for own in local_addresses() {
            let SocketAddr::V6(mut other) = own else { continue };
            if other.ip().is_unicast_link_local() {
                // No interface has this index.
                other.set_scope_id(u32::MAX);
                assert_eq!(hardware_address(other.into()), None, "{own}");
            }
        }
    }
}
