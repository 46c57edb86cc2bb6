//! Decides how a raw exchange passes: the head when the server's head came, the body as it comes, the end when it is one.

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, StatusCode};
use iop_execution::failure::FailureStage;
use iop_execution::{BodySink, FrameFlags, HeadSink, ProviderError, TunnelEnd, TunnelRequest, Usage};
use tokio::time::{Instant, timeout_at};

use super::choices::Choices;
use super::{Media, OpenAiCompat, Refusal, failed, in_prefill, media};
use crate::http::UpstreamResponse;
use crate::observer::{FRAME_BYTES, Observer, Seen};
use crate::{chunk, complaint, rules, tracker};

/// Largest whole answer that is checked before any of it is passed on. A larger one passes unchecked.
const MAX_CHECKED: usize = 1024 * 1024;
/// Largest whole answer.
const MAX_ANSWER: u64 = 64 * 1024 * 1024;

pub(super) async fn relay(
    adapter: &OpenAiCompat,
    request: TunnelRequest,
    head: HeadSink,
) -> Result<TunnelEnd, ProviderError> {
    let path = rules::OPENAI.check(&request.method, &request.path)?;
    let headers = rules::request_headers(&request.headers, request.run_id);
    let (body, choices) = Choices::of(request.body);
    let lent = request.credential.as_deref();
    let only_chat = matches!(path, "/v1/chat/completions" | "/v1/completions");
    let response = match adapter.call(request.method, path, headers, body, lent).await {
        Ok(response) => response,
        Err(refusal) => return Err(refused(refusal, head).await),
    };
    match (request.stream, media(&response.headers)) {
        (_, Media::Html) => Err(in_prefill(ProviderError::protocol("the provider answered with HTML"))),
        (true, Media::Json) => Err(json_for_events(response).await),
        // Some servers call their event stream plain text, or nothing at all.
        (true, Media::Events | Media::Other) => events(adapter, response, head, choices, only_chat).await,
        (false, Media::Events) => Err(in_prefill(ProviderError::protocol(
            "the provider answered with an event stream that was not asked for",
        ))),
        (false, Media::Json | Media::Other) => whole(response, head).await,
    }
}

/// Passes a server's error answer on before it becomes the failure that it is.
async fn refused(refusal: Refusal, head: HeadSink) -> ProviderError {
    let Refusal { error, answer } = refusal;
    let shown = |(status, body): &(StatusCode, Bytes)| {
        (status.is_client_error() || status.is_server_error()) && body.trim_ascii_start().starts_with(b"{")
    };
    let Some((status, body)) = answer.filter(shown) else { return error };
    let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
    let passed = async {
        let mut sink = head.head(status, headers).await?;
        in_frames(&mut sink, body).await
    };
    match passed.await {
        Ok(()) => error,
        Err(fenced) => fenced,
    }
}

async fn events(
    adapter: &OpenAiCompat,
    response: UpstreamResponse,
    head: HeadSink,
    choices: Choices,
    only_chat: bool,
) -> Result<TunnelEnd, ProviderError> {
    let mut headers = rules::response_headers(&response.headers);
    if media(&headers) != Media::Events {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    }
    let mut sink = head.head(response.status, headers).await?;
    let mut body = response.body;
    let certain = choices.certain();
    let mut observer = Observer::new(certain.unwrap_or(1));
    if only_chat {
        observer = observer.only_chat();
    }
    let mut linger_until = None;
    loop {
        let read = match linger_until {
            None => body.next().await,
            Some(until) => match timeout_at(until, body.next()).await {
                Ok(read) => read,
                // Every choice is finished: a server that keeps the connection open has nothing more to say.
                Err(_) => break,
            },
        };
        match read {
            Some(Ok(bytes)) => {
                observer.feed(bytes);
                pass_on(&mut observer, &mut sink).await?;
                if observer.is_done() {
                    break;
                }
                // With an unknown number of choices one that has not begun may still come: only the body's end ends it.
                linger_until = match (observer.is_complete() && certain.is_some(), linger_until) {
                    (false, _) => None,
                    (true, Some(until)) => Some(until),
                    (true, None) => Some(Instant::now() + adapter.terminal_linger),
                };
            }
            Some(Err(_)) if observer.is_complete() => break,
            Some(Err(error)) => return Err(failed(error, FailureStage::Stream)),
            None => {
                observer.finish()?;
                break;
            }
        }
    }
    if let Some(usage) = observer.last_usage() {
        sink.usage(usage).await?;
    }
    Ok(sink.finish())
}

async fn pass_on(observer: &mut Observer, sink: &mut BodySink) -> Result<(), ProviderError> {
    while let Some(seen) = observer.next() {
        match seen? {
            Seen::Frame { bytes, flags } => sink.data(bytes, flags).await?,
            Seen::Usage(usage) => sink.usage(usage).await?,
        }
    }
    Ok(())
}

/// The error for a JSON answer where an event stream was asked for.
async fn json_for_events(response: UpstreamResponse) -> ProviderError {
    let body = super::read_up_to(response.body, complaint::MAX_ERROR_BODY).await;
    if chunk::read(&body).is_ok_and(|answer| answer.error) {
        return in_prefill(complaint::reported(&body));
    }
    in_prefill(ProviderError::protocol("the provider answered with JSON instead of an event stream"))
}

async fn whole(response: UpstreamResponse, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
    let mut body = response.body;
    let mut read = BytesMut::new();
    let mut ended = false;
    while read.len() <= MAX_CHECKED {
        match body.next().await {
            Some(Ok(bytes)) => read.extend_from_slice(&bytes),
            Some(Err(error)) => return Err(failed(error, FailureStage::Prefill)),
            None => {
                ended = true;
                break;
            }
        }
    }
    let usage = if ended { check(&read)? } else { None };
    let mut headers = rules::response_headers(&response.headers);
    if media(&headers) != Media::Json {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    let mut sink = head.head(response.status, headers).await?;
    let mut total = read.len() as u64;
    in_frames(&mut sink, read.freeze()).await?;
    while !ended {
        match body.next().await {
            Some(Ok(bytes)) => {
                total = total.saturating_add(bytes.len() as u64);
                if total > MAX_ANSWER {
                    return Err(ProviderError::protocol("the provider's answer is larger than 64 MiB"));
                }
                in_frames(&mut sink, bytes).await?;
            }
            Some(Err(error)) => return Err(failed(error, FailureStage::Stream)),
            None => ended = true,
        }
    }
    if let Some(usage) = usage {
        sink.usage(usage).await?;
    }
    Ok(sink.finish())
}

async fn in_frames(sink: &mut BodySink, mut bytes: Bytes) -> Result<(), ProviderError> {
    while !bytes.is_empty() {
        let frame = bytes.split_to(bytes.len().min(FRAME_BYTES));
        sink.data(frame, FrameFlags::NONE).await?;
    }
    Ok(())
}

/// Whether these bytes are a whole answer. Some servers send blank lines before it while they work.
pub(super) fn check(body: &[u8]) -> Result<Option<Usage>, ProviderError> {
    let text = body.trim_ascii();
    let not_json = |message| in_prefill(ProviderError::protocol(message));
    if text.starts_with(b"<") {
        return Err(not_json("the provider answered with HTML"));
    }
    match chunk::read(text) {
        Ok(answer) if answer.error => Err(in_prefill(complaint::reported(text))),
        Ok(answer) if answer.choices.iter().any(tracker::is_failed) => {
            Err(in_prefill(ProviderError::reported("the provider gave up in the middle of its answer")))
        }
        Ok(answer) if text.starts_with(b"{") => Ok(answer.usage),
        Ok(_) | Err(_) => Err(not_json("the provider's answer is not a JSON object")),
    }
}
