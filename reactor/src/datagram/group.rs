//! The multicast groups of an endpoint.

use std::net::IpAddr;

use rdma_transport::cm::{CmEventKind, DisconnectCause};
use rdma_transport::slab::Key;

use super::endpoint::{Endpoint, MulticastMembership};
use super::endpoints::{EndpointEvent, Endpoints};
use super::peer::datagrams;
use crate::driver::Driver;
use crate::error::{ConnectError, DisconnectReason, Error};

impl Endpoints {
    pub(crate) fn join(&mut self, driver: &mut Driver, key: Key, group: IpAddr) -> Result<(), Error> {
        let endpoint = self.get_open(key).ok_or(Error::Gone("endpoint"))?;
        datagrams(driver, endpoint.resources.device)?.join(endpoint.resources.cm.id, group)?;
        endpoint.groups.push(MulticastMembership { group, peer: None });
        Ok(())
    }

    pub(crate) fn leave(&mut self, driver: &mut Driver, key: Key, group: IpAddr) -> Result<(), Error> {
        let endpoint = self.get_open(key).ok_or(Error::Gone("endpoint"))?;
        datagrams(driver, endpoint.resources.device)?.leave(endpoint.resources.cm.id, group)?;
        self.forget_group(driver, key, group);
        Ok(())
    }

    /// Removes a group from an endpoint. Returns `true` if the endpoint was a member of the group or was joining it.
    fn forget_group(&mut self, driver: &mut Driver, key: Key, group: IpAddr) -> bool {
        let Some(endpoint) = self.all.get_mut(key) else { return false };
        let Some(at) = endpoint.groups.iter().position(|member| member.group == group) else { return false };
        if let Some(peer) = endpoint.groups.swap_remove(at).peer.and_then(|peer| peer.key(driver.tag())) {
            self.forget_peer(driver, peer);
        }
        true
    }

    /// Handles a connection-manager event of an endpoint: the result of joining a group, the loss of a membership, or an
    /// event that ends the endpoint (its device is removed, its address has moved, or its id has failed).
    pub(super) fn endpoint_event(&mut self, driver: &mut Driver, key: Key, kind: CmEventKind) {
        let Some(id) = self.all.get(key).map(|endpoint| endpoint.id) else { return };
        match kind {
            CmEventKind::Joined { group, peer } => {
                let waits = |endpoint: &Endpoint| {
                    endpoint.groups.iter().any(|member| member.group == group && member.peer.is_none())
                };
                if !self.all.get(key).is_some_and(waits) {
                    return;
                }
                let joined = self.add_peer(driver, key, &peer).map_err(|error| ConnectError::Local(error.to_string()));
                match &joined {
                    Ok(peer) => {
                        if let Some(endpoint) = self.all.get_mut(key) {
                            if let Some(member) = endpoint.groups.iter_mut().find(|member| member.group == group) {
                                member.peer = Some(*peer);
                            }
                        }
                    }
                    Err(_) => {
                        if let Err(error) = self.leave(driver, key, group) {
                            log::debug!("{id}: {error}");
                        }
                    }
                }
                self.push_event(EndpointEvent::Joined { endpoint: id, group, joined });
            }
            CmEventKind::JoinFailed { group, reason } => {
                if self.forget_group(driver, key, group) {
                    self.push_event(EndpointEvent::Joined {
                        endpoint: id,
                        group,
                        joined: Err(ConnectError::Transport(reason)),
                    });
                }
            }
            CmEventKind::DeviceRemoval => self.end(driver, key, DisconnectReason::DeviceRemoved, true),
            CmEventKind::AddressChange => {
                let why = "the endpoint's address has moved to another device or port".into();
                self.end(driver, key, DisconnectReason::Transport(DisconnectCause::Path(why)), true);
            }
            CmEventKind::Disconnected(cause) => self.end(driver, key, DisconnectReason::Transport(cause), true),
            other => log::debug!("{id}: {other:?} ignored"),
        }
    }
}
