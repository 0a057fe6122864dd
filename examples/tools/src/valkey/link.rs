//! The byte streams of one connection, one in each direction. The receiver of a stream has a buffer, to which the sender writes by RDMA
//! Write.

use std::collections::VecDeque;

use rdma_reactor::{
    Access, ConnectionId, Context, Immediate, Outcome, Region, RegionOptions, RemoteRegion, SendErrorKind, SendId,
};

use super::command::ValkeyCommand;

/// The length of the memory that the client writes from, in bytes. One write can carry at most this many bytes.
const SOURCE: usize = 1 << 20;

/// The state of the byte streams on one connection.
#[derive(Debug)]
pub struct ValkeyLink {
    conn: ConnectionId,
    /// The bytes for the server that are not written yet.
    out: VecDeque<u8>, // local: requests of the program
    source: Region,
    /// The id of the write in flight. This write sends from `source`; meanwhile, `out` collects the bytes for the next write.
    writing: Option<SendId>,
    /// The free part of the server's buffer.
    room: RemoteRegion,
    /// The buffer that the server writes to.
    sink: Region,
    /// The number of bytes in `sink` that have arrived.
    filled: usize,
    offers: u64,
}

impl ValkeyLink {
    /// Starts the streams on an established connection. `buffer` is the length of the client's buffer: the server can write this many
    /// bytes before the client must offer the buffer again.
    ///
    /// # Errors
    /// Memory cannot be registered.
    pub fn open(cx: &mut Context<'_>, conn: ConnectionId, buffer: usize) -> Result<Self, String> {
        let mut region =
            |len, options: &RegionOptions| cx.regions().register(conn, len, options).map_err(|error| error.to_string());
        let source = region(SOURCE, &RegionOptions::new())?;
        let sink = region(buffer, &RegionOptions::new().allow(Access::REMOTE_WRITE))?;
        let room = RemoteRegion { address: 0, len: 0, key: 0 };
        let mut link = Self { conn, out: VecDeque::new(), source, writing: None, room, sink, filled: 0, offers: 0 };
        link.command(cx, ValkeyCommand::ServerFeatures(0))?;
        link.command(cx, ValkeyCommand::ClientFeatures(0))?;
        link.offer(cx)?;
        Ok(link)
    }

    /// Returns the queue of bytes for the server. The next [`ValkeyLink::flush`] writes the bytes that the caller appends.
    pub fn out(&mut self) -> &mut VecDeque<u8> {
        &mut self.out
    }

    /// Returns the number of times that the client has offered its buffer.
    #[must_use]
    pub fn offers(&self) -> u64 {
        self.offers
    }

    /// Returns the id of the connection.
    #[must_use]
    pub fn conn(&self) -> ConnectionId {
        self.conn
    }

    /// Sends a command. Does nothing if the connection is closed or has ended: `on_disconnect` follows, and reports the reason.
    ///
    /// # Errors
    /// The send queue is full. This happens if the server fills the buffer repeatedly without receiving the offers.
    pub fn command(&self, cx: &mut Context<'_>, command: ValkeyCommand) -> Result<(), String> {
        match cx.send(self.conn, &command.encode()) {
            Ok(_) | Err(SendErrorKind::Closed) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Offers the whole buffer to the server again.
    fn offer(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        self.filled = 0;
        self.offers += 1;
        self.command(cx, ValkeyCommand::Buffer(self.sink.remote()))
    }

    /// Handles a command of the server.
    ///
    /// # Errors
    /// The command is invalid, or a server must not send it.
    pub fn on_command(&mut self, cx: &mut Context<'_>, message: &[u8]) -> Result<(), String> {
        match ValkeyCommand::decode(message).map_err(|why| format!("the server sends {why}"))? {
            ValkeyCommand::Buffer(region) => self.room = region,
            // A feature is used only if both sides support it, and this client supports none.
            ValkeyCommand::ServerFeatures(_) | ValkeyCommand::Keepalive => {}
            ValkeyCommand::ClientFeatures(_) => return Err("the server sends a command that only clients send".into()),
        }
        self.flush(cx)
    }

    /// Handles a write of the server: appends the bytes that have arrived to `input`.
    ///
    /// # Errors
    /// The server reports more bytes than the buffer had space for, or the send queue is full.
    pub fn on_immediate(
        &mut self,
        cx: &mut Context<'_>,
        immediate: Immediate,
        input: &mut Vec<u8>,
    ) -> Result<(), String> {
        let (len, room) = (immediate.value as usize, self.sink.len() - self.filled);
        if len > room {
            return Err(format!("the server reports a write of {len} bytes where {room} were free"));
        }
        let old = input.len();
        input.resize(old + len, 0);
        // The server may write to other parts of the buffer at any time. So the bytes are copied instead of borrowed.
        self.sink.copy_to(self.filled, &mut input[old..]);
        self.filled += len;
        if self.filled == self.sink.len() { self.offer(cx) } else { Ok(()) }
    }

    /// Handles the completion of a send or a write.
    ///
    /// # Errors
    /// Those of [`ValkeyLink::flush`].
    pub fn on_send_complete(&mut self, cx: &mut Context<'_>, id: SendId, outcome: Outcome) -> Result<(), String> {
        if self.writing != Some(id) {
            return Ok(());
        }
        self.writing = None;
        // If the write failed, the connection ends, and `on_disconnect` reports the reason.
        if outcome.is_sent() { self.flush(cx) } else { Ok(()) }
    }

    /// Writes as many bytes as the server's buffer and the source memory permit. Does nothing if the connection is closed or has ended.
    ///
    /// # Errors
    /// The device does not support writes with immediate data, or the server's buffer cannot be written to.
    pub fn flush(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        let room = usize::try_from(self.room.len).unwrap_or(usize::MAX);
        let len = self.out.len().min(room).min(self.source.len());
        if len == 0 || self.writing.is_some() {
            return Ok(());
        }
        let (front, back) = self.out.as_slices();
        let front = &front[..len.min(front.len())];
        for (at, part) in [(0, front), (front.len(), &back[..len - front.len()])] {
            self.source.copy_from(at, part).map_err(|error| error.to_string())?;
        }
        match cx.remote(self.conn).write_with_immediate(self.room, &self.source, 0..len, len as u32) {
            Ok(id) => self.writing = Some(id),
            // If the send queue is full, the reactor calls `on_writable` when the queue has space. If the connection is closed, it calls
            // `on_disconnect` with the reason.
            Err(SendErrorKind::WouldBlock(_) | SendErrorKind::Closed) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        }
        self.out.drain(..len);
        let RemoteRegion { address, len: left, key } = self.room;
        self.room = RemoteRegion { address: address + len as u64, len: left - len as u64, key };
        Ok(())
    }
}
