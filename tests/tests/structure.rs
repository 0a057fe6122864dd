//! Checks the structure of the source, as `docs/design/layers.md` and `docs/design/walks.md` describe it: the order of the layers, circles
//! of dependencies, the files that a message passes (its walk), the names of types, and their size. `outside.rs` checks what is public.
//! These tests need no device.

mod structure {
    pub(crate) mod bounds;
    pub(crate) mod calls;
    pub(crate) mod length;
    pub(crate) mod logs;
    pub(crate) mod names;
    pub(crate) mod order;
    pub(crate) mod planted;
    pub(crate) mod seam;
    pub(crate) mod shape;
    pub(crate) mod source;
    pub(crate) mod surface;
    pub(crate) mod tables;
    pub(crate) mod walks;
}

use std::collections::BTreeSet;
use std::path::Path;

use structure::calls::Spread;
use structure::source::{Module, Source};
use structure::tables::{Table, table};
use structure::walks::Ways;
use structure::{bounds, calls, length, logs, names, order, planted, seam, shape, surface, tables, walks};

const LAYERS_PAGE: &str = "docs/design/layers.md";
const WALKS_PAGE: &str = "docs/design/walks.md";
/// The list of the public items of all libraries.
const PUBLIC_ITEMS: &str = "tests/data/public-items.txt";

/// The largest number of lines of the reactor that name the type of the program's handler. Code that is generic over this type is compiled
/// again for each program.
const HANDLER_LINES: usize = 12;
/// The largest number of fields of a type. The types in `config/mod.rs` may have more.
const FIELDS: usize = 20;
/// The walks of a message in the reactor. Each entry has two values. The first one is a heading in `docs/design/walks.md`; the table below
/// this heading lists the files that the message passes. The second one is the largest allowed number of these files.
const WALKS: [(&str, usize); 3] = [("A message in", 4), ("A message past one buffer, in", 5), ("A message out", 2)];
/// The walks of a message in the embedded provider. Each entry has two values. The first one is a heading in `docs/design/walks.md`; the
/// table below this heading lists the files that the message passes. The second one is the largest allowed number of these files.
const EMBEDDED_WALKS: [(&str, usize); 5] = [
    ("The embedded provider: a message in", 4),
    ("The embedded provider: a message out", 4),
    ("The embedded provider: a message in shared memory, in", 4),
    ("The embedded provider: a connect", 5),
    ("The embedded provider: an end", 3),
];
/// The ways in which the reactor looks up a connection: these functions, and this field.
const LOOK_UPS: Ways = Ways { functions: &["of_work", "at", "at_with_provider", "input", "pass"], field: "table" };
/// The ways in which the embedded provider looks up a connection: these functions, and this field.
const EMBEDDED_LOOK_UPS: Ways = Ways { functions: &["known", "known_mut", "attempt"], field: "endpoints" };
/// The largest allowed spreads of the methods of types ([`calls::spread`]): the numbers of methods,
/// of files, and of files that call each other in a circle. The types in one row count as one. The
/// numbers may only be lowered.
const EMBEDDED_SPREADS: [(&[&str], Spread); 4] = [
    (&["Iwarp"], Spread { methods: 80, files: 4, circle: 1 }),
    (&["Endpoints"], Spread { methods: 80, files: 4, circle: 1 }),
    (&["Ports"], Spread { methods: 80, files: 4, circle: 2 }),
    (
        &["Hub", "TcpFlow", "RingFlow", "Rings", "Rendezvous", "Endpoints", "Iwarp"],
        Spread { methods: 200, files: 12, circle: 1 },
    ),
];
const VERBS_SPREADS: [(&[&str], Spread); 3] = [
    (&["Verbs"], Spread { methods: 80, files: 4, circle: 1 }),
    (&["DeviceHub"], Spread { methods: 44, files: 4, circle: 1 }),
    (
        &["Verbs", "DeviceHub", "DeviceQueues", "DeviceRegions", "Exchanges", "Device", "IdEntry", "DetachedId"],
        Spread { methods: 218, files: 19, circle: 2 },
    ),
];
const REACTOR_SPREADS: [(&[&str], Spread); 4] = [
    (&["Driver"], Spread { methods: 80, files: 4, circle: 3 }),
    (&["World"], Spread { methods: 73, files: 4, circle: 3 }),
    (
        &[
            "Driver",
            "World",
            "Acceptor",
            "Connector",
            "Ends",
            "Fair",
            "LargeMessages",
            "Listeners",
            "Lookups",
            "Queues",
        ],
        Spread { methods: 246, files: 17, circle: 3 },
    ),
    (&["Connection"], Spread { methods: 208, files: 11, circle: 9 }),
];
/// The largest number of public methods of `Context`. Methods about another noun, such as timers,
/// belong to a facet, such as `TimerContext`.
const CONTEXT_METHODS: usize = 45;
/// The largest number of methods of `Provider` that return no role (a trait for an optional part of a provider), and the largest number of
/// methods of a role.
const SEAM: [usize; 2] = [25, 10];
/// The largest number of booleans that a type may have without an entry in `WITH_BOOLEANS`.
const BOOLEANS: usize = 1;
/// The types with more than `BOOLEANS` booleans. Each entry has the names of the booleans, and the reason why no two of them exclude each
/// other.
const WITH_BOOLEANS: &[(&str, &[&str], &str)] = &[
    // Types of the reactor.
    ("Config", &["quiet_sends", "contain_panics", "plain_remote_memory"], "settings of the program"),
    ("Connection", &["marked", "corked"], "a corked connection is on the list to be posted, or it is not"),
    ("RegionOptions", &["any_peer", "direct"], "wishes of the program"),
    ("Keepalive", &["owes_ping", "owes_pong"], "this side may owe the peer a ping and a pong at the same time"),
    (
        "SendQueueEntry",
        &["quiet", "answered"],
        "a read holds a region and waits for an answer; a large message's piece does both, too; a message is quiet or not",
    ),
    ("Endpoint", &["blocked", "marked"], "an endpoint that has refused a datagram may have receives to post"),
    (
        "SendQueue",
        &["wants_signal", "has_carrier", "is_awaited", "immediate"],
        "three facts about the chain: what the peer waits for may carry a grant, and need a signal; what the provider can",
    ),
    ("CompletionBatch", &["full", "early"], "a batch that was polled before its stage may have left some in the queue"),
    ("Device", &["has_events", "removed"], "a device may be removed while its channel has events"),
    (
        "CompletionQueue",
        &["shared", "armed", "awaited", "ready"],
        "its size, what the device was asked for, what the reactor has to see, and a place on a list",
    ),
    ("Queues", &["polling", "quiet"], "a stage, and what the last one found"),
    ("AsyncStream", &["peer_finished", "finished"], "the two directions of a stream end on their own"),
    ("ThreadedStream", &["peer_finished", "finished"], "the two directions of a stream end on their own"),
    ("Readiness", &["readable", "writable", "closed"], "what epoll reports, in any combination"),
    (
        "Record",
        &["peer_finished", "read_closed", "closed", "violated"],
        "what the peer has said, and what the program has, in any order",
    ),
    ("Turn", &["progressed", "more"], "a turn may do something and leave something"),
    (
        "WakeFlag",
        &["pending", "stop", "gone"],
        "requests of other threads, which come in any combination, and the end of the reactor",
    ),
    // Types of the embedded provider.
    ("IwarpConfig", &["retry_v1", "markers", "extensions"], "three settings of the program"),
    ("TcpFlow", &["announced", "readable", "closed", "queued"], "two directions of a socket, a list, and an event"),
    (
        "RingFlow",
        &["announced", "readable", "closed", "queued", "has_more", "owes_call"],
        "two directions of a socket, a list, an event, and the ring",
    ),
    ("Startup", &["shows_path", "connected"], "what the request may contain, and whether it can be sent"),
    ("Ready", &["readable", "writable", "closed"], "what epoll reports, in any combination"),
    ("QueuePair", &["extensions", "live", "dead"], "a stream may end before or after it has begun"),
    ("Receiver", &["crc", "seen"], "what was agreed on, and what has come"),
    ("Agreement", &["crc", "markers"], "the peer asks for each on its own"),
    ("RequestTerms", &["crc", "markers", "local"], "the peer asks for each on its own"),
    ("StartupTerms", &["crc", "markers", "local"], "two settings, and where the peer is"),
    ("Stream", &["crc", "markers"], "the peer asks for each on its own"),
    ("StartupHeader", &["markers", "crc", "reject", "enhanced"], "flags on the wire, as they came"),
    ("Enhanced", &["peer_to_peer", "rtr_send", "rtr_write", "rtr_read"], "flags on the wire, as they came"),
    // Types of the provider for shared memory.
    ("Incoming", &["writing", "release_due"], "a write that is not whole, and payload that is to be released"),
    ("ReceiveProgress", &["news", "more", "unknown_window"], "something may have come, be left, and wait for a packet"),
    (
        "Link",
        &["extensions", "dead", "removes"],
        "what was agreed on, the end, and the end of the time to read the last records",
    ),
    // Types of the provider on devices.
    (
        "RawDevice",
        &["iwarp", "managed", "removed"],
        "a kind of device, who has opened it, and an event that happens to any",
    ),
    ("Cq", &["armed", "failed"], "a queue may fail whether or not it is armed"),
    ("IdEntry", &["handshaking", "removal_reported"], "a device may be removed in the middle of a handshake"),
];

fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn reactor() -> Source {
    Source::read(workspace(), "reactor/src")
}

fn transport() -> Source {
    Source::read(workspace(), "transport/src")
}

fn embedded() -> Source {
    Source::read(workspace(), "transport/embedded/src")
}

fn verbs() -> Source {
    Source::read(workspace(), "transport/verbs/src")
}

/// Returns the libraries, each with its name in lists.
fn libraries() -> [(&'static str, Source); 4] {
    [("reactor", reactor()), ("transport", transport()), ("embedded", embedded()), ("verbs", verbs())]
}

fn written(document: &str, heading: &str) -> Table {
    let text =
        std::fs::read_to_string(workspace().join(document)).unwrap_or_else(|error| panic!("{document}: {error}"));
    table(document, &text, heading)
}

/// Returns the paths and the texts of all files in a folder and in those below it.
fn files_below(folder: &Path) -> Vec<(String, String)> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let read = |path: std::path::PathBuf| match path.is_dir() {
        true => files_below(&path),
        false if path.extension().is_none_or(|end| end != "rs") => vec![],
        false => vec![(path.display().to_string(), std::fs::read_to_string(&path).expect("a text"))],
    };
    entries.flat_map(read).collect()
}

#[track_caller]
fn none(violations: &[String]) {
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

#[test]
fn layers_use_only_what_stands_below_them() {
    none(&order::violations(&reactor(), &written(LAYERS_PAGE, "Layers of the reactor")));
    none(&order::violations(&transport(), &written(LAYERS_PAGE, "Layers of the interface of providers")));
    none(&order::violations(&embedded(), &written(LAYERS_PAGE, "Layers of the embedded provider")));
    none(&order::violations(&verbs(), &written(LAYERS_PAGE, "Layers of the provider of devices")));
}

/// Each public item is a promise to users, so a new one needs a reason in the list's history. `PUBLIC_ITEMS=write` writes the list again
/// below its history.
#[test]
fn the_public_items_are_listed() {
    let path = workspace().join(PUBLIC_ITEMS);
    let listed = std::fs::read_to_string(&path).unwrap_or_default();
    let (history, last) = surface::history(&listed);
    let items = libraries().map(|(name, source)| (name, surface::items(&source)));
    let (now, number) = (surface::list(&history, &items), items.iter().map(|(_, items)| items.len()).sum());
    if std::env::var_os("PUBLIC_ITEMS").is_some_and(|how| how == "write") {
        std::fs::write(&path, &now).expect("the list is written");
    } else {
        let lines = |text: &str| text.lines().map(ToOwned::to_owned).collect::<BTreeSet<_>>();
        let (old, new) = (lines(&listed), lines(&now));
        let differs: Vec<_> = new.symmetric_difference(&old).take(20).collect();
        assert!(listed == now, "{PUBLIC_ITEMS} differs, at first in {differs:?}: PUBLIC_ITEMS=write writes it anew");
    }
    assert_eq!(last, Some(number), "{PUBLIC_ITEMS}: the last line of its history, `# NUMBER: WHY`, has another number");
}

/// `Context` has few methods, because a reader of a handler must know them.
#[test]
fn the_context_has_few_methods() {
    let items = surface::items(&reactor());
    assert!(items.contains("Context::send"), "`Context` is not found");
    none(&surface::too_many_methods(&items, "Context", CONTEXT_METHODS));
}

/// `docs/loop.md` promises a limit on the log lines that peers can cause.
#[test]
fn log_lines_that_peers_cause_have_a_limit() {
    none(&libraries().iter().flat_map(|(_, source)| logs::unlimited(source)).collect::<Vec<_>>());
}

/// Each planted defect has a row in the table, because `tests/mutants/run.sh` reads the names from
/// it.
#[test]
fn each_planted_defect_has_a_row() {
    let defects = written("docs/testing.md", "Planted defects");
    let listed = defects.rows.iter().flat_map(|row| tables::code(&row.cells[0])).collect::<BTreeSet<_>>();
    let planted = libraries().iter().flat_map(|(_, source)| planted::names(source)).collect::<BTreeSet<_>>();
    let differs: Vec<_> = planted.symmetric_difference(&listed).collect();
    assert!(differs.is_empty(), "{}: the table and the code differ in {differs:?}", defects.file);
    let root = workspace();
    let files =
        ["transport/src", "transport/embedded/src", "transport/verbs/src", "reactor/src", "tests/tests", "tests/src"]
            .into_iter();
    let files = files.flat_map(|folder| files_below(&root.join(folder)));
    let below = |path: String| path.strip_prefix(&format!("{}/", root.display())).map_or(path.clone(), Into::into);
    none(&planted::stale_finders(&defects, &files.map(|(path, text)| (below(path), text)).collect::<Vec<_>>()));
}

/// `SECURITY.md` and `docs/design/bounds.md` promise that nothing that a peer sends makes the
/// library or a program of `examples/tools` allocate without bound.
#[test]
fn each_collection_has_a_bound() {
    let tools = Source::of_files(files_below(&workspace().join("examples/tools/src")));
    assert!(tools.modules.len() > 100, "the programs were not found");
    let sources: Vec<_> = libraries().into_iter().map(|(_, source)| source).chain([tools]).collect();
    none(&sources.iter().flat_map(bounds::unmarked).collect::<Vec<_>>());
    let modules = sources.iter().flat_map(|source| source.modules.values());
    let files = modules.map(|module| (&*module.file, &*module.text));
    none(&bounds::differences(files, &written("docs/design/bounds.md", "Bounds")));
}

#[test]
fn visible_items_come_first() {
    none(&libraries().iter().flat_map(|(_, source)| surface::hidden_before_visible(source)).collect::<Vec<_>>());
}

#[test]
fn no_identifier_is_vague() {
    none(&libraries().iter().flat_map(|(_, source)| names::vague(source)).collect::<Vec<_>>());
}

#[test]
fn a_name_names_one_type() {
    let libraries = libraries();
    none(&names::doubles(&libraries.each_ref().map(|(name, source)| (*name, source))));
}

#[test]
fn there_is_no_circle() {
    for (_, source) in libraries() {
        none(&order::circles_of_folders(&source));
        none(&order::circles_of_files(&source));
    }
}

#[test]
fn the_handlers_type_stays_in_the_turn() {
    let lines = shape::handler_lines(&reactor());
    assert!(lines.len() <= HANDLER_LINES, "{} lines, at most {HANDLER_LINES}:\n{}", lines.len(), lines.join("\n"));
}

#[test]
fn no_type_is_too_wide() {
    for (_, source) in libraries() {
        none(&shape::too_wide(&shape::shapes(&source), FIELDS, "/config/mod.rs"));
    }
}

#[test]
fn no_file_and_no_function_is_too_long() {
    none(&libraries().iter().flat_map(|(_, source)| length::too_long(source, 600, 70)).collect::<Vec<_>>());
}

#[test]
fn no_two_booleans_exclude_each_other() {
    let shapes: Vec<_> = libraries().iter().flat_map(|(_, source)| shape::shapes(source)).collect();
    none(&shape::unexplained(&shapes, BOOLEANS, WITH_BOOLEANS));
}

fn walk<'a>(source: &'a Source, (heading, most): (&str, usize)) -> Vec<&'a Module> {
    let files =
        walks::files(source, &written(WALKS_PAGE, heading)).unwrap_or_else(|wrong| panic!("\n{}\n", wrong.join("\n")));
    assert!(files.len() <= most, "\"{heading}\" passes {} files, at most {most}", files.len());
    files
}

#[test]
fn a_message_passes_the_written_files_and_finds_its_connection_once() {
    let source = reactor();
    for file in WALKS.into_iter().flat_map(|heading| walk(&source, heading)) {
        none(&walks::look_ups(file, usize::from(!file.file.contains("/conn/")), LOOK_UPS));
    }
    none(&walks::unknown(&source, LOOK_UPS));
}

#[test]
fn a_message_passes_the_written_files_of_the_embedded_provider() {
    let source = embedded();
    for file in EMBEDDED_WALKS.into_iter().flat_map(|heading| walk(&source, heading)) {
        // In `provider.rs`, a call of the connection manager may look up an endpoint twice. In each other file, one function may look it up
        // once.
        let most = if file.file.ends_with("/provider.rs") { 2 } else { 1 };
        none(&walks::look_ups(file, most, EMBEDDED_LOOK_UPS));
    }
    none(&walks::unknown(&source, EMBEDDED_LOOK_UPS));
}

#[test]
fn the_methods_of_a_type_do_not_call_each_other_in_circles() {
    let of = |source, spreads: &[(&[&str], Spread)]| -> Vec<String> {
        spreads.iter().flat_map(|(names, most)| calls::too_wide(source, names, most)).collect()
    };
    none(
        &[of(&embedded(), &EMBEDDED_SPREADS), of(&verbs(), &VERBS_SPREADS), of(&reactor(), &REACTOR_SPREADS)].concat(),
    );
}

#[test]
fn the_seam_is_narrow_and_has_no_default() {
    let source = transport();
    let module = |file| source.at(file).expect("a file of the seam");
    none(&seam::faults(module("provider.rs"), module("roles.rs"), SEAM[0], SEAM[1]));
}

/// Tests of the checks: each check must find a planted fault.
mod checks {
    use super::*;

    const LAYERS: &str = "\
## Layers

| layer | what it is | knows nothing of |
|---|---|---|
| `top` | | |
| `middle` | | `std::net`, `crate::base::secret` |
| `base` | | |
";

    fn layers(files: &[(&str, &str)]) -> Vec<String> {
        order::violations(&Source::of(files), &table("layers.md", LAYERS, "Layers"))
    }

    fn crate_of<'a>(middle: &'a str, base: &'a str) -> Vec<(&'a str, &'a str)> {
        vec![
            ("lib.rs", "mod top; mod middle; mod base;"),
            ("top.rs", "use crate::{base, middle::Thing};"),
            ("middle/mod.rs", "mod inner; pub struct Thing;"),
            ("middle/inner.rs", middle),
            ("base.rs", base),
        ]
    }

    #[test]
    fn a_dependency_downwards_is_in_order() {
        assert_eq!(layers(&crate_of("use super::Thing; use crate::base::Stone;", "")), [""; 0]);
    }

    #[test]
    fn a_dependency_upwards_is_found_wherever_it_is_written() {
        for (text, line) in [
            ("use crate::middle::Thing;", 1),
            ("\nuse crate::{middle::inner::Deep as Name};", 2),
            ("\n\nfn f() { crate::middle::Thing; }", 3),
            ("fn f(thing: &super::middle::Thing) {}", 1),
            ("fn f() {\n    println!(\"{:?}\", crate::middle::Thing);\n}", 2),
            ("mod inline { use super::super::middle::Thing; }", 1),
        ] {
            let found = layers(&crate_of("", text));
            let place = format!("src/base.rs:{line}: ");
            assert!(
                found.len() == 1 && found[0].starts_with(&place) && found[0].contains("stands above"),
                "{text}: {found:?}"
            );
        }
    }

    #[test]
    fn what_only_tests_compile_does_not_count() {
        for text in [
            "#[cfg(test)] mod tests { use crate::middle::Thing; }",
            "#[cfg(all(test, unix))] mod tests;",
            "#[cfg(test)] use crate::top;",
            "struct A; impl A { #[cfg(test)] fn f() { crate::middle::f() } }",
            "/// As [`crate::middle::Thing`].\npub(in super::super) struct A;",
        ] {
            assert_eq!(layers(&crate_of("", text)), [""; 0], "{text}");
        }
        let found = layers(&crate_of("", "#[cfg(any(test, unix))] use crate::top;"));
        assert_eq!(found.len(), 1, "it is compiled without tests, too: {found:?}");
    }

    #[test]
    fn what_a_layer_may_not_know_is_found() {
        for text in ["use std::net::IpAddr;", "use crate::base::secret;", "fn f() { crate::base::secret::tell() }"] {
            let found = layers(&crate_of(text, ""));
            assert!(found.len() == 1 && found[0].contains("knows nothing of"), "{text}: {found:?}");
        }
        assert_eq!(layers(&crate_of("use std::network; use crate::base::secretary;", "")), [""; 0]);
    }

    #[test]
    fn a_file_without_a_layer_and_a_layer_without_a_file_are_found() {
        let mut files = crate_of("", "");
        files[0].1 = "mod top; mod middle; mod base; mod stray;";
        files.push(("stray.rs", ""));
        let found = layers(&files);
        assert!(found.len() == 1 && found[0].starts_with("src/stray.rs:1: "), "{found:?}");
        let found = layers(&[("lib.rs", "mod top; mod middle;"), ("top.rs", ""), ("middle.rs", "")]);
        assert_eq!(found, ["layers.md:7: there is no module `base`"]);
    }

    #[test]
    fn circles_are_found_except_in_a_family() {
        let family = [
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod b; use b::B; pub struct A;"),
            ("a/b.rs", "use super::A; pub struct B;"),
        ];
        let family = Source::of(&family);
        assert_eq!(order::circles_of_files(&family), [""; 0]);
        assert_eq!(order::circles_of_folders(&family), [""; 0]);

        let siblings = [
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod b; mod c; mod d;"),
            ("a/b.rs", "use super::c::C;"),
            ("a/c.rs", "use super::d::D;"),
            ("a/d.rs", "\nuse super::b::B;"),
        ];
        let siblings = Source::of(&siblings);
        let found = order::circles_of_files(&siblings);
        assert!(
            found.len() == 1 && found[0].contains("src/a/d.rs:2: crate::a::b::B") && found[0].lines().count() == 4,
            "{found:?}"
        );
        assert_eq!(order::circles_of_folders(&siblings), [""; 0], "they are in one folder");

        // No two files depend on each other, but the folders do.
        let folders = [
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "mod x; mod y;"),
            ("a/x.rs", "use crate::b::x::X;"),
            ("a/y.rs", ""),
            ("b/mod.rs", "mod x; mod y;"),
            ("b/x.rs", ""),
            ("b/y.rs", "use crate::a::y::Y;"),
        ];
        let folders = Source::of(&folders);
        assert_eq!(order::circles_of_files(&folders), [""; 0]);
        assert_eq!(order::circles_of_folders(&folders).len(), 1);
    }

    fn one(text: &str) -> Source {
        Source::of(&[("lib.rs", text)])
    }

    #[test]
    fn wide_types_are_found() {
        let source = Source::of(&[
            ("lib.rs", "mod config;\nstruct A { a: u8, b: u8, c: u8 }\nenum E { V { a: u8, b: u8, c: u8 } }"),
            ("config.rs", "struct Config { a: u8, b: u8, c: u8 }"),
        ]);
        let shapes = shape::shapes(&source);
        assert_eq!(shape::too_wide(&shapes, 3, "/config.rs"), [""; 0]);
        let found = shape::too_wide(&shapes, 2, "/config.rs");
        assert_eq!(
            found,
            ["src/lib.rs:2: `A` has 3 fields, more than 2", "src/lib.rs:3: `V` has 3 fields, more than 2"]
        );
    }

    #[test]
    fn booleans_without_a_reason_are_found_and_so_are_stale_reasons() {
        let shapes = shape::shapes(&one(
            "struct A { a: bool, b: u8, c: Cell<bool> }\n#[cfg(test)] struct T { a: bool, b: bool }",
        ));
        assert_eq!(shape::unexplained(&shapes, 1, &[("A", &["a", "c"], "both happen")]), [""; 0]);
        assert_eq!(shape::unexplained(&shapes, 2, &[]), [""; 0]);
        assert!(shape::unexplained(&shapes, 1, &[])[0].starts_with("src/lib.rs:1: `A` has the booleans"));
        assert_eq!(shape::unexplained(&shapes, 1, &[("A", &["a"], "an older version")]).len(), 2);
        let shared =
            shape::shapes(&one("struct B { a: std::sync::atomic::AtomicBool, b: std::cell::Cell<bool>, c: Cell<u8> }"));
        assert_eq!(shared[0].booleans, ["a", "b"]);
    }

    #[test]
    fn lines_with_the_handlers_type_are_counted() {
        let found = shape::handler_lines(&one(
            "fn f<H: Handler<()>>(h: H) {}\nfn g<H>(h: H) where H: Handler<()> {}\nfn h() {}",
        ));
        assert_eq!(found.len(), 2, "{found:?}");
    }

    fn walk_of(rows: &[&str]) -> Result<usize, Vec<String>> {
        let source = Source::of(&[("lib.rs", "mod a; mod b; mod c;"), ("a.rs", ""), ("b.rs", ""), ("c.rs", "")]);
        let rows: Vec<_> = rows.iter().map(|file| format!("| `{file}` | |\n")).collect();
        let walk = format!("## W\n| file | what it does |\n|---|---|\n{}", rows.concat());
        walks::files(&source, &table("walk.md", &walk, "W")).map(|files| files.len())
    }

    #[test]
    fn a_walk_may_end_where_it_began_and_leads_back_to_no_other_file() {
        assert_eq!(walk_of(&["a.rs", "b.rs", "c.rs"]), Ok(3));
        assert_eq!(walk_of(&["a.rs", "b.rs", "a.rs"]), Ok(3));
        assert_eq!(walk_of(&["a.rs", "d.rs"]), Err(vec!["walk.md:5: there is no file `d.rs`".into()]));
        let back = |file| Err(vec![format!("walk.md:6: the walk leads back to {file}, which was left")]);
        assert_eq!(walk_of(&["a.rs", "b.rs", "a.rs", "c.rs"]), back("a.rs"));
        assert_eq!(walk_of(&["a.rs", "b.rs", "b.rs"]), back("b.rs"));
    }

    #[test]
    fn look_ups_are_counted_on_the_longest_branch() {
        for (body, count) in [
            ("seats.get(id); table.len()", 0),
            ("self.table.get_mut(id)", 1),
            ("table.of_work(slot); self.driver.at(id)", 2),
            ("match x { A => table.of_work(slot), B => x.and_then(|x| table.get(id)) }", 1),
            ("if table.get(id) { self.at(id) } else { 0 }", 2),
            ("if let Some(x) = y { self.at(id); self.input(id, f) } else if z { self.at(id) }", 2),
        ] {
            let source =
                one(&format!("impl A {{ fn f() {{ {body} }} }} #[cfg(test)] fn g() {{ self.at(self.at(id)) }}"));
            let found = |most| walks::look_ups(&source.modules[""], most, LOOK_UPS).len();
            assert_eq!((found(count), count == 0 || found(count - 1) == 1), (0, true), "{body}");
        }
    }

    #[test]
    fn a_way_that_was_renamed_is_found() {
        let ways = Ways { functions: &["at", "input"], field: "table" };
        let found = |text| walks::unknown(&one(text), ways);
        assert_eq!(found("struct A { table: T } impl A { fn at(&self) {} fn input(&self) {} }"), [""; 0]);
        let missing = found("struct A { tables: T } impl A { fn at(&self) { self.input() } }");
        assert_eq!(missing, ["there is no `fn input` to count", "there is no `field table` to count"]);
    }

    /// A call from a part, in `part.rs`, back to the type that contains the part is found, in each
    /// way to name that type.
    #[test]
    fn a_call_back_up_is_found_whatever_the_receiver_is_called() {
        let whole = "mod part; pub struct World { part: Part } impl World { fn run(&mut self) { Part::serve(self) } fn up(&self) {} }";
        for (call, circle) in [
            ("world.up()", 2),
            ("hub.world.up()", 2),
            ("(world as &dyn Up).up()", 2),
            ("World::up(world)", 2),
            ("world.other()", 1),
        ] {
            let part = format!("pub struct Part; impl Part {{ fn serve(world: &World) {{ {call} }} }}");
            let source = Source::of(&[("lib.rs", whole), ("part.rs", &part)]);
            let found = calls::spread(&source, &["World", "Part"]);
            assert_eq!(found, Spread { methods: 3, files: 2, circle }, "{call}");
            assert_eq!(
                calls::too_wide(&source, &["World", "Part"], &Spread { methods: 3, files: 2, circle: 1 }).len(),
                circle - 1
            );
        }
        // If another type has a method of the same name, a call counts only if its receiver is
        // `self`.
        let split = [
            ("lib.rs", "mod a; mod b; struct O; impl O { fn g(&self) {} }"),
            ("a.rs", "impl T { fn f(&self) { o.g() } }"),
            ("b.rs", "impl T { fn g(&self) { self.f() } }"),
        ];
        assert_eq!(calls::spread(&Source::of(&split), &["T"]), Spread { methods: 2, files: 2, circle: 1 });
        let split = [split[0], ("a.rs", "impl T { fn f(&self) { self.g() } }"), split[2]];
        assert_eq!(calls::spread(&Source::of(&split), &["T"]), Spread { methods: 2, files: 2, circle: 2 });
    }

    #[test]
    fn a_seam_that_is_wide_or_has_defaults_is_found() {
        let roles = one("pub trait R { fn a(&self); }");
        let found = |text: &str, most| {
            let source = one(text);
            seam::faults(&source.modules[""], &roles.modules[""], most, 1)
        };
        let good = "pub trait Provider { fn a(&self); fn r(&mut self) -> Option<&mut dyn R>; }";
        assert_eq!(found(good, 1), [""; 0]);
        assert_eq!(found(good, 0), ["src/lib.rs:1: `Provider` has 1 methods, more than 0"]);
        let default = found("trait Provider { fn a(&self) {} fn r(&self) -> Option<&dyn roles::R>; }", 1);
        assert!(default.len() == 1 && default[0].contains("has a body for `a`"), "{default:?}");
        assert!(found("trait Provider { fn a(&self); }", 1)[0].contains("the roles are"), "a role that nobody returns");
    }
}
