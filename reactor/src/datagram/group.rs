//! Multicast groups of an endpoint.

use std::net::IpAddr;

use rdma_transport::cm::CmEventKind;

use super::EndpointId;
use super::endpoint::Membership;
use crate::context::Context;
use crate::core::Core;
use crate::error::{ConnectError, DisconnectReason, Error};
use crate::handler::Handler;

impl Core {
    pub(super) fn join_group(&mut self, id: EndpointId, group: IpAddr) -> Result<(), Error> {
        let endpoint = self.endpoints.open(id).ok_or(Error::Gone("endpoint"))?;
        self.provider.join(endpoint.cm, group)?;
        endpoint.groups.push(Membership { group, peer: None });
        Ok(())
    }

    pub(super) fn leave_group(&mut self, id: EndpointId, group: IpAddr) -> Result<(), Error> {
        let endpoint = self.endpoints.open(id).ok_or(Error::Gone("endpoint"))?;
        self.provider.leave(endpoint.cm, group)?;
        self.forget_group(id, group);
        Ok(())
    }

    /// Whether it was in the group, or joining it.
    fn forget_group(&mut self, id: EndpointId, group: IpAddr) -> bool {
        let Some(endpoint) = self.endpoints.all.get_mut(id.0) else { return false };
        let Some(place) = endpoint.groups.iter().position(|member| member.group == group) else { return false };
        if let Some(peer) = endpoint.groups.swap_remove(place).peer {
            self.forget_peer(peer);
        }
        true
    }

    /// What the connection manager has to say about an endpoint.
    pub(crate) fn endpoint_event<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        id: EndpointId,
        kind: CmEventKind,
    ) {
        match kind {
            CmEventKind::Joined { group, peer } => {
                let waits = |endpoint: &super::endpoint::Endpoint| {
                    endpoint.groups.iter().any(|member| member.group == group && member.peer.is_none())
                };
                if !self.endpoints.all.get(id.0).is_some_and(waits) {
                    return;
                }
                let joined = self.add_peer(id, &peer).map_err(|error| ConnectError::Local(error.to_string()));
                match &joined {
                    Ok(peer) => {
                        if let Some(endpoint) = self.endpoints.all.get_mut(id.0)
                            && let Some(member) = endpoint.groups.iter_mut().find(|member| member.group == group)
                        {
                            member.peer = Some(*peer);
                        }
                    }
                    Err(_) => {
                        if let Err(error) = self.leave_group(id, group) {
                            log::debug!("{id}: {error}");
                        }
                    }
                }
                handler.on_join(&mut Context { core: self }, id, group, joined);
            }
            CmEventKind::JoinFailed { group, reason } => {
                if self.forget_group(id, group) {
                    handler.on_join(&mut Context { core: self }, id, group, Err(ConnectError::Transport(reason)));
                }
            }
            CmEventKind::DeviceRemoval => self.end_endpoint(id, DisconnectReason::DeviceRemoved, true),
            CmEventKind::Disconnected(cause) => self.end_endpoint(id, DisconnectReason::Transport(cause), true),
            other => log::debug!("{id}: {other:?} ignored"),
        }
    }
}
