//! The account of the windows of a provider: the memory of peers that the provider has mapped.
//!
//! A peer chooses the number and the lengths of its windows, and the local process pays for them:
//! with address space and with mappings. It does not pay for the pages: the peer has allocated
//! all of them before ([`Window::map`]).
//!
//! The exception is lent memory ([`Window::is_lent`]): a hostile peer can remove its pages. A local
//! process that reads removed pages pays for new ones until it unmaps the window. The page faults
//! of these reads are counted. At the limit of one window, or of all windows, the local side does
//! not read the lent window any more, but sends Read requests to the peer. Reads from staging
//! buffers are not counted, because a connection has only one short staging buffer.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use rdma_transport::mem::Window;

/// The length of the staging buffer of a side in bytes.
pub(super) const STAGING: usize = 256 << 10;
/// The largest length of a window, in bytes. The windows that are unmapped in one turn have at most
/// this length in total, too. If the peer process has exited, unmapping a window of this length
/// takes about 10 ms, because the kernel then frees all pages of the file.
pub(super) const SLICE: u64 = 64 << 20;
/// The number of bytes that one byte of lent memory counts in the limit for one turn, [`SLICE`]. It
/// is more than 1, because unmapping lent memory always frees its pages. Unmapping other memory
/// frees its pages only if the peer process has exited.
const REMOVAL: u64 = 8;
/// The largest number of windows of all providers of the process: a quarter of the default of
/// `vm.max_map_count`. At `vm.max_map_count` mappings, the kernel refuses memory to every part of
/// the process.
pub(crate) const MAX_IN_PROCESS: usize = 16 << 10;
/// The divisor of [`WindowLimits::bytes`] for another limit: the bytes of removed pages that the
/// process may be charged for, 48 MiB by default. The kernel maps 16 pages per page fault, so
/// honest peers do not reach this limit even if their windows use all bytes.
const CHARGED: u64 = 16 * PART / (PART - 1);
/// The divisor for shares of the limits: the windows of one connection may use a quarter of the
/// bytes. A quarter of the bytes, and of the number of windows, is reserved for staging buffers.
const PART: u64 = 4;
/// The process may be charged for this number of bytes of a lent window, and for an eighth of the
/// window's length in addition.
const SMALL: u64 = 64 << 10;

/// The number of windows of all providers of the process.
static IN_PROCESS: AtomicUsize = AtomicUsize::new(0);

/// The limits of the windows of a provider.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WindowLimits {
    /// The largest sum of the lengths of all windows, in bytes.
    pub(crate) bytes: u64,
    /// The largest number of windows.
    pub(crate) count: usize,
}

/// The kinds of windows, which have different limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WindowKind {
    /// The peer's staging buffer.
    Staging,
    /// Other memory: a message, or a direct region.
    Other,
}

/// The windows of all connections of a provider. The connections share the account, and one thread
/// at a time uses it.
#[derive(Debug)]
pub(crate) struct WindowAccount {
    limits: WindowLimits,
    /// The number of windows of all providers.
    in_process: &'static AtomicUsize,
    bytes: AtomicU64,
    count: AtomicUsize,
    /// An upper bound of the bytes of lent memory for which the process is charged.
    charged: AtomicU64,
    /// The bytes that were unmapped in this turn. Each byte of lent memory counts [`REMOVAL`]
    /// times.
    unmapped: AtomicU64,
    /// Windows that no connection uses any more, and that are unmapped in later turns.
    ended: Mutex<VecDeque<Window>>, // bound: windows
    /// True once a window was refused because of a limit.
    is_reported: AtomicBool,
}

impl WindowAccount {
    pub(crate) fn new(limits: WindowLimits) -> Self {
        Self::counted_in(&IN_PROCESS, limits)
    }

    fn counted_in(in_process: &'static AtomicUsize, limits: WindowLimits) -> Self {
        Self {
            limits,
            in_process,
            bytes: AtomicU64::new(0),
            count: AtomicUsize::new(0),
            charged: AtomicU64::new(0),
            unmapped: AtomicU64::new(0),
            ended: Mutex::default(),
            is_reported: AtomicBool::new(false),
        }
    }

    /// Adds a window of `len` bytes. The other windows of its connection have `of_connection` bytes
    /// in total. Returns an error, and adds nothing, if a sum would exceed a limit.
    pub(super) fn add(&self, kind: WindowKind, len: u64, of_connection: u64) -> io::Result<()> {
        let WindowLimits { bytes, count } = self.limits;
        let share = |of: u64| if kind == WindowKind::Staging { of } else { of - of / PART };
        let limit = if len > SLICE {
            "a window may have 64 MiB"
        } else if self.bytes.load(Relaxed).saturating_add(len) > share(bytes) {
            "WithinHost::window_bytes is reached"
        } else if kind != WindowKind::Staging && of_connection.saturating_add(len) > bytes / PART {
            "one connection may use a quarter of WithinHost::window_bytes"
        } else if self.count.load(Relaxed) as u64 >= share(count as u64) {
            "WithinHost::max_windows is reached"
        } else if self.in_process.fetch_add(1, Relaxed) >= MAX_IN_PROCESS {
            self.in_process.fetch_sub(1, Relaxed);
            "the process has 16384 windows"
        } else {
            self.bytes.fetch_add(len, Relaxed);
            self.count.fetch_add(usize::from(!rdma_transport::planted("windows-are-not-counted")), Relaxed);
            return Ok(());
        };
        if !self.is_reported.swap(true, Relaxed) {
            local_log!(Warn, "memory of peers on this host is not mapped, which is slower: {limit}. Reported once");
        }
        Err(io::Error::other(format!("{len} bytes are not mapped: {limit}")))
    }

    /// Subtracts a window of `len` bytes from the sums, after it was unmapped or could not be
    /// mapped.
    pub(super) fn subtract(&self, len: u64) {
        self.bytes.fetch_sub(len, Relaxed);
        self.count.fetch_sub(1, Relaxed);
        self.in_process.fetch_sub(1, Relaxed);
    }

    /// Unmaps a window immediately, or in a later turn if the limit of this turn is reached. The
    /// window counts towards the limits until it is unmapped.
    pub(super) fn remove(&self, window: Window) {
        let len = window.len() as u64;
        let work = if window.is_lent() { REMOVAL * len } else { len };
        let unmapped = self.unmapped.load(Relaxed);
        let is_full = unmapped > 0 && unmapped + work > SLICE;
        if is_full && !rdma_transport::planted("all-windows-are-unmapped-in-one-turn") {
            self.ended.lock().unwrap_or_else(PoisonError::into_inner).push_back(window);
            return;
        }
        self.charged.fetch_sub(window.charged(), Relaxed);
        drop(window);
        self.unmapped.fetch_add(work, Relaxed);
        self.subtract(len);
    }

    /// Returns true if a message may be read from this window: the peer cannot remove its pages, or
    /// the process is charged for few bytes of this window and of all windows.
    pub(super) fn may_fetch(&self, window: &Window) -> bool {
        let most = window.len() as u64 / 8 + SMALL;
        let is_little = window.charged() <= most && self.charged.load(Relaxed) < self.limits.bytes / CHARGED;
        !window.is_lent() || is_little || rdma_transport::planted("removed-pages-are-not-counted")
    }

    /// Adds `bytes` to the bytes of lent memory for which the process is charged.
    pub(super) fn charge(&self, bytes: u64) {
        self.charged.fetch_add(bytes, Relaxed);
    }

    /// Returns true if windows were unmapped in this turn. Other windows may wait for the next
    /// turn.
    #[inline]
    pub(crate) fn unmaps(&self) -> bool {
        self.unmapped.load(Relaxed) > 0
    }

    /// Begins the next turn, and unmaps windows that [`WindowAccount::remove`] left for a later
    /// turn.
    #[inline]
    pub(crate) fn begin_turn(&self) {
        if self.unmaps() {
            self.unmap_some();
        }
    }

    #[inline(never)]
    fn unmap_some(&self) {
        let mut ended = std::mem::take(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner));
        self.unmapped.store(0, Relaxed);
        ended.drain(..).for_each(|window| self.remove(window));
    }

    /// Returns the sum of the lengths of all windows, and the number of windows.
    #[cfg(any(all(test, not(loom_model)), fuzz_targets))]
    pub(crate) fn used(&self) -> (u64, usize) {
        (self.bytes.load(Relaxed), self.count.load(Relaxed))
    }
}

/// Windows that were left for a later turn are unmapped with the account.
impl Drop for WindowAccount {
    fn drop(&mut self) {
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.in_process.fetch_sub(ended.len(), Relaxed);
    }
}

/// Returns the account of a provider with the default limits.
#[cfg(test)]
pub(super) fn account() -> std::sync::Arc<WindowAccount> {
    let limits = WindowLimits { bytes: 1 << 30, count: 8192 };
    std::sync::Arc::new(WindowAccount::new(limits))
}

#[cfg(all(test, not(loom_model)))]
mod tests {
    use rdma_transport::Memory;
    use rdma_transport::mem::Sharing;

    use super::*;

    /// Windows that wait to be unmapped when a provider is dropped do not count any more.
    #[test]
    fn a_dropped_provider_leaves_no_window_in_the_count() {
        static WINDOWS: AtomicUsize = AtomicUsize::new(0);
        const LEN: usize = 1 << 20;
        let account = WindowAccount::counted_in(&WINDOWS, WindowLimits { bytes: 1 << 30, count: 8192 });
        for _ in 0..SLICE / (REMOVAL * LEN as u64) + 3 {
            let theirs = Memory::new_shared(LEN, Sharing::Lent).unwrap();
            let file = theirs.file().unwrap().try_clone_to_owned().unwrap();
            account.add(WindowKind::Other, LEN as u64, 0).unwrap();
            account.remove(Window::map(&file, LEN, Sharing::Read).unwrap());
        }
        assert!(WINDOWS.load(Relaxed) > 1, "all were unmapped");
        drop(account);
        assert_eq!(WINDOWS.load(Relaxed), 0);
    }
}
