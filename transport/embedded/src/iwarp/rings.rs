//! The connections in shared memory (links). This module decides which rings a busy poll checks,
//! and which links are armed.
//!
//! A link is *armed* if the local side has announced in the shared memory that it sleeps. A peer
//! wakes the local side only if the link is armed. So all links are armed before the
//! caller sleeps. The links that have received something recently are *hot*: in most rounds, a busy
//! poll only checks the rings of hot links. Each link that is not armed is hot.

use std::time::Instant;

use super::endpoint::CmEndpoint;
use super::endpoints::Endpoints;
use super::flow::Outcome;
use super::hub::Hub;
use super::net::{Net, NetChannel};
use rdma_transport::slab::Key;

/// The largest number of hot links, whose rings a busy poll checks in every round.
const MAX_HOT: usize = 32;
/// The number of rounds of a busy poll without input after which a link is no longer hot.
const IDLE: u32 = 10_000;
/// A busy poll checks all connections in one of 64 rounds, or in one of 2 rounds if the provider
/// also has TCP connections or UDP ports. In the other rounds, and in each round that finds input
/// in a ring, a busy poll only checks the rings of hot links.
const ROUNDS: (u32, u32) = (64, 2);

/// The hot links, and the number of rounds of the busy poll.
#[derive(Debug, Default)]
pub(super) struct Rings {
    /// The links whose rings a busy poll checks in every round. The number beside a link's key is
    /// the number of rounds since the last input of the link.
    hot: Vec<(Key, u32)>, // bound: hot-links
    /// The number of rounds of a busy poll so far, modulo 2^32.
    rounds: u32,
    /// True if there may be a link that is not armed. The peer of such a link does not wake the
    /// local side.
    pub(super) unarmed: bool,
}

impl Rings {
    /// Runs one round of a busy poll on the rings of hot links. `others` is the number of
    /// connections on TCP and of UDP ports. Returns false if this round must check all connections.
    #[inline]
    pub(super) fn spin<N: Net>(
        &mut self,
        endpoints: &mut Endpoints<N>,
        hub: &mut Hub<N>,
        others: usize,
        now: Instant,
    ) -> bool {
        self.rounds = self.rounds.wrapping_add(1);
        let mut found = false;
        let mut at = 0;
        while let Some(&mut (key, ref mut idle)) = self.hot.get_mut(at) {
            let Some(CmEndpoint::Ring(flow)) = endpoints.get_mut(key) else {
                self.hot.swap_remove(at);
                continue;
            };
            if flow.link.has_work() {
                (*idle, found, self.unarmed) = (0, true, true);
                if let Outcome::Ended(end) = flow.serve(hub, now) {
                    endpoints.end(hub, key, end, now);
                }
            } else {
                *idle += 1;
                if *idle > IDLE {
                    self.hot.swap_remove(at);
                    cool(endpoints, hub, key);
                    continue;
                }
            }
            at += 1;
        }
        let every = if others > 0 { ROUNDS.1 } else { ROUNDS.0 };
        found || self.rounds % every != 0
    }

    /// Makes a link hot, so that a busy poll checks its ring in every round.
    #[inline]
    pub(super) fn heat<N: Net>(&mut self, endpoints: &mut Endpoints<N>, hub: &mut Hub<N>, key: Key) {
        self.unarmed = true;
        if self.hot.iter().any(|hot| hot.0 == key) {
            return;
        }
        if self.hot.len() == MAX_HOT {
            let idlest = (0..MAX_HOT).max_by_key(|&at| self.hot[at].1).unwrap_or(0);
            let (idlest, _) = self.hot.swap_remove(idlest);
            cool(endpoints, hub, idlest);
        }
        self.hot.push((key, 0));
    }

    /// Arms all links, before the caller may sleep. Returns true if input has already arrived on a
    /// link.
    pub(super) fn arm_all<N: Net>(&mut self, endpoints: &mut Endpoints<N>, hub: &mut Hub<N>) -> bool {
        self.unarmed = false;
        let mut news = false;
        for &(key, _) in &self.hot {
            if let Some(CmEndpoint::Ring(flow)) = endpoints.get_mut(key) {
                if flow.arm(hub) {
                    flow.enqueue(hub);
                    news = true;
                }
            }
        }
        news
    }
}

/// Arms a link that is no longer hot: from now on, the peer wakes the local side when it writes
/// records.
fn cool<N: Net>(endpoints: &mut Endpoints<N>, hub: &mut Hub<N>, key: Key) {
    if let Some(CmEndpoint::Ring(flow)) = endpoints.get_mut(key) {
        if flow.arm(hub) {
            flow.enqueue(hub);
            hub.net.wake(NetChannel::Completion);
        }
    }
}

#[cfg(test)]
mod tests;
