//! One link between this rank and another one. The link answers the requests that the peer sends during measurements, and has the two
//! streams of the all-to-all load.

use std::time::Instant;

use rdma_reactor::{Access, ConnectionId, Context, Region, RegionOptions};

use super::frame::{self, LinkFrame};
use super::load::{Inbound, Outbound};
use super::outbox::Outbox;
use super::task::BLOCK;

/// The largest number of queued answers to a peer. An `rdma-mesh` never has so many unanswered requests; a peer that exceeds the limit
/// violates the protocol.
const MAX_WAITING: usize = 64;

/// A link of the mesh.
#[derive(Debug)]
pub struct Link {
    /// The connection.
    pub conn: ConnectionId,
    /// Messages that wait until the connection is writable.
    pub outbox: Outbox,
    /// The outgoing stream of the all-to-all load.
    pub outbound: Outbound,
    /// The incoming stream of the all-to-all load.
    pub inbound: Inbound,
    /// The memory that the peer may write to during a measurement.
    lent: Option<Region>,
    /// True if the link is established on both sides, so that both may use it.
    ready: bool,
    /// The number of earlier connects to the same peer, by the side that opened the link.
    attempt: u32,
}

impl Link {
    /// Makes a link of a connection that is established on this side. `ready` is true if the peer has opened the connection: the connection
    /// is then established on the peer's side too, and the caller notifies the peer by [`LinkFrame::Ready`].
    #[must_use]
    pub fn new(conn: ConnectionId, ready: bool, attempt: u32) -> Self {
        Self {
            conn,
            outbox: Outbox::default(),
            outbound: Outbound::default(),
            inbound: Inbound::default(),
            lent: None,
            ready,
            attempt,
        }
    }

    /// Returns the number of earlier connects to the same peer, by the side that opened the link.
    #[must_use]
    pub const fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Returns true if the link is established on both sides, so that both may use it.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.ready
    }

    /// Handles a message of the peer. Returns the message if the caller must handle it: an answer to this rank's measurement, or the
    /// notice that the link is ready. `scratch` is a buffer for an answer.
    pub fn take(
        &mut self,
        cx: &mut Context<'_>,
        message: &[u8],
        scratch: &mut Vec<u8>,
        now: Instant,
    ) -> Result<Option<LinkFrame>, String> {
        if self.outbox.len() > MAX_WAITING {
            return Err(format!("{} answers wait for it", self.outbox.len()));
        }
        let frame = LinkFrame::decode(message).ok_or_else(|| format!("unknown message of {} bytes", message.len()))?;
        match frame {
            LinkFrame::Ping => {
                scratch.clear();
                scratch.extend_from_slice(message);
                frame::answer(scratch);
                self.outbox.post(cx, self.conn, scratch);
            }
            LinkFrame::Borrow(task, len) => {
                let answer = match self.lend(cx, len) {
                    Ok(lent) => LinkFrame::Lent(task, lent),
                    Err(why) => LinkFrame::Refused(task, why),
                };
                self.outbox.post(cx, self.conn, &answer.encode());
            }
            LinkFrame::Written(task) => {
                self.lent = None;
                self.outbox.post(cx, self.conn, &LinkFrame::Seen(task).encode());
            }
            LinkFrame::Load(number) => self.inbound.take(number, now),
            LinkFrame::LoadEnd(sent) => self.inbound.end(sent, now),
            LinkFrame::Ready if self.ready => {}
            LinkFrame::Ready => {
                self.ready = true;
                return Ok(Some(frame));
            }
            LinkFrame::Pong(_) | LinkFrame::Lent(..) | LinkFrame::Seen(_) | LinkFrame::Refused(..) => {
                return Ok(Some(frame));
            }
        }
        Ok(None)
    }

    fn lend(&mut self, cx: &mut Context<'_>, len: u32) -> Result<rdma_reactor::RemoteRegion, String> {
        if len != BLOCK {
            return Err(format!("{len} bytes: this rank lends {BLOCK}"));
        }
        let options = RegionOptions::new().allow(Access::REMOTE_WRITE);
        let region = cx.regions().register(self.conn, len as usize, &options).map_err(|error| error.to_string())?;
        Ok(self.lent.insert(region).remote())
    }
}
