//! A receiver: its queue, and what is on its way.

use std::collections::VecDeque;

use super::slots::{Parcel, Slots};
use super::{Slow, Tally};
use crate::{ConnectionId, Context, Outcome, SendErrorKind, SendId};

#[derive(Debug)]
pub(super) struct Receiver {
    pub(super) slow: Slow,
    /// It gets what is published.
    pub(super) open: bool,
    /// Index of its device.
    device: usize,
    /// Messages that the connection has not accepted, the oldest first. Each holds its place.
    pub(super) queue: VecDeque<Parcel>,
    /// Messages that the connection has accepted, with the places that they hold. They end in about this order.
    in_flight: VecDeque<(SendId, Option<usize>)>,
    pub(super) tally: Tally,
}

impl Receiver {
    pub(super) fn new(device: usize, slow: Slow) -> Self {
        Self { slow, open: true, device, queue: VecDeque::new(), in_flight: VecDeque::new(), tally: Tally::default() }
    }

    pub(super) fn tally(&self) -> Tally {
        Tally { pending: (self.queue.len() + self.in_flight.len()) as u64, ..self.tally }
    }

    /// Sends a message now. Returns false if it has to be queued: because others are, or the connection has no room.
    pub(super) fn try_send(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        (parcel, message): (Option<Parcel>, &[u8]),
        slots: &mut Slots,
    ) -> bool {
        if !self.queue.is_empty() {
            return false;
        }
        let sent = match parcel {
            Some(parcel) => slots.send(cx, conn, self.device, parcel),
            None => cx.reporting(conn, |cx| cx.send(conn, message)).map(|send| (send, None)),
        };
        self.accepted(sent, slots)
    }

    /// Notes what the connection says to a message. Returns false if there is no room now.
    fn accepted(&mut self, sent: Result<(SendId, Option<usize>), SendErrorKind>, slots: &mut Slots) -> bool {
        match sent {
            Ok((send, slot)) => {
                slot.into_iter().for_each(|slot| slots.hold(slot));
                self.in_flight.push_back((send, slot));
                true
            }
            Err(SendErrorKind::WouldBlock(_)) => false,
            // The connection ends, or the peer does not take a message of this length.
            Err(_) => {
                self.tally.lost += 1;
                true
            }
        }
    }

    pub(super) fn push(&mut self, parcel: Parcel, slots: &mut Slots) {
        slots.hold(parcel.slot);
        self.queue.push_back(parcel);
    }

    pub(super) fn drop_oldest(&mut self, slots: &mut Slots) {
        if let Some(oldest) = self.queue.pop_front() {
            slots.release(oldest.slot);
        }
    }

    /// Sends from the queue while there is room.
    pub(super) fn pump(&mut self, cx: &mut Context<'_>, conn: ConnectionId, slots: &mut Slots) {
        while let Some(&parcel) = self.queue.front() {
            let sent = slots.send(cx, conn, self.device, parcel);
            if !self.accepted(sent, slots) {
                return;
            }
            self.drop_oldest(slots);
        }
    }

    /// Notes the end of a send; returns false if it is none of these.
    pub(super) fn completed(&mut self, send: SendId, outcome: Outcome, slots: &mut Slots) -> bool {
        let Some(at) = self.in_flight.iter().position(|&(known, _)| known == send) else { return false };
        let (_, slot) = self.in_flight.remove(at).unwrap_or((send, None));
        slot.into_iter().for_each(|slot| slots.release(slot));
        *if outcome.is_sent() { &mut self.tally.sent } else { &mut self.tally.lost } += 1;
        true
    }

    /// Nothing more is sent to it. What is on its way holds its places until it has ended.
    pub(super) fn end(&mut self, slots: &mut Slots) {
        self.open = false;
        self.tally.lost += self.queue.len() as u64;
        self.queue.drain(..).for_each(|parcel| slots.release(parcel.slot));
    }
}
