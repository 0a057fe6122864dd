//! A map from the numbers of a device's queue pairs to their handles. Completions have only the number.

use crate::qp::QpId;
use crate::slab::Key;

/// Finds the handle of a queue pair by its number, with two array accesses and no search. Numbers have 24 bits, and most devices assign
/// consecutive numbers. A number of more than 24 bits is not stored, and completions with such a number name no queue pair.
#[derive(Debug, Default)]
pub(super) struct QpNumbers {
    pages: Vec<Option<Box<[QpId; Self::PAGE]>>>,
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
        self.pages[page].get_or_insert_with(|| Box::new([Self::NONE; Self::PAGE]))[number % Self::PAGE] = qp;
    }

    /// Removes a number. Does nothing if the number names another queue pair than `qp`.
    pub(super) fn remove(&mut self, number: u32, qp: QpId) {
        if let Some(Some(page)) = self.pages.get_mut(number as usize / Self::PAGE) {
            let entry = &mut page[number as usize % Self::PAGE];
            if *entry == qp {
                *entry = Self::NONE;
            }
        }
    }

    #[inline]
    pub(super) fn find(&self, number: u32) -> QpId {
        match self.pages.get(number as usize / Self::PAGE) {
            Some(Some(page)) => page[number as usize % Self::PAGE],
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
}
