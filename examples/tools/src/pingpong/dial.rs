//! The attempts to connect to a server. They try the server's addresses in turn, and are repeated while the server prepares for a
//! measurement.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_reactor::transport::cm::ConnectFailure;
use rdma_reactor::{ConnectError, RejectReason};

use super::failure::{Failure, flags_for};
use super::job::Reply;

/// The time for which a connect to a busy server is retried.
const PATIENCE: Duration = Duration::from_secs(3);
/// The time for which a connect is retried while the server prepares for this client's measurement. This time is longer than one attempt
/// may take.
const PATIENCE_ADAPTING: Duration = Duration::from_secs(10);
/// The pause between two attempts. A shorter pause would expose a fault of siw: if a client connects just when a siw device begins to
/// listen, the request is never answered. The next client's request is then answered only when another client connects. See
/// tests/vm/README.md.
const PAUSE: Duration = Duration::from_millis(50);

/// The decision after a failed connect.
#[derive(Debug, PartialEq, Eq)]
pub enum DialDecision {
    /// Connect again after this pause.
    Again(Duration),
    /// Give up.
    Fail(Failure),
}

/// The addresses of a server, and the state of the attempts.
// local: addresses of the server
#[derive(Clone, Debug)]
pub struct Dial {
    addresses: Vec<SocketAddr>,
    at: usize,
    /// The time until which the client retries. Set when the server has replied that it is busy or preparing.
    until: Option<Instant>,
}

impl Dial {
    /// Makes the state of the attempts to connect to one server, which has these addresses.
    ///
    /// # Panics
    /// Panics if `addresses` is empty.
    #[must_use]
    pub fn new(addresses: Vec<SocketAddr>) -> Self {
        assert!(!addresses.is_empty(), "a host has an address");
        Self { addresses, at: 0, until: None }
    }

    /// Returns the address of the next attempt.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.addresses[self.at]
    }

    /// Returns the state of the attempts for another connection. They use only the address that
    /// worked.
    #[must_use]
    pub fn again(&self) -> Self {
        Self::new(vec![self.address()])
    }

    /// Handles a failed connect. Returns the decision.
    pub fn failed(&mut self, error: &ConnectError, now: Instant) -> DialDecision {
        let server = self.address();
        let reply = match error {
            ConnectError::Rejected { reason: RejectReason::Refused, private_data } => Reply::decode(private_data),
            _ => None,
        };
        let in_a_moment = match (&reply, error) {
            (Some(Reply::Adapting | Reply::Busy), _) => true,
            (Some(Reply::Refused(_)), _) => false,
            // The connect failed without a reply of the server. While a server prepares, it has no listener for a moment. The requests
            // that wait at a device's listener are then refused without a reason, or never answered. So the connect is retried.
            (None, _) => self.until.is_some(),
        };
        let patience = if matches!(reply, Some(Reply::Busy)) { PATIENCE } else { PATIENCE_ADAPTING };
        if in_a_moment && now < *self.until.get_or_insert(now + patience) {
            return DialDecision::Again(PAUSE);
        }
        let elsewhere = matches!(error, ConnectError::Transport(_) | ConnectError::Timeout);
        if elsewhere && self.at + 1 < self.addresses.len() {
            self.at += 1;
            return DialDecision::Again(Duration::ZERO);
        }
        DialDecision::Fail(Failure::new(match (reply, error) {
            (Some(Reply::Busy | Reply::Adapting), _) => {
                format!("the server {server} is busy with another client: try again later")
            }
            (Some(Reply::Refused(why)), _) => {
                format!("the server {server} refused: {why}; use the same version of rdma-pingpong on both sides")
            }
            (None, ConnectError::Rejected { reason: RejectReason::Busy, .. }) => {
                format!("the server {server} has reached a limit: try a smaller --size or --tx-depth")
            }
            (None, ConnectError::Rejected { reason: RejectReason::Security(mode), .. }) => {
                format!("cannot connect to {server}: {}", flags_for(*mode))
            }
            (None, ConnectError::Rejected { reason, .. }) => {
                format!("{server} is not an rdma-pingpong server: rejected, {reason}")
            }
            (None, ConnectError::Transport(ConnectFailure::Refused)) => {
                format!("nothing listens on {server}: start `rdma-pingpong server` there, or check the port")
            }
            (None, ConnectError::Transport(ConnectFailure::PeerClosed | ConnectFailure::Protocol(_))) => {
                format!("{server} is not an rdma-pingpong server: {error}; check the address and the port")
            }
            (None, ConnectError::Timeout | ConnectError::Transport(ConnectFailure::Timeout)) => {
                format!("no answer from {server}: is it an rdma-pingpong server? check the address, port and firewall")
            }
            (None, error) => format!("cannot connect to {server}: {error}; check the address and the port"),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dial() -> Dial {
        Dial::new(vec!["127.0.0.1:1".parse().unwrap(), "127.0.0.1:2".parse().unwrap()])
    }

    fn rejected(reply: &Reply) -> ConnectError {
        ConnectError::Rejected { reason: RejectReason::Refused, private_data: reply.encode() }
    }

    #[test]
    fn addresses_are_tried_in_turn() {
        let (mut dial, now) = (dial(), Instant::now());
        let refused = ConnectError::Transport(ConnectFailure::Refused);
        assert_eq!(dial.failed(&refused, now), DialDecision::Again(Duration::ZERO));
        assert_eq!(dial.address().port(), 2);
        let DialDecision::Fail(failure) = dial.failed(&refused, now) else { panic!("there is no third address") };
        assert!(failure.to_string().starts_with("nothing listens on 127.0.0.1:2"));
    }

    #[test]
    fn a_server_that_adapts_may_be_gone_for_a_moment_and_no_longer() {
        let (mut dial, now) = (dial(), Instant::now());
        assert_eq!(dial.failed(&rejected(&Reply::Adapting), now), DialDecision::Again(PAUSE));
        let refused = ConnectError::Transport(ConnectFailure::Refused);
        assert_eq!(dial.failed(&refused, now), DialDecision::Again(PAUSE));
        let wordless = ConnectError::Rejected { reason: RejectReason::Refused, private_data: Vec::new() };
        assert_eq!(dial.failed(&wordless, now), DialDecision::Again(PAUSE));
        assert_eq!(dial.failed(&ConnectError::Timeout, now), DialDecision::Again(PAUSE));
        assert_eq!(dial.failed(&rejected(&Reply::Busy), now), DialDecision::Again(PAUSE));
        assert_eq!(dial.address().port(), 1);
        assert!(matches!(dial.failed(&rejected(&Reply::Busy), now + PATIENCE_ADAPTING), DialDecision::Fail(_)));
    }

    #[test]
    fn a_reason_reaches_the_user() {
        let (mut dial, now) = (dial(), Instant::now());
        let DialDecision::Fail(failure) = dial.failed(&rejected(&Reply::Refused("unknown mode 7".into())), now) else {
            panic!("there is nothing to try again")
        };
        assert!(failure.to_string().contains("unknown mode 7"));
    }
}
