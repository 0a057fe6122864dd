//! The test suite for the contract of [`Provider`](crate::Provider). Each case checks one sentence of
//! [`crate::provider`] or [`crate::roles`]. A case runs on two or three providers, without a reactor.
//!
//! The author of a provider writes a [`Factory`], which makes the providers of a case and their [`Environment`]. An
//! environment is a clock and a poller: those of the system ([`System`]), or virtual ones.
//! [`provider_conformance!`](crate::provider_conformance) makes a test of each case. [`run`] runs all cases and prints
//! a line for each. A case that needs a feature that the device does not have is not run, and is reported as missing. A
//! [`Deviation`] describes a known deviation of a device from the contract: the case runs, and must fail.
//!
//! Each completion is checked against the outstanding work requests. No work request may complete twice, in a wrong
//! queue, before an earlier one, or after its queue pair is destroyed. The suite polls the completions that are in the
//! queue when the queue pair is destroyed, and accepts these. Only edges and deadlines drive the providers, so a case
//! hangs if an edge or a deadline is lost.
//!
//! `docs/writing-a-provider.md` lists the mistakes that each case finds.
//!
//! Work requests are posted through a [`Station`](crate::Station), so a factory needs no unsafe code.
//!
//! The suite does not cover datagrams, memory of GPUs, and events of the device itself, such as its removal.

mod cm_events;
mod completing;
mod connecting;
mod ending;
mod environment;
mod factory;
mod harness;
mod keys;
mod ledger;
mod limits;
mod one_sided;
mod roles;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use environment::{Environment, System};
pub use factory::{Deviation, Factory, Need};
pub use harness::Harness;

/// A case of the suite.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The name of the case.
    pub name: &'static str,
    run: fn(&mut Harness),
    /// The needs that the device must meet.
    pub needs: &'static [Need],
}

/// The result of a case that the suite does not count as a failure.
#[derive(Clone, Debug)]
pub enum CaseOutcome {
    /// The provider has passed the case.
    Passed,
    /// The case was not run, because the device does not meet this need.
    Missing(Need),
    /// The case has failed because of a known deviation of the device. The text describes the deviation, and contains
    /// the message with which the case failed.
    Deviates(String),
}

/// The failure of a case.
#[derive(Clone, Debug)]
pub struct CaseFailure {
    /// The name of the case.
    pub case: &'static str,
    /// The message with which the case has failed.
    pub what: String,
}

/// Defines the table of all cases, and the macro that makes a test of each case.
macro_rules! cases {
    ($d:tt $($module:ident: { $($name:ident $([$($need:ident),+])?,)* })*) => {
        /// All cases of the suite.
        pub const CASES: &[Case] = &[
            $($(Case { name: stringify!($name), run: $module::$name, needs: &[$($(Need::$need),+)?] },)*)*
        ];

        /// Makes a module with a test for each case of [the suite](crate::conformance). The arguments are the name of
        /// the module and an expression that returns a [`Factory`](crate::conformance::Factory).
        #[macro_export]
        macro_rules! provider_conformance {
            ($d module:ident, $d factory:expr) => {
                mod $d module {
                    #[allow(unused_imports)]
                    use super::*;
                    $($(
                        #[test]
                        fn $name() {
                            $d crate::conformance::check(&$d factory, stringify!($name));
                        }
                    )*)*
                }
            };
        }
    };
}

cases! { $
    connecting: {
        an_address_names_its_device,
        port_0_takes_a_free_one,
        an_address_in_use_is_an_error,
        private_data_goes_both_ways,
        too_much_private_data_is_refused,
        a_reject_carries_private_data,
        an_attempt_without_a_listener_is_refused,
        an_attempt_ends_at_its_deadline,
        an_attempt_that_is_destroyed_is_over,
        a_queue_pair_comes_before_the_connection,
        the_depth_of_reads_is_agreed [Reads],
    }
    completing: {
        each_message_wakes_a_sleeper,
        messages_have_any_length,
        a_message_is_gathered_and_scattered,
        a_chain_is_taken_from_front_to_back,
        a_later_completion_ends_unsignaled_sends,
        an_armed_queue_raises_one_event,
        a_queue_that_waits_for_solicited_completions_raises_one_event [SolicitedEvents],
        a_completion_that_is_there_raises_no_event,
        queues_share_a_channel,
        a_message_that_is_too_long_is_not_delivered,
        an_inline_send_is_copied_at_once [Inline],
        immediate_data_comes_with_its_message [SendWithImmediate],
    }
    one_sided: {
        writes_and_reads_have_any_length [Reads, Writes],
        a_send_queue_completes_in_order [Reads, Writes],
        a_fenced_send_waits_for_reads [Reads],
        immediate_data_follows_its_write [WriteWithImmediate],
        atomics_return_the_old_value [Atomics],
        extensions_need_an_agreement [Extensions],
    }
    keys: {
        a_write_without_the_right_is_refused [Writes],
        a_read_without_the_right_is_refused [Reads],
        a_key_that_never_was_is_refused [Reads, Writes],
        a_range_is_all_that_a_peer_reaches [Reads, Writes],
        a_deregistered_key_never_works_again [Reads, Writes],
        an_invalidated_key_never_works_again [RemoteKeys, Reads, Writes],
        a_restricted_key_is_good_for_one_peer [RemoteKeys, Reads, Writes],
        a_send_with_invalidate_takes_the_key_back [RemoteInvalidation, Writes],
        nothing_is_written_after_an_invalidate [RemoteKeys, Writes, PromptInvalidation],
        a_region_lies_within_its_memory,
    }
    ending: {
        a_disconnect_flushes_everything_once,
        both_sides_learn_of_a_disconnect,
        destroying_tells_the_peer,
        what_was_sent_arrives_before_the_end [OrderlyDisconnect],
        nothing_happens_after_a_destroy,
        a_destroyed_queue_pair_gives_its_places_back,
        a_receive_after_the_flush_is_not_filled,
        a_send_after_the_flush_is_flushed,
        a_queue_in_use_is_not_destroyed,
        an_end_leaves_the_others_alone,
    }
    limits: {
        attributes_out_of_range_are_refused,
        a_full_queue_is_backpressure,
        a_chain_is_taken_up_to_the_fault,
        a_handle_is_never_used_twice,
        a_stale_handle_is_an_error,
    }
    roles: {
        connections_share_receives [SharedReceives],
        a_shared_receive_counts_until_it_is_polled [SharedReceives],
        an_end_returns_its_shared_receives [SharedReceives],
        a_shared_queue_needs_room_for_its_completions [SharedReceives],
        a_sign_of_life_has_its_time [Liveness],
        a_request_is_handed_over [Handover],
        a_request_that_is_dropped_ends [Handover],
        another_thread_registers [OffLoopRegistration, Writes],
        a_sound_queue_has_not_failed [Adapter],
        events_of_devices_have_an_end [DeviceEvents],
        an_immediate_send_keeps_its_place [ImmediateSends],
        an_immediate_send_is_no_work_request [ImmediateSends],
        an_immediate_send_needs_a_connection [ImmediateSends],
        an_immediate_write_keeps_its_place [ImmediateSends, Writes],
        lent_memory_is_read_where_it_is [SharedMemory],
        lent_memory_is_not_read_after_the_end [SharedMemory],
        a_direct_region_is_used_by_its_peer [SharedMemory, Reads, Writes, Atomics],
    }
}

/// Runs a case.
///
/// # Errors
/// The case has failed in one of these ways:
/// - The provider does not keep the contract.
/// - The list of [`Factory::missing`] is wrong for a need of the case.
/// - A known deviation of the device did not occur.
pub fn run_case(factory: &dyn Factory, case: &Case) -> Result<CaseOutcome, CaseFailure> {
    let known = factory.deviations().iter().find(|row| row.case == case.name && row.device == factory.device());
    let failure = |what: String| CaseFailure { case: case.name, what };
    let caught = |run: &mut dyn FnMut()| catch_unwind(AssertUnwindSafe(run)).map_err(|panic| message(&*panic));
    let lacks = |need: &&Need| factory.missing().contains(need);
    let third = case.needs.contains(&Need::Handover) && !case.needs.iter().any(|need| lacks(&need));
    let mut harness = None;
    caught(&mut || {
        let harness = harness.insert(Harness::new(factory, if third { 3 } else { 2 }, known));
        for need in case.needs {
            let capabilities = harness.side(harness::PASSIVE).capabilities;
            let met = need.is_met(harness.provider(harness::PASSIVE), &capabilities);
            assert_ne!(met, lacks(&need), "{need:?}: met by the device: {met}; the factory states the contrary");
        }
    })
    .map_err(failure)?;
    if let Some(need) = case.needs.iter().find(lacks) {
        return Ok(CaseOutcome::Missing(*need));
    }
    // A known deviation excuses only a failure of the case itself. A failure while the harness was set up still counts.
    let found = caught(&mut || {
        harness.iter_mut().for_each(|harness| (case.run)(harness));
        harness.take().into_iter().for_each(Harness::finish);
    });
    match (found, known) {
        (Ok(()), None) => Ok(CaseOutcome::Passed),
        (Ok(()), Some(known)) => {
            Err(failure(format!("the case passes, but {} has a known deviation: {}", known.device, known.what)))
        }
        (Err(found), Some(known)) if found.contains(known.finds) => {
            Ok(CaseOutcome::Deviates(format!("{}: {found}", known.what)))
        }
        (Err(found), Some(known)) => {
            let Deviation { device, what, finds, .. } = known;
            Err(failure(format!("{found}; the known deviation of {device} is: {what}, with {finds:?} in the message")))
        }
        (Err(found), None) => Err(failure(found)),
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// Runs the case with the name `name`, and prints a line with the result.
///
/// # Panics
/// If the case fails, or if there is no case with this name.
pub fn check(factory: &dyn Factory, name: &str) {
    let case = CASES.iter().find(|case| case.name == name).expect("the name of a case");
    match run_case(factory, case) {
        Ok(outcome) => println!("{}: {name}: {outcome:?}", factory.device()),
        Err(failure) => panic!("{}: {name}: {}", factory.device(), failure.what),
    }
}

/// Runs all cases whose names contain `filter`, and prints a line with the result of each. Returns the failures.
pub fn run(factory: &dyn Factory, filter: &str) -> Vec<CaseFailure> {
    let mut failures = Vec::new();
    for case in CASES.iter().filter(|case| case.name.contains(filter)) {
        match run_case(factory, case) {
            Ok(outcome) => println!("{}: {}: {outcome:?}", factory.device(), case.name),
            Err(failure) => {
                println!("{}: {}: FAILED: {}", factory.device(), case.name, failure.what);
                failures.push(failure);
            }
        }
    }
    failures
}
