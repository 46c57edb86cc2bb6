//! Decides what a client is given and when: nothing before the first content, and never a clean end after a failure.
//!
//! ```text
//!  Holding ── content, or too much held ──► Open ── complete ──► Complete
//!     │ complete ──────────────────────────────────────────────────▲
//!     │ fail ──► Refused (a real status)        └── fail ──► Broken (an event in the stream, or a cut answer)
//! ```
//!
//! Inputs: [`Gate::hold`], [`Gate::content`], [`Gate::complete`], [`Gate::fail`]; the first end stands. Outputs:
//! [`Gate::verdict`] for the head, [`Gate::take`] for the bytes. Not decided here: what content is, what bytes mean, and
//! whether a failure could be repaired by another attempt.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use crate::openai::config::{JOIN_BYTES, MAX_HELD_ANSWER_BYTES, MAX_HELD_LIFECYCLE_BYTES};
use crate::openai::errors::{ApiError, Dialect};

/// How a failure after the commit is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// An event stream: by one more event.
    Events,
    /// An event stream of Anthropic's API: by one more event.
    Messages,
    /// One JSON document: by cutting it.
    Document,
}

impl Form {
    const fn held_limit(self) -> usize {
        match self {
            Self::Events | Self::Messages => MAX_HELD_LIFECYCLE_BYTES,
            Self::Document => MAX_HELD_ANSWER_BYTES,
        }
    }
}

#[derive(Debug)]
enum Phase {
    Holding,
    Open,
    Complete,
    Refused(Box<ApiError>),
    Broken(Box<ApiError>),
}

/// What the head of the answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict<'a> {
    /// 200, and the body goes on.
    Begun,
    /// 200, and the whole body is here.
    Whole,
    /// An error.
    Refused(&'a ApiError),
}

/// The commit gate of one answer (REC-2).
#[derive(Debug)]
pub(crate) struct Gate {
    form: Form,
    phase: Phase,
    queue: VecDeque<Bytes>,
    queued: usize,
}

impl Gate {
    pub(crate) const fn new(form: Form) -> Self {
        Self { form, phase: Phase::Holding, queue: VecDeque::new(), queued: 0 }
    }

    /// Bytes that are no content: held until there is some. More than the limit is released, which is the commit too.
    pub(crate) fn hold(&mut self, bytes: Bytes) {
        self.push(bytes);
        if matches!(self.phase, Phase::Holding) && self.queued > self.form.held_limit() {
            self.phase = Phase::Open;
        }
    }

    /// Content: the commit.
    pub(crate) fn content(&mut self, bytes: Bytes) {
        self.push(bytes);
        self.release();
    }

    /// What is held is all there will be, and it is good: the commit, though not the end.
    pub(crate) fn release(&mut self) {
        if matches!(self.phase, Phase::Holding) {
            self.phase = Phase::Open;
        }
    }

    /// The answer is whole.
    pub(crate) fn complete(&mut self) {
        if !self.is_ended() {
            self.phase = Phase::Complete;
        }
    }

    /// The answer failed.
    pub(crate) fn fail(&mut self, error: ApiError) {
        let event = match self.form {
            Form::Events | Form::Document => error.to_event(Dialect::OpenAi),
            Form::Messages => error.to_event(Dialect::Anthropic),
        };
        self.fail_with(error, event);
    }

    /// The answer failed; a stream that is open says so by this event.
    pub(crate) fn fail_with(&mut self, error: ApiError, event: Bytes) {
        match self.phase {
            Phase::Holding => {
                self.queue.clear();
                self.queued = 0;
                self.phase = Phase::Refused(Box::new(error));
            }
            Phase::Open => {
                if self.form != Form::Document {
                    self.push(event);
                }
                self.phase = Phase::Broken(Box::new(error));
            }
            Phase::Complete | Phase::Refused(_) | Phase::Broken(_) => {}
        }
    }

    pub(crate) const fn is_committed(&self) -> bool {
        matches!(self.phase, Phase::Open | Phase::Complete | Phase::Broken(_))
    }

    /// Nothing more will come in.
    pub(crate) const fn is_ended(&self) -> bool {
        matches!(self.phase, Phase::Complete | Phase::Refused(_) | Phase::Broken(_))
    }

    /// The failure, before the commit or after it.
    pub(crate) fn failure(&self) -> Option<&ApiError> {
        match &self.phase {
            Phase::Refused(error) | Phase::Broken(error) => Some(error),
            Phase::Holding | Phase::Open | Phase::Complete => None,
        }
    }

    /// The answer must be cut once its bytes are taken, for it can't say that it failed.
    pub(crate) fn is_cut(&self) -> bool {
        matches!(self.phase, Phase::Broken(_)) && self.form == Form::Document
    }

    /// The head, once it can be decided.
    pub(crate) fn verdict(&self) -> Option<Verdict<'_>> {
        match &self.phase {
            Phase::Holding => None,
            Phase::Open | Phase::Broken(_) => Some(Verdict::Begun),
            Phase::Complete => Some(Verdict::Whole),
            Phase::Refused(error) => Some(Verdict::Refused(error)),
        }
    }

    /// Bytes that are ready and enough for a write of their own.
    pub(crate) const fn is_full(&self) -> bool {
        self.queued >= JOIN_BYTES
    }

    /// The next bytes for the client. Small pieces are joined up to [`JOIN_BYTES`], a single one is passed as it is.
    pub(crate) fn take(&mut self) -> Option<Bytes> {
        if !self.is_committed() {
            return None;
        }
        let first = self.queue.pop_front()?;
        self.queued -= first.len();
        if self.queue.front().is_none_or(|next| first.len() + next.len() > JOIN_BYTES) {
            return Some(first);
        }
        let mut joined = BytesMut::with_capacity((first.len() + self.queued).min(JOIN_BYTES));
        joined.extend_from_slice(&first);
        while let Some(next) = self.queue.front()
            && joined.len() + next.len() <= JOIN_BYTES
        {
            joined.extend_from_slice(next);
            self.queued -= next.len();
            self.queue.pop_front();
        }
        Some(joined.freeze())
    }

    /// All bytes at once.
    pub(crate) fn take_all(&mut self) -> Bytes {
        let queue = std::mem::take(&mut self.queue);
        let mut queue = queue.into_iter();
        self.queued = 0;
        match (queue.next(), queue.len()) {
            (Some(only), 0) => only,
            (first, _) => first
                .into_iter()
                .chain(queue)
                .fold(BytesMut::new(), |mut all, piece| {
                    all.extend_from_slice(&piece);
                    all
                })
                .freeze(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    fn push(&mut self, bytes: Bytes) {
        if !bytes.is_empty() && !self.is_ended() {
            self.queued += bytes.len();
            self.queue.push_back(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Input {
        Hold,
        Content,
        Complete,
        Fail,
    }
    const INPUTS: [Input; 4] = [Input::Hold, Input::Content, Input::Complete, Input::Fail];

    /// What a client must see of a sequence, said without the machine: (status is real, bytes, ended, cut).
    fn expected(inputs: &[Input], form: Form) -> (Option<bool>, String, bool) {
        let (mut seen, mut committed, mut end) = (String::new(), false, None);
        for input in inputs {
            match input {
                _ if end.is_some() => {}
                Input::Hold => seen.push('h'),
                Input::Content => {
                    seen.push('c');
                    committed = true;
                }
                Input::Complete => end = Some(true),
                Input::Fail if !committed => return (Some(false), String::new(), false),
                Input::Fail => {
                    if form == Form::Events {
                        seen.push('!');
                    }
                    end = Some(false);
                }
            }
        }
        let begun = committed || end == Some(true);
        let cut = end == Some(false) && form == Form::Document;
        (begun.then_some(true), if begun { seen } else { String::new() }, cut)
    }

    #[test]
    fn every_sequence_of_five_inputs_gives_what_the_rule_says() {
        // REC-2, REC-6
        for form in [Form::Events, Form::Document] {
            for code in 0..4usize.pow(5) {
                let inputs: Vec<_> = (0..5).map(|place| INPUTS[code / 4usize.pow(place) % 4]).collect();
                let mut gate = Gate::new(form);
                let mut early = String::new();
                for input in &inputs {
                    match input {
                        Input::Hold => gate.hold(Bytes::from_static(b"h")),
                        Input::Content => gate.content(Bytes::from_static(b"c")),
                        Input::Complete => gate.complete(),
                        Input::Fail => gate.fail(ApiError::bad_gateway("!")),
                    }
                    // Taking at any time changes nothing of what is seen in the end.
                    if code % 2 == 0 {
                        early.extend(gate.take().map(|b| String::from_utf8(b.to_vec()).unwrap()));
                    }
                }
                let (verdict, seen, cut) = expected(&inputs, form);
                let found = gate.verdict().map(|verdict| !matches!(verdict, Verdict::Refused(_)));
                assert_eq!(found, verdict, "{inputs:?}");
                assert_eq!(gate.is_cut(), cut, "{inputs:?}");
                while let Some(bytes) = gate.take() {
                    early.push_str(std::str::from_utf8(&bytes).unwrap());
                }
                let error = String::from_utf8(ApiError::bad_gateway("!").to_event(Dialect::OpenAi).to_vec()).unwrap();
                assert_eq!(early.replace(&error, "!"), seen, "{inputs:?}");
            }
        }
    }

    #[test]
    fn what_is_held_is_bounded() {
        // REC-2
        for (form, limit) in [(Form::Events, MAX_HELD_LIFECYCLE_BYTES), (Form::Document, MAX_HELD_ANSWER_BYTES)] {
            let mut gate = Gate::new(form);
            gate.hold(vec![0; limit].into());
            assert!(!gate.is_committed() && gate.take().is_none());
            gate.hold(Bytes::from_static(b"x"));
            assert!(gate.is_committed());
        }
    }

    #[test]
    fn ready_pieces_are_joined_and_a_single_one_is_passed_as_it_is() {
        // API-6
        let mut gate = Gate::new(Form::Events);
        let only = Bytes::from(vec![1; 10]);
        gate.content(only.clone());
        assert_eq!(gate.take().map(|b| b.as_ptr()), Some(only.as_ptr()));
        for _ in 0..5 {
            gate.content(vec![0; JOIN_BYTES / 2].into());
        }
        gate.content(vec![0; JOIN_BYTES * 3].into());
        let sizes: Vec<_> = std::iter::from_fn(|| gate.take().map(|b| b.len())).collect();
        assert_eq!(sizes, [JOIN_BYTES, JOIN_BYTES, JOIN_BYTES / 2, JOIN_BYTES * 3]);
    }
}
