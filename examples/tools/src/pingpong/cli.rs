//! The command line of `rdma-pingpong`. Its single-letter options are those of perftest.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rdma_reactor::{ExchangeOptions, ProviderChoice};

use super::job::{MAX_CONNECTIONS, MAX_SIZE, Mode, Op, WaitMode};
use crate::program::number;
use crate::secure::SecurityArgs;
#[cfg(feature = "secure")]
use crate::secure::keygen::KeygenArgs;

/// The default port, which perftest's tools also use.
pub const DEFAULT_PORT: u16 = 18515;

/// Measures the latency and the throughput of rdma-reactor between two processes.
///
/// `rdma-pingpong server` runs on one host, and `rdma-pingpong
/// client HOST` on the other; `demo` runs both on this machine.
#[derive(Debug, Parser)]
#[command(name = "rdma-pingpong", version)]
pub struct PingpongArgs {
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// A command of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve clients sequentially until Ctrl-C; each client sends its job
    Server(ServerArgs),
    /// Measure against a server
    Client(ClientArgs),
    /// Measure against a server process that this command starts on this machine
    Demo(DemoArgs),
    /// Make a certificate authority, two identities and a pre-shared key, for tests
    #[cfg(feature = "secure")]
    Keygen(KeygenArgs),
}

/// Flags of `server`.
// local: arguments of the program
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// Address to listen on, with or without a port [default: the device's with --ib-dev, else 0.0.0.0]
    #[arg(long, value_name = "ADDR")]
    pub bind: Option<String>,
    /// Port to listen on; 0 chooses a free one
    #[arg(short, long, default_value_t = DEFAULT_PORT)]
    pub port: u16,
    /// The provider and the device that carry the connections.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// End when standard input ends, and print nothing about clients: for a server that another program started
    #[arg(long, hide = true)]
    pub child: bool,
}

/// Flags of `client`.
// local: arguments of the program
#[derive(Debug, Args)]
pub struct ClientArgs {
    /// The server's host name or address, with or without a port
    #[arg(value_name = "ADDR")]
    pub address: String,
    /// The server's port
    #[arg(short, long, default_value_t = DEFAULT_PORT)]
    pub port: u16,
    /// Flags of the measurement.
    #[command(flatten)]
    pub run: RunArgs,
}

/// Flags of `demo`.
// local: arguments of the program
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Address of this machine to connect over [default: a device's with --ib-dev or --provider verbs, else 127.0.0.1]
    #[arg(long, value_name = "ADDR")]
    pub bind: Option<String>,
    /// Flags of the measurement.
    #[command(flatten)]
    pub run: RunArgs,
}

/// The options that select the provider and the device.
// local: arguments of the program
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// RDMA devices (verbs), the embedded provider over TCP (iwarp) or in shared memory (shm), or whichever exists
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    pub provider: Provider,
    /// RDMA device to use, such as siw0; iwarp0 is the embedded provider's
    #[arg(short = 'd', long, value_name = "NAME")]
    pub ib_dev: Option<String>,
    /// Connect queue pairs by exchange over TCP, without rdma_cm; on both sides
    #[arg(long)]
    pub exchange: bool,
    /// GID index of the queue pairs [default: the RoCE v2 entry of the address]
    #[arg(short = 'x', long, value_name = "N", requires = "exchange")]
    pub gid_index: Option<u8>,
    /// The security of the connections.
    #[command(flatten)]
    pub security: SecurityArgs,
}

impl DeviceArgs {
    /// Returns the options of the exchange that connects queue pairs over TCP, without rdma_cm. Returns `None` if rdma_cm connects
    /// them.
    #[must_use]
    pub fn exchange(&self) -> Option<ExchangeOptions> {
        let options = || ExchangeOptions { device: self.ib_dev.clone(), gid_index: self.gid_index, port: None };
        self.exchange.then(options)
    }

    /// Returns the command-line flags that request the same exchange from a child process.
    #[must_use]
    pub fn exchange_again(&self) -> Vec<String> {
        let index = self.gid_index.map(|index| format!("--gid-index={index}"));
        let device = self.ib_dev.as_ref().map(|name| format!("--ib-dev={name}"));
        let flags = std::iter::once("--exchange".to_owned()).chain(index).chain(device);
        if self.exchange { flags.collect() } else { Vec::new() }
    }
}

/// Flags of the measurement.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Bytes per message or operation, 1 to 1G; K, M and G are powers of 1024 [default: 64]
    #[arg(short, long, value_parser = parse_size)]
    pub size: Option<u32>,
    /// Measure every power of two from 1 B to 1 MiB; the histogram is that of --size
    #[arg(short, long)]
    pub all: bool,
    /// Messages to measure [default: fewer for larger messages]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub iters: Option<u64>,
    /// Measure for this long, per size, instead of counting messages
    #[arg(short = 'D', long, value_name = "SECONDS", conflicts_with = "iters", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// Messages before the measurement [default: a tenth of --iters, at most 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=1_000_000_000))]
    pub warmup: Option<u64>,
    /// Figure to measure
    #[arg(long, value_enum, default_value_t = Mode::Latency)]
    pub mode: Mode,
    /// Operation that carries the data
    #[arg(long, value_enum, default_value_t = Op::Send)]
    pub op: Op,
    /// Messages in flight, for --mode throughput and --rate [default:
    /// up to 128, fewer for large messages and in shared memory]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub tx_depth: Option<u32>,
    /// Send this many messages per second on a schedule, whether or not answers arrive; the latency is
    /// that of the whole round trip from the scheduled time, and the client polls the clock all the time
    #[arg(long, value_name = "N", value_parser = parse_rate)]
    pub rate: Option<f64>,
    /// Connections that measure at the same time, each with the same number of messages
    #[arg(short = 'q', long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_CONNECTIONS)))]
    pub connections: u16,
    /// Print a line about each interval of the measurement
    #[arg(short, long, value_name = "SECONDS", value_parser = parse_interval)]
    pub interval: Option<Duration>,
    /// Send from both sides, for --mode throughput
    #[arg(short, long)]
    pub bidirectional: bool,
    /// Wait mode of both sides; --op write needs spin for latency [default: spin with two processors or more, else
    /// event]
    #[arg(long, value_enum)]
    pub wait: Option<WaitMode>,
    /// The same as --wait event
    #[arg(short, long, conflicts_with = "wait")]
    pub events: bool,
    /// Disable the embedded provider's CRC32C
    #[arg(long)]
    pub no_crc: bool,
    /// Write each byte of a message before it is sent, and read each after it has arrived, for --op send
    #[arg(long)]
    pub touch: bool,
    /// Let a peer on this host map the memory of --op write and --op read, and copy directly
    #[arg(long)]
    pub direct: bool,
    /// Leave the choice of TCP's congestion control within this host to the system
    #[arg(long)]
    pub system_congestion: bool,
    /// Write the results as JSON; - is standard output, and the tables then go to standard error
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw latency over size, for --mode latency
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// The provider and the device that carry the connections.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// The provider that carries the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Provider {
    /// RDMA devices if there are any, else iwarp
    Auto,
    /// The embedded provider: iWARP in user space over TCP
    Iwarp,
    /// The embedded provider in shared memory, within one host
    Shm,
    /// RDMA devices
    Verbs,
}

impl From<Provider> for ProviderChoice {
    fn from(provider: Provider) -> Self {
        match provider {
            Provider::Auto => Self::Auto,
            Provider::Iwarp => Self::Iwarp,
            Provider::Shm => Self::Shm,
            Provider::Verbs => Self::Verbs,
        }
    }
}

/// Parses a size in bytes, 1 to 1G, with an optional suffix K, M or G.
///
/// # Errors
/// The text names the valid sizes.
pub fn parse_size(text: &str) -> Result<u32, String> {
    let cure = "give 1 to 1G bytes, such as 64, 4K or 1M";
    let (digits, shift) = match text.trim_end_matches(['B', 'b']).trim_end_matches('i') {
        t if t.ends_with(['K', 'k']) => (&t[..t.len() - 1], 10),
        t if t.ends_with(['M', 'm']) => (&t[..t.len() - 1], 20),
        t if t.ends_with(['G', 'g']) => (&t[..t.len() - 1], 30),
        t => (t, 0),
    };
    let number: u64 = digits.parse().map_err(|_| cure.to_owned())?;
    match number.checked_mul(1 << shift) {
        Some(size @ 1..=MAX_SIZE) => Ok(size as u32),
        _ => Err(cure.into()),
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    number(text, 0.001..=86_400.0, "0.001 to 86400 seconds").map(Duration::from_secs_f64)
}

fn parse_rate(text: &str) -> Result<f64, String> {
    number(text, 0.01..=1e9, "0.01 to 1000000000 messages per second")
}

pub(crate) fn parse_interval(text: &str) -> Result<Duration, String> {
    number(text, 0.01..=3600.0, "0.01 to 3600 seconds").map(Duration::from_secs_f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Parsed, parse};

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        PingpongArgs::command().debug_assert();
    }

    #[test]
    fn sizes_have_suffixes_and_limits() {
        for (text, size) in [("1", 1), ("64", 64), ("1K", 1024), ("64k", 65_536), ("1MiB", 1 << 20), ("1G", 1 << 30)] {
            assert_eq!(parse_size(text), Ok(size), "{text}");
        }
        for text in ["0", "", "K", "-1", "1.5K", "2G", "1T", "99999999999999999999", "18014398509481984K"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    fn failure(args: &[&str]) -> String {
        let args = std::iter::once("rdma-pingpong").chain(args.iter().copied());
        match parse::<PingpongArgs>(args.map(Into::into)) {
            Err(failure) => failure.to_string(),
            Ok(Parsed::Run(_) | Parsed::Print(_)) => panic!("nothing wrong with it"),
        }
    }

    #[test]
    fn bad_usage_is_one_line() {
        assert_eq!(failure(&[]), "no command: give one of server, client, demo, keygen; --help explains");
        assert!(failure(&["client"]).contains("<ADDR>"));
        assert!(failure(&["demo", "-s", "0"]).starts_with("invalid value '0' for '--size <SIZE>': give 1 to 1G bytes"));
        assert!(failure(&["demo", "--sise", "1"]).contains("--size"));
        for args in [&["demo", "-n", "5", "-D", "1"][..], &["demo", "-D", "-1"], &["demo", "-e", "--wait", "spin"]] {
            assert!(!failure(args).contains('\n'));
        }
    }
}
