//! Finds circles of calls between files. If the methods of a type are spread over files that call
//! each other, these files are not separate parts, even if none imports another one.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};
use syn::{Expr, ImplItem, Item, ItemImpl, Type};

use super::source::{Source, attributes, is_for_tests};

/// The spread of the methods of a type: the number of methods, the number of files with these
/// methods, and the largest circle of files that call each other.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Spread {
    pub(crate) methods: usize,
    pub(crate) files: usize,
    /// The number of files in the largest circle of calls, or 1 if there is no circle.
    pub(crate) circle: usize,
}

/// Returns the name of the type of an `impl` block.
fn name_of(block: &ItemImpl) -> Option<String> {
    match &*block.self_ty {
        Type::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()),
        _ => None,
    }
}

/// The calls that a method makes: the name, and the type of the receiver if it is written. `Self`
/// stands for the type of the method.
struct Calls(Vec<(String, Option<String>)>);

impl<'ast> Visit<'ast> for Calls {
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let own = matches!(&*call.receiver, Expr::Path(path) if path.path.is_ident("self"));
        self.0.push((call.method.to_string(), own.then(|| "Self".into())));
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        let names: Vec<_> = path.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if let [.., of, name] = &names[..] {
            self.0.push((name.clone(), Some(of.clone())));
        }
        visit::visit_expr_path(self, path);
    }
}

/// Returns the spread of the methods of the types `names` over the files of a crate. The types
/// count as one: the whole and its parts, which could call back. A call with any receiver counts if
/// no other type of the crate has a method of that name. With the receiver `self`, a call always
/// counts. Methods of traits that a type implements count as its own.
pub(crate) fn spread(source: &Source, names: &[&str]) -> Spread {
    let (mut types, mut places, mut bodies) =
        (BTreeMap::<_, BTreeSet<_>>::new(), BTreeMap::<_, BTreeSet<_>>::new(), Vec::new());
    let mut methods = 0;
    for module in source.modules.values() {
        for item in module.syntax.items.iter().filter(|item| !is_for_tests(attributes(item))) {
            let Item::Impl(block) = item else { continue };
            let Some(of) = name_of(block) else { continue };
            for item in &block.items {
                let ImplItem::Fn(method) = item else { continue };
                if is_for_tests(&method.attrs) {
                    continue;
                }
                let name = method.sig.ident.to_string();
                types.entry(name.clone()).or_default().insert(of.clone());
                if names.contains(&of.as_str()) {
                    methods += 1;
                    places.entry((of.clone(), name)).or_default().insert(module.file.as_str());
                    bodies.push((module.file.as_str(), of.clone(), method));
                }
            }
        }
    }
    let files: BTreeSet<_> = bodies.iter().map(|(file, ..)| *file).collect();
    let mut arrows = BTreeMap::<&str, BTreeSet<&str>>::new();
    for (file, of, method) in &bodies {
        let mut calls = Calls(Vec::new());
        calls.visit_block(&method.block);
        for (name, receiver) in calls.0 {
            let receiver = receiver.map(|receiver| if receiver == "Self" { of.clone() } else { receiver });
            let owner = match (types.get(&name), receiver) {
                (Some(types), Some(receiver)) if types.contains(&receiver) => receiver,
                (Some(types), None) if types.len() == 1 => types.first().cloned().unwrap_or_default(),
                _ => continue,
            };
            let Some(places) = places.get(&(owner, name)) else { continue };
            if !places.contains(file) {
                arrows.entry(file).or_default().extend(places);
            }
        }
    }
    let reached: BTreeMap<_, _> = files.iter().map(|file| (*file, reached(&arrows, file))).collect();
    let both = |one: &&str, other: &&str| reached[*one].contains(other) && reached[*other].contains(one);
    let circle = files.iter().map(|one| files.iter().filter(|other| one == *other || both(one, other)).count());
    Spread { methods, files: files.len(), circle: circle.max().unwrap_or(0) }
}

/// Returns the files to which the arrows lead from a file.
fn reached<'a>(arrows: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut reached, mut left) = (BTreeSet::new(), vec![from]);
    while let Some(file) = left.pop() {
        let next = arrows.get(file).into_iter().flatten().copied();
        left.extend(next.filter(|next| reached.insert(*next)));
    }
    reached
}

/// Returns a message if the methods of types are spread more widely than `most`.
pub(crate) fn too_wide(source: &Source, names: &[&str], most: &Spread) -> Vec<String> {
    let found = spread(source, names);
    let fits = found.methods <= most.methods && found.files <= most.files && found.circle <= most.circle;
    if fits { Vec::new() } else { vec![format!("{names:?}: {found:?}, at most {most:?}")] }
}
