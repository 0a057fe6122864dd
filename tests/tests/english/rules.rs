//! The rules for plain English, and for the indentation of examples. Each rule is made to have few
//! false hits, so the rules miss much bad English.

use super::text::{self, Kind, Paragraph, Shape, Text};

/// The widest allowed line of a comment or of a document, in characters.
const WIDTH: usize = 140;
/// The largest allowed average length of the sentences of a document, in words.
const AVERAGE: usize = 20;
/// The beginning of a sentence that says what a reader can do afterwards. A page says what is on
/// it.
const PROMISE: &str = "After this page you";

/// Expressions to avoid, each with its plain replacement. Each `~` stands for one word or none.
const EXPRESSIONS: &[(&str, &str)] = &[
    ("tells of", "reports, notifies"),
    ("tell of", "report, notify"),
    ("told of", "reported, notified of"),
    ("telling of", "reporting"),
    ("hears of", "is notified of, receives"),
    ("hear of", "is notified of, receives"),
    ("heard of", "was notified of, received"),
    ("lets ~ go", "releases"),
    ("let ~ go", "release, released"),
    ("letting ~ go", "releasing"),
    ("gives ~ ~ back", "releases, returns"),
    ("give ~ ~ back", "release, return"),
    ("gave ~ ~ back", "released, returned"),
    ("given back", "released, returned"),
    ("giving ~ ~ back", "releasing, returning"),
    ("stands still", "stalls"),
    ("stand still", "stall"),
    ("stood still", "stalled"),
    ("at once", "immediately, at the same time"),
    ("one after another", "sequentially"),
    ("one after the other", "sequentially"),
    ("in any case", "always"),
    ("under way", "in flight, in progress"),
    ("has to do with", "(say what happens)"),
    ("whoever", "the caller, the program, the peer"),
];

/// Files in which the word `octets` is allowed, because they are about data on the wire.
const WIRE: [&str; 7] = [
    "docs/wire.md",
    "docs/wireshark/",
    "reactor/src/conn/frame.rs",
    "reactor/src/conn/greeting.rs",
    "transport/embedded/src/iwarp/",
    "transport/embedded/src/roce/",
    "tests/tests/wire.rs",
];

/// Words that begin a clause. The documentation of an item must not begin with one of them, and no sentence may have such a clause as its
/// subject.
const CLAUSES: [&str; 5] = ["what", "who", "whom", "whose", "whether"];

/// Prepositions. If one of them begins the documentation of an item, and no comma follows, the documentation is a fragment.
const FRAGMENTS: [&str; 7] = ["of", "from", "until", "since", "to", "than", "by"];

/// Words that cannot begin an imperative sentence. A sentence that begins with one of them must contain a verb.
const OPENINGS: [&str; 24] = [
    "the", "a", "an", "this", "that", "each", "every", "all", "no", "one", "two", "three", "of", "from", "for", "by",
    "with", "in", "on", "at", "without", "between", "until", "as",
];

/// Verbs that are recognized although they end neither with `s` nor with `ed`.
const VERBS: &str = "are were be been am have had do did done can could may might must will would shall should need cannot \
    sent got came went left kept held made took taken gave given ran set put lost found built read cut go come let became become began begun \
    saw seen grew grown knew known fell fallen met paid said told spent stood thought understood wrote written won hit cost hear make take \
    want keep follow remain stay end begin hold belong apply get give show use run fail work mean happen look exist wait differ ask tell \
    send receive post complete share move see find serve change close cross call carry contain count depend lead leave live say \
    lose await name check try lie stall know \
    isn't aren't don't doesn't can't won't";

/// Words that end like a verb but are not verbs.
const NOT_VERBS: &str = "this its always less us bytes octets thus plus as perhaps towards afterwards backwards upwards besides need-less \
    milliseconds seconds nanoseconds microseconds tests is-not";

/// Returns the faults of a Rust source: `name` is its path, `texts` are its comments and literals, and `whole` is its content.
pub(crate) fn source(name: &str, texts: &[Text], whole: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for text in texts {
        let lines = || text.lines.iter().map(|(line, words)| (*line, words.as_str()));
        if text.kind == Kind::Literal {
            let words = lines().map(|(_, words)| words.trim()).collect::<Vec<_>>().join(" ");
            let line = text.lines.first().map_or(0, |(line, _)| *line);
            expressions(name, &words, &|_| line, &mut faults);
            continue;
        }
        indentation(name, lines(), |language| ["", "no_run"].contains(&language), &mut faults);
        let paragraphs = text::paragraphs(lines());
        if let (Kind::Documentation, Some(first)) = (text.kind, paragraphs.first()) {
            opening(name, first, &mut faults);
        }
        paragraphs.iter().enumerate().for_each(|(at, paragraph)| {
            plain(name, paragraph, (at == 0).then_some(text.kind), &mut faults);
        });
    }
    let commented = |line: usize| {
        texts.iter().any(|text| text.kind != Kind::Literal && text.lines.iter().any(|(number, _)| *number == line))
    };
    for (line, width) in wide(whole) {
        if commented(line) {
            faults.push(format!("{name}:{line}: {width} characters, more than {WIDTH}"));
        }
    }
    faults
}

/// Returns the faults of a document in Markdown: `name` is its path, and `page` is its content.
pub(crate) fn page(name: &str, page: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let paragraphs = text::paragraphs(page.lines().enumerate().map(|(at, line)| (at + 1, line)));
    for paragraph in &paragraphs {
        plain(name, paragraph, None, &mut faults);
    }
    indentation(name, page.lines().enumerate().map(|(at, line)| (at + 1, line)), |_| false, &mut faults);
    if paragraphs.iter().any(|paragraph| paragraph.words.contains(PROMISE)) {
        faults.push(format!("{name}:1: `{PROMISE} ...`: begin with what is on the page"));
    }
    let running = paragraphs.iter().filter(|paragraph| paragraph.shape == Shape::Sentences);
    let lengths: Vec<usize> = running
        .flat_map(|paragraph| text::sentences(&paragraph.words))
        .map(|(_, words)| words.split_whitespace().count())
        .collect();
    if lengths.iter().sum::<usize>() > AVERAGE * lengths.len() {
        let average = lengths.iter().sum::<usize>() as f64 / lengths.len() as f64;
        faults.push(format!("{name}:1: the sentences have {average:.1} words on average, more than {AVERAGE}"));
    }
    let mut fenced = false;
    let may_wrap = |line: &str| {
        !(line.starts_with('|') || line.starts_with('[') || line.starts_with('!') || line.starts_with('<'))
    };
    let lines: Vec<&str> = page.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        fenced ^= line.trim().starts_with("```");
        if !fenced && may_wrap(line) && line.chars().count() > WIDTH {
            faults.push(format!("{name}:{}: {} characters, more than {WIDTH}", at + 1, line.chars().count()));
        }
    }
    faults
}

/// Returns the line number and the width of each line that is too wide.
fn wide(whole: &str) -> impl Iterator<Item = (usize, usize)> + '_ {
    let widths = whole.lines().enumerate().map(|(at, line)| (at + 1, line.chars().count()));
    widths.filter(|(_, width)| *width > WIDTH)
}

/// Checks the code blocks in Rust, which no formatter judges. A comment has the indentation of the
/// next line of code, unless that line closes a block. Each line is indented by at most one level
/// more than the line above. Adds the faults to `faults`. `is_rust` returns true for the languages
/// of blocks that are in Rust, besides those that begin with `rust`.
fn indentation<'a>(
    name: &str,
    lines: impl Iterator<Item = (usize, &'a str)>,
    is_rust: impl Fn(&str) -> bool,
    faults: &mut Vec<String>,
) {
    const LEVEL: usize = 4;
    let (mut fenced, mut above, mut comments) = (false, None, Vec::new());
    for (at, line) in lines {
        if let Some(language) = line.trim().strip_prefix("```") {
            fenced = !fenced && (language.starts_with("rust") || is_rust(language));
            (above, comments) = (None, Vec::new());
            continue;
        }
        let words = line.trim();
        // A line that begins with `# ` is hidden in the documentation, and is indented for itself.
        if !fenced || words.is_empty() || words == "#" || line.starts_with("# ") {
            above = above.filter(|_| words.is_empty());
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let continues = |(_, above): (usize, &str)| above.ends_with('\\');
        if above.is_some_and(|above: (usize, &str)| indent > above.0 + LEVEL && !continues(above)) {
            faults.push(format!("{name}:{at}: indented by more than {LEVEL} columns from the line above"));
        }
        above = Some((indent, words));
        if words.starts_with("//") {
            comments.push((at, indent));
            continue;
        }
        let wrong = comments.drain(..).filter(|(_, of)| *of != indent && !words.starts_with(['}', ')', ']']));
        faults.extend(wrong.map(|(at, of)| format!("{name}:{at}: a comment at column {of}, and its code at {indent}")));
    }
}

/// Returns the words of a sentence in lower case, without punctuation. Code counts as a word without letters.
fn words(sentence: &str) -> Vec<String> {
    let bare = |word: &str| word.trim_matches(|c: char| !(c.is_alphanumeric() || c == '`')).to_lowercase();
    sentence.split_whitespace().map(bare).filter(|word| !word.is_empty()).collect()
}

/// Returns true if a word may be a verb.
fn may_be_verb(word: &str) -> bool {
    let ends = (word.len() > 3 && (word.ends_with('s') && !word.ends_with("ss") || word.ends_with("ed")))
        || word == "is"
        || word == "has";
    let listed = |list: &str| list.split_whitespace().any(|listed| listed == word);
    (ends || word == "was" || listed(VERBS)) && !listed(NOT_VERBS)
}

/// Checks the first sentence of the documentation of an item, and adds the faults of this sentence to `faults`.
fn opening(name: &str, paragraph: &Paragraph, faults: &mut Vec<String>) {
    let Some((_, sentence)) = text::sentences(&paragraph.words).first().copied() else { return };
    let words = words(sentence);
    let (Some(first), line) = (words.first().map(String::as_str), paragraph.line(0)) else { return };
    if paragraph.shape == Shape::Sentences && CLAUSES.contains(&first) {
        faults.push(format!(
            "{name}:{line}: `{first}` begins the documentation: begin with a verb, or a noun with its article"
        ));
    } else if FRAGMENTS.contains(&first) && !sentence.contains(',') {
        faults.push(format!(
            "{name}:{line}: a fragment that `{first}` begins: begin with a verb, or a noun with its article"
        ));
    }
}

/// Checks the expressions and the sentences of a paragraph, and adds the faults to `faults`. If the paragraph is the first one of a
/// comment, `begins` is the kind of the comment, and the first sentence of the paragraph needs no verb.
fn plain(name: &str, paragraph: &Paragraph, begins: Option<Kind>, faults: &mut Vec<String>) {
    expressions(name, &paragraph.words, &|at| paragraph.line(at), faults);
    if paragraph.shape != Shape::Sentences {
        return;
    }
    for (number, (at, sentence)) in text::sentences(&paragraph.words).into_iter().enumerate() {
        let (words, line) = (words(sentence), paragraph.line(at));
        let word = |at: usize| words.get(at).map_or("", String::as_str);
        let asks = sentence.trim_end_matches(['"', ')', '_']).ends_with('?');
        let whole = sentence.ends_with('.') && words.len() > 2 && sentence.starts_with(char::is_uppercase);
        // The function `opening` checks the first sentence of the documentation of an item.
        let begins = begins.filter(|_| number == 0);
        if whole && !asks && CLAUSES.contains(&word(0)) && begins != Some(Kind::Documentation) {
            faults.push(format!("{name}:{line}: a clause with `{}` is the subject: name the thing", word(0)));
        }
        let inverted = ["is", "are", "was", "were", "should", "had"].contains(&word(0))
            && ["the", "a", "an", "it", "there", "this", "that", "no", "its", "they", "nobody", "one"]
                .contains(&word(1));
        if whole && !asks && inverted {
            faults.push(format!("{name}:{line}: a condition that begins with `{}`: begin it with `if`", word(0)));
        }
        let needs_verb = whole && OPENINGS.contains(&word(0)) && begins.is_none();
        if needs_verb && !words.iter().any(|word| may_be_verb(word)) {
            faults.push(format!("{name}:{line}: a sentence without a verb: {sentence}"));
        }
    }
}

/// Adds a fault for each expression in `text` that has a plain replacement. `line` returns the line number of a position in `text`.
fn expressions(name: &str, text: &str, line: &dyn Fn(usize) -> usize, faults: &mut Vec<String>) {
    let lower = text.to_ascii_lowercase();
    let is_letter = |c: char| c.is_alphanumeric() || c == '_';
    let found = |word: &str| {
        let places = lower.match_indices(word).map(|(at, _)| at);
        places
            .filter(|at| !lower[..*at].ends_with(is_letter) && !lower[at + word.len()..].starts_with(is_letter))
            .collect::<Vec<_>>()
    };
    let ends = |word: &str| word.ends_with(['.', ',', ':', ';']);
    for (expression, plain) in EXPRESSIONS {
        let (begin, close) =
            expression.split_once(" ~ ").map_or((*expression, None), |(begin, close)| (begin, Some(close)));
        let close = close.map(|close| (close.trim_start_matches("~ "), 1 + close.matches("~ ").count()));
        for at in found(begin) {
            let matches = close.is_none_or(|(close, most)| {
                let mut next = lower[at + begin.len()..].split(' ').skip(1).take(most + 1);
                next.try_for_each(|word| match word.trim_end_matches(|c: char| !is_letter(c)) == close {
                    true => Err(true),
                    false if ends(word) => Err(false),
                    false => Ok(()),
                }) == Err(true)
            });
            if matches {
                faults.push(format!(
                    "{name}:{}: `{}`: {plain}",
                    line(at),
                    expression.replace("~ ~", "...").replace('~', "...")
                ));
            }
        }
    }
    if !WIRE.iter().any(|prefix| name.starts_with(prefix)) {
        for word in ["octet", "octets"] {
            faults.extend(found(word).into_iter().map(|at| format!("{name}:{}: `{word}`: bytes", line(at))));
        }
    }
}

#[cfg(test)]
fn faults_of(source_text: &str) -> Vec<String> {
    source("x.rs", &text::source(source_text), source_text)
}

#[test]
fn bad_english_is_found() {
    for bad in [
        "/// What the peer may send.\nfn f() {}",
        "/// Whether it is open.\nfn f() {}",
        "/// Whose turn it is.\nfn f() {}",
        "//! Who may connect.",
        "/// Of a message.\nlength: u32,",
        "/// From when it is on a device until the queue pair was destroyed.\nqp: Qp,",
        "/// Returns it. What is left is done later.\nfn f() {}",
        "// What can be derived is not stored.",
        "// Whose a completion is that is no connection's by its number.",
        "// Is the gap below it, polling begins.",
        "// The queue fills. The same for a large message.",
        "// It ends. Without a window in the meantime.",
        "// The device tells of them.",
        "// The program is told\n    // of it.",
        "// The reactor hears of that.",
        "// It lets it go.",
        "// It lets go of the buffer.",
        "// Gives the buffer back.",
        "// The memory is given back.",
        "// The transfer stands still.",
        "// It ends at once.",
        "// They are closed one after another.",
        "// In any case it ends.",
        "// A read is under way.",
        "fn f() { log::warn!(\"the device tells of {x}\") }",
        "fn f() { panic!(\"it has 3 octets\") }",
    ] {
        assert_eq!(faults_of(bad).len(), 1, "{bad}: {:?}", faults_of(bad));
    }
    let wide = format!("// {}.", "word ".repeat(30));
    assert_eq!(faults_of(&wide).len(), 1, "{wide}");
}

#[test]
fn plain_english_is_not_found() {
    for good in [
        "/// The queue pair. Set once the connection is on a device.\nqp: Qp,",
        "/// Returns true if the connection is open.\nfn f() {}",
        "/// Connections with pending work requests, without duplicates.\nlist: Vec<u32>,",
        "/// The smaller of two needs.\nneed: u32,",
        "/// From the second message on, the window is open.\nfn f() {}",
        "// What does a peer see then?",
        "// Close the connections that knew a key. The peers of the host share it.",
        "// Nothing waits for what the peer sends. It says whether the queue is empty.",
        "// All of them must fit.",
        "// Each reactor polls, at the same time. It lets the peer go on.",
        "/// ```\n/// // What a peer tells of at once.\n/// ```\nfn f() {}",
        "// The word `octets` is for the wire.",
        "fn f<'a>() { let told_of = 'o'; }",
    ] {
        assert_eq!(faults_of(good), [""; 0], "{good}");
    }
    let wire = "// The first 4 octets.";
    assert_eq!(source("transport/embedded/src/iwarp/wire/mpa.rs", &text::source(wire), wire), [""; 0]);
    let code = format!("const A: &str = \"{}\";", "word ".repeat(30));
    assert_eq!(faults_of(&code), [""; 0], "the formatter judges code");
}

#[test]
fn pages_are_judged() {
    let long = format!("It is a sentence of {}\nwords.", "many ".repeat(20));
    let wide = format!("It is wide. {}", "It is so. ".repeat(14));
    for bad in [
        "The device tells of it.",
        "What is done is done.",
        "| a | at once |",
        "# At once",
        "- Without a window.",
        &long,
        &wide,
    ] {
        assert_eq!(page("x.md", bad).len(), 1, "{bad}: {:?}", page("x.md", bad));
    }
    let row = format!("| {} |", "word ".repeat(30));
    for good in ["Not `at once`.", "# What you get\n\nIt is short.", "```\nat once\n```", &row, "What then? It ends."] {
        assert_eq!(page("x.md", good), [""; 0], "{good}");
    }
    assert_eq!(page("docs/x.md", "# X\n\nIt is X.\n\nAfter this page you know X.\n").len(), 1);
    assert_eq!(page("docs/x.md", "# X\n\nIt is X.\n"), [""; 0]);
}

#[test]
fn the_indentation_of_examples_is_judged() {
    let example = |code: &str| page("x.md", &format!("```rust,no_run\n{code}```\n"));
    for bad in [
        "fn f() {\n        // One.\n    one();\n}\n",
        "fn f() {\n    // One.\n\n        // Two.\n    one();\n}\n",
        "fn f() {\n        one();\n}\n",
        "match x {\n    A => a,\n            // B.\n    B => b,\n}\n",
    ] {
        assert!(!example(bad).is_empty(), "{bad}");
        let lines: String = bad.lines().map(|line| format!("/// {line}\n")).collect();
        let documentation = format!("/// ```\n{lines}/// ```\n");
        assert!(!faults_of(&documentation).is_empty(), "{documentation}");
        assert_eq!(page("x.md", &format!("```text\n{bad}```\n")), [""; 0]);
    }
    for good in [
        "fn f() {\n    // One.\n\n    // Two.\n    one();\n    // That is all.\n}\n",
        "# fn main() {\n// One.\n#     // Two.\n#     two();\none(\"a \\\n           b\");\n# }\n        .three();\n",
        "match x {\n    // A.\n    A => a,\n    B => b,\n    // More.\n}\n",
    ] {
        assert_eq!(example(good), [""; 0], "{good}");
    }
}
