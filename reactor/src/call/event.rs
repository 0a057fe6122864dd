//! The events of calls, as `on_recv` returns them, with their ids and payloads.

use std::ops::Deref;

use super::error::CallError;
use super::frame::{HEADER, Violation};
use crate::transport::slab::Key;
use crate::{ConnectionId, DetachedMessage, Message};

/// Declares an id that consists of a connection and of a key in one of its tables.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name {
            pub(super) conn: ConnectionId,
            pub(super) key: Key,
        }

        impl $name {
            /// Returns the connection.
            #[must_use]
            pub const fn connection(self) -> ConnectionId {
                self.conn
            }
        }
    };
}

id!(
    /// The id of a call of the local side. It is stale once the call has ended.
    CallId
);
id!(
    /// The id of a request of the peer. It is stale once the request was answered or dismissed. It may be sent to other threads.
    RequestId
);

/// The payload of a request or an answer, within the message `B` that carries it. Dereferences to the bytes of the payload.
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
    /// Keeps the payload past the callback, as [`Message::detach`] does: without a copy, and the peer has one credit less until the payload
    /// is dropped. A server that holds many requests at a time copies them instead.
    #[must_use = "a payload that is dropped immediately need not be detached"]
    pub fn detach(self) -> CallPayload<DetachedMessage> {
        CallPayload(self.0.detach())
    }
}

/// A call that has ended without an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedCall<T> {
    /// The id of the call, which is stale.
    pub call: CallId,
    /// The tag of the call.
    pub tag: T,
    /// The reason.
    pub error: CallError,
}

/// The event that a received message causes.
#[derive(Debug)]
#[non_exhaustive]
pub enum CallEvent<B, T> {
    /// The peer has sent a request. The program ends it, now or later, with [`super::Calls::answer`] or [`super::Calls::dismiss`].
    Request {
        /// The id of the request.
        id: RequestId,
        /// The payload of the request.
        payload: CallPayload<B>,
    },
    /// The peer has cancelled a request. The program still has to end the request; nothing is sent then.
    Cancelled(RequestId),
    /// A call has ended with its answer.
    Answer {
        /// The id of the call, which is stale.
        call: CallId,
        /// The tag of the call.
        tag: T,
        /// The answer.
        payload: CallPayload<B>,
    },
    /// A call has ended without an answer.
    Failed(FailedCall<T>),
    /// The peer has sent an invalid frame. The connection is aborted, and its calls end.
    Violation(Violation),
}
