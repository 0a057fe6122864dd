//! Stage 9 of a turn serves the requests of other threads.

use std::collections::{BTreeMap, VecDeque};

use crate::api::remote::{Command, Commands};
use crate::driver::Driver;
use crate::error::SendErrorKind;
use crate::id::ConnectionId;

/// Largest number of commands taken in one turn.
const COMMANDS_PER_TURN: usize = 1024;

/// The reactor's end of the queue for commands of other threads.
#[derive(Debug)]
pub(super) struct Desk<M> {
    pub(super) commands: Commands<M>,
    /// Sends that wait for room, in order.
    waiting: BTreeMap<ConnectionId, VecDeque<Vec<u8>>>,
    /// There may be commands in the queue.
    pub(super) pending: bool,
    /// Number of commands that may still be taken in this turn.
    left: usize,
}

impl<M> Desk<M> {
    pub(super) const fn new(commands: Commands<M>) -> Self {
        Self { commands, waiting: BTreeMap::new(), pending: false, left: 0 }
    }

    /// Begins the stage. Sends that waited go out if there is room.
    pub(super) fn begin(&mut self, driver: &mut Driver) {
        self.left = COMMANDS_PER_TURN;
        if !self.waiting.is_empty() {
            let mut waiting = std::mem::take(&mut self.waiting);
            waiting.retain(|&conn, queue| !self.pump(driver, conn, queue));
            self.waiting = waiting;
        }
    }

    /// Returns the next message for the program, within the turn's bound. Sends that come before that message are
    /// carried out.
    pub(super) fn next_message(&mut self, driver: &mut Driver) -> Option<M> {
        while self.pending && self.left > 0 {
            let Some(command) = self.commands.next() else {
                self.pending = false;
                break;
            };
            self.left -= 1;
            match command {
                Command::Message(message) => {
                    self.commands.done();
                    return Some(message);
                }
                Command::Send(conn, payload) => {
                    let mut queue = self.waiting.remove(&conn).unwrap_or_default();
                    let waits = !queue.is_empty();
                    queue.push_back(payload);
                    if waits || !self.pump(driver, conn, &mut queue) {
                        self.waiting.insert(conn, queue);
                    }
                }
            }
        }
        None
    }

    /// Ends the stage; returns whether commands were taken.
    pub(super) fn end(&self, driver: &mut Driver) -> bool {
        let taken = (COMMANDS_PER_TURN - self.left) as u64;
        let turns = &mut driver.counters().turns;
        turns.remote_commands += taken;
        turns.remote_commands_max = turns.remote_commands_max.max(taken);
        taken > 0
    }

    /// Sends as much as there is room for; returns whether that was everything.
    fn pump(&self, driver: &mut Driver, conn: ConnectionId, queue: &mut VecDeque<Vec<u8>>) -> bool {
        while let Some(payload) = queue.front() {
            if driver.is_coming_up(conn) {
                return false;
            }
            match driver.send(conn, payload) {
                Ok(_) => {}
                Err(SendErrorKind::WouldBlock(_)) => return false,
                Err(error) => {
                    log::debug!("{conn}: a send of {} bytes from another thread is dropped: {error}", payload.len());
                    driver.counters().messages.remote_sends_dropped += 1;
                }
            }
            queue.pop_front();
            self.commands.done();
        }
        true
    }
}
