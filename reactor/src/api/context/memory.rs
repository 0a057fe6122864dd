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
    /// Registers `len` bytes of zeroed memory with the device of a connection: 1 byte up to the limit of the device. A
    /// peer has only the access that `options` give. The region outlives the connection; the rights of its peer do not.
    /// On a device this call **blocks** while the memory is pinned, for about a quarter of a second per gibibyte. So
    /// register once and use often; for large memory see [`Context::region_maker`].
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
    /// The connection does not exist any more, the provider does not support the options, or the system refuses. If the
    /// reason is the limit on locked memory, the error says how to raise it.
    pub fn register(&mut self, conn: ConnectionId, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = options.memory(len)?;
        self.driver.register(conn, Material::Own(memory, len), options)
    }

    /// As [`Context::register`], on the device that has the address `local` of this host. No connection is needed, so a
    /// server can register its memory before the first client connects. Rights of peers need
    /// [`RegionOptions::any_peer`]. With `ProviderChoice::Auto` the address selects the provider, as that of a listener
    /// does. The embedded provider accepts any address.
    ///
    /// Example: [`Region`].
    ///
    /// # Errors
    /// [`Error::NoPeer`] for rights without `any_peer`; [`Error::Transport`] for an address that belongs to no RDMA
    /// device; [`Error::Drained`]; as [`Context::register`].
    pub fn register_at(&mut self, local: IpAddr, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = options.memory(len)?;
        self.driver.register_at(local, Material::Own(memory, len), options)
    }

    /// As [`Context::register`], for memory of the program. The region owns it from now on.
    ///
    /// Example: [`Context::read`].
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

    /// As [`Context::register`], for memory that the program keeps a share of, and that others may use as well: a
    /// memory file that other processes map (`Memory::new_file` and `Memory::map_file` of [`crate::transport`]), or
    /// memory of another library (`Memory::from_raw`). The bytes of such a region are never borrowed, only copied:
    /// [`Region::bytes`] returns `None`. The region releases its share when the region was dropped and its last
    /// operation has ended; then `Arc::strong_count` is one less.
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
    /// As [`Context::register`].
    pub fn register_memory(
        &mut self,
        conn: ConnectionId,
        memory: Arc<Memory>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        self.driver.register(conn, Material::Shared(memory), options)
    }

    /// As [`Context::register_memory`], on the device that has the address `local` of this host, without a connection,
    /// as [`Context::register_at`]. It is for memory that several reactors of a program register, each on its device.
    ///
    /// Example: [the guide](crate::guide::remote_memory).
    ///
    /// # Errors
    /// As [`Context::register_at`].
    pub fn register_memory_at(
        &mut self,
        local: IpAddr,
        memory: Arc<Memory>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        self.driver.register_at(local, Material::Shared(memory), options)
    }

    /// As [`Context::register_memory`], for `len` bytes at `base`, which the program has allocated by other means. The
    /// address and the length are multiples of 8. Also returns a share of the memory. The bytes belong to the program
    /// alone again when the region was dropped and `Arc::strong_count` of the share is 1.
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
    /// As [`Context::register`]; the address or the length is not a multiple of 8.
    ///
    /// # Safety
    /// The rules of [`Memory::from_raw`] apply. Until the bytes belong to the program alone again, they stay mapped for
    /// reading and writing. Until then the program accesses them only through the region, through the share, or with
    /// atomic operations on whole aligned words of 8 bytes.
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

    /// As [`Context::register`], for `len` bytes of a dma-buf from `offset` on: memory of a GPU or another device,
    /// which its driver has exported. Operations read and write it like any region, and messages can be sent from it
    /// ([`Context::send_region`]). The program cannot access the bytes, so [`Region::copy_to`] and similar methods
    /// panic. The descriptor may be closed afterwards.
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
    /// As [`Context::register`]; `Unsupported` names the provider or device that does not support such regions. The
    /// embedded provider, siw and rxe do not.
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

    /// Returns a [`RegionMaker`], which prepares regions with these options on other threads, for the device of a
    /// connection. So the slow part, such as pinning gigabytes, does not block the loop. [`Context::adopt`] makes a
    /// region of the result, without blocking. On the embedded provider registration takes no time, and happens in
    /// `adopt`.
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

    /// Makes a region of memory that a [`RegionMaker`] of this reactor has prepared for the device of a connection. The
    /// peer of this connection gets the rights of the options.
    ///
    /// Example: [`Context::region_maker`].
    ///
    /// # Errors
    /// [`Error::ForeignDevice`] for another device or reactor; as [`Context::register`].
    pub fn adopt(&mut self, conn: ConnectionId, prepared: PreparedRegion) -> Result<Region, Error> {
        self.driver.adopt(conn, prepared)
    }

    /// Revokes the rights of all peers to a region, immediately. After `Ok`, no peer's access touches the memory, with
    /// one exception: a device with [`Features::LATE_PLACEMENT`](rdma_transport::Features::LATE_PLACEMENT) places the
    /// rest of the frame that it is placing. A peer that tries to access the region gets an error, and loses its
    /// connection. Revoking twice is harmless.
    ///
    /// # Errors
    /// The device failed to invalidate the key, or cannot invalidate keys: peers may go on using the memory until the
    /// region is dropped and deregistered ([`crate::MemoryStats::unrevoked`]). [`Error::Gone`]: the region belongs to
    /// another reactor, or its device was removed without releasing it.
    pub fn revoke(&mut self, region: &Region) -> Result<(), Error> {
        self.driver.revoke(region)
    }

    /// Reads the beginning of `remote` into `range` of `local`. `on_send_complete` follows, in the order of sends. If
    /// it reports [`crate::Outcome::Sent`], the bytes are in place. A read uses no credit.
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

    /// As [`Context::read`], into several consecutive ranges: 1 to 4, and no more than `Config::send_depth`.
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
    /// As [`Context::read`].
    pub fn read_vectored(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        locals: &mut [(&mut Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.driver.read(conn, remote, locals)
    }

    /// Writes `range` of `local` to the beginning of `remote`. `on_send_complete` follows when the memory of `local` is
    /// free again. The peer gets no notice; a message that is sent afterwards arrives after the bytes are in place. A
    /// write uses no credit.
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

    /// As [`Context::write`], from several consecutive ranges: 1 to 4.
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
    /// As [`Context::read`].
    pub fn write_vectored(
        &mut self,
        conn: ConnectionId,
        remote: RemoteRegion,
        locals: &[(&Region, Range<usize>)],
    ) -> Result<SendId, SendErrorKind> {
        self.driver.write(conn, remote, locals, None)
    }

    /// As [`Context::write`]. In addition, the peer's `on_immediate` is called with 32 bits when the bytes are in
    /// place. It uses a credit, as a message does. If the device has no such operation, the reactor sends a write and a
    /// small message instead, which needs a `Config::send_depth` of at least 2.
    ///
    /// Example: [`Context::register`].
    ///
    /// # Errors
    /// As [`Context::read`]; with [`crate::Framing::Raw`], `Unsupported` if the device has no such operation.
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

    /// Atomically replaces the 8 bytes at the beginning of `remote` by `swap` if they equal `expected`. The old value
    /// is stored at `offset` of `local`; read it with [`Region::load`] after `on_send_complete`.
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
    /// As [`Context::read`]; `Unsupported` if the device has no atomics; `Misaligned` if the 8 bytes do not begin at a
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

    /// Atomically adds `add` to the 8 bytes at the beginning of `remote`. The old value is stored as with
    /// [`Context::compare_swap`].
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

    /// Fences the next send of any kind: it waits until the reads and atomics before it have completed. Without a
    /// fence, a write may be executed before the response to an earlier read is in place (RFC 5040, section 5.5).
    pub fn fence(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.sends_mut().fence_next());
    }
}
