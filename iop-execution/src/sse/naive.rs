//! The reference: an SSE parser that has the whole body, and cares neither for cost nor for limits.

use super::SseError;

/// What a block means, without where its bytes lay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Meaning {
    Blank,
    Comment,
    Error(String),
    Event { data: String, name: Vec<u8>, lines: usize },
    NoData,
}

/// Meanings of all blocks that a blank line ends, up to the first error.
pub(crate) fn parse(body: &[u8]) -> (Vec<Meaning>, Option<SseError>) {
    let body = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body);
    let mut normal = Vec::new();
    for (at, &byte) in body.iter().enumerate() {
        match byte {
            b'\n' if at > 0 && body[at - 1] == b'\r' => {}
            b'\r' => normal.push(b'\n'),
            other => normal.push(other),
        }
    }
    let mut lines: Vec<&[u8]> = normal.split(|&byte| byte == b'\n').collect();
    lines.pop();

    let (mut found, mut block) = (Vec::new(), Vec::new());
    for line in lines {
        if !line.is_empty() {
            block.push(line);
            continue;
        }
        match meaning(&std::mem::take(&mut block)) {
            Ok(meaning) => found.push(meaning),
            Err(_) => return (found, Some(SseError::InvalidUtf8)),
        }
    }
    (found, None)
}

fn meaning(lines: &[&[u8]]) -> Result<Meaning, std::string::FromUtf8Error> {
    let fields: Vec<(&[u8], &[u8])> = lines
        .iter()
        .map(|line| match line.iter().position(|&byte| byte == b':') {
            Some(colon) => {
                let value = &line[colon + 1..];
                (&line[..colon], value.strip_prefix(b" ").unwrap_or(value))
            }
            None => (*line, &b""[..]),
        })
        .collect();
    let values = |name: &[u8]| -> Vec<&[u8]> {
        let named = fields.iter().filter(|(field, _)| *field == name);
        named.map(|(_, value)| *value).collect()
    };
    let comment = |line: &&[u8]| line[0] == b':';

    let (data, error) = (values(b"data"), values(b"error"));
    if !error.join(&b'\n').is_empty() {
        return Ok(Meaning::Error(String::from_utf8(error.join(&b'\n'))?));
    }
    if !data.join(&b'\n').is_empty() {
        return Ok(Meaning::Event {
            name: values(b"event").last().unwrap_or(&&b""[..]).to_vec(),
            lines: data.len(),
            data: String::from_utf8(data.join(&b'\n'))?,
        });
    }
    Ok(match lines {
        [] => Meaning::Blank,
        _ if lines.iter().all(comment) => Meaning::Comment,
        _ => Meaning::NoData,
    })
}
