//! The committed code is what the schema generates: nobody needs protoc, and nobody edits it by hand.

#![allow(clippy::expect_used, reason = "a helper of a test")]

use std::path::Path;

/// Rewrites the committed file instead of comparing it, when set.
const REWRITE: &str = "IOP_REGEN";

fn generate() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let descriptors = protox::compile(["iop/wire/v1/wire.proto"], [root]).expect("the schema compiles");
    let directory = tempfile("iop-wire-generated");
    prost_build::Config::new()
        .bytes(["."])
        .out_dir(&directory)
        // A derived Debug would print prompts and outputs.
        .skip_debug(["."])
        // The large and rare ones: an envelope of a delta stays small.
        .boxed("iop.wire.v1.Envelope.body.run_request")
        .boxed("iop.wire.v1.Envelope.body.tunnel_request")
        .boxed("iop.wire.v1.ExecutionFailure.stall")
        .compile_fds(descriptors)
        .expect("the code generates");
    let code = std::fs::read_to_string(directory.join("iop.wire.v1.rs")).expect("one file per package");
    std::fs::remove_dir_all(&directory).expect("the directory is ours");
    code
}

fn tempfile(name: &str) -> std::path::PathBuf {
    let directory = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("the directory for temporary files is writable");
    directory
}

#[test]
fn committed_code_is_what_the_schema_generates() {
    // WIR-1
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/proto/iop.wire.v1.rs");
    let generated = generate();
    if std::env::var_os(REWRITE).is_some() {
        std::fs::write(&committed, &generated).expect("the source tree is writable");
    }
    let found = std::fs::read_to_string(&committed).unwrap_or_default();
    assert!(found == generated, "src/proto/iop.wire.v1.rs is stale: run this test with {REWRITE}=1");
}
