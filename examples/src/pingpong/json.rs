//! The results as JSON.

use rdma_reactor::Stats;
use serde_json::{Value, json};

use super::figures::{Figures, us};
use super::job::Op;

/// One object for one measurement, an array for several.
#[must_use]
pub fn results(figures: &[Figures]) -> Value {
    match figures {
        [one] => object(one),
        several => several.iter().map(object).collect(),
    }
}

fn object(figures: &Figures) -> Value {
    let Figures { plan, measured, provider, stats, interrupted } = figures;
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
    json!({
        "provider": provider,
        "size": plan.job.size,
        "iters": measured.iterations,
        "mode": plan.job.mode.to_string(),
        "op": plan.job.op.to_string(),
        "wait": plan.job.wait.to_string(),
        "bidirectional": plan.job.bidirectional,
        "crc": plan.job.crc,
        "tx_depth": plan.job.depth,
        "interrupted": interrupted,
        "seconds": measured.elapsed.as_secs_f64(),
        "half_rtt_us": latency.as_ref().filter(|_| plan.job.op != Op::Read),
        "read_us": latency.as_ref().filter(|_| plan.job.op == Op::Read),
        "messages_per_second": figures.messages_per_second(),
        "gbit_per_second": figures.gbit_per_second(),
        "stats": counters(stats),
    })
}

/// Every counter of the loop; times in seconds.
fn counters(stats: &Stats) -> Value {
    macro_rules! counters {
        ($($name:ident)*; $($time:ident)*) => {
            [$((stringify!($name), json!(stats.$name)),)* $((stringify!($time), json!(stats.$time.as_secs_f64())),)*]
        };
    }
    let all = counters! {
        turns waits empty_waits spins spin_hits spin_misses cm_edges completion_edges wakes wake_completions io_edges
        remote_commands completion_events acknowledgements arms arm_races completions deferred stale_completions connected
        disconnected handed_over taken_over connect_errors refused regions messages_sent messages_received bytes_sent
        bytes_received datagrams_sent datagrams_received doorbells credit_updates send_stalls remote_sends_dropped pings
        keepalive_timeouts connections pool_buffers pool_free
        shared_posted shared_unclaimed;
        wake_time wake_time_max stall_time
    };
    all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_counter_is_missing() {
        let stats = Stats::default();
        let fields = format!("{stats:?}").matches(": ").count();
        assert_eq!(counters(&stats).as_object().unwrap().len(), fields);
    }
}
