//! One message of 1 GiB is sent between two processes, or of `TRANSFER_GIB` GiB. Neither may use more than 64 MiB
//! besides the memory of the message. `make soak` sends 4 GiB, a length of more than 32 bits, for which the machine
//! needs more than 8 GiB of free memory.
//!
//! The memory of a process is the high-water mark of its resident memory (`VmHWM`), which counts every page that was
//! ever resident. The sender sends a region without a copy, and the receiver keeps the received message as a region.
//! This memory is not counted in either process. Everything else is: the program, stacks, pools, and data in flight.
#![allow(clippy::disallowed_methods, reason = "processes and time are what is measured")]

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rdma_reactor::{
    Access, Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, ProviderChoice,
    Reactor, Region, RegionOptions, SendId, TimerId,
};
use rdma_reactor_tests::patience::{TEST, patient};

const BEYOND: usize = 64 << 20;
/// The environment variable with the receiver's address. It is set in the process that sends.
const ROLE: &str = "TRANSFER_TO";

/// Returns the length of the message, in bytes.
fn len() -> usize {
    let gib: usize = std::env::var("TRANSFER_GIB").map_or(1, |gib| gib.parse().expect("a number of GiB"));
    gib << 30
}

fn config() -> Config {
    // The receiver compares the message in a callback, which may take longer than the default keepalive timeout.
    patient(Config::default())
        .provider(ProviderChoice::Iwarp)
        .large_messages(|l| l.max_message = len() as u64)
        .large_messages(|l| l.memory = len())
}

/// Returns the high-water mark of this process's resident memory, in bytes.
fn high_water() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("the system's account of this process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a high-water mark");
    line.trim().trim_end_matches(" kB").parse::<usize>().expect("KiB") << 10
}

/// Returns the word of the message at index `nth`. All words of the message differ.
const fn word(nth: u64) -> u64 {
    nth.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[track_caller]
fn judge(who: &str, time: Duration) {
    let most = high_water();
    let beyond = most.saturating_sub(len());
    println!("{who}: {} KiB beyond the {} GiB, {:.1} s", beyond >> 10, len() >> 30, time.as_secs_f64());
    assert!(most >= len(), "{who}: {most} bytes: the message was not there together");
    assert!(beyond < BEYOND, "{who}: {beyond} bytes beyond the buffer");
}

#[derive(Default)]
struct Receiver {
    whole: bool,
}

impl Handler for Receiver {
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        assert_eq!(message.len(), len());
        for (nth, bytes) in message.chunks_exact(8).enumerate() {
            assert!(u64::from_le_bytes(bytes.try_into().unwrap()) == word(nth as u64), "word {nth} is another");
        }
        self.whole = true;
    }

    fn on_timer(&mut self, _: &mut Context<'_>, _: TimerId, _: u64) {
        panic!("the message did not come within {TEST:?}");
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        println!("the end: {reason}");
        cx.stop();
    }
}

#[derive(Default)]
struct Sender {
    bytes: Vec<u8>,
    region: Option<Region>,
    outcome: Option<Outcome>,
    started: Option<Instant>,
    took: Duration,
}

impl Handler for Sender {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let options = RegionOptions::new().allow(Access::REMOTE_READ);
        let region = cx.regions().register_vec(conn, std::mem::take(&mut self.bytes), &options).expect("memory");
        self.started = Some(Instant::now());
        cx.send_region(conn, &region, 0..len()).expect("a new connection has room");
        self.region = Some(region);
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: SendId, outcome: Outcome) {
        self.outcome = Some(outcome);
        self.took = self.started.map_or(Duration::ZERO, |started| started.elapsed());
        cx.close(conn);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        println!("the end: {reason}");
        cx.stop();
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        panic!("no connection: {error}");
    }
}

fn send(to: SocketAddr) {
    let mut reactor = Reactor::new(config()).expect("a reactor");
    let bytes = (0..len() as u64 / 8).flat_map(|nth| word(nth).to_le_bytes());
    let mut sender = Sender { bytes: Vec::with_capacity(len()), ..Sender::default() };
    sender.bytes.extend(bytes);
    reactor.context().connect(to).expect("room");
    reactor.run(&mut sender).expect("it runs");
    assert_eq!(sender.outcome, Some(Outcome::Sent));
    judge("sender", sender.took);
}

#[test]
fn a_message_takes_little_beside_its_buffer() {
    if let Ok(to) = std::env::var(ROLE) {
        return send(to.parse().expect("an address"));
    }
    let mut reactor = Reactor::new(config()).expect("a reactor");
    let listener = reactor.context().listen(([127, 0, 0, 1], 0).into()).expect("a port");
    let address = reactor.context().listeners().local_address(listener).expect("it listens");
    let started = Instant::now();
    // The child process runs this test again. It is the sender, because `TRANSFER_TO` is set. The program `timeout`
    // kills the child if it takes too long.
    let mut child = Command::new("timeout")
        .args(["-s", "KILL", &TEST.as_secs().to_string()])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", "a_message_takes_little_beside_its_buffer", "--nocapture"])
        .env(ROLE, address.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut receiver = Receiver::default();
    reactor.context().timers().set(TEST, 0);
    reactor.run(&mut receiver).expect("it runs");
    for line in BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok) {
        let _ = writeln!(std::io::stdout(), "  {line}");
    }
    assert!(child.wait().expect("it ends").success(), "the sender failed");
    assert!(receiver.whole, "the message did not come");
    judge("receiver, with filling and comparing", started.elapsed());
}
