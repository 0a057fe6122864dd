//! The end of `bench` by a signal. The child processes that run are ended first, so that the measurement returns and removes its files.

use std::mem;
use std::process::{self, ChildStdin};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::pingpong::failure::Failure;
use crate::signals;

/// The state that the handler of signals shares with the thread that measures.
struct State {
    raised: bool,
    /// The standard inputs of the server and of the client that were started last. A child process ends when its standard input closes.
    inputs: [Option<ChildStdin>; 2],
}

static STATE: Mutex<State> = Mutex::new(State { raised: false, inputs: [None, None] });

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handles SIGINT, SIGTERM and SIGHUP (but not a SIGHUP that is ignored already): ends the child processes, and [`is_raised`] returns true
/// from now on. A second signal ends the program immediately.
///
/// # Errors
/// The system refused the signal handler.
pub fn on_signals() -> Result<(), Failure> {
    signals::on_signals(|| {
        let mut state = state();
        state.inputs = [None, None];
        if mem::replace(&mut state.raised, true) {
            process::exit(130);
        }
    })
}

/// Returns true if a signal has requested the end of the program.
#[must_use]
pub fn is_raised() -> bool {
    state().raised
}

/// Makes a signal end the child process that reads `input` as its standard input. `index` is 0 for
/// the server and 1 for the client. The input stays open until the next call with this index. If a
/// signal has arrived already, ends the child process immediately.
pub fn ends(index: usize, input: Option<ChildStdin>) {
    let mut state = state();
    state.inputs[index] = input.filter(|_| !state.raised);
}
