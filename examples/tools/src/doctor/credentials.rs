//! The user, groups and capabilities of this process.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use super::tree::SystemTree;

/// The number of the capability to read and write any file.
const CAP_DAC_OVERRIDE: u32 = 1;
/// The number of the capability to lock any amount of memory.
const CAP_IPC_LOCK: u32 = 14;

/// The user, groups and capabilities of this process.
// local: groups of the user
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    /// The effective user id.
    pub uid: u32,
    /// The effective and supplementary group ids.
    pub groups: Vec<u32>,
    capabilities: u64,
}

impl Credentials {
    /// Reads the credentials from `/proc/self/status`.
    #[must_use]
    pub fn read(tree: &SystemTree) -> Self {
        Self::parse(&tree.text_or_empty("/proc/self/status"))
    }

    fn parse(status: &str) -> Self {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        let effective = |name| field(name).split_whitespace().nth(1).and_then(|id| id.parse().ok());
        let mut groups: Vec<u32> = field("Groups:").split_whitespace().filter_map(|id| id.parse().ok()).collect();
        groups.extend(effective("Gid:"));
        Self {
            // If the user id is missing, the id of `nobody` is assumed, a user without privileges.
            uid: effective("Uid:").unwrap_or(65_534),
            groups,
            capabilities: u64::from_str_radix(field("CapEff:").trim(), 16).unwrap_or(0),
        }
    }

    const fn has(&self, capability: u32) -> bool {
        self.capabilities >> capability & 1 == 1
    }

    /// Returns true if the process may lock any amount of memory.
    #[must_use]
    pub const fn locks_any_memory(&self) -> bool {
        self.has(CAP_IPC_LOCK)
    }

    /// Returns true if the process may read and write a file with this owner, group and mode.
    #[must_use]
    pub fn may_use(&self, file: &Metadata) -> bool {
        let granted = if file.uid() == self.uid {
            file.mode() >> 6
        } else if self.groups.contains(&file.gid()) {
            file.mode() >> 3
        } else {
            file.mode()
        };
        granted & 0o6 == 0o6 || self.has(CAP_DAC_OVERRIDE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read() {
        let account =
            Credentials::parse("Uid:\t1\t1000\t1\t1\nGid:\t1\t100\t1\t1\nGroups:\t4 27 \nCapEff:\t0000000000004000\n");
        assert_eq!((account.uid, account.groups.as_slice()), (1000, &[4, 27, 100][..]));
        assert!(account.locks_any_memory() && !account.has(CAP_DAC_OVERRIDE));
        assert_eq!(Credentials::parse("nonsense").uid, 65_534);
    }
}
