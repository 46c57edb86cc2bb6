//! Decides whether a provider's key reaches exactly the call it was lent for: through Edge, link, Node and adapter, in virtual
//! time, against a paid backend that writes down what it is called with.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderMap, HeaderValue, StatusCode};
use iop_adapters::http::{Upstream, UpstreamError, UpstreamRequest, UpstreamResponse};
use iop_adapters::{OpenAiCompat, OpenAiCompatConfig};
use iop_credential_lease::{
    Binding, Grant, InvalidCredential, IssuerKey, NodeName, ProviderCredential, RecipientKey, RecipientPublicKey,
    RunName, TargetName, UpstreamOrigin,
};
use iop_edge_core::REVISION_OVERLAP;
use iop_edge_core::api::{Admitted, EndNote, Engine, Payload, Submit, WireKind};
use iop_edge_core::catalog::{
    Catalog, CredentialForm, CredentialProfile, CredentialRoute, CredentialSlot, CredentialSource, Credentials,
    PrincipalName, ProfileName, RouteName, Scope, SlotName, SlotSecret, SlotStatus, Strategy,
};
use iop_edge_core::observe::{CredentialRefuser, Observation, Observer};
use iop_edge_core::openai::{AllowedModels, ApiKeyRecord, ApiKeys, OpenAiConfig};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::failure::{BindingField, CredentialReason};
use iop_execution::testkit::{Logged, Script, ScriptHandle, ScriptedProvider, alone};
use iop_execution::{AdapterKey, ModelName, Principal, Provider, RunId};
use iop_node_core::{LeaseOutcome, NodeObserver};
use iop_tests::pair::{Managed, Pair, PairPlan, PairProvider, Tap, changed};
use iop_tests::wire_client::{Answer, Request};
use iop_wire::{DispatchHead, ToEdge, ToNode};
use serde_json::{Value, json};
use tokio::time::Instant;

const ORIGIN: (&str, &str, u16) = ("http", "127.0.0.1", 9);
const MODELS: [&str; 2] = ["paid", "paid-run"];

/// What the paid backend was called with.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Called {
    authorization: Vec<String>,
    api_key: Vec<String>,
}

/// A backend that wants a key for each call.
#[derive(Default)]
struct Paid {
    calls: Mutex<Vec<Called>>,
    /// It answers after this long.
    slow: Mutex<Duration>,
}

impl std::fmt::Debug for Paid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // It wrote down keys.
        f.write_str("Paid")
    }
}

impl Paid {
    fn calls(&self) -> Vec<Called> {
        self.calls.lock().unwrap().clone()
    }
}

#[iop_execution::async_trait]
impl Upstream for Paid {
    async fn send(&self, request: UpstreamRequest) -> Result<UpstreamResponse, UpstreamError> {
        let all = |name: &str| -> Vec<String> {
            request.headers.get_all(name).iter().map(|value| value.to_str().unwrap().to_owned()).collect()
        };
        let called = Called { authorization: all("authorization"), api_key: all("x-api-key") };
        let mut body = request.body;
        let mut bytes = Vec::new();
        while let Some(chunk) = body.next().await {
            bytes.extend_from_slice(&chunk.map_err(|_| UpstreamError::RequestBody)?);
        }
        self.calls.lock().unwrap().push(called);
        let slow = *self.slow.lock().unwrap();
        tokio::time::sleep(slow).await;
        let asked: Value = serde_json::from_slice(&bytes).unwrap();
        let mut headers = HeaderMap::new();
        let text = if asked["stream"] == true {
            headers.insert("content-type", HeaderValue::from_static("text/event-stream"));
            let chunk = |delta: Value, finish: Value| {
                json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "paid",
                       "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
            };
            let (first, last) = (chunk(json!({"content": "paid for"}), Value::Null), chunk(json!({}), json!("stop")));
            format!("data: {first}\n\ndata: {last}\n\ndata: [DONE]\n\n")
        } else {
            headers.insert("content-type", HeaderValue::from_static("application/json"));
            json!({"id": "c", "object": "chat.completion", "created": 1, "model": "paid",
                   "choices": [{"index": 0, "message": {"role": "assistant", "content": "paid for"},
                                "finish_reason": "stop"}]})
            .to_string()
        };
        let body = futures_util::stream::iter([Ok(Bytes::from(text))]);
        Ok(UpstreamResponse { status: StatusCode::OK, headers, body: Box::pin(body) })
    }
}

/// What both sides counted.
#[derive(Debug, Default)]
struct Counts {
    issued: Mutex<u64>,
    lost: Mutex<u64>,
    refused: Mutex<Vec<(CredentialRefuser, CredentialReason)>>,
    node: Mutex<Vec<LeaseOutcome>>,
}

impl Observer for Counts {
    fn observe(&self, observation: &Observation) {
        match observation {
            Observation::CredentialIssued => *self.issued.lock().unwrap() += 1,
            Observation::CredentialUnused => *self.lost.lock().unwrap() += 1,
            Observation::CredentialRefused { by, reason } => self.refused.lock().unwrap().push((*by, *reason)),
            _ => {}
        }
    }
}

impl NodeObserver for Counts {
    fn credential_lease(&self, outcome: LeaseOutcome) {
        self.node.lock().unwrap().push(outcome);
    }
}

impl Counts {
    fn issued(&self) -> u64 {
        *self.issued.lock().unwrap()
    }

    fn refused(&self) -> Vec<(CredentialRefuser, CredentialReason)> {
        std::mem::take(&mut self.refused.lock().unwrap())
    }

    fn at_node(&self, is: impl Fn(&LeaseOutcome) -> bool) -> u64 {
        self.node.lock().unwrap().iter().filter(|outcome| is(outcome)).count() as u64
    }
}

/// What stands between Edge and Node: it sees the keys of the connection, and may give the Node another request.
#[derive(Default)]
struct Between {
    key: Mutex<Option<Bytes>>,
    generation: Mutex<u64>,
    /// The Edge's time, and when it said so.
    edge_ms: Mutex<Option<(u64, Instant)>>,
    last: Mutex<Option<DispatchHead>>,
    change: Mutex<Option<Change>>,
}

type Change = Box<dyn FnOnce(&mut DispatchHead) + Send>;

impl std::fmt::Debug for Between {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Between")
    }
}

impl Tap for Between {
    fn to_edge(&self, node: usize, message: &ToEdge) {
        if let (0, ToEdge::Register(request)) = (node, message) {
            *self.key.lock().unwrap() = Some(request.recipient_key.clone());
        }
    }

    fn to_node(&self, node: usize, message: &mut ToNode) {
        if node != 0 {
            return;
        }
        match message {
            ToNode::RegisterResponse(response) => {
                *self.edge_ms.lock().unwrap() = Some((response.edge_time_ms, Instant::now()));
            }
            ToNode::ReadyResponse(ready) if ready.lease_generation != 0 => {
                *self.generation.lock().unwrap() = ready.lease_generation;
            }
            ToNode::Run(dispatch) => self.pass(&mut dispatch.head),
            ToNode::Tunnel(dispatch) => self.pass(&mut dispatch.head),
            _ => {}
        }
    }
}

impl Between {
    fn pass(&self, head: &mut DispatchHead) {
        let change = self.change.lock().unwrap().take();
        if let Some(change) = change {
            change(head);
        }
        if !head.credential_lease.expose().is_empty() {
            *self.last.lock().unwrap() = Some(head.clone());
        }
    }

    fn change_next(&self, change: impl FnOnce(&mut DispatchHead) + Send + 'static) {
        *self.change.lock().unwrap() = Some(Box::new(change));
    }
}

/// A lease like the Edge's own, to be changed.
struct Forged {
    binding: Binding,
    revision: u64,
    generation: u64,
    at_ms: u64,
    to: Bytes,
}

struct Stage {
    pair: Pair,
    paid: Arc<Paid>,
    spare: ScriptHandle,
    counts: Arc<Counts>,
    between: Arc<Between>,
    issuer: Arc<IssuerKey>,
    keys: [String; 2],
}

fn slot(revision: u64, secret: &str) -> CredentialSlot {
    let secret = SlotSecret::new(secret.as_bytes().to_vec());
    CredentialSlot::new(SlotName::new("acme").unwrap(), revision, Arc::new(secret))
}

fn credentials(issuer: &Arc<IssuerKey>) -> Credentials {
    let mut all = Credentials::default();
    all.issuer = Some(Arc::<IssuerKey>::clone(issuer));
    all.slots = vec![slot(3, "sk-SENTINEL-1")];
    all.profiles = vec![
        CredentialProfile::new(ProfileName::new("bearer").unwrap(), CredentialForm::Bearer),
        CredentialProfile::new(ProfileName::new("x-key").unwrap(), CredentialForm::Header("x-api-key".into())),
    ];
    let principals = Scope::Only(vec![PrincipalName::new("team-a").unwrap()]);
    let slots = vec![SlotName::new("acme").unwrap()];
    all.routes = vec![CredentialRoute::new(RouteName::new("default").unwrap(), principals, Scope::All, slots)];
    all
}

impl Stage {
    /// Node 0 has the paid backend by tunnel, by run, and with a header of its own; node 1 has a spare for `shared` that wants
    /// no key. Requests may be sent again twice.
    async fn new() -> Self {
        let issuer = Arc::new(IssuerKey::generate().unwrap());
        let (paid, counts, between) =
            (Arc::new(Paid::default()), Arc::new(Counts::default()), Arc::<Between>::default());
        let origin = format!("{}://{}:{}", ORIGIN.0, ORIGIN.1, ORIGIN.2);
        let provider = || -> Arc<dyn Provider> {
            let config = OpenAiCompatConfig::new(&origin).with_lent_key(true);
            Arc::new(OpenAiCompat::with_upstream(config, Arc::<Paid>::clone(&paid)).unwrap())
        };
        let (spare_provider, spare) = ScriptedProvider::new(Script::text("free")).with_tunnels().into_parts();
        let new = |id: &str, models: &[&str]| PairProvider::new(id, provider(), 64, models);
        let tokens = [0, 1].map(|_| Token::generate(TokenKind::ApiKey).unwrap());
        let records = tokens.iter().zip(["team-a", "team-b"]).map(|(token, principal)| {
            let principal = Principal::new(principal).unwrap();
            ApiKeyRecord::new(token.id().clone(), token.hash(), principal, AllowedModels::All)
        });
        let keys = Arc::new(ApiKeys::records(records).unwrap());
        let plan = PairPlan::new(vec![
            new("acme", &["paid", "shared"]).needing("acme", "bearer", &origin),
            new("acme-run", &["paid-run"]).by_run().needing("acme", "bearer", &origin),
            new("acme-header", &["paid-header"]).needing("acme", "x-key", &origin),
            PairProvider::new("spare", spare_provider, 64, &["shared"]).on_node(1),
        ])
        .strategy(Strategy::Ordered)
        .openai(OpenAiConfig::default().with_keys(keys))
        .managed(Managed {
            credentials: credentials(&issuer),
            edge: Arc::<Counts>::clone(&counts),
            node: Arc::<Counts>::clone(&counts),
            tap: Arc::<Between>::clone(&between),
        });
        let pair = Pair::start(plan).await;
        Self { pair, paid, spare, counts, between, issuer, keys: tokens.map(|token| token.reveal()) }
    }

    fn request(&self, model: &str, stream: bool) -> Request {
        Request::chat(model, stream).key(&self.keys[0])
    }

    async fn ask(&self, model: &str, stream: bool) -> Answer {
        self.pair.ask(&self.request(model, stream)).await
    }

    /// A lease by this issuer in place of the Edge's own, like it but for one change.
    fn forge_next(&self, issuer: Arc<IssuerKey>, change: impl FnOnce(&mut Forged) + Send + 'static) {
        let to = self.between.key.lock().unwrap().clone().unwrap();
        let generation = *self.between.generation.lock().unwrap();
        let (said, when) = self.between.edge_ms.lock().unwrap().unwrap();
        let at_ms = said + u64::try_from(when.elapsed().as_millis()).unwrap();
        self.between.change_next(move |head| {
            let scope = head.credential_scope.as_deref().unwrap();
            let binding = Binding {
                principal: PrincipalName::new(scope.principal.as_str()).unwrap(),
                route: RouteName::new(&scope.route).unwrap(),
                slot: SlotName::new(&scope.slot).unwrap(),
                profile: ProfileName::new(&scope.profile).unwrap(),
                target: TargetName::new(head.target.as_str()).unwrap(),
                node: NodeName::new("node-0").unwrap(),
                upstream: UpstreamOrigin::of(ORIGIN.0, ORIGIN.1, ORIGIN.2).unwrap(),
                run: RunName::new(head.run_id.to_string()).unwrap(),
            };
            let mut forged = Forged { binding, revision: 3, generation, at_ms, to };
            change(&mut forged);
            let recipient = RecipientPublicKey::new(forged.to.as_ref().try_into().unwrap()).unwrap();
            let grant = Grant {
                recipient: &recipient,
                generation: forged.generation,
                revision: forged.revision,
                binding: forged.binding,
                ttl_ms: 60_000,
            };
            let credential = ProviderCredential::bearer(b"sk-SENTINEL-forged").unwrap();
            let lease = issuer.issue(&grant, &credential, forged.at_ms).unwrap().lease;
            head.credential_lease = iop_execution::Redacted::new(lease.as_bytes().clone());
        });
    }

    /// Whether the engine says of a request of this caller that it was not sent: it costs nobody anything (CRD-12).
    async fn never_sent(&self, principal: &str) -> bool {
        let mut asked = Submit::to_model(ModelName::new("paid").unwrap());
        asked.principal = Some(Principal::new(principal).unwrap());
        asked.wire = Some(WireKind::Run);
        let prepare = Box::new(|_: &Admitted| Payload::Run { input: Bytes::from_static(b"{}") });
        let submitted = Engine::submit(self.pair.edge(), asked, prepare).await.unwrap();
        submitted.notes.get() == Some(&EndNote::NotSent)
    }

    /// One request ends as refused for this reason, and nobody else was asked: not the backend, not the spare, not once more.
    async fn refused(&self, model: &str, by: CredentialRefuser, reason: CredentialReason) {
        let (before, issued) = (self.paid.calls().len(), self.counts.issued());
        let answer = self.ask(model, false).await;
        assert_eq!(answer.status(), 502, "{reason}: {}", answer.text());
        assert_eq!(answer.json()["error"]["code"], "provider_auth_failed", "{reason}");
        assert!(!answer.text().contains("SENTINEL") && !answer.text().contains("acme"), "{}", answer.text());
        assert_eq!(self.paid.calls().len(), before, "{reason}: the backend was called");
        assert_eq!(self.spare.counts().calls, 0, "{reason}: the spare was called");
        assert_eq!(self.counts.refused(), [(by, reason)], "one attempt");
        let sent = u64::from(by == CredentialRefuser::Node);
        assert_eq!(self.counts.issued() - issued, sent, "{reason}");
        self.pair.at_rest().await;
        // A provider that fails at once must not look idle (SEL-4): for a while other requests prefer others.
        tokio::time::sleep(Duration::from_secs(600)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_right_key_is_on_the_right_request_whichever_way_it_goes() {
    // CRD-4, CRD-9, SEC-2
    let stage = Stage::new().await;
    let bearer = Called { authorization: vec!["Bearer sk-SENTINEL-1".into()], api_key: Vec::new() };
    let mut wanted = Vec::new();
    for model in MODELS {
        for stream in [true, false] {
            // A client can't bring the header that the key goes into.
            let request = stage.request(model, stream).header("x-api-key", "from-the-client");
            let answer = stage.pair.ask(&request).await;
            assert_eq!(answer.status(), 200, "{model}: {}", answer.text());
            assert!(answer.text().contains("paid for") && !answer.text().contains("SENTINEL"), "{}", answer.text());
            wanted.push(bearer.clone());
        }
    }
    let request = stage.request("paid-header", true).header("x-api-key", "from-the-client");
    assert_eq!(stage.pair.ask(&request).await.status(), 200);
    wanted.push(Called { authorization: Vec::new(), api_key: vec!["sk-SENTINEL-1".into()] });
    assert_eq!(stage.paid.calls(), wanted);
    assert_eq!((stage.counts.issued(), stage.counts.at_node(|outcome| *outcome == LeaseOutcome::Opened)), (5, 5));
}

#[tokio::test(start_paused = true)]
async fn what_no_route_allows_and_what_is_taken_away_is_refused_before_anything_is_sent() {
    // CRD-5, CRD-15
    let mut stage = Stage::new().await;
    let stranger = Request::chat("paid", false).key(&stage.keys[1]);
    assert_eq!(stage.pair.ask(&stranger).await.status(), 502);
    let mismatch = CredentialReason::BindingMismatch(BindingField::Route);
    assert_eq!(stage.counts.refused(), [(CredentialRefuser::Edge, mismatch)]);
    assert!(stage.never_sent("team-b").await);
    assert_eq!(stage.counts.refused(), [(CredentialRefuser::Edge, mismatch)]);
    // To this caller the spare is the only candidate there is.
    let shared = Request::chat("shared", true).key(&stage.keys[1]);
    assert_eq!(stage.pair.ask(&shared).await.status(), 200);
    assert_eq!((stage.spare.counts().calls, stage.paid.calls().len(), stage.counts.issued()), (1, 0, 0));
    for (status, reason) in
        [(SlotStatus::Disabled, CredentialReason::Disabled), (SlotStatus::Revoked, CredentialReason::Revoked)]
    {
        stage.pair.apply(|all| all.slots[0].status = status);
        for model in MODELS {
            let answer = stage.ask(model, true).await;
            assert_eq!(answer.status(), 502, "{}", answer.text());
            assert_eq!(stage.counts.refused(), [(CredentialRefuser::Edge, reason)]);
        }
    }
    assert_eq!((stage.paid.calls().len(), stage.counts.issued()), (0, 0));
    stage.pair.apply(|all| all.slots[0].status = SlotStatus::Enabled);
    assert_eq!(stage.ask("paid", true).await.status(), 200, "back at once");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_bound_to_anything_else_never_reaches_the_backend() {
    // CRD-2, CRD-5, CRD-6, REC-5
    type Bend = fn(&mut Binding);
    let fields: [(BindingField, Bend); 8] = [
        (BindingField::Principal, |binding| binding.principal = PrincipalName::new("team-b").unwrap()),
        (BindingField::Route, |binding| binding.route = RouteName::new("other").unwrap()),
        (BindingField::Slot, |binding| binding.slot = SlotName::new("other").unwrap()),
        (BindingField::Profile, |binding| binding.profile = ProfileName::new("x-key").unwrap()),
        (BindingField::Target, |binding| binding.target = TargetName::new("other").unwrap()),
        (BindingField::Node, |binding| binding.node = NodeName::new("node-1").unwrap()),
        (BindingField::Upstream, |binding| binding.upstream = UpstreamOrigin::of("http", "127.0.0.1", 10).unwrap()),
        (BindingField::RunId, |binding| {
            binding.run = RunName::new(RunId::from_bytes([9; 16]).to_string()).unwrap();
        }),
    ];
    let stage = Stage::new().await;
    for model in ["shared", "paid-run"] {
        for (field, bend) in fields {
            stage.forge_next(Arc::clone(&stage.issuer), move |forged| bend(&mut forged.binding));
            stage.refused(model, CredentialRefuser::Node, CredentialReason::BindingMismatch(field)).await;
        }
    }
    // Nothing is wrong with the forger: an unchanged one opens.
    stage.forge_next(Arc::clone(&stage.issuer), |_| {});
    assert_eq!(stage.ask("shared", false).await.status(), 200);
    assert_eq!(stage.paid.calls()[0].authorization, ["Bearer sk-SENTINEL-forged"]);
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_another_issuer_time_connection_or_use_never_reaches_the_backend() {
    // CRD-3, CRD-5, CRD-7, CRD-8, REC-5
    let stage = Stage::new().await;
    let (node, own) = (CredentialRefuser::Node, || Arc::clone(&stage.issuer));
    stage.forge_next(Arc::new(IssuerKey::generate().unwrap()), |_| {});
    stage.refused("shared", node, CredentialReason::UnknownIssuer).await;
    stage.forge_next(own(), |forged| {
        forged.to = Bytes::copy_from_slice(RecipientKey::generate().unwrap().public_bytes());
    });
    stage.refused("shared", node, CredentialReason::WrongRecipient).await;
    stage.forge_next(own(), |forged| forged.at_ms -= 60_000);
    stage.refused("shared", node, CredentialReason::Expired).await;
    stage.forge_next(own(), |forged| forged.at_ms += 3_600_000);
    stage.refused("shared", node, CredentialReason::NotYetValid).await;
    stage.forge_next(own(), |forged| forged.revision = 2);
    stage.refused("shared", node, CredentialReason::StaleRevision).await;
    stage.forge_next(own(), |forged| forged.generation ^= 1);
    stage.refused("shared", node, CredentialReason::StaleGeneration).await;
    stage.between.change_next(|head| {
        let mut lease = head.credential_lease.expose().to_vec();
        *lease.last_mut().unwrap() ^= 1;
        head.credential_lease = iop_execution::Redacted::new(lease.into());
    });
    stage.refused("paid-run", node, CredentialReason::BadSignature).await;
    stage.between.change_next(|head| {
        head.credential_lease = iop_execution::Redacted::new(Bytes::new());
        head.credential_scope = None;
    });
    stage.refused("paid-run", node, CredentialReason::Malformed).await;
    // A whole request once more, as it was: it verifies, and its lease is used up.
    for model in ["shared", "paid-run"] {
        assert_eq!(stage.ask(model, false).await.status(), 200);
        let old = stage.between.last.lock().unwrap().clone().unwrap();
        stage.between.change_next(move |head| {
            (head.run_id, head.credential_lease) = (old.run_id, old.credential_lease);
            head.credential_scope = old.credential_scope;
        });
        stage.refused(model, node, CredentialReason::Replayed).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_the_connection_before_is_worth_nothing() {
    // CRD-3: the key dies with its connection
    let stage = Stage::new().await;
    assert_eq!(stage.ask("paid", false).await.status(), 200);
    let (old_key, old) =
        (stage.between.key.lock().unwrap().clone(), stage.between.last.lock().unwrap().clone().unwrap());
    stage.pair.cut(0);
    stage.pair.node_gone(0).await;
    stage.pair.node_ready(0).await;
    assert_ne!(*stage.between.key.lock().unwrap(), old_key, "a fresh key");
    stage.between.change_next(move |head| {
        (head.run_id, head.credential_lease) = (old.run_id, old.credential_lease);
    });
    stage.refused("paid", CredentialRefuser::Node, CredentialReason::WrongRecipient).await;
    assert_eq!(stage.ask("paid", false).await.status(), 200);
}

#[tokio::test(start_paused = true)]
async fn an_edge_that_is_not_who_it_was_gets_what_runs_done_and_nothing_more() {
    // CRD-10
    let stage = Stage::new().await;
    *stage.paid.slow.lock().unwrap() = Duration::from_secs(5);
    let running = tokio::spawn(stage.pair.ask(&stage.request("paid", true)));
    stage
        .pair
        .until("it runs", |edge| edge.nodes[0].providers.iter().any(|provider| provider.in_use.in_use() > 0))
        .await;
    let check = stage.pair.edge_check(0);
    check.recheck(|edge| edge.identity().id() != "edge");
    stage.pair.until("no new work", |edge| edge.nodes[0].draining).await;
    let refused = stage.ask("paid", false).await;
    assert_eq!((refused.status(), stage.paid.calls().len()), (503, 1), "{}", refused.text());
    let answer = running.await.unwrap();
    assert!(answer.status() == 200 && answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
    stage.pair.node_gone(0).await;
    // The next connection is asked, too.
    let connections = stage.pair.connections(0);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(stage.pair.connections(0) > connections && !stage.pair.is_connected(0));
    check.recheck(|_| true);
    stage.pair.node_ready(0).await;
    assert_eq!(stage.ask("paid", false).await.status(), 200);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_is_made_anew_has_less_time_once_its_edge_is_not_who_it_was() {
    // CRD-10
    let stage = Stage::new().await;
    *stage.paid.slow.lock().unwrap() = Duration::from_secs(200);
    let running = tokio::spawn(stage.pair.ask(&stage.request("paid", true)));
    stage
        .pair
        .until("it runs", |edge| edge.nodes[0].providers.iter().any(|provider| provider.in_use.in_use() > 0))
        .await;
    let check = stage.pair.edge_check(0);
    assert!(check.renew(Duration::ZERO));
    stage.pair.until("no new work", |edge| edge.nodes[0].draining).await;
    let began = Instant::now();
    check.recheck(|edge| edge.identity().id() != "edge");
    stage.pair.node_gone(0).await;
    assert!((30..=36).contains(&began.elapsed().as_secs()), "{:?}: not the five minutes of a renewal", began.elapsed());
    // Its stream had begun with a comment (REC-8): one error, and no end as if it were whole.
    let answer = running.await.unwrap();
    assert!(answer.text().contains("\"error\"") && !answer.text().contains("[DONE]"), "{}", answer.text());
}

#[tokio::test(start_paused = true)]
async fn issuers_and_secrets_change_under_load_and_no_request_fails() {
    // CRD-8: overlap of two issuers, a new revision at once, told to the Nodes when the old leases are through
    let mut stage = Stage::new().await;
    *stage.paid.slow.lock().unwrap() = Duration::from_millis(40);
    let next = Arc::new(IssuerKey::generate().unwrap());
    let mut running = tokio::task::JoinSet::new();
    for wave in 0..120_u32 {
        for model in MODELS {
            running.spawn(stage.pair.ask(&stage.request(model, wave % 2 == 0)));
        }
        let old = stage.issuer.public_bytes();
        match wave {
            30 => stage.pair.apply(|all| {
                all.issuer = Some(Arc::<IssuerKey>::clone(&next));
                all.also_trusted = vec![old];
            }),
            60 => stage.pair.apply(|all| all.slots = vec![slot(4, "sk-SENTINEL-2")]),
            90 => stage.pair.apply(|all| all.slots = vec![slot(5, "sk-SENTINEL-3")]),
            110 => stage.pair.apply(|all| all.also_trusted.clear()),
            _ => {}
        }
        tokio::time::sleep(Duration::from_millis(if wave == 109 { 90_000 } else { 10 })).await;
    }
    while let Some(answer) = running.join_next().await {
        let answer = answer.unwrap();
        assert_eq!(answer.status(), 200, "{}", answer.text());
    }
    assert_eq!(stage.counts.refused(), []);
    let of = |key: &str| {
        let wanted = format!("Bearer {key}");
        stage.paid.calls().iter().filter(|call| call.authorization == [wanted.clone()]).count()
    };
    assert_eq!((of("sk-SENTINEL-1"), of("sk-SENTINEL-2"), of("sk-SENTINEL-3")), (120, 60, 60));
    // Once the overlap is over, what is left of an old revision is refused.
    tokio::time::sleep(REVISION_OVERLAP).await;
    stage.forge_next(next, |forged| forged.revision = 4);
    stage.refused("shared", CredentialRefuser::Node, CredentialReason::StaleRevision).await;
    assert_eq!(stage.ask("shared", false).await.status(), 200);
}

#[tokio::test(start_paused = true)]
async fn every_issued_lease_is_opened_refused_or_unused() {
    // CRD-13, and: a place that is taken burns no lease (CRD-4)
    let mut stage = Stage::new().await;
    *stage.paid.slow.lock().unwrap() = Duration::from_secs(5);
    let mut running = tokio::task::JoinSet::new();
    for n in 0..30_u32 {
        let answer = stage.pair.ask(&stage.request(MODELS[n as usize % 2], true));
        // Some clients leave at once, some while the backend thinks.
        running.spawn(
            async move { tokio::time::timeout(Duration::from_secs(u64::from(n % 3) * 4), answer).await.is_ok() },
        );
        if n == 20 {
            stage.pair.cut(0);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    while running.join_next().await.is_some() {}
    stage.pair.at_rest().await;
    stage.pair.node_ready(0).await;
    stage.forge_next(Arc::clone(&stage.issuer), |forged| forged.revision = 1);
    stage.refused("paid", CredentialRefuser::Node, CredentialReason::StaleRevision).await;
    assert_eq!(stage.ask("paid", false).await.status(), 200);
    // What its Node refuses before it looks at the lease: first for itself, then while it drains.
    let unused_before = stage.counts.at_node(|outcome| *outcome == LeaseOutcome::Unused);
    stage.between.change_next(|head| head.adapter = AdapterKey::new("other").unwrap());
    assert_eq!(stage.ask("paid", false).await.status(), 502);
    assert_eq!(stage.counts.at_node(|outcome| *outcome == LeaseOutcome::Unused), unused_before + 1);
    for n in 0..20_usize {
        let answer = stage.pair.ask(&stage.request(MODELS[n % 2], true));
        running.spawn(async move { answer.await.status() == 200 });
        tokio::task::yield_now().await;
    }
    stage.pair.stop_node(0).await.unwrap();
    while running.join_next().await.is_some() {}
    let opened = stage.counts.at_node(|outcome| *outcome == LeaseOutcome::Opened);
    let refused = stage.counts.at_node(|outcome| matches!(outcome, LeaseOutcome::Refused(_)));
    let unused = stage.counts.at_node(|outcome| *outcome == LeaseOutcome::Unused) + *stage.counts.lost.lock().unwrap();
    assert_eq!(stage.counts.issued(), opened + refused + unused, "{opened} {refused} {unused}");
    assert!(opened > 5 && refused == 1, "{opened} {refused} {unused}");
    assert_eq!(stage.paid.calls().len() as u64, opened, "one call for each opened lease, and none without");
}

/// A secret that does something whenever a lease is made of it, when nobody holds a lock.
struct Racing {
    secret: SlotSecret,
    then: Mutex<Option<Then>>,
}

type Then = Box<dyn FnMut() + Send>;

impl std::fmt::Debug for Racing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Racing")
    }
}

impl CredentialSource for Racing {
    fn credential(&self, form: &CredentialForm) -> Result<ProviderCredential, InvalidCredential> {
        // Taken out meanwhile: a config that is checked asks here, too.
        let then = self.then.lock().unwrap().take();
        if let Some(mut then) = then {
            then();
            *self.then.lock().unwrap() = Some(then);
        }
        self.secret.credential(form)
    }
}

/// Puts a secret in force that changes the config once more for each lease made of it; `change` is told how often before.
fn race(stage: &mut Stage, mut change: impl FnMut(u64, Catalog) -> Catalog + Send + 'static) {
    let secret = SlotSecret::new(b"sk-SENTINEL-3".to_vec());
    let racing = Arc::new(Racing { secret, then: Mutex::default() });
    let name = SlotName::new("acme").unwrap();
    stage.pair.apply(|all| all.slots = vec![CredentialSlot::new(name, 3, Arc::<Racing>::clone(&racing))]);
    let (edge, mut catalog, mut made) = (stage.pair.edge().clone(), stage.pair.catalog().clone(), 0);
    *racing.then.lock().unwrap() = Some(Box::new(move || {
        catalog = change(made, catalog.clone());
        made += 1;
        edge.apply_config(catalog.clone()).unwrap();
    }));
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_provider_goes_while_its_lease_is_made_is_not_sent_without_one() {
    // CRD-5, CRD-15, CFG-2
    let mut stage = Stage::new().await;
    race(&mut stage, |_, catalog| {
        changed(&catalog, |nodes, _| nodes[0].providers.iter_mut().for_each(|provider| provider.enabled = false))
    });
    let answer = stage.ask("paid", false).await;
    assert_eq!(answer.status(), 503, "it may come again: {}", answer.text());
    assert_eq!((stage.counts.issued(), stage.counts.refused(), stage.paid.calls()), (0, vec![], vec![]));
    assert!(stage.between.last.lock().unwrap().is_none());
    let mut stage = Stage::new().await;
    race(&mut stage, |_, catalog| {
        changed(&catalog, |nodes, _| nodes[0].providers.iter_mut().for_each(|provider| provider.enabled = false))
    });
    assert!(stage.never_sent("team-a").await);
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_is_revoked_while_the_last_lease_is_made_is_told_as_such() {
    // CRD-5, CRD-13, CRD-15
    let mut stage = Stage::new().await;
    race(&mut stage, |made, catalog| {
        changed(&catalog, |_, credentials| {
            credentials.slots[0].revision += 1;
            if made == 3 {
                credentials.slots[0].status = SlotStatus::Revoked;
            }
        })
    });
    stage.refused("paid", CredentialRefuser::Edge, CredentialReason::Revoked).await;
}

#[tokio::test(start_paused = true)]
async fn no_key_is_in_any_log_or_debug_and_each_lease_has_its_records() {
    // CRD-9, CRD-13; field report 88
    if !alone("no_key_is_in_any_log_or_debug_and_each_lease_has_its_records").unwrap() {
        return;
    }
    let (log, _guard) = Logged::begin();
    let mut stage = Stage::new().await;
    for model in ["paid", "paid-run", "paid-header"] {
        assert_eq!(stage.ask(model, true).await.status(), 200);
    }
    stage.forge_next(Arc::clone(&stage.issuer), |forged| forged.revision = 2);
    stage.refused("paid", CredentialRefuser::Node, CredentialReason::StaleRevision).await;
    stage.pair.apply(|all| all.slots = vec![slot(4, "sk-SENTINEL-2").with_status(SlotStatus::Disabled)]);
    stage.refused("paid", CredentialRefuser::Edge, CredentialReason::Disabled).await;
    let debug = format!("{:?} {:?} {:?}", stage.pair, stage.counts, credentials(&stage.issuer));
    assert!(!debug.contains("SENTINEL"));
    assert!(!log.text().contains("SENTINEL"));
    let lines = log.lines();
    let audit = |message: &str| -> Vec<(String, String)> {
        let of = |line: &str, field: &str| {
            let field = format!("{field}=");
            line.split(' ').find_map(|part| part.strip_prefix(field.as_str())).unwrap_or_default().to_owned()
        };
        let audit = lines.iter().filter(|line| line.target == "iop_audit" && line.fields.contains(message));
        audit.map(|line| (of(&line.fields, "lease"), of(&line.fields, "scope"))).collect()
    };
    let (issued, opened) = (audit("credential lease issued"), audit("credential lease opened"));
    assert_eq!((issued.len(), opened.len()), (4, 3));
    assert_eq!(issued[..3], opened, "the same lease and the same scope on both sides");
    assert_eq!(audit("credential lease refused").len(), 1);
    assert_eq!(audit("no credential lease is issued").len(), 1);
}
