//! The files of the system, or of one that a test has made up.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Files are read so far: none of those looked at is longer, but for the list of modules that could be loaded.
const MAX_FILE: u64 = 4 << 20;

/// Where the files are.
#[derive(Clone, Debug)]
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The files under `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Whether this is the machine itself, which can also be asked otherwise.
    #[must_use]
    pub fn is_real(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Where an absolute path of the system is.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// A file's text without the white space around it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn text(&self, path: &str) -> io::Result<String> {
        let mut text = Vec::new();
        fs::File::open(self.path(path))?.take(MAX_FILE).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).trim().to_owned())
    }

    /// A file's text; empty when it cannot be read.
    #[must_use]
    pub fn text_or_empty(&self, path: &str) -> String {
        self.text(path).unwrap_or_default()
    }

    /// The names in a directory, numbers by value; empty when it cannot be read.
    #[must_use]
    pub fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_by_key(|name| (name.parse::<u64>().unwrap_or(u64::MAX), name.clone()));
        names
    }

    /// Whether there is such a file or directory.
    #[must_use]
    pub fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// The last part of what a link points to.
    #[must_use]
    pub fn link_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }
}
