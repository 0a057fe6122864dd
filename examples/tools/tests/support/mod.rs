//! Runs a program under test. Every wait for the program has a time limit.

#[path = "../patience/mod.rs"]
mod patience;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use patience::PATIENCE;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Stdout,
    Stderr,
}

/// The exit status and the output of a program that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Finished {
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Checks that the program succeeded and printed no error.
    #[track_caller]
    pub(crate) fn succeeded(&self) -> &Self {
        assert_eq!((self.code(), self.stderr.as_str()), (Some(0), ""), "{self:?}");
        self
    }

    /// Checks that the program failed, with one line on standard error that contains all of these words.
    #[track_caller]
    pub(crate) fn failed_with(&self, words: &[&str]) -> &Self {
        assert_eq!(self.code(), Some(1), "{self:?}");
        assert!(self.stderr.starts_with("rdma-pingpong: "), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in {self:?}");
        }
        self
    }
}

/// A running program. The program is killed when this value is dropped, or at its time limit.
#[derive(Debug)]
pub(crate) struct Program {
    child: Child,
    lines: Receiver<(Source, String)>,
    stdout: String,
    stderr: String,
    until: Instant,
}

impl Program {
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::start_with(args, |command| command)
    }

    pub(crate) fn start_with(args: &[&str], adapt: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdma-pingpong"));
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("RUST_LOG");
        let mut child = adapt(&mut command).spawn().expect("the program starts");
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            forward(stdout, Source::Stdout, sender.clone());
        }
        if let Some(stderr) = child.stderr.take() {
            forward(stderr, Source::Stderr, sender);
        }
        Self { child, lines, stdout: String::new(), stderr: String::new(), until: Instant::now() + PATIENCE }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("the program is there");
    }

    /// Returns the ids of the program's child processes that have not been waited for.
    pub(crate) fn children(&self) -> Vec<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.pid());
        let text = std::fs::read_to_string(path).expect("the program is there");
        text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Reads the next line of standard output or standard error, whichever has one first. Returns `None` after both have ended.
    fn next(&mut self) -> Option<(Source, String)> {
        let left = self.until.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok((source, line)) => {
                let kept = if source == Source::Stdout { &mut self.stdout } else { &mut self.stderr };
                kept.push_str(&line);
                Some((source, line))
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("too slow, or something holds its output open: {self:?}"),
        }
    }

    /// Waits for a line that contains `what`, and returns it.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, what: &str) -> String {
        while let Some((_, line)) = self.next() {
            if line.contains(what) {
                return line;
            }
        }
        panic!("it ended without {what:?}: {self:?}");
    }

    /// Waits until the program has ended, and until no other process holds the program's output open.
    pub(crate) fn finish(mut self) -> Finished {
        while self.next().is_some() {}
        let status = self.child.wait().expect("it can be waited for");
        Finished { status, stdout: std::mem::take(&mut self.stdout), stderr: std::mem::take(&mut self.stderr) }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn forward(stream: impl Read + Send + 'static, source: Source, to: Sender<(Source, String)>) {
    thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        while matches!(stream.read_line(&mut line), Ok(1..)) {
            if to.send((source, std::mem::take(&mut line))).is_err() {
                return;
            }
        }
    });
}

/// Runs a program and waits for its end.
pub(crate) fn run(args: &[&str]) -> Finished {
    Program::start(args).finish()
}

/// Starts a server on a free port of this machine. Returns the program and its address.
pub(crate) fn server() -> (Program, String) {
    // The command starts a server with the log level `info`, at which the server logs each client that connects.
    let args = ["server", "--bind", "127.0.0.1", "--port", "0"];
    let mut server = Program::start_with(&args, |command| command.env("RUST_LOG", "rdma_reactor_tools=info"));
    let line = server.wait_for("listening on ");
    let address = line.split_whitespace().nth(2).expect("an address").to_owned();
    (server, address)
}
