//! Tests of `valkey-rdma` over the embedded provider. The server is part of this file, and can violate the protocol.
//! `tests/vm/valkey.sh` runs the program against `valkey-server`.
#![allow(clippy::disallowed_methods, reason = "tests of a program, not of the library")]

mod patience;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use patience::PATIENCE;
use rdma_reactor::{
    Access, Config, ConnectOptions, ConnectionId, Context, Framing, Handler, Immediate, ListenOptions, Message,
    Outcome, ProviderChoice, Reactor, Region, RegionOptions, RemoteRegion, SendErrorKind, SendId,
};
use rdma_reactor_tools::valkey::command::ValkeyCommand;
use rdma_reactor_tools::valkey::link::ValkeyLink;

/// The deliberate fault of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// The server sends this command when it has received the address of the client's buffer.
    Command(&'static [u8]),
    /// The server sends this answer to each request.
    Answer(&'static [u8]),
    /// The server reports that it has written this many bytes, although it has written nothing.
    Written(u32),
    /// The server changes one byte of each value.
    Value,
    /// The server does not store values.
    Forgetful,
    /// When the server has received a request, it closes the connection instead of answering.
    Closes,
    /// The server never answers.
    Silent,
    /// The server answers only after the client has sent a keepalive.
    Slow,
    /// The server never answers, and sends SIGINT to the client.
    Interrupted,
}

/// A server for one client.
struct Server {
    wrong: Fault,
    /// Receives the id of the client's process.
    client: Receiver<u32>,
    /// The length of `buffer` and of `source`, in bytes. The client writes to `buffer`; the server writes from `source`.
    len: usize,
    buffer: Option<Region>,
    /// The number of bytes in `buffer` that have arrived.
    filled: usize,
    offers: u32,
    /// The free part of the client's buffer.
    room: RemoteRegion,
    source: Option<Region>,
    writing: Option<SendId>,
    input: Vec<u8>,
    out: Vec<u8>,
    values: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Encodes a command: its opcode, and the last 16 of its 32 bytes.
fn command(opcode: u8, tail: [u8; 16]) -> [u8; 32] {
    let mut message = [0; 32];
    message[1] = opcode;
    message[16..].copy_from_slice(&tail);
    message
}

/// Returns the id of a send, or `None` if the connection has ended. A client that has noticed a fault closes the connection. The messages
/// that the client has sent before are still delivered to the server, and the server answers them.
fn accepted(sent: Result<SendId, SendErrorKind>) -> Option<SendId> {
    match sent {
        Ok(id) => Some(id),
        Err(SendErrorKind::Closed) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Removes a complete request from the front of `input`. Returns its parts, or `None` if it is not complete yet.
fn request(input: &mut Vec<u8>) -> Option<Vec<Vec<u8>>> {
    let mut at = 0;
    let mut line = |mark: u8, input: &[u8]| {
        let end = at + input[at..].windows(2).position(|two| two == b"\r\n")?;
        assert_eq!(input[at], mark, "{:?}", String::from_utf8_lossy(&input[at..end]));
        let number: usize = std::str::from_utf8(&input[at + 1..end]).unwrap().parse().unwrap();
        at = end + 2;
        let from = at;
        if mark == b'$' {
            at += number + 2;
            assert_eq!(input.get(at - 2..at)?, b"\r\n");
        }
        Some((number, from))
    };
    let (parts, _) = line(b'*', input)?;
    let parts: Option<Vec<_>> = (0..parts).map(|_| line(b'$', input)).collect();
    let parts = parts?.into_iter().map(|(len, from)| input[from..from + len].to_vec()).collect();
    input.drain(..at);
    Some(parts)
}

impl Server {
    fn offer(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let RemoteRegion { address, len, key } = self.buffer.as_ref().unwrap().remote();
        let tail = u128::from(address) << 64 | u128::from(len) << 32 | u128::from(key);
        accepted(cx.send(conn, &command(3, tail.to_be_bytes())));
        (self.filled, self.offers) = (0, self.offers + 1);
    }

    /// Returns the server's answer to a request. The answer is wrong if the test requests a fault that affects answers.
    fn answer(&mut self, request: &[Vec<u8>]) -> Vec<u8> {
        if let Fault::Answer(text) = self.wrong {
            return text.to_vec();
        }
        match (&request[0][..], &request[1..]) {
            (b"PING", []) => b"+PONG\r\n".to_vec(),
            (b"SET", [key, value]) if self.wrong != Fault::Forgetful => {
                self.values.insert(key.clone(), value.clone());
                b"+OK\r\n".to_vec()
            }
            (b"SET", _) => b"+OK\r\n".to_vec(),
            (b"GET", [key]) => self.values.get(key).map_or(b"$-1\r\n".to_vec(), |value| {
                let mut value = value.clone();
                if self.wrong == Fault::Value {
                    *value.last_mut().unwrap() ^= 1;
                }
                [format!("${}\r\n", value.len()).as_bytes(), &value, b"\r\n"].concat()
            }),
            (b"DEL", keys) => {
                format!(":{}\r\n", keys.iter().filter(|&key| self.values.remove(key).is_some()).count()).into_bytes()
            }
            (b"KEYS", _) => b"*3\r\n$1\r\na\r\n*1\r\n:5\r\n$-1\r\n".to_vec(),
            (name, _) => format!("-ERR unknown command '{}'\r\n", String::from_utf8_lossy(name)).into_bytes(),
        }
    }

    /// Writes as many bytes as the client's buffer permits.
    fn flush(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let len = self.out.len().min(self.room.len as usize).min(self.len);
        if len == 0 || self.writing.is_some() {
            return;
        }
        let source = self.source.as_mut().unwrap();
        source.copy_from(0, &self.out[..len]).unwrap();
        let told = if let Fault::Written(told) = self.wrong { told } else { len as u32 };
        self.writing = accepted(cx.remote(conn).write_with_immediate(self.room, source, 0..len, told));
        self.out.drain(..len);
        self.room.address += len as u64;
        self.room.len -= len as u64;
    }
}

impl Handler for Server {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let options = RegionOptions::new().allow(Access::REMOTE_WRITE);
        self.buffer = Some(cx.regions().register(conn, self.len, &options).unwrap());
        self.source = Some(cx.regions().register(conn, self.len, &RegionOptions::new()).unwrap());
        self.offer(cx, conn);
        accepted(cx.send(conn, &command(2, [0; 16])));
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let message: [u8; 32] = message[..].try_into().unwrap();
        let tail = u128::from_be_bytes(message[16..].try_into().unwrap());
        assert_eq!(message[..1], [0]);
        match message[1] {
            // The server offers a feature that is unknown to the client.
            0 => _ = accepted(cx.send(conn, &command(0, (1_u128 << 63 | tail).to_be_bytes()))),
            1 => assert_eq!(tail, 0, "features that the server has not"),
            2 if self.wrong != Fault::Slow => {}
            2 => {
                self.out.extend(b"+PONG\r\n");
                self.flush(cx, conn);
            }
            3 => {
                assert_eq!(self.room.len, 0, "the buffer was not full");
                let (address, len, key) = ((tail >> 64) as u64, (tail >> 32) as u32, tail as u32);
                self.room = RemoteRegion { address, len: len.into(), key };
                if let Fault::Command(message) = self.wrong {
                    accepted(cx.send(conn, message));
                }
                self.flush(cx, conn);
            }
            other => panic!("opcode {other}"),
        }
    }

    fn on_immediate(&mut self, cx: &mut Context<'_>, conn: ConnectionId, Immediate { value, len }: Immediate) {
        assert_eq!(value, len);
        let (old, len) = (self.input.len(), len as usize);
        self.input.resize(old + len, 0);
        let buffer = self.buffer.as_ref().unwrap();
        buffer.copy_to(self.filled, &mut self.input[old..]);
        self.filled += len;
        if self.filled == self.len {
            self.offer(cx, conn);
        }
        while let Some(request) = request(&mut self.input) {
            match self.wrong {
                Fault::Closes => return cx.close(conn),
                Fault::Silent | Fault::Slow => {}
                Fault::Interrupted => {
                    let client = self.client.recv().unwrap();
                    kill(Pid::from_raw(client as i32), Signal::SIGINT).unwrap();
                }
                _ => {
                    let answer = self.answer(&request);
                    self.out.extend(answer);
                }
            }
        }
        self.flush(cx, conn);
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, id: SendId, outcome: Outcome) {
        if self.writing == Some(id) && outcome.is_sent() {
            self.writing = None;
            self.flush(cx, conn);
        }
    }
}

/// Starts a client with these arguments.
fn client(address: SocketAddr, args: &[&str]) -> Child {
    let patience = PATIENCE.as_secs().to_string();
    let limit = if args.contains(&"--timeout") { vec![] } else { vec!["--timeout", &patience] };
    let mut command = Command::new(env!("CARGO_BIN_EXE_valkey-rdma"));
    command.args(["--provider", "iwarp", &address.to_string()]).args(limit).args(args).env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs a client against a server whose buffer has `len` bytes. Returns the client's output and the server.
fn talk(wrong: Fault, len: usize, args: &[&str]) -> (Output, Server) {
    let config = Config::default().provider(ProviderChoice::Iwarp).receive_depth(1024);
    let mut reactor = Reactor::new(config).unwrap();
    let options = ListenOptions::new().framing(Framing::Raw).extensions(true);
    let listener = reactor.context().listen_with(([127, 0, 0, 1], 0).into(), options).unwrap();
    let address = reactor.context().listeners().local_address(listener).unwrap();
    let stop = reactor.handle();
    let (pid, of_client) = mpsc::channel();
    let mut server = Server {
        wrong,
        client: of_client,
        len,
        buffer: None,
        filled: 0,
        offers: 0,
        room: RemoteRegion { address: 0, len: 0, key: 0 },
        source: None,
        writing: None,
        input: Vec::new(),
        out: Vec::new(),
        values: BTreeMap::new(),
    };
    let server = thread::spawn(move || {
        reactor.run(&mut server).unwrap();
        reactor.shutdown(&mut server, Duration::from_secs(1)).unwrap();
        server
    });
    let client = client(address, args);
    // The server receives the process id, because it may have to send a signal to the client. In most tests, the server ignores the id.
    _ = pid.send(client.id());
    let output = client.wait_with_output().unwrap();
    stop.stop();
    (output, server.join().unwrap())
}

#[track_caller]
fn succeeded(output: &Output) -> String {
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert_eq!((output.status.code(), stderr.as_str()), (Some(0), ""), "{stdout}");
    stdout
}

/// Checks that the client failed, with one line that contains these words.
#[track_caller]
fn failed_with(output: &Output, words: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{words}: {stderr}");
    assert!(stderr.starts_with("valkey-rdma: ") && stderr.contains(words), "no {words:?} in {stderr}");
}

#[test]
fn values_are_those_that_were_set() {
    // The buffers are larger than a value, smaller than one, and of a size that is no multiple of a value or an answer.
    for (len, buffer) in [(1 << 20, "1M"), (100, "64"), (997, "7")] {
        for (count, size, pipeline) in
            [("300", "64", "1"), ("300", "10", "100"), ("10", "5000", "3"), ("1", "1", "1000")]
        {
            let args = ["-n", count, "-s", size, "-P", pipeline, "--buffer", buffer, "--no-crc"];
            let (output, server) = talk(Fault::Nothing, len, &args);
            let text = succeeded(&output);
            let wanted = format!("{count} values of {size} bytes, all as they were set: ");
            assert!(text.starts_with(&wanted) && text.ends_with(" offers of the buffer (iwarp)\n"), "{text}");
            assert!(server.values.is_empty() && server.out.is_empty() && server.input.is_empty());
            let bytes = count.parse::<usize>().unwrap() * size.parse::<usize>().unwrap();
            assert!(server.offers as usize > bytes / len, "{} offers for {bytes} bytes", server.offers);
        }
    }
}

#[test]
fn a_large_value_takes_several_buffers() {
    let (output, server) = talk(Fault::Nothing, 300_000, &["-n", "2", "-s", "3M", "-P", "2"]);
    succeeded(&output);
    assert_eq!(server.offers, 21, "6 MiB and a little more in buffers of 300,000 bytes");
}

/// Closes its first connection, and uses the link afterwards.
#[derive(Default)]
struct Closer(Vec<Result<(), String>>);

impl Handler for Closer {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let mut link = ValkeyLink::open(cx, conn, 4096).unwrap();
        cx.close(conn);
        link.out().extend(b"PING");
        let room = ValkeyCommand::Buffer(RemoteRegion { address: 1 << 20, len: 4096, key: 1 });
        self.0 = vec![link.command(cx, ValkeyCommand::Keepalive), link.on_command(cx, &room.encode())];
        cx.stop();
    }
}

/// A keepalive may be due, and commands of the server may arrive, while a client that has done its work closes the connection.
#[test]
fn what_is_due_after_the_close_is_no_failure() {
    let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp)).unwrap();
    let mut cx = reactor.context();
    let options = ListenOptions::new().framing(Framing::Raw).extensions(true);
    let listener = cx.listen_with(([127, 0, 0, 1], 0).into(), options).unwrap();
    let address = cx.listeners().local_address(listener).unwrap();
    cx.connect_with(address, ConnectOptions::new().framing(Framing::Raw).extensions(true)).unwrap();
    let mut closer = Closer::default();
    reactor.run(&mut closer).unwrap();
    assert_eq!(closer.0, [Ok(()), Ok(())]);
}

#[test]
fn a_command_prints_its_answer() {
    for (command, printed) in [
        (&["PING"][..], "PONG\n"),
        (&["SET", "k", "a b"], "OK\n"),
        (&["DEL", "-1"], "0\n"),
        (&["GET", "k"], "(nil)\n"),
        (&["KEYS", "*"], "a\n5\n(nil)\n"),
    ] {
        assert_eq!(succeeded(&talk(Fault::Nothing, 4096, command).0), printed);
    }
    // The client must escape control characters in a value, so that the terminal does not execute them.
    let shown = talk(Fault::Answer(b"$9\r\n\x1b[2J\xff\nend\r\n"), 4096, &["GET", "k"]);
    assert_eq!(succeeded(&shown.0), "\\u{1b}[2J\u{fffd}\nend\n");
}

#[test]
fn a_server_that_does_wrong_is_said_in_one_line() {
    const STRANGE: &[u8] = &[0xff; 32];
    const NOWHERE: &[u8] =
        &[0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const CLIENTS: &[u8] =
        &[0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for (wrong, words) in [
        (Fault::Command(STRANGE), "the server sends a command with the unknown opcode 65535"),
        (Fault::Command(&[0; 31]), "a command of 31 bytes where Valkey has 32"),
        (Fault::Command(&[0; 33]), "a command of 33 bytes where Valkey has 32"),
        (Fault::Command(NOWHERE), "a buffer of 0 bytes at 0x0"),
        (Fault::Command(CLIENTS), "a command that only clients send"),
        (Fault::Answer(b"hello\r\n"), "the server sends an answer that begins with the byte 0x68"),
        (Fault::Answer(b"-NOAUTH Authentication required.\r\n"), "the server refuses: NOAUTH Authentication required."),
        (Fault::Answer(b"+PANG\r\n"), "the server answers to Ping: PANG"),
        (Fault::Answer(b"+PONG\r\n+PONG\r\n"), "an answer without a request"),
        (Fault::Written(u32::MAX), "a write of 4294967295 bytes where"),
        (Fault::Value, "value 0 is not what was set"),
        (Fault::Forgetful, "the server answers to Get(0): (nil)"),
        (Fault::Closes, "the connection ended after 0 of 43 answers"),
    ] {
        failed_with(&talk(wrong, 4096, &["-n", "20"]).0, words);
    }
    failed_with(&talk(Fault::Silent, 4096, &["--timeout", "1"]).0, "longer than --timeout: 0 of 2003 answers");
    failed_with(&talk(Fault::Nothing, 4096, &["FLY", "away"]).0, "the server refuses: ERR unknown command 'FLY'");
}

/// A client that waits for an answer must send keepalives. The server also sends one keepalive to each client.
#[test]
fn a_client_that_waits_sends_keepalives() {
    assert_eq!(succeeded(&talk(Fault::Slow, 4096, &["PING"]).0), "PONG\n");
}

#[test]
fn a_client_that_is_interrupted_says_so_by_its_status() {
    let output = talk(Fault::Interrupted, 4096, &["PING"]).0;
    assert_eq!((output.status.code(), &output.stdout[..], &output.stderr[..]), (Some(130), &b""[..], &b""[..]));
}

#[test]
fn bad_input_is_one_line() {
    let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
    let client = |address, args: &[&str]| client(address, args).wait_with_output().unwrap();
    failed_with(&client(nobody, &[]), "no connection to 127.0.0.1:1: ");
    failed_with(&client(nobody, &["--pipeline", "0"]), "invalid value '0' for '--pipeline <N>'");
    failed_with(&client(nobody, &["--size", "0"]), "invalid value '0'");
    failed_with(&client(nobody, &["-n", "18446744073709551615"]), "is not in 1..=1099511627776");
}
