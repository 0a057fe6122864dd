//! [`Factory`]: makes the providers of each case, and states what they lack.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use super::environment::Environment;
use crate::caps::{Capabilities, Features};
use crate::provider::Provider;

/// Makes providers of one kind for the cases.
pub trait Factory: fmt::Debug {
    /// Returns the name of the device, which [`Deviation::device`] refers to.
    fn device(&self) -> &str;

    /// Makes a provider for each of `sides`, 2 or 3, and the time and the edges that they live by. All of them are driven by the
    /// thread that calls, and each reaches the addresses of the others.
    fn open(&self, sides: usize) -> (Vec<Box<dyn Provider>>, Box<dyn Environment>);

    /// Returns the address that `side` listens on, with port 0.
    fn address(&self, side: usize) -> SocketAddr;

    /// Returns what the device lacks. A case that needs it is reported as not there. The suite fails if the device lacks anything
    /// else, or has what is stated here.
    fn missing(&self) -> &[Need];

    /// Returns where the device departs from the contract; nowhere by default.
    fn deviations(&self) -> &[Deviation] {
        &[]
    }

    /// Returns the longest wait for an event. It ends a hang; no busy machine may reach it.
    fn patience(&self) -> Duration {
        Duration::from_secs(300)
    }

    /// Returns the longest wait for what is known not to come: the wait that fails with [`Deviation::finds`].
    fn short_patience(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// Returns how long a case looks for what must not happen.
    fn grace(&self) -> Duration {
        Duration::from_millis(30)
    }
}

/// What a case needs of the device, beyond what each device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the features and roles")]
pub enum Need {
    // Features.
    Reads,
    Writes,
    Atomics,
    SendWithImmediate,
    WriteWithImmediate,
    RemoteInvalidation,
    /// Sends that are copied when they are posted.
    Inline,
    /// Events of queues that are armed for solicited completions.
    SolicitedEvents,
    /// A disconnect that does not overtake sends which have completed: [`Features::ABRUPT_DISCONNECT`] is absent.
    OrderlyDisconnect,
    /// A remote key that no peer uses once it is taken back: [`Features::LATE_PLACEMENT`] is absent.
    PromptInvalidation,
    // Roles.
    SharedReceives,
    RemoteKeys,
    Liveness,
    Extensions,
    Handover,
    OffLoopRegistration,
    Paths,
    Adapter,
    DeviceEvents,
    ImmediateSends,
    /// Connections within the host that are in shared memory: [`SharedMemory`](crate::roles::SharedMemory).
    SharedMemory,
}

impl Need {
    /// Returns `true` if a provider and its device meet the need.
    pub(super) fn is_met(self, provider: &mut dyn Provider, device: &Capabilities) -> bool {
        let has = |feature| device.features.contains(feature);
        match self {
            Self::Reads => has(Features::READ),
            Self::Writes => has(Features::WRITE),
            Self::Atomics => has(Features::ATOMICS),
            Self::SendWithImmediate => has(Features::SEND_WITH_IMMEDIATE),
            Self::WriteWithImmediate => has(Features::WRITE_WITH_IMMEDIATE),
            Self::RemoteInvalidation => has(Features::REMOTE_INVALIDATION),
            Self::Inline => device.max_inline > 0,
            Self::SolicitedEvents => has(Features::SOLICITED_EVENTS),
            Self::OrderlyDisconnect => !has(Features::ABRUPT_DISCONNECT),
            Self::PromptInvalidation => !has(Features::LATE_PLACEMENT),
            Self::SharedReceives => provider.shared_receives().is_some(),
            Self::RemoteKeys => provider.remote_keys().is_some(),
            Self::Liveness => provider.liveness().is_some(),
            Self::Extensions => provider.extensions().is_some(),
            Self::Handover => provider.handover().is_some(),
            Self::OffLoopRegistration => provider.off_loop_registration().is_some(),
            Self::Paths => provider.paths().is_some(),
            Self::Adapter => provider.adapter().is_some(),
            Self::DeviceEvents => provider.device_events().is_some(),
            Self::ImmediateSends => provider.immediate_sends().is_some(),
            Self::SharedMemory => provider.shared_memory().is_some(),
        }
    }
}

/// A known departure of a device from the contract. The case runs, and must fail in this way: once the device is mended, the row has
/// to go.
#[derive(Clone, Copy, Debug)]
pub struct Deviation {
    /// Name of the case.
    pub case: &'static str,
    /// Name of the device ([`Factory::device`]).
    pub device: &'static str,
    /// What the device does instead.
    pub what: &'static str,
    /// A part of the message that the case fails with. It fails the test if it fails with another.
    pub finds: &'static str,
}
