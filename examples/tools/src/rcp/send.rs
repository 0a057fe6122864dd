//! The sender of files.

use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

use indicatif::{ProgressBar, ProgressStyle};
use rdma_reactor::{
    Access, Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, Reactor, Region,
    RegionOptions, SendErrorKind, SendId, TimerId,
};

use super::hashed::Hashed;
use super::name::shown;
use super::tree::Item;
use super::wire::{CopyMessage, Hash};
use super::{PIECE, WINDOW};
use crate::pingpong::failure::Failure;
use crate::pingpong::interrupt::Interrupt;
use crate::pingpong::output::Output;
use crate::text;

/// The result of copying one file or several.
// local: files of the user
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// The number of copied files.
    pub files: usize,
    /// The total length of these files, in bytes.
    pub len: u64,
    /// The number of bytes that the receiver already had from an earlier attempt.
    pub resumed: u64,
    /// The duration of the whole copy.
    pub time: Duration,
    /// Descriptions of the files that were not copied, and of those that changed during the copy.
    pub problems: Vec<String>,
}

impl Copied {
    /// Formats the number of bytes, the duration and the rate as one line.
    #[must_use]
    pub fn figures(&self) -> String {
        let resumed = match self.resumed {
            0 => String::new(),
            resumed => format!(", {resumed} of them from before"),
        };
        let seconds = self.time.as_secs_f64();
        let rate = (self.len - self.resumed) as f64 / f64::from(1 << 20) / seconds.max(1e-9);
        format!("{} bytes{resumed}, {seconds:.3} s, {rate:.1} MiB/s", self.len)
    }
}

/// The step of the current copy.
#[derive(Debug)]
enum SendStep {
    /// The sender waits for the receiver's answer to its offer, or to its request for a directory.
    Asked,
    /// The sender hashes the beginning of its file, to compare it with the receiver's partial copy.
    Comparing { len: u64, hash: Hash },
    /// The receiver has a file of this name. The sender hashes its own file for the comparison.
    Hashing,
    /// The sender sends the pieces of the file, and then the message that ends it.
    Sending,
    /// The sender waits for the receiver's confirmation.
    Told,
}

/// The file that is being copied.
#[derive(Debug)]
struct Current {
    item: Item,
    file: Hashed,
    len: u64,
    /// The time at which the file was last changed.
    modified: Option<SystemTime>,
    resumed: u64,
    since: Instant,
}

// local: files of the user
#[derive(Debug)]
struct Sender {
    items: VecDeque<Item>,
    step: SendStep,
    /// The file that is being copied; `None` while a directory is requested.
    current: Option<Current>,
    conn: Option<ConnectionId>,
    /// The pieces that the receiver is fetching, with their lengths.
    flying: Vec<(SendId, u64)>,
    /// A piece whose send was refused. This piece is sent before any other piece.
    waiting: Option<Region>,
    bar: ProgressBar,
    copied: Copied,
    result: Option<Result<(), Failure>>,
}

fn unreadable(item: &Item, error: &dyn std::fmt::Display) -> String {
    format!("{}: {error}", shown(&item.path.to_string_lossy()))
}

/// Opens a file to copy. Some files, such as those of `/proc`, have content although their length is given as 0. Their copies would be
/// empty, so they are refused.
fn open(item: &Item) -> io::Result<(Metadata, File)> {
    let file = File::open(&item.path)?;
    let metadata = file.metadata()?;
    if metadata.len() == 0 && (&file).read(&mut [0])? > 0 {
        return Err(io::Error::other("it has content, but its length is given as 0: copy it to another file first"));
    }
    Ok((metadata, file))
}

impl Sender {
    /// Begins to copy the next file or directory. Closes the connection after the last one.
    #[allow(clippy::disallowed_methods, reason = "a program, not the library")]
    fn next(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        self.step = SendStep::Asked;
        while let Some(item) = self.items.pop_front() {
            let name = item.name.clone();
            if item.len.is_none() {
                self.current = None;
                return send_message(cx, conn, CopyMessage::Folder(&name));
            }
            match open(&item) {
                Ok((metadata, file)) => {
                    let (len, modified) = (metadata.len(), metadata.modified().ok());
                    let file = Hashed::new(file);
                    let since = Instant::now();
                    self.current = Some(Current { item, file, len, modified, resumed: 0, since });
                    return send_message(cx, conn, CopyMessage::Offer { len, name: &name });
                }
                Err(error) => self.copied.problems.push(unreadable(&item, &error)),
            }
        }
        self.end(cx, Ok(()));
        Ok(())
    }

    fn handle_message(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) -> Result<(), Failure> {
        match (CopyMessage::decode(message), &self.step, &self.current) {
            (Some(CopyMessage::Have { len, hash }), SendStep::Asked, Some(current)) => {
                // If the receiver's partial copy is longer than this file, that copy is not the beginning of this file. So the file is sent
                // from offset 0.
                let len = if len > current.len { 0 } else { len };
                self.step = SendStep::Comparing { len, hash };
                cx.timers().set(Duration::ZERO, 0);
                Ok(())
            }
            (Some(CopyMessage::Exists), SendStep::Asked, Some(_)) => {
                self.step = SendStep::Hashing;
                cx.timers().set(Duration::ZERO, 0);
                Ok(())
            }
            (Some(CopyMessage::Done), SendStep::Asked, None) => self.next(cx, conn),
            (Some(CopyMessage::Done), SendStep::Told, Some(_)) => {
                self.done();
                self.next(cx, conn)
            }
            // The reason comes from the peer. It is escaped, so that its control characters do not reach this terminal.
            (Some(CopyMessage::Refuse(why)), ..) => Err(Failure::new(text::shown(why))),
            _ => Err(Failure::new("the peer is not rcp server of this version")),
        }
    }

    /// Records that a file is copied. Adds a problem if the file has changed since it was offered.
    fn done(&mut self) {
        let Some(Current { item, file, len, modified, resumed, since }) = self.current.take() else { return };
        let one = Copied { files: 1, len, resumed, time: since.elapsed(), problems: Vec::new() };
        self.bar.suspend(|| Output::stdout().line(format!("{}: {}", shown(&item.name), one.figures())));
        self.copied.files += 1;
        self.copied.len += len;
        self.copied.resumed += resumed;
        let changed = match file.metadata() {
            Ok(now) if now.len() > len => Some(format!("it grew while it was copied: the copy has {len} bytes of it")),
            Ok(now) if now.modified().ok() != modified => Some("it changed while it was copied".to_owned()),
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        self.copied.problems.extend(changed.map(|changed| unreadable(&item, &changed)));
    }

    /// Hashes one slice of the file, for the comparison with the receiver's partial copy or complete file. After the last slice,
    /// continues with the next step.
    fn compare(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let len = match self.step {
            SendStep::Comparing { len, .. } => len,
            SendStep::Hashing => current.len,
            _ => return Ok(()),
        };
        if !current.file.hash_next(len).map_err(|error| Failure::new(unreadable(&current.item, &error)))? {
            cx.timers().set(Duration::ZERO, 0);
            return Ok(());
        }
        let own = current.file.hash();
        let SendStep::Comparing { hash, .. } = self.step else {
            current.resumed = len;
            self.bar.inc(len);
            self.step = SendStep::Told;
            return send_message(cx, conn, CopyMessage::End(own));
        };
        if len > 0 && own != hash {
            let name = shown(&current.item.name);
            self.bar
                .suspend(|| eprintln!("rcp: the peer's part of {name} is damaged or of another file: starting over"));
            current.file.rewind().map_err(Failure::new)?;
        }
        current.resumed = current.file.at();
        self.bar.inc(current.resumed);
        self.bar.reset_eta();
        send_message(cx, conn, CopyMessage::From(current.resumed))?;
        self.step = SendStep::Sending;
        self.pump(cx, conn)
    }

    /// Sends pieces until [`super::WINDOW`] are in flight or the file is sent.
    fn pump(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        let SendStep::Sending = self.step else { return Ok(()) };
        while self.flying.len() < WINDOW {
            let Some(piece) = self.next_piece(cx, conn)? else { return self.finish(cx, conn) };
            match cx.send_region(conn, &piece, 0..piece.len()) {
                // The program drops the region here, but the library frees the region's memory only after the peer has fetched the piece.
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

    /// Reads the next piece into memory that the peer may read. Returns `None` at the end of the file.
    fn next_piece(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<Option<Region>, Failure> {
        if let Some(piece) = self.waiting.take() {
            return Ok(Some(piece));
        }
        let Some(Current { item, file, len, .. }) = &mut self.current else { return Ok(None) };
        let most = cx.connection(conn).max_message().unwrap_or(0).clamp(1, PIECE.into());
        let len = (*len - file.at()).min(most);
        if len == 0 {
            return Ok(None);
        }
        let bytes = file.read(len).map_err(|error| Failure::new(unreadable(item, &error)))?;
        // `register_vec` registers the bytes where they are, so nothing copies them between the file and the network. On a secured
        // connection, the peer fetches an encrypted copy instead of the region. The region then needs no right for remote reads.
        let secured = cx.connection(conn).identity().is_some();
        let access = if secured { Access::LOCAL_WRITE } else { Access::REMOTE_READ };
        Ok(Some(cx.regions().register_vec(conn, bytes, &RegionOptions::new().allow(access))?))
    }

    /// Sends the message that ends the copy. It has the hash of the whole file, and follows the last piece.
    fn finish(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        let Some(current) = &self.current else { return Ok(()) };
        match cx.send(conn, &CopyMessage::End(current.file.hash()).encode()) {
            Ok(_) => self.step = SendStep::Told,
            Err(SendErrorKind::WouldBlock(_)) => {}
            Err(error) => return Err(Failure::new(error)),
        }
        Ok(())
    }

    /// Records the result of the program. Only the first result is kept.
    fn end(&mut self, cx: &mut Context<'_>, result: Result<(), Failure>) {
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

fn send_message(cx: &mut Context<'_>, conn: ConnectionId, what: CopyMessage<'_>) -> Result<(), Failure> {
    cx.send(conn, &what.encode()).map(drop).map_err(Failure::new)
}

impl Handler for Sender {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
        let offered = self.next(cx, conn);
        self.check(cx, offered);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let handled = self.handle_message(cx, conn, &message);
        self.check(cx, handled);
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
            Err(Failure::new(format!("the connection has ended: {reason}; repeat the command to continue the copy"))),
        );
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.end(cx, Err(Failure::no_connection(&error, "`rcp server`")));
    }
}

fn progress_bar(len: u64) -> ProgressBar {
    // `ProgressBar` draws the bar on standard error, and only if standard error is a terminal.
    let bar = ProgressBar::new(len);
    let style = "{bar:40} {binary_bytes:>11} of {binary_total_bytes} {binary_bytes_per_sec:>13} {eta:>4}";
    match ProgressStyle::with_template(style) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Copies files and directories to a peer. Returns the result, or `None` if the user interrupted the copy.
///
/// # Errors
/// The peer refuses a file, or the connection ends too early.
#[allow(clippy::disallowed_methods, reason = "a program, not the library")]
pub fn run(items: Vec<Item>, peer: SocketAddr, config: Config) -> Result<Option<Copied>, Failure> {
    let mut reactor = Reactor::new(config)?;
    Interrupt::on_signals()?.stops(reactor.handle());
    reactor.context().connect(peer)?;
    let bar = progress_bar(items.iter().filter_map(|item| item.len).sum());
    let mut sender = Sender {
        items: items.into(),
        step: SendStep::Asked,
        current: None,
        conn: None,
        flying: Vec::new(),
        waiting: None,
        bar,
        copied: Copied::default(),
        result: None,
    };
    let since = Instant::now();
    reactor.run(&mut sender)?;
    sender.bar.finish_and_clear();
    let copied = Copied { time: since.elapsed(), ..sender.copied };
    Ok(sender.result.transpose()?.map(|()| copied))
}
