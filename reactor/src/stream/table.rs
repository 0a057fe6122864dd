//! The table of the streams of a reactor. It also handles the end of each stream.

use std::collections::BTreeMap;
use std::time::Duration;

use super::unread::Unread;
use crate::{ConnectionId, Context, DisconnectReason, PeerViolation, SendErrorKind, TimerId};

/// The state of the local direction of a stream, that is, of the bytes that the program writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writing {
    Open,
    /// The program has finished writing. The empty message that ends the stream waits for room on the connection.
    Finishing,
    /// The program has finished writing, and no more messages will be queued: the empty message that ends the stream is already queued for
    /// sending, or the connection accepts no more messages.
    Finished,
}

/// The state of one stream.
#[derive(Debug)]
pub(super) struct Record {
    id: ConnectionId,
    pub(super) unread: Unread,
    pub(super) writing: Writing,
    /// True if the peer has finished writing.
    pub(super) peer_finished: bool,
    /// True if the program has shut the stream down for reading.
    pub(super) read_closed: bool,
    /// True if the program has closed the stream. The only further callback of the stream is `on_close` or `on_error`.
    pub(super) closed: bool,
    /// True if the peer has sent bytes after it had finished writing.
    violated: bool,
    /// The timer that limits how long a closed stream waits for room to send the empty message that ends it. `None` if the stream does not
    /// wait for that room.
    linger: Option<TimerId>,
    /// The reason for the end of the connection; `None` while the connection has not ended.
    pub(super) reason: Option<DisconnectReason>,
}

impl Record {
    fn new(id: ConnectionId) -> Self {
        Self {
            id,
            unread: Unread::default(),
            writing: Writing::Open,
            peer_finished: false,
            read_closed: false,
            closed: false,
            violated: false,
            linger: None,
            reason: None,
        }
    }

    /// Returns true if arriving bytes must be kept until the program reads them. Returns false if arriving bytes are dropped.
    pub(super) const fn keeps_bytes(&self) -> bool {
        !self.closed && !self.read_closed
    }

    /// Drops the unread bytes of the stream. Returns true if the stream had unread bytes.
    fn discard(&mut self, cx: &mut Context<'_>) -> bool {
        let some = !self.unread.is_empty();
        while let Some(message) = self.unread.pop() {
            cx.release(message);
        }
        some
    }
}

/// The streams of a reactor.
#[derive(Debug)]
pub(super) struct StreamTable {
    /// The streams whose connections have not ended. The index is the slot of the [`ConnectionId`].
    live: Vec<Option<Record>>, // bound: connections
    /// The stream whose last callback, `on_close` or `on_error`, is running.
    last: Option<Record>,
    /// The `linger` timers of the closed streams that wait for room to send the empty messages that end them.
    lingering: BTreeMap<TimerId, ConnectionId>, // bound: connections
    /// The longest time that a closed stream may wait for room to send the empty message that ends it.
    pub(super) linger: Duration,
}

impl Default for StreamTable {
    fn default() -> Self {
        Self { live: Vec::new(), last: None, lingering: BTreeMap::new(), linger: Duration::from_secs(2) }
    }
}

impl StreamTable {
    pub(super) fn open(&mut self, id: ConnectionId) {
        if self.live.len() <= id.slot() {
            self.live.resize_with(id.slot() + 1, || None);
        }
        self.live[id.slot()] = Some(Record::new(id));
    }

    /// Returns a stream whose connection has not ended, even if the program has closed the stream. Returns `None` if there is no such
    /// stream.
    #[inline]
    pub(super) fn live(&mut self, id: ConnectionId) -> Option<&mut Record> {
        self.live.get_mut(id.slot())?.as_mut().filter(|record| record.id == id)
    }

    /// Returns a stream that the program may use. Returns `None` if the program has closed the stream, or if the last callback of the
    /// stream has returned.
    #[inline]
    pub(super) fn get(&self, id: ConnectionId) -> Option<&Record> {
        let live = self.live.get(id.slot()).and_then(Option::as_ref).filter(|record| record.id == id);
        live.or_else(|| self.last.as_ref().filter(|record| record.id == id)).filter(|record| !record.closed)
    }

    /// Returns a mutable reference to a stream that the program may use; `None` in the same cases as [`StreamTable::get`].
    #[inline]
    pub(super) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Record> {
        let live = self.live.get_mut(id.slot()).and_then(Option::as_mut).filter(|record| record.id == id);
        live.or_else(|| self.last.as_mut().filter(|record| record.id == id)).filter(|record| !record.closed)
    }

    /// Returns the ids of all streams whose connections have not ended.
    pub(super) fn ids(&self) -> Vec<ConnectionId> {
        self.live.iter().flatten().map(|record| record.id).collect()
    }

    /// Finishes writing on a stream. The empty message that ends the stream is sent now, or later if the connection has no room for it.
    pub(super) fn shut_down_writing(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if let Some(record) = self.live(id).filter(|record| record.writing == Writing::Open) {
            record.writing = Writing::Finishing;
            if crate::planted("stream-end-waits-for-ever") && cx.writable(id) == 0 {
                return;
            }
            self.finish(cx, id);
        }
    }

    /// Drops the unread bytes of a stream, and all bytes that arrive later.
    pub(super) fn shut_down_reading(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if let Some(record) = self.get_mut(id) {
            record.read_closed = true;
            record.discard(cx);
        }
    }

    /// Closes a stream at the request of the program.
    pub(super) fn close(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if let Some(last) = self.last.as_mut().filter(|record| record.id == id) {
            last.closed = true;
        }
        let linger = self.linger;
        let Some(record) = self.live(id).filter(|record| !record.closed) else { return };
        record.closed = true;
        if record.discard(cx) {
            // As with TCP, a side that drops unread bytes does not send the end of its stream. The peer gets an error instead.
            cx.close(id);
            return;
        }
        self.shut_down_writing(cx, id);
        match self.live(id) {
            Some(record) if record.writing == Writing::Finishing => {
                let timer = cx.timers().set(linger, 0);
                record.linger = Some(timer);
                self.lingering.insert(timer, id);
            }
            _ => cx.close(id),
        }
    }

    /// Sends the empty message that ends the stream. Does nothing if the program has not finished writing, if the message was sent before,
    /// or if the connection has no room. Returns true if the program has finished writing.
    pub(super) fn finish(&mut self, cx: &mut Context<'_>, id: ConnectionId) -> bool {
        let Some(record) = self.live(id).filter(|record| record.writing != Writing::Open) else { return false };
        if record.writing == Writing::Finishing && !matches!(cx.send(id, &[]), Err(SendErrorKind::WouldBlock(_))) {
            // The empty message that ends the stream is queued for sending, or the connection is ending and accepts no more messages.
            record.writing = Writing::Finished;
            if record.closed {
                cx.close(id);
            }
            self.close_if_finished(cx, id);
        }
        true
    }

    /// Closes the connection of a stream if both sides have finished writing.
    pub(super) fn close_if_finished(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if self.live(id).is_some_and(|record| record.peer_finished && record.writing == Writing::Finished) {
            cx.close(id);
        }
    }

    /// Aborts a connection, because the peer has sent bytes after it had finished writing.
    pub(super) fn violated(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if let Some(record) = self.live(id) {
            cx.log_violation(id, format_args!("the peer has written after its end"));
            record.violated = true;
            cx.abort(id);
        }
    }

    /// Handles the end of a connection. Returns the reason for the program, and a flag: if it is true, the stream has ended without an
    /// error, and the caller calls `on_close`; otherwise the caller calls `on_error`. Returns `None` if there is no such stream. The stream
    /// becomes `last`: the program can read its unread bytes until [`StreamTable::forget_last`].
    pub(super) fn ended(
        &mut self,
        cx: &mut Context<'_>,
        id: ConnectionId,
        reason: DisconnectReason,
    ) -> Option<(DisconnectReason, bool)> {
        self.live(id)?;
        let mut record = self.live[id.slot()].take()?;
        if let Some(timer) = record.linger.take() {
            self.lingering.remove(&timer);
            cx.timers().cancel(timer);
        }
        let reason =
            if record.violated { DisconnectReason::PeerViolation(PeerViolation::MalformedMessage) } else { reason };
        let orderly = match reason {
            DisconnectReason::Local { .. } => true,
            DisconnectReason::Closed => record.peer_finished,
            _ => false,
        };
        record.reason = Some(reason.clone());
        self.last = Some(record);
        Some((reason, orderly))
    }

    /// Drops the stream `last`, because its last callback has returned.
    pub(super) fn forget_last(&mut self, cx: &mut Context<'_>) {
        if let Some(mut record) = self.last.take() {
            record.discard(cx);
        }
    }

    /// Handles a timer that has expired. If the timer limits the wait of a closed stream, closes the connection of the stream, and returns
    /// true. Returns false if `timer` is a timer of the program.
    pub(super) fn on_linger_timer(&mut self, cx: &mut Context<'_>, timer: TimerId) -> bool {
        let Some(id) = self.lingering.remove(&timer) else { return false };
        if let Some(record) = self.live(id) {
            record.linger = None;
            cx.close(id);
        }
        true
    }
}
