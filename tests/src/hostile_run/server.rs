//! The server under attack. It echoes, and records the largest number of connections.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::SocketAddr;

use rdma_reactor::{
    Access, ConnectRequest, ConnectionId, Context, Decision, DisconnectReason, Error, Handler, Message, Reactor,
    Region, RegionOptions, Stats,
};
use serde::{Deserialize, Serialize};

use super::credentials::Credentials;
use super::lender::FILE;
use super::process::{Order, answer, obey};
use super::{MAX_PENDING, config};
use crate::usage::{descriptors, mapped, private_kib, resident_kib};

/// The report of the server.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// The number of connections now, in any state.
    pub current: usize,
    /// The largest number of connections so far, in any state.
    pub highest: usize,
    /// The largest number so far of connections that exist although `on_connect` was not called for them. Such a connection is being
    /// established, or has failed and is not removed yet.
    pub highest_unknown: usize,
    /// The number of connections that were established so far.
    pub connected: u64,
    /// The number of connections so far that were refused or failed.
    pub refused: u64,
    /// The number of buffers in the pool now.
    pub pool_buffers: usize,
    /// The memory of the process now, in KiB.
    pub resident_kib: u64,
    /// The part of the memory in `resident_kib` that belongs to no file, in KiB.
    pub private_kib: u64,
    /// The sum of the lengths of attackers' memory files that the process has mapped now, in bytes.
    pub mapped: u64,
    /// The number of open descriptors of the process.
    pub descriptors: usize,
    /// The number of regions that a client has changed although it has no right to write to them. This number must be 0.
    pub touched: usize,
}

/// The settings of the server's process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The credentials of the server.
    pub credentials: Credentials,
    /// True if the connections use shared memory.
    pub within_host: bool,
}

/// The message by which a client requests that the server reserves memory for this client.
pub const GUARD: &[u8] = b"guard";
/// The message by which a client requests the keys of all regions.
pub const KEYS: &[u8] = b"keys";
/// The number of regions, at the beginning of the answer to [`KEYS`], that the client may read.
pub const READABLE: usize = 3;
/// The number of regions, at the beginning of the answer to [`KEYS`], that the client may also write to.
pub const WRITABLE: usize = 2;
/// The length of a region, in bytes.
pub const REGION: usize = 4096;
/// The initial content of the regions that no client may write to.
const CONTENT: [u8; REGION] = [0xa5; REGION];

#[derive(Debug, Default)]
struct Server {
    /// The number of open connections for which `on_connect` was called.
    known: usize,
    highest: usize,
    highest_unknown: usize,
    /// The regions of each client that has requested keys. No client may write to the last of the three.
    regions: BTreeMap<ConnectionId, [Region; 3]>,
    /// The memory that is reserved for an honest client. No process may write to it.
    guarded: Option<Region>,
    touched: usize,
}

/// Returns true if the region still has its initial content.
fn is_whole(region: &Region) -> bool {
    let mut now = [0; REGION];
    region.copy_to(0, &mut now);
    now == CONTENT
}

impl Server {
    /// Returns the keys of all regions in this order: two that the client may write to (the server copies the bytes into one, and the
    /// client writes directly to the other), one that the client may only read, and the memory that is reserved for an honest client.
    fn keys(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<Vec<u8>, Error> {
        if let Entry::Vacant(free) = self.regions.entry(conn) {
            let all = RegionOptions::new().allow(Access::REMOTE);
            let own = cx.regions().register(conn, REGION, &all)?;
            let direct = cx.regions().register(conn, REGION, &all.direct())?;
            let mut read = cx.regions().register(conn, REGION, &RegionOptions::new().allow(Access::REMOTE_READ))?;
            let _ = read.copy_from(0, &CONTENT);
            free.insert([own, direct, read]);
        }
        let keys = self.regions[&conn].iter().chain(&self.guarded).map(|region| region.remote().to_bytes());
        Ok(keys.flatten().collect())
    }

    fn guard(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Error> {
        let mut region = cx.regions().register(conn, REGION, &RegionOptions::new().allow(Access::REMOTE))?;
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
            private_kib: private_kib().unwrap_or(0),
            mapped: mapped("self", FILE).map_or(0, |lengths| lengths.iter().sum()),
            descriptors: descriptors().unwrap_or(0),
            touched,
        }
    }
}

impl Handler<Order> for Server {
    fn on_connect_request(&mut self, cx: &mut Context<'_>, _: ConnectRequest<'_>) -> Decision {
        // The number of connections can grow only in this callback. It grows by one if a slot is free. If no slot is free, the server drops
        // another connection, or refuses this one.
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
            // The result is ignored: the send fails if an attacker grants no credits.
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

/// Listens on a port of 127.0.0.1, sends its address as an answer, and serves until standard input ends.
///
/// # Errors
/// The reactor fails.
pub fn run(settings: &Settings) -> super::Result<()> {
    let config = config(settings.credentials.security()?, settings.within_host);
    let mut reactor: Reactor<Order> = Reactor::with_messages(config)?;
    let listener = reactor.context().listen(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    answer(&reactor.context().listeners().local_address(listener).ok_or("the listener is closed")?)?;
    obey(reactor.handle());
    Ok(reactor.run(&mut Server::default())?)
}
