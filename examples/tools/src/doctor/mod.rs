//! `rdma-doctor` reports which RDMA devices and providers this machine can use, and what is missing.
//!
//! The program reads the state of the machine from files of the system ([`tree`]), and tests the embedded provider ([`embedded`]). It
//! changes nothing and does not use netlink. Each module examines one topic and returns its findings ([`finding`]); [`report`] prints them.

pub mod cli;
pub mod counters;
pub mod credentials;
pub mod device;
pub mod embedded;
pub mod finding;
pub mod gid;
pub mod library;
pub mod memlock;
pub mod module;
pub mod netdev;
pub mod node;
pub mod port;
pub mod report;
pub mod route;
pub mod tree;

use std::ffi::OsString;
use std::process::{self, ExitCode};

use self::cli::DoctorArgs;
use self::counters::CounterChanges;
use self::credentials::Credentials;
use self::device::Device;
use self::finding::Finding;
use self::module::Modules;
use self::netdev::Netdevs;
use self::report::DoctorReport;
use self::route::Route;
use self::tree::SystemTree;
use crate::pingpong::failure::Failure;
use crate::pingpong::output::Output;
use crate::{program, signals};

/// Runs the program: reads the command line, examines the machine, and prints the findings.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    program::main(args, run)
}

fn run(cli: DoctorArgs) -> Result<ExitCode, Failure> {
    // The program changes nothing, so a signal ends it immediately.
    signals::on_signals(|| process::exit(130))?;
    let report = examine(&cli)?;
    let mut output = Output::stdout();
    if cli.json {
        output.line(report.json()?);
    } else {
        report.print(&mut output);
    }
    Ok(if report.works() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Examines the machine. Returns all findings.
///
/// # Errors
/// An argument is not an address.
pub fn examine(cli: &DoctorArgs) -> Result<DoctorReport, Failure> {
    let tree = SystemTree::new(&cli.root);
    let targets = route::targets(&cli.addresses)?;
    let account = Credentials::read(&tree);
    let netdevs = Netdevs::read(&tree);
    let devices = Device::all(&tree, &netdevs);
    let modules = Modules::read(&tree);

    let embedded = embedded::probe();
    let mut findings = vec![embedded::finding(&embedded)];
    findings.push(embedded::shared_memory(&embedded::probe_shared_memory()));
    findings.push(build());
    findings.extend(device::findings(&devices, &modules, &netdevs));
    findings.extend(modules.findings(!devices.is_empty()));
    findings.extend(node::findings(&tree, &account, &devices));
    findings.extend(memlock::finding(&tree, &account, !devices.is_empty()));
    findings.extend(library::findings(&tree, &devices));
    let ways: Vec<Route> = targets.iter().map(|target| Route::find(*target, &tree, &netdevs, &devices)).collect();
    findings.extend(ways.iter().map(Route::finding));
    let moved = cli.watch.map_or_else(Vec::new, |time| CounterChanges::watch(&tree, &devices, time));
    findings.extend(moved.iter().flat_map(|moved| moved.findings(cli.watch.unwrap_or_default())));
    Ok(DoctorReport { embedded: embedded.is_ok(), verbs: route::HAS_VERBS, findings, devices, addresses: ways, moved })
}

/// Returns the finding about the features that this program was built with.
fn build() -> Finding {
    let version = env!("CARGO_PKG_VERSION");
    if route::HAS_VERBS {
        Finding::ok("build", format!("version {version}, with RDMA devices (feature verbs)"))
    } else {
        Finding::note("build", format!("version {version} without RDMA devices: auto always uses iwarp"))
            .fix("cargo build --release")
    }
}
