//! Formats the results as JSON.

use serde_json::{Value, json};

use super::report::Report;

/// Formats the results as one JSON object: the verdict, the ranks, the pairs, and the ranks and directions that are much worse than the
/// others.
#[must_use]
pub fn json(report: &Report<'_>) -> Value {
    let results = report.results;
    let ranks = results.members().iter().enumerate().map(|(rank, member)| {
        json!({
            "rank": rank,
            "host": member.host(),
            "provider": member.entry.as_ref().map(|entry| &entry.provider),
            "device": member.entry.as_ref().map(|entry| &entry.device),
            "gone": member.gone,
            "connected_seconds": member.connected.map(|took| took.as_secs_f64()),
            "connects": member.attempts,
            "memory_kib": member.memory_kib,
            "hw_counters": member.moved,
        })
    });
    let pairs = results.pairs().map(|(a, b, pair)| {
        json!({
            "a": a,
            "b": b,
            "latency": pair.latency,
            "a_to_b": pair.up,
            "b_to_a": pair.down,
            "shm": pair.shm,
            "broken": pair.broken,
        })
    });
    json!({
        "good": report.is_good(),
        "interrupted": results.is_interrupted(),
        "tolerance": report.tolerance,
        "ranks": ranks.collect::<Value>(),
        "pairs": pairs.collect::<Value>(),
        "odd_ways": report.odd_ways,
        "odd_ranks": report.odd_ranks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::sample;

    #[test]
    fn the_object_has_all_that_the_table_has() {
        let results = sample::faulty();
        let json = json(&Report::new(&results, 3.0));
        assert_eq!(json["good"], false);
        assert_eq!(json["pairs"].as_array().unwrap().len(), 21);
        assert_eq!(json["ranks"][5]["gone"].as_str().unwrap(), results.members()[5].gone.as_deref().unwrap());
        let pair = json["pairs"].as_array().unwrap().iter().find(|pair| pair["a"] == 1 && pair["b"] == 2).unwrap();
        assert_eq!((&pair["latency"]["p50_us"], &pair["b_to_a"]["gbit"]), (&json!(120.0), &json!(1.0)));
        let shm = json["pairs"].as_array().unwrap().iter().filter(|pair| pair["shm"] == true);
        assert_eq!(shm.map(|pair| (&pair["a"], &pair["b"])).collect::<Vec<_>>(), [(&json!(3), &json!(6))]);
        assert_eq!(json["odd_ways"][0]["times"], 12.0);
        assert_eq!(json["ranks"][6]["hw_counters"], json!({ "completer_retry_err": 12, "sent_pkts": 99 }));
        let even = super::json(&Report::new(&sample::even(3), 3.0));
        assert_eq!((&even["good"], &even["interrupted"]), (&json!(true), &json!(false)));
    }

    #[test]
    fn an_interrupted_run_is_marked() {
        let json = json(&Report::new(&sample::interrupted(3), 3.0));
        assert_eq!((&json["good"], &json["interrupted"]), (&json!(false), &json!(true)));
    }
}
