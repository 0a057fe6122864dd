//! The connections of each host, with their total load on a pool, and the rule for the last quarter
//! of a pool. The rule keeps one host from using the whole pool.

use std::collections::BTreeMap;

use crate::newcomers::Host;
use crate::slab::{Key, Slab};

/// The last `1/RESERVED` of a pool is reserved for hosts that have less than their share.
const RESERVED: usize = 4;

/// Returns true if `taken`, the used entries of a pool, reach into the last quarter of its `limit`
/// entries. If true, give further entries only to hosts that have less than their share, which the
/// caller defines. Otherwise a host may use all free entries.
#[must_use]
pub const fn is_scarce(taken: usize, limit: usize) -> bool {
    taken > limit - limit / RESERVED
}

#[derive(Debug)]
struct HostEntry<L> {
    host: Option<Host>,
    connections: usize,
    load: L,
}

/// The number of connections of each host, and their total load `L`. A connection whose host is
/// not known counts for the host `None`.
#[derive(Debug)]
pub struct Hosts<L> {
    entries: Slab<HostEntry<L>>,
    by_host: BTreeMap<Option<Host>, Key>,
}

impl<L> Default for Hosts<L> {
    fn default() -> Self {
        Self { entries: Slab::default(), by_host: BTreeMap::new() }
    }
}

impl<L: Default> Hosts<L> {
    /// Adds a connection of a host. Returns the key of the host, which is valid until
    /// [`Hosts::close`] has removed the host's last connection.
    pub fn open(&mut self, host: Option<Host>) -> Key {
        let Self { entries, by_host } = self;
        let new = || entries.insert(HostEntry { host, connections: 0, load: L::default() });
        let key = *by_host.entry(host).or_insert_with(new);
        if let Some(entry) = self.entries.get_mut(key) {
            entry.connections += 1;
        }
        key
    }

    /// Removes a connection of a host. If it is the last one, also removes the host and its load.
    pub fn close(&mut self, key: Key) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        entry.connections -= 1;
        if entry.connections == 0 {
            self.by_host.remove(&entry.host);
            self.entries.remove(key);
        }
    }

    /// Returns the load of a host. Returns `None` if the host has no connection.
    #[inline]
    #[must_use]
    pub fn load(&self, key: Key) -> Option<&L> {
        self.entries.get(key).map(|entry| &entry.load)
    }

    /// Returns the load of a host, mutably. Returns `None` if the host has no connection.
    #[inline]
    pub fn load_mut(&mut self, key: Key) -> Option<&mut L> {
        self.entries.get_mut(key).map(|entry| &mut entry.load)
    }

    /// Returns the number of connections of a host.
    #[must_use]
    pub fn connections(&self, host: Host) -> usize {
        let key = self.by_host.get(&Some(host));
        key.and_then(|&key| self.entries.get(key)).map_or(0, |entry| entry.connections)
    }

    /// Returns true if no host has a connection.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_host.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_last_quarter_is_scarce() {
        assert_eq!([74, 75, 76, 100, 101].map(|taken| is_scarce(taken, 100)), [false, false, true, true, true]);
        // A pool of fewer than four entries has no last quarter.
        assert!(!is_scarce(3, 3) && is_scarce(4, 4) && !is_scarce(3, 4) && is_scarce(1, 0));
        assert!(!is_scarce(usize::MAX / 2, usize::MAX));
    }

    proptest! {
        /// Compares the hosts with a list of their connections.
        #[test]
        fn as_a_list(steps in prop::collection::vec((0u8..4, any::<bool>(), any::<prop::sample::Index>()), 0..200)) {
            let (mut hosts, mut model) = (Hosts::<u32>::default(), Vec::new());
            for (host, opens, pick) in steps {
                if opens || model.is_empty() {
                    let host = Host::of([192, 0, 2, host].into());
                    let key = hosts.open(Some(host));
                    *hosts.load_mut(key).expect("it has a connection") += 1;
                    model.push((host, key));
                } else {
                    let (host, key) = model.remove(pick.index(model.len()));
                    *hosts.load_mut(key).expect("it has a connection") -= 1;
                    hosts.close(key);
                    let gone = model.iter().all(|(other, _)| *other != host);
                    prop_assert_eq!(hosts.load(key).is_none(), gone);
                }
                for (host, key) in &model {
                    let own = model.iter().filter(|(other, _)| other == host).count();
                    prop_assert_eq!((hosts.connections(*host), hosts.load(*key).copied()), (own, Some(own as u32)));
                }
                prop_assert_eq!(hosts.is_empty(), model.is_empty());
            }
            model.into_iter().for_each(|(_, key)| hosts.close(key));
            prop_assert!(hosts.is_empty() && hosts.entries.is_empty());
        }
    }
}
