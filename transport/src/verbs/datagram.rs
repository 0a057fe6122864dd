//! Datagrams: address handles, multicast groups, ids of the datagram kind.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use rdma_sys::{
    ibv_ah, ibv_ah_attr, ibv_create_ah, ibv_destroy_ah, ibv_gid, ibv_global_route, ibv_grh, ibv_init_ah_from_wc,
    ibv_wc, ibv_wc_flags,
};

use super::NAME;
use super::device::RawDevice;
use super::ffi::{check, non_null};
use super::id::{Id, RawId, Service, State};
use super::provider::Verbs;
use crate::caps::Features;
use crate::cm::{CmEventKind, CmId, ConnectFailure, ConnectParam};
use crate::datagram::{AddressId, DatagramPeer, DatagramSource, GRH_LEN, Route};
use crate::error::{Error, Result};
use crate::provider::DeviceId;
use crate::qp::QpId;
use crate::slab::Key;
use crate::wc::WorkCompletion;

/// Groups an id may be in.
const GROUPS: usize = 64;

/// The one owner of an address handle.
#[derive(Debug)]
pub(super) struct RawAddressHandle {
    raw: *mut ibv_ah,
    _device: Arc<RawDevice>,
}

// SAFETY: a handle belongs to no thread; it is destroyed once, by its owner.
unsafe impl Send for RawAddressHandle {}

impl RawAddressHandle {
    fn create(device: &Arc<RawDevice>, route: &Route) -> Result<Self> {
        let mut attr = ah_attr(route);
        // SAFETY: a live domain; the attributes are read during the call.
        let raw = unsafe { ibv_create_ah(device.protection_domain(), &raw mut attr) };
        Ok(Self { raw: non_null("ibv_create_ah", raw)?, _device: Arc::clone(device) })
    }

    pub(super) const fn as_ptr(&self) -> *mut ibv_ah {
        self.raw
    }
}

impl Drop for RawAddressHandle {
    fn drop(&mut self) {
        // SAFETY: destroyed once, before the device.
        if let Err(error) = check("ibv_destroy_ah", unsafe { ibv_destroy_ah(self.raw) }) {
            log::warn!("{error}");
        }
    }
}

/// An address handle of the provider; on a device that was removed there is none any more.
#[derive(Debug)]
pub(super) struct Address {
    pub(super) raw: Option<RawAddressHandle>,
    pub(super) device: u32,
}

fn ah_attr(route: &Route) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: route.gid },
            flow_label: route.flow_label,
            sgid_index: route.source_gid_index,
            hop_limit: route.hop_limit,
            traffic_class: route.traffic_class,
        },
        dlid: route.lid,
        sl: route.service_level,
        src_path_bits: route.path_bits,
        static_rate: route.static_rate,
        is_global: route.is_global.into(),
        port_num: route.port,
    }
}

pub(super) fn route(attr: &ibv_ah_attr) -> Route {
    Route {
        // SAFETY: every variant of a GID is 16 bytes.
        gid: unsafe { attr.grh.dgid.raw },
        is_global: attr.is_global != 0,
        source_gid_index: attr.grh.sgid_index,
        flow_label: attr.grh.flow_label,
        hop_limit: attr.grh.hop_limit,
        traffic_class: attr.grh.traffic_class,
        lid: attr.dlid,
        service_level: attr.sl,
        path_bits: attr.src_path_bits,
        static_rate: attr.static_rate,
        port: attr.port_num,
    }
}

impl Verbs {
    /// An id of the datagram kind at `address`.
    pub(super) fn bind_datagrams(&mut self, address: SocketAddr) -> Result<(CmId, DeviceId)> {
        let raw = RawId::create(&self.channel, Service::Datagram)?;
        raw.bind(address).map_err(|error| match error {
            Error::Io { source, .. } => Error::Listen { address, source },
            other => other,
        })?;
        if raw.context().is_null() {
            let reason = format!("{} is on none: datagrams need the address of a device", address.ip());
            return Err(Error::NoDevice { reason });
        }
        let key = self.add(Id::new(Arc::new(raw), State::Bound));
        let landed = self.land(key).and_then(|device| {
            if self.devices[device.0 as usize].info.capabilities.features.contains(Features::DATAGRAMS) {
                Ok(device)
            } else {
                Err(Error::Unsupported { provider: NAME, feature: "datagrams on this device" })
            }
        });
        match landed {
            Ok(device) => Ok((CmId(key), device)),
            Err(error) => {
                self.remove(key);
                Err(error)
            }
        }
    }

    /// Tells a peer that asks where to send to, and forgets it.
    pub(super) fn answer_for(&mut self, id: CmId, qp: QpId, private_data: &[u8]) -> Result<()> {
        let entry = self.id(id)?;
        if entry.state != State::Offered || entry.raw.service() != Service::Datagram {
            return Err(Error::InvalidState { call: "answer_datagram", state: entry.state.name() });
        }
        let (device, raw) = (entry.device, Arc::clone(&entry.raw));
        let number = self.ids.get(qp.0).filter(|id| id.device == device).and_then(|id| id.qp.as_ref());
        let number = number.map(|qp| qp.number).ok_or(Error::Stale { object: "queue pair on the same device" });
        let answered = number.and_then(|number| {
            let param = ConnectParam { private_data, ..ConnectParam::default() };
            let terms = self.terms(self.id(id)?, &param, None)?;
            self.check_port(device)?;
            raw.accept_for(&terms, number)
        });
        if let Some(entry) = self.ids.get_mut(id.0).filter(|_| answered.is_ok()) {
            entry.state = State::Established;
        }
        drop(raw);
        self.remove(id.0);
        answered
    }

    /// An id of the datagram kind that resolves `peer`.
    pub(super) fn resolve_datagrams(
        &mut self,
        peer: SocketAddr,
        from: Option<SocketAddr>,
        deadline: Instant,
    ) -> Result<CmId> {
        let raw = RawId::create(&self.channel, Service::Datagram)?;
        if let Some(from) = from {
            raw.bind(from)?;
        }
        self.resolve_on(raw, peer, deadline)
    }

    fn datagram_id(&mut self, id: CmId, call: &'static str) -> Result<&mut Id> {
        let entry = self.id_mut(id)?;
        match entry.raw.service() {
            Service::Connected => Err(Error::InvalidState { call, state: "not for datagrams" }),
            Service::Datagram if entry.qp.is_none() => Err(Error::InvalidState { call, state: "without a queue pair" }),
            Service::Datagram => Ok(entry),
        }
    }

    pub(super) fn join_group(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let entry = self.datagram_id(id, "join")?;
        if entry.groups.iter().flatten().any(|&(joined, _)| joined == group) {
            return Err(Error::InvalidState { call: "join", state: "in that group, or about to be" });
        }
        let place = entry.groups.iter().position(Option::is_none).unwrap_or(entry.groups.len());
        if place >= GROUPS {
            let (value, range) = (place as u64 + 1, "at most 64");
            return Err(Error::OutOfRange { what: "multicast groups of an id", value, range });
        }
        let device = entry.device;
        let raw = Arc::clone(&entry.raw);
        let features = device.and_then(|device| self.devices.get(device.0 as usize)).map(|device| &device.info);
        if !features.is_some_and(|info| info.capabilities.features.contains(Features::MULTICAST)) {
            return Err(Error::Unsupported { provider: NAME, feature: "multicast groups on this device" });
        }
        self.joins = self.joins.wrapping_add(1);
        let number = self.joins;
        raw.join(group, number)?;
        let entry = self.id_mut(id)?;
        if place == entry.groups.len() {
            entry.groups.push(None);
        }
        entry.groups[place] = Some((group, number));
        Ok(())
    }

    pub(super) fn leave_group(&mut self, id: CmId, group: IpAddr) -> Result<()> {
        let entry = self.datagram_id(id, "leave")?;
        let joined = entry.groups.iter_mut().find(|joined| joined.is_some_and(|(joined, _)| joined == group));
        let Some(joined) = joined else {
            return Err(Error::InvalidState { call: "leave", state: "not in that group" });
        };
        *joined = None;
        entry.raw.leave(group)
    }

    pub(super) fn join_ended(&mut self, key: Key, number: usize, status: i32, peer: Option<DatagramPeer>) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let place = id.groups.iter_mut().find(|joined| joined.is_some_and(|(_, joined)| joined == number));
        // Left meanwhile, if there is none.
        let Some(place) = place else { return };
        let Some((group, _)) = *place else { return };
        match peer {
            Some(peer) => self.push(key, CmEventKind::Joined { group, peer }),
            None => {
                *place = None;
                // The library keeps a group that failed, until it is left.
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

    pub(super) fn way_back(&self, id: CmId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
        let raw = &self.id(id)?.raw;
        if raw.context().is_null() {
            return Err(Error::InvalidState { call: "route_back", state: "on no device" });
        }
        // SAFETY: all fields are numbers.
        let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
        let DatagramSource { qp_number, lid, service_level, path_bits } = received.source;
        (wc.src_qp, wc.slid, wc.sl, wc.dlid_path_bits) = (qp_number, lid, service_level, path_bits & 0x7f);
        if received.source.has_route_header() {
            wc.wc_flags = ibv_wc_flags::IBV_WC_GRH.0;
        }
        // SAFETY: as many bytes, without a value that is not good.
        let mut grh: ibv_grh = unsafe { std::ptr::read_unaligned(header.as_ptr().cast()) };
        // SAFETY: all fields are numbers.
        let mut attr: ibv_ah_attr = unsafe { std::mem::zeroed() };
        // SAFETY: a live context: an id is on it. The rest is read and written during the call.
        let rc = unsafe { ibv_init_ah_from_wc(raw.context(), raw.port(), &raw mut wc, &raw mut grh, &raw mut attr) };
        check("ibv_init_ah_from_wc", rc)?;
        Ok(route(&attr))
    }

    /// An id goes that may be in groups: a queue pair that is in one cannot be destroyed.
    pub(super) fn leave_all(&mut self, key: Key) {
        let Some(id) = self.ids.get_mut(key) else { return };
        for (group, _) in id.groups.drain(..).flatten() {
            if let Err(error) = id.raw.leave(group) {
                log::debug!("{error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_survives_as_attributes() {
        let wanted = Route {
            gid: *b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x4d\x02\x01",
            is_global: true,
            source_gid_index: 1,
            flow_label: 7,
            hop_limit: 64,
            traffic_class: 3,
            lid: 9,
            service_level: 2,
            path_bits: 1,
            static_rate: 4,
            port: 1,
        };
        assert_eq!(route(&ah_attr(&wanted)), wanted);
    }
}
