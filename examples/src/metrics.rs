//! Formats the counters of a reactor, for Prometheus and for people.

use rdma_reactor::Stats;

/// Formats the counters in the text format of Prometheus, version 0.0.4.
#[must_use]
pub fn prometheus(stats: &Stats) -> String {
    let mut text = String::new();
    Stats::prometheus(&mut text, &[(&[], *stats)]).expect("a string takes everything");
    text
}

/// Formats the counters as an HTML page that the browser reloads each second.
#[must_use]
pub fn page(stats: &Stats) -> String {
    let text = prometheus(stats);
    let lines: Vec<_> = text.lines().collect();
    let row = |family: &[&str]| {
        let (meaning, value) = (family[0].splitn(4, ' ').nth(3), family[2].split(' ').nth(1));
        let (meaning, value) = (meaning.unwrap_or_default(), value.unwrap_or_default());
        format!("<tr><td>{meaning}<td style=\"text-align:right\">{value}\n")
    };
    // Prometheus's format has three lines for each metric: its meaning, its type, and its value.
    let rows: String = lines.chunks_exact(3).map(row).collect();
    format!(
        "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=1><title>rdma-reactor</title>\n\
         <body style=\"font:16px sans-serif;margin:2em\"><h1>rdma-reactor</h1>\n\
         <table cellpadding=4>\n{rows}</table><p><a href=/metrics>for Prometheus</a>\n"
    )
}

/// Returns the HTTP response to a request. `request` is the head of the request.
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
