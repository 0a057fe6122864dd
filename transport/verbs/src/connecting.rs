//! Listening, resolving and connect requests through the connection manager: the options of ids,
//! and the local address of a connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::NAME;
use super::capabilities::{max_datagram, port_attr};
use super::entry::{IdEntry, IdState};
use super::ffi::{RawAddress, local_addresses, scoped_for};
use super::hub::{DeviceHub, milliseconds_to};
use super::id::{ConnectOffer, RawId, Service};
use super::status::{NO_LOOPBACK, connect_failure, is_unreachable};
use rdma_transport::caps::Features;
use rdma_transport::cm::{CmEventKind, CmId, ConnectFailure, ListenParam, PathOptions, ReadDepth, Source};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::DeviceId;

/// The time that an iWARP peer has to close a connection after the local side has disconnected. If
/// the peer has not closed it by then, the local side resets the connection.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);

impl DeviceHub {
    pub(super) fn listen_for(&mut self, service: Service, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        let listen = |error| cannot_listen(address, error);
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
            self.assign_device(key).inspect_err(|_| self.discard(key))?;
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
                    // The device that failed may be another one than `name`, so try the other
                    // addresses, too.
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

    /// Creates an id for datagrams that is bound to `address`. Returns the id, its device, and the
    /// length of the largest datagram that its port can send, in bytes.
    pub(super) fn bind_datagrams(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId, u32)> {
        let raw = RawId::create(self.manager()?, Service::Datagram)?;
        raw.bind(&RawAddress::new(address)).map_err(|error| cannot_listen(address, error))?;
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
        let (device, max) = assigned.inspect_err(|_| self.discard(key))?;
        Ok((CmId(key), device, max))
    }

    /// Sends a connect request.
    pub(super) fn connect_managed(&mut self, id: CmId, offer: ConnectOffer) -> Result<()> {
        let entry = self.id(id)?;
        let min_rnr_timer = offer.min_rnr_timer;
        let (iwarp, raw, device) = (self.is_iwarp(entry), Arc::clone(&entry.raw), entry.device);
        self.check_port(device, raw.port())?;
        let mut refused = None;
        if iwarp {
            let started = self.connector.connect(id.0, raw, offer);
            started.map_err(|source| TransportError::io("starting a thread to connect on", source))?;
        } else if let Err(error) = raw.connect(&offer) {
            match error {
                TransportError::Io { source, .. } => refused = Some(connect_failure(&source)),
                other => return Err(other),
            }
        }
        let entry = self.id_mut(id)?;
        entry.handshaking = iwarp;
        entry.min_rnr_timer = min_rnr_timer;
        entry.state = IdState::Connecting;
        if let Some(failure) = refused {
            entry.state = IdState::Closed;
            self.push(id.0, CmEventKind::ConnectFailed(failure));
            self.connector.wake();
        }
        Ok(())
    }

    /// Accepts a connect request.
    pub(super) fn accept_managed(&mut self, id: CmId, offer: &ConnectOffer) -> Result<()> {
        let entry = self.id(id)?;
        let (iwarp, device, port) = (self.is_iwarp(entry), entry.device, entry.raw.port());
        self.check_port(device, port)?;
        let entry = self.id_mut(id)?;
        entry.raw.accept(offer)?;
        entry.handshaking = iwarp;
        entry.min_rnr_timer = offer.min_rnr_timer;
        entry.read_depth = offer.read_depth;
        entry.state = IdState::Accepting;
        if entry.raw.service() == Service::Datagram {
            // The id is established immediately, because librdmacm reports no event after the
            // answer to a request for datagrams.
            entry.state = IdState::Established;
            let (private_data, read_depth) = (Box::default(), ReadDepth::default());
            self.push(id.0, CmEventKind::Established { private_data, read_depth });
            self.connector.wake();
        } else {
            self.set_min_rnr_timer(id.0);
        }
        Ok(())
    }

    /// Disconnects an id. If the provider waits for an iWARP peer to close the connection, returns
    /// the time at which the queue pair must be put into the error state at the latest. Otherwise
    /// the queue pair is in the error state, and the call returns `None`. A repeated call has no
    /// effect, and returns `None`.
    pub(super) fn disconnect_managed(&mut self, id: CmId, now: Instant) -> Result<Option<Instant>> {
        let entry = self.id(id)?;
        let (iwarp, device, port) = (self.is_iwarp(entry), entry.device, entry.raw.port());
        let up = self.check_port(device, port).is_ok();
        let entry = self.id_mut(id)?;
        let notify_peer = match entry.state {
            IdState::Disconnecting { .. } => return Ok(None),
            IdState::Listening | IdState::WatchingDevice => {
                return Err(TransportError::InvalidState { call: "disconnect", state: entry.state.name() });
            }
            // Do not call `rdma_disconnect` during a handshake on iWARP, because it would block
            // until the handshake has ended. Destroying the id also ends the handshake, on a
            // private thread.
            IdState::Connecting | IdState::Accepting => !entry.handshaking && entry.raw.service() == Service::Connected,
            IdState::Established => entry.raw.service() == Service::Connected,
            // The peer has disconnected first. `rdma_disconnect` answers the peer's disconnect, and
            // fails if the answer is too late.
            IdState::Closed => entry.qp.is_some() && !entry.handshaking,
            IdState::RequestReceived => {
                if up {
                    if let Err(error) = entry.raw.reject(&[]) {
                        log::debug!("{error}");
                    }
                }
                false
            }
            IdState::Bound | IdState::Resolving | IdState::Resolved | IdState::AwaitingRequest => false,
        };
        let mut notified = false;
        if notify_peer && up {
            match entry.raw.disconnect() {
                Ok(()) => notified = true,
                Err(error) => log::debug!("{error}"),
            }
        }
        // On iWARP, let the peer close the connection first. On an iWARP adapter, the error state
        // resets the TCP connection, and the bytes that were sent last may be lost (irdma:
        // `reset_tcp_conn` in the kernel's drivers/infiniband/hw/irdma/verbs.c). Or the adapter
        // refuses the error state while the connection closes (cxgb4: `c4iw_modify_qp` in
        // drivers/infiniband/hw/cxgb4/qp.c).
        if iwarp && notified && entry.state == IdState::Established {
            let until = now + CLOSE_LIMIT;
            entry.state = IdState::Disconnecting { flush_at: Some(until) };
            return Ok(Some(until));
        }
        entry.state = IdState::Disconnecting { flush_at: None };
        if let Err(error) = entry.raw.flush() {
            log::debug!("{error}");
        }
        Ok(None)
    }
}

fn cannot_listen(address: SocketAddr, error: TransportError) -> TransportError {
    match error {
        TransportError::Io { source, .. } => TransportError::Listen { address, source },
        other => other,
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
