//! Tests of `raw-datagram` against itself over the embedded provider, and with invalid arguments. `tests/vm/interop.sh` runs it against
//! other programs.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod patience;

use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};

use patience::PATIENCE;

fn start(args: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_raw-datagram"));
    let limit = PATIENCE.as_secs().to_string();
    command.args(args.split_whitespace()).args(["--provider", "iwarp", "--timeout", &limit]).env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs two programs, and waits for both. The second one starts when the first one has printed a line. In its arguments, `ADDR` is
/// replaced by the last word of that line.
fn exchange(first: &str, second: &str) {
    let mut one = start(first);
    let mut stdout = BufReader::new(one.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    let address = line.split_whitespace().next_back().unwrap_or_default();
    let other = start(&second.replace("ADDR", address)).wait_with_output().unwrap();
    assert!(other.status.success(), "{first} / {second}: {}", String::from_utf8_lossy(&other.stderr));
    let one = one.wait_with_output().unwrap();
    assert!(one.status.success(), "{first} / {second}: {}", String::from_utf8_lossy(&one.stderr));
}

/// The test sends few and small datagrams, so that no socket buffer overflows and loses some of them.
#[test]
fn datagrams_go_there_and_back() {
    exchange("server 127.0.0.1 -p 0 -n 50 -s 1024", "client ADDR -n 50 -s 1024 --verify");
    exchange("server ::1 -p 0", "client ADDR --verify");
    // As on devices, datagrams of all ports of an address use the same UDP port.
    let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    exchange(
        &format!("server 127.0.0.1 -p 7 --udp-port {port}"),
        &format!("client ADDR --bind 127.0.0.2 --udp-port {port} --verify"),
    );
}

/// The address space of the client is limited to 4 GiB, and its datagrams together are longer than that. So the client can succeed only if
/// it does not make all of them in advance. It ends at its time limit, because nobody answers that many.
#[test]
fn the_memory_of_a_client_does_not_depend_on_its_count() {
    let mut server = start("server 127.0.0.1 -p 0 -n 4294967295 -s 4096");
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.split_whitespace().next_back().unwrap_or_default();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v 4194304 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_raw-datagram")]);
    command.args(["client", address]);
    command.args("-n 4294967295 -s 4096 --provider iwarp --timeout 1".split_whitespace()).env_remove("RUST_LOG");
    let output = command.output().unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.starts_with("raw-datagram: it took longer than --timeout: "), "{stderr}");
}

#[test]
fn a_group_hears() {
    // Other processes of the host, which run this test as well, use other groups.
    let [.., high, low] = std::process::id().to_be_bytes();
    let group = format!("239.{high}.{low}.61 --bind 127.0.0.1 -n 20");
    exchange(&format!("receive {group}"), &format!("send {group}"));
}

#[test]
fn what_goes_wrong_is_one_line() {
    for (args, words) in [
        ("server 127.0.0.1 --provider iwarp --size 4097", "--size 4097: a datagram is at most 4096 bytes here"),
        ("server 0.0.0.0 --provider iwarp", "no RDMA device: 0.0.0.0 is on none"),
        ("client 127.0.0.1:9 --provider iwarp", "no datagram service at 127.0.0.1:9"),
        ("send 239.1.2.3 --bind 203.0.113.7 --provider iwarp", "cannot listen on 203.0.113.7"),
        ("receive 239.1.2.3", "the following required arguments were not provided"),
        ("receive here --bind 127.0.0.1", "invalid value 'here'"),
        ("server 127.0.0.1 -n 0", "invalid value '0'"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_raw-datagram"));
        let output = command.args(args.split_whitespace()).env_remove("RUST_LOG").output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{args}: {stderr}");
        assert!(stderr.starts_with(&format!("raw-datagram: {words}")), "{args}: {stderr}");
    }
}
