//! A chat hub with slow readers. Each message of a member goes to all other members. The hub has a
//! queue for each member. If the queue of a slow member is full, its oldest message is dropped, and
//! the member is told how many messages it has missed. So a slow member holds nobody back, and
//! costs the hub a bounded number of messages.
//!
//! The hub runs on its own thread. The members are the connections of a second reactor.

use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectOptions, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message,
    ProviderChoice, Reactor, SendErrorKind, TimerId,
};

/// The members that speak and listen. They have the names 0 to 17.
const SPEAKERS: usize = 18;
/// The members that only listen, and do not handle a message until all speakers are done.
const SLOW: usize = 2;
const MEMBERS: usize = SPEAKERS + SLOW;
/// The number of messages of each speaker.
const ROUNDS: u32 = 30;
/// The largest number of messages that the hub queues for a member. A speaker waits for the others
/// after each round, so it is at most two rounds behind, and misses nothing.
const QUEUE: usize = 2 * SPEAKERS;
const TIME_LIMIT: Duration = Duration::from_secs(300);

/// The first byte of each message of the hub.
const START: u8 = 0;
/// The name of the speaker follows, and what it said.
const SAID: u8 = 1;
/// The number of messages follows that the member has missed here.
const MISSED: u8 = 2;

/// A member, as the hub sees it.
struct Member {
    name: u8,
    queue: VecDeque<Arc<[u8]>>,
    /// The number of dropped messages that were not reported to the member yet.
    unreported: u64,
}

impl Member {
    /// Queues a message. If the queue is full, drops the oldest one: returns true then.
    fn queue(&mut self, message: &Arc<[u8]>) -> bool {
        let full = self.queue.len() == QUEUE;
        if full {
            self.queue.pop_front();
            self.unreported += 1;
        }
        self.queue.push_back(Arc::clone(message));
        full
    }

    /// Sends what the connection accepts. `on_writable` continues.
    fn deliver(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        match self.send_queued(cx, conn) {
            // After `Closed`, `on_disconnect` follows.
            Ok(()) | Err(SendErrorKind::WouldBlock(_) | SendErrorKind::Closed) => {}
            Err(error) => {
                eprintln!("hub: {conn}: {error}");
                cx.close(conn);
            }
        }
    }

    /// Sends queued messages until one is refused. The dropped ones were the oldest, so the notice
    /// of them is first.
    fn send_queued(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), SendErrorKind> {
        if self.unreported > 0 {
            let mut notice = vec![MISSED];
            notice.extend(self.unreported.to_le_bytes());
            cx.send(conn, &notice)?;
            self.unreported = 0;
        }
        while let Some(message) = self.queue.front() {
            cx.send(conn, message)?;
            self.queue.pop_front();
        }
        Ok(())
    }
}

#[derive(Default)]
struct Hub {
    members: BTreeMap<ConnectionId, Member>,
    longest_queue: usize,
    /// The number of messages that were dropped for each member.
    dropped: [u64; MEMBERS],
    failed: Option<String>,
}

impl Hub {
    /// Sends a message to all members except one.
    fn publish(&mut self, cx: &mut Context<'_>, message: &[u8], except: Option<ConnectionId>) {
        let message = Arc::from(message);
        for (&conn, member) in &mut self.members {
            if Some(conn) == except {
                continue;
            }
            self.dropped[usize::from(member.name)] += u64::from(member.queue(&message));
            member.deliver(cx, conn);
            self.longest_queue = self.longest_queue.max(member.queue.len());
        }
    }
}

impl Handler for Hub {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let &[name] = cx.connection(conn).private_data() else {
            return cx.close(conn);
        };
        if usize::from(name) >= MEMBERS {
            return cx.close(conn);
        }
        self.members.insert(conn, Member { name, queue: VecDeque::new(), unreported: 0 });
        if self.members.len() == MEMBERS {
            self.publish(cx, &[START], None);
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let Some(member) = self.members.get(&conn) else {
            return;
        };
        let mut said = vec![SAID, member.name];
        said.extend_from_slice(&message);
        self.publish(cx, &said, Some(conn));
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Some(member) = self.members.get_mut(&conn) {
            member.deliver(cx, conn);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.members.remove(&conn);
        if reason != DisconnectReason::Closed {
            self.failed = Some(format!("hub: {conn}: {reason}"));
        }
        if self.members.is_empty() {
            cx.stop();
        }
    }
}

/// The program of a member.
struct Client {
    name: u8,
    /// The number of messages that this member has sent.
    said: u32,
    /// For each speaker, the number that its next message has.
    next: [u32; SPEAKERS],
    received: u64,
    /// The number of messages that this member has missed: as the numbers show, and as the hub
    /// reports.
    gaps: u64,
    missed: u64,
    /// The messages that a slow member has not handled.
    held: Vec<DetachedMessage>,
}

impl Client {
    fn new(name: u8) -> Self {
        Self { name, said: 0, next: [0; SPEAKERS], received: 0, gaps: 0, missed: 0, held: Vec::new() }
    }

    fn is_slow(&self) -> bool {
        usize::from(self.name) >= SPEAKERS
    }

    /// The number of messages that the others send.
    fn expected(&self) -> u64 {
        let others = if self.is_slow() { SPEAKERS } else { SPEAKERS - 1 };
        others as u64 * u64::from(ROUNDS)
    }

    fn is_done(&self) -> bool {
        self.received + self.missed == self.expected() && (self.is_slow() || self.said == ROUNDS)
    }

    /// Sends the message of the next round, if all messages of the previous round have arrived.
    fn speak(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Box<dyn Error>> {
        let own = usize::from(self.name);
        let behind = |(name, &next): (usize, &u32)| name != own && next < self.said;
        if self.is_slow() || self.said == ROUNDS || self.next.iter().enumerate().any(behind) {
            return Ok(());
        }
        match cx.send(conn, &self.said.to_le_bytes()) {
            Ok(_) => self.said += 1,
            // `on_writable` continues.
            Err(SendErrorKind::WouldBlock(_)) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn handle(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) -> Result<(), Box<dyn Error>> {
        match *message {
            [START] => {}
            [SAID, name, ref number @ ..] => {
                let number = u32::from_le_bytes(number.try_into()?);
                let next = self.next.get_mut(usize::from(name)).ok_or("an unknown speaker")?;
                if number < *next {
                    return Err(format!("{number} of {name} came after {next}").into());
                }
                self.gaps += u64::from(number - *next);
                *next = number + 1;
                self.received += 1;
            }
            [MISSED, ref count @ ..] => self.missed += u64::from_le_bytes(count.try_into()?),
            _ => return Err("an unknown message".into()),
        }
        self.speak(cx, conn)?;
        if self.is_done() {
            if self.gaps != self.missed {
                return Err(format!("missed {}, {} were reported", self.gaps, self.missed).into());
            }
            cx.close(conn);
        }
        Ok(())
    }
}

/// All members.
#[derive(Default)]
struct Clients {
    clients: BTreeMap<ConnectionId, Client>,
    /// The number of speakers that have received everything.
    done: usize,
    failed: Option<String>,
}

impl Clients {
    fn fail(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: impl std::fmt::Display) {
        let name = self.clients.get(&conn).map(|client| client.name);
        self.failed.get_or_insert(format!("member {name:?}: {error}"));
        cx.stop();
    }

    fn handle(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) {
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        if let Err(error) = client.handle(cx, conn, message) {
            return self.fail(cx, conn, error);
        }
        if client.is_done() && !client.is_slow() {
            self.done += 1;
            if self.done == SPEAKERS {
                self.release(cx);
            }
        }
    }

    /// Lets the slow members handle what they have held.
    fn release(&mut self, cx: &mut Context<'_>) {
        let slow = self.clients.iter_mut().filter(|(_, client)| client.is_slow());
        let held: Vec<_> = slow.map(|(&conn, client)| (conn, std::mem::take(&mut client.held))).collect();
        for (conn, messages) in held {
            for message in messages {
                // The message is dropped here, and the hub may send another one.
                self.handle(cx, conn, &message);
            }
        }
    }
}

impl Handler for Clients {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        match self.clients.get_mut(&conn) {
            Some(client) if client.is_slow() && self.done < SPEAKERS => {
                client.held.push(message.detach());
            }
            _ => self.handle(cx, conn, &message),
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Some(client) = self.clients.get_mut(&conn) {
            if let Err(error) = client.speak(cx, conn) {
                self.fail(cx, conn, error);
            }
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if reason != (DisconnectReason::Local { complete: true }) {
            self.fail(cx, conn, reason);
        }
        if cx.connections() == 0 {
            cx.stop();
        }
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.fail(cx, conn, error);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        self.failed.get_or_insert(format!("not done after {TIME_LIMIT:?}"));
        cx.stop();
    }
}

pub(super) fn run() -> Result<(), Box<dyn Error + Send + Sync>> {
    // Neither side needs to know when a message was sent.
    let config = Config::default().provider(ProviderChoice::Iwarp).quiet_sends(true);
    let mut server = Reactor::new(config.clone())?;
    let listener = server.context().listen(([127, 0, 0, 1], 0).into())?;
    let address = server.context().listeners().local_address(listener).ok_or("nobody listens")?;
    let remote = server.handle();
    let thread = thread::spawn(move || {
        let mut hub = Hub::default();
        server.run(&mut hub).map(|()| hub)
    });

    let mut reactor = Reactor::new(config)?;
    let mut members = Clients::default();
    for name in 0..MEMBERS as u8 {
        let options = ConnectOptions::new().private_data([name]);
        let conn = reactor.context().connect_with(address, options)?;
        members.clients.insert(conn, Client::new(name));
    }
    reactor.context().timers().set(TIME_LIMIT, 0);
    reactor.run(&mut members)?;
    if members.failed.is_some() {
        // The hub would wait for the members.
        remote.stop();
    }
    let hub = thread.join().map_err(|_| "the hub has panicked")??;
    if let Some(why) = members.failed.or(hub.failed) {
        return Err(why.into());
    }

    for client in members.clients.values() {
        let (name, missed) = (client.name, client.missed);
        let dropped = hub.dropped[usize::from(name)];
        if missed != dropped || client.is_slow() != (missed > 0) || !client.is_done() {
            return Err(format!(
                "member {name}: {} received, {missed} missed, {dropped} dropped by the hub",
                client.received
            )
            .into());
        }
    }
    if hub.longest_queue > QUEUE {
        return Err(format!("the hub has queued {} messages", hub.longest_queue).into());
    }
    let [.., one, other] = hub.dropped;
    println!(
        "{SPEAKERS} members received all of {} messages; the slow ones missed {one} and {other}, and know it",
        SPEAKERS as u32 * ROUNDS
    );
    Ok(())
}
