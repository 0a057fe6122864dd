//! [`Device`]: a device in the provider's table.

use std::sync::Arc;

use super::NAME;
use super::capabilities::{self, Limits};
use super::device::{ContextOwner, Driver, RawDevice};
use super::id::RawId;
use super::qp_numbers::QpNumbers;
use super::sys::ibv_context;
use rdma_transport::caps::Features;
use rdma_transport::error::{Result, TransportError};
use rdma_transport::mr::Access;
use rdma_transport::provider::DeviceInfo;
use rdma_transport::slab::Key;

/// A device in the provider's table. Its index in the table is its handle.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) info: DeviceInfo,
    pub(super) limits: Limits,
    /// The open device. `None` after the device was removed and closed.
    pub(super) raw: Option<Arc<RawDevice>>,
    /// True after the device was removed.
    pub(super) removed: bool,
    /// The number of the program's ids on the device. The provider's private id does not count.
    pub(super) ids: usize,
    /// The provider's private id on the device, which receives the event of the device's removal. `None` if the device
    /// was opened without the connection manager.
    pub(super) watch: Option<Key>,
    /// The number of armed completion queues of the device.
    pub(super) armed: usize,
    /// The queue pairs of the device, by their numbers.
    pub(super) numbers: QpNumbers,
    /// The ports that ids use or have used, by number. The bool is true if the last event or query
    /// of the port reported that it is down.
    ports: Vec<(u8, bool)>, // local: ports of the device
    /// Ids that are destroyed when their port is up again, each with the number of the port.
    pub(super) waiting_for_port: Vec<(u8, Arc<RawId>)>, // bound: ending-ids
}

impl Device {
    /// Opens the objects that the provider needs on the device of `context`. The attributes of
    /// `port` limit the capabilities. `managed` is true if librdmacm has opened the context.
    ///
    /// # Safety
    /// `context` stays live while `context_owner` exists.
    pub(super) unsafe fn open(
        context: *mut ibv_context,
        context_owner: ContextOwner,
        port: u8,
        managed: bool,
    ) -> Result<Self> {
        // SAFETY: the caller promises that the context stays live while its owner exists.
        let raw = unsafe { RawDevice::open(context, context_owner, managed) }?;
        let limits = Limits::of(&raw);
        let capabilities = capabilities::query(&raw, &limits, port)?;
        let info = DeviceInfo { name: raw.name.to_string(), capabilities };
        Ok(Self {
            info,
            limits,
            raw: Some(Arc::new(raw)),
            removed: false,
            ids: 0,
            watch: None,
            armed: 0,
            numbers: QpNumbers::default(),
            ports: Vec::new(),
            waiting_for_port: Vec::new(),
        })
    }

    /// Returns the open device. Returns an error if the device was removed.
    pub(super) fn live(&self) -> Result<&Arc<RawDevice>> {
        self.raw
            .as_ref()
            .filter(|_| !self.removed)
            .ok_or_else(|| TransportError::NoDevice { reason: format!("{} was removed", self.info.name) })
    }

    /// Records that a port is down, or that it is up.
    pub(super) fn set_down(&mut self, port: u8, down: bool) {
        match self.ports.iter_mut().find(|known| known.0 == port) {
            Some(known) => known.1 = down,
            None => self.ports.push((port, down)),
        }
    }

    /// Returns true if a port is down.
    ///
    /// - If the port was up at its last event or query, the call does not query the device, because
    ///   a query is a command to the firmware.
    /// - If the port was down, the call queries the device: not every driver sends an event when
    ///   the carrier of a port changes (irdma sends none), and an event may be lost.
    /// - On rxe the event may arrive late, so each call queries the device, and queries it again if
    ///   the port seems to be up. rxe reads the state of the port before it waits until a change of
    ///   the network interface is complete. So a query that begins during the change returns the
    ///   old state (`rxe_query_port` in Linux 6.1).
    pub(super) fn is_down(&mut self, port: u8) -> bool {
        let is_rxe = self.limits.driver == Driver::Rxe;
        let known = self.ports.iter().find(|known| known.0 == port);
        if known.is_some_and(|known| !known.1) && !is_rxe {
            return false;
        }
        let Some(raw) = &self.raw else { return false };
        let query = || capabilities::port_state(raw.context(), port).is_ok_and(|state| state == Err("down"));
        let down = query() || (is_rxe && query());
        self.set_down(port, down);
        down
    }

    /// Returns the open device. Returns an error if the device does not support regions with the
    /// rights `access`, or was removed.
    pub(super) fn check_access(&self, access: Access) -> Result<&Arc<RawDevice>> {
        let features = self.info.capabilities.features;
        if access.contains(Access::REMOTE_ATOMIC) && !features.contains(Features::ATOMICS) {
            return Err(TransportError::Unsupported { provider: NAME, feature: "atomic operations on this device" });
        }
        if access.contains(Access::DIRECT) {
            return Err(TransportError::Unsupported {
                provider: NAME,
                feature: "direct regions: those are for peers of one host",
            });
        }
        if access.contains(Access::ON_DEMAND) && !features.contains(Features::ON_DEMAND_PAGING) {
            return Err(TransportError::Unsupported { provider: NAME, feature: "on-demand paging on this device" });
        }
        self.live()
    }
}
