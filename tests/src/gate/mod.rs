//! The fallible calls below a reactor, counted by kind, and the one of them that is to fail.
//!
//! [`crate::forward::Forward`] asks a gate before it passes a call of the reactor on to a provider, [`net::GatedNet`] before a
//! call of the embedded provider reaches its sockets, and [`poller::GatedPoller`] before a call reaches the poller.
//! [`handler::GatedHandler`] asks it at the end of each callback.

pub mod handler;
pub mod net;
pub mod poller;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_transport::event::DeviceEventKind;
use rdma_transport::wc::Failure as WorkFailure;

/// The kinds of fallible calls: those of [`Provider`](rdma_transport::provider::Provider), then those of
/// [`Net`](rdma_transport::iwarp::net::Net), which begin with `Net`, those of [`Poller`](rdma_reactor::Poller), and the callbacks
/// of a program, which fail by a panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "named as the calls")]
pub enum Call {
    Listen,
    Resolve,
    Connect,
    Accept,
    Reject,
    Disconnect,
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

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// With an error of the system.
    Errno(i32),
    /// The queue is full: `ENOMEM` of `ibv_post_send`(3).
    Full,
    /// The last work request of the chain fails with an error of the system, and those before it are taken.
    LastErrno(i32),
    /// The queue has room for all work requests of the chain but the last.
    LastFull,
}

impl Failure {
    /// The error of the system.
    #[must_use]
    pub fn system(self) -> io::Error {
        match self {
            Self::Errno(code) | Self::LastErrno(code) => io::Error::from_raw_os_error(code),
            Self::Full | Self::LastFull => io::Error::from_raw_os_error(libc::ENOMEM),
        }
    }
}

/// What a provider has made for its user and not destroyed: handles of the connection manager, regions, completion queues
/// and shared receive queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the objects")]
pub struct Objects {
    pub ids: i64,
    pub regions: i64,
    pub completion_queues: i64,
    pub shared_queues: i64,
}

/// What a device says on its own account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// Each connection has failed, for this reason.
    Failed(&'static str),
    /// Each completion queue has overrun, so that what would complete there is lost.
    Overrun,
    /// The numbers of the queue pairs of all connections may be used again.
    Timewait,
    /// The device is going away, until [`Gate::plug_in`].
    Removal,
    /// Something about the device.
    Device(DeviceEventKind),
}

/// A call that fails.
#[derive(Clone, Copy, Debug)]
struct Fault {
    call: Call,
    /// The number of the call among those of its kind, from 0.
    nth: u32,
    failure: Failure,
    /// Later calls of the kind fail, too.
    lasting: bool,
}

#[derive(Debug, Default)]
struct State {
    counts: BTreeMap<Call, u32>,
    fault: Option<Fault>,
    failed: u32,
    objects: Objects,
    /// The failure of the next completion.
    completion: Option<WorkFailure>,
    said: VecDeque<Said>,
    unplugged: bool,
    /// Nobody is told that a connection from outside is up.
    loses_beginnings: bool,
    /// The address of the first listener is about to move.
    moves: bool,
    /// The next connection of this side goes on under another id.
    diverts: bool,
}

/// See the [module](self). Clones are the same gate.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<Mutex<State>>);

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets one call fail: the `nth` of its kind, from 0, counted from the beginning.
    pub fn fail_nth(&self, call: Call, nth: u32, failure: Failure) {
        self.state().fault = Some(Fault { call, nth, failure, lasting: false });
    }

    /// Lets all calls of a kind fail with `EIO` after `more` of them.
    pub fn break_after(&self, call: Call, more: u32) {
        let mut state = self.state();
        let nth = state.counts.get(&call).copied().unwrap_or(0) + more;
        state.fault = Some(Fault { call, nth, failure: Failure::Errno(libc::EIO), lasting: true });
    }

    /// Lets the next completion be a failure.
    pub fn fail_completion(&self, failure: WorkFailure) {
        self.state().completion = Some(failure);
    }

    /// Lets the device say something.
    pub fn say(&self, said: Said) {
        let mut state = self.state();
        state.unplugged |= said == Said::Removal;
        state.said.push_back(said);
    }

    /// Takes what the device says.
    #[must_use]
    pub fn takes_said(&self) -> Option<Said> {
        self.state().said.pop_front()
    }

    /// The device that went away is there again.
    pub fn plug_in(&self) {
        self.state().unplugged = false;
    }

    /// Whether the device went away.
    #[must_use]
    pub fn is_unplugged(&self) -> bool {
        self.state().unplugged
    }

    /// From now on nobody is told that a connection from outside is up.
    pub fn lose_beginnings(&self) {
        self.state().loses_beginnings = true;
    }

    /// Whether nobody is told so.
    #[must_use]
    pub fn loses_beginnings(&self) -> bool {
        self.state().loses_beginnings
    }

    /// Takes the failure of the next completion.
    #[must_use]
    pub fn takes_completion(&self) -> Option<WorkFailure> {
        self.state().completion.take()
    }

    /// Lets the next connection of this side go on under another id, as one that no device leads to does.
    pub fn divert_connection(&self) {
        self.state().diverts = true;
    }

    /// Takes the order to divert a connection.
    #[must_use]
    pub fn takes_diversion(&self) -> bool {
        std::mem::take(&mut self.state().diverts)
    }

    /// Lets the address of the first listener move, as a bond does that fails over: the listener is told, and hears no more.
    pub fn move_address(&self) {
        self.state().moves = true;
    }

    /// Whether that is to happen now.
    #[must_use]
    pub fn takes_move(&self) -> bool {
        std::mem::take(&mut self.state().moves)
    }

    /// Lets no call fail any more.
    pub fn heal(&self) {
        self.state().fault = None;
    }

    /// Number of calls so far, by kind.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Call, u32> {
        self.state().counts.clone()
    }

    /// Number of calls that have failed here.
    #[must_use]
    pub fn failed(&self) -> u32 {
        self.state().failed
    }

    /// What exists below.
    #[must_use]
    pub fn objects(&self) -> Objects {
        self.state().objects
    }

    /// Notes what was made or destroyed.
    pub fn note(&self, change: impl FnOnce(&mut Objects)) {
        change(&mut self.state().objects);
    }

    /// Counts a call; `Some` if it is to fail.
    pub fn pass(&self, call: Call) -> Option<Failure> {
        let mut state = self.state();
        let count = state.counts.entry(call).or_default();
        let now = *count;
        *count += 1;
        let fault =
            state.fault.filter(|fault| fault.call == call && (now == fault.nth || fault.lasting && now > fault.nth))?;
        state.failed += 1;
        Some(fault.failure)
    }

    /// Counts a call of the system's, and fails it if it is to fail.
    ///
    /// # Errors
    /// What the gate was told.
    pub fn system(&self, call: Call) -> io::Result<()> {
        self.pass(call).map_or(Ok(()), |failure| Err(failure.system()))
    }
}
