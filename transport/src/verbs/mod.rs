//! RDMA devices, through librdmacm and libibverbs: adapters, and the kernel's software devices `rdma_rxe` and `siw`.
//!
//! Modules use those above them in this table, never those below. `tests/tests/structure.rs` checks that.
//!
//! | modules | hold |
//! |---|---|
//! | `sys` | the binding: declarations, and how the libraries are loaded |
//! | `ffi`, `status`, `route` | return codes, keys and addresses; the meaning of codes; routes |
//! | `channel`, `async_event` | events of the connection manager and of devices, copied out |
//! | `dispatcher` | asynchronous events for every provider of the process |
//! | `device` | the owner of the objects that are open on a device |
//! | `capabilities` | the capabilities of a device |
//! | `mr`, `address`, `cq`, `srq` | owners of memory regions, address handles, completion queues, shared receive queues |
//! | `chains`, `qp_numbers`, `moderation` | work requests in the form of libibverbs; queue pairs by number; completion moderation |
//! | `context`, `gid`, `transitions` | without a connection manager: the owner of a context, GID tables, transitions of a queue pair |
//! | `id` | the owner of an id and its queue pair |
//! | `exchange_socket` | the listener and the stream of a connection by exchange |
//! | `connector` | threads for the calls that block on iWARP |
//! | `qp`, `entry`, `devices` | the provider's entry of a queue pair, an id, a device |
//! | `core` | [`Verbs`]: the tables of all these |
//! | `lifecycle`, `port`, `queues`, `connecting`, `datagram`, `handover`, `retiring` | operations of [`Verbs`], by subject |
//! | `exchange_calls`, `exchange_events` | connecting by exchange: the calls of the program, and the input of peers |
//! | `events` | reads events and processes them |
//! | `open` | [`Verbs::open`], and the search for a device that leads to an address |
//! | `provider` | the implementation of [`crate::Provider`] |
//!
//! Together with [`crate::mem`] this is all unsafe code of the crate. Every C object has one owner here, which destroys it on drop.
//! The owner also keeps the objects alive that it depends on: an id keeps its queues, its device and the event channel; a queue or
//! a region keeps its device. So every order of destruction is valid, and none waits for an event that nobody acknowledges.
//!
//! # Threads
//!
//! One thread drives the provider. No call waits for a peer, but some take time in the device or the kernel. Registering memory
//! takes about 250 ms per GiB: register in pieces between turns, or on another thread with a [`crate::Registrar`]. On an adapter,
//! creating a queue pair, connecting and accepting take up to a millisecond each, and so does creating an address handle on RoCE.
//!
//! On iWARP, `rdma_connect` may block in the kernel until TCP has connected, and destroying an id waits for the end of its
//! handshake. Both run on private threads (`connector`), and their results arrive as connection-manager events. A signal interrupts
//! the thread of a connect that is abandoned: the highest real-time signal that the program does not use.
//!
//! # Removal of a device
//!
//! Every id on a removed device gets [`crate::CmEventKind::DeviceRemoval`]. When the last of them is destroyed, the provider releases
//! all its objects on the device, regions and completion queues included, so that the kernel can finish the removal while the process
//! continues. Their handles stay valid for the calls that destroy them, and a completion queue stays empty. The provider keeps a
//! private idle id on each device, so that it is notified of a removal without any other id. A device that returns has a new handle.
//!
//! librdmacm closes a removed device only when it lists the devices, so the provider has it list them. Listing opens all other
//! devices, so the provider puts an idle id on those as well. If the library finds no device at all, it closes none; then the
//! provider replaces the descriptors that the library has open on the last device by the null device.
//!
//! # Several providers in one process
//!
//! They share the context of a device, because librdmacm keeps one per process, and with it the queue of asynchronous events.
//! Every provider receives every event (`dispatcher`), and processes those of its own objects.

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
