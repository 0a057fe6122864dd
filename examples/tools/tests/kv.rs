//! Tests of `kv`, run as a user runs it.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod process;

use std::io::Read;
use std::process::{Child, Output, Stdio};

use nix::sys::signal::Signal;
use process::address;
use rdma_reactor::{Config, ConnectionId, Context, DisconnectReason, Handler, ProviderChoice, Reactor};

const KV: &str = env!("CARGO_BIN_EXE_kv");

fn run(args: &[&str]) -> Output {
    process::run(KV, args)
}

#[track_caller]
fn failed_with(output: &Output, words: &str) {
    process::failed_with(output, "kv", words);
}

/// A server and its address. Dropping this value kills the server.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        let args = [&["server", "--bind", "127.0.0.1", "-p", "0"], args].concat();
        let mut child = process::start(KV, &args, Stdio::null());
        let address = address(child.stdout.take().expect("piped"));
        Self { child, address }
    }

    #[track_caller]
    fn succeeds(&self, command: &str, args: &[&str]) -> String {
        let output = run(&[&[command, &self.address], args].concat());
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    #[track_caller]
    fn fails(&self, command: &str, args: &[&str], words: &str) {
        failed_with(&run(&[&[command, &self.address], args].concat()), words);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        process::terminate(&mut self.child);
    }
}

#[test]
fn what_was_put_is_read() {
    let server = Server::start(&["--slots", "64"]);
    server.fails("get", &["nothing"], "no such key");
    for i in 0..20 {
        server.succeeds("put", &[&format!("key {i}"), &format!("value {i}")]);
    }
    server.succeeds("put", &["key 7", "another value"]);
    server.succeeds("put", &["empty", ""]);
    for i in 0..20 {
        let value = if i == 7 { "another value\n".to_owned() } else { format!("value {i}\n") };
        assert_eq!(server.succeeds("get", &[&format!("key {i}")]), value);
    }
    assert_eq!(server.succeeds("get", &["empty"]), "\n");
    server.fails("get", &["key 20"], "no such key");
}

#[test]
fn what_does_not_fit_is_said() {
    let server = Server::start(&["--slots", "2", "--max-value", "10"]);
    server.fails("put", &["key", "eleven bytes"], "a value of 12 bytes: the limit of this table is 10");
    server.fails("put", &[&"k".repeat(65), "v"], "a key of 65 bytes: give 1 to 64");
    server.fails("put", &["", "v"], "a key of 0 bytes");
    server.succeeds("put", &["one", "1"]);
    server.succeeds("put", &["two", "2"]);
    server.fails("put", &["three", "3"], "no slot left for this key: start the server with more --slots");
    assert_eq!(server.succeeds("get", &["one"]) + &server.succeeds("get", &["two"]), "1\n2\n");
    failed_with(&run(&["get", "127.0.0.1:1", "key"]), "is `kv server` running there?");
    failed_with(&run(&["server", "--max-value", "17M"]), "give 1 to 16M bytes");
    let server = Server::start(&["--max-value", "7"]);
    server.fails("bench", &[], "a value of 8 bytes: the limit of this table is 7; start the server with a larger");
}

/// The table would be larger than the address space of a process. The server allocates it for its first client.
#[test]
fn a_table_that_is_too_large_is_one_line_of_the_server() {
    let mut server = Server::start(&["--slots", "16777216", "--max-value", "16M"]);
    assert_eq!(run(&["get", &server.address, "key"]).status.code(), Some(1));
    let mut stderr = String::new();
    server.child.stderr.take().expect("piped").read_to_string(&mut stderr).expect("text");
    assert_eq!((server.child.wait().expect("its end").code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.starts_with("kv: a table of ") && stderr.contains("give fewer --slots"), "{stderr}");
}

#[test]
fn readers_under_a_writer_see_whole_values() {
    for max_value in ["64", "64K"] {
        let server = Server::start(&["--slots", "64", "--max-value", max_value]);
        let (mut reads, mut writes) = (0, 0);
        // On a busy machine, a run may have few reads or writes, so it is repeated. If the server never answers, it is killed at its time
        // limit, and the test fails.
        while reads < 100 || writes < 100 {
            let text = server.succeeds("bench", &["--seconds", "1", "--readers", "3", "--keys", "2"]);
            let count = |what: &str| {
                let line = text.lines().find(|line| line.starts_with(what)).expect("a line");
                line.split_whitespace().nth(1).and_then(|count| count.parse::<u64>().ok()).expect("a count")
            };
            (reads, writes) = (reads + count("reads"), writes + count("writes"));
            println!("values of {max_value}:\n{text}");
        }
    }
}

/// A server that sends the answer to a store before the address of its table.
struct Hasty;

impl Handler for Hasty {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        cx.send(conn, &[]).expect("room");
    }
    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        cx.stop();
    }
}

#[test]
fn an_answer_before_the_question_is_no_success() {
    for command in [&["get", "key"][..], &["put", "key", "value"]] {
        let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp)).expect("a reactor");
        let listener = reactor.context().listen(([127, 0, 0, 1], 0).into()).expect("it listens");
        let address = reactor.context().listeners().local_address(listener).expect("an address").to_string();
        let args = [&command[..1], &[&*address], &command[1..]].concat();
        let child = process::start(KV, &args, Stdio::null());
        reactor.run(&mut Hasty).expect("it runs");
        failed_with(&child.wait_with_output().expect("its end"), "is not a kv server of this version");
    }
}

#[test]
fn a_server_that_is_ended_has_done_its_work() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let mut server = Server::start(&[]);
        assert!(process::signal(&server.child, signal), "it runs");
        assert_eq!(server.child.wait().expect("its end").code(), Some(0));
    }
}

#[test]
fn a_command_that_is_interrupted_has_not() {
    // This listener never answers, so no command can complete.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address").to_string();
    for command in [&["get", &address, "key"][..], &["put", &address, "key", "value"], &["bench", &address]] {
        let child = process::start(KV, command, Stdio::null());
        let _stream = silent.accept().expect("it connects");
        assert!(process::signal(&child, Signal::SIGINT), "it runs");
        let output = child.wait_with_output().expect("its end");
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(130), &b""[..]), "{command:?}");
    }
}
