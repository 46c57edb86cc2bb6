//! Decides which run numbers are new, open, or over (W4, W9), and whether a request body keeps its announced length.
//!
//! ```text
//! number > highest ──begin──► open ──finish──► over: late messages are dropped and counted
//! number ≤ highest ──begin──► violation (W9)
//! any other message with number > highest ──► violation (W4)
//! ```
//!
//! The memory is one entry per open run: what is known is "not above the highest given" (WIR-11), so nothing is kept for
//! runs that are over.
//!
//! It does not decide what a run answers, nor how much of a body may wait.

use std::collections::BTreeMap;

use iop_wire::RunNumber;

/// Largest request body, in bytes.
pub const MAX_BODY_BYTES: u64 = 32 * 1024 * 1024;

/// The Edge broke the numbering of runs: nothing on this connection can be trusted any more (WIR-15).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(clippy::exhaustive_enums, reason = "the driver reacts to each")]
pub enum RunViolation {
    /// A request with a number that is not above every number before it (W9).
    #[error("run number {number} is not above {highest}")]
    NotRising {
        /// The number.
        number: RunNumber,
        /// Highest number given so far.
        highest: RunNumber,
    },
    /// A message for a number that was never given (W4).
    #[error("run number {number} was never given")]
    NeverGiven {
        /// The number.
        number: RunNumber,
    },
}

/// What a chunk of a request body means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the driver reacts to each")]
pub enum ChunkStep {
    /// It belongs to the body. `complete`: that was all of it.
    Deliver {
        /// The body has its announced length.
        complete: bool,
    },
    /// The body is not what was announced: the run must end. Later chunks of it are dropped.
    Broken,
    /// The run is over; the chunk was dropped and counted.
    Late,
}

#[derive(Debug)]
struct Entry<H> {
    handle: H,
    body_len: u64,
    received: u64,
    broken: bool,
}

/// The runs and tunnels of one connection. `H` is whatever the owner wants to find by number.
#[derive(Debug)]
pub struct RunTable<H> {
    highest: RunNumber,
    open: BTreeMap<RunNumber, Entry<H>>,
    late: u64,
}

impl<H> Default for RunTable<H> {
    fn default() -> Self {
        Self { highest: RunNumber(0), open: BTreeMap::new(), late: 0 }
    }
}

impl<H> RunTable<H> {
    /// No run yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A request arrived: its number must be above every number before it.
    ///
    /// # Errors
    /// [`RunViolation::NotRising`]; the connection must end.
    pub fn begin(&mut self, number: RunNumber) -> Result<(), RunViolation> {
        if number <= self.highest {
            return Err(RunViolation::NotRising { number, highest: self.highest });
        }
        self.highest = number;
        Ok(())
    }

    /// The run that began is accepted: it is open until [`Self::finish`].
    pub fn open(&mut self, number: RunNumber, body_len: u64, handle: H) {
        self.open.insert(number, Entry { handle, body_len, received: 0, broken: false });
    }

    /// A chunk of `len` bytes arrived; `last` says that no more comes.
    ///
    /// A body is complete exactly when all announced bytes are here. One empty chunk may close it afterwards.
    ///
    /// # Errors
    /// [`RunViolation::NeverGiven`]; the connection must end.
    pub fn chunk(&mut self, number: RunNumber, len: u64, last: bool) -> Result<ChunkStep, RunViolation> {
        self.known(number)?;
        let Some(entry) = self.open.get_mut(&number).filter(|entry| !entry.broken) else {
            self.late += 1;
            return Ok(ChunkStep::Late);
        };
        // Neither can overflow: `received` never exceeds `body_len`.
        let room = entry.body_len - entry.received;
        if len > room || (last && len < room) {
            entry.broken = true;
            return Ok(ChunkStep::Broken);
        }
        entry.received += len;
        Ok(ChunkStep::Deliver { complete: entry.received == entry.body_len })
    }

    /// The open run with this number; `None` when it is over, which counts as a late message.
    ///
    /// # Errors
    /// [`RunViolation::NeverGiven`]; the connection must end.
    pub fn find(&mut self, number: RunNumber) -> Result<Option<&mut H>, RunViolation> {
        self.known(number)?;
        let entry = self.open.get_mut(&number);
        if entry.is_none() {
            self.late += 1;
        }
        Ok(entry.map(|entry| &mut entry.handle))
    }

    const fn known(&self, number: RunNumber) -> Result<(), RunViolation> {
        if number.0 == 0 || number.0 > self.highest.0 { Err(RunViolation::NeverGiven { number }) } else { Ok(()) }
    }

    /// The run is over. Gives its handle the first time.
    pub fn finish(&mut self, number: RunNumber) -> Option<H> {
        self.open.remove(&number).map(|entry| entry.handle)
    }

    /// The handle of an open run, without counting anything.
    pub fn get_mut(&mut self, number: RunNumber) -> Option<&mut H> {
        self.open.get_mut(&number).map(|entry| &mut entry.handle)
    }

    /// Every open run, oldest first.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (RunNumber, &mut H)> {
        self.open.iter_mut().map(|(number, entry)| (*number, &mut entry.handle))
    }

    /// Open runs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// True if no run is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Messages that came for runs that were over.
    #[must_use]
    pub const fn late(&self) -> u64 {
        self.late
    }

    /// Highest number given so far.
    #[must_use]
    pub const fn highest(&self) -> RunNumber {
        self.highest
    }
}

#[cfg(test)]
mod tests;
