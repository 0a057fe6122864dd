//! Captures the packets of RoCE version 2 on a network interface, with a packet socket (`packet`(7)). The process needs the capability
//! CAP_NET_RAW.

use std::ffi::CString;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The UDP port of RoCE version 2.
const PORT: u16 = 4791;
/// The length of a UDP header, in bytes.
const UDP: usize = 8;
/// The length of the base transport header, in bytes (InfiniBand Architecture Specification, volume 1, section 9.2).
const TRANSPORT: usize = 12;

/// A packet of RoCE version 2 over IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The source address.
    pub source: Ipv4Addr,
    /// The IP header's type-of-service byte: the DSCP is in the upper six bits, the ECN in the lower two.
    pub type_of_service: u8,
    /// The opcode of the transport header. Reliable connections use the opcodes 0 to 31.
    pub opcode: u8,
    /// The length of the IP packet, in bytes.
    pub len: usize,
}

impl Packet {
    /// Returns true if the packet belongs to a reliable connection. All other packets belong to the connection manager.
    #[must_use]
    pub const fn is_of_connection(&self) -> bool {
        self.opcode < 32
    }

    /// Parses a packet that begins with an IP header. Returns `None` if it is not a packet of RoCE version 2 over IPv4.
    fn parse(packet: &[u8]) -> Option<Self> {
        let header = usize::from(*packet.first()? & 15) * 4;
        let udp = packet.get(header..header + UDP + TRANSPORT)?;
        let is_roce = packet[0] >> 4 == 4 && packet[9] == 17 && u16::from_be_bytes([udp[2], udp[3]]) == PORT;
        is_roce.then(|| Self {
            source: Ipv4Addr::new(packet[12], packet[13], packet[14], packet[15]),
            type_of_service: packet[1],
            opcode: udp[UDP],
            len: packet.len(),
        })
    }
}

/// A running capture. Dropping this value ends the capture.
#[derive(Debug)]
pub struct Capture(OwnedFd);

impl Capture {
    /// Starts to capture on the network interface `netdev`.
    ///
    /// # Errors
    /// The interface does not exist, or the process has no right to capture.
    pub fn on(netdev: &str) -> io::Result<Self> {
        const ALL: u16 = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: the call creates a descriptor, and accesses no memory of the process.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK, ALL.into()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was created above, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let name = CString::new(netdev)?;
        // SAFETY: all fields of the struct are numbers, for which zero is valid.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_protocol = ALL;
        // SAFETY: the name is a C string with a terminating zero.
        to.sll_ifindex = match unsafe { libc::if_nametoindex(name.as_ptr()) } {
            0 => return Err(io::Error::last_os_error()),
            index => index as i32,
        };
        // SAFETY: the address and its length are those of `to`.
        let rc = unsafe { libc::bind(fd.as_raw_fd(), (&raw const to).cast(), size_of_val(&to) as u32) };
        if rc == 0 { Ok(Self(fd)) } else { Err(io::Error::last_os_error()) }
    }

    /// Returns the packets that were captured since the previous call of this function.
    #[must_use]
    pub fn take(&self) -> Vec<Packet> {
        let mut seen = Vec::new();
        let mut packet = [0_u8; 16 << 10];
        loop {
            // SAFETY: the pointer and the length are those of the buffer.
            let len = unsafe { libc::recv(self.0.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), 0) };
            let Ok(len) = usize::try_from(len) else { return seen };
            seen.extend(Packet::parse(&packet[..len]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_roce_are_told_from_others() {
        let mut packet = vec![0_u8; 20 + UDP + TRANSPORT];
        (packet[0], packet[1], packet[9]) = (0x45, 0x68, 17);
        packet[12..16].copy_from_slice(&[10, 77, 2, 1]);
        packet[22..24].copy_from_slice(&PORT.to_be_bytes());
        packet[28] = 4;
        let source = Ipv4Addr::new(10, 77, 2, 1);
        let parsed = Packet { source, type_of_service: 0x68, opcode: 4, len: packet.len() };
        assert_eq!(Packet::parse(&packet), Some(parsed));
        assert!(parsed.is_of_connection() && !Packet { opcode: 0x64, ..parsed }.is_of_connection());
        assert_eq!(Packet::parse(&packet[..30]), None, "cut short");
        packet[9] = 6;
        assert_eq!(Packet::parse(&packet), None, "not of UDP");
        assert_eq!(Packet::parse(&[]), None);
    }
}
