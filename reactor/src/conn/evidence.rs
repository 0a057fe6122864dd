//! The evidence of why a connection ends, and the rule for choosing between two reports.
//!
//! Devices, connection managers and peers report the same end of a connection in several ways and in any order. The first report is kept,
//! unless a later one is better:
//!
//! | kept so far | is replaced by | because |
//! |---|---|---|
//! | `Flushed` | `Disconnected`, `Truncated`, `Terminated`, `Transport`, `Removed`, `Goodbye` | a flushed work request is a consequence |
//! | `Unposted` | the same reports except `Disconnected` | the peer is not to blame for work requests that could not be posted |
//! | `Disconnected`, `Truncated` | `Goodbye` | the goodbye was sent before the transport ended |
//! | `Terminated` | `Failed` | both report one fault, and the work request names it |
//! | all others | nothing | |
//!
//! A `Disconnected` after `Unposted` makes the kept report final, so that no later report replaces it.

use rdma_transport::cm::DisconnectCause;
use rdma_transport::wc::Failure;

use crate::config::Framing;
use crate::error::DisconnectReason;

/// A report of why a connection ends.
#[derive(Clone, Debug, PartialEq, Eq)]
// local: the text of one error
pub(crate) enum Evidence {
    /// A work request was flushed. The connection manager may report the cause.
    Flushed(Failure),
    /// Work requests could not be posted. The connection manager may report the cause.
    Unposted(String),
    /// The transport ended in the regular way. With `Framing::Raw`, which has no goodbye, this means that the peer has closed the
    /// connection. With `Framing::Credits` the peer is lost.
    Disconnected(Framing),
    /// The peer's TCP stream ended in the middle of a message.
    Truncated,
    /// The peer's transport reported that the local side has violated the transport protocol. The text names the violation.
    Terminated(String),
    /// A work request failed.
    Failed(Failure),
    /// The transport failed for a reason that no other variant describes.
    Transport(DisconnectCause),
    /// The device was removed.
    Removed,
    /// The peer's program has closed the connection.
    Goodbye,
    /// The local side has ended the connection: the program closed it, a time limit was exceeded, or the peer violated the protocol.
    Decided(DisconnectReason),
}

impl Evidence {
    /// Returns true if better evidence may still arrive. In this case, the end of the connection is not reported yet.
    pub(super) const fn is_guess(&self) -> bool {
        matches!(self, Self::Flushed(_) | Self::Unposted(_))
    }

    /// Returns true if only the end of the transport is known, and not its cause. Messages that the peer sent before that end may not be
    /// processed yet.
    pub(super) const fn is_loss(&self) -> bool {
        matches!(self, Self::Disconnected(_) | Self::Truncated)
    }

    /// Returns true if the peer has closed the connection.
    pub(super) const fn is_parting(&self) -> bool {
        matches!(self, Self::Goodbye | Self::Disconnected(Framing::Raw))
    }

    /// Returns the reason that is reported to the program.
    pub(super) fn reason(self) -> DisconnectReason {
        match self {
            Self::Flushed(failure) | Self::Failed(failure) => {
                DisconnectReason::Transport(DisconnectCause::WorkRequest(failure))
            }
            Self::Unposted(why) => DisconnectReason::Internal(why),
            Self::Goodbye | Self::Disconnected(Framing::Raw) => DisconnectReason::Closed,
            Self::Truncated | Self::Disconnected(Framing::Credits) => DisconnectReason::Lost,
            Self::Terminated(what) => DisconnectReason::Transport(DisconnectCause::TerminatedByPeer(what)),
            Self::Transport(cause) => DisconnectReason::Transport(cause),
            Self::Removed => DisconnectReason::DeviceRemoved,
            Self::Decided(reason) => reason,
        }
    }
}

/// Returns the better of two reports by the table of the [module](self). `held` arrived before `found`.
pub(super) fn better(held: Evidence, found: Evidence) -> Evidence {
    use Evidence::{
        Decided, Disconnected, Failed, Flushed, Goodbye, Removed, Terminated, Transport, Truncated, Unposted,
    };
    match held {
        Flushed(_) => match found {
            Disconnected(_) | Truncated | Terminated(_) | Transport(_) | Removed | Goodbye => found,
            Flushed(_) | Unposted(_) | Failed(_) | Decided(_) => held,
        },
        Unposted(why) => match found {
            Truncated | Terminated(_) | Transport(_) | Removed | Goodbye => found,
            Disconnected(_) => Decided(DisconnectReason::Internal(why)),
            Flushed(_) | Unposted(_) | Failed(_) | Decided(_) => Unposted(why),
        },
        Disconnected(_) | Truncated => match found {
            Goodbye => found,
            Flushed(_) | Unposted(_) | Disconnected(_) | Truncated | Terminated(_) | Failed(_) | Transport(_)
            | Removed | Decided(_) => held,
        },
        Terminated(_) => match found {
            Failed(_) => found,
            Flushed(_) | Unposted(_) | Disconnected(_) | Truncated | Terminated(_) | Transport(_) | Removed
            | Goodbye | Decided(_) => held,
        },
        Failed(_) | Transport(_) | Removed | Goodbye | Decided(_) => held,
    }
}

#[cfg(test)]
mod tests {
    use rdma_transport::wc::WcStatus;

    use super::*;

    const KINDS: usize = 11;

    /// Returns the row of `TABLE` for this evidence. A new kind of evidence needs a new row.
    const fn row(evidence: &Evidence) -> usize {
        match evidence {
            Evidence::Flushed(_) => 0,
            Evidence::Unposted(_) => 1,
            Evidence::Disconnected(Framing::Credits) => 2,
            Evidence::Disconnected(Framing::Raw) => 3,
            Evidence::Truncated => 4,
            Evidence::Terminated(_) => 5,
            Evidence::Failed(_) => 6,
            Evidence::Transport(_) => 7,
            Evidence::Removed => 8,
            Evidence::Goodbye => 9,
            Evidence::Decided(_) => KINDS - 1,
        }
    }

    /// Returns evidence of each kind, in the order of the rows. `nth` makes the values of two calls different.
    fn each(nth: u32) -> [Evidence; KINDS] {
        let failure = |status| Failure { status, vendor_error: nth };
        let each = [
            Evidence::Flushed(failure(WcStatus::Flushed)),
            Evidence::Unposted(nth.to_string()),
            Evidence::Disconnected(Framing::Credits),
            Evidence::Disconnected(Framing::Raw),
            Evidence::Truncated,
            Evidence::Terminated(nth.to_string()),
            Evidence::Failed(failure(WcStatus::RetryExceeded)),
            Evidence::Transport(DisconnectCause::Path(nth.to_string())),
            Evidence::Removed,
            Evidence::Goodbye,
            Evidence::Decided(DisconnectReason::Internal(nth.to_string())),
        ];
        assert_eq!(each.each_ref().map(row), std::array::from_fn(|at| at));
        each
    }

    /// One row for each kind of evidence that is kept so far. A row has a letter for each kind of evidence that is found later. `h`: the
    /// kept one stays. `f`: the found one replaces it. `c`: the kept one stays, and later evidence no longer replaces it.
    const TABLE: [&str; KINDS] = [
        "hhffffhfffh",
        "hhccffhfffh",
        "hhhhhhhhhfh",
        "hhhhhhhhhfh",
        "hhhhhhhhhfh",
        "hhhhhhfhhhh",
        "hhhhhhhhhhh",
        "hhhhhhhhhhh",
        "hhhhhhhhhhh",
        "hhhhhhhhhhh",
        "hhhhhhhhhhh",
    ];

    #[test]
    fn the_first_evidence_counts_unless_a_later_one_is_better() {
        for (held, row) in each(1).into_iter().zip(TABLE) {
            for (found, letter) in each(2).into_iter().zip(row.chars()) {
                let counts = match letter {
                    'h' => held.clone(),
                    'f' => found.clone(),
                    _ => Evidence::Decided(held.clone().reason()),
                };
                assert_eq!(better(held.clone(), found.clone()), counts, "{held:?}, then {found:?}");
            }
        }
    }

    #[test]
    fn an_end_waits_for_better_evidence_only_while_there_can_be_some() {
        for (held, row) in each(1).into_iter().zip(TABLE) {
            // Evidence is a guess if a later `Disconnected` replaces it. The letters for `Disconnected` are in column 2, counted from 0.
            // The connection manager reports `Disconnected` at the end of each connection.
            let corrected = row.chars().nth(2).is_some_and(|letter| letter != 'h');
            assert_eq!(held.is_guess(), corrected, "{held:?}");
        }
    }
}
