//! Tests of `--help`: the output of every program must begin with a description of the program.
#![allow(clippy::disallowed_methods, reason = "tests of programs, not of the library")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

#[test]
fn help_begins_with_what_the_program_does() {
    let folder = Path::new(env!("CARGO_BIN_EXE_rdma-pingpong")).parent().expect("a folder");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin").read_dir().expect("the programs");
    let names = sources.map(|entry| entry.expect("an entry").path().file_stem().map(|stem| stem.to_owned()));
    let names = names.flatten().map(|name| name.to_string_lossy().into_owned());
    let mut first_lines = BTreeSet::new();
    for name in names {
        let output =
            Command::new(folder.join(&name)).arg("--help").output().unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = String::from_utf8(output.stdout).expect("text");
        let first = text.lines().next().unwrap_or_default().to_owned();
        assert!(output.status.success() && text.contains("\nUsage: "), "{name}: {text}");
        assert!(first != env!("CARGO_PKG_DESCRIPTION") && !first.starts_with("Usage"), "{name}: {first}");
        assert!(first.split(' ').count() > 3 && first.starts_with(char::is_uppercase), "{name}: {first}");
        assert!(first_lines.insert(first), "{name} says the same as another program");
    }
    assert!(first_lines.len() > 10, "{first_lines:?}");
}
