//! The right of a provider to use the bytes of scatter/gather entries.

#[cfg(target_os = "linux")]
use super::Window;
use super::frame;
use super::{RecvSlice, SendSlice, Sge, Span};

/// The right of a provider to use the bytes of scatter/gather entries. A provider makes one
/// constant of this type, which has no size. With its only `unsafe`, the provider promises to use
/// all entries as [`EntryAccess::new`] requires.
///
/// ```
/// use rdma_transport::mem::EntryAccess;
///
/// // SAFETY: this provider uses entries only of work requests that were posted to it and are not
/// // done.
/// const ENTRIES: EntryAccess = unsafe { EntryAccess::new() };
/// ```
#[derive(Clone, Copy, Debug)]
pub struct EntryAccess(());

impl EntryAccess {
    /// Makes the right to use entries.
    ///
    /// # Safety
    /// The caller keeps these conditions for each entry that is passed to a function of this type:
    ///
    /// - The entry belongs to a work request that was posted to the caller's provider and is not
    ///   done, or to a running call of [`crate::roles::ImmediateSends`]. It may be a part of such
    ///   an entry.
    /// - It is not an entry of device memory.
    /// - Its bytes are written only if the work request is a receive, a Read or an atomic
    ///   operation.
    /// - A slice that a function returns is not used after the work request is done.
    #[must_use]
    pub const unsafe fn new() -> Self {
        Self(())
    }

    /// Copies the bytes of an entry to `out`. Copies fewer bytes if `out` is shorter.
    #[inline]
    pub fn copy_to(self, entry: &Sge, out: &mut [u8]) {
        entry.copy_to(out);
    }

    /// Appends a copy of the bytes of an entry to `out`.
    #[inline]
    pub fn append_to(self, entry: &Sge, out: &mut Vec<u8>) {
        entry.append_to(out);
    }

    /// Appends `header`, then a copy of the bytes of an entry, then `zeros` zero bytes to `out`.
    #[inline]
    pub fn append_frame<const N: usize>(self, out: &mut Vec<u8>, header: &[u8; N], entry: &Sge, zeros: usize) {
        frame::append_entry(out, header, entry, zeros);
    }

    /// Copies `bytes` to the start of an entry. Copies fewer bytes if the entry is shorter.
    #[inline]
    pub fn fill(self, entry: &Sge, bytes: &[u8]) {
        entry.fill(bytes);
    }

    /// Copies the bytes of `from` to the start of an entry. Copies fewer bytes if the entry is
    /// shorter. Other users may write `from` at the same time.
    #[inline]
    pub fn fill_from(self, entry: &Sge, from: Span<'_>) {
        entry.fill_from(from);
    }

    /// Copies the bytes of an entry to the start of a span. Copies fewer bytes if the span is
    /// shorter.
    #[inline]
    pub fn copy_to_span(self, entry: &Sge, to: Span<'_>) {
        entry.store_into(to.base(), to.len());
    }

    /// Fills an entry with the bytes of a window from `offset` on. Copies nothing if not all of
    /// them are inside the window. Returns an upper bound of the bytes in new pages that the copy
    /// charges to this process, because the peer had removed pages ([`Window::charged`]).
    #[cfg(target_os = "linux")]
    #[inline]
    pub fn fetch(self, entry: &Sge, window: &Window, offset: usize) -> u64 {
        window.fetch(offset, entry)
    }

    /// Calls `each` with the bytes of an entry, in order. If nothing may change the bytes, `each`
    /// gets all of them in place, in one call. Otherwise `each` gets copies of consecutive parts.
    #[inline]
    pub fn visit(self, entry: &Sge, each: impl FnMut(&[u8])) {
        entry.visit(each);
    }

    /// Calls `each` with the first `len` bytes of a span, for example to compute a checksum. The
    /// caller has placed these bytes for an RDMA Read of the local program. `entry` is the part of
    /// that Read's local scatter/gather entry that begins at the span. If nothing else may use the
    /// bytes of `entry`, `each` gets the bytes in place. Otherwise `each` gets copies of
    /// consecutive parts.
    pub fn visit_placed(self, entry: Sge, span: Span<'_>, len: usize, each: impl FnMut(&[u8])) {
        span.visit(len, entry, each);
    }

    /// Returns the bytes of an entry as a buffer for a send call.
    #[inline]
    #[must_use]
    pub fn send_slice(self, entry: &Sge) -> SendSlice<'_> {
        entry.send_slice()
    }

    /// Returns the bytes of an entry as a buffer for a receive call.
    #[inline]
    #[must_use]
    pub fn receive_slice(self, entry: &Sge) -> RecvSlice<'_> {
        entry.receive_slice()
    }
}
