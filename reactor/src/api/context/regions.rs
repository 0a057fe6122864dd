//! Regions of memory that one-sided operations use and that peers can access.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_transport::mem::Memory;

use crate::driver::Driver;
use crate::error::Error;
use crate::id::ConnectionId;
use crate::memory::material::{Material, PreparedRegion, RegionMaker};
use crate::memory::region::{Region, RegionOptions};

/// The operations on regions of memory, from [`Context::regions`](crate::Context::regions).
#[derive(Debug)]
pub struct RegionContext<'a> {
    pub(super) driver: &'a mut Driver,
}

impl RegionContext<'_> {
    /// Registers `len` bytes of zeroed memory with the device of a connection. `len` ranges from 1
    /// to the limit of the device. The options say which access the peer has. The rights of the
    /// peer end with the connection, except with [`RegionOptions::any_peer`]. The region itself
    /// stays registered until it is dropped. On an RDMA device this call **blocks** while the
    /// system pins the memory, for about a quarter of a second per gibibyte. So register memory
    /// once, and use the region often. For large regions see [`RegionContext::maker`].
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
    ///         if cx.connection(conn).listener().is_some() {
    ///             let options = RegionOptions::new().allow(Access::REMOTE_WRITE);
    ///             let region = cx.regions().register(conn, 4096, &options).expect("memory");
    ///             cx.send(conn, &region.remote().to_bytes()).expect("room");
    ///             self.open = Some(region);
    ///         }
    ///     }
    ///
    ///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
    ///         let remote = RemoteRegion::from_bytes(&message).expect("the server's region");
    ///         let mut source = cx.regions().register(conn, 5, &RegionOptions::new()).expect("memory");
    ///         source.copy_from(0, b"hello").expect("no operation uses it");
    ///         cx.remote(conn).write_with_immediate(remote, &source, 0..5, 7).expect("room");
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
    /// # let server = context.listeners().local_address(listener).expect("it listens");
    /// # context.connect(server)?;
    /// # reactor.run(&mut Program::default())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The connection does not exist any more, the provider does not support the options, or the
    /// system refuses to register the memory. If the reason is the limit on locked memory, the
    /// error says how to raise it. [`Error::Security`] if the connection is secured and the options
    /// give rights to the peer, except with [`crate::Config::allow_plain_remote_memory`].
    pub fn register(&mut self, conn: ConnectionId, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = options.memory(len)?;
        self.driver.register(conn, Material::Own(memory, len), options)
    }

    /// Registers memory like [`RegionContext::register`], but on the device that has the address
    /// `local` of this host. This needs no connection, so a server can register its memory before
    /// the first client connects. If the options give rights to peers, or include
    /// [`crate::Access::READ_SINK`], they must also include [`RegionOptions::any_peer`]. With
    /// `ProviderChoice::Auto` the address selects
    /// the provider, as the address of a listener does. The embedded provider accepts any address.
    ///
    /// Example: [`Region`].
    ///
    /// # Errors
    /// [`Error::NoPeer`] if options that must include `any_peer` lack it; [`Error::Transport`] if
    /// no RDMA device has the address; [`Error::Drained`]; the errors of
    /// [`RegionContext::register`].
    pub fn register_at(&mut self, local: IpAddr, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = options.memory(len)?;
        self.driver.register_at(local, Material::Own(memory, len), options)
    }

    /// Registers the memory of the vector `bytes`. The region owns this memory from now on. The
    /// options have the same meaning as in [`RegionContext::register`].
    ///
    /// Example: [`crate::RemoteContext::read`].
    ///
    /// # Errors
    /// The errors of [`RegionContext::register`]. After an error, the memory is freed.
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
    /// - a memory file that other processes map (`Memory::new_file` and `Memory::map_file` of
    ///   [`crate::transport`]);
    /// - memory of another library (`Memory::from_raw`).
    ///
    /// The program can only copy the bytes of such a region: [`Region::bytes`] returns `None`,
    /// because others may change the bytes at any time. When the region was dropped and its last
    /// operation has ended, the region releases its share of the memory: `Arc::strong_count`
    /// decreases by one. In all other respects, this method is like [`RegionContext::register`].
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use rdma_reactor::transport::mem::Memory;
    /// use rdma_reactor::{Access, ConnectionId, Context, Error, Region, RegionOptions};
    ///
    /// /// Registers memory that other processes map, for the peer to read.
    /// fn share(cx: &mut Context<'_>, conn: ConnectionId, memory: &Arc<Memory>) -> Result<Region, Error> {
    ///     cx.regions().register_memory(conn, Arc::clone(memory), &RegionOptions::new().allow(Access::REMOTE_READ))
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`RegionContext::register`].
    pub fn register_memory(
        &mut self,
        conn: ConnectionId,
        memory: Arc<Memory>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        self.driver.register(conn, Material::Shared(memory), options)
    }

    /// Registers shared memory like [`RegionContext::register_memory`], but on the device that has
    /// the address `local` of this host, without a connection. Use this if several reactors of a
    /// program register the same memory, each reactor with a separate device.
    ///
    /// Example: [the guide](crate::guide::remote_memory).
    ///
    /// # Errors
    /// The errors of [`RegionContext::register_at`].
    pub fn register_memory_at(
        &mut self,
        local: IpAddr,
        memory: Arc<Memory>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        self.driver.register_at(local, Material::Shared(memory), options)
    }

    /// Registers `len` bytes at `base`, which the program has allocated by other means. The address
    /// and the length must be multiples of 8. Returns the region and a share of the memory. When
    /// the region was dropped and `Arc::strong_count` of the share is 1, the library does not use
    /// the bytes any more. In all other respects, this method is like
    /// [`RegionContext::register_memory`].
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
    ///     let (region, _share) = unsafe { cx.regions().register_raw(conn, base, len, &RegionOptions::new())? };
    ///     Ok(region)
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`RegionContext::register`]. This method also fails if the address or the
    /// length is not a multiple of 8.
    ///
    /// # Safety
    /// The rules of [`Memory::from_raw`] apply. As long as the library uses the bytes:
    ///
    /// - The bytes stay mapped for reading and writing.
    /// - The program accesses them only through the region, through the share, or with atomic
    ///   operations on whole aligned words of 8 bytes.
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

    /// Registers `len` bytes of a dma-buf, beginning at `offset`. A dma-buf is memory of a GPU or
    /// another device that its driver has exported. One-sided operations read and write such a
    /// region like any other, and [`crate::Context::send_region`] can send messages from it. The
    /// program cannot access the bytes, so [`Region::copy_to`] and similar methods panic. The
    /// program may close the descriptor after this call. In all other respects, this method is like
    /// [`RegionContext::register`].
    ///
    /// ```
    /// use std::os::fd::BorrowedFd;
    ///
    /// use rdma_reactor::{ConnectionId, Context, Error, Region, RegionOptions};
    ///
    /// /// Registers the first mebibyte of a buffer that a GPU's driver has exported.
    /// fn register_gpu(cx: &mut Context<'_>, conn: ConnectionId, buffer: BorrowedFd<'_>) -> Result<Region, Error> {
    ///     cx.regions().register_dmabuf(conn, buffer, 0, 1 << 20, &RegionOptions::new())
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`RegionContext::register`]. `Unsupported` names the provider or the device if
    /// it does not support dma-bufs. The embedded provider, siw and rxe do not support them.
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

    /// Returns a [`RegionMaker`]. Another thread uses it to prepare memory for a region with
    /// `options`, for the device of the connection. So the slow part, such as pinning gigabytes,
    /// does not block the reactor's thread. [`RegionContext::adopt`] then makes a region of the
    /// prepared memory, without blocking. On the embedded provider, registration takes no time:
    /// [`RegionContext::adopt`] does the whole registration.
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
    ///         let maker = cx.regions().maker(conn, &RegionOptions::new()).expect("it has just come up");
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
    ///         let region = cx.regions().adopt(conn, prepared).expect("the connection is still up");
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
    /// # let server = context.listeners().local_address(listener).expect("it listens");
    /// # context.connect(server)?;
    /// # reactor.run(&mut program)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The connection does not exist any more, or its device was removed.
    pub fn maker(&mut self, conn: ConnectionId, options: &RegionOptions) -> Result<RegionMaker, Error> {
        self.driver.region_maker(conn, options.clone())
    }

    /// Makes a region of memory that a [`RegionMaker`] of this reactor has prepared for the device
    /// of this connection. The peer of the connection gets the rights of the [`RegionOptions`] with
    /// which the program created the maker.
    ///
    /// Example: [`RegionContext::maker`].
    ///
    /// # Errors
    /// [`Error::ForeignDevice`] if the memory was prepared for another device or reactor; the
    /// errors of [`RegionContext::register`].
    pub fn adopt(&mut self, conn: ConnectionId, prepared: PreparedRegion) -> Result<Region, Error> {
        self.driver.adopt(conn, prepared)
    }

    /// Revokes the rights of all peers to a region, immediately. A peer that tries to access the
    /// region afterwards gets an error and loses its connection. After `Ok`, no peer reads or
    /// changes the memory, with one exception: a device with
    /// [`Features::LATE_PLACEMENT`](rdma_transport::Features::LATE_PLACEMENT) still places the rest
    /// of a frame that it has begun to place. Revoking the rights twice is harmless.
    ///
    /// # Errors
    /// The device failed to invalidate the remote key, or cannot invalidate keys. Peers may then
    /// access the memory until the region is dropped and deregistered;
    /// [`crate::MemoryStats::unrevoked`] counts these errors. [`Error::Gone`] if the region belongs
    /// to another reactor, or if its device was removed and did not release the region.
    pub fn revoke(&mut self, region: &Region) -> Result<(), Error> {
        self.driver.revoke(region)
    }
}
