//! Mock OpenAI-compatible server. What it does for a request is said in the request itself, by a directive
//! inside the prompt text, so that it survives any gateway that keeps message content:
//!   [[n=200 tps=50 ttft=20 pad=8 batch=1 size=1024 usage=1]]
//! n tokens, tps tokens/s (0: as fast as the socket takes them), ttft ms, pad extra bytes per token,
//! batch events per write, size bytes of content in a non-stream answer, usage: a usage chunk at the end.
use crate::args::Args;
use crate::clock::{now, put_hex16};
use crate::http1::{self, Body, Framing};
use crate::procfs;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[derive(Clone, Copy)]
struct Plan {
    n: u64,
    tps: f64,
    ttft: u64,
    pad: usize,
    batch: u64,
    size: usize,
    usage: bool,
}

#[derive(Default)]
struct Stats {
    reqs: Cell<u64>,
    tokens: Cell<u64>,
    bytes: Cell<u64>,
    aborted: Cell<u64>,
    open: Cell<u64>,
    conns: Cell<u64>,
}

fn add(c: &Cell<u64>, n: u64) {
    c.set(c.get() + n)
}

fn plan(body: &[u8], d: Plan) -> Plan {
    let mut p = d;
    let Some(a) = memchr::memmem::find(body, b"[[") else {
        return p;
    };
    let Some(z) = memchr::memmem::find(&body[a..], b"]]") else {
        return p;
    };
    let s = String::from_utf8_lossy(&body[a + 2..a + z]).into_owned();
    for kv in s.split_whitespace() {
        let Some((k, v)) = kv.split_once('=') else {
            continue;
        };
        let f: f64 = v.parse().unwrap_or(0.0);
        match k {
            "n" => p.n = f as u64,
            "tps" => p.tps = f,
            "ttft" => p.ttft = f as u64,
            "pad" => p.pad = f as usize,
            "batch" => p.batch = (f as u64).max(1),
            "size" => p.size = f as usize,
            "usage" => p.usage = f > 0.0,
            _ => {}
        }
    }
    p
}

const ID: &str = "chatcmpl-0123456789abcdef01234567";

/// One HTTP chunk holding one SSE event; returns the bytes and the offset of the timestamp.
fn token_chunk(pad: usize) -> (Vec<u8>, usize) {
    let ev = format!(
        "data: {{\"id\":\"{ID}\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"@t0000000000000000{}\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n",
        "x".repeat(pad)
    );
    let c = format!("{:x}\r\n{ev}\r\n", ev.len());
    let at = c.find("@t").unwrap() + 2;
    (c.into_bytes(), at)
}

fn chunk(ev: &str) -> String {
    format!("{:x}\r\n{ev}\r\n", ev.len())
}

async fn stream_answer(s: &mut TcpStream, p: Plan, st: &Stats, salt: u64) -> std::io::Result<()> {
    let ttft = Duration::from_millis(p.ttft);
    if p.ttft > 0 {
        tokio::time::sleep(ttft).await;
    }
    let mut first = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-request-id: bench-{salt}\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    first += &chunk(&format!(
        "data: {{\"id\":\"{ID}\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[{{\"index\":0,\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
    ));
    s.write_all(first.as_bytes()).await?;
    let (one, at) = token_chunk(p.pad);
    let mut buf = one.repeat(p.batch as usize);
    let period = if p.tps > 0.0 {
        Duration::from_secs_f64(1.0 / p.tps)
    } else {
        Duration::ZERO
    };
    // A phase per stream, so that streams started together do not tick together.
    let phase =
        period.mul_f64((salt.wrapping_mul(0x9e3779b97f4a7c15) >> 40) as f64 / (1u64 << 24) as f64);
    let start = tokio::time::Instant::now() + phase;
    let mut i = 0;
    while i < p.n {
        if p.tps > 0.0 {
            tokio::time::sleep_until(start + period.mul_f64(i as f64)).await;
        }
        let k = p.batch.min(p.n - i);
        let t = now();
        for j in 0..k as usize {
            put_hex16(&mut buf[j * one.len() + at..], t);
        }
        s.write_all(&buf[..k as usize * one.len()]).await?;
        add(&st.tokens, k);
        add(&st.bytes, k * one.len() as u64);
        i += k;
    }
    let mut end = chunk(&format!(
        "data: {{\"id\":\"{ID}\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[{{\"index\":0,\"delta\":{{}},\"logprobs\":null,\"finish_reason\":\"stop\"}}]}}\n\n"
    ));
    if p.usage {
        end += &chunk(&format!(
            "data: {{\"id\":\"{ID}\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[],\"usage\":{{\"prompt_tokens\":10,\"completion_tokens\":{},\"total_tokens\":{}}}}}\n\n",
            p.n, p.n + 10
        ));
    }
    end += &chunk("data: [DONE]\n\n");
    end += "0\r\n\r\n";
    s.write_all(end.as_bytes()).await
}

async fn plain_answer(s: &mut TcpStream, p: Plan, t_in: u64, salt: u64) -> std::io::Result<()> {
    if p.ttft > 0 {
        tokio::time::sleep(Duration::from_millis(p.ttft)).await;
    }
    let mut body = format!(
        "{{\"id\":\"{ID}\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"@r00000000000000000000000000000000{}\"}},\"logprobs\":null,\"finish_reason\":\"stop\"}}],\"usage\":{{\"prompt_tokens\":10,\"completion_tokens\":20,\"total_tokens\":30}}}}",
        "x".repeat(p.size.saturating_sub(34))
    )
    .into_bytes();
    let at = memchr::memmem::find(&body, b"@r0").unwrap() + 2;
    put_hex16(&mut body[at..], t_in);
    put_hex16(&mut body[at + 16..], now());
    let mut out = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-request-id: bench-{salt}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    out.extend_from_slice(&body);
    s.write_all(&out).await
}

fn json_answer(body: &str, code: &str) -> String {
    format!(
        "HTTP/1.1 {code}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn conn(mut s: TcpStream, d: Plan, st: Rc<Stats>) -> Result<(), String> {
    let mut buf: Vec<u8> = Vec::with_capacity(16 << 10);
    let mut body: Vec<u8> = Vec::new();
    let er = |e: std::io::Error| e.to_string();
    loop {
        let (n, h) = loop {
            if let Some(x) = http1::request(&buf)? {
                break x;
            }
            if s.read_buf(&mut buf).await.map_err(er)? == 0 {
                return Ok(());
            }
        };
        buf.drain(..n);
        if h.expect {
            s.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")
                .await
                .map_err(er)?;
        }
        body.clear();
        let mut dec = Body::new(h.framing);
        if h.framing != Framing::Len(0) {
            loop {
                let used = dec.feed(&buf, &mut body)?;
                buf.drain(..used);
                if dec.done() {
                    break;
                }
                if s.read_buf(&mut buf).await.map_err(er)? == 0 {
                    return Err("eof in request body".into());
                }
            }
        }
        let t_in = now();
        let path = h.path.split('?').next().unwrap_or("");
        match (h.method.as_str(), path) {
            ("POST", p) if p.ends_with("/chat/completions") => {
                add(&st.reqs, 1);
                let salt = st.reqs.get();
                let pl = plan(&body, d);
                let head = &body[..body.len().min(4096)];
                let tail = &body[body.len().saturating_sub(4096)..];
                let is_stream = [head, tail].iter().any(|b| {
                    memchr::memmem::find(b, b"\"stream\":true").is_some()
                        || memchr::memmem::find(b, b"\"stream\": true").is_some()
                });
                st.open.set(st.open.get() + 1);
                let r = if is_stream {
                    stream_answer(&mut s, pl, &st, salt).await
                } else {
                    plain_answer(&mut s, pl, t_in, salt).await
                };
                st.open.set(st.open.get() - 1);
                if r.is_err() {
                    add(&st.aborted, 1);
                    return Ok(());
                }
            }
            ("GET", "/bench/stats") => {
                let b = format!(
                    "{{\"reqs\":{},\"tokens\":{},\"bytes\":{},\"aborted\":{},\"open\":{},\"conns\":{}}}",
                    st.reqs.get(), st.tokens.get(), st.bytes.get(), st.aborted.get(), st.open.get(), st.conns.get()
                );
                s.write_all(json_answer(&b, "200 OK").as_bytes())
                    .await
                    .map_err(er)?;
            }
            ("GET", p) if p.ends_with("/models") => {
                let b = "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"created\":1700000000,\"owned_by\":\"bench\"}]}";
                s.write_all(json_answer(b, "200 OK").as_bytes())
                    .await
                    .map_err(er)?;
            }
            ("GET", _) => {
                let b = "{\"status\":\"ok\",\"model_path\":\"bench\",\"served_model_name\":\"bench\",\"is_generation\":true}";
                s.write_all(json_answer(b, "200 OK").as_bytes())
                    .await
                    .map_err(er)?;
            }
            _ => s
                .write_all(
                    json_answer(
                        "{\"error\":{\"message\":\"no such route\"}}",
                        "404 Not Found",
                    )
                    .as_bytes(),
                )
                .await
                .map_err(er)?,
        }
        if h.close {
            return Ok(());
        }
    }
}

pub fn main(a: Args) {
    procfs::raise_nofile();
    let d = Plan {
        n: a.num("n", 16),
        tps: a.num("tps", 0.0),
        ttft: a.num("ttft", 0),
        pad: a.num("pad", 4),
        batch: a.num("batch", 1),
        size: a.num("size", 1024),
        usage: a.num("usage", 1) > 0,
    };
    let addr = a.get("listen", "127.0.0.1:9100");
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let local = tokio::task::LocalSet::new();
    local.block_on(&rt, async move {
        let l = TcpListener::bind(&addr).await.expect("bind");
        let st = Rc::new(Stats::default());
        eprintln!("upstream on {addr}");
        loop {
            let Ok((s, _)) = l.accept().await else {
                continue;
            };
            let _ = s.set_nodelay(true);
            add(&st.conns, 1);
            let st = st.clone();
            tokio::task::spawn_local(async move {
                let _ = conn(s, d, st).await;
            });
        }
    });
}
