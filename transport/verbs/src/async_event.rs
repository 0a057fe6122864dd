//! Asynchronous events of a device (`ibv_get_async_event`(3)), copied from the library's memory.

use super::ffi::QueueName;
use super::sys::{ibv_async_event, ibv_event_type as ty};
use rdma_transport::event::DeviceEventKind;

/// A copy of an asynchronous event. The copy contains a [`QueueName`] in place of the pointer to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RawAsyncEvent {
    /// An event of a queue pair.
    Qp { kind: QpEvent, name: QueueName },
    /// A completion queue failed.
    CqError(QueueName),
    /// A shared receive queue failed.
    SrqError(QueueName),
    /// The device failed.
    DeviceFatal,
    /// An event of a port.
    Port(DeviceEventKind),
    /// An event of a type that this library does not process.
    Other(u32),
}

/// An asynchronous event of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QpEvent {
    /// The queue pair failed, for the reason in the text.
    Failed(&'static str),
    /// Data arrived before the connection manager reported that the connection is established.
    CommunicationEstablished,
    /// A queue pair in the error state has consumed its last receive from its shared receive queue.
    LastReceive,
    /// An event of a type that this library does not process.
    Other(u32),
}

impl RawAsyncEvent {
    /// Copies an event.
    ///
    /// # Safety
    /// `event` points to an event that `ibv_get_async_event` has filled in, and that is not acknowledged yet.
    pub(super) unsafe fn copy(event: *const ibv_async_event) -> Self {
        // SAFETY: the caller promises that the event is valid. The type is read as a number, not as an enum, because a
        // newer kernel may report types that this binding does not have.
        let kind = unsafe { (&raw const (*event).event_type).cast::<u32>().read() };
        let qp_event = match kind {
            ty::IBV_EVENT_QP_FATAL => Some(QpEvent::Failed("the queue pair failed")),
            ty::IBV_EVENT_QP_REQ_ERR => Some(QpEvent::Failed("the peer sent an invalid request")),
            ty::IBV_EVENT_QP_ACCESS_ERR => Some(QpEvent::Failed("the peer accessed memory without the right to")),
            ty::IBV_EVENT_COMM_EST => Some(QpEvent::CommunicationEstablished),
            ty::IBV_EVENT_QP_LAST_WQE_REACHED => Some(QpEvent::LastReceive),
            ty::IBV_EVENT_SQ_DRAINED | ty::IBV_EVENT_PATH_MIG | ty::IBV_EVENT_PATH_MIG_ERR => {
                Some(QpEvent::Other(kind))
            }
            _ => None,
        };
        if let Some(kind) = qp_event {
            // SAFETY: an event of this type has a queue pair, which exists until the event is acknowledged.
            let context = unsafe { (*(*event).element.qp).qp_context };
            return Self::Qp { kind, name: QueueName::of(context) };
        }
        match kind {
            ty::IBV_EVENT_CQ_ERR => {
                // SAFETY: an event of this type has a completion queue, which exists until the event is acknowledged.
                Self::CqError(QueueName::of(unsafe { (*(*event).element.cq).cq_context }))
            }
            ty::IBV_EVENT_SRQ_ERR => {
                // SAFETY: an event of this type has a shared receive queue, which exists until the event is
                // acknowledged.
                Self::SrqError(QueueName::of(unsafe { (*(*event).element.srq).srq_context }))
            }
            ty::IBV_EVENT_DEVICE_FATAL => Self::DeviceFatal,
            ty::IBV_EVENT_PORT_ACTIVE..=ty::IBV_EVENT_SM_CHANGE
            | ty::IBV_EVENT_CLIENT_REREGISTER
            | ty::IBV_EVENT_GID_CHANGE => {
                // SAFETY: an event of this type has the number of a port.
                let port = u32::try_from(unsafe { (*event).element.port_num }).unwrap_or(0);
                Self::Port(match kind {
                    ty::IBV_EVENT_PORT_ACTIVE => DeviceEventKind::PortActive { port },
                    ty::IBV_EVENT_PORT_ERR => DeviceEventKind::PortDown { port },
                    ty::IBV_EVENT_GID_CHANGE => DeviceEventKind::AddressChange { port },
                    code => DeviceEventKind::Port { code, port },
                })
            }
            _ => Self::Other(kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::{ibv_async_event_element_t, ibv_qp};
    use rdma_transport::slab::Key;

    fn copy_of(kind: u32, element: ibv_async_event_element_t) -> RawAsyncEvent {
        // SAFETY: all fields are numbers or pointers, for which zeros are valid. Type 0 is a valid type.
        let mut event: ibv_async_event = unsafe { std::mem::zeroed() };
        event.element = element;
        // SAFETY: the type is written as a number, and read in the same way.
        unsafe { (&raw mut event.event_type).cast::<u32>().write(kind) };
        // SAFETY: each caller passes the field of the union that belongs to the type.
        unsafe { RawAsyncEvent::copy(&raw const event) }
    }

    #[test]
    fn the_last_receive_of_a_queue_pair_is_told() {
        let name = QueueName::new(Key::new(5, 3));
        // SAFETY: all fields are numbers or pointers, for which zeros are valid.
        let mut qp: ibv_qp = unsafe { std::mem::zeroed() };
        qp.qp_context = name.context();
        let copy = copy_of(16, ibv_async_event_element_t { qp: &raw mut qp });
        assert_eq!(copy, RawAsyncEvent::Qp { kind: QpEvent::LastReceive, name });
    }

    #[test]
    fn types_that_the_binding_does_not_know_are_data() {
        assert_eq!(copy_of(4711, ibv_async_event_element_t { port_num: 0 }), RawAsyncEvent::Other(4711));
        let port = |kind, port_num| copy_of(kind, ibv_async_event_element_t { port_num });
        assert_eq!(port(10, 2), RawAsyncEvent::Port(DeviceEventKind::PortDown { port: 2 }));
        assert_eq!(port(17, 1), RawAsyncEvent::Port(DeviceEventKind::Port { code: 17, port: 1 }));
        assert_eq!(port(18, -1), RawAsyncEvent::Port(DeviceEventKind::AddressChange { port: 0 }));
    }
}
