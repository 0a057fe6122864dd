//! Opening the provider, and finding the device through which an address is reached.

use std::ffi::{CStr, CString, c_int};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::channel::EventChannel;
use super::ffi::{RawAddress, local_addresses};
use super::gid;
use super::hub::DeviceHub;
use super::id::{RawId, Service};
use super::parts::Verbs;
use super::status::{NO_LOOPBACK, is_unreachable};
use super::sys::{self, ibv_free_device_list, ibv_get_device_list, rdma_cm_event_type};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::slab::Key;

const NODES: &str = "/dev/infiniband";

/// The result of [`Verbs::reaches`] and [`Verbs::serves`]: the device for an address, or the reason
/// why no device can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
// local: the text of one error
pub enum Reach {
    /// An RDMA device reaches or has the address.
    Yes {
        /// The name of the device.
        device: String,
    },
    /// No RDMA device reaches or has the address.
    No {
        /// The reason.
        reason: String,
    },
}

impl Verbs {
    /// Opens the connection manager. The provider opens a device later, for the first connection or listener on the device.
    ///
    /// If rdma_cm cannot be used, the call still succeeds. The provider can then connect only by
    /// [`Exchange`](rdma_transport::roles::Exchange), for which it needs entropy
    /// ([`Verbs::with_entropy`]).
    ///
    /// # Errors
    /// [`TransportError::NoLibrary`] if the libraries are missing or too old; [`TransportError::NoDevice`] if a device, a kernel module or
    /// a permission is missing. Both errors say how to correct the problem.
    pub fn open() -> Result<Self> {
        sys::load().map_err(|missing| TransportError::NoLibrary { reason: missing.to_string() })?;
        check_devices()?;
        let manager = match EventChannel::open() {
            Ok(channel) => Ok(Arc::new(channel)),
            Err(TransportError::Io { source, .. }) => Err(no_manager(&source)),
            Err(other) => return Err(other),
        };
        if let Err(why) = &manager {
            local_log!(Info, "provider verbs: {why}; queue pairs can be connected by exchange only");
        }
        Self::on_channel(manager)
    }

    /// Checks if an RDMA device reaches the address of `peer`. The call resolves the address and **blocks** for at most `timeout`, so call
    /// it before the event loop runs.
    ///
    /// # Errors
    /// rdma_cm cannot be used, or the system lacks resources.
    pub fn reaches(&mut self, peer: SocketAddr, timeout: Duration) -> Result<Reach> {
        self.hub.manager()?;
        if peer.ip().is_loopback() {
            return Ok(Reach::No { reason: NO_LOOPBACK.into() });
        }
        let channel = Arc::new(EventChannel::open()?);
        let id = RawId::create(&channel, Service::Connected)?;
        id.set_key(Key::new(u32::MAX, u32::MAX));
        let timeout = c_int::try_from(timeout.as_millis()).unwrap_or(c_int::MAX).max(1);
        if let Err(error) = id.resolve_address(&RawAddress::new(peer), timeout) {
            return unreachable(error);
        }
        let mut fd = libc::pollfd { fd: channel.fd(), events: libc::POLLIN, revents: 0 };
        let rc = loop {
            // SAFETY: `fd` is one descriptor, and exists until the call returns.
            let rc = unsafe { libc::poll(&raw mut fd, 1, timeout) };
            // If a signal of the program has interrupted the wait, wait again. The loop ends,
            // because the kernel reports a failure after the time limit of `resolve_address`.
            if rc >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                break rc;
            }
        };
        let event = if rc > 0 { channel.next()? } else { None };
        match event {
            Some(event) if event.kind == rdma_cm_event_type::RDMA_CM_EVENT_ADDR_RESOLVED => reached(&mut self.hub, &id),
            Some(event) => {
                let error = io::Error::from_raw_os_error(event.status.saturating_abs());
                Ok(Reach::No { reason: format!("{} does not resolve: {error}", peer.ip()) })
            }
            None => Ok(Reach::No { reason: format!("{} did not resolve in time", peer.ip()) }),
        }
    }

    /// Checks if a listener on `address` would be on an RDMA device. A listener on an unspecified address is on all
    /// devices.
    ///
    /// # Errors
    /// rdma_cm cannot be used, or the system lacks resources.
    pub fn serves(&mut self, address: SocketAddr) -> Result<Reach> {
        self.hub.manager()?;
        if address.ip().is_unspecified() {
            return serves_any(&mut self.hub);
        }
        let channel = Arc::new(EventChannel::open()?);
        let id = RawId::create(&channel, Service::Connected)?;
        let mut local = address;
        local.set_port(0);
        match id.bind(&RawAddress::new(local)) {
            Ok(()) => reached(&mut self.hub, &id),
            Err(error) => unreachable(error),
        }
    }
}

fn reached(hub: &mut DeviceHub, id: &RawId) -> Result<Reach> {
    if id.context().is_null() {
        return Ok(Reach::No { reason: "the address is not on an RDMA device".into() });
    }
    Ok(match hub.device_up(id)? {
        Ok(device) => Reach::Yes { device: hub.devices[device.0 as usize].info.name.clone() },
        Err(reason) => Reach::No { reason },
    })
}

/// Finds a device that has an address of this host and an active port.
fn serves_any(hub: &mut DeviceHub) -> Result<Reach> {
    let mut reason = "no address of this host is on an RDMA device".to_owned();
    let mut failed = None;
    for address in local_addresses() {
        let channel = Arc::new(EventChannel::open()?);
        let id = RawId::create(&channel, Service::Connected)?;
        if id.bind(&RawAddress::new(address)).is_err() || id.context().is_null() {
            // The address is not on an RDMA device, like most addresses of a host.
            continue;
        }
        match reached(hub, &id) {
            Ok(Reach::No { reason: why }) => reason = why,
            Ok(yes @ Reach::Yes { .. }) => return Ok(yes),
            // The other devices may work.
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(Reach::No { reason }), Err)
}

fn unreachable(error: TransportError) -> Result<Reach> {
    match error {
        TransportError::Io { source, .. } if is_unreachable(&source) => {
            Ok(Reach::No { reason: format!("no RDMA device leads there: {source}") })
        }
        other => Err(other),
    }
}

/// Checks that this process has the permission to open at least one device.
fn check_devices() -> Result<()> {
    let mut count: c_int = 0;
    // SAFETY: the pointer is to memory for the count.
    let list = unsafe { ibv_get_device_list(&raw mut count) };
    if list.is_null() {
        let error = io::Error::last_os_error();
        let reason = match error.raw_os_error() {
            Some(libc::ENOSYS) => "the kernel has no user-space RDMA; load the module ib_uverbs".into(),
            _ => format!("the list of devices cannot be read: {error}"),
        };
        return Err(TransportError::NoDevice { reason });
    }
    let count = usize::try_from(count).unwrap_or(0);
    let names: Vec<String> = (0..count)
        .map(|index| {
            // SAFETY: the list has `count` devices. Their names are NUL-terminated, and are read before the list is freed.
            let name = unsafe { CStr::from_ptr((**list.add(index)).dev_name.as_ptr()) };
            name.to_string_lossy().into_owned()
        })
        .collect();
    // SAFETY: the list is freed once, after the names were copied.
    unsafe { ibv_free_device_list(list) }
    if names.is_empty() {
        // The kernel also lists the devices for which libibverbs has no driver.
        let in_kernel = gid::names(Path::new(gid::SYSFS));
        return Err(TransportError::NoDevice { reason: no_devices(&in_kernel, drivers_variable().as_deref()) });
    }
    for refusal in refusals(&names, usable)? {
        local_log!(Info, "provider verbs: without the device of {refusal}");
    }
    Ok(())
}

/// Returns the devices that this process may not open, each with the reason. In a container, these are often all
/// devices but one.
///
/// # Errors
/// The process may open none of the devices.
fn refusals(names: &[String], usable: impl Fn(&Path) -> io::Result<()>) -> Result<Vec<String>> {
    let mut refusals = Vec::new();
    for name in names {
        let node = format!("{NODES}/{name}");
        if let Err(error) = usable(Path::new(&node)) {
            refusals.push(format!("{node}: {error}; {}", cure(&error)));
        }
    }
    if refusals.len() < names.len() {
        Ok(refusals)
    } else {
        Err(TransportError::NoDevice { reason: refusals.join(", ") })
    }
}

/// Returns `NAME=VALUE` of the environment variable that selects the drivers of libibverbs. Returns `None` if it is not
/// set.
fn drivers_variable() -> Option<String> {
    ["RDMAV_DRIVERS", "IBV_DRIVERS"].iter().find_map(|name| {
        let value = std::env::var_os(name)?;
        Some(format!("{name}={}", value.to_string_lossy()))
    })
}

/// Returns the reason why the library finds no device. `kernel` lists the kernel's devices, and `variable` is the
/// environment variable that selects the library's drivers.
fn no_devices(kernel: &[String], variable: Option<&str>) -> String {
    if kernel.is_empty() {
        return "the kernel has none; `rdma link` shows what it has, and `rdma link add` makes a software one".into();
    }
    let mut reason = format!(
        "the kernel has {}, but libibverbs has no driver for it: install ibverbs-providers (part of rdma-core)",
        kernel.join(", ")
    );
    if let Some(variable) = variable {
        reason += &format!("; the environment has {variable}, which may name other drivers");
    }
    reason
}

/// Checks that this process has the permission to read and write a file.
fn usable(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_encoded_bytes())?;
    // SAFETY: the path is a NUL-terminated string.
    if unsafe { libc::access(path.as_ptr(), libc::R_OK | libc::W_OK) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn cure(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "give the user access to it (often: membership of the group rdma)",
        io::ErrorKind::NotFound => "the file is missing: in a container, pass /dev/infiniband in",
        _ => "no known cure",
    }
}

fn no_manager(error: &io::Error) -> String {
    let node = format!("{NODES}/rdma_cm");
    match usable(Path::new(&node)) {
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => {
            format!("{node} is missing: load the module rdma_ucm")
        }
        Err(refused) => format!("{node}: {refused}; {}", cure(&refused)),
        Ok(()) => format!("{node} cannot be opened: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_hidden_is_named_and_the_others_are_used() {
        let names = ["uverbs0", "uverbs1"].map(String::from);
        let hidden = |hidden: &'static [&str]| {
            refusals(&names, move |path| match hidden.iter().find(|name| path.ends_with(name)) {
                Some(_) => Err(io::ErrorKind::NotFound.into()),
                None => Ok(()),
            })
        };
        assert!(hidden(&[]).unwrap().is_empty());
        let [refusal] = &hidden(&["uverbs0"]).unwrap()[..] else { panic!("one is hidden") };
        assert!(
            refusal.starts_with("/dev/infiniband/uverbs0: ") && refusal.contains("in a container, pass"),
            "{refusal}"
        );
        let none = hidden(&["uverbs0", "uverbs1"]).unwrap_err().to_string();
        assert!(none.contains("uverbs0") && none.contains("uverbs1"), "{none}");
    }

    #[test]
    fn a_device_without_a_driver_is_told_from_no_device() {
        assert!(no_devices(&[], None).contains("the kernel has none"));
        let reason = no_devices(&["siw0".into(), "mlx5_0".into()], Some("RDMAV_DRIVERS=mlx4"));
        for part in ["siw0, mlx5_0", "install ibverbs-providers", "RDMAV_DRIVERS=mlx4"] {
            assert!(reason.contains(part), "{reason}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = usable(Path::new("/nonexistent/uverbs0")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(cure(&error).contains("container"));
        assert!(no_manager(&io::Error::from_raw_os_error(libc::ENOENT)).contains("rdma_cm"));
    }
}
