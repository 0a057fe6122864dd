//! Two messages of 16 MiB: the first is sent as a copy, the second from a registered region without a copy. Each arrives as one
//! message. `on_send_complete` reports when the program may reuse the region.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::mem;
use std::thread;
use std::time::{Duration, Instant};

use rdma_reactor::{
    Access, Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, ProviderChoice,
    Reactor, Region, RegionOptions, SendId,
};

const LEN: usize = 16 << 20;

/// The sender of both messages. Their content is built before the connection is made, because a callback should be short.
struct Sender {
    started: Instant,
    to_copy: Vec<u8>,
    to_lend: Vec<u8>,
    region: Option<Region>,
    copy: Option<SendId>,
    failed: Option<String>,
}

impl Sender {
    fn start(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Box<dyn Error>> {
        // The library copies the bytes before `send` returns, so the program may reuse its memory immediately.
        self.copy = Some(cx.send(conn, &self.to_copy)?);
        // The peer fetches a long message from the sender's memory by RDMA Read, so the region must allow remote reads.
        let options = RegionOptions::new().allow(Access::REMOTE_READ);
        let region = cx.regions().register_vec(conn, mem::take(&mut self.to_lend), &options)?;
        cx.send_region(conn, &region, 0..LEN)?;
        self.region = Some(region);
        cx.close(conn);
        Ok(())
    }

    fn fail(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: &dyn Error) {
        self.failed = Some(format!("{conn}: {error}"));
        cx.stop();
    }
}

impl Handler for Sender {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        println!("the peer accepts messages of up to {} MiB", cx.connection(conn).max_message().unwrap_or(0) >> 20);
        if let Err(error) = self.start(cx, conn) {
            self.fail(cx, conn, &*error);
        }
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, _: ConnectionId, send: SendId, outcome: Outcome) {
        let which = if Some(send) == self.copy { "copy" } else { "region" };
        println!("the {which} is sent: {}, after {:?}", outcome.is_sent(), self.started.elapsed());
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

/// Reads each byte of every message, in order to check the content.
struct Receiver;

impl Handler for Receiver {
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        let first = message.first().copied().unwrap_or_default();
        let all_same = message[..] == vec![first; message.len()];
        println!("a message of {} MiB, each byte is {first}: {all_same}", message.len() >> 20);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {
        cx.stop();
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let config = Config::default().provider(ProviderChoice::Iwarp);
    let mut server = Reactor::new(config.clone())?;
    let listener = server.context().listen("127.0.0.1:0".parse()?)?;
    let address = server.context().listeners().local_address(listener).ok_or("the listener is gone")?;
    let thread = thread::spawn(move || server.run(&mut Receiver));
    // The receiver reads every byte of the first message before it fetches the second one, so the close gets a long timeout.
    let mut client = Reactor::new(config.timeouts(|t| t.close = Duration::from_secs(60)))?;
    let (to_copy, to_lend) = (vec![1; LEN], vec![2; LEN]);
    let mut sender = Sender { started: Instant::now(), to_copy, to_lend, region: None, copy: None, failed: None };
    client.context().connect(address)?;
    client.run(&mut sender)?;
    // The receiver ends only when its connection ends. It may never have had one, so the program
    // does not wait for it.
    if let Some(why) = sender.failed {
        return Err(why.into());
    }
    thread.join().map_err(|_| "the receiver panicked")??;
    Ok(())
}
