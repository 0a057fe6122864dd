//! UDP packets in batches: one system call sends or receives several packets (`sendmmsg`(2), `recvmmsg`(2)).

use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use rdma_transport::sockets::{address, set_option};

/// The maximum number of packets in a batch.
const BATCH: usize = 32;

/// A batch of packets that were received or will be sent. Each packet has its own buffer, and the address of the other
/// end.
#[derive(Debug)]
pub struct Packets {
    bytes: Vec<u8>, // bound: packets
    /// The size of a buffer, in bytes.
    stride: usize,
    /// The offset of a received packet in its buffer, in bytes.
    headroom: usize,
    /// The packets of the batch, each as its range in its buffer and the address of the other end.
    filled: Vec<(Range<usize>, SocketAddr)>, // bound: packets
    /// The number of packets that the next receive call requests. It adapts to the traffic, because a call for several
    /// packets costs more time than a call for one packet, even if no packet arrives.
    wanted: usize,
}

impl Default for Packets {
    /// Makes a batch without packets and without buffers.
    fn default() -> Self {
        Self { bytes: Vec::new(), stride: 0, headroom: 0, filled: Vec::new(), wanted: 0 }
    }
}

impl Packets {
    /// Makes a batch without packets, with buffers of `stride` bytes. The first `headroom` bytes of each buffer stay
    /// free when a packet is received into it.
    pub(crate) fn new(stride: usize, headroom: usize) -> Self {
        let headroom = headroom.min(stride);
        let (bytes, filled) = (vec![0; BATCH * stride], Vec::with_capacity(BATCH));
        Self { bytes, stride, headroom, filled, wanted: 1 }
    }

    /// Returns the number of packets in the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.filled.len()
    }

    /// Returns true if the batch has no packets.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.filled.is_empty()
    }

    /// Returns true if the batch has no buffers, as [`Packets::default`] makes it.
    pub(crate) fn is_without_room(&self) -> bool {
        self.stride == 0
    }

    /// Returns true if no buffer is free.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.filled.len() >= BATCH || self.stride == 0
    }

    /// Removes all packets from the batch.
    pub fn clear(&mut self) {
        self.filled.clear();
    }

    /// Adds a packet. `fill` writes the packet into its buffer, and returns the range that it has written. Does nothing
    /// if no buffer is free.
    pub fn push(&mut self, peer: SocketAddr, fill: impl FnOnce(&mut [u8]) -> Range<usize>) {
        if self.is_full() {
            return;
        }
        let range = fill(self.buffer(self.filled.len()));
        let end = range.end.min(self.stride);
        self.filled.push((range.start.min(end)..end, peer));
    }

    /// Adds a received packet. Implementations of [`Net`](crate::iwarp::Net) call this. A packet that is longer than a buffer is truncated.
    /// No valid RoCE packet is that long, so the truncated packet is dropped later.
    pub fn arrive(&mut self, peer: SocketAddr, bytes: &[u8]) {
        let start = self.headroom;
        self.push(peer, |buffer| {
            let len = bytes.len().min(buffer.len() - start);
            buffer[start..start + len].copy_from_slice(&bytes[..len]);
            start..start + len
        });
    }

    /// Records that the next buffer contains a received packet of `len` bytes.
    fn take(&mut self, len: usize, from: &SocketName) {
        let start = self.headroom;
        let end = (start + len).min(self.stride);
        let none = SocketAddr::from(([0; 4], 0));
        self.filled.push((start..end, address(from).unwrap_or(none)));
    }

    fn buffer(&mut self, nth: usize) -> &mut [u8] {
        &mut self.bytes[nth * self.stride..][..self.stride]
    }

    /// Returns the bytes of the packet with index `nth`, and the address of the other end. Returns `None` if there is
    /// no such packet.
    #[must_use]
    pub fn read(&self, nth: usize) -> Option<(&[u8], SocketAddr)> {
        let (range, peer) = self.filled.get(nth)?;
        Some((&self.bytes[nth * self.stride..][range.clone()], *peer))
    }

    /// Returns the buffer of the packet with index `nth`, the packet's range in the buffer, and the address of the
    /// other end. Returns `None` if there is no such packet.
    pub(crate) fn get(&mut self, nth: usize) -> Option<(&mut [u8], Range<usize>, SocketAddr)> {
        let (range, peer) = self.filled.get(nth)?.clone();
        Some((self.buffer(nth), range, peer))
    }
}

/// A socket address in the system's format.
type SocketName = libc::sockaddr_storage;

fn message(vector: &mut libc::iovec, name: &mut SocketName, len: libc::socklen_t) -> libc::mmsghdr {
    // SAFETY: a message header of zeros is valid: it has no address, no vector and no control data.
    let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
    (message.msg_hdr.msg_iov, message.msg_hdr.msg_iovlen) = (vector, 1);
    (message.msg_hdr.msg_name, message.msg_hdr.msg_namelen) = (ptr::from_mut(name).cast(), len);
    message
}

fn name(address: SocketAddr) -> (SocketName, libc::socklen_t) {
    let mut name = MaybeUninit::<SocketName>::zeroed();
    let len = match address {
        SocketAddr::V4(v4) => {
            let of = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage has room for an address of any family, and is aligned for it.
            unsafe { name.as_mut_ptr().cast::<libc::sockaddr_in>().write(of) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            let of = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: the storage has room for an address of any family, and is aligned for it.
            unsafe { name.as_mut_ptr().cast::<libc::sockaddr_in6>().write(of) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    // SAFETY: all fields are numbers, and all bytes are initialised.
    (unsafe { name.assume_init() }, len as libc::socklen_t)
}

const NO_VECTOR: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };

/// Sends the packets from index `first` on. Returns the number of packets that were sent.
///
/// # Errors
/// The system's error for the packet at `first`, including `WouldBlock`.
pub(crate) fn send_packets(socket: BorrowedFd<'_>, packets: &Packets, first: usize) -> io::Result<usize> {
    match packets.read(first) {
        Some((bytes, peer)) if first + 1 == packets.len() => send_one(socket, bytes, peer),
        _ => send_several(socket, packets, first),
    }
}

/// Sends one packet. `sendto`(2) costs a fifth less than `sendmmsg`(2) with one packet.
fn send_one(socket: BorrowedFd<'_>, bytes: &[u8], peer: SocketAddr) -> io::Result<usize> {
    let (name, name_len) = name(peer);
    let (fd, start) = (socket.as_raw_fd(), bytes.as_ptr().cast());
    // SAFETY: the kernel only reads the `bytes.len()` bytes and the address, during the call.
    let sent =
        unsafe { libc::sendto(fd, start, bytes.len(), libc::MSG_DONTWAIT, ptr::from_ref(&name).cast(), name_len) };
    usize::try_from(sent).map(|_| 1).map_err(|_| io::Error::last_os_error())
}

fn send_several(socket: BorrowedFd<'_>, packets: &Packets, first: usize) -> io::Result<usize> {
    let mut names = [MaybeUninit::<SocketName>::uninit(); BATCH];
    let mut vectors = [NO_VECTOR; BATCH];
    let mut messages = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; BATCH];
    let mut count = 0;
    while let Some((bytes, peer)) = packets.read(first + count) {
        vectors[count] = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let (name, len) = name(peer);
        messages[count].write(message(&mut vectors[count], names[count].write(name), len));
        count += 1;
    }
    let fd = socket.as_raw_fd();
    // SAFETY: the kernel only reads the `count` headers, and the address and the bytes that each header names.
    let sent = unsafe { libc::sendmmsg(fd, messages.as_mut_ptr().cast(), count as u32, libc::MSG_DONTWAIT as _) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Replaces the packets of the batch by received packets. Returns the number of received packets, and a bool: true if
/// the socket has no more packets, false if it may have more. A packet that is longer than its buffer becomes an empty
/// packet.
///
/// # Errors
/// The errors of `recvmmsg`(2), including `WouldBlock`.
pub(crate) fn receive_packets(socket: BorrowedFd<'_>, packets: &mut Packets) -> io::Result<(usize, bool)> {
    packets.clear();
    if packets.is_without_room() {
        return Ok((0, true));
    }
    let limit = packets.wanted;
    let received = if limit == 1 { receive_one(socket, packets) } else { receive_several(socket, packets) };
    packets.wanted = match received {
        Ok(count) if count == limit => (2 * count).min(BATCH),
        Ok(count) => count.next_power_of_two(),
        Err(_) => 1,
    };
    received.map(|count| (count, count < limit))
}

fn receive_one(socket: BorrowedFd<'_>, packets: &mut Packets) -> io::Result<usize> {
    let (headroom, stride) = (packets.headroom, packets.stride);
    let room = &mut packets.bytes[headroom..stride];
    // SAFETY: all fields are numbers, and zeros are an address of no family.
    let mut name: SocketName = unsafe { std::mem::zeroed() };
    let mut name_len = size_of::<SocketName>() as libc::socklen_t;
    let (fd, flags) = (socket.as_raw_fd(), libc::MSG_DONTWAIT | libc::MSG_TRUNC);
    let (start, len, from) = (room.as_mut_ptr().cast(), room.len(), (&raw mut name).cast());
    // SAFETY: the kernel writes at most `len` bytes to the buffer and `name_len` bytes to the address, only during the
    // call.
    let received = unsafe { libc::recvfrom(fd, start, len, flags, from, &raw mut name_len) };
    // With `MSG_TRUNC`, the call returns the length of the packet, even if the packet is longer than the buffer.
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    packets.take(if received <= len { received } else { 0 }, &name);
    Ok(1)
}

fn receive_several(socket: BorrowedFd<'_>, packets: &mut Packets) -> io::Result<usize> {
    let mut names = [MaybeUninit::<SocketName>::uninit(); BATCH];
    let mut vectors = [NO_VECTOR; BATCH];
    let mut messages = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; BATCH];
    let (stride, headroom, mut count) = (packets.stride, packets.headroom, 0);
    for buffer in packets.bytes.chunks_exact_mut(stride).take(packets.wanted) {
        let room = &mut buffer[headroom..];
        vectors[count] = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        // SAFETY: all fields are numbers, and zeros are an address of no family.
        let name = names[count].write(unsafe { std::mem::zeroed() });
        messages[count].write(message(&mut vectors[count], name, size_of::<SocketName>() as libc::socklen_t));
        count += 1;
    }
    let (fd, flags) = (socket.as_raw_fd(), libc::MSG_DONTWAIT as _);
    // SAFETY: each of the `count` headers names buffers for an address and for the bytes of a packet. The kernel writes
    // to them only during the call.
    let received = unsafe { libc::recvmmsg(fd, messages.as_mut_ptr().cast(), count as u32, flags, ptr::null_mut()) };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?.min(count);
    for (message, name) in messages.iter().zip(&names).take(received) {
        // SAFETY: this function has initialised the first `count` elements of both arrays before the receive call.
        let (message, name) = unsafe { (message.assume_init_ref(), name.assume_init_ref()) };
        let whole = message.msg_hdr.msg_flags & libc::MSG_TRUNC == 0;
        packets.take(if whole { message.msg_len as usize } else { 0 }, name);
    }
    Ok(received)
}

/// Sets the options that a socket needs for RoCE packets. The system then sends each packet whole or not at all, and on
/// IPv4 with the identification 0 (`IP_MTU_DISCOVER`). It keeps the errors that the network reports, for
/// [`take_network_error`] (`IP_RECVERR`, `ip`(7)). Over IPv6 it also accepts packets without a UDP checksum
/// (`UDP_NO_CHECK6_RX`): RoCE devices send no checksum, because their ICRC covers more.
///
/// # Errors
/// The errors of `setsockopt`(2).
pub(crate) fn prepare_for_packets(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    let options: &[_] = if address.is_ipv4() {
        &[(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO), (libc::IPPROTO_IP, libc::IP_RECVERR, 1)]
    } else {
        &[
            (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO),
            (libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1),
            (libc::IPPROTO_UDP, libc::UDP_NO_CHECK6_RX, 1),
        ]
    };
    for &(level, option, value) in options {
        set_option(socket, level, option, value)?;
    }
    Ok(())
}

/// Returns the next error that the network has reported about a sent packet: the destination of the packet, if the
/// report has it, and the error.
///
/// # Errors
/// The errors of `recvmsg`(2); `WouldBlock` if no report is left.
pub(crate) fn take_network_error(socket: BorrowedFd<'_>) -> io::Result<(Option<SocketAddr>, io::Error)> {
    #[repr(C, align(8))]
    struct ErrorControl([u8; 256]);
    let (mut control, mut vector) = (ErrorControl([0; 256]), NO_VECTOR);
    let mut name = MaybeUninit::<SocketName>::zeroed();
    // SAFETY: all fields are numbers, and zeros are an address of no family.
    let name = unsafe { name.assume_init_mut() };
    let mut message = message(&mut vector, name, size_of::<SocketName>() as libc::socklen_t).msg_hdr;
    (message.msg_control, message.msg_controllen) = ((&raw mut control).cast(), size_of::<ErrorControl>() as _);
    let (fd, flags) = (socket.as_raw_fd(), libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT);
    // SAFETY: the header names buffers for an address and for control data. The kernel writes to them only during the
    // call.
    if unsafe { libc::recvmsg(fd, &raw mut message, flags) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut why = io::Error::from(io::ErrorKind::Other);
    // SAFETY: the kernel has filled in the header and the control data. A control message of the type `IP_RECVERR` or
    // `IPV6_RECVERR` that is long enough for an error report contains an error report.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            let kind = ((*header).cmsg_level, (*header).cmsg_type);
            let reports =
                matches!(kind, (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR));
            let len = libc::CMSG_LEN(size_of::<libc::sock_extended_err>() as u32) as usize;
            if reports && (*header).cmsg_len as usize >= len {
                let report = libc::CMSG_DATA(header).cast::<libc::sock_extended_err>().read_unaligned();
                why = io::Error::from_raw_os_error(report.ee_errno as i32);
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok((address(name), why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    fn socket(ip: &str) -> (UdpSocket, SocketAddr) {
        let socket = UdpSocket::bind((ip, 0)).unwrap();
        let address = socket.local_addr().unwrap();
        prepare_for_packets(socket.as_fd(), address).unwrap();
        (socket, address)
    }

    #[test]
    fn batches_arrive_with_their_senders() {
        for ip in ["127.0.0.1", "::1"] {
            let ((a, from), (b, to)) = (socket(ip), socket(ip));
            let (mut out, mut inn) = (Packets::new(64, 0), Packets::new(50, 10));
            assert!(receive_packets(b.as_fd(), &mut inn).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock));
            for nth in 0..BATCH + 3 {
                out.push(to, |buffer| {
                    buffer[..nth + 20].fill(nth as u8);
                    1..nth + 20
                });
            }
            assert_eq!((out.len(), out.is_full()), (BATCH, true));
            assert_eq!(send_packets(a.as_fd(), &out, 0).unwrap(), BATCH);
            assert_eq!(send_packets(a.as_fd(), &out, BATCH - 1).unwrap(), 1);
            let mut all = 0;
            // As long as more packets wait, each receive call requests twice as many as the one before. One more than
            // `BATCH` packets wait, because the last one was sent twice.
            for (count, drained) in [(1, false), (2, false), (4, false), (8, false), (16, false), (2, true)] {
                assert_eq!(receive_packets(b.as_fd(), &mut inn).unwrap(), (count, drained));
                for nth in 0..count {
                    let (buffer, range, peer) = inn.get(nth).unwrap();
                    // In this test, a packet with a larger number is longer. A packet that is longer than its buffer is
                    // received as an empty packet.
                    let value = all.min(BATCH - 1);
                    let len = if value + 19 <= 40 { value + 19 } else { 0 };
                    assert_eq!((range.clone(), peer), (10..10 + len, from));
                    assert!(buffer[range].iter().all(|&octet| octet == value as u8));
                    all += 1;
                }
                assert!(inn.get(count).is_none());
            }
            assert!(receive_packets(b.as_fd(), &mut inn).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock));
        }
    }

    #[test]
    fn without_a_buffer_nothing_comes() {
        let ((a, _), (b, to)) = (socket("127.0.0.1"), socket("127.0.0.1"));
        a.send_to(&[7], to).unwrap();
        for mut none in [Packets::default(), Packets::new(0, 9)] {
            assert_eq!(receive_packets(b.as_fd(), &mut none).unwrap(), (0, true));
            none.push(to, |_| panic!("a packet without a buffer"));
            assert_eq!((none.is_empty(), none.is_full(), send_packets(a.as_fd(), &none, 0).unwrap()), (true, true, 0));
        }
        assert_eq!(receive_packets(b.as_fd(), &mut Packets::new(9, 0)).unwrap(), (1, false), "it is still there");
    }

    #[test]
    fn what_nobody_takes_is_told_of() {
        for ip in ["127.0.0.1", "::1"] {
            let ((a, _), (b, to)) = (socket(ip), socket(ip));
            drop(b);
            let mut out = Packets::new(64, 0);
            out.push(to, |_| 0..9);
            send_packets(a.as_fd(), &out, 0).unwrap();
            // Within a host, the error is reported before `send_packets` returns.
            let (peer, why) = take_network_error(a.as_fd()).unwrap();
            assert_eq!((peer, why.kind()), (Some(to), io::ErrorKind::ConnectionRefused));
            assert!(take_network_error(a.as_fd()).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock));
        }
    }
}
