//! Waking a side that sleeps.
//!
//! Each side has a *call word*. Before a side sleeps, it stores in its call word the events for which the peer must
//! wake that side. A side that causes an event reads the peer's call word. If the call word contains the event, the
//! side *calls* the peer: it sends a packet on their Unix socket. The call word is 0 while its side is awake, so each
//! sleep costs at most one call.
//!
//! A side that sleeps does this: read the calls that have arrived; look at the ring; store the call word; fence; look
//! at the ring again; sleep. A side that causes an event does this: publish; fence; read the peer's call word; call.
//!
//! On both sides the fence is between a store and a load. So at least one side sees the other's store, and no side
//! sleeps while there is work for it.

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
    words.poke(incoming.half() + CALL, causes);
    if !cfg!(planted = "armed-without-a-fence") {
        words.fence();
    }
    let ready = !cfg!(planted = "no-second-look") && has_work(words, incoming, outgoing, causes);
    (ready, owes && must_call(words, outgoing.half(), ROOM))
}

/// Returns true if records have arrived, or if `causes` contains [`ROOM`] and the peer has released records.
#[inline]
pub(super) fn has_work<W: Words>(words: &W, incoming: &Consumer, outgoing: &Producer, causes: u64) -> bool {
    incoming.has_news(words) || (causes & ROOM != 0 && outgoing.has_tail_moved(words))
}

/// Clears the local call word: this side is awake, and the peer need not call this side.
#[inline]
pub(super) fn disarm<W: Words>(words: &W, incoming: &Consumer) {
    words.poke(incoming.half() + CALL, 0);
}

/// Publishes the records that were written to the ring. Returns true if the caller must call the peer.
#[inline]
pub(super) fn publish<W: Words>(words: &W, outgoing: &mut Producer) -> bool {
    if cfg!(planted = "looked-before-it-published") {
        let calls = must_call(words, outgoing.half(), NEWS);
        return outgoing.publish(words) && calls;
    }
    outgoing.publish(words) && must_call(words, outgoing.half(), NEWS)
}

/// Releases the consumed records. Returns true if the caller must call the peer.
#[inline]
pub(super) fn release<W: Words>(words: &W, incoming: &mut Consumer, outgoing: &Producer) -> bool {
    incoming.release(words);
    must_call(words, outgoing.half(), ROOM)
}

/// Returns true if the caller must call the peer for the event `cause`, which has just been published. `outgoing` is
/// the offset of the half of the segment that contains the peer's call word. If the result is true, the call word was
/// set to 0, so that the peer is called only once.
#[inline]
fn must_call<W: Words>(words: &W, outgoing: usize, cause: u64) -> bool {
    if !cfg!(planted = "published-without-a-fence") {
        words.fence();
    }
    words.peek(outgoing + CALL) & cause != 0 && words.swap(outgoing + CALL, 0) & cause != 0
}
