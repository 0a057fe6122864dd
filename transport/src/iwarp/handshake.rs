//! What happens on the CM channel: connections come and go, startup frames are read and answered.

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::time::Instant;

use super::endpoint::{Attempt, Endpoint, State, connect_failure};
use super::net::{Channel, Net, SocketId};
use super::provider::{Iwarp, Owner};
use super::queue_pair::Role;
use super::startup::{self, Agreement, FrameReader, Judgement, Verdict};
use super::stream::Stream;
use super::wire::StartupKind;
use crate::cm::{CmEvent, CmEventKind, CmId, ConnectFailure};
use crate::error::{Error, Result};
use crate::provider::DeviceId;
use crate::slab::Key;

/// Connections accepted at a time, and rounds of looking for more in one call of the getter.
const ACCEPTS: usize = 64;
const ROUNDS: usize = 16;

impl<N: Net> Iwarp<N> {
    /// The next event; edges are looked at when none is queued.
    pub(super) fn next_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        for _ in 0..ROUNDS {
            if let Some(event) = self.cm_events.pop_front() {
                return Ok(Some(event));
            }
            self.timers(now);
            let mut more = self.collect(Channel::Cm, now).map_err(|source| Error::io("poll", source))?;
            for _ in 0..self.backlog.len() {
                if let Some(key) = self.backlog.pop_front() {
                    self.accept_some(key, now);
                }
            }
            more |= !self.backlog.is_empty();
            if !more && self.cm_events.is_empty() {
                return Ok(None);
            }
        }
        // Others wait, too: come again.
        self.net.wake(Channel::Cm);
        Ok(self.cm_events.pop_front())
    }

    /// Takes connections of a listener.
    pub(super) fn accept_some(&mut self, key: Key, now: Instant) {
        let Some(Endpoint { state: State::Listening, socket: Some(socket), .. }) = self.endpoints.get(key) else {
            return;
        };
        let listener = *socket;
        for _ in 0..ACCEPTS {
            if self.handshakes >= self.config.max_handshakes {
                // The rest waits in the listener's backlog until one of these is done, or has had its time.
                log::debug!("{} handshakes are not finished: no more are begun", self.handshakes);
                self.paused.push(key);
                return;
            }
            match self.net.accept(listener) {
                Ok((socket, peer)) => self.requested(CmId(key), socket, peer, now),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    _ => {
                        // No descriptor, no memory: the edge does not come again, so a deadline does.
                        log::warn!("accept: {error}; trying again in {:?}", self.config.accept_backoff);
                        self.set_deadline(key, Some(now + self.config.accept_backoff));
                        return;
                    }
                },
            }
        }
        self.backlog.push_back(key);
    }

    /// A peer has connected: its request is awaited.
    fn requested(&mut self, listener: CmId, socket: SocketId, peer: SocketAddr, now: Instant) {
        let key = self.endpoints.insert(Endpoint::new(State::Dead, Some(socket)));
        let reader = Box::new(FrameReader::new(StartupKind::Request));
        self.transition(key, State::Requesting { reader, listener, peer });
        self.own(socket, Owner::Endpoint(key));
        self.set_deadline(key, Some(now + self.config.request_timeout));
        self.read_request(key, now);
    }

    /// An edge on a socket in its handshake.
    pub(super) fn advance(&mut self, key: Key, now: Instant) {
        match self.endpoints.get(key).map(|endpoint| &endpoint.state) {
            Some(State::Requesting { .. }) => self.read_request(key, now),
            Some(State::Connecting(..)) => self.finish_connect(key, now),
            Some(State::Replying(..)) => self.read_reply(key, now),
            _ => {}
        }
    }

    fn read_request(&mut self, key: Key, now: Instant) {
        let Some(Endpoint { state: State::Requesting { reader, listener, peer }, socket: Some(socket), .. }) =
            self.endpoints.get_mut(key)
        else {
            return;
        };
        let (socket, listener, peer) = (*socket, *listener, *peer);
        let header = match read_frame(&mut self.net, socket, reader) {
            Ok(Some(header)) => header,
            Ok(None) => return,
            Err(failure) => {
                log::debug!("{peer}: {failure}");
                return self.drop_socket(key);
            }
        };
        let (enhanced, private_data) = reader.body();
        match startup::judge_request(&header, enhanced, self.config.markers) {
            Judgement::Acceptable(asked) => {
                let private_data = private_data.into();
                let read_depth = asked.read_depth(self.config.read_depth);
                self.transition(key, State::Offered(asked));
                if self.endpoints.get(listener.0).is_none() {
                    let reply = startup::reject(&asked, &[]);
                    if let Some(socket) = self.remove(key) {
                        self.linger(socket, reply, now);
                    }
                    return;
                }
                self.set_deadline(key, Some(now + self.config.accept_timeout));
                let device = DeviceId(0);
                self.raise(key, CmEventKind::ConnectRequest { listener, device, peer, private_data, read_depth });
            }
            Judgement::Refused(why, asked) => {
                log::warn!("{peer}: rejected: {why}");
                let reply = startup::reject(&asked, &[]);
                if let Some(socket) = self.remove(key) {
                    self.linger(socket, reply, now);
                }
            }
            Judgement::Unknown(why) => {
                log::debug!("{peer}: not answered: {why}");
                self.drop_socket(key);
            }
        }
    }

    /// Forgets an endpoint that the user does not know.
    fn drop_socket(&mut self, key: Key) {
        if let Some(socket) = self.remove(key) {
            self.close(socket, false);
        }
    }

    /// Takes an endpoint and its queue pair away; its socket is left to the caller.
    pub(super) fn remove(&mut self, key: Key) -> Option<SocketId> {
        self.transition(key, State::Dead);
        let endpoint = self.endpoints.remove(key)?;
        self.cm_events.retain(|event| event.id != CmId(key));
        if let Some(qp) = endpoint.qp {
            qp.release_queues(&mut self.resources);
        }
        endpoint.socket
    }

    /// Opens the TCP connection of an attempt.
    pub(super) fn open(&mut self, key: Key, attempt: Box<Attempt>, peer: SocketAddr) {
        match self.net.connect(peer) {
            Ok(socket) => {
                self.own(socket, Owner::Endpoint(key));
                self.transition(key, State::Connecting(attempt, peer));
                if let Some(endpoint) = self.endpoints.get_mut(key) {
                    endpoint.socket = Some(socket);
                }
            }
            Err(error) => self.fail_now(key, connect_failure(&error)),
        }
    }

    /// Ends an attempt that has no socket.
    fn fail_now(&mut self, key: Key, failure: ConnectFailure) {
        self.transition(key, State::Dead);
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.deadline = None;
            if let Some(qp) = &mut endpoint.qp {
                qp.end(None, &mut self.resources.cqs);
            }
        }
        self.raise(key, CmEventKind::ConnectFailed(failure));
    }

    /// Ends a handshake: the user is told `failure`, the peer `rest`.
    pub(super) fn fail(&mut self, key: Key, failure: Option<ConnectFailure>, rest: Option<Vec<u8>>, now: Instant) {
        self.transition(key, State::Dead);
        let Some(endpoint) = self.endpoints.get_mut(key) else { return };
        endpoint.deadline = None;
        let socket = endpoint.socket.take();
        if let Some(qp) = &mut endpoint.qp {
            qp.end(None, &mut self.resources.cqs);
        }
        match (socket, rest) {
            (Some(socket), Some(rest)) => self.linger(socket, rest, now),
            (Some(socket), None) => self.close(socket, false),
            (None, _) => {}
        }
        if let Some(failure) = failure {
            self.raise(key, CmEventKind::ConnectFailed(failure));
        }
    }

    /// TCP may have connected: the request is sent.
    fn finish_connect(&mut self, key: Key, now: Instant) {
        let Some(endpoint) = self.endpoints.get_mut(key) else { return };
        let Some(socket) = endpoint.socket else { return };
        match self.net.connected(socket) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => return self.fail(key, Some(connect_failure(&error)), None, now),
        }
        let Some(State::Connecting(attempt, peer)) = self.transition(key, State::Dead) else { return };
        let frame = startup::request(&attempt.terms, &attempt.private_data);
        self.transition(key, State::Replying(attempt, peer));
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.frame = frame;
            endpoint.frame_sent = 0;
        }
        self.read_reply(key, now);
    }

    fn read_reply(&mut self, key: Key, now: Instant) {
        let Some(endpoint) = self.endpoints.get_mut(key) else { return };
        if let Err(error) = endpoint.send_frame(&mut self.net) {
            log::debug!("sending the request: {error}");
        }
        let (State::Replying(attempt, peer), Some(socket)) = (&mut endpoint.state, endpoint.socket) else { return };
        let peer = *peer;
        let header = match read_frame(&mut self.net, socket, &mut attempt.reader) {
            Ok(Some(header)) => header,
            Ok(None) => return,
            Err(ConnectFailure::PeerClosed)
                if self.config.retry_v1 && attempt.terms.revision > 1 && attempt.reader.is_untouched() =>
            {
                return self.retry(key, socket, peer);
            }
            Err(failure) => return self.fail(key, Some(failure), None, now),
        };
        let (enhanced, private_data) = attempt.reader.body();
        let private_data: Box<[u8]> = private_data.into();
        match startup::judge_reply(&attempt.terms, &header, enhanced) {
            Verdict::Accepted(agreement) => {
                self.transition(key, State::Live);
                if let Some(endpoint) = self.endpoints.get_mut(key) {
                    endpoint.announced = true;
                }
                self.set_deadline(key, None);
                let read_depth = agreement.read_depth();
                self.raise(key, CmEventKind::Established { private_data, read_depth });
                self.begin(key, socket, Role::Initiator, &agreement, now);
            }
            Verdict::Rejected => {
                self.fail(key, None, Some(Vec::new()), now);
                self.raise(key, CmEventKind::Rejected { private_data });
            }
            Verdict::Failed(why, terminate) => {
                let rest = match terminate {
                    Some((cause, crc)) => Stream::new(crc, header.markers).end(Some((cause, None))),
                    None => Vec::new(),
                };
                self.fail(key, Some(ConnectFailure::Protocol(why.into())), Some(rest), now);
            }
        }
    }

    /// Some peers hang up on revision 2: once more with revision 1, over a connection of its own.
    fn retry(&mut self, key: Key, socket: SocketId, peer: SocketAddr) {
        log::debug!("{peer}: no answer to MPA revision 2, trying revision 1");
        self.close(socket, false);
        let Some(State::Replying(mut attempt, peer)) = self.transition(key, State::Dead) else { return };
        attempt.terms.revision = 1;
        attempt.reader = FrameReader::new(StartupKind::Reply);
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.socket = None;
            endpoint.frame = Vec::new();
            endpoint.frame_sent = 0;
        }
        self.open(key, attempt, peer);
    }

    /// Starts the stream of a connection that is now live, on the completion channel.
    pub(super) fn begin(&mut self, key: Key, socket: SocketId, role: Role, agreement: &Agreement, now: Instant) {
        if let Err(error) = self.net.promote(socket) {
            return self.end(key, super::endpoint::lost(&error), None, now);
        }
        let max_segment = self.net.max_segment(socket).unwrap_or(536);
        if let Some(qp) = self.endpoints.get_mut(key).and_then(|endpoint| endpoint.qp.as_mut()) {
            qp.establish(role, agreement, max_segment);
        }
        if role == Role::Responder {
            // A client that promised to speak first is awaited; another one gets the time to read the reply.
            let wait = if agreement.rtr.is_some() {
                self.config.ready_timeout
            } else {
                self.announce(key);
                self.config.reply_grace
            };
            self.set_deadline(key, Some(now + wait));
        }
        self.transmit(key);
    }
}

/// Reads what is there of a startup frame; the header when it is complete.
fn read_frame(
    net: &mut impl Net,
    socket: SocketId,
    reader: &mut FrameReader,
) -> std::result::Result<Option<super::wire::StartupHeader>, ConnectFailure> {
    loop {
        match net.recv(socket, &mut [IoSliceMut::new(reader.space())]) {
            Ok(0) => return Err(ConnectFailure::PeerClosed),
            Ok(n) => match reader.filled(n) {
                Ok(None) => {}
                Ok(header) => return Ok(header),
                Err(error) => return Err(ConnectFailure::Protocol(error.to_string())),
            },
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(connect_failure(&error)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;
    use crate::cm::{ConnectParam, DisconnectCause};
    use crate::iwarp::{CrcPolicy, IwarpConfig, TcpNet};
    use crate::mem::Memory;
    use crate::provider::{CqId, Drive, Provider};
    use crate::qp::{QpAttr, QpId};
    use crate::wc::WcStatus;
    use crate::wr::{SendFlags, SendOp, SendWr, SgeList};
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    /// The provider against a peer that is nothing but a socket.
    struct Bench {
        iwarp: Iwarp<TcpNet>,
        cq: CqId,
        now: Instant,
        events: Vec<CmEvent>,
    }

    impl Bench {
        fn new(config: IwarpConfig) -> Self {
            let mut iwarp = Iwarp::new(config, TcpNet::new().unwrap(), Box::new(|bytes| bytes.fill(0))).unwrap();
            let cq = iwarp.create_cq(DeviceId(0), 64).unwrap();
            Self { iwarp, cq, now: Instant::now(), events: Vec::new() }
        }

        fn turn(&mut self) {
            self.iwarp.progress(self.now, Drive::Full);
            while let Some(event) = self.iwarp.next_cm_event(self.now).unwrap() {
                self.events.push(event);
            }
        }

        fn qp(&mut self, id: CmId) -> QpId {
            let (send_cq, recv_cq) = (self.cq, self.cq);
            let attr = QpAttr { send_cq, recv_cq, max_send_wr: 4, max_recv_wr: 4, max_inline: 0 };
            self.iwarp.create_qp(id, &attr).unwrap()
        }

        fn listen(&mut self) -> (CmId, TcpStream) {
            let id = self.iwarp.listen("127.0.0.1:0".parse().unwrap(), 8).unwrap();
            let peer = TcpStream::connect(self.iwarp.local_address(id).unwrap()).unwrap();
            peer.set_nonblocking(true).unwrap();
            (id, peer)
        }

        /// Starts to connect to `listener`.
        fn connect(&mut self, listener: &TcpListener) -> CmId {
            let deadline = self.now + Duration::from_secs(60);
            let id = self.iwarp.resolve(listener.local_addr().unwrap(), deadline).unwrap();
            self.qp(id);
            self.iwarp.connect(id, &ConnectParam::default()).unwrap();
            id
        }

        fn accept(&mut self, listener: &TcpListener) -> TcpStream {
            let (peer, _) = listener.accept().unwrap();
            peer.set_nonblocking(true).unwrap();
            peer
        }

        /// Reads exactly `len` bytes.
        fn read(&mut self, peer: &mut TcpStream, len: usize) -> Vec<u8> {
            let (mut bytes, mut at) = (vec![0; len], 0);
            let end = Instant::now() + Duration::from_secs(10);
            while at < len {
                assert!(Instant::now() < end, "{at} of {len} bytes, {:?}", self.events);
                self.turn();
                match peer.read(&mut bytes[at..]) {
                    Ok(0) => panic!("end after {at} of {len} bytes"),
                    Ok(n) => at += n,
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            }
            bytes
        }

        /// Awaits the end of the peer's stream.
        fn end(&mut self, peer: &mut TcpStream) {
            let end = Instant::now() + Duration::from_secs(10);
            loop {
                assert!(Instant::now() < end);
                self.turn();
                match peer.read(&mut [0]) {
                    Ok(0) => return,
                    Ok(_) => panic!("bytes before the end"),
                    Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return,
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            }
        }

        fn event(&mut self) -> CmEvent {
            let end = Instant::now() + Duration::from_secs(10);
            while self.events.is_empty() {
                assert!(Instant::now() < end, "no event: {:?}", self.iwarp);
                self.turn();
            }
            self.events.remove(0)
        }

        fn request(&mut self) -> CmId {
            let event = self.event();
            assert!(matches!(event.kind, CmEventKind::ConnectRequest { .. }), "{event:?}");
            self.qp(event.id);
            event.id
        }
    }

    fn request_v1() -> Vec<u8> {
        [b"MPA ID Req Frame".as_slice(), &[0, 1, 0, 0]].concat()
    }

    #[test]
    fn a_server_may_send_first_to_an_old_client() {
        let mut bench = Bench::new(IwarpConfig { crc: CrcPolicy::Off, ..Default::default() });
        let (_, mut peer) = bench.listen();
        peer.write_all(&request_v1()).unwrap();
        let id = bench.request();
        let memory = Memory::new(16).unwrap();
        memory.write(0, b"first");
        let sges = SgeList::one(memory.sge(0, 5));
        let wr = SendWr { wr_id: 1, op: SendOp::Send, sges, flags: SendFlags::SIGNALED };
        bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
        bench.iwarp.post_send(QpId(id.0), &[wr]).unwrap();
        assert!(matches!(bench.event().kind, CmEventKind::Established { .. }));
        assert_eq!(bench.read(&mut peer, 20)[..], *b"MPA ID Rep Frame\0\x01\0\0");
        bench.turn();
        // Nothing may share a segment with the reply.
        assert_eq!(peer.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(bench.iwarp.next_deadline().is_some());
        bench.now += Duration::from_millis(11);
        assert_eq!(&bench.read(&mut peer, 32)[20..25], b"first");
        drop(peer);
        assert!(matches!(bench.event().kind, CmEventKind::Disconnected(DisconnectCause::Peer)));
    }

    #[test]
    fn violations_are_answered_with_a_terminate() {
        let mut bench = Bench::new(IwarpConfig { crc: CrcPolicy::Off, ..Default::default() });
        let (_, mut peer) = bench.listen();
        peer.write_all(&request_v1()).unwrap();
        let id = bench.request();
        bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
        bench.read(&mut peer, 20);
        // A Send that no receive awaits.
        peer.write_all(&[0, 18, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert!(matches!(bench.event().kind, CmEventKind::Established { .. }));
        let CmEventKind::Disconnected(DisconnectCause::PeerViolation(what)) = bench.event().kind else { panic!() };
        assert!(what.contains("1/2/2"), "{what}");
        assert_eq!(bench.read(&mut peer, 48)[20..24], [0x12, 2, 0xc0, 0]);
        bench.end(&mut peer);
        bench.iwarp.destroy_id(id, bench.now);
        drop(peer);
        assert!(bench.events.is_empty());
    }

    #[test]
    fn markers_noise_and_silence() {
        let mut bench = Bench::new(IwarpConfig { markers: false, ..Default::default() });
        let (id, mut markers) = bench.listen();
        let address = bench.iwarp.local_address(id).unwrap();
        markers.write_all(&[b"MPA ID Req Frame".as_slice(), &[0x90, 2, 0, 4, 0, 0, 0, 0]].concat()).unwrap();
        assert_eq!(bench.read(&mut markers, 24)[16..], [0x30, 2, 0, 4, 0, 0, 0, 0]);
        bench.end(&mut markers);
        let mut noise = TcpStream::connect(address).unwrap();
        noise.set_nonblocking(true).unwrap();
        noise.write_all(b"GET / HTTP/1.1\r\n\r\nand more").unwrap();
        bench.end(&mut noise);
        let mut silence = TcpStream::connect(address).unwrap();
        silence.set_nonblocking(true).unwrap();
        while bench.iwarp.handshakes == 0 {
            bench.turn();
        }
        bench.now += Duration::from_secs(6);
        bench.end(&mut silence);
        assert_eq!((bench.iwarp.handshakes, bench.events.len()), (0, 0));
    }

    #[test]
    fn an_undecided_request_is_rejected_in_time() {
        let mut bench = Bench::new(IwarpConfig { max_handshakes: 1, ..Default::default() });
        let (listener, mut peer) = bench.listen();
        peer.write_all(&request_v1()).unwrap();
        let id = bench.request();
        // Meanwhile there is no room for another: it waits.
        let mut other = TcpStream::connect(bench.iwarp.local_address(listener).unwrap()).unwrap();
        other.write_all(&request_v1()).unwrap();
        for _ in 0..10 {
            bench.turn();
        }
        assert_eq!((bench.iwarp.handshakes, bench.events.len()), (1, 0));
        bench.now += Duration::from_secs(11);
        assert!(matches!(bench.event().kind, CmEventKind::ConnectFailed(ConnectFailure::Timeout)));
        assert_eq!(bench.read(&mut peer, 20)[16], 0x20);
        bench.end(&mut peer);
        assert!(bench.iwarp.accept(id, &ConnectParam::default(), bench.now).is_err());
        bench.iwarp.destroy_id(id, bench.now);
        assert!(matches!(bench.iwarp.disconnect(id, bench.now), Err(Error::Stale { .. })));
        let other = bench.request();
        bench.iwarp.accept(other, &ConnectParam::default(), bench.now).unwrap();
    }

    #[test]
    fn a_peer_that_hangs_up_is_asked_again_with_revision_1() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut bench = Bench::new(IwarpConfig::default());
        let id = bench.connect(&listener);
        assert!(matches!(bench.event().kind, CmEventKind::Resolved { .. }));
        let mut first = bench.accept(&listener);
        assert_eq!(bench.read(&mut first, 24)[16..20], [0x50, 2, 0, 4]);
        drop(first);
        let end = Instant::now() + Duration::from_secs(10);
        listener.set_nonblocking(true).unwrap();
        let mut second = loop {
            bench.turn();
            match listener.accept() {
                Ok((second, _)) => break second,
                Err(_) => assert!(Instant::now() < end),
            }
        };
        second.set_nonblocking(true).unwrap();
        assert_eq!(bench.read(&mut second, 20)[16..], [0x40, 1, 0, 0]);
        drop(second);
        assert!(matches!(bench.event().kind, CmEventKind::ConnectFailed(ConnectFailure::PeerClosed)));
        bench.iwarp.destroy_id(id, bench.now);
    }

    #[test]
    fn replies_of_all_kinds() {
        let reply = |tail: &[u8]| [b"MPA ID Rep Frame".as_slice(), tail].concat();
        let cases: [(Vec<u8>, &str); 6] = [
            (reply(&[0x70, 2, 0, 6, 0, 0, 0, 0, b'n', b'o']), "Rejected { private_data: [110, 111] }"),
            (reply(&[0xd0, 2, 0, 4, 0, 0, 0, 0]), "markers"),
            (reply(&[0x50, 2, 0, 4, 0x80, 16, 0x00, 16]), "ready-to-receive"),
            (reply(&[0x50, 2, 0, 4, 0x80, 16, 0x80, 200]), "more RDMA Reads"),
            (reply(&[0x50, 2, 0, 0]), "Protocol"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "Protocol"),
        ];
        for (bytes, want) in cases {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut bench = Bench::new(IwarpConfig { markers: false, ..Default::default() });
            let id = bench.connect(&listener);
            let mut peer = bench.accept(&listener);
            bench.read(&mut peer, 24);
            peer.write_all(&bytes).unwrap();
            bench.events.clear();
            let event = bench.event();
            assert!(format!("{event:?}").contains(want), "{event:?}");
            bench.iwarp.destroy_id(id, bench.now);
        }
    }

    #[test]
    fn no_answer_and_nobody_there() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut bench = Bench::new(IwarpConfig::default());
        bench.connect(&listener);
        bench.turn();
        bench.events.clear();
        bench.now += Duration::from_secs(61);
        assert!(matches!(bench.event().kind, CmEventKind::ConnectFailed(ConnectFailure::Timeout)));
        let port = listener.local_addr().unwrap();
        drop(listener);
        let deadline = bench.now + Duration::from_secs(9);
        let id = bench.iwarp.resolve(port, deadline).unwrap();
        bench.qp(id);
        bench.iwarp.connect(id, &ConnectParam::default()).unwrap();
        bench.turn();
        bench.events.retain(|event| !matches!(event.kind, CmEventKind::Resolved { .. }));
        assert!(matches!(bench.event().kind, CmEventKind::ConnectFailed(ConnectFailure::Refused)));
    }

    #[test]
    fn data_behind_the_reply_and_a_reset_in_the_middle() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut bench = Bench::new(IwarpConfig { crc: CrcPolicy::Off, ..Default::default() });
        let id = bench.connect(&listener);
        let mut peer = bench.accept(&listener);
        bench.read(&mut peer, 24);
        let memory = Memory::new(4096).unwrap();
        let wr = crate::wr::RecvWr { wr_id: 5, sges: SgeList::one(memory.sge(0, 4096)) };
        bench.iwarp.post_recv(QpId(id.0), &[wr, wr]).unwrap();
        let mut bytes = [b"MPA ID Rep Frame".as_slice(), &[0x10, 2, 0, 4, 0x80, 16, 0x80, 16]].concat();
        bytes.extend([0, 20, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, b'h', b'i', 0, 0, 0, 0, 0, 0]);
        bytes.extend([0, 20, 0x41, 0x43, 0, 0]);
        peer.write_all(&bytes).unwrap();
        assert_eq!(bench.read(&mut peer, 20)[..8], [0, 14, 0xc1, 0x40, 0, 0, 0, 1]);
        drop(peer);
        bench.events.retain(|event| !matches!(event.kind, CmEventKind::Resolved { .. }));
        assert!(matches!(bench.event().kind, CmEventKind::Established { .. }));
        assert!(matches!(bench.event().kind, CmEventKind::Disconnected(DisconnectCause::Peer)));
        let mut done = Vec::new();
        bench.iwarp.poll_cq(bench.cq, 9, &mut done).unwrap();
        let statuses: Vec<_> = done.iter().map(|wc| wc.status).collect();
        assert_eq!(statuses, [WcStatus::Success, WcStatus::Flushed]);
        assert_eq!(memory.read(0, 2), b"hi");
    }

    #[test]
    fn a_destroyed_connection_still_delivers() {
        let mut bench = Bench::new(IwarpConfig { crc: CrcPolicy::Off, ..Default::default() });
        let (_, mut peer) = bench.listen();
        peer.write_all(&request_v1()).unwrap();
        let id = bench.request();
        bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
        bench.read(&mut peer, 20);
        bench.now += Duration::from_millis(11);
        bench.turn();
        let len = 8 << 20;
        let memory = Memory::new(len).unwrap();
        let wr =
            SendWr { wr_id: 1, op: SendOp::Send, sges: SgeList::one(memory.sge(0, len)), flags: SendFlags::SIGNALED };
        bench.iwarp.post_send(QpId(id.0), &[wr]).unwrap();
        bench.iwarp.destroy_id(id, bench.now);
        drop(memory);
        assert!(bench.iwarp.lingers.len() == 1 && bench.iwarp.endpoints.len() == 1);
        // Whole FPDUs only, and then the end.
        let (mut total, mut bytes) = (0, vec![0; 1 << 20]);
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            assert!(Instant::now() < end);
            bench.turn();
            match peer.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => total += n,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        assert!(total > 65536 && total % 4 == 0, "{total}");
        drop(peer);
        while !bench.iwarp.lingers.is_empty() {
            assert!(Instant::now() < end);
            bench.turn();
        }
    }
}
