//! One run of the program: parses the command line, runs the reactor, and writes the output files of rank 0.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rdma_reactor::{Config, Reactor, system_entropy};

use super::cli::MeshArgs;
use super::control::Entry;
use super::coordinator::RunPlan;
use super::follower::Follower;
use super::launcher::{self, RankOptions, RankSettings};
use super::leader::Leader;
use super::member::{Limits, Member};
use super::rank::{Rank, RankPart, anywhere, chosen};
use super::report::Report;
use super::results::Results;
use super::task::TaskExtent;
use super::{figures, frame, heatmap, page, prometheus, slurm};
use crate::doctor::device::Device;
use crate::doctor::netdev::Netdevs;
use crate::doctor::route::source_of;
use crate::doctor::tree::SystemTree;
use crate::pingpong::address::resolve;
use crate::pingpong::device::Carrier;
use crate::pingpong::failure::Failure;
use crate::pingpong::file::ResultFile;
use crate::pingpong::interrupt::Interrupt;
use crate::pingpong::output::Output;

/// The smallest number of ranks with which all links of a rank share one receive queue, so that idle links use little memory.
const SHARE_FROM: usize = 65;
/// The time limit for sending the last messages at the end of a run.
const GOODBYE: Duration = Duration::from_secs(3);

/// The files that rank 0 writes. They are opened before the run, so that a wrong file name is reported before the measurements.
#[derive(Debug)]
struct OutputFiles {
    json: Option<ResultFile>,
    json_to_stdout: bool,
    prometheus: Option<ResultFile>,
    svg: Option<ResultFile>,
    html: Option<ResultFile>,
}

impl OutputFiles {
    fn open(cli: &MeshArgs) -> Result<Self, Failure> {
        let open = |flag, path: &Option<std::path::PathBuf>| {
            path.as_deref().filter(|path| *path != Path::new("-")).map(|path| ResultFile::open(flag, path)).transpose()
        };
        Ok(Self {
            json: open("--json", &cli.json)?,
            json_to_stdout: cli.json.as_deref() == Some(Path::new("-")),
            prometheus: open("--prometheus", &cli.prometheus)?,
            svg: open("--svg", &cli.svg)?,
            html: open("--html", &cli.html)?,
        })
    }

    fn write(self, report: &Report<'_>) -> Result<(), Failure> {
        let json = || format!("{:#}\n", figures::json(report));
        if self.json_to_stdout {
            Output::stdout().text(&json());
        }
        let texts: [(Option<ResultFile>, &dyn Fn() -> String); 4] = [
            (self.json, &json),
            (self.prometheus, &|| prometheus::text(report)),
            (self.svg, &|| heatmap::svg(report)),
            (self.html, &|| page::html(report)),
        ];
        for (file, text) in texts {
            if let Some(file) = file {
                file.write(&text())?;
            }
        }
        Ok(())
    }
}

/// Takes part in a run, with this process as one rank.
///
/// # Errors
/// The command line or the environment is incomplete, rank 0 is unreachable or fails, or a file cannot be written.
pub fn run(cli: MeshArgs) -> Result<ExitCode, Failure> {
    let hosts = hosts(&cli)?;
    let place = place(&cli, hosts.clone())?;
    let files = if place.rank == 0 { Some(OutputFiles::open(&cli)?) } else { None };
    let carrier = Carrier::new(&cli.device)?;
    raise_descriptor_limit(place.ranks);
    let mut reactor = Reactor::new(config(&cli, &place, &carrier)?)?;
    let interrupt = Interrupt::on_signals()?;
    interrupt.stops(reactor.handle());
    let mut rank = rank(&cli, &place, hosts, &carrier)?;
    rank.begin(&mut reactor.context())?;
    while !rank.is_over() {
        reactor.run(&mut rank)?;
        if interrupt.is_raised() && !rank.is_over() {
            rank.interrupt(&mut reactor.context());
        }
    }
    reactor.shutdown(&mut rank, GOODBYE)?;
    let (leader, interrupted) = (rank.finish()?, interrupt.is_raised());
    match (leader, files) {
        (Some(leader), Some(files)) => report(&cli, leader.results(), files, interrupted),
        _ => Ok(if interrupted { ExitCode::from(130) } else { ExitCode::SUCCESS }),
    }
}

fn report(cli: &MeshArgs, results: &Results, files: OutputFiles, interrupted: bool) -> Result<ExitCode, Failure> {
    let report = Report::new(results, cli.tolerance);
    let mut output = if files.json_to_stdout { Output::stderr() } else { Output::stdout() };
    output.text(&report.text(cli.worst));
    files.write(&report)?;
    Ok(match (interrupted, report.is_good()) {
        (true, _) => ExitCode::from(130),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::FAILURE,
    })
}

fn hosts(cli: &MeshArgs) -> Result<Vec<String>, Failure> {
    let Some(path) = &cli.ranks else { return Ok(cli.hosts.clone()) };
    let failed = |what: String| Failure::new(format!("--ranks {}: {what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    launcher::hosts_of_file(&text).map_err(|failure| failed(failure.to_string()))
}

fn place(cli: &MeshArgs, hosts: Vec<String>) -> Result<RankSettings, Failure> {
    let given = RankOptions {
        rank: cli.rank,
        count: cli.count.map(|count| count as usize),
        hosts,
        root: cli.root.clone(),
        label: cli.label.clone(),
    };
    launcher::place(&given, &|name| std::env::var(name).ok(), &slurm::first_host)
}

/// Returns the settings of the reactor. A link has at most one measurement in progress, so it needs little memory.
fn config(cli: &MeshArgs, place: &RankSettings, carrier: &Carrier) -> Result<Config, Failure> {
    // The number of connections: the links, the control connections of rank 0, and 64 more for connections that one side has given up
    // but not yet closed.
    let others = u32::try_from(place.ranks).map_err(Failure::new)?;
    let links = if place.rank == 0 { 2 * others } else { others } + 64;
    // Each connection needs five receives of the shared queue, and the library reserves an eighth of the queue. Eight receives per
    // connection are enough for both.
    let shared = (place.ranks >= SHARE_FROM).then(|| (8 * links).min(32_768));
    let connect = Duration::from_secs(10).min(cli.patience);
    Ok(Config::default()
        .provider(carrier.provider)
        .wait(cli.wait.policy()?)
        .buffer_size(frame::LOAD as u32)
        .receive_depth(16)
        .send_depth(16)
        .shared_receives(shared)
        .max_connections(2 * links)
        .max_pending(links)
        // Many ranks may share a host and therefore an address, so the limit for each address covers all links.
        .max_handshakes_per_peer(Some(links as usize))
        .security(cli.device.security.security()?)
        // Bandwidth is measured by RDMA Writes of meaningless bytes, which need no encryption.
        .allow_plain_remote_memory(true)
        .timeouts(|t| (t.connect, t.handshake) = (connect, connect))
        // With the default limit, a link to a busy rank of the same host could fall back to TCP.
        .iwarp(|i| i.within_host.meeting_timeout = connect / 2)
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (cli.silence / 3, cli.silence)))
}

fn rank(cli: &MeshArgs, place: &RankSettings, hosts: Vec<String>, carrier: &Carrier) -> Result<Rank, Failure> {
    let now = Instant::now();
    let extent = TaskExtent { size: cli.size as usize, iterations: cli.iters, bandwidth: cli.bandwidth };
    // If a link is cut during a measurement, the rank detects this only after `silence`. So the limit includes `silence`.
    let measure = cli.bandwidth + cli.silence + Duration::from_secs(5);
    let (ranks, patience, silence) = (place.ranks, cli.patience, cli.silence);
    let connects = cli.connects as usize;
    let mut entropy = system_entropy();
    let mut run = [0; 8];
    entropy(&mut run);
    let own = cli.bind.or_else(|| carrier.address());
    let (part, root) = if place.rank == 0 {
        let plan = RunPlan {
            ranks,
            patience,
            // Rank 0 waits two seconds longer than the rank that measures, so the measuring rank can still report that its measurement has
            // failed.
            measure: measure + Duration::from_secs(2),
            bandwidth: !cli.bandwidth.is_zero(),
            load: (!cli.all_to_all.is_zero()).then_some(cli.all_to_all),
            silence,
            at_once: cli.at_once.map_or(usize::MAX, |pairs| pairs as usize),
            tolerance: cli.tolerance,
        };
        // The name of rank 0 may be unknown on rank 0 itself, although other ranks can resolve it. Rank 0 then listens on IPv4.
        let root = resolve(&place.root, cli.port).ok().and_then(|found| found.first().copied());
        let leader = Leader::new(plan, hosts, u64::from_le_bytes(run).max(1), now);
        (RankPart::Leader(Box::new(leader)), root.map(|root| root.ip()))
    } else {
        let root = (place.root.clone(), cli.port);
        let known = resolve(&root.0, root.1).ok().and_then(|found| found.first().map(SocketAddr::ip));
        let source = own.and_then(chosen);
        let follower = Follower::new((place.rank, ranks), root, source, (now, now + patience));
        (RankPart::Follower(follower), known)
    };
    let ip = own.unwrap_or_else(|| root.map_or(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), anywhere));
    let port = place.port.unwrap_or(if place.rank == 0 { root_port(place, cli.port) } else { 0 });
    let (provider, device) = device(cli, own.or_else(|| source_of(SocketAddr::new(root?, cli.port))));
    let limits = Limits { connects, patience, silence, extent, measure, load: cli.all_to_all };
    let member = Member::new(place.rank, ranks, limits, device.clone(), now);
    let host = place.label.clone().unwrap_or_else(host_name);
    let processors = std::thread::available_parallelism().ok().map(NonZero::get);
    let entry = Entry { host, address: None, port, provider, device, processors };
    log::info!("rank {} of {ranks}, from {}; rank 0 is at {}", place.rank, place.launcher, place.root);
    Ok(Rank::new(member, part, SocketAddr::new(ip, port), entry, entropy))
}

/// Returns the port that rank 0 listens on: the one from `--root HOST:PORT`, or else the default port.
fn root_port(place: &RankSettings, usual: u16) -> u16 {
    resolve(&place.root, usual).ok().and_then(|found| found.first().map(SocketAddr::port)).unwrap_or(usual)
}

/// Returns the names of the provider and the device for an address of this machine.
fn device(cli: &MeshArgs, own: Option<IpAddr>) -> (String, String) {
    use crate::pingpong::cli::Provider;
    let tree = SystemTree::new("/");
    let devices = || Device::all(&tree, &Netdevs::read(&tree));
    let found = match (cli.device.provider, own) {
        (Provider::Iwarp | Provider::Shm, _) | (_, None) => None,
        (_, Some(own)) => devices().into_iter().find(|device| device.has_address(own)),
    };
    found.map_or_else(|| ("iwarp".into(), "iwarp0".into()), |device| ("verbs".into(), device.name))
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map_or_else(|_| "?".into(), |name| name.trim().to_owned())
}

/// Raises the limit of descriptors, because each link of the embedded provider needs one. A failure is only logged: if descriptors run out,
/// the failed links are reported.
fn raise_descriptor_limit(ranks: usize) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let wanted = 2 * ranks as u64 + 100;
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    if soft < wanted {
        if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, wanted.min(hard), hard) {
            log::warn!("{soft} descriptors where up to {wanted} are needed: {error}; raise it with ulimit -n");
        }
    }
}
