//! Tests of the numbered examples that end without a signal. Each runs with the arguments that a user would give.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

#[path = "../tools/tests/patience/mod.rs"]
mod patience;

use std::fs;
use std::path::Path;
use std::process::Command;

use patience::PATIENCE;

/// Runs a program that must succeed, and returns its output.
#[track_caller]
fn succeeds(program: &str) -> String {
    run(program, None)
}

/// Runs a program like [`succeeds`], with an argument.
#[track_caller]
fn run(program: &str, argument: Option<&str>) -> String {
    let limit = PATIENCE.as_secs().to_string();
    let output = Command::new("timeout")
        .args(["-s", "KILL", &limit, program])
        .args(argument)
        .env_remove("RUST_LOG")
        .output()
        .expect("it ran");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!((output.status.code(), &*err), (Some(0), ""), "{out}");
    out.into_owned()
}

#[test]
fn bad_arguments_are_one_line_that_names_them() {
    for (program, argument, words) in [
        (env!("CARGO_BIN_EXE_04-rpc-async"), "many", "many tasks: give a number from 1 to 100000"),
        (env!("CARGO_BIN_EXE_05-reconnect"), "localhost:x", "localhost:x: give HOST:PORT"),
    ] {
        let output = Command::new(program).arg(argument).env_remove("RUST_LOG").output().expect("it ran");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
        assert!(stderr.contains(words), "no {words:?} in {stderr}");
    }
}

/// With too few file descriptors, a client of the program cannot connect. The program must then
/// fail instead of waiting for its server. The number of descriptors that the program needs before
/// it connects is unknown, so the test tries all numbers.
#[test]
fn a_program_that_cannot_connect_fails() {
    let refused = "conn#0.1: Too many open files";
    for (program, words) in [
        (env!("CARGO_BIN_EXE_01-echo"), refused),
        (env!("CARGO_BIN_EXE_06-backpressure"), refused),
        (env!("CARGO_BIN_EXE_08-large-messages"), refused),
        (env!("CARGO_BIN_EXE_09-broadcast"), "Error: \"quick-1: "),
        (env!("CARGO_BIN_EXE_11-block-store"), refused),
        (env!("CARGO_BIN_EXE_12-cache-mover"), refused),
    ] {
        let is_reached = (5..200).any(|descriptors| {
            let numbers = [descriptors.to_string(), PATIENCE.as_secs().to_string()];
            let output = Command::new("sh")
                .args(["-c", "ulimit -n $1; exec timeout -s KILL $2 \"$0\"", program])
                .args(numbers)
                .env_remove("RUST_LOG")
                .output()
                .expect("it ran");
            let stderr = String::from_utf8_lossy(&output.stderr);
            // A program that was killed at its time limit has the status 137, or none.
            let failed = output.status.code().is_some_and(|code| code != 0 && code != 137);
            assert!(failed, "{program} with {descriptors} descriptors: {}: {stderr}", output.status);
            stderr.contains(words) && output.status.code() == Some(1)
        });
        assert!(is_reached, "{program} never came to connect");
    }
}

#[test]
fn an_echo_comes_back() {
    let out = succeeds(env!("CARGO_BIN_EXE_01-echo"));
    assert!(out.lines().any(|line| line.ends_with(": hello")), "{out}");
}

/// The server ends twice, first with an orderly close and then without one. The client must report which of the two happened, and must in
/// the end have received all answers.
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
    // The window of the default settings limits the number of kept messages.
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
    for byte in [1, 2] {
        assert!(out.contains(&format!("a message of 16 MiB, each byte is {byte}: true\n")), "{out}");
    }
    assert!(out.contains("the copy is sent: true") && out.contains("the region is sent: true"), "{out}");
}

/// Members that the feed waits for must receive every message. For the other members, every message must be counted as received or as
/// dropped.
#[test]
fn members_that_are_waited_for_get_every_message() {
    let out = succeeds(env!("CARGO_BIN_EXE_09-broadcast"));
    for quick in ["quick-1", "quick-2"] {
        assert!(out.contains(&format!("{quick}: 1000 of 1000 messages, the last one is 999\n")), "{out}");
    }
    let tallies: Vec<u32> = out
        .lines()
        .filter(|line| line.ends_with(" lost"))
        .map(|line| line.split([' ', ',']).filter_map(|word| word.parse::<u32>().ok()).sum())
        .collect();
    // The tally of the closed member does not include the messages that were published after its close.
    assert!(tallies.len() == 4 && tallies.iter().filter(|&&sum| sum == 1000).count() >= 3, "{out}");
    assert!(out.contains("\ndrop-me: ") && out.contains("\nclose-me: "), "{out}");
}

#[test]
fn a_thousand_tasks_get_their_answers_in_each_way() {
    for way in ["", "--single", "--tcp"] {
        let out = run(env!("CARGO_BIN_EXE_10-tokio-threads"), Some(way).filter(|way| !way.is_empty()));
        assert!(out.lines().any(|line| line.starts_with("100000 calls of 1000 tasks: ")), "{out}");
    }
}

/// The store must return every block that it has stored. It uses a temporary file in the first run, and a file of this test in the second
/// run.
#[test]
fn a_store_gives_its_blocks_back() {
    let named = std::env::temp_dir().join(format!("blocks-of-a-test-{}", std::process::id()));
    for file in [None, Some(&named)] {
        let out = run(env!("CARGO_BIN_EXE_11-block-store"), file.and_then(|file| file.to_str()));
        assert!(out.contains("512 blocks of 256 KiB stored: "), "{out}");
        assert!(out.contains("512 blocks of 256 KiB read back and compared: "), "{out}");
    }
    assert_eq!(std::fs::metadata(&named).map(|file| file.len()).ok(), Some(512 * (256 << 10)));
    std::fs::remove_file(&named).expect("it is there");
}

/// The store fails because it cannot extend its temporary file: `ulimit -f` limits the length of
/// files.
#[test]
fn a_store_that_fails_leaves_no_file() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("block-store");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder");
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$0\"", env!("CARGO_BIN_EXE_11-block-store")])
        .env("TMPDIR", &folder)
        // A build that measures coverage would also write a file with its counts.
        .env("LLVM_PROFILE_FILE", "/dev/null")
        .env_remove("RUST_LOG")
        .output()
        .expect("it ran");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert_eq!(folder.read_dir().expect("the folder").count(), 0);
}

#[test]
fn blocks_of_a_cache_move_with_one_end() {
    let out = succeeds(env!("CARGO_BIN_EXE_12-cache-mover"));
    assert!(out.matches("Done: 10000 blocks have arrived (").count() >= 2, "{out}");
    assert!(out.contains("10000 blocks are correct\n"), "{out}");
    assert!(out.contains("the owner was notified of 40960000 bytes, and 10000 blocks are correct\n"), "{out}");
    // All three transfers must report a result. The third one may have completed before it was cancelled.
    assert_eq!(out.matches(" blocks have arrived (").count(), 3, "{out}");
}

/// Each tenth call must end at its deadline, all other calls must be answered, and every client without valid credentials must be
/// refused.
#[test]
fn a_service_answers_in_time_and_knows_its_clients() {
    let out = succeeds(env!("CARGO_BIN_EXE_13-rpc"));
    assert!(out.contains("20000 calls: 18000 right, 2000 at their deadlines, 0 other\n"), "{out}");
    for stranger in
        ["no certificate", "a certificate of another authority", "trusts another authority", "wants another server"]
    {
        assert!(out.lines().any(|line| line.starts_with(&format!("{stranger}: "))), "{out}");
    }
    assert!(out.contains("after the drain: the connection "), "{out}");
}
