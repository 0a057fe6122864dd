//! The packets of RoCE version 2 that pass on a network interface (`packet`(7)). The process needs the right to
//! capture.

use std::ffi::CString;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The UDP port of RoCE version 2.
const PORT: u16 = 4791;
/// The lengths of the headers of UDP and of the transport (InfiniBand Architecture Specification, volume 1, section
/// 9.2).
const UDP: usize = 8;
const TRANSPORT: usize = 12;

/// A packet of RoCE version 2 over IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The source address.
    pub source: Ipv4Addr,
    /// The byte of the IP header with the DSCP in its upper six bits and ECN in the others.
    pub type_of_service: u8,
    /// The operation: 0 to 31 on reliable connections.
    pub opcode: u8,
    /// The length of the IP packet, bytes.
    pub len: usize,
}

impl Packet {
    /// Returns true if the packet belongs to a reliable connection, and not to the connection manager.
    #[must_use]
    pub const fn is_of_connection(&self) -> bool {
        self.opcode < 32
    }

    /// Parses a packet that begins with the IP header. Returns `None` for all other packets.
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

/// A running capture. It ends when it is dropped.
#[derive(Debug)]
pub struct Capture(OwnedFd);

impl Capture {
    /// Begins to capture on an interface.
    ///
    /// # Errors
    /// There is no such interface, or the process is not allowed to capture.
    pub fn on(netdev: &str) -> io::Result<Self> {
        const ALL: u16 = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: the call creates a descriptor and touches no memory.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK, ALL.into()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was created above and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let name = CString::new(netdev)?;
        // SAFETY: all fields are numbers, for which zero is valid.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_protocol = ALL;
        // SAFETY: the name is a string that ends in zero.
        to.sll_ifindex = match unsafe { libc::if_nametoindex(name.as_ptr()) } {
            0 => return Err(io::Error::last_os_error()),
            index => index as i32,
        };
        // SAFETY: the address has this length.
        let rc = unsafe { libc::bind(fd.as_raw_fd(), (&raw const to).cast(), size_of_val(&to) as u32) };
        if rc == 0 { Ok(Self(fd)) } else { Err(io::Error::last_os_error()) }
    }

    /// Returns the packets that have passed since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<Packet> {
        let mut seen = Vec::new();
        let mut packet = [0_u8; 16 << 10];
        loop {
            // SAFETY: the buffer has this length.
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
