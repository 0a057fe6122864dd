//! The part of a run that every rank carries out, rank 0 included. A rank connects to other ranks,
//! carries out the measurements that rank 0 orders, and answers the requests that other ranks send
//! during their measurements. It collects its reports for rank 0 in a list.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rdma_reactor::{ConnectOptions, ConnectionId, Context, Outcome, SendKind};

use super::control::{Entry, Figure, Order, RankReport};
use super::frame::LinkFrame;
use super::hello::{Hello, Purpose};
use super::link::Link;
use super::load::Inbound;
use super::memory;
use super::role::LinkRole;
use super::storm::{RetryDecision, Storm, connects};
use super::task::{Task, TaskExtent, TaskResult};
use crate::doctor::tree::SystemTree;
use crate::hw_counters::HwCounters;

/// The name of the provider for connections in shared memory.
const SHM: &str = "shm";
/// The time between two progress reports while the rank connects. Each report has the number of links that the rank has opened.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// The limits of a rank, given by the command line.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The largest number of concurrent connects.
    pub connects: usize,
    /// The time limit for establishing all links.
    pub patience: Duration,
    /// The time of silence after which a peer counts as dead.
    pub silence: Duration,
    /// The sizes and durations of measurements.
    pub extent: TaskExtent,
    /// The time limit of a measurement.
    pub measure: Duration,
    /// The duration of the all-to-all load.
    pub load: Duration,
}

/// The state of the all-to-all load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadPhase {
    /// The load has not begun, or its result is already reported.
    Idle,
    /// This rank sends to all other ranks.
    Flowing { until: Instant },
    /// This rank has stopped sending, and waits for the end of the other ranks' streams.
    Ending { until: Instant },
}

/// The state of this rank, with its links to all others.
#[derive(Debug)]
pub struct Member {
    rank: usize,
    ranks: usize,
    limits: Limits,
    /// The number of the run, or 0 before rank 0 has sent it.
    run: u64,
    /// The name of the device that carries the links.
    device: String, // local: a device of this host
    /// The device's hardware counters at the start of the program.
    counters: HwCounters,
    /// The addresses of the ranks. Empty until rank 0 orders to connect.
    addresses: Vec<Option<SocketAddr>>, // local: ranks of the run
    links: Vec<Option<Link>>, // local: ranks of the run
    /// The incoming load streams of links that have ended, by the rank of the peer. If a peer has
    /// opened several links, the last one counts.
    ended: BTreeMap<usize, Inbound>, // bound: tool-mesh
    storm: Option<Storm>,
    began: Instant,
    reported_at: Instant,
    failed: Vec<(usize, String)>, // local: ranks of the run
    task: Option<Task>,
    load: LoadPhase,
    scratch: Vec<u8>,         // local: the length of a message is fixed
    reports: Vec<RankReport>, // local: ranks of the run
}

impl Member {
    /// Makes a rank that has no links yet.
    #[must_use]
    pub fn new(rank: usize, ranks: usize, limits: Limits, device: String, now: Instant) -> Self {
        let counters = HwCounters::read(&SystemTree::new("/"), &device);
        Self {
            rank,
            ranks,
            limits,
            run: 0,
            device,
            counters,
            addresses: Vec::new(),
            links: (0..ranks).map(|_| None).collect(),
            ended: BTreeMap::new(),
            storm: None,
            began: now,
            reported_at: now,
            failed: Vec::new(),
            task: None,
            load: LoadPhase::Idle,
            scratch: Vec::new(),
            reports: Vec::new(),
        }
    }

    /// Sets the number of the run. Afterwards, links of other runs are refused.
    pub const fn enter(&mut self, run: u64) {
        self.run = run;
    }

    /// Returns true if a connect request may open a link of this run.
    #[must_use]
    pub fn admits(&self, hello: Hello) -> bool {
        matches!(hello.purpose, Purpose::Link { run, .. } if run == self.run)
            && self.run != 0
            && hello.ranks == self.ranks
            && hello.rank != self.rank
            && connects(hello.rank, self.rank, self.ranks)
    }

    /// Removes and returns the collected reports. If one of them ends a measurement or the all-to-all load, inserts a report of the
    /// hardware counters that have changed since the start.
    pub fn take_reports(&mut self) -> Vec<RankReport> {
        let ends = |report: &RankReport| matches!(report, RankReport::Result { .. } | RankReport::Loaded { .. });
        if !self.counters.is_empty() && self.reports.iter().any(ends) {
            let moved = HwCounters::read(&SystemTree::new("/"), &self.device).moved_since(&self.counters);
            self.reports.insert(0, RankReport::Moved(moved));
        }
        std::mem::take(&mut self.reports)
    }

    /// Carries out an order of rank 0. Ignores the order to end the run, because the caller handles that order. `root` is the address at
    /// which this rank reaches rank 0.
    pub fn order(&mut self, cx: &mut Context<'_>, order: Order, root: IpAddr, random: &mut dyn FnMut() -> u64) {
        let now = Instant::now();
        match order {
            Order::Connect { ranks } => self.begin_connecting(cx, &ranks, root, now, random),
            Order::Measure { task, peer, figure } => self.measure(cx, task, peer, figure, now),
            Order::Load => self.begin_load(cx, now),
            Order::End => {}
        }
    }

    /// Returns true while links are being established, so that [`Member::tick`] must be called often.
    #[must_use]
    pub const fn is_connecting(&self) -> bool {
        self.storm.is_some()
    }

    /// Handles expired time limits.
    pub fn tick(&mut self, cx: &mut Context<'_>, random: &mut dyn FnMut() -> u64) {
        let now = Instant::now();
        self.connect_more(cx, now, random);
        if let Some(task) = self.task.take_if(|task| task.is_late(now)) {
            let why = format!("no answer from rank {} within {} s", task.peer(), self.limits.measure.as_secs());
            self.reports.push(RankReport::Result { task: task.number(), result: Err(why) });
        }
        self.go_on_with_load(cx, now);
    }

    /// Handles a new link. `attempt` is the number of earlier connects by the side that has opened the link; this can be either side.
    pub fn link_up(&mut self, cx: &mut Context<'_>, peer: usize, conn: ConnectionId, attempt: u32) {
        let opened_here = connects(self.rank, peer, self.ranks);
        // A newer link to this peer exists already. The peer has given up this older connection, but the older connection was established
        // on this side only after the newer one.
        if self.links[peer].as_ref().is_some_and(|link| link.attempt() > attempt) {
            cx.abort(conn);
            return;
        }
        let mut link = Link::new(conn, !opened_here, attempt);
        if !opened_here {
            link.outbox.post(cx, conn, &LinkFrame::Ready.encode());
        }
        if let Some(older) = self.links[peer].replace(link) {
            cx.abort(older.conn);
        }
    }

    /// Handles the notice that a link which this side has opened is established on the peer's side too.
    fn link_ready(&mut self, cx: &mut Context<'_>, now: Instant, random: &mut dyn FnMut() -> u64) {
        if let Some(storm) = &mut self.storm {
            storm.succeeded();
            self.connect_more(cx, now, random);
        }
    }

    /// Handles a failed connect of this side: schedules a retry, or gives up.
    pub fn connect_failed(&mut self, cx: &mut Context<'_>, peer: usize, why: &str, random: &mut dyn FnMut() -> u64) {
        let now = Instant::now();
        if let Some(storm) = &mut self.storm {
            log::debug!("rank {peer}: {why}");
            if storm.failed(peer, now - self.began, random()) == RetryDecision::GiveUp {
                self.failed.push((peer, format!("no connection: {why}")));
            }
            self.connect_more(cx, now, random);
        }
    }

    /// Handles the end of a link, and reports it.
    pub fn link_down(
        &mut self,
        cx: &mut Context<'_>,
        peer: usize,
        conn: ConnectionId,
        why: &str,
        random: &mut dyn FnMut() -> u64,
    ) {
        let Some(link) = self.links[peer].take_if(|link| link.conn == conn) else { return };
        if !link.is_ready() {
            self.connect_failed(cx, peer, why, random);
            return;
        }
        let why = format!("the link has ended: {why}");
        if let Some(task) = self.task.take_if(|task| task.peer() == peer) {
            self.reports.push(RankReport::Result { task: task.number(), result: Err(why.clone()) });
        }
        self.ended.insert(peer, link.inbound);
        if connects(self.rank, peer, self.ranks) {
            self.reports.push(RankReport::Lost { peer, why });
        }
    }

    /// Handles a message on a link.
    pub fn message(&mut self, cx: &mut Context<'_>, peer: usize, message: &[u8], random: &mut dyn FnMut() -> u64) {
        let now = Instant::now();
        let Some(link) = &mut self.links[peer] else { return };
        let done = match link.take(cx, message, &mut self.scratch, now) {
            Ok(None) => None,
            Ok(Some(LinkFrame::Ready)) => {
                self.link_ready(cx, now, random);
                None
            }
            Ok(Some(frame)) => match self.task.as_mut().filter(|task| task.peer() == peer) {
                Some(task) => task.answer(cx, link.conn, &mut link.outbox, frame, now),
                None => None,
            },
            Err(what) => {
                log::warn!("rank {peer} violated the protocol: {what}");
                cx.abort(link.conn);
                None
            }
        };
        self.finish(done);
    }

    /// Handles the completion of a send. Continues a bandwidth measurement if an RDMA Write has completed, and ignores other sends.
    pub fn sent(&mut self, cx: &mut Context<'_>, peer: usize, kind: SendKind, outcome: Outcome) {
        if !outcome.is_sent() || kind != SendKind::Write {
            return;
        }
        let now = Instant::now();
        if let (Some(task), Some(link)) = (self.task.as_mut().filter(|task| task.peer() == peer), &mut self.links[peer])
        {
            let done = task.wrote(cx, link.conn, &mut link.outbox, now);
            self.finish(done);
        }
    }

    /// Continues to send, after a link has become writable.
    pub fn writable(&mut self, cx: &mut Context<'_>, peer: usize) {
        let Some(link) = &mut self.links[peer] else { return };
        link.outbox.writable(cx, link.conn);
        if matches!(self.load, LoadPhase::Flowing { .. }) && link.outbox.is_empty() {
            link.outbound.pump(cx, link.conn);
        }
        if let Some(task) = self.task.as_mut().filter(|task| task.peer() == peer) {
            let done = task.write(cx, link.conn);
            self.finish(done);
        }
    }

    fn finish(&mut self, done: Option<TaskResult>) {
        if let Some(result) = done {
            if let Some(task) = self.task.take() {
                self.reports.push(RankReport::Result { task: task.number(), result });
            }
        }
    }

    fn begin_connecting(
        &mut self,
        cx: &mut Context<'_>,
        ranks: &[Option<Entry>],
        root: IpAddr,
        now: Instant,
        random: &mut dyn FnMut() -> u64,
    ) {
        let address = |entry: &Option<Entry>| {
            entry.as_ref().map(|entry| SocketAddr::new(entry.address.unwrap_or(root), entry.port))
        };
        self.addresses = ranks.iter().map(address).collect();
        self.addresses.resize(self.ranks, None);
        (self.began, self.reported_at) = (now, now);
        self.storm = Some(Storm::new(self.rank, self.ranks, self.limits.connects, self.limits.patience));
        self.connect_more(cx, now, random);
    }

    fn connect_more(&mut self, cx: &mut Context<'_>, now: Instant, random: &mut dyn FnMut() -> u64) {
        let since = now - self.began;
        let Some(storm) = &mut self.storm else { return };
        while let Some(peer) = storm.next(since) {
            let Some(address) = self.addresses[peer] else {
                // The peer has no address, because it never joined. Rank 0 already reports the missing peer, so this connect counts as
                // successful.
                storm.succeeded();
                continue;
            };
            let purpose = Purpose::Link { run: self.run, attempt: storm.failures(peer) };
            let hello = Hello { rank: self.rank, ranks: self.ranks, purpose };
            match cx.connect_with(address, ConnectOptions::new().private_data(hello.encode())) {
                Ok(conn) => cx.connection(conn).set_user(LinkRole::Link(peer).encode()),
                Err(error) => {
                    if storm.failed(peer, since, random()) == RetryDecision::GiveUp {
                        self.failed.push((peer, format!("no connection: {error}")));
                    }
                }
            }
        }
        if storm.is_over() {
            let attempts = storm.attempts();
            self.storm = None;
            let (failed, memory_kib) = (std::mem::take(&mut self.failed), memory::peak_kib());
            let mut in_memory = |conn| cx.connection(conn).provider() == Some(SHM);
            let shm = self.opened().filter(|(_, link)| in_memory(link.conn)).map(|(peer, _)| peer).collect();
            self.reports.push(RankReport::Connected { took: since, attempts, failed, shm, memory_kib });
        } else if now - self.reported_at >= PROGRESS_EVERY {
            self.reported_at = now;
            self.reports.push(RankReport::Progress(self.opened().count()));
        }
    }

    /// Returns the links that this side has opened and that both sides may use. Each is returned with the rank of its peer.
    fn opened(&self) -> impl Iterator<Item = (usize, &Link)> {
        let links = self.links.iter().enumerate().filter_map(|(peer, link)| Some((peer, link.as_ref()?)));
        links.filter(|(peer, link)| link.is_ready() && connects(self.rank, *peer, self.ranks))
    }

    fn measure(&mut self, cx: &mut Context<'_>, number: u32, peer: usize, figure: Figure, now: Instant) {
        if peer >= self.ranks || peer == self.rank {
            let why = format!("rank {} cannot measure to rank {peer}", self.rank);
            self.reports.push(RankReport::Result { task: number, result: Err(why) });
            return;
        }
        let mut task = Task::new(number, peer, figure, self.limits.extent, now + self.limits.measure);
        let Some(link) = &mut self.links[peer] else {
            self.reports.push(RankReport::Result { task: number, result: Err("there is no link".into()) });
            return;
        };
        task.begin(cx, link.conn, &mut link.outbox, now);
        self.task = Some(task);
    }

    fn begin_load(&mut self, cx: &mut Context<'_>, now: Instant) {
        self.load = LoadPhase::Flowing { until: now + self.limits.load };
        for link in self.links.iter_mut().flatten() {
            link.outbound.pump(cx, link.conn);
        }
    }

    fn go_on_with_load(&mut self, cx: &mut Context<'_>, now: Instant) {
        match self.load {
            LoadPhase::Flowing { until } if now >= until => {
                for link in self.links.iter_mut().flatten() {
                    // If the link was never writable during the load, no message was sent on it. In that case one message is queued here,
                    // so that each link carries at least one.
                    if link.outbound.sent() == 0 {
                        link.outbox.post(cx, link.conn, &LinkFrame::Load(Some(0)).encode());
                    }
                    let end = LinkFrame::LoadEnd(link.outbound.sent().max(1)).encode();
                    link.outbox.post(cx, link.conn, &end);
                }
                self.load = LoadPhase::Ending { until: now + self.limits.silence };
            }
            LoadPhase::Ending { until } => {
                let all = self.links.iter().flatten().all(|link| link.inbound.is_complete());
                if all || now >= until {
                    let links = self.links.iter().enumerate();
                    let live = links.filter_map(|(peer, link)| Some((peer, &link.as_ref()?.inbound)));
                    let ended = self.ended.iter().map(|(peer, inbound)| (*peer, inbound));
                    let heard = ended.chain(live).map(|(peer, inbound)| inbound.result(peer)).collect();
                    self.load = LoadPhase::Idle;
                    self.reports.push(RankReport::Loaded { heard, memory_kib: memory::peak_kib() });
                }
            }
            LoadPhase::Idle | LoadPhase::Flowing { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use rdma_reactor::{Config, ProviderChoice, Reactor};

    use super::*;

    /// A peer may open its link repeatedly. Only the last link that has ended is kept.
    #[test]
    fn the_links_of_a_peer_that_have_ended_count_as_one() {
        let second = Duration::from_secs(1);
        let extent = TaskExtent { size: 8, iterations: 1, bandwidth: second };
        let limits = Limits { connects: 1, patience: second, silence: second, extent, measure: second, load: second };
        let mut member = Member::new(0, 3, limits, "none".into(), Instant::now());
        let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp)).unwrap();
        let mut cx = reactor.context();
        let peer = (1..3).find(|&peer| connects(peer, 0, 3)).unwrap();
        for _ in 0..3 {
            let conn = cx.connect(([127, 0, 0, 1], 9).into()).unwrap();
            member.link_up(&mut cx, peer, conn, 0);
            member.link_down(&mut cx, peer, conn, "closed", &mut || 0);
        }
        assert_eq!(member.ended.into_keys().collect::<Vec<_>>(), [peer]);
    }
}
