//! Decides how much of a run may wait at its receiver, and when credit goes back (WIR-7).

use crate::limits::MAX_CHUNK;

/// Sans-IO receive window of one run and direction. Frames are charged `max(payload, MIN_CHARGE)`; exempt frames 0.
#[derive(Debug, Clone, Copy)]
pub struct ReceiveWindow {
    window: u32,
    /// What the sender may still send.
    credit: u32,
    /// Received, not consumed.
    held: u32,
    /// Consumed, not granted again.
    owed: u32,
}

/// The peer sent more than its credit: the connection must close as `flow_control` (W8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent more than its credit")]
pub struct CreditExceeded;

impl ReceiveWindow {
    /// A window of this many bytes, all of it granted.
    #[must_use]
    pub const fn new(window: u32) -> Self {
        Self { window, credit: window, held: 0, owed: 0 }
    }

    /// A frame of this charge arrived.
    ///
    /// # Errors
    /// [`CreditExceeded`] when the sender had no credit for it.
    pub fn receive(&mut self, charge: u32) -> Result<(), CreditExceeded> {
        self.credit = self.credit.checked_sub(charge).ok_or(CreditExceeded)?;
        self.held += charge;
        Ok(())
    }

    /// The consumer took a frame of this charge. `Some(grant)`, in bytes, when at least half the window is consumed and
    /// not granted yet, or when all of it is and the sender may lack the credit for one largest frame: it would wait for
    /// ever otherwise.
    pub fn consume(&mut self, charge: u32) -> Option<u32> {
        let charge = charge.min(self.held);
        self.held -= charge;
        self.owed += charge;
        let starved = self.held == 0 && self.owed > 0 && (self.credit as usize) < MAX_CHUNK;
        if self.owed < self.window.div_ceil(2) && !starved {
            return None;
        }
        let grant = std::mem::take(&mut self.owed);
        self.credit += grant;
        (grant > 0).then_some(grant)
    }

    /// Bytes received and not consumed.
    #[must_use]
    pub const fn held(&self) -> u32 {
        self.held
    }
}

#[cfg(test)]
mod tests;
