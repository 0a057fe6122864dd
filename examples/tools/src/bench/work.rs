//! The operations of this library that a benchmark round measures.

use crate::pingpong::failure::Failure;

use super::pair::{self, PINGPONG, Processors};
use super::sample::Sample;
use super::secured::{KeyFiles, SecurityMode};

/// One measurement of this library in a benchmark round: the kind of operations, and their number.
#[derive(Clone, Debug)]
pub enum Work {
    /// A measurement by `rdma-pingpong`.
    Pingpong(Pingpong),
    /// One-sided operations: the operation, as an argument of `one-sided-client`, and the number of iterations.
    OneSided(&'static str, u64),
    /// Connections that are opened sequentially. The field is the number of connections.
    Connections(u64),
    /// Echoes on many connections: the number of connections, and the total number of echoes on all connections.
    Echoes(u32, u64),
    /// Datagrams: the kind of exchange, the size of a datagram in bytes, and the number of datagrams.
    Datagrams(&'static str, u32, u64),
    /// Requests of mixed lengths: the sizes of the buffers, and the number of requests.
    Mix(&'static str, u64),
}

/// `rdma-pingpong` between two processes.
// local: texts of the benchmark
#[derive(Clone, Debug)]
pub struct Pingpong {
    /// The provider of both sides.
    pub provider: &'static str,
    /// The flags of the client, without those of the duration.
    pub flags: String,
    /// The flags of the duration: the number of messages or the time, and the warm-up.
    pub duration: String,
    /// The JSON pointer to the main result in the client's output.
    pub figure: &'static str,
}

/// The largest number of connections in a smoke run, which ignores the figures. Each connection
/// needs a descriptor on each side.
pub const SMOKE_CONNECTIONS: u32 = 100;
/// The JSON pointer to the median half round trip in the output of `rdma-pingpong`.
pub const MEDIAN: &str = "/half_rtt_us/p50";
/// The JSON pointer to the mean half round trip.
pub const MEAN: &str = "/half_rtt_us/mean";
/// The JSON pointer to the messages per second.
pub const RATE: &str = "/messages_per_second";
/// The JSON pointer to the throughput, in Gbit/s.
pub const THROUGHPUT: &str = "/gbit_per_second";

impl Pingpong {
    /// Returns a measurement that sends messages back and forth.
    #[must_use]
    pub fn latency(provider: &'static str, wait: &str, size: u32, iterations: u64, figure: &'static str) -> Self {
        let flags = format!("--mode latency --wait {wait} --size {size}");
        Self { provider, flags, duration: messages(iterations, iterations / 10), figure }
    }

    /// Returns a measurement that sends messages one way.
    #[must_use]
    pub fn one_way(provider: &'static str, wait: &str, size: u32, iterations: u64, figure: &'static str) -> Self {
        let flags = format!("--mode throughput --wait {wait} --size {size}");
        Self { provider, flags, duration: messages(iterations, iterations / 20), figure }
    }

    /// Returns a measurement that sends 2 GiB in total, one way, in messages of this size.
    #[must_use]
    pub fn bulk(provider: &'static str, wait: &str, size: u32) -> Self {
        Self::one_way(provider, wait, size, (2 << 30) / u64::from(size), THROUGHPUT)
    }

    /// Returns a measurement that sends messages of 64 B back and forth for a second. The client
    /// sends `rate` messages per second on a schedule, even if answers are late.
    #[must_use]
    pub fn open_loop(rate: f64, figure: &'static str) -> Self {
        let flags = format!("--mode latency --wait event --size 64 --rate {rate}");
        Self { provider: "iwarp", flags, duration: "--duration 1 --warmup 10000".into(), figure }
    }

    /// Returns the measurement of the maximum rate of an open loop. Its schedule is so fast that
    /// all messages are due immediately.
    #[must_use]
    pub fn open_loop_limit() -> Self {
        Self { duration: messages(500_000, 10_000), ..Self::open_loop(1e9, RATE) }
    }

    /// Appends flags to those of the client.
    #[must_use]
    pub fn and(mut self, flags: &str) -> Self {
        self.flags = format!("{} {flags}", self.flags);
        self
    }

    /// Runs the measurement once and returns its sample.
    ///
    /// # Errors
    /// A process failed.
    pub fn measure(&self, processors: &Processors, terms: &RoundSettings<'_>) -> Result<Sample, Failure> {
        let Self { provider, flags, duration, figure } = self;
        let [server, client] = ["server", "client"].map(|side| terms.security(side));
        let congestion = if terms.system_congestion { "--system-congestion" } else { "" };
        let server =
            words(&format!("{PINGPONG} server --bind 127.0.0.1 --port 0 --provider {provider} --child {server}"));
        let client = words(&format!(
            "{PINGPONG} client {{}} --provider {provider} --json - {flags} {duration} {congestion} {client}"
        ));
        Sample::of_pingpong(&pair::run(processors, &server, &client)?, figure)
    }
}

/// The settings of a round that are independent of the kind of measurement.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundSettings<'a> {
    /// The mode and the key files of secured connections; `None` for plain ones.
    pub secured: Option<(SecurityMode, &'a KeyFiles)>,
    /// True if TCP must use the system's congestion control, because the competitor uses it.
    pub system_congestion: bool,
}

impl RoundSettings<'_> {
    /// Returns the security flags of a side, `server` or `client`; an empty string for plain connections.
    fn security(&self, side: &str) -> String {
        self.secured.map(|(mode, files)| files.flags(mode, side)).unwrap_or_default()
    }
}

impl Work {
    /// Returns the same measurement with one message, on at most [`SMOKE_CONNECTIONS`] connections.
    #[must_use]
    pub fn smoke(self) -> Self {
        match self {
            Self::Pingpong(work) => Self::Pingpong(Pingpong { duration: messages(1, 0), ..work }),
            Self::OneSided(operation, _) => Self::OneSided(operation, 1),
            Self::Connections(_) => Self::Connections(1),
            Self::Echoes(connections, _) => Self::Echoes(connections.min(SMOKE_CONNECTIONS), 1),
            Self::Datagrams(kind, size, _) => Self::Datagrams(kind, size, 1),
            Self::Mix(buffers, _) => Self::Mix(buffers, 1),
        }
    }

    /// Runs the measurement once and returns its sample.
    ///
    /// # Errors
    /// A process failed.
    pub fn measure(&self, processors: &Processors, terms: &RoundSettings<'_>) -> Result<Sample, Failure> {
        match self {
            Self::Pingpong(work) => work.measure(processors, terms),
            Self::OneSided(operation, iterations) => {
                let client = words(&format!("one-sided-client {operation} {{}} {iterations}"));
                Sample::printed(&pair::run(processors, &words("one-sided-server"), &client)?)
            }
            Self::Echoes(connections, count) => echoes(processors, "reactor", *connections, *count),
            Self::Datagrams(kind, size, count) => datagrams(processors, "reactor", kind, *size, *count),
            Self::Mix(buffers, count) => {
                let client = words(&format!("mix-client {buffers} {{}} {count}"));
                Sample::printed(&pair::run(processors, &words(&format!("mix-server {buffers}")), &client)?)
            }
            Self::Connections(count) => {
                let [server, client] = ["server", "client"].map(|side| terms.security(side));
                let server = words(&format!("connections-server {server}"));
                let client = words(&format!("connections-client {{}} {count} {client}"));
                Sample::printed(&pair::run(processors, &server, &client)?)
            }
        }
    }
}

/// Measures bare TCP. `kind` is the kind of exchange, and `size` is the length of a message in bytes.
///
/// # Errors
/// A process failed.
pub fn bare(processors: &Processors, kind: &str, size: u32, iterations: u64) -> Result<Sample, Failure> {
    let client = words(&format!("tcp-client {kind} {{}} {size} {iterations}"));
    Sample::printed(&pair::run(processors, &words(&format!("tcp-server {kind} {size}")), &client)?)
}

/// Measures echoes on many connections. `carrier` is `tcp` for bare TCP, or `reactor` for this library.
///
/// # Errors
/// A process failed.
pub fn echoes(processors: &Processors, carrier: &str, connections: u32, count: u64) -> Result<Sample, Failure> {
    let client = words(&format!("many-client {carrier} {{}} {connections} {count}"));
    Sample::printed(&pair::run(processors, &words(&format!("many-server {carrier}")), &client)?)
}

/// Measures datagrams. `carrier` is `udp` for sockets, or `reactor` for this library.
///
/// # Errors
/// A process failed.
pub fn datagrams(processors: &Processors, carrier: &str, kind: &str, size: u32, count: u64) -> Result<Sample, Failure> {
    let client = words(&format!("datagrams-client {carrier} {kind} {{}} {size} {count}"));
    Sample::printed(&pair::run(processors, &words(&format!("datagrams-server {carrier} {kind}")), &client)?)
}

/// Returns the flags of `rdma-pingpong` for a number of messages, after an unmeasured warm-up.
fn messages(iterations: u64, warmup: u64) -> String {
    format!("--iters {iterations} --warmup {warmup}")
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::pingpong::cli::PingpongArgs;
    use crate::pingpong::plan::Plan;

    #[test]
    fn rdma_pingpong_understands_its_flags() {
        let all = super::super::rows::contests().into_iter().flat_map(|contest| contest.pingpongs());
        let limit = [Pingpong::open_loop(123_456.7, "/x"), Pingpong::open_loop_limit()];
        for work in all.chain(limit) {
            let Pingpong { provider, flags, duration, .. } = work;
            let line = format!("rdma-pingpong client 127.0.0.1:1 --provider {provider} {flags} {duration}");
            let cli =
                PingpongArgs::try_parse_from(line.split_whitespace()).unwrap_or_else(|error| panic!("{line}: {error}"));
            let crate::pingpong::cli::Command::Client(args) = cli.command else { panic!("{line}") };
            let provider = args.run.device.provider.into();
            Plan::from_args(&args.run, provider).unwrap_or_else(|failure| panic!("{line}: {failure}"));
        }
    }
}
