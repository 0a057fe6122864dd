//! Runs each fuzz target on the inputs of its corpus.

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use rdma_reactor_fuzz::{TARGETS, bad_network, corpora, shared_memory};

/// Returns the files of a folder in the order of their names: the path and the content of each.
fn inputs(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths: BTreeSet<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    let read = |path: &Path| fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    paths.iter().map(|path| (path.display().to_string(), read(path))).collect()
}

#[test]
fn each_target_has_a_corpus_and_lives_through_it() {
    let names: BTreeSet<String> = names_in(&corpora());
    let known: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names, known, "the folders of the corpora, and the targets");
    for (name, target) in TARGETS {
        let inputs = inputs(&corpora().join(name));
        assert!(!inputs.is_empty(), "the corpus of {name} is empty");
        for (path, octets) in &inputs {
            let lived = catch_unwind(AssertUnwindSafe(|| target(octets)));
            assert!(lived.is_ok(), "{name} panics at {path}");
        }
        println!("{name}: {} inputs", inputs.len());
    }
}

/// Calls `run` with random tapes. The environment variable `variable` sets their number, and
/// `default` is the number without it. Returns the number, and the sums of both results.
fn on_random_tapes(variable: &str, default: u64, run: impl Fn(&[u8]) -> (usize, usize)) -> (usize, usize, usize) {
    let tapes = std::env::var(variable).map_or(default, |number| number.parse().expect("a number"));
    let mut sums = (0, 0);
    for seed in 1..=tapes {
        let tape = random_tape(seed);
        let lived = catch_unwind(AssertUnwindSafe(|| run(&tape)));
        let Ok((one, other)) = lived else { panic!("{variable}, number {seed}: {tape:?}") };
        sums = (sums.0 + one, sums.1 + other);
    }
    (tapes as usize, sums.0, sums.1)
}

/// Returns 1,000 pseudo-random bytes.
fn random_tape(seed: u64) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed);
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(1_000).collect()
}

/// Runs datagrams on networks that lose, duplicate, damage and delay packets at random.
/// `DATAGRAM_WORLDS` is the number of networks (default: 2,000).
#[test]
fn datagrams_live_through_bad_networks() {
    let (worlds, heard, questions) = on_random_tapes("DATAGRAM_WORLDS", 2_000, bad_network);
    println!("{heard} datagrams were received, {questions} questions arrived");
    assert!(heard > worlds / 4 && questions > worlds, "not much happens: {heard}, {questions}");
}

/// Runs hostile peers within the host on random tapes. `WITHIN_HOST_TAPES` is their number
/// (default: 1,000).
#[test]
fn hostile_peers_within_the_host_get_what_they_may() {
    let (tapes, moved, heard) = on_random_tapes("WITHIN_HOST_TAPES", 1_000, shared_memory);
    println!("{moved} connections were in shared memory at the end, {heard} messages were received");
    assert!(heard > tapes / 20, "not much happens: {moved}, {heard}");
}

/// Returns the names of the entries of a folder.
fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

/// Each fuzz target has one libFuzzer program, which has the target's name and calls the target. There are no other
/// programs.
#[test]
fn each_target_is_a_program() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("targets");
    let programs: BTreeSet<String> = names_in(&folder);
    let wanted = TARGETS.iter().map(|(name, _)| format!("{name}.rs")).collect();
    assert_eq!(programs, wanted);
    for (name, _) in TARGETS {
        let text = fs::read_to_string(folder.join(format!("{name}.rs"))).expect("just seen");
        assert!(text.contains(&format!("rdma_reactor_fuzz::{name}(")), "{name}.rs calls another target");
    }
}
