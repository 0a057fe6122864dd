//! A finding of `rdma-doctor`, with the command that fixes the problem.

use std::fmt;

use serde::Serialize;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Everything is in order.
    Ok,
    /// Something optional is missing.
    Note,
    /// Something prevents the use of a device.
    Problem,
}

impl Level {
    /// Returns the name of the level.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Problem => "problem",
        }
    }
}

/// A finding. It is printed as one line.
// local: texts
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The severity.
    pub level: Level,
    /// The topic, in one word.
    pub topic: &'static str,
    /// The description of what was found.
    pub text: String,
    /// The command that fixes the problem, if there is one. It can be pasted into a shell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Finding {
    /// Makes a finding that everything is in order.
    pub fn ok(topic: &'static str, text: impl Into<String>) -> Self {
        Self::new(Level::Ok, topic, text)
    }

    /// Makes a finding that something optional is missing.
    pub fn note(topic: &'static str, text: impl Into<String>) -> Self {
        Self::new(Level::Note, topic, text)
    }

    /// Makes a finding that something prevents the use of a device.
    pub fn problem(topic: &'static str, text: impl Into<String>) -> Self {
        Self::new(Level::Problem, topic, text)
    }

    /// Makes a finding with this severity.
    pub fn new(level: Level, topic: &'static str, text: impl Into<String>) -> Self {
        Self { level, topic, text: text.into(), fix: None }
    }

    /// Adds the command that fixes the problem, for a shell. Words that are no command belong into
    /// a [`Finding::hint`].
    #[must_use]
    pub fn fix(mut self, command: impl Into<String>) -> Self {
        self.fix = Some(command.into());
        self
    }

    /// Adds words to the text that say more about the fix: where to run it, or what to do without
    /// it.
    #[must_use]
    pub fn hint(mut self, words: impl fmt::Display) -> Self {
        self.text = format!("{}; {words}", self.text);
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The text may come from a file and contain control characters, such as line breaks. Control characters become spaces, because a
        // finding is one line.
        let clean = |text: &str| text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
        write!(f, "{:<7}  {:<10}  {}", self.level.name(), self.topic, clean(&self.text))?;
        match &self.fix {
            Some(command) => write!(f, "; fix: {}", clean(command)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line() {
        let finding = Finding::problem("device", "a\nb").fix("c\rd").hint("e");
        assert_eq!(finding.to_string(), "problem  device      a b; e; fix: c d");
    }
}
