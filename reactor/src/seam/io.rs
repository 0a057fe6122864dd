//! The descriptors of the program that the reactor watches.
//!
//! The contract is that of `epoll`(7) with EPOLLET. `on_io_ready` is called when a descriptor has become ready since the last call: bytes
//! or a connection arrived, buffer space became available, or the other end closed. It is also called after the registration, if the
//! descriptor is already ready at that time. One call may report several edges. A call may be spurious, so that the descriptor is not
//! ready.
//!
//! Therefore the descriptor must be non-blocking, and in each `on_io_ready` the program must read, write or accept until `WouldBlock`. A
//! program that stops earlier, to be fair to other descriptors, must set a timer of zero and continue in `on_timer`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rdma_transport::slab::{Key, Slab};

use super::poller::{Interest, Poller};

/// The bit that is set in the tokens of the program's descriptors. Tokens without this bit belong to channels of the reactor.
const OF_PROGRAM: usize = 1 << (usize::BITS - 1);
/// The number of bits in a token for the generation of the key in `Registrations::live`.
const GENERATION_BITS: u32 = usize::BITS - 33;

/// The descriptors that the program has registered.
#[derive(Debug)]
pub(crate) struct Registrations {
    live: Slab<RawFd>, // local: descriptors of the program
}

impl Default for Registrations {
    fn default() -> Self {
        Self { live: Slab::with_generation_bits(GENERATION_BITS) }
    }
}

impl Registrations {
    pub(crate) fn add(&mut self, poller: &mut dyn Poller, fd: BorrowedFd<'_>, interest: Interest) -> io::Result<Key> {
        let fd = fd.as_raw_fd();
        // The poller refuses a descriptor that it watches already. So if an older registration has the same descriptor number, its
        // descriptor was closed, and the system has reused the number. In this case, the older registration is removed.
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

    /// Removes a registration. Returns `true` if it existed.
    pub(crate) fn remove(&mut self, poller: &mut dyn Poller, key: Key) -> bool {
        let Some(fd) = self.live.remove(key) else { return false };
        if let Err(error) = poller.deregister(fd) {
            log::debug!("descriptor {fd} was closed before it was deregistered: {error}");
        }
        true
    }

    /// Returns the registration with this token. `None` if it was removed.
    pub(crate) fn find(&self, token: usize) -> Option<Key> {
        let key = Key::new(token as u32, ((token & !OF_PROGRAM) >> 32) as u32);
        self.live.get(key).map(|_| key)
    }
}

fn token(key: Key) -> usize {
    OF_PROGRAM | (key.generation() as usize) << 32 | key.slot() as usize
}

/// Returns `true` if a token belongs to a descriptor of the program, even one that was removed.
pub(crate) const fn is_of_program(token: usize) -> bool {
    token & OF_PROGRAM != 0
}
