//! Two facts about the machine that affect the results: the congestion control of TCP, and the processor time that the host of a
//! virtual machine stole.

use std::fs;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use rdma_reactor::transport::iwarp::IwarpConfig;
use socket2::{Domain, SockRef, Socket, Type};

/// Returns the name of the system's default congestion control for TCP, such as `cubic`.
#[must_use]
pub fn system_congestion() -> String {
    let read = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
    read.map_or_else(|_| "unknown".into(), |name| name.trim().into())
}

/// Returns the name of the congestion control that this library selects for connections within a host. Returns `None` if the system does
/// not allow this congestion control; the library then uses the system's default.
pub fn own_congestion() -> Option<&'static str> {
    static OWN: OnceLock<Option<String>> = OnceLock::new(); // local: a text of the system
    let own = OWN.get_or_init(|| {
        let name = IwarpConfig::default().within_host.congestion?;
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).ok()?;
        socket.set_tcp_congestion(name.as_bytes()).ok().map(|()| name)
    });
    own.as_deref()
}

/// Makes a bare TCP socket use the congestion control that this library uses within a host, for a fair comparison.
pub fn equal_congestion(socket: &impl AsFd) {
    if let Some(name) = own_congestion() {
        // The call cannot fail: `own_congestion` returns only a congestion control that the system allows.
        let _ = SockRef::from(socket).set_tcp_congestion(name.as_bytes());
    }
}

/// The processor time that the machine has used since boot, in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// The time that the host gave to other virtual machines.
    pub stolen: u64,
    /// The total time of all processors, idle time included.
    pub all: u64,
}

impl Times {
    /// Reads the times. Returns `None` if the system does not report them.
    #[must_use]
    pub fn now() -> Option<Self> {
        Self::read(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Parses the first line of `/proc/stat`, see proc(5). Guest time is already part of the first two values, so it is not added
    /// again.
    fn read(stat: &str) -> Option<Self> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Vec<u64> = line.split_whitespace().take(8).map_while(|ticks| ticks.parse().ok()).collect();
        Some(Self { stolen: *ticks.get(7)?, all: ticks.iter().sum() })
    }

    /// Returns the percentage of the time since `before` that was stolen.
    #[must_use]
    pub fn stolen_percent(&self, before: &Self) -> f64 {
        let all = self.all.saturating_sub(before.all).max(1);
        self.stolen.saturating_sub(before.stolen) as f64 * 100.0 / all as f64
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn stolen_time_is_the_eighth_value() {
        let [before, after] = ["cpu  10 0 10 70 0 0 0 10 5 5\ncpu0 1\n", "cpu  20 0 20 130 0 0 0 30 5 5\n"]
            .map(|stat| Times::read(stat).expect("times"));
        assert_eq!(before, Times { stolen: 10, all: 100 });
        assert_eq!(after.stolen_percent(&before), 20.0);
        assert_eq!(before.stolen_percent(&before), 0.0);
        for stat in ["", "cpu0 1 2 3 4 5 6 7 8", "cpu  1 2 3 4 5 6 7", "cpu  x"] {
            assert_eq!(Times::read(stat), None, "{stat:?}");
        }
    }

    #[test]
    fn a_socket_of_bare_tcp_has_the_congestion_control_of_this_library() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        equal_congestion(&stream);
        let name = SockRef::from(&stream).tcp_congestion().unwrap();
        let name = String::from_utf8(name).unwrap();
        let system = system_congestion();
        assert_eq!(name.trim_end_matches('\0'), own_congestion().unwrap_or(&system));
    }
}
