//! The management datagrams (MADs) with which connection-manager ids for datagrams find their peers. Management datagrams are sent to queue
//! pair 1. A query (SIDR_REQ) requests the queue pair of a service, and its reply is a SIDR_REP (InfiniBand Architecture Specification,
//! volume 1, §13.4.3, 12.11, annex A11).

use std::net::{IpAddr, SocketAddr};

use super::packet::GROUP;

/// The length of a management datagram in octets.
pub(crate) const LEN: usize = 256;
/// The number of the queue pair that receives management datagrams.
pub(crate) const QUEUE_PAIR: u32 = 1;
/// The Q_Key of queue pair 1.
pub(crate) const QUEUE_KEY: u32 = 0x8001_0000;
/// The length in octets of the program's private data in a query.
pub(crate) const REQUEST_DATA: usize = 180;
/// The length in octets of the program's private data in a reply.
pub(crate) const REPLY_DATA: usize = 136;

/// The first four octets of a message: base version, management class, class version, method Send.
const CLASS: [u8; 4] = [1, 7, 2, 3];
const SIDR_REQ: u16 = 0x17;
const SIDR_REP: u16 = 0x18;
/// The service id of port 0 in the connection manager's UDP port space. The port is in the lower 16 bits.
const UDP_SPACE: u64 = 0x0111 << 16;

/// The offsets in octets of the fields of a message. A field whose name begins with `REQ` is in a query, and a field whose name begins with
/// `REP` is in a reply.
const TRANSACTION: usize = 8;
const ATTRIBUTE: usize = 16;
const REQUEST: usize = 24;
const STATUS: usize = 28;
const REP_NUMBER: usize = 32;
const REQ_SERVICE: usize = 32;
const REP_SERVICE: usize = 36;
const REP_KEY: usize = 44;
/// The offset of the address part of a query. This part consists of a version, the version of IP, a port, and two addresses of 16 octets
/// each.
const ADDRESSES: usize = 40;
const ASKED: usize = 76;
const ANSWERED: usize = 120;

/// The octets of one message.
pub(crate) type MadOctets = [u8; LEN];

/// A query (SIDR_REQ) for the queue pair that receives the datagrams for a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SidrRequest {
    /// The transaction id, which the reply repeats.
    pub(crate) transaction: u64,
    /// The request id that the querying side has chosen.
    pub(crate) request: u32,
    /// The port of the service whose queue pair is requested.
    pub(crate) service: u16,
    /// The address of the querying side.
    pub(crate) from: SocketAddr,
    /// The address to which the query is sent.
    pub(crate) to: IpAddr,
    /// The private data of the program that queries, padded with zeros.
    pub(crate) data: [u8; REQUEST_DATA],
}

/// The result of a query, in its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SidrStatus {
    /// The program has accepted the query. This queue pair receives the datagrams for the service.
    Known {
        /// The number of the queue pair.
        number: u32,
        /// The Q_Key of the queue pair.
        queue_key: u32,
    },
    /// No program listens for the service.
    Unsupported,
    /// The program has rejected the query.
    Rejected,
    /// Any other status, by its code.
    Other(u8),
}

/// The reply to a query (SIDR_REP).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SidrReply {
    /// The transaction id of the query.
    pub(crate) transaction: u64,
    /// The request id of the query.
    pub(crate) request: u32,
    /// The port of the queried service; 0 if the reply does not contain it.
    pub(crate) service: u16,
    /// The result of the query.
    pub(crate) status: SidrStatus,
    /// The private data of the program that replies, padded with zeros.
    pub(crate) data: [u8; REPLY_DATA],
}

/// A message that [`parse`] recognizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SidrMessage {
    /// A query.
    Request(Box<SidrRequest>),
    /// A reply.
    Reply(Box<SidrReply>),
}

/// Returns the `N` octets at `offset`, or `None` if they are not within the message.
fn at<const N: usize>(octets: &MadOctets, offset: usize) -> Option<[u8; N]> {
    octets.get(offset..)?.first_chunk().copied()
}

fn put(octets: &mut MadOctets, offset: usize, what: &[u8]) {
    octets[offset..offset + what.len()].copy_from_slice(what);
}

fn begin(attribute: u16, transaction: u64, request: u32) -> MadOctets {
    let mut octets = [0; LEN];
    put(&mut octets, 0, &CLASS);
    put(&mut octets, TRANSACTION, &transaction.to_be_bytes());
    put(&mut octets, ATTRIBUTE, &attribute.to_be_bytes());
    put(&mut octets, REQUEST, &request.to_be_bytes());
    octets
}

fn service(port: u16) -> [u8; 8] {
    (UDP_SPACE | u64::from(port)).to_be_bytes()
}

/// Returns the port of a service id. Returns `None` if the id is not in the UDP port space.
fn port(service: [u8; 8]) -> Option<u16> {
    let number = u64::from_be_bytes(service);
    (number & !0xffff == UDP_SPACE).then_some(number as u16)
}

fn padded(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V6(v6) => v6.octets(),
        IpAddr::V4(v4) => v4.to_ipv6_compatible().octets(),
    }
}

impl SidrRequest {
    /// Returns the octets of the query.
    pub(crate) fn emit(&self) -> MadOctets {
        let mut octets = begin(SIDR_REQ, self.transaction, self.request);
        put(&mut octets, STATUS, &[0xff, 0xff]);
        put(&mut octets, REQ_SERVICE, &service(self.service));
        let version = if self.to.is_ipv4() { 0x40 } else { 0x60 };
        put(&mut octets, ADDRESSES + 1, &[version]);
        put(&mut octets, ADDRESSES + 2, &self.from.port().to_be_bytes());
        put(&mut octets, ADDRESSES + 4, &padded(self.from.ip()));
        put(&mut octets, ADDRESSES + 20, &padded(self.to));
        put(&mut octets, ASKED, &self.data);
        octets
    }

    fn parse(octets: &MadOctets) -> Option<Self> {
        let address = |offset| {
            let all: [u8; 16] = at(octets, offset)?;
            match octets[ADDRESSES + 1] >> 4 {
                4 => Some(IpAddr::from([all[12], all[13], all[14], all[15]])),
                6 => Some(IpAddr::from(all)),
                _ => None,
            }
        };
        let from = SocketAddr::new(address(ADDRESSES + 4)?, u16::from_be_bytes(at(octets, ADDRESSES + 2)?));
        Some(Self {
            transaction: u64::from_be_bytes(at(octets, TRANSACTION)?),
            request: u32::from_be_bytes(at(octets, REQUEST)?),
            service: port(at(octets, REQ_SERVICE)?)?,
            from,
            to: address(ADDRESSES + 20)?,
            data: at(octets, ASKED)?,
        })
    }

    /// Returns the reply to this query. The reply contains as many bytes of `data` as fit.
    pub(crate) fn reply(&self, status: SidrStatus, data: &[u8]) -> SidrReply {
        let mut padded = [0; REPLY_DATA];
        padded.iter_mut().zip(data).for_each(|(to, &from)| *to = from);
        let &Self { transaction, request, service, .. } = self;
        SidrReply { transaction, request, service, status, data: padded }
    }
}

impl SidrReply {
    /// Returns the octets of the reply.
    pub(crate) fn emit(&self) -> MadOctets {
        let mut octets = begin(SIDR_REP, self.transaction, self.request);
        let status = match self.status {
            SidrStatus::Known { number, queue_key } => {
                put(&mut octets, REP_NUMBER, &((number & GROUP) << 8).to_be_bytes());
                put(&mut octets, REP_KEY, &queue_key.to_be_bytes());
                0
            }
            SidrStatus::Unsupported => 1,
            SidrStatus::Rejected => 2,
            SidrStatus::Other(status) => status,
        };
        put(&mut octets, STATUS, &[status]);
        put(&mut octets, REP_SERVICE, &service(self.service));
        put(&mut octets, ANSWERED, &self.data);
        octets
    }

    fn parse(octets: &MadOctets) -> Option<Self> {
        let status = match octets[STATUS] {
            0 => SidrStatus::Known {
                number: u32::from_be_bytes(at(octets, REP_NUMBER)?) >> 8,
                queue_key: u32::from_be_bytes(at(octets, REP_KEY)?),
            },
            1 => SidrStatus::Unsupported,
            2 => SidrStatus::Rejected,
            other => SidrStatus::Other(other),
        };
        Some(Self {
            transaction: u64::from_be_bytes(at(octets, TRANSACTION)?),
            request: u32::from_be_bytes(at(octets, REQUEST)?),
            // Some peers omit the service id in a reply that names no queue pair.
            service: port(at(octets, REP_SERVICE)?).unwrap_or_default(),
            status,
            data: at(octets, ANSWERED)?,
        })
    }
}

/// Parses a management datagram. Returns `None` unless the datagram is a SIDR_REQ in the UDP port space, or a SIDR_REP.
pub(crate) fn parse(octets: &[u8]) -> Option<SidrMessage> {
    let octets: &MadOctets = octets.try_into().ok()?;
    if octets[..4] != CLASS {
        return None;
    }
    match u16::from_be_bytes(at(octets, ATTRIBUTE)?) {
        SIDR_REQ => SidrRequest::parse(octets).map(|query| SidrMessage::Request(Box::new(query))),
        SIDR_REP => SidrReply::parse(octets).map(|reply| SidrMessage::Reply(Box::new(reply))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn query() -> SidrRequest {
        SidrRequest {
            transaction: 0x0102_0304_0506_0708,
            request: 0x1122_3344,
            service: 7471,
            from: "10.77.2.1:9".parse().unwrap(),
            to: "10.77.2.2".parse().unwrap(),
            data: [0xda; REQUEST_DATA],
        }
    }

    /// The offsets are those of tables 119 and 120 of the specification, plus the 24 octets of the common header. The private data of a
    /// query begins with the 36 octets of annex A11.
    #[test]
    fn every_field_has_its_place() {
        let octets = query().emit();
        assert_eq!(octets[..4], [1, 7, 2, 3]);
        assert_eq!(octets[8..18], [1, 2, 3, 4, 5, 6, 7, 8, 0, 0x17]);
        assert_eq!(octets[24..32], [0x11, 0x22, 0x33, 0x44, 0xff, 0xff, 0, 0]);
        assert_eq!(octets[32..40], [0, 0, 0, 0, 1, 0x11, 0x1d, 0x2f]);
        assert_eq!(octets[40..44], [0, 0x40, 0, 9]);
        assert_eq!(octets[44..60], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 77, 2, 1]);
        assert_eq!(octets[60..76], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 77, 2, 2]);
        assert_eq!(octets[76..], [0xda; 180]);
        let known = SidrStatus::Known { number: 0xab_cdef, queue_key: 0x0123_4567 };
        let octets = query().reply(known, b"answer").emit();
        assert_eq!(octets[16..18], [0, 0x18]);
        assert_eq!(octets[24..36], [0x11, 0x22, 0x33, 0x44, 0, 0, 0, 0, 0xab, 0xcd, 0xef, 0]);
        assert_eq!(octets[36..48], [0, 0, 0, 0, 1, 0x11, 0x1d, 0x2f, 1, 0x23, 0x45, 0x67]);
        assert_eq!(octets[48..127], [&[0; 72][..], b"answer\0"].concat());
    }

    #[test]
    fn what_is_not_understood_is_nothing() {
        let good = query().emit();
        assert_eq!(parse(&good[..255]), None);
        // The offsets of four octets that must have certain values: in the class, the attribute, the port space, and the version of IP.
        for offset in [1, 17, 36, 41] {
            let mut octets = good;
            octets[offset] ^= 0x80;
            assert_eq!(parse(&octets), None, "{offset}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            transaction: u64, request: u32, service: u16, port: u16, v6: bool, number in 0..=GROUP, queue_key: u32, status: u8,
        ) {
            let ip = if v6 { IpAddr::from([7; 16]) } else { IpAddr::from([7; 4]) };
            let query = SidrRequest { transaction, request, service, from: SocketAddr::new(ip, port), to: ip, ..query() };
            prop_assert_eq!(parse(&query.emit()), Some(SidrMessage::Request(Box::new(query.clone()))));
            let status = match status {
                0 => SidrStatus::Known { number, queue_key },
                1 => SidrStatus::Unsupported,
                2 => SidrStatus::Rejected,
                other => SidrStatus::Other(other),
            };
            let reply = query.reply(status, &[3; 200]);
            prop_assert_eq!(parse(&reply.emit()), Some(SidrMessage::Reply(Box::new(reply))));
        }

        #[test]
        fn any_octets_are_read_without_harm(octets in prop::collection::vec(any::<u8>(), LEN), attribute in 0x16..0x1a_u8) {
            let mut octets = octets;
            octets[..4].copy_from_slice(&CLASS);
            octets[16..18].copy_from_slice(&[0, attribute]);
            let _ = parse(&octets);
        }
    }
}
