//! The client of one measurement. It connects, lets the [`Work`] measure, and closes.

use std::fmt::Debug;
use std::time::Duration;

use rdma_reactor::{
    ConnectError, ConnectOptions, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, RemoteRegion,
    SendId, SendKind, TimerId,
};

use super::dial::{Dial, Next};
use super::failure::Failure;
use super::figures::{Figures, Measured};
use super::frame::Frame;
use super::interrupt::Interrupt;
use super::job::{Mode, Op};
use super::latency::Latency;
use super::plan::Plan;
use super::progress::Progress;
use super::throughput::Throughput;
use super::watch::{self, Watch};

/// Time between two drawings of the progress bar.
const TICK: Duration = Duration::from_millis(100);
/// Time that an interrupted measurement has to count the messages that have arrived.
const WIND_DOWN: Duration = Duration::from_secs(1);

/// Tokens of timers.
const CONNECT: u64 = 0;
const DRAW: u64 = 1;
const GIVE_UP: u64 = 2;

/// A measurement on an open connection.
pub trait Work: Debug {
    /// Starts the clock, as the connection is up.
    fn begin(&mut self);
    /// Takes the memory that the server has lent for one-sided operations. If this is called, it is called before
    /// [`Work::begin`].
    ///
    /// # Errors
    /// The memory is of no use, or there is none on this side.
    fn lent(&mut self, cx: &mut Context<'_>, conn: ConnectionId, memory: RemoteRegion) -> Result<(), Failure>;
    /// Handles a message.
    ///
    /// # Errors
    /// The server does something else than it was asked for.
    fn arrived(&mut self, message: &[u8]) -> Result<(), String>;
    /// Sends as much as there is to send and room for.
    fn proceed(&mut self, cx: &mut Context<'_>, conn: ConnectionId);
    /// Notes that there is room again after a refused send.
    fn unblock(&mut self);
    /// Handles the completion of a send.
    fn completed(&mut self, kind: SendKind);
    /// Restarts the clock of the next message, because something other than the work took time.
    fn resume(&mut self) {}
    /// Whether there is memory to look at.
    fn is_watching(&self) -> bool {
        false
    }
    /// Looks at the memory; returns whether the server has written.
    fn look(&mut self) -> bool {
        false
    }
    /// Handles a write that [`Work::look`] has seen.
    fn seen(&mut self) {}
    /// Ends early, at the latest when the messages on their way have arrived.
    fn wind_down(&mut self);
    /// Whether nothing is left to do.
    fn is_over(&self) -> bool;
    /// Number of messages so far.
    fn done(&self) -> u64;
    /// Share of the measurement that is done, 0 to 1.
    fn progress(&self) -> f64;
    /// The result.
    fn measured(&self) -> Measured;
}

/// The client of one measurement.
#[derive(Debug)]
struct Client {
    plan: Plan,
    dial: Dial,
    work: Box<dyn Work>,
    connection: Option<ConnectionId>,
    /// The work has begun.
    begun: bool,
    progress: Progress,
    draw_now: bool,
    interrupted: bool,
    /// The reason, if the measurement ended before the work was over.
    failure: Option<Failure>,
    /// The connection is gone, or there will be none.
    gone: bool,
}

/// Carries out a plan, and remembers the address that worked.
///
/// # Errors
/// There is no such server, the server went away, or it is another program.
pub fn run(plan: &Plan, dial: &mut Dial, interrupt: &Interrupt) -> Result<Figures, Failure> {
    let mut reactor = plan.job.reactor(plan.provider, &plan.security)?;
    interrupt.stops(reactor.remote());
    let work: Box<dyn Work> = match plan.job.mode {
        Mode::Latency => Box::new(Latency::new(plan)),
        Mode::Throughput => Box::new(Throughput::new(plan)),
    };
    let mut client = Client {
        plan: plan.clone(),
        dial: dial.clone(),
        work,
        connection: None,
        begun: false,
        progress: Progress::new(plan),
        draw_now: false,
        interrupted: false,
        failure: None,
        gone: false,
    };
    client.connect(&mut reactor.context());
    while !client.gone {
        match plan.job.is_watched() {
            true => watch::run(&mut reactor, &mut client, |client| client.gone || client.is_to_stop(interrupt))?,
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
        measured: client.work.measured(),
        provider: reactor.provider_name(),
        stats: reactor.stats(),
        interrupted: client.interrupted,
    })
}

impl Client {
    fn is_to_stop(&self, interrupt: &Interrupt) -> bool {
        interrupt.is_raised() && !self.interrupted
    }

    fn connect(&mut self, cx: &mut Context<'_>) {
        let options = ConnectOptions::new().private_data(self.plan.job.encode());
        if let Err(error) = cx.connect_with(self.dial.address(), options) {
            let address = self.dial.address();
            self.fail(cx, Failure::new(format!("cannot connect to {address}: {error}")));
        }
    }

    fn fail(&mut self, cx: &mut Context<'_>, failure: Failure) {
        self.failure.get_or_insert(failure);
        match self.connection {
            Some(connection) => cx.close(connection),
            None => {
                self.gone = true;
                cx.stop();
            }
        }
    }

    fn interrupt(&mut self, cx: &mut Context<'_>) {
        self.interrupted = true;
        let Some(connection) = self.connection else {
            self.gone = true;
            return;
        };
        self.work.wind_down();
        cx.set_timer(WIND_DOWN, GIVE_UP);
        self.proceed(cx, connection);
    }

    fn begin(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        self.begun = true;
        self.work.begin();
        self.proceed(cx, connection);
    }

    /// Goes on after an event.
    fn go_on(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        // The bar is drawn between two messages, so that the time of drawing is not part of a latency.
        if std::mem::take(&mut self.draw_now) {
            self.progress.show(self.work.progress());
            self.work.resume();
        }
        self.proceed(cx, connection);
    }

    fn proceed(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        self.work.proceed(cx, connection);
        if self.work.is_over() {
            cx.close(connection);
        }
    }
}

impl Handler for Client {
    fn on_connect(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        self.connection = Some(connection);
        if self.progress.is_seen() {
            cx.set_timer(TICK, DRAW);
        }
        // One-sided operations need the server's memory first.
        if self.plan.job.op == Op::Send {
            self.begin(cx, connection);
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, connection: ConnectionId, message: Message<'_>) {
        if !self.begun
            && let Some(Frame::Lent(memory)) = Frame::read(&message, self.plan.job.size)
        {
            match self.work.lent(cx, connection, memory) {
                Ok(()) => self.begin(cx, connection),
                Err(failure) => self.fail(cx, failure),
            }
            return;
        }
        match self.work.arrived(&message) {
            Ok(()) => self.go_on(cx, connection),
            Err(what) => {
                let address = self.dial.address();
                self.fail(cx, Failure::new(format!("the server {address} does not keep to the protocol: {what}")));
            }
        }
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, connection: ConnectionId, send: SendId, outcome: Outcome) {
        if !outcome.is_sent() {
            return;
        }
        self.work.completed(send.kind());
        match send.kind() {
            SendKind::Read => self.go_on(cx, connection),
            _ => self.proceed(cx, connection),
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        self.work.unblock();
        self.proceed(cx, connection);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        if !self.work.is_over() && !self.interrupted {
            let (address, done) = (self.dial.address(), self.work.done());
            let what = match &reason {
                DisconnectReason::Internal(why) => format!("cannot go on after {done} messages: {why}"),
                _ => format!("the server {address} went away after {done} messages: {reason}; is it still running?"),
            };
            self.failure.get_or_insert(Failure::new(what));
        }
        self.gone = true;
        cx.stop();
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        match self.dial.failed(&error, cx.now()) {
            Next::Again(pause) => {
                cx.set_timer(pause, CONNECT);
            }
            Next::Fail(failure) => self.fail(cx, failure),
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, token: u64) {
        match (token, self.connection) {
            (CONNECT, None) => self.connect(cx),
            (DRAW, _) => {
                // A stream has no quiet moment, but also no single message whose time could be spoiled.
                self.draw_now = true;
                if self.plan.job.mode == Mode::Throughput {
                    self.progress.show(self.work.progress());
                }
                cx.set_timer(TICK, DRAW);
            }
            (GIVE_UP, Some(connection)) => cx.close(connection),
            _ => {}
        }
    }
}

impl Watch for Client {
    fn is_watching(&self) -> bool {
        self.work.is_watching() && self.connection.is_some() && !self.gone
    }

    #[inline]
    fn look(&mut self) -> bool {
        self.work.look()
    }

    fn seen(&mut self, cx: &mut Context<'_>) {
        let Some(connection) = self.connection else { return };
        self.work.seen();
        self.go_on(cx, connection);
        cx.flush(connection);
    }
}
