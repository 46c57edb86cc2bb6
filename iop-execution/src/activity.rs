//! Decides what counts as progress: the one classification that stall timers, commit gates and tests share.

use crate::event::{RunEvent, RunEventKind};
use crate::frame::{FrameFlags, TunnelFrame};

/// What an event or frame says about the life of its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "closed by EXE-11")]
pub enum Activity {
    /// Nothing.
    Neutral,
    /// The model works.
    Progress,
    /// The run ended.
    Terminal,
}

/// Classifies an event of a run: terminal first, then usage, then payload (EXE-11).
#[must_use]
pub fn classify_event(event: &RunEvent) -> Activity {
    if event.kind.is_terminal() {
        return Activity::Terminal;
    }
    if event.usage.is_some_and(|usage| !usage.is_empty()) {
        return Activity::Progress;
    }
    let payload = match &event.kind {
        RunEventKind::Delta(text) | RunEventKind::ReasoningDelta(text) => !text.is_empty(),
        RunEventKind::ToolCallDelta(call) => event_has_fragment(call),
        RunEventKind::Start
        | RunEventKind::Usage
        | RunEventKind::Complete(_)
        | RunEventKind::Error(_)
        | RunEventKind::Cancelled(_) => false,
    };
    if payload { Activity::Progress } else { Activity::Neutral }
}

fn event_has_fragment(call: &crate::event::ToolCallDelta) -> bool {
    !call.arguments.is_empty() || call.id.is_some() || call.name.is_some()
}

/// Classifies a frame of a tunnel by the observer's flags, never by its bytes (EXE-12).
///
/// `event_stream` says whether the body is one: in any other body every non-empty frame is progress.
#[must_use]
pub fn classify_frame(frame: &TunnelFrame, event_stream: bool) -> Activity {
    match frame {
        TunnelFrame::End | TunnelFrame::Failed(_) | TunnelFrame::Cancelled(_) => Activity::Terminal,
        TunnelFrame::Body { bytes, flags } => {
            let progress = if event_stream {
                flags.intersects(FrameFlags::CONTENT.with(FrameFlags::PROGRESS))
            } else {
                !bytes.is_empty()
            };
            if progress { Activity::Progress } else { Activity::Neutral }
        }
        TunnelFrame::Head(_) | TunnelFrame::Usage(_) => Activity::Neutral,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::event::{CancelReason, FinishReason, ToolCallDelta};
    use crate::usage::Usage;

    fn event(kind: RunEventKind, usage: Option<Usage>) -> RunEvent {
        RunEvent { seq: 1, kind, usage }
    }

    #[test]
    fn events_terminal_before_usage_before_payload() {
        // EXE-11
        let some = Some(Usage { output_tokens: Some(1), ..Usage::default() });
        let none = Some(Usage::default());
        let call = |arguments: &str, id: Option<&str>| {
            RunEventKind::ToolCallDelta(ToolCallDelta {
                id: id.map(Into::into),
                arguments: arguments.into(),
                ..Default::default()
            })
        };
        for (kind, usage, want) in [
            (RunEventKind::Complete(FinishReason::Stop), some, Activity::Terminal),
            (RunEventKind::Cancelled(CancelReason::Client), None, Activity::Terminal),
            (RunEventKind::Start, None, Activity::Neutral),
            (RunEventKind::Start, some, Activity::Progress),
            (RunEventKind::Usage, some, Activity::Progress),
            (RunEventKind::Usage, none, Activity::Neutral),
            (RunEventKind::Delta("a".into()), None, Activity::Progress),
            (RunEventKind::Delta(String::new()), None, Activity::Neutral),
            (RunEventKind::ReasoningDelta("a".into()), None, Activity::Progress),
            (RunEventKind::ReasoningDelta(String::new()), None, Activity::Neutral),
            (call("{", None), None, Activity::Progress),
            (call("", Some("c")), None, Activity::Progress),
            (call("", None), None, Activity::Neutral),
        ] {
            assert_eq!(classify_event(&event(kind.clone(), usage)), want, "{kind:?}");
        }
    }

    #[test]
    fn frames_by_flags_alone() {
        // EXE-12
        let body = |flags| TunnelFrame::Body { bytes: Bytes::from_static(b"data: x"), flags };
        for (flags, want) in [
            (FrameFlags::NONE, Activity::Neutral),
            (FrameFlags::LIFECYCLE, Activity::Neutral),
            (FrameFlags::USAGE, Activity::Neutral),
            (FrameFlags::USAGE.with(FrameFlags::PROGRESS), Activity::Progress),
            (FrameFlags::CONTENT, Activity::Progress),
            (FrameFlags::TERMINAL, Activity::Neutral),
        ] {
            assert_eq!(classify_frame(&body(flags), true), want, "{flags:?}");
            assert_eq!(classify_frame(&body(flags), false), Activity::Progress);
        }
        let empty = TunnelFrame::Body { bytes: Bytes::new(), flags: FrameFlags::NONE };
        assert_eq!(classify_frame(&empty, false), Activity::Neutral);
        assert_eq!(classify_frame(&TunnelFrame::End, true), Activity::Terminal);
    }
}
