//! An echo server on all cores: one listener, and for each core a reactor on a separate thread. Ctrl-C drains the connections.
//!
//! `03-cores [ADDRESS [REACTORS]]`, by default 127.0.0.1:7471 and one reactor per core.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, Reactor, Reactors};

/// The time limit for the end of all connections after Ctrl-C. When it expires, the reactors close the connections that are still open.
const DRAIN: Duration = Duration::from_secs(5);

struct Echo;

impl Handler for Echo {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if let Err(error) = cx.send(conn, &message) {
            log::warn!("{conn}: {error}");
            cx.close(conn);
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "127.0.0.1:7471".into());
    let address: SocketAddr =
        address.parse().map_err(|error| format!("{address}: {error}: give an address and a port"))?;
    let count = match args.next() {
        None => thread::available_parallelism()?.get(),
        Some(text) => match text.parse() {
            Ok(count @ 1..=1024) => count,
            _ => return Err(format!("{text} reactors: give a number from 1 to 1024").into()),
        },
    };
    let mut reactors = (0..count).map(|_| Reactor::new(Config::default())).collect::<Result<Vec<_>, _>>()?;
    let group = Reactors::of(&mut reactors);
    let listener = reactors[0].context().listen(address)?;
    let address = reactors[0].context().listeners().local_address(listener).ok_or("the listener is gone")?;
    let (drained, mut second) = (group.clone(), false);
    ctrlc::set_handler(move || {
        // A second signal ends the program immediately.
        if std::mem::replace(&mut second, true) {
            std::process::exit(130);
        }
        drained.drain_all(DRAIN);
    })?;
    println!("echo on {address}, {count} reactors");
    thread::scope(|scope| {
        let spawn = |(index, mut reactor): (usize, Reactor)| {
            scope.spawn(move || {
                if let Err(error) = Reactors::pin(index) {
                    log::warn!("{error}");
                }
                reactor.run(&mut Echo).map(|()| reactor.stats())
            })
        };
        let threads: Vec<_> = reactors.into_iter().enumerate().map(spawn).collect();
        for (index, thread) in threads.into_iter().enumerate() {
            let stats = thread.join().map_err(|_| "a reactor panicked")??;
            println!("reactor {index}: {} connections, {} messages", stats.connections.connected, stats.messages.sent);
        }
        Ok(())
    })
}

fn main() -> std::process::ExitCode {
    env_logger::init();
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("03-cores: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
