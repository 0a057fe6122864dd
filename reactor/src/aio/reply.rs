//! The results of calls, and the requests of peers, until tasks receive them.

use std::cell::RefCell;
use std::task::{Context as Task, Poll, Waker};

use crate::call::{CallError, RequestId};

/// A request that waits for a task: its id and payload.
pub(super) type QueuedRequest = (RequestId, Vec<u8>);

/// The result of a call: the payload of the answer, or the error.
pub(super) type ReplyResult = Result<Vec<u8>, CallError>;

/// The state of a call: the result, once the call has ended, and the waker of the task that waits for the result.
#[derive(Debug, Default)]
// bound: calls
pub(super) struct Reply(RefCell<(Option<ReplyResult>, Option<Waker>)>);

impl Reply {
    /// Sets the result. Returns the waker of the task that waits for the result; `None` if no task waits for it yet.
    pub(super) fn set(&self, outcome: ReplyResult) -> Option<Waker> {
        let mut this = self.0.borrow_mut();
        this.0 = Some(outcome);
        this.1.take()
    }

    pub(super) fn poll(&self, task: &Task<'_>) -> Poll<ReplyResult> {
        let mut this = self.0.borrow_mut();
        if let Some(outcome) = this.0.take() {
            return Poll::Ready(outcome);
        }
        let old = this.1.replace(task.waker().clone());
        drop(this);
        drop(old);
        Poll::Pending
    }

    pub(super) fn take_waker(&self) -> Option<Waker> {
        self.0.borrow_mut().1.take()
    }
}
