//! The active side of connections: opens TCP connections, exchanges the MPA startup frames, and
//! leaves TCP for shared memory if the peer offers it.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use super::accepting::read_frame;
use super::config::SharedMemoryPolicy;
use super::endpoint::{Attempt, AttemptStep, CmEndpoint, SentSegment, Startup};
use super::endpoints::{Endpoints, Move};
use super::flow::TcpFlow;
use super::frame::Frame;
use super::hub::{Hub, Owner};
use super::net::{Net, SocketId};
use super::queue_pair::Role;
use super::rendezvous::Rendezvous;
use super::startup::{self, Agreement, FrameReader, Verdict};
use super::stream::Stream;
use super::wire::StartupKind;
use crate::shm::greeting::Offer;
use crate::shm::packet::Packet;
use crate::shm::segment::SegmentSide;
use rdma_transport::cm::{CmEventKind, ConnectFailure};
use rdma_transport::slab::Key;

impl<N: Net> Endpoints<N> {
    fn attempt(&mut self, key: Key) -> Option<&mut Attempt<N::Segment>> {
        match self.get_mut(key) {
            Some(CmEndpoint::Attempt(attempt)) => Some(attempt),
            _ => None,
        }
    }

    /// Opens the TCP connection of a connection attempt.
    pub(super) fn open(&mut self, hub: &mut Hub<N>, key: Key, startup: Box<Startup>) {
        let Some(attempt) = self.attempt(key) else { return };
        match hub.net.connect(attempt.peer) {
            Ok(socket) => {
                hub.own(socket, Owner::Endpoint(key));
                attempt.step = AttemptStep::Starting(socket, startup);
            }
            Err(error) => self.fail(hub, key, Some(startup.failure(&error)), None),
        }
    }

    /// Continues an attempt after an edge on its TCP socket: sends the MPA request once TCP has
    /// connected, and reads the reply. Fails the attempt if TCP cannot connect.
    pub(super) fn attempt_edge(
        &mut self,
        rendezvous: &mut Rendezvous,
        hub: &mut Hub<N>,
        key: Key,
        closed: bool,
        now: Instant,
    ) {
        let Some(attempt) = self.attempt(key) else { return };
        attempt.closed |= closed;
        let peer = attempt.peer;
        let (socket, startup) = match &mut attempt.step {
            AttemptStep::Starting(socket, startup) => (*socket, startup),
            // The peer has closed the TCP stream, so it will not answer the hello.
            AttemptStep::SettingUp(..) if attempt.closed => {
                return self.end_setup(hub, key, "the peer has ended the connection", now);
            }
            AttemptStep::SettingUp(..) | AttemptStep::Resolving | AttemptStep::Resolved => return,
        };
        if !startup.connected {
            match hub.net.connected(socket) {
                Ok(()) => startup.connected = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    let failure = startup.failure(&error);
                    return self.fail(hub, key, Some(failure), None);
                }
            }
            // Without the hash of the path, the peer cannot detect a proxy between the two
            // sides, so the CRC policy treats the peer as on another host.
            let path = hub.net.local_path(socket).filter(|_| startup.shows_path);
            startup.terms.local = requests_offer(hub, socket);
            (startup.terms.crc, startup.terms.path) = (hub.config.crc.is_requested(path.is_some()), path);
            startup.request = Frame::new(startup::request(&startup.terms, &startup.private_data));
        }
        let sent = startup.request.send(&mut hub.net, socket);
        let header = match read_frame(&mut hub.net, socket, &mut startup.reader) {
            Ok(Some(header)) => header,
            Ok(None) => {
                // If sending the request had failed, no reply will arrive. The failure is reported
                // only after all received bytes were read, because these bytes may show a more
                // precise cause.
                if let Err(error) = sent {
                    let failure = startup.failure(&error);
                    self.fail(hub, key, Some(failure), None);
                }
                return;
            }
            Err(ConnectFailure::PeerClosed)
                if hub.config.retry_v1 && startup.terms.revision > 1 && startup.reader.is_untouched() =>
            {
                log::debug!("{peer}: no answer to MPA revision 2, trying revision 1");
                return self.retry(hub, key);
            }
            Err(failure) => return self.fail(hub, key, Some(failure), None),
        };
        let (enhanced, private_data) = startup.reader.body();
        let private_data: Box<[u8]> = private_data.into();
        match startup::judge_reply(&startup.terms, &header, enhanced) {
            Verdict::Accepted(agreement) => {
                self.accepted(rendezvous, hub, key, (peer, socket), agreement, &private_data, now);
            }
            Verdict::Rejected => {
                self.fail(hub, key, None, Some((Vec::new(), now)));
                hub.raise(key, CmEventKind::Rejected { private_data });
            }
            Verdict::Failed(why, terminate) => {
                let rest = match terminate {
                    Some((cause, crc)) => Stream::new(crc, header.markers).end(Some((cause, None))),
                    None => Vec::new(),
                };
                self.fail(hub, key, Some(ConnectFailure::Protocol(why.into())), Some((rest, now)));
            }
        }
    }

    /// Tries again with MPA revision 1 over a new TCP connection, because some peers close a
    /// connection that requests revision 2.
    fn retry(&mut self, hub: &mut Hub<N>, key: Key) {
        let Some(attempt) = self.attempt(key) else { return };
        let AttemptStep::Starting(socket, mut startup) = std::mem::replace(&mut attempt.step, AttemptStep::Resolved)
        else {
            return;
        };
        hub.close(socket, false);
        startup.terms.revision = 1;
        startup.connected = false;
        startup.reader = FrameReader::new(StartupKind::Reply);
        attempt.closed = false;
        self.open(hub, key, startup);
    }

    /// Continues after an MPA reply that accepts the connection. If the reply contains an offer,
    /// sets up shared memory. Otherwise the connection stays on the stream. `data` is the private
    /// data of the reply.
    #[allow(clippy::too_many_arguments, reason = "the caller has found them, and they are not looked up again")]
    fn accepted(
        &mut self,
        rendezvous: &mut Rendezvous,
        hub: &mut Hub<N>,
        key: Key,
        (peer, stream): (SocketAddr, SocketId),
        agreement: Agreement,
        data: &[u8],
        now: Instant,
    ) {
        let requested = requests_offer(hub, stream);
        let offer = if requested { Offer::split(data) } else { None };
        let private_data: Box<[u8]> = offer.as_ref().map_or(data, |(data, _)| *data).into();
        let required = hub.requires_shared_memory() || offer.as_ref().is_some_and(|(_, offer)| offer.required);
        let why = match offer {
            Some((_, offer)) => match rendezvous.send_hello(self, hub, stream, &offer, now) {
                Ok((socket, segment)) => {
                    hub.own(socket, Owner::Setup(key));
                    let until = hub.deadlines.of(Owner::Endpoint(key));
                    let sent = SentSegment { socket, segment, agreement, private_data, until, required };
                    if let Some(attempt) = self.attempt(key) {
                        attempt.step = AttemptStep::SettingUp(stream, Box::new(sent));
                    }
                    // A connection that may not stay on TCP waits until the deadline of the
                    // attempt.
                    if !required {
                        let at_most = now + hub.config.within_host.meeting_timeout;
                        hub.deadlines.set(Owner::Endpoint(key), until.map_or(at_most, |until| until.min(at_most)));
                    }
                    return;
                }
                Err(error) => error.to_string(),
            },
            None if requested => "the peer offers none".into(),
            None => "the peer is not on this host".into(),
        };
        if required {
            return self.fail_without_segment(hub, key, peer, &why, now);
        }
        self.stay_on_stream(hub, key, &agreement, private_data, &why, now);
    }

    /// Continues the setup of shared memory, on either side, after an edge on its Unix socket.
    pub(super) fn setup_edge(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        if let Some(CmEndpoint::Attempt(_)) = self.get(key) {
            return self.continue_setup(hub, key, now);
        }
        if self.follow(hub, key, now) {
            return;
        }
        let Some(CmEndpoint::Stream(flow)) = self.get_mut(key) else { return };
        if let Some(end) = flow.check_offer(hub) {
            self.end(hub, key, end, now);
        }
    }

    /// Reads the peer's answer to the hello of an attempt.
    fn continue_setup(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        let Some(Attempt { step: AttemptStep::SettingUp(_, sent), .. }) = self.attempt(key) else { return };
        let mut room = [0; 8];
        let why = match hub.net.take(sent.socket, &mut room) {
            Ok((0, _)) => "the peer has refused".to_owned(),
            Ok((len, _)) => {
                if Packet::parse(room.get(..len).unwrap_or_default()) == Packet::Accepted {
                    self.leave_stream(hub, key, now);
                }
                return;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => error.to_string(),
        };
        self.end_setup(hub, key, &why, now);
    }

    /// Moves a connection to shared memory, after the peer has accepted the segment.
    fn leave_stream(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        let Some((stream, sent)) = self.take_setup(key) else { return };
        let Some(qp) = self.take_queue_pair(key) else { return };
        let SentSegment { socket, segment, agreement, private_data, .. } = *sent;
        let read_depth = agreement.read_depth();
        hub.raise(key, CmEventKind::Established { private_data, read_depth });
        let side = SegmentSide::Active;
        self.enter_segment(hub, key, Move { stream, socket, segment, side, qp, read_depth, announced: true }, now);
    }

    /// Removes the setup of shared memory from an attempt. Returns the TCP socket and the sent
    /// segment, or `None` if no setup is in progress.
    fn take_setup(&mut self, key: Key) -> Option<(SocketId, Box<SentSegment<N::Segment>>)> {
        let attempt = self.attempt(key)?;
        if !matches!(attempt.step, AttemptStep::SettingUp(..)) {
            return None;
        }
        match std::mem::replace(&mut attempt.step, AttemptStep::Resolved) {
            AttemptStep::SettingUp(stream, sent) => Some((stream, sent)),
            _ => None,
        }
    }

    /// Handles the deadline of an attempt. During the setup of shared memory, the attempt fails
    /// only if its own deadline, `until`, has passed. Otherwise reads the peer's answer to the
    /// hello, and ends only the setup if there is none.
    pub(super) fn expire_attempt(&mut self, hub: &mut Hub<N>, key: Key, now: Instant) {
        let Some(attempt) = self.attempt(key) else { return };
        match &attempt.step {
            AttemptStep::SettingUp(_, sent) if sent.until.is_some_and(|until| until <= now) => {
                self.fail(hub, key, Some(ConnectFailure::Timeout), Some((Vec::new(), now)));
            }
            AttemptStep::SettingUp(..) => {
                self.continue_setup(hub, key, now);
                self.end_setup(hub, key, "no answer in time", now);
            }
            AttemptStep::Resolving | AttemptStep::Resolved | AttemptStep::Starting(..) => {
                self.fail(hub, key, Some(ConnectFailure::Timeout), None);
            }
        }
    }

    /// Ends the setup of shared memory, for the reason `why`. The connection stays on the TCP
    /// stream. If shared memory is required, the connection fails instead.
    fn end_setup(&mut self, hub: &mut Hub<N>, key: Key, why: &str, now: Instant) {
        let Some(Attempt { peer, step: AttemptStep::SettingUp(_, sent), .. }) = self.attempt(key) else { return };
        if sent.required {
            let peer = *peer;
            return self.fail_without_segment(hub, key, peer, why, now);
        }
        let (socket, agreement, private_data) = (sent.socket, sent.agreement, std::mem::take(&mut sent.private_data));
        hub.close(socket, false);
        self.stay_on_stream(hub, key, &agreement, private_data, why, now);
    }

    /// Fails a connection attempt that may not stay on TCP, and cannot use shared memory for the
    /// reason `why`.
    fn fail_without_segment(&mut self, hub: &mut Hub<N>, key: Key, peer: SocketAddr, why: &str, now: Instant) {
        let failure = if hub.requires_shared_memory() {
            ConnectFailure::Unreachable(format!("no shared memory with {peer}: {why}"))
        } else {
            ConnectFailure::SharedMemoryOnly(why.into())
        };
        self.fail(hub, key, Some(failure), Some((Vec::new(), now)));
    }

    /// Starts the TCP stream. `why` is the reason why the connection is not in shared memory.
    fn stay_on_stream(
        &mut self,
        hub: &mut Hub<N>,
        key: Key,
        agreement: &Agreement,
        private_data: Box<[u8]>,
        why: &str,
        now: Instant,
    ) {
        let Some(attempt) = self.attempt(key) else { return };
        if hub.config.shared_memory != SharedMemoryPolicy::Off {
            log::debug!("{}: over TCP, not in shared memory: {why}", attempt.peer);
        }
        let (AttemptStep::Starting(socket, _) | AttemptStep::SettingUp(socket, _)) = &attempt.step else { return };
        let (socket, closed) = (*socket, attempt.closed);
        let Some(qp) = attempt.qp.take() else { return };
        let mut flow = TcpFlow::new(key, socket, qp, closed, now);
        flow.announced = true;
        hub.deadlines.clear(Owner::Endpoint(key));
        hub.raise(key, CmEventKind::Established { private_data, read_depth: agreement.read_depth() });
        self.begin(hub, flow, Role::Initiator, agreement, now);
    }
}

/// Returns true if the MPA request on this socket announces that the local side can use shared
/// memory.
fn requests_offer<N: Net>(hub: &Hub<N>, socket: SocketId) -> bool {
    hub.config.shared_memory != SharedMemoryPolicy::Off && hub.net.local_path(socket).is_some()
}
