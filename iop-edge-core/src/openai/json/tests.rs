use proptest::prelude::*;
use serde::de::IgnoredAny;

use super::*;

#[derive(Default)]
struct Seen {
    members: Vec<(String, Range<usize>)>,
    strings: Vec<(String, usize)>,
    keys: Vec<String>,
}

impl Visitor for Seen {
    fn member(&mut self, key: &str) -> bool {
        self.keys.push(key.to_owned());
        key == "messages"
    }
    fn string(&mut self, key: &str, len: usize) {
        self.strings.push((key.to_owned(), len));
    }
    fn value(&mut self, key: &str, span: Range<usize>) {
        self.members.push((key.to_owned(), span));
    }
}

fn seen(text: &str) -> Result<Seen, JsonError> {
    let mut seen = Seen::default();
    scan(text, &mut seen).map(|()| seen)
}

#[test]
fn members_are_found_where_they_lie() {
    // API-3
    let text =
        r#" { "a" : 1.50e-3 , "messages":[{"content":"hé\u00e9\n","x":["no"]},{"content":[{"text":"ab"}]}],"z":{}} "#;
    let seen = seen(text).unwrap();
    let values: Vec<_> = seen.members.iter().map(|(key, span)| (key.as_str(), &text[span.clone()])).collect();
    assert_eq!(values[0], ("a", "1.50e-3"));
    assert_eq!(values[1].0, "messages");
    assert_eq!(values[2], ("z", "{}"));
    // h, two é of two bytes each, a newline
    assert_eq!(seen.strings, [("content".to_owned(), 6), ("text".to_owned(), 2)]);
}

#[test]
fn keys_are_compared_by_what_they_spell() {
    // API-3
    assert!(same_key("model", "model", false));
    assert!(same_key(r"mod\u0065l", "model", false));
    assert!(same_key(r"\u006d\u006f\u0064\u0065\u006c", "model", false));
    assert!(!same_key("Model", "model", false) && same_key("Model", "model", true));
    assert!(!same_key(r"model\u0000", "model", false));
}

#[test]
fn depth_is_bounded_exactly() {
    // API-3
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    assert!(seen(&nested(MAX_JSON_DEPTH as usize)).is_ok());
    assert_eq!(seen(&nested(MAX_JSON_DEPTH as usize + 1)).err().map(|e| e.problem), Some("nested too deeply"));
}

#[test]
fn problems_are_told_by_line_and_column() {
    // API-3
    let text = "{\"a\":1,\n  \"b\":x}";
    let error = seen(text).err().unwrap();
    assert_eq!(error.place(text.as_bytes()), (2, 7));
    assert_eq!(seen("").err().unwrap().place(b""), (1, 1));
}

/// JSON text, and text that is nearly JSON.
fn near_json() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"a\"",
        "\"model\"",
        "1",
        "-0",
        "01",
        "1.",
        ".5",
        "1e5",
        "-",
        "true",
        "null",
        "tru",
        " ",
        "\n",
        "\"\\u00e9\"",
        "\"\\ud800\"",
        "\"\\x\"",
        "\"é\"",
        "\"",
        "\\",
        "\u{1}",
    ]);
    prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        ".{0,6}".prop_map(|text: String| text.into()),
    ];
    leaf.prop_recursive(5, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
            prop::collection::vec((".{0,4}", inner), 0..6)
                .prop_map(|members| serde_json::Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]
    #[test]
    fn it_accepts_what_another_parser_accepts(text in near_json()) {
        // API-3
        prop_assert_eq!(seen(&text).is_ok(), serde_json::from_str::<IgnoredAny>(&text).is_ok(), "{}", text);
    }

    #[test]
    fn real_json_is_read_whole(value in json(), pretty in any::<bool>()) {
        let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.unwrap();
        let seen = seen(&text).unwrap();
        if let serde_json::Value::Object(members) = &value {
            prop_assert_eq!(seen.members.len(), members.len());
            for (key, span) in seen.members {
                let member: serde_json::Value = serde_json::from_str(&text[span]).unwrap();
                prop_assert_eq!(Some(&member), members.get(&decode(&key).unwrap()));
            }
        }
    }

    #[test]
    fn cutting_json_anywhere_is_an_error(value in json(), at in any::<prop::sample::Index>()) {
        let text = serde_json::to_string(&serde_json::json!({ "a": value })).unwrap();
        let mut end = at.index(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        prop_assert!(seen(&text[..end]).is_err());
    }
}
