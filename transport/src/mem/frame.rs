//! Frames: what is copied one behind the other to the end of a vector, which is asked for room once.

use super::Sge;

/// Appends `header`, the bytes and so many zeros.
#[inline]
pub(crate) fn append_bytes<const N: usize>(out: &mut Vec<u8>, header: &[u8; N], bytes: &[u8], zeros: usize) {
    // SAFETY: there is room for as many bytes, which are no part of the vector's.
    append(out, header, bytes.len(), zeros, |to| unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) });
}

/// Appends `header`, a copy of the bytes of an entry, and so many zeros.
#[inline]
pub(crate) fn append_entry<const N: usize>(out: &mut Vec<u8>, header: &[u8; N], entry: &Sge, zeros: usize) {
    // SAFETY: the entry has as many bytes, and there is room for them.
    append(out, header, entry.len(), zeros, |to| unsafe { entry.copy(to, entry.len()) });
}

/// Appends `header`, `len` bytes that `copy` writes, and so many zeros.
#[inline(always)]
fn append<const N: usize>(out: &mut Vec<u8>, header: &[u8; N], len: usize, zeros: usize, copy: impl FnOnce(*mut u8)) {
    let (start, end) = (out.len(), out.len() + N + len + zeros);
    out.reserve(N + len + zeros);
    // SAFETY: the vector has room for as many bytes behind its end, and all of them are written before they count.
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
