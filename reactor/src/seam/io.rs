//! The program's own descriptors in the reactor's loop.
//!
//! The contract is that of `epoll`(7) with EPOLLET. `on_io_ready` is called when something is new since the last call:
//! bytes or a connection came, room came, or an end came. It is also called once after registering, if the descriptor
//! is ready then. Several edges may come as one call, and a call may come for nothing. Therefore the descriptor must be
//! non-blocking, and the program must read, write or accept on each call until `WouldBlock`. A program that stops
//! earlier, to be fair to others, goes on from a timer of zero.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rdma_transport::slab::{Key, Slab};

use super::poller::{Interest, Poller};

/// Bit of the tokens that belong to the program's registrations. Tokens without it belong to the reactor's own
/// channels.
const OF_PROGRAM: usize = 1 << (usize::BITS - 1);
/// Bits of a token that are left for the generation.
const GENERATION_BITS: u32 = usize::BITS - 33;

/// The descriptors registered by the program.
#[derive(Debug)]
pub(crate) struct Registrations {
    live: Slab<RawFd>,
}

impl Default for Registrations {
    fn default() -> Self {
        Self { live: Slab::with_generation_bits(GENERATION_BITS) }
    }
}

impl Registrations {
    pub(crate) fn add(&mut self, poller: &mut dyn Poller, fd: BorrowedFd<'_>, interest: Interest) -> io::Result<Key> {
        let fd = fd.as_raw_fd();
        // The poller takes a number only if it has no registration of that number. An older one has gone with its
        // descriptor.
        let key = self.live.insert(fd);
        if let Err(error) = poller.register(fd, token(key), interest) {
            self.live.remove(key);
            return Err(error);
        }
        let gone = self.live.iter().find(|&(other, &number)| other != key && number == fd).map(|(other, _)| other);
        if let Some(gone) = gone {
            self.live.remove(gone);
        }
        Ok(key)
    }

    /// Takes a registration back; returns whether it was there.
    pub(crate) fn remove(&mut self, poller: &mut dyn Poller, key: Key) -> bool {
        let Some(fd) = self.live.remove(key) else { return false };
        if let Err(error) = poller.deregister(fd) {
            log::debug!("descriptor {fd} was closed before it was deregistered: {error}");
        }
        true
    }

    /// The live registration behind a token.
    pub(crate) fn find(&self, token: usize) -> Option<Key> {
        let key = Key::new(token as u32, ((token & !OF_PROGRAM) >> 32) as u32);
        self.live.get(key).map(|_| key)
    }
}

fn token(key: Key) -> usize {
    OF_PROGRAM | (key.generation() as usize) << 32 | key.slot() as usize
}

/// Whether a token belongs to a registration, live or not.
pub(crate) const fn is_of_program(token: usize) -> bool {
    token & OF_PROGRAM != 0
}
