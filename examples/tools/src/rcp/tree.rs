//! The files of a directory tree, as they are copied.

use std::fs;
use std::path::{Path, PathBuf};

use super::name::{check, shown};
use crate::pingpong::failure::Failure;

/// A file or a directory to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Where it is.
    pub path: PathBuf,
    /// The name of the copy, with `/` between the directories.
    pub name: String,
    /// Its length, bytes; `None` for a directory.
    pub len: Option<u64>,
}

/// What there is to copy, a directory before what is in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    /// Files and directories.
    pub items: Vec<Item>,
    /// What cannot be copied, and why.
    pub skipped: Vec<String>,
}

/// The file, or the directory with everything in it. Below it, links are not followed.
///
/// # Errors
/// There is nothing at `path`, or something else; or it is a directory, and `recursive` does not allow that.
pub fn list(path: &Path, name: &str, recursive: bool) -> Result<Tree, Failure> {
    let bad = |why: &dyn std::fmt::Display| Failure::new(format!("{}: {why}", path.display()));
    check(name)?;
    let metadata = fs::metadata(path).map_err(|error| bad(&error))?;
    let mut tree = Tree::default();
    match (metadata.is_file(), metadata.is_dir(), recursive) {
        (true, ..) => {
            tree.items.push(Item { path: path.to_owned(), name: name.to_owned(), len: Some(metadata.len()) });
        }
        (_, true, true) => walk(&mut tree, path.to_owned(), name.to_owned()),
        (_, true, false) => return Err(bad(&"a directory, not a file: say -r to copy what is in it")),
        _ => return Err(bad(&"not a file")),
    }
    Ok(tree)
}

fn walk(tree: &mut Tree, path: PathBuf, name: String) {
    let mut folders = vec![(path, name)];
    while let Some((path, name)) = folders.pop() {
        let entries = match fs::read_dir(&path).and_then(Iterator::collect::<Result<Vec<_>, _>>) {
            Ok(entries) => entries,
            Err(error) => {
                tree.skip(&path, &error);
                continue;
            }
        };
        tree.items.push(Item { path, name: name.clone(), len: None });
        for entry in entries {
            let path = entry.path();
            let Some(name) = entry.file_name().to_str().map(|own| format!("{name}/{own}")) else {
                tree.skip(&path, &"its name is no UTF-8");
                continue;
            };
            match (check(&name), entry.metadata()) {
                (Err(failure), _) => tree.skip(&path, &failure),
                (_, Err(error)) => tree.skip(&path, &error),
                (_, Ok(metadata)) if metadata.is_dir() => folders.push((path, name)),
                (_, Ok(metadata)) if metadata.is_file() => {
                    tree.items.push(Item { path, name, len: Some(metadata.len()) });
                }
                _ => tree.skip(&path, &"neither a file nor a directory"),
            }
        }
    }
    tree.items.sort_by(|a, b| a.name.split('/').cmp(b.name.split('/')));
    tree.skipped.sort();
}

impl Tree {
    fn skip(&mut self, path: &Path, why: &dyn std::fmt::Display) {
        self.skipped.push(format!("{}: {why}", shown(&path.to_string_lossy())));
    }
}
