//! Waking a side that sleeps.
//!
//! Each side has a word in which it announces, before it sleeps, the events that it must be woken for. A side that
//! causes such an event reads the word of its peer and, if the event is announced there, *calls* the peer: it sends a
//! packet on their Unix socket. A fence between the store and the load on both sides makes sure that at least one side
//! sees the other, so no side sleeps although there is work for it. A side that is awake announces nothing, so each
//! sleep costs at most one call.
//!
//! A side that sleeps: read the calls that have arrived; look at the ring; announce the events; fence; look at the ring
//! again; sleep. A side that causes an event: publish; fence; read the peer's word; call.

use super::ring::{Consumer, Producer};
use super::segment::{CALL, Words};

/// The event that records were published.
pub(super) const NEWS: u64 = 1;
/// The event that records were consumed.
pub(super) const ROOM: u64 = 2;

/// Announces the events that a side must be woken for, and releases the records that it has consumed. Returns whether
/// there is work already, in which case the side must not sleep, and whether the peer must be called.
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

/// Returns true if one of the events has happened.
#[inline]
pub(super) fn has_work<W: Words>(words: &W, incoming: &Consumer, outgoing: &Producer, causes: u64) -> bool {
    incoming.has_news(words) || (causes & ROOM != 0 && outgoing.has_tail_moved(words))
}

/// Announces that this side is awake.
#[inline]
pub(super) fn disarm<W: Words>(words: &W, incoming: &Consumer) {
    words.poke(incoming.half() + CALL, 0);
}

/// Publishes the records that were written to the ring. Returns true if the peer must be called.
#[inline]
pub(super) fn publish<W: Words>(words: &W, outgoing: &mut Producer) -> bool {
    if cfg!(planted = "looked-before-it-published") {
        let calls = must_call(words, outgoing.half(), NEWS);
        return outgoing.publish(words) && calls;
    }
    outgoing.publish(words) && must_call(words, outgoing.half(), NEWS)
}

/// Releases the records that were consumed. Returns true if the peer must be called.
#[inline]
pub(super) fn release<W: Words>(words: &W, incoming: &mut Consumer, outgoing: &Producer) -> bool {
    incoming.release(words);
    must_call(words, outgoing.half(), ROOM)
}

/// Returns true if the peer, which consumes from the half at `outgoing`, must be called for an event that was just
/// published. Clears the peer's word, so that the peer is called once.
#[inline]
fn must_call<W: Words>(words: &W, outgoing: usize, cause: u64) -> bool {
    if !cfg!(planted = "published-without-a-fence") {
        words.fence();
    }
    words.peek(outgoing + CALL) & cause != 0 && words.swap(outgoing + CALL, 0) & cause != 0
}
