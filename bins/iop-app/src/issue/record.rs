//! Decides how records of keys and tokens are written: one line of YAML each, as people would write it.

use crate::config::edge::credentials::{SlotRecord, SlotStatusConfig};
use crate::config::edge::records::Form;
use crate::config::edge::{ApiKeyRecord, KeyLimitsConfig, NodeTokenRecord, PreviousSecret};

/// A flow mapping: `{ a: 1, b: "x" }`.
#[derive(Debug, Default)]
struct Flow(Vec<String>);

impl Flow {
    fn text(mut self, key: &str, value: &str) -> Self {
        self.0.push(format!("{key}: {}", quoted(value)));
        self
    }

    fn raw(mut self, key: &str, value: Option<impl ToString>) -> Self {
        if let Some(value) = value {
            self.0.push(format!("{key}: {}", value.to_string()));
        }
        self
    }

    fn end(self) -> String {
        format!("{{ {} }}", self.0.join(", "))
    }
}

/// A JSON string is a YAML one.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn previous(previous: Option<&PreviousSecret>) -> Option<String> {
    previous.map(|previous| {
        let end = quoted(&previous.expires_at.to_string());
        Flow::default().text("hash", &previous.hash).raw("expires_at", Some(end)).end()
    })
}

/// The line of an API key.
#[must_use]
pub fn api_key(record: &ApiKeyRecord) -> String {
    let models: Vec<_> = record.models.iter().map(|model| quoted(model)).collect();
    let KeyLimitsConfig { requests_per_minute, tokens_per_minute, concurrent } = record.limits;
    let set = |limit: u64| (limit > 0).then_some(limit);
    let limits = Flow::default()
        .raw("requests_per_minute", set(requests_per_minute.into()))
        .raw("tokens_per_minute", set(tokens_per_minute))
        .raw("concurrent", set(concurrent.into()));
    let limits = Some(limits).filter(|limits| !limits.0.is_empty()).map(Flow::end);
    Flow::default()
        .text("id", &record.id)
        .text("hash", &record.hash)
        .raw("principal", record.principal.as_deref().map(quoted))
        .raw("models", Some(format!("[{}]", models.join(", "))))
        .raw("priority", Some(record.priority).filter(|priority| *priority != 0))
        .raw("max_priority", record.max_priority)
        .raw("limits", limits)
        .raw("expires_at", record.expires_at.map(|at| quoted(&at.to_string())))
        .raw("previous", previous(record.previous.as_ref()))
        .end()
}

/// The line of a Node's token.
#[must_use]
pub fn node_token(record: &NodeTokenRecord) -> String {
    Flow::default()
        .text("node", &record.node)
        .text("token_id", &record.token_id)
        .text("token_hash", &record.token_hash)
        .raw("expires_at", record.expires_at.map(|at| quoted(&at.to_string())))
        .raw("previous", previous(record.previous.as_ref()))
        .end()
}

/// The line of a credential slot.
#[must_use]
pub fn slot(record: &SlotRecord) -> String {
    let status = match record.status {
        SlotStatusConfig::Enabled => "enabled",
        SlotStatusConfig::Disabled => "disabled",
        SlotStatusConfig::Revoked => "revoked",
    };
    Flow::default()
        .text("name", &record.name)
        .text("secret", &record.secret)
        .raw("revision", Some(record.revision))
        .raw("status", Some(status))
        .end()
}

/// The whole file.
#[must_use]
pub fn file_text(form: &Form, lines: &[String]) -> String {
    let mut text = format!(
        "# Written by `{}`, which reads it and writes it anew: comments are lost. It holds {}, no secret.\n{}:",
        form.command, form.holds, form.list
    );
    if lines.is_empty() {
        text.push_str(" []");
    }
    for line in lines {
        text.push_str("\n  - ");
        text.push_str(line);
    }
    text.push('\n');
    text
}
