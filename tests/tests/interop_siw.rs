//! The embedded provider on one end of a connection, and the kernel's `siw` on the other. The same program drives both.
//! Every operation of RDMAP is tested in both directions, whichever end has connected.
//!
//! These tests need a `siw` device, and fail without one. `make test-rdma-full` creates one.
#![cfg(feature = "verbs")]
#![allow(clippy::disallowed_methods, reason = "the kernel keeps its own time")]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use rdma_reactor_tests::ends::{ALL, End, Pair, Side};
use rdma_transport::srq::SrqAttr;
use rdma_transport::wr::RemoteAddress;
use rdma_transport::{Access, DeviceId, DisconnectCause, Provider, RemoteKey, SendFlags, SendOp, WcOpcode, WcStatus};
use rdma_transport_embedded::iwarp::{CrcPolicy, Iwarp, IwarpConfig, TcpNet};
use rdma_transport_verbs::Verbs;

const NONE: SendFlags = SendFlags::empty();
const LARGEST: usize = 16 << 20;
/// The offset of the source of the payload in the memory of an end. The source and the sink begin at page boundaries,
/// because `siw` corrupts a small payload that crosses a page boundary.
const SOURCE: usize = 0;
/// The offset of the sink of the payload in the memory of an end.
const SINK: usize = LARGEST + (1 << 20);
/// The size of the memory of each end.
const MEMORY: usize = 2 * SINK;
/// The scatter list of a receive for an empty message. It has one entry of zero bytes, because `siw` refuses a receive
/// without entries.
const EMPTY: [std::ops::Range<usize>; 1] = [0..0];
/// The number of bytes behind a payload that must not change.
const GUARD: usize = 64;

fn variable(name: &str) -> IpAddr {
    let value = std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run `make test-rdma-full`"));
    value.parse().unwrap_or_else(|_| panic!("{name} is no address: {value}"))
}

fn embedded(config: IwarpConfig) -> Box<dyn Provider> {
    let mut seed = 0x2545_f491_u32;
    let entropy = move |bytes: &mut [u8]| {
        for byte in bytes {
            seed = seed.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
            *byte = (seed >> 24) as u8;
        }
    };
    Box::new(Iwarp::new(config, TcpNet::new().unwrap(), Box::new(entropy)).unwrap())
}

fn kernel() -> Box<dyn Provider> {
    Box::new(Verbs::open().unwrap())
}

fn config(crc: CrcPolicy) -> IwarpConfig {
    let mut config = IwarpConfig::default();
    config.crc = crc;
    config
}

/// The ends at which the embedded provider can be.
const ROLES: [Side; 2] = [Side::Active, Side::Passive];

fn other(side: Side) -> Side {
    if side == Side::Active { Side::Passive } else { Side::Active }
}

/// Returns a connection in which the embedded provider is at the end `ours`, and siw at the other one.
fn pair_of(ours: Side, config: IwarpConfig, memory: usize, depth: u16) -> Pair {
    let (embedded, kernel) = (End::new(embedded(config), memory), End::new(kernel(), memory));
    match ours {
        Side::Active => Pair::connect(embedded, kernel, SocketAddr::new(variable("RDMA_SIW_PEER"), 0), depth),
        Side::Passive => Pair::connect(kernel, embedded, SocketAddr::new(variable("RDMA_SIW_ADDR"), 0), depth),
    }
}

/// Returns the TCP segment size between the addresses of the two ends.
fn segment_size() -> usize {
    let listener = TcpListener::bind((variable("RDMA_SIW_PEER"), 0)).unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    socket2::SockRef::from(&stream).tcp_mss().unwrap() as usize
}

/// Returns the payload lengths to test: zero, small, just below and above one segment or one FPDU, and large.
fn sizes() -> Vec<usize> {
    let mss = segment_size();
    // A tagged FPDU has 20 bytes of overhead, and an untagged one 24. Either end may round the length of an FPDU down
    // to a multiple of 4 or 8.
    let mut sizes: Vec<usize> = vec![0, 1, 3, 4, 1024, mss - 1, mss, mss + 1, 64 << 10, 1 << 20, LARGEST];
    sizes.extend((mss - 32..=mss - 18).step_by(3));
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn send(pair: &mut Pair, from: Side, op: SendOp, len: usize, flags: SendFlags, salt: u8) {
    let what = format!("{op:?} of {len} {flags:?} from the {from:?} end");
    let (source, sink) = pair.ends(from);
    source.fill(SOURCE..SOURCE + len, salt);
    sink.clear(SINK..SINK + len + GUARD);
    sink.recv(1, &[SINK..SINK + len]);
    source.post(2, op, &[SOURCE..SOURCE + len], flags);
    let received = pair.success(other(from), 1, WcOpcode::Recv);
    assert_eq!(received.byte_len as usize, len, "{what}");
    pair.success(from, 2, WcOpcode::Send);
    let (_, sink) = pair.ends(from);
    sink.check(SINK..SINK + len, salt, &what);
    sink.check_clear(SINK + len..SINK + len + GUARD, &what);
}

/// Tests a Write. A message follows the Write, because the target may rely on the written bytes only after a later
/// message has arrived.
fn write(pair: &mut Pair, from: Side, len: usize, salt: u8) {
    let what = format!("Write of {len} from the {from:?} end");
    let (source, sink) = pair.ends(from);
    source.fill(SOURCE..SOURCE + len, salt);
    sink.clear(SINK..SINK + len + GUARD);
    sink.recv(3, &EMPTY);
    let remote = sink.remote(SINK);
    source.post(4, SendOp::Write(remote), &[SOURCE..SOURCE + len], NONE);
    source.post(5, SendOp::Send, &[], NONE);
    pair.success(other(from), 3, WcOpcode::Recv);
    pair.success(from, 4, WcOpcode::Write);
    pair.success(from, 5, WcOpcode::Send);
    let (_, sink) = pair.ends(from);
    sink.check(SINK..SINK + len, salt, &what);
    sink.check_clear(SINK + len..SINK + len + GUARD, &what);
}

fn read(pair: &mut Pair, from: Side, len: usize, salt: u8) {
    let what = format!("Read of {len} from the {from:?} end");
    let (sink, source) = pair.ends(from);
    source.fill(SOURCE..SOURCE + len, salt);
    sink.clear(SINK..SINK + len + GUARD);
    let remote = source.remote(SOURCE);
    sink.post(6, SendOp::Read(remote), &[SINK..SINK + len], NONE);
    pair.success(from, 6, WcOpcode::Read);
    let (sink, _) = pair.ends(from);
    sink.check(SINK..SINK + len, salt, &what);
    sink.check_clear(SINK + len..SINK + len + GUARD, &what);
}

/// Runs every operation with every payload length, in both directions, over one connection.
fn everything(pair: &mut Pair, ours: Side) {
    let mut salt = 1;
    for len in sizes() {
        for from in ROLES {
            salt = u8::wrapping_add(salt, 17);
            send(pair, from, SendOp::Send, len, NONE, salt);
            write(pair, from, len, salt ^ 0x55);
            // A Read of zero bytes is posted only at the embedded end, which completes it without sending it, because
            // siw may answer with the data of an earlier Read. The provider on siw posts a Write of zero bytes instead.
            if len > 0 || from == ours {
                read(pair, from, len, salt ^ 0xaa);
            }
            if len <= 1 << 20 {
                send(pair, from, SendOp::Send, len, SendFlags::SOLICITED, salt ^ 0x33);
                for flags in [NONE, SendFlags::SOLICITED] {
                    let target = pair.end(other(from));
                    let (region, remote) = target.expose(ALL, 0);
                    send(pair, from, SendOp::SendInvalidate(remote.key), len, flags, salt ^ 0x66);
                    pair.end(other(from)).station.provider().deregister(region.id).unwrap();
                }
            }
        }
    }
}

fn matrix(ours: Side, crc: CrcPolicy) {
    let mut pair = pair_of(ours, config(crc), MEMORY, 16);
    everything(&mut pair, ours);
    pair.close(ours);
}

#[test]
fn embedded_client_with_crc() {
    matrix(Side::Active, CrcPolicy::Require);
}

#[test]
fn embedded_client_without_crc() {
    matrix(Side::Active, CrcPolicy::Off);
}

#[test]
fn embedded_server_with_crc() {
    matrix(Side::Passive, CrcPolicy::Require);
}

#[test]
fn embedded_server_without_crc() {
    matrix(Side::Passive, CrcPolicy::Off);
}

/// Starts a relay in front of the address `to`. The relay closes the first connection, as a peer without MPA revision 2
/// does, and forwards the second connection to `to`. Returns the relay's address and thread. The thread returns the MPA
/// revisions in the request and in the reply of the second connection.
fn old_peer(to: SocketAddr) -> (SocketAddr, thread::JoinHandle<[u8; 2]>) {
    let listener = TcpListener::bind((variable("RDMA_SIW_ADDR"), 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let relay = thread::spawn(move || {
        let (mut first, _) = listener.accept().unwrap();
        let mut frame = [0; 20];
        first.read_exact(&mut frame).unwrap();
        assert_eq!(frame[17], 2);
        drop(first);
        let (mut near, _) = listener.accept().unwrap();
        near.read_exact(&mut frame).unwrap();
        let mut far = TcpStream::connect(to).unwrap();
        far.set_nodelay(true).unwrap();
        far.write_all(&frame).unwrap();
        let (mut near_in, mut far_out) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let out = thread::spawn(move || {
            let _ = std::io::copy(&mut near_in, &mut far_out);
            let _ = far_out.shutdown(std::net::Shutdown::Write);
        });
        let mut reply = [0; 20];
        far.read_exact(&mut reply).unwrap();
        near.write_all(&reply).unwrap();
        let _ = std::io::copy(&mut far, &mut near);
        let _ = near.shutdown(std::net::Shutdown::Write);
        out.join().unwrap();
        [frame[17], reply[17]]
    });
    (address, relay)
}

/// Tests MPA revision 1, which `siw` answers but never requests. The embedded client falls back to it.
#[test]
fn embedded_client_of_revision_1() {
    for crc in [CrcPolicy::Require, CrcPolicy::Off] {
        let (embedded, kernel) = (End::new(embedded(config(crc)), MEMORY), End::new(kernel(), MEMORY));
        let mut relay = None;
        let address = SocketAddr::new(variable("RDMA_SIW_PEER"), 0);
        let mut pair = Pair::connect_through(embedded, kernel, address, 16, |listening| {
            let (address, thread) = old_peer(listening);
            relay = Some(thread);
            address
        });
        for len in [0, 1, 1447, 1448, 1449, 64 << 10, 1 << 20] {
            // Revision 1 has no first message that shows the server that the client is ready. So the client
            // (`ROLES[0]`) sends first.
            for from in ROLES {
                send(&mut pair, from, SendOp::Send, len, NONE, 9);
                write(&mut pair, from, len, 10);
                if len > 0 {
                    read(&mut pair, from, len, 11);
                }
            }
        }
        pair.close(Side::Active);
        assert_eq!(relay.unwrap().join().unwrap(), [1, 1]);
    }
}

/// Sends and Writes gather up to four entries. Receives scatter into up to four entries of different lengths.
#[test]
fn vectored() {
    for (ours, crc) in ROLES.into_iter().zip([CrcPolicy::Require, CrcPolicy::Off]) {
        let mut pair = pair_of(ours, config(crc), 1 << 20, 16);
        for from in ROLES {
            for (len, cuts, landings) in [
                (10, [1, 2, 3], [5, 6, 7]),
                (5000, [7, 2000, 4999], [1500, 1501, 4000]),
                (200_000, [1, 65_536, 131_073], [100, 99_999, 150_000]),
            ] {
                let (source, sink) = pair.ends(from);
                source.fill(0..len, 77);
                sink.clear(0..512 << 10);
                // The entries of the receive are in reverse order in memory.
                let mut ends = [0, landings[0], landings[1], landings[2], len];
                let places: Vec<_> = ends.windows(2).map(|w| (512 << 10) - w[1]..(512 << 10) - w[0]).collect();
                sink.recv(1, &places);
                ends[1..4].copy_from_slice(&cuts);
                let parts: Vec<_> = ends.windows(2).map(|w| w[0]..w[1]).collect();
                source.post(2, SendOp::Send, &parts, NONE);
                pair.success(other(from), 1, WcOpcode::Recv);
                pair.success(from, 2, WcOpcode::Send);
                let (_, sink) = pair.ends(from);
                let mut bytes = Vec::new();
                for place in places {
                    sink.station.read(place, &mut bytes).unwrap();
                }
                sink.station.write(0, &bytes).unwrap();
                sink.check(0..len, 77, "gathered and scattered");
                let (source, sink) = pair.ends(from);
                sink.clear(0..len + GUARD);
                let remote = sink.remote(0);
                sink.recv(3, &EMPTY);
                source.post(4, SendOp::Write(remote), &parts, NONE);
                source.post(5, SendOp::Send, &[], NONE);
                pair.success(other(from), 3, WcOpcode::Recv);
                for (wr_id, opcode) in [(4, WcOpcode::Write), (5, WcOpcode::Send)] {
                    pair.success(from, wr_id, opcode);
                }
                let (_, sink) = pair.ends(from);
                sink.check(0..len, 77, "gathered by a Write");
                sink.check_clear(len..len + GUARD, "gathered by a Write");
            }
        }
        pair.close(other(ours));
    }
}

/// A Write with a fence waits for the preceding Read, so it sends the bytes that the Read has fetched.
#[test]
fn fenced() {
    const LEN: usize = 100_000;
    for ours in ROLES {
        let mut pair = pair_of(ours, config(CrcPolicy::Require), 1 << 20, 4);
        for from in ROLES {
            for round in 0..10 {
                let (near, far) = pair.ends(from);
                far.fill(0..LEN, round);
                far.clear(LEN..2 * LEN);
                near.clear(0..LEN);
                let (source, target) = (far.remote(0), far.remote(LEN));
                far.recv(1, &EMPTY);
                near.post(2, SendOp::Read(source), &[0..LEN], NONE);
                near.post(3, SendOp::Write(target), &[0..LEN], SendFlags::FENCE);
                near.post(4, SendOp::Send, &[], NONE);
                pair.success(other(from), 1, WcOpcode::Recv);
                for (wr_id, opcode) in [(2, WcOpcode::Read), (3, WcOpcode::Write), (4, WcOpcode::Send)] {
                    pair.success(from, wr_id, opcode);
                }
                pair.end(other(from)).check(LEN..2 * LEN, round, "read, then written back");
            }
        }
        pair.close(ours);
    }
}

/// Reads beyond the agreed limit of outstanding Reads wait, and all complete in order.
#[test]
fn reads_behind_the_limit() {
    const LEN: usize = 8192;
    for ours in ROLES {
        for depth in [1, 2, 3, 16] {
            let mut pair = pair_of(ours, config(CrcPolicy::Require), 1 << 21, depth);
            for from in ROLES {
                let (near, far) = pair.ends(from);
                near.clear(0..100 * LEN);
                for index in 0..100usize {
                    far.fill(index * LEN..(index + 1) * LEN, index as u8);
                }
                for index in 0..100usize {
                    let remote = far.remote(index * LEN);
                    near.post(index as u64, SendOp::Read(remote), &[index * LEN..(index + 1) * LEN], NONE);
                }
                pair.until("reads", |pair| (pair.end(from).done.len() == 100).then_some(()));
                let end = pair.end(from);
                for (index, wc) in std::mem::take(&mut end.done).into_iter().enumerate() {
                    let want = (index as u64, WcStatus::Success, WcOpcode::Read);
                    assert_eq!((wc.wr_id, wc.status, wc.opcode), want, "depth {depth} from {from:?}");
                    end.check(index * LEN..(index + 1) * LEN, index as u8, "a read behind the limit");
                }
            }
            pair.close(ours);
        }
    }
}

/// Both ends post many Reads and many messages, which are in flight at the same time.
#[test]
fn both_ways_at_once() {
    const LEN: usize = 30_000;
    for ours in ROLES {
        let mut pair = pair_of(ours, config(CrcPolicy::Require), 1 << 22, 4);
        for side in ROLES {
            let end = pair.end(side);
            end.fill(0..LEN, 3);
            for index in 0..20usize {
                let at = (1 << 21) + index * LEN;
                end.recv(100 + index as u64, &[at..at + LEN]);
            }
        }
        for index in 0..20usize {
            for side in ROLES {
                let (near, far) = pair.ends(side);
                let remote = far.remote(0);
                let at = (1 << 20) + index * LEN;
                near.post(index as u64, SendOp::Read(remote), &[at..at + LEN], NONE);
                near.post(200 + index as u64, SendOp::Send, &[0..LEN], NONE);
            }
        }
        for side in ROLES {
            pair.until("completions", |pair| (pair.end(side).done.len() == 60).then_some(()));
            let end = pair.end(side);
            assert!(end.done.drain(..).all(|wc| wc.status.is_success()));
            for index in 0..20usize {
                let at = (1 << 20) + index * LEN;
                end.check(at..at + LEN, 3, "a Read among Sends");
                let at = (1 << 21) + index * LEN;
                end.check(at..at + LEN, 3, "a Send among Reads");
            }
        }
        pair.close(ours);
    }
}

/// A region's key can be invalidated by its owner or by a message of the peer. Afterwards the peer's use of the key
/// ends the connection.
#[test]
fn invalidated() {
    for ours in ROLES {
        let theirs = other(ours);
        // In the first round a message of siw invalidates the key of our region, and in the second one we invalidate
        // it. siw then uses the key, and gets a Terminate.
        for remotely in [true, false] {
            let mut pair = pair_of(ours, config(CrcPolicy::Require), 1 << 16, 4);
            let (region, remote) = pair.end(ours).expose(ALL, 4096);
            let (source, sink) = pair.ends(theirs);
            source.fill(0..100, 5);
            sink.recv(1, &[0..100]);
            let op = if remotely { SendOp::SendInvalidate(remote.key) } else { SendOp::Send };
            source.post(2, op, &[0..100], NONE);
            let wc = pair.success(ours, 1, WcOpcode::Recv);
            assert_eq!(wc.invalidated, remotely.then_some(remote.key));
            pair.success(theirs, 2, WcOpcode::Send);
            if !remotely {
                pair.end(ours).station.provider().remote_keys().unwrap().invalidate(region.id).unwrap();
            }
            let op = if remotely { SendOp::Write(remote) } else { SendOp::Read(remote) };
            pair.end(theirs).post(3, op, &[0..8], NONE);
            let cause = pair.disconnected(ours);
            let words = if remotely { "(1/1/0)" } else { "(0/1/0)" };
            assert!(matches!(&cause, DisconnectCause::PeerViolation(why) if why.contains(words)), "{cause:?}");
            assert_eq!(pair.disconnected(theirs), DisconnectCause::Peer);
            if !remotely {
                assert_eq!(pair.completion(theirs, 3).status, WcStatus::Flushed);
            }
            pair.end(ours).check_clear(4096..4196, "an invalidated region");
        }
        // Our message invalidates the key of siw's region. We then use the key, and get siw's Terminate.
        let mut pair = pair_of(ours, config(CrcPolicy::Off), 1 << 16, 4);
        let (_, remote) = pair.end(theirs).expose(ALL, 4096);
        send_small(&mut pair, ours, SendOp::SendInvalidate(remote.key));
        pair.end(ours).post(3, SendOp::Read(remote), &[0..8], NONE);
        let wc = pair.completion(ours, 3);
        assert_eq!(wc.status, WcStatus::RemoteAccessError);
        let cause = pair.disconnected(ours);
        assert!(matches!(&cause, DisconnectCause::TerminatedByPeer(why) if why.contains("0/1/")), "{cause:?}");
    }
}

fn send_small(pair: &mut Pair, from: Side, op: SendOp) {
    let (source, sink) = pair.ends(from);
    sink.recv(1, &[0..100]);
    source.post(2, op, &[0..100], NONE);
    pair.success(other(from), 1, WcOpcode::Recv);
    pair.success(from, 2, WcOpcode::Send);
}

/// A Write to an unknown key or beyond a region changes nothing. The connection ends, and the embedded provider reports
/// the reason.
#[test]
fn out_of_reach() {
    for ours in ROLES {
        let theirs = other(ours);
        for (case, at_siw, at_ours) in [("unknown", "(1/1/0)", "(1/1/0)"), ("bounds", "(1/1/1)", "(1/1/1)")] {
            for from in ROLES {
                let mut pair = pair_of(ours, config(CrcPolicy::Require), 1 << 16, 4);
                let (near, far) = pair.ends(from);
                near.fill(0..100, 1);
                let good = far.remote(0);
                let remote = match case {
                    "unknown" => RemoteAddress { key: RemoteKey(good.key.0 ^ 0x5a00), ..good },
                    _ => RemoteAddress { address: good.address + (1 << 16) - 50, ..good },
                };
                near.post(1, SendOp::Write(remote), &[0..100], NONE);
                let cause = pair.disconnected(ours);
                let words = if from == ours { at_siw } else { at_ours };
                let told = match &cause {
                    DisconnectCause::TerminatedByPeer(why) if from == ours => why,
                    DisconnectCause::PeerViolation(why) if from == theirs => why,
                    other => panic!("{case}: {other:?}"),
                };
                assert!(told.contains(words), "{case}: {cause:?}");
                pair.disconnected(theirs);
                pair.end(other(from)).check_clear(0..1 << 16, case);
            }
        }
    }
}

/// The access rights of our regions are enforced against siw. siw does not check the rights of its own regions, so the
/// other direction is not tested.
#[test]
fn rights_of_our_regions() {
    for (access, op) in [(Access::REMOTE_READ, "write"), (Access::REMOTE_WRITE, "read"), (Access::LOCAL_WRITE, "both")]
    {
        let mut pair = pair_of(Side::Passive, config(CrcPolicy::Require), 1 << 16, 4);
        let (_, remote) = pair.passive.expose(access, 0);
        let op = if op == "read" { SendOp::Read(remote) } else { SendOp::Write(remote) };
        pair.active.fill(0..100, 1);
        pair.active.post(1, op, &[0..100], NONE);
        let cause = pair.disconnected(Side::Passive);
        assert!(matches!(cause, DisconnectCause::PeerViolation(_)), "{access:?}: {cause:?}");
        pair.passive.check_clear(0..1 << 16, "without the right");
    }
}

/// Several connections from siw share one receive queue of our server.
#[test]
fn shared_receives() {
    const LEN: usize = 3000;
    let mut server = End::new(embedded(config(CrcPolicy::Require)), 1 << 20);
    let srq = server.station.provider().shared_receives().unwrap().create_srq(DeviceId(0), &SrqAttr::new(64)).unwrap();
    server.srq = Some(srq);
    let mut pair = Pair { active: End::new(kernel(), 1 << 20), passive: server };
    let (listener, address) = pair.passive.listen(SocketAddr::new(variable("RDMA_SIW_ADDR"), 0));
    let mut clients = Vec::new();
    for _ in 0..4 {
        pair.join(listener, address, 4);
        clients.push((pair.active.id, pair.active.qp, pair.passive.qp));
    }
    for index in 0..64usize {
        pair.passive.recv(index as u64, &[index * 4096..index * 4096 + LEN]);
    }
    for index in 0..40usize {
        let (_, qp, _) = clients[index % 4];
        let at = index * 4096;
        pair.active.fill(at..at + LEN, index as u8);
        pair.active.station.post_send(qp, index as u64, SendOp::Send, &[at..at + LEN], SendFlags::SIGNALED).unwrap();
    }
    pair.until("messages", |pair| (pair.passive.done.len() == 40).then_some(()));
    let mut next = [0, 1, 2, 3];
    for wc in std::mem::take(&mut pair.passive.done) {
        assert_eq!((wc.status, wc.byte_len as usize), (WcStatus::Success, LEN));
        let client = clients.iter().position(|client| client.2 == wc.qp).unwrap();
        let at = wc.wr_id as usize * 4096;
        pair.passive.check(at..at + LEN, next[client] as u8, "in the order of its connection");
        next[client] += 4;
    }
    assert_eq!(next, [40, 41, 42, 43]);
    // Receives that were not used stay posted when the connections end.
    for &(id, ..) in &clients {
        pair.active.station.provider().disconnect(id, std::time::Instant::now()).unwrap();
    }
    for _ in &clients {
        pair.disconnected(Side::Passive);
    }
    pair.join(listener, address, 4);
    send_small_to_shared(&mut pair);
    assert!(pair.passive.done.is_empty(), "{:?}", pair.passive.done);
}

fn send_small_to_shared(pair: &mut Pair) {
    pair.active.post(999, SendOp::Send, &[0..100], NONE);
    pair.until("message", |pair| pair.passive.done.pop().map(|wc| assert!(wc.status.is_success())));
}

/// One end disconnects in the middle of a large message: the client in one round, and the server in the other one.
#[test]
fn gone_in_the_middle() {
    for ours in ROLES {
        for leaver in ROLES {
            let mut pair = pair_of(ours, config(CrcPolicy::Require), MEMORY, 4);
            let (near, far) = pair.ends(leaver);
            far.recv(1, &[0..LARGEST]);
            near.post(2, SendOp::Send, &[0..LARGEST], NONE);
            for _ in 0..3 {
                pair.active.turn();
                pair.passive.turn();
            }
            let end = pair.end(leaver);
            let id = end.id;
            end.station.provider().destroy_id(id, std::time::Instant::now()).unwrap();
            let stayed = other(leaver);
            let wc = pair.completion(stayed, 1);
            // The whole message may have arrived before the disconnect.
            assert!(matches!(wc.status, WcStatus::Flushed | WcStatus::Success), "{wc:?}");
            let cause = pair.disconnected(stayed);
            // Only the embedded provider reports that the message was cut off.
            let cut = stayed == ours && wc.status == WcStatus::Flushed;
            let truncated = cut && cause == DisconnectCause::Truncated;
            assert!(truncated || cause == DisconnectCause::Peer, "{wc:?}: {cause:?}");
            thread::sleep(Duration::ZERO);
        }
    }
}
