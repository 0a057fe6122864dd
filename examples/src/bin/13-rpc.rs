//! An RPC service with deadlines: 1,000 tasks on four threads share four connections, with certificates on both sides. Each tenth call
//! is to a procedure that takes too long, so the call ends at its deadline. At the end, clients without valid credentials try to
//! connect, and are refused.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rdma_reactor::call::CallError;
use rdma_reactor::threaded::{Caller, Requests, ThreadedListener, ThreadedReactor, ThreadedRequest};
use rdma_reactor::{Config, ProviderChoice, Security, Tls, TlsIdentity};
use tokio::task::JoinSet;

const TASKS: u64 = 1_000;
const CALLS: u64 = 20;
const CONNECTIONS: usize = 4;
const SERVER: &str = "server.example";
/// The deadline of a call that must be answered. Also the time limit of a drain.
const PATIENCE: Duration = Duration::from_secs(300);
/// The deadline of a call that must not be answered in time.
const SHORT: Duration = Duration::from_millis(50);
/// The time that the slow procedure takes.
const LONG: Duration = Duration::from_secs(3);
/// The number in a request for the procedure that adds numbers.
const SUM: u8 = 0;
/// The number in a request for the procedure that takes too long.
const SLOW: u8 = 1;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// A certificate authority, which signs the certificates of one or more sides.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    /// Returns the settings of a side. This authority signs the side's certificate for the name `own`. The side accepts peers with a
    /// certificate of the authority `peers`. If the side is a client, it expects a server with the name `server`.
    fn security(&self, own: &str, peers: &Self, server: &str) -> Result<Security> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![own.to_owned()])?.signed_by(&key, &self.0)?;
        let identity = TlsIdentity::from_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes())?;
        Ok(Security::Tls(Tls::mutual(&identity, peers.0.pem().as_bytes())?.server_name(server)?))
    }
}

fn reactor(security: Security) -> Result<ThreadedReactor> {
    Ok(ThreadedReactor::start(Config::default().provider(ProviderChoice::Iwarp).security(security))?)
}

/// Serves every client that connects.
async fn serve_all(mut listener: ThreadedListener) {
    while let Some(conn) = listener.accept().await {
        tokio::spawn(serve(conn.calls().1));
    }
}

/// Serves a client until it disconnects. Each request has its own task, so a slow request does not delay other requests.
async fn serve(mut requests: Requests) {
    while let Ok(request) = requests.next().await {
        tokio::spawn(procedure(request));
    }
}

async fn procedure(request: ThreadedRequest) {
    let Some((&name, argument)) = request.split_first() else { return };
    let Ok(argument) = <[u8; 8]>::try_from(argument) else { return };
    if name == SLOW {
        // The caller's deadline passes during this pause. The answer that this task sends after the pause has no effect.
        tokio::time::sleep(LONG).await;
    }
    let n = u64::from_le_bytes(argument);
    request.answer((n * (n + 1) / 2).to_le_bytes().to_vec());
}

async fn call(server: &Caller, name: u8, argument: u64, within: Duration) -> std::result::Result<u64, CallError> {
    let request = [&[name][..], &argument.to_le_bytes()].concat();
    let answer = server.call(request, within).await?;
    Ok(answer[..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)))
}

/// Makes the calls of one task. Returns three counts: correct answers, expired deadlines, and other results.
async fn client(server: Caller, task: u64) -> [u64; 3] {
    let [mut right, mut late, mut other] = [0; 3];
    for nth in 0..CALLS {
        let argument = task * CALLS + nth;
        let (name, within) = if nth % 10 == 9 { (SLOW, SHORT) } else { (SUM, PATIENCE) };
        match call(&server, name, argument, within).await {
            Ok(sum) if sum == argument * (argument + 1) / 2 => right += 1,
            Err(CallError::Deadline) => late += 1,
            _ => other += 1,
        }
    }
    [right, late, other]
}

/// Returns the settings of clients that the server must refuse. The key of each entry describes what is wrong with that client's
/// credentials.
fn strangers(authority: &Authority) -> Result<BTreeMap<&'static str, Security>> {
    let other = Authority::new("another authority")?;
    Ok(BTreeMap::from([
        ("no certificate", Security::Plain),
        ("a certificate of another authority", other.security("client", authority, SERVER)?),
        ("trusts another authority", authority.security("client", &other, SERVER)?),
        ("wants another server", authority.security("client", authority, "other.example")?),
    ]))
}

async fn run() -> Result<()> {
    let authority = Authority::new("the example's authority")?;
    let server = reactor(authority.security(SERVER, &authority, SERVER)?)?;
    let listener = server.listen(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
    let address = listener.local_address();
    let serving = tokio::spawn(serve_all(listener));
    let clients = reactor(authority.security("client", &authority, SERVER)?)?;
    let mut callers = Vec::new();
    for _ in 0..CONNECTIONS {
        callers.push(clients.connect(address).await?.calls().0);
    }
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        tasks.spawn(client(callers[task as usize % CONNECTIONS].clone(), task));
    }
    let mut sums = [0; 3];
    while let Some(ends) = tasks.join_next().await {
        sums.iter_mut().zip(ends?).for_each(|(sum, count)| *sum += count);
    }
    println!("{} calls: {} right, {} at their deadlines, {} other", TASKS * CALLS, sums[0], sums[1], sums[2]);
    if sums[2] > 0 {
        return Err(format!("{} calls had another result", sums[2]).into());
    }
    for (name, security) in strangers(&authority)? {
        match reactor(security)?.connect(address).await {
            Ok(_) => return Err(format!("{name}: the client was accepted").into()),
            Err(error) => println!("{name}: {error}"),
        }
    }
    // `drain` answers the requests that have arrived, and then closes the connections.
    server.drain(PATIENCE);
    server.ended().await?;
    serving.await?;
    match call(&callers[0], SUM, 1, PATIENCE).await {
        Ok(_) => Err("after the drain: an answer".into()),
        Err(error) => {
            println!("after the drain: {error}");
            Ok(())
        }
    }
}

fn main() -> Result<()> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build()?.block_on(run())
}
