//! Decides what the log tells of discoveries: a change once, and not every time.

use std::sync::{Mutex, PoisonError};

use iop_execution::failure::FailureCode;
use iop_execution::{ProviderError, Refreshed};

/// What a discovery heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// A list of models.
    Models,
    /// A list that IOP itself gave.
    Itself,
    /// None.
    Nothing(FailureCode, Option<u16>),
}

impl From<&ProviderError> for Heard {
    fn from(error: &ProviderError) -> Self {
        Self::Nothing(error.failure().code, error.failure().upstream_status)
    }
}

/// What the last discovery of one adapter heard; nothing before the first.
#[derive(Debug, Default)]
pub(crate) struct LastHeard(Mutex<Option<Heard>>);

impl LastHeard {
    /// Logs what is another thing than the last time; `models` are those the adapter has now.
    pub(crate) fn tell(&self, heard: Heard, models: usize) -> Refreshed {
        let before = self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(heard);
        if before != Some(heard) {
            match heard {
                Heard::Itself => {
                    tracing::warn!("this provider's base_url leads to IOP itself: requests may go round in a circle");
                }
                Heard::Nothing(code, status) => {
                    tracing::info!(%code, status, "the server gave no model list: it is asked again until it does");
                }
                Heard::Models if matches!(before, Some(Heard::Nothing(..))) => {
                    tracing::info!(models, "the server gives its model list again");
                }
                Heard::Models => {}
            }
        }
        match heard {
            Heard::Models | Heard::Itself => Refreshed::Answered,
            Heard::Nothing(..) => Refreshed::Silent,
        }
    }
}

#[cfg(test)]
mod tests {
    use iop_execution::testkit::{Logged, alone};

    use super::*;

    #[test]
    fn a_change_is_told_once_and_the_first_list_not_at_all() {
        // ADP-5
        if !alone("heard::tests::a_change_is_told_once_and_the_first_list_not_at_all").unwrap() {
            return;
        }
        let (logged, _guard) = Logged::begin();
        let last = LastHeard::default();
        let down = Heard::Nothing(FailureCode::ProviderUnreachable, None);
        let loading = Heard::Nothing(FailureCode::Busy, Some(503));
        for (heard, refreshed) in [
            (Heard::Models, Refreshed::Answered),
            (down, Refreshed::Silent),
            (down, Refreshed::Silent),
            (loading, Refreshed::Silent),
            (Heard::Models, Refreshed::Answered),
            (Heard::Models, Refreshed::Answered),
            (Heard::Itself, Refreshed::Answered),
            (Heard::Itself, Refreshed::Answered),
            (Heard::Models, Refreshed::Answered),
        ] {
            assert_eq!(last.tell(heard, 7), refreshed, "{heard:?}");
        }
        let lines: Vec<_> = logged.lines().into_iter().map(|line| format!("{} {}", line.level, line.fields)).collect();
        let silent = "message=the server gave no model list: it is asked again until it does";
        assert_eq!(
            lines,
            [
                format!("INFO {silent} code=provider_unreachable"),
                format!("INFO {silent} code=busy status=503"),
                "INFO message=the server gives its model list again models=7".to_owned(),
                "WARN message=this provider's base_url leads to IOP itself: requests may go round in a circle"
                    .to_owned(),
            ]
        );
    }
}
