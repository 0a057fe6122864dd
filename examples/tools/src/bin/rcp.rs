//! Copies files to a peer. The peer runs `rcp server DIR`; the sender runs `rcp FILE HOST`, `rcp FILE HOST:NAME` or `rcp -r DIR HOST`.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use rdma_reactor::{Config, Security};
use rdma_reactor_tools::pingpong::address::resolve;
use rdma_reactor_tools::pingpong::cli::Provider;
use rdma_reactor_tools::pingpong::failure::{Ending, Failure};
use rdma_reactor_tools::pingpong::output::Output;
use rdma_reactor_tools::program;
use rdma_reactor_tools::rcp::name::shown;
use rdma_reactor_tools::rcp::{PORT, receive, send, tree};
use rdma_reactor_tools::secure::SecurityArgs;

/// Copies files to a peer, continues interrupted copies, and compares hashes.
///
/// `rcp server DIR` runs at the peer. An existing file is left alone if it is the same one.
// local: arguments of the program
#[derive(Debug, Parser)]
#[command(name = "rcp", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// The file; for a file called `server`, give ./server
    #[arg(required = true)]
    file: Option<PathBuf>,
    /// Host name or address of an `rcp server`, and optionally another name
    /// of the copy: 192.0.2.7, node7:backup.tar, `[2001:db8::7]:backup.tar`
    #[arg(required = true, value_name = "HOST[:NAME]")]
    to: Option<String>,
    /// Copy a directory with everything in it, except links and special files
    #[arg(short, long)]
    recursive: bool,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
struct Common {
    /// The port
    #[arg(short, long, default_value_t = PORT)]
    port: u16,
    /// RDMA devices (verbs), the embedded provider (iwarp), or whichever exists
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    provider: Provider,
    #[command(flatten)]
    security: SecurityArgs,
}

impl Common {
    fn config(&self, security: Security) -> Config {
        Config::default().provider(self.provider.into()).security(security)
    }
}

// local: arguments of the program
#[derive(Debug, Subcommand)]
enum Command {
    /// Receive files until Ctrl-C; the received part of an interrupted copy is in NAME.rcp-part
    Server {
        /// Directory for the files
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// Address to listen on, with or without a port
        #[arg(long, value_name = "ADDR", default_value = "0.0.0.0")]
        bind: String,
        /// Let peers replace files
        #[arg(long)]
        overwrite: bool,
        /// Time in which a sender must transfer the next 4 MiB, or its connection is closed
        #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
        patience: Duration,
        /// Time for which partial copies are kept, at most 100 of them; the oldest is also removed if the disk is full
        #[arg(long, value_name = "DAYS", default_value = "7", value_parser = days)]
        keep_parts: Duration,
        #[command(flatten)]
        common: Common,
    },
}

/// Splits `HOST[:NAME]` into the host and the optional name.
fn split(to: &str) -> Result<(&str, Option<&str>), Failure> {
    let (host, rest) = match to.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some(split) => split,
        None => to.split_at(to.find(':').unwrap_or(to.len())),
    };
    let name = match rest.strip_prefix(':') {
        Some(name) => Some(name),
        None if rest.is_empty() => None,
        None => return Err(Failure::new(format!("{to:?}: give HOST or HOST:NAME"))),
    };
    if host.is_empty() || name.is_some_and(|name| name.is_empty() || name.starts_with(':')) {
        return Err(Failure::new(format!("{to:?}: give HOST or HOST:NAME, and an IPv6 address in brackets")));
    }
    Ok((host, name))
}

fn seconds(text: &str) -> Result<Duration, String> {
    program::number(text, 0.1..=86_400.0, "0.1 to 86400 seconds").map(Duration::from_secs_f64)
}

fn days(text: &str) -> Result<Duration, String> {
    program::number(text, 0.0..=36_500.0, "0 to 36500 days").map(|days| Duration::from_secs_f64(days * 86_400.0))
}

fn copy(file: &Path, to: &str, recursive: bool, common: &Common) -> Result<Ending, Failure> {
    let (host, name) = split(to)?;
    let name = name.or_else(|| file.file_name()?.to_str());
    let name = name.ok_or_else(|| Failure::new(format!("{}: give the copy a name, HOST:NAME", file.display())))?;
    let mut tree = tree::list(file, name, recursive)?;
    let peer = resolve(host, common.port)?[0];
    let security = common.security.security()?;
    let is_plain = matches!(security, Security::Plain);
    let Some(mut copied) = send::run(tree.items, peer, common.config(security))? else {
        return Ok(Ending::Interrupted);
    };
    if recursive {
        Output::stdout().line(format!("{} files in {}: {}", copied.files, shown(name), copied.figures()));
    }
    if is_plain {
        eprintln!(
            "rcp: the copy is neither private nor authenticated: --tls-cert, --tls-key and --tls-ca, or --psk-file"
        );
    }
    tree.skipped.append(&mut copied.problems);
    match &tree.skipped[..] {
        [] => Ok(Ending::Complete),
        [one] => Err(Failure::new(one)),
        many => {
            many.iter().for_each(|one| eprintln!("rcp: {one}"));
            Err(Failure::new(format!("{} files were not copied, or changed meanwhile", many.len())))
        }
    }
}

fn run(cli: Cli) -> Result<Ending, Failure> {
    match (cli.command, cli.file, cli.to) {
        (Some(Command::Server { directory, bind, overwrite, patience, keep_parts, common }), ..) => {
            let config = common.config(common.security.security()?);
            let options = receive::ServerOptions { directory, overwrite, patience, keep_parts };
            receive::run(options, resolve(&bind, common.port)?[0], config)?;
            Ok(Ending::Complete)
        }
        (None, Some(file), Some(to)) => copy(&file, &to, cli.recursive, &cli.common),
        _ => Err(Failure::new("give FILE and HOST[:NAME]; --help explains")),
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

    #[test]
    fn a_destination_is_a_host_and_maybe_a_name() {
        assert_eq!(split("node7"), Ok(("node7", None)));
        assert_eq!(split("node7:a b"), Ok(("node7", Some("a b"))));
        assert_eq!(split("[::1]"), Ok(("::1", None)));
        assert_eq!(split("[::1]:x:y"), Ok(("::1", Some("x:y"))));
        for bad in ["", ":", ":x", "node7:", "::1", "[::1]x", "[]:x"] {
            assert!(split(bad).is_err(), "{bad:?}");
        }
    }
}
