//! The memory of this process, read from `/proc`.

/// Returns the peak resident memory of this process in KiB, or 0 if `/proc` does not report it.
#[must_use]
pub fn peak_kib() -> u64 {
    std::fs::read_to_string("/proc/self/status").map_or(0, |status| peak_of(&status))
}

/// Parses the value of `VmHWM`, see proc(5).
fn peak_of(status: &str) -> u64 {
    let value = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    value.and_then(|value| value.trim().strip_suffix("kB")?.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_read() {
        assert_eq!(peak_of("VmPeak:\t  99 kB\nVmHWM:\t    1234 kB\nVmRSS:\t 7 kB\n"), 1234);
        assert_eq!(peak_of("nothing"), 0);
        assert!(peak_kib() > 100);
    }
}
