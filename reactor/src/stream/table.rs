//! The streams of a reactor, by connection.

use std::collections::BTreeMap;
use std::time::Duration;

use super::unread::Unread;
use crate::{ConnectionId, Context, DisconnectReason, PeerViolation, SendErrorKind, TimerId};

/// The state of this side's writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writing {
    Open,
    /// This side has finished, and there was no room yet to tell the peer.
    Finishing,
    /// This side has finished, and has told the peer or does not need to.
    Finished,
}

/// One stream.
#[derive(Debug)]
pub(super) struct Record {
    id: ConnectionId,
    pub(super) unread: Unread,
    pub(super) writing: Writing,
    /// The peer writes no more.
    pub(super) peer_finished: bool,
    /// This side has shut the stream down for reading.
    pub(super) deaf: bool,
    /// This side has closed the stream. The program hears only the last callback.
    pub(super) closed: bool,
    /// The peer has written after its end.
    violated: bool,
    /// The timer that ends the wait for room to tell the peer that this side has finished.
    linger: Option<TimerId>,
    /// The reason for the end of the connection, once it is gone.
    pub(super) reason: Option<DisconnectReason>,
}

impl Record {
    fn new(id: ConnectionId) -> Self {
        Self {
            id,
            unread: Unread::default(),
            writing: Writing::Open,
            peer_finished: false,
            deaf: false,
            closed: false,
            violated: false,
            linger: None,
            reason: None,
        }
    }

    /// Whether bytes that arrive are kept to be read.
    pub(super) const fn listens(&self) -> bool {
        !self.closed && !self.deaf
    }

    /// Drops the unread bytes; returns whether there were any.
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
pub(super) struct Table {
    /// Streams that have a connection, by the connection's slot.
    live: Vec<Option<Record>>,
    /// The stream that is getting its last callback.
    last: Option<Record>,
    /// Timers of streams that linger.
    lingering: BTreeMap<TimerId, ConnectionId>,
    /// Time that a closed stream waits for room to tell the peer that it has finished.
    pub(super) linger: Duration,
}

impl Default for Table {
    fn default() -> Self {
        Self { live: Vec::new(), last: None, lingering: BTreeMap::new(), linger: Duration::from_secs(2) }
    }
}

impl Table {
    pub(super) fn open(&mut self, id: ConnectionId) {
        if self.live.len() <= id.slot() {
            self.live.resize_with(id.slot() + 1, || None);
        }
        self.live[id.slot()] = Some(Record::new(id));
    }

    /// A stream that has a connection.
    #[inline]
    pub(super) fn live(&mut self, id: ConnectionId) -> Option<&mut Record> {
        self.live.get_mut(id.slot())?.as_mut().filter(|record| record.id == id)
    }

    /// A stream that the program may use.
    #[inline]
    pub(super) fn get(&self, id: ConnectionId) -> Option<&Record> {
        let live = self.live.get(id.slot()).and_then(Option::as_ref).filter(|record| record.id == id);
        live.or_else(|| self.last.as_ref().filter(|record| record.id == id)).filter(|record| !record.closed)
    }

    /// A stream that the program may use.
    #[inline]
    pub(super) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Record> {
        let live = self.live.get_mut(id.slot()).and_then(Option::as_mut).filter(|record| record.id == id);
        live.or_else(|| self.last.as_mut().filter(|record| record.id == id)).filter(|record| !record.closed)
    }

    /// The names of all streams that have a connection.
    pub(super) fn ids(&self) -> Vec<ConnectionId> {
        self.live.iter().flatten().map(|record| record.id).collect()
    }

    /// Ends this side's writing, and tells the peer when there is room.
    pub(super) fn shut_down_writing(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if let Some(record) = self.live(id).filter(|record| record.writing == Writing::Open) {
            record.writing = Writing::Finishing;
            if cfg!(planted = "stream-end-waits-for-ever") && cx.writable(id) == 0 {
                return;
            }
            self.finish(cx, id);
        }
    }

    /// Drops the unread bytes, and all bytes that are still to come.
    pub(super) fn shut_down_reading(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if let Some(record) = self.get_mut(id) {
            record.deaf = true;
            record.discard(cx);
        }
    }

    /// Closes a stream for the program.
    pub(super) fn close(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if let Some(last) = self.last.as_mut().filter(|record| record.id == id) {
            last.closed = true;
        }
        let linger = self.linger;
        let Some(record) = self.live(id).filter(|record| !record.closed) else { return };
        record.closed = true;
        if record.discard(cx) {
            // A side that drops unread bytes sends no orderly end, as with TCP.
            cx.close(id);
            return;
        }
        self.shut_down_writing(cx, id);
        match self.live(id) {
            Some(record) if record.writing == Writing::Finishing => {
                let timer = cx.set_timer(linger, 0);
                record.linger = Some(timer);
                self.lingering.insert(timer, id);
            }
            _ => cx.close(id),
        }
    }

    /// Tells the peer that this side has finished, if the peer does not know yet and there is room. Returns whether
    /// this side has finished.
    pub(super) fn finish(&mut self, cx: &mut Context<'_>, id: ConnectionId) -> bool {
        let Some(record) = self.live(id).filter(|record| record.writing != Writing::Open) else { return false };
        if record.writing == Writing::Finishing && !matches!(cx.send(id, &[]), Err(SendErrorKind::WouldBlock(_))) {
            // The end is queued, or the connection is ending and the peer cannot be told.
            record.writing = Writing::Finished;
            if record.closed {
                cx.close(id);
            }
            self.close_if_finished(cx, id);
        }
        true
    }

    /// Closes the connection if neither side will write any more.
    pub(super) fn close_if_finished(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if self.live(id).is_some_and(|record| record.peer_finished && record.writing == Writing::Finished) {
            cx.close(id);
        }
    }

    /// The peer has written after its end.
    pub(super) fn violated(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if let Some(record) = self.live(id) {
            log::warn!("{id}: the peer has written after its end");
            record.violated = true;
            cx.abort(id);
        }
    }

    /// Takes a stream out of the table after its connection is gone. Returns the reason, and whether the end was
    /// orderly. Unread bytes can be read until [`Table::forget_last`].
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
            cx.cancel_timer(timer);
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

    /// Drops everything of a stream after its last callback has returned.
    pub(super) fn forget_last(&mut self, cx: &mut Context<'_>) {
        if let Some(mut record) = self.last.take() {
            record.discard(cx);
        }
    }

    /// Handles a timer that is due; `true` if it belonged to a closed stream that waited for room.
    pub(super) fn lingered(&mut self, cx: &mut Context<'_>, timer: TimerId) -> bool {
        let Some(id) = self.lingering.remove(&timer) else { return false };
        if let Some(record) = self.live(id) {
            record.linger = None;
            cx.close(id);
        }
        true
    }
}
