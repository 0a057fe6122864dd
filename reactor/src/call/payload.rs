//! What a message turns out to be.

use std::ops::Deref;

use super::error::CallError;
use super::frame::{HEADER, Violation};
use crate::transport::slab::Key;
use crate::{ConnectionId, DetachedMessage, Message};

/// Declares a name that consists of a connection and of a key in one of its tables.
macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name {
            pub(super) conn: ConnectionId,
            pub(super) key: Key,
        }

        impl $name {
            /// The connection.
            #[must_use]
            pub const fn connection(self) -> ConnectionId {
                self.conn
            }
        }
    };
}

name!(
    /// Names a call of this side. After its end the name names nothing.
    CallId
);
name!(
    /// Names a request of a peer, until it is answered. It may be copied and sent to other threads.
    RequestId
);

/// A payload, in the message `B` that it arrived in. It derefs to its bytes.
#[derive(Debug)]
pub struct Payload<B>(pub(super) B);

impl<B: Deref<Target = [u8]>> Deref for Payload<B> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.0.get(HEADER..).unwrap_or_default()
    }
}

impl Payload<Message<'_>> {
    /// Keeps the payload past the callback, as [`Message::detach`] does: without a copy, and the peer has one credit less until it is
    /// dropped. A server that keeps many requests at a time copies them instead.
    #[must_use = "a payload that is dropped at once was better not detached"]
    pub fn detach(self) -> Payload<DetachedMessage> {
        Payload(self.0.detach())
    }
}

/// A call that has ended without an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failed<T> {
    /// Its name, which names nothing any more.
    pub call: CallId,
    /// Its tag.
    pub tag: T,
    /// The reason.
    pub error: CallError,
}

/// The meaning of a message.
#[derive(Debug)]
#[non_exhaustive]
pub enum Incoming<B, T> {
    /// The peer requests something. The program answers now or later, with [`super::Calls::answer`] or [`super::Calls::dismiss`].
    Request {
        /// The name of the request.
        id: RequestId,
        /// Its payload.
        payload: Payload<B>,
    },
    /// The caller does not wait for a request any more. The program still ends it, and nothing is sent.
    Cancelled(RequestId),
    /// A call has its answer.
    Answer {
        /// The name of the call, which names nothing any more.
        call: CallId,
        /// Its tag.
        tag: T,
        /// The answer.
        payload: Payload<B>,
    },
    /// A call has ended without an answer.
    Failed(Failed<T>),
    /// The peer has broken the rules. The connection ends, and its calls with it.
    Violation(Violation),
}
