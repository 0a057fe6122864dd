//! A loop for programs that poll memory or the clock in addition to events. It polls several times, then takes a turn of the reactor,
//! and repeats that.

use std::time::{Duration, Instant};

use rdma_reactor::{Context, Error, Handler, Reactor};

use super::job::Job;

/// The number of polls between two turns if a device, or a peer that has mapped the memory, writes the data. If neither of them writes the
/// data, the embedded provider writes the data during a turn of this process, so the program polls only once between two turns.
const LOOKS: u32 = 1000;
/// The largest number of blocks that arrive between two turns. The sends that answer them fill the send queue, and only a turn polls for
/// the completions of sends. So this limit prevents a full send queue.
pub const BLOCKS: u32 = 16;
/// The time without a new block after which a turn may sleep.
const PATIENCE: Duration = Duration::from_millis(20);
/// The longest time for which a turn of the reactor may sleep while the handler has something to poll.
const NAP: Duration = Duration::from_millis(1);

/// A handler that polls memory or the clock.
pub trait Watch: Handler {
    /// Returns true while the handler has to poll memory or the clock.
    fn is_watching(&self) -> bool;
    /// Returns true if turns must not sleep while the handler polls. By default, turns may sleep.
    fn is_impatient(&self) -> bool {
        false
    }
    /// Polls once. Returns true if the peer has written to the memory, or if the awaited time is reached.
    fn look(&mut self) -> bool;
    /// Handles the event that `look` has found. The handler must post its sends in this call.
    fn seen(&mut self, cx: &mut Context<'_>);
}

/// Takes turns and polls, until `over` returns true.
///
/// # Errors
/// The reactor as a whole failed.
pub fn run<H: Watch>(
    reactor: &mut Reactor,
    handler: &mut H,
    job: &Job,
    over: impl Fn(&H) -> bool,
) -> Result<(), Error> {
    let is_placed = job.direct || reactor.provider_name().contains("verbs");
    let most = if job.is_watched() && is_placed { LOOKS } else { 1 };
    let mut last = Instant::now();
    while !over(handler) {
        let timeout = match handler.is_watching() {
            false => None,
            true if handler.is_impatient() || last.elapsed() < PATIENCE => Some(Duration::ZERO),
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
