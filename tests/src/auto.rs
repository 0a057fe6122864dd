//! A server under `ProviderChoice::Auto` that listens on an unspecified address, and a client.

use std::net::{IpAddr, SocketAddr};

use rdma_reactor::{Config, ConnectionId, ProviderChoice, Reactor};

use crate::conformance::Setup;
use crate::conformance::harness::{Pair, Probe};

/// A server on an unspecified address, and a client.
#[must_use]
pub fn pair() -> Pair {
    let setup = Setup {
        provider: ProviderChoice::Auto,
        address: SocketAddr::from(([0, 0, 0, 0], 0)),
        // One of the devices may be siw.
        flushes: false,
        ..Setup::iwarp()
    };
    Pair::new(&setup, Config::default().provider(ProviderChoice::Auto), Probe::echo(), Probe::default())
}

/// Connects to the server at one of its addresses.
pub fn connect_to(p: &mut Pair, ip: IpAddr) -> ConnectionId {
    p.address.set_ip(ip);
    p.connect()
}

/// Has 100 messages echoed on each of some connections, all at once.
///
/// # Panics
/// When they are not back in time.
pub fn echo(p: &mut Pair, connections: &[ConnectionId]) {
    let (before, mut sent) = (p.c.received, 0);
    for nth in 0..100 {
        for &conn in connections {
            p.client.context().send(conn, &[nth; 300]).expect("room");
            sent += 1;
        }
        // No window is ever full.
        p.until("not too many are on their way", |p| before + sent < p.c.received + 16);
    }
    p.until("all are back", |p| p.c.received == before + sent);
}

/// Name of the device that a connection is on.
///
/// # Panics
/// When it is on none.
pub fn device_of(reactor: &mut Reactor, conn: ConnectionId) -> String {
    reactor.context().device(conn).expect("it is on a device").to_owned()
}
