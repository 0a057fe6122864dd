//! The command line of `rdma-mesh`. All ranks of a run get the same arguments, except for `--rank`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use super::frame::{HEAD, LOAD};
use super::launcher::MAX_RANKS;
use crate::pingpong::cli::DeviceArgs;
use crate::pingpong::job::WaitMode;
use crate::program::number;

/// The default port of rank 0.
pub const DEFAULT_PORT: u16 = 18517;

/// Measures every pair of hosts of a cluster, and names the links that are slow and those that do not work.
///
/// There is one process per host. Start it by srun, mpirun or an Indexed Job of Kubernetes, or by hand with --hosts
/// and --rank. Rank 0 reports. Its exit status is 0 if every pair works and none is worse than --tolerance.
// local: arguments of the program
#[derive(Debug, Parser)]
#[command(name = "rdma-mesh", version, args_override_self = true)]
pub struct MeshArgs {
    /// Number of this process, from 0 [default: the launcher's]
    #[arg(long, value_name = "I")]
    pub rank: Option<usize>,
    /// Number of processes [default: the launcher's, or the number of hosts]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=MAX_RANKS as i64))]
    pub count: Option<u32>,
    /// One host per rank, rank 0 first; with HOST:PORT, that rank listens on PORT
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', conflicts_with = "ranks")]
    pub hosts: Vec<String>,
    /// A file with one host per line, rank 0 first
    #[arg(long, value_name = "FILE")]
    pub ranks: Option<PathBuf>,
    /// Host name or address of rank 0 [default: the first host, or the first node of the Slurm job]
    #[arg(long, value_name = "HOST")]
    pub root: Option<String>,
    /// Name of this rank's host in the report [default: Slurm's name of the node, the entry of --hosts, the host name]
    #[arg(long, value_name = "NAME")]
    pub label: Option<String>,
    /// Port of rank 0
    #[arg(short, long, default_value_t = DEFAULT_PORT)]
    pub port: u16,
    /// Address that this rank listens on and that others connect to [default: the device's with --ib-dev, else any]
    #[arg(long, value_name = "ADDR")]
    pub bind: Option<std::net::IpAddr>,
    /// The provider and the device that carry the connections.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// How the ranks wait for messages
    #[arg(long, value_enum, default_value_t = WaitMode::Adaptive)]
    pub wait: WaitMode,
    /// Bytes per message of the latency measurement
    #[arg(short, long, value_name = "BYTES", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(HEAD as i64..=LOAD as i64))]
    pub size: u32,
    /// Largest number of round trips per pair; the measurement ends after a second
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub iters: u64,
    /// Time of the bandwidth measurement per pair and direction; 0 skips it
    #[arg(long, value_name = "SECONDS", default_value = "0.2", value_parser = seconds_or_none)]
    pub bandwidth: Duration,
    /// Time in which every rank sends to every other, with all messages checked; 0 skips it, hours make it a soak test
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds_or_none)]
    pub all_to_all: Duration,
    /// Largest number of pairs that measure concurrently; 1 for ranks that share a machine [default: all of a round]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub at_once: Option<u32>,
    /// Largest number of concurrent connects of a rank
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub connects: u32,
    /// Longest time until all ranks have joined, and again until all links are up
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub patience: Duration,
    /// Silence after which a rank counts as dead
    #[arg(long, value_name = "SECONDS", default_value = "15", value_parser = seconds)]
    pub silence: Duration,
    /// Factor by which a pair or a rank may be worse than the median
    /// of its peers; a worse one is reported, and the exit status is 1
    #[arg(long, value_name = "FACTOR", default_value_t = 3.0, value_parser = factor)]
    pub tolerance: f64,
    /// Rows of the table of the worst pairs
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub worst: usize,
    /// Write all figures as JSON; - is standard output, and the table then goes to standard error
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write all figures in the text format of Prometheus
    #[arg(long, value_name = "FILE")]
    pub prometheus: Option<PathBuf>,
    /// Draw the heat map
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write the heat map as a page that shows the figures of the pair under the mouse pointer
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    number(text, 0.1..=86_400.0, "0.1 to 86400 seconds").map(Duration::from_secs_f64)
}

fn seconds_or_none(text: &str) -> Result<Duration, String> {
    if text.parse() == Ok(0.0) {
        return Ok(Duration::ZERO);
    }
    number(text, 0.01..=2_592_000.0, "0, or 0.01 to 2592000 seconds").map(Duration::from_secs_f64)
}

fn factor(text: &str) -> Result<f64, String> {
    number(text, 1.0..=1e6, "1 to 1000000")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::parse;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        MeshArgs::command().debug_assert();
    }

    #[test]
    fn bad_usage_is_one_line_with_the_cure() {
        let failure = |args: &[&str]| {
            let args = std::iter::once("rdma-mesh").chain(args.iter().copied());
            parse::<MeshArgs>(args.map(Into::into)).err().map(|failure| failure.to_string()).unwrap_or_default()
        };
        assert!(failure(&["--tolerance", "0.5"]).contains("give 1 to 1000000"));
        assert!(failure(&["--patience", "0"]).contains("give 0.1 to 86400 seconds"));
        assert!(failure(&["--all-to-all", "1e9"]).contains("give 0, or"));
        assert!(failure(&["--size", "8"]).contains("9..=4096"));
        assert!(failure(&["--count", "1"]).contains("2..=10000"));
        assert!(failure(&["--hosts", "a,b", "--ranks", "f"]).contains("cannot be used with"));
        assert_eq!(failure(&["--hosts", "a,b", "--rank", "0"]), "");
    }
}
