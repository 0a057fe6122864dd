//! The partial copies that no sender is continuing now. They are kept so that a copy can be continued later. They are removed when they
//! are too old, when there are too many, or when the disk is full; the oldest are removed first.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::PIECE;
use super::folder::Folder;

/// The suffix of the file name of a partial copy.
pub const PART: &str = ".rcp-part";

/// The largest number of partial copies that are kept.
const MOST: usize = 100; // bound: tool-rcp

/// The partial copies that no sender is continuing now; see the [module](self).
// bound: tool-rcp
#[derive(Debug)]
pub struct PartialCopies {
    folder: Folder,
    keep: Duration,
    /// The partial copies: the time at which each was interrupted, and its name. The oldest one is first.
    idle: VecDeque<(SystemTime, String)>,
}

impl PartialCopies {
    /// Finds the partial copies below a directory. Removes those that are older than `keep`.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub fn find(directory: &Path, keep: Duration) -> io::Result<Self> {
        let folder = Folder::open(directory)?;
        let mut found = Vec::new();
        let mut folders = vec![directory.to_owned()];
        while let Some(folder) = folders.pop() {
            // Directories that cannot be read are skipped, because this program did not make them.
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                // `DirEntry::metadata` does not follow symbolic links.
                let Ok(metadata) = entry.metadata() else { continue };
                let path = entry.path();
                if metadata.is_dir() {
                    folders.push(path);
                } else if let (true, Some(name), Ok(since)) =
                    (metadata.is_file(), name_of_part(directory, &path), metadata.modified())
                {
                    found.push((since, name));
                }
            }
        }
        found.sort();
        let mut parts = Self { folder, keep, idle: found.into() };
        parts.tidy();
        Ok(parts)
    }

    /// Returns the directory with the files and their partial copies.
    #[must_use]
    pub const fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Records that a partial copy is being continued, so that it is not removed.
    pub fn take(&mut self, name: &str) {
        self.idle.retain(|(_, other)| other != name);
    }

    /// Records that a copy was interrupted. Removes the partial copy if it is shorter than one piece, and otherwise keeps it. Returns true
    /// if the partial copy is kept.
    #[allow(clippy::disallowed_methods, reason = "a program, not the library")]
    pub fn interrupted(&mut self, name: &str) -> bool {
        let len = self.folder.metadata(&part(name)).map_or(0, |part| part.len());
        if len < PIECE.into() {
            self.remove(name);
            return false;
        }
        self.idle.push_back((SystemTime::now(), name.to_owned()));
        self.tidy();
        self.idle.iter().any(|(_, other)| other == name)
    }

    /// Removes partial copies that are too old, and the oldest ones if there are too many.
    #[allow(clippy::disallowed_methods, reason = "a program, not the library")]
    pub fn tidy(&mut self) {
        let (now, keep) = (SystemTime::now(), self.keep);
        let is_old = |since: SystemTime| now.duration_since(since).is_ok_and(|age| age >= keep);
        while self.idle.len() > MOST || self.idle.front().is_some_and(|&(since, _)| is_old(since)) {
            self.remove_oldest();
        }
    }

    /// Removes a partial copy.
    pub fn remove(&self, name: &str) {
        if let Err(error) = self.folder.remove(&part(name)) {
            log::debug!("{name:?}: {error}");
        }
    }

    /// Removes the oldest partial copy. Returns false if there is none.
    fn remove_oldest(&mut self) -> bool {
        let Some((_, name)) = self.idle.pop_front() else { return false };
        log::info!("the partial copy of {name:?} is removed");
        self.remove(&name);
        true
    }

    /// Calls `wanted`, which needs disk space, and returns its result. While `wanted` fails because the disk is full, removes the oldest
    /// partial copy and calls `wanted` again.
    ///
    /// # Errors
    /// The last call of `wanted` failed.
    pub fn making_room<T>(&mut self, mut wanted: impl FnMut(&Folder) -> io::Result<T>) -> io::Result<T> {
        loop {
            match wanted(&self.folder) {
                Err(error) if is_full(&error) && self.remove_oldest() => {}
                other => return other,
            }
        }
    }
}

/// Returns the name of the file of the partial copy of `name`.
#[must_use]
pub fn part(name: &str) -> String {
    format!("{name}{PART}")
}

/// Returns true if the error means that the disk, or the user's quota, is full.
#[must_use]
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// Returns the name of the copy if `path` is the file of a partial copy, and otherwise `None`.
fn name_of_part(directory: &Path, path: &Path) -> Option<String> {
    let name = path.strip_prefix(directory).ok()?.to_str()?;
    name.strip_suffix(PART).filter(|name| super::name::check(name).is_ok()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A directory for a test. Dropping this value removes it.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("rcp-parts-{test}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(path.join("sub")).unwrap();
            Self(path)
        }

        /// Makes a partial copy that is `days` days old and one piece long.
        fn part(&self, name: &str, days: u64) {
            let file = fs::File::create(self.0.join(format!("{name}{PART}"))).unwrap();
            file.set_len(PIECE.into()).unwrap();
            file.set_modified(SystemTime::now() - DAY * days as u32).unwrap();
        }

        fn has(&self, name: &str) -> bool {
            self.0.join(format!("{name}{PART}")).exists()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn what_is_old_goes_and_nothing_else() {
        let folder = Folder::new("old");
        folder.part("old", 8);
        folder.part("sub/old", 9);
        folder.part("new", 6);
        let others = ["file", "sub/file", "-rcp-part", "old.rcp-part.txt"];
        others.iter().for_each(|name| fs::write(folder.0.join(name), "kept").unwrap());
        fs::create_dir(folder.0.join("folder.rcp-part")).unwrap();
        std::os::unix::fs::symlink("/etc", folder.0.join("link")).unwrap();
        std::os::unix::fs::symlink("file", folder.0.join("link.rcp-part")).unwrap();
        let parts = PartialCopies::find(&folder.0, DAY * 7).unwrap();
        assert_eq!(
            ["old", "sub/old", "new", "folder", "link"].map(|name| folder.has(name)),
            [false, false, true, true, true]
        );
        assert!(others.iter().all(|name| folder.0.join(name).exists()));
        assert_eq!(parts.idle.len(), 1);
        drop(PartialCopies::find(&folder.0, Duration::ZERO).unwrap());
        assert!(!folder.has("new"));
    }

    #[test]
    fn no_more_are_kept_than_the_limit_and_none_that_is_short() {
        let folder = Folder::new("many");
        let mut parts = PartialCopies::find(&folder.0, DAY).unwrap();
        for nth in 0..300 {
            let name = format!("{nth}");
            fs::write(folder.0.join(part(&name)), "short").unwrap();
            assert!(!parts.interrupted(&name) && !folder.has(&name), "five bytes");
        }
        for nth in 0..=MOST {
            folder.part(&format!("{nth}"), 0);
            assert!(parts.interrupted(&format!("{nth}")));
        }
        assert!(!folder.has("0") && folder.has("1") && parts.idle.len() == MOST);
        // While a partial copy is being continued, it must not be removed.
        parts.take("1");
        while parts.remove_oldest() {}
        assert!(folder.has("1") && !folder.has("2"));
    }

    #[test]
    fn the_oldest_gives_way_when_the_disk_is_full() {
        let folder = Folder::new("full");
        (0..4).for_each(|nth| folder.part(&format!("{nth}"), 4 - nth));
        let mut parts = PartialCopies::find(&folder.0, DAY * 7).unwrap();
        let full = || io::Error::from(ErrorKind::StorageFull);
        let mut tries = 0;
        let mut third = |_: &super::Folder| {
            tries += 1;
            if tries < 3 { Err(full()) } else { Ok(tries) }
        };
        assert_eq!(parts.making_room(&mut third).unwrap(), 3);
        assert_eq!(["0", "1", "2", "3"].map(|name| folder.has(name)), [false, false, true, true]);
        let other = parts.making_room(|_| Err::<(), _>(ErrorKind::PermissionDenied.into())).unwrap_err();
        assert!(!is_full(&other) && folder.has("2"));
        assert!(is_full(&parts.making_room(|_| Err::<(), _>(full())).unwrap_err()) && !folder.has("3"));
    }
}
