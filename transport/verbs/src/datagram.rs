//! Unreliable datagrams: multicast groups, and the route to the sender of a datagram.

use std::net::IpAddr;

use super::NAME;
use super::entry::{IdEntry, IdState};
use super::ffi::check;
use super::id::{RawId, Service};
use super::route::route;
use super::sys::{ibv_ah_attr, ibv_grh, ibv_init_ah_from_wc, ibv_wc, ibv_wc_flags};
use rdma_transport::cm::{CmEventKind, ConnectFailure};
use rdma_transport::datagram::{DatagramPeer, DatagramSource, GRH_LEN, Route};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::wc::WorkCompletion;

/// Status codes in a SIDR reply (`ib_cm.h`). With a SIDR reply, a peer names its queue pair for
/// datagrams, or refuses to name one.
const SIDR_UNSUPPORTED: i32 = 1;
const SIDR_REJECT: i32 = 2;
/// The maximum number of multicast groups of an id.
const GROUPS: usize = 64;

impl IdEntry {
    /// Returns an error if the id is not for datagrams, or has no queue pair.
    fn check_datagrams(&self, call: &'static str) -> Result<()> {
        match self.raw.service() {
            Service::Connected => Err(TransportError::InvalidState { call, state: "not for datagrams" }),
            Service::Datagram if self.qp.is_none() => {
                Err(TransportError::InvalidState { call, state: "without a queue pair" })
            }
            Service::Datagram => Ok(()),
        }
    }

    /// Joins a multicast group. `multicast` is true if the device supports multicast groups.
    /// `joins` counts the joins of the provider. The call increments it, and its new value is the
    /// number of this join.
    pub(super) fn join_group(&mut self, group: IpAddr, multicast: bool, joins: &mut usize) -> Result<()> {
        self.check_datagrams("join")?;
        if self.groups.iter().flatten().any(|&(joined, _)| joined == group) {
            return Err(TransportError::InvalidState { call: "join", state: "in that group, or about to be" });
        }
        let slot = self.groups.iter().position(Option::is_none).unwrap_or(self.groups.len());
        if slot >= GROUPS {
            let (value, range) = (slot as u64 + 1, "at most 64");
            return Err(TransportError::OutOfRange { what: "multicast groups of an id", value, range });
        }
        if !multicast {
            return Err(TransportError::Unsupported { provider: NAME, feature: "multicast groups on this device" });
        }
        *joins = joins.wrapping_add(1);
        self.raw.join(group, *joins)?;
        if slot == self.groups.len() {
            self.groups.push(None);
        }
        self.groups[slot] = Some((group, *joins));
        Ok(())
    }

    pub(super) fn leave_group(&mut self, group: IpAddr) -> Result<()> {
        self.check_datagrams("leave")?;
        let joined = self.groups.iter_mut().find(|joined| joined.is_some_and(|(joined, _)| joined == group));
        let Some(joined) = joined else {
            return Err(TransportError::InvalidState { call: "leave", state: "not in that group" });
        };
        *joined = None;
        self.raw.leave(group)
    }

    /// Processes the result of a join, or the later loss of the membership. `number` is the number
    /// of the join. `peer` is the destination of datagrams to the group; `None` after a failure.
    pub(super) fn join_ended(&mut self, number: usize, status: i32, peer: Option<DatagramPeer>) -> Option<CmEventKind> {
        // If no slot of the id's `groups` has the number of this join, the program has already left the group.
        let slot = self.groups.iter_mut().find(|joined| joined.is_some_and(|(_, joined)| joined == number))?;
        let (group, _) = (*slot)?;
        if let Some(peer) = peer {
            return Some(CmEventKind::Joined { group, peer });
        }
        *slot = None;
        // After a failed join the library keeps the group until the id leaves it.
        if let Err(error) = self.raw.leave(group) {
            log::debug!("{error}");
        }
        let error = std::io::Error::from_raw_os_error(status.saturating_abs());
        Some(CmEventKind::JoinFailed { group, reason: ConnectFailure::System(error.to_string()) })
    }

    /// Processes a SIDR reply in which the peer refuses to name a queue pair.
    pub(super) fn datagrams_refused(&mut self, status: i32, private_data: Box<[u8]>) -> Option<CmEventKind> {
        let outcome = match status {
            SIDR_UNSUPPORTED => CmEventKind::ConnectFailed(ConnectFailure::Refused),
            SIDR_REJECT => CmEventKind::Rejected { private_data },
            other => {
                CmEventKind::ConnectFailed(ConnectFailure::System(format!("the peer refuses with status {other}")))
            }
        };
        if self.state != IdState::Connecting {
            return None;
        }
        self.state = IdState::Closed;
        Some(outcome)
    }

    /// Leaves all multicast groups, because a queue pair that is in a group cannot be destroyed.
    pub(super) fn leave_all(&mut self) {
        for (group, _) in self.groups.drain(..).flatten() {
            if let Err(error) = self.raw.leave(group) {
                log::debug!("{error}");
            }
        }
    }
}

/// Returns the route back to the sender of a datagram that the id has received.
pub(super) fn route_to_sender(raw: &RawId, received: &WorkCompletion, header: &[u8; GRH_LEN]) -> Result<Route> {
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
    // SAFETY: the context is live, because an id is on the device. The library reads and writes the
    // other arguments during the call.
    let rc = unsafe { ibv_init_ah_from_wc(raw.context(), raw.port(), &raw mut wc, &raw mut grh, &raw mut attr) };
    check("ibv_init_ah_from_wc", rc)?;
    Ok(route(&attr))
}
