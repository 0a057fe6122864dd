//! Connections whose peers have not sent a complete request yet, by age and by address.
//!
//! A peer that connects and says nothing costs a socket, an endpoint and the room for one startup frame, and may not
//! keep others from connecting. So their number is limited, altogether and per address; at a limit the oldest gives way
//! once it has had a short time to send its request.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

use crate::slab::Key;

/// Names an entry. Later entries have larger tickets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket(u64);

/// A connection whose request has not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HalfOpen {
    pub(super) endpoint: Key,
    pub(super) since: Instant,
    host: Host,
}

/// What counts as one address. Of an IPv6 address only the first 64 bits count, since one host can choose the others at
/// will.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Host(IpAddr);

impl Host {
    pub(super) fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
            v4 => v4,
        })
    }
}

/// The half-open connections of a provider.
#[derive(Debug, Default)]
pub(super) struct HalfOpens {
    by_age: BTreeMap<Ticket, HalfOpen>,
    by_host: BTreeMap<Host, BTreeSet<Ticket>>,
    next: u64,
}

impl HalfOpens {
    /// Adds a connection that was made `since`; time does not run backwards.
    pub(super) fn add(&mut self, endpoint: Key, host: Host, since: Instant) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.by_age.insert(ticket, HalfOpen { endpoint, since, host });
        self.by_host.entry(host).or_default().insert(ticket);
        ticket
    }

    /// Removes a connection: its request has come, or it has ended.
    pub(super) fn remove(&mut self, ticket: Ticket) {
        let Some(entry) = self.by_age.remove(&ticket) else { return };
        if let Some(tickets) = self.by_host.get_mut(&entry.host) {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                self.by_host.remove(&entry.host);
            }
        }
    }

    /// How many connections of a host are half open.
    pub(super) fn count_of(&self, host: Host) -> usize {
        self.by_host.get(&host).map_or(0, BTreeSet::len)
    }

    /// The oldest connection of one host, or of all.
    pub(super) fn oldest(&self, host: Option<Host>) -> Option<HalfOpen> {
        let ticket = match host {
            Some(host) => self.by_host.get(&host)?.first()?,
            None => self.by_age.first_key_value()?.0,
        };
        self.by_age.get(ticket).copied()
    }
}

/// The handshakes that peers have begun with a provider.
#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// How many are not finished.
    pub(super) unfinished: usize,
    /// Those of them whose request has not come.
    pub(super) half_open: HalfOpens,
    /// The host that has more of the latter than it may.
    pub(super) crowd: Option<Host>,
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn hosts() {
        let of = |text: &str| Host::of(text.parse().unwrap());
        assert_eq!(of("::ffff:192.0.2.7"), of("192.0.2.7"));
        assert_ne!(of("192.0.2.7"), of("192.0.2.8"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1:2:3"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
    }

    proptest! {
        /// Against a list.
        #[test]
        fn as_a_list(steps in prop::collection::vec((0u8..4, 0u32..200), 0..200)) {
            let start = Instant::now();
            let (mut table, mut model) = (HalfOpens::default(), Vec::<(Ticket, HalfOpen)>::new());
            for (n, (host, pick)) in steps.into_iter().enumerate() {
                let host = Host::of(IpAddr::from([192, 0, 2, host]));
                if pick % 3 > 0 || model.is_empty() {
                    let (endpoint, since) = (Key::new(n as u32, 1), start + Duration::from_millis(n as u64));
                    let ticket = table.add(endpoint, host, since);
                    model.push((ticket, HalfOpen { endpoint, since, host }));
                } else {
                    let ticket = model.remove(pick as usize % model.len()).0;
                    table.remove(ticket);
                    table.remove(ticket);
                }
                let of = |host: Host| model.iter().map(|entry| entry.1).filter(move |entry| entry.host == host);
                prop_assert_eq!(table.oldest(None), model.first().map(|entry| entry.1));
                prop_assert_eq!(table.oldest(Some(host)), of(host).next());
                prop_assert_eq!(table.count_of(host), of(host).count());
                prop_assert!(table.by_host.len() <= model.len());
            }
        }
    }
}
