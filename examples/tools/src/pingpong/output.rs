//! Standard output. When its reader has closed the pipe, further output is dropped.

use std::fmt;
use std::io::{self, Write};

/// The stream to which tables are printed.
pub struct Output {
    /// The stream; `None` if its reader has closed it.
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

    /// Returns standard error, for tables when standard output carries JSON.
    #[must_use]
    pub fn stderr() -> Self {
        Self { to: Some(Box::new(io::stderr())) }
    }

    /// Prints a text without a line break. If the reader has closed the stream, that is no error, and the text is dropped.
    pub fn text(&mut self, text: &str) {
        let printed = self.to.as_mut().map(|to| to.write_all(text.as_bytes()).and_then(|()| to.flush()));
        if let Some(Err(_)) = printed {
            self.to = None;
        }
    }

    /// Prints a text and a line break.
    pub fn line(&mut self, line: impl fmt::Display) {
        self.text(&format!("{line}\n"));
    }
}
