//! The data that a connection needs until it is up, or until the next attempt to connect starts.

use std::collections::VecDeque;

use crate::device::pool::Buffer;

/// The data of a connection that is not up yet. The states of such a connection pass this data on from one to the next.
#[derive(Debug, Default)]
pub(crate) struct Setup {
    /// The host name of the peer, if the connection was opened by name.
    pub(super) host: Option<Box<str>>,
    /// True if the connection comes up only when the peer's device has acknowledged the hello.
    pub(super) probes: bool,
    /// The private data of the local connect request.
    pub(super) private_data: Vec<u8>, // local: private data of the program
    /// The greetings of the active and of the passive side, as they were sent. Empty if the connection will not be secured.
    pub(super) greetings: Vec<u8>, // bound: private-data
    /// Messages that arrived at the active side before its connection manager reported that the connection is up.
    pub(super) early: VecDeque<Early>, // bound: receives
}

/// A message without a header that arrived before the connection was reported as up.
#[derive(Debug)]
pub(super) struct Early {
    pub(super) buffer: Buffer,
    pub(super) len: u32,
    pub(super) immediate: Option<u32>,
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use crate::config::{Config, Framing};
    use crate::conn::greeting::Greeting;
    use crate::conn::{Connection, Opening, Role};
    use crate::error::RejectReason;
    use crate::id::{ConnectionId, ReactorTag};
    use crate::security::Security;

    #[test]
    fn another_attempt_sends_the_programs_private_data_and_not_the_peers() {
        #[allow(clippy::disallowed_methods, reason = "a point in time to count from")]
        let now = Instant::now();
        let (id, config) = (ConnectionId::new(ReactorTag::next(), 0, 1), Config::default());
        let opening = Opening {
            framing: Framing::Credits,
            peer: ([127, 0, 0, 1], 1).into(),
            host: Some("host".into()),
            private_data: b"ours".to_vec(),
            probes: true,
            security: Security::Plain,
        };
        let mut conn = Connection::new(id, Role::Active, opening, &config, now);
        assert!(conn.resolved());
        // A connection that will be secured has processed the peer's greeting, but its handshake may still fail.
        conn.agree(&Greeting::reject(RejectReason::Refused, b"theirs"), 64, false, &config);
        assert_eq!(conn.private_data(), b"theirs");
        let again = conn.reopening().expect("it is not up");
        assert_eq!((&*again.private_data, again.host.as_deref()), (&b"ours"[..], Some("host")));
        assert!(again.probes);
    }
}
