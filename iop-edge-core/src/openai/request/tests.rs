use proptest::prelude::*;
use serde_json::{Value, json, value::RawValue};

use super::*;
use crate::openai::errors::Dialect;

fn parse(body: impl Into<Bytes>) -> Result<ChatRequest, ApiError> {
    ChatRequest::parse(body.into(), Kind::Chat)
}

fn edited(body: &str, target: &str) -> String {
    String::from_utf8(parse(body.to_owned()).unwrap().for_target(target).to_vec()).unwrap()
}

/// Status, param and message of the refusal.
fn refusal(body: impl Into<Bytes>) -> (u16, Value, String) {
    let error = parse(body).unwrap_err();
    let object: Value = serde_json::from_slice(&error.to_json(Dialect::OpenAi)).unwrap();
    let message = object["error"]["message"].as_str().unwrap().to_owned();
    (error.status().as_u16(), object["error"]["param"].clone(), message)
}

#[test]
fn only_model_and_stream_options_change() {
    // API-3, API-4
    let body = "{ \"temperature\": 0.70, \"model\" : \"a\", \"top_k\":1e2,\"messages\":[{\"role\":\"user\"}] }\n";
    assert_eq!(edited(body, "a"), body, "nothing to change: nothing changes");
    assert_eq!(edited(body, "org/b\"c"), body.replace("\"a\"", "\"org/b\\\"c\""));
    let shared = parse(body).unwrap();
    assert_eq!(shared.for_target("a").as_ptr(), shared.body().as_ptr(), "and nothing is copied");
}

#[test]
fn usage_is_asked_for_when_streaming_and_only_then() {
    // API-4: the four cells, and every form of stream_options
    let body = |rest: &str| format!(r#"{{"model":"m","messages":[1]{rest}}}"#);
    for (rest, want, asked) in [
        ("", "", false),
        (r#","stream":false"#, r#","stream":false"#, false),
        (r#","stream":null,"stream_options":null"#, r#","stream":null,"stream_options":null"#, false),
        (r#","stream":true"#, r#","stream":true,"stream_options":{"include_usage":true}"#, false),
        (r#","stream_options":null,"stream":true"#, r#","stream_options":{"include_usage":true},"stream":true"#, false),
        (r#","stream_options":{ },"stream":true"#, r#","stream_options":{"include_usage":true },"stream":true"#, false),
        (
            r#","stream_options":{"x":1},"stream":true"#,
            r#","stream_options":{"include_usage":true,"x":1},"stream":true"#,
            false,
        ),
        (
            r#","stream_options":{"include_usage": false },"stream":true"#,
            r#","stream_options":{"include_usage": true },"stream":true"#,
            false,
        ),
        (
            r#","stream_options":{"include_usage":true},"stream":true"#,
            r#","stream_options":{"include_usage":true},"stream":true"#,
            true,
        ),
    ] {
        let request = parse(body(rest)).unwrap();
        assert_eq!(request.for_target("m"), body(want), "{rest}");
        assert_eq!(request.wants_usage(), asked, "{rest}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    // API-3
    let m = r#""messages":[{}]"#;
    for (body, param) in [
        (format!("{{{m}}}"), "model"),
        (format!(r#"{{"model":7,{m}}}"#), "model"),
        (format!(r#"{{"model":"",{m}}}"#), "model"),
        (format!(r#"{{"model":null,{m}}}"#), "model"),
        (format!(r#"{{"model":"a","model":"b",{m}}}"#), "model"),
        (format!(r#"{{"model":"a",{m},"mod\u0065l":"b"}}"#), "model"),
        (format!(r#"{{"model":"a",{m},"Model":"b"}}"#), "model"),
        (format!(r#"{{"Model":"a",{m}}}"#), "model"),
        (r#"{"model":"a"}"#.into(), "messages"),
        (r#"{"model":"a","messages":[]}"#.into(), "messages"),
        (r#"{"model":"a","messages":[ ]}"#.into(), "messages"),
        (r#"{"model":"a","messages":{}}"#.into(), "messages"),
        (r#"{"model":"a","messages":"hi"}"#.into(), "messages"),
        (format!(r#"{{"model":"a",{m},{m}}}"#), "messages"),
        (format!(r#"{{"model":"a",{m},"stream":"true"}}"#), "stream"),
        (format!(r#"{{"model":"a",{m},"stream":1}}"#), "stream"),
        (format!(r#"{{"model":"a",{m},"stream":true,"stream":false}}"#), "stream"),
        (format!(r#"{{"model":"a",{m},"stream_options":{{"include_usage":true}}}}"#), "stream_options"),
        (format!(r#"{{"model":"a",{m},"stream":true,"stream_options":7}}"#), "stream_options"),
        (format!(r#"{{"model":"a",{m},"stream":true,"stream_options":{{"include_usage":1}}}}"#), "stream_options"),
    ] {
        let (status, found, _) = refusal(body.clone());
        assert_eq!((status, found), (400, json!(param)), "{body}");
    }
    for body in ["[]", "1", "\"x\"", "null"] {
        assert_eq!(refusal(body).2, "The request body must be a JSON object.");
    }
}

#[test]
fn malformed_json_is_told_by_place_and_never_repeated() {
    // API-3
    let (status, param, message) = refusal("{\"model\":\"SENTINEL\",\n \"messages\":[SENTINEL]}");
    assert_eq!((status, param), (400, Value::Null));
    assert_eq!(message, "The request body is not valid JSON: expected a value at line 2 column 14.");
    assert!(refusal("").2.contains("unexpected end at line 1 column 1"));
    assert!(refusal("{\"a\":1,}").2.contains("expected a key"));
    assert!(refusal(&b"{\"a\":\"\xff\"}"[..]).2.contains("invalid UTF-8 at line 1 column 7"));
    let deep = format!(r#"{{"model":"m","messages":[{}{}]}}"#, "[".repeat(63), "]".repeat(63));
    assert!(refusal(deep).2.contains("nested too deeply"));
    assert!(refusal("{} {}").2.contains("something follows the value"));
}

#[test]
fn names_are_decoded_and_prompts_estimated() {
    // LEA-2
    let request = parse(
        r#"{"model":"a\/b","tools":[{"text":"not a message"}],"messages":[{"role":"user","content":"12345678"},
            {"content":[{"type":"text","text":"1234"},{"image_url":{"url":"data:xxxxxxxx"}}]}]}"#,
    )
    .unwrap();
    assert_eq!(request.model(), "a/b");
    assert_eq!(request.prompt_tokens(), 3);
    assert!(!format!("{request:?}").contains("1234"));
}

proptest! {
    #[test]
    fn every_other_member_keeps_its_bytes_and_its_place(
        keys in prop::collection::vec("[a-z]{1,3}", 0..6),
        numbers in prop::collection::vec(prop::sample::select(vec!["1.0", "1e400", "-0", "0.10", "[1 ,2]", "\"\\u0041\"", "{ \"model\":1}"]), 6),
        stream in any::<bool>(),
        place in 0usize..6,
        target in "\\PC{1,8}",
    ) {
        // API-3
        let mut members: Vec<String> = keys.iter().zip(&numbers).map(|(key, value)| format!(" \"{key}\" :{value}")).collect();
        let at = place.min(members.len());
        members.insert(at, "\"model\":\"m\"".into());
        members.push(r#""messages":[{"content":"x"}]"#.into());
        members.push(format!("\"stream\":{stream}"));
        let body = format!("{{{}}}", members.join(","));
        let request = parse(body.clone()).unwrap();
        let after = request.for_target(&target);
        let pairs = |text: &[u8]| -> Vec<(String, String)> {
            struct Pairs(Vec<(String, String)>);
            impl<'de> serde::Deserialize<'de> for Pairs {
                fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                    struct V;
                    impl<'de> serde::de::Visitor<'de> for V {
                        type Value = Pairs;
                        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str("object") }
                        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                            let mut pairs = Vec::new();
                            while let Some((key, value)) = map.next_entry::<String, Box<RawValue>>()? {
                                pairs.push((key, value.get().to_owned()));
                            }
                            Ok(Pairs(pairs))
                        }
                    }
                    d.deserialize_map(V)
                }
            }
            serde_json::from_slice::<Pairs>(text).unwrap().0
        };
        let mut want = pairs(body.as_bytes());
        for (key, value) in &mut want {
            if key == "model" {
                *value = quoted(&target);
            }
        }
        if stream {
            want.push(("stream_options".into(), ASK.into()));
        }
        prop_assert_eq!(pairs(&after), want);
    }

    #[test]
    fn no_bytes_make_it_panic(body in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = parse(body);
    }
}
