//! The connect requests of peers that the program has not received yet. The hosts of the peers have turns. So a host with many requests
//! delays the request of another host by one request, and not by all of its own.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use crate::cm::{CmEvent, CmId};
use crate::newcomers::Host;

/// The requests, by host and in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct RequestQueue {
    by_host: BTreeMap<Host, VecDeque<CmEvent>>,
    /// The host that has had the last turn.
    served: Option<Host>,
}

impl RequestQueue {
    pub(super) fn push(&mut self, host: Host, request: CmEvent) {
        self.by_host.entry(host).or_default().push_back(request);
    }

    /// Removes the oldest request of the host whose turn it is, and returns that request. Returns `None` if the queue is empty.
    pub(super) fn pop(&mut self) -> Option<CmEvent> {
        let behind = self.served.map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.by_host.range((behind, Bound::Unbounded)).next();
        let &host = next.or_else(|| self.by_host.first_key_value())?.0;
        self.served = Some(host);
        self.take(host, |_| true)
    }

    /// Removes the request of one connection.
    pub(super) fn remove(&mut self, host: Host, id: CmId) {
        self.take(host, |request| request.id == id);
    }

    /// Removes and returns the first request of a host that meets a condition.
    fn take(&mut self, host: Host, is_meant: impl FnMut(&CmEvent) -> bool) -> Option<CmEvent> {
        let requests = self.by_host.get_mut(&host)?;
        let taken = requests.iter().position(is_meant).and_then(|place| requests.remove(place));
        if requests.is_empty() {
            self.by_host.remove(&host);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::cm::CmEventKind;
    use crate::slab::Key;

    #[test]
    fn hosts_have_turns() {
        let mut queue = RequestQueue::default();
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
