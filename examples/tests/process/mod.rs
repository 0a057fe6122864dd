//! A program of ours as another process, on the embedded provider.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The program, killed when it takes too long.
pub(crate) fn start(program: &str, args: &[&str], stdin: Stdio) -> Child {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "180", program]).args(args).args(["--provider", "iwarp"]);
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("RUST_LOG");
    command.spawn().expect("it starts")
}

/// Its end, and what it said.
pub(crate) fn run(program: &str, args: &[&str]) -> Output {
    start(program, args, Stdio::null()).wait_with_output().expect("it ends")
}

/// The address that a server says it has.
pub(crate) fn address(from: impl Read) -> String {
    let mut line = String::new();
    BufReader::new(from).read_line(&mut line).expect("a line");
    line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("an address, not {line:?}")).to_owned()
}

/// Ends it; `timeout` passes the signal on to the program it watches.
pub(crate) fn terminate(child: &mut Child) {
    let _ = kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM);
    let _ = child.wait();
}

/// One line on standard error, from the program of this name and with these words, and status 1.
#[track_caller]
pub(crate) fn failed_with(output: &Output, name: &str, words: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.starts_with(&format!("{name}: ")) && stderr.contains(words), "no {words:?} in {stderr}");
}
