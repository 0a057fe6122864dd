//! The simulation: real reactors over the embedded provider, in worlds where everything goes wrong.
//!
//! `SIM_SEEDS=N` sets the number of worlds (default: 10,000, and a tenth of that for each way to secure connections), and
//! `SIM_FIRST=N` the first one. `SIM_SECURITY=tls`, `psk` or `plain` sets how `replay` secures connections: only what is
//! encrypted differs then from one run to the next. A world that fails
//! prints the command that shows it again.

use rdma_reactor::SecurityMode;
use rdma_reactor_tests::sim::run::{check, check_many, seed};

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let (digits, radix) = text.strip_prefix("0x").map_or((text.as_str(), 10), |digits| (digits, 16));
    let number = u64::from_str_radix(digits, radix);
    Some(number.unwrap_or_else(|error| panic!("{name}={text}: {error}")))
}

#[test]
fn every_promise_is_kept_in_every_world() {
    let (first, count) = (number("SIM_FIRST").unwrap_or(0), number("SIM_SEEDS").unwrap_or(10_000));
    match check_many(first, count, 2, SecurityMode::Plain) {
        Ok(total) => println!("{total:?}"),
        Err((nth, failure)) => panic!("\n{failure}\nworld {nth} of {count} failed\n"),
    }
}

fn secured_worlds(secured: SecurityMode) {
    let (first, count) = (number("SIM_FIRST").unwrap_or(0), number("SIM_SEEDS").unwrap_or(10_000).div_ceil(10));
    match check_many(first, count, 2, secured) {
        Ok(total) => println!("{secured:?}: {total:?}"),
        Err((nth, failure)) => panic!("\n{failure}\nworld {nth} of {count} failed\n"),
    }
}

#[test]
fn promises_are_kept_with_tls() {
    secured_worlds(SecurityMode::Tls);
}

#[test]
fn promises_are_kept_with_a_pre_shared_key() {
    secured_worlds(SecurityMode::Psk);
}

#[test]
fn the_same_seed_is_the_same_world() {
    for nth in 0..number("SIM_SEEDS").unwrap_or(10_000).div_ceil(40) {
        let seed = seed(nth);
        let (once, again) = (check(seed, 0, SecurityMode::Plain), check(seed, 0, SecurityMode::Plain));
        match (once, again) {
            (Ok(once), Ok(again)) => assert_eq!(once, again, "seed {seed:#x} has two histories"),
            (Err(failure), _) | (_, Err(failure)) => panic!("{failure}"),
        }
    }
}

/// Runs one world with `SIM_SEED=0x...`, and prints its whole timeline if it fails. `RUST_LOG` turns on the library's
/// log.
#[test]
fn replay() {
    let Some(seed) = number("SIM_SEED") else { return };
    env_logger::init();
    let secured = match std::env::var("SIM_SECURITY").as_deref() {
        Ok("tls") => SecurityMode::Tls,
        Ok("psk") => SecurityMode::Psk,
        Ok("plain") | Err(_) => SecurityMode::Plain,
        Ok(other) => panic!("SIM_SECURITY={other}: say tls, psk or plain"),
    };
    match check(seed, usize::MAX, secured) {
        Ok(report) => println!("seed {seed:#x}: {report:?}"),
        Err(failure) => panic!("\n{failure}\n"),
    }
}
