//! Reads the table as a client. Repeats an RDMA Read until it returns a consistent entry.

use rdma_reactor::{Access, ConnectionId, Context, Region, RegionOptions};

use super::table::{HEADER, Slot};
use super::wire::TableHello;
use crate::pingpong::failure::Failure;

/// The number of consecutive torn reads after which the reader gives up. A concurrent writer cannot cause so many.
const PATIENCE: u32 = 100_000;

/// A reader, which looks up one key at a time.
// bound: tool-kv
#[derive(Debug)]
pub struct Reader {
    hello: TableHello,
    /// The local region that reads are written to.
    sink: Region,
    /// A copy of the bytes that were read. On iWARP adapters, the peer may write to `sink` even after the read, so the checks use this
    /// copy.
    slot: Vec<u8>,
    key: Vec<u8>,
    /// The offsets of the slots that may have the key. The last offset is that of the current read. This offset is removed from the list if
    /// the slot has another key.
    places: Vec<u64>,
    torn: u32,
    /// The number of reads that were repeated, summed over all keys.
    pub retries: u64,
}

/// The result of a completed read.
#[derive(Debug, PartialEq, Eq)]
pub enum LookupResult<'a> {
    /// The entry is not found yet: another read is in flight.
    NotYet,
    /// The table has no such key.
    Nothing,
    /// The value of the key.
    Value(&'a [u8]),
}

impl Reader {
    /// Makes a reader for the table that the server's hello describes.
    ///
    /// # Errors
    /// Memory for one slot could not be registered.
    pub fn new(cx: &mut Context<'_>, conn: ConnectionId, hello: TableHello) -> Result<Self, Failure> {
        let len = hello.geometry.slot_len();
        let sink = cx.regions().register(conn, len, &RegionOptions::new().allow(Access::READ_SINK))?;
        Ok(Self { hello, sink, slot: vec![0; len], key: Vec::new(), places: Vec::new(), torn: 0, retries: 0 })
    }

    /// Starts to look up a key. When the read has completed, the caller must call [`Reader::completed`].
    ///
    /// # Errors
    /// The read was refused.
    pub fn look(&mut self, cx: &mut Context<'_>, conn: ConnectionId, key: &[u8]) -> Result<(), Failure> {
        self.key.clear();
        self.key.extend_from_slice(key);
        self.places.clear();
        self.places.extend(self.hello.geometry.places(key));
        // The current offset is the last one of the list, so the preferred slot must be last.
        self.places.reverse();
        self.torn = 0;
        self.read(cx, conn)
    }

    fn read(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        let len = self.hello.geometry.slot_len();
        let place = self.places.last().and_then(|&offset| self.hello.region.part(offset, len as u64));
        let place = place.ok_or_else(|| Failure::new("the server's table is smaller than it says"))?;
        cx.remote(conn).read(place, &mut self.sink, 0..len).map_err(Failure::new)?;
        Ok(())
    }

    /// Evaluates a read that has completed successfully.
    ///
    /// # Errors
    /// The next read was refused, or the slot was torn in too many reads.
    pub fn completed(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<LookupResult<'_>, Failure> {
        self.sink.copy_to(0, &mut self.slot);
        let value = match Slot::parse(&self.slot) {
            Slot::Empty => return Ok(LookupResult::Nothing),
            Slot::Entry { key, value, .. } if key == self.key => Some(value.len()),
            Slot::Entry { .. } => {
                self.places.pop();
                if self.places.is_empty() {
                    return Ok(LookupResult::Nothing);
                }
                None
            }
            Slot::Torn if self.torn == PATIENCE => {
                return Err(Failure::new(format!("an entry was torn {PATIENCE} times in a row")));
            }
            Slot::Torn => {
                (self.torn, self.retries) = (self.torn + 1, self.retries + 1);
                None
            }
        };
        let Some(len) = value else {
            self.read(cx, conn)?;
            return Ok(LookupResult::NotYet);
        };
        let start = HEADER + self.key.len();
        Ok(LookupResult::Value(&self.slot[start..start + len]))
    }
}
