//! Where what comes in may go: memory for a receive call, and what a segment reaches beyond the posted receives.

use super::requester::Requester;
use super::responder::Responder;
use super::srq::SharedReceiveQueue;
use super::stag::StagTable;
use crate::mem::{RecvSlice, Sge, Span};
use crate::slab::Key;

/// A receive that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) wr_id: u64,
    pub(crate) len: u32,
    /// The STag that the peer took back with it.
    pub(crate) invalidated: Option<u32>,
    pub(crate) immediate: Option<u32>,
}

/// What a segment may reach beyond the posted receives.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    /// Whose STags.
    pub(crate) scope: Key,
    pub(crate) stags: &'a mut StagTable,
    pub(crate) srq: Option<&'a mut SharedReceiveQueue>,
    pub(crate) requester: &'a mut Requester,
    pub(crate) responder: &'a mut Responder,
    /// RFC 7306 is agreed on.
    pub(crate) extensions: bool,
}

/// Memory where the next bytes of the stream belong.
#[derive(Debug)]
pub(crate) enum Direct<'a> {
    /// A posted receive.
    Receive(Sge),
    /// A memory region.
    Region(Span<'a>),
    /// A Write that waits for its CRC.
    Held(&'a mut [u8]),
}

impl Direct<'_> {
    /// Length in bytes.
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Receive(sge) => sge.len(),
            Self::Region(span) => span.len(),
            Self::Held(bytes) => bytes.len(),
        }
    }

    /// The same for a receive call.
    pub(crate) fn receive_slice(&mut self) -> RecvSlice<'_> {
        match self {
            Self::Receive(sge) => sge.receive_slice(),
            Self::Region(span) => span.receive_slice(),
            Self::Held(bytes) => RecvSlice::new(bytes),
        }
    }
}
