//! The conformance suite: the behaviour that every provider must have. Each public function of the submodules is one test. The macro
//! [`crate::conformance!`] instantiates all of them for a provider.

pub mod batch;
pub mod calls;
pub mod clock;
pub mod close;
pub mod connect;
pub mod datagram;
pub mod eager;
pub mod embed;
pub mod faults;
pub mod flow;
pub mod harness;
pub mod io;
pub mod landing;
pub mod large;
pub mod memory;
pub mod one_sided;
pub mod reactors;
pub mod scale;
pub mod security;
pub mod shared;
pub mod stream;
pub mod threads;
pub mod traffic;
pub mod transfers;
pub mod violations;

pub use harness::{Scale, Setup};

/// Instantiates the suite as a module of tests. `$setup` is an expression of type [`Setup`]. The expression panics if something that the
/// setup needs is missing, such as a device.
#[macro_export]
macro_rules! conformance {
    ($name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@virtual $setup);
            $crate::conformance!(@system $setup);
        }
    };
    // That part of the suite which runs on virtual time.
    (virtual $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@virtual $setup);
        }
    };
    // The tests that run with any clock: on any connection, and on plain ones only.
    (@any_virtual $setup:expr) => {
        $crate::conformance!(@tests $setup;
            connect: exchanges_private_data, passive_side_may_speak_first, reject_carries_its_reason,
                nothing_listening_is_refused, too_much_private_data_is_refused, cancelled_before_it_is_up,
                connections_are_limited, the_next_address_is_tried;
            traffic: every_size_arrives_intact, sends_complete_once_and_in_order, quiet_sends_are_not_told_of,
                in_place_buffers, too_long_and_closed_are_refused, both_wait_modes,
                turns_are_bounded_and_say_so;
            flow: window_closes_and_opens_once, no_call_of_on_writable_is_for_nothing,
                full_windows_both_ways_do_not_deadlock, messages_kept_for_good_stall_nobody,
                messages_kept_after_others_stall_nobody, timers_fire_in_order, silent_peer_is_given_up,
                own_stall_is_not_the_peers;
            close: accepted_sends_arrive_before_the_end, close_in_every_callback, stale_ids_are_errors,
                both_close_at_once, a_dropped_reactor_is_a_lost_peer, an_abort_is_no_goodbye,
                a_full_window_has_room_for_a_goodbye, listener_closes_connections_stay;
            one_sided: reads_and_writes_of_every_size, vectored_and_many_at_once,
                immediate_data_follows_its_write, atomics_or_a_clear_no, rights_are_kept, leases_end,
                careless_operations_are_refused, what_never_fits_does_not_wait,
                dropped_regions_are_given_back;
            transfers: lists_have_one_end, a_confirmed_write_is_there, lists_and_messages_share_the_queue,
                careless_lists_are_refused, a_cancelled_list_is_accounted_for, a_close_waits_for_lists,
                a_wrong_key_in_a_list_is_found, a_list_ends_with_its_peer;
            memory: on_demand_regions_or_a_clear_no;
            large: any_length_arrives_in_order, a_message_before_a_close_was_sent, memory_is_bounded,
                many_at_once_both_ways, an_abort_releases_everything, what_follows_registers_nothing;
            eager: every_border_arrives_in_order, what_has_no_room_is_offered,
                each_side_decides_what_it_sends, regions_are_sent_in_several_buffers,
                kept_messages_are_accounted_for, a_connection_keeps_no_more_than_half,
                an_end_in_the_middle_leaves_nothing, a_panic_over_one_is_contained;
            stream: odd_pieces_arrive_in_order_both_ways, a_slow_reader_stops_the_writer, half_close_each_way,
                a_dead_peer_is_an_error_after_its_bytes, a_stream_that_ends_keeps_nothing,
                a_stream_closes_in_every_callback, small_writes_share_a_message,
                close_delivers_what_was_written, close_does_not_wait_for_ever,
                bytes_after_the_end_are_a_violation;
            calls: calls_of_every_size_are_answered, a_thousand_calls_are_answered_in_any_order,
                answers_without_room_wait, a_server_at_its_limits_says_so,
                late_and_reused_answers_match_nothing, a_cancelled_call_is_over,
                calls_end_with_their_connection, a_server_that_finishes_answers_first,
                what_is_no_frame_is_a_violation;
            batch: a_cork_holds_back_and_a_flush_posts, a_forgotten_cork_stops_nothing,
                a_pool_shrinks_and_grows_again, bytes_without_a_copy;
            shared: many_share_few, windows_follow_use, an_end_returns_what_was_promised,
                messages_kept_are_not_promised, refused_when_nothing_is_left;
            reactors: a_drained_reactor_is_over;
        );
    };
    (@virtual $setup:expr) => {
        $crate::conformance!(@any_virtual $setup);
        $crate::conformance!(@tests $setup;
            connect: raw_framing_talks_plain_messages;
            traffic: an_end_does_not_wait_for_quiet_sends;
            flow: an_echo_has_room;
            close: the_last_end_finds_no_connection;
            memory: memory_before_any_connection, memory_of_two_reactors;
            large: regions_are_sent_without_a_copy, what_is_kept_is_bounded;
            landing: messages_land_in_the_program_s_memory, refusals_make_room_at_once,
                careless_landings_are_refused, a_place_may_be_dropped,
                a_place_comes_back_with_the_end_of_its_connection;
            violations: rude_messages_end_their_connection, a_flood_of_offers_is_refused,
                sending_without_credits_is_noticed, a_peer_that_never_grants_is_given_up,
                wrong_greetings_are_refused;
            shared: a_violator_takes_nothing_for_long, released_receives_reach_who_waits,
                events_are_held_back_or_a_clear_no;
        );
    };
    // The tests that need the system (threads, descriptors, ports, host names): on any connection,
    // and on plain ones only.
    (@any_system $setup:expr) => {
        $crate::conformance!(@tests $setup;
            connect: a_host_is_found_by_its_name, address_in_use_is_named;
            flow: remote_stops_the_loop;
            memory: other_threads_prepare_regions, a_memory_file_is_shared_with_other_mappings,
                memory_of_the_program_s_own_comes_back, a_dma_buf_or_a_clear_no;
            embed: what_is_asked_from_outside_is_seen_to, an_outer_loop_misses_nothing;
            reactors: a_handler_places_and_the_other_refuses, one_is_drained_and_the_others_go_on,
                draining_has_a_deadline, a_reactor_that_is_gone_is_passed_over,
                a_group_shares_its_connections;
            threads: messages_of_other_threads_arrive, other_threads_send_and_let_go, a_full_queue_refuses;
        );
    };
    (@system $setup:expr) => {
        $crate::conformance!(@any_system $setup);
        $crate::conformance!(@tests $setup;
            flow: detached_messages_withhold_credit;
            datagram: datagrams_of_every_size_both_ways, what_finds_no_receive_is_lost,
                a_full_send_queue_says_so_once, nobody_there_is_said, groups_reach_their_members,
                endpoints_close_in_every_callback, a_closed_endpoint_ends_with_its_last_send,
                endpoints_are_drained_and_shut_down, endpoints_end_at_the_deadline_of_a_drain,
                endpoints_of_a_group_are_drained, careless_datagrams_are_refused,
                other_networks_are_not_heard, one_endpoint_hears_many;
            io: descriptors_share_the_loop, a_closed_descriptor_is_forgotten;
        );
    };
    // With shared receives: the tests of receives, except for those that need a wide window at the beginning of a connection.
    (shared $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@tests $setup;
                connect: exchanges_private_data, cancelled_before_it_is_up, raw_framing_talks_plain_messages,
                    the_next_address_is_tried;
                traffic: every_size_arrives_intact, sends_complete_once_and_in_order, quiet_sends_are_not_told_of,
                    both_wait_modes;
                flow: window_closes_and_opens_once, full_windows_both_ways_do_not_deadlock, silent_peer_is_given_up;
                close: close_in_every_callback, both_close_at_once, a_dropped_reactor_is_a_lost_peer;
                large: any_length_arrives_in_order, many_at_once_both_ways;
                stream: odd_pieces_arrive_in_order_both_ways, a_slow_reader_stops_the_writer, half_close_each_way,
                    a_stream_closes_in_every_callback, close_delivers_what_was_written;
                violations: rude_messages_end_their_connection, sending_without_credits_is_noticed,
                    a_peer_that_never_grants_is_given_up;
                calls: calls_of_every_size_are_answered, answers_without_room_wait, calls_end_with_their_connection;
                batch: a_forgotten_cork_stops_nothing;
            );
        }
    };
    // A sample: the tests of connecting and closing, and some tests of data. Enough where the
    // contract of the provider is tested, too.
    (sample $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@tests $setup;
                connect: exchanges_private_data, a_host_is_found_by_its_name, passive_side_may_speak_first, reject_carries_its_reason,
                    nothing_listening_is_refused, too_much_private_data_is_refused, address_in_use_is_named,
                    cancelled_before_it_is_up, connections_are_limited, raw_framing_talks_plain_messages,
                    the_next_address_is_tried;
                traffic: every_size_arrives_intact, sends_complete_once_and_in_order, an_end_does_not_wait_for_quiet_sends,
                    both_wait_modes;
                flow: window_closes_and_opens_once, full_windows_both_ways_do_not_deadlock, silent_peer_is_given_up;
                close: accepted_sends_arrive_before_the_end, close_in_every_callback, stale_ids_are_errors,
                    both_close_at_once, a_dropped_reactor_is_a_lost_peer, an_abort_is_no_goodbye,
                    a_full_window_has_room_for_a_goodbye, listener_closes_connections_stay;
                one_sided: reads_and_writes_of_every_size, immediate_data_follows_its_write, atomics_or_a_clear_no,
                    rights_are_kept, leases_end;
                transfers: lists_have_one_end, a_list_ends_with_its_peer;
                memory: memory_before_any_connection, memory_of_two_reactors;
                large: any_length_arrives_in_order, an_abort_releases_everything;
                stream: odd_pieces_arrive_in_order_both_ways, half_close_each_way, a_dead_peer_is_an_error_after_its_bytes,
                    a_stream_closes_in_every_callback;
                violations: rude_messages_end_their_connection, wrong_greetings_are_refused;
                calls: calls_of_every_size_are_answered, calls_end_with_their_connection;
                shared: released_receives_reach_who_waits;
                embed: an_outer_loop_misses_nothing;
                reactors: a_group_shares_its_connections, a_handler_places_and_the_other_refuses,
                    one_is_drained_and_the_others_go_on, a_reactor_that_is_gone_is_passed_over;
                threads: messages_of_other_threads_arrive;
            );
        }
    };
    // With an exchange between two devices: a smaller selection of the tests.
    (exchanged_wire $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@tests $setup;
                connect: exchanges_private_data, reject_carries_its_reason, nothing_listening_is_refused;
                traffic: every_size_arrives_intact, both_wait_modes;
                close: accepted_sends_arrive_before_the_end, both_close_at_once;
                one_sided: reads_and_writes_of_every_size, atomics_or_a_clear_no;
                large: any_length_arrives_in_order;
                stream: odd_pieces_arrive_in_order_both_ways;
            );
        }
    };
    // With other settings of completion queues: the tests with several connections, both wait modes, and ends with completions in flight.
    (queues $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@tests $setup;
                traffic: sends_complete_once_and_in_order, both_wait_modes;
                flow: full_windows_both_ways_do_not_deadlock;
                close: close_in_every_callback, both_close_at_once;
                large: many_at_once_both_ways;
            );
        }
    };
    // On secured connections: the whole suite, except for tests in which a peer writes frames by hand, and for calls that secured
    // connections refuse.
    (secured $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@secured_virtual $setup);
            $crate::conformance!(@any_system $setup);
        }
    };
    (secured_virtual $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@secured_virtual $setup);
        }
    };
    (secured_system $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@any_system $setup);
        }
    };
    (@secured_virtual $setup:expr) => {
        $crate::conformance!(@any_virtual $setup);
        $crate::conformance!(@tests $setup;
            security: both_learn_who_the_other_is, a_peer_that_is_not_accepted_hears_why,
                handlers_have_the_last_word, modes_are_not_mixed, remote_memory_is_refused_unless_allowed,
                regions_are_sent_as_sealed_copies, the_smallest_buffers_carry_a_handshake,
                handshakes_of_one_host_are_limited;
            landing: secured_messages_do_not_land;
        );
    };
    // On secured connections with a small window at the beginning: a selection of the tests.
    (secured_part $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@tests $setup;
                security: both_learn_who_the_other_is, a_peer_that_is_not_accepted_hears_why,
                    handlers_have_the_last_word, modes_are_not_mixed, remote_memory_is_refused_unless_allowed,
                    the_smallest_buffers_carry_a_handshake,
                    handshakes_of_one_host_are_limited;
                connect: exchanges_private_data, cancelled_before_it_is_up;
                traffic: every_size_arrives_intact, sends_complete_once_and_in_order, quiet_sends_are_not_told_of,
                    both_wait_modes;
                flow: window_closes_and_opens_once, full_windows_both_ways_do_not_deadlock, silent_peer_is_given_up;
                close: both_close_at_once, a_dropped_reactor_is_a_lost_peer;
                large: any_length_arrives_in_order, many_at_once_both_ways;
                stream: odd_pieces_arrive_in_order_both_ways, a_stream_closes_in_every_callback;
                calls: calls_of_every_size_are_answered, answers_without_room_wait, calls_end_with_their_connection;
                batch: a_forgotten_cork_stops_nothing;
            );
        }
    };
    // The tests that read from the memory of peers.
    (reads $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@tests $setup;
                one_sided: reads_and_writes_of_every_size, vectored_and_many_at_once, rights_are_kept,
                    careless_operations_are_refused, what_never_fits_does_not_wait, dropped_regions_are_given_back;
                transfers: lists_have_one_end, a_confirmed_write_is_there, lists_and_messages_share_the_queue,
                    careless_lists_are_refused, a_cancelled_list_is_accounted_for, a_close_waits_for_lists,
                    a_wrong_key_in_a_list_is_found, a_list_ends_with_its_peer;
                large: any_length_arrives_in_order, a_message_before_a_close_was_sent, regions_are_sent_without_a_copy,
                    memory_is_bounded, many_at_once_both_ways, an_abort_releases_everything,
                    what_follows_registers_nothing, what_is_kept_is_bounded;
                landing: messages_land_in_the_program_s_memory, refusals_make_room_at_once, careless_landings_are_refused,
                    a_place_may_be_dropped, a_place_comes_back_with_the_end_of_its_connection;
                eager: every_border_arrives_in_order, what_has_no_room_is_offered, each_side_decides_what_it_sends,
                    regions_are_sent_in_several_buffers, kept_messages_are_accounted_for,
                    a_connection_keeps_no_more_than_half, an_end_in_the_middle_leaves_nothing, a_panic_over_one_is_contained;
            );
        }
    };
    // The tests of faults that can be injected on any provider. A neighbour checks that the reactors continue.
    (faults $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@tests $setup;
                faults: the_rest_of_a_batch_is_delivered, connections_past_the_pool_are_refused,
                    a_flood_of_connects_is_refused, a_message_too_long_for_a_receive_ends_its_connection,
                    a_message_without_its_last_part_has_an_end, a_peer_that_never_reads_has_limits,
                    a_guess_costs_its_connection, a_panic_costs_its_connection, every_call_in_every_callback,
                    a_flood_leaves_the_others_alone, a_burst_wakes_and_leaves_no_tail, many_timers_leave_room_for_others,
                    a_shutdown_ends_what_is_stuck, a_dropped_reactor_leaves_nothing;
                connect: cancelled_before_it_is_up, connections_are_limited;
                flow: silent_peer_is_given_up;
                close: close_in_every_callback;
                one_sided: rights_are_kept;
                violations: rude_messages_end_their_connection, sending_without_credits_is_noticed,
                    a_peer_that_never_grants_is_given_up;
            );
        }
    };
    // These tests count the descriptors of their process, so they need a separate test binary.
    (scale $name:ident, $setup:expr) => {
        mod $name {
            $crate::conformance!(@tests $setup; scale: many_connections, connect_and_close_cycles;);
        }
    };
    (@tests $setup:expr; $($module:ident: $($test:ident),+;)+) => {
        $($(
            #[test]
            fn $test() {
                $crate::conformance::harness::with_watchdog(stringify!($test), || {
                    $crate::conformance::$module::$test(&$setup);
                });
            }
        )+)+
    };
}
