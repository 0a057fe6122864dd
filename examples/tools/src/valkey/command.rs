//! The commands of Valkey's RDMA transport. A command is a message of 32 bytes; its numbers are big-endian.

use rdma_reactor::RemoteRegion;

/// The length of a command, in bytes.
pub const LEN: usize = 32;

/// A command of the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValkeyCommand {
    /// `GetServerFeature`: the client sends 0. The server answers with the features that it supports.
    ServerFeatures(u64),
    /// `SetClientFeature`: the client sends the features that it uses.
    ClientFeatures(u64),
    /// `Keepalive`: shows the receiver that the sender is alive. There is no answer.
    Keepalive,
    /// `RegisterXferMemory`: the sender's transfer buffer. The peer may write to it from its beginning.
    Buffer(RemoteRegion),
}

impl ValkeyCommand {
    /// Encodes the command. A buffer must be shorter than 4 GiB.
    #[must_use]
    pub fn encode(self) -> [u8; LEN] {
        let mut out = [0; LEN];
        let mut put = |opcode: u8, at: usize, bytes: &[u8]| {
            out[1] = opcode;
            out[at..at + bytes.len()].copy_from_slice(bytes);
        };
        match self {
            Self::ServerFeatures(features) => put(0, 24, &features.to_be_bytes()),
            Self::ClientFeatures(features) => put(1, 24, &features.to_be_bytes()),
            Self::Keepalive => put(2, 2, &[]),
            Self::Buffer(region) => {
                let len = u32::try_from(region.len).expect("the buffer is at most --buffer, which is less");
                put(3, 16, &region.address.to_be_bytes());
                put(3, 24, &len.to_be_bytes());
                put(3, 28, &region.key.to_be_bytes());
            }
        }
        out
    }

    /// Decodes a command.
    ///
    /// # Errors
    /// The length is not 32 bytes, the opcode is unknown, or the buffer is empty or exceeds the address space.
    pub fn decode(message: &[u8]) -> Result<Self, String> {
        let message: &[u8; LEN] =
            message.try_into().map_err(|_| format!("a command of {} bytes where Valkey has {LEN}", message.len()))?;
        let word = |at: usize| u32::from_be_bytes([message[at], message[at + 1], message[at + 2], message[at + 3]]);
        let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
        match u16::from_be_bytes([message[0], message[1]]) {
            0 => Ok(Self::ServerFeatures(long(24))),
            1 => Ok(Self::ClientFeatures(long(24))),
            2 => Ok(Self::Keepalive),
            3 => {
                let region = RemoteRegion { address: long(16), len: word(24).into(), key: word(28) };
                match region.address.checked_add(region.len) {
                    Some(_) if region.len > 0 => Ok(Self::Buffer(region)),
                    _ => Err(format!("a buffer of {} bytes at {:#x}", region.len, region.address)),
                }
            }
            other => Err(format!("a command with the unknown opcode {other}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_of_valkey() {
        let region = RemoteRegion { address: 0x1122_3344_5566_7788, len: 0x0010_0000, key: 0x99aa_bbcc };
        let buffer = *b"\0\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x11\x22\x33\x44\x55\x66\x77\x88\0\x10\0\0\x99\xaa\xbb\xcc";
        let features = *b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x80\0\0\0\0\0\0\x01";
        assert_eq!(ValkeyCommand::Buffer(region).encode(), buffer);
        assert_eq!(ValkeyCommand::ServerFeatures(0x8000_0000_0000_0001).encode(), features);
        for command in [
            ValkeyCommand::Buffer(region),
            ValkeyCommand::ServerFeatures(u64::MAX),
            ValkeyCommand::ClientFeatures(0),
            ValkeyCommand::Keepalive,
        ] {
            assert_eq!(ValkeyCommand::decode(&command.encode()), Ok(command));
        }
    }

    #[test]
    fn what_is_no_command_is_said() {
        let refused = |message: &[u8]| ValkeyCommand::decode(message).unwrap_err();
        assert_eq!(refused(&[0; 31]), "a command of 31 bytes where Valkey has 32");
        assert_eq!(refused(&[1; LEN]), "a command with the unknown opcode 257");
        let buffer = |address, len| ValkeyCommand::Buffer(RemoteRegion { address, len, key: 1 }).encode();
        assert_eq!(refused(&buffer(0x1000, 0)), "a buffer of 0 bytes at 0x1000");
        assert!(refused(&buffer(u64::MAX, 2)).starts_with("a buffer of 2 bytes"));
    }
}
