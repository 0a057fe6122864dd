//! The memory and the descriptors that a process uses.

use std::io;

/// Returns the resident memory of this process, in KiB.
///
/// # Errors
/// `/proc/self/status` cannot be read, or does not report the resident memory.
pub fn resident_kib() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB"));
    line.and_then(|kib| kib.trim().parse().ok()).ok_or_else(|| io::Error::other("/proc/self/status has no VmRSS"))
}

/// Returns the number of open descriptors of this process.
///
/// # Errors
/// `/proc/self/fd` cannot be read.
pub fn descriptors() -> io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}
