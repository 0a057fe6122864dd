//! Makes a callback. If [`Config::contain_panics`](crate::Config::contain_panics) is set, a panic of the callback is caught.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::api::context::Context;
#[cfg(feature = "datagram")]
use crate::datagram::EndpointId;
use crate::datagram::endpoints::Endpoints;
use crate::driver::Driver;
use crate::id::ConnectionId;

/// The connection or endpoint for which a callback is made. If the callback panics, this connection or endpoint ends.
#[derive(Clone, Copy, Debug)]
pub(super) enum CallbackSubject {
    Connection(ConnectionId),
    #[cfg(feature = "datagram")]
    Endpoint(EndpointId),
    /// Neither a connection nor an endpoint: the callback is for a timer, a descriptor, a connect
    /// request, a device, or a message from another thread.
    Other,
}

impl fmt::Display for CallbackSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connection(id) => write!(f, " for {id}"),
            #[cfg(feature = "datagram")]
            Self::Endpoint(id) => write!(f, " for {id}"),
            Self::Other => Ok(()),
        }
    }
}

/// Makes a callback. Returns the result of the callback, or `None` if the callback panicked and the panic was caught.
#[inline]
pub(super) fn call<R>(
    (driver, endpoints): (&mut Driver, &mut Endpoints),
    (of, name): (CallbackSubject, &'static str),
    callback: impl FnOnce(&mut Context<'_>) -> R,
) -> Option<R> {
    if driver.config.contain_panics {
        contained((driver, endpoints), (of, name), callback)
    } else {
        Some(callback(&mut Context { driver, endpoints }))
    }
}

#[cold]
fn contained<R>(
    (driver, endpoints): (&mut Driver, &mut Endpoints),
    (of, name): (CallbackSubject, &'static str),
    callback: impl FnOnce(&mut Context<'_>) -> R,
) -> Option<R> {
    // A callback can change the reactor only through its context. Two methods of the context call code of the program: `Context::append`
    // and `Context::reporting`. A panic in that code leaves the reactor consistent, so a panic never interrupts a change of the reactor.
    // (After a panic in `Context::reporting`, the connection continues to report the ends of copied messages.)
    let made = catch_unwind(AssertUnwindSafe(|| callback(&mut Context { driver, endpoints })));
    match made {
        Ok(result) => Some(result),
        Err(panic) => {
            let why = format!("{name} panicked: {}", text(&*panic));
            // Dropping the payload of a panic may panic too. The payload of that second panic is leaked, because dropping it could cause a
            // third panic.
            if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
                std::mem::forget(again);
            }
            local_log!(Error, "{why}{of}");
            driver.stats.turns.panics += 1;
            match of {
                CallbackSubject::Connection(id) => driver.panicked(id, why),
                #[cfg(feature = "datagram")]
                CallbackSubject::Endpoint(id) => {
                    if let Some(key) = id.key(driver.tag()) {
                        endpoints.end(driver, key, crate::error::DisconnectReason::Internal(why), true);
                    }
                }
                CallbackSubject::Other => {}
            }
            None
        }
    }
}

/// Returns the message of a panic.
pub(crate) fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("without a text")
}
