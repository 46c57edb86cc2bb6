#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iop_app::fuzz::config_yaml(data));
