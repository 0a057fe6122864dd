//! `bench`: `rdma-pingpong` and one-sided operations against bare TCP and against programs by others on this machine, and secured
//! connections against plain ones and against `openssl`, in alternating rounds of one run.
//!
//! Each round of a [`contest`] runs two processes, each on a processor of its own ([`pair`]). The competitors are [`tcp`], the
//! [`peers`], [`openssl`], and this library itself; [`one_sided`], [`mix`], [`many`] and [`secured`] have work that `rdma-pingpong`
//! does not do. A figure is the median of its rounds, and a ratio is the median of their ratios.

pub mod contest;
pub mod many;
pub mod mix;
pub mod one_sided;
pub mod openssl;
pub mod pair;
pub mod peers;
pub mod secured;
pub mod tcp;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde_json::json;

use crate::pingpong;
use crate::pingpong::failure::Failure;
use crate::pingpong::file::ResultFile;
use crate::pingpong::output::Output;
use crate::secure::SecurityArgs;

use self::contest::Outcome;
use self::many::Carrier;
use self::mix::Buffers;
use self::one_sided::Operation;
use self::pair::Processors;
use self::tcp::Kind;

/// Compares the cost of rdma-reactor with that of bare TCP and of programs by others on this machine.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct Cli {
    /// Rounds per figure, of which the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Only the rows that have this text in their names, such as TLS
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Write the results as JSON; - is standard output, and the table goes to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the spinning half round trips by size
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Draw the echoes per second by connections
    #[arg(long, value_name = "FILE")]
    connections_svg: Option<PathBuf>,
    /// End with exit code 1 when a target is missed
    #[arg(long)]
    check: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

/// The commands of this program as its own child.
#[derive(Debug, Subcommand)]
enum Role {
    /// One side of bare TCP, the server
    #[command(hide = true)]
    TcpServer {
        /// The work to do.
        kind: Kind,
        /// Length of a message, or of one read, bytes.
        size: usize,
    },
    /// One side of bare TCP, the client
    #[command(hide = true)]
    TcpClient {
        /// The work to do.
        kind: Kind,
        /// Address of the server.
        address: SocketAddr,
        /// Length of a message, or of one write, bytes.
        size: usize,
        /// Number of iterations.
        iterations: u64,
    },
    /// One side of the mix of requests, the one that answers
    #[command(hide = true)]
    MixServer {
        /// Its buffers.
        buffers: Buffers,
    },
    /// One side of the mix of requests, the one that asks
    #[command(hide = true)]
    MixClient {
        /// Its buffers.
        buffers: Buffers,
        /// Address of the server.
        address: SocketAddr,
        /// Number of requests.
        count: usize,
    },
    /// One side of echoes on many connections, the one that answers
    #[command(hide = true)]
    ManyServer {
        /// What carries them.
        carrier: Carrier,
    },
    /// One side of echoes on many connections, the one that asks
    #[command(hide = true)]
    ManyClient {
        /// What carries them.
        carrier: Carrier,
        /// Address of the server.
        address: SocketAddr,
        /// Number of connections.
        connections: u32,
        /// Number of echoes on all of them together.
        count: u64,
    },
    /// One side of one-sided operations, the memory
    #[command(hide = true)]
    OneSidedServer,
    /// One side of one-sided operations, the one that does them
    #[command(hide = true)]
    OneSidedClient {
        /// The work to do.
        operation: Operation,
        /// Address of the server.
        address: SocketAddr,
        /// Number of iterations.
        iterations: u64,
    },
    /// One side of connections that are opened one after another, the one that listens
    #[command(hide = true)]
    ConnectionsServer {
        /// How they are secured.
        #[command(flatten)]
        security: SecurityArgs,
    },
    /// One side of connections that are opened one after another, the one that opens them
    #[command(hide = true)]
    ConnectionsClient {
        /// Address of the server.
        address: SocketAddr,
        /// Number of connections.
        count: u64,
        /// How they are secured.
        #[command(flatten)]
        security: SecurityArgs,
    },
}

/// Runs the program. With `pingpong` as its first argument, it is `rdma-pingpong`.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut args: Vec<OsString> = args.into_iter().collect();
    if args.get(1).is_some_and(|arg| arg == pair::PINGPONG) {
        args.remove(0);
        return pingpong::main(args);
    }
    let cli = Cli::parse_from(args);
    let result = match cli.role {
        None => run(&cli),
        Some(Role::TcpServer { kind, size }) => {
            tcp::serve(kind, size).map(|()| ExitCode::SUCCESS).map_err(Failure::new)
        }
        Some(Role::TcpClient { kind, address, size, iterations }) => {
            print(tcp::measure(kind, address, size, iterations).map_err(Failure::new))
        }
        Some(Role::MixServer { buffers }) => mix::serve(buffers).map(|()| ExitCode::SUCCESS),
        Some(Role::MixClient { buffers, address, count }) => print(mix::measure(buffers, address, count)),
        Some(Role::ManyServer { carrier }) => many::serve(carrier).map(|()| ExitCode::SUCCESS),
        Some(Role::ManyClient { carrier, address, connections, count }) => {
            print(many::measure(carrier, address, connections, count))
        }
        Some(Role::OneSidedServer) => one_sided::serve().map(|()| ExitCode::SUCCESS).map_err(Failure::new),
        Some(Role::OneSidedClient { operation, address, iterations }) => {
            print(one_sided::measure(operation, address, iterations).map_err(Failure::new))
        }
        Some(Role::ConnectionsServer { security }) => secured::serve(&security).map(|()| ExitCode::SUCCESS),
        Some(Role::ConnectionsClient { address, count, security }) => {
            print(secured::measure(&security, address, count))
        }
    };
    result.unwrap_or_else(|failure| {
        eprintln!("bench: {failure}");
        ExitCode::FAILURE
    })
}

fn print(figure: Result<f64, Failure>) -> Result<ExitCode, Failure> {
    println!("{}", figure?);
    Ok(ExitCode::SUCCESS)
}

fn run(cli: &Cli) -> Result<ExitCode, Failure> {
    let to_stdout = cli.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    let mut out = if to_stdout { Output::stderr() } else { Output::stdout() };
    let file = match &cli.json {
        Some(path) if !to_stdout => Some(ResultFile::open("--json", path)?),
        _ => None,
    };
    let picture = |flag, path: &Option<PathBuf>| path.as_ref().map(|path| ResultFile::open(flag, path)).transpose();
    let by_size = picture("--svg", &cli.svg)?;
    let by_connections = picture("--connections-svg", &cli.connections_svg)?;
    let processors = Processors::of_this_machine();
    out.line(format_args!("{processors}; medians of {} rounds, of their ratios too", cli.rounds));
    let outcomes = contest::run(cli.rounds, cli.only.as_deref().unwrap_or_default(), &processors)?;
    out.line(contest::head());
    for outcome in &outcomes {
        out.line(outcome);
    }
    let all_met = outcomes.iter().all(Outcome::is_met);
    let results: Vec<_> = outcomes.iter().map(Outcome::json).collect();
    let text = format!("{:#}\n", json!({ "rounds": cli.rounds, "processors": processors.count(), "results": results }));
    match file {
        Some(file) => file.write(&text)?,
        None if to_stdout => Output::stdout().text(&text),
        None => {}
    }
    if let Some(file) = by_size {
        file.write(&contest::latency_by_size(&outcomes)?)?;
    }
    if let Some(file) = by_connections {
        file.write(&contest::rate_by_connections(&outcomes)?)?;
    }
    Ok(if cli.check && !all_met { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
