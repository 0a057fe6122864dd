//! Tests of established connections. The peers are plain TCP sockets, to which the tests write octets.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::super::bench::{Bench, request_v1, send};
use super::super::frame::Frame;
use super::super::{CrcPolicy, IwarpConfig};
use super::*;
use crate::patience::until;
use crate::test_memory::TestMemory;
use rdma_transport::cm::ConnectParam;
use rdma_transport::mem::Memory;
use rdma_transport::provider::Provider;
use rdma_transport::qp::QpId;
use rdma_transport::roles::Datagrams;
use rdma_transport::wr::{RecvWr, SendFlags, SendOp, SendWr, SgeList};

/// Connects a plain socket to a provider that listens. The connection uses no CRC. Returns the provider's queue pair, and the socket.
fn connected(bench: &mut Bench) -> (QpId, TcpStream) {
    let (_, mut peer) = bench.listen();
    peer.write_all(&request_v1()).unwrap();
    let id = bench.request();
    bench.iwarp.accept(id, &ConnectParam::default(), bench.now).unwrap();
    bench.read(&mut peer, 20);
    bench.events.clear();
    (QpId(id.0), peer)
}

fn bench() -> Bench {
    Bench::new(IwarpConfig { crc: CrcPolicy::Off, ..IwarpConfig::default() })
}

/// Writes frames of 20 octets until the socket is full. `sent` counts the octets that were written so far. The last written frame may be
/// incomplete.
fn flood(peer: &mut TcpStream, frames: &[u8], sent: &mut usize) {
    loop {
        match peer.write(&frames[*sent % 20..]) {
            Ok(n) => *sent += n,
            Err(error) => return assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
}

/// Returns true if the socket of a connection has at least this number of unread octets.
fn has_received(bench: &Bench, qp: QpId, bytes: usize) -> bool {
    let socket = bench.iwarp.endpoints.get(qp.0).and_then(CmEndpoint::socket).unwrap();
    bench.iwarp.hub.net.unread(socket, bytes) == bytes
}

#[test]
fn it_tells_when_it_last_heard_a_peer() {
    let mut bench = bench();
    let start = bench.now;
    let (qp, mut peer) = connected(&mut bench);
    assert_eq!(
        (bench.iwarp.liveness().unwrap().last_heard(qp), bench.iwarp.liveness().unwrap().has_unread(qp)),
        (Some(start), false)
    );
    let memory = Memory::new(64).unwrap();
    let wr = RecvWr { wr_id: 1, sges: SgeList::one(memory.sge(0, 64)) };
    bench.iwarp.post_recv(qp, &[wr]).unwrap();
    // An incomplete FPDU of fewer than 512 octets is no sign of life of the peer. A complete FPDU
    // is a sign of life.
    let frame = send(1);
    let (part, rest) = frame.split_at(13);
    bench.now += Duration::from_secs(1);
    peer.write_all(part).unwrap();
    for _ in 0..20 {
        bench.turn();
    }
    assert_eq!(
        (bench.iwarp.liveness().unwrap().last_heard(qp), bench.iwarp.liveness().unwrap().has_unread(qp)),
        (Some(start), false)
    );
    bench.now += Duration::from_secs(1);
    peer.write_all(rest).unwrap();
    until("the frame is heard", || {
        bench.turn();
        (bench.iwarp.liveness().unwrap().last_heard(qp) == Some(bench.now)).then_some(())
    });
    assert!(!bench.iwarp.liveness().unwrap().has_unread(qp));
    let heard = bench.now;
    bench.now += Duration::from_secs(5);
    bench.turn();
    assert_eq!(bench.iwarp.liveness().unwrap().last_heard(qp), Some(heard));
    assert_eq!(
        (
            bench.iwarp.liveness().unwrap().last_heard(QpId(Key::new(99, 1))),
            bench.iwarp.liveness().unwrap().has_unread(QpId(Key::new(99, 1)))
        ),
        (None, false)
    );
}

/// A connection on which the provider sends more than TCP has room for.
struct FloodedPeer {
    bench: Bench,
    qp: QpId,
    peer: TcpStream,
    memory: Memory,
}

impl FloodedPeer {
    /// Connects, and receives a frame of the peer. The provider may send only after this frame.
    fn new() -> Self {
        let mut bench = bench();
        let (qp, mut peer) = connected(&mut bench);
        let memory = Memory::new(64 << 20).unwrap();
        let wr = RecvWr { wr_id: 1, sges: SgeList::one(memory.sge(0, 64)) };
        bench.iwarp.post_recv(qp, &[wr]).unwrap();
        peer.write_all(&send(1)).unwrap();
        let mut done = Vec::new();
        until("the frame", || {
            bench.turn();
            (bench.iwarp.poll_cq(bench.cq, 1, &mut done).unwrap() == 1).then_some(())
        });
        Self { bench, qp, peer, memory }
    }

    fn post(&mut self, len: usize) {
        let sges = SgeList::one(self.memory.sge(0, len));
        let wr = SendWr { wr_id: 2, op: SendOp::Send, sges, flags: SendFlags::SIGNALED };
        self.bench.iwarp.post_send(self.qp, &[wr]).unwrap();
    }

    /// Posts a Send of which most octets wait in the provider until the peer reads.
    fn flood(&mut self) {
        self.post(self.memory.len());
    }

    fn heard(&self) -> Option<Instant> {
        self.bench.iwarp.liveness().unwrap().last_heard(self.qp)
    }
}

/// On a slow link, the answer to a ping follows all data that was sent before the ping. So the
/// acknowledgement of such data is a sign of life, too.
#[test]
fn a_peer_that_acknowledges_waiting_data_is_alive() {
    let mut world = FloodedPeer::new();
    let start = world.bench.now;
    // TCP has room for this frame, so its acknowledgement is no sign of life.
    world.bench.now += Duration::from_secs(1);
    world.post(2);
    world.bench.read(&mut world.peer, send(1).len());
    assert_eq!(world.heard(), Some(start));
    world.flood();
    world.bench.now += Duration::from_secs(1);
    until("an acknowledgement of waiting data", || {
        world.bench.read(&mut world.peer, 64 << 10);
        (world.heard() == Some(world.bench.now)).then_some(())
    });
}

/// A program that posts often fills the room in the socket's buffer before an edge reports it. The
/// acknowledgements that made the room still count as signs of life.
#[test]
fn posts_that_use_the_acknowledged_room_hide_no_sign_of_life() {
    let mut world = FloodedPeer::new();
    world.flood();
    world.bench.now += Duration::from_secs(1);
    // This call passes the new time to the provider, and reads no edge of the connection. Neither
    // does any later call.
    assert!(world.bench.iwarp.next_cm_event(world.bench.now).unwrap().is_none());
    let mut bytes = vec![0; 64 << 10];
    until("an acknowledgement of waiting data", || {
        if let Err(error) = world.peer.read(&mut bytes) {
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
        }
        world.bench.iwarp.immediate_sends().unwrap().ring(world.qp);
        (world.heard() == Some(world.bench.now)).then_some(())
    });
}

/// One peer floods the provider with RDMA Writes without payload. Such Writes need no receive and no STag, so only the budget limits their
/// number.
#[test]
fn empty_frames_are_bounded_and_keep_nobody_waiting() {
    let mut bench = bench();
    let (flooder, mut flooding) = connected(&mut bench);
    let (other, mut quiet) = connected(&mut bench);
    let memory = Memory::new(64).unwrap();
    let wr = RecvWr { wr_id: 1, sges: SgeList::one(memory.sge(0, 64)) };
    bench.iwarp.post_recv(other, &[wr]).unwrap();
    let empty = [0, 14, 0xc1, 0x40, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0].repeat(4096);
    let fpdus = |bench: &Bench| match bench.iwarp.endpoints.get(flooder.0) {
        Some(CmEndpoint::Stream(flow)) => flow.qp.rx.fpdus(),
        endpoint => panic!("{endpoint:?}"),
    };
    let (mut sent, mut seen, mut most, mut busy) = (0, 0, 0, 0);
    for round in 0..200 {
        // Wait until at least one octet of the flood has arrived: after a read, TCP needs some time to open its window. The test cannot
        // wait for more octets. While one octet of a large TCP segment is unread, the whole segment occupies the socket's buffer, and the
        // window can stay closed.
        until("the flood", || {
            flood(&mut flooding, &empty, &mut sent);
            has_received(&bench, flooder, 1).then_some(())
        });
        bench.now += Duration::from_millis(1);
        if round == 100 {
            // The message of the other connection must be received in the next round, in spite of the flood.
            quiet.write_all(&send(1)).unwrap();
            until("the message", || has_received(&bench, other, send(1).len()).then_some(()));
            bench.iwarp.progress(bench.now, Drive::Full);
            let mut done = Vec::new();
            assert_eq!(bench.iwarp.poll_cq(bench.cq, 9, &mut done).unwrap(), 1);
            assert_eq!(bench.iwarp.liveness().unwrap().last_heard(other), Some(bench.now));
            seen = fpdus(&bench);
        }
        bench.iwarp.progress(bench.now, Drive::Full);
        busy += usize::from(bench.iwarp.liveness().unwrap().has_unread(flooder));
        let now = fpdus(&bench);
        if round > 2 {
            most = most.max(now - seen);
        }
        seen = now;
    }
    assert!(bench.events.is_empty() && seen > 20_000, "{seen} {:?}", bench.events);
    assert!(most <= 600, "{most} frames in one call");
    assert!(busy > 100, "what was left counts as unread: {busy}");
}

/// If the MPA reply cannot be sent, for example because the peer has reset the connection, the
/// deadline of the `reply_grace` is set again, to a later time. Otherwise one call would handle the
/// same deadline forever.
#[test]
fn a_reply_grace_of_nothing_does_not_keep_the_timers_busy() {
    let reply_grace = Duration::ZERO;
    let mut bench = Bench::new(IwarpConfig { crc: CrcPolicy::Off, reply_grace, ..IwarpConfig::default() });
    let (qp, _peer) = connected(&mut bench);
    let Some(CmEndpoint::Stream(flow)) = bench.iwarp.endpoints.get_mut(qp.0) else { panic!() };
    flow.reply = Frame::new(vec![0]);
    bench.iwarp.expire(qp.0, bench.now, bench.now);
    assert!(bench.iwarp.next_deadline().is_some_and(|at| at > bench.now));
}

/// If there are connections in shared memory, most rounds of a busy poll only check their rings. Such a round still reports datagrams that
/// an earlier round has left unread. No further edge reports them, so a caller that does not know of them would sleep.
#[test]
fn a_busy_poll_of_rings_tells_of_unread_datagrams() {
    let mut bench = bench();
    bench.iwarp.bind_datagram("127.0.0.1:0".parse().unwrap()).unwrap();
    bench.turn();
    bench.iwarp.endpoints.rings = 1;
    // Because of the UDP port, every second round checks all sockets.
    for _ in 0..2 {
        assert!(!bench.iwarp.progress(bench.now, Drive::Spin));
    }
    let port = bench.iwarp.datagrams.tables.ports.keys()[0];
    bench.iwarp.datagrams.tables.enqueue(port);
    assert!(bench.iwarp.progress(bench.now, Drive::Spin));
}
