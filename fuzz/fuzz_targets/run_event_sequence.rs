#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iop_edge_core::fuzz::run_event_sequence(data));
