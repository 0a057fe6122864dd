//! Connect requests, placed on a reactor of the group before anything is allocated for them.

use std::net::SocketAddr;

use rdma_transport::cm::CmId;
use rdma_transport::provider::DeviceId;

use crate::config::Framing;
use crate::context::Context;
use crate::core::{Core, Owner};
use crate::drain::Drain;
use crate::frame::{Greeting, RejectReason};
use crate::handler::{ConnectRequest, Handler};
use crate::id::ListenerId;
use crate::reactors::Arrival;

/// Requests of other reactors taken in one turn before the other stages get theirs.
const ARRIVALS_PER_TURN: usize = 256;

/// A connect request, wherever it came in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Incoming<'a> {
    /// Index of the reactor that listens, and its listener.
    pub(crate) reactor: usize,
    pub(crate) listener: ListenerId,
    pub(crate) framing: Framing,
    pub(crate) device: DeviceId,
    pub(crate) peer: SocketAddr,
    pub(crate) private_data: &'a [u8],
}

impl<'a> Incoming<'a> {
    pub(crate) fn greeting(&self) -> Result<Greeting<'a>, RejectReason> {
        match self.framing {
            Framing::Raw => Ok(Greeting::reject(RejectReason::Refused, self.private_data)),
            Framing::Credits => Greeting::parse(self.private_data).and_then(Greeting::checked),
        }
    }

    /// What the handler is told of it.
    pub(crate) const fn request(&self, greeting: &Greeting<'a>) -> ConnectRequest<'a> {
        let Self { reactor, listener, peer, .. } = *self;
        ConnectRequest { listener, reactor, peer, private_data: greeting.user }
    }
}

impl Core {
    /// A request on a listener of this reactor: taken here, or handed over.
    pub(crate) fn connect_request<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        cm: CmId,
        listener: CmId,
        device: DeviceId,
        peer: SocketAddr,
        private_data: &[u8],
    ) {
        let Some(Owner::Listener(listener)) = self.owner(listener) else {
            self.refuse(cm, Framing::Raw, RejectReason::Busy, &[]);
            return;
        };
        let Some(framing) = self.listeners.get(listener.0).map(|l| l.framing) else { return };
        let reactor = self.membership.as_ref().map_or(0, |membership| membership.index);
        let incoming = Incoming { reactor, listener, framing, device, peer, private_data };
        match self.place(handler, &incoming) {
            None => self.answer(handler, cm, &incoming),
            Some(index) if index == reactor => self.placed(|core| core.answer(handler, cm, &incoming)),
            Some(index) => self.hand_over(handler, cm, &incoming, index),
        }
    }

    /// The reactor that a request is to go to; `None` without a group, or when nobody takes it.
    fn place<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, incoming: &Incoming<'_>) -> Option<usize> {
        self.membership.as_ref()?;
        let greeting = incoming.greeting().ok()?;
        let place = handler.on_place(&mut Context { core: self }, incoming.request(&greeting));
        self.membership.as_ref()?.place(place)
    }

    /// Does with a request that was placed here what makes a connection of it, or refuses it.
    fn placed(&mut self, act: impl FnOnce(&mut Self)) {
        if let Some(membership) = &mut self.membership {
            membership.begin();
        }
        act(self);
        if let Some(membership) = &mut self.membership {
            membership.done();
        }
    }

    /// Hands a request to the reactor it was placed at; it is taken here when that cannot be.
    fn hand_over<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        cm: CmId,
        incoming: &Incoming<'_>,
        index: usize,
    ) {
        let Some(membership) = &self.membership else { return };
        let Incoming { reactor, listener, framing, peer, private_data, .. } = *incoming;
        let detached = match self.provider.detach(cm) {
            Ok(detached) => detached,
            Err(error) => {
                log::debug!("{peer} is not handed over: {error}");
                membership.unplace(index);
                return self.answer(handler, cm, incoming);
            }
        };
        let arrival = Arrival { detached, framing, reactor, listener, peer, private_data: private_data.to_vec() };
        match membership.send(index, arrival) {
            Ok(()) => self.stats.handed_over += 1,
            Err(arrival) => {
                // It has gone since it was chosen.
                membership.unplace(index);
                self.take_in(handler, arrival);
            }
        }
    }

    /// Stage 9: takes what other reactors have handed over.
    pub(crate) fn arrivals<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, progressed: &mut bool) {
        for _ in 0..ARRIVALS_PER_TURN {
            let Some(membership) = self.membership.as_mut().filter(|membership| membership.pending) else { return };
            let Some(arrival) = membership.next_arrival() else {
                membership.pending = false;
                return;
            };
            *progressed = true;
            self.stats.taken_over += 1;
            self.placed(|core| core.take_in(handler, arrival));
        }
    }

    fn take_in<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, arrival: Arrival) {
        let Arrival { detached, framing, reactor, listener, peer, private_data } = arrival;
        self.follow(detached.provider());
        match self.provider.attach(detached, self.now) {
            Ok((cm, device)) => {
                let incoming = Incoming { reactor, listener, framing, device, peer, private_data: &private_data };
                self.answer(handler, cm, &incoming);
            }
            Err(error) => {
                log::warn!("{peer} is refused: {error}");
                self.stats.refused += 1;
            }
        }
    }

    /// Somebody has called: a request may have come, or a wish to drain.
    pub(crate) fn look_for_others(&mut self) {
        if let Some(membership) = &mut self.membership {
            membership.pending = true;
        }
        if let Some(deadline) = self.wake.take_drain() {
            self.want_drain(deadline);
        }
    }

    /// Whether stage 9 has something of others left to do.
    pub(crate) fn awaits_turn(&self) -> bool {
        matches!(self.drain, Drain::Wanted(_)) || self.membership.as_ref().is_some_and(|membership| membership.pending)
    }
}
