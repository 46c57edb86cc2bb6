//! Load generator. Closed loop (--conc clients, each one request at a time) or open loop (--rate requests/s from a
//! schedule; latency counts from the scheduled moment). Prints one JSON line.
use crate::args::Args;
use crate::clock::{get_hex16, now};
use crate::http1::{self, Body};
use crate::procfs::{self, Usage, Watch};
use crate::stats::Samples;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

#[derive(Default)]
struct Out {
    lat: RefCell<Samples>,
    up: RefCell<Samples>,
    down: RefCell<Samples>,
    ttft: RefCell<Samples>,
    relay: RefCell<Samples>,
    jitter: RefCell<Samples>,
    reqs: Cell<u64>,
    tokens: Cell<u64>,
    bytes: Cell<u64>,
    errs: Cell<u64>,
    short: Cell<u64>,
    slow_bytes: Cell<u64>,
    last_err: RefCell<String>,
}

struct Cfg {
    addr: String,
    head: String,
    stream: bool,
    keepalive: bool,
    timeout: Duration,
    want_tokens: u64,
}

struct Conn {
    s: TcpStream,
    buf: Vec<u8>,
}

pub async fn dial(addr: &str, rcvbuf: Option<u32>) -> Result<TcpStream, String> {
    let sa: std::net::SocketAddr = addr.parse().map_err(|e| format!("{addr}: {e}"))?;
    let s = TcpSocket::new_v4().map_err(|e| e.to_string())?;
    if let Some(n) = rcvbuf {
        let _ = s.set_recv_buffer_size(n);
    }
    let s = s.connect(sa).await.map_err(|e| format!("connect: {e}"))?;
    let _ = s.set_nodelay(true);
    Ok(s)
}

impl Cfg {
    fn body(&self, model: &str, directive: &str, prompt: usize) -> Vec<u8> {
        let b = format!(
            "{{\"model\":\"{model}\",\"stream\":{},\"messages\":[{{\"role\":\"user\",\"content\":\"[[{directive}]] {}\"}}]}}",
            self.stream,
            "lorem ipsum ".repeat(prompt / 12 + 1).get(..prompt).unwrap_or("")
        );
        let mut r = format!("{}content-length: {}\r\n\r\n", self.head, b.len()).into_bytes();
        r.extend_from_slice(b.as_bytes());
        r
    }
}

/// What one stream has brought so far.
#[derive(Default)]
struct Seen {
    /// The last token: when it was sent, when it came.
    last: Option<(u64, u64)>,
    tokens: u64,
    done: bool,
}

impl Seen {
    /// Reads the whole SSE events in `dec`, which came at `t`; returns how many bytes they take.
    /// With `out`, notes the delays of their tokens; the request went out at `t0`.
    fn events(&mut self, dec: &[u8], t: u64, t0: u64, out: Option<&Out>) -> usize {
        let mut used = 0;
        while let Some(e) = memchr::memmem::find(&dec[used..], b"\n\n") {
            let ev = &dec[used..used + e];
            used += e + 2;
            // A gateway may merge several tokens into one event: count every mark.
            let mut p = 0;
            while let Some(k) = memchr::memmem::find(&ev[p..], b"@t") {
                p += k + 2;
                let Some(sent) = get_hex16(&ev[p..]) else {
                    continue;
                };
                self.tokens += 1;
                let Some(o) = out else { continue };
                o.relay.borrow_mut().add(t.saturating_sub(sent));
                match self.last {
                    None => o.ttft.borrow_mut().add(t - t0),
                    Some((ps, pt)) => {
                        let gap = sent.saturating_sub(ps);
                        o.jitter.borrow_mut().add((t - pt).abs_diff(gap));
                    }
                }
                self.last = Some((sent, t));
            }
            self.done |= ev.ends_with(b"data: [DONE]") || ev.ends_with(b"data:[DONE]");
        }
        used
    }
}

/// One request on a kept connection. Returns whether the connection may be used again.
async fn one(
    c: &mut Conn,
    cfg: &Cfg,
    req: &[u8],
    t0: u64,
    o: &Out,
    rec: bool,
    want: u64,
) -> Result<bool, String> {
    let er = |e: std::io::Error| e.to_string();
    c.s.write_all(req).await.map_err(er)?;
    c.buf.clear();
    let (n, h) = loop {
        if let Some(x) = http1::response(&c.buf)? {
            break x;
        }
        if c.s.read_buf(&mut c.buf).await.map_err(er)? == 0 {
            return Err("eof before response head".into());
        }
    };
    let mut t = now();
    c.buf.drain(..n);
    let mut body = Body::new(h.framing);
    let mut dec: Vec<u8> = Vec::with_capacity(8 << 10);
    let (mut seen, mut nbytes) = (Seen::default(), 0usize);
    loop {
        nbytes += c.buf.len();
        let used = body.feed(&c.buf, &mut dec)?;
        c.buf.drain(..used);
        if cfg.stream && h.status == 200 {
            let u = seen.events(&dec, t, t0, rec.then_some(o));
            dec.drain(..u);
        }
        if body.done() {
            break;
        }
        let k = c.s.read_buf(&mut c.buf).await.map_err(er)?;
        t = now();
        if k == 0 {
            if h.framing == http1::Framing::Close {
                break;
            }
            return Err("eof in body".into());
        }
    }
    if h.status != 200 {
        return Err(format!(
            "status {}: {}",
            h.status,
            String::from_utf8_lossy(&dec[..dec.len().min(300)])
        ));
    }
    if rec {
        o.reqs.set(o.reqs.get() + 1);
        o.bytes.set(o.bytes.get() + nbytes as u64);
        o.tokens.set(o.tokens.get() + seen.tokens);
        o.lat.borrow_mut().add(t - t0);
        if cfg.stream {
            if seen.tokens != want || !seen.done {
                o.short.set(o.short.get() + 1);
            }
        } else if let Some(k) = memchr::memmem::find(&dec, b"@r") {
            if let (Some(i), Some(x)) = (get_hex16(&dec[k + 2..]), get_hex16(&dec[k + 18..])) {
                o.up.borrow_mut().add(i.saturating_sub(t0));
                o.down.borrow_mut().add(t.saturating_sub(x));
            }
        } else {
            o.short.set(o.short.get() + 1);
        }
    }
    Ok(cfg.keepalive && !h.close)
}

async fn run_one(
    c: &mut Option<Conn>,
    cfg: &Cfg,
    req: &[u8],
    t0: u64,
    o: &Out,
    rec: bool,
    want: u64,
) {
    let r = tokio::time::timeout(cfg.timeout, async {
        if c.is_none() {
            *c = Some(Conn {
                s: dial(&cfg.addr, None).await?,
                buf: Vec::with_capacity(16 << 10),
            });
        }
        one(c.as_mut().unwrap(), cfg, req, t0, o, rec, want).await
    })
    .await
    .unwrap_or_else(|_| Err("timeout".into()));
    match r {
        Ok(true) => {}
        Ok(false) => *c = None,
        Err(e) => {
            *c = None;
            if rec {
                o.errs.set(o.errs.get() + 1);
            }
            *o.last_err.borrow_mut() = e;
        }
    }
}

/// A reader that takes `bps` bytes/s from a firehose until told to stop.
async fn slow(cfg: Rc<Cfg>, req: Vec<u8>, bps: u64, o: Rc<Out>) {
    let Ok(mut s) = dial(&cfg.addr, Some(4096)).await else {
        return;
    };
    if s.write_all(&req).await.is_err() {
        return;
    }
    let mut b = vec![0u8; (bps / 10).max(1) as usize];
    loop {
        match s.read(&mut b).await {
            Ok(n) if n > 0 => o.slow_bytes.set(o.slow_bytes.get() + n as u64),
            _ => return,
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn upstream_stats(addr: &str) -> Option<(u64, u64)> {
    let mut s = dial(addr, None).await.ok()?;
    s.write_all(b"GET /bench/stats HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await
        .ok()?;
    let mut v = String::new();
    s.read_to_string(&mut v).await.ok()?;
    let num = |k: &str| -> Option<u64> {
        let r = &v[v.find(k)? + k.len()..];
        r[..r.find([',', '}'])?].parse().ok()
    };
    Some((num("\"tokens\":")?, num("\"bytes\":")?))
}

pub fn main(a: Args) {
    procfs::raise_nofile();
    let url = a.get("url", "http://127.0.0.1:9100/v1");
    let rest = url.strip_prefix("http://").expect("only http:// base URLs");
    let (addr, prefix) = match rest.find('/') {
        Some(i) => (
            rest[..i].to_string(),
            rest[i..].trim_end_matches('/').to_string(),
        ),
        None => (rest.to_string(), String::new()),
    };
    let model = a.get("model", "bench");
    let stream = a.get("mode", "plain") == "stream";
    let conc: usize = a.num("conc", 1);
    let rate: f64 = a.num("rate", 0.0);
    let secs: f64 = a.num("secs", 5.0);
    let per_client: u64 = a.num("reqs", 0); // >0: that many requests per client instead of --secs
    let warm: f64 = a.num("warmup", 1.0);
    let ramp_ms: f64 = a.num("ramp-ms", 0.0); // over which the clients start
    let n: u64 = a.num("n", 200);
    let batch: u64 = a.num("batch", 1);
    let directive = format!(
        "n={n} tps={} ttft={} pad={} batch={batch} size={} usage={}",
        a.get("tps", "0"),
        a.get("ttft", "0"),
        a.get("pad", "4"),
        a.get("size", "1024"),
        a.get("usage", "1")
    );
    let mut head = format!(
        "POST {prefix}/chat/completions HTTP/1.1\r\nhost: {addr}\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\naccept: */*\r\n",
        a.get("key", "bench-key")
    );
    for h in a.all("header") {
        head += &h;
        head += "\r\n";
    }
    let cfg = Rc::new(Cfg {
        addr,
        head,
        stream,
        keepalive: a.num("keepalive", 1u8) > 0,
        timeout: Duration::from_secs_f64(a.num("timeout", 60.0)),
        want_tokens: n,
    });
    let prompt: usize = a.num("prompt", 64);
    let req: Rc<Vec<u8>> = Rc::new(cfg.body(&model, &directive, prompt));
    let warm_req: Rc<Vec<u8>> = Rc::new(cfg.body(
        &model,
        &format!(
            "n=5 tps={} batch={batch} size=64",
            if n > 0 { a.get("tps", "0") } else { "0".into() }
        ),
        prompt.min(4096),
    ));
    let warm_tokens = 5;
    let gw = Watch::new(&a.get("gw-pids", ""));
    let up = Watch::new(&a.get("up-pids", ""));
    let up_addr = a.get("up-addr", "");
    let slow_n: usize = a.num("slow", 0);
    let slow_bps: u64 = a.num("slow-bps", 1000);
    let slow_req = cfg.body(
        &model,
        &format!("n={} tps=0 pad=4 batch=16", a.get("slow-n", "400000")),
        16,
    );

    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let local = tokio::task::LocalSet::new();
    let line = local.block_on(&rt, async move {
        let o = Rc::new(Out::default());
        let idle = gw.usage();
        let barrier = Rc::new(tokio::sync::Barrier::new(conc + 1));
        let deadline = Rc::new(Cell::new(0u64));
        let next = Rc::new(Cell::new(0u64)); // open loop: index of the next scheduled request
        let base = Rc::new(Cell::new(0u64));
        let mut hs = Vec::new();
        for i in 0..conc {
            let (cfg, req, warm_req, o, barrier, deadline, next, base) =
                (cfg.clone(), req.clone(), warm_req.clone(), o.clone(), barrier.clone(), deadline.clone(), next.clone(), base.clone());
            hs.push(tokio::task::spawn_local(async move {
                let mut c: Option<Conn> = None;
                if ramp_ms > 0.0 {
                    tokio::time::sleep(Duration::from_secs_f64(ramp_ms / 1e3 * i as f64 / conc as f64)).await;
                }
                let w_end = now() + (warm * 1e9) as u64;
                if warm > 0.0 {
                    loop {
                        run_one(&mut c, &cfg, &warm_req, now(), &o, false, warm_tokens).await;
                        if now() >= w_end {
                            break;
                        }
                    }
                }
                barrier.wait().await;
                barrier.wait().await;
                if rate > 0.0 {
                    loop {
                        let k = next.get();
                        next.set(k + 1);
                        let due = base.get() + (k as f64 / rate * 1e9) as u64;
                        if due >= deadline.get() {
                            return;
                        }
                        let t = now();
                        if due > t {
                            tokio::time::sleep(Duration::from_nanos(due - t)).await;
                        }
                        run_one(&mut c, &cfg, &req, due, &o, true, cfg.want_tokens).await;
                    }
                }
                if ramp_ms > 0.0 {
                    tokio::time::sleep(Duration::from_secs_f64(ramp_ms / 1e3 * i as f64 / conc as f64)).await;
                }
                let mut k = 0;
                while if per_client > 0 { k < per_client } else { now() < deadline.get() } {
                    run_one(&mut c, &cfg, &req, now(), &o, true, cfg.want_tokens).await;
                    k += 1;
                }
            }));
        }
        barrier.wait().await;
        let base_use = gw.usage();
        let (u0, l0, s0) = (up.usage(), procfs::self_cpu(), if up_addr.is_empty() { None } else { upstream_stats(&up_addr).await });
        let peak = Rc::new(Cell::new(base_use.rss_kb));
        let gw = Rc::new(gw);
        let sampler = {
            let (peak, gw) = (peak.clone(), gw.clone());
            tokio::task::spawn_local(async move {
                while !gw.is_empty() {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                    peak.set(peak.get().max(gw.usage().rss_kb));
                }
            })
        };
        let slows: Vec<_> = (0..slow_n).map(|_| tokio::task::spawn_local(slow(cfg.clone(), slow_req.clone(), slow_bps, o.clone()))).collect();
        let t0 = now();
        base.set(t0);
        deadline.set(t0 + (secs * 1e9) as u64);
        barrier.wait().await;
        for h in hs {
            let _ = h.await;
        }
        let el = (now() - t0) as f64 / 1e9;
        let end: Usage = gw.usage();
        let (u1, l1, s1) = (up.usage(), procfs::self_cpu(), if up_addr.is_empty() { None } else { upstream_stats(&up_addr).await });
        sampler.abort();
        peak.set(peak.get().max(end.rss_kb));
        for s in &slows {
            s.abort();
        }
        let (reqs, tokens) = (o.reqs.get(), o.tokens.get());
        let gcpu = end.cpu_s - base_use.cpu_s;
        let held = match (s0, s1) {
            (Some(a), Some(b)) if slow_n > 0 => {
                let per = if b.0 > a.0 { (b.1 - a.1) as f64 / (b.0 - a.0) as f64 } else { 0.0 };
                format!("{:.0}", ((b.0 - a.0).saturating_sub(tokens) as f64 * per - o.slow_bytes.get() as f64).max(0.0) / 1024.0)
            }
            _ => "null".into(),
        };
        let jf = |ok: bool, v: f64| if ok { format!("{v:.3}") } else { "null".into() };
        let j = |s: &RefCell<Samples>| s.borrow_mut().json();
        format!(
            "{{\"label\":\"{}\",\"mode\":\"{}\",\"conc\":{conc},\"rate\":{rate},\"secs\":{el:.3},\"reqs\":{reqs},\"errs\":{},\"short\":{},\"rps\":{:.1},\"tokens\":{tokens},\"tok_s\":{:.1},\"mb\":{:.2},\"lat_us\":{},\"up_us\":{},\"down_us\":{},\"ttft_us\":{},\"relay_us\":{},\"jitter_us\":{},\"gw_cpu_s\":{:.3},\"gw_cpu_us_per_req\":{},\"gw_cpu_s_per_mtok\":{},\"gw_rss_idle_kb\":{},\"gw_rss_base_kb\":{},\"gw_rss_peak_kb\":{},\"load_cpu_s\":{:.3},\"up_cpu_s\":{:.3},\"slow_read_kb\":{},\"held_kb\":{held},\"last_err\":{:?}}}",
            a.get("label", ""), if stream { "stream" } else { "plain" },
            o.errs.get(), o.short.get(), reqs as f64 / el, tokens as f64 / el, o.bytes.get() as f64 / 1e6,
            j(&o.lat), j(&o.up), j(&o.down), j(&o.ttft), j(&o.relay), j(&o.jitter),
            gcpu, jf(reqs > 0 && !gw.is_empty(), gcpu * 1e6 / reqs.max(1) as f64), jf(tokens > 0 && !gw.is_empty(), gcpu * 1e6 / tokens.max(1) as f64),
            idle.rss_kb, base_use.rss_kb, peak.get(), l1 - l0, u1.cpu_s - u0.cpu_s,
            o.slow_bytes.get() / 1024, o.last_err.borrow()
        )
    });
    println!("{line}");
}
