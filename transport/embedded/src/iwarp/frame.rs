//! [`Frame`]: a startup frame that is being sent.

use std::io;

use super::net::{Net, SocketId};
use rdma_transport::mem::SendSlice;

/// A startup frame that is being sent. Empty once it is sent.
#[derive(Debug, Default)]
pub(super) struct Frame {
    bytes: Vec<u8>, // bound: private-data
    /// The number of bytes that are sent.
    sent: usize,
}

impl Frame {
    pub(super) const fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, sent: 0 }
    }

    #[inline]
    pub(super) fn is_sent(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Sends the remaining bytes. Returns true once all of them are sent.
    #[inline]
    pub(super) fn send(&mut self, net: &mut impl Net, socket: SocketId) -> io::Result<bool> {
        if self.is_sent() { Ok(true) } else { self.send_rest(net, socket) }
    }

    #[cold]
    fn send_rest(&mut self, net: &mut impl Net, socket: SocketId) -> io::Result<bool> {
        while self.sent < self.bytes.len() {
            match net.send(socket, &[SendSlice::new(&self.bytes[self.sent..])]) {
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        *self = Self::default();
        Ok(true)
    }

    /// Returns the unsent bytes of the frame, followed by `more`.
    pub(super) fn unsent(mut self, more: Vec<u8>) -> Vec<u8> {
        if self.sent >= self.bytes.len() {
            return more;
        }
        let mut rest = self.bytes.split_off(self.sent);
        rest.extend_from_slice(&more);
        rest
    }
}
