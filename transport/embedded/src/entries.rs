//! The right of the embedded provider to use the bytes of entries.

use rdma_transport::mem::EntryAccess;

// SAFETY: the engines use the entries of a work request from its post on until its completion is in
// the completion queue: entries leave the send queue, the receive queue and the list of outstanding
// requests at that time, and with the queue pair. Slices live during one system call. Only receives,
// Reads and atomic operations are written: `soft::checks` refuses other entries.
pub(crate) const ENTRIES: EntryAccess = unsafe { EntryAccess::new() };
