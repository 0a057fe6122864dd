//! The right of the embedded provider to use the bytes of scatter-gather entries.

use rdma_transport::mem::EntryAccess;

// SAFETY: the engines use the entries of a work request from its post on until its completion is in
// the completion queue: entries leave the send queue, the receive queue and the list of outstanding
// requests at that time, and with the queue pair. `send_now` and `write_now` copy their entries.
// Slices live during one system call. Entries of sends are in no queue from which the engines
// write. Entries of device memory belong to other devices, by the promise of `Sge::of_device`.
pub(crate) const ENTRIES: EntryAccess = unsafe { EntryAccess::new() };
