//! The completion queues that the receives of a shared receive queue complete on.

use crate::handle::CqId;

/// Each completion queue that has room for all receives of a shared queue, with the number of queue pairs that complete
/// there. The room stays after the last of them, for completions that it has left, until the shared queue is destroyed.
#[derive(Debug, Default)]
pub(crate) struct Targets(Vec<(CqId, usize)>);

impl Targets {
    /// Adds a queue pair that completes its receives on `cq`, after `reserve` has made room there if nobody has before.
    ///
    /// # Errors
    /// That of `reserve`; nothing has changed then.
    pub(crate) fn attach<E>(&mut self, cq: CqId, reserve: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        if let Some(target) = self.0.iter_mut().find(|target| target.0 == cq) {
            target.1 += 1;
            return Ok(());
        }
        reserve()?;
        self.0.push((cq, 1));
        Ok(())
    }

    /// Removes a queue pair.
    pub(crate) fn detach(&mut self, cq: CqId) {
        if let Some(target) = self.0.iter_mut().find(|target| target.0 == cq) {
            target.1 = target.1.saturating_sub(1);
        }
    }

    /// Whether any queue pair uses the shared queue.
    pub(crate) fn is_used(&self) -> bool {
        self.0.iter().any(|target| target.1 > 0)
    }

    /// The completion queues that have room for its receives.
    pub(crate) fn iter(&self) -> impl Iterator<Item = CqId> {
        self.0.iter().map(|target| target.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::Key;

    #[test]
    fn room_is_made_once_and_kept() {
        let mut targets = Targets::default();
        let [a, b] = [1, 2].map(|slot| CqId(Key::new(slot, 1)));
        let mut made = 0;
        for cq in [a, b, a] {
            let reserve = || {
                made += 1;
                Ok::<_, ()>(())
            };
            targets.attach(cq, reserve).unwrap();
        }
        assert_eq!((made, targets.attach(CqId(Key::new(3, 1)), || Err(7))), (2, Err(7)));
        for (cq, used) in [(a, true), (b, true), (a, false), (a, false)] {
            targets.detach(cq);
            assert_eq!(targets.is_used(), used);
        }
        assert_eq!(targets.iter().collect::<Vec<_>>(), [a, b]);
    }
}
