//! Decides what the demo says, word by word: pleasant, useful to a newcomer, and a function of the request.

use iop_execution::ChatInput;
use serde_json::Value;

/// Longest part of a message that is repeated, in characters.
const MAX_QUOTE: usize = 200;
/// Longest token, in characters.
const MAX_TOKEN: usize = 12;

const OPENINGS: [&str; 4] = ["Hello!", "Hi there.", "Good to hear from you.", "Thanks for writing."];
const FACTS: [&str; 4] = [
    "It has no weights and knows nothing, but every word took the same way as a real model's: from a provider on a Node, \
     over one connection to the Edge, and through the OpenAI API to you.",
    "Nothing was computed on a GPU. What you see work is the path: your client, the Edge, the Node, and this provider at its \
     end, with each word sent on as soon as it was there.",
    "Start a model server such as Ollama, llama.cpp, vLLM or LM Studio on this machine, start IOP again, and its models \
     appear beside this one, under the same address.",
    "Close the connection while I speak and I stop at once: that is how a real model would be told to free its place.",
];
const HINTS: [&str; 4] = [
    "Try `reasoning_effort` to see me think first.",
    "Give me a tool and write \"call\" and its name to see a tool call, or ask about the weather with `get_weather` at hand.",
    "Set `max_tokens` to 5 to see an answer that ends with `length`.",
    "Send the same message again: the answer will be the same, word for word.",
];
const THOUGHTS: [&str; 3] = [
    "A real model would now weigh what that could mean.",
    "I only count words and choose among a few sentences, always the same for the same message.",
    "Time to answer.",
];

/// FNV-1a: small, fixed for ever, the same everywhere.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn pick<'a>(from: &[&'a str], hash: u64, salt: u32) -> &'a str {
    let at = (hash >> salt) % from.len().max(1) as u64;
    from.get(usize::try_from(at).unwrap_or(0)).copied().unwrap_or_default()
}

pub(super) fn last_user_message(input: &ChatInput) -> String {
    input
        .messages()
        .iter()
        .rev()
        .find(|message| message.role == "user")
        .map(|message| message.text())
        .unwrap_or_default()
}

fn quote(text: &str) -> String {
    let mut quote: String = text.trim().chars().take(MAX_QUOTE).collect();
    if quote.len() < text.trim().len() {
        quote.push('…');
    }
    quote
}

/// The answer in prose.
pub(super) fn answer(input: &ChatInput, message: &str) -> String {
    let hash = hash(message);
    let opening = pick(&OPENINGS, hash, 0);
    if let Some(last) = input.messages().last().filter(|last| last.role == "tool") {
        return format!(
            "{opening} The tool answered: {}. That is all the demo model does with it.",
            quote(&last.text())
        );
    }
    let said = match message.trim() {
        "" => "You sent no text.".to_owned(),
        _ => format!("You said: “{}”.", quote(message)),
    };
    let (fact, hint) = (pick(&FACTS, hash, 8), pick(&HINTS, hash, 16));
    format!("{opening} {said} This answer comes from iop-demo, the demo model that is built into IOP. {fact}\n\n{hint}")
}

/// What the demo thinks first; more of it with more effort.
pub(super) fn reasoning(message: &str, effort: &str) -> String {
    let words = message.split_whitespace().count();
    let thoughts = match effort {
        "minimal" | "low" => 0,
        "medium" => 2,
        _ => THOUGHTS.len(),
    };
    let mut text = format!("The message has {words} {}.", if words == 1 { "word" } else { "words" });
    for thought in THOUGHTS.iter().take(thoughts) {
        text.push(' ');
        text.push_str(thought);
    }
    text
}

/// The text up to the first stop sequence.
pub(super) fn cut_at_stop(mut text: String, stops: &[&str]) -> String {
    let at = stops.iter().filter(|stop| !stop.is_empty()).filter_map(|stop| text.find(stop)).min();
    if let Some(at) = at {
        text.truncate(at);
    }
    text
}

pub(super) fn name_of(function: &Value) -> &str {
    function.get("name").and_then(Value::as_str).unwrap_or_default()
}

/// Shortest word of a tool's name that calls it.
const TELLING_WORD: usize = 5;

/// True if the message says `call <name>`, or a longer word of the name such as `weather` of `get_weather`, in any case.
pub(super) fn asks_to_call(message: &str, name: &str) -> bool {
    let telling =
        |word: &str| word.len() >= TELLING_WORD && name.split(['_', '-']).any(|part| part.eq_ignore_ascii_case(word));
    if message.split(|c: char| !c.is_alphanumeric()).any(telling) {
        return true;
    }
    let mut words =
        message.split_whitespace().map(|word| word.trim_matches(|c: char| c.is_ascii_punctuation() && c != '_'));
    !name.is_empty()
        && std::iter::from_fn(|| {
            words.by_ref().find(|word| word.eq_ignore_ascii_case("call")).map(|_| words.clone().next())
        })
        .any(|next| next == Some(name))
}

pub(super) fn call_id(name: &str, arguments: &str) -> String {
    format!("call_{:016x}", hash(name) ^ hash(arguments).rotate_left(1))
}

/// The tokens of a text: words with the white space behind them, long words in pieces. Joined they are the text.
pub(super) fn tokens(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let mut in_space = false;
        let end = rest
            .char_indices()
            .enumerate()
            .find(|(count, (_, c))| {
                let ends = (in_space && !c.is_whitespace()) || *count == MAX_TOKEN;
                in_space = c.is_whitespace();
                ends
            })
            .map_or(rest.len(), |(_, (at, _))| at);
        let (token, tail) = rest.split_at(end);
        rest = tail;
        (!token.is_empty()).then_some(token)
    })
}
