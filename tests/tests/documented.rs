//! Checks the documentation. Each public function of the reactor with more than one argument must
//! have an example, or a link to an example that calls the function. Each error must have a row in
//! the guide. The page on writing a provider must show parts of files unchanged, and its numbers
//! must be true. The names in the tables of waits, bounds and checks must exist, and so must the
//! tests that other pages cite.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use rdma_reactor_tests::contract;
use rdma_reactor_tests::mutant::Defect;
use rdma_transport::conformance::CASES;
use syn::visit::{self, Visit};
use syn::{
    Attribute, Expr, FnArg, ImplItemFn, Item, ItemFn, ItemMod, ItemStruct, ItemTrait, Lit, Meta, Signature, Visibility,
};

/// The text that precedes a link to an example in the documentation of a function.
const LINK: &str = "Example: [";

/// Returns the documentation of an item, as Markdown.
fn documentation(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    };
    attributes.iter().filter_map(line).collect::<Vec<_>>().join("\n")
}

/// Returns the content of all code blocks of a text in Markdown.
fn code(text: &str) -> String {
    text.split("```").skip(1).step_by(2).collect()
}

/// A public function with more than one argument: its file, its name, and its documentation.
struct Function {
    file: PathBuf,
    name: String,
    text: String,
}

/// The items that were read from the source of the reactor.
#[derive(Default)]
struct Items {
    file: PathBuf,
    functions: Vec<Function>,
    /// The documentation of all items, by their name. Items of the same name share one text.
    texts: BTreeMap<String, String>,
}

impl Items {
    fn add(&mut self, name: String, attributes: &[Attribute]) {
        self.texts.entry(name).or_default().push_str(&documentation(attributes));
    }

    fn function(&mut self, visibility: &Visibility, signature: &Signature, attributes: &[Attribute]) {
        if !matches!(visibility, Visibility::Public(_)) {
            return;
        }
        let name = signature.ident.to_string();
        self.add(name.clone(), attributes);
        if signature.inputs.iter().filter(|input| matches!(input, FnArg::Typed(_))).count() > 1 {
            self.functions.push(Function { file: self.file.clone(), name, text: documentation(attributes) });
        }
    }

    /// Returns the documentation or the page of the guide to which a link points. `rest` is the text after [`LINK`].
    fn linked(&self, rest: &str) -> String {
        let place = rest.split(']').next().expect("a first part").trim_matches('`');
        if let Some(page) = rest.split("(crate::guide::").nth(1).and_then(|page| page.split(')').next()) {
            let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
            let page = page.replace('_', "-") + ".md";
            let pages = [docs.join(&page), docs.join("guide").join(&page)];
            return pages.iter().find_map(|page| fs::read_to_string(page).ok()).unwrap_or_default();
        }
        let name = place.rsplit("::").next().expect("a last part");
        self.texts.get(name).cloned().unwrap_or_default()
    }

    /// Returns the functions that have neither an example nor a link to one that calls them.
    fn bare(&self) -> Vec<String> {
        let shown = |function: &Function| {
            let call = format!("{}(", function.name);
            if function.text.contains("```") {
                return true;
            }
            let link = function.text.split(LINK).nth(1);
            link.is_some_and(|rest| code(&self.linked(rest)).contains(&call))
        };
        let bare = self.functions.iter().filter(|function| !shown(function));
        bare.map(|function| format!("{}: {}", function.file.display(), function.name)).collect()
    }
}

impl<'ast> Visit<'ast> for Items {
    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.function(&item.vis, &item.sig, &item.attrs);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.function(&item.vis, &item.sig, &item.attrs);
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        self.add(item.ident.to_string(), &item.attrs);
    }

    // The methods of a trait are not collected, because the example of the trait shows them.
    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        self.add(item.ident.to_string(), &item.attrs);
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if module.ident != "tests" {
            visit::visit_item_mod(self, module);
        }
    }
}

fn read(folder: &Path, items: &mut Items) {
    for entry in fs::read_dir(folder).expect("a folder of the project") {
        let path = entry.expect("an entry").path();
        if path.ends_with("fuzz") {
            // Skips the folders named `fuzz`. Their functions are for the fuzz targets only.
        } else if path.is_dir() {
            read(&path, items);
        } else if path.file_stem().is_some_and(|stem| stem != "tests") {
            let text = fs::read_to_string(&path).expect("a source file");
            items.file = path;
            items.visit_file(&syn::parse_file(&text).expect("Rust"));
        }
    }
}

#[test]
fn functions_of_several_arguments_have_an_example() {
    let mut items = Items::default();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../reactor/src"), &mut items);
    println!("{} functions", items.functions.len());
    assert!(items.functions.len() > 50, "most of the functions were not found");
    let bare = items.bare();
    assert!(bare.is_empty(), "no example, and no link to one that calls the function:\n{}", bare.join("\n"));
}

#[test]
fn a_function_without_an_example_is_found() {
    let file = "impl A { /// Sends.\n pub fn send(&self, a: u8, b: u8) {} \n/// Example: [`B`].\n pub fn two(a: u8, b: u8) {} \
                \n/// Example: [`B::new`].\n pub fn not_called(a: u8, b: u8) {} \n/// Example: [the guide](crate::guide::nowhere).\n \
                pub fn lost(a: u8, b: u8) {} pub(crate) fn own(a: u8, b: u8) {} pub fn one(&self, a: u8) {} }\
                \n/// ```\n/// two(1, 2)\n/// ```\n/// not_called(1, 2)\nstruct B;";
    let mut items = Items::default();
    items.visit_file(&syn::parse_file(file).expect("Rust"));
    assert_eq!(
        (items.functions.len(), items.bare()),
        (4, [": send", ": not_called", ": lost"].map(str::to_owned).to_vec())
    );
}

/// Enums for which a table must have one row per variant. An entry has four texts: the file and the name of the enum, the page of the
/// table, and the beginning of the heading above the table.
const TABLES: [(&str, &str, &str, &str); 7] = [
    ("reactor/src/error.rs", "Error", "docs/guide/errors.md", "## `Error`"),
    ("reactor/src/error.rs", "SendErrorKind", "docs/guide/errors.md", "## `SendErrorKind`"),
    ("reactor/src/error.rs", "ConnectError", "docs/guide/errors.md", "## `ConnectError`"),
    ("reactor/src/error.rs", "DisconnectReason", "docs/guide/errors.md", "## `DisconnectReason`"),
    ("transport/src/cm.rs", "ConnectFailure", "docs/guide/errors.md", "## What the transport says"),
    ("transport/src/cm.rs", "DisconnectCause", "docs/guide/errors.md", "## What the transport says"),
    ("reactor/src/error.rs", "Blocked", "docs/guide/flow-control.md", "# Flow control"),
];

/// Returns the names of the variants of an enum in a Rust source.
fn variants(source: &str, name: &str) -> Vec<String> {
    let items = syn::parse_file(source).expect("Rust").items;
    let found = items.into_iter().find_map(|item| match item {
        Item::Enum(item) if item.ident == name => Some(item.variants),
        _ => None,
    });
    found.into_iter().flatten().map(|variant| variant.ident.to_string()).collect()
}

/// Returns the names, marked as code, in the first column of the tables below a heading.
fn rows<'a>(page: &'a str, heading: &str) -> Vec<&'a str> {
    let lines =
        page.lines().skip_while(|line| !line.starts_with(heading)).skip(1).take_while(|line| !line.starts_with('#'));
    let cells = lines.filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

#[test]
fn each_error_has_a_row() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |file: &str| fs::read_to_string(root.join(file)).expect("a file of the project");
    for (source, name, page, heading) in TABLES {
        let (variants, text) = (variants(&read(source), name), read(page));
        assert!(variants.len() > 3, "{name} was not found in {source}");
        let rows = rows(&text, heading);
        let missing: Vec<_> = variants.iter().filter(|variant| !rows.contains(&variant.as_str())).collect();
        assert!(missing.is_empty(), "{page} has no row for {missing:?} of {name} below {heading:?}");
    }
}

#[test]
fn an_error_without_a_row_is_found() {
    let source = "enum Other { X } enum E { A, B { n: u8 }, C(u8) }";
    assert_eq!(variants(source, "E"), ["A", "B", "C"]);
    let page =
        "## `E`: errors\n\n| variant | cause |\n|---|---|\n| `A` | `C` |\n| `B`, `D` | |\n\n## More\n\n| `C` | |\n";
    assert_eq!(rows(page, "## `E`"), ["A", "B", "D"]);
}

/// Returns the content of a file, by its path from the root of the workspace.
fn file(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).expect("a file")
}

/// Returns those code blocks of a page whose first line is `head`, without this first line.
fn blocks<'a>(page: &'a str, head: &str) -> Vec<&'a str> {
    let blocks = page.split("```").skip(1).step_by(2);
    blocks.filter_map(|block| block.strip_prefix(head)?.strip_prefix('\n')).collect()
}

#[test]
fn the_page_on_providers_shows_files_as_they_are() {
    let (page, loopback) = (file("docs/writing-a-provider.md"), file("tests/src/loopback.rs"));
    let shown = blocks(&page, "rs");
    assert!(shown.len() > 5, "the page walks through the file");
    for block in shown {
        assert!(loopback.contains(block), "not in loopback.rs:\n{block}");
    }
    let pass = file("tests/src/pass.rs");
    let whole = &pass[pass.find("use ").expect("its first line")..];
    let lacks = |line: &&str| line.trim_start().starts_with("fn adapter(");
    assert_eq!(whole.lines().filter(lacks).count(), 1, "the compiler has nothing else to complain of");
    let rest: String = whole.lines().filter(|line| !lacks(line)).map(|line| format!("{line}\n")).collect();
    assert_eq!(blocks(&page, "rust,compile_fail,E0046"), [format!("{rest}# fn main() {{}}\n")]);
}

/// Adds the names of the modules below `folder` that write to the log to `found`. `module` is the
/// name of the module of `folder`.
fn logging_modules(folder: &Path, module: &str, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("a folder of the project") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        let name = if stem == "mod" { module.to_owned() } else { format!("{module}::{stem}") };
        if path.is_dir() {
            logging_modules(&path, &name, found);
        } else {
            let text = fs::read_to_string(&path).expect("a source file");
            let macros = [
                "log::error!",
                "log::warn!",
                "log::info!",
                "log::debug!",
                "log::trace!",
                "peer_log!",
                "local_log!",
                "failure_log!",
            ];
            // The module `log_limit`, and lines with `$`, only define the macros for other modules.
            let lines = text.lines().map(str::trim_start);
            let mut lines = lines.filter(|line| !line.starts_with("//") && !line.contains('$'));
            if stem != "log_limit" && lines.any(|line| macros.iter().any(|name| line.contains(name))) {
                found.push(name);
            }
        }
    }
}

/// The table of log targets has a row for each module of the reactor that writes to the log, or for
/// a module that contains it.
#[test]
fn each_log_target_has_a_row() {
    let page = file("docs/loop.md");
    let table = page.lines().skip_while(|line| !line.starts_with("| target |"));
    let cells = table.take_while(|line| line.starts_with('|')).filter_map(|line| line.split(" | ").next());
    let names = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    // A name that begins with `::` is a path in the reactor's crate.
    let rows: Vec<_> =
        names.map(|name| if name.starts_with("::") { format!("rdma_reactor{name}") } else { name.into() }).collect();
    let mut modules = Vec::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    logging_modules(&root.join("reactor/src"), "rdma_reactor", &mut modules);
    assert!(modules.len() > 25 && rows.len() > 15, "{modules:?}, {rows:?}");
    let covers = |row: &String, module: &str| {
        module.strip_prefix(row.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    let missing: Vec<_> = modules.iter().filter(|module| !rows.iter().any(|row| covers(row, module))).collect();
    assert!(missing.is_empty(), "docs/loop.md has no row for {missing:?}");
    let reactors = rows.iter().filter(|row| row.starts_with("rdma_reactor"));
    let idle: Vec<_> = reactors.filter(|row| !modules.iter().any(|module| covers(row, module))).collect();
    assert!(idle.is_empty(), "nothing is logged with the targets {idle:?}");
}

/// `make quick` tests the libraries with the features that the package of the tests uses.
#[test]
fn quick_leaves_no_feature_out() {
    let (makefile, manifest) = (file("Makefile"), file("tests/Cargo.toml"));
    for (package, prefix) in [("rdma-reactor", "$(addprefix rdma-reactor/,"), ("rdma-transport", "rdma-transport/")] {
        let used = manifest.lines().find(|line| line.starts_with(&format!("{package} = "))).expect("a dependency");
        let used: Vec<_> = used.split("features = [").nth(1).expect("features").split('"').skip(1).step_by(2).collect();
        let tested = makefile.lines().find_map(|line| line.strip_prefix("TESTED_FEATURES = ")?.split(prefix).nth(1));
        let tested = tested.expect("the features of make quick").split(['$', ')']).next().unwrap_or_default();
        assert_eq!(tested.split_whitespace().collect::<Vec<_>>(), used, "{package}");
    }
}

/// The README's command builds the same documentation as docs.rs.
#[test]
fn the_command_for_the_documentation_has_all_features() {
    let (manifest, readme) = (file("reactor/Cargo.toml"), file("README.md"));
    let line = manifest.lines().skip_while(|line| *line != "[package.metadata.docs.rs]");
    let line = line.into_iter().find(|line| line.starts_with("features = [")).expect("the features of docs.rs");
    let command = blocks(&readme, "sh").into_iter().find(|block| block.contains("cargo doc")).expect("the command");
    let named: Vec<_> = command.split([' ', ',', '\n']).filter_map(|word| word.strip_prefix("rdma-reactor/")).collect();
    // The feature `verbs` is on by default.
    let mut wanted: Vec<_> = line.split('"').skip(1).step_by(2).filter(|feature| *feature != "verbs").collect();
    wanted.sort_unstable();
    assert!(wanted.len() > 5, "the list of docs.rs was not found: {wanted:?}");
    assert_eq!(named, wanted);
}

#[test]
fn the_numbers_on_providers_are_true() {
    let is_code = |line: &&str| !line.trim_start().starts_with("//") && !line.trim().is_empty();
    let lines = |path: &str| file(path).lines().filter(is_code).count();
    let [null, loopback] = ["tests/src/null.rs", "tests/src/loopback.rs"].map(lines);
    assert!(loopback <= 400, "{loopback} lines of code");
    let (cases, excused) = (CASES.len(), contract::NULL.deviations.len());
    assert!(contract::IN_PROCESS.deviations.is_empty());
    for (path, claim) in [
        ("docs/writing-a-provider.md", format!("`tests/src/null.rs` does that, in {null} lines of code")),
        ("docs/writing-a-provider.md", format!("process, in {loopback} lines of code, that fails no case")),
        ("docs/writing-a-provider.md", format!("the {excused} of the {cases} cases of the suite")),
        ("docs/testing.md", format!("has {cases} cases")),
        ("docs/testing.md", format!("one of {} defects", Defect::ALL.len())),
    ] {
        let words = file(path).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&claim), "{path} does not say: {claim}");
    }
    let page = file("docs/design/verbs-provider.md");
    for row in contract::KERNEL {
        let claim = format!("`Deviation` of `{}`", row.case);
        assert!(page.contains(&claim), "the table of siw and rxe does not say: {claim}");
    }
}

/// Returns true if a source file declares this name: a function, a constant, or a field of the type
/// `of`.
fn declares(source: &str, of: Option<&str>, name: &str) -> bool {
    let follows = |text: &str, head: &str, ends: &[char]| {
        text.match_indices(head).any(|(at, _)| text[at + head.len()..].starts_with(ends))
    };
    let Some(of) = of else {
        return follows(source, &format!("fn {name}"), &['(', '<'])
            || follows(source, &format!("const {name}"), &[':']);
    };
    let fields = source.split_once(&format!("struct {of} {{")).or_else(|| source.split_once(&format!("struct {of}<")));
    let fields = fields.map_or("", |(_, rest)| rest.split("\n}").next().unwrap_or_default());
    follows(fields, &format!(" {name}:"), &[' '])
}

/// Returns the source text of a module. For a test program, the text includes the files in the
/// folder of the program.
fn module(base: &str, path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(base);
    let files = [root.join(format!("{path}.rs")), root.join(path).join("mod.rs")];
    let mut text: String = files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect();
    if base == "tests/tests" {
        let parts = fs::read_dir(root.join(path)).into_iter().flatten().flatten();
        text.extend(parts.filter_map(|part| fs::read_to_string(part.path()).ok()));
    }
    text
}

/// Returns false if a name in a table of waits, bounds or checks does not exist. `a::b::c` is a
/// function, a constant or a field, `program test` is a test, and `a-b` is a planted defect. Other
/// names are not checked.
fn is_known(name: &str) -> bool {
    if let Some((program, test)) = name.split_once(' ') {
        return ["tests/tests", "examples/tools/tests"].iter().any(|base| declares(&module(base, program), None, test));
    }
    let Some((path, last)) = name.rsplit_once("::") else {
        return !name.contains('-') || file("docs/testing.md").contains(&format!("\n| `{name}` |"));
    };
    let (base, path) = match path.split_once("::") {
        Some(("transport", path)) => ("transport/src", path),
        Some(("embedded", path)) => ("transport/embedded/src", path),
        Some(("verbs", path)) => ("transport/verbs/src", path),
        Some(("tools", path)) => ("examples/tools/src", path),
        Some(("tests", path)) => ("tests/src", path),
        _ => ("reactor/src", path),
    };
    let (path, of) = match path.rsplit_once("::") {
        Some((path, of)) if of.starts_with(char::is_uppercase) => (path, Some(of)),
        _ => (path, None),
    };
    declares(&module(base, &path.replace("::", "/")), of, last)
}

/// All functions, fields, tests and defects that the table of waits names exist.
#[test]
fn the_waits_name_what_exists() {
    let page = file("docs/design/waits.md");
    let rows = page.lines().filter(|line| line.starts_with("| ")).skip(1);
    let names: Vec<_> = rows.flat_map(|row| row.split('`').skip(1).step_by(2)).collect();
    assert!(names.iter().filter(|name| name.contains("::")).count() > 100, "the table was not found");
    let unknown: Vec<_> = names.into_iter().filter(|name| !is_known(name)).collect();
    assert!(unknown.is_empty(), "docs/design/waits.md names {unknown:?}, which do not exist");
    for unknown in ["conn::sending::sen", "conn::Connection::refuse", "limits a_send", "no-such-defect", "none::x"] {
        assert!(!is_known(unknown), "{unknown}");
    }
}

/// All settings, constants, counters and tests that the table of bounds names exist. Each cell for
/// them has a name, or the word `none`.
#[test]
fn the_bounds_name_what_exists() {
    let page = file("docs/design/bounds.md");
    let rows: Vec<Vec<_>> = page
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|row| row.trim_matches('|').split('|').collect())
        .collect();
    assert!(rows.len() > 40, "the table was not found");
    for row in rows {
        assert_eq!(row.len(), 7, "{row:?}");
        for cell in &row[4..] {
            let names: Vec<_> = cell.split('`').skip(1).step_by(2).collect();
            assert!(!names.is_empty() || cell.trim() == "none", "{}: {cell:?} has no name", row[0]);
            let unknown: Vec<_> = names.into_iter().filter(|name| !is_known(name)).collect();
            assert!(unknown.is_empty(), "docs/design/bounds.md:{}: {unknown:?} do not exist", row[0]);
        }
    }
    assert!(is_known("limits::MAX_TRANSFERS") && !is_known("limits::MAX_TRANSFER"));
    assert!(is_known("tools::rcp::parts::MOST") && !is_known("tools::rcp::parts::LEAST"));
}

/// All functions, tests and defects that the table of checks names exist. Each row names a caller
/// (or the device), the action that the check guards, and a test.
#[test]
fn the_checks_name_what_exists() {
    let page = file("docs/design/checks.md");
    let rows = page.lines().filter(|line| line.starts_with("| ")).skip(1);
    let rows: Vec<Vec<_>> = rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect();
    assert!(rows.len() > 35, "the table was not found");
    for row in rows {
        let [check, asked, _, before, tests] = row[..] else { panic!("{row:?}") };
        assert!(!check.is_empty() && !before.is_empty(), "{row:?}");
        let [asked_by, tests] = [asked, tests].map(|cell| cell.split('`').skip(1).step_by(2).collect::<Vec<_>>());
        assert!(!asked_by.is_empty() || asked == "the device", "{check}: nobody asks");
        assert!(!tests.is_empty(), "{check}: no test");
        let unknown: Vec<_> = asked_by.into_iter().chain(tests).filter(|name| !is_known(name)).collect();
        assert!(unknown.is_empty(), "docs/design/checks.md: {check}: {unknown:?} do not exist");
    }
    assert!(is_known("tests::conformance::violations::greeting") && !is_known("tests::conformance::violations::greet"));
}

/// Adds the names of the functions with `#[test]` in the files of a folder.
fn test_names(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("a folder of the project") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            test_names(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("a source file");
            let functions =
                text.split("#[test]").skip(1).filter_map(|rest| rest.split_once("fn ")?.1.split('(').next());
            found.extend(functions.map(str::to_owned));
        }
    }
}

/// Returns the tests and the files of tests that a page cites: behind `(test: ` or `The test `, and
/// in the column "shown by" of a table.
fn cited(page: &str) -> Vec<&str> {
    let in_parentheses = page.split("(test: ").skip(1).filter_map(|rest| rest.split(')').next());
    let mut found: Vec<_> = in_parentheses.flat_map(|names| names.split('`').skip(1).step_by(2)).collect();
    found.extend(page.split("The test `").skip(1).filter_map(|rest| rest.split('`').next()));
    let table = page.lines().skip_while(|line| !line.ends_with("| shown by |")).skip(1);
    for row in table.take_while(|line| line.starts_with('|')) {
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
        found.extend(cell.split('`').skip(1).step_by(2).filter(|name| !name.starts_with("make ")));
    }
    found
}

/// The tests that pages for users cite exist.
#[test]
fn the_tests_that_pages_cite_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut tests = BTreeSet::new();
    for folder in ["reactor", "transport", "tests/tests", "tests/src", "examples/tests", "examples/tools"] {
        test_names(&root.join(folder), &mut tests);
    }
    assert!(tests.len() > 1000, "{} tests", tests.len());
    for (page, least) in [("SECURITY.md", 10), ("docs/security.md", 1), ("docs/guide/same-host.md", 15)] {
        let text = file(page);
        let cited = cited(&text);
        assert!(cited.len() >= least, "{page}: {cited:?}");
        let exists = |name: &&str| if name.contains('/') { root.join(name).exists() } else { tests.contains(*name) };
        let unknown: Vec<_> = cited.into_iter().filter(|name| !exists(name)).collect();
        assert!(unknown.is_empty(), "{page} cites {unknown:?}, which do not exist");
    }
}

#[test]
fn tests_are_found_however_a_page_cites_them() {
    let page = "a `b` (test: `one`, `two`) and `c`. The test `three` in `d`.\n\n| e | shown by |\n|---|---|\n\
                | `f` | `four`, `x/y.sh`, `make g` |\n\n| `h` | `i` |";
    assert_eq!(cited(page), ["one", "two", "three", "four", "x/y.sh"]);
}

/// Returns the number of programs in Markdown, and of those whose `main` returns its errors. Rust
/// prints such an error as `Debug`.
fn programs(page: &str) -> (usize, usize) {
    let mains = blocks(page, "rust").into_iter().filter_map(|block| block.split_once("fn main()"));
    let returning = mains.clone().filter(|(_, rest)| rest.trim_start().starts_with("->"));
    (mains.count(), returning.count())
}

/// The programs of the README, which users copy first, return no error from `main`, because Rust
/// would print its `Debug` form. The programs in the guide do, because they are shorter in this
/// way; `docs/guide/errors.md` says so.
#[test]
fn no_program_of_the_readme_returns_an_error() {
    assert_eq!(programs(&file("README.md")), (2, 0));
    let examples =
        "```rust\nfn main() {}\n```\n```rust\nasync fn main() -> Result<(), Error> {}\n```\n```rust\nf();\n```";
    assert_eq!(programs(examples), (2, 1));
}
