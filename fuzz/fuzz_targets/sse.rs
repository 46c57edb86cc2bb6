#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iop_execution::fuzz::sse(data));
