//! Public functions of the reactor that take more than one argument have an example, or name the place of one.

use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Attribute, Expr, FnArg, ImplItemFn, ItemFn, ItemMod, Lit, Meta, Signature, TraitItemFn, Visibility};

/// What a documentation with an example has: code, or the link to code.
const SHOWN: [&str; 2] = ["```", "Example: ["];

/// The text of an item's documentation.
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

/// The functions of a file, and those of them that show nothing.
#[derive(Default)]
struct Functions {
    checked: usize,
    bare: Vec<String>,
}

impl Functions {
    fn check(&mut self, visibility: &Visibility, signature: &Signature, attributes: &[Attribute]) {
        let arguments = signature.inputs.iter().filter(|input| matches!(input, FnArg::Typed(_))).count();
        if arguments < 2 || !matches!(visibility, Visibility::Public(_)) {
            return;
        }
        self.checked += 1;
        let text = documentation(attributes);
        if !SHOWN.iter().any(|shown| text.contains(shown)) {
            self.bare.push(signature.ident.to_string());
        }
    }
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.check(&item.vis, &item.sig, &item.attrs);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.check(&item.vis, &item.sig, &item.attrs);
    }

    // What a program implements is shown with the trait.
    fn visit_trait_item_fn(&mut self, _: &'ast TraitItemFn) {}

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if module.ident != "tests" {
            visit::visit_item_mod(self, module);
        }
    }
}

fn read(folder: &Path, functions: &mut Functions) {
    for entry in fs::read_dir(folder).expect("a folder of the project") {
        let path = entry.expect("an entry").path();
        if path.ends_with("fuzz") {
            // These functions are for the fuzz targets alone.
        } else if path.is_dir() {
            read(&path, functions);
        } else if path.file_stem().is_some_and(|stem| stem != "tests") {
            let text = fs::read_to_string(&path).expect("a source file");
            let before = functions.bare.len();
            functions.visit_file(&syn::parse_file(&text).expect("Rust"));
            for name in &mut functions.bare[before..] {
                *name = format!("{}: {name}", path.display());
            }
        }
    }
}

#[test]
fn functions_of_several_arguments_have_an_example() {
    let mut functions = Functions::default();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../reactor/src"), &mut functions);
    println!("{} functions", functions.checked);
    assert!(functions.checked > 50, "most of the functions were not found");
    assert!(functions.bare.is_empty(), "no example, and no link to one:\n{}", functions.bare.join("\n"));
}

#[test]
fn a_function_without_an_example_is_found() {
    let file = "impl A { /// Sends.\n pub fn send(&self, a: u8, b: u8) {} \n/// Example: [`A`].\n pub fn two(a: u8, b: u8) {} \
                pub(crate) fn own(a: u8, b: u8) {} pub fn one(&self, a: u8) {} }";
    let mut functions = Functions::default();
    functions.visit_file(&syn::parse_file(file).expect("Rust"));
    assert_eq!((functions.checked, functions.bare), (2, vec!["send".to_owned()]));
}
