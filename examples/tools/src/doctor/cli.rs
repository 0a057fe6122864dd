//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::pingpong::cli::parse_interval;

/// What this machine can do with RDMA, and why not more. Changes nothing.
///
/// Each line is ok, a note (something that is not there and need not be) or a problem, with the command that mends it.
/// Exit status: 0 when connections can be made, 1 when not.
#[derive(Debug, Parser)]
#[command(name = "rdma-doctor", version)]
pub struct Cli {
    /// Peers, or own addresses: what leads there, and which provider `auto` takes
    #[arg(value_name = "ADDRESS")]
    pub addresses: Vec<String>,
    /// One JSON object instead of lines
    #[arg(long)]
    pub json: bool,
    /// Read the hardware counters of the devices, wait, read them again, and name what moved
    #[arg(long, value_name = "SECONDS", value_parser = parse_interval)]
    pub watch: Option<Duration>,
    /// Look at the files under this directory: for tests
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    pub root: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
