//! A program of ours as another process, on the embedded provider.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Starts the program, which is killed when it takes too long.
pub(crate) fn start(program: &str, args: &[&str], stdin: Stdio) -> Child {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "180", program]).args(args).args(["--provider", "iwarp"]);
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("RUST_LOG");
    command.spawn().expect("it starts")
}

/// Runs the program to its end; returns its status and output.
pub(crate) fn run(program: &str, args: &[&str]) -> Output {
    start(program, args, Stdio::null()).wait_with_output().expect("it ends")
}

/// Reads the address that a server prints.
pub(crate) fn address(from: impl Read) -> String {
    let mut line = String::new();
    BufReader::new(from).read_line(&mut line).expect("a line");
    line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("an address, not {line:?}")).to_owned()
}

/// Terminates the program; `timeout` passes the signal on to the program that it watches.
pub(crate) fn terminate(child: &mut Child) {
    let _ = kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM);
    let _ = child.wait();
}

/// Checks that the program of this name failed with status 1 and one line on standard error that has these words.
#[track_caller]
pub(crate) fn failed_with(output: &Output, name: &str, words: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.starts_with(&format!("{name}: ")) && stderr.contains(words), "no {words:?} in {stderr}");
}
