//! Reference floors: the least work a Rust gateway of each shape can do. No auth, no routing, no metrics.
//!   floor hyper --listen A --to UPSTREAM                      one hop: hyper server -> hyper client
//!   floor edge  --listen A --link L [--wire raw|tonic]        two hops, edge side (nodes dial in on L)
//!   floor node  --link L --to UPSTREAM [--wire raw|tonic]     two hops, node side
//! All take --merge 1 to join body frames that are already there before passing them on, and --rt current.
//! The node also takes --client raw: its own HTTP/1.1 client, one frame per socket read instead of one per chunk.
//! The link is one connection: length-prefixed protobuf frames (raw) or one gRPC bidi stream (tonic), with a
//! credit window per request, so that one slow reader holds up neither the link nor memory.
#[allow(dead_code)] // `bench` uses the rest of these three
mod args;
#[allow(dead_code)]
mod http1;
#[allow(dead_code)]
mod procfs;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::{FutureExt, StreamExt};
use http_body_util::{combinators::BoxBody, BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::client::legacy::{connect::HttpConnector, Client};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, Semaphore};

type Err = Box<dyn std::error::Error + Send + Sync>;
type Out = BoxBody<Bytes, Err>;
type Http = Client<HttpConnector, Full<Bytes>>;

const WINDOW: u32 = 256 << 10;
const MERGE_MAX: usize = 16 << 10;

#[derive(Clone, PartialEq, Message)]
struct Hdr {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct Msg {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(enumeration = "Kind", tag = "2")]
    kind: i32,
    #[prost(uint64, tag = "3")]
    seq: u64,
    #[prost(bytes = "bytes", tag = "4")]
    data: Bytes,
    #[prost(message, repeated, tag = "5")]
    headers: Vec<Hdr>,
    #[prost(uint32, tag = "6")]
    num: u32,
    #[prost(string, tag = "7")]
    path: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
enum Kind {
    Hello = 0,
    Request = 1,
    Head = 2,
    Body = 3,
    End = 4,
    Error = 5,
    Credit = 6,
    Cancel = 7,
}

fn hop_by_hop(n: &str) -> bool {
    matches!(
        n,
        "connection"
            | "keep-alive"
            | "transfer-encoding"
            | "te"
            | "trailer"
            | "upgrade"
            | "proxy-authorization"
            | "proxy-authenticate"
            | "content-length"
            | "host"
    )
}

fn pack(h: &HeaderMap) -> Vec<Hdr> {
    h.iter()
        .filter(|(n, _)| !hop_by_hop(n.as_str()))
        .map(|(n, v)| Hdr {
            name: n.as_str().into(),
            value: Bytes::copy_from_slice(v.as_bytes()),
        })
        .collect()
}

fn http_client() -> Http {
    let mut c = HttpConnector::new();
    c.set_nodelay(true);
    Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(2048)
        .build(c)
}

/// The next body bytes; with `merge`, plus whatever else is ready.
async fn next_data(b: &mut Incoming, merge: bool) -> Result<Option<Bytes>, Err> {
    let first = loop {
        match b.frame().await {
            None => return Ok(None),
            Some(f) => {
                if let Ok(d) = f?.into_data() {
                    break d;
                }
            }
        }
    };
    if !merge {
        return Ok(Some(first));
    }
    let mut acc: Option<BytesMut> = None;
    while acc.as_ref().map_or(first.len(), |a| a.len()) < MERGE_MAX {
        match b.frame().now_or_never() {
            Some(Some(f)) => {
                if let Ok(d) = f?.into_data() {
                    acc.get_or_insert_with(|| BytesMut::from(&first[..]))
                        .extend_from_slice(&d);
                }
            }
            _ => break,
        }
    }
    Ok(Some(acc.map_or(first, |a| a.freeze())))
}

fn stream_body<S>(s: S) -> Out
where
    S: futures_util::Stream<Item = Result<Frame<Bytes>, Err>> + Send + Sync + 'static,
{
    BodyExt::boxed(StreamBody::new(s))
}

fn fail(code: u16, what: &str) -> Response<Out> {
    Response::builder()
        .status(code)
        .body(
            Full::new(Bytes::from(what.to_string()))
                .map_err(|e| match e {})
                .boxed(),
        )
        .unwrap()
}

async fn serve<F, Fut>(listen: String, f: F)
where
    F: Fn(Request<Incoming>) -> Fut + Clone + Send + Sync + 'static,
    Fut: std::future::Future<Output = Result<Response<Out>, Err>> + Send + 'static,
{
    let l = TcpListener::bind(&listen).await.expect("bind");
    loop {
        let Ok((s, _)) = l.accept().await else {
            continue;
        };
        let _ = s.set_nodelay(true);
        let f = f.clone();
        tokio::spawn(async move {
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(s), service_fn(f))
                .await;
        });
    }
}

// ---- one hop ----

async fn one_hop(listen: String, to: String, merge: bool) {
    let c = http_client();
    serve(listen, move |req| {
        let (c, to) = (c.clone(), to.clone());
        async move {
            let (p, b) = req.into_parts();
            let body = b.collect().await?.to_bytes();
            let mut r = Request::builder()
                .method(p.method)
                .uri(format!("http://{to}{}", p.uri.path()));
            for (n, v) in &p.headers {
                if !hop_by_hop(n.as_str()) {
                    r = r.header(n, v);
                }
            }
            let Ok(resp) = c.request(r.body(Full::new(body))?).await else {
                return Ok(fail(502, "upstream"));
            };
            let (mut hp, hb) = resp.into_parts();
            hp.headers.remove("transfer-encoding");
            if !merge {
                return Ok(Response::from_parts(hp, hb.map_err(|e| e.into()).boxed()));
            }
            let s = futures_util::stream::unfold(hb, |mut b| async move {
                match next_data(&mut b, true).await {
                    Ok(Some(d)) => Some((Ok(Frame::data(d)), b)),
                    Ok(None) => None,
                    Err(e) => Some((Err(e), b)),
                }
            });
            Ok(Response::from_parts(hp, stream_body(s)))
        }
    })
    .await
}

// ---- the link ----

struct Link {
    tx: mpsc::Sender<Msg>,
    rx: mpsc::Receiver<Msg>,
}

fn raw_link(s: TcpStream) -> Link {
    let _ = s.set_nodelay(true);
    let (mut r, mut w) = s.into_split();
    let (tx, mut txr) = mpsc::channel::<Msg>(1024);
    let (rxt, rx) = mpsc::channel::<Msg>(1024);
    tokio::spawn(async move {
        let mut buf = BytesMut::with_capacity(64 << 10);
        while let Some(m) = txr.recv().await {
            let mut m = Some(m);
            while let Some(x) = m {
                buf.put_u32(x.encoded_len() as u32);
                let _ = x.encode(&mut buf);
                m = if buf.len() < 64 << 10 {
                    txr.try_recv().ok()
                } else {
                    None
                };
            }
            if w.write_all(&buf).await.is_err() {
                return;
            }
            buf.clear();
        }
    });
    tokio::spawn(async move {
        let mut buf = BytesMut::with_capacity(64 << 10);
        loop {
            while buf.len() >= 4 {
                let n = u32::from_be_bytes(buf[..4].try_into().unwrap()) as usize;
                if buf.len() < 4 + n {
                    buf.reserve(4 + n - buf.len());
                    break;
                }
                buf.advance(4);
                let Ok(m) = Msg::decode(buf.split_to(n).freeze()) else {
                    return;
                };
                if rxt.send(m).await.is_err() {
                    return;
                }
            }
            buf.reserve(16 << 10);
            match r.read_buf(&mut buf).await {
                Ok(n) if n > 0 => {}
                _ => return,
            }
        }
    });
    Link { tx, rx }
}

type TonicCodec = tonic_prost::ProstCodec<Msg, Msg>;

fn from_stream(mut s: tonic::Streaming<Msg>, tx: mpsc::Sender<Msg>) -> Link {
    let (rxt, rx) = mpsc::channel(1024);
    tokio::spawn(async move {
        while let Ok(Some(m)) = s.message().await {
            if rxt.send(m).await.is_err() {
                return;
            }
        }
    });
    Link { tx, rx }
}

#[derive(Clone)]
struct LinkSvc(mpsc::Sender<Link>);

impl tonic::server::NamedService for LinkSvc {
    const NAME: &'static str = "floor.Link";
}

impl tonic::server::StreamingService<Msg> for LinkSvc {
    type Response = Msg;
    type ResponseStream = futures_util::stream::BoxStream<'static, Result<Msg, tonic::Status>>;
    type Future = futures_util::future::BoxFuture<
        'static,
        Result<tonic::Response<Self::ResponseStream>, tonic::Status>,
    >;
    fn call(&mut self, r: tonic::Request<tonic::Streaming<Msg>>) -> Self::Future {
        let me = self.0.clone();
        Box::pin(async move {
            let (tx, txr) = mpsc::channel(1024);
            let _ = me.send(from_stream(r.into_inner(), tx)).await;
            Ok(tonic::Response::new(
                tokio_stream::wrappers::ReceiverStream::new(txr)
                    .map(Ok)
                    .boxed(),
            ))
        })
    }
}

impl tonic::codegen::Service<hyper::Request<tonic::body::Body>> for LinkSvc {
    type Response = hyper::Response<tonic::body::Body>;
    type Error = std::convert::Infallible;
    type Future = futures_util::future::BoxFuture<'static, Result<Self::Response, Self::Error>>;
    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Self::Error>> {
        std::task::Poll::Ready(Ok(()))
    }
    fn call(&mut self, r: hyper::Request<tonic::body::Body>) -> Self::Future {
        let me = self.clone();
        Box::pin(async move {
            Ok(tonic::server::Grpc::new(TonicCodec::default())
                .streaming(me, r)
                .await)
        })
    }
}

async fn accept_links(addr: String, tonic: bool, out: mpsc::Sender<Link>) {
    if tonic {
        let r = tonic::transport::Server::builder()
            .tcp_nodelay(true)
            .initial_stream_window_size(4 << 20)
            .initial_connection_window_size(8 << 20)
            .add_service(LinkSvc(out))
            .serve(addr.parse().unwrap())
            .await;
        eprintln!("link server ended: {r:?}");
        return;
    }
    let l = TcpListener::bind(&addr).await.expect("bind link");
    while let Ok((s, _)) = l.accept().await {
        let _ = out.send(raw_link(s)).await;
    }
}

async fn dial_link(addr: &str, tonic: bool) -> Result<Link, Err> {
    if !tonic {
        return Ok(raw_link(TcpStream::connect(addr).await?));
    }
    let ch = tonic::transport::Endpoint::new(format!("http://{addr}"))?
        .tcp_nodelay(true)
        .initial_stream_window_size(4 << 20)
        .initial_connection_window_size(8 << 20)
        .connect()
        .await?;
    let (tx, txr) = mpsc::channel(1024);
    tx.send(Msg {
        kind: Kind::Hello as i32,
        ..Default::default()
    })
    .await?;
    let mut g = tonic::client::Grpc::new(ch);
    g.ready().await?;
    let path = hyper::http::uri::PathAndQuery::from_static("/floor.Link/Open");
    let s = g
        .streaming(
            tonic::Request::new(tokio_stream::wrappers::ReceiverStream::new(txr)),
            path,
            TonicCodec::default(),
        )
        .await?
        .into_inner();
    Ok(from_stream(s, tx))
}

// ---- edge ----

struct Live {
    tx: mpsc::Sender<Msg>,
    streams: Mutex<HashMap<u64, mpsc::UnboundedSender<Msg>>>,
}

struct Guard {
    live: Arc<Live>,
    id: u64,
    ended: bool,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.live.streams.lock().unwrap().remove(&self.id);
        if !self.ended {
            let _ = self.live.tx.try_send(Msg {
                id: self.id,
                kind: Kind::Cancel as i32,
                ..Default::default()
            });
        }
    }
}

async fn edge(listen: String, link: String, tonic: bool) {
    let (lt, mut lr) = mpsc::channel(4);
    tokio::spawn(accept_links(link, tonic, lt));
    let cur: Arc<Mutex<Option<Arc<Live>>>> = Default::default();
    let cur2 = cur.clone();
    tokio::spawn(async move {
        while let Some(Link { tx, mut rx }) = lr.recv().await {
            let live = Arc::new(Live {
                tx,
                streams: Default::default(),
            });
            *cur2.lock().unwrap() = Some(live.clone());
            eprintln!("node up");
            tokio::spawn(async move {
                while let Some(m) = rx.recv().await {
                    // Unbounded, but never more than the credit window of bytes per stream.
                    if let Some(s) = live.streams.lock().unwrap().get(&m.id) {
                        let _ = s.send(m);
                    }
                }
                live.streams.lock().unwrap().clear();
            });
        }
    });
    let ids = Arc::new(std::sync::atomic::AtomicU64::new(1));
    serve(listen, move |req| {
        let live = cur.lock().unwrap().clone();
        let id = ids.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        async move {
            let Some(live) = live else {
                return Ok(fail(503, "no node"));
            };
            let (p, b) = req.into_parts();
            let body = b.collect().await?.to_bytes();
            let (st, mut sr) = mpsc::unbounded_channel();
            live.streams.lock().unwrap().insert(id, st);
            let mut g = Guard {
                live: live.clone(),
                id,
                ended: false,
            };
            let m = Msg {
                id,
                kind: Kind::Request as i32,
                path: p.uri.path().into(),
                headers: pack(&p.headers),
                data: body,
                ..Default::default()
            };
            live.tx.send(m).await?;
            let Some(h) = sr.recv().await else {
                return Ok(fail(502, "node lost"));
            };
            if h.kind != Kind::Head as i32 {
                g.ended = true;
                return Ok(fail(502, "upstream"));
            }
            let mut r = Response::builder().status(h.num as u16);
            for x in &h.headers {
                r = r.header(&x.name, &x.value[..]);
            }
            let s = futures_util::stream::unfold(
                (sr, g, 0u64, 0u32),
                |(mut sr, mut g, seq, mut used)| async move {
                    match sr.recv().await {
                        Some(m) if m.kind == Kind::Body as i32 && m.seq == seq => {
                            used += m.data.len() as u32;
                            if used >= WINDOW / 2 {
                                let _ = g
                                    .live
                                    .tx
                                    .send(Msg {
                                        id: g.id,
                                        kind: Kind::Credit as i32,
                                        num: used,
                                        ..Default::default()
                                    })
                                    .await;
                                used = 0;
                            }
                            Some((Ok(Frame::data(m.data)), (sr, g, seq + 1, used)))
                        }
                        Some(m) if m.kind == Kind::End as i32 => {
                            g.ended = true;
                            drop(g);
                            None
                        }
                        _ => Some((Err("stream broken".into()), (sr, g, seq, used))),
                    }
                },
            );
            Ok(r.body(stream_body(s))?)
        }
    })
    .await
}

// ---- node ----

async fn node(link: String, to: String, tonic: bool, merge: bool, raw_client: bool) {
    let c = http_client();
    let pool: Pool = Default::default();
    loop {
        let Ok(Link { tx, mut rx }) = dial_link(&link, tonic).await else {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            continue;
        };
        let windows: Arc<Mutex<HashMap<u64, Arc<Semaphore>>>> = Default::default();
        while let Some(m) = rx.recv().await {
            if m.kind == Kind::Credit as i32 {
                if let Some(w) = windows.lock().unwrap().get(&m.id) {
                    w.add_permits(m.num as usize);
                }
            } else if m.kind == Kind::Cancel as i32 {
                if let Some(w) = windows.lock().unwrap().remove(&m.id) {
                    w.close();
                }
            } else if m.kind == Kind::Request as i32 {
                let w = Arc::new(Semaphore::new(WINDOW as usize));
                windows.lock().unwrap().insert(m.id, w.clone());
                let (c, to, tx, windows, pool) = (
                    c.clone(),
                    to.clone(),
                    tx.clone(),
                    windows.clone(),
                    pool.clone(),
                );
                tokio::spawn(async move {
                    let id = m.id;
                    let r = if raw_client {
                        run_raw(pool, to, m, &tx, w).await
                    } else {
                        run(c, to, m, &tx, w, merge).await
                    };
                    windows.lock().unwrap().remove(&id);
                    let kind = if r.is_ok() { Kind::End } else { Kind::Error };
                    let _ = tx
                        .send(Msg {
                            id,
                            kind: kind as i32,
                            ..Default::default()
                        })
                        .await;
                });
            }
        }
    }
}

async fn run(
    c: Http,
    to: String,
    m: Msg,
    tx: &mpsc::Sender<Msg>,
    w: Arc<Semaphore>,
    merge: bool,
) -> Result<(), Err> {
    let mut r = Request::builder()
        .method("POST")
        .uri(format!("http://{to}{}", m.path));
    for h in &m.headers {
        r = r.header(&h.name, &h.value[..]);
    }
    let (p, mut b) = c.request(r.body(Full::new(m.data))?).await?.into_parts();
    tx.send(Msg {
        id: m.id,
        kind: Kind::Head as i32,
        num: p.status.as_u16() as u32,
        headers: pack(&p.headers),
        ..Default::default()
    })
    .await?;
    let mut seq = 0;
    while let Some(d) = next_data(&mut b, merge).await? {
        w.acquire_many((d.len() as u32).min(WINDOW)).await?.forget();
        tx.send(Msg {
            id: m.id,
            kind: Kind::Body as i32,
            seq,
            data: d,
            ..Default::default()
        })
        .await?;
        seq += 1;
    }
    Ok(())
}

type Pool = Arc<Mutex<Vec<TcpStream>>>;

async fn run_raw(
    pool: Pool,
    to: String,
    m: Msg,
    tx: &mpsc::Sender<Msg>,
    w: Arc<Semaphore>,
) -> Result<(), Err> {
    let kept = pool.lock().unwrap().pop();
    let mut s = match kept {
        Some(s) => s,
        None => {
            let s = TcpStream::connect(&to).await?;
            s.set_nodelay(true)?;
            s
        }
    };
    let mut req = Vec::with_capacity(512 + m.data.len());
    req.extend_from_slice(
        format!(
            "POST {} HTTP/1.1\r\nhost: {to}\r\ncontent-length: {}\r\n",
            m.path,
            m.data.len()
        )
        .as_bytes(),
    );
    for h in &m.headers {
        req.extend_from_slice(h.name.as_bytes());
        req.extend_from_slice(b": ");
        req.extend_from_slice(&h.value);
        req.extend_from_slice(b"\r\n");
    }
    req.extend_from_slice(b"\r\n");
    req.extend_from_slice(&m.data);
    s.write_all(&req).await?;
    let mut buf = BytesMut::with_capacity(16 << 10);
    let head = loop {
        if s.read_buf(&mut buf).await? == 0 {
            return Err("eof".into());
        }
        if let Some((n, h)) = http1::response(&buf)? {
            let mut hs = [httparse::EMPTY_HEADER; 96];
            let mut r = httparse::Response::new(&mut hs);
            let _ = r.parse(&buf);
            let headers = r
                .headers
                .iter()
                .filter(|x| !hop_by_hop(&x.name.to_ascii_lowercase()))
                .map(|x| Hdr {
                    name: x.name.into(),
                    value: Bytes::copy_from_slice(x.value),
                })
                .collect();
            tx.send(Msg {
                id: m.id,
                kind: Kind::Head as i32,
                num: h.status as u32,
                headers,
                ..Default::default()
            })
            .await?;
            buf.advance(n);
            break h;
        }
    };
    let mut body = http1::Body::new(head.framing);
    let mut seq = 0;
    loop {
        let mut out = Vec::with_capacity(buf.len());
        let used = body.feed(&buf, &mut out)?;
        buf.advance(used);
        if !out.is_empty() {
            w.acquire_many((out.len() as u32).min(WINDOW))
                .await?
                .forget();
            tx.send(Msg {
                id: m.id,
                kind: Kind::Body as i32,
                seq,
                data: out.into(),
                ..Default::default()
            })
            .await?;
            seq += 1;
        }
        if body.done() {
            break;
        }
        buf.reserve(16 << 10);
        if s.read_buf(&mut buf).await? == 0 {
            if head.framing == http1::Framing::Close {
                return Ok(());
            }
            return Err("eof in body".into());
        }
    }
    if !head.close {
        pool.lock().unwrap().push(s);
    }
    Ok(())
}

fn main() {
    procfs::raise_nofile();
    let mut it = std::env::args().skip(1);
    let cmd = it.next().unwrap_or_default();
    let a = args::Args::parse(it);
    let (listen, link, to) = (
        a.get("listen", "127.0.0.1:9200"),
        a.get("link", "127.0.0.1:9201"),
        a.get("to", "127.0.0.1:9100"),
    );
    let (tonic, merge) = (a.get("wire", "raw") == "tonic", a.num("merge", 0u8) > 0);
    let raw_client = a.get("client", "hyper") == "raw";
    let rt = if a.get("rt", "multi") == "current" {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    } else {
        tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    rt.block_on(async move {
        match cmd.as_str() {
            "hyper" => one_hop(listen, to, merge).await,
            "edge" => edge(listen, link, tonic).await,
            "node" => node(link, to, tonic, merge, raw_client).await,
            _ => eprintln!("usage: floor hyper|edge|node [--flag value]..."),
        }
    });
}
