//! A server and a client. The provider of the server is `ProviderChoice::Auto`, and the server listens on all addresses. Tests use the pair
//! to check which device carries a connection.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use rdma_reactor::transport::Provider;
use rdma_reactor::{Config, ConnectionId, ProviderChoice, Reactor, open_providers, system_entropy};

use crate::conformance::Setup;
use crate::conformance::harness::{Pair, Probe};
use crate::loopback::{Loopback, Network};
use crate::parts::reactor_on_all;

/// The time limit for resolving an address. No test reaches the limit, because a device answers for
/// each address that is resolved.
const RESOLVE: Duration = Duration::from_secs(30);

fn setup() -> Setup {
    Setup {
        provider: ProviderChoice::Auto,
        address: SocketAddr::from(([0, 0, 0, 0], 0)),
        // One of the devices may be siw, which does not flush all work requests.
        flushes: false,
        ..Setup::iwarp()
    }
}

/// Returns the settings of [`pair`], with time limits that even a busy machine does not reach.
#[must_use]
pub fn config() -> Config {
    setup().config().timeouts(|t| t.resolve = RESOLVE)
}

/// Returns a server that listens on all addresses, and a client.
#[must_use]
pub fn pair() -> Pair {
    Pair::new(&setup(), config(), Probe::echo(), Probe::default())
}

/// Connects to the server at its address `ip`. Returns the client's id of the connection.
pub fn connect_to(p: &mut Pair, ip: IpAddr) -> ConnectionId {
    p.address.set_ip(ip);
    p.connect()
}

/// Sends 100 messages on each of `connections`, on all of them at the same time, and waits for the echoes.
///
/// # Panics
/// Panics if the echoes do not arrive in time.
pub fn echo(p: &mut Pair, connections: &[ConnectionId]) {
    let (before, mut sent) = (p.c.received, 0);
    for nth in 0..100 {
        for &conn in connections {
            p.client.context().send(conn, &[nth; 300]).expect("room");
            sent += 1;
        }
        // At most 16 messages are in flight, so the window of a connection never closes.
        p.until("not too many are on their way", |p| before + sent < p.c.received + 16);
    }
    p.until("all echoes have arrived", |p| p.c.received == before + sent);
}

/// Returns the name of the device that carries a connection.
///
/// # Panics
/// Panics if no device carries the connection.
pub fn device_of(reactor: &mut Reactor, conn: ConnectionId) -> String {
    reactor.context().connection(conn).device().expect("it is on a device").to_owned()
}

/// The server's address in the in-process network of [`with_loopback`].
pub const IN_PROCESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));

/// Returns a server and a client. The first provider of each reactor connects reactors within this
/// process. `config` selects the further providers. The resolve timeout is not that of `config`,
/// but one that even a busy machine does not reach.
///
/// # Panics
/// Panics if the system has no descriptors left, or if a provider that `config` selects cannot be opened.
#[must_use]
pub fn with_loopback(config: &Config) -> Pair {
    let config = &config.clone().timeouts(|t| t.resolve = RESOLVE);
    let network = Network::default();
    let reactor = |address: IpAddr| {
        let mine = Loopback::new(&network, address).expect("descriptors");
        let mut providers: Vec<Box<dyn Provider>> = open_providers(config, system_entropy()).expect("providers");
        providers.insert(0, Box::new(mine));
        reactor_on_all(providers, config.clone())
    };
    let mut p =
        Pair::new(&Setup::iwarp(), config.clone().provider(ProviderChoice::Iwarp), Probe::echo(), Probe::default());
    (p.server, p.client) = (reactor(IN_PROCESS), reactor([192, 0, 2, 8].into()));
    p
}

/// For each address in `devices`: listens on the address, connects to it, and checks that the named
/// device carries the connection.
///
/// # Panics
/// Panics if a device other than the one in `devices` carries a connection, or if a message is not echoed.
pub fn each_where_it_belongs(mut p: Pair, devices: &[(IpAddr, String)]) {
    let mut connections = Vec::new();
    for (ip, device) in devices {
        let listener = p.server.context().listen(SocketAddr::new(*ip, 0)).expect("listening");
        p.address = p.server.context().listeners().local_address(listener).expect("its address");
        let conn = p.connect();
        assert_eq!(device_of(&mut p.client, conn), *device, "the connection to {ip}");
        connections.push(conn);
    }
    echo(&mut p, &connections);
    for conn in connections {
        let received = p.c.received;
        p.client.context().send(conn, &[7; 200_000]).expect("room");
        p.until("the echo of a message larger than one buffer", |p| p.c.received == received + 1);
    }
    p.finish();
}
