//! 1,000 tasks of tokio's multi-threaded runtime call a server, each on its own connection. `ThreadedReactor` runs the reactor on a
//! separate thread. For comparison, `--single` runs the reactor and the tasks on one thread (`aio`), and `--tcp` uses tokio's TCP
//! sockets.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_reactor::aio::{AsyncReactor, drive};
use rdma_reactor::threaded::ThreadedReactor;
use rdma_reactor::{Config, ProviderChoice};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::task::{JoinSet, LocalSet, spawn_local};

const TASKS: usize = 1_000;
const CALLS: usize = 100;
const WORKERS: usize = 4;
/// The length of a question and of its answer, in bytes.
const LEN: usize = 64;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Returns settings with long timeouts, because all tasks connect at the same time and the machine may be busy.
fn config() -> Config {
    let minute = Duration::from_secs(60);
    Config::many_connections()
        .provider(ProviderChoice::Iwarp)
        .timeouts(|t| (t.connect, t.handshake, t.keepalive) = (minute, minute, minute))
}

/// Returns the loopback address with port 0, for which the system chooses a free port.
fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// Waits for all tasks. Each task returns the durations of its calls. Prints the rate of calls and the percentiles of their durations.
async fn report(mut tasks: JoinSet<Result<Vec<Duration>>>, begun: Instant) -> Result<()> {
    let mut times = Vec::with_capacity(TASKS * CALLS);
    while let Some(task) = tasks.join_next().await {
        times.extend(task??);
    }
    let rate = times.len() as f64 / begun.elapsed().as_secs_f64();
    times.sort_unstable();
    let [half, most] = [50, 99].map(|percent| times[times.len() * percent / 100]);
    println!("{} calls of {TASKS} tasks: {rate:.0} per second, p50 {half:?}, p99 {most:?}", times.len());
    Ok(())
}

/// Runs the reactors of both sides on separate threads, and the tasks on the workers of the runtime.
async fn on_threads() -> Result<()> {
    let (server, client) = (ThreadedReactor::start(config())?, ThreadedReactor::start(config())?);
    let mut listener = server.listen(any_port()).await?;
    let address = listener.local_address();
    tokio::spawn(async move {
        while let Some(mut conn) = listener.accept().await {
            tokio::spawn(async move {
                while let Ok(question) = conn.recv().await {
                    // The answer is sent from the memory that the question arrived in, so nothing is copied.
                    if conn.send(question).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    let (mut tasks, begun) = (JoinSet::new(), Instant::now());
    for _ in 0..TASKS {
        let client = client.clone();
        tasks.spawn(async move {
            let mut conn = client.connect(address).await?;
            let mut times = Vec::with_capacity(CALLS);
            for _ in 0..CALLS {
                let asked = Instant::now();
                conn.send(vec![7; LEN]).await?;
                conn.recv().await?;
                times.push(asked.elapsed());
            }
            Ok(times)
        });
    }
    report(tasks, begun).await?;
    for (name, reactor) in [("client", client), ("server", server)] {
        let stats = reactor.with(|cx| cx.stats()).await?;
        let (waits, messages) = (stats.turns.waits, stats.messages.sent);
        println!("{name}: {waits} waits of the reactor's thread for {messages} messages sent");
        // `drain` waits for the last connection to end. After that, the reactor's thread ends.
        reactor.drain(Duration::from_secs(10));
        reactor.ended().await?;
    }
    Ok(())
}

/// Runs the reactors of both sides and all tasks on one thread.
async fn on_one_thread() -> Result<()> {
    let (server, client) = (AsyncReactor::new(config())?, AsyncReactor::new(config())?);
    let listener = server.listen(any_port())?;
    let address = listener.local_address().ok_or("nobody listens")?;
    spawn_local(drive(server));
    spawn_local(drive(client.clone()));
    spawn_local(async move {
        while let Some(conn) = listener.accept().await {
            spawn_local(async move {
                while let Ok(question) = conn.recv().await {
                    if conn.send(&question).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    let (mut tasks, begun) = (JoinSet::new(), Instant::now());
    for _ in 0..TASKS {
        let client = client.clone();
        tasks.spawn_local(async move {
            let conn = client.connect(address).await?;
            let mut times = Vec::with_capacity(CALLS);
            for _ in 0..CALLS {
                let asked = Instant::now();
                conn.send(&[7; LEN]).await?;
                conn.recv().await?;
                times.push(asked.elapsed());
            }
            Ok(times)
        });
    }
    report(tasks, begun).await
}

/// Runs the server and the tasks of this example over tokio's TCP sockets, without this library.
async fn over_tcp() -> Result<()> {
    let listener = TcpListener::bind(any_port()).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut conn, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut question = [0; LEN];
                let _ = conn.set_nodelay(true);
                while conn.read_exact(&mut question).await.is_ok() && conn.write_all(&question).await.is_ok() {}
            });
        }
    });
    let (mut tasks, begun) = (JoinSet::new(), Instant::now());
    for _ in 0..TASKS {
        tasks.spawn(async move {
            let mut conn = TcpStream::connect(address).await?;
            conn.set_nodelay(true)?;
            let (mut times, mut answer) = (Vec::with_capacity(CALLS), [0; LEN]);
            for _ in 0..CALLS {
                let asked = Instant::now();
                conn.write_all(&[7; LEN]).await?;
                conn.read_exact(&mut answer).await?;
                times.push(asked.elapsed());
            }
            Ok(times)
        });
    }
    report(tasks, begun).await
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?.block_on(on_threads()),
        Some("--single") => {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            LocalSet::new().block_on(&runtime, on_one_thread())
        }
        Some("--tcp") => Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?.block_on(over_tcp()),
        Some(other) => Err(format!("{other}: --single, --tcp, or nothing").into()),
    }
}
