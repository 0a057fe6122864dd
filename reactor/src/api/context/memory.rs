//! Regions of memory that peers can access, and the one-sided operations: RDMA Read, RDMA Write and atomics.

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
    /// Registers `len` bytes of zeroed memory with the device of a connection. `len` ranges from 1 to the limit of the
    /// device. The options say which access the peer has. The rights of the peer end with the connection, except with
    /// [`RegionOptions::any_peer`]. The region itself stays registered until it is dropped. On an RDMA device this call
    /// **blocks** while the system pins the memory, for about a quarter of a second per gibibyte. So register memory
    /// once, and use the region often. For large regions see [`Context::region_maker`].
    ///
    /// ```
    /// use rdma_reactor::{
    ///     Access, Config, ConnectionId, Context, Handler, Immediate, Message, ProviderChoice, Reactor, Region,
    ///     RegionOptions, RemoteRegion,
    /// };
    ///
    /// /// The server registers memory, and sends its address. The client writes there, with immediate data.
    /// #[derive(Default)]
    /// struct Program {
    ///     open: Option<Region>,
    ///     source: Option<Region>,
    /// }
    ///
    /// impl Handler for Program {
    ///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
    ///         if cx.listener(conn).is_some() {
    ///             let options = RegionOptions::new().allow(Access::REMOTE_WRITE);
    ///             let region = cx.register(conn, 4096, &options).expect("memory");
    ///             cx.send(conn, &region.remote().to_bytes()).expect("room");
    ///             self.open = Some(region);
    ///         }
    ///     }
    ///
    ///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
    ///         let remote = RemoteRegion::from_bytes(&message).expect("the server's region");
    ///         let mut source = cx.register(conn, 5, &RegionOptions::new()).expect("memory");
    ///         source.copy_from(0, b"hello").expect("no operation uses it");
    ///         cx.write_with_immediate(conn, remote, &source, 0..5, 7).expect("room");
    ///         self.source = Some(source);
    ///     }
    ///
    ///     fn on_immediate(&mut self, cx: &mut Context<'_>, _: ConnectionId, immediate: Immediate) {
    ///         let mut bytes = [0; 5];
    ///         self.open.as_ref().expect("it is open").copy_to(0, &mut bytes);
    ///         assert_eq!((immediate.value, &bytes), (7, b"hello"));
    ///         cx.stop();
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    /// # let mut context = reactor.context();
    /// # let listener = context.listen("127.0.0.1:0".parse()?)?;
    /// # let server = context.local_address(listener).expect("it listens");
    /// # context.connect(server)?;
    /// # reactor.run(&mut Program::default())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The connection does not exist any more, the provider does not support the options, or the system refuses to
    /// register the memory. If the reason is the limit on locked memory, the error says how to raise it.
    /// [`Error::Security`] if the connection is secured and the options give rights to the peer, except with
    /// [`crate::Config::allow_plain_remote_memory`].
    pub fn register(&mut self, conn: ConnectionId, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = options.memory(len)?;
        self.driver.register(conn, Material::Own(memory, len), options)
    }

    /// Registers memory like [`Context::register`], but on the device that has the address `local` of this host. This
    /// needs no connection, so a server can register its memory before the first client connects. Options that give
    /// rights to peers or [`crate::Access::READ_SINK`] must include [`RegionOptions::any_peer`]. With
    /// `ProviderChoice::Auto` the address selects the provider, as the address of a listener does. The embedded provider
    /// accepts any address.
    ///
    /// Example: [`Region`].
    ///
    /// # Errors
    /// [`Error::NoPeer`] if such options lack `any_peer`; [`Error::Transport`] if no RDMA device
    /// has the address; [`Error::Drained`]; the errors of [`Context::register`].
    pub fn register_at(&mut self, local: IpAddr, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = options.memory(len)?;
        self.driver.register_at(local, Material::Own(memory, len), options)
    }

    /// Registers the memory of the vector `bytes`. The region owns this memory from now on. The options have the same
    /// meaning as in [`Context::register`].
    ///
    /// Example: [`Context::read`].
    ///
    /// # Errors
    /// The errors of [`Context::register`]. After an error, the memory is freed.
    pub fn register_vec(
        &mut self,
        conn: ConnectionId,
        bytes: Vec<u8>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        let len = bytes.len();
        let memory =
            Memory::from_vec(bytes).map_err(|source| rdma_transport::TransportError::Memory { bytes: len, source })?;
        self.driver.register(conn, Material::Own(memory, len), options)
    }

    /// Registers memory that the program shares with the region, for example:
    ///
    /// - a memory file that other processes map (`Memory::new_file` and `Memory::map_file` of [`crate::transport`]);
    /// - memory of another library (`Memory::from_raw`).
    ///
    /// The program can only copy the bytes of such a region: [`Region::bytes`] returns `None`, because others may
    /// change the bytes at any time. When the region was dropped and its last operation has ended, the region releases
    /// its share of the memory: `Arc::strong_count` decreases by one. In all other respects, this method is like
    /// [`Context::register`].
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use rdma_reactor::transport::mem::Memory;
    /// use rdma_reactor::{Access, ConnectionId, Context, Error, Region, RegionOptions};
    ///
    /// /// Registers memory that other processes map, for the peer to read.
    /// fn share(cx: &mut Context<'_>, conn: ConnectionId, memory: &Arc<Memory>) -> Result<Region, Error> {
    ///     cx.register_memory(conn, Arc::clone(memory), &RegionOptions::new().allow(Access::REMOTE_READ))
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Context::register`].
    pub fn register_memory(
        &mut self,
        conn: ConnectionId,
        memory: Arc<Memory>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        self.driver.register(conn, Material::Shared(memory), options)
    }

    /// Registers shared memory like [`Context::register_memory`], but on the device that has the address `local` of
    /// this host, without a connection. Use this if several reactors of a program register the same memory, each
    /// reactor with a separate device.
    ///
    /// Example: [the guide](crate::guide::remote_memory).
    ///
    /// # Errors
    /// The errors of [`Context::register_at`].
    pub fn register_memory_at(
        &mut self,
        local: IpAddr,
        memory: Arc<Memory>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        self.driver.register_at(local, Material::Shared(memory), options)
    }

    /// Registers `len` bytes at `base`, which the program has allocated by other means. The address and the length must
    /// be multiples of 8. Returns the region and a share of the memory. When the region was dropped and
    /// `Arc::strong_count` of the share is 1, the library does not use the bytes any more. In all other respects, this
    /// method is like [`Context::register_memory`].
    ///
    /// ```
    /// use std::ptr::NonNull;
    ///
    /// use rdma_reactor::{ConnectionId, Context, Error, Region, RegionOptions};
    ///
    /// /// Registers memory that stays mapped for as long as the program runs.
    /// fn register_static(cx: &mut Context<'_>, conn: ConnectionId, words: &'static mut [u64]) -> Result<Region, Error> {
    ///     let len = std::mem::size_of_val(words);
    ///     let base = NonNull::from(words).cast();
    ///     // SAFETY: the words are borrowed for ever, and nothing else uses them.
    ///     let (region, _share) = unsafe { cx.register_raw(conn, base, len, &RegionOptions::new())? };
    ///     Ok(region)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Context::register`]. This method also fails if the address or the length is not a multiple of 8.
    ///
    /// # Safety
    /// The rules of [`Memory::from_raw`] apply. As long as the library uses the bytes:
    ///
    /// - The bytes stay mapped for reading and writing.
    /// - The program accesses them only through the region, through the share, or with atomic operations on whole
    ///   aligned words of 8 bytes.
    pub unsafe fn register_raw(
        &mut self,
        conn: ConnectionId,
        base: NonNull<u8>,
        len: usize,
        options: &RegionOptions,
    ) -> Result<(Region, Arc<Memory>), Error> {
        // SAFETY: the caller of `register_raw` promises that the rules of `Memory::from_raw` hold.
        let memory = unsafe { Memory::from_raw(base, len) };
        let memory = Arc::new(memory.map_err(|source| rdma_transport::TransportError::Memory { bytes: len, source })?);
        Ok((self.register_memory(conn, Arc::clone(&memory), options)?, memory))
    }

    /// Registers `len` bytes of a dma-buf, beginning at `offset`. A dma-buf is memory of a GPU or another device that
    /// its driver has exported. One-sided operations read and write such a region like any other, and
    /// [`Context::send_region`] can send messages from it. The program cannot access the bytes, so [`Region::copy_to`]
    /// and similar methods panic. The program may close the descriptor after this call. In all other respects, this
    /// method is like [`Context::register`].
    ///
    /// ```
    /// use std::os::fd::BorrowedFd;
    ///
    /// use rdma_reactor::{ConnectionId, Context, Error, Region, RegionOptions};
    ///
    /// /// Registers the first mebibyte of a buffer that a GPU's driver has exported.
    /// fn register_gpu(cx: &mut Context<'_>, conn: ConnectionId, buffer: BorrowedFd<'_>) -> Result<Region, Error> {
    ///     cx.register_dmabuf(conn, buffer, 0, 1 << 20, &RegionOptions::new())
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Context::register`]. `Unsupported` names the provider or the device if it does not support
    /// dma-bufs. The embedded provider, siw and rxe do not support them.
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

    /// Returns a [`RegionMaker`]. Another thread uses it to prepare memory for a region with `options`, for the device
    /// of the connection. So the slow part, such as pinning gigabytes, does not block the reactor's thread.
    /// [`Context::adopt`] then makes a region of the prepared memory, without blocking. On the embedded provider,
    /// registration takes no time: [`Context::adopt`] does the whole registration.
    ///
    /// ```
    /// use rdma_reactor::{
    ///     Config, ConnectionId, Context, Handler, PreparedRegion, ProviderChoice, Reactor, RegionOptions, ReactorHandle,
    /// };
    ///
    /// /// Has another thread prepare memory for each connection.
    /// struct Program(ReactorHandle<(ConnectionId, PreparedRegion)>);
    ///
    /// impl Handler<(ConnectionId, PreparedRegion)> for Program {
    ///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
    ///         let maker = cx.region_maker(conn, &RegionOptions::new()).expect("it has just come up");
    ///         let reactor = self.0.clone();
    ///         std::thread::spawn(move || {
    ///             // This may take long; the loop does not wait for it.
    ///             let prepared = maker.prepare(1 << 20).expect("memory");
    ///             // If the reactor was dropped, the memory is not needed.
    ///             let _ = reactor.post((conn, prepared));
    ///         });
    ///     }
    ///
    ///     fn on_wake(&mut self, cx: &mut Context<'_>, (conn, prepared): (ConnectionId, PreparedRegion)) {
    ///         let region = cx.adopt(conn, prepared).expect("the connection is still up");
    ///         assert_eq!(region.len(), 1 << 20);
    ///         cx.stop();
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let mut reactor = Reactor::with_messages(Config::default().provider(ProviderChoice::Iwarp))?;
    /// # let mut program = Program(reactor.handle());
    /// # let mut context = reactor.context();
    /// # let listener = context.listen("127.0.0.1:0".parse()?)?;
    /// # let server = context.local_address(listener).expect("it listens");
    /// # context.connect(server)?;
    /// # reactor.run(&mut program)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The connection does not exist any more, or its device was removed.
    pub fn region_maker(&mut self, conn: ConnectionId, options: &RegionOptions) -> Result<RegionMaker, Error> {
        self.driver.region_maker(conn, options.clone())
    }

    /// Makes a region of memory that a [`RegionMaker`] of this reactor has prepared for the device of this connection.
    /// The peer of the connection gets the rights of the [`RegionOptions`] with which the program created the maker.
    ///
    /// Example: [`Context::region_maker`].
    ///
    /// # Errors
    /// [`Error::ForeignDevice`] if the memory was prepared for another device or reactor; the errors of
    /// [`Context::register`].
    pub fn adopt(&mut self, conn: ConnectionId, prepared: PreparedRegion) -> Result<Region, Error> {
        self.driver.adopt(conn, prepared)
    }

    /// Revokes the rights of all peers to a region, immediately. A peer that tries to access the region afterwards gets
    /// an error and loses its connection. After `Ok`, no peer reads or changes the memory, with one exception: a device
    /// with [`Features::LATE_PLACEMENT`](rdma_transport::Features::LATE_PLACEMENT) still places the rest of a frame
    /// that it has begun to place. Revoking the rights twice is harmless.
    ///
    /// # Errors
    /// The device failed to invalidate the remote key, or cannot invalidate keys. Peers may then access the memory
    /// until the region is dropped and deregistered; [`crate::MemoryStats::unrevoked`] counts these errors.
    /// [`Error::Gone`] if the region belongs to another reactor, or if its device was removed and did not release the
    /// region.
    pub fn revoke(&mut self, region: &Region) -> Result<(), Error> {
        self.driver.revoke(region)
    }

    /// Reads `range.len()` bytes from the beginning of `remote`, and stores them in `range` of `local`. The reactor
    /// calls `on_send_complete` for the read, in the order of sends. If the outcome is [`crate::Outcome::Sent`], the
    /// bytes are in `local`. A read uses no credit.
    ///
    /// ```
    /// use rdma_reactor::{
    ///     Access, Config, ConnectionId, Context, Handler, Message, Outcome, ProviderChoice, Reactor, Region,
    ///     RegionOptions, RemoteRegion, SendId,
    /// };
    ///
    /// /// The server registers memory to read, and sends its address.
    /// #[derive(Default)]
    /// struct Program {
    ///     open: Option<Region>,
    ///     copy: Option<Region>,
    /// }
    ///
    /// impl Handler for Program {
    ///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
    ///         if cx.listener(conn).is_some() {
    ///             let options = RegionOptions::new().allow(Access::REMOTE_READ);
    ///             let region = cx.register_vec(conn, b"what there is".to_vec(), &options).expect("memory");
    ///             cx.send(conn, &region.remote().to_bytes()).expect("room");
    ///             self.open = Some(region);
    ///         }
    ///     }
    ///
    ///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
    ///         let remote = RemoteRegion::from_bytes(&message).expect("the server's region");
    ///         let mut copy = cx.register(conn, remote.len as usize, &RegionOptions::new()).expect("memory");
    ///         let all = 0..copy.len();
    ///         cx.read(conn, remote, &mut copy, all).expect("room");
    ///         self.copy = Some(copy);
    ///     }
    ///
    ///     fn on_send_complete(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: SendId, outcome: Outcome) {
    ///         assert!(outcome.is_sent());
    ///         // The server's message completes as well; the server has no copy.
    ///         if self.copy.as_ref().is_some_and(|copy| copy.bytes() == Some(b"what there is")) {
    ///             cx.stop();
    ///         }
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    /// # let mut context = reactor.context();
    /// # let listener = context.listen("127.0.0.1:0".parse()?)?;
    /// # let server = context.local_address(listener).expect("it listens");
    /// # context.connect(server)?;
    /// # reactor.run(&mut Program::default())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`SendErrorKind`]. After `WouldBlock`, `on_writable` follows once.
    pub fn read(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &mut Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.read(conn, remote, &mut [(local, range)])
    }

    /// Reads bytes from the beginning of `remote`, and stores them in 1 to 4 ranges: the first bytes in the first
    /// range, the next ones in the second range, and so on. The number of ranges must not exceed `Config::send_depth`.
    /// In all other respects, this method is like [`Context::read`].
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Reads a header of 64 bytes and the body behind it into two regions.
    /// fn fetch(
    ///     cx: &mut Context<'_>,
    ///     conn: ConnectionId,
    ///     from: RemoteRegion,
    ///     (head, body): (&mut Region, &mut Region),
    /// ) -> Result<(), SendErrorKind> {
    ///     let rest = body.len();
    ///     cx.read_vectored(conn, from, &mut [(head, 0..64), (body, 0..rest)]).map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Context::read`].
    pub fn read_vectored(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        locals: &mut [(&mut Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.driver.read(conn, remote, locals)
    }

    /// Writes `range` of `local` to the beginning of `remote`. The reactor calls `on_send_complete` when the program
    /// may change `local` again. The peer is not notified of the write. The peer receives a message that the program
    /// sends after the write only when the written bytes are in place. A write uses no credit.
    ///
    /// If the connection ends before the write has ended, for example because this process is
    /// killed, the peer's memory may have a part of the bytes, usually the first ones. The peer is
    /// only notified of the end of the connection.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Writes a whole region, and then notifies the peer with a message.
    /// fn publish(cx: &mut Context<'_>, conn: ConnectionId, to: RemoteRegion, region: &Region) -> Result<(), SendErrorKind> {
    ///     cx.write(conn, to, region, 0..region.len())?;
    ///     cx.send(conn, b"written").map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Context::read`].
    pub fn write(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        local: &Region,
        range: Range<usize>,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.write(conn, remote, &[(local, range)], None)
    }

    /// Writes the bytes of 1 to 4 local ranges to `remote`: the first range to the beginning of `remote`, and each
    /// further range directly behind the previous one. In all other respects, this method is like [`Context::write`].
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Writes a header and a body, which are in two regions, one behind the other.
    /// fn publish(
    ///     cx: &mut Context<'_>,
    ///     conn: ConnectionId,
    ///     to: RemoteRegion,
    ///     (head, body): (&Region, &Region),
    /// ) -> Result<(), SendErrorKind> {
    ///     cx.write_vectored(conn, to, &[(head, 0..head.len()), (body, 0..body.len())]).map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Context::read`].
    pub fn write_vectored(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        locals: &[(&Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.driver.write(conn, remote, locals, None)
    }

    /// Writes like [`Context::write`], and notifies the peer: its `on_immediate` receives the 32 bits of `immediate`
    /// when the bytes are in place. The operation uses a credit, as a message does. On a device without Write with
    /// Immediate, the reactor sends a write and a small message instead. That needs a `Config::send_depth` of at least
    /// 2.
    ///
    /// Example: [`Context::register`].
    ///
    /// # Errors
    /// The errors of [`Context::read`]. With [`crate::Framing::Raw`] also `Unsupported`, if the device has no Write
    /// with Immediate.
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

    /// Atomically compares the 8 bytes at the beginning of `remote` with `expected`, and replaces the 8 bytes with
    /// `swap` if they equal `expected`. In both cases, the local device stores the previous value of the 8 bytes at
    /// `offset` of `local`. Read the previous value with [`Region::load`] after `on_send_complete`.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Takes a lock in the peer's memory, which is free while it is 0. The old value is stored in the first word of `old`.
    /// fn lock(
    ///     cx: &mut Context<'_>,
    ///     conn: ConnectionId,
    ///     lock: RemoteRegion,
    ///     old: &mut Region,
    ///     owner: u64,
    /// ) -> Result<(), SendErrorKind> {
    ///     cx.compare_swap(conn, lock, old, 0, 0, owner).map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Context::read`]. Also `Unsupported` if the device has no atomics, and `Misaligned` if the remote
    /// address or the local address of the 8 bytes is not a multiple of 8.
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

    /// Atomically adds `add` to the 8 bytes at the beginning of `remote`. The local device stores the previous value of
    /// the 8 bytes at `offset` of `local`. Read the previous value with [`Region::load`] after `on_send_complete`.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Draws a ticket from a counter in the peer's memory. The ticket is stored in the first word of `ticket`.
    /// fn draw(
    ///     cx: &mut Context<'_>,
    ///     conn: ConnectionId,
    ///     counter: RemoteRegion,
    ///     ticket: &mut Region,
    /// ) -> Result<(), SendErrorKind> {
    ///     cx.fetch_add(conn, counter, ticket, 0, 1).map(drop)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Context::compare_swap`].
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

    /// Fences the next send of any kind on a connection: the device begins this send only when all earlier reads and
    /// atomics of the connection have completed. Without a fence, the device may execute a write before the response to
    /// an earlier read has arrived (RFC 5040, section 5.5).
    pub fn fence(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.sends_mut().fence_next());
    }
}
