//! A queue pair: both directions of one stream, and the rules of its work queues.

use std::io::{self, IoSlice};

use super::cq::Completions;
use super::receive::{Fault, Received, Receiver};
use super::startup::{Agreement, ReadyToReceive};
use super::transmit::{MAX_INLINE, Sent, Transmitter};
use super::wire::{Opcode, Quote, TerminateCause};
use crate::error::{Error, Result};
use crate::mem::Sge;
use crate::provider::{CqId, PostError};
use crate::qp::{QpAttr, QpId};
use crate::wc::{WcOpcode, WcStatus, WorkCompletion};
use crate::wr::{RecvWr, SendFlags, SendOp, SendWr};

use super::provider::NAME;

/// Longest message; a Message Offset has 32 bits.
pub(crate) const MAX_MESSAGE: u64 = 1 << 30;
/// Deepest work queue.
pub(crate) const MAX_QUEUE_DEPTH: u32 = 32768;

/// Which end of the connection this is, while the stream has begun and not both may speak yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Initiator,
    Responder,
}

#[derive(Debug)]
pub(crate) struct QueuePair {
    id: QpId,
    attr: QpAttr,
    rx: Receiver,
    tx: Transmitter,
    /// Completions that are in the queues and hold their place in the work queues until they are polled.
    send_unpolled: u32,
    recv_unpolled: u32,
    /// Work requests are flushed at once.
    dead: bool,
}

impl QueuePair {
    pub(crate) fn new(id: QpId, attr: &QpAttr) -> Result<Self> {
        for (what, depth) in [("max_send_wr", attr.max_send_wr), ("max_recv_wr", attr.max_recv_wr)] {
            if depth == 0 || depth > MAX_QUEUE_DEPTH {
                return Err(Error::OutOfRange { what, value: depth.into(), range: "1 to 32768" });
            }
        }
        if attr.max_inline as usize > MAX_INLINE {
            return Err(Error::OutOfRange { what: "max_inline", value: attr.max_inline.into(), range: "at most 256" });
        }
        Ok(Self {
            id,
            attr: *attr,
            rx: Receiver::new(attr.max_recv_wr as usize),
            tx: Transmitter::new(attr.max_send_wr as usize, attr.max_inline as usize),
            send_unpolled: 0,
            recv_unpolled: 0,
            dead: false,
        })
    }

    pub(crate) fn attr(&self) -> &QpAttr {
        &self.attr
    }

    /// Completions of the send and of the receive queue that are not polled yet.
    pub(crate) fn unpolled(&self) -> (u32, u32) {
        (self.send_unpolled, self.recv_unpolled)
    }

    /// Gives back the place of a polled completion.
    #[inline]
    pub(crate) fn polled(&mut self, opcode: WcOpcode) {
        let count = if opcode == WcOpcode::Recv { &mut self.recv_unpolled } else { &mut self.send_unpolled };
        *count = count.saturating_sub(1);
    }

    /// Starts the stream. An initiator may send at once, behind the RTR; a responder is held until
    /// [`QueuePair::release`].
    pub(crate) fn establish(&mut self, role: Role, agreement: &Agreement, max_segment: usize) {
        self.rx.establish(agreement.crc);
        self.tx.establish(agreement.crc, agreement.ird, max_segment);
        if role == Role::Initiator {
            if let Some(rtr) = agreement.rtr {
                self.tx.ready_to_receive(rtr);
                if rtr == ReadyToReceive::Read {
                    self.rx.empty_responses = 1;
                }
            }
            self.tx.release();
        }
    }

    /// Follows a change of the path.
    pub(crate) fn set_max_segment(&mut self, max_segment: usize) {
        self.tx.set_max_segment(max_segment);
    }

    /// Lets a responder's sends go.
    pub(crate) fn release(&mut self) {
        self.tx.release();
    }

    pub(crate) fn is_held(&self) -> bool {
        self.tx.is_held()
    }

    /// Whether a valid FPDU has come.
    pub(crate) fn has_received(&self) -> bool {
        self.rx.has_seen()
    }

    /// Whether there is something to hand to TCP.
    pub(crate) fn has_output(&self) -> bool {
        self.tx.has_work()
    }

    pub(crate) fn post_recv(&mut self, chain: &[RecvWr], cqs: &mut Completions) -> std::result::Result<(), PostError> {
        for (posted, wr) in chain.iter().enumerate() {
            let used = self.rx.posted_len() + self.recv_unpolled as usize;
            if used >= self.attr.max_recv_wr as usize {
                let error = Error::QueueFull { queue: "receive", depth: self.attr.max_recv_wr };
                return Err(PostError { posted, error });
            }
            if self.dead {
                self.complete_recv(cqs, wr.wr_id, WcStatus::Flushed, 0);
            } else {
                self.rx.post(*wr);
            }
        }
        Ok(())
    }

    /// Queues sends; the caller then calls [`QueuePair::transmit`].
    pub(crate) fn post_send(&mut self, chain: &[SendWr], cqs: &mut Completions) -> std::result::Result<(), PostError> {
        for (posted, wr) in chain.iter().enumerate() {
            self.post_one(wr, cqs).map_err(|error| PostError { posted, error })?;
        }
        Ok(())
    }

    fn post_one(&mut self, wr: &SendWr, cqs: &mut Completions) -> Result<()> {
        if self.tx.queued() + self.send_unpolled as usize >= self.attr.max_send_wr as usize {
            return Err(Error::QueueFull { queue: "send", depth: self.attr.max_send_wr });
        }
        let opcode = match wr.op {
            SendOp::Send if wr.flags.contains(SendFlags::SOLICITED) => Opcode::SendSolicited,
            SendOp::Send => Opcode::Send,
            other => return Err(Error::Unsupported { provider: NAME, feature: feature(&other) }),
        };
        let len = wr.sges.total_len();
        if len as u64 > MAX_MESSAGE {
            return Err(Error::OutOfRange { what: "message length", value: len as u64, range: "at most 1 GiB" });
        }
        if wr.flags.contains(SendFlags::INLINE) && len > self.attr.max_inline as usize {
            let range = "at most the max_inline of the queue pair";
            return Err(Error::OutOfRange { what: "inline length", value: len as u64, range });
        }
        if self.dead {
            self.complete_send(cqs, wr.wr_id, WcStatus::Flushed);
        } else {
            self.tx.post(wr.wr_id, opcode, &wr.sges, wr.flags);
        }
        Ok(())
    }

    fn complete_recv(&mut self, cqs: &mut Completions, wr_id: u64, status: WcStatus, len: u32) {
        self.recv_unpolled += 1;
        cqs.push(self.attr.recv_cq, completion(self.id, wr_id, status, WcOpcode::Recv, len));
    }

    fn complete_send(&mut self, cqs: &mut Completions, wr_id: u64, status: WcStatus) {
        self.send_unpolled += 1;
        cqs.push(self.attr.send_cq, completion(self.id, wr_id, status, WcOpcode::Send, 0));
    }

    /// Memory where the next bytes of the stream belong, if that is worth a separate entry of a receive call.
    #[inline]
    pub(crate) fn direct(&self) -> Option<Sge> {
        self.rx.direct()
    }

    /// Takes the next bytes of the stream: `direct` of them are in [`QueuePair::direct`] already.
    #[inline]
    pub(crate) fn input(
        &mut self,
        direct: usize,
        bytes: &[u8],
        cqs: &mut Completions,
    ) -> std::result::Result<(), Fault> {
        let Self { id, attr, rx, tx, recv_unpolled, .. } = self;
        if direct > 0 {
            rx.filled(direct);
        }
        rx.input(bytes, &mut |received| match received {
            Received::Message { wr_id, len } => {
                *recv_unpolled += 1;
                cqs.push(attr.recv_cq, completion(*id, wr_id, WcStatus::Success, WcOpcode::Recv, len));
                Ok(())
            }
            Received::EmptyRead { sink_stag, sink_offset } => tx.owe(sink_stag, sink_offset),
        })
    }

    /// Hands over what there is, and completes sends.
    #[inline]
    pub(crate) fn transmit(
        &mut self,
        send: &mut impl FnMut(&[IoSlice<'_>]) -> io::Result<usize>,
        cqs: &mut Completions,
    ) -> io::Result<Sent> {
        let Self { id, attr, tx, send_unpolled, .. } = self;
        tx.transmit(send, &mut |wr_id, signaled| {
            if signaled {
                *send_unpolled += 1;
                cqs.push(attr.send_cq, completion(*id, wr_id, WcStatus::Success, WcOpcode::Send, 0));
            }
        })
    }

    /// Ends the stream: what is left of both queues is flushed, and no memory of the user is touched any more.
    /// Returns what is still to be sent: the FPDUs begun, and a Terminate.
    pub(crate) fn end(&mut self, terminate: Option<(TerminateCause, Option<Quote>)>, cqs: &mut Completions) -> Vec<u8> {
        let rest = self.tx.rest(terminate);
        while let Some(wr_id) = self.tx.pop_flushed() {
            self.complete_send(cqs, wr_id, WcStatus::Flushed);
        }
        while let Some(wr_id) = self.rx.pop_flushed() {
            self.complete_recv(cqs, wr_id, WcStatus::Flushed, 0);
        }
        self.dead = true;
        rest
    }

    /// As [`QueuePair::end`], for a queue pair that is dropped: nothing completes.
    pub(crate) fn abandon(&mut self) -> Vec<u8> {
        self.tx.rest(None)
    }

    #[cfg(test)]
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.rx.is_at_boundary()
    }
}

/// The completion queues of an attribute set, each with the depth it must have room for.
pub(crate) fn reservations(attr: &QpAttr) -> [(CqId, u32); 2] {
    [(attr.send_cq, attr.max_send_wr), (attr.recv_cq, attr.max_recv_wr)]
}

fn completion(qp: QpId, wr_id: u64, status: WcStatus, opcode: WcOpcode, byte_len: u32) -> WorkCompletion {
    WorkCompletion { wr_id, qp, status, opcode, byte_len, immediate: None, invalidated: None }
}

const fn feature(op: &SendOp) -> &'static str {
    match op {
        SendOp::Send => "Send",
        SendOp::SendInvalidate(_) => "Send with Invalidate yet",
        SendOp::Write(_) => "RDMA Write yet",
        SendOp::WriteWithImmediate(..) => "RDMA Write with immediate data",
        SendOp::Read(_) => "RDMA Read yet",
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => "atomic operations",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Memory;
    use crate::slab::Key;
    use crate::wr::SgeList;
    use proptest::prelude::*;

    const SIZES: [usize; 14] = [0, 1, 3, 4, 256, 257, 1423, 1424, 1425, 1426, 1428, 1429, 65536, (1 << 20) + 1];

    /// A queue pair, with the bytes that it sends in `wire`.
    struct End {
        qp: QueuePair,
        cqs: Completions,
        cq: CqId,
        wire: Vec<u8>,
    }

    fn agreement(crc: bool, rtr: Option<ReadyToReceive>) -> Agreement {
        Agreement { crc, ird: 2, ord: 2, rtr }
    }

    impl End {
        fn new(role: Role, agreement: Agreement, emss: usize) -> Self {
            let mut cqs = Completions::default();
            let cq = cqs.create(256);
            let attr = QpAttr { send_cq: cq, recv_cq: cq, max_send_wr: 64, max_recv_wr: 64, max_inline: 64 };
            let mut qp = QueuePair::new(QpId(Key::new(1, 1)), &attr).unwrap();
            qp.establish(role, &agreement, emss);
            Self { qp, cqs, cq, wire: Vec::new() }
        }

        fn done(&mut self) -> Vec<WorkCompletion> {
            let mut out = Vec::new();
            self.cqs.poll(self.cq, usize::MAX, &mut out).unwrap();
            out.iter().for_each(|wc| self.qp.polled(wc.opcode));
            out
        }

        /// Sends with at most `window` bytes per call, and every other call blocked.
        fn transmit(&mut self, window: usize) {
            let Self { qp, cqs, wire, .. } = self;
            let mut blocked = false;
            loop {
                let result = qp.transmit(
                    &mut |bufs| {
                        blocked = !blocked && window < usize::MAX;
                        if blocked {
                            return Err(io::ErrorKind::WouldBlock.into());
                        }
                        let before = wire.len();
                        bufs.iter().for_each(|buf| wire.extend_from_slice(buf));
                        wire.truncate(wire.len().min(before.saturating_add(window)));
                        Ok(wire.len() - before)
                    },
                    cqs,
                );
                if result.unwrap() == Sent::All {
                    return;
                }
            }
        }

        fn send(&mut self, wr_id: u64, sges: SgeList, flags: SendFlags) {
            let wr = SendWr { wr_id, op: SendOp::Send, sges, flags };
            self.qp.post_send(&[wr], &mut self.cqs).unwrap();
        }

        fn recv(&mut self, wr_id: u64, sges: SgeList) {
            self.qp.post_recv(&[RecvWr { wr_id, sges }], &mut self.cqs).unwrap();
        }

        /// Takes bytes as a socket would give them.
        fn deliver(&mut self, bytes: &[u8]) -> std::result::Result<(), Fault> {
            let direct = self.qp.direct().map_or(0, |mut sge| {
                let n = sge.len().min(bytes.len());
                sge.bytes_mut()[..n].copy_from_slice(&bytes[..n]);
                n
            });
            self.qp.input(direct, &bytes[direct..], &mut self.cqs)
        }
    }

    fn pattern(len: usize, seed: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 251 + seed * 31) as u8).collect()
    }

    /// A list over `len` bytes in up to four parts.
    fn scattered(memory: &Memory, len: usize, parts: usize) -> SgeList {
        let mut list = SgeList::default();
        let mut at = 0;
        for part in 0..parts {
            let n = if part + 1 == parts { len - at } else { (len - at) / 3 };
            list.push(memory.sge(at, n)).unwrap();
            at += n;
        }
        list
    }

    /// The stream of messages of these sizes.
    fn stream(sizes: &[usize], crc: bool, emss: usize, parts: usize, window: usize) -> Vec<u8> {
        let mut sender = End::new(Role::Initiator, agreement(crc, Some(ReadyToReceive::Write)), emss);
        for (index, &len) in sizes.iter().enumerate() {
            let memory = Memory::new(len.max(1)).unwrap();
            memory.write(0, &pattern(len, index));
            let inline = if len <= 64 && index % 2 == 1 { SendFlags::INLINE } else { SendFlags::empty() };
            sender.send(index as u64, scattered(&memory, len, parts), SendFlags::SIGNALED | inline);
            if inline.is_empty() {
                sender.transmit(window);
            } else {
                drop(memory);
                sender.transmit(window);
            }
        }
        let done = sender.done();
        assert_eq!(done.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), (0..sizes.len() as u64).collect::<Vec<_>>());
        assert!(!sender.qp.has_output());
        sender.wire
    }

    /// Receives `wire` in pieces that `next` chooses; checks every message.
    fn receive(wire: &[u8], sizes: &[usize], crc: bool, parts: usize, mut next: impl FnMut(usize) -> usize) {
        let mut receiver = End::new(Role::Responder, agreement(crc, Some(ReadyToReceive::Write)), 1448);
        let memories: Vec<_> = sizes.iter().map(|&len| Memory::new(len.max(1)).unwrap()).collect();
        for (index, memory) in memories.iter().enumerate() {
            receiver.recv(index as u64, scattered(memory, sizes[index], parts));
        }
        let mut at = 0;
        while at < wire.len() {
            let n = next(at).clamp(1, wire.len() - at);
            receiver.deliver(&wire[at..at + n]).unwrap();
            at += n;
        }
        assert!(receiver.qp.is_at_boundary() && receiver.qp.has_received());
        let done = receiver.done();
        assert_eq!(done.len(), sizes.len());
        for (index, wc) in done.iter().enumerate() {
            assert_eq!((wc.wr_id, wc.status, wc.byte_len as usize), (index as u64, WcStatus::Success, sizes[index]));
            assert_eq!(memories[index].read(0, sizes[index]), pattern(sizes[index], index), "{}", sizes[index]);
        }
    }

    #[test]
    fn all_sizes_whole_and_in_pieces() {
        for crc in [true, false] {
            for (emss, parts, window) in [(1448, 1, usize::MAX), (65483, 2, 100_000), (536, 4, 777)] {
                let wire = stream(&SIZES, crc, emss, parts, window);
                receive(&wire, &SIZES, crc, parts, |_| usize::MAX);
                receive(&wire, &SIZES, crc, 5 - parts, |_| 1460);
                receive(&wire, &SIZES, crc, 1, |at| 1 + at % 9001);
            }
        }
    }

    #[test]
    fn split_at_every_byte() {
        let sizes = [0, 1, 3, 4, 256, 257, 1423, 5000];
        let wire = stream(&sizes, true, 1448, 1, usize::MAX);
        for split in 1..wire.len() {
            receive(&wire, &sizes, true, 2, |at| if at == 0 { split } else { usize::MAX });
        }
        receive(&wire, &sizes, true, 2, |_| 1);
    }

    /// The vectors of real peers: an RTR Write, and a Send of five bytes.
    #[test]
    fn bytes_on_the_wire() {
        let mut sender = End::new(Role::Initiator, agreement(true, Some(ReadyToReceive::Write)), 1448);
        let memory = Memory::new(5).unwrap();
        memory.write(0, &[0, 1, 2, 3, 4]);
        sender.send(1, SgeList::one(memory.sge(0, 5)), SendFlags::SIGNALED);
        sender.transmit(usize::MAX);
        let hex: String = sender.wire.iter().map(|byte| format!("{byte:02x}")).collect();
        let send = "001741430000000000000000000000010000000000010203040000008cc20490";
        assert_eq!(hex, format!("000ec140000000010000000000000000ebd34c5f{send}"));
    }

    #[test]
    fn one_flipped_bit_delivers_nothing_wrong() {
        let sizes = [5, 300, 0, 1500, 64];
        let wire = stream(&sizes, true, 1448, 1, usize::MAX);
        for bit in 0..wire.len() * 8 {
            let mut damaged = wire.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let mut receiver = End::new(Role::Responder, agreement(true, Some(ReadyToReceive::Write)), 1448);
            let memories: Vec<_> = sizes.iter().map(|_| Memory::new(4096).unwrap()).collect();
            for (index, memory) in memories.iter().enumerate() {
                receiver.recv(index as u64, SgeList::one(memory.sge(0, 4096)));
            }
            let whole = bit % 2 == 0;
            let result = damaged.chunks(if whole { damaged.len() } else { 100 }).try_for_each(|c| receiver.deliver(c));
            let done = receiver.done();
            assert!(done.len() < sizes.len(), "bit {bit}");
            assert!(result.is_err() || !receiver.qp.is_at_boundary(), "bit {bit} went unnoticed");
            for (index, wc) in done.iter().enumerate() {
                let len = wc.byte_len as usize;
                assert_eq!((wc.wr_id, len), (index as u64, sizes[index]));
                assert_eq!(memories[index].read(0, len), pattern(len, index), "bit {bit}");
            }
        }
    }

    /// Every way to break the rules, with the Terminate for it.
    #[test]
    fn violations() {
        use super::super::wire::{ReadRequest, Tagged, Untagged};
        let send = Untagged { last: true, opcode: Opcode::Send, reserved_or_stag: 0, queue: 0, msn: 1, offset: 0 };
        let untagged = |header: Untagged, payload: &[u8]| {
            let mut bytes = [0; 20];
            header.emit_into((18 + payload.len()) as u16, &mut bytes);
            let mut fpdu = [&bytes, payload].concat();
            fpdu.resize(fpdu.len().next_multiple_of(4) + 4, 0);
            fpdu
        };
        let tagged = |opcode, payload: &[u8]| {
            let mut bytes = [0; 16];
            let header = Tagged { last: true, opcode, stag: 7, offset: 0 };
            header.emit_into((14 + payload.len()) as u16, &mut bytes);
            let mut fpdu = [&bytes, payload].concat();
            fpdu.resize(fpdu.len().next_multiple_of(4) + 4, 0);
            fpdu
        };
        let read = |size| {
            let request = ReadRequest { sink_stag: 1, sink_offset: 2, size, source_stag: 3, source_offset: 4 };
            untagged(Untagged { opcode: Opcode::ReadRequest, queue: 1, ..send }, &request.emit())
        };
        let cases = [
            (untagged(Untagged { queue: 1, ..send }, b""), Some((1, 2, 1))),
            (untagged(Untagged { msn: 2, ..send }, b""), Some((1, 2, 3))),
            (untagged(Untagged { offset: 4, ..send }, b""), Some((1, 2, 4))),
            (untagged(send, &[0; 101]), Some((1, 2, 5))),
            (untagged(send, &[0; 100]), None),
            (untagged(send, &[0; 9]), None),
            (untagged(Untagged { opcode: Opcode::SendInvalidate, ..send }, b""), Some((0, 1, 9))),
            (untagged(Untagged { opcode: Opcode::Immediate, ..send }, &[0; 8]), Some((0, 2, 6))),
            (tagged(Opcode::Write, b"x"), Some((1, 1, 0))),
            (tagged(Opcode::Write, b""), None),
            (tagged(Opcode::ReadResponse, b""), Some((1, 0, 0))),
            (read(1), Some((0, 1, 0))),
            (read(0), None),
            (vec![0, 17, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], Some((2, 0, 3))),
        ];
        for (index, (fpdu, want)) in cases.iter().enumerate() {
            for step in [1, 7, usize::MAX] {
                let mut end = End::new(Role::Responder, agreement(false, None), 1448);
                let memory = Memory::new(4096).unwrap();
                end.recv(1, SgeList::one(memory.sge(0, 100)));
                let result = fpdu.chunks(step.min(fpdu.len())).try_for_each(|chunk| end.deliver(chunk));
                let got = match result {
                    Ok(()) => None,
                    Err(Fault::Violation(cause, _)) => Some((cause.layer.raw(), cause.etype, cause.code)),
                    Err(other) => panic!("{other:?}"),
                };
                assert_eq!(got, *want, "case {index}");
            }
        }
        let mut end = End::new(Role::Responder, agreement(false, None), 1448);
        let Err(Fault::Violation(cause, _)) = end.deliver(&untagged(send, b"")) else { panic!() };
        assert_eq!(cause, TerminateCause::DDP_UNTAGGED_NO_BUFFER);
    }

    #[test]
    fn a_terminate_ends_the_stream_behind_what_was_begun() {
        let mut a = End::new(Role::Initiator, agreement(true, None), 1448);
        let memory = Memory::new(8192).unwrap();
        memory.write(0, &pattern(3000, 0));
        for wr_id in 0..2 {
            a.send(wr_id, SgeList::one(memory.sge(0, 3000)), SendFlags::SIGNALED);
        }
        let mut taken = Vec::new();
        let mut calls = 0;
        let sent = a.qp.transmit(
            &mut |bufs| {
                calls += 1;
                let all: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
                taken.extend_from_slice(&all[..3100]);
                Ok(3100)
            },
            &mut a.cqs,
        );
        assert_eq!((sent.unwrap(), calls), (Sent::Blocked, 1));
        let rest = a.qp.end(Some((TerminateCause::LLP_CRC, None)), &mut a.cqs);
        // From here on the memory is the user's.
        memory.write(0, &[0xee; 3000]);
        let statuses: Vec<_> = a.done().iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(statuses, [(0, WcStatus::Success), (1, WcStatus::Flushed)]);
        let mut b = End::new(Role::Responder, agreement(true, None), 1448);
        let sink = Memory::new(8192).unwrap();
        b.recv(0, SgeList::one(sink.sge(0, 4096)));
        b.recv(1, SgeList::one(sink.sge(4096, 4096)));
        b.deliver(&taken).unwrap();
        let Err(Fault::Terminated(what)) = b.deliver(&rest) else { panic!("no Terminate") };
        assert!(what.contains("CRC"), "{what}");
        assert_eq!(sink.read(0, 3000), pattern(3000, 0));
        // Posts to a queue pair that has ended are flushed.
        a.send(7, SgeList::default(), SendFlags::empty());
        a.recv(8, SgeList::default());
        assert!(a.done().iter().all(|wc| wc.status == WcStatus::Flushed));
    }

    #[test]
    fn reads_of_nothing_are_answered_and_bounded() {
        let mut a = End::new(Role::Initiator, agreement(true, Some(ReadyToReceive::Read)), 1448);
        let mut b = End::new(Role::Responder, agreement(true, Some(ReadyToReceive::Read)), 1448);
        a.transmit(usize::MAX);
        b.deliver(&a.wire).unwrap();
        b.qp.release();
        b.transmit(usize::MAX);
        assert_eq!(b.wire.len(), 20);
        a.deliver(&b.wire).unwrap();
        assert_eq!(a.qp.rx.empty_responses, 0);
        assert!(matches!(a.deliver(&b.wire), Err(Fault::Violation(..))));
        // A depth of 2, and one more for a peer that counts otherwise.
        for _ in 0..3 {
            b.qp.tx.owe(1, 0).unwrap();
        }
        assert_eq!(b.qp.tx.owe(1, 0), Err(TerminateCause::RDMAP_STREAM_CATASTROPHIC));
    }

    #[test]
    fn queues_are_full_until_their_completions_are_polled() {
        let mut a = End::new(Role::Initiator, agreement(true, None), 1448);
        for wr_id in 0..64 {
            a.send(wr_id, SgeList::default(), SendFlags::SIGNALED);
        }
        a.transmit(usize::MAX);
        let wr = SendWr { wr_id: 64, op: SendOp::Send, sges: SgeList::default(), flags: SendFlags::empty() };
        let full = a.qp.post_send(&[wr], &mut a.cqs).unwrap_err();
        assert!(matches!(full.error, Error::QueueFull { depth: 64, .. }));
        assert_eq!(a.done().len(), 64);
        a.qp.post_send(&[wr], &mut a.cqs).unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_split_is_the_same(
            sizes in prop::collection::vec(prop::sample::select(&SIZES[..13]), 1..12),
            crc: bool, emss in 128usize..65536, parts in 1usize..=4, window in 200usize..100_000,
            cuts in prop::collection::vec(prop_oneof![1usize..40, 1000usize..20_000], 1..40),
        ) {
            let wire = stream(&sizes, crc, emss, parts, window);
            let mut cut = cuts.iter().cycle();
            receive(&wire, &sizes, crc, 5 - parts, |_| *cut.next().unwrap());
        }

        #[test]
        fn arbitrary_bytes_do_no_harm(
            crc: bool, chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..200), 1..20),
        ) {
            let mut end = End::new(Role::Responder, agreement(crc, None), 1448);
            let memory = Memory::new(4096).unwrap();
            end.recv(0, SgeList::one(memory.sge(0, 4096)));
            let _ = chunks.iter().try_for_each(|chunk| end.deliver(chunk));
        }

        /// Headers that are almost right get further than noise does.
        #[test]
        fn mutated_streams_do_no_harm(
            crc in Just(false), edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            step in 1usize..5000,
        ) {
            let mut wire = stream(&[0, 5, 300, 5000, 64], crc, 1448, 1, usize::MAX);
            for (at, byte) in &edits {
                let at = at.index(wire.len());
                wire[at] = *byte;
            }
            let mut end = End::new(Role::Responder, agreement(crc, None), 1448);
            let memory = Memory::new(4096).unwrap();
            for wr_id in 0..5 {
                end.recv(wr_id, SgeList::one(memory.sge(0, 4096)));
            }
            let _ = wire.chunks(step).try_for_each(|chunk| end.deliver(chunk));
        }
    }
}
