//! The receiver of files.
//!
//! Until the file `NAME` is complete, its received part is in `NAME.rcp-part`. So an interrupted copy can be continued, and no program
//! uses an incomplete file. All files are below one directory.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use rdma_reactor::{
    Config, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor, SendErrorKind, TimerId,
};

use super::folder::Folder;
use super::hashed::Hashed;
use super::name;
use super::parts::{PART, PartialCopies, is_full, part};
use super::wire::{CopyMessage, Hash};
use super::{PIECE, WINDOW};
use crate::pingpong::failure::Failure;
use crate::pingpong::interrupt::Interrupt;
use crate::pingpong::output::Output;

/// The lowest assumed speed of a disk that a sender reads while it hashes a file, in bytes per second.
const SLOW_DISK: u64 = 16 << 20;
/// The interval at which the receiver checks the time limits of senders.
const LOOK: Duration = Duration::from_secs(1);
/// The interval at which the receiver checks the age of partial copies.
const TIDY: Duration = Duration::from_secs(3600);

/// The token of the timer after which the receiver hashes the next slice.
const TO_HASH: u64 = 0;
/// The token of the timer after which the receiver checks the time limits of senders.
const TO_LOOK: u64 = 1;
/// The token of the timer after which the receiver checks the age of partial copies.
const TO_TIDY: u64 = 2;

/// The settings of the server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The directory in which files are stored.
    pub directory: PathBuf,
    /// True if a peer may replace an existing file.
    pub overwrite: bool,
    /// The time limit of a sender that makes no progress.
    pub patience: Duration,
    /// The time for which a partial copy is kept.
    pub keep_parts: Duration,
}

/// The step of the copy on a connection.
#[derive(Debug)]
enum ReceiveStep {
    /// The receiver hashes the partial copy of an earlier attempt, up to this length.
    Hashing(u64),
    /// The receiver waits for the offset from which the sender continues.
    Answered,
    /// The receiver waits for pieces of the file, and then for the message that ends it.
    Receiving,
    /// A file of this name and length exists. The receiver waits for the hash of the sender's file.
    Exists,
    /// The receiver hashes the existing file, and compares the result with this hash.
    Comparing(Hash),
}

/// A file that is being received, or compared with an existing one.
// bound: tool-rcp
#[derive(Debug)]
struct Incoming {
    name: String,
    len: u64,
    file: Hashed,
    step: ReceiveStep,
    /// The position in the file when the sender's time limit was last restarted.
    counted: u64,
}

/// The state of one connection.
#[derive(Debug)]
struct SenderState {
    /// The deadline of the sender; `None` while the receiver itself has work to do.
    until: Option<Instant>,
    incoming: Option<Incoming>,
}

#[derive(Debug)]
struct FileServer {
    options: ServerOptions,
    parts: PartialCopies,
    senders: BTreeMap<ConnectionId, SenderState>, // bound: tool-rcp
    /// The timer for the next check of the senders' time limits.
    looking: Option<TimerId>,
    /// The connections that have something to hash. They are served in turn, one slice each.
    hashing: VecDeque<ConnectionId>, // bound: tool-rcp
}

impl FileServer {
    /// Restarts the time limit of a sender. `len` is the number of bytes that the sender must hash before it sends its next message. The
    /// sender gets additional time for these bytes.
    fn renew(&mut self, cx: &Context<'_>, conn: ConnectionId, len: u64) {
        if let Some(sender) = self.senders.get_mut(&conn) {
            sender.until = cx.now().checked_add(self.options.patience + Duration::from_secs(len / SLOW_DISK));
        }
    }

    /// Handles a message of a sender.
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
                let written = self.parts.making_room(|_| incoming.file.write(message));
                if written.as_ref().is_err_and(is_full) {
                    // The disk is full. The partial copy is removed, because otherwise it would fill the disk again when the copy is
                    // continued.
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

    /// Handles the offer of a file. If a partial copy exists, hashes it before the answer.
    fn begin(&mut self, cx: &mut Context<'_>, conn: ConnectionId, len: u64, name: &str) -> Result<(), Failure> {
        name::check(name)?;
        if self.senders.values().filter_map(|sender| sender.incoming.as_ref()).any(|other| other.name == name) {
            return Err(Failure::new(format!("{name:?} is being copied by another peer: choose another name")));
        }
        let exists = match self.parts.folder().metadata(name) {
            Ok(found) if found.is_dir() => return Err(Failure::new(format!("{name:?} is a directory on the server"))),
            Ok(_) if self.options.overwrite => false,
            // An existing file has this name and length. It may be equal to the offered file, so their hashes are compared.
            Ok(found) if found.is_file() && found.len() == len => true,
            Ok(_) => return Err(taken(name)),
            // The directories in the name are created together with the partial copy. An error is
            // reported at that time.
            Err(_) => false,
        };
        let (file, step) = match exists {
            true => {
                let file = self.parts.folder().file(name, OFlag::O_RDONLY).map_err(|_| taken(name))?;
                (Hashed::new(file), ReceiveStep::Exists)
            }
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

    /// Opens the partial copy of a file, or creates it. Returns it with the next step of the copy.
    fn open_part(&mut self, name: &str, len: u64) -> Result<(Hashed, ReceiveStep), Failure> {
        let broken = |error: io::Error| failed("creating", name, &error);
        let no_file = || Failure::new(format!("{name:?}: its partial copy is not a regular file of one name"));
        let flags = OFlag::O_RDWR | OFlag::O_CREAT;
        let opened = self.parts.making_room(|folder| {
            folder.create_folders(name)?;
            folder.file(&part(name), flags)
        });
        let file = opened.map_err(|error| if is_no_file(&error) { no_file() } else { broken(error) })?;
        // Another program may have created a special file under this name, or a second hard link to
        // the file. This program must not write to such a file.
        let found = file.metadata().map_err(broken)?;
        if !found.is_file() || found.nlink() > 1 {
            return Err(no_file());
        }
        self.parts.take(name);
        let mut have = found.len();
        let mut part = Hashed::new(file);
        if have > len {
            part.clear().map_err(broken)?;
            have = 0;
        }
        Ok((part, ReceiveStep::Hashing(have)))
    }

    /// Creates a directory that the sender has requested.
    fn folder(&mut self, cx: &mut Context<'_>, conn: ConnectionId, name: &str) -> Result<(), Failure> {
        name::check(name)?;
        let made = self.parts.making_room(|folder| folder.create_folders(&format!("{name}/_")));
        made.map_err(|error| failed("creating", name, &error))?;
        self.renew(cx, conn, 0);
        send_message(cx, conn, CopyMessage::Done);
        Ok(())
    }

    fn queue_to_hash(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // The receiver itself is hashing now, so the sender has no time limit.
        self.senders.entry(conn).and_modify(|sender| sender.until = None);
        if self.hashing.is_empty() {
            cx.timers().set(Duration::ZERO, TO_HASH);
        }
        self.hashing.push_back(conn);
    }

    /// Hashes one slice for this connection. After the last slice, continues with the next step of the copy. Returns true if nothing
    /// remains to be hashed for this connection.
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

    /// Compares the hash of the received file with the sender's hash. If they are equal, renames the file to its final name. Otherwise,
    /// removes the partial copy and returns an error.
    fn finish(&mut self, cx: &mut Context<'_>, conn: ConnectionId, hash: Hash) -> Result<(), Failure> {
        let Some(incoming) = self.senders.get(&conn).and_then(|sender| sender.incoming.as_ref()) else {
            return Ok(());
        };
        let name = &incoming.name;
        if incoming.file.hash() != hash {
            self.parts.remove(name);
            return Err(Failure::new(format!("{name:?} arrived with another hash than it was sent with: try again")));
        }
        // During the copy, another program may have created a file of this name.
        let folder = self.parts.folder();
        match folder.metadata(name) {
            Ok(found) if found.is_dir() || !self.options.overwrite => return Err(taken(name)),
            _ => {}
        }
        let last = name.rsplit_once('/').map_or(&name[..], |(_, last)| last);
        folder.rename(&part(name), last).map_err(|error| failed("creating", name, &error))?;
        Output::stdout().line(format!("{}: {} bytes", name::shown(name), incoming.len));
        self.done(cx, conn);
        Ok(())
    }

    /// Notifies the sender that the copy is complete.
    fn done(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.senders.entry(conn).and_modify(|sender| sender.incoming = None);
        self.renew(cx, conn, 0);
        send_message(cx, conn, CopyMessage::Done);
    }

    /// Ends the incomplete copy on a connection. Returns the state of this copy, and true if its received part is kept on the disk. Returns
    /// `None` if no copy was in progress on the connection.
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
        // `close` sends the queued refusal before the connection ends.
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
        self.looking = (!self.senders.is_empty()).then(|| cx.timers().set(LOOK, TO_LOOK));
    }
}

/// Returns true if a file could not be opened because it is a symbolic link, a directory or a
/// socket.
fn is_no_file(error: &io::Error) -> bool {
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ELOOP | Errno::EISDIR | Errno::ENXIO))
}

fn failed(doing: &str, name: &str, error: &io::Error) -> Failure {
    Failure::new(format!("{doing} {name:?}: {error}"))
}

fn taken(name: &str) -> Failure {
    Failure::new(format!("{name:?} exists on the server: choose another name, or rcp server --overwrite"))
}

/// Sends an answer to the sender. If the library refuses the send, for example because the sender has not received earlier answers, closes
/// the connection.
fn send_message(cx: &mut Context<'_>, conn: ConnectionId, what: CopyMessage<'_>) {
    match cx.send(conn, &what.encode()) {
        Ok(_) | Err(SendErrorKind::Closed) => {}
        Err(_) => cx.close(conn),
    }
}

impl Handler for FileServer {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.looking.get_or_insert_with(|| cx.timers().set(LOOK, TO_LOOK));
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
                cx.timers().set(TIDY, TO_TIDY);
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
            cx.timers().set(Duration::ZERO, TO_HASH);
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if let Some((Incoming { name, len, file, step, .. }, kept)) = self.cut_off(conn) {
            let at = match step {
                // `file.at()` is only the position of the hash; the partial copy has `have` bytes.
                ReceiveStep::Hashing(have) => have,
                _ => file.at(),
            };
            let kept = if kept { format!("{at} of {len} bytes are kept") } else { "nothing of it is kept".to_owned() };
            eprintln!("rcp: {conn}: {name:?} is not complete: {reason}; {kept}");
        }
        self.senders.remove(&conn);
    }
}

/// Checks that this process can create a file in its directory. Removes the file immediately. If
/// the removal fails, the file is removed later, like a partial copy.
fn check_writable(folder: &Folder) -> io::Result<()> {
    let name = format!(".rcp-{}{PART}", std::process::id());
    folder.file(&name, OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL)?;
    folder.remove(&name)
}

/// Receives files from peers into a directory until SIGINT, SIGTERM or SIGHUP.
///
/// # Errors
/// The directory does not exist, no file can be created in it, the reactor cannot listen on the
/// address, or the reactor fails.
pub fn run(options: ServerOptions, address: SocketAddr, config: Config) -> Result<(), Failure> {
    let directory = &options.directory;
    let shown = directory.display();
    let parts = PartialCopies::find(directory, options.keep_parts)
        .map_err(|error| Failure::new(format!("{shown} is not a directory: make it, or name another ({error})")))?;
    check_writable(parts.folder()).map_err(|error| {
        let why = "no file can be created there: change its permissions, or name another directory";
        Failure::new(format!("{shown}: {error}: {why}"))
    })?;
    let config = config
        .large_messages(|l| l.max_message = PIECE.into())
        .large_messages(|l| l.memory = WINDOW * 4 * PIECE as usize);
    let mut reactor = Reactor::new(config)?;
    Interrupt::on_signals()?.stops(reactor.handle());
    let listener = reactor.context().listen(address)?;
    let address = reactor.context().listeners().local_address(listener).unwrap_or(address);
    reactor.context().timers().set(TIDY, TO_TIDY);
    Output::stdout().line(format!("listening on {address}"));
    let mut server = FileServer { options, parts, senders: BTreeMap::new(), looking: None, hashing: VecDeque::new() };
    Ok(reactor.run(&mut server)?)
}
