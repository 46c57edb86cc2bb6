#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iop_edge_core::fuzz::openai_request_parse(data));
