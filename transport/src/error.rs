//! Errors of provider calls. A failed completion is not an error but data: see [`crate::wc::WcStatus`].

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// The result of a provider call.
pub type Result<T> = std::result::Result<T, Error>;

/// The reason why a provider refused a call. Each message names the value and, if there is one, the cure.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The provider or its device cannot do this; see [`crate::Capabilities`].
    #[error("the provider {provider} has no {feature}")]
    Unsupported {
        /// The name of the provider.
        provider: &'static str,
        /// The feature that was requested.
        feature: &'static str,
    },
    /// No RDMA device is usable.
    #[error("no RDMA device: {reason}")]
    NoDevice {
        /// A text that says what is missing and how to get it.
        reason: String,
    },
    /// The RDMA libraries are not installed, or too old.
    #[error("no RDMA library: {reason}")]
    NoLibrary {
        /// A text that names the missing library or function, and what to install.
        reason: String,
    },
    /// A text is not an address.
    #[error("{text:?} is not an address: give one such as 192.0.2.1:7471, [2001:db8::1]:7471 or ib:[fe80::1]:7471")]
    Address {
        /// The text.
        text: String,
    },
    /// A call to a device failed.
    #[error("{device}: {call} failed: {source}")]
    Device {
        /// The name of the device.
        device: Box<str>,
        /// The name of the call.
        call: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A listener could not be opened.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The requested address.
        address: SocketAddr,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A handle names no live object: the object was destroyed, or never existed.
    #[error("stale or unknown {object}")]
    Stale {
        /// The kind of object.
        object: &'static str,
    },
    /// The object exists but is not in a state that allows the call.
    #[error("{call} is not possible while the connection is {state}")]
    InvalidState {
        /// The name of the call.
        call: &'static str,
        /// The state of the object.
        state: &'static str,
    },
    /// A work queue is full. This is backpressure and not a fault; try again after a completion.
    #[error("the {queue} queue is full ({depth} work requests)")]
    QueueFull {
        /// `send` or `receive`.
        queue: &'static str,
        /// The depth of the queue, work requests.
        depth: u32,
    },
    /// There is more private data than the connection manager carries.
    #[error("{len} bytes of private data: {provider} carries at most {max}")]
    PrivateDataTooLong {
        /// The name of the provider.
        provider: &'static str,
        /// The length of the private data, bytes.
        len: usize,
        /// The limit, bytes.
        max: usize,
    },
    /// A setting is outside its range.
    #[error("{what} is {value}: it must be {range}")]
    OutOfRange {
        /// The name of the setting.
        what: &'static str,
        /// The value of the setting.
        value: u64,
        /// The range of possible values.
        range: &'static str,
    },
    /// Memory could not be obtained or registered.
    #[error("cannot register {bytes} bytes of memory: {source}")]
    Memory {
        /// The number of bytes.
        bytes: usize,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("{call} failed: {source}")]
    Io {
        /// The name of the call.
        call: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// Returns [`Error::OutOfRange`] unless the value is `within` the range, which `range` describes.
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
    /// Returns the error of a system call.
    #[must_use]
    pub const fn io(call: &'static str, source: io::Error) -> Self {
        Self::Io { call, source }
    }

    /// Converts an [`Error::Io`] into an [`Error::Device`], which names the device that the call failed on. Returns
    /// other errors unchanged.
    #[must_use]
    pub fn on(self, device: &str) -> Self {
        match self {
            Self::Io { call, source } => Self::Device { device: device.into(), call, source },
            other => other,
        }
    }
}
