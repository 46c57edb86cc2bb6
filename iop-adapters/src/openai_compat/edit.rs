//! Decides how the caller's chat object becomes the server's: model, stream and usage set, every other byte of value kept.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The members of an object in their order, values untouched.
struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Members<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(Key(key)) = map.next_key()? {
                    members.push((key, map.next_value()?));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

/// A key, borrowed unless it has escapes.
#[derive(serde::Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// The streaming request for `target` that says what `raw` says. `None` when `raw` is no object.
pub(super) fn streaming_request(raw: &[u8], target: &str) -> Option<Vec<u8>> {
    let Members(members) = serde_json::from_slice(raw).ok()?;
    let mut out = Vec::with_capacity(raw.len() + target.len() + 96);
    out.extend_from_slice(b"{\"model\":");
    serde_json::to_writer(&mut out, target).ok()?;
    let mut options = None;
    for (key, value) in &members {
        match key.as_ref() {
            "model" | "stream" => {}
            "stream_options" => options = Some(*value),
            key => member(&mut out, key, value)?,
        }
    }
    out.extend_from_slice(b",\"stream\":true,\"stream_options\":{\"include_usage\":true");
    let options = options.and_then(|options| serde_json::from_str::<Members<'_>>(options.get()).ok());
    for (key, value) in options.iter().flat_map(|options| &options.0) {
        if key != "include_usage" {
            member(&mut out, key, value)?;
        }
    }
    out.extend_from_slice(b"}}");
    Some(out)
}

fn member(out: &mut Vec<u8>, key: &str, value: &RawValue) -> Option<()> {
    out.push(b',');
    serde_json::to_writer(&mut *out, key).ok()?;
    out.push(b':');
    out.extend_from_slice(value.get().as_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edit(raw: &str) -> Option<String> {
        streaming_request(raw.as_bytes(), "t\"1").map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn model_stream_and_usage_are_set_and_nothing_else_changes() {
        // EXE-16; field report 83
        assert_eq!(
            edit(r#"{"messages":[], "temperature":0.70,"seed":12345678901234567890123,"model":"a","stream":false,"z":{"b":1,"a":2}}"#)
                .unwrap(),
            r#"{"model":"t\"1","messages":[],"temperature":0.70,"seed":12345678901234567890123,"z":{"b":1,"a":2},"stream":true,"stream_options":{"include_usage":true}}"#
        );
        assert_eq!(
            edit(r#"{"stream_options":{"include_usage":false,"x":1e3}}"#).unwrap(),
            r#"{"model":"t\"1","stream":true,"stream_options":{"include_usage":true,"x":1e3}}"#
        );
        assert_eq!(
            edit(r#"{"stream_options":null,"model":1,"model":2}"#).unwrap(),
            r#"{"model":"t\"1","stream":true,"stream_options":{"include_usage":true}}"#
        );
        assert_eq!(edit("[]"), None);
    }
}
