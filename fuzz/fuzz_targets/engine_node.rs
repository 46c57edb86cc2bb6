#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iop_node_core::fuzz::engine_node(data));
