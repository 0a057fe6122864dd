//! The unfinished handshakes that peers have started. A connection is *half-open* until its
//! complete MPA request has arrived.
//!
//! A peer that connects and sends nothing occupies a socket, an endpoint and a buffer. Such a peer
//! must not exclude other peers. So the number of unfinished handshakes is limited, in total and
//! per host. At a limit, the oldest half-open connection is evicted, after a grace time for its
//! request.

use std::collections::VecDeque;

use super::hub::{Hub, Owner};
use super::net::{Net, NetChannel};
use rdma_transport::log_limit::LogLimit;
use rdma_transport::newcomers::{Host, Newcomers};
use rdma_transport::slab::Key;

/// The handshakes that peers have started with a provider.
#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// The number of unfinished handshakes.
    pub(super) unfinished: usize,
    /// The endpoints of half-open connections.
    pub(super) half_open: Newcomers<Key>, // bound: half-open
    /// A host with more half-open connections than the limit per host. `None` if no host exceeds
    /// the limit.
    pub(super) crowd: Option<Host>,
    /// The listeners that are paused because the limit of handshakes was reached. They resume when
    /// a handshake finishes, or at their deadline, when a half-open connection may be evicted.
    pub(super) paused: Vec<Key>, // local: listeners of the program
    /// The listeners that may have more connections to accept. [`Key::NONE`] stands for the Unix
    /// listener for peers on this host.
    pub(super) backlog: VecDeque<Key>, // local: listeners of the program
    pub(super) log_limit: LogLimit,
}

impl Handshakes {
    /// Returns true if a listener is paused, because the limit of handshakes was reached, or
    /// because the system had no descriptor or memory for a connection. In the second case, the
    /// listener accepts connections again at its deadline.
    pub(super) fn is_paused<N: Net>(&self, hub: &Hub<N>, listener: Key) -> bool {
        self.paused.contains(&listener) || hub.deadlines.of(Owner::Endpoint(listener)).is_some()
    }

    /// Resumes the listeners that are paused because the limit of handshakes was reached.
    pub(super) fn resume<N: Net>(&mut self, hub: &mut Hub<N>) {
        if self.paused.is_empty() {
            return;
        }
        for key in std::mem::take(&mut self.paused) {
            hub.deadlines.clear(Owner::Endpoint(key));
            self.accept_later(key);
        }
        hub.net.wake(NetChannel::Cm);
    }

    /// Adds a listener to the backlog, unless the backlog contains the listener already. A round
    /// serves a listener once per entry, so duplicates would repeat the work.
    pub(super) fn accept_later(&mut self, listener: Key) {
        if !self.backlog.contains(&listener) {
            self.backlog.push_back(listener);
        }
    }
}
