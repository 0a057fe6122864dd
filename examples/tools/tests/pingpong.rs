//! Tests of `rdma-pingpong`, run as a user runs it: its output, its files, its errors and its exit status.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;

use nix::sys::signal::Signal;
use rdma_reactor::{Config, ConnectError, ConnectOptions, ConnectionId, Context, Handler, Reactor, RejectReason};
use serde_json::Value;

use support::{Program, run, server};

/// An address on which no program listens. The port is fixed, because a port that was just free may be in use by another test.
const NOBODY: &str = "127.0.0.1:1";

fn scratch(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_file(&path);
    path
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path of the test directory")
}

fn number(object: &Value, pointer: &str) -> f64 {
    object.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {pointer} in {object}"))
}

#[test]
fn a_demo_prints_tables_and_writes_files() {
    let (json, svg) = (scratch("demo/results.json"), scratch("demo/latency.svg"));
    let finished = run(&["demo", "-n", "300", "-s", "1K", "--json", text(&json), "--svg", text(&svg)]);
    finished.succeeded();
    for part in ["t_typical[usec]", "Half round trip, 1 KiB", "█", "provider iwarp, wait "] {
        assert!(finished.stdout.contains(part), "{finished:?}");
    }
    let result: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(result["provider"], "iwarp");
    assert_eq!(result["mode"], "latency");
    assert_eq!(result["size"], 1024);
    assert_eq!(result["iters"], 300);
    let [min, p50, p90, p99, p999, max] =
        ["min", "p50", "p90", "p99", "p999", "max"].map(|name| number(&result, &format!("/half_rtt_us/{name}")));
    assert!(0.0 < min && min <= p50 && p50 <= p90 && p90 <= p99 && p99 <= p999 && p999 <= max, "{result}");
    assert!(number(&result, "/half_rtt_us/mean") > 0.0);
    assert!(number(&result, "/messages_per_second") > 0.0);
    assert!(number(&result, "/gbit_per_second") > 0.0);
    assert!(number(&result, "/stats/messages/sent") >= 300.0);
    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("p99") && svg.contains("message size"), "{svg}");
}

#[test]
fn all_sizes_are_an_array_and_json_has_standard_output_for_itself() {
    let finished = run(&["demo", "--all", "-n", "20", "--wait", "event", "--json", "-"]);
    assert_eq!(finished.code(), Some(0), "{finished:?}");
    let results: Value = serde_json::from_str(&finished.stdout).unwrap();
    let sizes: Vec<_> = results.as_array().unwrap().iter().map(|result| number(result, "/size")).collect();
    let once: Vec<_> = (0..=20).map(|power| f64::from(1 << power)).collect();
    assert_eq!(sizes, [once.clone(), once].concat(), "over TCP, and in shared memory");
    let providers: Vec<_> = results.as_array().unwrap().iter().map(|result| result["provider"].as_str()).collect();
    assert_eq!(providers, [[Some("iwarp"); 21], [Some("shm"); 21]].concat());
    assert!(results.as_array().unwrap().iter().all(|result| result["wait"] == "event"));
    for result in results.as_array().unwrap() {
        assert!(number(result, "/processor_seconds/server") >= 0.0, "the server's report is there: {result}");
    }
    assert!(finished.stderr.contains("t_typical[usec]"), "the tables are on standard error: {finished:?}");
}

#[test]
fn throughput_counts_what_arrived() {
    for (flags, expected) in [(&["-n", "5000"][..], 5000.0), (&["-n", "5000", "-b", "-e"], 5000.0)] {
        let args = [&["demo", "--mode", "throughput", "-s", "64", "--json", "-"], flags].concat();
        let finished = run(&args);
        assert_eq!(finished.code(), Some(0), "{finished:?}");
        let result: Value = serde_json::from_str(&finished.stdout).unwrap();
        assert_eq!(number(&result, "/iters"), expected);
        assert_eq!(result["half_rtt_us"], Value::Null);
        assert!(number(&result, "/messages_per_second") > 0.0);
        assert!(finished.stderr.contains("MsgRate[Mpps]"), "{finished:?}");
    }
}

#[test]
fn every_operation_has_latency_and_throughput() {
    for (op, figure) in [("send", "half_rtt_us"), ("write", "half_rtt_us"), ("read", "read_us")] {
        let finished = run(&["demo", "--op", op, "-n", "300", "-s", "100", "--json", "-"]);
        assert_eq!(finished.code(), Some(0), "{finished:?}");
        let result: Value = serde_json::from_str(&finished.stdout).unwrap();
        assert_eq!((&result["op"], number(&result, "/iters")), (&op.into(), 300.0));
        let [min, max] = ["min", "max"].map(|name| number(&result, &format!("/{figure}/{name}")));
        assert!(0.0 < min && min <= max, "{result}");
        // The sum of all measured times must not exceed the duration of the measurement. A half round trip counts twice in this sum.
        let ways = if op == "read" { 1.0 } else { 2.0 };
        let share = ways * 300.0 * number(&result, &format!("/{figure}/mean")) / 1e6 / number(&result, "/seconds");
        assert!(share < 1.01, "{share} of {result}");
        let other = if op == "read" { "half_rtt_us" } else { "read_us" };
        assert_eq!(result[other], Value::Null);
        assert!(finished.stderr.contains(&format!("{op} of 100 B")), "{finished:?}");
        // Only a job with messages sends its data as messages. One-sided operations use neither receives nor credits of the peer, so such a
        // job sends only control messages.
        assert_eq!(number(&result, "/stats/messages/sent") >= 300.0, op == "send", "{result}");

        let finished = run(&["demo", "--op", op, "--mode", "throughput", "-n", "3000", "-s", "4K", "--json", "-"]);
        assert_eq!(finished.code(), Some(0), "{finished:?}");
        let result: Value = serde_json::from_str(&finished.stdout).unwrap();
        assert_eq!((&result["op"], number(&result, "/iters")), (&op.into(), 3000.0));
    }
}

#[test]
fn an_open_loop_counts_from_the_schedule() {
    let flags = ["demo", "--wait", "event", "--rate", "2000", "-n", "200", "--json", "-"];
    for (provider, warmup) in [("iwarp", "20"), ("iwarp", "0"), ("shm", "20"), ("shm", "0")] {
        let finished = run(&[&flags[..], &["--provider", provider, "--warmup", warmup]].concat());
        assert_eq!(finished.code(), Some(0), "{finished:?}");
        let result: Value = serde_json::from_str(&finished.stdout).unwrap();
        assert_eq!((number(&result, "/iters"), number(&result, "/rate")), (200.0, 2000.0));
        assert_eq!(result["half_rtt_us"], Value::Null);
        let [p50, p99, p999, max] =
            ["p50", "p99", "p999", "max"].map(|name| number(&result, &format!("/open_loop_us/{name}")));
        assert!(0.0 < p50 && p50 <= p99 && p99 <= p999 && p999 <= max, "{result}");
        // Without a warm-up, the measurement begins with the schedule, and the last message is due 199 intervals later. With a warm-up, the
        // measurement begins with an answer. On a busy machine that answer may be late, and the measurement is then shorter.
        assert!(number(&result, "/seconds") > if warmup == "0" { 0.099 } else { 0.0 }, "{result}");
        assert!(finished.stderr.contains("Round trip from the scheduled time, 64 B"), "{finished:?}");
    }
    // No machine reaches this rate, so all messages are due immediately. No message may be lost.
    let finished = run(&["demo", "--rate", "1000000000", "-n", "5000", "--json", "-"]);
    let result: Value = serde_json::from_str(&finished.stdout).unwrap();
    assert_eq!(number(&result, "/iters"), 5000.0, "{finished:?}");
}

#[test]
fn touched_messages_and_direct_regions_work() {
    for flags in [
        &["--touch", "-s", "1"][..],
        &["--touch", "-s", "5000", "--system-congestion"],
        &["--touch", "--mode", "throughput", "-s", "100K", "-b"],
        &["--direct", "--op", "read", "-s", "8", "--provider", "shm"],
        &["--direct", "--op", "read", "-s", "64K", "--mode", "throughput", "--provider", "shm"],
        &["--direct", "--op", "write", "-s", "64K", "--mode", "throughput", "--provider", "shm"],
        &["--direct", "--op", "write", "-s", "100", "--provider", "shm"],
    ] {
        let finished = run(&[&["demo", "-n", "300", "--json", "-"], flags].concat());
        assert_eq!(finished.code(), Some(0), "{finished:?}");
        let result: Value = serde_json::from_str(&finished.stdout).unwrap();
        assert_eq!(number(&result, "/iters") % 300.0, 0.0, "{result}");
        for (flag, name) in [("--touch", "touch"), ("--direct", "direct"), ("--system-congestion", "system_congestion")]
        {
            assert_eq!(result[name], flags.contains(&flag), "{name} of {result}");
        }
        let side = |side| number(&result, &format!("/processor_us_per_message/{side}"));
        assert!(side("client") > 0.0 && side("server") > 0.0, "{result}");
    }
}

#[test]
fn several_connections_measure_at_the_same_time_and_both_sides_say_what_they_have_spent() {
    for (flags, messages) in [
        (&["-n", "500", "-q", "3"][..], 1500.0),
        (&["-n", "500", "-q", "3", "--mode", "throughput", "-b"], 1500.0),
        (&["-n", "500", "-q", "5", "--op", "read"], 2500.0),
        (&["-n", "500", "-q", "2", "--op", "write", "--mode", "throughput"], 1000.0),
        (&["-n", "50", "-q", "100", "-s", "5000"], 5000.0),
    ] {
        let finished = run(&[&["demo", "--wait", "event", "--json", "-"], flags].concat());
        assert_eq!(finished.code(), Some(0), "{finished:?}");
        let result: Value = serde_json::from_str(&finished.stdout).unwrap();
        assert_eq!(number(&result, "/iters"), messages, "{result}");
        assert_eq!(number(&result, "/connections").to_string(), flags[3]);
        assert_eq!(number(&result, "/stats/connections/connected").to_string(), flags[3]);
        let [client, server] = ["client", "server"].map(|side| number(&result, &format!("/processor_seconds/{side}")));
        assert!(client > 0.0 && server > 0.0, "{result}");
        let line = "processor time, warm-up included: ";
        assert!(finished.stderr.contains(line) && finished.stderr.contains(" s at the server"), "{finished:?}");
    }
    run(&["demo", "-q", "2", "--op", "write"]).failed_with(&["--op write", "--connections"]);
}

#[test]
fn intervals_add_up_to_the_measurement() {
    for flags in [&["--mode", "latency"][..], &["--mode", "throughput"], &["--op", "write"], &["-q", "3"]] {
        // If the process was not scheduled for a second, it reports no intervals. The measurement is then repeated.
        let (finished, result) = loop {
            let finished = run(&[&["demo", "-D", "1", "-i", "0.05", "--json", "-"], flags].concat());
            assert_eq!(finished.code(), Some(0), "{finished:?}");
            let result: Value = serde_json::from_str(&finished.stdout).unwrap();
            if !result["intervals"].as_array().unwrap().is_empty() {
                break (finished, result);
            }
        };
        let intervals = result["intervals"].as_array().unwrap();
        let messages: f64 = intervals.iter().map(|interval| number(interval, "/messages")).sum();
        assert!(0.0 < messages && messages <= number(&result, "/iters"), "{messages} of {result}");
        let mut before = 0.0;
        for interval in intervals {
            let [from, to] = ["/from", "/to"].map(|name| number(interval, name));
            assert!(from == before && to > from, "{result}");
            before = to;
        }
        let lines = finished.stderr.lines().filter(|line| line.contains(" s: ") && line.contains(" messages, "));
        assert_eq!(lines.count(), intervals.len(), "{finished:?}");
    }
}

#[test]
fn operations_of_odd_sizes_work_and_a_server_serves_them_one_after_another() {
    let (server, address) = server();
    for flags in [
        &["--op", "write", "-s", "1", "-n", "700"][..],
        &["--op", "write", "-s", "3M", "-n", "5", "--warmup", "0"],
        &["--op", "read", "-s", "7", "-e"],
        &["--op", "read", "-s", "1M", "-n", "20", "--mode", "throughput", "-t", "3"],
        &["--op", "write", "-s", "65537", "-D", "0.1", "--mode", "throughput", "--wait", "event"],
        &["--op", "write", "-D", "0.1"],
        &["-n", "100"],
    ] {
        run(&[&["client", &address], flags].concat()).succeeded();
    }
    server.signal(Signal::SIGINT);
    assert_eq!(server.finish().code(), Some(0));
}

#[test]
fn who_looks_at_memory_sees_others_go_and_ctrl_c() {
    let (mut server, address) = server();
    let client = Program::start(&["client", &address, "--op", "write", "-D", "600"]);
    server.wait_for("serving conn#");
    client.signal(Signal::SIGKILL);
    client.finish();
    server.wait_for(" messages, ");
    let client = Program::start(&["client", &address, "--op", "write", "-D", "600"]);
    server.wait_for("serving conn#");
    client.signal(Signal::SIGINT);
    assert_eq!(client.finish().code(), Some(130));
    let client = Program::start(&["client", &address, "--op", "write", "-D", "600"]);
    server.wait_for("serving conn#");
    server.signal(Signal::SIGKILL);
    server.finish();
    client.finish().failed_with(&[&address, "went away after"]);
}

#[test]
fn odd_sizes_depths_and_settings_work() {
    for flags in [
        &["-s", "1", "-t", "1", "-n", "500", "--wait", "spin"][..],
        &["-s", "8M", "-n", "9", "--warmup", "0", "-b"],
        &["-s", "4097", "-n", "1000", "-t", "8192", "--no-crc"],
        &["-s", "100000", "-D", "0.2", "-t", "3"],
    ] {
        run(&[&["demo", "--mode", "throughput"], flags].concat()).succeeded();
    }
    run(&["demo", "-s", "3M", "-n", "7", "--no-crc", "--warmup", "0"]).succeeded();
    run(&["demo", "-d", "iwarp0", "-D", "0.1"]).succeeded();
    run(&["demo", "--bind", "127.0.0.2", "-D", "0.1"]).succeeded();
}

#[test]
fn a_server_serves_one_client_after_another() {
    let (server, address) = server();
    run(&["client", &address, "-n", "100"]).succeeded();
    run(&["client", &address, "-n", "100", "--mode", "throughput", "-s", "2K"]).succeeded();
    run(&["client", &address, "-n", "100", "-s", "70K", "-e"]).succeeded();
    run(&["client", &address, "-n", "100", "-s", "70K", "-e", "-q", "4"]).succeeded();
    server.signal(Signal::SIGINT);
    let finished = server.finish();
    assert_eq!(finished.code(), Some(0), "{finished:?}");
    let counts = finished.stdout.lines().filter(|line| line.contains(" messages, warm-up included, "));
    assert_eq!(counts.count(), 4, "{finished:?}");
    assert!(finished.stdout.contains("wait event, 4 connections: 440 messages, "), "{finished:?}");
}

#[test]
fn a_server_survives_clients_that_vanish() {
    let (mut server, address) = server();
    for _ in 0..3 {
        let client = Program::start(&["client", &address, "-D", "600"]);
        server.wait_for("serving conn#");
        client.signal(Signal::SIGKILL);
        client.finish();
        server.wait_for(" messages, ");
    }
    // Two clients that are not `rdma-pingpong`: one sends nothing, the other one sends the wrong bytes. The server must still serve a
    // real client.
    let silent = TcpStream::connect(&address).unwrap();
    TcpStream::connect(&address).unwrap().write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    run(&["client", &address, "-n", "100"]).succeeded();
    drop(silent);
    run(&["client", &address, "-n", "100"]).succeeded();
}

#[test]
fn a_second_client_is_told_to_wait() {
    let (mut server, address) = server();
    let first = Program::start(&["client", &address, "-D", "600", "-e", "-q", "2"]);
    server.wait_for("serving conn#");
    server.wait_for("serving conn#");
    run(&["client", &address, "-n", "10"]).failed_with(&[&address, "busy with another client", "try again later"]);
    first.signal(Signal::SIGINT);
    assert_eq!(first.finish().code(), Some(130));
}

/// A client whose private data is not that of `rdma-pingpong`.
struct Stranger {
    error: Option<ConnectError>,
}

impl Handler for Stranger {
    fn on_connect(&mut self, cx: &mut Context<'_>, _: ConnectionId) {
        cx.stop();
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.error = Some(error);
        cx.stop();
    }
}

#[test]
fn a_server_says_why_it_refuses() {
    let (_server, address) = server();
    for (data, why) in [(&b""[..], "rdma-pingpong server"), (b"RPP\xff", "version"), (b"RPP\x02...", "7 bytes")] {
        let mut reactor = Reactor::new(Config::default()).unwrap();
        let options = ConnectOptions::new().private_data(data);
        reactor.context().connect_with(address.parse().unwrap(), options).unwrap();
        let mut stranger = Stranger { error: None };
        reactor.run(&mut stranger).unwrap();
        let Some(ConnectError::Rejected { reason: RejectReason::Refused, private_data }) = stranger.error else {
            panic!("{:?}", stranger.error)
        };
        assert!(String::from_utf8_lossy(&private_data).contains(why), "{private_data:?}");
    }
}

#[test]
fn nothing_listening_is_said() {
    run(&["client", NOBODY]).failed_with(&["nothing listens on", NOBODY, "rdma-pingpong server"]);
    // The name has several addresses. The client must try each of them.
    run(&["client", "localhost", "-p", "1"]).failed_with(&["nothing listens on", ":1:"]);
}

#[test]
fn a_tcp_server_that_is_not_iwarp_is_recognised() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    run(&["client", &address]).failed_with(&["no answer from", &address]);

    for (speaks_first, says) in
        [(false, "HTTP/1.1 400 Bad Request\r\n\r\n"), (true, "SSH-2.0-OpenSSH_9.2p1\r\n"), (true, "")]
    {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let thread = thread::spawn(move || {
            // The client may connect a second time, with an older revision of MPA.
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut byte = [0];
                if !speaks_first && stream.read(&mut byte).unwrap() == 0 {
                    return;
                }
                stream.write_all(says.as_bytes()).unwrap();
            }
        });
        run(&["client", &address]).failed_with(&[&address, "is not an rdma-pingpong server"]);
        drop(thread);
    }
}

#[test]
fn a_port_in_use_is_said() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    run(&["server", "--bind", "127.0.0.1", "-p", &port]).failed_with(&[&port, "another program listens", "--port"]);
    run(&["server", "--bind", "192.0.2.1", "-p", &port]).failed_with(&["192.0.2.1", "--bind"]);
}

#[test]
fn an_unknown_host_is_said() {
    run(&["client", "no-such-host.invalid"]).failed_with(&["unknown host \"no-such-host.invalid\""]);
    run(&["server", "--bind", "no-such-host.invalid"]).failed_with(&["unknown host"]);
    run(&["client", "127.0.0.1:http"]).failed_with(&["\"http\"", "not a port"]);
}

#[test]
fn bad_flags_are_one_line_each() {
    for (args, words) in [
        (&[][..], &["no command", "demo"][..]),
        (&["dance"], &["dance"]),
        (&["client"], &["<ADDR>"]),
        (&["demo", "-s", "0"], &["'0'", "1 to 1G"]),
        (&["demo", "-s", "2G"], &["'2G'", "1 to 1G"]),
        (&["demo", "-s", "many"], &["'many'"]),
        (&["demo", "-n", "0"], &["'0'"]),
        (&["demo", "--duration=-1"], &["--duration", "-1", "seconds"]),
        (&["demo", "-D", "x"], &["'x'", "seconds"]),
        (&["demo", "-t", "9999", "--mode", "throughput"], &["9999"]),
        (&["demo", "-t", "4"], &["--tx-depth", "--mode throughput"]),
        (&["demo", "-b"], &["--bidirectional", "--mode throughput"]),
        (&["demo", "--mode", "throughput", "--svg", "x.svg"], &["--svg", "--mode latency"]),
        (&["demo", "-e", "--wait", "spin"], &["--wait"]),
        (&["demo", "--op", "copy"], &["'copy'", "send, write, read"]),
        (&["demo", "--op", "write", "-e"], &["--op write", "--wait event", "--wait spin"]),
        (&["demo", "--op", "read", "-b", "--mode", "throughput"], &["--bidirectional", "--op send"]),
        (&["demo", "--op", "write", "--touch"], &["--touch", "--op send"]),
        (&["demo", "--direct"], &["--direct", "--op write"]),
        (&["demo", "--rate", "0"], &["'0'", "messages per second"]),
        (&["demo", "--rate", "5", "--op", "read"], &["--rate", "--op send"]),
        (&["demo", "--rate", "5", "--mode", "throughput"], &["--rate", "--mode latency"]),
        (&["demo", "--rate", "5", "-q", "2"], &["--rate", "one connection"]),
        (&["demo", "-p", "1"], &["-p"]),
        (&["client", "127.0.0.1", "-p", "70000"], &["70000"]),
        (&["demo", "-d", "mlx5_0"], &["mlx5_0", "iwarp0"]),
        (&["server", "-d", "mlx5_0"], &["mlx5_0", "iwarp0"]),
        (&["client", "127.0.0.1", "-d", "mlx5_0"], &["mlx5_0", "iwarp0"]),
        (&["demo", "--bind", "192.0.2.1"], &["192.0.2.1", "--bind"]),
    ] {
        run(args).failed_with(words);
    }
    assert_eq!(run(&["--help"]).code(), Some(0));
    assert_eq!(run(&["client", "--help"]).code(), Some(0));
    assert!(run(&["--version"]).succeeded().stdout.starts_with("rdma-pingpong "));
}

#[test]
fn verbs_without_rdma_is_said() {
    if Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut devices| devices.next().is_some()) {
        return;
    }
    for args in [&["demo"][..], &["server", "-p", "0"], &["client", "127.0.0.1"]] {
        let finished = run(&[args, &["--provider", "verbs"]].concat());
        assert!(finished.failed_with(&["verbs", "iwarp"]).stdout.is_empty(), "{finished:?}");
    }
}

#[test]
fn files_that_cannot_be_written_are_found_before_the_run() {
    let file = scratch("not-a-directory");
    fs::write(&file, "").unwrap();
    let below = file.join("x");
    for flag in ["--json", "--svg"] {
        let finished = run(&["demo", flag, text(&below)]);
        assert!(finished.failed_with(&[flag, text(&below)]).stdout.is_empty(), "{finished:?}");
    }
    // If a run has no results, it must not leave an empty file, and must not change an existing one.
    let (new, old) = (scratch("new.json"), scratch("old.json"));
    fs::write(&old, "old").unwrap();
    for path in [&new, &old] {
        run(&["client", NOBODY, "--json", text(path)]).failed_with(&["nothing listens"]);
    }
    assert!(!new.exists());
    assert_eq!(fs::read_to_string(old).unwrap(), "old");
}

#[test]
fn a_server_that_vanishes_is_said() {
    for mode in ["latency", "throughput"] {
        let (mut server, address) = server();
        let client = Program::start(&["client", &address, "-D", "600", "--mode", mode]);
        server.wait_for("serving conn#");
        server.signal(Signal::SIGKILL);
        server.finish();
        client.finish().failed_with(&[&address, "went away after", "is it still running?"]);
    }
}

#[test]
fn ctrl_c_prints_what_there_is() {
    for mode in ["latency", "throughput"] {
        let (_server, address) = server();
        let json = scratch(&format!("interrupted-{mode}.json"));
        let args = ["client", &address, "-a", "-D", "0.5", "--mode", mode, "--json", text(&json)];
        let mut client = Program::start(&args);
        client.wait_for("         1 ");
        client.signal(Signal::SIGINT);
        let finished = client.finish();
        assert_eq!((finished.code(), finished.stderr.as_str()), (Some(130), ""), "{finished:?}");
        assert!(finished.stdout.contains("provider shm"), "{finished:?}");
        assert!(serde_json::from_str::<Value>(&fs::read_to_string(json).unwrap()).is_ok());
    }
}

#[test]
fn ctrl_c_while_connecting_ends_at_once() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    // There are no results. So the file is not made if it is new, and keeps its content otherwise.
    let (new, old) = (scratch("unconnected-new.json"), scratch("unconnected-old.json"));
    fs::write(&old, "old").unwrap();
    for path in [&new, &old] {
        let client = Program::start(&["client", &address, "--json", text(path)]);
        let _stream = silent.accept().unwrap();
        client.signal(Signal::SIGINT);
        let finished = client.finish();
        assert_eq!(finished.code(), Some(130), "{finished:?}");
        assert!(finished.stdout.contains("before the first result"), "{finished:?}");
    }
    assert!(!new.exists());
    assert_eq!(fs::read_to_string(old).unwrap(), "old");
}

#[test]
fn a_demo_leaves_nothing_behind() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGKILL] {
        let mut demo = Program::start(&["demo", "-a", "-D", "0.3"]);
        demo.wait_for("         1 ");
        let children = demo.children();
        assert_eq!(children.len(), 1);
        demo.signal(signal);
        // The child process inherits its parent's standard error. `finish` reads standard error to its end, so it also waits for the child
        // process.
        let finished = demo.finish();
        assert_eq!(finished.code(), (signal != Signal::SIGKILL).then_some(130), "{finished:?}");
        assert_eq!(finished.stderr, "");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    for args in [&["demo", "-n", "100", "-a"][..], &["demo", "-n", "100", "--json", "-"], &["--help"]] {
        let mut reader = None;
        let program = Program::start_with(args, |command| {
            let (read, write) = UnixStream::pair().unwrap();
            reader = Some(read);
            command.stdout(OwnedFd::from(write))
        });
        drop(reader);
        let finished = program.finish();
        assert_eq!(finished.code(), Some(0), "{finished:?}");
        assert!(!finished.stderr.contains("panic"), "{finished:?}");
    }
}
