//! Unreliable datagrams: connection-manager ids for datagrams, address handles, and multicast groups.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use super::NAME;
use super::address::{Address, RawAddressHandle};
use super::capabilities::{max_datagram, port_attr};
use super::core::Verbs;
use super::entry::{IdEntry, IdState};
use super::ffi::{RawAddress, check};
use super::id::{RawId, Service};
use super::route::route;
use super::sys::{ibv_ah_attr, ibv_grh, ibv_init_ah_from_wc, ibv_wc, ibv_wc_flags};
use crate::caps::Features;
use crate::cm::{CmEventKind, CmId, ConnectFailure, ConnectParam};
use crate::datagram::{AddressId, DatagramPeer, DatagramSource, GRH_LEN, Route};
use crate::error::{Result, TransportError};
use crate::provider::DeviceId;
use crate::qp::QpId;
use crate::slab::Key;
use crate::wc::WorkCompletion;

/// The maximum number of multicast groups of an id.
const GROUPS: usize = 64;

impl Verbs {
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

    /// Answers a peer's connect request with the number of the queue pair `qp`, and destroys the id of the request.
    pub(super) fn answer_datagram_request(&mut self, id: CmId, qp: QpId, private_data: &[u8]) -> Result<()> {
        let entry = self.id(id)?;
        if entry.state != IdState::RequestReceived || entry.raw.service() != Service::Datagram {
            return Err(TransportError::InvalidState { call: "answer_datagram", state: entry.state.name() });
        }
        let (device, raw) = (entry.device, Arc::clone(&entry.raw));
        let number = self.ids.get(qp.0).filter(|id| id.device == device).and_then(|id| id.qp.as_ref());
        let number =
            number.map(|qp| qp.number).ok_or(TransportError::Stale { object: "queue pair on the same device" });
        let answered = number.and_then(|number| {
            let param = ConnectParam { private_data, ..ConnectParam::default() };
            let offer = self.offer(self.id(id)?, &param, None)?;
            self.check_port(device, raw.port())?;
            raw.accept_for(&offer, number)
        });
        if let Some(entry) = self.ids.get_mut(id.0).filter(|_| answered.is_ok()) {
            entry.state = IdState::Established;
        }
        drop(raw);
        self.discard(id.0);
        answered
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

    fn datagram_id(&mut self, id: CmId, call: &'static str) -> Result<&mut IdEntry> {
        let entry = self.id_mut(id)?;
        match entry.raw.service() {
            Service::Connected => Err(TransportError::InvalidState { call, state: "not for datagrams" }),
            Service::Datagram if entry.qp.is_none() => {
                Err(TransportError::InvalidState { call, state: "without a queue pair" })
            }
            Service::Datagram => Ok(entry),
        }
    }

    pub(super) fn join_group(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let entry = self.datagram_id(id, "join")?;
        if entry.groups.iter().flatten().any(|&(joined, _)| joined == group) {
            return Err(TransportError::InvalidState { call: "join", state: "in that group, or about to be" });
        }
        let slot = entry.groups.iter().position(Option::is_none).unwrap_or(entry.groups.len());
        if slot >= GROUPS {
            let (value, range) = (slot as u64 + 1, "at most 64");
            return Err(TransportError::OutOfRange { what: "multicast groups of an id", value, range });
        }
        let device = entry.device;
        let raw = Arc::clone(&entry.raw);
        let features = device.and_then(|device| self.devices.get(device.0 as usize)).map(|device| &device.info);
        if !features.is_some_and(|info| info.capabilities.features.contains(Features::MULTICAST)) {
            return Err(TransportError::Unsupported { provider: NAME, feature: "multicast groups on this device" });
        }
        self.joins = self.joins.wrapping_add(1);
        let number = self.joins;
        raw.join(group, number)?;
        let entry = self.id_mut(id)?;
        if slot == entry.groups.len() {
            entry.groups.push(None);
        }
        entry.groups[slot] = Some((group, number));
        Ok(())
    }

    pub(super) fn leave_group(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let entry = self.datagram_id(id, "leave")?;
        let joined = entry.groups.iter_mut().find(|joined| joined.is_some_and(|(joined, _)| joined == group));
        let Some(joined) = joined else {
            return Err(TransportError::InvalidState { call: "leave", state: "not in that group" });
        };
        *joined = None;
        entry.raw.leave(group)
    }

    pub(super) fn join_ended(&mut self, key: Key, number: usize, status: i32, peer: Option<DatagramPeer>) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let slot = id.groups.iter_mut().find(|joined| joined.is_some_and(|(_, joined)| joined == number));
        // If no slot of the id's `groups` has the number of this join, the program has already left the group.
        let Some(slot) = slot else { return };
        let Some((group, _)) = *slot else { return };
        match peer {
            Some(peer) => self.push(key, CmEventKind::Joined { group, peer }),
            None => {
                *slot = None;
                // After a failed join the library keeps the group until the id leaves it.
                if let Err(error) = id.raw.leave(group) {
                    log::debug!("{error}");
                }
                let error = std::io::Error::from_raw_os_error(status.saturating_abs());
                self.push(key, CmEventKind::JoinFailed { group, reason: ConnectFailure::System(error.to_string()) });
            }
        }
    }

    pub(super) fn make_address(&mut self, device: DeviceId, route: &Route) -> Result<AddressId> {
        let raw = RawAddressHandle::create(self.live_device(device)?.live()?, route)?;
        Ok(AddressId(self.addresses.insert(Address { raw: Some(raw), device: device.0 })))
    }

    pub(super) fn route_to_sender(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
        let raw = &self.id(id)?.raw;
        if raw.context().is_null() {
            return Err(TransportError::InvalidState { call: "route_back", state: "on no device" });
        }
        // SAFETY: all fields are numbers, for which zeros are valid.
        let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
        let DatagramSource { qp_number, lid, service_level, path_bits } = received.source;
        (wc.src_qp, wc.slid, wc.sl, wc.dlid_path_bits) = (qp_number, lid, service_level, path_bits & 0x7f);
        if received.source.has_route_header() {
            wc.wc_flags = ibv_wc_flags::IBV_WC_GRH.0;
        }
        // SAFETY: `header` has the size of the structure, in which any bytes are valid.
        let mut grh: ibv_grh = unsafe { std::ptr::read_unaligned(header.as_ptr().cast()) };
        // SAFETY: all fields are numbers, for which zeros are valid.
        let mut attr: ibv_ah_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is live, because an id is on the device. The library reads and writes the other arguments
        // during the call.
        let rc = unsafe { ibv_init_ah_from_wc(raw.context(), raw.port(), &raw mut wc, &raw mut grh, &raw mut attr) };
        check("ibv_init_ah_from_wc", rc)?;
        Ok(route(&attr))
    }

    /// Leaves all multicast groups of an id, because a queue pair that is in a group cannot be destroyed.
    pub(super) fn leave_all(&mut self, key: Key) {
        let Some(id) = self.ids.get_mut(key) else { return };
        for (group, _) in id.groups.drain(..).flatten() {
            if let Err(error) = id.raw.leave(group) {
                log::debug!("{error}");
            }
        }
    }
}
