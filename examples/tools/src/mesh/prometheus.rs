//! Formats the results in the text format of Prometheus, version 0.0.4.

use std::fmt::Write;

use super::control::Figure;
use super::report::{Report, name};

/// Formats the results of a run.
#[must_use]
pub fn text(report: &Report<'_>) -> String {
    let results = report.results;
    let members = results.members();
    let mut text = String::new();
    let labels = |from: usize, to: usize| {
        let (a, b) = (escape(members[from].host()), escape(members[to].host()));
        format!("from=\"{from}\",from_host=\"{a}\",to=\"{to}\",to_host=\"{b}\"")
    };
    let pairs = || results.pairs();
    let ways = || pairs().flat_map(|(a, b, pair)| [(a, b, pair.up), (b, a, pair.down)]);

    family(
        &mut text,
        "rank_up",
        "Whether the rank was there to the end",
        members.iter().enumerate().map(|(rank, member)| {
            (format!("rank=\"{rank}\",host=\"{}\"", escape(member.host())), f64::from(u8::from(member.is_here())))
        }),
    );
    family(
        &mut text,
        "memory_peak_bytes",
        "Largest memory of the rank's process",
        members.iter().enumerate().filter_map(|(rank, member)| {
            Some((format!("rank=\"{rank}\",host=\"{}\"", escape(member.host())), member.memory_kib? as f64 * 1024.0))
        }),
    );
    family(
        &mut text,
        "hw_counter_moved",
        "Hardware counters of the rank's device, since the rank began",
        members.iter().enumerate().flat_map(|(rank, member)| {
            let host = escape(member.host());
            let row = move |(name, by): (&String, &u64)| {
                (format!("rank=\"{rank}\",host=\"{host}\",counter=\"{}\"", escape(name)), *by as f64)
            };
            member.moved.iter().map(row).collect::<Vec<_>>()
        }),
    );
    family(
        &mut text,
        "link_up",
        "Whether the pair works",
        pairs()
            .filter(|(.., pair)| !pair.is_unmeasured())
            .map(|(a, b, pair)| (labels(a, b), f64::from(u8::from(pair.broken.is_none())))),
    );
    family(
        &mut text,
        "link_shm",
        "Whether the link is in shared memory, within a host",
        pairs().map(|(a, b, pair)| (labels(a, b), f64::from(u8::from(pair.shm)))),
    );
    family(
        &mut text,
        "latency_seconds",
        "Half of a round trip",
        pairs().flat_map(|(a, b, pair)| {
            let rows = pair.latency.map(|latency| [("0.5", latency.p50_us), ("0.99", latency.p99_us)]);
            rows.into_iter()
                .flatten()
                .map(move |(quantile, us)| (format!("{},quantile=\"{quantile}\"", labels(a, b)), us / 1e6))
        }),
    );
    family(
        &mut text,
        "bandwidth_bits_per_second",
        "Rate of RDMA Writes of one pair at a time",
        ways().filter_map(|(from, to, way)| Some((labels(from, to), way.gbit? * 1e9))),
    );
    family(
        &mut text,
        "loaded_bandwidth_bits_per_second",
        "Rate while all send to all",
        ways().filter_map(|(from, to, way)| Some((labels(from, to), way.loaded_gbit? * 1e9))),
    );
    let judged = [(Figure::Latency, &report.latency), (Figure::Bandwidth, &report.bandwidth)];
    let rows = judged.into_iter().flat_map(|(figure, judgement)| {
        let ways = pairs().flat_map(
            move |(a, b, _)| {
                if figure == Figure::Latency { vec![(a, b)] } else { vec![(a, b), (b, a)] }
            },
        );
        ways.filter_map(move |(from, to)| {
            Some((format!("{},figure=\"{}\"", labels(from, to), name(figure)), judgement.times(from, to)?))
        })
    });
    family(&mut text, "times_worse", "How many times worse than its row and column", rows);
    text
}

/// Appends one family of gauges, or nothing if `rows` is empty. A row has the labels and the value.
fn family(text: &mut String, name: &str, meaning: &str, rows: impl Iterator<Item = (String, f64)>) {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return;
    }
    let name = format!("rdma_mesh_{name}");
    // Writing to a string does not fail.
    let _ = writeln!(text, "# HELP {name} {meaning}.\n# TYPE {name} gauge");
    for (labels, value) in rows {
        let _ = writeln!(text, "{name}{{{labels}}} {value}");
    }
}

/// Escapes the value of a label, as the format requires.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::sample;

    #[test]
    fn each_line_is_a_comment_or_a_gauge() {
        let results = sample::faulty();
        let text = text(&Report::new(&results, 3.0));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.starts_with("rdma_mesh_") && name.ends_with('}'), "{line}");
            assert!(value.parse::<f64>().is_ok_and(f64::is_finite), "{line}");
        }
        let pair = r#"{from="1",from_host="n1",to="2",to_host="n2""#;
        assert!(text.contains(&format!("rdma_mesh_latency_seconds{pair},quantile=\"0.5\"}} 0.00012\n")));
        assert!(text.contains(&format!("rdma_mesh_link_up{pair}}} 1\n")));
        assert!(text.contains(&format!("rdma_mesh_link_shm{pair}}} 0\n")));
        assert!(text.contains("rdma_mesh_link_shm{from=\"3\",from_host=\"n3\",to=\"6\",to_host=\"n6\"} 1\n"));
        let counted = "rdma_mesh_hw_counter_moved{rank=\"6\",host=\"n6\",counter=\"completer_retry_err\"} 12\n";
        assert!(text.contains(counted), "{text}");
        assert!(text.contains("rdma_mesh_rank_up{rank=\"5\",host=\"n5\"} 0\n"));
        assert_eq!(escape("a\"b\\c"), "a\\\"b\\\\c");
    }

    #[test]
    fn a_pair_that_was_not_measured_is_neither_up_nor_down() {
        let results = sample::interrupted(3);
        let text = text(&Report::new(&results, 3.0));
        let up: Vec<_> = text.lines().filter(|line| line.starts_with("rdma_mesh_link_up{")).collect();
        assert_eq!(up, [r#"rdma_mesh_link_up{from="0",from_host="n0",to="1",to_host="n1"} 1"#]);
    }
}
