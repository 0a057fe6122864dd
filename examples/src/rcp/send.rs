//! The end that has the file.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use rdma_reactor::{
    Access, Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, Reactor, Region,
    RegionOptions, SendErrorKind, SendId, TimerId,
};

use super::hashed::Hashed;
use super::wire::{Hash, Say};
use super::{PIECE, WINDOW};
use crate::pingpong::failure::Failure;
use crate::pingpong::interrupt::Interrupt;

/// The result of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Bytes of the file.
    pub len: u64,
    /// Number of those bytes that the peer had from before.
    pub resumed: u64,
}

/// The next step.
#[derive(Debug)]
enum Step {
    /// The peer is to say how much of the file it has.
    Asked,
    /// The beginning of the file is being compared with the part that the peer has.
    Comparing { len: u64, hash: Hash },
    /// Pieces are being sent, and the end behind them.
    Sending,
    /// The peer is to report the result.
    Told,
}

#[derive(Debug)]
struct Sender<'a> {
    name: &'a str,
    file: Hashed,
    len: u64,
    resumed: u64,
    step: Step,
    conn: Option<ConnectionId>,
    /// Pieces that the peer is fetching, and their lengths.
    flying: Vec<(SendId, u64)>,
    /// A piece for which there was no room.
    waiting: Option<Region>,
    bar: ProgressBar,
    result: Option<Result<Copied, Failure>>,
}

impl Sender<'_> {
    fn heard(&mut self, cx: &mut Context<'_>, message: &[u8]) -> Result<Option<Copied>, Failure> {
        match (Say::decode(message), &self.step) {
            (Some(Say::Have { len, hash }), Step::Asked) => {
                // A part that is longer than this file is not its beginning.
                let len = if len > self.len { 0 } else { len };
                self.step = Step::Comparing { len, hash };
                cx.set_timer(Duration::ZERO, 0);
                Ok(None)
            }
            (Some(Say::Done), Step::Told) => Ok(Some(Copied { len: self.len, resumed: self.resumed })),
            // The text comes from a peer, so its control characters must not reach this terminal.
            (Some(Say::Refuse(why)), _) => Err(Failure::new(why.replace(char::is_control, "?"))),
            _ => Err(Failure::new("the peer is not an rcp server of this version")),
        }
    }

    /// Compares a slice of the file, and begins to send after the last one.
    fn compare(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        let Step::Comparing { len, hash } = self.step else { return Ok(()) };
        if !self.file.skim(len).map_err(Failure::new)? {
            cx.set_timer(Duration::ZERO, 0);
            return Ok(());
        }
        if len > 0 && self.file.hash() != hash {
            self.bar
                .suspend(|| eprintln!("rcp: what the peer had of {} is damaged or of another file: anew", self.name));
            self.file.rewind().map_err(Failure::new)?;
        }
        self.resumed = self.file.at();
        self.bar.set_position(self.resumed);
        self.bar.reset_eta();
        cx.send(conn, &Say::From(self.resumed).encode()).map_err(Failure::new)?;
        self.step = Step::Sending;
        self.pump(cx, conn)
    }

    /// Sends as many pieces as there is room for.
    fn pump(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        let Step::Sending = self.step else { return Ok(()) };
        while self.flying.len() < WINDOW {
            let Some(piece) = self.next_piece(cx, conn)? else { return self.finish(cx, conn) };
            match cx.send_region(conn, &piece, 0..piece.len()) {
                // The region is dropped here; its memory is freed when the peer has fetched it.
                Ok(send) => self.flying.push((send, piece.len() as u64)),
                Err(SendErrorKind::WouldBlock(_)) => {
                    self.waiting = Some(piece);
                    break;
                }
                Err(error) => return Err(Failure::new(error)),
            }
        }
        Ok(())
    }

    /// Reads the next piece into memory that the peer may read; `None` at the end of the file.
    fn next_piece(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<Option<Region>, Failure> {
        if let Some(piece) = self.waiting.take() {
            return Ok(Some(piece));
        }
        let most = cx.max_message(conn).unwrap_or(0).clamp(1, PIECE.into());
        let len = (self.len - self.file.at()).min(most);
        if len == 0 {
            return Ok(None);
        }
        let bytes = self.file.read(len).map_err(|error| Failure::new(format!("{}: {error}", self.name)))?;
        // Registering takes the bytes as they are, so nothing copies them between the file and the wire.
        // The peer fetches a part from the region, or a sealed copy of it, which needs no right.
        let secured = cx.identity(conn).is_some();
        let access = if secured { Access::LOCAL_WRITE } else { Access::REMOTE_READ };
        Ok(Some(cx.register_vec(conn, bytes, &RegionOptions::new().allow(access))?))
    }

    /// Sends the hash of the whole file behind the last piece.
    fn finish(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        match cx.send(conn, &Say::End(self.file.hash()).encode()) {
            Ok(_) => self.step = Step::Told,
            Err(SendErrorKind::WouldBlock(_)) => {}
            Err(error) => return Err(Failure::new(error)),
        }
        Ok(())
    }

    /// Notes the result; the first one counts.
    fn end(&mut self, cx: &mut Context<'_>, result: Result<Copied, Failure>) {
        self.result.get_or_insert(result);
        match self.conn {
            Some(conn) => cx.close(conn),
            None => cx.stop(),
        }
    }

    fn check(&mut self, cx: &mut Context<'_>, result: Result<(), Failure>) {
        if let Err(failure) = result {
            self.end(cx, Err(failure));
        }
    }
}

impl Handler for Sender<'_> {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
        let offer = Say::Offer { len: self.len, name: self.name }.encode();
        let offered = cx.send(conn, &offer).map(drop).map_err(Failure::new);
        self.check(cx, offered);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        if let Some(result) = self.heard(cx, &message).transpose() {
            self.end(cx, result);
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if let Some(conn) = self.conn {
            let compared = self.compare(cx, conn);
            self.check(cx, compared);
        }
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        let Some(at) = self.flying.iter().position(|&(piece, _)| piece == send) else { return };
        let (_, len) = self.flying.swap_remove(at);
        if outcome.is_sent() {
            self.bar.inc(len);
            let pumped = self.pump(cx, conn);
            self.check(cx, pumped);
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let pumped = self.pump(cx, conn);
        self.check(cx, pumped);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.conn = None;
        self.end(
            cx,
            Err(Failure::new(format!("the connection has ended: {reason}; say it again to go on from there"))),
        );
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.end(cx, Err(Failure::new(format!("no connection: {error}; is `rcp server` there?"))));
    }
}

fn progress_bar(len: u64) -> ProgressBar {
    // The bar is drawn on standard error, and only if that is a terminal.
    let bar = ProgressBar::new(len);
    let style = "{bar:40} {binary_bytes:>11} of {binary_total_bytes} {binary_bytes_per_sec:>13} {eta:>4}";
    match ProgressStyle::with_template(style) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Copies a file to a peer, under the name `name`; `None` if the user interrupted the copy.
///
/// # Errors
/// The file cannot be read, the peer refuses it, or the connection ends too early.
pub fn run(path: &Path, name: &str, peer: SocketAddr, config: Config) -> Result<Option<Copied>, Failure> {
    let unreadable = |error: &dyn std::fmt::Display| Failure::new(format!("{}: {error}", path.display()));
    // This is asked before the file is opened, because opening a pipe would wait for a writer.
    if !std::fs::metadata(path).map_err(|error| unreadable(&error))?.is_file() {
        return Err(unreadable(&"not a file; rcp copies one file at a time"));
    }
    let file = File::open(path).map_err(|error| unreadable(&error))?;
    let len = file.metadata().map_err(|error| unreadable(&error))?.len();
    let mut reactor = Reactor::new(config)?;
    Interrupt::on_signals()?.stops(reactor.remote());
    reactor.context().connect(peer)?;
    let mut sender = Sender {
        name,
        file: Hashed::new(file),
        len,
        resumed: 0,
        step: Step::Asked,
        conn: None,
        flying: Vec::new(),
        waiting: None,
        bar: progress_bar(len),
        result: None,
    };
    reactor.run(&mut sender)?;
    sender.bar.finish_and_clear();
    sender.result.transpose()
}
