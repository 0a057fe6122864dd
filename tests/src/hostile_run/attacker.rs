//! An attacker: sockets that begin to connect, and do not go on.

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

/// Time between two octets of a slow greeting.
const OCTET: Duration = Duration::from_secs(1);
/// The first address of attackers from many, and their number.
const FIRST: u32 = Ipv4Addr::new(127, 0, 1, 1).to_bits();
const MANY: u64 = 64;

/// The last thing that an attacker does on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stage {
    /// TCP is connected, and nothing more.
    Connected,
    /// An octet of the MPA request goes out each second.
    SlowRequest,
    /// The MPA request has gone out. Nobody waits for its reply.
    Requested,
    /// The first FPDU of the peer-to-peer mode follows the reply. The hello, or the handshake, is missing.
    Started,
    /// The first part of the handshake that secures the connection follows.
    HalfSecured,
    /// The connection is up, and a message was echoed.
    Up,
}

/// Where attackers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// The address that honest clients have, too.
    Shared,
    /// Another address.
    One,
    /// 64 other addresses.
    Many,
}

/// An attacker's plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// How far each connection gets.
    pub stage: Stage,
    /// The largest number of connections that are open.
    pub held: usize,
    /// Connections opened per second; `None`: as fast as it goes.
    pub rate: Option<u32>,
    /// The addresses that they come from.
    pub source: Source,
    /// Who ends a connection.
    pub end: End,
}

/// Who ends the connections of an attacker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// The server. Nothing new is opened while as many are open as may be.
    Server,
    /// The attacker closes the oldest one for a new one when as many are open as may be.
    Renewed,
    /// The attacker resets each one when it has got as far as it was to.
    Reset,
}

/// The settings of the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The server.
    pub server: SocketAddr,
    /// What an honest client proves who it is with. The attacker repeats its octets.
    pub credentials: Credentials,
    /// What to do.
    pub plan: Plan,
}

/// What the attacker has done.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Connections of TCP, or messages of a flood.
    pub opened: u64,
    /// Connections that got as far as they were to.
    pub reached: u64,
    /// Requests that the server has refused.
    pub refused: u64,
}

static OPENED: AtomicU64 = AtomicU64::new(0);
static REACHED: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);

fn count(what: &AtomicU64) {
    what.fetch_add(1, Ordering::Relaxed);
}

impl Source {
    /// Returns the address that connection `nth` comes from.
    fn address(self, nth: u64) -> Ipv4Addr {
        match self {
            Self::Shared => Ipv4Addr::LOCALHOST,
            Self::One => Ipv4Addr::new(127, 0, 0, 77),
            Self::Many => Ipv4Addr::from_bits(FIRST + (nth % MANY) as u32),
        }
    }
}

/// Makes a socket of an address. It is reset when it is closed, so that it leaves nothing behind in the kernel.
fn socket(source: Ipv4Addr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(IpAddr::V4(source), 0).into())?;
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket)
}

/// The octets of a connection.
#[derive(Debug)]
struct Script {
    request: Vec<u8>,
    /// What follows the reply.
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
            // The two frames of the beginning, and the message. What ends the connection in order is left away.
            Stage::Up => frames.get(..3),
            _ => Some(&[][..]),
        };
        Ok(Self { request, behind: frames.ok_or("an honest client sends fewer frames")?.concat() })
    }
}

/// A connection that is held.
#[derive(Debug)]
struct Held {
    /// Its number.
    nth: u64,
    stream: TcpStream,
    /// Octets of the request that have gone out.
    sent: usize,
    /// The reply, as far as it has come.
    reply: Vec<u8>,
    progress: Progress,
}

/// What has happened on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Connecting,
    /// TCP is connected, and the request has gone out, or goes out slowly.
    Connected,
    /// The reply has come, and what follows it has gone out.
    Answered,
}

impl Held {
    /// Goes on; `None` if the connection is over, or to be reset.
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
                // The answer to all that has gone out.
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

    /// Sends one more octet of the request.
    fn drip(&mut self, script: &Script) {
        if let (Progress::Connected, Some(octet)) = (self.progress, script.request.get(self.sent)) {
            // What the server has ended is noticed by its event.
            let _ = self.stream.write(&[*octet]);
            self.sent += 1;
        }
    }
}

/// Whether an MPA reply refuses the connection.
fn is_refusal(reply: &[u8]) -> bool {
    const REJECT: u8 = 0x20;
    reply.len() >= MPA_HEADER && reply[16] & REJECT != 0
}

/// Connections that are held open.
struct Holding {
    poll: Poll,
    slots: Vec<Option<Held>>,
    vacant: Vec<usize>,
    /// The slots and numbers of the connections, the oldest first, and of some that are gone.
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

    /// Returns the slot of the oldest connection.
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

/// The number of connections that are due.
struct Pace {
    since: Instant,
    rate: u32,
    opened: u64,
}

impl Pace {
    /// Whether another one is due.
    fn is_due(&self) -> bool {
        self.since.elapsed().as_secs_f64() * f64::from(self.rate) >= self.opened as f64
    }
}

fn attack(settings: &Settings, script: &Script) -> Result<()> {
    /// Connections opened between two looks at the events.
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
                    // What was not opened in time is not made up for.
                    pace = Pace { since: Instant::now(), opened: 0, ..pace };
                    break;
                }
                if let Some(oldest) = holding.oldest() {
                    holding.end(oldest);
                }
            }
            // Without a port or a descriptor it goes on with those that it has.
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

/// Prepares, answers, and attacks from the order to go until standard input ends.
///
/// # Errors
/// An honest client does not come up before the attack.
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
            let report = Report { opened: now(&OPENED), reached: now(&REACHED), refused: now(&REFUSED) };
            if line == REPORT && answer(&report).is_err() {
                break;
            }
        }
        std::process::exit(0);
    });
    attack(settings, &script)
}
