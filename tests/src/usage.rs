//! The memory and the descriptors that a process uses.

use std::io;

/// Returns the resident memory of this process, in KiB.
///
/// # Errors
/// `/proc/self/status` cannot be read, or does not report the resident memory.
pub fn resident_kib() -> io::Result<u64> {
    status("VmRSS:")
}

/// Returns the resident memory of this process that belongs to no file (anonymous memory), in KiB.
///
/// # Errors
/// `/proc/self/status` cannot be read, or does not report the resident memory.
pub fn private_kib() -> io::Result<u64> {
    status("RssAnon:")
}

fn status(name: &str) -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB"));
    let missing = || io::Error::other(format!("/proc/self/status has no {name}"));
    line.and_then(|kib| kib.trim().parse().ok()).ok_or_else(missing)
}

/// Returns the lengths of all mappings of a process whose files have names that contain `name`, in
/// bytes. The kernel merges neighbouring mappings only if they map adjacent parts of the same file.
///
/// # Errors
/// `/proc/PROCESS/maps` cannot be read.
pub fn mapped(process: &str, name: &str) -> io::Result<Vec<u64>> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps"))?;
    let length = |line: &str| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        Some(u64::from_str_radix(to, 16).ok()? - u64::from_str_radix(from, 16).ok()?)
    };
    Ok(maps.lines().filter(|line| line.contains(name)).filter_map(length).collect())
}

/// Returns the number of open descriptors of this process.
///
/// # Errors
/// `/proc/self/fd` cannot be read.
pub fn descriptors() -> io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}
