//! One process of `rdma-mesh` as the handler of its reactor. It forwards callbacks to the [`Member`], which every rank has, and to the
//! [`Leader`] (rank 0) or the [`Follower`] (other ranks).

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_reactor::{
    ConnectError, ConnectRequest, ConnectionId, Context, Decision, DisconnectReason, Entropy, Handler, Message,
    Outcome, SendId, TimerId,
};

use super::control::{Entry, RankReport};
use super::follower::Follower;
use super::hello::{Hello, Purpose};
use super::leader::{self, Leader};
use super::member::Member;
use super::role::LinkRole;
use crate::pingpong::failure::Failure;

/// The time between two calls of `tick`: the first value while links are being established, the second one later.
const TICKS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));

/// The part that differs between rank 0 and the other ranks.
#[derive(Debug)]
pub enum RankPart {
    /// Rank 0.
    Leader(Box<Leader>),
    /// Another rank.
    Follower(Follower),
}

/// One process of the mesh.
pub struct Rank {
    member: Member,
    part: RankPart,
    /// The address that the rank listens on.
    bind: SocketAddr,
    /// The first report of the rank, without its address and port.
    entry: Entry,
    entropy: Entropy,
    /// The result of this process; `None` while it runs.
    end: Option<Result<(), Failure>>,
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rank").field("member", &self.member).field("part", &self.part).finish_non_exhaustive()
    }
}

fn draw(entropy: &mut Entropy) -> u64 {
    let mut bytes = [0; 8];
    entropy(&mut bytes);
    u64::from_le_bytes(bytes)
}

impl Rank {
    /// Makes a rank that listens on `bind`.
    #[must_use]
    pub const fn new(member: Member, part: RankPart, bind: SocketAddr, entry: Entry, entropy: Entropy) -> Self {
        Self { member, part, bind, entry, entropy, end: None }
    }

    /// Begins the run: rank 0 listens, the other ranks connect to it.
    ///
    /// # Errors
    /// Rank 0 cannot listen.
    pub fn begin(&mut self, cx: &mut Context<'_>) -> Result<(), Failure> {
        if let RankPart::Leader(leader) = &mut self.part {
            self.member.enter(leader.run());
            let entry = listen(cx, self.bind, self.entry.clone())?;
            leader.report(0, RankReport::Joined(entry));
        }
        self.proceed(cx);
        cx.timers().set(TICKS.0, 0);
        Ok(())
    }

    /// Returns true if this process has finished its work.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.end.is_some()
    }

    /// Ends the run early, because the user requested it.
    pub fn interrupt(&mut self, cx: &mut Context<'_>) {
        match &mut self.part {
            RankPart::Leader(leader) => leader.interrupt(),
            RankPart::Follower(_) => self.end = Some(Ok(())),
        }
        self.proceed(cx);
    }

    /// Returns the leader with the results if this is rank 0, and otherwise `None`.
    ///
    /// # Errors
    /// This rank could not continue. The error is the reason.
    pub fn finish(self) -> Result<Option<Box<Leader>>, Failure> {
        self.end.unwrap_or(Ok(()))?;
        match self.part {
            RankPart::Leader(leader) => Ok(Some(leader)),
            RankPart::Follower(_) => Ok(None),
        }
    }

    /// Forwards the member's reports to rank 0, and the orders of rank 0 to the member, until no report and no order is left.
    fn proceed(&mut self, cx: &mut Context<'_>) {
        loop {
            let reports = self.member.take_reports();
            match &mut self.part {
                RankPart::Leader(leader) => {
                    for report in reports {
                        leader.report(0, report);
                    }
                    let orders = leader.orders(cx);
                    leader.log_progress();
                    if leader.is_over() {
                        self.end.get_or_insert(Ok(()));
                    }
                    if orders.is_empty() {
                        break;
                    }
                    let root = leader::loopback(self.bind.ip());
                    for order in orders {
                        self.member.order(cx, order, root, &mut || draw(&mut self.entropy));
                    }
                }
                RankPart::Follower(follower) => {
                    for report in &reports {
                        follower.report(cx, report);
                    }
                    if follower.is_dismissed() {
                        self.end.get_or_insert(Ok(()));
                    }
                    break;
                }
            }
        }
        if self.end.is_some() {
            cx.stop();
        }
    }

    fn fail(&mut self, cx: &mut Context<'_>, result: Result<(), Failure>) {
        if let Err(failure) = result {
            self.end.get_or_insert(Err(failure));
            cx.stop();
        }
    }
}

/// Listens, and returns the first report with the address and the port.
fn listen(cx: &mut Context<'_>, bind: SocketAddr, mut entry: Entry) -> Result<Entry, Failure> {
    let cure = "choose another with --port or --bind";
    let cannot = |error| Failure::new(format!("cannot listen on {bind}: {error}; {cure}"));
    let listener = cx.listen(bind).map_err(cannot)?;
    let address = cx.listeners().local_address(listener).unwrap_or(bind);
    entry.port = address.port();
    entry.address = chosen(bind.ip());
    Ok(entry)
}

/// Returns the address at which other hosts reach a rank that listens on `bind`; `None` if it
/// listens on all addresses or on a loopback address.
pub(super) fn chosen(bind: IpAddr) -> Option<IpAddr> {
    (!bind.is_unspecified() && !bind.is_loopback()).then_some(bind)
}

impl Handler for Rank {
    fn on_connect_request(&mut self, _: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        let Some(hello) = Hello::decode(request.private_data) else {
            return Decision::Reject(b"rdma-mesh of another version".into());
        };
        match (hello.purpose, &self.part) {
            (Purpose::Control, RankPart::Leader(leader)) => match leader.admit(hello) {
                Ok(run) => Decision::AcceptWith(run),
                Err(why) => Decision::Reject(why.into_bytes()),
            },
            (Purpose::Control, RankPart::Follower(_)) => Decision::Reject(b"this is not rank 0".into()),
            (Purpose::Link { .. }, _) if self.member.admits(hello) => Decision::Accept,
            (Purpose::Link { .. }, _) => Decision::Reject(b"another run".into()),
        }
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let role = LinkRole::decode(cx.connection(conn).user().unwrap_or_default());
        match (role, &mut self.part) {
            (LinkRole::Link(peer), _) => self.member.link_up(cx, peer, conn, 0),
            (LinkRole::Control(_), RankPart::Follower(follower)) => {
                let run = cx.connection(conn).private_data().first_chunk().map_or(0, |run| u64::from_le_bytes(*run));
                self.member.enter(run);
                match listen(cx, self.bind, self.entry.clone()) {
                    Ok(entry) => follower.connected(cx, conn, entry),
                    Err(failure) => self.fail(cx, Err(failure)),
                }
            }
            (LinkRole::Control(_), RankPart::Leader(_)) => {}
            // The connection has no role yet: the peer has opened it, and this rank has accepted it.
            (LinkRole::None, part) => match (Hello::decode(cx.connection(conn).private_data()), part) {
                (Some(Hello { rank, purpose: Purpose::Control, .. }), RankPart::Leader(leader)) => {
                    cx.connection(conn).set_user(LinkRole::Control(rank).encode());
                    leader.joined(cx, rank, conn);
                }
                (Some(hello @ Hello { rank, purpose: Purpose::Link { attempt, .. }, .. }), _)
                    if self.member.admits(hello) =>
                {
                    cx.connection(conn).set_user(LinkRole::Link(rank).encode());
                    self.member.link_up(cx, rank, conn, attempt);
                }
                _ => cx.abort(conn),
            },
        }
        self.proceed(cx);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        match (LinkRole::decode(cx.connection(conn).user().unwrap_or_default()), &mut self.part) {
            (LinkRole::Link(peer), _) => self.member.message(cx, peer, &message, &mut || draw(&mut self.entropy)),
            (LinkRole::Control(rank), RankPart::Leader(leader)) => leader.message(cx, rank, conn, &message),
            (LinkRole::Control(_), RankPart::Follower(follower)) => match (follower.order(&message), follower.root()) {
                (Ok(order), Some(root)) => {
                    self.member.order(cx, order, root, &mut || draw(&mut self.entropy));
                }
                (Ok(_), None) => {}
                (Err(failure), _) => self.fail(cx, Err(failure)),
            },
            (LinkRole::None, _) => {}
        }
        self.proceed(cx);
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        if let LinkRole::Link(peer) = LinkRole::decode(cx.connection(conn).user().unwrap_or_default()) {
            self.member.sent(cx, peer, send.kind(), outcome);
            self.proceed(cx);
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        match (LinkRole::decode(cx.connection(conn).user().unwrap_or_default()), &mut self.part) {
            (LinkRole::Link(peer), _) => self.member.writable(cx, peer),
            (LinkRole::Control(rank), RankPart::Leader(leader)) => leader.writable(cx, rank),
            (LinkRole::Control(_), RankPart::Follower(follower)) => follower.writable(cx),
            (LinkRole::None, _) => {}
        }
        self.proceed(cx);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        match (LinkRole::decode(cx.connection(conn).user().unwrap_or_default()), &mut self.part) {
            (LinkRole::Link(peer), _) => {
                let random = &mut || draw(&mut self.entropy);
                self.member.link_down(cx, peer, conn, &reason.to_string(), random);
            }
            (LinkRole::Control(rank), RankPart::Leader(leader)) => leader.left(rank, conn, &reason),
            (LinkRole::Control(_), RankPart::Follower(follower)) => {
                let left = follower.left(&reason);
                self.fail(cx, left);
            }
            (LinkRole::None, _) => {}
        }
        self.proceed(cx);
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        match (LinkRole::decode(cx.connection(conn).user().unwrap_or_default()), &mut self.part) {
            (LinkRole::Link(peer), _) => {
                self.member.connect_failed(cx, peer, &error.to_string(), &mut || draw(&mut self.entropy));
            }
            (LinkRole::Control(_), RankPart::Follower(follower)) => {
                let failed = follower.failed(&error, draw(&mut self.entropy));
                self.fail(cx, failed);
            }
            _ => {}
        }
        self.proceed(cx);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        self.member.tick(cx, &mut || draw(&mut self.entropy));
        match &mut self.part {
            RankPart::Leader(leader) => leader.tick(),
            RankPart::Follower(follower) => {
                let tick = follower.tick(cx, draw(&mut self.entropy));
                self.fail(cx, tick);
            }
        }
        self.proceed(cx);
        cx.timers().set(if self.member.is_connecting() { TICKS.0 } else { TICKS.1 }, 0);
    }
}

/// Returns the unspecified address, for listening on all addresses, in the address family of `root`.
#[must_use]
pub const fn anywhere(root: IpAddr) -> IpAddr {
    match root {
        IpAddr::V4(_) => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
    }
}
