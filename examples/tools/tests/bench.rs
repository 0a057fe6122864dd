//! Tests of `bench` as a program: how it and the processes that it starts end. Its figures are not tested.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod patience;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use patience::PATIENCE;

/// Starts the program. It is killed if it exceeds the time limit.
fn start(args: &[&str], adapt: impl FnOnce(&mut Command) -> &mut Command) -> Child {
    let mut command = Command::new("timeout");
    let limit = PATIENCE.as_secs().to_string();
    command.args(["--foreground", "-s", "KILL", &limit, env!("CARGO_BIN_EXE_bench")]).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("RUST_LOG");
    adapt(&mut command).spawn().expect("it starts")
}

/// The standard input of each process has already ended, as if the process that had started it was killed.
#[test]
fn no_process_outlives_the_one_that_started_it() {
    let roles = [
        "tcp-server spin 64",
        "mix-server default",
        "many-server reactor",
        "many-server tcp",
        "one-sided-server",
        "datagrams-server udp echo",
        "datagrams-server udp flood",
        "datagrams-server reactor echo",
        "connections-server",
        // No server answers this client, and it would wait for ever.
        "datagrams-client udp echo 127.0.0.1:1 64 1",
    ];
    let children = roles.map(|role| (role, start(&role.split(' ').collect::<Vec<_>>(), |command| command)));
    for (role, child) in children {
        let output = child.wait_with_output().expect("it ends");
        assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(1), ""), "{role}");
    }
}

#[test]
fn a_signal_ends_the_rounds_and_removes_the_keys() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench");
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let args = ["--rounds", "1000", "--tries", "10000", "--only", "echoes on 1 connection"];
        let mut child = start(&args, |command| command.env("TMPDIR", &folder));
        let files = || folder.read_dir().expect("the folder").count();
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines().map(|line| line.expect("text"));
        assert!(lines.any(|line| line.starts_with("try 1 of ")) && files() == 1);
        // `timeout` forwards the signal.
        kill(Pid::from_raw(child.id() as i32), signal).expect("it runs");
        let last = lines.last();
        let status = child.wait().expect("it ends");
        assert_eq!((status.code(), files()), (Some(130), 0), "{status}, {last:?}");
    }
}
