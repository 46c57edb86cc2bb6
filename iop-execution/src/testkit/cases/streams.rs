//! Decides what the event-stream answers are, byte for byte.

use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use super::{CUT, CaseEnd, ChatCase, Expected, NOTHING, OK, TEXT, boom, full_answer};
use crate::testkit::backend::Answer;
use crate::testkit::chunk::{self, DONE, delta, event, role, with_finish};

const STALL: Expected = Expected { text: TEXT, end: CaseEnd::Stall };
/// Long enough for a client to see what was written before, short enough for tests.
const GAP: Duration = Duration::from_millis(10);

pub(super) fn cases() -> Vec<ChatCase> {
    [framing(), ends(), errors(), usage(), fields(), tools(), stalls()].concat()
}

fn case(name: &'static str, answer: Answer, stream: Expected) -> ChatCase {
    let answer = answer.without_stream(Answer::json(200, full_answer().to_string()));
    ChatCase { name, answer, stream, plain: OK }
}

/// An event stream of these writes.
fn sse<const N: usize>(writes: [Bytes; N]) -> Answer {
    writes.into_iter().fold(Answer::events(), Answer::write)
}

fn hi() -> Bytes {
    event(&delta(json!({ "content": TEXT })))
}

fn stop() -> Value {
    with_finish(json!({}), &json!("stop"))
}

fn fin() -> Bytes {
    event(&stop())
}

fn start() -> Bytes {
    event(&role())
}

fn done() -> Bytes {
    Bytes::from_static(DONE)
}

/// A usage report with `choices: []`.
fn report() -> Value {
    let mut chunk = delta(json!({}));
    chunk["choices"] = json!([]);
    chunk["usage"] = counts();
    chunk
}

fn counts() -> Value {
    json!({ "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5 })
}

fn edited(mut value: Value, edit: impl FnOnce(&mut Value)) -> Bytes {
    edit(&mut value);
    event(&value)
}

fn raw(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn joined<const N: usize>(parts: [Bytes; N]) -> Bytes {
    Bytes::from(parts.concat())
}

/// The plain stream with another line terminator, or another way to write `data:`.
fn respelled(terminator: &str, prefix: &str) -> [Bytes; 4] {
    [start(), hi(), fin(), done()].map(|event| {
        let text = String::from_utf8_lossy(&event).replace("data: ", prefix).replace('\n', terminator);
        Bytes::from(text)
    })
}

/// Up to the text, then these.
fn after_text<const N: usize>(writes: [Bytes; N]) -> Answer {
    writes.into_iter().fold(sse([start(), hi()]), Answer::write)
}

fn framing() -> Vec<ChatCase> {
    let [crlf_start, crlf_hi, crlf_fin, crlf_done] = respelled("\r\n", "data: ");
    let cut = |bytes: &Bytes, at: usize| (bytes.slice(..at), bytes.slice(at..));
    let (start_head, _) = cut(&crlf_start, crlf_start.len() - 1);
    let (hi_head, hi_tail) = cut(&crlf_hi, crlf_hi.len() - 3);
    let character = memchr::memmem::find(&hi(), "é".as_bytes()).unwrap_or(0) + 1;
    let (utf8_head, utf8_tail) = cut(&hi(), character);
    let (json_head, json_tail) = cut(&hi(), 40);
    let pretty = serde_json::to_string_pretty(&delta(json!({ "content": TEXT }))).unwrap_or_default();
    let all = joined([start(), hi(), fin(), done()]);
    vec![
        case("ok", sse([start(), hi(), fin(), event(&report()), done()]), OK),
        case("ok_one_write", sse([all.clone()]), OK),
        case("crlf", sse([crlf_start, crlf_hi, crlf_fin.clone(), crlf_done.clone()]), OK),
        case("cr", sse(respelled("\r", "data: ")), OK),
        case("crlf_split", sse([start_head, joined([raw("\n"), hi_head]), joined([hi_tail, crlf_fin, crlf_done])]), OK),
        case("bom", sse([joined([raw("\u{feff}"), start()]), hi(), fin(), done()]), OK),
        case("nospace", sse(respelled("\n", "data:")), OK),
        case(
            "multiline_data",
            sse([start(), raw(&format!("data: {}\n\n", pretty.replace('\n', "\ndata: "))), fin(), done()]),
            OK,
        ),
        case(
            "comments",
            sse([raw(": ping\n\n"), raw(":\n\n"), start(), hi(), raw(": OPENROUTER PROCESSING\n\n"), fin(), done()]),
            OK,
        ),
        case(
            "event_id_retry",
            sse([joined([raw("event: message\nid: 1\nretry: 10\n"), start()]), hi(), fin(), done()]),
            OK,
        ),
        case("utf8_split", sse([start(), utf8_head, utf8_tail, fin(), done()]), OK),
        case("byte_by_byte", (0..all.len()).map(|at| all.slice(at..=at)).fold(Answer::events(), Answer::write), OK),
        case("json_split", sse([start(), json_head]).wait(GAP).write(json_tail).write(fin()).write(done()), OK),
        case("empty_data", sse([start(), raw("data: \n\n"), hi(), fin(), done()]), OK),
        case("retry_only", sse([raw("retry: 3000\n\n"), start(), raw("id: 7\n\n"), hi(), fin(), done()]), OK),
        case("blank_lines", sse([joined([raw("\n\n\n"), start()]), joined([raw("\n\n"), hi()]), fin(), done()]), OK),
        case(
            "sse_as_text_plain",
            [start(), hi(), fin(), done()]
                .into_iter()
                .fold(Answer::new(200).header("content-type", "text/plain"), Answer::write),
            OK,
        ),
    ]
}

fn ends() -> Vec<ChatCase> {
    let cut = hi().slice(..40);
    let unended = fin().slice(..fin().len() - 2);
    vec![
        case("no_done", after_text([fin()]), OK),
        case("no_done_no_finish", after_text([]), CUT),
        case("no_final_blank_line", after_text([fin(), raw("data: [DONE]\n")]), OK),
        case("no_final_newline", after_text([unended]), CUT),
        case("done_then_hang", after_text([fin(), done()]).hang(), OK),
        case("data_after_done", after_text([fin(), done(), hi()]), OK),
        case("cut_mid_json_clean", sse([start(), cut.clone()]), NOTHING),
        case("cut_mid_json_eof", sse([start(), cut]).close(), NOTHING),
        case("eof_after_delta", after_text([]).close(), CUT),
        case("rst_after_delta", after_text([]).wait(GAP).reset(), CUT),
        case("empty_stream", sse([]), NOTHING),
        case("only_done", sse([done()]), Expected { text: "", end: CaseEnd::Error }),
        case("llama_killed", after_text([]).close(), CUT),
        case(
            "ollama_compat_error_mid",
            after_text([edited(delta(json!({ "content": "" })), |chunk| chunk["model"] = json!(""))]),
            CUT,
        ),
    ]
}

fn errors() -> Vec<ChatCase> {
    let boom = event(&boom());
    let flat = json!({ "object": "error", "message": "boom", "type": "BadRequestError", "code": 400 });
    let finished = edited(with_finish(json!({}), &json!("error")), |chunk| {
        chunk["error"] = json!({ "code": 502, "message": "boom" });
    });
    let vllm = json!({ "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError", "param": null, "code": 500,
    }});
    let sglang = json!({ "error": {
        "object": "error", "message": "Generation aborted.", "type": "INTERNAL_SERVER_ERROR", "param": null, "code": 500,
    }});
    vec![
        case("error_first", sse([boom.clone(), done()]), NOTHING),
        case("error_mid", after_text([boom.clone(), done()]), CUT),
        case("error_mid_no_done", after_text([boom.clone()]), CUT),
        case("error_event_mid", after_text([joined([raw("event: error\n"), boom])]), CUT),
        case("error_field_mid", after_text([raw("error: {\"code\":500,\"message\":\"boom\"}\n\n")]), CUT),
        case("error_string_mid", after_text([event(&json!({ "error": "boom" }))]), CUT),
        case("error_flat_mid", after_text([event(&flat)]), CUT),
        case("error_plain_mid", after_text([raw("data: Number of choices must be greater than 0.\n\n")]), CUT),
        case("error_with_finish", after_text([finished, done()]), CUT),
        case("vllm_engine_dead", after_text([event(&vllm), done()]), CUT),
        case("sglang_abort", after_text([event(&sglang), done()]), CUT),
        case(
            "deepseek_insufficient_resource",
            after_text([event(&with_finish(json!({}), &json!("insufficient_system_resource"))), done()]),
            CUT,
        ),
    ]
}

fn usage() -> Vec<ChatCase> {
    let without_choices = edited(report(), |chunk| {
        if let Some(fields) = chunk.as_object_mut() {
            fields.remove("choices");
        }
    });
    let null = |value: Value| edited(value, |chunk| chunk["usage"] = Value::Null);
    let timed = edited(report(), |chunk| chunk["timings"] = json!({ "predicted_n": 2 }));
    let first = joined([
        event(&delta(json!({ "role": "assistant", "content": null }))),
        event(&delta(json!({ "content": TEXT }))),
    ]);
    let second_ends = edited(with_finish(json!({}), &json!("length")), |chunk| chunk["choices"][0]["index"] = json!(1));
    vec![
        case("usage_no_choices", after_text([fin(), without_choices, done()]), OK),
        case(
            "usage_null_choices",
            after_text([fin(), edited(report(), |chunk| chunk["choices"] = Value::Null), done()]),
            OK,
        ),
        case("usage_twice", after_text([fin(), event(&report()), event(&report()), done()]), OK),
        case("usage_in_finish", after_text([edited(stop(), |chunk| chunk["usage"] = counts()), done()]), OK),
        case(
            "usage_null_each",
            sse([null(role()), null(delta(json!({ "content": TEXT }))), null(stop()), event(&report()), done()]),
            OK,
        ),
        case("llama_n2_two_usages", sse([first, second_ends, timed.clone(), joined([fin(), timed]), done()]), OK),
    ]
}

fn fields() -> Vec<ChatCase> {
    let empty_finish = |piece: Value| event(&with_finish(piece, &json!("")));
    let no_finish = edited(delta(json!({ "content": TEXT })), |chunk| {
        if let Some(choice) = chunk["choices"][0].as_object_mut() {
            choice.remove("finish_reason");
        }
    });
    let no_delta = edited(stop(), |chunk| {
        if let Some(choice) = chunk["choices"][0].as_object_mut() {
            choice.remove("delta");
        }
    });
    let filter = edited(report(), |chunk| {
        chunk["usage"] = Value::Null;
        chunk["prompt_filter_results"] = json!([]);
    });
    let reasoned = |key: &str| {
        let thought = event(&delta(json!({ key: "hm" })));
        sse([start(), thought, hi(), fin(), done()])
    };
    let progress = edited(delta(json!({ "role": "assistant", "content": null })), |chunk| {
        chunk["prompt_progress"] = json!({ "total": 100, "cache": 0, "processed": 50, "time_ms": 5 });
    });
    vec![
        case(
            "finish_empty_string",
            sse([
                empty_finish(json!({ "role": "assistant", "content": "" })),
                empty_finish(json!({ "content": TEXT })),
                fin(),
                done(),
            ]),
            OK,
        ),
        case("finish_missing", sse([start(), no_finish, fin(), done()]), OK),
        case("delta_missing", after_text([no_delta, done()]), OK),
        case(
            "delta_null",
            after_text([edited(stop(), |chunk| chunk["choices"][0]["delta"] = Value::Null), done()]),
            OK,
        ),
        case("first_choices_empty", sse([filter, start(), hi(), fin(), done()]), OK),
        case("no_role", sse([hi(), fin(), done()]), OK),
        case("reasoning_content", reasoned("reasoning_content"), OK),
        case("reasoning", reasoned("reasoning"), OK),
        case("llama_prompt_progress", sse([progress, hi(), fin(), done()]), OK),
    ]
}

fn tools() -> Vec<ChatCase> {
    const EMPTY: Expected = Expected { text: "", end: CaseEnd::Ok };
    let pieces = |calls: Value| event(&delta(json!({ "tool_calls": calls })));
    let whole = |index: Value, id: &str, name: &str, arguments: Value| {
        let mut call = json!([{ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } }]);
        if !index.is_null() {
            call[0]["index"] = index;
        }
        pieces(call)
    };
    let called = || event(&chunk::finish(crate::event::FinishReason::ToolCalls));
    let f = |index: Value, arguments: Value| whole(index, "call_1", "f", arguments);
    let more = |text: &str| pieces(json!([{ "index": 0, "function": { "arguments": text } }]));
    vec![
        case(
            "tool_split",
            sse([start(), f(json!(0), json!("")), more("{\"a\""), more(":1}"), called(), done()]),
            EMPTY,
        ),
        case("tool_no_index", sse([start(), f(Value::Null, json!("{\"a\":1}")), called(), done()]), EMPTY),
        case(
            "tool_same_index",
            sse([
                start(),
                f(json!(0), json!("{\"a\":1}")),
                whole(json!(0), "call_2", "g", json!("{\"b\":2}")),
                called(),
                done(),
            ]),
            EMPTY,
        ),
        case("tool_args_object", sse([start(), f(json!(0), json!({ "a": 1 })), called(), done()]), EMPTY),
        case("tool_finish_stop", sse([start(), f(json!(0), json!("{\"a\":1}")), fin(), done()]), EMPTY),
    ]
}

fn stalls() -> Vec<ChatCase> {
    let pinged = (0..6).fold(after_text([]), |answer, _| answer.wait(GAP).write(raw(":\n\n")));
    vec![
        case(
            "slow_first_token",
            [start(), hi(), fin(), done()].into_iter().fold(Answer::events().wait(GAP * 5), Answer::write),
            OK,
        ),
        case("ping_then_stall", pinged.hang(), STALL),
        case("silent_stall", after_text([]).hang(), STALL),
        case("stall_after_finish", after_text([fin()]).hang(), OK),
        case("role_only_then_stall", sse([start()]).hang(), Expected { text: "", end: CaseEnd::Stall }),
    ]
}
