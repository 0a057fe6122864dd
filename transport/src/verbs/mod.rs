//! RDMA devices, through librdmacm and libibverbs: adapters, and the kernel's software devices `rdma_rxe` and `siw`.
//!
//! Modules know those above them in this table, never those below; a test of the project holds that.
//!
//! | modules | hold |
//! |---|---|
//! | `sys` | the binding: declarations, and how the libraries are loaded |
//! | `ffi`, `status`, `route` | return conventions, keys and addresses; the meaning of codes; routes |
//! | `channel`, `async_event` | events of the connection manager and of devices, copied out |
//! | `dispatcher` | asynchronous events for every provider of the process |
//! | `device` | the owner of what is open on a device |
//! | `capabilities` | what a device can do |
//! | `mr`, `address`, `cq`, `srq` | owners of memory regions, address handles, completion queues, shared receive queues |
//! | `chains`, `numbers`, `moderation` | work requests in the device's form; queue pairs by number; fewer completion events |
//! | `opened`, `gid`, `transitions` | without a connection manager: the owner of a context, the tables of GIDs, the ways from state to state |
//! | `id` | the owner of an id and its queue pair |
//! | `link` | the stream of a connection by exchange |
//! | `connector` | threads for the calls that block on iWARP |
//! | `qp`, `entry`, `devices` | what the provider knows of a queue pair, an id, a device |
//! | `core` | [`Verbs`]: the tables of all these |
//! | `landing`, `port`, `queues`, `connecting`, `datagram`, `handover`, `retiring`, `exchanging`, `streams` | what [`Verbs`] does, by subject |
//! | `events` | what an event does |
//! | `open` | [`Verbs::open`], and whether a device leads to an address |
//! | `provider` | the implementation of [`crate::Provider`] |
//!
//! Together with [`crate::mem`] this is all unsafe code of the crate. Every C object has one owner here, which destroys it on
//! drop and keeps alive what the object depends on: an id keeps its queues, its device and the event channel; a queue or a
//! region keeps its device. So no order of destruction can be wrong, and none waits for an event that nobody acknowledges.
//!
//! # Threads
//!
//! One thread drives the provider. Its calls wait for no peer. Some take time in the device or the kernel all the same:
//! registering memory takes about a quarter of a second for a gibibyte (register in pieces between turns, or on another
//! thread with a [`crate::Registrar`]); making a queue pair, connecting and accepting take up to a millisecond each on an
//! adapter, and so does an address handle on RoCE.
//!
//! iWARP makes it hard not to wait for a peer: `rdma_connect` may block in the kernel until TCP has connected, and destroying
//! an id waits for the end of its handshake. Both run on private threads (`connector`); their results arrive as
//! connection-manager events. A connect that is given up is interrupted by a signal to its thread: the highest real-time signal
//! that the program does not use.
//!
//! # Removal of a device
//!
//! Every id on a device that goes away gets [`crate::CmEventKind::DeviceRemoval`]. When the last of them is destroyed,
//! everything else that the provider has on the device goes too, regions and completion queues included, so that the kernel can
//! finish the removal while the process lives on. Their handles stay good for the calls that give them back, and a completion
//! queue stays empty. The provider keeps an idle id of its own on each device, so that a removal is noticed even when nothing
//! else is there. A device that comes back is a new one, under a new handle.
//!
//! librdmacm closes a device that is gone only when it looks for devices, so the provider makes it look. Looking opens all other
//! devices, so the provider puts an idle id on those as well. When the library finds no device at all, it closes none; then the
//! provider replaces what the library has open of the last device by the null device.
//!
//! # Several providers in one process
//!
//! They share the context of a device, because librdmacm keeps one per process, and with it the queue of asynchronous events.
//! Every provider hears of every event (`dispatcher`), and picks what concerns it.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the feature `verbs` needs a 64-bit target");

#[cfg(all(test, not(feature = "rdma-sys")))]
mod adapter_tests;
mod address;
mod async_event;
mod capabilities;
mod chains;
mod channel;
mod connecting;
mod connector;
mod context;
mod core;
mod cq;
mod datagram;
mod device;
mod devices;
mod dispatcher;
mod entry;
mod events;
mod exchange_calls;
mod exchange_events;
mod exchange_socket;
#[cfg(all(test, not(feature = "rdma-sys")))]
mod exchange_tests;
#[cfg(all(test, not(feature = "rdma-sys")))]
pub(crate) mod fake;
mod ffi;
mod gid;
mod handover;
mod id;
mod lifecycle;
mod moderation;
mod mr;
mod open;
mod port;
mod provider;
mod qp;
mod qp_numbers;
mod queues;
mod retiring;
mod route;
mod srq;
mod status;
mod sys;
mod transitions;

pub use self::core::Verbs;
pub use open::Reach;

/// Name of the provider.
const NAME: &str = "verbs";
