//! Checks the names of types. No two types of a crate may have the same name. No public type of one library may have the name of a public
//! type of the other library. No identifier is one of the words that have meant too many things.

use std::collections::BTreeMap;

use syn::visit::{self, Visit};
use syn::{Ident, Item, ItemFn, Visibility};

use super::source::{Source, attributes, is_for_tests};

/// The identifiers that are not allowed, with better ones.
const VAGUE: [(&str, &str); 4] = [
    ("told", "reported, notified"),
    ("asked", "requested, wanted"),
    ("place", "slot, entry, index, offset, range, buffer, memory"),
    ("places", "slots, entries, ranges"),
];

/// The files in which `place` is the verb of a standard (RFC 5041: payload is placed), or the
/// choice of a program (`Place`: the reactor of a group that gets a connection).
const PLACING: [&str; 5] = [
    "transport/embedded/src/iwarp/receive.rs",
    "reactor/src/driver/open/group.rs",
    "reactor/src/driver/open/handover.rs",
    "reactor/src/turn/deliver.rs",
    "reactor/src/turn/stages.rs",
];

/// Returns a line for each identifier of a crate that is not allowed, except in code for tests.
pub(crate) fn vague(source: &Source) -> Vec<String> {
    struct Words<'a>(&'a str, Vec<String>);
    impl<'ast> Visit<'ast> for Words<'_> {
        fn visit_item(&mut self, item: &'ast Item) {
            if !is_for_tests(attributes(item)) {
                visit::visit_item(self, item);
            }
        }

        fn visit_ident(&mut self, ident: &'ast Ident) {
            let found = VAGUE.iter().find(|(word, _)| ident == word);
            if let Some((word, better)) = found.filter(|(word, _)| *word != "place" || !PLACING.contains(&self.0)) {
                let line = ident.span().start().line;
                self.1.push(format!("{}:{line}: `{word}` says too little: {better}", self.0));
            }
        }
    }
    let modules = source.modules.values();
    modules
        .flat_map(|module| {
            let mut words = Words(&module.file, Vec::new());
            words.visit_file(&module.syntax);
            words.1
        })
        .collect()
}

/// For each name, the places at which a type, a trait or an alias gets this name. The boolean of a place is true if the item at this place
/// is public.
type Places = BTreeMap<String, Vec<(String, bool)>>;

/// Returns the places of all types, traits and aliases of a crate, except those that are for tests only.
fn places(source: &Source) -> Places {
    struct Types<'a>(&'a str, Places);
    impl<'ast> Visit<'ast> for Types<'_> {
        fn visit_item(&mut self, item: &'ast Item) {
            if is_for_tests(attributes(item)) {
                return;
            }
            let (name, visibility) = match item {
                Item::Struct(item) => (&item.ident, &item.vis),
                Item::Enum(item) => (&item.ident, &item.vis),
                Item::Union(item) => (&item.ident, &item.vis),
                Item::Trait(item) => (&item.ident, &item.vis),
                Item::Type(item) => (&item.ident, &item.vis),
                item => return visit::visit_item(self, item),
            };
            let place = format!("{}:{}", self.0, name.span().start().line);
            let places = self.1.entry(name.to_string()).or_default();
            // If a file has several definitions of the same name under different `cfg`, each build has only one of them.
            if places.is_empty() || !attributes(item).iter().any(|attribute| attribute.path().is_ident("cfg")) {
                places.push((place, matches!(visibility, Visibility::Public(_))));
            }
        }

        // A type within a function is visible nowhere else, so its name does not count.
        fn visit_item_fn(&mut self, _: &'ast ItemFn) {}

        fn visit_impl_item_fn(&mut self, _: &'ast syn::ImplItemFn) {}
    }
    let mut all = Places::new();
    for module in source.modules.values() {
        let mut types = Types(&module.file, Places::new());
        types.visit_file(&module.syntax);
        types.1.into_iter().for_each(|(name, mut places)| all.entry(name).or_default().append(&mut places));
    }
    all
}

/// Returns a line for each name that several types have. The line has the places of these types. It begins with the name of their crate, or
/// with `public` if public types of the libraries have the name.
pub(crate) fn doubles(crates: &[(&str, &Source)]) -> Vec<String> {
    let (mut doubles, mut public) =
        (BTreeMap::<String, Vec<String>>::new(), BTreeMap::<String, Vec<Vec<String>>>::new());
    for (of, source) in crates {
        for (name, places) in places(source) {
            let shown: Vec<String> =
                places.iter().filter(|(_, public)| *public).map(|(place, _)| place.clone()).collect();
            if !shown.is_empty() {
                public.entry(name.clone()).or_default().push(shown);
            }
            if places.len() > 1 {
                doubles.insert(format!("{of} {name}"), places.into_iter().map(|(place, _)| place).collect());
            }
        }
    }
    let twice = public.into_iter().filter(|(_, places)| places.len() > 1);
    doubles.extend(twice.map(|(name, places)| (format!("public {name}"), places.concat())));
    doubles.into_iter().map(|(name, places)| format!("`{name}` names several types: {}", places.join(", "))).collect()
}

#[test]
fn names_of_several_types_are_found() {
    let one = Source::of(&[
        ("lib.rs", "mod a; pub mod b; pub struct Shown; struct Apart;"),
        (
            "a.rs",
            "struct Twice; pub struct Both; fn f() { struct Inner; } mod m { enum Deep {} } #[cfg(x)] type Either = u8; #[cfg(not(x))] type Either = u16;",
        ),
        (
            "b.rs",
            "trait Twice {} type Deep = u8; fn g() { struct Inner; } #[cfg(test)] struct Apart; use crate::Shown;",
        ),
    ]);
    let other = Source::of(&[("lib.rs", "pub enum Both {} pub use one::Shown; pub struct Apart; struct Twice;")]);
    let found = doubles(&[("one", &one), ("other", &other)]);
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].starts_with("`one Deep` names several types"), "{found:?}");
    assert_eq!(found[1], "`one Twice` names several types: src/a.rs:1, src/b.rs:1");
    assert!(found[2].starts_with("`public Both` names several types"), "{found:?}");
}

#[test]
fn vague_identifiers_are_found() {
    let source = Source::of(&[(
        "lib.rs",
        "struct Sent { told: bool } fn place(asked: u8) { let places = asked; } fn named() -> &'static str { \"told\" }
         #[cfg(test)] mod tests { fn told() {} } mod placed {}",
    ), ("placed.rs", "fn requested() {}")]);
    let found = vague(&source);
    assert_eq!(found.len(), 5, "{found:?}");
    assert!(found[0].contains("src/lib.rs:1: `told`"), "{found:?}");
}
