//! `rdma-pingpong` measures latency and throughput between two processes.
//!
//! The client sends the parameters of a measurement in its connect request ([`job`]). The server prepares for them, and needs no
//! settings of its own. The command line is in [`cli`], the measurement in [`client`] and [`server`], and the results in [`figures`].

pub mod address;
pub mod chart;
pub mod cli;
pub mod client;
pub mod demo;
pub mod device;
pub mod dial;
pub mod failure;
pub mod figures;
pub mod file;
pub mod frame;
pub mod histogram;
pub mod interrupt;
pub mod intervals;
pub mod job;
pub mod json;
pub mod latency;
pub mod outlet;
pub mod output;
pub mod paced;
pub mod plan;
pub mod processor;
pub mod progress;
pub mod series;
pub mod server;
pub mod stream;
pub mod table;
pub mod target;
pub mod throughput;
pub mod touch;
pub mod watch;

use std::ffi::OsString;
use std::process::ExitCode;

use self::cli::{Command, PingpongArgs};
use self::failure::{Ending, Failure};
use crate::program;

/// Runs the program: parses the command line, and runs the command. Prints a failure in one line.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    program::main(args, run)
}

fn run(cli: PingpongArgs) -> Result<Ending, Failure> {
    match cli.command {
        Command::Server(args) => server::run(&args),
        Command::Client(args) => series::connect(&args.address, args.port, &args.run),
        Command::Demo(args) => demo::run(&args),
        #[cfg(feature = "secure")]
        Command::Keygen(args) => crate::secure::keygen::run(&args),
    }
}
