//! Who sleeps, and who has to be called.
//!
//! A side that is going to sleep says what it is to be called for, and looks once more before it sleeps. A side that has done something
//! looks whether the other one is to be called for it. With a fence between the two on both sides, one of them sees the other: so nobody
//! sleeps over news. A side that is awake is called for nothing, so a call is made once for each sleep.
//!
//! The order of a side that sleeps: take the calls that have come; look at the ring; say what to be called for; fence; look again; sleep.
//! The order of one that has news: publish; fence; look whether the other one is to be called; call.

use super::ring::{Consumer, Producer};
use super::segment::{CALL, Words};

/// There are records to consume.
pub(super) const NEWS: u64 = 1;
/// Records were consumed.
pub(super) const ROOM: u64 = 2;

/// Says what a side is to be called for, which may sleep then, and tells the peer what was consumed. Returns whether there is something
/// already, so that it may not sleep, and whether the peer is to be called.
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
    let stirs = !cfg!(planted = "no-second-look") && is_stirring(words, incoming, outgoing, causes);
    (stirs, owes && must_call(words, outgoing.half(), ROOM))
}

/// Whether there is something that a side is to be called for.
#[inline]
pub(super) fn is_stirring<W: Words>(words: &W, incoming: &Consumer, outgoing: &Producer, causes: u64) -> bool {
    incoming.has_news(words) || (causes & ROOM != 0 && outgoing.is_moved(words))
}

/// Says that this side is awake.
#[inline]
pub(super) fn disarm<W: Words>(words: &W, incoming: &Consumer) {
    words.poke(incoming.half() + CALL, 0);
}

/// Lets the peer see what was put into the ring. Returns whether it is to be called.
#[inline]
pub(super) fn publish<W: Words>(words: &W, outgoing: &mut Producer) -> bool {
    if cfg!(planted = "looked-before-it-published") {
        let calls = must_call(words, outgoing.half(), NEWS);
        return outgoing.publish(words) && calls;
    }
    outgoing.publish(words) && must_call(words, outgoing.half(), NEWS)
}

/// Tells the peer what was consumed. Returns whether it is to be called.
#[inline]
pub(super) fn release<W: Words>(words: &W, incoming: &mut Consumer, outgoing: &Producer) -> bool {
    incoming.release(words);
    must_call(words, outgoing.half(), ROOM)
}

/// Whether the peer, which consumes from the half at `outgoing`, is to be called for something that was published. It is called once.
#[inline]
fn must_call<W: Words>(words: &W, outgoing: usize, cause: u64) -> bool {
    if !cfg!(planted = "published-without-a-fence") {
        words.fence();
    }
    words.peek(outgoing + CALL) & cause != 0 && words.swap(outgoing + CALL, 0) & cause != 0
}
