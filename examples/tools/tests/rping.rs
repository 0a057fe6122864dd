//! Tests of `rping-server` and `rping-client` over the embedded provider: against each other, and against peers that violate the
//! protocol. `tests/vm/interop.sh` runs them against librdmacm's `rping`.
#![allow(clippy::disallowed_methods, reason = "tests of programs, not of the library")]

mod patience;

use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Output, Stdio};
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rdma_reactor::{
    Access, Config, ConnectOptions, ConnectionId, Context, DisconnectReason, Framing, Handler, ListenOptions, Message,
    Outcome, ProviderChoice, Reactor, Region, RegionOptions, RemoteRegion, SendId, SendKind, TimerId,
};
use rdma_reactor_tools::rping::{advert, ping};

use patience::PATIENCE;

const SERVER: &str = env!("CARGO_BIN_EXE_rping-server");
const CLIENT: &str = env!("CARGO_BIN_EXE_rping-client");

/// The exit status and the output of a program that has ended.
#[derive(Debug)]
struct Finished {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Finished {
    #[track_caller]
    fn succeeded(self) -> Self {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{self:?}");
        self
    }

    /// Checks that the program failed, with one line that contains these words.
    #[track_caller]
    fn failed_with(self, words: &str) {
        assert_eq!((self.code, self.stderr.lines().count()), (Some(1), 1), "{words}: {self:?}");
        assert!(self.stderr.starts_with("rping-") && self.stderr.contains(words), "no {words:?} in {self:?}");
    }
}

fn start(program: &str, args: &str) -> Child {
    let mut command = Command::new(program);
    command.args(args.split_whitespace()).args(["--provider", "iwarp"]).env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn end(child: Child) -> Finished {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Finished { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

fn run(program: &str, args: &str) -> Finished {
    end(start(program, args))
}

/// Reads the next line of a running program.
fn line(child: &mut Child) -> String {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while child.stdout.as_mut().unwrap().read(&mut byte).unwrap() == 1 && byte != *b"\n" {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

/// Starts a server on a free port. Returns the process and its address.
fn server(args: &str) -> (Child, SocketAddr) {
    let mut child = start(SERVER, &format!("-a 127.0.0.1 -p 0 --timeout {} {args}", PATIENCE.as_secs()));
    let line = line(&mut child);
    let address = line.strip_prefix("listening on ").and_then(|rest| rest.split(' ').next()?.parse().ok());
    (child, address.unwrap_or_else(|| panic!("no address: {line:?}")))
}

fn client(address: SocketAddr, args: &str) -> Child {
    start(CLIENT, &format!("-a {address} --timeout {} {args}", PATIENCE.as_secs()))
}

#[test]
fn every_size_goes_there_and_back() {
    for size in [1, 2, 14, 64, 1447, 65_536, 1 << 20] {
        for flags in ["", "--no-crc"] {
            let (server, address) = server(&format!("-V -C 20 -S {size} {flags}"));
            let client = end(client(address, &format!("-V -C 20 -S {size} --json {flags}"))).succeeded();
            let summary: serde_json::Value = serde_json::from_str(&client.stdout).unwrap();
            assert_eq!((&summary["rounds"], &summary["size"]), (&20.into(), &size.into()), "{summary}");
            assert!(summary["verified"] == true && summary["provider"] == "iwarp", "{summary}");
            assert_eq!(end(server).succeeded().stdout, "20 rounds for 1 clients (iwarp)\n");
        }
    }
}

#[test]
fn the_text_is_that_of_rping() {
    let (server, address) = server("-v");
    let client = end(client(address, "-v -C 2 -S 20")).succeeded();
    assert!(
        client.stdout.starts_with("ping data: rdma-ping-0: ABCDEF\nping data: rdma-ping-1: BCDEFG\n2 rounds of 20")
    );
    let text = end(server).succeeded().stdout;
    assert!(
        text.starts_with("server ping data: rdma-ping-0: ABCDEF\nserver ping data: rdma-ping-1: BCDEFG\n"),
        "{text}"
    );
}

#[test]
fn several_clients_at_once() {
    let (server, address) = server("-P --clients 5 -V -C 200");
    let clients: Vec<_> = (0..5).map(|i| client(address, &format!("-V -C 200 -S {}", 100 << (2 * i)))).collect();
    clients.into_iter().for_each(|client| drop(end(client).succeeded()));
    assert_eq!(end(server).succeeded().stdout, "1000 rounds for 5 clients (iwarp)\n");
}

#[test]
fn what_was_not_agreed_is_noticed() {
    let (long, address) = server("-S 63");
    end(client(address, "-C 1")).failed_with("the connection ended in round 0: closed by the peer");
    end(long).failed_with("round 0: a ping of 64 bytes where at most 63 are accepted: see -S");

    let (few, address) = server("-C 3");
    end(client(address, "-C 2")).succeeded();
    end(few).failed_with("it leaves after 2 of 3 rounds");

    let (one, address) = server("");
    let mut first = client(address, "-v");
    assert!(line(&mut first).starts_with("ping data"));
    end(client(address, "-C 1")).failed_with("rejected");
    kill(Pid::from_raw(first.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(end(first).code, Some(130));
    end(one).succeeded();
}

#[test]
fn ctrl_c_ends_either() {
    let (mut server, address) = server("-P -v");
    let client = client(address, "--json");
    assert!(line(&mut server).starts_with("server ping data"), "a client is there");
    // A thread reads the server's output. Otherwise the server could wait for space in the pipe, and would not answer the client.
    let pid = Pid::from_raw(server.id() as i32);
    let server = thread::spawn(move || end(server));
    kill(Pid::from_raw(client.id() as i32), Signal::SIGINT).unwrap();
    let client = end(client);
    assert!(client.code == Some(130) && client.stdout.contains(r#""interrupted":true"#), "{client:?}");
    kill(pid, Signal::SIGINT).unwrap();
    let server = server.join().unwrap();
    assert!(server.code == Some(0) && server.stdout.ends_with(" rounds for 1 clients (iwarp)\n"), "{:?}", server.code);
}

#[test]
fn ctrl_c_while_connecting_ends_at_once() {
    // This listener never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = client(silent.local_addr().unwrap(), "-C 1");
    let _stream = silent.accept().unwrap();
    kill(Pid::from_raw(client.id() as i32), Signal::SIGINT).unwrap();
    let client = end(client);
    assert_eq!((client.code, client.stderr.as_str()), (Some(130), ""), "{client:?}");
}

#[test]
fn bad_input_is_one_line() {
    for (program, args, words) in [
        (CLIENT, "", "--address <ADDR>"),
        (CLIENT, "-a 127.0.0.1 -S 0", "invalid value '0' for '--size <SIZE>'"),
        (CLIENT, "-a 127.0.0.1 -C 0", "invalid value '0' for '--count <N>'"),
        (CLIENT, "-a 127.0.0.1 -p 70000", "invalid value '70000' for '--port <PORT>'"),
        (CLIENT, "-a 127.0.0.1 --sise 3", "--size"),
        (CLIENT, "-a 127.0.0.1 -p 1 -C 1", "no connection to 127.0.0.1:1: "),
        (CLIENT, "-a 127.0.0.1:x", "not a port"),
        (SERVER, "-a 192.0.2.1 -p 0", "192.0.2.1"),
        (SERVER, "--clients 2", "--persistent"),
        (SERVER, "-a 127.0.0.1 -p 0 --timeout 1", "it took longer than --timeout: 0 clients connected"),
    ] {
        run(program, args).failed_with(words);
    }
    assert!(run(CLIENT, "--version").succeeded().stdout.starts_with("rping-client "));
    assert!(run(SERVER, "--help").succeeded().stdout.contains("-P, --persistent"));
}

// Peers that violate the protocol.

/// The function by which a peer reacts to one message.
type Reaction = fn(&mut Peer, &mut Context<'_>, ConnectionId, &[u8]);

/// A side of rping whose behaviour a test defines.
struct Peer {
    script: Vec<Reaction>,
    region: Option<Region>,
    /// The initial content of the region that a client offers.
    text: Vec<u8>,
    active: bool,
    at: usize,
    ended: Option<DisconnectReason>,
}

/// The length of the longest ping in these tests, in bytes.
const LEN: usize = 64;

impl Peer {
    fn new(script: &[Reaction]) -> Self {
        let mut text = vec![0; LEN];
        ping::fill(0, &mut text);
        Self { script: script.to_vec(), region: None, text, active: false, at: 0, ended: None }
    }

    fn reactor() -> Reactor {
        let config = Config::default().provider(ProviderChoice::Iwarp);
        let mut reactor = Reactor::new(config).unwrap();
        reactor.context().timers().set(PATIENCE, 0);
        reactor
    }

    /// Acts as a server for the program `rping-client`, which runs with these flags. Returns the result of the program.
    fn serve(mut self, args: &str) -> Finished {
        let mut reactor = Self::reactor();
        let mut cx = reactor.context();
        let options = ListenOptions::new().framing(Framing::Raw);
        let listener = cx.listen_with("127.0.0.1:0".parse().unwrap(), options).unwrap();
        let client = client(cx.listeners().local_address(listener).unwrap(), args);
        reactor.run(&mut self).unwrap();
        end(client)
    }

    /// Acts as a client of the program `rping-server`, which runs with these flags. Returns the result of the program.
    fn connect(mut self, args: &str) -> Finished {
        let (server, address) = server(args);
        let mut reactor = Self::reactor();
        self.active = true;
        reactor.context().connect_with(address, ConnectOptions::new().framing(Framing::Raw)).unwrap();
        reactor.run(&mut self).unwrap();
        end(server)
    }

    fn act(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) {
        match self.script.get(self.at) {
            Some(act) => act(self, cx, conn, message),
            None => cx.close(conn),
        }
        self.at += 1;
    }

    fn name(&self) -> RemoteRegion {
        self.region.as_ref().unwrap().remote()
    }
}

fn say(cx: &mut Context<'_>, conn: ConnectionId, region: RemoteRegion) {
    cx.send(conn, &advert::encode(region)).unwrap();
}

fn reply(cx: &mut Context<'_>, conn: ConnectionId, len: usize) {
    cx.send(conn, &vec![0; len]).unwrap();
}

/// A client's correct reaction: offers its source or its sink.
const OFFER: Reaction = |peer, cx, conn, _| say(cx, conn, peer.name());
const LEAVE: Reaction = |_, cx, conn, _| cx.close(conn);
/// A server's wrong reaction: sends "go ahead" or "done" without reading or writing.
const NOD: Reaction = |_, cx, conn, _| reply(cx, conn, advert::LEN);
/// A server's correct reaction: reads the ping. `on_send_complete` then sends "go ahead".
const READ: Reaction = |peer, cx, conn, message| {
    cx.remote(conn).read(advert::decode(message).unwrap(), peer.region.as_mut().unwrap(), 0..LEN).unwrap();
};
/// A server's wrong reaction: writes the ping back with one wrong byte.
const CORRUPT: Reaction = |peer, cx, conn, message| {
    let region = peer.region.as_mut().unwrap();
    region.bytes_mut().unwrap()[40] ^= 0x20;
    cx.remote(conn).write(advert::decode(message).unwrap(), region, 0..LEN).unwrap();
    reply(cx, conn, advert::LEN);
};

impl Handler for Peer {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let access = if self.active { Access::REMOTE_READ | Access::REMOTE_WRITE } else { Access::empty() };
        let mut region = cx.regions().register(conn, LEN, &RegionOptions::new().allow(access)).unwrap();
        region.copy_from(0, &self.text).expect("nothing is lent");
        self.region = Some(region);
        if self.active {
            self.act(cx, conn, &[]);
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.act(cx, conn, &message);
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        if send.kind() == SendKind::Read && outcome.is_sent() {
            reply(cx, conn, advert::LEN);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.ended = Some(reason);
        cx.stop();
    }

    fn on_timer(&mut self, _: &mut Context<'_>, _: TimerId, _: u64) {
        panic!("the program does not end the connection");
    }
}

#[test]
fn a_client_notices_what_a_server_does_wrong() {
    for (script, words) in [
        (&[READ, CORRUPT][..], "byte 40 of 64 in round 0 is not what was sent"),
        (&[READ, NOD], "byte 0 of 64 in round 0 is not what was sent: 0xff"),
        (&[NOD, |_, cx, conn, _| reply(cx, conn, 15)], "a message of 15 bytes where rping has 16"),
        (&[READ, LEAVE], "the connection ended in round 0: closed by the peer"),
        // Here the server reads a range that exceeds the end of the region that the client offers.
        (
            &[|peer, cx, conn, message| {
                let mut remote = advert::decode(message).unwrap();
                remote.address += 1;
                cx.remote(conn).read(remote, peer.region.as_mut().unwrap(), 0..LEN).unwrap();
            }],
            "the connection ended in round 0: ",
        ),
        // Here the server writes to the client's source, which permits only reads.
        (
            &[|peer, cx, conn, message| {
                cx.remote(conn).write(advert::decode(message).unwrap(), peer.region.as_ref().unwrap(), 0..LEN).unwrap();
            }],
            "the connection ended in round 0: ",
        ),
    ] {
        Peer::new(script).serve("-V -C 3").failed_with(words);
    }
}

#[test]
fn a_server_notices_what_a_client_does_wrong() {
    let mut wrong = Peer::new(&[OFFER]);
    wrong.text[63] = b'x';
    wrong.connect("-V").failed_with("round 0: byte 63 of 64 in round 0 is not what was sent: 0x78");
    for (script, words) in [
        (&[OFFER, LEAVE][..], "round 0: closed by the peer"),
        (&[|_, cx, conn, _| reply(cx, conn, 17)], "a message of 17 bytes where rping has 16"),
        (&[|peer, cx, conn, _| say(cx, conn, RemoteRegion { len: 0, ..peer.name() })], "it offers 0 bytes at 0x"),
        (
            &[|peer, cx, conn, _| say(cx, conn, RemoteRegion { address: u64::MAX - 62, ..peer.name() })],
            "it offers 64 bytes",
        ),
        (&[|peer, cx, conn, _| say(cx, conn, RemoteRegion { len: 65, ..peer.name() })], "round 0: "),
        (
            &[|peer, cx, conn, _| say(cx, conn, RemoteRegion { key: peer.name().key ^ 0xff00, ..peer.name() })],
            "round 0: ",
        ),
        (
            &[OFFER, |peer, cx, conn, _| say(cx, conn, peer.name().part(0, 63).unwrap())],
            "the range ends at byte 64 of a region of 63 bytes",
        ),
        (
            &[|peer, cx, conn, _| {
                say(cx, conn, peer.name());
                say(cx, conn, peer.name());
            }],
            "it sends out of turn",
        ),
    ] {
        Peer::new(script).connect("-V").failed_with(words);
    }
}

#[test]
fn one_clients_fault_is_not_anothers() {
    let (mut server, address) = server("-P --clients 2 -V");
    let mut good = client(address, "-V -v");
    assert!(line(&mut good).starts_with("ping data"));
    let mut bad = Peer::new(&[OFFER]);
    bad.text[0] = 0;
    bad.active = true;
    let mut reactor = Peer::reactor();
    reactor.context().connect_with(address, ConnectOptions::new().framing(Framing::Raw)).unwrap();
    reactor.run(&mut bad).unwrap();
    assert_eq!(bad.ended, Some(DisconnectReason::Closed));
    assert!(line(&mut server).contains("round 0: byte 0 of 64"), "reported immediately");
    assert!(line(&mut good).starts_with("ping data"));
    kill(Pid::from_raw(good.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(end(good).code, Some(130));
    end(server).failed_with("round 0: byte 0 of 64");
}
