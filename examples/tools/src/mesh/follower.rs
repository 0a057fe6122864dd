//! The control connection of a rank other than 0. The rank resolves the name of rank 0, connects, sends reports and receives orders.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rdma_reactor::{ConnectError, ConnectOptions, ConnectionId, Context, DisconnectReason, RejectReason, Source};

use super::control::{self, Entry, Order, RankReport};
use super::hello::{Hello, Purpose};
use super::outbox::Outbox;
use super::role::LinkRole;
use crate::pingpong::address::resolve;
use crate::pingpong::failure::Failure;

/// The pause after the first failed attempt to reach rank 0, and the longest pause.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// The state of the connection to rank 0.
#[derive(Debug)]
enum FollowerState {
    /// The next attempt begins at this time.
    Waiting(Instant),
    /// A connect is in progress.
    Connecting,
    /// Connected to rank 0. The outbox has the messages that wait to be sent.
    Connected(ConnectionId, Outbox),
    /// Rank 0 has ordered the end of the run.
    Dismissed,
}

/// The control connection to rank 0.
// local: addresses of rank 0
#[derive(Debug)]
pub struct Follower {
    hello: Hello,
    /// The host name of rank 0, and its port.
    root: (String, u16),
    /// The address that this rank listens on, and connects from. `None` if it listens on all
    /// addresses or on a loopback address.
    source: Option<IpAddr>,
    addresses: Vec<SocketAddr>,
    tried: usize,
    until: Instant,
    state: FollowerState,
}

impl Follower {
    /// Makes a control connection to `root`, from the address `source`. After the time `until`, no
    /// further attempt to connect is made.
    #[must_use]
    pub fn new(
        (rank, ranks): (usize, usize),
        root: (String, u16),
        source: Option<IpAddr>,
        (now, until): (Instant, Instant),
    ) -> Self {
        let hello = Hello { rank, ranks, purpose: Purpose::Control };
        let state = FollowerState::Waiting(now);
        Self { hello, root, source, addresses: Vec::new(), tried: 0, until, state }
    }

    /// Returns the address at which this rank reaches rank 0, or `None` if the name of rank 0 is not resolved yet.
    #[must_use]
    pub fn root(&self) -> Option<IpAddr> {
        self.addresses.get(self.tried % self.addresses.len().max(1)).map(SocketAddr::ip)
    }

    /// Returns true if rank 0 has ordered the end of the run.
    #[must_use]
    pub const fn is_dismissed(&self) -> bool {
        matches!(self.state, FollowerState::Dismissed)
    }

    /// Connects if the next attempt is due. The call that resolves the name of rank 0 may block. That is harmless, because this rank has
    /// nothing else to do yet.
    ///
    /// # Errors
    /// Rank 0 cannot be found, and the time limit has passed.
    pub fn tick(&mut self, cx: &mut Context<'_>, random: u64) -> Result<(), Failure> {
        let now = Instant::now();
        if !matches!(self.state, FollowerState::Waiting(at) if now >= at) {
            return Ok(());
        }
        if self.addresses.is_empty() {
            match resolve(&self.root.0, self.root.1) {
                Ok(addresses) => self.addresses = addresses,
                // In Kubernetes, the name of a pod can be resolved only some time after the pod has started. So an unknown name is
                // retried.
                Err(failure) => return self.again(now, random, failure),
            }
        }
        let address = self.addresses[self.tried % self.addresses.len()];
        let options = ConnectOptions::new().private_data(self.hello.encode());
        // Rank 0 gives the other ranks the address from which this rank connects. So this rank
        // connects from the address at which it listens, if the provider permits that. With the
        // embedded provider, the routing table selects the address.
        let from_source = |&source| options.clone().source(Source::Address(source));
        let connected = match self.source.as_ref().map(from_source).map(|own| cx.connect_with(address, own)) {
            Some(Ok(conn)) => Ok(conn),
            _ => cx.connect_with(address, options),
        };
        match connected {
            Ok(conn) => {
                cx.connection(conn).set_user(LinkRole::Control(0).encode());
                self.state = FollowerState::Connecting;
                Ok(())
            }
            Err(error) => self.again(now, random, Failure::new(error)),
        }
    }

    /// Handles a failed connect: schedules the next attempt.
    ///
    /// # Errors
    /// Rank 0 has refused this rank, or the time limit has passed.
    pub fn failed(&mut self, error: &ConnectError, random: u64) -> Result<(), Failure> {
        if let ConnectError::Rejected { reason: RejectReason::Refused, private_data } = error {
            if !private_data.is_empty() {
                let why = String::from_utf8_lossy(private_data).into_owned();
                let (host, port) = &self.root;
                return Err(Failure::new(format!(
                    "rank 0 at {host}, port {port} refused rank {}: {why}",
                    self.hello.rank
                )));
            }
        }
        self.again(Instant::now(), random, Failure::new(error))
    }

    fn again(&mut self, now: Instant, random: u64, why: Failure) -> Result<(), Failure> {
        self.tried += 1;
        let share = 0.5 + (random as f64 / u64::MAX as f64) / 2.0;
        let doubled = PAUSES.0.saturating_mul(1 << self.tried.min(10)).min(PAUSES.1);
        let at = now + doubled.mul_f64(share);
        if at >= self.until {
            let (host, port) = &self.root;
            let cure = "start it, check --root and --port, or raise --patience";
            return Err(Failure::new(format!("no rank 0 at {host}, port {port}: {why}; {cure}")));
        }
        log::info!("rank 0 at {}: {why}", self.root.0);
        self.state = FollowerState::Waiting(at);
        Ok(())
    }

    /// Handles the established connection to rank 0: sends the first report.
    pub fn connected(&mut self, cx: &mut Context<'_>, conn: ConnectionId, entry: Entry) {
        self.state = FollowerState::Connected(conn, Outbox::default());
        self.report(cx, &RankReport::Joined(entry));
    }

    /// Sends a report.
    pub fn report(&mut self, cx: &mut Context<'_>, report: &RankReport) {
        if let FollowerState::Connected(conn, outbox) = &mut self.state {
            outbox.post(cx, *conn, &control::write(report));
        }
    }

    /// Decodes an order. If the order is the end of the run, records this.
    ///
    /// # Errors
    /// The message is not an order.
    pub fn order(&mut self, message: &[u8]) -> Result<Order, Failure> {
        let order = serde_json::from_slice(message)
            .map_err(|error| Failure::new(format!("rank 0 violated the protocol: {error}")))?;
        if order == Order::End {
            self.state = FollowerState::Dismissed;
        }
        Ok(order)
    }

    /// Sends queued reports, after the control connection has become writable.
    pub fn writable(&mut self, cx: &mut Context<'_>) {
        if let FollowerState::Connected(conn, outbox) = &mut self.state {
            outbox.writable(cx, *conn);
        }
    }

    /// Handles the end of the control connection.
    ///
    /// # Errors
    /// The control connection has ended before rank 0 has ordered the end of the run.
    pub fn left(&self, reason: &DisconnectReason) -> Result<(), Failure> {
        if self.is_dismissed() {
            return Ok(());
        }
        let (host, port) = &self.root;
        Err(Failure::new(format!("rank 0 at {host}, port {port} is gone: {reason}; see its log")))
    }
}
