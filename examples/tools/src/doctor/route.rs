//! The route to an address, and the provider that `ProviderChoice::Auto` chooses for it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use serde::Serialize;

use super::device::Device;
use super::finding::Finding;
use super::netdev::Netdevs;
use super::tree::SystemTree;
use crate::pingpong::address::resolve;
use crate::pingpong::cli::DEFAULT_PORT;
use crate::pingpong::failure::Failure;

/// True if this program was built with support for RDMA devices.
pub const HAS_VERBS: bool = cfg!(feature = "verbs");

/// A network address that the user gave, with the route to it.
// local: texts of the system
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Route {
    /// The network address, with a port.
    pub address: SocketAddr,
    /// The local address from which packets to `address` are sent, if there is a route.
    pub source: Option<IpAddr>,
    /// The network device through which packets to `address` are sent.
    pub netdev: Option<String>,
    /// The RDMA device that uses this network device.
    pub device: Option<String>,
    /// The provider that `auto` chooses: `verbs` or `iwarp`.
    pub provider: &'static str,
    /// The reason for this choice.
    pub reason: String,
    /// The command that makes an RDMA device usable for this address, if it is known.
    #[serde(skip)]
    fix: Option<String>,
}

/// The provider that `auto` chooses, the reason, and the command that would make an RDMA device usable.
type Choice = (&'static str, String, Option<String>);

/// Resolves the names and addresses that the user gave.
///
/// # Errors
/// A name is unknown. The error names the first unknown name.
pub fn targets(texts: &[String]) -> Result<Vec<SocketAddr>, Failure> {
    let mut targets = Vec::new();
    for text in texts {
        for address in resolve(text, DEFAULT_PORT)? {
            if !targets.contains(&address) {
                targets.push(address);
            }
        }
    }
    Ok(targets)
}

/// Returns the local address from which packets to `peer` would be sent, or `None` if there is no route. No packet is sent.
#[must_use]
pub fn source_of(peer: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    let port = if peer.port() == 0 { DEFAULT_PORT } else { peer.port() };
    socket.connect((peer.ip(), port)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

impl Route {
    /// Finds the route to an address. On the real machine, this may call librdmacm, whose address resolution may take 200 ms.
    #[must_use]
    pub fn find(address: SocketAddr, tree: &SystemTree, netdevs: &Netdevs, devices: &[Device]) -> Self {
        let ip = address.ip();
        // The system routes an address of this machine over the loopback interface. For such an address, the program reports the device
        // that has the address.
        let source = if ip.is_unspecified() {
            None
        } else if netdevs.with_address(ip).is_some() {
            Some(ip)
        } else if tree.is_real() {
            source_of(address)
        } else {
            None
        };
        let netdev = source.and_then(|source| netdevs.with_address(source)).map(|netdev| netdev.name.clone());
        let device = source.and_then(|source| devices.iter().find(|device| device.has_address(source)));
        let device = device.map(|device| device.name.clone());
        let (provider, reason, fix) = if tree.is_real() { asked(address) } else { guessed(device.as_deref()) };
        Self { address, source, netdev, device, provider, reason, fix }
    }

    pub(super) fn finding(&self) -> Finding {
        let what = if self.address.ip().is_unspecified() { "to listen on" } else { "for" };
        let way = match (&self.source, &self.netdev) {
            (Some(source), Some(netdev)) if *source == self.address.ip() => format!(" (local address, on {netdev})"),
            (Some(source), Some(netdev)) => format!(" (from {source}, through {netdev})"),
            _ => String::new(),
        };
        let text = format!("auto uses {} {what} {}{way}: {}", self.provider, self.address.ip(), self.reason);
        match &self.device {
            // An RDMA device exists, but this program was built without support for it.
            Some(device) if self.provider == "iwarp" && !HAS_VERBS => {
                Finding::note("address", format!("{text}; the device {device} has a route there"))
                    .fix("cargo build --release")
            }
            Some(device) if self.provider == "iwarp" => {
                let text = format!("{text}; although the device {device} is on the route");
                let finding = Finding::problem("address", text);
                match &self.fix {
                    Some(fix) => finding.fix(fix),
                    None => finding.hint("see the problems above"),
                }
            }
            _ => Finding::ok("address", text),
        }
    }
}

/// Returns the choice on a simulated machine, where librdmacm cannot be called.
fn guessed(device: Option<&str>) -> Choice {
    match device {
        Some(device) if HAS_VERBS => ("verbs", format!("the device {device} has a route there"), None),
        Some(_) => ("iwarp", "this build has no RDMA devices".into(), None),
        None => ("iwarp", "no RDMA device has a route there".into(), None),
    }
}

#[cfg(feature = "verbs")]
const EVERY_DEVICE: &str =
    "every device serves it, and the embedded provider beside them unless an iWARP device has the port";

#[cfg(feature = "verbs")]
fn asked(address: SocketAddr) -> Choice {
    use std::time::Duration;

    use rdma_reactor::transport::verbs::{Reach, Verbs};

    let reach = Verbs::open().and_then(|mut verbs| {
        if address.ip().is_unspecified() {
            verbs.serves(address)
        } else {
            verbs.reaches(address, Duration::from_millis(200))
        }
    });
    match reach {
        Ok(Reach::Yes { .. }) if address.ip().is_unspecified() => ("verbs", EVERY_DEVICE.into(), None),
        Ok(Reach::Yes { device }) => ("verbs", format!("the device {device} has a route there"), None),
        // The address is in the network of an RDMA device, but address resolution found no host with this address.
        Ok(Reach::No { reason }) => ("iwarp", reason, Some(format!("ping -c 1 {}", address.ip()))),
        Err(error) => ("iwarp", error.to_string(), None),
    }
}

#[cfg(not(feature = "verbs"))]
fn asked(_: SocketAddr) -> Choice {
    ("iwarp", "this build has no RDMA devices".into(), None)
}
