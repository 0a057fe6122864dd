//! A client's request, in the private data of its connect request: the parameters of a measurement ([`Job`]). If the server rejects the
//! connection, it answers with a [`Reply`].

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use rdma_reactor::transport::iwarp::CrcPolicy;
use rdma_reactor::{Config, Error, ProviderChoice, Reactor, Security, Wait};

use super::failure::Failure;
use super::frame;
use super::watch;

/// The time limit of one attempt to connect.
const CONNECT: Duration = Duration::from_secs(5);

/// The length of the largest message, in bytes. This is also the library's limit.
pub const MAX_SIZE: u64 = 1 << 30;
/// The largest number of messages in flight.
pub const MAX_DEPTH: u32 = 8192;
/// The largest number of connections of a client.
pub const MAX_CONNECTIONS: u16 = 1024;
/// The time for which a side polls before it sleeps, with `--wait spin`. It is longer than any
/// pause between the messages of a measurement, so a side does not sleep during the measurement. It
/// is short enough that an idle server sleeps.
pub const SPIN: Duration = Duration::from_millis(20);
/// The magic number: three bytes for the name of the protocol, and one for its version.
const MAGIC: [u8; 4] = *b"RPP\x02";

/// The quantity to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// One message back and forth; half the round trip
    Latency,
    /// A stream of messages, until the last is known to have arrived
    Throughput,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Latency => "latency",
            Self::Throughput => "throughput",
        })
    }
}

/// The operation that carries the data: messages, or one-sided operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Op {
    /// Messages
    Send,
    /// RDMA Writes; for latency, each side polls the memory that the peer writes to
    Write,
    /// RDMA Reads of the client; the latency is that of a whole read
    Read,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
        })
    }
}

/// The way in which both sides wait for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WaitMode {
    /// Sleep until something happens
    Event,
    /// Poll; needs one processor on each side
    Spin,
    /// Poll while messages arrive at short intervals, else sleep
    Adaptive,
}

impl WaitMode {
    /// Returns the mode that suits this machine: polling if there are at least two processors, one for each side.
    #[must_use]
    pub fn suited() -> Self {
        match std::thread::available_parallelism() {
            Ok(processors) if processors.get() >= 2 => Self::Spin,
            _ => Self::Event,
        }
    }

    /// Returns the corresponding setting of the library.
    ///
    /// # Errors
    /// The library does not support this setting.
    pub fn policy(self) -> Result<Wait, Failure> {
        match self {
            Self::Event => Ok(Wait::Event),
            Self::Spin => Ok(Wait::Spin(SPIN)),
            Self::Adaptive => Ok(Wait::Adaptive),
        }
    }
}

impl fmt::Display for WaitMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Event => "event",
            Self::Spin => "spin",
            Self::Adaptive => "adaptive",
        })
    }
}

/// The parameters of a measurement. A client sends them to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// The quantity to measure.
    pub mode: Mode,
    /// The operation that carries the data.
    pub op: Op,
    /// The wait mode of both sides.
    pub wait: WaitMode,
    /// True if both sides send a stream.
    pub bidirectional: bool,
    /// True if the embedded provider uses its CRC32C.
    pub crc: bool,
    /// True if each side writes every byte of a message before it sends it, and reads every byte after it has arrived.
    pub touch: bool,
    /// True if the peer may map the memory of one-sided operations and access it directly (`RegionOptions::direct`).
    pub direct: bool,
    /// True if the library leaves the choice of TCP's congestion control within a host to the system.
    pub system_congestion: bool,
    /// The length of a message, in bytes.
    pub size: u32,
    /// The number of messages in flight. In a latency measurement it is 1, unless messages are sent on a schedule.
    pub depth: u32,
    /// The number of the client's connections, which are measured at the same time.
    pub connections: u16,
}

impl Job {
    /// The parameters for which a server is prepared before its first client.
    pub const IDLE: Self = Self {
        mode: Mode::Latency,
        op: Op::Send,
        wait: WaitMode::Event,
        bidirectional: false,
        crc: true,
        touch: false,
        direct: false,
        system_congestion: false,
        size: 64,
        depth: 1,
        connections: 1,
    };

    /// Returns true if both sides poll memory. This is necessary for the latency of RDMA Writes, because nothing else reports that a
    /// block has arrived.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.mode == Mode::Latency && self.op == Op::Write
    }

    /// Returns a suitable number of messages in flight for messages of `size` bytes. This number is large enough to keep the path busy, and
    /// so small that the messages fit in the caches. In shared memory, the messages must fit in the caches of one processor: writing a
    /// receive buffer that is still in these caches is several times faster.
    #[must_use]
    pub const fn suited_depth(provider: ProviderChoice, size: u32) -> u32 {
        let bytes: u32 = if matches!(provider, ProviderChoice::Shm) { 512 << 10 } else { 2 << 20 };
        let depth = bytes / size;
        if depth < 4 {
            4
        } else if depth > 128 {
            128
        } else {
            depth
        }
    }

    /// Encodes the private data of the connect request: `magic:3 | version:1 | mode:1 | wait:1 | flags:1 | op:1 | size:4 | depth:4 |
    /// connections:2 | client:4`, little-endian. `client` is a number that identifies the client on all of its connections.
    #[must_use]
    pub fn encode(&self, client: u32) -> Vec<u8> {
        let mode = match self.mode {
            Mode::Latency => 0,
            Mode::Throughput => 1,
        };
        let wait = match self.wait {
            WaitMode::Event => 0,
            WaitMode::Spin => 1,
            WaitMode::Adaptive => 2,
        };
        let op = match self.op {
            Op::Send => 0,
            Op::Write => 1,
            Op::Read => 2,
        };
        let flags = [self.bidirectional, self.crc, self.touch, self.direct, self.system_congestion];
        let flags = flags.iter().rev().fold(0, |all, &flag| all << 1 | u8::from(flag));
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&[mode, wait, flags, op]);
        out.extend_from_slice(&self.size.to_le_bytes());
        out.extend_from_slice(&self.depth.to_le_bytes());
        out.extend_from_slice(&self.connections.to_le_bytes());
        out.extend_from_slice(&client.to_le_bytes());
        out
    }

    /// Decodes the private data of a connect request. Returns the job, and the number that identifies the client.
    ///
    /// # Errors
    /// The private data is not a valid job. The text gives the reason, and is short enough for a [`Reply`].
    pub fn decode(data: &[u8]) -> Result<(Self, u32), String> {
        if !data.starts_with(&MAGIC[..3]) {
            return Err("this is an rdma-pingpong server".into());
        }
        if data[3..].first() != MAGIC.last() {
            return Err("another version of rdma-pingpong".into());
        }
        let &[_, _, _, _, mode, wait, flags, op, s0, s1, s2, s3, d0, d1, d2, d3, q0, q1, c0, c1, c2, c3] = data else {
            return Err(format!("a request of {} bytes", data.len()));
        };
        let mode = match mode {
            0 => Mode::Latency,
            1 => Mode::Throughput,
            other => return Err(format!("unknown mode {other}")),
        };
        let wait = match wait {
            0 => WaitMode::Event,
            1 => WaitMode::Spin,
            2 => WaitMode::Adaptive,
            other => return Err(format!("unknown wait mode {other}")),
        };
        let op = match op {
            0 => Op::Send,
            1 => Op::Write,
            2 => Op::Read,
            other => return Err(format!("unknown operation {other}")),
        };
        let [bidirectional, crc, touch, direct, system_congestion] = [0, 1, 2, 3, 4].map(|bit| flags >> bit & 1 != 0);
        let misplaced = if op == Op::Send { direct } else { bidirectional || touch };
        if flags >> 5 != 0 || misplaced {
            return Err(format!("unknown flags {flags:#x}"));
        }
        let (size, depth) = (u32::from_le_bytes([s0, s1, s2, s3]), u32::from_le_bytes([d0, d1, d2, d3]));
        if !(1..=MAX_SIZE).contains(&size.into()) {
            return Err(format!("messages of {size} bytes"));
        }
        if !(1..=MAX_DEPTH).contains(&depth) {
            return Err(format!("a depth of {depth}"));
        }
        let connections = u16::from_le_bytes([q0, q1]);
        if !(1..=MAX_CONNECTIONS).contains(&connections) {
            return Err(format!("{connections} connections"));
        }
        let job =
            Self { mode, op, wait, bidirectional, crc, touch, direct, system_congestion, size, depth, connections };
        Ok((job, u32::from_le_bytes([c0, c1, c2, c3])))
    }

    /// Makes a reactor for this job, on either side.
    ///
    /// # Errors
    /// The provider is not available.
    pub fn reactor(&self, provider: ProviderChoice, security: &Security) -> Result<Reactor, Failure> {
        // RDMA Writes and Reads transfer meaningless bytes, so they need no encryption.
        let config = self.config(provider)?.security(security.clone()).allow_plain_remote_memory(true);
        Reactor::new(config).map_err(|error| match error {
            Error::Transport(error) if provider == ProviderChoice::Verbs => {
                Failure::new(format!("--provider verbs: {error}; --provider iwarp needs no RDMA device"))
            }
            other => other.into(),
        })
    }

    /// Returns the settings of the reactor for this job.
    fn config(&self, provider: ProviderChoice) -> Result<Config, Failure> {
        let (receive, send) = match self.mode {
            // The send queue must have space for the blocks that are sent but whose completions were not polled yet.
            Mode::Latency if self.is_watched() => (8, 4 * watch::BLOCKS),
            // Only one message is in flight. The reactor polls for send completions once for every quarter of the send queue, and reuses
            // buffers only after that. So a long send queue keeps many buffers in use. Large buffers would then not fit in the caches, so
            // only jobs with small messages have a long send queue.
            Mode::Latency if self.depth == 1 && self.size <= 16 << 10 => (8, 32),
            Mode::Throughput if self.op != Op::Send => (8, self.depth),
            // A peer returns credits when it has released about half of its receive buffers. With a window of twice the depth, the sender
            // of small messages does not have to wait for these credits.
            _ if self.size <= 16 << 10 => ((2 * self.depth).max(8), self.depth),
            _ => (self.depth.max(5), self.depth),
        };
        let max_message = if self.op == Op::Send { self.size } else { 0 }.max(frame::CONTROL_LEN as u32);
        // The extra 4096 bytes per message are for the library's header and for rounding. The 8 extra messages are for buffers that are
        // being filled, and for a connection that is still closing.
        let memory = 2 * (u64::from(max_message) + 4096) * u64::from(receive + send + 8) * u64::from(self.connections);
        Ok(Config::default()
            .provider(provider)
            .wait(self.wait.policy()?)
            .buffer_size(max_message)
            .receive_depth(receive)
            .send_depth(send)
            // The program does not wait for send completions: answers and credits show when it may send the next message.
            .quiet_sends(self.op == Op::Send)
            .completions(|c| c.queue = Some((receive + send + 2).max(1024)))
            .max_memory(usize::try_from(memory).unwrap_or(usize::MAX).max(64 << 20))
            .timeouts(|t| t.connect = CONNECT)
            .iwarp(|i| {
                // With the default limit, a connection to a busy peer on the same host could fall
                // back to TCP.
                i.within_host.meeting_timeout = CONNECT / 2;
                i.crc = if self.crc { CrcPolicy::default() } else { CrcPolicy::Off };
                if self.system_congestion {
                    i.within_host.congestion = None;
                }
            }))
    }
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, op, wait, size, .. } = self;
        let both = if self.bidirectional { " both ways" } else { "" };
        write!(f, "{op} {mode}{both}, {size} bytes, wait {wait}")?;
        if self.connections > 1 { write!(f, ", {} connections", self.connections) } else { Ok(()) }
    }
}

/// The reason why a server rejects a connection. It is sent in the private data of the reject.
// local: a text that fits private data
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The server is preparing for this job. The client must connect again soon.
    Adapting,
    /// The server is serving another client.
    Busy,
    /// The server does not understand the request.
    Refused(String),
}

impl Reply {
    /// Encodes the private data of the reject: a number for the kind, then the text of a refusal.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Adapting => vec![1],
            Self::Busy => vec![2],
            Self::Refused(why) => {
                let room = rdma_reactor::MAX_USER_PRIVATE_DATA - 1;
                let end = (0..=why.len().min(room)).rev().find(|&end| why.is_char_boundary(end)).unwrap_or(0);
                let mut out = vec![3];
                out.extend_from_slice(&why.as_bytes()[..end]);
                out
            }
        }
    }

    /// Decodes the private data of a reject. Returns `None` if it does not come from `rdma-pingpong`.
    #[must_use]
    pub fn decode(data: &[u8]) -> Option<Self> {
        match data {
            [1] => Some(Self::Adapting),
            [2] => Some(Self::Busy),
            [3, why @ ..] => Some(Self::Refused(String::from_utf8_lossy(why).into_owned())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_survives_the_trip() {
        let job = Job {
            mode: Mode::Throughput,
            op: Op::Send,
            wait: WaitMode::Spin,
            bidirectional: true,
            crc: false,
            touch: true,
            direct: false,
            system_congestion: true,
            size: 1 << 30,
            depth: 8192,
            connections: 1024,
        };
        let [write, read] = [Op::Write, Op::Read].map(|op| Job { op, ..Job::IDLE });
        for job in [Job::IDLE, job, write, read, Job { direct: true, ..read }] {
            let data = job.encode(0xffff_0007);
            assert!(data.len() <= rdma_reactor::MAX_USER_PRIVATE_DATA);
            assert_eq!(Job::decode(&data), Ok((job, 0xffff_0007)));
        }
    }

    #[test]
    fn a_job_of_somebody_else_is_refused_with_a_reason() {
        let good = Job::IDLE.encode(1);
        for (at, value, why) in [
            (0, b'X', "server"),
            (3, 9, "version"),
            (4, 7, "mode"),
            (6, 8, "flags"),
            (6, 32, "flags"),
            (7, 3, "operation"),
            (15, 255, "depth"),
            (17, 255, "connections"),
        ] {
            let mut data = good.clone();
            data[at] = value;
            assert!(Job::decode(&data).unwrap_err().contains(why), "{at}");
        }
        for len in 0..good.len() {
            let why = Job::decode(&good[..len]).unwrap_err();
            assert!(why.len() < rdma_reactor::MAX_USER_PRIVATE_DATA, "{why}");
        }
    }

    #[test]
    fn a_reply_survives_the_trip_and_fits() {
        for reply in [Reply::Adapting, Reply::Busy, Reply::Refused("unknown mode 7".into())] {
            assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        }
        let long = Reply::Refused("ü".repeat(100)).encode();
        assert!(long.len() <= rdma_reactor::MAX_USER_PRIVATE_DATA);
        assert!(std::str::from_utf8(&long[1..]).is_ok());
        assert_eq!(Reply::decode(b""), None);
    }

    #[test]
    fn every_job_makes_a_valid_reactor() {
        for size in [1, 64, 65_536, 1 << 20, 1 << 30] {
            for mode in [Mode::Latency, Mode::Throughput] {
                for op in [Op::Send, Op::Write, Op::Read] {
                    let job =
                        Job { mode, op, size, depth: Job::suited_depth(ProviderChoice::Iwarp, size), ..Job::IDLE };
                    job.reactor(ProviderChoice::Iwarp, &Security::Plain).unwrap();
                }
            }
        }
    }
}
