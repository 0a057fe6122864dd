//! Tests of `rcp`, run as a user runs it.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod process;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::Signal;
use process::address;
use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor, TimerId,
};
use rdma_reactor_tools::rcp::wire::CopyMessage;

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

/// A server, with its directory and another directory for source files. Dropping this value removes everything.
struct Server {
    child: Child,
    port: String,
    root: PathBuf,
}

impl Server {
    fn start(test: &str, args: &[&str]) -> Self {
        Self::start_in(test, args, |_| ())
    }

    /// Starts a server. `fill` puts files into its directory first.
    fn start_in(test: &str, args: &[&str], fill: impl FnOnce(&Path)) -> Self {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("rcp-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("to")).expect("a directory");
        let to = root.join("to");
        fill(&to);
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

    /// Returns the names of the files in the server's directory.
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

    fn address(&self) -> std::net::SocketAddr {
        format!("127.0.0.1:{}", self.port).parse().expect("an address")
    }

    /// Copies a file, which must succeed. Returns what was printed to standard output and to standard error.
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

/// Returns `len` bytes that do not repeat within short distances.
fn bytes(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Checks the line with the figures of a copy. It must begin with `begin`.
#[track_caller]
fn figures_are(line: &str, begin: &str) {
    let rest = line.strip_prefix(begin).and_then(|rest| rest.strip_prefix(", ")).unwrap_or_else(|| panic!("{line:?}"));
    let (seconds, rate) = rest.trim_end().split_once(" s, ").unwrap_or_else(|| panic!("{line:?}"));
    let rate = rate.strip_suffix(" MiB/s").unwrap_or_else(|| panic!("{line:?}"));
    assert!([seconds, rate].iter().all(|number| number.parse::<f64>().is_ok_and(|number| number >= 0.0)), "{line:?}");
}

/// A peer of `rcp` that sends the messages that a test requests.
struct ScriptedPeer<F> {
    first: Option<Vec<u8>>,
    answer: F,
}

impl<F: FnMut(&mut Context<'_>, ConnectionId, Option<&[u8]>)> Handler for ScriptedPeer<F> {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Some(first) = &self.first {
            cx.send(conn, first).expect("room");
        }
        cx.timers().set(Duration::from_millis(50), 0);
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        (self.answer)(cx, conn, Some(&message));
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        for conn in cx.connection_ids().collect::<Vec<_>>() {
            (self.answer)(cx, conn, None);
        }
        cx.timers().set(Duration::from_millis(50), 0);
    }
    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        cx.stop();
    }
    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        panic!("{error}");
    }
}

fn config() -> Config {
    Config::default()
        .provider(ProviderChoice::Iwarp)
        .large_messages(|l| l.max_message = rdma_reactor_tools::rcp::PIECE.into())
}

/// Connects to the server and sends `first`. Until the connection ends, calls `answer` with each message of the server, and twenty
/// times a second with `None`.
fn talk(server: &Server, first: &CopyMessage<'_>, answer: impl FnMut(&mut Context<'_>, ConnectionId, Option<&[u8]>)) {
    let mut reactor = Reactor::new(config()).expect("a reactor");
    reactor.context().connect(server.address()).expect("it connects");
    reactor.run(&mut ScriptedPeer { first: Some(first.encode()), answer }).expect("it runs");
}

/// Returns the reason with which the server refuses an offer.
fn refusal(server: &Server, offer: &CopyMessage<'_>) -> String {
    let mut why = String::new();
    talk(server, offer, |_, _, message| match message.map(CopyMessage::decode) {
        Some(Some(CopyMessage::Refuse(text))) => text.clone_into(&mut why),
        Some(other) => panic!("{other:?}"),
        None => {}
    });
    why
}

/// Waits until `is_so` returns true. Fails after the time limit.
#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < process::patience::PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn files_of_all_sizes_arrive() {
    const PIECE: usize = rdma_reactor_tools::rcp::PIECE as usize;
    let server = Server::start("sizes", &[]);
    // The sizes are at the limits of the implementation: empty, within one message, near the size of a buffer, near the size of a
    // piece, and more pieces than may be in flight.
    let sizes = [0, 1, 33, 8191, 8192, 8193, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 8000, 9 * PIECE + 12_345];
    for len in sizes {
        let (source, name) = (server.source(&bytes(len)), format!("copy of {len}"));
        let (stdout, stderr) = server.copies(&source, &format!("127.0.0.1:{name}"));
        figures_are(&stdout, &format!("{name}: {len} bytes"));
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
    // The test must kill the sender during the copy. If the copy was too fast, the test repeats it with a larger file.
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
        let killed = process::signal(&child, Signal::SIGKILL);
        if child.wait().expect("it ends").success() {
            fs::remove_file(server.there("copy")).expect("it is there");
            continue;
        }
        assert!(killed, "it was there");
        // The server refuses the name until it has been notified of the killed sender's end. So this copy may have to be repeated.
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
        if resumed == mib << 20 {
            // The sender was killed only after the copy was complete, so this attempt shows nothing.
            fs::remove_file(server.there("copy")).expect("it is there");
            continue;
        }
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
        figures_are(&stdout, &format!("{name}: {} bytes{more}", whole.len()));
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
    for name in ["../outside", "..", ".", "a/../../b", "/etc/outside", "a\\b", "a\nb", " ", "a\u{202e}gpj.exe"] {
        failed_with(&server.copy(&source, &format!("127.0.0.1:{name}")), "is not a file name");
        // `rcp` checks the name before it connects. The server must check it too.
        for offer in [CopyMessage::Offer { len: 5, name }, CopyMessage::Folder(name)] {
            let why = refusal(&server, &offer);
            assert!(why.contains("is not a file name") && !why.contains('\u{202e}'), "{why}");
        }
    }
    failed_with(&server.copy(&source, "127.0.0.1:a.rcp-part"), "ends like a partial copy");
    failed_with(&server.copy(&source, &format!("127.0.0.1:{}", "n".repeat(250))), "give at most 246");
    // The server must not follow an existing symbolic link.
    std::os::unix::fs::symlink(&outside, server.there("link.rcp-part")).expect("a link");
    failed_with(&server.copy(&source, "127.0.0.1:link"), "is not a regular file");
    std::os::unix::fs::symlink(&server.root, server.there("away")).expect("a link");
    failed_with(&server.copy(&source, "127.0.0.1:away/outside"), "is not a directory on the server");
    assert!(refusal(&server, &CopyMessage::Folder("away/folder")).contains("is not a directory on the server"));
    assert!(!server.root.join("folder").exists());
    // A partial copy with a second hard link is also a file elsewhere, which must not change.
    fs::write(server.root.join("elsewhere"), "mine").expect("written");
    fs::hard_link(server.root.join("elsewhere"), server.there("twice.rcp-part")).expect("a second name");
    failed_with(&server.copy(&source, "127.0.0.1:twice"), "is not a regular file");
    assert_eq!(fs::read(server.root.join("elsewhere")).expect("it is there"), b"mine");
    fs::remove_file(server.there("twice.rcp-part")).expect("removed");
    fs::create_dir(server.there("directory")).expect("created");
    failed_with(&server.copy(&source, "127.0.0.1:directory"), "is a directory on the server");
    fs::write(server.there("taken"), "mine").expect("written");
    failed_with(&server.copy(&source, "127.0.0.1:taken"), "exists on the server");
    assert_eq!(fs::read(server.there("taken")).expect("it is there"), b"mine");
    assert!(!outside.exists());
    assert_eq!(server.names(), ["away", "directory", "link.rcp-part", "taken"]);

    let server = Server::start("overwrite", &["--overwrite"]);
    fs::write(server.there("taken"), "mine").expect("written");
    server.copies(&server.source(b"theirs"), "127.0.0.1:taken");
    assert_eq!(fs::read(server.there("taken")).expect("it is there"), b"theirs");
}

/// Replaces a directory of the server by a link to a directory outside.
fn exchange(server: &Server, folder: &str) {
    fs::rename(server.there(folder), server.root.join("aside")).expect("renamed");
    std::os::unix::fs::symlink(server.root.join("outside"), server.there(folder)).expect("a link");
}

#[test]
fn a_directory_that_becomes_a_link_leads_nowhere() {
    // The link appears before the offer, before the answer to it, and before the end of the file.
    for step in 0..3 {
        let server = Server::start(&format!("exchanged-{step}"), &[]);
        let whole = bytes(100_000);
        let hash = *blake3::hash(&whole).as_bytes();
        fs::create_dir_all(server.there("sub")).expect("created");
        fs::create_dir(server.root.join("outside")).expect("created");
        // If the server followed the link when it finishes the copy, it would rename this file.
        fs::write(server.root.join("outside/file.rcp-part"), &whole).expect("written");
        if step == 0 {
            exchange(&server, "sub");
        }
        let offer = CopyMessage::Offer { len: whole.len() as u64, name: "sub/file" };
        let part = server.there("sub/file.rcp-part");
        let (mut why, mut ending) = (String::new(), false);
        talk(&server, &offer, |cx, conn, message| match message.map(CopyMessage::decode) {
            Some(Some(CopyMessage::Have { len: 0, .. })) => {
                if step == 1 {
                    exchange(&server, "sub");
                }
                cx.send(conn, &CopyMessage::From(0).encode()).expect("room");
                cx.send(conn, &whole).expect("room");
                ending = true;
            }
            Some(Some(CopyMessage::Refuse(text))) => text.clone_into(&mut why),
            Some(other) => panic!("{other:?}"),
            None if ending && (step == 1 || fs::metadata(&part).is_ok_and(|part| part.len() > 0)) => {
                if step == 2 {
                    exchange(&server, "sub");
                }
                cx.send(conn, &CopyMessage::End(hash).encode()).expect("room");
                ending = false;
            }
            None => {}
        });
        assert!(why.contains("\"sub\" is not a directory on the server"), "step {step}: {why:?}");
        let part = fs::read(server.root.join("outside/file.rcp-part"));
        assert!(part.is_ok_and(|part| part == whole), "step {step}");
        assert_eq!(fs::read_dir(server.root.join("outside")).expect("a directory").count(), 1, "step {step}");
    }
}

#[test]
fn directories_and_links_that_change_places_lead_nowhere() {
    let server = Server::start("race", &[]);
    let (outside, from) = (server.root.join("outside"), server.root.join("from"));
    let (sub, aside, link) = (server.there("from/sub"), server.root.join("aside"), server.root.join("link"));
    for folder in [&outside, &from.join("sub"), &sub] {
        fs::create_dir_all(folder).expect("created");
    }
    (0..40).for_each(|nth| fs::write(from.join(format!("sub/{nth}")), "from a peer").expect("written"));
    std::os::unix::fs::symlink(&outside, &link).expect("a link");
    let ended = std::sync::atomic::AtomicBool::new(false);
    let is_ended = || ended.load(std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !is_ended() {
                // A rename fails if the server has created a directory meanwhile. The next round
                // then continues.
                let _ = fs::rename(&sub, &aside);
                let _ = fs::rename(&link, &sub);
                let _ = fs::rename(&sub, &link);
                let _ = fs::rename(&aside, &sub);
            }
        });
        for _ in 0..20 {
            let output = run(&["-r", from.to_str().expect("text"), "127.0.0.1", "-p", &server.port]);
            assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
        }
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(fs::read_dir(&outside).expect("a directory").count(), 0);
}

#[test]
fn a_file_that_is_there_already_is_the_same_or_another() {
    let server = Server::start("again", &[]);
    let whole = bytes(5 << 20);
    let source = server.source(&whole);
    server.copies(&source, "127.0.0.1:copy");
    let (stdout, _) = server.copies(&source, "127.0.0.1:copy");
    figures_are(&stdout, &format!("copy: {0} bytes, {0} of them from before", whole.len()));
    let mut other = whole.clone();
    other[1 << 20] ^= 1;
    failed_with(&server.copy(&server.source(&other), "127.0.0.1:copy"), "exists on the server");
    failed_with(&server.copy(&server.source(b"shorter"), "127.0.0.1:copy"), "exists on the server");
    assert!(fs::read(server.there("copy")).expect("it is there") == whole);
    assert_eq!(server.names(), ["copy"]);
    // A peer that does not have the file must get no information about it, except that it exists.
    let (offer, mut heard) = (CopyMessage::Offer { len: whole.len() as u64, name: "copy" }, Vec::new());
    talk(&server, &offer, |cx, conn, message| {
        if let Some(message) = message {
            heard.push(message.to_vec());
            let _ = cx.send(conn, &CopyMessage::End([7; 32]).encode());
        }
    });
    assert_eq!((heard.len(), CopyMessage::decode(&heard[0])), (2, Some(CopyMessage::Exists)));
    assert!(matches!(CopyMessage::decode(&heard[1]), Some(CopyMessage::Refuse(_))));
}

#[test]
fn directories_are_copied_with_what_is_in_them() {
    let server = Server::start("tree", &[]);
    let tree = server.root.join("tree");
    fs::create_dir_all(tree.join("a/b/empty")).expect("created");
    let files = [("top", 0), ("a/-rf", 5), ("a/b/large", 9 << 20), ("z", 100)];
    files.iter().for_each(|&(name, len)| fs::write(tree.join(name), bytes(len)).expect("written"));
    let copy = || run(&["-r", tree.to_str().expect("text"), "127.0.0.1", "-p", &server.port]);
    failed_with(&server.copy(&tree, "127.0.0.1"), "give -r");
    for round in 0..2 {
        let output = copy();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let names: Vec<_> = stdout.lines().filter_map(|line| line.split(": ").next()).collect();
        assert_eq!(names, ["tree/a/-rf", "tree/a/b/large", "tree/top", "tree/z", "4 files in tree"]);
        let before = if round == 0 { "" } else { ", 9437289 of them from before" };
        figures_are(stdout.lines().last().expect("a line"), &format!("4 files in tree: 9437289 bytes{before}"));
        for (name, len) in files {
            assert!(fs::read(server.there("tree").join(name)).expect("it is there") == bytes(len), "{name} differs");
        }
        assert!(server.there("tree/a/b/empty").is_dir());
    }
    // Special files must be skipped and reported.
    std::os::unix::fs::symlink("/etc/passwd", tree.join("link")).expect("a link");
    let output = copy();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(1) && stderr.contains("tree/link: neither a file nor a directory"),
        "{stderr}"
    );
    fs::write(tree.join("z"), bytes(101)).expect("written");
    failed_with(&copy(), "\"tree/z\" exists on the server");
    assert!(fs::symlink_metadata(server.there("tree/link")).is_err());
}

#[test]
fn a_name_is_printed_so_that_it_is_no_option() {
    let server = Server::start("options", &[]);
    let (stdout, _) = server.copies(&server.source(b"bytes"), "127.0.0.1:-rf");
    figures_are(&stdout, "./-rf: 5 bytes");
    assert_eq!(server.names(), ["-rf"]);
}

#[test]
fn a_name_is_one_senders_while_it_gets_on() {
    let server = Server::start("taken", &["--patience", "86400"]);
    let source = server.source(b"the file");
    // The other sender runs on a thread, because this thread must answer pings at the same time.
    std::thread::scope(|scope| {
        let mut other = None;
        talk(&server, &CopyMessage::Offer { len: 1 << 40, name: "copy" }, |cx, conn, message| {
            match message.map(CopyMessage::decode) {
                Some(Some(CopyMessage::Have { .. })) => {
                    other = Some(scope.spawn(|| server.copy(&source, "127.0.0.1:copy")))
                }
                Some(other) => panic!("{other:?}"),
                None => {
                    if let Some(other) = other.take_if(|other| other.is_finished()) {
                        failed_with(&other.join().expect("it runs"), "is being copied by another peer");
                        cx.close(conn);
                    }
                }
            }
        });
    });
}

/// One sender sends nothing after its offer, but answers every ping. Another sender sends one byte twenty times a second. The server must
/// close both connections, so that other senders can use the name.
#[test]
fn a_sender_that_does_not_get_on_holds_no_name() {
    for drips in [false, true] {
        let server = Server::start(&format!("silent-{drips}"), &["--patience", "1"]);
        let source = server.source(b"the file");
        let offer = CopyMessage::Offer { len: 1 << 40, name: "copy" };
        let mut asked = false;
        // On a busy machine, the server may end this sender before the server has answered the offer. The test then makes the offer again.
        while !asked {
            let mut why = None;
            talk(&server, &offer, |cx, conn, message| match message.map(CopyMessage::decode) {
                Some(Some(CopyMessage::Have { len, .. })) => {
                    assert_eq!(len, 0);
                    asked = true;
                    if drips {
                        cx.send(conn, &CopyMessage::From(0).encode()).expect("room");
                    }
                }
                Some(Some(CopyMessage::Refuse(text))) => why = Some(text.to_owned()),
                Some(other) => panic!("{other:?}"),
                None if drips && asked => drop(cx.send(conn, b"x")),
                None => {}
            });
            assert!(why.as_deref().is_some_and(|why| why.contains("no progress for 1 s")), "{why:?}");
        }
        // On a busy machine, this copy may itself exceed the server's time limit. So the copy is repeated until it succeeds.
        until("the name is free", || {
            let output = server.copy(&source, "127.0.0.1:copy");
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() || stderr.contains("no progress for 1 s"), "{stderr}");
            output.status.success()
        });
        assert_eq!(server.names(), ["copy"]);
    }
}

/// The partial copy is so long that the connection ends while the server hashes it.
#[test]
fn a_partial_copy_is_kept_whole_while_it_is_hashed() {
    const HAVE: u64 = 64 << 30;
    let mut server = Server::start_in("hashed", &[], |to| {
        fs::File::create(to.join("copy.rcp-part")).and_then(|file| file.set_len(HAVE)).expect("a hole");
    });
    talk(&server, &CopyMessage::Offer { len: 1 << 40, name: "copy" }, |cx, conn, _| cx.close(conn));
    let mut line = String::new();
    BufReader::new(server.child.stderr.take().expect("piped")).read_line(&mut line).expect("text");
    let words = format!("\"copy\" is not complete: closed by the peer; {HAVE} of {} bytes are kept", 1_u64 << 40);
    assert!(line.contains(&words), "no {words:?} in {line:?}");
    assert_eq!(fs::metadata(server.there("copy.rcp-part")).expect("it is there").len(), HAVE);
}

#[test]
fn partial_copies_do_not_stay_for_ever() {
    let week = Duration::from_secs(7 * 86_400);
    let old = |path: &Path, age: Duration| {
        let file = fs::File::create(path).expect("created");
        file.set_len(5 << 20).expect("a hole");
        file.set_modified(SystemTime::now() - age).expect("an age");
    };
    let server = Server::start_in("parts", &[], |to| {
        old(&to.join("old.rcp-part"), week + Duration::from_secs(60));
        old(&to.join("new.rcp-part"), week - Duration::from_secs(3600));
    });
    assert_eq!(server.names(), ["new.rcp-part"]);
    // A peer that makes an offer and disconnects must leave no file.
    for nth in 0..300 {
        let name = format!("offer {nth}");
        talk(&server, &CopyMessage::Offer { len: 5, name: &name }, |cx, conn, _| cx.close(conn));
    }
    until("nothing is left of the offers", || server.names() == ["new.rcp-part"]);
}

/// The receiver is part of the test, so that the file can grow during its copy.
#[test]
fn a_file_that_grows_meanwhile_is_a_failure() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("rcp-growing-{}", std::process::id()));
    fs::write(&path, bytes(10_000)).expect("written");
    let mut reactor = Reactor::new(config()).expect("a reactor");
    let listener = reactor.context().listen(([127, 0, 0, 1], 0).into()).expect("it listens");
    let port = reactor.context().listeners().local_address(listener).expect("an address").port().to_string();
    let child = start(&[path.to_str().expect("text"), "127.0.0.1:copy", "-p", &port]);
    let grows = path.clone();
    let answer = move |cx: &mut Context<'_>, conn: ConnectionId, message: Option<&[u8]>| {
        let Some(message) = message else { return };
        let answer = match CopyMessage::decode(message) {
            Some(CopyMessage::Offer { len, .. }) => {
                assert_eq!(len, 10_000);
                let mut file = fs::File::options().append(true).open(&grows).expect("it is there");
                file.write_all(b"more").expect("written");
                CopyMessage::Have { len: 0, hash: [0; 32] }
            }
            Some(CopyMessage::End(_)) => CopyMessage::Done,
            _ => return,
        };
        cx.send(conn, &answer.encode()).expect("room");
    };
    reactor.run(&mut ScriptedPeer { first: None, answer }).expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    fs::remove_file(path).expect("it is there");
    figures_are(&stdout, "copy: 10000 bytes");
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("grew while it was copied: the copy has 10000 bytes"), "{stderr}");
}

/// The metadata of a file in `/proc` has the length 0, so a copy of that length would be empty.
#[test]
fn a_file_of_proc_is_no_empty_copy() {
    let server = Server::start("proc", &[]);
    let output = server.copy(Path::new("/proc/version"), "127.0.0.1");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!((output.status.code(), &*stdout), (Some(1), ""), "{stderr}");
    assert!(stderr.contains("rcp: /proc/version: it has content, but its length is given as 0"), "{stderr}");
    assert!(server.names().is_empty(), "{:?}", server.names());
}

/// The receiver is part of the test and does not complete the copy. So the sender can be interrupted during the copy.
#[test]
fn an_interrupted_copy_says_so_by_its_status() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("rcp-interrupted-{}", std::process::id()));
    fs::write(&path, bytes(10_000)).expect("written");
    let mut reactor = Reactor::new(config()).expect("a reactor");
    let listener = reactor.context().listen(([127, 0, 0, 1], 0).into()).expect("it listens");
    let port = reactor.context().listeners().local_address(listener).expect("an address").port().to_string();
    let child = start(&[path.to_str().expect("text"), "127.0.0.1:copy", "-p", &port]);
    let answer = |_: &mut Context<'_>, _: ConnectionId, message: Option<&[u8]>| {
        if message.is_some() {
            assert!(process::signal(&child, Signal::SIGINT), "it waits for an answer to its offer");
        }
    };
    reactor.run(&mut ScriptedPeer { first: None, answer }).expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    fs::remove_file(path).expect("it is there");
    assert_eq!((output.status.code(), output.stdout), (Some(130), Vec::new()), "{:?}", output.stderr);
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
    failed_with(&run(&[source.to_str().expect("text"), "127.0.0.1", "-p", "1"]), "is `rcp server` running there?");
    failed_with(&run(&[]), "--help explains");
    failed_with(&run(&["server", "/nowhere"]), "is not a directory");
    // Nobody can create files there.
    failed_with(&run(&["server", "/proc"]), "no file can be created there");
    // Without its directory, the server cannot write a file.
    fs::remove_dir(server.root.join("to")).expect("it is empty");
    failed_with(&server.copy(&source, "127.0.0.1:x"), "creating \"x\"");
}

#[test]
fn a_server_that_is_ended_has_done_its_work() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let mut server = Server::start("ended", &[]);
        assert!(process::signal(&server.child, signal), "it runs");
        assert_eq!(server.child.wait().expect("its end").code(), Some(0));
    }
}
