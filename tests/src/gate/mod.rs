//! Counts the calls of a reactor that can fail, by kind, and decides which of them fail in a test.
//!
//! These types query the decisions: [`crate::forward::Forward`] before it forwards a call to a provider, [`net::GatedNet`] before a call of
//! the embedded provider reaches its sockets, [`poller::GatedPoller`] before a call reaches the poller, and [`handler::GatedHandler`] at
//! the end of each callback.

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

/// A kind of call that can fail. There are calls of
/// [`Provider`](rdma_transport::provider::Provider), calls of
/// [`Net`](rdma_transport_embedded::iwarp::net::Net) (with names that begin with `Net`), and calls
/// of [`Poller`](rdma_reactor::Poller). The callbacks of a program fail by a panic.
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
    /// This call returns no error, so it can fail only by a panic.
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
    NetListenLocal,
    NetAcceptLocal,
    NetConnectLocal,
    NetPass,
    NetTake,
    PollerRegister,
    PollerWait,
    Callback,
}

/// The way in which a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The call returns a system error with this code.
    Errno(i32),
    /// The queue is full. For this failure, `ibv_post_send`(3) returns `ENOMEM`.
    Full,
    /// The last work request of the chain fails with a system error. Those before it are posted.
    LastErrno(i32),
    /// The queue has space for all work requests of the chain except for the last one.
    LastFull,
    /// The provider panics, so the call does not return.
    Panic,
}

impl Failure {
    /// Returns the system error that a call with this failure returns.
    #[must_use]
    pub fn system(self) -> io::Error {
        match self {
            Self::Errno(code) | Self::LastErrno(code) => io::Error::from_raw_os_error(code),
            Self::Full | Self::LastFull => io::Error::from_raw_os_error(libc::ENOMEM),
            Self::Panic => io::Error::other("a panic, which has no error"),
        }
    }
}

/// For each kind of object, the number of objects that the reactor has created and not destroyed. The kinds are connection-manager ids,
/// regions, completion queues and shared receive queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the objects")]
pub struct Objects {
    pub ids: i64,
    pub regions: i64,
    pub completion_queues: i64,
    pub shared_queues: i64,
}

/// An event that a device reports without a preceding call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// All connections have failed, with this reason.
    Failed(&'static str),
    /// All completion queues have overrun, so their further completions are lost.
    Overrun,
    /// The time-wait of all connections has ended, so their queue pair numbers may be used again.
    Timewait,
    /// The device is being removed. It is unavailable until [`Gate::plug_in`] is called.
    Removal,
    /// The device reports this event.
    Device(DeviceEventKind),
    /// The shared receive queue that was created last has failed.
    SharedQueueFailed,
}

/// The way in which address resolution fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unresolved {
    /// The provider reports that no device can reach the address.
    Failed,
    /// The provider never reports a result.
    Silent,
}

/// A requested failure of a call.
#[derive(Clone, Copy, Debug)]
struct Fault {
    /// The number of the call that fails, among the calls of its kind. The first one has the number 0.
    nth: u32,
    failure: Failure,
    /// True if all later calls of this kind fail too.
    lasting: bool,
}

#[derive(Debug, Default)]
struct State {
    counts: BTreeMap<Call, u32>,
    /// The requested failures, by the kind of call.
    faults: BTreeMap<Call, Fault>,
    failed: BTreeMap<Call, u32>,
    objects: Objects,
    /// The requested failure of the next completion.
    completion: Option<WorkFailure>,
    said: VecDeque<Said>,
    unplugged: bool,
    /// True if `Established` events of accepted connections are dropped.
    loses_beginnings: bool,
    /// True if the address of the first listener must move to another device. The next call of the provider carries out the move.
    moves: bool,
    /// The requested failure of the next address resolution.
    unresolved: Option<Unresolved>,
    /// The peer's remote keys that the next messages must invalidate. Each message invalidates and removes the first key of the list.
    taken_back: VecDeque<RemoteKey>,
    /// All memory that was registered so far. Some of it may have been freed.
    memories: Vec<Weak<Memory>>,
    /// The addresses of regions that the device has refused to release. The addresses of regions whose remote keys the device has refused
    /// to release are also included.
    refused: BTreeSet<u64>,
}

/// The gate, see the [module](self). Clones share the same state.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<Mutex<State>>);

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes one call fail: call number `nth` of the kind `call`. The first call of this kind on this gate has the number 0.
    pub fn fail_nth(&self, call: Call, nth: u32, failure: Failure) {
        self.state().faults.insert(call, Fault { nth, failure, lasting: false });
    }

    /// Makes all calls of this kind fail with `EIO`, except for the next `more` calls.
    pub fn break_after(&self, call: Call, more: u32) {
        let mut state = self.state();
        let nth = state.counts.get(&call).copied().unwrap_or(0) + more;
        state.faults.insert(call, Fault { nth, failure: Failure::Errno(libc::EIO), lasting: true });
    }

    /// Makes the next call of this kind panic.
    pub fn panic_next(&self, call: Call) {
        let nth = self.state().counts.get(&call).copied().unwrap_or(0);
        self.fail_nth(call, nth, Failure::Panic);
    }

    /// Makes the next completion a failure.
    pub fn fail_completion(&self, failure: WorkFailure) {
        self.state().completion = Some(failure);
    }

    /// Requests an event. The device reports it when the reactor polls the device next.
    pub fn say(&self, said: Said) {
        let mut state = self.state();
        state.unplugged |= said == Said::Removal;
        state.said.push_back(said);
    }

    /// Removes and returns the oldest requested event, or returns `None` if none is requested.
    #[must_use]
    pub fn takes_said(&self) -> Option<Said> {
        self.state().said.pop_front()
    }

    /// Makes the removed device available again.
    pub fn plug_in(&self) {
        self.state().unplugged = false;
    }

    /// Returns true if the device is removed.
    #[must_use]
    pub fn is_unplugged(&self) -> bool {
        self.state().unplugged
    }

    /// From now on, drops the `Established` events of accepted connections.
    pub fn lose_beginnings(&self) {
        self.state().loses_beginnings = true;
    }

    /// Returns true if `Established` events of accepted connections are dropped.
    #[must_use]
    pub fn loses_beginnings(&self) -> bool {
        self.state().loses_beginnings
    }

    /// Removes and returns the requested failure of the next completion, or returns `None` if none is requested.
    #[must_use]
    pub fn takes_completion(&self) -> Option<WorkFailure> {
        self.state().completion.take()
    }

    /// Makes the address resolution of the next connect of this side fail in the way `how`.
    pub fn leave_unresolved(&self, how: Unresolved) {
        self.state().unresolved = Some(how);
    }

    /// Removes and returns the requested failure of an address resolution, or returns `None` if none is requested.
    #[must_use]
    pub fn takes_unresolved(&self) -> Option<Unresolved> {
        self.state().unresolved.take()
    }

    /// Requests a move of the first listener's address to another device, as in a failover of a bonded interface. The listener is notified,
    /// and receives no further requests.
    pub fn move_address(&self) {
        self.state().moves = true;
    }

    /// Returns true if the address must move now, and clears the request.
    #[must_use]
    pub fn takes_move(&self) -> bool {
        std::mem::take(&mut self.state().moves)
    }

    /// Requests that the next message invalidates this key of the peer: a Send becomes a Send with Invalidate.
    pub fn take_back(&self, key: RemoteKey) {
        self.state().taken_back.push_back(key);
    }

    /// Returns true if the next message must invalidate a key.
    #[must_use]
    pub fn is_to_take_key(&self) -> bool {
        !self.state().taken_back.is_empty()
    }

    /// Removes and returns the key that the next message must invalidate, or returns `None` if it must invalidate none.
    #[must_use]
    pub fn takes_key(&self) -> Option<RemoteKey> {
        self.state().taken_back.pop_front()
    }

    /// Records that this memory was registered.
    pub fn watch(&self, memory: &Arc<Memory>) {
        let mut state = self.state();
        state.memories.retain(|memory| memory.strong_count() > 0);
        state.memories.push(Arc::downgrade(memory));
    }

    /// Returns the number of memory objects that were ever registered and are not freed yet.
    #[must_use]
    pub fn memories(&self) -> usize {
        self.state().memories.iter().filter(|memory| memory.strong_count() > 0).count()
    }

    /// Clears all requested failures of calls.
    pub fn heal(&self) {
        self.state().faults.clear();
    }

    /// Returns the number of calls so far, by kind.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Call, u32> {
        self.state().counts.clone()
    }

    /// Returns the number of calls that have failed at the request of this gate.
    #[must_use]
    pub fn failed(&self) -> u32 {
        self.state().failed.values().sum()
    }

    /// Returns the number of calls of this kind that have failed at the request of this gate.
    #[must_use]
    pub fn failed_of(&self, call: Call) -> u32 {
        self.state().failed.get(&call).copied().unwrap_or(0)
    }

    /// Records that a call has failed in the inner provider.
    pub fn note_failed(&self, call: Call) {
        *self.state().failed.entry(call).or_default() += 1;
    }

    /// Makes the next call of this kind fail with `EBUSY`. Has no effect if a failure of this kind is already requested.
    pub fn refuse(&self, call: Call) {
        let state = &mut *self.state();
        let nth = state.counts.get(&call).copied().unwrap_or(0);
        state.faults.entry(call).or_insert(Fault { nth, failure: Failure::Errno(libc::EBUSY), lasting: false });
    }

    /// Records the result of releasing a region, or its remote key: `is_back` is true if the device has released it. `address` is the
    /// address of the region.
    pub fn note_taken_back(&self, address: u64, is_back: bool) {
        let refused = &mut self.state().refused;
        if is_back {
            refused.remove(&address);
        } else {
            refused.insert(address);
        }
    }

    /// Returns true if the device has refused to release the region at this address, or the remote key of that region.
    #[must_use]
    pub fn keeps(&self, address: u64) -> bool {
        self.state().refused.contains(&address)
    }

    /// Returns the number of existing objects of each kind.
    #[must_use]
    pub fn objects(&self) -> Objects {
        self.state().objects
    }

    /// Records that an object was created or destroyed.
    pub fn note(&self, change: impl FnOnce(&mut Objects)) {
        change(&mut self.state().objects);
    }

    /// Counts a call. Returns the requested failure, or `None` if the call must succeed.
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

    /// Counts a system call.
    ///
    /// # Errors
    /// The requested failure.
    pub fn system(&self, call: Call) -> io::Result<()> {
        self.pass(call).map_or(Ok(()), |failure| Err(failure.system()))
    }
}
