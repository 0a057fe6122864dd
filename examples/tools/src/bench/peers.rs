//! The programs of other projects that do the same work over TCP or shared memory: their command lines, and the parsers of their
//! output.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::pingpong::failure::Failure;

use super::machine;
use super::pair::{self, Processors};
use super::sample::{Sample, Tail};

/// The time limit of a client, in seconds.
const PATIENCE: &str = "10";

/// The transports of UCX.
#[derive(Clone, Copy, Debug)]
pub enum Ucx {
    /// TCP over the loopback interface. The settings raise the threshold of UCX's rendezvous protocol to 256 KiB. On the loopback
    /// interface, the rendezvous protocol takes twice as long as the eager protocol for messages of 64 KiB. For messages of 1 MiB, the
    /// rendezvous protocol is faster.
    Tcp,
    /// Shared memory. Each message is copied twice.
    Posix,
    /// Shared memory. Long messages are copied once, directly from the memory of the other process (`process_vm_readv`).
    Cma,
}

impl Ucx {
    const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "UCX",
            Self::Posix => "UCX posix",
            Self::Cma => "UCX cma",
        }
    }

    const fn settings(self) -> &'static str {
        match self {
            Self::Tcp => "UCX_TLS=tcp,self UCX_NET_DEVICES=lo UCX_RNDV_THRESH=256K",
            Self::Posix => "UCX_TLS=posix,self",
            Self::Cma => "UCX_TLS=posix,cma,self",
        }
    }
}

/// A program of another project, with its measurement. In its command lines, `PORT` stands for the
/// port that both sides use. `SERVER` and `CLIENT` stand for the numbers of the two sides'
/// processors.
// local: programs of the benchmark
#[derive(Clone, Debug)]
pub struct PeerProgram {
    name: &'static str,
    program: &'static str,
    server: String,
    client: String,
    /// Finds the result in the output of the client. Returns `None` if it is missing.
    read: fn(&str) -> Option<f64>,
    /// The factor that converts the result to the unit of the contest.
    scale: f64,
    /// Finds the quantiles in the output of an open loop; `None` for other measurements.
    tail: Option<fn(&str) -> Option<Tail>>,
    /// True if the program's TCP connections use the system's congestion control, because the program has no flag for another one.
    keeps_system_congestion: bool,
}

impl PeerProgram {
    /// Returns the program that measures the half round trip of UCX, in us: the median of the last
    /// 2,048 round trips. Both sides poll, or sleep if `flags` has `-E sleep`.
    #[must_use]
    pub fn ucx_latency(ucx: Ucx, size: u32, iterations: u64, flags: &str) -> Self {
        let work = format!("-t tag_lat -s {size} -n {iterations} -w {} {flags}", iterations / 10);
        Self::ucx(ucx, &work, flags, |text| column(text, ',', "50.0_percentile_lat"), 1.0)
    }

    /// Returns the program that measures the rate at which UCX sends messages one way, in messages
    /// per second.
    #[must_use]
    pub fn ucx_rate(ucx: Ucx, size: u32, iterations: u64) -> Self {
        let work = format!("-t tag_bw -s {size} -n {iterations} -w {}", iterations / 10);
        Self::ucx(ucx, &work, "", |text| column(text, ',', "overall_mr"), 1.0)
    }

    /// Returns the program that measures the throughput of UCX one way, in Gbit/s.
    #[must_use]
    pub fn ucx_throughput(ucx: Ucx, size: u32, iterations: u64) -> Self {
        Self { scale: f64::from(size) * 8e-9, ..Self::ucx_rate(ucx, size, iterations) }
    }

    fn ucx(ucx: Ucx, work: &str, flags: &str, read: fn(&str) -> Option<f64>, scale: f64) -> Self {
        let program = format!("env {} ucx_perftest -p PORT", ucx.settings());
        Self {
            name: ucx.name(),
            program: "ucx_perftest",
            server: format!("{program} {flags}"),
            client: format!("{program} 127.0.0.1 -f -v {work}"),
            read,
            scale,
            tail: None,
            keeps_system_congestion: true,
        }
    }

    /// Returns the program that measures the half round trip of libfabric, in us. The result is the
    /// mean, because the program prints no median. Both sides poll.
    #[must_use]
    pub fn libfabric_latency(provider: &str, size: u32, iterations: u64) -> Self {
        let work = format!("-p {provider} -e rdm -I {iterations} -S {size}");
        Self {
            name: if provider == "shm" { "libfabric shm" } else { "libfabric" },
            program: "fi_pingpong",
            server: format!("fi_pingpong {work} -B PORT"),
            client: format!("fi_pingpong {work} -P PORT 127.0.0.1"),
            read: |text| column(text, ' ', "usec/xfer"),
            scale: 1.0,
            tail: None,
            keeps_system_congestion: true,
        }
    }

    /// Returns the program that measures the median half round trip of `sockperf`, in us. Both
    /// sides sleep.
    #[must_use]
    pub fn sockperf_latency(size: u32) -> Self {
        Self::sockperf("ping-pong", &format!("-m {size} -t 1"), |text| after(text, "percentile 50.000 ="))
    }

    /// Returns the program that measures the rate at which `sockperf` sends messages one way, in
    /// messages per second.
    #[must_use]
    pub fn sockperf_rate(size: u32) -> Self {
        Self::sockperf("throughput", &format!("-m {size} -t 1"), |text| after(text, "Message Rate is"))
    }

    /// Returns the program that measures an open loop with messages of 64 B, by `sockperf`. With a
    /// rate in messages per second, the result is the p99 of the round trip, in us. Without a rate,
    /// the result is the number of answers per second. A round trip begins when its message is
    /// sent. The client's sending thread polls the clock. The client's receiving thread runs on the
    /// same processor as the server.
    #[must_use]
    pub fn sockperf_open_loop(rate: Option<u64>) -> Self {
        let mps = rate.map_or_else(|| "max".into(), |rate| rate.to_string());
        let flags = format!(
            "-m 64 -t 1 --reply-every 1 --full-rtt --sender-affinity CLIENT --receiver-affinity SERVER --mps {mps}"
        );
        let peer = Self::sockperf("under-load", &flags, answers_per_second);
        match rate {
            Some(_) => Self { read: |text| quantile(text, "99.000"), tail: Some(tail), ..peer },
            None => peer,
        }
    }

    fn sockperf(work: &str, flags: &str, read: fn(&str) -> Option<f64>) -> Self {
        Self {
            name: "sockperf",
            program: "sockperf",
            server: "sockperf server --tcp -i 127.0.0.1 -p PORT".into(),
            client: format!("sockperf {work} --tcp -i 127.0.0.1 -p PORT {flags}"),
            read,
            scale: 1.0,
            tail: None,
            keeps_system_congestion: true,
        }
    }

    /// Returns the program that measures the throughput of `iperf3` one way, in Gbit/s.
    #[must_use]
    pub fn iperf3(size: u32) -> Self {
        let congestion = machine::own_congestion().map_or_else(String::new, |name| format!(" -C {name}"));
        Self {
            name: "iperf3",
            program: "iperf3",
            server: "iperf3 -s -1 -B 127.0.0.1 -p PORT".into(),
            client: format!("iperf3 -c 127.0.0.1 -p PORT -l {size} -t 1 -J{congestion}"),
            read: |text| {
                serde_json::from_str::<Value>(text).ok()?.pointer("/end/sum_received/bits_per_second")?.as_f64()
            },
            scale: 1e-9,
            tail: None,
            keeps_system_congestion: false,
        }
    }

    /// Returns the competitor's name in the table.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the name of the program that must be installed.
    #[must_use]
    pub const fn program(&self) -> &'static str {
        self.program
    }

    /// Returns the command line of the client.
    #[must_use]
    pub fn command(&self) -> &str {
        &self.client
    }

    /// Returns true if the program's TCP connections use the system's congestion control.
    #[must_use]
    pub const fn keeps_system_congestion(&self) -> bool {
        self.keeps_system_congestion
    }

    /// Runs the server and the client once, and returns the sample.
    ///
    /// # Errors
    /// One of the two processes failed, or its output has no figure.
    pub fn measure(&self, processors: &Processors) -> Result<Sample, Failure> {
        let port = pair::free_port()?;
        let [on_first, on_second] = processors.numbers();
        let filled = |line: &String| {
            let line = line.replace("PORT", &port.to_string());
            line.replace("SERVER", &on_first.to_string()).replace("CLIENT", &on_second.to_string())
        };
        let [server, client] = [&self.server, &self.client].map(filled);
        let mut words = server.split_whitespace();
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        let _server = pair::start(processors, command, port)?;
        let mut command = Command::new("timeout");
        command.arg(PATIENCE).args(client.split_whitespace()).stdin(Stdio::null());
        let output = command.output().map_err(|error| Failure::new(format!("timeout {PATIENCE} {client}: {error}")))?;
        let [printed, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        match (output.status.code(), (self.read)(&printed)) {
            (Some(0), Some(figure)) => {
                let tail = self.tail.and_then(|tail| tail(&printed));
                Ok(Sample { tail, ..(figure * self.scale).into() })
            }
            (Some(124), _) => Err(Failure::new(format!("{client} did not end within {PATIENCE} s"))),
            _ => Err(Failure::new(format!("{client} ended with {} and printed {printed} {errors}", output.status))),
        }
    }
}

/// Returns the name of libfabric's faster provider for TCP. In libfabric 1.17, that provider is called `net`, and a slower one is called
/// `tcp`. Later versions call the faster provider `tcp`.
#[must_use]
pub fn libfabric_provider() -> &'static str {
    let mut info = Command::new("fi_info");
    info.args(["-p", "net"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if info.status().is_ok_and(|status| status.success()) { "net" } else { "tcp" }
}

/// Parses the number of answers per second from `sockperf`'s output. If all answers took so long
/// that none is valid, counts those of the whole run.
fn answers_per_second(text: &str) -> Option<f64> {
    let (_, valid) = text.split_once("[Valid Duration]").or_else(|| text.split_once("[Total Run]"))?;
    let answers: f64 = valid.split_once("ReceivedMessages=")?.1.split_whitespace().next()?.parse().ok()?;
    Some(answers / after(valid, "RunTime=")?)
}

/// Parses a quantile from `sockperf`'s output, in us.
fn quantile(text: &str, percent: &str) -> Option<f64> {
    after(text, &format!("percentile {percent} ="))
}

fn tail(text: &str) -> Option<Tail> {
    Some([
        quantile(text, "50.000")?,
        quantile(text, "99.000")?,
        quantile(text, "99.900")?,
        after(text, "<MAX> observation =")?,
    ])
}

/// Returns the last number in the column with this head, or `None` if it is missing. The first line of the text has the heads.
fn column(text: &str, separator: char, head: &str) -> Option<f64> {
    let mut rows = text.lines().map(|line| line.split(separator).map(str::trim).filter(|cell| !cell.is_empty()));
    let place = rows.next()?.position(|cell| cell == head)?;
    rows.next_back()?.nth(place)?.parse().ok()
}

/// Returns the number that follows `what` in the text, or `None` if it is missing.
fn after(text: &str, what: &str) -> Option<f64> {
    text.split_once(what)?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! recorded {
        ($name:literal) => {
            include_str!(concat!("../../tests/data/peers/", $name))
        };
    }

    fn read(peer: &PeerProgram, text: &str) -> Option<f64> {
        Some((peer.read)(text)? * peer.scale)
    }

    #[test]
    fn figures_are_found_in_what_programs_print() {
        let same = |found: Option<f64>, wanted: f64| {
            let found = found.expect("a figure");
            assert!((found / wanted - 1.0).abs() < 1e-6, "{found} is not {wanted}");
        };
        same(read(&PeerProgram::ucx_latency(Ucx::Tcp, 64, 10_000, ""), recorded!("ucx_latency.txt")), 5.518);
        same(read(&PeerProgram::ucx_rate(Ucx::Tcp, 64, 300_000), recorded!("ucx_rate.txt")), 363_766.0);
        same(
            read(&PeerProgram::ucx_throughput(Ucx::Tcp, 64, 300_000), recorded!("ucx_rate.txt")),
            363_766.0 * 64.0 * 8.0 / 1e9,
        );
        same(read(&PeerProgram::libfabric_latency("tcp", 64, 10_000), recorded!("libfabric_latency.txt")), 40.69);
        same(read(&PeerProgram::sockperf_latency(64), recorded!("sockperf_latency.txt")), 6.800);
        same(read(&PeerProgram::sockperf_rate(64), recorded!("sockperf_rate.txt")), 402_891.0);
        let open_loop = recorded!("sockperf_open_loop.txt");
        same(read(&PeerProgram::sockperf_open_loop(None), open_loop), 27_492.0 / 0.548);
        same(read(&PeerProgram::sockperf_open_loop(Some(50_000)), open_loop), 33_873.407);
        let late = "sockperf: [Total Run] RunTime=1.003 sec; Warm up time=400 msec; SentMessages=148403; ReceivedMessages=84075\n\
            sockperf: No valid observations found.";
        same(read(&PeerProgram::sockperf_open_loop(None), late), 84_075.0 / 1.003);
        assert_eq!(tail(open_loop), Some([4_026.665, 33_873.407, 35_964.229, 35_964.504]));
        same(read(&PeerProgram::iperf3(65_536), recorded!("iperf3.json")), 19.271355);
    }

    #[test]
    fn no_figure_is_found_where_there_is_none() {
        let peers = [
            PeerProgram::ucx_rate(Ucx::Tcp, 64, 1),
            PeerProgram::libfabric_latency("tcp", 64, 1),
            PeerProgram::sockperf_rate(64),
            PeerProgram::iperf3(64),
        ];
        for text in ["", "\n", "connection refused", "{}", "iterations,overall_mr", "Message Rate is high"] {
            assert!(peers.iter().all(|peer| read(peer, text).is_none()), "{text:?}");
        }
    }

    #[test]
    fn a_program_that_fails_is_named_with_its_command() {
        let peer = PeerProgram { server: "false".into(), ..PeerProgram::sockperf_rate(64) };
        let why = peer.measure(&Processors::of_this_machine()).unwrap_err().to_string();
        assert!(why.contains("false") && why.contains("exit status: 1"), "{why}");
    }
}
