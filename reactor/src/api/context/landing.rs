//! Operations on offered messages: read an offered message directly into the program's own memory, refuse an offered
//! message, and offer a message to the peer.

use std::ops::Range;

use super::Context;
use crate::error::SendErrorKind;
use crate::id::{ConnectionId, OfferId, SendId};
use crate::memory::region::Region;

impl Context<'_> {
    /// Accepts an offered message into a region, from `offset` on. The device reads the message
    /// from the peer's memory directly into the region. Call this within
    /// [`Handler::on_offer`](crate::Handler::on_offer). The reactor calls
    /// [`Handler::on_landed`](crate::Handler::on_landed) once, when the message has arrived or the
    /// connection has ended. Until `on_landed`, the bytes of the message in the region are lent to
    /// the device, and [`Region::bytes`] returns `None`. The program can drop the region, but the
    /// reactor deregisters it only when no read into it is in flight. The memory of the region does
    /// not count towards [`crate::LargeMessageSettings::memory`].
    ///
    /// ```
    /// use rdma_reactor::{
    ///     Access, Config, ConnectionId, Context, Failure, Handler, Offered, ProviderChoice, Reactor, Region, RegionOptions,
    /// };
    ///
    /// const BLOCK: usize = 1 << 20;
    ///
    /// /// The server stores the client's blocks; the tag of a block is its index.
    /// #[derive(Default)]
    /// struct Store {
    ///     blocks: Option<Region>,
    /// }
    ///
    /// impl Handler for Store {
    ///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
    ///         if cx.connection(conn).listener().is_some() {
    ///             self.blocks = Some(cx.regions().register(conn, 16 * BLOCK, &RegionOptions::new()).expect("memory"));
    ///         } else {
    ///             let readable = RegionOptions::new().allow(Access::REMOTE_READ);
    ///             let block = cx.regions().register_vec(conn, vec![7; BLOCK], &readable).expect("memory");
    ///             cx.offer(conn, &block, 0..BLOCK, 3).expect("a new connection has room");
    ///         }
    ///     }
    ///
    ///     fn on_offer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered) {
    ///         let (Some(blocks), Some(nth @ 0..16)) = (&mut self.blocks, offer.tag) else { return };
    ///         if offer.len as usize > BLOCK || cx.land(conn, offer.id, blocks, nth as usize * BLOCK).is_err() {
    ///             let _ = cx.refuse_offer(conn, offer.id);
    ///         }
    ///     }
    ///
    ///     fn on_landed(&mut self, cx: &mut Context<'_>, _: ConnectionId, offer: Offered, result: Result<(), Failure>) {
    ///         assert_eq!((offer.tag, result), (Some(3), Ok(())));
    ///         let bytes = self.blocks.as_ref().and_then(Region::bytes).expect("nobody writes them now");
    ///         assert!(bytes[3 * BLOCK..4 * BLOCK] == [7; BLOCK]);
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
    /// # reactor.run(&mut Store::default())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`SendErrorKind::NoOffer`] if the call is not within `on_offer` for this offer, or if the offer was answered
    ///   before.
    /// - [`SendErrorKind::OutOfBounds`] if the message does not fit into the region from `offset` on.
    /// - [`SendErrorKind::Unsupported`] on a secured connection, because the reactor has to decrypt the message first.
    /// - [`SendErrorKind::NotASink`] and [`SendErrorKind::ForeignRegion`] for the same reasons as
    ///   [`crate::RemoteContext::read`].
    ///
    /// After an error, the program can still answer the offer in another way.
    pub fn land(
        &mut self,
        conn: ConnectionId,
        offer: OfferId,
        region: &mut Region,
        offset: usize,
    ) -> Result<(), SendErrorKind> {
        self.driver.land(conn, offer, region, offset)
    }

    /// Refuses an offered message. Call this within [`Handler::on_offer`](crate::Handler::on_offer). The reactor does
    /// not read the message, and the peer's send ends with [`Outcome::Refused`](crate::Outcome::Refused).
    ///
    /// Example: [`Context::land`].
    ///
    /// # Errors
    /// [`SendErrorKind::NoOffer`] for the same reasons as [`Context::land`]; [`SendErrorKind::Unsupported`] if the peer
    /// runs a version of this library that does not support refusals.
    pub fn refuse_offer(&mut self, conn: ConnectionId, offer: OfferId) -> Result<(), SendErrorKind> {
        self.driver.refuse_offer(conn, offer)
    }

    /// Offers a part of a region as a message. The length is 1 byte to the peer's
    /// [`LargeMessageSettings::max_message`](crate::LargeMessageSettings::max_message); even a message that fits into
    /// one buffer can be offered. The peer's device reads the message directly from the region. The peer's
    /// [`Handler::on_offer`](crate::Handler::on_offer) receives `tag`. The reactor calls `on_send_complete` when the
    /// peer has read or refused the message, or when the connection has ended. Until then the program cannot change
    /// this part of the region. If the peer runs a version of this library without tags, the peer receives the message
    /// without the tag.
    ///
    /// Example: [`Context::land`].
    ///
    /// # Errors
    /// See [`SendErrorKind`], in particular [`SendErrorKind::NotReadable`] without `Access::REMOTE_READ`,
    /// [`SendErrorKind::Empty`] for an empty message, and [`SendErrorKind::Unsupported`] on a secured connection. After
    /// `WouldBlock`, `on_writable` follows once.
    pub fn offer(
        &mut self,
        conn: ConnectionId,
        region: &Region,
        range: Range<usize>,
        tag: u64,
    ) -> Result<SendId, SendErrorKind> {
        self.driver.offer(conn, region, range, tag)
    }
}
