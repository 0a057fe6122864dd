//! The work of open connections: completions, posts, the queues of devices, and their events.

pub(in crate::driver) mod data_path;
pub(in crate::driver) mod device_event;
pub(in crate::driver) mod fair;
pub(crate) mod queues;
