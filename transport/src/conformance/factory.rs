//! [`Factory`]: makes the providers of each case, and declares which requirements the device does not meet.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use super::environment::Environment;
use crate::caps::{Capabilities, Features};
use crate::provider::Provider;

/// Makes providers of one kind for the cases.
pub trait Factory: fmt::Debug {
    /// Returns the name of the device, to which [`Deviation::device`] refers.
    fn device(&self) -> &str;

    /// Makes `sides` (2 or 3) providers, and an environment: the clock and the poller of all these providers. One
    /// thread drives all providers. Each provider can reach the addresses of the others.
    fn open(&self, sides: usize) -> (Vec<Box<dyn Provider>>, Box<dyn Environment>);

    /// Returns the address at which `side` listens, with port 0.
    fn address(&self, side: usize) -> SocketAddr;

    /// Returns the needs that the device does not meet. A case with one of these needs is not run, and is reported as
    /// [`CaseOutcome::Missing`](super::CaseOutcome::Missing). The suite fails if this list is wrong: if the device
    /// meets a need in it, or does not meet a need that is not in it.
    fn missing(&self) -> &[Need];

    /// Returns the known deviations of the device from the contract. The default is none.
    fn deviations(&self) -> &[Deviation] {
        &[]
    }

    /// Returns the timeout for each event for which a case waits. The timeout ends a case that hangs. It must be long
    /// enough that a case on a busy machine does not reach it.
    fn patience(&self) -> Duration {
        Duration::from_secs(300)
    }

    /// Returns the timeout for the wait that fails because of a known deviation ([`Deviation::finds`]).
    fn short_patience(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// Returns the time for which a case waits to check that nothing happens.
    fn grace(&self) -> Duration {
        Duration::from_millis(30)
    }
}

/// A requirement of a case that not every device meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the features and roles")]
pub enum Need {
    // The needs from here to `PromptInvalidation` are features of the device.
    Reads,
    Writes,
    Atomics,
    SendWithImmediate,
    WriteWithImmediate,
    RemoteInvalidation,
    /// Inline sends: the bytes are copied when the send is posted ([`Capabilities::max_inline`]).
    Inline,
    /// Events of completion queues that are armed for solicited completions only.
    SolicitedEvents,
    /// The device does not lose completed sends when the connection is closed: [`Features::ABRUPT_DISCONNECT`] is
    /// absent.
    OrderlyDisconnect,
    /// No peer can use a remote key after it is invalidated: [`Features::LATE_PLACEMENT`] is absent.
    PromptInvalidation,
    // The needs from here on are roles of the provider.
    SharedReceives,
    RemoteKeys,
    Liveness,
    Extensions,
    Handover,
    OffLoopRegistration,
    Adapter,
    DeviceEvents,
    ImmediateSends,
    /// Connections in shared memory within the host: [`SharedMemory`](crate::roles::SharedMemory).
    SharedMemory,
}

impl Need {
    /// Returns true if a provider and its device meet the need.
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
            Self::Adapter => provider.adapter().is_some(),
            Self::DeviceEvents => provider.device_events().is_some(),
            Self::ImmediateSends => provider.immediate_sends().is_some(),
            Self::SharedMemory => provider.shared_memory().is_some(),
        }
    }
}

/// A known deviation of a device from the contract. The case runs, and must fail in the described way. When the device
/// is corrected, the suite fails until the deviation is removed from the list.
#[derive(Clone, Copy, Debug)]
pub struct Deviation {
    /// The name of the case.
    pub case: &'static str,
    /// The name of the device ([`Factory::device`]).
    pub device: &'static str,
    /// A description of the device's behaviour, for the report.
    pub what: &'static str,
    /// A part of the message with which the case fails. If the case fails with another message, the suite fails.
    pub finds: &'static str,
}
