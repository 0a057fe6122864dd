//! Lists the planted defects of a crate. Each is a call of `planted`, or a value of `cfg(planted)`.

use std::collections::BTreeSet;

use super::source::Source;

/// Returns the names of the planted defects. An argument that is not a literal has the name `?`.
pub(crate) fn names(source: &Source) -> BTreeSet<String> {
    let texts = source.modules.values().map(|module| module.text.replace("fn planted(", ""));
    let calls = texts.flat_map(|text| {
        let after = ["planted(", "(planted ="].map(|call| text.split(call).skip(1).map(name).collect::<Vec<_>>());
        after.into_iter().flatten()
    });
    calls.collect()
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
