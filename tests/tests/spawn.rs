//! If a program spawns a future of `aio` on a multi-threaded runtime, the compiler must refuse it, with a message that says what to do
//! instead.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

/// The beginning of each compiled program: a function with the same bounds as `tokio::spawn`.
const SPAWN: &str = "#![allow(dead_code)]\n\
    fn spawn<F: std::future::Future + Send + 'static>(_: F) {}\n";

/// Returns the compiled libraries of the reactor in the folder of this test, the newest first. Some may be from other builds.
fn libraries(folder: &Path) -> Vec<PathBuf> {
    let files = folder.read_dir().expect("the folder of this test").map(|entry| entry.expect("an entry").path());
    let is_library = |path: &PathBuf| {
        let stem = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
        stem.starts_with("librdma_reactor-") && path.extension() == Some(OsStr::new("rlib"))
    };
    let mut found: Vec<_> = files.filter(is_library).collect();
    let age = |path: &PathBuf| path.metadata().and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    found.sort_by_key(|path| std::cmp::Reverse(age(path)));
    found
}

/// Compiles a program. Returns the compiler's messages, or `None` if no library of the reactor has `aio` and is of this compiler version.
fn compile(name: &str, program: &str) -> Option<String> {
    let own = std::env::current_exe().expect("a path");
    let folder = own.parent().expect("a folder");
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.rs", std::process::id()));
    std::fs::write(&source, format!("{SPAWN}{program}")).expect("room");
    // The output cannot be /dev/null, because the compiler would replace that file.
    let compiled = source.with_extension("rmeta");
    let messages = libraries(folder).into_iter().find_map(|library| {
        let output = Command::new("rustc")
            .args(["--edition", "2024", "--crate-type", "lib", "--emit", "metadata", "-o"])
            .arg(&compiled)
            .arg(format!("--extern=rdma_reactor={}", library.display()))
            .arg(format!("-Ldependency={}", folder.display()))
            .arg(&source)
            .output()
            .expect("rustc");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        // True if the library is of another compiler version or lacks `aio`. The next library is tried in this case.
        let unfit = text.contains("E0514") || text.contains("E0432") || text.contains("E0433");
        (!unfit).then_some(text)
    });
    std::fs::remove_file(&source).expect("it is there");
    // The file does not exist if the program did not compile.
    let _ = std::fs::remove_file(&compiled);
    messages
}

#[test]
fn the_cure_is_in_the_first_message() {
    for (name, program) in [
        (
            "connection",
            "fn f(conn: rdma_reactor::aio::AsyncConnection) { spawn(async move { conn.send(b\"x\").await }); }",
        ),
        ("received", "fn f(message: rdma_reactor::aio::Received) { spawn(async move { message.len() }); }"),
        (
            "listener",
            "fn f(listener: rdma_reactor::aio::AsyncListener) { spawn(async move { listener.accept().await.is_some() }); }",
        ),
        ("reactor", "fn f(net: rdma_reactor::aio::AsyncReactor) { spawn(async move { net.run(async {}) }); }"),
        ("stream", "fn f(stream: rdma_reactor::aio::AsyncStream) { spawn(async move { drop(stream) }); }"),
    ] {
        let messages = compile(name, program).expect("a library with `aio` was built with this test");
        let first = messages.split("\nerror").next().expect("a first part");
        assert!(
            first.contains("OneThreadOnly_UseSpawnLocal") && first.contains("between threads safely"),
            "{name}: {messages}"
        );
    }
}

#[test]
fn what_may_be_spawned_compiles() {
    let program = "fn f(message: rdma_reactor::DetachedMessage) { spawn(async move { message.len() }); }";
    assert_eq!(compile("detached", program).expect("a library with `aio` was built with this test"), "");
}
