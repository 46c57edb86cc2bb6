//! Every fuzz target runs on its corpus, on stable, without a fuzzer (SEC-5): what was found once is never found again.
#![allow(clippy::unwrap_used, reason = "all of it is test code: a broken assumption fails the test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

type Target = fn(&[u8]);

const TARGETS: &[(&str, Target)] = &[
    ("api_key_parse", iop_edge_core::fuzz::api_key_parse),
    ("engine_edge", iop_edge_core::fuzz::engine_edge),
    ("error_scrubber", iop_edge_core::fuzz::error_scrubber),
    ("header_filter", iop_adapters::fuzz::header_filter),
    ("lease_open", iop_credential_lease::fuzz::lease_open),
    ("lease_verify", iop_credential_lease::fuzz::lease_verify),
    ("observer", iop_adapters::fuzz::observer),
    ("ollama_ndjson", iop_adapters::fuzz::ollama_ndjson),
    ("openai_request_parse", iop_edge_core::fuzz::openai_request_parse),
    ("openai_response_rewrite", iop_edge_core::fuzz::openai_response_rewrite),
    ("san_parse", iop_wire::fuzz::san_parse),
    ("sse", iop_execution::fuzz::sse),
    ("tunnel_path", iop_adapters::fuzz::tunnel_path),
    ("tunnel_frame_sequence", iop_edge_core::fuzz::tunnel_frame_sequence),
    ("run_event_sequence", iop_edge_core::fuzz::run_event_sequence),
    ("engine_node", iop_node_core::fuzz::engine_node),
    ("config_yaml", iop_app::fuzz::config_yaml),
    ("wire_decode", iop_wire::fuzz::wire_decode),
];

/// Most bytes of one target's corpus: it is for finding what was found before, not for search.
const MAX_CORPUS: u64 = 512 * 1024;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}

fn names(folder: &str, of: impl Fn(&Path) -> Option<String>) -> BTreeSet<String> {
    let entries = fs::read_dir(fuzz().join(folder)).unwrap();
    entries.filter_map(|entry| of(&entry.unwrap().path())).collect()
}

#[test]
fn every_target_has_a_corpus_and_a_fuzzer() {
    // SEC-5
    let stem = |path: &Path| path.file_stem()?.to_str().map(str::to_owned);
    let known: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names("fuzz_targets", stem), known, "fuzz/fuzz_targets");
    assert_eq!(names("corpus", stem), known, "fuzz/corpus");
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
    for name in &known {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "fuzz/Cargo.toml has no {name}");
    }
}

#[test]
fn every_corpus_passes_on_stable() {
    // SEC-5
    for (name, target) in TARGETS {
        let mut size = 0;
        let mut inputs: Vec<_> =
            fs::read_dir(fuzz().join("corpus").join(name)).unwrap().map(|e| e.unwrap().path()).collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "{name}");
        for input in inputs {
            let bytes = fs::read(&input).unwrap();
            size += bytes.len() as u64;
            let result = std::panic::catch_unwind(|| target(&bytes));
            assert!(result.is_ok(), "{name} fails on {}", input.display());
            // What it was cut out of: nothing may depend on an input being whole.
            for end in [0, bytes.len() / 2] {
                let result = std::panic::catch_unwind(|| target(&bytes[..end]));
                assert!(result.is_ok(), "{name} fails on the first {end} bytes of {}", input.display());
            }
        }
        assert!(size <= MAX_CORPUS, "the corpus of {name} has {size} bytes: minimise it");
    }
}
