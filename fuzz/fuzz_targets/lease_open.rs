#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iop_credential_lease::fuzz::lease_open(data));
