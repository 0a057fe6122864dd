//! Tests of `bench` as a program: how it and the processes that it starts end, and if its rows work. Its figures are not tested.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod patience;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rdma_reactor_tools::bench::rows;
use serde_json::Value;

use patience::PATIENCE;

/// Starts the program. It is killed if it exceeds the time limit.
fn start(args: &[&str], adapt: impl FnOnce(&mut Command) -> &mut Command) -> Child {
    let mut command = Command::new("timeout");
    let limit = PATIENCE.as_secs().to_string();
    command.args(["--foreground", "-s", "KILL", &limit, env!("CARGO_BIN_EXE_bench")]).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("RUST_LOG");
    adapt(&mut command).spawn().expect("it starts")
}

/// Runs all rows whose names contain `only`, with at most `descriptors` descriptors in each process. Returns the exit status, the results
/// and the table.
fn smoke(only: &str, descriptors: &str) -> (Option<i32>, Vec<Value>, String) {
    let limits = format!(r#"ulimit -n {descriptors}; exec "$0" "$@""#);
    let child = Command::new("timeout")
        .args(["-s", "KILL", &PATIENCE.as_secs().to_string(), "sh", "-c", &limits, env!("CARGO_BIN_EXE_bench")])
        .args(["--smoke", "--json", "-", "--only", only])
        .env_remove("RUST_LOG")
        .output()
        .expect("it starts");
    let table = String::from_utf8_lossy(&child.stderr).into_owned();
    let json: Value = serde_json::from_slice(&child.stdout).unwrap_or_else(|error| panic!("{error}: {table}"));
    (child.status.code(), json["results"].as_array().expect("results").clone(), table)
}

#[test]
fn each_row_works() {
    let (status, results, table) = smoke("", "1024");
    assert_eq!((status, results.len()), (Some(0), rows::contests().len()), "{table}");
    for row in results {
        let figure = row["rounds"]["unknown"]["rdma_reactor"].as_f64();
        let is_measured = figure.is_some_and(|figure| figure > 0.0);
        assert!(is_measured && row["skipped"].is_null() && row["failed"].is_null(), "{row:#}");
    }
}

#[test]
fn a_row_that_fails_is_reported_and_the_others_run() {
    // The rows are the echoes on many connections, the mix of requests, and the datagrams. 100
    // connections need more than 64 descriptors.
    let (status, results, table) = smoke("s o", "64");
    assert_eq!((status, results.len()), (Some(1), 9), "{table}");
    for row in results {
        let name = row["name"].as_str().expect("a name");
        let fails = name.contains("00 connections");
        assert_eq!((row["failed"].is_string(), row["rounds"]["unknown"].is_object()), (fails, !fails), "{row:#}");
        let reported = table.contains(&format!("| {name} | bare TCP | failed: a client failed: "));
        assert_eq!(reported, fails, "{name}: {table}");
        assert!(!fails || row["met"] == false, "{row:#}");
    }
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
fn a_signal_ends_the_rounds_prints_the_table_and_removes_the_keys() {
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
        let output = child.wait_with_output().expect("it ends");
        assert_eq!((output.status.code(), files()), (Some(130), 0), "{}, {last:?}", output.status);
        let table = String::from_utf8_lossy(&output.stdout);
        assert!(table.contains("\n| 64 B echoes on 1 connection |"), "{table}");
    }
}
