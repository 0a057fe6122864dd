//! `Tls::log_keys` writes TLS secrets to the file that the environment variable `SSLKEYLOGFILE` names, and logs a warning. Each test runs
//! this program again as a separate process, because the variable applies to a whole process.
#![allow(clippy::disallowed_methods, reason = "a test of processes")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;

use rdma_reactor::{Config, ConnectError, ConnectionId, Context, Handler, ProviderChoice, Reactor, Security, Tls};
use rdma_reactor_tests::identities::Authority;
use rdma_reactor_tests::patience::patient;

/// The variable that says which case a separate process must run.
const CASE: &str = "KEYLOG_CASE";

/// A program that stops its reactor when a connection is established.
struct Brief;

impl Handler for Brief {
    fn on_connect(&mut self, cx: &mut Context<'_>, _: ConnectionId) {
        cx.stop();
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        panic!("{error}");
    }
}

/// The test that a separate process runs: a server and a client connect over TLS.
#[test]
fn one_connection() {
    let case = std::env::var(CASE).unwrap_or_default();
    env_logger::Builder::new().filter_level(log::LevelFilter::Warn).init();
    let authority = Authority::new();
    let tls = Tls::mutual(&authority.identity("node"), authority.pem().as_bytes()).expect("settings");
    let tls = tls.server_name("node").expect("a name");
    let tls = if case == "asked" { tls.log_keys() } else { tls };
    let config = patient(Config::default().provider(ProviderChoice::Iwarp).security(Security::Tls(tls)));
    let mut server = Reactor::new(config.clone()).expect("a reactor");
    let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a port");
    let address = server.context().listeners().local_address(listener).expect("it listens");
    let mut client = Reactor::new(config).expect("a reactor");
    client.context().connect(address).expect("an attempt");
    let remote = server.handle();
    let (done, is_done) = channel();
    let serving = std::thread::spawn(move || {
        server.run(&mut Brief).expect("turns");
        // The server runs further turns, because the client may still wait for the last part of the handshake.
        while is_done.try_recv().is_err() {
            server.turn(&mut Brief, std::time::Duration::from_millis(10)).expect("a turn");
        }
    });
    client.run(&mut Brief).expect("turns");
    done.send(()).expect("a server");
    remote.wake();
    serving.join().expect("the server ends");
}

/// Runs `one_connection` in a separate process, with `SSLKEYLOGFILE` set to `file`. Returns the lines that the process logged.
fn run(case: &str, file: Option<&Path>) -> String {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["--exact", "one_connection", "--nocapture"]).env(CASE, case).env_remove("SSLKEYLOGFILE");
    if let Some(file) = file {
        command.env("SSLKEYLOGFILE", file);
    }
    let output = command.output().expect("a process");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn path(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("keylog-{}-{name}", std::process::id()));
    let _ = fs::remove_file(&path);
    path
}

#[test]
fn secrets_are_written_if_both_the_program_and_its_user_ask_for_it() {
    let file = path("asked");
    let log = run("asked", Some(&file));
    let warning = format!("the secrets of TLS connections are written to {}", file.display());
    assert_eq!(log.matches(&warning).count(), 1, "{log}");
    let text = fs::read_to_string(&file).expect("a file");
    fs::remove_file(&file).expect("it is there");
    for label in [
        "CLIENT_HANDSHAKE_TRAFFIC_SECRET",
        "SERVER_HANDSHAKE_TRAFFIC_SECRET",
        "CLIENT_TRAFFIC_SECRET_0",
        "SERVER_TRAFFIC_SECRET_0",
    ] {
        // Both sides are in the same process, so each secret is written twice.
        let lines: Vec<_> = text.lines().filter(|line| line.split(' ').next() == Some(label)).collect();
        assert!(lines.len() == 2 && lines[0] == lines[1], "{label}: {text}");
        let words: Vec<_> = lines[0].split(' ').collect();
        assert!(words.len() == 3 && words[1].len() == 64 && words[2].len() == 64, "{}", lines[0]);
        assert!(words[1..].iter().all(|word| word.bytes().all(|byte| byte.is_ascii_hexdigit())), "{}", lines[0]);
    }
}

#[test]
fn nothing_is_written_if_one_of_them_does_not() {
    let file = path("not-asked");
    for (case, file) in [("not asked", Some(&*file)), ("asked", None)] {
        let log = run(case, file);
        assert!(!log.contains("SSLKEYLOGFILE"), "{log}");
    }
    assert!(!file.exists());
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let log = run("asked", Some(Path::new("/nowhere/keys")));
    assert!(log.contains("no secrets are written to /nowhere/keys: No such file"), "{log}");
}
