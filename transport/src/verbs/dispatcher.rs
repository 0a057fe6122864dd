//! Asynchronous events of a device for every provider of the process.
//!
//! librdmacm opens a device once per process, so all providers share its context and the one queue of asynchronous events
//! behind it. Whoever reads an event there puts a copy into the mailbox of every provider that has the device open. Each
//! provider watches the descriptor on its own, and a new event makes an edge for all of them; reading and putting happen
//! under one lock. So a provider that follows an edge of its own finds the event: in the queue if nobody has read it, else
//! in its mailbox.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::async_event::AsyncEvent;
use crate::error::Result;

/// Events that are kept for a provider that does not ask for them. The oldest go first.
const KEPT: usize = 1000;
/// Events read from the system in one call.
const AT_ONCE: usize = 64;

#[derive(Debug)]
struct Subscriber {
    context: usize,
    number: u64,
    mailbox: VecDeque<AsyncEvent>,
}

#[derive(Debug)]
struct Subscribers {
    list: Vec<Subscriber>,
    next_number: u64,
}

static SUBSCRIBERS: Mutex<Subscribers> = Mutex::new(Subscribers { list: Vec::new(), next_number: 0 });

fn subscribers() -> MutexGuard<'static, Subscribers> {
    // Nothing panics while it holds the lock.
    SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A provider's share in the events of one context.
#[derive(Debug)]
pub(super) struct Subscription {
    context: usize,
    number: u64,
}

impl Subscription {
    /// Subscribes to the events of the context at this address.
    pub(super) fn new(context: usize) -> Self {
        let mut all = subscribers();
        let number = all.next_number;
        all.next_number += 1;
        all.list.push(Subscriber { context, number, mailbox: VecDeque::new() });
        Self { context, number }
    }

    /// The next event for this subscriber; `None` when there is none now. `read` takes one event from the system.
    pub(super) fn next(&self, mut read: impl FnMut() -> Result<Option<AsyncEvent>>) -> Result<Option<AsyncEvent>> {
        let mut all = subscribers();
        let mut failed = None;
        for _ in 0..AT_ONCE {
            let event = match read() {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            for subscriber in all.list.iter_mut().filter(|subscriber| subscriber.context == self.context) {
                if subscriber.mailbox.len() >= KEPT {
                    subscriber.mailbox.pop_front();
                }
                subscriber.mailbox.push_back(event);
            }
        }
        let own = all.list.iter_mut().find(|subscriber| subscriber.number == self.number);
        match (own.and_then(|own| own.mailbox.pop_front()), failed) {
            (None, Some(error)) => Err(error),
            (event, _) => Ok(event),
        }
    }

    /// Ends the subscription; whether no provider of this process has the context open any more.
    pub(super) fn end(self) -> bool {
        let mut all = subscribers();
        all.list.retain(|subscriber| subscriber.number != self.number);
        !all.list.iter().any(|subscriber| subscriber.context == self.context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subscriber_gets_every_event_whoever_reads_it() {
        let (first, second, elsewhere) = (Subscription::new(16), Subscription::new(16), Subscription::new(32));
        let mut system = vec![AsyncEvent::Other(2), AsyncEvent::Other(1)];
        assert_eq!(first.next(|| Ok(system.pop())).unwrap(), Some(AsyncEvent::Other(1)));
        assert!(system.is_empty(), "all is read at once");
        let nothing = || Ok(None);
        assert_eq!(second.next(nothing).unwrap(), Some(AsyncEvent::Other(1)));
        assert_eq!(second.next(nothing).unwrap(), Some(AsyncEvent::Other(2)));
        assert_eq!(second.next(nothing).unwrap(), None);
        assert_eq!(first.next(nothing).unwrap(), Some(AsyncEvent::Other(2)));
        assert_eq!(elsewhere.next(nothing).unwrap(), None);
        assert!(!first.end(), "the second is left");
        assert!(second.end());
        assert!(elsewhere.end());
    }

    #[test]
    fn a_subscriber_that_never_asks_costs_bounded_memory() {
        let (idle, busy) = (Subscription::new(48), Subscription::new(48));
        for code in 0..3 * KEPT as u32 {
            let mut event = Some(AsyncEvent::Other(code));
            assert!(busy.next(|| Ok(event.take())).unwrap().is_some());
        }
        let first = idle.next(|| Ok(None)).unwrap();
        assert_eq!(first, Some(AsyncEvent::Other(2 * KEPT as u32)));
        assert!(!idle.end() && busy.end());
    }

    #[test]
    fn a_device_that_never_stops_is_read_in_pieces() {
        let one = Subscription::new(64);
        let mut reads = 0;
        one.next(|| {
            reads += 1;
            Ok(Some(AsyncEvent::Other(0)))
        })
        .unwrap();
        assert_eq!(reads, AT_ONCE);
        assert!(one.end());
    }
}
