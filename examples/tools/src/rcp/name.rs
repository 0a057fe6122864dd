//! Checks file names that a peer has sent, and formats file names for a terminal.

use super::parts::PART;
use crate::pingpong::failure::Failure;
use crate::text::{self, is_hidden};

/// The length of the longest name of a copy, in bytes. The names of its directories are included.
const LONGEST: usize = 1024;
/// The length of the longest name of a single file or directory, in bytes. This is the limit of Linux.
const LONGEST_PART: usize = 255;

/// Formats a name for a terminal: escapes hidden characters. If the name begins with `-`, prepends `./`, so that no program interprets
/// it as an option.
#[must_use]
pub fn shown(name: &str) -> String {
    let name = text::shown(name);
    if name.starts_with('-') { format!("./{name}") } else { name }
}

/// Checks a name that a peer has sent. The name must be that of a file below the receiver's directory, and must not be reserved for partial
/// copies.
///
/// # Errors
/// The name is not valid. The text describes the fault.
pub fn check(name: &str) -> Result<(), Failure> {
    if name.len() > LONGEST {
        return Err(Failure::new(format!("a name of {} bytes: give at most {LONGEST}", name.len())));
    }
    if let Some(hidden) = name.chars().find(|&c| is_hidden(c)) {
        let code = hidden.escape_unicode();
        return Err(Failure::new(format!("{name:?} is not a file name: it has the hidden character {code}")));
    }
    for part in name.split('/') {
        if part.trim().is_empty() || matches!(part, "." | "..") || part.contains('\\') {
            return Err(Failure::new(format!("{name:?} is not a file name: give one below the server's directory")));
        }
        if part.ends_with(PART) {
            return Err(Failure::new(format!("{name:?} ends like a partial copy: choose another")));
        }
        if part.len() + PART.len() > LONGEST_PART {
            let most = LONGEST_PART - PART.len();
            return Err(Failure::new(format!("a name of {} bytes: give at most {most}", part.len())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_that_of_a_file_below_the_directory() {
        for name in ["a", "a b", "..a", "a.tar.gz", "ä", ".hidden", "-", "-rf", "a/b", "a/-b/...", "\u{200d}x"] {
            assert!(check(name).is_ok(), "{name:?}");
        }
        let (long, longer) = ("x".repeat(247), "x/".repeat(512) + "x");
        let bad =
            ["", ".", "..", "/", "/etc/passwd", "../a", "a/", "./a", "a/..", "a/../b", "a//b", "a\\b", " ", "\u{a0}"];
        let hidden =
            ["a\0b", "a\nb", "a\u{1b}[2J", "a\u{85}", "a\u{202e}gpj.exe", "\u{2066}a", "a\u{200f}", "\u{feff}a"];
        for name in bad.into_iter().chain(hidden).chain(["x.rcp-part", "x.rcp-part/a", &long, &longer]) {
            assert!(check(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_name_that_is_shown_is_no_option() {
        assert_eq!((shown("-rf"), shown("a-\u{7}")), ("./-rf".to_owned(), "a-\\u{7}".to_owned()));
    }
}
