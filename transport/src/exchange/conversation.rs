//! [`Conversation`]: the order of the messages, as a state machine. Bytes go in, bytes and events come out.
//!
//! ```text
//! active                        passive
//!   Request  ->                              the queue pair can receive
//!                 <-  Accept or Refuse       the queue pair can send, too
//!   Ready    ->                              both sides are established
//!   Goodbye  <->  Goodbye                    in either order, from Request on
//! ```
//!
//! A conversation reads no bytes past the next message, and a peer may send at most six messages. So a peer can neither fill the
//! memory nor keep the reader busy.

use super::message::{Endpoint, ExchangeHeader, ExchangeMessage, ExchangeRefusal, HEADER_LEN, MAX_MESSAGE, Violation};

/// The state of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConversationState {
    /// Active side: no message was sent.
    Idle,
    /// Active side: Request was sent.
    RequestSent,
    /// Active side: the peer has accepted.
    AcceptReceived,
    /// Passive side: no message has arrived.
    AwaitingRequest,
    /// Passive side: Request has arrived.
    RequestReceived,
    /// Passive side: Accept was sent.
    AcceptSent,
    /// Both queue pairs can send and receive.
    Established,
    /// The conversation has ended. Later input is not read.
    Closed,
}

/// An event that a message of the peer causes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ConversationEvent {
    /// The peer requests a connection.
    Requested(Endpoint, Box<[u8]>),
    /// The peer accepts.
    Accepted(Endpoint, Box<[u8]>),
    /// The peer refuses.
    Refused(ExchangeRefusal, Box<[u8]>),
    /// The queue pair of the peer can send and receive.
    Ready,
    /// The peer has disconnected.
    Goodbye,
    /// The peer has violated the protocol.
    Violated(Violation),
}

/// The state machine of one side. See the [module](self).
#[derive(Debug)]
pub(crate) struct Conversation {
    state: ConversationState,
    /// True once the local side has sent Goodbye or Refuse.
    goodbye_sent: bool,
    /// The received part of the next message.
    input: Vec<u8>,
    output: Vec<u8>,
    /// The number of bytes of `output` that were written to the stream.
    sent: usize,
}

impl Conversation {
    fn new(state: ConversationState) -> Self {
        Self { state, goodbye_sent: false, input: Vec::with_capacity(MAX_MESSAGE), output: Vec::new(), sent: 0 }
    }

    /// Returns the conversation of the side that connects.
    pub(crate) fn active() -> Self {
        Self::new(ConversationState::Idle)
    }

    /// Returns the conversation of the side that accepts or refuses.
    pub(crate) fn passive() -> Self {
        Self::new(ConversationState::AwaitingRequest)
    }

    // Output.

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

    /// Sends Goodbye, once. Does nothing if the peer knows of no connection: before Request, and after Refuse.
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

    /// Returns the bytes that are not written to the stream yet.
    pub(crate) fn unsent(&self) -> &[u8] {
        &self.output[self.sent..]
    }

    /// Records that `octets` bytes were written to the stream.
    pub(crate) fn sent(&mut self, octets: usize) {
        self.sent = self.output.len().min(self.sent + octets);
        if self.sent == self.output.len() {
            self.output.clear();
            self.sent = 0;
        }
    }

    // Input.

    /// Returns the number of bytes to read next; 0 if no message may follow.
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

    /// Consumes at most [`Conversation::wanted`] bytes. Returns an event if they complete a message or violate the protocol.
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

    /// Passes the output of one side to the other in pieces. Returns the events at the other side.
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
        // The active side disconnects before the answer.
        let (mut active, mut passive) = (Conversation::active(), Conversation::passive());
        active.request(endpoint(), b"");
        active.disconnect();
        let steps = pass(&mut active, &mut passive, 64);
        assert!(matches!(steps[..], [ConversationEvent::Requested(..), ConversationEvent::Goodbye]), "{steps:?}");
    }

    proptest! {
        /// For any input, in any pieces, the memory is bounded and the conversation ends.
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
