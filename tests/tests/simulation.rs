//! The simulation: real reactors with the embedded provider on a simulated network, in random worlds with every kind of fault.
//!
//! `SIM_SEEDS=N` sets the number of worlds (default: 2,000; half of that for worlds within one host
//! and for worlds with two devices, and a tenth for each security mode). `SIM_FIRST=N` sets the
//! first world. A failing world prints the command that replays it. `SIM_SECURITY=tls`, `psk` or
//! `plain` sets the security of `replay`, and `SIM_ONE_HOST`, `SIM_TENANTS` and `SIM_FAULTS` its
//! kind; two replays of a secured world differ only in the ciphertext.

use rdma_reactor::SecurityMode;
use rdma_reactor_tests::sim::devices;
use rdma_reactor_tests::sim::run::{check, check_many, seed};
use rdma_reactor_tests::sim::world::{Faults, Report, Variant};

/// Worlds whose only fault is that nodes are slow.
const SLOW: Variant = Variant { faults: Faults::Slowness, ..Variant::PLAIN };

/// Worlds without pings.
const UNASKED: Variant = Variant { faults: Faults::Unasked, ..Variant::PLAIN };

/// The number of worlds if `SIM_SEEDS` is not set.
const WORLDS: u64 = 2_000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let (digits, radix) = text.strip_prefix("0x").map_or((text.as_str(), 10), |digits| (digits, 16));
    let number = u64::from_str_radix(digits, radix);
    Some(number.unwrap_or_else(|error| panic!("{name}={text}: {error}")))
}

#[test]
fn every_promise_is_kept_in_every_world() {
    let (first, count) = (number("SIM_FIRST").unwrap_or(0), number("SIM_SEEDS").unwrap_or(WORLDS));
    match check_many(first, count, 2, Variant::PLAIN) {
        Ok(total) => println!("{total:?}"),
        Err((nth, failure)) => panic!("\n{failure}\nworld {nth} of {count} failed\n"),
    }
}

/// Runs worlds within one host, whose connections use shared memory unless a fault prevents it. A store of one side becomes visible to the
/// other one late, so all interleavings of the two sides can occur.
#[test]
fn every_promise_is_kept_within_one_host() {
    let (first, count) = (number("SIM_FIRST").unwrap_or(0), number("SIM_SEEDS").unwrap_or(WORLDS / 2));
    match check_many(first, count, 2, Variant { one_host: true, ..Variant::PLAIN }) {
        Ok(total) => {
            println!("within one host: {total:?}");
            assert!(count < 100 || total.sum.met * 2 > total.sum.connections, "few have met: {total:?}");
        }
        Err((nth, failure)) => panic!("\n{failure}\nworld {nth} of {count} failed\n"),
    }
}

/// Runs worlds within one host in which the nodes belong to two users, and each requires shared
/// memory, prefers it, or does not use it. No connection is reported between nodes of which one
/// requires shared memory and that cannot share any, however the refusal happens.
#[test]
fn every_promise_is_kept_where_nodes_cannot_share_memory() {
    for faults in [Faults::All, Faults::Slowness] {
        let (first, count) = (number("SIM_FIRST").unwrap_or(0), number("SIM_SEEDS").unwrap_or(WORLDS).div_ceil(4));
        match check_many(first, count, 2, Variant { one_host: true, tenants: true, faults, ..Variant::PLAIN }) {
            Ok(total) => {
                println!("two users, {faults:?}: {total:?}");
                let Report { connections, met, apart, .. } = total.sum;
                assert!(count < 100 || [connections, met, apart].into_iter().all(|many| many > count), "{total:?}");
            }
            Err((nth, failure)) => panic!("\n{failure}\nworld {nth} of {count} failed\n"),
        }
    }
}

/// Runs worlds in which a reactor has two devices. The devices assign equal keys, fail, are removed, and refuse to release objects.
#[test]
fn every_promise_is_kept_on_two_devices() {
    let (first, count) = (number("SIM_FIRST").unwrap_or(0), number("SIM_SEEDS").unwrap_or(WORLDS / 2));
    match devices::check_many(first, count) {
        Ok(total) => {
            println!("{count} worlds with two devices: {total:?}");
            let few =
                [total.received, total.taken, total.given_up, total.late, total.foreign].iter().min() < Some(&count);
            let kept = total.kept.iter().all(|&kept| kept >= count / 10);
            assert!(count < 100 || !few && kept, "the worlds show little: {total:?}");
        }
        Err((nth, failure)) => panic!("\n{failure}\nworld {nth} of {count} failed\n"),
    }
}

fn secured_worlds(secured: SecurityMode) {
    let (first, count) = (number("SIM_FIRST").unwrap_or(0), number("SIM_SEEDS").unwrap_or(WORLDS).div_ceil(10));
    match check_many(first, count, 2, Variant { secured, ..Variant::PLAIN }) {
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

/// Runs worlds whose only fault is that nodes are slow: for up to ten times the longest default
/// limit, they take no turn, or a call or a callback takes that long. A node does not count its own
/// absence as silence of its peers. So nothing may fail if the other nodes wait long enough,
/// however short the limits of the slow node are.
fn slow_worlds(variant: Variant) {
    let (first, count) = (number("SIM_FIRST").unwrap_or(0), number("SIM_SEEDS").unwrap_or(WORLDS).div_ceil(4));
    match check_many(first, count, 2, variant) {
        Ok(total) => {
            println!("slow nodes, {variant:?}: {total:?}");
            assert!(count < 100 || total.sum.connections > count, "few connections came up: {total:?}");
        }
        Err((nth, failure)) => panic!("\n{failure}\nworld {nth} of {count} failed\n"),
    }
}

#[test]
fn every_promise_is_kept_when_nodes_are_slow() {
    slow_worlds(SLOW);
}

#[test]
fn every_promise_is_kept_when_nodes_of_one_host_are_slow() {
    slow_worlds(Variant { one_host: true, ..SLOW });
}

#[test]
fn every_promise_is_kept_when_nodes_are_slow_with_tls() {
    slow_worlds(Variant { secured: SecurityMode::Tls, ..SLOW });
}

#[test]
fn every_promise_is_kept_when_nodes_are_slow_with_a_pre_shared_key() {
    slow_worlds(Variant { secured: SecurityMode::Psk, ..SLOW });
}

/// Runs worlds without pings. A ping and its answer bring credits, and wake both sides, so in other
/// worlds they can hide a lost wake-up.
fn unasked_worlds(variant: Variant) {
    let (first, count) = (number("SIM_FIRST").unwrap_or(0), number("SIM_SEEDS").unwrap_or(WORLDS).div_ceil(2));
    match check_many(first, count, 2, variant) {
        Ok(total) => println!("without pings, {variant:?}: {total:?}"),
        Err((nth, failure)) => panic!("\n{failure}\nworld {nth} of {count} failed\n"),
    }
}

#[test]
fn every_promise_is_kept_without_pings() {
    unasked_worlds(UNASKED);
}

#[test]
fn every_promise_is_kept_without_pings_within_one_host() {
    unasked_worlds(Variant { one_host: true, ..UNASKED });
}

#[test]
fn the_same_seed_is_the_same_world() {
    for nth in 0..number("SIM_SEEDS").unwrap_or(WORLDS).div_ceil(40) {
        let seed = seed(nth);
        let (once, again) = (check(seed, 0, Variant::PLAIN), check(seed, 0, Variant::PLAIN));
        match (once, again) {
            (Ok(once), Ok(again)) => assert_eq!(once, again, "seed {seed:#x} has two histories"),
            (Err(failure), _) | (_, Err(failure)) => panic!("{failure}"),
        }
        let (once, again) = (devices::check(seed), devices::check(seed));
        assert_eq!(once.unwrap_or_else(|failure| panic!("{failure}")), again.expect("the same"), "seed {seed:#x}");
    }
}

/// The worlds that have failed once. The comments describe the defects.
const FAILED: [(u64, Variant); 16] = [
    // A node that was absent for longer than its peer's memory remained available lost the last
    // messages.
    (0x034e_eebe_58da_7aae, Variant { one_host: true, ..SLOW }),
    // A node that was absent for longer than `Timeouts::transfer` ended the transfers of its peers.
    (0xf27e_43bb_22e7_1ac1, SLOW),
    (0xfe70_75d9_93e2_9575, SLOW),
    // A node that was absent for longer than `meeting_timeout` closed the socket of a peer whose hello had arrived.
    (0xa382_8d4c_1d37_df0c, Variant { one_host: true, ..SLOW }),
    // A node that was absent for longer than `ready_timeout` ended a connection whose hello had
    // arrived.
    (0x2516_a84f_ba92_a7fa, Variant { one_host: true, ..SLOW }),
    // A node that was absent for longer than `Timeouts::handshake` ended a connection whose hello
    // it had not handled yet.
    (0x809c_e965_eeef_35c5, Variant { one_host: true, ..SLOW }),
    // The same defect, if the peer could send its next message of the handshake only after the
    // answer of the node.
    (0xeb74_1d40_11f5_4b59, Variant { secured: SecurityMode::Tls, ..SLOW }),
    (0x4476_7c29_2bb1_c26a, Variant { secured: SecurityMode::Psk, ..SLOW }),
    (0x903f_c84b_3046_bdec, Variant { secured: SecurityMode::Tls, ..SLOW }),
    // A node that was absent for longer than `ready_timeout` ended a connection to itself.
    (0xa813_9721_247b_0cac, Variant { secured: SecurityMode::Tls, ..SLOW }),
    // A node that was absent for longer than `Timeouts::flush` did not look for the completions
    // that had arrived meanwhile.
    (0x753c_ea5e_67ba_2260, Variant { one_host: true, ..SLOW }),
    // A node that was absent several times while its peer fetched a message ended the connection.
    (0xe0ba_e235_1d2c_d3aa, SLOW),
    (0x3926_2e15_b35c_bb3a, Variant { secured: SecurityMode::Tls, ..SLOW }),
    (0x2d54_48a8_5b13_a6f1, Variant { one_host: true, ..SLOW }),
    (0xa61f_cd52_b71f_8a36, SLOW),
    // A node that was absent for most of `Timeouts::transfer`, and came back before its end, ended
    // the connection.
    (0x372b_fea8_abfb_871b, SLOW),
];

#[test]
fn worlds_that_have_failed_once_do_not_fail_again() {
    for (seed, variant) in FAILED {
        check(seed, 400, variant).unwrap_or_else(|failure| panic!("\n{failure}\n"));
    }
}

/// Runs the world of `SIM_SEED=0x...`, and prints its whole timeline if it fails. `RUST_LOG` also prints the log of the reactors.
#[test]
fn replay() {
    let Some(seed) = number("SIM_SEED") else { return };
    let _ = env_logger::try_init();
    let secured = match std::env::var("SIM_SECURITY").as_deref() {
        Ok("tls") => SecurityMode::Tls,
        Ok("psk") => SecurityMode::Psk,
        Ok("plain") | Err(_) => SecurityMode::Plain,
        Ok(other) => panic!("SIM_SECURITY={other}: say tls, psk or plain"),
    };
    let one_host = std::env::var_os("SIM_ONE_HOST").is_some();
    let faults = match std::env::var("SIM_FAULTS").as_deref() {
        Ok("slowness") => Faults::Slowness,
        Ok("unasked") => Faults::Unasked,
        Ok("all") | Err(_) => Faults::All,
        Ok(other) => panic!("SIM_FAULTS={other}: say slowness, unasked or all"),
    };
    let tenants = std::env::var_os("SIM_TENANTS").is_some();
    match check(seed, usize::MAX, Variant { secured, one_host, tenants, faults }) {
        Ok(report) => println!("seed {seed:#x}: {report:?}"),
        Err(failure) => panic!("\n{failure}\n"),
    }
}

/// Runs the world of `SIM_SEED=0x...` with a reactor on two devices.
#[test]
fn replay_on_two_devices() {
    let Some(seed) = number("SIM_SEED") else { return };
    let _ = env_logger::try_init();
    match devices::check(seed) {
        Ok(report) => println!("seed {seed:#x}: {report:?}"),
        Err(failure) => panic!("\n{failure}\n"),
    }
}
