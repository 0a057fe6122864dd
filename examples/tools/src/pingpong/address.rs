//! Resolves the host names and addresses that a user gives.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use super::failure::Failure;

/// Resolves a host name or address, with or without a port. `port` is the default port.
///
/// # Errors
/// The name is unknown, or the port is not a number from 0 to 65,535.
pub fn resolve(text: &str, port: u16) -> Result<Vec<SocketAddr>, Failure> {
    if let Ok(ip) = text.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let found = match text.rsplit_once(':') {
        Some((_, tail)) if tail.parse::<u16>().is_ok() => text.to_socket_addrs(),
        Some((_, tail)) => {
            return Err(Failure::new(format!("{tail:?} in {text:?} is not a port: give 0 to 65535")));
        }
        None => (text, port).to_socket_addrs(),
    };
    let addresses: Vec<_> = found.map_err(|error| unknown(text, &error.to_string()))?.collect();
    if addresses.is_empty() { Err(unknown(text, "it has no address")) } else { Ok(addresses) }
}

fn unknown(text: &str, why: &str) -> Failure {
    let why = why.strip_prefix("failed to lookup address information: ").unwrap_or(why);
    Failure::new(format!("unknown host {text:?} ({why}): check the name, or give an address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_port_or_get_one() {
        let one = |text| resolve(text, 7).unwrap()[0].to_string();
        assert_eq!(one("127.0.0.1"), "127.0.0.1:7");
        assert_eq!(one("127.0.0.1:80"), "127.0.0.1:80");
        assert_eq!(one("::1"), "[::1]:7");
        assert_eq!(one("[::1]"), "[::1]:7");
        assert_eq!(one("[::1]:80"), "[::1]:80");
        assert!(resolve("localhost:x", 7).unwrap_err().to_string().contains("not a port"));
        assert!(resolve("127.0.0.1:70000", 7).is_err());
    }
}
