//! A client's reader of the table. It repeats an RDMA Read until an entry arrives in one piece.

use rdma_reactor::{Access, ConnectionId, Context, Region, RegionOptions};

use super::table::{HEADER, Slot};
use super::wire::TableHello;
use crate::pingpong::failure::Failure;

/// The number of torn reads in a row that a concurrent writer cannot explain.
const PATIENCE: u32 = 100_000;

/// Looks one key up at a time.
#[derive(Debug)]
pub struct Reader {
    hello: TableHello,
    /// The local buffer of the reads.
    sink: Region,
    /// A copy of the bytes that were read. On iWARP adapters the device
    /// opens the sink to the response, so the peer could write it later.
    slot: Vec<u8>,
    key: Vec<u8>,
    /// Offsets of the key's slots that were not read yet, the current one first.
    places: Vec<u64>,
    torn: u32,
    /// Reads that were repeated, over all keys.
    pub retries: u64,
}

/// The result of a read.
#[derive(Debug, PartialEq, Eq)]
pub enum LookupResult<'a> {
    /// Another read is in flight.
    NotYet,
    /// The table has no such key.
    Nothing,
    /// The value.
    Value(&'a [u8]),
}

impl Reader {
    /// Makes a reader for the table that a server's hello names.
    ///
    /// # Errors
    /// Memory for one slot could not be registered.
    pub fn new(cx: &mut Context<'_>, conn: ConnectionId, hello: TableHello) -> Result<Self, Failure> {
        let len = hello.geometry.slot_len();
        let sink = cx.register(conn, len, &RegionOptions::new().allow(Access::READ_SINK))?;
        Ok(Self { hello, sink, slot: vec![0; len], key: Vec::new(), places: Vec::new(), torn: 0, retries: 0 })
    }

    /// Starts looking for a key. The caller calls [`Reader::completed`] when the read has completed.
    ///
    /// # Errors
    /// The read was refused.
    pub fn look(&mut self, cx: &mut Context<'_>, conn: ConnectionId, key: &[u8]) -> Result<(), Failure> {
        self.key.clear();
        self.key.extend_from_slice(key);
        self.places.clear();
        self.places.extend(self.hello.geometry.places(key));
        // Offsets are taken from the end of the list.
        self.places.reverse();
        self.torn = 0;
        self.read(cx, conn)
    }

    fn read(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        let len = self.hello.geometry.slot_len();
        let place = self.places.last().and_then(|&offset| self.hello.region.part(offset, len as u64));
        let place = place.ok_or_else(|| Failure::new("the server's table is smaller than it says"))?;
        cx.read(conn, place, &mut self.sink, 0..len).map_err(Failure::new)?;
        Ok(())
    }

    /// Handles a successful read and returns its result.
    ///
    /// # Errors
    /// The next read was refused, or the entry never arrived in one piece.
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
