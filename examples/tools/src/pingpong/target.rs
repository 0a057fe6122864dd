//! Memory for one-sided operations: the peer's memory, and the local memory.

use rdma_reactor::{Access, ConnectionId, Context, Error, Region, RegionOptions, RemoteRegion};

use super::failure::Failure;
use super::job::{Job, Op};
use super::outlet::Sent;

/// The length of a word in bytes. A processor reads a word in one access.
const WORD: usize = 8;

/// Registers local memory that the peer reads or writes in a job.
///
/// # Errors
/// The device or the system failed.
pub fn lend(cx: &mut Context<'_>, conn: ConnectionId, job: &Job) -> Result<Region, Error> {
    let access = if job.op == Op::Read { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
    let options = RegionOptions::new().allow(access);
    cx.regions().register(conn, whole_words(job.size), &if job.direct { options.direct() } else { options })
}

fn whole_words(size: u32) -> usize {
    (size as usize).next_multiple_of(WORD)
}

/// The target of one-sided operations. Blocks are aligned to the end of the memory, so that the last byte of a block is the last byte
/// of a word.
#[derive(Debug)]
pub struct Target {
    op: Op,
    local: Region,
    remote: RemoteRegion,
    size: usize,
    count: Option<BlockCount>,
}

/// The numbering of blocks: the last byte of each block is the block's number, modulo 256.
#[derive(Debug)]
struct BlockCount {
    /// A region with all 256 values of a byte, in order. The last byte of each block is sent from the offset of its value in this region. A
    /// single variable byte would not suffice, because it could not be changed while the device is still sending it.
    bytes: Region,
    /// The number of blocks that were written, modulo 256.
    blocks: u8,
}

impl Target {
    /// Makes a target for blocks of `size` bytes, in memory that the peer has registered by [`lend`].
    ///
    /// # Errors
    /// The peer's memory is too small, or local memory cannot be registered.
    pub fn new(
        cx: &mut Context<'_>,
        conn: ConnectionId,
        size: u32,
        op: Op,
        lent: RemoteRegion,
    ) -> Result<Self, Failure> {
        let len = whole_words(size);
        let start = len - size as usize;
        let remote = lent
            .part(start as u64, size.into())
            .ok_or_else(|| Failure::new(format!("the peer has lent {} bytes where {size} are needed", lent.len)))?;
        let access = if op == Op::Read { Access::READ_SINK } else { Access::empty() };
        let local = cx.regions().register(conn, len, &RegionOptions::new().allow(access))?;
        Ok(Self { op, local, remote, size: size as usize, count: None })
    }

    /// Makes this target write a running number to the last byte of each block. An [`Inbox`] at the peer polls this byte.
    ///
    /// # Errors
    /// Local memory cannot be registered.
    pub fn counting(mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<Self, Failure> {
        let bytes = cx.regions().register_vec(conn, (0..=u8::MAX).collect(), &RegionOptions::new())?;
        self.count = Some(BlockCount { bytes, blocks: 0 });
        Ok(self)
    }

    /// Starts to read or write one block. Returns the result of posting the operation.
    pub fn go(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Sent {
        let end = self.local.len();
        let range = end - self.size..end;
        if self.op == Op::Read {
            return cx.remote(conn).read(self.remote, &mut self.local, range).map_or_else(Sent::from, |_| Sent::Yes);
        }
        let Some(count) = &mut self.count else {
            return cx.remote(conn).write(self.remote, &self.local, range).map_or_else(Sent::from, |_| Sent::Yes);
        };
        let next = count.blocks.wrapping_add(1);
        let last = (&count.bytes, usize::from(next)..usize::from(next) + 1);
        let both = [(&self.local, range.start..end - 1), last];
        match cx.remote(conn).write_vectored(self.remote, if self.size > 1 { &both } else { &both[1..] }) {
            Ok(_) => {
                count.blocks = next;
                Sent::Yes
            }
            Err(kind) => kind.into(),
        }
    }
}

/// The memory that the peer writes blocks to. This side polls the memory, because nothing else reports the arrival of a block;
/// `ib_write_lat` does the same. The polling relies on the device to write the last byte of a block last. All known devices do so, but no
/// standard requires it.
#[derive(Debug)]
pub struct Inbox {
    memory: Region,
    /// The number of blocks that have arrived, modulo 256.
    count: u8,
}

impl Inbox {
    /// Makes an inbox of memory that was registered by [`lend`].
    #[must_use]
    pub const fn new(memory: Region) -> Self {
        Self { memory, count: 0 }
    }

    /// Returns true if another block has arrived since the last call that returned true.
    #[inline]
    pub fn has_come(&mut self) -> bool {
        let last = self.memory.load(self.memory.len() - WORD).to_ne_bytes()[WORD - 1];
        let come = last == self.count.wrapping_add(1);
        self.count = self.count.wrapping_add(u8::from(come));
        come
    }
}
