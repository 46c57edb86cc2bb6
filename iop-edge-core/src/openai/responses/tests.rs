use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::openai::errors::Dialect;

fn id() -> String {
    "resp_00".to_owned()
}

/// The chat that a request becomes.
fn chat(body: Value) -> Value {
    let (request, _) = read(body.to_string().into(), id()).unwrap();
    serde_json::from_slice(request.body()).unwrap()
}

/// Param and code of a refusal, which is a 400.
fn refusal(body: Value) -> (Value, Value) {
    let error = read(body.to_string().into(), id()).unwrap_err();
    assert_eq!(error.status(), 400, "{body}");
    let object: Value = serde_json::from_slice(&error.to_json(Dialect::OpenAi)).unwrap();
    (object["error"]["param"].clone(), object["error"]["code"].clone())
}

#[test]
fn the_simplest_request_is_the_simplest_chat() {
    // API-8
    assert_eq!(
        chat(json!({"model":"m","input":"hi","store":true})),
        json!({"model":"m","messages":[{"role":"user","content":"hi"}]})
    );
}

#[test]
fn what_both_apis_have_goes_over_under_the_name_of_the_chat() {
    // API-8
    let schema = json!({"z":1,"a":{"type":"string"}});
    let asked = json!({
        "model":"m","input":"hi","instructions":"be brief","stream":true,"temperature":0.1,"top_p":0.5,"seed":7,"top_k":40,
        "max_output_tokens":16,"reasoning":{"effort":"low","summary":"auto"},"parallel_tool_calls":false,
        "text":{"verbosity":"low","format":{"type":"json_schema","name":"n","schema":schema,"strict":true}},
        "tools":[{"type":"function","name":"f","description":null,"parameters":schema,"strict":null}],
        "tool_choice":{"type":"function","name":"f"},"metadata":{"k":"v"},"include":["reasoning.encrypted_content"],
        "truncation":"auto","previous_response_id":null,"background":false,"n":5,"messages":["smuggled"],"max_tokens":1,
    });
    assert_eq!(
        chat(asked),
        json!({
            "model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}],"stream":true,
            "max_tokens":16,"reasoning_effort":"low","parallel_tool_calls":false,"verbosity":"low",
            "response_format":{"type":"json_schema","json_schema":{"name":"n","schema":schema,"strict":true}},
            "tools":[{"type":"function","function":{"name":"f","parameters":schema}}],
            "tool_choice":{"type":"function","function":{"name":"f"}},"temperature":0.1,"top_p":0.5,"seed":7,"top_k":40,
        })
    );
}

#[test]
fn schemas_and_numbers_keep_their_text() {
    // API-3
    let body = r#"{"model":"m","input":"x","top_k":1e2,"tools":[{"type":"function","name":"f","parameters":{"b":1.0,"a":90071992547409931234}}]}"#;
    let (request, _) = read(body.into(), id()).unwrap();
    let text = std::str::from_utf8(request.body()).unwrap();
    assert!(text.contains(r#"{"b":1.0,"a":90071992547409931234}"#) && text.contains(r#""top_k":1e2"#), "{text}");
}

#[test]
fn a_conversation_is_put_into_messages() {
    // API-8
    let image = "data:image/png;base64,AA==";
    let input = json!([
        {"role":"developer","content":"rules"},
        {"type":"message","role":"user","content":[{"type":"input_text","text":"look"},
            {"type":"input_image","image_url":image,"detail":"low"}]},
        {"type":"reasoning","id":"rs_1","summary":[],"content":[{"type":"reasoning_text","text":"hm"}]},
        {"type":"message","id":"msg_1","status":"completed","role":"assistant",
            "content":[{"type":"output_text","text":"I ","annotations":[]},{"type":"output_text","text":"call"}]},
        {"type":"function_call","id":"fc_1","call_id":"c1","name":"f","arguments":"{}","status":"completed"},
        {"type":"function_call","call_id":"c2","name":"g","arguments":"{\"x\":1}"},
        {"type":"function_call_output","call_id":"c1","output":"18C"},
        {"type":"function_call_output","call_id":"c2","output":[{"type":"input_text","text":"ok"}]},
        {"type":"message","role":"user","content":[{"type":"input_text","text":"so?"}]},
    ]);
    let call = |id: &str, name: &str, arguments: &str| json!({"id":id,"type":"function","function":{"name":name,"arguments":arguments}});
    assert_eq!(
        chat(json!({"model":"m","input":input}))["messages"],
        json!([
            {"role":"system","content":"rules"},
            {"role":"user","content":[{"type":"text","text":"look"},
                {"type":"image_url","image_url":{"url":image,"detail":"low"}}]},
            {"role":"assistant","content":"I call","tool_calls":[call("c1","f","{}"),call("c2","g","{\"x\":1}")]},
            {"role":"tool","tool_call_id":"c1","content":"18C"},
            {"role":"tool","tool_call_id":"c2","content":"ok"},
            {"role":"user","content":"so?"},
        ])
    );
}

#[test]
fn only_allowed_tools_are_sent() {
    // API-8
    let tool = |name: &str| json!({"type":"function","name":name});
    let body = json!({"model":"m","input":"x","tools":[tool("f"),tool("g")],
        "tool_choice":{"type":"allowed_tools","mode":"required","tools":[{"type":"function","name":"g"}]}});
    let chat = chat(body);
    assert_eq!(
        (&chat["tools"], &chat["tool_choice"]),
        (&json!([{"type":"function","function":{"name":"g"}}]), &json!("required"))
    );
    let without =
        self::chat(json!({"model":"m","input":"x","tools":[],"tool_choice":"auto","parallel_tool_calls":true}));
    assert!(
        without.get("tools").is_none() && without.get("tool_choice").is_none(),
        "servers refuse a choice of nothing"
    );
}

#[test]
fn state_and_hosted_tools_are_refused_by_name() {
    // API-8
    let with = |name: &str, value: Value| {
        let mut body = json!({"model":"m","input":"x"});
        body[name] = value;
        body
    };
    let gone = json!("previous_response_not_found");
    assert_eq!(refusal(with("previous_response_id", json!("resp_1"))), (json!("previous_response_id"), gone.clone()));
    assert_eq!(refusal(with("conversation", json!({"id":"c"}))), (json!("conversation"), gone));
    for (name, value) in [
        ("background", json!(true)),
        ("background", json!("no")),
        ("store", json!(1)),
        ("prompt", json!({"id":"p"})),
        ("tools", json!([{"type":"web_search"}])),
        ("tools", json!([{"type":"mcp","name":"x"}])),
        ("tools", json!([{"type":"function"}])),
        ("tools", json!({})),
        ("tool_choice", json!({"type":"file_search"})),
        ("tool_choice", json!("maybe")),
        ("text", json!({"format":{"type":"grammar"}})),
        ("text", json!("x")),
        ("max_output_tokens", json!(0)),
        ("max_output_tokens", json!(-1)),
        ("temperature", json!("hot")),
        ("metadata", json!([])),
        ("instructions", json!([])),
        ("top_logprobs", json!(3)),
        ("reasoning", json!(1)),
        ("input", json!([])),
        ("input", json!("")),
        ("input", json!({})),
        ("input", json!([1])),
        ("input", json!([{"type":"item_reference","id":"x"}])),
        ("input", json!([{"type":"web_search_call"}])),
        ("input", json!([{"role":"tool","content":"x"}])),
        ("input", json!([{"role":"user"}])),
        ("input", json!([{"role":"user","content":7}])),
        ("input", json!([{"role":"user","content":[{"type":"input_image","file_id":"f"}]}])),
        ("input", json!([{"role":"user","content":[{"type":"input_file","file_url":"http://x"}]}])),
        ("input", json!([{"role":"user","content":[{"type":"video"}]}])),
        ("input", json!([{"type":"function_call","name":"f"}])),
        ("input", json!([{"type":"function_call_output","call_id":"c"}])),
    ] {
        assert_eq!(refusal(with(name, value)), (json!(name), Value::Null), "{name}");
    }
    for body in [
        r#"{"model":"m"}"#,
        r#"{"model":"m","input":"x","MODEL":"y"}"#,
        r#"{"model":"m","input":"x","a":1,"\u0061":2}"#,
    ] {
        assert_eq!(read(body.into(), id()).unwrap_err().status(), 400, "{body}");
    }
}

#[test]
fn a_request_of_very_many_members_is_refused() {
    // API-15, SEC-3
    let many: String = (0..300).map(|n| format!(",\"k{n}\":0")).collect();
    let body = format!(r#"{{"model":"m","input":"x"{many}}}"#);
    assert_eq!(read(body.into(), id()).unwrap_err().status(), 400);
}

proptest! {
    #[test]
    fn no_json_makes_it_panic_or_say_anything_but_400(input in any_json(), tools in any_json(), choice in any_json(), text in any_json()) {
        // API-3, API-8
        let body = json!({"model":"m","input":input,"tools":tools,"tool_choice":choice,"text":text});
        match read(body.to_string().into(), id()) {
            Ok((request, _)) => prop_assert!(!request.body().is_empty()),
            Err(error) => prop_assert_eq!(error.status(), 400),
        }
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let words = ["message", "user", "text", "input_text", "function", "function_call", "auto", "json_schema", "x", ""];
    let keys = ["type", "role", "content", "name", "text", "format", "arguments", "call_id", "output", "tools", "mode"];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop::sample::select(words.to_vec()).prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map(prop::sample::select(keys.to_vec()).prop_map(String::from), inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}
