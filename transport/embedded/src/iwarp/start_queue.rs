//! The events with which connections start, and which the program has not received yet: connect
//! requests of peers, and resolved addresses of the program's own connection attempts. The hosts of
//! the peers take turns. So a host with many requests delays the request of another host by only
//! one request.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use rdma_transport::cm::{CmEvent, CmId};
use rdma_transport::newcomers::Host;

/// The events, by host and in order.
#[derive(Debug, Default)]
pub(super) struct StartQueue {
    by_host: BTreeMap<Host, VecDeque<CmEvent>>, // bound: half-open
    /// The host whose event was returned most recently.
    served: Option<Host>,
}

impl StartQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.by_host.is_empty()
    }

    pub(super) fn push(&mut self, host: Host, event: CmEvent) {
        self.by_host.entry(host).or_default().push_back(event);
    }

    /// Removes and returns the oldest event of the host whose turn it is. Returns `None` if the queue is empty.
    pub(super) fn pop(&mut self) -> Option<CmEvent> {
        let behind = self.served.map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.by_host.range((behind, Bound::Unbounded)).next();
        let &host = next.or_else(|| self.by_host.first_key_value())?.0;
        self.served = Some(host);
        self.take(host, |_| true)
    }

    /// Removes the event of one connection.
    pub(super) fn remove(&mut self, host: Host, id: CmId) {
        self.take(host, |event| event.id == id);
    }

    /// Removes and returns the first event of a host for which `is_meant` returns true.
    fn take(&mut self, host: Host, is_meant: impl FnMut(&CmEvent) -> bool) -> Option<CmEvent> {
        let events = self.by_host.get_mut(&host)?;
        let taken = events.iter().position(is_meant).and_then(|index| events.remove(index));
        if events.is_empty() {
            self.by_host.remove(&host);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use rdma_transport::cm::CmEventKind;
    use rdma_transport::slab::Key;

    #[test]
    fn hosts_have_turns() {
        let mut queue = StartQueue::default();
        let host = |last| Host::of(IpAddr::from([10, 0, 0, last]));
        let id = |of: u8, nth: u32| CmId(Key::new(u32::from(of) * 100 + nth, 1));
        for (of, requests) in [(2, 50), (1, 2), (3, 3)] {
            for nth in 0..requests {
                queue.push(host(of), CmEvent { id: id(of, nth), kind: CmEventKind::TimewaitExit });
            }
        }
        queue.remove(host(3), id(3, 1));
        queue.remove(host(4), id(3, 0));
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|request| request.id).collect();
        let expected = [id(1, 0), id(2, 0), id(3, 0), id(1, 1), id(2, 1), id(3, 2)];
        assert_eq!(order[..6], expected);
        assert!(order[6..].iter().copied().eq((2..50).map(|nth| id(2, nth))) && queue.by_host.is_empty());
    }
}
