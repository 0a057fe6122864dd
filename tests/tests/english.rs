//! Checks the English of comments, documents and messages, as far as a program can judge it (rule 8 of `CONTRIBUTING.md`). This program has
//! no dependencies. So `tests/english.sh`, which is a part of `make lint`, builds it in a second or two with `rustc` alone.

mod english {
    pub(crate) mod rules;
    pub(crate) mod text;
}

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use english::{rules, text};

/// Folders and files that are not judged, for example because they quote bad English.
const SKIPPED: [&str; 6] =
    ["target", ".git", "tests/data", "tests/tests/english", "tests/tests/english.rs", "CHANGELOG.md"];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Collects the faults of all files below `path`. `name` is the path from the root of the project. It is also the key under which a file's
/// faults are in `found`.
fn check(path: &Path, name: &str, found: &mut BTreeMap<String, Vec<String>>) {
    let is_link = fs::symlink_metadata(path).is_ok_and(|data| data.is_symlink());
    if is_link || SKIPPED.contains(&name) || name.ends_with("/target") {
        return;
    }
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("a folder of the project").flatten() {
            let file = entry.file_name().into_string().expect("a name in UTF-8");
            let inner = if name.is_empty() { file } else { format!("{name}/{file}") };
            check(&entry.path(), &inner, found);
        }
        return;
    }
    let read = || fs::read_to_string(path).expect("a text in UTF-8");
    let faults = if name.ends_with(".rs") {
        rules::source(name, &text::source(&read()), &read())
    } else if name.ends_with(".md") {
        rules::page(name, &read())
    } else {
        return;
    };
    found.insert(name.to_owned(), faults);
}

#[test]
fn the_english_is_plain() {
    let mut found = BTreeMap::new();
    check(&workspace(), "", &mut found);
    assert!(found.len() > 200, "{} files: the search found too little", found.len());
    let faults: Vec<String> = found.into_values().flatten().collect();
    assert!(
        faults.is_empty(),
        "{} faults; rule 8 of CONTRIBUTING.md says how to write:\n{}",
        faults.len(),
        faults.join("\n")
    );
}
