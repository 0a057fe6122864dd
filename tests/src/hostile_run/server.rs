//! The attacked server: it echoes, and records the largest number of connections that it had.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::SocketAddr;

use rdma_reactor::{
    Access, ConnectRequest, ConnectionId, Context, Decision, DisconnectReason, Error, Handler, Message, Reactor,
    Region, RegionOptions, Stats,
};
use serde::{Deserialize, Serialize};

use super::credentials::Credentials;
use super::process::{Order, answer, obey};
use super::{MAX_PENDING, config};
use crate::usage::{descriptors, resident_kib};

/// The state of the server.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// The present number of connections, in any state.
    pub current: usize,
    /// The largest number of connections, in any state.
    pub highest: usize,
    /// The largest number of connections that the program does not know: they are being established, or ended before that.
    pub highest_unknown: usize,
    /// The number of established connections.
    pub connected: u64,
    /// The number of connections that were refused or failed.
    pub refused: u64,
    /// The number of buffers in the pool.
    pub pool_buffers: usize,
    /// The memory of the process, KiB.
    pub resident_kib: u64,
    /// The number of descriptors of the process.
    pub descriptors: usize,
    /// The number of regions that were written without the right.
    pub touched: usize,
}

/// The settings of the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The credentials of the server.
    pub credentials: Credentials,
    /// The connections are in shared memory.
    pub within_host: bool,
}

/// A message that requests memory that the server keeps for this client alone.
pub const GUARD: &[u8] = b"guard";
/// A message that requests the keys of all regions.
pub const KEYS: &[u8] = b"keys";
/// The number of regions in the answer to [`KEYS`], from the first on, that the client may read.
pub const READABLE: usize = 3;
/// The number of those regions that the client may write, too.
pub const WRITABLE: usize = 2;
/// The length of a region, bytes.
pub const REGION: usize = 4096;
/// The content of the regions that nobody may write.
const CONTENT: [u8; REGION] = [0xa5; REGION];

#[derive(Debug, Default)]
struct Server {
    /// The number of established connections that have not ended.
    known: usize,
    highest: usize,
    highest_unknown: usize,
    /// The regions of each client that has requested some. Nobody may write the last one.
    regions: BTreeMap<ConnectionId, [Region; 3]>,
    /// The memory of an honest client, which does not write it.
    guarded: Option<Region>,
    touched: usize,
}

/// Returns true if a region has its initial content.
fn is_whole(region: &Region) -> bool {
    let mut now = [0; REGION];
    region.copy_to(0, &mut now);
    now == CONTENT
}

impl Server {
    /// Returns the keys of all regions: of memory that the client may write, by a copy of the server and directly, of memory that it may
    /// read, and of memory of another client.
    fn keys(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<Vec<u8>, Error> {
        if let Entry::Vacant(free) = self.regions.entry(conn) {
            let all = RegionOptions::new().allow(Access::REMOTE);
            let own = cx.register(conn, REGION, &all)?;
            let direct = cx.register(conn, REGION, &all.direct())?;
            let mut read = cx.register(conn, REGION, &RegionOptions::new().allow(Access::REMOTE_READ))?;
            let _ = read.copy_from(0, &CONTENT);
            free.insert([own, direct, read]);
        }
        let keys = self.regions[&conn].iter().chain(&self.guarded).map(|region| region.remote().to_bytes());
        Ok(keys.flatten().collect())
    }

    fn guard(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Error> {
        let mut region = cx.register(conn, REGION, &RegionOptions::new().allow(Access::REMOTE))?;
        let _ = region.copy_from(0, &CONTENT);
        self.guarded = Some(region);
        Ok(())
    }

    fn look(&mut self, connections: usize) {
        self.highest = self.highest.max(connections);
        self.highest_unknown = self.highest_unknown.max(connections.saturating_sub(self.known));
    }

    fn report(&self, stats: &Stats) -> Report {
        let kept = self.regions.values().map(|[_, _, read]| read).chain(&self.guarded);
        let touched = self.touched + kept.filter(|region| !is_whole(region)).count();
        Report {
            current: stats.connections.current,
            highest: self.highest,
            highest_unknown: self.highest_unknown,
            connected: stats.connections.connected,
            refused: stats.connections.refused,
            pool_buffers: stats.memory.pool_buffers,
            resident_kib: resident_kib().unwrap_or(0),
            descriptors: descriptors().unwrap_or(0),
            touched,
        }
    }
}

impl Handler<Order> for Server {
    fn on_connect_request(&mut self, cx: &mut Context<'_>, _: ConnectRequest<'_>) -> Decision {
        // The number grows only here: by one if a slot is free; otherwise another connection is evicted or this one is refused.
        let connections = cx.connections();
        let has_place = connections.saturating_sub(self.known) < MAX_PENDING as usize;
        self.look(connections + usize::from(has_place));
        Decision::Accept
    }

    fn on_connect(&mut self, _: &mut Context<'_>, _: ConnectionId) {
        self.known += 1;
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let answer = match &*message {
            KEYS => self.keys(cx, conn).map(Some),
            GUARD => self.guard(cx, conn).map(|()| None),
            other => Ok(Some(other.to_vec())),
        };
        match answer {
            // An attacker may have closed the window.
            Ok(Some(answer)) => drop(cx.send(conn, &answer)),
            Ok(None) => {}
            Err(error) => {
                log::warn!("{conn}: {error}");
                cx.close(conn);
            }
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        self.known -= 1;
        if let Some([_, _, read]) = self.regions.remove(&conn) {
            self.touched += usize::from(!is_whole(&read));
        }
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, order: Order) {
        match order {
            Order::Go | Order::Report => {
                self.look(cx.connections());
                if answer(&self.report(&cx.stats())).is_err() {
                    cx.stop();
                }
            }
            Order::End => cx.stop(),
        }
    }
}

/// Listens on a port of 127.0.0.1, answers with its address, and serves until standard input ends.
///
/// # Errors
/// The reactor fails.
pub fn run(settings: &Settings) -> super::Result<()> {
    let config = config(settings.credentials.security()?, settings.within_host);
    let mut reactor: Reactor<Order> = Reactor::with_messages(config)?;
    let listener = reactor.context().listen(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    answer(&reactor.context().local_address(listener).ok_or("the listener is closed")?)?;
    obey(reactor.handle());
    Ok(reactor.run(&mut Server::default())?)
}
