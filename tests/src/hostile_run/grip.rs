//! The parts of a shared-memory connection that an attacker accesses without its own reactor: the memory that both sides map, the files of
//! that memory, and the Unix socket between the processes.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_reactor::{Config, MioPoller, Parts, Reactor, SystemClock, system_entropy};
use rdma_transport::mem::{Memory, Sharing};
use rdma_transport_embedded::iwarp::net::SocketId;
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig, SharedMemoryPolicy, TcpNet};
use rdma_transport_embedded::shm::segment::{self, CALL, CAPACITY, HALF, HEAD, RING, SLOTS, SegmentSide, TABLE, TAIL};
use rdma_transport_embedded::shm::{MappedSegment, Segment, SegmentPayload, Words};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl, fstat};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, connect, recv, sendmsg, socket_with,
};

use super::Result;
use super::process::Order;
use crate::gate::net::{GatedNet, Onlooker};
use crate::sim::rng::Rng;

/// The largest number of descriptors that one packet can carry (`SCM_MAX_FD` of the kernel).
const MOST: usize = 253;
/// The first byte of a packet that announces a window: memory that the peer gets permission to read.
const WINDOW: u8 = 2;

/// The means by which an attacker disturbs a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// The attacker writes random bytes at random positions.
    Octets,
    /// The attacker overwrites ring positions, doorbells and tables with whole words.
    Words,
    /// The attacker writes plausible records. Their keys, lengths and windows are correct or wrong.
    Records,
    /// The attacker punches holes into pages that both sides map.
    Holes,
    /// The attacker reads the doorbell socket, and clears its flag `O_NONBLOCK`.
    Doorbells,
    /// The attacker sends packets with many descriptors.
    Descriptors,
    /// The attacker connects to the peer's listener for shared memory, without being part of a connection.
    Strangers,
    /// The attacker uses all of the means above.
    All,
    /// The attacker only makes requests that a program can make, but with keys of other clients.
    Requests,
}

impl Means {
    /// All means, in the order above.
    pub const EACH: [Self; 9] = [
        Self::Octets,
        Self::Words,
        Self::Records,
        Self::Holes,
        Self::Doorbells,
        Self::Descriptors,
        Self::Strangers,
        Self::All,
        Self::Requests,
    ];
}

/// The parts of one connection that the attacker accesses, see the [module](self).
#[derive(Debug, Default)]
struct Grip {
    door: Vec<u8>,
    doorbell: Option<OwnedFd>,
    hello: Vec<u8>,
    segment: Option<MappedSegment>,
    /// Other memory of the connection that this process can write to: the mapping, and its length.
    others: Vec<(MappedSegment, usize)>,
    files: Vec<OwnedFd>,
}

/// The current plan of the attack.
#[derive(Debug)]
pub struct Plan {
    /// The means that are used on all connections.
    pub means: Means,
    /// The keys that the server has sent, with their addresses.
    pub keys: Vec<(u32, u64)>,
}

/// All connections of this process that use shared memory.
#[derive(Debug)]
pub struct Grips {
    plan: Mutex<Plan>,
    grips: Mutex<BTreeMap<SocketId, Grip>>,
    /// The number of times that the attacker has changed memory that it should only be able to read. This number must stay 0.
    reached: AtomicU64,
}

pub(super) fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Maps the memory of a file, if the file permits writing. Adds no seal to the file, so that this
/// process can still punch holes. Returns the mapping and its length, or `None` if the file cannot
/// be mapped for writing.
pub(super) fn writable(file: &OwnedFd) -> Option<(MappedSegment, usize)> {
    let len = usize::try_from(fstat(file).ok()?.st_size).ok()?;
    Some((MappedSegment::new(Memory::map_file(file.as_fd(), 0, len).ok()?), len))
}

/// Returns a duplicate of the Unix packet socket that was connected last in this process, or `None` if there is none.
pub(super) fn newest_doorbell() -> Option<OwnedFd> {
    let numbers = std::fs::read_dir("/proc/self/fd").ok()?;
    let mut numbers: Vec<i32> = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers.into_iter().rev().find_map(|number| {
        // SAFETY: the number belonged to a descriptor when the directory was read. Two threads close sockets of this kind: the reactor's
        // thread, which is in this call, and the attacking thread, which needs the lock that the caller holds. If the number belongs to
        // another descriptor by now, that descriptor is only used if it is such a socket.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let is_doorbell = socket_type(fd) == Ok(SocketType::SEQPACKET)
            && socket_domain(fd) == Ok(AddressFamily::UNIX)
            && rustix::net::getpeername(fd).is_ok();
        is_doorbell.then(|| fd.try_clone_to_owned().ok()).flatten()
    })
}

impl Onlooker for Grips {
    fn met(&self, socket: SocketId, name: &[u8]) {
        let mut grips = locked(&self.grips);
        grips.insert(socket, Grip { door: name.to_vec(), doorbell: newest_doorbell(), ..Grip::default() });
    }

    fn passing(&self, socket: SocketId, packet: &[u8], file: BorrowedFd<'_>) -> Option<OwnedFd> {
        let mut grips = locked(&self.grips);
        let grip = grips.get_mut(&socket)?;
        let file = file.try_clone_to_owned().ok()?;
        if grip.segment.is_none() {
            grip.hello = packet.to_vec();
            grip.segment = writable(&file).map(|(memory, _)| memory);
            grip.files.push(file);
            return None;
        }
        if !matches!(locked(&self.plan).means, Means::Octets | Means::Holes | Means::All) {
            return None;
        }
        // Sends the file of other memory instead of `file`. The other file lacks a seal.
        let len = usize::try_from(fstat(&file).ok()?.st_size).ok()?;
        let memory = Memory::new_shared(len, Sharing::Write).ok()?;
        let other = memory.file()?.try_clone_to_owned().ok()?;
        grip.others.push((MappedSegment::new(memory), len));
        grip.files.push(other.try_clone().ok()?);
        Some(other)
    }

    fn took(&self, socket: SocketId, packet: &[u8], file: BorrowedFd<'_>) {
        let mut grips = locked(&self.grips);
        let Some(grip) = grips.get_mut(&socket) else { return };
        let Ok(file) = file.try_clone_to_owned() else { return };
        let rights = packet.get(4..8).and_then(|octets| octets.try_into().ok()).map_or(0, u32::from_le_bytes);
        let rights = rdma_transport::mr::Access::from_bits_truncate(rights);
        // The staging buffer, which has the key 0, and copies of messages are lent: the attacker
        // may write to them. It must not reach the buffers of the server, which are announced
        // without rights.
        let is_staging = packet.get(8..12).is_some_and(|key| key == [0; 4]);
        let may_write = is_staging || !rights.is_empty();
        match writable(&file) {
            Some(_) if !may_write => _ = self.reached.fetch_add(1, Ordering::Relaxed),
            Some(memory) => grip.others.push(memory),
            None => {}
        }
        if !may_write && hole(&file, 0, 4096) {
            self.reached.fetch_add(1, Ordering::Relaxed);
        }
        grip.files.push(file);
    }

    fn closing(&self, socket: SocketId) {
        locked(&self.grips).remove(&socket);
    }
}

/// Punches a hole into a file. Returns true if the file permitted that.
pub(super) fn hole(file: &OwnedFd, at: u64, len: u64) -> bool {
    fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len).is_ok()
}

/// Sends a packet with these descriptors. Attacks ignore the result: a peer that does not read, or
/// has ended, accepts no packets.
pub(super) fn send_all(socket: BorrowedFd<'_>, packet: &[u8], files: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut room = [MaybeUninit::uninit(); 16 + 8 * (MOST + 1)];
    let mut control = SendAncillaryBuffer::new(&mut room);
    control.push(SendAncillaryMessage::ScmRights(files));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(packet)], &mut control, flags)
}

/// Returns a reactor of an attacker that connects in shared memory only. `onlooker` sees its
/// sockets and files.
pub(super) fn reactor(onlooker: Arc<dyn Onlooker>, config: Config) -> Result<Reactor<Order>> {
    let mut settings = IwarpConfig::default();
    (settings.extensions, settings.shared_memory) = (true, SharedMemoryPolicy::Require);
    let provider = Iwarp::new(settings, GatedNet::seen_by(TcpNet::new()?, onlooker), system_entropy())?;
    let poller = Box::new(MioPoller::new()?);
    Ok(Reactor::with_parts(
        config,
        Parts { providers: vec![Box::new(provider)], poller, clock: Box::new(SystemClock) },
    )?)
}

fn octets(rng: &mut Rng, most: usize) -> Vec<u8> {
    (0..1 + rng.index(most)).map(|_| rng.bits() as u8).collect()
}

/// Returns a random element of `of`. In most cases it is one of the first `first` elements.
fn pick(rng: &mut Rng, of: &[u64], first: usize) -> u64 {
    let among = if rng.below(8) == 0 { of.len() } else { first };
    of[rng.index(among)]
}

impl Grip {
    /// Runs one random step of the attack on this connection.
    fn act(&self, means: Means, keys: &[(u32, u64)], rng: &mut Rng) {
        let Some(segment) = &self.segment else { return };
        match means {
            Means::Octets => {
                let (memory, len) = match self.others.get(rng.index(2 + self.others.len())) {
                    Some((memory, len)) => (memory, *len),
                    None => (segment, segment::LEN),
                };
                memory.put(rng.index(len), &SegmentPayload::Bytes(&octets(rng, 256)));
            }
            Means::Words => {
                let words = [HEAD, TAIL, CALL, TABLE + 8 * rng.index(SLOTS)];
                let at = HALF * rng.index(2) + words[rng.index(4)];
                let now = segment.load(at);
                let value = [0, now ^ 1 << rng.below(64), now.wrapping_add(8 * rng.below(4096)), rng.bits()];
                segment.store(at, value[rng.index(4)]);
            }
            Means::Records => self.record(segment, keys, rng),
            Means::Holes => {
                let Some(file) = self.files.get(rng.index(self.files.len())) else { return };
                hole(file, 4096 * rng.below(64), 4096 * (1 + rng.below(8)));
            }
            Means::Doorbells => {
                let Some(doorbell) = &self.doorbell else { return };
                if let Ok(flags) = fcntl_getfl(doorbell) {
                    let _ = fcntl_setfl(doorbell, flags - OFlags::NONBLOCK);
                }
                let mut room = [0; 64];
                let _ = recv(doorbell, &mut room, RecvFlags::DONTWAIT);
            }
            Means::Descriptors => {
                let Some(doorbell) = &self.doorbell else { return };
                let mut packet = octets(rng, 64);
                if rng.below(2) == 0 {
                    packet.resize(40, 0);
                    (packet[0], packet[1]) = (WINDOW, rng.bits() as u8 % 64);
                    packet[24..32]
                        .copy_from_slice(&[4096, 32 << 10, 256 << 10, rng.bits()][rng.index(4)].to_le_bytes());
                }
                let _ = send_all(doorbell.as_fd(), &packet, &self.many(rng));
            }
            Means::Strangers => {
                let _ = self.come(rng);
            }
            Means::All | Means::Requests => {}
        }
    }

    /// Returns 1, 2 or [`MOST`] descriptors for a packet. All of them are the same, randomly chosen file of this connection. Returns an
    /// empty vector if the connection has no file.
    fn many(&self, rng: &mut Rng) -> Vec<BorrowedFd<'_>> {
        let count = [1, 2, MOST][rng.index(3)];
        self.files.get(rng.index(self.files.len().max(1))).map(|file| vec![file.as_fd(); count]).unwrap_or_default()
    }

    /// Connects to the peer's listener as a process that is not part of this connection. The first packet is the hello of this connection,
    /// random bytes, or the hello with one wrong bit. The secret in the hello was already used, so the peer must refuse all of these
    /// packets.
    fn come(&self, rng: &mut Rng) -> rustix::io::Result<()> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let stranger = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&stranger, &SocketAddrUnix::new_abstract_name(&self.door)?)?;
        let mut hello = self.hello.clone();
        match rng.below(3) {
            0 => {}
            1 => hello = octets(rng, 64),
            _ => {
                let at = rng.index(hello.len().max(1));
                if let Some(octet) = hello.get_mut(at) {
                    *octet ^= 1 << rng.below(8);
                }
            }
        }
        let _ = send_all(stranger.as_fd(), &hello, &self.many(rng));
        Ok(())
    }

    /// Writes a record after the last one in the ring. The attacker's own reactor must not write records at the same time.
    fn record(&self, segment: &MappedSegment, keys: &[(u32, u64)], rng: &mut Rng) {
        let half = SegmentSide::Active.outgoing();
        let head = segment.load(half + HEAD);
        let at = head as usize % CAPACITY / 8 * 8;
        let kinds = [3, 5, 5, 5, 6, 10, 13, 1, 2, 4, 7, 8, 9, 11, 12, 14, 0];
        let kind = pick(rng, &kinds, 4);
        let words = [0, 0, 0, 0, 1, 2, 1, 2, 4, 3, 0, 1, 1, 1, 0][kind as usize];
        let usual = [8, 100, 1024, 0, 1, 4096, 4097, u64::from(u32::MAX)];
        let len = pick(rng, &usual, 3);
        let flags = if rng.below(8) == 0 { rng.below(256) } else { 1 };
        let body = 8 * (1 + words) + if flags & 2 == 2 { 8 } else { (len as usize).next_multiple_of(8) };
        if at + body + 8 > CAPACITY {
            segment.poke(half + RING + at, 1 | ((CAPACITY - at) as u64) << 32);
            return segment.store(half + HEAD, head.wrapping_add((CAPACITY - at) as u64));
        }
        segment.poke(half + RING + at, kind | flags << 8 | rng.below(33) << 16 | len << 32);
        let (key, address) = keys.get(rng.index(1 + keys.len())).copied().unwrap_or((rng.bits() as u32, rng.bits()));
        let offsets = [0, 8, 4088, 4096, 1, u64::MAX];
        let offset = pick(rng, &offsets, 2);
        for (nth, word) in
            [u64::from(key), address.wrapping_add(offset), rng.bits(), rng.bits()].into_iter().enumerate()
        {
            segment.poke(half + RING + at + 8 * (1 + nth), word);
        }
        segment.store(half + HEAD, head.wrapping_add(body as u64));
        if let Some(doorbell) = &self.doorbell {
            let _ = send_all(doorbell.as_fd(), &[0], &[]);
        }
    }
}

impl Default for Grips {
    fn default() -> Self {
        let plan = Mutex::new(Plan { means: Means::Requests, keys: Vec::new() });
        Self { plan, grips: Mutex::default(), reached: AtomicU64::new(0) }
    }
}

impl Grips {
    /// Locks and returns the current plan.
    pub fn plan(&self) -> MutexGuard<'_, Plan> {
        locked(&self.plan)
    }

    /// Runs a few steps of the attack on each connection.
    pub fn act(&self, rng: &mut Rng) {
        // No connection is added while `grips` is locked. So no step of an old plan is carried out
        // on a connection that began with a later plan.
        let grips = locked(&self.grips);
        let (means, keys) = {
            let plan = self.plan();
            (plan.means, plan.keys.clone())
        };
        // Before the server has sent its keys, only one step in 64 is an attack, so that most connections are established.
        if keys.is_empty() && rng.below(64) != 0 {
            return;
        }
        for grip in grips.values() {
            for _ in 0..1 + rng.below(8) {
                let means = if means == Means::All { Means::EACH[rng.index(7)] } else { means };
                grip.act(means, &keys, rng);
            }
        }
    }

    /// Returns the number of times that the attacker has changed memory that it should only be able to read.
    #[must_use]
    pub fn reached(&self) -> u64 {
        self.reached.load(Ordering::Relaxed)
    }
}
