//! All findings, as lines or as JSON.

use serde::Serialize;

use super::counters::CounterChanges;
use super::device::Device;
use super::finding::{Finding, Level};
use super::route::Route;
use crate::pingpong::failure::Failure;
use crate::pingpong::output::Output;

/// The result of `rdma-doctor`.
// local: findings about this host
#[derive(Clone, Debug, Serialize)]
pub struct DoctorReport {
    /// True if the embedded provider passed its test.
    pub embedded: bool,
    /// True if this program was built with support for RDMA devices.
    pub verbs: bool,
    /// The findings.
    pub findings: Vec<Finding>,
    /// The RDMA devices.
    pub devices: Vec<Device>,
    /// The addresses that the user gave, with the routes to them.
    pub addresses: Vec<Route>,
    /// The changed hardware counters of each device, if `--watch` is given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<CounterChanges>,
}

impl DoctorReport {
    /// Returns true if at least one provider can make connections.
    #[must_use]
    pub fn works(&self) -> bool {
        self.embedded || self.addresses.iter().any(|way| way.provider == "verbs")
    }

    fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// Formats the report as one JSON object.
    ///
    /// # Errors
    /// The report cannot be written as JSON.
    pub fn json(&self) -> Result<String, Failure> {
        serde_json::to_string_pretty(self).map_err(Failure::new)
    }

    /// Prints a line for each finding, and a summary.
    pub fn print(&self, output: &mut Output) {
        for finding in &self.findings {
            output.line(finding);
        }
        let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let (problems, notes) = (self.count(Level::Problem), self.count(Level::Note));
        output.line(format!("{}, {}", counted(problems, "problem"), counted(notes, "note")));
    }
}
