//! Memory registered with a device, in the program's hands or named to peers. Knows the provider that registers it, and no
//! connection.

pub(crate) mod budget;
pub(crate) mod cells;
pub(crate) mod joins;
mod kept;
pub(crate) mod landing;
pub(crate) mod list;
pub(crate) mod material;
pub(crate) mod operations;
pub(crate) mod region;
pub(crate) mod registry;
