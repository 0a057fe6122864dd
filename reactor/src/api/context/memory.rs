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
    /// ```
    /// use rdma_reactor::{
    ///     Access, Config, ConnectionId, Context, Handler, Immediate, Message, ProviderChoice, Reactor, Region,
    ///     RegionOptions, RemoteRegion,
    /// };
    ///
    /// /// The side that listens has memory, and tells the other side where. That one writes there, and says so.
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
    ///         let remote = RemoteRegion::from_bytes(&message).expect("the place to write to");
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
    /// The connection is gone, the provider lacks what is asked for, or the system refuses (a limit on locked memory is
    /// named with its cure).
    pub fn register(&mut self, conn: ConnectionId, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = options.memory(len)?;
        self.driver.register(conn, Material::Own(memory, len), options)
    }

    /// As [`Context::register`], on the device that has the address `local` of this host, before there is any connection: a server
    /// can have its memory ready when the first client comes. Rights of peers need [`RegionOptions::any_peer`]. With
    /// `ProviderChoice::Auto` the address decides on the provider, as that of a listener does. The embedded provider takes any address.
    ///
    /// Example: [`Region`].
    ///
    /// # Errors
    /// [`Error::NoPeer`] for rights without `any_peer`; [`Error::Transport`] for an address that is on no RDMA device;
    /// [`Error::Drained`]; as [`Context::register`].
    pub fn register_at(&mut self, local: IpAddr, len: usize, options: &RegionOptions) -> Result<Region, Error> {
        let memory = options.memory(len)?;
        self.driver.register_at(local, Material::Own(memory, len), options)
    }

    /// As [`Context::register`], for memory of the program's, which the region owns from now on.
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

    /// As [`Context::register`], for memory that the program keeps a share of, and that others may have, too: a memory file
    /// that other processes map (`Memory::new_file` and `Memory::map_file` of [`crate::transport`]), or memory of another library
    /// (`Memory::from_raw`). The bytes of such a region are never borrowed, only copied: [`Region::bytes`] is `None`. The
    /// region's share goes when it was dropped and its last operation has ended; then `Arc::strong_count` is one less.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use rdma_reactor::transport::mem::Memory;
    /// use rdma_reactor::{Access, ConnectionId, Context, Error, Region, RegionOptions};
    ///
    /// /// Memory that other processes map, which the peer may read.
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

    /// As [`Context::register_memory`], on the device that has the address `local` of this host, before there is any connection, as
    /// [`Context::register_at`]. It is for memory that several reactors of a program register, each one on its own device.
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

    /// As [`Context::register_memory`], for `len` bytes at `base`, which the program has got on its own. Address and length are
    /// multiples of 8. The share that comes with the region says when the bytes are the program's alone again:
    /// when the region was dropped and `Arc::strong_count` of the share is 1.
    ///
    /// ```
    /// use std::ptr::NonNull;
    ///
    /// use rdma_reactor::{ConnectionId, Context, Error, Region, RegionOptions};
    ///
    /// /// Memory of the program's own, which stays mapped for as long as the program runs.
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
    /// ```
    /// use std::os::fd::BorrowedFd;
    ///
    /// use rdma_reactor::{ConnectionId, Context, Error, Region, RegionOptions};
    ///
    /// /// The first mebibyte of a buffer that a GPU's driver has exported.
    /// fn register_gpu(cx: &mut Context<'_>, conn: ConnectionId, buffer: BorrowedFd<'_>) -> Result<Region, Error> {
    ///     cx.register_dmabuf(conn, buffer, 0, 1 << 20, &RegionOptions::new())
    /// }
    /// ```
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
    ///             // This may take long, and the loop goes on.
    ///             let prepared = maker.prepare(1 << 20).expect("memory");
    ///             // A reactor that is gone needs no memory.
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
    /// The connection or its device is gone.
    pub fn region_maker(&mut self, conn: ConnectionId, options: &RegionOptions) -> Result<RegionMaker, Error> {
        self.driver.region_maker(conn, options.clone())
    }

    /// Makes a region of what a [`RegionMaker`] of this reactor has prepared for the device of a connection. The rights are those
    /// of the peer of this connection, as the options say.
    ///
    /// Example: [`Context::region_maker`].
    ///
    /// # Errors
    /// [`Error::ForeignDevice`] for another device or reactor; as [`Context::register`].
    pub fn adopt(&mut self, conn: ConnectionId, prepared: PreparedRegion) -> Result<Region, Error> {
        self.driver.adopt(conn, prepared)
    }

    /// Takes the rights of all peers to a region back, immediately. When this has returned `Ok`, nothing of a peer's touches the
    /// memory, except that devices with [`Features::LATE_PLACEMENT`](rdma_transport::Features::LATE_PLACEMENT) place the rest of the
    /// frame that they are placing. A peer that tries gets an error, and loses its connection. Harmless when repeated.
    ///
    /// # Errors
    /// The device keeps the key, or cannot take keys back: peers may go on using the memory until the region is dropped and
    /// deregistered ([`crate::MemoryStats::unrevoked`]). [`Error::Gone`]: the region is another reactor's, or its device is gone and
    /// has kept it.
    pub fn revoke(&mut self, region: &Region) -> Result<(), Error> {
        self.driver.revoke(region)
    }

    /// Reads the beginning of `remote` into `range` of `local`. `on_send_complete` follows, in the order of sends; the
    /// bytes are there when it says [`crate::Outcome::Sent`]. Needs no credit.
    ///
    /// ```
    /// use rdma_reactor::{
    ///     Access, Config, ConnectionId, Context, Handler, Message, Outcome, ProviderChoice, Reactor, Region,
    ///     RegionOptions, RemoteRegion, SendId,
    /// };
    ///
    /// /// The side that listens has memory to read, and tells the other side where.
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
    ///         let remote = RemoteRegion::from_bytes(&message).expect("the place to read from");
    ///         let mut copy = cx.register(conn, remote.len as usize, &RegionOptions::new()).expect("memory");
    ///         let all = 0..copy.len();
    ///         cx.read(conn, remote, &mut copy, all).expect("room");
    ///         self.copy = Some(copy);
    ///     }
    ///
    ///     fn on_send_complete(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: SendId, outcome: Outcome) {
    ///         assert!(outcome.is_sent());
    ///         // The message that told the place has ended, too, and that side has no copy.
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

    /// As [`Context::read`], into several ranges, one after another: 1 to 4, and no more than
    /// `Config::send_depth`.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Reads a header of 64 bytes and what follows into two regions.
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

    /// Writes `range` of `local` to the beginning of `remote`. `on_send_complete` follows, when the memory of `local` is
    /// free again. The peer is not told; a message sent afterwards arrives after the bytes are there. Needs no credit.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Writes all of a region, and tells the peer behind it.
    /// fn publish(cx: &mut Context<'_>, conn: ConnectionId, to: RemoteRegion, region: &Region) -> Result<(), SendErrorKind> {
    ///     cx.write(conn, to, region, 0..region.len())?;
    ///     cx.send(conn, b"it is there").map(drop)
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

    /// As [`Context::write`], from several ranges, one after another: 1 to 4.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Writes a header and a body of two regions, one after the other.
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

    /// As [`Context::write`], and the peer's `on_immediate` is called with 32 bits when the bytes are there. Takes a
    /// credit like a message. Where the device has no such operation, a write and a small message do the same,
    /// which takes a `Config::send_depth` of 2.
    ///
    /// Example: [`Context::register`].
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
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Takes a lock in the peer's memory: it is free while it is 0. The old value lands in the first word of `old`.
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
    /// ```
    /// use rdma_reactor::{ConnectionId, Context, Region, RemoteRegion, SendErrorKind};
    ///
    /// /// Draws a ticket from a counter in the peer's memory. The ticket lands in the first word of `ticket`.
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

    /// Lets the next send of any kind wait until the reads and atomics before it are done. Without this a write may
    /// overtake the answer to a read (RFC 5040 section 5.5).
    pub fn fence(&mut self, conn: ConnectionId) {
        self.driver.input(conn, |conn, _| conn.sends_mut().fence_next());
    }
}
