//! The addresses of a peer that are still to be tried for a connection.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Instant;

use rdma_transport::cm::{CmId, PathOptions};
use rdma_transport::provider::Provider;

use crate::config::Config;
use crate::error::Error;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Fallback {
    /// In the order in which they are tried.
    addresses: VecDeque<SocketAddr>,
    path: PathOptions,
}

/// An attempt to connect to one address.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) peer: SocketAddr,
    pub(super) cm: CmId,
    /// The time until which the peer may stay silent.
    pub(super) deadline: Instant,
}

impl Fallback {
    pub(super) fn new(addresses: impl IntoIterator<Item = SocketAddr>, path: PathOptions) -> Self {
        Self { addresses: addresses.into_iter().collect(), path }
    }

    /// Whether no address is left.
    pub(super) fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    /// Resolves the next address that is not refused at once.
    ///
    /// # Errors
    /// That of the last address, if each is refused; [`Error::NoAddress`] if there was none.
    pub(super) fn resolve_next(
        &mut self,
        provider: &mut dyn Provider,
        config: &Config,
        now: Instant,
    ) -> Result<Attempt, Error> {
        let mut refusal = Error::NoAddress;
        while let Some(peer) = self.addresses.pop_front() {
            let patience = if self.is_empty() {
                config.connect_timeout
            } else {
                config.attempt_timeout.min(config.connect_timeout)
            };
            let deadline = now + patience;
            match provider.resolve_with(peer, &self.path, deadline) {
                Ok(cm) => return Ok(Attempt { peer, cm, deadline }),
                Err(error) => {
                    log::info!("{peer} cannot be connected to: {error}");
                    refusal = error.into();
                }
            }
        }
        Err(refusal)
    }
}

/// The addresses of a host in the order in which they are tried: that of the system, except that the families take turns, so that
/// a host with many addresses of a family that leads nowhere is soon tried by the other (RFC 8305, section 4).
pub(super) fn by_turns(addresses: &[SocketAddr]) -> impl Iterator<Item = SocketAddr> {
    let first_is_v6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (mut preferred, mut other): (VecDeque<_>, VecDeque<_>) =
        addresses.iter().copied().partition(|address| address.is_ipv6() == first_is_v6);
    std::iter::from_fn(move || {
        let next = preferred.pop_front();
        std::mem::swap(&mut preferred, &mut other);
        next.or_else(|| preferred.pop_front())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_take_turns() {
        let of = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let turns = |names: &[&str]| by_turns(&of(names)).collect::<Vec<_>>();
        let (a, b, c) = ("[::1]:1", "[::2]:1", "[::3]:1");
        let (x, y) = ("1.1.1.1:1", "2.2.2.2:1");
        assert_eq!(turns(&[a, b, c, x, y]), of(&[a, x, b, y, c]));
        assert_eq!(turns(&[x, a, b, c]), of(&[x, a, b, c]));
        assert_eq!(turns(&[x, y]), of(&[x, y]));
        assert_eq!(turns(&[]), of(&[]));
    }
}
