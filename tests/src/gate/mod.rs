//! The fallible calls below a reactor, counted by kind, and the calls that are to fail.
//!
//! [`crate::forward::Forward`] queries a gate before it forwards a call of the reactor to a provider, [`net::GatedNet`] before a call of
//! the embedded provider reaches its sockets, and [`poller::GatedPoller`] before a call reaches the poller. [`handler::GatedHandler`]
//! queries it at the end of each callback.

pub mod handler;
pub mod net;
pub mod poller;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rdma_transport::event::DeviceEventKind;
use rdma_transport::mem::Memory;
use rdma_transport::mr::RemoteKey;
use rdma_transport::wc::Failure as WorkFailure;

/// The kinds of fallible calls: those of [`Provider`](rdma_transport::provider::Provider), those of
/// [`Net`](rdma_transport::iwarp::net::Net), which begin with `Net`, those of [`Poller`](rdma_reactor::Poller), and the callbacks of a
/// program, which fail with a panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "named as the calls")]
pub enum Call {
    Listen,
    Resolve,
    Connect,
    Accept,
    Reject,
    Disconnect,
    DestroyQp,
    NextCmEvent,
    CompletionChannel,
    Register,
    Deregister,
    Restrict,
    Invalidate,
    CreateCq,
    DestroyCq,
    CreateQp,
    CreateSrq,
    DestroySrq,
    PostRecv,
    PostSend,
    PostSrqRecv,
    PollCq,
    ReqNotify,
    NextCompletionEvent,
    /// The call returns no error, but can panic.
    Progress,
    EnableExtensions,
    NetPoll,
    NetListen,
    NetAccept,
    NetConnect,
    NetConnected,
    NetPromote,
    NetLocalAddress,
    NetMaxSegment,
    NetRecv,
    NetSend,
    PollerRegister,
    PollerWait,
    Callback,
}

/// The way in which a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The call returns an error of the system.
    Errno(i32),
    /// The queue is full: `ENOMEM` of `ibv_post_send`(3).
    Full,
    /// The last work request of the chain fails with an error of the system, and those before it are posted.
    LastErrno(i32),
    /// The queue has room for all work requests of the chain but the last.
    LastFull,
    /// The call does not return: the provider panics.
    Panic,
}

impl Failure {
    /// Returns the error of the system.
    #[must_use]
    pub fn system(self) -> io::Error {
        match self {
            Self::Errno(code) | Self::LastErrno(code) => io::Error::from_raw_os_error(code),
            Self::Full | Self::LastFull => io::Error::from_raw_os_error(libc::ENOMEM),
            Self::Panic => io::Error::other("a panic, which has no error"),
        }
    }
}

/// The objects that the user of a provider has created and not destroyed: handles of the connection manager, regions,
/// completion queues and shared receive queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the objects")]
pub struct Objects {
    pub ids: i64,
    pub regions: i64,
    pub completion_queues: i64,
    pub shared_queues: i64,
}

/// A spontaneous event of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// Each connection has failed with this reason.
    Failed(&'static str),
    /// Each completion queue has overrun, and its later completions are lost.
    Overrun,
    /// The numbers of the queue pairs of all connections may be used again.
    Timewait,
    /// The device is being removed, until [`Gate::plug_in`].
    Removal,
    /// An event of the device.
    Device(DeviceEventKind),
}

/// The way in which the address of a connection fails to resolve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unresolved {
    /// The provider reports that no device reaches the address.
    Failed,
    /// The provider reports nothing.
    Silent,
}

/// A call that is to fail.
#[derive(Clone, Copy, Debug)]
struct Fault {
    /// The number of the call among those of its kind, from 0.
    nth: u32,
    failure: Failure,
    /// Later calls of the kind fail, too.
    lasting: bool,
}

#[derive(Debug, Default)]
struct State {
    counts: BTreeMap<Call, u32>,
    /// The calls that are to fail, by kind.
    faults: BTreeMap<Call, Fault>,
    failed: BTreeMap<Call, u32>,
    objects: Objects,
    /// The failure of the next completion.
    completion: Option<WorkFailure>,
    said: VecDeque<Said>,
    unplugged: bool,
    /// `Established` events of accepted connections are dropped.
    loses_beginnings: bool,
    /// The address of the first listener moves next.
    moves: bool,
    /// The address of the next connection of this side fails to resolve.
    unresolved: Option<Unresolved>,
    /// The keys of the peer that the next messages invalidate.
    taken_back: VecDeque<RemoteKey>,
    /// All memory that was registered so far.
    memories: Vec<Weak<Memory>>,
    /// The addresses of regions that the device has refused to release, or whose remote keys it has refused to release.
    refused: BTreeSet<u64>,
}

/// The gate. See the [module](self). Clones are the same gate.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<Mutex<State>>);

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails one call: the `nth` of its kind, from 0, counted from the beginning.
    pub fn fail_nth(&self, call: Call, nth: u32, failure: Failure) {
        self.state().faults.insert(call, Fault { nth, failure, lasting: false });
    }

    /// Fails all calls of a kind with `EIO` after `more` of them.
    pub fn break_after(&self, call: Call, more: u32) {
        let mut state = self.state();
        let nth = state.counts.get(&call).copied().unwrap_or(0) + more;
        state.faults.insert(call, Fault { nth, failure: Failure::Errno(libc::EIO), lasting: true });
    }

    /// Makes the next call of a kind panic.
    pub fn panic_next(&self, call: Call) {
        let nth = self.state().counts.get(&call).copied().unwrap_or(0);
        self.fail_nth(call, nth, Failure::Panic);
    }

    /// Fails the next completion.
    pub fn fail_completion(&self, failure: WorkFailure) {
        self.state().completion = Some(failure);
    }

    /// Requests a spontaneous event of the device.
    pub fn say(&self, said: Said) {
        let mut state = self.state();
        state.unplugged |= said == Said::Removal;
        state.said.push_back(said);
    }

    /// Removes and returns the requested event of the device.
    #[must_use]
    pub fn takes_said(&self) -> Option<Said> {
        self.state().said.pop_front()
    }

    /// Adds the removed device again.
    pub fn plug_in(&self) {
        self.state().unplugged = false;
    }

    /// Returns true if the device was removed.
    #[must_use]
    pub fn is_unplugged(&self) -> bool {
        self.state().unplugged
    }

    /// Drops all further `Established` events of accepted connections.
    pub fn lose_beginnings(&self) {
        self.state().loses_beginnings = true;
    }

    /// Returns true if these events are dropped.
    #[must_use]
    pub fn loses_beginnings(&self) -> bool {
        self.state().loses_beginnings
    }

    /// Removes and returns the failure of the next completion.
    #[must_use]
    pub fn takes_completion(&self) -> Option<WorkFailure> {
        self.state().completion.take()
    }

    /// Fails the address resolution of the next connection of this side, as if no device reached the address.
    pub fn leave_unresolved(&self, how: Unresolved) {
        self.state().unresolved = Some(how);
    }

    /// Removes and returns the request to fail an address resolution.
    #[must_use]
    pub fn takes_unresolved(&self) -> Option<Unresolved> {
        self.state().unresolved.take()
    }

    /// Moves the address of the first listener, as a bond does that fails over: the listener is notified, and receives no further requests.
    pub fn move_address(&self) {
        self.state().moves = true;
    }

    /// Returns true if the address is to move now.
    #[must_use]
    pub fn takes_move(&self) -> bool {
        std::mem::take(&mut self.state().moves)
    }

    /// Makes the next message invalidate a key of the peer: a Send becomes a Send with Invalidate.
    pub fn take_back(&self, key: RemoteKey) {
        self.state().taken_back.push_back(key);
    }

    /// Returns true if the next message is to invalidate a key.
    #[must_use]
    pub fn is_to_take_key(&self) -> bool {
        !self.state().taken_back.is_empty()
    }

    /// Removes and returns the key that the next message invalidates.
    #[must_use]
    pub fn takes_key(&self) -> Option<RemoteKey> {
        self.state().taken_back.pop_front()
    }

    /// Notes that memory was registered.
    pub fn watch(&self, memory: &Arc<Memory>) {
        let mut state = self.state();
        state.memories.retain(|memory| memory.strong_count() > 0);
        state.memories.push(Arc::downgrade(memory));
    }

    /// Returns the number of memories that were registered and still exist, whether or not they are registered now.
    #[must_use]
    pub fn memories(&self) -> usize {
        self.state().memories.iter().filter(|memory| memory.strong_count() > 0).count()
    }

    /// Fails no further calls.
    pub fn heal(&self) {
        self.state().faults.clear();
    }

    /// Returns the number of calls so far, by kind.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Call, u32> {
        self.state().counts.clone()
    }

    /// Returns the number of calls that have failed here.
    #[must_use]
    pub fn failed(&self) -> u32 {
        self.state().failed.values().sum()
    }

    /// Returns the number of calls of a kind that have failed here.
    #[must_use]
    pub fn failed_of(&self, call: Call) -> u32 {
        self.state().failed.get(&call).copied().unwrap_or(0)
    }

    /// Notes that a call has failed in the inner provider.
    pub fn note_failed(&self, call: Call) {
        *self.state().failed.entry(call).or_default() += 1;
    }

    /// Fails the next call of a kind, unless a later one is to fail already.
    pub fn refuse(&self, call: Call) {
        let state = &mut *self.state();
        let nth = state.counts.get(&call).copied().unwrap_or(0);
        state.faults.entry(call).or_insert(Fault { nth, failure: Failure::Errno(libc::EBUSY), lasting: false });
    }

    /// Notes the result of releasing the region at an address, or its remote key.
    pub fn note_taken_back(&self, address: u64, is_back: bool) {
        let refused = &mut self.state().refused;
        if is_back {
            refused.remove(&address);
        } else {
            refused.insert(address);
        }
    }

    /// Returns true if the device has failed to release the region at an address, or its remote key.
    #[must_use]
    pub fn keeps(&self, address: u64) -> bool {
        self.state().refused.contains(&address)
    }

    /// Returns the existing objects.
    #[must_use]
    pub fn objects(&self) -> Objects {
        self.state().objects
    }

    /// Notes the creation or destruction of an object.
    pub fn note(&self, change: impl FnOnce(&mut Objects)) {
        change(&mut self.state().objects);
    }

    /// Counts a call. Returns `Some` if it is to fail.
    pub fn pass(&self, call: Call) -> Option<Failure> {
        let mut state = self.state();
        let count = state.counts.entry(call).or_default();
        let now = *count;
        *count += 1;
        let fault = *state.faults.get(&call).filter(|fault| now == fault.nth || fault.lasting && now > fault.nth)?;
        *state.failed.entry(call).or_default() += 1;
        if !fault.lasting {
            state.faults.remove(&call);
        }
        drop(state);
        assert_ne!(fault.failure, Failure::Panic, "the provider panics");
        Some(fault.failure)
    }

    /// Counts a call of the system, and fails it if requested.
    ///
    /// # Errors
    /// The requested error.
    pub fn system(&self, call: Call) -> io::Result<()> {
        self.pass(call).map_or(Ok(()), |failure| Err(failure.system()))
    }
}
