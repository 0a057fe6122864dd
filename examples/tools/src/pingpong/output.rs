//! Standard output. When its reader has closed the pipe, further output is dropped. Every other
//! error is a failure of the program.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::OnceLock;

use super::failure::Failure;

/// The first error of standard output in this process.
static LOST: OnceLock<io::Error> = OnceLock::new();

/// The stream to which tables are printed.
pub struct Output {
    /// The stream; `None` after an error.
    to: Option<Box<dyn Write>>,
    /// The variable for the first error. Standard error has none, because there is no stream to
    /// report it on.
    lost: Option<&'static OnceLock<io::Error>>,
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output").field("open", &self.to.is_some()).finish()
    }
}

impl Output {
    /// Returns standard output.
    #[must_use]
    pub fn stdout() -> Self {
        Self { to: Some(Box::new(io::stdout())), lost: Some(&LOST) }
    }

    /// Returns standard error, for tables when standard output carries JSON.
    #[must_use]
    pub fn stderr() -> Self {
        Self { to: Some(Box::new(io::stderr())), lost: None }
    }

    /// Prints a text without a line break. After an error, this and all further text is dropped.
    /// [`Output::finish`] reports the error, unless the reader has closed the stream, which is no
    /// error.
    pub fn text(&mut self, text: &str) {
        let Some(to) = &mut self.to else { return };
        if let Err(error) = to.write_all(text.as_bytes()).and_then(|()| to.flush()) {
            self.to = None;
            if let Some(lost) = self.lost.filter(|_| error.kind() != ErrorKind::BrokenPipe) {
                lost.get_or_init(|| error);
            }
        }
    }

    /// Checks that all of standard output was written. Called once, at the end of the program.
    ///
    /// # Errors
    /// Returns the first error of standard output in this process.
    pub fn finish() -> Result<(), Failure> {
        LOST.get().map_or(Ok(()), |error| Err(Failure::new(format!("standard output: {error}"))))
    }

    /// Prints a text and a line break.
    pub fn line(&mut self, line: impl fmt::Display) {
        self.text(&format!("{line}\n"));
    }
}
