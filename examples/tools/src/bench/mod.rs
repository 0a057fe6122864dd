//! `bench` compares this library with competitors on this machine, in alternating rounds of one run. It compares `rdma-pingpong` and
//! one-sided operations with bare TCP and with programs of other projects. It also compares secured connections with plain ones and
//! with `openssl`.
//!
//! Each round of a [`contest`] runs two processes, each on a separate processor ([`pair`]). The
//! [`distance`] of these processors is probed before and after. The [`rows`] of the table name the
//! competitors: [`tcp`], the [`ring`], the [`peers`], [`openssl`], and this library itself with
//! other [`work`]. Measurements that `rdma-pingpong` cannot do are in [`one_sided`], [`mix`],
//! [`many`], [`datagrams`] and [`secured`]. In an [`outcome`], a figure is the median of the
//! figures of all rounds, and a ratio is the median of the ratios of all rounds. A signal ends the
//! program in order ([`interrupt`]).

pub mod contest;
pub mod datagrams;
pub mod distance;
pub mod interrupt;
pub mod machine;
pub mod many;
pub mod mix;
pub mod one_sided;
pub mod openssl;
pub mod outcome;
pub mod pair;
pub mod peers;
pub mod picture;
pub mod ring;
pub mod rows;
pub mod sample;
pub mod secured;
pub mod target;
pub mod tcp;
pub mod work;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde_json::json;

use crate::pingpong;
use crate::pingpong::failure::{Ending, Failure};
use crate::pingpong::file::ResultFile;
use crate::pingpong::output::Output;
use crate::program;
use crate::secure::SecurityArgs;

use self::contest::{Contest, RoundCounts};
use self::distance::{Distance, NEAR_BELOW_NS};
use self::machine::Times;
use self::many::EchoTransport;
use self::mix::Buffers;
use self::one_sided::Operation;
use self::outcome::Outcome;
use self::pair::Processors;
use self::tcp::TcpExchange;

/// Compares the cost of rdma-reactor with that of bare TCP and of programs of other projects on this machine.
// local: arguments of the program
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct BenchArgs {
    /// Rounds with near processors, and as many with far ones; each figure is the median of its rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Largest number of attempts to measure these rounds
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    tries: u32,
    /// Run each row once, with one message and without the programs of other projects, to see if it works
    #[arg(long, conflicts_with_all = ["rounds", "tries", "check"])]
    smoke: bool,
    /// Only the rows that have this text in their names, such as TLS
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Write the results as JSON; - is standard output, and the table, which is Markdown, then goes to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the half round trips with both sides polling, by message size
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Draw the echoes per second by connections
    #[arg(long, value_name = "FILE")]
    connections_svg: Option<PathBuf>,
    /// Draw the round trips of the open loop by quantile
    #[arg(long, value_name = "FILE")]
    open_loop_svg: Option<PathBuf>,
    /// End with exit code 1 if a target is missed
    #[arg(long)]
    check: bool,
    #[command(subcommand)]
    role: Option<ChildCommand>,
}

/// The internal commands, which this program runs as child processes.
#[derive(Debug, Subcommand)]
enum ChildCommand {
    /// The server of bare TCP
    #[command(hide = true)]
    TcpServer {
        /// The kind of exchange.
        kind: TcpExchange,
        /// The length of a message, or of one read, in bytes.
        size: usize,
    },
    /// The client of bare TCP
    #[command(hide = true)]
    TcpClient {
        /// The kind of exchange.
        kind: TcpExchange,
        /// Address of the server.
        address: SocketAddr,
        /// The length of a message, or of one write, in bytes.
        size: usize,
        /// The number of iterations.
        iterations: u64,
    },
    /// The server of the mix of requests
    #[command(hide = true)]
    MixServer {
        /// The sizes of the server's buffers.
        buffers: Buffers,
    },
    /// The client of the mix of requests
    #[command(hide = true)]
    MixClient {
        /// The sizes of the client's buffers.
        buffers: Buffers,
        /// Address of the server.
        address: SocketAddr,
        /// The number of requests.
        count: usize,
    },
    /// The server of echoes on many connections
    #[command(hide = true)]
    ManyServer {
        /// The transport of the echoes.
        carrier: EchoTransport,
    },
    /// The client of echoes on many connections
    #[command(hide = true)]
    ManyClient {
        /// The transport of the echoes.
        carrier: EchoTransport,
        /// Address of the server.
        address: SocketAddr,
        /// The number of connections.
        connections: u32,
        /// The total number of echoes on all connections.
        count: u64,
    },
    /// The server of one-sided operations, which provides the memory
    #[command(hide = true)]
    OneSidedServer,
    /// The client of one-sided operations
    #[command(hide = true)]
    OneSidedClient {
        /// The operation to measure.
        operation: Operation,
        /// Address of the server.
        address: SocketAddr,
        /// The number of iterations.
        iterations: u64,
    },
    /// The server of datagrams
    #[command(hide = true)]
    DatagramsServer {
        /// The transport of the datagrams.
        carrier: datagrams::DatagramTransport,
        /// The kind of exchange.
        kind: datagrams::DatagramExchange,
    },
    /// The client of datagrams
    #[command(hide = true)]
    DatagramsClient {
        /// The transport of the datagrams.
        carrier: datagrams::DatagramTransport,
        /// The kind of exchange.
        kind: datagrams::DatagramExchange,
        /// Address of the server.
        address: SocketAddr,
        /// The length of a datagram, in bytes.
        size: usize,
        /// The number of datagrams.
        count: u64,
    },
    /// The server of sequential connections
    #[command(hide = true)]
    ConnectionsServer {
        /// The security of the connections.
        #[command(flatten)]
        security: SecurityArgs,
    },
    /// The client of sequential connections
    #[command(hide = true)]
    ConnectionsClient {
        /// Address of the server.
        address: SocketAddr,
        /// The number of connections.
        count: u64,
        /// The security of the connections.
        #[command(flatten)]
        security: SecurityArgs,
    },
}

/// Runs the program. If the first argument is `pingpong`, the program behaves as `rdma-pingpong`.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut args: Vec<OsString> = args.into_iter().collect();
    if args.get(1).is_some_and(|arg| arg == pair::PINGPONG) {
        args.remove(0);
        return pingpong::main(args);
    }
    program::main(args, run)
}

fn run(cli: BenchArgs) -> Result<ExitCode, Failure> {
    if cli.role.is_some() {
        pair::end_with_stdin();
    }
    match cli.role {
        None => compare(&cli),
        Some(ChildCommand::TcpServer { kind, size }) => {
            tcp::serve(kind, size).map(|()| ExitCode::SUCCESS).map_err(Failure::new)
        }
        Some(ChildCommand::TcpClient { kind, address, size, iterations }) => {
            print(tcp::measure(kind, address, size, iterations).map_err(Failure::new))
        }
        Some(ChildCommand::MixServer { buffers }) => mix::serve(buffers).map(|()| ExitCode::SUCCESS),
        Some(ChildCommand::MixClient { buffers, address, count }) => print(mix::measure(buffers, address, count)),
        Some(ChildCommand::ManyServer { carrier }) => many::serve(carrier).map(|()| ExitCode::SUCCESS),
        Some(ChildCommand::ManyClient { carrier, address, connections, count }) => {
            print(many::measure(carrier, address, connections, count))
        }
        Some(ChildCommand::DatagramsServer { carrier, kind }) => {
            datagrams::serve(carrier, kind).map(|()| ExitCode::SUCCESS)
        }
        Some(ChildCommand::DatagramsClient { carrier, kind, address, size, count }) => {
            print(datagrams::measure(carrier, kind, address, size, count))
        }
        Some(ChildCommand::OneSidedServer) => one_sided::serve().map(|()| ExitCode::SUCCESS).map_err(Failure::new),
        Some(ChildCommand::OneSidedClient { operation, address, iterations }) => {
            print(one_sided::measure(operation, address, iterations).map_err(Failure::new))
        }
        Some(ChildCommand::ConnectionsServer { security }) => secured::serve(&security).map(|()| ExitCode::SUCCESS),
        Some(ChildCommand::ConnectionsClient { address, count, security }) => {
            print(secured::measure(&security, address, count))
        }
    }
}

fn print(figure: Result<f64, Failure>) -> Result<ExitCode, Failure> {
    Output::stdout().line(figure?);
    Ok(ExitCode::SUCCESS)
}

fn compare(cli: &BenchArgs) -> Result<ExitCode, Failure> {
    interrupt::on_signals()?;
    let to_stdout = cli.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    let mut out = if to_stdout { Output::stderr() } else { Output::stdout() };
    let file = match &cli.json {
        Some(path) if !to_stdout => Some(ResultFile::open("--json", path)?),
        _ => None,
    };
    let picture = |flag, path: &Option<PathBuf>| path.as_ref().map(|path| ResultFile::open(flag, path)).transpose();
    let by_size = picture("--svg", &cli.svg)?;
    let by_connections = picture("--connections-svg", &cli.connections_svg)?;
    let by_quantile = picture("--open-loop-svg", &cli.open_loop_svg)?;
    let mut contests = contest::chosen(cli.only.as_deref().unwrap_or_default())?;
    let mut processors = Processors::of_this_machine();
    let mut wanted = RoundCounts { rounds: cli.rounds as usize, tries: cli.tries as usize };
    if cli.smoke {
        contests = contests.into_iter().map(Contest::smoke).collect();
        (processors, wanted) = (Processors::default(), RoundCounts { rounds: 1, tries: 1 });
    }
    let before = Times::now();
    let outcomes = contest::run(wanted, &contests, &processors);
    // A signal makes the current round fail. This is not reported as a failure, and the table has
    // the rounds before it.
    let is_interrupted = interrupt::is_raised();
    let outcomes = match outcomes {
        Err(_) if is_interrupted => return Ok(Ending::Interrupted.into()),
        outcomes => outcomes?,
    };
    let after = Times::now();
    let stolen = before.zip(after).map(|(before, after)| after.stolen_percent(&before));
    let (system, own) = (machine::system_congestion(), machine::own_congestion());
    out.line(match cli.smoke {
        true => "each row once, with one message: the figures mean nothing".into(),
        false => format!("{processors}; medians of up to {} rounds, of their ratios too", cli.rounds),
    });
    out.line(format_args!(
        "congestion control of the system: {system}; of this library within a host: {}",
        own.unwrap_or("the same")
    ));
    out.line(match (before.zip(after), stolen) {
        (Some((before, after)), Some(percent)) => {
            format!("steal: {} ticks before, {} after, {percent:.2} % of the time", before.stolen, after.stolen)
        }
        _ => "steal: unknown".into(),
    });
    let columns: &[Distance] = match processors.count() {
        0 | 1 => &[Distance::Unknown],
        _ => {
            out.line(format_args!(
                "near: 64 B to the other processor take less than {NEAR_BELOW_NS} ns; mixed: rounds that changed"
            ));
            &[Distance::Near, Distance::Far]
        }
    };
    out.line(format_args!("\n{}", outcome::head(columns)));
    for outcome in &outcomes {
        out.line(outcome.row(columns));
    }
    let tails: Vec<_> = outcomes.iter().flat_map(|outcome| outcome.tail_rows(columns)).collect();
    if !tails.is_empty() {
        out.line(format_args!("\n{}\n{}", outcome::tail_head(), tails.join("\n")));
    }
    let all_met = outcomes.iter().all(Outcome::is_met);
    let results: Vec<_> = outcomes.iter().map(Outcome::json).collect();
    let document = json!({
        "rounds": wanted.rounds,
        "tries": wanted.tries,
        "processors": processors.count(),
        "near_below_ns": NEAR_BELOW_NS,
        "congestion_control": { "system": system, "own": own },
        "steal": {
            "ticks_before": before.map(|times| times.stolen),
            "ticks_after": after.map(|times| times.stolen),
            "percent": stolen,
        },
        "results": results,
    });
    let text = format!("{document:#}\n");
    match file {
        Some(file) => file.write(&text)?,
        None if to_stdout => Output::stdout().text(&text),
        None => {}
    }
    let all_ran = outcomes.iter().all(|outcome| outcome.failed.is_none());
    let pictures = [
        (by_size, "--svg", picture::latency_by_size as fn(&[Outcome]) -> Result<String, Failure>),
        (by_connections, "--connections-svg", picture::rate_by_connections),
        (by_quantile, "--open-loop-svg", picture::open_loop),
    ];
    for (file, option, draw) in pictures {
        match file.map(|file| file.write(&draw(&outcomes)?)) {
            // The table already has the reason why this picture's contest has no result.
            Some(Err(failure)) if !all_ran || is_interrupted => out.line(format_args!("{option}: {failure}")),
            Some(written) => written?,
            None => {}
        }
    }
    if is_interrupted {
        return Ok(Ending::Interrupted.into());
    }
    Ok(if !all_ran || (cli.check && !all_met) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        BenchArgs::command().debug_assert();
        let cli = BenchArgs::try_parse_from(["bench"]).unwrap();
        assert_eq!((cli.rounds, cli.tries), (5, 40));
    }
}
