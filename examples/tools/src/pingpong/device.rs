//! Selects the provider and the local address, given the command line.

use std::net::{IpAddr, SocketAddr};

use rdma_reactor::ProviderChoice;

use super::cli::DeviceArgs;
use super::failure::Failure;
use crate::doctor::device::Device;
use crate::doctor::netdev::Netdevs;
use crate::doctor::route::{HAS_VERBS, source_of};
use crate::doctor::tree::SystemTree;

/// The name of the embedded provider's only device.
const EMBEDDED: &str = "iwarp0";

/// The provider and the device that carry the connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carrier {
    /// The provider, as a setting of the library.
    pub provider: ProviderChoice,
    /// The RDMA device, if the user named one.
    device: Option<Device>,
}

impl Carrier {
    /// Selects the provider and the device, given the flags.
    ///
    /// # Errors
    /// The device does not exist, cannot be used now, or conflicts with `--provider`.
    pub fn new(args: &DeviceArgs) -> Result<Self, Failure> {
        Self::among(args, HAS_VERBS, || devices(&SystemTree::new("/")))
    }

    fn among(args: &DeviceArgs, has_verbs: bool, devices: impl Fn() -> Vec<Device>) -> Result<Self, Failure> {
        let mut provider = args.provider.into();
        if args.exchange {
            if let ProviderChoice::Iwarp | ProviderChoice::Shm = provider {
                return Err(Failure::new("--exchange is for RDMA devices: leave --provider out"));
            }
            provider = ProviderChoice::Verbs;
        }
        let Some(name) = args.ib_dev.as_deref() else { return Ok(Self { provider, device: None }) };
        if name == EMBEDDED && provider != ProviderChoice::Verbs {
            let provider = if provider == ProviderChoice::Shm { provider } else { ProviderChoice::Iwarp };
            return Ok(Self { provider, device: None });
        }
        let devices = devices();
        let Some(device) = devices.iter().find(|device| device.name == name) else {
            let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
            let names = match (provider, names.as_slice()) {
                (ProviderChoice::Verbs, []) => return Err(no_device(name, "there is no RDMA device at all")),
                (ProviderChoice::Verbs, names) => names.join(", "),
                (_, names) => [&[EMBEDDED], names].concat().join(", "),
            };
            return Err(no_device(name, &format!("there is {names}")));
        };
        if let ProviderChoice::Iwarp | ProviderChoice::Shm = provider {
            let embedded = if provider == ProviderChoice::Shm { "shm" } else { "iwarp" };
            return Err(Failure::new(format!(
                "{name} is an RDMA device: leave --provider {embedded} out, or --ib-dev"
            )));
        }
        if !has_verbs {
            let cure = "build it with the feature verbs, or use --ib-dev iwarp0";
            return Err(Failure::new(format!("this program was built without RDMA devices such as {name}: {cure}")));
        }
        let carrier = Self { provider: ProviderChoice::Verbs, device: Some(device.clone()) };
        if carrier.address().is_none() {
            let cure = "give its network device an address and set it up; rdma-doctor shows both";
            return Err(Failure::new(format!("the device {name} has no address on an active port: {cure}")));
        }
        Ok(carrier)
    }

    /// Returns an address of the named device, or `None` if no device was named. Prefers routable addresses to link-local ones, and
    /// IPv4 to IPv6.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        let ports = self.device.iter().flat_map(|device| &device.ports).filter(|port| port.is_active());
        let of_the_link = |address: &IpAddr| match address {
            IpAddr::V4(v4) => v4.is_link_local(),
            // A link-local address is avoided, because it is incomplete without the index of its interface.
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        let addresses = ports.flat_map(|port| &port.addresses).copied().filter(|address| !of_the_link(address));
        addresses.min_by_key(IpAddr::is_ipv6)
    }

    /// Checks that an address belongs to the named device. Accepts all addresses if no device was named.
    ///
    /// # Errors
    /// The address does not belong to the device.
    pub fn check_own(&self, address: SocketAddr) -> Result<(), Failure> {
        match (&self.device, self.address()) {
            (Some(device), Some(own)) if !device.has_address(address.ip()) => Err(Failure::new(format!(
                "{} is not an address of the device {}: give --bind {own}, or leave it out",
                address.ip(),
                device.name
            ))),
            _ => Ok(()),
        }
    }

    /// Returns those of a server's addresses that are routed over the named device. Returns all addresses if no device was named.
    ///
    /// # Errors
    /// No address is routed over the device.
    pub fn leading_to(&self, addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Failure> {
        let Some(device) = &self.device else { return Ok(addresses) };
        let leads = |address: &SocketAddr| source_of(*address).is_some_and(|source| device.has_address(source));
        let (there, elsewhere): (Vec<_>, Vec<_>) = addresses.into_iter().partition(leads);
        match (there.is_empty(), elsewhere.first()) {
            (true, Some(address)) => Err(Failure::new(format!(
                "the route to {} is not over the device {}: name another address of the server, or leave --ib-dev out",
                address.ip(),
                device.name
            ))),
            _ => Ok(there),
        }
    }

    /// Selects the first RDMA device that can make connections, if the user gave `--provider verbs`
    /// and neither a device nor an address.
    #[must_use]
    pub fn or_first_device(mut self) -> Self {
        if self.provider == ProviderChoice::Verbs && self.device.is_none() {
            let usable =
                |device: &Device| Self { provider: self.provider, device: Some(device.clone()) }.address().is_some();
            self.device = devices(&SystemTree::new("/")).into_iter().find(usable);
        }
        self
    }
}

fn devices(tree: &SystemTree) -> Vec<Device> {
    Device::all(tree, &Netdevs::read(tree))
}

fn no_device(name: &str, what: &str) -> Failure {
    Failure::new(format!("no RDMA device {name}: {what}; choose one, or leave --ib-dev out"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::port::Port;
    use crate::pingpong::cli::Provider;
    use crate::secure::SecurityArgs;

    fn device(name: &str, state: &str, addresses: &[&str]) -> Device {
        let port = Port {
            number: 1,
            state: state.into(),
            link_layer: "Ethernet".into(),
            rate: String::new(),
            netdev: None,
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            gids: Vec::new(),
        };
        let kind = "iWARP".into();
        Device { name: name.into(), kind, driver: None, firmware: None, node: None, ports: vec![port] }
    }

    fn machine() -> Vec<Device> {
        vec![
            device("siw0", "ACTIVE", &["fe80::1", "fd77::1", "169.254.0.1", "10.77.1.1", "10.77.1.2"]),
            device("rxe0", "ACTIVE", &["fd77:1::1"]),
            device("down0", "DOWN", &["10.77.3.1"]),
        ]
    }

    fn choose(provider: Provider, name: &str) -> Result<Carrier, String> {
        let args = DeviceArgs {
            provider,
            ib_dev: Some(name.into()),
            exchange: false,
            gid_index: None,
            security: SecurityArgs::default(),
        };
        Carrier::among(&args, true, machine).map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_device_brings_its_provider_and_an_address_that_routes() {
        for provider in [Provider::Auto, Provider::Verbs] {
            let carrier = choose(provider, "siw0").unwrap();
            assert_eq!(carrier.provider, ProviderChoice::Verbs);
            assert_eq!(carrier.address(), Some([10, 77, 1, 1].into()));
            carrier.check_own("10.77.1.2:7".parse().unwrap()).unwrap();
            let refused = carrier.check_own("10.77.9.9:7".parse().unwrap()).unwrap_err().to_string();
            assert!(refused.contains("10.77.9.9") && refused.contains("siw0") && refused.contains("10.77.1.1"));
        }
        assert_eq!(choose(Provider::Auto, "rxe0").unwrap().address(), Some("fd77:1::1".parse().unwrap()));
        let embedded = choose(Provider::Auto, "iwarp0").unwrap();
        assert_eq!((embedded.provider, embedded.address()), (ProviderChoice::Iwarp, None));
        embedded.check_own("10.77.9.9:7".parse().unwrap()).unwrap();
    }

    #[test]
    fn a_device_that_cannot_be_had_is_named_with_those_there_are() {
        assert!(choose(Provider::Auto, "mlx5_0").unwrap_err().contains("there is iwarp0, siw0, rxe0, down0"));
        assert!(choose(Provider::Verbs, "iwarp0").unwrap_err().contains("there is siw0, rxe0, down0"));
        assert!(choose(Provider::Iwarp, "siw0").unwrap_err().contains("--provider iwarp"));
        assert!(choose(Provider::Auto, "down0").unwrap_err().contains("active port"));
        let args = DeviceArgs {
            provider: Provider::Auto,
            ib_dev: Some("siw0".into()),
            exchange: false,
            gid_index: None,
            security: SecurityArgs::default(),
        };
        let failure = Carrier::among(&args, false, machine).unwrap_err().to_string();
        assert!(failure.contains("the feature verbs"), "{failure}");
        let args = DeviceArgs {
            provider: Provider::Verbs,
            ib_dev: Some("siw0".into()),
            exchange: false,
            gid_index: None,
            security: SecurityArgs::default(),
        };
        assert!(Carrier::among(&args, true, Vec::new).unwrap_err().to_string().contains("no RDMA device at all"));
    }
}
