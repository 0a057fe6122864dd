//! The counters of [`Stats`] in the text format of Prometheus.

use std::fmt::{self, Write};
use std::time::Duration;

use crate::stats::{CompletionStats, ConnectionStats, MemoryStats, MessageStats, Stats, TurnStats};

/// Declares the metrics. If a field of [`Stats`] has no metric, the code does not compile.
macro_rules! families {
    ($($part:ident: $type:ident { $($field:ident: $name:literal, $help:literal;)* })*) => {
        const FAMILIES: &[Family] = &[$($(
            Family { name: $name, help: $help, value: |stats| stats.$part.$field.into() },
        )*)*];

        const _: fn(Stats) = |Stats { $($part: $type { $($field: _),* }),* }| {};
    };
}

families! {
    turns: TurnStats {
        taken: "turns_total", "Turns of the loop";
        waits: "waits_total", "Waits in the operating system";
        empty_waits: "empty_waits_total", "Waits that returned no event";
        spins: "spins_total", "Rounds of busy polling";
        spin_hits: "spin_hits_total", "Periods of busy polling that ended with a completion";
        spin_misses: "spin_misses_total", "Periods of busy polling that ended without a completion";
        cm_edges: "cm_edges_total", "Edges of connection-manager channels";
        completion_edges: "completion_edges_total", "Edges of completion channels";
        io_edges: "io_edges_total", "Edges of descriptors that the program registered";
        wakes: "wakes_total", "Wake-ups by an edge after which there were completions";
        wake_completions: "wake_completions_total", "Completions polled in the turns after those wake-ups";
        handle_commands: "thread_commands_total", "Messages and sends received from other threads";
        handle_commands_max: "thread_commands_max", "Largest number of messages and sends of other threads received in one turn";
        panics: "panics_total", "Callbacks that panicked";
    }
    completions: CompletionStats {
        polled: "completions_total", "Completions polled";
        deferred: "deferred_completions_total", "Completions deferred to a later turn, so that other connections get their share";
        stale: "stale_completions_total", "Completions of connections that did not exist any more";
        events: "completion_events_total", "Completion events";
        acknowledgements: "acknowledgements_total", "Calls that acknowledged completion events";
        arms: "arms_total", "Times a completion queue was armed";
        arm_races: "arm_races_total", "Times that polling after arming found a completion";
    }
    connections: ConnectionStats {
        current: "connections", "Current connections, in any state";
        connected: "connected_total", "Connections that were established";
        disconnected: "disconnected_total", "Established connections that have ended";
        cut_off: "cut_off_total", "Connections closed locally that ended before everything was sent";
        connect_errors: "connect_errors_total", "Outgoing connections that were not established";
        insecure: "insecure_total", "Connections whose security handshake failed";
        refused: "refused_total", "Incoming connections that were refused or not established";
        evicted: "evicted_total", "Incoming connections that were evicted for new ones before they were established";
        handed_over: "handed_over_total", "Connect requests handed over to other reactors of the group";
        taken_over: "taken_over_total", "Connect requests taken over from other reactors of the group";
        pings: "pings_total", "Keepalive pings sent";
        keepalive_timeouts: "keepalive_timeouts_total", "Connections that ended because the peer was silent";
        unflushed: "unflushed_total", "Connections whose device did not flush their work requests in time";
        undestroyed: "undestroyed_total", "Queue pairs and shared receive queues that a device failed to destroy";
    }
    messages: MessageStats {
        sent: "messages_sent_total", "Messages sent";
        received: "messages_received_total", "Messages received";
        bytes_sent: "sent_bytes_total", "Payload bytes sent";
        bytes_received: "received_bytes_total", "Payload bytes received";
        large_registrations: "large_registrations_total", "Registrations of memory for messages past one buffer";
        datagrams_sent: "datagrams_sent_total", "Datagrams sent";
        datagrams_received: "datagrams_received_total", "Datagrams received";
        doorbells: "doorbells_total", "Chains of send work requests posted";
        credit_updates: "credit_updates_total", "Grants sent as separate messages";
        send_stalls: "send_stalls_total", "Sends refused because a resource was used up";
        stall_time: "stall_seconds_total", "Time during which sends were refused, summed over all connections";
        handle_sends_dropped: "thread_sends_dropped_total", "Sends from other threads that were dropped";
    }
    memory: MemoryStats {
        regions: "regions", "Regions registered";
        direct_regions: "direct_regions", "Regions that peers on this host may map, each with an open descriptor";
        unreleased: "unreleased_registrations_total", "Registrations that a device failed to release";
        unrevoked: "unrevoked_keys_total", "Times that a device failed to invalidate a remote key";
        pool_buffers: "pool_buffers", "Pooled buffers";
        pool_free: "pool_free_buffers", "Pooled buffers that are free";
        shared_posted: "shared_receives_posted", "Receives posted to shared queues";
        shared_unclaimed: "shared_receives_unclaimed", "Receives of shared queues that no connection claims";
        held_receives: "held_receives", "Receives whose messages the program keeps";
        fetched_bytes: "fetched_bytes", "Bytes of messages past one buffer that are being fetched, or were fetched and are kept by the program";
        kept_bytes: "kept_bytes", "Bytes that stay registered for later messages past one buffer";
        copied_bytes: "copied_bytes", "Bytes of messages past one buffer that peers have yet to fetch";
    }
}

impl Stats {
    /// Writes the counters of one or several reactors in the text format of Prometheus, version 0.0.4. Each field is a
    /// metric with the prefix `rdma_reactor_`. The type of a metric is `counter` if its name ends with `_total`, and
    /// `gauge` otherwise. Times are in seconds. `reactors` contains the labels and the counters of each reactor. A
    /// label is a pair of a name and a value. All samples of a reactor have the labels of that reactor. If there are
    /// several reactors, give each reactor different labels. The program may append its own metrics to the text.
    ///
    /// ```
    /// use rdma_reactor::{Config, ProviderChoice, Reactor, Stats};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let reactors = [0, 1].map(|_| Reactor::new(Config::default().provider(ProviderChoice::Iwarp)));
    /// let [first, second] = reactors.map(|reactor| reactor.map(|reactor| reactor.stats()));
    /// let mut text = String::new();
    /// Stats::prometheus(&mut text, &[(&[("reactor", "0")], first?), (&[("reactor", "1")], second?)])?;
    /// assert!(text.contains("# TYPE rdma_reactor_connections gauge\nrdma_reactor_connections{reactor=\"0\"} 0\n"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The name of a label is invalid, or `out` returns an error. A valid name has only letters, digits and `_`, and
    /// does not begin with a digit.
    pub fn prometheus(out: &mut impl Write, reactors: &[(&[(&str, &str)], Self)]) -> fmt::Result {
        for Family { name, help, value } in FAMILIES {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            writeln!(out, "# HELP rdma_reactor_{name} {help}\n# TYPE rdma_reactor_{name} {kind}")?;
            for (labels, stats) in reactors {
                write!(out, "rdma_reactor_{name}")?;
                write_labels(out, labels)?;
                writeln!(out, " {}", value(stats))?;
            }
        }
        Ok(())
    }
}

/// The value of a metric.
#[derive(Clone, Copy)]
enum Value {
    Number(u64),
    Seconds(Duration),
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::Number(number as u64)
    }
}

impl From<Duration> for Value {
    fn from(time: Duration) -> Self {
        Self::Seconds(time)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Seconds(time) => write!(f, "{}.{:09}", time.as_secs(), time.subsec_nanos()),
        }
    }
}

/// A metric: its name without the prefix, its help text, and its value.
struct Family {
    name: &'static str,
    help: &'static str,
    value: fn(&Stats) -> Value,
}

fn write_labels(out: &mut impl Write, labels: &[(&str, &str)]) -> fmt::Result {
    for (nth, (name, value)) in labels.iter().enumerate() {
        let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if !is_name || name.is_empty() || name.starts_with(|first: char| first.is_ascii_digit()) {
            return Err(fmt::Error);
        }
        write!(out, "{}{name}=\"", if nth == 0 { '{' } else { ',' })?;
        for char in value.chars() {
            match char {
                '\\' => out.write_str("\\\\")?,
                '"' => out.write_str("\\\"")?,
                '\n' => out.write_str("\\n")?,
                other => out.write_char(other)?,
            }
        }
        out.write_char('"')?;
    }
    if labels.is_empty() { Ok(()) } else { out.write_char('}') }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    type Labels = Vec<(String, String)>;

    /// The samples of a metric. Each sample has labels and a value.
    type Samples = Vec<(Labels, f64)>;

    fn is_name(text: &str) -> bool {
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        text.chars().all(word) && text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
    }

    /// Parses the labels of a sample. Returns the labels, and the part of the line after the labels.
    fn labels(mut text: &str) -> Result<(Labels, &str), String> {
        let Some(inner) = text.strip_prefix('{') else { return Ok((Labels::new(), text)) };
        let mut labels = Labels::new();
        text = inner;
        loop {
            let (name, rest) = text.split_once("=\"").ok_or("a label without a value")?;
            let (mut value, mut chars) = (String::new(), rest.chars());
            loop {
                match chars.next().ok_or("a value without an end")? {
                    '"' => break,
                    '\\' => value.push(match chars.next() {
                        Some('n') => '\n',
                        Some(c @ ('\\' | '"')) => c,
                        other => return Err(format!("{other:?} is escaped")),
                    }),
                    '\n' => return Err("the end of a line in a value".into()),
                    c => value.push(c),
                }
            }
            if !is_name(name) || labels.iter().any(|(known, _)| known == name) {
                return Err(format!("the label {name:?}"));
            }
            labels.push((name.into(), value));
            match chars.as_str().split_at_checked(1) {
                Some((",", rest)) => text = rest,
                Some(("}", rest)) => return Ok((labels, rest)),
                _ => return Err("labels without an end".into()),
            }
        }
    }

    /// Parses the text format strictly. Each metric must have one HELP line, one TYPE line and then its samples, in
    /// this order. The last line must end with a newline. Returns a map from the name of each metric to its help text,
    /// type and samples.
    fn parse(text: &str) -> Result<BTreeMap<String, (String, String, Samples)>, String> {
        let mut families = BTreeMap::new();
        let mut lines = text.strip_suffix('\n').ok_or("the last line has no end")?.split('\n').peekable();
        while let Some(line) = lines.next() {
            let help = line.strip_prefix("# HELP ").ok_or_else(|| format!("no HELP: {line}"))?;
            let (name, help) = help.split_once(' ').ok_or("no help")?;
            let kind =
                lines.next().and_then(|line| line.strip_prefix("# TYPE ")?.strip_prefix(name)?.strip_prefix(' '));
            let kind =
                kind.filter(|kind| ["counter", "gauge"].contains(kind)).ok_or_else(|| format!("TYPE of {name}"))?;
            let mut samples = Samples::new();
            while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
                let (labels, value) = labels(line.strip_prefix(name).ok_or_else(|| format!("not {name}: {line}"))?)?;
                let value = value.strip_prefix(' ').filter(|value| !value.contains(' ')).ok_or("no value")?;
                samples.push((labels, value.parse().map_err(|error| format!("{value}: {error}"))?));
            }
            let different: BTreeSet<_> = samples.iter().map(|(labels, _)| labels).collect();
            if !is_name(name) || different.len() < samples.len() {
                return Err(format!("{name}: its name, or two samples with the same labels"));
            }
            let family = (help.to_owned(), kind.to_owned(), samples);
            if families.insert(name.to_owned(), family).is_some() {
                return Err(format!("{name} twice"));
            }
        }
        Ok(families)
    }

    fn text(reactors: &[(&[(&str, &str)], Stats)]) -> String {
        let mut text = String::new();
        Stats::prometheus(&mut text, reactors).expect("names of labels");
        text
    }

    #[test]
    fn a_strict_parser_finds_every_field_once() {
        let families = parse(&text(&[(&[], Stats::default())])).expect("the text format");
        assert_eq!(families.len(), FAMILIES.len(), "no name occurs twice");
        for (name, (help, kind, samples)) in &families {
            let name = name.strip_prefix("rdma_reactor_").expect("the prefix");
            assert!(!help.is_empty() && !help.ends_with('.'), "{name}: {help}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            assert_eq!(samples[..], [(vec![], 0.0)], "{name}");
        }
    }

    #[test]
    fn values_are_exact_and_times_are_in_seconds() {
        let mut stats = Stats::default();
        stats.messages.sent = u64::MAX;
        stats.messages.stall_time = Duration::new(3, 1_000);
        let text = text(&[(&[], stats)]);
        assert!(text.contains("\nrdma_reactor_messages_sent_total 18446744073709551615\n"), "{text}");
        assert!(text.contains("\nrdma_reactor_stall_seconds_total 3.000001000\n"), "{text}");
    }

    #[test]
    fn several_reactors_are_in_one_family_and_labels_are_escaped() {
        let mut second = Stats::default();
        second.turns.taken = 7;
        let hostile = "a\\b\"c\nd} 1\n# TYPE käse";
        let text = text(&[(&[("reactor", "0"), ("host", hostile)], Stats::default()), (&[("reactor", "1")], second)]);
        let families = parse(&text).expect("the text format");
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let first = vec![pair("reactor", "0"), pair("host", hostile)];
        let (_, _, samples) = &families["rdma_reactor_turns_total"];
        assert_eq!(samples[..], [(first, 0.0), (vec![pair("reactor", "1")], 7.0)]);
    }

    #[test]
    fn a_label_without_a_proper_name_is_an_error() {
        for name in ["", "0a", "a b", "a\"", "ä", "a=\"x\",b"] {
            let labels: &[_] = &[(name, "x")];
            assert!(Stats::prometheus(&mut String::new(), &[(labels, Stats::default())]).is_err(), "{name:?}");
        }
    }

    #[test]
    fn the_parser_is_strict() {
        let good = "# HELP a b\n# TYPE a gauge\na 1\n";
        assert!(parse(good).is_ok());
        for wrong in [
            "",
            "a 1\n",
            "# TYPE a gauge\na 1\n",
            "# HELP a b\na 1\n",
            "# HELP a b\n# TYPE a gauge\na 1",
            "# HELP a b\n# TYPE a gauge\na x\n",
            "# HELP a b\n# TYPE a gauge\na 1\na 2\n",
            "# HELP a b\n# TYPE a gauge\nb 1\n",
            "# HELP a b\n# TYPE a gauge\na{b=\"c\" 1\n",
            "# HELP a b\n# TYPE a gauge\na{b=\"\\t\"} 1\n",
            &good.repeat(2),
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
