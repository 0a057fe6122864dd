//! Compares the collections of a crate, or of programs, with the table of bounds. Each field whose
//! type can grow has a comment: `// bound: KEY` names a row of the table, and `// local: REASON`
//! says that no peer can make it grow. The comment is on the line of the field or above the field.
//! One above a type applies to all its fields.

use std::collections::BTreeSet;

use syn::visit::{self, Visit};
use syn::{Attribute, Field, Item, ItemStatic, ItemType, Type};

use super::source::{Module, Source, attributes, is_for_tests};
use super::tables::{Table, code};

/// The types whose values can grow. If this project defines the type, the comments are at the
/// fields that use it.
const GROWING: [&str; 13] = [
    "AsyncQueue",
    "BTreeMap",
    "BTreeSet",
    "BinaryHeap",
    "HashMap",
    "HashSet",
    "Hosts",
    "Newcomers",
    "Slab",
    "String",
    "UnboundedReceiver",
    "Vec",
    "VecDeque",
];

/// Finds out if a type owns a value that can grow. References and functions own nothing.
struct Growth<'a> {
    aliases: &'a BTreeSet<String>,
    found: bool,
}

impl<'ast> Visit<'ast> for Growth<'_> {
    fn visit_type(&mut self, of: &'ast Type) {
        match of {
            Type::Path(path) => {
                let names: Vec<_> = path.path.segments.iter().map(|part| part.ident.to_string()).collect();
                let last = path.path.segments.last().expect("a path has a segment");
                // A channel; types of the crate with this name have no arguments.
                let channel = last.ident == "Receiver" && !last.arguments.is_none();
                let name = names.last().expect("a path has a segment");
                let one = names.iter().any(|name| name == "oneshot" || name == "watch");
                self.found |= GROWING.contains(&name.as_str()) || self.aliases.contains(name) || (channel && !one);
                if name != "PhantomData" {
                    visit::visit_type(self, of);
                }
            }
            Type::Reference(_) | Type::Ptr(_) | Type::TraitObject(_) | Type::FnPtr(_) => {}
            _ => visit::visit_type(self, of),
        }
    }
}

/// The fields of a crate that can grow and have no comment.
struct Fields<'a> {
    module: &'a Module,
    lines: Vec<&'a str>,
    aliases: &'a BTreeSet<String>,
    /// True if the type of the fields has a comment, which applies to all of them.
    covered: bool,
    faults: Vec<String>,
}

impl Fields<'_> {
    /// Returns true if one of these lines has a comment, or the line above them is one.
    fn is_marked(&self, first: usize, last: usize) -> bool {
        let above = first.checked_sub(2).map(|at| self.lines[at]).filter(|line| line.trim_start().starts_with("//"));
        let lines = self.lines[first - 1..last].iter().copied().chain(above);
        lines.into_iter().any(|line| comment(line).is_some_and(|(_, text)| !text.is_empty()))
    }

    fn check(&mut self, name: &str, of: &Type, first: usize, last: usize) {
        let mut growth = Growth { aliases: self.aliases, found: false };
        growth.visit_type(of);
        if growth.found && !self.covered && !self.is_marked(first, last) {
            let file = &self.module.file;
            self.faults.push(format!("{file}:{last}: `{name}` can grow: say `// bound: KEY` or `// local: REASON`"));
        }
    }
}

/// Returns the kind and the text of a comment about growth.
fn comment(line: &str) -> Option<(&str, &str)> {
    let (_, text) = line.split_once("// ").filter(|(code, _)| !code.ends_with('/'))?;
    let (kind, text) = text.split_once(": ")?;
    ["bound", "local"].contains(&kind).then(|| (kind, text.trim()))
}

/// Returns the first line of an item or field whose last line is `last`: that of its first
/// attribute.
fn first_line(attributes: &[Attribute], last: usize) -> usize {
    use syn::spanned::Spanned;
    attributes.iter().map(|attribute| attribute.span().start().line).min().unwrap_or(last)
}

impl<'ast> Visit<'ast> for Fields<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let name = match item {
            Item::Struct(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            _ => None,
        };
        if is_for_tests(attributes(item)) || name.is_some_and(|name| GROWING.contains(&name.to_string().as_str())) {
            return;
        }
        let last = name.map_or(0, |name| name.span().start().line);
        self.covered = last > 0 && self.is_marked(first_line(attributes(item), last), last);
        visit::visit_item(self, item);
        self.covered = false;
    }

    fn visit_item_static(&mut self, item: &'ast ItemStatic) {
        let line = item.ident.span().start().line;
        self.check(&item.ident.to_string(), &item.ty, first_line(&item.attrs, line), line);
    }

    fn visit_field(&mut self, field: &'ast Field) {
        use syn::spanned::Spanned;
        let (start, end) = (field.span().start().line, field.ty.span().end().line);
        let name = field.ident.as_ref().map_or_else(|| "a field without a name".into(), ToString::to_string);
        if !is_for_tests(&field.attrs) {
            self.check(&name, &field.ty, first_line(&field.attrs, start), end);
        }
    }
}

/// Returns the growing fields without a comment.
pub(crate) fn unmarked(source: &Source) -> Vec<String> {
    #[derive(Default)]
    struct Aliases(BTreeSet<String>);
    impl<'ast> Visit<'ast> for Aliases {
        fn visit_item_type(&mut self, item: &'ast ItemType) {
            let none = BTreeSet::new();
            let mut growth = Growth { aliases: &none, found: false };
            growth.visit_type(&item.ty);
            self.0.extend(growth.found.then(|| item.ident.to_string()));
        }
    }
    let mut aliases = Aliases::default();
    source.modules.values().for_each(|module| aliases.visit_file(&module.syntax));
    let mut faults = Vec::new();
    for (name, module) in &source.modules {
        // The conformance suite is a test.
        if name == "conformance" || name.starts_with("conformance/") {
            continue;
        }
        let lines = module.text.lines().collect();
        let mut fields = Fields { module, lines, aliases: &aliases.0, covered: false, faults: Vec::new() };
        fields.visit_file(&module.syntax);
        faults.append(&mut fields.faults);
    }
    faults
}

/// Returns the keys that comments name without a row, and the rows that no comment names. `files`
/// has the path and the text of each file.
pub(crate) fn differences<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>, bounds: &Table) -> Vec<String> {
    let rows: BTreeSet<_> = bounds.rows.iter().flat_map(|row| code(&row.cells[0])).collect();
    let (mut named, mut faults) = (BTreeSet::new(), Vec::new());
    for (file, text) in files {
        for (at, line) in text.lines().enumerate() {
            let keys = comment(line).filter(|(kind, _)| *kind == "bound").map_or("", |(_, keys)| keys);
            for key in keys.split(", ").filter(|key| !key.is_empty()) {
                if !rows.contains(key) {
                    faults.push(format!("{file}:{}: {} has no row `{key}`", at + 1, bounds.file));
                }
                named.insert(key.to_owned());
            }
        }
    }
    let unnamed = rows.difference(&named);
    faults.extend(unnamed.map(|key| format!("{}: no comment in the code names `{key}`", bounds.file)));
    faults
}

#[test]
fn fields_that_can_grow_are_found_however_they_are_written() {
    let source = Source::of(&[(
        "lib.rs",
        "//! A crate.
         type Names = Vec<u8>;
         struct A<T> { a: Option<Box<VecDeque<T>>>, b: u8, c: Receiver<T>, d: Names }
         enum B { One(std::collections::BTreeMap<u8, u8>), Two { e: String } }
         static S: Mutex<Vec<u8>> = Mutex::new(Vec::new());
         fn f() { struct Inner(RefCell<HashSet<u8>>); }
         struct Not<'a> { a: &'a mut Vec<u8>, b: Box<[u8]>, c: Receiver, d: oneshot::Receiver<u8>, e: fn(Vec<u8>) }
         struct Slab<T> { slots: Vec<T> }
         #[cfg(test)] struct Test { a: Vec<u8> }
         struct Marked {
             a: Vec<u8>, // bound: key
             /// It is documented.
             // local: a setting
             b: Vec<u8>,
             /// bound: this is no such comment
             c: Vec<u8>,
             d: Vec<u8>, // bound:
         }
         // local: texts
         #[derive(Debug)]
         enum Texts { A(String), B { b: String } }
         struct After(Vec<u8>);",
    )]);
    let found: Vec<_> =
        unmarked(&source).iter().filter_map(|fault| Some(fault.split_once(": say")?.0.to_owned())).collect();
    let expected = [
        "3: `a`",
        "3: `c`",
        "3: `d`",
        "4: `a field without a name`",
        "4: `e`",
        "5: `S`",
        "6: `a field without a name`",
        "16: `c`",
        "17: `d`",
        "22: `a field without a name`",
    ];
    assert_eq!(found, expected.map(|place| format!("src/lib.rs:{place} can grow")));
}

#[test]
fn keys_and_rows_without_each_other_are_found() {
    let page = super::tables::table("b.md", "# B\n| key |\n|---|\n| `a` |\n| `b` |\n| `c` |\n", "B");
    let files = [("x.rs", "a: u8, // bound: a\n// bound: c, d"), ("y.rs", "/// bound: e\n// local: b\nf(); // a: b")];
    assert_eq!(differences(files, &page), ["x.rs:2: b.md has no row `d`", "b.md: no comment in the code names `b`"]);
}
