//! The entries of a port's GID table.

use serde::Serialize;

use super::tree::SystemTree;

/// The largest number of entries that the program reads for each port.
const MAX_GIDS: usize = 1024;

/// An entry of a port's GID table.
// local: texts of the system
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gid {
    /// The index of the entry in the table, from 0.
    pub index: u32,
    /// The GID, formatted by the kernel.
    pub gid: String,
    /// The protocol that uses the entry, such as `RoCE v2`; `None` if the kernel does not report it.
    pub kind: Option<String>,
    /// The network device that the GID is derived from; `None` if the kernel does not report it.
    pub netdev: Option<String>,
}

impl Gid {
    /// Returns the entries of a port's GID table that are in use.
    #[must_use]
    pub fn all(tree: &SystemTree, port: &str) -> Vec<Self> {
        let names = tree.names(&format!("{port}/gids"));
        names.iter().take(MAX_GIDS).filter_map(|name| Self::read(tree, port, name)).collect()
    }

    fn read(tree: &SystemTree, port: &str, name: &str) -> Option<Self> {
        let gid = tree.text(&format!("{port}/gids/{name}")).ok()?;
        if gid.chars().all(|c| matches!(c, '0' | ':')) {
            return None;
        }
        let attribute = |what| tree.text(&format!("{port}/gid_attrs/{what}/{name}")).ok().filter(|t| !t.is_empty());
        Some(Self { index: name.parse().ok()?, gid, kind: attribute("types"), netdev: attribute("ndevs") })
    }
}
