//! Sockets that outlive their connection. They still deliver the sent bytes and discard the received ones: closing a socket with unread
//! bytes would reset the stream and destroy data that the peer has not read.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::net::{Net, SocketId};
use crate::mem::{RecvSlice, SendSlice};
use crate::slab::{Key, Slab};

#[derive(Debug)]
pub(crate) struct Linger {
    pub(crate) socket: SocketId,
    pub(crate) deadline: Instant,
    rest: Vec<u8>,
    sent: usize,
    finished: bool,
}

impl Linger {
    /// Creates the linger state of `socket`, with the bytes that are still to be sent.
    pub(crate) fn new(socket: SocketId, rest: Vec<u8>, deadline: Instant) -> Self {
        Self { socket, deadline, rest, sent: 0, finished: false }
    }

    /// Sends and discards as much as the socket allows. Returns true if the socket can be closed.
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

/// The lingering sockets of a provider.
#[derive(Debug, Default)]
pub(super) struct Lingers {
    sockets: Slab<Linger>,
    /// Their keys, oldest first. Some belong to sockets that are closed.
    by_age: VecDeque<Key>,
}

impl Lingers {
    pub(super) fn len(&self) -> usize {
        self.sockets.len()
    }

    pub(super) fn get(&self, key: Key) -> Option<&Linger> {
        self.sockets.get(key)
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut Linger> {
        self.sockets.get_mut(key)
    }

    pub(super) fn insert(&mut self, linger: Linger) -> Key {
        if self.by_age.len() > 64 + 2 * self.sockets.len() {
            let sockets = &self.sockets;
            self.by_age.retain(|&key| sockets.get(key).is_some());
        }
        let key = self.sockets.insert(linger);
        self.by_age.push_back(key);
        key
    }

    pub(super) fn remove(&mut self, key: Key) -> Option<Linger> {
        self.sockets.remove(key)
    }

    /// Removes the oldest one.
    pub(super) fn remove_oldest(&mut self) -> Option<Linger> {
        while let Some(key) = self.by_age.pop_front() {
            if let Some(linger) = self.sockets.remove(key) {
                return Some(linger);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The oldest socket is closed first, whichever were closed before, and closed sockets leave nothing behind.
    #[test]
    fn the_oldest_lingering_socket_gives_way() {
        #[allow(clippy::disallowed_methods, reason = "a deadline that nobody waits for")]
        let deadline = Instant::now();
        let mut lingers = Lingers::default();
        let add = |lingers: &mut Lingers, slot| {
            lingers.insert(Linger::new(SocketId(Key::new(slot, 1)), Vec::new(), deadline))
        };
        let keys: Vec<_> = (0..3).map(|slot| add(&mut lingers, slot)).collect();
        assert!(lingers.remove(keys[0]).is_some());
        assert_eq!(lingers.remove_oldest().map(|linger| linger.socket), Some(SocketId(Key::new(1, 1))));
        for slot in 3..10_000 {
            let key = add(&mut lingers, slot);
            assert!(lingers.remove(key).is_some() && lingers.by_age.len() < 100);
        }
        assert_eq!(lingers.remove_oldest().map(|linger| linger.socket), Some(SocketId(Key::new(2, 1))));
        assert!(lingers.remove_oldest().is_none() && lingers.len() == 0);
    }
}
