//! Makes untrusted text safe for a terminal.

/// Returns true if the character is invisible, or changes how a terminal shows other characters.
#[must_use]
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{180e}' | '\u{200e}' | '\u{200f}' | '\u{feff}')
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{fff9}'..='\u{fffb}')
        || matches!(c, '\u{e0000}'..='\u{e007f}')
}

/// Escapes hidden characters in a text. The result cannot control a terminal, and shows what the text contains.
#[must_use]
pub fn shown(text: &str) -> String {
    let escaped = |c: char| if is_hidden(c) { c.escape_unicode().to_string() } else { c.to_string() };
    text.chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_commands_no_terminal() {
        assert_eq!(shown("käse \u{200d}.tar"), "käse \u{200d}.tar");
        assert_eq!(shown("a\u{202e}b\u{1b}[2J\n"), "a\\u{202e}b\\u{1b}[2J\\u{a}");
    }
}
