//! A queue of messages that wait until their connection is writable.

use std::collections::VecDeque;

use rdma_reactor::{ConnectionId, Context, SendErrorKind};

/// The queued messages, the oldest first.
#[derive(Debug, Default)]
pub struct Outbox {
    waiting: VecDeque<Vec<u8>>, // bound: tool-mesh
}

impl Outbox {
    /// Sends a message, or queues it if the connection is not writable. If the connection is ending, the message is dropped.
    pub fn post(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) {
        if !self.waiting.is_empty() || !accepts(cx, conn, message) {
            self.waiting.push_back(message.to_vec());
        }
    }

    /// Sends the queued messages, after the connection has become writable.
    pub fn writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        while let Some(message) = self.waiting.front() {
            if !accepts(cx, conn, message) {
                return;
            }
            self.waiting.pop_front();
        }
    }

    /// Returns the number of queued messages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns true if no message is queued.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// Sends a message. Returns true if it was sent, or dropped because the connection is ending. Returns false if it must be queued.
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
