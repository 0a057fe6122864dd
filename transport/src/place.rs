//! [`Place`]: where a connection goes, or a listener is: an IP address, or an address of InfiniBand itself.

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6};
use std::str::FromStr;

use crate::error::Error;

/// An address of InfiniBand (`AF_IB`), for networks without IP over InfiniBand. It is written `ib:[fe80::2:c903:0:1]:7471`, or
/// `ib:[fe80::2:c903:0:1]:7471/8001` with a partition key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IbAddress {
    /// The GID of a port, in the form of an IPv6 address. Unspecified to listen on every port.
    pub gid: Ipv6Addr,
    /// The partition key; 0 for the port's default.
    pub partition_key: u16,
    /// The port number of the service, as of TCP.
    pub port: u16,
}

/// Where a connection goes, or a listener is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// An IP address, on any network.
    Ip(SocketAddr),
    /// An address of InfiniBand.
    Ib(IbAddress),
}

impl From<SocketAddr> for Place {
    fn from(address: SocketAddr) -> Self {
        Self::Ip(address)
    }
}

impl fmt::Display for IbAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ib:[{}]:{}", self.gid, self.port)?;
        if self.partition_key == 0 { Ok(()) } else { write!(f, "/{:04x}", self.partition_key) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Ib(address) => address.fmt(f),
        }
    }
}

impl FromStr for Place {
    type Err = Error;

    /// Reads an IP address with a port, or an address of InfiniBand. Names are not looked up.
    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || Error::Address { text: text.into() };
        let Some(rest) = text.strip_prefix("ib:") else {
            return text.parse().map(Self::Ip).map_err(|_| wrong());
        };
        let (address, key) = match rest.split_once('/') {
            Some((address, key)) => (address, u16::from_str_radix(key, 16).map_err(|_| wrong())?),
            None => (rest, 0),
        };
        let address: SocketAddrV6 = address.parse().map_err(|_| wrong())?;
        Ok(Self::Ib(IbAddress { gid: *address.ip(), partition_key: key, port: address.port() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        for text in ["192.0.2.1:7", "[2001:db8::1]:80", "ib:[fe80::2:c903:0:1]:7471", "ib:[fe80::1]:7471/8001"] {
            assert_eq!(text.parse::<Place>().unwrap().to_string(), text);
        }
        let Place::Ib(address) = "ib:[::]:5/ffff".parse().unwrap() else { panic!() };
        assert_eq!((address.gid, address.partition_key, address.port), (Ipv6Addr::UNSPECIFIED, 0xffff, 5));
    }

    #[test]
    fn what_is_no_place_is_named_with_its_form() {
        for text in
            ["", "here", "192.0.2.1", "ib:", "ib:192.0.2.1:7", "ib:[fe80::1]", "ib:[fe80::1]:7/12345", "ib:[::]:7/"]
        {
            let error = text.parse::<Place>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")) && error.contains("ib:["), "{error}");
        }
    }
}
