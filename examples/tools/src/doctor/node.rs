//! The RDMA device files, and the permission to open them.

use std::fs::{Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;

use super::credentials::Credentials;
use super::device::Device;
use super::finding::Finding;
use super::tree::SystemTree;

const DIRECTORY: &str = "/dev/infiniband";

/// Returns the findings about the device files.
#[must_use]
pub fn findings(tree: &SystemTree, account: &Credentials, devices: &[Device]) -> Vec<Finding> {
    if devices.is_empty() {
        return Vec::new();
    }
    let mut usable = Vec::new();
    let mut findings = Vec::new();
    let nodes = devices.iter().map(|device| (device.node.clone(), device.name.as_str()));
    for (node, of) in std::iter::once((Some("rdma_cm".into()), "connections")).chain(nodes) {
        let Some(node) = node else {
            let finding = Finding::problem("permission", format!("{of} has no device file"));
            findings.push(finding.fix("modprobe ib_uverbs"));
            continue;
        };
        match examine(tree, account, &node, of) {
            Ok(()) => usable.push(node),
            Err(finding) => findings.push(finding),
        }
    }
    let able = devices
        .iter()
        .filter(|device| device.kind != "iWARP" && device.node.as_ref().is_some_and(|node| usable.contains(node)));
    let able: Vec<&str> = able.map(|device| device.name.as_str()).collect();
    if !usable.iter().any(|node| node == "rdma_cm") && !able.is_empty() {
        let text =
            format!("without rdma_cm, {} can connect by exchange: rdma-pingpong server --exchange", able.join(", "));
        findings.push(Finding::note("exchange", text));
    }
    if !usable.is_empty() {
        let text = format!("{DIRECTORY}: {} can be read and written", usable.join(", "));
        findings.insert(0, Finding::ok("permission", text));
    }
    findings
}

fn examine(tree: &SystemTree, account: &Credentials, node: &str, of: &str) -> Result<(), Finding> {
    let path = format!("{DIRECTORY}/{node}");
    let file = tree.path(&path).metadata().map_err(|error| absent(&path, node, of, &error))?;
    if !account.may_use(&file) {
        return Err(refused(tree, &path, &file));
    }
    // The mode of the device file may permit access although a container forbids it. So the program also tries to open the file. Opening
    // the file has no effect on the device.
    if tree.is_real() {
        if let Err(error) = OpenOptions::new().read(true).write(true).open(tree.path(&path)) {
            let finding = Finding::problem("permission", format!("{path} (for {of}): {error}"));
            return Err(finding.hint(format!("a container needs docker run --device {path}")).fix("dmesg | tail"));
        }
    }
    Ok(())
}

fn absent(path: &str, node: &str, of: &str, error: &io::Error) -> Finding {
    if error.kind() != io::ErrorKind::NotFound {
        return Finding::problem("permission", format!("{path} (for {of}): {error}")).fix("chmod 755 /dev/infiniband");
    }
    let module = if node == "rdma_cm" { "rdma_ucm" } else { "ib_uverbs" };
    Finding::problem("permission", format!("{path} (for {of}) is missing"))
        .hint(format!("a container needs docker run --device {path}"))
        .fix(format!("modprobe {module}"))
}

fn refused(tree: &SystemTree, path: &str, file: &Metadata) -> Finding {
    let mode = file.mode() & 0o777;
    let groups = tree.text_or_empty("/etc/group");
    let group = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, id) = (fields.next()?, fields.nth(1)?);
        (id.parse() == Ok(file.gid())).then(|| name.to_owned())
    });
    let name = group.clone().unwrap_or_else(|| file.gid().to_string());
    let text = format!("{path} (mode {mode:o}, group {name}): this user may not read and write it");
    let finding = Finding::problem("permission", text);
    match group {
        Some(group) if mode & 0o060 == 0o060 && file.gid() != 0 => {
            finding.hint("log in again after it").fix(format!("usermod -aG {group} $USER"))
        }
        _ => finding
            .hint("for good, a rule of udev: KERNEL==\"uverbs*|rdma_cm\", MODE=\"0666\"")
            .fix(format!("chmod 666 {path}")),
    }
}
