//! A file that is read or written sequentially, with a hash of the bytes so far.
//!
//! The hash is BLAKE3. It detects errors that the checksums of the transport do not detect, such as a wrong file, a failing disk or a bug
//! in this program. One processor hashes several bytes in a nanosecond, so the hash does not slow down a copy.

use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom, Write};

use super::wire::Hash;

/// The number of bytes that are hashed in one turn of the reactor. Hashing them takes a few milliseconds, during which other connections
/// must wait.
const SLICE: u64 = 8 << 20;

/// A file that is accessed sequentially, with the hash of its bytes so far; see the [module](self).
#[derive(Debug)]
pub struct Hashed {
    file: File,
    hasher: blake3::Hasher,
    at: u64,
}

impl Hashed {
    /// Wraps a file. The position in the file must be 0.
    #[must_use]
    pub fn new(file: File) -> Self {
        Self { file, hasher: blake3::Hasher::new(), at: 0 }
    }

    /// Returns the metadata of the file.
    ///
    /// # Errors
    /// The system call failed.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Returns the position in the file, in bytes.
    #[must_use]
    pub const fn at(&self) -> u64 {
        self.at
    }

    /// Returns the hash of all bytes before the position.
    #[must_use]
    pub fn hash(&self) -> Hash {
        self.hasher.finalize().into()
    }

    /// Reads the next `len` bytes.
    ///
    /// # Errors
    /// The system call failed. The error is `UnexpectedEof` if the file has fewer bytes.
    pub fn read(&mut self, len: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(len as usize);
        (&self.file).take(len).read_to_end(&mut bytes)?;
        if (bytes.len() as u64) < len {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it became shorter meanwhile"));
        }
        self.pass(&bytes);
        Ok(bytes)
    }

    /// Appends `bytes` to the file.
    ///
    /// # Errors
    /// The system call failed. The file is unchanged then, so the caller may retry.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Err(error) = self.file.write_all(bytes) {
            self.file.set_len(self.at)?;
            self.file.seek(SeekFrom::Start(self.at))?;
            return Err(error);
        }
        self.pass(bytes);
        Ok(())
    }

    /// Reads and hashes more bytes of the file, up to the position `end`. Returns true if `end` is reached.
    ///
    /// # Errors
    /// Those of [`Hashed::read`].
    pub fn hash_next(&mut self, end: u64) -> io::Result<bool> {
        let len = (end - self.at).min(SLICE);
        self.read(len)?;
        Ok(self.at == end)
    }

    /// Moves the position to the beginning of the file, and restarts the hash.
    ///
    /// # Errors
    /// The system call failed.
    pub fn rewind(&mut self) -> io::Result<()> {
        self.file.rewind()?;
        self.hasher.reset();
        self.at = 0;
        Ok(())
    }

    /// Empties the file, and restarts the hash.
    ///
    /// # Errors
    /// The system call failed.
    pub fn clear(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.rewind()
    }

    fn pass(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
        self.at += bytes.len() as u64;
    }
}
