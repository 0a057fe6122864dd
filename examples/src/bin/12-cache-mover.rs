//! Moves 10,000 blocks of a cache between the memories of two machines by two transfers, with one completion each. A read fetches
//! blocks from scattered addresses. A write completes only after the blocks have arrived. Both have a time limit. A third transfer is
//! cancelled, and its result reports which blocks have arrived. A key/value cache of a language model moves its blocks in this way.
//!
//! `12-cache-mover [BYTES]`: the length of a block, 4096 by default.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::env;
use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use rdma_reactor::{
    Access, Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Immediate, Message, Piece,
    ProviderChoice, Reactor, Region, RegionOptions, RemoteRegion, TimerId, Transfer, TransferEnd, TransferId,
    TransferOptions,
};

const BLOCKS: usize = 10_000;
/// The time limit of a transfer. The transfer ends at this limit, even if the peer does nothing.
const WITHIN: Duration = Duration::from_secs(30);

/// Returns the number of the owner's block that corresponds to block `nth` of the mover. Consecutive blocks of the mover are scattered
/// over the owner's cache.
const fn block_of(nth: usize) -> usize {
    nth * 7919 % BLOCKS
}

/// Returns the number of blocks of `len` bytes that consist only of the byte that `byte_of` returns for their number.
fn count_correct(blocks: &[u8], len: usize, byte_of: impl Fn(usize) -> u8) -> usize {
    let is_correct = |(nth, block): (usize, &[u8])| block.iter().all(|&byte| byte == byte_of(nth));
    blocks.chunks(len).enumerate().filter(|&block| is_correct(block)).count()
}

/// The passive side: its memory is read and written, and its program does nothing during the transfers.
struct Owner {
    /// The content of the cache, until it is registered.
    content: Vec<u8>,
    cache: Option<Region>,
    /// The number of bytes of which the mover has notified the owner.
    notified: u64,
    /// A copy of the cache, made when the mover's notification arrived. It is checked after the
    /// transfers, because a reactor does not serve its peers during a callback.
    written: Vec<u8>,
}

impl Handler for Owner {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let options = RegionOptions::new().allow(Access::REMOTE_READ | Access::REMOTE_WRITE);
        match cx.regions().register_vec(conn, std::mem::take(&mut self.content), &options) {
            Ok(cache) => {
                cx.send(conn, &cache.remote().to_bytes()).expect("a new connection has room");
                self.cache = Some(cache);
            }
            Err(error) => {
                eprintln!("{conn}: {error}");
                cx.close(conn);
            }
        }
    }

    fn on_immediate(&mut self, _: &mut Context<'_>, _: ConnectionId, immediate: Immediate) {
        self.notified = immediate.len.into();
        let Some(cache) = &self.cache else { return };
        self.written.resize(cache.len(), 0);
        cache.copy_to(0, &mut self.written);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        cx.stop();
    }
}

/// The active side, which starts the transfers.
struct Mover {
    /// The length of a block, in bytes.
    block: usize,
    blocks: Option<Region>,
    pieces: Vec<Piece>,
    transfers: usize,
    /// A copy of the blocks after the first transfer.
    read: Vec<u8>,
    started: Instant,
    /// The transfer that the program cancels, with its connection.
    cancel: Option<(ConnectionId, TransferId)>,
}

impl Mover {
    /// Begins the next transfer. After the last one, closes the connection.
    fn go_on(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Box<dyn Error>> {
        let blocks = self.blocks.as_mut().ok_or("no memory was registered")?;
        let pieces = std::mem::take(&mut self.pieces);
        let options = TransferOptions::within(WITHIN);
        self.transfers += 1;
        // Fills the memory before the clock is read, so that page faults are not measured.
        blocks.copy_from(0, &vec![0xff; self.block * BLOCKS])?;
        self.started = Instant::now();
        match self.transfers {
            1 => {
                cx.remote(conn).transfer(Transfer::Read(&mut [blocks]), pieces, &options)?;
            }
            2 => {
                // On iWARP, the completion of a write does not show that the data has arrived. With `confirm`, a read of a few bytes
                // follows the last block; the completion of this read shows that all blocks have arrived.
                cx.remote(conn).transfer(Transfer::Write(&[blocks]), pieces, &options.confirm().immediate(1))?;
            }
            3 => {
                let transfer = cx.remote(conn).transfer(Transfer::Read(&mut [blocks]), pieces, &options)?;
                self.cancel = Some((conn, transfer));
                cx.timers().set(Duration::from_millis(2), 0);
            }
            _ => cx.close(conn),
        }
        Ok(())
    }
}

impl Handler for Mover {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let len = self.block;
        let place = |cache: RemoteRegion, nth| cache.part((block_of(nth) * len) as u64, len as u64);
        if let Some(cache) = RemoteRegion::from_bytes(&message) {
            self.pieces = (0..BLOCKS).filter_map(|nth| Some(Piece::new(nth * len, place(cache, nth)?))).collect();
        }
        // The memory is the destination of reads. An iWARP adapter requires the right `READ_SINK` for such memory.
        let options = RegionOptions::new().allow(Access::READ_SINK);
        self.blocks = cx.regions().register(conn, len * BLOCKS, &options).ok();
        let gone_on = self.go_on(cx, conn);
        check(cx, conn, gone_on);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if let Some((conn, transfer)) = self.cancel {
            // The cancelled transfer posts no further pieces. It ends when all posted pieces have completed.
            cx.remote(conn).cancel_transfer(transfer);
        }
    }

    fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: TransferId, end: TransferEnd) {
        let (time, bytes) = (self.started.elapsed(), (end.there * self.block) as f64);
        let rate = bytes / time.as_secs_f64() / f64::from(1 << 20);
        let untouched = end.untouched();
        println!("{:?}: {} blocks have arrived ({rate:.0} MiB/s), {untouched} were not begun", end.outcome, end.there);
        if self.transfers == 1 {
            self.read.resize(self.block * BLOCKS, 0);
            self.blocks.iter().for_each(|blocks| blocks.copy_to(0, &mut self.read));
        }
        self.pieces = end.pieces;
        let gone_on = self.go_on(cx, conn);
        check(cx, conn, gone_on);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if self.transfers <= 3 {
            eprintln!("{conn}: {reason}");
        }
        cx.stop();
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        eprintln!("{conn}: {error}");
        cx.stop();
    }
}

/// If `done` is an error, prints it and closes the connection.
fn check(cx: &mut Context<'_>, conn: ConnectionId, done: Result<(), Box<dyn Error>>) {
    if let Err(error) = done {
        eprintln!("{conn}: {error}");
        cx.close(conn);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let argument = env::args().nth(1).unwrap_or("4096".into());
    let bound = 1..=u32::MAX as usize / BLOCKS;
    let block = argument.parse().ok().filter(|block| bound.contains(block));
    let block: usize = block.ok_or_else(|| format!("{argument:?} is not a length of a block: give {bound:?} bytes"))?;
    let config = Config::default().provider(ProviderChoice::Iwarp);
    let mut owner = Reactor::new(config.clone())?;
    let listener = owner.context().listen("127.0.0.1:0".parse()?)?;
    let address = owner.context().listeners().local_address(listener).ok_or("the listener is gone")?;
    let content = (0..BLOCKS).flat_map(|nth| std::iter::repeat_n(nth as u8, block)).collect();
    let thread = thread::spawn(move || {
        let mut handler = Owner { content, cache: None, notified: 0, written: Vec::new() };
        owner.run(&mut handler).map(|()| (handler.notified, handler.written))
    });
    let (pieces, started) = (Vec::new(), Instant::now());
    let mut mover = Mover { block, blocks: None, pieces, transfers: 0, read: Vec::new(), started, cancel: None };
    let mut reactor = Reactor::new(config)?;
    reactor.context().connect(address)?;
    reactor.run(&mut mover)?;
    // Without a connection, the owner does not end. So the program does not wait for it.
    if mover.transfers != 4 {
        return Err("not all transfers were begun".into());
    }
    let (notified, written) = thread.join().map_err(|_| "the owner panicked")??;
    let read = count_correct(&mover.read, block, |nth| block_of(nth) as u8);
    let written = count_correct(&written, block, |_| 0xff);
    println!("{read} blocks are correct");
    println!("the owner was notified of {notified} bytes, and {written} blocks are correct");
    if (read, written) != (BLOCKS, BLOCKS) {
        return Err(format!("of {BLOCKS} blocks, {read} were read and {written} written correctly").into());
    }
    Ok(())
}
