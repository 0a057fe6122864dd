//! A loop for programs that look at memory which a peer writes: many looks, then a turn of the reactor.

use std::time::{Duration, Instant};

use rdma_reactor::{Context, Error, Handler, Reactor};

/// Looks between two turns where a device places what comes; the embedded provider does that in its turns only.
const LOOKS: u32 = 1000;
/// Blocks between two turns: completions are to be collected before the send queue is full.
pub const BLOCKS: u32 = 16;
/// After so long without a block, a turn may sleep.
const PATIENCE: Duration = Duration::from_millis(20);
/// How long then, unless something happens.
const NAP: Duration = Duration::from_millis(1);

/// A handler that looks at memory.
pub trait Watch: Handler {
    /// Whether there is memory to look at.
    fn is_watching(&self) -> bool;
    /// Looks once: whether the peer has written.
    fn look(&mut self) -> bool;
    /// It has: the answer. What is sent is to be posted at once.
    fn seen(&mut self, cx: &mut Context<'_>);
}

/// Turns and looks until `over`, or until nobody is left who would look.
///
/// # Errors
/// The reactor as a whole failed.
pub fn run<H: Watch>(reactor: &mut Reactor, handler: &mut H, over: impl Fn(&H) -> bool) -> Result<(), Error> {
    let most = if reactor.provider_name() == "iwarp" { 1 } else { LOOKS };
    let mut last = Instant::now();
    while !over(handler) {
        let timeout = match handler.is_watching() {
            false => None,
            true if last.elapsed() < PATIENCE => Some(Duration::ZERO),
            true => Some(NAP),
        };
        reactor.turn(handler, timeout)?;
        let (mut looks, mut blocks) = (0, 0);
        while looks < most && blocks < BLOCKS && handler.is_watching() {
            looks += 1;
            if handler.look() {
                (looks, blocks) = (0, blocks + 1);
                handler.seen(&mut reactor.context());
            }
        }
        if blocks > 0 {
            last = Instant::now();
        }
    }
    Ok(())
}
