//! Remote memory: regions, and one-sided operations on them.

use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_transport::mem::Memory;
use rdma_transport::wr::SendOp;

use super::Context;
use crate::error::{Error, SendErrorKind};
use crate::id::{ConnectionId, SendId, SendKind};
use crate::memory::material::{Material, PreparedRegion, RegionMaker};
use crate::memory::region::{Region, RegionOptions, RemoteRegion};

impl Context<'_> {
    /// Registers memory of `len` bytes, zeroed, with the device of a connection: 1 byte to what the device allows. A peer
    /// gets at it only as `options` say. The region outlives the connection; the rights of its peer do not. On a device this
    /// pins the memory, which takes about a quarter of a second for a gibibyte, and nothing else happens meanwhile: register
    /// once, use often; for much memory see [`Context::region_maker`].
    ///
    /// # Errors
    /// The connection is gone, the provider lacks what is asked for, or the system refuses (a limit on locked memory is
    /// named with its cure).
    pub fn register(&mut self, conn: ConnectionId, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = Memory::new(len).map_err(|source| rdma_transport::Error::Memory { bytes: len, source })?;
        self.driver.register(conn, Material::Own(memory, len), options)
    }

    /// As [`Context::register`], on the device that has the address `local` of this host, before there is any connection: a server
    /// can have its memory ready when the first client comes. Rights of peers need [`RegionOptions::any_peer`]. With
    /// `ProviderChoice::Auto` the address decides on the provider, as that of a listener does. The embedded provider takes any address.
    ///
    /// # Errors
    /// [`Error::NoPeer`] for rights without `any_peer`; `NoDevice` for an address that is on no RDMA device; [`Error::Drained`]; as
    /// [`Context::register`].
    pub fn register_at(&mut self, local: IpAddr, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = Memory::new(len).map_err(|source| rdma_transport::Error::Memory { bytes: len, source })?;
        self.driver.register_at(local, Material::Own(memory, len), options)
    }

    /// As [`Context::register`], for memory of the program's, which the region owns from now on.
    ///
    /// # Errors
    /// As [`Context::register`]; the memory is freed.
    pub fn register_vec(
        &mut self,
        conn: ConnectionId,
        bytes: Vec<u8>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        let len = bytes.len();
        let memory = Memory::from_vec(bytes).map_err(|source| rdma_transport::Error::Memory { bytes: len, source })?;
        self.driver.register(conn, Material::Own(memory, len), options)
    }

    /// As [`Context::register`], for memory that the program keeps a share of, and that others may have, too: a memory file
    /// that other processes map ([`Memory::new_file`], [`Memory::map_file`]), or memory of another library
    /// ([`Memory::from_raw`]). The bytes of such a region are never borrowed, only copied: [`Region::bytes`] is `None`. The
    /// region's share goes when it was dropped and its last operation has ended; then `Arc::strong_count` is one less.
    ///
    /// # Errors
    /// As [`Context::register`].
    pub fn register_memory(
        &mut self,
        conn: ConnectionId,
        memory: Arc<Memory>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        self.driver.register(conn, Material::Shared(memory), options)
    }

    /// As [`Context::register_memory`], for `len` bytes at `base`, which the program has got on its own. Address and length are
    /// multiples of 8. The share that comes with the region says when the bytes are the program's alone again:
    /// when the region was dropped and `Arc::strong_count` of the share is 1.
    ///
    /// # Errors
    /// As [`Context::register`], and for an address or a length that is no multiple of 8.
    ///
    /// # Safety
    /// As for [`Memory::from_raw`]: until then the bytes stay mapped for reading and writing, and the program uses them through
    /// the region, through the share, or through atomic operations on whole aligned words of 8 bytes only.
    pub unsafe fn register_raw(
        &mut self,
        conn: ConnectionId,
        base: NonNull<u8>,
        len: usize,
        options: &RegionOptions,
    ) -> Result<(Region, Arc<Memory>), Error> {
        // SAFETY: the caller promises it.
        let memory = unsafe { Memory::from_raw(base, len) };
        let memory = Arc::new(memory.map_err(|source| rdma_transport::Error::Memory { bytes: len, source })?);
        Ok((self.register_memory(conn, Arc::clone(&memory), options)?, memory))
    }

    /// As [`Context::register`], for `len` bytes of a dma-buf from `offset` on: memory of a GPU or another device that its driver
    /// has exported. Operations read and write it like any region, and messages are sent from it
    /// ([`Context::send_region`]); the program cannot look at the bytes, so [`Region::copy_to`] and its like panic. The
    /// descriptor may be closed afterwards.
    ///
    /// # Errors
    /// As [`Context::register`]; `Unsupported` names the provider or the device that has no such regions. The embedded provider,
    /// siw and rxe have none.
    pub fn register_dmabuf(
        &mut self,
        conn: ConnectionId,
        buffer: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        self.driver.register(conn, Material::DmaBuf(buffer, offset, len), options)
    }

    /// Prepares regions with these options for the device of a connection, on other threads: what would hold the loop up
    /// there, such as gigabytes on a device, does not. [`Context::adopt`] makes a region of the result, at once. On the embedded
    /// provider registration takes no time, and happens in `adopt`.
    ///
    /// # Errors
    /// The connection or its device is gone.
    pub fn region_maker(&self, conn: ConnectionId, options: &RegionOptions) -> Result<RegionMaker, Error> {
        self.driver.region_maker(conn, options.clone())
    }

    /// Makes a region of what a [`RegionMaker`] of this reactor has prepared for the device of a connection. The rights are those
    /// of the peer of this connection, as the options say.
    ///
    /// # Errors
    /// [`Error::ForeignDevice`] for another device or reactor; as [`Context::register`].
    pub fn adopt(&mut self, conn: ConnectionId, prepared: PreparedRegion) -> Result<Region, Error> {
        self.driver.adopt(conn, prepared)
    }

    /// Takes the rights of all peers to a region back, at once: nothing of a peer's touches the memory when this returns.
    /// A peer that tries gets an error, and loses its connection. Harmless when repeated.
    pub fn revoke(&mut self, region: &Region) {
        self.driver.revoke(region);
    }

    /// Reads the beginning of `remote` into `range` of `local`. `on_send_complete` follows, in the order of sends; the
    /// bytes are there when it says [`crate::Outcome::Sent`]. Needs no credit.
    ///
    /// # Errors
    /// See [`SendErrorKind`]; after `WouldBlock`, `on_writable` follows once.
    pub fn read(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &mut Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.read(conn, remote, &mut [(local, range)])
    }

    /// As [`Context::read`], into several ranges, one after another: 1 to 4, and no more than
    /// `Config::send_depth`.
    ///
    /// # Errors
    /// As [`Context::read`].
    pub fn read_vectored(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        locals: &mut [(&mut Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.driver.read(conn, remote, locals)
    }

    /// Writes `range` of `local` to the beginning of `remote`. `on_send_complete` follows, when the memory of `local` is
    /// free again. The peer is not told; a message sent afterwards arrives after the bytes are there. Needs no credit.
    ///
    /// # Errors
    /// As [`Context::read`].
    pub fn write(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.write(conn, remote, &[(local, range)], None)
    }

    /// As [`Context::write`], from several ranges, one after another: 1 to 4.
    ///
    /// # Errors
    /// As [`Context::read`].
    pub fn write_vectored(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        locals: &[(&Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.driver.write(conn, remote, locals, None)
    }

    /// As [`Context::write`], and the peer's `on_immediate` is called with 32 bits when the bytes are there. Takes a
    /// credit like a message. Where the device has no such operation, a write and a small message do the same,
    /// which takes a `Config::send_depth` of 2.
    ///
    /// # Errors
    /// As [`Context::read`]; with [`crate::Framing::Raw`], the device must have it.
    pub fn write_with_immediate(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &Region,
        range: Range<usize>,
        immediate: u32,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.write(conn, remote, &[(local, range)], Some(immediate))
    }

    /// Replaces the 8 bytes at the beginning of `remote` by `swap` if they equal `expected`, in one step. The old value
    /// lands at `offset` of `local`: [`Region::load`] it when `on_send_complete` has come.
    ///
    /// # Errors
    /// As [`Context::read`]; `Unsupported`, because not every device has this; `Misaligned`, because the 8 bytes begin at a
    /// multiple of 8 on both sides.
    pub fn compare_swap(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &mut Region,
        offset: usize,
        expected: u64,
        swap: u64,
    ) -> Result<SendId, SendErrorKind> {
        let op = SendOp::CompareSwap { remote: remote.address(), expected, swap };
        self.driver.atomic(conn, remote, (local, offset), op, SendKind::CompareSwap)
    }

    /// Adds to the 8 bytes at the beginning of `remote`, in one step. The old value lands as with
    /// [`Context::compare_swap`].
    ///
    /// # Errors
    /// As [`Context::compare_swap`].
    pub fn fetch_add(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &mut Region,
        offset: usize,
        add: u64,
    ) -> Result<SendId, SendErrorKind> {
        let op = SendOp::FetchAdd { remote: remote.address(), add };
        self.driver.atomic(conn, remote, (local, offset), op, SendKind::FetchAdd)
    }

    /// Lets the next send of any kind wait until the reads and atomics before it are done. Without this a write may
    /// overtake the answer to a read (RFC 5040 section 5.5).
    pub fn fence(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.sends_mut().fence_next());
    }
}
