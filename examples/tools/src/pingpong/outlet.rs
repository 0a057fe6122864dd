//! Sends data messages, or performs one-sided operations. Small messages are copied into the library's buffers. Large messages are sent
//! from the library's buffers without a copy.

use rdma_reactor::{ConnectionId, Context, SendBuffer, SendErrorKind};

use super::frame::Frame;
use super::job::Job;
use super::target::Target;
use super::touch;

/// The length of the largest message that is copied, in bytes. Larger messages are cheaper without a copy.
const COPY_UP_TO: u32 = 4096;

/// The result of sending a message, or of starting an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The library has accepted the message or the operation. For an operation, the reactor calls `on_send_complete` later.
    Yes,
    /// The library has refused the message or the operation for now. The reactor calls `on_writable` when a send may succeed again.
    Blocked,
    /// The connection is ending, so nothing was sent. The reactor calls `on_disconnect` next.
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

/// The sender of data messages or one-sided operations on a connection.
// local: the length of a message is an argument
#[derive(Debug)]
pub struct Outlet {
    size: u32,
    /// The value to write to each byte of the next message; `None` if the job does not write to its messages.
    touch: Option<u8>,
    /// The target of one-sided operations; `None` if messages are sent instead.
    target: Option<Target>,
    /// The bytes of a small message. Each send copies them into a buffer of the library.
    small: Vec<u8>,
    /// The buffer of a large message whose send was refused. This buffer is sent before any other message.
    refused: Option<SendBuffer>,
    /// True after a refused send, until `on_writable` is called.
    blocked: bool,
}

impl Outlet {
    /// Makes a sender for the messages or operations of a job.
    #[must_use]
    pub fn new(job: &Job) -> Self {
        let size = job.size;
        let small = if size <= COPY_UP_TO { vec![0; size as usize] } else { Vec::new() };
        Self { size, touch: job.touch.then_some(0), target: None, small, refused: None, blocked: false }
    }

    /// Returns true if the target of one-sided operations is set, so that no messages are sent.
    #[must_use]
    pub const fn is_aimed(&self) -> bool {
        self.target.is_some()
    }

    /// Sets the target of one-sided operations.
    pub fn aim(&mut self, target: Target) {
        self.target = Some(target);
    }

    /// Sends one data message, or starts one operation. Large messages keep the old content of their buffers, as in perftest's tools,
    /// because the time for filling them would be measured too. They are filled only if the job requests that each byte is written.
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

    /// Permits sends again. Called by `on_writable`.
    pub const fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Returns true after a refused send, until `on_writable` is called.
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
