//! The keepalive of a connection. It decides when a silent peer is pinged, and when the peer counts as lost. It does no I/O, and reads no
//! clock.

use std::time::{Duration, Instant};

/// The time until the next check of a peer that has exceeded a timeout while its input may be
/// unprocessed.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// The limits on a peer's silence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// The silence after which the peer is pinged.
    pub(crate) interval: Duration,
    /// The silence after which the peer counts as lost.
    pub(crate) timeout: Duration,
}

/// The signs of life of one peer, and the pings to it.
#[derive(Debug)]
pub(crate) struct Keepalive {
    /// The time of the last sign of life: a message, the end of a Read, or bytes that the transport
    /// received.
    pub(super) heard: Instant,
    /// The time of the last ping. `None` if the peer has answered it, or none was sent.
    pinged: Option<Instant>,
    /// True if a ping must be sent.
    pub(crate) owes_ping: bool,
    /// True if a pong must be sent.
    pub(crate) owes_pong: bool,
}

/// The result of a check of a peer's silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The peer may be silent until this time. The next check takes place at this time.
    Wait(Instant),
    /// The peer has exceeded its timeout, but may have sent something that was not processed yet. The next check takes place at this time.
    Suspect(Instant),
    /// The peer counts as lost.
    Lost,
}

impl Keepalive {
    pub(crate) const fn new(now: Instant) -> Self {
        Self { heard: now, pinged: None, owes_ping: false, owes_pong: false }
    }

    /// Judges the silence of the peer. `caught_up` is true if the reactor has processed everything
    /// that the peer has sent.
    pub(crate) fn check(&mut self, now: Instant, caught_up: bool, patience: &Patience) -> Verdict {
        let heard = self.heard;
        if now.saturating_duration_since(heard) < patience.interval {
            return Verdict::Wait(heard + patience.interval);
        }
        // The ping counts as answered if the peer's last sign of life is not older than the ping. On a coarse clock, the ping and the
        // answer may have the same time.
        self.pinged = self.pinged.filter(|&pinged| pinged > heard);
        let pinged = *self.pinged.get_or_insert_with(|| {
            self.owes_ping = true;
            now
        });
        // If the ping was sent late, the peer still gets the same time to answer as after a ping that was sent on time.
        let answer_time = patience.timeout.saturating_sub(patience.interval);
        let end = (heard + patience.timeout).max(pinged + answer_time);
        if now < end {
            // The peer may answer this ping and then fall silent again. Check early enough to send the next ping on time.
            let next_ping = pinged + patience.interval;
            Verdict::Wait(if now < next_ping { end.min(next_ping) } else { end })
        } else if caught_up {
            Verdict::Lost
        } else {
            Verdict::Suspect(now + LOOK_AGAIN)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience { interval: Duration::from_secs(5), timeout: Duration::from_secs(15) };

    fn start() -> Instant {
        #[allow(clippy::disallowed_methods, reason = "a point in time to count from")]
        Instant::now()
    }

    /// Judges the silence of a peer whose last sign of life was at `heard`.
    fn check(peer: &mut Keepalive, now: Instant, heard: Instant, caught_up: bool, patience: &Patience) -> Verdict {
        peer.heard = heard;
        peer.check(now, caught_up, patience)
    }

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_silent_peer_is_asked_and_given_up_on_time() {
        let t0 = start();
        let mut peer = Keepalive::new(t0);
        let heard = t0 + s(1);
        assert_eq!(check(&mut peer, t0 + s(5), heard, true, &PATIENCE), Verdict::Wait(t0 + s(6)));
        assert!(!peer.owes_ping);
        assert_eq!(check(&mut peer, t0 + s(6), heard, true, &PATIENCE), Verdict::Wait(t0 + s(11)));
        assert!(std::mem::take(&mut peer.owes_ping));
        assert_eq!(check(&mut peer, t0 + s(11), heard, true, &PATIENCE), Verdict::Wait(t0 + s(16)));
        assert!(!peer.owes_ping, "it is pinged once");
        assert_eq!(check(&mut peer, t0 + s(16), heard, true, &PATIENCE), Verdict::Lost);
    }

    #[test]
    fn a_peer_that_answers_is_asked_again_in_the_next_silence() {
        let t0 = start();
        let mut peer = Keepalive::new(t0);
        check(&mut peer, t0 + s(5), t0, true, &PATIENCE);
        assert!(std::mem::take(&mut peer.owes_ping));
        assert_eq!(check(&mut peer, t0 + s(10), t0 + s(6), true, &PATIENCE), Verdict::Wait(t0 + s(11)));
        assert_eq!(check(&mut peer, t0 + s(11), t0 + s(6), true, &PATIENCE), Verdict::Wait(t0 + s(16)));
        assert!(peer.owes_ping);
        assert_eq!(check(&mut peer, t0 + s(16), t0 + s(6), true, &PATIENCE), Verdict::Wait(t0 + s(21)));
        assert_eq!(
            check(&mut peer, t0 + s(21), t0 + s(6), true, &PATIENCE),
            Verdict::Lost,
            "15 s after its last message"
        );
    }

    #[test]
    fn an_answer_at_the_time_of_the_question_counts() {
        let t0 = start();
        let mut peer = Keepalive::new(t0);
        check(&mut peer, t0 + s(5), t0, true, &PATIENCE);
        assert!(std::mem::take(&mut peer.owes_ping));
        let heard = t0 + s(5);
        assert_eq!(check(&mut peer, t0 + s(10), heard, true, &PATIENCE), Verdict::Wait(t0 + s(15)));
        assert!(peer.owes_ping, "it is pinged again");
    }

    #[test]
    fn a_side_that_was_away_itself_gives_time_to_answer() {
        let t0 = start();
        let mut peer = Keepalive::new(t0);
        assert_eq!(check(&mut peer, t0 + s(60), t0, true, &PATIENCE), Verdict::Wait(t0 + s(65)));
        assert!(peer.owes_ping);
        assert_eq!(check(&mut peer, t0 + s(65), t0, true, &PATIENCE), Verdict::Wait(t0 + s(70)));
        assert_eq!(check(&mut peer, t0 + s(70), t0 + s(61), true, &PATIENCE), Verdict::Wait(t0 + s(75)));
    }

    #[test]
    fn no_verdict_while_something_is_left_to_look_at() {
        let t0 = start();
        let mut peer = Keepalive::new(t0);
        check(&mut peer, t0 + s(5), t0, true, &PATIENCE);
        let Verdict::Suspect(again) = check(&mut peer, t0 + s(15), t0, false, &PATIENCE) else { panic!("a verdict") };
        assert!(again > t0 + s(15) && again < t0 + s(16));
        assert_eq!(check(&mut peer, again, t0, true, &PATIENCE), Verdict::Lost);
    }
}
