//! The claims of connections on the receives of a shared receive queue. A claim limits the number of receives that its
//! connection may promise to its peer. This file does no I/O, and gets the time as an argument.
//!
//! Each connection has a *claim*: a number of receives that are set aside for it. A part of them is promised to its
//! peer as credits. Another part is *kept*: these receives contain messages that the program holds, or messages that
//! the reactor delivers only after an earlier large message. Two rules hold:
//!
//! - The sum of all claims is at most the number of receives.
//! - The receives that a connection has promised, and those that are kept for it, together are at most its claim.
//!
//! So every promise has a posted receive, in whatever order the peers use their promises:
//!
//! ```text
//! posted = receives - kept        sum(promised + kept) <= sum(claims) <= receives        =>  sum(promised) <= posted
//! ```
//!
//! A claim is never below [`MIN_WINDOW`], so that every connection makes progress. Beyond [`MIN_WINDOW`], it grows with
//! the messages that the connection has received in about the last second, and with those that the program keeps. This
//! part grows at most to half of the receives that are unclaimed or already belong to it. So a single busy connection
//! leaves half of these receives unclaimed, and several busy connections get about equal claims.
//!
//! A promise cannot be withdrawn. To shrink a claim, the connection does not renew the promises that its peer has used.
//!
//! A connection whose peer has no credit for data, because its program keeps messages and too few
//! receives are unclaimed, has nothing to post, so it would not renew its claim by itself. It
//! *waits*: when receives become unclaimed, [`Claims::take_due`] returns the connections that can
//! get what they need.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::id::ConnectionId;
use crate::limits::{CONTROL_CREDITS, MIN_WINDOW};

/// Time after which a received message counts only half for the size of the claim.
const HALF_LIFE: Duration = Duration::from_secs(1);

/// The claims on the receives of one queue. Each connection stores its own [`Claim`]; this type
/// stores only the number of unclaimed receives, and the connections that wait for them.
#[derive(Debug)]
pub(crate) struct Claims {
    free: u32,
    /// The connections that wait, by the number of unclaimed receives that each of them needs, and
    /// then by the order in which they began to wait.
    waiting: BTreeMap<(u32, u64), ConnectionId>, // bound: connections
    /// Number of times that a connection began to wait.
    waits: u64,
}

/// The receives that are set aside for one connection.
#[derive(Debug)]
pub(crate) struct Claim {
    claim: u32,
    /// Number of receives whose buffers still contain a message, so that they cannot be posted again yet.
    kept: u32,
    /// Number of messages that the connection has received recently. This number is halved once per [`HALF_LIFE`].
    used: u32,
    since: Instant,
    /// The key in [`Claims::waiting`], if the connection waits for unclaimed receives.
    waits: Option<(u32, u64)>,
}

impl Claims {
    pub(crate) const fn new(receives: u32) -> Self {
        Self { free: receives, waiting: BTreeMap::new(), waits: 0 }
    }

    /// Returns the number of receives that no connection has claimed.
    pub(crate) const fn free(&self) -> u32 {
        self.free
    }

    /// Creates the claim of a new connection: [`MIN_WINDOW`] receives, which the connection promises to its peer.
    /// Returns `None` if fewer than [`MIN_WINDOW`] receives are unclaimed.
    pub(crate) fn join(&mut self, now: Instant) -> Option<Claim> {
        self.free = self.free.checked_sub(MIN_WINDOW)?;
        Some(Claim { claim: MIN_WINDOW, kept: 0, used: 0, since: now, waits: None })
    }

    /// Adjusts the claim of a connection. Returns the number of further receives that the connection may promise to its
    /// peer now.
    ///
    /// - `promised` is the number of receives that the connection has promised and that the peer has not used yet.
    /// - `most` is the largest claim that the connection wants.
    pub(crate) fn renew(&mut self, claim: &mut Claim, promised: u32, most: u32, now: Instant) -> u32 {
        let ages = now.saturating_duration_since(claim.since).as_nanos() / HALF_LIFE.as_nanos();
        if ages > 0 {
            claim.used = claim.used.checked_shr(u32::try_from(ages).unwrap_or(u32::MAX)).unwrap_or(0);
            claim.since = now;
        }
        // The claim is always large enough for the kept messages and for the credits of control messages.
        let least = MIN_WINDOW.max(claim.kept + CONTROL_CREDITS);
        let fair = (self.free + claim.claim.saturating_sub(MIN_WINDOW)) / 2;
        let wanted = (MIN_WINDOW + fair.min((claim.used / 2).max(claim.kept))).min(most);
        let given = promised + claim.kept;
        let renewed = wanted.max(least).max(given).min(claim.claim + self.free);
        self.free = self.free + claim.claim - renewed;
        claim.claim = renewed;
        renewed.saturating_sub(given)
    }

    /// Notes after [`Claims::renew`] if the connection waits for unclaimed receives. `lacking` is
    /// the number of receives that it must be able to promise so that its peer can send data;
    /// `None` if the peer can send data. `most` is the largest claim that the connection wants.
    pub(crate) fn note_shortage(&mut self, id: ConnectionId, claim: &mut Claim, lacking: Option<u32>, most: u32) {
        self.forget(claim);
        // If the claim is at its limit because the program keeps messages, only the program can end
        // the shortage, by releasing messages.
        let needed = lacking.map(|promised| promised + claim.kept).filter(|&needed| needed <= most);
        let Some(needed) = needed else { return };
        let (least, beyond) = (needed.saturating_sub(claim.claim), needed.saturating_sub(MIN_WINDOW));
        let fair = (2 * beyond).saturating_sub(claim.claim.saturating_sub(MIN_WINDOW));
        // The receives that are unclaimed now were not enough for the renewal. So the connection
        // renews its claim again only when more receives are unclaimed than now.
        let key = (least.max(fair).max(self.free + 1), self.waits);
        self.waits += 1;
        self.waiting.insert(key, id);
        claim.waits = Some(key);
    }

    /// Notes that a connection does not wait any more, for example because it has ended.
    pub(crate) fn forget(&mut self, claim: &mut Claim) {
        if let Some(key) = claim.waits.take() {
            self.waiting.remove(&key);
        }
    }

    /// Returns true if connections wait for unclaimed receives.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Removes and returns the waiting connections for which enough receives are unclaimed, the
    /// smallest need first. The caller makes each of them renew its claim.
    pub(crate) fn take_due(&mut self) -> Vec<ConnectionId> {
        let (mut due, mut left) = (Vec::new(), self.free);
        while let Some(first) = self.waiting.first_entry().filter(|first| first.key().0 <= left) {
            left -= first.key().0;
            due.push(first.remove());
        }
        due
    }

    /// Makes this number of receives available to other connections. The receives are from the claim of a connection
    /// that has ended, and the peer of this connection cannot use them any more.
    pub(crate) const fn take_back(&mut self, receives: u32) {
        self.free += receives;
    }
}

impl Claim {
    /// Notes that a message has arrived and still occupies its receive.
    #[inline]
    pub(crate) const fn keep(&mut self) {
        self.kept += 1;
    }

    /// Notes that some of the kept receives do not contain messages any more; `receives` is their number. The caller
    /// posts these receives again before it promises further receives to the peer.
    #[inline]
    pub(crate) const fn release(&mut self, receives: u32) {
        self.kept = self.kept.saturating_sub(receives);
    }

    /// Counts a received message, so that the claim can grow. The caller does not count control messages: they need no
    /// larger claim.
    #[inline]
    pub(crate) const fn count(&mut self) {
        self.used = self.used.saturating_add(1);
    }

    /// Returns the number of receives that are set aside for the connection.
    pub(crate) const fn receives(&self) -> u32 {
        self.claim
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conn::credit::{ReceiveWindow, SendWindow};
    use crate::id::ReactorTag;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn start() -> Instant {
        #[allow(clippy::disallowed_methods, reason = "a point in time to count from")]
        Instant::now()
    }

    /// Simulates a message that arrives and is released immediately.
    fn pass(claim: &mut Claim) {
        claim.keep();
        claim.count();
        claim.release(1);
    }

    /// A connection that keeps messages waits until so many receives are unclaimed that its peer
    /// can send data. `take_due` returns it once, and not before.
    #[test]
    fn a_connection_waits_for_what_is_enough() {
        let (now, most, id) = (start(), 1000, ConnectionId::new(ReactorTag::next(), 1, 1));
        let mut claims = Claims::new(30);
        let (mut claim, mut other) = (claims.join(now).unwrap(), claims.join(now).unwrap());
        other.kept = 15;
        assert_eq!(claims.renew(&mut other, 3, most, now), 0);
        claim.kept = 5;
        assert_eq!((claims.renew(&mut claim, 3, most, now), claims.free()), (0, 4));
        // Its peer has three credits, all for control messages, so a grant needs two more.
        claims.note_shortage(id, &mut claim, Some(5), most);
        claims.take_back(2);
        assert!(claims.take_due().is_empty());
        claims.take_back(1);
        assert_eq!((claims.take_due(), claims.take_due()), (vec![id], Vec::new()));
        assert_eq!(claims.renew(&mut claim, 3, most, now), 2);
        claims.note_shortage(id, &mut claim, None, most);
        assert!(!claims.has_waiting());
        // A connection at its own limit does not wait for others.
        claims.note_shortage(id, &mut claim, Some(5), 9);
        assert!(!claims.has_waiting());
        claims.note_shortage(id, &mut claim, Some(5), most);
        assert!(claims.has_waiting());
        claims.forget(&mut claim);
        assert!(!claims.has_waiting());
    }

    #[test]
    fn busy_connections_get_the_same_and_newcomers_something() {
        let now = start();
        let mut claims = Claims::new(400);
        let mut members: Vec<Claim> = (0..4).map(|_| claims.join(now).unwrap()).collect();
        let mut promised = [MIN_WINDOW; 4];
        for round in 0..200 {
            for (i, claim) in members.iter_mut().enumerate().take(3) {
                // The peer of a busy connection uses all promises. The first connection is busy from the beginning, the
                // second and the third are busy from round 101 on.
                if i == 0 || round > 100 {
                    (0..promised[i]).for_each(|_| pass(claim));
                    promised[i] = 0;
                    promised[i] += claims.renew(claim, 0, 1000, now);
                }
            }
            if round == 100 {
                assert_eq!(promised[0], MIN_WINDOW + (400 - 4 * MIN_WINDOW) / 2, "one gets half of the free receives");
            }
        }
        assert!(promised[..3].iter().all(|p| p.abs_diff(promised[0]) <= 2), "{promised:?}");
        assert_eq!(promised[3], MIN_WINDOW, "an idle one keeps the minimum");
        assert!(claims.free() >= promised[0] - MIN_WINDOW - 3, "{} are left for another", claims.free());
    }

    #[test]
    fn a_claim_shrinks_when_it_is_used_little() {
        let now = start();
        let mut claims = Claims::new(100);
        let mut claim = claims.join(now).unwrap();
        (0..60).for_each(|_| pass(&mut claim));
        let promised = MIN_WINDOW + claims.renew(&mut claim, MIN_WINDOW, 1000, now);
        assert_eq!((promised, claims.free()), (35, 65));
        // Only one message arrives per minute. So the connection does not renew the promise that the message has used,
        // until fewer than `MIN_WINDOW` promises are left.
        for minute in 1..=40 {
            pass(&mut claim);
            let left = claim.receives() - 1;
            let more = claims.renew(&mut claim, left, 1000, now + Duration::from_secs(60 * minute));
            assert_eq!(more, u32::from(left < MIN_WINDOW));
        }
        assert_eq!((claim.receives(), claims.free()), (MIN_WINDOW, 95));
    }

    #[test]
    fn the_last_one_is_refused_and_let_in_when_another_goes() {
        let now = start();
        let mut claims = Claims::new(2 * MIN_WINDOW + 1);
        let first = claims.join(now).unwrap();
        let _second = claims.join(now).unwrap();
        assert!(claims.join(now).is_none());
        claims.take_back(first.receives());
        assert!(claims.join(now).is_some());
    }

    /// A connection of the model. The peer of the connection obeys the protocol.
    #[derive(Debug)]
    struct ModelConnection {
        claim: Claim,
        rx: ReceiveWindow,
        /// The send window of the peer.
        tx: SendWindow,
        /// Grants (new credits) on their way to the peer.
        grants: VecDeque<u32>,
        /// Number of messages on their way from the peer. Each of these messages needs a posted receive when it
        /// arrives.
        wire: u32,
        /// Number of messages that have used a receive and whose completions the reactor has not handled yet.
        arrived: u32,
        /// Number of messages that the program keeps after their callback.
        kept: u32,
    }

    #[derive(Clone, Copy, Debug)]
    enum ClaimStep {
        Join,
        /// The peer sends up to `count` messages, as far as its credits allow. The messages are control messages if
        /// `control` is true. Only control messages may use the last credits.
        Send {
            link: usize,
            count: u32,
            control: bool,
        },
        Arrive {
            link: usize,
        },
        HandleCompletion {
            link: usize,
            keep: bool,
            count: bool,
        },
        Release {
            link: usize,
        },
        /// A turn ends. The connection renews its claim, and sends a grant to the peer if `has_grant` is true.
        Renew {
            link: usize,
            has_grant: bool,
        },
        ReceiveGrant {
            link: usize,
        },
        Leave {
            link: usize,
        },
        /// The reactor has seen the completion queue empty.
        Drain,
        Wait,
    }

    fn steps() -> impl Strategy<Value = Vec<ClaimStep>> {
        let link = 0..6_usize;
        let step = prop_oneof![
            2 => Just(ClaimStep::Join),
            6 => (link.clone(), 1..20_u32, any::<bool>()).prop_map(|(link, count, control)| ClaimStep::Send { link, count, control }),
            8 => link.clone().prop_map(|link| ClaimStep::Arrive { link }),
            8 => (link.clone(), any::<bool>(), any::<bool>()).prop_map(|(link, keep, count)| ClaimStep::HandleCompletion { link, keep, count }),
            4 => link.clone().prop_map(|link| ClaimStep::Release { link }),
            6 => (link.clone(), any::<bool>()).prop_map(|(link, has_grant)| ClaimStep::Renew { link, has_grant }),
            6 => link.clone().prop_map(|link| ClaimStep::ReceiveGrant { link }),
            1 => link.prop_map(|link| ClaimStep::Leave { link }),
            1 => Just(ClaimStep::Drain),
            1 => Just(ClaimStep::Wait),
        ];
        proptest::collection::vec(step, 1..1500)
    }

    fn renew(claims: &mut Claims, link: &mut ModelConnection, most: u32, now: Instant, has_grant: bool) {
        let more = claims.renew(&mut link.claim, link.rx.outstanding(), most, now);
        link.rx.posted(more);
        if has_grant {
            link.grants.push_back(link.rx.grant());
        }
    }

    proptest! {
        /// In any sequence of steps, each message of a peer that obeys the protocol finds a posted receive. At the end,
        /// when the programs have released all kept messages, every peer can send at least `MIN_WINDOW` messages.
        #[test]
        fn every_message_meets_a_receive(
            receives in MIN_WINDOW..80, most in MIN_WINDOW..40, history in steps(),
        ) {
            let mut now = start();
            let mut claims = Claims::new(receives);
            let mut links: Vec<ModelConnection> = Vec::new();
            let mut posted = receives;
            // Three counts for all ended connections together: the receives of their claims that are not taken back yet
            // (`lingering`), their completions that are not handled yet (`unseen`), and their messages that the program
            // keeps (`astray`).
            let (mut lingering, mut unseen, mut astray) = (0, 0, 0);
            for step in history {
                let at = |link: usize, links: &[ModelConnection]| if links.is_empty() { None } else { Some(link % links.len()) };
                match step {
                    ClaimStep::Join => links.extend(claims.join(now).map(|claim| ModelConnection {
                        claim, rx: ReceiveWindow::new(MIN_WINDOW), tx: SendWindow::new(MIN_WINDOW),
                        grants: VecDeque::new(), wire: 0, arrived: 0, kept: 0,
                    })),
                    ClaimStep::Send { link, count, control } => if let Some(i) = at(link, &links) {
                        let link = &mut links[i];
                        let room = if control { link.tx.available() } else { link.tx.available_for_data() };
                        for _ in 0..count.min(room) { link.tx.take(); link.wire += 1; }
                    },
                    ClaimStep::Arrive { link } => if let Some(i) = at(link, &links).filter(|&i| links[i].wire > 0) {
                        prop_assert!(posted > 0, "a message met no receive: {links:?}");
                        posted -= 1;
                        links[i].wire -= 1;
                        links[i].arrived += 1;
                    },
                    ClaimStep::HandleCompletion { link, keep, count } => if let Some(i) = at(link, &links).filter(|&i| links[i].arrived > 0) {
                        let link = &mut links[i];
                        link.arrived -= 1;
                        prop_assert!(link.rx.received());
                        link.claim.keep();
                        if count { link.claim.count(); }
                        if keep { link.kept += 1 } else { link.claim.release(1); posted += 1; }
                    },
                    ClaimStep::Release { link } => if let Some(i) = at(link, &links).filter(|&i| links[i].kept > 0) {
                        links[i].kept -= 1;
                        links[i].claim.release(1);
                        posted += 1;
                    } else if astray > 0 {
                        astray -= 1;
                        posted += 1;
                        claims.take_back(1);
                    },
                    ClaimStep::Renew { link, has_grant } => if let Some(i) = at(link, &links) {
                        renew(&mut claims, &mut links[i], most, now, has_grant);
                    },
                    ClaimStep::ReceiveGrant { link } => if let Some(i) = at(link, &links) {
                        if let Some(grant) = links[i].grants.pop_front() { prop_assert!(links[i].tx.grant(grant).is_ok()); }
                    },
                    ClaimStep::Leave { link } => if let Some(i) = at(link, &links) {
                        // The connection ends. The messages on their way from its peer are lost. The completions of the
                        // messages that have arrived are still in the completion queue.
                        let link = links.swap_remove(i);
                        lingering += link.claim.receives() - link.kept;
                        unseen += link.arrived;
                        astray += link.kept;
                    },
                    ClaimStep::Drain => {
                        posted += std::mem::take(&mut unseen);
                        claims.take_back(std::mem::take(&mut lingering));
                    }
                    ClaimStep::Wait => now += Duration::from_millis(700),
                }
                let claimed: u32 = links.iter().map(|link| link.claim.receives()).sum();
                prop_assert_eq!(claims.free() + claimed + lingering + astray, receives, "nothing is lost or made");
                let promised: u32 = links.iter().map(|link| link.rx.outstanding() - link.arrived).sum();
                prop_assert!(promised <= posted, "{promised} promised, {posted} posted: {links:?}");
                prop_assert!(links.iter().all(|link| link.claim.receives() <= most.max(MIN_WINDOW).max(link.kept + CONTROL_CREDITS + MIN_WINDOW)));
            }
            // All programs release their messages, and all peers receive their grants. Afterwards the window of every
            // peer must be at least `MIN_WINDOW`.
            for link in &mut links {
                while link.arrived > 0 {
                    link.arrived -= 1;
                    prop_assert!(link.rx.received());
                }
                (0..std::mem::take(&mut link.kept)).for_each(|_| link.claim.release(1));
                renew(&mut claims, link, most, now, true);
                for grant in std::mem::take(&mut link.grants) { prop_assert!(link.tx.grant(grant).is_ok()); }
                prop_assert!(link.tx.available() + link.wire >= MIN_WINDOW, "{link:?}");
            }
        }
    }
}
