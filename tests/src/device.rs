//! The kernel's RDMA devices, for tests of faults. The tests remove the devices, take the links of the devices down, and count their
//! objects. The process at the other end of a connection is `rdma-peer`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rdma_reactor::{Config, ProviderChoice};

use crate::conformance::harness::{PATIENCE, now};

/// Returns the reactor settings that a test and its `rdma-peer` use: small queues, and a keepalive timeout of 6 s, which `rdma-peer` makes
/// longer.
#[must_use]
pub fn config() -> Config {
    Config::default()
        .provider(ProviderChoice::Verbs)
        .buffer_size(4096)
        .receive_depth(16)
        .send_depth(16)
        .completions(|c| c.queue = Some(2048))
        .timeouts(|t| t.connect = PATIENCE)
        .timeouts(|t| t.handshake = PATIENCE)
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_secs(1), Duration::from_secs(6)))
}

/// A software device of the kernel. `tests/vm/run.sh` sets environment variables that describe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    kind: &'static str,
}

/// The siw device: iWARP over TCP.
pub const SIW: Device = Device { kind: "siw" };
/// The rxe device: RoCE.
pub const RXE: Device = Device { kind: "rxe" };

fn run(program: &str, words: &str) -> String {
    let output = Command::new(program).args(words.split_whitespace()).output().expect(program);
    assert!(output.status.success(), "{program} {words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

impl Device {
    fn variable(self, name: &str) -> String {
        let name = format!("RDMA_{}_{name}", self.kind.to_uppercase());
        std::env::var(&name).unwrap_or_else(|_| panic!("{name} is not set: run `make test-rdma`"))
    }

    /// Returns the kind of the device: `siw` or `rxe`.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        self.kind
    }

    /// Returns the name of the device, such as `rxe0`.
    #[must_use]
    pub fn name(self) -> String {
        self.variable("DEV")
    }

    /// Returns the address of the device, with port 0.
    #[must_use]
    pub fn address(self) -> SocketAddr {
        SocketAddr::new(self.variable("ADDR").parse().expect("an address"), 0)
    }

    /// Returns [`RXE`] for [`SIW`], and [`SIW`] for [`RXE`].
    #[must_use]
    pub fn other(self) -> Self {
        if self.kind == "siw" { RXE } else { SIW }
    }

    /// Returns an address in the device's network that has a neighbour entry, but on which no host answers.
    #[must_use]
    pub fn silent_address(self) -> SocketAddr {
        let mine = self.variable("ADDR");
        let silent = format!("{}.78", mine.rsplit_once('.').expect("an IPv4 address").0);
        run("ip", &format!("neigh replace {silent} lladdr 02:00:00:00:00:78 dev {}", self.variable("NETDEV")));
        SocketAddr::new(silent.parse::<IpAddr>().expect("an address"), 9)
    }

    /// Starts the command that sets the device's network interface down, and returns its process.
    #[must_use]
    pub fn link_down(self) -> Child {
        let netdev = self.variable("NETDEV");
        // Keeps the IPv6 addresses of the interface while it is down, because later tests need them.
        let keep = format!("/proc/sys/net/ipv6/conf/{netdev}/keep_addr_on_down");
        fs::write(keep, "1").expect("the setting can be changed");
        Command::new("ip").args(["link", "set", &netdev, "down"]).spawn().expect("ip")
    }

    /// Sets the device's network interface up.
    pub fn link_up(self) {
        run("ip", &format!("link set {} up", self.variable("NETDEV")));
    }

    /// Adds 400 IPv6 addresses to the device's network interface, unless it has them, or removes them. `action` is `replace` or `del`.
    pub fn many_addresses(self, action: &str) {
        let netdev = self.variable("NETDEV");
        let line = |nth| format!("addr {action} fd77:9::{nth:x}/128 dev {netdev} nodad\n");
        let batch = std::env::temp_dir().join(format!("addresses-{}", std::process::id()));
        fs::write(&batch, (1..=400).map(line).collect::<String>()).expect("a temporary file");
        run("ip", &format!("-batch {}", batch.display()));
        fs::remove_file(batch).expect("it is there");
    }

    /// Returns true if the device's port is active.
    #[must_use]
    pub fn is_active(self) -> bool {
        let state = format!("/sys/class/infiniband/{}/ports/1/state", self.variable("DEV"));
        fs::read_to_string(state).is_ok_and(|state| state.contains("ACTIVE"))
    }

    /// Starts the command that removes the device, and returns its process. The command ends when no process uses the device any more.
    #[must_use]
    pub fn remove(self) -> Child {
        Command::new("rdma").args(["link", "del", &self.variable("DEV")]).spawn().expect("rdma")
    }

    /// Adds the device again, and waits until its port is active.
    #[allow(clippy::disallowed_methods, reason = "the kernel has no event for it that is simpler")]
    pub fn add(self) {
        let (device, netdev) = (self.variable("DEV"), self.variable("NETDEV"));
        run("rdma", &format!("link add {device} type {} netdev {netdev}", self.kind));
        let until = now() + PATIENCE;
        while !self.is_active() {
            assert!(now() < until, "{device} does not become active");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the number of the kernel's objects on the device for each kind: queue pairs, completion queues, memory regions,
    /// connection-manager ids, protection domains.
    #[must_use]
    pub fn resources(self) -> BTreeMap<String, u32> {
        let line = run("rdma", &format!("resource show {}", self.variable("DEV")));
        let words: Vec<&str> = line.split_whitespace().skip(2).collect();
        let counts: BTreeMap<String, u32> =
            words.chunks_exact(2).map(|pair| (pair[0].to_owned(), pair[1].parse().expect("a count"))).collect();
        let ours = ["pd", "cq", "qp", "cm_id", "mr"];
        assert!(ours.iter().all(|kind| counts.contains_key(*kind)), "{line}");
        counts.into_iter().filter(|(kind, _)| ours.contains(&&**kind)).collect()
    }
}

/// Declares tests that run on both devices. Each listed function has a device as its argument, and becomes two tests: one for siw in the
/// module `$siw`, and one for rxe in the module `$rxe`. The tests have a time limit.
#[macro_export]
macro_rules! on_each_device {
    ($siw:ident $rxe:ident: $($test:ident)*) => {
        $crate::on_each_device!(@ $siw SIW $($test)*);
        $crate::on_each_device!(@ $rxe RXE $($test)*);
    };
    (@ $name:ident $device:ident $($test:ident)*) => {
        mod $name {
            $(#[test]
            fn $test() {
                $crate::conformance::harness::with_watchdog(stringify!($test), || super::$test($crate::device::$device));
            })*
        }
    };
}

/// A running `rdma-peer`. Dropping this value kills the process.
#[derive(Debug)]
pub struct Peer {
    process: Child,
    lines: Receiver<String>,
    /// The lines that the peer has printed and that no call has returned yet.
    said: Vec<String>,
}

impl Peer {
    /// Starts `rdma-peer` with these arguments. `program` is its path.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "a test's own thread")]
    pub fn start(program: &str, words: &str) -> Self {
        let mut command = Command::new(program);
        command.args(words.split_whitespace()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("the peer starts");
        let stdout = BufReader::new(process.stdout.take().expect("its output"));
        let (sender, lines) = channel();
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok()));
        Self { process, lines, said: Vec::new() }
    }

    /// Starts a server on these addresses. Returns the server, and the addresses on which it listens.
    #[must_use]
    pub fn serve(program: &str, addresses: &[SocketAddr]) -> (Self, Vec<SocketAddr>) {
        Self::serve_by(program, "", addresses)
    }

    /// Starts a server like [`Peer::serve`]. `words` are the arguments of `rdma-peer` before the command.
    #[must_use]
    pub fn serve_by(program: &str, words: &str, addresses: &[SocketAddr]) -> (Self, Vec<SocketAddr>) {
        let texts: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
        let mut peer = Self::start(program, &format!("{words} serve {}", texts.join(" ")));
        let until = now() + PATIENCE;
        while peer.count("listening ") < addresses.len() {
            assert!(now() < until, "the peer does not listen");
            let line = peer.lines.recv_timeout(PATIENCE).expect("the peer listens");
            peer.said.push(line);
        }
        let listening = peer.said.iter().map(|line| line["listening ".len()..].parse().expect("an address")).collect();
        peer.said.clear();
        (peer, listening)
    }

    /// Returns the number of lines that the peer has printed so far and that begin with `start`.
    pub fn count(&mut self, start: &str) -> usize {
        self.said.extend(self.lines.try_iter());
        self.said.iter().filter(|line| line.starts_with(start)).count()
    }

    /// Returns the lines that the peer has printed so far.
    #[must_use]
    pub fn said(&self) -> &[String] {
        &self.said
    }

    /// Kills the peer with SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill().expect("it can be killed");
        self.process.wait().expect("it can be waited for");
    }

    /// Sends the peer a signal, such as `STOP`.
    pub fn signal(&self, signal: &str) {
        run("kill", &format!("-{signal} {}", self.process.id()));
    }

    /// Returns the number of descriptors that the peer has open.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.process.id())).expect("it lives").count()
    }

    /// Ends the peer gracefully, by closing its standard input. Returns true if its exit status was 0.
    #[must_use]
    pub fn finish(mut self) -> bool {
        drop(self.process.stdin.take());
        self.process.wait().expect("it can be waited for").success()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.said.extend(self.lines.try_iter());
            eprintln!("the peer has printed: {:#?}", self.said);
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
