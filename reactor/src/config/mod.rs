//! The settings of a reactor. Each setting has a default and a range.

mod completions;
mod large;
mod timeouts;

use std::net::IpAddr;
use std::time::Duration;

use rdma_transport::caps::Moderation;
use rdma_transport_embedded::iwarp::{IpNet, IwarpConfig, SharedMemoryPolicy};

pub use self::completions::CompletionSettings;
pub use self::large::LargeMessageSettings;
pub use self::timeouts::Timeouts;
use crate::error::Error;
use crate::limits::{BUFFER_ALIGN, CONTROL_SENDS, MAX_WINDOW, MIN_WINDOW, buffer_len};
use crate::security::Security;

/// The provider that carries the connections. There are two kinds: RDMA devices, and the embedded provider, which works
/// on any host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProviderChoice {
    /// Both RDMA devices and the embedded provider, which carries the connections to addresses that no device reaches.
    /// The reactor logs at `info` which of them it uses, and why.
    ///
    /// - A listener on an unspecified address, such as `0.0.0.0`, accepts connections on RDMA devices and on the
    ///   embedded provider.
    /// - A connection uses the embedded provider if no device resolves the address within [`Timeouts::resolve`].
    /// - If the host has no devices, or lacks their libraries, the reactor uses only the embedded provider.
    /// - A connection of the embedded provider begins on TCP. It moves to memory that both processes map if the peer is
    ///   on the same host and runs as the same user, and if both sides use `Auto` or `Shm`.
    ///   [`IwarpConfig::shared_memory`] can forbid such memory. If the reactor cannot verify these conditions, the
    ///   connection stays on TCP, and the reactor logs the reason at `debug`.
    #[default]
    Auto,
    /// Only RDMA devices, through librdmacm and libibverbs.
    Verbs,
    /// Only the embedded provider with iWARP over TCP in user space, even for peers on the same host.
    Iwarp,
    /// Only the embedded provider with memory that both processes map, for peers on the same host that run as the same
    /// user. Connections to other peers fail, and connections from other peers are rejected
    /// ([`crate::RejectReason::SharedMemoryOnly`]).
    Shm,
}

/// The way in which a reactor waits for work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// Polls before sleeping if the reactor's measurements show that messages follow each other closely enough. In such
    /// periods, the latency is nearly that of `Spin`. At other times, the use of processor time is nearly that of
    /// `Event`. In comparison with `Event`, polling costs at most half of one core's time in addition.
    #[default]
    Adaptive,
    /// Sleeps immediately when there is no work. The reactor uses no processor time while idle, but the first message
    /// after each sleep has the latency of a wake-up.
    Event,
    /// Polls for this duration before sleeping. This has the lowest latency, and occupies one core while messages keep
    /// arriving. Every 50 us, the polling reactor yields the core to other runnable threads. So if two reactors share a
    /// core, neither has to wait until the time slice of the other one ends.
    Spin(Duration),
}

/// The format of the messages on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Framing {
    /// Messages with a header, and with credits for flow control. Both sides must use this library.
    #[default]
    Credits,
    /// Messages without a header, for peers that use plain verbs. There is no flow control and no keepalive. A side
    /// that sends a message for which the peer has posted no receive loses the connection.
    ///
    /// Nor is there a goodbye message before a close. On an iWARP device (siw), a close may lose messages that the peer
    /// has not received yet. So the side that receives the last message should close the connection.
    Raw,
}

/// The settings of a reactor. Start from [`Config::default`] or a preset such as [`Config::latency`], and change single
/// settings. [`crate::Reactor::new`] checks all settings.
#[derive(Clone, Debug)]
pub struct Config {
    pub(crate) provider: ProviderChoice,
    pub(crate) wait: Wait,
    pub(crate) look_interval: Duration,
    pub(crate) buffer_size: u32,
    pub(crate) receive_depth: u32,
    pub(crate) send_depth: u32,
    pub(crate) shared_receives: Option<u32>,
    pub(crate) max_connections: u32,
    pub(crate) max_connections_per_host: u32,
    pub(crate) max_pending: u32,
    pub(crate) max_memory: usize,
    pub(crate) quiet_sends: bool,
    pub(crate) max_inline: u32,
    pub(crate) fair_messages: u32,
    pub(crate) fair_bytes: usize,
    pub(crate) handle_queue: u32,
    pub(crate) contain_panics: bool,
    pub(crate) allowed_peers: Option<Vec<IpNet>>, // local: a setting
    pub(crate) max_handshakes_per_peer: Option<usize>,
    pub(crate) timeouts: Timeouts,
    pub(crate) large: LargeMessageSettings,
    pub(crate) completions: CompletionSettings,
    pub(crate) iwarp: IwarpConfig,
    pub(crate) security: Security,
    pub(crate) plain_remote_memory: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            provider: ProviderChoice::Auto,
            wait: Wait::Adaptive,
            look_interval: Duration::from_millis(1),
            buffer_size: 8 << 10,
            receive_depth: 64,
            send_depth: 64,
            shared_receives: None,
            max_connections: 10_000,
            max_connections_per_host: 64,
            max_pending: 1024,
            max_memory: 4 << 30,
            quiet_sends: false,
            max_inline: 256,
            fair_messages: 24,
            fair_bytes: 64 << 10,
            handle_queue: 65_536,
            contain_panics: false,
            allowed_peers: None,
            max_handshakes_per_peer: None,
            timeouts: Timeouts::default(),
            large: LargeMessageSettings::default(),
            completions: CompletionSettings::default(),
            iwarp: embedded_defaults(),
            security: Security::Plain,
            plain_remote_memory: false,
        }
    }
}

/// Returns the default settings of the embedded provider in a reactor. The provider's protocol extensions are on,
/// because the greetings of two reactors negotiate them.
fn embedded_defaults() -> IwarpConfig {
    let mut defaults = IwarpConfig::default();
    (defaults.extensions, defaults.shared_memory) = (true, SharedMemoryPolicy::Prefer);
    defaults
}

impl Config {
    /// Returns settings for the lowest latency of small messages. The reactor polls for up to 10 ms before it sleeps,
    /// so it occupies one processor while messages keep arriving.
    #[must_use]
    pub fn latency() -> Self {
        Self::default().wait(Wait::Spin(Duration::from_millis(10)))
    }

    /// Returns settings for high throughput on few connections: buffers of 64 KiB, and 125 messages in flight in each
    /// direction. Each connection uses 16 MiB of `max_memory`.
    #[must_use]
    pub fn throughput() -> Self {
        Self::default().buffer_size(64 << 10).receive_depth(128).send_depth(128)
    }

    /// Returns settings for up to 100,000 connections that are idle most of the time: 5 messages in flight in each
    /// direction, and buffers of 4 KiB. Each connection uses 73 KiB of `max_memory`.
    #[must_use]
    pub fn many_connections() -> Self {
        let small = Self::default().buffer_size(4 << 10).receive_depth(8).send_depth(8);
        small.max_connections(100_000).max_memory(8 << 30)
    }

    /// Returns settings for little memory: 5 messages of 2 KiB in flight in each direction. The
    /// buffers of 64 connections fit into 4 MiB. `LargeMessageSettings::max_message` is 1 MiB, and
    /// `LargeMessageSettings::memory` is 2 MiB.
    #[must_use]
    pub fn small() -> Self {
        Self::default()
            .buffer_size(2 << 10)
            .receive_depth(8)
            .send_depth(8)
            .max_connections(64)
            .max_connections_per_host(8)
            .max_pending(64)
            .max_memory(4 << 20)
            .handle_queue(256)
            .completions(|completions| completions.queue = Some(1024))
            .large_messages(|large| (large.max_message, large.memory, large.cache) = (1 << 20, 2 << 20, 0))
    }

    /// Sets the provider that carries the connections. Default: [`ProviderChoice::Auto`].
    #[must_use]
    pub const fn provider(mut self, provider: ProviderChoice) -> Self {
        self.provider = provider;
        self
    }

    /// Sets how the reactor waits for work: by polling, sleeping or both. Default: [`Wait::Adaptive`].
    #[must_use]
    pub const fn wait(mut self, wait: Wait) -> Self {
        self.wait = wait;
        self
    }

    /// Sets the longest interval between two checks for events other than completions, while completions keep arriving.
    /// Such events are new connections, ready descriptors, and timers of devices. After a check that finds an event,
    /// the reactor checks again after a twentieth of this interval. After each check that finds nothing, the time to
    /// the next check doubles, up to this interval. A callback that is running when a check is due delays the check
    /// until it returns. Range: 1 us to 1 s. Default: 1 ms.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use rdma_reactor::Config;
    /// // New connections may wait: each check is a system call.
    /// let config = Config::default().look_interval(Duration::from_millis(20));
    /// ```
    #[must_use]
    pub const fn look_interval(mut self, interval: Duration) -> Self {
        self.look_interval = interval;
        self
    }

    /// Sets the length of the largest payload that this reactor accepts in one buffer, in bytes. All buffers have this
    /// size. Range: 1 to 1 GiB, or the device's largest message if that is less. Default: 8 KiB.
    #[must_use]
    pub const fn buffer_size(mut self, bytes: u32) -> Self {
        self.buffer_size = bytes;
        self
    }

    /// Suppresses [`on_send_complete`](crate::Handler::on_send_complete) for messages in memory of the reactor: those
    /// of [`send`](crate::Context::send), [`send_buffer`](crate::Context::send_buffer) and
    /// [`append`](crate::Context::append). A message that the peer refuses still causes `on_send_complete`. The device
    /// reports the completions of these messages in batches of a quarter of the send queue, which saves a completion
    /// and a callback per message. If such a message fails for another reason, the connection ends, and the reactor
    /// calls `on_disconnect`.
    ///
    /// Messages from regions and one-sided operations still cause `on_send_complete`, because the program needs to know
    /// when it may reuse its memory. Connections with [`Framing::Raw`] ignore this setting.
    ///
    /// The cost is memory: up to a quarter of the sends in the send queue keep their buffers until later sends end. On
    /// the embedded provider, short messages do not have this cost, because their sends end when they are posted.
    /// (Without this setting, a short message ends when it is posted only if no earlier send is outstanding.)
    ///
    /// `AsyncReactor::new` and `ThreadedReactor` set this to true. Messages whose end the program
    /// waits for still cause `on_send_complete` there. Default: false.
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

    /// Sets the number of receives that the reactor posts for each connection. This number is the window of the peer:
    /// the peer may have that many messages in flight. Three of them are reserved for control messages. Range: 5 to
    /// 32,768. With `shared_receives`, this is the largest number of receives that the reactor promises to one peer.
    /// Default: 64.
    #[must_use]
    pub const fn receive_depth(mut self, messages: u32) -> Self {
        self.receive_depth = messages;
        self
    }

    /// Sets the number of receives that all connections of a device share, instead of `receive_depth` for each
    /// connection. Range: 8 to 32,768 messages. Use this for many connections that are idle most of the time. The
    /// reactor always promises at least five receives to each peer, of which three are reserved for control messages.
    /// It promises more to a busy peer, up to `receive_depth`.
    ///
    /// The reactor never promises more than seven eighths of the receives. Each connection needs five promised
    /// receives, so `n` receives are enough for `7 n / 40` connections. Beyond this number, the reactor rejects an
    /// incoming connection with `RejectReason::Busy`, and an outgoing one fails with [`crate::ConnectError::Limit`].
    /// Connections with `Framing::Raw` have separate receives. If a device does not support shared receive queues,
    /// connecting fails with [`crate::ConnectError::Unsupported`], and incoming connections are rejected.
    ///
    /// A busy connection is faster with separate receives. Sharing also has a risk: a peer that violates the protocol
    /// can use receives that were promised to other peers, until the reactor detects it. On iWARP devices, the
    /// connection ends if a message arrives and no receive is posted. Default: `None`, each connection has separate
    /// receives.
    #[must_use]
    pub const fn shared_receives(mut self, messages: Option<u32>) -> Self {
        self.shared_receives = messages;
        self
    }

    /// Sets the largest number of sends of one connection that may be outstanding. Range: 1 to 16,384 messages.
    /// Default: 64.
    #[must_use]
    pub const fn send_depth(mut self, messages: u32) -> Self {
        self.send_depth = messages;
        self
    }

    /// Sets the largest number of connections of this reactor: incoming and outgoing ones, established or not. Default:
    /// 10,000.
    #[must_use]
    pub const fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections;
        self
    }

    /// Sets the largest number of accepted connections of one host while slots are scarce. Slots
    /// are scarce when three quarters of one of these limits are in use: `max_connections`, the
    /// buffers that fit into `max_memory`, or the connections that `shared_receives` is enough for.
    /// Then a new connection of a host that has reached this number is rejected with
    /// [`crate::RejectReason::Busy`], unless it can evict another connection of the same host that
    /// is not established. Hosts below this number still get slots. While slots are not scarce, a
    /// host has no limit. An established connection is never ended for another one.
    ///
    /// So if all clients come from one address, such as that of a proxy, at most three quarters of
    /// the slots are used. To use all of them, set this to `max_connections`. IPv6 addresses with
    /// equal first 64 bits count as one host. Range: 1 to 16,777,216. Default: 64.
    #[must_use]
    pub const fn max_connections_per_host(mut self, connections: u32) -> Self {
        self.max_connections_per_host = connections;
        self
    }

    /// Sets the largest number of accepted connections that are not established yet. A connection that failed before it
    /// was established counts until its buffers are free. When the limit is reached, the reactor evicts one of these
    /// connections for a new one: in most cases the oldest one of the host that has the largest number of them (see
    /// `SECURITY.md`). If none can be evicted, the new connection is rejected with [`crate::RejectReason::Busy`].
    /// Default: 1,024.
    #[must_use]
    pub const fn max_pending(mut self, connections: u32) -> Self {
        self.max_pending = connections;
        self
    }

    /// Sets the limit of the memory for buffers, in bytes, for each device. A connection uses
    /// `receive_depth` + `send_depth` + 2 buffers. With `shared_receives`, it uses `receive_depth`
    /// fewer, and the buffers of the shared receives count towards the same limit. A buffer has
    /// `buffer_size` + 8 bytes, 16 more with the feature `tls` or `psk`, rounded up to a multiple
    /// of 64. The limit must have room for at least one connection. On the embedded provider, the
    /// system provides pages only when they are first written. Default: 4 GiB.
    #[must_use]
    pub const fn max_memory(mut self, bytes: usize) -> Self {
        self.max_memory = bytes;
        self
    }

    /// Sets the length of the largest message that is copied into its work request (inline data), in bytes. The device
    /// need not fetch such a message from memory. Range: 0 to 1,024, or the device's limit if that is less. A larger
    /// value makes the entries of an adapter's send queue longer. Default: 256.
    #[must_use]
    pub const fn max_inline(mut self, bytes: u32) -> Self {
        self.max_inline = bytes;
        self
    }

    /// Sets how much work of one connection the reactor does in one turn while other connections exist: a number of
    /// completions, and a number of received bytes. Both are at least 1. The remaining work of the connection waits for
    /// the next turn. It is done after the work that has arrived on other connections in the meantime. If there is only
    /// one connection, there is no limit. Default: 24 completions and 64 KiB.
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

    /// Sets the largest number of messages and sends from other threads that may be queued
    /// ([`crate::ReactorHandle`]). While that many are queued, further messages and sends are
    /// refused with `HandleError::Full`. Range: 1 to 16,777,216. Default: 65,536.
    #[must_use]
    pub const fn handle_queue(mut self, commands: u32) -> Self {
        self.handle_queue = commands;
        self
    }

    /// If `on` is true, the reactor catches a panic of a callback, and the turn continues. The consequence of the panic
    /// depends on the callback:
    ///
    /// - In a callback of a connection or endpoint: the connection or endpoint ends. A connection ends as after
    ///   [`crate::Context::abort`], with `DisconnectReason::Internal` and the text of the panic.
    /// - In the callback of a connect request: the request is rejected.
    /// - In a callback of a timer, a descriptor, another thread's message or a device's event: the event is dropped.
    ///
    /// [`Stats`](crate::Stats) counts the panics, and the reactor logs each of them. The panic may
    /// have left the state of the handler half changed; the program has to repair that state. A
    /// panic of code that the program has given to rustls (`Tls::from_rustls`), such as a verifier
    /// of certificates, is not caught. This setting needs `panic = "unwind"`, Rust's default.
    /// Default: false. With false, a panic propagates out of the program's call of the reactor, and
    /// the program can only drop the reactor afterwards.
    #[must_use]
    pub const fn contain_panics(mut self, on: bool) -> Self {
        self.contain_panics = on;
        self
    }

    /// Sets the networks whose hosts may connect. The reactor refuses connections from other networks before it
    /// allocates anything for them. The embedded provider resets such a connection before it reads any bytes from it.
    /// An address does not prove an identity. Default: `None`, hosts of any network may connect.
    ///
    /// The setting applies to datagrams, too. Lookups from other networks get no queue pair, and datagrams from other
    /// networks are dropped. A datagram whose sender has no address is dropped as well: on InfiniBand, this is each
    /// datagram without a route header (`Origin::address`).
    #[must_use]
    pub fn allowed_peers(mut self, networks: Option<Vec<IpNet>>) -> Self {
        self.allowed_peers = networks;
        self
    }

    /// Sets the largest number of connections from one host that are in the handshake, at least 1. The limit applies to
    /// two kinds of connections separately:
    ///
    /// - on the embedded provider, connections that have not sent their connect request yet; see
    ///   `IwarpConfig::max_handshakes_per_peer`;
    /// - on every provider, accepted connections that will be secured ([`Security`]) and are not established yet.
    ///
    /// If the limit is reached, a new connection evicts the oldest one of that host, provided that the oldest has
    /// waited long enough: for `IwarpConfig::request_grace` (first kind) or 100 ms (second kind). Otherwise a new
    /// connection of the first kind waits until the oldest can be evicted, and one of the second kind is rejected. IPv6
    /// addresses with equal first 64 bits count as one host. Default: `None`. With `None`, each host may have half of
    /// the connections that the limit for all hosts allows: half of `IwarpConfig::max_handshakes` for the first kind,
    /// and half of [`Config::max_pending`] for the second kind.
    #[must_use]
    pub const fn max_handshakes_per_peer(mut self, connections: Option<usize>) -> Self {
        self.max_handshakes_per_peer = connections;
        self
    }

    /// Changes the timeouts, by a closure that receives the current ones.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::Config;
    ///
    /// let config = Config::default().timeouts(|timeouts| timeouts.connect = Duration::from_secs(1));
    /// # drop(config);
    /// ```
    #[must_use]
    pub fn timeouts(mut self, change: impl FnOnce(&mut Timeouts)) -> Self {
        change(&mut self.timeouts);
        self
    }

    /// Changes the settings of messages that are longer than one buffer, by a closure that receives the current ones.
    ///
    /// ```
    /// use rdma_reactor::Config;
    ///
    /// let config = Config::default().large_messages(|large| (large.max_message, large.memory) = (1 << 30, 2 << 30));
    /// # drop(config);
    /// ```
    #[must_use]
    pub fn large_messages(mut self, change: impl FnOnce(&mut LargeMessageSettings)) -> Self {
        change(&mut self.large);
        // `max_message` is rounded up to whole KiB, because the greeting states it in KiB.
        self.large.max_message = self.large.max_message.div_ceil(1 << 10).saturating_mul(1 << 10);
        self
    }

    /// Changes the settings of the completion queues, by a closure that receives the current ones.
    ///
    /// ```
    /// use rdma_reactor::Config;
    ///
    /// let config = Config::default().completions(|completions| completions.per_turn = 64);
    /// # drop(config);
    /// ```
    #[must_use]
    pub fn completions(mut self, change: impl FnOnce(&mut CompletionSettings)) -> Self {
        change(&mut self.completions);
        self
    }

    /// Changes the settings of the embedded provider, by a closure that receives the current ones. These settings
    /// interact with those of `Config`:
    ///
    /// - If `IwarpConfig::max_handshakes_per_peer` is not set, the embedded provider uses
    ///   [`Config::max_handshakes_per_peer`].
    /// - If `IwarpConfig::allowed_peers` is not set, the embedded provider uses [`Config::allowed_peers`]. If both are
    ///   set, a peer must be in a network of each.
    /// - If `IwarpConfig::max_handshakes` is lower than [`Config::max_pending`], the embedded provider uses
    ///   `max_pending`. A value below both `max_pending` and the default of `max_handshakes` is an error.
    /// - The protocol extensions of the embedded provider are on by default, because the greetings of two reactors
    ///   negotiate them.
    ///
    /// ```
    /// use rdma_reactor::Config;
    /// use rdma_reactor::transport::iwarp::CrcPolicy;
    ///
    /// // Both sides must agree.
    /// let config = Config::default().iwarp(|iwarp| iwarp.crc = CrcPolicy::Off);
    /// # drop(config);
    /// ```
    #[must_use]
    pub fn iwarp(mut self, change: impl FnOnce(&mut IwarpConfig)) -> Self {
        change(&mut self.iwarp);
        self
    }

    /// Sets the security of connections. [`crate::ConnectOptions::security`] and [`crate::ListenOptions::security`]
    /// override it. Datagrams are never secured. Default: [`Security::Plain`].
    #[must_use]
    pub fn security(mut self, security: Security) -> Self {
        self.security = security;
        self
    }

    /// Allows one-sided operations on secured connections, and regions that the peers of such
    /// connections may access. Adapters can neither encrypt nor authenticate the data of these
    /// operations. An attacker on the path can read and change the data, and can use the remote
    /// keys that are sent with it. Default: false. With false, such operations fail with
    /// [`crate::SendErrorKind::PlainRemoteMemory`], and the registration of such a region fails
    /// with [`Error::Security`]. The registration of such a region without a connection
    /// ([`crate::RegionContext::register_at`]) fails if [`Config::security`] is set, regardless of
    /// the options of listeners and connections.
    #[must_use]
    pub const fn allow_plain_remote_memory(mut self, yes: bool) -> Self {
        self.plain_remote_memory = yes;
        self
    }

    /// Returns `true` if `allowed_peers` lets this host connect.
    pub(crate) fn admits(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.allowed_peers.as_ref().is_none_or(|networks| networks.iter().any(|network| network.contains(&peer)))
    }

    /// Checks that every setting is in its range. The error names the first setting that is out of its range.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        let check = |setting, value: u64, low: u64, high: u64, range: &'static str| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(Error::Config { setting, value, range: range.into() })
            }
        };
        // The error contains the smallest valid value, which results from several settings.
        let check_least = |setting, value: u64, low: u64, of: &str| {
            let range = || format!("at least {low}, {of}").into();
            if value >= low { Ok(()) } else { Err(Error::Config { setting, value, range: range() }) }
        };
        check("buffer_size", self.buffer_size.into(), 1, 1 << 30, "1 to 1,073,741,824 bytes")?;
        let window = (u64::from(MIN_WINDOW), u64::from(MAX_WINDOW));
        check("receive_depth", self.receive_depth.into(), window.0, window.1, "5 to 32,768 messages")?;
        check("send_depth", self.send_depth.into(), 1, 16_384, "1 to 16,384 messages")?;
        let most = (self.large.memory as u64).min(1 << 40);
        check("large.max_message", self.large.max_message, 0, most, "0 to large.memory, at most 1 TiB: set both")?;
        check("max_connections", self.max_connections.into(), 1, 1 << 24, "1 to 16,777,216")?;
        check("max_connections_per_host", self.max_connections_per_host.into(), 1, 1 << 24, "1 to 16,777,216")?;
        check("max_pending", self.max_pending.into(), 1, 1 << 24, "1 to 16,777,216")?;
        if let Some(receives) = self.shared_receives {
            check("shared_receives", receives.into(), 8, 32_768, "8 to 32,768 messages")?;
        }
        let buffers = self.shared_receives.unwrap_or(self.receive_depth) + self.send_slots();
        let needed = buffer_len(self.buffer_size).next_multiple_of(BUFFER_ALIGN) as u64 * u64::from(buffers);
        check_least(
            "max_memory",
            self.max_memory as u64,
            needed,
            "the buffers of one connection: (buffer_size + 24, rounded up to 64) x (receives + send_depth + 2)",
        )?;
        let shared = self.shared_receives.map_or(0, |receives| receives + self.send_slots());
        let room = u64::from(self.completion_room().max(shared));
        if let Some(queue) = self.completions.queue.map(u64::from) {
            check_least("completions.queue", queue, room, "the sends, receives and shared receives of one connection")?;
            check("completions.queue", queue, 1, 1 << 24, "1 to 16,777,216")?;
        }
        if let Some(Moderation { completions, microseconds }) = self.completions.moderation {
            let most = u64::from(u16::MAX);
            check("completions.moderation.completions", completions.into(), 1, most, "1 to 65,535")?;
            check("completions.moderation.microseconds", microseconds.into(), 1, most, "1 to 65,535")?;
        }
        check("completions.per_turn", self.completions.per_turn.into(), 1, u64::from(u32::MAX), "at least 1")?;
        check("fairness completions", self.fair_messages.into(), 1, u64::from(u32::MAX), "at least 1")?;
        check("fairness bytes", self.fair_bytes as u64, 1, u64::MAX, "at least 1")?;
        check("max_inline", self.max_inline.into(), 0, 1024, "0 to 1,024 bytes")?;
        if let Some(most) = self.max_handshakes_per_peer {
            check("max_handshakes_per_peer", most as u64, 1, u64::MAX, "at least 1")?;
        }
        let nanos = u64::try_from(self.look_interval.as_nanos()).unwrap_or(u64::MAX);
        check("look_interval", nanos, 1_000, 1_000_000_000, "1 us to 1 s (given here in ns)")?;
        check("handle_queue", self.handle_queue.into(), 1, 1 << 24, "1 to 16,777,216")?;
        self.timeouts.validate()?;
        let pending = (self.max_pending as usize).min(embedded_defaults().max_handshakes);
        let range = "at least max_pending, up to 4,096";
        check("iwarp.max_handshakes", self.iwarp.max_handshakes as u64, pending as u64, u64::MAX, range)?;
        let grace = self.iwarp.request_grace;
        let milliseconds = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        check("iwarp.request_grace", milliseconds, 1, 86_400_000, "1 ms to 24 h (given here in ms)")?;
        Ok(())
    }

    /// Returns the setting `max_message` in KiB, the unit in which the greeting states it.
    pub(crate) fn max_message_in_kib(&self) -> u32 {
        u32::try_from(self.large.max_message >> 10).unwrap_or(u32::MAX)
    }

    /// Returns the number of slots of a connection's send queue: `send_depth`, plus two slots that are reserved for
    /// control messages.
    pub(crate) const fn send_slots(&self) -> u32 {
        self.send_depth + CONTROL_SENDS
    }

    /// Returns the largest number of completions that one connection can have in a completion queue.
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
        // This limit has room for the buffers of exactly one connection: 64 receives and 66 sends. Each buffer has 8
        // KiB plus a header, rounded up to 64 bytes: 8,256 bytes.
        assert!(Config::default().max_memory(130 * 8256).validate().is_ok());
        let error = Config::default().max_memory(130 * 8256 - 1).validate().unwrap_err().to_string();
        assert!(error.starts_with("max_memory is 1073279: it must be at least 1073280, the buffers"), "{error}");
        assert!(Config::default().completions(|c| c.queue = Some(10)).validate().is_err());
        assert!(
            Config::default()
                .completions(|c| c.moderation = Some(Moderation { completions: 0, microseconds: 10 }))
                .validate()
                .is_err()
        );
        assert!(Config::default().max_inline(1025).validate().is_err());
        assert!(Config::default().max_handshakes_per_peer(Some(0)).validate().is_err());
        assert!(Config::default().timeouts(|t| t.resolve = Duration::ZERO).validate().is_err());
        assert!(Config::default().iwarp(|i| i.request_grace = Duration::ZERO).validate().is_err());
        assert!(Config::default().iwarp(|i| i.max_handshakes = 1023).validate().is_err());
        assert!(Config::default().max_pending(8).iwarp(|i| i.max_handshakes = 8).validate().is_ok());
        assert!(Config::default().max_pending(20_000).validate().is_ok());
        for wrong in [7, 32_769, u32::MAX] {
            assert!(Config::default().shared_receives(Some(wrong)).validate().is_err());
        }
        let many = Config::default().shared_receives(Some(16_384));
        assert!(many.clone().validate().is_ok());
        assert!(many.completions(|c| c.queue = Some(16_384)).validate().is_err(), "no entry is left for sends");
        let second = Duration::from_secs(1);
        assert!(
            Config::default().timeouts(|t| (t.keepalive_interval, t.keepalive) = (second, second)).validate().is_err()
        );
    }

    /// Each preset is valid, and a connection uses the memory that the preset's documentation states.
    #[test]
    fn presets_are_valid_and_keep_what_a_program_is_told_of() {
        for (preset, connections, each) in [
            (Config::latency(), 4000, 1_073_280),
            (Config::throughput(), 250, 16_925_000),
            (Config::many_connections(), 100_000, 75_000),
            (Config::small(), 64, 39_000),
        ] {
            preset.validate().unwrap();
            assert!(!preset.quiet_sends, "a program that waits for on_send_complete would wait forever");
            assert!(preset.max_connections >= connections);
            let buffers = u64::from(preset.completion_room());
            let taken = buffers * buffer_len(preset.buffer_size).next_multiple_of(BUFFER_ALIGN) as u64;
            assert!(taken <= each && taken + each / 20 > each, "{taken} bytes for each connection of {preset:?}");
            assert!(taken * u64::from(connections) <= preset.max_memory as u64, "{connections} connections");
        }
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
