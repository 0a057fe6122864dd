//! Groups of reactors, one thread each: incoming connections are spread over all of them.
//!
//! The program creates the reactors and the threads, so that it decides on names, priorities, scopes and borrows of a
//! handler; [`Reactors::of`] makes a group of the reactors. One or more reactors listen. An incoming connect request is
//! handed over before anything is allocated for it: on the embedded provider the socket is moved with its MPA request
//! already read, on devices the connection-manager id (`rdma_migrate_id`(3)). So there is one listener, one order of
//! arrival, and a choice by the current load; with `SO_REUSEPORT` and a listener per reactor, a hash of addresses would
//! choose, and only TCP sockets have it.
//!
//! An established connection stays where it is, because regions registered with one provider, posted receives, and the
//! pools of their buffers cannot move.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use rdma_transport::cm::Detached;

use crate::config::Framing;
use crate::error::Error;
use crate::id::ListenerId;
use crate::options::Service;
use crate::providers::Handle;
use crate::seam::wake::WakeFlag;
use crate::security::Security;

/// The reactor of a group that accepts a connection; see [`crate::Handler::on_place`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// The reactor with the fewest connections, including those in transit to it.
    #[default]
    LeastLoaded,
    /// The reactor with this index in the group. If it accepts none (it is drained, gone or out of range), the least
    /// loaded one.
    Reactor(usize),
}

/// A group of reactors, usable from any thread. Nothing here blocks.
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor, Reactors};
///
/// /// Sends each message back, on any reactor.
/// struct Echo;
///
/// impl Handler for Echo {
///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
///         cx.send(conn, &message).expect("capacity for a reply");
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = Config::default().provider(ProviderChoice::Iwarp);
/// let mut reactors = vec![Reactor::new(config.clone())?, Reactor::new(config)?];
/// let group = Reactors::of(&mut reactors);
/// // One reactor listens, and hands connections to the one that has the fewest.
/// reactors[0].context().listen("127.0.0.1:0".parse()?)?;
/// let threads: Vec<_> = reactors.into_iter().enumerate().map(|(index, mut reactor)| {
///     std::thread::spawn(move || {
///         // If the system allows it, each thread has its own processor.
///         let _ = Reactors::pin(index);
///         reactor.run(&mut Echo)
///     })
/// }).collect();
/// // Each ends when its connections are closed, or after a second.
/// group.drain_all(Duration::from_secs(1));
/// for thread in threads {
///     thread.join().expect("a reactor's thread")?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Reactors {
    members: Arc<[GroupMember]>,
}

/// One reactor, as the others see it.
struct GroupMember {
    arrivals: Sender<Arrival>,
    wake: Arc<WakeFlag>,
    /// The number of connections in any phase, and of connect requests in transit to it. An arriving one is counted
    /// throughout.
    load: AtomicUsize,
    /// The number of connect requests in transit to it.
    coming: AtomicUsize,
    /// The largest number of those.
    max_coming: usize,
    /// True if it accepts connections.
    open: AtomicBool,
}

/// A connect request in transit from the reactor that listens.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// The request, with the index of its provider in the reactor that listens.
    pub(crate) detached: Handle<Detached>,
    pub(crate) framing: Framing,
    pub(crate) service: Service,
    pub(crate) security: Security,
    /// The index of the reactor that listens. The listener is one of that reactor.
    pub(crate) reactor: usize,
    pub(crate) listener: ListenerId,
    pub(crate) peer: SocketAddr,
    pub(crate) private_data: Box<[u8]>,
}

impl GroupMember {
    fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// Counts a request that will arrive. Returns false if the reactor accepts none.
    fn reserve(&self) -> bool {
        // First the count, then the check: a closing reactor does both in the other order, and one of the two sees the
        // other.
        let coming = self.coming.fetch_add(1, Ordering::SeqCst);
        let takes = coming < self.max_coming && self.open.load(Ordering::SeqCst);
        if takes {
            self.load.fetch_add(1, Ordering::Relaxed);
        } else {
            self.coming.fetch_sub(1, Ordering::SeqCst);
        }
        takes
    }
}

impl Reactors {
    /// Creates a group of members, and the membership of each.
    pub(crate) fn form(members: Vec<(Arc<WakeFlag>, usize, usize)>) -> (Self, Vec<GroupMembership>) {
        let mut receivers = Vec::with_capacity(members.len());
        let members: Arc<[GroupMember]> = members
            .into_iter()
            .map(|(wake, connections, max_coming)| {
                let (sender, receiver) = unbounded();
                receivers.push(receiver);
                GroupMember {
                    arrivals: sender,
                    wake,
                    load: AtomicUsize::new(connections),
                    coming: AtomicUsize::new(0),
                    max_coming,
                    open: AtomicBool::new(true),
                }
            })
            .collect();
        let group = Self { members };
        let ends = receivers.into_iter().enumerate().map(|(index, arrivals)| GroupMembership {
            group: group.clone(),
            index,
            arrivals,
            counted: false,
        });
        (group.clone(), ends.collect())
    }

    /// Returns the number of reactors in the group, including those that are gone.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Returns true if the group has no reactors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Returns the number of a reactor's connections, in any phase, and of those in transit to it. `None` if it accepts
    /// no more: it is drained, gone, or out of range.
    #[must_use]
    pub fn load(&self, index: usize) -> Option<usize> {
        self.members.get(index).filter(|member| member.open.load(Ordering::Relaxed)).map(GroupMember::load)
    }

    /// Drains one reactor, like [`crate::ReactorHandle::drain`]. New connections go to the others from now on. If it
    /// listens, it continues to listen for them, and its `run` returns when the last of them is drained or gone.
    /// Ignored if `index` is out of range.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::Reactors;
    ///
    /// /// Drains the first reactor of a group; its clients have ten seconds to disconnect.
    /// fn retire(group: &Reactors) {
    ///     group.drain(0, Duration::from_secs(10));
    /// }
    /// ```
    pub fn drain(&self, index: usize, deadline: Duration) {
        if let Some(member) = self.members.get(index) {
            member.open.store(false, Ordering::SeqCst);
            member.wake.drain(deadline);
            self.wake_others(index);
        }
    }

    /// Drains all reactors: none listens any more, and each `run` returns when its connections have ended.
    pub fn drain_all(&self, deadline: Duration) {
        // All are closed before the first of them checks if another one is open.
        self.members.iter().for_each(|member| member.open.store(false, Ordering::SeqCst));
        self.members.iter().for_each(|member| member.wake.drain(deadline));
    }

    /// Binds the calling thread to a core: the `index`-th of those that this process may use, modulo their number.
    ///
    /// # Errors
    /// The system does not report its cores, or refuses.
    pub fn pin(index: usize) -> Result<(), Error> {
        let cores = core_affinity::get_core_ids().filter(|cores| !cores.is_empty());
        let cores = cores.ok_or(Error::Pin { index, reason: "the system does not say which cores there are" })?;
        let done = core_affinity::set_for_current(cores[index % cores.len()]);
        if done { Ok(()) } else { Err(Error::Pin { index, reason: "the system refuses" }) }
    }

    fn wake_others(&self, index: usize) {
        for (other, member) in self.members.iter().enumerate() {
            if other != index {
                member.wake.wake();
            }
        }
    }
}

impl fmt::Debug for Reactors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries((0..self.len()).map(|index| self.load(index))).finish()
    }
}

/// A reactor's membership of its group.
#[derive(Debug)]
pub(crate) struct GroupMembership {
    group: Reactors,
    pub(crate) index: usize,
    arrivals: Receiver<Arrival>,
    /// True if the next connection is already counted, because it was placed here.
    counted: bool,
}

impl GroupMembership {
    fn own(&self) -> &GroupMember {
        &self.group.members[self.index]
    }

    /// Assigns the request to a reactor and increments that reactor's load. Returns `None` if all reactors are
    /// draining.
    pub(crate) fn place(&self, place: Place) -> Option<usize> {
        let members = &self.group.members;
        if let Place::Reactor(index) = place {
            if members.get(index).is_some_and(GroupMember::reserve) {
                return Some(index);
            }
        }
        // Another one may close or fill up in between, at most once per reactor.
        for _ in 0..members.len() {
            let open = members.iter().enumerate().filter(|(_, member)| {
                member.open.load(Ordering::Relaxed) && member.coming.load(Ordering::Relaxed) < member.max_coming
            });
            let (index, member) = open.min_by_key(|(_, member)| member.load())?;
            if member.reserve() {
                return Some(index);
            }
        }
        None
    }

    /// Sends a request to the reactor at which it was placed. Returns the request if that reactor is gone.
    pub(crate) fn send(&self, index: usize, arrival: Arrival) -> Result<(), Box<Arrival>> {
        let member = &self.group.members[index];
        member.arrivals.send(arrival).map_err(|error| Box::new(error.0))?;
        member.wake.wake();
        Ok(())
    }

    pub(crate) fn next_arrival(&self) -> Option<Arrival> {
        self.arrivals.try_recv().ok()
    }

    /// Notes that a request that was placed elsewhere is not sent there.
    pub(crate) fn unplace(&self, index: usize) {
        let member = &self.group.members[index];
        member.load.fetch_sub(1, Ordering::Relaxed);
        member.coming.fetch_sub(1, Ordering::SeqCst);
    }

    /// Notes that a request that was placed here is about to become a connection, or to be refused.
    pub(crate) fn begin(&mut self) {
        self.counted = true;
    }

    /// Notes that it has become a connection, or was refused.
    pub(crate) fn done(&mut self) {
        if std::mem::take(&mut self.counted) {
            self.own().load.fetch_sub(1, Ordering::Relaxed);
        }
        self.own().coming.fetch_sub(1, Ordering::SeqCst);
    }

    /// Counts a new connection.
    pub(crate) fn gained(&mut self) {
        if !std::mem::take(&mut self.counted) {
            self.own().load.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts the end of a connection.
    pub(crate) fn lost(&self) {
        self.own().load.fetch_sub(1, Ordering::Relaxed);
    }

    /// Stops accepting requests.
    pub(crate) fn close(&self) {
        if self.own().open.swap(false, Ordering::SeqCst) {
            self.group.wake_others(self.index);
        }
    }

    /// Returns true if requests are still in transit to this reactor.
    pub(crate) fn expects(&self) -> bool {
        self.own().coming.load(Ordering::SeqCst) > 0
    }

    /// Returns true if a reactor of the group accepts connections.
    pub(crate) fn is_open(&self) -> bool {
        self.group.members.iter().any(|member| member.open.load(Ordering::SeqCst))
    }
}

impl Drop for GroupMembership {
    fn drop(&mut self) {
        self.close();
    }
}
