//! Decides where the members of a provider's JSON object lie that the Edge may touch, while its bytes pass.
//!
//! Incremental and lenient: it looks at structure only, holds no bytes, and never judges what is inside a value. Text that
//! is no object, or goes on after it, ends in [`Scan::is_invalid`].

use memchr::memchr2;

/// Members that matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    Model,
    Choices,
    Data,
    Content,
    Error,
    Other,
}

/// What was met, with its absolute place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Met {
    /// Just behind the object's opening brace.
    Open(usize),
    /// The value of a member begins, with this byte.
    Value(Key, usize, u8),
    /// The value just begun ended before here.
    End(Key, usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    KeyOrEnd,
    InKey,
    Colon,
    Value,
    Scalar,
    Text { escaped: bool },
    Nested { depth: u32 },
    NestedText { depth: u32, escaped: bool },
    Comma,
    Done,
    Invalid,
}

/// Longest key that matters, in bytes.
const KEY_BYTES: usize = 7;

/// A scan of one object.
#[derive(Debug, Clone)]
pub(crate) struct Scan {
    state: State,
    spelled: [u8; KEY_BYTES],
    /// May exceed [`KEY_BYTES`]: then it is none that matters.
    spelled_len: usize,
    key_escaped: bool,
    key: Key,
}

impl Scan {
    pub(crate) const fn new() -> Self {
        Self { state: State::Start, spelled: [0; KEY_BYTES], spelled_len: 0, key_escaped: false, key: Key::Other }
    }

    /// The object is closed.
    pub(crate) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// This is no object.
    pub(crate) fn is_invalid(&self) -> bool {
        self.state == State::Invalid
    }

    /// Scans the next bytes, whose first lies at `base`.
    pub(crate) fn feed(&mut self, bytes: &[u8], base: usize, mut met: impl FnMut(Met)) {
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            let rest = bytes.get(at..).unwrap_or_default();
            let mut step = 1;
            match self.state {
                State::Text { escaped: false } | State::NestedText { escaped: false, .. } => {
                    step = self.skip_text(rest);
                    if matches!(self.state, State::Comma) {
                        met(Met::End(self.key, base + at + step));
                    }
                }
                State::Text { .. } => self.state = State::Text { escaped: false },
                State::NestedText { depth, .. } => self.state = State::NestedText { depth, escaped: false },
                State::InKey => self.key_byte(byte),
                State::Nested { depth } => match byte {
                    b'"' => self.state = State::NestedText { depth, escaped: false },
                    b'{' | b'[' => self.state = State::Nested { depth: depth.saturating_add(1) },
                    b'}' | b']' if depth == 1 => {
                        self.state = State::Comma;
                        met(Met::End(self.key, base + at + 1));
                    }
                    b'}' | b']' => self.state = State::Nested { depth: depth - 1 },
                    _ => {}
                },
                State::Scalar => {
                    if matches!(byte, b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t') {
                        self.state = State::Comma;
                        met(Met::End(self.key, base + at));
                        step = 0;
                    }
                }
                _ if matches!(byte, b' ' | b'\n' | b'\r' | b'\t') => {}
                State::Start if byte == b'{' => {
                    self.state = State::KeyOrEnd;
                    met(Met::Open(base + at + 1));
                }
                State::KeyOrEnd if byte == b'"' => {
                    self.state = State::InKey;
                    self.spelled_len = 0;
                    self.key_escaped = false;
                }
                State::KeyOrEnd if byte == b'}' => self.state = State::Done,
                State::Colon if byte == b':' => self.state = State::Value,
                State::Value => {
                    self.state = match byte {
                        b'"' => State::Text { escaped: false },
                        b'{' | b'[' => State::Nested { depth: 1 },
                        b',' | b'}' | b']' | b':' => State::Invalid,
                        _ => State::Scalar,
                    };
                    if self.state != State::Invalid {
                        met(Met::Value(self.key, base + at, byte));
                    }
                }
                State::Comma if byte == b',' => self.state = State::KeyOrEnd,
                State::Comma if byte == b'}' => self.state = State::Done,
                State::Start | State::KeyOrEnd | State::Colon | State::Comma | State::Done | State::Invalid => {
                    self.state = State::Invalid;
                    return;
                }
            }
            at += step;
        }
    }

    /// Skips to the end of a string, or to its next escape.
    fn skip_text(&mut self, rest: &[u8]) -> usize {
        let Some(found) = memchr2(b'"', b'\\', rest) else { return rest.len() };
        let quote = rest.get(found) == Some(&b'"');
        self.state = match self.state {
            State::NestedText { depth, .. } if quote => State::Nested { depth },
            State::NestedText { depth, .. } => State::NestedText { depth, escaped: true },
            _ if quote => State::Comma,
            _ => State::Text { escaped: true },
        };
        found + 1
    }

    fn key_byte(&mut self, byte: u8) {
        if self.key_escaped {
            // An escape makes it a key that does not matter.
            self.key_escaped = false;
            self.spelled_len = KEY_BYTES + 1;
            return;
        }
        match byte {
            b'"' => {
                self.state = State::Colon;
                self.key = match self.spelled.get(..self.spelled_len) {
                    Some(b"model") => Key::Model,
                    Some(b"choices") => Key::Choices,
                    Some(b"data") => Key::Data,
                    Some(b"content") => Key::Content,
                    Some(b"error") => Key::Error,
                    _ => Key::Other,
                };
            }
            b'\\' => self.key_escaped = true,
            _ => {
                if let Some(place) = self.spelled.get_mut(self.spelled_len) {
                    *place = byte;
                }
                self.spelled_len = self.spelled_len.saturating_add(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn met(text: &[u8], cut: usize) -> (Vec<Met>, Scan) {
        let (mut all, mut scan) = (Vec::new(), Scan::new());
        let (a, b) = text.split_at(cut.min(text.len()));
        scan.feed(a, 0, |found| all.push(found));
        scan.feed(b, a.len(), |found| all.push(found));
        (all, scan)
    }

    #[test]
    fn only_top_level_members_count_wherever_the_text_is_cut() {
        // API-10
        let text =
            br#" {"choices":[{"model":"x","a":"}]\""}] ,"err\u006fr":1,"error":null,"model" : "m\"n","n":-1.5} "#;
        for cut in 0..text.len() {
            let (all, scan) = met(text, cut);
            assert!(scan.is_done(), "{cut}");
            let model: Vec<_> =
                all.iter().filter(|m| matches!(m, Met::Value(Key::Model, ..) | Met::End(Key::Model, _))).collect();
            let [Met::Value(_, start, b'"'), Met::End(_, end)] = model[..] else { panic!("{model:?}") };
            assert_eq!(&text[*start..*end], br#""m\"n""#);
            assert_eq!(all.iter().filter(|m| matches!(m, Met::Value(Key::Error, _, b'n'))).count(), 1);
            assert_eq!(all[0], Met::Open(2));
        }
    }

    #[test]
    fn what_is_no_single_object_is_invalid() {
        // API-7
        for text in ["[]", "x", "{}x", "{,", r#"{"a" 1}"#, r#"{"a":}"#, r#"{"a":1]"#, "{]"] {
            assert!(met(text.as_bytes(), 0).1.is_invalid(), "{text}");
        }
        for text in ["", " ", "{", r#"{"a"#, r#"{"a":1"#, r#"{"a":[1}"#] {
            let scan = met(text.as_bytes(), 0).1;
            assert!(!scan.is_done(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(prop::sample::select(b"{}[]\",:\\modelchices 1".to_vec()), 0..40), cut in 0usize..40) {
            let whole = met(&bytes, 0);
            let parts = met(&bytes, cut);
            prop_assert_eq!(whole.0, parts.0);
            prop_assert_eq!(whole.1.state, parts.1.state);
        }
    }
}
