//! Decides how a line of a Prometheus text is read: as far as probes need it.

/// One sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sample<'a> {
    pub(super) name: &'a str,
    labels: &'a str,
    pub(super) value: f64,
}

impl Sample<'_> {
    /// True if it has this label with this value.
    pub(super) fn label_is(&self, name: &str, value: &str) -> bool {
        let mut rest = self.labels;
        while let Some((key, after)) = rest.split_once("=\"") {
            let Some(end) = closing_quote(after) else { return false };
            let (text, tail) = (&after[..end], &after[end + 1..]);
            if key.trim_start_matches(',').trim() == name {
                return is_unescaped(text, value);
            }
            rest = tail;
        }
        false
    }
}

/// Where a quoted value ends.
fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let closes = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        closes
    })
}

fn is_unescaped(text: &str, value: &str) -> bool {
    let mut text = text.chars();
    let unescaped = std::iter::from_fn(|| match text.next()? {
        '\\' => text.next().map(|escaped| if escaped == 'n' { '\n' } else { escaped }),
        plain => Some(plain),
    });
    unescaped.eq(value.chars())
}

/// Every sample of a text; what can't be read is left out.
pub(super) fn samples(text: &[u8]) -> impl Iterator<Item = Sample<'_>> {
    text.split(|byte| *byte == b'\n').filter_map(|line| sample(std::str::from_utf8(line).ok()?.trim()))
}

fn sample(line: &str) -> Option<Sample<'_>> {
    if line.starts_with('#') {
        return None;
    }
    let (name, labels, rest) = match line.split_once('{') {
        Some((name, rest)) => {
            // A brace may stand in a quoted value.
            let mut quoted = false;
            let mut escaped = false;
            let end = rest.bytes().position(|byte| {
                let ends = byte == b'}' && !quoted;
                quoted ^= byte == b'"' && !escaped;
                escaped = byte == b'\\' && !escaped;
                ends
            })?;
            (name, rest.get(..end)?, rest.get(end + 1..)?)
        }
        None => {
            let (name, rest) = line.split_once(' ')?;
            (name, "", rest)
        }
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.trim(), labels, value })
}

/// A count without its fraction.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast of a float saturates; counts are whole"
)]
pub(super) const fn whole(value: f64) -> u64 {
    value as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_their_labels_and_anything_else_is_left_out() {
        // ADP-2
        let text = b"# HELP x y\nx 1\nvllm:a{engine=\"0\",model_name=\"m/\\\"1\\\\}\"} 2.5e3 17\nbroken{a=\"b\n\xff\nz{model_name=\"m\"} NaN\nw{} 7\n";
        let all: Vec<_> = samples(text).collect();
        let names: Vec<_> = all.iter().map(|sample| (sample.name, sample.value)).collect();
        assert_eq!(names[..2], [("x", 1.0), ("vllm:a", 2500.0)]);
        assert!(all[1].label_is("model_name", "m/\"1\\}") && all[1].label_is("engine", "0"));
        assert!(!all[1].label_is("model_name", "m/") && !all[1].label_is("name", "0") && !all[0].label_is("x", "1"));
        assert_eq!((names[2].0, names[3]), ("z", ("w", 7.0)));
        assert_eq!((whole(f64::NAN), whole(-1.0), whole(3.9)), (0, 0, 3));
    }
}
