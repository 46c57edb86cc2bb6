use proptest::prelude::*;

use super::*;

fn accepts(text: &[u8]) -> bool {
    let mut scan = Scanner::new(text);
    scan.skip().and_then(|()| scan.end()).is_ok()
}

/// serde_json's answer, the exact reference except that it refuses numbers no f64 holds.
fn reference(text: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok()
}

#[test]
fn exactly_json_is_accepted() {
    for text in [
        "",
        " ",
        "{",
        "}",
        "{}",
        "[]",
        "[1,]",
        "[,1]",
        "{\"a\":1,}",
        "{\"a\"}",
        "{a:1}",
        "{\"a\":1}{",
        "01",
        "-",
        "-0",
        "1.",
        ".5",
        "1e5",
        "1e",
        "1E+2",
        "1e-",
        "true",
        "tru",
        "nulll",
        "\"",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\u00e9\"",
        "\"\\",
        "\"a\nb\"",
        "[[[]]]",
        "[[[]]",
        "\u{feff}{}",
        "NaN",
        "[1 2]",
        "{\"a\" : [ 1 , 2 ] } ",
        "'a'",
        "{\"a\":1 \"b\":2}",
    ] {
        assert_eq!(accepts(text.as_bytes()), reference(text.as_bytes()), "{text:?}");
    }
}

#[test]
fn nesting_is_bounded() {
    for depth in [1, 126, 127, 128, 100_000] {
        let text = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(accepts(text.as_bytes()), depth <= MAX_DEPTH as usize, "{depth}");
    }
}

#[test]
fn escapes_and_keys_are_read_as_clients_read_them() {
    let text = br#"{"\u0061":"x\n\u00e9\ud83d\ude00","b":"\ud800"}"#;
    let mut found = Vec::new();
    Scanner::new(text)
        .object(|scan, key| {
            let value = scan.text()?.and_then(|value| value.get());
            found.push((key.to_owned(), value));
            Ok(())
        })
        .unwrap();
    assert_eq!(found[0], (b"a".to_vec(), Some("x\né😀".into())));
    assert_eq!(found[1], (b"b".to_vec(), None));
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        ".{0,8}".prop_map(Into::into),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::hash_map(".{0,4}", inner, 0..4).prop_map(|map| map.into_iter().collect()),
        ]
    })
}

proptest! {
    #[test]
    fn damaged_json_is_judged_as_serde_judges_it(
        value in json(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()
    ) {
        // API-11: differential
        let whole = value.to_string().into_bytes();
        prop_assert!(accepts(&whole));
        let mut damaged = whole.clone();
        let at = at.index(whole.len());
        if cut { damaged.truncate(at) } else { damaged[at] = byte & 0x7f }
        if std::str::from_utf8(&damaged).is_ok() {
            prop_assert_eq!(accepts(&damaged), reference(&damaged), "{:?}", String::from_utf8_lossy(&damaged));
        }
    }
}
