//! Who sleeps, and who has to be called.
//!
//! A side that is going to sleep says what it is to be called for, and looks once more before it sleeps. A side that has done something
//! looks whether the other one is to be called for it. With a fence between the two on both sides, one of them sees the other: so nobody
//! sleeps over news. A side that is awake is called for nothing, so a call is made once for each sleep.
//!
//! The order of one side: take the calls that have come; look at the ring; say what to be called for; fence; look again; sleep.

use super::segment::{CALL, Words};

/// There are records to consume.
pub(super) const NEWS: u64 = 1;
/// Records were consumed.
pub(super) const ROOM: u64 = 2;

/// Says what this side, which consumes from the half at `incoming`, is to be called for. Returns whether that is there already, which
/// `stirs` finds out: then this side may not sleep.
#[inline]
pub(super) fn arm<W: Words>(words: &W, incoming: usize, causes: u64, stirs: impl FnOnce() -> bool) -> bool {
    words.poke(incoming + CALL, causes);
    if !cfg!(planted = "armed-without-a-fence") {
        words.fence();
    }
    !cfg!(planted = "no-second-look") && stirs()
}

/// Says that this side is awake.
#[inline]
pub(super) fn disarm<W: Words>(words: &W, incoming: usize) {
    words.poke(incoming + CALL, 0);
}

/// Whether the peer, which consumes from the half at `outgoing`, is to be called for something that was published. It is called once.
#[inline]
pub(super) fn must_call<W: Words>(words: &W, outgoing: usize, cause: u64) -> bool {
    if !cfg!(planted = "published-without-a-fence") {
        words.fence();
    }
    words.peek(outgoing + CALL) & cause != 0 && words.swap(outgoing + CALL, 0) & cause != 0
}
