//! A sender that is faster than its receiver. The receiver keeps messages that it has no time to handle. Their receive buffers are not
//! reposted, so the sender gets no credits. The sender continues in `on_writable`. No queue of either side grows beyond the window, and
//! neither side polls.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::collections::VecDeque;
use std::error::Error;
use std::thread;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message, ProviderChoice,
    Reactor, SendErrorKind, TimerId,
};

const MESSAGES: u64 = 2000;

/// The number of messages that the receiver handles in a millisecond.
const PACE: usize = 10;

/// Sends ascending numbers as fast as the window allows.
#[derive(Default)]
struct Sender {
    next: u64,
    refused: u64,
    failed: Option<String>,
}

impl Sender {
    fn pump(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        while self.next < MESSAGES {
            match cx.send(conn, &self.next.to_le_bytes()) {
                Ok(_) => self.next += 1,
                Err(SendErrorKind::WouldBlock(what)) => {
                    if self.refused == 0 {
                        println!("message {} has to wait: {what}", self.next);
                    }
                    // The reactor calls `on_writable` when credit arrives, so there is nothing to do now.
                    self.refused += 1;
                    return;
                }
                Err(error) => return self.fail(cx, conn, &error),
            }
        }
        // All messages are queued. `close` delivers them before it ends the connection.
        cx.close(conn);
    }

    fn fail(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: &dyn Error) {
        self.failed = Some(format!("{conn}: {error}"));
        cx.stop();
    }
}

impl Handler for Sender {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.pump(cx, conn);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.pump(cx, conn);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if reason != (DisconnectReason::Local { complete: true }) {
            return self.fail(cx, conn, &reason);
        }
        cx.stop();
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.fail(cx, conn, &error);
    }
}

/// Keeps each message, and handles at most `PACE` of them in a millisecond.
#[derive(Default)]
struct Receiver {
    kept: VecDeque<DetachedMessage>,
    most_kept: usize,
    handled: u64,
    /// True if the sender has closed the connection.
    over: bool,
}

impl Handler for Receiver {
    fn on_connect(&mut self, cx: &mut Context<'_>, _: ConnectionId) {
        cx.timers().set(Duration::from_millis(1), 0);
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        // The message stays in the registered buffer that it arrived in. This buffer is not reposted until the message is dropped.
        self.kept.push_back(message.detach());
        self.most_kept = self.most_kept.max(self.kept.len());
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let count = self.kept.len().min(PACE);
        for message in self.kept.drain(..count) {
            assert_eq!(*message, self.handled.to_le_bytes(), "in order, none lost, none twice");
            self.handled += 1;
        }
        if self.over && self.kept.is_empty() {
            cx.stop();
        } else {
            cx.timers().set(Duration::from_millis(1), 0);
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        self.over = true;
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let config = Config::default().provider(ProviderChoice::Iwarp);
    // The sender's last messages wait for credits before its close completes. The receiver is slow, so the close gets a long timeout.
    let mut client = Reactor::new(config.clone().timeouts(|t| t.close = Duration::from_secs(60)))?;
    let mut server = Reactor::new(config)?;
    let listener = server.context().listen("127.0.0.1:0".parse()?)?;
    let address = server.context().listeners().local_address(listener).ok_or("the listener is gone")?;
    let thread = thread::spawn(move || {
        let mut receiver = Receiver::default();
        server.run(&mut receiver).map(|()| receiver)
    });
    client.context().connect(address)?;
    let mut sender = Sender::default();
    client.run(&mut sender)?;
    // The receiver ends only when its connection ends. It may never have had one, so the program
    // does not wait for it.
    if let Some(why) = sender.failed {
        return Err(why.into());
    }
    let receiver = thread.join().map_err(|_| "the receiver panicked")??;
    println!(
        "{} of {MESSAGES} messages handled; the sender was refused {} times, and the receiver kept {} at most",
        receiver.handled, sender.refused, receiver.most_kept
    );
    Ok(())
}
