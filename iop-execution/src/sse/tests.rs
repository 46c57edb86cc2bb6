//! What blocks mean, requirement by requirement (surfaces.md section 3.8). Limits, ends and cost are in `bounds`.

mod bounds;
mod equivalence;

use super::*;

/// Counts what the decoder does with its input, so that a test of cost needs no clock.
pub(super) mod work {
    use std::cell::Cell;

    thread_local! {
        static SCANNED: Cell<usize> = const { Cell::new(0) };
        static COPIED: Cell<usize> = const { Cell::new(0) };
    }

    pub(in crate::sse) fn scanned(bytes: usize) {
        SCANNED.set(SCANNED.get() + bytes);
    }

    pub(in crate::sse) fn copied(bytes: usize) {
        COPIED.set(COPIED.get() + bytes);
    }

    /// Bytes searched and bytes copied by this thread since the last call.
    pub(super) fn take() -> (usize, usize) {
        (SCANNED.take(), COPIED.take())
    }
}

/// All that one body gives.
#[derive(Debug, PartialEq)]
struct Decoded {
    blocks: Vec<Block>,
    error: Option<SseError>,
    end: SseEnd,
}

impl Decoded {
    fn contents(&self) -> Vec<BlockContent> {
        self.blocks.iter().map(|block| block.content.clone()).collect()
    }

    /// Data of the events, as text.
    fn data(&self) -> Vec<&str> {
        self.blocks
            .iter()
            .filter_map(|block| match &block.content {
                BlockContent::Event(event) => Some(std::str::from_utf8(&event.data).unwrap()),
                _ => None,
            })
            .collect()
    }

    /// The bytes of all blocks and of the end.
    fn raw(&self) -> Vec<u8> {
        let rest = match &self.end {
            SseEnd::Clean { tail } => tail.clone(),
            SseEnd::Truncated { raw, .. } => raw.clone(),
            SseEnd::Failed(_) => Bytes::new(),
        };
        let blocks = self.blocks.iter().flat_map(|block| block.raw.to_vec());
        blocks.chain(rest).collect()
    }
}

/// Feeds chunk by chunk and takes every block as soon as it can be had.
fn decode_with<'a>(limits: SseLimits, chunks: impl IntoIterator<Item = &'a [u8]>) -> Decoded {
    let mut decoder = SseDecoder::new(limits);
    let (mut blocks, mut error) = (Vec::new(), None);
    for chunk in chunks {
        decoder.feed(Bytes::copy_from_slice(chunk));
        while let Some(next) = decoder.next_block() {
            match next {
                Ok(block) => blocks.push(block),
                Err(found) => assert_eq!(error.replace(found), None, "an error comes once"),
            }
        }
    }
    let end = decoder.finish();
    assert_eq!(decoder.pending_bytes(), 0);
    Decoded { blocks, error, end }
}

fn decode<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Decoded {
    decode_with(SseLimits::default(), chunks)
}

fn whole(body: &[u8]) -> Decoded {
    decode([body])
}

/// The only block of `body`, which must hold nothing else.
fn only(body: &[u8]) -> Block {
    let mut decoded = whole(body);
    assert_eq!(decoded.error, None);
    assert_eq!(decoded.end, SseEnd::Clean { tail: Bytes::new() });
    assert_eq!(decoded.blocks.len(), 1, "{:?}", decoded.blocks);
    decoded.blocks.remove(0)
}

fn event(block: Block) -> SseEvent {
    match block.content {
        BlockContent::Event(event) => event,
        other => panic!("no event: {other:?}"),
    }
}

// API-11: LF, CRLF and lone CR end a line, also mixed in one block.
#[test]
fn every_line_terminator_ends_lines_and_blocks() {
    for body in [
        "data: a\n\ndata: b\n\n",
        "data: a\r\n\r\ndata: b\r\n\r\n",
        "data: a\r\rdata: b\r\r",
        "data: a\r\n\ndata: b\n\r\n",
        "data: a\n\rdata: b\r\r\n",
    ] {
        let decoded = whole(body.as_bytes());
        assert_eq!(decoded.data(), ["a", "b"], "{body:?}");
        assert_eq!(decoded.blocks.len(), 2, "{body:?}");
        assert_eq!(decoded.raw(), body.as_bytes());
    }
}

// API-11: CR | LF over two reads is one terminator. The block is not held back for the LF, and the LF is
// neither lost nor a block of its own.
#[test]
fn a_block_that_ends_in_cr_is_given_out_before_its_lf_arrives() {
    let mut decoder = SseDecoder::new(SseLimits::default());
    decoder.feed(Bytes::from("data: a\r\n\r"));
    let first = decoder.next_block().unwrap().unwrap();
    assert_eq!(first.raw, "data: a\r\n\r");
    assert_eq!(event(first).data, "a");
    assert_eq!(decoder.pending_bytes(), 0);

    decoder.feed(Bytes::from("\n"));
    assert_eq!(decoder.next_block(), None);
    assert_eq!(decoder.pending_bytes(), 1);

    decoder.feed(Bytes::from("data: b\n\n"));
    let second = decoder.next_block().unwrap().unwrap();
    assert_eq!(second.raw, "\ndata: b\n\n");
    let second = event(second);
    assert_eq!((&*second.data, second.data_lines, second.data_offset), (&b"b"[..], 1, Some(7)));
}

// API-11: the same LF at the very end of the body makes it no truncated one.
#[test]
fn a_swallowed_lf_at_the_end_is_a_clean_end() {
    let decoded = decode([&b"data: a\r\n\r"[..], b"\n"]);
    assert_eq!(decoded.data(), ["a"]);
    assert_eq!(decoded.end, SseEnd::Clean { tail: Bytes::from("\n") });
    // Two line feeds: the second one is a blank line.
    let decoded = decode([&b"data: a\r\n\r"[..], b"\n\n"]);
    assert_eq!(decoded.contents()[1..], [BlockContent::Blank]);
    assert_eq!(decoded.blocks[1].raw, "\n\n");
}

// API-11, API-10 b; bug 5: one BOM is stripped for parsing, stays in `raw`, and is reported.
#[test]
fn one_byte_order_mark_is_stripped_for_parsing_only() {
    let body = b"\xEF\xBB\xBFdata: a\n\ndata: b\n\n";
    let decoded = whole(body);
    assert_eq!(decoded.data(), ["a", "b"]);
    assert_eq!(decoded.raw(), body);
    let [first, second] = &decoded.blocks[..] else { panic!("two blocks") };
    assert!(first.bom && !second.bom);
    assert_eq!(first.without_bom(), "data: a\n\n");
    assert_eq!(second.without_bom(), second.raw);
    assert_eq!(event(first.clone()).data_offset, Some(9));

    // Only one, and only at the very beginning: elsewhere it is part of an unknown field's name.
    assert_eq!(only(b"\xEF\xBB\xBF\xEF\xBB\xBFdata: a\n\n").content, BlockContent::NoData);
    let later = whole(b"data: a\n\n\xEF\xBB\xBFdata: b\n\n");
    assert_eq!(later.contents()[1], BlockContent::NoData);
    assert!(!later.blocks[1].bom);
    assert_eq!(later.blocks[1].without_bom(), later.blocks[1].raw);
    assert_eq!(only(b"x\n\xEF\xBB\xBFdata: b\n\n").content, BlockContent::NoData);
}

// API-11: a mark before a comment or a blank line is a mark all the same.
#[test]
fn a_byte_order_mark_may_stand_before_anything() {
    let blank = only(b"\xEF\xBB\xBF\n");
    assert_eq!((blank.content, blank.bom), (BlockContent::Blank, true));
    let later = only(b"\xEF\xBB\xBF: hi\ndata: a\n\n");
    assert!(later.bom);
    assert_eq!(event(later).data_offset, Some(14));
    let alone = whole(b"\xEF\xBB\xBF");
    assert!(matches!(alone.end, SseEnd::Truncated { content: Ok(BlockContent::Blank), .. }));
}

// API-11: multi-line data is joined with LF; the offset is for contiguous data only.
#[test]
fn data_lines_are_joined_with_a_line_feed() {
    let single = event(only(b"id: 1\r\ndata: {\"a\":1}\r\n\r\n"));
    assert_eq!(single.data, "{\"a\":1}");
    assert_eq!((single.data_lines, single.data_offset), (1, Some(13)));

    let joined = event(only(b"data: {\ndata\ndata:}\n\n"));
    assert_eq!(joined.data, "{\n\n}");
    assert_eq!((joined.data_lines, joined.data_offset), (3, None));
}

// API-11: the colon needs no space, and takes one space only.
#[test]
fn one_optional_space_follows_the_colon() {
    for (body, data) in [
        (&b"data:a\n\n"[..], "a"),
        (b"data: a\n\n", "a"),
        (b"data:  a \n\n", " a "),
        (b"data:\ta\n\n", "\ta"),
        (b"data::a\n\n", ":a"),
    ] {
        let block = only(body);
        let offset = event(block.clone()).data_offset.unwrap();
        assert_eq!(block.raw.slice(offset..offset + data.len()), data);
        assert_eq!(event(block).data, data);
    }
}

// API-11; bug 6: comments, unknown fields, id and retry are ignored; names are exact.
#[test]
fn other_fields_and_comments_are_ignored() {
    let body = b": c\nid: 1\nretry: 2\nfoo\n data: x\ndatax: x\nData: x\ndata: a\n:\n\n";
    assert_eq!(event(only(body)).data, "a");
    for body in [&b"retry: 3000\n\n"[..], b"id: 7\n\n", b"foo: bar\n\n", b": c\nevent: x\n\n"] {
        assert_eq!(only(body).content, BlockContent::NoData, "{body:?}");
    }
}

// API-11: no event for empty data, with or without a name.
#[test]
fn empty_data_is_no_event() {
    for body in [&b"data\n\n"[..], b"data:\n\n", b"data: \n\n", b"event: x\ndata: \n\n"] {
        assert_eq!(only(body).content, BlockContent::NoData, "{body:?}");
    }
}

// EXE-12; bugs 7, 8 and 9: comments and blank lines are blocks of their own kind.
#[test]
fn comments_and_blank_lines_are_told_apart_from_events() {
    for body in [&b": OPENROUTER PROCESSING\n\n"[..], b":\n\n", b": a\r\n: b\r\n\r\n"] {
        assert_eq!(only(body).content, BlockContent::Comment, "{body:?}");
    }
    let decoded = whole(b"\n\r\n\rdata: a\n\n\n");
    let [BlockContent::Blank, BlockContent::Blank, BlockContent::Blank, last @ ..] = &decoded.contents()[..] else {
        panic!("{decoded:?}")
    };
    assert!(matches!(last, [BlockContent::Event(_), BlockContent::Blank]));
}

// API-11: the last event name counts, an empty one is none.
#[test]
fn the_event_name_is_the_last_one() {
    let name = |body| event(only(body)).event;
    assert_eq!(name(b"event: error\ndata: a\n\n"), Some(Bytes::from("error")));
    assert_eq!(name(b"event: x\ndata: a\nevent: y\n\n"), Some(Bytes::from("y")));
    assert_eq!(name(b"event: x\nevent\ndata: a\n\n"), None);
    assert_eq!(name(b"data: a\n\n"), None);
}

// API-10 c; surfaces.md section 3.3: the field no SDK sees is surfaced, also beside data.
#[test]
fn an_error_field_is_surfaced() {
    let error = |text: &'static str| BlockContent::ErrorField(Bytes::from(text));
    assert_eq!(only(b"error: {\"code\":500}\n\n").content, error("{\"code\":500}"));
    assert_eq!(only(b"error:{\nerror: }\n\n").content, error("{\n}"));
    assert_eq!(only(b"data: a\nerror: b\n\n").content, error("b"));
    assert_eq!(only(b"error\n\n").content, BlockContent::NoData);
    assert_eq!(event(only(b"event: error\ndata: a\n\n")).data, "a");
}

// API-11: `[DONE]` is compared after trimming, and does not end the decoding.
#[test]
fn done_is_recognised_and_events_after_it_still_come() {
    let done = |body| event(only(body)).is_done();
    assert!(done(b"data: [DONE]\n\n") && done(b"data:[DONE]\n\n") && done(b"data:   [DONE] \t\n\n"));
    assert!(!done(b"data: [DONE\n\n") && !done(b"data: \"[DONE]\"\n\n"));
    assert_eq!(whole(b"data: [DONE]\n\ndata: a\n\n").data(), ["[DONE]", "a"]);
}

// API-11; bugs 1 and 2: characters may be split over chunks; only invalid data is an error, and a typed one.
#[test]
fn invalid_utf8_in_data_is_a_typed_error() {
    let text = "data: né 日本 🦀\n\n";
    let chunks = text.as_bytes().chunks(1);
    assert_eq!(decode(chunks).data(), ["né 日本 🦀"]);

    let decoded = whole(b"data: a\n\ndata: \xFF\n\ndata: b\n\n");
    assert_eq!((decoded.data(), decoded.error), (vec!["a"], Some(SseError::InvalidUtf8)));
    assert_eq!(decoded.end, SseEnd::Failed(SseError::InvalidUtf8));
    // A character is not split over lines.
    assert_eq!(whole(b"data: \xC3\ndata: \xA9\n\n").error, Some(SseError::InvalidUtf8));
    assert_eq!(whole(b"error: \xC3\n\n").error, Some(SseError::InvalidUtf8));
    // What is no data is not looked at.
    assert_eq!(whole(b": \xFF\nfoo: \xFF\ndata: a\n\n").data(), ["a"]);
}

// API-10: frames of whole blocks are read without a decoder; what is no whole block is an error.
#[test]
fn split_blocks_reads_whole_blocks() {
    let frame = Bytes::from("data: a\r\n\r\n: c\n\ndata: b\r\r");
    let blocks: Vec<Block> = split_blocks(&frame).map(Result::unwrap).collect();
    assert_eq!(blocks.iter().flat_map(|block| block.raw.clone()).collect::<Vec<_>>(), frame);
    assert_eq!(blocks.len(), 3);
    assert!(frame.as_ptr_range().contains(&blocks[2].raw.as_ptr()));

    let errors = |body: &'static [u8]| -> Vec<Option<SseError>> {
        split_blocks(&Bytes::from_static(body)).map(Result::err).collect()
    };
    assert_eq!(errors(b""), []);
    assert_eq!(errors(b"data: a\n\ndata: b\n"), [None, Some(SseError::Unterminated)]);
    assert_eq!(errors(b"\xEF\xBB\xBF: c"), [Some(SseError::Unterminated)]);
    assert_eq!(errors(b"data: \xFF\n\ndata: b\n\n"), [Some(SseError::InvalidUtf8)]);
}
