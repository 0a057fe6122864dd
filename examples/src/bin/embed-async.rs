//! Tasks that `connect`, `send` and `recv` with `.await`. They run on tokio or, with `--async-io`, on async-io. The adapter for async-io is
//! in `examples/src/embed/asyncio.rs`.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select, try_join_all};
use rdma_reactor::aio::{AsyncReactor, drive};
use rdma_reactor_examples::embed::asyncio::on_async_io;
use rdma_reactor_examples::embed::{MESSAGES, Server, config};

/// The number of tasks. Each has its own connection.
const TASKS: u64 = 4;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// One of the tasks: sends its share of the messages, waits for their echoes, and pauses now and then. Returns the number of echoes.
async fn echoes(net: &AsyncReactor, server: &Server) -> Result<u64> {
    let conn = net.connect(server.address).await?;
    for nth in 0..MESSAGES / TASKS {
        conn.send(&nth.to_le_bytes()).await?;
        let echo = conn.recv().await?;
        if *echo != nth.to_le_bytes() {
            return Err(format!("echo {nth} differs: {:?}", &echo[..]).into());
        }
        if nth % 500 == 0 {
            net.sleep(Duration::from_millis(5)).await;
        }
    }
    Ok(MESSAGES / TASKS)
}

/// Runs all tasks concurrently with `turns`, the future that takes the reactor's turns. Returns the number of echoes.
async fn all(net: &AsyncReactor, server: &Server, turns: impl Future<Output = Result<()>>) -> Result<u64> {
    let tasks = try_join_all((0..TASKS).map(|_| echoes(net, server)));
    match select(pin!(tasks), pin!(turns)).await {
        Either::Left((counts, _)) => Ok(counts?.into_iter().sum()),
        Either::Right((ended, _)) => Err(ended.err().unwrap_or_else(|| "the reactor was drained".into())),
    }
}

fn main() -> Result<()> {
    let server = Server::start()?;
    let net = AsyncReactor::new(config())?;
    let total = if std::env::args().nth(1).as_deref() == Some("--async-io") {
        async_io::block_on(all(&net, &server, on_async_io(net.clone())))?
    } else {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(all(&net, &server, async { Ok(drive(net.clone()).await?) }))?
    };
    server.stop()?;
    println!("{total} echoes of {TASKS} tasks");
    Ok(())
}
