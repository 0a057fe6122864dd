//! The rows of the table: each combines a measurement of this library, a competitor, and a target.

use crate::pingpong::figures::size_label;
use crate::pingpong::job;
use crate::pingpong::plan::usual_iterations;

use super::contest::{Baseline, Competitor, Contest, PlotPoint};
use super::distance::Distance;
use super::peers::{self, PeerProgram, Ucx};
use super::secured::SecurityMode;
use super::target::RowTarget::{self, Figure, Latency, Rate, TimesLatency, TimesRate, TimesThroughput};
use super::work::{MEAN, MEDIAN, Pingpong, RATE, THROUGHPUT, Work};

/// The sizes of messages that are sent back and forth, in bytes.
const LATENCY_SIZES: [u32; 5] = [64, 4 << 10, 8 << 10, 64 << 10, 1 << 20];
/// The sizes of messages that are sent one way, in bytes.
const STREAM_SIZES: [u32; 5] = [4 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20];
/// The numbers of connections on which echoes are measured.
const CONNECTIONS: [u32; 5] = [1, 10, 100, 1_000, 10_000];
/// The longest block that `iperf3` can send, in bytes.
const IPERF3_LONGEST: u32 = 1 << 20;
/// The target in comparisons with programs of other projects: the ratio of the speed of this library to theirs must be at least 1.
const NO_SLOWER: f64 = 1.0;

/// Returns all contests.
#[must_use]
pub fn contests() -> Vec<Contest> {
    let mut all = to_and_fro();
    all.extend(one_way());
    all.push(row("64 B open loop, p99 of a round trip", Figure("us"), Competitor::OpenLoop, limitless()));
    all.extend(many_and_mixed());
    all.extend(datagrams());
    all.extend(one_sided());
    all.extend(secured());
    all.extend(shared_memory());
    all
}

fn row(name: &str, target: RowTarget, theirs: Competitor, ours: impl Into<Work>) -> Contest {
    Contest { name: name.into(), place: None, target, at: None, theirs, ours: ours.into(), mode: None }
}

/// Returns the measurement of the maximum rate of an open loop. The round then chooses the rate of
/// its open loop from this result.
fn limitless() -> Pingpong {
    Pingpong::open_loop_limit()
}

fn to_and_fro() -> Vec<Contest> {
    let mut all = Vec::new();
    let libfabric = peers::libfabric_provider();
    for size in LATENCY_SIZES {
        let name = format!("{} half round trip, spinning", size_label(size.into()));
        let iterations = usual_iterations(job::Mode::Latency, size);
        let ours = |figure| Pingpong::latency("iwarp", "spin", size, iterations, figure);
        let of_size = |contest: Contest| Contest { place: Some(PlotPoint::Size(size)), ..contest };
        let (bare, ucx) =
            (Baseline::Tcp("spin", size, iterations), PeerProgram::ucx_latency(Ucx::Tcp, size, iterations, ""));
        let libfabric = PeerProgram::libfabric_latency(libfabric, size, iterations);
        all.push(of_size(row(&name, TimesLatency(1.3), bare.into(), ours(MEDIAN))));
        all.push(of_size(row(&name, TimesLatency(NO_SLOWER), ucx.into(), ours(MEDIAN))));
        all.push(of_size(row(&name, TimesLatency(NO_SLOWER), libfabric.into(), ours(MEAN))));
    }
    let events = "64 B half round trip, events";
    let ours = || Pingpong::latency("iwarp", "event", 64, 10_000, MEDIAN);
    let ucx = PeerProgram::ucx_latency(Ucx::Tcp, 64, 10_000, "-E sleep");
    all.push(row(events, TimesLatency(1.3), Baseline::Tcp("epoll", 64, 10_000).into(), ours()));
    all.push(row(events, TimesLatency(NO_SLOWER), ucx.into(), ours()));
    all.push(row(events, TimesLatency(NO_SLOWER), PeerProgram::sockperf_latency(64).into(), ours()));
    all
}

fn one_way() -> Vec<Contest> {
    // In each row, this library polls if the competitor polls, and sleeps if the competitor sleeps.
    let (spinning, sleeping) = ("64 B one way", "64 B one way, events");
    let ours = |wait| Pingpong::one_way("iwarp", wait, 64, 2_000_000, RATE);
    let mut all = vec![
        row(spinning, Rate(1e6), Competitor::Nobody, ours("spin")),
        row(spinning, TimesRate(NO_SLOWER), PeerProgram::ucx_rate(Ucx::Tcp, 64, 500_000).into(), ours("spin")),
        row(sleeping, TimesRate(NO_SLOWER), PeerProgram::sockperf_rate(64).into(), ours("event")),
    ];
    for size in STREAM_SIZES {
        let name = format!("{} one way", size_label(size.into()));
        let bulk = |wait| Pingpong::bulk("iwarp", wait, size);
        let ucx = PeerProgram::ucx_throughput(Ucx::Tcp, size, usual_iterations(job::Mode::Throughput, size));
        if size == 64 << 10 {
            all.push(row(&name, TimesThroughput(0.8), stream(), bulk("spin")));
        }
        all.push(row(&name, TimesThroughput(NO_SLOWER), ucx.into(), bulk("spin")));
        if size <= IPERF3_LONGEST {
            let name = format!("{name}, events");
            all.push(row(&name, TimesThroughput(NO_SLOWER), PeerProgram::iperf3(size).into(), bulk("event")));
        }
    }
    all
}

/// Returns bare TCP as a competitor. Its client sends 64 KiB in each write.
fn stream() -> Competitor {
    Baseline::Tcp("stream", 64 << 10, 32_768).into()
}

fn many_and_mixed() -> Vec<Contest> {
    let mut all = Vec::new();
    for connections in CONNECTIONS {
        let echoes = if connections == 1 { 20_000 } else { 200_000 };
        let name = format!("64 B echoes on {connections} connection{}", if connections == 1 { "" } else { "s" });
        let contest = row(
            &name,
            TimesRate(0.8),
            Baseline::TcpEchoes(connections, echoes).into(),
            Work::Echoes(connections, echoes),
        );
        all.push(Contest { place: Some(PlotPoint::Connections(connections)), ..contest });
    }
    let large = Competitor::Otherwise("256 KiB buffers", Work::Mix("large", 20_000));
    all.push(row("requests of 1 B to 256 KiB", TimesRate(0.9), large, Work::Mix("default", 20_000)));
    all
}

fn datagrams() -> Vec<Contest> {
    let (theirs, ours) = (Baseline::Udp("echo", 64, 50_000), Work::Datagrams("echo", 64, 50_000));
    let mut all = vec![row("datagrams of 64 B, half round trip, spinning", TimesLatency(1.15), theirs.into(), ours)];
    for size in [1 << 10, 4 << 10] {
        let name = format!("datagrams of {}, one way", size_label(size.into()));
        let (theirs, ours) = (Baseline::Udp("flood", size, 1_000_000), Work::Datagrams("flood", size, 1_000_000));
        all.push(row(&name, TimesThroughput(0.9), theirs.into(), ours));
    }
    all
}

fn one_sided() -> Vec<Contest> {
    let words = Baseline::Tcp("spin", 8, 50_000).into();
    vec![
        row("RDMA Write of 64 KiB", TimesThroughput(0.8), stream(), Work::OneSided("write", 32_768)),
        row("RDMA Read of 64 KiB", TimesThroughput(0.8), stream(), Work::OneSided("read", 32_768)),
        row("RDMA Read of 8 B, half of it", TimesLatency(1.4), words, Work::OneSided("word", 50_000)),
    ]
}

fn secured() -> Vec<Contest> {
    let tls = |contest| Contest { mode: Some(SecurityMode::Tls), ..contest };
    let psk = |contest| Contest { mode: Some(SecurityMode::Psk), ..contest };
    let short = || Pingpong::latency("iwarp", "spin", 64, 50_000, MEDIAN);
    let bulk = || Pingpong::bulk("iwarp", "spin", 64 << 10);
    let (openssl, connections) = (Competitor::Openssl(2 << 30), Work::Connections(1000));
    vec![
        tls(row("TLS: 64 B half round trip", TimesLatency(1.25), Competitor::Plain, short())),
        psk(row("pre-shared key: 64 B, the same", TimesLatency(1.25), Competitor::Plain, short())),
        tls(row("TLS: 64 KiB one way", TimesThroughput(0.45), Competitor::Plain, bulk())),
        tls(row("TLS: 64 KiB one way", TimesThroughput(0.9), openssl, bulk())),
        psk(row("pre-shared key: 64 KiB one way", TimesThroughput(0.45), Competitor::Plain, bulk())),
        tls(row("TLS: connections, mutual", Figure("connections/s"), Competitor::Plain, connections)),
    ]
}

/// Returns the contests in shared memory: against programs of other projects that support it, and against the bare ring.
fn shared_memory() -> Vec<Contest> {
    let name = "shm: 64 B half round trip, spinning";
    let short = |figure| Pingpong::latency("shm", "spin", 64, 200_000, figure);
    let at = |distance, contest| Contest { at: Some(distance), ..contest };
    let (ucx, libfabric) =
        (PeerProgram::ucx_latency(Ucx::Posix, 64, 200_000, ""), PeerProgram::libfabric_latency("shm", 64, 200_000));
    let mut all = vec![
        row(name, Figure("us"), Baseline::RingLatency(200_000).into(), short(MEDIAN)),
        at(Distance::Near, row(name, TimesLatency(3.5), ucx.into(), short(MEDIAN))),
        row(name, TimesLatency(NO_SLOWER), libfabric.into(), short(MEAN)),
        at(Distance::Far, row(name, Latency(1.5), Competitor::Nobody, short(MEDIAN))),
    ];
    let asleep = |provider| Pingpong::latency(provider, "event", 64, 10_000, MEDIAN);
    let tcp = Competitor::Otherwise("TCP", asleep("iwarp").into());
    all.push(row("shm: 64 B half round trip, events", TimesLatency(0.75), tcp, asleep("shm")));
    let name = "shm: 64 B one way";
    let stream = || Pingpong::one_way("shm", "spin", 64, 5_000_000, RATE);
    all.push(row(name, Figure("messages/s"), Baseline::RingRate(10_000_000).into(), stream()));
    all.push(row(name, TimesRate(NO_SLOWER), PeerProgram::ucx_rate(Ucx::Posix, 64, 2_000_000).into(), stream()));
    all.push(row(name, Rate(8e6), Competitor::Nobody, stream()));
    for size in [64 << 10, 1 << 20] {
        let label = size_label(size.into());
        let bulk = || Pingpong::bulk("shm", "spin", size);
        let iterations = usual_iterations(job::Mode::Throughput, size);
        let ucx = |ucx| PeerProgram::ucx_throughput(ucx, size, iterations).into();
        let (untouched, touched) =
            (format!("shm: {label} one way"), format!("shm: {label} one way, each byte touched"));
        all.push(row(&untouched, TimesThroughput(NO_SLOWER), ucx(Ucx::Posix), bulk()));
        all.push(row(&untouched, TimesThroughput(NO_SLOWER), ucx(Ucx::Cma), bulk()));
        all.push(row(&touched, TimesThroughput(0.8), ucx(Ucx::Cma), bulk().and("--touch")));
        let mapping = Baseline::RingTouched(size, (2 << 30) / u64::from(size)).into();
        all.push(row(&touched, TimesThroughput(0.6), mapping, bulk().and("--touch")));
        let iterations = usual_iterations(job::Mode::Latency, size);
        let libfabric = PeerProgram::libfabric_latency("shm", size, iterations).into();
        let ours = Pingpong::latency("shm", "spin", size, iterations, MEAN);
        all.push(row(&format!("shm: {label} half round trip, spinning"), TimesLatency(NO_SLOWER), libfabric, ours));
    }
    for op in ["write", "read"] {
        let ours = Pingpong::one_way("shm", "spin", 64 << 10, 131_072, THROUGHPUT).and(&format!("--direct --op {op}"));
        let memcpy = Baseline::Memcpy(64 << 10, 131_072).into();
        all.push(row(&format!("shm: {op} of 64 KiB, direct"), TimesThroughput(0.85), memcpy, ours));
    }
    let word = Pingpong::latency("shm", "spin", 8, 200_000, "/read_us/p50").and("--direct --op read");
    all.push(row("shm: read of 8 B, direct", Latency(0.5), Competitor::Nobody, word));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_there_once() {
        let all = contests();
        for (index, contest) in all.iter().enumerate() {
            let same = |other: &&Contest| (&other.name, other.theirs.name()) == (&contest.name, contest.theirs.name());
            assert_eq!(all[index + 1..].iter().find(same).map(|other| &other.name), None);
        }
    }
}
