//! Decides how a command talks to people: results on stdout, everything else on stderr, never a panic on a closed pipe.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _, stderr, stdout};

/// Writes a line of the command's result. A reader that has gone away is no error.
pub fn say(line: impl Display) {
    let mut out = stdout().lock();
    let _gone = writeln!(out, "{line}").and_then(|()| out.flush());
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
