//! The control connections of rank 0, on which it receives the reports of the other ranks and sends orders.

use std::io::{IsTerminal, stderr};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rdma_reactor::{ConnectionId, Context, DisconnectReason};

use super::control::{self, Order, RankReport};
use super::coordinator::{Coordinator, RunPlan};
use super::hello::Hello;
use super::outbox::Outbox;
use super::results::Results;
use crate::pingpong::address::resolve;

/// The time between two lines of progress: the first value on a terminal, the second one otherwise.
const PROGRESS_EVERY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// The largest number of queued orders for one rank. If there are more, rank 0 aborts the connection.
const MAX_WAITING: usize = 1000; // bound: tool-mesh

/// The control connection of one rank, with its queued orders.
#[derive(Debug)]
struct ControlConnection {
    conn: ConnectionId,
    outbox: Outbox,
}

/// The part of rank 0 that controls a run.
// local: ranks of the run
#[derive(Debug)]
pub struct Leader {
    started: Instant,
    coordinator: Coordinator,
    /// The number of the run, by which a link of this run is recognized.
    run: u64,
    /// The list of hosts, one for each rank; empty if the user has given none. A rank may report an
    /// address from which it has not connected only if its entry in this list resolves to that
    /// address. Otherwise a process could make all ranks connect to a host that only they can
    /// reach.
    hosts: Vec<String>,
    controls: Vec<Option<ControlConnection>>,
    reported_at: Instant,
    logged_stage: &'static str,
}

impl Leader {
    /// Makes the leader of the run with the number `run`, on `hosts`.
    #[must_use]
    pub fn new(plan: RunPlan, hosts: Vec<String>, run: u64, now: Instant) -> Self {
        let controls = (0..plan.ranks).map(|_| None).collect();
        let coordinator = Coordinator::new(plan, Duration::ZERO);
        Self { started: now, coordinator, run, hosts, controls, reported_at: now, logged_stage: "" }
    }

    /// Returns the number of the run.
    #[must_use]
    pub const fn run(&self) -> u64 {
        self.run
    }

    /// Returns the results.
    #[must_use]
    pub const fn results(&self) -> &Results {
        self.coordinator.results()
    }

    /// Returns true if the run is over and every queued order was sent. A busy rank may be slow to receive its orders, so this may become
    /// true some time after the end of the run.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.coordinator.is_over() && self.controls.iter().flatten().all(|control| control.outbox.is_empty())
    }

    /// Ends the run early.
    pub fn interrupt(&mut self) {
        self.coordinator.interrupt();
    }

    /// Decides whether a rank may join. If it may, returns the private data with which rank 0 accepts the connection.
    ///
    /// # Errors
    /// The rank may not join. The error is the reason, which is short enough for private data.
    pub fn admit(&self, hello: Hello) -> Result<Vec<u8>, String> {
        let ranks = self.controls.len();
        if hello.ranks != ranks {
            Err(format!("this run has {ranks} ranks"))
        } else if self.controls[hello.rank].is_some() || !self.coordinator.awaits(hello.rank) {
            Err("this rank has joined already, or it is too late".into())
        } else {
            Ok(self.run.to_le_bytes().into())
        }
    }

    /// Handles the established control connection of a rank.
    pub fn joined(&mut self, cx: &mut Context<'_>, rank: usize, conn: ConnectionId) {
        if self.controls[rank].is_some() || !self.coordinator.awaits(rank) {
            cx.abort(conn);
            return;
        }
        self.controls[rank] = Some(ControlConnection { conn, outbox: Outbox::default() });
    }

    /// Handles a message on a control connection: decodes it as a report.
    pub fn message(&mut self, cx: &mut Context<'_>, rank: usize, conn: ConnectionId, message: &[u8]) {
        if self.controls[rank].as_ref().is_none_or(|control| control.conn != conn) {
            return;
        }
        match RankReport::read(message) {
            // Only the first `Joined` report of a rank counts.
            Ok(RankReport::Joined(_)) if !self.coordinator.awaits(rank) => {}
            Ok(RankReport::Joined(mut entry)) => {
                let from = cx.connection(conn).peer_address().map(|peer| peer.ip().to_canonical());
                let named = entry.address.filter(|&named| Some(named) != from);
                if named.is_none_or(|named| !self.is_of(rank, named)) {
                    if let (Some(named), Some(from)) = (named, from) {
                        let cure = "name the address in --hosts of rank 0, or leave --bind away";
                        log::warn!("rank {rank} listens on {named}, and has connected from {from}: {cure}");
                    }
                    // If the rank has connected from a loopback address, it is on the host of rank
                    // 0.
                    entry.address = from.filter(|from| !from.is_loopback());
                }
                self.report(rank, RankReport::Joined(entry));
            }
            Ok(report) => self.report(rank, report),
            Err(what) => {
                log::warn!("rank {rank} violated the protocol: {what}");
                // The rank has sent an invalid report. `gone` records this as the reason why the rank is gone, and the user sees it in the
                // results.
                self.coordinator.gone(rank, &what, self.started.elapsed());
                cx.abort(conn);
            }
        }
    }

    /// Returns true if the rank's entry in the list of hosts resolves to `address`. Resolving the
    /// entry may block, at most once for each rank. It is not resolved before the run, because
    /// Kubernetes does not know the name of a pod until the pod has started.
    fn is_of(&self, rank: usize, address: IpAddr) -> bool {
        let found = self.hosts.get(rank).and_then(|host| resolve(host, 0).ok()).unwrap_or_default();
        found.iter().any(|found| found.ip().to_canonical() == address)
    }

    /// Handles a report. Rank 0 also calls this function for its own reports.
    pub fn report(&mut self, rank: usize, report: RankReport) {
        self.coordinator.report(rank, report, self.started.elapsed());
    }

    /// Handles the end of a control connection.
    pub fn left(&mut self, rank: usize, conn: ConnectionId, reason: &DisconnectReason) {
        if self.controls[rank].take_if(|control| control.conn == conn).is_some() {
            let why = match reason {
                DisconnectReason::Closed | DisconnectReason::Lost => "its process has ended".into(),
                DisconnectReason::KeepaliveTimeout => "it does not answer: stopped, or cut off".into(),
                other => other.to_string(),
            };
            self.coordinator.gone(rank, &why, self.started.elapsed());
        }
    }

    /// Sends queued orders, after the control connection has become writable.
    pub fn writable(&mut self, cx: &mut Context<'_>, rank: usize) {
        if let Some(control) = &mut self.controls[rank] {
            control.outbox.writable(cx, control.conn);
        }
    }

    /// Handles expired time limits.
    pub fn tick(&mut self) {
        self.coordinator.tick(self.started.elapsed());
    }

    /// Logs the progress: immediately when a new phase begins, and otherwise periodically.
    pub fn log_progress(&mut self) {
        let (stage, every) =
            (self.coordinator.stage(), if stderr().is_terminal() { PROGRESS_EVERY.0 } else { PROGRESS_EVERY.1 });
        if stage != self.logged_stage || self.reported_at.elapsed() >= every {
            (self.logged_stage, self.reported_at) = (stage, Instant::now());
            eprintln!("rdma-mesh: {}", self.coordinator.progress());
        }
    }

    /// Sends all pending orders to their ranks. Returns the orders for rank 0 itself.
    pub fn orders(&mut self, cx: &mut Context<'_>) -> Vec<Order> {
        let mut own = Vec::new();
        let mut last: Option<(Order, Vec<u8>)> = None;
        while let Some((rank, order)) = self.coordinator.next_order() {
            if rank == 0 {
                own.push(order);
                continue;
            }
            let Some(control) = &mut self.controls[rank] else { continue };
            // The order to connect is long and equal for all ranks, so it is encoded only once.
            let message = match last.take() {
                Some((same, message)) if same == order => message,
                _ => control::write(&order),
            };
            control.outbox.post(cx, control.conn, &message);
            if control.outbox.len() > MAX_WAITING {
                cx.abort(control.conn);
            }
            last = Some((order, message));
        }
        own
    }
}

/// Returns the loopback address. Rank 0 uses it as the address of ranks on its own host.
#[must_use]
pub const fn loopback(family: IpAddr) -> IpAddr {
    match family {
        IpAddr::V4(_) => IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        IpAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
    }
}
