//! The server of `rdma-pingpong`. It serves clients sequentially. A client sends the parameters of its measurement. These parameters apply
//! to all connections of the client.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::process;
use std::thread;
use std::time::Duration;

use rdma_reactor::transport;
use rdma_reactor::{
    ConnectRequest, ConnectionId, Context, Decision, DisconnectReason, Error, ExchangeOptions, Handler, ListenOptions,
    Message, Outcome, Reactor, Region, SendErrorKind, SendId,
};

use super::address;
use super::cli::ServerArgs;
use super::device::Carrier;
use super::failure::{Ending, Failure};
use super::frame::Frame;
use super::interrupt::Interrupt;
use super::job::{Job, Mode, Op, Reply};
use super::outlet::{Outlet, Sent};
use super::output::Output;
use super::processor;
use super::stream::Stream;
use super::target::{self, Inbox, Target};
use super::touch;
use super::watch::{self, Watch};

/// The time limit for the clients to receive the close of their connections when the server ends.
const FAREWELL: Duration = Duration::from_secs(1);
/// The largest number of attempts to listen again on the port of a listener that was closed, and
/// the pause between two attempts.
const RELISTEN: (u32, Duration) = (50, Duration::from_millis(20));

/// The beginning of the line that a server prints when it listens. The address follows. A program that starts a server waits for this
/// line.
pub const LISTENING: &str = "listening on ";
/// The text between the address and the provider's name in the line that begins with [`LISTENING`]. A closing parenthesis follows the name.
pub const PROVIDER: &str = "(provider ";

/// Runs `rdma-pingpong server`.
///
/// # Errors
/// The server cannot listen on the address, or the provider is not available.
pub fn run(args: &ServerArgs) -> Result<Ending, Failure> {
    let carrier = Carrier::new(&args.device)?;
    let (provider, security) = (carrier.provider, args.device.security.security()?);
    let mut address = match (&args.bind, carrier.address()) {
        (Some(bind), _) => address::resolve(bind, args.port)?[0],
        (None, own) => SocketAddr::new(own.unwrap_or(Ipv4Addr::UNSPECIFIED.into()), args.port),
    };
    carrier.check_own(address)?;
    let interrupt = Interrupt::on_signals()?;
    if args.child {
        end_with_stdin(interrupt.clone());
    }
    let mut job = Job::IDLE;
    let mut output = Output::stdout();
    let mut first = true;
    // The settings of a reactor cannot change. So when a client needs other settings, the server makes a new reactor, which listens on
    // the same port.
    loop {
        let mut reactor = job.reactor(provider, &security)?;
        interrupt.stops(reactor.handle());
        address = listen(&mut reactor, address, first, args.device.exchange())?;
        if first {
            output.line(format_args!("{LISTENING}{address} {PROVIDER}{})", reactor.provider_name()));
            first = false;
        }
        let mut server = JobServer {
            job,
            next: None,
            client: ServedClient::default(),
            sessions: BTreeMap::new(),
            output,
            quiet: args.child,
        };
        match job.is_watched() {
            true => {
                watch::run(&mut reactor, &mut server, &job, |server| server.next.is_some() || interrupt.is_raised())?
            }
            false => reactor.run(&mut server)?,
        }
        reactor.shutdown(&mut server, FAREWELL)?;
        output = server.output;
        match server.next {
            Some(next) if !interrupt.is_raised() => job = next,
            // Only the user ends a server, so this is its normal end.
            _ => return Ok(Ending::Complete),
        }
    }
}

/// Listens on an address. After a listener was closed, its address may still be in use for a moment, so the listen is retried. `first` is
/// true if no listener was closed before; then there is only one attempt.
fn listen(
    reactor: &mut Reactor,
    address: SocketAddr,
    first: bool,
    exchange: Option<ExchangeOptions>,
) -> Result<SocketAddr, Failure> {
    let options = exchange.map_or_else(ListenOptions::new, |exchange| ListenOptions::new().exchange(exchange));
    let mut tries = if first { 1 } else { RELISTEN.0 };
    loop {
        let mut cx = reactor.context();
        let error = match cx.listen_with(address, options.clone()) {
            Ok(listener) => return Ok(cx.listeners().local_address(listener).unwrap_or(address)),
            Err(error) => error,
        };
        tries -= 1;
        let in_use = matches!(&error, rdma_reactor::Error::Transport(transport::TransportError::Listen { source, .. })
            if source.kind() == io::ErrorKind::AddrInUse);
        match (in_use, tries) {
            (false, _) => return Err(Failure::new(format!("{error}; check --bind and --port"))),
            (true, 0) => {
                let cure = "another program listens there: end it, or choose another --port";
                return Err(Failure::new(format!("cannot listen on {address}: {cure}")));
            }
            (true, _) => thread::sleep(RELISTEN.1),
        }
    }
}

/// Requests the end of the program when standard input ends, because the program that started this server has then ended.
fn end_with_stdin(interrupt: Interrupt) {
    thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut bytes = [0; 64];
        while !matches!(stdin.read(&mut bytes), Ok(0) | Err(_)) {}
        interrupt.raise();
        thread::sleep(2 * FAREWELL);
        process::exit(1);
    });
}

/// The handler of the server, for jobs with the same parameters.
#[derive(Debug)]
struct JobServer {
    job: Job,
    /// The parameters that a client has requested and that differ from the current ones.
    next: Option<Job>,
    client: ServedClient,
    sessions: BTreeMap<ConnectionId, Session>, // bound: tool-pingpong
    output: Output,
    quiet: bool,
}

/// The client that is being served.
#[derive(Debug, Default)]
struct ServedClient {
    /// The number that identifies the client on all of its connections.
    number: u32,
    peer: Option<SocketAddr>,
    /// The number of data messages, summed over the ended connections of this client.
    total: u64,
    /// The processor time that this process had used when the client's first connection was established.
    spent_before: Duration,
}

/// The state of one connection of the client.
#[derive(Debug)]
struct Session {
    connection: ConnectionId,
    role: SessionRole,
    /// The number of data messages received in the current round: the warm-up or the measurement.
    received: u64,
    /// The number of data messages received in all rounds.
    total: u64,
    /// The reply with the processor time, if it is not sent yet because the send queue is full.
    report: Option<Frame>,
}

#[derive(Debug)]
enum SessionRole {
    /// Answers each message with a message. `owed` is the number of answers that are still to be sent.
    Echo { outlet: Outlet, owed: u64 },
    /// Receives messages. If the job is bidirectional, also sends a stream.
    Sink { stream: Stream },
    /// Answers each RDMA Write of the client with an RDMA Write. `owed` is the number of answers that are still to be posted.
    Mirror { inbox: Inbox, outlet: Outlet, aimed: bool, owed: u64 },
    /// Provides memory for one-sided operations of the client, and waits until the client reports that they have ended.
    Lender { stream: Stream, _memory: Region },
}

impl JobServer {
    fn decide(&mut self, cx: &mut Context<'_>, private_data: &[u8]) -> Result<(), Reply> {
        let (job, number) = Job::decode(private_data).map_err(Reply::Refused)?;
        // Uses the reactor's count of connections, which includes the connections that are still being established. The server cannot count
        // those itself, because it is not notified when one of them fails.
        let served = cx.connections();
        let is_another =
            served > 0 && (job != self.job || number != self.client.number || served >= usize::from(job.connections));
        if is_another || self.next.is_some() {
            return Err(Reply::Busy);
        }
        if job == self.job {
            self.client.number = number;
            return Ok(());
        }
        if let Err(failure) = job.wait.policy() {
            return Err(Reply::Refused(failure.to_string()));
        }
        self.next = Some(job);
        cx.stop();
        Err(Reply::Adapting)
    }
}

impl Session {
    fn new(cx: &mut Context<'_>, connection: ConnectionId, job: &Job) -> Result<Self, Error> {
        let mut outlet = Outlet::new(job);
        let stream = Stream::new(job);
        let role = match (job.mode, job.op) {
            (Mode::Latency, Op::Send) => SessionRole::Echo { outlet, owed: 0 },
            (Mode::Throughput, Op::Send) => SessionRole::Sink { stream },
            (_, Op::Write | Op::Read) => {
                let memory = target::lend(cx, connection, job)?;
                // The result is ignored: this is the first message, so the send queue is not full.
                outlet.control(cx, connection, Frame::Lent(memory.remote()));
                match job.is_watched() {
                    true => SessionRole::Mirror { inbox: Inbox::new(memory), outlet, aimed: false, owed: 0 },
                    false => SessionRole::Lender { stream, _memory: memory },
                }
            }
        };
        Ok(Self { connection, role, received: 0, total: 0, report: None })
    }

    /// Sends the reply with the processor time, if one is pending. If the send queue is full, the reply stays pending, and `on_writable`
    /// sends it.
    fn send_report(&mut self, cx: &mut Context<'_>) {
        let Some(report) = self.report else { return };
        if !matches!(cx.send(self.connection, &report.control()), Err(SendErrorKind::WouldBlock(_))) {
            self.report = None;
        }
    }

    /// Handles a message. Returns false if the message is not part of the job.
    fn arrived(&mut self, cx: &mut Context<'_>, message: &[u8], job: &Job) -> bool {
        match (Frame::read(message, job.size), &mut self.role) {
            (Some(Frame::Data), role) => {
                self.received += 1;
                self.total += 1;
                match role {
                    SessionRole::Echo { owed, .. } => *owed += 1,
                    SessionRole::Mirror { .. } | SessionRole::Lender { .. } => return false,
                    SessionRole::Sink { stream } if job.bidirectional && self.received == 1 => stream.start(u64::MAX),
                    SessionRole::Sink { .. } => {}
                }
                true
            }
            (Some(Frame::Last(count)), SessionRole::Sink { stream }) => {
                let sent = if job.bidirectional { stream.sent() } else { self.received };
                stream.end(Frame::Done(sent));
                std::mem::take(&mut self.received) == count
            }
            (Some(Frame::Last(count)), SessionRole::Lender { stream, .. }) => {
                // One-sided operations do not notify the server, so the server cannot count them. The client has sent their number.
                stream.end(Frame::Done(count));
                self.total += count;
                true
            }
            (Some(Frame::Lent(memory)), SessionRole::Mirror { outlet, aimed: aimed @ false, .. }) => {
                let target = Target::new(cx, self.connection, job.size, job.op, memory);
                match target.and_then(|target| target.counting(cx, self.connection)) {
                    Ok(target) => outlet.aim(target),
                    Err(failure) => {
                        log::warn!("{}: {failure}", self.connection);
                        return false;
                    }
                }
                *aimed = true;
                true
            }
            _ => false,
        }
    }

    fn proceed(&mut self, cx: &mut Context<'_>) {
        match &mut self.role {
            SessionRole::Echo { outlet, owed } | SessionRole::Mirror { outlet, owed, .. } => {
                while *owed > 0 && outlet.data(cx, self.connection) == Sent::Yes {
                    *owed -= 1;
                }
            }
            SessionRole::Sink { stream } | SessionRole::Lender { stream, .. } => stream.pump(cx, self.connection),
        }
    }
}

impl Handler for JobServer {
    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        match self.decide(cx, request.private_data) {
            Ok(()) => Decision::Accept,
            Err(reply) => {
                log::debug!("{}: {reply:?}", request.peer);
                Decision::Reject(reply.encode())
            }
        }
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        log::info!("serving {connection}: {}", self.job);
        if self.sessions.is_empty() {
            let number = self.client.number;
            let peer = cx.connection(connection).peer_address();
            self.client = ServedClient { number, peer, total: 0, spent_before: processor::time() };
        }
        match Session::new(cx, connection, &self.job) {
            Ok(session) => _ = self.sessions.insert(connection, session),
            Err(error) => {
                log::warn!("{connection}: {error}");
                cx.close(connection);
            }
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, connection: ConnectionId, message: Message<'_>) {
        let Some(session) = self.sessions.get_mut(&connection) else { return };
        if self.job.touch {
            touch::read(&message);
        }
        if session.arrived(cx, &message, &self.job) {
            session.proceed(cx);
        } else if Frame::read(&message, self.job.size) == Some(Frame::Ask) {
            let spent = processor::time().saturating_sub(self.client.spent_before);
            let spent = Frame::Spent(u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX));
            session.report = Some(spent);
            session.send_report(cx);
        } else {
            log::warn!("{connection}: a message that is not part of its job");
            cx.close(connection);
        }
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, connection: ConnectionId, _: SendId, outcome: Outcome) {
        if let Some(session) = self.sessions.get_mut(&connection) {
            if let SessionRole::Sink { stream } | SessionRole::Lender { stream, .. } = &mut session.role {
                stream.completed();
            }
            if outcome.is_sent() {
                session.proceed(cx);
            }
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, connection: ConnectionId) {
        if let Some(session) = self.sessions.get_mut(&connection) {
            match &mut session.role {
                SessionRole::Echo { outlet, .. } | SessionRole::Mirror { outlet, .. } => outlet.unblock(),
                SessionRole::Sink { stream } | SessionRole::Lender { stream, .. } => stream.unblock(),
            }
            session.proceed(cx);
            session.send_report(cx);
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, connection: ConnectionId, reason: DisconnectReason) {
        log::info!("{connection}: {reason}");
        let Some(session) = self.sessions.remove(&connection) else { return };
        self.client.total += session.total;
        if self.sessions.is_empty() && !self.quiet {
            let peer = self.client.peer.map_or_else(|| "a client".into(), |peer| peer.to_string());
            let (job, total) = (self.job, self.client.total);
            self.output.line(format_args!("{peer}: {job}: {total} messages, warm-up included, {reason}"));
        }
    }
}

impl Watch for JobServer {
    fn is_watching(&self) -> bool {
        matches!(self.sessions.values().next(), Some(Session { role: SessionRole::Mirror { aimed: true, .. }, .. }))
    }

    #[inline]
    fn look(&mut self) -> bool {
        let session = self.sessions.values_mut().next();
        let Some(Session { role: SessionRole::Mirror { inbox, owed, .. }, received, total, .. }) = session else {
            return false;
        };
        let come = inbox.has_come();
        if come {
            (*owed, *received, *total) = (*owed + 1, *received + 1, *total + 1);
        }
        come
    }

    fn seen(&mut self, cx: &mut Context<'_>) {
        if let Some(session) = self.sessions.values_mut().next() {
            session.proceed(cx);
            cx.flush(session.connection);
        }
    }
}
