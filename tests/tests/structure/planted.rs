//! Lists the planted defects of a crate. Each is a call of `planted`, or a value of `cfg(planted)`.

use std::collections::BTreeSet;

use super::source::Source;
use super::tables::{self, Table};

/// Returns the names of the planted defects. An argument that is not a literal has the name `?`.
pub(crate) fn names(source: &Source) -> BTreeSet<String> {
    let texts = source.modules.values().map(|module| module.text.replace("fn planted(", ""));
    let calls = texts.flat_map(|text| {
        let after = ["planted(", "(planted ="].map(|call| text.split(call).skip(1).map(name).collect::<Vec<_>>());
        after.into_iter().flatten()
    });
    calls.collect()
}

/// Returns the finders of a table of planted defects that find no test. A finder is a program and a
/// filter. The filter is the name of a module, or a test's name begins with it (in a library) or
/// contains it (in another program). `files` has the path and the text of each source file.
pub(crate) fn stale_finders(defects: &Table, files: &[(String, String)]) -> Vec<String> {
    let cells = defects.rows.iter().map(|row| (row.line, row.cells.last().map_or("", |cell| cell)));
    let finders = cells.flat_map(|(line, cell)| tables::code(cell).into_iter().map(move |finder| (line, finder)));
    let commands = [".sh", "make "];
    finders
        .filter(|(_, finder)| !commands.iter().any(|part| finder.contains(part)) && !is_found(finder, files))
        .map(|(line, finder)| format!("{}:{line}: `{finder}` names no test", defects.file))
        .collect()
}

fn is_found(finder: &str, files: &[(String, String)]) -> bool {
    let (program, filter) = finder.split_once(' ').unwrap_or((finder, ""));
    let folders = match program.trim_start_matches("loom/") {
        "rdma_transport" => vec!["transport/src/".to_owned()],
        "rdma_transport_embedded" => vec!["transport/embedded/src/".to_owned()],
        "rdma_transport_verbs" => vec!["transport/verbs/src/".to_owned()],
        "rdma_reactor" => vec!["reactor/src/".to_owned()],
        program => {
            vec![format!("tests/tests/{program}.rs"), format!("tests/tests/{program}/"), "tests/src/".to_owned()]
        }
    };
    let of_program = |path: &str| folders.iter().any(|folder| path.starts_with(folder.as_str()));
    let first = files.iter().any(|(path, _)| path.starts_with(folders[0].as_str()));
    let wanted = filter.trim_end_matches("::");
    let is_library = folders.len() == 1;
    let names = |path: &str, text: &str| {
        // In programs that are not libraries, macros make tests of ordinary functions.
        let mark = if is_library { "#[test]" } else { "fn " };
        let tests = text.split(mark).skip(1).filter_map(|rest| rest.split("fn ").nth(usize::from(is_library)));
        let mut words = tests.filter_map(|rest| rest.split('(').next());
        path.trim_end_matches(".rs").split('/').any(|module| module == wanted)
            || text.contains(&format!("mod {wanted} "))
            || words.any(|test| if is_library { test.starts_with(wanted) } else { test.contains(wanted) })
    };
    first && (filter.is_empty() || files.iter().any(|(path, text)| of_program(path) && names(path, text)))
}

/// Returns the literal with which a text begins.
fn name(text: &str) -> String {
    let literal = text.trim_start().strip_prefix('"').and_then(|rest| rest.split('"').next());
    literal.unwrap_or("?").to_owned()
}

#[test]
fn planted_defects_are_found_however_they_are_written() {
    let source = Source::of(&[
        ("lib.rs", "mod a; pub fn planted(_: &str) -> bool { false }"),
        (
            "a.rs",
            "#[cfg(planted = \"a-type\")] type A = u8; const NAME: &str = \"n\";
             fn f() -> bool { let planted = true; planted && crate::planted(\"one\") && planted(\n\"two\") && planted(NAME) }",
        ),
    ]);
    assert_eq!(names(&source).into_iter().collect::<Vec<_>>(), ["?", "a-type", "one", "two"]);
}

#[test]
fn finders_without_a_test_are_found() {
    let row = |finder: &str| tables::Row { line: 7, cells: vec!["`defect`".into(), "effect".into(), finder.into()] };
    let good =
        ["`rdma_transport setup`", "`rdma_transport a_peer`", "`worlds`, `worlds in_every`", "`tests/layout.sh`"];
    let bad = ["`rdma_transport peer_is`", "`rdma_transport help`", "`rdma_reactor setup`", "`worlds never`", "`gone`"];
    let rows = good.iter().chain(&bad).map(|finder| row(finder)).collect();
    let files = [
        ("transport/src/setup.rs", "#[test] fn a_peer_is_refused() {} fn help() {}"),
        ("tests/tests/worlds.rs", ""),
        ("tests/src/sim.rs", "#[test] fn in_every_world() {}"),
    ];
    let files = files.map(|(path, text)| (path.to_owned(), text.to_owned()));
    let found = stale_finders(&Table { file: "page".into(), rows }, &files);
    assert_eq!(found, bad.map(|finder| format!("page:7: {finder} names no test")));
}
