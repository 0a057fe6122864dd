//! HTTP/1 and HTTP/2 over RDMA, by hyper: a server that returns the body of each request, and 1,000
//! tasks that check it. The argument is the network: `iwarp`, `shm`, `tls`, or `tcp` (sockets of
//! tokio, to compare). HTTP/1 needs 2,100 descriptors (`ulimit -n`).
#![forbid(unsafe_code)]

#[path = "../network.rs"]
mod network;

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use rdma_reactor::threaded::ThreadedReactor;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::either::Either;

/// The number of tasks. With HTTP/1, each task has its own connection. With HTTP/2, all tasks share
/// four connections.
const TASKS: usize = 1_000;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Starts a server. Returns its address, and the reactor of the clients if they use one.
async fn start(network: &str) -> Result<(SocketAddr, Option<ThreadedReactor>)> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    if network == "tcp" {
        let listener = TcpListener::bind(any).await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move {
            while let Ok(stream) = listener.accept().await.and_then(|(s, _)| s.set_nodelay(true).map(|()| s)) {
                serve(stream);
            }
        });
        return Ok((address, None));
    }
    let config = network::config(network)?;
    let mut listener = ThreadedReactor::start(config.clone())?.listen(any).await?;
    let address = listener.local_address();
    tokio::spawn(async move {
        while let Some(conn) = listener.accept().await {
            serve(conn.into_stream());
        }
    });
    Ok((address, Some(ThreadedReactor::start(config)?)))
}

/// Serves the requests of a connection, of either version of HTTP. hyper needs no more than a
/// stream of bytes.
fn serve(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
    let echo = service_fn(|request: Request<Incoming>| async {
        Ok::<_, hyper::Error>(Response::new(Full::new(request.into_body().collect().await?.to_bytes())))
    });
    tokio::spawn(async move {
        let server = auto::Builder::new(TokioExecutor::new());
        server.serve_connection(TokioIo::new(stream), echo).await.unwrap_or_else(|error| eprintln!("{error}"));
    });
}

/// A connection of a client.
#[derive(Clone)]
enum Client {
    Http1(Arc<tokio::sync::Mutex<http1::SendRequest<Full<Bytes>>>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

impl Client {
    async fn new(address: SocketAddr, reactor: Option<&ThreadedReactor>, version: u8) -> Result<Self> {
        let stream = TokioIo::new(match reactor {
            Some(reactor) => Either::Left(reactor.connect(address).await?.into_stream()),
            None => Either::Right(TcpStream::connect(address).await.and_then(|s| s.set_nodelay(true).map(|()| s))?),
        });
        if version == 1 {
            let (send, connection) = http1::handshake(stream).await?;
            tokio::spawn(connection);
            return Ok(Self::Http1(Arc::new(send.into())));
        }
        let (send, connection) = http2::handshake(TokioExecutor::new(), stream).await?;
        tokio::spawn(connection);
        Ok(Self::Http2(send))
    }

    /// Sends a request, and checks that the server returns its body.
    async fn echo(&self, body: &Bytes) -> Result<()> {
        let request = Request::post("http://server.example/").body(Full::new(body.clone()))?;
        let answer = match self {
            Self::Http1(send) => send.lock().await.send_request(request).await?,
            Self::Http2(send) => send.clone().send_request(request).await?,
        };
        let got = answer.into_body().collect().await?.to_bytes();
        if got == body { Ok(()) } else { Err("another body than that of the request".into()) }
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let network = std::env::args().nth(1).unwrap_or_else(|| "iwarp".into());
    let (address, reactor) = start(&network).await?;
    for (version, connections) in [(1, TASKS), (2, 4)] {
        let mut clients = Vec::new();
        for _ in 0..connections {
            clients.push(Client::new(address, reactor.as_ref(), version).await?);
        }
        for (requests, size) in [(100_000, 64), (200, 215_000)] {
            let (began, mut tasks) = (Instant::now(), JoinSet::new());
            for (nth, client) in clients.iter().cycle().take(TASKS).enumerate() {
                let (client, body) = (client.clone(), Bytes::from(vec![nth as u8; size]));
                tasks.spawn(async move {
                    for _ in (nth..requests).step_by(TASKS) {
                        client.echo(&body).await?;
                    }
                    Result::Ok(())
                });
            }
            tasks.join_all().await.into_iter().collect::<Result<()>>()?;
            println!("{network}, HTTP/{version}: {requests} requests of {size} bytes in {:.2?}", began.elapsed());
        }
    }
    Ok(())
}
