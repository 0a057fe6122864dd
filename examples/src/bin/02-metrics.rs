//! An echo server that shows its counters, and ends on SIGINT or SIGTERM. A listener of std, its HTTP connections and a
//! pipe of signals are in the same loop as RDMA.
//!
//! `02-metrics [ADDRESS [HTTP-ADDRESS]]`: `/metrics` is for Prometheus, `/` is a page for people.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use rdma_reactor::{Config, ConnectionId, Context, Handler, Interest, IoId, Message, Reactor, Readiness};
use rdma_reactor_examples::metrics;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

/// Longest request head, bytes, and below it the largest number of HTTP connections at once; more are closed.
const MAX_REQUEST: usize = 8 << 10;
const MAX_VISITORS: usize = 64;

/// An HTTP connection, with its request, and later with the rest of the answer.
struct Visitor {
    stream: TcpStream,
    request: Vec<u8>,
    response: Vec<u8>,
}

impl Visitor {
    /// Reads the request, then writes the answer; returns whether the connection stays open.
    fn serve(&mut self, cx: &Context<'_>) -> std::io::Result<bool> {
        while self.response.is_empty() {
            let mut bytes = [0; 1024];
            match self.stream.read(&mut bytes)? {
                0 => return Ok(false),
                n => self.request.extend_from_slice(&bytes[..n]),
            }
            if self.request.windows(4).any(|end| end == b"\r\n\r\n") {
                self.response = metrics::respond(&self.request, &cx.stats());
            } else if self.request.len() > MAX_REQUEST {
                return Ok(false);
            }
        }
        while !self.response.is_empty() {
            let written = self.stream.write(&self.response)?;
            self.response.drain(..written);
        }
        Ok(false)
    }
}

struct Server {
    listener: TcpListener,
    accepting: IoId,
    visitors: BTreeMap<IoId, Visitor>,
    signals: UnixStream,
    signalled: IoId,
}

impl Server {
    fn accept(&mut self, cx: &mut Context<'_>) -> std::io::Result<()> {
        loop {
            let (stream, _) = match self.listener.accept() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                other => other?,
            };
            if self.visitors.len() < MAX_VISITORS {
                stream.set_nonblocking(true)?;
                let id = cx.register_io(&stream, Interest::READABLE | Interest::WRITABLE)?;
                self.visitors.insert(id, Visitor { stream, request: Vec::new(), response: Vec::new() });
            }
        }
    }
}

impl Handler for Server {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if let Err(error) = cx.send(conn, &message) {
            log::warn!("{conn}: {error}");
        }
    }

    fn on_io_ready(&mut self, cx: &mut Context<'_>, io: IoId, _: Readiness) {
        if io == self.signalled {
            cx.stop();
        } else if io == self.accepting {
            if let Err(error) = self.accept(cx) {
                log::warn!("accepting: {error}");
            }
        } else if let Some(visitor) = self.visitors.get_mut(&io) {
            let served = visitor.serve(cx);
            if !matches!(&served, Err(error) if error.kind() == ErrorKind::WouldBlock) {
                cx.deregister_io(io);
                self.visitors.remove(&io);
            }
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    let mut args = std::env::args().skip(1);
    let mut address = |default: &str| {
        let text = args.next().unwrap_or_else(|| default.into());
        text.parse::<SocketAddr>().map_err(|error| format!("{text}: {error}: give an address and a port"))
    };
    let (rdma, http) = (address("127.0.0.1:7471")?, address("127.0.0.1:9471")?);
    let mut reactor = Reactor::new(Config::default())?;
    let listener = TcpListener::bind(http).map_err(|error| format!("{http}: {error}"))?;
    listener.set_nonblocking(true)?;
    let (signals, sender) = UnixStream::pair()?;
    for signal in [SIGINT, SIGTERM] {
        pipe::register(signal, sender.try_clone()?)?;
    }
    let mut cx = reactor.context();
    let rdma = cx.listen(rdma)?;
    let rdma = cx.local_address(rdma).ok_or("the listener is gone")?;
    let accepting = cx.register_io(&listener, Interest::READABLE)?;
    let signalled = cx.register_io(&signals, Interest::READABLE)?;
    println!("echo on {rdma}, counters on http://{}/", listener.local_addr()?);
    let mut server = Server { listener, accepting, visitors: BTreeMap::new(), signals, signalled };
    reactor.run(&mut server)?;
    reactor.shutdown(&mut server, std::time::Duration::from_secs(2))?;
    drop(server.signals);
    println!("{} messages echoed", reactor.stats().messages.sent);
    Ok(())
}
