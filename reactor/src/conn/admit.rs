//! The message kinds that a peer may send in each stage of a connection, as a table.
//!
//! | stage | handshake | hello | credit | fragment | all others |
//! |---|---|---|---|---|---|
//! | `Requested` | violation | violation | violation | violation | violation |
//! | `RequestedSecured` | violation | violation | ignored | violation | violation |
//! | `Accepted` | violation | taken | violation | violation | violation |
//! | `Proving` | taken | violation | ignored | violation | violation |
//! | `PeerDone` | taken | taken | ignored | violation | violation |
//! | `Proven` | violation | taken | ignored | violation | violation |
//! | `Refusing` | ignored | ignored | ignored | ignored | ignored |
//! | `Up` | violation | violation | taken | taken | taken |
//! | `Joining` | violation | violation | violation | taken | violation |
//! | `Ending` | taken | violation | taken | taken | taken |
//! | `EndingJoining` | taken | violation | violation | taken | violation |
//! | `Unopened` | taken | taken | ignored | violation | violation |
//! | `NeverUp` | taken | violation | ignored | violation | violation |
//!
//! A taken message is processed. Its payload may still be a violation. An ignored message is dropped without an effect.
//!
//! A connection does not store its stage: [`Connection::stage`] derives it from the state. Messages without a header are not in the table:
//! [`Connection::received`] checks them.

use super::frame::MessageKind;
use super::state::{Ending, State};
use super::{Connection, Role};

/// The stage of a connection, which decides which messages the peer may send. The local side is *active* if it opened the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The local side has opened a connection without security, and was not notified yet that the peer has accepted.
    Requested,
    /// Like `Requested`, but the connection will be encrypted.
    RequestedSecured,
    /// The peer has opened a connection without security. The peer's hello has not arrived.
    Accepted,
    /// The handshake is in progress, on a connection that will be encrypted. The hello cannot arrive now, for one of three reasons:
    /// - The local side is active, so the peer sends no hello.
    /// - The peer's messages are not encrypted yet, and a peer encrypts its hello.
    /// - The hello has arrived already, before the local handshake ended.
    Proving,
    /// The peer has opened the connection. The peer's side of the handshake has ended, so the peer's messages are encrypted. The peer's
    /// hello may arrive before the local side of the handshake ends.
    PeerDone,
    /// The peer has opened the connection, and the handshake has ended on both sides. The peer's hello has not arrived.
    Proven,
    /// The local side has refused the peer's identity. Until the refusal reaches the peer, the peer may send any message.
    Refusing,
    /// The connection is up.
    Up,
    /// The connection is up, and some fragments of a message have arrived. Until its last fragment, no other message may arrive.
    Joining,
    /// The connection was up, and is ending.
    Ending,
    /// The connection was up, and is ending. Some fragments of a message have arrived, and others have not.
    EndingJoining,
    /// The peer has opened the connection. The connection is ending, and the peer's hello was not processed. A hello that the peer sent
    /// before the transport ended may still arrive.
    Unopened,
    /// The connection is ending, and the peer's hello cannot arrive any more. If the peer's last handshake message still arrives, the
    /// connection may be reported to the program before its end.
    NeverUp,
}

/// The decision whether a message is processed. It depends only on the kind of the message and the stage of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    Take,
    /// The message is dropped. An honest peer may send it in this stage, but it has no effect.
    Ignore,
    /// No honest peer sends the message in this stage.
    Violation,
}

/// Decides whether a message of this kind is processed in this stage, by the table of the [module](self).
pub(super) const fn admit(stage: Stage, kind: MessageKind) -> Admission {
    use Admission::{Ignore, Take, Violation};
    use Stage::{
        Accepted, Ending, EndingJoining, Joining, NeverUp, PeerDone, Proven, Proving, Refusing, Requested,
        RequestedSecured, Unopened, Up,
    };
    match kind {
        MessageKind::Handshake => match stage {
            Proving | PeerDone | Ending | EndingJoining | Unopened | NeverUp => Take,
            Refusing => Ignore,
            Requested | RequestedSecured | Accepted | Proven | Up | Joining => Violation,
        },
        MessageKind::Hello => match stage {
            Accepted | PeerDone | Proven | Unopened => Take,
            Refusing => Ignore,
            Requested | RequestedSecured | Proving | Up | Joining | Ending | EndingJoining | NeverUp => Violation,
        },
        MessageKind::Credit => match stage {
            Up | Ending => Take,
            // A `Credit` message has no content except the grant in its header, and the grant was processed before the call of `admit`.
            RequestedSecured | Proving | PeerDone | Proven | Refusing | Unopened | NeverUp => Ignore,
            Requested | Accepted | Joining | EndingJoining => Violation,
        },
        MessageKind::Fragment => match stage {
            Up | Joining | Ending | EndingJoining => Take,
            Refusing => Ignore,
            Requested | RequestedSecured | Accepted | Proving | PeerDone | Proven | Unopened | NeverUp => Violation,
        },
        MessageKind::Data
        | MessageKind::Ping
        | MessageKind::Pong
        | MessageKind::Immediate
        | MessageKind::Offer
        | MessageKind::Fetched
        | MessageKind::Goodbye
        | MessageKind::Progress
        | MessageKind::Refused => match stage {
            Up | Ending => Take,
            Refusing => Ignore,
            Requested | RequestedSecured | Accepted | Proving | PeerDone | Proven | Joining | EndingJoining
            | Unopened | NeverUp => Violation,
        },
    }
}

impl Connection {
    /// Returns the stage that the connection is in.
    pub(super) fn stage(&self) -> Stage {
        let seal = match (self.is_secured(), self.opener.is_some()) {
            (false, _) => Seal::None,
            (true, false) => Seal::Missing,
            (true, true) => Seal::On,
        };
        Stage::of(&self.state, self.role, seal, self.transfers.joining().is_some())
    }
}

/// The state of the encryption of the peer's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seal {
    /// The connection is not encrypted and will not be.
    None,
    /// The connection will be encrypted, and the peer's messages are not encrypted yet.
    Missing,
    On,
}

impl Stage {
    fn of(state: &State, role: Role, seal: Seal, joining: bool) -> Self {
        let (secured, active) = (seal != Seal::None, role.is_active());
        match state {
            State::Resolving(_) | State::Connecting(_) if secured => Self::RequestedSecured,
            State::Resolving(_) | State::Connecting(_) => Self::Requested,
            State::Accepting(_) if secured => Self::Proving,
            State::Greeting if secured => Self::Proven,
            State::Accepting(_) | State::Greeting => Self::Accepted,
            State::Securing(securing) if seal == Seal::On && !active && !securing.greeted => Self::PeerDone,
            State::Securing(_) => Self::Proving,
            State::Refusing(_) => Self::Refusing,
            // In `Probing`, a message from the peer shows that the hello has arrived, so the
            // connection opens before the message is judged.
            State::Probing(_) | State::Open if joining => Self::Joining,
            State::Probing(_) | State::Open => Self::Up,
            State::Draining | State::Leaving if joining => Self::EndingJoining,
            State::Draining | State::Leaving => Self::Ending,
            State::Closing(closing) => match closing.ending {
                Ending::Disconnect { .. } if joining => Self::EndingJoining,
                Ending::Disconnect { .. } => Self::Ending,
                Ending::ConnectError(_) | Ending::Silent if !active && seal != Seal::Missing => Self::Unopened,
                Ending::ConnectError(_) | Ending::Silent => Self::NeverUp,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conn::handshake::Securing;
    use crate::error::ConnectError;
    use crate::security::{Channel, Handshake, PeerIdentity, SecurityError};

    /// For each stage, a letter for each message kind (T: taken, I: ignored, V: violation). The kinds are in the order of
    /// `MessageKind::ALL`: data, hello, credit, ping, pong, immediate, offer, fetched, goodbye, handshake, fragment, progress, refused.
    const TABLE: [(Stage, &str); 13] = [
        (Stage::Requested, "VVVVVVVVVVVVV"),
        (Stage::RequestedSecured, "VVIVVVVVVVVVV"),
        (Stage::Accepted, "VTVVVVVVVVVVV"),
        (Stage::Proving, "VVIVVVVVVTVVV"),
        (Stage::PeerDone, "VTIVVVVVVTVVV"),
        (Stage::Proven, "VTIVVVVVVVVVV"),
        (Stage::Refusing, "IIIIIIIIIIIII"),
        (Stage::Up, "TVTTTTTTTVTTT"),
        (Stage::Joining, "VVVVVVVVVVTVV"),
        (Stage::Ending, "TVTTTTTTTTTTT"),
        (Stage::EndingJoining, "VVVVVVVVVTTVV"),
        (Stage::Unopened, "VTIVVVVVVTVVV"),
        (Stage::NeverUp, "VVIVVVVVVTVVV"),
    ];

    #[derive(Debug)]
    struct Endless;

    impl Handshake for Endless {
        fn begin(&mut self, _: &mut Vec<u8>) -> Result<(), SecurityError> {
            Ok(())
        }
        fn read(&mut self, _: &[u8], _: &mut Vec<u8>) -> Result<(), SecurityError> {
            Ok(())
        }
        fn finish(&mut self) -> Option<(Channel, PeerIdentity)> {
            None
        }
        fn alert(&self, _: &SecurityError) -> String {
            String::new()
        }
    }

    fn securing(greeted: bool) -> State {
        State::Securing(Box::new(Securing { greeted, ..Securing::new(Box::default(), Box::new(Endless), Vec::new()) }))
    }

    fn closing(ending: Ending) -> State {
        let mut state = State::Greeting;
        assert!(state.close(ending));
        state
    }

    /// States, each with the expected stages. A state has three rows of expected stages: without security, with security while the peer's
    /// messages are not encrypted, and with security while they are. A row has the stage of the active side and the stage of the passive
    /// side.
    fn stages() -> Vec<(State, [[Stage; 2]; 3])> {
        use Stage::{
            Accepted, Ending as End, NeverUp, PeerDone, Proven, Proving, Refusing, Requested, RequestedSecured,
            Unopened, Up,
        };
        let plain_or = |plain, secured| [[plain; 2], [secured; 2], [secured; 2]];
        let always = |stage| [[stage; 2]; 3];
        let unopened = [[NeverUp, Unopened], [NeverUp, NeverUp], [NeverUp, Unopened]];
        vec![
            (State::Resolving(Box::default()), plain_or(Requested, RequestedSecured)),
            (State::Connecting(Box::default()), plain_or(Requested, RequestedSecured)),
            (State::Probing(Box::default()), always(Up)),
            (State::Accepting(Box::default()), plain_or(Accepted, Proving)),
            (State::Greeting, plain_or(Accepted, Proven)),
            (securing(false), [[Proving; 2], [Proving; 2], [Proving, PeerDone]]),
            (securing(true), always(Proving)),
            (State::Refusing(Box::new(Ending::Silent)), always(Refusing)),
            (State::Open, always(Up)),
            (State::Draining, always(End)),
            (State::Leaving, always(End)),
            (closing(Ending::local(true)), always(End)),
            (closing(Ending::ConnectError(ConnectError::Cancelled)), unopened),
            (closing(Ending::Silent), unopened),
        ]
    }

    #[test]
    fn a_stage_follows_from_the_state() {
        for (state, row) in stages() {
            for (seal, by_role) in [Seal::None, Seal::Missing, Seal::On].into_iter().zip(row) {
                for (role, stage) in [Role::Active, Role::Passive].into_iter().zip(by_role) {
                    assert_eq!(Stage::of(&state, role, seal, false), stage, "{state:?}, {role:?}, {seal:?}");
                    let joining = match stage {
                        Stage::Up => Stage::Joining,
                        Stage::Ending => Stage::EndingJoining,
                        other => other,
                    };
                    assert_eq!(Stage::of(&state, role, seal, true), joining, "{state:?}, {role:?}, {seal:?}");
                }
            }
        }
    }

    #[test]
    fn each_kind_is_admitted_in_its_stages_only() {
        for (at, (stage, row)) in TABLE.into_iter().enumerate() {
            assert_eq!(stage as usize, at, "a row for each stage, in order");
            let decided = MessageKind::ALL.map(|kind| match admit(stage, kind) {
                Admission::Take => 'T',
                Admission::Ignore => 'I',
                Admission::Violation => 'V',
            });
            assert_eq!(String::from_iter(decided), row, "{stage:?}");
        }
        assert_eq!(TABLE.len(), Stage::NeverUp as usize + 1, "the last stage is the last row");
    }
}
