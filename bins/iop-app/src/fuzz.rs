//! Decides what must hold for any config file. A fuzz target: a plain function (SEC-5).
#![allow(clippy::panic, clippy::unwrap_used, clippy::missing_panics_doc, reason = "a panic is how a target reports")]

use std::path::Path;

use crate::config::{EdgeConfig, LoadedEdge, Problems};

/// `edge.yaml`: taken as a whole or told what is wrong with it, and never with the text of a token (CFG-1, REG-6).
pub fn config_yaml(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    // References to the environment and to files are not for a fuzzer.
    if text.contains("${") || text.contains("file:") || text.contains(".pem") || text.contains("cert") {
        return;
    }
    let mut problems = Problems::of("edge.yaml");
    let config = EdgeConfig::parse(text, Path::new("/nowhere"), &mut problems);
    let shown = problems.to_string();
    assert_eq!(config.is_some(), !problems.has_errors());
    for word in text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-')) {
        let is_token = ["iopn_", "iopk_", "iopa_"].iter().any(|prefix| word.starts_with(prefix)) && word.len() == 57;
        assert!(
            !is_token || text.contains(&format!("{word}:")) || !shown.contains(&word[14..]),
            "a token is not repeated"
        );
    }
    if let Some(config) = config {
        let loaded = LoadedEdge { config, path: "/nowhere/edge.yaml".into() };
        // A name that is too long is found here.
        let _catalog = loaded.catalog(1, 1);
        let _surface = loaded.openai();
    }
}
