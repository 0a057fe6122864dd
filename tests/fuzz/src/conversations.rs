//! The fuzz target of the exchange, which sets up connections over a TCP stream instead of rdma_cm.
//! It fuzzes the parser of the exchange's messages, and conversations with a peer that sends any
//! bytes. The crate compiles `transport/verbs/src/exchange` as a module of its own, because neither
//! the messages nor the conversations are public.

use super::exchange::conversation::{Conversation, ConversationEvent};
use super::exchange::message::{
    ExchangeHeader, ExchangeMessage, ExchangeRefusal, HEADER_LEN, MAX_MESSAGE, MAX_PRIVATE_DATA,
};
use rdma_transport_fuzz::iwarp::fuzz::Tape;

/// The largest number of events of one conversation, whatever the peer sends.
const MAX_EVENTS: usize = 6;

/// Parses the message at the beginning of `bytes`. Returns the message and its length, or `None` if `bytes` does not begin with a valid
/// message.
fn message(bytes: &[u8]) -> Option<(ExchangeMessage<'_>, usize)> {
    let (header, body) = bytes.split_first_chunk()?;
    let header = ExchangeHeader::parse(*header).ok()?;
    assert!(header.body() <= MAX_MESSAGE - HEADER_LEN, "a header announces too long a body: {header:?}");
    let message = header.message(body.get(..header.body())?).ok()?;
    Some((message, HEADER_LEN + header.body()))
}

/// The outcome of one conversation: its events, the bytes that the local side sent, and the number of received bytes that the local side
/// consumed.
type Played = (Vec<ConversationEvent>, Vec<u8>, usize);

/// Runs a conversation in which the peer sends `bytes`, in pieces of at most `piece` bytes. The local side requests a connection if `own`
/// is a request, and otherwise answers requests with `own`.
fn play(own: &ExchangeMessage<'_>, bytes: &[u8], piece: usize) -> Played {
    let (ExchangeMessage::Request(endpoint, data) | ExchangeMessage::Accept(endpoint, data)) = *own else {
        return Played::default();
    };
    let mut conversation = Conversation::passive();
    if matches!(own, ExchangeMessage::Request(..)) {
        conversation = Conversation::active();
        conversation.request(endpoint, data);
    }
    let (mut events, mut sent, mut at) = (Vec::new(), Vec::new(), 0);
    loop {
        let wanted = conversation.wanted();
        assert!(wanted <= MAX_MESSAGE, "{wanted} bytes are wanted");
        let len = wanted.min(piece).min(bytes.len() - at);
        if len == 0 {
            break;
        }
        let event = conversation.received(&bytes[at..at + len]);
        at += len;
        match event {
            Some(ConversationEvent::Requested(_, ref asked)) if asked.first() == Some(&0) => {
                conversation.refuse(ExchangeRefusal::Program, data);
            }
            Some(ConversationEvent::Requested(..)) => conversation.accept(endpoint, data),
            Some(ConversationEvent::Accepted(..)) => conversation.ready(),
            Some(ConversationEvent::Refused(refusal, _)) => assert!(!refusal.reason().is_empty()),
            Some(ConversationEvent::Violated(violation)) => assert!(!violation.is_empty()),
            Some(ConversationEvent::Ready | ConversationEvent::Goodbye) | None => {}
        }
        events.extend(event);
        while !conversation.unsent().is_empty() {
            let len = conversation.unsent().len().min(piece);
            sent.extend_from_slice(&conversation.unsent()[..len]);
            conversation.sent(len);
        }
    }
    assert!(events.len() <= MAX_EVENTS, "{events:?}");
    conversation.disconnect();
    sent.extend_from_slice(conversation.unsent());
    conversation.sent(usize::MAX >> 1);
    conversation.disconnect();
    assert!(conversation.unsent().is_empty(), "a connection ends twice");
    (events, sent, at)
}

/// Fuzzes one conversation. The first byte of the input is the length of the pieces. Then follows the message of the local side, and then
/// the bytes that the peer sends.
///
/// # Panics
/// Panics if a message is not parsed as it was emitted, the conversation depends on the length of the pieces, or the local side sends bytes
/// that are no message.
pub(crate) fn exchange(bytes: &[u8]) {
    let mut tape = Tape::new(bytes);
    let piece = 1 + usize::from(tape.byte() & 63);
    let bytes = tape.rest();
    let Some((own, len)) = message(bytes) else { return };
    let mut written = Vec::new();
    own.emit(&mut written);
    assert!(written.len() <= MAX_MESSAGE);
    assert_eq!(message(&written), Some((own, len)), "a message is not read as it was written");
    let whole = play(&own, &bytes[len..], usize::MAX);
    assert_eq!(whole, play(&own, &bytes[len..], piece), "a cut changes what happens");
    let mut sent = whole.1.as_slice();
    while !sent.is_empty() {
        let Some((message, len)) = message(sent) else { panic!("no message: {sent:02x?}") };
        if let ExchangeMessage::Request(_, data) | ExchangeMessage::Accept(_, data) | ExchangeMessage::Refuse(_, data) =
            message
        {
            assert!(data.len() <= MAX_PRIVATE_DATA);
        }
        sent = &sent[len..];
    }
}
