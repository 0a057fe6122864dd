//! Completion queues.

use crate::caps::{Capabilities, Moderation};
use crate::error::{Result, TransportError, in_range};

/// The attributes of a completion queue (`ibv_create_cq`(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqAttr {
    /// The capacity, in completions: 1 to the device's
    /// [`max_completion_queue`](crate::Capabilities::max_completion_queue).
    pub entries: u32,
    /// The completion vector: 0 to [`Capabilities::completion_vectors`](crate::Capabilities::completion_vectors) - 1. Queues on different
    /// vectors raise their events on different processors.
    pub vector: u32,
    /// The moderation of events, up to the device's limits
    /// ([`Capabilities::completion_moderation`](crate::Capabilities::completion_moderation)). `None` for no moderation.
    pub moderation: Option<Moderation>,
}

impl CqAttr {
    /// Returns the attributes of a queue with this capacity, on the first completion vector, without moderation.
    #[must_use]
    pub const fn new(entries: u32) -> Self {
        Self { entries, vector: 0, moderation: None }
    }

    /// Checks the attributes against the limits of a device. `provider` is the name of the calling provider, for the
    /// error.
    ///
    /// # Errors
    /// [`TransportError::OutOfRange`] names the first value that is outside its range; [`TransportError::Unsupported`] for moderation on
    /// a device without it.
    pub fn check(&self, provider: &'static str, limits: &Capabilities) -> Result<()> {
        let (most, range) = (limits.max_completion_queue.into(), "1 to the device's max_completion_queue");
        in_range("entries of a completion queue", self.entries, 1..=most, range)?;
        let (most, range) =
            (limits.completion_vectors.saturating_sub(1).into(), "below the device's completion_vectors");
        in_range("completion vector", self.vector, 0..=most, range)?;
        let (Some(to), Some(most)) = (self.moderation, limits.completion_moderation) else {
            let feature = "completion moderation on this device";
            return if self.moderation.is_none() {
                Ok(())
            } else {
                Err(TransportError::Unsupported { provider, feature })
            };
        };
        let range = "at most the device's completion_moderation";
        in_range("completions per event", to.completions, 0..=most.completions.into(), range)?;
        let microseconds = 0..=most.microseconds.into();
        in_range("microseconds that an event is held back", to.microseconds, microseconds, range)
    }
}

/// Selects the completions for which an armed completion queue raises an event (`ibv_req_notify_cq`(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// Every completion.
    Any,
    /// Completions of failed work requests, and of receives whose message was sent with
    /// [`SendFlags::SOLICITED`](crate::SendFlags::SOLICITED). Needs a device with
    /// [`Features::SOLICITED_EVENTS`](crate::Features::SOLICITED_EVENTS). The device may also raise an event for other
    /// completions.
    Solicited,
}
