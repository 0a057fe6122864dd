//! Reads the source of a crate, except code that is for tests only. Collects the modules, from `lib.rs` on, and the paths that each module
//! uses.

use std::collections::BTreeMap;
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, File, Item, Meta, Token, UseTree};

/// A path that a module uses, and its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    /// The names of the path. It begins with `crate` or with the name of another crate: `super` and `self` are resolved.
    pub(crate) path: Vec<String>,
    pub(crate) line: usize,
}

/// One source file.
pub(crate) struct Module {
    /// The path relative to the workspace.
    pub(crate) file: String,
    pub(crate) text: String,
    pub(crate) syntax: File,
    pub(crate) uses: Vec<Use>,
}

/// The modules of a crate by their name, such as `conn/credit`. The name of the root module is empty.
pub(crate) struct Source {
    pub(crate) modules: BTreeMap<String, Module>,
}

impl Source {
    /// Reads the crate whose `lib.rs` is in `folder`, a path from the root of the workspace.
    pub(crate) fn read(workspace: &Path, folder: &str) -> Self {
        Self::load(folder, &|file| std::fs::read_to_string(workspace.join(file)).ok())
    }

    /// Reads the crate with the function `read`, which returns the content of a file, or `None` if the file does not exist.
    pub(crate) fn load(folder: &str, read: &dyn Fn(&str) -> Option<String>) -> Self {
        let mut modules = BTreeMap::new();
        let mut wanted = vec![String::new()];
        while let Some(name) = wanted.pop() {
            let candidates = match name.as_str() {
                "" => vec![format!("{folder}/lib.rs")],
                name => vec![format!("{folder}/{name}.rs"), format!("{folder}/{name}/mod.rs")],
            };
            let found = candidates.iter().find_map(|file| Some((file.clone(), read(file)?)));
            let (file, text) = found.unwrap_or_else(|| panic!("none of {candidates:?} can be read"));
            let syntax = syn::parse_file(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
            let mut reader =
                Reader { module: segments(&name), children: Vec::new(), declared: Vec::new(), uses: Vec::new() };
            reader.children = syntax.items.iter().filter_map(child).collect();
            reader.visit_file(&syntax);
            wanted.extend(reader.declared);
            modules.insert(name, Module { file, text, syntax, uses: reader.uses });
        }
        Self { modules }
    }

    /// Returns a source with one module for each file. Each file is a path and a content, and the
    /// name of its module is the path. The paths that the files use are not collected.
    pub(crate) fn of_files(files: Vec<(String, String)>) -> Self {
        let module = |(file, text): (String, String)| {
            let syntax = syn::parse_file(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
            (file.clone(), Module { file, text, syntax, uses: Vec::new() })
        };
        Self { modules: files.into_iter().map(module).collect() }
    }

    /// Returns a crate with these files: their paths below `src`, and their content.
    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        Self::load("src", &|file| {
            let name = file.strip_prefix("src/")?;
            files.iter().find(|(known, _)| *known == name).map(|(_, text)| (*text).into())
        })
    }

    /// Returns the name of the module of this crate to which a path leads: the longest part of the path that is a module. `None` for paths
    /// of other crates.
    pub(crate) fn target(&self, path: &[String]) -> Option<&str> {
        let [root, rest @ ..] = path else { return None };
        if root != "crate" {
            return None;
        }
        let name =
            (0..=rest.len()).rev().map(|len| rest[..len].join("/")).find(|name| self.modules.contains_key(name))?;
        self.modules.get_key_value(&name).map(|(name, _)| name.as_str())
    }

    /// Returns the module in a file of the crate. `file` is the path below `src`, such as `conn/mod.rs`.
    pub(crate) fn at(&self, file: &str) -> Option<&Module> {
        self.modules.values().find(|module| module.file.ends_with(&format!("src/{file}")))
    }
}

fn segments(name: &str) -> Vec<String> {
    name.split('/').filter(|part| !part.is_empty()).map(Into::into).collect()
}

/// Returns the name of the module if the item declares one that is not for tests only.
fn child(item: &Item) -> Option<String> {
    match item {
        Item::Mod(module) if !is_for_tests(&module.attrs) => Some(module.ident.to_string()),
        _ => None,
    }
}

/// Returns true if an item with these attributes is compiled for tests, documentation tests or fuzz targets only.
pub(crate) fn is_for_tests(attributes: &[Attribute]) -> bool {
    fn needs_test(meta: &Meta) -> bool {
        match meta {
            Meta::Path(path) => ["test", "doctest", "fuzz_targets"].iter().any(|name| path.is_ident(name)),
            Meta::List(list) => {
                let inner = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).unwrap_or_default();
                let all = list.path.is_ident("all") && inner.iter().any(needs_test);
                all || (list.path.is_ident("any") && !inner.is_empty() && inner.iter().all(needs_test))
            }
            Meta::NameValue(_) => false,
        }
    }
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg") && attribute.parse_args::<Meta>().is_ok_and(|meta| needs_test(&meta))
    })
}

/// Returns the attributes of an item, or none for rare kinds of items that are not listed here.
pub(crate) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// A visitor that collects the paths of one file.
struct Reader {
    /// The current module. Within `mod name { ... }` this is longer than the name of the file's module.
    module: Vec<String>,
    /// The names of the child modules that the file declares.
    children: Vec<String>,
    /// The full names of the declared modules that are separate files.
    declared: Vec<String>,
    uses: Vec<Use>,
}

impl Reader {
    fn note(&mut self, names: Vec<String>, line: usize) {
        let mut base = self.module.clone();
        let mut rest = names.as_slice();
        let mut of_crate = true;
        match rest.first().map(String::as_str) {
            Some("crate") => {
                base.clear();
                rest = &rest[1..];
            }
            Some("self") => rest = &rest[1..],
            Some("super") => {
                while rest.first().is_some_and(|name| name == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            Some(first) if self.children.iter().any(|child| child == first) => {}
            _ => of_crate = false,
        }
        let path = if of_crate {
            std::iter::once("crate".to_owned()).chain(base).chain(rest.iter().cloned()).collect()
        } else {
            names
        };
        self.uses.push(Use { path, line });
    }

    fn tree(&mut self, mut prefix: Vec<String>, tree: &UseTree) {
        let line = tree.span().start().line;
        match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.tree(prefix, &path.tree);
            }
            UseTree::Name(name) if name.ident == "self" => self.note(prefix, line),
            UseTree::Name(name) => {
                prefix.push(name.ident.to_string());
                self.note(prefix, line);
            }
            UseTree::Rename(name) => {
                prefix.push(name.ident.to_string());
                self.note(prefix, line);
            }
            UseTree::Glob(_) => self.note(prefix, line),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.tree(prefix.clone(), tree)),
        }
    }

    /// Collects the paths that begin with `crate` or `super` in the arguments of a macro. The parser leaves these arguments as tokens.
    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(first) if first == "crate" || first == "super" => {
                    if at > 0 && matches!(&tokens[at - 1], TokenTree::Punct(punct) if punct.as_char() == '$') {
                        continue;
                    }
                    let mut names = vec![first.to_string()];
                    let mut rest = &tokens[at + 1..];
                    while let [TokenTree::Punct(one), TokenTree::Punct(two), TokenTree::Ident(name), more @ ..] = rest {
                        if (one.as_char(), two.as_char()) != (':', ':') {
                            break;
                        }
                        names.push(name.to_string());
                        rest = more;
                    }
                    if names.len() > 1 {
                        self.note(names, first.span().start().line);
                    }
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if !is_for_tests(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        self.module.push(module.ident.to_string());
        match &module.content {
            Some(_) => visit::visit_item_mod(self, module),
            None => self.declared.push(self.module.join("/")),
        }
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.tree(Vec::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            let names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.note(names, path.span().start().line);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.tokens(item.tokens.clone());
        visit::visit_macro(self, item);
    }

    // Paths in `pub(in super::super)` and in attributes are no dependencies.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_attribute(&mut self, _: &'ast Attribute) {}
}
