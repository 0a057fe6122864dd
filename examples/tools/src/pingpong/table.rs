//! Formats tables. Their column heads are those of perftest's tools.

use super::figures::{Figures, us};
use super::job::Mode;

/// Formats the heads of the columns.
#[must_use]
pub fn head(mode: Mode) -> String {
    match mode {
        Mode::Latency => format!(
            "{:>10} {:>12} {:>12} {:>12} {:>15} {:>12} {:>14} {:>12} {:>12}",
            "#bytes",
            "#iterations",
            "t_min[usec]",
            "t_max[usec]",
            "t_typical[usec]",
            "t_avg[usec]",
            "t_stdev[usec]",
            "99%[usec]",
            "99.9%[usec]"
        ),
        Mode::Throughput => {
            format!("{:>10} {:>12} {:>20} {:>14}", "#bytes", "#iterations", "BW average[Gb/sec]", "MsgRate[Mpps]")
        }
    }
}

/// Formats the row about one measurement.
#[must_use]
pub fn row(figures: &Figures) -> String {
    let (size, iterations) = (figures.plan.job.size, figures.measured.iterations);
    match &figures.measured.latency {
        Some(h) => format!(
            "{size:>10} {iterations:>12} {:>12.2} {:>12.2} {:>15.2} {:>12.2} {:>14.2} {:>12.2} {:>12.2}",
            us(h.min()),
            us(h.max()),
            us(h.value_at_quantile(0.5)),
            h.mean() / 1e3,
            h.stdev() / 1e3,
            us(h.value_at_quantile(0.99)),
            us(h.value_at_quantile(0.999)),
        ),
        None => format!(
            "{size:>10} {iterations:>12} {:>20.3} {:>14.6}",
            figures.gbit_per_second(),
            figures.messages_per_second() / 1e6
        ),
    }
}
