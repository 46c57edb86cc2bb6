//! The clock that all processes of a measurement share, and the 16 hex digits in which its marks travel.

/// CLOCK_MONOTONIC in nanoseconds; the same clock for every process on the machine.
pub fn now() -> u64 {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `t` is a valid, writable timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

pub fn put_hex16(out: &mut [u8], mut v: u64) {
    const D: &[u8; 16] = b"0123456789abcdef";
    for i in (0..16).rev() {
        out[i] = D[(v & 15) as usize];
        v >>= 4;
    }
}

pub fn get_hex16(b: &[u8]) -> Option<u64> {
    let mut v = 0u64;
    for &c in b.get(..16)? {
        let d = match c {
            b'0'..=b'9' => c - b'0',
            b'a'..=b'f' => c - b'a' + 10,
            _ => return None,
        };
        v = v << 4 | d as u64;
    }
    Some(v)
}
