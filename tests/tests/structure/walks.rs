//! Walks: the functions that a message passes, in order, as a document lists them.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Block, Expr, ImplItem, Item, Stmt, Type};

use super::source::Source;
use super::tables::{Table, code};

/// A function of a walk.
pub(crate) struct Step<'a> {
    name: String,
    pub(crate) file: String,
    block: &'a Block,
    /// Place in the document.
    place: String,
}

/// Reads the functions that a table lists: `| function | file | what it does |`. `Type::name` is a method, and `name` a
/// function.
///
/// # Errors
/// The functions that are not in the source.
pub(crate) fn steps<'a>(source: &'a Source, table: &Table) -> Result<Vec<Step<'a>>, Vec<String>> {
    let (mut steps, mut missing) = (Vec::new(), Vec::new());
    for row in &table.rows {
        let place = format!("{}:{}", table.file, row.line);
        let (function, file) = (code(&row.cells[0]), code(&row.cells[1]));
        let ([function], [file]) = (function.as_slice(), file.as_slice()) else {
            missing.push(format!("{place}: a row wants one `function` and one `file`"));
            continue;
        };
        let (of, name) = function.split_once("::").map_or((None, function.as_str()), |(of, name)| (Some(of), name));
        let block = source.at(file).and_then(|module| find(&module.syntax.items, of, name));
        match block {
            Some(block) => steps.push(Step { name: name.into(), file: file.clone(), block, place }),
            None => missing.push(format!("{place}: there is no function `{function}` in {file}")),
        }
    }
    if missing.is_empty() { Ok(steps) } else { Err(missing) }
}

fn find<'a>(items: &'a [Item], of: Option<&str>, name: &str) -> Option<&'a Block> {
    items.iter().find_map(|item| match (item, of) {
        (Item::Fn(function), None) if function.sig.ident == name => Some(&*function.block),
        (Item::Impl(block), Some(of)) if is_named(&block.self_ty, of) => {
            block.items.iter().find_map(|item| match item {
                ImplItem::Fn(function) if function.sig.ident == name => Some(&function.block),
                _ => None,
            })
        }
        _ => None,
    })
}

fn is_named(of: &Type, name: &str) -> bool {
    matches!(of, Type::Path(path) if path.path.segments.last().is_some_and(|segment| segment.ident == name))
}

/// The names that a block calls, as methods or functions, or hands on to be called.
#[derive(Default)]
struct Calls(BTreeSet<String>);

impl Calls {
    fn of(block: &Block) -> BTreeSet<String> {
        let mut calls = Self::default();
        calls.visit_block(block);
        calls.0
    }

    /// In a macro, a name before parentheses counts as a call.
    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(name) if matches!(tokens.get(at + 1), Some(TokenTree::Group(group)) if group.delimiter() == proc_macro2::Delimiter::Parenthesis) =>
                {
                    self.0.insert(name.to_string());
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Calls {
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.0.insert(call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        self.0.extend(path.path.segments.last().map(|name| name.ident.to_string()));
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.tokens(item.tokens.clone());
    }
}

/// The stack of each step when it is called, with the step itself last: the nearest step above that calls it, the step
/// that calls that one, and so on. A step that no step above calls has only itself.
fn stacks(steps: &[Step<'_>]) -> Vec<Vec<usize>> {
    let calls: Vec<_> = steps.iter().map(|step| Calls::of(step.block)).collect();
    let mut stacks: Vec<Vec<usize>> = Vec::new();
    for (at, step) in steps.iter().enumerate() {
        let above = stacks.last().map_or(&[][..], Vec::as_slice);
        let caller = above.iter().rposition(|&caller| calls[caller].contains(&step.name));
        let callers = caller.map_or(&[][..], |caller| &above[..=caller]);
        stacks.push(callers.iter().copied().chain([at]).collect());
    }
    stacks
}

/// Steps that no other step on the way calls, and the end if no step calls the end.
pub(crate) fn breaks(steps: &[Step<'_>], end: &str) -> Vec<String> {
    let stacks = stacks(steps);
    let alone = stacks.iter().enumerate().skip(1).filter(|(_, stack)| stack.len() == 1);
    let mut found: Vec<String> = alone
        .map(|(at, _)| {
            let above: Vec<_> = stacks[at - 1].iter().map(|&step| steps[step].name.as_str()).collect();
            format!("{}: `{}` is called by none of {above:?}", steps[at].place, steps[at].name)
        })
        .collect();
    if let (Some(last), Some(stack)) = (steps.last(), stacks.last())
        && !stack.iter().any(|&step| Calls::of(steps[step].block).contains(end))
    {
        found.push(format!("{}: nothing on the way calls `{end}`", last.place));
    }
    found
}

/// Calls from one file to another that the walk has been in before.
pub(crate) fn returns(steps: &[Step<'_>]) -> Vec<String> {
    let stacks = stacks(steps);
    let back = |at: &usize| {
        let step = &steps[*at];
        let [.., caller, _] = stacks[*at].as_slice() else { return false };
        steps[*caller].file != step.file && steps[..*at].iter().any(|before| before.file == step.file)
    };
    (0..steps.len())
        .filter(back)
        .map(|at| format!("{}: `{}` leads back to {}, which was left", steps[at].place, steps[at].name, steps[at].file))
        .collect()
}

/// The number of different files.
pub(crate) fn files(steps: &[&Step<'_>]) -> usize {
    steps.iter().map(|step| step.file.as_str()).collect::<BTreeSet<_>>().len()
}

/// Number of times that a step looks up a connection, on the branch with the most look-ups.
#[derive(Default)]
struct LookUps(usize);

impl LookUps {
    fn most(branches: impl IntoIterator<Item = impl Fn(&mut Self)>) -> usize {
        branches
            .into_iter()
            .map(|branch| {
                let mut counted = Self::default();
                branch(&mut counted);
                counted.0
            })
            .max()
            .unwrap_or(0)
    }
}

impl<'ast> Visit<'ast> for LookUps {
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let in_table = match &*call.receiver {
            Expr::Path(path) => path.path.is_ident("table"),
            Expr::Field(field) => matches!(&field.member, syn::Member::Named(name) if name == "table"),
            _ => false,
        };
        let method = call.method.to_string();
        let looks = match method.as_str() {
            "of_work" | "at" | "at_with_provider" | "input" => true,
            "get" | "get_mut" => in_table,
            _ => false,
        };
        self.0 += usize::from(looks);
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_match(&mut self, branches: &'ast syn::ExprMatch) {
        self.visit_expr(&branches.expr);
        self.0 += Self::most(branches.arms.iter().map(|arm| move |counted: &mut Self| counted.visit_arm(arm)));
    }

    fn visit_expr_if(&mut self, branches: &'ast syn::ExprIf) {
        self.visit_expr(&branches.cond);
        let mut then = Self::default();
        then.visit_block(&branches.then_branch);
        let mut other = Self::default();
        if let Some((_, branch)) = &branches.else_branch {
            other.visit_expr(branch);
        }
        self.0 += then.0.max(other.0);
    }
}

/// Number of times that the steps of a walk look up a connection.
pub(crate) fn look_ups(steps: &[Step<'_>]) -> usize {
    let mut counted = LookUps::default();
    steps.iter().flat_map(|step| &step.block.stmts).for_each(|stmt: &Stmt| counted.visit_stmt(stmt));
    counted.0
}
