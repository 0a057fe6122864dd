//! The places that incoming payload may go to.

use super::requester::Requester;
use super::responder::Responder;
use super::srq::SharedReceiveQueue;
use super::stag::StagTable;
use crate::mem::{RecvSlice, Sge, Span};
use crate::slab::Key;

/// A message that has filled a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) wr_id: u64,
    pub(crate) len: u32,
    /// The STag that the peer invalidated with it.
    pub(crate) invalidated: Option<u32>,
    pub(crate) immediate: Option<u32>,
}

/// What an incoming segment may use besides the queue pair's own receives.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    /// The connection, for STags that belong to one.
    pub(crate) scope: Key,
    pub(crate) stags: &'a mut StagTable,
    pub(crate) srq: Option<&'a mut SharedReceiveQueue>,
    pub(crate) requester: &'a mut Requester,
    pub(crate) responder: &'a mut Responder,
    /// Whether both sides agreed on RFC 7306.
    pub(crate) extensions: bool,
}

/// Memory where the next bytes of the stream belong.
#[derive(Debug)]
pub(crate) enum Direct<'a> {
    /// In a posted receive.
    Receive(Sge),
    /// In a memory region.
    Region(Span<'a>),
    /// In the buffer of a Write that waits for its CRC.
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

    /// The memory, for a receive call.
    pub(crate) fn receive_slice(&mut self) -> RecvSlice<'_> {
        match self {
            Self::Receive(sge) => sge.receive_slice(),
            Self::Region(span) => span.receive_slice(),
            Self::Held(bytes) => RecvSlice::new(bytes),
        }
    }
}
