//! Writes the seeds of the fuzz targets into their corpora, so that a fuzzer starts from valid inputs. The seeds are recorded connections
//! of the kernel's siw, messages that functions of this project emit, and a few tapes (bytes that a target reads as choices).
//!
//! ```text
//! cargo run -p rdma-reactor-fuzz --example seeds
//! ```
#![allow(clippy::disallowed_methods, reason = "a tool, not the library")]

use std::fs;

use rdma_reactor::RemoteRegion;
use rdma_reactor_fuzz::corpora;
use rdma_reactor_tests::pcap;
use rdma_reactor_tools::kv::table::Geometry;
use rdma_reactor_tools::kv::wire::{TableHello, encode_put};
use rdma_reactor_tools::mesh::frame::{LinkFrame, ping};
use rdma_reactor_tools::mesh::hello::{Hello as Rank, Purpose};
use rdma_reactor_tools::pingpong;
use rdma_reactor_tools::rcp::wire::CopyMessage;
use rdma_reactor_tools::rping::advert;
use rdma_transport_embedded::iwarp::wire::mpa::{STARTUP_HEADER_LEN, fpdu_len};

/// The length to which a recorded stream is truncated before it is written as a seed of the target `cuts`, in bytes.
const LONGEST: usize = 4000;

fn write(target: &str, name: &str, octets: &[u8]) {
    let folder = corpora().join(target);
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join(format!("seed-{name}")), octets).expect("a file");
}

/// Returns the length of the MPA startup frame at the beginning of `stream`, including the frame's private data.
fn startup_len(stream: &[u8]) -> usize {
    STARTUP_HEADER_LEN + usize::from(u16::from_be_bytes([stream[18], stream[19]]))
}

fn main() {
    for (name, capture) in pcap::all() {
        let name = &name[..2];
        for (side, stream) in [("a", &capture.client_to_server), ("b", &capture.server_to_client)] {
            // Some recorded servers have sent nothing. No seed is written for an empty stream.
            if stream.is_empty() {
                continue;
            }
            let (frame, mut fpdus) = stream.split_at(startup_len(stream));
            write("startup", &format!("{name}{side}"), &[&[7], frame].concat());
            // The first byte of an input of the target `cuts` is a set of flags: use CRCs (1), correct the CRCs of the stream first (2),
            // use a shared receive queue (4), use the extensions (8). The second byte is the seed from which the target derives the lengths
            // of the pieces. The stream follows.
            let stream = &fpdus[..fpdus.len().min(LONGEST)];
            write("cuts", &format!("{name}{side}"), &[&[0b1011, 3], stream].concat());
            write("cuts", &format!("{name}{side}-nocrc"), &[&[0b1000, 9], stream].concat());
            let mut kinds = std::collections::BTreeSet::new();
            while let Some(&[high, low, _, kind]) = fpdus.first_chunk() {
                let len = fpdu_len(usize::from(u16::from_be_bytes([high, low])));
                let Some((fpdu, rest)) = fpdus.split_at_checked(len) else { break };
                if kinds.insert(kind) {
                    write("headers", &format!("{name}{side}-{kind:02x}"), &fpdu[..len.min(120)]);
                }
                fpdus = rest;
            }
        }
    }
    // A greeting as `docs/wire.md` defines it: magic, version, length of the user's data, reason, features, window, buffer size, largest
    // message.
    let greeting =
        [&b"RDXR\x02\x03\0\x01"[..], &16_u32.to_le_bytes(), &8192_u32.to_le_bytes(), &[0; 4], b"abc"].concat();
    write("greeting", "plain", &greeting);
    write("greeting", "padded", &[&greeting[..], &[0; 33]].concat());
    let region = RemoteRegion { address: 0x7000, len: 1 << 20, key: 7 };
    for kind in 0..10_u8 {
        let header = [kind, 0, 0, 0, 64, 0, 0, 0];
        let payload = match kind {
            0 => b"data".to_vec(),
            5 => [5; 8].to_vec(),
            6 => [&[1, 0, 0, 0, 0, 0, 0, 0], &region.to_bytes()[..]].concat(),
            7 => vec![1, 0, 0, 0],
            9 => vec![1, 2, 3],
            _ => Vec::new(),
        };
        write("message", &format!("{kind}"), &[&header[..], &payload].concat());
    }
    // Each seed of the target `exchange` is a conversation as `docs/wire.md` defines it: one message of the local side, and then the
    // messages of the peer. `queue_pair` builds a message of the kind `kind`, with the fields of a queue pair and the user's data.
    let queue_pair = |kind: u8, data: &[u8]| {
        let fields = *b"\x02\x03\x13\x07\x07\x68\x10\x08\0\0\0\0\0\x12\x34\x56\0\xab\xcd\xef\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x4d\x02\x01";
        [b"RdXg\x01", &[kind, 0, (fields.len() + data.len()) as u8][..], &fields, data].concat()
    };
    let (ready, goodbye) = (b"RdXg\x01\x04\0\0".to_vec(), b"RdXg\x01\x05\0\0".to_vec());
    let refusal = b"RdXg\x01\x03\0\x03\x01no".to_vec();
    let (request, accept) = (queue_pair(1, b"request"), queue_pair(2, b"accept"));
    for (name, messages) in [
        ("passive", [&accept, &request, &ready, &goodbye]),
        ("active", [&request, &accept, &goodbye, &goodbye]),
        ("refused", [&request, &refusal, &goodbye, &ready]),
        ("refuses", [&accept, &queue_pair(1, b"\0"), &ready, &goodbye]),
        ("early", [&accept, &ready, &request, &goodbye]),
        ("given-up", [&accept, &request, &goodbye, &ready]),
    ] {
        let octets = messages.map(Vec::as_slice).concat();
        write("exchange", name, &[&[6][..], &octets].concat());
    }
    let geometry = Geometry { slots: 100, max_value: 100 };
    let table = TableHello { geometry, region: RemoteRegion { len: geometry.table_len(), ..region } };
    let rank = Rank { rank: 1, ranks: 4, purpose: Purpose::Link { run: 7, attempt: 1 } };
    let messages: [(u8, Vec<u8>); 14] = [
        (0, table.encode()),
        (1, encode_put(b"key", b"value")),
        (2, vec![0; 128]),
        (3, CopyMessage::Offer { len: 7, name: "a file" }.encode()),
        (3, CopyMessage::Have { len: 7, hash: [3; 32] }.encode()),
        (3, CopyMessage::Folder("a/b").encode()),
        (3, CopyMessage::Exists.encode()),
        (3, CopyMessage::From(9).encode()),
        (4, LinkFrame::Lent(1, region).encode()),
        (4, LinkFrame::Refused(1, "why".into()).encode()),
        (4, ping(1, 64)),
        (5, rank.encode()),
        (6, advert::encode(region).to_vec()),
        (7, pingpong::frame::Frame::Lent(region).control()),
    ];
    for (at, (choice, message)) in messages.iter().enumerate() {
        write("programs", &format!("{at:02}"), &[&[*choice][..], message].concat());
    }
    // Hostile peers within the host. A receive is posted, the peer connects to the Unix socket,
    // sends a hello, publishes the first record, announces memory, and sends a message in its
    // record and one in a window. In the second tape, the provider connects, so the peer accepts
    // its segment.
    let receive = [16, 0, 0, 5, 0];
    let message = [7, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let in_window = [7, 0, 0, 0, 232, 0, 0, 0, 0, 0];
    let announce = [4, 4, 0, 0, 1, 0, 0, 0, 0, 0];
    let rest = [&announce[..], &message, &in_window, &receive, &message].concat();
    write("within_host", "passive", &[&[0][..], &receive, &receive, &[0, 1, 0, 0, 0, 15], &rest].concat());
    write("within_host", "active", &[&[2, 0, 0][..], &receive, &receive, &[3, 0, 255, 15], &rest].concat());
    // Each target that reads its input as choices gets two tapes. The first tape has each byte value once, in order. The second one has 600
    // pseudo-random bytes.
    let all: Vec<u8> = (0..=255_u8).collect();
    let some: Vec<u8> = (0..600_u32).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 20) as u8).collect();
    for target in [
        "script",
        "datagrams",
        "stream",
        "handshake_psk",
        "handshake_tls",
        "records_psk",
        "records_tls",
        "hostile",
        "within_host",
    ] {
        write(target, "all", &all);
        write(target, "some", &some);
    }
}
