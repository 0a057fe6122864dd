//! The queue pair of a connection, and the features that its two sides agree on.

use std::net::SocketAddr;

use log::Level;
use rdma_transport::QpAttr;
use rdma_transport::caps::Features;
use rdma_transport::cm::CmId;
use rdma_transport::log_limit::NOBODY;

use crate::config::Framing;
use crate::conn::greeting::{Greeting, MAX_USER_PRIVATE_DATA};
use crate::conn::recv_queue::RecvQueue;
use crate::driver::World;
use crate::driver::run::data_path::post_own_receives;
use crate::driver::stages::Stages;
use crate::driver::table::DeviceBinding;
use crate::error::{Error, RejectReason};
use crate::id::ConnectionId;
use crate::limits::buffer_len;
use crate::providers::{Handle, SHARED_MEMORY};

impl World {
    /// Creates the queue pair of a connection on the device `index`, and posts its receives.
    pub(crate) fn create_queue_pair(&mut self, id: ConnectionId, index: usize) -> Result<(), Error> {
        let Self { table, devices, providers, config, now, stages, .. } = self;
        let slot = table.get_mut(id).ok_or(Error::Gone("connection"))?;
        let sharing = config.shared_receives.filter(|_| slot.conn.framing() == Framing::Credits);
        stages.insert(Stages::CHANNELS);
        devices.use_device(index, providers, config);
        if let Some(receives) = sharing {
            devices.settle_shared(providers);
            let device = devices.get_mut(index).ok_or(Error::Gone("device"))?;
            device.share_receives(providers.of_device(index), receives)?;
        }
        let (provider, cm) = providers.of(slot.link.cm);
        let device = devices.get_mut(index).filter(|device| !device.removed).ok_or(Error::Gone("device"))?;
        let room = device.claim(provider, config, sharing)?;
        let cq = device.cqs[room.cq].id;
        let attr = QpAttr { send_cq: cq, recv_cq: cq, ..device.queues };
        let made = match (&mut device.buffers.shared, sharing) {
            (Some(shared), Some(receives)) => match shared.claims.join(*now) {
                Some(claim) => match provider.create_qp(cm, &QpAttr { srq: Some(shared.srq()), ..attr }) {
                    Ok(qp) => {
                        shared.own(qp, id);
                        let window = claim.receives();
                        Ok((qp, RecvQueue::shared(claim), window))
                    }
                    Err(error) => {
                        shared.claims.take_back(claim.receives());
                        Err(error.into())
                    }
                },
                None => Err(Error::Limit { limit: "shared_receives", value: receives.into() }),
            },
            _ => {
                let size = match slot.conn.framing() {
                    Framing::Credits => buffer_len(device.buffer_size),
                    Framing::Raw => device.buffer_size as usize,
                };
                let receives = RecvQueue::own(attr.max_recv_wr, size);
                provider.create_qp(cm, &attr).map(|qp| (qp, receives, 0)).map_err(Error::from)
            }
        };
        let (qp, receives, window) = match made {
            Ok(made) => made,
            Err(error) => {
                device.release(room, 0, None);
                return Err(error);
            }
        };
        let immediate = provider.immediate_sends().is_some();
        slot.conn.set_queues((attr.max_send_wr, immediate), receives, window);
        (slot.link.binding, slot.link.qp) = (Some(DeviceBinding { device: index, room }), Some(qp));
        if sharing.is_none() {
            let mut chain = self.devices.take_receive_chain();
            let posted = match self.at_with_provider(id) {
                Some((slot, mut env, provider)) => post_own_receives(slot, &mut env, provider, qp, &mut chain),
                None => Ok(()),
            };
            self.devices.put_receive_chain(chain);
            posted?;
            // The greeting will grant these receives to the peer.
            self.pass(id, |conn, _| conn.grant_initial(attr.max_recv_wr));
        }
        Ok(())
    }

    /// Records and logs whether an established connection uses shared memory.
    pub(crate) fn note_carried(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get(id) else { return };
        let Some(qp) = slot.link.qp else { return };
        if self.providers.note_carried(slot.link.cm.provider, qp) {
            let (peer, limit) = (slot.conn.peer(), &mut self.effects.log_limit);
            peer_log!(limit, self.now, Carried, Info, peer, "{id}: the peer is on this host: over {SHARED_MEMORY}");
        }
    }

    /// Creates the queue pair of a connection whose address is resolved, posts its receives, and
    /// sends the connect request.
    pub(crate) fn resolved(&mut self, id: ConnectionId, device: usize) -> Result<(), Error> {
        if !self.table.get_mut(id).is_some_and(|slot| slot.conn.resolved()) {
            return Ok(());
        }
        self.create_queue_pair(id, device)?;
        let (own, extensions) = (self.buffer_size_of(id), self.offers_extensions(id));
        let Some(slot) = self.table.get_mut(id) else { return Ok(()) };
        let private_data = slot.conn.request(own, extensions, &self.config);
        let (provider, cm) = self.providers.of(slot.link.cm);
        provider.connect(cm, &slot.link.service.param(&private_data, slot.conn.framing()))?;
        Ok(())
    }

    /// Returns true if the device of a connection has extensions, which can be used only if the
    /// peer supports them too.
    fn offers_extensions(&self, id: ConnectionId) -> bool {
        let device = self.table.get(id).and_then(|slot| self.devices.get(slot.link.binding?.device));
        let info = device.and_then(|device| self.providers.get_of_device(device.index()).device(device.id));
        info.is_some_and(|info| info.capabilities.features.contains(Features::EXTENSIONS_BY_AGREEMENT))
    }

    /// Enables the extensions on a connection, if its peer supports them: `offered` is true if the
    /// peer's greeting says so. With `Framing::Raw`, there is no greeting, so only a declaration of
    /// the program enables them. Returns false if the peer or the local device does not have the
    /// extensions, or if enabling them failed.
    pub(crate) fn agree_on_extensions(&mut self, id: ConnectionId, offered: bool) -> bool {
        let Some(slot) = self.table.get(id).filter(|_| self.offers_extensions(id)) else { return false };
        let declared = slot.conn.framing() == Framing::Raw && slot.link.service.extensions;
        let Some(qp) = slot.link.qp.filter(|_| offered || declared) else { return false };
        let role = self.providers.numbered(slot.link.cm.provider).extensions();
        role.is_some_and(|role| role.enable_extensions(qp).is_ok())
    }

    /// Returns the largest payload of one buffer on the device of a connection, in bytes.
    pub(crate) fn buffer_size_of(&self, id: ConnectionId) -> u32 {
        let device = self.table.get(id).and_then(|slot| self.devices.get(slot.link.binding?.device));
        device.map_or(self.config.buffer_size, |device| device.buffer_size)
    }

    /// Logs that a request is refused. The number of such log lines per host is limited.
    pub(crate) fn log_refusal(&mut self, peer: SocketAddr, level: Level, why: &str) {
        let (limit, now) = (&mut self.effects.log_limit, self.now);
        peer_log!(limit, now, Refused, level, peer, "{peer} is refused: {why}");
    }

    /// Rejects a request and destroys its connection-manager id. `user` is the program's private
    /// data for the peer.
    pub(crate) fn reject(&mut self, cm: Handle<CmId>, framing: Framing, reason: RejectReason, user: &[u8]) {
        self.stats.connections.refused += 1;
        let fits = user.len() <= MAX_USER_PRIVATE_DATA;
        if !fits {
            let (len, max, limit) = (user.len(), MAX_USER_PRIVATE_DATA, &mut self.effects.log_limit);
            peer_log!(limit, self.now, Failed, Error, NOBODY, "{len} bytes of private data: at most {max} fit");
        }
        let user = if fits { user } else { &[] };
        let data = match framing {
            Framing::Raw => user.to_vec(),
            Framing::Credits => Greeting::reject(reason, user).emit(),
        };
        let (provider, id) = self.providers.of(cm);
        if let Err(error) = provider.reject(id, &data, self.now) {
            log::debug!("rejecting: {error}");
            self.discard(cm);
        }
    }
}
