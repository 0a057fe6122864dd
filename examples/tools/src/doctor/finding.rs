//! A finding, and the command that mends it.

use std::fmt;

use serde::Serialize;

/// The weight of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Something that is not there, and need not be.
    Note,
    /// Something that keeps a device from being used.
    Problem,
}

impl Level {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Problem => "problem",
        }
    }
}

/// A finding, in one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its weight.
    pub level: Level,
    /// Its topic, one word.
    pub topic: &'static str,
    /// Its text.
    pub text: String,
    /// The command that mends it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

impl Finding {
    /// As it should be.
    pub fn ok(topic: &'static str, text: impl Into<String>) -> Self {
        Self::new(Level::Ok, topic, text)
    }

    /// A finding that something is not there, and need not be.
    pub fn note(topic: &'static str, text: impl Into<String>) -> Self {
        Self::new(Level::Note, topic, text)
    }

    /// A finding that something keeps a device from being used.
    pub fn problem(topic: &'static str, text: impl Into<String>) -> Self {
        Self::new(Level::Problem, topic, text)
    }

    /// A finding of any level.
    pub fn new(level: Level, topic: &'static str, text: impl Into<String>) -> Self {
        Self { level, topic, text: text.into(), mend: None }
    }

    /// Adds the command that mends it.
    #[must_use]
    pub fn mend(mut self, command: impl Into<String>) -> Self {
        self.mend = Some(command.into());
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Texts of files may hold anything, and a finding is one line.
        let clean = |text: &str| text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
        write!(f, "{:<7}  {:<10}  {}", self.level.name(), self.topic, clean(&self.text))?;
        match &self.mend {
            Some(command) => write!(f, "; mend: {}", clean(command)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line() {
        let finding = Finding::problem("device", "a\nb").mend("c\rd");
        assert_eq!(finding.to_string(), "problem  device      a b; mend: c d");
    }
}
