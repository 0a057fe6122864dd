//! Tests of what all programs have in common: the output of `--help` begins with a description of the program, `--completions` prints a
//! script, and a mistake on the command line is one line.
#![allow(clippy::disallowed_methods, reason = "tests of programs, not of the library")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

/// Returns the names of all programs.
fn names() -> Vec<String> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin").read_dir().expect("the programs");
    let names = sources.map(|entry| entry.expect("an entry").path().file_stem().map(|stem| stem.to_owned()));
    names.flatten().map(|name| name.to_string_lossy().into_owned()).collect()
}

fn run(name: &str, args: &[&str]) -> Output {
    let folder = Path::new(env!("CARGO_BIN_EXE_rdma-pingpong")).parent().expect("a folder");
    let mut command = Command::new(folder.join(name));
    command.args(args).env_remove("RUST_LOG").output().unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn a_mistake_is_one_line_and_status_1() {
    for name in names() {
        let output = run(&name, &["--no-such-option"]);
        let stderr = String::from_utf8(output.stderr).expect("text");
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{name}: {stderr}");
        assert!(stderr.starts_with(&format!("{name}: ")) && stderr.contains("--no-such-option"), "{name}: {stderr}");
    }
}

#[cfg(feature = "completions")]
#[test]
fn every_program_has_completions() {
    for name in names() {
        let output = run(&name, &["--completions", "bash"]);
        let script = String::from_utf8(output.stdout).expect("text");
        assert_eq!((output.status.code(), script.contains(&name)), (Some(0), true), "{name}: {script}");
    }
}

#[test]
fn help_begins_with_what_the_program_does() {
    let mut first_lines = BTreeSet::new();
    for name in names() {
        let output = run(&name, &["--help"]);
        let text = String::from_utf8(output.stdout).expect("text");
        let first = text.lines().next().unwrap_or_default().to_owned();
        assert!(output.status.success() && text.contains("\nUsage: "), "{name}: {text}");
        assert!(first != env!("CARGO_PKG_DESCRIPTION") && !first.starts_with("Usage"), "{name}: {first}");
        assert!(first.split(' ').count() > 3 && first.starts_with(char::is_uppercase), "{name}: {first}");
        assert!(first_lines.insert(first), "{name} says the same as another program");
    }
    assert!(first_lines.len() > 10, "{first_lines:?}");
}
