//! Hostile peers that flood a server: they send messages of one kind as fast as the server grants credits. A flooding peer builds the
//! frames of the protocol itself.

use rdma_reactor::{Config, ConnectOptions, ConnectionId, Context, Error, Framing, Handler, Message};
use serde::{Deserialize, Serialize};

use crate::conformance::violations::{HELLO, WINDOW, greeting, message};

/// The kind of messages in a flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Data messages without payload.
    Data,
    /// Credit updates that grant no further credits.
    Credits,
    /// Keepalive pings, each of which the server must answer.
    Pings,
    /// Immediate data, which the server delivers to its program.
    Immediates,
}

impl Kind {
    /// All kinds of floods.
    pub const ALL: [Self; 4] = [Self::Data, Self::Credits, Self::Pings, Self::Immediates];

    /// Returns a frame of this kind.
    fn message(self) -> Vec<u8> {
        match self {
            Self::Data => message(0, WINDOW, &[]),
            Self::Credits => message(2, WINDOW, &[]),
            Self::Pings => message(3, WINDOW, &[]),
            Self::Immediates => message(5, WINDOW, &[0; 8]),
        }
    }
}

/// The handler of a flooding peer, which has one connection.
#[derive(Debug)]
pub struct Floods {
    frame: Vec<u8>,
    /// The number of messages that the peer has sent.
    pub sent: u32,
    granted: u32,
    received: u32,
    /// The number of received messages for which the peer has already granted a credit to the server.
    known: u32,
}

impl Floods {
    /// Makes a peer that has sent nothing yet.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        Self { frame: kind.message(), sent: 0, granted: 0, received: 0, known: 0 }
    }

    /// Returns the settings of the peer's reactor. When the peer handles a message, it grants the next credit before its reactor posts the
    /// receive again. So the reactor has more receives than the peer grants.
    #[must_use]
    pub fn config(config: Config) -> Config {
        config.receive_depth(4 * WINDOW)
    }

    /// Begins to connect a flooding peer to a server.
    ///
    /// # Errors
    /// The reactor refuses to connect.
    pub fn connect(cx: &mut Context<'_>, server: std::net::SocketAddr) -> Result<(), Error> {
        let options = ConnectOptions::new().framing(Framing::Raw).private_data(greeting(WINDOW));
        cx.connect_with(server, options).map(drop)
    }

    fn fill(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // Each frame grants a credit for every message received so far. The peer uses its last credit only for a frame that grants new
        // credits. Otherwise the peer and the server could wait for each other.
        while self.granted.wrapping_sub(self.sent) > u32::from(self.known == self.received) {
            self.frame[4..8].copy_from_slice(&WINDOW.wrapping_add(self.received).to_le_bytes());
            if cx.send(conn, &self.frame).is_err() {
                return;
            }
            self.sent = self.sent.wrapping_add(1);
            self.known = self.received;
        }
    }
}

impl<M> Handler<M> for Floods {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // The greeting in the private data has the server's initial window.
        self.granted = u32::from_le_bytes(cx.connection(conn).private_data()[8..12].try_into().expect("a greeting"));
        cx.send(conn, &message(HELLO, WINDOW, &[])).expect("room");
        self.sent = 1;
        self.fill(cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.received = self.received.wrapping_add(1);
        let granted = u32::from_le_bytes(message[4..8].try_into().expect("a header"));
        // Grants may arrive out of order, so a grant that is older than the newest one is ignored.
        if granted.wrapping_sub(self.granted) < 1 << 31 {
            self.granted = granted;
        }
        self.fill(cx, conn);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.fill(cx, conn);
    }
}
