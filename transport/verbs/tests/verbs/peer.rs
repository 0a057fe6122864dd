//! Peers whose process is killed, and peers that never answer.

use std::io::{BufRead, BufReader, Lines};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rdma_transport::{CmEventKind, ConnectParam, DisconnectCause, Provider, WcOpcode, WcStatus};

use crate::world::*;

/// Starts this test program in another process. That process listens for one connection, and sends each received message back, until the
/// process is killed. Returns the process and its output.
fn peer(kind: Kind) -> (Child, Lines<BufReader<ChildStdout>>) {
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program)
        .args(["--exact", &kind.test("peer", "killed_peer"), "--nocapture", "--test-threads=1"])
        .env("RDMA_TEST_PEER", kind.address().to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

/// Waits for a line of the other process that begins with `word`, and returns the rest of the line.
fn said(lines: &mut Lines<BufReader<ChildStdout>>, word: &str) -> String {
    lines.find_map(|line| line.unwrap().strip_prefix(word).map(|rest| rest.trim().to_owned())).expect(word)
}

/// The part of the test that runs in the other process. It never returns.
fn peer_process(address: IpAddr) {
    let mut world = World::new();
    let (_, to) = world.listen(address);
    println!("\nlistening {to}");
    let (id, _, device, _, _) = world.connect_request();
    let end = world.equip(id, device);
    world.provider.accept(id, &ConnectParam::default(), Instant::now()).unwrap();
    println!("accepted");
    loop {
        for wc in world.completions(end.cq) {
            if wc.opcode == WcOpcode::Recv && wc.status.is_success() {
                world.provider.post_recv(end.qp, &[end.recv(wc.wr_id as usize)]).unwrap();
                world.provider.post_send(end.qp, &[end.send(DEPTH as usize, 4)]).unwrap();
            }
        }
    }
}

fn killed_peer(kind: Kind) {
    if let Some(address) = other_process() {
        return peer_process(address);
    }
    let mut world = World::new();
    let (mut child, mut lines) = peer(kind);
    let (id, device) = world.resolved(said(&mut lines, "listening").parse().unwrap());
    let end = world.equip(id, device);
    world.provider.connect(id, &ConnectParam::default()).unwrap();
    assert!(matches!(world.news().kind, CmEventKind::Established { .. }));
    // siw holds back a first message that arrives before its call of accept has returned, until a second one arrives.
    said(&mut lines, "accepted");
    for _ in 0..100 {
        world.provider.post_send(end.qp, &[end.send(DEPTH as usize, 4)]).unwrap();
        let mut left = 2;
        while left > 0 {
            for wc in world.completions(end.cq) {
                assert_eq!(wc.status, WcStatus::Success);
                if wc.opcode == WcOpcode::Recv {
                    world.provider.post_recv(end.qp, &[end.recv(wc.wr_id as usize)]).unwrap();
                }
                left -= 1;
            }
        }
    }
    child.kill().unwrap();
    let killed = Instant::now();
    loop {
        let event = world.news();
        println!("after {:?}: {event:?}", killed.elapsed());
        if let CmEventKind::Disconnected(cause) = event.kind {
            assert_eq!((event.id, cause), (id, DisconnectCause::Peer));
            break;
        }
    }
    assert!(killed.elapsed() < TIMEOUT, "{:?}", killed.elapsed());
    world.provider.disconnect(id, Instant::now()).unwrap();
    world.flushed(&end, DEPTH as usize);
    world.drop_end(&end);
    child.wait().unwrap();
}

/// No call blocks while one peer accepts the TCP connection without answering, and the SYN to another peer is lost.
fn a_silent_peer_blocks_nothing(kind: Kind) {
    // The library opens a device once and keeps it open. Open it before the first count of descriptors.
    World::new().provider.reaches(SocketAddr::new(kind.address(), 9), TIMEOUT).unwrap();
    let before = descriptors();
    let mut world = World::new();
    let silent = TcpListener::bind((kind.variable("PEER").parse::<IpAddr>().unwrap(), 0)).unwrap();
    let lost = kind.variable("ADDR").rsplit_once('.').map(|(net, _)| format!("{net}.78")).unwrap();
    let neighbour = format!("neigh replace {lost} lladdr 02:00:00:00:00:78 dev {}", kind.variable("NETDEV"));
    assert!(Command::new("ip").args(neighbour.split(' ')).status().unwrap().success());
    let mut ends = Vec::new();
    let mut peers = vec![SocketAddr::new(lost.parse().unwrap(), 9)];
    if kind == Kind::Siw {
        peers.push(silent.local_addr().unwrap());
    }
    for to in peers {
        let (id, device) = world.resolved(to);
        let end = world.equip(id, device);
        quick("connect", || world.provider.connect(id, &ConnectParam::default())).unwrap();
        ends.push(end);
    }
    let early = world.event_within(Duration::from_secs(1));
    assert!(early.is_none(), "{early:?}");
    // Other connections work as usual. The kernel may have ended the attempts to the silent peers, so ignore their events.
    world.ignored.extend(ends.iter().map(|end| end.id));
    let (_, to) = world.listen(kind.address());
    quick("another connection", || world.pair(to));
    quick("disconnect", || world.provider.disconnect(ends[0].id, Instant::now())).unwrap();
    world.flushed(&ends[0], DEPTH as usize);
    for end in &ends {
        quick("destroy_id", || world.provider.destroy_id(end.id, Instant::now()).unwrap());
    }
    quick("drop", || drop(world));
    drop(silent);
    // Wait until the kernel has closed the sockets of both attempts, too. The provider interrupts the connect whose SYN was lost. The
    // kernel ends the handshake with the silent peer after a time limit.
    let dropped = Instant::now();
    while descriptors() > before {
        assert!(dropped.elapsed() < TIMEOUT, "{} of {before}", descriptors());
        thread::sleep(Duration::from_millis(20));
    }
    println!("all descriptors are closed after {:?}", dropped.elapsed());
}

on_each_device! {
    killed_peer
    a_silent_peer_blocks_nothing
}
