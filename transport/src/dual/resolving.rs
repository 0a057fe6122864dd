//! Connections of this side, before it is known which provider carries them.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::Dual;
use super::ids::{Outer, Side};
use crate::cm::{CmEvent, CmEventKind, CmId, ConnectFailure, PathOptions, Source};
use crate::error::Result;
use crate::provider::Provider;
use crate::slab::Key;

/// A connection that a device resolves the address of.
#[derive(Debug)]
struct Attempt {
    peer: SocketAddr,
    options: PathOptions,
    deadline: Instant,
}

/// The connections whose addresses are being resolved on devices.
#[derive(Debug)]
pub(super) struct Attempts {
    /// By the key on the devices.
    all: BTreeMap<Key, Attempt>,
    /// When each of them is given up, the earliest first; `None` before anybody has told the time since. It may have ended.
    limits: VecDeque<(Option<Instant>, Key)>,
    patience: Duration,
    /// The latest time that anybody told.
    now: Option<Instant>,
}

impl Attempts {
    pub(super) const fn new(patience: Duration) -> Self {
        Self { all: BTreeMap::new(), limits: VecDeque::new(), patience, now: None }
    }

    /// Notes what time it is.
    #[inline]
    pub(super) fn at(&mut self, now: Instant) {
        self.now = Some(now);
        if self.limits.back().is_some_and(|limit| limit.0.is_none()) {
            let until = now + self.patience;
            self.limits.iter_mut().rev().take_while(|limit| limit.0.is_none()).for_each(|limit| limit.0 = Some(until));
        }
    }

    fn add(&mut self, id: CmId, attempt: Attempt) {
        self.all.insert(id.0, attempt);
        self.limits.push_back((None, id.0));
    }

    /// Ends an attempt, if there is one.
    pub(super) fn end(&mut self, id: CmId) -> bool {
        self.take(id.0).is_some()
    }

    fn take(&mut self, key: Key) -> Option<Attempt> {
        let attempt = self.all.remove(&key);
        while self.limits.front().is_some_and(|limit| !self.all.contains_key(&limit.1)) {
            self.limits.pop_front();
        }
        attempt
    }

    /// When the next attempt is to be given up. One that has no limit yet is due for getting one.
    pub(super) fn next(&self) -> Option<Instant> {
        self.limits.front().and_then(|limit| limit.0.or(self.now))
    }

    /// Whether the time of one is over.
    #[inline]
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.limits.front().is_some_and(|limit| limit.0.is_some_and(|until| until <= now))
    }

    fn take_overdue(&mut self, now: Instant) -> Option<(Key, Attempt)> {
        let &(Some(until), key) = self.limits.front()? else { return None };
        if until > now {
            return None;
        }
        Some((key, self.take(key)?))
    }
}

impl<E: Provider> Dual<E> {
    pub(super) fn resolve_on(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        options.check()?;
        if options.source != Source::Any {
            // Only devices can choose where a connection leaves from.
            self.note_use(Side::Devices);
            return Ok(self.devices.resolve_with(peer, options, deadline)?.outer(Side::Devices));
        }
        if !peer.ip().is_loopback() {
            match self.devices.resolve_with(peer, options, deadline) {
                Ok(id) => {
                    self.attempts.add(id, Attempt { peer, options: options.clone(), deadline });
                    return Ok(id.outer(Side::Devices));
                }
                Err(error) => self.say_why(peer, &error.to_string()),
            }
        }
        self.note_use(Side::Embedded);
        Ok(self.embedded.resolve_with(peer, options, deadline)?.outer(Side::Embedded))
    }

    fn say_why(&self, peer: SocketAddr, why: &str) {
        let name = self.embedded.name();
        log::info!("provider {name}: falls back to it for {peer}: {why}; ProviderChoice::Verbs insists on a device");
    }

    /// What an event of the devices means for an attempt. One that fails before its address is resolved goes on with the embedded
    /// provider.
    pub(super) fn judge(&mut self, event: CmEvent) -> CmEvent {
        match event {
            CmEvent { id, kind: CmEventKind::ConnectFailed(failure) } => match self.attempts.take(id.0) {
                Some(attempt) => self.fall_back(id, &attempt, failure),
                None => CmEvent { id, kind: CmEventKind::ConnectFailed(failure) },
            },
            CmEvent { id, kind: CmEventKind::Resolved { .. } } => {
                if self.attempts.end(id) {
                    self.note_use(Side::Devices);
                }
                event
            }
            _ => event,
        }
    }

    /// The next attempt whose time is over, as an event of the devices.
    pub(super) fn give_up_one(&mut self, now: Instant) -> Option<CmEvent> {
        let (key, attempt) = self.attempts.take_overdue(now)?;
        let why = format!("it does not resolve within {} ms", self.attempts.patience.as_millis());
        Some(self.fall_back(CmId(key), &attempt, ConnectFailure::Unreachable(why)))
    }

    fn fall_back(&mut self, id: CmId, attempt: &Attempt, failure: ConnectFailure) -> CmEvent {
        let Attempt { peer, options, deadline } = attempt;
        self.say_why(*peer, &failure.to_string());
        let kind = match self.embedded.resolve_with(*peer, options, *deadline) {
            Ok(to) => {
                self.note_use(Side::Embedded);
                CmEventKind::Moved { to: to.outer(Side::Embedded) }
            }
            Err(error) => {
                log::debug!("{peer}: {error}");
                CmEventKind::ConnectFailed(failure)
            }
        };
        CmEvent { id, kind }
    }
}
