//! Extracts the texts that the rules judge: the comments and string literals of a Rust source, and the paragraphs of a
//! Markdown text.

/// The kind of a text in a Rust source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The documentation of an item or of a file.
    Documentation,
    Comment,
    /// A string literal: a message of the log, of an error, or of a failed assertion.
    Literal,
}

/// A comment or a string literal: its kind, and each of its lines with the line number.
#[derive(Debug)]
pub(crate) struct Text {
    pub(crate) kind: Kind,
    pub(crate) lines: Vec<(usize, String)>,
}

/// Returns the comments and the string literals of a Rust source. Comments of one kind on consecutive lines are one
/// text.
pub(crate) fn source(source: &str) -> Vec<Text> {
    let (mut texts, mut rest, mut line) = (Vec::<Text>::new(), source, 1);
    // True if only white space was read so far on the current line. A comment after code on the same line is not joined
    // with the comment above.
    let mut alone = true;
    while let Some(first) = rest.chars().next() {
        let (mut end, mut found) = (first.len_utf8(), None);
        if rest.starts_with("//") {
            end = rest.find('\n').unwrap_or(rest.len());
            let documents = (rest.starts_with("///") && !rest.starts_with("////")) || rest.starts_with("//!");
            let (kind, mark) = if documents { (Kind::Documentation, 3) } else { (Kind::Comment, 2) };
            let words = rest[mark..end].strip_prefix(' ').unwrap_or(&rest[mark..end]);
            match texts.last_mut() {
                Some(text) if alone && text.kind == kind && text.lines.last().is_some_and(|(at, _)| at + 1 == line) => {
                    text.lines.push((line, words.to_owned()));
                }
                _ => found = Some((kind, words)),
            }
        } else if rest.starts_with("/*") {
            end = rest.find("*/").map_or(rest.len(), |at| at + 2);
            found = Some((Kind::Comment, &rest[2..end.max(4) - 2]));
        } else if first == '"' {
            let mut escaped = false;
            let closing = rest[1..].find(|c| {
                let closes = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                closes
            });
            end = closing.map_or(rest.len(), |at| at + 2);
            found = Some((Kind::Literal, &rest[1..end - 1]));
        } else if let Some(hashes) = raw(rest) {
            let (begin, close) = (hashes + 2, format!("\"{}", "#".repeat(hashes)));
            let closing = rest[begin..].find(&close).map_or(rest.len(), |at| begin + at);
            end = (closing + close.len()).min(rest.len());
            found = Some((Kind::Literal, &rest[begin..closing]));
        } else if first == '\'' {
            end = character(rest).unwrap_or(end);
        } else if first.is_alphanumeric() || first == '_' {
            end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        }
        if let Some((kind, words)) = found {
            let lines =
                words.lines().enumerate().map(|(at, words)| (line + at, words.trim_end_matches('\\').to_owned()));
            texts.push(Text { kind, lines: lines.collect() });
        }
        for c in rest[..end].chars() {
            alone = c == '\n' || (alone && c.is_whitespace());
            line += usize::from(c == '\n');
        }
        rest = &rest[end..];
    }
    texts
}

/// Returns the number of `#` signs if `rest` begins with a raw string literal, and otherwise `None`.
fn raw(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix('r')?;
    let hashes = inner.len() - inner.trim_start_matches('#').len();
    inner[hashes..].starts_with('"').then_some(hashes)
}

/// Returns the length of the character literal at the beginning of `rest`. `None` if `rest` begins with a lifetime.
fn character(rest: &str) -> Option<usize> {
    let inner = &rest[1..];
    if let Some(escape) = inner.strip_prefix('\\') {
        return escape.char_indices().skip(1).find(|(_, c)| *c == '\'').map(|(at, _)| at + 3);
    }
    let one = inner.chars().next()?;
    inner[one.len_utf8()..].starts_with('\'').then(|| one.len_utf8() + 2)
}

/// The kind of a paragraph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Running text, or an item of a list.
    Sentences,
    Heading,
    /// A row of a table.
    Row,
}

/// A paragraph of a Markdown text, without its code.
#[derive(Debug)]
pub(crate) struct Paragraph {
    pub(crate) shape: Shape,
    pub(crate) words: String,
    /// For each line of the paragraph: the position in `words` at which the line begins, and its line number.
    begins: Vec<(usize, usize)>,
}

impl Paragraph {
    /// Returns the number of the line that contains the byte at `place` of `words`.
    pub(crate) fn line(&self, place: usize) -> usize {
        self.begins.iter().rev().find(|(begin, _)| *begin <= place).map_or(0, |(_, line)| *line)
    }
}

/// Returns the paragraphs of a Markdown text. Inline code is replaced by `` ` ``, links are replaced by their text, and
/// code blocks are left out.
pub(crate) fn paragraphs<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<Paragraph> {
    let (mut all, mut fenced, mut continues) = (Vec::<Paragraph>::new(), false, false);
    for (line, text) in lines {
        let trimmed = text.trim();
        if trimmed.starts_with("```") {
            (fenced, continues) = (!fenced, false);
            continue;
        }
        let definition = trimmed.starts_with('[') && trimmed.contains("]: ");
        if fenced || trimmed.is_empty() || definition || trimmed.starts_with('<') {
            continues = false;
            continue;
        }
        let shape = match trimmed.as_bytes()[0] {
            b'#' => Shape::Heading,
            b'|' => Shape::Row,
            _ => Shape::Sentences,
        };
        let item = ["- ", "* "].iter().find_map(|mark| trimmed.strip_prefix(mark)).or_else(|| numbered(trimmed));
        if !continues || shape != Shape::Sentences || item.is_some() {
            all.push(Paragraph { shape, words: String::new(), begins: Vec::new() });
        }
        let paragraph = all.last_mut().expect("a paragraph was begun");
        if !paragraph.words.is_empty() {
            paragraph.words.push(' ');
        }
        paragraph.begins.push((paragraph.words.len(), line));
        paragraph.words.push_str(item.unwrap_or(trimmed));
        continues = shape == Shape::Sentences;
    }
    for paragraph in &mut all {
        simplify(paragraph);
    }
    all
}

/// Returns the text behind the number of a list item such as `12. `. `None` if the line is no such item.
fn numbered(line: &str) -> Option<&str> {
    let (number, rest) = line.split_once(". ")?;
    (!number.is_empty() && number.len() < 4 && number.bytes().all(|c| c.is_ascii_digit())).then_some(rest)
}

/// Replaces inline code by `` ` ``, and links by their text.
fn simplify(paragraph: &mut Paragraph) {
    let (mut words, mut begins, mut code, mut at) = (String::new(), Vec::new(), false, 0);
    let whole = std::mem::take(&mut paragraph.words);
    let mut next = paragraph.begins.iter().copied().peekable();
    while at < whole.len() {
        while let Some((_, line)) = next.next_if(|(begin, _)| *begin <= at) {
            begins.push((words.len(), line));
        }
        let rest = &whole[at..];
        let first = rest.chars().next().expect("at is before the end");
        let mut width = first.len_utf8();
        match first {
            '`' => {
                if !code {
                    words.push('`');
                }
                code = !code;
            }
            _ if code => {}
            ']' if rest.starts_with("](") => width = rest.find(')').map_or(1, |end| end + 1),
            ']' if rest.starts_with("][") => width = rest[1..].find(']').map_or(1, |end| end + 2),
            '[' | ']' | '*' | '!' => {}
            _ => words.push(first),
        }
        at += width;
    }
    begins.extend(next.map(|(_, line)| (words.len(), line)));
    (paragraph.words, paragraph.begins) = (words, begins);
}

/// Returns the sentences of a paragraph, each with its position in `words`.
pub(crate) fn sentences(words: &str) -> Vec<(usize, &str)> {
    const ABBREVIATIONS: [&str; 6] = ["e.g.", "i.e.", "etc.", "vs.", "No.", "St."];
    let (mut all, mut begin) = (Vec::new(), 0);
    for (at, c) in words.char_indices() {
        let (before, after) = words.split_at(at + c.len_utf8());
        let ends = matches!(c, '.' | '!' | '?') && after.starts_with(' ') && {
            let next = after.trim_start_matches([' ', '(', '"']).chars().next();
            next.is_none_or(|next| !next.is_lowercase()) && !ABBREVIATIONS.iter().any(|short| before.ends_with(short))
        };
        if ends {
            all.push((begin, &words[begin..at + 1]));
            begin = at + 1 + (after.len() - after.trim_start().len());
        }
    }
    if begin < words.len() {
        all.push((begin, &words[begin..]));
    }
    all
}

#[test]
fn comments_and_literals_are_found() {
    let found = source(
        "//! One\n//! two\n\n/// Three\nfn f<'a>(c: char) { // four\n    // five\n    let x = '\"'; g(\"six \\\" // \\\n  more\", r#\"se\"ven\"#, 'a, '\\'') }",
    );
    let found: Vec<_> = found
        .iter()
        .map(|text| (text.kind, text.lines.iter().map(|(line, words)| (*line, words.as_str())).collect::<Vec<_>>()))
        .collect();
    assert_eq!(
        found,
        [
            (Kind::Documentation, vec![(1, "One"), (2, "two")]),
            (Kind::Documentation, vec![(4, "Three")]),
            (Kind::Comment, vec![(5, "four"), (6, "five")]),
            (Kind::Literal, vec![(7, "six \\\" // "), (8, "  more")]),
            (Kind::Literal, vec![(8, "se\"ven")]),
        ]
    );
}

#[test]
fn paragraphs_and_sentences_are_found() {
    let page = "# Head\n\nOne `a.B c` is\ntwo. See [the page](x.md), e.g. [this][y]. 3 is 4.\n- Item\n  more\n1. Other\n```\ncode\n```\n| a | b |\n\n[y]: z\n";
    let found = paragraphs(page.lines().enumerate().map(|(at, line)| (at + 1, line)));
    let words: Vec<_> = found.iter().map(|paragraph| (paragraph.shape, paragraph.words.as_str())).collect();
    assert_eq!(
        words,
        [
            (Shape::Heading, "# Head"),
            (Shape::Sentences, "One ` is two. See the page, e.g. this. 3 is 4."),
            (Shape::Sentences, "Item more"),
            (Shape::Sentences, "Other"),
            (Shape::Row, "| a | b |"),
        ]
    );
    let sentences: Vec<_> =
        sentences(&found[1].words).into_iter().map(|(at, words)| (found[1].line(at), words)).collect();
    assert_eq!(sentences, [(3, "One ` is two."), (4, "See the page, e.g. this."), (4, "3 is 4.")]);
}
