//! Groups of reactors, each on its own thread, which share the incoming connections.
//!
//! The program creates the reactors and the threads, so it decides on thread names, priorities, scopes and handlers. [`Reactors::of`] makes
//! a group of the reactors. At least one of them listens. A connect request is sent to the chosen reactor before anything is allocated for
//! the request. On the embedded provider, the socket is moved, with its MPA request already read. On devices, the connection-manager id is
//! moved (`rdma_migrate_id`(3)).
//!
//! So there is one listener and one order of arrival, and the choice depends on the current load. The alternative, `SO_REUSEPORT` with a
//! listener for each reactor, would choose by a hash of the addresses, and exists only for TCP.
//!
//! An established connection cannot move to another reactor: its regions, its posted receives and its buffers are tied to one provider.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use rdma_transport::cm::Detached;

use super::request::RequestOrigin;
use crate::error::Error;
use crate::providers::Handle;
use crate::seam::wake::WakeFlag;

/// The choice of the reactor that accepts a connection; see [`crate::Handler::on_place`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// The reactor with the fewest connections. Connect requests that are on their way to a reactor count as connections.
    #[default]
    LeastLoaded,
    /// The reactor with this index in the group. If that reactor accepts no connections, the least loaded reactor is chosen. A reactor
    /// accepts no connections if it is draining or was dropped, if the index is out of range, or while [`crate::Config::max_pending`]
    /// connect requests are on their way to it.
    Reactor(usize),
}

/// A group of reactors. Any thread may use it. None of its methods blocks.
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

/// The part of a reactor's state that is shared with the other reactors of its group.
struct GroupMember {
    arrivals: Sender<Arrival>,
    wake: Arc<WakeFlag>,
    /// The number of connections of the reactor, in any state, plus the number of connect requests on their way to it.
    load: AtomicUsize,
    /// The number of connect requests on their way to the reactor.
    coming: AtomicUsize,
    /// The largest permitted value of `coming`.
    max_coming: usize,
    /// True if the reactor accepts connections.
    open: AtomicBool,
}

/// A connect request on its way from the reactor that listens to the reactor that accepts it.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// The detached request, with the index of its provider in the reactor that listens.
    pub(crate) detached: Handle<Detached>,
    pub(crate) origin: RequestOrigin,
}

impl GroupMember {
    fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// Counts a request that will be sent to this reactor, and returns true. If the reactor accepts no requests now, returns false and does
    /// not count the request.
    fn reserve(&self) -> bool {
        // This thread first increments `coming`, and then reads `open`. A reactor that stops accepting first clears `open`, and then reads
        // `coming`. So either this thread finds `open` cleared, or that reactor finds the request counted.
        let coming = self.coming.fetch_add(1, Ordering::SeqCst);
        let takes = coming < self.max_coming && self.open.load(Ordering::SeqCst);
        if takes {
            self.load.fetch_add(1, Ordering::Relaxed);
        } else {
            self.no_longer_coming();
        }
        takes
    }

    /// Notes that a request that was counted in `coming` will not be sent to this reactor.
    fn no_longer_coming(&self) {
        self.coming.fetch_sub(1, Ordering::SeqCst);
        // While the request was counted, this reactor may have found that its drain must wait for
        // the request. So this reactor must check again if the drain has ended.
        if !self.open.load(Ordering::SeqCst) && !crate::planted("a-drain-waits-for-a-request-that-does-not-come") {
            self.wake.wake();
        }
    }
}

impl Reactors {
    /// Creates a group. Each member is given as a tuple: its wake flag, its number of connections,
    /// and the largest number of requests that may be on their way to that member. Returns the
    /// group and the membership of each member.
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
            handled: HandledRequest::default(),
        });
        (group.clone(), ends.collect())
    }

    /// Returns the number of reactors in the group, including those that were dropped.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Returns true if the group has no reactors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Returns the number of connections of a reactor, in any state, plus the number of connect requests on their way to it. `None` if the
    /// reactor accepts no connections, because it is draining or was dropped, or if the index is out of range.
    #[must_use]
    pub fn load(&self, index: usize) -> Option<usize> {
        self.members.get(index).filter(|member| member.open.load(Ordering::Relaxed)).map(GroupMember::load)
    }

    /// Drains one reactor, like [`crate::ReactorHandle::drain`]. The other reactors accept the new connections from now on.
    ///
    /// If the drained reactor listens, it continues to listen for the other reactors. In this case, its `run` returns only when every other
    /// reactor is draining or was dropped. An `index` out of range is ignored.
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

    /// Drains all reactors. All of them stop listening, and the `run` of each reactor returns when its connections have ended.
    pub fn drain_all(&self, deadline: Duration) {
        // All reactors stop accepting connections before the first reactor begins its drain. Otherwise a draining reactor that listens
        // would continue to listen for the reactors that still accept connections.
        self.members.iter().for_each(|member| member.open.store(false, Ordering::SeqCst));
        self.members.iter().for_each(|member| member.wake.drain(deadline));
    }

    /// Binds the calling thread to a processor core. The core is number `index` of the cores that this process may use, modulo the number
    /// of these cores.
    ///
    /// # Errors
    /// The system does not report its cores, or refuses to bind the thread.
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

/// The membership of a reactor in a group.
#[derive(Debug)]
pub(crate) struct GroupMembership {
    group: Reactors,
    pub(crate) index: usize,
    arrivals: Receiver<Arrival>, // bound: handovers
    handled: HandledRequest,
}

/// The progress of the connect request that this reactor handles now, if the group has assigned the
/// request to this reactor. Such a request is counted in `load`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum HandledRequest {
    /// There is no such request, or the program has not accepted it.
    #[default]
    Waits,
    /// The program has accepted the request. The next connection that is counted belongs to it.
    Begins,
    /// The request has become a connection, which is counted in `load` instead of the request.
    Accepted,
}

impl GroupMembership {
    fn own(&self) -> &GroupMember {
        &self.group.members[self.index]
    }

    /// Assigns a request to a reactor, and counts it in the load of that reactor. Returns the reactor's index, or `None` if no reactor
    /// accepts connections.
    pub(crate) fn place(&self, place: Place) -> Option<usize> {
        let members = &self.group.members;
        if let Place::Reactor(index) = place {
            if members.get(index).is_some_and(GroupMember::reserve) {
                return Some(index);
            }
        }
        // Between the choice of a reactor and its reservation, another thread may close or fill that reactor. In this case, another reactor
        // is chosen. This happens at most once for each reactor.
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

    /// Sends a request to the reactor with this index, to which it was assigned. Returns the request if that reactor was dropped.
    pub(crate) fn send(&self, index: usize, arrival: Arrival) -> Result<(), Box<Arrival>> {
        let member = &self.group.members[index];
        member.arrivals.send(arrival).map_err(|error| Box::new(error.0))?;
        if !crate::planted("a-request-is-handed-over-in-silence") {
            member.wake.wake();
        }
        Ok(())
    }

    pub(crate) fn next_arrival(&self) -> Option<Arrival> {
        self.arrivals.try_recv().ok()
    }

    /// Removes a request from the load of the reactor with this index, because the request was assigned to that reactor but will not be
    /// sent there.
    pub(crate) fn unplace(&self, index: usize) {
        let member = &self.group.members[index];
        member.load.fetch_sub(1, Ordering::Relaxed);
        member.no_longer_coming();
    }

    /// Notes that the program has accepted a request that was sent to this reactor. So `gained`
    /// will not count the connection of this request again.
    pub(crate) fn begin(&mut self) {
        self.handled = HandledRequest::Begins;
    }

    /// Notes that a request that was sent to this reactor has become a connection or was refused.
    pub(crate) fn done(&mut self) {
        let accepted = std::mem::take(&mut self.handled) == HandledRequest::Accepted;
        if !accepted && !crate::planted("a-refused-request-stays-in-the-load") {
            self.own().load.fetch_sub(1, Ordering::Relaxed);
        }
        self.own().coming.fetch_sub(1, Ordering::SeqCst);
    }

    /// Counts a new connection of this reactor, unless it is already counted as a request.
    pub(crate) fn gained(&mut self) {
        if self.handled == HandledRequest::Begins {
            self.handled = HandledRequest::Accepted;
        } else {
            self.own().load.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts the end of a connection of this reactor.
    pub(crate) fn lost(&self) {
        self.own().load.fetch_sub(1, Ordering::Relaxed);
    }

    /// Makes this reactor accept no more connections.
    pub(crate) fn close(&self) {
        if self.own().open.swap(false, Ordering::SeqCst) {
            self.group.wake_others(self.index);
        }
    }

    /// Returns true if requests are still on their way to this reactor.
    pub(crate) fn expects(&self) -> bool {
        self.own().coming.load(Ordering::SeqCst) > 0
    }

    /// Returns true if any reactor of the group accepts connections.
    pub(crate) fn is_open(&self) -> bool {
        self.group.members.iter().any(|member| member.open.load(Ordering::SeqCst))
    }
}

impl Drop for GroupMembership {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use rdma_transport::slab::Key;

    use super::*;
    use crate::config::Framing;
    use crate::id::{ListenerId, ReactorTag};
    use crate::options::Service;
    use crate::seam::wake::NoWake;
    use crate::security::Security;

    /// A reactor that drains waits for the requests on their way to it. If such a request is not sent after all, no other event may follow,
    /// so the reactor must be woken.
    #[test]
    fn a_draining_reactor_is_woken_when_a_request_does_not_come() {
        let flags = [0, 1].map(|_| Arc::new(WakeFlag::new(Arc::new(NoWake))));
        let (_, ends) = Reactors::form(flags.iter().map(|flag| (Arc::clone(flag), 0, 8)).collect());
        assert_eq!(ends[0].place(Place::Reactor(1)), Some(1));
        ends[1].close();
        assert!(ends[1].expects() && !flags[1].take());
        ends[0].unplace(1);
        assert!(!ends[1].expects() && flags[1].take(), "the request is not sent");
        assert_eq!(ends[0].place(Place::Reactor(1)), Some(0));
        assert!(!ends[1].expects() && flags[1].take(), "the request was counted for a moment");
    }

    /// A reactor that sleeps is woken by the request that another one sends to it.
    #[test]
    fn a_request_wakes_the_reactor_to_which_it_is_sent() {
        let flags = [0, 1].map(|_| Arc::new(WakeFlag::new(Arc::new(NoWake))));
        let (_, ends) = Reactors::form(flags.iter().map(|flag| (Arc::clone(flag), 0, 8)).collect());
        let arrival = Arrival {
            detached: Handle { provider: 0, id: Detached::new("none", ()) },
            origin: RequestOrigin {
                reactor: 0,
                listener: ListenerId::new(ReactorTag::next(), Key::new(0, 0)),
                framing: Framing::default(),
                service: Service::default(),
                security: Security::default(),
                peer: SocketAddr::from(([127, 0, 0, 1], 1)),
                private_data: Box::default(),
            },
        };
        assert_eq!(ends[0].place(Place::Reactor(1)), Some(1));
        ends[0].send(1, arrival).expect("a reactor");
        assert!(flags[1].take() && ends[1].next_arrival().is_some());
    }

    /// A request counts in the load of the reactor to which it was assigned until it is refused, or until its connection has ended.
    #[test]
    fn a_refused_request_leaves_the_load() {
        let (group, mut ends) = Reactors::form(vec![(Arc::new(WakeFlag::new(Arc::new(NoWake))), 0, 8)]);
        let end = &mut ends[0];
        assert_eq!(end.place(Place::LeastLoaded), Some(0));
        end.done();
        assert_eq!((group.load(0), end.expects()), (Some(0), false), "it is refused");
        assert_eq!(end.place(Place::LeastLoaded), Some(0));
        end.begin();
        end.gained();
        end.done();
        assert_eq!((group.load(0), end.expects()), (Some(1), false), "it is a connection");
        assert_eq!(end.place(Place::LeastLoaded), Some(0));
        end.gained();
        end.done();
        assert_eq!((group.load(0), end.expects()), (Some(2), false), "it is refused, and the program has connected");
        assert_eq!(end.place(Place::LeastLoaded), Some(0));
        end.begin();
        end.gained();
        end.lost();
        end.done();
        assert_eq!((group.load(0), end.expects()), (Some(2), false), "accepting it has failed");
    }

    #[test]
    fn requests_on_their_way_are_limited() {
        let (_, ends) = Reactors::form(vec![(Arc::new(WakeFlag::new(Arc::new(NoWake))), 0, 8)]);
        assert_eq!((0..20).filter(|_| ends[0].place(Place::LeastLoaded).is_some()).count(), 8);
        ends[0].unplace(0);
        assert_eq!((0..20).filter(|_| ends[0].place(Place::Reactor(0)).is_some()).count(), 1);
    }
}
