//! Queue pairs: their attributes, what is posted to them, and their numbers.

use std::ffi::c_int;
use std::io;
use std::ptr;

use rdma_sys::{
    atomic_t, bind_mw_tso_union_t, ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_type,
    ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode, imm_data_invalidated_rkey_union_t, qp_type_t,
    rdma_t, tso_t, ud_t, wr_t, xrc_t,
};

use super::NAME;
use super::datagram::Address;
use super::ffi::{context_of, failure};
use super::id::{Queues, Service};
use crate::caps::{Capabilities, Features};
use crate::datagram::Destination;
use crate::error::Error;
use crate::provider::{CqId, PostError};
use crate::qp::{QpAttr, QpId, SrqId};
use crate::slab::{Key, Slab};
use crate::wr::{MAX_SGE, RecvWr, RemoteAddress, SendFlags, SendOp, SendWr, Sge, SgeList};

pub(super) type Posted = std::result::Result<(), PostError>;

/// A queue pair of an id, which owns it.
#[derive(Debug)]
pub(super) struct Qp {
    raw: *mut ibv_qp,
    pub(super) number: u32,
    pub(super) attr: QpAttr,
    /// Where its receives come from, if not from a queue of its own.
    pub(super) srq: Option<SrqId>,
    features: Features,
    max_sge: u32,
    max_read_sge: u32,
    /// Largest datagram; `None` for a connected queue pair.
    max_datagram: Option<u32>,
}

// SAFETY: work requests are posted by the driving thread alone; the queue pair is owned by its id, which lives as long
// as this.
unsafe impl Send for Qp {}

/// What a queue pair is made with.
pub(super) fn init_attr(
    service: Service,
    attr: &QpAttr,
    capabilities: &Capabilities,
    queues: &Queues,
    key: Key,
) -> ibv_qp_init_attr {
    ibv_qp_init_attr {
        qp_context: context_of(key),
        send_cq: queues.send.as_ptr(),
        recv_cq: queues.recv.as_ptr(),
        srq: queues.shared.as_ref().map_or(ptr::null_mut(), |srq| srq.as_ptr()),
        cap: ibv_qp_cap {
            max_send_wr: attr.max_send_wr,
            max_recv_wr: if queues.shared.is_some() { 0 } else { attr.max_recv_wr },
            max_send_sge: capabilities.max_sge,
            max_recv_sge: capabilities.max_sge,
            max_inline_data: attr.max_inline.min(capabilities.max_inline),
        },
        qp_type: match service {
            Service::Connected => ibv_qp_type::IBV_QPT_RC,
            Service::Datagram => ibv_qp_type::IBV_QPT_UD,
        },
        sq_sig_all: 0,
    }
}

impl Qp {
    /// `raw` was made with `made`, for `attr`, and belongs to the id that keeps the result.
    pub(super) fn new(
        raw: *mut ibv_qp,
        made: &ibv_qp_init_attr,
        attr: &QpAttr,
        srq: Option<SrqId>,
        capabilities: &Capabilities,
    ) -> Self {
        let mut attr = *attr;
        attr.max_inline = attr.max_inline.min(capabilities.max_inline).min(made.cap.max_inline_data);
        // SAFETY: the queue pair was just made; its number never changes.
        let number = unsafe { (*raw).qp_num };
        let Capabilities { features, max_sge, max_read_sge, .. } = *capabilities;
        let max_datagram = (made.qp_type == ibv_qp_type::IBV_QPT_UD).then_some(capabilities.max_datagram);
        Self { raw, number, attr, srq, features, max_sge, max_read_sge, max_datagram }
    }

    pub(super) fn address(&self) -> usize {
        self.raw.addr()
    }

    pub(super) fn completes_to(&self, cq: CqId) -> bool {
        self.attr.send_cq == cq || self.attr.recv_cq == cq
    }

    fn check_send(&self, wr: &SendWr, addresses: &Slab<Address>) -> Result<(), Error> {
        check_sges(&wr.sges, if matches!(wr.op, SendOp::Read(_)) { self.max_read_sge } else { self.max_sge })?;
        if wr.flags.contains(SendFlags::INLINE) && wr.sges.total_len() > self.attr.max_inline as usize {
            let (value, range) = (wr.sges.total_len() as u64, "at most the queue pair's max_inline");
            return Err(Error::OutOfRange { what: "bytes of an inline send", value, range });
        }
        if let Some(max) = self.max_datagram {
            return check_datagram(wr, max, addresses);
        }
        let (needed, feature) = match wr.op {
            SendOp::Send => return Ok(()),
            SendOp::Datagram(_) | SendOp::DatagramWithImmediate(..) => {
                return Err(Error::InvalidState { call: "post_send of a datagram", state: "not for datagrams" });
            }
            SendOp::SendWithImmediate(_) => (Features::SEND_WITH_IMMEDIATE, "Send with immediate data"),
            SendOp::SendInvalidate(_) => (Features::SEND_WITH_INVALIDATE, "Send with Invalidate"),
            SendOp::Write(_) => (Features::WRITE, "RDMA Write"),
            SendOp::WriteWithImmediate(..) => (Features::WRITE_WITH_IMMEDIATE, "RDMA Write with immediate data"),
            SendOp::Read(_) => (Features::READ, "RDMA Read"),
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => (Features::ATOMICS, "atomic operations"),
        };
        if self.features.contains(needed) { Ok(()) } else { Err(Error::Unsupported { provider: NAME, feature }) }
    }

    pub(super) fn post_send(&self, chain: &[SendWr], chains: &mut Chains, addresses: &Slab<Address>) -> Posted {
        let (taken, refused) = split(chain, |wr| self.check_send(wr, addresses));
        if !taken.is_empty() {
            let first = chains.sends(taken, self.attr.max_inline as usize, addresses);
            let mut bad = ptr::null_mut();
            // SAFETY: a live queue pair and a chain whose entries `chains` keeps; what they point to is promised at
            // `Sge::new`.
            let rc = unsafe { ibv_post_send(self.raw, first, &raw mut bad) };
            posted(rc, first, bad, taken.len(), "ibv_post_send", "send", self.attr.max_send_wr)?;
        }
        refused.map_or(Ok(()), |error| Err(PostError { posted: taken.len(), error }))
    }

    pub(super) fn post_recv(&self, chain: &[RecvWr], chains: &mut Chains) -> Posted {
        if self.srq.is_some() {
            let state = "on a shared receive queue";
            return Err(PostError { posted: 0, error: Error::InvalidState { call: "post_recv", state } });
        }
        let (taken, refused) = split(chain, |wr| check_sges(&wr.sges, self.max_sge));
        if !taken.is_empty() {
            let first = chains.recvs(taken);
            let mut bad = ptr::null_mut();
            // SAFETY: as for sends.
            let rc = unsafe { ibv_post_recv(self.raw, first, &raw mut bad) };
            posted(rc, first, bad, taken.len(), "ibv_post_recv", "receive", self.attr.max_recv_wr)?;
        }
        refused.map_or(Ok(()), |error| Err(PostError { posted: taken.len(), error }))
    }
}

fn check_datagram(wr: &SendWr, max: u32, addresses: &Slab<Address>) -> Result<(), Error> {
    let (SendOp::Datagram(to) | SendOp::DatagramWithImmediate(to, _)) = wr.op else {
        return Err(Error::Unsupported { provider: NAME, feature: "operation but datagrams on a datagram queue pair" });
    };
    if addresses.get(to.address.0).is_none_or(|address| address.raw.is_none()) {
        return Err(Error::Stale { object: "address" });
    }
    if wr.sges.total_len() > max as usize {
        let (value, range) = (wr.sges.total_len() as u64, "at most the device's max_datagram");
        return Err(Error::OutOfRange { what: "bytes of a datagram", value, range });
    }
    Ok(())
}

pub(super) fn check_sges(sges: &SgeList, max: u32) -> Result<(), Error> {
    let count = sges.as_slice().len();
    if count > max as usize {
        let range = "at most the device's max_sge, of a read its max_read_sge";
        return Err(Error::OutOfRange { what: "scatter/gather entries of a work request", value: count as u64, range });
    }
    Ok(())
}

/// The front part of a chain that passes, and what the first that does not is refused for.
pub(super) fn split<T>(chain: &[T], check: impl Fn(&T) -> Result<(), Error>) -> (&[T], Option<Error>) {
    for (index, wr) in chain.iter().enumerate() {
        if let Err(error) = check(wr) {
            return (&chain[..index], Some(error));
        }
    }
    (chain, None)
}

/// The result of a post: the work requests before `bad` were taken.
pub(super) fn posted<T>(
    rc: c_int,
    first: *mut T,
    bad: *mut T,
    count: usize,
    call: &'static str,
    queue: &'static str,
    depth: u32,
) -> Posted {
    if rc == 0 {
        return Ok(());
    }
    let taken = if bad.is_null() { 0 } else { bad.addr().wrapping_sub(first.addr()) / size_of::<T>() };
    let source = post_failure(rc);
    let error = match source.raw_os_error() {
        // Siw has two names for it.
        Some(libc::ENOMEM | libc::ENOBUFS) => Error::QueueFull { queue, depth },
        _ => Error::io(call, source),
    };
    Err(PostError { posted: if taken < count { taken } else { 0 }, error })
}

/// Posting reports by its return value alone: -1 is `EPERM`, not a hint at `errno`.
fn post_failure(rc: c_int) -> io::Error {
    if rc == -1 { io::Error::from_raw_os_error(libc::EPERM) } else { failure(rc) }
}

/// Work requests in the form the device takes, in memory that is used again.
#[derive(Default)]
pub(super) struct Chains {
    sends: Vec<ibv_send_wr>,
    recvs: Vec<ibv_recv_wr>,
    sges: Vec<ibv_sge>,
}

// SAFETY: the pointers in it are used within one call only.
unsafe impl Send for Chains {}

impl std::fmt::Debug for Chains {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chains").field("capacity", &self.sges.capacity()).finish_non_exhaustive()
    }
}

impl Chains {
    /// Empties the entries and makes room for those of a chain, so that they never move while it is built.
    fn reserve_sges(&mut self, chain: usize) {
        self.sges.clear();
        self.sges.reserve(chain * MAX_SGE);
    }

    /// Adds the entries of one work request; returns where they are and how many.
    #[inline]
    fn push_sges(&mut self, list: &SgeList) -> (*mut ibv_sge, c_int) {
        let start = self.sges.len();
        debug_assert!(self.sges.capacity() - start >= list.as_slice().len(), "room was made before");
        for sge in list.as_slice() {
            // An entry of nothing between others crashes the kernel's siw.
            if !sge.is_empty() {
                self.sges.push(entry(sge));
            }
        }
        (self.sges.as_mut_ptr().wrapping_add(start), (self.sges.len() - start) as c_int)
    }

    fn sends(&mut self, chain: &[SendWr], max_inline: usize, addresses: &Slab<Address>) -> *mut ibv_send_wr {
        self.reserve_sges(chain.len());
        self.sends.clear();
        self.sends.reserve(chain.len());
        let base = self.sends.as_mut_ptr();
        for (index, wr) in chain.iter().enumerate() {
            let (sg_list, num_sge) = self.push_sges(&wr.sges);
            let last = index + 1 == chain.len();
            let next = if last { ptr::null_mut() } else { base.wrapping_add(index + 1) };
            self.sends.push(send(wr, next, sg_list, num_sge, max_inline, addresses));
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
                // Siw wants an entry, if of nothing.
                self.sges.push(entry(&Sge::default()));
                num_sge = 1;
            }
            let last = index + 1 == chain.len();
            let next = if last { ptr::null_mut() } else { base.wrapping_add(index + 1) };
            self.recvs.push(ibv_recv_wr { wr_id: wr.wr_id, next, sg_list, num_sge });
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
    max_inline: usize,
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
        // Libsiw takes the key from where a write has it.
        SendOp::SendInvalidate(key) => {
            (ibv_wr_opcode::IBV_WR_SEND_WITH_INV, rdma(RemoteAddress { address: 0, key }), key.0)
        }
        SendOp::Datagram(to) => (ibv_wr_opcode::IBV_WR_SEND, datagram(to), 0),
        SendOp::DatagramWithImmediate(to, data) => (ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, datagram(to), data.to_be()),
        SendOp::Write(remote) => (ibv_wr_opcode::IBV_WR_RDMA_WRITE, rdma(remote), 0),
        SendOp::WriteWithImmediate(remote, data) => {
            (ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM, rdma(remote), data.to_be())
        }
        // Siw answers a read of nothing with what an earlier one asked for; a write of nothing does as well.
        SendOp::Read(remote) if num_sge == 0 => (ibv_wr_opcode::IBV_WR_RDMA_WRITE, rdma(remote), 0),
        SendOp::Read(remote) => (ibv_wr_opcode::IBV_WR_RDMA_READ, rdma(remote), 0),
        SendOp::CompareSwap { remote, expected, swap } => {
            (ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP, atomic(remote, expected, swap), 0)
        }
        SendOp::FetchAdd { remote, add } => (ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD, atomic(remote, add, 0), 0),
    };
    let takes_inline = !matches!(wr.op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
    // Siw takes no fence on a read; answers come in order anyway.
    let wanted = if matches!(wr.op, SendOp::Read(_)) { wr.flags - SendFlags::FENCE } else { wr.flags };
    let flag = |ours, theirs: ibv_send_flags| if wanted.contains(ours) { theirs.0 } else { 0 };
    let mut flags = flag(SendFlags::SIGNALED, ibv_send_flags::IBV_SEND_SIGNALED)
        | flag(SendFlags::SOLICITED, ibv_send_flags::IBV_SEND_SOLICITED)
        | flag(SendFlags::FENCE, ibv_send_flags::IBV_SEND_FENCE);
    if takes_inline && (1..=max_inline).contains(&wr.sges.total_len()) {
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

/// Which queue pair a number of a device belongs to: two look-ups, no search. Numbers are 24 bits wide and mostly
/// dense; a wider one is not known here, and its completions name no queue pair.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    pages: Vec<Option<Box<[QpId; Self::PAGE]>>>,
}

impl Numbers {
    const PAGE: usize = 1 << 10;
    const LIMIT: usize = 1 << 24;
    /// Names no queue pair: no slab comes this far.
    const NONE: QpId = QpId(Key::new(u32::MAX, 0));

    pub(super) fn insert(&mut self, number: u32, qp: QpId) {
        let number = number as usize;
        if number >= Self::LIMIT {
            return;
        }
        let page = number / Self::PAGE;
        if self.pages.len() <= page {
            self.pages.resize_with(page + 1, || None);
        }
        self.pages[page].get_or_insert_with(|| Box::new([Self::NONE; Self::PAGE]))[number % Self::PAGE] = qp;
    }

    pub(super) fn remove(&mut self, number: u32, qp: QpId) {
        if let Some(Some(page)) = self.pages.get_mut(number as usize / Self::PAGE) {
            let entry = &mut page[number as usize % Self::PAGE];
            if *entry == qp {
                *entry = Self::NONE;
            }
        }
    }

    #[inline]
    pub(super) fn find(&self, number: u32) -> QpId {
        match self.pages.get(number as usize / Self::PAGE) {
            Some(Some(page)) => page[number as usize % Self::PAGE],
            _ => Self::NONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Memory;
    use crate::mr::RemoteKey;

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
            let mut at = chains.sends(&chain, 0, &Slab::default());
            for i in 0..round {
                // SAFETY: the chain was just built, and is not built anew while it is read.
                let raw = unsafe { &*at };
                // SAFETY: as above: it points to two entries.
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
            send(&wr, ptr::null_mut(), ptr::null_mut(), 0, max, &Slab::default()).send_flags
                & ibv_send_flags::IBV_SEND_INLINE.0
                != 0
        };
        assert!(inline(SendOp::Send, 64, 64));
        assert!(!inline(SendOp::Send, 65, 64));
        assert!(!inline(SendOp::Send, 0, 0));
        assert!(inline(SendOp::Write(REMOTE), 8, 64));
        assert!(!inline(SendOp::Read(REMOTE), 8, 64));
        assert!(!inline(SendOp::FetchAdd { remote: REMOTE, add: 1 }, 8, 64));
    }

    #[test]
    fn immediate_data_is_in_network_order_and_keys_are_not() {
        let of = |op| {
            send(
                &wr(op, SgeList::default(), SendFlags::FENCE),
                ptr::null_mut(),
                ptr::null_mut(),
                0,
                0,
                &Slab::default(),
            )
        };
        let imm = of(SendOp::WriteWithImmediate(REMOTE, 1));
        // SAFETY: both variants are numbers.
        assert_eq!(unsafe { imm.imm_data_invalidated_rkey_union.imm_data }, 1u32.to_be());
        assert_eq!(imm.send_flags, ibv_send_flags::IBV_SEND_FENCE.0);
        let inv = of(SendOp::SendInvalidate(RemoteKey(9)));
        // SAFETY: both variants are numbers.
        assert_eq!(unsafe { inv.imm_data_invalidated_rkey_union.invalidated_rkey }, 9);
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
            assert!(matches!(failed.error, Error::QueueFull { queue: "send", depth: 8 }));
        }
        let failed = posted(-libc::EINVAL, first, ptr::null_mut(), 4, "x", "send", 8).unwrap_err();
        assert_eq!(failed.posted, 0);
        assert!(matches!(failed.error, Error::Io { .. }));
    }

    #[test]
    fn numbers_are_found_until_removed() {
        let mut numbers = Numbers::default();
        let (a, b) = (QpId(Key::new(1, 1)), QpId(Key::new(2, 1)));
        numbers.insert(17, a);
        numbers.insert(1 << 20, b);
        numbers.insert(u32::MAX, a);
        assert_eq!((numbers.find(17), numbers.find(1 << 20)), (a, b));
        for unknown in [0, 18, 1 << 19, u32::MAX] {
            assert_eq!(numbers.find(unknown), Numbers::NONE);
        }
        numbers.remove(17, b);
        assert_eq!(numbers.find(17), a);
        numbers.remove(17, a);
        assert_eq!(numbers.find(17), Numbers::NONE);
    }
}
