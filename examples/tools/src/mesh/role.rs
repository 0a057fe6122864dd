//! The role of a connection, as the number that the reactor stores with it.

/// The role of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkRole {
    /// A connection that is being established.
    None,
    /// The control connection between rank 0 and this other rank.
    Control(usize),
    /// The link to this rank.
    Link(usize),
}

impl LinkRole {
    /// Encodes the role as the number for `Context::set_user`.
    #[must_use]
    pub const fn encode(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Control(rank) => (1 << 32) | rank as u64,
            Self::Link(rank) => (2 << 32) | rank as u64,
        }
    }

    /// Decodes the role from the number of `Context::user`.
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
