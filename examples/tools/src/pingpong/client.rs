//! The client in one measurement. It opens the connections, runs the [`ConnectionWork`] of each, and closes them.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use rdma_reactor::{
    ConnectError, ConnectOptions, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, RemoteRegion,
    SendErrorKind, SendId, SendKind, TimerId,
};

use super::dial::{Dial, DialDecision};
use super::failure::Failure;
use super::figures::{Figures, Measured, ProcessorTimes};
use super::frame::Frame;
use super::interrupt::Interrupt;
use super::intervals::Intervals;
use super::job::{Mode, Op};
use super::latency::Latency;
use super::output::Output;
use super::paced::Paced;
use super::plan::Plan;
use super::processor;
use super::progress::Progress;
use super::throughput::Throughput;
use super::touch;
use super::watch::{self, Watch};

/// The time between two updates of the progress bar.
const TICK: Duration = Duration::from_millis(100);
/// The time in which messages in flight may still arrive and be counted, after the user has
/// interrupted a measurement.
const WIND_DOWN: Duration = Duration::from_secs(1);
/// The time limit for the server to report its processor time. It is long, because the server's machine may be busy. If the server is gone,
/// the connection ends before this limit.
const ANSWER: Duration = Duration::from_secs(60);

/// The token of the timer after which the client connects again.
const CONNECT: u64 = 0;
/// The token of the timer that updates the progress bar.
const DRAW: u64 = 1;
/// The token of the timer after which the client closes all connections.
const GIVE_UP: u64 = 2;
/// The token of the timer that ends an interval.
const INTERVAL: u64 = 3;

/// The part of a measurement that runs on one connection.
pub trait ConnectionWork: Debug {
    /// Starts the measured time. Called when all connections are established.
    fn begin(&mut self);
    /// Accepts the memory that the server provides for one-sided operations. Called before [`ConnectionWork::begin`].
    ///
    /// # Errors
    /// The server's memory cannot be used, or local memory cannot be registered.
    fn lent(&mut self, cx: &mut Context<'_>, conn: ConnectionId, memory: RemoteRegion) -> Result<(), Failure>;
    /// Handles a message of the server.
    ///
    /// # Errors
    /// The message is not part of the measurement.
    fn arrived(&mut self, message: &[u8]) -> Result<(), String>;
    /// Sends messages until all are sent, a send is refused, or the largest number of messages is in flight.
    fn proceed(&mut self, cx: &mut Context<'_>, conn: ConnectionId);
    /// Records that a send may succeed again. Called after a send was refused and the connection has become writable.
    fn unblock(&mut self);
    /// Handles the completion of a send.
    fn completed(&mut self, kind: SendKind);
    /// Restarts the clock of the next message. Called after the client has drawn the progress bar
    /// or printed a line, so that the latency does not include this time.
    fn resume(&mut self) {}
    /// Returns true if the client must call [`ConnectionWork::look`] repeatedly, because this work polls memory or the clock.
    fn is_watching(&self) -> bool {
        false
    }
    /// Polls memory or the clock once. Returns true if the server has written to the memory, or if the next message is due.
    fn look(&mut self) -> bool {
        false
    }
    /// Handles the event that [`ConnectionWork::look`] has reported.
    fn seen(&mut self) {}
    /// Ends the work early: sends nothing more, and waits only for the messages in flight.
    fn wind_down(&mut self);
    /// Returns true if the work has ended.
    fn is_over(&self) -> bool;
    /// Returns the number of messages so far, warm-up included.
    fn done(&self) -> u64;
    /// Returns the fraction of the measurement that is done, from 0 to 1.
    fn progress(&self) -> f64;
    /// Returns the result so far, without the warm-up. Called during the measurement.
    fn so_far(&self) -> Measured;
    /// Returns the final result.
    fn measured(&self) -> Measured;
}

/// A connection, with the part of the measurement that runs on it.
#[derive(Debug)]
struct MeasuredConnection {
    work: Box<dyn ConnectionWork>,
    /// True if the work on this connection can begin. One-sided operations can begin only after a message of the server has named its
    /// memory; other work can begin immediately.
    ready: bool,
}

/// The handler of the client in one measurement.
// local: connections of the job
#[derive(Debug)]
struct Client<'a> {
    plan: Plan,
    dial: Dial,
    /// A number that identifies this client to the server, on all of its connections.
    number: u32,
    /// The established connections. Their work begins when all of them are established.
    lines: BTreeMap<ConnectionId, MeasuredConnection>,
    begun: bool,
    /// True if the client has requested the server's processor time. The client requests it after the measurement.
    asked: bool,
    /// The results of the connections that have ended, added up.
    measured: Measured,
    progress: Progress,
    draw_now: bool,
    intervals: Intervals,
    report_now: bool,
    tables: &'a mut Output,
    /// The processor time that this process had used when the first connection was established.
    spent_before: Duration,
    processors: ProcessorTimes,
    interrupted: bool,
    /// The reason why the measurement failed; `None` if it has not failed.
    failure: Option<Failure>,
    /// True if all connections have ended and no more will be opened.
    gone: bool,
}

/// Runs the measurement that the plan describes. `dial` remembers which of the server's addresses worked. The lines about intervals are
/// printed to `tables`.
///
/// # Errors
/// The server cannot be reached, the connection to it ends, or it is not an `rdma-pingpong` server.
pub fn run(plan: &Plan, dial: &mut Dial, interrupt: &Interrupt, tables: &mut Output) -> Result<Figures, Failure> {
    let mut reactor = plan.job.reactor(plan.provider, &plan.security)?;
    interrupt.stops(reactor.handle());
    let mut client = Client {
        plan: plan.clone(),
        dial: dial.clone(),
        number: RandomState::new().hash_one(0) as u32,
        lines: BTreeMap::new(),
        begun: false,
        asked: false,
        measured: Measured::none(),
        progress: Progress::new(plan),
        draw_now: false,
        intervals: Intervals::new(plan.job.size),
        report_now: false,
        tables,
        spent_before: processor::time(),
        processors: ProcessorTimes::default(),
        interrupted: false,
        failure: None,
        gone: false,
    };
    client.connect(&mut reactor.context());
    while !client.gone {
        match plan.job.is_watched() || plan.rate.is_some() {
            true => {
                watch::run(&mut reactor, &mut client, &plan.job, |client| client.gone || client.is_to_stop(interrupt))?
            }
            false => reactor.run(&mut client)?,
        }
        if client.is_to_stop(interrupt) {
            client.interrupt(&mut reactor.context());
        }
    }
    *dial = client.dial.again();
    if let Some(failure) = client.failure {
        return Err(failure);
    }
    Ok(Figures {
        plan: plan.clone(),
        measured: client.measured,
        intervals: client.intervals.ended,
        processors: client.processors,
        provider: reactor.provider_name(),
        stats: reactor.stats(),
        interrupted: client.interrupted,
    })
}

impl Client<'_> {
    fn is_to_stop(&self, interrupt: &Interrupt) -> bool {
        interrupt.is_raised() && !self.interrupted
    }

    fn connect(&mut self, cx: &mut Context<'_>) {
        let mut options = ConnectOptions::new().private_data(self.plan.job.encode(self.number));
        if let Some(exchange) = &self.plan.exchange {
            options = options.exchange(exchange.clone());
        }
        if let Err(error) = cx.connect_with(self.dial.address(), options) {
            let address = self.dial.address();
            self.fail(cx, Failure::new(format!("cannot connect to {address}: {error}")));
        }
    }

    fn fail(&mut self, cx: &mut Context<'_>, failure: Failure) {
        self.failure.get_or_insert(failure);
        self.close_all(cx);
        self.end_if_alone(cx);
    }

    fn close_all(&self, cx: &mut Context<'_>) {
        self.lines.keys().for_each(|&connection| cx.close(connection));
    }

    fn end_if_alone(&mut self, cx: &mut Context<'_>) {
        if self.lines.is_empty() {
            self.gone = true;
            cx.stop();
        }
    }

    fn interrupt(&mut self, cx: &mut Context<'_>) {
        self.interrupted = true;
        if self.lines.is_empty() {
            self.gone = true;
            return;
        }
        cx.timers().set(WIND_DOWN, GIVE_UP);
        self.lines.values_mut().for_each(|line| line.work.wind_down());
        self.proceed_with_all(cx);
    }

    /// Begins the work of all connections if all of them are ready.
    fn begin_if_ready(&mut self, cx: &mut Context<'_>) {
        let all = self.lines.len() == usize::from(self.plan.job.connections);
        if !all || self.interrupted || !self.lines.values().all(|line| line.ready) {
            return;
        }
        self.begun = true;
        if self.progress.is_seen() {
            cx.timers().set(TICK, DRAW);
        }
        self.plan.interval.into_iter().for_each(|every| _ = cx.timers().set(every, INTERVAL));
        self.lines.values_mut().for_each(|line| line.work.begin());
        self.proceed_with_all(cx);
    }

    fn proceed_with_all(&mut self, cx: &mut Context<'_>) {
        let connections: Vec<_> = self.lines.keys().copied().collect();
        connections.into_iter().for_each(|connection| self.proceed(cx, connection));
    }

    /// Continues the work of a connection after an event, and closes the connection if its work is over.
    fn go_on(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        // The progress bar is drawn between two messages of this connection, so that the time for drawing is not measured as latency.
        if std::mem::take(&mut self.draw_now) {
            self.draw();
            self.resume(connection);
        }
        if std::mem::take(&mut self.report_now) {
            self.report();
            self.resume(connection);
        }
        self.proceed(cx, connection);
    }

    fn resume(&mut self, connection: ConnectionId) {
        if let Some(line) = self.lines.get_mut(&connection) {
            line.work.resume();
        }
    }

    fn draw(&self) {
        let share: f64 = self.lines.values().map(|line| line.work.progress()).sum();
        self.progress.show(share / self.lines.len().max(1) as f64);
    }

    /// Prints the line about an interval.
    fn report(&mut self) {
        let so_far = self.lines.values().map(|line| line.work.so_far()).fold(self.measured.clone(), Measured::and);
        if let Some(interval) = self.intervals.end(so_far, Instant::now()) {
            self.tables.line(interval);
        }
    }

    fn proceed(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        let Some(line) = self.lines.get_mut(&connection) else { return };
        line.work.proceed(cx, connection);
        if line.work.is_over() && !self.asked {
            self.finish(cx, connection);
        }
    }

    /// Closes a connection whose work is over. When the work of all connections is over, first requests the server's processor time.
    fn finish(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        if !self.lines.values().all(|line| line.work.is_over()) {
            return cx.close(connection);
        }
        self.processors.client = processor::time().saturating_sub(self.spent_before);
        match cx.send(connection, &Frame::Ask.control()) {
            Ok(_) => _ = cx.timers().set(ANSWER, GIVE_UP),
            // The send queue is full because of the last message. When the reactor calls `on_writable`, the client sends the request again.
            Err(SendErrorKind::WouldBlock(_)) => return,
            Err(_) => cx.close(connection),
        }
        self.asked = true;
    }
}

impl Handler for Client<'_> {
    fn on_connect(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        let work: Box<dyn ConnectionWork> = match self.plan.job.mode {
            Mode::Latency => match self.plan.rate {
                Some(rate) => Box::new(Paced::new(&self.plan, rate)),
                None => Box::new(Latency::new(&self.plan)),
            },
            Mode::Throughput => Box::new(Throughput::new(&self.plan)),
        };
        if self.lines.is_empty() {
            self.spent_before = processor::time();
        }
        // One-sided operations cannot begin before the server's memory has arrived.
        self.lines.insert(connection, MeasuredConnection { work, ready: self.plan.job.op == Op::Send });
        if self.failure.is_some() || self.interrupted {
            return cx.close(connection);
        }
        if self.lines.len() < usize::from(self.plan.job.connections) {
            self.connect(cx);
        }
        self.begin_if_ready(cx);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, connection: ConnectionId, message: Message<'_>) {
        let Some(line) = self.lines.get_mut(&connection) else { return };
        if !self.begun {
            if let Some(Frame::Lent(memory)) = Frame::read(&message, self.plan.job.size) {
                line.ready = true;
                match line.work.lent(cx, connection, memory) {
                    Ok(()) => self.begin_if_ready(cx),
                    Err(failure) => self.fail(cx, failure),
                }
                return;
            }
        }
        if self.asked {
            if let Some(Frame::Spent(time)) = Frame::read(&message, self.plan.job.size) {
                self.processors.server = Some(Duration::from_nanos(time));
                return self.close_all(cx);
            }
        }
        if self.plan.job.touch {
            touch::read(&message);
        }
        match line.work.arrived(&message) {
            Ok(()) => self.go_on(cx, connection),
            Err(what) => {
                let address = self.dial.address();
                self.fail(cx, Failure::new(format!("the server {address} violated the protocol: {what}")));
            }
        }
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, connection: ConnectionId, send: SendId, outcome: Outcome) {
        let Some(line) = self.lines.get_mut(&connection).filter(|_| outcome.is_sent()) else { return };
        line.work.completed(send.kind());
        match send.kind() {
            SendKind::Read => self.go_on(cx, connection),
            _ => self.proceed(cx, connection),
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        if let Some(line) = self.lines.get_mut(&connection) {
            line.work.unblock();
            self.proceed(cx, connection);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, connection: ConnectionId, reason: DisconnectReason) {
        let Some(line) = self.lines.remove(&connection) else { return };
        if !line.work.is_over() && !self.interrupted {
            let (address, done) = (self.dial.address(), line.work.done());
            let what = match &reason {
                DisconnectReason::Internal(why) => format!("cannot go on after {done} messages: {why}"),
                _ => format!("the server {address} went away after {done} messages: {reason}; is it still running?"),
            };
            self.fail(cx, Failure::new(what));
        }
        let before = std::mem::replace(&mut self.measured, Measured::none());
        self.measured = before.and(line.work.measured());
        self.end_if_alone(cx);
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        match self.dial.failed(&error, cx.now()) {
            DialDecision::Again(pause) => {
                cx.timers().set(pause, CONNECT);
            }
            DialDecision::Fail(failure) => self.fail(cx, failure),
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, token: u64) {
        // In a throughput measurement, messages are always in flight, so there is no pause between two messages. But no latency is
        // measured, so the progress bar can be drawn at any time.
        let at_once = self.plan.job.mode == Mode::Throughput;
        match token {
            CONNECT if self.failure.is_none() && !self.interrupted => self.connect(cx),
            DRAW => {
                self.draw_now = !at_once;
                if at_once {
                    self.draw();
                }
                cx.timers().set(TICK, DRAW);
            }
            INTERVAL if !self.asked => {
                self.report_now = !at_once;
                if at_once {
                    self.report();
                }
                self.plan.interval.into_iter().for_each(|every| _ = cx.timers().set(every, INTERVAL));
            }
            GIVE_UP => self.close_all(cx),
            _ => {}
        }
    }
}

impl Watch for Client<'_> {
    fn is_watching(&self) -> bool {
        !self.gone && self.lines.values().next().is_some_and(|line| line.work.is_watching())
    }

    fn is_impatient(&self) -> bool {
        self.plan.rate.is_some()
    }

    #[inline]
    fn look(&mut self) -> bool {
        self.lines.values_mut().next().is_some_and(|line| line.work.look())
    }

    fn seen(&mut self, cx: &mut Context<'_>) {
        let Some((&connection, line)) = self.lines.iter_mut().next() else { return };
        line.work.seen();
        self.go_on(cx, connection);
        cx.flush(connection);
    }
}
