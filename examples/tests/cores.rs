//! Tests of `03-cores`: several reactors behind one listener, and a signal that drains them.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

#[path = "../tools/tests/patience/mod.rs"]
mod patience;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rdma_reactor::{Config, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor};

use patience::PATIENCE;

#[derive(Default)]
struct Client {
    echoes: usize,
    gone: usize,
}

impl Handler for Client {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        cx.send(conn, b"hello").expect("a new connection has room");
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        assert_eq!(*message, *b"hello");
        self.echoes += 1;
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        assert_eq!(reason, DisconnectReason::Closed);
        self.gone += 1;
    }
}

#[test]
fn connections_are_spread_and_a_signal_drains_them() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_03-cores"));
    command.args(["127.0.0.1:0", "3"]).stdin(Stdio::null()).stdout(Stdio::piped()).env_remove("RUST_LOG");
    let mut child = command.spawn().expect("the program starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines().map(|line| line.expect("a line"));
    let first = lines.next().expect("a line with its address");
    let address =
        first.strip_prefix("echo on ").and_then(|rest| rest.strip_suffix(", 3 reactors")).expect("an address");
    let config = Config::default().provider(ProviderChoice::Iwarp);
    let (mut reactor, mut client) = (Reactor::new(config).expect("a reactor"), Client::default());
    for _ in 0..6 {
        reactor.context().connect(address.parse().expect("an address")).expect("connecting");
    }
    let end = Instant::now() + PATIENCE;
    let mut until = |client: &mut Client, holds: fn(&Client) -> bool| {
        while !holds(client) {
            assert!(Instant::now() < end, "{} echoes, {} gone", client.echoes, client.gone);
            reactor.turn(client, Duration::from_millis(5)).expect("a turn");
        }
    };
    until(&mut client, |client| client.echoes == 6);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("it runs");
    until(&mut client, |client| client.gone == 6);
    assert!(child.wait().expect("its end").success());
    let rest: Vec<_> = lines.collect();
    assert_eq!(rest, [0, 1, 2].map(|index| format!("reactor {index}: 2 connections, 2 messages")));
}

#[test]
fn bad_arguments_are_one_line() {
    for (args, says) in [
        (&["nowhere"][..], "03-cores: nowhere: invalid socket address syntax: give an address and a port\n"),
        (&["127.0.0.1:0", "0"], "03-cores: 0 reactors: give a number from 1 to 1024\n"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_03-cores")).args(args).output().expect("the program starts");
        assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(1), says));
    }
}
