//! How a body is cut into chunks never matters, and the decoder agrees with the reference.

use proptest::prelude::*;

use super::naive::{self, Meaning};
use super::*;

/// Streams as servers send them; bug numbers are those of surfaces.md section 4.
const STREAMS: &[&str] = &[
    // vLLM: role, text with multi-byte characters, usage-only chunk, done.
    concat!(
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"né 日本 🦀\"}}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"completion_tokens\":3}}\n\n",
        "data: [DONE]\n\n",
    ),
    // CRLF behind a BOM, comments between (bugs 5 and 8).
    "\u{feff}data: {\"a\":1}\r\n\r\n:\r\n\r\ndata: {\"b\":2}\r\n\r\ndata: [DONE]\r\n\r\n",
    // Lone CR, two data lines, a retry block (bug 6).
    "retry: 3000\r\rdata: {\rdata: \"a\":1}\r\rdata:[DONE]\r\r",
    // Responses events with names.
    concat!(
        "event: response.created\ndata: {\"type\":\"response.created\"}\n\n",
        "event: response.output_text.delta\ndata: {\"delta\":\"é\"}\n\n",
        "event: error\ndata: {\"type\":\"error\"}\n\n",
    ),
    // DeepSeek keep-alives and blank lines, then a bare end in the middle of an event (bugs 9 and 28).
    "\n\n: keep-alive\n\ndata: {\"choices\":[{\"delta\":{\"reasoning_content\":\"a\"}}]}\n\ndata: {\"ch",
    // Old llama.cpp: an error field; mistral.rs: plain text.
    "data: {\"a\":1}\n\nerror: {\"code\":500,\"message\":\"no slot\"}\n\ndata: plain text\n\n",
    // Every terminator after every other.
    "data:a\n\r\ndata:b\r\n\ndata:c\r\r\n\n\rdata:d\n\rid\r\n\r\n",
];

fn meanings(decoded: &Decoded) -> (Vec<Meaning>, Option<SseError>) {
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    let meanings = decoded.blocks.iter().map(|block| match &block.content {
        BlockContent::Blank => Meaning::Blank,
        BlockContent::Comment => Meaning::Comment,
        BlockContent::ErrorField(value) => Meaning::Error(text(value)),
        BlockContent::Event(event) => {
            if let Some(offset) = event.data_offset {
                assert_eq!(block.raw.slice(offset..offset + event.data.len()), event.data);
            }
            assert_eq!(event.data_offset.is_some(), event.data_lines == 1);
            Meaning::Event {
                data: text(&event.data),
                name: event.event.as_deref().unwrap_or_default().to_vec(),
                lines: event.data_lines,
            }
        }
        BlockContent::NoData => Meaning::NoData,
    });
    (meanings.collect(), decoded.error)
}

/// Cuts `body` at the given offsets, taken modulo its length.
fn cut<'a>(body: &'a [u8], offsets: &[usize]) -> Vec<&'a [u8]> {
    let mut ends: Vec<usize> = offsets.iter().map(|at| at % (body.len() + 1)).collect();
    ends.push(body.len());
    ends.sort_unstable();
    let starts = std::iter::once(0).chain(ends.clone());
    starts.zip(ends.clone()).map(|(start, end)| &body[start..end]).collect()
}

/// The decoder agrees with the reference on `chunks` of `body`, and loses no byte of it.
fn check(body: &[u8], chunks: &[&[u8]]) {
    let decoded = decode(chunks.iter().copied());
    assert_eq!(meanings(&decoded), naive::parse(body), "{chunks:?}");
    if decoded.error.is_none() {
        assert_eq!(decoded.raw(), body, "{chunks:?}");
    } else {
        assert!(body.starts_with(&decoded.raw()), "{chunks:?}");
    }
}

// API-11; bugs 1 to 4: every single split point of every recorded stream.
#[test]
fn one_split_point_does_not_matter() {
    for body in STREAMS.iter().map(|stream| stream.as_bytes()) {
        assert!(naive::parse(body).0.len() >= 3);
        for at in 0..=body.len() {
            check(body, &[&body[..at], &body[at..]]);
        }
    }
}

// API-11: every pair of split points of the short streams.
#[test]
fn two_split_points_do_not_matter() {
    let short = STREAMS.iter().filter(|stream| stream.len() <= 100);
    let mut seen = 0;
    for body in short.map(|stream| stream.as_bytes()) {
        seen += 1;
        for first in 0..=body.len() {
            for second in first..=body.len() {
                check(body, &[&body[..first], &body[first..second], &body[second..]]);
            }
        }
    }
    assert!(seen >= 3, "short streams: {seen}");
}

// EXE-17: no event waits for a later one. Byte by byte, a block is there as soon as the reference sees it in
// the bytes so far.
#[test]
fn a_block_comes_with_the_byte_that_ends_it() {
    for body in STREAMS.iter().map(|stream| stream.as_bytes()) {
        let mut decoder = SseDecoder::new(SseLimits::default());
        let mut taken = 0;
        for (at, byte) in body.iter().enumerate() {
            decoder.feed(Bytes::copy_from_slice(&[*byte]));
            taken += std::iter::from_fn(|| decoder.next_block()).count();
            assert_eq!(taken, naive::parse(&body[..=at]).0.len(), "after {at}");
        }
    }
}

// API-11: feeding everything before taking anything gives the same blocks.
#[test]
fn taking_late_does_not_matter() {
    for body in STREAMS.iter().map(|stream| stream.as_bytes()) {
        for size in [1, 2, 7] {
            let mut decoder = SseDecoder::new(SseLimits::default());
            for chunk in body.chunks(size) {
                decoder.feed(Bytes::copy_from_slice(chunk));
            }
            assert_eq!(decoder.pending_bytes(), body.len());
            let blocks = std::iter::from_fn(|| decoder.next_block()).map(Result::unwrap).collect();
            let end = decoder.finish();
            assert_eq!(Decoded { blocks, error: None, end }, decode(body.chunks(size)));
        }
    }
}

/// Bodies made of the pieces that matter to the grammar.
fn grammar() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop::sample::select(vec![
        &b"\n"[..],
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b"\r\n\r\n",
        b"data",
        b"data:",
        b"data: x",
        b"event: e",
        b"error: x",
        b"error",
        b"id: 1",
        b"retry",
        b":",
        b" ",
        b"[DONE]",
        b"\xEF\xBB\xBF",
        b"\xEF",
        b"\xC3\xA9",
        b"\xC3",
        b"x",
    ]);
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

proptest! {
    // API-11: differential, on bodies of grammar pieces.
    #[test]
    fn agrees_with_the_reference(
        body in grammar(),
        marked in any::<bool>(),
        offsets in prop::collection::vec(any::<usize>(), 0..8),
    ) {
        let body = if marked { [b"\xEF\xBB\xBF", &body[..]].concat() } else { body };
        check(&body, &cut(&body, &offsets));
    }

    // API-11: any bytes at all: no panic, no byte lost.
    #[test]
    fn random_bytes_never_panic(
        body in prop::collection::vec(any::<u8>(), 0..256),
        offsets in prop::collection::vec(any::<usize>(), 0..8),
    ) {
        check(&body, &cut(&body, &offsets));
    }

    // API-11: which limit is hit, and after which block, does not depend on the chunks.
    #[test]
    fn limits_do_not_depend_on_chunks(
        body in grammar(),
        offsets in prop::collection::vec(any::<usize>(), 0..8),
        max_line in 0_usize..12,
        max_event in 0_usize..24,
    ) {
        let limits = SseLimits { max_line, max_event };
        let expected = meanings(&decode_with(limits, [&body[..]]));
        prop_assert_eq!(meanings(&decode_with(limits, cut(&body, &offsets))), expected.clone());
        prop_assert_eq!(meanings(&decode_with(limits, body.chunks(1))), expected);
    }

    // API-10: what the decoder cut, `split_blocks` reads alike.
    #[test]
    fn split_blocks_agrees_with_the_decoder(body in grammar()) {
        let decoded = whole(&body);
        for block in decoded.blocks {
            let again: Vec<_> = split_blocks(&block.raw).collect();
            // In the middle of a body a BOM is no BOM; a frame can't tell.
            if block.bom || !block.raw.starts_with(b"\xEF\xBB\xBF") {
                prop_assert_eq!(again, vec![Ok(block)]);
            }
        }
    }
}
