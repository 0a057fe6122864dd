//! A provider made of two: RDMA devices, and the embedded provider for what no device reaches.
//!
//! The lowest bit of the slot in each id says which of the two the object belongs to, so that a call goes to its provider without
//! a look-up. Address handles are the exception: only devices have them, and they keep their ids. The device 0 is that of
//! the embedded provider; the devices of RDMA follow, each with the number that it has there and one more. One epoll set stands for the
//! connection-manager channels of both.
//!
//! `listening` and `resolving` decide which provider an address goes to; `provider` forwards all the rest.

mod ids;
mod listening;
mod provider;
mod resolving;
#[cfg(all(test, not(feature = "rdma-sys")))]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Interest, Poll, Token};

use self::ids::Side;
use self::listening::Listener;
use self::resolving::Attempts;
use crate::cm::CmEvent;
use crate::error::{Error, Result};
use crate::provider::Provider;
use crate::verbs::{Reach, Verbs};

/// RDMA devices and an embedded provider as one: see the [module](self).
///
/// - A listener on an unspecified address listens on both, under one id, if a device is up. On iWARP devices the port is one of
///   TCP, which only one of the two can have: then the devices listen alone, and a line in the log says so.
/// - A listener on another address is on the device that has the address, or else on the embedded provider.
/// - A connection goes over a device if one resolves the address within a time limit, and else over the embedded provider, under
///   another id ([`crate::CmEventKind::Moved`]). Addresses of the loopback are left to the embedded provider.
/// - Datagrams and addresses of InfiniBand are left to the devices.
pub struct Dual<E> {
    devices: Verbs,
    embedded: E,
    /// An epoll set of both channels. Nobody asks it for events: it becomes readable whenever one of the two does.
    channel: Poll,
    listeners: Vec<Listener>,
    attempts: Attempts,
    /// The provider that is asked for the next event first, so that neither waits for the other for ever.
    first: Side,
    used: [bool; 2],
}

impl<E> fmt::Debug for Dual<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dual")
            .field("devices", &self.devices)
            .field("listeners", &self.listeners.len())
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}

impl<E: Provider> Dual<E> {
    /// Joins two providers that nothing was made on yet. `patience` is the time that a device has to resolve a peer's address.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn new(devices: Verbs, embedded: E, patience: Duration) -> Result<Self> {
        let io = |source| Error::io("joining the connection-manager channels", source);
        let channel = Poll::new().map_err(io)?;
        for (token, fd) in [devices.cm_channel(), embedded.cm_channel()].into_iter().enumerate() {
            channel.registry().register(&mut SourceFd(&fd), Token(token), Interest::READABLE).map_err(io)?;
        }
        Ok(Self {
            devices,
            embedded,
            channel,
            listeners: Vec::new(),
            attempts: Attempts::new(patience),
            first: Side::Devices,
            used: [false; 2],
        })
    }

    /// One of the two, for calls that are rare.
    fn at(&mut self, side: Side) -> &mut dyn Provider {
        match side {
            Side::Devices => &mut self.devices,
            Side::Embedded => &mut self.embedded,
        }
    }

    fn look_at(&self, side: Side) -> &dyn Provider {
        match side {
            Side::Devices => &self.devices,
            Side::Embedded => &self.embedded,
        }
    }

    /// The provider of a local address, with the reason.
    fn serving(&mut self, address: SocketAddr) -> (Side, String) {
        match self.devices.serves(address) {
            Ok(Reach::Yes { device }) => (Side::Devices, format!("the device {device} serves {address}")),
            Ok(Reach::No { reason }) => (Side::Embedded, format!("no RDMA device serves {address}: {reason}")),
            Err(error) => (Side::Embedded, error.to_string()),
        }
    }

    const fn note_use(&mut self, side: Side) {
        self.used[side as usize] = true;
    }

    /// The next event of one of the two, in ids of both together.
    fn event_of(&mut self, side: Side, now: Instant) -> Result<Option<CmEvent>> {
        let Some(event) = self.at(side).next_cm_event(now)? else { return Ok(None) };
        let event = match side {
            Side::Devices => self.judge(event),
            Side::Embedded => event,
        };
        Ok(Some(self.translate(side, event)))
    }
}
