//! `iop`, built for the tests of this package.
fn main() {}
