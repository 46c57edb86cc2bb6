use proptest::prelude::*;

use super::*;

/// Bodies as servers send them, and what is in them.
const RECORDED: [(&[u8], &[u8]); 6] = [
    (b"0\r\n\r\n", b""),
    (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
    (
        b"c\r\ndata: {\"a\"}\n\r\n2\r\n\n\r\r\nE\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
        b"data: {\"a\"}\n\n\rdata: [DONE]\n\n",
    ),
    (b"0005  \r\nhello\r\n1;name=\"v\"\r\n!\r\n000;last\r\n\r\n", b"hello!"),
    (b"a\r\n0123456789\r\n0\r\nX-Sum: 1\r\nX-Other:\r\n\r\n", b"0123456789"),
    (b"7\r\n0\r\n\r\n..\r\n1\r\n\r\r\n1\r\n\n\r\n0\r\n\r\n", b"0\r\n\r\n..\r\n"),
];

/// What the decoder makes of pieces: the payload, whether it is complete, and how much was the body's.
fn decode<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<(Vec<u8>, bool, usize), ChunkedError> {
    let (mut chunked, mut payload, mut used) = (Chunked::new(), Vec::new(), 0);
    for piece in pieces {
        let here = chunked.decode(piece, &mut payload)?;
        assert!(here == piece.len() || chunked.is_done());
        used += here;
    }
    Ok((payload, chunked.is_done(), used))
}

/// A whole body, decoded the slow and simple way.
fn naive(mut body: &[u8]) -> Vec<u8> {
    let mut payload = Vec::new();
    loop {
        let line = body.windows(2).position(|two| two == b"\r\n").unwrap();
        let digits: String =
            body[..line].iter().map(|&byte| byte as char).take_while(char::is_ascii_hexdigit).collect();
        let size = usize::from_str_radix(&digits, 16).unwrap();
        body = &body[line + 2..];
        if size == 0 {
            return payload;
        }
        payload.extend_from_slice(&body[..size]);
        body = &body[size + 2..];
    }
}

#[test]
fn every_split_of_a_body_gives_the_same_payload() {
    // ADP-1
    for (body, want) in RECORDED {
        let want = Ok((want.to_vec(), true, body.len()));
        assert_eq!(decode([body]), want);
        assert_eq!(decode(body.chunks(1)), want);
        for first in 0..=body.len() {
            for second in first..=body.len() {
                assert_eq!(decode([&body[..first], &body[first..second], &body[second..]]), want);
            }
        }
    }
}

#[test]
fn a_cut_body_is_never_done() {
    // ADP-1: a cut must not look complete
    for (body, _) in RECORDED {
        for length in 0..body.len() {
            let (_, done, used) = decode([&body[..length]]).unwrap();
            assert!(!done && used == length, "{:?}", String::from_utf8_lossy(&body[..length]));
        }
    }
}

#[test]
fn what_follows_a_body_is_not_taken() {
    for (body, want) in RECORDED {
        let more = [body, b"HTTP/1.1 200 OK"].concat();
        assert_eq!(decode([&more[..]]), Ok((want.to_vec(), true, body.len())));
    }
}

#[test]
fn the_end_can_be_only_between_chunks() {
    let mut chunked = Chunked::new();
    let mut payload = Vec::new();
    let mut at = |piece: &[u8]| {
        chunked.decode(piece, &mut payload).unwrap();
        chunked.is_between_chunks()
    };
    let places = [&b""[..], b"1", b"\r", b"\n", b"x", b"\r", b"\n", b"0", b"\r\n", b"\r\n"].map(&mut at);
    assert_eq!(places, [true, false, false, false, false, false, true, false, false, false]);
}

#[test]
fn malformed_bodies_are_refused_by_kind() {
    use ChunkedError::{End, Extension, Size, SizeOverflow, Trailers};
    let cases: [(&[u8], ChunkedError); 19] = [
        (b"\r\n", Size),
        (b"x\r\n", Size),
        (b"-1\r\n", Size),
        (b"+1\r\n", Size),
        (b" 1\r\n", Size),
        (b"0x1\r\n", Size),
        (b"1\n", Size),
        (b"1\rx", Size),
        (b"data: ", Size),
        (b"10000000000000000\r\n", SizeOverflow),
        (b"00000000000000000\r\n", SizeOverflow),
        (b"1;a\nx", Extension),
        (b"1\r\nxx", End),
        (b"1\r\nx\n", End),
        (b"1\r\nx\rx", End),
        (b"0\r\n\n", Trailers),
        (b"0\r\n\rx", Trailers),
        (b"0\r\nA: b\n", Trailers),
        (b"0\r\nA: b\rx", Trailers),
    ];
    for (body, want) in cases {
        assert_eq!(decode([body]), Err(want), "{:?}", String::from_utf8_lossy(body));
        assert_eq!(decode(body.chunks(1)), Err(want));
    }
    // The largest size there is needs no room.
    assert_eq!(decode([&b"ffffffffffffffff\r\nxy"[..]]), Ok((b"xy".to_vec(), false, 20)));
}

#[test]
fn what_is_skipped_is_bounded() {
    let body = |extension: u32, trailers: u32| {
        let pad = |count: u32| "x".repeat(count as usize);
        format!("1;{}\r\n.\r\n0\r\n{}\r\n\r\n", pad(extension), pad(trailers))
    };
    assert_eq!(
        decode([body(MAX_EXTENSION, MAX_TRAILERS).as_bytes()]).map(|(payload, done, _)| (payload.len(), done)),
        Ok((1, true))
    );
    assert_eq!(decode([body(MAX_EXTENSION + 1, 1).as_bytes()]), Err(ChunkedError::Extension));
    assert_eq!(decode([body(1, MAX_TRAILERS + 1).as_bytes()]), Err(ChunkedError::Trailers));
    // Per chunk: a long stream may have any number of them. Trailers are counted together.
    let many = format!("1;{}\r\n.\r\n", "x".repeat(100)).repeat(1000) + "0\r\n\r\n";
    assert_eq!(decode([many.as_bytes()]).map(|(payload, done, _)| (payload.len(), done)), Ok((1000, true)));
    let many = "0\r\n".to_owned() + &"x\r\n".repeat(MAX_TRAILERS as usize + 1);
    assert_eq!(decode([many.as_bytes()]), Err(ChunkedError::Trailers));
}

fn chunk() -> impl Strategy<Value = Vec<u8>> {
    let extension = prop_oneof![4 => Just(String::new()), 1 => "[ \t]{1,3}", 1 => ";[a-z=\"\r]{0,2}"];
    (prop::collection::vec(any::<u8>(), 1..300), 0..4usize, any::<bool>(), extension).prop_map(
        |(data, zeros, upper, extension)| {
            let extension = extension.replace('\r', "");
            let size = if upper { format!("{:X}", data.len()) } else { format!("{:x}", data.len()) };
            [format!("{}{size}{extension}\r\n", "0".repeat(zeros)).as_bytes(), &data, b"\r\n"].concat()
        },
    )
}

proptest! {
    #[test]
    fn it_agrees_with_a_naive_decoder(chunks in prop::collection::vec(chunk(), 0..8), step in 1..50usize) {
        let mut body = chunks.concat();
        body.extend_from_slice(b"0\r\n\r\n");
        let want = naive(&body);
        prop_assert_eq!(decode(body.chunks(step)), Ok((want.clone(), true, body.len())));
        prop_assert_eq!(decode([&body[..]]), Ok((want, true, body.len())));
    }

    #[test]
    fn no_bytes_panic_and_no_split_matters(
        body in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            "[0-9a-f; xX\r\n]{0,60}".prop_map(String::into_bytes),
            "([0-3]\r\n|[a-z]{1,3}|\r\n){0,30}".prop_map(String::into_bytes),
        ],
        step in 1..7usize,
    ) {
        let pieces = match decode(body.chunks(step)) {
            // Only the payload before an error may differ.
            Ok((payload, done, used)) => Ok((payload, done, used)),
            Err(error) => Err(error),
        };
        prop_assert_eq!(pieces, decode([&body[..]]));
    }
}
