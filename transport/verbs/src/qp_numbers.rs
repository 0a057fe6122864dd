//! A map from the numbers of a device's queue pairs to their handles. Completions have only the number.

use rdma_transport::qp::QpId;
use rdma_transport::slab::Key;

/// Finds the handle of a queue pair by its number, with two array accesses and no search. Numbers have 24 bits, and most devices assign
/// consecutive numbers. A number of more than 24 bits is not stored, and completions with such a number name no queue pair.
///
/// Over time a device assigns numbers from its whole range. So the map frees a page, which covers
/// 1024 consecutive numbers, when no queue pair has one of these numbers any more.
#[derive(Debug, Default)]
pub(super) struct QpNumbers {
    pages: Vec<Option<Box<NumberPage>>>, // bound: connections
}

/// The handles of consecutive numbers.
#[derive(Debug)]
struct NumberPage {
    qps: [QpId; QpNumbers::PAGE],
    /// The number of entries of `qps` that are not `NONE`.
    used: usize,
}

impl QpNumbers {
    const PAGE: usize = 1 << 10;
    const LIMIT: usize = 1 << 24;
    const NONE: QpId = QpId(Key::NONE);

    pub(super) fn insert(&mut self, number: u32, qp: QpId) {
        let number = number as usize;
        if number >= Self::LIMIT {
            return;
        }
        let page = number / Self::PAGE;
        if self.pages.len() <= page {
            self.pages.resize_with(page + 1, || None);
        }
        let page =
            self.pages[page].get_or_insert_with(|| Box::new(NumberPage { qps: [Self::NONE; Self::PAGE], used: 0 }));
        let before = std::mem::replace(&mut page.qps[number % Self::PAGE], qp);
        page.used += usize::from(before == Self::NONE);
    }

    /// Removes a number. Does nothing if the number names another queue pair than `qp`.
    pub(super) fn remove(&mut self, number: u32, qp: QpId) {
        let Some(slot) = self.pages.get_mut(number as usize / Self::PAGE) else { return };
        let Some(page) = slot else { return };
        let entry = &mut page.qps[number as usize % Self::PAGE];
        if *entry == qp {
            *entry = Self::NONE;
            page.used -= 1;
            if page.used == 0 {
                *slot = None;
            }
        }
    }

    #[inline]
    pub(super) fn find(&self, number: u32) -> QpId {
        match self.pages.get(number as usize / Self::PAGE) {
            Some(Some(page)) => page.qps[number as usize % Self::PAGE],
            _ => Self::NONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_until_removed() {
        let mut numbers = QpNumbers::default();
        let (a, b) = (QpId(Key::new(1, 1)), QpId(Key::new(2, 1)));
        numbers.insert(17, a);
        numbers.insert(1 << 20, b);
        numbers.insert(u32::MAX, a);
        assert_eq!((numbers.find(17), numbers.find(1 << 20)), (a, b));
        for unknown in [0, 18, 1 << 19, u32::MAX] {
            assert_eq!(numbers.find(unknown), QpNumbers::NONE);
        }
        numbers.remove(17, b);
        assert_eq!(numbers.find(17), a);
        numbers.remove(17, a);
        assert_eq!(numbers.find(17), QpNumbers::NONE);
    }

    /// A program that connects again and again gets numbers from the whole range of the device in the course of time.
    #[test]
    fn numbers_that_are_gone_take_no_memory() {
        let mut numbers = QpNumbers::default();
        let (a, b) = (QpId(Key::new(1, 1)), QpId(Key::new(2, 1)));
        for number in (0..1 << 24).step_by(QpNumbers::PAGE) {
            numbers.insert(number, a);
            numbers.insert(number, b);
            numbers.insert(number + 1, a);
            numbers.remove(number + 1, a);
            assert_eq!((numbers.find(number), numbers.find(number + 1)), (b, QpNumbers::NONE));
            numbers.remove(number, b);
        }
        assert!(numbers.pages.iter().all(Option::is_none));
    }
}
