//! The protocol of librdmacm's `rping`, which `rping-server` and `rping-client` speak. One round:
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
//! Every message has the 16 bytes of an advert; the bytes of the server's messages mean nothing. Neither side ever has
//! more than one message in flight, so one posted receive is enough, and `rping` has just one. The client ends the
//! connection.

pub mod advert;
pub mod options;
pub mod ping;
