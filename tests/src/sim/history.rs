//! Decides what a simulation remembers: an append-only log that is hashed as it grows. Its tail is printed when a seed
//! fails; two runs of one seed must have the same hash.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Lines that are kept for a failure.
const TAIL: usize = 80;

/// Who did something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Who {
    /// The simulation itself.
    World,
    /// The Edge.
    Edge,
    /// A process of a Node: which Node, and which process.
    Node(usize, u64),
    /// A client.
    Client(u32),
    /// A connection, and which Node dialled it.
    Link(u64, usize),
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::World => f.write_str("world"),
            Self::Edge => f.write_str("edge"),
            Self::Node(node, process) => write!(f, "n{node}/{process}"),
            Self::Client(client) => write!(f, "c{client}"),
            Self::Link(conn, node) => write!(f, "link {conn} of n{node}"),
        }
    }
}

/// One thing that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Line {
    at: u64,
    who: Who,
    what: &'static str,
    detail: &'static str,
    numbers: [u64; 2],
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, who, what, detail, numbers } = self;
        write!(f, "{:>9}.{:03} {who:<16} {what} {detail}", at / 1000, at % 1000, who = who.to_string())?;
        match numbers {
            [0, 0] => Ok(()),
            [a, 0] => write!(f, " {a}"),
            [a, b] => write!(f, " {a} {b}"),
        }
    }
}

/// The log of one run.
#[derive(Debug)]
pub struct History {
    hasher: DefaultHasher,
    tail: VecDeque<Line>,
    lines: u64,
    print: bool,
    counts: BTreeMap<(&'static str, &'static str), u64>,
}

impl History {
    /// An empty log; with `print`, each line goes to standard error as it comes.
    #[must_use]
    pub fn new(print: bool) -> Self {
        Self { hasher: DefaultHasher::new(), tail: VecDeque::new(), lines: 0, print, counts: BTreeMap::new() }
    }

    /// Adds a line. `at` is in virtual milliseconds.
    pub fn add(&mut self, at: u64, who: Who, what: &'static str, detail: &'static str, numbers: [u64; 2]) {
        let line = Line { at, who, what, detail, numbers };
        line.hash(&mut self.hasher);
        self.lines += 1;
        *self.counts.entry((what, detail)).or_default() += 1;
        if self.print {
            eprintln!("{line}");
        }
        if self.tail.len() >= TAIL {
            self.tail.pop_front();
        }
        self.tail.push_back(line);
    }

    /// What all lines come to.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hasher.finish()
    }

    /// How many lines there are.
    #[must_use]
    pub const fn lines(&self) -> u64 {
        self.lines
    }

    /// How often each thing happened.
    #[must_use]
    pub const fn counts(&self) -> &BTreeMap<(&'static str, &'static str), u64> {
        &self.counts
    }

    /// The last lines.
    #[must_use]
    pub fn tail(&self) -> String {
        self.tail.iter().map(|line| format!("{line}\n")).collect()
    }
}
