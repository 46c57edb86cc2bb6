//! Decides which value stands for a JSON schema: the smallest one that fits, with the message where text is wanted.

use serde_json::{Map, Value, json};

/// Deepest schema that is followed.
const MAX_DEPTH: u32 = 16;

/// A value for a schema. What the demo does not understand becomes an empty object.
pub(super) fn of(schema: &Value, message: &str) -> Value {
    at_depth(schema, schema, message, 0)
}

fn at_depth(root: &Value, schema: &Value, message: &str, depth: u32) -> Value {
    if depth == MAX_DEPTH {
        return Value::Null;
    }
    let next = |schema: &Value| at_depth(root, schema, message, depth + 1);
    if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
        return target.strip_prefix('#').and_then(|pointer| root.pointer(pointer)).map_or(Value::Null, next);
    }
    if let Some(value) = schema.get("const").or_else(|| schema.get("default")) {
        return value.clone();
    }
    if let Some(value) = schema.get("enum").and_then(Value::as_array).and_then(|values| values.first()) {
        return value.clone();
    }
    for choice in ["anyOf", "oneOf", "allOf"] {
        if let Some(first) = schema.get(choice).and_then(Value::as_array).and_then(|choices| choices.first()) {
            return next(first);
        }
    }
    let kind = match schema.get("type") {
        Some(Value::String(kind)) => kind.as_str(),
        Some(Value::Array(kinds)) => kinds.first().and_then(Value::as_str).unwrap_or("object"),
        _ => "object",
    };
    match kind {
        "string" => text(schema, message),
        "integer" | "number" => schema.get("minimum").filter(|least| least.is_number()).cloned().unwrap_or(json!(1)),
        "boolean" => json!(true),
        "null" => Value::Null,
        "array" => {
            let least = schema.get("minItems").and_then(Value::as_u64).unwrap_or(0).min(8);
            let item = schema.get("items").map(next).unwrap_or_default();
            (0..least).map(|_| item.clone()).collect()
        }
        _ => object(schema, next),
    }
}

fn object(schema: &Value, next: impl Fn(&Value) -> Value) -> Value {
    let mut fields = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object);
    let required: Vec<&str> =
        schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, property) in properties.into_iter().flatten() {
        if required.contains(&name.as_str()) {
            fields.insert(name.clone(), next(property));
        }
    }
    Value::Object(fields)
}

fn text(schema: &Value, message: &str) -> Value {
    let bound = |name: &str| schema.get(name).and_then(Value::as_u64).and_then(|bound| usize::try_from(bound).ok());
    let longest = bound("maxLength").unwrap_or(80).min(80);
    let mut text: String = message.trim().chars().take(longest).collect();
    let shortest = bound("minLength").unwrap_or(0).min(longest);
    let missing = shortest.saturating_sub(text.chars().count());
    text.extend(std::iter::repeat_n('x', missing));
    json!(text)
}
