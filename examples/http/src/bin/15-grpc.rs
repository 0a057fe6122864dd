//! gRPC over RDMA, by tonic: 100 tasks call a method of a server, and one call streams notes in
//! both directions. The argument is the network: `iwarp`, `shm`, or `tls`.
#![forbid(unsafe_code)]

#[path = "../echo.rs"]
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, clippy::use_self, reason = "generated code")]
mod echo;
#[path = "../network.rs"]
mod network;

use std::error::Error;
use std::net::SocketAddr;

use echo::Note;
use echo::echo_client::EchoClient;
use echo::echo_server::{Echo, EchoServer};
use futures_util::stream;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rdma_reactor::ConnectError;
use rdma_reactor::threaded::ThreadedReactor;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status, Streaming};
use tower::service_fn;

/// The number of tasks, of calls of each task, and of notes of the stream.
const TASKS: u64 = 100;
const CALLS: u64 = 100;
const NOTES: u64 = 10_000;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The methods of the service (`proto/echo.proto`).
#[derive(Debug)]
struct Service;

#[tonic::async_trait]
impl Echo for Service {
    async fn say(&self, request: Request<Note>) -> std::result::Result<Response<Note>, Status> {
        let note = request.into_inner();
        if note.text.is_empty() {
            return Err(Status::invalid_argument(format!("note {}: the text is empty", note.number)));
        }
        Ok(Response::new(note))
    }

    type ChatStream = Streaming<Note>;

    async fn chat(&self, notes: Request<Streaming<Note>>) -> std::result::Result<Response<Self::ChatStream>, Status> {
        Ok(Response::new(notes.into_inner()))
    }
}

/// Starts a server, and returns its address. The generated service is one of tower; hyper serves it
/// on the stream of each connection.
async fn start(reactor: &ThreadedReactor) -> Result<SocketAddr> {
    let mut listener = reactor.listen(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
    let address = listener.local_address();
    let service = TowerToHyperService::new(EchoServer::new(Service));
    tokio::spawn(async move {
        while let Some(conn) = listener.accept().await {
            let (stream, service) = (TokioIo::new(conn.into_stream()), service.clone());
            tokio::spawn(async move {
                let server = auto::Builder::new(TokioExecutor::new()).http2_only();
                server.serve_connection(stream, service).await.unwrap_or_else(|error| eprintln!("{error}"));
            });
        }
    });
    Ok(address)
}

/// Connects to the server. tonic asks for a new stream whenever the connection has ended.
async fn connect(reactor: ThreadedReactor, address: SocketAddr) -> Result<EchoClient<Channel>> {
    let connector = service_fn(move |_| {
        let reactor = reactor.clone();
        async move { Ok::<_, ConnectError>(TokioIo::new(reactor.connect(address).await?.into_stream())) }
    });
    Ok(EchoClient::new(Endpoint::from_static("http://server.example").connect_with_connector(connector).await?))
}

/// Calls the method once.
async fn say(client: &mut EchoClient<Channel>, number: u64) -> Result<()> {
    let note = Note { number, text: format!("note {number}") };
    let answer = client.say(note.clone()).await?.into_inner();
    if answer == note { Ok(()) } else { Err(format!("{note:?} was answered by {answer:?}").into()) }
}

#[tokio::main]
async fn main() -> Result<()> {
    let network = std::env::args().nth(1).unwrap_or_else(|| "iwarp".into());
    let config = network::config(&network)?;
    let server = ThreadedReactor::start(config.clone())?;
    let address = start(&server).await?;
    let mut client = connect(ThreadedReactor::start(config)?, address).await?;

    let (began, mut tasks) = (Instant::now(), JoinSet::new());
    for task in 0..TASKS {
        let mut client = client.clone();
        tasks.spawn(async move {
            for call in 0..CALLS {
                say(&mut client, task * CALLS + call).await?;
            }
            Result::Ok(())
        });
    }
    tasks.join_all().await.into_iter().collect::<Result<()>>()?;
    println!("{network}: {} calls of {TASKS} tasks in {:.2?}", TASKS * CALLS, began.elapsed());

    let began = Instant::now();
    let notes = stream::iter((0..NOTES).map(|number| Note { number, text: "a note".into() }));
    let mut answers = client.chat(notes).await?.into_inner();
    for number in 0..NOTES {
        match answers.message().await? {
            Some(note) if note.number == number => {}
            other => return Err(format!("note {number} was answered by {other:?}").into()),
        }
    }
    if let Some(more) = answers.message().await? {
        return Err(format!("{more:?} follows the last note").into());
    }
    println!("{network}: {NOTES} notes in both directions in {:.2?}", began.elapsed());

    // The server's errors arrive with their code and text.
    match client.say(Note { number: 1, text: String::new() }).await {
        Err(status) if status.code() == tonic::Code::InvalidArgument => println!("{}", status.message()),
        other => return Err(format!("an empty text was answered by {other:?}").into()),
    }
    Ok(())
}
