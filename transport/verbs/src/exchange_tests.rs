//! Connections by out-of-band exchange on a fake device, with peers that follow the protocol and peers that violate it. The streams are
//! real, on the loopback interface. The time is virtual.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};

use super::events::ROUNDS;
use super::exchange_calls::MAX_CACHED;
use super::exchange_events::{MAX_NEWCOMERS, SEARCH_PAUSE};
use super::exchange_socket::{ExchangeStream, adopt};
use super::fake::{Fake, Personality};
use super::parts::Verbs;
use super::sys::{ibv_event_type as ev, ibv_port_state as port_state};
use crate::exchange::message::{Endpoint, ExchangeMessage, ExchangeRefusal, HEADER_LEN, MAX_MESSAGE, Network};
use crate::patience::until;
use rdma_transport::cm::{
    CmEventKind, CmId, ConnectFailure, ConnectParam, DisconnectCause, ExchangeOptions, ListenParam, PathOptions,
    Retries, Source,
};
use rdma_transport::cq::CqAttr;
use rdma_transport::error::TransportError;
use rdma_transport::provider::{Channel, DeviceId, Provider};
use rdma_transport::qp::QpAttr;
use rdma_transport::srq::SrqAttr;
use rdma_transport::wr::{RecvWr, SgeList};

const LOOPBACK: &str = "127.0.0.1:0";
const LONG: Duration = Duration::from_secs(3600);

/// The files in which the kernel would list the device. They are removed on drop.
struct Sysfs(PathBuf);

impl Sysfs {
    /// Makes the files of port 1. The GID table has two entries for each address, in this order: RoCE version 1, then
    /// version 2.
    fn new(addresses: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("rdma-gids-{}-{number}", std::process::id()));
        let this = Self(root);
        this.write("ports/1/link_layer", "Ethernet\n");
        this.write("node_type", "1: CA\n");
        for index in 0..8 {
            let address = addresses.get(index / 2);
            let gid = address.map_or("::", |address| address).parse::<std::net::IpAddr>().expect("an address");
            let octets = super::gid::gid_of(gid);
            let words: Vec<String> = octets.chunks(2).map(|word| format!("{:02x}{:02x}", word[0], word[1])).collect();
            let empty = "0000:".repeat(8);
            let text = if address.is_some() { words.join(":") } else { empty.trim_end_matches(':').to_owned() };
            this.write(&format!("ports/1/gids/{index}"), &text);
            let kind = if index % 2 == 0 { "IB/RoCE v1" } else { "RoCE v2" };
            this.write(&format!("ports/1/gid_attrs/types/{index}"), kind);
        }
        this
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.0.join("fake0").join(file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, text).expect("a file");
    }
}

impl Drop for Sysfs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct ExchangeTest {
    fake: &'static Fake,
    sysfs: Sysfs,
    verbs: Verbs,
    now: Instant,
}

/// Returns the options that name the fake device.
fn on_fake0() -> ExchangeOptions {
    ExchangeOptions { device: Some("fake0".into()), ..ExchangeOptions::default() }
}

impl ExchangeTest {
    fn new() -> Self {
        Self::with(Personality::default())
    }

    fn with(personality: Personality) -> Self {
        let (fake, sysfs) = (Fake::new(personality), Sysfs::new(&["127.0.0.1", "10.0.0.1"]));
        #[expect(clippy::disallowed_methods, reason = "virtual time needs a beginning")]
        let now = Instant::now();
        let verbs = Fake::provider_without_manager(&sysfs.0);
        fake.noted();
        Self { fake, sysfs, verbs, now }
    }

    fn next(&mut self) -> Option<(CmId, CmEventKind)> {
        self.verbs.next_cm_event(self.now).unwrap().map(|event| (event.id, event.kind))
    }

    /// Waits for the next event.
    fn event(&mut self) -> (CmId, CmEventKind) {
        until("an event", || self.next())
    }

    fn listen(&mut self) -> (CmId, SocketAddr) {
        let address = LOOPBACK.parse().unwrap();
        let id = self
            .verbs
            .exchange()
            .unwrap()
            .listen_exchange(address, &ListenParam::default(), &ExchangeOptions::default())
            .unwrap();
        (id, self.verbs.local_address(id).unwrap())
    }

    /// Passes a stream on which no request was sent to a listener. Returns the peer's end of the
    /// stream.
    fn newcomer(&mut self, listener: CmId) -> UnixStream {
        let (one, peer) = UnixStream::pair().unwrap();
        self.verbs.exchange().unwrap().accept_stream(listener, one.into(), self.now).unwrap();
        peer
    }

    fn resolve(&mut self, to: SocketAddr) -> Result<(CmId, DeviceId), TransportError> {
        self.resolve_with(to, &PathOptions::default(), &ExchangeOptions::default())
    }

    fn resolve_with(
        &mut self,
        to: SocketAddr,
        path: &PathOptions,
        options: &ExchangeOptions,
    ) -> Result<(CmId, DeviceId), TransportError> {
        let deadline = self.now + LONG;
        let id = self.verbs.exchange().unwrap().resolve_exchange(to, path, options, deadline)?;
        let event = self.event();
        let (of, CmEventKind::Resolved { device }) = event else { panic!("{event:?}") };
        assert_eq!(of, id);
        Ok((id, device))
    }

    fn create_qp(&mut self, id: CmId, device: DeviceId) {
        let cq = self.verbs.create_cq(device, &CqAttr::new(64)).unwrap();
        self.verbs.create_qp(id, &QpAttr::new(cq, cq, 4, 4)).unwrap();
    }

    /// Starts a connection attempt of the local side.
    fn connect(&mut self, to: SocketAddr) -> CmId {
        let (id, device) = self.resolve(to).unwrap();
        self.create_qp(id, device);
        self.verbs.connect(id, &ConnectParam { private_data: b"ask", ..ConnectParam::default() }).unwrap();
        id
    }

    fn request(&mut self) -> (CmId, DeviceId) {
        let event = self.event();
        let (id, CmEventKind::ConnectRequest { device, .. }) = event else { panic!("{event:?}") };
        (id, device)
    }

    fn accept(&mut self) -> CmId {
        let (id, device) = self.request();
        self.create_qp(id, device);
        self.verbs.accept(id, &ConnectParam { private_data: b"answer", ..ConnectParam::default() }, self.now).unwrap();
        id
    }

    fn failure(&mut self, id: CmId) -> ConnectFailure {
        let event = self.event();
        let (of, CmEventKind::ConnectFailed(failure)) = event else { panic!("{event:?}") };
        assert_eq!(of, id);
        failure
    }

    /// Advances the virtual time.
    fn later(&mut self, by: Duration) {
        self.now += by;
        self.verbs.progress(self.now, rdma_transport::Drive::Full);
    }

    /// Destroys ids, and checks that only `listeners` listeners remain in the provider.
    fn nothing_is_left(&mut self, ids: &[CmId], listeners: usize) {
        for id in ids {
            self.verbs.destroy_id(*id, self.now).unwrap();
        }
        until("nothing is left", || {
            assert!(self.next().is_none());
            (self.verbs.hub.ids.len() == listeners).then_some(())
        });
        assert!(self.verbs.exchanges.newcomers.is_empty() && self.verbs.exchanges.deadlines.is_empty());
    }
}

fn lines_with(lines: &[String], start: &str) -> Vec<String> {
    lines.iter().filter(|line| line.starts_with(start)).cloned().collect()
}

fn endpoint() -> Endpoint {
    Endpoint {
        network: Network::RoceV2,
        mtu: 3,
        ack_timeout: 14,
        retry_count: 5,
        rnr_retry_count: 6,
        traffic_class: 0x68,
        responder_resources: 4,
        initiator_depth: 3,
        lid: 0,
        qp_number: 77,
        psn: 0x12_3456,
        gid: super::gid::gid_of([127, 0, 0, 1].into()),
    }
}

fn octets(message: &ExchangeMessage<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    message.emit(&mut out);
    out
}

/// Reads one message that the provider has sent.
fn read(stream: &mut impl Read) -> Vec<u8> {
    let mut head = [0; 8];
    stream.read_exact(&mut head).unwrap();
    let mut body = vec![0; usize::from(u16::from_be_bytes([head[6], head[7]]))];
    stream.read_exact(&mut body).unwrap();
    [&head[..], &body].concat()
}

/// A device may have several ports. If the program names the device and no port, the port with the
/// address of the stream is used. If no port has this address, the first port with a GID is used.
#[test]
fn the_port_of_a_named_device_is_that_of_the_address() {
    let options = on_fake0();
    for addresses in [&["10.0.0.1"][..], &[]] {
        let sysfs = Sysfs::new(addresses);
        sysfs.write("ports/2/link_layer", "Ethernet\n");
        sysfs.write("ports/2/gids/0", "0000:0000:0000:0000:0000:ffff:7f00:0001");
        sysfs.write("ports/2/gid_attrs/types/0", "RoCE v2");
        let chosen = |source: &str| super::gid::choose(&sysfs.0, Some(source.parse().unwrap()), &options).unwrap();
        let of_stream = chosen("127.0.0.1:0");
        assert_eq!((of_stream.port, of_stream.gid_index), (2, 0), "{addresses:?}");
        let other = chosen("192.0.2.1:0");
        assert_eq!(other.port, if addresses.is_empty() { 2 } else { 1 });
        // Port 1 has an entry of RoCE version 2 at index 5, but the stream is on port 2.
        sysfs.write("ports/1/gids/5", "0000:0000:0000:0000:0000:ffff:0a00:0005");
        sysfs.write("ports/1/gid_attrs/types/5", "RoCE v2");
        let wrong = ExchangeOptions { gid_index: Some(5), ..options.clone() };
        let source = Some("127.0.0.1:0".parse().unwrap());
        let error = super::gid::choose(&sysfs.0, source, &wrong).unwrap_err().to_string();
        assert!(error.contains("port 2"), "{error}");
    }
    let (nothing, source) = (Sysfs::new(&[]), Some("127.0.0.1:0".parse().unwrap()));
    let error = super::gid::choose(&nothing.0, source, &options).unwrap_err().to_string();
    assert!(error.contains("port 1 of fake0 has no GID"), "{error}");
}

/// If the stream is on no port of a named device, a port that is active is used. If this port goes down, the next search may find another
/// port.
#[test]
fn a_named_device_is_used_through_an_active_port() {
    fn port(world: &ExchangeTest, id: CmId) -> u8 {
        world.verbs.hub.id(id).unwrap().raw.port()
    }
    let mut world = ExchangeTest::new();
    let set_states = |world: &ExchangeTest, states: [&str; 2]| {
        for (port, state) in ["1", "2"].into_iter().zip(states) {
            world.sysfs.write(&format!("ports/{port}/state"), state);
        }
    };
    world.sysfs.write("ports/2/link_layer", "Ethernet\n");
    world.sysfs.write("ports/2/gids/0", "0000:0000:0000:0000:0000:ffff:0a00:0002");
    world.sysfs.write("ports/2/gid_attrs/types/0", "RoCE v2");
    set_states(&world, ["4: ACTIVE\n", "4: ACTIVE\n"]);
    let options = on_fake0();
    let listener =
        world.verbs.exchange().unwrap().listen_exchange(LOOPBACK.parse().unwrap(), &ListenParam::default(), &options);
    let listener = listener.unwrap();
    // Resolves over a stream without an IP address, so no port has the stream's address. Returns
    // the port that the provider has chosen.
    let resolve = |world: &mut ExchangeTest| {
        let (stream, _) = UnixStream::pair().unwrap();
        let (path, deadline) = (PathOptions::default(), world.now + LONG);
        let role = world.verbs.exchange().unwrap();
        let id = role.resolve_exchange_over(stream.into(), &path, &options, deadline)?;
        assert!(matches!(world.event(), (of, CmEventKind::Resolved { .. }) if of == id));
        Ok::<_, TransportError>(port(world, id))
    };
    // Sends a request to the listener. Returns the peer's end of the stream.
    let request = |world: &mut ExchangeTest| {
        let (one, mut peer) = UnixStream::pair().unwrap();
        let now = world.now;
        world.verbs.exchange().unwrap().accept_stream(listener, one.into(), now).unwrap();
        peer.write_all(&octets(&ExchangeMessage::Request(endpoint(), b""))).unwrap();
        peer
    };
    assert_eq!(resolve(&mut world).unwrap(), 1);
    let first = request(&mut world);
    let (id, _) = world.request();
    assert_eq!(port(&world, id), 1);
    // Port 1 goes down.
    set_states(&world, ["1: DOWN\n", "4: ACTIVE\n"]);
    world.fake.port_event(ev::IBV_EVENT_PORT_ERR, 1);
    assert!(world.next().is_none());
    let error = resolve(&mut world).unwrap_err().to_string();
    assert!(error.contains("port 1 of fake0 is down"), "{error}");
    assert_eq!(resolve(&mut world).unwrap(), 2);
    let second = request(&mut world);
    let (id, _) = world.request();
    assert_eq!(port(&world, id), 2);
    // Port 2 goes down, and port 1 comes up. Requests cause no further search before the pause is
    // over.
    set_states(&world, ["4: ACTIVE\n", "1: DOWN\n"]);
    world.fake.port_event(ev::IBV_EVENT_PORT_ERR, 2);
    world.fake.port_event(ev::IBV_EVENT_PORT_ACTIVE, 1);
    assert!(world.next().is_none());
    for _ in 0..2 {
        let mut refused = request(&mut world);
        assert!(world.next().is_none());
        assert_eq!(read(&mut refused), octets(&ExchangeMessage::Refuse(ExchangeRefusal::NoPort, b"")));
    }
    world.later(SEARCH_PAUSE);
    let third = request(&mut world);
    let (id, _) = world.request();
    assert_eq!(port(&world, id), 1);
    drop([first, second, third]);
}

/// A subnet manager gives an InfiniBand port its LID. Before it has done so, a peer would get a request with an invalid LID.
#[test]
fn a_port_without_a_subnet_manager_is_refused() {
    let mut world = ExchangeTest::new();
    world.sysfs.write("ports/1/link_layer", "InfiniBand\n");
    world.fake.set_port(1, port_state::IBV_PORT_INIT);
    let options = on_fake0();
    let server = TcpListener::bind(LOOPBACK).unwrap();
    let to = server.local_addr().unwrap();
    let (id, device) = world.resolve_with(to, &PathOptions::default(), &options).unwrap();
    world.create_qp(id, device);
    let error = world.verbs.connect(id, &ConnectParam::default()).unwrap_err().to_string();
    assert!(error.contains("port 1 of fake0 is initializing: no subnet manager"), "{error}");
    // The failed call has changed nothing: the id connects when its port is active.
    world.fake.set_port(1, port_state::IBV_PORT_ACTIVE);
    world.verbs.connect(id, &ConnectParam::default()).unwrap();
    let mut stream = server.accept().unwrap().0;
    assert!(world.next().is_none());
    let request = read(&mut stream);
    assert_eq!(request[HEADER_LEN + 8..HEADER_LEN + 10], [0, 7], "the LID");
    world.nothing_is_left(&[id], 0);
}

/// The system refuses a link-local address without a scope. So the local address of a stream gets the scope of the peer's address.
#[test]
fn a_link_local_source_has_the_scope_of_the_peer() {
    let mut world = ExchangeTest::new();
    world.sysfs.write("ports/1/gids/7", "fe80:0000:0000:0000:0000:0000:0000:0001");
    world.sysfs.write("ports/1/gid_attrs/ndevs/7", "lo\n");
    let path = PathOptions { source: Source::Address("fe80::1".parse().unwrap()), ..PathOptions::default() };
    // The loopback interface has the index 1.
    let (id, _) = world.resolve_with("[fe80::2%1]:7".parse().unwrap(), &path, &ExchangeOptions::default()).unwrap();
    assert_eq!(world.verbs.local_address(id), Some("[fe80::1%1]:0".parse().unwrap()));
    world.nothing_is_left(&[id], 0);
}

/// A peer may send as soon as it has the answer to its request. So the queue pair may have consumed
/// a shared receive before `Established` is reported. If the program destroys the id in this state,
/// the receive must not be lost with the queue pair.
#[test]
fn a_shared_receive_in_progress_is_not_lost_while_accepting() {
    let mut world = ExchangeTest::with(Personality { holds_a_receive: true, ..Personality::default() });
    let (_, to) = world.listen();
    let mut peer = TcpStream::connect(to).unwrap();
    peer.write_all(&octets(&ExchangeMessage::Request(endpoint(), b""))).unwrap();
    let (id, device) = world.request();
    let cq = world.verbs.create_cq(device, &CqAttr::new(64)).unwrap();
    let role = world.verbs.shared_receives().unwrap();
    let srq = role.create_srq(device, &SrqAttr::new(4)).unwrap();
    role.post_srq_recv(srq, &[RecvWr { wr_id: 1, sges: SgeList::default() }]).map_err(|error| error.error).unwrap();
    world.verbs.create_qp(id, &QpAttr { srq: Some(srq), ..QpAttr::new(cq, cq, 4, 4) }).unwrap();
    world.verbs.accept(id, &ConnectParam::default(), world.now).unwrap();
    world.verbs.destroy_id(id, world.now).unwrap();
    assert!(world.fake.noted().iter().all(|line| !line.contains("lost")), "it waits for the event");
    assert!(world.verbs.next_deadline().is_some(), "and not for ever");
}

/// The side that connects sets the retry count of both sides. On rxe, 7 would mean no limit, so the
/// provider uses 6, even if the peer has set 7.
#[test]
fn rxe_uses_no_unlimited_retry_count_of_a_peer() {
    for (rxe, used) in [(false, 7), (true, 6)] {
        let mut world = ExchangeTest::with(Personality { rxe, ..Personality::default() });
        let (_, to) = world.listen();
        let mut peer = TcpStream::connect(to).unwrap();
        let requested = Endpoint { retry_count: 7, ..endpoint() };
        peer.write_all(&octets(&ExchangeMessage::Request(requested, b""))).unwrap();
        world.accept();
        let notes = world.fake.noted();
        let [rts] = &lines_with(&notes, "RTS")[..] else { panic!("{notes:?}") };
        assert!(rts.contains(&format!(" timeout 14 retries {used} ")), "{rts}");
    }
}

#[test]
fn two_sides_agree_and_part() {
    let mut world = ExchangeTest::new();
    let (listener, to) = world.listen();
    let path = PathOptions { type_of_service: Some(0x68), ack_timeout: Some(14), source: Source::Any };
    let (active, device) = world.resolve_with(to, &path, &ExchangeOptions::default()).unwrap();
    world.create_qp(active, device);
    let retries = Retries { path: 5, receiver_not_ready: 6, min_rnr_timer: 8 };
    let (responder_resources, initiator_depth) = (4, 3);
    let param =
        ConnectParam { private_data: b"ask", responder_resources, initiator_depth, retries, ..ConnectParam::default() };
    world.verbs.connect(active, &param).unwrap();
    let event = world.event();
    let (passive, CmEventKind::ConnectRequest { listener: came_to, peer, private_data, read_depth, .. }) = event else {
        panic!("{event:?}");
    };
    assert_eq!((came_to, &private_data[..], peer.ip().is_loopback()), (listener, &b"ask"[..], true));
    assert_eq!((read_depth.responder_resources, read_depth.initiator_depth), (3, 4));
    world.create_qp(passive, device);
    world
        .verbs
        .accept(passive, &ConnectParam { private_data: b"answer", ..ConnectParam::default() }, world.now)
        .unwrap();
    let events = [world.event(), world.event()];
    let [(first, CmEventKind::Established { private_data, read_depth }), (second, CmEventKind::Established { .. })] =
        events
    else {
        panic!("{events:?}");
    };
    assert_eq!((first, second, &private_data[..]), (active, passive, &b"answer"[..]));
    assert_eq!((read_depth.responder_resources, read_depth.initiator_depth), (4, 3));
    let notes = world.fake.noted();
    assert!(notes.contains(&"device opened".to_owned()), "{notes:?}");
    assert_eq!(lines_with(&notes, "INIT"), ["INIT port 1 rights 7", "INIT port 1 rights 7"]);
    // The passive side reaches RTR first. The sequence numbers of the first packets are from the test's source of
    // random bytes: 0x010101 (65793), and then 0x020202 (131586).
    let [passive_rtr, active_rtr] = &lines_with(&notes, "RTR")[..] else { panic!("{notes:?}") };
    assert!(passive_rtr.contains("from 65793 gid 1 class 104 mtu 5 serves 3 rnr timer 12"), "{passive_rtr}");
    assert!(active_rtr.contains("from 131586 gid 1 class 104 mtu 5 serves 4 rnr timer 8"), "{active_rtr}");
    assert_eq!(
        lines_with(&notes, "RTS"),
        ["RTS from 131586 timeout 14 retries 5 rnr 6 asks 4", "RTS from 65793 timeout 14 retries 5 rnr 7 asks 3"]
    );
    // The active side disconnects, and the passive side answers.
    world.verbs.disconnect(active, world.now).unwrap();
    let event = world.event();
    assert!(matches!(event, (id, CmEventKind::Disconnected(DisconnectCause::Peer)) if id == passive), "{event:?}");
    world.verbs.disconnect(passive, world.now).unwrap();
    let event = world.event();
    assert!(matches!(event, (id, CmEventKind::Disconnected(DisconnectCause::Local)) if id == active), "{event:?}");
    assert_eq!(lines_with(&world.fake.noted(), "error").len(), 2, "both are flushed");
    world.nothing_is_left(&[active, passive], 1);
}

/// At index 0 is a GID of the type RoCE version 1, as on most devices. So the GID of the type RoCE version 2 for the
/// first address is at index 1.
#[test]
fn the_gid_index_is_that_of_the_address() {
    let mut world = ExchangeTest::new();
    let (_, to) = world.listen();
    let at = |index, device: Option<&str>| ExchangeOptions {
        device: device.map(str::to_owned),
        gid_index: Some(index),
        port: None,
    };
    let path = PathOptions::default();
    for (options, wanted) in [
        (at(0, None), "index 0 of port 1 of fake0 is not of RoCE version 2; those that are: 1, 3"),
        (at(6, None), "index 6 of port 1 of fake0 is empty"),
        (at(3, Some("mlx5_7")), "mlx5_7 is not there"),
        (
            ExchangeOptions { device: Some("fake0".into()), port: Some(2), gid_index: None },
            "port 2 of fake0 is not there",
        ),
    ] {
        let error = world.resolve_with(to, &path, &options).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let (id, device) = world.resolve_with(to, &path, &at(3, None)).unwrap();
    world.create_qp(id, device);
    world.verbs.connect(id, &ConnectParam::default()).unwrap();
    world.accept();
    let rtr = until("the peer's step", || {
        world.next();
        let rtr = lines_with(&world.fake.noted(), "RTR");
        (!rtr.is_empty()).then_some(rtr)
    });
    assert!(rtr.iter().any(|line| line.contains("gid 3") || line.contains("gid 1")), "{rtr:?}");
    // Remove the entry of the address 127.0.0.1 from the GID table.
    world.sysfs.write("ports/1/gids/1", "0000:0000:0000:0000:0000:0000:0000:0000");
    let error = world.resolve(to).unwrap_err().to_string();
    assert!(error.contains("no port has a GID of RoCE version 2 for 127.0.0.1"), "{error}");
}

#[test]
fn without_a_connection_manager_the_error_names_the_cure() {
    let mut world = ExchangeTest::new();
    let to: SocketAddr = "10.0.0.1:7".parse().unwrap();
    let deadline = world.now + LONG;
    for error in [
        world.verbs.resolve(to, &PathOptions::default(), deadline).unwrap_err(),
        world.verbs.listen(to, &ListenParam::default()).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(matches!(error, TransportError::NoDevice { .. }), "{text}");
        assert!(text.contains("rdma_cm is missing") && text.contains("by exchange"), "{text}");
    }
    let device = world.verbs.device_at([10, 0, 0, 1].into()).unwrap();
    assert_eq!(world.verbs.device(device).unwrap().name, "fake0");
    assert!(world.verbs.device_at([10, 0, 0, 2].into()).is_err());
}

#[test]
fn an_iwarp_device_has_no_exchange() {
    let mut world = ExchangeTest::with(Personality { iwarp: true, ..Personality::default() });
    let error = world.resolve(LOOPBACK.parse().unwrap()).unwrap_err();
    assert!(matches!(error, TransportError::Unsupported { .. }) && error.to_string().contains("iWARP"), "{error}");
    assert_eq!(lines_with(&world.fake.noted(), "device"), ["device opened", "device closed"]);
}

/// A peer that violates the protocol is disconnected, and other connections are not affected. The violations are bytes that are no message,
/// an unexpected message, and a message with an invalid field.
#[test]
fn garbage_leaves_nothing() {
    let mut world = ExchangeTest::new();
    let (_, to) = world.listen();
    let bad = octets(&ExchangeMessage::Request(Endpoint { qp_number: 1, ..endpoint() }, b""));
    for garbage in [b"GET / HTTP/1.1\r\n".to_vec(), octets(&ExchangeMessage::Ready), bad, vec![0xff; MAX_MESSAGE]] {
        let mut stream = TcpStream::connect(to).unwrap();
        stream.write_all(&garbage).unwrap();
        stream.set_nonblocking(true).unwrap();
        let _ = until("the end of the stream", || {
            assert!(world.next().is_none());
            match stream.read(&mut [0; 16]) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
                other => Some(other),
            }
        });
    }
    world.nothing_is_left(&[], 1);
    // After the violations of the protocol by other peers, the listener still accepts connections.
    let active = world.connect(to);
    let passive = world.accept();
    assert!(matches!(world.event(), (id, CmEventKind::Established { .. }) if id == active));
    world.event();
    world.nothing_is_left(&[active, passive], 1);
}

/// A peer that sends nothing is disconnected after a time limit. Many silent peers on one host do not prevent other
/// peers from connecting.
#[test]
fn silent_peers_give_way() {
    let mut world = ExchangeTest::new();
    let (_, to) = world.listen();
    let silent: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(to).unwrap()).collect();
    until("all are let in", || {
        let (now, due) = (world.now, world.verbs.next_deadline());
        if due.is_some_and(|due| due <= now) {
            world.later(Duration::ZERO);
        }
        assert!(world.next().is_none());
        (world.verbs.exchanges.newcomers.len() == 256).then_some(())
    });
    let active = world.connect(to);
    let passive = loop {
        world.later(Duration::ZERO);
        if let Some((id, CmEventKind::ConnectRequest { device, .. })) = world.next() {
            world.create_qp(id, device);
            break id;
        }
    };
    world.verbs.accept(passive, &ConnectParam::default(), world.now).unwrap();
    world.event();
    world.event();
    world.later(Duration::from_secs(10));
    world.nothing_is_left(&[active, passive], 1);
    drop(silent);
}

/// Returns true if the provider has ended the stream without a message.
fn has_ended(peer: &mut UnixStream) -> bool {
    peer.set_nonblocking(true).unwrap();
    matches!(peer.read(&mut [0]), Ok(0))
}

/// At the limit, the provider closes the oldest stream without a request for each new stream.
#[test]
fn the_oldest_newcomer_gives_way() {
    let mut world = ExchangeTest::new();
    let (listener, _) = world.listen();
    let mut peers = Vec::new();
    for nth in 1..=MAX_NEWCOMERS + 2 {
        let other = world.newcomer(listener);
        peers.push(other);
        assert_eq!(world.verbs.exchanges.newcomers.len(), nth.min(MAX_NEWCOMERS));
    }
    let ended: Vec<bool> = peers.iter_mut().map(has_ended).collect();
    assert!(ended.iter().enumerate().all(|(nth, &ended)| ended == (nth < 2)), "{ended:?}");
    drop(peers);
    world.nothing_is_left(&[], 1);
}

/// Requests that the program has not answered fill the listener's backlog. While the backlog is
/// full, the provider refuses further requests.
#[test]
fn requests_that_wait_for_the_program_are_limited() {
    const BACKLOG: u32 = 3;
    let mut world = ExchangeTest::new();
    let options = on_fake0();
    let param = ListenParam { backlog: BACKLOG, ..ListenParam::default() };
    let listener =
        world.verbs.exchange().unwrap().listen_exchange(LOOPBACK.parse().unwrap(), &param, &options).unwrap();
    let mut peers = Vec::new();
    // Sends a request. Returns its id, or `None` if it was refused.
    let mut request = |world: &mut ExchangeTest| {
        let mut peer = world.newcomer(listener);
        peer.write_all(&octets(&ExchangeMessage::Request(endpoint(), b""))).unwrap();
        let Some((id, kind)) = world.next() else {
            assert_eq!(read(&mut peer), octets(&ExchangeMessage::Refuse(ExchangeRefusal::Busy, b"")));
            return None;
        };
        assert!(matches!(kind, CmEventKind::ConnectRequest { .. }), "{kind:?}");
        peers.push(peer);
        Some(id)
    };
    let waiting: Vec<CmId> = (0..BACKLOG).map(|_| request(&mut world).expect("there is room")).collect();
    assert_eq!(request(&mut world), None);
    world.verbs.reject(waiting[0], b"", world.now).unwrap();
    let next = request(&mut world).expect("one was answered");
    assert_eq!(request(&mut world), None);
    world.nothing_is_left(&[&waiting[..], &[next]].concat(), 1);
}

/// One call polls a limited number of times, so peers that keep sockets ready do not keep the call from returning. After the last poll the
/// call wakes the channel, because further sockets may be ready.
#[test]
fn a_call_returns_although_sockets_are_ready() {
    const STREAMS: usize = 3 * ROUNDS;
    let mut world = ExchangeTest::new();
    let (listener, _) = world.listen();
    let mut peers = Vec::new();
    for _ in 0..STREAMS {
        let other = world.newcomer(listener);
        peers.push(other);
    }
    assert!(world.next().is_none());
    // From here on, each poll reports one socket.
    world.verbs.hub.event_set.ready = Events::with_capacity(1);
    let mut channel = Poll::new().unwrap();
    let fd = world.verbs.channel(Channel::ConnectionManager).unwrap();
    channel.registry().register(&mut SourceFd(&fd), Token(0), Interest::READABLE).unwrap();
    let mut edges = Events::with_capacity(1);
    for peer in &mut peers {
        peer.write_all(&octets(&ExchangeMessage::Ready)[..1]).unwrap();
    }
    let served = |verbs: &Verbs| {
        let has_input = |stream: &ExchangeStream| stream.conversation.wanted() < HEADER_LEN;
        verbs.hub.ids.iter().filter(|(_, id)| id.stream().is_some_and(has_input)).count()
    };
    let mut calls = 0;
    while served(&world.verbs) < STREAMS {
        channel.poll(&mut edges, Some(Duration::ZERO)).unwrap();
        assert!(!edges.is_empty(), "after {calls} calls the channel has no edge");
        assert!(world.next().is_none());
        calls += 1;
        assert!(served(&world.verbs) <= calls * ROUNDS, "call {calls}");
    }
    drop(peers);
    world.nothing_is_left(&[], 1);
}

/// If an attempt fails at its deadline before the program has read the event `Resolved`, the
/// program gets only the failure: it could not create a queue pair any more.
#[test]
fn an_attempt_that_has_failed_is_not_resolved() {
    let mut world = ExchangeTest::new();
    let (_, to) = world.listen();
    let (path, deadline) = (PathOptions::default(), world.now + LONG);
    let role = world.verbs.exchange().unwrap();
    let id = role.resolve_exchange(to, &path, &ExchangeOptions::default(), deadline).unwrap();
    world.later(LONG);
    assert_eq!(world.failure(id), ConnectFailure::Timeout);
    assert!(world.next().is_none());
}

/// If a server accepts the stream and sends nothing, the attempt ends at its deadline. If no program listens, the attempt ends immediately.
#[test]
fn a_silent_server_is_given_up() {
    let mut world = ExchangeTest::new();
    let server = TcpListener::bind(LOOPBACK).unwrap();
    let to = server.local_addr().unwrap();
    let id = world.connect(to);
    let stream = server.accept().unwrap().0;
    until("the request", || {
        assert!(world.next().is_none());
        stream.set_nonblocking(true).unwrap();
        let mut room = [0; MAX_MESSAGE];
        stream.peek(&mut room).ok().filter(|octets| *octets > 40)
    });
    world.later(LONG - Duration::from_secs(1));
    assert!(world.next().is_none(), "not before");
    world.later(Duration::from_secs(1));
    assert_eq!(world.failure(id), ConnectFailure::Timeout);
    world.nothing_is_left(&[id], 0);
    drop(server);
    let id = world.connect(to);
    assert_eq!(world.failure(id), ConnectFailure::Refused);
    world.nothing_is_left(&[id], 0);
}

/// A device refuses a queue pair number or a GID that it cannot use. Both sides report the failure.
#[test]
fn a_device_that_refuses_is_an_error_on_both_sides() {
    for step in ["to_rtr", "to_rts"] {
        let mut world = ExchangeTest::new();
        let (_, to) = world.listen();
        let active = world.connect(to);
        let (passive, device) = world.request();
        world.create_qp(passive, device);
        world.fake.fail(step, libc::EINVAL);
        let refused = world.verbs.accept(passive, &ConnectParam::default(), world.now);
        assert!(refused.is_err(), "{refused:?}");
        world.verbs.destroy_id(passive, world.now).unwrap();
        assert_eq!(world.failure(active), ConnectFailure::PeerClosed);
        world.nothing_is_left(&[active], 1);
        // Let the device accept `step` while the next connection attempt starts. Later in this round the device refuses
        // `step` again, this time on the active side.
        world.fake.fail(step, 0);
        let server = TcpListener::bind(LOOPBACK).unwrap();
        let active = world.connect(server.local_addr().unwrap());
        let mut stream = server.accept().unwrap().0;
        assert!(world.next().is_none());
        read(&mut stream);
        world.fake.fail(step, libc::EINVAL);
        stream.write_all(&octets(&ExchangeMessage::Accept(endpoint(), b""))).unwrap();
        let ConnectFailure::System(why) = world.failure(active) else { panic!("a device that refuses") };
        assert!(why.contains("the device refuses"), "{why}");
        assert_eq!(read(&mut stream), octets(&ExchangeMessage::Goodbye), "the peer is told");
        world.nothing_is_left(&[active], 1);
    }
}

#[test]
fn a_peer_that_goes_is_noticed_in_each_state() {
    let mut world = ExchangeTest::new();
    // A connection attempt fails if the peer closes the stream after it has received the request.
    let server = TcpListener::bind(LOOPBACK).unwrap();
    let asking = world.connect(server.local_addr().unwrap());
    let mut stream = server.accept().unwrap().0;
    assert!(world.next().is_none());
    read(&mut stream);
    drop(stream);
    assert_eq!(world.failure(asking), ConnectFailure::PeerClosed);
    // An established connection ends if the peer resets the stream, or if the peer sends an unexpected message.
    let up = |world: &mut ExchangeTest| {
        let id = world.connect(server.local_addr().unwrap());
        let mut stream = server.accept().unwrap().0;
        assert!(world.next().is_none());
        read(&mut stream);
        stream.write_all(&octets(&ExchangeMessage::Accept(endpoint(), b""))).unwrap();
        assert!(matches!(world.event(), (of, CmEventKind::Established { .. }) if of == id));
        (id, stream)
    };
    let (connected, stream) = up(&mut world);
    drop(stream);
    assert!(matches!(world.event(), (of, CmEventKind::Disconnected(DisconnectCause::Peer)) if of == connected));
    let (rude, mut stream) = up(&mut world);
    stream.write_all(&octets(&ExchangeMessage::Accept(endpoint(), b""))).unwrap();
    let event = world.event();
    assert!(matches!(event, (of, CmEventKind::Disconnected(DisconnectCause::PeerViolation(_))) if of == rude));
    // A peer that has sent a request closes the stream: first before the local program has answered the request, and
    // then, with a new connection, after the local program has accepted.
    let (_, to) = world.listen();
    let mut client = TcpStream::connect(to).unwrap();
    client.write_all(&octets(&ExchangeMessage::Request(endpoint(), b""))).unwrap();
    let (request, device) = world.request();
    drop(client);
    until("the end is noticed", || {
        assert!(world.next().is_none());
        matches!(world.verbs.hub.id(request).unwrap().state, super::entry::IdState::Closed).then_some(())
    });
    let cq = world.verbs.create_cq(device, &CqAttr::new(8)).unwrap();
    assert!(world.verbs.create_qp(request, &QpAttr::new(cq, cq, 2, 2)).is_err());
    let mut client = TcpStream::connect(to).unwrap();
    client.write_all(&octets(&ExchangeMessage::Request(endpoint(), b""))).unwrap();
    let accepted = world.accept();
    drop(client);
    assert_eq!(world.failure(accepted), ConnectFailure::PeerClosed);
    // If the peer never sends the message Ready, an accepted connection fails at the deadline.
    let mut client = TcpStream::connect(to).unwrap();
    client.write_all(&octets(&ExchangeMessage::Request(endpoint(), b""))).unwrap();
    let waiting = world.accept();
    world.later(Duration::from_secs(10));
    assert_eq!(world.failure(waiting), ConnectFailure::Timeout);
    world.nothing_is_left(&[asking, connected, rude, request, accepted, waiting], 1);
}

#[test]
fn a_refusal_has_its_reason() {
    let mut world = ExchangeTest::new();
    let (listener, to) = world.listen();
    let active = world.connect(to);
    let (passive, _) = world.request();
    world.verbs.reject(passive, b"not today", world.now).unwrap();
    let event = world.event();
    let (id, CmEventKind::Rejected { private_data }) = event else { panic!("{event:?}") };
    assert_eq!((id, &private_data[..]), (active, &b"not today"[..]));
    // The peer refuses: because its port is on another kind of network, because it has no port for the stream's
    // address, or for an unknown reason (code 9).
    for (refusal, wanted) in [
        (ExchangeRefusal::OtherNetwork, "InfiniBand"),
        (ExchangeRefusal::NoPort, "device"),
        (ExchangeRefusal::Other(9), "reason"),
    ] {
        let server = TcpListener::bind(LOOPBACK).unwrap();
        let id = world.connect(server.local_addr().unwrap());
        let mut stream = server.accept().unwrap().0;
        assert!(world.next().is_none());
        read(&mut stream);
        stream.write_all(&octets(&ExchangeMessage::Refuse(refusal, b""))).unwrap();
        let ConnectFailure::Protocol(why) = world.failure(id) else { panic!("a refusal") };
        assert!(why.contains(wanted), "{why}");
        world.verbs.destroy_id(id, world.now).unwrap();
    }
    let infiniband = Endpoint { network: Network::InfiniBand, lid: 7, ..endpoint() };
    let other_network = octets(&ExchangeMessage::Refuse(ExchangeRefusal::OtherNetwork, b""));
    assert_eq!(refusal_of(&mut world, to, infiniband), other_network);
    world.nothing_is_left(&[active, listener], 0);
}

/// Sends a request that the provider refuses. Returns the refusal.
fn refusal_of(world: &mut ExchangeTest, to: SocketAddr, endpoint: Endpoint) -> Vec<u8> {
    let mut client = TcpStream::connect(to).unwrap();
    client.write_all(&octets(&ExchangeMessage::Request(endpoint, b""))).unwrap();
    client.set_nonblocking(true).unwrap();
    until("an answer", || {
        assert!(world.next().is_none());
        client.peek(&mut [0; 9]).ok().filter(|octets| *octets == 9)
    });
    client.set_nonblocking(false).unwrap();
    read(&mut client)
}

/// If a stream's local address is on no port, only the first of many requests makes the provider read the GID tables.
#[test]
fn requests_without_a_port_do_not_search_each_time() {
    let mut world = ExchangeTest::new();
    let (_, to) = world.listen();
    let no_port = octets(&ExchangeMessage::Refuse(ExchangeRefusal::NoPort, b""));
    let entry = fs::read_to_string(world.sysfs.0.join("fake0/ports/1/gids/1")).unwrap();
    world.sysfs.write("ports/1/gids/1", "0000:0000:0000:0000:0000:0000:0000:0000");
    assert_eq!(refusal_of(&mut world, to, endpoint()), no_port);
    // A search would now find the port.
    world.sysfs.write("ports/1/gids/1", &entry);
    assert_eq!(refusal_of(&mut world, to, endpoint()), no_port);
    world.later(SEARCH_PAUSE - Duration::from_nanos(1));
    assert_eq!(refusal_of(&mut world, to, endpoint()), no_port);
    // The program's own calls always search.
    let (active, _) = world.resolve(to).unwrap();
    world.later(Duration::from_nanos(1));
    let mut client = TcpStream::connect(to).unwrap();
    client.write_all(&octets(&ExchangeMessage::Request(endpoint(), b""))).unwrap();
    let (passive, _) = world.request();
    world.nothing_is_left(&[active, passive], 1);
}

/// Each local address of a stream needs a search for its port. The caches of the results have at
/// most `MAX_CACHED` entries.
#[test]
fn the_results_of_searches_are_limited() {
    let mut world = ExchangeTest::new();
    for (host, is_found) in (2..=40).flat_map(|host| [(host, true), (host, false)]) {
        let source = SocketAddr::from(([127, 0, 0, host], 0));
        let named = on_fake0();
        let options = if is_found { named } else { ExchangeOptions::default() };
        world.later(Duration::ZERO);
        let Verbs { hub, exchanges, .. } = &mut world.verbs;
        assert_eq!(exchanges.port_of_request(hub, Some(source), &options).is_ok(), is_found, "{source}");
        for results in [exchanges.port_gids.len(), exchanges.failed_searches.len()] {
            assert!(results <= MAX_CACHED, "{results}");
        }
    }
    let exchanges = &world.verbs.exchanges;
    assert_eq!((exchanges.port_gids.len(), exchanges.failed_searches.len()), (MAX_CACHED, MAX_CACHED));
}

/// If many requests have arrived, the provider reads the next request only after the program has
/// read the event of the previous one.
#[test]
fn requests_are_read_as_the_program_takes_them() {
    const REQUESTS: usize = 20;
    let mut world = ExchangeTest::new();
    let options = on_fake0();
    let listener =
        world.verbs.exchange().unwrap().listen_exchange(LOOPBACK.parse().unwrap(), &ListenParam::default(), &options);
    let listener = listener.unwrap();
    let mut peers = Vec::new();
    for _ in 0..REQUESTS {
        let mut peer = world.newcomer(listener);
        peer.write_all(&octets(&ExchangeMessage::Request(endpoint(), b""))).unwrap();
        peers.push(peer);
    }
    for left in (0..REQUESTS).rev() {
        let event = world.next();
        assert!(matches!(event, Some((_, CmEventKind::ConnectRequest { .. }))), "{event:?}");
        assert_eq!((world.verbs.hub.events.len(), world.verbs.exchanges.newcomers.len()), (0, left));
    }
    drop(peers);
}

/// The program supplies the stream of a connection. The stream of this test is a Unix socket without an IP address, so
/// the program must also name the device.
#[test]
fn the_program_brings_the_stream() {
    let mut world = ExchangeTest::new();
    let options = on_fake0();
    let address = LOOPBACK.parse().unwrap();
    let listener = world.verbs.exchange().unwrap().listen_exchange(address, &ListenParam::default(), &options).unwrap();
    let (one, other) = UnixStream::pair().unwrap();
    let (now, deadline) = (world.now, world.now + LONG);
    let role = world.verbs.exchange().unwrap();
    role.accept_stream(listener, OwnedFd::from(one), now).unwrap();
    let id = role.resolve_exchange_over(OwnedFd::from(other), &PathOptions::default(), &options, deadline).unwrap();
    let event = world.event();
    let (_, CmEventKind::Resolved { device }) = event else { panic!("{event:?}") };
    world.create_qp(id, device);
    world.verbs.connect(id, &ConnectParam::default()).unwrap();
    let passive = world.accept();
    assert!(matches!(world.event(), (of, CmEventKind::Established { .. }) if of == id));
    assert!(matches!(world.event(), (of, CmEventKind::Established { .. }) if of == passive));
    world.verbs.destroy_id(id, world.now).unwrap();
    assert!(matches!(world.event(), (of, CmEventKind::Disconnected(DisconnectCause::Peer)) if of == passive));
    // `resolve_exchange_over` fails if the program does not name the device of a Unix socket, and if the descriptor is
    // not a stream.
    let unnamed = ExchangeOptions::default();
    let role = world.verbs.exchange().unwrap();
    let stray = OwnedFd::from(UnixStream::pair().unwrap().0);
    let error = role.resolve_exchange_over(stray, &PathOptions::default(), &unnamed, deadline).unwrap_err().to_string();
    assert!(error.contains("name the device"), "{error}");
    let file = OwnedFd::from(fs::File::open("/dev/null").unwrap());
    assert!(role.accept_stream(listener, file, now).is_err());
    world.nothing_is_left(&[passive], 1);
}

/// When the provider ends a stream, the peer reads the end of the stream, even if the program has
/// another descriptor of the socket.
#[test]
fn a_stream_ends_whatever_descriptors_the_program_has() {
    let mut world = ExchangeTest::new();
    let options = on_fake0();
    // Returns the bytes that the peer can still read, up to the end of the stream. Returns an error
    // if the stream has not ended.
    let rest = |mut peer: UnixStream| {
        let mut rest = Vec::new();
        peer.set_nonblocking(true).unwrap();
        peer.read_to_end(&mut rest).map(|_| rest)
    };
    // The peer violates the protocol on an established connection.
    let (one, mut peer) = UnixStream::pair().unwrap();
    let mut kept = vec![one.try_clone().unwrap()];
    let (path, deadline) = (PathOptions::default(), world.now + LONG);
    let id = world.verbs.exchange().unwrap().resolve_exchange_over(one.into(), &path, &options, deadline).unwrap();
    let event = world.event();
    let (_, CmEventKind::Resolved { device }) = event else { panic!("{event:?}") };
    world.create_qp(id, device);
    world.verbs.connect(id, &ConnectParam::default()).unwrap();
    assert!(world.next().is_none());
    read(&mut peer);
    let accept = octets(&ExchangeMessage::Accept(endpoint(), b""));
    peer.write_all(&accept).unwrap();
    assert!(matches!(world.event(), (of, CmEventKind::Established { .. }) if of == id));
    peer.write_all(&accept).unwrap();
    let event = world.event();
    assert!(matches!(event, (_, CmEventKind::Disconnected(DisconnectCause::PeerViolation(_)))), "{event:?}");
    world.verbs.destroy_id(id, world.now).unwrap();
    assert_eq!(rest(peer).unwrap(), octets(&ExchangeMessage::Ready));
    // The program drops a detached connect request, and the peer disconnects before its request is answered.
    let listener =
        world.verbs.exchange().unwrap().listen_exchange(LOOPBACK.parse().unwrap(), &ListenParam::default(), &options);
    let listener = listener.unwrap();
    for detached in [true, false] {
        let (one, mut peer) = UnixStream::pair().unwrap();
        kept.push(one.try_clone().unwrap());
        world.verbs.exchange().unwrap().accept_stream(listener, one.into(), world.now).unwrap();
        peer.write_all(&octets(&ExchangeMessage::Request(endpoint(), b""))).unwrap();
        let (request, _) = world.request();
        let goodbye = octets(&ExchangeMessage::Goodbye);
        if detached {
            drop(world.verbs.handover().unwrap().detach(request).unwrap());
            assert_eq!(rest(peer).unwrap(), goodbye);
        } else {
            peer.write_all(&goodbye).unwrap();
            assert!(world.next().is_none());
            world.verbs.destroy_id(request, world.now).unwrap();
            assert_eq!(rest(peer).unwrap(), b"");
        }
    }
    world.nothing_is_left(&[], 1);
    drop(kept);
}

/// A connect request moves to another provider, which accepts it.
#[test]
fn a_request_is_handed_over() {
    let mut world = ExchangeTest::new();
    let verbs = Fake::provider_without_manager(&world.sysfs.0);
    let mut other = ExchangeTest { fake: world.fake, sysfs: Sysfs(PathBuf::new()), verbs, now: world.now };
    let (_, to) = world.listen();
    let active = world.connect(to);
    let (passive, _) = world.request();
    let detached = world.verbs.handover().unwrap().detach(passive).unwrap();
    let (moved, device) = other.verbs.handover().unwrap().attach(detached, other.now).unwrap();
    other.create_qp(moved, device);
    other.verbs.accept(moved, &ConnectParam::default(), other.now).unwrap();
    assert!(matches!(world.event(), (of, CmEventKind::Established { .. }) if of == active));
    assert!(matches!(other.event(), (of, CmEventKind::Established { .. }) if of == moved));
    // The peer's attempt fails if the detached request is dropped.
    let second = world.connect(to);
    let (passive, _) = world.request();
    drop(world.verbs.handover().unwrap().detach(passive).unwrap());
    assert_eq!(world.failure(second), ConnectFailure::PeerClosed);
    other.nothing_is_left(&[moved], 0);
    world.event();
    world.nothing_is_left(&[active, second], 1);
}

/// The provider limits the time between two retransmissions on a stream, if the kernel has such a
/// limit.
#[test]
fn a_stream_retransmits_often() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    if let Err(error) = rdma_transport::sockets::longest_retransmission_timeout(stream.as_fd()) {
        return println!("skipped: this kernel has no TCP_RTO_MAX_MS (Linux 6.15): {error}");
    }
    let socket = adopt(stream.into()).unwrap();
    let got = rdma_transport::sockets::longest_retransmission_timeout(socket.as_fd()).unwrap();
    // The kernel rounds up to its clock, which has at least 100 ticks a second.
    assert!((2500..2510).contains(&got.as_millis()), "{got:?}");
}
