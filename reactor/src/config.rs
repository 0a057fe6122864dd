//! Settings, each with a default and a range.

use std::net::IpAddr;
use std::time::Duration;

use rdma_transport::caps::Moderation;
use rdma_transport::iwarp::IpNet;

use crate::error::Error;
use crate::limits::{BUFFER_ALIGN, CONTROL_SENDS, MAX_WINDOW, MIN_WINDOW, buffer_len};
use crate::security::Security;

/// Which provider carries the connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProviderChoice {
    /// RDMA devices, and the embedded provider for what they do not reach; which one and why is logged at `info`. A listener on an
    /// unspecified address takes connections of both. A connection takes the embedded provider if no device resolves the
    /// address within [`Config::resolve_timeout`]. Without devices or their libraries, the embedded provider alone.
    #[default]
    Auto,
    /// RDMA devices through librdmacm and libibverbs.
    Verbs,
    /// The embedded provider: iWARP in user space over TCP.
    Iwarp,
}

/// How a reactor waits for work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// Poll before sleeping when that pays, as measured: nearly the latency of `Spin` while messages follow each
    /// other closely, the processor time of `Event` while they do not. See [`Config::poll_share`].
    #[default]
    Adaptive,
    /// Sleep at once: no processor time while idle, a wake-up's latency per burst.
    Event,
    /// Poll for this long before sleeping: lowest latency, one core while traffic keeps coming.
    Spin(Duration),
}

/// How messages travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Framing {
    /// With a header and credits: both ends are of this library.
    #[default]
    Credits,
    /// As they are, for programs that know plain verbs only. There is no flow control and no keepalive: a side that sends more
    /// than the peer has receives for loses the connection. There is no goodbye either: on an iWARP device (siw) a close may lose
    /// what the peer has not got yet, so let the side close that gets the last message.
    Raw,
}

/// Settings of a reactor. Start from [`Config::default`], change what matters; checked by
/// [`crate::Reactor::new`].
#[derive(Clone, Debug)]
pub struct Config {
    pub(crate) provider: ProviderChoice,
    pub(crate) wait: Wait,
    pub(crate) poll_share: u8,
    pub(crate) buffer_size: u32,
    pub(crate) receive_depth: u32,
    pub(crate) send_depth: u32,
    pub(crate) shared_receives: Option<u32>,
    pub(crate) max_connections: u32,
    pub(crate) max_pending: u32,
    pub(crate) max_memory: usize,
    pub(crate) max_message: u64,
    pub(crate) eager_limit: usize,
    pub(crate) quiet_sends: bool,
    pub(crate) transfer_memory: usize,
    pub(crate) transfer_cache: usize,
    pub(crate) transfer_timeout: Duration,
    pub(crate) overtake: bool,
    pub(crate) max_inline: u32,
    pub(crate) completion_queue: u32,
    pub(crate) completion_vector: Option<u32>,
    pub(crate) completion_moderation: Option<Moderation>,
    pub(crate) completions_per_turn: u32,
    pub(crate) fair_messages: u32,
    pub(crate) fair_bytes: usize,
    pub(crate) backlog: u32,
    pub(crate) remote_queue: u32,
    pub(crate) connect_timeout: Duration,
    pub(crate) resolve_timeout: Duration,
    pub(crate) attempt_timeout: Duration,
    pub(crate) handshake_timeout: Duration,
    pub(crate) keepalive_interval: Duration,
    pub(crate) keepalive_timeout: Duration,
    pub(crate) close_timeout: Duration,
    pub(crate) flush_timeout: Duration,
    pub(crate) pool_idle: Duration,
    pub(crate) crc: bool,
    pub(crate) contain_panics: bool,
    pub(crate) allowed_peers: Option<Vec<IpNet>>,
    pub(crate) max_handshakes_per_peer: Option<usize>,
    pub(crate) request_grace: Duration,
    pub(crate) security: Security,
    pub(crate) plain_remote_memory: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            provider: ProviderChoice::Auto,
            wait: Wait::Adaptive,
            poll_share: 50,
            buffer_size: 8 << 10,
            receive_depth: 64,
            send_depth: 64,
            shared_receives: None,
            max_connections: 10_000,
            max_pending: 1024,
            max_memory: 4 << 30,
            max_message: 64 << 20,
            eager_limit: 256 << 10,
            quiet_sends: false,
            transfer_memory: 256 << 20,
            transfer_cache: 256 << 20,
            transfer_timeout: Duration::from_secs(30),
            overtake: false,
            max_inline: 256,
            completion_queue: 16 << 10,
            completion_vector: None,
            completion_moderation: None,
            completions_per_turn: 1024,
            fair_messages: 24,
            fair_bytes: 64 << 10,
            backlog: 1024,
            remote_queue: 65_536,
            connect_timeout: Duration::from_secs(10),
            resolve_timeout: Duration::from_millis(200),
            attempt_timeout: Duration::from_secs(2),
            handshake_timeout: Duration::from_secs(5),
            keepalive_interval: Duration::from_secs(5),
            keepalive_timeout: Duration::from_secs(15),
            close_timeout: Duration::from_secs(2),
            flush_timeout: Duration::from_secs(1),
            pool_idle: Duration::from_secs(30),
            crc: true,
            contain_panics: false,
            allowed_peers: None,
            max_handshakes_per_peer: None,
            request_grace: Duration::from_millis(500),
            security: Security::Plain,
            plain_remote_memory: false,
        }
    }
}

impl Config {
    /// Which provider carries the connections. Default: [`ProviderChoice::Auto`].
    #[must_use]
    pub const fn provider(mut self, provider: ProviderChoice) -> Self {
        self.provider = provider;
        self
    }

    /// How the reactor waits. Default: [`Wait::Adaptive`].
    #[must_use]
    pub const fn wait(mut self, wait: Wait) -> Self {
        self.wait = wait;
        self
    }

    /// What `Wait::Adaptive` may poll beyond what sleeping would have taken, percent of one processor: 1 to 100.
    /// Default: 50. An idle reactor does not poll at all.
    #[must_use]
    pub const fn poll_share(mut self, percent: u8) -> Self {
        self.poll_share = percent;
        self
    }

    /// Largest payload of a message this side takes in one buffer, bytes: 1 to 1 GiB, or what the device carries if that
    /// is less. Every buffer is this large. Default: 8 KiB.
    #[must_use]
    pub const fn buffer_size(mut self, bytes: u32) -> Self {
        self.buffer_size = bytes;
        self
    }

    /// Largest message this side takes at all, bytes, rounded up to whole KiB: 0 to 1 TiB, at most `transfer_memory`. A message
    /// that fits into one buffer (`buffer_size`) is taken in any case. What is past that comes in several buffers
    /// ([`Config::eager_limit`]) or is fetched from the sender's memory by RDMA Read, and arrives as one message. Default: 64 MiB.
    #[must_use]
    pub const fn max_message(mut self, bytes: u64) -> Self {
        self.max_message = bytes.div_ceil(1 << 10).saturating_mul(1 << 10);
        self
    }

    /// Largest message that this side sends at once in several buffers of the peer, bytes, if the peer's window and the send
    /// queue have room for all of it. Every other message past the peer's `buffer_size` is offered, and the peer fetches it,
    /// which takes two more messages and a Read. The peer puts the buffers together by a copy. 0 offers them all.
    /// Default: 256 KiB.
    #[must_use]
    pub const fn eager_limit(mut self, bytes: usize) -> Self {
        self.eager_limit = bytes;
        self
    }

    /// Whether messages that are copied are sent without [`on_send_complete`](crate::Handler::on_send_complete), neither for
    /// success nor for failure. Then the device tells of such messages only once in a quarter of the send queue, which saves
    /// the work of a completion and a callback for each. What fails one of them ends the connection, and `on_disconnect` says
    /// so. Messages out of regions, one-sided operations and raw connections are told of as ever, because the program waits to
    /// use its memory again. The buffers of up to a quarter of a send queue are held until later sends end. Default: false.
    /// `AsyncReactor` always sends so, except what `Connection::operate` waits for.
    ///
    /// ```
    /// # use rdma_reactor::Config;
    /// let config = Config::default().quiet_sends(true);
    /// ```
    #[must_use]
    pub const fn quiet_sends(mut self, quiet: bool) -> Self {
        self.quiet_sends = quiet;
        self
    }

    /// Memory for messages past `buffer_size`, bytes: so much for those that are being fetched or kept here, and so much
    /// again for copies of those that peers are to fetch. What has no room waits. Default: 256 MiB.
    #[must_use]
    pub const fn transfer_memory(mut self, bytes: usize) -> Self {
        self.transfer_memory = bytes;
        self
    }

    /// Memory of messages past `buffer_size` that stays registered when they are done, bytes, so that the next ones of about the
    /// same length register none. It comes on top of `transfer_memory`, in at most 256 pieces, and goes back to the system
    /// when it was not needed for `pool_idle`, or when memory cannot be registered otherwise. A piece may be longer than its
    /// message by an eighth. 0 keeps nothing. Default: 256 MiB.
    #[must_use]
    pub const fn transfer_cache(mut self, bytes: usize) -> Self {
        self.transfer_cache = bytes;
        self
    }

    /// Time that a message past `buffer_size` may stand still, in either direction, while the connection is otherwise alive:
    /// a peer that neither fetches what it was offered nor lets its own offer be fetched loses its connection, since others
    /// want the memory. The side that sends hears of every 4 MiB that its peer has fetched, so the time may be short for long
    /// messages, too. 1 ms to 24 h. Default: 30 s.
    #[must_use]
    pub const fn transfer_timeout(mut self, timeout: Duration) -> Self {
        self.transfer_timeout = timeout;
        self
    }

    /// Whether messages are delivered while a larger one before them is still being fetched. Default: no, all are
    /// delivered in the order of sending.
    #[must_use]
    pub const fn overtake(mut self, yes: bool) -> Self {
        self.overtake = yes;
        self
    }

    /// Receives posted per connection, which is the peer's window: 5 to 32,768 messages, of which three are kept for
    /// control. With `shared_receives`, the most that one peer is promised. Default: 64.
    #[must_use]
    pub const fn receive_depth(mut self, messages: u32) -> Self {
        self.receive_depth = messages;
        self
    }

    /// Receives that all connections of a device share, 8 to 32,768 messages, instead of `receive_depth` for each: for many
    /// connections that are idle most of the time. Each may be sent five messages at least, of which three are kept for
    /// control, and more as it is busy, up to `receive_depth`; what peers are told they may send is never more than is
    /// posted. One eighth is never promised, so `n` receives are enough for `7 n / 40` connections; one more is refused
    /// (`RejectReason::Busy`, [`crate::ConnectError::Limit`]). Connections with `Framing::Raw` keep receives of their own. A
    /// device without shared receive queues: [`crate::ConnectError::Unsupported`], and who connects to it is refused.
    ///
    /// A busy connection is faster with receives of its own, and a peer that breaks the protocol can take receives that
    /// were promised to others until that is noticed: on iWARP devices a message that finds none ends its connection.
    /// Default: `None`, each connection has its own.
    #[must_use]
    pub const fn shared_receives(mut self, messages: Option<u32>) -> Self {
        self.shared_receives = messages;
        self
    }

    /// Sends per connection that may be on their way: 1 to 16,384 messages. Default: 64.
    #[must_use]
    pub const fn send_depth(mut self, messages: u32) -> Self {
        self.send_depth = messages;
        self
    }

    /// Connections of this reactor, both directions together, established or not. Default: 10,000.
    #[must_use]
    pub const fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections;
        self
    }

    /// Accepted connections that are not established yet; more are rejected. Default: 1,024.
    #[must_use]
    pub const fn max_pending(mut self, connections: u32) -> Self {
        self.max_pending = connections;
        self
    }

    /// Memory of the buffer pools, bytes. A connection takes `buffer_size` x (`receive_depth` + `send_depth` + 2), with
    /// `shared_receives` only `buffer_size` x (`send_depth` + 2).
    /// At least one connection must fit. On the embedded provider, untouched pages cost nothing. Default: 4 GiB.
    #[must_use]
    pub const fn max_memory(mut self, bytes: usize) -> Self {
        self.max_memory = bytes;
        self
    }

    /// Bytes that are copied into a work request at most, so that the device need not fetch them: 0 to 1,024, or what the
    /// device takes if that is less. More makes the entries of an adapter's send queue longer. Default: 256.
    #[must_use]
    pub const fn max_inline(mut self, bytes: u32) -> Self {
        self.max_inline = bytes;
        self
    }

    /// The completion vector of the completion queues, which is the interrupt, and so the processor, that their events come on:
    /// 0 to what `Capabilities::completion_vectors` says, less one. A number that a device with several vectors does not have
    /// is an error when the device is first used; a device with one has no choice, and says so at `info`. Default: `None`, the
    /// reactors of the process are spread over the vectors in turn.
    #[must_use]
    pub const fn completion_vector(mut self, vector: Option<u32>) -> Self {
        self.completion_vector = vector;
        self
    }

    /// Entries of a completion queue, or what the device has if that is less; connections that do not fit get another one.
    /// Default: 16,384.
    #[must_use]
    pub const fn completion_queue(mut self, entries: u32) -> Self {
        self.completion_queue = entries;
        self
    }

    /// Has the device wake the reactor only when so many completions have gathered, or so many microseconds have passed since
    /// the first: 1 to what `Capabilities::completion_moderation` says, both. Saves wake-ups at the cost of latency, where
    /// the reactor sleeps; one that polls does not notice. A device that cannot: [`crate::ConnectError::Unsupported`], and
    /// who connects to it is refused. Default: an event for each completion that is waited for.
    ///
    /// ```
    /// use rdma_reactor::Config;
    ///
    /// let config = Config::default().completion_moderation(16, 20);
    /// # drop(config);
    /// ```
    #[must_use]
    pub const fn completion_moderation(mut self, completions: u16, microseconds: u16) -> Self {
        self.completion_moderation = Some(Moderation { completions, microseconds });
        self
    }

    /// Completions handled in one turn before the other stages get theirs. A turn takes as long as their callbacks: a loop that shares
    /// its thread with timers of its own wants fewer, such as 64. Default: 1,024.
    #[must_use]
    pub const fn completions_per_turn(mut self, completions: u32) -> Self {
        self.completions_per_turn = completions;
        self
    }

    /// What one connection may have handled in one turn while there are others: completions, and bytes received; both at
    /// least 1. What is beyond waits, in order, for the next turn, behind what has come on other connections. A
    /// connection that is alone is not bounded so. Default: 24 and 64 KiB.
    ///
    /// ```
    /// use rdma_reactor::Config;
    ///
    /// let config = Config::default().fairness(64, 256 << 10);
    /// # drop(config);
    /// ```
    #[must_use]
    pub const fn fairness(mut self, completions: u32, bytes: usize) -> Self {
        self.fair_messages = completions;
        self.fair_bytes = bytes;
        self
    }

    /// Backlog of a listener, connections. Default: 1,024.
    #[must_use]
    pub const fn backlog(mut self, connections: u32) -> Self {
        self.backlog = connections;
        self
    }

    /// Messages and sends of other threads that may be on their way to the reactor: 1 to 16,777,216. More are
    /// refused with `RemoteError::Full`. Default: 65,536.
    #[must_use]
    pub const fn remote_queue(mut self, commands: u32) -> Self {
        self.remote_queue = commands;
        self
    }

    /// Time an outgoing connection may take until `on_connect`. 1 ms to 24 h. Default: 10 s.
    #[must_use]
    pub const fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Time that an RDMA device has to resolve the address of a peer, before [`ProviderChoice::Auto`] takes the embedded provider
    /// for the connection, with a line in the log at `info`. A path of InfiniBand that was not used for a while may take
    /// longer than the default. The other choices do not use it. 1 ms to 24 h. Default: 200 ms.
    #[must_use]
    pub const fn resolve_timeout(mut self, timeout: Duration) -> Self {
        self.resolve_timeout = timeout;
        self
    }

    /// Time that one address of a peer has to answer, as long as the peer has further addresses ([`crate::Context::connect_any`],
    /// [`crate::Context::connect_host`]); then the next one is tried. The last address has `connect_timeout`, and no address has
    /// more than that. 1 ms to 24 h. Default: 2 s, in which TCP asks twice.
    #[must_use]
    pub const fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = timeout;
        self
    }

    /// Time an incoming connection may take from the accept to `on_connect`. 1 ms to 24 h. Default: 5 s.
    #[must_use]
    pub const fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// Silence after which the peer is asked whether it is there, and silence after which it is given up: each 1 ms to 24 h, the second
    /// longer than the first. Defaults: 5 s and 15 s. Only the second matters to the peer: it answers whatever its own settings are.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::Config;
    ///
    /// let config = Config::default().keepalive(Duration::from_secs(1), Duration::from_secs(4));
    /// # drop(config);
    /// ```
    #[must_use]
    pub const fn keepalive(mut self, interval: Duration, timeout: Duration) -> Self {
        self.keepalive_interval = interval;
        self.keepalive_timeout = timeout;
        self
    }

    /// Time a closed connection gets to send what was accepted, and again for each message, or 4 MiB of one, that the peer
    /// has fetched meanwhile. What is left then is not sent: `on_send_complete` says so. On an iWARP device (siw) the connection
    /// ends when the peer has got everything, within the same time. 1 ms to 24 h. Default: 2 s.
    #[must_use]
    pub const fn close_timeout(mut self, timeout: Duration) -> Self {
        self.close_timeout = timeout;
        self
    }

    /// Time a device gets to flush a connection's queues before it is destroyed. 1 ms to 24 h. Default: 1 s.
    #[must_use]
    pub const fn flush_timeout(mut self, timeout: Duration) -> Self {
        self.flush_timeout = timeout;
        self
    }

    /// Time after which the pool gives memory back to the system: slabs whose buffers nobody holds, and which were not
    /// needed since. The first slab stays. Default: 30 s.
    #[must_use]
    pub const fn pool_idle(mut self, time: Duration) -> Self {
        self.pool_idle = time;
        self
    }

    /// Whether the embedded provider protects every frame with a CRC32C. Off only when the peer agrees. Default: on.
    #[must_use]
    pub const fn crc(mut self, on: bool) -> Self {
        self.crc = on;
        self
    }

    /// Whether a panic of a callback ends its connection or endpoint, and not the turn. The connection ends as by
    /// [`crate::Context::abort`], with `DisconnectReason::Internal` and the panic's text; a connect request is refused; a timer,
    /// a descriptor, a message of another thread and an event of a device are done with. `Stats` counts the panics, and each has a
    /// line in the log. What the handler has left half done in its own state is the handler's business. This needs
    /// `panic = "unwind"`, the default of Rust. Default: off; a panic leaves the call of the reactor, which can only be dropped
    /// then.
    #[must_use]
    pub const fn contain_panics(mut self, on: bool) -> Self {
        self.contain_panics = on;
        self
    }

    /// The networks that may connect. Others are refused before anything is allocated for them, and the embedded provider
    /// resets their connections before it reads from them. An address is no proof of who somebody is. Default: `None`,
    /// everybody may.
    #[must_use]
    pub fn allowed_peers(mut self, networks: Option<Vec<IpNet>>) -> Self {
        self.allowed_peers = networks;
        self
    }

    /// Connections from one address that have not sent their request yet, at least 1, on the embedded provider; see
    /// `IwarpConfig::max_handshakes_per_peer`. Default: `None`, half of all that there may be.
    #[must_use]
    pub const fn max_handshakes_per_peer(mut self, connections: Option<usize>) -> Self {
        self.max_handshakes_per_peer = connections;
        self
    }

    /// Time that a new connection of the embedded provider has for sending its request before it may have to give way to
    /// others; see `IwarpConfig::request_grace`. 1 ms to 24 h. Default: 500 ms.
    #[must_use]
    pub const fn request_grace(mut self, time: Duration) -> Self {
        self.request_grace = time;
        self
    }

    /// How connections are secured, where [`crate::ConnectOptions::security`] and [`crate::ListenOptions::security`] say nothing
    /// else. Datagrams are never secured. Default: [`Security::Plain`].
    #[must_use]
    pub fn security(mut self, security: Security) -> Self {
        self.security = security;
        self
    }

    /// Whether one-sided operations, and regions that peers may use, are allowed on secured connections, although adapters
    /// can neither encrypt nor authenticate them: whoever is on the way reads what they carry, can change it, and can use the
    /// keys of regions that it has seen. Default: no, [`crate::SendErrorKind::PlainRemoteMemory`].
    #[must_use]
    pub const fn allow_plain_remote_memory(mut self, yes: bool) -> Self {
        self.plain_remote_memory = yes;
        self
    }

    /// Whether a host may connect.
    pub(crate) fn admits(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.allowed_peers.as_ref().is_none_or(|networks| networks.iter().any(|network| network.contains(&peer)))
    }

    /// Checks every setting against its range.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        let check = |setting, value: u64, low: u64, high: u64, range| {
            if (low..=high).contains(&value) { Ok(()) } else { Err(Error::Config { setting, value, range }) }
        };
        check("poll_share", self.poll_share.into(), 1, 100, "1 to 100 percent")?;
        check("buffer_size", self.buffer_size.into(), 1, 1 << 30, "1 to 1,073,741,824 bytes")?;
        let window = (u64::from(MIN_WINDOW), u64::from(MAX_WINDOW));
        check("receive_depth", self.receive_depth.into(), window.0, window.1, "5 to 32,768 messages")?;
        check("send_depth", self.send_depth.into(), 1, 16_384, "1 to 16,384 messages")?;
        let most = (self.transfer_memory as u64).min(1 << 40);
        check("max_message", self.max_message, 0, most, "0 to transfer_memory, at most 1 TiB: set both")?;
        check("max_connections", self.max_connections.into(), 1, 1 << 24, "1 to 16,777,216")?;
        check("max_pending", self.max_pending.into(), 1, 1 << 24, "1 to 16,777,216")?;
        let buffers = self.shared_receives.unwrap_or(self.receive_depth) + self.send_slots();
        let needed = buffer_len(self.buffer_size).next_multiple_of(BUFFER_ALIGN) as u64 * u64::from(buffers);
        check(
            "max_memory",
            self.max_memory as u64,
            needed,
            u64::MAX,
            "room for the buffers of one connection: buffer_size x (receives + send_depth + 2)",
        )?;
        if let Some(receives) = self.shared_receives {
            check("shared_receives", receives.into(), 8, 32_768, "8 to 32,768 messages")?;
        }
        let shared = self.shared_receives.map_or(0, |receives| receives + self.send_slots());
        let room = u64::from(self.completion_room().max(shared));
        check(
            "completion_queue",
            self.completion_queue.into(),
            room,
            1 << 24,
            "at least the sends, receives and shared receives of one connection, at most 16,777,216",
        )?;
        if let Some(Moderation { completions, microseconds }) = self.completion_moderation {
            let most = u64::from(u16::MAX);
            check("completion_moderation completions", completions.into(), 1, most, "1 to 65,535")?;
            check("completion_moderation microseconds", microseconds.into(), 1, most, "1 to 65,535")?;
        }
        check("completions_per_turn", self.completions_per_turn.into(), 1, u64::from(u32::MAX), "at least 1")?;
        check("fairness completions", self.fair_messages.into(), 1, u64::from(u32::MAX), "at least 1")?;
        check("fairness bytes", self.fair_bytes as u64, 1, u64::MAX, "at least 1")?;
        check("max_inline", self.max_inline.into(), 0, 1024, "0 to 1,024 bytes")?;
        if let Some(most) = self.max_handshakes_per_peer {
            check("max_handshakes_per_peer", most as u64, 1, u64::MAX, "at least 1")?;
        }
        check("backlog", self.backlog.into(), 1, 1 << 16, "1 to 65,536")?;
        check("remote_queue", self.remote_queue.into(), 1, 1 << 24, "1 to 16,777,216")?;
        let day = Duration::from_secs(86_400);
        for (setting, value) in [
            ("transfer_timeout", self.transfer_timeout),
            ("connect_timeout", self.connect_timeout),
            ("resolve_timeout", self.resolve_timeout),
            ("attempt_timeout", self.attempt_timeout),
            ("handshake_timeout", self.handshake_timeout),
            ("keepalive interval", self.keepalive_interval),
            ("keepalive timeout", self.keepalive_timeout),
            ("close_timeout", self.close_timeout),
            ("flush_timeout", self.flush_timeout),
            ("pool_idle", self.pool_idle),
            ("request_grace", self.request_grace),
        ] {
            if value < Duration::from_millis(1) || value > day {
                let value = u64::try_from(value.as_millis()).unwrap_or(u64::MAX);
                return Err(Error::Config { setting, value, range: "1 ms to 24 h (given here in ms)" });
            }
        }
        if self.keepalive_timeout <= self.keepalive_interval {
            let value = u64::try_from(self.keepalive_timeout.as_millis()).unwrap_or(u64::MAX);
            return Err(Error::Config {
                setting: "keepalive timeout",
                value,
                range: "longer than the keepalive interval (both in ms)",
            });
        }
        Ok(())
    }

    /// Largest message fetched, in the unit of the greeting.
    pub(crate) fn max_message_in_kib(&self) -> u32 {
        u32::try_from(self.max_message >> 10).unwrap_or(u32::MAX)
    }

    /// Send work requests of a connection: two are kept for control messages.
    pub(crate) const fn send_slots(&self) -> u32 {
        self.send_depth + CONTROL_SENDS
    }

    /// Completions a connection may have outstanding.
    pub(crate) const fn completion_room(&self) -> u32 {
        self.receive_depth + self.send_slots()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_bad_values_are_named() {
        Config::default().validate().unwrap();
        let error = Config::default().receive_depth(4).validate().unwrap_err().to_string();
        assert_eq!(error, "receive_depth is 4: it must be 5 to 32,768 messages");
        assert!(Config::default().buffer_size(0).validate().is_err());
        // A pool that has no room for one connection: 130 buffers of 8 KiB, each with its header.
        assert!(Config::default().max_memory(130 * 8256).validate().is_ok());
        let error = Config::default().max_memory(130 * 8256 - 1).validate().unwrap_err().to_string();
        assert!(error.starts_with("max_memory is 1073279: it must be room for"), "{error}");
        assert!(Config::default().completion_queue(10).validate().is_err());
        assert!(Config::default().completion_moderation(0, 10).validate().is_err());
        assert!(Config::default().max_inline(1025).validate().is_err());
        assert!(Config::default().max_handshakes_per_peer(Some(0)).validate().is_err());
        assert!(Config::default().resolve_timeout(Duration::ZERO).validate().is_err());
        assert!(Config::default().request_grace(Duration::ZERO).validate().is_err());
        for wrong in [7, 32_769, 16_384] {
            assert!(Config::default().shared_receives(Some(wrong)).validate().is_err());
        }
        let second = Duration::from_secs(1);
        assert!(Config::default().keepalive(second, second).validate().is_err());
    }

    #[test]
    fn networks_that_may_connect_are_told_from_others() {
        let config = Config::default().allowed_peers(Some(vec!["192.0.2.0/24".parse().unwrap()]));
        for (peer, admitted) in [("192.0.2.9", true), ("::ffff:192.0.2.9", true), ("192.0.3.9", false), ("::1", false)]
        {
            assert_eq!(config.admits(peer.parse().unwrap()), admitted, "{peer}");
        }
        assert!(Config::default().admits("::1".parse().unwrap()));
        assert!(!Config::default().allowed_peers(Some(Vec::new())).admits("::1".parse().unwrap()));
    }
}
