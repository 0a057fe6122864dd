//! The attempts that remain for a connection: addresses of the peer, and providers that may reach them.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Instant;

use rdma_transport::cm::{CmId, ExchangeOptions, PathOptions, Source};
use rdma_transport::log_limit::LogLimit;
use rdma_transport::provider::Provider;

use crate::config::Config;
use crate::error::Error;
use crate::providers::{EXCHANGE, Handle, Providers, role};

/// The attempts that remain for one connection.
#[derive(Debug)]
pub(crate) struct Fallback {
    /// The addresses of the peer, in the order of the attempts. The first address stays in the list until one provider has resolved it, or
    /// all providers were tried for it.
    addresses: VecDeque<SocketAddr>, // local: addresses that the program connects to
    /// The number of providers that were tried for the first address in the list.
    tried: usize,
    /// The deadline of the current attempt after its address is resolved. While the address is being resolved, an earlier deadline applies,
    /// because another provider can be tried if the resolution fails. `None` if no other provider remains for the address.
    limit: Option<Instant>,
    path: PathOptions,
    /// The port and the GID of a connection that is set up by exchange of queue pair numbers. `None` if a connection manager sets it up.
    exchange: Option<ExchangeOptions>,
}

/// An attempt to connect to one address over one provider.
#[derive(Debug)]
pub(crate) struct ConnectAttempt {
    pub(crate) peer: SocketAddr,
    pub(crate) cm: Handle<CmId>,
    /// The time at which the attempt fails if the peer has not answered.
    pub(crate) deadline: Instant,
}

impl Fallback {
    pub(crate) fn new(
        addresses: impl IntoIterator<Item = SocketAddr>,
        path: PathOptions,
        exchange: Option<ExchangeOptions>,
    ) -> Self {
        Self { addresses: addresses.into_iter().collect(), tried: 0, limit: None, path, exchange }
    }

    /// Returns `true` if no attempt remains.
    pub(crate) fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    /// Records that the address of the attempt is resolved, so that no other provider is tried for it. Returns the new deadline of the
    /// attempt, or `None` if the deadline does not change.
    pub(crate) fn resolved(&mut self) -> Option<Instant> {
        let limit = self.limit.take();
        if limit.is_some() {
            self.next_address();
        }
        limit
    }

    /// Starts the next attempt: makes a provider resolve an address. If the provider returns an
    /// error, tries the next combination of address and provider.
    ///
    /// # Errors
    /// All remaining attempts were refused. Returns the error of the last attempt, with two
    /// exceptions. If the program has chosen a source, returns the error of the first attempt,
    /// because the other providers may not support that source. For an exchange of queue pair
    /// numbers, returns the first error other than `Unsupported`. [`Error::NoAddress`] if there was
    /// no address.
    pub(crate) fn resolve_next(
        &mut self,
        providers: &mut Providers,
        config: &Config,
        log_limit: &mut LogLimit,
        now: Instant,
    ) -> Result<ConnectAttempt, Error> {
        self.limit = None;
        let any_source = self.path.source == Source::Any;
        let mut refusal = None;
        while let Some(&peer) = self.addresses.front() {
            let patience = match self.addresses.len() {
                1 => config.timeouts.connect,
                _ => config.timeouts.attempt.min(config.timeouts.connect),
            };
            let (limit, provider) = (now + patience, providers.nth_for(peer.ip(), self.tried));
            self.tried += 1;
            let moves_on = any_source && self.tried < providers.len();
            let by = providers.numbered(provider);
            let resolving = match &self.exchange {
                Some(options) => role(by, Provider::exchange, EXCHANGE)
                    .and_then(|role| role.resolve_exchange(peer, &self.path, options, limit)),
                None => by.resolve(peer, &self.path, limit),
            };
            match resolving {
                Ok(id) => {
                    let mut deadline = limit;
                    if moves_on {
                        deadline = limit.min(now + config.timeouts.resolve);
                        self.limit = Some(limit);
                    } else {
                        self.next_address();
                    }
                    log::debug!("{peer} is resolved by the provider {}", providers.get(provider).name());
                    return Ok(ConnectAttempt { peer, cm: Handle { provider, id }, deadline });
                }
                Err(error) => {
                    let name = providers.get(provider).name();
                    peer_log!(log_limit, now, NotUp, Info, peer, "{peer} over the provider {name}: {error}");
                    // For an exchange of queue pair numbers, a provider without support returns
                    // `Unsupported`. The error of a provider with support replaces `Unsupported`.
                    let lacks_role = matches!(&refusal, Some(rdma_transport::TransportError::Unsupported { .. }));
                    if refusal.is_none() || any_source && (self.exchange.is_none() || lacks_role) {
                        refusal = Some(error);
                    }
                    if self.tried == providers.len() {
                        self.next_address();
                    }
                }
            }
        }
        Err(refusal.map_or(Error::NoAddress, Error::from))
    }

    fn next_address(&mut self) {
        self.addresses.pop_front();
        self.tried = 0;
    }
}

/// Returns the addresses of a host in the order of the attempts. This is the order of the system's resolver, except that IPv4 and IPv6
/// addresses alternate. So if one address family is unreachable, an address of the other family is tried soon (RFC 8305, section 4).
pub(crate) fn by_turns(addresses: &[SocketAddr]) -> impl Iterator<Item = SocketAddr> {
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
