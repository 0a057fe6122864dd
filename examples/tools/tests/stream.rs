//! Tests of `stream-pipe` and `stream-bench`, run as a user runs them.
#![allow(clippy::disallowed_methods, reason = "tests of programs, not of the library")]

mod process;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdin, Output, Stdio};
use std::thread;

use nix::sys::signal::Signal;
use process::{address, failed_with};
use rdma_reactor::stream::{StreamContext, StreamHandler, Streams};
use rdma_reactor::{Config, ConnectionId, DisconnectReason, ProviderChoice, Reactor};

const PIPE: &str = env!("CARGO_BIN_EXE_stream-pipe");
const BENCH: &str = env!("CARGO_BIN_EXE_stream-bench");

fn start(program: &str, args: &str) -> Child {
    process::start(program, &args.split_whitespace().collect::<Vec<_>>(), Stdio::piped())
}

fn run(program: &str, args: &str) -> Output {
    process::run(program, &args.split_whitespace().collect::<Vec<_>>())
}

fn pipe_server() -> (Child, String) {
    let mut server = start(PIPE, "server --bind 127.0.0.1 -p 0");
    let address = address(server.stderr.take().expect("piped"));
    (server, address)
}

fn feed(mut stdin: ChildStdin, bytes: Vec<u8>) -> thread::JoinHandle<()> {
    thread::spawn(move || stdin.write_all(&bytes).expect("it reads all of its input"))
}

/// Returns pseudo-random bytes.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn a_pipe_carries_both_directions_and_ends_each_on_its_own() {
    for (up, down) in [(3_000_001, 2_000_003), (0, 1_000_000), (1_000_000, 0), (1, 1), (0, 0)] {
        let (mut server, address) = pipe_server();
        let mut client = start(PIPE, &format!("client {address}"));
        let feeders = [
            feed(client.stdin.take().expect("piped"), noise(1, up)),
            feed(server.stdin.take().expect("piped"), noise(2, down)),
        ];
        let server = thread::spawn(move || server.wait_with_output().expect("it ends"));
        let client = client.wait_with_output().expect("it ends");
        let server = server.join().expect("a thread");
        feeders.into_iter().for_each(|feeder| feeder.join().expect("a feeder"));
        let stderr = String::from_utf8_lossy(&client.stderr).into_owned();
        assert_eq!((server.status.code(), client.status.code(), &*stderr), (Some(0), Some(0), ""));
        assert!(server.stdout == noise(1, up), "{} of {up} bytes up", server.stdout.len());
        assert!(client.stdout == noise(2, down), "{} of {down} bytes down", client.stdout.len());
    }
}

#[test]
fn an_answer_comes_before_the_end_of_the_question() {
    let (mut server, address) = pipe_server();
    let mut client = start(PIPE, &format!("client {address}"));
    let (mut asks, mut answers) = (client.stdin.take().expect("piped"), server.stdin.take().expect("piped"));
    let mut asked = BufReader::new(server.stdout.take().expect("piped"));
    let mut answered = BufReader::new(client.stdout.take().expect("piped"));
    for i in 0..20 {
        let mut line = String::new();
        writeln!(asks, "question {i}").expect("it reads");
        asked.read_line(&mut line).expect("a line");
        writeln!(answers, "{} answered", line.trim()).expect("it reads");
        line.clear();
        answered.read_line(&mut line).expect("a line");
        assert_eq!(line, format!("question {i} answered\n"));
    }
    drop((asks, answers));
    assert_eq!(server.wait().expect("it ends").code(), Some(0));
    assert_eq!(client.wait().expect("it ends").code(), Some(0));
}

#[test]
fn a_peer_that_dies_is_one_line() {
    let (mut server, address) = pipe_server();
    let mut client = start(PIPE, &format!("client {address}"));
    let stdin = client.stdin.as_mut().expect("piped");
    stdin.write_all(b"here\n").expect("it reads");
    let mut line = String::new();
    BufReader::new(server.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    assert_eq!(line, "here\n");
    // `wait_with_output` closes the standard input of the process, and the end of standard input would end the stream. So the test holds
    // both inputs open.
    let inputs = (server.stdin.take(), client.stdin.take());
    process::terminate(&mut server);
    failed_with(&client.wait_with_output().expect("it ends"), "stream-pipe", "the connection has ended: ");
    drop(inputs);
}

#[test]
fn a_pipe_that_is_interrupted_says_so_by_its_status() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let (mut server, address) = pipe_server();
        let mut client = start(PIPE, &format!("client {address}"));
        client.stdin.as_mut().expect("piped").write_all(b"here\n").expect("it reads");
        let mut line = String::new();
        BufReader::new(server.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        assert_eq!(line, "here\n");
        let input = client.stdin.take();
        assert!(process::signal(&client, signal), "it runs");
        let output = client.wait_with_output().expect("it ends");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), &*stderr), (Some(130), ""), "{signal}");
        drop(input);
        server.wait().expect("it ends");

        // A server that waits for its peer.
        let (mut server, _) = pipe_server();
        assert!(process::signal(&server, signal), "it runs");
        assert_eq!(server.wait().expect("it ends").code(), Some(130), "{signal}");
    }
}

/// The reader of the client's standard output has stalled. The stream ends with bytes that the client cannot write, so the client keeps
/// running. The first signal must end it.
#[test]
fn a_pipe_whose_reader_stalls_ends_with_the_first_signal() {
    let (mut full, reader) = UnixStream::pair().expect("a pair");
    full.set_nonblocking(true).expect("a mode");
    let mut written = 0;
    while let Ok(len) = full.write(&[0; 4096]) {
        written += len;
    }
    assert!(written > 0);
    full.set_nonblocking(false).expect("a mode");
    let (mut server, address) = pipe_server();
    let mut command = process::command(PIPE, &["client", &address]);
    let client = command.stdout(OwnedFd::from(full)).stderr(Stdio::piped()).spawn().expect("it starts");
    server.stdin.take().expect("piped").write_all(b"here\n").expect("it reads");
    assert_eq!(server.wait().expect("it ends").code(), Some(0));
    assert!(process::signal(&client, Signal::SIGINT), "it runs");
    let output = client.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(130), ""));
    drop(reader);
}

#[test]
fn nobody_there_and_nonsense_are_one_line() {
    failed_with(&run(PIPE, "client 127.0.0.1:1"), "stream-pipe", "no connection: ");
    failed_with(&run(PIPE, "client nowhere.invalid"), "stream-pipe", "unknown host \"nowhere.invalid\"");
    failed_with(&run(BENCH, "-s 127.0.0.1:1"), "stream-bench", "no connection: ");
    failed_with(&run(BENCH, "-S 0"), "stream-bench", "give 1 to 1G bytes");
    failed_with(&run(BENCH, "--clients 0"), "stream-bench", "invalid value '0' for '--clients <N>'");
    let words = "-S 1073741824 and -C 2000: give at most 1099511627776 bytes per iteration and direction";
    failed_with(&run(BENCH, "-s 127.0.0.1:1 -S 1G -C 2000"), "stream-bench", words);
}

#[test]
fn a_benchmark_prints_its_table() {
    let mut server = start(BENCH, "-b 127.0.0.1 -p 0 --clients 2 --wait event");
    let address = address(server.stdout.take().expect("piped"));
    for (args, names) in [("-I 30 -C 1", &["64_lat", "65536_lat"][..]), ("-I 3 -C 50", &["64_bw", "65536_bw"])] {
        let output = start(BENCH, &format!("-s {address} --wait event {args}")).wait_with_output().expect("it ends");
        let stdout = String::from_utf8(output.stdout).expect("text");
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let rows: Vec<_> = stdout.lines().skip(1).map(|line| line.split_whitespace().next().unwrap_or("")).collect();
        assert_eq!(rows, names, "{stdout}");
    }
    let output = server.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
}

/// A server of `stream-bench` for one client, which tests one transfer of one byte per iteration. It answers in the warm-up, and interrupts
/// the client in the measured test.
struct Interrupts {
    client: Child,
    received: usize,
}

/// The length in bytes of a request and of the transfer that follows it.
const ITERATION: usize = 24 + 1;

impl StreamHandler for Interrupts {
    fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let (before, mut bytes) = (self.received, [0; 2 * ITERATION]);
        while let Ok(len @ 1..) = cx.stream(id).read(&mut bytes) {
            self.received += len;
        }
        let has_reached = |len| before < len && self.received >= len;
        if has_reached(ITERATION) {
            assert_eq!(cx.stream(id).write(&[0]).expect("room"), 1);
        }
        if has_reached(2 * ITERATION) {
            assert!(process::signal(&self.client, Signal::SIGINT), "it waits for the transfer back");
        }
    }

    fn on_close(&mut self, cx: &mut StreamContext<'_>, _: ConnectionId) {
        cx.context().stop();
    }

    fn on_error(&mut self, cx: &mut StreamContext<'_>, _: ConnectionId, _: DisconnectReason) {
        cx.context().stop();
    }
}

#[test]
fn a_benchmark_that_is_interrupted_in_its_last_test_says_so_by_its_status() {
    let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp)).expect("a reactor");
    let listener = reactor.context().listen(([127, 0, 0, 1], 0).into()).expect("it listens");
    let address = reactor.context().listeners().local_address(listener).expect("an address");
    let client = start(BENCH, &format!("-s {address} --wait event -I 1 -C 1 -S 1"));
    let mut server = Streams::new(Interrupts { client, received: 0 });
    reactor.run(&mut server).expect("it runs");
    let Interrupts { client, received } = server.handler;
    let output = client.wait_with_output().expect("it ends");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!((received, output.status.code(), stdout.lines().count()), (2 * ITERATION, Some(130), 1), "{stdout}");
}
