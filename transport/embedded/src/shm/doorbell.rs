//! Waking a side that sleeps.
//!
//! Each side has a *call word*. Before a side sleeps, it stores in its call word the events for which the peer must
//! wake that side. A side that causes an event reads the peer's call word. If the call word contains the event, the
//! side sets the word to 0 and *calls* the peer: it sends a packet on their Unix socket. The call word is 0 while its
//! side is awake, so each sleep costs at most one call.
//!
//! Before it sleeps, a side does this: read the calls that have arrived; look at the ring; set the
//! call word by a swap; fence; look at the ring again. A side that causes an event does this:
//! publish; fence; read the peer's call word; call.
//!
//! On both sides the fence is between a store and a load. So at least one side sees the other's store, and no side
//! sleeps while there is work for it.
//!
//! Between the read of the peer's word and the swap that sets it to 0, the peer may have woken up
//! and stored other events. The swap erases these events, so nobody would call the peer for them
//! later. So the side calls the peer whenever the swap has erased any event.

use super::ring::{Consumer, Producer};
use super::segment::{CALL, Words};

/// The event that the peer has published records.
pub(super) const NEWS: u64 = 1;
/// The event that the peer has released records, so that the ring has room.
pub(super) const ROOM: u64 = 2;

/// Prepares for sleep: announces the events `causes` in the call word, and releases the consumed records. The first
/// returned value is true if an event has already happened. In that case, the caller must not sleep. The second value
/// is true if the caller must call the peer.
#[inline]
pub(super) fn arm<W: Words>(words: &W, incoming: &mut Consumer, outgoing: &Producer, causes: u64) -> (bool, bool) {
    let owes = incoming.owed() > 0;
    if owes {
        incoming.release(words);
    }
    // In real memory a store would do. But in the model checker, the peer's swap may miss a store that is older than
    // the swap. Two swaps of a word are always in order. The swap is cheap beside the system call that follows.
    words.swap(incoming.half + CALL, causes);
    if !rdma_transport::planted("armed-without-a-fence") {
        words.fence();
    }
    let ready = !rdma_transport::planted("no-second-look") && has_work(words, incoming, outgoing, causes);
    (ready, owes && must_call(words, outgoing.half, ROOM))
}

/// Returns true if records have arrived, or if `causes` contains [`ROOM`] and the peer has released records.
#[inline]
pub(super) fn has_work<W: Words>(words: &W, incoming: &Consumer, outgoing: &Producer, causes: u64) -> bool {
    incoming.has_news(words) || (causes & ROOM != 0 && outgoing.has_tail_moved(words))
}

/// Clears the local call word: the local side is awake, so the peer need not wake it.
#[inline]
pub(super) fn disarm<W: Words>(words: &W, incoming: &Consumer) {
    words.poke(incoming.half + CALL, 0);
}

/// Publishes the records that were written to the ring. Returns true if the caller must call the peer.
#[inline]
pub(super) fn publish<W: Words>(words: &W, outgoing: &mut Producer) -> bool {
    if rdma_transport::planted("looked-before-it-published") {
        let calls = must_call(words, outgoing.half, NEWS);
        return outgoing.publish(words) && calls;
    }
    outgoing.publish(words) && must_call(words, outgoing.half, NEWS)
}

/// Releases the consumed records. Returns true if the caller must call the peer.
#[inline]
pub(super) fn release<W: Words>(words: &W, incoming: &mut Consumer, outgoing: &Producer) -> bool {
    incoming.release(words);
    must_call(words, outgoing.half, ROOM)
}

/// Returns true if the caller must call the peer after the event `cause`, which has just been
/// published. `outgoing` is the offset of the half of the segment that contains the peer's call
/// word. If the result is true, this function has set the call word to 0, so that the peer is
/// called only once. This may erase other events than `cause`, if the peer has changed the word
/// during this function. The peer must be called for these events, too.
#[inline]
fn must_call<W: Words>(words: &W, outgoing: usize, cause: u64) -> bool {
    if !rdma_transport::planted("published-without-a-fence") {
        words.fence();
    }
    words.peek(outgoing + CALL) & cause != 0 && words.swap(outgoing + CALL, 0) != 0
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::shm::record::WORD;
    use crate::shm::segment::{HALF, HEAD, LEN, SegmentSide};

    /// The words of a segment. After a load of a call word that contains [`ROOM`], the peer stores `next` in this word.
    #[derive(Debug)]
    struct ChangingWords {
        words: Vec<AtomicU64>,
        next: u64,
    }

    impl Words for ChangingWords {
        fn load(&self, at: usize) -> u64 {
            self.words[at / WORD].load(Ordering::SeqCst)
        }
        fn store(&self, at: usize, value: u64) {
            self.words[at / WORD].store(value, Ordering::SeqCst);
        }
        fn peek(&self, at: usize) -> u64 {
            let value = self.load(at);
            if at % HALF == CALL && value & ROOM != 0 {
                self.store(at, self.next);
            }
            value
        }
        fn poke(&self, at: usize, value: u64) {
            self.store(at, value);
        }
        fn swap(&self, at: usize, value: u64) -> u64 {
            self.words[at / WORD].swap(value, Ordering::SeqCst)
        }
        fn fence(&self) {}
    }

    /// The peer sleeps until records or room, and wakes up by itself just before the local side
    /// calls it. If the peer already sleeps again, the local side erases its new announcement, and
    /// so must call the peer. If the peer is awake, no call is needed.
    #[test]
    fn a_peer_is_called_if_its_announcement_is_erased() {
        let side = SegmentSide::Active;
        let call = side.outgoing() + CALL;
        for (next, calls) in [(NEWS | ROOM, true), (NEWS, true), (0, false)] {
            for arms in [false, true] {
                let words = ChangingWords { words: (0..LEN / WORD).map(|_| AtomicU64::new(0)).collect(), next };
                let (producer, mut consumer) = (Producer::new(side.outgoing()), Consumer::new(side.incoming()));
                words.store(side.incoming() + HEAD, 16);
                assert_eq!(consumer.available(&words), Ok(16));
                consumer.advance(16);
                words.store(call, NEWS | ROOM);
                let (ready, called) = if arms {
                    arm(&words, &mut consumer, &producer, NEWS)
                } else {
                    (false, release(&words, &mut consumer, &producer))
                };
                assert_eq!((ready, called, words.load(call)), (false, calls, 0), "{next} {arms}");
            }
        }
    }
}
