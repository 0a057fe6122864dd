//! The encoding of the messages that two programs exchange to connect their queue pairs. The parser checks every field before it returns a
//! message.

/// The length of a header in bytes. Its fields are a magic number, the version, the kind of message, and the length of the body.
pub(crate) const HEADER_LEN: usize = 8;
/// The largest length of private data in bytes. InfiniBand's connection manager has the same limit for its requests.
pub(crate) const MAX_PRIVATE_DATA: usize = 56;
/// The length of the longest message in bytes.
pub(crate) const MAX_MESSAGE: usize = HEADER_LEN + ENDPOINT_LEN + MAX_PRIVATE_DATA;

const MAGIC: [u8; 4] = *b"RdXg";
const VERSION: u8 = 1;
/// The length of an [`Endpoint`] in bytes.
const ENDPOINT_LEN: usize = 36;

/// The kind of network that a port is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    /// InfiniBand, where a subnet manager assigns LIDs.
    InfiniBand = 1,
    /// RoCE version 2: UDP over Ethernet.
    RoceV2 = 2,
}

/// The attributes of a queue pair. Request contains the attributes that the active side requests. Accept contains the attributes that the
/// passive side uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) network: Network,
    /// The code of the MTU, 1 (256 bytes) to 5 (4096 bytes). Request contains the MTU of the active side's port, and Accept the MTU of the
    /// path.
    pub(crate) mtu: u8,
    /// The InfiniBand code of the acknowledgement timeout: the sender of this message retransmits packets that are not acknowledged within
    /// this time.
    pub(crate) ack_timeout: u8,
    /// The number of times that an unacknowledged packet is retransmitted. The active side chooses it for both sides.
    pub(crate) retry_count: u8,
    /// The number of times that the peer retries a message for which the sender of these attributes has posted no receive (RNR).
    pub(crate) rnr_retry_count: u8,
    /// The traffic class of every packet. The active side chooses it for both sides.
    pub(crate) traffic_class: u8,
    /// The number of outstanding Reads that the sender of these attributes can serve.
    pub(crate) responder_resources: u8,
    /// The number of outstanding Reads that the sender of these attributes issues at most.
    pub(crate) initiator_depth: u8,
    /// The LID of the port; 0 on RoCE.
    pub(crate) lid: u16,
    pub(crate) qp_number: u32,
    /// The sequence number of the first packet that the queue pair sends.
    pub(crate) psn: u32,
    pub(crate) gid: [u8; 16],
}

/// The reason for a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExchangeRefusal {
    /// The program of the passive side refuses. The private data of Refuse comes from that program.
    Program,
    /// No RDMA port of the passive side has the address at which the stream arrived.
    NoPort,
    /// One side is on InfiniBand and the other side is on RoCE.
    OtherNetwork,
    /// The passive side's device rejects the attributes in the request.
    Device,
    /// The backlog of the passive side is full: its program has not answered the earlier requests.
    Busy,
    /// A code that this version of the library does not define.
    Other(u8),
}

impl ExchangeRefusal {
    const fn code(self) -> u8 {
        match self {
            Self::Program => 1,
            Self::NoPort => 2,
            Self::OtherNetwork => 3,
            Self::Device => 4,
            Self::Busy => 5,
            Self::Other(code) => code,
        }
    }

    const fn from_code(code: u8) -> Self {
        match code {
            1 => Self::Program,
            2 => Self::NoPort,
            3 => Self::OtherNetwork,
            4 => Self::Device,
            5 => Self::Busy,
            other => Self::Other(other),
        }
    }

    /// Returns the text with which the active side reports the refusal to its program.
    pub(crate) const fn reason(self) -> &'static str {
        match self {
            Self::Program => "the peer refuses",
            Self::NoPort => {
                "no port of the peer has the address of the stream there: name the device and the GID index at the peer"
            }
            Self::OtherNetwork => "one side is on InfiniBand and the other on RoCE",
            Self::Device => "the device of the peer rejects the attributes of the local queue pair",
            Self::Busy => "the peer is busy: its program has not answered earlier requests",
            Self::Other(_) => "the peer refuses for a reason that this version does not know",
        }
    }
}

/// A message. The byte slice of a variant is the private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExchangeMessage<'a> {
    /// The active side requests a connection.
    Request(Endpoint, &'a [u8]),
    /// The passive side accepts. Its queue pair can send and receive.
    Accept(Endpoint, &'a [u8]),
    /// The passive side refuses for this reason.
    Refuse(ExchangeRefusal, &'a [u8]),
    /// The active side's queue pair can send and receive. This is the answer to Accept.
    Ready,
    /// The sender of this message disconnects.
    Goodbye,
}

/// The reason why the peer's bytes violate the protocol, as a text for the program.
pub(crate) type Violation = &'static str;

/// The header of a message: the kind of message, and the length of its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExchangeHeader {
    kind: u8,
    len: u16,
}

impl ExchangeHeader {
    /// Returns the length of the body in bytes, at most [`MAX_MESSAGE`] - [`HEADER_LEN`].
    pub(crate) const fn body(self) -> usize {
        self.len as usize
    }

    pub(crate) fn parse(octets: [u8; HEADER_LEN]) -> Result<Self, Violation> {
        let [a, b, c, d, version, kind, high, low] = octets;
        if [a, b, c, d] != MAGIC {
            return Err("the peer does not use the protocol of the exchange");
        }
        if version != VERSION {
            return Err("the peer uses another version of the exchange protocol");
        }
        let header = Self { kind, len: u16::from_be_bytes([high, low]) };
        let range = match kind {
            1 | 2 => ENDPOINT_LEN..=ENDPOINT_LEN + MAX_PRIVATE_DATA,
            3 => 1..=1 + MAX_PRIVATE_DATA,
            4 | 5 => 0..=0,
            _ => return Err("a message of an unknown kind"),
        };
        if range.contains(&header.body()) { Ok(header) } else { Err("a message of a wrong length") }
    }

    /// Parses a message. `body` is the whole body that follows this header.
    pub(crate) fn message(self, body: &[u8]) -> Result<ExchangeMessage<'_>, Violation> {
        let short = "a message of a wrong length";
        match self.kind {
            1 | 2 => {
                let (endpoint, private_data) = body.split_first_chunk().ok_or(short)?;
                let endpoint = Endpoint::parse(endpoint)?;
                let is_request = self.kind == 1;
                Ok(if is_request {
                    ExchangeMessage::Request(endpoint, private_data)
                } else {
                    ExchangeMessage::Accept(endpoint, private_data)
                })
            }
            3 => body
                .split_first()
                .map(|(code, data)| ExchangeMessage::Refuse(ExchangeRefusal::from_code(*code), data))
                .ok_or(short),
            4 => Ok(ExchangeMessage::Ready),
            _ => Ok(ExchangeMessage::Goodbye),
        }
    }
}

impl ExchangeMessage<'_> {
    /// Appends the encoded message to `out`. Private data past [`MAX_PRIVATE_DATA`] bytes is cut off.
    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let kind = match self {
            Self::Request(..) => 1,
            Self::Accept(..) => 2,
            Self::Refuse(..) => 3,
            Self::Ready => 4,
            Self::Goodbye => 5,
        };
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[VERSION, kind, 0, 0]);
        let data = match self {
            Self::Request(endpoint, data) | Self::Accept(endpoint, data) => {
                endpoint.emit(out);
                *data
            }
            Self::Refuse(refusal, data) => {
                out.push(refusal.code());
                *data
            }
            Self::Ready | Self::Goodbye => &[],
        };
        out.extend_from_slice(&data[..data.len().min(MAX_PRIVATE_DATA)]);
        let len = (out.len() - start - HEADER_LEN) as u16;
        out[start + 6..start + HEADER_LEN].copy_from_slice(&len.to_be_bytes());
    }
}

/// The largest value of 24 bits. Queue pair numbers and packet sequence numbers have 24 bits.
const MAX_24_BITS: u32 = 0xff_ffff;
/// The first multicast LID. Smaller LIDs name single ports.
const MULTICAST_LID: u16 = 0xc000;

impl Endpoint {
    fn parse(octets: &[u8; ENDPOINT_LEN]) -> Result<Self, Violation> {
        let [
            network,
            mtu,
            ack_timeout,
            retry_count,
            rnr_retry_count,
            traffic_class,
            responder_resources,
            initiator_depth,
            ..,
        ] = *octets;
        let word = |at: usize| u32::from_be_bytes([octets[at], octets[at + 1], octets[at + 2], octets[at + 3]]);
        let mut gid = [0; 16];
        gid.copy_from_slice(&octets[20..]);
        let (lids, qp_number, psn) = (word(8), word(12), word(16));
        let network = match network {
            1 => Network::InfiniBand,
            2 => Network::RoceV2,
            _ => return Err("a port on an unknown kind of network"),
        };
        // The LID is the upper half of this word. The lower half is reserved.
        let lid = (lids >> 16) as u16;
        let lid_is_good = match network {
            Network::InfiniBand => (1..MULTICAST_LID).contains(&lid),
            Network::RoceV2 => lid == 0,
        };
        let checks = [
            ((1..=5).contains(&mtu), "an MTU code out of its range"),
            (ack_timeout <= 31, "an ack timeout out of its range"),
            (retry_count <= 7 && rnr_retry_count <= 7, "a retry count out of its range"),
            (lid_is_good, "a LID that is not a unicast LID"),
            // Queue pairs 0 and 1 are reserved for management. The largest number means multicast.
            ((2..MAX_24_BITS).contains(&qp_number), "a queue pair number out of its range"),
            (psn <= MAX_24_BITS, "a packet number out of its range"),
            (gid != [0; 16] && gid[0] != 0xff && !is_group(gid), "a GID that is not a unicast GID"),
        ];
        match checks.into_iter().find(|check| !check.0) {
            Some((_, violation)) => Err(violation),
            None => Ok(Self {
                network,
                mtu,
                ack_timeout,
                retry_count,
                rnr_retry_count,
                traffic_class,
                responder_resources,
                initiator_depth,
                lid,
                qp_number,
                psn,
                gid,
            }),
        }
    }

    fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[
            self.network as u8,
            self.mtu,
            self.ack_timeout,
            self.retry_count,
            self.rnr_retry_count,
            self.traffic_class,
            self.responder_resources,
            self.initiator_depth,
        ]);
        out.extend_from_slice(&self.lid.to_be_bytes());
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(&self.qp_number.to_be_bytes());
        out.extend_from_slice(&self.psn.to_be_bytes());
        out.extend_from_slice(&self.gid);
    }
}

/// Returns true if a GID is an IPv4-mapped address that names no single host: a multicast, the broadcast or the unspecified address.
fn is_group(gid: [u8; 16]) -> bool {
    let v4 = std::net::Ipv6Addr::from(gid).to_ipv4_mapped();
    v4.is_some_and(|v4| v4.is_multicast() || v4.is_broadcast() || v4.is_unspecified())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn endpoint() -> Endpoint {
        Endpoint {
            network: Network::RoceV2,
            mtu: 3,
            ack_timeout: 19,
            retry_count: 7,
            rnr_retry_count: 7,
            traffic_class: 0x68,
            responder_resources: 16,
            initiator_depth: 8,
            lid: 0,
            qp_number: 0x12_3456,
            psn: 0xab_cdef,
            gid: *b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x4d\x02\x01",
        }
    }

    fn parse(octets: &[u8]) -> Result<ExchangeMessage<'_>, Violation> {
        let (header, body) = octets.split_first_chunk().expect("a header");
        let header = ExchangeHeader::parse(*header)?;
        assert_eq!(header.body(), body.len());
        header.message(body)
    }

    fn octets(message: &ExchangeMessage<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        message.emit(&mut out);
        out
    }

    #[test]
    fn messages_survive_the_wire() {
        let infiniband = Endpoint { network: Network::InfiniBand, lid: 9, ..endpoint() };
        for message in [
            ExchangeMessage::Request(endpoint(), b"hello"),
            ExchangeMessage::Request(infiniband, &[7; MAX_PRIVATE_DATA]),
            ExchangeMessage::Accept(endpoint(), b""),
            ExchangeMessage::Refuse(ExchangeRefusal::Program, b"no"),
            ExchangeMessage::Refuse(ExchangeRefusal::Other(77), b""),
            ExchangeMessage::Ready,
            ExchangeMessage::Goodbye,
        ] {
            let octets = octets(&message);
            assert!(octets.len() <= MAX_MESSAGE);
            assert_eq!(parse(&octets), Ok(message));
        }
    }

    /// The bytes are those that `docs/wire.md` specifies.
    #[test]
    fn a_request_has_its_layout() {
        let wanted = b"RdXg\x01\x01\x00\x26\x02\x03\x13\x07\x07\x68\x10\x08\0\0\0\0\0\x12\x34\x56\0\xab\xcd\xef\
                       \0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x4d\x02\x01hi";
        assert_eq!(octets(&ExchangeMessage::Request(endpoint(), b"hi")), wanted);
    }

    #[test]
    fn every_field_is_checked() {
        let good = octets(&ExchangeMessage::Request(endpoint(), b""));
        for (at, value, violation) in [
            (0, b'r', "protocol"),
            (4, 2, "version"),
            (5, 9, "unknown kind"),
            (7, 35, "wrong length"),
            (8, 3, "unknown kind of network"),
            (9, 0, "MTU"),
            (9, 6, "MTU"),
            (10, 32, "ack timeout"),
            (11, 8, "retry count"),
            (12, 8, "retry count"),
            (17, 1, "LID"),
            (20, 1, "queue pair"),
            (24, 1, "packet number"),
            (28, 0xff, "GID"),
            (40, 224, "GID"),
        ] {
            let mut bad = good.clone();
            bad[at] = value;
            let found = ExchangeHeader::parse(*bad.first_chunk().unwrap())
                .and_then(|header| header.message(&bad[HEADER_LEN..]));
            assert!(found.is_err_and(|found| found.contains(violation)), "byte {at} is {value}: {found:?}");
        }
        for number in [0, 1, MAX_24_BITS] {
            let bad = octets(&ExchangeMessage::Accept(Endpoint { qp_number: number, ..endpoint() }, b""));
            assert!(parse(&bad).is_err(), "queue pair {number}");
        }
    }

    proptest! {
        #[test]
        fn any_octets_are_a_message_or_a_violation(header: [u8; 4], body in prop::collection::vec(any::<u8>(), 0..120)) {
            let [a, b, c, d] = MAGIC;
            let [version, kind, high, low] = header;
            for octets in [[a, b, c, d, version, kind, high, low], [a, b, c, d, VERSION, kind % 7, 0, body.len() as u8]] {
                let Ok(header) = ExchangeHeader::parse(octets) else { continue };
                prop_assert!(header.body() <= MAX_MESSAGE - HEADER_LEN);
                if let Ok(message) = header.message(&body) {
                    let _ = format!("{message:?}");
                    let mut again = Vec::new();
                    message.emit(&mut again);
                    prop_assert!(again.len() <= MAX_MESSAGE);
                }
            }
        }
    }
}
