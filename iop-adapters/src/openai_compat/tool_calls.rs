//! Decides which tool call a piece belongs to when servers give no index, reuse one, or change ids on the way.

use iop_execution::{ProviderError, ToolCallDelta};

use crate::chunk::{Arguments, CallPiece};
use crate::json::Text;

/// Most tool calls of one answer.
const MAX_CALLS: usize = 128;

/// The calls of one answer so far.
#[derive(Default)]
pub(super) struct ToolCalls {
    calls: Vec<Call>,
}

struct Call {
    index: Option<u64>,
    id: String,
    /// Its id is ours: the server gave none.
    made_up: bool,
}

impl ToolCalls {
    pub(super) const fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// The piece as the caller gets it: own indexes from 0, one stable id, arguments as text.
    pub(super) fn piece(&mut self, piece: &CallPiece<'_>) -> Result<ToolCallDelta, ProviderError> {
        let id = piece.id.as_ref().map(text);
        let name = piece.name.as_ref().map(text);
        let arguments = match &piece.arguments {
            Arguments::None => String::new(),
            Arguments::Text(arguments) => text(arguments),
            Arguments::Object(object) => String::from_utf8_lossy(object).into_owned(),
        };
        if let Some(at) = self.known(piece.index, id.as_deref(), name.is_some()) {
            return Ok(ToolCallDelta { index: index_of(at), id: None, name: None, arguments });
        }
        if self.calls.len() == MAX_CALLS {
            return Err(ProviderError::protocol("the provider's answer holds too many tool calls"));
        }
        let at = self.calls.len();
        let made_up = id.is_none();
        let id = id.unwrap_or_else(|| format!("call_{at}"));
        self.calls.push(Call { index: piece.index, id: id.clone(), made_up });
        Ok(ToolCallDelta { index: index_of(at), id: Some(id), name, arguments })
    }

    /// The call this piece goes on with; `None` when it begins a new one.
    fn known(&self, index: Option<u64>, id: Option<&str>, named: bool) -> Option<usize> {
        if let Some(id) = id
            && let Some(at) = self.calls.iter().position(|call| !call.made_up && call.id == id)
        {
            return Some(at);
        }
        let at_index = || self.calls.iter().rposition(|call| call.index == index);
        match (index, id, named) {
            // A name begins a call, and another id with a name another call, whatever its index says.
            (None, _, true) | (Some(_), Some(_), true) => None,
            // An id alone that nobody knows: some servers change the id from piece to piece.
            (Some(_), _, _) => at_index(),
            (None, _, false) => self.calls.len().checked_sub(1),
        }
    }
}

fn index_of(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

/// The characters of a string; halves of characters that servers split over pieces become U+FFFD.
pub(super) fn text(text: &Text<'_>) -> String {
    text.get().map_or_else(|| char::REPLACEMENT_CHARACTER.to_string(), std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk;

    type Expected<'a> = (u32, Option<&'a str>, Option<&'a str>, &'a str);

    fn read(pieces: &[&str]) -> Vec<ToolCallDelta> {
        let mut calls = ToolCalls::default();
        pieces
            .iter()
            .flat_map(|pieces| {
                let text = format!(r#"{{"choices":[{{"index":0,"delta":{{"tool_calls":[{pieces}]}}}}]}}"#);
                let chunk = chunk::read(text.as_bytes()).unwrap();
                chunk.choices[0].calls.iter().map(|piece| calls.piece(piece).unwrap()).collect::<Vec<_>>()
            })
            .collect()
    }

    #[test]
    fn every_piece_finds_its_call() {
        // ADP-3, API-9; field reports 20-22 of the surfaces' bug log
        let cases: [(&str, &[&str], &[Expected<'_>]); 7] = [
            (
                "as it should be",
                &[
                    r#"{"index":0,"id":"a","function":{"name":"f","arguments":""}}"#,
                    r#"{"index":0,"function":{"arguments":"{\"x\""}}"#,
                    r#"{"index":1,"id":"b","function":{"name":"g"}}"#,
                    r#"{"index":0,"function":{"arguments":":1}"}},{"index":1,"function":{"arguments":"{}"}}"#,
                ],
                &[
                    (0, Some("a"), Some("f"), ""),
                    (0, None, None, "{\"x\""),
                    (1, Some("b"), Some("g"), ""),
                    (0, None, None, ":1}"),
                    (1, None, None, "{}"),
                ],
            ),
            (
                "no index",
                &[
                    r#"{"id":"a","function":{"name":"f","arguments":"{"}},{"function":{"arguments":"}"}},{"id":"b","function":{"name":"f"}}"#,
                ],
                &[(0, Some("a"), Some("f"), "{"), (0, None, None, "}"), (1, Some("b"), Some("f"), "")],
            ),
            (
                "index reused",
                &[r#"{"index":0,"id":"a","function":{"name":"f"}}"#, r#"{"index":0,"id":"b","function":{"name":"g"}}"#],
                &[(0, Some("a"), Some("f"), ""), (1, Some("b"), Some("g"), "")],
            ),
            (
                "id and name repeated on every piece",
                &[
                    r#"{"index":0,"id":"a","function":{"name":"f","arguments":"{"}}"#,
                    r#"{"index":0,"id":"a","function":{"name":"f","arguments":"}"}}"#,
                ],
                &[(0, Some("a"), Some("f"), "{"), (0, None, None, "}")],
            ),
            (
                "id changes on the way",
                &[
                    r#"{"index":0,"id":"a","function":{"name":"f","arguments":"{"}}"#,
                    r#"{"index":0,"id":"b","function":{"arguments":"}"}}"#,
                ],
                &[(0, Some("a"), Some("f"), "{"), (0, None, None, "}")],
            ),
            (
                "object arguments",
                &[r#"{"index":3,"id":"a","function":{"name":"f","arguments":{"x": 1}}}"#],
                &[(0, Some("a"), Some("f"), "{\"x\": 1}")],
            ),
            (
                "neither index nor id",
                &[r#"{"function":{"name":"f","arguments":"{}"}},{"function":{"name":"g","arguments":"{}"}}"#],
                &[(0, Some("call_0"), Some("f"), "{}"), (1, Some("call_1"), Some("g"), "{}")],
            ),
        ];
        for (what, pieces, want) in cases {
            let got = read(pieces);
            let got: Vec<Expected<'_>> = got
                .iter()
                .map(|call| (call.index, call.id.as_deref(), call.name.as_deref(), call.arguments.as_str()))
                .collect();
            assert_eq!(got, want, "{what}");
        }
    }
}
