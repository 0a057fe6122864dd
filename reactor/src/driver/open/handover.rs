//! Assigns each incoming connect request to a reactor of the group, before anything is allocated for the request.

use std::net::{IpAddr, SocketAddr};

use log::Level;
use rdma_transport::cm::CmId;
use rdma_transport::provider::Provider;
use rdma_transport::slab::Key;

use super::accept::Acceptor;
use super::group::{Arrival, Place};
use super::request::{IncomingRequest, RequestOrigin};
use crate::driver::World;
use crate::id::ListenerId;
use crate::options::ListenOptions;
use crate::providers::{HANDOVER, Handle, role};

impl Acceptor {
    /// Returns the connect request with the connection-manager id `cm`, which arrived on a listener
    /// of this reactor.
    pub(crate) fn request(
        &self,
        world: &World,
        (listener, options): (Key, &ListenOptions),
        cm: Handle<CmId>,
        device: usize,
        (peer, private_data): (SocketAddr, Box<[u8]>),
    ) -> IncomingRequest {
        let ListenOptions { framing, service, ref security, .. } = *options;
        let security = security.as_ref().unwrap_or(&world.config.security).clone();
        let reactor = self.membership.as_ref().map_or(0, |membership| membership.index);
        let listener = ListenerId::new(world.tag(), listener);
        // A listener on an IPv6 address may also accept IPv4 peers. It reports their addresses as IPv4-mapped IPv6 addresses (RFC 4291,
        // section 2.5.5.2).
        let peer = match peer.ip().to_canonical() {
            ip @ IpAddr::V4(_) => SocketAddr::new(ip, peer.port()),
            IpAddr::V6(_) => peer,
        };
        let origin = RequestOrigin { reactor, listener, framing, service, security, peer, private_data };
        IncomingRequest { cm, device, origin, placed: false }
    }

    /// Returns true if this reactor is in a group, so that `on_place` must be called for a request.
    pub(crate) const fn asks_for_place(&self) -> bool {
        self.membership.is_some()
    }

    /// Assigns a request to a reactor of the group, and sends it there. Returns the request if this reactor must answer it.
    pub(crate) fn place(
        &mut self,
        world: &mut World,
        mut request: IncomingRequest,
        place: Place,
    ) -> Option<IncomingRequest> {
        let Some(membership) = &self.membership else { return Some(request) };
        match membership.place(place) {
            // No reactor of the group accepts the request, so this reactor refuses it.
            None => Some(request),
            Some(index) if index == membership.index => {
                request.placed = true;
                Some(request)
            }
            Some(index) => self.hand_over(world, request, index),
        }
    }

    /// Sends a request to the reactor with this index, to which it was assigned. If the request cannot be sent, returns it, and this
    /// reactor must answer it.
    fn hand_over(&mut self, world: &mut World, request: IncomingRequest, index: usize) -> Option<IncomingRequest> {
        let membership = self.membership.as_ref()?;
        let (provider, cm) = world.providers.of(request.cm);
        let detached = match role(provider, Provider::handover, HANDOVER).and_then(|role| role.detach(cm)) {
            Ok(id) => Handle { provider: request.cm.provider, id },
            Err(error) => {
                log::debug!("{} is not handed over: {error}", request.origin.peer);
                membership.unplace(index);
                return Some(request);
            }
        };
        match membership.send(index, Arrival { detached, origin: request.origin }) {
            Ok(()) => {
                world.stats.connections.handed_over += 1;
                None
            }
            Err(arrival) => {
                // The chosen reactor was dropped before the request could be sent to it, so this reactor handles the request.
                membership.unplace(index);
                self.take_in(world, *arrival, false)
            }
        }
    }

    /// Stage 9: returns the next request that another reactor has sent to this one. `left` is the number of requests that this turn may
    /// still handle. Returns `None` if there is no request, or if `left` is 0.
    pub(crate) fn next_arrival(&mut self, world: &mut World, left: &mut usize) -> Option<IncomingRequest> {
        while *left > 0 {
            let arrival = self.membership.as_ref()?.next_arrival()?;
            *left -= 1;
            world.stats.connections.taken_over += 1;
            let request = self.take_in(world, arrival, true);
            if request.is_some() {
                return request;
            }
        }
        None
    }

    fn take_in(&mut self, world: &mut World, arrival: Arrival, placed: bool) -> Option<IncomingRequest> {
        let Arrival { detached, origin } = arrival;
        match world.providers.attach(detached, world.now) {
            Ok((cm, device)) => Some(IncomingRequest { cm, device, origin, placed }),
            Err(error) => {
                world.log_refusal(origin.peer, Level::Warn, &error.to_string());
                world.stats.connections.refused += 1;
                self.request_done(placed);
                None
            }
        }
    }

    /// Notes that a request has become a connection, or was refused. `placed` is true if the group has assigned the request to this
    /// reactor.
    pub(crate) fn request_done(&mut self, placed: bool) {
        if let Some(membership) = self.membership.as_mut().filter(|_| placed) {
            membership.done();
        }
    }
}
