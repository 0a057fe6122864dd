//! Atomic operations (RFC 7306 §5): their headers, and their effect on a 64-bit value.

use super::{be32, be64};

/// The length in octets of the Atomic Request header, which follows the untagged DDP header.
pub const ATOMIC_REQUEST_LEN: usize = 52;
/// The length in octets of the Atomic Response header, which follows the untagged DDP header.
pub const ATOMIC_RESPONSE_LEN: usize = 12;

const FETCH_ADD: u32 = 0;
const COMPARE_SWAP: u32 = 2;

/// The header of an Atomic Request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    /// The code of the operation: the low four bits of the first word.
    pub operation: u32,
    /// An identifier, which the response repeats.
    pub request_id: u32,
    /// The STag of the region that contains the 64-bit value.
    pub stag: u32,
    /// The Tagged Offset of the 64-bit value, a multiple of 8.
    pub offset: u64,
    /// The number that an addition adds, or the new value of a compare-and-swap.
    pub operand: u64,
    /// For an addition, this mask divides the value into fields that are added separately. Each set
    /// bit is the highest bit of a field: a carry out of this bit is dropped. For a
    /// compare-and-swap, the mask selects the bits that are replaced.
    pub operand_mask: u64,
    /// For a compare-and-swap, the value with which the old value is compared.
    pub compare: u64,
    /// For a compare-and-swap, the bits that are compared.
    pub compare_mask: u64,
}

impl AtomicRequest {
    /// Creates the request for an addition to the whole 64-bit value.
    pub const fn fetch_add(request_id: u32, stag: u32, offset: u64, add: u64) -> Self {
        Self {
            operation: FETCH_ADD,
            request_id,
            stag,
            offset,
            operand: add,
            operand_mask: 0,
            compare: 0,
            // The compare mask has no meaning in an addition. RFC 7306 §5.2.1 requires that all its bits are set.
            compare_mask: u64::MAX,
        }
    }

    /// Creates the request for a compare-and-swap of the whole 64-bit value.
    pub const fn compare_swap(request_id: u32, stag: u32, offset: u64, compare: u64, swap: u64) -> Self {
        let (operand, operand_mask, compare_mask) = (swap, u64::MAX, u64::MAX);
        Self { operation: COMPARE_SWAP, request_id, stag, offset, operand, operand_mask, compare, compare_mask }
    }

    /// Parses the header. Parsing cannot fail, because every value of every field can be represented.
    pub fn parse(bytes: &[u8; ATOMIC_REQUEST_LEN]) -> Self {
        Self {
            operation: be32(bytes, 0) & 0xf,
            request_id: be32(bytes, 4),
            stag: be32(bytes, 8),
            offset: be64(bytes, 12),
            operand: be64(bytes, 20),
            operand_mask: be64(bytes, 28),
            compare: be64(bytes, 36),
            compare_mask: be64(bytes, 44),
        }
    }

    /// Returns the octets of the header.
    pub fn emit(&self) -> [u8; ATOMIC_REQUEST_LEN] {
        let mut out = [0; ATOMIC_REQUEST_LEN];
        for (at, word) in [self.operation & 0xf, self.request_id, self.stag].into_iter().enumerate() {
            out[at * 4..at * 4 + 4].copy_from_slice(&word.to_be_bytes());
        }
        let long = [self.offset, self.operand, self.operand_mask, self.compare, self.compare_mask];
        for (at, word) in long.into_iter().enumerate() {
            out[12 + at * 8..20 + at * 8].copy_from_slice(&word.to_be_bytes());
        }
        out
    }

    /// Returns true if RFC 7306 defines the code of the operation.
    pub const fn is_known(&self) -> bool {
        matches!(self.operation, FETCH_ADD | COMPARE_SWAP)
    }

    /// Returns the new 64-bit value. `old` is the value before the operation (RFC 7306 §5.1).
    pub const fn apply(&self, old: u64) -> u64 {
        match self.operation {
            FETCH_ADD if self.operand_mask == 0 => old.wrapping_add(self.operand),
            FETCH_ADD => {
                let (mut sum, mut carry, mut bit) = (0, 0, 0);
                while bit < 64 {
                    let digits = carry + (old >> bit & 1) + (self.operand >> bit & 1);
                    sum |= (digits & 1) << bit;
                    carry = if self.operand_mask >> bit & 1 == 1 { 0 } else { digits >> 1 };
                    bit += 1;
                }
                sum
            }
            COMPARE_SWAP if (old ^ self.compare) & self.compare_mask == 0 => {
                old & !self.operand_mask | self.operand & self.operand_mask
            }
            _ => old,
        }
    }
}

/// Returns the octets of an Atomic Response: the identifier of the request, and the value before the operation.
pub fn emit_response(request_id: u32, old: u64) -> [u8; ATOMIC_RESPONSE_LEN] {
    let mut out = [0; ATOMIC_RESPONSE_LEN];
    out[..4].copy_from_slice(&request_id.to_be_bytes());
    out[4..].copy_from_slice(&old.to_be_bytes());
    out
}

/// Parses an Atomic Response. Returns the identifier of the request, and the value before the operation.
pub fn parse_response(bytes: &[u8; ATOMIC_RESPONSE_LEN]) -> (u32, u64) {
    (be32(bytes, 0), be64(bytes, 4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn operations() {
        assert_eq!(AtomicRequest::fetch_add(1, 2, 8, 3).apply(u64::MAX), 2);
        assert_eq!(AtomicRequest::compare_swap(1, 2, 8, 5, 9).apply(5), 9);
        assert_eq!(AtomicRequest::compare_swap(1, 2, 8, 5, 9).apply(6), 6);
        // The mask splits the value into two counters of 32 bits, which are added separately.
        let halves = AtomicRequest { operand_mask: 1 << 31, ..AtomicRequest::fetch_add(1, 2, 8, 1 << 32 | 1) };
        assert_eq!(halves.apply(0xffff_ffff), 1 << 32);
        let low =
            AtomicRequest { operand_mask: 0xff, compare_mask: 0xf0, ..AtomicRequest::compare_swap(1, 2, 8, 0x35, 7) };
        assert_eq!((low.apply(0x1234), low.apply(0x1244)), (0x1207, 0x1244));
        assert!(!AtomicRequest { operation: 1, ..low }.is_known() && low.is_known());
    }

    /// The complete segments of RFC 7306, appendices A.1 to A.3. Each field has a different value.
    #[test]
    fn layouts_of_the_rfc() {
        use super::super::ddp::UNTAGGED_FPDU_HEADER_LEN;
        use super::super::{Opcode, SegmentHeader, Untagged};
        let segment = |opcode: Opcode, queue, msn, body: &[u8]| {
            let mut out = [0; UNTAGGED_FPDU_HEADER_LEN];
            let header = Untagged { last: true, opcode, reserved_or_stag: 0, queue, msn, offset: 0 };
            header.emit_into((18 + body.len()) as u16, &mut out);
            assert_eq!(SegmentHeader::parse(&out), Ok(SegmentHeader::Untagged(header)));
            assert_eq!(opcode.max_ulpdu_len(), Some((18 + body.len()) as u16));
            [&out, body].concat()
        };
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<u8>>();
        let swap = AtomicRequest {
            operation: COMPARE_SWAP,
            request_id: 0x1111_1112,
            stag: 0x2222_2223,
            offset: 0x3333_3334_3333_3338,
            operand: 0x4444_4445_4444_4446,
            operand_mask: 0x5555_5556_5555_5557,
            compare: 0x6666_6667_6666_6668,
            compare_mask: 0x7777_7778_7777_7779,
        };
        // The words in order: length and control octets, reserved field, QN, MSN, MO, operation, identifier, STag. Then follow TO, data,
        // mask, compare data and compare mask, with two words each.
        let want = words(&[
            0x0046_414a,
            0,
            1,
            7,
            0,
            2,
            0x1111_1112,
            0x2222_2223,
            0x3333_3334,
            0x3333_3338,
            0x4444_4445,
            0x4444_4446,
            0x5555_5556,
            0x5555_5557,
            0x6666_6667,
            0x6666_6668,
            0x7777_7778,
            0x7777_7779,
        ]);
        assert_eq!(segment(Opcode::AtomicRequest, 1, 7, &swap.emit()), want);
        let body: &[u8; ATOMIC_REQUEST_LEN] = want[20..].try_into().unwrap();
        assert_eq!(AtomicRequest::parse(body), swap);
        // The reserved bits are ignored. In an addition, the unused fields have the values of figure 5.
        let mut reserved = *body;
        reserved[..4].copy_from_slice(&[0xff, 0xff, 0xff, 0xf2]);
        assert_eq!(AtomicRequest::parse(&reserved), swap);
        let add = AtomicRequest::fetch_add(3, 4, 8, 5).emit();
        assert_eq!(add[..], words(&[0, 3, 4, 0, 8, 0, 5, 0, 0, 0, 0, u32::MAX, u32::MAX]));
        let plain = AtomicRequest::compare_swap(3, 4, 8, 5, 6).emit();
        assert_eq!(plain[..], words(&[2, 3, 4, 0, 8, 0, 6, u32::MAX, u32::MAX, 0, 5, u32::MAX, u32::MAX]));
        let want = words(&[0x001e_414b, 0, 3, 9, 0, 0x1111_1112, 0x8888_8889, 0x8888_888a]);
        let response = emit_response(0x1111_1112, 0x8888_8889_8888_888a);
        assert_eq!(segment(Opcode::AtomicResponse, 3, 9, &response), want);
        for (opcode, control) in [(Opcode::Immediate, 0x001a_4148), (Opcode::ImmediateSolicited, 0x001a_4149)] {
            let want = words(&[control, 0, 0, 5, 0, 0x9999_999a, 0x9999_999b]);
            assert_eq!(segment(opcode, 0, 5, &0x9999_999a_9999_999b_u64.to_be_bytes()), want);
        }
    }

    /// The mask splits the value into fields of 16 bits. As in the pseudocode of RFC 7306 §5.1.1, each field is added separately.
    #[test]
    fn fields_of_a_masked_addition() {
        let add = AtomicRequest {
            operand_mask: 0x8000_8000_8000_8000,
            ..AtomicRequest::fetch_add(1, 2, 8, 0x0001_ffff_8000_0002)
        };
        assert_eq!(add.apply(0xffff_0003_8000_fffe), 0x0000_0002_0000_0000);
        let odd = AtomicRequest { operand_mask: 1, ..AtomicRequest::fetch_add(1, 2, 8, 1) };
        assert_eq!((odd.apply(0), odd.apply(1), odd.apply(3)), (1, 0, 2));
    }

    proptest! {
        #[test]
        fn octets_survive(operation in 0u32..16, words: [u32; 2], long: [u64; 5], old: u64) {
            let request = AtomicRequest {
                operation, request_id: words[0], stag: words[1], offset: long[0], operand: long[1],
                operand_mask: long[2], compare: long[3], compare_mask: long[4],
            };
            prop_assert_eq!(AtomicRequest::parse(&request.emit()), request);
            prop_assert_eq!(parse_response(&emit_response(words[0], old)), (words[0], old));
            let plain = AtomicRequest { operation: FETCH_ADD, operand_mask: 1 << 63, ..request };
            prop_assert_eq!(plain.apply(old), old.wrapping_add(long[1]));
        }
    }
}
