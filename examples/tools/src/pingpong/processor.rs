//! The processor time that this process has used, and the load of the machine.

use std::fs;
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

use super::job::WaitMode;

/// Returns the processor time of this process so far, in the kernel and in user space.
#[must_use]
pub fn time() -> Duration {
    let time = |of: TimeVal| Duration::new(of.tv_sec() as u64, of.tv_usec() as u32 * 1000);
    getrusage(UsageWho::RUSAGE_SELF).map_or(Duration::ZERO, |usage| time(usage.user_time()) + time(usage.system_time()))
}

/// Returns a warning if the load of the machine is too high for meaningful results. Returns `None` if the load is low enough or unknown.
#[must_use]
pub fn busy(wait: WaitMode) -> Option<String> {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    line(&read("/proc/loadavg"), &read("/proc/stat"), wait)
}

/// Returns the warning of [`busy`]. `loadavg` and `stat` are the contents of `/proc/loadavg` and
/// `/proc/stat`. The load is that of the whole machine, so it is compared with the number of all
/// processors.
fn line(loadavg: &str, stat: &str, wait: WaitMode) -> Option<String> {
    let load: f64 = loadavg.split(' ').next()?.parse().ok()?;
    let is_processor =
        |line: &&str| line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let processors = stat.lines().filter(is_processor).count();
    if processors == 0 || load <= processors as f64 {
        return None;
    }
    let cure = if wait == WaitMode::Event { "" } else { "; --wait event needs no processor while it waits" };
    Some(format!("load average {load:.1} on {processors} processors: the figures mean little{cure}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  1 2 3\ncpu0 1 2 3\ncpu1 1 2 3\nintr 5\ncpufreq x\n";

    #[test]
    fn a_busy_machine_is_told_from_another_one() {
        let busy = line("2.01 9.00 9.00 1/2 3\n", STAT, WaitMode::Spin).expect("busy");
        assert!(busy.starts_with("load average 2.0 on 2 processors") && busy.contains("--wait event"), "{busy}");
        assert!(!line("12.5 0 0 1/2 3", STAT, WaitMode::Event).expect("busy").contains("--wait"));
        for (loadavg, stat) in [("2.00 9.00 9.00 1/2 3\n", STAT), ("", STAT), ("x y", STAT), ("5.0 5.0", "")] {
            assert_eq!(line(loadavg, stat, WaitMode::Spin), None, "{loadavg:?}");
        }
    }

    #[test]
    fn time_is_spent() {
        let before = time();
        let mut sum = 0_u64;
        while time() == before {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(time() > before);
    }
}
