//! The constructor of a group of reactors.

use std::sync::Arc;

use super::Reactor;
use crate::driver::open::group::Reactors;

impl Reactors {
    /// Creates a group. All reactors must have providers of the same kinds in the same order, as they have with the same
    /// [`ProviderChoice`](crate::ProviderChoice). The first reactor has index 0. A reactor that is in another group leaves that group.
    /// A reactor that is draining accepts no connections of the group.
    #[must_use]
    pub fn of<M>(reactors: &mut [Reactor<M>]) -> Self {
        let members = reactors.iter().map(|reactor| {
            let driver = &reactor.driver;
            let wake = Arc::clone(&driver.os.wake);
            (wake, driver.table.len(), driver.config.max_pending as usize)
        });
        let (group, ends) = Self::form(members.collect());
        for (reactor, end) in reactors.iter_mut().zip(ends) {
            reactor.driver.join_group(end);
        }
        group
    }
}
