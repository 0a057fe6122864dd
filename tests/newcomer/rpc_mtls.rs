//! An RPC service with certificates on both sides. The server adds numbers and stores values, for
//! the clients on its list. Three clients connect: one of the list, one of the same authority that
//! is not on the list, and one of another authority.

use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rdma_reactor::call::CallError;
use rdma_reactor::threaded::{
    Caller, ConnectionEnd, Requests, ThreadedListener, ThreadedPendingPeer, ThreadedPendingPeers, ThreadedReactor,
};
use rdma_reactor::{
    Config, ConnectError, ConnectOptions, DisconnectReason, ListenOptions, PeerName, ProviderChoice, Security,
    SecurityError, Tls, TlsIdentity,
};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

const SERVER: &str = "server.example";
/// The names of the clients that the server answers.
const ALLOWED: [&str; 1] = ["accounting.example"];
const REFUSAL: &str = "this client is not on the list";
/// Tasks of the allowed client: the number of calls that are open at the same time.
const TASKS: u64 = 8;
const CALLS_PER_TASK: u64 = 25;
/// The deadline of each call, and of the drains at the end. Nothing is expected to take so long.
const PATIENCE: Duration = Duration::from_secs(300);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// A certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    /// Returns the settings of a side that has a certificate of this authority for `name`, and
    /// trusts the peers of `peers`.
    fn security(&self, name: &str, peers: &Self) -> Result<Security> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![name.to_owned()])?.signed_by(&key, &self.0)?;
        let identity = TlsIdentity::from_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes())?;
        Ok(Security::Tls(Tls::mutual(&identity, peers.0.pem().as_bytes())?.server_name(SERVER)?))
    }
}

/// A request: the number of the method, and its arguments.
enum Request {
    /// Adds numbers.
    Sum(Vec<u64>),
    /// Stores a value under a key. The answer is the value that was there before.
    Store { key: u64, value: u64 },
}

impl Request {
    fn encode(&self) -> Vec<u8> {
        let (method, arguments) = match self {
            Self::Sum(numbers) => (0, numbers.clone()),
            Self::Store { key, value } => (1, vec![*key, *value]),
        };
        let arguments = arguments.iter().flat_map(|number| number.to_le_bytes());
        std::iter::once(method).chain(arguments).collect()
    }

    /// Returns `None` if the bytes are not a request.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (method, arguments) = bytes.split_first()?;
        let arguments: Option<Vec<u64>> = arguments.chunks(8).map(decode_number).collect();
        match (method, &arguments?[..]) {
            (0, numbers) => Some(Self::Sum(numbers.to_vec())),
            (1, &[key, value]) => Some(Self::Store { key, value }),
            _ => None,
        }
    }
}

fn decode_number(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// Decides about each authenticated peer. Returns the number of refused peers.
async fn admit(mut peers: ThreadedPendingPeers) -> u64 {
    let mut refused = 0;
    while let Some(peer) = peers.next().await {
        if is_allowed(&peer) {
            peer.accept();
        } else {
            peer.refuse(REFUSAL);
            refused += 1;
        }
    }
    refused
}

fn is_allowed(peer: &ThreadedPendingPeer) -> bool {
    let names = peer.identity().names();
    names.iter().any(|name| matches!(name, PeerName::Dns(name) if ALLOWED.contains(&name.as_str())))
}

/// Serves every accepted client. Returns the number of answers.
async fn serve_all(mut listener: ThreadedListener) -> Result<u64> {
    let store = Arc::new(Mutex::new(BTreeMap::new()));
    let mut clients = JoinSet::new();
    while let Some(conn) = listener.accept().await {
        clients.spawn(serve(conn.calls().1, Arc::clone(&store)));
    }
    let mut answers = 0;
    while let Some(client) = clients.join_next().await {
        answers += client??;
    }
    Ok(answers)
}

/// Serves a client until it disconnects. Returns the number of answers.
async fn serve(mut requests: Requests, store: Arc<Mutex<BTreeMap<u64, u64>>>) -> Result<u64> {
    let mut answers = 0;
    loop {
        let request = match requests.next().await {
            Ok(request) => request,
            // The client has closed the connection, or the server in its drain, or both.
            Err(ConnectionEnd::Disconnected(DisconnectReason::Closed | DisconnectReason::Local { complete: true })) => {
                return Ok(answers);
            }
            Err(end) => return Err(format!("a client has ended otherwise: {end}").into()),
        };
        let answer = match Request::decode(&request) {
            Some(Request::Sum(numbers)) => Some(numbers.iter().sum()),
            Some(Request::Store { key, value }) => store.lock().map_err(|_| "the store")?.insert(key, value),
            // The request is dropped. The caller gets `CallError::Unanswered`.
            None => continue,
        };
        request.answer(answer.map_or(Vec::new(), |number| number.to_le_bytes().to_vec()));
        answers += 1;
    }
}

async fn call(server: &Caller, request: Request) -> std::result::Result<Option<u64>, CallError> {
    Ok(decode_number(&server.call(request.encode(), PATIENCE).await?))
}

/// Makes the calls of one task, and checks each answer.
async fn work(server: Caller, task: u64) -> Result<()> {
    let mut stored = None;
    for nth in 0..CALLS_PER_TASK {
        let (request, expected) = if nth % 2 == 0 {
            (Request::Sum(vec![task, nth, 1_000]), Some(task + nth + 1_000))
        } else {
            (Request::Store { key: task, value: nth }, stored.replace(nth))
        };
        let answer = call(&server, request).await?;
        if answer != expected {
            return Err(format!("task {task}, call {nth}: {answer:?} instead of {expected:?}").into());
        }
    }
    Ok(())
}

/// Connects, and returns the reason for which the server refuses this side.
async fn refusal(reactor: &ThreadedReactor, address: SocketAddr, security: Security) -> Result<String> {
    match reactor.connect_with(address, ConnectOptions::new().security(security)).await {
        Err(ConnectError::Security(SecurityError::Refused(reason))) => Ok(reason),
        Err(error) => Err(format!("another error than a refusal: {error}").into()),
        Ok(_) => Err("a client was accepted that must be refused".into()),
    }
}

async fn session() -> Result<()> {
    let (authority, other) = (Authority::new("our authority")?, Authority::new("another authority")?);
    let config = Config::default().provider(ProviderChoice::Iwarp);
    let (server, clients) = (ThreadedReactor::start(config.clone())?, ThreadedReactor::start(config)?);
    let options = ListenOptions::new().security(authority.security(SERVER, &authority)?);
    let (listener, peers) = server.listen_with_approval(([127, 0, 0, 1], 0).into(), options).await?;
    let address = listener.local_address();
    let (admitting, serving) = (tokio::spawn(admit(peers)), tokio::spawn(serve_all(listener)));

    let options = ConnectOptions::new().security(authority.security(ALLOWED[0], &authority)?);
    let (caller, _) = clients.connect_with(address, options).await?.calls();
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        tasks.spawn(work(caller.clone(), task));
    }
    while let Some(task) = tasks.join_next().await {
        task??;
    }

    let unlisted = refusal(&clients, address, authority.security("visitor.example", &authority)?).await?;
    let unknown = refusal(&clients, address, other.security(ALLOWED[0], &authority)?).await?;
    if !unlisted.contains(REFUSAL) || !unknown.contains("UnknownCA") {
        return Err(format!("refused for other reasons: {unlisted}; {unknown}").into());
    }

    drop(caller);
    for reactor in [clients, server] {
        reactor.drain(PATIENCE);
        reactor.ended().await?;
    }
    let (refused, answers) = (admitting.await?, serving.await??);
    if refused != 1 || answers != TASKS * CALLS_PER_TASK {
        return Err(format!("{refused} clients refused by name, {answers} answers").into());
    }
    println!("{answers} answers right; refused: \"{unlisted}\", \"{unknown}\"");
    Ok(())
}

/// Runs the server and its three clients.
pub(super) fn run() -> Result<()> {
    Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(session())
}
