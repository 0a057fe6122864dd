//! Checks that the number of log lines that peers can cause has a limit. Such a line is written by
//! `peer_log!`. All others are written by `local_log!`, and have neither a peer nor a connection.
//! Lines at `debug` and `trace` have no limit.

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::source::Source;

/// The macros of the crate `log` that only the file of the two macros uses.
const RAW: &[&str] = &["error", "warn", "info", "log"];
/// The names of peers and connections.
const NAMES: &[&str] = &["peer", "peers", "id", "conn", "connection"];

/// Returns the log lines that have no limit although peers can cause them.
pub(crate) fn unlimited(source: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    for module in source.modules.values().filter(|module| !module.file.ends_with("/log_limit.rs")) {
        let raw = |path: &[String]| matches!(path, [log, .., name] if log == "log" && RAW.contains(&name.as_str()));
        let raw = module.uses.iter().filter(|used| raw(&used.path)).map(|used| used.line);
        faults.extend(raw.map(|line| format!("{}:{line}: use peer_log! or local_log!", module.file)));
        let mut local = LocalLines(Vec::new());
        local.visit_file(&module.syntax);
        let named = local.0.into_iter().map(|(line, name)| format!("{}:{line}: `{name}`: use peer_log!", module.file));
        faults.extend(named);
    }
    faults
}

/// The names of peers and connections in calls of `local_log!`, with their lines.
struct LocalLines(Vec<(usize, String)>);

impl LocalLines {
    fn tokens(&mut self, tokens: TokenStream) {
        let (mut before, mut last) = (String::new(), String::new());
        for token in tokens {
            let (line, text) = (token.span().start().line, token.to_string());
            match token {
                TokenTree::Group(group) => self.tokens(group.stream()),
                // The id of an endpoint belongs to the local side.
                TokenTree::Ident(_) if NAMES.contains(&text.as_str()) && (&*before, &*last) != ("endpoint", ".") => {
                    self.0.push((line, text.clone()));
                }
                TokenTree::Literal(_) => {
                    let captured = text.split('{').skip(1).map(|rest| rest.split([':', '}']).next().unwrap_or(""));
                    self.0.extend(captured.filter(|name| NAMES.contains(name)).map(|name| (line, name.to_owned())));
                }
                _ => {}
            }
            before = std::mem::replace(&mut last, text);
        }
    }
}

impl<'ast> Visit<'ast> for LocalLines {
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        if call.path.segments.last().is_some_and(|name| name.ident == "local_log") {
            self.tokens(call.tokens.clone());
        }
        visit::visit_macro(self, call);
    }
}

#[test]
fn lines_that_peers_cause_are_found() {
    let source = Source::of(&[
        ("lib.rs", "mod a; mod log_limit; use log::warn; fn f() { log::debug!(\"{peer}\"); }"),
        ("log_limit.rs", "fn f() { log::log!(log::Level::Warn, \"{id}\"); }"),
        (
            "a.rs",
            "fn f() {
                 log::error!(\"a\");
                 local_log!(Warn, \"{endpoint} {peer:?}\");
                 crate::local_log!(Warn, \"{} {}\", endpoint.id, conn.id());
                 local_log!(Warn, \"peers of {address}\");
             }",
        ),
    ]);
    let found = unlimited(&source);
    let at = ["a.rs:2: use", "a.rs:3: `peer`", "a.rs:4: `conn`", "a.rs:4: `id`", "lib.rs:1: use"];
    let mut missing = at.iter().filter(|at| !found.iter().any(|fault| fault.contains(*at)));
    assert!(found.len() == at.len() && missing.next().is_none(), "{found:#?}");
}
