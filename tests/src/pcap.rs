//! Captures of iWARP connections. The module parses pcap files, each with one TCP connection, and reassembles its streams.
//!
//! The parser is strict: a test must not ignore anything that it cannot parse. A truncated packet, and a packet of another connection
//! or protocol, are errors. Missing bytes are recorded.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// The way in which one direction of a connection ends in the capture file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// The capture stops before the direction ends.
    #[default]
    Open,
    /// The direction ended with a FIN.
    Fin,
    /// The direction ended with an RST.
    Reset,
}

/// Consecutive bytes of one direction, which TCP could deliver together when a packet arrived. Segments are in the order of the capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// True if the side that connected has sent the bytes.
    pub from_client: bool,
    /// The offset of the first byte in the stream of this direction.
    pub start: usize,
    /// The number of bytes in the segment.
    pub len: usize,
}

/// Bytes that were sent but are missing in the capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// True if the side that connected has sent the bytes.
    pub from_client: bool,
    /// The offset in the reassembled stream at which the bytes are missing. This stream has no bytes in the place of holes.
    pub at: usize,
    /// The number of missing bytes.
    pub len: usize,
}

/// A reassembled TCP connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    /// The bytes that the connecting side has sent.
    pub client_to_server: Vec<u8>,
    /// The bytes that the accepting side has sent.
    pub server_to_client: Vec<u8>,
    /// The way in which the client's stream ends.
    pub client_end: End,
    /// The way in which the server's stream ends.
    pub server_end: End,
    /// The segments of both streams, in the order in which they arrived.
    pub segments: Vec<Segment>,
    /// The missing bytes of both streams. A stream continues after a hole as if nothing were missing.
    pub holes: Vec<Hole>,
}

/// Returns the directory of the capture files.
pub fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/iwarp")
}

/// Parses the capture file `name.pcap`.
///
/// # Panics
/// Panics if the file is missing or cannot be parsed completely.
pub fn load(name: &str) -> Capture {
    let path = directory().join(format!("{name}.pcap"));
    let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    parse(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Parses all capture files. Returns them sorted by name.
///
/// # Panics
/// Panics if a file cannot be parsed completely.
pub fn all() -> Vec<(String, Capture)> {
    let entries = fs::read_dir(directory()).expect("the captures are part of the tree");
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.expect("a readable directory").file_name().into_string().ok())
        .filter_map(|name| name.strip_suffix(".pcap").map(str::to_owned))
        .collect();
    names.sort();
    names.into_iter().map(|name| (name.clone(), load(&name))).collect()
}

/// Removes the first `len` bytes, and returns them. Returns an error that names `what` if there are fewer bytes.
fn take<'a>(bytes: &mut &'a [u8], len: usize, what: &str) -> Result<&'a [u8], String> {
    let (front, rest) = bytes.split_at_checked(len).ok_or_else(|| format!("cut short in {what}"))?;
    *bytes = rest;
    Ok(front)
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from(be16(bytes, at)) << 16 | u32::from(be16(bytes, at + 2))
}

/// Parses a pcap file. It must have one TCP connection over IPv4 and Ethernet, beginning with its SYN.
pub fn parse(mut file: &[u8]) -> Result<Capture, String> {
    let head = take(&mut file, 24, "the file header")?;
    let word = |bytes: &[u8], at: usize| match head[..4] {
        [0xa1, ..] => Ok(be32(bytes, at)),
        [0xd4, ..] => Ok(be32(bytes, at).swap_bytes()),
        _ => Err("not a pcap file".to_owned()),
    };
    if word(head, 20)? != 1 {
        return Err("not a capture of Ethernet".to_owned());
    }
    let mut connection = Connection::default();
    let mut number = 0;
    while !file.is_empty() {
        number += 1;
        let record = take(&mut file, 16, "a packet header")?;
        let (captured, original) = (word(record, 8)?, word(record, 12)?);
        let packet = take(&mut file, captured as usize, "a packet")?;
        if captured != original {
            return Err(format!("packet {number}: {captured} of {original} bytes captured"));
        }
        connection.packet(packet).map_err(|error| format!("packet {number}: {error}"))?;
    }
    connection.finish()
}

/// The state of one direction while its bytes are reassembled.
#[derive(Debug, Default)]
struct Direction {
    /// The address and the port of the sender.
    endpoint: (u32, u16),
    /// The sequence number of the stream's first byte; `None` before the SYN.
    first: Option<u32>,
    stream: Vec<u8>,
    /// The bytes that arrived after a gap, by their position in the stream.
    early: BTreeMap<usize, Vec<u8>>,
    /// The total number of bytes in holes. They are not part of `stream`.
    missing: usize,
    /// The length of the stream, which the FIN determines; `None` before the FIN.
    fin: Option<usize>,
    reset: bool,
}

#[derive(Debug, Default)]
struct Connection {
    client: Direction,
    server: Direction,
    segments: Vec<Segment>,
}

impl Connection {
    fn packet(&mut self, mut frame: &[u8]) -> Result<(), String> {
        let ethernet = take(&mut frame, 14, "Ethernet")?;
        if be16(ethernet, 12) != 0x0800 || frame.first().is_none_or(|octet| octet >> 4 != 4) {
            return Err("not IPv4".to_owned());
        }
        // Ethernet may pad a short packet, so the packet's length is taken from the IP header.
        let mut packet = frame;
        let ip = take(&mut packet, usize::from(frame[0] & 0x0f) * 4, "IP")?;
        if ip.len() < 20 || ip[9] != 6 || be16(ip, 6) & 0x3fff != 0 {
            return Err("not an unfragmented TCP packet".to_owned());
        }
        let payload = usize::from(be16(ip, 2)).checked_sub(ip.len()).ok_or("IP length")?;
        let mut data = take(&mut packet, payload, "IP payload")?;
        let header = data;
        take(&mut data, 20, "TCP")?;
        take(&mut data, (usize::from(header[12] >> 4) * 4).checked_sub(20).ok_or("TCP length")?, "TCP options")?;
        let [source, target] = [(be32(ip, 12), be16(header, 0)), (be32(ip, 16), be16(header, 2))];
        let (sequence, flags) = (be32(header, 4), header[13]);
        let [fin, syn, reset, ack] = [0x01, 0x02, 0x04, 0x10].map(|bit| flags & bit != 0);

        if syn && !ack && self.client.first.is_none() {
            self.client.endpoint = source;
            self.server.endpoint = target;
        }
        let from_client = source == self.client.endpoint;
        let ends = (self.client.endpoint, self.server.endpoint);
        if ends != if from_client { (source, target) } else { (target, source) } {
            return Err("of another connection".to_owned());
        }
        let direction = if from_client { &mut self.client } else { &mut self.server };
        if syn {
            let first = sequence.wrapping_add(1);
            if direction.first.is_some_and(|known| known != first) {
                return Err("a second connection".to_owned());
            }
            direction.first = Some(first);
        }
        direction.reset |= reset;
        let Some(first) = direction.first else {
            return if reset { Ok(()) } else { Err("data before the SYN".to_owned()) };
        };
        // The position of the data in the stream. It is negative for a keepalive probe or a repeated SYN.
        let place = i64::from(sequence.wrapping_add(u32::from(syn)).wrapping_sub(first) as i32);
        if fin {
            direction.fin = Some(usize::try_from(place + data.len() as i64).map_err(|_| "FIN before the stream")?);
        }
        let skip = usize::try_from(-place).unwrap_or(0).min(data.len());
        let place = usize::try_from(place).unwrap_or(0);
        for (start, len) in direction.take(place, &data[skip..]) {
            self.segments.push(Segment { from_client, start, len });
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Capture, String> {
        let mut holes = Vec::new();
        for (from_client, direction) in [(true, &mut self.client), (false, &mut self.server)] {
            if direction.first.is_none() {
                return Err("no SYN".to_owned());
            }
            let mut hole = |direction: &mut Direction, end: usize| {
                let hole = Hole { from_client, at: direction.stream.len(), len: end - direction.next() };
                direction.missing += hole.len;
                holes.push(hole);
            };
            while let Some(&place) = direction.early.keys().next() {
                hole(direction, place);
                for (start, len) in direction.take(place, &[]) {
                    self.segments.push(Segment { from_client, start, len });
                }
            }
            match direction.fin {
                Some(end) if end > direction.next() => hole(direction, end),
                Some(end) if end < direction.next() => return Err("bytes behind the FIN".to_owned()),
                _ => {}
            }
        }
        Ok(Capture {
            client_end: self.client.end(),
            server_end: self.server.end(),
            client_to_server: self.client.stream,
            server_to_client: self.server.stream,
            segments: self.segments,
            holes,
        })
    }
}

impl Direction {
    /// Returns the position of the next expected byte. This position includes the bytes in holes.
    fn next(&self) -> usize {
        self.stream.len() + self.missing
    }

    /// Adds data at position `place` of the stream. Returns the segments that were appended to the stream, each as its position and its
    /// length.
    fn take(&mut self, place: usize, data: &[u8]) -> Vec<(usize, usize)> {
        let mut grown = Vec::new();
        if !data.is_empty() {
            let known = self.early.entry(place).or_default();
            if known.len() < data.len() {
                *known = data.to_vec();
            }
        }
        while let Some(entry) = self.early.first_entry() {
            let start = self.stream.len();
            let Some(known) = (start + self.missing).checked_sub(*entry.key()) else { break };
            let data = entry.remove();
            if let Some(new @ [_, ..]) = data.get(known..) {
                self.stream.extend_from_slice(new);
                grown.push((start, new.len()));
            }
        }
        grown
    }

    fn end(&self) -> End {
        match (self.reset, self.fin) {
            (true, _) => End::Reset,
            (false, Some(_)) => End::Fin,
            (false, None) => End::Open,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYN: u8 = 2;
    const ACK: u8 = 16;
    const FIN: u8 = 1;
    const RST: u8 = 4;

    fn packet(client: bool, sequence: u32, flags: u8, data: &[u8]) -> Vec<u8> {
        let mut out = vec![0; 12];
        out.extend([8, 0, 0x45, 0]);
        out.extend((40 + data.len() as u16).to_be_bytes());
        out.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
        let (source, target) = if client { ([10, 0, 0, 1], [10, 0, 0, 2]) } else { ([10, 0, 0, 2], [10, 0, 0, 1]) };
        out.extend(source);
        out.extend(target);
        out.extend(if client { [0x80, 0, 0x1b, 0x58] } else { [0x1b, 0x58, 0x80, 0] });
        out.extend(sequence.to_be_bytes());
        out.extend([0, 0, 0, 0, 0x50, flags, 0, 0, 0, 0, 0, 0]);
        out.extend(data);
        out.resize(out.len().max(60), 0xee);
        out
    }

    fn file(packets: &[Vec<u8>]) -> Vec<u8> {
        let mut out = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0];
        for packet in packets {
            out.extend([0; 8]);
            out.extend((packet.len() as u32).to_le_bytes());
            out.extend((packet.len() as u32).to_le_bytes());
            out.extend(packet);
        }
        out
    }

    /// Returns a capture with lost, repeated, reordered and overlapping packets, and a sequence number that wraps around.
    fn awkward() -> Vec<Vec<u8>> {
        let at = |offset: u32| (u32::MAX - 3).wrapping_add(offset);
        vec![
            packet(true, at(u32::MAX), SYN, b""),
            packet(true, at(u32::MAX), SYN, b""),
            packet(false, 99, SYN | ACK, b""),
            packet(true, at(0), ACK, b"abcd"),
            packet(true, at(8), ACK, b"ijkl"),
            packet(true, at(u32::MAX), ACK, b"?"),
            packet(true, at(0), ACK, b"abcd"),
            packet(true, at(2), ACK, b"cdefghi"),
            packet(false, 100, FIN | ACK, b"answer"),
            packet(true, at(12), FIN | ACK, b""),
        ]
    }

    #[test]
    fn reassembles_awkward_streams() {
        let capture = parse(&file(&awkward())).unwrap();
        assert_eq!(capture.client_to_server, b"abcdefghijkl");
        assert_eq!(capture.server_to_client, b"answer");
        assert_eq!((capture.client_end, capture.server_end), (End::Fin, End::Fin));
        assert_eq!(capture.holes, []);
        let pieces: Vec<_> = capture.segments.iter().map(|s| (s.from_client, s.start, s.len)).collect();
        assert_eq!(pieces, [(true, 0, 4), (true, 4, 5), (true, 9, 3), (false, 0, 6)]);
    }

    #[test]
    fn refuses_what_it_cannot_read() {
        let whole = file(&awkward());
        for len in 0..whole.len() {
            // If the file is cut between two packets, it is a valid capture that stopped early.
            if let Ok(capture) = parse(&whole[..len]) {
                assert_eq!(capture.server_to_client.len() % 6, 0);
            }
        }
        let mut gap = awkward();
        gap.remove(7);
        let capture = parse(&file(&gap)).unwrap();
        assert_eq!(capture.client_to_server, b"abcdijkl");
        assert_eq!(capture.holes, [Hole { from_client: true, at: 4, len: 4 }]);
        gap.remove(4);
        assert_eq!(parse(&file(&gap)).unwrap().holes, [Hole { from_client: true, at: 4, len: 8 }]);
        gap.push(packet(true, 9, ACK, b"?"));
        assert!(parse(&file(&gap)).unwrap_err().contains("bytes behind the FIN"));
        let mut other = awkward();
        other[4][37] ^= 1;
        assert!(parse(&file(&other)).unwrap_err().contains("packet 5: of another connection"));
        let mut cut = whole.clone();
        cut[24 + 12] += 1;
        assert!(parse(&cut).unwrap_err().contains("bytes captured"));
        let mut again = awkward();
        again.push(packet(true, 5, SYN, b""));
        assert!(parse(&file(&again)).unwrap_err().contains("a second connection"));
        let mut arp = awkward();
        arp[3][13] = 6;
        assert!(parse(&file(&arp)).unwrap_err().contains("not IPv4"));
    }

    #[test]
    fn sees_a_reset() {
        let mut packets = awkward();
        packets.push(packet(false, 107, RST, b""));
        assert_eq!(parse(&file(&packets)).unwrap().server_end, End::Reset);
    }
}
