//! Byte streams in simulated worlds: the state of one end, and the program that reads and writes it. The program acts only on edges.

use std::collections::BTreeMap;
use std::fmt::Arguments;
use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use rdma_reactor::stream::{StreamContext, StreamHandler, Unread};
use rdma_reactor::{ConnectionId, DisconnectReason, TimerId};

use super::fabric::{Shared, lock};
use super::memory::Who;
use super::rng::{Rng, mix};
use super::swarm::{MS, WorkOptions};
use super::threads::Said;

/// The bit that marks the tokens of stream timers. The other bits are the number of the stream.
const OF_FLOW: u64 = 1 << 62;
/// The token of the timer that ends the pauses: when it fires, the program reads and writes all streams to their ends.
pub const SETTLE: u64 = u64::MAX;

/// The state of one end of a stream.
#[derive(Clone, Debug, Default)]
pub struct Flow {
    /// The name of this end: the cookie of the connection, and the side.
    pub who: Who,
    goal: u64,
    /// The number of bytes that the stream has accepted.
    pub written: u64,
    /// True if this end has shut down writing.
    pub shut: bool,
    /// True if the program has closed the stream.
    pub closed: bool,
    /// True if the connection was closed by a call outside of the stream API.
    cut: bool,
    /// The number of bytes that this end has read.
    pub read: u64,
    /// True if this end has shut down reading.
    deaf: bool,
    /// The number of bytes that this end had read when it read the end of the peer's direction; `None` before that.
    pub end: Option<u64>,
    /// The number of calls of `on_hangup`, which reports the end of the peer's direction.
    pub hangups: u32,
    /// True if a write accepted fewer bytes than it was given, so that `on_writable` must follow.
    short: bool,
    /// True if the program has stopped reading before all available bytes were read, so that the stream raises no new edge.
    left: bool,
    /// True if the last callback was called.
    pub over: bool,
}

impl Flow {
    /// Returns true if the peer must read all bytes of this direction, and must then be notified of the end of the direction.
    #[must_use]
    pub const fn finishes(&self) -> bool {
        self.shut && !self.closed && !self.cut
    }

    /// Checks a stream that no fault has disturbed: `self` is the end that writes, and `reader` is the other end. Returns a description of
    /// what is wrong, or `None` if nothing is wrong.
    #[must_use]
    pub fn judge(&self, reader: &Self) -> Option<String> {
        if !self.finishes() || reader.closed || reader.cut || reader.deaf {
            return None;
        }
        // `reader.end` is not recorded if the end of the direction arrives with the last callback and no bytes are unread.
        let end = reader.end.is_none_or(|end| end == self.written);
        let whole = reader.read == self.written && end && reader.hangups == 1;
        (!whole).then(|| format!("of {} bytes, and an end: {reader:?}", self.written))
    }
}

/// Fills `out` with the bytes of a stream, beginning at position `at`.
pub fn fill(from: Who, mut at: u64, out: &mut [u8]) {
    for byte in out {
        *byte = (mix(from.0 ^ mix(at / 8) ^ from.1 as u64) >> (at % 8 * 8)) as u8;
        at += 1;
    }
}

/// The handler of all streams on a node.
#[derive(Debug)]
pub struct Flows {
    node: usize,
    rng: Rng,
    fabric: Shared,
    bytes: u64,
    /// The open streams. A closed stream stays in the map while some of its bytes may be unread.
    pub flows: BTreeMap<ConnectionId, Flow>,
    /// The bytes that were unread when their stream ended. The program reads them later.
    rest: BTreeMap<ConnectionId, Unread>,
    /// The cookie and the side of the next stream that this node opens.
    pub next: Who,
    /// The last timer that has fired and that does not belong to a stream. The caller of the handler must process it.
    pub timer: Option<TimerId>,
    /// True if the program reads and writes everything immediately, without pauses.
    pub calm: bool,
    /// The streams that a timer continues. The token of such a timer has the index of the stream in this list.
    naps: Vec<ConnectionId>,
}

impl Flows {
    /// Returns the handler of a node that has no streams yet.
    #[must_use]
    pub fn new(seed: u64, node: usize, work: &WorkOptions, fabric: Shared) -> Self {
        Self {
            node,
            rng: Rng::new(mix(seed) ^ node as u64, "streams"),
            fabric,
            bytes: work.stream_bytes,
            flows: BTreeMap::new(),
            rest: BTreeMap::new(),
            next: (0, 0),
            timer: None,
            calm: false,
            naps: Vec::new(),
        }
    }

    fn note(&self, what: Arguments<'_>) {
        lock(&self.fabric).note(self.node, what);
    }

    fn check(&self, kept: bool, what: Arguments<'_>) {
        if !kept {
            lock(&self.fabric).violation(format!("node{}: {what}", self.node));
        }
    }

    fn flow(&mut self, id: ConnectionId) -> &mut Flow {
        self.flows.entry(id).or_default()
    }

    /// Sets a timer that continues a stream later.
    fn nap(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let delay = self.rng.skewed(1_000..=50 * MS);
        let token = OF_FLOW | self.naps.len() as u64;
        self.naps.push(id);
        cx.context().timers().set(Duration::from_nanos(delay), token);
    }

    /// Writes the remaining bytes of a stream in pieces, then shuts down writing. Stops earlier if the stream would block.
    fn write(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        loop {
            let flow = self.flow(id);
            let (from, written, left) = (flow.who, flow.written, flow.goal.saturating_sub(flow.written));
            if flow.over || flow.shut || flow.closed || flow.cut || flow.short {
                return;
            }
            if left == 0 {
                return self.finish(cx, id);
            }
            if !self.calm && self.rng.chance(100) {
                return self.nap(cx, id);
            }
            let len = self.rng.skewed(1..=left) as usize;
            let mut bytes = vec![0; len];
            fill(from, written, &mut bytes);
            let whole = self.rng.chance(700);
            let room = cx.stream(id).readiness().writable;
            let result = if whole {
                cx.stream(id).write(&bytes)
            } else {
                cx.stream(id).write_with(|place| {
                    let len = bytes.len().min(place.len());
                    place[..len].copy_from_slice(&bytes[..len]);
                    len
                })
            };
            let taken = *result.as_ref().unwrap_or(&0);
            self.note(format_args!("writes {len} bytes at {written} to {id}: {result:?}"));
            let flow = self.flow(id);
            flow.written += taken as u64;
            match result {
                Ok(0) => self.check(false, format_args!("{id}: a write of {len} bytes accepted none")),
                // A write that accepts fewer bytes than it was given has filled the buffer, so `on_writable` must follow.
                Ok(taken) if whole => flow.short = taken < len,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    flow.short = true;
                    self.check(!room, format_args!("{id}: writable, but a write accepted nothing"));
                }
                // The stream is ending, so it accepts no more bytes.
                Err(error) => {
                    self.check(error.kind() == ErrorKind::BrokenPipe, format_args!("{id}: writing: {error}"));
                    return;
                }
            }
        }
    }

    fn finish(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let close = !self.calm && self.rng.chance(100);
        self.note(format_args!("{} {id}", if close { "closes" } else { "finishes" }));
        let flow = self.flow(id);
        flow.shut = true;
        if close {
            flow.closed = true;
            cx.stream(id).close();
        } else {
            let done = cx.stream(id).shutdown(Shutdown::Write);
            self.check(done.is_ok(), format_args!("{id}: finishing: {done:?}"));
        }
    }

    /// Reads until nothing is available. In some cases stops earlier, and sets a timer that continues to read.
    fn read(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        loop {
            let flow = self.flow(id);
            if flow.closed || flow.end.is_some() {
                return;
            }
            let (over, at, from) = (flow.over, flow.read, (flow.who.0, 1 - flow.who.1));
            if !over && !self.calm && self.rng.chance(80) {
                // The program stops here. Bytes, or the end of the peer's direction, may still be unread.
                self.flow(id).left = cx.stream(id).readiness().readable;
                if self.rng.chance(900) {
                    return self.nap(cx, id);
                }
                self.note(format_args!("reads {id} no more"));
                self.flow(id).deaf = true;
                let done = cx.stream(id).shutdown(Shutdown::Read);
                return self.check(done.is_ok(), format_args!("{id}: shutting down for reading: {done:?}"));
            }
            let mut bytes = vec![0; self.rng.skewed(1..=5_000) as usize];
            let result = if let Some(rest) = self.rest.get_mut(&id) {
                rest.read(&mut bytes)
            } else if self.rng.chance(500) {
                cx.stream(id).read(&mut bytes)
            } else {
                let most = bytes.len();
                let mut stream = cx.stream(id);
                let part = stream.fill_buf().map(|front| {
                    let len = front.len().min(most);
                    bytes[..len].copy_from_slice(&front[..len]);
                    len
                });
                if let Ok(len) = part {
                    stream.consume(len);
                }
                part
            };
            self.note(format_args!("reads {id} at {at}: {result:?}"));
            match result {
                Ok(0) => {
                    // The program has taken the unread bytes when the stream ended. A read from these bytes does not return why the stream
                    // has ended.
                    let taken = self.rest.remove(&id).is_some();
                    let flow = self.flow(id);
                    let told = !flow.deaf && (!taken || flow.hangups > 0);
                    (flow.left, flow.end) = (false, told.then_some(at));
                    return;
                }
                Ok(len) => {
                    let mut expected = vec![0; len];
                    fill(from, at, &mut expected);
                    self.check(bytes[..len] == expected, format_args!("{id}: {len} bytes at {at} differ"));
                    self.flow(id).read += len as u64;
                }
                Err(error) => {
                    self.flow(id).left = false;
                    let kept = over || error.kind() == ErrorKind::WouldBlock;
                    return self.check(kept, format_args!("{id}: reading: {error}"));
                }
            }
        }
    }

    /// Reads and writes every stream until it would block. From now on, there are no pauses.
    fn settle(&mut self, cx: &mut StreamContext<'_>) {
        self.calm = true;
        for id in self.flows.keys().copied().collect::<Vec<_>>() {
            self.read(cx, id);
            self.write(cx, id);
        }
    }

    /// Records that the connection of a stream is being closed by a call outside of the stream API.
    pub fn cut(&mut self, id: ConnectionId) {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.cut = true;
        }
    }

    fn end(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, orderly: bool) {
        self.note(format_args!("{id} is over, in order: {orderly}"));
        let flow = self.flow(id);
        let again = std::mem::replace(&mut flow.over, true);
        let told = !orderly || flow.closed || flow.cut || flow.hangups == 1;
        self.check(
            !again && told,
            format_args!("{id}: over again, or not notified of the peer's end: {:?}", self.flows[&id]),
        );
        if self.calm || self.rng.chance(500) {
            return self.read(cx, id);
        }
        let rest = cx.stream(id).take_unread();
        self.note(format_args!("{} bytes of {id} are read later", rest.len()));
        self.rest.insert(id, rest);
        self.nap(cx, id);
    }
}

impl StreamHandler<Said> for Flows {
    fn on_open(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let goal = self.rng.skewed(0..=self.bytes);
        let flow = Flow { who: self.next, goal, ..Flow::default() };
        self.note(format_args!("{id} is a stream, to write {goal} bytes"));
        let again = self.flows.insert(id, flow);
        self.check(again.is_none(), format_args!("{id}: opened again"));
        let readiness = cx.stream(id).readiness();
        // `readiness.writable` may be false, because the program may have closed the stream before `on_open`.
        self.check(!readiness.readable && !readiness.closed, format_args!("{id}: a new stream: {readiness:?}"));
        self.write(cx, id);
    }

    fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let flow = self.flow(id);
        let due = !flow.over && !flow.closed && !flow.deaf && !flow.left && flow.end.is_none();
        let readable = cx.stream(id).readiness().readable;
        self.check(due && readable, format_args!("{id}: readable: {readable}, {:?}", self.flows[&id]));
        self.read(cx, id);
    }

    fn on_writable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let flow = self.flow(id);
        let due = std::mem::take(&mut flow.short) && !flow.over && !flow.closed;
        let writable = cx.stream(id).readiness().writable;
        self.check(due && writable, format_args!("{id}: writable: {writable}, {:?}", self.flows[&id]));
        self.write(cx, id);
    }

    fn on_hangup(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        let flow = self.flow(id);
        flow.hangups += 1;
        let kept = flow.hangups == 1 && !flow.over && !flow.closed;
        let readiness = cx.stream(id).readiness();
        self.note(format_args!("{id}: the peer has finished"));
        let told = readiness.closed && readiness.readable;
        self.check(kept && told, format_args!("{id}: a hang-up, {readiness:?}, {:?}", self.flows[&id]));
        // If this end has read all bytes that have arrived, its next read returns the end of the peer's direction. Otherwise the next reads
        // return the unread bytes, and then the end.
        if !self.flows[&id].left {
            self.read(cx, id);
        }
    }

    fn on_close(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
        self.end(cx, id, true);
    }

    fn on_error(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, _: DisconnectReason) {
        self.end(cx, id, false);
    }

    fn on_timer(&mut self, cx: &mut StreamContext<'_>, timer: TimerId, token: u64) {
        if token == SETTLE {
            return self.settle(cx);
        }
        match self.naps.get((token & !OF_FLOW) as usize).copied().filter(|_| token & OF_FLOW != 0) {
            Some(id) => {
                self.read(cx, id);
                self.write(cx, id);
            }
            None => self.timer = Some(timer),
        }
    }
}
