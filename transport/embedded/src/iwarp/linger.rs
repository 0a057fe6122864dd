//! Sockets that outlive their connection. Such a socket still delivers the bytes that the
//! connection has sent, and discards received bytes. Closing a socket with unread bytes immediately
//! would reset the stream, and the peer would lose data that it has not read.
//!
//! In the same way, a connection in shared memory leaves its Unix socket open while the peer reads
//! the last records from the shared memory. This memory is released when the peer has closed its
//! socket, or at the deadline.

use std::collections::VecDeque;
use std::io;

use super::net::{Net, SocketId};
use crate::shm::link::PartedLink;
use crate::shm::packet::MAX_PACKET;
use rdma_transport::mem::{RecvSlice, SendSlice};
use rdma_transport::slab::{Key, Slab};

/// The largest sum of the unsent bytes of the lingering sockets. A connection that ends may have
/// half a MiB that TCP has not accepted. The memory that peers in shared memory may still read
/// counts, too.
const MAX_BYTES: usize = 64 << 20;

#[derive(Debug)]
pub(crate) struct Linger {
    pub(crate) socket: SocketId,
    rest: Vec<u8>, // bound: frames
    sent: usize,
    finished: bool,
    /// The link whose Unix socket lingers. `None` for a TCP socket.
    link: Option<Box<dyn PartedLink>>,
}

impl Linger {
    /// Creates the lingering state of `socket`; `rest` is still to be sent.
    pub(crate) fn new(socket: SocketId, rest: Vec<u8>) -> Self {
        Self { socket, rest, sent: 0, finished: false, link: None }
    }

    /// Creates the lingering state of the Unix socket of a connection in shared memory.
    pub(super) fn of_link(socket: SocketId, link: Box<dyn PartedLink>) -> Self {
        Self { link: Some(link), ..Self::new(socket, Vec::new()) }
    }

    /// Ends the lingering. The caller closes the returned socket.
    pub(super) fn end(self) -> SocketId {
        if let Some(link) = self.link {
            link.free();
        }
        self.socket
    }

    /// Returns an upper bound of the bytes that the peer has not read.
    fn len(&self) -> usize {
        self.rest.len() + self.link.as_ref().map_or(0, |link| link.len())
    }

    /// Sends `rest`, then ends the local stream, and discards received bytes, as far as possible
    /// without blocking. Returns true if the socket can be closed.
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
        // After one edge, the socket is read a bounded number of times. A peer that never stops
        // sending is cut off at the deadline.
        for _ in 0..16 {
            let received = match self.link {
                Some(_) => net.take(self.socket, &mut [0; MAX_PACKET]).map(|(len, _)| len),
                None => net.recv(self.socket, &mut [RecvSlice::new(scratch)]),
            };
            match received {
                // The peer has ended its own stream, but may still read. So the socket is closed
                // only if the local stream has ended, too.
                Ok(0) => return self.finished,
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
    sockets: Slab<Linger>, // bound: lingering
    /// The keys of the lingering sockets, oldest first. Some of these sockets may already be
    /// closed.
    by_age: VecDeque<Key>, // bound: lingering
    /// The sum of the bytes that peers have not read.
    bytes: usize,
}

impl Lingers {
    pub(super) fn len(&self) -> usize {
        self.sockets.len()
    }

    /// Returns true if `next` may linger only after an older socket was removed. `most` is the
    /// largest number of lingering sockets.
    pub(super) fn is_full(&self, next: &Linger, most: usize) -> bool {
        self.sockets.len() >= most || self.bytes + next.len() > MAX_BYTES
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut Linger> {
        self.sockets.get_mut(key)
    }

    pub(super) fn insert(&mut self, linger: Linger) -> Key {
        if self.by_age.len() > 64 + 2 * self.sockets.len() {
            let sockets = &self.sockets;
            self.by_age.retain(|&key| sockets.get(key).is_some());
        }
        self.bytes += linger.len();
        let key = self.sockets.insert(linger);
        self.by_age.push_back(key);
        key
    }

    pub(super) fn remove(&mut self, key: Key) -> Option<Linger> {
        let linger = self.sockets.remove(key)?;
        self.bytes -= linger.len();
        Some(linger)
    }

    /// Removes and returns the socket that has lingered longest, and its key.
    pub(super) fn remove_oldest(&mut self) -> Option<(Key, Linger)> {
        while let Some(key) = self.by_age.pop_front() {
            if let Some(linger) = self.remove(key) {
                return Some((key, linger));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The oldest open socket is removed first, even if older sockets were closed before. The keys
    /// of closed sockets do not accumulate.
    #[test]
    fn the_oldest_lingering_socket_gives_way() {
        let mut lingers = Lingers::default();
        let add = |lingers: &mut Lingers, slot| lingers.insert(Linger::new(SocketId(Key::new(slot, 1)), Vec::new()));
        let keys: Vec<_> = (0..3).map(|slot| add(&mut lingers, slot)).collect();
        assert!(lingers.remove(keys[0]).is_some());
        assert_eq!(lingers.remove_oldest().map(|(_, linger)| linger.socket), Some(SocketId(Key::new(1, 1))));
        for slot in 3..10_000 {
            let key = add(&mut lingers, slot);
            assert!(lingers.remove(key).is_some() && lingers.by_age.len() < 100);
        }
        assert_eq!(lingers.remove_oldest().map(|(_, linger)| linger.socket), Some(SocketId(Key::new(2, 1))));
        assert!(lingers.remove_oldest().is_none() && lingers.len() == 0);
    }

    #[test]
    fn the_unsent_bytes_of_lingering_sockets_are_limited() {
        let linger = |slot| Linger::new(SocketId(Key::new(slot, 1)), vec![0; MAX_BYTES / 4]);
        let mut lingers = Lingers::default();
        for slot in 0..4 {
            assert!(!lingers.is_full(&linger(slot), 100) && lingers.is_full(&linger(slot), slot as usize));
            lingers.insert(linger(slot));
        }
        assert!(lingers.is_full(&linger(4), 100));
        assert!(lingers.remove_oldest().is_some() && !lingers.is_full(&linger(4), 100));
    }
}
