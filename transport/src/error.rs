//! The errors of provider calls. A failed work request is not an error of a call: its completion reports the failure
//! ([`crate::wc::WcStatus`]).

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// The result of a provider call.
pub type Result<T> = std::result::Result<T, TransportError>;

/// The reason why a provider refused a call. Each message names the rejected value, and says how to correct it if
/// possible.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
// local: the text of one error
pub enum TransportError {
    /// The provider or its device does not support the requested feature; see [`crate::Capabilities`].
    #[error("the provider {provider} has no {feature}")]
    Unsupported {
        /// The name of the provider.
        provider: &'static str,
        /// The feature that was requested.
        feature: &'static str,
    },
    /// The settings require shared memory with each peer, and this peer cannot use it.
    #[error("the provider {provider} accepts only peers in shared memory: {why}")]
    SharedMemoryOnly {
        /// The name of the provider.
        provider: &'static str,
        /// The reason why the connection cannot use shared memory.
        why: &'static str,
        /// True if the reason is a temporary state of the local side, so that the peer may try
        /// again later.
        is_temporary: bool,
    },
    /// No RDMA device is usable.
    #[error("no RDMA device: {reason}")]
    NoDevice {
        /// A text that explains the missing part and how to install it.
        reason: String,
    },
    /// The RDMA libraries are not installed, or too old.
    #[error("no RDMA library: {reason}")]
    NoLibrary {
        /// A text that names the missing library or function, and what to install.
        reason: String,
    },
    /// A text cannot be parsed as an address.
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
    #[error("cannot listen on {address}: {source}{}", cure(source))]
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
        /// The depth of the queue, in work requests.
        depth: u32,
    },
    /// The private data is longer than the connection manager can carry.
    #[error("{len} bytes of private data: {provider} carries at most {max}")]
    PrivateDataTooLong {
        /// The name of the provider.
        provider: &'static str,
        /// The length of the private data, in bytes.
        len: usize,
        /// The limit of the length, in bytes.
        max: usize,
    },
    /// A setting is outside its range.
    #[error("{what} is {value}: it must be {range}")]
    OutOfRange {
        /// The name of the setting.
        what: &'static str,
        /// The value of the setting.
        value: u64,
        /// The permitted range, as a text.
        range: &'static str,
    },
    /// Memory could not be allocated or registered.
    #[error("cannot register {bytes} bytes of memory: {}", refusal(*bytes, source))]
    Memory {
        /// The length of the memory, in bytes.
        bytes: usize,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("{call} failed: {source}{}", cure(source))]
    Io {
        /// The name of the call.
        call: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// Returns advice on a system error, to append to its message. Returns an empty text if there is
/// no advice.
fn cure(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => ": raise the limit of open files (ulimit -n)",
        _ => "",
    }
}

/// Returns the reason why memory of this length could not be registered.
fn refusal(bytes: usize, error: &io::Error) -> String {
    if bytes == 0 { "give one byte at least".into() } else { error.to_string() }
}

/// Checks that `value` is in the range `within`. `range` describes the range in the error.
///
/// # Errors
/// [`TransportError::OutOfRange`] names the setting `what` if `value` is outside of `within`.
pub fn in_range(
    what: &'static str,
    value: impl Into<u64>,
    within: RangeInclusive<u64>,
    range: &'static str,
) -> Result<()> {
    let value = value.into();
    if within.contains(&value) { Ok(()) } else { Err(TransportError::OutOfRange { what, value, range }) }
}

impl TransportError {
    /// Makes the error of a failed system call.
    #[must_use]
    pub const fn io(call: &'static str, source: io::Error) -> Self {
        Self::Io { call, source }
    }

    /// Adds the name of the device to the error of a failed call: converts [`TransportError::Io`] into [`TransportError::Device`].
    /// Returns other errors unchanged.
    #[must_use]
    pub fn on(self, device: &str) -> Self {
        match self {
            Self::Io { call, source } => Self::Device { device: device.into(), call, source },
            other => other,
        }
    }
}
