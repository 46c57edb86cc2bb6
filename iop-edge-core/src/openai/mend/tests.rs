use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn events(mender: &mut Mender, text: &str) -> (String, Edits) {
    let mut edits = Edits::new();
    let out = mender.events(Bytes::copy_from_slice(text.as_bytes()), &mut edits);
    (String::from_utf8(out.to_vec()).unwrap(), edits)
}

fn choice(inner: &str) -> String {
    format!("data: {{\"id\":1,\"choices\":[{{\"index\":0,{inner}}}],\"x\":0.10}}\n\n")
}

fn calls(pieces: &str) -> String {
    choice(&format!("\"delta\":{{\"tool_calls\":[{pieces}]}}"))
}

#[test]
fn what_sdks_read_keeps_its_bytes_unread() {
    // API-10
    for inner in [
        r#""delta":{"content":"a"},"finish_reason":null"#,
        r#""delta":{"content":"\"tool_calls\":[ \"reasoning\":\"x\" \"finish_reason\":\"eos\""}"#,
        r#""delta":{},"finish_reason":"length""#,
        r#""delta":{"reasoning_content":null,"reasoning":"","tool_calls":null}"#,
        r#""delta":{"content":"tool_calls"},"finish_reason" : "tool_calls""#,
    ] {
        let mut mender = Mender::new(Form::Chat);
        let text = Bytes::from(choice(inner));
        assert!(!mender.is_suspicious(&text), "{inner}");
        let mut edits = Edits::new();
        assert_eq!(mender.events(text.clone(), &mut edits).as_ptr(), text.as_ptr());
        assert_eq!(edits, Edits::new());
    }
    for (form, inner) in
        [(Form::Completions, r#""text":"a","delta":null"#), (Form::Other, r#""delta":null,"finish_reason":"""#)]
    {
        assert!(events(&mut Mender::new(form), &choice(inner)).1 == Edits::new(), "{inner}");
    }
}

#[test]
fn finish_reasons_are_openai_s_or_null() {
    // API-10 e; surfaces 4: rows 19, 22
    for (said, want) in [
        (r#""""#, "null"),
        (r#""eos""#, r#""stop""#),
        (r#""end_turn""#, r#""stop""#),
        ("7", "null"),
        (r#"{"a":1}"#, "null"),
    ] {
        let with = |finish: &str| choice(&format!("\"delta\":{{}},\"finish_reason\":{finish}"));
        let (out, edits) = events(&mut Mender::new(Form::Chat), &with(said));
        assert_eq!((out, edits.count(Edit::Finish)), (with(want), 1), "{said}");
        let with = |finish: &str| choice(&format!("\"text\":\"\",\"finish_reason\" : {finish}"));
        assert_eq!(events(&mut Mender::new(Form::Completions), &with(said)).0, with(want), "{said}");
    }
    // Of a choice with calls it is the calls, of another one it is not.
    let mut mender = Mender::new(Form::Chat);
    events(&mut mender, &calls(r#"{"index":0,"id":"a","function":{"name":"f","arguments":""}}"#));
    let end = |at: u32, finish: &str| {
        format!("data: {{\"choices\":[{{\"delta\":{{}},\"index\":{at},\"finish_reason\":\"{finish}\"}}]}}\n\n")
    };
    for (at, said, want) in
        [(0, "stop", "tool_calls"), (0, "eos", "tool_calls"), (1, "stop", "stop"), (0, "length", "length")]
    {
        assert_eq!(events(&mut mender, &end(at, said)).0, end(at, want));
    }
}

#[test]
fn a_choice_has_a_delta() {
    // API-10 e
    for (inner, want) in [
        (r#""finish_reason":"stop""#, r#""delta":{},"index":0,"finish_reason":"stop""#),
        (r#""delta":null,"finish_reason":"stop""#, r#""index":0,"delta":{},"finish_reason":"stop""#),
        (r#""message":{"content":"a"}"#, r#""delta":{"content":"a"},"index":0,"message":{"content":"a"}"#),
    ] {
        let (out, edits) = events(&mut Mender::new(Form::Chat), &choice(inner));
        assert_eq!(out, format!("data: {{\"id\":1,\"choices\":[{{{want}}}],\"x\":0.10}}\n\n"));
        assert_eq!(edits.count(Edit::Delta), 1);
    }
    let bare = "data: {\"choices\":[{}]}\r\n\r\n";
    assert_eq!(events(&mut Mender::new(Form::Chat), bare).0, "data: {\"choices\":[{\"delta\":{}}]}\r\n\r\n");
    let usage = "data: {\"choices\": [ ],\"usage\":{}}\n\n";
    assert_eq!(events(&mut Mender::new(Form::Chat), usage).0, usage, "no choice, no delta");
}

#[test]
fn every_piece_of_a_call_says_which_one() {
    // API-10 e; surfaces 4: rows 20-22
    let cases: [(&str, &[(&str, &str)]); 6] = [
        (
            "no index",
            &[
                (r#"{"id":"a","function":{"name":"f"}}"#, r#"{"index":0,"id":"a","function":{"name":"f"}}"#),
                (r#"{"function":{"arguments":"{"}}"#, r#"{"index":0,"function":{"arguments":"{"}}"#),
                (r#"{"id":"b","function":{"name":"g"}}"#, r#"{"index":1,"id":"b","function":{"name":"g"}}"#),
            ],
        ),
        (
            "one index for all",
            &[
                (
                    r#"{"index":0,"id":"a","function":{"name":"f"}},{"index":0,"id":"b","function":{"name":"g"}}"#,
                    r#"{"index":0,"id":"a","function":{"name":"f"}},{"index":1,"id":"b","function":{"name":"g"}}"#,
                ),
                (r#"{"index":0,"function":{"arguments":"x"}}"#, r#"{"index":1,"function":{"arguments":"x"}}"#),
            ],
        ),
        (
            "a whole object",
            &[(
                r#"{"index":0,"id":"a","function":{"name":"f","arguments":{"x": "\""}}}"#,
                r#"{"index":0,"id":"a","function":{"name":"f","arguments":"{\"x\": \"\\\"\"}"}}"#,
            )],
        ),
        (
            "an id that changes",
            &[
                (r#"{"index":0,"id":"a","function":{"name":"f"}}"#, r#"{"index":0,"id":"a","function":{"name":"f"}}"#),
                (r#"{"index":0,"id":"b","function":{}}"#, r#"{"index":0,"id":"a","function":{}}"#),
                (r#"{"index":0,"id":"a","function":{}}"#, r#"{"index":0,"id":"a","function":{}}"#),
            ],
        ),
        (
            "no id, and indexes from one",
            &[(r#"{"index":1,"function":{"name":"f"}}"#, r#"{"id":"call_iop_1","index":0,"function":{"name":"f"}}"#)],
        ),
        (
            "as it should be",
            &[
                (r#"{"index":0,"id":"a","function":{"name":"f"}}"#, r#"{"index":0,"id":"a","function":{"name":"f"}}"#),
                (r#"{"index":1,"id":"b","function":{"name":"f"}}"#, r#"{"index":1,"id":"b","function":{"name":"f"}}"#),
                (r#"{"index":0,"function":{"arguments":"{}"}}"#, r#"{"index":0,"function":{"arguments":"{}"}}"#),
            ],
        ),
    ];
    for (name, pieces) in cases {
        let mut mender = Mender::new(Form::Chat);
        for (said, want) in pieces {
            let (out, edits) = events(&mut mender, &calls(said));
            assert_eq!(out, calls(want), "{name}");
            assert_eq!(edits == Edits::new(), said == want, "{name}: each is counted");
        }
    }
}

#[test]
fn reasoning_has_both_names() {
    // API-10 f; surfaces 4: row 26
    for (said, want) in [
        (r#"{"reasoning":"h\nm"}"#, r#"{"reasoning":"h\nm","reasoning_content":"h\nm"}"#),
        (
            r#"{"reasoning_content":"hm","content":null}"#,
            r#"{"reasoning_content":"hm","reasoning":"hm","content":null}"#,
        ),
        (r#"{"reasoning_content":null,"reasoning":"hm"}"#, r#"{"reasoning_content":"hm","reasoning":"hm"}"#),
        (r#"{"reasoning_content":"a","reasoning":"b"}"#, r#"{"reasoning_content":"a","reasoning":"b"}"#),
    ] {
        let with = |delta: &str| choice(&format!("\"delta\":{delta}"));
        let (out, edits) = events(&mut Mender::new(Form::Chat), &with(said));
        assert_eq!((out, edits.count(Edit::Reasoning)), (with(want), u32::from(said != want)));
    }
}

#[test]
fn events_that_came_together_are_mended_one_by_one() {
    // API-10: the others keep every byte, comments and multi-line data among them
    let fine = ": ping\r\n\r\ndata: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    let odd = "id: 7\rdata: {\"choices\":\rdata: [{\"delta\":{},\"finish_reason\":\"\"}]}\r\r";
    let line = "id: 7\ndata:{\"choices\":[{\"delta\":{},\"finish_reason\":\"\"}]}\r\n\r\n";
    let (out, edits) = events(&mut Mender::new(Form::Chat), &[fine, odd, line, fine].concat());
    let want = [
        fine,
        "data: {\"choices\":\ndata: [{\"delta\":{},\"finish_reason\":null}]}\n\n",
        &line.replace("\"\"", "null"),
        fine,
    ];
    assert_eq!((out, edits.count(Edit::Finish)), (want.concat(), 2));
}

#[test]
fn a_whole_answer_has_what_clients_take_for_granted() {
    // API-10, API-9: refusal and logprobs, which OpenAI's document requires and most servers leave out
    let mend = |text: &str, form| {
        let mut edits = Edits::new();
        let out = Mender::new(form).document(Bytes::copy_from_slice(text.as_bytes()), &mut edits);
        (String::from_utf8(out.to_vec()).unwrap(), edits)
    };
    let said =
        r#"{"n":1e400,"choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}]}"#;
    let want = r#"{"n":1e400,"choices":[{"logprobs":null,"index":0,"message":{"refusal":null,"role":"assistant","content":"a"},"finish_reason":"stop"}]}"#;
    let (out, edits) = mend(said, Form::Chat);
    assert_eq!((out.as_str(), edits.count(Edit::Members)), (want, 2));
    assert_eq!(mend(want, Form::Chat), (want.to_owned(), Edits::new()));
    let said = want.replace("\"logprobs\":null", "\"logprobs\":{\"content\":[]}");
    let whole = said.replace("{\"content\":[]", "{\"refusal\":null,\"content\":[]");
    assert_eq!(mend(&said, Form::Chat).0, whole);

    let said = r#"{"choices":[{"message":{"reasoning":"hm","tool_calls":[{"function":{"name":"f","arguments":{"a":1}}},{"id":"b","type":"function","function":{"name":"g","arguments":"{}"}}]},"finish_reason":"stop"}]}"#;
    let answer: Value = serde_json::from_str(&mend(said, Form::Chat).0).unwrap();
    assert_eq!(
        answer["choices"][0],
        json!({"logprobs":null,"finish_reason":"tool_calls","message":{"content":null,"refusal":null,"reasoning":"hm","reasoning_content":"hm",
            "tool_calls":[{"id":"call_iop_1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}},
                {"id":"b","type":"function","function":{"name":"g","arguments":"{}"}}]}})
    );
    // vLLM's whole answers have nulls where OpenAI's have an object, a list, or nothing.
    let nulls = want.replace(",\"content\"", ",\"function_call\" : null , \"annotations\":null,\"content\"");
    let nulls = nulls.replace("]}", "],\"usage\":{\"prompt_tokens\":1,\"completion_tokens_details\":null}}");
    let whole = want.replace(",\"content\"", " , \"annotations\":[],\"content\"");
    let whole = whole.replace("}]}", "}],\"usage\":{\"prompt_tokens\":1}}");
    assert_eq!(mend(&nulls, Form::Chat).0, whole);
    let completion = r#"{"choices":[{"text":"a","finish_reason":"eos"},{}]}"#;
    let want = r#"{"choices":[{"logprobs":null,"text":"a","finish_reason":"stop"},{"logprobs":null}]}"#;
    assert_eq!(mend(completion, Form::Completions).0, want);
    let list = r#"{"data":[],"choices":[{}]}"#;
    assert_eq!(mend(list, Form::Other).0, list);
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        Just(json!("")),
        Just(json!("stop")),
        Just(json!("eos")),
        Just(json!("a")),
        Just(json!(0)),
        Just(json!(7)),
    ];
    let keys = prop::sample::select(vec![
        "index",
        "id",
        "type",
        "function",
        "name",
        "arguments",
        "tool_calls",
        "reasoning",
        "reasoning_content",
        "content",
        "delta",
        "message",
        "finish_reason",
        "logprobs",
    ]);
    leaf.prop_recursive(4, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(keys.clone().prop_map(str::to_owned), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn whatever_the_shape_the_result_is_json_and_needs_no_second_mend(choices in prop::collection::vec(json_value(), 0..4)) {
        // API-10, API-11: no panic, nothing invalid, and idempotent but for the state of calls
        let text = json!({ "choices": choices }).to_string();
        for whole in [true, false] {
            let mend = |text: &str| {
                let mut edits = Edits::new();
                let mut mender = Mender::new(Form::Chat);
                let out = if whole {
                    mender.document(Bytes::copy_from_slice(text.as_bytes()), &mut edits)
                } else {
                    mender.events(Bytes::from(format!("data: {text}\n\n")), &mut edits)
                };
                String::from_utf8(out.to_vec()).unwrap().trim_start_matches("data: ").trim_end().to_owned()
            };
            let once = mend(&text);
            prop_assert!(serde_json::from_str::<Value>(&once).is_ok(), "{} became {}", text, once);
            prop_assert_eq!(mend(&once), once);
        }
    }

    #[test]
    fn no_bytes_make_it_panic(parts in prop::collection::vec(prop::sample::select(vec![
        "data: ", "{\"choices\":[", "{\"delta\":", "{\"tool_calls\":[", "null", "\"finish_reason\":\"", "}", "]", "\n\n", "\r", "é", "\"reasoning\":\"x\"",
    ]), 0..16)) {
        let bytes = Bytes::from(parts.concat());
        Mender::new(Form::Chat).events(bytes.clone(), &mut Edits::new());
        Mender::new(Form::Chat).document(bytes, &mut Edits::new());
    }
}
