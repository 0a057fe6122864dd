//! `rcp` as a user runs it.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod process;

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use process::address;

const RCP: &str = env!("CARGO_BIN_EXE_rcp");

fn start(args: &[&str]) -> Child {
    process::start(RCP, args, Stdio::null())
}

fn run(args: &[&str]) -> Output {
    process::run(RCP, args)
}

#[track_caller]
fn failed_with(output: &Output, words: &str) {
    process::failed_with(output, "rcp", words);
}

/// A server with a directory of its own, next to one for sources. Everything ends with the test.
struct Server {
    child: Child,
    port: String,
    root: PathBuf,
}

impl Server {
    fn start(test: &str, args: &[&str]) -> Self {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("rcp-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("to")).expect("a directory");
        let to = root.join("to");
        let mut child =
            start(&[&["server", to.to_str().expect("text"), "--bind", "127.0.0.1", "-p", "0"], args].concat());
        let address = address(child.stdout.take().expect("piped"));
        let port = address.strip_prefix("127.0.0.1:").expect("a port").to_owned();
        Self { child, port, root }
    }

    fn source(&self, bytes: &[u8]) -> PathBuf {
        let path = self.root.join("source");
        fs::write(&path, bytes).expect("written");
        path
    }

    fn there(&self, name: &str) -> PathBuf {
        self.root.join("to").join(name)
    }

    /// The names in the server's directory.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root.join("to")).expect("a directory");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
        names.sort();
        names
    }

    fn copy(&self, file: &Path, to: &str) -> Output {
        run(&[file.to_str().expect("text"), to, "-p", &self.port])
    }

    /// The server's output on both streams.
    #[track_caller]
    fn copies(&self, file: &Path, to: &str) -> (String, String) {
        let output = self.copy(file, to);
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        (stdout.into_owned(), stderr.into_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        process::terminate(&mut self.child);
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// Makes bytes that do not repeat within a short distance.
fn bytes(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

#[test]
fn files_of_all_sizes_arrive() {
    const PIECE: usize = rdma_reactor_examples::rcp::PIECE as usize;
    let server = Server::start("sizes", &[]);
    // The sizes are nothing, one message, past one buffer, around a piece, and more than may be on its way at one time.
    let sizes = [0, 1, 33, 8191, 8192, 8193, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 8000, 9 * PIECE + 12_345];
    for len in sizes {
        let (source, name) = (server.source(&bytes(len)), format!("copy of {len}"));
        let (stdout, stderr) = server.copies(&source, &format!("127.0.0.1:{name}"));
        assert_eq!(stdout, format!("{name}: {len} bytes\n"));
        assert!(stderr.lines().count() == 1 && stderr.contains("neither private nor authenticated"), "{stderr}");
        assert!(fs::read(server.there(&name)).expect("it is there") == bytes(len), "{len} bytes differ");
    }
    server.copies(&server.source(b"under its own name"), "127.0.0.1");
    assert_eq!(fs::read(server.there("source")).expect("it is there"), b"under its own name");
    assert_eq!(server.names().len(), sizes.len() + 1, "no partial copy is left: {:?}", server.names());
}

#[test]
fn a_copy_goes_on_where_its_sender_was_killed() {
    let server = Server::start("killed", &[]);
    // The file gets larger until the copy is caught in the middle.
    for mib in [128, 256, 512, 1024] {
        let (source, part) = (server.root.join("sparse"), server.there("copy.rcp-part"));
        let file = fs::File::create(&source).expect("created");
        file.set_len(mib << 20).expect("a hole");
        (&file).write_all(&bytes(1 << 20)).expect("written");
        let mut child = start(&[source.to_str().expect("text"), "127.0.0.1:copy", "-p", &server.port]);
        let grown = || fs::metadata(&part).is_ok_and(|part| part.len() >= 4 << 20);
        let over = loop {
            if let Some(status) = child.try_wait().expect("it can be asked") {
                break status.success();
            }
            if grown() {
                break false;
            }
            std::thread::yield_now();
        };
        if over {
            fs::remove_file(server.there("copy")).expect("it is there");
            continue;
        }
        // The signal goes to the program that `timeout` watches, because `timeout` cannot pass this signal on.
        let children = format!("/proc/{0}/task/{0}/children", child.id());
        let pid = fs::read_to_string(children).ok().and_then(|pids| pids.trim().parse().ok());
        let killed = pid.map(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL));
        if child.wait().expect("it ends").success() {
            fs::remove_file(server.there("copy")).expect("it is there");
            continue;
        }
        assert_eq!(killed, Some(Ok(())));
        // The name is free again only when the server has heard of the end, so the next copy may have to try again.
        let (stdout, stderr) = loop {
            let output = server.copy(&source, "127.0.0.1:copy");
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            if output.status.success() {
                break (String::from_utf8_lossy(&output.stdout).into_owned(), stderr);
            }
            assert!(stderr.contains("is being copied by another peer"), "{stderr}");
        };
        let resumed = stdout.strip_prefix(&format!("copy: {} bytes, ", mib << 20)).expect("a length");
        let resumed: u64 = resumed.split(' ').next().and_then(|n| n.parse().ok()).expect("a number");
        assert!((4 << 20..mib << 20).contains(&resumed), "{stdout}");
        assert!(stderr.lines().count() == 1 && stderr.contains("neither private nor authenticated"), "{stderr}");
        let copy = fs::read(server.there("copy")).expect("it is there");
        let (head, tail) = copy.split_at(1 << 20);
        assert!(copy.len() as u64 == mib << 20 && head == bytes(1 << 20) && tail.iter().all(|&byte| byte == 0));
        assert_eq!(server.names(), ["copy"]);
        return;
    }
    panic!("1 GiB was copied before a process could be killed");
}

#[test]
fn a_partial_copy_is_used_only_if_it_is_one() {
    let server = Server::start("partial", &[]);
    let whole = bytes(5 << 20);
    let source = server.source(&whole);
    let mut damaged = whole[..3 << 20].to_vec();
    damaged[2 << 20] ^= 1;
    let longer = [&whole[..], b"x"].concat();
    let parts: [(&str, &[u8], u64, bool); 5] = [
        ("good", &whole[..3 << 20], 3 << 20, false),
        ("all", &whole, 5 << 20, false),
        ("damaged", &damaged, 0, true),
        ("longer", &longer, 0, false),
        ("empty", b"", 0, false),
    ];
    for (name, part, resumed, told) in parts {
        fs::write(server.there(&format!("{name}.rcp-part")), part).expect("written");
        let (stdout, stderr) = server.copies(&source, &format!("127.0.0.1:{name}"));
        let more = if resumed > 0 { format!(", {resumed} of them from before") } else { String::new() };
        assert_eq!(stdout, format!("{name}: {} bytes{more}\n", whole.len()));
        assert_eq!(stderr.contains("is damaged or of another file"), told, "{stderr}");
        assert!(fs::read(server.there(name)).expect("it is there") == whole, "{name} differs");
    }
    assert_eq!(server.names().len(), parts.len());
}

#[test]
fn a_peer_gets_at_no_other_file() {
    let server = Server::start("names", &[]);
    let source = server.source(b"from a peer");
    let outside = server.root.join("outside");
    for name in ["../outside", "..", ".", "a/b", "/etc/outside", "a\\b", "a\nb"] {
        failed_with(&server.copy(&source, &format!("127.0.0.1:{name}")), "is no name of a file");
    }
    failed_with(&server.copy(&source, "127.0.0.1:a.rcp-part"), "ends as the name of a partial copy");
    failed_with(&server.copy(&source, &format!("127.0.0.1:{}", "n".repeat(250))), "say at most 246");
    // A link that somebody has put there is not followed.
    std::os::unix::fs::symlink(&outside, server.there("link.rcp-part")).expect("a link");
    failed_with(&server.copy(&source, "127.0.0.1:link"), "is no file");
    fs::create_dir(server.there("directory")).expect("created");
    failed_with(&server.copy(&source, "127.0.0.1:directory"), "is a directory there");
    fs::write(server.there("taken"), "mine").expect("written");
    failed_with(&server.copy(&source, "127.0.0.1:taken"), "exists there");
    assert_eq!(fs::read(server.there("taken")).expect("it is there"), b"mine");
    assert!(!outside.exists());
    assert_eq!(server.names(), ["directory", "link.rcp-part", "taken"]);

    let server = Server::start("overwrite", &["--overwrite"]);
    fs::write(server.there("taken"), "mine").expect("written");
    server.copies(&server.source(b"theirs"), "127.0.0.1:taken");
    assert_eq!(fs::read(server.there("taken")).expect("it is there"), b"theirs");
}

#[test]
fn what_cannot_be_is_said_in_one_line() {
    let server = Server::start("errors", &[]);
    let source = server.source(b"bytes");
    failed_with(&server.copy(&server.root.join("none"), "127.0.0.1"), "No such file");
    failed_with(&server.copy(&server.root, "127.0.0.1"), "not a file");
    let socket = server.root.join("socket");
    let _listener = UnixListener::bind(&socket).expect("a socket");
    failed_with(&server.copy(&socket, "127.0.0.1"), "not a file");
    failed_with(&server.copy(&source, "::1"), "an IPv6 address in brackets");
    failed_with(&run(&[source.to_str().expect("text"), "127.0.0.1", "-p", "1"]), "is `rcp server` there?");
    failed_with(&run(&[]), "--help explains");
    failed_with(&run(&["server", "/nowhere"]), "is no directory");
    // Without the directory, nothing can be written.
    fs::remove_dir(server.root.join("to")).expect("it is empty");
    failed_with(&server.copy(&source, "127.0.0.1:x"), "creating \"x\"");
}
