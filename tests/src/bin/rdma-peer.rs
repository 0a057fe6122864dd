//! The peer process of tests that kill or stop a process, or remove its device.
//!
//! - `rdma-peer serve ADDR...` listens and echoes;
//! - `rdma-peer connect ADDR COUNT MESSAGES` opens COUNT connections and keeps MESSAGES messages in flight on each;
//! - `rdma-peer self COUNT TOTAL ADDR...` opens COUNT connections to itself on each address. It ends when TOTAL messages have arrived.
//!
//! With the argument `exchange` in front, the queue pairs are connected by an exchange over TCP, without rdma_cm. With `shm`, `tcp` or
//! `auto` in front, the connections use shared memory, TCP, or the choice of `ProviderChoice::Auto`. By default they use RDMA devices. With
//! `keepalive SECONDS` before all other arguments, the keepalive timeout is that long, and not as long as the patience of a test.
//!
//! Each command prints a line for each event. When its standard input ends, the process closes its connections and exits.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::io::Read;
use std::time::Duration;

use rdma_reactor::{
    ConnectError, ConnectionId, Context, DisconnectReason, Error, ExchangeOptions, Handler, ListenOptions, Message,
    ProviderChoice, Reactor,
};
use rdma_reactor_tests::conformance::harness::PATIENCE;
use rdma_reactor_tests::device::config;
use rdma_reactor_tests::patience::limited_to;

/// The length of a message, in bytes.
const SIZE: usize = 1000;

struct Peer {
    /// The number of messages that the program sends on each new connection. When a message returns, the program sends it again.
    messages: usize,
    /// The number of messages that must still arrive. At 0 the reactor stops.
    left: u64,
}

impl Handler for Peer {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        for _ in 0..self.messages {
            cx.send(conn, &[7; SIZE]).expect("a new connection has room");
        }
        println!("up {}", cx.connection(conn).provider().unwrap_or("?"));
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        // There is a credit for this send, because the program sends one message for each received message. If the send fails, the
        // connection is ending.
        let _ = cx.send(conn, &message);
        self.left -= 1;
        if self.left == 0 {
            cx.stop();
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        println!("down: {reason}");
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        println!("failed: {error}");
    }
}

fn main() -> Result<(), Error> {
    env_logger::init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut words: Vec<&str> = args.iter().map(String::as_str).collect();
    // A test may run no turns of its reactor for some time, for example while it sets a link down
    // on a busy machine. So the test alone decides when this peer or its path is lost, and no
    // timeout does.
    let mut config = limited_to(PATIENCE, config()).timeouts(|t| t.keepalive = PATIENCE);
    if words.first() == Some(&"keepalive") {
        let seconds = words.drain(..2).nth(1).and_then(|word| word.parse().ok()).expect("a number of seconds");
        config = config.timeouts(|t| t.keepalive = Duration::from_secs(seconds));
    }
    for (word, provider) in
        [("shm", ProviderChoice::Shm), ("tcp", ProviderChoice::Iwarp), ("auto", ProviderChoice::Auto)]
    {
        if words.first() == Some(&word) {
            words.remove(0);
            config = config.provider(provider);
        }
    }
    let exchange = (words.first() == Some(&"exchange")).then(ExchangeOptions::default);
    if exchange.is_some() {
        words.remove(0);
    }
    let mut peer = Peer { messages: 0, left: u64::MAX };
    let mut reactor = Reactor::new(config)?;
    match words[..] {
        ["serve", ref addresses @ ..] => {
            for address in addresses {
                let mut options = ListenOptions::new();
                if let Some(exchange) = &exchange {
                    options = options.exchange(exchange.clone());
                }
                let listener = reactor.context().listen_with(parse(address), options)?;
                println!("listening {}", reactor.context().listeners().local_address(listener).expect("it listens"));
            }
        }
        ["connect", address, count, messages] => {
            peer.messages = parse(messages);
            for _ in 0..parse::<usize>(count) {
                reactor.context().connect(parse(address))?;
            }
        }
        ["self", count, total, ref addresses @ ..] => {
            (peer.messages, peer.left) = (2, parse(total));
            for address in addresses {
                let listener = reactor.context().listen(parse(address))?;
                let to = reactor.context().listeners().local_address(listener).expect("it listens");
                for _ in 0..parse::<usize>(count) {
                    reactor.context().connect(to)?;
                }
            }
        }
        _ => {
            panic!(
                "usage: rdma-peer [shm|tcp|auto] serve ADDR... | connect ADDR COUNT MESSAGES | self COUNT TOTAL ADDR..."
            )
        }
    }
    let remote = reactor.handle();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        remote.stop();
    });
    reactor.run(&mut peer)?;
    reactor.shutdown(&mut peer, Duration::from_secs(10))
}

fn parse<T: std::str::FromStr<Err: std::fmt::Debug>>(word: &str) -> T {
    word.parse().unwrap_or_else(|error| panic!("{word}: {error:?}"))
}
