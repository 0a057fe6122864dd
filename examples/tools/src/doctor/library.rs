//! The installed libraries of rdma-core.

use super::device::Device;
use super::finding::Finding;
use super::tree::SystemTree;

const DIRECTORIES: [&str; 5] = ["/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib"];
const LIBRARIES: [&str; 2] = ["libibverbs", "librdmacm"];
const DRIVERS: &str = "/etc/libibverbs.d";
/// The command that installs the libraries and their drivers, on Debian and Ubuntu or on Fedora.
const INSTALL: &str = "apt-get install rdma-core ibverbs-providers librdmacm1 || \
                       dnf install rdma-core libibverbs librdmacm";

/// Returns the version of a library, or `None` if the library is missing. The version is the third part of the number in the library's file
/// name. It is also the version of rdma-core.
fn version(tree: &SystemTree, library: &str) -> Option<String> {
    let prefix = format!("{library}.so.1.");
    let directories = DIRECTORIES.iter().flat_map(|directory| {
        let subdirectories = tree.names(directory).into_iter().filter(|name| name.contains("-linux-"));
        std::iter::once((*directory).to_owned()).chain(subdirectories.map(move |name| format!("{directory}/{name}")))
    });
    directories
        .flat_map(|directory| tree.names(&directory))
        .find_map(|name| Some(format!("1.{}", name.strip_prefix(&prefix)?)))
}

/// Returns the findings about the libraries.
#[must_use]
pub fn findings(tree: &SystemTree, devices: &[Device]) -> Vec<Finding> {
    let versions: Vec<_> = LIBRARIES.iter().map(|library| (*library, version(tree, library))).collect();
    let absent: Vec<_> = versions.iter().filter(|(_, version)| version.is_none()).map(|(name, _)| *name).collect();
    let mut findings = Vec::new();
    if absent.is_empty() {
        let found: Vec<_> =
            versions.iter().map(|(name, version)| format!("{name} {}", version.as_deref().unwrap_or("?"))).collect();
        findings.push(Finding::ok("library", found.join(", ")));
    } else {
        let text = format!("not found: {}", absent.join(", "));
        let finding =
            if devices.is_empty() { Finding::note("library", text) } else { Finding::problem("library", text) };
        findings.push(finding.fix(INSTALL));
    }
    // libibverbs cannot use a device without a driver library for it. If the drivers are built into libibverbs, there is no directory
    // of drivers, and nothing to check.
    let drivers = tree.names(DRIVERS);
    for device in devices.iter().filter(|_| !drivers.is_empty() && absent.is_empty()) {
        let Some(driver) = driver_of(device) else { continue };
        if !drivers.iter().any(|name| *name == format!("{driver}.driver")) {
            let text = format!("libibverbs has no driver {driver}: it does not see {}", device.name);
            findings.push(Finding::problem("library", text).fix(INSTALL));
        }
    }
    findings
}

/// Returns the name of the driver library for a device, or `None` if it is not known.
fn driver_of(device: &Device) -> Option<&'static str> {
    Some(match (device.driver.as_deref(), device.kind.as_str()) {
        (None, "iWARP") => "siw",
        (None, "RoCE") => "rxe",
        (Some("mlx5_core"), _) => "mlx5",
        (Some("mlx4_core"), _) => "mlx4",
        (Some("irdma" | "ice" | "i40e"), _) => "irdma",
        (Some("cxgb4"), _) => "cxgb4",
        (Some("bnxt_en"), _) => "bnxt_re",
        (Some("efa"), _) => "efa",
        (Some("erdma"), _) => "erdma",
        (Some("hns3"), _) => "hns",
        (Some("mana"), _) => "mana",
        _ => return None,
    })
}
