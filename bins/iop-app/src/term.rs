//! Decides how a command talks to people: results on stdout, everything else on stderr, never a panic on a closed pipe.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _, stderr, stdout};

/// Writes a line of the command's result. A reader that has gone away is no error.
pub fn say(line: impl Display) {
    #[cfg(test)]
    heard::keep(&line);
    let mut out = stdout().lock();
    let _gone = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// What tests of this thread have been told as a result.
#[cfg(test)]
pub(crate) mod heard {
    use std::cell::RefCell;
    use std::fmt::{Display, Write as _};

    thread_local!(static SAID: RefCell<String> = const { RefCell::new(String::new()) });

    pub(super) fn keep(line: &impl Display) {
        SAID.with_borrow_mut(|said| writeln!(said, "{line}").unwrap());
    }

    pub(crate) fn take() -> String {
        SAID.take()
    }
}

/// Writes a line about the command.
pub fn note(line: impl Display) {
    let _gone = writeln!(stderr().lock(), "{line}");
}

/// Rows as columns of equal width, two spaces apart.
#[must_use]
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', (width + 2).saturating_sub(cell.chars().count())));
        }
        out.push_str("  ");
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// True if results go to a person.
#[must_use]
pub fn is_person() -> bool {
    stdout().is_terminal()
}

/// How a cell looks on a terminal with colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paint {
    /// As it is.
    Plain,
    /// All is well.
    Good,
    /// Somebody should look.
    Warn,
    /// Something is wrong.
    Bad,
    /// Less important.
    Dim,
}

/// One cell of a painted table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell {
    text: String,
    paint: Paint,
}

impl Cell {
    /// A cell of that look. What a terminal would take for a command is replaced.
    #[must_use]
    pub fn painted(text: impl Into<String>, paint: Paint) -> Self {
        let text = text.into().chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        Self { text, paint }
    }

    /// A plain cell.
    #[must_use]
    pub fn plain(text: impl Into<String>) -> Self {
        Self::painted(text, Paint::Plain)
    }

    /// The text as it is written.
    #[must_use]
    pub fn render(&self, colours: bool) -> String {
        let code = match self.paint {
            Paint::Plain => None,
            Paint::Good => Some("32"),
            Paint::Warn => Some("33"),
            Paint::Bad => Some("31"),
            Paint::Dim => Some("2"),
        };
        match code {
            Some(code) if colours && !self.text.is_empty() => format!("\x1b[{code}m{}\x1b[0m", self.text),
            Some(_) | None => self.text.clone(),
        }
    }

    fn width(&self) -> usize {
        self.text.chars().count()
    }
}

/// Rows as columns of equal width, two spaces apart. A column without any text below its head is left out.
#[must_use]
pub fn columns(head: &[&str], rows: &[Vec<Cell>], colours: bool) -> String {
    let used = |column: usize| rows.iter().any(|row| row.get(column).is_some_and(|cell| !cell.text.is_empty()));
    let shown: Vec<usize> = (0..head.len()).filter(|column| used(*column)).collect();
    let head: Vec<_> = head.iter().map(|name| Cell::painted(*name, Paint::Dim)).collect();
    let all: Vec<&Vec<Cell>> =
        std::iter::once(&head).filter(|_| !head.iter().all(|cell| cell.text.is_empty())).chain(rows).collect();
    let width = |column: usize| all.iter().filter_map(|row| row.get(column)).map(Cell::width).max().unwrap_or(0);
    let widths: Vec<_> = shown.iter().map(|column| (*column, width(*column))).collect();
    let mut out = String::new();
    for row in all {
        let mut gap = 0;
        for (column, width) in &widths {
            let Some(cell) = row.get(*column) else { continue };
            if !cell.text.is_empty() {
                out.extend(std::iter::repeat_n(' ', gap));
                out.push_str(&cell.render(colours));
                gap = 0;
            }
            gap += width + 2 - if cell.text.is_empty() { 0 } else { cell.width() };
        }
        out.push('\n');
    }
    out
}

/// True if results may have colours: on a terminal, unless `NO_COLOR` says otherwise.
#[must_use]
pub fn has_colours() -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    is_person() && set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb")
}

/// A time as people say it: `340ms`, `4.2s`, `42s`, `2m14s`, `3h05m`, `2d4h`.
#[must_use]
pub fn human(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0 => format!("{ms}ms"),
        1..=9 => format!("{s}.{}s", ms % 1000 / 100),
        10..=59 => format!("{s}s"),
        60..=3599 => format!("{}m{:02}s", s / 60, s % 60),
        3600..=86_399 => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{}h", s / 86_400, s % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_whatever_is_painted_and_empty_ones_are_left_out() {
        // BIN-3
        let row = |a: &str, b: &str, c: &str| {
            vec![Cell::plain(a), Cell::painted(b, Paint::Good), Cell::plain(""), Cell::painted(c, Paint::Bad)]
        };
        let rows = [row("gpu-1", "ready", "x"), row("", "", "y"), row("a", "unavailable", "")];
        let text = columns(&["NODE", "STATUS", "NOTES", "IN USE"], &rows, false);
        assert_eq!(
            text,
            "NODE   STATUS       IN USE\ngpu-1  ready        x\n                    y\na      unavailable\n"
        );
        let painted = columns(&["NODE", "STATUS", "NOTES", "IN USE"], &rows, true);
        assert!(painted.contains("\x1b[32mready\x1b[0m  "), "{painted}");
        let stripped = ["2", "31", "32"]
            .iter()
            .fold(painted.replace("\x1b[0m", ""), |text, code| text.replace(&format!("\x1b[{code}m"), ""));
        assert_eq!(stripped, text);
    }

    #[test]
    fn what_a_terminal_would_obey_is_replaced() {
        // BIN-3
        assert_eq!(Cell::plain("a\x1b[2Jb\n").render(false), "a\u{fffd}[2Jb\u{fffd}");
    }

    #[test]
    fn times_are_said_in_their_two_largest_units() {
        // BIN-3
        for (ms, text) in [
            (0, "0ms"),
            (999, "999ms"),
            (1000, "1.0s"),
            (9999, "9.9s"),
            (10_000, "10s"),
            (134_000, "2m14s"),
            (60_000, "1m00s"),
            (3_600_000, "1h00m"),
            (11_100_000, "3h05m"),
            (187_200_000, "2d4h"),
        ] {
            assert_eq!(human(ms), text, "{ms}");
        }
    }
}
