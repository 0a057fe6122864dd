//! The end that gets the file.
//!
//! The received part of `NAME` is in `NAME.rcp-part` until the file is whole. So a copy can go on later, and nobody
//! takes the part for the file. A name always means a file in the one directory.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor, SendErrorKind, TimerId,
};

use super::hashed::Hashed;
use super::wire::{Hash, Say};
use super::{PIECE, WINDOW};
use crate::pingpong::failure::Failure;
use crate::pingpong::interrupt::Interrupt;
use crate::pingpong::output::Output;

/// The ending of the name of a file that is not whole.
const PART: &str = ".rcp-part";

/// The next step on a connection.
#[derive(Debug)]
enum Step {
    /// The part that is there from before is being hashed, up to this length.
    Hashing(u64),
    /// The peer is to say from where it goes on.
    Answered,
    /// Pieces are to come, and the end behind them.
    Receiving,
}

/// A file that is being received.
#[derive(Debug)]
struct Incoming {
    name: String,
    len: u64,
    part: Hashed,
    step: Step,
}

#[derive(Debug)]
struct Server {
    directory: PathBuf,
    overwrite: bool,
    incoming: BTreeMap<ConnectionId, Incoming>,
    /// Connections with something to hash; each gets a slice in turn.
    hashing: VecDeque<ConnectionId>,
}

/// Checks that a peer's name is a plain file name, and not that of a part.
fn check_name(name: &str) -> Result<(), Failure> {
    let mut parts = Path::new(name).components();
    let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name);
    if !plain || name.contains(|c: char| c == '\\' || c.is_control()) {
        return Err(Failure::new(format!("{name:?} is no name of a file: say one without directories")));
    }
    if name.ends_with(PART) {
        return Err(Failure::new(format!("{name:?} ends as the name of a partial copy: choose another")));
    }
    if name.len() + PART.len() > 255 {
        return Err(Failure::new(format!("a name of {} bytes: say at most {}", name.len(), 255 - PART.len())));
    }
    Ok(())
}

impl Server {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn part_path(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}{PART}"))
    }

    /// Handles a message of the peer.
    fn heard(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) -> Result<(), Failure> {
        let Some(incoming) = self.incoming.get_mut(&conn) else {
            return match Say::decode(message) {
                Some(Say::Offer { len, name }) => self.begin(cx, conn, len, name),
                _ => Err(Failure::new("the peer is not an rcp of this version")),
            };
        };
        let broken = |error: io::Error| Failure::new(format!("writing {:?}: {error}", incoming.name));
        let left = incoming.len - incoming.part.at();
        match (&incoming.step, Say::decode(message)) {
            (Step::Answered, Some(Say::From(at))) if at == 0 || at == incoming.part.at() => {
                if at < incoming.part.at() {
                    incoming.part.clear().map_err(broken)?;
                }
                incoming.step = Step::Receiving;
                Ok(())
            }
            (Step::Receiving, _) if left > 0 && (1..=left).contains(&(message.len() as u64)) => {
                incoming.part.write(message).map_err(broken)
            }
            (Step::Receiving, Some(Say::End(hash))) if left == 0 => self.finish(cx, conn, hash),
            _ => Err(Failure::new("the peer said something out of place")),
        }
    }

    /// Answers the offer of a file with the part that is here, maybe after some hashing.
    fn begin(&mut self, cx: &mut Context<'_>, conn: ConnectionId, len: u64, name: &str) -> Result<(), Failure> {
        check_name(name)?;
        self.check_free(name)?;
        if self.incoming.values().any(|incoming| incoming.name == name) {
            return Err(Failure::new(format!("{name:?} is being copied by another peer: choose another name")));
        }
        let path = self.part_path(name);
        let broken = |error: io::Error| Failure::new(format!("creating {name:?}: {error}"));
        // This program does not write to anything else of that name, such as a link to elsewhere.
        if fs::symlink_metadata(&path).is_ok_and(|found| !found.is_file()) {
            return Err(Failure::new(format!("{name:?}: what should be its partial copy is no file")));
        }
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(broken)?;
        let mut have = file.metadata().map_err(broken)?.len();
        let mut part = Hashed::new(file);
        if have > len {
            part.clear().map_err(broken)?;
            have = 0;
        }
        let step = Step::Hashing(have);
        self.incoming.insert(conn, Incoming { name: name.to_owned(), len, part, step });
        if self.hashing.is_empty() {
            cx.set_timer(Duration::ZERO, 0);
        }
        self.hashing.push_back(conn);
        Ok(())
    }

    fn check_free(&self, name: &str) -> Result<(), Failure> {
        match fs::symlink_metadata(self.path(name)) {
            Ok(found) if found.is_dir() => Err(Failure::new(format!("{name:?} is a directory there"))),
            Ok(_) if !self.overwrite => {
                Err(Failure::new(format!("{name:?} exists there: choose another name, or rcp server --overwrite")))
            }
            _ => Ok(()),
        }
    }

    /// Hashes a slice, and answers after the last one; returns whether it was the last.
    fn hash(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<bool, Failure> {
        let Some(incoming) = self.incoming.get_mut(&conn) else { return Ok(true) };
        let Step::Hashing(len) = incoming.step else { return Ok(true) };
        let broken = |error: io::Error| Failure::new(format!("reading what is there of {:?}: {error}", incoming.name));
        if !incoming.part.skim(len).map_err(broken)? {
            return Ok(false);
        }
        incoming.step = Step::Answered;
        let answer = Say::Have { len, hash: incoming.part.hash() };
        say(cx, conn, answer);
        Ok(true)
    }

    /// Puts a file that has arrived in full into its place, if its hash is that of the sender.
    fn finish(&mut self, cx: &mut Context<'_>, conn: ConnectionId, hash: Hash) -> Result<(), Failure> {
        let Some(Incoming { name, len, part, .. }) = self.incoming.remove(&conn) else { return Ok(()) };
        let path = self.part_path(&name);
        if part.hash() != hash {
            let _ = fs::remove_file(&path);
            return Err(Failure::new(format!("{name:?} arrived with another hash than it was sent with: try again")));
        }
        self.check_free(&name)?;
        fs::rename(&path, self.path(&name)).map_err(|error| Failure::new(format!("creating {name:?}: {error}")))?;
        Output::stdout().line(format!("{name}: {len} bytes"));
        say(cx, conn, Say::Done);
        Ok(())
    }

    fn check<T: Default>(&mut self, cx: &mut Context<'_>, conn: ConnectionId, result: Result<T, Failure>) -> T {
        result.unwrap_or_else(|failure| {
            eprintln!("rcp: {conn}: {failure}");
            self.incoming.remove(&conn);
            say(cx, conn, Say::Refuse(&failure.to_string()));
            // The answer is sent before the connection closes.
            cx.close(conn);
            T::default()
        })
    }
}

/// Answers the peer. A peer that takes no answers gets none.
fn say(cx: &mut Context<'_>, conn: ConnectionId, what: Say<'_>) {
    match cx.send(conn, &what.encode()) {
        Ok(_) | Err(SendErrorKind::Closed) => {}
        Err(_) => cx.close(conn),
    }
}

impl Handler for Server {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let heard = self.heard(cx, conn, &message);
        self.check(cx, conn, heard);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if let Some(conn) = self.hashing.pop_front() {
            let hashed = self.hash(cx, conn).map(|done| !done);
            if self.check(cx, conn, hashed) {
                self.hashing.push_back(conn);
            }
        }
        if !self.hashing.is_empty() {
            cx.set_timer(Duration::ZERO, 0);
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if let Some(incoming) = self.incoming.remove(&conn) {
            let (name, at, len) = (incoming.name, incoming.part.at(), incoming.len);
            eprintln!("rcp: {conn}: {name:?} is not complete: {reason}; {at} of {len} bytes are kept");
        }
    }
}

/// Puts files that peers send into a directory, until the program is asked to end.
///
/// # Errors
/// There is no such directory, the address cannot be had, or the reactor fails.
pub fn run(directory: &Path, overwrite: bool, address: SocketAddr, config: Config) -> Result<(), Failure> {
    if !fs::metadata(directory).is_ok_and(|found| found.is_dir()) {
        return Err(Failure::new(format!("{} is no directory: make it, or name another", directory.display())));
    }
    let config = config.max_message(PIECE.into()).transfer_memory(WINDOW * 4 * PIECE as usize);
    let mut reactor = Reactor::new(config)?;
    Interrupt::on_signals()?.stops(reactor.remote());
    let listener = reactor.context().listen(address)?;
    let address = reactor.context().local_address(listener).unwrap_or(address);
    Output::stdout().line(format!("listening on {address}"));
    let directory = directory.to_owned();
    Ok(reactor.run(&mut Server { directory, overwrite, incoming: BTreeMap::new(), hashing: VecDeque::new() })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_that_of_a_file_in_the_directory() {
        for name in ["a", "a b", "..a", "a.tar.gz", "ä", ".hidden", "-"] {
            assert!(check_name(name).is_ok(), "{name:?}");
        }
        let long = "x".repeat(247);
        for name in [
            "",
            ".",
            "..",
            "/",
            "/etc/passwd",
            "../a",
            "a/b",
            "a/",
            "./a",
            "a/..",
            "a\\b",
            "a\0b",
            "a\nb",
            "x.rcp-part",
            &long,
        ] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
    }
}
