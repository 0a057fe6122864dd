//! A loop for programs that look at memory which a peer writes. It takes many looks, and then a turn of the reactor.

use std::time::{Duration, Instant};

use rdma_reactor::{Context, Error, Handler, Reactor};

/// Number of looks between two turns on a device, which places data by itself. The embedded provider places data in its
/// turns only.
const LOOKS: u32 = 1000;
/// Largest number of blocks between two turns, so that completions are collected before the send queue is full.
pub const BLOCKS: u32 = 16;
/// Time without a block after which a turn may sleep.
const PATIENCE: Duration = Duration::from_millis(20);
/// Time that such a turn sleeps, unless something happens.
const NAP: Duration = Duration::from_millis(1);

/// A handler that looks at memory.
pub trait Watch: Handler {
    /// Whether there is memory to look at.
    fn is_watching(&self) -> bool;
    /// Looks once; returns whether the peer has written.
    fn look(&mut self) -> bool;
    /// Answers a write of the peer. The handler must post its sends at once.
    fn seen(&mut self, cx: &mut Context<'_>);
}

/// Takes turns and looks until `over`, or until there is no memory left to look at.
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
