//! `rdma-pingpong demo` starts a server process and runs a client against it.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};

use rdma_reactor::{ListenOptions, ProviderChoice};

use super::address;
use super::cli::{DemoArgs, DeviceArgs};
use super::device::Carrier;
use super::failure::{Ending, Failure};
use super::interrupt::Interrupt;
use super::plan::Plan;
use super::series::{Outputs, Series};
use super::server::{LISTENING, PROVIDER};
use crate::doctor::embedded::probe_shared_memory;

/// Runs `rdma-pingpong demo`.
///
/// # Errors
/// Those of `rdma-pingpong client`, or the server process does not start.
pub fn run(args: &DemoArgs) -> Result<Ending, Failure> {
    let mut carrier = Carrier::new(&args.run.device)?;
    let bind = match &args.bind {
        Some(bind) => address::resolve(bind, 0)?[0].ip(),
        None => {
            carrier = carrier.or_first_device();
            carrier.address().unwrap_or(Ipv4Addr::LOCALHOST.into())
        }
    };
    carrier.check_own(SocketAddr::new(bind, 0))?;
    let mut plans = Plan::from_args(&args.run, carrier.provider)?;
    // Checks the settings before the server process starts. Otherwise a mistake would stop both processes, and the user would get two
    // messages.
    if let Some(plan) = plans.first() {
        let mut reactor = plan.job.reactor(plan.provider, &plan.security)?;
        let exchange = args.run.device.exchange();
        let options = exchange.map_or_else(ListenOptions::new, |exchange| ListenOptions::new().exchange(exchange));
        let listening = reactor.context().listen_with(SocketAddr::new(bind, 0), options);
        listening.map_err(|error| Failure::new(format!("{error}; check --bind")))?;
    }
    let outputs = Outputs::open(&args.run)?;
    let interrupt = Interrupt::on_signals()?;
    let server = ServerProcess::start(bind, carrier.provider, &args.run.device)?;
    for plan in &mut plans {
        plan.provider = server.provider;
    }
    // With `--all`, both transports within a host are measured: TCP and shared memory. `is_open` is true if the user has not selected a
    // provider and the server uses TCP.
    let is_open = (carrier.provider, server.provider) == (ProviderChoice::Auto, ProviderChoice::Iwarp);
    if args.run.all && is_open && probe_shared_memory().is_ok() {
        let shared = plans.clone().into_iter().map(|plan| Plan { provider: ProviderChoice::Shm, ..plan });
        plans.extend(shared.collect::<Vec<_>>());
    }
    Series::new(plans, Plan::selected_size(&args.run), outputs).run(vec![server.address], &interrupt)
}

/// A server process. Dropping this value ends the process.
#[derive(Debug)]
pub struct ServerProcess {
    child: Child,
    /// The address that the server listens on.
    pub address: SocketAddr,
    /// The provider that the server listens with. The client must use the same one.
    pub provider: ProviderChoice,
    /// The server's standard output. It must stay open, because a closed pipe would be an error for the server.
    _stdout: BufReader<ChildStdout>,
}

impl ServerProcess {
    /// Starts a server on the address `bind`, with a free port. Waits until the server listens.
    ///
    /// # Errors
    /// The server did not start.
    pub fn start(bind: IpAddr, provider: ProviderChoice, device: &DeviceArgs) -> Result<Self, Failure> {
        let cannot = |why: &str| Failure::new(format!("cannot start the server process: {why}"));
        let program = std::env::current_exe().map_err(|error| cannot(&error.to_string()))?;
        let mut command = Command::new(program);
        command.args(["server", "--bind", &bind.to_string(), "--port", "0", "--child"]);
        command.args(device.security.again()).args(device.exchange_again());
        match provider {
            ProviderChoice::Verbs => command.args(["--provider", "verbs"]),
            ProviderChoice::Iwarp => command.args(["--provider", "iwarp"]),
            ProviderChoice::Shm => command.args(["--provider", "shm"]),
            _ => &mut command,
        };
        // The server gets its own process group, so that Ctrl-C signals only this process. This process then ends the server. If this
        // process ends in another way, the server's standard input closes, and the server ends too.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|error| cannot(&error.to_string()))?;
        let mut line = String::new();
        let mut read = Err(cannot("it has no standard output"));
        if let Some(stdout) = child.stdout.take() {
            let mut stdout = BufReader::new(stdout);
            read = match stdout.read_line(&mut line) {
                Ok(_) => parse_listening(&line).map(|found| (found, stdout)).ok_or_else(|| cannot("it ended")),
                Err(error) => Err(cannot(&error.to_string())),
            };
        }
        match read {
            Ok(((address, found), stdout)) => {
                // A server with the shared-memory provider also listens on TCP, and prints the name of the TCP provider. So the provider
                // that this program requested is used instead.
                let provider = if provider == ProviderChoice::Shm { provider } else { found };
                Ok(Self { child, address, provider, _stdout: stdout })
            }
            Err(failure) => {
                end(&mut child);
                Err(failure)
            }
        }
    }
}

/// Parses the first line that a server prints. Returns the server's address and provider, or `None` if the line has another format.
fn parse_listening(line: &str) -> Option<(SocketAddr, ProviderChoice)> {
    let (address, rest) = line.strip_prefix(LISTENING)?.split_once(' ')?;
    let provider = match rest.strip_prefix(PROVIDER)?.split_once(')')?.0 {
        "verbs" => ProviderChoice::Verbs,
        "iwarp" => ProviderChoice::Iwarp,
        "shm" => ProviderChoice::Shm,
        _ => return None,
    };
    Some((address.parse().ok()?, provider))
}

/// Ends a process and waits for it.
fn end(child: &mut Child) {
    // `kill` fails if the process has already ended. This failure is ignored.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_says_where_it_is_and_what_it_uses() {
        let address = "10.77.1.1:7".parse().unwrap();
        let line = format!("{LISTENING}{address} {PROVIDER}verbs)\n");
        assert_eq!(parse_listening(&line), Some((address, ProviderChoice::Verbs)));
        assert_eq!(parse_listening(&line.replace("verbs", "magic")), None);
        assert_eq!(parse_listening("cannot listen"), None);
    }
}
