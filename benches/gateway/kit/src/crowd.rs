//! Several callers at once, each with a key: who is admitted, how long each part of it takes, and how fast the others are
//! refused. Prints one JSON line.
//!
//!   bench crowd --url http://127.0.0.1:9200/v1 --lo-ms 20 --hi-ms 60 --secs 10 --class greedy,KEY,conc=64 --class modest,KEY,conc=2
//!
//! A class is closed (conc=N: N clients, each one request at a time) or open (rate=N requests a second, by the clock). Every
//! request asks the mock provider for a plain answer after a random time between --lo-ms and --hi-ms.
use crate::args::Args;
use crate::clock::{get_hex16, now};
use crate::http1::{self, Body};
use crate::load::dial;
use crate::procfs;
use crate::stats::Samples;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[derive(Default)]
struct Out {
    /// Request written to answer read, of those that were served.
    total: RefCell<Samples>,
    /// Request written to its arrival at the provider: everything before, most of all the queue.
    before: RefCell<Samples>,
    /// Arrival at the provider to answer read.
    service: RefCell<Samples>,
    /// What the path added to the time the provider took.
    added: RefCell<Samples>,
    /// Request written to refusal read.
    refused: RefCell<Samples>,
    /// Refusals with a retry-after.
    retry_after: Cell<u64>,
    errs: Cell<u64>,
    last_err: RefCell<String>,
}

struct Class {
    name: String,
    key: String,
    conc: usize,
    rate: f64,
    out: Out,
    idle: RefCell<Vec<TcpStream>>,
}

struct Cfg {
    addr: String,
    prefix: String,
    model: String,
    lo_ms: f64,
    hi_ms: f64,
    seed: Cell<u64>,
    /// Samples count from then.
    from: Cell<u64>,
    until: Cell<u64>,
}

impl Cfg {
    fn service_ms(&self) -> u64 {
        let mut x = self.seed.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.seed.set(x);
        (self.lo_ms + (self.hi_ms - self.lo_ms) * (x >> 11) as f64 / (1u64 << 53) as f64).round()
            as u64
    }
    fn request(&self, key: &str) -> (Vec<u8>, u64) {
        let ms = self.service_ms();
        let body = format!(
            "{{\"model\":\"{}\",\"messages\":[{{\"role\":\"user\",\"content\":\"[[ttft={ms} size=256]]\"}}]}}",
            self.model
        );
        let head = format!(
            "POST {}/chat/completions HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.prefix, self.addr, body.len()
        );
        ((head + &body).into_bytes(), ms)
    }
}

struct Got {
    status: u16,
    retry_after: bool,
    body: Vec<u8>,
    keep: bool,
}

async fn ask(s: &mut TcpStream, req: &[u8]) -> Result<Got, String> {
    let er = |e: std::io::Error| e.to_string();
    s.write_all(req).await.map_err(er)?;
    let mut buf = Vec::with_capacity(4 << 10);
    let (n, h) = loop {
        if let Some(x) = http1::response(&buf)? {
            break x;
        }
        if s.read_buf(&mut buf).await.map_err(er)? == 0 {
            return Err("eof before response head".into());
        }
    };
    let retry_after =
        memchr::memmem::find(&buf[..n].to_ascii_lowercase(), b"\r\nretry-after: ").is_some();
    buf.drain(..n);
    let (mut body, mut dec) = (Vec::new(), Body::new(h.framing));
    loop {
        let used = dec.feed(&buf, &mut body)?;
        buf.drain(..used);
        if dec.done() {
            break;
        }
        if s.read_buf(&mut buf).await.map_err(er)? == 0 {
            return Err("eof in body".into());
        }
    }
    Ok(Got {
        status: h.status,
        retry_after,
        body,
        keep: !h.close,
    })
}

async fn one(cfg: &Cfg, class: &Class) {
    let idle = class.idle.borrow_mut().pop();
    let o = &class.out;
    let fail = |e: String| {
        if now() >= cfg.from.get() {
            o.errs.set(o.errs.get() + 1);
        }
        *o.last_err.borrow_mut() = e;
    };
    let mut s = match idle {
        Some(s) => s,
        None => match dial(&cfg.addr, None).await {
            Ok(s) => s,
            Err(e) => return fail(e),
        },
    };
    let (req, ms) = cfg.request(&class.key);
    let t0 = now();
    let got = match tokio::time::timeout(Duration::from_secs(60), ask(&mut s, &req)).await {
        Ok(Ok(got)) => got,
        Ok(Err(e)) => return fail(e),
        Err(_) => return fail("timeout".into()),
    };
    let t = now();
    if got.keep {
        class.idle.borrow_mut().push(s);
    }
    if t0 < cfg.from.get() || t0 >= cfg.until.get() {
        return;
    }
    match got.status {
        200 => {
            let Some(sent) =
                memchr::memmem::find(&got.body, b"@r").and_then(|k| get_hex16(&got.body[k + 2..]))
            else {
                return fail("an answer without a time".into());
            };
            o.total.borrow_mut().add(t - t0);
            o.before.borrow_mut().add(sent.saturating_sub(t0));
            o.service.borrow_mut().add(t.saturating_sub(sent));
            o.added
                .borrow_mut()
                .add((t - t0).saturating_sub(ms * 1_000_000));
        }
        429 | 503 => {
            o.refused.borrow_mut().add(t - t0);
            o.retry_after
                .set(o.retry_after.get() + u64::from(got.retry_after));
        }
        other => fail(format!(
            "status {other}: {}",
            String::from_utf8_lossy(&got.body[..got.body.len().min(200)])
        )),
    }
}

async fn closed(cfg: Rc<Cfg>, class: Rc<Class>) {
    while now() < cfg.until.get() {
        one(&cfg, &class).await;
    }
}

async fn open(cfg: Rc<Cfg>, class: Rc<Class>) {
    let (start, mut sent) = (tokio::time::Instant::now(), 0u64);
    let mut running = tokio::task::JoinSet::new();
    while now() < cfg.until.get() {
        // Every request that is due by now, for a timer wakes once in a millisecond.
        let due = (start.elapsed().as_secs_f64() * class.rate) as u64 + 1;
        while sent < due {
            sent += 1;
            let (cfg, class) = (cfg.clone(), class.clone());
            running.spawn_local(async move { one(&cfg, &class).await });
        }
        while running.try_join_next().is_some() {}
        tokio::time::sleep_until(start + Duration::from_secs_f64(sent as f64 / class.rate)).await;
    }
    while running.join_next().await.is_some() {}
}

pub fn main(a: Args) {
    procfs::raise_nofile();
    let url = a.get("url", "http://127.0.0.1:9100/v1");
    let rest = url.strip_prefix("http://").expect("only http:// base URLs");
    let (addr, prefix) = rest
        .split_once('/')
        .map_or((rest, String::new()), |(addr, path)| {
            (addr, format!("/{path}"))
        });
    let (warm, secs): (f64, f64) = (a.num("warmup", 1.0), a.num("secs", 10.0));
    let cfg = Rc::new(Cfg {
        addr: addr.into(),
        prefix: prefix.trim_end_matches('/').into(),
        model: a.get("model", "bench"),
        lo_ms: a.num("lo-ms", 20.0),
        hi_ms: a.num("hi-ms", 60.0),
        seed: Cell::new(a.num("seed", 0x2545_f491_4f6c_dd1d)),
        from: Cell::new(0),
        until: Cell::new(0),
    });
    let classes: Vec<_> = a
        .all("class")
        .iter()
        .map(|text| {
            let parts: Vec<_> = text.split(',').collect();
            let [name, key, load] = parts[..] else {
                panic!("--class name,key,conc=N or rate=N")
            };
            let (kind, n) = load.split_once('=').expect("conc=N or rate=N");
            let n: f64 = n.parse().expect("a number");
            let (conc, rate) = if kind == "rate" {
                (0, n)
            } else {
                (n as usize, 0.0)
            };
            Rc::new(Class {
                name: name.into(),
                key: key.into(),
                conc,
                rate,
                out: Out::default(),
                idle: RefCell::default(),
            })
        })
        .collect();
    let rt = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&rt, async {
        cfg.from.set(now() + (warm * 1e9) as u64);
        cfg.until.set(cfg.from.get() + (secs * 1e9) as u64);
        let mut tasks = tokio::task::JoinSet::new();
        for class in &classes {
            if class.rate > 0.0 {
                tasks.spawn_local(open(cfg.clone(), class.clone()));
            }
            (0..class.conc)
                .for_each(|_| drop(tasks.spawn_local(closed(cfg.clone(), class.clone()))));
        }
        while tasks.join_next().await.is_some() {}
    });
    let lines: Vec<_> = classes.iter().map(|class| {
        let o = &class.out;
        let (ok, refused) = (o.total.borrow().0.len(), o.refused.borrow().0.len());
        let j = |s: &RefCell<Samples>| s.borrow_mut().json();
        format!(
            "\"{}\":{{\"ok\":{ok},\"ok_s\":{:.1},\"refused\":{refused},\"retry_after\":{},\"errs\":{},\"total_us\":{},\"before_us\":{},\"service_us\":{},\"added_us\":{},\"refused_us\":{},\"last_err\":{:?}}}",
            class.name, ok as f64 / secs, o.retry_after.get(), o.errs.get(),
            j(&o.total), j(&o.before), j(&o.service), j(&o.added), j(&o.refused), o.last_err.borrow()
        )
    }).collect();
    println!("{{{}}}", lines.join(","));
}
