//! Tests of connections in shared memory, between two providers.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use super::super::bench::{Bench, entropy};
use super::super::net::LocalSockets;
use super::super::{Iwarp, IwarpConfig, SharedMemoryPolicy, TcpNet};
use super::*;
use crate::patience::until;
use crate::shm::packet::CALL_PACKET;
use crate::test_memory::{TestEntry, TestMemory};
use rdma_transport::cm::{CmEvent, CmEventKind, ConnectParam, DisconnectCause, ListenParam};
use rdma_transport::mem::{Memory, Sharing};
use rdma_transport::mr::{Access, LocalKey, MrId, RemoteKey};
use rdma_transport::provider::{DeviceId, Drive, Provider};
use rdma_transport::qp::QpId;
use rdma_transport::wc::{WcStatus, WorkCompletion};
use rdma_transport::wr::{RecvWr, RemoteAddress, SendFlags, SendOp, SendWr, SgeList};

/// The length of a message that the peer reads in place, in bytes.
const LONG: usize = 4096;
/// The length of a Read, in bytes.
const SHORT: usize = 64;

/// A client and a server with a connection in shared memory. The client has lent memory to the server.
struct LentWorld {
    client: Bench,
    server: Bench,
    /// The queue pairs of the client and of the server.
    of_client: QpId,
    of_server: QpId,
    /// The memory that the client has lent, its region, and its file.
    lent: Arc<Memory>,
    region: MrId,
    file: FileNumber,
    /// Memory of the client that the server may access with Reads, and its key.
    readable: (Arc<Memory>, RemoteKey),
    /// The memory of the server, for messages and for the results of Reads.
    sink: (Arc<Memory>, LocalKey),
}

/// The device and the inode of a memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileNumber(u64, u64);

impl FileNumber {
    fn of(file: &OwnedFd) -> Self {
        let file = std::fs::File::from(file.try_clone().unwrap()).metadata().unwrap();
        Self(file.dev(), file.ino())
    }

    /// Returns the number of descriptors of this process that refer to the file.
    fn descriptors(self) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        // Errors are ignored: other tests of this process close descriptors meanwhile.
        let file = |entry: std::io::Result<std::fs::DirEntry>| std::fs::metadata(entry.ok()?.path()).ok();
        all.filter_map(file).filter(|file| Self(file.dev(), file.ino()) == self).count()
    }
}

/// Returns memory that can be lent, and its file.
fn to_lend() -> (Arc<Memory>, OwnedFd) {
    let mut memory = Memory::new_shared(LONG, Sharing::Write).unwrap();
    let file = memory.take_file().unwrap();
    (Arc::new(memory), file)
}

fn poll(bench: &mut Bench) -> Vec<WorkCompletion> {
    let mut done = Vec::new();
    bench.iwarp.poll_cq(bench.cq, 64, &mut done).unwrap();
    done
}

impl LentWorld {
    /// `tag` is an argument of [`entropy`].
    fn new(tag: u8) -> Self {
        let config = IwarpConfig { shared_memory: SharedMemoryPolicy::Require, ..IwarpConfig::default() };
        let net = TcpNet::new().unwrap();
        let mut server = Bench::of(Iwarp::new(config.clone(), net, entropy(tag)).unwrap());
        let mut client = Bench::new(config);
        let listener = server.iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
        let address = server.iwarp.local_address(listener).unwrap();
        let of_client = QpId(client.connect_to(address).0);
        until("a request", || {
            client.turn();
            server.turn();
            (!server.events.is_empty()).then_some(())
        });
        let id = server.request();
        server.iwarp.accept(id, &ConnectParam::default(), server.now).unwrap();
        let is_up = |event: &CmEvent| matches!(event.kind, CmEventKind::Established { .. });
        until("the connection", || {
            client.turn();
            server.turn();
            (client.events.iter().any(is_up) && server.events.iter().any(is_up)).then_some(())
        });
        client.events.clear();
        server.events.clear();

        let (lent, file) = to_lend();
        let region = client.iwarp.register(DeviceId(0), &lent, 0..LONG, Access::LOCAL_WRITE).unwrap().id;
        let number = FileNumber::of(&file);
        assert!(client.iwarp.shared_memory().unwrap().lend(of_client, region, Some(file)).unwrap());
        let readable = Arc::new(Memory::new(SHORT).unwrap());
        let remote_key =
            client.iwarp.register(DeviceId(0), &readable, 0..SHORT, Access::REMOTE_READ).unwrap().remote_key;
        let sink = Arc::new(Memory::new(2 * LONG).unwrap());
        let local_key = server.iwarp.register(DeviceId(0), &sink, 0..2 * LONG, Access::LOCAL_WRITE).unwrap().local_key;
        let of_server = QpId(id.0);
        let (readable, sink) = ((readable, remote_key), (sink, local_key));
        let mut world = Self { client, server, of_client, of_server, lent, region, file: number, readable, sink };
        until("a message that is read in place", || {
            world.send();
            let mut done = poll(&mut world.client);
            // A message that was copied completes before the server has read it.
            let is_copied = !done.is_empty();
            until("the message", || {
                world.client.turn();
                world.server.turn();
                done.append(&mut poll(&mut world.client));
                done.append(&mut poll(&mut world.server));
                (done.len() == 2).then_some(())
            });
            assert!(done.iter().all(|wc| wc.status == WcStatus::Success), "{done:?}");
            (!is_copied).then_some(())
        });
        world
    }

    /// Posts a receive of the server, and a Send of the client from the lent memory.
    fn send(&mut self) {
        let wr = RecvWr { wr_id: 1, sges: SgeList::one(self.sink.0.sge(0, LONG)) };
        self.server.iwarp.post_recv(self.of_server, &[wr]).unwrap();
        let sges = SgeList::one(self.lent.shared_sge(0, LONG));
        let wr = SendWr { wr_id: 2, op: SendOp::Send, sges, flags: SendFlags::SIGNALED };
        self.client.iwarp.post_send(self.of_client, &[wr]).unwrap();
    }

    /// Posts a Read of the server from the readable memory of the client.
    fn read(&mut self, wr_id: u64, key: RemoteKey) {
        let remote = RemoteAddress { address: self.readable.0.as_ptr() as u64, key };
        let sges = SgeList::one(self.sink.0.sge(LONG, SHORT).keyed(self.sink.1));
        let wr = SendWr { wr_id, op: SendOp::Read(remote), sges, flags: SendFlags::SIGNALED };
        self.server.iwarp.post_send(self.of_server, &[wr]).unwrap();
    }
}

/// Lent memory that the peer has mapped occupies no descriptor of the lender. The region cannot be
/// lent twice. Deregistering it ends the lending, although the file is closed: the next message
/// from this memory is copied.
#[test]
fn lent_memory_occupies_no_descriptor() {
    let mut world = LentWorld::new(25);
    assert_eq!(world.file.descriptors(), 0);
    let (_, again) = to_lend();
    let (client, region) = (&mut world.client.iwarp, world.region);
    assert!(!client.shared_memory().unwrap().lend(world.of_client, region, Some(again)).unwrap());
    client.deregister(region).unwrap();
    world.send();
    assert_eq!(poll(&mut world.client).len(), 1, "the peer reads memory that is not lent any more");
}

/// The client refuses a Read, which ends the connection and its lendings. The server has not read
/// an earlier message in lent memory, and cannot read it any more. It still finds the refusal,
/// which is behind that message in the ring, and reports it.
#[test]
fn a_refusal_behind_a_lost_message_is_found() {
    for (tag, is_lost) in [(21, false), (22, true)] {
        let mut world = LentWorld::new(tag);
        if is_lost {
            world.send();
        }
        // The client has already answered this Read. The answer is behind the lost message, too.
        world.read(3, world.readable.1);
        world.client.turn();
        world.read(4, RemoteKey(!world.readable.1.0));
        let refused = world.client.event().kind;
        assert!(matches!(refused, CmEventKind::Disconnected(DisconnectCause::PeerViolation(_))), "{refused:?}");
        let event = world.server.event().kind;
        let CmEventKind::Disconnected(DisconnectCause::TerminatedByPeer(why)) = &event else { panic!("{event:?}") };
        assert_eq!(why, "a read or an atomic operation with an invalid key");
        let done = poll(&mut world.server);
        let status = |wr_id| done.iter().find(|wc| wc.wr_id == wr_id).map(|wc| wc.status);
        assert_eq!(status(4), Some(WcStatus::RemoteAccessError), "{done:?}");
        assert!(matches!(status(3), Some(WcStatus::Success | WcStatus::Flushed)), "{done:?}");
        assert_eq!(status(1), is_lost.then_some(WcStatus::Flushed), "{done:?}");
    }
}

/// The client is dropped before the server has read a message. From then on, the program of the
/// client may overwrite the memory of the message, so the message must not be delivered.
#[test]
fn lent_memory_is_not_read_after_the_drop_of_its_provider() {
    let mut world = LentWorld::new(23);
    world.send();
    let LentWorld { client, mut server, lent, .. } = world;
    drop(client);
    lent.write(0, &[7; LONG]);
    let ended = server.event().kind;
    assert!(matches!(ended, CmEventKind::Disconnected(DisconnectCause::Truncated)), "{ended:?}");
    let done = poll(&mut server);
    assert!(done.len() == 1 && done[0].status == WcStatus::Flushed, "{done:?}");
}

/// The Unix socket of the client has no room for the announcement of a lending. The client sends
/// the announcement once the socket is writable. Then the server reads messages from the lent
/// memory in place.
#[test]
fn an_announcement_waits_until_the_socket_has_room() {
    let mut world = LentWorld::new(24);
    let (lent, file) = to_lend();
    (world.lent, world.file) = (lent, FileNumber::of(&file));
    let (client, of_client) = (&mut world.client.iwarp, world.of_client);
    let region = client.register(DeviceId(0), &world.lent, 0..LONG, Access::LOCAL_WRITE).unwrap();
    let socket = client.endpoints.get(of_client.0).and_then(CmEndpoint::socket).unwrap();
    while client.hub.net.pass(socket, &CALL_PACKET, None).is_ok() {}
    assert!(client.shared_memory().unwrap().lend(of_client, region.id, Some(file)).unwrap());
    let waits = |client: &Iwarp<TcpNet>| matches!(client.endpoints.get(of_client.0), Some(CmEndpoint::Ring(flow)) if flow.is_blocked());
    assert!(waits(client) && world.file.descriptors() == 1, "the announcement is lost");
    until("the announcement", || {
        world.server.turn();
        world.client.turn();
        (!waits(&world.client.iwarp)).then_some(())
    });
    assert_eq!(world.file.descriptors(), 0);
    until("a message that is read in place", || {
        world.send();
        let is_copied = !poll(&mut world.client).is_empty();
        let mut left = 2 - usize::from(is_copied);
        until("the message", || {
            world.server.turn();
            world.client.turn();
            left -= poll(&mut world.client).len() + poll(&mut world.server).len();
            (left == 0).then_some(())
        });
        (!is_copied).then_some(())
    });
}

/// A busy poll looks up the endpoint of a link with new records only once.
#[test]
fn a_served_ring_is_looked_up_once() {
    let mut world = LentWorld::new(28);
    world.server.turn();
    world.send();
    world.server.iwarp.endpoints.look_ups.set(0);
    world.server.iwarp.progress(world.server.now, Drive::Spin);
    assert_eq!(world.server.iwarp.endpoints.look_ups.get(), 1);
    assert_eq!(poll(&mut world.server).len(), 1);
}

/// A link that becomes hot at the limit replaces the one that has been idle for the longest time.
#[test]
fn the_idlest_link_is_hot_no_longer() {
    let Iwarp { rings, endpoints, hub, .. } = &mut Bench::new(IwarpConfig::default()).iwarp;
    let links = (0..100).map(|slot| Key::new(slot, 1));
    for (nth, link) in links.enumerate() {
        rings.hot.iter_mut().for_each(|(_, idle)| *idle += 1);
        rings.heat(endpoints, hub, link);
        rings.heat(endpoints, hub, link);
        assert_eq!(rings.hot.len(), MAX_HOT.min(nth + 1));
    }
    let mut slots: Vec<u32> = rings.hot.iter().map(|(link, _)| link.slot()).collect();
    slots.sort_unstable();
    assert!(slots.into_iter().eq(100 - MAX_HOT as u32..100));
}
