//! An attacker in shared memory that lends memory files to its server without end. Some files have
//! a length of 1 TiB, without pages. Some are longer in total than one connection may lend. The
//! attacker removes the pages of others after the server has mapped them, and then makes the server
//! access these pages. It also sends messages that the server fetches, and keeps removing the pages
//! of the copies.
//!
//! The kernel charges a page of a memory file to the process that accesses the page first, until
//! nobody has the file open or mapped. So the attacker keeps each file whose pages it has removed.
//! The pages that such a file has later are charged to the server.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rdma_reactor::transport::mr::Access;
use rdma_reactor::{ConnectError, ConnectionId, Context, DisconnectReason, Handler, Security, Wait};
use rdma_transport_embedded::iwarp::net::SocketId;
use rdma_transport_embedded::shm::segment::{CAPACITY, HEAD, RING, SLOTS, SegmentSide, TABLE, TAIL};
use rdma_transport_embedded::shm::{MappedSegment, Words};
use rustix::fs::{MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};

use super::attacker::Report;
use super::grip::{hole, locked, newest_doorbell, reactor, send_all, writable};
use super::process::{Order, answer, obey};
use super::{Result, config};
use crate::gate::net::Onlooker;
use crate::sim::rng::Rng;

/// The name of the attacker's memory files, as it appears in the server's `/proc/self/maps`.
pub const FILE: &str = "rdma-hostile";
/// The key of the lent regions. It is the lower half of the word in the slot of a lending.
const KEY: u64 = 77;
const PAGE: u64 = 4096;
/// The length of a file whose pages the attacker removes, in bytes. The ring has space for one
/// record for each page of the file.
const REMOVED: u64 = 512 * PAGE;
/// The number of files of length [`REMOVED`] that the attacker lends on a connection in one round.
const FILES: usize = 15;
/// In each group of this many connections, one lends files of length [`REMOVED`], and one removes
/// the pages of its segment. The others only lend.
const EACH: u64 = 8;
/// The number of kept files at which the attacker removes no more pages of lent files and segments.
const KEPT: usize = 512;
/// The length of a message that the server fetches as a copy, in bytes.
const MESSAGE: usize = 2 << 20;
/// The time for which the attacker keeps removing the pages of the copy of one message.
const FETCHED: Duration = Duration::from_millis(50);
/// The length of a large file, in bytes. One connection may lend 16 files of this length.
const LARGE: u64 = 16 << 20;

/// The settings of the attacker's process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The address of the server.
    pub server: SocketAddr,
    /// The number of connections.
    pub connections: usize,
    /// The number of lendings after which the attacker lends nothing more. If it is 0, the process
    /// is an honest peer.
    pub lendings: u64,
}

/// Creates a memory file of `len` bytes whose size is sealed, and adds `seals`. If `has_pages` is
/// true, allocates all pages.
///
/// # Panics
/// Panics if the system refuses the file, its pages or its seals.
#[must_use]
pub fn hostile_file(len: u64, has_pages: bool, seals: SealFlags) -> OwnedFd {
    let file = memfd_create(FILE, MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&file, len).expect("its length");
    if has_pages {
        fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len).expect("its pages");
    }
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | seals).expect("its seals");
    file
}

/// Announces a memory file to the peer, with the number and the word of its slot. Waits while the
/// socket is full. Returns false if the socket has failed.
#[must_use]
pub fn announce(doorbell: &OwnedFd, (slot, word): (u8, u64), rights: Access, (file, len): (&OwnedFd, u64)) -> bool {
    let mut packet = [0; 40];
    (packet[0], packet[1]) = (2, slot);
    packet[4..8].copy_from_slice(&rights.bits().to_le_bytes());
    packet[8..16].copy_from_slice(&word.to_le_bytes());
    packet[24..32].copy_from_slice(&len.to_le_bytes());
    loop {
        match send_all(doorbell.as_fd(), &packet, &[file.as_fd()]) {
            Ok(_) => return true,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::TOOMANYREFS) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(_) => return false,
        }
    }
}

/// A connection in shared memory: its segment, the file of the segment, and its Unix socket.
#[derive(Debug)]
struct Link {
    /// The number of connections that were made before this one.
    nth: u64,
    segment: MappedSegment,
    file: OwnedFd,
    doorbell: OwnedFd,
}

impl Link {
    /// Lends a file: writes the word of the slot to the table, and announces the file. Returns
    /// false if the socket has failed.
    fn lend(&self, slot: usize, generation: u64, rights: Access, file: (&OwnedFd, u64)) -> bool {
        let word = generation << 32 | KEY;
        self.segment.store(SegmentSide::Active.outgoing() + TABLE + 8 * slot, word);
        announce(&self.doorbell, (slot as u8, word), rights, file)
    }

    /// Waits until `right` returns true for the word at `at`, for at most 200 ms. Returns false if
    /// this time is over.
    fn becomes(&self, at: usize, right: impl Fn(u64) -> bool) -> bool {
        let begin = Instant::now();
        while !right(self.segment.load(at)) {
            if begin.elapsed() > Duration::from_millis(200) {
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        true
    }

    /// Lends a file, and removes its pages when the server has answered. Then sends a message for
    /// each page, with one byte of the page as the payload. Adds the file to `removed` if the pages
    /// could be removed. Returns false if the server does not answer, or does not consume the
    /// messages.
    fn remove(&self, generation: u64, rights: Access, removed: &mut Vec<OwnedFd>) -> bool {
        // If the server may only read the file, there are three cases: `FUTURE_WRITE` protects the
        // pages from removal; `SEAL` permits no further seals, so nobody can prevent the removal;
        // without both, the server adds `FUTURE_WRITE`.
        let seals = match generation % 3 {
            1 if rights.is_empty() => SealFlags::FUTURE_WRITE,
            2 if rights.is_empty() => SealFlags::SEAL,
            _ => SealFlags::empty(),
        };
        let file = hostile_file(REMOVED, true, seals);
        let answers = SegmentSide::Active.incoming() + HEAD;
        let before = self.segment.load(answers);
        if !self.lend(0, generation, rights, (&file, REMOVED)) || !self.becomes(answers, |now| now != before) {
            return false;
        }
        if hole(&file, 0, REMOVED) {
            removed.push(file);
        }
        let half = SegmentSide::Active.outgoing();
        let mut head = self.segment.load(half + HEAD);
        for page in 0..REMOVED / PAGE {
            let at = head as usize % CAPACITY;
            let size = if at + 16 > CAPACITY { CAPACITY - at } else { 16 };
            // A send with a payload of one byte in the window, or a record that fills the ring up
            // to its end.
            let kind = if size == 16 { 3 | 2 << 8 | 1 << 32 } else { 1 | (size as u64) << 32 };
            self.segment.poke(half + RING + at, kind);
            if size == 16 {
                self.segment.poke(half + RING + at + 8, page * PAGE);
            }
            head += size as u64;
        }
        self.segment.store(half + HEAD, head);
        let _ = send_all(self.doorbell.as_fd(), &[0], &[]);
        self.becomes(half + TAIL, |tail| tail == head)
    }
}

/// The state that the threads of the attacker share.
#[derive(Debug, Default)]
struct Lender {
    /// The Unix sockets of connections whose segment was not sent yet.
    new: Mutex<BTreeMap<SocketId, OwnedFd>>,
    links: Mutex<BTreeMap<SocketId, Arc<Link>>>,
    /// The number of connections that were made so far.
    made: AtomicU64,
    /// The number of lendings so far.
    lent: AtomicU64,
    /// The files whose pages were removed.
    removed: Mutex<Vec<OwnedFd>>,
    /// The copies of messages that the server is fetching, with the times of their announcements.
    copies: Mutex<Vec<(OwnedFd, Instant)>>,
    /// The largest result of [`Lender::charged_kib`] so far.
    charged_kib: AtomicU64,
}

impl Onlooker for Lender {
    fn met(&self, socket: SocketId, _: &[u8]) {
        locked(&self.new).extend(newest_doorbell().map(|doorbell| (socket, doorbell)));
    }

    fn passing(&self, socket: SocketId, _: &[u8], file: BorrowedFd<'_>) -> Option<OwnedFd> {
        let file = file.try_clone_to_owned().ok()?;
        let Some(doorbell) = locked(&self.new).remove(&socket) else {
            let is_copy = fstat(&file).is_ok_and(|stat| stat.st_size >= MESSAGE as i64);
            if is_copy && self.lent.load(Ordering::Relaxed) > 0 {
                locked(&self.copies).push((file, Instant::now()));
            }
            return None;
        };
        let (segment, _) = writable(&file)?;
        let nth = self.made.fetch_add(1, Ordering::Relaxed);
        locked(&self.links).insert(socket, Arc::new(Link { nth, segment, file, doorbell }));
        None
    }

    fn took(&self, _: SocketId, _: &[u8], _: BorrowedFd<'_>) {}

    fn closing(&self, socket: SocketId) {
        locked(&self.new).remove(&socket);
        locked(&self.links).remove(&socket);
    }
}

impl Lender {
    /// Lends memory on all connections, until the limit of lendings is reached.
    fn attack(&self, Settings { connections, lendings: most, .. }: Settings) {
        let connections = connections as u64;
        let sparse = hostile_file(1 << 40, false, SealFlags::FUTURE_WRITE);
        let large = hostile_file(LARGE, true, SealFlags::FUTURE_WRITE);
        let small = hostile_file(PAGE, true, SealFlags::FUTURE_WRITE);
        let mut rng = Rng::new(1, "lendings");
        let mut generation = 1;
        while self.lent.load(Ordering::Relaxed) < most {
            let links: Vec<_> = locked(&self.links).values().cloned().collect();
            for link in &links {
                generation += FILES as u64;
                // Large files use up the length that the server may map, so the first half of the
                // lendings has no large file.
                let kinds = if self.lent.load(Ordering::Relaxed) < most / 2 { 2 } else { 3 };
                let file = [(&sparse, 1 << 40), (&small, PAGE), (&large, LARGE)][rng.index(kinds)];
                let rights = if rng.below(2) == 0 { Access::empty() } else { Access::REMOTE };
                let mut lent = SLOTS as u64;
                // Connections that replace ended ones continue with the two attacks that end
                // connections.
                match if link.nth < connections { link.nth % EACH } else { link.nth % 2 } {
                    0 if locked(&self.removed).len() < KEPT => {
                        let mut removed = Vec::new();
                        (0..FILES as u64).all(|at| link.remove(generation + at, rights, &mut removed));
                        locked(&self.removed).extend(removed);
                        lent = FILES as u64;
                    }
                    1 if locked(&self.removed).len() < KEPT && hole(&link.file, 0, 32 << 10) => {
                        let _ = send_all(link.doorbell.as_fd(), &[0], &[]);
                        locked(&self.removed).extend(link.file.try_clone());
                    }
                    _ => (0..SLOTS).for_each(|slot| _ = link.lend(slot, generation, Access::empty(), file)),
                }
                if self.lent.fetch_add(lent, Ordering::Relaxed) + lent >= most {
                    break;
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Removes the pages of the copies that the server is fetching, again and again. Meanwhile,
    /// measures the charged pages. Never returns.
    fn remove_copies(&self) {
        let mut looked = Instant::now();
        loop {
            if looked.elapsed() > FETCHED {
                self.charged_kib.fetch_max(self.charged_kib(), Ordering::Relaxed);
                looked = Instant::now();
            }
            let mut copies = std::mem::take(&mut *locked(&self.copies));
            for (file, _) in &copies {
                hole(file, 0, MESSAGE as u64);
            }
            let fetched = copies.iter().position(|(_, since)| since.elapsed() < FETCHED).unwrap_or(copies.len());
            let mut removed = locked(&self.removed);
            removed.extend(copies.drain(..fetched).map(|(file, _)| file));
            removed.truncate(2 * KEPT);
            drop(removed);
            let pause = if copies.is_empty() { 1000 } else { 50 };
            locked(&self.copies).splice(0..0, copies);
            std::thread::sleep(Duration::from_micros(pause));
        }
    }

    /// Returns the size of the pages that the files in `removed` have now, in KiB. The attacker has
    /// removed all pages of these files, so the pages are charged to the server.
    fn charged_kib(&self) -> u64 {
        let removed = locked(&self.removed);
        removed.iter().filter_map(|file| u64::try_from(fstat(file).ok()?.st_blocks).ok()).sum::<u64>() / 2
    }
}

struct Program {
    settings: Settings,
    lender: Arc<Lender>,
    up: usize,
    opened: u64,
}

impl Program {
    fn open(&self, cx: &mut Context<'_>) {
        let _ = cx.connect(self.settings.server);
    }
}

impl Handler<Order> for Program {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        (self.up, self.opened) = (self.up + 1, self.opened + 1);
        // One in four connections that are opened during the attack sends a message that the server
        // fetches.
        if self.opened % 4 == 0 && self.lender.lent.load(Ordering::Relaxed) > 0 {
            let _ = cx.send(conn, &vec![7; MESSAGE]);
        }
        if self.opened == self.settings.connections as u64 {
            let _ = answer(&Report::default());
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        self.up -= 1;
        self.open(cx);
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: ConnectError) {
        self.open(cx);
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, order: Order) {
        let lent = self.lender.lent.load(Ordering::Relaxed);
        let charged_kib = self.lender.charged_kib().max(self.lender.charged_kib.load(Ordering::Relaxed));
        let report = Report { opened: lent, charged_kib, ..Report::default() };
        let is_alive = match order {
            Order::Go => {
                let (lender, settings) = (Arc::clone(&self.lender), self.settings);
                let remover = Arc::clone(&lender);
                std::thread::spawn(move || lender.attack(settings));
                std::thread::spawn(move || remover.remove_copies());
                true
            }
            Order::Report => answer(&report).is_ok(),
            Order::End => false,
        };
        if !is_alive {
            cx.stop();
        }
    }
}

/// Connects. Sends the answer that it is ready, and waits for the order to begin. Then attacks
/// until standard input ends.
///
/// # Errors
/// The reactor fails.
pub fn run(settings: Settings) -> Result<()> {
    let lender = Arc::new(Lender::default());
    let config = config(Security::Plain, true).wait(Wait::Event).timeouts(|t| t.connect = Duration::from_secs(60));
    let mut reactor = reactor(Arc::clone(&lender) as _, config)?;
    obey(reactor.handle());
    let mut program = Program { settings, lender, up: 0, opened: 0 };
    for _ in 0..settings.connections {
        program.open(&mut reactor.context());
    }
    Ok(reactor.run(&mut program)?)
}
