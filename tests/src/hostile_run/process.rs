//! A process of this program. Its settings are one command-line argument. Orders are lines of its standard input. Each answer is a line of
//! JSON on its standard output.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rdma_reactor::ReactorHandle;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Result;
use crate::patience::PATIENCE;

/// The order to send a report.
pub const REPORT: &str = "report";
/// The order to begin the attack.
pub const GO: &str = "go";

/// Prints an answer: one line of JSON on standard output.
///
/// # Errors
/// Standard output is closed.
pub fn answer(what: &impl Serialize) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", serde_json::to_string(what)?)?;
    Ok(stdout.flush()?)
}

/// The real-time priority of the processes that must run before all others, as an argument of chrt(1).
const PRIORITY: &str = "10";

/// Runs `chrt` for the scheduling policy SCHED_FIFO with these arguments. Returns true if `chrt` has succeeded.
fn chrt(args: &[&str]) -> bool {
    let mut command = Command::new("chrt");
    command.arg("-f").args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Returns true if this user may give processes a real-time priority.
#[must_use]
pub fn may_be_first() -> bool {
    chrt(&[PRIORITY, "true"])
}

/// An order, as a message to the reactor of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The order to begin the attack.
    Go,
    /// The order to send a report.
    Report,
    /// The end of standard input, which is the order to end.
    End,
}

/// Starts a thread that reads orders from standard input and sends them to the reactor.
pub fn obey(remote: ReactorHandle<Order>) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(std::result::Result::ok) {
            let order = if line == GO { Order::Go } else { Order::Report };
            if remote.post(order).is_err() {
                return;
            }
        }
        let _ = remote.post(Order::End);
    });
}

/// A running process. Dropping this value kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    orders: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts the process `program ROLE SETTINGS`.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(program: &Path, role: &str, settings: &impl Serialize) -> Result<Self> {
        let mut command = Command::new(program);
        command.arg(role).arg(serde_json::to_string(settings)?).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("{}: {error}", program.display()))?;
        let orders = child.stdin.take().ok_or("no pipe")?;
        let lines = BufReader::new(child.stdout.take().ok_or("no pipe")?).lines();
        Ok(Self { child, orders, lines })
    }

    /// Waits for the next answer of the process.
    ///
    /// # Errors
    /// The process has ended, or its line is not an answer of this type.
    pub fn answer<T: DeserializeOwned>(&mut self) -> Result<T> {
        let line = self.lines.next().ok_or("a process of this program has ended early")??;
        serde_json::from_str(&line).map_err(|error| format!("{line}: {error}").into())
    }

    /// Sends an order to the process.
    ///
    /// # Errors
    /// The process has ended.
    pub fn order(&mut self, order: &str) -> Result<()> {
        Ok(writeln!(self.orders, "{order}")?)
    }

    /// Orders a report, and waits for it.
    ///
    /// # Errors
    /// Those of [`Self::order`] and [`Self::answer`].
    pub fn report<T: DeserializeOwned>(&mut self) -> Result<T> {
        self.order(REPORT)?;
        self.answer()
    }

    /// Gives the process a real-time priority. From then on, it runs before all processes without such a priority. See [`may_be_first`].
    ///
    /// # Errors
    /// This user may not do that.
    pub fn be_first(&self) -> Result<()> {
        match chrt(&["-p", PRIORITY, &self.child.id().to_string()]) {
            true => Ok(()),
            false => Err("chrt cannot assign a real-time priority".into()),
        }
    }

    /// Returns the total time for which the process was ready to run but had no processor.
    ///
    /// # Errors
    /// `/proc` does not report it.
    pub fn waited(&self) -> Result<Duration> {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.child.id()))?;
        let ns = text.split_whitespace().nth(1).and_then(|field| field.parse().ok());
        Ok(Duration::from_nanos(ns.ok_or("/proc/PID/schedstat has no time of waiting")?))
    }

    /// Returns the processor time that the process has used.
    ///
    /// # Errors
    /// `/proc` does not report it.
    pub fn processor_time(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // In `/proc/PID/stat`, the program's name is in parentheses and may contain blanks. The first field after it has the number 3.
        let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |field: usize| fields.get(field - 3).and_then(|text| text.parse::<u64>().ok()).ok_or("no time");
        // Linux reports these times to all programs in hundredths of a second.
        Ok(Duration::from_millis(10 * (ticks(14)? + ticks(15)?)))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Calls `ask` until it returns a value, and returns that value.
///
/// # Errors
/// `ask` fails, or returns no value within [`PATIENCE`].
pub fn until<T>(what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if let Some(found) = ask()? {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(format!("not within {} s: {what}", PATIENCE.as_secs()).into())
}
