//! The protocol of librdmacm's `rping`, which `rping-server` and `rping-client` speak. One round:
//!
//! | client | | server |
//! |---|---|---|
//! | writes a [`ping`] into its source | | |
//! | tells where its source is ([`advert`]) | message -> | |
//! | | -> RDMA Read | fetches the ping |
//! | | <- message | says "go ahead" |
//! | tells where its sink is | message -> | |
//! | | <- RDMA Write | puts the ping there |
//! | compares | <- message | says "done" |
//!
//! Every message has the 16 bytes of an advert; the bytes of the server's messages mean nothing. Neither side ever has
//! more than one message on its way, so one posted receive is enough, and `rping` has just one. The client ends the
//! connection.

pub mod advert;
pub mod options;
pub mod ping;
