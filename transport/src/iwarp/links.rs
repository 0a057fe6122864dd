//! The connections in shared memory (links). This module decides which rings a busy poll checks and which peers are woken.
//!
//! A link is *armed* if the local side has announced in the shared memory that the local side sleeps. A peer wakes this side only if the
//! link is armed. So all links are armed before the caller sleeps. The links that have received something recently are *hot*: in most
//! rounds, a busy poll only checks the rings of hot links. Each link that is not armed is hot.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::drive::peer_has_gone;
use super::endpoint::{CmEndpoint, EndpointState};
use super::handshake::is_exhaustion;
use super::net::{Net, NetChannel, SocketId};
use super::provider::Iwarp;
use super::transmit::Sent;
use crate::cm::DisconnectCause;
use crate::error::Result;
use crate::mr::{Access, MrId};
use crate::qp::QpId;
use crate::roles;
use crate::shm::fault::{LinkFault, Refusal};
use crate::shm::link::{Link, ReceiveProgress, TransmitProgress};
use crate::shm::packet::{CALL_PACKET, MAX_PACKET, Packet};
use crate::slab::Key;

/// The largest number of hot links, whose rings a busy poll checks in every round.
const MAX_HOT: usize = 32;
/// The number of rounds of a busy poll without input after which a link is no longer hot.
const IDLE: u32 = 10_000;
/// A busy poll checks all connections in one of 64 rounds, or in one of 2 rounds if there are also connections on TCP. In the other rounds,
/// a busy poll only checks the rings of hot links.
const ROUNDS: (u32, u32) = (64, 2);
/// The largest number of packets that are read from a link's Unix socket at a time.
const PACKETS: usize = 16;

impl<N: Net> Iwarp<N> {
    /// Runs one round of a busy poll on the rings of hot links. Returns true if more work remains. Returns `None` if this round must check
    /// all connections.
    #[inline]
    pub(super) fn spin_links(&mut self, now: Instant) -> Option<bool> {
        self.links.rounds = self.links.rounds.wrapping_add(1);
        let mut found = false;
        let mut at = 0;
        while let Some(&mut (key, ref mut idle)) = self.links.hot.get_mut(at) {
            let Some(CmEndpoint { state: EndpointState::Live, link: Some(link), .. }) = self.endpoints.get(key) else {
                self.links.hot.swap_remove(at);
                continue;
            };
            if link.has_work() {
                (*idle, found) = (0, true);
                if self.serve(key, now) {
                    self.enqueue(key);
                }
            } else {
                *idle += 1;
                if *idle > IDLE {
                    self.cool(at);
                    continue;
                }
            }
            at += 1;
        }
        let every = if self.sockets() > self.links.count { ROUNDS.1 } else { ROUNDS.0 };
        (found || self.links.rounds % every != 0)
            .then_some(!(self.hub.ready.is_empty() && self.datagrams.tables.ready.is_empty()))
    }

    /// Makes a link hot, so that a busy poll checks its ring in every round.
    #[inline]
    fn heat(&mut self, key: Key) {
        self.links.unarmed = true;
        if self.links.hot.iter().any(|hot| hot.0 == key) {
            return;
        }
        if self.links.hot.len() == MAX_HOT {
            let idlest = (0..MAX_HOT).max_by_key(|&at| self.links.hot[at].1).unwrap_or(0);
            self.cool(idlest);
        }
        self.links.hot.push((key, 0));
    }

    /// Removes a link from the hot links and arms it. The peer of an armed link wakes this side when there is input.
    fn cool(&mut self, at: usize) {
        let (key, _) = self.links.hot.swap_remove(at);
        if self.arm_link(key) {
            self.enqueue(key);
            self.hub.net.wake(NetChannel::Completion);
        }
    }

    /// Arms all links, before the caller may sleep. Returns true if input has already arrived on a link.
    pub(super) fn arm_links(&mut self) -> bool {
        self.links.unarmed = false;
        let mut news = false;
        for at in 0..self.links.hot.len() {
            let key = self.links.hot[at].0;
            if self.arm_link(key) {
                self.enqueue(key);
                news = true;
            }
        }
        news
    }

    /// Arms a link. Returns true if input has already arrived. In that case, the caller must serve the link.
    fn arm_link(&mut self, key: Key) -> bool {
        let Some(CmEndpoint { state: EndpointState::Live, link: Some(link), socket: Some(socket), queued, .. }) =
            self.endpoints.get_mut(key)
        else {
            return false;
        };
        if link.is_armed() || *queued {
            return false;
        }
        let (news, calls) = link.arm();
        let socket = *socket;
        if calls {
            self.call(socket);
        }
        news
    }

    /// Wakes the peer of a link. An error is ignored: either the socket is full of wake-ups that the peer has not read, or the peer has
    /// ended.
    #[inline]
    fn call(&mut self, socket: SocketId) {
        let _ = self.hub.net.pass(socket, &CALL_PACKET, None);
    }

    /// Serves a link: reads packets, consumes records until the budget is used up, and writes pending output. Returns true if work may
    /// remain.
    pub(super) fn serve(&mut self, key: Key, now: Instant) -> bool {
        let Some(endpoint @ CmEndpoint { state: EndpointState::Live, link: Some(_), socket: Some(_), .. }) =
            self.endpoints.get_mut(key)
        else {
            return false;
        };
        endpoint.queued = false;
        let called = std::mem::take(&mut endpoint.readable);
        if called {
            self.read_packets(key);
        }
        let Some(CmEndpoint { link: Some(link), .. }) = self.endpoints.get_mut(key) else { return false };
        link.wake(called);
        self.heat(key);
        let mut received = self.consume(key);
        if received.as_ref().is_ok_and(|received| received.unknown_window) {
            // The peer sends the packet that announces a window before it writes the first record that uses the window. So the packet is
            // already in the socket.
            self.read_packets(key);
            received = self.consume(key);
            if received.as_ref().is_ok_and(|received| received.unknown_window) {
                let Some(CmEndpoint { link: Some(link), .. }) = self.endpoints.get_mut(key) else { return false };
                let fault = if link.has_lost_payload() {
                    link.find_refusal()
                } else {
                    Some(LinkFault::Violation(Refusal::Malformed))
                };
                let Some(fault) = fault else {
                    // The peer has ended the connection, and with it the lending of memory that this side has not read.
                    self.end(key, peer_has_gone(false), None, now);
                    return false;
                };
                received = Err(fault);
            }
        }
        let received = match received {
            Ok(received) => received,
            Err(fault) => {
                self.break_link(key, fault, now);
                return false;
            }
        };
        let Some(endpoint @ CmEndpoint { link: Some(_), .. }) = self.endpoints.get_mut(key) else { return false };
        if received.news {
            endpoint.last_heard = Some(now);
        }
        self.pump(key);
        let Some(CmEndpoint { state: EndpointState::Live, link: Some(link), closed, readable, sent, .. }) =
            self.endpoints.get_mut(key)
        else {
            return false;
        };
        // The peer has closed its socket, and the ring was found empty after that. So no more records can arrive.
        if *closed && !received.more && !link.has_news() {
            let cause = peer_has_gone(link.is_at_boundary());
            self.end(key, cause, None, now);
            return false;
        }
        received.more || *readable || *closed || *sent == Sent::More
    }

    #[inline]
    fn consume(&mut self, key: Key) -> std::result::Result<ReceiveProgress, LinkFault> {
        let budget = self.hub.config.receive_budget;
        match self.endpoints.get_mut(key) {
            Some(CmEndpoint { link: Some(link), .. }) => link.receive(budget, &mut self.hub.resources),
            _ => Err(LinkFault::Violation(Refusal::Malformed)),
        }
    }

    /// Reads packets from the Unix socket of a link, at most [`PACKETS`] at a time.
    fn read_packets(&mut self, key: Key) {
        let Some(endpoint @ CmEndpoint { link: Some(_), .. }) = self.endpoints.get_mut(key) else { return };
        let (Some(socket), Some(link)) = (endpoint.socket, endpoint.link.as_mut()) else { return };
        for _ in 0..PACKETS {
            let mut room = [0; MAX_PACKET];
            match self.hub.net.take(socket, &mut room) {
                Ok((0, _)) => {
                    endpoint.closed = true;
                    return;
                }
                Ok((len, file)) => link.packet(Packet::parse(room.get(..len).unwrap_or_default()), file.as_ref()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    endpoint.closed = true;
                    return;
                }
            }
        }
        endpoint.readable = true;
    }

    /// Writes the pending output of a link to its ring, and wakes the peer if the peer sleeps.
    #[inline]
    pub(super) fn pump(&mut self, key: Key) {
        let Some(endpoint @ CmEndpoint { state: EndpointState::Live, link: Some(_), .. }) = self.endpoints.get_mut(key)
        else {
            return;
        };
        let (Some(link), Some(socket)) = (endpoint.link.as_mut(), endpoint.socket) else { return };
        let sent = link.transmit(&mut self.hub.resources);
        if link.has_announcements() {
            announce(&mut self.hub.net, socket, link);
        }
        let calls = link.publish() | link.release();
        let more = sent == TransmitProgress::More || link.has_fault();
        // After `Link::transmit`, output may wait for room in the ring. In that case, a link that is armed only for incoming records must
        // also be armed for room. If all completion queues are armed, the caller may sleep without another call, so every link must be
        // armed.
        let arms = !link.is_armed() && (link.is_armed_at_all() || self.hub.resources.cqs.are_all_armed());
        let unarmed = !link.is_armed();
        endpoint.sent = if more { Sent::More } else { Sent::All };
        if calls {
            self.call(socket);
        }
        let news = if arms { self.arm_link(key) } else { false };
        if unarmed && !arms {
            self.heat(key);
        }
        if more || news {
            self.enqueue(key);
            self.hub.net.wake(NetChannel::Completion);
        }
    }

    /// Ends a link because of a fault.
    fn break_link(&mut self, key: Key, fault: LinkFault, now: Instant) {
        let cause = match fault {
            LinkFault::Violation(refusal) => {
                if let Some(CmEndpoint { link: Some(link), .. }) = self.endpoints.get_mut(key) {
                    link.refuse(refusal);
                }
                DisconnectCause::PeerViolation(refusal.to_string())
            }
            LinkFault::Refused(refusal) => DisconnectCause::TerminatedByPeer(refusal.to_string()),
            LinkFault::WorkRequest(status) => DisconnectCause::WorkRequest(status.into()),
        };
        self.end(key, cause, None, now);
    }

    /// Publishes the last output of a link that is about to be dropped, and wakes the peer if the peer sleeps.
    pub(super) fn leave_link(&mut self, key: Key) {
        let Some(CmEndpoint { link: Some(link), socket: Some(socket), .. }) = self.endpoints.get_mut(key) else {
            return;
        };
        let socket = *socket;
        if link.publish() {
            self.call(socket);
        }
    }

    /// Flushes the work queues of a link that has ended, and closes its Unix socket.
    pub(super) fn end_link(&mut self, key: Key) {
        let Some(endpoint @ CmEndpoint { link: Some(_), .. }) = self.endpoints.get_mut(key) else { return };
        let (Some(link), socket) = (endpoint.link.as_mut(), endpoint.socket.take()) else { return };
        let calls = link.end(&mut self.hub.resources.cqs);
        if let Some(socket) = socket {
            if calls {
                self.call(socket);
            }
            self.hub.close(socket, false);
        }
    }

    /// Ends the lendings of a region. No correct peer begins an access to the region through shared memory afterwards, but a peer that has
    /// mapped the region keeps its pages ([`Access::DIRECT`](crate::Access::DIRECT)). Called before the region is deregistered.
    pub(super) fn revoke(&mut self, region: MrId) -> Result<()> {
        let (key, memory, access) = self.hub.resources.keys.memory(region)?;
        if crate::planted("a-lending-outlives-its-file") && memory.file().is_none() {
            return Ok(());
        }
        let all = if access.contains(Access::DIRECT) { self.endpoints.keys() } else { Vec::new() };
        for id in all.into_iter().chain(self.hub.resources.keys.lent_to(region)) {
            if let Some(CmEndpoint { link: Some(link), .. }) = self.endpoints.get_mut(id) {
                link.take_back(key);
            }
        }
        Ok(())
    }
}

/// Sends the announcements of new lendings to the peer. If the socket is full, the next call of
/// [`Iwarp::pump`] sends the remaining ones. An edge reports that the socket is writable again.
fn announce<N: Net>(net: &mut N, socket: SocketId, link: &mut Link<N::Segment>) {
    while let Some(announcement) = link.next_announcement() {
        let Err(error) = net.pass(socket, &announcement.emit(), announcement.file()) else { continue };
        let is_full = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
        // The system also limits the descriptors that are in packets, for all processes of a user.
        if is_full || is_exhaustion(&error) || error.raw_os_error() == Some(libc::ETOOMANYREFS) {
            return link.announce_later(announcement);
        }
        log::debug!("memory is not lent to a peer of this host: {error}");
    }
}

impl<N: Net> roles::SharedMemory for Iwarp<N> {
    fn is_shared(&self, qp: QpId) -> bool {
        self.endpoints.get(qp.0).is_some_and(|endpoint| endpoint.link.is_some())
    }

    fn lend(&mut self, qp: QpId, region: MrId, file: Option<OwnedFd>) -> Result<bool> {
        let (key, memory, access) = self.hub.resources.keys.memory(region)?;
        let lent = match self.endpoints.get_mut(qp.0) {
            Some(CmEndpoint { state: EndpointState::Live, link: Some(link), .. })
                if self.hub.resources.keys.lent_to(region).is_none() =>
            {
                link.lend((memory, file), key, access & Access::REMOTE_READ)
            }
            _ => false,
        };
        if lent {
            self.hub.resources.keys.lend(region, qp.0)?;
        }
        self.pump(qp.0);
        Ok(lent)
    }
}

#[cfg(test)]
mod tests;
