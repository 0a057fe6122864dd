//! Formats the results of measurements as JSON.

use serde_json::{Value, json};

use super::figures::{Figures, us};
use super::job::Op;

/// Returns one JSON object for a single measurement, or an array for several.
#[must_use]
pub fn results(figures: &[Figures]) -> Value {
    match figures {
        [one] => object(one),
        several => several.iter().map(object).collect(),
    }
}

fn object(figures: &Figures) -> Value {
    let Figures { plan, measured, intervals, processors, provider, stats, interrupted } = figures;
    let latency = measured.latency.as_ref().map(|h| {
        json!({
            "min": us(h.min()),
            "p50": us(h.value_at_quantile(0.5)),
            "p90": us(h.value_at_quantile(0.9)),
            "p99": us(h.value_at_quantile(0.99)),
            "p999": us(h.value_at_quantile(0.999)),
            "max": us(h.max()),
            "mean": h.mean() / 1e3,
        })
    });
    let intervals = intervals.iter().map(|interval| {
        let [p50, p99] = [0, 1].map(|nth: usize| interval.latency.map(|quantiles| us(quantiles[nth])));
        json!({
            "from": interval.from,
            "to": interval.to,
            "messages": interval.messages,
            "p50_us": p50,
            "p99_us": p99,
            "gbit_per_second": interval.gbit_per_second(),
        })
    });
    let [client_us, server_us] = figures.processor_us_per_message();
    json!({
        "provider": provider,
        "size": plan.job.size,
        "iters": measured.iterations,
        "mode": plan.job.mode.to_string(),
        "op": plan.job.op.to_string(),
        "wait": plan.job.wait.to_string(),
        "bidirectional": plan.job.bidirectional,
        "crc": plan.job.crc,
        "touch": plan.job.touch,
        "direct": plan.job.direct,
        "system_congestion": plan.job.system_congestion,
        "rate": plan.rate,
        "tx_depth": plan.job.depth,
        "connections": plan.job.connections,
        "interrupted": interrupted,
        "seconds": measured.elapsed.as_secs_f64(),
        "half_rtt_us": latency.as_ref().filter(|_| plan.job.op != Op::Read && plan.rate.is_none()),
        "read_us": latency.as_ref().filter(|_| plan.job.op == Op::Read),
        "open_loop_us": latency.as_ref().filter(|_| plan.rate.is_some()),
        "messages_per_second": figures.messages_per_second(),
        "gbit_per_second": figures.gbit_per_second(),
        "intervals": intervals.collect::<Vec<_>>(),
        "processor_seconds": {
            "client": processors.client.as_secs_f64(),
            "server": processors.server.map(|time| time.as_secs_f64()),
        },
        "processor_us_per_message": { "client": client_us, "server": server_us },
        "stats": stats,
    })
}
