//! The protocol of librdmacm's `rping`, which `rping-server` and `rping-client` use. In one round, the server reads a ping from the
//! client's source region, and writes it to the client's sink region:
//!
//! | client | | server |
//! |---|---|---|
//! | writes a [`ping`] into its source | | |
//! | names its source ([`advert`]) | message -> | |
//! | | -> RDMA Read | fetches the ping |
//! | | <- message | sends "go ahead" |
//! | names its sink | message -> | |
//! | | <- RDMA Write | writes the ping there |
//! | compares | <- message | sends "done" |
//!
//! Every message has 16 bytes, the length of an advert. The content of the server's messages has no meaning. Each side has at most one
//! message in flight. So one posted receive suffices, and `rping` posts only one. The client ends the connection.

pub mod advert;
pub mod options;
pub mod ping;
