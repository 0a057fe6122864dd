//! The signals that end a program.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::{fs, thread};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

use crate::pingpong::failure::Failure;

/// Calls `act` for each SIGINT, SIGTERM and SIGHUP, on a thread of its own. If the program ignores SIGHUP, because `nohup` has started it,
/// SIGHUP stays ignored.
///
/// # Errors
/// The system refused the signal handler.
pub(crate) fn on_signals(mut act: impl FnMut() + Send + 'static) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::new(format!("cannot handle signals: {error}"));
    let (mut told, teller) = UnixStream::pair().map_err(failed)?;
    let hangup = (!ignores_hangup()).then_some(SIGHUP);
    for signal in [SIGINT, SIGTERM].into_iter().chain(hangup) {
        teller.try_clone().and_then(|teller| pipe::register(signal, teller)).map_err(failed)?;
    }
    let wait = move || {
        // For each signal, the handler writes one byte to the socket.
        while told.read_exact(&mut [0]).is_ok() {
            act();
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait).map_err(failed)?;
    Ok(())
}

/// Returns true if this process ignores SIGHUP.
fn ignores_hangup() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or_default();
    // SIGHUP is signal 1, and the lowest bit of the mask.
    u64::from_str_radix(ignored.trim(), 16).is_ok_and(|mask| mask & 1 == 1)
}
