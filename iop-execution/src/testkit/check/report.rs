//! Decides how the findings of a check are told: one line each.

use std::fmt;

/// How one check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "a check passes, fails, or does not apply")]
pub enum Verdict {
    /// As it should be.
    Passed,
    /// Not as it should be.
    Failed,
    /// Does not apply.
    Skipped,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// How it ended.
    pub verdict: Verdict,
    /// What was found.
    pub detail: String,
}

/// Everything that was checked. `Display` is a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use]
pub struct CheckReport {
    checks: Vec<Check>,
}

impl CheckReport {
    pub(super) fn add(&mut self, name: &'static str, found: Result<String, String>) {
        let (verdict, detail) = match found {
            Ok(detail) => (Verdict::Passed, detail),
            Err(detail) => (Verdict::Failed, detail),
        };
        self.checks.push(Check { name, verdict, detail });
    }

    pub(super) fn skip(&mut self, name: &'static str, why: &str) {
        self.checks.push(Check { name, verdict: Verdict::Skipped, detail: why.to_owned() });
    }

    /// True if nothing failed.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.failures().next().is_none()
    }

    /// Every check, in order.
    #[must_use]
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// The checks that failed.
    pub fn failures(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| check.verdict == Verdict::Failed)
    }
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        for check in &self.checks {
            let verdict = match check.verdict {
                Verdict::Passed => "ok",
                Verdict::Failed => "FAILED",
                Verdict::Skipped => "skipped",
            };
            writeln!(f, "{:width$}  {verdict:7}  {}", check.name, check.detail)?;
        }
        Ok(())
    }
}
