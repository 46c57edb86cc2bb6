//! Decides how a mistake in a config file is told: where it is, what is wrong, what to write instead.

use std::fmt;

/// A place in a file, counted from 1. `Position::default()` is "somewhere in the file".
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line; 0 = not known.
    pub line: u64,
    /// The column; 0 = not known.
    pub column: u64,
}

/// How bad a problem is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The config can't be used.
    Error,
    /// It can be used, and somebody should know.
    Warning,
}

impl Severity {
    /// Its word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

/// One mistake. Its text never holds a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// How bad it is.
    pub severity: Severity,
    /// Where it is.
    pub at: Position,
    /// What is wrong.
    pub message: String,
    /// What to write or do instead.
    pub suggestion: Option<String>,
}

/// Every problem of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Problems {
    file: String,
    list: Vec<Problem>,
}

impl Problems {
    /// No problem yet in the file of that name.
    #[must_use]
    pub fn of(file: impl Into<String>) -> Self {
        Self { file: file.into(), list: Vec::new() }
    }

    /// Adds a mistake that makes the config unusable.
    pub fn error(&mut self, at: Position, message: impl Into<String>, suggestion: impl Into<Option<String>>) {
        self.push(Severity::Error, at, message.into(), suggestion.into());
    }

    /// Adds something that somebody should know.
    pub fn warning(&mut self, at: Position, message: impl Into<String>, suggestion: impl Into<Option<String>>) {
        self.push(Severity::Warning, at, message.into(), suggestion.into());
    }

    fn push(&mut self, severity: Severity, at: Position, message: String, suggestion: Option<String>) {
        let problem = Problem { severity, at, message, suggestion };
        if !self.list.contains(&problem) {
            self.list.push(problem);
        }
    }

    /// Adds those of another file, which stands at `at` in this one.
    pub fn absorb(&mut self, other: &Self, at: Position) {
        for problem in other.sorted() {
            let Position { line, column } = problem.at;
            let place = if line > 0 { format!("{}:{line}:{column}", other.file) } else { other.file.clone() };
            self.push(problem.severity, at, format!("{place}: {}", problem.message), problem.suggestion.clone());
        }
    }

    /// The problems in file order.
    #[must_use]
    pub fn sorted(&self) -> Vec<&Problem> {
        let mut list: Vec<_> = self.list.iter().collect();
        list.sort_by_key(|problem| problem.at);
        list
    }

    /// How many errors and warnings there are.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let errors = self.list.iter().filter(|problem| problem.severity == Severity::Error).count();
        (errors, self.list.len() - errors)
    }

    /// How many there are, for people.
    #[must_use]
    pub fn summary(&self) -> String {
        let plural = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        match self.counts() {
            (0, 0) => "no problem found".to_owned(),
            (0, warnings) => plural(warnings, "warning"),
            (errors, 0) => plural(errors, "error"),
            (errors, warnings) => format!("{}, {}", plural(errors, "error"), plural(warnings, "warning")),
        }
    }

    /// True if at least one makes the config unusable.
    #[must_use]
    pub fn has_errors(&self) -> bool {
        self.counts().0 > 0
    }

    /// The file they are in.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }
}

impl fmt::Display for Problems {
    /// One problem per line, its suggestion indented below it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in self.sorted() {
            write!(f, "{}", self.file)?;
            if problem.at.line > 0 {
                write!(f, ":{}:{}", problem.at.line, problem.at.column)?;
            }
            writeln!(f, ": {}: {}", problem.severity.as_str(), problem.message)?;
            if let Some(suggestion) = &problem.suggestion {
                writeln!(f, "    {suggestion}")?;
            }
        }
        Ok(())
    }
}

/// The candidate that `name` was most likely meant to be, if one is near enough to be worth saying.
#[must_use]
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = name.to_lowercase().replace('-', "_");
    candidates
        .into_iter()
        .map(|candidate| (distance(&name, &candidate.to_lowercase().replace('-', "_")), candidate))
        .filter(|(distance, candidate)| *distance <= name.len().max(candidate.len()).div_ceil(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Edits (insert, delete, replace, swap of neighbours) between two texts.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0_usize; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

/// `did you mean "x"?`, or a list of what is known when nothing is near.
#[must_use]
pub fn did_you_mean(name: &str, known: &[&str]) -> Option<String> {
    match nearest(name, known.iter().copied()) {
        Some(near) => Some(format!("did you mean `{near}`?")),
        None if known.is_empty() => None,
        None => Some(format!("known here: {}", known.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_finds_its_name_and_nonsense_finds_none() {
        // CFG-1
        let known = ["capacity", "base_url", "token_hash"];
        for (typo, meant) in [
            ("capcity", Some("capacity")),
            ("capactiy", Some("capacity")),
            ("baseUrl", Some("base_url")),
            ("base-url", Some("base_url")),
            ("Token_Hash", Some("token_hash")),
            ("zzz", None),
        ] {
            assert_eq!(nearest(typo, known), meant, "{typo}");
        }
    }

    #[test]
    fn problems_print_in_file_order_with_their_suggestion() {
        // BIN-4
        let mut problems = Problems::of("edge.yaml");
        problems.warning(Position { line: 9, column: 1 }, "later", None);
        problems.error(Position { line: 2, column: 3 }, "earlier", Some("write this".to_owned()));
        problems.error(Position::default(), "no place", None);
        assert_eq!(
            problems.to_string(),
            "edge.yaml: error: no place\nedge.yaml:2:3: error: earlier\n    write this\nedge.yaml:9:1: warning: later\n"
        );
        assert_eq!(problems.counts(), (2, 1));
    }
}
