//! The untagged messages except Sends: Read Requests, Atomic Requests, Atomic Responses, Immediate
//! Data, and Terminate. Each of these messages is one segment.

use super::fault::{Fault, violation};
use super::placement::PlacementContext;
use super::responder::{ServedOperation, ServedRequest};
use super::stag;
use super::wire::atomic::{ATOMIC_REQUEST_LEN, ATOMIC_RESPONSE_LEN, parse_response};
use super::wire::opcode::{ATOMIC_RESPONSE_QUEUE, READ_REQUEST_QUEUE, SEND_QUEUE, TERMINATE_QUEUE};
use super::wire::terminate::MAX_TERMINATE_LEN;
use super::wire::{AtomicRequest, Opcode, ReadRequest, Terminate, TerminateCause, Untagged};
use crate::soft::receive_queue::{ReceiveQueue, ReceivedMessage};
use rdma_transport::mr::Access;
use rdma_transport::wc::WcStatus;

/// The length of the longest payload of these messages, a Terminate or an Atomic Request, in bytes.
const MAX_PAYLOAD: usize = if MAX_TERMINATE_LEN > ATOMIC_REQUEST_LEN { MAX_TERMINATE_LEN } else { ATOMIC_REQUEST_LEN };

#[derive(Debug)]
pub(super) struct ControlReceiver {
    payload: [u8; MAX_PAYLOAD],
    /// `request_msn` is the MSN of the peer's next Read Request or Atomic Request. `atomic_msn` is
    /// the MSN of its next Atomic Response.
    request_msn: u32,
    atomic_msn: u32,
}

impl ControlReceiver {
    pub(super) const fn new() -> Self {
        Self { payload: [0; MAX_PAYLOAD], request_msn: 1, atomic_msn: 1 }
    }

    /// Checks the header of a message, and `read`, the rest of the header of a Read Request.
    /// `messages` are the receives of the queue pair.
    #[inline(never)]
    pub(super) fn judge(
        &self,
        header: &Untagged,
        read: Option<ReadRequest>,
        messages: &mut ReceiveQueue,
        cx: &mut PlacementContext<'_>,
    ) -> Result<(), TerminateCause> {
        if header.opcode.is_extension() && !cx.extensions {
            return Err(TerminateCause::RDMAP_OPCODE);
        }
        let (queue, msn) = match header.opcode {
            Opcode::ReadRequest | Opcode::AtomicRequest => (READ_REQUEST_QUEUE, self.request_msn),
            Opcode::Terminate => (TERMINATE_QUEUE, header.msn),
            Opcode::Immediate | Opcode::ImmediateSolicited => (SEND_QUEUE, messages.msn()),
            Opcode::AtomicResponse => (ATOMIC_RESPONSE_QUEUE, self.atomic_msn),
            _ => return Err(TerminateCause::RDMAP_OPCODE),
        };
        if header.queue != queue {
            return Err(TerminateCause::INVALID_QN);
        }
        if header.msn != msn {
            return Err(TerminateCause::INVALID_MSN);
        }
        if header.opcode == Opcode::Terminate {
            // After the queue number, no field of a Terminate is checked, since a Terminate is the
            // peer's last message.
            return Ok(());
        }
        if header.offset != 0 || (queue == SEND_QUEUE && !messages.is_between_messages()) {
            return Err(TerminateCause::INVALID_MO);
        }
        if !header.last {
            // Every untagged message except a Send consists of exactly one segment.
            return Err(TerminateCause::DDP_UNTAGGED_TOO_LONG);
        }
        match (header.opcode, read) {
            (Opcode::Immediate | Opcode::ImmediateSolicited, _) if !messages.has_next(&mut cx.srq) => {
                Err(TerminateCause::DDP_UNTAGGED_NO_BUFFER)
            }
            (Opcode::AtomicResponse, _) if !cx.outstanding.front().is_some_and(|front| front.atomic) => {
                Err(TerminateCause::DDP_LOCAL_CATASTROPHIC)
            }
            (Opcode::ReadRequest | Opcode::AtomicRequest, read) => {
                if !cx.responses.has_room() {
                    // Like siw, report an RDMAP error, and not the DDP error for a missing buffer.
                    return Err(TerminateCause::RDMAP_STREAM_CATASTROPHIC);
                }
                match read.filter(|read| read.size > 0) {
                    Some(read) => cx
                        .keys
                        .remote(cx.scope, read.source_stag, read.source_offset, read.size as usize, Access::REMOTE_READ)
                        .map(|_| ())
                        .map_err(stag::request),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Copies bytes of the payload from the position `at` on. Returns the number of bytes for which
    /// there was room.
    #[inline]
    pub(super) fn fill(&mut self, at: usize, bytes: &[u8]) -> usize {
        let room = self.payload.get_mut(at..).unwrap_or_default();
        let n = bytes.len().min(room.len());
        room[..n].copy_from_slice(&bytes[..n]);
        n
    }

    /// Processes a message with `len` bytes of payload, which has arrived with a correct CRC.
    /// `messages` are the receives of the queue pair, and `written` is the length of the last
    /// complete Write.
    #[inline(never)]
    pub(super) fn finish(
        &mut self,
        header: &Untagged,
        read: Option<ReadRequest>,
        len: usize,
        (messages, written): (&mut ReceiveQueue, &mut u32),
        cx: &mut PlacementContext<'_>,
        out: &mut impl FnMut(ReceivedMessage),
    ) -> Result<(), Fault> {
        let payload = self.payload.get(..len).unwrap_or(&self.payload);
        let too_short = violation(TerminateCause::LLP_FPDU_LENGTH, header);
        match header.opcode {
            Opcode::ReadRequest => {
                self.request_msn = self.request_msn.wrapping_add(1);
                if let Some(read) = read {
                    cx.responses.push(ServedRequest { operation: ServedOperation::Read(read), msn: header.msn });
                }
            }
            Opcode::AtomicRequest => {
                let request = AtomicRequest::parse(payload.first_chunk().ok_or(too_short)?);
                if !request.is_known() {
                    return Err(violation(TerminateCause::RDMAP_OPCODE, header));
                }
                if request.offset % 8 != 0 {
                    return Err(violation(TerminateCause::RDMAP_STREAM_CATASTROPHIC, header));
                }
                self.request_msn = self.request_msn.wrapping_add(1);
                cx.responses.push(ServedRequest { operation: ServedOperation::Atomic(request), msn: header.msn });
            }
            Opcode::AtomicResponse => {
                let (id, old) = parse_response(payload.first_chunk::<ATOMIC_RESPONSE_LEN>().ok_or(too_short)?);
                let outstanding = &mut *cx.outstanding;
                let Some(front) = outstanding.front().filter(|front| front.atomic && outstanding.front_number() == id)
                else {
                    return Err(violation(TerminateCause::RDMAP_STREAM_CATASTROPHIC, header));
                };
                let Some(span) = cx.keys.sink(front.stag, front.offset, front.len as usize) else {
                    return Err(Fault::WorkRequest(WcStatus::LocalProtectionError));
                };
                span.fill(&old.to_ne_bytes());
                self.atomic_msn = self.atomic_msn.wrapping_add(1);
                outstanding.complete();
            }
            Opcode::Immediate | Opcode::ImmediateSolicited => {
                let data = u64::from_be_bytes(*payload.first_chunk().ok_or(too_short)?);
                let len = std::mem::take(written);
                messages.end_message(Some(len), None, Some(data as u32), out);
            }
            _ => return Err(Fault::Terminated(Terminate::parse(payload))),
        }
        Ok(())
    }
}
