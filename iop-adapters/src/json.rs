//! Decides what JSON text holds, without building a tree: a pull scanner over bytes that are valid UTF-8.
//!
//! The observer reads every token of every stream; a `Value` per token would cost more than everything else on the path.
//! The scanner visits keys, skips what nobody asked for, allocates nothing, and accepts exactly the language of JSON
//! (nesting bounded by [`MAX_DEPTH`]).

use std::borrow::Cow;

/// Deepest nesting that is read; serde_json stops at the same depth.
pub(crate) const MAX_DEPTH: u32 = 127;

/// The text is no JSON, or nested too deeply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotJson;

/// What a value is, by its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Array,
    Bool,
    Null,
    Number,
    Object,
    String,
}

/// A string as it stands in the text.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Text<'a> {
    /// With its quotes.
    quoted: &'a [u8],
    escaped: bool,
}

impl<'a> Text<'a> {
    /// True if it has no character.
    pub(crate) const fn is_empty(&self) -> bool {
        self.quoted.len() <= 2
    }

    fn inner(&self) -> &'a [u8] {
        self.quoted.get(1..self.quoted.len().saturating_sub(1)).unwrap_or_default()
    }

    /// Its characters. `None` only for a lone surrogate, which is no text.
    pub(crate) fn get(&self) -> Option<Cow<'a, str>> {
        if self.escaped {
            return serde_json::from_slice(self.quoted).ok().map(Cow::Owned);
        }
        std::str::from_utf8(self.inner()).ok().map(Cow::Borrowed)
    }

    /// True if its characters are these.
    pub(crate) fn is(&self, text: &str) -> bool {
        self.get().is_some_and(|own| own == text)
    }
}

pub(crate) type Scanned<T> = Result<T, NotJson>;

/// A position in a text.
pub(crate) struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: u32,
}

impl<'a> Scanner<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, depth: 0 }
    }

    fn byte(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.byte() {
            self.at += 1;
        }
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.byte() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) -> Scanned<()> {
        if self.take(byte) { Ok(()) } else { Err(NotJson) }
    }

    /// What comes next.
    pub(crate) fn peek(&mut self) -> Scanned<Kind> {
        self.space();
        match self.byte() {
            Some(b'{') => Ok(Kind::Object),
            Some(b'[') => Ok(Kind::Array),
            Some(b'"') => Ok(Kind::String),
            Some(b't' | b'f') => Ok(Kind::Bool),
            Some(b'n') => Ok(Kind::Null),
            Some(b'-' | b'0'..=b'9') => Ok(Kind::Number),
            _ => Err(NotJson),
        }
    }

    /// Only white space is left.
    pub(crate) fn end(&mut self) -> Scanned<()> {
        self.space();
        if self.at == self.bytes.len() { Ok(()) } else { Err(NotJson) }
    }

    fn nest<T>(&mut self, inside: impl FnOnce(&mut Self) -> Scanned<T>) -> Scanned<T> {
        if self.depth == MAX_DEPTH {
            return Err(NotJson);
        }
        self.depth += 1;
        let result = inside(self);
        self.depth -= 1;
        result
    }

    /// Visits the members of an object; keys come as UTF-8 bytes, for comparing text with text is what costs here. `each` must
    /// read or skip the value. A value of another kind is skipped.
    pub(crate) fn object(&mut self, mut each: impl FnMut(&mut Self, &[u8]) -> Scanned<()>) -> Scanned<()> {
        if self.peek()? != Kind::Object {
            return self.skip();
        }
        self.nest(|scan| {
            scan.expect(b'{')?;
            scan.space();
            if scan.take(b'}') {
                return Ok(());
            }
            loop {
                scan.space();
                let key = scan.quoted()?;
                scan.space();
                scan.expect(b':')?;
                if key.escaped {
                    // A key that is no text is no key anybody asks for.
                    each(scan, key.get().as_deref().unwrap_or_default().as_bytes())?;
                } else {
                    each(scan, key.inner())?;
                }
                scan.space();
                if !scan.take(b',') {
                    return scan.expect(b'}');
                }
            }
        })
    }

    /// Visits the elements of an array. `each` must read or skip the value. A value of another kind is skipped.
    pub(crate) fn array(&mut self, mut each: impl FnMut(&mut Self) -> Scanned<()>) -> Scanned<()> {
        if self.peek()? != Kind::Array {
            return self.skip();
        }
        self.nest(|scan| {
            scan.expect(b'[')?;
            scan.space();
            if scan.take(b']') {
                return Ok(());
            }
            loop {
                each(scan)?;
                scan.space();
                if !scan.take(b',') {
                    return scan.expect(b']');
                }
            }
        })
    }

    /// A string; `None` for a value of another kind, which is skipped.
    pub(crate) fn text(&mut self) -> Scanned<Option<Text<'a>>> {
        if self.peek()? == Kind::String { self.quoted().map(Some) } else { self.skip().map(|()| None) }
    }

    /// A whole number that is not negative; `None` for anything else, which is skipped.
    pub(crate) fn count(&mut self) -> Scanned<Option<u64>> {
        if self.peek()? != Kind::Number {
            return self.skip().map(|()| None);
        }
        let number = self.number()?;
        Ok(std::str::from_utf8(number).ok().and_then(|digits| digits.parse().ok()))
    }

    /// The text of the next value, whatever it is.
    pub(crate) fn raw(&mut self) -> Scanned<&'a [u8]> {
        self.space();
        let from = self.at;
        self.skip()?;
        self.bytes.get(from..self.at).ok_or(NotJson)
    }

    /// Reads over the next value.
    pub(crate) fn skip(&mut self) -> Scanned<()> {
        match self.peek()? {
            Kind::Object => self.object(|scan, _| scan.skip()),
            Kind::Array => self.array(Self::skip),
            Kind::String => self.quoted().map(drop),
            Kind::Number => self.number().map(drop),
            Kind::Bool => {
                let word: &[u8] = if self.byte() == Some(b't') { b"true" } else { b"false" };
                self.word(word)
            }
            Kind::Null => self.word(b"null"),
        }
    }

    fn word(&mut self, word: &[u8]) -> Scanned<()> {
        let end = self.at + word.len();
        if self.bytes.get(self.at..end) != Some(word) {
            return Err(NotJson);
        }
        self.at = end;
        Ok(())
    }

    fn quoted(&mut self) -> Scanned<Text<'a>> {
        let from = self.at;
        self.expect(b'"')?;
        let mut escaped = false;
        loop {
            let rest = self.bytes.get(self.at..).ok_or(NotJson)?;
            self.at += plain_bytes(rest).ok_or(NotJson)?;
            match self.byte().ok_or(NotJson)? {
                b'"' => break,
                b'\\' => {
                    escaped = true;
                    self.at += 1;
                    match self.byte().ok_or(NotJson)? {
                        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 1,
                        b'u' => {
                            let digits = self.bytes.get(self.at + 1..self.at + 5).ok_or(NotJson)?;
                            if !digits.iter().all(u8::is_ascii_hexdigit) {
                                return Err(NotJson);
                            }
                            self.at += 5;
                        }
                        _ => return Err(NotJson),
                    }
                }
                _ => return Err(NotJson),
            }
        }
        self.at += 1;
        let quoted = self.bytes.get(from..self.at).ok_or(NotJson)?;
        Ok(Text { quoted, escaped })
    }

    fn digits(&mut self) -> Scanned<()> {
        let from = self.at;
        while let Some(b'0'..=b'9') = self.byte() {
            self.at += 1;
        }
        if self.at > from { Ok(()) } else { Err(NotJson) }
    }

    fn number(&mut self) -> Scanned<&'a [u8]> {
        let from = self.at;
        self.take(b'-');
        if !self.take(b'0') {
            self.digits()?;
        }
        if self.take(b'.') {
            self.digits()?;
        }
        if self.take(b'e') || self.take(b'E') {
            if !self.take(b'+') {
                self.take(b'-');
            }
            self.digits()?;
        }
        self.bytes.get(from..self.at).ok_or(NotJson)
    }
}

/// Up to here a string is looked at byte by byte: keys and tokens are shorter than what a vector search costs to set up.
const SHORT: usize = 24;

/// How many bytes stand before the first quote, backslash or control character; `None` if there is none.
fn plain_bytes(bytes: &[u8]) -> Option<usize> {
    let special = |byte: &u8| matches!(byte, b'"' | b'\\') || *byte < 0x20;
    if let Some(at) = bytes.iter().take(SHORT).position(special) {
        return Some(at);
    }
    let rest = bytes.get(SHORT..)?;
    let found = memchr::memchr2(b'"', b'\\', rest)?;
    let plain = rest.get(..found)?;
    // Without an early end the compiler checks many bytes at once.
    let clean = !plain.iter().fold(false, |control, byte| control | (*byte < 0x20));
    if clean { Some(SHORT + found) } else { plain.iter().position(special).map(|at| SHORT + at) }
}

#[cfg(test)]
mod tests;
