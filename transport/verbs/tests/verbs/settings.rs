//! The settings of programs. Each test reads the setting back from the queue pair or from captured packets, or checks the result of the
//! call.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use rdma_transport::cq::CqAttr;
use rdma_transport::{
    Access, CmEventKind, CmId, ConnectParam, DeviceId, ExchangeOptions, Features, ListenParam, Memory, PathOptions,
    Provider, QpAttr, ReadDepth, Retries, SendFlags, SendOp, SgeList, Source, TransportError, WcStatus,
};

use rdma_transport_verbs::PathState;

use crate::world::*;

const TOS: u8 = 0x68;

fn resolved_with(
    world: &mut World,
    to: SocketAddr,
    options: &PathOptions,
) -> (rdma_transport::CmId, rdma_transport::DeviceId) {
    let id = world.provider.resolve(to, options, Instant::now() + TIMEOUT).unwrap();
    match world.news().kind {
        CmEventKind::Resolved { device } => (id, device),
        other => panic!("{other:?}"),
    }
}

/// A packet socket that captures the packets of an interface. Dropping it ends the capture.
struct Capture(OwnedFd);

impl Capture {
    fn on(netdev: &str) -> Self {
        const ALL: u16 = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: the call creates a descriptor, and accesses no memory.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK, ALL.into()) };
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: `socket` has returned this descriptor, which has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let name = std::ffi::CString::new(netdev).unwrap();
        // SAFETY: all fields are numbers, for which zeros are valid.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_protocol = ALL;
        // SAFETY: the name is a NUL-terminated string.
        to.sll_ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) } as i32;
        let len = size_of_val(&to) as u32;
        // SAFETY: `to` is a socket address with the length `len`.
        let rc = unsafe { libc::bind(std::os::fd::AsRawFd::as_raw_fd(&fd), (&raw const to).cast(), len) };
        assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
        Self(fd)
    }

    /// Returns the type of service of each captured IPv4 packet that has a TCP segment from or to `port`.
    fn of_tcp(&self, port: u16) -> Vec<u8> {
        let mut seen = Vec::new();
        let mut packet = [0_u8; 2048];
        loop {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&self.0);
            // SAFETY: the buffer has the length that is passed.
            let len = unsafe { libc::recv(fd, packet.as_mut_ptr().cast(), packet.len(), 0) };
            let Ok(len) = usize::try_from(len) else { return seen };
            if len < 40 || packet[0] >> 4 != 4 || packet[9] != 6 {
                continue;
            }
            let header = usize::from(packet[0] & 15) * 4;
            let at = |offset: usize| u16::from_be_bytes([packet[header + offset], packet[header + offset + 1]]);
            if [at(0), at(2)].contains(&port) {
                seen.push(packet[1]);
            }
        }
    }
}

fn what_is_asked_for_is_what_the_queue_pair_has(kind: Kind) {
    let mut world = World::new();
    let options = ListenParam { type_of_service: Some(TOS), ack_timeout: Some(15), ..ListenParam::default() };
    let listener = world.provider.listen(SocketAddr::new(kind.address(), 0), &options).unwrap();
    let to = world.provider.local_address(listener).unwrap();
    let capture = Capture::on("lo");
    let path = PathOptions { type_of_service: Some(TOS), ack_timeout: Some(14), ..PathOptions::default() };
    let (id, device) = resolved_with(&mut world, to, &path);
    let [here, there] = agreed(&mut world, id, device);
    match kind {
        Kind::Rxe => check_agreed(&here, &there),
        Kind::Siw => {
            // An iWARP queue pair has no path attributes except its port, but its TCP connection can have a type of service. Siw of Linux
            // 6.1 accepts the setting and does not use it. If another kernel uses it, every segment must have this type of service.
            assert_eq!(here.port, 1);
            let seen = capture.of_tcp(to.port());
            println!("types of service on the wire: {seen:x?}");
            assert!(seen.len() > 4 && [0, TOS].iter().any(|wanted| seen.iter().all(|tos| tos == wanted)), "{seen:x?}");
        }
    }
}

/// Two ends that connect by out-of-band exchange negotiate the same attributes as two ends that connect by the connection manager. On iWARP
/// an exchange is refused.
fn an_exchange_agrees_on_the_same(kind: Kind) {
    let mut world = World::new();
    let options = ListenParam { type_of_service: Some(TOS), ack_timeout: Some(15), ..ListenParam::default() };
    let (address, exchange) = (SocketAddr::new(kind.address(), 0), ExchangeOptions::default());
    let listener = world.provider.exchange().unwrap().listen_exchange(address, &options, &exchange).unwrap();
    let to = world.provider.local_address(listener).unwrap();
    let path = PathOptions { type_of_service: Some(TOS), ack_timeout: Some(14), ..PathOptions::default() };
    let role = world.provider.exchange().unwrap();
    let resolved = role.resolve_exchange(to, &path, &exchange, Instant::now() + TIMEOUT);
    if kind == Kind::Siw {
        let refused = resolved.unwrap_err();
        assert!(
            matches!(refused, TransportError::Unsupported { .. }) && refused.to_string().contains("iWARP"),
            "{refused}"
        );
        return;
    }
    let id = resolved.unwrap();
    let CmEventKind::Resolved { device } = world.news().kind else { panic!("no `Resolved` event") };
    let [here, there] = agreed(&mut world, id, device);
    check_agreed(&here, &there);
}

fn check_agreed(here: &PathState, there: &PathState) {
    assert_eq!((here.type_of_service, there.type_of_service), (TOS, TOS));
    assert_eq!(here.ack_timeout, 14);
    assert_eq!(there.ack_timeout, 15);
    // Each end sets the `rnr_retry_count` of the other end. The active end sets the `retry_count` of both ends.
    assert_eq!((here.retry_count, here.rnr_retry_count, here.min_rnr_timer), (3, 6, 8));
    assert_eq!((there.retry_count, there.rnr_retry_count, there.min_rnr_timer), (3, 5, 9));
    // Rxe rounds `responder_resources` up to a power of two.
    assert_eq!((here.responder_resources, here.initiator_depth), (4, 2));
    assert_eq!((there.responder_resources, there.initiator_depth), (2, 4));
    assert_eq!((here.port, here.mtu), (1, 1024));
}

/// Connects and sends a message. Returns the path attributes of both queue pairs, those of the active end first.
fn agreed(world: &mut World, id: CmId, device: DeviceId) -> [PathState; 2] {
    let active = world.equip(id, device);
    let retries = Retries { path: 3, receiver_not_ready: 5, min_rnr_timer: 8 };
    let param = ConnectParam { responder_resources: 3, initiator_depth: 2, retries, ..ConnectParam::default() };
    world.provider.connect(id, &param).unwrap();
    let (id, _, device, ..) = world.connect_request();
    let passive = world.equip(id, device);
    let retries = Retries { path: 4, receiver_not_ready: 6, min_rnr_timer: 9 };
    world.provider.accept(id, &ConnectParam { retries, ..ConnectParam::default() }, Instant::now()).unwrap();
    for _ in 0..2 {
        assert!(matches!(world.news().kind, CmEventKind::Established { .. }));
    }
    world.good(&active, SendOp::Send, active.sge(DEPTH as usize, 9));
    assert_eq!(world.completion(passive.cq).byte_len, 9);
    let [here, there] = [active.qp, passive.qp].map(|qp| world.provider.path_of(qp).unwrap());
    println!("active {here:?}\npassive {there:?}");
    [here, there]
}

fn a_connection_leaves_from_where_it_is_told_to(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let peer: IpAddr = kind.variable("PEER").parse().unwrap();
    let name = kind.variable("DEV");
    let from = |source| PathOptions { source, ..PathOptions::default() };
    // Use a source address that the system's routes would not choose.
    let (id, _) = resolved_with(&mut world, to, &from(Source::Address(peer)));
    assert_eq!(world.provider.local_address(id).unwrap().ip(), peer);
    for port in [None, Some(1)] {
        let (id, device) = resolved_with(&mut world, to, &from(Source::Device { name: name.clone(), port }));
        assert_eq!(world.provider.device(device).unwrap().name, name);
        world.provider.destroy_id(id, Instant::now()).unwrap();
    }
    // A device, port or address that does not exist is refused, and the error names it.
    for (source, wanted) in [
        (Source::Device { name: "mlx5_9".into(), port: None }, "mlx5_9"),
        (Source::Device { name: name.clone(), port: Some(2) }, "port 2 of"),
        (Source::Address("192.0.2.9".parse().unwrap()), "192.0.2.9"),
    ] {
        let refused = world.provider.resolve(to, &from(source), Instant::now() + TIMEOUT).unwrap_err();
        assert!(
            matches!(refused, TransportError::NoDevice { .. }) && refused.to_string().contains(wanted),
            "{refused}"
        );
    }
    // A connection from the chosen device and port can carry a message.
    let (id, device) = resolved_with(&mut world, to, &from(Source::Device { name, port: Some(1) }));
    let active = world.equip(id, device);
    world.provider.connect(id, &ConnectParam::default()).unwrap();
    let (id, _, device, ..) = world.connect_request();
    let passive = world.equip(id, device);
    world.provider.accept(id, &ConnectParam::default(), Instant::now()).unwrap();
    for _ in 0..2 {
        assert!(matches!(world.news().kind, CmEventKind::Established { .. }));
    }
    world.good(&active, SendOp::Send, active.sge(DEPTH as usize, 3));
    assert_eq!(world.completion(passive.cq).byte_len, 3);
}

fn a_listener_takes_ipv6_alone_or_both(kind: Kind) {
    for only in [true, false] {
        let mut world = World::new();
        let options = ListenParam { ipv6_only: Some(only), ..ListenParam::default() };
        let listener = world.provider.listen("[::]:0".parse().unwrap(), &options).unwrap();
        let port = world.provider.local_address(listener).unwrap().port();
        // On siw, a listener on an IPv6 address accepts only IPv6, regardless of this option.
        let both = !only && kind == Kind::Rxe;
        for (address, taken) in [(kind.variable("ADDR"), both), (kind.variable("ADDR6"), true)] {
            let to = SocketAddr::new(address.parse().unwrap(), port);
            let (id, device) = world.resolved(to);
            let end = world.equip(id, device);
            world.provider.connect(id, &ConnectParam::default()).unwrap();
            match world.news() {
                event if taken => {
                    assert!(matches!(event.kind, CmEventKind::ConnectRequest { .. }), "{only}: {event:?}")
                }
                event => {
                    let refused = matches!(event.kind, CmEventKind::ConnectFailed(_) | CmEventKind::Rejected { .. });
                    assert!(refused, "IPv4 on a listener of IPv6 alone: {event:?}");
                }
            }
            world.provider.destroy_id(end.id, Instant::now()).unwrap();
        }
    }
}

/// Every completion vector raises events. A vector above the last one is refused.
fn events_come_on_every_completion_vector(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (any, device) = world.resolved(to);
    let vectors = world.provider.device(device).unwrap().capabilities.completion_vectors;
    println!("{vectors} completion vectors");
    assert!(matches!(
        world.provider.create_cq(device, &CqAttr { vector: vectors, ..CqAttr::new(8) }),
        Err(TransportError::OutOfRange { .. })
    ));
    world.provider.destroy_id(any, Instant::now()).unwrap();
    for vector in 0..vectors {
        let (id, device) = world.resolved(to);
        let active = world.equip(id, device);
        world.provider.connect(id, &ConnectParam::default()).unwrap();
        let (id, _, device, ..) = world.connect_request();
        let mut passive = world.equip(id, device);
        world.provider.accept(id, &ConnectParam::default(), Instant::now()).unwrap();
        for _ in 0..2 {
            assert!(matches!(world.news().kind, CmEventKind::Established { .. }));
        }
        world.good(&active, SendOp::Send, active.sge(DEPTH as usize, 5));
        assert_eq!(world.completion(passive.cq).byte_len, 5);
        // Replace the connection by another one. The completion queue of the new passive end is on the completion
        // vector `vector`.
        world.drop_end(&active);
        world.disconnected(passive.id, &rdma_transport::DisconnectCause::Peer);
        world.drop_end(&passive);
        let cq = world.provider.create_cq(device, &CqAttr { vector, ..CqAttr::new(2 * DEPTH) }).unwrap();
        let (id, device) = world.resolved(to);
        let active = world.equip(id, device);
        world.provider.connect(id, &ConnectParam::default()).unwrap();
        let (id, ..) = world.connect_request();
        let area = world.area_on(device, SLOT, Access::LOCAL_WRITE);
        let attr = QpAttr {
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: 4,
            max_recv_wr: 4,
            max_inline: 0,
            max_recv_sge: 0,
            srq: None,
        };
        (passive.id, passive.cq, passive.qp) = (id, cq, world.provider.create_qp(id, &attr).unwrap());
        let receive = rdma_transport::RecvWr { wr_id: 1, sges: SgeList::one(area.sge(0, SLOT)) };
        world.provider.post_recv(passive.qp, &[receive]).unwrap();
        world.provider.accept(id, &ConnectParam::default(), Instant::now()).unwrap();
        for _ in 0..2 {
            assert!(matches!(world.news().kind, CmEventKind::Established { .. }));
        }
        world.provider.post_send(active.qp, &[active.send(DEPTH as usize, 6)]).unwrap();
        // `completion` sleeps until the completion channel is readable. So it returns only if the vector has raised its
        // event.
        assert_eq!(world.completion(cq).byte_len, 6);
        world.drop_end(&active);
        while world.event_within(std::time::Duration::from_millis(50)).is_some() {}
        world.provider.destroy_id(passive.id, Instant::now()).unwrap();
        world.provider.destroy_cq(cq).unwrap();
    }
}

/// A queue pair whose receives have at most one scatter/gather entry refuses a receive with two. Adapters use smaller queue entries for
/// such a queue pair.
fn receives_of_one_piece_take_one(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (id, device) = world.resolved(to);
    let cq = world.provider.create_cq(device, &CqAttr::new(64)).unwrap();
    let area = world.area_on(device, SLOT, Access::LOCAL_WRITE);
    let attr = QpAttr { max_recv_sge: 1, ..QpAttr::new(cq, cq, 4, 4) };
    let qp = world.provider.create_qp(id, &attr).unwrap();
    let mut sges = SgeList::one(area.sge(0, 8));
    world.provider.post_recv(qp, &[rdma_transport::RecvWr { wr_id: 1, sges }]).unwrap();
    sges.push(area.sge(8, 8)).unwrap();
    let refused = world.provider.post_recv(qp, &[rdma_transport::RecvWr { wr_id: 2, sges }]).unwrap_err().error;
    assert!(matches!(refused, TransportError::OutOfRange { value: 2, .. }), "{refused}");
}

/// A read depth above the device's limit is reduced to that limit. Values that no device supports are refused.
fn depths_of_reads_are_cut_to_the_device(kind: Kind) {
    let mut world = World::new();
    world.read_depth = ReadDepth { responder_resources: 10_000, initiator_depth: 10_000 };
    let (_, to) = world.listen(kind.address());
    world.pair(to);
    let (id, device) = world.resolved(to);
    world.equip(id, device);
    for retries in [
        Retries { path: 8, ..Retries::default() },
        Retries { receiver_not_ready: 8, ..Retries::default() },
        Retries { min_rnr_timer: 32, ..Retries::default() },
    ] {
        let refused = world.provider.connect(id, &ConnectParam { retries, ..ConnectParam::default() });
        assert!(matches!(refused, Err(TransportError::OutOfRange { .. })), "{refused:?}");
    }
    let path = PathOptions { ack_timeout: Some(32), ..PathOptions::default() };
    let refused = world.provider.resolve(to, &path, Instant::now() + TIMEOUT);
    assert!(matches!(refused, Err(TransportError::OutOfRange { value: 32, .. })), "{refused:?}");
    let options = ListenParam { ack_timeout: Some(99), ..ListenParam::default() };
    let refused = world.provider.listen(SocketAddr::new(kind.address(), 0), &options);
    assert!(matches!(refused, Err(TransportError::OutOfRange { value: 99, .. })), "{refused:?}");
}

/// RDMA Reads can place data in every kind of region: in one that another thread has registered, in one with `READ_SINK`, in one with
/// relaxed ordering, and in one with on-demand paging if the device supports it.
fn every_kind_of_region_is_read_into(kind: Kind) {
    const LEN: usize = 1 << 20;
    let mut world = World::new();
    world.access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let (_, to) = world.listen(kind.address());
    let (active, passive) = world.pair(to);
    let source = world.area(&passive, LEN, Access::REMOTE_READ);
    source.fill(7);
    let features = world.provider.device(active.device).unwrap().capabilities.features;
    println!("{features:?}");
    let registrar = world.provider.off_loop_registration().unwrap().registrar(active.device).unwrap();
    let memory = Arc::new(Memory::new(LEN).unwrap());
    let registered = thread::spawn({
        let memory = Arc::clone(&memory);
        move || registrar.register(&memory, 0..LEN, Access::READ_SINK).unwrap()
    });
    let region = world.provider.off_loop_registration().unwrap().adopt(registered.join().unwrap()).unwrap();
    let mut sinks = vec![Area { memory, region }];
    sinks.push(world.area(&active, LEN, Access::READ_SINK));
    sinks.push(world.area(&active, LEN, Access::READ_SINK | Access::RELAXED_ORDERING));
    if features.contains(Features::ON_DEMAND_PAGING) {
        sinks.push(world.area(&active, LEN, Access::READ_SINK | Access::ON_DEMAND));
    } else {
        let memory = Arc::new(Memory::new(4096).unwrap());
        let refused = world.provider.register(active.device, &memory, 0..memory.len(), Access::ON_DEMAND);
        assert!(matches!(refused, Err(TransportError::Unsupported { .. })), "{refused:?}");
        assert!(refused.unwrap_err().to_string().contains("on-demand paging"));
    }
    for sink in &sinks {
        world.good(&active, SendOp::Read(source.remote(0)), sink.sge(0, LEN));
        assert!(sink.bytes() == source.bytes());
        world.provider.deregister(sink.region.id).unwrap();
    }
}

/// RDMA Writes can place data in memory that is shared with other processes, and in memory that the program has allocated itself.
fn foreign_memory_is_read_and_written(kind: Kind) {
    const LEN: usize = 1 << 16;
    let mut world = World::new();
    world.access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let (_, to) = world.listen(kind.address());
    let (active, passive) = world.pair(to);
    let (shared, file) = Memory::new_file(LEN).unwrap();
    let shared = Arc::new(shared);
    let mut own = vec![0_u64; LEN / 8];
    let base = std::ptr::NonNull::new(own.as_mut_ptr().cast::<u8>()).unwrap();
    // SAFETY: the vector outlives the region, and nothing else uses the vector in that time.
    let raw = Arc::new(unsafe { Memory::from_raw(base, LEN) }.unwrap());
    let other = Memory::map_file(file.as_fd(), 0, LEN).unwrap();
    let source = world.area(&active, LEN, Access::LOCAL_WRITE);
    source.fill(3);
    for memory in [&shared, &raw] {
        let region = world.provider.register(passive.device, memory, 0..LEN, Access::REMOTE_WRITE).unwrap();
        let target = Area { memory: Arc::clone(memory), region };
        world.good(&active, SendOp::Write(target.remote(0)), source.sge(0, LEN));
        // The write has been placed when the message that follows it has arrived.
        world.good(&active, SendOp::Send, active.sge(DEPTH as usize, 1));
        world.completion(passive.cq);
        assert!(target.bytes() == source.bytes());
        world.provider.deregister(region.id).unwrap();
    }
    let mut seen = vec![0; LEN];
    assert!(other.copy_out(0, &mut seen) && seen == source.bytes());
    drop((shared, raw));
    assert_ne!(own[100], 0, "the bytes of the write are missing from the program's memory");
}

/// The software devices cannot access the memory of other devices. The error contains `dma-buf`.
fn a_dma_buf_is_refused_by_name(kind: Kind) {
    let mut world = World::new();
    let (_, to) = world.listen(kind.address());
    let (_, device) = world.resolved(to);
    // SAFETY: the name is a NUL-terminated string, and the result is checked.
    let fd = unsafe { libc::memfd_create(c"rdma".as_ptr(), 0) };
    assert!(fd >= 0);
    // SAFETY: `memfd_create` has returned this descriptor, which has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let refused = world
        .provider
        .foreign_memory()
        .unwrap()
        .register_dmabuf(device, fd.as_fd(), 0, 4096, 0x1000, Access::LOCAL_WRITE)
        .unwrap_err();
    println!("{refused}");
    assert!(
        matches!(refused, TransportError::Unsupported { .. }) && refused.to_string().contains("dma-buf"),
        "{refused}"
    );
}

/// A short Send with Invalidate works on a queue pair that sends short payloads inline. On siw the provider must not post a Send with
/// Invalidate inline: the kernel would refuse it, and the send queue would stall.
fn a_small_send_with_invalidate_leaves_the_queue_whole(kind: Kind) {
    let mut world = World::new();
    (world.max_inline, world.access) = (64, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let (_, to) = world.listen(kind.address());
    let (active, passive) = world.pair(to);
    let features = world.provider.device(active.device).unwrap().capabilities.features;
    let target = world.area(&passive, 4096, Access::REMOTE_WRITE);
    for len in [1, 8, 64] {
        if features.contains(Features::REMOTE_INVALIDATION) {
            let gone = world.area(&passive, 4096, Access::REMOTE_WRITE);
            let op = SendOp::SendInvalidate(gone.region.remote_key);
            world.good(&active, op, active.sge(DEPTH as usize, len));
            assert_eq!(world.completion(passive.cq).byte_len as usize, len);
        }
        active.write(DEPTH as usize, &[len as u8; 64]);
        world.good(&active, SendOp::Write(target.remote(0)), active.sge(DEPTH as usize, len));
        // The write has been placed when the message that follows it has arrived.
        world.good(&active, SendOp::Send, active.sge(DEPTH as usize, 1));
        world.completion(passive.cq);
        assert_eq!(target.bytes()[len - 1], len as u8);
    }
    // On siw the provider refuses a Send with Invalidate that has the flag `INLINE`, and does not pass it to the
    // device.
    if kind == Kind::Siw {
        let wr = rdma_transport::SendWr {
            flags: SendFlags::INLINE,
            ..active.op(SendOp::SendInvalidate(target.region.remote_key), DEPTH as usize, 8)
        };
        let refused = world.provider.post_send(active.qp, &[wr]).unwrap_err().error;
        assert!(matches!(refused, TransportError::OutOfRange { value: 8, .. }), "{refused}");
    }
    let wc = world.done(&active, SendOp::Send, SgeList::one(active.sge(DEPTH as usize, 8)), SendFlags::INLINE);
    assert_eq!(wc.status, WcStatus::Success);
}

on_each_device! {
    what_is_asked_for_is_what_the_queue_pair_has
    an_exchange_agrees_on_the_same
    a_connection_leaves_from_where_it_is_told_to
    a_listener_takes_ipv6_alone_or_both
    events_come_on_every_completion_vector
    depths_of_reads_are_cut_to_the_device
    every_kind_of_region_is_read_into
    foreign_memory_is_read_and_written
    receives_of_one_piece_take_one
    a_dma_buf_is_refused_by_name
    a_small_send_with_invalidate_leaves_the_queue_whole
}
