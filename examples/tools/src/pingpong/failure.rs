//! The results of the program.

use std::fmt;

/// The result of a command that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The command did everything; or it was a server that the user ended, which ends in no other way.
    Complete,
    /// The user stopped the command before everything was done, and the results so far were printed.
    Interrupted,
}

/// A failure, in one line that names the value and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(String);

impl Failure {
    /// Makes a failure. Line breaks become spaces.
    #[must_use]
    pub fn new(what: impl fmt::Display) -> Self {
        Self(what.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
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
