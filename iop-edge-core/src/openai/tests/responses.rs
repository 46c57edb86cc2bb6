//! Responses over both wires, from the request to the last event.

use iop_execution::{FinishReason, ToolCallDelta, Usage};
use proptest::prelude::*;
use serde_json::json;

use super::*;

const WHOLE: &str = r#"{"model":"m","input":"hi","metadata":{"k":"v"},"store":true}"#;
const STREAMED: &str = r#"{"model":"m","input":"hi","metadata":{"k":"v"},"stream":true}"#;

/// A piece of an answer, told by either wire.
#[derive(Debug, Clone)]
enum Bit {
    Thought(&'static str),
    Text(&'static str),
    /// Index, id and name on the first piece, arguments.
    Call(u32, Option<(&'static str, &'static str)>, &'static str),
}

const COUNTS: Usage =
    Usage { input_tokens: Some(5), output_tokens: Some(7), reasoning_tokens: Some(2), cached_input_tokens: None };

fn run_of(bits: &[Bit], finish: FinishReason) -> Reply {
    let kinds = bits.iter().map(|bit| match bit.clone() {
        Bit::Thought(text) => RunEventKind::ReasoningDelta(text.into()),
        Bit::Text(text) => RunEventKind::Delta(text.into()),
        Bit::Call(index, first, arguments) => RunEventKind::ToolCallDelta(ToolCallDelta {
            index,
            id: first.map(|(id, _)| id.to_owned()),
            name: first.map(|(_, name)| name.to_owned()),
            arguments: arguments.to_owned(),
        }),
    });
    let kinds = [RunEventKind::Start].into_iter().chain(kinds).chain([RunEventKind::Complete(finish)]);
    let events: Vec<_> = (1..).zip(kinds).map(|(seq, kind)| RunEvent { seq, kind, usage: Some(COUNTS) }).collect();
    Reply::Run(Box::pin(stream::iter(events)))
}

fn chunk(delta: &Value, finish: Option<FinishReason>) -> String {
    let choice = json!({"index":0,"delta":delta,"finish_reason":finish.map(FinishReason::as_str)});
    format!("data: {}\n\n", json!({"id":"c","model":"org/target","choices":[choice]}))
}

fn delta(bit: &Bit) -> Value {
    match bit {
        Bit::Thought(text) => json!({ "reasoning": text }),
        Bit::Text(text) => json!({ "content": text }),
        Bit::Call(index, Some((id, name)), arguments) => {
            json!({"tool_calls":[{"index":index,"id":id,"type":"function","function":{"name":name,"arguments":arguments}}]})
        }
        Bit::Call(index, None, arguments) => json!({"tool_calls":[{"index":index,"function":{"arguments":arguments}}]}),
    }
}

fn by_stream(bits: &[Bit], finish: FinishReason) -> Reply {
    let role = lifecycle(&chunk(&json!({"role":"assistant","content":""}), None));
    let pieces = bits.iter().map(|bit| content(&chunk(&delta(bit), None)));
    let last = lifecycle(&chunk(&json!({}), Some(finish)));
    let end =
        [last, body("data: {\"choices\":[],\"usage\":{}}\n\n", FrameFlags::USAGE), done(), TunnelFrame::Usage(COUNTS)];
    tunnel([sse(), role].into_iter().chain(pieces).chain(end).chain([TunnelFrame::End]))
}

fn by_document(bits: &[Bit], finish: FinishReason) -> Reply {
    let (mut text, mut thought, mut calls) = (String::new(), String::new(), Vec::<Value>::new());
    for bit in bits {
        match bit {
            Bit::Thought(more) => thought.push_str(more),
            Bit::Text(more) => text.push_str(more),
            Bit::Call(_, Some(_), _) => calls.extend(delta(bit)["tool_calls"].as_array().unwrap().iter().cloned()),
            Bit::Call(index, None, more) => {
                let function = &mut calls[*index as usize]["function"];
                function["arguments"] = json!(format!("{}{more}", function["arguments"].as_str().unwrap()));
            }
        }
    }
    let message = json!({"role":"assistant","content":text,"reasoning_content":thought,"tool_calls":calls});
    let answer =
        json!({"model":"org/target","choices":[{"index":0,"message":message,"finish_reason":finish.as_str()}]});
    tunnel([head(200, "application/json"), content(&answer.to_string()), TunnelFrame::Usage(COUNTS), TunnelFrame::End])
}

/// The events of a stream, checked for what holds for every one: line and type agree, numbers have no gap, one terminal.
fn events(text: &str) -> Vec<Value> {
    let blocks: Vec<_> = text.strip_suffix("\n\n").unwrap().split("\n\n").collect();
    let (done, blocks) = match blocks.split_last() {
        Some((&"data: [DONE]", rest)) => (true, rest),
        _ => (false, &blocks[..]),
    };
    let events: Vec<Value> = blocks
        .iter()
        .filter(|block| !block.starts_with(':'))
        .map(|block| {
            let (line, data) = block.split_once('\n').unwrap();
            let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(line.strip_prefix("event: "), event["type"].as_str());
            event
        })
        .collect();
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], at, "{event}");
    }
    let terminal = |event: &Value| {
        let kind = event["type"].as_str().unwrap();
        ["response.completed", "response.incomplete", "response.failed"].contains(&kind)
    };
    assert_eq!(events.iter().filter(|event| terminal(event)).count(), 1, "{text}");
    let last = events.last().unwrap();
    assert!(terminal(last), "{last}");
    let status = last["response"]["status"].as_str().unwrap();
    assert_eq!(last["type"], format!("response.{status}"));
    assert_eq!(done, status != "failed", "[DONE] is last, and never after a failure");
    assert_eq!((&events[0]["type"], &events[1]["type"]), (&json!("response.created"), &json!("response.in_progress")));
    events
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap().strip_prefix("response.").unwrap()).collect()
}

impl Rig {
    async fn respond(&self, body: &str) -> (u16, String) {
        whole(self.send(post_to("/v1/responses", body)).await).await
    }
}

/// What must not differ between the wires: everything but ids, which name the request.
fn without_ids(object: &Value) -> Value {
    let mut object = object.clone();
    object["id"] = json!(null);
    for item in object["output"].as_array_mut().unwrap() {
        item["id"] = json!(null);
    }
    object
}

fn answers() -> Vec<(Vec<Bit>, FinishReason)> {
    vec![
        (vec![Bit::Text("Hel"), Bit::Text("lo")], FinishReason::Stop),
        (vec![Bit::Thought("hm"), Bit::Thought("m"), Bit::Text("so")], FinishReason::Stop),
        (
            vec![
                Bit::Text("I call"),
                Bit::Call(0, Some(("c0", "f")), "{\"x\""),
                Bit::Call(1, Some(("c1", "g")), "{"),
                Bit::Call(0, None, ":1}"),
                Bit::Call(1, None, "}"),
            ],
            FinishReason::ToolCalls,
        ),
        (vec![Bit::Text("cut o")], FinishReason::Length),
        (vec![Bit::Text("no")], FinishReason::ContentFilter),
        (vec![], FinishReason::Stop),
    ]
}

#[tokio::test(start_paused = true)]
async fn both_wires_streamed_and_whole_give_one_response() {
    // API-8, API-9: {run, tunnel} x {stream, not}
    for (bits, finish) in answers() {
        let mut objects = Vec::new();
        for reply in [run_of(&bits, finish), by_stream(&bits, finish)] {
            let rig = Rig::new([reply]);
            let (status, text) = rig.respond(STREAMED).await;
            assert_eq!(status, 200, "{text}");
            let events = events(&text);
            let object = events.last().unwrap()["response"].clone();
            // Each item is closed as the whole object shows it, and the pieces are the text.
            let closed: Vec<_> =
                events.iter().filter(|e| e["type"] == "response.output_item.done").map(|e| e["item"].clone()).collect();
            assert_eq!(json!(closed), object["output"]);
            let record = rig.record();
            assert_eq!(
                (record.endpoint, record.outcome, record.usage),
                (Endpoint::Responses, Outcome::Completed, Some(COUNTS))
            );
            objects.push(object);
        }
        for reply in [run_of(&bits, finish), by_document(&bits, finish)] {
            let rig = Rig::new([reply]);
            let response = rig.send(post_to("/v1/responses", WHOLE)).await;
            assert_eq!(response.headers()["content-type"], "application/json");
            let (status, text) = whole(response).await;
            assert_eq!(status, 200, "{text}");
            objects.push(serde_json::from_str(&text).unwrap());
        }
        for object in &objects {
            assert_eq!(without_ids(object), without_ids(&objects[0]), "{bits:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_object_says_what_was_asked_and_that_nothing_is_stored() {
    // API-8
    let rig = Rig::new([run_of(&[Bit::Text("x")], FinishReason::Length)]);
    let response = rig.send(post_to("/v1/responses", WHOLE)).await;
    let id = response.headers()["x-request-id"].to_str().unwrap().replace("req_", "resp_");
    let object: Value = serde_json::from_str(&whole(response).await.1).unwrap();
    for (name, want) in [
        ("id", json!(id)),
        ("object", json!("response")),
        ("model", json!("m")),
        ("created_at", json!(1_234)),
        ("completed_at", json!(null)),
        ("status", json!("incomplete")),
        ("incomplete_details", json!({"reason":"max_output_tokens"})),
        ("error", json!(null)),
        ("store", json!(false)),
        ("background", json!(false)),
        ("previous_response_id", json!(null)),
        ("truncation", json!("disabled")),
        ("metadata", json!({"k":"v"})),
        ("tools", json!([])),
        ("tool_choice", json!("auto")),
        ("text", json!({"format":{"type":"text"}})),
    ] {
        assert_eq!(object[name], want, "{name}");
    }
    assert_eq!(object["output"][0]["status"], "incomplete", "the cut item says so");
    assert_eq!(
        object["usage"],
        json!({"input_tokens":5,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},
            "output_tokens":7,"output_tokens_details":{"reasoning_tokens":2},"total_tokens":12})
    );
}

#[tokio::test(start_paused = true)]
async fn counts_that_nobody_reported_are_not_zero() {
    // API-4
    let rig = Rig::new([run([RunEventKind::Delta("x".into()), RunEventKind::Complete(FinishReason::Stop)])]);
    let object: Value = serde_json::from_str(&rig.respond(WHOLE).await.1).unwrap();
    assert_eq!((&object["status"], &object["usage"]), (&json!("completed"), &json!(null)));
}

#[tokio::test(start_paused = true)]
async fn events_come_in_the_order_that_clients_expect() {
    // API-8
    let (bits, finish) = answers().remove(1);
    let (_, text) = Rig::new([by_stream(&bits, finish)]).respond(STREAMED).await;
    assert_eq!(
        kinds(&events(&text)),
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
    );
    let first = &events(&text)[0]["response"];
    assert_eq!((&first["status"], &first["output"]), (&json!("in_progress"), &json!([])));
    assert_eq!(first["usage"]["total_tokens"], 0, "an object in every event");
    let (bits, finish) = answers().remove(2);
    let (_, text) = Rig::new([by_stream(&bits, finish)]).respond(STREAMED).await;
    let events = events(&text);
    let of = |kind: &str| -> Vec<Value> { events.iter().filter(|e| e["type"] == kind).cloned().collect() };
    let done = of("response.function_call_arguments.done");
    assert_eq!((&done[0]["arguments"], &done[0]["name"]), (&json!("{\"x\":1}"), &json!("f")));
    assert_eq!(done[1]["arguments"], "{}");
    let added = of("response.output_item.added");
    assert_eq!(added[1]["item"]["call_id"], "c0");
    for (at, item) in added.iter().enumerate() {
        assert_eq!((&item["output_index"], &item["item"]["status"]), (&json!(at), &json!("in_progress")));
    }
    let deltas = of("response.function_call_arguments.delta");
    assert_eq!(deltas[2]["item_id"], done[0]["item_id"], "pieces of calls that come in turns find theirs");
}

#[tokio::test(start_paused = true)]
async fn the_provider_is_asked_for_a_chat() {
    // API-8, SEC-2: the same chat on both wires but for model and usage
    let rig = Rig::new([by_stream(&[Bit::Text("x")], FinishReason::Stop)]);
    rig.respond(STREAMED).await;
    let (headers, sent) = rig.sent();
    assert_eq!(headers["accept"], "text/event-stream");
    assert_eq!(
        serde_json::from_str::<Value>(&sent).unwrap(),
        json!({"model":"org/target","messages":[{"role":"user","content":"hi"}],"stream":true,
            "stream_options":{"include_usage":true}})
    );
    let rig = Rig::new([run_of(&[Bit::Text("x")], FinishReason::Stop)]);
    rig.respond(WHOLE).await;
    assert_eq!(rig.sent().1, r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#);
}

/// An attempt that fails, by either wire, with or without content before it.
fn failing(by_run: bool, committed: bool, stream: bool, failure: ExecutionFailure) -> Reply {
    if by_run {
        let mut kinds = vec![RunEventKind::Start];
        kinds.extend(committed.then(|| RunEventKind::Delta("half".into())));
        kinds.push(RunEventKind::Error(failure));
        return run(kinds);
    }
    let mut frames = if stream {
        vec![sse(), lifecycle(&chunk(&json!({"role":"assistant"}), None))]
    } else {
        vec![head(200, "application/json")]
    };
    let half =
        if stream { content(&chunk(&json!({"content":"half"}), None)) } else { content("{\"choices\":[\"half\",") };
    frames.extend(committed.then_some(half));
    frames.push(TunnelFrame::Failed(failure));
    tunnel(frames)
}

fn faulty(by_run: bool, committed: bool, code: FailureCode) -> Reply {
    failing(by_run, committed, true, ExecutionFailure::refused(code, "it broke"))
}

#[tokio::test(start_paused = true)]
async fn the_table_of_faults_holds_for_responses_on_both_wires() {
    // REC-1, REC-2, REC-4, REC-5, REC-6, API-6: fault x {run, tunnel} x {before, after content} x {stream, not}
    for (name, failure, note, mended) in recovery::faults() {
        for by_run in [false, true] {
            for committed in [false, true] {
                for stream in [true, false] {
                    let failed = failing(by_run, committed, stream, failure.clone());
                    let failed = match &note {
                        Some(note) => Reply::Noted(note.clone(), Box::new(failed)),
                        None => failed,
                    };
                    let (bits, stop) = ([Bit::Text("whole")], FinishReason::Stop);
                    let second = match (by_run, stream) {
                        (true, _) => run_of(&bits, stop),
                        (false, true) => by_stream(&bits, stop),
                        (false, false) => by_document(&bits, stop),
                    };
                    let rig = recovery::rig([failed, second]);
                    let (status, text) = rig.respond(if stream { STREAMED } else { WHOLE }).await;
                    let cell = format!("{name}, run {by_run}, committed {committed}, stream {stream}: {status} {text}");
                    let bodies = rig.bodies();
                    if committed && stream {
                        assert_eq!((status, bodies.len()), (200, 1), "{cell}");
                        let last = events(&text).pop().unwrap()["response"].clone();
                        assert_eq!(last["status"], "failed", "{cell}");
                        assert!(last["error"]["iop_code"].is_string(), "{cell}");
                        assert_eq!(last["output"][0]["content"][0]["text"], "half", "{cell}");
                        assert_eq!(last["output"][0]["status"], "incomplete", "{cell}");
                    } else if mended {
                        assert_eq!((status, bodies.len()), (200, 2), "{cell}");
                        assert!(bodies[0] == bodies[1], "byte for byte");
                        assert!(text.contains("whole") && !text.contains("half"), "{cell}");
                        assert_eq!(rig.record().outcome, Outcome::RecoveredCompleted, "{cell}");
                    } else {
                        assert_eq!(bodies.len(), 1, "{cell}");
                        assert!(status >= 500 && error_of(&text)["message"].is_string(), "{cell}");
                    }
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_part_of_a_call_is_never_repeated() {
    // REC-4
    for by_run in [true, false] {
        let call = [Bit::Call(0, Some(("a", "f")), "{")];
        let failure = || ExecutionFailure::refused(FailureCode::Disconnected, "it broke");
        let reply = if by_run {
            let call = ToolCallDelta { index: 0, id: Some("a".into()), name: Some("f".into()), arguments: "{".into() };
            run([RunEventKind::ToolCallDelta(call), RunEventKind::Error(failure())])
        } else {
            tunnel([sse(), content(&chunk(&delta(&call[0]), None)), TunnelFrame::Failed(failure())])
        };
        let rig = recovery::rig([reply]);
        let (_, text) = rig.respond(STREAMED).await;
        assert_eq!(events(&text).pop().unwrap()["type"], "response.failed");
        assert_eq!(rig.liveness(), ["ineligible/tool_call", "ineligible"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_hangs_after_its_end_does_not_keep_the_client() {
    // API-6, API-7
    let rig = Rig::new([hanging([sse(), content(&chunk(&json!({"content":"x"}), None)), done()])]);
    let (_, text) = rig.respond(STREAMED).await;
    assert_eq!(events(&text).pop().unwrap()["type"], "response.completed");
    assert_eq!(rig.record().outcome, Outcome::Completed);
}

#[tokio::test(start_paused = true)]
async fn what_fails_before_content_is_a_status_and_one_error_object() {
    // API-5, API-7
    for (reply, status) in [
        (faulty(true, false, FailureCode::Disconnected), 503),
        (faulty(false, false, FailureCode::ProviderProtocol), 502),
        (
            tunnel([
                sse(),
                body("data: {\"error\":\"x\"}\n\n", FrameFlags::ERROR),
                failed(FailureCode::ProviderRejected),
            ]),
            502,
        ),
        (tunnel([sse(), content("data: {\"choices\":[\n\n"), TunnelFrame::End]), 502),
        (Reply::Refuse(SubmitError::QueueTimeout), 503),
    ] {
        let rig = Rig::new([reply]);
        let (found, text) = rig.respond(STREAMED).await;
        assert_eq!(found, status, "{text}");
        assert!(error_of(&text)["message"].is_string());
    }
    for text in ["<html>", "{}", "{\"choices\":[1]", "[]"] {
        let rig = Rig::new([tunnel([head(200, "application/json"), content(text), TunnelFrame::End])]);
        assert_eq!(rig.respond(WHOLE).await.0, 502, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_is_cut_after_content_says_failed_once() {
    // API-6, API-7: frames that just end, an error event, a client that waits no longer
    let token = || content(&chunk(&json!({"content":"x"}), None));
    for reply in [
        tunnel([sse(), token()]),
        hanging([sse(), token(), body("data: {\"error\":{\"message\":\"x\"}}\n\n", FrameFlags::ERROR)]),
        hanging([sse(), token()]),
    ] {
        let rig = Rig::new([reply]);
        let mut request = post_to("/v1/responses", STREAMED);
        request.headers_mut().insert("x-stainless-read-timeout", "30".parse().unwrap());
        let (_, text) = whole(rig.send(request).await).await;
        assert_eq!(events(&text).last().unwrap()["type"], "response.failed");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failure_after_comments_is_a_response_of_its_own() {
    // REC-8, API-6
    let (frames, reply) = stepped();
    let rig = Rig::new([reply]);
    frames.send(sse()).unwrap();
    let mut response = rig.send(post_to("/v1/responses", STREAMED)).await;
    let first = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first.starts_with(b": "), "{first:?}");
    frames.send(TunnelFrame::Cancelled(iop_execution::CancelReason::EdgeDeadline)).unwrap();
    let (status, text) = whole(response).await;
    assert_eq!(status, 200);
    let events = events(&text);
    assert_eq!(kinds(&events), ["created", "in_progress", "failed"]);
    assert_eq!(events[2]["response"]["error"]["iop_code"], "deadline_exceeded");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_before_content() {
    // REC-2
    let (frames, reply) = stepped();
    let rig = Rig::new([reply]);
    frames.send(sse()).unwrap();
    frames.send(lifecycle(&chunk(&json!({"role":"assistant","content":""}), None))).unwrap();
    let mut asked = std::pin::pin!(rig.send(post_to("/v1/responses", STREAMED)));
    let waits = std::future::poll_fn(|cx| std::task::Poll::Ready(asked.as_mut().poll(cx).is_pending())).await;
    assert!(waits);
    frames.send(content(&chunk(&json!({"content":"x"}), None))).unwrap();
    let mut response = asked.await;
    let first = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
    let text = String::from_utf8(first.to_vec()).unwrap();
    assert!(text.starts_with("event: response.created") && text.contains("response.output_text.delta"), "{text}");
    drop(response);
    assert!(rig.dropped(), "leaving cancels");
}

#[tokio::test(start_paused = true)]
async fn calls_without_index_id_or_text_are_put_right() {
    // API-8; field reports 20, 21, 22
    let call = |text: &str| {
        content(&format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"tool_calls\":[{text}]}}}}]}}\n\n"))
    };
    let rig = Rig::new([tunnel([
        sse(),
        call(
            r#"{"index":0,"id":"a","function":{"name":"f","arguments":{"x":1}}},{"index":0,"id":"b","function":{"name":"g"}}"#,
        ),
        call(r#"{"function":{"arguments":"{}"}}"#),
        call(r#"{"function":{"name":"h","arguments":"[]"}}"#),
        done(),
        TunnelFrame::End,
    ])]);
    let (_, text) = rig.respond(STREAMED).await;
    let output = events(&text).last().unwrap()["response"]["output"].clone();
    let seen: Vec<_> = output.as_array().unwrap().iter().map(|i| (i["name"].clone(), i["arguments"].clone())).collect();
    assert_eq!(seen, [("f", r#"{"x":1}"#), ("g", "{}"), ("h", "[]")].map(|(n, a)| (json!(n), json!(a))));
    assert!(output[2]["call_id"].as_str().unwrap().starts_with("call_"));
    assert_eq!(output[0]["call_id"], "a");
}

#[tokio::test(start_paused = true)]
async fn no_text_of_a_client_is_shown_by_debug() {
    // OBS-6
    let rig = Rig::new([hanging([sse(), content(&chunk(&json!({"content":"SENTINEL"}), None))])]);
    let response = rig.send(post_to("/v1/responses", &STREAMED.replace("hi", "SENTINEL"))).await;
    assert!(!format!("{response:?}").contains("SENTINEL"));
}

proptest! {
    #[test]
    fn whatever_the_answer_both_wires_give_the_same_events(choices in prop::collection::vec(0u32..6, 0..12), end in 0usize..FinishReason::ALL.len()) {
        // API-8, API-9
        let mut calls = 0;
        let mut bits = Vec::new();
        for choice in choices {
            bits.push(match choice {
                0 | 1 => Bit::Text("a\u{e9}\n"),
                2 => Bit::Thought("hm"),
                3 if calls < 3 => {
                    calls += 1;
                    Bit::Call(calls - 1, Some((["a", "b", "c"][calls as usize - 1], "f")), "{")
                }
                4 | 5 if calls > 0 => Bit::Call((choice + 1) % calls, None, "}"),
                _ => continue,
            });
        }
        let finish = FinishReason::ALL[end];
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let streams = [run_of(&bits, finish), by_stream(&bits, finish)];
            let mut told = Vec::new();
            for reply in streams {
                let rig = Rig::new([reply]);
                let (status, text) = rig.respond(STREAMED).await;
                assert_eq!(status, 200, "{text}");
                let id = rig.record().request_id.to_string().replace("req_", "");
                told.push(events(&text.replace(&id, "ID")));
            }
            assert_eq!(told[0], told[1], "{bits:?}");
            let (_, text) = Rig::new([run_of(&bits, finish)]).respond(WHOLE).await;
            let whole: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(without_ids(&whole), without_ids(&told[0].last().unwrap()["response"]), "{bits:?}");
        });
    }
}
