//! Formats the table of results.

use super::verdict::{Times, Verdict};

/// Returns the line with the headings of the columns.
#[must_use]
pub fn head() -> String {
    format!(
        "{:<5} {:<42} {:>14} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>5} {:>5} {:>5} {:>5} {:>7} {:>8}",
        "",
        "attack",
        "up",
        "p50[ms]",
        "p99[ms]",
        "max[ms]",
        "ctl p50",
        "ctl p99",
        "attacks",
        "most",
        "first",
        "load",
        "wait",
        "pool[s]",
        "RSS[MiB]"
    )
}

fn ms(time: Option<u64>) -> String {
    time.map_or_else(|| "-".into(), |us| format!("{:.2}", us as f64 / 1e3))
}

/// Returns the line of one attack, followed by a line for each missed target.
#[must_use]
pub fn row(verdict: &Verdict) -> String {
    let Times { asked, up, p50_us, p99_us, max_us, .. } = verdict.attacked;
    let control = verdict.control.as_ref();
    let share = format!("{up}/{asked} {:.0}%", 100.0 * up as f64 / asked.max(1) as f64);
    let mut text = format!(
        "{:<5} {:<42} {share:>14} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>5} {:>5} {:>5.2} {:>5.2} {:>7} {:>8}",
        verdict.security,
        verdict.attack,
        ms(p50_us),
        ms(p99_us),
        ms(max_us),
        ms(control.and_then(|control| control.p50_us)),
        ms(control.and_then(|control| control.p99_us)),
        verdict.attackers.opened,
        verdict.server.highest,
        if verdict.is_first { "yes" } else { "no" },
        verdict.load,
        verdict.waited,
        verdict.pool_seconds.map_or_else(|| "-".into(), |time| format!("{time:.0}")),
        verdict.resident_kib.map_or_else(|| "-".into(), |kib| (kib >> 10).to_string()),
    );
    if verdict.crowd.asked > 0 {
        let (crowd, server) = (&verdict.crowd, &verdict.server);
        text += &format!(
            "\n      large messages: {}/{}, p99 {} ms; mapped: {} MiB; charged: {} KiB; private memory: {} MiB{}",
            crowd.up,
            crowd.asked,
            ms(crowd.p99_us),
            server.mapped >> 20,
            verdict.attackers.charged_kib,
            server.private_kib >> 10,
            verdict
                .beside
                .map_or_else(String::new, |beside| format!(", {} beside honest peers", beside.private_kib >> 10)),
        );
    }
    for missed in &verdict.missed {
        text += &format!("\n      missed: {missed}");
    }
    for (why, count) in &verdict.not_up {
        text += &format!("\n      not up: {count}, {why}");
    }
    text
}
