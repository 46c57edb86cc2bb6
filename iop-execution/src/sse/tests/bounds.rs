//! Limits, ends, cost and secrecy: what holds for bodies that are cut short, too large or hostile.

use std::fmt::Write as _;

use super::*;

// API-11: at the end nothing is flushed without its blank line, but what was held is reported.
#[test]
fn an_unfinished_block_is_reported_not_dispatched() {
    for (left, data) in [("data: [DONE]\n", "[DONE]"), ("data: {\"err", "{\"err"), ("data: x\r", "x")] {
        let body = format!("data: a\n\n{left}");
        let decoded = whole(body.as_bytes());
        assert_eq!(decoded.data(), ["a"]);
        let SseEnd::Truncated { raw, content: Ok(BlockContent::Event(event)) } = decoded.end else {
            panic!("{:?}", decoded.end)
        };
        assert_eq!((raw, &event.data[..]), (Bytes::from(left), data.as_bytes()));
    }
    for (left, content) in [
        (&b": ping\n"[..], Ok(BlockContent::Comment)),
        (b"id: 1", Ok(BlockContent::NoData)),
        (b"error: x", Ok(BlockContent::ErrorField(Bytes::from("x")))),
        (b"data: \xE6\x97", Err(SseError::InvalidUtf8)),
    ] {
        let raw = Bytes::from(left);
        assert_eq!(whole(left).end, SseEnd::Truncated { raw, content });
    }
    assert_eq!(whole(b"").end, SseEnd::Clean { tail: Bytes::new() });
}

// API-11: an end is reported once.
#[test]
fn a_second_finish_has_nothing_to_report() {
    for body in ["data: a", "\u{feff}data: a", "\u{feff}"] {
        let mut decoder = SseDecoder::new(SseLimits::default());
        decoder.feed(Bytes::from(body));
        assert_eq!(decoder.next_block(), None);
        assert!(matches!(decoder.finish(), SseEnd::Truncated { raw, .. } if raw == body));
        decoder.feed(Bytes::from("data: b\n\n"));
        assert_eq!(decoder.next_block(), None);
        assert_eq!(decoder.finish(), SseEnd::Clean { tail: Bytes::new() });
    }
}

// API-11: both limits are inclusive and give typed errors; blocks before the error still come.
#[test]
fn lines_and_events_have_limits() {
    let limits = SseLimits { max_line: 8, max_event: 20 };
    let line = SseError::LineTooLong { limit: 8 };
    let large = SseError::EventTooLarge { limit: 20 };
    for (body, error) in [
        ("data: ab\n\ndata: ab\n\n", None),
        ("data: abc\n\n", Some(line)),
        ("data: abc", Some(line)),
        (": 345678\n: 345678\nab\n\n", Some(large)),
        (": 345678\n: 345678\na\n\n", None),
        (": 345678\r\n: 345678\r\n\r\n", None),
        (": 345678\r\n: 345678\r\na\r\r", Some(large)),
        (": 345678\n: 345678\nabcdefghijk", Some(large)),
        ("x\nabcdefghijklmnopqrst", Some(line)),
    ] {
        let body = body.as_bytes();
        for size in 1..=body.len() {
            assert_eq!(decode_with(limits, body.chunks(size)).error, error, "{body:?} by {size}");
        }
    }
    let before = decode_with(limits, [&b"data: a\n\ndata: too long\n\n"[..]]);
    assert_eq!((before.data(), before.end.clone()), (vec!["a"], SseEnd::Failed(line)));
    let limits = SseLimits::default();
    assert_eq!((limits.max_line, limits.max_event), (1 << 20, 4 << 20));
}

// API-11: after an error the decoder is fused, holds nothing and takes nothing.
#[test]
fn an_error_fuses_the_decoder() {
    let mut decoder = SseDecoder::new(SseLimits::default());
    decoder.feed(Bytes::from("data: \u{e9}\n\n").slice(..7));
    decoder.feed(Bytes::from("\n\ndata: a\n\n"));
    assert_eq!(decoder.next_block(), Some(Err(SseError::InvalidUtf8)));
    decoder.feed(Bytes::from("data: b\n\n"));
    assert_eq!((decoder.next_block(), decoder.pending_bytes()), (None, 0));
    assert_eq!(decoder.finish(), SseEnd::Failed(SseError::InvalidUtf8));
    assert_eq!(decoder.finish(), SseEnd::Failed(SseError::InvalidUtf8));
}

// EXE-17: bytes of a block that lay in one chunk are slices of it, whatever lies around it.
#[test]
fn a_block_within_one_chunk_is_not_copied() {
    let chunk = Bytes::from("data: a\n\nevent: x\ndata: b\n\ndata: c");
    let inside = |bytes: &Bytes| chunk.as_ptr_range().contains(&bytes.as_ptr());
    let mut decoder = SseDecoder::new(SseLimits::default());
    decoder.feed(chunk.clone());
    decoder.feed(Bytes::from("\n\n"));
    for zero_copy in [true, true, false] {
        let block = decoder.next_block().unwrap().unwrap();
        assert_eq!(inside(&block.raw), zero_copy);
        let event = event(block.clone());
        assert!(block.raw.as_ptr_range().contains(&event.data.as_ptr()));
        assert!(event.event.is_none_or(|name| inside(&name)));
    }
}

// Field report T10: a large event in small chunks is searched twice at most and copied once at most.
#[test]
fn work_is_linear_in_the_input() {
    let limits = SseLimits { max_line: 2 << 20, max_event: 4 << 20 };
    for line in ["data: ", "data: a\ndata: b\r\n"] {
        let mut body = line.as_bytes().repeat(1_000_000 / line.len());
        body.extend(b"x\n\n");
        for size in [1024, 1] {
            work::take();
            assert_eq!(decode_with(limits, body.chunks(size)).blocks.len(), 1);
            let (scanned, copied) = work::take();
            assert!(scanned <= 2 * body.len(), "searched {scanned} of {}", body.len());
            assert!(copied <= body.len(), "copied {copied} of {}", body.len());
        }
        work::take();
        assert_eq!(decode_with(limits, [&body[..]]).blocks.len(), 1);
        assert_eq!(work::take().1, 0, "one chunk is never copied");
    }
}

// Prompts and outputs never reach logs: no Debug or Display prints a payload byte.
#[test]
fn debug_prints_lengths_only() {
    let mut printed = String::new();
    for body in [
        "event: SENTINEL\ndata: SENTINEL\n\n",
        "error: SENTINEL\n\n",
        ": SENTINEL\n\n",
        "SENTINEL: SENTINEL\n\n",
        "data: SENTINEL",
    ] {
        let mut decoder = SseDecoder::new(SseLimits::default());
        decoder.feed(Bytes::from(body));
        write!(printed, "{decoder:?}{:?}{:?}", decoder.next_block(), decoder.finish()).unwrap();
    }
    write!(printed, "{:?}{}", whole(b"data: SENTINEL\xFF\n\n"), SseError::InvalidUtf8).unwrap();
    assert!(!printed.contains("SENTINEL"), "{printed}");
    assert!(printed.contains("SseEvent { data_len: 8, event_len: Some(8)"), "{printed}");
    // `Bytes` may also print as numbers.
    assert!(!printed.contains("83, 69, 78"), "{printed}");
}
