//! Tests of the documented commands: the targets of `make help`, and the lines of each shell block
//! in the documents. `tests/data/commands.txt` lists all of them, and how each one is tested. One
//! test compares this list with the documents. Another test runs the lines that are marked `now`,
//! each block in a separate folder.
#![allow(clippy::disallowed_methods, reason = "tests of programs, not of the library")]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A line of `tests/data/commands.txt`.
struct Row {
    how: String,
    reason: String,
    command: String,
}

/// The lines of one block of shell in a document.
struct Block {
    document: PathBuf,
    lines: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn rows() -> Vec<Row> {
    let text = fs::read_to_string(root().join("tests/data/commands.txt")).expect("the list");
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let row = |line: &str| {
        let mut parts = line.splitn(3, '|').map(|part| part.trim().to_owned());
        let mut next = || parts.next().unwrap_or_else(|| panic!("not HOW | REASON | COMMAND: {line}"));
        Row { how: next(), reason: next(), command: next() }
    };
    lines.map(row).collect()
}

/// Returns the blocks of shell of a text in Markdown. A comment, a final `&` and the breaks of long
/// lines are left out.
fn blocks(document: &Path, text: &str) -> Vec<Block> {
    let parts = text.split("\n```sh\n").skip(1).map(|rest| rest.split("\n```").next().unwrap_or_default());
    let line = |line: &str| {
        let code = line.find(" # ").map_or(line, |at| &line[..at]);
        code.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let block = |part: &str| {
        let whole = part.replace("\\\n", " ");
        Block { document: document.into(), lines: whole.lines().map(line).filter(|line| !line.is_empty()).collect() }
    };
    parts.map(block).collect()
}

/// Adds the documents in a folder and in those below it.
fn documents(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the project") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            documents(&path, found);
        } else if path.extension().is_some_and(|name| name == "md") {
            found.push(path);
        }
    }
}

fn all_blocks() -> Vec<Block> {
    let mut found: Vec<_> = ["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root().join(name)).into();
    ["docs", "examples", "tests"].iter().for_each(|folder| documents(&root().join(folder), &mut found));
    found.sort();
    let of = |path: &PathBuf| blocks(path, &fs::read_to_string(path).expect("a document"));
    found.iter().flat_map(of).collect()
}

/// Returns a line in the form in which the list has it: without a final `&`.
fn listed(line: &str) -> &str {
    line.trim_end_matches('&').trim_end()
}

/// Returns a command without the variables in front of it.
fn bare(command: &str) -> &str {
    let mut rest = command;
    while let Some((word, after)) = rest.split_once(' ') {
        if !word.contains('=') || word.contains('\'') {
            break;
        }
        rest = after;
    }
    rest
}

/// Returns the errors of a list: commands that are missing in it, and lines whose command is in no
/// document.
fn compare(rows: &[Row], wanted: &BTreeSet<String>) -> Vec<String> {
    let has = |command: &String| rows.iter().any(|row| row.command == *command || bare(&row.command) == command);
    let mut wrong: Vec<_> =
        wanted.iter().filter(|command| !has(command)).map(|one| format!("not listed: {one}")).collect();
    for row in rows {
        match row.how.as_str() {
            "ci" | "now" | "soak" | "hand" => {}
            other => wrong.push(format!("how is {other}? {}", row.command)),
        }
        if matches!(row.how.as_str(), "soak" | "hand") && row.reason.is_empty() {
            wrong.push(format!("no reason: {}", row.command));
        }
        // A job of `make soak` needs no document.
        if row.how != "soak" && !wanted.contains(&row.command) {
            wrong.push(format!("in no document: {}", row.command));
        }
    }
    wrong
}

fn wanted() -> BTreeSet<String> {
    let help = Command::new("make").args(["-s", "help"]).current_dir(root()).env_remove("MAKEFLAGS").output();
    let help = String::from_utf8(help.expect("make").stdout).expect("text");
    let target = |line: &str| Some(format!("make {}", line.strip_prefix("  make ")?.split_whitespace().next()?));
    let mut wanted: BTreeSet<_> = help.lines().filter_map(target).collect();
    assert!(wanted.len() > 30, "{help}");
    let blocks = all_blocks();
    wanted.extend(blocks.iter().flat_map(|block| &block.lines).map(|line| listed(line).to_owned()));
    wanted
}

#[test]
fn each_command_is_listed() {
    let wrong = compare(&rows(), &wanted());
    assert!(wrong.is_empty(), "tests/data/commands.txt:\n{}", wrong.join("\n"));
}

#[test]
fn a_command_that_is_not_listed_is_found() {
    let row = |how: &str, reason: &str, command: &str| Row {
        how: how.into(),
        reason: reason.into(),
        command: command.into(),
    };
    let list = [row("soak", "hours", "N=1 make a"), row("now", "", "b"), row("hand", "", "c"), row("often", "", "c")];
    let text = "text\n```sh\nmake a    # does it\nd \\\n    --flag &\nc\n```\n";
    let lines: BTreeSet<_> = blocks(Path::new("a.md"), text).iter().flat_map(|block| block.lines.clone()).collect();
    let wanted = lines.iter().map(|line| listed(line).to_owned()).collect();
    assert_eq!(
        compare(&list, &wanted),
        ["not listed: d --flag", "in no document: b", "no reason: c", "how is often? c"]
    );
}

/// The replacements that make a line short: fewer messages, less time.
const SHORTER: [(&str, &str); 4] =
    [("-n 100000", "-n 100"), ("-D 10", "-D 1"), ("--seconds 3", "--seconds 1"), (" -a ", " -a -n 10 ")];

/// Returns a script with the lines of a block that are marked `now`, or `None` if there are none.
/// The script ends at the first command that fails, and kills its servers.
fn script(block: &Block, now: &BTreeSet<&str>) -> Option<String> {
    let lines: Vec<_> = block.lines.iter().filter(|line| now.contains(listed(line))).collect();
    if lines.is_empty() {
        return None;
    }
    let mut text = String::from(
        "set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n\
         cargo() { while [ \"$1\" != --bin ]; do shift; done; local name=$2; shift 2; [ \"$1\" != -- ] || shift; \"$name\" \"$@\"; }\n",
    );
    for line in lines {
        let short = SHORTER.iter().fold(line.clone(), |line, (long, short)| line.replace(long, short));
        text += &format!("echo '$ '{}\n", quoted(&short));
        text += &short;
        // A user waits until the server listens before typing the next command.
        text += if short.ends_with('&') { "\nlistening $!\n" } else { "\n" };
    }
    Some(text)
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[test]
fn the_commands_of_the_documents_work() {
    let (rows, folder) = (rows(), Path::new(env!("CARGO_TARGET_TMPDIR")).join("commands"));
    let now: BTreeSet<_> = rows.iter().filter(|row| row.how == "now").map(|row| row.command.as_str()).collect();
    let programs = Path::new(env!("CARGO_BIN_EXE_rdma-pingpong")).parent().expect("the folder of programs");
    let (mut ran, mut failed) = (0, Vec::new());
    for block in all_blocks() {
        let Some(script) = script(&block, &now) else { continue };
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("target/demo/incoming")).expect("a folder");
        for name in ["stream-pipe", "kv", "rcp", "rdma-pingpong", "rdma-doctor"] {
            symlink(programs.join(name), folder.join("target/demo").join(name)).expect("a link");
        }
        for name in ["file", "backup.tar"] {
            fs::write(folder.join("target/demo").join(name), [7; 100_000]).expect("a file");
        }
        let path = format!("{}/target/demo:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
        // The shell function `listening` returns when a process has a listening socket.
        let listening = "listening() { for _ in {1..600}; do kill -0 $1; for fd in /proc/$1/fd/*; do \
                         case $(readlink $fd) in socket:*) inode=$(readlink $fd); inode=${inode//[!0-9]/}; \
                         awk -v inode=$inode '$4 == \"0A\" && $10 == inode { found = 1 } END { exit !found }' \
                         /proc/net/tcp /proc/net/tcp6 && return;; esac; done; sleep 0.1; done; false; }\n";
        let output = Command::new("timeout")
            .args(["120", "bash", "-c", &format!("{listening}{script}")])
            .current_dir(&folder)
            .env("PATH", path)
            .output()
            .expect("bash");
        ran += 1;
        if !output.status.success() {
            let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
            failed.push(format!("{}:\n{script}\n{said}", block.document.display()));
        }
    }
    let _ = fs::remove_dir_all(&folder);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(ran >= 4, "{ran} blocks ran");
}

/// Returns a command without the environment variables that would make Git use another repository
/// than that of its folder.
fn outside(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    ["GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"].iter().for_each(|name| _ = command.env_remove(name));
    command
}

/// The script of `make publish`, in a repository of the test, stops with one line that names what
/// is missing. Otherwise it tags the version, and prints the commands that upload it.
#[test]
fn publishing_stops_at_what_is_missing() {
    for library in ["transport", "transport/embedded", "transport/verbs", "reactor"] {
        let manifest = fs::read_to_string(root().join(library).join("Cargo.toml")).expect("a manifest");
        assert!(manifest.contains("\nrepository.workspace = true\n"), "{library}");
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("publish");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("tests")).expect("a folder");
    fs::copy(root().join("tests/publish.sh"), folder.join("tests/publish.sh")).expect("the script");
    let package = folder.join("tests/package.sh");
    fs::write(&package, "#!/bin/sh\necho packed\n").expect("a file");
    assert!(Command::new("chmod").arg("+x").arg(&package).status().expect("it ran").success());
    let git = |arguments: &[&str]| {
        let output = outside("git").args(arguments).current_dir(&folder).output().expect("it ran");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    git(&["init", "-q"]);
    for (name, value) in [
        ("user.name", "tests"),
        ("user.email", "tests@example.com"),
        ("commit.gpgSign", "false"),
        ("tag.gpgSign", "false"),
    ] {
        git(&["config", name, value]);
    }
    let manifest = |repository: &str, libraries: &str| {
        let library = |nth| format!("library-{nth} = {{ path = \"{nth}\", version = \"{libraries}\" }}\n");
        let libraries: String = (0..4).map(library).collect();
        format!("version = \"0.2.0\"\nrepository = \"{repository}\"\n{libraries}")
    };
    let run = || {
        let output = outside(folder.join("tests/publish.sh")).output().expect("it ran");
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (output.status.code(), text)
    };
    let publish = |manifest: &str, changes: &str| {
        fs::write(folder.join("Cargo.toml"), manifest).expect("a file");
        fs::write(folder.join("CHANGELOG.md"), changes).expect("a file");
        git(&["add", "."]);
        git(&["commit", "-q", "--allow-empty", "-m", "A version"]);
        run()
    };
    let (address, changes) = ("https://git.example/rdma", "## [0.2.0] - 2027-01-01\n");
    for (manifest, changes, words) in [
        (manifest("", "0.2.0"), changes, "`repository` in Cargo.toml is empty"),
        (manifest(address, "0.1.0"), changes, "do not all have the version 0.2.0"),
        (manifest(address, "0.2.0"), "## [Unreleased]\n", "no section [0.2.0]"),
    ] {
        let (status, [_, error]) = publish(&manifest, changes);
        assert!(status == Some(1) && error.lines().count() == 1 && error.contains(words), "{words}: {error}");
    }
    let (status, [text, error]) = publish(&manifest(address, "0.2.0"), changes);
    assert!(status == Some(0) && text.starts_with("packed\n"), "{error}");
    assert!(text.contains(address) && text.contains("cargo publish -p rdma-reactor\n"), "{text}");
    assert_eq!(git(&["tag", "--points-at", "HEAD"]), "v0.2.0");
    let (status, [_, error]) = run();
    assert_eq!(status, Some(0), "the same commit: {error}");
    let (status, [_, error]) = publish(&manifest(address, "0.2.0"), changes);
    assert!(status == Some(1) && error.contains("v0.2.0 names another commit"), "{error}");
    fs::write(folder.join("new"), "").expect("a file");
    let (status, [_, error]) = run();
    assert!(status == Some(1) && error.contains("changed or new"), "{error}");
}
