use std::collections::HashSet;

use crate::sse::{BlockContent, split_blocks};
use crate::testkit::cases::{CaseEnd, TEXT, chat_case, chat_cases};

#[test]
fn there_are_87_cases_with_names_of_their_own() {
    // EXE-15
    let cases = chat_cases();
    assert_eq!(cases.len(), 87);
    assert_eq!(cases.iter().map(|case| case.name).collect::<HashSet<_>>().len(), 87);
    let count = |end| cases.iter().filter(|case| case.stream.end == end).count();
    assert_eq!((count(CaseEnd::Ok), count(CaseEnd::Error), count(CaseEnd::Stall)), (46, 38, 3));
    for case in &cases {
        assert!(case.stream.text.is_empty() || case.stream.text == TEXT);
        assert!(chat_case(case.name).is_some());
    }
    assert!(chat_case("nope").is_none());
}

#[test]
fn cases_hold_the_bytes_their_names_promise() {
    // EXE-15: a case that lost its oddity tests nothing
    let body = |name: &str| chat_case(name).unwrap().answer.body();
    let writes = |name: &str| chat_case(name).unwrap().answer.steps.len();
    assert!(body("crlf").windows(4).any(|bytes| bytes == b"\r\n\r\n") && !body("cr").contains(&b'\n'));
    assert!(body("bom").starts_with(b"\xef\xbb\xbf"));
    assert!(!body("nospace").windows(6).any(|bytes| bytes == b"data: "));
    assert_eq!(writes("byte_by_byte"), body("byte_by_byte").len());
    assert!(body("gzip_json").starts_with(&[0x1f, 0x8b]));
    assert_eq!(body("ok_one_write"), body("byte_by_byte"));
    let whole: Vec<_> = split_blocks(&body("multiline_data")).map(Result::unwrap).collect();
    assert!(whole.iter().any(|block| matches!(&block.content, BlockContent::Event(event) if event.data_lines > 5)));
    let halves = &chat_case("utf8_split").unwrap().answer.steps;
    let valid = halves.iter().filter(|step| match step {
        crate::testkit::backend::Step::Write(bytes) => std::str::from_utf8(bytes).is_ok(),
        _ => true,
    });
    assert_eq!(valid.count(), halves.len() - 2);
}
