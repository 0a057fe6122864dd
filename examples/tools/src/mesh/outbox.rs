//! Messages that wait until their connection takes them.

use std::collections::VecDeque;

use rdma_reactor::{ConnectionId, Context, SendErrorKind};

/// Messages that wait, in order.
#[derive(Debug, Default)]
pub struct Outbox {
    waiting: VecDeque<Vec<u8>>,
}

impl Outbox {
    /// Sends a message, or keeps it until [`Outbox::writable`]. A message to a connection that is ending is dropped.
    pub fn post(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) {
        if !self.waiting.is_empty() || !accepts(cx, conn, message) {
            self.waiting.push_back(message.to_vec());
        }
    }

    /// Sends what waits, as the connection has room again.
    pub fn writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        while let Some(message) = self.waiting.front() {
            if !accepts(cx, conn, message) {
                return;
            }
            self.waiting.pop_front();
        }
    }

    /// Number of messages that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// Whether there is nothing left to do about a message.
fn accepts(cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) -> bool {
    match cx.send(conn, message) {
        Ok(_) => true,
        Err(SendErrorKind::WouldBlock(_)) => false,
        Err(error) => {
            log::info!("{conn}: a message of {} bytes is dropped: {error}", message.len());
            true
        }
    }
}
