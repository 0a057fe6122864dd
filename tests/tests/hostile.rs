//! Hostile peers next to an honest one. A tape of random bytes selects the messages that the hostile peer sends
//! ([`rdma_reactor_tests::sim::hostile`]).
//!
//! `HOSTILE_TAPES=N` sets the number of tapes (default: 3,000), and `HOSTILE_TAPE=N` plays only the tape with this
//! number.

use rdma_reactor_tests::sim::hostile::play;
use rdma_reactor_tests::sim::rng::Rng;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")))
}

fn tape(number: u64) -> Vec<u8> {
    let mut rng = Rng::new(number, "tape");
    let mut tape = vec![0; rng.skewed(1..=400) as usize];
    rng.fill(&mut tape);
    tape
}

#[test]
fn no_tape_disturbs_an_honest_peer() {
    let tapes = match number("HOSTILE_TAPE") {
        Some(only) => only..only + 1,
        None => 0..number("HOSTILE_TAPES").unwrap_or(3_000),
    };
    let (mut connected, mut messages, mut answered) = (0, 0, 0);
    let count = tapes.end - tapes.start;
    for number in tapes {
        let outcome = std::panic::catch_unwind(|| play(&tape(number), 1));
        let Ok(outcome) = outcome else { panic!("again by HOSTILE_TAPE={number}") };
        connected += outcome.connected;
        messages += outcome.messages;
        answered += u64::from(outcome.answered > 0);
    }
    println!("{count} tapes: {connected} connections came up, {messages} messages, {answered} tapes were answered");
    // Most tapes must establish a connection, or the test would check little.
    assert!(
        count < 100 || connected > count / 2 && messages > count / 4,
        "{connected} connections, {messages} messages"
    );
}
