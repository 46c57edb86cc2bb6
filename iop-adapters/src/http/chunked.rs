//! Decides where the payload is in a chunked body: bytes in as they came, payload out, nothing remembered but the place.
//!
//! Stricter than most: lines end with CR LF, a size has at most sixteen digits, what is skipped is bounded.

/// Most bytes of extensions and padding behind one chunk size.
pub(super) const MAX_EXTENSION: u32 = 4 * 1024;
/// Most bytes of trailers.
pub(super) const MAX_TRAILERS: u32 = 16 * 1024;
/// Most digits of a chunk size: what a `u64` holds.
const MAX_DIGITS: u8 = 16;

/// Why bytes are not a chunked body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum ChunkedError {
    #[error("a chunk size is not a number")]
    Size,
    #[error("a chunk size is too large")]
    SizeOverflow,
    #[error("a chunk extension is malformed or too long")]
    Extension,
    #[error("a chunk does not end where it should")]
    End,
    #[error("the trailers are malformed or too long")]
    Trailers,
}

/// The place in a chunked body.
#[derive(Debug)]
pub(super) struct Chunked {
    at: At,
    /// Bytes skipped since the last chunk size, or of trailers.
    skipped: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Size { size: u64, digits: u8 },
    Extension { size: u64 },
    SizeLf { size: u64 },
    Data { left: u64 },
    DataCr,
    DataLf,
    TrailerStart,
    Trailer,
    TrailerLf,
    EndLf,
    End,
}

impl Chunked {
    const NEXT_SIZE: At = At::Size { size: 0, digits: 0 };

    pub(super) const fn new() -> Self {
        Self { at: Self::NEXT_SIZE, skipped: 0 }
    }

    /// True after the last byte of the body.
    pub(super) fn is_done(&self) -> bool {
        self.at == At::End
    }

    /// True where a chunk may begin, and with it the end of the body.
    pub(super) fn is_between_chunks(&self) -> bool {
        self.at == Self::NEXT_SIZE
    }

    /// Appends the payload of all chunks in `input` to `payload` and answers how many bytes of `input` belong to the body:
    /// all of them, unless it ends before.
    pub(super) fn decode(&mut self, input: &[u8], payload: &mut Vec<u8>) -> Result<usize, ChunkedError> {
        let mut rest = input;
        while let [byte, after @ ..] = rest {
            match self.at {
                At::End => break,
                At::Data { left } => {
                    let here = usize::try_from(left).map_or(rest.len(), |left| left.min(rest.len()));
                    let (data, behind) = rest.split_at(here);
                    payload.extend_from_slice(data);
                    let left = left - here as u64;
                    self.at = if left == 0 { At::DataCr } else { At::Data { left } };
                    rest = behind;
                }
                at => {
                    self.at = self.step(at, *byte)?;
                    rest = after;
                }
            }
        }
        Ok(input.len() - rest.len())
    }

    fn step(&mut self, at: At, byte: u8) -> Result<At, ChunkedError> {
        Ok(match (at, byte) {
            (At::Size { size, digits }, _) if byte.is_ascii_hexdigit() => {
                if digits == MAX_DIGITS {
                    return Err(ChunkedError::SizeOverflow);
                }
                At::Size { size: size << 4 | u64::from(hex(byte)), digits: digits + 1 }
            }
            (At::Size { digits: 0, .. }, _) => return Err(ChunkedError::Size),
            (At::Size { size, .. }, b'\r') => At::SizeLf { size },
            (At::Size { size, .. }, b';' | b' ' | b'\t') => {
                self.skipped = 0;
                At::Extension { size }
            }
            (At::Size { .. }, _) => return Err(ChunkedError::Size),
            (At::Extension { size }, b'\r') => At::SizeLf { size },
            (At::Extension { .. }, b'\n') => return Err(ChunkedError::Extension),
            (At::Extension { .. }, _) => self.skip(at, MAX_EXTENSION, ChunkedError::Extension)?,
            (At::SizeLf { size: 0 }, b'\n') => {
                self.skipped = 0;
                At::TrailerStart
            }
            (At::SizeLf { size }, b'\n') => At::Data { left: size },
            (At::SizeLf { .. }, _) => return Err(ChunkedError::Size),
            (At::DataCr, b'\r') => At::DataLf,
            (At::DataLf, b'\n') => Self::NEXT_SIZE,
            (At::DataCr | At::DataLf, _) => return Err(ChunkedError::End),
            (At::TrailerStart, b'\r') => At::EndLf,
            (At::Trailer, b'\r') => At::TrailerLf,
            (At::TrailerStart | At::Trailer, b'\n') => return Err(ChunkedError::Trailers),
            (At::TrailerStart | At::Trailer, _) => self.skip(At::Trailer, MAX_TRAILERS, ChunkedError::Trailers)?,
            (At::TrailerLf, b'\n') => At::TrailerStart,
            (At::EndLf, b'\n') => At::End,
            (At::TrailerLf | At::EndLf, _) => return Err(ChunkedError::Trailers),
            (At::Data { .. } | At::End, _) => at,
        })
    }

    const fn skip(&mut self, to: At, limit: u32, error: ChunkedError) -> Result<At, ChunkedError> {
        self.skipped += 1;
        if self.skipped > limit { Err(error) } else { Ok(to) }
    }
}

/// The value of a hexadecimal digit.
const fn hex(digit: u8) -> u8 {
    if digit.is_ascii_digit() { digit - b'0' } else { (digit | 0x20) - b'a' + 10 }
}

#[cfg(test)]
mod tests;
