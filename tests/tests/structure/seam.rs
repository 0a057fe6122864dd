//! Checks the interface between the reactor and its providers: the number of methods of its traits, and that no method has a default body.

use syn::{GenericArgument, Item, ItemTrait, PathArguments, ReturnType, TraitItem, Type};

use super::source::Module;

/// Returns the traits that a file declares.
fn traits(module: &Module) -> impl Iterator<Item = &ItemTrait> {
    module.syntax.items.iter().filter_map(|item| if let Item::Trait(found) = item { Some(found) } else { None })
}

/// Returns the name of the role if a method returns `Option<&dyn Role>`, and otherwise `None`.
fn role(output: &ReturnType) -> Option<String> {
    let ReturnType::Type(_, output) = output else { return None };
    let Type::Path(path) = &**output else { return None };
    let last = path.path.segments.last().filter(|segment| segment.ident == "Option")?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    let Some(GenericArgument::Type(Type::Reference(reference))) = arguments.args.first() else { return None };
    let Type::TraitObject(object) = &*reference.elem else { return None };
    let syn::TypeParamBound::Trait(bound) = object.bounds.first()? else { return None };
    Some(bound.path.segments.last()?.ident.to_string())
}

/// Returns the faults of the interface. `Provider` may have at most `most` methods that return no role, and a role at most `most_of_role`
/// methods. No method may have a body, and each role must be returned by exactly one method of `Provider`.
pub(crate) fn faults(provider: &Module, roles: &Module, most: usize, most_of_role: usize) -> Vec<String> {
    let (mut faults, mut returned) = (Vec::new(), Vec::new());
    let files = [(provider, most), (roles, most_of_role)];
    for (module, found, most) in files.iter().flat_map(|(m, most)| traits(m).map(move |found| (*m, found, *most))) {
        let place = format!("{}:{}: `{}`", module.file, found.ident.span().start().line, found.ident);
        let mut own = 0;
        for method in found.items.iter().filter_map(|item| if let TraitItem::Fn(f) = item { Some(f) } else { None }) {
            if method.default.is_some() {
                faults.push(format!("{place} has a body for `{}`, which a forwarder can forget", method.sig.ident));
            }
            match role(&method.sig.output) {
                Some(role) => returned.push(role),
                None => own += 1,
            }
        }
        if own > most {
            faults.push(format!("{place} has {own} methods, more than {most}"));
        }
    }
    let mut declared: Vec<String> = traits(roles).map(|role| role.ident.to_string()).collect();
    declared.sort();
    returned.sort();
    if declared != returned {
        faults.push(format!("{}: the roles are {declared:?}, and the methods return {returned:?}", provider.file));
    }
    faults
}
