//! Tests of `raw-echo` against itself over the embedded provider. `tests/vm/interop.sh` runs it against other programs.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod patience;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use patience::PATIENCE;

fn start(args: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_raw-echo"));
    command.args(args.split_whitespace()).args(["--provider", "iwarp"]).env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs a server and a client with these flags. Returns the exit codes and the output of both.
fn exchange(server: &str, client: &str) -> ([Option<i32>; 2], String) {
    let seconds = PATIENCE.as_secs();
    let mut server = start(&format!("server --bind 127.0.0.1 -p 0 -c 1 --timeout {seconds} {server}"));
    let mut stdout = BufReader::new(server.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on ").expect("an address").to_owned();
    let client: Output = start(&format!("client {address} --timeout {seconds} {client}")).wait_with_output().unwrap();
    let server = server.wait_with_output().unwrap();
    let text = [client.stdout, client.stderr, server.stderr].concat();
    ([server.status.code(), client.status.code()], String::from_utf8(text).unwrap())
}

#[test]
fn either_side_speaks() {
    for (server, client) in [
        ("-n 1 -s 16", "-n 1 -s 16 --verify"),
        ("", "-n 1000 -s 5000 --depth 60 --verify"),
        ("--speak-first -n 300 -s 64 --verify", "--echo -n 300 -s 64"),
        ("--speak-first -n 10 -s 100 --verify", "--echo --no-crc"),
    ] {
        let (codes, text) = exchange(server, client);
        assert_eq!(codes, [Some(0), Some(0)], "{server} / {client}: {text}");
    }
}

#[test]
fn what_was_not_agreed_is_noticed() {
    for (server, client, words) in [
        ("-n 1 -s 16", "-n 1 -s 15", "a message of 15 bytes where 16 were expected"),
        ("-n 1 -s 15", "-n 1 -s 16", "a message of 16 bytes where 15 were expected"),
        // The server sends first here. Otherwise, a client's message that does not fit might end the connection before the server's
        // program is notified of it.
        ("--speak-first -n 1 -s 17", "--echo -n 1 -s 15", "Message too long for available buffer"),
        ("-n 2 -s 16", "-n 1 -s 16", "1 of 2 received"),
        ("-n 1 -s 16", "-n 2 -s 16", "more than 1 messages arrived"),
    ] {
        let (codes, text) = exchange(server, client);
        assert_eq!(codes[0], Some(1), "{server} / {client}: {text}");
        assert!(text.contains(words), "{text}");
    }
}

/// If the server is interrupted while it waits for clients, its exit status must show that.
#[test]
fn a_server_that_is_interrupted_says_so_by_its_status() {
    let seconds = PATIENCE.as_secs();
    let mut server = start(&format!("server --bind 127.0.0.1 -p 0 -c 2 --timeout {seconds}"));
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    kill(Pid::from_raw(server.id() as i32), Signal::SIGINT).unwrap();
    let server = server.wait_with_output().unwrap();
    assert_eq!(server.status.code(), Some(130), "{}", String::from_utf8_lossy(&server.stderr));
}

#[test]
fn what_goes_wrong_is_one_line() {
    for (args, words) in
        [("client 127.0.0.1 -p 1", "no connection to 127.0.0.1:1: "), ("client 127.0.0.1 -s 0", "invalid value '0'")]
    {
        let output = start(args).wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
        assert!(stderr.starts_with(&format!("raw-echo: {words}")), "{stderr}");
    }
}
