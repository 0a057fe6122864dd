//! Tests of `02-metrics`: HTTP, signals and RDMA in one event loop.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

#[path = "../tools/tests/patience/mod.rs"]
mod patience;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use patience::PATIENCE;

/// The time limit that the server sets for an HTTP connection. On a busy machine, an answer may take longer.
const VISIT: Duration = Duration::from_secs(5);

/// The running program, with the addresses that it printed. Dropping this value kills the program.
struct Program {
    child: Child,
    stdout: BufReader<ChildStdout>,
    /// The lines that the program logs.
    log: Receiver<String>,
    rdma: String,
    http: String,
}

impl Program {
    /// Starts the program with a limit of `descriptors` open descriptors.
    fn start(descriptors: u32) -> Self {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            &format!("ulimit -n {descriptors} && exec \"$0\" \"$@\""),
            env!("CARGO_BIN_EXE_02-metrics"),
        ]);
        command.args(["127.0.0.1:0", "127.0.0.1:0"]).env("RUST_LOG", "warn");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let (sender, log) = channel();
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line with its addresses");
        let (rdma, http) = line
            .trim()
            .strip_prefix("echo on ")
            .and_then(|rest| rest.strip_suffix('/')?.split_once(", counters on http://"))
            .unwrap_or_else(|| panic!("{line}"));
        let (rdma, http) = (rdma.to_owned(), http.to_owned());
        Self { child, stdout, log, rdma, http }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "the program's end: {:?}; its log: {:?}",
                self.child.try_wait(),
                self.log.try_iter().collect::<Vec<_>>()
            );
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// Opens `count` HTTP connections that send nothing.
fn silent(address: &str, count: usize) -> Vec<TcpStream> {
    (0..count).map(|_| connect(address)).collect()
}

/// Requests a page and returns the answer. Repeats the request if the connection reached the server's time limit before the answer arrived.
fn ask(http: &str, request: &str) -> String {
    loop {
        let begun = Instant::now();
        match visit(http, request) {
            Ok(answer) if !answer.is_empty() => return answer,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock) => panic!("no answer and no end: {error}"),
            early => assert!(begun.elapsed() >= VISIT, "turned away: {early:?}"),
        }
    }
}

fn visit(http: &str, request: &str) -> std::io::Result<String> {
    let mut stream = connect(http);
    // The head of the request arrives in two parts, and is complete only with the second part.
    stream.write_all(request.as_bytes())?;
    stream.write_all(b"\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[track_caller]
fn shows_metrics(http: &str) {
    let metrics = ask(http, "GET /metrics HTTP/1.1\r\nHost: x");
    assert!(metrics.starts_with("HTTP/1.1 200 OK\r\n"), "{metrics:?}");
    assert!(metrics.contains("\nrdma_reactor_turns_total "), "{metrics:?}");
}

#[test]
fn counters_are_shown_and_a_signal_ends_it() {
    let mut program = Program::start(256);
    shows_metrics(&program.http);
    let page = ask(&program.http, "GET / HTTP/1.1");
    assert!(page.contains("<td>Turns of the loop<td"), "{page}");
    assert!(ask(&program.http, "GET /nothing HTTP/1.1").starts_with("HTTP/1.1 404 "));
    kill(Pid::from_raw(program.child.id() as i32), Signal::SIGTERM).expect("it runs");
    assert!(program.child.wait().expect("its end").success());
    let mut line = String::new();
    program.stdout.read_line(&mut line).expect("its last line");
    assert_eq!(line, "0 messages echoed\n");
}

#[test]
fn each_of_three_signals_ends_it() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let mut program = Program::start(256);
        kill(Pid::from_raw(program.child.id() as i32), signal).expect("it runs");
        assert_eq!(program.child.wait().expect("its end").code(), Some(0), "{signal}");
    }
}

/// Opens 64 HTTP connections that never send anything. 64 is the server's limit; a 65th visitor must still be served.
#[test]
fn visitors_that_say_nothing_keep_nobody_out() {
    let program = Program::start(256);
    let mut visitors = silent(&program.http, 64);
    shows_metrics(&program.http);
    // The server closes each silent connection at its time limit. After that, the test opens 192 silent connections, which is three times
    // the server's limit. The server must still serve visitors.
    let mut last = visitors.pop().expect("there are 64");
    assert_eq!(last.read_to_end(&mut Vec::new()).expect("an end within the time of a visit"), 0);
    let _more = silent(&program.http, 192);
    shows_metrics(&program.http);
}

/// The server may open 24 descriptors, and 30 connections need more. The server must still serve visitors.
#[test]
fn visitors_that_take_all_descriptors_keep_nobody_out() {
    let program = Program::start(24);
    let visitors = silent(&program.http, 30);
    shows_metrics(&program.http);
    drop(visitors);
    (0..3).for_each(|_| shows_metrics(&program.http));
}

/// Connections that are not HTTP use up all descriptors, so closing the oldest HTTP connection cannot free one. When the connections that
/// are not HTTP end, visitors must be served again.
#[test]
fn visitors_are_served_when_there_are_descriptors_again() {
    let program = Program::start(24);
    let others = silent(&program.rdma, 30);
    let line = program.log.recv_timeout(PATIENCE).expect("a warning");
    assert!(line.contains("Too many open files"), "{line}");
    let http = program.http.clone();
    let asked = std::thread::spawn(move || shows_metrics(&http));
    while !asked.is_finished() {
        if program.log.recv_timeout(Duration::from_millis(20)).is_ok_and(|line| line.contains("accepting: ")) {
            break;
        }
    }
    drop(others);
    asked.join().expect("an answer");
}
