//! ADP-3 for Ollama: what it is sent.

use iop_execution::failure::FailureCode;

use super::*;

fn said(body: &Value, thinks: Option<bool>) -> Result<Value, ProviderError> {
    let body = super::super::request::chat(&input(body), &target("m:7b"), thinks)?;
    Ok(serde_json::from_slice(&body).unwrap())
}

fn user() -> Value {
    json!([{ "role": "user", "content": "hi" }])
}

#[test]
fn a_conversation_with_tools_and_images_is_said_in_ollamas_words() {
    // ADP-3, EXE-16
    let said = said(
        &json!({
            "model": "public",
            "messages": [
                { "role": "developer", "content": "be brief" },
                { "role": "user", "content": [
                    { "type": "text", "text": "what " }, { "type": "text", "text": "is it" },
                    { "type": "image_url", "image_url": { "url": "data:image/png;base64,aGk=" } },
                ] },
                { "role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
                    { "id": "c1", "type": "function", "function": { "name": "f", "arguments": "{\"a\":1}" } },
                    { "id": "c2", "type": "function", "function": { "name": "g", "arguments": "" } },
                ] },
                { "role": "tool", "tool_call_id": "c2", "content": "42" },
                { "role": "function", "name": "old", "content": "43" },
            ],
            "tools": [{ "type": "function", "function": { "name": "f", "parameters": {} } }],
            "tool_choice": "auto",
            "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 4, "stop": ["x"], "presence_penalty": 1, "top_k": 20,
            "repetition_penalty": 1.1, "keep_alive": -1, "num_ctx": 9, "options": { "num_ctx": 9 }, "user": "u", "store": true,
        }),
        None,
    )
    .unwrap();
    let want = json!({
        "model": "m:7b", "stream": true, "truncate": false, "shift": false,
        "messages": [
            { "role": "system", "content": "be brief" },
            { "role": "user", "content": "what is it", "images": ["aGk="] },
            { "role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
                { "id": "c1", "function": { "name": "f", "arguments": { "a": 1 } } },
                { "id": "c2", "function": { "name": "g", "arguments": {} } },
            ] },
            { "role": "tool", "content": "42", "tool_name": "g", "tool_call_id": "c2" },
            { "role": "tool", "content": "43", "tool_name": "old" },
        ],
        "tools": [{ "type": "function", "function": { "name": "f", "parameters": {} } }],
        "options": {
            "num_predict": 7, "temperature": 0.5, "top_p": 0.9, "seed": 4, "stop": ["x"], "presence_penalty": 1, "top_k": 20,
            "repeat_penalty": 1.1,
        },
    });
    assert_eq!(said, want);
}

#[test]
fn effort_is_said_where_the_model_may_think() {
    // ADP-3
    for (ask, thinks, want) in [
        (json!({}), None, None),
        (json!({ "reasoning_effort": "none" }), None, Some(json!(false))),
        (json!({ "reasoning_effort": "minimal" }), None, Some(json!("low"))),
        (json!({ "reasoning_effort": "high" }), Some(true), Some(json!("high"))),
        (json!({ "reasoning_effort": "high" }), Some(false), None),
        (json!({ "reasoning": { "effort": "medium" } }), None, Some(json!("medium"))),
        (json!({ "think": true }), None, Some(json!(true))),
    ] {
        let mut body = ask.clone();
        body["messages"] = user();
        assert_eq!(said(&body, thinks).unwrap().get("think"), want.as_ref(), "{ask} {thinks:?}");
    }
}

#[test]
fn formats_and_tool_choices_become_what_ollama_has() {
    // ADP-3
    let tools = json!([{ "type": "function", "function": { "name": "f" } }, { "type": "function", "function": { "name": "g" } }]);
    let schema = json!({ "type": "object" });
    for (ask, key, want) in [
        (json!({ "response_format": { "type": "text" } }), "format", None),
        (json!({ "response_format": { "type": "json_object" } }), "format", Some(json!("json"))),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": schema } } }),
            "format",
            Some(schema.clone()),
        ),
        (json!({ "tools": tools, "tool_choice": "none" }), "tools", None),
        (json!({ "tools": tools, "tool_choice": "required" }), "tools", Some(tools.clone())),
        (
            json!({ "tools": tools, "tool_choice": { "type": "function", "function": { "name": "g" } } }),
            "tools",
            Some(json!([tools[1]])),
        ),
    ] {
        let mut body = ask.clone();
        body["messages"] = user();
        assert_eq!(said(&body, None).unwrap().get(key), want.as_ref(), "{ask}");
    }
}

#[test]
fn what_it_can_not_say_is_refused_and_never_left_out() {
    // ADP-3
    let part = |part: Value| json!([{ "role": "user", "content": [part] }]);
    for body in [
        json!({ "messages": [] }),
        json!({ "messages": user(), "n": 2 }),
        json!({ "messages": user(), "reasoning_effort": "SENTINEL" }),
        json!({ "messages": user(), "response_format": { "type": "SENTINEL" } }),
        json!({ "messages": user(), "response_format": { "type": "json_schema" } }),
        json!({ "messages": user(), "tools": [], "tool_choice": { "type": "function", "function": { "name": "f" } } }),
        json!({ "messages": part(json!({ "type": "image_url", "image_url": { "url": "https://SENTINEL/a.png" } })) }),
        json!({ "messages": part(json!({ "type": "input_audio", "input_audio": { "data": "SENTINEL" } })) }),
        json!({ "messages": [{ "role": "user", "content": 7 }] }),
        json!({ "messages": [{ "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": "[SENTINEL" } }] }] }),
    ] {
        let error = said(&body, None).unwrap_err();
        assert_eq!(error.failure().code, FailureCode::InvalidRequest, "{body}");
        assert!(!format!("{error} {error:?}").contains("SENTINEL"));
    }
}

#[tokio::test]
async fn one_run_is_one_request_with_the_runs_id_and_no_other_header_of_a_client() {
    // NOD-10, SEC-1
    let backend = ScriptedBackend::builder()
        .route("POST", "/api/chat", lines().write(say("a")).write(done("stop")))
        .start()
        .await
        .unwrap();
    collect(run(&adapter(&backend), hello())).await;
    let received = backend.received();
    assert_eq!(received.len(), 1);
    assert_eq!((received[0].method.as_str(), received[0].path.as_str()), ("POST", "/api/chat"));
    assert!(received[0].header("x-request-id").is_some() && received[0].header("authorization").is_none());
    let body: Value = serde_json::from_slice(&received[0].body).unwrap();
    assert_eq!((&body["model"], &body["stream"]), (&json!("m"), &json!(true)));
}
