//! Standard output, until its reader closes it.

use std::fmt;
use std::io::{self, Write};

/// The destination of tables.
pub struct Output {
    /// The stream; `None` once its reader has closed it.
    to: Option<Box<dyn Write>>,
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
        Self { to: Some(Box::new(io::stdout())) }
    }

    /// Returns standard error, for use when standard output carries something else.
    #[must_use]
    pub fn stderr() -> Self {
        Self { to: Some(Box::new(io::stderr())) }
    }

    /// Prints a text as it is. If the reader has closed the stream, that is no error, and later text is dropped.
    pub fn text(&mut self, text: &str) {
        let printed = self.to.as_mut().map(|to| to.write_all(text.as_bytes()).and_then(|()| to.flush()));
        if let Some(Err(_)) = printed {
            self.to = None;
        }
    }

    /// Prints a line.
    pub fn line(&mut self, line: impl fmt::Display) {
        self.text(&format!("{line}\n"));
    }
}
