//! Tests of `rdma-mesh`, started by hand as a user would, on the embedded provider.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod patience;

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rdma_reactor::{
    Config, ConnectError, ConnectOptions, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice,
    Reactor,
};
use rdma_reactor_tools::mesh::control::{Entry, Order, RankReport, ReceivedLoad, write};
use rdma_reactor_tools::mesh::hello::{Hello, Purpose};
use serde_json::Value;

use patience::PATIENCE;

const MESH: &str = env!("CARGO_BIN_EXE_rdma-mesh");
/// Flags for short measurements. All ranks share one machine, so the figures of the pairs may differ by any factor. The tolerance is so
/// high that no pair is reported as slow.
const QUICK: &[&str] =
    &["-n", "50", "--bandwidth", "0.02", "--all-to-all", "0.2", "--tolerance", "1e6", "--at-once", "1"];
/// The time in seconds after which a rank that never joins, or is stopped, counts as dead. All other ranks join and answer within this
/// time, even on a busy machine.
const AWAY: &str = "10";

/// The processes of a run. Each process is killed when the run exceeds its time limit.
struct Ranks {
    ranks: Vec<Child>,
    port: String,
    until: Instant,
}

/// The output of rank 0, and its JSON results.
struct RunOutput {
    code: Option<i32>,
    stdout: String,
    json: Value,
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(MESH);
    // These flags come first, so a test can override them: if a flag is repeated, the last one counts.
    command.args(["--provider", "iwarp"]).args(args).env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Returns a port that no program uses. It is below the range from which the system assigns ports, so no other test can get it. Processes
/// of this test that run at the same time have numbers close to each other, and try different ports.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + std::process::id() % 625 * 32;
    loop {
        let port = first as u16 + NEXT.fetch_add(1, Ordering::Relaxed);
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
}

impl Ranks {
    /// Starts `count` ranks of a run that expects `of` ranks.
    fn start(count: usize, of: usize, args: &[&str], json: &std::path::Path) -> Self {
        let (hosts, port) = (vec!["127.0.0.1"; of].join(","), free_port().to_string());
        let start = |rank: usize| {
            let rank_arg = rank.to_string();
            let mut command = command(&["--hosts", &hosts, "--rank", &rank_arg, "-p", &port, "--patience", "300"]);
            if rank == 0 {
                command.arg("--json").arg(json);
            }
            command.args(args).spawn().expect("it starts")
        };
        Self { ranks: (0..count).map(start).collect(), port: port.clone(), until: Instant::now() + PATIENCE }
    }

    /// Waits until rank 0 logs that a phase begins.
    fn wait_for(&mut self, stage: &str) {
        let mut lines = BufReader::new(self.ranks[0].stderr.take().expect("piped"));
        let mut log = String::new();
        while !log.contains(stage) {
            assert!(lines.read_line(&mut log).expect("text") > 0, "it ended before {stage:?}: {log}");
        }
        thread::spawn(move || lines.read_to_end(&mut Vec::new()));
    }

    fn signal(&self, rank: usize, signal: Signal) {
        kill(Pid::from_raw(self.ranks[rank].id() as i32), signal).expect("it runs");
    }

    /// Waits until a rank ends. Returns its output.
    fn ends(&mut self, rank: usize) -> Output {
        loop {
            match self.ranks[rank].try_wait().expect("a child") {
                Some(_) => break,
                None if Instant::now() > self.until => panic!("rank {rank} does not end"),
                None => thread::sleep(Duration::from_millis(20)),
            }
        }
        let child = &mut self.ranks[rank];
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        child.stdout.take().expect("piped").read_to_end(&mut stdout).expect("bytes");
        if let Some(mut stream) = child.stderr.take() {
            stream.read_to_end(&mut stderr).expect("bytes");
        }
        Output { status: child.wait().expect("a child"), stdout, stderr }
    }

    fn rank_0(&mut self, json: &std::path::Path) -> RunOutput {
        let output = self.ends(0);
        let stdout = String::from_utf8(output.stdout).expect("text");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let text = std::fs::read_to_string(json).unwrap_or_else(|error| panic!("{error}: {stdout}{errors}"));
        RunOutput { code: output.status.code(), stdout, json: serde_json::from_str(&text).expect("JSON") }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn json_file(name: &str) -> std::path::PathBuf {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mesh-{name}.json"));
    let _ = std::fs::remove_file(&path);
    path
}

fn pairs(told: &RunOutput) -> &[Value] {
    told.json["pairs"].as_array().expect("a list")
}

/// Checks that all figures are present for all pairs without the rank `rank`.
#[track_caller]
fn all_but(told: &RunOutput, rank: usize) {
    for pair in pairs(told).iter().filter(|pair| pair["a"] != rank && pair["b"] != rank) {
        assert!(pair["broken"].is_null(), "{pair}");
        assert!(pair["latency"]["p50_us"].as_f64() > Some(0.0), "{pair}");
        for way in ["a_to_b", "b_to_a"] {
            assert!(pair[way]["gbit"].as_f64() > Some(0.0) && pair[way]["messages"].as_u64() > Some(0), "{pair}");
        }
    }
}

#[test]
fn sixteen_ranks_by_hand_fill_the_matrix() {
    let json = json_file("by-hand");
    let mut ranks = Ranks::start(16, 16, QUICK, &json);
    let told = ranks.rank_0(&json);
    assert_eq!((told.code, &told.json["good"]), (Some(0), &Value::Bool(true)), "{}", told.stdout);
    assert_eq!(pairs(&told).len(), 120);
    all_but(&told, usize::MAX);
    assert!(told.stdout.contains("16 ranks, 120 pairs: 0 do not work"), "{}", told.stdout);
    for rank in 1..16 {
        let output = ranks.ends(rank);
        assert_eq!((output.status.code(), output.stdout.len(), output.stderr.len()), (Some(0), 0, 0), "rank {rank}");
    }
}

/// Three ranks may use any provider, and one uses only TCP. All outputs with figures must mark the links in shared memory.
#[test]
fn links_in_shared_memory_are_marked() {
    const LEGEND: &str = "shm: the link is in shared memory, within a host";
    let json = json_file("shm");
    let [prometheus, svg, html] = ["prom", "svg", "html"].map(|kind| json.with_extension(kind));
    let path = |path: &std::path::Path| path.to_str().expect("text").to_owned();
    let files = ["--prometheus", &path(&prometheus), "--svg", &path(&svg), "--html", &path(&html)].map(str::to_owned);
    let args: Vec<_> = files.iter().map(String::as_str).chain(["--provider", "auto"]).collect();
    let mut ranks = Ranks::start(3, 4, &[QUICK, &args].concat(), &json);
    let mut other = command(QUICK);
    other.args(["--hosts", &["127.0.0.1"; 4].join(","), "--rank", "3", "-p", &ranks.port, "--patience", "300"]);
    ranks.ranks.push(other.spawn().expect("it starts"));
    let told = ranks.rank_0(&json);
    assert_eq!((told.code, &told.json["good"]), (Some(0), &Value::Bool(true)), "{}", told.stdout);
    all_but(&told, usize::MAX);
    for pair in pairs(&told) {
        assert_eq!(pair["shm"], pair["b"] != 3, "{pair}");
    }
    let lines = |text: &str, of: &dyn Fn(&str) -> bool| text.lines().filter(|line| of(line)).count();
    assert_eq!(lines(&told.stdout, &|line| line.contains(" 127.0.0.1 shm ")), 3, "{}", told.stdout);
    assert_eq!(lines(&told.stdout, &|line| line == LEGEND), 1, "{}", told.stdout);
    let read = |path: &std::path::Path| std::fs::read_to_string(path).expect("a file");
    let gauge =
        |value: &'static str| move |line: &str| line.starts_with("rdma_mesh_link_shm{") && line.ends_with(value);
    let text = read(&prometheus);
    assert_eq!((lines(&text, &gauge(" 1")), lines(&text, &gauge(" 0"))), (3, 3), "{text}");
    for text in [read(&svg), read(&html)] {
        let dots = text.lines().filter(|line| line.starts_with("<path class=\"shm\""));
        assert_eq!(dots.map(|line| line.matches('M').count()).collect::<Vec<_>>(), [6, 6], "two panels: {text}");
        assert!(text.contains(LEGEND), "{text}");
    }
}

/// Ranks with the same key must measure as usual. A rank with another key must have a row without figures.
#[test]
fn ranks_with_a_key_let_nobody_else_in() {
    let (json, dir) = (json_file("key"), std::path::Path::new(env!("CARGO_TARGET_TMPDIR")));
    let key = |name: &str, digits: &str| {
        let path = dir.join(name);
        std::fs::write(&path, format!("mesh:{}\n", digits.repeat(16))).expect("a file");
        path.to_str().expect("text").to_owned()
    };
    let (ours, theirs) = (key("mesh-key-ours", "1f2e"), key("mesh-key-theirs", "2e1f"));
    let mut ranks = Ranks::start(3, 3, &[QUICK, &["--psk-file", &ours]].concat(), &json);
    let told = ranks.rank_0(&json);
    assert_eq!((told.code, &told.json["good"]), (Some(0), &Value::Bool(true)), "{}", told.stdout);
    all_but(&told, usize::MAX);

    let few = [QUICK, &["--patience", AWAY]].concat();
    let mut ranks = Ranks::start(2, 3, &[&few[..], &["--psk-file", &ours]].concat(), &json);
    let port = ranks.port.clone();
    let mut other = command(&["--hosts", "127.0.0.1,127.0.0.1,127.0.0.1", "--rank", "2", "-p", &port]);
    let other = other.args(&few).args(["--psk-file", &theirs]).output().expect("it ran");
    let told = ranks.rank_0(&json);
    assert_eq!((told.code, other.status.code()), (Some(1), Some(1)), "{}", told.stdout);
    all_but(&told, 2);
    assert!(!told.json["ranks"][2]["gone"].is_null(), "{}", told.stdout);
}

#[test]
fn a_rank_that_is_killed_and_one_that_is_stopped_are_rows_and_the_others_finish() {
    for (signal, reason) in [(Signal::SIGKILL, "its process has ended"), (Signal::SIGSTOP, "it does not answer")] {
        let json = json_file(signal.as_str());
        // Each pair measures for a second, so the signal arrives during the measurements.
        let args = [QUICK, &["-n", "10000000", "--silence", AWAY]].concat();
        let args: Vec<_> = args.iter().enumerate().filter(|(i, _)| *i > 1).map(|(_, arg)| *arg).collect();
        let mut ranks = Ranks::start(5, 5, &args, &json);
        ranks.wait_for("latency");
        ranks.signal(3, signal);
        let told = ranks.rank_0(&json);
        assert_eq!(told.code, Some(1), "{}", told.stdout);
        let gone = told.json["ranks"][3]["gone"].as_str().expect("a reason");
        assert!(gone.contains(reason) && gone.contains("of latency"), "{gone}");
        assert!(told.stdout.contains(&format!("rank 3 on 127.0.0.1 is gone: {reason}")), "{}", told.stdout);
        all_but(&told, 3);
        for rank in [1, 2, 4] {
            assert_eq!(ranks.ends(rank).status.code(), Some(0), "rank {rank}");
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_a_row() {
    let json = json_file("missing");
    let args = [QUICK, &["--patience", AWAY]].concat();
    let mut ranks = Ranks::start(3, 4, &args, &json);
    let told = ranks.rank_0(&json);
    assert_eq!(told.code, Some(1));
    assert_eq!(told.json["ranks"][3]["gone"], "it never joined");
    all_but(&told, 3);
}

/// Rank 0 is interrupted while it waits for rank 1, so the pair was never measured.
#[test]
fn an_interrupted_run_is_not_good() {
    let json = json_file("interrupted");
    let mut ranks = Ranks::start(1, 2, QUICK, &json);
    ranks.wait_for("waiting for ranks");
    ranks.signal(0, Signal::SIGINT);
    let told = ranks.rank_0(&json);
    let (no, yes) = (Value::Bool(false), Value::Bool(true));
    assert_eq!((told.code, &told.json["good"], &told.json["interrupted"]), (Some(130), &no, &yes), "{}", told.stdout);
    assert!(told.stdout.contains("interrupted before 1 pairs were measured"), "{}", told.stdout);
    assert!(told.stdout.contains("rank 1 on ? is gone: it had not joined\n"), "{}", told.stdout);
    assert!(pairs(&told)[0]["broken"].is_null(), "{}", told.json);
}

#[test]
fn ranks_that_do_not_find_their_place_say_so_in_one_line() {
    let fails = |args: &[&str], words: &str| {
        let output = command(args).output().expect("it runs");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
        assert!(stderr.starts_with("rdma-mesh: ") && stderr.contains(words), "no {words:?} in {stderr}");
    };
    fails(&[], "give --rank with --hosts or --count");
    fails(&["--rank", "4", "--hosts", "a,b"], "rank 4 of 2: the last one is 1");
    fails(&["--rank", "1", "--ranks", "/nowhere"], "--ranks /nowhere");
    let port = free_port().to_string();
    let alone = ["--rank", "1", "--hosts", "127.0.0.1,b", "-p", &port, "--patience", "1"];
    fails(&alone, "no rank 0 at 127.0.0.1");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    fails(&["--rank", "0", "--hosts", "127.0.0.1,b", "--bind", "127.0.0.1", "-p", &port], "choose another with --port");
}

#[test]
fn the_ranks_of_another_run_are_refused() {
    let json = json_file("another");
    let (port, args) = (free_port().to_string(), ["--patience", AWAY, "--json"]);
    let hosts = |count| vec!["127.0.0.1"; count].join(",");
    let mut first = command(&["--hosts", &hosts(2), "--rank", "0", "-p", &port]);
    let mut first = first.args(args).arg(&json).spawn().expect("it starts");
    let output = command(&["--hosts", &hosts(3), "--rank", "1", "-p", &port]).output().expect("it runs");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && stderr.contains("this run has 2 ranks"), "{stderr}");
    assert_eq!(first.wait().expect("a child").code(), Some(1));
}

/// A false rank 1, which reports figures that it has not measured, and an address that is not its
/// own.
struct Liar {
    to: SocketAddr,
    named: SocketAddr,
}

impl Liar {
    fn join(&self, cx: &mut Context<'_>) {
        let hello = Hello { rank: 1, ranks: 2, purpose: Purpose::Control };
        cx.connect_with(self.to, ConnectOptions::new().private_data(hello.encode())).expect("it connects");
    }
}

impl Handler for Liar {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let (host, provider, device) = ("liar".to_owned(), "iwarp".to_owned(), String::new());
        let (address, port) = (Some(self.named.ip()), self.named.port());
        let entry = Entry { host, address, port, provider, device, processors: None };
        cx.send(conn, &write(&RankReport::Joined(entry))).expect("room");
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if let Ok(Order::Connect { .. }) = serde_json::from_slice(&message) {
            let heard = vec![ReceivedLoad { from: 0, messages: 1, gbit: 1e308, errors: 0, complete: true }];
            cx.send(conn, &write(&RankReport::Loaded { heard, memory_kib: 1 })).expect("room");
        }
    }
    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        cx.stop();
    }
    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: ConnectError) {
        // The connect failed because rank 0 does not listen yet, so it is retried.
        thread::sleep(Duration::from_millis(50));
        self.join(cx);
    }
}

#[test]
fn a_rank_with_figures_that_cannot_be_is_a_row() {
    let json = json_file("liar");
    let args = [QUICK, &["--patience", "10"]].concat();
    let mut ranks = Ranks::start(1, 2, &args, &json);
    let to = format!("127.0.0.1:{}", ranks.port).parse().expect("an address");
    let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp)).expect("a reactor");
    let elsewhere = TcpListener::bind("127.0.0.9:0").expect("an address of this host");
    let mut liar = Liar { to, named: elsewhere.local_addr().expect("an address") };
    liar.join(&mut reactor.context());
    reactor.run(&mut liar).expect("it runs");
    let told = ranks.rank_0(&json);
    assert_eq!(told.code, Some(1), "{}", told.stdout);
    assert!(told.stdout.contains("rank 1 on liar is gone: it reports 1e308 Gbit/s"), "{}", told.stdout);
    assert!(!told.json.to_string().contains("00000000"), "{}", told.json);
    // Rank 0 has connected to the address from which the false rank joined, and not to the address
    // `named` in its report.
    elsewhere.set_nonblocking(true).expect("set");
    assert_eq!(elsewhere.accept().expect_err("no connection").kind(), std::io::ErrorKind::WouldBlock);
}
