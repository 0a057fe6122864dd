//! Tests of programs with certificates and with a pre-shared key, run as a user runs them.
#![allow(clippy::disallowed_methods, reason = "tests of programs, not of the library")]

mod process;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use process::address;

const RCP: &str = env!("CARGO_BIN_EXE_rcp");
const KV: &str = env!("CARGO_BIN_EXE_kv");
const PINGPONG: &str = env!("CARGO_BIN_EXE_rdma-pingpong");

/// A server, and its port. Dropping this value ends the server.
struct Server(Child, String);

impl Server {
    fn start(program: &str, args: &[&str]) -> Self {
        let mut child = process::start(program, args, Stdio::null());
        let address = address(child.stdout.take().expect("piped"));
        let address = address.split(' ').next().expect("an address");
        let port = address.rsplit_once(':').expect("a port").1.to_owned();
        Self(child, port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        process::terminate(&mut self.0);
    }
}

fn keygen(args: &[&str]) -> Output {
    Command::new(PINGPONG).arg("keygen").args(args).output().expect("it starts")
}

/// Makes a directory with the files of `keygen`. Returns its path.
fn keys(test: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("secure-{test}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&root);
    let made = keygen(&[root.to_str().expect("text")]);
    assert!(made.status.success(), "{made:?}");
    root
}

fn file(root: &Path, name: &str) -> String {
    root.join(name).to_str().expect("text").to_owned()
}

/// Returns the flags with which a side uses TLS.
fn tls(root: &Path, side: &str) -> [String; 6] {
    let [cert, key] = ["pem", "key"].map(|kind| file(root, &format!("{side}.{kind}")));
    ["--tls-cert".into(), cert, "--tls-key".into(), key, "--tls-ca".into(), file(root, "ca.pem")]
}

fn words<'a>(words: &[&'a str], flags: &'a [String]) -> Vec<&'a str> {
    words.iter().copied().chain(flags.iter().map(String::as_str)).collect()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn keys_are_for_their_owner_and_are_not_replaced() {
    let root = keys("owner");
    for name in ["ca.pem", "server.pem", "server.key", "client.pem", "client.key", "psk"] {
        let mode = fs::metadata(root.join(name)).expect(name).permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let again = keygen(&[root.to_str().expect("text")]);
    process::failed_with(&again, "rdma-pingpong", "ca.pem");
    let wrong = keygen(&[&file(&root, "b"), "--names", "ümlaut"]);
    process::failed_with(&wrong, "rdma-pingpong", "--names");
}

#[test]
fn a_file_is_copied_for_those_who_belong() {
    let root = keys("copy");
    let (to, source) = (root.join("to"), file(&root, "source"));
    fs::create_dir(&to).expect("a directory");
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| ((at * 7) >> 3) as u8).collect();
    fs::write(&source, &bytes).expect("written");
    let (server_flags, client_flags) = (tls(&root, "server"), tls(&root, "client"));
    let to_text = to.to_str().expect("text");
    let server = Server::start(RCP, &words(&["server", to_text, "--bind", "127.0.0.1", "-p", "0"], &server_flags));
    let mut copy = process::command(RCP, &words(&[&source, "127.0.0.1:copy", "-p", &server.1], &client_flags));
    let copied = copy.env("SSLKEYLOGFILE", root.join("secrets")).output().expect("it ends");
    assert!(copied.status.success(), "{copied:?}");
    assert!(!text(&copied).contains("neither private"), "{copied:?}");
    assert!(fs::read(to.join("copy")).expect("there") == bytes);
    assert_eq!(
        root.join("secrets").exists(),
        cfg!(feature = "keylog"),
        "secrets are written only if the program is built for it"
    );

    let plain = process::run(RCP, &[&source, "127.0.0.1:plain", "-p", &server.1]);
    assert_eq!(plain.status.code(), Some(1));
    process::failed_with(&plain, "rcp", "the peer takes TLS: give --tls-cert, --tls-key and --tls-ca\n");
    // Keys of another certificate authority, which the server does not trust.
    let theirs = keys("theirs");
    let stranger = process::run(RCP, &words(&[&source, "127.0.0.1:strange", "-p", &server.1], &tls(&theirs, "client")));
    assert_eq!(stranger.status.code(), Some(1));
    assert!(text(&stranger).contains("not accepted here"), "{stranger:?}");
    assert!(!to.join("plain").exists() && !to.join("strange").exists());
}

#[test]
fn a_pre_shared_key_is_enough_for_a_cluster() {
    let root = keys("psk");
    let psk = ["--psk-file".to_owned(), file(&root, "psk")];
    let server = Server::start(PINGPONG, &words(&["server", "--bind", "127.0.0.1", "-p", "0"], &psk));
    for op in ["send", "read"] {
        let client = ["client", "127.0.0.1", "-p", &server.1, "-n", "200", "--op", op, "--wait", "event"];
        let measured = process::run(PINGPONG, &words(&client, &psk));
        assert!(measured.status.success(), "{op}: {measured:?}");
    }
    for name in ["cluster", "unknown"] {
        fs::write(root.join("other"), format!("{name}:{}", "0a1b".repeat(16))).expect("written");
        let other = ["--psk-file".to_owned(), file(&root, "other")];
        let client = ["client", "127.0.0.1", "-p", &server.1, "-n", "10", "--wait", "event"];
        let refused = process::run(PINGPONG, &words(&client, &other));
        assert_eq!(refused.status.code(), Some(1));
        let why = "the pre-shared keys differ, or the peer has none of that name";
        assert!(text(&refused).contains(why), "{refused:?}");
    }

    let server = Server::start(KV, &words(&["server", "--bind", "127.0.0.1", "-p", "0"], &psk));
    let stored = process::run(KV, &words(&["put", "127.0.0.1", "key", "value", "-p", &server.1], &psk));
    assert!(stored.status.success() && text(&stored).contains("in the clear"), "{stored:?}");
    let read = process::run(KV, &words(&["get", "127.0.0.1", "key", "-p", &server.1], &psk));
    assert_eq!(String::from_utf8_lossy(&read.stdout), "value\n");

    let plain = Server::start(KV, &["server", "--bind", "127.0.0.1", "-p", "0"]);
    let refused = process::run(KV, &words(&["get", "127.0.0.1", "key", "-p", &plain.1], &psk));
    assert_eq!(refused.status.code(), Some(1));
    let why = "no connection: the peer takes plain connections: leave out the flags --tls-... and --psk-file";
    assert!(text(&refused).contains(why), "{refused:?}");
}

#[test]
fn flags_that_do_not_go_together_are_named() {
    let root = keys("flags");
    let (cert, key, psk) = (file(&root, "server.pem"), file(&root, "server.key"), file(&root, "psk"));
    for (flags, why) in [
        (vec!["--tls-cert", &cert], "--tls-key go together"),
        (vec!["--tls-name", "node"], "--tls-name needs"),
        (vec!["--tls-cert", &cert, "--tls-key", &key, "--psk-file", &psk], "does not go with"),
        (vec!["--tls-cert", &cert, "--tls-key", &cert], "the private key"),
        (vec!["--tls-cert", &key, "--tls-key", &key], "the certificates: no certificate in PEM"),
        (vec!["--tls-cert", &cert, "--tls-key", &key, "--tls-ca", &key], "the certificate authorities: no certificate"),
        (vec!["--tls-ca", "/nowhere"], "/nowhere"),
        (vec!["--psk-file", &cert], "line 1"),
        // These flags suffice for a server, but not for a client.
        (vec!["--tls-cert", &cert, "--tls-key", &key], "for listening only"),
    ] {
        let output = process::run(RCP, &[&["/etc/hosts", "127.0.0.1"][..], &flags].concat());
        process::failed_with(&output, "rcp", why);
    }
}
