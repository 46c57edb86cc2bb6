#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iop_wire::fuzz::wire_decode(data));
