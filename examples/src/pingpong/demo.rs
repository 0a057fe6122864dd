//! `rdma-pingpong demo`: a server process of its own, and a client.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};

use super::cli::{DeviceArgs, RunArgs};
use super::failure::{Ending, Failure};
use super::interrupt::Interrupt;
use super::plan::Plan;
use super::series::{Outputs, Series};
use super::server::LISTENING;

/// Runs `rdma-pingpong demo`.
///
/// # Errors
/// As `client`, and when the server process does not start.
pub fn run(args: &RunArgs) -> Result<Ending, Failure> {
    let plans = Plan::from_args(args)?;
    // What would stop the server process stops this one with one message instead of two.
    if let Some(plan) = plans.first() {
        plan.job.reactor(plan.provider)?;
    }
    let outputs = Outputs::open(args)?;
    let interrupt = Interrupt::on_signals()?;
    let server = ServerProcess::start(&args.device)?;
    Series::new(plans, Plan::selected_size(args), outputs).run(vec![server.address], &interrupt)
}

/// A server process; ends with this one, at the latest.
#[derive(Debug)]
pub struct ServerProcess {
    child: Child,
    /// Where it listens.
    pub address: SocketAddr,
    /// Held open: it says nothing more, but a closed pipe would be an error to it.
    _stdout: BufReader<ChildStdout>,
}

impl ServerProcess {
    /// Starts one on a free port of this machine, and waits until it listens.
    ///
    /// # Errors
    /// It did not come up.
    pub fn start(device: &DeviceArgs) -> Result<Self, Failure> {
        let cannot = |why: &str| Failure::new(format!("cannot start the server process: {why}"));
        let program = std::env::current_exe().map_err(|error| cannot(&error.to_string()))?;
        let mut command = Command::new(program);
        command.args(["server", "--bind", "127.0.0.1", "--port", "0", "--child"]);
        if let Some(name) = clap::ValueEnum::to_possible_value(&device.provider) {
            command.args(["--provider", name.get_name()]);
        }
        // A process group of its own: Ctrl-C is for this process, which ends the other one. Its standard input ends
        // with this process, however that happens.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|error| cannot(&error.to_string()))?;
        let mut line = String::new();
        let mut read = Err(cannot("it has no standard output"));
        if let Some(stdout) = child.stdout.take() {
            let mut stdout = BufReader::new(stdout);
            read = match stdout.read_line(&mut line) {
                Ok(_) => parse_listening(&line).map(|address| (address, stdout)).ok_or_else(|| cannot("it ended")),
                Err(error) => Err(cannot(&error.to_string())),
            };
        }
        match read {
            Ok((address, stdout)) => Ok(Self { child, address, _stdout: stdout }),
            Err(failure) => {
                end(&mut child);
                Err(failure)
            }
        }
    }
}

/// The address in a server's first line.
fn parse_listening(line: &str) -> Option<SocketAddr> {
    line.strip_prefix(LISTENING)?.split_whitespace().next()?.parse().ok()
}

/// Ends a process and waits for it.
fn end(child: &mut Child) {
    // One that has ended already is what is wanted.
    let _ = child.kill();
    if let Err(error) = child.wait() {
        log::warn!("waiting for the server process: {error}");
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}
