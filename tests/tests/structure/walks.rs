//! Checks the walks: the files that a message passes, in order, as a document lists them, and how often these files
//! look up the connection.

use std::collections::BTreeSet;

use syn::visit::{self, Visit};
use syn::{Block, Expr, ImplItemFn, Item, ItemFn};

use super::source::{Module, Source, attributes, is_for_tests};
use super::tables::{Table, code};

/// Returns the modules of the files that a table of a walk lists: `| file | what it does |`. The walk may end in the
/// file in which it begins.
///
/// # Errors
/// Returns messages about files that do not exist, and about other files that the walk visits twice.
pub(crate) fn files<'a>(source: &'a Source, table: &Table) -> Result<Vec<&'a Module>, Vec<String>> {
    let (mut files, mut wrong, mut seen) = (Vec::<&Module>::new(), Vec::new(), BTreeSet::new());
    for (nth, row) in table.rows.iter().enumerate() {
        let place = format!("{}:{}", table.file, row.line);
        let [name] = &code(&row.cells[0])[..] else {
            wrong.push(format!("{place}: a row begins with one `file`"));
            continue;
        };
        let Some(module) = source.at(name) else {
            wrong.push(format!("{place}: there is no file `{name}`"));
            continue;
        };
        let is_circle = nth + 1 == table.rows.len() && files.first().is_some_and(|first| first.file == module.file);
        if !seen.insert(&module.file) && !is_circle {
            wrong.push(format!("{place}: the walk leads back to {name}, which was left"));
        }
        files.push(module);
    }
    if wrong.is_empty() { Ok(files) } else { Err(wrong) }
}

/// The ways to look up a connection: calls of these functions, and `get` and `get_mut` of a field
/// with this name.
#[derive(Clone, Copy)]
pub(crate) struct Ways {
    pub(crate) functions: &'static [&'static str],
    pub(crate) field: &'static str,
}

/// Returns a message for each function or field of `ways` that does not exist any more. Otherwise a renamed one would
/// not be counted.
pub(crate) fn unknown(source: &Source, ways: Ways) -> Vec<String> {
    #[derive(Default)]
    struct Names(BTreeSet<String>);
    impl<'ast> Visit<'ast> for Names {
        fn visit_signature(&mut self, signature: &'ast syn::Signature) {
            self.0.insert(format!("fn {}", signature.ident));
        }
        fn visit_field(&mut self, field: &'ast syn::Field) {
            self.0.extend(field.ident.as_ref().map(|name| format!("field {name}")));
        }
    }
    let mut names = Names::default();
    source.modules.values().for_each(|module| names.visit_file(&module.syntax));
    let functions = ways.functions.iter().map(|name| format!("fn {name}"));
    let counted = functions.chain([format!("field {}", ways.field)]);
    counted.filter(|name| !names.0.contains(name)).map(|name| format!("there is no `{name}` to count")).collect()
}

/// Returns a message for each function of a file that looks up a connection more than `most` times. If the code
/// branches, the branch with the most look-ups counts.
pub(crate) fn look_ups(module: &Module, most: usize, ways: Ways) -> Vec<String> {
    struct Functions<'a>(&'a Module, usize, Ways, Vec<String>);
    impl Functions<'_> {
        fn check(&mut self, name: &syn::Ident, block: &Block) {
            let mut counted = LookUps(self.2, 0);
            counted.visit_block(block);
            if counted.1 > self.1 {
                let (file, line) = (&self.0.file, name.span().start().line);
                self.3.push(format!("{file}:{line}: `{name}` looks up a connection {} times", counted.1));
            }
        }
    }
    impl<'ast> Visit<'ast> for Functions<'_> {
        fn visit_item(&mut self, item: &'ast Item) {
            if !is_for_tests(attributes(item)) {
                visit::visit_item(self, item);
            }
        }

        fn visit_item_fn(&mut self, function: &'ast ItemFn) {
            self.check(&function.sig.ident, &function.block);
        }

        fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
            self.check(&function.sig.ident, &function.block);
        }
    }
    let mut functions = Functions(module, most, ways, Vec::new());
    functions.visit_file(&module.syntax);
    functions.3
}

/// A visitor that counts the look-ups of a connection: the ways to look one up, and the count.
struct LookUps(Ways, usize);

impl LookUps {
    fn of(&self, branch: impl FnOnce(&mut Self)) -> usize {
        let mut counted = Self(self.0, 0);
        branch(&mut counted);
        counted.1
    }
}

impl<'ast> Visit<'ast> for LookUps {
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let in_table = match &*call.receiver {
            Expr::Path(path) => path.path.is_ident(self.0.field),
            Expr::Field(field) => matches!(&field.member, syn::Member::Named(name) if name == self.0.field),
            _ => false,
        };
        let method = call.method.to_string();
        let looks =
            self.0.functions.contains(&method.as_str()) || (in_table && (method == "get" || method == "get_mut"));
        self.1 += usize::from(looks);
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_match(&mut self, branches: &'ast syn::ExprMatch) {
        self.visit_expr(&branches.expr);
        let arms = branches.arms.iter().map(|arm| self.of(|counted| counted.visit_arm(arm)));
        self.1 += arms.max().unwrap_or(0);
    }

    fn visit_expr_if(&mut self, branches: &'ast syn::ExprIf) {
        self.visit_expr(&branches.cond);
        let then = self.of(|counted| counted.visit_block(&branches.then_branch));
        let other = branches.else_branch.as_ref();
        self.1 += then.max(other.map_or(0, |(_, branch)| self.of(|counted| counted.visit_expr(branch))));
    }
}
