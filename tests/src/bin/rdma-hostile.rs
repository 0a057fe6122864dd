//! Attacks a server on this machine, on the embedded provider over the loopback interface. Some attackers disturb the setup of connections.
//! Others use established connections, and send only what their credits permit. During the attack, honest clients connect or request
//! echoes. The server, the attackers and the clients are separate processes.
//!
//! - `rdma-hostile [--short] [--only WORDS] [--minutes N] [--json FILE]`: runs all attacks, or those whose row of the table contains WORDS.
//!   Prints the table to standard output. `--short` takes about 25 s: it omits the control (see below), and does not wait for memory to be
//!   released. `--minutes` is the duration of the attack in shared memory;
//! - `rdma-hostile serve`, `attack`, `flood`, `scribble`, `lend`, `newcomers`, `established` and
//!   `crowd` are the other processes.
//!
//! The control is a second run, in which the attackers attack another server on this machine. In this run, the attackers can slow the
//! honest clients down only by using processor time. On a real network, attackers use the processors of other machines, so this slowdown
//! does not count as an effect of the attack. In rows with the word `first`, the server and the honest clients have a real-time priority,
//! if the user may set such a priority. So these processes do not wait for a processor that an attacker uses. The exit status is 1, with
//! one line of text, if a target is missed (`tests/src/hostile_run/verdict.rs`).
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rdma_reactor_tests::hostile_run::process::{answer, may_be_first};
use rdma_reactor_tests::hostile_run::row::{Attack, Row, all, measure, short};
use rdma_reactor_tests::hostile_run::verdict::Verdict;
use rdma_reactor_tests::hostile_run::{
    Result, attacker, crowd, established, flooder, lender, newcomers, scribbler, server, table,
};

/// The command line.
#[derive(Debug, Default)]
struct Options {
    is_short: bool,
    /// The words that a row must contain to be run.
    only: Option<String>,
    /// The duration of the attack in shared memory.
    minutes: Option<NonZeroUsize>,
    json: Option<PathBuf>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} wants a value"));
            match arg.as_str() {
                "--short" => options.is_short = true,
                "--only" => options.only = Some(value()?),
                "--minutes" => options.minutes = Some(value()?.parse()?),
                "--json" => options.json = Some(value()?.into()),
                _ => return Err(format!("{arg}: say [--short] [--only WORDS] [--minutes N] [--json FILE]").into()),
            }
        }
        Ok(options)
    }
}

fn attack(program: &Path, options: &Options) -> Result<()> {
    let may_be_first = may_be_first();
    if !may_be_first && !options.is_short {
        eprintln!("this user may not give real-time priorities: servers compete with the attackers for the processors");
    }
    let rows = if options.is_short { short() } else { all(may_be_first) };
    let wanted: Vec<_> = rows
        .into_iter()
        .filter(|row| {
            let name = format!("{:?} {}", row.security, row.name()).to_lowercase();
            options.only.iter().flat_map(|words| words.split(' ')).all(|word| name.contains(&word.to_lowercase()))
        })
        .map(|row| match options.minutes.filter(|_| matches!(row.attack, Attack::Scribbles)) {
            Some(minutes) => Row { count: 60_000 * minutes.get(), ..row },
            None => row,
        })
        .collect();
    if wanted.is_empty() {
        return Err("no attack has these words".into());
    }
    let mut measured = Vec::new();
    for row in wanted {
        eprintln!("{:?}: {}", row.security, row.name());
        measured.push(measure(program, row, !options.is_short)?);
    }
    println!("{}", table::head());
    let mut verdicts = Vec::new();
    for row in measured {
        let verdict = Verdict::of(row)?;
        println!("{}", table::row(&verdict));
        verdicts.push(verdict);
    }
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&verdicts)?;
        std::fs::write(path, text + "\n").map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let bad: Vec<_> = verdicts.iter().filter(|verdict| !verdict.missed.is_empty()).collect();
    match bad.first() {
        None => Ok(()),
        Some(first) => {
            let (all, bad) = (verdicts.len(), bad.len());
            let Verdict { security, attack, missed, .. } = first;
            Err(format!("{bad} of {all} attacks miss a target, such as {security}, {attack}: {}", missed[0]).into())
        }
    }
}

fn run() -> Result<()> {
    rlimit::increase_nofile_limit(1 << 16)?;
    let args: Vec<_> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", settings] => server::run(&serde_json::from_str(settings)?),
        ["attack", settings] => attacker::run(&serde_json::from_str(settings)?),
        ["flood", settings] => flooder::run(&serde_json::from_str(settings)?),
        ["scribble", settings] => scribbler::run(&serde_json::from_str(settings)?),
        ["lend", settings] => lender::run(serde_json::from_str(settings)?),
        ["crowd", settings] => answer(&crowd::run(serde_json::from_str(settings)?)?),
        ["established", settings] => answer(&established::run(serde_json::from_str(settings)?)?),
        ["newcomers", settings] => answer(&newcomers::run(serde_json::from_str(settings)?)?),
        _ => attack(&std::env::current_exe()?, &Options::parse(args.into_iter())?),
    }
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("off")).init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rdma-hostile: {error}");
            ExitCode::FAILURE
        }
    }
}
