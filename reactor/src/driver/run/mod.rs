//! The work of open connections: completions, posts, the queues of devices, and their events.

pub(crate) mod data_path;
pub(crate) mod device_event;
pub(crate) mod fair;
pub(crate) mod queues;
