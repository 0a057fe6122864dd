//! The numbered programs that end on their own, as a user runs them.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

use std::process::Command;

/// Runs a program that is to succeed; returns what it has printed.
#[track_caller]
fn succeeds(program: &str) -> String {
    let output =
        Command::new("timeout").args(["-s", "KILL", "180", program]).env_remove("RUST_LOG").output().expect("it ran");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!((output.status.code(), &*err), (Some(0), ""), "{out}");
    out.into_owned()
}

#[test]
fn an_echo_comes_back() {
    let out = succeeds(env!("CARGO_BIN_EXE_01-echo"));
    assert!(out.lines().any(|line| line.ends_with(": hello")), "{out}");
}

/// The server goes away in order, and then without a word: the client says which it was, and has all its answers in the end.
#[test]
fn a_client_survives_its_server() {
    let out = succeeds(env!("CARGO_BIN_EXE_05-reconnect"));
    assert!(out.lines().any(|line| line.starts_with("closed by the peer; attempt 1 in ")), "{out}");
    assert!(out.lines().any(|line| line.starts_with("lost: ")), "{out}");
    assert!(out.lines().last().is_some_and(|line| line.starts_with("30 pings over ")), "{out}");
}
