//! Counts the instructions of steady states under callgrind, and compares the counts with those in
//! a file: `tests/data/instructions.txt` for the default settings of a release, and
//! `tests/data/instructions-lto.txt` for link-time optimisation.
//!
//! ```text
//! rdma-instructions compare FILE    counts and compares; fails if a state's count grew by over 3 %
//! rdma-instructions write FILE      counts, and writes the file
//! rdma-instructions run N M         M rounds of state N, without counting: what callgrind runs
//! ```
//!
//! Only instructions in user mode are counted. The counts depend on the compiler, so the file names the compiler.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::iter;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rdma_reactor::{ProviderChoice, SecurityMode};
use rdma_reactor_tests::steady::{Mode, Side, Steady, Work};
use rdma_reactor_tests::tasks;

/// The device of a steady state, and its settings.
#[derive(Clone, Copy)]
enum Way {
    /// The embedded provider over TCP.
    Tcp(Mode),
    /// The embedded provider in shared memory.
    Shm(Mode),
    Tls,
    /// A device whose operations need almost no instructions.
    Null,
    /// A device that needs almost no instructions and sends each message back. The reactor's own
    /// loop runs, and polls without sleeping.
    Alone(Mode),
}

const PLAIN: Mode = Mode { quiet_sends: false, spins: false, idle: 0 };
const QUIET: Mode = Mode { quiet_sends: true, ..PLAIN };
const SPINNING: Mode = Mode { spins: true, ..PLAIN };
const QUIET_SPINNING: Mode = Mode { quiet_sends: true, ..SPINNING };
const BESIDE_1000: Mode = Mode { idle: 1_000, ..SPINNING };

/// The name of a state in which few tasks send messages. A message in the state [`MANY_SENDERS`] may cost at most [`MOST_FOR_MANY`] times
/// as much as a message in this state.
const FEW_SENDERS: &str = "64 B sent by one of 10 tasks";
const MANY_SENDERS: &str = "64 B sent by one of 5,000 tasks";
const MOST_FOR_MANY: f64 = 2.0;

/// The states that are counted. Each has a name, a kind of work, the side that is counted, and its settings.
const STATES: [(&str, Work, Side, Way); 40] = [
    ("64 B round trip, one side", Work::RoundTrip, Side::Client, Way::Tcp(PLAIN)),
    ("64 B streamed, sender", Work::Stream, Side::Client, Way::Tcp(PLAIN)),
    ("64 B streamed, receiver", Work::Stream, Side::Server, Way::Tcp(PLAIN)),
    ("64 B write, sender", Work::Write, Side::Client, Way::Tcp(PLAIN)),
    ("timer", Work::Timer, Side::Client, Way::Tcp(PLAIN)),
    ("idle turn", Work::Idle, Side::Client, Way::Tcp(PLAIN)),
    ("64 B round trip, callbacks that run", Work::Runs, Side::Client, Way::Tcp(PLAIN)),
    ("64 B round trip, a task that runs", Work::TaskRuns, Side::Client, Way::Tcp(PLAIN)),
    ("64 B round trip, a task of another executor", Work::Task, Side::Client, Way::Tcp(PLAIN)),
    (FEW_SENDERS, Work::Senders(10), Side::Client, Way::Tcp(PLAIN)),
    (MANY_SENDERS, Work::Senders(5_000), Side::Client, Way::Tcp(PLAIN)),
    ("TLS: 64 B round trip, one side", Work::RoundTrip, Side::Client, Way::Tls),
    ("TLS: 64 B streamed, sender", Work::Stream, Side::Client, Way::Tls),
    ("TLS: 64 B streamed, receiver", Work::Stream, Side::Server, Way::Tls),
    ("quiet: 64 B round trip, one side", Work::RoundTrip, Side::Client, Way::Tcp(QUIET)),
    ("quiet: 64 B streamed, sender", Work::Stream, Side::Client, Way::Tcp(QUIET)),
    ("null: 64 B round trip, one side", Work::RoundTrip, Side::Client, Way::Null),
    ("null: 64 B streamed, sender", Work::Stream, Side::Client, Way::Null),
    ("null: 64 B streamed, receiver", Work::Stream, Side::Server, Way::Null),
    ("null: 64 B block of a list, written", Work::Blocks { len: 64, reads: false }, Side::Client, Way::Null),
    ("null: 64 B block of a list, read", Work::Blocks { len: 64, reads: true }, Side::Client, Way::Null),
    ("null: 4 KiB block of a list, written", Work::Blocks { len: 4096, reads: false }, Side::Client, Way::Null),
    ("64 B block of a list, written", Work::Blocks { len: 64, reads: false }, Side::Client, Way::Tcp(PLAIN)),
    ("4 KiB block of a list, written", Work::Blocks { len: 4096, reads: false }, Side::Client, Way::Tcp(PLAIN)),
    ("4 KiB block of a list, read", Work::Blocks { len: 4096, reads: true }, Side::Client, Way::Tcp(PLAIN)),
    ("64 B call and its answer, caller", Work::Call, Side::Client, Way::Tcp(PLAIN)),
    ("64 B call and its answer, server", Work::Call, Side::Server, Way::Tcp(PLAIN)),
    ("null: 64 B call and its answer, caller", Work::Call, Side::Client, Way::Null),
    ("null: 64 B call and its answer, server", Work::Call, Side::Server, Way::Null),
    ("alone: 64 B round trip", Work::RoundTrip, Side::Client, Way::Alone(SPINNING)),
    ("alone: quiet 64 B round trip", Work::RoundTrip, Side::Client, Way::Alone(QUIET_SPINNING)),
    ("spinning: 64 B round trip, one side", Work::RoundTrip, Side::Client, Way::Tcp(SPINNING)),
    ("spinning: quiet 64 B round trip, one side", Work::RoundTrip, Side::Client, Way::Tcp(QUIET_SPINNING)),
    ("spinning: 64 B beside 1,000 idle connections", Work::RoundTrip, Side::Client, Way::Tcp(BESIDE_1000)),
    ("shm: 64 B round trip, one side", Work::RoundTrip, Side::Client, Way::Shm(PLAIN)),
    ("shm: spinning 64 B round trip, one side", Work::RoundTrip, Side::Client, Way::Shm(SPINNING)),
    ("shm: spinning quiet 64 B round trip", Work::RoundTrip, Side::Client, Way::Shm(QUIET_SPINNING)),
    ("shm: 64 B streamed, sender", Work::Stream, Side::Client, Way::Shm(PLAIN)),
    ("shm: quiet 64 B streamed, sender", Work::Stream, Side::Client, Way::Shm(QUIET)),
    ("shm: 64 B streamed, receiver", Work::Stream, Side::Server, Way::Shm(PLAIN)),
];
/// Each row is measured by two runs: a short one and a long one, with these numbers of rounds. The difference between the counts of the two
/// runs excludes the instructions for setup.
const RUNS: [u64; 2] = [2_000, 12_000];
/// The number of times that a run is repeated if its first count is too high. The lowest count of the repetitions is used. The counts
/// differ because another program may interrupt a run: a turn may then find less work, so that the run needs more turns.
const TRIES: usize = 3;
/// The largest accepted growth of a state's total, in percent.
const GROWTH: f64 = 3.0;
/// The threshold for a single function, in instructions per round. The file lists a function only
/// if its cost reaches the threshold. A function is printed as a cause of growth only if its cost
/// has grown by more than the threshold.
const TOLD: f64 = 2.0;

/// The number of instructions in each round, by the name of a function or layer.
type Costs = BTreeMap<String, f64>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["compare", file] => compare(file),
        ["write", file] => write(file),
        ["run", state, times] => run(state, times),
        _ => Err("usage: rdma-instructions compare FILE | write FILE | run STATE TIMES".into()),
    };
    result.map_or_else(
        |error| {
            eprintln!("rdma-instructions: {error}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

fn run(state: &str, times: &str) -> Result<(), String> {
    let (state, times): (usize, u64) =
        state.parse().ok().zip(times.parse().ok()).ok_or("run takes two numbers: the state and how many times")?;
    let &(_, work, side, way) = STATES.get(state).ok_or_else(|| format!("there is no state {state}"))?;
    match (work, way) {
        (Work::Runs, _) => tasks::round_trips_of_callbacks(times),
        (Work::TaskRuns, _) => tasks::round_trips_of_run(times),
        (Work::Task, _) => tasks::round_trips(times),
        (Work::Senders(tasks), _) => tasks::sends(tasks, times),
        (work, Way::Tcp(mode)) => Steady::with(work, side, ProviderChoice::Iwarp, mode).repeat(times),
        (work, Way::Shm(mode)) => Steady::with(work, side, ProviderChoice::Shm, mode).repeat(times),
        (work, Way::Null) => Steady::on_null(work, side).repeat(times),
        (_, Way::Alone(mode)) => Steady::alone(times, mode),
        (work, Way::Tls) => Steady::secured(work, side, SecurityMode::Tls).repeat(times),
    }
    Ok(())
}

fn compiler() -> String {
    let version = Command::new("rustc").arg("--version").output();
    version.map_or_else(|_| "unknown".into(), |out| String::from_utf8_lossy(&out.stdout).trim().into())
}

/// Counts the instructions of each state, by function. The states are counted in parallel, one on each processor. If `passes` returns true
/// for the count of a single run, that run is not repeated.
fn count(passes: impl Fn(&str, &Costs) -> bool + Sync) -> Result<Vec<Costs>, String> {
    let next = AtomicUsize::new(0);
    let count = |state: usize| {
        let once = costs(state, 1)?;
        let costs = if passes(STATES[state].0, &once) { once } else { costs(state, TRIES)? };
        Ok((state, costs))
    };
    let work = || {
        let states =
            iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed)).take_while(|&state| state < STATES.len());
        states.map(count).collect::<Result<Vec<_>, String>>()
    };
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let mut counted = thread::scope(|scope| {
        let workers: Vec<_> = (0..processors).map(|_| scope.spawn(work)).collect();
        let results = workers.into_iter().map(|worker| worker.join().map_err(|_| "a worker panicked".to_owned())?);
        results.collect::<Result<Vec<_>, String>>()
    })?
    .concat();
    counted.sort_by_key(|(state, _)| *state);
    Ok(counted.into_iter().map(|(_, costs)| costs).collect())
}

/// Returns the number of instructions in one round of a state, by function. The short and the long run are each made `tries` times.
fn costs(state: usize, tries: usize) -> Result<Costs, String> {
    let [few, many] = RUNS.map(|times| shortest(state, times, tries));
    let (few, many) = (few?, many?);
    let times = (RUNS[1] - RUNS[0]) as f64;
    let costs = many.into_iter().map(|(name, cost)| {
        let before = few.get(&name).copied().unwrap_or(0.0);
        (name, (cost - before) / times)
    });
    Ok(costs.filter(|(_, cost)| *cost >= 0.1).collect())
}

/// Runs a state `tries` times under callgrind. Returns the counts of the run with the fewest instructions.
fn shortest(state: usize, times: u64, tries: usize) -> Result<Costs, String> {
    let mut best = profile(state, times)?;
    for _ in 1..tries {
        let costs = profile(state, times)?;
        if total(&costs) < total(&best) {
            best = costs;
        }
    }
    Ok(best)
}

/// Runs a state once under callgrind, and returns the counts.
fn profile(state: usize, times: u64) -> Result<Costs, String> {
    let program = std::env::current_exe().map_err(|error| format!("no name of this program: {error}"))?;
    let out = std::env::temp_dir().join(format!("rdma-instructions.{}.{state}.{times}", std::process::id()));
    let result = callgrind(&program, &out, state, times);
    let _ = std::fs::remove_file(&out);
    result
}

fn callgrind(program: &Path, out: &PathBuf, state: usize, times: u64) -> Result<Costs, String> {
    let ran = Command::new("timeout")
        .args(["1800", "valgrind", "--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*measured_turn*"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .args(["run", &state.to_string(), &times.to_string()])
        .output()
        .map_err(|error| format!("valgrind: {error}: install it (make vm-setup does)"))?;
    if !ran.status.success() {
        return Err(format!("{}: {}", STATES[state].0, String::from_utf8_lossy(&ran.stderr).trim()));
    }
    let text = std::fs::read_to_string(out).map_err(|error| format!("{}: {error}", out.display()))?;
    Ok(parse(&text))
}

/// Parses a profile and sums its counts by function. Valgrind's manual describes the format ("Callgrind Format Specification").
fn parse(text: &str) -> Costs {
    let (mut names, mut costs) = (BTreeMap::new(), Costs::new());
    let (mut function, mut inclusive) = (String::new(), false);
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("fn=") {
            function = named(name, &mut names);
        } else if let Some(name) = line.strip_prefix("cfn=") {
            named(name, &mut names);
        } else if line.starts_with("calls=") {
            // The next line of the profile has the cost of the called function, which must not be added to the caller's own cost.
            inclusive = true;
        } else if line.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '*')) {
            let cost = line.split_ascii_whitespace().nth(1).and_then(|cost| cost.parse::<f64>().ok());
            if let Some(cost) = cost.filter(|_| !std::mem::take(&mut inclusive)) {
                *costs.entry(function.clone()).or_default() += cost;
            }
        }
    }
    costs
}

/// Parses `(number) name` and remembers the name, or looks up the name of `(number)`. Returns the name.
fn named(field: &str, names: &mut BTreeMap<String, String>) -> String {
    let (number, name) = field.split_once(' ').map_or((field, None), |(number, name)| (number, Some(name)));
    if let Some(name) = name {
        // The compiler gives each instance of a function a suffix that changes with every build, so the suffix is removed.
        let name = name.split("'").next().unwrap_or(name);
        names.insert(number.into(), name.into());
    }
    names.get(number).cloned().unwrap_or_else(|| field.into())
}

fn total(costs: &Costs) -> f64 {
    costs.values().sum()
}

/// The layers by which counts are summed. A function belongs to the first layer that lists a part of its name.
const LAYERS: [(&str, &[&str]); 7] = [
    // The first name is the function that calls `Reactor::turn`. The compiler inlines `Reactor::turn` into that function, so both names
    // belong to this layer.
    ("turn", &["rdma_reactor_tests::steady::turn", "rdma_reactor::turn::"]),
    (
        "provider",
        &[
            "rdma_transport::",
            "rdma_transport_embedded::",
            "rdma_transport_verbs::",
            "crc_fast::",
            "rdma_reactor_tests::null::",
        ],
    ),
    ("callbacks", &["rdma_reactor_tests::"]),
    ("driver", &["rdma_reactor::driver::"]),
    ("connection", &["rdma_reactor::conn::"]),
    ("rest of the reactor", &["rdma_reactor::"]),
    ("libraries", &[""]),
];

/// Sums counts by layer, and formats the sums. An inlined function counts as the function that it is inlined into.
fn by_layer(costs: &Costs) -> String {
    let layer = |name: &str| LAYERS.iter().position(|(_, parts)| parts.iter().any(|part| name.contains(part)));
    let mut sums = [0.0; LAYERS.len()];
    for (name, cost) in costs {
        if let Some(sum) = layer(name).and_then(|at| sums.get_mut(at)) {
            *sum += cost;
        }
    }
    let parts = LAYERS.iter().zip(sums).filter(|(_, sum)| *sum >= 1.0);
    parts.map(|((layer, _), sum)| format!("{layer} {sum:.0}")).collect::<Vec<_>>().join(", ")
}

fn write(file: &str) -> Result<(), String> {
    let mut text = format!("# Instructions of steady states, counted by `make instructions-write`: {}\n", compiler());
    for ((name, ..), costs) in STATES.iter().zip(count(|_, _| false)?) {
        let _ = writeln!(text, "\n{:.0} = {name}", total(&costs));
        let mut costs: Vec<_> = costs.into_iter().filter(|(_, cost)| *cost >= TOLD).collect();
        costs.sort_by(|a, b| b.1.total_cmp(&a.1));
        for (function, cost) in costs {
            let _ = writeln!(text, "{cost:9.1} {function}");
        }
    }
    std::fs::write(file, text).map_err(|error| format!("{file}: {error}"))
}

/// Parses a file of counts. Returns the total of each state, and the counts of its functions.
fn baseline(text: &str) -> BTreeMap<String, (f64, Costs)> {
    let mut states: BTreeMap<String, (f64, Costs)> = BTreeMap::new();
    let mut current = None;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some((sum, name)) = line.split_once(" = ") {
            states.insert(name.into(), (sum.parse().unwrap_or(0.0), Costs::new()));
            current = Some(name.to_owned());
        } else if let Some((cost, function)) = line.trim_start().split_once(' ') {
            if let Some((_, costs)) = current.as_ref().and_then(|name| states.get_mut(name)) {
                costs.insert(function.into(), cost.parse().unwrap_or(0.0));
            }
        }
    }
    states
}

fn compare(file: &str) -> Result<(), String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    let compiler = compiler();
    let same = text.lines().next().is_some_and(|line| line.ends_with(&compiler));
    if !same {
        println!("Counted with {compiler}; the file is of another compiler, so that nothing is compared.");
    }
    let (before, mut worse) = (baseline(&text), Vec::new());
    let growth = |was: f64, costs: &Costs| (total(costs) / was - 1.0) * 100.0;
    let counted = count(|name, costs| !same || before.get(name).is_none_or(|(was, _)| growth(*was, costs) <= GROWTH))?;
    let of =
        |state: &str| STATES.iter().zip(&counted).find(|((name, ..), _)| *name == state).map(|(_, costs)| total(costs));
    if let (Some(few), Some(many)) = (of(FEW_SENDERS), of(MANY_SENDERS)) {
        println!("{MANY_SENDERS}: {:.2} times as many instructions as by one of 10", many / few);
        if many > MOST_FOR_MANY * few {
            return Err(format!(
                "{MANY_SENDERS}: {many:.0} instructions, and {few:.0} by one of 10: at most {MOST_FOR_MANY} times"
            ));
        }
    }
    for ((name, ..), costs) in STATES.iter().zip(counted) {
        let now = total(&costs);
        let (was, functions) = before.get(*name).ok_or_else(|| format!("{file} has no {name:?}"))?;
        let growth = growth(*was, &costs);
        println!("{name:45} {now:7.0} instructions, {was:.0} before ({growth:+.1} %): {}", by_layer(&costs));
        if same && growth > GROWTH {
            worse.push(*name);
            for (function, cost) in costs {
                let grown = cost - functions.get(&function).copied().unwrap_or(0.0);
                if grown > TOLD {
                    println!("{grown:+9.1} {function}");
                }
            }
        }
    }
    if worse.is_empty() {
        return Ok(());
    }
    Err(format!("more than {GROWTH} % more: {}; `make instructions-write` if that is what you want", worse.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_summed_up_by_function_without_callees() {
        let text = "events: Ir\nfl=(1) a.rs\nfn=(1) one\n10 5\n+1 7\ncfn=(2) two\ncalls=1 50\n12 100\nfn=(2)\n50 90\nfi=(2) b.rs\n* 10\nfn=(1)\n9 1\n";
        assert_eq!(parse(text), Costs::from([("one".into(), 13.0), ("two".into(), 100.0)]));
    }

    #[test]
    fn the_file_is_read_as_it_is_written() {
        let states = baseline("# head\n\n12 = a state\n      7.5 a::b<C, D>\n      4.0 e\n");
        let functions = Costs::from([("a::b<C, D>".into(), 7.5), ("e".into(), 4.0)]);
        assert_eq!(states, BTreeMap::from([("a state".into(), (12.0, functions))]));
    }
}
