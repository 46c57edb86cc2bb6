//! Decides how one process serves what runs on this machine: `iop up`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use iop_adapters::auth::AuthReference;
use iop_adapters::http::Origin;
use iop_adapters::{DemoPace, OpenAiCompat, OpenAiCompatConfig, Server};
use iop_edge_core::api::Engine as _;
use iop_edge_core::catalog::{Catalog, NodeEntry, ProviderEntry};
use iop_edge_core::openai::{ApiKeys, OpenAiConfig};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::{NodeId, Redacted};
use iop_node_core::{AllowUpstream, Node, NodeError};
use iop_wire::link::memory::{MemoryMode, memory_listener};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::adapters::BuiltIn;
use crate::config::edge::{Listener, OPENAI_PORT, ProviderRecord};
use crate::config::{Exposed, Protection, exposed, is_loopback};
use crate::edge_runtime::EdgeRuntime;
use crate::exit::Failure;
use crate::listener::{HttpListener, Limits};
use crate::serve_edge::shutting_down;
use crate::shutdown::Shutdown;
use crate::term::say;
use crate::tls;

mod banner;
pub mod probe;
#[cfg(test)]
mod tests;

use probe::{Found, Probed, USUAL, probe_all};

/// Id of the one Node.
const NODE: &str = "local";
/// Id of the demo model's provider.
const DEMO: &str = "demo";
/// Ports that are tried after a taken one.
const NEXT_PORTS: u16 = 20;
/// For adapters to start.
const READY_TIME: Duration = Duration::from_secs(30);

/// Flags of `iop up`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct UpOptions {
    /// Base URL of a backend that speaks OpenAI's API; repeatable [default: look for one on this machine]
    #[arg(long, value_name = "URL")]
    pub backend: Vec<String>,
    /// Where the key of the backends is: env:NAME or file:PATH
    #[arg(long, value_name = "REFERENCE", requires = "backend")]
    pub backend_auth: Option<String>,
    /// Look for no backend: serve the demo model
    #[arg(long, conflicts_with = "backend")]
    pub demo: bool,
    /// Where clients connect [default: 127.0.0.1:8180]
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Option<SocketAddr>,
    /// Key that clients must show [default: none on loopback, else a new one]
    #[arg(long, env = "IOP_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,
    /// PEM file with the certificate chain
    #[arg(long, requires = "tls_key", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the private key
    #[arg(long, requires = "tls_cert", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Listen on other than loopback addresses without TLS all the same: keys and prompts can be read on the way
    #[arg(long)]
    pub insecure_plaintext: bool,
    /// Address for metrics and health, on loopback [default: none]
    #[arg(long, value_name = "IP:PORT")]
    pub metrics_listen: Option<SocketAddr>,
    /// Pace of the demo model
    #[arg(long, hide = true, value_name = "PACE", default_value = "real")]
    pub demo_pace: Pace,
}

/// Pace of the demo model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Pace {
    /// As fast as it goes.
    None,
    /// As a small model on a laptop.
    #[default]
    Real,
}

impl From<Pace> for DemoPace {
    fn from(pace: Pace) -> Self {
        match pace {
            Pace::None => Self::INSTANT,
            Pace::Real => Self::default(),
        }
    }
}

/// Who may call.
#[derive(Debug, Clone)]
pub enum Access {
    /// Everybody on this machine.
    Open,
    /// Whoever has the key of the command line.
    Given(Redacted<String>),
    /// Whoever has the key that was made just now: shown once.
    Made(Redacted<String>),
}

/// Whether somebody asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Nothing else was found.
    No,
    /// On the command line.
    Yes,
}

/// `iop up` while it serves.
#[derive(Debug)]
pub struct Up {
    /// Where it really listens.
    pub address: SocketAddr,
    /// What clients use.
    pub base_url: String,
    /// Who may call.
    pub access: Access,
    /// Public names.
    pub models: Vec<String>,
    /// What was found.
    pub probed: Vec<Probed>,
    /// The demo model is served, and whether somebody asked for it.
    pub demo: Option<Asked>,
    /// Where metrics are.
    pub metrics: Option<SocketAddr>,
    tls_cert: Option<PathBuf>,
    moved_from: Option<SocketAddr>,
    serving: JoinHandle<()>,
    node: JoinHandle<Result<(), NodeError>>,
}

/// `iop up`.
///
/// # Errors
/// [`Failure`] when it can't start, or the Node in it ends.
pub async fn up(options: UpOptions) -> Result<(), Failure> {
    let shutdown =
        Shutdown::on_signals().map_err(|error| Failure::fatal(format!("can't listen for signals: {error}")))?;
    let mut up = tokio::select! {
        up = start(&options, shutdown.clone()) => up?,
        () = shutdown.gracefully.cancelled() => return Ok(()),
    };
    say(banner::banner(&up));
    tokio::select! {
        _ = &mut up.serving => {}
        ended = &mut up.node => {
            if !shutdown.gracefully.is_cancelled() {
                return Err(node_failure(ended.ok().and_then(Result::err)));
            }
            let _served = (&mut up.serving).await;
        }
    }
    say("stopped");
    Ok(())
}

/// Starts everything; returns when requests can be served.
///
/// # Errors
/// [`Failure`] with the next step.
pub async fn start(options: &UpOptions, shutdown: Shutdown) -> Result<Up, Failure> {
    let wanted = options.listen.unwrap_or(Listener::loopback(OPENAI_PORT).address);
    let access = access(options, wanted)?;
    check_exposure(options, wanted)?;
    let auth = options.backend_auth.as_deref().map(AuthReference::parse).transpose();
    let auth =
        auth.map_err(|error| Failure::usage(format!("--backend-auth: {error}")).hint("--backend-auth env:NAME"))?;
    let tls = match (&options.tls_cert, &options.tls_key) {
        (Some(cert), Some(key)) => {
            let unusable = |error: tls::TlsError| Failure::usage(error.to_string());
            Some(tls::openai_server(&tls::load_pair(cert, key).map_err(unusable)?).map_err(unusable)?)
        }
        _ => None,
    };
    let probed = find(options, auth.as_ref()).await?;
    let (openai, moved) = listen(wanted, tls).await?;
    let metrics = match options.metrics_listen {
        Some(address) => {
            let failed = |error| Failure::fatal(format!("can't listen at {address} (--metrics-listen): {error}"));
            Some(HttpListener::bind(address, None, Limits::default()).await.map_err(failed)?)
        }
        None => None,
    };
    let providers: Vec<_> = probed.iter().filter(|probed| is_usable(&probed.found)).collect();
    let demo = !providers.iter().any(|probed| has_models(&probed.found));
    let mut records: Vec<_> =
        providers.iter().map(|probed| record(&probed.name, Some((&probed.url, probed.kind)), auth.as_ref())).collect();
    if demo {
        records.push(record(DEMO, None, None));
    }
    crate::timers::log_providers(&records);
    let (catalog, token) = catalog(&records)?;
    let keys = match &access {
        Access::Open => ApiKeys::open(),
        Access::Given(key) | Access::Made(key) => ApiKeys::fixed(key.expose()),
    };
    let runtime = EdgeRuntime::start(catalog, "iop-up", OpenAiConfig::default().with_keys(Arc::new(keys)));
    let node = start_node(options, &runtime, token, &shutdown).await?;

    let unknown = |error: std::io::Error| Failure::fatal(format!("can't tell where it listens: {error}"));
    let address = openai.local_addr().map_err(unknown)?;
    let metrics_address = metrics.as_ref().map(HttpListener::local_addr).transpose().map_err(unknown)?;
    let models = runtime.edge().models().into_iter().map(|model| model.name.to_string()).collect();
    let scheme = if options.tls_cert.is_some() { "https" } else { "http" };
    Ok(Up {
        address,
        base_url: format!("{scheme}://{}/v1", banner::reachable(address, options.tls_cert.is_some())),
        access,
        models,
        demo: demo.then_some(if options.demo { Asked::Yes } else { Asked::No }),
        metrics: metrics_address,
        tls_cert: options.tls_cert.clone(),
        moved_from: moved.then_some(wanted),
        serving: tokio::spawn(serve(runtime, openai, metrics, shutdown)),
        node,
        probed,
    })
}

/// There is no admin API here: a process that one person started in a terminal is operated in that terminal.
async fn serve(runtime: EdgeRuntime, openai: HttpListener, metrics: Option<HttpListener>, shutdown: Shutdown) {
    let admin = metrics.map(|listener| (listener, runtime.admin()));
    runtime.serve(openai, admin, shutdown, shutting_down).await;
}

fn access(options: &UpOptions, wanted: SocketAddr) -> Result<Access, Failure> {
    match options.api_key.as_deref().filter(|key| !key.is_empty()) {
        Some(key) if key.len() > 256 || !key.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Err(Failure::usage("the API key must be 1 to 256 visible ASCII characters")
                .hint("--api-key my-key, or IOP_API_KEY"))
        }
        Some(key) => Ok(Access::Given(Redacted::new(key.to_owned()))),
        None if is_loopback(wanted) => Ok(Access::Open),
        None => {
            let key = Token::generate(TokenKind::ApiKey);
            let key =
                key.map_err(|error| Failure::fatal(format!("the operating system gives no randomness: {error}")))?;
            Ok(Access::Made(Redacted::new(key.reveal())))
        }
    }
}

fn check_exposure(options: &UpOptions, wanted: SocketAddr) -> Result<(), Failure> {
    let protection = Protection {
        // A listener that others can reach has a key: given, or made.
        auth: true,
        tls: options.tls_cert.is_some(),
        insecure_no_auth: false,
        insecure_plaintext: options.insecure_plaintext,
    };
    if exposed(wanted, protection).contains(&Exposed::NoTls) {
        let message = format!(
            "{wanted} is reachable from other machines, and without TLS keys and prompts can be read on the way"
        );
        return Err(Failure::usage(message).hint(
            "give --tls-cert FILE --tls-key FILE (`iop init --host NAME` makes them), or say --insecure-plaintext, or listen on 127.0.0.1",
        ));
    }
    match options.metrics_listen {
        Some(address) if !is_loopback(address) => {
            Err(Failure::usage(format!("metrics have neither key nor TLS and must not listen at {address}"))
                .hint("--metrics-listen 127.0.0.1:9190"))
        }
        Some(_) | None => Ok(()),
    }
}

/// True for what is worth a provider: one that loads its model lists it soon, and is asked again until then.
const fn is_usable(found: &Found) -> bool {
    match found {
        Found::Backend(_) | Found::Loading => true,
        Found::Iop | Found::Unauthorized | Found::Other(_) | Found::Silent | Found::Nothing => false,
    }
}

fn has_models(found: &Found) -> bool {
    matches!(found, Found::Backend(models) if !models.is_empty())
}

async fn find(options: &UpOptions, auth: Option<&AuthReference>) -> Result<Vec<Probed>, Failure> {
    if options.demo {
        return Ok(Vec::new());
    }
    if options.backend.is_empty() {
        let places = USUAL.map(|(name, port)| (name.to_owned(), format!("http://127.0.0.1:{port}")));
        let mut probed = probe_all(places.to_vec()).await;
        probed.retain(|probed| probed.found != Found::Nothing);
        return Ok(probed);
    }
    let mut places: Vec<(String, String)> = Vec::new();
    for url in &options.backend {
        let wrong =
            |error| Failure::usage(format!("--backend: {error}")).hint("for example --backend http://127.0.0.1:8000");
        let origin = Origin::parse(url).map_err(wrong)?.to_string();
        if places.iter().any(|(_, known)| *known == origin) {
            return Err(Failure::usage(format!("--backend {origin} is there twice")));
        }
        let name = origin.split_once("://").map_or(origin.as_str(), |(_, name)| name).to_owned();
        places.push((name, origin));
    }
    let mut probed = probe_all(places).await;
    for probed in &mut probed {
        if let (Found::Unauthorized, Some(auth)) = (&probed.found, auth) {
            (probed.found, probed.kind) = ask_with_key(&probed.url, auth).await?;
        }
    }
    if !probed.iter().any(|probed| is_usable(&probed.found)) {
        let failure = Failure::fatal(format!("no backend can be used:\n{}", banner::backends(&probed).trim_end()));
        let locked = probed.iter().any(|probed| probed.found == Found::Unauthorized);
        return Err(failure.hint(if locked {
            "name the key with --backend-auth env:NAME"
        } else {
            "start it first; without --backend, `iop up` looks for one and has a demo model"
        }));
    }
    Ok(probed)
}

async fn ask_with_key(url: &str, auth: &AuthReference) -> Result<(Found, &'static str), Failure> {
    let config = OpenAiCompatConfig::new(url).with_auth(Some(auth.clone()));
    let adapter = OpenAiCompat::new(config).map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        Failure::usage(format!("--backend-auth: {error}: {cause}"))
    })?;
    Ok(match adapter.discover().await {
        Ok(found) => {
            let kind = match found.server {
                Server::Any => "openai_compat",
                Server::LlamaCpp => "llama_cpp",
                Server::LmStudio => "lm_studio",
                Server::Sglang => "sglang",
                Server::Vllm => "vllm",
            };
            (Found::Backend(found.targets.iter().map(|target| target.target.to_string()).collect()), kind)
        }
        Err(_) => (Found::Unauthorized, "openai_compat"),
    })
}

/// Binds the wanted address, or the next free port after it.
async fn listen(wanted: SocketAddr, tls: Option<Arc<rustls::ServerConfig>>) -> Result<(HttpListener, bool), Failure> {
    let mut address = wanted;
    loop {
        match HttpListener::bind(address, tls.clone(), Limits::default()).await {
            Ok(listener) => return Ok((listener, address != wanted)),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => match address.port().checked_add(1) {
                Some(next) if next - wanted.port() <= NEXT_PORTS => address.set_port(next),
                Some(_) | None => {
                    let last = address.port();
                    return Err(Failure::fatal(format!("ports {} to {last} are taken", wanted.port()))
                        .hint("--listen 127.0.0.1:0 takes any free one"));
                }
            },
            Err(error) => {
                return Err(
                    Failure::fatal(format!("can't listen at {address}: {error}")).hint("--listen 127.0.0.1:8180")
                );
            }
        }
    }
}

fn record(id: &str, backend: Option<(&str, &str)>, auth: Option<&AuthReference>) -> ProviderRecord {
    ProviderRecord {
        id: id.to_owned(),
        adapter: None,
        kind: backend.map_or("demo", |(_, kind)| kind).to_owned(),
        base_url: backend.map(|(url, _)| url.to_owned()),
        wire: crate::config::edge::WireConfig::Auto,
        capacity: None,
        long_capacity: None,
        targets: Vec::new(),
        response_stall_timeout_ms: 0,
        first_response_timeout_ms: 0,
        first_response_per_1k_prompt_ms: 0,
        probe_timeout_ms: 0,
        close_grace_ms: 0,
        terminal_linger_ms: 0,
        cancel_policy: crate::config::edge::CancelPolicyConfig::Abort,
        auth: auth.map(|auth| crate::config::edge::ProviderAuth { bearer: auth.to_string() }),
        credential: None,
        enabled: true,
    }
}

fn catalog(records: &[ProviderRecord]) -> Result<(Catalog, Redacted<String>), Failure> {
    let random = |error: getrandom::Error| Failure::fatal(format!("the operating system gives no randomness: {error}"));
    let token = Token::generate(TokenKind::Node).map_err(random)?;
    let providers: Result<Vec<_>, Failure> =
        records.iter().map(|record| record.provider_config().map(ProviderEntry::new)).collect();
    let id = NodeId::new(NODE).map_err(|error| Failure::fatal(error.to_string()))?;
    let node = NodeEntry::new(id, token.id().clone(), token.hash(), providers?);
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let catalog = Catalog::builder().created(created).models_auto(true).node(node).build();
    Ok((catalog.map_err(|error| Failure::fatal(error.to_string()))?, Redacted::new(token.reveal())))
}

async fn start_node(
    options: &UpOptions,
    runtime: &EdgeRuntime,
    token: Redacted<String>,
    shutdown: &Shutdown,
) -> Result<JoinHandle<Result<(), NodeError>>, Failure> {
    let (connector, mut links) = memory_listener(MemoryMode::Direct);
    let edge = runtime.edge().clone();
    tokio::spawn(async move {
        while let Some(link) = links.accept().await {
            tokio::spawn(edge.attach(link));
        }
    });
    // What is named on the command line is allowed; the rest stays as a Node has it.
    let hosts = options
        .backend
        .iter()
        .filter_map(|url| url.parse::<http::Uri>().ok()?.host().map(|host| host.trim_matches(['[', ']']).to_owned()));
    let rules = ["loopback".to_owned(), "private".to_owned()].into_iter().chain(hosts);
    let upstream = AllowUpstream::parse(rules).map_err(|error| Failure::usage(format!("--backend: {error}")))?;
    let node = Node::builder(token, Arc::new(connector))
        .factory(Arc::new(BuiltIn { demo_pace: options.demo_pace.into() }))
        .allow_upstream(upstream)
        .build()
        .map_err(|error| Failure::fatal(error.to_string()))?;
    let mut status = node.status();
    // The Edge drains first and tells the Node, so this one ends with the process only.
    let serving = tokio::spawn(async move { node.serve(CancellationToken::new()).await.map(|_| ()) });
    tokio::select! {
        ready = timeout(READY_TIME, status.wait_ready()) => match ready {
            Ok(true) => Ok(serving),
            Ok(false) => Err(node_failure(serving.await.ok().and_then(Result::err))),
            Err(_) => Err(node_failure(None).hint("--log-filter debug says more")),
        },
        () = shutdown.gracefully.cancelled() => Ok(serving),
    }
}

fn node_failure(error: Option<NodeError>) -> Failure {
    match error {
        Some(error) => Failure::fatal(format!("the Node in this process ended: {error}")),
        None => Failure::fatal("the Node in this process did not become ready"),
    }
}
