//! Datagrams between this library and the programs `udaddy` and `mckey` of librdmacm. Each of them is the sender in one test and the
//! receiver in another. The programs need RoCE, so these tests run on rxe only.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rdma_transport::cm::ConnectFailure;
use rdma_transport::cm::ListenParam;
use rdma_transport::{
    CmEvent, CmEventKind, ConnectParam, DatagramPeer, Provider, SendOp, WcOpcode, WcStatus, WorkCompletion,
};

use crate::datagram::Datagrams;
use crate::world::*;

/// The number of datagrams that each program sends.
const COUNT: usize = 20;
const SIZE: usize = 300;
/// The port of udaddy. The program has no option that changes it.
const UDADDY: u16 = 7174;
const GROUP: &str = "239.77.2.30";

/// A running program of librdmacm. It is killed when this value is dropped.
struct Theirs(Child);

impl Theirs {
    fn start(program: &str, args: &[&str]) -> Self {
        let (count, size) = (COUNT.to_string(), SIZE.to_string());
        let child = Command::new("timeout")
            .args(["300", "stdbuf", "-oL", program, "-C", &count, "-S", &size])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }

    /// Waits until the program prints a line that contains `what`.
    fn says(&mut self, what: &str) {
        let mut lines = BufReader::new(self.0.stdout.take().unwrap()).lines();
        loop {
            let line = lines.next().expect("another line of the program").unwrap();
            println!("they say: {line}");
            if line.contains(what) {
                break;
            }
        }
        thread::spawn(move || lines.for_each(|line| println!("they say: {line:?}")));
    }

    fn ends_well(mut self) {
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl World {
    /// Receives all datagrams that the program sends. Returns the completion and the route header of the last one. Each datagram has the
    /// number of the program's queue pair as immediate data.
    fn take_all(&mut self, end: &Datagrams) -> (WorkCompletion, Vec<u8>) {
        let mut last = None;
        for _ in 0..COUNT {
            let (wc, header, payload) = self.hear_one(end);
            assert_eq!(payload.len(), SIZE);
            let number = wc.immediate.expect("the number of the queue pair");
            assert_eq!(wc.source.qp_number, number);
            last = Some((wc, header));
        }
        last.unwrap()
    }

    /// Waits for the next datagram, like [`World::hear`]. Polls only one completion at a time, so that further
    /// datagrams stay in the queue.
    fn hear_one(&mut self, end: &Datagrams) -> (WorkCompletion, Vec<u8>, Vec<u8>) {
        loop {
            let mut out = Vec::new();
            while self.provider.poll_cq(end.cq, 1, &mut out).unwrap() > 0 {
                let wc = out.remove(0);
                assert_eq!(wc.status, WcStatus::Success);
                if wc.opcode == WcOpcode::Recv {
                    let at = wc.wr_id as usize * crate::datagram::ROOM;
                    let bytes = end.received.bytes()[at..at + wc.byte_len as usize].to_vec();
                    self.post(end, wc.wr_id as usize);
                    let (header, payload) = bytes.split_at(rdma_transport::datagram::GRH_LEN);
                    return (wc, header.to_vec(), payload.to_vec());
                }
            }
            self.await_completion(end.cq);
        }
    }

    fn send_all(&mut self, end: &Datagrams, peer: &DatagramPeer) {
        let to = self.to(end, peer);
        let own = self.provider.datagrams().unwrap().qp_number(end.qp).unwrap();
        for turn in 0..COUNT {
            self.tell(end, SendOp::DatagramWithImmediate(to, own), &[turn as u8; SIZE]);
        }
    }
}

fn group() -> IpAddr {
    GROUP.parse().unwrap()
}

fn udaddy_asks() {
    let mut world = World::new();
    let address = Kind::Rxe.address();
    world
        .provider
        .datagrams()
        .unwrap()
        .listen_datagram(SocketAddr::new(address, UDADDY), &ListenParam::default())
        .unwrap();
    let theirs = Theirs::start("udaddy", &["-s", &address.to_string()]);
    let (id, _, device, ..) = world.connect_request();
    let end = world.datagrams(id, device);
    world.provider.accept(id, &ConnectParam::default(), Instant::now()).unwrap();
    let (wc, header) = world.take_all(&end);
    let route = world.provider.datagrams().unwrap().route_back(end.id, &wc, header[..].try_into().unwrap()).unwrap();
    let qp_number = wc.source.qp_number;
    // This `queue_key` is the key of every datagram queue pair that librdmacm creates (`RDMA_UDP_QKEY`).
    world.send_all(&end, &DatagramPeer { route, qp_number, queue_key: 0x0123_4567 });
    theirs.ends_well();
}

fn udaddy_answers() {
    let mut world = World::new();
    let address = Kind::Rxe.address();
    let theirs = Theirs::start("udaddy", &["-b", &address.to_string()]);
    let until = Instant::now() + TIMEOUT;
    let (end, peer) = loop {
        let (id, device) = world.resolved_datagram(SocketAddr::new(address, UDADDY), None);
        let end = world.datagrams(id, device);
        world.provider.connect(id, &ConnectParam::default()).unwrap();
        match world.news() {
            CmEvent { kind: CmEventKind::Reached { peer, .. }, .. } => break (end, peer),
            // The program has been started, but does not listen yet.
            CmEvent { kind: CmEventKind::ConnectFailed(ConnectFailure::Refused), .. } => world.forget(end),
            other => panic!("{other:?}"),
        }
        assert!(Instant::now() < until, "udaddy does not listen");
        thread::sleep(Duration::from_millis(50));
    };
    world.send_all(&end, &peer);
    for _ in 0..COUNT {
        let (wc, _, payload) = world.hear_one(&end);
        assert_eq!((wc.source.qp_number, payload.len()), (peer.qp_number, SIZE));
    }
    theirs.ends_well();
}

/// Creates a datagram endpoint of this library, and joins it to the multicast group.
fn member(world: &mut World) -> (Datagrams, DatagramPeer) {
    let from = Some(SocketAddr::new(Kind::Rxe.address(), 0));
    let (id, device) = world.resolved_datagram(SocketAddr::new(group(), 0), from);
    let end = world.datagrams(id, device);
    world.provider.datagrams().unwrap().join(id, group()).unwrap();
    match world.news() {
        CmEvent { kind: CmEventKind::Joined { peer, .. }, .. } => (end, peer),
        other => panic!("{other:?}"),
    }
}

fn mckey_sends() {
    let mut world = World::new();
    let (end, _) = member(&mut world);
    let bind = Kind::Rxe.variable("PEER");
    let theirs = Theirs::start("mckey", &["-m", GROUP, "-b", &bind, "-s"]);
    world.take_all(&end);
    theirs.ends_well();
}

fn mckey_listens() {
    let mut world = World::new();
    let (end, peer) = member(&mut world);
    let bind = Kind::Rxe.variable("PEER");
    let mut theirs = Theirs::start("mckey", &["-m", GROUP, "-b", &bind]);
    theirs.says("joined dgid");
    world.send_all(&end, &peer);
    theirs.ends_well();
}

macro_rules! on_rxe {
    ($($test:ident)*) => {
        mod rxe {
            $(#[test] fn $test() { let _alone = crate::world::alone(); super::$test(); })*
        }
    };
}

on_rxe! {
    udaddy_asks
    udaddy_answers
    mckey_sends
    mckey_listens
}
