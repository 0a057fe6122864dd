//! Lists the public items of a crate: types, traits, functions, constants, and the methods of types
//! and traits. Each `pub` item can be reached from outside the crate, because the lint
//! `unreachable_pub` refuses all others. Checks that the visible items of a file come before the
//! private ones.

use std::collections::BTreeSet;

use syn::{Ident, ImplItem, Item, TraitItem, Type, Visibility};

use super::source::{Module, Source, attributes, is_for_tests};

/// Returns the public items of a crate, sorted. Each is `Type`, `Type::method` or `function`, preceded by the name of its public module at
/// the root.
pub(crate) fn items(source: &Source) -> BTreeSet<String> {
    let root = source.modules.get("").map(|root| root.syntax.items.as_slice()).unwrap_or_default();
    let public: BTreeSet<String> = root
        .iter()
        .filter_map(|item| match item {
            Item::Mod(module) if is_public(&module.vis) => Some(module.ident.to_string()),
            _ => None,
        })
        .collect();
    let mut all = BTreeSet::new();
    for (name, module) in &source.modules {
        let mut found = BTreeSet::new();
        module.syntax.items.iter().for_each(|item| note(item, &mut found));
        let top = name.split('/').next().filter(|top| public.contains(*top));
        all.extend(found.into_iter().map(|item| top.map_or(item.clone(), |top| format!("{top}::{item}"))));
    }
    all
}

/// Returns a line for each private type or function that stands before the first visible item of
/// its file. A reader of a file first sees what it offers.
pub(crate) fn hidden_before_visible(source: &Source) -> Vec<String> {
    let hidden_first = |module: &Module| {
        let items = module.syntax.items.iter().filter(|item| !is_for_tests(attributes(item)));
        let parts: Vec<_> = items.filter_map(part).collect();
        let types = |visible: bool| parts.iter().filter(move |part| part.1 == visible);
        let private: BTreeSet<_> = types(false).map(|part| part.0.to_string()).collect();
        let is_offered = |part: &Part<'_>| part.1 && !private.contains(&part.0.to_string());
        let first = parts.iter().position(is_offered).unwrap_or(0);
        let early = parts[..first].iter().filter(|part| !part.1);
        let line = |part: &Part<'_>| format!("{}:{}: `{}` is private", module.file, part.0.span().start().line, part.0);
        early.map(line).collect::<Vec<_>>()
    };
    source.modules.values().flat_map(hidden_first).collect()
}

/// The name of a type or a function, and true if it is visible outside of its file. For an `impl`,
/// the name of its type, and true if a method is visible.
type Part<'a> = (&'a Ident, bool);

fn part(item: &Item) -> Option<Part<'_>> {
    let is_visible = |visibility: &Visibility| !matches!(visibility, Visibility::Inherited);
    Some(match item {
        Item::Struct(item) => (&item.ident, is_visible(&item.vis)),
        Item::Enum(item) => (&item.ident, is_visible(&item.vis)),
        Item::Union(item) => (&item.ident, is_visible(&item.vis)),
        Item::Trait(item) => (&item.ident, is_visible(&item.vis)),
        Item::Fn(item) => (&item.sig.ident, is_visible(&item.vis)),
        Item::Impl(block) if block.trait_.is_none() => {
            let Type::Path(of) = &*block.self_ty else { return None };
            let offered =
                block.items.iter().any(|item| matches!(item, ImplItem::Fn(method) if is_visible(&method.vis)));
            // An `impl` block without a visible method is no part, so it may stand anywhere.
            (&of.path.segments.last().filter(|_| offered)?.ident, true)
        }
        _ => return None,
    })
}

const fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn note(item: &Item, found: &mut BTreeSet<String>) {
    let mut note_if = |visibility: &Visibility, attributes: &[syn::Attribute], name: &syn::Ident| {
        if is_public(visibility) && !is_for_tests(attributes) {
            found.insert(name.to_string());
        }
    };
    match item {
        Item::Struct(item) => note_if(&item.vis, &item.attrs, &item.ident),
        Item::Enum(item) => note_if(&item.vis, &item.attrs, &item.ident),
        Item::Fn(item) => note_if(&item.vis, &item.attrs, &item.sig.ident),
        Item::Const(item) => note_if(&item.vis, &item.attrs, &item.ident),
        Item::Type(item) => note_if(&item.vis, &item.attrs, &item.ident),
        Item::Trait(item) if is_public(&item.vis) && !is_for_tests(&item.attrs) => {
            found.insert(item.ident.to_string());
            for part in &item.items {
                if let TraitItem::Fn(method) = part {
                    found.insert(format!("{}::{}", item.ident, method.sig.ident));
                }
            }
        }
        Item::Impl(block) if block.trait_.is_none() && !is_for_tests(&block.attrs) => {
            let Type::Path(of) = &*block.self_ty else { return };
            let Some(name) = of.path.segments.last().map(|segment| segment.ident.to_string()) else { return };
            for part in &block.items {
                match part {
                    ImplItem::Fn(method) if is_public(&method.vis) && !is_for_tests(&method.attrs) => {
                        found.insert(format!("{name}::{}", method.sig.ident));
                    }
                    ImplItem::Const(constant) if is_public(&constant.vis) => {
                        found.insert(format!("{name}::{}", constant.ident));
                    }
                    _ => {}
                }
            }
        }
        _ => {}
    }
}

/// Returns a message if a type has more than `most` public methods. A type with more needs facets,
/// as `Context` has them.
pub(crate) fn too_many_methods(items: &BTreeSet<String>, of: &str, most: usize) -> Vec<String> {
    let found = items.iter().filter(|item| item.strip_prefix(of).is_some_and(|rest| rest.starts_with("::"))).count();
    if found <= most { Vec::new() } else { vec![format!("`{of}` has {found} public methods, at most {most}")] }
}

/// Returns the text of the list of public items: the history, and then the items of each crate. The lines of the history are
/// `# NUMBER: WHY`; each says why the number of items has changed.
pub(crate) fn list(history: &[String], items: &[(&str, BTreeSet<String>)]) -> String {
    let history = history.iter().map(|line| format!("{line}\n"));
    let names = items.iter().flat_map(|(of, names)| names.iter().map(move |name| format!("{of} {name}\n")));
    history.chain(names).collect()
}

/// Returns the lines of the history at the beginning of a list, and the number of items that the last of these lines states. The number is
/// `None` if the list has no history, or if its last line has no number.
pub(crate) fn history(list: &str) -> (Vec<String>, Option<usize>) {
    let lines: Vec<String> = list.lines().filter(|line| line.starts_with('#')).map(Into::into).collect();
    let last = lines.last().and_then(|line| line[1..].trim().split(':').next()?.parse().ok());
    (lines, last)
}

#[test]
fn public_items_are_found_and_others_are_not() {
    let source = Source::of(&[
        ("open.rs", "pub fn act() {}"),
        ("lib.rs", "mod inner; pub mod open; pub use inner::Thing; pub const MOST: u32 = 1; pub(crate) fn hidden() {}"),
        (
            "inner.rs",
            "pub struct Thing; impl Thing { pub fn act(&self) {} fn own(&self) {} pub(crate) fn near(&self) {} }
             impl Clone for Thing { fn clone(&self) -> Self { Self } }
             pub trait Can { fn can(&self); }
             #[cfg(test)] pub fn for_tests() {}",
        ),
    ]);
    let found: Vec<_> = items(&source).into_iter().collect();
    assert_eq!(found, ["Can", "Can::can", "MOST", "Thing", "Thing::act", "open::act"]);
}

#[test]
fn a_method_too_many_is_found() {
    let text = "pub struct Thing; pub struct ThingView; impl ThingView { pub fn see(&self) {} }
        impl Thing { pub fn act(&self) {} pub fn see(&self) -> ThingView { ThingView } fn own(&self) {} }";
    let items = items(&Source::of(&[("lib.rs", text)]));
    assert_eq!(too_many_methods(&items, "Thing", 2), Vec::<String>::new());
    assert_eq!(too_many_methods(&items, "Thing", 1), ["`Thing` has 2 public methods, at most 1"]);
}

#[test]
fn the_history_ends_with_the_number_of_items() {
    let text = "# The list.\n# 2: the first ones\n# 3: another one\nreactor a\nreactor b\n";
    let (lines, last) = history(text);
    assert_eq!((lines.len(), last), (3, Some(3)));
    assert_eq!(list(&lines, &[("reactor", ["a".to_owned(), "b".to_owned()].into())]), text);
}

#[test]
fn private_items_before_visible_ones_are_found() {
    let source = Source::of(&[
        (
            "lib.rs",
            "mod a; mod b; const A: u8 = 1; pub struct One(Inner); struct Inner; impl Inner { pub(crate) fn f() {} } fn help() {}",
        ),
        ("a.rs", "fn help() {} struct Inner; impl Inner { pub(super) fn f() {} } pub(crate) fn two() {}"),
        (
            "b.rs",
            "struct Inner; impl std::fmt::Debug for Inner {} #[cfg(test)] fn f() {} impl crate::One { pub(crate) fn g() {} }",
        ),
    ]);
    let found = hidden_before_visible(&source);
    assert_eq!(found.len(), 3, "{found:?}");
    assert_eq!(found[0], "src/a.rs:1: `help` is private");
    assert_eq!(found[2], "src/b.rs:1: `Inner` is private");
}
