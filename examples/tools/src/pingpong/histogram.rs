//! A histogram as text. Its buckets are logarithmic, and shown as bars.

use hdrhistogram::Histogram;

use super::figures::us;

/// The largest number of rows.
const ROWS: i32 = 20;
/// The length of the longest bar, in columns.
const WIDTH: f64 = 50.0;
/// The last character of a bar, by its width in eighths of a column.
const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];

/// Formats one row for each bucket. Returns no text for an empty histogram. The values of the histogram are in nanoseconds; the text shows
/// them in microseconds.
#[must_use]
pub fn text(histogram: &Histogram<u64>) -> String {
    let rows = buckets(histogram);
    let largest = rows.iter().map(|(_, _, count)| *count).max().unwrap_or(0);
    let mut out = String::new();
    for (from, to, count) in rows {
        let share = count as f64 / histogram.len() as f64 * 100.0;
        let line = format!("{:>10.2} - {:>10.2} us {share:>6.2}% {}", us(from), us(to), bar(count, largest));
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Returns the buckets, as (from, to, count), from the smallest value to the largest. The number of buckets per decade is as large as
/// possible with at most [`ROWS`] buckets in total.
fn buckets(histogram: &Histogram<u64>) -> Vec<(u64, u64, u64)> {
    if histogram.is_empty() {
        return Vec::new();
    }
    let log = |value: u64| (value.max(1) as f64).log10();
    let (min, max) = (log(histogram.min()), log(histogram.max()));
    let per_decade = [40, 20, 10, 5, 2, 1].into_iter().map(f64::from);
    let index = |log: f64, n: f64| (log * n).floor() as i32;
    let fits = |n: &f64| index(max, *n) - index(min, *n) < ROWS;
    let n = per_decade.into_iter().find(fits).unwrap_or(1.0);
    let edge = |index: i32| 10_f64.powf(f64::from(index) / n).round() as u64;
    let (first, last) = (index(min, n), index(max, n));
    (first..=last)
        .map(|index| {
            let (from, to) = (edge(index), edge(index + 1));
            let (low, high) = (if index == first { 0 } else { from }, if index == last { u64::MAX } else { to });
            let inside = histogram.iter_recorded().map(|v| (v.value_iterated_to(), v.count_at_value()));
            (from, to, inside.filter(|(value, _)| (low..high).contains(value)).map(|(_, count)| count).sum())
        })
        .collect()
}

fn bar(count: u64, largest: u64) -> String {
    if count == 0 {
        return String::new();
    }
    let eighths = ((count as f64 / largest as f64 * WIDTH * 8.0).round() as usize).max(1);
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_in_one_bucket() {
        let mut histogram = Histogram::<u64>::new(3).unwrap();
        for i in 0..10_000_u64 {
            histogram.record(3_000 + i * i % 90_000).unwrap();
        }
        histogram.record(40_000_000).unwrap();
        let rows = buckets(&histogram);
        assert!(rows.len() <= ROWS as usize);
        assert_eq!(rows.iter().map(|row| row.2).sum::<u64>(), histogram.len());
        assert_eq!(text(&histogram).lines().count(), rows.len());
    }

    #[test]
    fn one_value_and_none_have_a_histogram() {
        let mut histogram = Histogram::<u64>::new(3).unwrap();
        assert_eq!(text(&histogram), "");
        histogram.record(0).unwrap();
        assert_eq!(text(&histogram).lines().count(), 1);
    }

    #[test]
    fn the_smallest_bar_is_seen() {
        assert_eq!(bar(0, 1_000_000), "");
        assert_eq!(bar(1, 1_000_000), "▏");
        assert_eq!(bar(8, 8).chars().count(), 50);
    }
}
