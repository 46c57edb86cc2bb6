use proptest::prelude::*;

use super::*;

const CONTENT: FrameFlags = FrameFlags::CONTENT;

fn renamer() -> Rewrite {
    Rewrite::new(Some("\"public\"".into()), true, Form::Chat)
}

fn one(rewrite: &mut Rewrite, text: &str, flags: FrameFlags) -> Option<String> {
    rewrite.events(Bytes::copy_from_slice(text.as_bytes()), flags).map(|b| String::from_utf8(b.to_vec()).unwrap())
}

#[test]
fn only_the_value_of_the_top_level_model_changes() {
    // API-10 a
    for (event, want) in [
        ("data: {\"id\":1,\"model\":\"t\",\"x\":0.10}\n\n", "data: {\"id\":1,\"model\":\"public\",\"x\":0.10}\n\n"),
        (
            "data:{\"choices\":[{\"delta\":{\"model\":\"t\"}}],\"model\" : \"t\\\"\"}\r\n\r\n",
            "data:{\"choices\":[{\"delta\":{\"model\":\"t\"}}],\"model\" : \"public\"}\r\n\r\n",
        ),
        (
            "id: 7\rdata: {\rdata: \"model\":\rdata: \"t\"}\r\r",
            "id: 7\rdata: {\rdata: \"model\":\rdata: \"public\"}\r\r",
        ),
        (
            "data: {\"model\":\"t\"}\n\n: ping\n\ndata: {\"model\":\"u\"}\n\n",
            "data: {\"model\":\"public\"}\n\n: ping\n\ndata: {\"model\":\"public\"}\n\n",
        ),
        ("data: {\"model\":null}\n\n", "data: {\"model\":null}\n\n"),
        ("data: {\"model\":\"public\"}\n\n", "data: {\"model\":\"public\"}\n\n"),
        ("data: {\"a\":\"model\"}\n\n", "data: {\"a\":\"model\"}\n\n"),
    ] {
        assert_eq!(one(&mut renamer(), event, CONTENT).as_deref(), Some(want));
    }
}

#[test]
fn what_needs_no_edit_is_not_copied() {
    // API-10
    for (mut rewrite, text) in [
        (Rewrite::new(None, true, Form::Chat), "data: {\"model\":\"t\"}\r\n\r\n"),
        (renamer(), "data: {\"model\":\"public\"}\n\n"),
        (renamer(), "data: {\"choices\":[]}\n\n"),
    ] {
        let bytes = Bytes::copy_from_slice(text.as_bytes());
        let out = rewrite.events(bytes.clone(), CONTENT).unwrap();
        assert_eq!(out.as_ptr(), bytes.as_ptr());
        assert_eq!(rewrite.edits(), Edits::default());
    }
}

#[test]
fn events_that_begin_alike_are_edited_alike() {
    // API-10 a
    let mut rewrite = renamer();
    let event = |text: &str, model: &str| format!("data: {{\"id\":\"c\",\"model\":\"{model}\",\"d\":\"{text}\"}}\n\n");
    for text in ["a", "b", "model"] {
        assert_eq!(one(&mut rewrite, &event(text, "t"), CONTENT), Some(event(text, "public")));
    }
    let two = event("a", "t") + &event("b", "t");
    assert_eq!(one(&mut rewrite, &two, CONTENT), Some(two.replace("\"t\"", "\"public\"")));
    assert_eq!(one(&mut rewrite, &event("a", "tt"), CONTENT), Some(event("a", "public")));
    assert_eq!(rewrite.edits().count(Edit::Model), 6);
}

#[test]
fn a_mark_and_blocks_without_data_never_reach_a_client() {
    // API-10 b
    let mut rewrite = renamer();
    assert_eq!(one(&mut rewrite, "\u{feff}: hi\n\n", FrameFlags::NONE).as_deref(), Some(": hi\n\n"));
    assert_eq!(one(&mut rewrite, "retry: 5\n\n", FrameFlags::NONE), None);
    assert_eq!(one(&mut rewrite, "data: \n\n", FrameFlags::NONE), None);
    assert_eq!(one(&mut rewrite, ": a\n\nid: 1\n\n:b\r\n\r\n", FrameFlags::NONE).as_deref(), Some(": a\n\n:b\r\n\r\n"));
    assert_eq!(one(&mut rewrite, ":\n\n", FrameFlags::NONE).as_deref(), Some(":\n\n"));
    assert_eq!(one(&mut rewrite, "1: 2\n\n", FrameFlags::NONE), None, "a field needs no letters");
    assert_eq!(one(&mut rewrite, "\u{feff}: hi\n\n", FrameFlags::NONE), None, "a mark in the middle is none");
    assert_eq!((rewrite.edits().count(Edit::Bom), rewrite.edits().count(Edit::NoData)), (1, 5));
    let mut rewrite = Rewrite::new(None, true, Form::Chat);
    assert_eq!(one(&mut rewrite, "\u{feff}data: {}\n\n", CONTENT).as_deref(), Some("data: {}\n\n"));
}

#[test]
fn a_usage_report_passes_only_if_asked_for_and_with_its_choices() {
    // API-4, API-10 d
    let usage = FrameFlags::USAGE;
    let mut unasked = Rewrite::new(None, false, Form::Chat);
    assert_eq!(one(&mut unasked, "data: {\"choices\":[],\"usage\":{}}\n\n", usage), None);
    assert_eq!(unasked.edits().count(Edit::UsageDropped), 1);
    for (event, want) in [
        ("data: {\"choices\":[],\"usage\":{}}\n\n", "data: {\"choices\":[],\"usage\":{}}\n\n"),
        ("data: {\"usage\":{\"choices\":1}}\n\n", "data: {\"choices\":[],\"usage\":{\"choices\":1}}\n\n"),
        ("data: {\"choices\": null ,\"usage\":{}}\n\n", "data: {\"choices\": [] ,\"usage\":{}}\n\n"),
        (
            "data: {\"usage\":1}\n\ndata: {\ndata: \"usage\":2}\r\n\r\n",
            "data: {\"choices\":[],\"usage\":1}\n\ndata: {\"choices\":[],\ndata: \"usage\":2}\r\n\r\n",
        ),
    ] {
        assert_eq!(one(&mut Rewrite::new(None, true, Form::Chat), event, usage).as_deref(), Some(want));
    }
}

#[test]
fn the_first_event_of_a_frame_ends_with_its_blank_line() {
    // API-6
    for (frame, want) in [
        ("data: [DONE]\n\n", "data: [DONE]\n\n"),
        ("data: [DONE]\r\n\r\ndata: x\r\n\r\n", "data: [DONE]\r\n\r\n"),
        ("\ndata: [DONE]\r\rdata: x\r\r", "\ndata: [DONE]\r\r"),
    ] {
        assert_eq!(first_event(&Bytes::copy_from_slice(frame.as_bytes())), want);
    }
}

proptest! {
    #[test]
    fn renaming_changes_nothing_else(
        id in "[a-z]{0,3}", model in "\\PC{0,6}", text in "\\PC{0,8}", end in prop::sample::select(vec!["\n", "\r\n", "\r"]),
        count in 1usize..4, choices_first in any::<bool>(),
    ) {
        // API-10 a
        let (model, text) = (super::super::edit::quoted(&model), super::super::edit::quoted(&text));
        let event = |model: &str| {
            let choices = format!("\"choices\":[{{\"delta\":{{}},\"model\":1,\"t\":{text}}}]");
            let rest = format!("\"id\":\"{id}\",\"model\":{model}");
            let json = if choices_first { format!("{choices},{rest}") } else { format!("{rest},{choices}") };
            format!("data: {{{json}}}{end}{end}")
        };
        let (frame, want) = (event(&model).repeat(count), event("\"public\"").repeat(count));
        let mut rewrite = renamer();
        prop_assert_eq!(one(&mut rewrite, &frame, CONTENT), Some(want.clone()));
        prop_assert_eq!(one(&mut rewrite, &frame, CONTENT), Some(want));
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(prop::sample::select(b"data: {}[]\"model:\\,choices\r\n\xef\xbb\xbf".to_vec()), 0..80), bits in 0u32..64) {
        if let Some(flags) = FrameFlags::from_wire(bits) {
            let mut rewrite = renamer();
            let _ = rewrite.events(bytes.clone().into(), flags);
            let _ = rewrite.events(bytes.into(), flags);
        }
    }
}
