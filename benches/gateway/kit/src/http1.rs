//! Just enough HTTP/1.1: message heads and the three body framings.

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Framing {
    Len(u64),
    Chunked,
    Close,
}

pub struct ReqHead {
    pub method: String,
    pub path: String,
    pub framing: Framing,
    pub expect: bool,
    pub close: bool,
}

fn eq(a: &str, b: &str) -> bool {
    a.eq_ignore_ascii_case(b)
}

/// `Ok(None)`: need more bytes.
pub fn request(buf: &[u8]) -> Result<Option<(usize, ReqHead)>, String> {
    let mut hs = [httparse::EMPTY_HEADER; 96];
    let mut r = httparse::Request::new(&mut hs);
    match r.parse(buf) {
        Ok(httparse::Status::Complete(n)) => {
            let mut h = ReqHead {
                method: r.method.unwrap_or("").into(),
                path: r.path.unwrap_or("").into(),
                framing: Framing::Len(0),
                expect: false,
                close: r.version == Some(0),
            };
            for x in r.headers.iter() {
                let v = std::str::from_utf8(x.value).unwrap_or("");
                if eq(x.name, "content-length") {
                    h.framing = Framing::Len(v.trim().parse().map_err(|_| "content-length")?);
                } else if eq(x.name, "transfer-encoding")
                    && v.to_ascii_lowercase().contains("chunked")
                {
                    h.framing = Framing::Chunked;
                } else if eq(x.name, "expect") {
                    h.expect = true;
                } else if eq(x.name, "connection") {
                    h.close = eq(v.trim(), "close") || (h.close && !eq(v.trim(), "keep-alive"));
                }
            }
            Ok(Some((n, h)))
        }
        Ok(httparse::Status::Partial) => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

pub struct ResHead {
    pub status: u16,
    pub framing: Framing,
    pub close: bool,
}

pub fn response(buf: &[u8]) -> Result<Option<(usize, ResHead)>, String> {
    let mut hs = [httparse::EMPTY_HEADER; 96];
    let mut r = httparse::Response::new(&mut hs);
    match r.parse(buf) {
        Ok(httparse::Status::Complete(n)) => {
            let mut h = ResHead {
                status: r.code.unwrap_or(0),
                framing: Framing::Close,
                close: r.version == Some(0),
            };
            for x in r.headers.iter() {
                let v = std::str::from_utf8(x.value).unwrap_or("");
                if eq(x.name, "content-length") && h.framing != Framing::Chunked {
                    h.framing = Framing::Len(v.trim().parse().map_err(|_| "content-length")?);
                } else if eq(x.name, "transfer-encoding")
                    && v.to_ascii_lowercase().contains("chunked")
                {
                    h.framing = Framing::Chunked;
                } else if eq(x.name, "connection") {
                    h.close = eq(v.trim(), "close");
                }
            }
            if h.framing == Framing::Close {
                h.close = true;
            }
            Ok(Some((n, h)))
        }
        Ok(httparse::Status::Partial) => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

enum St {
    Size(u64),
    Ext(u64),
    SizeLf(u64),
    Data(u64),
    DataCr,
    DataLf,
    TrailStart,
    Trail,
    TrailEndLf,
    Done,
}

/// Incremental body decoder.
pub struct Body {
    framing: Framing,
    left: u64,
    st: St,
}

impl Body {
    pub fn new(framing: Framing) -> Self {
        let left = if let Framing::Len(n) = framing { n } else { 0 };
        Body {
            framing,
            left,
            st: St::Size(0),
        }
    }
    pub fn done(&self) -> bool {
        match self.framing {
            Framing::Len(_) => self.left == 0,
            Framing::Chunked => matches!(self.st, St::Done),
            Framing::Close => false,
        }
    }
    /// Decodes from `inp` into `out`; returns how many input bytes were used.
    pub fn feed(&mut self, inp: &[u8], out: &mut Vec<u8>) -> Result<usize, String> {
        match self.framing {
            Framing::Close => {
                out.extend_from_slice(inp);
                Ok(inp.len())
            }
            Framing::Len(_) => {
                let n = (inp.len() as u64).min(self.left) as usize;
                out.extend_from_slice(&inp[..n]);
                self.left -= n as u64;
                Ok(n)
            }
            Framing::Chunked => {
                let mut i = 0;
                while i < inp.len() {
                    let c = inp[i];
                    self.st = match self.st {
                        St::Size(acc) => match c {
                            b'0'..=b'9' => St::Size(acc << 4 | (c - b'0') as u64),
                            b'a'..=b'f' => St::Size(acc << 4 | (c - b'a' + 10) as u64),
                            b'A'..=b'F' => St::Size(acc << 4 | (c - b'A' + 10) as u64),
                            b'\r' => St::SizeLf(acc),
                            b';' | b' ' => St::Ext(acc),
                            _ => return Err(format!("bad chunk size byte {c}")),
                        },
                        St::Ext(acc) => {
                            if c == b'\r' {
                                St::SizeLf(acc)
                            } else {
                                St::Ext(acc)
                            }
                        }
                        St::SizeLf(acc) => {
                            if c != b'\n' {
                                return Err("chunk size".into());
                            }
                            if acc == 0 {
                                St::TrailStart
                            } else {
                                St::Data(acc)
                            }
                        }
                        St::Data(left) => {
                            let n = ((inp.len() - i) as u64).min(left) as usize;
                            out.extend_from_slice(&inp[i..i + n]);
                            i += n;
                            self.st = if left == n as u64 {
                                St::DataCr
                            } else {
                                St::Data(left - n as u64)
                            };
                            continue;
                        }
                        St::DataCr => St::DataLf,
                        St::DataLf => St::Size(0),
                        St::TrailStart => {
                            if c == b'\r' {
                                St::TrailEndLf
                            } else {
                                St::Trail
                            }
                        }
                        St::Trail => {
                            if c == b'\n' {
                                St::TrailStart
                            } else {
                                St::Trail
                            }
                        }
                        St::TrailEndLf => St::Done,
                        St::Done => return Ok(i),
                    };
                    i += 1;
                    if let St::Done = self.st {
                        return Ok(i);
                    }
                }
                Ok(i)
            }
        }
    }
}
