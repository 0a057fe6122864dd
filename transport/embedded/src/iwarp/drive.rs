//! The rounds of the provider: finds the owner of each edge and each deadline, calls its engine,
//! and applies the outcome.

use std::io;
use std::time::{Duration, Instant};

use super::endpoint::CmEndpoint;
use super::hub::{Owner, SPIN_FULL};
use super::net::{Net, NetChannel, Ready, SocketId};
use super::provider::Iwarp;
use rdma_transport::cm::CmEvent;
use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::Drive;
use rdma_transport::slab::Key;

/// The largest number of connections that one call of `progress` serves. With this limit, the
/// received data is still in the CPU caches when the program processes it after the call.
const SERVED: usize = 32;
/// The least time between two checks of a connection whose MPA reply is not sent or not
/// acknowledged. Without it, [`Iwarp::timers`] would never return if `reply_grace` is 0.
const RETRY: Duration = Duration::from_millis(1);
/// The largest number of times that one call of `next_event` reads edges.
const ROUNDS: usize = 16;

impl<N: Net> Iwarp<N> {
    /// Carries out one call of `progress`: receives and sends bytes, and handles deadlines. Returns
    /// true if more work remains.
    pub(super) fn drive(&mut self, now: Instant, drive: Drive) -> bool {
        self.hub.now = Some(now);
        self.hub.account.begin_turn();
        let more = self.drive_round(now, drive) || self.hub.account.unmaps();
        // The caller may sleep after a call with `Drive::Full`. If all completion queues are armed,
        // it may sleep after any call. So all links are armed before: only then can their peers
        // wake the caller.
        let sleeps = self.rings.unarmed && (drive == Drive::Full || self.hub.resources.cqs.are_all_armed());
        (sleeps && self.rings.arm_all(&mut self.endpoints, &mut self.hub)) || more
    }

    #[inline]
    fn drive_round(&mut self, now: Instant, drive: Drive) -> bool {
        if drive == Drive::Spin && self.hub.ready.is_empty() {
            if let Some(more) = self.spin(now) {
                return more;
            }
        }
        // Read all edges, because `has_unread` is only correct if no edge is left unread. Each
        // socket has at most one edge, which bounds the number of rounds.
        let mut more = true;
        for _ in 0..self.sockets() + 2 {
            more = self.collect(NetChannel::Completion, now).unwrap_or_else(|error| {
                local_log!(Error, "cannot poll for events of connections: {error}");
                false
            });
            if !more {
                break;
            }
        }
        for _ in 0..self.hub.ready.len().min(SERVED) {
            let Some(key) = self.hub.ready.pop_front() else { break };
            self.serve(key, now);
        }
        self.datagrams.serve_ports(&mut self.hub, now);
        self.endpoints.take_queries(&mut self.datagrams, &mut self.hub);
        self.timers(now);
        more || self.has_ready()
    }

    /// Returns true if connections or ports wait to be served.
    fn has_ready(&self) -> bool {
        !(self.hub.ready.is_empty() && self.datagrams.tables.ready.is_empty())
    }

    /// Returns the number of live connections and open UDP ports.
    pub(super) fn sockets(&self) -> usize {
        self.endpoints.streams + self.endpoints.rings + self.datagrams.tables.ports.len()
    }

    /// Runs one round of a busy poll, which only checks the connections or the port that have
    /// received most recently. Returns true if more work remains. Returns `None` if this round must
    /// check all sockets.
    #[inline]
    fn spin(&mut self, now: Instant) -> Option<bool> {
        if self.endpoints.rings > 0 {
            let others = self.sockets() - self.endpoints.rings;
            if self.rings.spin(&mut self.endpoints, &mut self.hub, others, now) {
                return Some(self.has_ready());
            }
        }
        if let Some(hot) = self.hub.hot {
            return self.spin_stream(hot, now);
        }
        if self.datagrams.tables.ready.is_empty() {
            let alone = self.endpoints.streams + self.endpoints.rings == 0;
            let more = self.datagrams.spin_port(&mut self.hub, alone, now);
            self.endpoints.take_queries(&mut self.datagrams, &mut self.hub);
            if more.is_some() {
                return more;
            }
        }
        // Without a connection, a busy poll has nothing to read. It need not send either: an edge
        // wakes the caller when a closed connection can send its unsent bytes. The caller also
        // wakes up at the next deadline.
        (self.sockets() == 0).then_some(false)
    }

    /// In most rounds of a busy poll, receives from the stream that received most recently
    /// ([`Iwarp::spin`]).
    #[inline]
    fn spin_stream(&mut self, hot: Key, now: Instant) -> Option<bool> {
        let full = if self.sockets() > 1 { 2 } else { SPIN_FULL };
        let Some(CmEndpoint::Stream(flow)) = self.endpoints.get_mut(hot) else {
            self.hub.hot = None;
            return None;
        };
        // If the send buffer of the socket is full, only an edge reports that the socket is
        // writable again. So the edges must be read.
        if flow.is_blocked() {
            return None;
        }
        self.spins = self.spins.wrapping_add(1);
        if self.spins % full == 0 {
            return None;
        }
        let outcome = flow.serve(&mut self.hub, now);
        self.endpoints.settle(&mut self.hub, hot, outcome, now);
        Some(self.has_ready())
    }

    /// Serves a live connection that was removed from the ready queue.
    fn serve(&mut self, key: Key, now: Instant) {
        let outcome = match self.endpoints.get_mut(key) {
            Some(CmEndpoint::Stream(flow)) => flow.serve(&mut self.hub, now),
            Some(CmEndpoint::Ring(flow)) => {
                let outcome = flow.serve(&mut self.hub, now);
                self.rings.heat(&mut self.endpoints, &mut self.hub, key);
                outcome
            }
            _ => return,
        };
        self.endpoints.settle(&mut self.hub, key, outcome, now);
    }

    /// Reads edges of a channel and handles them. Returns true if more edges remain.
    pub(super) fn collect(&mut self, channel: NetChannel, now: Instant) -> io::Result<bool> {
        let mut edges = std::mem::take(&mut self.edges);
        let more = self.hub.net.poll(channel, &mut edges);
        for (socket, ready) in edges.drain(..) {
            self.edge(socket, ready, now);
        }
        self.edges = edges;
        more
    }

    fn edge(&mut self, socket: SocketId, ready: Ready, now: Instant) {
        let Self { hub, endpoints, rendezvous, rings, .. } = self;
        match hub.owner(socket) {
            Some(Owner::Endpoint(key)) => match endpoints.get_mut(key) {
                Some(CmEndpoint::Stream(flow)) => flow.edge(hub, ready),
                Some(CmEndpoint::Ring(flow)) => {
                    if flow.edge(hub, ready) {
                        rings.heat(endpoints, hub, key);
                    }
                }
                Some(CmEndpoint::Listener(_)) => endpoints.accept_some(hub, key, now),
                // The bytes behind the startup frame are not read yet. These bytes cause a new edge
                // when the socket moves to the completion channel.
                Some(CmEndpoint::Request(_)) => endpoints.request_edge(hub, key, ready.closed, now),
                Some(CmEndpoint::Attempt(_)) => endpoints.attempt_edge(rendezvous, hub, key, ready.closed, now),
                Some(CmEndpoint::Datagram(_) | CmEndpoint::Dead(_)) | None => {}
            },
            Some(Owner::SetupListener) => _ = rendezvous.accept_peers(endpoints, hub, now),
            Some(Owner::NewPeer(key)) => rendezvous.read_hello(endpoints, hub, key, now),
            Some(Owner::Setup(key)) => endpoints.setup_edge(hub, key, now),
            Some(Owner::Port(key)) => self.datagrams.port_edge(hub, key, ready),
            Some(Owner::Linger(key)) => {
                if !rdma_transport::planted("a-closed-socket-sends-no-more") {
                    hub.serve_linger(key);
                }
            }
            Some(Owner::Datagram(_)) | None => {}
        }
    }

    /// Handles the deadlines that have passed.
    pub(super) fn timers(&mut self, now: Instant) {
        self.datagrams.time_queries(&mut self.hub, now);
        while let Some((due, owner)) = self.hub.deadlines.pop_passed(now) {
            let Self { hub, endpoints, rendezvous, .. } = self;
            match owner {
                Owner::Endpoint(key) => self.expire(key, due, now),
                Owner::Linger(key) => hub.end_linger(key),
                Owner::NewPeer(key) => rendezvous.close_new_peer(endpoints, hub, key, now),
                Owner::SetupListener
                    if rdma_transport::planted("a-peer-of-this-host-without-a-descriptor-is-forgotten") => {}
                Owner::SetupListener => _ = rendezvous.accept_peers(endpoints, hub, now),
                Owner::Datagram(key) => self.datagrams.expire_datagram(hub, key, now),
                Owner::Setup(_) | Owner::Port(_) => {}
            }
        }
    }

    /// Handles the deadline of an endpoint. On the passive side, the socket is read before the
    /// handshake fails, because the message of the client may have arrived in time while the
    /// process did not run.
    fn expire(&mut self, key: Key, due: Instant, now: Instant) {
        let Self { hub, endpoints, rendezvous, .. } = self;
        match endpoints.get_mut(key) {
            Some(CmEndpoint::Listener(_)) => endpoints.end_pause(hub, key, now),
            Some(CmEndpoint::Request(_)) => endpoints.expire_request(hub, key, now),
            Some(CmEndpoint::Attempt(_)) => endpoints.expire_attempt(hub, key, now),
            Some(CmEndpoint::Stream(flow)) if flow.announced => {
                let retry = now + hub.config.reply_grace.max(RETRY);
                flow.end_grace(hub, retry);
            }
            Some(CmEndpoint::Stream(_)) => {
                let late = now.saturating_duration_since(due);
                endpoints.expire_unannounced(rendezvous, hub, key, late, now);
            }
            Some(CmEndpoint::Ring(_) | CmEndpoint::Datagram(_) | CmEndpoint::Dead(_)) | None => {}
        }
    }

    /// Returns the next event of the CM channel. If no event is queued, first reads and handles
    /// edges. Returns `None` if there is still no event.
    pub(super) fn next_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        for _ in 0..ROUNDS {
            if let Some(event) = self.endpoints.next_event(&mut self.hub) {
                return Ok(Some(event));
            }
            self.timers(now);
            let mut more = self.collect(NetChannel::Cm, now).map_err(|source| TransportError::io("poll", source))?;
            let Self { hub, endpoints, rendezvous, .. } = self;
            for _ in 0..endpoints.handshakes.backlog.len() {
                match endpoints.handshakes.backlog.pop_front() {
                    Some(Key::NONE) => _ = rendezvous.accept_peers(endpoints, hub, now),
                    Some(key) => endpoints.accept_some(hub, key, now),
                    None => {}
                }
            }
            more |= !endpoints.handshakes.backlog.is_empty();
            if hub.events.is_empty() {
                // Edges are read before each start event is returned. So the events of connections
                // that have already started come first, and do not wait until all other
                // connections have started. Reading the edges also adds the requests of all hosts
                // to the queue, and removes the requests whose connection was reset.
                if let Some(start) = endpoints.next_start(hub, now) {
                    return Ok(Some(start));
                }
                if !more {
                    return Ok(None);
                }
            }
        }
        // Edges may remain unread. Wake the channel, so that the caller calls this function again.
        self.hub.net.wake(NetChannel::Cm);
        let event = self.endpoints.next_event(&mut self.hub);
        Ok(event.or_else(|| self.endpoints.next_start(&mut self.hub, now)))
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "sockets of the system are driven by its clock")]
mod tests;
