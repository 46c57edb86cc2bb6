//! Decides which keys a config file may have: tables that check a file and print as JSON Schema.

use iop_edge_core::token::TokenId;
use serde_json::{Map, json};

use super::problem::{Problems, did_you_mean};
use super::secret;
use super::time::{self, Timestamp};
use super::tree::{Tree, Value};

/// What a value must look like.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// `ip:port`.
    Address,
    /// Address as text, or a mapping with an address and more.
    AddressOr(&'static Object),
    /// The word `auto`, or something else.
    AutoOr(&'static Self),
    /// `true` or `false`.
    Bool,
    /// One word of a list.
    Choice(&'static [&'static str]),
    /// One word of a list all of which is told to whoever writes another one.
    Closed(&'static Closed),
    /// `sha256:` and 64 hex digits, or a reference to a place that holds that.
    Hash,
    /// A whole number in a range.
    Integer {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
    },
    /// A whole number in a range that has negative ones too.
    Signed {
        /// Smallest.
        min: i64,
        /// Largest.
        max: i64,
    },
    /// A list of things of one kind.
    List(&'static Self),
    /// A mapping.
    Object(&'static Object),
    /// `env:NAME` or `file:PATH`: resolved on the Node.
    Reference,
    /// `file:PATH`, `env:NAME` or `command:PROGRAM ARGS`: resolved on the Edge.
    Secret,
    /// Text without control characters.
    Text,
    /// A point in time, RFC 3339.
    Time,
    /// The 8 letters and digits that name a token.
    TokenId,
}

/// A list of words, and what is said of words that can't be in it.
#[derive(Debug, Clone, Copy)]
pub struct Closed {
    /// The words.
    pub words: &'static [&'static str],
    /// Words that somebody may look for in vain, and why.
    pub never: &'static [(&'static str, &'static str)],
}

/// One key of a mapping.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// What its value must look like.
    pub kind: Kind,
    /// It must be there.
    pub required: bool,
    /// What it means, with unit and default.
    pub doc: &'static str,
}

/// A mapping.
#[derive(Debug, Clone, Copy)]
pub struct Object {
    /// What it describes, for people: "a provider".
    pub name: &'static str,
    /// Its keys.
    pub fields: &'static [Field],
}

/// A key that may be left out.
pub(crate) const fn optional(name: &'static str, kind: Kind, doc: &'static str) -> Field {
    Field { name, kind, required: false, doc }
}

/// A key that must be there.
pub(crate) const fn required(name: &'static str, kind: Kind, doc: &'static str) -> Field {
    Field { name, kind, required: true, doc }
}

/// Checks a file against its table, and reports everything that is wrong. Text of the form `${NAME}` is replaced from
/// the environment in place first.
pub fn check(tree: &mut Tree, object: &'static Object, problems: &mut Problems) {
    check_object(tree, object, problems);
}

fn check_object(tree: &mut Tree, object: &'static Object, problems: &mut Problems) {
    let at = tree.at;
    let Value::Map(entries) = &mut tree.value else {
        problems.error(at, format!("{} must be a mapping, not {}", object.name, tree.value.kind()), None);
        return;
    };
    for field in object.fields.iter().filter(|field| field.required) {
        if !entries.iter().any(|entry| entry.key == field.name) {
            problems.error(
                at,
                format!("{} needs the key `{}`", object.name, field.name),
                Some(format!("{}: {}", field.name, field.doc)),
            );
        }
    }
    for entry in entries {
        if let Some(field) = object.fields.iter().find(|field| field.name == entry.key) {
            check_value(&mut entry.value, &field.kind, field.name, problems);
        } else {
            let known: Vec<_> = object.fields.iter().map(|field| field.name).collect();
            problems.error(
                entry.at,
                format!("{} has no key `{}`", object.name, secret::without_tokens(&entry.key).escape_debug()),
                did_you_mean(&entry.key, &known),
            );
        }
    }
}

fn check_value(tree: &mut Tree, kind: &'static Kind, name: &str, problems: &mut Problems) {
    let at = tree.at;
    if !matches!(kind, Kind::Reference | Kind::Secret)
        && let Value::Text(text) = &mut tree.value
        && let Some(variable) = secret::variable(text)
    {
        match std::env::var(variable) {
            Ok(value) => *text = value,
            Err(_) => {
                let message = format!("`{name}` refers to the environment variable {variable}, which is not set");
                problems.error(at, message, Some(format!("set it: export {variable}=…")));
                return;
            }
        }
    }
    let wrong = |problems: &mut Problems, wanted: &str, found: &Value, hint: Option<String>| {
        problems.error(at, format!("`{name}` must be {wanted}, not {}", found.kind()), hint);
    };
    match (kind, &mut tree.value) {
        (Kind::Bool, Value::Bool(_)) => {}
        (Kind::Bool, other) => wrong(problems, "true or false", other, None),
        (Kind::Integer { min, max }, Value::Int(number)) => {
            if *number < i128::from(*min) || *number > i128::from(*max) {
                let hint = (*max != u64::MAX).then(|| format!("it goes from {min} to {max}"));
                problems.error(
                    at,
                    format!("`{name}` can't be {number}"),
                    hint.or_else(|| Some(format!("at least {min}"))),
                );
            }
        }
        (Kind::Signed { min, max }, Value::Int(number)) => {
            if *number < i128::from(*min) || *number > i128::from(*max) {
                problems.error(at, format!("`{name}` can't be {number}"), Some(format!("it goes from {min} to {max}")));
            }
        }
        (Kind::Integer { .. } | Kind::Signed { .. }, other) => wrong(problems, "a whole number", other, None),
        (Kind::List(inner), Value::List(items)) => {
            for item in items {
                check_value(item, inner, name, problems);
            }
        }
        (Kind::List(_), other) => wrong(problems, "a list", other, Some(format!("{name}: [ … ]"))),
        (Kind::Object(object), _) => check_object(tree, object, problems),
        (Kind::AddressOr(object), Value::Map(_)) => check_object(tree, object, problems),
        (Kind::AutoOr(_), Value::Text(text)) if text == "auto" => {}
        (Kind::AutoOr(inner), Value::Text(_)) => {
            let other = match inner {
                Kind::List(_) => "a list",
                _ => "a mapping",
            };
            problems.error(at, format!("`{name}` must be `auto` or {other}"), Some(format!("{name}: auto")));
        }
        (Kind::AutoOr(inner), _) => check_value(tree, inner, name, problems),
        (Kind::Address | Kind::AddressOr(_), Value::Text(text)) => check_address(text, name, at, problems),
        (Kind::Choice(words), Value::Text(text)) => {
            if !words.contains(&text.as_str()) {
                let message = format!("`{name}` can't be `{}`", text.escape_debug());
                problems.error(at, message, did_you_mean(text, words));
            }
        }
        (Kind::Closed(list), Value::Text(text)) => list.check(text, name, at, problems),
        (Kind::Hash, Value::Text(text)) => secret::check_hash(text, name, at, problems),
        (Kind::Reference, Value::Text(text)) => secret::check_reference(text, name, at, problems),
        (Kind::Secret, Value::Text(text)) => secret::check_secret(text, name, at, problems),
        (Kind::Text, Value::Text(text)) => check_text(text, name, at, problems),
        (Kind::Time, Value::Text(text)) => {
            if Timestamp::parse(text).is_none() {
                let message = format!("`{name}` must be a time (RFC 3339), not `{}`", text.escape_debug());
                problems.error(at, message, Some(format!("{name}: \"{}\"", time::EXAMPLE)));
            }
        }
        (Kind::TokenId, Value::Text(text)) => {
            if TokenId::parse(text).is_none() {
                let hint = "the 8 letters or digits between the two `_` of the token".to_owned();
                problems.error(at, format!("`{name}` is no token id"), Some(hint));
            }
        }
        (
            Kind::Text | Kind::Time | Kind::Choice(_) | Kind::Closed(_) | Kind::TokenId,
            other @ (Value::Int(_) | Value::Float(_) | Value::Bool(_)),
        ) => {
            wrong(problems, "text", other, Some("put it in quotes".to_owned()));
        }
        (
            Kind::Address
            | Kind::AddressOr(_)
            | Kind::Choice(_)
            | Kind::Closed(_)
            | Kind::Hash
            | Kind::Reference
            | Kind::Secret
            | Kind::Text
            | Kind::Time
            | Kind::TokenId,
            other,
        ) => {
            wrong(problems, "text", other, None);
        }
    }
}

impl Closed {
    fn check(&self, text: &str, name: &str, at: super::problem::Position, problems: &mut Problems) {
        if self.words.contains(&text) {
            return;
        }
        let message = match self.never.iter().find(|(word, _)| *word == text) {
            Some((word, why)) => format!("`{name}` never holds `{word}`: {why}"),
            None => format!("`{name}` can't hold `{}`", text.escape_debug()),
        };
        problems.error(at, message, Some(format!("it may hold: {}", self.words.join(", "))));
    }
}

fn check_text(text: &str, name: &str, at: super::problem::Position, problems: &mut Problems) {
    let problem = if text.is_empty() {
        "is empty"
    } else if text.len() > 4096 {
        "is longer than 4096 bytes"
    } else if text.chars().any(char::is_control) {
        "holds a control character"
    } else {
        return;
    };
    problems.error(at, format!("`{name}` {problem}"), None);
}

fn check_address(text: &str, name: &str, at: super::problem::Position, problems: &mut Problems) {
    if text.parse::<std::net::SocketAddr>().is_ok() {
        return;
    }
    let example = match text.rsplit_once(':') {
        Some(("localhost", port)) => format!("127.0.0.1:{port}"),
        Some(("" | "*", port)) => format!("0.0.0.0:{port}"),
        Some(_) | None => "127.0.0.1:8180".to_owned(),
    };
    let message = format!("`{name}` must be an IP address and a port, not `{}`", text.escape_debug());
    problems.error(at, message, Some(format!("for example {example}")));
}

/// The JSON Schema (draft 2020-12) of a file.
#[must_use]
pub fn json_schema(title: &str, object: &Object) -> serde_json::Value {
    let mut schema = object_schema(object);
    if let Some(map) = schema.as_object_mut() {
        map.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
        map.insert("title".to_owned(), json!(title));
    }
    schema
}

fn object_schema(object: &Object) -> serde_json::Value {
    let mut properties = Map::new();
    for field in object.fields {
        let mut schema = kind_schema(&field.kind);
        if let Some(map) = schema.as_object_mut() {
            map.insert("description".to_owned(), json!(field.doc));
        }
        properties.insert(field.name.to_owned(), schema);
    }
    let required: Vec<_> = object.fields.iter().filter(|field| field.required).map(|field| field.name).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn kind_schema(kind: &Kind) -> serde_json::Value {
    match kind {
        Kind::Address => json!({"type": "string", "pattern": "^(.+:[0-9]{1,5}|\\$\\{.+\\})$"}),
        Kind::AddressOr(object) => json!({"anyOf": [kind_schema(&Kind::Address), object_schema(object)]}),
        Kind::AutoOr(inner) => json!({"anyOf": [{"const": "auto"}, kind_schema(inner)]}),
        Kind::Bool => json!({"type": "boolean"}),
        Kind::Choice(words) => json!({"enum": words}),
        Kind::Closed(list) => json!({"enum": list.words}),
        Kind::Hash => json!({"type": "string", "pattern": "^(sha256:[0-9a-f]{64}|\\$\\{.+\\}|file:.+)$"}),
        Kind::Integer { min, max } if *max == u64::MAX => json!({"type": "integer", "minimum": min}),
        Kind::Integer { min, max } => json!({"type": "integer", "minimum": min, "maximum": max}),
        Kind::Signed { min, max } => json!({"type": "integer", "minimum": min, "maximum": max}),
        Kind::List(inner) => json!({"type": "array", "items": kind_schema(inner)}),
        Kind::Object(object) => object_schema(object),
        Kind::Reference => json!({"type": "string", "pattern": "^(env|file):.+$"}),
        Kind::Secret => json!({"type": "string", "pattern": "^(env|file|command):.+$"}),
        Kind::TokenId => json!({"type": "string", "pattern": "^([0-9A-Za-z]{8}|\\$\\{.+\\})$"}),
        Kind::Text => json!({"type": "string", "minLength": 1}),
        Kind::Time => json!({"type": "string", "format": "date-time"}),
    }
}
