//! Checks the length of files and functions, in lines of code: lines that are not empty and not a
//! comment, without those that are for tests only.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{ImplItemFn, Item, ItemFn, TraitItemFn};

use super::source::{Module, Source, attributes, is_for_tests};

/// The items of a module: the lines of those for tests, and the names and the lines of functions.
#[derive(Default)]
struct Items {
    tests: Vec<(usize, usize)>,
    functions: Vec<(String, (usize, usize))>,
}

fn lines(of: &impl Spanned) -> (usize, usize) {
    let span = of.span();
    (span.start().line, span.end().line)
}

impl<'ast> Visit<'ast> for Items {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_for_tests(attributes(item)) {
            self.tests.push(lines(item));
        } else {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        self.functions.push((function.sig.ident.to_string(), lines(function)));
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        if !is_for_tests(&function.attrs) {
            self.functions.push((function.sig.ident.to_string(), lines(function)));
        }
    }

    fn visit_trait_item_fn(&mut self, function: &'ast TraitItemFn) {
        self.functions.push((function.sig.ident.to_string(), lines(function)));
    }
}

/// Returns the files and the functions of a crate that are longer than this number of lines of
/// code.
pub(crate) fn too_long(source: &Source, file: usize, function: usize) -> Vec<String> {
    source.modules.values().flat_map(|module| of_module(module, file, function)).collect()
}

fn of_module(module: &Module, file: usize, function: usize) -> Vec<String> {
    let mut items = Items::default();
    items.visit_file(&module.syntax);
    let is_code = |line: &str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
    let code = |first: usize, last: usize| {
        let tests = |at: usize| items.tests.iter().any(|&(begin, end)| (begin..=end).contains(&at));
        let all = module.text.lines().enumerate().map(|(at, line)| (at + 1, line));
        all.filter(|&(at, line)| (first..=last).contains(&at) && is_code(line) && !tests(at)).count()
    };
    let whole = code(1, usize::MAX);
    let long = (whole > file).then(|| format!("{}: {whole} lines of code, more than {file}", module.file));
    let functions = items.functions.iter().filter_map(|(name, (first, last))| {
        let len = code(*first, *last);
        (len > function)
            .then(|| format!("{}:{first}: `{name}` has {len} lines of code, more than {function}", module.file))
    });
    long.into_iter().chain(functions).collect()
}

#[test]
fn long_files_and_functions_are_found() {
    let text = "/// A function.\nfn f() {\n\n    // A comment.\n    g();\n}\n#[cfg(test)]\nmod tests {\n fn t() {}\n}\n\
                impl A {\n    fn h() {\n        g();\n        g();\n    }\n}";
    let source = Source::of(&[("lib.rs", text)]);
    assert_eq!(too_long(&source, 9, 4), [""; 0]);
    assert_eq!(
        too_long(&source, 8, 3),
        ["src/lib.rs: 9 lines of code, more than 8", "src/lib.rs:12: `h` has 4 lines of code, more than 3"]
    );
}
