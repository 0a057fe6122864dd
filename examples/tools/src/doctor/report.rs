//! All findings, as lines or as JSON.

use serde::Serialize;

use super::counters::Moved;
use super::device::Device;
use super::finding::{Finding, Level};
use super::way::Way;
use crate::pingpong::failure::Failure;
use crate::pingpong::output::Output;

/// The report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The embedded provider works.
    pub embedded: bool,
    /// This program can use RDMA devices.
    pub verbs: bool,
    /// The findings.
    pub findings: Vec<Finding>,
    /// The RDMA devices.
    pub devices: Vec<Device>,
    /// The addresses that were asked for.
    pub addresses: Vec<Way>,
    /// What has moved on each device, with `--watch`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<Moved>,
}

impl Report {
    /// Whether connections can be made.
    #[must_use]
    pub fn works(&self) -> bool {
        self.embedded || self.addresses.iter().any(|way| way.provider == "verbs")
    }

    fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// Writes the report as one JSON object.
    ///
    /// # Errors
    /// The report cannot be written as JSON.
    pub fn json(&self) -> Result<String, Failure> {
        serde_json::to_string_pretty(self).map_err(Failure::new)
    }

    /// Prints a line for each finding, and one for the whole.
    pub fn print(&self, output: &mut Output) {
        for finding in &self.findings {
            output.line(finding);
        }
        let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let (problems, notes) = (self.count(Level::Problem), self.count(Level::Note));
        output.line(format!("{}, {}", counted(problems, "problem"), counted(notes, "note")));
    }
}
