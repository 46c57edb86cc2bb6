//! Decides whether a provider's error answer repeats the key it was asked with (SEC-2).

use std::borrow::Cow;

use http::HeaderValue;

/// The answer holds the value of the key's header, or a word of it that is not the name of its scheme: `Token abc` is also
/// repeated by `abc`. JSON may write any character with a backslash, so the text counts as it reads, too.
pub(crate) fn repeats(answer: &[u8], key: &HeaderValue) -> bool {
    let words: Vec<_> = key.as_bytes().split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).collect();
    let read = unescaped(answer);
    let secrets = match &words[..] {
        [_scheme, secrets @ ..] if !secrets.is_empty() => secrets,
        only => only,
    };
    secrets.iter().any(|word| {
        let finder = memchr::memmem::Finder::new(word);
        finder.find(answer).is_some() || finder.find(&read).is_some()
    })
}

/// The text with JSON's escapes read. Keys are visible ASCII (RFC 9110, 5.5), so that other characters may become anything.
fn unescaped(text: &[u8]) -> Cow<'_, [u8]> {
    if memchr::memchr(b'\\', text).is_none() {
        return Cow::Borrowed(text);
    }
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        rest = tail;
        match (first, tail) {
            (b'\\', [b'u', after @ ..]) => {
                let code = after.get(..4).and_then(|digits| std::str::from_utf8(digits).ok());
                let code = code.and_then(|digits| u32::from_str_radix(digits, 16).ok());
                if let Some(byte) = code.and_then(|code| u8::try_from(code).ok()) {
                    out.push(byte);
                    rest = after.get(4..).unwrap_or_default();
                }
            }
            (b'\\', [escaped, after @ ..]) => {
                out.push(*escaped);
                rest = after;
            }
            _ => out.push(*first),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(value: &str) -> HeaderValue {
        HeaderValue::from_str(value).unwrap()
    }

    #[test]
    fn a_key_is_found_with_and_without_its_scheme_and_however_json_writes_it() {
        // SEC-2
        for (value, answer, found) in [
            ("Bearer a/b\"c", r#"{"error":"bad key a/b\"c"}"#, true),
            ("Bearer a/b\"c", r#"{"error":"bad key a\/b\u0022c"}"#, true),
            ("Bearer a/b\"c", r#"{"error":"bad key \u0061\u002Fb\"c"}"#, true),
            ("Token abcdef", r#"{"error":"what is abcdef?"}"#, true),
            ("Token abcdef", r#"{"error":"no Token was sent"}"#, false),
            ("Token\tabcdef", r#"{"error":"no Token was sent"}"#, false),
            ("abcdef", r#"{"error":"x-api-key abcdef is unknown"}"#, true),
            ("abcdef", r#"{"error":"abcde\u"}"#, false),
            ("abcdef", "abcde\\", false),
            ("key-id=one secret-part", r#"{"error":"secret-part"}"#, true),
            (" ", "anything", false),
        ] {
            assert_eq!(repeats(answer.as_bytes(), &key(value)), found, "{value} in {answer}");
        }
    }

    #[test]
    fn text_is_read_as_json_reads_it() {
        // SEC-2
        let texts = ["plain", "a\"b\\c/d", "\u{1}x", ""];
        for text in texts {
            let written = serde_json::to_string(text).unwrap();
            assert_eq!(&*unescaped(written.trim_matches('"').as_bytes()), text.as_bytes(), "{written}");
        }
    }
}
