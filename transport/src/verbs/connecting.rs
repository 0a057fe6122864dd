//! Listening, resolving and connect requests through the connection manager: the options of ids, and the local address
//! of a connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::NAME;
use super::capabilities::{max_datagram, port_attr};
use super::channel::NewCmId;
use super::entry::{IdEntry, IdState};
use super::ffi::{RawAddress, local_addresses, scoped_for};
use super::hub::{DeviceHub, milliseconds_to};
use super::id::{RawId, Service};
use super::status::{NO_LOOPBACK, connect_failure, is_unreachable};
use crate::caps::Features;
use crate::cm::{CmEventKind, CmId, ConnectFailure, ListenParam, PathOptions, ReadDepth, Source};
use crate::error::{Result, TransportError};
use crate::provider::DeviceId;
use crate::slab::Key;

impl DeviceHub {
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

    /// Creates an id for datagrams that is bound to `address`. Returns the id, its device, and the length of the largest datagram that its
    /// port can send, in bytes.
    pub(super) fn bind_datagrams(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId, u32)> {
        let raw = RawId::create(self.manager()?, Service::Datagram)?;
        raw.bind(&RawAddress::new(address)).map_err(|error| match error {
            TransportError::Io { source, .. } => TransportError::Listen { address, source },
            other => other,
        })?;
        if raw.context().is_null() {
            let reason = format!("{} is not on an RDMA device: datagrams need the address of a device", address.ip());
            return Err(TransportError::NoDevice { reason });
        }
        let port = raw.port();
        let key = self.add(IdEntry::new(Arc::new(raw), IdState::Bound));
        let assigned = self.assign_device(key).and_then(|device| {
            let entry = &self.devices[device.0 as usize];
            if !entry.info.capabilities.features.contains(Features::DATAGRAMS) {
                return Err(TransportError::Unsupported { provider: NAME, feature: "datagrams on this device" });
            }
            Ok((device, max_datagram(&port_attr(entry.live()?.context(), port)?)))
        });
        match assigned {
            Ok((device, max)) => Ok((CmId(key), device, max)),
            Err(error) => {
                self.discard(key);
                Err(error)
            }
        }
    }

    /// Creates an id for datagrams, and starts to resolve `peer`.
    pub(super) fn resolve_datagrams(
        &mut self,
        peer: SocketAddr,
        from: Option<SocketAddr>,
        deadline: Instant,
    ) -> Result<CmId> {
        let raw = RawId::create(self.manager()?, Service::Datagram)?;
        if let Some(from) = from {
            raw.bind(&RawAddress::new(from))?;
        }
        self.resolve_on(raw, peer, deadline)
    }

    pub(super) fn address_resolved(&mut self, key: Key, now: Instant) {
        let Some(id) = self.ids.get(key).filter(|id| id.state == IdState::Resolving) else { return };
        let (raw, deadline) = (Arc::clone(&id.raw), id.deadline);
        let timeout = milliseconds_to(deadline, Some(now));
        // True if the id is to join a multicast group. Such an id must not resolve a route before it joins.
        let is_group =
            raw.service() == Service::Datagram && raw.peer_address().is_some_and(|peer| peer.ip().is_multicast());
        let routed = self.assign_device(key).and_then(|device| {
            self.check_port(Some(device), raw.port())?;
            if is_group {
                if let Some(id) = self.ids.get_mut(key) {
                    id.state = IdState::Resolved;
                }
                self.push(key, CmEventKind::Resolved { device });
                return Ok(());
            }
            raw.resolve_route(timeout)
        });
        if let Err(error) = routed {
            if let Some(id) = self.ids.get_mut(key) {
                id.state = IdState::Closed;
            }
            self.push(key, CmEventKind::ConnectFailed(ConnectFailure::System(error.to_string())));
        }
    }

    pub(super) fn connect_request(
        &mut self,
        listener: Key,
        request: &NewCmId,
        private_data: Box<[u8]>,
        read_depth: ReadDepth,
        now: Instant,
    ) {
        let Ok(manager) = self.manager().cloned() else { return };
        // SAFETY: the event has delivered a new id, which nothing else owns.
        let raw = unsafe { RawId::from_raw(request.id, &manager) };
        let Some(listening) = self.ids.get(listener).filter(|id| id.state == IdState::Listening) else {
            // The program has destroyed the listener. Dropping the id of the connect request refuses the peer.
            return;
        };
        // The kernel does not apply the listener's options to the ids of its connect requests, so set the options here.
        set_path(&raw, listening.inherited.0, listening.inherited.1);
        let Some(peer) = raw.peer_address() else { return };
        let mut id = IdEntry::new(Arc::new(raw), IdState::RequestReceived);
        id.read_depth = read_depth;
        let key = self.add(id);
        match self.assign_device(key) {
            Ok(device) => {
                let listener = CmId(listener);
                self.push(key, CmEventKind::ConnectRequest { listener, device, peer, private_data, read_depth });
            }
            Err(error) => {
                peer_log!(self.log_limit, now, Refused, Warn, peer, "{peer} is refused: {error}");
                self.discard(key);
            }
        }
    }
}

/// Sets the type of service and the ack timeout of a connection. Logs an option that the kernel does not support, or does not support for
/// this kind of id.
fn set_path(raw: &RawId, type_of_service: Option<u8>, ack_timeout: Option<u8>) {
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
