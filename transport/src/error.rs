//! Errors of provider calls. A failed completion is not an error but data, in [`crate::wc::WcStatus`].

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// Result of a provider call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a provider refused a call. Every message names the value and, where there is one, the cure.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The provider cannot do this; see [`crate::Capabilities`].
    #[error("the provider {provider} has no {feature}")]
    Unsupported {
        /// Name of the provider.
        provider: &'static str,
        /// What was asked for.
        feature: &'static str,
    },
    /// No RDMA device is usable.
    #[error("no RDMA device: {reason}")]
    NoDevice {
        /// What is missing and how to get it.
        reason: String,
    },
    /// The RDMA libraries are not installed, or too old.
    #[error("no RDMA library: {reason}")]
    NoLibrary {
        /// Which library or function is missing, and what to install.
        reason: String,
    },
    /// A text is no address.
    #[error("{text:?} is no address: give one as 192.0.2.1:7471, [2001:db8::1]:7471 or ib:[fe80::1]:7471")]
    Address {
        /// The text.
        text: String,
    },
    /// A call to a device failed.
    #[error("{device}: {call} failed: {source}")]
    Device {
        /// Name of the device.
        device: Box<str>,
        /// The call.
        call: &'static str,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A listener could not be opened.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A handle names no live object: the object was destroyed, or never existed.
    #[error("stale or unknown {object}")]
    Stale {
        /// Kind of object.
        object: &'static str,
    },
    /// The object exists but is not in a state that allows the call.
    #[error("{call} is not possible while the connection is {state}")]
    InvalidState {
        /// The call.
        call: &'static str,
        /// The state it met.
        state: &'static str,
    },
    /// A work queue has no room. This is backpressure and not a fault; try again after a completion.
    #[error("the {queue} queue is full ({depth} work requests)")]
    QueueFull {
        /// `send` or `receive`.
        queue: &'static str,
        /// Its depth.
        depth: u32,
    },
    /// More private data than the connection manager carries.
    #[error("{len} bytes of private data: {provider} carries at most {max}")]
    PrivateDataTooLong {
        /// Name of the provider.
        provider: &'static str,
        /// Bytes asked for.
        len: usize,
        /// Bytes possible.
        max: usize,
    },
    /// A setting outside its range.
    #[error("{what} is {value}: it must be {range}")]
    OutOfRange {
        /// The setting.
        what: &'static str,
        /// What was asked for.
        value: u64,
        /// What is possible.
        range: &'static str,
    },
    /// Memory could not be obtained or registered.
    #[error("cannot register {bytes} bytes of memory: {source}")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("{call} failed: {source}")]
    Io {
        /// The call.
        call: &'static str,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

/// Returns [`Error::OutOfRange`] for a value that is not `within` what `range` describes.
pub(crate) fn in_range(
    what: &'static str,
    value: impl Into<u64>,
    within: RangeInclusive<u64>,
    range: &'static str,
) -> Result<()> {
    let value = value.into();
    if within.contains(&value) { Ok(()) } else { Err(Error::OutOfRange { what, value, range }) }
}

impl Error {
    /// An I/O error of `call`.
    #[must_use]
    pub const fn io(call: &'static str, source: io::Error) -> Self {
        Self::Io { call, source }
    }

    /// Names the device that a call failed on.
    #[must_use]
    pub fn on(self, device: &str) -> Self {
        match self {
            Self::Io { call, source } => Self::Device { device: device.into(), call, source },
            other => other,
        }
    }
}
