//! A file for results. The file is opened before the measurement, so that errors are reported early. The results are written after the
//! measurement.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};

use super::failure::Failure;

/// A file for results. If the file is new and no results are written, it is removed.
#[derive(Debug)]
pub struct ResultFile {
    flag: &'static str,
    path: PathBuf,
    file: File,
    remove: bool,
}

impl ResultFile {
    /// Opens `path`, and creates its directories. A file that exists keeps its content until [`ResultFile::write`].
    ///
    /// # Errors
    /// The file cannot be opened for writing.
    pub fn open(flag: &'static str, path: &Path) -> Result<Self, Failure> {
        let existed = path.exists();
        path.parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| OpenOptions::new().write(true).create(true).truncate(false).open(path))
            .map(|file| Self { flag, path: path.to_owned(), file, remove: !existed })
            .map_err(|error| unwritable(flag, path, &error))
    }

    /// Replaces the content of the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(mut self, text: &str) -> Result<(), Failure> {
        // Only a regular file is truncated. Truncating a device such as /dev/null would fail.
        let cut = if self.file.metadata().is_ok_and(|meta| meta.is_file()) {
            self.file.set_len(0).and_then(|()| self.file.rewind())
        } else {
            Ok(())
        };
        cut.and_then(|()| self.file.write_all(text.as_bytes()))
            .map_err(|error| unwritable(self.flag, &self.path, &error))?;
        self.remove = false;
        Ok(())
    }
}

impl Drop for ResultFile {
    fn drop(&mut self) {
        if self.remove {
            if let Err(error) = fs::remove_file(&self.path) {
                log::debug!("removing {}: {error}", self.path.display());
            }
        }
    }
}

fn unwritable(flag: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot write {flag} {}: {error}; choose another file", path.display()))
}
