//! The provider of RDMA devices, through librdmacm and libibverbs: adapters, and the kernel's software devices `rdma_rxe` and `siw`.
//!
//! `docs/design/layers.md` has the modules in their order: each uses only those below it.
//!
//! Each C object has one Rust owner, which destroys it on drop. The owner also keeps the objects on
//! which its object depends alive, by an `Arc` of each: an id keeps its queues, its device and the
//! event channel; a queue or a region keeps its device. So every order of destruction is valid. No
//! destruction waits for an event: events are acknowledged when they are read, those of a
//! completion queue at the latest before it is destroyed.
//!
//! # Threads
//!
//! One thread drives the provider. No call waits for a peer, but some calls take time in the device
//! or the kernel. Registering memory takes about 250 ms per GiB: register in pieces between turns,
//! or on another thread with a [`rdma_transport::Registrar`]. On an adapter, creating a queue pair,
//! connecting and accepting take up to a millisecond each. So does creating an address handle on
//! RoCE.
//!
//! On iWARP, `rdma_connect` may block in the kernel until TCP has connected. Destroying an id waits for the end of its handshake. So both
//! calls run on private threads (`connector`), and the result of a connect arrives as a connection-manager event. If the program destroys
//! the id of a connect, the provider interrupts the thread by a signal: the highest real-time signal that the program did not use at the
//! first connect.
//!
//! # Removal of a device
//!
//! Every id on a removed device receives [`rdma_transport::CmEventKind::DeviceRemoval`]. When the
//! program has destroyed all of these ids, the provider releases all its objects on the device,
//! including regions and completion queues. Then the kernel can finish the removal while the
//! process continues. The handles of the regions and queues stay valid for the calls that destroy
//! them, and a completion queue stays empty. The provider keeps a private idle id on each device,
//! so that it is notified of a removal even if the program has no id there. A device that is added
//! again has a new handle.
//!
//! librdmacm closes a removed device only when it lists the devices, so the provider requests the list. Listing opens all other devices, so
//! the provider puts an idle id on those as well. If the library finds no device at all, it closes none. In this case the provider makes
//! the library's descriptors of the last device refer to the null device.
//!
//! # Several providers in one process
//!
//! All providers of a process share the context of a device, because librdmacm keeps one context per process. So they also share its queue
//! of asynchronous events. Every provider receives every event (`dispatcher`), and processes the events of its own objects.

#[macro_use(local_log, peer_log)]
extern crate rdma_transport;

#[cfg(not(target_pointer_width = "64"))]
compile_error!("rdma-transport-verbs needs a 64-bit target");

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
mod cq;
mod datagram;
mod device;
mod devices;
mod dispatcher;
mod entry;
mod events;
mod exchange;
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
mod parts;
mod path;
#[cfg(test)]
mod patience;
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
#[cfg(test)]
mod test_memory;
mod transitions;

pub use self::parts::Verbs;
pub use open::Reach;
pub use path::PathState;

/// The name of the provider.
const NAME: &str = "verbs";
