//! The UDP sockets of datagrams: sockets of local addresses, and sockets that have joined a multicast group.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::packets;
use rdma_transport::sockets;
use rdma_transport::sockets::Interface;

/// The hop limit of datagrams to a multicast group. With this limit, no router forwards such a datagram.
const GROUP_HOPS: u32 = 1;

/// Opens a socket bound to an address of this host. Datagrams from this socket to a multicast group leave through the interface with this
/// address.
pub(super) fn bind(address: SocketAddr) -> io::Result<Socket> {
    let socket = open(address)?;
    match address.ip() {
        IpAddr::V4(v4) => {
            socket.set_multicast_if_v4(&v4)?;
            socket.set_multicast_ttl_v4(GROUP_HOPS)?;
        }
        IpAddr::V6(_) => {
            socket.set_multicast_if_v6(sockets::interface_of(socket.as_fd(), address)?.index)?;
            socket.set_multicast_hops_v6(GROUP_HOPS)?;
        }
    }
    socket.bind(&SockAddr::from(address))?;
    Ok(socket)
}

/// Opens a socket that receives only the packets to one multicast group on one interface. Several processes may open such sockets with the
/// same port. The system announces the membership to the network (IGMP, MLD).
pub(super) fn join(group: SocketAddr, at: IpAddr, interface: Interface) -> io::Result<Socket> {
    let socket = open(group)?;
    socket.set_reuse_address(true)?;
    let mut group = group;
    match (&mut group, at) {
        (SocketAddr::V4(v4), IpAddr::V4(at)) => {
            socket.set_multicast_all_v4(false)?;
            socket.join_multicast_v4(v4.ip(), &at)?;
        }
        (SocketAddr::V6(v6), IpAddr::V6(_)) => {
            socket.set_multicast_all_v6(false)?;
            v6.set_scope_id(interface.index);
            socket.join_multicast_v6(v6.ip(), interface.index)?;
        }
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    }
    socket.bind(&SockAddr::from(group))?;
    Ok(socket)
}

/// Returns the network interface that has this local address, according to its scope if it is a link-local address.
pub(super) fn interface(address: SocketAddr) -> io::Result<Interface> {
    sockets::interface_of(open(address)?.as_fd(), address)
}

/// Returns the local address with which the system's routing table would send a packet to this peer.
pub(super) fn source(mut peer: SocketAddr) -> io::Result<IpAddr> {
    let any = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    // For UDP, connecting sends no packet: the call only selects the route and the local address. The system needs a port, and the scope of
    // a link-local address.
    peer.set_port(peer.port().max(1));
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

fn open(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    packets::prepare_for_packets(socket.as_fd(), address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The system refuses to connect to a link-local address without a scope. With the scope of the loopback interface, it looks for a
    /// route, and usually finds none.
    #[test]
    fn the_route_to_a_link_local_peer_is_that_of_its_scope() {
        let refused = |peer: &str| {
            let source = source(peer.parse().unwrap());
            source.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL))
        };
        assert!(refused("[fe80::1]:7"), "without a scope");
        assert!(!refused("[fe80::1%1]:7") && !refused("[fe80::1%1]:0"));
        assert_eq!(source("127.0.0.1:0".parse().unwrap()).unwrap(), IpAddr::from([127, 0, 0, 1]));
    }
}
