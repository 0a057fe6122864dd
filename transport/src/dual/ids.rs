//! The ids of two providers as ids of one.

use crate::cm::{CmEvent, CmEventKind, CmId};
use crate::event::{DeviceEvent, DeviceEventKind};
use crate::handle::{CqId, DeviceId, MrId, QpId, SrqId};
use crate::slab::Key;

/// One of the two providers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Devices = 0,
    Embedded = 1,
}

impl Side {
    pub(super) const fn other(self) -> Self {
        match self {
            Self::Devices => Self::Embedded,
            Self::Embedded => Self::Devices,
        }
    }

    /// A key of this provider, as a key of both.
    #[inline]
    pub(super) const fn outer(self, key: Key) -> Key {
        Key::new(key.slot() << 1 | self as u32, key.generation())
    }

    /// Number of a device of this provider, as one of both.
    pub(super) const fn outer_device(self, device: DeviceId) -> DeviceId {
        match self {
            Self::Devices => DeviceId(device.0.wrapping_add(1)),
            Self::Embedded => DeviceId(0),
        }
    }

    /// An event of a device of this provider, in ids of both.
    pub(super) const fn outer_event(self, event: DeviceEvent) -> DeviceEvent {
        let kind = match event.kind {
            DeviceEventKind::SharedReceivesLow(srq) => DeviceEventKind::SharedReceivesLow(SrqId(self.outer(srq.0))),
            DeviceEventKind::SharedReceiveQueueFailed(srq) => {
                DeviceEventKind::SharedReceiveQueueFailed(SrqId(self.outer(srq.0)))
            }
            DeviceEventKind::LastReceive(qp) => DeviceEventKind::LastReceive(QpId(self.outer(qp.0))),
            other => other,
        };
        DeviceEvent { device: self.outer_device(event.device), kind }
    }

    /// An event of the connection manager of this provider, in ids of both; `listener` maps the listener of a request.
    pub(super) fn outer_cm_event(self, event: CmEvent, listener: impl FnOnce(CmId) -> CmId) -> CmEvent {
        let kind = match event.kind {
            CmEventKind::Resolved { device } => CmEventKind::Resolved { device: self.outer_device(device) },
            CmEventKind::ConnectRequest { listener: of, device, peer, private_data, read_depth } => {
                let (listener, device) = (listener(of), self.outer_device(device));
                CmEventKind::ConnectRequest { listener, device, peer, private_data, read_depth }
            }
            other => other,
        };
        CmEvent { id: CmId(self.outer(event.id.0)), kind }
    }
}

/// An id of both: which provider it belongs to, and its name there.
pub(super) trait Outer: Sized {
    fn key(self) -> Key;
    fn of(key: Key) -> Self;

    #[inline]
    fn inner(self) -> (Side, Self) {
        let key = self.key();
        let side = if key.slot() & 1 == 1 { Side::Embedded } else { Side::Devices };
        (side, Self::of(Key::new(key.slot() >> 1, key.generation())))
    }

    /// An id of one provider, as one of both.
    #[inline]
    fn outer(self, side: Side) -> Self {
        Self::of(side.outer(self.key()))
    }
}

macro_rules! outer {
    ($($id:ident),+) => {
        $(impl Outer for $id {
            #[inline]
            fn key(self) -> Key {
                self.0
            }

            #[inline]
            fn of(key: Key) -> Self {
                Self(key)
            }
        })+
    };
}

outer!(CmId, QpId, CqId, MrId, SrqId);

/// A device of both: which provider it belongs to, and its number there.
pub(super) const fn inner_device(device: DeviceId) -> (Side, DeviceId) {
    match device.0.checked_sub(1) {
        Some(number) => (Side::Devices, DeviceId(number)),
        None => (Side::Embedded, DeviceId(0)),
    }
}
