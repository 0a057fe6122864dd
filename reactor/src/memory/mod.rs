//! Memory that is registered with a device: regions of the program, and memory for messages that are longer than one buffer. This module
//! registers the memory through the provider, and does not depend on connections.

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
