//! Remote procedure calls with async/await: a server in one task, and 1,000 tasks that call it, each with a timeout for every call. All
//! tasks run on one thread with one reactor. No other executor is needed: `AsyncReactor::run` polls the tasks and takes the reactor's
//! turns.
//!
//! `04-rpc-async [TASKS [CALLS]]`
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select, try_join_all};
use futures_util::stream::{FuturesUnordered, StreamExt};
use rdma_reactor::aio::{AsyncConnection, AsyncListener, AsyncReactor};
use rdma_reactor::{Config, ProviderChoice};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The timeout of a call.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The number of different arguments of the remote procedure, from 0.
const ARGUMENTS: u64 = 1 << 20;

/// Returns the sum of the numbers from 1 to `n`: the remote procedure.
fn sum_to(n: u64) -> u64 {
    n * (n + 1) / 2
}

/// Answers the calls of one client until it disconnects.
async fn serve(client: AsyncConnection) {
    while let Ok(call) = client.recv().await {
        let Ok(argument) = <[u8; 8]>::try_from(&call[..]) else { return };
        // Dropping the request returns its credit to the client. The request is dropped before the answer is sent, because that send may
        // have to wait.
        drop(call);
        if client.send(&sum_to(u64::from_le_bytes(argument) % ARGUMENTS).to_le_bytes()).await.is_err() {
            return;
        }
    }
}

/// Serves every client that connects.
async fn serve_all(listener: &AsyncListener) {
    let mut clients = FuturesUnordered::new();
    loop {
        futures_util::select_biased! {
            () = clients.select_next_some() => {}
            client = pin!(futures_util::FutureExt::fuse(listener.accept())) => match client {
                Some(client) => clients.push(serve(client)),
                None => return,
            }
        }
    }
}

/// Sends a call to the server, and waits at most [`TIMEOUT`] for the answer. Returns the answer.
async fn call(net: &AsyncReactor, server: &AsyncConnection, argument: u64) -> Result<u64> {
    let answer = async {
        server.send(&argument.to_le_bytes()).await?;
        Ok::<_, Box<dyn Error>>(u64::from_le_bytes(server.recv().await?[..].try_into()?))
    };
    match select(pin!(answer), net.sleep(TIMEOUT)).await {
        Either::Left((answer, _)) => answer,
        Either::Right(_) => Err(format!("call {argument}: no answer within {TIMEOUT:?}").into()),
    }
}

/// Returns the argument of call `nth` of a client.
const fn argument_of(client: u64, nth: u64) -> u64 {
    (client + nth) % ARGUMENTS
}

/// Connects to the server and makes `calls` calls, one at a time.
async fn client(net: &AsyncReactor, listener: &AsyncListener, number: u64, calls: u64) -> Result<()> {
    let server = net.connect(listener.local_address().ok_or("nobody listens")?).await?;
    for nth in 0..calls {
        let argument = argument_of(number, nth);
        let sum = call(net, &server, argument).await?;
        if sum != sum_to(argument) {
            return Err(format!("call {argument}: {sum} is wrong").into());
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let number = |nth: usize, what: &str, most: u64, default: u64| {
        let Some(text) = std::env::args().nth(nth) else { return Ok(default) };
        let number = text.parse::<u64>().ok().filter(|number| (1..=most).contains(number));
        number.ok_or_else(|| format!("{text} {what}: give a number from 1 to {most}"))
    };
    let (tasks, calls) = (number(1, "tasks", 100_000, 1000)?, number(2, "calls", 1_000_000_000, 20)?);
    // Each client has one call in flight, so small windows suffice.
    let config = Config::default()
        .provider(ProviderChoice::Iwarp)
        .timeouts(|t| (t.connect, t.handshake, t.keepalive) = (TIMEOUT, TIMEOUT, TIMEOUT))
        .receive_depth(8)
        .send_depth(8)
        .buffer_size(64);
    let net = AsyncReactor::new(config)?;
    let listener = net.listen(([127, 0, 0, 1], 0).into())?;
    let start = Instant::now();
    let clients = try_join_all((0..tasks).map(|number| client(&net, &listener, number, calls)));
    net.run(async {
        match select(pin!(clients), pin!(serve_all(&listener))).await {
            Either::Left((done, _)) => done.map(drop),
            Either::Right(_) => Err("the server has ended".into()),
        }
    })??;
    println!("{} calls of {tasks} tasks in {:?}", tasks * calls, start.elapsed());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_is_one_that_the_server_takes() {
        for (client, nth) in [(0, 0), (1, ARGUMENTS - 1), (1, ARGUMENTS), (99_999, 999_999_999)] {
            assert!(argument_of(client, nth) < ARGUMENTS, "call {nth} of client {client}");
        }
    }
}
