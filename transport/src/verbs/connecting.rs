//! Listening and resolving: the options of ids, and the local address of a connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::core::{Verbs, milliseconds_to};
use super::entry::{IdEntry, IdState};
use super::ffi::{RawAddress, local_addresses, scoped_for};
use super::id::{RawId, Service};
use super::status::{NO_LOOPBACK, connect_failure, is_unreachable};
use crate::cm::{CmEventKind, CmId, ConnectFailure, ListenParam, PathOptions, Source};
use crate::error::{Result, TransportError};

impl Verbs {
    pub(super) fn listen_for(&mut self, service: Service, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        let listen = |error| match error {
            TransportError::Io { source, .. } => TransportError::Listen { address, source },
            other => other,
        };
        let ListenParam { backlog, type_of_service, ack_timeout, ipv6_only } = *options;
        PathOptions { type_of_service, ack_timeout, source: Source::Any }.check()?;
        let raw = RawId::create(self.manager()?, service)?;
        raw.reuse_address().map_err(listen)?;
        if let Some(only) = ipv6_only.filter(|_| address.is_ipv6()) {
            raw.ipv6_only(only).map_err(listen)?;
        }
        set_path(&raw, type_of_service, ack_timeout);
        raw.bind(&RawAddress::new(address)).and_then(|()| raw.listen(backlog)).map_err(listen)?;
        let on_device = !raw.context().is_null();
        let mut id = IdEntry::new(Arc::new(raw), IdState::Listening);
        id.inherited = (type_of_service, ack_timeout);
        let key = self.add(id);
        if on_device {
            if let Err(error) = self.assign_device(key) {
                self.discard(key);
                return Err(error);
            }
        }
        Ok(CmId(key))
    }

    pub(super) fn resolve_from(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        options.check()?;
        let raw = match &options.source {
            Source::Any => RawId::create(self.manager()?, Service::Connected)?,
            Source::Address(address) => {
                let raw = RawId::create(self.manager()?, Service::Connected)?;
                let from = RawAddress::new(scoped_for(*address, Some(peer)));
                raw.bind(&from).map_err(|error| TransportError::NoDevice {
                    reason: format!("a connection cannot leave from {address}: {error}"),
                })?;
                raw
            }
            Source::Device { name, port } => self.id_on(name, *port, peer)?,
        };
        set_path(&raw, options.type_of_service, options.ack_timeout);
        self.resolve_on(raw, peer, deadline)
    }

    /// Returns a new id that is bound to an address of the device `name`. The address has the same address family as
    /// `peer`. If `port` is `Some`, the address is on this port of the device.
    fn id_on(&mut self, name: &str, port: Option<u8>, peer: SocketAddr) -> Result<RawId> {
        let mut failed = None;
        for address in local_addresses() {
            if address.is_ipv6() != peer.is_ipv6() {
                continue;
            }
            let raw = RawId::create(self.manager()?, Service::Connected)?;
            if raw.bind(&RawAddress::new(address)).is_err() || raw.context().is_null() {
                // The address is not on an RDMA device, like most addresses of a host.
                continue;
            }
            let device = match self.device_of(&raw) {
                Ok(device) => device,
                Err(error) => {
                    // This may be another device than the one that is named.
                    failed = Some(error);
                    continue;
                }
            };
            let on_port = port.is_none_or(|port| port == raw.port());
            if on_port && self.devices[device.0 as usize].info.name == name {
                return Ok(raw);
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let kind = if peer.is_ipv6() { "IPv6" } else { "IPv4" };
        let port = port.map_or_else(String::new, |port| format!("port {port} of "));
        Err(TransportError::NoDevice {
            reason: format!("{port}{name} has no {kind} address here; `rdma link` shows the devices"),
        })
    }

    pub(super) fn resolve_on(&mut self, raw: RawId, peer: SocketAddr, deadline: Instant) -> Result<CmId> {
        let raw = Arc::new(raw);
        let mut id = IdEntry::new(Arc::clone(&raw), IdState::Resolving);
        id.deadline = Some(deadline);
        let key = self.add(id);
        let failure = match raw.resolve_address(&RawAddress::new(peer), milliseconds_to(Some(deadline), self.now)) {
            Ok(()) => return Ok(CmId(key)),
            Err(_) if peer.ip().is_loopback() => ConnectFailure::Unreachable(NO_LOOPBACK.into()),
            Err(TransportError::Io { source, .. }) if is_unreachable(&source) => connect_failure(&source),
            Err(error) => {
                drop(raw);
                self.discard(key);
                return Err(error);
            }
        };
        // Report this failure by the event `ConnectFailed`, like a failure that occurs after the call has returned.
        if let Some(id) = self.ids.get_mut(key) {
            id.state = IdState::Closed;
        }
        self.push(key, CmEventKind::ConnectFailed(failure));
        self.connector.wake();
        Ok(CmId(key))
    }
}

/// Sets the type of service and the ack timeout of a connection. Logs an option that the kernel does not support, or does not support for
/// this kind of id.
pub(super) fn set_path(raw: &RawId, type_of_service: Option<u8>, ack_timeout: Option<u8>) {
    if let Some(value) = type_of_service {
        if let Err(error) = raw.set_type_of_service(value) {
            local_log!(Info, "the type of service {value:#x} is ignored: {error}");
        }
    }
    if let Some(code) = ack_timeout {
        if let Err(error) = raw.set_ack_timeout(code) {
            local_log!(Info, "the ack timeout {code} is ignored: {error}");
        }
    }
}
