//! [`RingFlow`]: the engine of a connection in shared memory (a link). It serves the link, and
//! returns what happened to the connection.

use std::io;
use std::time::Instant;

use super::causes::{is_exhaustion, is_unreachable};
use super::flow::{End, Outcome, peer_has_gone};
use super::hub::Hub;
use super::net::{Net, NetChannel, Ready, SocketId};
use crate::shm::Segment;
use crate::shm::fault::{LinkFault, Refusal};
use crate::shm::link::{Link, TransmitProgress};
use crate::shm::packet::{CALL_PACKET, MAX_PACKET, Packet};
use rdma_transport::cm::DisconnectCause;
use rdma_transport::slab::Key;

/// The largest number of packets that one call of `read_packets` reads from a link's Unix socket.
const PACKETS: usize = 16;

/// A connection in shared memory: the engine that serves its link.
#[derive(Debug)]
pub(super) struct RingFlow<S: Segment> {
    /// The key of the connection's endpoint.
    key: Key,
    /// The Unix socket of the connection.
    pub(super) socket: SocketId,
    pub(super) link: Box<Link<S>>,
    /// True once the event `Established` was raised.
    pub(super) announced: bool,
    /// True if the socket may have packets to read.
    pub(super) readable: bool,
    /// True if the peer has closed its socket. Unread packets and records may remain.
    closed: bool,
    /// True if the connection is in the ready queue.
    queued: bool,
    /// True if the last transmission has left output that can be written now.
    has_more: bool,
    /// True if the peer could not be woken, because the system lacked memory.
    owes_call: bool,
    /// The time of the peer's last sign of life. Before the first one, the time at which the
    /// connection moved to shared memory.
    pub(super) last_heard: Instant,
}

impl<S: Segment> RingFlow<S> {
    /// Creates the flow of a connection that moves to shared memory. Packets may have arrived on
    /// the Unix socket before it moves to the completion channel, so the socket counts as readable.
    pub(super) fn new(key: Key, socket: SocketId, link: Box<Link<S>>, announced: bool, now: Instant) -> Self {
        Self {
            key,
            socket,
            link,
            announced,
            readable: true,
            closed: false,
            queued: false,
            has_more: false,
            owes_call: false,
            last_heard: now,
        }
    }

    /// Handles an edge on the Unix socket. Returns true if the link is not armed
    /// ([`RingFlow::pump`]).
    #[must_use]
    pub(super) fn edge<N: Net<Segment = S>>(&mut self, hub: &mut Hub<N>, ready: Ready) -> bool {
        self.closed |= ready.closed;
        self.readable |= ready.readable;
        if ready.readable {
            self.enqueue(hub);
        }
        ready.writable && self.is_blocked() && !rdma_transport::planted("writable-edge-ignored") && self.pump(hub)
    }

    /// Returns true if output waits for the Unix socket to become writable.
    pub(super) fn is_blocked(&self) -> bool {
        !self.link.lendings.announcements.is_empty()
    }

    #[inline]
    pub(super) fn enqueue<N: Net>(&mut self, hub: &mut Hub<N>) {
        hub.enqueue(self.key, &mut self.queued);
    }

    /// Arms the link. Returns true if input has already arrived. In that case, the caller must
    /// serve the link.
    #[must_use]
    pub(super) fn arm<N: Net>(&mut self, hub: &mut Hub<N>) -> bool {
        if self.link.is_armed() || self.queued {
            return false;
        }
        let (news, calls) = self.link.arm();
        if calls {
            self.call(hub);
        }
        news
    }

    /// Wakes the peer. If the system lacks memory, the next turn tries again. Other errors are
    /// ignored: either the socket is full of wake-ups that the peer has not read, or the peer has
    /// ended.
    #[inline]
    pub(super) fn call<N: Net>(&mut self, hub: &mut Hub<N>) {
        if let Err(error) = hub.net.pass(self.socket, &CALL_PACKET, None) {
            self.call_failed(hub, &error);
        }
    }

    #[cold]
    fn call_failed<N: Net>(&mut self, hub: &mut Hub<N>, error: &io::Error) {
        let is_lost = is_exhaustion(error) || error.kind() == io::ErrorKind::Interrupted;
        if is_lost && !rdma_transport::planted("a-call-that-fails-is-lost") {
            self.owes_call = true;
            self.enqueue(hub);
            hub.net.wake(NetChannel::Completion);
        }
    }

    /// Serves the link: reads packets, consumes records until the budget is used up, and writes
    /// pending output. Puts the link into the ready queue if work may remain. The link is not armed
    /// afterwards, unless all completion queues are armed.
    pub(super) fn serve<N: Net<Segment = S>>(&mut self, hub: &mut Hub<N>, now: Instant) -> Outcome {
        self.queued = false;
        if std::mem::take(&mut self.owes_call) {
            self.call(hub);
        }
        let called = std::mem::take(&mut self.readable);
        if called {
            self.read_packets(hub);
        }
        self.link.wake(called);
        let budget = hub.config.receive_budget;
        let mut received = self.link.receive(budget, &mut hub.resources);
        if received.as_ref().is_ok_and(|received| received.unknown_window) {
            // The peer sends the packet that announces a window before it writes the first record
            // that uses the window. So the packet is already in the socket.
            self.read_packets(hub);
            received = self.link.receive(budget, &mut hub.resources);
            if received.as_ref().is_ok_and(|received| received.unknown_window) {
                let fault = if self.link.has_lost_payload() {
                    self.link.find_refusal()
                } else {
                    Some(LinkFault::Violation(Refusal::Malformed))
                };
                let Some(fault) = fault else {
                    // The peer has ended the connection, so it no longer lends the memory of
                    // payload that the local side has not read.
                    return Outcome::Ended(End::of(peer_has_gone(false)));
                };
                received = Err(fault);
            }
        }
        let received = match received {
            Ok(received) => received,
            Err(_) if self.link.is_removed() => return Outcome::Ended(End::of(peer_has_gone(false))),
            Err(fault) => return Outcome::Ended(self.break_off(fault)),
        };
        if received.news {
            self.last_heard = now;
        }
        // The result, true if the link is not armed, is ignored: the caller of `serve` always
        // treats the link as not armed.
        let _ = self.pump(hub);
        // The peer has closed its socket, and after that, the local side has found no unread
        // records in the ring. So no more records can arrive.
        if self.closed && !received.more && !self.link.has_news() {
            let is_complete = self.link.is_at_boundary() && !self.link.is_removed();
            return Outcome::Ended(End::of(peer_has_gone(is_complete)));
        }
        if received.more || self.readable || self.closed || self.has_more {
            self.enqueue(hub);
        }
        Outcome::Going
    }

    /// Reads at most [`PACKETS`] packets from the Unix socket. If more may remain, sets `readable`.
    fn read_packets<N: Net>(&mut self, hub: &mut Hub<N>) {
        for _ in 0..PACKETS {
            let mut room = [0; MAX_PACKET];
            match hub.net.take(self.socket, &mut room) {
                Ok((0, _)) => {
                    self.closed = true;
                    return;
                }
                Ok((len, file)) => self.link.packet(Packet::parse(room.get(..len).unwrap_or_default()), file.as_ref()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The system lacks memory: the next turn tries again.
                Err(error) if is_exhaustion(&error) => break,
                Err(_) => {
                    self.closed = true;
                    return;
                }
            }
        }
        self.readable = true;
    }

    /// Writes the pending output of the link to its ring, and wakes the peer if the peer sleeps.
    /// Returns true if the link is not armed: a busy poll must check its ring (`Rings::heat`).
    #[inline]
    #[must_use]
    pub(super) fn pump<N: Net<Segment = S>>(&mut self, hub: &mut Hub<N>) -> bool {
        let sent = self.link.transmit(&mut hub.resources);
        if self.is_blocked() {
            self.pass_announcements(hub);
        }
        let calls = self.link.publish() | self.link.release();
        let more = sent == TransmitProgress::More || self.link.has_fault();
        // After `Link::transmit`, output may wait for room in the ring. In that case, a link that
        // is armed only for incoming records must also be armed for room. If all completion queues
        // are armed, the caller may sleep without another call, so every link must be armed.
        let arms = !self.link.is_armed() && (self.link.is_armed_at_all() || hub.resources.cqs.are_all_armed());
        let unarmed = !self.link.is_armed();
        self.has_more = more;
        if calls {
            self.call(hub);
        }
        let news = arms && self.arm(hub);
        if more || news {
            self.enqueue(hub);
            hub.net.wake(NetChannel::Completion);
        }
        unarmed && !arms
    }

    /// Sends the announcements of new lendings to the peer. If the socket is full, the next call of
    /// [`RingFlow::pump`] sends the remaining ones. An edge reports that the socket is writable
    /// again.
    fn pass_announcements<N: Net>(&mut self, hub: &mut Hub<N>) {
        while let Some(announcement) = self.link.lendings.announcements.pop() {
            let Err(error) = hub.net.pass(self.socket, &announcement.emit(), announcement.file()) else { continue };
            let is_full = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
            // The system also limits the descriptors in unread packets, for all processes of a user
            // together (`ETOOMANYREFS`, `unix`(7)).
            if is_full || is_exhaustion(&error) || error.raw_os_error() == Some(libc::ETOOMANYREFS) {
                return self.link.lendings.announcements.push(announcement);
            }
            log::debug!("memory is not lent to a peer of this host: {error}");
        }
    }

    /// Returns the end of a connection whose link has this fault. A violation is also reported to
    /// the peer.
    fn break_off(&mut self, fault: LinkFault) -> End {
        End::of(match fault {
            LinkFault::Violation(refusal) => {
                self.link.refuse(refusal);
                DisconnectCause::PeerViolation(refusal.to_string())
            }
            LinkFault::Refused(refusal) => DisconnectCause::TerminatedByPeer(refusal.to_string()),
            LinkFault::WorkRequest(status) => DisconnectCause::WorkRequest(status.into()),
        })
    }

    /// Flushes the work queues of a link that has ended. Closes its Unix socket if the peer has
    /// ended the connection. Otherwise ends only the local direction, and returns the socket: the
    /// peer may still read the last records.
    #[must_use]
    pub(super) fn end<N: Net>(&mut self, hub: &mut Hub<N>, cause: &DisconnectCause) -> Option<SocketId> {
        let calls = self.link.end(&mut hub.resources.cqs);
        if is_unreachable(cause) {
            hub.close(self.socket, false);
            return None;
        }
        if calls {
            self.call(hub);
        }
        hub.net.shutdown(self.socket);
        Some(self.socket)
    }
}
