//! The calls of the program. All callbacks are made in this file.

use std::sync::Arc;

use rdma_transport::slab::Key;

use super::contain::{Of, call};
use super::serve::Desk;
use crate::api::handler::{ConnectRequest, Decision, Handler};
use crate::api::message::{Content, Message, Own};
use crate::conn::effects::{Arrived, Event, Fragments};
use crate::datagram::Datagram;
use crate::datagram::table::{Endpoints, Event as DatagramEvent};
use crate::device::home::Home;
use crate::device::pool::Slabs;
use crate::driver::{CmStep, Driver, Due, Request};
use crate::error::Error;
use crate::id::{ConnectionId, EndpointId, IoId, TimerId};
use crate::memory::region::Region;
use crate::seam::poller::Edge;

/// Largest number of events of the connection manager handled in one turn; the same holds for events of devices.
const EVENTS_PER_TURN: usize = 256;

/// Largest number of timers fired in one turn.
const TIMERS_PER_TURN: usize = 1024;

/// Largest number of connect requests taken from other reactors in one turn.
const ARRIVALS_PER_TURN: usize = 256;

/// The parts of a device that its messages borrow, so that callbacks can have the driver.
type Lender = (usize, Arc<Slabs>, Arc<Home>);

/// The driver and the program, in the stages of a turn that call back.
pub(super) struct Delivery<'a, M, H: ?Sized> {
    pub(super) driver: &'a mut Driver,
    pub(super) endpoints: &'a mut Endpoints,
    pub(super) desk: &'a mut Desk<M>,
    pub(super) handler: &'a mut H,
    pub(super) lender: Option<Lender>,
    /// A callback ran, or something moved on, in this turn.
    pub(super) progressed: bool,
}

/// Makes a callback of the handler for a connection or an endpoint, or for nobody. `None`: it has panicked.
macro_rules! callback {
    ($self:ident.$name:ident($of:expr $(, $argument:expr)*)) => {{
        let handler = &mut *$self.handler;
        call((&mut *$self.driver, &mut *$self.endpoints), ($of, stringify!($name)), |cx| handler.$name(cx $(, $argument)*))
    }};
}

impl<M, H: Handler<M> + ?Sized> Delivery<'_, M, H> {
    /// Takes stages 4 and 5: events of the connection manager, then of devices. `true`: some are left for the next
    /// turn.
    pub(super) fn connection_manager(&mut self) -> Result<bool, Error> {
        for left in (0..EVENTS_PER_TURN).rev() {
            match self.driver.next_cm()? {
                CmStep::Nothing => break,
                CmStep::Done => {}
                CmStep::Request(request) => self.place(request),
                CmStep::Guest(number, event) => self.endpoints.cm_event(self.driver, number, event),
            }
            self.progressed = true;
            self.events();
            if left == 0 {
                return Ok(true);
            }
        }
        for _ in 0..EVENTS_PER_TURN {
            let Some(told) = self.driver.next_device_event() else { return Ok(false) };
            self.progressed = true;
            if let Some(device) = told.failed {
                self.endpoints.end_on_device(self.driver, device);
            }
            if let Some(event) = told.event {
                callback!(self.on_device_event(Of::Nobody, &event));
            }
        }
        Ok(true)
    }

    /// Lets the program say which reactor takes a connection that a peer wants.
    fn place(&mut self, request: Request) {
        let request = if self.driver.asks_for_place(&request) {
            match callback!(self.on_place(Of::Nobody, told(&request))) {
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

    /// Lets the program accept or refuse a connection that a peer wants with this reactor.
    fn answer(&mut self, request: Request) {
        let Some(request) = self.driver.screen(request) else { return };
        match callback!(self.on_connect_request(Of::Nobody, told(&request))) {
            Some(Decision::Accept) => self.driver.accept(request, &[]),
            Some(Decision::AcceptWith(data)) => self.driver.accept(request, &data),
            Some(Decision::Reject(data)) => self.driver.refuse(&request, &data),
            None => self.driver.refuse(&request, &[]),
        }
    }

    /// Takes stage 7: first the backlogs of connections, the oldest first; then the completion queues in turn, until all are
    /// empty or the turn's budget is used up; then what there is to post, and the queues of that once more.
    pub(super) fn completion_queues(&mut self, mut begun: impl FnMut(&mut Driver)) {
        self.driver.begin_turn();
        let mut budget = self.driver.config().completions_per_turn as usize;
        if self.driver.is_behind() {
            self.progressed = true;
            // Backlogs get half of the turn at most, because messages of others are in the queues meanwhile.
            let mut left = budget.div_ceil(2);
            budget -= left;
            self.backlogs(&mut left);
            budget += left;
        }
        let early = self.driver.begin_polling();
        self.batches(early, &mut budget, &mut begun);
        // Flush now: replies must not wait for timers and later stages.
        self.post_and_look(&mut budget, &mut begun);
    }

    /// Takes the rest of stage 7 for tasks, which ask for something when the turn is over.
    #[cfg(feature = "async")]
    pub(super) fn follow_up(&mut self, mut begun: impl FnMut(&mut Driver)) {
        let mut budget = self.driver.config().completions_per_turn as usize;
        if self.driver.resume_polling() {
            self.batches(true, &mut budget, &mut begun);
        }
        self.post_and_look(&mut budget, &mut begun);
    }

    /// Posts what was gathered, and looks once more at the queues of what was posted. Only once: the later stages have their
    /// turn, too.
    fn post_and_look(&mut self, budget: &mut usize, begun: &mut impl FnMut(&mut Driver)) {
        self.flush();
        if *budget > 0 && self.driver.has_unseen() {
            self.batches(false, budget, begun);
            self.driver.end_polling();
            self.flush();
        } else {
            self.driver.end_polling();
        }
    }

    /// Handles the completions of queues that are ready, while `budget` lasts, and tells of room for sends. `early`: there is
    /// a batch that was polled before, which is handled in any case, because it is nowhere else.
    fn batches(&mut self, early: bool, budget: &mut usize, begun: &mut impl FnMut(&mut Driver)) {
        let mut found = early || (*budget > 0 && self.driver.next_batch(*budget));
        while found {
            self.progressed = true;
            let len = self.driver.begin_batch();
            *budget = budget.saturating_sub(len);
            begun(self.driver);
            let some = if cfg!(planted = "tail-of-a-batch-dropped") { len.min(8) } else { len };
            for nth in 0..some {
                if let Some(number) = self.driver.complete(nth) {
                    self.guest(number, nth);
                }
                self.events();
            }
            self.driver.end_batch();
            found = *budget > 0 && self.driver.next_batch(*budget);
        }
        while self.driver.next_writable() || self.endpoints.next_writable() {
            self.events();
        }
    }

    /// Hands the batch's `nth` completion to the endpoint whose work it is.
    #[cold]
    fn guest(&mut self, number: u64, nth: usize) {
        if let Some(&wc) = self.driver.queues().completion(nth).map(|(_, wc)| wc) {
            self.endpoints.completed(self.driver, number, &wc);
        }
    }

    /// Gives each connection that has a backlog its part of the turn, the oldest first, while `budget` lasts.
    fn backlogs(&mut self, budget: &mut usize) {
        let mut waiting = self.driver.take_waiting();
        while *budget > 0
            && let Some(id) = waiting.pop_front()
        {
            while *budget > 0
                && let Some(wc) = self.driver.next_deferred(id)
            {
                *budget -= 1;
                self.driver.complete_deferred(id, &wc);
                self.events();
            }
            if *budget == 0 {
                self.driver.wait_on(id);
            }
        }
        self.driver.put_waiting(waiting);
    }

    /// Takes stage 8: fires the timers that are due. `true`: some are left for the next turn.
    pub(super) fn timers(&mut self) -> bool {
        let mut left = TIMERS_PER_TURN;
        while let Some((key, due)) = self.driver.next_due(&mut left) {
            match due {
                Due::Program(token) => {
                    let timer = TimerId::new(self.driver.tag(), key);
                    callback!(self.on_timer(Of::Nobody, timer, token));
                }
                Due::Guest(number) => self.endpoints.due(self.driver, number),
                Due::Drain if self.driver.drain_overdue() => self.endpoints.close_all(self.driver, true),
                _ => {}
            }
            self.events();
        }
        self.progressed |= left < TIMERS_PER_TURN;
        self.events();
        left == 0
    }

    /// Takes the first part of stage 9: readiness of the program's own descriptors.
    pub(super) fn descriptors(&mut self, edges: &mut Vec<Edge>) {
        for Edge { token, readiness } in edges.drain(..) {
            // A callback may have deregistered the descriptor meanwhile.
            if let Some(key) = self.driver.os().io.find(token) {
                self.progressed = true;
                self.driver.counters().turns.io_edges += 1;
                let io = IoId::new(self.driver.tag(), key);
                callback!(self.on_io_ready(Of::Nobody, io, readiness));
            }
        }
    }

    /// Takes the second part of stage 9: buffers and regions that other threads gave back, and calls to stop.
    pub(super) fn calls(&mut self) {
        if self.driver.os().wake.take() {
            self.progressed = true;
            self.desk.pending = true;
            self.driver.take_returned();
            self.driver.take_dropped_regions();
            if self.driver.os().wake.take_stop() {
                self.driver.stop();
            }
            self.driver.check_inbox();
        }
    }

    /// Posts everything that was gathered, at the end of stage 7 and in stage 11.
    pub(super) fn flush(&mut self) {
        self.driver.flush();
        self.endpoints.flush(self.driver);
    }

    /// Takes the last part of stage 9: connect requests of other reactors, commands of other threads, and the beginning
    /// of a drain.
    pub(super) fn others(&mut self) {
        for _ in 0..ARRIVALS_PER_TURN {
            let Some(request) = self.driver.next_arrival() else { break };
            self.progressed = true;
            self.answer(request);
            self.events();
        }
        self.desk.begin(self.driver);
        while let Some(message) = self.desk.next_message(self.driver) {
            callback!(self.on_wake(Of::Nobody, message));
        }
        self.progressed |= self.desk.end(self.driver);
        if let Some(deadline) = self.driver.begin_drain() {
            self.progressed = true;
            callback!(self.on_drain(Of::Nobody, deadline));
        }
        self.events();
    }

    /// Takes stage 10: ends connections and endpoints that have nothing left to wait for.
    pub(super) fn ends(&mut self) {
        if self.driver.has_ends() {
            for id in self.driver.take_ended() {
                self.progressed = true;
                let last = self.driver.finish(id);
                self.events();
                if let Some(event) = last {
                    self.event(id, event);
                }
                self.driver.release(id);
            }
            self.progressed |= self.endpoints.finish_ended(self.driver);
            self.events();
        }
        self.driver.finish_drain(!self.endpoints.is_empty());
    }

    /// Makes the callbacks that are due.
    #[inline]
    fn events(&mut self) {
        while let Some((id, event)) = self.driver.next_event() {
            self.event(id, event);
        }
        while let Some(event) = self.endpoints.next_event() {
            self.datagram_event(event);
        }
    }

    #[inline]
    fn event(&mut self, id: ConnectionId, event: Event) {
        let of = Of::Connection(id);
        // A callback that has panicked is dealt with.
        let _ = match event {
            Event::Message(arrived) => return self.message(id, arrived),
            Event::Sent { send, outcome } => callback!(self.on_send_complete(of, id, send, outcome)),
            Event::Writable => callback!(self.on_writable(of, id)),
            Event::Identified => return self.identified(id),
            Event::Connected => callback!(self.on_connect(of, id)),
            Event::Fragments(fragments) => return self.fragments(id, fragments),
            Event::Fetched(region) => return self.fetched(id, region),
            Event::Immediate(immediate) => callback!(self.on_immediate(of, id, immediate)),
            Event::Disconnected(reason) => callback!(self.on_disconnect(of, id, *reason)),
            Event::ConnectError(error) => callback!(self.on_connect_error(of, id, *error)),
        };
    }

    #[inline]
    fn message(&mut self, id: ConnectionId, arrived: Arrived) {
        let Arrived { mut buffer, start, end, device, shared } = arrived;
        let device = usize::from(device);
        let known =
            self.lender.as_ref().is_some_and(|(of, slabs, _)| *of == device && self.driver.is_lender(device, slabs));
        if !known {
            self.lender = self.driver.lender(device).map(|(slabs, home)| (device, slabs, home));
        }
        let Some((_, slabs, home)) = &self.lender else { return };
        let (start, end) = (start as usize, end as usize);
        let content = Content::Pooled { start, end, buffer: &mut buffer, slabs, home };
        callback!(self.on_recv(Of::Connection(id), id, Message { connection: id, content }));
        match buffer {
            Some(buffer) => self.driver.free_receive(device, buffer, shared),
            None => self.driver.keep_message(id),
        }
    }

    #[cold]
    fn identified(&mut self, id: ConnectionId) {
        let Some(peer) = self.driver.identity(id).cloned() else { return };
        let judged = callback!(self.on_identity(Of::Connection(id), id, &peer));
        // A callback that has panicked has ended the connection.
        let refusal = judged.map_or(Some("this side has failed".to_owned()), Result::err);
        self.driver.input(id, |conn, env| conn.judged(refusal, env));
    }

    #[cold]
    fn fragments(&mut self, id: ConnectionId, fragments: Box<Fragments>) {
        let device = fragments.device;
        let Some((_, home)) = self.driver.lender(device) else { return };
        let joined = self.driver.join(id, fragments);
        let receives = joined.receives.len();
        let mut joined = Some(joined);
        let content = Content::Own(Own::Joined { joined: &mut joined, home: &home });
        callback!(self.on_recv(Of::Connection(id), id, Message { connection: id, content }));
        match joined {
            Some(joined) => self.driver.end_joined(id, device, joined),
            None => self.driver.keep_joined(id, receives),
        }
    }

    fn fetched(&mut self, id: ConnectionId, mut region: Box<Region>) {
        if let Err(error) = region.make_private() {
            log::warn!("{id}: memory for a copy of a message of {} bytes: {error}", region.len());
            return self.driver.abort(id);
        }
        let mut region = Some(region);
        let message = Message { connection: id, content: Content::Own(Own::Region(&mut region)) };
        callback!(self.on_recv(Of::Connection(id), id, message));
    }

    #[cold]
    fn datagram_event(&mut self, event: DatagramEvent) {
        let tag = self.driver.tag();
        let key = |endpoint: EndpointId| endpoint.key(tag).unwrap_or(Key::NONE);
        let Self { driver, endpoints, handler, .. } = self;
        let mut handler = handler.datagrams();
        /// Makes a callback of the handler of datagrams, if the program has one.
        macro_rules! callback {
            ($name:ident($endpoint:expr $(, $argument:expr)*)) => {
                if let Some(handler) = &mut handler {
                    let of = (Of::Endpoint($endpoint), stringify!($name));
                    call((&mut **driver, &mut **endpoints), of, |cx| handler.$name(cx, $endpoint $(, $argument)*));
                }
            };
        }
        match event {
            DatagramEvent::Datagram { endpoint, buffer, len, completion } => {
                if let Some(slabs) = endpoints.slabs_of(driver, key(endpoint))
                    && let Some(datagram) = Datagram::of(&completion, slabs.bytes(&buffer, len))
                {
                    callback!(on_datagram(endpoint, datagram));
                }
                endpoints.free(key(endpoint), buffer);
            }
            DatagramEvent::Closed { endpoint, reason } => {
                callback!(on_endpoint_closed(endpoint, reason));
                endpoints.release(driver, key(endpoint));
            }
            DatagramEvent::Sent { endpoint, send, outcome } => callback!(on_datagram_sent(endpoint, send, outcome)),
            DatagramEvent::Writable { endpoint } => callback!(on_datagram_writable(endpoint)),
            DatagramEvent::Peer { endpoint, address, found } => callback!(on_peer(endpoint, address, found)),
            DatagramEvent::Joined { endpoint, group, joined } => callback!(on_join(endpoint, group, joined)),
        }
    }
}

/// The view of a request that the program gets.
fn told(request: &Request) -> ConnectRequest<'_> {
    let (listener, reactor, peer, private_data) = request.parts();
    ConnectRequest::new(listener, reactor, peer, private_data)
}
