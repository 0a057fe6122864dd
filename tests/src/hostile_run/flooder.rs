//! An attacker that establishes a connection, and then sends messages of one kind as fast as the server grants credits.

use std::net::SocketAddr;

use rdma_reactor::{ConnectionId, Context, Handler, Message, Reactor, Security, Wait};
use serde::{Deserialize, Serialize};

use super::attacker::Report;
use super::process::{Order, answer, obey};
use super::{Result, config};
use crate::floods::{Floods, Kind};

/// The settings of the attacker's process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The address of the server.
    pub server: SocketAddr,
    /// The kind of messages to send.
    pub kind: Kind,
}

#[derive(Debug)]
struct Flooder {
    server: SocketAddr,
    floods: Floods,
}

impl Handler<Order> for Flooder {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        Handler::<Order>::on_connect(&mut self.floods, cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        Handler::<Order>::on_recv(&mut self.floods, cx, conn, message);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        Handler::<Order>::on_writable(&mut self.floods, cx, conn);
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, order: Order) {
        let report = Report { opened: self.floods.sent.into(), ..Report::default() };
        let is_alive = match order {
            Order::Go => Floods::connect(cx, self.server).is_ok(),
            Order::Report => answer(&report).is_ok(),
            Order::End => false,
        };
        if !is_alive {
            cx.stop();
        }
    }
}

/// Sends the answer that it is ready, and waits for the order to begin. Then floods the server until standard input ends.
///
/// # Errors
/// The reactor fails.
pub fn run(settings: &Settings) -> Result<()> {
    // The attacker sleeps while it waits for credits, so that the other processes can use the processors.
    let config = Floods::config(config(Security::Plain, false)).wait(Wait::Event);
    let mut reactor: Reactor<Order> = Reactor::with_messages(config)?;
    obey(reactor.handle());
    answer(&Report::default())?;
    Ok(reactor.run(&mut Flooder { server: settings.server, floods: Floods::new(settings.kind) })?)
}
