//! Decides whether text is one well-formed JSON value, and where the members of its top-level object lie.
//!
//! One pass, no recursion, no allocation, nothing kept per member: 32 MiB of tiny members cost no memory. The grammar is
//! RFC 8259's; nesting is bounded by [`MAX_JSON_DEPTH`].

use std::ops::Range;

use memchr::{memchr_iter, memchr2, memrchr};

use super::config::MAX_JSON_DEPTH;

/// Where and why text is not acceptable JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct JsonError {
    /// Byte offset.
    pub(crate) at: usize,
    /// What is wrong, for people.
    pub(crate) problem: &'static str,
}

impl JsonError {
    /// Line and column from 1, the column in bytes.
    pub(crate) fn place(self, text: &[u8]) -> (usize, usize) {
        let before = text.get(..self.at).unwrap_or(text);
        let line = memchr_iter(b'\n', before).count() + 1;
        let column = before.len() - memrchr(b'\n', before).map_or(0, |newline| newline + 1) + 1;
        (line, column)
    }
}

/// What a scan tells about the text. Keys are given as written, without quotes: compare with [`same_key`].
pub(crate) trait Visitor {
    /// A member of the top-level object begins. True: its strings are wanted.
    fn member(&mut self, key: &str) -> bool;
    /// A string that is the value of `key` in an object somewhere inside a wanted member, and its decoded length.
    fn string(&mut self, key: &str, len: usize);
    /// The value of the member just begun.
    fn value(&mut self, key: &str, span: Range<usize>);
}

/// True if a key as written spells `name`, in whatever way.
pub(crate) fn same_key(raw: &str, name: &str, ignore_case: bool) -> bool {
    let same = |key: &str| if ignore_case { key.eq_ignore_ascii_case(name) } else { key == name };
    if !raw.contains('\\') {
        return same(raw);
    }
    // Longest spelling of one ASCII character is a six-byte escape.
    raw.len() <= name.len() * 6 && decode(raw).is_some_and(|key| same(&key))
}

/// The text that a string literal without its quotes spells.
pub(crate) fn decode(raw: &str) -> Option<String> {
    serde_json::from_str(&format!("\"{raw}\"")).ok()
}

/// Scans text that must be one JSON value.
///
/// # Errors
/// The first problem.
pub(crate) fn scan(text: &str, visitor: &mut impl Visitor) -> Result<(), JsonError> {
    Scanner { text, bytes: text.as_bytes(), at: 0, stack: 0, depth: 0 }.run(visitor)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    CommaOrEnd,
    End,
}

struct Scanner<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    /// One bit per open container, innermost lowest: 1 = object. INVARIANT: `depth` <= 64.
    stack: u64,
    depth: u32,
}

impl<'a> Scanner<'a> {
    fn run(mut self, visitor: &mut impl Visitor) -> Result<(), JsonError> {
        let mut expect = Expect::Value;
        // The key whose value is being read, and where the value of the current top-level member begins.
        let mut key = "";
        let mut member: Option<(&str, usize)> = None;
        let mut wanted = false;
        loop {
            self.skip_space();
            let Some(&byte) = self.bytes.get(self.at) else {
                return if expect == Expect::End { Ok(()) } else { Err(self.error("unexpected end")) };
            };
            let in_object = self.depth > 0 && self.stack & 1 == 1;
            let closes = match expect {
                Expect::End => return Err(self.error("something follows the value")),
                Expect::Key | Expect::KeyOrEnd if byte == b'"' => {
                    key = self.string()?.0;
                    self.skip_space();
                    if self.bytes.get(self.at) != Some(&b':') {
                        return Err(self.error("expected a colon"));
                    }
                    self.at += 1;
                    self.skip_space();
                    if self.depth == 1 {
                        wanted = visitor.member(key);
                        member = Some((key, self.at));
                    }
                    expect = Expect::Value;
                    continue;
                }
                Expect::KeyOrEnd if byte == b'}' => true,
                Expect::Key | Expect::KeyOrEnd => return Err(self.error("expected a key")),
                Expect::ValueOrEnd if byte == b']' => true,
                Expect::Value | Expect::ValueOrEnd => match byte {
                    b'{' => {
                        self.open(true)?;
                        expect = Expect::KeyOrEnd;
                        continue;
                    }
                    b'[' => {
                        self.open(false)?;
                        key = "";
                        expect = Expect::ValueOrEnd;
                        continue;
                    }
                    b'"' => {
                        let (_, len) = self.string()?;
                        if wanted && in_object {
                            visitor.string(key, len);
                        }
                        false
                    }
                    b'-' | b'0'..=b'9' => {
                        self.number()?;
                        false
                    }
                    _ => {
                        self.literal()?;
                        false
                    }
                },
                Expect::CommaOrEnd => match byte {
                    b',' => {
                        self.at += 1;
                        expect = if in_object { Expect::Key } else { Expect::Value };
                        continue;
                    }
                    b'}' if in_object => true,
                    b']' if !in_object => true,
                    _ => return Err(self.error("expected a comma or the end")),
                },
            };
            if closes {
                self.at += 1;
                self.stack >>= 1;
                self.depth -= 1;
            }
            if self.depth == 1
                && let Some((name, start)) = member.take()
            {
                visitor.value(name, start..self.at);
                wanted = false;
            }
            expect = if self.depth == 0 { Expect::End } else { Expect::CommaOrEnd };
        }
    }

    fn error(&self, problem: &'static str) -> JsonError {
        JsonError { at: self.at, problem }
    }

    fn skip_space(&mut self) {
        while matches!(self.bytes.get(self.at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    fn open(&mut self, object: bool) -> Result<(), JsonError> {
        if self.depth == MAX_JSON_DEPTH {
            return Err(self.error("nested too deeply"));
        }
        self.at += 1;
        self.depth += 1;
        self.stack = self.stack << 1 | u64::from(object);
        Ok(())
    }

    /// The string at the cursor as written, without quotes, and its decoded length.
    fn string(&mut self) -> Result<(&'a str, usize), JsonError> {
        self.at += 1;
        let start = self.at;
        let mut saved = 0;
        loop {
            let rest = self.bytes.get(self.at..).unwrap_or_default();
            let Some(step) = memchr2(b'"', b'\\', rest) else {
                self.refuse_control(rest)?;
                self.at = self.bytes.len();
                return Err(self.error("unexpected end of a string"));
            };
            self.refuse_control(rest.get(..step).unwrap_or_default())?;
            self.at += step;
            if rest.get(step) == Some(&b'"') {
                let raw = self.text.get(start..self.at).unwrap_or_default();
                self.at += 1;
                return Ok((raw, raw.len().saturating_sub(saved)));
            }
            saved += self.escape()?;
        }
    }

    fn refuse_control(&self, bytes: &[u8]) -> Result<(), JsonError> {
        // Without an early end the compiler checks many bytes at once: a prompt may be megabytes long.
        if !bytes.iter().fold(false, |found, byte| found | (*byte < 0x20)) {
            return Ok(());
        }
        let offset = bytes.iter().position(|byte| *byte < 0x20).unwrap_or(0);
        Err(JsonError { at: self.at + offset, problem: "control character in a string" })
    }

    /// Skips an escape; answers by how much it is longer than what it spells.
    fn escape(&mut self) -> Result<usize, JsonError> {
        match self.bytes.get(self.at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                self.at += 2;
                Ok(1)
            }
            Some(b'u') => {
                let digits = self.bytes.get(self.at + 2..self.at + 6).filter(|d| d.iter().all(u8::is_ascii_hexdigit));
                let Some(value) = digits
                    .and_then(|digits| std::str::from_utf8(digits).ok())
                    .and_then(|digits| u32::from_str_radix(digits, 16).ok())
                else {
                    return Err(self.error("invalid escape"));
                };
                self.at += 6;
                // A surrogate pair spells four bytes: two for each half.
                Ok(match value {
                    0..0x80 => 5,
                    0x80..0x800 | 0xd800..0xe000 => 4,
                    _ => 3,
                })
            }
            Some(_) => Err(self.error("invalid escape")),
            None => Err(self.error("unexpected end of a string")),
        }
    }

    fn number(&mut self) -> Result<(), JsonError> {
        if self.bytes.get(self.at) == Some(&b'-') {
            self.at += 1;
        }
        if self.bytes.get(self.at) == Some(&b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.bytes.get(self.at) == Some(&b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.bytes.get(self.at), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.bytes.get(self.at), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let count = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if count == 0 {
            return Err(self.error("invalid number"));
        }
        self.at += count;
        Ok(())
    }

    fn literal(&mut self) -> Result<(), JsonError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        match [&b"true"[..], b"false", b"null"].into_iter().find(|word| rest.starts_with(word)) {
            Some(word) => {
                self.at += word.len();
                Ok(())
            }
            None => Err(self.error("expected a value")),
        }
    }
}

#[cfg(test)]
mod tests;
