//! A hash table that clients read by RDMA Read: `kv server`, `kv put ADDR KEY VALUE`, `kv get ADDR KEY`, `kv bench ADDR`.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use rdma_reactor::{Config, Security};
use rdma_reactor_tools::kv::bench::{self, BenchPlan};
use rdma_reactor_tools::kv::once::{self, TableOperation};
use rdma_reactor_tools::kv::server;
use rdma_reactor_tools::kv::table::{Geometry, MAX_VALUE};
use rdma_reactor_tools::pingpong::address::resolve;
use rdma_reactor_tools::pingpong::cli::{Provider, parse_size};
use rdma_reactor_tools::pingpong::failure::{Ending, Failure};
use rdma_reactor_tools::pingpong::output::Output;
use rdma_reactor_tools::program;
use rdma_reactor_tools::secure::SecurityArgs;

/// Keeps a hash table that clients read out of the server's memory by RDMA Read.
///
/// `kv server` holds the table, `put` stores a value, `get`
/// prints one, and `bench` reads values while they are replaced.
#[derive(Debug, Parser)]
#[command(name = "kv", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// The port
    #[arg(short, long, default_value_t = 7473, global = true)]
    port: u16,
    /// RDMA devices (verbs), the embedded provider (iwarp), or whichever exists
    #[arg(long, value_enum, default_value_t = Provider::Auto, global = true)]
    provider: Provider,
    #[command(flatten)]
    security: SecurityArgs,
}

// local: arguments of the program
#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a table until Ctrl-C
    Server {
        /// Address to listen on, with or without a port
        #[arg(long, value_name = "ADDR", default_value = "0.0.0.0")]
        bind: String,
        /// Slots of the table: about twice as many as keys
        #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
        slots: u32,
        /// Longest value, bytes, up to 16M; each slot has space for one
        #[arg(long, value_name = "BYTES", default_value = "1K", value_parser = parse_value)]
        max_value: u32,
    },
    /// Store a value
    Put {
        /// The server's host name or address, with or without a port
        #[arg(value_name = "ADDR")]
        address: String,
        /// The key, 1 to 64 bytes
        key: String,
        /// The value
        value: String,
    },
    /// Print the value of a key
    Get {
        /// The server's host name or address, with or without a port
        #[arg(value_name = "ADDR")]
        address: String,
        /// The key
        key: String,
    },
    /// Read while one connection writes without pause; every value must be whole
    Bench {
        /// The server's host name or address, with or without a port
        #[arg(value_name = "ADDR")]
        address: String,
        /// Connections that read
        #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
        readers: u32,
        /// Keys that are written and read
        #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100_000))]
        keys: u32,
        /// Length of the run, seconds
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=86_400))]
        seconds: u64,
    },
}

fn parse_value(text: &str) -> Result<u32, String> {
    match parse_size(text) {
        Ok(size) if size <= MAX_VALUE => Ok(size),
        _ => Err("give 1 to 16M bytes, such as 64, 4K or 1M".into()),
    }
}

fn run(cli: Cli) -> Result<Ending, Failure> {
    let security = cli.security.security()?;
    if !matches!(security, Security::Plain) {
        eprintln!(
            "kv: peers are authenticated and puts are encrypted; what is read travels in the clear, by RDMA Read"
        );
    }
    let config = Config::default().provider(cli.provider.into()).security(security).allow_plain_remote_memory(true);
    let server = |text: &str| -> Result<SocketAddr, Failure> { Ok(resolve(text, cli.port)?[0]) };
    match cli.command {
        Command::Server { bind, slots, max_value } => {
            server::run(server(&bind)?, Geometry { slots, max_value }, config).map(|()| Ending::Complete)
        }
        Command::Put { address, key, value } => {
            let stored =
                once::run(server(&address)?, TableOperation::Put(key.into_bytes(), value.into_bytes()), config)?;
            Ok(if stored.is_some() { Ending::Complete } else { Ending::Interrupted })
        }
        Command::Get { address, key } => {
            let value = once::run(server(&address)?, TableOperation::Get(key.into_bytes()), config)?;
            let Some(value) = value else { return Ok(Ending::Interrupted) };
            Output::stdout().line(String::from_utf8_lossy(&value));
            Ok(Ending::Complete)
        }
        Command::Bench { address, readers, keys, seconds } => {
            let plan = BenchPlan { readers, keys, time: Duration::from_secs(seconds) };
            let (figures, ending) = bench::run(server(&address)?, plan, config)?;
            let Some(figures) = figures else { return Ok(ending) };
            let per_second = |count: u64| count as f64 * 1e9 / figures.nanos as f64;
            let mut output = Output::stdout();
            output.line(format!("reads   {:>12}  {:>10.0}/s", figures.reads, per_second(figures.reads)));
            output.line(format!("torn    {:>12}  read again", figures.torn));
            output.line(format!("writes  {:>12}  {:>10.0}/s", figures.writes, per_second(figures.writes)));
            output.line("every value was whole, and none older than the one before it");
            Ok(ending)
        }
    }
}

fn main() -> ExitCode {
    program::main(std::env::args_os(), run)
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
