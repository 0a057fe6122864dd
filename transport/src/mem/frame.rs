//! Functions that append a frame (a header, a payload and zeros as padding) to a vector. They reserve the vector's
//! memory once for the whole frame.

use super::Sge;

/// Appends `header`, then `bytes`, then `zeros` zero bytes.
#[inline]
pub fn append_bytes<const N: usize>(out: &mut Vec<u8>, header: &[u8; N], bytes: &[u8], zeros: usize) {
    // SAFETY: `append` has reserved memory for the bytes at `to`. This memory is past the end of the vector, so it
    // does not overlap `bytes`.
    append(out, header, bytes.len(), zeros, |to| unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) });
}

/// Appends `header`, then a copy of the bytes of `entry`, then `zeros` zero bytes.
#[inline]
pub(super) fn append_entry<const N: usize>(out: &mut Vec<u8>, header: &[u8; N], entry: &Sge, zeros: usize) {
    // SAFETY: the entry has this number of bytes, and `append` has reserved memory for them at `to`.
    append(out, header, entry.len(), zeros, |to| unsafe { entry.copy(to, entry.len()) });
}

/// Appends `header`, then `len` bytes that `copy` writes to the address that it gets, then `zeros` zero bytes.
#[inline(always)]
fn append<const N: usize>(out: &mut Vec<u8>, header: &[u8; N], len: usize, zeros: usize, copy: impl FnOnce(*mut u8)) {
    let more = len.checked_add(zeros).and_then(|more| more.checked_add(N)).expect("a frame is shorter than all memory");
    out.reserve(more);
    let (start, end) = (out.len(), out.len() + more);
    // SAFETY: the vector has reserved memory for all of these bytes past its end, and they are written before
    // `set_len` includes them.
    unsafe {
        let to = out.as_mut_ptr().add(start);
        to.cast::<[u8; N]>().write(*header);
        copy(to.add(N));
        to.add(N + len).write_bytes(0, zeros);
        out.set_len(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Memory;
    use crate::mem::test_memory::TestMemory;

    #[test]
    fn a_frame_is_its_header_its_bytes_and_zeros() {
        let memory = Memory::new(64).unwrap();
        memory.write(8, b"payload");
        let entry = memory.shared_sge(8, 7);
        let (mut of_bytes, mut of_entry) = (vec![9], vec![9]);
        for _ in 0..100 {
            append_bytes(&mut of_bytes, b"head", b"payload", 5);
            append_entry(&mut of_entry, b"head", &entry, 5);
        }
        assert_eq!(of_bytes, [b"\x09".to_vec(), b"headpayload\0\0\0\0\0".repeat(100)].concat());
        assert_eq!(of_entry, of_bytes);
        append_bytes(&mut of_bytes, &[], &[], 0);
        assert_eq!(of_bytes.len(), 1601);
    }
}
