//! Ports that are down.
//!
//! The provider sends no request through a port that is down. The connection manager would report the failure only after its time limit,
//! about a minute later. The device's events report the state of each port. A port that was down is queried, because not every driver
//! reports that it is up again.
//!
//! On rxe, a request through a port that is down also does damage. If the link is down and the connection manager cannot send a datagram,
//! rxe puts the manager's queue pair into the error state. The queue pair stays there until the device is removed, so the manager cannot
//! send any more. From then on no connect is answered, and a thread that destroys an id waits forever. So on rxe no id connects, answers or
//! disconnects while its port is down. Ids that the program destroys in this time are kept here until the port is up.

use std::sync::Arc;

use super::connector::Connector;
use super::device::Driver;
use super::devices::Device;
use super::entry::IdState;
use super::id::RawId;
use rdma_transport::error::{Result, TransportError};

impl Device {
    /// Returns an error if the port is down. Never returns an error for iWARP, where each id has a
    /// TCP connection.
    pub(super) fn check_port(&mut self, port: u8) -> Result<()> {
        let planted = rdma_transport::planted("a-request-through-a-port-that-is-down");
        if planted || self.limits.iwarp || !self.is_down(port) {
            return Ok(());
        }
        let name = &self.info.name;
        Err(TransportError::NoDevice { reason: format!("port {port} of {name} is down; `rdma link` shows it") })
    }

    /// Destroys an id on the device. On rxe, if the connection manager would send through a port
    /// that is down, flushes the queue pair and keeps the id until the port is up. If another
    /// thread shares the id, that thread destroys it later, and the call returns `stopped`: the
    /// result of putting the queue pair into the error state. Fails if the device may still use
    /// the memory of the id's work requests.
    pub(super) fn destroy_raw(&mut self, state: IdState, raw: Arc<RawId>, stopped: Result<()>) -> Result<()> {
        let silent = matches!(
            state,
            IdState::Listening | IdState::Bound | IdState::WatchingDevice | IdState::Resolving | IdState::Resolved
        );
        // Destroying an id that connects by out-of-band exchange sends nothing.
        let sends = !silent && !raw.uses_exchange() && self.limits.driver == Driver::Rxe;
        if !sends || !self.is_down(raw.port()) {
            return RawId::destroy(raw, stopped);
        }
        // After `flush`, the queue pair accesses no memory and consumes no shared receive.
        let stopped = raw.flush();
        self.waiting_for_port.push((raw.port(), raw));
        stopped
    }

    /// Destroys each id in `waiting_for_port` if its port is up now.
    pub(super) fn ports_changed(&mut self) {
        for (port, raw) in std::mem::take(&mut self.waiting_for_port) {
            if self.is_down(port) || rdma_transport::planted("an-id-waits-for-its-port-for-ever") {
                self.waiting_for_port.push((port, raw));
            }
        }
    }

    /// Destroys all ids in `waiting_for_port`, even if their port is down, because the device was
    /// removed, or because the provider is being dropped.
    pub(super) fn release_waiting(&mut self, connector: &Connector) {
        for (port, raw) in std::mem::take(&mut self.waiting_for_port) {
            if self.is_down(port) { connector.release(raw) } else { drop(raw) }
        }
    }
}
