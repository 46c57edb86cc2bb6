use super::*;

fn usage_of(text: &str) -> Option<[Option<u64>; 4]> {
    let usage = read(text.as_bytes()).unwrap().usage?;
    Some([usage.input_tokens, usage.output_tokens, usage.reasoning_tokens, usage.cached_input_tokens])
}

#[test]
fn counts_are_read_in_every_form_and_never_made_up() {
    // EXE-7, ADP-3
    for (what, text, want) in [
        (
            "OpenAI",
            r#"{"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,
                "prompt_tokens_details":{"cached_tokens":1},"completion_tokens_details":{"reasoning_tokens":1}}}"#,
            Some([Some(3), Some(2), Some(1), Some(1)]),
        ),
        ("SGLang", r#"{"usage":{"completion_tokens":2,"reasoning_tokens":1}}"#, Some([None, Some(2), Some(1), None])),
        (
            "DeepSeek",
            r#"{"usage":{"prompt_tokens":3,"prompt_cache_hit_tokens":2,"prompt_cache_miss_tokens":1}}"#,
            Some([Some(3), None, None, Some(2)]),
        ),
        (
            "details win over the older key, in either order",
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":7},"prompt_cache_hit_tokens":2,
                "reasoning_tokens":9,"completion_tokens_details":{"reasoning_tokens":4}}}"#,
            Some([None, None, Some(4), Some(7)]),
        ),
        (
            "llama.cpp without usage",
            r#"{"timings":{"cache_n":2,"prompt_n":3,"predicted_n":4}}"#,
            Some([Some(5), Some(4), None, Some(2)]),
        ),
        (
            "usage wins over timings",
            r#"{"timings":{"predicted_n":9},"usage":{"completion_tokens":2}}"#,
            Some([None, Some(2), None, None]),
        ),
        (
            "Responses",
            r#"{"type":"response.completed","response":{"usage":{"input_tokens":3,"output_tokens":2,
                "input_tokens_details":{"cached_tokens":1}}}}"#,
            Some([Some(3), Some(2), None, Some(1)]),
        ),
        (
            "nulls",
            r#"{"usage":{"prompt_tokens":null,"completion_tokens":2,"prompt_tokens_details":null}}"#,
            Some([None, Some(2), None, None]),
        ),
        ("no counts", r#"{"usage":{}}"#, None),
        ("null", r#"{"usage":null}"#, None),
        ("wrong types", r#"{"usage":{"prompt_tokens":"3","completion_tokens":-2,"reasoning_tokens":1.5}}"#, None),
        ("zero is a count", r#"{"usage":{"completion_tokens":0}}"#, Some([None, Some(0), None, None])),
    ] {
        assert_eq!(usage_of(text), want, "{what}");
    }
}

#[test]
fn content_is_anything_the_model_said() {
    // EXE-12, API-10
    for (delta, want) in [
        (r#"{"content":"x"}"#, true),
        (r#"{"content":" "}"#, true),
        (r#"{"reasoning_content":"x"}"#, true),
        (r#"{"reasoning":"x"}"#, true),
        (r#"{"reasoning_content":"x","reasoning":null}"#, true),
        (r#"{"refusal":"x"}"#, true),
        (r#"{"tool_calls":[{"index":0}]}"#, true),
        (r#"{"function_call":{"name":"f"}}"#, true),
        (r#"{"content":[{"type":"text"}]}"#, true),
        (r#"{"audio":{"data":"x"}}"#, true),
        (r#"{"role":"assistant","content":""}"#, false),
        (r#"{"content":null,"reasoning":"","refusal":null,"tool_calls":[],"function_call":null,"audio":null}"#, false),
        (r#"{"content":[]}"#, false),
        ("{}", false),
        ("null", false),
        ("7", false),
    ] {
        let text = format!(r#"{{"choices":[{{"index":0,"delta":{delta}}}]}}"#);
        assert_eq!(read(text.as_bytes()).unwrap().choices[0].has_content(), want, "{delta}");
    }
}

#[test]
fn errors_are_recognised_in_every_shape_and_nothing_else_is_one() {
    // API-7, ADP-3
    for (text, want) in [
        (r#"{"error":{"message":"x"}}"#, true),
        (r#"{"error":"x"}"#, true),
        (r#"{"error":true}"#, true),
        (r#"{"error":500}"#, true),
        (r#"{"object":"error","message":"x"}"#, true),
        (r#"{"type":"error","message":"x"}"#, true),
        (r#"{"type":"response.failed"}"#, true),
        (r#"{"choices":[],"error":{"code":502}}"#, true),
        (r#"{"error":null}"#, false),
        (r#"{"error":{}}"#, false),
        (r#"{"error":""}"#, false),
        (r#"{"error":false,"object":"chat.completion.chunk"}"#, false),
        (r#"{"choices":[{"delta":{"content":"\"error\":{}"}}]}"#, false),
    ] {
        assert_eq!(read(text.as_bytes()).unwrap().error, want, "{text}");
    }
}

#[test]
fn unexpected_shapes_count_as_absent_and_bad_json_is_an_error() {
    for text in [
        r#"{"choices":"x"}"#,
        r#"{"choices":{"index":0}}"#,
        r#"{"choices":null}"#,
        r#"{"usage":[1]}"#,
        r#"{"prompt_progress":1}"#,
        "[]",
        "1",
    ] {
        let chunk = read(text.as_bytes()).unwrap();
        assert!(
            chunk.choices.is_empty() && chunk.usage.is_none() && !chunk.error && chunk.processed.is_none(),
            "{text}"
        );
    }
    let odd =
        read(br#"{"choices":[{"index":"0","delta":{"content":1,"tool_calls":{"a":1}},"finish_reason":7},3]}"#).unwrap();
    assert_eq!(odd.choices.len(), 2);
    assert!(!odd.choices[0].has_content() && odd.choices[0].finish.is_none());
    for text in ["", "{", r#"{"choices":[}"#, r#"{"choices":[]} x"#, "nope"] {
        assert!(read(text.as_bytes()).is_err(), "{text}");
    }
    let many = format!(r#"{{"choices":[{}]}}"#, vec!["{}"; 129].join(","));
    assert!(read(many.as_bytes()).is_err(), "bounded");
}

#[test]
fn an_empty_finish_reason_is_none() {
    // ADP-3
    for (finish, want) in [(r#""stop""#, true), (r#""""#, false), ("null", false)] {
        let text = format!(r#"{{"choices":[{{"index":0,"delta":{{}},"finish_reason":{finish}}}]}}"#);
        assert_eq!(read(text.as_bytes()).unwrap().choices[0].finish.is_some(), want, "{finish}");
    }
}
