//! Decides how many choices a request asks for, as far as its bytes tell: a whole body is read, one that passes in pieces is
//! watched.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::StreamExt;
use iop_execution::RequestBody;
use memchr::memchr;

use super::asked_choices;

/// How many choices were asked for.
pub(super) enum Choices {
    Known(u32),
    /// The body passed in pieces; true if one of them asks for several.
    Streamed(Arc<AtomicBool>),
}

impl Choices {
    /// The body, and what it will have told once it has passed.
    pub(super) fn of(body: RequestBody) -> (RequestBody, Self) {
        if body.as_full().is_some() {
            let choices = asked_choices(body.as_full());
            return (body, Self::Known(choices));
        }
        let several = Arc::new(AtomicBool::new(false));
        let (seen, length) = (Arc::clone(&several), body.len());
        let mut watch = Watch::default();
        let watched = body.inspect(move |chunk| {
            if chunk.as_ref().is_ok_and(|chunk| watch.feed(chunk)) {
                seen.store(true, Ordering::Release);
            }
        });
        (RequestBody::chunks(length, watched), Self::Streamed(several))
    }

    /// The number, where it is certain. To be asked when the answer has begun: the request has passed by then.
    pub(super) fn certain(&self) -> Option<u32> {
        match self {
            Self::Known(choices) => Some(*choices),
            Self::Streamed(several) => (!several.load(Ordering::Acquire)).then_some(1),
        }
    }
}

/// Looks for a key `n` with a number above 1, at any depth: finding one too many only means a longer wait.
#[derive(Default)]
enum Watch {
    #[default]
    Text,
    Quote,
    Name,
    Closed,
    Colon,
    Digits(u32),
}

impl Watch {
    /// True if a number above 1 ended in this piece.
    fn feed(&mut self, piece: &[u8]) -> bool {
        let (mut rest, mut several) = (piece, false);
        while let Some((byte, after)) = rest.split_first() {
            rest = after;
            *self = match (&*self, byte) {
                (Self::Text, b'"') => Self::Quote,
                (Self::Text, _) => {
                    // Prompts are long and hold few quotes.
                    let next = memchr(b'"', rest).unwrap_or(rest.len());
                    rest = rest.get(next..).unwrap_or_default();
                    Self::Text
                }
                (Self::Quote, b'n') => Self::Name,
                (Self::Name, b'"') => Self::Closed,
                (Self::Closed, b':') => Self::Colon,
                (Self::Closed, b' ' | b'\t' | b'\n' | b'\r') => Self::Closed,
                (Self::Colon, b' ' | b'\t' | b'\n' | b'\r') => Self::Colon,
                (Self::Colon, digit @ b'0'..=b'9') => Self::Digits(u32::from(digit - b'0')),
                (Self::Digits(value), digit @ b'0'..=b'9') => {
                    Self::Digits(value.saturating_mul(10).saturating_add(u32::from(digit - b'0')))
                }
                (Self::Digits(value), _) => {
                    several |= *value > 1;
                    Self::Text
                }
                (Self::Quote | Self::Closed | Self::Colon, b'"') => Self::Quote,
                (Self::Quote | Self::Name | Self::Closed | Self::Colon, _) => Self::Text,
            };
        }
        several
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_number_above_one_is_several_wherever_the_pieces_end() {
        // API-6
        for (body, several) in [
            (r#"{"model":"m","n":1,"stream":true}"#, false),
            (r#"{"model":"m","n" : 2 ,"stream":true}"#, true),
            (r#"{"n":12}"#, true),
            (r#"{"n":null}"#, false),
            (r#"{"tools":[{"properties":{"n":{"type":"number"}}}]}"#, false),
            (r#"{"messages":[{"content":"say n n \"n\" now"}]}"#, false),
            (r#"{"nn":2,"n_":2,"":2}"#, false),
            (r#"{"a":"","n":3}"#, true),
        ] {
            for at in 0..=body.len() {
                for then in at..=body.len() {
                    let mut watch = Watch::default();
                    let pieces = [&body.as_bytes()[..at], &body.as_bytes()[at..then], &body.as_bytes()[then..]];
                    let found = pieces.map(|piece| watch.feed(piece)).contains(&true);
                    assert_eq!(found, several, "{body} cut at {at} and {then}");
                }
            }
        }
    }
}
