//! Settings, each with a default and a range.

mod completions;
mod large;
mod timeouts;

use std::net::IpAddr;
use std::time::Duration;

use rdma_transport::caps::Moderation;
use rdma_transport::iwarp::{IpNet, IwarpConfig, SharedMemoryPolicy};

pub use self::completions::CompletionSettings;
pub use self::large::LargeMessageSettings;
pub use self::timeouts::Timeouts;
use crate::error::Error;
use crate::limits::{BUFFER_ALIGN, CONTROL_SENDS, MAX_WINDOW, MIN_WINDOW, buffer_len};
use crate::security::Security;

/// Which provider carries the connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProviderChoice {
    /// RDMA devices, and the embedded provider for what they do not reach; which one and why is logged at `info`. A listener on an
    /// unspecified address takes connections of both. A connection takes the embedded provider if no device resolves the
    /// address within [`Timeouts::resolve`]. Without devices or their libraries, the embedded provider alone. On that, a connection to a
    /// process of this host and this user leaves TCP for memory that both processes map, where both ask for `Auto` or `Shm`;
    /// [`IwarpConfig::shared_memory`] can turn that off. Where anything is in doubt, it stays on TCP, with the reason in the log at `debug`.
    #[default]
    Auto,
    /// RDMA devices through librdmacm and libibverbs.
    Verbs,
    /// The embedded provider: iWARP in user space over TCP, for peers of this host, too.
    Iwarp,
    /// The embedded provider for peers of this host and this user, in memory that both processes map. Others are not reached, and are
    /// rejected.
    Shm,
}

/// How a reactor waits for work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// Poll before sleeping when that pays, as measured: nearly the latency of `Spin` while messages follow each
    /// other closely, the processor time of `Event` while they do not. It spends at most half of a processor on polling beyond what sleeping would have taken.
    #[default]
    Adaptive,
    /// Sleep at once: no processor time while idle, a wake-up's latency per burst.
    Event,
    /// Poll for this long before sleeping: lowest latency, one core while traffic keeps coming. Polling lets other threads that are
    /// ready have that core every 50 us, so two sides that share one do not wait for the ends of each other's time slices.
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
    pub(crate) look_interval: Duration,
    pub(crate) buffer_size: u32,
    pub(crate) receive_depth: u32,
    pub(crate) send_depth: u32,
    pub(crate) shared_receives: Option<u32>,
    pub(crate) max_connections: u32,
    pub(crate) max_pending: u32,
    pub(crate) max_memory: usize,
    pub(crate) quiet_sends: bool,
    pub(crate) max_inline: u32,
    pub(crate) fair_messages: u32,
    pub(crate) fair_bytes: usize,
    pub(crate) handle_queue: u32,
    pub(crate) contain_panics: bool,
    pub(crate) allowed_peers: Option<Vec<IpNet>>,
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

/// Defaults of the embedded provider in a reactor, whose greetings agree on the extensions.
fn embedded_defaults() -> IwarpConfig {
    let mut defaults = IwarpConfig::default();
    (defaults.extensions, defaults.shared_memory) = (true, SharedMemoryPolicy::Prefer);
    defaults
}

impl Config {
    /// For the lowest latency of small messages: the reactor polls for up to 10 ms before it sleeps, which takes a processor while
    /// traffic keeps coming.
    #[must_use]
    pub fn latency() -> Self {
        Self::default().wait(Wait::Spin(Duration::from_millis(10)))
    }

    /// For many bytes on few connections: buffers of 64 KiB, and 128 messages on their way in each direction. Each connection takes
    /// 16 MiB of `max_memory`.
    #[must_use]
    pub fn throughput() -> Self {
        Self::default().buffer_size(64 << 10).receive_depth(128).send_depth(128)
    }

    /// For up to 100,000 connections that are idle most of the time: 8 messages on their way in each direction, buffers of 4 KiB,
    /// 73 KiB for each connection.
    #[must_use]
    pub fn many_connections() -> Self {
        let small = Self::default().buffer_size(4 << 10).receive_depth(8).send_depth(8);
        small.max_connections(100_000).max_memory(8 << 30)
    }

    /// For little memory: 8 messages of 2 KiB on their way in each direction, up to 64 connections in 4 MiB of buffers, and 2 MiB for messages of up to 1 MiB.
    #[must_use]
    pub fn small() -> Self {
        Self::default()
            .buffer_size(2 << 10)
            .receive_depth(8)
            .send_depth(8)
            .max_connections(64)
            .max_pending(16)
            .max_memory(4 << 20)
            .handle_queue(256)
            .completions(|completions| completions.queue = 1024)
            .large_messages(|large| (large.max_message, large.memory, large.cache) = (1 << 20, 2 << 20, 0))
    }

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

    /// Longest time between two looks at everything that is not a completion, while completions keep coming: new connections, descriptors
    /// and timers of devices. The looks begin at a twentieth of this interval, and their distance doubles as long as they find nothing. A
    /// callback that takes longer delays the look by its own length. 1 us to 1 s. Default: 1 ms.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use rdma_reactor::Config;
    /// // New connections may wait: each look is a system call.
    /// let config = Config::default().look_interval(Duration::from_millis(20));
    /// ```
    #[must_use]
    pub const fn look_interval(mut self, interval: Duration) -> Self {
        self.look_interval = interval;
        self
    }

    /// Largest payload of a message this side takes in one buffer, bytes: 1 to 1 GiB, or what the device carries if that
    /// is less. Every buffer is this large. Default: 8 KiB.
    #[must_use]
    pub const fn buffer_size(mut self, bytes: u32) -> Self {
        self.buffer_size = bytes;
        self
    }

    /// Whether messages that are copied are sent without [`on_send_complete`](crate::Handler::on_send_complete), neither for
    /// success nor for failure. Then the device tells of such messages only once in a quarter of the send queue, which saves
    /// the work of a completion and a callback for each. What fails one of them ends the connection, and `on_disconnect` says
    /// so. Messages out of regions, one-sided operations and raw connections are told of as ever, because the program waits to
    /// use its memory again. The buffers of up to a quarter of a send queue are held until later sends end. The embedded provider holds
    /// none for short messages, which end when they are sent. Default: false.
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

    /// Accepted connections that are not established yet, and those that never were until their buffers are free. When so many are
    /// there, the oldest one of the host that has the most gives way to a new one, see `SECURITY.md`; if none does, the new one is
    /// rejected with [`crate::RejectReason::Busy`]. Default: 1,024.
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

    /// Messages and sends of other threads that may be on their way to the reactor: 1 to 16,777,216. More are
    /// refused with `HandleError::Full`. Default: 65,536.
    #[must_use]
    pub const fn handle_queue(mut self, commands: u32) -> Self {
        self.handle_queue = commands;
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

    /// Connections from one host that have not sent their request yet, at least 1, on the embedded provider; see
    /// `IwarpConfig::max_handshakes_per_peer`. On every provider, accepted connections from one host that are to be secured and are
    /// not established yet. For one more, the oldest of that host gives way if it has been waiting for 100 ms; otherwise the new one is
    /// rejected. IPv6 addresses with the same first 64 bits are one host. Default: `None`, half of all that there may be, which is half
    /// of [`Config::max_pending`] for the latter.
    #[must_use]
    pub const fn max_handshakes_per_peer(mut self, connections: Option<usize>) -> Self {
        self.max_handshakes_per_peer = connections;
        self
    }

    /// Changes how long things may take.
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

    /// Changes how messages past one buffer are carried.
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
        // The greeting has the largest message in KiB.
        self.large.max_message = self.large.max_message.div_ceil(1 << 10).saturating_mul(1 << 10);
        self
    }

    /// Changes the completion queues, and how many completions a turn handles.
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

    /// Changes the embedded provider. Where `allowed_peers` and `max_handshakes_per_peer` are not set there, it takes those of
    /// `Config`. Networks that are set in both places have to contain a peer in both. Its extensions are on, as the greetings agree on
    /// them. Its `max_handshakes` is raised to `max_pending`; less than both that and its default is an error.
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
        check("buffer_size", self.buffer_size.into(), 1, 1 << 30, "1 to 1,073,741,824 bytes")?;
        let window = (u64::from(MIN_WINDOW), u64::from(MAX_WINDOW));
        check("receive_depth", self.receive_depth.into(), window.0, window.1, "5 to 32,768 messages")?;
        check("send_depth", self.send_depth.into(), 1, 16_384, "1 to 16,384 messages")?;
        let most = (self.large.memory as u64).min(1 << 40);
        check("large.max_message", self.large.max_message, 0, most, "0 to large.memory, at most 1 TiB: set both")?;
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
            "completions.queue",
            self.completions.queue.into(),
            room,
            1 << 24,
            "at least the sends, receives and shared receives of one connection, at most 16,777,216",
        )?;
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

    /// Largest message fetched, in the unit of the greeting.
    pub(crate) fn max_message_in_kib(&self) -> u32 {
        u32::try_from(self.large.max_message >> 10).unwrap_or(u32::MAX)
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
        assert!(Config::default().completions(|c| c.queue = 10).validate().is_err());
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
        for wrong in [7, 32_769, 16_384] {
            assert!(Config::default().shared_receives(Some(wrong)).validate().is_err());
        }
        let second = Duration::from_secs(1);
        assert!(
            Config::default().timeouts(|t| (t.keepalive_interval, t.keepalive) = (second, second)).validate().is_err()
        );
    }

    /// Each preset can be used as it is, and has the memory that its page and its documentation say.
    #[test]
    fn presets_are_valid_and_keep_what_a_program_is_told_of() {
        for (preset, connections, each) in [
            (Config::latency(), 4000, 1_073_280),
            (Config::throughput(), 250, 16_925_000),
            (Config::many_connections(), 100_000, 75_000),
            (Config::small(), 64, 39_000),
        ] {
            preset.validate().unwrap();
            assert!(!preset.quiet_sends, "a program that waits for on_send_complete would wait for ever");
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
