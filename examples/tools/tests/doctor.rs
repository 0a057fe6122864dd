//! Tests of `rdma-doctor` on simulated machines. Such a machine is a directory of files, see `data/doctor`.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod patience;

use std::fs;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::libc::O_NONBLOCK;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use patience::PATIENCE;
use serde_json::Value;

/// A simulated machine: a copy of one of the two machines in `data/doctor`. A test can change the copy.
struct Machine(PathBuf);

impl Machine {
    fn new(kind: &str, name: &str) -> Self {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/doctor").join(kind);
        let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor").join(name);
        let _ = fs::remove_dir_all(&to);
        copy(&from, &to);
        Self(to)
    }

    fn write(&self, path: &str, text: &str) -> &Self {
        fs::write(self.0.join(path), text).unwrap();
        self
    }

    /// Changes the user of the simulated machine to a user without privileges.
    fn ordinary(&self) -> &Self {
        let status = "Uid:\t4242 4242 4242 4242\nGid:\t4242 4242 4242 4242\nGroups:\t\nCapEff:\t0000000000000000\n";
        self.write("proc/self/status", &status.replace(' ', "\t"))
    }

    fn mode(&self, path: &str, mode: u32) -> &Self {
        fs::set_permissions(self.0.join(path), fs::Permissions::from_mode(mode)).unwrap();
        self
    }

    fn open_to_all(&self) -> &Self {
        for node in ["rdma_cm", "uverbs0", "uverbs1"] {
            self.mode(&format!("dev/infiniband/{node}"), 0o666);
        }
        self
    }

    fn doctor(&self, args: &[&str]) -> Output {
        run(&[&["--root", self.0.to_str().unwrap()], args].concat())
    }

    fn lines(&self, args: &[&str]) -> Vec<String> {
        let output = self.doctor(args);
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{output:?}");
        let lines: Vec<_> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
        lines.iter().filter_map(|line| line.split_once("; fix: ")).for_each(|(_, fix)| can_be_pasted(fix));
        lines
    }
}

/// Checks that a fix consists of commands, and of nothing else.
#[track_caller]
fn can_be_pasted(fix: &str) {
    const COMMANDS: [&str; 12] = [
        "apt-get",
        "cargo",
        "chmod",
        "dmesg",
        "dnf",
        "ibstat",
        "ip",
        "modprobe",
        "rdma",
        "systemctl",
        "ulimit",
        "usermod",
    ];
    let checked = Command::new("bash").args(["-n", "-c", fix]).output().unwrap();
    assert!(checked.status.success(), "{fix}: {}", String::from_utf8_lossy(&checked.stderr));
    let mut commands = fix.split(['&', '|', ';']).filter(|command| !command.is_empty());
    let is_command = |command: &str| command.split_whitespace().next().is_some_and(|name| COMMANDS.contains(&name));
    assert!(commands.all(is_command) && !fix.contains([',', '`']), "{fix}");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rdma-doctor")).args(args).env_remove("RUST_LOG").output().unwrap()
}

/// Checks that exactly one line has this severity, this topic and these words.
#[track_caller]
fn one(lines: &[String], level: &str, topic: &str, words: &[&str]) {
    let start = format!("{level:<7}  {topic:<10}  ");
    let matches = |line: &&String| line.starts_with(&start) && words.iter().all(|word| line.contains(word));
    assert_eq!(lines.iter().filter(matches).count(), 1, "{level} {topic} {words:?} in {lines:#?}");
}

#[track_caller]
fn problems(lines: &[String], expected: usize) {
    assert_eq!(lines.iter().filter(|line| line.starts_with("problem ")).count(), expected, "{lines:#?}");
}

#[test]
fn a_machine_without_rdma_has_no_problem() {
    let lines = Machine::new("none", "none").lines(&["192.0.2.7", "198.51.100.1"]);
    problems(&lines, 0);
    one(&lines, "ok", "embedded", &["works"]);
    one(&lines, "ok", "shm", &["auto uses shared memory with processes of this host and this user"]);
    one(&lines, "note", "device", &["modprobe -a rdma_rxe rdma_ucm && rdma link add rxe0 type rxe netdev eth0"]);
    one(
        &lines,
        "note",
        "module",
        &["not loaded: ib_core, ib_uverbs", "modprobe -a ib_core ib_uverbs rdma_cm rdma_ucm"],
    );
    one(&lines, "note", "module", &["available, not loaded: rdma_rxe", "modprobe -a rdma_rxe"]);
    one(&lines, "note", "module", &["the kernel 6.1.0-9-amd64 has no siw", "linux-modules-extra"]);
    one(&lines, "note", "library", &["libibverbs, librdmacm", "apt-get install"]);
    one(&lines, "ok", "address", &["auto uses iwarp for 192.0.2.7 (local address, on eth0)"]);
    one(&lines, "ok", "address", &["auto uses iwarp for 198.51.100.1: no RDMA device has a route there"]);
    assert!(lines.last().unwrap().starts_with("0 problems, "));
}

/// A container does not see the modules of its host. The fix is still a command, and the words
/// before it say where to run it.
#[test]
fn a_container_gets_commands_for_its_host() {
    let machine = Machine::new("none", "container");
    fs::remove_dir_all(machine.0.join("lib")).unwrap();
    let lines = machine.lines(&[]);
    let host = "no modules for 6.1.0-9-amd64 are here, as in a container: run it on the host; fix: modprobe -a ";
    one(&lines, "note", "module", &["not loaded: ib_core", host]);
    one(&lines, "note", "device", &[host, "siw rdma_ucm && rdma link add siw0 type siw netdev eth0"]);
}

#[test]
fn software_devices_are_described() {
    let machine = Machine::new("software", "software");
    let lines = machine.lines(&["10.77.1.1"]);
    problems(&lines, 0);
    one(&lines, "ok", "device", &["siw0 port 1: iWARP in software, ACTIVE, 10 Gb/sec", "w0 with 10.77.1.1, fd77:1::1"]);
    one(&lines, "ok", "device", &["rxe0 port 1: RoCE in software", "GID fe80:", "and 1 more; v0 with 10.77.2.1"]);
    one(&lines, "ok", "module", &["loaded: ib_core, ib_uverbs, rdma_cm, rdma_ucm, siw, rdma_rxe"]);
    one(&lines, "ok", "permission", &["rdma_cm", "uverbs0", "uverbs1"]);
    one(&lines, "ok", "memlock", &["not limited"]);
    one(&lines, "ok", "library", &["libibverbs 1.14.44.0, librdmacm 1.3.44.0"]);
    if cfg!(feature = "verbs") {
        one(&lines, "ok", "address", &["auto uses verbs for 10.77.1.1", "siw0"]);
    } else {
        one(&lines, "note", "address", &["auto uses iwarp for 10.77.1.1", "siw0", "cargo build --release"]);
    }
}

/// A flag that stops a thread. Dropping this value sets the flag, even if a check of the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A thread changes the counters of a device until the program has reported the change.
#[test]
fn hardware_counters_that_move_are_named() {
    let machine = Machine::new("software", "counters");
    let counters = machine.0.join("sys/class/infiniband/rxe0/ports/1/hw_counters");
    fs::create_dir_all(&counters).unwrap();
    let put = |name: &str, value: u64| {
        fs::write(counters.join("../new"), value.to_string()).unwrap();
        fs::rename(counters.join("../new"), counters.join(name)).unwrap();
    };
    for (name, value) in [("sent_pkts", 7), ("completer_retry_err", 3), ("rcvd_seq_err", 5), ("lifespan", 10)] {
        put(name, value);
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = StopOnDrop(&over);
        scope.spawn(|| {
            let mut value = 7;
            while !over.0.load(Ordering::Relaxed) {
                value += 1;
                ["sent_pkts", "completer_retry_err", "lifespan"].into_iter().for_each(|name| put(name, value));
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let until = Instant::now() + PATIENCE;
        let seen = loop {
            let lines = machine.lines(&["--watch", "0.2"]);
            // The thread changes one counter after the other, so a report may have only one of the changes.
            let is_told = |counter: &str| lines.iter().any(|line| line.contains(counter));
            if ["sent_pkts +", "completer_retry_err +"].into_iter().all(is_told) {
                break lines;
            }
            assert!(Instant::now() < until, "no change was reported: {lines:#?}");
        };
        let json: Value = serde_json::from_slice(&machine.doctor(&["--watch", "0.2", "--json"]).stdout).unwrap();
        one(
            &seen,
            "note",
            "counters",
            &["rxe0 in 0.2 s: sent again, since no acknowledgement came", "completer_retry_err +"],
        );
        one(&seen, "ok", "counters", &["rxe0 in 0.2 s: sent_pkts +"]);
        one(&seen, "note", "counters", &["siw0 has no hw_counters"]);
        assert!(!seen.iter().any(|line| line.contains("lifespan") || line.contains("rcvd_seq_err")), "{seen:#?}");
        let moved = &json["moved"];
        assert!(
            moved.as_array().is_some_and(|all| all.iter().any(|one| one["device"] == "siw0" && one["by"].is_null())),
            "{json:#}"
        );
        assert!(moved.as_array().is_some_and(|all| all.iter().any(|one| one["by"]["lifespan"].is_null())), "{json:#}");
    });
}

/// Repeats a call until it returns a value.
#[track_caller]
fn wait_for<T>(mut call: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = call() {
            return value;
        }
        assert!(Instant::now() < until, "too slow");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes a FIFO instead of a counter. The program stops in each of its two reads of the counters, until a process writes to the FIFO.
fn fifo(machine: &Machine) -> PathBuf {
    let counters = machine.0.join("sys/class/infiniband/rxe0/ports/1/hw_counters");
    fs::create_dir_all(&counters).unwrap();
    let counter = counters.join("sent_pkts");
    assert!(Command::new("mkfifo").arg(&counter).status().unwrap().success());
    counter
}

/// Opens a FIFO for writing. Returns `None` if no process reads it.
fn open(fifo: &Path) -> Option<fs::File> {
    fs::OpenOptions::new().write(true).custom_flags(O_NONBLOCK).open(fifo).ok()
}

/// The program reads a counter from a FIFO that has no content yet, so it is still running when the signal arrives.
#[test]
fn a_signal_while_counters_are_watched_ends_it_with_status_130() {
    let machine = Machine::new("software", "signal");
    let counter = fifo(&machine);
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_rdma-doctor"));
        doctor.args(["--root", machine.0.to_str().unwrap(), "--watch", "3600"]).env_remove("RUST_LOG");
        let mut doctor = doctor.stdout(Stdio::null()).spawn().unwrap();
        let fifo = wait_for(|| open(&counter));
        kill(Pid::from_raw(doctor.id() as i32), signal).unwrap();
        let status = wait_for(|| doctor.try_wait().unwrap());
        assert_eq!(status.code(), Some(130), "{signal}: {status}");
        drop(fifo);
    }
}

/// The program starts with SIGHUP ignored, as under `nohup`. It must finish although SIGHUP arrives
/// meanwhile.
#[test]
fn a_hangup_that_is_ignored_at_the_start_stays_ignored() {
    let machine = Machine::new("software", "hangup");
    let counter = fifo(&machine);
    let mut doctor = Command::new("sh");
    doctor.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_rdma-doctor")]);
    doctor.args(["--root", machine.0.to_str().unwrap(), "--watch", "0.2"]).env_remove("RUST_LOG");
    let mut doctor = doctor.stdout(Stdio::null()).spawn().unwrap();
    let fifo = wait_for(|| open(&counter));
    kill(Pid::from_raw(doctor.id() as i32), Signal::SIGHUP).unwrap();
    drop(fifo);
    // Each writer that closes the FIFO ends one read of the program.
    let status = wait_for(|| {
        drop(open(&counter));
        doctor.try_wait().unwrap()
    });
    assert_eq!(status.code(), Some(0), "{status}");
}

#[test]
fn json_says_the_same() {
    let output = Machine::new("software", "json").doctor(&["--json", "10.77.2.1"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["embedded"], true);
    assert_eq!(report["verbs"], cfg!(feature = "verbs"));
    assert_eq!(report["devices"][0]["name"], "rxe0");
    assert_eq!(report["devices"][0]["ports"][0]["gids"][1]["kind"], "RoCE v2");
    assert_eq!(report["devices"][1]["ports"][0]["netdev"], "w0");
    assert_eq!(report["devices"][1]["node"], "uverbs0");
    assert_eq!(report["addresses"][0]["device"], "rxe0");
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.iter().all(|finding| finding["level"] != "problem"), "{findings:#?}");
}

#[test]
fn device_files_without_permission_are_a_problem_each() {
    let machine = Machine::new("software", "denied");
    machine.ordinary().open_to_all().mode("dev/infiniband/uverbs1", 0o600).mode("dev/infiniband/rdma_cm", 0o644);
    let lines = machine.lines(&[]);
    problems(&lines, 2);
    one(&lines, "ok", "permission", &["uverbs0 can be read and written"]);
    one(&lines, "problem", "permission", &["/dev/infiniband/uverbs1 (mode 600", "fix: chmod 666", "uverbs1"]);
    one(&lines, "problem", "permission", &["/dev/infiniband/rdma_cm (mode 644", "fix: "]);
    fs::remove_file(machine.0.join("dev/infiniband/uverbs0")).unwrap();
    one(&machine.lines(&[]), "problem", "permission", &["uverbs0 (for siw0) is missing", "modprobe ib_uverbs"]);
}

#[test]
fn without_rdma_cm_roce_can_connect_by_exchange() {
    let machine = Machine::new("software", "exchange");
    machine.ordinary().open_to_all().mode("dev/infiniband/rdma_cm", 0o644);
    let lines = machine.lines(&[]);
    problems(&lines, 1);
    one(&lines, "note", "exchange", &["without rdma_cm, rxe0 can connect by exchange", "--exchange"]);
    assert!(!lines.iter().any(|line| line.contains("exchange") && line.contains("siw0")), "{lines:#?}");
}

#[test]
fn little_lockable_memory_is_a_problem_unless_privileged() {
    let machine = Machine::new("software", "memlock");
    machine.open_to_all().write("proc/self/limits", "Max locked memory         8388608   8388608   bytes\n");
    one(&machine.lines(&[]), "ok", "memlock", &["ulimit -l is 8192 KiB", "CAP_IPC_LOCK"]);
    let lines = machine.ordinary().lines(&[]);
    problems(&lines, 1);
    one(&lines, "problem", "memlock", &["ulimit -l is 8192 KiB: at most 8 connections", "; fix: ulimit -l unlimited"]);
    machine.write("proc/self/limits", "Max locked memory         1073741824   unlimited   bytes\n");
    one(&machine.lines(&[]), "ok", "memlock", &["1048576 KiB", "1024 connections"]);
}

#[test]
fn what_is_down_or_unfinished_is_a_problem() {
    let machine = Machine::new("software", "down");
    machine.write("sys/class/infiniband/rxe0/ports/1/state", "1: DOWN\n");
    machine.write("addresses", "lo 127.0.0.1\n").write("proc/modules", "ib_core 1 0\nib_uverbs 1 0\nsiw 1 0\n");
    fs::remove_file(machine.0.join("etc/libibverbs.d/siw.driver")).unwrap();
    let lines = machine.lines(&["10.77.2.1"]);
    problems(&lines, 4);
    one(&lines, "problem", "device", &["rxe0 port 1 is DOWN", "fix: ip link set v0 up"]);
    one(&lines, "problem", "device", &["siw0 port 1", "w0 has no address", "ip addr add ADDRESS/24 dev w0"]);
    one(&lines, "problem", "module", &["not loaded: rdma_cm, rdma_ucm", "modprobe"]);
    one(&lines, "problem", "library", &["libibverbs has no driver siw: it does not see siw0", "apt-get install"]);
    one(&lines, "ok", "address", &["auto uses iwarp for 10.77.2.1"]);
}

#[test]
fn adapters_are_described_and_nonsense_is_data() {
    let machine = Machine::new("software", "adapter");
    let rxe = machine.0.join("sys/class/infiniband/rxe0");
    fs::create_dir(rxe.join("device")).unwrap();
    std::os::unix::fs::symlink("../../bus/pci/drivers/mlx5_core", rxe.join("device/driver")).unwrap();
    machine.write("sys/class/infiniband/rxe0/fw_ver", "16.35.2000\n");
    machine.write("sys/class/infiniband/rxe0/ports/1/link_layer", "InfiniBand\n");
    machine.write("sys/class/infiniband/rxe0/ports/1/state", "2: INIT\n");
    machine.write("sys/class/infiniband/siw0/node_type", "9: \u{1b}[31mTOASTER\n");
    machine.write("sys/class/infiniband/siw0/ports/1/rate", "");
    let lines = machine.lines(&[]);
    one(
        &lines,
        "problem",
        "device",
        &["rxe0 port 1 is INIT (InfiniBand (mlx5_core, firmware 16.35.2000) on InfiniBand)", "opensm"],
    );
    one(&lines, "ok", "device", &["siw0 port 1:  [31mTOASTER in software"]);
    one(&lines, "problem", "library", &["no driver mlx5"]);
}

#[test]
fn this_machine_can_be_looked_at() {
    let output = run(&["--json", "127.0.0.1", "0.0.0.0", "::1"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["addresses"].as_array().map(Vec::len), Some(3), "{report:#}");
}

#[test]
fn bad_usage_is_one_line_and_status_1() {
    for args in [&["--jsn"][..], &["127.0.0.1:x"], &["--root"]] {
        let output = run(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(stderr.starts_with("rdma-doctor: ") && stderr.lines().count() == 1, "{stderr}");
    }
}
