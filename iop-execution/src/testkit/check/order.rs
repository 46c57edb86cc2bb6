//! Decides which sequences of events and frames keep the contract.

use std::collections::BTreeSet;

use crate::event::{RunEvent, RunEventKind};
use crate::frame::{FrameFlags, TunnelFrame};
use crate::sse::split_blocks;
use crate::usage::Usage;

/// The events of one run, one after another.
#[derive(Default)]
pub(super) struct RunOrder {
    seen: u64,
    outputs: u64,
    calls: BTreeSet<u32>,
    ended: bool,
}

impl RunOrder {
    pub(super) fn next(&mut self, event: &RunEvent) -> Result<(), String> {
        self.seen += 1;
        if self.ended {
            return Err("an event came after the terminal".to_owned());
        }
        if event.seq != self.seen {
            return Err(format!("event {} has the number {}", self.seen, event.seq));
        }
        match &event.kind {
            RunEventKind::Start if self.seen == 1 => {}
            RunEventKind::Start => return Err("the start came late".to_owned()),
            RunEventKind::Delta(text) | RunEventKind::ReasoningDelta(text) => {
                self.outputs += u64::from(!text.is_empty())
            }
            RunEventKind::ToolCallDelta(call) => {
                self.outputs += 1;
                let is_next = usize::try_from(call.index) == Ok(self.calls.len());
                if self.calls.insert(call.index) && !is_next {
                    return Err(format!("tool call {} came before one with a smaller index", call.index));
                }
                let first = is_next;
                if first != call.id.is_some() || first != call.name.is_some() {
                    return Err(format!("tool call {} has its id or name not on its first piece alone", call.index));
                }
            }
            RunEventKind::Usage => {}
            RunEventKind::Complete(_) => self.ended = true,
            RunEventKind::Error(failure) => return Err(format!("the run failed: {failure}")),
            RunEventKind::Cancelled(_) => return Err("the run was cancelled by nobody".to_owned()),
        }
        Ok(())
    }

    pub(super) fn end(&self) -> Result<String, String> {
        match (self.ended, self.outputs) {
            (false, _) => Err("there was no terminal".to_owned()),
            (true, 0) => Err("the run was complete without any output".to_owned()),
            (true, outputs) => Ok(format!("{outputs} outputs")),
        }
    }
}

/// The frames of one tunnel, one after another.
#[derive(Default)]
pub(super) struct FrameOrder {
    head: bool,
    events: bool,
    /// Bytes of an event that goes on in the next frame.
    open: Vec<u8>,
    content: u64,
    ended: bool,
}

impl FrameOrder {
    pub(super) fn next(&mut self, frame: &TunnelFrame) -> Result<(), String> {
        if self.ended {
            return Err("a frame came after the terminal".to_owned());
        }
        match frame {
            TunnelFrame::Head(head) => {
                if std::mem::replace(&mut self.head, true) {
                    return Err("there were two heads".to_owned());
                }
                self.events = head.is_event_stream();
            }
            TunnelFrame::Body { bytes, flags } => self.body(bytes, *flags)?,
            TunnelFrame::Usage(_) => {}
            TunnelFrame::End => self.ended = true,
            TunnelFrame::Failed(failure) => return Err(format!("the tunnel failed: {failure}")),
            TunnelFrame::Cancelled(_) => return Err("the tunnel was cancelled by nobody".to_owned()),
        }
        Ok(())
    }

    fn body(&mut self, bytes: &[u8], flags: FrameFlags) -> Result<(), String> {
        self.content += u64::from(!self.events || flags.contains(FrameFlags::CONTENT));
        if !self.events {
            return Ok(());
        }
        self.open.extend_from_slice(bytes);
        if flags.contains(FrameFlags::MORE) {
            return Ok(());
        }
        let whole = std::mem::take(&mut self.open).into();
        if split_blocks(&whole).any(|block| block.is_err()) {
            return Err("a frame was not cut at the border of an event".to_owned());
        }
        Ok(())
    }

    pub(super) fn end(&self) -> Result<String, String> {
        if !self.ended {
            return Err("there was no terminal".to_owned());
        }
        if !self.open.is_empty() {
            return Err("the last event was not complete".to_owned());
        }
        if self.content == 0 {
            return Err("the tunnel was complete without any content".to_owned());
        }
        Ok(format!("{} frames of content", self.content))
    }
}

/// EXE-7: parts are no larger than wholes, and counts never shrink.
pub(super) fn usage(reports: impl Iterator<Item = Usage>) -> Result<String, String> {
    let mut last = Usage::default();
    let mut count = 0_u64;
    for report in reports {
        count += 1;
        for (part, whole, what) in [
            (report.reasoning_tokens, report.output_tokens, "reasoning than output"),
            (report.cached_input_tokens, report.input_tokens, "cached than input"),
        ] {
            if let (Some(part), Some(whole)) = (part, whole)
                && part > whole
            {
                return Err(format!("more {what} tokens: {part} of {whole}"));
            }
        }
        for (before, now) in [(last.input_tokens, report.input_tokens), (last.output_tokens, report.output_tokens)] {
            if now.is_some() && now < before {
                return Err("a count shrank from one report to the next".to_owned());
            }
        }
        last.update(report);
    }
    Ok(if count == 0 { "none reported".to_owned() } else { format!("{count} reports") })
}
