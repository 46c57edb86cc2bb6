//! Decides whether messages arrive in order: per direction and per run, from 1 without gaps (WIR-6).

/// A number that is not the last one plus 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected number {expected}, got {got}")]
pub struct OutOfOrder {
    /// What should have come.
    pub expected: u64,
    /// What came.
    pub got: u64,
}

/// Checks one sequence.
#[derive(Debug, Clone, Copy, Default)]
pub struct SequenceCheck {
    last: u64,
}

impl SequenceCheck {
    /// Accepts the next number.
    ///
    /// # Errors
    /// [`OutOfOrder`] for any other number; the sequence stays where it was.
    pub const fn accept(&mut self, got: u64) -> Result<(), OutOfOrder> {
        let expected = self.last.wrapping_add(1);
        if got == expected {
            self.last = got;
            Ok(())
        } else {
            Err(OutOfOrder { expected, got })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_next_number_is_accepted() {
        // WIR-6, W1
        let mut check = SequenceCheck::default();
        assert_eq!(check.accept(0), Err(OutOfOrder { expected: 1, got: 0 }));
        assert_eq!(check.accept(1), Ok(()));
        for wrong in [0, 1, 3, u64::MAX] {
            assert_eq!(check.accept(wrong), Err(OutOfOrder { expected: 2, got: wrong }));
        }
        assert_eq!(check.accept(2), Ok(()));
    }
}
