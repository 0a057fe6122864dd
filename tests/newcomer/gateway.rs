//! A gateway: tasks of tokio forward the requests of clients to a backend. If a client gives up,
//! the gateway drops the future of its call. That cancels the call, and the backend stops its work
//! on it. The backend is a reactor with callbacks.

use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use rdma_reactor::call::{
    CallContext, CallError, CallHandler, CallId, CallResult, ReceivedPayload, RequestId, WithCalls,
};
use rdma_reactor::threaded::{Caller, ThreadedReactor};
use rdma_reactor::{Config, ConnectionId, DisconnectReason, ProviderChoice, Reactor, ReactorHandle, TimerId};
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

const CLIENTS: u64 = 30;
const REQUESTS_PER_CLIENT: u64 = 10;
const CONNECTIONS: usize = 3;
/// The deadline of each call, and of the drains. Nothing is expected to take so long.
const DEADLINE: Duration = Duration::from_secs(300);
/// The time after which a client gives up a request that is not answered for a long time.
const PATIENCE: Duration = Duration::from_millis(20);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// How long the backend works on a request.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    /// It answers in the callback.
    Prompt,
    /// It answers a little later.
    Slow,
    /// It answers so late that the client has given up.
    Endless,
}

impl Work {
    const ALL: [Self; 3] = [Self::Prompt, Self::Slow, Self::Endless];

    const fn time(self) -> Option<Duration> {
        match self {
            Self::Prompt => None,
            Self::Slow => Some(Duration::from_millis(3)),
            Self::Endless => Some(DEADLINE),
        }
    }
}

/// A request of the backend: its work, and the number to square.
fn encode(work: Work, number: u64) -> Vec<u8> {
    [&[work as u8][..], &number.to_le_bytes()].concat()
}

fn decode(payload: &[u8]) -> Option<(Work, u64)> {
    let (&work, number) = payload.split_first()?;
    Some((*Work::ALL.get(usize::from(work))?, decode_number(number)?))
}

fn decode_number(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// A request on which the backend works: the timer that ends the work, and the number to square.
struct Unfinished {
    timer: TimerId,
    number: u64,
}

/// The backend. The tag of its calls is `()`, because it makes none.
#[derive(Default)]
struct Backend {
    unfinished: BTreeMap<RequestId, Unfinished>,
    requests: u64,
    cancelled: u64,
    failures: Vec<String>,
}

impl Backend {
    fn answer(&mut self, cx: &mut CallContext<'_, ()>, id: RequestId, number: u64) {
        if let Err(error) = cx.answer(id, &(number * number).to_le_bytes()) {
            self.failures.push(format!("the answer to {number}: {error}"));
        }
    }
}

impl CallHandler for Backend {
    type Tag = ();

    fn on_request(&mut self, cx: &mut CallContext<'_, ()>, id: RequestId, payload: ReceivedPayload<'_>) {
        self.requests += 1;
        let Some((work, number)) = decode(&payload) else {
            self.failures.push("a request that is not one".into());
            return cx.dismiss(id);
        };
        match work.time() {
            None => self.answer(cx, id, number),
            Some(time) => {
                let timer = cx.context().timers().set(time, 0);
                self.unfinished.insert(id, Unfinished { timer, number });
            }
        }
    }

    fn on_timer(&mut self, cx: &mut CallContext<'_, ()>, timer: TimerId, _: u64) {
        let done = self.unfinished.iter().find(|(_, work)| work.timer == timer);
        let Some((&id, &Unfinished { number, .. })) = done else { return };
        self.unfinished.remove(&id);
        self.answer(cx, id, number);
    }

    fn on_cancelled(&mut self, cx: &mut CallContext<'_, ()>, id: RequestId) {
        self.cancelled += 1;
        if let Some(work) = self.unfinished.remove(&id) {
            cx.context().timers().cancel(work.timer);
        }
        // A cancelled request must have an end, too. It sends nothing.
        cx.dismiss(id);
    }

    fn on_end(&mut self, _: &mut CallContext<'_, ()>, _: CallId, (): (), _: CallResult<'_>) {}

    fn on_disconnect(&mut self, _: &mut CallContext<'_, ()>, conn: ConnectionId, reason: DisconnectReason) {
        // The gateway closes its connections first. If the drain of the backend begins before it
        // notices, both have closed them.
        if !matches!(reason, DisconnectReason::Closed | DisconnectReason::Local { complete: true }) {
            self.failures.push(format!("{conn}: {reason}"));
        }
    }
}

/// A backend that runs on its own thread.
struct RunningBackend {
    address: SocketAddr,
    remote: ReactorHandle,
    thread: thread::JoinHandle<Result<(Backend, usize)>>,
}

impl RunningBackend {
    fn start() -> Result<Self> {
        let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
        let listener = reactor.context().listen(([127, 0, 0, 1], 0).into())?;
        let address = reactor.context().listeners().local_address(listener).ok_or("the listener is gone")?;
        let remote = reactor.handle();
        let thread = thread::spawn(move || {
            let mut calls = WithCalls::new(Backend::default());
            reactor.run(&mut calls)?;
            Ok((calls.handler, reactor.stats().connections.current))
        });
        Ok(Self { address, remote, thread })
    }

    /// Drains the backend. Returns it, and the number of its connections that are still open.
    fn end(self) -> Result<(Backend, usize)> {
        self.remote.drain(DEADLINE);
        self.thread.join().map_err(|_| "the backend has panicked")?
    }
}

/// A request of a client to the gateway.
struct Forward {
    work: Work,
    number: u64,
    reply: oneshot::Sender<std::result::Result<Option<u64>, CallError>>,
}

/// The gateway: a task for each request, over several connections in turn. Ends with its clients.
async fn gateway(callers: Vec<Caller>, mut requests: mpsc::Receiver<Forward>) -> Result<()> {
    let mut tasks = JoinSet::new();
    for caller in callers.iter().cycle() {
        let Some(request) = requests.recv().await else { break };
        tasks.spawn(forward(caller.clone(), request));
    }
    while let Some(task) = tasks.join_next().await {
        task?;
    }
    Ok(())
}

async fn forward(backend: Caller, mut request: Forward) {
    tokio::select! {
        answer = backend.call(encode(request.work, request.number), DEADLINE) => {
            // The client may have given up at this moment.
            let _ = request.reply.send(answer.map(|bytes| decode_number(&bytes)));
        }
        // The client has given up. The future of the call is dropped, which cancels the call.
        () = request.reply.closed() => {}
    }
}

/// Makes the requests of one client. Returns the number of right answers, and of requests that it
/// has given up.
async fn client(gateway: mpsc::Sender<Forward>, client: u64) -> Result<[u64; 2]> {
    let [mut right, mut given_up] = [0; 2];
    for nth in 0..REQUESTS_PER_CLIENT {
        let number = client * REQUESTS_PER_CLIENT + nth;
        let work = Work::ALL[number as usize % Work::ALL.len()];
        let patience = if work == Work::Endless { PATIENCE } else { DEADLINE };
        let (reply, answer) = oneshot::channel();
        gateway.send(Forward { work, number, reply }).await.map_err(|_| "the gateway has ended")?;
        match timeout(patience, answer).await {
            Err(_) if work == Work::Endless => given_up += 1,
            Ok(Ok(Ok(Some(square)))) if work != Work::Endless && square == number * number => right += 1,
            other => return Err(format!("the square of {number}: {other:?}").into()),
        }
    }
    Ok([right, given_up])
}

async fn session(backend: SocketAddr) -> Result<[u64; 2]> {
    let reactor = ThreadedReactor::start(Config::default().provider(ProviderChoice::Iwarp))?;
    let mut callers = Vec::new();
    for _ in 0..CONNECTIONS {
        callers.push(reactor.connect(backend).await?.calls().0);
    }
    let (sender, requests) = mpsc::channel(64);
    let gateway = tokio::spawn(gateway(callers, requests));
    let mut clients = JoinSet::new();
    for nth in 0..CLIENTS {
        clients.spawn(client(sender.clone(), nth));
    }
    drop(sender);
    let mut sums = [0; 2];
    while let Some(counts) = clients.join_next().await {
        sums.iter_mut().zip(counts??).for_each(|(sum, count)| *sum += count);
    }
    gateway.await??;
    reactor.drain(DEADLINE);
    reactor.ended().await?;
    Ok(sums)
}

/// Runs the backend, the gateway and its clients.
pub(super) fn run() -> Result<()> {
    let backend = RunningBackend::start()?;
    let runtime = Builder::new_multi_thread().worker_threads(4).enable_all().build()?;
    let [right, given_up] = runtime.block_on(session(backend.address))?;
    let (backend, open) = backend.end()?;
    if let Some(failure) = backend.failures.first() {
        return Err(failure.clone().into());
    }
    let (unfinished, requests, cancelled) = (backend.unfinished.len(), backend.requests, backend.cancelled);
    if (open, unfinished) != (0, 0) {
        return Err(format!("at the end: {open} open connections, {unfinished} unfinished requests").into());
    }
    // A call that is given up before it was sent never arrives.
    if right + given_up != CLIENTS * REQUESTS_PER_CLIENT || cancelled == 0 || requests != right + cancelled {
        return Err(format!("{right} right, {given_up} given up; {cancelled} of {requests} cancelled").into());
    }
    println!("{right} requests answered, {given_up} given up; the backend saw {cancelled} of {requests} cancelled");
    Ok(())
}
