//! Decides how token counts are kept: only what the provider reported, last report wins.

/// Token counts as the provider reported them. Absent is not zero, and nobody estimates (EXE-7).
///
/// `reasoning_tokens` is a part of `output_tokens`, `cached_input_tokens` a part of `input_tokens`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "four counts, fixed by EXE-7")]
pub struct Usage {
    /// Prompt tokens.
    pub input_tokens: Option<u64>,
    /// Generated tokens.
    pub output_tokens: Option<u64>,
    /// Generated tokens that were reasoning.
    pub reasoning_tokens: Option<u64>,
    /// Prompt tokens that came from a cache.
    pub cached_input_tokens: Option<u64>,
}

impl Usage {
    /// No count reported.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.input_tokens.is_none()
            && self.output_tokens.is_none()
            && self.reasoning_tokens.is_none()
            && self.cached_input_tokens.is_none()
    }

    /// Takes over every count that `newer` reports; never sums.
    pub fn update(&mut self, newer: Self) {
        self.input_tokens = newer.input_tokens.or(self.input_tokens);
        self.output_tokens = newer.output_tokens.or(self.output_tokens);
        self.reasoning_tokens = newer.reasoning_tokens.or(self.reasoning_tokens);
        self.cached_input_tokens = newer.cached_input_tokens.or(self.cached_input_tokens);
    }

    /// True if `newer` reports more output or input than this.
    #[must_use]
    pub fn grew(&self, newer: &Self) -> bool {
        newer.output_tokens > self.output_tokens || newer.input_tokens > self.input_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_report_wins_and_absent_is_not_zero() {
        // EXE-7, API-4
        let mut usage = Usage { input_tokens: Some(3), ..Usage::default() };
        assert!(Usage::default().is_empty() && !usage.is_empty());
        let newer = Usage { output_tokens: Some(2), ..Usage::default() };
        assert!(usage.grew(&newer));
        usage.update(newer);
        usage.update(newer);
        assert_eq!(usage.input_tokens, Some(3));
        assert_eq!(usage.output_tokens, Some(2), "reports are never summed");
        assert_eq!(usage.reasoning_tokens, None);
        assert!(!usage.grew(&newer));
    }
}
