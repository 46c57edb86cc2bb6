//! Decides how a YAML file is read: a tree in which every key and value knows its line.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};

use super::problem::{Position, Problems};

/// Largest config file, in bytes.
pub const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// A value and where it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Tree {
    /// The value.
    pub value: Value,
    /// Where it begins.
    pub at: Position,
}

/// A YAML value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `true` or `false`.
    Bool(bool),
    /// A number that is not an integer.
    Float(f64),
    /// An integer.
    Int(i128),
    /// A list.
    List(Vec<Tree>),
    /// Keys and values in file order.
    Map(Vec<Entry>),
    /// Nothing.
    Null,
    /// Text.
    Text(String),
}

/// One key with its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key stands.
    pub at: Position,
    /// The value.
    pub value: Tree,
}

impl Value {
    /// What it is, for people.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Bool(_) => "true or false",
            Self::Float(_) | Self::Int(_) => "a number",
            Self::List(_) => "a list",
            Self::Map(_) => "a mapping",
            Self::Null => "nothing",
            Self::Text(_) => "text",
        }
    }
}

impl Tree {
    /// Reads YAML; a syntax error becomes a problem.
    pub fn parse(text: &str, problems: &mut Problems) -> Option<Self> {
        match serde_saphyr::from_str::<Option<Self>>(text) {
            Ok(Some(tree)) => Some(tree),
            Ok(None) => {
                problems.error(Position::default(), "the file is empty", None);
                None
            }
            Err(error) => {
                let at =
                    error.location().map(|at| Position { line: at.line(), column: at.column() }).unwrap_or_default();
                let message = error.without_snippet().to_string();
                let message = message.lines().next().unwrap_or("not valid YAML").to_owned();
                problems.error(at, message, None);
                None
            }
        }
    }

    /// The value under a key, if this is a mapping that has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value),
            Value::Bool(_) | Value::Float(_) | Value::Int(_) | Value::List(_) | Value::Null | Value::Text(_) => None,
        }
    }

    /// The text under a key, if it is there.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<(&str, Position)> {
        let found = self.get(key)?;
        match &found.value {
            Value::Text(text) => Some((text, found.at)),
            Value::Bool(_) | Value::Float(_) | Value::Int(_) | Value::List(_) | Value::Map(_) | Value::Null => None,
        }
    }

    /// Puts the value and everything in it at one place.
    pub fn stand_at(&mut self, at: Position) {
        self.at = at;
        match &mut self.value {
            Value::List(items) => items.iter_mut().for_each(|item| item.stand_at(at)),
            Value::Map(entries) => {
                for entry in entries {
                    entry.at = at;
                    entry.value.stand_at(at);
                }
            }
            Value::Bool(_) | Value::Float(_) | Value::Int(_) | Value::Null | Value::Text(_) => {}
        }
    }

    /// Adds items to the list `key` of the mapping `section`, which is made where it is missing.
    pub fn append(&mut self, section: &str, key: &str, at: Position, items: Vec<Self>) {
        let Value::Map(entries) = &mut self.value else { return };
        let Some(section) = entries.iter_mut().find(|entry| entry.key == section) else { return };
        let Value::Map(entries) = &mut section.value.value else { return };
        if let Some(entry) = entries.iter_mut().find(|entry| entry.key == key) {
            if let Value::List(list) = &mut entry.value.value {
                list.extend(items);
            }
            return;
        }
        entries.push(Entry { key: key.to_owned(), at, value: Self { value: Value::List(items), at } });
    }

    /// The integer under a key, if it is there.
    #[must_use]
    pub fn int(&self, key: &str) -> Option<(i128, Position)> {
        let found = self.get(key)?;
        match &found.value {
            Value::Int(number) => Some((*number, found.at)),
            Value::Bool(_) | Value::Float(_) | Value::Text(_) | Value::List(_) | Value::Map(_) | Value::Null => None,
        }
    }

    /// True if `true` stands under a key.
    #[must_use]
    pub fn is_set(&self, key: &str) -> bool {
        self.get(key).is_some_and(|found| found.value == Value::Bool(true))
    }

    /// The items of a list; nothing if this is none.
    #[must_use]
    pub fn items(&self) -> &[Self] {
        match &self.value {
            Value::List(items) => items,
            Value::Bool(_) | Value::Float(_) | Value::Int(_) | Value::Map(_) | Value::Null | Value::Text(_) => &[],
        }
    }

    /// The items of the list under a key; nothing if it is not there.
    #[must_use]
    pub fn list(&self, key: &str) -> &[Self] {
        self.get(key).map(Self::items).unwrap_or_default()
    }

    /// The place of the value at a path of keys and list indexes (`nodes/0/id`), or of the deepest part that exists.
    #[must_use]
    pub fn at(&self, path: &str) -> Position {
        let mut here = self;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let next = match &here.value {
                Value::List(items) => part.parse::<usize>().ok().and_then(|index| items.get(index)),
                Value::Bool(_) | Value::Float(_) | Value::Int(_) | Value::Map(_) | Value::Null | Value::Text(_) => {
                    here.get(part)
                }
            };
            match next {
                Some(next) => here = next,
                None => break,
            }
        }
        here.at
    }

    /// The same values as JSON; what JSON can't say becomes null.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        match &self.value {
            Value::Bool(value) => (*value).into(),
            Value::Float(value) => (*value).into(),
            Value::Int(value) => i64::try_from(*value)
                .map(serde_json::Value::from)
                .or_else(|_| u64::try_from(*value).map(serde_json::Value::from))
                .unwrap_or(serde_json::Value::Null),
            Value::List(items) => items.iter().map(Self::to_json).collect(),
            Value::Map(entries) => entries.iter().map(|entry| (entry.key.clone(), entry.value.to_json())).collect(),
            Value::Null => serde_json::Value::Null,
            Value::Text(value) => value.clone().into(),
        }
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = serde_saphyr::Spanned::<Value>::deserialize(deserializer)?;
        let at = Position { line: spanned.referenced.line(), column: spanned.referenced.column() };
        Ok(Self { value: spanned.value, at })
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Int(value.into()))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
        Ok(Value::Int(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Int(value.into()))
    }

    fn visit_u128<E>(self, value: u128) -> Result<Value, E> {
        Ok(Value::Int(i128::try_from(value).unwrap_or(i128::MAX)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::Text(value))
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        Value::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element::<Tree>()? {
            items.push(item);
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<serde_saphyr::Spanned<String>>()? {
            let at = Position { line: key.referenced.line(), column: key.referenced.column() };
            entries.push(Entry { key: key.value, at, value: map.next_value()? });
        }
        Ok(Value::Map(entries))
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(text: &str) -> Tree {
        let mut problems = Problems::of("t");
        Tree::parse(text, &mut problems).unwrap_or_else(|| panic!("{problems}"))
    }

    #[test]
    fn keys_and_values_know_their_lines_in_both_styles() {
        // CFG-1
        let tree = tree("a: 1\nlist:\n  - { id: x, n: 2 }\n  - id: \"y\"\n    deep: [true, null, 1.5]\n");
        assert_eq!(tree.at("list/1/id"), Position { line: 4, column: 9 });
        assert_eq!(tree.at("list/0/n"), Position { line: 3, column: 17 });
        assert_eq!(tree.at("list/1/missing").line, 4);
        assert_eq!(
            tree.to_json(),
            serde_json::json!({"a":1,"list":[{"id":"x","n":2},{"id":"y","deep":[true,null,1.5]}]})
        );
        let Value::Map(entries) = &tree.value else { panic!() };
        assert_eq!(entries[1].at, Position { line: 2, column: 1 });
    }

    #[test]
    fn broken_yaml_and_double_keys_are_problems_with_a_line() {
        // CFG-1
        for (text, line) in [("a: 1\nb: [1, 2\n", 3), ("a: 1\nb: 2\na: 3\n", 3), ("a: 1\n  b: 2\n", 2)] {
            let mut problems = Problems::of("t");
            assert!(Tree::parse(text, &mut problems).is_none(), "{text}");
            let at = problems.sorted()[0].at.line;
            assert!((line - 1..=line).contains(&at), "{text}: {problems}");
        }
    }
}
