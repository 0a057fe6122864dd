//! Tests of reactors in other event loops. Each example sends 10,000 messages, waits for their echoes, and pauses on timers. If an
//! event were lost, the example would hang.
#![allow(clippy::disallowed_methods, reason = "tests of programs, not of the library")]

#[path = "../tools/tests/patience/mod.rs"]
mod patience;

use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use patience::PATIENCE;

fn run(program: &str, args: &[&str]) -> String {
    run_with(program, args, |_| {})
}

/// Runs a program to its end, and returns its output. Calls `disturb` with the process meanwhile.
fn run_with(program: &str, args: &[&str], disturb: impl FnOnce(&mut Child)) -> String {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("RUST_LOG");
    let mut child = command.spawn().expect("the program starts");
    let pid = Pid::from_raw(child.id() as i32);
    let (done, watch) = mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        // A timeout means that the program hangs, because a lost wake-up made its loop sleep forever.
        if watch.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            kill(pid, Signal::SIGKILL).expect("it has not been waited for");
        }
    });
    disturb(&mut child);
    let output = child.wait_with_output().expect("its end");
    drop(done);
    watchdog.join().expect("the watchdog");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {}\n{stdout}{stderr}", output.status);
    stdout
}

/// Runs an example and checks its output. The reactor's timers end the pauses. The heartbeats are events of another source in the example's
/// event loop. They must continue during the pauses.
#[track_caller]
fn shares_its_loop(program: &str, args: &[&str]) {
    let stdout = run(program, args);
    let numbers: Vec<u64> = stdout.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [10_000, 19, heartbeats] = numbers[..] else { panic!("{stdout}") };
    // There are 19 pauses of 5 ms, and a heartbeat is due every 2 ms. A busy machine delays heartbeats, so the test expects only one
    // for each pause.
    assert!(heartbeats >= 19, "{stdout}");
}

#[test]
fn epoll_level_and_edge_triggered() {
    shares_its_loop(env!("CARGO_BIN_EXE_embed-epoll"), &[]);
    shares_its_loop(env!("CARGO_BIN_EXE_embed-epoll"), &["--edge"]);
}

#[test]
fn mio() {
    shares_its_loop(env!("CARGO_BIN_EXE_embed-mio"), &[]);
}

#[test]
fn calloop() {
    shares_its_loop(env!("CARGO_BIN_EXE_embed-calloop"), &[]);
}

#[test]
fn tokio() {
    shares_its_loop(env!("CARGO_BIN_EXE_embed-tokio"), &[]);
}

/// A process that is stopped and continued, as by Ctrl-Z and `fg`, returns from `epoll_wait` with `EINTR`. Its loop must continue.
#[test]
fn a_loop_that_is_stopped_continues() {
    let programs = [
        env!("CARGO_BIN_EXE_embed-epoll"),
        env!("CARGO_BIN_EXE_embed-mio"),
        env!("CARGO_BIN_EXE_embed-calloop"),
        env!("CARGO_BIN_EXE_embed-tokio"),
        env!("CARGO_BIN_EXE_embed-async"),
    ];
    for program in programs {
        run_with(program, &[], |child| {
            let pid = Pid::from_raw(child.id() as i32);
            while child.try_wait().expect("it is a child").is_none() {
                kill(pid, Signal::SIGSTOP).expect("it has not been waited for");
                kill(pid, Signal::SIGCONT).expect("it has not been waited for");
                thread::sleep(Duration::from_millis(1));
            }
        });
    }
}

#[test]
fn futures() {
    assert_eq!(run(env!("CARGO_BIN_EXE_embed-async"), &[]), "10000 echoes of 4 tasks\n");
    assert_eq!(run(env!("CARGO_BIN_EXE_embed-async"), &["--async-io"]), "10000 echoes of 4 tasks\n");
}

#[test]
fn calls_of_a_thousand_tasks() {
    let stdout = run(env!("CARGO_BIN_EXE_04-rpc-async"), &["1000", "5"]);
    assert!(stdout.starts_with("5000 calls of 1000 tasks in "), "{stdout}");
}
