//! A key/value store whose clients use the memory of the server directly. They read a value by RDMA
//! Read, take its lock by an atomic compare-and-swap, write it by RDMA Write, and count updates by
//! an atomic fetch-and-add. The program of the server only sends the name of its memory. A client
//! that reads a value during an update sees that by its checksum, and reads again.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::thread;
use std::time::Duration;

use futures_util::try_join;
use rdma_reactor::aio::{AsyncConnection, AsyncReactor};
use rdma_reactor::{
    Access, Config, ConnectionId, Context, Handler, Immediate, Message, ProviderChoice, Reactor, Region, RegionOptions,
    RemoteRegion,
};

type Failure = Box<dyn Error + Send + Sync>;

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// The number of operations of each of the two clients.
const OPERATIONS: u64 = 500;
/// One of so many operations is an update, the others are reads.
const UPDATE_EVERY: u64 = 4;
const KEYS: usize = 4;
/// The author of the update that is written in two halves.
const HALVES: u64 = 3;

/// The number of updates is in the first word of the memory. The slots of the keys follow.
const FIRST_SLOT: usize = 64;
const SLOT: usize = 256;
const MEMORY: usize = FIRST_SLOT + KEYS * SLOT;

/// A slot is a lock, which is 0 while it is free, and a record.
const RECORD: Range<usize> = 8..SLOT;
/// How often a client reads a torn value, or tries to lock a value, before it gives up.
const TRIES: usize = 10_000;

/// A record: a version, the text of the value, and a checksum of both.
fn encode(version: u64, author: u64) -> Vec<u8> {
    let mut record = version.to_ne_bytes().to_vec();
    let text = format!("version {version} by client {author}. ");
    record.extend(text.bytes().cycle().take(RECORD.len() - 16));
    record.extend(checksum(&record).to_ne_bytes());
    record
}

/// Returns the version of a record, and its text. Returns `None` if the record is torn.
fn decode(record: &[u8]) -> Option<(u64, &[u8])> {
    let (content, sum) = record.split_last_chunk()?;
    let (version, text) = content.split_first_chunk()?;
    (checksum(content) == u64::from_ne_bytes(*sum)).then(|| (u64::from_ne_bytes(*version), text))
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The server: owns the memory, and does nothing after it has sent the name.
struct Server {
    memory: Region,
    messages: usize,
}

impl Handler for Server {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Err(error) = cx.send(conn, &self.memory.remote().to_bytes()) {
            eprintln!("server: {conn}: {error}");
            cx.close(conn);
        }
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {
        self.messages += 1;
    }

    fn on_immediate(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Immediate) {
        self.messages += 1;
    }
}

/// A client's view of the store.
struct Store {
    conn: AsyncConnection,
    remote: RemoteRegion,
    /// The target of atomic operations.
    word: Region,
    /// The source and target of writes and reads.
    record: Region,
}

impl Store {
    async fn connect(net: &AsyncReactor, address: SocketAddr) -> Result<Self, Failure> {
        let conn = net.connect(address).await?;
        let name = conn.recv().await?;
        let remote = RemoteRegion::from_bytes(&name).ok_or("no name of a region")?;
        let word = conn.register(8, &RegionOptions::new())?;
        let record = conn.register(RECORD.len(), &RegionOptions::new())?;
        Ok(Self { conn, remote, word, record })
    }

    /// A part of a key's slot.
    fn part(&self, key: usize, range: Range<usize>) -> Result<RemoteRegion, Failure> {
        let start = FIRST_SLOT + key * SLOT + range.start;
        Ok(self.remote.part(start as u64, range.len() as u64).ok_or("outside of the memory")?)
    }

    /// Reads a record once. Returns its version; `None` if it is torn.
    async fn read_once(&mut self, key: usize) -> Result<Option<u64>, Failure> {
        let from = self.part(key, RECORD)?;
        self.conn.read(from, &mut self.record, 0..RECORD.len()).await?;
        let bytes = self.record.bytes().ok_or("the record is lent")?;
        Ok(decode(bytes).map(|(version, _)| version))
    }

    /// Reads a record until it is whole, and returns its version.
    async fn read(&mut self, key: usize) -> Result<u64, Failure> {
        for _ in 0..TRIES {
            if let Some(version) = self.read_once(key).await? {
                return Ok(version);
            }
        }
        Err(format!("key {key} stays torn").into())
    }

    /// Replaces the lock of a key if it is `old`. Returns true if it was.
    async fn swap_lock(&mut self, key: usize, old: u64, new: u64) -> Result<bool, Failure> {
        let lock = self.part(key, 0..8)?;
        let (conn, word) = (&self.conn, &mut self.word);
        conn.operate(|cx| cx.remote(conn.id()).compare_swap(lock, word, 0, old, new)).await?;
        Ok(self.word.load(0) == old)
    }

    async fn lock(&mut self, key: usize, owner: u64) -> Result<(), Failure> {
        for _ in 0..TRIES {
            if self.swap_lock(key, 0, owner).await? {
                return Ok(());
            }
        }
        Err(format!("key {key} stays locked").into())
    }

    async fn unlock(&mut self, key: usize, owner: u64) -> Result<(), Failure> {
        match self.swap_lock(key, owner, 0).await? {
            true => Ok(()),
            false => Err(format!("key {key} was not locked by client {owner}").into()),
        }
    }

    /// Writes a part of a new record.
    async fn write(&mut self, key: usize, record: &[u8], part: Range<usize>) -> Result<(), Failure> {
        let to = self.part(key, RECORD.start + part.start..RECORD.start + part.end)?;
        self.record.copy_from(0, record)?;
        Ok(self.conn.write(to, &self.record, part).await?)
    }

    /// Replaces a value by its next version, and counts the update.
    async fn update(&mut self, key: usize, author: u64) -> Result<(), Failure> {
        self.lock(key, author).await?;
        let version = self.read(key).await? + 1;
        self.write(key, &encode(version, author), 0..RECORD.len()).await?;
        self.unlock(key, author).await?;
        let counter = self.remote.part(0, 8).ok_or("outside of the memory")?;
        let (conn, word) = (&self.conn, &mut self.word);
        Ok(conn.operate(|cx| cx.remote(conn.id()).fetch_add(counter, word, 0, 1)).await?)
    }
}

/// The program of a client: reads and updates in turn. Returns the number of its updates of each
/// key.
async fn work(store: &mut Store, author: u64) -> Result<[u64; KEYS], Failure> {
    let (mut updates, mut seen) = ([0; KEYS], [0; KEYS]);
    for operation in 0..OPERATIONS {
        let key = (operation * author / UPDATE_EVERY) as usize % KEYS;
        if operation % UPDATE_EVERY == 0 {
            store.update(key, author).await?;
            updates[key] += 1;
        } else {
            let version = store.read(key).await?;
            if version < seen[key] {
                return Err(format!("key {key}: {version} after {}", seen[key]).into());
            }
            seen[key] = version;
        }
    }
    Ok(updates)
}

/// Writes a record of the same version in two halves, and checks that the other client notices when
/// it reads only the first one.
async fn write_in_halves(writer: &mut Store, reader: &mut Store) -> Result<(), Failure> {
    writer.lock(0, HALVES).await?;
    let version = writer.read(0).await?;
    let (record, middle) = (encode(version, HALVES), RECORD.len() / 2);
    writer.write(0, &record, 0..middle).await?;
    // The end of a write does not prove that the bytes have arrived, so the reader tries until it
    // sees them.
    let mut tries = 0..TRIES;
    while reader.read_once(0).await?.is_some() {
        tries.next().ok_or("half an update was not noticed")?;
    }
    writer.write(0, &record, middle..RECORD.len()).await?;
    writer.unlock(0, HALVES).await?;
    match reader.read(0).await? {
        new if new == version => Ok(()),
        other => Err(format!("version {other} instead of {version}").into()),
    }
}

/// Runs two clients, each with its own connection. Returns the number of updates of each key.
fn clients(address: SocketAddr) -> Result<[u64; KEYS], Failure> {
    let net = AsyncReactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    let updates = net.run(async {
        let mut one = Store::connect(&net, address).await?;
        let mut two = Store::connect(&net, address).await?;
        let (mut updates, more) = try_join!(work(&mut one, 1), work(&mut two, 2))?;
        for (sum, count) in updates.iter_mut().zip(more) {
            *sum += count;
        }
        write_in_halves(&mut one, &mut two).await?;
        Ok::<_, Failure>(updates)
    })??;
    // The stores were dropped, so their connections close: in these turns.
    net.shutdown(Duration::from_secs(60))?;
    Ok(updates)
}

pub(super) fn run() -> Result<(), Failure> {
    let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let options = RegionOptions::new().allow(rights).any_peer();
    let mut memory = reactor.context().regions().register_at(HOST, MEMORY, &options)?;
    for key in 0..KEYS {
        memory.copy_from(FIRST_SLOT + key * SLOT + RECORD.start, &encode(0, 0))?;
    }
    let listener = reactor.context().listen((HOST, 0).into())?;
    let address = reactor.context().listeners().local_address(listener).ok_or("nobody listens")?;
    let remote = reactor.handle();
    let thread = thread::spawn(move || {
        let mut server = Server { memory, messages: 0 };
        reactor.run(&mut server).map(|()| server)
    });
    let outcome = clients(address);
    remote.stop();
    let server = thread.join().map_err(|_| "the server has panicked")??;
    let updates = outcome?;

    if server.messages > 0 {
        return Err(format!("the server's program saw {} messages", server.messages).into());
    }
    let counted = server.memory.load(0);
    if counted != 2 * OPERATIONS / UPDATE_EVERY {
        return Err(format!("{counted} updates were counted").into());
    }
    for (key, &updates) in updates.iter().enumerate() {
        let slot = FIRST_SLOT + key * SLOT;
        let mut record = vec![0; RECORD.len()];
        server.memory.copy_to(slot + RECORD.start, &mut record);
        let (version, text) = decode(&record).ok_or(format!("key {key} is torn"))?;
        if version != updates || !text.starts_with(format!("version {version} by").as_bytes()) {
            return Err(format!("key {key}: version {version} after {updates} updates").into());
        }
        if server.memory.load(slot) != 0 {
            return Err(format!("key {key} is locked").into());
        }
    }
    println!("two clients, {OPERATIONS} operations each: {counted} updates; half an update was noticed");
    Ok(())
}
