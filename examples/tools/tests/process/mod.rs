//! Runs a program of this package as a separate process, on the embedded provider.

#[path = "../patience/mod.rs"]
pub(crate) mod patience;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use patience::PATIENCE;

/// Returns the command that runs a program. The program is killed if it exceeds the time limit.
pub(crate) fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", &PATIENCE.as_secs().to_string(), program]).args(args).args(["--provider", "iwarp"]);
    command.stdin(Stdio::null()).env_remove("RUST_LOG");
    command
}

/// Starts the program.
pub(crate) fn start(program: &str, args: &[&str], stdin: Stdio) -> Child {
    let mut command = command(program, args);
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
}

/// Runs the program to its end. Returns its status and output.
pub(crate) fn run(program: &str, args: &[&str]) -> Output {
    start(program, args, Stdio::null()).wait_with_output().expect("it ends")
}

/// Returns the address that a server prints in its first line.
pub(crate) fn address(from: impl Read) -> String {
    let mut line = String::new();
    BufReader::new(from).read_line(&mut line).expect("a line");
    line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("an address, not {line:?}")).to_owned()
}

/// Sends SIGTERM to the program, and waits for its end.
pub(crate) fn terminate(child: &mut Child) {
    signal(child, Signal::SIGTERM);
    let _ = child.wait();
}

/// Sends a signal directly to the program that `timeout` runs. `timeout` would forward some signals
/// twice, and others never. If it had not been scheduled since it started the program, the signal
/// would end `timeout` and not the program. Returns true if the program was still running.
pub(crate) fn signal(child: &Child, signal: Signal) -> bool {
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let pid = std::fs::read_to_string(children).ok().and_then(|pids| pids.trim().parse().ok());
    pid.is_some_and(|pid| kill(Pid::from_raw(pid), signal).is_ok())
}

/// Checks that a program failed: with status 1, and with one line on standard error that begins with its name and has these words.
#[track_caller]
pub(crate) fn failed_with(output: &Output, name: &str, words: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.starts_with(&format!("{name}: ")) && stderr.contains(words), "no {words:?} in {stderr}");
}
