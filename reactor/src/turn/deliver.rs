//! Calls the program. This file makes all callbacks.

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
use crate::driver::{DeviceEvent, Driver, IncomingRequest};
use crate::error::Outcome;
use crate::id::{ConnectionId, IoId, SendId, TimerId};
use crate::memory::landing::Offered;
use crate::memory::region::Region;
use crate::seam::poller::Readiness;

/// The parts of a device that its messages borrow, so that callbacks can borrow the driver.
pub(super) type Lender = (usize, Arc<Slabs>, Arc<ReturnChannel>);

/// The driver and the program, for the stages of a turn that make callbacks.
pub(super) struct Delivery<'a, M, H: ?Sized> {
    pub(super) driver: &'a mut Driver,
    pub(super) endpoints: &'a mut Endpoints,
    pub(super) receiver: &'a mut CommandReceiver<M>,
    pub(super) handler: &'a mut H,
    /// The lender of the last message, cached for the next one.
    pub(super) lender: &'a mut Option<Lender>,
    /// True if a callback ran, or the reactor made progress, in this turn.
    pub(super) progressed: bool,
}

/// Calls a callback of the handler for a connection, for an endpoint, or for neither. Returns `None` if it panicked.
macro_rules! callback {
    ($self:ident.$name:ident($of:expr $(, $argument:expr)*)) => {{
        let handler = &mut *$self.handler;
        call((&mut *$self.driver, &mut *$self.endpoints), ($of, stringify!($name)), |cx| handler.$name(cx $(, $argument)*))
    }};
}

impl<M, H: Handler<M> + ?Sized> Delivery<'_, M, H> {
    /// Asks the program which reactor accepts a peer's connect request.
    pub(super) fn place(&mut self, request: IncomingRequest) {
        let request = if self.driver.asks_for_place(&request) {
            match callback!(self.on_place(CallbackSubject::Other, told(&request))) {
                Some(place) => self.driver.place(request, place),
                None => return self.driver.refuse(&request, &[]),
            }
        } else {
            Some(request)
        };
        if let Some(request) = request {
            self.answer(request);
        }
    }

    /// Lets the program accept or refuse a peer's connect request for this reactor.
    pub(super) fn answer(&mut self, request: IncomingRequest) {
        let Some(request) = self.driver.screen(request) else { return };
        match callback!(self.on_connect_request(CallbackSubject::Other, told(&request))) {
            Some(Decision::Accept) => self.driver.accept(request, &[]),
            Some(Decision::AcceptWith(data)) => self.driver.accept(request, &data),
            Some(Decision::Reject(data)) => self.driver.refuse(&request, &data),
            None => self.driver.refuse(&request, &[]),
        }
    }

    /// Reports an event of a device.
    pub(super) fn device_event(&mut self, event: &DeviceEvent) {
        callback!(self.on_device_event(CallbackSubject::Other, event));
    }

    /// Reports that a timer of the program has expired.
    pub(super) fn timer(&mut self, key: Key, token: u64) {
        let timer = TimerId::new(self.driver.tag(), key);
        callback!(self.on_timer(CallbackSubject::Other, timer, token));
    }

    /// Reports readiness of a descriptor of the program.
    pub(super) fn io_ready(&mut self, key: Key, readiness: Readiness) {
        let io = IoId::new(self.driver.tag(), key);
        callback!(self.on_io_ready(CallbackSubject::Other, io, readiness));
    }

    /// Delivers a message of another thread.
    pub(super) fn woken(&mut self, message: M) {
        callback!(self.on_wake(CallbackSubject::Other, message));
    }

    /// Reports that the reactor is draining.
    pub(super) fn drain(&mut self, deadline: Duration) {
        callback!(self.on_drain(CallbackSubject::Other, deadline));
    }

    /// Makes the callbacks that are due.
    #[inline]
    pub(super) fn events(&mut self) {
        if let Some((id, arrived)) = self.driver.next_arrived() {
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
        while let Some((id, event)) = self.driver.next_event() {
            self.progressed = true;
            self.event(id, event);
        }
    }

    #[inline]
    pub(super) fn event(&mut self, id: ConnectionId, event: Event) {
        let of = CallbackSubject::Connection(id);
        // A callback that panicked has been handled.
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
            Some(buffer) => self.driver.free_receive(device, buffer, shared),
            None => self.driver.keep_message(id),
        }
    }

    #[cold]
    fn identified(&mut self, id: ConnectionId) {
        let Some(peer) = self.driver.identity(id).cloned() else { return };
        let judged = callback!(self.on_identity(CallbackSubject::Connection(id), id, &peer));
        // A callback that panicked has ended the connection.
        let refusal = judged.map_or(Some("the local side has failed".to_owned()), Result::err);
        self.driver.input(id, |conn, env| conn.judged(refusal, env));
    }

    #[cold]
    fn fragments(&mut self, id: ConnectionId, fragments: Box<Fragments>) {
        let device = fragments.device;
        let Some((_, channel)) = self.driver.lender(device) else { return };
        let joined = self.driver.join(id, fragments);
        let receives = joined.receives.len();
        let mut joined = Some(joined);
        let content = Content::Large(LargeContent::Joined { joined: &mut joined, channel: &channel });
        callback!(self.on_recv(CallbackSubject::Connection(id), id, Message { connection: id, content }));
        match joined {
            Some(joined) => self.driver.end_joined(id, device, joined),
            None => self.driver.keep_joined(id, receives),
        }
    }

    /// Asks the program where a message longer than one buffer is to be placed.
    #[cold]
    fn offered(&mut self, id: ConnectionId, offered: Offered) {
        callback!(self.on_offer(CallbackSubject::Connection(id), id, offered));
        self.driver.input(id, |conn, env| conn.settle_offer(offered.id, env));
    }

    fn fetched(&mut self, id: ConnectionId, mut region: Box<Region>) {
        if let Err(error) = region.make_private() {
            log::warn!("{id}: memory for a copy of a message of {} bytes: {error}", region.len());
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
        /// Calls a callback of the handler of datagrams, if the program has one.
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

/// Returns the view of a request that the program receives.
fn told(request: &IncomingRequest) -> ConnectRequest<'_> {
    let (listener, reactor, peer, private_data) = request.parts();
    ConnectRequest::new(listener, reactor, peer, private_data)
}
