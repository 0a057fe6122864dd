//! Counters of a reactor, for Prometheus and for people.

use std::fmt::Write;

use rdma_reactor::Stats;

/// One counter: its name, its meaning, whether it only grows, and its value.
type Row = (&'static str, &'static str, bool, f64);

fn rows(s: &Stats) -> Vec<Row> {
    let per_wake = if s.turns.wakes == 0 { 0.0 } else { s.turns.wake_completions as f64 / s.turns.wakes as f64 };
    vec![
        ("turns_total", "Turns of the loop", true, s.turns.taken as f64),
        ("waits_total", "Waits in the operating system", true, s.turns.waits as f64),
        ("empty_waits_total", "Waits that found nothing", true, s.turns.empty_waits as f64),
        ("spin_hits_total", "Busy polls that ended with work", true, s.turns.spin_hits as f64),
        ("spin_misses_total", "Busy polls that ended without", true, s.turns.spin_misses as f64),
        ("cm_edges_total", "Edges of connection-manager channels", true, s.turns.cm_edges as f64),
        ("completion_edges_total", "Edges of completion channels", true, s.turns.completion_edges as f64),
        ("completion_events_total", "Completion events", true, s.completions.events as f64),
        (
            "acknowledgements_total",
            "Calls that acknowledged completion events",
            true,
            s.completions.acknowledgements as f64,
        ),
        ("io_edges_total", "Edges of the program's own descriptors", true, s.turns.io_edges as f64),
        ("arm_races_total", "Completions that came while arming", true, s.completions.arm_races as f64),
        ("completions_total", "Completions", true, s.completions.polled as f64),
        ("deferred_total", "Completions that waited for another turn", true, s.completions.deferred as f64),
        ("completions_per_wake", "Completions found by a wake-up, mean", false, per_wake),
        ("wake_seconds_total", "Time from edge to first callback", true, s.turns.wake_time.as_secs_f64()),
        ("wake_seconds_max", "Longest time from edge to first callback", false, s.turns.wake_time_max.as_secs_f64()),
        ("connections", "Connections", false, s.connections.current as f64),
        ("connected_total", "Connections that came up", true, s.connections.connected as f64),
        ("disconnected_total", "Connections that came up and went", true, s.connections.disconnected as f64),
        ("handed_over_total", "Connect requests handed to other reactors", true, s.connections.handed_over as f64),
        ("taken_over_total", "Connect requests taken from other reactors", true, s.connections.taken_over as f64),
        ("messages_sent_total", "Messages sent", true, s.messages.sent as f64),
        ("messages_received_total", "Messages received", true, s.messages.received as f64),
        ("sent_bytes_total", "Payload sent", true, s.messages.bytes_sent as f64),
        ("received_bytes_total", "Payload received", true, s.messages.bytes_received as f64),
        ("send_stalls_total", "Sends refused for want of room", true, s.messages.send_stalls as f64),
        ("stall_seconds_total", "Time with refused sends", true, s.messages.stall_time.as_secs_f64()),
        ("pool_buffers", "Pooled buffers", false, s.memory.pool_buffers as f64),
        ("pool_free_buffers", "Pooled buffers that nobody holds", false, s.memory.pool_free as f64),
        ("shared_receives_posted", "Receives posted to shared queues", false, s.memory.shared_posted as f64),
        (
            "shared_receives_unclaimed",
            "Receives of shared queues that no connection claims",
            false,
            s.memory.shared_unclaimed as f64,
        ),
    ]
}

/// Writes the counters in the text format of Prometheus, version 0.0.4.
#[must_use]
pub fn prometheus(stats: &Stats) -> String {
    rows(stats).into_iter().fold(String::new(), |mut text, (name, meaning, grows, value)| {
        let kind = if grows { "counter" } else { "gauge" };
        let name = format!("rdma_reactor_{name}");
        // Writing to a string does not fail.
        let _ = writeln!(text, "# HELP {name} {meaning}.\n# TYPE {name} {kind}\n{name} {value}");
        text
    })
}

/// Writes the counters as a page that reloads itself each second.
#[must_use]
pub fn page(stats: &Stats) -> String {
    let rows = rows(stats).into_iter().fold(String::new(), |text, (_, meaning, _, value)| {
        let value = if value.fract() == 0.0 { format!("{value}") } else { format!("{value:.6}") };
        text + &format!("<tr><td>{meaning}<td style=\"text-align:right\">{value}\n")
    });
    format!(
        "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=1><title>rdma-reactor</title>\n\
         <body style=\"font:16px sans-serif;margin:2em\"><h1>rdma-reactor</h1>\n\
         <table cellpadding=4>\n{rows}</table><p><a href=/metrics>for Prometheus</a>\n"
    )
}

/// Answers an HTTP request by its head.
#[must_use]
pub fn respond(request: &[u8], stats: &Stats) -> Vec<u8> {
    let first = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let (status, kind, body) = match first.split(|&byte| byte == b' ').collect::<Vec<_>>()[..] {
        [b"GET", b"/metrics", _] => ("200 OK", "text/plain; version=0.0.4", prometheus(stats)),
        [b"GET", b"/", _] => ("200 OK", "text/html", page(stats)),
        [b"GET", _, _] => ("404 Not Found", "text/plain", "/ or /metrics\n".into()),
        _ => ("400 Bad Request", "text/plain", "GET only\n".into()),
    };
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close");
    format!("{head}\r\n\r\n{body}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_has_a_meaning_a_type_and_a_number() {
        let text = prometheus(&Stats::default());
        for lines in text.lines().collect::<Vec<_>>().chunks(3) {
            let name = lines[2].split(' ').next().unwrap();
            assert!(lines[0].starts_with(&format!("# HELP {name} ")), "{lines:?}");
            assert!(lines[1].starts_with(&format!("# TYPE {name} ")), "{lines:?}");
            assert!(lines[2].rsplit(' ').next().unwrap().parse::<f64>().is_ok(), "{lines:?}");
            assert_eq!(name.ends_with("_total"), lines[1].ends_with("counter"), "{lines:?}");
        }
    }

    #[test]
    fn requests_are_told_apart() {
        let status = |request: &[u8]| {
            let response = respond(request, &Stats::default());
            String::from_utf8_lossy(&response).lines().next().map(str::to_owned)
        };
        assert_eq!(status(b"GET / HTTP/1.1\r\n\r\n").as_deref(), Some("HTTP/1.1 200 OK"));
        assert_eq!(status(b"GET /x HTTP/1.1\r\n\r\n").as_deref(), Some("HTTP/1.1 404 Not Found"));
        assert_eq!(status(b"\r\n\r\n").as_deref(), Some("HTTP/1.1 400 Bad Request"));
    }
}
