//! Chains of work requests in the format of libibverbs.

use std::ffi::c_int;
use std::io;
use std::ptr;

use super::address::Address;
use super::ffi::failure;
use super::sys::{
    atomic_t, bind_mw_tso_union_t, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode,
    imm_data_invalidated_rkey_union_t, qp_type_t, rdma_t, tso_t, ud_t, wr_t, xrc_t,
};
use rdma_transport::datagram::Destination;
use rdma_transport::error::TransportError;
use rdma_transport::provider::PostError;
use rdma_transport::slab::Slab;
use rdma_transport::wr::{MAX_SGE, RecvWr, RemoteAddress, SendClass, SendFlags, SendOp, SendWr, Sge, SgeList};

/// The bit of the `wr_id` that marks a receive. The provider sets it when it posts a receive. In a completion with an error only the
/// `wr_id` is always valid. The opcode may be invalid: mlx5 leaves the opcode of an earlier completion in the entry (rdma-core,
/// providers/mlx5/cq.c, `mlx5_handle_error_cqe`).
pub(super) const RECEIVE: u64 = 1 << 63;

/// Checks that the `wr_id` of a work request is below 2^63, and that its number of entries is at most `max`.
pub(super) fn check_request(wr_id: u64, sges: &SgeList, max: u32) -> Result<(), TransportError> {
    if wr_id & RECEIVE != 0 {
        return Err(TransportError::OutOfRange { what: "number of a work request", value: wr_id, range: "below 2^63" });
    }
    let count = sges.as_slice().len();
    if count > max as usize {
        let range = "at most the device's max_sge, of a read its max_read_sge";
        return Err(TransportError::OutOfRange {
            what: "scatter/gather entries of a work request",
            value: count as u64,
            range,
        });
    }
    Ok(())
}

/// Returns the part of a chain before the first work request that fails `check`, and the error of that work request.
/// Returns the whole chain and `None` if all work requests pass.
pub(super) fn split<T>(
    chain: &[T],
    check: impl Fn(&T) -> Result<(), TransportError>,
) -> (&[T], Option<TransportError>) {
    for (index, wr) in chain.iter().enumerate() {
        if let Err(error) = check(wr) {
            return (&chain[..index], Some(error));
        }
    }
    (chain, None)
}

/// Converts the return code `rc` of a post into a `Result`. If the post has failed, the device has accepted the work
/// requests of the chain before `bad`, and the error contains their number.
pub(super) fn posted<T>(
    rc: c_int,
    first: *mut T,
    bad: *mut T,
    count: usize,
    call: &'static str,
    queue: &'static str,
    depth: u32,
) -> Result<(), PostError> {
    if rc == 0 {
        return Ok(());
    }
    let taken = if bad.is_null() { 0 } else { bad.addr().wrapping_sub(first.addr()) / size_of::<T>() };
    let source = post_failure(rc);
    let error = match source.raw_os_error() {
        // Siw returns one of these two codes if the queue is full.
        Some(libc::ENOMEM | libc::ENOBUFS) => TransportError::QueueFull { queue, depth },
        _ => TransportError::io(call, source),
    };
    Err(PostError { posted: if taken < count { taken } else { 0 }, error })
}

/// Converts the return code of a post into an error. A post returns the error number itself, and does not set `errno`.
/// So -1 means `EPERM` (error number 1).
fn post_failure(rc: c_int) -> io::Error {
    if rc == -1 { io::Error::from_raw_os_error(libc::EPERM) } else { failure(rc) }
}

/// The length of the largest inline payload, in bytes, by operation. A payload up to this length is copied when it is
/// posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct InlineLimits {
    pub(super) send: u32,
    /// The limit of a Send with Invalidate. It is 0 on siw, which supports inline data only for plain Sends and Writes. Siw rejects a Send
    /// with Invalidate that has inline data (`EINVAL`), and then the send queue stalls (`siw_post_send` in the kernel's
    /// drivers/infiniband/sw/siw/siw_verbs.c).
    pub(super) invalidate: u32,
}

impl InlineLimits {
    pub(super) const fn of(self, op: &SendOp) -> usize {
        match (op, op.class()) {
            (SendOp::SendInvalidate(_), _) => self.invalidate as usize,
            (_, SendClass::Send | SendClass::Write) => self.send as usize,
            (_, SendClass::Read | SendClass::Atomic) => 0,
        }
    }
}

/// Builds chains of work requests. Each chain reuses the memory of the previous one.
#[derive(Default)]
pub(super) struct Chains {
    sends: Vec<ibv_send_wr>, // bound: sends
    recvs: Vec<ibv_recv_wr>, // bound: receives
    sges: Vec<ibv_sge>,      // bound: sends, receives
}

// SAFETY: the pointers in the lists are used only during the call that has built the chain.
unsafe impl Send for Chains {}

impl std::fmt::Debug for Chains {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chains").field("capacity", &self.sges.capacity()).finish_non_exhaustive()
    }
}

impl Chains {
    /// Clears the list of entries, and reserves capacity for a chain of `chain` work requests. So no entry moves while the chain is built.
    fn reserve_sges(&mut self, chain: usize) {
        self.sges.clear();
        self.sges.reserve(chain * MAX_SGE);
    }

    /// Adds the scatter/gather entries of one work request. Returns the address of the first one and their number.
    #[inline]
    fn push_sges(&mut self, list: &SgeList) -> (*mut ibv_sge, c_int) {
        let start = self.sges.len();
        debug_assert!(self.sges.capacity() - start >= list.as_slice().len(), "the capacity is reserved");
        for sge in list.as_slice() {
            // Skip empty entries: an empty entry between other entries crashes the kernel's siw driver.
            if !sge.is_empty() {
                self.sges.push(entry(sge));
            }
        }
        (self.sges.as_mut_ptr().wrapping_add(start), (self.sges.len() - start) as c_int)
    }

    pub(super) fn sends(
        &mut self,
        chain: &[SendWr],
        inline: InlineLimits,
        addresses: &Slab<Address>,
    ) -> *mut ibv_send_wr {
        self.reserve_sges(chain.len());
        self.sends.clear();
        self.sends.reserve(chain.len());
        let base = self.sends.as_mut_ptr();
        for (index, wr) in chain.iter().enumerate() {
            let (sg_list, num_sge) = self.push_sges(&wr.sges);
            let last = index + 1 == chain.len();
            let next = if last { ptr::null_mut() } else { base.wrapping_add(index + 1) };
            self.sends.push(send(wr, next, sg_list, num_sge, inline, addresses));
        }
        self.sends.as_mut_ptr()
    }

    pub(super) fn recvs(&mut self, chain: &[RecvWr]) -> *mut ibv_recv_wr {
        self.reserve_sges(chain.len());
        self.recvs.clear();
        self.recvs.reserve(chain.len());
        let base = self.recvs.as_mut_ptr();
        for (index, wr) in chain.iter().enumerate() {
            let (sg_list, mut num_sge) = self.push_sges(&wr.sges);
            if num_sge == 0 {
                // Siw requires that a receive has at least one entry. This entry may be empty.
                self.sges.push(entry(&Sge::default()));
                num_sge = 1;
            }
            let last = index + 1 == chain.len();
            let next = if last { ptr::null_mut() } else { base.wrapping_add(index + 1) };
            self.recvs.push(ibv_recv_wr { wr_id: wr.wr_id | RECEIVE, next, sg_list, num_sge });
        }
        self.recvs.as_mut_ptr()
    }
}

fn entry(sge: &Sge) -> ibv_sge {
    ibv_sge { addr: sge.address() as u64, length: sge.len() as u32, lkey: sge.local_key().0 }
}

#[inline]
fn send(
    wr: &SendWr,
    next: *mut ibv_send_wr,
    sg_list: *mut ibv_sge,
    num_sge: c_int,
    inline: InlineLimits,
    addresses: &Slab<Address>,
) -> ibv_send_wr {
    let rdma = |remote: RemoteAddress| wr_t { rdma: rdma_t { remote_addr: remote.address, rkey: remote.key.0 } };
    let atomic = |remote: RemoteAddress, compare_add: u64, swap: u64| wr_t {
        atomic: atomic_t { remote_addr: remote.address, compare_add, swap, rkey: remote.key.0 },
    };
    let datagram = |to: Destination| {
        let handle = addresses.get(to.address.0).and_then(|address| address.raw.as_ref());
        let ah = handle.map_or(ptr::null_mut(), |handle| handle.as_ptr());
        wr_t { ud: ud_t { ah, remote_qpn: to.qp_number, remote_qkey: to.queue_key } }
    };
    let nowhere = || wr_t { atomic: atomic_t { remote_addr: 0, compare_add: 0, swap: 0, rkey: 0 } };
    let (opcode, remote, word) = match wr.op {
        SendOp::Send => (ibv_wr_opcode::IBV_WR_SEND, nowhere(), 0),
        SendOp::SendWithImmediate(data) => (ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, nowhere(), data.to_be()),
        // Libsiw reads the key that a Send with Invalidate invalidates from the field for the remote key of a Write. So
        // set this field, too.
        SendOp::SendInvalidate(key) => {
            (ibv_wr_opcode::IBV_WR_SEND_WITH_INV, rdma(RemoteAddress { address: 0, key }), key.0)
        }
        SendOp::Datagram(to) => (ibv_wr_opcode::IBV_WR_SEND, datagram(to), 0),
        SendOp::DatagramWithImmediate(to, data) => (ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, datagram(to), data.to_be()),
        SendOp::Write(remote) => (ibv_wr_opcode::IBV_WR_RDMA_WRITE, rdma(remote), 0),
        SendOp::WriteWithImmediate(remote, data) => {
            (ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM, rdma(remote), data.to_be())
        }
        // Siw answers a Read of 0 bytes with the data of an earlier Read. So post a Write of 0 bytes instead, which has
        // the same effect as a correct Read of 0 bytes.
        SendOp::Read(remote) if num_sge == 0 => (ibv_wr_opcode::IBV_WR_RDMA_WRITE, rdma(remote), 0),
        SendOp::Read(remote) => (ibv_wr_opcode::IBV_WR_RDMA_READ, rdma(remote), 0),
        SendOp::CompareSwap { remote, expected, swap } => {
            (ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP, atomic(remote, expected, swap), 0)
        }
        SendOp::FetchAdd { remote, add } => (ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD, atomic(remote, add, 0), 0),
    };
    // Post Reads without the flag `FENCE`, because siw rejects it. Read responses arrive in order even without a fence. But fence the Write
    // that replaces an empty Read: otherwise siw could complete it before earlier Reads, and a Read must not complete before them.
    let wanted = match wr.op.class() {
        SendClass::Read if num_sge == 0 => wr.flags | SendFlags::FENCE,
        SendClass::Read => wr.flags - SendFlags::FENCE,
        SendClass::Send | SendClass::Write | SendClass::Atomic => wr.flags,
    };
    let flag = |ours, theirs: ibv_send_flags| if wanted.contains(ours) { theirs.0 } else { 0 };
    let mut flags = flag(SendFlags::SIGNALED, ibv_send_flags::IBV_SEND_SIGNALED)
        | flag(SendFlags::SOLICITED, ibv_send_flags::IBV_SEND_SOLICITED)
        | flag(SendFlags::FENCE, ibv_send_flags::IBV_SEND_FENCE);
    // Do not send data from device memory inline: the processor would copy inline data, but it cannot access device
    // memory.
    if (1..=inline.of(&wr.op)).contains(&wr.sges.total_len()) && !wr.sges.as_slice().iter().any(Sge::is_of_device) {
        flags |= ibv_send_flags::IBV_SEND_INLINE.0;
    }
    ibv_send_wr {
        wr_id: wr.wr_id,
        next,
        sg_list,
        num_sge,
        opcode,
        send_flags: flags,
        imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t { imm_data: word },
        wr: remote,
        qp_type: qp_type_t { xrc: xrc_t { remote_srqn: 0 } },
        bind_mw_tso_union: bind_mw_tso_union_t { tso: tso_t { hdr: ptr::null_mut(), hdr_sz: 0, mss: 0 } },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_memory::TestMemory;
    use rdma_transport::mem::Memory;
    use rdma_transport::mr::{LocalKey, RemoteKey};

    const NO_INLINE: InlineLimits = InlineLimits { send: 0, invalidate: 0 };
    const REMOTE: RemoteAddress = RemoteAddress { address: 0x1000, key: RemoteKey(7) };

    fn wr(op: SendOp, sges: SgeList, flags: SendFlags) -> SendWr {
        SendWr { wr_id: 1, op, sges, flags }
    }

    #[test]
    fn a_chain_is_linked_and_its_entries_stay_put() {
        let memory = Memory::new(4096).unwrap();
        let mut chains = Chains::default();
        for round in 1..20 {
            let chain: Vec<_> = (0..round)
                .map(|i| {
                    let mut sges = SgeList::one(memory.sge(i, 10));
                    sges.push(memory.sge(100, 20)).unwrap();
                    wr(SendOp::Send, sges, SendFlags::SIGNALED)
                })
                .collect();
            let mut at = chains.sends(&chain, NO_INLINE, &Slab::default());
            for i in 0..round {
                // SAFETY: the chain was just built, and `chains` does not change while it is read.
                let raw = unsafe { &*at };
                // SAFETY: the chain was just built, and each work request in it points to two entries.
                let sges = unsafe { std::slice::from_raw_parts(raw.sg_list, 2) };
                assert_eq!((raw.num_sge, sges[0].length, sges[1].length), (2, 10, 20));
                assert_eq!(sges[0].addr, memory.as_ptr() as u64 + i as u64);
                at = raw.next;
            }
            assert!(at.is_null());
        }
    }

    #[test]
    fn small_sends_and_writes_go_inline_and_reads_never() {
        let memory = Memory::new(4096).unwrap();
        let inline = |op, len, max| {
            let wr = wr(op, SgeList::one(memory.sge(0, len)), SendFlags::empty());
            let limits = InlineLimits { send: max, invalidate: 0 };
            send(&wr, ptr::null_mut(), ptr::null_mut(), 0, limits, &Slab::default()).send_flags
                & ibv_send_flags::IBV_SEND_INLINE.0
                != 0
        };
        assert!(inline(SendOp::Send, 64, 64));
        assert!(!inline(SendOp::Send, 65, 64));
        assert!(!inline(SendOp::Send, 0, 0));
        assert!(inline(SendOp::Write(REMOTE), 8, 64));
        assert!(!inline(SendOp::SendInvalidate(RemoteKey(1)), 8, 64), "siw refuses it");
        assert!(!inline(SendOp::Read(REMOTE), 8, 64));
        assert!(!inline(SendOp::FetchAdd { remote: REMOTE, add: 1 }, 8, 64));
        // SAFETY: no work request with this entry is posted.
        let far = unsafe { Sge::of_device(Sge::DEVICE, 8, LocalKey(1)) }.unwrap();
        let mut sges = SgeList::one(memory.sge(0, 8));
        sges.push(far).unwrap();
        let limits = InlineLimits { send: 64, invalidate: 0 };
        let wr = wr(SendOp::Send, sges, SendFlags::empty());
        let flags = send(&wr, ptr::null_mut(), ptr::null_mut(), 0, limits, &Slab::default()).send_flags;
        assert_eq!(flags & ibv_send_flags::IBV_SEND_INLINE.0, 0, "the processor cannot copy from a device");
        // SAFETY: the call returns no entry.
        assert!(unsafe { Sge::of_device(Sge::DEVICE - 1, 8, LocalKey(1)) }.is_none());
    }

    #[test]
    fn immediate_data_is_in_network_order_and_keys_are_not() {
        let of = |op| {
            send(
                &wr(op, SgeList::default(), SendFlags::FENCE),
                ptr::null_mut(),
                ptr::null_mut(),
                0,
                NO_INLINE,
                &Slab::default(),
            )
        };
        let imm = of(SendOp::WriteWithImmediate(REMOTE, 1));
        // SAFETY: both fields of the union are numbers.
        assert_eq!(unsafe { imm.imm_data_invalidated_rkey_union.imm_data }, 1u32.to_be());
        assert_eq!(imm.send_flags, ibv_send_flags::IBV_SEND_FENCE.0);
        let inv = of(SendOp::SendInvalidate(RemoteKey(9)));
        // SAFETY: both fields of the union are numbers.
        assert_eq!(unsafe { inv.imm_data_invalidated_rkey_union.invalidated_rkey }, 9);
    }

    /// An empty Read is posted as a Write of 0 bytes. The fence holds this Write back until all earlier Reads have ended.
    #[test]
    fn an_empty_read_is_a_fenced_write_and_other_reads_have_no_fence() {
        let memory = Memory::new(4096).unwrap();
        let mut chains = Chains::default();
        let (signaled, fence) = (ibv_send_flags::IBV_SEND_SIGNALED.0, ibv_send_flags::IBV_SEND_FENCE.0);
        for flags in [SendFlags::SIGNALED, SendFlags::SIGNALED | SendFlags::FENCE] {
            let chain = [8, 0].map(|len| wr(SendOp::Read(REMOTE), SgeList::one(memory.sge(0, len)), flags));
            let first = chains.sends(&chain, NO_INLINE, &Slab::default());
            // SAFETY: the chain was just built, it has two work requests, and `chains` does not change while they are read.
            let [full, empty] = unsafe { [&*first, &*first.add(1)] };
            assert_eq!((full.opcode, full.send_flags), (ibv_wr_opcode::IBV_WR_RDMA_READ, signaled));
            assert_eq!((empty.opcode, empty.send_flags), (ibv_wr_opcode::IBV_WR_RDMA_WRITE, signaled | fence));
        }
    }

    #[test]
    fn what_was_posted_is_counted_and_full_queues_have_one_name() {
        let mut list = [0u64; 4];
        let first = list.as_mut_ptr();
        let at = |index: usize| first.wrapping_add(index);
        assert!(posted(0, first, ptr::null_mut(), 4, "x", "send", 8).is_ok());
        for rc in [libc::ENOMEM, -libc::ENOMEM] {
            let failed = posted(rc, first, at(3), 4, "x", "send", 8).unwrap_err();
            assert_eq!(failed.posted, 3);
            assert!(matches!(failed.error, TransportError::QueueFull { queue: "send", depth: 8 }));
        }
        let failed = posted(-libc::EINVAL, first, ptr::null_mut(), 4, "x", "send", 8).unwrap_err();
        assert_eq!(failed.posted, 0);
        assert!(matches!(failed.error, TransportError::Io { .. }));
    }

    #[test]
    fn the_highest_bit_of_a_number_is_the_provider_s() {
        let good = check_request(RECEIVE - 1, &SgeList::default(), 4);
        assert!(good.is_ok(), "{good:?}");
        let bad = check_request(RECEIVE, &SgeList::default(), 4);
        assert!(matches!(bad, Err(TransportError::OutOfRange { value: RECEIVE, .. })), "{bad:?}");
        let mut chains = Chains::default();
        let first = chains.recvs(&[RecvWr { wr_id: 7, sges: SgeList::default() }]);
        // SAFETY: the chain was just built.
        assert_eq!(unsafe { (*first).wr_id }, RECEIVE | 7);
    }
}
