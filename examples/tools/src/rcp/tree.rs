//! Lists the files of a directory tree, in the order in which they are copied.

use std::fs;
use std::path::{Path, PathBuf};

use super::name::{check, shown};
use crate::pingpong::failure::Failure;

/// A file or a directory to copy.
// local: files of the user
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The path on this machine.
    pub path: PathBuf,
    /// The name of the copy. The names of its directories are separated by `/`.
    pub name: String,
    /// The length of the file in bytes; `None` for a directory.
    pub len: Option<u64>,
}

/// The files and directories to copy. Each directory precedes its content.
// local: files of the user
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    /// The files and directories.
    pub items: Vec<Item>,
    /// Descriptions of files that cannot be copied, with the reasons.
    pub skipped: Vec<String>,
}

/// Lists a file, or a directory with everything in it. Symbolic links inside the directory are not followed.
///
/// # Errors
/// `path` is missing, or is neither a file nor a directory, or is a directory although `recursive` is false.
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
        (_, true, false) => return Err(bad(&"a directory, not a file: give -r to copy its content")),
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
                tree.skip(&path, &"its name is not UTF-8");
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
