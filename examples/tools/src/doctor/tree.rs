//! The files of the system, or a directory in which a test simulates them.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The largest number of bytes that the program reads from a file. Only the list of loadable modules can be longer than this; its end is
/// then ignored.
const MAX_FILE: u64 = 4 << 20;

/// The directory that is used as the root of the file system.
#[derive(Clone, Debug)]
pub struct SystemTree {
    root: PathBuf,
}

impl SystemTree {
    /// Uses the directory `root` as the root of the file system.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns true if the root is that of the real machine. Only then may the program use system calls for information that the files do
    /// not have.
    #[must_use]
    pub fn is_real(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Converts an absolute path of the system to a path under the root.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns a file's text without surrounding white space.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn text(&self, path: &str) -> io::Result<String> {
        let mut text = Vec::new();
        fs::File::open(self.path(path))?.take(MAX_FILE).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).trim().to_owned())
    }

    /// Returns a file's text, or an empty string if the file cannot be read.
    #[must_use]
    pub fn text_or_empty(&self, path: &str) -> String {
        self.text(path).unwrap_or_default()
    }

    /// Returns the names in a directory, sorted; names that are numbers are sorted by value. Returns an empty list if the directory cannot
    /// be read.
    #[must_use]
    pub fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_by_key(|name| (name.parse::<u64>().unwrap_or(u64::MAX), name.clone()));
        names
    }

    /// Returns true if a file or directory with this path exists.
    #[must_use]
    pub fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Returns the last component of a symbolic link's target, or `None` if the link cannot be read.
    #[must_use]
    pub fn link_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }
}
