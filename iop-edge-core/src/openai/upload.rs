//! Decides which request bodies are read, and how long and how large they may be (SEC-3).

use std::pin::pin;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout, timeout_at};

use super::config::{DISCARD_BYTES, DISCARD_TIME, OpenAiConfig};
use super::errors::ApiError;

/// First allocation for a body that comes in pieces, in bytes: a claimed length alone costs no memory.
const FIRST_ALLOCATION: usize = 64 << 10;

/// Takes in what is left of the body of a request that is refused, within [`DISCARD_BYTES`] and [`DISCARD_TIME`]. A client that
/// is cut off in the middle of its upload may never see the answer: HTTP/2 then resets the stream with the answer in it, and
/// HTTP/1.1 the connection. A client that asked first (`expect: 100-continue`) has sent nothing yet: the refusal is the answer to
/// its question, and to read would be to invite what is refused.
pub(crate) async fn discard<B>(headers: &HeaderMap, body: B)
where
    B: Body<Data = Bytes>,
{
    if headers.contains_key(EXPECT) {
        return;
    }
    let (mut body, mut taken) = (pin!(body), 0_usize);
    let all = async {
        while let Some(Ok(frame)) = body.frame().await {
            taken = taken.saturating_add(frame.data_ref().map_or(0, Bytes::len));
            if taken > DISCARD_BYTES {
                return;
            }
        }
    };
    let _late = timeout(DISCARD_TIME, all).await;
}

/// Reads a JSON body.
///
/// # Errors
/// What the client is told: 413, 415, 408, or nothing that anybody will read when the upload broke off.
pub(crate) async fn read<B>(headers: &HeaderMap, body: B, config: &OpenAiConfig) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes>,
{
    if let Err(error) = check(headers) {
        discard(headers, body).await;
        return Err(error);
    }
    let limit = config.max_body_bytes;
    let claimed = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if claimed.is_some_and(|length| length > limit as u64) || body.size_hint().lower() > limit as u64 {
        return Err(ApiError::body_too_large(limit));
    }

    let mut body = pin!(body);
    let last = Instant::now() + config.body_total;
    let (mut first, mut rest) = (Bytes::new(), BytesMut::new());
    loop {
        let until = last.min(Instant::now() + config.body_idle);
        let frame = match timeout_at(until, body.frame()).await {
            Err(_) => return Err(ApiError::body_timeout()),
            Ok(None) => break,
            Ok(Some(Err(_))) => return Err(ApiError::client_gone()),
            Ok(Some(Ok(frame))) => frame,
        };
        // Trailers mean nothing here.
        let Ok(piece) = frame.into_data() else { continue };
        if first.len() + rest.len() + piece.len() > limit {
            return Err(ApiError::body_too_large(limit));
        }
        if first.is_empty() && rest.is_empty() {
            first = piece;
        } else {
            if rest.is_empty() {
                let expected = claimed.and_then(|length| usize::try_from(length).ok()).unwrap_or(0);
                rest.reserve(
                    expected.clamp(first.len() + piece.len(), FIRST_ALLOCATION.max(first.len() + piece.len())),
                );
                rest.extend_from_slice(&std::mem::take(&mut first));
            }
            rest.extend_from_slice(&piece);
        }
    }
    Ok(if rest.is_empty() { first } else { rest.freeze() })
}

fn check(headers: &HeaderMap) -> Result<(), ApiError> {
    // Every one of a header that comes more than once: another reader may go by the last.
    let texts = |name| headers.get_all(name).iter().map(|value| value.to_str().unwrap_or("?").trim());
    let plain = |encoding: &str| encoding.is_empty() || encoding.eq_ignore_ascii_case("identity");
    if !texts(CONTENT_ENCODING).all(plain) {
        return Err(ApiError::unsupported_media("Compressed request bodies are not supported."));
    }
    let json = |kind: &str| kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json");
    if texts(CONTENT_TYPE).next().is_none() || !texts(CONTENT_TYPE).all(json) {
        return Err(ApiError::unsupported_media("The content type must be application/json."));
    }
    Ok(())
}
