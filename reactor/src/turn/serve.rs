//! A part of stage 9 of a turn: handles the commands that other threads have sent with a `ReactorHandle`.

use std::collections::{BTreeMap, VecDeque};

use crate::api::handle::{Commands, HandleCommand};
use crate::driver::Driver;
use crate::driver::stages::Stages;
use crate::error::SendErrorKind;
use crate::id::ConnectionId;

/// The largest number of commands that are handled in one turn.
const COMMANDS_PER_TURN: usize = 1024;

/// The receiving end of the queue of commands from other threads.
#[derive(Debug)]
pub(super) struct CommandReceiver<M> {
    pub(super) commands: Commands<M>,
    /// The sends that wait for capacity, separately for each connection, in the order of the commands.
    waiting: BTreeMap<ConnectionId, VecDeque<Vec<u8>>>, // bound: commands
    /// The number of commands that may still be handled in this turn.
    left: usize,
}

impl<M> CommandReceiver<M> {
    pub(super) const fn new(commands: Commands<M>) -> Self {
        Self { commands, waiting: BTreeMap::new(), left: 0 }
    }

    /// Begins the handling of commands in a turn. Retries the sends that wait for capacity.
    pub(super) fn begin(&mut self, driver: &mut Driver) {
        self.left = COMMANDS_PER_TURN;
        if !self.waiting.is_empty() {
            let mut waiting = std::mem::take(&mut self.waiting);
            waiting.retain(|&conn, queue| !self.pump(driver, conn, queue));
            self.waiting = waiting;
        }
    }

    /// Returns the next message for the program. Executes the sends that precede this message in the queue. `None` if the queue is empty,
    /// or the limit of the turn is reached.
    pub(super) fn next_message(&mut self, driver: &mut Driver) -> Option<M> {
        while self.left > 0 {
            let command = self.commands.next()?;
            self.left -= 1;
            match command {
                HandleCommand::Message(message) => {
                    self.commands.done();
                    return Some(message);
                }
                HandleCommand::Send(conn, payload) => {
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

    /// Ends the handling of commands in a turn. Returns true if at least one command was handled.
    pub(super) fn end(&self, driver: &mut Driver) -> bool {
        let taken = (COMMANDS_PER_TURN - self.left) as u64;
        let turns = &mut driver.stats.turns;
        turns.handle_commands += taken;
        turns.handle_commands_max = turns.handle_commands_max.max(taken);
        if self.left == 0 {
            driver.note(Stages::OTHERS);
        }
        if !self.waiting.is_empty() && !crate::planted("waiting-sends-forgotten") {
            driver.note(Stages::WAITING_SENDS);
        }
        taken > 0
    }

    /// Sends the payloads in `queue` while there is capacity. A payload that is refused for another reason than capacity is dropped and
    /// counted. Returns true if `queue` is empty after that.
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
                    driver.stats.messages.handle_sends_dropped += 1;
                }
            }
            queue.pop_front();
            self.commands.done();
        }
        true
    }
}
