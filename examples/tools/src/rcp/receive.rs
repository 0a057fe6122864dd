//! The end that receives the files.
//!
//! The received part of `NAME` is in `NAME.rcp-part` until the file is complete. So a copy can continue
//! later, and nobody mistakes the part for the file. A name always means a file below the one directory.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rdma_reactor::{
    Config, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor, SendErrorKind, TimerId,
};

use super::hashed::Hashed;
use super::name;
use super::parts::{PartialCopies, is_full};
use super::wire::{CopyMessage, Hash};
use super::{PIECE, WINDOW};
use crate::pingpong::failure::Failure;
use crate::pingpong::interrupt::Interrupt;
use crate::pingpong::output::Output;

/// The lowest assumed speed of a disk that a sender hashes a file from, bytes per second.
const SLOW_DISK: u64 = 16 << 20;
/// The time between two checks of the senders, and between two checks of the age of partial copies.
const LOOK: Duration = Duration::from_secs(1);
const TIDY: Duration = Duration::from_secs(3600);

/// The tokens of timers.
const TO_HASH: u64 = 0;
const TO_LOOK: u64 = 1;
const TO_TIDY: u64 = 2;

/// The settings of the server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The directory that the files are put into.
    pub directory: PathBuf,
    /// True if peers may replace files.
    pub overwrite: bool,
    /// The longest time without progress of a sender.
    pub patience: Duration,
    /// The time for which the part of an interrupted copy is kept.
    pub keep_parts: Duration,
}

/// The next step on a connection.
#[derive(Debug)]
enum ReceiveStep {
    /// The part of an earlier copy is being hashed, up to this length.
    Hashing(u64),
    /// The receiver waits for the offset from which the peer continues.
    Answered,
    /// The receiver waits for pieces, and for the end after them.
    Receiving,
    /// The file exists already, and the receiver waits for the hash of the peer's file.
    Exists,
    /// The existing file is being hashed, to be compared with this hash.
    Comparing(Hash),
}

/// A file that is being received, or compared with an existing one.
#[derive(Debug)]
struct Incoming {
    name: String,
    len: u64,
    file: Hashed,
    step: ReceiveStep,
    /// The position when the sender's time limit was last restarted.
    counted: u64,
}

/// A connection.
#[derive(Debug)]
struct SenderState {
    /// The deadline of the sender; `None` while the receiver has work to do.
    until: Option<Instant>,
    incoming: Option<Incoming>,
}

#[derive(Debug)]
struct FileServer {
    options: ServerOptions,
    parts: PartialCopies,
    senders: BTreeMap<ConnectionId, SenderState>,
    /// The timer of the next check of the senders.
    looking: Option<TimerId>,
    /// Connections with something to hash; each gets a slice in turn.
    hashing: VecDeque<ConnectionId>,
}

impl FileServer {
    fn path(&self, name: &str) -> PathBuf {
        self.options.directory.join(name)
    }

    /// Restarts the time limit of a sender that must first hash `len` bytes.
    fn renew(&mut self, cx: &Context<'_>, conn: ConnectionId, len: u64) {
        if let Some(sender) = self.senders.get_mut(&conn) {
            sender.until = cx.now().checked_add(self.options.patience + Duration::from_secs(len / SLOW_DISK));
        }
    }

    /// Handles a message of the peer.
    fn handle_message(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) -> Result<(), Failure> {
        let Some(sender) = self.senders.get_mut(&conn) else { return Ok(()) };
        let Some(incoming) = &mut sender.incoming else {
            return match CopyMessage::decode(message) {
                Some(CopyMessage::Offer { len, name }) => self.begin(cx, conn, len, name),
                Some(CopyMessage::Folder(name)) => self.folder(cx, conn, name),
                _ => Err(Failure::new("the peer is not rcp of this version")),
            };
        };
        let left = incoming.len - incoming.file.at();
        match (&incoming.step, CopyMessage::decode(message)) {
            (ReceiveStep::Answered, Some(CopyMessage::From(at))) if at == 0 || at == incoming.file.at() => {
                if at < incoming.file.at() {
                    incoming.file.clear().map_err(|error| failed("writing", &incoming.name, &error))?;
                }
                incoming.step = ReceiveStep::Receiving;
                incoming.counted = at;
                self.renew(cx, conn, 0);
                Ok(())
            }
            (ReceiveStep::Receiving, _) if left > 0 && (1..=left).contains(&(message.len() as u64)) => {
                let written = self.parts.making_room(|| incoming.file.write(message));
                if written.as_ref().is_err_and(is_full) {
                    // Its part would fill the disk again, which leaves no space for anybody.
                    self.parts.remove(&incoming.name);
                }
                written.map_err(|error| failed("writing", &incoming.name, &error))?;
                let (at, left) = (incoming.file.at(), left - message.len() as u64);
                if left == 0 || at - incoming.counted >= PIECE.into() {
                    incoming.counted = at;
                    self.renew(cx, conn, 0);
                }
                Ok(())
            }
            (ReceiveStep::Receiving, Some(CopyMessage::End(hash))) if left == 0 => self.finish(cx, conn, hash),
            (ReceiveStep::Exists, Some(CopyMessage::End(hash))) => {
                incoming.step = ReceiveStep::Comparing(hash);
                self.queue_to_hash(cx, conn);
                Ok(())
            }
            _ => Err(Failure::new("the peer sent a message out of order")),
        }
    }

    /// Answers the offer of a file with the existing part, after hashing it if needed.
    fn begin(&mut self, cx: &mut Context<'_>, conn: ConnectionId, len: u64, name: &str) -> Result<(), Failure> {
        name::check(name)?;
        if self.senders.values().filter_map(|sender| sender.incoming.as_ref()).any(|other| other.name == name) {
            return Err(Failure::new(format!("{name:?} is being copied by another peer: choose another name")));
        }
        self.check_folders(name)?;
        let exists = match fs::symlink_metadata(self.path(name)) {
            Ok(found) if found.is_dir() => return Err(Failure::new(format!("{name:?} is a directory on the server"))),
            Ok(_) if self.options.overwrite => false,
            // The existing file may be the same one.
            Ok(found) if found.is_file() && found.len() == len => true,
            Ok(_) => return Err(taken(name)),
            Err(_) => false,
        };
        let (file, step) = match exists {
            true => (Hashed::new(File::open(self.path(name)).map_err(|_| taken(name))?), ReceiveStep::Exists),
            false => self.open_part(name, len)?,
        };
        if let Some(sender) = self.senders.get_mut(&conn) {
            sender.incoming = Some(Incoming { name: name.to_owned(), len, file, step, counted: 0 });
        }
        if exists {
            self.renew(cx, conn, len);
            send_message(cx, conn, CopyMessage::Exists);
        } else {
            self.queue_to_hash(cx, conn);
        }
        Ok(())
    }

    /// Opens the partial copy of a file, or makes one.
    fn open_part(&mut self, name: &str, len: u64) -> Result<(Hashed, ReceiveStep), Failure> {
        let (path, broken) = (self.parts.path(name), |error: io::Error| failed("creating", name, &error));
        // This program does not write to anything else of that name, such as a link to another file.
        if fs::symlink_metadata(&path).is_ok_and(|found| !found.is_file()) {
            return Err(Failure::new(format!("{name:?}: its partial copy is not a regular file")));
        }
        self.make_folders(name)?;
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = self.parts.making_room(|| options.open(&path)).map_err(broken)?;
        self.parts.take(name);
        let mut have = file.metadata().map_err(broken)?.len();
        let mut part = Hashed::new(file);
        if have > len {
            part.clear().map_err(broken)?;
            have = 0;
        }
        Ok((part, ReceiveStep::Hashing(have)))
    }

    /// Makes a directory that the peer requests.
    fn folder(&mut self, cx: &mut Context<'_>, conn: ConnectionId, name: &str) -> Result<(), Failure> {
        name::check(name)?;
        self.make_folders(&format!("{name}/."))?;
        self.renew(cx, conn, 0);
        send_message(cx, conn, CopyMessage::Done);
        Ok(())
    }

    /// Checks that the path to a file has only real directories. A link could lead outside.
    fn check_folders(&self, name: &str) -> Result<(), Failure> {
        for (at, _) in name.match_indices('/') {
            let folder = &name[..at];
            match fs::symlink_metadata(self.path(folder)) {
                Ok(found) if !found.is_dir() => {
                    return Err(Failure::new(format!(
                        "{folder:?} is not a directory on the server: choose another name"
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes the directories of the path to a file.
    fn make_folders(&mut self, name: &str) -> Result<(), Failure> {
        self.check_folders(name)?;
        for (at, _) in name.match_indices('/') {
            let path = self.path(&name[..at]);
            let made = self.parts.making_room(|| fs::create_dir(&path));
            match made {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(failed("creating", &name[..at], &error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn queue_to_hash(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // Now the receiver is the side that takes time.
        self.senders.entry(conn).and_modify(|sender| sender.until = None);
        if self.hashing.is_empty() {
            cx.set_timer(Duration::ZERO, TO_HASH);
        }
        self.hashing.push_back(conn);
    }

    /// Hashes a slice, and continues with the copy after the last one. Returns true if it was the last.
    fn hash(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<bool, Failure> {
        let Some(incoming) = self.senders.get_mut(&conn).and_then(|sender| sender.incoming.as_mut()) else {
            return Ok(true);
        };
        let len = match incoming.step {
            ReceiveStep::Hashing(len) => len,
            ReceiveStep::Comparing(_) => incoming.len,
            _ => return Ok(true),
        };
        let broken = |error: io::Error| failed("reading the existing part of", &incoming.name, &error);
        if !incoming.file.hash_next(len).map_err(broken)? {
            return Ok(false);
        }
        let hash = incoming.file.hash();
        match incoming.step {
            ReceiveStep::Comparing(other) if other != hash => return Err(taken(&incoming.name)),
            ReceiveStep::Comparing(_) => self.done(cx, conn),
            _ => {
                incoming.step = ReceiveStep::Answered;
                self.renew(cx, conn, len);
                send_message(cx, conn, CopyMessage::Have { len, hash });
            }
        }
        Ok(true)
    }

    /// Moves a file that has arrived in full to its final name, if its hash is that of the sender.
    fn finish(&mut self, cx: &mut Context<'_>, conn: ConnectionId, hash: Hash) -> Result<(), Failure> {
        let Some(incoming) = self.senders.get(&conn).and_then(|sender| sender.incoming.as_ref()) else {
            return Ok(());
        };
        let (name, path) = (&incoming.name, self.path(&incoming.name));
        if incoming.file.hash() != hash {
            self.parts.remove(name);
            return Err(Failure::new(format!("{name:?} arrived with another hash than it was sent with: try again")));
        }
        // The names may have been reassigned meanwhile.
        self.check_folders(name)?;
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() || !self.options.overwrite => return Err(taken(name)),
            _ => {}
        }
        fs::rename(self.parts.path(name), &path).map_err(|error| failed("creating", name, &error))?;
        Output::stdout().line(format!("{}: {} bytes", name::shown(name), incoming.len));
        self.done(cx, conn);
        Ok(())
    }

    /// Reports to the peer that the copy is complete.
    fn done(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.senders.entry(conn).and_modify(|sender| sender.incoming = None);
        self.renew(cx, conn, 0);
        send_message(cx, conn, CopyMessage::Done);
    }

    /// Ends a copy that is not complete. Returns it, and true if its part is kept.
    fn cut_off(&mut self, conn: ConnectionId) -> Option<(Incoming, bool)> {
        let incoming = self.senders.get_mut(&conn)?.incoming.take()?;
        let is_part = !matches!(incoming.step, ReceiveStep::Exists | ReceiveStep::Comparing(_));
        let kept = is_part && self.parts.interrupted(&incoming.name);
        Some((incoming, kept))
    }

    fn refuse(&mut self, cx: &mut Context<'_>, conn: ConnectionId, failure: &Failure) {
        eprintln!("rcp: {conn}: {failure}");
        self.cut_off(conn);
        send_message(cx, conn, CopyMessage::Refuse(&failure.to_string()));
        // The answer is sent before the connection closes.
        cx.close(conn);
        self.senders.remove(&conn);
    }

    fn check<T: Default>(&mut self, cx: &mut Context<'_>, conn: ConnectionId, result: Result<T, Failure>) -> T {
        result.unwrap_or_else(|failure| {
            self.refuse(cx, conn, &failure);
            T::default()
        })
    }

    /// Closes the connections of senders whose time limit has passed.
    fn look(&mut self, cx: &mut Context<'_>) {
        let now = cx.now();
        let is_late = |sender: &SenderState| sender.until.is_some_and(|until| until <= now);
        let late: Vec<_> = self.senders.iter().filter(|(_, sender)| is_late(sender)).map(|(&conn, _)| conn).collect();
        for conn in late {
            let failure =
                format!("no progress for {} s: --patience of the server", self.options.patience.as_secs_f64());
            self.refuse(cx, conn, &Failure::new(failure));
        }
        self.looking = (!self.senders.is_empty()).then(|| cx.set_timer(LOOK, TO_LOOK));
    }
}

fn failed(doing: &str, name: &str, error: &io::Error) -> Failure {
    Failure::new(format!("{doing} {name:?}: {error}"))
}

fn taken(name: &str) -> Failure {
    Failure::new(format!("{name:?} exists on the server: choose another name, or rcp server --overwrite"))
}

/// Answers the peer. If the peer does not receive answers, the answer is dropped.
fn send_message(cx: &mut Context<'_>, conn: ConnectionId, what: CopyMessage<'_>) {
    match cx.send(conn, &what.encode()) {
        Ok(_) | Err(SendErrorKind::Closed) => {}
        Err(_) => cx.close(conn),
    }
}

impl Handler for FileServer {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.looking.get_or_insert_with(|| cx.set_timer(LOOK, TO_LOOK));
        self.senders.insert(conn, SenderState { until: None, incoming: None });
        self.renew(cx, conn, 0);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let handled = self.handle_message(cx, conn, &message);
        self.check(cx, conn, handled);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, token: u64) {
        match token {
            TO_LOOK => return self.look(cx),
            TO_TIDY => {
                self.parts.tidy();
                cx.set_timer(TIDY, TO_TIDY);
                return;
            }
            _ => {}
        }
        if let Some(conn) = self.hashing.pop_front() {
            let hashed = self.hash(cx, conn).map(|done| !done);
            if self.check(cx, conn, hashed) {
                self.hashing.push_back(conn);
            }
        }
        if !self.hashing.is_empty() {
            cx.set_timer(Duration::ZERO, TO_HASH);
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if let Some((Incoming { name, len, file, .. }, kept)) = self.cut_off(conn) {
            let at = file.at();
            let kept = if kept { format!("{at} of {len} bytes are kept") } else { "nothing of it is kept".to_owned() };
            eprintln!("rcp: {conn}: {name:?} is not complete: {reason}; {kept}");
        }
        self.senders.remove(&conn);
    }
}

/// Receives files from peers into a directory until SIGINT, SIGTERM or SIGHUP.
///
/// # Errors
/// The directory does not exist, the reactor cannot listen on the address, or it fails.
pub fn run(options: ServerOptions, address: SocketAddr, config: Config) -> Result<(), Failure> {
    let directory = &options.directory;
    if !fs::metadata(directory).is_ok_and(|found| found.is_dir()) {
        return Err(Failure::new(format!("{} is not a directory: make it, or name another", directory.display())));
    }
    let config = config
        .large_messages(|l| l.max_message = PIECE.into())
        .large_messages(|l| l.memory = WINDOW * 4 * PIECE as usize);
    let mut reactor = Reactor::new(config)?;
    Interrupt::on_signals()?.stops(reactor.handle());
    let listener = reactor.context().listen(address)?;
    let address = reactor.context().local_address(listener).unwrap_or(address);
    let parts = PartialCopies::find(directory, options.keep_parts);
    reactor.context().set_timer(TIDY, TO_TIDY);
    Output::stdout().line(format!("listening on {address}"));
    let mut server = FileServer { options, parts, senders: BTreeMap::new(), looking: None, hashing: VecDeque::new() };
    Ok(reactor.run(&mut server)?)
}
