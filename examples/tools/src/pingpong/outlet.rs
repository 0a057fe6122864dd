//! The sender of data. Small messages are copied into the library's buffers,
//! large ones are sent from them, and one-sided operations go to their target.

use rdma_reactor::{ConnectionId, Context, SendBuffer, SendErrorKind};

use super::frame::Frame;
use super::job::Job;
use super::target::Target;
use super::touch;

/// The largest message that is copied, bytes. For larger ones, handling a buffer is cheaper.
const COPY_UP_TO: u32 = 4096;

/// The result of a send or an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The library has accepted it. For an operation, `on_send_complete` follows.
    Yes,
    /// The library has refused it for now; `on_writable` follows.
    Blocked,
    /// The connection is ending; `on_disconnect` follows.
    Gone,
}

impl From<SendErrorKind> for Sent {
    fn from(kind: SendErrorKind) -> Self {
        match kind {
            SendErrorKind::WouldBlock(_) => Self::Blocked,
            _ => Self::Gone,
        }
    }
}

/// The sender of data.
#[derive(Debug)]
pub struct Outlet {
    size: u32,
    /// The value of the bytes of the next message, if the job touches each byte before it is sent.
    touch: Option<u8>,
    /// The target, if one-sided operations are used instead of messages.
    target: Option<Target>,
    /// The bytes that small messages are copied from.
    small: Vec<u8>,
    /// A large message that was refused.
    refused: Option<SendBuffer>,
    /// True between a refused send and `on_writable`.
    blocked: bool,
}

impl Outlet {
    /// Makes an outlet for the messages or operations of a job.
    #[must_use]
    pub fn new(job: &Job) -> Self {
        let size = job.size;
        let small = if size <= COPY_UP_TO { vec![0; size as usize] } else { Vec::new() };
        Self { size, touch: job.touch.then_some(0), target: None, small, refused: None, blocked: false }
    }

    /// Returns true if the outlet performs operations instead of sending messages.
    #[must_use]
    pub const fn is_aimed(&self) -> bool {
        self.target.is_some()
    }

    /// Directs reads or writes to `target` from now on.
    pub fn aim(&mut self, target: Target) {
        self.target = Some(target);
    }

    /// Sends one data message, or starts one operation. Large messages carry the old content of their buffers,
    /// as with the tools of perftest, unless the job touches them: filling the buffers would measure the memory.
    pub fn data(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Sent {
        if self.blocked {
            return Sent::Blocked;
        }
        let sent = match &mut self.target {
            Some(target) => target.go(cx, conn),
            None if self.size <= COPY_UP_TO => {
                if let Some(value) = &mut self.touch {
                    touch::write(&mut self.small, value);
                    Frame::mark_data(&mut self.small);
                }
                cx.send(conn, &self.small).map_or_else(Sent::from, |_| Sent::Yes)
            }
            None => self.large(cx, conn),
        };
        self.blocked = sent == Sent::Blocked;
        sent
    }

    /// Records that `on_writable` was called.
    pub const fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Returns true between a refused send and `on_writable`.
    #[must_use]
    pub const fn is_blocked(&self) -> bool {
        self.blocked
    }

    fn large(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Sent {
        let buffer = self.refused.take().or_else(|| {
            let mut buffer = cx.buffer(conn)?;
            buffer.set_len(self.size as usize);
            if let Some(value) = &mut self.touch {
                touch::write(&mut buffer, value);
            }
            Frame::mark_data(&mut buffer);
            Some(buffer)
        });
        let Some(buffer) = buffer else { return Sent::Gone };
        match cx.send_buffer(conn, buffer) {
            Ok(_) => Sent::Yes,
            Err(error) => {
                self.refused = Some(error.buffer);
                error.kind.into()
            }
        }
    }

    /// Sends one control message.
    pub fn control(&mut self, cx: &mut Context<'_>, conn: ConnectionId, frame: Frame) -> Sent {
        if self.blocked {
            return Sent::Blocked;
        }
        let sent = cx.send(conn, &frame.control()).map_or_else(Sent::from, |_| Sent::Yes);
        self.blocked = sent == Sent::Blocked;
        sent
    }
}
