//! Asynchronous events of a device for every provider of the process.
//!
//! librdmacm opens a device once per process. So all providers share the context of the device, and its only queue of asynchronous events.
//! Each provider watches this queue with epoll. If one provider reads an event before another provider calls `epoll_wait`, the other
//! provider sees no edge, because `epoll_wait` finds the queue empty. So the provider that reads an
//! event puts a copy into the private queue of every provider that has the device open. It wakes
//! the other providers by writing to their eventfds.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::async_event::{QpEvent, RawAsyncEvent};
use rdma_transport::error::{Result, TransportError};

/// The maximum number of events in the private queue of a provider. If the queue is full, a new event replaces one with
/// the lowest [`rank`].
const MAX_QUEUED: usize = 1000;
/// The maximum number of events that one call reads from the system.
const MAX_READS: usize = 64;

static SUBSCRIBERS: Mutex<Subscribers> = Mutex::new(Subscribers { list: Vec::new(), next_number: 0 });

/// A provider's subscription to the events of one context.
#[derive(Debug)]
pub(super) struct Subscription {
    context: usize,
    number: u64,
    wake: Arc<OwnedFd>,
}

#[derive(Debug)]
struct Subscriber {
    context: usize,
    number: u64,
    queue: VecDeque<RawAsyncEvent>, // bound: device-events
    wake: Arc<OwnedFd>,
}

#[derive(Debug)]
struct Subscribers {
    list: Vec<Subscriber>, // local: providers of the process
    next_number: u64,
}

impl Subscriber {
    fn push(&mut self, event: RawAsyncEvent) {
        if self.queue.len() >= MAX_QUEUED {
            let oldest = |wanted| self.queue.iter().position(|event| rank(event) == wanted);
            let lowest = if rdma_transport::planted("an-event-displaces-a-failure") { 2 } else { 0 };
            let index = (lowest..=2).find_map(oldest).unwrap_or(0);
            self.queue.remove(index);
        }
        self.queue.push_back(event);
    }
}

impl Subscribers {
    /// Removes the oldest event of a subscriber.
    fn pop(&mut self, number: u64) -> Option<RawAsyncEvent> {
        self.list.iter_mut().find(|subscriber| subscriber.number == number)?.queue.pop_front()
    }
}

impl Subscription {
    /// Subscribes to the events of the context whose address is `context`.
    pub(super) fn new(context: usize) -> Result<Self> {
        // SAFETY: the call makes a descriptor, and accesses no memory.
        let wake = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if wake < 0 {
            return Err(TransportError::io("eventfd", io::Error::last_os_error()));
        }
        // SAFETY: `eventfd` has returned this descriptor, which has no other owner.
        let wake = Arc::new(unsafe { OwnedFd::from_raw_fd(wake) });
        let mut all = subscribers();
        let number = all.next_number;
        all.next_number += 1;
        all.list.push(Subscriber { context, number, queue: VecDeque::new(), wake: Arc::clone(&wake) });
        Ok(Self { context, number, wake })
    }

    /// Returns the eventfd of this subscription. It has an edge when another subscriber has put an event into this subscription's queue. It
    /// is never read.
    pub(super) fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Returns the next event for this subscriber. Returns `None` if no event is available. `read`
    /// reads one event from the system's queue. It is not called while this subscriber's own queue
    /// has events, so this queue does not fill up if the subscriber reads its events.
    pub(super) fn next(
        &self,
        mut read: impl FnMut() -> Result<Option<RawAsyncEvent>>,
    ) -> Result<Option<RawAsyncEvent>> {
        let mut all = subscribers();
        if let Some(event) = all.pop(self.number) {
            return Ok(Some(event));
        }
        let mut failed = None;
        for _ in 0..MAX_READS {
            let event = match read() {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            for subscriber in all.list.iter_mut().filter(|subscriber| subscriber.context == self.context) {
                subscriber.push(event);
                if subscriber.number != self.number && !rdma_transport::planted("an-event-wakes-only-its-reader") {
                    signal(&subscriber.wake);
                }
            }
        }
        match (all.pop(self.number), failed) {
            (None, Some(error)) => Err(error),
            (event, _) => Ok(event),
        }
    }

    /// Ends the subscription. Returns true if no other provider of this process has a subscription to the context.
    pub(super) fn end(self) -> bool {
        let mut all = subscribers();
        all.list.retain(|subscriber| subscriber.number != self.number);
        !all.list.iter().any(|subscriber| subscriber.context == self.context)
    }
}

fn subscribers() -> MutexGuard<'static, Subscribers> {
    // No code panics while it holds the lock, so a poisoned lock needs no check.
    SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the rank of an event. A full queue drops an event of the lowest rank first.
///
/// - Rank 2: a failure of a device, a completion queue or a shared receive queue, which nothing
///   else reports.
/// - Rank 1: a change of a port, or the failure of a queue pair, which often belongs to another
///   provider.
/// - Rank 0: an event whose loss does little harm, because another event or a time limit follows.
const fn rank(event: &RawAsyncEvent) -> u8 {
    match event {
        RawAsyncEvent::DeviceFatal | RawAsyncEvent::CqError(_) | RawAsyncEvent::SrqError(_) => 2,
        RawAsyncEvent::Port(_) | RawAsyncEvent::Qp { kind: QpEvent::Failed(_), .. } => 1,
        RawAsyncEvent::Qp { .. } | RawAsyncEvent::Other(_) => 0,
    }
}

/// Signals an eventfd, which makes an edge for epoll. Each write makes an edge, even if the eventfd
/// is never read.
fn signal(wake: &OwnedFd) {
    let one = 1_u64;
    // SAFETY: the call reads the eight bytes of a number, and writes to an open descriptor.
    let rc = unsafe { libc::write(wake.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
    if rc < 0 {
        local_log!(Warn, "an event of a device may be noticed late: {}", io::Error::last_os_error());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::QueueName;
    use rdma_transport::slab::Key;

    #[test]
    fn every_subscriber_gets_every_event_whoever_reads_it() {
        let (first, second, elsewhere) =
            (Subscription::new(16).unwrap(), Subscription::new(16).unwrap(), Subscription::new(32).unwrap());
        let mut system = vec![RawAsyncEvent::Other(2), RawAsyncEvent::Other(1)];
        assert_eq!(first.next(|| Ok(system.pop())).unwrap(), Some(RawAsyncEvent::Other(1)));
        assert!(system.is_empty(), "one call reads all events");
        let nothing = || Ok(None);
        assert_eq!(second.next(nothing).unwrap(), Some(RawAsyncEvent::Other(1)));
        assert_eq!(second.next(nothing).unwrap(), Some(RawAsyncEvent::Other(2)));
        assert_eq!(second.next(nothing).unwrap(), None);
        assert_eq!(first.next(nothing).unwrap(), Some(RawAsyncEvent::Other(2)));
        assert_eq!(elsewhere.next(nothing).unwrap(), None);
        assert!(!first.end(), "the second is left");
        assert!(second.end());
        assert!(elsewhere.end());
    }

    /// When one provider reads an event, the system makes no edge for the other providers of the
    /// device. So the provider that reads the event must wake the others.
    #[test]
    fn an_event_wakes_the_providers_that_have_not_read_it() {
        let readable = |subscription: &Subscription| {
            let mut descriptor = libc::pollfd { fd: subscription.wake_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: the pointer is to one descriptor, and the call does not wait.
            unsafe { libc::poll(&raw mut descriptor, 1, 0) == 1 }
        };
        let (reads, sleeps) = (Subscription::new(112).unwrap(), Subscription::new(112).unwrap());
        let mut event = Some(RawAsyncEvent::Other(1));
        assert!(reads.next(|| Ok(event.take())).unwrap().is_some());
        assert_eq!([&reads, &sleeps].map(readable), [false, true]);
        assert!(!reads.end() && sleeps.end());
    }

    #[test]
    fn a_subscriber_that_never_asks_costs_bounded_memory() {
        let (idle, busy) = (Subscription::new(48).unwrap(), Subscription::new(48).unwrap());
        for code in 0..3 * MAX_QUEUED as u32 {
            let mut event = Some(RawAsyncEvent::Other(code));
            assert!(busy.next(|| Ok(event.take())).unwrap().is_some());
        }
        let first = idle.next(|| Ok(None)).unwrap();
        assert_eq!(first, Some(RawAsyncEvent::Other(2 * MAX_QUEUED as u32)));
        assert!(!idle.end() && busy.end());
    }

    /// If many connections end at the same time, the events of their last receives must not
    /// displace events of failures.
    #[test]
    fn events_of_queue_pairs_do_not_displace_failures() {
        let (idle, busy) = (Subscription::new(80).unwrap(), Subscription::new(80).unwrap());
        let name = QueueName::new(Key::new(7, 1));
        let failed = RawAsyncEvent::Qp { kind: QpEvent::Failed("it failed"), name };
        let last = RawAsyncEvent::Qp { kind: QpEvent::LastReceive, name };
        let failures = [RawAsyncEvent::CqError(name), failed, RawAsyncEvent::DeviceFatal];
        for event in failures.into_iter().chain([last; 2 * MAX_QUEUED]).chain(failures) {
            let mut event = Some(event);
            assert!(busy.next(|| Ok(event.take())).unwrap().is_some());
        }
        let left: Vec<_> = std::iter::from_fn(|| idle.next(|| Ok(None)).unwrap()).collect();
        assert_eq!((left.len(), &left[..3], &left[MAX_QUEUED - 3..]), (MAX_QUEUED, &failures[..], &failures[..]));
        assert!(left[3..MAX_QUEUED - 3].iter().all(|event| *event == last));
        assert!(!idle.end() && busy.end());
    }

    #[test]
    fn a_subscriber_that_takes_its_events_loses_none() {
        let one = Subscription::new(96).unwrap();
        let mut system = 0..3 * MAX_QUEUED as u32;
        for code in system.clone() {
            let event = one.next(|| Ok(system.next().map(RawAsyncEvent::Other))).unwrap();
            assert_eq!(event, Some(RawAsyncEvent::Other(code)));
        }
        assert!(one.end());
    }

    #[test]
    fn a_device_that_never_stops_is_read_in_pieces() {
        let one = Subscription::new(64).unwrap();
        let mut reads = 0;
        one.next(|| {
            reads += 1;
            Ok(Some(RawAsyncEvent::Other(0)))
        })
        .unwrap();
        assert_eq!(reads, MAX_READS);
        assert!(one.end());
    }
}
