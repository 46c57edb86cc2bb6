//! Decides what a leak of a secret looks like: a half of it, or all of it, in every form in which a careless program writes it.

use std::fmt::Write as _;

/// A text that must be nowhere, in every form in which a careless program writes it.
#[derive(Clone)]
pub struct Secret {
    /// What it is, for people.
    pub name: &'static str,
    forms: Vec<(String, Vec<u8>)>,
    /// Files of the fleet that hold it, and must.
    pub homes: &'static [&'static str],
}

impl Secret {
    /// A secret of at least 24 ASCII characters.
    ///
    /// # Panics
    /// When it is shorter: a part of it would be found by chance.
    #[must_use]
    pub fn new(name: &'static str, text: &str, homes: &'static [&'static str]) -> Self {
        let mut forms = Vec::new();
        let mut add = |form: &str, bytes: Vec<u8>| {
            assert!(bytes.len() >= 12, "{form} of {name} is too short to mean anything");
            forms.push((form.to_owned(), bytes));
        };
        let (first, second) = text.split_at(text.len() / 2);
        // A part of it is a leak, too.
        add("its first half", first.into());
        add("its second half", second.into());
        for (form, hex) in [("hex", hex(text, false)), ("HEX", hex(text, true))] {
            add(form, hex.into());
        }
        let list: Vec<_> = text.bytes().map(|byte| byte.to_string()).collect();
        add("a list of bytes", list.join(", ").into());
        add("a list of bytes without blanks", list.join(",").into());
        for alphabet in [b"+/", b"-_"] {
            for shift in 0..3 {
                add(&format!("base64 {} from byte {shift}", char::from(alphabet[0])), base64(text, shift, *alphabet));
            }
        }
        Self { name, forms, homes }
    }

    /// The forms of it that are in these bytes, each with the line it is in.
    #[must_use]
    pub fn found(&self, bytes: &[u8]) -> Vec<String> {
        let found = self.forms.iter().filter_map(|(name, form)| {
            let at = memchr::memmem::find(bytes, form)?;
            let start = bytes[..at].iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            let end = bytes[at..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |length| at + length);
            Some(format!("{name}: {}", String::from_utf8_lossy(&bytes[start..end])))
        });
        found.collect()
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secret").field("name", &self.name).finish_non_exhaustive()
    }
}

/// As hexadecimal digits.
#[must_use]
pub fn hex(text: &str, upper: bool) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        let _infallible = if upper { write!(out, "{byte:02X}") } else { write!(out, "{byte:02x}") };
        out
    })
}

/// What is common to all base64 of texts that hold `text`, so many bytes (0 to 2) after a multiple of three. The last two
/// digits of an alphabet differ: `+/` or `-_`.
#[must_use]
pub fn base64(text: &str, shift: usize, [plus, slash]: [u8; 2]) -> Vec<u8> {
    let alphabet: Vec<u8> = (b'A'..=b'Z').chain(b'a'..=b'z').chain(b'0'..=b'9').chain([plus, slash]).collect();
    let padded = [&vec![0; shift], text.as_bytes()].concat();
    let whole: Vec<u8> = padded
        .chunks_exact(3)
        .flat_map(|three| {
            let bits = u32::from_be_bytes([0, three[0], three[1], three[2]]);
            [18, 12, 6, 0].map(|at| alphabet[(bits >> at & 63) as usize])
        })
        .collect();
    // Of the first group, only digits of the text itself.
    whole[[0, 2, 3][shift]..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "acme-9f86d081884c7d659a2feaa0c55ad015";

    #[test]
    fn a_secret_is_found_in_each_of_its_forms() {
        // So that finding none means something.
        let secret = Secret::new("the key", KEY, &[]);
        let forms = |bytes: &[u8]| -> Vec<String> {
            secret.found(bytes).into_iter().map(|found| found.split(':').next().unwrap().to_owned()).collect()
        };
        assert_eq!(forms(b"nothing of the kind"), [""; 0]);
        let [half, end] = [&KEY[..KEY.len() / 2], &KEY[KEY.len() / 2..]];
        assert_eq!(secret.found(format!("one\n<{half}>\nthree").as_bytes()), [format!("its first half: <{half}>")]);
        assert_eq!(forms(end.as_bytes()), ["its second half"]);
        assert_eq!(forms(format!("{KEY:?}").as_bytes()).len(), 2);
        assert_eq!(forms(format!("{:?}", KEY.as_bytes()).as_bytes()), ["a list of bytes"]);
        assert_eq!(forms(hex(KEY, true).as_bytes()), ["HEX"]);
        // RFC 4648, and at each place of a longer text.
        assert_eq!(base64("foobarfoobar", 0, *b"+/"), b"Zm9vYmFyZm9vYmFy");
        for (shift, around) in ["", "x", "xy"].into_iter().enumerate() {
            let longer = base64(&format!("{around}{KEY}yyyy"), 0, *b"+/");
            assert!(forms(&longer).contains(&format!("base64 + from byte {shift}")), "{shift}");
        }
    }
}
