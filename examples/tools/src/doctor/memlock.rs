//! The limit on the memory that this process may lock. Registered memory is locked, so this limit also limits the number of connections.

use super::credentials::Credentials;
use super::finding::Finding;
use super::tree::SystemTree;

/// The approximate number of registered bytes for a connection with the default settings.
const PER_CONNECTION: u64 = 1 << 20;
/// The smallest limit that is not reported as a problem, in bytes. It suffices for about sixty connections.
const COMFORTABLE: u64 = 64 << 20;

/// Parses the limit, in bytes, from `/proc/self/limits`. Returns `None` if there is no limit or it cannot be parsed.
fn limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the finding about the limit. Returns `None` if the machine has no device that would lock memory.
#[must_use]
pub fn finding(tree: &SystemTree, account: &Credentials, has_devices: bool) -> Option<Finding> {
    if !has_devices {
        return None;
    }
    let Some(bytes) = limit(&tree.text_or_empty("/proc/self/limits")) else {
        return Some(Finding::ok("memlock", "locked memory is not limited"));
    };
    let size = format!("ulimit -l is {} KiB", bytes >> 10);
    Some(if account.locks_any_memory() {
        Finding::ok("memlock", format!("{size}, which does not apply to this user (CAP_IPC_LOCK)"))
    } else if bytes >= COMFORTABLE {
        Finding::ok("memlock", format!("{size}: about {} connections on devices", bytes / PER_CONNECTION))
    } else {
        let text = format!("{size}: at most {} connections on devices with default settings", bytes / PER_CONNECTION);
        Finding::problem("memlock", text)
            .hint("for good, the line `* - memlock unlimited` in /etc/security/limits.d/rdma.conf")
            .hint("LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 for docker")
            .fix("ulimit -l unlimited")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_counts() {
        let text = "Max file locks  unlimited  unlimited  locks\nMax locked memory         65536   131072   bytes";
        assert_eq!(limit(text), Some(65_536));
        assert_eq!(limit("Max locked memory  unlimited  unlimited  bytes"), None);
    }
}
