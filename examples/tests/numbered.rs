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

#[test]
fn a_slow_receiver_holds_the_sender_back() {
    let out = succeeds(env!("CARGO_BIN_EXE_06-backpressure"));
    assert!(out.contains("has to wait: the peer's window is closed"), "{out}");
    let end = out.lines().last().unwrap_or_default();
    assert!(end.starts_with("2000 of 2000 messages handled; the sender was refused "), "{out}");
    // The window of the default settings.
    let kept: usize =
        end.rsplit("kept ").next().and_then(|rest| rest.split(' ').next()?.parse().ok()).expect("a number");
    assert!((1..=64).contains(&kept), "{out}");
}

#[test]
fn clients_use_the_memory_of_a_server() {
    let out = succeeds(env!("CARGO_BIN_EXE_07-remote-memory"));
    assert_eq!(out, "3 tickets were drawn\n0: client 1\n1: client 2\n2: client 3\n");
}

#[test]
fn large_messages_arrive_as_one() {
    let out = succeeds(env!("CARGO_BIN_EXE_08-large-messages"));
    for sum in [1_u64 << 24, 2 << 24] {
        assert!(out.contains(&format!("a message of 16 MiB, whose bytes add up to {sum}\n")), "{out}");
    }
    assert!(out.contains("the copy is sent: true") && out.contains("the region is sent: true"), "{out}");
}
