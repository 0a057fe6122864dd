//! RDMA devices, through librdmacm and libibverbs: adapters, and the kernel's software devices `rdma_rxe` and `siw`.
//!
//! | module | holds |
//! |---|---|
//! | `ffi` | return conventions, contexts, addresses |
//! | `channel` | the connection manager's event channel, and its events copied out |
//! | `id` | a connection-manager id: its owner, and the state it is in |
//! | `device` | a device: context, protection domain, channels, what it can do, its asynchronous events |
//! | `cq`, `qp`, `srq`, `mr` | completion queues, queue pairs with their work requests, shared receive queues, memory regions |
//! | `moderation` | fewer events of a completion queue |
//! | `connector` | threads for the calls that block on iWARP |
//! | `status` | what the codes of the libraries mean |
//! | `open` | [`Verbs::open`], and which provider reaches an address |
//! | `events` | what an event does to an id |
//! | `handover` | connect requests that move to another provider |
//! | `datagram` | address handles, multicast groups |
//! | `landing` | ids on devices, and what is closed when the last one goes |
//! | `queues` | queues made and accounted |
//! | `provider` | [`Verbs`]: the [`crate::Provider`] |
//!
//! Together with [`crate::mem`] this is all unsafe code of the crate. Every C object has one owner here, which
//! destroys it on drop and keeps alive what it depends on: an id its queues, its device and the event channel; a
//! queue or region its device. So no order of destruction can be wrong, and none waits for an event that nobody
//! acknowledges.
//!
//! # Threads
//!
//! The provider is driven by one thread, and no call blocks. One kind of device makes that hard: on iWARP
//! `rdma_connect` may block in the kernel until TCP has connected, and destroying an id waits for the end of its
//! handshake. Both run on private threads (`connector`); what comes out of them arrives as a connection-manager event.
//! A connect that is given up is interrupted by `SIGURG`, if the program has no handler of its own for that signal.
//!
//! # Removal of a device
//!
//! Every id on it gets [`crate::CmEventKind::DeviceRemoval`]. When the last of them is destroyed, everything else that
//! the provider has on the device goes too, regions and completion queues included, so that the kernel can finish the
//! removal while the process lives on. Their handles stay good for the calls that give them back, and a completion
//! queue stays empty. An idle id of the provider's own is kept on each device, so that a removal is noticed even when
//! nothing else is there. A device that comes back is a new one, under a new handle.
//!
//! librdmacm closes a device that is gone only when it looks for devices, which is asked of it then. While it looks it
//! opens all others, so the provider puts an idle id on those as well; and when it finds none at all it closes none,
//! so what it still has open of the last device is replaced by the null device.
//!
//! # Several providers in one process
//!
//! They share the context of a device, because librdmacm keeps one per process, and with it the queue of
//! asynchronous events: one that is for a queue pair of another provider is logged and dropped. Nothing depends on
//! it: a connection that fails is also seen by its completions and by the connection manager.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the feature `verbs` needs a 64-bit target");

mod channel;
mod connector;
mod cq;
mod datagram;
mod device;
mod events;
mod ffi;
mod handover;
mod id;
mod landing;
mod moderation;
mod mr;
mod open;
mod port;
mod provider;
mod qp;
mod queues;
mod srq;
mod status;

pub use open::Reach;
pub use provider::Verbs;

/// Name of the provider.
const NAME: &str = "verbs";
