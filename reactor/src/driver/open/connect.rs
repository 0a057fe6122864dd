//! [`Connector`]: opens connections to the addresses or the name of a peer.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;

use rdma_transport::provider::Provider;

use super::fallback::{ConnectAttempt, Fallback, by_turns};
use super::lookup::{HostAddresses, HostQuery, Lookups};
use crate::config::Framing;
use crate::conn::greeting::MAX_USER_PRIVATE_DATA;
use crate::conn::state::Ending;
use crate::conn::{Connection, Env, Opening, Role};
use crate::driver::World;
use crate::driver::owners::CmIdOwner;
use crate::driver::stages::Stages;
use crate::driver::table::ConnectionSlot;
use crate::error::{ConnectError, Error};
use crate::id::ConnectionId;
use crate::options::{ConnectOptions, check_security};
use crate::providers::{EXCHANGE, Handle, role};
use crate::security::Security;

/// Opens connections. The names that are being resolved are stored here, and the remaining attempts
/// of a connection in the table of connections.
#[derive(Debug, Default)]
pub(crate) struct Connector {
    lookups: Lookups,
}

impl Connector {
    /// Opens a connection to the first of `peers` that can be reached.
    pub(crate) fn connect(
        world: &mut World,
        peers: &[SocketAddr],
        options: ConnectOptions,
    ) -> Result<ConnectionId, Error> {
        let security = may_connect(world, &options)?;
        let ConnectOptions { private_data, framing, path, exchange, service, .. } = options;
        let probes = exchange.is_some();
        let mut fallback = Fallback::new(peers.iter().copied(), path, exchange);
        let ConnectAttempt { peer, cm, deadline } =
            fallback.resolve_next(&mut world.providers, &world.config, &mut world.effects.log_limit, world.now)?;
        let opening = Opening { framing, peer, host: None, private_data, probes, security };
        let id = world.insert(cm, service, Role::Active, opening);
        if let Some(slot) = world.table.get_mut(id) {
            slot.link.fallback = (!fallback.is_empty()).then_some(fallback);
        }
        world.set_deadline(id, Some(deadline));
        world.ring();
        Ok(id)
    }

    /// Opens a connection over a stream that the program has connected. The two sides exchange
    /// their queue pair numbers over this stream.
    pub(crate) fn connect_over(
        world: &mut World,
        stream: OwnedFd,
        options: ConnectOptions,
    ) -> Result<ConnectionId, Error> {
        let security = may_connect(world, &options)?;
        let ConnectOptions { private_data, framing, path, exchange, service, .. } = options;
        // The program may pass any descriptor. One that is not an IP socket has no peer address.
        let stream = TcpStream::from(stream);
        let peer = stream.peer_addr().unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
        let (exchange, deadline) = (exchange.unwrap_or_default(), world.now + world.config.timeouts.connect);
        let provider = world.providers.exchanging()?;
        let role = role(world.providers.numbered(provider), Provider::exchange, EXCHANGE)?;
        let cm = Handle { provider, id: role.resolve_exchange_over(stream.into(), &path, &exchange, deadline)? };
        let opening = Opening { framing, peer, host: None, private_data, probes: true, security };
        let id = world.insert(cm, service, Role::Active, opening);
        world.set_deadline(id, Some(deadline));
        world.ring();
        Ok(id)
    }

    /// Opens a connection to a host by its name.
    pub(crate) fn connect_host(
        &mut self,
        world: &mut World,
        (host, port): (&str, u16),
        options: ConnectOptions,
    ) -> Result<ConnectionId, Error> {
        let security = may_connect(world, &options)?;
        let ConnectOptions { private_data, framing, path, exchange, service, .. } = options;
        self.lookups.start_thread(&world.os.wake).map_err(Error::Lookup)?;
        let unknown = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
        let probes = exchange.is_some();
        let opening = Opening { framing, peer: unknown, host: Some(host.into()), private_data, probes, security };
        let id = world.insert(Handle::NONE, service, Role::Active, opening);
        self.lookups.ask(HostQuery { of: id, host: host.to_owned(), port, path, exchange });
        world.set_deadline(id, Some(world.now + world.config.timeouts.connect));
        world.ring();
        Ok(id)
    }

    /// After a failed attempt to connect, starts the next attempt. Returns false if no attempt
    /// remains, or if no other attempt is permitted. In this case, the caller must report the end
    /// of the connection to the program.
    pub(crate) fn try_next_address(world: &mut World, id: ConnectionId) -> bool {
        if world.drain.refuses_all() {
            return false;
        }
        let Some(slot) = world.table.get(id) else { return false };
        let Some(error) = slot.conn.failed_attempt() else { return false };
        // Completions of the failed attempt are missing or not handled yet. They could be mistaken
        // for completions of the next attempt.
        if slot.conn.is_outstanding() || !slot.allowance.backlog.is_empty() {
            return false;
        }
        let (peer, limit) = (slot.conn.peer(), &mut world.effects.log_limit);
        peer_log!(limit, world.now, NotUp, Info, peer, "{id}: {peer}: {error}");
        Self::attempt_next(world, id)
    }

    /// Starts the next attempt of a connection, with the same connection id. Returns false if no
    /// attempt remains.
    fn attempt_next(world: &mut World, id: ConnectionId) -> bool {
        let World { table, devices, providers, owners, config, now, effects, stats, os, .. } = world;
        let Some(slot) = table.get_mut(id) else { return false };
        let Some(opening) = slot.conn.reopening() else { return false };
        let Some(mut fallback) = slot.link.fallback.take() else { return false };
        // A callback of this turn may have run for a long time, so `now` may be out of date.
        let begun = os.clock.now();
        let resolved = fallback.resolve_next(providers, config, &mut effects.log_limit, begun);
        let Ok(ConnectAttempt { peer, cm, deadline }) = resolved else {
            return false;
        };
        log::debug!("{id}: {peer} is tried");
        let mut conn = Connection::new(id, Role::Active, Opening { peer, ..opening }, config, *now);
        conn.inherit(&slot.conn);
        let mut old = std::mem::replace(slot, ConnectionSlot::new(conn, cm, slot.link.service));
        slot.link.fallback = (!fallback.is_empty()).then_some(fallback);
        slot.link.regions.clone_from(&old.link.regions);
        let qp = old.link.qp;
        old.destroy(providers, owners, stats, *now);
        // The connection keeps its id, so `vacate` must notify the shared queue that the remaining
        // completions of the destroyed queue pair have no connection. Otherwise they would count as
        // completions of the next attempt.
        old.link.qp = qp;
        let device = old.link.binding.map_or(usize::MAX, |binding| binding.device);
        old.conn.drop_attempt(&mut Env { now: *now, config, device, buffers: devices.buffers(device), effects, stats });
        owners.own(cm, CmIdOwner::Connection(id));
        world.revoke_regions_of(id);
        world.vacate(old);
        world.set_deadline(id, Some(deadline));
        true
    }

    /// Handles the names that were resolved. Connects to the addresses of each name, or ends the
    /// connection if its name has no address.
    pub(crate) fn take_lookups(&mut self, world: &mut World) {
        while let Ok(HostAddresses { query, addresses }) = self.lookups.answers.1.try_recv() {
            let HostQuery { of, host, path, exchange, .. } = query;
            // While the name was resolved, the program may have closed the connection, or the
            // connect timeout may have expired.
            if !world.table.get(of).is_some_and(|slot| slot.link.cm == Handle::NONE && slot.conn.state().is_handshake())
            {
                continue;
            }
            let error = match addresses {
                Err(error) => ConnectError::Lookup { host, why: error.to_string() },
                Ok(addresses) => {
                    if let Some(slot) = world.table.get_mut(of) {
                        slot.link.fallback = Some(Fallback::new(by_turns(&addresses), path, exchange));
                    }
                    if Self::attempt_next(world, of) {
                        continue;
                    }
                    let why = format!("{host}: none of its {} addresses can be connected to", addresses.len());
                    ConnectError::Local(why)
                }
            };
            let ending = Ending::ConnectError(error);
            world.pass(of, |conn, env| conn.end(ending, env));
            world.note(Stages::ENDS);
        }
    }
}

/// Checks that a connection may be opened with these options. Returns the security settings of the
/// connection.
fn may_connect(world: &World, options: &ConnectOptions) -> Result<Security, Error> {
    options.check()?;
    let security = options.security.as_ref().unwrap_or(&world.config.security);
    check_security(security, options.framing, true)?;
    if options.framing == Framing::Credits && options.private_data.len() > MAX_USER_PRIVATE_DATA {
        return Err(Error::PrivateDataTooLong { len: options.private_data.len(), max: MAX_USER_PRIVATE_DATA });
    }
    if world.drain.refuses_all() {
        return Err(Error::Drained);
    }
    if world.table.len() >= world.config.max_connections as usize {
        return Err(Error::Limit { limit: "max_connections", value: world.config.max_connections.into() });
    }
    Ok(security.clone())
}
