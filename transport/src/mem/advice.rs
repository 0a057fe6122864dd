//! Advice to the system about the pages of a memory.

use super::{Backing, HUGE_PAGE, Memory};

impl Memory {
    /// Requests that the system backs the memory by huge pages (`madvise`(2), `MADV_HUGEPAGE`).
    /// This saves page faults and address translations if the program uses most of the memory. If
    /// the program uses only a few parts, each part occupies 2 MiB. Does nothing for memory below 2
    /// MiB, for vectors, and on systems without huge pages.
    pub fn prefer_huge_pages(&self) {
        if matches!(self.backing, Backing::Mapping(_) | Backing::Lent(..)) && self.len >= HUGE_PAGE {
            // SAFETY: `madvise` is advice about a mapping that this `Memory` owns, and changes no
            // byte. An error has no effect.
            let _ = unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
        }
    }

    /// Requests that the system allocates pages on a NUMA node, as long as the node has free memory
    /// (`mbind`(2)). Pages that were used before stay where they are. Does nothing for vectors, and
    /// if the node does not exist.
    pub fn prefer_node(&self, node: u32) {
        const NODES: usize = 1024;
        let mut mask = [0_u64; NODES / 64];
        let (Backing::Mapping(len) | Backing::Lent(len, _)) = self.backing else { return };
        let Some(word) = mask.get_mut(node as usize / 64) else { return };
        *word |= 1 << (node % 64);
        let base = self.base.as_ptr();
        // SAFETY: `mbind` is advice about a mapping that this `Memory` owns, and changes no byte.
        // The mask has `NODES` bits. An error has no effect.
        let _ = unsafe { libc::syscall(libc::SYS_mbind, base, len, libc::MPOL_PREFERRED, mask.as_ptr(), NODES, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::test_memory::TestMemory;

    #[test]
    fn what_cannot_be_preferred_changes_nothing() {
        let small = Memory::new(HUGE_PAGE - 4096).unwrap();
        let vector = Memory::from_vec(vec![1; 2 * HUGE_PAGE]).unwrap();
        for memory in [&small, &vector] {
            memory.prefer_huge_pages();
            for node in [0, 63, 1023, 1024, u32::MAX] {
                memory.prefer_node(node);
            }
            memory.write(5, &[9]);
            assert_eq!(memory.read(5, 1), [9]);
        }
    }
}
