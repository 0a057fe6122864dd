//! The structure of the source, as `docs/architecture.md` describes it: the order of the layers, circles, the walks of
//! a message, and the width of types. These tests need no device.

mod structure {
    pub(crate) mod order;
    pub(crate) mod shape;
    pub(crate) mod source;
    pub(crate) mod tables;
    pub(crate) mod walks;
}

use std::path::Path;

use structure::source::Source;
use structure::tables::{Table, table};
use structure::walks::{self, Step};
use structure::{order, shape};

const DOCUMENT: &str = "docs/architecture.md";

/// Largest number of lines of the reactor that name the type of the program's handler. Code with that type is compiled
/// once per program.
const HANDLER_LINES: usize = 12;
/// Largest number of fields of a type outside of `config.rs`.
const FIELDS: usize = 20;
/// Largest numbers of functions and of files that a message passes in the reactor on its way in.
const IN: (usize, usize) = (8, 5);
/// Largest numbers of functions and of files on the way out, when a message is queued, posted, and completed.
const OUT: (usize, usize) = (18, 4);
/// Largest number of booleans of a type that need no explanation.
const BOOLEANS: usize = 1;
/// The types with more booleans, and the reason why no two of them exclude each other.
const WITH_BOOLEANS: &[(&str, &[&str], &str)] = &[
    // The reactor.
    ("Config", &["quiet_sends", "overtake", "crc", "contain_panics", "plain_remote_memory"], "settings of the program"),
    ("Connection", &["marked", "corked"], "a corked connection is on the list to be posted, or it is not"),
    ("Greeting", &["extensions", "fragments", "progress", "parting"], "features that a side has on their own"),
    ("Terms", &["progress", "parting", "extensions"], "features that both sides have on their own"),
    ("Keepalive", &["nudges", "owes_ping", "owes_pong"], "this side may owe the peer a question and an answer at once"),
    (
        "Entry",
        &["holds", "quiet", "answered"],
        "a read holds a region and waits for an answer; a large message's piece does both, too; a message is quiet or not",
    ),
    ("Endpoint", &["blocked", "marked"], "an endpoint that has refused a datagram may have receives to post"),
    (
        "SendQueue",
        &["quiet", "telling", "wants_signal", "has_carrier", "is_awaited"],
        "a setting and a wish that overrides it, and three facts about the chain: what the peer waits for may carry a grant, and need a signal",
    ),
    ("Batch", &["full", "early"], "a batch that was polled before its stage may have left some in the queue"),
    ("Device", &["has_events", "removed"], "a device may be removed while its channel has events"),
    (
        "CompletionQueue",
        &["shared", "armed", "awaited", "ready"],
        "its size, what the device was asked for, what the reactor has to see, and a place on a list",
    ),
    ("Queues", &["polling", "quiet", "provider_pending"], "a stage, what the last one found, what the provider left"),
    ("Stream", &["peer_finished", "finished"], "the two directions of a stream end on their own"),
    ("Membership", &["pending", "counted"], "the arrival that is counted may not be the last one"),
    ("Readiness", &["readable", "writable", "closed"], "what epoll reports, in any combination"),
    (
        "Record",
        &["peer_finished", "deaf", "closed", "violated"],
        "what the peer has said, and what the program has, in any order",
    ),
    ("Turn", &["progressed", "more"], "a turn may do something and leave something"),
    (
        "Reactor",
        &["cm_pending", "timers_pending", "turning"],
        "two stages that may have stopped at their bounds, and a turn",
    ),
    // The embedded provider.
    ("IwarpConfig", &["retry_v1", "markers", "extensions"], "three settings of the program"),
    (
        "Endpoint",
        &["announced", "readable", "closed", "queued", "unfinished"],
        "two directions of a socket, a list, and an event",
    ),
    ("Ready", &["readable", "writable", "closed"], "what epoll reports, in any combination"),
    ("QueuePair", &["extensions", "live", "dead"], "a stream may end before or after it has begun"),
    ("Receiver", &["crc", "seen"], "what was agreed on, and what has come"),
    ("Agreement", &["crc", "markers"], "the peer asks for each on its own"),
    ("Asked", &["crc", "markers"], "the peer asks for each on its own"),
    ("Stream", &["crc", "markers"], "the peer asks for each on its own"),
    (
        "Transmitter",
        &["held", "immediate_next", "answer_next"],
        "an answer may be next when immediate data is due, and comes after that",
    ),
    ("StartupHeader", &["markers", "crc", "reject", "enhanced"], "flags on the wire, as they came"),
    ("Enhanced", &["peer_to_peer", "rtr_send", "rtr_write", "rtr_read"], "flags on the wire, as they came"),
    // The provider on devices.
    ("Cq", &["armed", "failed"], "a queue may fail whether or not it is armed"),
    ("Id", &["handshaking", "removal_told"], "a device may be removed in the middle of a handshake"),
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

fn written(heading: &str) -> Table {
    let text =
        std::fs::read_to_string(workspace().join(DOCUMENT)).unwrap_or_else(|error| panic!("{DOCUMENT}: {error}"));
    table(DOCUMENT, &text, heading)
}

#[track_caller]
fn none(violations: &[String]) {
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

#[test]
fn layers_use_only_what_stands_below_them() {
    none(&order::violations(&reactor(), &written("Layers of the reactor")));
    none(&order::violations(&transport(), &written("Layers of the transport")));
}

#[test]
fn there_is_no_circle() {
    for source in [reactor(), transport()] {
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
    for source in [reactor(), transport()] {
        none(&shape::too_wide(&shape::shapes(&source), FIELDS, "/config.rs"));
    }
}

#[test]
fn no_two_booleans_exclude_each_other() {
    let shapes: Vec<_> = [reactor(), transport()].iter().flat_map(shape::shapes).collect();
    none(&shape::unexplained(&shapes, BOOLEANS, WITH_BOOLEANS));
}

fn walk<'a>(source: &'a Source, heading: &str, end: &str) -> Vec<Step<'a>> {
    let steps = walks::steps(source, &written(heading)).unwrap_or_else(|missing| panic!("\n{}\n", missing.join("\n")));
    none(&walks::breaks(&steps, end));
    steps
}

#[track_caller]
fn within(steps: &[&Step<'_>], (functions, files): (usize, usize)) {
    let (has, of) = (steps.len(), walks::files(steps));
    assert!(has <= functions && of <= files, "{has} functions in {of} files, at most {functions} in {files}");
}

#[test]
fn a_message_in_takes_the_written_way() {
    let source = reactor();
    let steps = walk(&source, "A message in", "on_recv");
    none(&walks::returns(&steps));
    within(&steps.iter().collect::<Vec<_>>(), IN);
    assert_eq!(walks::look_ups(&steps), 1, "look-ups of the connection");
}

#[test]
fn a_large_message_takes_the_written_way() {
    let source = reactor();
    let steps = walk(&source, "A message past one buffer, in", "on_recv");
    none(&walks::returns(&steps));
    assert_eq!(walks::look_ups(&steps), 1, "look-ups of the connection");
}

#[test]
fn a_message_in_several_buffers_takes_the_written_way() {
    let source = reactor();
    let steps = walk(&source, "A message in several buffers, in", "on_recv");
    none(&walks::returns(&steps));
    assert_eq!(walks::look_ups(&steps), 1, "look-ups of the connection");
}

#[test]
fn a_message_out_takes_the_written_way() {
    let source = reactor();
    let queued = walk(&source, "A message out: queued", "push");
    let posted = walk(&source, "A message out: posted", "post_send");
    let completed = walk(&source, "A message out: completed", "on_send_complete");
    [&queued, &posted, &completed].into_iter().for_each(|steps| none(&walks::returns(steps)));
    within(&[&queued, &posted, &completed].into_iter().flatten().collect::<Vec<_>>(), OUT);
    assert_eq!(walks::look_ups(&queued), 1, "look-ups of the connection until it is queued");
    assert_eq!(walks::look_ups(&completed), 1, "look-ups of the connection for a completion");
}

#[test]
fn the_embedded_provider_takes_the_written_way() {
    let source = transport();
    walk(&source, "The embedded provider: a message in", "push");
    walk(&source, "The embedded provider: a message out", "send");
}

/// Tests of the checks: each one finds the fault that it is for.
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

        // No two files form a circle, but the folders do.
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
        let shapes =
            shape::shapes(&one("struct A { a: bool, b: u8, c: bool }\n#[cfg(test)] struct T { a: bool, b: bool }"));
        assert_eq!(shape::unexplained(&shapes, 1, &[("A", &["a", "c"], "both happen")]), [""; 0]);
        assert_eq!(shape::unexplained(&shapes, 2, &[]), [""; 0]);
        assert!(shape::unexplained(&shapes, 1, &[])[0].starts_with("src/lib.rs:1: `A` has the booleans"));
        assert_eq!(shape::unexplained(&shapes, 1, &[("A", &["a"], "an older version")]).len(), 2);
    }

    #[test]
    fn lines_with_the_handlers_type_are_counted() {
        let found = shape::handler_lines(&one(
            "fn f<H: Handler<()>>(h: H) {}\nfn g<H>(h: H) where H: Handler<()> {}\nfn h() {}",
        ));
        assert_eq!(found.len(), 2, "{found:?}");
    }

    const WALK: &str = "\
## Walk

| function | file | what it does |
|---|---|---|
| `A::first` | `a.rs` | begins |
| `second` | `b.rs` | goes on |
| `third` | `b.rs` | goes on |
| `fourth` | `a.rs` | ends |
";

    fn walk_of(a: &str, b: &str) -> Vec<String> {
        let source = Source::of(&[("lib.rs", "mod a; mod b;"), ("a.rs", a), ("b.rs", b)]);
        match walks::steps(&source, &table("walk.md", WALK, "Walk")) {
            Ok(steps) => [walks::breaks(&steps, "end"), walks::returns(&steps)].concat(),
            Err(missing) => missing,
        }
    }

    #[test]
    fn a_walk_is_followed_through_calls_of_all_kinds() {
        let (a, b) = (
            "impl<T> A<T> { fn first() { x.map(second); x.fourth() } } fn fourth() { x.end() }",
            "fn second() { log!(\"{}\", self.third(1)) } fn third() {}",
        );
        assert_eq!(walk_of(a, b), [""; 0]);
    }

    #[test]
    fn a_walk_that_is_not_there_is_found() {
        let (a, b) = ("impl A { fn first() { second() } } fn fourth() { end() }", "fn second() { third() }");
        assert_eq!(walk_of(a, b), ["walk.md:7: there is no function `third` in b.rs"]);
        let b = "fn second() { third() } fn third() { }";
        assert_eq!(walk_of(a, b), ["walk.md:8: `fourth` is called by none of [\"first\", \"second\", \"third\"]"]);
        let (a, b) =
            ("impl A { fn first() { second(); fourth() } } fn fourth() { }", "fn second() { third() } fn third() { }");
        assert_eq!(walk_of(a, b), ["walk.md:8: nothing on the way calls `end`"]);
    }

    #[test]
    fn a_way_back_to_a_file_is_found() {
        let (a, b) = (
            "impl A { fn first() { second() } } fn fourth() { end() }",
            "fn second() { third() } fn third() { fourth() }",
        );
        assert_eq!(walk_of(a, b), ["walk.md:8: `fourth` leads back to a.rs, which was left"]);
    }

    #[test]
    fn a_step_that_has_returned_calls_nothing_any_more() {
        // `first` calls `fourth` itself, after `second`, so the calls of `third` are not looked at.
        let (a, b) = (
            "impl A { fn first() { second(); fourth() } } fn fourth() { }",
            "fn second() { third() } fn third() { end() }",
        );
        assert_eq!(walk_of(a, b), ["walk.md:8: nothing on the way calls `end`"]);
    }

    fn look_ups_of(body: &str) -> usize {
        let source = Source::of(&[("lib.rs", "mod a;"), ("a.rs", &format!("fn f() {{ {body} }}"))]);
        let walk = "## W\n| function | file | what it does |\n|---|---|---|\n| `f` | `a.rs` | |\n";
        let steps = walks::steps(&source, &table("walk.md", walk, "W")).expect("there is f");
        walks::look_ups(&steps)
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
            assert_eq!(look_ups_of(body), count, "{body}");
        }
    }
}
