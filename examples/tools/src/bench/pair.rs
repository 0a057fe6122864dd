//! Runs two processes, each on a separate processor: a server, which prints its address, and a client, which prints its result.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::{self, Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use core_affinity::CoreId;
use rdma_reactor::{Handler, Reactor};

use crate::pingpong::failure::Failure;
use crate::pingpong::server::LISTENING;

use super::interrupt;

/// The first argument of `bench` that makes the program behave as `rdma-pingpong`.
pub const PINGPONG: &str = "pingpong";

/// The processors that this process may use. The server runs on the first one, the client on the
/// second. If the list is empty (the default), both run on any processor.
// local: processors of the machine
#[derive(Debug, Default)]
pub struct Processors {
    all: Vec<CoreId>,
}

impl Processors {
    /// Returns the processors that this process may use.
    #[must_use]
    pub fn of_this_machine() -> Self {
        Self { all: core_affinity::get_core_ids().unwrap_or_default() }
    }

    /// Returns the number of processors that this process may use.
    #[must_use]
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Returns the number of the server's processor, and the number of the client's processor.
    #[must_use]
    pub fn numbers(&self) -> [usize; 2] {
        match self.all[..] {
            [first, second, ..] => [first.id, second.id],
            _ => [0, 0],
        }
    }

    /// Moves this thread to one of the two processors: to the server's if `index` is 0, to the client's if it is 1. Child processes that
    /// this thread starts later run on the same processor.
    pub fn choose(&self, index: usize) {
        if let [first, second, ..] = self.all[..] {
            if !core_affinity::set_for_current([first, second][index]) {
                log::warn!("cannot run on processor {index}");
            }
        }
    }
}

impl fmt::Display for Processors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.all[..] {
            [first, second, ..] => write!(f, "server on processor {}, client on {}", first.id, second.id),
            _ => f.write_str("one processor for both sides, so no probe of a distance: spinning is at its worst here"),
        }
    }
}

/// The time limit within which a server must begin to listen.
const PATIENCE: Duration = Duration::from_secs(10);

/// A child process. Dropping this value kills the process, so that no process outlives its round.
#[derive(Debug)]
pub struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // `kill` fails if the process has already ended. This failure is ignored.
        let _ = self.0.kill();
        if let Err(error) = self.0.wait() {
            log::warn!("waiting for a child: {error}");
        }
    }
}

/// The time limit of a client of this library and of `openssl`, in seconds. A round takes far less time.
const LIMIT: &str = "300";

/// Returns a command that runs a client's program and ends it at the time limit, so that a hang fails only its round.
pub fn limited(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "10", LIMIT]).arg(program);
    command
}

/// Describes the end of a client that has failed, with its output on standard error.
pub fn failure(output: &Output) -> String {
    match output.status.code() {
        Some(124 | 137) => format!("it did not end within {LIMIT} s"),
        _ => format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)),
    }
}

/// Runs this program twice, as a server and as a client. Returns the output of the client. `{}` in the client's arguments is replaced
/// by the server's address.
///
/// # Errors
/// One of the two processes failed.
pub fn run(processors: &Processors, server: &[String], client: &[String]) -> Result<String, Failure> {
    let failed = |what: &str, why: &dyn fmt::Display| Failure::new(format!("{what} {why}"));
    let program = std::env::current_exe().map_err(|error| failed("finding this program:", &error))?;
    processors.choose(0);
    let mut command = Command::new(&program);
    // Each child process ends when its standard input closes; the client also ends when its server
    // ends. The pipes close even if this process is killed, so no child process outlives this
    // process. Both children get their own process groups, so that Ctrl-C signals only this
    // process.
    command.args(server).process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut server = Guard(command.spawn().map_err(|error| failed("starting a server:", &error))?);
    interrupt::ends(0, server.0.stdin.take());
    let mut line = String::new();
    // This end of the pipe stays open until the function returns: the server may print more lines, and would fail on a closed pipe.
    let mut stdout = server.0.stdout.take().map(BufReader::new);
    if let Some(stdout) = &mut stdout {
        stdout.read_line(&mut line).map_err(|error| failed("reading from a server:", &error))?;
    }
    let address = line.strip_prefix(LISTENING).and_then(|rest| rest.split_whitespace().next());
    let address = address.ok_or_else(|| failed("a server did not start:", &line))?;
    processors.choose(1);
    let args = client.iter().map(|arg| if arg == "{}" { address } else { arg });
    let mut command = limited(&program);
    command.args(args).process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = command.spawn().map_err(|error| failed("starting a client:", &error))?;
    interrupt::ends(1, client.stdin.take());
    let output = client.wait_with_output().map_err(|error| failed("reading from a client:", &error))?;
    if !output.status.success() {
        return Err(failed("a client failed:", &failure(&output)));
    }
    String::from_utf8(output.stdout).map_err(|error| failed("a client printed", &error))
}

/// Starts a thread that ends this process when its standard input ends: the parent process has
/// ended, or a signal has ended the parent's measurement.
pub fn end_with_stdin() {
    thread::spawn(|| {
        // A read error counts as the end of the input.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        process::exit(1);
    });
}

/// Runs a server of this library: prints its address, and accepts connections until the process is killed.
///
/// # Errors
/// A system call failed.
pub fn serve(mut reactor: Reactor, handler: &mut impl Handler) -> Result<(), Failure> {
    let mut context = reactor.context();
    let listener = context.listen((Ipv4Addr::LOCALHOST, 0).into()).map_err(Failure::new)?;
    let address = context.listeners().local_address(listener).ok_or_else(|| Failure::new("the listener is gone"))?;
    println!("{LISTENING}{address}");
    reactor.run(handler).map_err(Failure::new)
}

/// Returns true if the search path contains the program.
#[must_use]
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Returns a TCP port that is free now, for a server that cannot choose one.
///
/// # Errors
/// A system call failed.
pub fn free_port() -> Result<u16, Failure> {
    let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
    Ok(address.map_err(|error| Failure::new(format!("a free port: {error}")))?.port())
}

/// Starts the server of another project's program, and waits until it listens. Then moves this thread to the client's processor, so that
/// the child processes that it starts later run on that processor.
///
/// # Errors
/// The program does not start, or does not listen.
pub fn start(processors: &Processors, mut command: Command, port: u16) -> Result<Guard, Failure> {
    let line = format!("{command:?}");
    let failed = |why: &dyn fmt::Display| Failure::new(format!("the server {line}: {why}"));
    processors.choose(0);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = Guard(command.spawn().map_err(|error| failed(&error))?);
    let started = Instant::now();
    // Reads the system's tables instead of connecting. A test connection would look like the client, and many servers accept only one
    // client.
    while !listens(port).map_err(|error| failed(&error))? {
        if let Some(status) = server.0.try_wait().map_err(|error| failed(&error))? {
            return Err(failed(&format!("ended with {status}")));
        }
        if started.elapsed() > PATIENCE {
            return Err(failed(&format!("does not listen on port {port} after {PATIENCE:?}")));
        }
        thread::sleep(Duration::from_millis(10));
    }
    processors.choose(1);
    Ok(server)
}

/// Returns true if a socket of this machine listens on a port.
fn listens(port: u16) -> io::Result<bool> {
    let tables = fs::read_to_string("/proc/net/tcp")? + &fs::read_to_string("/proc/net/tcp6").unwrap_or_default();
    let address = format!(":{port:04X}");
    Ok(tables.lines().any(|line| {
        let mut cells = line.split_whitespace().skip(1);
        cells.next().is_some_and(|local| local.ends_with(&address)) && cells.nth(1) == Some("0A")
    }))
}
