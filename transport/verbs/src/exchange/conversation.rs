//! [`Conversation`]: the state machine of one side of a connection. Input: the bytes that arrive on the stream. Output: bytes to send, and
//! events.
//!
//! ```text
//! active                        passive
//!   Request  ->                              the active queue pair cannot receive or send yet (INIT)
//!                 <-  Accept or Refuse       with Accept, the passive queue pair can receive and send (RTS)
//!   Ready    ->                              the active queue pair can receive and send, too (RTS)
//!   Goodbye  <->  Goodbye                    from Request on, either side may send Goodbye, once
//! ```
//!
//! A conversation reads one message at a time and no byte behind that message. A peer may send at most three messages. So the local side
//! never stores or processes more than three messages of one peer.

use super::message::{Endpoint, ExchangeHeader, ExchangeMessage, ExchangeRefusal, HEADER_LEN, MAX_MESSAGE, Violation};

/// An event that a message from the peer causes. The boxed bytes are the private data of the
/// message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ConversationEvent {
    /// The peer requests a connection with a queue pair that has these attributes.
    Requested(Endpoint, Box<[u8]>),
    /// The peer accepts with a queue pair that has these attributes.
    Accepted(Endpoint, Box<[u8]>),
    /// The peer refuses for this reason.
    Refused(ExchangeRefusal, Box<[u8]>),
    /// The peer has sent Ready: its queue pair can send and receive.
    Ready,
    /// The peer has disconnected.
    Goodbye,
    /// The peer has sent an invalid message, or a message that is not allowed in the current state.
    /// The conversation has ended.
    Violated(Violation),
}

/// The state of a conversation. It follows from the last message that was sent or received, except a sent Goodbye, which does not
/// change the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConversationState {
    /// Active side: no message has been sent.
    Idle,
    /// Active side: Request was sent.
    RequestSent,
    /// Active side: Accept has arrived. The local side has not sent Ready.
    AcceptReceived,
    /// Passive side: no message has arrived.
    AwaitingRequest,
    /// Passive side: Request has arrived.
    RequestReceived,
    /// Passive side: Accept was sent.
    AcceptSent,
    /// Both queue pairs can send and receive: the active side has sent Ready, or the passive side has received Ready.
    Established,
    /// The conversation has ended. Later input is not read.
    Closed,
}

/// The state machine of one side of a connection. It uses no socket: the caller moves the bytes.
#[derive(Debug)]
pub(crate) struct Conversation {
    state: ConversationState,
    /// True if the local side must not send Goodbye any more: it has sent Goodbye or Refuse, or the program has disconnected before any
    /// Request was sent or received.
    goodbye_sent: bool,
    /// The received bytes of a message that is still incomplete.
    input: Vec<u8>, // bound: exchange-messages
    output: Vec<u8>, // bound: exchange-messages
    /// The number of bytes at the front of `output` that were written to the stream.
    sent: usize,
}

impl Conversation {
    fn new(state: ConversationState) -> Self {
        Self { state, goodbye_sent: false, input: Vec::with_capacity(MAX_MESSAGE), output: Vec::new(), sent: 0 }
    }

    /// Creates the conversation of the active side, which requests the connection.
    pub(crate) fn active() -> Self {
        Self::new(ConversationState::Idle)
    }

    /// Creates the conversation of the passive side, which accepts or refuses the connection.
    pub(crate) fn passive() -> Self {
        Self::new(ConversationState::AwaitingRequest)
    }

    // Each of the next five methods appends at most one message to `output`. All but `disconnect` also change the state.

    pub(crate) fn request(&mut self, own: Endpoint, private_data: &[u8]) {
        debug_assert_eq!(self.state, ConversationState::Idle);
        self.send(ConversationState::RequestSent, &ExchangeMessage::Request(own, private_data));
    }

    pub(crate) fn accept(&mut self, own: Endpoint, private_data: &[u8]) {
        debug_assert_eq!(self.state, ConversationState::RequestReceived);
        self.send(ConversationState::AcceptSent, &ExchangeMessage::Accept(own, private_data));
    }

    pub(crate) fn refuse(&mut self, refusal: ExchangeRefusal, private_data: &[u8]) {
        self.goodbye_sent = true;
        self.send(ConversationState::Closed, &ExchangeMessage::Refuse(refusal, private_data));
    }

    pub(crate) fn ready(&mut self) {
        debug_assert_eq!(self.state, ConversationState::AcceptReceived);
        self.send(ConversationState::Established, &ExchangeMessage::Ready);
    }

    /// Appends Goodbye to `output`, but at most once. Appends nothing if the peer has no connection to end: no Request was sent or
    /// received, or the local side has sent Refuse.
    pub(crate) fn disconnect(&mut self) {
        if !std::mem::replace(&mut self.goodbye_sent, true)
            && !matches!(self.state, ConversationState::Idle | ConversationState::AwaitingRequest)
        {
            self.send(self.state, &ExchangeMessage::Goodbye);
        }
    }

    fn send(&mut self, next: ConversationState, message: &ExchangeMessage<'_>) {
        message.emit(&mut self.output);
        self.state = next;
    }

    /// Returns the output that is not written to the stream yet.
    pub(crate) fn unsent(&self) -> &[u8] {
        &self.output[self.sent..]
    }

    /// Records that the first `octets` bytes of [`Conversation::unsent`] were written to the stream.
    pub(crate) fn sent(&mut self, octets: usize) {
        self.sent = self.output.len().min(self.sent + octets);
        if self.sent == self.output.len() {
            self.output.clear();
            self.sent = 0;
        }
    }

    /// Returns how many bytes the caller may read from the stream next: at most the missing bytes of the current message, so that no byte
    /// of a later message is read. Returns 0 if the conversation has ended.
    pub(crate) fn wanted(&self) -> usize {
        if self.state == ConversationState::Closed {
            return 0;
        }
        let whole = match self.header() {
            Some(Ok(header)) => HEADER_LEN + header.body(),
            _ => HEADER_LEN,
        };
        whole.saturating_sub(self.input.len())
    }

    fn header(&self) -> Option<Result<ExchangeHeader, Violation>> {
        self.input.first_chunk().map(|octets| ExchangeHeader::parse(*octets))
    }

    /// Consumes the first [`Conversation::wanted`] bytes of `octets`, or all of them if there are fewer. Returns an event if these bytes
    /// complete a message or violate the protocol, and `None` if the message is still incomplete.
    pub(crate) fn received(&mut self, octets: &[u8]) -> Option<ConversationEvent> {
        self.input.extend_from_slice(&octets[..octets.len().min(self.wanted())]);
        let header = match self.header()? {
            Ok(header) => header,
            Err(violation) => return Some(self.violated(violation)),
        };
        if self.input.len() < HEADER_LEN + header.body() {
            return None;
        }
        let input = std::mem::take(&mut self.input);
        let event = match header.message(&input[HEADER_LEN..]) {
            Ok(message) => self.interpret(&message),
            Err(violation) => Err(violation),
        };
        self.input = input;
        self.input.clear();
        Some(event.unwrap_or_else(|violation| self.violated(violation)))
    }

    fn violated(&mut self, violation: Violation) -> ConversationEvent {
        self.state = ConversationState::Closed;
        ConversationEvent::Violated(violation)
    }

    fn interpret(&mut self, message: &ExchangeMessage<'_>) -> Result<ConversationEvent, Violation> {
        let (next, event) = match (self.state, *message) {
            (ConversationState::AwaitingRequest, ExchangeMessage::Request(endpoint, data)) => {
                (ConversationState::RequestReceived, ConversationEvent::Requested(endpoint, data.into()))
            }
            (ConversationState::RequestSent, ExchangeMessage::Accept(endpoint, data)) => {
                (ConversationState::AcceptReceived, ConversationEvent::Accepted(endpoint, data.into()))
            }
            (ConversationState::RequestSent, ExchangeMessage::Refuse(refusal, data)) => {
                (ConversationState::Closed, ConversationEvent::Refused(refusal, data.into()))
            }
            (ConversationState::AcceptSent, ExchangeMessage::Ready) => {
                (ConversationState::Established, ConversationEvent::Ready)
            }
            (ConversationState::AwaitingRequest, ExchangeMessage::Goodbye) => {
                return Err("a goodbye without a request");
            }
            (ConversationState::Closed, _) => return Err("a message after the end"),
            (_, ExchangeMessage::Goodbye) => (ConversationState::Closed, ConversationEvent::Goodbye),
            _ => return Err("an unexpected message"),
        };
        self.state = next;
        Ok(event)
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::tests::endpoint;
    use super::*;
    use proptest::prelude::*;

    /// Passes the output of `from` to `to` in pieces of at most `piece` bytes. Returns the events of `to`.
    fn pass(from: &mut Conversation, to: &mut Conversation, piece: usize) -> Vec<ConversationEvent> {
        let mut steps = Vec::new();
        while !from.unsent().is_empty() && to.wanted() > 0 {
            let octets = &from.unsent()[..piece.min(to.wanted()).min(from.unsent().len())];
            steps.extend(to.received(octets));
            let taken = octets.len();
            from.sent(taken);
        }
        steps
    }

    #[test]
    fn two_sides_connect_and_part() {
        for piece in [1, 3, MAX_MESSAGE] {
            let (mut active, mut passive) = (Conversation::active(), Conversation::passive());
            active.request(endpoint(), b"ask");
            assert_eq!(
                pass(&mut active, &mut passive, piece),
                [ConversationEvent::Requested(endpoint(), b"ask".as_slice().into())]
            );
            passive.accept(endpoint(), b"answer");
            assert_eq!(
                pass(&mut passive, &mut active, piece),
                [ConversationEvent::Accepted(endpoint(), b"answer".as_slice().into())]
            );
            active.ready();
            assert_eq!(pass(&mut active, &mut passive, piece), [ConversationEvent::Ready]);
            passive.disconnect();
            passive.disconnect();
            assert_eq!(pass(&mut passive, &mut active, piece), [ConversationEvent::Goodbye]);
            active.disconnect();
            assert_eq!(pass(&mut active, &mut passive, piece), [ConversationEvent::Goodbye]);
            assert_eq!((active.wanted(), passive.wanted()), (0, 0), "nothing is read after the end");
        }
    }

    #[test]
    fn a_refusal_ends_it() {
        let (mut active, mut passive) = (Conversation::active(), Conversation::passive());
        active.request(endpoint(), b"");
        pass(&mut active, &mut passive, 7);
        passive.refuse(ExchangeRefusal::Program, b"no");
        passive.disconnect();
        let wanted = [ConversationEvent::Refused(ExchangeRefusal::Program, b"no".as_slice().into())];
        assert_eq!(pass(&mut passive, &mut active, 7), wanted);
        assert!(passive.unsent().is_empty(), "a refusal needs no goodbye");
    }

    #[test]
    fn messages_come_when_they_are_due() {
        let mut early = Conversation::passive();
        let mut octets = Vec::new();
        ExchangeMessage::Ready.emit(&mut octets);
        assert!(matches!(early.received(&octets), Some(ConversationEvent::Violated(_))));
        assert_eq!((early.wanted(), early.received(&octets)), (0, None), "nothing is read after a violation");
        let (mut active, mut passive) = (Conversation::active(), Conversation::passive());
        active.request(endpoint(), b"");
        pass(&mut active, &mut passive, 64);
        assert!(matches!(passive.received(&octets), Some(ConversationEvent::Violated(_))), "ready before the answer");
        let mut garbage = Conversation::passive();
        assert!(matches!(garbage.received(b"GET / HT"), Some(ConversationEvent::Violated(_))));
        // The active side may disconnect before the passive side answers. In that case, the passive side receives Request and Goodbye.
        let (mut active, mut passive) = (Conversation::active(), Conversation::passive());
        active.request(endpoint(), b"");
        active.disconnect();
        let steps = pass(&mut active, &mut passive, 64);
        assert!(matches!(steps[..], [ConversationEvent::Requested(..), ConversationEvent::Goodbye]), "{steps:?}");
    }

    proptest! {
        /// The input is random and arrives in random pieces. The memory stays bounded, and the conversation ends after at most six events.
        #[test]
        fn any_octets_end(mut octets in prop::collection::vec(any::<u8>(), 0..600), cuts in prop::collection::vec(1usize..40, 1..40), answers: bool) {
            if octets.len() > 8 {
                octets[..6].copy_from_slice(b"RdXg\x01\x01");
            }
            let (mut passive, mut at, mut steps) = (Conversation::passive(), 0, 0);
            for cut in cuts.iter().cycle().take(1000) {
                let end = octets.len().min(at + cut.min(&passive.wanted()));
                if end == at {
                    break;
                }
                match passive.received(&octets[at..end]) {
                    Some(ConversationEvent::Requested(..)) if answers => passive.accept(endpoint(), b""),
                    Some(_) => steps += 1,
                    None => {}
                }
                at = end;
                prop_assert!(passive.input.len() < MAX_MESSAGE && passive.input.capacity() <= 2 * MAX_MESSAGE);
            }
            prop_assert!(steps <= 6);
        }
    }
}
