//! A receiver of a broadcast: the queue of its messages, and its messages in flight.

use std::collections::VecDeque;

use super::slots::{Slots, StoredMessage};
use super::{OverflowPolicy, Tally};
use crate::{ConnectionId, Context, Outcome, SendErrorKind, SendId};

#[derive(Debug)]
pub(super) struct BroadcastReceiver {
    pub(super) policy: OverflowPolicy,
    /// True while this receiver gets published messages. False once the receiver has left or was closed.
    pub(super) open: bool,
    /// The index of the connection's device in `Slots::devices`.
    device: usize,
    /// The messages that the connection has not accepted yet, the oldest first. While a message is in the queue, its slot is not reused.
    pub(super) queue: VecDeque<StoredMessage>, // bound: broadcasts
    /// The messages that the connection has accepted, and whose sends have not completed. Each has the slot from which it is sent; `None`
    /// if it is sent from a copy. Sends complete nearly in the order of this list, so a search from the front is short.
    in_flight: VecDeque<(SendId, Option<usize>)>, // bound: sends
    /// The number of messages in flight that are sent from slots.
    held: usize,
    pub(super) tally: Tally,
}

/// The result of an attempt to send a message to a receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendAttempt {
    /// The connection has accepted the message.
    Accepted,
    /// The connection can never send the message.
    Lost,
    /// The message must be sent later: older messages are queued, or the connection has no room now.
    Waits,
}

impl BroadcastReceiver {
    pub(super) fn new(device: usize, policy: OverflowPolicy) -> Self {
        let (queue, in_flight) = (VecDeque::new(), VecDeque::new());
        Self { policy, open: true, device, queue, in_flight, held: 0, tally: Tally::default() }
    }

    pub(super) fn tally(&self) -> Tally {
        Tally { pending: (self.queue.len() + self.in_flight.len()) as u64, ..self.tally }
    }

    /// Sends a message, unless older messages are queued.
    pub(super) fn try_send(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        stored: StoredMessage,
        slots: &mut Slots,
    ) -> SendAttempt {
        if !self.queue.is_empty() {
            return SendAttempt::Waits;
        }
        let sent = slots.send(cx, conn, (self.device, self.held), stored);
        self.record(sent, slots)
    }

    /// Records the result of a send.
    fn record(&mut self, sent: Result<(SendId, Option<usize>), SendErrorKind>, slots: &mut Slots) -> SendAttempt {
        match sent {
            Ok((send, slot)) => {
                if let Some(slot) = slot {
                    if !crate::planted("a-slot-is-free-while-it-is-sent") {
                        slots.hold_for_send(slot);
                    }
                    self.held += 1;
                }
                self.in_flight.push_back((send, slot));
                SendAttempt::Accepted
            }
            Err(SendErrorKind::WouldBlock(_)) => SendAttempt::Waits,
            // The connection is ending, or the peer does not accept a message of this length: a later send would fail, too.
            Err(_) => {
                self.tally.lost += 1;
                SendAttempt::Lost
            }
        }
    }

    pub(super) fn push(&mut self, stored: StoredMessage, slots: &mut Slots) {
        slots.hold(stored.slot);
        self.queue.push_back(stored);
    }

    pub(super) fn drop_oldest(&mut self, slots: &mut Slots) {
        if let Some(oldest) = self.queue.pop_front() {
            slots.release(oldest.slot);
        }
    }

    /// Sends queued messages, until the queue is empty or the connection has no room.
    pub(super) fn send_queued(&mut self, cx: &mut Context<'_>, conn: ConnectionId, slots: &mut Slots) {
        while let Some(&stored) = self.queue.front() {
            let sent = slots.send(cx, conn, (self.device, self.held), stored);
            if self.record(sent, slots) == SendAttempt::Waits {
                return;
            }
            self.drop_oldest(slots);
        }
    }

    /// Records the completion of a send. Returns true if the send was a message to this receiver, and false otherwise.
    pub(super) fn completed(&mut self, send: SendId, outcome: Outcome, slots: &mut Slots) -> bool {
        let Some(at) = self.in_flight.iter().position(|&(known, _)| known == send) else { return false };
        let (_, slot) = self.in_flight.remove(at).unwrap_or((send, None));
        if let Some(slot) = slot {
            slots.release_after_send(slot);
            self.held -= 1;
        }
        *if outcome.is_sent() { &mut self.tally.sent } else { &mut self.tally.lost } += 1;
        true
    }

    /// Counts the sends whose completions the program has not passed on as lost, because their
    /// connection has ended, and releases their slots. There are such sends only if a callback of
    /// the program panicked.
    pub(super) fn lose_unreported(&mut self, slots: &mut Slots) {
        self.tally.lost += self.in_flight.len() as u64;
        self.in_flight.drain(..).filter_map(|(_, slot)| slot).for_each(|slot| slots.release_after_send(slot));
    }

    /// Sends no more messages to this receiver, and drops the messages of its queue. The slots of messages in flight stay in use until the
    /// sends complete.
    pub(super) fn end(&mut self, slots: &mut Slots) {
        self.open = false;
        self.tally.lost += self.queue.len() as u64;
        self.queue.drain(..).for_each(|stored| slots.release(stored.slot));
    }
}
