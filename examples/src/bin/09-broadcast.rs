//! A feed for members of different speed: messages are stored once, and each member has a policy for the case that it cannot keep up.
//! One slow member loses messages, another one loses its connection. All other members receive everything.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::collections::VecDeque;
use std::error::Error;
use std::net::SocketAddr;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdma_reactor::broadcast::{Broadcast, OverflowPolicy, PublishError};
use rdma_reactor::{
    Config, ConnectError, ConnectOptions, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message,
    Outcome, ProviderChoice, Reactor, ReactorHandle, SendId, TimerId,
};

const MEMBERS: [&str; 4] = ["quick-1", "quick-2", "drop-me", "close-me"];
const MESSAGES: u32 = 1000;
/// The time between two messages.
const PERIOD: Duration = Duration::from_micros(200);
/// The time that a slow member needs to handle a message.
const SLOW: Duration = Duration::from_millis(20);

/// Publishes numbers once all members have connected.
struct Feed {
    broadcast: Broadcast,
    members: usize,
    /// The members with the policy `Wait`: the feed publishes nothing while one of them is behind.
    quick: Vec<ConnectionId>,
    next: u32,
}

impl Feed {
    /// Returns true if a member with the policy `Wait` has messages queued or in flight.
    fn is_behind(&self) -> bool {
        self.quick.iter().any(|&conn| self.broadcast.tally(conn).is_some_and(|tally| tally.pending > 0))
    }
}

impl Handler for Feed {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let slow = match cx.connection(conn).private_data() {
            b"drop-me" => OverflowPolicy::Drop,
            b"close-me" => OverflowPolicy::Close,
            _ => OverflowPolicy::Wait,
        };
        if let Err(error) = self.broadcast.join(cx, conn, slow) {
            eprintln!("{conn}: {error}");
            return cx.close(conn);
        }
        self.quick.extend((slow == OverflowPolicy::Wait).then_some(conn));
        self.members += 1;
        if self.members == MEMBERS.len() {
            cx.timers().set(PERIOD, 0);
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        // Closing drops the messages that are still queued. The members with the policy `Wait` have received everything, so only slow
        // members lose messages.
        if self.next == MESSAGES && !self.is_behind() {
            return cx.close_all();
        }
        cx.timers().set(PERIOD, 0);
        if self.next == MESSAGES {
            return;
        }
        match self.broadcast.publish(cx, &self.next.to_le_bytes()) {
            Ok(published) if published.closed > 0 => {
                println!("message {}: a member is closed for being slow", self.next);
            }
            Ok(_) => {}
            // A member with the policy `Wait` is behind. The same message is published again when the next timer expires.
            Err(PublishError::Full) => return,
            Err(error) => eprintln!("message {}: {error}", self.next),
        }
        self.next += 1;
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.broadcast.on_writable(cx, conn);
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        self.broadcast.on_send_complete(conn, send, outcome);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        if let Some(tally) = self.broadcast.on_disconnect(conn) {
            println!("{conn}: {} sent, {} dropped, {} lost", tally.sent, tally.dropped, tally.lost);
        }
        self.members -= 1;
        if self.members == 0 {
            cx.stop();
        }
    }
}

/// A member of the feed. It counts the numbers that it receives, and keeps each message for the time that handling it takes.
struct Member {
    slow: bool,
    kept: VecDeque<DetachedMessage>,
    received: u32,
    last: u32,
    failed: Option<ConnectError>,
}

impl Handler for Member {
    fn on_recv(&mut self, cx: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.last = message.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        self.received += 1;
        if self.slow {
            if self.kept.is_empty() {
                cx.timers().set(SLOW, 0);
            }
            self.kept.push_back(message.detach());
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        self.kept.pop_front();
        if !self.kept.is_empty() {
            cx.timers().set(SLOW, 0);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        cx.stop();
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.failed = Some(error);
        cx.stop();
    }
}

/// Connects a member to the feed, and runs it until the feed closes its connection.
fn follow(name: &str, address: SocketAddr) -> Result<Member, Box<dyn Error>> {
    let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    let options = ConnectOptions::new().private_data(name.as_bytes());
    reactor.context().connect_with(address, options)?;
    let slow = !name.starts_with("quick");
    let mut member = Member { slow, kept: VecDeque::new(), received: 0, last: 0, failed: None };
    reactor.run(&mut member)?;
    match member.failed.take() {
        Some(error) => Err(error.into()),
        None => Ok(member),
    }
}

/// Runs a member on its own thread. If the member fails, stops the feed, which would otherwise wait
/// for the member forever.
fn start(name: &'static str, address: SocketAddr, feed: ReactorHandle) -> JoinHandle<Result<Member, String>> {
    thread::spawn(move || {
        follow(name, address).map_err(|error| {
            feed.stop();
            format!("{name}: {error}")
        })
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    let listener = reactor.context().listen("127.0.0.1:0".parse()?)?;
    let address = reactor.context().listeners().local_address(listener).ok_or("the listener is gone")?;
    let members = MEMBERS.map(|name| (name, start(name, address, reactor.handle())));
    // A member may be at most 64 messages behind.
    let mut feed = Feed { broadcast: Broadcast::new(64, 1024), members: 0, quick: Vec::new(), next: 0 };
    reactor.run(&mut feed)?;
    if feed.next < MESSAGES {
        // A member has failed. The connections of the others end with the reactor.
        drop(reactor);
    }
    for (name, thread) in members {
        let member = thread.join().map_err(|_| "a member panicked")??;
        println!("{name}: {} of {MESSAGES} messages, the last one is {}", member.received, member.last);
    }
    Ok(())
}
