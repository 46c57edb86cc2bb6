//! Decides what the answers with a whole body are: JSON, HTML, statuses, resets.

use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use super::{CaseEnd, ChatCase, Expected, NOTHING, OK, boom, full_answer, model_not_found};
use crate::testkit::backend::Answer;

pub(super) fn cases() -> Vec<ChatCase> {
    let boom = boom().to_string();
    let limited = |name: &str, value: &str| Answer::json(429, boom.clone()).header(name, value);
    let full = full_answer().to_string();
    vec![
        case("json_not_sse", Answer::json(200, full.clone()), OK),
        case("gzip_json", Answer::json(200, stored_gzip(full.as_bytes())).header("content-encoding", "gzip"), OK),
        case(
            "deepseek_blank_prefix_json",
            Answer::new(200)
                .header("content-type", "application/json")
                .write("\n")
                .wait(Duration::from_millis(10))
                .write("\n")
                .write(full),
            OK,
        ),
        error(
            "http_429_ra1",
            Answer::json(
                429,
                error_object("queue full", "rate_limit_error", Value::Null, json!("rate_limit_exceeded")),
            )
            .header("retry-after", "1"),
        ),
        error("http_429_ms", limited("retry-after-ms", "300")),
        error("http_429_noretry", limited("x-should-retry", "false")),
        error("http_429_ra300", limited("retry-after", "300")),
        error(
            "http_400",
            Answer::json(400, error_object("bad", "invalid_request_error", json!("messages"), Value::Null)),
        ),
        error(
            "http_401",
            Answer::json(
                401,
                error_object(
                    "Incorrect API key provided",
                    "invalid_request_error",
                    Value::Null,
                    json!("invalid_api_key"),
                ),
            ),
        ),
        error("http_404", model_not_found()),
        error("http_499", Answer::json(499, boom.clone())),
        error("http_503", Answer::json(503, boom.clone())),
        error("http_503_noretry", Answer::json(503, boom.clone()).header("x-should-retry", "false")),
        error(
            "http_502_html",
            Answer::new(502)
                .header("content-type", "text/html")
                .header("content-length", "21")
                .write("<h1>Bad Gateway</h1>\n"),
        ),
        error("http_500_empty", Answer::new(500).header("content-length", "0")),
        error("http_400_intcode", Answer::json(400, error_object("bad", "BadRequestError", Value::Null, json!(400)))),
        error("http_400_detail", Answer::json(400, json!({ "detail": "Not Found" }).to_string())),
        error("http_400_string", Answer::json(400, json!({ "error": "model 'x' not found" }).to_string())),
        error("reset_before_head", Answer::reset_at_once()),
    ]
}

fn case(name: &'static str, answer: Answer, expected: Expected) -> ChatCase {
    ChatCase { name, answer, stream: expected, plain: expected }
}

fn error(name: &'static str, answer: Answer) -> ChatCase {
    debug_assert_eq!(NOTHING.end, CaseEnd::Error);
    case(name, answer, NOTHING)
}

fn error_object(message: &str, kind: &str, param: Value, code: Value) -> String {
    json!({ "error": { "message": message, "type": kind, "param": param, "code": code } }).to_string()
}

/// A gzip file whose one deflate block is stored, not compressed: real gzip without a compressor.
fn stored_gzip(content: &[u8]) -> Bytes {
    let len = u16::try_from(content.len()).unwrap_or(u16::MAX);
    let content = &content[..usize::from(len)];
    let mut file = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255, 1];
    file.extend_from_slice(&len.to_le_bytes());
    file.extend_from_slice(&(!len).to_le_bytes());
    file.extend_from_slice(content);
    file.extend_from_slice(&crc32(content).to_le_bytes());
    file.extend_from_slice(&u32::from(len).to_le_bytes());
    Bytes::from(file)
}

fn crc32(content: &[u8]) -> u32 {
    !content.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}
