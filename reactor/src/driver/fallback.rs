//! Other addresses of a peer, which are tried when a connection does not come up.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Instant;

use rdma_transport::cm::{CmId, PathOptions};
use rdma_transport::provider::Provider;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Fallback {
    /// In the order in which they are tried.
    addresses: VecDeque<SocketAddr>,
    path: PathOptions,
}

impl Fallback {
    /// The addresses behind the first.
    pub(super) fn new(addresses: &[SocketAddr], path: PathOptions) -> Self {
        Self { addresses: addresses.iter().copied().collect(), path }
    }

    /// Whether no address is left.
    pub(super) fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    /// Resolves the next address that is not refused at once; `None` if there is none.
    pub(super) fn resolve_next(
        &mut self,
        provider: &mut dyn Provider,
        deadline: Instant,
    ) -> Option<(SocketAddr, CmId)> {
        while let Some(peer) = self.addresses.pop_front() {
            match provider.resolve_with(peer, &self.path, deadline) {
                Ok(cm) => return Some((peer, cm)),
                Err(error) => log::info!("{peer} cannot be connected to: {error}"),
            }
        }
        None
    }
}
