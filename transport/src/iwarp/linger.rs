//! Sockets that outlive their connection. What was sent still goes out, and what still comes in is discarded: closing a
//! socket with unread bytes would reset the stream and destroy what the peer has not read.

use std::io;
use std::time::Instant;

use super::net::{Net, SocketId};
use crate::mem::{RecvSlice, SendSlice};

#[derive(Debug)]
pub(crate) struct Linger {
    pub(crate) socket: SocketId,
    pub(crate) deadline: Instant,
    rest: Vec<u8>,
    sent: usize,
    finished: bool,
}

impl Linger {
    /// Takes over `socket` with bytes that are still to be sent.
    pub(crate) fn new(socket: SocketId, rest: Vec<u8>, deadline: Instant) -> Self {
        Self { socket, deadline, rest, sent: 0, finished: false }
    }

    /// Sends and discards as much as the socket allows. Returns whether the socket can be closed.
    pub(crate) fn serve(&mut self, net: &mut impl Net, scratch: &mut [u8]) -> bool {
        while self.sent < self.rest.len() {
            match net.send(self.socket, &[SendSlice::new(&self.rest[self.sent..])]) {
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return true,
            }
        }
        if self.sent >= self.rest.len() && !self.finished {
            self.finished = true;
            net.shutdown(self.socket);
        }
        // The deadline cuts off a peer that never stops sending; until then, each edge reads a bounded number of bytes.
        for _ in 0..16 {
            match net.recv(self.socket, &mut [RecvSlice::new(scratch)]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(_) => return true,
            }
        }
        false
    }
}
