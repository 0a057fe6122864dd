//! Copies a file to a peer: `rcp server DIR` runs at the peer, and `rcp FILE HOST` or `rcp FILE HOST:NAME` on this
//! side.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rdma_reactor::{Config, Security};
use rdma_reactor_examples::pingpong::address::resolve;
use rdma_reactor_examples::pingpong::cli::Provider;
use rdma_reactor_examples::pingpong::failure::{Ending, Failure};
use rdma_reactor_examples::pingpong::output::Output;
use rdma_reactor_examples::program;
use rdma_reactor_examples::rcp::{PORT, receive, send};
use rdma_reactor_examples::secure::SecurityArgs;

/// Copies a file to a peer; goes on where a copy before was cut off, and compares hashes.
#[derive(Debug, Parser)]
#[command(name = "rcp", version, about, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// The file; one that is called `server` is ./server
    #[arg(required = true)]
    file: Option<PathBuf>,
    /// Host name or address of an `rcp server`, and the name of the copy if it is to have another: 192.0.2.7,
    /// node7:backup.tar, `[2001:db8::7]:backup.tar`
    #[arg(required = true, value_name = "HOST[:NAME]")]
    to: Option<String>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
struct Common {
    /// The port
    #[arg(short, long, default_value_t = PORT)]
    port: u16,
    /// RDMA devices (verbs), the embedded provider (iwarp), or what there is
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

#[derive(Debug, Subcommand)]
enum Command {
    /// Take files until Ctrl-C
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
        #[command(flatten)]
        common: Common,
    },
}

/// Splits `HOST[:NAME]` into the host, and the name if there is one.
fn split(to: &str) -> Result<(&str, Option<&str>), Failure> {
    let (host, rest) = match to.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some(split) => split,
        None => to.split_at(to.find(':').unwrap_or(to.len())),
    };
    let name = match rest.strip_prefix(':') {
        Some(name) => Some(name),
        None if rest.is_empty() => None,
        None => return Err(Failure::new(format!("{to:?}: say HOST or HOST:NAME"))),
    };
    if host.is_empty() || name.is_some_and(|name| name.is_empty() || name.starts_with(':')) {
        return Err(Failure::new(format!("{to:?}: say HOST or HOST:NAME, and an IPv6 address in brackets")));
    }
    Ok((host, name))
}

fn copy(file: PathBuf, to: &str, common: &Common) -> Result<Ending, Failure> {
    let (host, name) = split(to)?;
    let name = name.or_else(|| file.file_name()?.to_str());
    let name = name.ok_or_else(|| Failure::new(format!("{}: give the copy a name, HOST:NAME", file.display())))?;
    let peer = resolve(host, common.port)?[0];
    let security = common.security.security()?;
    let is_plain = matches!(security, Security::Plain);
    let config = common.config(security);
    let Some(copied) = send::run(&file, name, peer, config)? else { return Ok(Ending::Interrupted) };
    let resumed = match copied.resumed {
        0 => String::new(),
        resumed => format!(", {resumed} of them from before"),
    };
    Output::stdout().line(format!("{name}: {} bytes{resumed}", copied.len));
    if is_plain {
        eprintln!(
            "rcp: the copy is neither private nor authenticated: --tls-cert, --tls-key and --tls-ca, or --psk-file"
        );
    }
    Ok(Ending::Complete)
}

fn run(cli: Cli) -> Result<Ending, Failure> {
    match (cli.command, cli.file, cli.to) {
        (Some(Command::Server { directory, bind, overwrite, common }), ..) => {
            let config = common.config(common.security.security()?);
            receive::run(&directory, overwrite, resolve(&bind, common.port)?[0], config)?;
            Ok(Ending::Complete)
        }
        (None, Some(file), Some(to)) => copy(file, &to, &cli.common),
        _ => Err(Failure::new("say FILE and HOST[:NAME]; --help explains")),
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
