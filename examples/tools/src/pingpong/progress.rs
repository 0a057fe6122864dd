//! The progress bar of a measurement, on standard error.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressStyle};

use super::figures::size_label;
use super::plan::Plan;

/// The number of positions of the bar.
const STEPS: f64 = 1000.0;

/// The progress bar of one measurement.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Makes a progress bar. It is drawn only if standard error is a terminal.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(STEPS as u64);
            if let Ok(style) = ProgressStyle::with_template("{msg:>24} {bar:40} {percent:>3}%") {
                bar.set_style(style);
            }
            bar.set_message(format!("{} {}", plan.job.mode, size_label(plan.job.size.into())));
            bar
        });
        Self { bar }
    }

    /// Returns true if the bar is drawn.
    #[must_use]
    pub const fn is_seen(&self) -> bool {
        self.bar.is_some()
    }

    /// Shows the fraction that is done, from 0 to 1.
    pub fn show(&self, share: f64) {
        if let Some(bar) = &self.bar {
            bar.set_position((share * STEPS) as u64);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
