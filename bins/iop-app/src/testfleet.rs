//! Decides what tests of a running Edge start from: a config file of two Nodes, and the engine it makes.

use std::path::PathBuf;

use iop_edge_core::token::{Token, TokenKind};

use crate::admin::AdminKey;
use crate::config::{EdgeConfig, LoadedEdge};
use crate::edge_runtime::EdgeRuntime;
use crate::testdir::TestDir;

/// When its models were made.
pub(crate) const CREATED: u64 = 1_700_000_000;

pub(crate) struct Fleet {
    _dir: TestDir,
    pub(crate) path: PathBuf,
    /// The admin key.
    pub(crate) key: Token,
    /// The API key of `team-a`.
    pub(crate) client: Token,
    pub(crate) loaded: LoadedEdge,
    pub(crate) runtime: EdgeRuntime,
    pub(crate) admin: AdminKey,
}

impl Fleet {
    /// Nodes `gpu-1` and `gpu-2` with a provider each, model `m` on both. Nothing is connected.
    pub(crate) fn new() -> Self {
        let dir = TestDir::new();
        let token = |kind| Token::generate(kind).unwrap();
        let (key, client) = (token(TokenKind::Admin), token(TokenKind::ApiKey));
        let text = format!(
            "auth:
  api_keys: [ {{ id: {}, hash: \"{}\", principal: team-a }} ]
admin: {{ key_hash: \"{}\" }}
nodes:
  - {{ id: gpu-1, token_hash: \"{}\", providers: [ {{ id: one, kind: demo, capacity: 8 }} ] }}
  - {{ id: gpu-2, token_hash: \"{}\", providers: [ {{ id: two, kind: demo }} ] }}
models:
  - {{ name: m, candidates: [ {{ provider: one }}, {{ provider: two, target: other, weight: 3 }} ] }}
",
            client.id().as_str(),
            client.hash(),
            key.hash(),
            token(TokenKind::Node).hash(),
            token(TokenKind::Node).hash(),
        );
        let path = dir.write("edge.yaml", &text);
        let (loaded, problems) = EdgeConfig::load(&path);
        let loaded = loaded.unwrap_or_else(|| panic!("{problems}"));
        let catalog = loaded.catalog(CREATED, crate::reload::FIRST_REVISION).unwrap();
        let runtime = EdgeRuntime::start(catalog, loaded.config.edge_id(), loaded.openai().unwrap());
        let admin = AdminKey::new(loaded.admin_key().unwrap());
        Self { _dir: dir, path, key, client, loaded, runtime, admin }
    }

    /// Changes the file; what is running does not know yet.
    pub(crate) fn edit(&self, from: &str, to: &str) {
        let text = std::fs::read_to_string(&self.path).unwrap();
        assert!(text.contains(from), "{from} is not in the config");
        std::fs::write(&self.path, text.replacen(from, to, 1)).unwrap();
    }
}
