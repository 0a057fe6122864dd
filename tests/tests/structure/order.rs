//! Checks the order of a crate's layers, and finds circles of dependencies.

use std::collections::{BTreeMap, BTreeSet};

use super::source::Source;
use super::tables::{Table, code};

/// A dependency of one module or folder on another one, and its place in the source.
#[derive(Clone, Debug)]
pub(crate) struct Edge {
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) place: String,
}

/// Returns the dependencies between the modules of a crate. The root module is left out, because it and all other modules depend on each
/// other.
pub(crate) fn edges(source: &Source) -> Vec<Edge> {
    let mut edges = Vec::new();
    for (from, module) in source.modules.iter().filter(|(from, _)| !from.is_empty()) {
        for used in &module.uses {
            if let Some(to) = source.target(&used.path).filter(|to| !to.is_empty() && to != from) {
                let place = format!("{}:{}: {}", module.file, used.line, used.path.join("::"));
                edges.push(Edge { from: from.clone(), to: to.to_owned(), place });
            }
        }
    }
    edges
}

/// Returns true if one of the two modules or folders contains the other, or if they are the same.
fn is_family(one: &str, other: &str) -> bool {
    let holds = |outer: &str, inner: &str| {
        inner == outer || inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('/'))
    };
    holds(one, other) || holds(other, one)
}

/// Returns dependencies that form a circle, or `None` if there is no circle.
fn circle(edges: &[Edge]) -> Option<Vec<&Edge>> {
    let mut left: Vec<&Edge> = edges.iter().filter(|edge| !is_family(&edge.from, &edge.to)).collect();
    loop {
        let from: BTreeSet<&str> = left.iter().map(|edge| edge.from.as_str()).collect();
        let before = left.len();
        left.retain(|edge| from.contains(edge.to.as_str()));
        if left.len() == before {
            break;
        }
    }
    // Each remaining dependency leads to a module that itself has a remaining dependency. So a walk along the dependencies must reach a
    // module for the second time, which closes a circle.
    let mut way = vec![*left.first()?];
    loop {
        let last = way[way.len() - 1];
        if let Some(start) = way.iter().position(|edge| edge.from == last.to) {
            return Some(way.split_off(start));
        }
        way.push(left.iter().find(|edge| edge.from == last.to)?);
    }
}

fn told(what: &str, edges: &[Edge]) -> Vec<String> {
    let Some(circle) = circle(edges) else { return Vec::new() };
    let ways = circle.iter().map(|edge| format!("  {} -> {}: {}", edge.from, edge.to, edge.place));
    vec![format!("a circle of {what}:\n{}", ways.collect::<Vec<_>>().join("\n"))]
}

/// Searches for a circle of dependencies between files. A module and its children may depend on each other. Returns a description of one
/// circle, or an empty list if there is no circle.
pub(crate) fn circles_of_files(source: &Source) -> Vec<String> {
    told("files", &edges(source))
}

/// Searches for a circle of dependencies between folders at any depth. A folder and the folders within it may depend on each other. A file
/// that is in no folder counts as a folder. Returns a description of one circle, or an empty list if there is no circle.
pub(crate) fn circles_of_folders(source: &Source) -> Vec<String> {
    let folder = |name: &str| match source.modules[name].file.rsplit_once('/') {
        Some((_, "mod.rs")) => name.to_owned(),
        _ => name.rsplit_once('/').map_or(name, |(folder, _)| folder).to_owned(),
    };
    let edges = edges(source);
    let lifted =
        edges.iter().map(|edge| Edge { from: folder(&edge.from), to: folder(&edge.to), place: edge.place.clone() });
    told("folders", &lifted.collect::<Vec<_>>())
}

/// One row of the table of layers: modules or folders of the same height, and paths that they must not use.
#[derive(Debug)]
struct Layer {
    names: Vec<String>,
    unknown: Vec<String>,
}

/// Returns the dependencies that violate the order of layers. Each row of the table is a layer, the highest first:
/// `| layer | what it is | knows nothing of |`. A layer may use itself and the rows below it, and no path in its last column.
pub(crate) fn violations(source: &Source, table: &Table) -> Vec<String> {
    let mut found = Vec::new();
    let layers: Vec<Layer> =
        table.rows.iter().map(|row| Layer { names: code(&row.cells[0]), unknown: code(&row.cells[2]) }).collect();
    let mut ranks = BTreeMap::new();
    for (rank, name) in
        layers.iter().enumerate().flat_map(|(rank, layer)| layer.names.iter().map(move |name| (rank, name)))
    {
        if !source.modules.contains_key(name) {
            found.push(format!("{}:{}: there is no module `{name}`", table.file, table.rows[rank].line));
        }
        ranks.insert(name.as_str(), rank);
    }
    // A module belongs to the layer of the innermost folder around it that the table names.
    let rank = |module: &str| {
        let ends = module.match_indices('/').map(|(at, _)| at).chain([module.len()]);
        ends.filter_map(|end| ranks.get(&module[..end]).copied()).next_back()
    };
    for (name, module) in source.modules.iter().filter(|(name, _)| !name.is_empty()) {
        let Some(of) = rank(name) else {
            found.push(format!("{}:1: `{name}` has no row in the table of layers in {}", module.file, table.file));
            continue;
        };
        for used in &module.uses {
            let path = used.path.join("::");
            let place = format!("{}:{}", module.file, used.line);
            let forbidden = |unknown: &&String| {
                path.strip_prefix(unknown.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            };
            if let Some(unknown) = layers[of].unknown.iter().find(forbidden) {
                found.push(format!("{place}: `{path}`: this layer knows nothing of `{unknown}`"));
            }
            let above = |to: &&str| !is_family(name, to) && rank(to).is_some_and(|to| to < of);
            if let Some(to) = source.target(&used.path).filter(|to| !to.is_empty()).filter(above) {
                found.push(format!("{place}: `{path}`: `{to}` stands above `{name}` in the order of layers"));
            }
        }
    }
    found
}
