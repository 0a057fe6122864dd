//! The tests of calls (requests with answers). Each call must end exactly once.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_reactor::call::{AnswerError, CallError, CallEvent, CallId, Calls, Refusal, RequestId, Violation};
use rdma_reactor::{
    Config, ConnectionId, Context, DisconnectReason, Handler, Message, PeerViolation, Reactor, SendErrorKind, TimerId,
};

use super::harness::{PATIENCE, Setup, at_home, now, pattern};

/// The number of calls in flight on one connection.
const MANY: u64 = 1000;

/// The result of a call, as the caller receives it.
type End = Result<Vec<u8>, CallError>;

/// One side of the tests. It makes calls. It stores the requests that arrive, until the test answers them.
struct Party {
    calls: Calls<u64>,
    up: Vec<ConnectionId>,
    ends: BTreeMap<u64, End>,
    requests: Vec<(RequestId, Vec<u8>)>,
    cancelled: Vec<RequestId>,
    violations: Vec<Violation>,
    reasons: Vec<DisconnectReason>,
    /// True if this side answers each request immediately with the request's own payload.
    echoes: bool,
    /// The received messages, if they are recorded; `None` if they are parsed as requests and answers.
    raw: Option<Vec<Vec<u8>>>,
}

impl Party {
    fn new(echoes: bool) -> Self {
        Self {
            calls: Calls::new(),
            up: Vec::new(),
            ends: BTreeMap::new(),
            requests: Vec::new(),
            cancelled: Vec::new(),
            violations: Vec::new(),
            reasons: Vec::new(),
            echoes,
            raw: None,
        }
    }

    fn end(&mut self, tag: u64, end: End) {
        assert!(self.ends.insert(tag, end).is_none(), "call {tag} has ended twice");
    }

    fn look(&mut self) {
        while let Some(failed) = self.calls.next_failed() {
            self.end(failed.tag, Err(failed.error));
        }
    }

    /// Returns the error with which a call has ended, or `None` if it has not ended or was answered.
    fn error(&self, tag: u64) -> Option<&CallError> {
        self.ends.get(&tag).and_then(|end| end.as_ref().err())
    }
}

impl Handler for Party {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.up.push(conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if let Some(raw) = &mut self.raw {
            return raw.push(message.to_vec());
        }
        match self.calls.on_recv(cx, conn, message) {
            Some(CallEvent::Request { id, payload }) if self.echoes => {
                self.calls.answer(cx, id, &payload).expect("its caller waits");
            }
            Some(CallEvent::Request { id, payload }) => self.requests.push((id, payload.to_vec())),
            Some(CallEvent::Answer { tag, payload, .. }) => self.end(tag, Ok(payload.to_vec())),
            Some(CallEvent::Failed(failed)) => self.end(failed.tag, Err(failed.error)),
            Some(CallEvent::Cancelled(request)) => self.cancelled.push(request),
            Some(CallEvent::Violation(violation)) => self.violations.push(violation),
            _ => {}
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
        assert!(self.calls.on_timer(cx, timer), "a timer of no call");
        self.look();
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.calls.on_disconnect(conn, &reason);
        self.up.retain(|&up| up != conn);
        self.reasons.push(reason);
        self.look();
    }
}

/// Both sides: the server, which listens, and the client.
struct Both {
    server: (Reactor, Party),
    client: (Reactor, Party),
    address: SocketAddr,
}

impl Both {
    fn new(setup: &Setup, config: Config, echoes: bool) -> Self {
        let mut server = (setup.reactor)(config.clone()).expect("the server's reactor");
        let client = (setup.reactor)(config).expect("the client's reactor");
        let listener = server.context().listen(setup.address).expect("listening");
        let address = server.context().listeners().local_address(listener).expect("the listener's address");
        let mut both = Self { server: (server, Party::new(echoes)), client: (client, Party::new(true)), address };
        both.connect();
        both
    }

    /// Opens a connection. Returns the client's id and the server's id of it.
    fn connect(&mut self) -> (ConnectionId, ConnectionId) {
        let up = self.client.1.up.len() + 1;
        self.client.0.context().connect(self.address).expect("connecting");
        self.until("both are connected", |b| b.client.1.up.len() == up && b.server.1.up.len() == up);
        (self.here(), self.server.1.up[up - 1])
    }

    /// Returns the client's id of the newest connection.
    fn here(&self) -> ConnectionId {
        *self.client.1.up.last().expect("connected")
    }

    fn until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        let deadline = now() + PATIENCE;
        while !condition(self) {
            assert!(now() < deadline, "not within {PATIENCE:?}: {what}");
            let server = self.server.0.turn(&mut self.server.1, Duration::ZERO).expect("the server's turn");
            let client = self.client.0.turn(&mut self.client.1, Duration::ZERO).expect("the client's turn");
            if !(server.progressed || server.more || client.progressed || client.more) {
                self.client.0.turn(&mut self.client.1, Duration::from_millis(1)).expect("the client's turn");
            }
        }
    }

    fn call(&mut self, payload: &[u8], within: Duration, tag: u64) -> CallId {
        let (reactor, party) = &mut self.client;
        party.calls.call(&mut reactor.context(), party.up[0], payload, within, tag).expect("an open connection")
    }

    fn answer(&mut self, (request, payload): &(RequestId, Vec<u8>)) -> Result<(), AnswerError> {
        self.server.1.calls.answer(&mut self.server.0.context(), *request, payload)
    }

    /// Sends these bytes from the server, without the framing of calls.
    fn send_raw(&mut self, octets: &[u8]) {
        let there = self.server.1.up[0];
        self.server.0.context().send(there, octets).expect("room");
    }

    fn finish(mut self) {
        self.client.0.context().close_all();
        self.until("both are disconnected", |b| b.client.1.up.is_empty() && b.server.1.up.is_empty());
        self.client.0.shutdown(&mut self.client.1, PATIENCE).expect("the client's end");
        self.server.1.requests.clear();
        self.until("all buffers are home", |b| at_home(&b.server.0) && at_home(&b.client.0));
    }
}

/// Payloads of any length must arrive in both directions. The lengths include those near the limit at which a message and its header
/// fit in one buffer.
pub fn calls_of_every_size_are_answered(setup: &Setup) {
    let mut both = Both::new(setup, setup.config(), true);
    let here = both.here();
    let buffer = both.client.0.context().connection(here).buffer_size().expect("connected");
    let sizes = [0, 1, 64, buffer - 17, buffer - 16, buffer - 15, 3 * buffer, 300_000];
    for (tag, size) in (0..).zip(sizes) {
        both.call(&pattern(size, size), PATIENCE, tag);
    }
    both.until("all are answered", |b| b.client.1.ends.len() == sizes.len());
    for (tag, size) in (0..).zip(sizes) {
        assert!(both.client.1.ends[&tag] == Ok(pattern(size, size)), "{size} bytes");
    }
    let max =
        usize::try_from(both.client.0.context().connection(here).max_message().expect("connected")).expect("in memory");
    let (reactor, party) = &mut both.client;
    let refused = party.calls.call(&mut reactor.context(), here, &vec![0; max - 15], PATIENCE, 99);
    let why = refused.expect_err("it is one byte too long").why;
    assert_eq!(why, Refusal::Send(SendErrorKind::TooLong { len: max + 1, max }));
    both.finish();
}

/// A thousand calls are in flight on one connection. The server answers them in a different order, and meanwhile makes calls to the client.
/// Each caller must get the answer to its own call.
pub fn a_thousand_calls_are_answered_in_any_order(setup: &Setup) {
    let mut both = Both::new(setup, setup.config(), false);
    for tag in 0..MANY {
        both.call(&tag.to_le_bytes(), PATIENCE, tag);
    }
    let there = both.server.1.up[0];
    for tag in 0..100 {
        let (reactor, party) = &mut both.server;
        party.calls.call(&mut reactor.context(), there, &[7; 32], PATIENCE, tag).expect("an open connection");
    }
    both.until("the server has all", |b| b.server.1.requests.len() as u64 == MANY);
    assert!(both.client.1.ends.is_empty());
    let requests = std::mem::take(&mut both.server.1.requests);
    for nth in 0..requests.len() {
        both.answer(&requests[nth * 7 % requests.len()]).expect("its caller waits");
    }
    both.until("all are answered", |b| b.client.1.ends.len() as u64 == MANY && b.server.1.ends.len() == 100);
    for tag in 0..MANY {
        assert_eq!(both.client.1.ends[&tag], Ok(tag.to_le_bytes().to_vec()));
    }
    assert!(both.server.1.ends.values().all(|end| *end == Ok(vec![7; 32])));
    assert_eq!(both.answer(&requests[0]), Err(AnswerError::Gone));
    both.finish();
}

/// A server answers all calls at the same time, but has credits for only a few answers. All answers must arrive in the end.
pub fn answers_without_room_wait(setup: &Setup) {
    let config = setup.config().receive_depth(8).send_depth(8);
    let mut both = Both::new(setup, config, false);
    for tag in 0..200 {
        both.call(&pattern(0, 100), PATIENCE, tag);
    }
    both.until("the server has all", |b| b.server.1.requests.len() == 200);
    for request in std::mem::take(&mut both.server.1.requests) {
        both.answer(&request).expect("its caller waits");
    }
    both.until("all are answered", |b| b.client.1.ends.len() == 200);
    assert!(both.client.1.ends.values().all(|end| *end == Ok(pattern(0, 100))));
    both.finish();
}

/// A server must refuse requests beyond a limit immediately, and must serve the requests within its limits.
pub fn a_server_at_its_limits_says_so(setup: &Setup) {
    let mut both = Both::new(setup, setup.config(), false);
    let second = both.connect().0;
    let limits = both.server.1.calls.limits();
    (limits.requests_per_connection, limits.bytes_per_connection) = (4, 1000);
    (limits.requests, limits.bytes) = (12, 1500);
    // The client sends too many requests on one connection, and then one request that is too long.
    for tag in 0..6 {
        both.call(b"few", PATIENCE, tag);
    }
    both.call(&[0; 1001], PATIENCE, 6);
    both.until("three are refused", |b| b.client.1.ends.len() == 3);
    // On a second connection, the client exceeds the share of its host. The third request there
    // would be the host's seventh, although the connection itself has only two, and the server
    // accepts 12.
    for tag in 7..10 {
        let (reactor, party) = &mut both.client;
        party.calls.call(&mut reactor.context(), second, b"others", PATIENCE, tag).expect("an open connection");
    }
    both.until("one more is refused", |b| b.client.1.ends.len() == 4);
    for tag in [4, 5, 6, 9] {
        assert_eq!(both.client.1.error(tag), Some(&CallError::Overloaded), "call {tag}");
    }
    assert_eq!(both.server.1.requests.len(), 6);
    for request in std::mem::take(&mut both.server.1.requests) {
        both.answer(&request).expect("its caller waits");
    }
    both.call(&[7; 1000], PATIENCE, 10);
    both.until("the others are answered, and there is room again", |b| {
        b.client.1.ends.len() == 10 && b.server.1.requests.len() == 1
    });
    let stats = both.server.1.calls.stats();
    assert_eq!((stats.admitted, stats.overloaded), (7, 4));
    both.finish();
}

/// A call that the server does not answer must end at its deadline. After the deadline, the server's attempt to answer must fail. If the
/// client receives a second answer to a call, it must not take that answer as the answer to another call.
pub fn late_and_reused_answers_match_nothing(setup: &Setup) {
    let mut both = Both::new(setup, setup.config(), false);
    both.call(b"slow", Duration::from_millis(20), 0);
    both.until("the time is over", |b| b.client.1.ends.len() == 1);
    assert_eq!(both.client.1.error(0), Some(&CallError::Deadline));
    both.until("the server has received it, or has dropped it", |b| {
        b.server.1.requests.len() as u64 + b.server.1.calls.stats().expired == 1
    });
    if let Some(request) = both.server.1.requests.pop() {
        let over = now() + Duration::from_millis(40);
        both.until("it is over at the server, too", |_| now() > over);
        assert_eq!(both.server.1.calls.time_left(&both.server.0.context(), request.0), None);
        assert_eq!(both.answer(&request), Err(AnswerError::Late));
    }
    // From here on, the test writes the server's answers itself. It answers the first call several times.
    both.server.1.raw = Some(Vec::new());
    both.call(b"first", PATIENCE, 1);
    let has = |b: &Both, count: usize| b.server.1.raw.as_ref().is_some_and(|raw| raw.len() == count);
    both.until("the request has arrived", |b| has(b, 1));
    let answer_to = |b: &Both, nth: usize, payload: &[u8]| {
        let id = &b.server.1.raw.as_ref().expect("raw")[nth][8..16];
        [&[1, 0, 0, 0, 0, 0, 0, 0], id, payload].concat()
    };
    let first = answer_to(&both, 0, b"one");
    both.send_raw(&first);
    both.until("it is answered", |b| b.client.1.ends.len() == 2);
    // This call reuses the slot of the first call.
    both.call(b"second", PATIENCE, 2);
    both.until("the request has arrived", |b| has(b, 2));
    both.send_raw(&first);
    both.send_raw(&[1, 1, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255]);
    let second = answer_to(&both, 1, b"two");
    both.send_raw(&second);
    both.send_raw(&second);
    both.until("three match nothing", |b| b.client.1.calls.stats().unmatched == 3);
    assert_eq!(both.client.1.ends[&1], Ok(b"one".to_vec()));
    assert_eq!(both.client.1.ends[&2], Ok(b"two".to_vec()));
    both.finish();
}

/// A cancelled call must be reported to the server. The server keeps the request until it answers the request or drops it. The caller must
/// get no further callback about the call.
pub fn a_cancelled_call_is_over(setup: &Setup) {
    let mut both = Both::new(setup, setup.config(), false);
    let call = both.call(b"in vain", PATIENCE, 0);
    both.until("the server has it", |b| b.server.1.requests.len() == 1);
    let (reactor, party) = &mut both.client;
    assert_eq!(party.calls.cancel(&mut reactor.context(), call), Some(0));
    assert_eq!(party.calls.cancel(&mut reactor.context(), call), None);
    both.until("the server is notified", |b| b.server.1.cancelled.len() == 1);
    let request = both.server.1.requests.remove(0);
    assert_eq!(both.server.1.cancelled, [request.0]);
    assert_eq!(both.server.1.calls.time_left(&both.server.0.context(), request.0), None);
    assert_eq!(both.answer(&request), Err(AnswerError::Late));
    // If the server drops a request without an answer, the call at the client must end too.
    both.call(b"unanswered", PATIENCE, 1);
    both.until("the server has it", |b| b.server.1.requests.len() == 1);
    let (reactor, party) = &mut both.server;
    party.calls.dismiss(&mut reactor.context(), party.requests[0].0);
    both.until("it has an end", |b| b.client.1.ends.len() == 1);
    assert_eq!(both.client.1.error(1), Some(&CallError::Unanswered));
    both.finish();
}

/// When a connection ends, its calls must end too.
pub fn calls_end_with_their_connection(setup: &Setup) {
    let mut both = Both::new(setup, setup.config(), false);
    for tag in 0..100 {
        both.call(b"never", PATIENCE, tag);
    }
    both.until("the server has some", |b| b.server.1.requests.len() > 10);
    let there = both.server.1.up[0];
    both.server.0.context().abort(there);
    both.until("all have ended", |b| b.client.1.ends.len() == 100 && b.server.1.up.is_empty());
    for tag in 0..100 {
        assert!(matches!(both.client.1.error(tag), Some(CallError::Disconnected(_))), "{:?}", both.client.1.ends[&tag]);
    }
    let request = both.server.1.requests.remove(0);
    assert_eq!(both.answer(&request), Err(AnswerError::Gone));
    both.finish();
}

/// After a server has called `finish` for a connection, it must answer the pending requests and refuse new ones. The connection must be
/// closed after the last answer.
pub fn a_server_that_finishes_answers_first(setup: &Setup) {
    let mut both = Both::new(setup, setup.config(), false);
    both.call(b"before", PATIENCE, 0);
    both.until("the server has it", |b| b.server.1.requests.len() == 1);
    let (reactor, party) = &mut both.server;
    party.calls.finish(&mut reactor.context(), party.up[0]);
    both.call(b"after", PATIENCE, 1);
    both.until("the second one is refused", |b| b.client.1.ends.len() == 1);
    assert_eq!(both.client.1.error(1), Some(&CallError::Draining));
    assert_eq!(both.server.1.up.len(), 1);
    let request = both.server.1.requests.remove(0);
    both.answer(&request).expect("its caller waits");
    both.until("the connection is closed", |b| b.client.1.up.is_empty() && b.server.1.up.is_empty());
    assert_eq!(both.client.1.ends[&0], Ok(b"before".to_vec()));
    assert_eq!(both.client.1.reasons, [DisconnectReason::Closed]);
    both.finish();
}

/// Bytes that are not a frame of the protocol must end the connection. The reason must name the violation.
pub fn what_is_no_frame_is_a_violation(setup: &Setup) {
    for (octets, violation) in [
        (&[0; 15][..], Violation::Short(15)),
        (&[9; 16], Violation::Kind(9)),
        (&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], Violation::Reserved),
    ] {
        let mut both = Both::new(setup, setup.config(), false);
        both.call(b"a question", PATIENCE, 0);
        both.send_raw(octets);
        both.until("the connection has ended", |b| b.client.1.up.is_empty() && b.server.1.up.is_empty());
        assert_eq!(both.client.1.violations, [violation]);
        let reason = DisconnectReason::PeerViolation(PeerViolation::MalformedMessage);
        assert_eq!(both.client.1.error(0), Some(&CallError::Disconnected(reason)));
        both.finish();
    }
}
