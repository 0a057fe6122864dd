//! Makes the callbacks of the program. No other file makes them.

use std::sync::Arc;
use std::time::Duration;

use rdma_transport::slab::Key;

use super::contain::{CallbackSubject, call};
use super::serve::CommandReceiver;
use crate::api::handler::{ConnectRequest, Decision, Handler};
use crate::api::message::{Content, LargeContent, Message};
use crate::conn::effects::{Arrived, Event, Fragments};
#[cfg(feature = "datagram")]
use crate::datagram::endpoints::EndpointEvent;
use crate::datagram::endpoints::Endpoints;
#[cfg(feature = "datagram")]
use crate::datagram::{Datagram, EndpointId};
use crate::device::pool::Slabs;
use crate::device::return_channel::ReturnChannel;
use crate::driver::open::accept::{judge_peer, judge_request};
use crate::driver::{DeviceEvent, Driver, IncomingRequest, failure_log};
use crate::error::Outcome;
use crate::id::{ConnectionId, IoId, SendId, TimerId};
use crate::memory::landing::Offered;
use crate::memory::region::Region;
use crate::seam::poller::Readiness;

/// The index of a device, the slabs of its buffers, and their return channel. A message borrows the slabs and the channel from this tuple,
/// and not from the driver, so that the callback can borrow the driver.
pub(super) type Lender = (usize, Arc<Slabs>, Arc<ReturnChannel>);

/// The state that the stages of a turn need to make callbacks: the driver, the endpoints and the handler.
pub(super) struct Delivery<'a, M, H: ?Sized> {
    pub(super) driver: &'a mut Driver,
    pub(super) endpoints: &'a mut Endpoints,
    pub(super) receiver: &'a mut CommandReceiver<M>,
    pub(super) handler: &'a mut H,
    /// The lender of the last message. The next message most likely needs the same lender.
    pub(super) lender: &'a mut Option<Lender>,
    /// True if a callback ran, or the reactor made progress, in this turn.
    pub(super) progressed: bool,
}

/// Makes a callback of the handler. Evaluates to `Some` with the result of the callback, or to `None` if the callback panicked and the
/// panic was caught.
macro_rules! callback {
    ($self:ident.$name:ident($of:expr $(, $argument:expr)*)) => {{
        let handler = &mut *$self.handler;
        call((&mut *$self.driver, &mut *$self.endpoints), ($of, stringify!($name)), |cx| handler.$name(cx $(, $argument)*))
    }};
}

impl<M, H: Handler<M> + ?Sized> Delivery<'_, M, H> {
    /// Assigns a peer's connect request to a reactor. If this reactor is in a group, checks the
    /// peer, and calls `on_place`, in which the program chooses the reactor. Answers the request if
    /// this reactor is chosen, or if the request cannot be handed over.
    pub(super) fn place(&mut self, request: IncomingRequest) {
        let request = if self.driver.acceptor.asks_for_place() {
            let Some(request) = self.driver.acceptor.screen(&mut self.driver.world, request, judge_peer) else {
                return;
            };
            match callback!(self.on_place(CallbackSubject::Other, connect_request(&request))) {
                Some(place) => self.driver.acceptor.place(&mut self.driver.world, request, place),
                None => return self.driver.acceptor.refuse(&mut self.driver.world, &request, &[]),
            }
        } else {
            Some(request)
        };
        if let Some(request) = request {
            self.answer(request);
        }
    }

    /// Calls `on_connect_request`, in which the program accepts or refuses a peer's connect request.
    pub(super) fn answer(&mut self, request: IncomingRequest) {
        let Some(request) = self.driver.acceptor.screen(&mut self.driver.world, request, judge_request) else { return };
        match callback!(self.on_connect_request(CallbackSubject::Other, connect_request(&request))) {
            Some(Decision::Accept) => self.driver.accept(request, &[]),
            Some(Decision::AcceptWith(data)) => self.driver.accept(request, &data),
            Some(Decision::Reject(data)) => self.driver.acceptor.refuse(&mut self.driver.world, &request, &data),
            None => self.driver.acceptor.refuse(&mut self.driver.world, &request, &[]),
        }
    }

    /// Calls `on_device_event` with an event of a device.
    pub(super) fn device_event(&mut self, event: &DeviceEvent) {
        callback!(self.on_device_event(CallbackSubject::Other, event));
    }

    /// Calls `on_timer`, because a timer of the program has expired.
    pub(super) fn timer(&mut self, key: Key, token: u64) {
        let timer = TimerId::new(self.driver.tag(), key);
        callback!(self.on_timer(CallbackSubject::Other, timer, token));
    }

    /// Calls `on_io_ready`, because a descriptor of the program has become ready.
    pub(super) fn io_ready(&mut self, key: Key, readiness: Readiness) {
        let io = IoId::new(self.driver.tag(), key);
        callback!(self.on_io_ready(CallbackSubject::Other, io, readiness));
    }

    /// Calls `on_wake` with a message that another thread has sent through a `ReactorHandle`.
    pub(super) fn woken(&mut self, message: M) {
        callback!(self.on_wake(CallbackSubject::Other, message));
    }

    /// Calls `on_drain`, because the reactor is draining.
    pub(super) fn drain(&mut self, deadline: Duration) {
        callback!(self.on_drain(CallbackSubject::Other, deadline));
    }

    /// Makes all callbacks that are pending.
    #[inline]
    pub(super) fn events(&mut self) {
        if let Some((id, arrived)) = self.driver.effects.arrived.take() {
            self.message(id, arrived);
        }
        self.connection_events();
        #[cfg(feature = "datagram")]
        while let Some(event) = self.endpoints.next_event() {
            self.datagram_event(event);
            self.connection_events();
        }
    }

    #[inline]
    fn connection_events(&mut self) {
        while let Some((id, event)) = self.driver.effects.next_event() {
            self.progressed = true;
            self.event(id, event);
        }
    }

    #[inline]
    pub(super) fn event(&mut self, id: ConnectionId, event: Event) {
        let of = CallbackSubject::Connection(id);
        // The result is ignored. If it is `None`, the callback has panicked and the panic was caught, so the connection is already ending.
        let _ = match event {
            Event::Message(arrived) => return self.message(id, arrived),
            Event::Sent { send, count, outcome } => return self.sent(id, (send, count), outcome),
            Event::Writable => callback!(self.on_writable(of, id)),
            Event::Identified => return self.identified(id),
            Event::Connected => callback!(self.on_connect(of, id)),
            Event::Fragments(fragments) => return self.fragments(id, fragments),
            Event::Offered(offered) => return self.offered(id, offered),
            Event::Fetched(region) => return self.fetched(id, region),
            Event::Landed(ended) => callback!(self.on_landed(of, id, ended.0, ended.1)),
            Event::Transferred(ended) => callback!(self.on_transfer(of, id, ended.0, ended.1)),
            Event::Immediate(immediate) => callback!(self.on_immediate(of, id, immediate)),
            Event::Disconnected(reason) => callback!(self.on_disconnect(of, id, *reason)),
            Event::ConnectError(error) => callback!(self.on_connect_error(of, id, *error)),
        };
    }

    #[inline]
    fn sent(&mut self, id: ConnectionId, (first, count): (SendId, u32), outcome: Outcome) {
        for nth in 0..count {
            callback!(self.on_send_complete(CallbackSubject::Connection(id), id, first.after(nth), outcome));
        }
    }

    #[inline]
    fn message(&mut self, id: ConnectionId, arrived: Arrived) {
        let Arrived { mut buffer, start, end, device, shared } = arrived;
        let device = usize::from(device);
        let known =
            self.lender.as_ref().is_some_and(|(of, slabs, _)| *of == device && self.driver.is_lender(device, slabs));
        if !known {
            *self.lender = self.driver.lender(device).map(|(slabs, channel)| (device, slabs, channel));
        }
        let Some((_, slabs, channel)) = &*self.lender else { return };
        let (start, end) = (start as usize, end as usize);
        let content = Content::Pooled { start, end, buffer: &mut buffer, slabs, channel };
        callback!(self.on_recv(CallbackSubject::Connection(id), id, Message { connection: id, content }));
        match buffer {
            Some(buffer) => self.driver.devices.buffers(device).free_receive(buffer, shared),
            None => self.driver.keep_message(id),
        }
    }

    #[cold]
    fn identified(&mut self, id: ConnectionId) {
        let Some(peer) = self.driver.identity(id).cloned() else { return };
        let judged = callback!(self.on_identity(CallbackSubject::Connection(id), id, &peer));
        // If the callback has panicked, the connection is already ending, so this text is never sent.
        let refusal = judged.map_or(Some("the local side has failed".to_owned()), Result::err);
        self.driver.input(id, |conn, env| conn.judged(refusal, env));
    }

    #[cold]
    fn fragments(&mut self, id: ConnectionId, fragments: Box<Fragments>) {
        let device = fragments.device;
        let Some((_, channel)) = self.driver.lender(device) else { return };
        let joined = self.driver.large.join(&mut self.driver.world, id, fragments);
        let receives = joined.receives.len();
        let mut joined = Some(joined);
        let content = Content::Large(LargeContent::Joined { joined: &mut joined, channel: &channel });
        callback!(self.on_recv(CallbackSubject::Connection(id), id, Message { connection: id, content }));
        match joined {
            Some(joined) => self.driver.end_joined(id, device, joined),
            None => (0..receives).for_each(|_| self.driver.keep_message(id)),
        }
    }

    /// Calls `on_offer`, in which the program chooses the memory for a large message, or refuses the message. If the program does neither,
    /// the library provides the memory.
    #[cold]
    fn offered(&mut self, id: ConnectionId, offered: Offered) {
        callback!(self.on_offer(CallbackSubject::Connection(id), id, offered));
        self.driver.input(id, |conn, env| conn.settle_offer(offered.id, env));
    }

    fn fetched(&mut self, id: ConnectionId, mut region: Box<Region>) {
        if let Err(error) = region.make_private() {
            failure_log!(self.driver, id, "memory for a copy of a message of {} bytes: {error}", region.len());
            return self.driver.abort(id);
        }
        let mut region = Some(region);
        let message = Message { connection: id, content: Content::Large(LargeContent::Region(&mut region)) };
        callback!(self.on_recv(CallbackSubject::Connection(id), id, message));
    }

    #[cfg(feature = "datagram")]
    #[cold]
    fn datagram_event(&mut self, event: EndpointEvent) {
        let tag = self.driver.tag();
        let key = |endpoint: EndpointId| endpoint.key(tag).unwrap_or(Key::NONE);
        let Self { driver, endpoints, handler, .. } = self;
        let mut handler = handler.datagrams();
        /// Makes a callback of the program's handler for datagrams, if there is one.
        macro_rules! callback {
            ($name:ident($endpoint:expr $(, $argument:expr)*)) => {
                if let Some(handler) = &mut handler {
                    let of = (CallbackSubject::Endpoint($endpoint), stringify!($name));
                    call((&mut **driver, &mut **endpoints), of, |cx| handler.$name(cx, $endpoint $(, $argument)*));
                }
            };
        }
        match event {
            EndpointEvent::Datagram { endpoint, buffer, len, completion } => {
                if let Some(slabs) = endpoints.slabs_of(driver, key(endpoint)) {
                    if let Some(datagram) = Datagram::of(&completion, slabs.bytes(&buffer, len)) {
                        callback!(on_datagram(endpoint, datagram));
                    }
                }
                endpoints.repost(key(endpoint), buffer);
            }
            EndpointEvent::Closed { endpoint, reason } => {
                callback!(on_endpoint_closed(endpoint, reason));
                endpoints.release(driver, key(endpoint));
            }
            EndpointEvent::Sent { endpoint, send, outcome } => callback!(on_datagram_sent(endpoint, send, outcome)),
            EndpointEvent::Writable { endpoint } => callback!(on_datagram_writable(endpoint)),
            EndpointEvent::Peer { endpoint, address, found } => callback!(on_peer(endpoint, address, found)),
            EndpointEvent::Joined { endpoint, group, joined } => callback!(on_join(endpoint, group, joined)),
        }
    }
}

/// Returns the properties of a connect request that the program may see.
fn connect_request(request: &IncomingRequest) -> ConnectRequest<'_> {
    let (listener, reactor, peer, private_data) = request.origin.parts();
    ConnectRequest::new(listener, reactor, peer, private_data)
}
