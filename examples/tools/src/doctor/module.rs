//! The kernel modules for RDMA.

use super::finding::Finding;
use super::tree::SystemTree;

/// The modules that user-space RDMA needs.
const NEEDED: [&str; 4] = ["ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm"];
/// The modules of software devices.
const SOFTWARE: [&str; 2] = ["siw", "rdma_rxe"];
/// The modules that are drivers of adapters.
const DRIVERS: [&str; 12] = [
    "mlx5_ib",
    "mlx4_ib",
    "irdma",
    "iw_cxgb4",
    "bnxt_re",
    "qedr",
    "efa",
    "erdma",
    "hns_roce_hw_v2",
    "hfi1",
    "mana_ib",
    "vmw_pvrdma",
];

/// The state of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleState {
    /// The module is loaded.
    Loaded,
    /// The module is part of the kernel.
    BuiltIn,
    /// The module is not loaded, but `modprobe` can load it.
    Loadable,
    /// The running kernel has no such module.
    Missing,
}

/// The modules of the kernel, loaded or loadable.
// local: modules of the kernel
#[derive(Clone, Debug, Default)]
pub struct Modules {
    release: String,
    loaded: Vec<String>,
    built_in: Vec<String>,
    loadable: Vec<String>,
    /// True if there is a directory of modules for the running kernel.
    has_directory: bool,
}

/// Returns the name of the module in a line of the kernel's module list, such as `kernel/drivers/x/name.ko.xz: ...`.
fn name_of(line: &str) -> Option<String> {
    let file = line.split(':').next()?.rsplit('/').next()?;
    Some(file.split(".ko").next()?.replace('-', "_"))
}

impl Modules {
    /// Reads the modules of the machine.
    #[must_use]
    pub fn read(tree: &SystemTree) -> Self {
        let release = tree.text_or_empty("/proc/sys/kernel/osrelease");
        let directory = ["/lib/modules", "/usr/lib/modules"]
            .into_iter()
            .map(|parent| format!("{parent}/{release}"))
            .find(|directory| tree.exists(&format!("{directory}/modules.dep")));
        let list = |file: &str| -> Vec<String> {
            let Some(directory) = &directory else { return Vec::new() };
            tree.text_or_empty(&format!("{directory}/{file}")).lines().filter_map(name_of).collect()
        };
        let modules = tree.text_or_empty("/proc/modules");
        Self {
            loaded: modules.lines().filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect(),
            built_in: list("modules.builtin"),
            loadable: list("modules.dep"),
            has_directory: directory.is_some(),
            release,
        }
    }

    /// Returns the state of a module.
    #[must_use]
    pub fn state(&self, module: &str) -> ModuleState {
        let has = |list: &[String]| list.iter().any(|name| name == module);
        if has(&self.loaded) {
            ModuleState::Loaded
        } else if has(&self.built_in) {
            ModuleState::BuiltIn
        } else if has(&self.loadable) {
            ModuleState::Loadable
        } else {
            ModuleState::Missing
        }
    }

    fn in_state(&self, names: &[&str], wanted: &[ModuleState]) -> Vec<String> {
        names.iter().filter(|name| wanted.contains(&self.state(name))).map(|name| (*name).to_owned()).collect()
    }

    /// Returns the findings about the modules.
    #[must_use]
    pub fn findings(&self, has_devices: bool) -> Vec<Finding> {
        let present = [ModuleState::Loaded, ModuleState::BuiltIn];
        let mut findings = Vec::new();
        let all: Vec<&str> = NEEDED.into_iter().chain(SOFTWARE).chain(DRIVERS).collect();
        let loaded = self.in_state(&all, &present);
        if !loaded.is_empty() {
            findings.push(Finding::ok("module", format!("loaded: {}", loaded.join(", "))));
        }
        let absent = self.in_state(&NEEDED, &[ModuleState::Loadable, ModuleState::Missing]);
        if !absent.is_empty() {
            let text = format!("not loaded: {}", absent.join(", "));
            let finding = if has_devices { Finding::problem("module", text) } else { Finding::note("module", text) };
            findings.push(self.load(finding, &absent, ""));
        }
        let loadable = self.in_state(&SOFTWARE, &[ModuleState::Loadable]);
        if !loadable.is_empty() {
            findings.push(
                Finding::note("module", format!("available, not loaded: {}", loadable.join(", ")))
                    .fix(format!("modprobe -a {}", loadable.join(" "))),
            );
        }
        let missing = self.in_state(&SOFTWARE, &[ModuleState::Missing]);
        if self.has_directory && !missing.is_empty() {
            let text = format!("the kernel {} has no {}", self.release, missing.join(", no "));
            findings.push(Finding::note("module", text).fix(self.how_to_get()));
        }
        findings
    }

    /// Adds the command that loads these modules, followed by `then`. If one of them is missing,
    /// adds the command that installs modules. If no modules of the running kernel can be seen, as
    /// in a container, says that the command is for the host.
    pub(super) fn load(&self, finding: Finding, modules: &[String], then: &str) -> Finding {
        let load = format!("modprobe -a {}{then}", modules.join(" "));
        match modules.iter().any(|module| self.state(module) == ModuleState::Missing) {
            true if self.has_directory => finding.fix(self.how_to_get() + then),
            true => {
                let hint = format!("no modules for {} are here, as in a container: run it on the host", self.release);
                finding.hint(hint).fix(load)
            }
            false => finding.fix(load),
        }
    }

    /// Returns the command that installs modules, on Ubuntu or on Fedora.
    fn how_to_get(&self) -> String {
        format!("apt-get install linux-modules-extra-{} || dnf install kernel-modules-extra", self.release)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_modules_are_read() {
        assert_eq!(name_of("kernel/a/ib_uverbs.ko.xz: kernel/a/ib_core.ko.xz").unwrap(), "ib_uverbs");
        assert_eq!(name_of("kernel/a/rdma-rxe.ko:").unwrap(), "rdma_rxe");
    }
}
