//! The directory of the receiver, and the files below it.
//!
//! Another process may exchange a directory and a symbolic link at any time, also between two
//! system calls. So nothing here checks a path and then uses it. Each directory in the path of a
//! file is opened relative to the descriptor of its parent (`openat`(2)). The last part of the path
//! is used relative to the last descriptor. No step follows a symbolic link.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, renameat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

/// A directory, and the files below it; see the [module](self).
#[derive(Debug)]
pub struct Folder(OwnedFd);

impl Folder {
    /// Opens a directory. Its own path may have symbolic links.
    ///
    /// # Errors
    /// The system call failed.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Self(openat(AT_FDCWD, path, flags, Mode::empty())?))
    }

    /// Opens the directory that has the file `name`. Returns it with the last part of the name.
    /// Creates missing directories if `create` is true.
    fn parent<'n>(&self, name: &'n str, create: bool) -> io::Result<(OwnedFd, &'n str)> {
        if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(ErrorKind::InvalidInput.into());
        }
        let (mut at, mut begin) = (self.0.try_clone()?, 0);
        for (end, _) in name.match_indices('/') {
            let part = &name[begin..end];
            if create {
                mkdirat(&at, part, Mode::from_bits_truncate(0o777)).or_else(|error| match error {
                    Errno::EEXIST => Ok(()),
                    other => Err(other),
                })?;
            }
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            at = openat(&at, part, flags, Mode::empty()).map_err(|error| match error {
                Errno::ENOTDIR => {
                    let why = "is not a directory on the server: choose another name";
                    io::Error::new(ErrorKind::NotADirectory, format!("{:?} {why}", &name[..end]))
                }
                other => other.into(),
            })?;
            begin = end + 1;
        }
        Ok((at, &name[begin..]))
    }

    /// Creates the directories in the path of the file `name`, unless they exist.
    ///
    /// # Errors
    /// A system call failed, or a part of the path is no directory.
    pub fn create_folders(&self, name: &str) -> io::Result<()> {
        self.parent(name, true).map(drop)
    }

    /// Opens a file. `flags` are those of `open(2)`.
    ///
    /// # Errors
    /// A system call failed, a part of the path is no directory, or `name` is a symbolic link.
    pub fn file(&self, name: &str, flags: OFlag) -> io::Result<File> {
        let (parent, last) = self.parent(name, false)?;
        // Another process may have put a FIFO there. `O_NONBLOCK` has no effect on a regular file.
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        Ok(openat(parent.as_fd(), last, flags, Mode::from_bits_truncate(0o666))?.into())
    }

    /// Returns the metadata of a file, a directory or a symbolic link.
    ///
    /// # Errors
    /// A system call failed, or a part of the path is no directory.
    pub fn metadata(&self, name: &str) -> io::Result<Metadata> {
        self.file(name, OFlag::O_PATH)?.metadata()
    }

    /// Renames a file within its directory. Replaces another file of the new name.
    ///
    /// # Errors
    /// A system call failed, or a part of the path is no directory.
    pub fn rename(&self, name: &str, new_last: &str) -> io::Result<()> {
        let (parent, last) = self.parent(name, false)?;
        Ok(renameat(&parent, last, &parent, new_last)?)
    }

    /// Removes a file.
    ///
    /// # Errors
    /// A system call failed, or a part of the path is no directory.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let (parent, last) = self.parent(name, false)?;
        Ok(unlinkat(&parent, last, UnlinkatFlags::NoRemoveDir)?)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;

    /// Makes a directory with two directories: `to`, which is the receiver's, and `out`. Each has a
    /// file named `file`. In `to`, `away` is a symbolic link to `out`, and `link` is one to
    /// `out/file`.
    fn root(test: &str) -> (PathBuf, Folder) {
        let root = std::env::temp_dir().join(format!("rcp-folder-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for folder in ["to", "out"] {
            fs::create_dir_all(root.join(folder)).unwrap();
            fs::write(root.join(folder).join("file"), folder).unwrap();
        }
        symlink(root.join("out"), root.join("to/away")).unwrap();
        symlink(root.join("out/file"), root.join("to/link")).unwrap();
        let folder = Folder::open(&root.join("to")).unwrap();
        (root, folder)
    }

    #[test]
    fn no_operation_passes_a_link() {
        let (root, folder) = root("links");
        let create = OFlag::O_RDWR | OFlag::O_CREAT;
        for name in ["away/file", "away/sub/file", "../out/file", "away/../file", "/etc/passwd", ""] {
            assert!(folder.create_folders(&format!("{name}/_")).is_err(), "{name:?}");
            assert!(folder.file(name, OFlag::O_RDONLY).is_err(), "{name:?}");
            assert!(folder.file(name, create).is_err(), "{name:?}");
            assert!(folder.metadata(name).is_err(), "{name:?}");
            assert!(folder.rename(name, "other").is_err(), "{name:?}");
            assert!(folder.remove(name).is_err(), "{name:?}");
        }
        assert!(folder.file("link", OFlag::O_RDONLY).is_err() && folder.file("link", create).is_err());
        assert!(folder.metadata("link").unwrap().is_symlink());
        let why = folder.metadata("away/file").unwrap_err().to_string();
        assert_eq!(why, "\"away\" is not a directory on the server: choose another name");
        // The link itself is renamed and removed, not its target.
        folder.rename("link", "link2").unwrap();
        folder.remove("link2").unwrap();
        folder.remove("away").unwrap();
        let out: Vec<_> = fs::read_dir(root.join("out")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(out, ["file"]);
        assert_eq!(fs::read(root.join("out/file")).unwrap(), b"out");
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_folder_is_the_one_that_was_opened() {
        let (root, folder) = root("held");
        fs::rename(root.join("to"), root.join("moved")).unwrap();
        symlink(root.join("out"), root.join("to")).unwrap();
        folder.file("a/b/new", OFlag::O_WRONLY | OFlag::O_CREAT).unwrap_err();
        folder.create_folders("a/b/new").unwrap();
        folder.file("a/b/new", OFlag::O_WRONLY | OFlag::O_CREAT).unwrap();
        folder.rename("a/b/new", "newer").unwrap();
        assert!(root.join("moved/a/b/newer").exists() && !root.join("out/a").exists());
        fs::remove_dir_all(root).unwrap();
    }
}
