//! The command line of `rdma-doctor`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::pingpong::cli::parse_interval;

/// Reports which RDMA this machine can use, and what is missing. Changes nothing.
///
/// Each line is ok, a note (something that is missing and not needed) or a problem,
/// with the command that fixes it. Exit status: 0 if connections can be made, 1 if not.
// local: arguments of the program
#[derive(Debug, Parser)]
#[command(name = "rdma-doctor", version)]
pub struct DoctorArgs {
    /// Peers, or local addresses: report the device that reaches each, and the provider that `auto` chooses
    #[arg(value_name = "ADDRESS")]
    pub addresses: Vec<String>,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub json: bool,
    /// Read the hardware counters of the devices, wait, read them again, and name those that changed
    #[arg(long, value_name = "SECONDS", value_parser = parse_interval)]
    pub watch: Option<Duration>,
    /// Read the files under this directory, for tests
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    pub root: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        DoctorArgs::command().debug_assert();
    }
}
