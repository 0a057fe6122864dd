//! The fuzz target of the wire formats of the tools: `kv`, `rcp`, `rdma-mesh`, `rdma-pingpong`, and the programs that
//! use rping's format.

use rdma_reactor_tools::kv::table::Slot;
use rdma_reactor_tools::kv::wire::{TableHello, decode_put, encode_put};
use rdma_reactor_tools::mesh::frame::{LOAD, LinkFrame};
use rdma_reactor_tools::mesh::hello::Hello as Rank;
use rdma_reactor_tools::pingpong;
use rdma_reactor_tools::rcp::wire::CopyMessage;
use rdma_reactor_tools::rping::advert;

/// Parses a message of one of the programs, and emits it again. The first byte of the input selects the program and the
/// kind of message.
///
/// # Panics
/// Panics if an emitted message differs from the parsed one.
pub fn programs(octets: &[u8]) {
    let Some((choice, octets)) = octets.split_first() else { return };
    match choice % 8 {
        0 => {
            if let Some(hello) = TableHello::decode(octets) {
                assert_eq!(TableHello::decode(&hello.encode()), Some(hello));
                let last = hello.geometry.places(octets).max().expect("a table has slots");
                let end = last + hello.geometry.slot_len() as u64;
                assert!(hello.region.part(last, hello.geometry.slot_len() as u64).is_some(), "a slot ends at {end}");
            }
        }
        1 => {
            if let Some((key, value)) = decode_put(octets) {
                assert_eq!(encode_put(key, value), octets);
            }
        }
        2 => {
            if let Slot::Entry { version, key, value } = Slot::parse(octets) {
                assert!(version > 0 && version % 2 == 0 && key.len() + value.len() + 24 <= octets.len());
            }
        }
        3 => {
            if let Some(say) = CopyMessage::decode(octets) {
                assert_eq!(say.encode(), octets);
            }
        }
        4 => {
            if let Some(frame) = LinkFrame::decode(octets) {
                assert!(
                    matches!(frame, LinkFrame::Load(None)) || LinkFrame::decode(&frame.encode()) == Some(frame.clone())
                );
                assert!(!matches!(frame, LinkFrame::Load(Some(_))) || octets.len() == LOAD);
            }
        }
        5 => {
            if let Some(rank) = Rank::decode(octets) {
                assert_eq!(Rank::decode(&rank.encode()), Some(rank));
            }
        }
        6 => {
            if let Ok(region) = advert::decode(octets) {
                assert_eq!(advert::encode(region), octets);
            }
        }
        _ => {
            let size = u32::from(*choice);
            let frame = pingpong::frame::Frame::read(octets, size);
            if let Some(frame) = frame.filter(|frame| *frame != pingpong::frame::Frame::Data) {
                assert_eq!(frame.control(), octets);
            }
        }
    }
}
