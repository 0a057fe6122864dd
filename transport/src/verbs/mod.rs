//! The provider of RDMA devices, through librdmacm and libibverbs: adapters, and the kernel's software devices `rdma_rxe` and `siw`.
//!
//! A module uses modules above it in this table, never modules below it. `tests/tests/structure.rs` checks this.
//!
//! | modules | contents |
//! |---|---|
//! | `sys` | the binding: C declarations, and the loading of the libraries |
//! | `ffi`, `status`, `route` | conversions of return codes, keys and addresses; of completion statuses; of routes |
//! | `channel`, `async_event` | events of the connection manager and of devices, copied from the libraries' memory |
//! | `dispatcher` | asynchronous events for all providers of the process |
//! | `device` | the owner of the objects that are open on a device |
//! | `capabilities` | the capabilities of a device |
//! | `mr`, `address`, `cq`, `srq` | the owners of memory regions, address handles, completion queues, shared receive queues |
//! | `chains` | chains of work requests in the format of libibverbs |
//! | `qp_numbers` | a map from queue pair numbers to queue pairs |
//! | `moderation` | completion moderation |
//! | `context`, `gid`, `transitions` | for connections by out-of-band exchange: the owner of a context, GID tables, state transitions |
//! | `id` | the owner of an id and its queue pair |
//! | `exchange_socket` | the listener and the stream of a connection by out-of-band exchange, which needs no connection manager |
//! | `connector` | threads for the calls that block on iWARP |
//! | `qp`, `entry`, `devices`, `port` | entries of the provider's tables: a queue pair, an id, a device and its ports |
//! | `id_events`, `datagram` | the processing of events of an id, and its multicast groups |
//! | `hub` | `DeviceHub`: the ids, the devices and the events, which all parts share; it does not know the parts |
//! | `lifecycle`, `connecting`, `hub_events` | operations of the hub: devices of ids, calls and events of the connection manager |
//! | `queues`, `retiring` | `DeviceQueues`: completion queues, shared receive queues, and queue pairs that are destroyed later |
//! | `exchange_calls`, `exchange_events` | `Exchanges`: calls of the program, and input from peers, of connections by exchange |
//! | `core` | [`Verbs`]: the parts |
//! | `handover` | connect requests that move to another provider |
//! | `events` | the reading and processing of events |
//! | `open` | [`Verbs::open`], and the search for a device by an address |
//! | `provider` | the implementation of [`crate::Provider`] |
//!
//! This module and [`crate::mem`] contain all unsafe blocks of the crate except one of [`crate::station`]. Each C object has one Rust
//! owner, which destroys it on drop. The owner also keeps the objects on which its object depends alive, by an `Arc` of each: an id keeps
//! its queues, its device and the event channel; a queue or a region keeps its device. So every order of destruction is valid. No
//! destruction waits for an event: events are acknowledged when they are read, those of a completion queue at the latest before
//! it is destroyed.
//!
//! # Threads
//!
//! One thread drives the provider. No call waits for a peer, but some calls take time in the device or the kernel. Registering memory takes
//! about 250 ms per GiB: register in pieces between turns, or on another thread with a [`crate::Registrar`]. On an adapter, creating a
//! queue pair, connecting and accepting take up to a millisecond each. So does creating an address handle on RoCE.
//!
//! On iWARP, `rdma_connect` may block in the kernel until TCP has connected. Destroying an id waits for the end of its handshake. So both
//! calls run on private threads (`connector`), and the result of a connect arrives as a connection-manager event. If the program destroys
//! the id of a connect, the provider interrupts the thread by a signal: the highest real-time signal that the program did not use at the
//! first connect.
//!
//! # Removal of a device
//!
//! Every id on a removed device receives [`crate::CmEventKind::DeviceRemoval`]. When the program has destroyed all of these ids, the
//! provider releases all its objects on the device, including regions and completion queues. Then the kernel can finish the removal while
//! the process continues. The handles of the regions and queues stay valid for the calls that destroy them, and a completion queue stays
//! empty. The provider keeps a private idle id on each device, so that it is notified of a removal even if the program has no id there. A
//! device that is added again has a new handle.
//!
//! librdmacm closes a removed device only when it lists the devices, so the provider requests the list. Listing opens all other devices, so
//! the provider puts an idle id on those as well. If the library finds no device at all, it closes none. In this case the provider makes
//! the library's descriptors of the last device refer to the null device.
//!
//! # Several providers in one process
//!
//! All providers of a process share the context of a device, because librdmacm keeps one context per process. So they also share its queue
//! of asynchronous events. Every provider receives every event (`dispatcher`), and processes the events of its own objects.

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
mod hub;
mod hub_events;
mod id;
mod id_events;
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

/// The name of the provider.
const NAME: &str = "verbs";
