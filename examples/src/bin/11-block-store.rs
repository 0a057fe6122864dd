//! A block store in a file that copies no block in memory. The client offers each block with its number as a tag. The server reads the
//! block by RDMA Read into aligned memory, and writes the file from there (`O_DIRECT`). For a requested block, the server reads the
//! file into aligned memory, and writes the block to the client's memory by RDMA Write.
//!
//! `11-block-store [FILE]`: without a file name, the program uses a temporary file. Its name is removed as soon as the file is open, so
//! the file does not outlive the program.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc::O_DIRECT;
use rdma_reactor::{
    Access, Config, ConnectError, ConnectionId, Context, DisconnectReason, Failure, Handler, Message, OfferId, Offered,
    Outcome, Piece, ProviderChoice, Reactor, Region, RegionOptions, RemoteRegion, SendErrorKind, SendId, Transfer,
    TransferEnd, TransferId, TransferOptions,
};

const BLOCK: usize = 256 << 10;
const BLOCKS: u64 = 512;
/// The number of blocks that each side has in memory at a time.
const SLOTS: usize = 16;
/// The time limit for sending a requested block.
const PATIENCE: Duration = Duration::from_secs(30);

type Done = Result<(), Box<dyn Error>>;

/// The server, which owns the file. It serves one client, so it may block on the file. A server for many clients would access the file
/// on other threads.
struct Store {
    file: File,
    /// Free regions for one block each. A region begins at a page boundary, as `O_DIRECT` requires. Peers have no rights to it.
    free: Vec<Region>,
    landing: BTreeMap<OfferId, Region>,
    sending: BTreeMap<TransferId, Region>,
    /// Requested blocks that wait for a free region: the number of the block, and its destination in the client's memory.
    wanted: Vec<(u64, RemoteRegion)>,
}

impl Store {
    fn write(&mut self, block: u64, region: &Region) -> Done {
        let bytes = region.bytes().ok_or("the block is lent")?;
        Ok(self.file.write_all_at(bytes, block * BLOCK as u64)?)
    }

    /// Sends requested blocks while there are free regions.
    fn answer(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Done {
        while !self.wanted.is_empty() {
            let Some(mut region) = self.free.pop() else { break };
            let Some((block, place)) = self.wanted.pop() else { break };
            self.file.read_exact_at(region.bytes_mut().ok_or("the block is lent")?, block * BLOCK as u64)?;
            // After the block, the transfer sends a message with the number of the block.
            let options = TransferOptions::within(PATIENCE).message(&block.to_le_bytes());
            let sent = cx.remote(conn).transfer(Transfer::Write(&[&region]), vec![Piece::new(0, place)], &options)?;
            self.sending.insert(sent, region);
        }
        Ok(())
    }
}

/// If `done` is an error, prints it and closes the connection.
fn check(cx: &mut Context<'_>, conn: ConnectionId, done: Done) {
    if let Err(error) = done {
        eprintln!("{conn}: {error}");
        cx.close(conn);
    }
}

impl Handler for Store {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        for _ in 0..SLOTS {
            match cx.regions().register(conn, BLOCK, &RegionOptions::new()) {
                Ok(region) => self.free.push(region),
                Err(error) => return check(cx, conn, Err(error.into())),
            }
        }
    }

    fn on_offer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered) {
        if offer.len == BLOCK as u64 && offer.tag.is_some_and(|block| block < BLOCKS) {
            if let Some(mut region) = self.free.pop() {
                let landed = cx.land(conn, offer.id, &mut region, 0);
                self.landing.insert(offer.id, region);
                return check(cx, conn, landed.map_err(Into::into));
            }
        }
        let refused = cx.refuse_offer(conn, offer.id);
        check(cx, conn, refused.map_err(Into::into));
    }

    fn on_landed(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered, result: Result<(), Failure>) {
        let (Some(region), Some(block)) = (self.landing.remove(&offer.id), offer.tag) else { return };
        if result.is_ok() {
            let written = self.write(block, &region);
            check(cx, conn, written);
        }
        self.free.push(region);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let (place, block) = message.split_at_checked(RemoteRegion::LEN).unwrap_or_default();
        let block = block.try_into().map(u64::from_le_bytes).ok().filter(|&block| block < BLOCKS);
        let place = RemoteRegion::from_bytes(place).filter(|place| place.len == BLOCK as u64);
        let Some(wanted) = block.zip(place) else { return check(cx, conn, Err("the request names no block".into())) };
        self.wanted.push(wanted);
        let answered = self.answer(cx, conn);
        check(cx, conn, answered);
    }

    fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, transfer: TransferId, end: TransferEnd) {
        self.free.extend(self.sending.remove(&transfer));
        if end.is_done() {
            let answered = self.answer(cx, conn);
            check(cx, conn, answered);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        cx.stop();
    }
}

/// Returns consecutive 8-byte numbers from 0 on. The content of each block is a range of them
/// ([`content`]).
fn words() -> Vec<u8> {
    (0..BLOCK as u64 / 8 + BLOCKS).flat_map(u64::to_le_bytes).collect()
}

/// Returns the bytes of the block with this number: the words that begin with the number. No two blocks have the same bytes.
fn content(words: &[u8], block: u64) -> &[u8] {
    &words[8 * block as usize..][..BLOCK]
}

/// The client: stores all blocks, then requests them and compares them with the stored content.
struct Client {
    started: Instant,
    /// The content of all blocks. It is built before the connection is made, because a callback should be short.
    words: Vec<u8>,
    /// The blocks that are not stored yet.
    to_store: Vec<u64>,
    /// The blocks that are not requested yet.
    to_ask: Vec<u64>,
    stored: u64,
    compared: u64,
    free: Vec<Region>,
    storing: BTreeMap<SendId, (u64, Region)>,
    asked: BTreeMap<u64, Region>,
}

impl Client {
    fn go_on(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Done {
        while !self.to_store.is_empty() {
            let Some(mut region) = self.free.pop() else { return Ok(()) };
            let Some(block) = self.to_store.pop() else { break };
            region.copy_from(0, content(&self.words, block))?;
            match cx.offer(conn, &region, 0..BLOCK, block) {
                Ok(send) => _ = self.storing.insert(send, (block, region)),
                Err(SendErrorKind::WouldBlock(_)) => {
                    // The offer was refused for now, so the block is offered again later. The reactor calls `on_writable` when sends are
                    // possible again.
                    self.to_store.push(block);
                    self.free.push(region);
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
        while self.stored == BLOCKS && !self.to_ask.is_empty() {
            let Some(region) = self.free.pop() else { break };
            let Some(block) = self.to_ask.pop() else { break };
            let request = [&region.remote().to_bytes()[..], &block.to_le_bytes()].concat();
            match cx.send(conn, &request) {
                Ok(_) => _ = self.asked.insert(block, region),
                Err(SendErrorKind::WouldBlock(_)) => {
                    self.to_ask.push(block);
                    self.free.push(region);
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn say(&mut self, what: &str) {
        let mebibytes = (BLOCKS as usize * BLOCK) as f64 / f64::from(1 << 20);
        let seconds = self.started.elapsed().as_secs_f64();
        println!("{BLOCKS} blocks of {} KiB {what}: {:.0} MiB/s", BLOCK >> 10, mebibytes / seconds);
        self.started = Instant::now();
    }
}

impl Handler for Client {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // To store a block, the server reads it from this memory. To return a block, the server writes it to this memory.
        let options = RegionOptions::new().allow(Access::REMOTE_READ | Access::REMOTE_WRITE);
        for _ in 0..SLOTS {
            match cx.regions().register(conn, BLOCK, &options) {
                Ok(region) => self.free.push(region),
                Err(error) => return check(cx, conn, Err(error.into())),
            }
        }
        let gone_on = self.go_on(cx, conn);
        check(cx, conn, gone_on);
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        if let Some((block, region)) = self.storing.remove(&send) {
            self.free.push(region);
            match outcome {
                Outcome::Sent => self.stored += 1,
                // The server refused the offer because it has no free region, so the client offers the block again.
                Outcome::Refused => self.to_store.push(block),
                // The connection has failed. The reactor calls `on_disconnect` next.
                _ => return,
            }
            if self.stored == BLOCKS {
                self.say("stored");
            }
            let gone_on = self.go_on(cx, conn);
            check(cx, conn, gone_on);
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let gone_on = self.go_on(cx, conn);
        check(cx, conn, gone_on);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let block = message[..].try_into().map(u64::from_le_bytes).unwrap_or(BLOCKS);
        let Some(region) = self.asked.remove(&block) else { return };
        let mut bytes = vec![0; BLOCK];
        region.copy_to(0, &mut bytes);
        self.free.push(region);
        if bytes != content(&self.words, block) {
            return check(cx, conn, Err(format!("block {block} is not what was stored").into()));
        }
        self.compared += 1;
        if self.compared == BLOCKS {
            self.say("read back and compared");
            return cx.close(conn);
        }
        let gone_on = self.go_on(cx, conn);
        check(cx, conn, gone_on);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if self.compared != BLOCKS {
            eprintln!("{conn}: {reason}");
        }
        cx.stop();
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        eprintln!("{conn}: {error}");
        cx.stop();
    }
}

/// Opens the file with `O_DIRECT` if its file system supports that flag, and otherwise without it.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    options.clone().custom_flags(O_DIRECT).open(path).or_else(|error| {
        println!("{}: {error} with O_DIRECT, so opened without it", path.display());
        options.open(path)
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let named = env::args_os().nth(1).map(PathBuf::from);
    let path = named.clone().unwrap_or_else(|| env::temp_dir().join(format!("block-store-{}", std::process::id())));
    let file = open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    if named.is_none() {
        fs::remove_file(&path)?;
    }
    file.set_len(BLOCKS * BLOCK as u64)?;

    let config = Config::default().provider(ProviderChoice::Iwarp);
    let mut server = Reactor::new(config.clone())?;
    let listener = server.context().listen("127.0.0.1:0".parse()?)?;
    let address = server.context().listeners().local_address(listener).ok_or("the listener is gone")?;
    let (landing, sending) = (BTreeMap::new(), BTreeMap::new());
    let mut store = Store { file, free: Vec::new(), landing, sending, wanted: Vec::new() };
    let thread = thread::spawn(move || server.run(&mut store));
    let mut client = Client {
        started: Instant::now(),
        words: words(),
        to_store: (0..BLOCKS).rev().collect(),
        to_ask: (0..BLOCKS).rev().collect(),
        stored: 0,
        compared: 0,
        free: Vec::new(),
        storing: BTreeMap::new(),
        asked: BTreeMap::new(),
    };
    let mut reactor = Reactor::new(config)?;
    reactor.context().connect(address)?;
    reactor.run(&mut client)?;
    // Without a connection, the store does not end. So the program does not wait for it.
    if client.compared != BLOCKS {
        return Err(format!("{} of {BLOCKS} blocks came back as they were", client.compared).into());
    }
    thread.join().map_err(|_| "the store panicked")??;
    Ok(())
}
