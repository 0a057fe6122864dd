//! A peer for the program `ibv_ud_pingpong`(1). The peer uses the embedded provider's datagrams.
//!
//! - `rdma-ud-peer server BIND PORT COUNT SIZE` is the server for `ibv_ud_pingpong -p PORT HOST`;
//! - `rdma-ud-peer client BIND PORT COUNT SIZE HOST` connects to `ibv_ud_pingpong -p PORT`.
//!
//! The two programs exchange the addresses of their queue pairs over TCP, then send datagrams in both directions. `ibv_ud_pingpong` always
//! sends the last datagram that it received. So each received datagram, except for the first one, shows if the previous datagram of this
//! program has arrived unchanged at `ibv_ud_pingpong`.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rdma_transport::datagram::{Destination, GRH_LEN, Route};
use rdma_transport::roles::Datagrams;
use rdma_transport::{
    CqAttr, CqId, DeviceId, Drive, QpAttr, QpId, SendFlags, SendOp, Station, WcOpcode, WcStatus, WorkCompletion,
};
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig, ROCE_PORT, TcpNet};

/// The Q_Key of both queue pairs.
const QUEUE_KEY: u32 = 0x1111_1111;
/// The length in bytes of a queue pair's address, as it is sent over TCP: LID, queue pair number, packet sequence number and GID. Each
/// number is in hexadecimal digits. Colons separate the numbers, and a zero byte follows the last one.
const TOLD: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;
/// The number of receives that are posted.
const DEPTH: usize = 16;
/// The time limit for a datagram. UDP does not send a lost datagram again, so a lost datagram ends the program with a failure.
const PATIENCE: Duration = Duration::from_secs(60);

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Side {
    station: Station,
    device: DeviceId,
    cq: CqId,
    qp: QpId,
    /// The size of a receive buffer, in bytes.
    stride: usize,
    done: Vec<WorkCompletion>,
}

impl Side {
    fn new(bind: IpAddr, size: usize) -> Result<Self> {
        let mut config = IwarpConfig::default();
        (config.roce.port, config.roce.queue_key) = (Some(ROCE_PORT), QUEUE_KEY);
        let mut octet = std::process::id() as u8;
        let entropy =
            move |bytes: &mut [u8]| bytes.iter_mut().for_each(|byte| (octet, *byte) = (octet.wrapping_add(37), octet));
        let iwarp = Iwarp::new(config, TcpNet::new()?, Box::new(entropy))?;
        let stride = GRH_LEN + size;
        let mut station = Station::new(Box::new(iwarp), stride * (DEPTH + 1))?;
        let (id, device, max) = role(&mut station)?.bind_datagram(SocketAddr::new(bind, 0))?;
        if size > max as usize {
            return Err(format!("a datagram is at most {max} bytes here").into());
        }
        let cq = station.provider().create_cq(device, &CqAttr::new(4 * DEPTH as u32))?;
        let qp = station.provider().create_qp(id, &QpAttr::new(cq, cq, 4, DEPTH as u32))?;
        let mut side = Self { station, device, cq, qp, stride, done: Vec::new() };
        (0..DEPTH).try_for_each(|slot| side.post(slot))?;
        Ok(side)
    }

    fn post(&mut self, slot: usize) -> Result<()> {
        let place = slot * self.stride..(slot + 1) * self.stride;
        Ok(self.station.post_recv(self.qp, slot as u64, &[place])?)
    }

    /// Parses the address that the peer has sent. Returns the destination for datagrams to the peer.
    fn destination(&mut self, told: &str) -> Result<Destination> {
        let [_, number, _, gid] = told.split(':').collect::<Vec<_>>()[..] else {
            return Err(format!("the peer says {told:?}").into());
        };
        let route = Route { gid: u128::from_str_radix(gid, 16)?.to_be_bytes(), is_global: true, ..Route::default() };
        let address = role(&mut self.station)?.create_address(self.device, &route)?;
        Ok(Destination { address, qp_number: u32::from_str_radix(number, 16)?, queue_key: QUEUE_KEY })
    }

    fn send(&mut self, to: Destination, payload: &[u8]) -> Result<()> {
        let start = DEPTH * self.stride;
        self.station.write(start, payload)?;
        let place = start..start + payload.len();
        self.station.post_send(self.qp, u64::MAX, SendOp::Datagram(to), &[place], SendFlags::SIGNALED)?;
        Ok(())
    }

    /// Returns the payload of the next datagram, and the number of the queue pair that sent it.
    fn receive(&mut self) -> Result<(Vec<u8>, u32)> {
        let until = Instant::now() + PATIENCE;
        loop {
            self.station.provider().progress(Instant::now(), Drive::Full);
            self.station.provider().poll_cq(self.cq, DEPTH, &mut self.done)?;
            if let Some(failed) = self.done.iter().find(|wc| wc.status != WcStatus::Success) {
                return Err(format!("a work request failed: {failed:?}").into());
            }
            self.done.retain(|wc| wc.opcode == WcOpcode::Recv);
            if !self.done.is_empty() {
                let wc = self.done.remove(0);
                let (slot, mut octets) = (wc.wr_id as usize, Vec::new());
                let start = slot * self.stride;
                self.station.read(start + GRH_LEN..start + (wc.byte_len as usize).max(GRH_LEN), &mut octets)?;
                self.post(slot)?;
                return Ok((octets, wc.source.qp_number));
            }
            if Instant::now() > until {
                return Err("no datagram arrived".into());
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

fn role(station: &mut Station) -> Result<&mut dyn Datagrams> {
    station.provider().datagrams().ok_or_else(|| "the provider has no datagrams".into())
}

fn tell(stream: &mut TcpStream, side: &mut Side, bind: IpAddr) -> Result<()> {
    let gid = match bind {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let mut told = format!("{:04x}:{:06x}:{:06x}:", 0, role(&mut side.station)?.qp_number(side.qp)?, 0);
    write!(told, "{:032x}\0", Ipv6Addr::to_bits(gid))?;
    Ok(stream.write_all(told.as_bytes())?)
}

fn listen_to(stream: &mut TcpStream) -> Result<String> {
    let mut told = [0; TOLD];
    stream.read_exact(&mut told)?;
    Ok(std::str::from_utf8(&told)?.trim_end_matches('\0').to_owned())
}

/// Returns the payload of datagram number `round`. Two consecutive datagrams have different payloads.
fn payload(round: usize, size: usize) -> Vec<u8> {
    (0..size).map(|at| (at * 7 + round * 13 + 1) as u8).collect()
}

fn main() -> Result<()> {
    env_logger::init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let (bind, port, count, size, host) = match words[..] {
        ["server", bind, port, count, size] => (bind, port, count, size, None),
        ["client", bind, port, count, size, host] => (bind, port, count, size, Some(host)),
        _ => return Err("rdma-ud-peer server BIND PORT COUNT SIZE | client BIND PORT COUNT SIZE HOST".into()),
    };
    let (bind, port, count, size): (IpAddr, u16, usize, usize) =
        (bind.parse()?, port.parse()?, count.parse()?, size.parse()?);
    let mut side = Side::new(bind, size)?;
    let (stream, told) = match host {
        Some(host) => {
            let mut stream = TcpStream::connect((host, port))?;
            tell(&mut stream, &mut side, bind)?;
            let told = listen_to(&mut stream)?;
            stream.write_all(b"done\0")?;
            (stream, told)
        }
        None => {
            let listener = TcpListener::bind((bind, port))?;
            println!("listening on {}", listener.local_addr()?);
            let (mut stream, _) = listener.accept()?;
            let told = listen_to(&mut stream)?;
            tell(&mut stream, &mut side, bind)?;
            (stream, told)
        }
    };
    let to = side.destination(&told)?;
    // `ibv_ud_pingpong` closes the TCP connection when it has received all datagrams.
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut said = host.map(|_| payload(0, size));
    for round in 1..=count {
        if let Some(said) = said.as_deref().filter(|_| host.is_some()) {
            side.send(to, said)?;
        }
        let (heard, from) = side.receive()?;
        if from != to.qp_number || heard.len() != size {
            return Err(format!("{} bytes from queue pair {from:#x}", heard.len()).into());
        }
        if said.as_ref().is_some_and(|said| *said != heard) {
            return Err(format!("datagram {round} is not the one before it").into());
        }
        let next = payload(round, size);
        if host.is_none() {
            side.send(to, &next)?;
        }
        said = Some(next);
    }
    println!("{count} datagrams of {size} bytes each way with {told}");
    Ok(())
}
