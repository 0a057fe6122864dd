//! Observes the devices' hardware counters for a while, and reports which ones changed.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::device::Device;
use super::finding::Finding;
use super::tree::SystemTree;
use crate::hw_counters::{HwCounters, meaning, troubles};

/// The hardware counters of one device that have changed.
// local: counters of a device of this host
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CounterChanges {
    /// The name of the device.
    pub device: String,
    /// The changed counters, each with the amount of its change. `None` if the device has no counters.
    pub by: Option<BTreeMap<String, u64>>,
}

impl CounterChanges {
    /// Reads the counters of all devices, waits for `time`, and reads them again. Returns the changes of each device.
    #[must_use]
    pub fn watch(tree: &SystemTree, devices: &[Device], time: Duration) -> Vec<Self> {
        let read = || devices.iter().map(|device| HwCounters::read(tree, &device.name)).collect::<Vec<_>>();
        let before = read();
        std::thread::sleep(time);
        let both = devices.iter().zip(before.iter().zip(read()));
        let moved = both.map(|(device, (before, after))| {
            let by = (!after.is_empty()).then(|| after.moved_since(before));
            Self { device: device.name.clone(), by }
        });
        moved.collect()
    }

    /// Returns the findings: one for each kind of trouble that the changes show, and one for all other counters.
    pub(super) fn findings(&self, time: Duration) -> Vec<Finding> {
        let (device, time) = (&self.device, time.as_secs_f64());
        let Some(by) = &self.by else {
            return vec![Finding::note("counters", format!("{device} has no hw_counters"))];
        };
        let troubles =
            troubles(by).into_iter().map(|what| Finding::note("counters", format!("{device} in {time} s: {what}")));
        let rest: Vec<String> =
            by.iter().filter(|(name, _)| meaning(name).is_none()).map(|(name, by)| format!("{name} +{by}")).collect();
        let rest = if rest.is_empty() { "nothing moved".into() } else { rest.join(", ") };
        troubles.chain([Finding::ok("counters", format!("{device} in {time} s: {rest}"))]).collect()
    }
}
