//! Early messages of the active side to a peer that has sent nothing yet.
//!
//! The siw driver of Linux may miss the first frames of a connection: those that arrive after it
//! has replied to the connect request, and before it handles the frames of the connection. They
//! stay in the socket until another frame arrives. On a busy machine this takes long. So the active
//! side sends another message after [`FIRST`], and further ones at intervals that triple each time,
//! until the peer has sent a message or the keepalive begins.
//!
//! A peer that is only slow grants no credits meanwhile. So on a connection that is up, the early
//! messages after the first one are sent only while less than half of the credits for data is used.
//! The unused half is for the program, which may send more messages before the peer grants the
//! credits of the early messages.

use std::time::Duration;

use super::credit::may_control;
use super::effects::Action;
use super::frame::MessageKind;
use super::state::State;
use super::{Connection, Env};
use crate::config::Framing;

/// The time from the first message of the active side to its first early message.
const FIRST: Duration = Duration::from_millis(100);

/// The largest number of early messages. The last one is sent after some 5 minutes.
const MOST: u8 = 8;

impl Connection {
    /// Schedules the first early message, after the first message of the active side. The passive side sends none.
    pub(super) fn nudge_later(&mut self, env: &mut Env<'_>) {
        if self.is_active() && self.framing == Framing::Credits && !self.rx.has_received() {
            self.deadlines.nudge = Some((env.now + FIRST, 0));
            self.want(env, Action::Deadline);
        }
    }

    /// Sends an early message, unless the peer has sent a message, and schedules the next one.
    /// `earlier` is the number of early messages sent so far. On a connection that is up, the
    /// message is a ping. During the handshake, it is a grant, which is allowed there.
    pub(super) fn nudge(&mut self, earlier: u8, env: &mut Env<'_>) {
        if self.rx.has_received() {
            return;
        }
        match self.state {
            State::Open if earlier == 0 || self.tx.is_half_unused() => {
                self.keepalive.owes_ping = true;
                self.mark(env);
            }
            State::Securing(_) => {
                if may_control(&self.tx, &self.rx) && self.sends.has_control_room() {
                    env.stats.messages.credit_updates += 1;
                    self.push_control(MessageKind::Credit, &[], None, env);
                }
            }
            _ => return,
        }
        let sent = earlier + 1;
        let next = FIRST * 3u32.pow(sent.into());
        if sent < MOST && next < env.config.timeouts.keepalive_interval {
            self.deadlines.nudge = Some((env.now + next, sent));
            self.want(env, Action::Deadline);
        }
    }
}
