//! The hardware counters of an RDMA device (`hw_counters` in sysfs). They count errors and the operations that the transport had to
//! repeat.

use std::collections::BTreeMap;

use crate::doctor::tree::SystemTree;

/// The largest number of counters that the program reads for each device. Adapters have about sixty.
const MOST: usize = 256;

/// The kinds of trouble that counters report. Each has a description and the names of its counters. Different drivers use different names
/// for the same counter.
const MEANINGS: [(&str, &[&str]); 6] = [
    (
        "sent again, since no acknowledgement came in time",
        &[
            "completer_retry_err",
            "local_ack_timeout_err",
            "retry_exceeded_err",
            "to_retransmits",
            "max_retry_exceeded",
            "missing_resp",
            "RetransSegs",
            "tcpRetransSegs",
            "retrans_pkts",
            "retrans_timeout_events",
            "rx_timeout",
        ],
    ),
    (
        "the receiver had no receive posted (RNR)",
        &[
            "rcvd_rnr_err",
            "send_rnr_err",
            "retry_rnr_exceeded_err",
            "rnr_nak_retry_err",
            "rnr_naks_rcvd",
            "out_of_buffer",
        ],
    ),
    (
        "packets were lost or out of sequence",
        &[
            "out_of_seq_request",
            "rcvd_seq_err",
            "out_of_sequence",
            "packet_seq_err",
            "implied_nak_seq_err",
            "seq_err_naks_rcvd",
            "oos_drop_count",
            "res_oos_drop_count",
            "rx_out_of_order",
        ],
    ),
    ("the peer sent requests again", &["duplicate_request", "dup_req"]),
    (
        "adaptive retransmission was at work",
        &[
            "roce_adp_retrans",
            "roce_adp_retrans_to",
            "roce_slow_restart",
            "roce_slow_restart_cnps",
            "roce_slow_restart_trans",
        ],
    ),
    (
        "a switch or a host reported congestion",
        &[
            "np_cnp_sent",
            "np_ecn_marked_roce_packets",
            "rp_cnp_handled",
            "cnpHandled",
            "cnpSent",
            "rx_ecn_marked_pkts",
            "rx_cnp_pkts",
            "tx_cnp_pkts",
        ],
    ),
];

/// Describes the trouble that an increase of this counter shows. Returns `None` if the counter shows no trouble or is unknown.
#[must_use]
pub fn meaning(name: &str) -> Option<&'static str> {
    MEANINGS.iter().find(|(_, names)| names.contains(&name)).map(|(meaning, _)| *meaning)
}

/// The counters of a device at one point in time. The counters of its ports are added up.
// local: counters of a device of this host
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HwCounters(BTreeMap<String, u64>);

impl HwCounters {
    /// Reads the counters of a device. Returns no counters if the driver has none or the device does not exist.
    #[must_use]
    pub fn read(tree: &SystemTree, device: &str) -> Self {
        let device = format!("/sys/class/infiniband/{device}");
        let ports = tree.names(&format!("{device}/ports")).into_iter().map(|port| format!("{device}/ports/{port}"));
        let mut all = BTreeMap::new();
        for place in std::iter::once(device.clone()).chain(ports) {
            let counters = format!("{place}/hw_counters");
            for name in tree.names(&counters).into_iter().take(MOST) {
                // The file `lifespan` is not a counter: it has the time for which the driver caches the values.
                let value = tree.text(&format!("{counters}/{name}")).ok().filter(|_| name != "lifespan");
                if let Some(value) = value.and_then(|text| text.parse::<u64>().ok()) {
                    let sum: &mut u64 = all.entry(name).or_default();
                    *sum = sum.wrapping_add(value);
                }
            }
        }
        Self(all)
    }

    /// Returns true if there are no counters.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the counters that have changed since `before`, with the amount of each change. If the value of a counter has decreased, the
    /// counter was reset, so the amount of the change is the current value.
    #[must_use]
    pub fn moved_since(&self, before: &Self) -> BTreeMap<String, u64> {
        let moved = self.0.iter().map(|(name, now)| {
            let before = before.0.get(name).copied().unwrap_or_default();
            (name.clone(), now.checked_sub(before).unwrap_or(*now))
        });
        moved.filter(|(_, by)| *by > 0).collect()
    }
}

/// Describes the troubles that the changes show. Each trouble has one text with all of its counters. Returns an empty list if no counter
/// shows trouble.
#[must_use]
pub fn troubles(moved: &BTreeMap<String, u64>) -> Vec<String> {
    let of_meaning = |(meaning, names): &(&str, &[&str])| {
        let counters: Vec<String> = moved
            .iter()
            .filter(|(name, _)| names.contains(&name.as_str()))
            .map(|(name, by)| format!("{name} +{by}"))
            .collect();
        (!counters.is_empty()).then(|| format!("{meaning} ({})", counters.join(", ")))
    };
    MEANINGS.iter().filter_map(of_meaning).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(values: &[(&str, u64)]) -> HwCounters {
        HwCounters(values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect())
    }

    #[test]
    fn what_moved_is_named_with_its_meaning() {
        let before =
            counters(&[("sent_pkts", 7), ("completer_retry_err", 1), ("rcvd_seq_err", 5), ("send_rnr_err", 2)]);
        let after = counters(&[
            ("sent_pkts", 9),
            ("completer_retry_err", 4),
            ("rcvd_seq_err", 5),
            ("send_rnr_err", 1),
            ("new", 6),
        ]);
        let moved = after.moved_since(&before);
        let expected = [("completer_retry_err", 3), ("new", 6), ("send_rnr_err", 1), ("sent_pkts", 2)];
        assert!(moved.iter().map(|(name, by)| (name.as_str(), *by)).eq(expected), "{moved:?}");
        assert_eq!(
            troubles(&moved),
            [
                "sent again, since no acknowledgement came in time (completer_retry_err +3)",
                "the receiver had no receive posted (RNR) (send_rnr_err +1)"
            ]
        );
        assert!(troubles(&after.moved_since(&after)).is_empty());
        assert_eq!(meaning("sent_pkts"), None);
    }
}
