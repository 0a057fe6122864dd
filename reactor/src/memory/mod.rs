//! Memory registered with a device, owned by the program or named to peers. This module uses the provider that registers it, and does not
//! depend on connections.

mod block_cache;
pub(crate) mod budget;
pub(crate) mod joins;
pub(crate) mod landing;
pub(crate) mod list;
pub(crate) mod material;
pub(crate) mod operations;
pub(crate) mod region;
pub(crate) mod region_memory;
pub(crate) mod registry;
