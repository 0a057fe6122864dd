//! Where the one-sided operations of a side go: memory that the peer has lent, and memory of its own.

use rdma_reactor::{Access, ConnectionId, Context, Error, Region, RegionOptions, RemoteRegion};

use super::failure::Failure;
use super::job::Op;
use super::outlet::Sent;

/// Bytes of a word: what a processor reads at once.
const WORD: usize = 8;

/// Memory of `size` bytes that a peer may write, or may read.
///
/// # Errors
/// The device or the system refused.
pub fn lend(cx: &mut Context<'_>, conn: ConnectionId, size: u32, op: Op) -> Result<Region, Error> {
    let access = if op == Op::Read { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
    cx.register(conn, whole_words(size), &RegionOptions::new().allow(access))
}

fn whole_words(size: u32) -> usize {
    (size as usize).next_multiple_of(WORD)
}

/// Where the one-sided operations of a side go. A block ends with the memory, so that its last byte is the last of a word.
#[derive(Debug)]
pub struct Target {
    op: Op,
    local: Region,
    remote: RemoteRegion,
    size: usize,
    count: Option<Count>,
}

/// What lets the last byte of each block count the blocks.
#[derive(Debug)]
struct Count {
    /// Every byte there is, in order: memory that is being sent is not to change, so that each block has its own last byte.
    bytes: Region,
    /// Blocks written.
    blocks: u8,
}

impl Target {
    /// For blocks of `size` bytes, in what the peer has [lent](lend).
    ///
    /// # Errors
    /// It has not lent enough, or there is no memory here.
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
        let local = cx.register(conn, len, &RegionOptions::new())?;
        Ok(Self { op, local, remote, size: size as usize, count: None })
    }

    /// Lets the last byte of each block count the blocks, for an [`Inbox`].
    ///
    /// # Errors
    /// There is no memory here.
    pub fn counting(mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<Self, Failure> {
        let bytes = cx.register_vec(conn, (0..=u8::MAX).collect(), &RegionOptions::new())?;
        self.count = Some(Count { bytes, blocks: 0 });
        Ok(self)
    }

    /// Reads or writes one block.
    pub fn go(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Sent {
        let end = self.local.len();
        let range = end - self.size..end;
        if self.op == Op::Read {
            return cx.read(conn, self.remote, &mut self.local, range).map_or_else(Sent::from, |_| Sent::Yes);
        }
        let Some(count) = &mut self.count else {
            return cx.write(conn, self.remote, &self.local, range).map_or_else(Sent::from, |_| Sent::Yes);
        };
        let next = count.blocks.wrapping_add(1);
        let last = (&count.bytes, usize::from(next)..usize::from(next) + 1);
        let both = [(&self.local, range.start..end - 1), last.clone()];
        match cx.write_vectored(conn, self.remote, if self.size > 1 { &both } else { std::slice::from_ref(&last) }) {
            Ok(_) => {
                count.blocks = next;
                Sent::Yes
            }
            Err(kind) => kind.into(),
        }
    }
}

/// Memory that the peer writes blocks to, watched from here. Nothing else says that a block has come: what `ib_write_lat`
/// does, too. The last byte is there last on every device known; no standard says that it has to be.
#[derive(Debug)]
pub struct Inbox {
    memory: Region,
    /// Blocks seen.
    count: u8,
}

impl Inbox {
    /// What was [lent](lend) to the peer.
    #[must_use]
    pub const fn new(memory: Region) -> Self {
        Self { memory, count: 0 }
    }

    /// Whether the next block has come since the last time that it had.
    #[inline]
    pub fn has_come(&mut self) -> bool {
        let last = self.memory.load(self.memory.len() - WORD).to_ne_bytes()[WORD - 1];
        let come = last == self.count.wrapping_add(1);
        self.count = self.count.wrapping_add(u8::from(come));
        come
    }
}
