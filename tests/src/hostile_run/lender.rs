//! An attacker in shared memory that lends memory to its server without end. The memory has 1 TiB
//! without pages, or more than one connection may lend, or the attacker removes its pages after the
//! server has mapped it, and then has the server access them. It also sends messages that the
//! server fetches, and removes the pages of their copies all the time.
//!
//! The kernel charges a page to the process that accesses it first, until nobody has its file. So
//! the attacker keeps each file whose pages it has removed: a page that the file has again is one
//! that the server pays for.

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

/// The name of the attacker's memory files, as the server's `/proc/self/maps` has it.
pub const FILE: &str = "rdma-hostile";
/// The lower half of the word of each lending: the key of a region.
const KEY: u64 = 77;
const PAGE: u64 = 4096;
/// The length of a file whose pages the attacker removes: one record for each page fits into the
/// ring.
const REMOVED: u64 = 512 * PAGE;
/// The number of such files that are lent on one connection. The server accesses each page for one
/// byte of one message.
const FILES: usize = 15;
/// Of this number of connections, one lends such files, and one removes the pages of its segment.
const EACH: u64 = 8;
/// The largest number of files that the attacker keeps.
const KEPT: usize = 512;
/// The length of the messages of which the server fetches a copy.
const MESSAGE: usize = 2 << 20;
/// The time for which the attacker removes the pages of such a copy.
const FETCHED: Duration = Duration::from_millis(50);
/// The length of a file of which one connection may lend 16.
const LARGE: u64 = 16 << 20;

/// The settings of the attacker's process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The address of the server.
    pub server: SocketAddr,
    /// The number of connections.
    pub connections: usize,
    /// The number of lendings after which the attacker makes no more of them. With 0 it is an
    /// honest peer.
    pub lendings: u64,
}

/// Makes a memory file whose size is sealed, with or without pages.
///
/// # Panics
/// The system has no file or no pages.
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

/// Announces a memory file with the word of its slot, and waits until the socket has room. Returns
/// false if the socket has ended.
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

/// A connection in shared memory: its segment with the file, and its Unix socket.
#[derive(Debug)]
struct Link {
    /// The number of connections that were made before.
    nth: u64,
    segment: MappedSegment,
    file: OwnedFd,
    doorbell: OwnedFd,
}

impl Link {
    /// Lends a file in a slot.
    fn lend(&self, slot: usize, generation: u64, rights: Access, file: (&OwnedFd, u64)) -> bool {
        let word = generation << 32 | KEY;
        self.segment.store(SegmentSide::Active.outgoing() + TABLE + 8 * slot, word);
        announce(&self.doorbell, (slot as u8, word), rights, file)
    }

    /// Waits until the word at `at` has a value that is `right`, but no longer than 200 ms. Returns
    /// true if it has.
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

    /// Lends a file, removes its pages once the server has answered, and sends a message of one
    /// byte of each page. Adds the file to `removed` if pages could be removed. Returns false if
    /// the server does not answer.
    fn remove(&self, generation: u64, rights: Access, removed: &mut Vec<OwnedFd>) -> bool {
        // The server may only read every second file, one half of which can lose its pages for
        // good.
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

/// The connections of the attacker, and what it has got.
#[derive(Debug, Default)]
struct Lender {
    /// The Unix sockets of connections whose segment was not sent yet.
    new: Mutex<BTreeMap<SocketId, OwnedFd>>,
    links: Mutex<BTreeMap<SocketId, Arc<Link>>>,
    /// The number of connections that were made.
    made: AtomicU64,
    /// The number of lendings.
    lent: AtomicU64,
    /// The files whose pages were removed.
    removed: Mutex<Vec<OwnedFd>>,
    /// The copies of messages that the server fetches now, and the times of their announcements.
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
    /// Lends memory on all connections, until enough lendings are made.
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
                // Large files use up what the server maps, so the first half has none.
                let kinds = if self.lent.load(Ordering::Relaxed) < most / 2 { 2 } else { 3 };
                let file = [(&sparse, 1 << 40), (&small, PAGE), (&large, LARGE)][rng.index(kinds)];
                let rights = if rng.below(2) == 0 { Access::empty() } else { Access::REMOTE };
                let mut lent = SLOTS as u64;
                // The connections that take the place of others continue with what has ended those.
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

    /// Removes the pages of the copies that the server fetches, all the time. Looks for charged
    /// pages meanwhile.
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

    /// Returns the pages that files have now although the attacker has removed all of them, in KiB.
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
        // Some of the connections that take the place of others send a message that is fetched.
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
