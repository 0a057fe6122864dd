//! The role of a connection. The reactor stores it as the user number of the connection.

/// The role of a connection at this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkRole {
    /// The connection is being established and has no role yet.
    None,
    /// The control connection between rank 0 and another rank. The field is the number of that other rank.
    Control(usize),
    /// The link between this rank and another one. The field is the number of that other rank.
    Link(usize),
}

impl LinkRole {
    /// Encodes the role as a number for `ConnectionContext::set_user`.
    #[must_use]
    pub const fn encode(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Control(rank) => (1 << 32) | rank as u64,
            Self::Link(rank) => (2 << 32) | rank as u64,
        }
    }

    /// Decodes the role from the number that `ConnectionContext::user` returns.
    #[must_use]
    pub const fn decode(number: u64) -> Self {
        let rank = (number & 0xffff_ffff) as usize;
        match number >> 32 {
            1 => Self::Control(rank),
            2 => Self::Link(rank),
            _ => Self::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_survives_the_trip() {
        for role in
            [LinkRole::None, LinkRole::Control(0), LinkRole::Link(0), LinkRole::Control(9_999), LinkRole::Link(9_999)]
        {
            assert_eq!(LinkRole::decode(role.encode()), role);
        }
    }
}
