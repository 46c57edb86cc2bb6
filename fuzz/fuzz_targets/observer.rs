#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iop_adapters::fuzz::observer(data));
