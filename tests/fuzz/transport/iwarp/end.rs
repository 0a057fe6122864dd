//! One queue pair for a fuzz target, without a socket. The target hands received bytes to the queue pair, and collects
//! the bytes that the queue pair sends.

use std::io;

use super::super::fault::Fault;
use super::super::intake::Intake;
use super::super::queue_pair::{QueuePair, Role};
use super::super::startup::Agreement;
use super::super::transmit::Sent;
use super::super::wire::crc32c;
use super::super::wire::mpa::{CRC_LEN, fpdu_len};
use crate::soft::resources::Resources;
use rdma_transport::provider::CqId;
use rdma_transport::qp::{QpAttr, QpId, SrqId};
use rdma_transport::slab::Key;
use rdma_transport::wc::WorkCompletion;

/// The depth of each work queue.
pub(super) const DEPTH: u32 = 16;
/// The longest inline payload, in bytes.
pub(super) const INLINE: u32 = 64;
/// The largest number of bytes that one receive call reads after the rest of the current payload.
const ROOM: usize = 256 * 1024;

pub(super) struct End {
    pub(super) qp: QueuePair,
    pub(super) resources: Resources,
    pub(super) cq: CqId,
    pub(super) srq: Option<SrqId>,
    intake: Intake,
    /// The bytes that the queue pair has sent.
    pub(super) wire: Vec<u8>,
}

impl End {
    pub(super) fn new(role: Role, agreement: &Agreement, segment: usize, shared: bool, extensions: bool) -> Self {
        let mut resources = Resources::default();
        let cq = resources.cqs.create(4 * DEPTH as usize);
        let srq = shared.then(|| resources.create_srq(DEPTH));
        if let Some(srq) = srq {
            resources.attach(srq, cq).expect("there is room on the completion queue");
        }
        let attr = QpAttr {
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_inline: INLINE,
            max_recv_sge: 0,
            srq: None,
        };
        let mut qp = QueuePair::new(QpId(Key::new(1, 1)), &QpAttr { srq, ..attr });
        qp.establish(role, agreement, segment);
        if extensions {
            qp.extensions = true;
        }
        Self { qp, resources, cq, srq, intake: Intake::new(), wire: Vec::new() }
    }

    /// Passes received bytes to the queue pair, in the same way as a provider that reads from a socket.
    pub(super) fn deliver(&mut self, mut octets: &[u8]) -> Result<(), Fault> {
        let Self { qp, resources, intake, .. } = self;
        while !octets.is_empty() {
            let taken = qp.receive(intake, ROOM, &resources.keys, &mut |slices| {
                let before = octets.len();
                for slice in slices {
                    octets = &octets[slice.fill(octets)..];
                }
                Ok(before - octets.len())
            });
            let result = qp.input(intake, taken.expect("the socket does not fail").0, resources);
            if qp.tx.is_held() && qp.rx.has_seen() {
                qp.tx.release();
            }
            result?;
        }
        Ok(())
    }

    /// Transmits until the queue pair has nothing left to send, or until it has sent `window` bytes. The simulated
    /// socket is then full.
    pub(super) fn transmit(&mut self, window: usize) -> Result<(), Fault> {
        let mut room = window;
        loop {
            let Self { qp, resources, wire, .. } = self;
            let sent = qp.transmit(
                &mut |slices| {
                    if room == 0 {
                        return Err(io::ErrorKind::WouldBlock.into());
                    }
                    let before = wire.len();
                    for slice in slices {
                        slice.append_to(wire, usize::MAX);
                    }
                    wire.truncate(wire.len().min(before.saturating_add(room)));
                    let taken = wire.len() - before;
                    room -= taken;
                    Ok(taken)
                },
                resources,
            );
            let sent = sent.expect("the socket does not fail");
            if let Some(fault) = self.qp.take_fault() {
                return Err(fault);
            }
            match sent {
                Sent::All => return Ok(()),
                Sent::Blocked => {
                    assert!(room == 0, "it stopped although the socket took everything");
                    return Ok(());
                }
                Sent::More => {}
            }
        }
    }

    /// Polls at most `max` completions, and returns them.
    pub(super) fn poll(&mut self, max: usize) -> Vec<WorkCompletion> {
        let mut out = Vec::new();
        self.resources.cqs.poll(self.cq, max, &mut out).expect("the completion queue is there");
        for completion in &out {
            if let Some(srq) = self.qp.polled(completion.opcode) {
                self.resources.receive_polled(srq);
            }
        }
        out
    }
}

/// Appends the padding and a correct CRC to an FPDU. Returns the complete FPDU.
pub(super) fn seal(mut fpdu: Vec<u8>) -> Vec<u8> {
    fpdu.resize(fpdu.len().next_multiple_of(4), 0);
    let sum = crc32c(&fpdu);
    fpdu.extend_from_slice(&sum.to_le_bytes());
    fpdu
}

/// Writes the correct CRC into each complete FPDU of a stream.
pub(super) fn repair(stream: &mut [u8]) {
    let mut rest = stream;
    while let Some(&[high, low]) = rest.first_chunk::<2>() {
        let len = fpdu_len(usize::from(u16::from_be_bytes([high, low])));
        let Some((fpdu, behind)) = rest.split_at_mut_checked(len) else { return };
        let (body, sum) = fpdu.split_at_mut(len - CRC_LEN);
        sum.copy_from_slice(&crc32c(body).to_le_bytes());
        rest = behind;
    }
}
