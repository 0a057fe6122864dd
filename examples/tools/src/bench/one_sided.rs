//! One-sided operations of the embedded provider, for a comparison with bare TCP. They use the provider directly, without a reactor.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use hdrhistogram::Histogram;
use rdma_reactor::system_entropy;
use rdma_reactor::transport::cm::{ListenParam, PathOptions};
use rdma_reactor::transport::cq::CqAttr;
use rdma_reactor::transport::iwarp::{Iwarp, IwarpConfig, TcpNet};
use rdma_reactor::transport::wr::RemoteAddress;
use rdma_reactor::transport::{
    Access, CmEvent, CmEventKind, CmId, ConnectParam, CqId, DeviceId, Drive, QpAttr, QpId, RemoteKey, SendFlags,
    SendOp, Station, WorkCompletion,
};

use crate::pingpong::server::LISTENING;

/// The operation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Operation {
    /// RDMA Writes of 64 KiB
    Write,
    /// RDMA Reads of 64 KiB
    Read,
    /// RDMA Reads of 8 bytes, sequentially
    Word,
}

const DEVICE: DeviceId = DeviceId(0);
/// The length of a Write or a Read, in bytes.
const CHUNK: usize = 64 << 10;
/// The number of Writes in flight. For Reads, the connection may allow fewer.
const DEPTH: u32 = 16;
/// The length in bytes of the memory that the operations access.
const WINDOW: usize = DEPTH as usize * CHUNK;
/// The time limit for establishing the connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// One side of the connection: a provider that the program polls in a loop.
// local: work requests of the benchmark
struct PolledProvider {
    station: Station,
    cq: CqId,
    done: Vec<WorkCompletion>,
}

impl PolledProvider {
    fn new() -> io::Result<Self> {
        let iwarp = Iwarp::new(IwarpConfig::default(), TcpNet::new()?, system_entropy()).map_err(io::Error::other)?;
        let mut station = Station::new(Box::new(iwarp), WINDOW)?;
        let cq = station.provider().create_cq(DEVICE, &CqAttr::new(4 * DEPTH)).map_err(io::Error::other)?;
        Ok(Self { station, cq, done: Vec::new() })
    }

    fn equip(&mut self, id: CmId) -> io::Result<QpId> {
        let attr = QpAttr {
            send_cq: self.cq,
            recv_cq: self.cq,
            max_send_wr: DEPTH,
            max_recv_wr: 1,
            max_inline: 0,
            max_recv_sge: 0,
            srq: None,
        };
        self.station.provider().create_qp(id, &attr).map_err(io::Error::other)
    }

    /// Polls the provider until it has an event, and returns that event.
    fn event(&mut self) -> io::Result<CmEvent> {
        loop {
            let now = Instant::now();
            self.station.provider().progress(now, Drive::Full);
            if let Some(event) = self.station.provider().next_cm_event(now).map_err(io::Error::other)? {
                return Ok(event);
            }
        }
    }

    /// Polls the provider until at least one operation has completed. Returns the number of completions.
    fn completions(&mut self) -> io::Result<usize> {
        loop {
            self.done.clear();
            let provider = self.station.provider();
            let count = provider.poll_cq(self.cq, DEPTH as usize, &mut self.done).map_err(io::Error::other)?;
            if let Some(failed) = self.done.iter().find(|wc| !wc.status.is_success()) {
                return Err(io::Error::other(format!("{}: {:?}", failed.status, failed.opcode)));
            }
            if count > 0 {
                return Ok(count);
            }
            provider.progress(Instant::now(), Drive::Spin);
        }
    }
}

/// Runs the server. It prints its address, and gives one client access to its memory.
///
/// # Errors
/// A system call failed.
pub fn serve() -> io::Result<()> {
    let mut side = PolledProvider::new()?;
    let listener = side
        .station
        .provider()
        .listen((Ipv4Addr::LOCALHOST, 0).into(), &ListenParam::default())
        .map_err(io::Error::other)?;
    let address = side.station.provider().local_address(listener).ok_or(io::ErrorKind::AddrNotAvailable)?;
    println!("{LISTENING}{address}");
    let region = side.station.expose(DEVICE, Access::REMOTE_READ | Access::REMOTE_WRITE).map_err(io::Error::other)?;
    let mut place = [0; 12];
    place[..8].copy_from_slice(&side.station.address(0).to_be_bytes());
    place[8..].copy_from_slice(&region.remote_key.0.to_be_bytes());
    let request = side.event()?;
    side.equip(request.id)?;
    let param = ConnectParam { private_data: &place, ..ConnectParam::default() };
    side.station.provider().accept(request.id, &param, Instant::now()).map_err(io::Error::other)?;
    // The embedded provider has no thread: it serves the client's operations only in calls of `progress`.
    loop {
        for _ in 0..1000 {
            side.station.provider().progress(Instant::now(), Drive::Spin);
        }
        let event = side.station.provider().next_cm_event(Instant::now()).map_err(io::Error::other)?;
        if event.is_some_and(|event| !matches!(event.kind, CmEventKind::Established { .. })) {
            return Ok(());
        }
    }
}

/// Runs the client. Returns the median half round trip in microseconds for [`Operation::Word`], and otherwise Gbit/s.
///
/// # Errors
/// A system call failed, or the server went away.
pub fn measure(operation: Operation, server: SocketAddr, iterations: u64) -> io::Result<f64> {
    let mut side = PolledProvider::new()?;
    let region = side.station.expose(DEVICE, Access::LOCAL_WRITE).map_err(io::Error::other)?;
    side.station.use_key(region.local_key);
    let id = side
        .station
        .provider()
        .resolve(server, &PathOptions::default(), Instant::now() + PATIENCE)
        .map_err(io::Error::other)?;
    let unexpected = |kind: CmEventKind| io::Error::other(format!("{kind:?}"));
    // The provider creates no queue pair before this event.
    match side.event()?.kind {
        CmEventKind::Resolved { .. } => {}
        other => return Err(unexpected(other)),
    }
    let qp = side.equip(id)?;
    side.station.provider().connect(id, &ConnectParam::default()).map_err(io::Error::other)?;
    let place = match side.event()?.kind {
        CmEventKind::Established { private_data, .. } => private_data,
        other => return Err(unexpected(other)),
    };
    let (address, key) = place.split_first_chunk().ok_or(io::ErrorKind::InvalidData)?;
    let key = RemoteKey(u32::from_be_bytes(key.try_into().map_err(io::Error::other)?));
    let remote = RemoteAddress { address: u64::from_be_bytes(*address), key };
    match operation {
        Operation::Word => words(&mut side, qp, remote, iterations),
        Operation::Read => chunks(&mut side, qp, remote, iterations, SendOp::Read),
        Operation::Write => chunks(&mut side, qp, remote, iterations, SendOp::Write),
    }
}

fn words(side: &mut PolledProvider, qp: QpId, remote: RemoteAddress, iterations: u64) -> io::Result<f64> {
    let mut half_rtt = Histogram::<u64>::new(3).map_err(io::Error::other)?;
    let warmup = iterations / 10;
    for iteration in 0..warmup + iterations {
        let started = Instant::now();
        let posted =
            side.station.post_send(qp, 0, SendOp::Read(remote), std::slice::from_ref(&(0..8)), SendFlags::SIGNALED);
        posted.map_err(io::Error::other)?;
        side.completions()?;
        let rtt = started.elapsed();
        if iteration >= warmup {
            half_rtt.record(rtt.as_nanos() as u64 / 2).map_err(io::Error::other)?;
        }
    }
    Ok(half_rtt.value_at_quantile(0.5) as f64 / 1e3)
}

fn chunks(
    side: &mut PolledProvider,
    qp: QpId,
    remote: RemoteAddress,
    iterations: u64,
    op: impl Fn(RemoteAddress) -> SendOp,
) -> io::Result<f64> {
    let started = Instant::now();
    let (mut posted, mut under_way) = (0, 0);
    while posted < iterations || under_way > 0 {
        // All operations that fit the send queue are posted as one chain, which needs one doorbell.
        let room = (iterations - posted).min(u64::from(DEPTH) - under_way);
        let chain = (posted..posted + room).map(|iteration| {
            let at = (iteration % u64::from(DEPTH)) as usize * CHUNK;
            let target = RemoteAddress { address: remote.address + at as u64, ..remote };
            (iteration, op(target), at..at + CHUNK, SendFlags::SIGNALED)
        });
        side.station.post_sends(qp, chain).map_err(|error| io::Error::other(error.error))?;
        (posted, under_way) = (posted + room, under_way + room);
        under_way -= side.completions()? as u64;
    }
    // A Write completes when the provider has sent the data, before the data has arrived. So a Read follows the last Write. The completion
    // of this Read shows that the peer's memory has the data of all Writes.
    let last = side.station.post_send(qp, 0, SendOp::Read(remote), std::slice::from_ref(&(0..8)), SendFlags::SIGNALED);
    last.map_err(io::Error::other)?;
    side.completions()?;
    Ok((iterations * CHUNK as u64) as f64 * 8.0 / 1e9 / started.elapsed().as_secs_f64())
}
