//! A table of young connections, ordered by age and by host. A connection is young until its peer has shown that it is
//! a real client, for example by a first message.
//!
//! A peer that connects and then stays silent uses memory of the program, and must not keep other peers from
//! connecting. So the program limits the number of young connections. At the limit, the program closes one young
//! connection for each new connection. This table finds the connection to close. Each operation takes logarithmic time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

/// The part of a peer's address by which its connections are counted: the whole address for IPv4, also in its
/// IPv4-mapped form, or the first 64 bits for IPv6. The last 64 bits do not count because a host can choose them
/// freely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Host(IpAddr);

impl Host {
    /// Returns the host that has this address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
            v4 => v4,
        })
    }
}

impl std::fmt::Display for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            IpAddr::V4(v4) => write!(f, "{v4}"),
            IpAddr::V6(v6) => write!(f, "{v6}/64"),
        }
    }
}

/// The handle of an entry of [`Newcomers`]. An entry that is added later has a larger ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// An entry of [`Newcomers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewcomerEntry<T> {
    /// The connection.
    pub id: T,
    /// The time at which the connection was established.
    pub since: Instant,
    /// The host of the peer.
    pub host: Host,
}

/// A table of young connections, ordered by age and by host. The [module](self) describes its use.
#[derive(Debug)]
pub struct Newcomers<T> {
    by_age: BTreeMap<Ticket, NewcomerEntry<T>>,
    by_host: BTreeMap<Host, BTreeSet<Ticket>>,
    /// One element for each host: its number of entries, the ticket of its oldest entry, and the host. The last element
    /// is the host with the most entries. Of several such hosts, it is the one with the oldest entry.
    by_size: BTreeSet<(usize, Reverse<Ticket>, Host)>,
    next: u64,
}

impl<T> Default for Newcomers<T> {
    fn default() -> Self {
        Self { by_age: BTreeMap::new(), by_host: BTreeMap::new(), by_size: BTreeSet::new(), next: 0 }
    }
}

impl<T: Copy> Newcomers<T> {
    /// Adds a connection that was established at `since`. Returns the ticket with which the connection can be removed.
    /// Add connections in the order of their `since`.
    pub fn add(&mut self, id: T, host: Host, since: Instant) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.by_age.insert(ticket, NewcomerEntry { id, since, host });
        self.change(host, |tickets| tickets.insert(ticket));
        ticket
    }

    /// Removes a connection that has ended or is no longer young, and returns its entry. Returns `None` if it was
    /// already removed.
    pub fn remove(&mut self, ticket: Ticket) -> Option<NewcomerEntry<T>> {
        let entry = self.by_age.remove(&ticket)?;
        self.change(entry.host, |tickets| tickets.remove(&ticket));
        Some(entry)
    }

    fn change(&mut self, host: Host, change: impl FnOnce(&mut BTreeSet<Ticket>) -> bool) {
        let size = |tickets: &BTreeSet<Ticket>| tickets.first().map(|&oldest| (tickets.len(), Reverse(oldest), host));
        let tickets = self.by_host.entry(host).or_default();
        if let Some(before) = size(tickets) {
            self.by_size.remove(&before);
        }
        change(tickets);
        match size(tickets) {
            Some(after) => _ = self.by_size.insert(after),
            None => _ = self.by_host.remove(&host),
        }
    }

    /// Returns the number of connections in the table.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_age.len()
    }

    /// Returns true if the table has no connections.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_age.is_empty()
    }

    /// Returns the number of connections of `host` in the table.
    #[must_use]
    pub fn count_of(&self, host: Host) -> usize {
        self.by_host.get(&host).map_or(0, BTreeSet::len)
    }

    /// Returns the host with the most connections. Of several such hosts, returns the one with the oldest connection.
    /// Returns `None` if the table is empty.
    #[must_use]
    pub fn largest(&self) -> Option<Host> {
        self.by_size.last().map(|&(_, _, host)| host)
    }

    /// Returns the oldest connection of `host`, or of the whole table if `host` is `None`. Returns `None` if there is
    /// no connection.
    #[must_use]
    pub fn oldest(&self, host: Option<Host>) -> Option<NewcomerEntry<T>> {
        let ticket = match host {
            Some(host) => self.by_host.get(&host)?.first()?,
            None => self.by_age.first_key_value()?.0,
        };
        self.by_age.get(ticket).copied()
    }
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
        assert_eq!(
            [of("::ffff:192.0.2.7"), of("2001:db8::7")].map(|host| host.to_string()),
            ["192.0.2.7", "2001:db8::/64"]
        );
    }

    proptest! {
        /// Compares the table with a simple model: a list of the entries in the order of insertion.
        #[test]
        fn as_a_list(steps in prop::collection::vec((0u8..4, 0u32..200), 0..200)) {
            let start = Instant::now();
            let (mut table, mut model) = (Newcomers::default(), Vec::<(Ticket, NewcomerEntry<usize>)>::new());
            for (n, (host, pick)) in steps.into_iter().enumerate() {
                let host = Host::of(IpAddr::from([192, 0, 2, host]));
                if pick % 3 > 0 || model.is_empty() {
                    let since = start + Duration::from_millis(n as u64);
                    let ticket = table.add(n, host, since);
                    model.push((ticket, NewcomerEntry { id: n, since, host }));
                } else {
                    let (ticket, entry) = model.remove(pick as usize % model.len());
                    prop_assert_eq!(table.remove(ticket), Some(entry));
                    prop_assert_eq!(table.remove(ticket), None);
                }
                let of = |host: Host| model.iter().map(|entry| entry.1).filter(move |entry| entry.host == host);
                prop_assert_eq!(table.oldest(None), model.first().map(|entry| entry.1));
                prop_assert_eq!(table.oldest(Some(host)), of(host).next());
                prop_assert_eq!(table.count_of(host), of(host).count());
                prop_assert_eq!(table.len(), model.len());
                // The expected answer of `largest`: the host of the first entry whose host has the maximum number of
                // entries.
                let most = model.iter().map(|entry| of(entry.1.host).count()).max();
                let largest = model.iter().map(|entry| entry.1.host).find(|&host| Some(of(host).count()) == most);
                prop_assert_eq!(table.largest(), largest);
                prop_assert!(table.by_host.len() <= model.len() && table.by_size.len() == table.by_host.len());
            }
        }
    }
}
