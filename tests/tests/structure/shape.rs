//! Checks the sizes of types, and which signatures name the handler's type.

use syn::visit::{self, Visit};
use syn::{Fields, GenericArgument, Item, ItemStruct, PathArguments, Type, Variant};

use super::source::{Source, attributes, is_for_tests};

/// A struct, or a variant of an enum: its place, its name, the number of its fields, and its booleans.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) file: String,
    pub(crate) line: usize,
    pub(crate) name: String,
    pub(crate) fields: usize,
    /// The names of the fields that are booleans.
    pub(crate) booleans: Vec<String>,
}

/// Returns true if a type is `bool`, `Cell<bool>` or `AtomicBool`.
fn is_boolean(of: &Type) -> bool {
    let Type::Path(path) = of else { return false };
    let Some(last) = path.path.segments.last() else { return false };
    match &last.arguments {
        PathArguments::None => last.ident == "bool" || last.ident == "AtomicBool",
        PathArguments::AngleBracketed(inner) => {
            last.ident == "Cell"
                && inner.args.iter().any(|of| matches!(of, GenericArgument::Type(of) if is_boolean(of)))
        }
        PathArguments::Parenthesized(_) => false,
    }
}

impl Shape {
    fn of(file: &str, name: &syn::Ident, fields: &Fields) -> Self {
        let boolean = |field: &&syn::Field| is_boolean(&field.ty);
        let name_of = |field: &syn::Field| field.ident.as_ref().map_or_else(String::new, ToString::to_string);
        Self {
            file: file.into(),
            line: name.span().start().line,
            name: name.to_string(),
            fields: fields.len(),
            booleans: fields.iter().filter(boolean).map(name_of).collect(),
        }
    }
}

/// Returns the structs and variants of a crate, except those that are for tests only.
pub(crate) fn shapes(source: &Source) -> Vec<Shape> {
    struct Shapes<'a>(&'a str, Vec<Shape>);
    impl<'ast> Visit<'ast> for Shapes<'_> {
        fn visit_item(&mut self, item: &'ast Item) {
            if !is_for_tests(attributes(item)) {
                visit::visit_item(self, item);
            }
        }

        fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
            self.1.push(Shape::of(self.0, &item.ident, &item.fields));
        }

        fn visit_variant(&mut self, variant: &'ast Variant) {
            self.1.push(Shape::of(self.0, &variant.ident, &variant.fields));
        }
    }
    let mut found = Vec::new();
    for module in source.modules.values() {
        let mut shapes = Shapes(&module.file, Vec::new());
        shapes.visit_file(&module.syntax);
        found.append(&mut shapes.1);
    }
    found
}

/// Returns the types with more than `most` fields. Files whose path ends with `except` are left out.
pub(crate) fn too_wide(shapes: &[Shape], most: usize, except: &str) -> Vec<String> {
    let wide = shapes.iter().filter(|shape| shape.fields > most && !shape.file.ends_with(except));
    wide.map(|shape| {
        format!("{}:{}: `{}` has {} fields, more than {most}", shape.file, shape.line, shape.name, shape.fields)
    })
    .collect()
}

/// Returns the types with more than `most` booleans that the list does not explain. Also returns the entries of the
/// list that fit no type.
pub(crate) fn unexplained(shapes: &[Shape], most: usize, explained: &[(&str, &[&str], &str)]) -> Vec<String> {
    let listed =
        |shape: &&Shape| explained.iter().any(|(name, fields, _)| *name == shape.name && *fields == shape.booleans);
    let unlisted = shapes.iter().filter(|shape| shape.booleans.len() > most && !listed(shape)).map(|shape| {
        format!(
            "{}:{}: `{}` has the booleans {:?}: list them with the reason why no two exclude each other",
            shape.file, shape.line, shape.name, shape.booleans
        )
    });
    let stale = explained
        .iter()
        .filter(|(name, fields, _)| !shapes.iter().any(|shape| shape.name == *name && shape.booleans == *fields));
    unlisted
        .chain(stale.map(|(name, fields, _)| format!("no type `{name}` has the booleans {fields:?} any more")))
        .collect()
}

/// Returns the lines of a crate that contain `H: Handler`, the bound of the handler's type.
pub(crate) fn handler_lines(source: &Source) -> Vec<String> {
    let lines = source
        .modules
        .values()
        .flat_map(|module| module.text.lines().enumerate().map(|(at, line)| (&module.file, at + 1, line)));
    lines
        .filter(|(.., line)| line.contains("H: Handler"))
        .map(|(file, at, line)| format!("{file}:{at}: {}", line.trim()))
        .collect()
}
