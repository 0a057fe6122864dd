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

/// Runs datagrams on networks that lose, duplicate, damage and delay packets at random. `DATAGRAM_WORLDS` is the number
/// of networks (default: 2,000).
#[test]
fn datagrams_live_through_bad_networks() {
    let worlds = std::env::var("DATAGRAM_WORLDS").map_or(2_000, |number| number.parse().expect("a number"));
    let (mut heard, mut questions) = (0, 0);
    for seed in 1..=worlds {
        let tape = random_tape(seed);
        let lived = catch_unwind(AssertUnwindSafe(|| bad_network(&tape)));
        let Ok((datagrams, asked)) = lived else { panic!("world {seed}: {tape:?}") };
        (heard, questions) = (heard + datagrams, questions + asked);
    }
    println!("{heard} datagrams were received, {questions} questions arrived");
    assert!(heard > worlds as usize / 4 && questions > worlds as usize, "not much happens: {heard}, {questions}");
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

/// Runs hostile peers within the host on random tapes. `WITHIN_HOST_TAPES` is their number
/// (default: 1,000).
#[test]
fn hostile_peers_within_the_host_get_what_they_may() {
    let tapes = std::env::var("WITHIN_HOST_TAPES").map_or(1_000, |number| number.parse().expect("a number"));
    let (mut moved, mut heard) = (0, 0);
    for seed in 1..=tapes {
        let tape = random_tape(seed);
        let lived = catch_unwind(AssertUnwindSafe(|| shared_memory(&tape)));
        let Ok((connections, messages)) = lived else { panic!("tape {seed}: {tape:?}") };
        (moved, heard) = (moved + connections, heard + messages);
    }
    println!("{moved} connections were in shared memory at the end, {heard} messages were received");
    assert!(heard > tapes as usize / 20, "not much happens: {moved}, {heard}");
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
