//! `02-metrics`: HTTP, signals and RDMA in one loop.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[test]
fn counters_are_shown_and_a_signal_ends_it() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_02-metrics"));
    command.args(["127.0.0.1:0", "127.0.0.1:0"]).stdin(Stdio::null()).stdout(Stdio::piped()).env_remove("RUST_LOG");
    let mut child = command.spawn().expect("the program starts");
    let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("where it listens");
    let address = line.trim().trim_end_matches('/').rsplit('/').next().expect("an address").to_owned();
    let ask = |request: &str| {
        let mut stream = TcpStream::connect(&address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        // The request goes in two pieces, and its head ends with the second.
        stream.write_all(request.as_bytes()).expect("room");
        stream.write_all(b"\r\n\r\n").expect("room");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer, and the end");
        text
    };
    let metrics = ask("GET /metrics HTTP/1.1\r\nHost: x");
    assert!(metrics.starts_with("HTTP/1.1 200 OK\r\n") && metrics.contains("\nrdma_reactor_turns_total "), "{metrics}");
    let page = ask("GET / HTTP/1.1");
    assert!(page.contains("<td>Turns of the loop<td"), "{page}");
    assert!(ask("GET /nothing HTTP/1.1").starts_with("HTTP/1.1 404 "));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("it runs");
    assert!(child.wait().expect("its end").success());
    line.clear();
    stdout.read_line(&mut line).expect("its last line");
    assert_eq!(line, "0 messages echoed\n");
}
