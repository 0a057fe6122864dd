//! An echo server that shows its counters, and ends on SIGINT, SIGTERM or SIGHUP. One event loop serves RDMA, a TCP listener of the
//! standard library, the HTTP connections that this listener accepts, and a pipe that reports signals.
//!
//! `02-metrics [ADDRESS [HTTP-ADDRESS]]`: the HTTP server returns the counters in the format of Prometheus at `/metrics`, and as an HTML
//! page at `/`.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rdma_reactor::{Config, ConnectionId, Context, Handler, Interest, IoId, Message, Reactor, Readiness, TimerId};
use rdma_reactor_examples::metrics;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::pipe;

/// The length of the longest accepted request head, in bytes.
const MAX_REQUEST: usize = 8 << 10;
/// The largest number of open HTTP connections. When this many are open and another one is accepted, the program closes the oldest one.
const MAX_VISITORS: usize = 64;
/// The largest number of HTTP connections accepted in one turn. It is less than `MAX_VISITORS`, so the connections accepted in one turn
/// cannot displace all connections that were open before.
const AT_ONCE: usize = MAX_VISITORS / 4;
/// The time limit of an HTTP connection.
const VISIT: Duration = Duration::from_secs(5);
/// The pause between a failed call of `accept` and the next call.
const AGAIN: Duration = Duration::from_millis(100);

/// An HTTP connection: its request, then the part of the response that is not sent yet.
struct Visitor {
    stream: TcpStream,
    /// The timer that closes the connection at its time limit.
    until: TimerId,
    request: Vec<u8>,
    response: Vec<u8>,
}

impl Visitor {
    /// Reads the request, then writes the response. Returns the error `WouldBlock` if the request is not yet received completely, or the
    /// response is not yet sent completely; the caller must then call this function again when the connection is ready. Otherwise returns
    /// `Ok(false)` or another error, and the caller must close the connection.
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
    /// The timer that makes the program call `accept` again. The listener is edge-triggered: if a connection is already waiting, the
    /// listener does not report that connection again.
    again: Option<TimerId>,
    visitors: BTreeMap<IoId, Visitor>,
    /// The ids of the open HTTP connections, the oldest connection first.
    ages: VecDeque<IoId>,
    signals: UnixStream,
    signalled: IoId,
}

impl Server {
    /// Accepts connections until none is waiting or `AT_ONCE` calls of `accept` were made. After `AT_ONCE` calls, sets a timer for the next
    /// calls, so that the program serves open connections first.
    fn accept(&mut self, cx: &mut Context<'_>) {
        for _ in 0..AT_ONCE {
            match self.accept_one(cx) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(error) => {
                    log::warn!("accepting: {error}");
                    // `accept` may have failed for lack of descriptors or memory. Closing the oldest connection frees a descriptor and
                    // memory.
                    if !self.close_oldest(cx) {
                        self.again = Some(cx.timers().set(AGAIN, 0));
                        return;
                    }
                }
            }
        }
        self.again = Some(cx.timers().set(Duration::ZERO, 0));
    }

    fn accept_one(&mut self, cx: &mut Context<'_>) -> std::io::Result<()> {
        let (stream, _) = self.listener.accept()?;
        if self.visitors.len() == MAX_VISITORS {
            self.close_oldest(cx);
        }
        stream.set_nonblocking(true)?;
        let id = cx.io().register(&stream, Interest::READABLE | Interest::WRITABLE)?;
        let until = cx.timers().set(VISIT, 0);
        self.visitors.insert(id, Visitor { stream, until, request: Vec::new(), response: Vec::new() });
        self.ages.push_back(id);
        Ok(())
    }

    /// Closes the oldest HTTP connection. Returns `false` if there is none.
    fn close_oldest(&mut self, cx: &mut Context<'_>) -> bool {
        let oldest = self.ages.front().copied();
        oldest.into_iter().for_each(|oldest| self.close(cx, oldest));
        oldest.is_some()
    }

    fn close(&mut self, cx: &mut Context<'_>, id: IoId) {
        if let Some(visitor) = self.visitors.remove(&id) {
            cx.io().deregister(id);
            cx.timers().cancel(visitor.until);
            self.ages.retain(|&other| other != id);
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
            self.accept(cx);
        } else if let Some(visitor) = self.visitors.get_mut(&io) {
            let served = visitor.serve(cx);
            if !matches!(&served, Err(error) if error.kind() == ErrorKind::WouldBlock) {
                self.close(cx, io);
            }
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
        if self.again == Some(timer) {
            self.accept(cx);
        } else if let Some((&late, _)) = self.visitors.iter().find(|(_, visitor)| visitor.until == timer) {
            self.close(cx, late);
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
    let second = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // The first signal sets the flag. If the flag is set, another signal ends the program immediately.
        flag::register_conditional_shutdown(signal, 130, second.clone())?;
        flag::register(signal, second.clone())?;
        pipe::register(signal, sender.try_clone()?)?;
    }
    let mut cx = reactor.context();
    let rdma = cx.listen(rdma)?;
    let rdma = cx.listeners().local_address(rdma).ok_or("the listener is gone")?;
    let accepting = cx.io().register(&listener, Interest::READABLE)?;
    let signalled = cx.io().register(&signals, Interest::READABLE)?;
    println!("echo on {rdma}, counters on http://{}/", listener.local_addr()?);
    let (visitors, ages) = (BTreeMap::new(), VecDeque::new());
    let mut server = Server { listener, accepting, again: None, visitors, ages, signals, signalled };
    reactor.run(&mut server)?;
    reactor.shutdown(&mut server, Duration::from_secs(2))?;
    drop(server.signals);
    println!("{} messages echoed", reactor.stats().messages.sent);
    Ok(())
}
