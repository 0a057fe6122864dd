//! Checks that the links in the project's documents point to existing files and headings.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use pulldown_cmark::{BrokenLink, Event, LinkType, Options, Parser, Tag, TagEnd};

/// Folders that contain no documents of the project.
const SKIPPED: [&str; 2] = ["target", ".git"];

/// A document: its links, and the anchors of its headings.
#[derive(Default)]
struct Document {
    links: Vec<String>,
    anchors: BTreeSet<String>,
}

impl Document {
    fn read(text: &str) -> Self {
        let (mut document, mut heading, mut uses) = (Self::default(), None::<String>, BTreeMap::new());
        for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    document.links.push(dest_url.into_string());
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let anchor = anchor(&heading.take().unwrap_or_default());
                    let used: &mut usize = uses.entry(anchor.clone()).or_default();
                    document.anchors.insert(if *used == 0 { anchor } else { format!("{anchor}-{used}") });
                    *used += 1;
                }
                Event::Text(part) | Event::Code(part) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&part);
                    }
                }
                _ => {}
            }
        }
        document
    }
}

/// Returns the anchor that GitHub builds for a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Adds all documents below a folder to `found`.
fn documents(folder: &Path, found: &mut BTreeMap<PathBuf, Document>) {
    for entry in fs::read_dir(folder).expect("a folder of the project") {
        let entry = entry.expect("an entry");
        // The README of each package is a symbolic link to that of the project.
        if entry.file_type().expect("its type").is_symlink() {
            continue;
        }
        let path = entry.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && !SKIPPED.contains(&name) {
            documents(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            let text = fs::read_to_string(&path).expect("a document");
            found.insert(path, Document::read(&text));
        }
    }
}

/// Returns the path with its components `.` and `..` resolved.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = plain.pop(),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

/// Returns the fault of a link in the document `of`. `None` if the link has no fault, or is an https address.
fn fault(of: &Path, link: &str, documents: &BTreeMap<PathBuf, Document>) -> Option<String> {
    if link.starts_with("https://") {
        return None;
    }
    if link.contains(':') {
        return Some("neither a file of the project nor an https address".into());
    }
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let target = if file.is_empty() { of.to_path_buf() } else { plain(&of.parent()?.join(file)) };
    let Some(anchor) = anchor else { return (!target.exists()).then(|| "no such file".into()) };
    match documents.get(&target) {
        Some(document) if document.anchors.contains(anchor) => None,
        Some(document) => Some(format!("no such heading; there are {:?}", document.anchors)),
        None => Some("no such document".into()),
    }
}

#[test]
fn every_link_leads_somewhere() {
    let root = plain(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    let mut all = BTreeMap::new();
    documents(&root, &mut all);
    let (mut links, mut faults) = (0, Vec::new());
    for (path, document) in &all {
        for link in &document.links {
            links += 1;
            faults.extend(fault(path, link, &all).map(|fault| format!("{}: {link}: {fault}", path.display())));
        }
    }
    assert!(all.len() > 20 && links > 50, "{} documents with {links} links: the search found too little", all.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let (here, there) = (PathBuf::from("/p/docs/a.md"), PathBuf::from("/p/b.md"));
    let there_has = Document::read("# One `thing`, two\n\n## Twice\n\n## Twice\n\n[x](docs/a.md)");
    assert_eq!(there_has.links, ["docs/a.md"]);
    let all = BTreeMap::from([(here.clone(), Document::default()), (there, there_has)]);
    for good in ["https://example.org/", "../b.md#one-thing-two", "../b.md#twice", "../b.md#twice-1"] {
        assert_eq!(fault(&here, good, &all), None, "{good}");
    }
    for bad in ["../b.md#three", "../b.md#twice-2", "c.md#one", "c.md", "#one", "http://example.org", "file:///etc"] {
        assert!(fault(&here, bad, &all).is_some(), "{bad}");
    }
}

/// Returns the faults of the links of a page that is also part of rustdoc's documentation, where relative links to files do not work.
/// `overrides` are the labels of links that rustdoc defines before the page.
fn faults_in_rustdoc(page: &str, overrides: &BTreeSet<String>) -> Vec<String> {
    let (mut faults, mut used) = (Vec::new(), BTreeSet::new());
    let mut undefined = Vec::new();
    let mut note = |link: BrokenLink<'_>| {
        // Brackets without a label behind them are ordinary text.
        if link.link_type == LinkType::Reference {
            undefined.push(format!("[{}] is not defined", link.reference));
        }
        None
    };
    for event in Parser::new_with_broken_link_callback(page, Options::ENABLE_TABLES, Some(&mut note)) {
        let Event::Start(Tag::Link { link_type, dest_url, id, .. } | Tag::Image { link_type, dest_url, id, .. }) =
            event
        else {
            continue;
        };
        if dest_url.starts_with("https://") || dest_url.starts_with('#') {
            continue;
        }
        match link_type {
            LinkType::Reference | LinkType::Collapsed | LinkType::Shortcut if overrides.contains(&*id) => {
                used.insert(id.into_string());
            }
            LinkType::Reference | LinkType::Collapsed | LinkType::Shortcut => {
                faults.push(format!("[{id}] has no definition before the page"));
            }
            _ => faults.push(format!("({dest_url}) is a link that cannot be defined otherwise: give it a label")),
        }
    }
    faults.append(&mut undefined);
    faults.extend(overrides.difference(&used).map(|label| format!("[{label}] is not on the page")));
    faults
}

/// Returns the pages that a source file includes, each with the labels of links that are defined before it.
fn included(source: &str) -> Vec<(String, BTreeSet<String>)> {
    let (mut pages, mut labels) = (Vec::new(), BTreeSet::new());
    for line in source.lines() {
        if let Some(definition) = line.strip_prefix("#[doc = \"[") {
            labels.extend(definition.split_once("]: ").map(|(label, _)| label.to_owned()));
        } else if let Some(page) = line
            .strip_prefix("#[doc = include_str!(\"../docs/")
            .and_then(|rest| rest.split('"').next())
            .filter(|page| page.ends_with(".md"))
        {
            pages.push((page.to_owned(), std::mem::take(&mut labels)));
        }
    }
    assert!(labels.is_empty(), "no page follows the definitions of {labels:?}");
    pages
}

/// The pages of the guide are read as files and in rustdoc, so their links must work in both.
#[test]
fn links_of_the_guide_lead_somewhere_in_rustdoc() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let guide = fs::read_to_string(root.join("reactor/src/guide.rs")).expect("the guide");
    let pages = included(&guide);
    assert!(pages.len() > 10, "{} pages", pages.len());
    let faults = pages.iter().flat_map(|(page, labels)| {
        let text = fs::read_to_string(root.join("docs").join(page)).expect("a page");
        faults_in_rustdoc(&text, labels).into_iter().map(move |fault| format!("{page}: {fault}"))
    });
    let faults: Vec<_> = faults.collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    // In rustdoc a picture is not a file of its own, but part of the text. A blank line would end the picture there.
    for picture in pages.iter().flat_map(|(_, labels)| labels).filter(|label| label.ends_with(".svg")) {
        assert!(guide.contains(&format!("#[doc = include_str!(\"../docs/{picture}\")]")), "{picture} follows no page");
        let text = fs::read_to_string(root.join("docs").join(picture)).expect("a picture");
        assert!(text.lines().all(|line| !line.trim().is_empty()), "{picture} has a blank line");
    }
}

#[test]
fn a_link_that_leads_nowhere_in_rustdoc_is_found() {
    let labels = |labels: &[&str]| labels.iter().map(|&label| label.to_owned()).collect::<BTreeSet<_>>();
    let page = "[x](#x) [y](https://example.org) [z][z.md] ![p][p.svg] `a[0]` a[0]\n\n[z.md]: z.md\n[p.svg]: p.svg\n";
    assert_eq!(faults_in_rustdoc(page, &labels(&["z.md", "p.svg"])), [""; 0]);
    for (page, defined) in
        [("[z](z.md)", &[][..]), ("[z][z.md]", &[]), (page, &["z.md"]), (page, &["z.md", "p.svg", "q.md"])]
    {
        assert_eq!(faults_in_rustdoc(page, &labels(defined)).len(), 1, "{page}");
    }
    let source = "#[doc = \"[z.md]: self::z\"]\n#[doc = \"\"]\n#[doc = include_str!(\"../docs/a.md\")]\npub mod a {}\n\
                  #[doc = include_str!(\"../docs/guide/b.md\")]\n#[doc = include_str!(\"../docs/c.svg\")]\npub mod b {}\n";
    assert_eq!(included(source), [("a.md".to_owned(), labels(&["z.md"])), ("guide/b.md".to_owned(), labels(&[]))]);
}

/// Appends the paths below a folder, and the content of all Rust files, to `all`.
fn sources(folder: &Path, all: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder of the project").flatten() {
        let path = entry.path();
        all.push_str(&format!("{}\n", path.display()));
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push_str(&fs::read_to_string(&path).expect("text"));
        }
    }
}

/// `docs/reliability.md` names tests, settings of the simulation, and files. Each of these names must exist in the code.
#[test]
fn names_on_the_page_of_faults_are_in_the_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = String::new();
    ["reactor", "transport", "examples", "tests"].iter().for_each(|folder| sources(&root.join(folder), &mut all));
    let words: BTreeSet<&str> = all.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
    let page = fs::read_to_string(root.join("docs/reliability.md")).expect("the page");
    let named = page.split('`').skip(1).step_by(2).filter(|name| name.contains('_'));
    let is_name = |name: &&str| name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    let named: BTreeSet<&str> = named.filter(is_name).collect();
    assert!(named.len() > 100, "{} names", named.len());
    let gone: Vec<_> = named.difference(&words).collect();
    assert!(gone.is_empty(), "docs/reliability.md names what is not in the code: {gone:?}");
}

/// `docs/reliability.md` states how many rows its tables have in each state. The numbers must be true.
#[test]
fn the_rows_of_the_page_of_faults_are_counted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/reliability.md")).expect("the page");
    let rows: Vec<Vec<&str>> = page.lines().map(|line| line.split(" | ").collect()).collect();
    let rows: Vec<_> =
        rows.iter().filter(|row| row[0].strip_prefix("| ").is_some_and(|n| n.parse::<u32>().is_ok())).collect();
    let state = |state: &str| rows.iter().filter(|row| row[2] == state).count();
    let places =
        |letters: &str| rows.iter().filter(|row| letters.chars().all(|letter| row[4].contains(letter))).count();
    let counted = format!(
        "{} full, {} part, {} none; {} are full in the simulation, and {} on both kernel drivers.",
        state("full"),
        state("part"),
        state("none"),
        places("S"),
        places("WR")
    );
    assert_eq!(rows.len(), 86);
    let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains(&counted), "it is {counted}");
}
