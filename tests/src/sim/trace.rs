//! The history of a world: a hash of all events, and optionally the events as text.

use std::collections::VecDeque;
use std::fmt::{self, Write};

/// The history, see the [module](self).
#[derive(Debug)]
pub struct Trace {
    hash: Fnv,
    lines: VecDeque<String>,
    keep: usize,
    count: u64,
}

#[derive(Debug)]
struct Fnv(u64);

impl Write for Fnv {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        for byte in s.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    }
}

impl Trace {
    /// Returns an empty history. It keeps its last `keep` lines as text.
    #[must_use]
    pub fn new(keep: usize) -> Self {
        Self { hash: Fnv(0xcbf2_9ce4_8422_2325), lines: VecDeque::new(), keep, count: 0 }
    }

    /// Adds an event to the history. `who` is the name of the node, `what` describes the event.
    pub fn line(&mut self, now: u64, who: &str, what: fmt::Arguments<'_>) {
        self.count += 1;
        // The result is ignored: writing to a hash or a string cannot fail.
        let _ = self.hash.write_fmt(format_args!("{now} {who} {what}"));
        if self.keep > 0 {
            if self.lines.len() == self.keep {
                self.lines.pop_front();
            }
            self.lines.push_back(format!("{:>13.6} ms  {who:<8} {what}", now as f64 / 1e6));
        }
    }

    /// Returns the hash of the whole history.
    #[must_use]
    pub const fn hash(&self) -> u64 {
        self.hash.0
    }

    /// Returns the number of lines so far.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Returns the kept lines as one text.
    #[must_use]
    pub fn tail(&self) -> String {
        self.lines.iter().fold(String::new(), |text, line| text + line + "\n")
    }
}
