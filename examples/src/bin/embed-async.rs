//! Tasks that `connect`, `send` and `recv` with `.await`. The adapter is in `examples/src/embed/asyncio.rs`.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::time::Duration;

use rdma_reactor_examples::embed::asyncio::Net;
use rdma_reactor_examples::embed::{MESSAGES, Server, config};

/// Number of connections, each in a task of its own.
const TASKS: u64 = 4;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = Server::start()?;
    let net = Net::new(config())?;
    let tasks = tokio::task::LocalSet::new();
    let driver = net.clone();
    let driver = tasks.spawn_local(async move { driver.drive().await.map_err(|error| error.to_string()) });
    let echoes = (0..TASKS).map(|_| {
        let (net, address) = (net.clone(), server.address);
        tasks.spawn_local(async move {
            let conn = net.connect(address).await?;
            for nth in 0..MESSAGES / TASKS {
                conn.send(&nth.to_le_bytes()).await?;
                let echo = conn.recv().await?;
                if *echo != nth.to_le_bytes() {
                    return Err(format!("echo {nth} is another: {:?}", &echo[..]));
                }
                if nth % 500 == 0 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
            Ok::<u64, String>(MESSAGES / TASKS)
        })
    });
    let echoes: Vec<_> = echoes.collect();
    let mut total = 0;
    let all = async {
        for task in echoes {
            total += task.await??;
        }
        Ok::<(), Box<dyn Error>>(())
    };
    tasks
        .run_until(async {
            tokio::select! {
                done = all => done,
                failed = driver => Err(format!("the reactor ended: {failed:?}").into()),
            }
        })
        .await?;
    server.stop()?;
    println!("{total} echoes of {TASKS} tasks");
    Ok(())
}
