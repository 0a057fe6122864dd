//! Shorthands for tests. Other crates of the transport link to this source file.
#![allow(dead_code, reason = "each crate uses a part")]

use rdma_transport::mem::{Memory, Sge};
use rdma_transport::mr::LocalKey;

/// Entries and contents of a memory. The tests post an entry only while its memory exists.
pub(crate) trait TestMemory {
    /// Makes an entry with [`Sge::new`]: while it is posted, nothing but the provider may use its
    /// bytes.
    fn sge(&self, offset: usize, len: usize) -> Sge;

    /// Makes an entry with [`Memory::shared_entry`]: while it is posted, its bytes may have other
    /// users.
    fn shared_sge(&self, offset: usize, len: usize) -> Sge;

    fn write(&self, offset: usize, bytes: &[u8]);

    fn read(&self, offset: usize, len: usize) -> Vec<u8>;
}

impl TestMemory for Memory {
    fn sge(&self, offset: usize, len: usize) -> Sge {
        assert!(self.span(offset, len).is_some(), "a part of the memory");
        let base = std::ptr::NonNull::new(self.as_ptr()).expect("an address");
        // SAFETY: the bytes are inside the memory. The test does not use them while a work request
        // with the entry is posted.
        unsafe { Sge::new(base.byte_add(offset), len as u32, LocalKey(0)) }
    }

    fn shared_sge(&self, offset: usize, len: usize) -> Sge {
        // SAFETY: the test uses the memory by the functions of `Memory` only.
        unsafe { self.shared_entry(offset..offset + len, LocalKey(0)) }.expect("a part of the memory")
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(self.copy_in(offset, bytes));
    }

    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        assert!(self.copy_out(offset, &mut out));
        out
    }
}

/// Entries of the same bytes with other keys.
pub(crate) trait TestEntry {
    fn keyed(self, key: LocalKey) -> Self;
}

impl TestEntry for Sge {
    fn keyed(self, key: LocalKey) -> Self {
        // SAFETY: the entries of tests are not ones of device memory.
        unsafe { self.with_key(key) }
    }
}
