//! `raw-datagram` without datagrams, and with arguments that make no sense. `tests/vm/interop.sh` runs it with
//! datagrams.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

use std::process::Command;

#[test]
fn what_goes_wrong_is_one_line() {
    for (args, words) in [
        ("server 127.0.0.1 --provider iwarp", "the provider iwarp has no datagrams"),
        ("client 127.0.0.1 --provider iwarp", "the provider iwarp has no datagrams"),
        ("send 239.1.2.3 --bind 127.0.0.1 --provider iwarp", "the provider iwarp has no datagrams"),
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
