//! The results of a command of the program.

use std::fmt;

use rdma_reactor::{ConnectError, RejectReason, SecurityMode};

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
// local: a text
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(String);

impl Failure {
    /// Makes a failure with this text. Line breaks become spaces. Hidden characters are escaped, because the text may quote a peer.
    #[must_use]
    pub fn new(what: impl fmt::Display) -> Self {
        Self(text::shown(&what.to_string().split_whitespace().collect::<Vec<_>>().join(" ")))
    }

    /// Makes the failure of a connect. `server` is the program that must run at the peer. The
    /// failure names it only if nothing has answered.
    #[must_use]
    pub fn no_connection(error: &ConnectError, server: &str) -> Self {
        Self::new(match error {
            ConnectError::Rejected { reason: RejectReason::Security(mode), .. } => {
                format!("no connection: {}", flags_for(*mode))
            }
            ConnectError::Transport(_) | ConnectError::Timeout => {
                format!("no connection: {error}; is {server} running there?")
            }
            _ => format!("no connection: {error}"),
        })
    }
}

/// Returns the cure for a peer with another security mode, as flags of the command line.
pub(super) fn flags_for(mode: SecurityMode) -> String {
    match mode {
        SecurityMode::Plain => "the peer takes plain connections: leave out the flags --tls-... and --psk-file".into(),
        SecurityMode::Tls => "the peer takes TLS: give --tls-cert, --tls-key and --tls-ca".into(),
        SecurityMode::Psk => "the peer takes a pre-shared key: give --psk-file".into(),
        _ => format!("the peer takes {mode}"),
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
    fn the_failure_of_a_connect_names_flags_and_asks_only_who_has_not_answered() {
        let of = |error| Failure::no_connection(&error, "`x server`").to_string();
        let rejected = |reason| ConnectError::Rejected { reason, private_data: Vec::new() };
        for (mode, cure) in [
            (SecurityMode::Plain, "plain connections: leave out the flags --tls-... and --psk-file"),
            (SecurityMode::Tls, "TLS: give --tls-cert, --tls-key and --tls-ca"),
            (SecurityMode::Psk, "a pre-shared key: give --psk-file"),
        ] {
            assert_eq!(of(rejected(RejectReason::Security(mode))), format!("no connection: the peer takes {cure}"));
        }
        assert!(!of(rejected(RejectReason::Busy)).contains("running"));
        assert!(of(ConnectError::Timeout).ends_with("; is `x server` running there?"));
    }

    #[test]
    fn a_failure_is_one_line_that_commands_no_terminal() {
        let failure = Failure::new("the server refused:\n\x1b[2J\u{202e}why\u{85}not");
        assert_eq!(failure.to_string(), "the server refused: \\u{1b}[2J\\u{202e}why not");
        assert_eq!(Failure::new(&failure), failure);
    }
}
