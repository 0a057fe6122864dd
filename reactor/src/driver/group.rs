//! Several reactors, one thread each: what connects to one of them is spread over all.
//!
//! The program makes the reactors and the threads, so that it decides on names, priorities, scopes and what a handler
//! borrows; [`Reactors::of`] makes a group of them. One of them listens, or more do. A connect request that comes in is
//! handed over before anything is allocated for it: on the embedded provider the socket with its MPA request already
//! read moves, on devices the connection-manager id (`rdma_migrate_id`(3)). So there is one listener, one order of
//! arrival, and a choice made with the load at hand; `SO_REUSEPORT`, with a listener per reactor, would let a hash of
//! addresses choose, and exists on TCP sockets only.
//!
//! A connection that is up stays where it is: regions registered with one provider, posted receives, and the pools their
//! buffers belong to do not move.

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

/// Which reactor of a group takes a connection; see [`crate::Handler::on_place`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// The one with the fewest connections, those on their way included.
    #[default]
    LeastLoaded,
    /// This one, by its index in the group. If it takes none, being drained, gone or out of range, the least loaded.
    Reactor(usize),
}

/// A group of reactors, seen from any thread. Nothing here blocks.
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor, Reactors};
///
/// /// Sends back what it gets, on whichever reactor.
/// struct Echo;
///
/// impl Handler for Echo {
///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
///         cx.send(conn, &message).expect("room for an answer");
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = Config::default().provider(ProviderChoice::Iwarp);
/// let mut reactors = vec![Reactor::new(config.clone())?, Reactor::new(config)?];
/// let group = Reactors::of(&mut reactors);
/// // One listens, and hands connections to the one that has the fewest.
/// reactors[0].context().listen("127.0.0.1:0".parse()?)?;
/// let threads: Vec<_> = reactors.into_iter().enumerate().map(|(index, mut reactor)| {
///     std::thread::spawn(move || {
///         // Where the system allows it, each has a processor of its own.
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
    members: Arc<[Member]>,
}

/// One reactor, as the others see it.
struct Member {
    arrivals: Sender<Arrival>,
    wake: Arc<WakeFlag>,
    /// Connections in any phase, and connect requests on their way to it; one that arrives is counted once all the time.
    load: AtomicUsize,
    /// Connect requests on their way to it.
    coming: AtomicUsize,
    /// Most of those.
    max_coming: usize,
    /// It takes connections.
    open: AtomicBool,
}

/// A connect request on its way from the reactor that listens.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// With the number of its provider in the reactor that listens.
    pub(crate) detached: Handle<Detached>,
    pub(crate) framing: Framing,
    pub(crate) service: Service,
    pub(crate) security: Security,
    /// Index of the reactor that listens, and its listener.
    pub(crate) reactor: usize,
    pub(crate) listener: ListenerId,
    pub(crate) peer: SocketAddr,
    pub(crate) private_data: Box<[u8]>,
}

impl Member {
    fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// Counts a request that is to come; `false` when it takes none.
    fn reserve(&self) -> bool {
        // First the count, then the question: who closes asks in the other order, and one of both sees the other.
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
    /// A group of members, and each one's own end of it.
    pub(crate) fn form(members: Vec<(Arc<WakeFlag>, usize, usize)>) -> (Self, Vec<Membership>) {
        let mut receivers = Vec::with_capacity(members.len());
        let members: Arc<[Member]> = members
            .into_iter()
            .map(|(wake, connections, max_coming)| {
                let (sender, receiver) = unbounded();
                receivers.push(receiver);
                Member {
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
        let ends = receivers.into_iter().enumerate().map(|(index, arrivals)| Membership {
            group: group.clone(),
            index,
            arrivals,
            counted: false,
        });
        (group.clone(), ends.collect())
    }

    /// Reactors in the group, those that are gone included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether the group is of no reactors at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Connections of a reactor, in any phase, and those on their way to it; `None` when it takes no more: it is drained,
    /// gone, or out of range.
    #[must_use]
    pub fn load(&self, index: usize) -> Option<usize> {
        self.members.get(index).filter(|member| member.open.load(Ordering::Relaxed)).map(Member::load)
    }

    /// Drains one reactor, as [`crate::ReactorHandle::drain`] does. What connects goes to the others from now on; if it
    /// listens, it goes on listening for them, and its `run` returns when the last of them is drained or gone.
    /// Ignored when out of range.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::Reactors;
    ///
    /// /// Takes the first reactor out of a group; its clients have ten seconds to go.
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

    /// Drains all of them: nobody listens any more, and each `run` returns when its connections have ended.
    pub fn drain_all(&self, deadline: Duration) {
        // All, before the first of them looks for one that is left.
        self.members.iter().for_each(|member| member.open.store(false, Ordering::SeqCst));
        self.members.iter().for_each(|member| member.wake.drain(deadline));
    }

    /// Binds the calling thread to a core: the `index`-th of those that this process may use, counted round.
    ///
    /// # Errors
    /// The system does not say which cores there are, or refuses.
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

/// A reactor's own end of its group.
#[derive(Debug)]
pub(crate) struct Membership {
    group: Reactors,
    pub(crate) index: usize,
    arrivals: Receiver<Arrival>,
    /// The next connection is counted already, since it was placed here.
    counted: bool,
}

impl Membership {
    fn own(&self) -> &Member {
        &self.group.members[self.index]
    }

    /// Counts a request in at the reactor that is to take it; `None` when all are being drained.
    pub(crate) fn place(&self, place: Place) -> Option<usize> {
        let members = &self.group.members;
        if let Place::Reactor(index) = place {
            if members.get(index).is_some_and(Member::reserve) {
                return Some(index);
            }
        }
        // Another may close or fill up in between: not more often than there are reactors.
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

    /// Sends a request to the reactor it was placed at. It comes back when that is gone.
    pub(crate) fn send(&self, index: usize, arrival: Arrival) -> Result<(), Box<Arrival>> {
        let member = &self.group.members[index];
        member.arrivals.send(arrival).map_err(|error| Box::new(error.0))?;
        member.wake.wake();
        Ok(())
    }

    pub(crate) fn next_arrival(&self) -> Option<Arrival> {
        self.arrivals.try_recv().ok()
    }

    /// A request that was placed elsewhere does not go there.
    pub(crate) fn unplace(&self, index: usize) {
        let member = &self.group.members[index];
        member.load.fetch_sub(1, Ordering::Relaxed);
        member.coming.fetch_sub(1, Ordering::SeqCst);
    }

    /// A request that was placed here is about to become a connection, or to be refused.
    pub(crate) fn begin(&mut self) {
        self.counted = true;
    }

    /// It has become one, or was refused.
    pub(crate) fn done(&mut self) {
        if std::mem::take(&mut self.counted) {
            self.own().load.fetch_sub(1, Ordering::Relaxed);
        }
        self.own().coming.fetch_sub(1, Ordering::SeqCst);
    }

    /// There is a connection more.
    pub(crate) fn gained(&mut self) {
        if !std::mem::take(&mut self.counted) {
            self.own().load.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// There is a connection less.
    pub(crate) fn lost(&self) {
        self.own().load.fetch_sub(1, Ordering::Relaxed);
    }

    /// Takes no more requests.
    pub(crate) fn close(&self) {
        if self.own().open.swap(false, Ordering::SeqCst) {
            self.group.wake_others(self.index);
        }
    }

    /// Whether requests are still on their way here.
    pub(crate) fn expects(&self) -> bool {
        self.own().coming.load(Ordering::SeqCst) > 0
    }

    /// Whether some reactor takes connections.
    pub(crate) fn is_open(&self) -> bool {
        self.group.members.iter().any(|member| member.open.load(Ordering::SeqCst))
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.close();
    }
}
