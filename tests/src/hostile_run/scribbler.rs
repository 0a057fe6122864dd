//! An attacker in shared memory. Its reactor connects and makes the same calls as an ordinary program. At the same time, another thread of
//! the attacker overwrites all memory that the connection maps, and misuses the descriptors of the connection ([`super::grip`]).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rdma_reactor::{
    ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, Region, RegionOptions,
    RemoteRegion, Security, SendId, TimerId,
};
use serde::{Deserialize, Serialize};

use super::attacker::Report;
use super::grip::{Grips, Means, Plan, reactor};
use super::process::{Order, answer, obey};
use super::server::{KEYS, READABLE, REGION, WRITABLE};
use super::{Result, config};
use crate::sim::rng::Rng;

/// The settings of the attacker's process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The address of the server.
    pub server: SocketAddr,
    /// The seed of the attack's random numbers.
    pub seed: u64,
}

#[derive(Debug)]
struct Scribbler {
    server: SocketAddr,
    rng: Rng,
    grips: Arc<Grips>,
    /// The regions of the server, whose keys the server has sent.
    theirs: Vec<RemoteRegion>,
    own: Option<Region>,
    /// The reads and atomic operations in flight that the server must refuse.
    wrong: BTreeSet<SendId>,
    opened: u64,
    reached: u64,
    /// The current connection.
    conn: Option<ConnectionId>,
}

impl Scribbler {
    /// Opens the next connection, with random means of attack.
    fn begin(&mut self, cx: &mut Context<'_>) {
        let means = Means::EACH[self.rng.index(Means::EACH.len())];
        *self.grips.plan() = Plan { means, keys: Vec::new() };
        (self.theirs, self.own) = (Vec::new(), None);
        self.wrong.clear();
        match cx.connect(self.server) {
            Ok(conn) => self.conn = Some(conn),
            Err(_) => _ = cx.timers().set(Duration::from_millis(5), 0),
        }
    }

    /// Posts a random operation: a message, or an operation on a region of the server. The attacker has the right to most of these
    /// operations, but not to all.
    fn step(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let (Some(own), true) = (&mut self.own, self.theirs.len() >= READABLE) else { return };
        // An operation without the right ends the connection, so only one in 64 is without the right.
        let is_right = self.rng.below(64) != 0;
        let kind = self.rng.below(8);
        let may = match kind {
            1 => READABLE,
            _ => WRITABLE,
        };
        let nth = self.rng.index(if is_right { may } else { self.theirs.len() });
        let theirs = self.theirs[nth];
        // If the reactor refuses an operation for now, the operation is not repeated.
        let done = match kind {
            0 => cx.remote(conn).write(theirs, own, 0..REGION),
            1 => cx.remote(conn).read(theirs, own, 0..REGION),
            2 => cx.remote(conn).fetch_add(theirs, own, 0, 1),
            3 => cx.send(conn, &vec![7; self.rng.skewed(1..=100_000) as usize]),
            _ => cx.send(conn, &vec![7; 1 + self.rng.index(900)]),
        };
        if let (Ok(send), true) = (done, matches!(kind, 1 | 2) && nth >= may) {
            self.wrong.insert(send);
        }
    }

    /// Returns true if the attacker's reactor may send. Returns false while the attacker's other thread writes records to the ring, because
    /// two writers would disturb each other.
    fn is_talking(&self) -> bool {
        self.grips.plan().means != Means::Records
    }

    fn again(&self, cx: &mut Context<'_>) {
        cx.timers().set(Duration::ZERO, 0);
    }
}

impl Handler<Order> for Scribbler {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.opened += 1;
        self.own = cx.regions().register(conn, REGION, &RegionOptions::new()).ok();
        let _ = cx.send(conn, KEYS);
        cx.timers().set(Duration::from_millis(1 + self.rng.below(60)), self.opened);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if self.theirs.is_empty() {
            self.theirs = message.chunks(RemoteRegion::LEN).filter_map(RemoteRegion::from_bytes).collect();
            self.grips.plan().keys = self.theirs.iter().map(|region| (region.key, region.address)).collect();
        }
        if self.is_talking() {
            self.step(cx, conn);
            self.step(cx, conn);
        }
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        // An operation without the right must not succeed. But with all means except for [`Means::Requests`], the attacker's other thread
        // writes to the shared memory, and may have written this success there. So only a success with [`Means::Requests`] counts as a
        // violation.
        if self.wrong.remove(&send) && outcome.is_sent() && self.grips.plan().means == Means::Requests {
            self.reached += 1;
        }
        if self.is_talking() {
            self.step(cx, conn);
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, of: u64) {
        match self.conn {
            None if of == 0 => self.begin(cx),
            Some(conn) if of == self.opened => cx.abort(conn),
            _ => {}
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        self.conn = None;
        self.again(cx);
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: ConnectError) {
        self.conn = None;
        self.again(cx);
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, order: Order) {
        let report = Report { opened: self.opened, reached: self.reached + self.grips.reached(), ..Report::default() };
        let is_alive = match order {
            Order::Go => {
                self.begin(cx);
                true
            }
            Order::Report => answer(&report).is_ok(),
            Order::End => false,
        };
        if !is_alive {
            cx.stop();
        }
    }
}

/// Sends the answer that it is ready, and waits for the order to begin. Then attacks until standard input ends.
///
/// # Errors
/// The reactor fails.
pub fn run(settings: &Settings) -> Result<()> {
    let grips = Arc::new(Grips::default());
    let config = config(Security::Plain, true).timeouts(|t| t.connect = Duration::from_secs(2));
    let mut reactor = reactor(Arc::clone(&grips) as _, config)?;
    obey(reactor.handle());
    answer(&Report::default())?;
    let mut rng = Rng::new(settings.seed, "scribbles");
    let theirs = Arc::clone(&grips);
    std::thread::spawn(move || {
        loop {
            theirs.act(&mut rng);
            std::thread::sleep(Duration::from_micros(rng.below(500)));
        }
    });
    let mut scribbler = Scribbler {
        server: settings.server,
        rng: Rng::new(settings.seed, "requests"),
        grips,
        theirs: Vec::new(),
        own: None,
        wrong: BTreeSet::new(),
        opened: 0,
        reached: 0,
        conn: None,
    };
    Ok(reactor.run(&mut scribbler)?)
}
