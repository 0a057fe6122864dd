//! What calls and requests leave for their tasks.

use std::cell::RefCell;
use std::task::{Context as Task, Poll, Waker};

use crate::call::{CallError, RequestId};

/// A request that waits for a task: its name and its payload.
pub(super) type Asked = (RequestId, Vec<u8>);

/// The end of a call.
pub(super) type Outcome = Result<Vec<u8>, CallError>;

/// The end of a call, or the task that waits for it.
#[derive(Debug, Default)]
pub(super) struct Reply(RefCell<(Option<Outcome>, Option<Waker>)>);

impl Reply {
    /// Sets the end; returns the task to wake.
    pub(super) fn set(&self, outcome: Outcome) -> Option<Waker> {
        let mut this = self.0.borrow_mut();
        this.0 = Some(outcome);
        this.1.take()
    }

    pub(super) fn poll(&self, task: &Task<'_>) -> Poll<Outcome> {
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
