//! Decides nothing: holds the code generated from `proto/iop/wire/v1/wire.proto`.
#![allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    reason = "generated code; the schema holds its documentation"
)]

include!("proto/iop.wire.v1.rs");
