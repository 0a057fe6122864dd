//! Memory of one side that the other side maps. [`Lendings`] contains the local memory that the peer may map.
//! [`Windows`] contains the memory of the peer that the local side has mapped.
//!
//! Each lending has a slot. In the half of the segment in which a side produces, a table has a word for each of its
//! lendings. The upper half of the word is the generation of the slot, and the lower half is the key of the region.
//! Before each use of a window, the side that uses it compares the word in the table with the word that was announced.
//! So no use of a window begins after its lending has ended, even if its slot has a new lending.
//! But a lending can end during a use of its window. So the side that has copied a payload compares
//! the words once more after the copy, and drops the copy if the lending has ended. The comparison
//! binds only a correct peer: a hostile peer can use the mapped pages at any time.
//!
//! [`WindowAccount`] limits the number and the lengths of windows. A window past a limit is not mapped,
//! and the peer sends records instead. A window whose lending has ended is unmapped when the peer
//! announces other memory.
//!
//! The lendings of regions end with the connection, because the program may then reuse the memory of sends that the
//! peer has not read.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::account::{STAGING, WindowAccount, WindowKind};
use super::packet::{Announcement, ReceivedAnnouncement};
use super::record::WORD;
use super::segment::{SLOTS, TABLE, Words};
use crate::entries::ENTRIES;
use rdma_transport::mem::{Memory, Sge, Sharing, Span, Window, in_pages, page_size};
use rdma_transport::mr::Access;

/// The state of a lending, as the peer has reported it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LendingState {
    Announced,
    Mapped,
    /// The peer could not map the memory, or the lending has ended.
    Refused,
}

/// Local memory that the peer may map.
#[derive(Debug)]
struct Lending {
    memory: Arc<Memory>,
    state: LendingState,
}

/// A slot of the table of lendings. A slot is reused after its lending has ended.
#[derive(Debug)]
struct LendingSlot {
    word: u64,
    lent: Option<Lending>,
}

/// The memory that the local side lends to its peer.
#[derive(Debug)]
pub(crate) struct Lendings {
    /// The offset of the half of the segment that contains the local records and the local table of
    /// lendings.
    half: usize,
    slots: Vec<LendingSlot>, // bound: lendings
    /// Announcements that the caller has not sent to the peer yet. The caller takes the last one,
    /// and puts it back if it could not be sent. An announcement is dropped if its lending ends.
    pub(crate) announcements: Vec<Announcement>, // bound: lendings
}

impl Lendings {
    pub(super) const fn new(half: usize) -> Self {
        Self { half, slots: Vec::new(), announcements: Vec::new() }
    }

    /// Lends the first `len` bytes of a memory to the peer. `rights` are the rights with which the peer may access
    /// these bytes. `key` is the key of the region, or 0 if the memory is no region. `file` is the descriptor of the
    /// memory file, or `None` if `memory` has the descriptor. Returns the slot. Returns `None` if no slot is free or
    /// there is no descriptor. The last free slot is for the staging buffer, whose key is 0.
    pub(super) fn lend<W: Words>(
        &mut self,
        words: &W,
        (memory, len, file): (&Arc<Memory>, usize, Option<OwnedFd>),
        key: u32,
        rights: Access,
    ) -> Option<u8> {
        if file.is_none() {
            memory.file()?;
        }
        let used = self.slots.iter().filter(|slot| slot.lent.is_some()).count();
        let kept = usize::from(key != 0 && !self.has(0));
        if used + kept >= SLOTS {
            return None;
        }
        let free = self.slots.iter().position(|slot| slot.lent.is_none());
        let slot = free.unwrap_or(self.slots.len());
        if slot == self.slots.len() {
            self.slots.push(LendingSlot { word: 0, lent: None });
        }
        let entry = self.slots.get_mut(slot)?;
        entry.word = next_generation(entry.word) | u64::from(key);
        entry.lent = Some(Lending { memory: Arc::clone(memory), state: LendingState::Announced });
        words.store(self.half + TABLE + WORD * slot, entry.word);
        let slot = u8::try_from(slot).ok()?;
        self.announcements.push(Announcement { slot, word: entry.word, rights, memory: Arc::clone(memory), len, file });
        Some(slot)
    }

    /// Ends all lendings of a region. The peer may keep the pages mapped. A correct peer begins no further use of them, but
    /// nothing prevents a hostile peer from using them.
    pub(super) fn take_back<W: Words>(&mut self, words: &W, key: u32) {
        self.end_each(words, |of| of == key);
    }

    /// Ends the lendings of all regions. The staging buffer, which has the key 0, stays lent: its payloads do not change
    /// any more.
    pub(super) fn end<W: Words>(&mut self, words: &W) {
        if self.end_each(words, |of| of != 0) {
            // The program may write to the memory after this call. With the fence, a peer that has
            // read such a later byte then also loads the new word, and drops its copy.
            words.fence();
        }
    }

    /// Drops the memory of all lendings, after the connection has ended.
    pub(super) fn close(&mut self) {
        self.slots.clear();
        self.announcements.clear();
    }

    /// Ends all lendings for whose key `ends` returns true. Returns true if at least one lending
    /// has ended.
    fn end_each<W: Words>(&mut self, words: &W, ends: impl Fn(u32) -> bool) -> bool {
        let mut found = false;
        for (at, slot) in self.slots.iter_mut().enumerate() {
            if slot.lent.is_some() && ends(slot.word as u32) {
                (slot.word, slot.lent) = (next_generation(slot.word), None);
                words.store(self.half + TABLE + WORD * at, slot.word);
                self.announcements.retain(|announced| usize::from(announced.slot) != at);
                found = true;
            }
        }
        found
    }

    /// Processes the peer's reply to an announcement. If `word` is not the current word of the slot, the reply belongs
    /// to an earlier lending and is ignored.
    pub(super) fn answered(&mut self, slot: u8, word: u64, mapped: bool) {
        if let Some(LendingSlot { lent: Some(lent), .. }) =
            self.slots.get_mut(usize::from(slot)).filter(|slot| slot.word == word)
        {
            lent.state = if mapped { LendingState::Mapped } else { LendingState::Refused };
        }
    }

    pub(super) fn state(&self, slot: u8) -> LendingState {
        let slot = self.slots.get(usize::from(slot)).and_then(|slot| slot.lent.as_ref());
        slot.map_or(LendingState::Refused, |lent| lent.state)
    }

    /// Returns true if the region with this key is lent.
    pub(super) fn has(&self, key: u32) -> bool {
        self.slots.iter().any(|slot| slot.lent.is_some() && slot.word as u32 == key)
    }

    /// Returns the slot of the lending that contains a scatter-gather entry, and the offset of the entry in the lent
    /// memory. Returns `None` if the peer has not mapped that memory.
    #[inline]
    pub(super) fn locate(&self, entry: &Sge) -> Option<(u8, u64)> {
        self.slots.iter().enumerate().find_map(|(at, slot)| {
            let lent = slot.lent.as_ref().filter(|lent| lent.state == LendingState::Mapped)?;
            let offset = (entry.address() as usize).checked_sub(lent.memory.as_ptr() as usize)?;
            // Records do not refer to memory whose pages can be removed: the peer fetches from such
            // memory by requests. The staging buffer is the exception, and is not used through this
            // method.
            let fits = offset.checked_add(entry.len())? <= lent.memory.len() && !lent.memory.is_lent();
            fits.then_some((at as u8, offset as u64))
        })
    }
}

/// Returns the word for the next generation of a slot, with the key 0.
const fn next_generation(word: u64) -> u64 {
    ((word >> 32).wrapping_add(1) << 32) & (u64::MAX << 32)
}

/// A window: memory of the peer that the local side has mapped.
#[derive(Debug)]
struct MappedWindow {
    window: Window,
    announced: ReceivedAnnouncement,
    kind: WindowKind,
}

/// The memory of the peer that the local side has mapped.
#[derive(Debug)]
pub(super) struct Windows {
    /// The offset of the half of the segment that contains the peer's records and its table of
    /// lendings.
    half: usize,
    slots: Vec<Option<MappedWindow>>, // bound: windows
    /// A bit for each slot, set if its window was unmapped because the lending had ended.
    ended: u32,
    account: Arc<WindowAccount>,
}

impl Windows {
    pub(super) const fn new(half: usize, account: Arc<WindowAccount>) -> Self {
        Self { half, slots: Vec::new(), ended: 0, account }
    }

    /// Maps the announced memory as a window. After an error, the slot has no window.
    pub(super) fn open(&mut self, announced: ReceivedAnnouncement, file: &OwnedFd) -> io::Result<()> {
        let slot = usize::from(announced.slot);
        let wrong = |what| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        if slot >= SLOTS {
            return wrong("a peer's memory has an unknown slot");
        }
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, || None);
        }
        self.unmap(slot);
        self.ended &= !(1 << slot);
        let len = usize::try_from(announced.len).map_or(0, |len| in_pages(len, page_size()));
        let writes = announced.rights.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let kind = if writes || announced.word as u32 != 0 { WindowKind::Other } else { WindowKind::Staging };
        let is_second = || self.slots.iter().flatten().any(|other| other.kind == WindowKind::Staging);
        if kind == WindowKind::Staging && (len > in_pages(STAGING, page_size()) || is_second()) {
            return wrong("a peer's staging buffer is too long, or is the second one");
        }
        let of_connection = self.slots.iter().flatten().map(|other| other.window.len() as u64).sum();
        self.account.add(kind, len as u64, of_connection)?;
        let mapped = Window::map(file, len, if writes { Sharing::Write } else { Sharing::Read });
        let window = mapped.inspect_err(|_| self.account.subtract(len as u64))?;
        self.slots[slot] = Some(MappedWindow { window, announced, kind });
        Ok(())
    }

    /// Unmaps all windows, after the connection has ended.
    pub(super) fn close(&mut self) {
        (0..self.slots.len()).for_each(|slot| self.unmap(slot));
    }

    fn unmap(&mut self, slot: usize) {
        if let Some(MappedWindow { window, .. }) = self.slots.get_mut(slot).and_then(Option::take) {
            self.account.remove(window);
        }
    }

    /// Unmaps all windows whose lendings have ended. Then these windows no longer count towards the
    /// limits, and the peer's memory can be freed.
    pub(super) fn unmap_ended<W: Words>(&mut self, words: &W) {
        for slot in 0..self.slots.len() {
            if self.has_ended(words, slot as u8) {
                self.unmap(slot);
                self.ended |= 1 << slot;
            }
        }
    }

    /// Returns true if the peer has not ended the lending of a window.
    #[inline]
    fn is_lent<W: Words>(&self, words: &W, announced: &ReceivedAnnouncement) -> bool {
        let word = words.load(self.half + TABLE + WORD * usize::from(announced.slot));
        word == announced.word
            || (rdma_transport::planted("a-window-by-its-key") && word as u32 == announced.word as u32)
    }

    /// Returns a payload in the window of a slot. The caller only reads the payload. Returns `None`
    /// in these cases:
    ///
    /// - The slot has no window, or the lending of the window has ended.
    /// - The payload is not within the window.
    /// - The peer can remove pages of the window, and the window is not its staging buffer.
    #[inline]
    #[allow(unsafe_code, reason = "the rights of a window are those of its mapping")]
    pub(super) fn payload<W: Words>(&self, words: &W, slot: u8, offset: u64, len: usize) -> Option<Span<'_>> {
        let theirs = self.slots.get(usize::from(slot))?.as_ref()?;
        let is_fetched = theirs.window.is_lent() && theirs.kind == WindowKind::Other;
        if is_fetched || !self.is_lent(words, &theirs.announced) {
            return None;
        }
        // SAFETY: `Incoming` copies a payload to receives and regions, and writes nothing to it.
        unsafe { theirs.window.source(usize::try_from(offset).ok()?, len) }
    }

    /// Returns true if the lending of the slot's window has not ended yet. The caller has just
    /// copied bytes from the window. If the lending has ended, the peer may have written other
    /// bytes during the copy.
    #[inline]
    pub(super) fn is_still_lent<W: Words>(&self, words: &W, slot: u8) -> bool {
        // The word is loaded after all bytes of the payload.
        fence(Ordering::Acquire);
        let theirs = self.slots.get(usize::from(slot)).and_then(Option::as_ref);
        theirs.is_some_and(|theirs| self.is_lent(words, &theirs.announced))
    }

    /// Returns true if the lending of this slot's window has ended. Returns false if the local side
    /// has mapped no window of this slot.
    pub(super) fn has_ended<W: Words>(&self, words: &W, slot: u8) -> bool {
        match self.slots.get(usize::from(slot)).and_then(Option::as_ref) {
            Some(theirs) => !self.is_lent(words, &theirs.announced),
            None => 1_u32.checked_shl(slot.into()).is_some_and(|bit| self.ended & bit != 0),
        }
    }

    /// Copies the bytes at `address` of the peer's region `key` to an entry. Returns false if no
    /// window contains them, if its lending has ended before the end of the copy, or if the peer
    /// has removed too many pages that this process has read.
    pub(super) fn fetch<W: Words>(&self, words: &W, key: u32, address: u64, to: &Sge) -> bool {
        let region = self.region(words, key, address, to.len(), Access::REMOTE_READ);
        let Some((window, slot, offset)) = region.filter(|(window, ..)| self.account.may_fetch(window)) else {
            return false;
        };
        self.account.charge(ENTRIES.fetch(to, window, offset));
        self.is_still_lent(words, slot)
    }

    /// Returns the window that contains `len` bytes at `address` of the peer's region `key`, its slot, and the offset of
    /// these bytes in the window. Returns `None` if there is no such window, its lending has ended, or the window lacks
    /// the rights in `need`.
    #[inline]
    pub(super) fn region<W: Words>(
        &self,
        words: &W,
        key: u32,
        address: u64,
        len: usize,
        need: Access,
    ) -> Option<(&Window, u8, usize)> {
        self.slots.iter().flatten().find_map(|MappedWindow { window, announced, .. }| {
            let offset = address.checked_sub(announced.base)?;
            let fits = offset.checked_add(len as u64)? <= announced.len;
            (fits && announced.word as u32 == key && announced.rights.contains(need) && self.is_lent(words, announced))
                .then_some((window, announced.slot, usize::try_from(offset).ok()?))
        })
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::shm::account::account;
    #[cfg(not(loom_model))]
    use crate::test_memory::TestMemory;

    /// The words of a segment up to the end of a table. This test uses no other words.
    #[derive(Debug)]
    struct TableWords(Vec<AtomicU64>);

    impl Words for TableWords {
        fn load(&self, at: usize) -> u64 {
            self.0[at / WORD].load(Ordering::SeqCst)
        }
        fn store(&self, at: usize, value: u64) {
            self.0[at / WORD].store(value, Ordering::SeqCst);
        }
        fn peek(&self, at: usize) -> u64 {
            self.load(at)
        }
        fn poke(&self, at: usize, value: u64) {
            self.store(at, value);
        }
        fn swap(&self, at: usize, value: u64) -> u64 {
            self.0[at / WORD].swap(value, Ordering::SeqCst)
        }
        fn fence(&self) {}
    }

    /// A lending ends, and a new one has the same slot and key but another memory. The window of the old lending is not
    /// used for the new one, because the generation differs.
    #[test]
    fn a_window_is_not_used_for_the_next_lending_of_its_slot() {
        const KEY: u32 = 5;
        let table = TableWords((0..TABLE / WORD + SLOTS).map(|_| AtomicU64::new(0)).collect());
        let (mut lendings, mut windows) = (Lendings::new(0), Windows::new(0, account()));
        let rights = Access::REMOTE_READ;
        let lend = |lendings: &mut Lendings| {
            let memory = Arc::new(Memory::new_shared(4096, Sharing::Read).expect("memory"));
            assert_eq!(lendings.lend(&table, (&memory, 4096, None), KEY, rights), Some(0));
            lendings.announcements.pop().expect("the peer is told")
        };
        let announced = |sent: &Announcement| {
            let base = sent.memory.as_ptr() as u64;
            ReceivedAnnouncement { slot: sent.slot, word: sent.word, rights, base, len: 4096 }
        };
        let is_found =
            |windows: &Windows, of: &ReceivedAnnouncement| windows.region(&table, KEY, of.base, 8, rights).is_some();

        let first = lend(&mut lendings);
        let received = announced(&first);
        let file = |of: &Announcement| of.file().expect("a file").as_fd().try_clone_to_owned().expect("a descriptor");
        windows.open(received, &file(&first)).expect("it is mapped");
        assert!(is_found(&windows, &received) && windows.payload(&table, 0, 0, 8).is_some());

        lendings.take_back(&table, KEY);
        assert!(!is_found(&windows, &received) && windows.payload(&table, 0, 0, 8).is_none());
        let second = lend(&mut lendings);
        assert!(!is_found(&windows, &received) && windows.payload(&table, 0, 0, 8).is_none(), "it is another memory");
        windows.open(announced(&second), &file(&second)).expect("it is mapped");
        assert!(is_found(&windows, &announced(&second)));
        assert!(windows.is_still_lent(&table, 0) && !windows.has_ended(&table, 0));

        lendings.end(&table);
        assert!(!is_found(&windows, &announced(&second)) && windows.payload(&table, 0, 0, 8).is_none());
        assert!(!windows.is_still_lent(&table, 0) && windows.has_ended(&table, 0));
        assert!(!windows.is_still_lent(&table, 1) && !windows.has_ended(&table, 1), "no window was mapped");
    }

    /// Peers remove the pages of memory that they lend, each time before the local side fetches a
    /// message from there. So the kernel charges the local side for new pages. The local side
    /// fetches only a part of each window, and nothing more once it is charged for a 21st of the
    /// limit of all windows. The charge ends when the local side unmaps the windows, although the
    /// peers keep the files. An honest peer is not affected.
    #[cfg(not(loom_model))]
    #[test]
    fn the_pages_that_peers_remove_are_limited() {
        const KEY: u32 = 5;
        const LEN: usize = 1 << 20;
        use crate::shm::hostile_file::HostileFile;
        let limits = crate::shm::account::WindowLimits { bytes: 1 << 28, count: 8192 };
        let account = Arc::new(WindowAccount::new(limits));
        let table = TableWords((0..TABLE / WORD + SLOTS).map(|_| AtomicU64::new(0)).collect());
        let (rights, buffer) = (Access::REMOTE_READ, Memory::new(LEN).unwrap());
        let sink = buffer.sge(0, LEN / 32);
        let mut peers: Vec<_> = (0..200_u32)
            .map(|_| {
                let (memory, mut windows) =
                    (Memory::new_shared(LEN, Sharing::Lent).unwrap(), Windows::new(0, Arc::clone(&account)));
                let file = memory.file().unwrap().try_clone_to_owned().unwrap();
                let word = 1 << 32 | u64::from(KEY);
                table.store(TABLE, word);
                let announced = ReceivedAnnouncement { slot: 0, word, rights, base: 0, len: LEN as u64 };
                // The windows of the last peers exceed the share that is not reserved for staging
                // buffers.
                let _ = windows.open(announced, &file);
                (memory, file, windows)
            })
            .collect();
        peers.retain(|(.., windows)| windows.slots[0].is_some());
        assert!(peers.len() > 100, "{}", peers.len());
        assert!(peers[0].2.fetch(&table, KEY, 0, &buffer.sge(0, LEN)), "an honest peer");
        let mut fetched = 0;
        for (_, file, windows) in &peers[1..] {
            assert!(HostileFile::punch(file, 0, LEN as u64));
            let from_it = (0..32).filter(|at| windows.fetch(&table, KEY, (at * LEN / 32) as u64, &sink)).count();
            assert!(from_it <= 7, "{from_it} parts of one window");
            fetched += from_it * LEN / 32;
        }
        let charged: u64 = peers[1..].iter().map(|(_, file, _)| HostileFile::allocated(file)).sum();
        assert!(charged == fetched as u64 && fetched > 11 << 20 && fetched <= (1 << 28) / 21 + LEN / 32, "{charged}");
        assert!(!peers.last().unwrap().2.fetch(&table, KEY, 0, &sink), "the limit of all");
        let kept = |(memory, file, _): (Memory, OwnedFd, Windows)| {
            memory.keep_pages();
            file
        };
        let all = peers.len();
        account.begin_turn();
        let kept: Vec<_> = peers.into_iter().map(kept).collect();
        assert_eq!(account.used().1, all - 8, "8 MiB of lent memory are unmapped in a turn");
        (0..all / 8).for_each(|_| account.begin_turn());
        assert_eq!((account.used(), kept.iter().map(HostileFile::allocated).sum::<u64>()), ((0, 0), 0));
    }

    #[test]
    fn what_is_lent_to_a_peer_is_limited() {
        let table = TableWords((0..TABLE / WORD + SLOTS).map(|_| AtomicU64::new(0)).collect());
        let (mut lendings, memory) = (Lendings::new(0), Arc::new(Memory::new_shared(4096, Sharing::Read).unwrap()));
        let mut lend = |key| lendings.lend(&table, (&memory, 4096, None), key, Access::REMOTE_READ).is_some();
        for key in 1..100 {
            assert_eq!(lend(key), (key as usize) < SLOTS, "one slot is left for the staging buffer");
        }
        assert!(lend(0) && !lend(100));
        assert_eq!(std::iter::from_fn(|| lendings.announcements.pop()).count(), SLOTS);
    }
}
