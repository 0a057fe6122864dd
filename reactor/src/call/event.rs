//! The events of calls that [`super::Calls::on_recv`] returns, and the ids and payloads that these events contain.

use std::ops::Deref;

use super::error::CallError;
use super::frame::{HEADER, Violation};
use crate::transport::slab::Key;
use crate::{ConnectionId, DetachedMessage, Message};

/// Declares the id of a call or a request. The id contains a connection, and a key in that connection's table of calls or requests.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name {
            pub(super) conn: ConnectionId,
            pub(super) key: Key,
        }

        impl $name {
            /// Returns the connection of the call or request.
            #[must_use]
            pub const fn connection(self) -> ConnectionId {
                self.conn
            }
        }
    };
}

id!(
    /// The id of a call of the local side. Once the call has ended, the id refers to no call any more.
    CallId
);
id!(
    /// The id of a request of the peer. Once the request was answered or dismissed, the id refers to no request any more. The program may
    /// pass the id to other threads.
    RequestId
);

/// The payload of a request or an answer. It holds the whole message `B`, but dereferences only to the payload behind the header.
#[derive(Debug)]
pub struct CallPayload<B>(pub(super) B);

impl<B: Deref<Target = [u8]>> Deref for CallPayload<B> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.0.get(HEADER..).unwrap_or_default()
    }
}

impl CallPayload<Message<'_>> {
    /// Keeps the payload beyond the end of the callback without a copy, as [`Message::detach`] does. The payload still occupies a receive
    /// buffer, so the peer has one credit less until the payload is dropped. A server that holds many requests at a time should copy their
    /// payloads instead.
    #[must_use = "a payload that is dropped immediately need not be detached"]
    pub fn detach(self) -> CallPayload<DetachedMessage> {
        CallPayload(self.0.detach())
    }
}

/// A call that has ended without an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedCall<T> {
    /// The id of the call. The call has ended.
    pub call: CallId,
    /// The tag of the call.
    pub tag: T,
    /// The reason why the call has no answer.
    pub error: CallError,
}

/// The event that [`super::Calls::on_recv`] returns for a received message.
#[derive(Debug)]
#[non_exhaustive]
pub enum CallEvent<B, T> {
    /// The peer has sent a request. The program must end the request with [`super::Calls::answer`] or [`super::Calls::dismiss`], in this
    /// callback or later.
    Request {
        /// The id of the request.
        id: RequestId,
        /// The payload of the request.
        payload: CallPayload<B>,
    },
    /// The peer has cancelled a request. The program must still end the request with `answer` or `dismiss`. Neither sends anything to the
    /// peer for a cancelled request.
    Cancelled(RequestId),
    /// The answer to a call has arrived, and the call has ended.
    Answer {
        /// The id of the call. The call has ended.
        call: CallId,
        /// The tag of the call.
        tag: T,
        /// The payload of the answer.
        payload: CallPayload<B>,
    },
    /// A call has ended without an answer.
    Failed(FailedCall<T>),
    /// The peer has sent an invalid frame. The connection is aborted, and all of its calls end.
    Violation(Violation),
}
