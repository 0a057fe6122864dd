//! Tests of all programs with bad inputs: a table of command lines, each with words of its error.
//! Also tests with a standard output that cannot be written. Each program has more such tests.
#![allow(clippy::disallowed_methods, reason = "tests of programs, not of the library")]

#[allow(dead_code, reason = "here a shell starts the programs")]
mod process;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use process::address;
use process::patience::PATIENCE;

/// Returns a command that runs `line` in a shell, in which the programs can be called by their
/// names.
fn shell(line: &str) -> Command {
    let programs = Path::new(env!("CARGO_BIN_EXE_kv")).parent().expect("a folder").display();
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", &PATIENCE.as_secs().to_string(), "bash", "-c"]);
    command.arg(format!("PATH={programs}:$PATH; {line}")).stdin(Stdio::null()).env_remove("RUST_LOG");
    command
}

fn run(line: &str) -> Output {
    shell(line).output().expect("it runs")
}

/// Checks that a command line fails with status 1 and one line on standard error, which begins with
/// `name` and has these words.
#[track_caller]
fn failed_with(line: &str, name: &str, words: &str) {
    process::failed_with(&run(line), name, words);
}

#[test]
fn each_mistake_is_one_line_with_its_cure() {
    for (line, words) in [
        (
            "kv get 127.0.0.1:1 k",
            "no connection: connection refused: nothing listens there; is `kv server` running there?",
        ),
        ("kv get '' k", "unknown host \"\""),
        ("kv get '[fe80::1]:7' k", "fe80::1 is link-local: name its interface as well, as in fe80::1%eth0"),
        ("kv server --bind 192.0.2.1 -p 7", "cannot listen on 192.0.2.1:7: Cannot assign requested address"),
        ("kv server -p 99999", "invalid value '99999' for '--port <PORT>'"),
        ("kv get nowhere.invalid k", "unknown host \"nowhere.invalid\""),
        ("kv get '[fe80::1%nowhere]:7' k", "unknown host \"[fe80::1%nowhere]:7\""),
        ("kv get 127.0.0.1:x k", "\"x\" in \"127.0.0.1:x\" is not a port: give 0 to 65535"),
        ("kv get 127.0.0.1 $'\\377'", "invalid UTF-8"),
        ("kv server --max-value 0", "give 1 to 16M bytes, such as 64, 4K or 1M"),
        ("kv server --slots 0", "invalid value '0' for '--slots <N>'"),
        ("kv bench 127.0.0.1 --readers 0", "invalid value '0' for '--readers <N>'"),
        ("raw-echo client fe80::1", "fe80::1 is link-local: name its interface as well, as in fe80::1%eth0"),
        ("rcp /etc/hosts", "the following required arguments were not provided: <HOST[:NAME]>; --help explains"),
        ("rcp /etc 127.0.0.1", "/etc: a directory, not a file: give -r to copy its content"),
        ("rcp /nowhere 127.0.0.1", "/nowhere: No such file or directory"),
        ("rcp server /proc", "no file can be created there: change its permissions, or name another directory"),
        (
            "rdma-pingpong client 127.0.0.1:1",
            "nothing listens on 127.0.0.1:1: start `rdma-pingpong server` there, or check the port",
        ),
        ("rdma-pingpong client fe80::1", "fe80::1 is link-local: name its interface as well, as in fe80::1%eth0"),
        ("rcp /etc/hosts '[fe80::1]'", "fe80::1 is link-local: name its interface as well, as in fe80::1%eth0"),
        ("rdma-pingpong demo -s 1T", "give 1 to 1G bytes, such as 64, 4K or 1M"),
        ("rdma-pingpong demo -s 0", "give 1 to 1G bytes, such as 64, 4K or 1M"),
        ("rdma-pingpong demo -n 0", "invalid value '0' for '--iters <N>'"),
        ("rdma-pingpong demo -d nodev0", "no RDMA device nodev0"),
        ("rdma-pingpong server -p 99999", "invalid value '99999' for '--port <PORT>'"),
        ("rdma-pingpong client 127.0.0.1 --frobnicate", "unexpected argument '--frobnicate' found"),
        ("rdma-mesh", "which rank is this? give --rank with --hosts or --count"),
        ("rdma-mesh --rank 0", "how many ranks are there? give --count"),
        ("rdma-mesh --rank 0 --count 1", "invalid value '1' for '--count <N>': 1 is not in 2..=10000"),
        ("rdma-mesh --rank 0 --hosts a,b --count 3", "2 hosts and --count 3: name one host per rank"),
        ("rdma-mesh --rank 1 --count 2", "where is rank 0? give --root with its host name or address"),
        ("rping-client -a fe80::1", "fe80::1 is link-local: name its interface as well, as in fe80::1%eth0"),
        ("stream-bench -s fe80::1", "fe80::1 is link-local: name its interface as well, as in fe80::1%eth0"),
        ("stream-pipe client fe80::1", "fe80::1 is link-local: name its interface as well, as in fe80::1%eth0"),
        ("valkey-rdma fe80::1", "fe80::1 is link-local: name its interface as well, as in fe80::1%eth0"),
        ("valkey-rdma 127.0.0.1:1", "no connection to 127.0.0.1:1: connection refused: nothing listens there"),
        (
            "rdma-pingpong server --bind fe80::1",
            "fe80::1 is link-local: name its interface as well, as in fe80::1%eth0",
        ),
        ("stream-bench -s 127.0.0.1:1", "nothing listens there; is `stream-bench` running there?"),
        ("stream-pipe client 127.0.0.1:1", "nothing listens there; is `stream-pipe server` running there?"),
    ] {
        failed_with(line, line.split(' ').next().expect("a program"), words);
    }
    // Some programs need more descriptors than others before they have a reactor.
    let words = "Too many open files (os error 24): raise the limit of open files (ulimit -n)";
    failed_with("ulimit -n 6; kv server -p 0", "kv", words);
}

/// If a file with keys is missing or wrong, the error names the file and its flag.
#[test]
fn files_with_keys_that_cannot_be_used_are_named() {
    for (flags, words) in [
        ("--tls-ca /nowhere", "--tls-ca /nowhere: No such file or directory"),
        ("--tls-cert /nowhere --tls-key /nowhere", "--tls-cert /nowhere: No such file or directory"),
        ("--tls-cert /dev/null", "--tls-cert and --tls-key go together, and --tls-name needs --tls-ca"),
        ("--tls-name node", "--tls-cert and --tls-key go together, and --tls-name needs --tls-ca"),
        ("--tls-ca /dev/null", "--tls-ca /dev/null: the certificate authorities: no certificate in PEM: give one"),
        (
            "--tls-cert /dev/null --tls-key /etc/hosts",
            "--tls-cert /dev/null, --tls-key /etc/hosts: the certificates: no certificate in PEM: give one",
        ),
        ("--psk-file /nowhere", "--psk-file /nowhere: No such file or directory"),
        ("--psk-file /dev/null", "--psk-file /dev/null: there is no pre-shared key: write a line NAME:64-HEX-DIGITS"),
        ("--psk-file <(echo a:12)", "line 1 of the keys: write NAME:64-HEX-DIGITS"),
        ("--psk-file <(printf 'a:%064d' 0)", "use 32 random ones, as `openssl rand -hex 32` prints them"),
        ("--psk-file <(printf '\\377')", ": not text"),
    ] {
        failed_with(&format!("kv get 127.0.0.1:1 k {flags}"), "kv", words);
    }
}

/// Mistakes that a client cannot detect without its server.
#[test]
fn a_server_is_not_what_its_client_expects() {
    let server = Server::start("kv server --bind 127.0.0.1 -p 0");
    let (address, port) = (&server.1, server.1.rsplit_once(':').expect("a port").1);
    for (line, words) in [
        (
            "rdma-pingpong client ADDR --psk-file <(printf 'a:%064d' 1)",
            "the peer takes plain connections: leave out the flags",
        ),
        ("kv get ADDR missing", "no such key"),
        ("kv put ADDR '' v", "a key of 0 bytes: give 1 to 64"),
        ("kv server --bind 127.0.0.1 -p PORT", "Address already in use"),
        ("rdma-pingpong client ADDR", "violated the protocol: an unexpected message of 32 bytes"),
        ("rcp /etc/hosts 127.0.0.1 -p PORT", "the peer is not rcp server of this version"),
    ] {
        let line = line.replace("ADDR", address).replace("PORT", port);
        failed_with(&line, line.split(' ').next().expect("a program"), words);
    }
}

const LOST: &str = "standard output: No space left on device";

#[test]
fn text_that_cannot_be_written_is_a_failure() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin").read_dir().expect("the programs");
    let paths: Vec<_> = sources.map(|entry| entry.expect("an entry").path()).collect();
    assert!(paths.len() > 10, "{paths:?}");
    for name in paths.iter().map(|path| path.file_stem().and_then(|stem| stem.to_str()).expect("a name")) {
        failed_with(&format!("{name} --help > /dev/full"), name, LOST);
        // A reader that closes the pipe early causes no failure.
        let read = run(&format!("set -o pipefail; {name} --help | true"));
        assert_eq!((read.status.code(), &read.stderr[..]), (Some(0), &b""[..]), "{name}: {read:?}");
    }
}

/// A server, and its address. Dropping this value ends the server.
struct Server(Child, String);

impl Server {
    fn start(line: &str) -> Self {
        let mut child = shell(&format!("exec {line}")).stdout(Stdio::piped()).spawn().expect("it starts");
        let address = address(child.stdout.take().expect("piped"));
        let address = address.split(' ').next().expect("an address").to_owned();
        Self(child, address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        process::terminate(&mut self.0);
    }
}

/// Checks that a command line fails if standard output is full, and that its last line on standard
/// error reports this.
#[track_caller]
fn loses(line: &str) {
    let output = run(&format!("{line} > /dev/full"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().last().unwrap_or_default();
    assert!(output.status.code() == Some(1) && last.contains(LOST), "{line}: {:?}: {stderr}", output.status);
}

#[test]
fn results_that_cannot_be_written_are_a_failure() {
    loses("rdma-doctor");
    loses("rdma-doctor --json");
    loses("rdma-pingpong demo -n 10 --provider iwarp");
    loses("rdma-pingpong demo -n 10 --provider iwarp --json -");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bad-inputs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    for (server, client) in [
        ("kv server --bind 127.0.0.1 -p 0", "kv put ADDR k v && kv get ADDR k"),
        (&format!("rcp server {} --bind 127.0.0.1 -p 0", folder.display()), "rcp /etc/hosts 127.0.0.1 -p PORT"),
        ("raw-echo server --bind 127.0.0.1 -p 0", "raw-echo client ADDR -n 1 -s 16"),
        ("raw-datagram server 127.0.0.1 -p 0 --provider iwarp", "raw-datagram client ADDR -n 1 --provider iwarp"),
        ("rping-server -a 127.0.0.1 -p 0", "rping-client -a ADDR -C 1 --json"),
        ("stream-bench -b 127.0.0.1 -p 0", "stream-bench -s ADDR -I 1 -C 1 -S 64"),
        ("rdma-pingpong server --bind 127.0.0.1 -p 0", "rdma-pingpong client ADDR -n 10"),
    ] {
        let server = Server::start(server);
        let port = server.1.rsplit_once(':').expect("a port").1;
        loses(&client.replace("ADDR", &server.1).replace("PORT", port));
    }
    std::fs::remove_dir_all(&folder).expect("removed");
}
