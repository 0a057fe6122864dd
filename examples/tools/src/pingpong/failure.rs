//! The results of a command of the program.

use std::fmt;

use crate::text;

/// The result of a successful command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The command has done all of its work. For a server, this means that the user has ended it.
    Complete,
    /// The user interrupted the command before its work was done. The results so far were printed.
    Interrupted,
}

/// A failure, described in one line with the wrong value and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(String);

impl Failure {
    /// Makes a failure with this text. Line breaks become spaces. Hidden characters are escaped, because the text may quote a peer.
    #[must_use]
    pub fn new(what: impl fmt::Display) -> Self {
        Self(text::shown(&what.to_string().split_whitespace().collect::<Vec<_>>().join(" ")))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

impl From<rdma_reactor::Error> for Failure {
    fn from(error: rdma_reactor::Error) -> Self {
        Self::new(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_that_commands_no_terminal() {
        let failure = Failure::new("the server refused:\n\x1b[2J\u{202e}why\u{85}not");
        assert_eq!(failure.to_string(), "the server refused: \\u{1b}[2J\\u{202e}why not");
        assert_eq!(Failure::new(&failure), failure);
    }
}
