//! Tests the embedded provider on this machine.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Error, Handler, Message, ProviderChoice, Reactor,
    TimerId,
};

use super::finding::Finding;

/// The time limit of a test. A successful test takes milliseconds.
const LIMIT: Duration = Duration::from_secs(5);
const TEXT: &[u8] = b"how do you do";

/// The handler of the test, which has both ends of the connection.
// local: a text
struct Trial {
    client: Option<ConnectionId>,
    outcome: Option<Result<(), String>>,
}

impl Trial {
    fn end(&mut self, cx: &mut Context<'_>, outcome: Result<(), String>) {
        self.outcome.get_or_insert(outcome);
        cx.stop();
    }
}

impl Handler for Trial {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if Some(conn) == self.client {
            if let Err(error) = cx.send(conn, TEXT) {
                self.end(cx, Err(error.to_string()));
            }
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if Some(conn) == self.client {
            let outcome = if *message == *TEXT { Ok(()) } else { Err("the answer is not what was sent".into()) };
            self.end(cx, outcome);
        } else if let Err(error) = cx.send(conn, &message) {
            self.end(cx, Err(error.to_string()));
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.end(cx, Err(reason.to_string()));
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.end(cx, Err(error.to_string()));
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        self.end(cx, Err(format!("no answer within {} s", LIMIT.as_secs())));
    }
}

/// Sends a message over the loopback interface and back, by IPv4 or, if that fails, by IPv6. Returns the address that worked.
///
/// # Errors
/// Both IPv4 and IPv6 failed. The text gives the reasons.
pub fn probe() -> Result<SocketAddr, String> {
    let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
    through(ProviderChoice::Iwarp, v4).or_else(|why| {
        through(ProviderChoice::Iwarp, v6).map_err(|other| if other == why { why } else { format!("{why}; {other}") })
    })
}

/// Sends a message through shared memory to another reactor of this process, and back.
///
/// # Errors
/// The message did not return. The text gives the reason.
pub fn probe_shared_memory() -> Result<(), String> {
    through(ProviderChoice::Shm, (Ipv4Addr::LOCALHOST, 0).into()).map(drop)
}

fn through(provider: ProviderChoice, address: SocketAddr) -> Result<SocketAddr, String> {
    let attempt = || -> Result<Option<Result<(), String>>, Error> {
        let config = Config::default().provider(provider).buffer_size(64).receive_depth(5).send_depth(4);
        let mut reactor = Reactor::new(config)?;
        let listener = reactor.context().listen(address)?;
        let address = reactor.context().listeners().local_address(listener).unwrap_or(address);
        reactor.context().timers().set(LIMIT, 0);
        let client = Some(reactor.context().connect(address)?);
        let mut trial = Trial { client, outcome: None };
        reactor.run(&mut trial)?;
        Ok(trial.outcome)
    };
    match attempt() {
        Ok(Some(Ok(()))) => Ok(address),
        Ok(Some(Err(why))) => Err(why),
        Ok(None) => Err("it was stopped".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns the finding about the embedded provider.
#[must_use]
pub fn finding(outcome: &Result<SocketAddr, String>) -> Finding {
    match outcome {
        Ok(address) => Finding::ok("embedded", format!("works: a message went over {} and back", address.ip())),
        Err(why) => Finding::problem("embedded", format!("does not work over the loopback: {why}"))
            .fix("ip link set lo up; ulimit -n 1024"),
    }
}

/// Returns the finding about shared memory between processes of this host.
#[must_use]
pub fn shared_memory(outcome: &Result<(), String>) -> Finding {
    match outcome {
        Ok(()) => Finding::ok("shm", "works: auto uses shared memory with processes of this host and this user"),
        Err(why) => Finding::note("shm", format!("not available, auto uses TCP with processes of this host: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_works() {
        probe().unwrap();
        probe_shared_memory().unwrap();
    }

    #[test]
    fn a_foreign_address_does_not() {
        assert!(through(ProviderChoice::Iwarp, SocketAddr::from(([203, 0, 113, 77], 0))).is_err());
    }
}
