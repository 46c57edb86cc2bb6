use axum::body::Body;
use http::{Method, Request, Response};
use http_body_util::BodyExt as _;
use iop_edge_core::observe::{CredentialRefuser, Observation, Observer as _};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::failure::CredentialReason;
use serde_json::Value;
use tower_service::Service as _;

use super::*;
use crate::reload::Reloader;
use crate::testfleet::{CREATED, Fleet};

struct Rig {
    fleet: Fleet,
    router: Router,
}

impl Rig {
    fn new() -> Self {
        let fleet = Fleet::new();
        let (runtime, admin) = (fleet.runtime.clone(), fleet.admin.clone());
        let reloader = Reloader::new(fleet.loaded.clone(), CREATED, runtime.clone(), admin.clone());
        let api = Api::new("edge-7", "127.0.0.1:9190".parse().unwrap(), admin, runtime.clone(), reloader);
        Self { router: runtime.admin().merge(api.router()), fleet }
    }

    async fn send(&self, request: Request<Body>) -> Response<Body> {
        let Ok(response) = self.router.clone().call(request).await;
        response
    }

    /// Status and JSON of a request with the right key.
    async fn ask(&self, method: Method, path: &str) -> (u16, Value) {
        let response = self.send(request(method, path, Some(&self.fleet.key.reveal()))).await;
        let status = response.status().as_u16();
        assert_eq!(response.headers()["content-type"], "application/json");
        (status, serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap())
    }

    async fn get(&self, path: &str) -> Value {
        let (status, value) = self.ask(Method::GET, path).await;
        assert_eq!(status, 200, "{value}");
        value
    }
}

fn request(method: Method, path: &str, key: Option<&str>) -> Request<Body> {
    let request = Request::builder().method(method).uri(path).header("host", "127.0.0.1:9190");
    let request = match key {
        Some(key) => request.header("authorization", format!("Bearer {key}")),
        None => request,
    };
    request.body(Body::empty()).unwrap()
}

async fn code(response: Response<Body>) -> (u16, String) {
    let status = response.status().as_u16();
    let value: Value = serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap();
    assert!(value["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{value}");
    (status, value["error"]["code"].as_str().unwrap().to_owned())
}

const PATHS: &[(Method, &str)] = &[
    (Method::GET, "/admin/v1/status"),
    (Method::GET, "/admin/v1/nodes"),
    (Method::GET, "/admin/v1/models"),
    (Method::GET, "/admin/v1/runs"),
    (Method::GET, "/admin/v1/keys"),
    (Method::GET, "/admin/v1/leases"),
    (Method::POST, "/admin/v1/nodes/gpu-1/drain"),
    (Method::POST, "/admin/v1/nodes/gpu-1/resume"),
    (Method::DELETE, "/admin/v1/runs/00000000000000000000000000000000"),
    (Method::POST, "/admin/v1/reload"),
    (Method::GET, "/admin/v1/nowhere"),
    (Method::PUT, "/admin/v1/status"),
];

#[tokio::test]
async fn every_path_wants_the_admin_key_and_no_other() {
    // SEC-4
    let rig = Rig::new();
    let stranger = Token::generate(TokenKind::Admin).unwrap().reveal();
    let as_client = rig.fleet.client.reveal();
    let swapped = rig.fleet.key.reveal().replace("iopa_", "iopk_");
    for (method, path) in PATHS {
        let none = rig.send(request(method.clone(), path, None)).await;
        assert_eq!(none.headers()["www-authenticate"], "Bearer");
        assert_eq!(code(none).await, (401, "missing_key".to_owned()), "{path}");
        for wrong in [stranger.as_str(), &as_client, &swapped, "", "iopa_"] {
            let answer = rig.send(request(method.clone(), path, Some(wrong))).await;
            assert_eq!(code(answer).await, (401, "invalid_key".to_owned()), "{path} {wrong}");
        }
        let right = rig.send(request(method.clone(), path, Some(&rig.fleet.key.reveal()))).await;
        assert!(![401, 403].contains(&right.status().as_u16()), "{path}");
    }
    let mut twice = request(Method::GET, "/admin/v1/status", Some(&rig.fleet.key.reveal()));
    twice.headers_mut().append("authorization", "Bearer x".parse().unwrap());
    assert_eq!(rig.send(twice).await.status(), 401);
}

#[tokio::test]
async fn pages_and_names_that_point_here_are_refused_with_the_right_key_too() {
    // SEC-4: cross-site requests, DNS rebinding
    let rig = Rig::new();
    let with = |name: &'static str, value: &str| {
        let mut request = request(Method::GET, "/admin/v1/status", Some(&rig.fleet.key.reveal()));
        request.headers_mut().insert(name, value.parse().unwrap());
        request
    };
    for origin in ["http://evil.example", "http://127.0.0.1:9190", "null"] {
        assert_eq!(code(rig.send(with("origin", origin)).await).await, (403, "browser_refused".to_owned()), "{origin}");
    }
    for host in
        ["evil.example", "evil.example:9190", "127.0.0.1.evil.example", "10.0.0.7:9190", "localhost.evil", "", "a b"]
    {
        assert_eq!(code(rig.send(with("host", host)).await).await, (403, "host_refused".to_owned()), "{host}");
    }
    for host in ["127.0.0.1:9190", "127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:9190", "127.8.8.8"] {
        assert_eq!(rig.send(with("host", host)).await.status(), 200, "{host}");
    }
    let mut none = with("host", "x");
    none.headers_mut().remove("host");
    assert_eq!(rig.send(none).await.status(), 403);
    let mut both = with("host", "127.0.0.1");
    *both.uri_mut() = "http://evil.example/admin/v1/status".parse().unwrap();
    assert_eq!(rig.send(both).await.status(), 403, "HTTP/2 has the name in the URI");
    // Nothing allows a page to read an answer.
    let answer = rig.send(with("accept", "*/*")).await;
    assert!(answer.headers().keys().all(|name| !name.as_str().starts_with("access-control")));
    assert_eq!(answer.headers()["cache-control"], "no-store");
    // Metrics are for whoever can reach the listener, by whatever name.
    let metrics = Request::get("/metrics").header("host", "edge.internal").body(Body::empty()).unwrap();
    assert_eq!(rig.send(metrics).await.status(), 200);
}

#[tokio::test]
async fn without_a_key_in_the_config_the_api_is_closed_and_says_how_to_open_it() {
    // SEC-4
    let rig = Rig::new();
    rig.fleet.admin.replace(None);
    let answer = rig.send(request(Method::GET, "/admin/v1/status", Some(&rig.fleet.key.reveal()))).await;
    let status = answer.status().as_u16();
    let text = String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap();
    assert!(
        status == 403 && text.contains("admin_key_not_configured") && text.contains("iop-edge hash --new admin"),
        "{text}"
    );
    let health = Request::get("/healthz").header("host", "x").body(Body::empty()).unwrap();
    assert_eq!(rig.send(health).await.status(), 200);
}

#[tokio::test]
async fn a_request_for_an_address_of_the_listener_is_meant_for_it() {
    // SEC-4
    let fleet = Fleet::new();
    for (listen, host, good) in [
        ("192.168.1.5:9190", "192.168.1.5:9190", true),
        ("192.168.1.5:9190", "192.168.1.6:9190", false),
        ("0.0.0.0:9190", "192.168.1.6", true),
        ("0.0.0.0:9190", "edge.internal", false),
        ("[::]:9190", "[fe80::1]:9190", true),
    ] {
        let (parts, ()) = Request::get("/").header("host", host).body(()).unwrap().into_parts();
        let denied = guard::admit(&parts.uri, &parts.headers, listen.parse().unwrap(), &fleet.admin).unwrap_err();
        assert_eq!(denied == guard::Denied::Host, !good, "{listen} {host}");
    }
}

#[tokio::test]
async fn the_state_is_shown_as_it_is() {
    // BIN-3, EDG-4
    let rig = Rig::new();
    let status: view::StatusView = serde_json::from_value(rig.get("/admin/v1/status").await).unwrap();
    assert_eq!((status.edge.as_str(), status.ready, status.config.revision), ("edge-7", false, 1));
    assert_eq!((status.nodes.configured, status.nodes.ready), (2, 0));
    assert_eq!((status.providers.configured, status.providers.places), (2, 0));
    let nodes: view::NodesView = serde_json::from_value(rig.get("/admin/v1/nodes").await).unwrap();
    let [one, two] = &nodes.nodes[..] else { panic!("{nodes:?}") };
    assert_eq!((one.id.as_str(), one.status.as_str(), one.connected), ("gpu-1", "unavailable", false));
    assert_eq!((one.providers[0].configured_capacity, two.providers[0].configured_capacity), (8, 0));
    let models: view::ModelsView = serde_json::from_value(rig.get("/admin/v1/models").await).unwrap();
    let [model] = &models.models[..] else { panic!("{models:?}") };
    assert_eq!((model.name.as_str(), model.available, model.strategy.as_str()), ("m", false, "least_loaded"));
    let second = &model.candidates[1];
    assert_eq!((second.provider.as_str(), second.node.as_str()), ("two", "gpu-2"));
    assert_eq!((second.target.as_str(), second.weight, second.status.as_str()), ("other", 3, "unavailable"));
    assert_eq!(rig.get("/admin/v1/runs").await, serde_json::json!({"runs": [], "more": false}));
    assert_eq!(rig.get("/admin/v1/runs?limit=1000").await["more"], false);
    for bad in ["limit=0", "limit=1001", "limit=x", "limit=-1", "offset=1"] {
        let (status, value) = rig.ask(Method::GET, &format!("/admin/v1/runs?{bad}")).await;
        assert_eq!((status, &value["error"]["code"]), (400, &"invalid_query".into()), "{bad}");
    }
}

#[tokio::test(start_paused = true)]
async fn keys_show_what_they_use_beside_their_limits_and_leases_what_became_of_them() {
    // BIN-3, CRD-12, CRD-13
    let rig = Rig::new();
    let id = rig.fleet.client.id().as_str();
    let free = serde_json::json!({"id": id, "running": 0, "requests": {"used": 0, "held": 0, "reset_ms": 0}});
    assert_eq!(rig.get("/admin/v1/keys").await, serde_json::json!({"keys": [free]}));
    let leases = rig.get("/admin/v1/leases").await;
    let none = serde_json::json!({"uptime_ms": 0, "issued": 0, "opened": 0, "refused": 0, "unused": 0, "denied": 0, "reasons": []});
    assert_eq!(leases, none);

    rig.fleet.edit("principal: team-a", "limits: { requests_per_minute: 5, tokens_per_minute: 90, concurrent: 2 }");
    assert_eq!(rig.ask(Method::POST, "/admin/v1/reload").await.0, 200);
    let meter = rig.fleet.runtime.openai().limiter().meter(rig.fleet.client.id()).unwrap();
    let now = || tokio::time::Instant::now().into_std();
    meter.admit(now()).unwrap().settle(7, now());
    let mut running = meter.admit(now()).unwrap();
    running.reserve(60, now()).unwrap();
    tokio::time::advance(std::time::Duration::from_secs(20)).await;
    let shown = rig.get("/admin/v1/keys").await;
    let requests = serde_json::json!({"used": 2, "held": 0, "limit": 5, "reset_ms": 41_000});
    let tokens = serde_json::json!({"used": 7, "held": 60, "limit": 90, "reset_ms": 41_000});
    let used = serde_json::json!({"id": id, "running": 1, "concurrent": 2, "requests": requests, "tokens": tokens});
    assert_eq!(shown["keys"][0], used);

    rig.fleet.runtime.metrics().observe(&Observation::CredentialIssued);
    let reason = CredentialReason::Disabled;
    rig.fleet.runtime.metrics().observe(&Observation::CredentialRefused { by: CredentialRefuser::Edge, reason });
    let leases = rig.get("/admin/v1/leases").await;
    assert_eq!((&leases["issued"], &leases["opened"], &leases["denied"]), (&1.into(), &1.into(), &1.into()));
    assert_eq!(leases["reasons"], serde_json::json!([{"by": "edge", "reason": "disabled", "count": 1}]));
    assert_eq!(leases["uptime_ms"], 20_000);
}

#[tokio::test]
async fn no_answer_holds_a_secret_or_a_hash() {
    // SEC-4
    let rig = Rig::new();
    let config = std::fs::read_to_string(&rig.fleet.path).unwrap();
    let hashes: Vec<_> = config.split('"').filter(|part| part.starts_with("sha256:")).collect();
    assert_eq!(hashes.len(), 4);
    for (method, path) in PATHS {
        let (_, value) = rig.ask(method.clone(), path).await;
        let text = value.to_string();
        for secret in hashes.iter().map(|hash| &hash[7..]).chain([&rig.fleet.key.reveal()[14..]]) {
            assert!(!text.contains(secret), "{path}: {text}");
        }
    }
}

#[tokio::test]
async fn orders_for_what_is_not_there_are_typed() {
    // BIN-3, EDG-3
    let rig = Rig::new();
    let missing = "0".repeat(32);
    for (method, path, status, code) in [
        (Method::POST, "nodes/gpu-9/drain", 404, "unknown_node"),
        (Method::POST, "nodes/%00/resume", 404, "unknown_node"),
        (Method::POST, "nodes/%ff/resume", 404, "unknown_node"),
        (Method::DELETE, "runs/abc", 400, "invalid_run_id"),
        (Method::DELETE, "runs/+0000000000000000000000000000000", 400, "invalid_run_id"),
        (Method::DELETE, &format!("runs/{missing}"), 404, "unknown_run"),
        (Method::GET, "nowhere", 404, "unknown_path"),
        (Method::POST, "status", 405, "method_not_allowed"),
        (Method::GET, "reload", 405, "method_not_allowed"),
    ] {
        let (got, value) = rig.ask(method, &format!("/admin/v1/{path}")).await;
        assert_eq!((got, &value["error"]["code"]), (status, &code.into()), "{path}");
    }
}

#[tokio::test]
async fn a_node_is_drained_and_resumed() {
    // EDG-1
    let rig = Rig::new();
    let (status, node) = rig.ask(Method::POST, "/admin/v1/nodes/gpu-1/drain").await;
    assert_eq!((status, &node["id"], &node["running"]), (200, &"gpu-1".into(), &0.into()));
    assert_eq!(node["draining"], true, "{node}");
    let nodes = rig.get("/admin/v1/nodes").await;
    assert_eq!((&nodes["nodes"][0]["draining"], &nodes["nodes"][1]["draining"]), (&true.into(), &false.into()));
    let (_, node) = rig.ask(Method::POST, "/admin/v1/nodes/gpu-1/resume").await;
    assert_eq!(node["draining"], false, "{node}");
}

#[tokio::test]
async fn a_reload_that_changes_nothing_answers_why() {
    // CFG-2
    let rig = Rig::new();
    rig.fleet.edit("capacity: 8", "capcity: 8");
    let (status, value) = rig.ask(Method::POST, "/admin/v1/reload").await;
    assert_eq!((status, &value["error"]["code"]), (422, &"invalid_config".into()));
    assert_eq!(value["error"]["problems"][0]["suggestion"], "did you mean `capacity`?");
    assert_eq!(value["error"]["problems"][0]["line"], 5);
    rig.fleet.edit("capcity: 8", "capacity: 8");
    rig.fleet.edit("auth:", "edge_id: other\nauth:");
    let (status, value) = rig.ask(Method::POST, "/admin/v1/reload").await;
    assert_eq!((status, &value["error"]["code"]), (409, &"needs_restart".into()));
    assert_eq!(value["error"]["keys"], serde_json::json!(["edge_id"]));
    let status = rig.get("/admin/v1/status").await;
    assert_eq!(
        (&status["config"]["revision"], &status["config"]["last_reload"]["applied"]),
        (&1.into(), &false.into())
    );
}

#[tokio::test]
async fn a_reload_answers_what_changed() {
    // CFG-2
    let rig = Rig::new();
    rig.fleet.edit("capacity: 8", "capacity: 9");
    let (status, value) = rig.ask(Method::POST, "/admin/v1/reload").await;
    assert_eq!((status, &value["revision"]), (200, &2.into()), "{value}");
    assert_eq!(value["nodes_changed"], serde_json::json!(["gpu-1"]));
    let nodes = rig.get("/admin/v1/nodes").await;
    assert_eq!(nodes["nodes"][0]["providers"][0]["configured_capacity"], 9);
}

#[tokio::test]
async fn a_reload_changes_the_admin_key_itself() {
    // CFG-2, SEC-4
    let rig = Rig::new();
    let next = Token::generate(TokenKind::Admin).unwrap();
    rig.fleet.edit(&rig.fleet.key.hash().to_string(), &next.hash().to_string());
    assert_eq!(rig.ask(Method::POST, "/admin/v1/reload").await.0, 200);
    assert_eq!(rig.send(request(Method::GET, "/admin/v1/status", Some(&rig.fleet.key.reveal()))).await.status(), 401);
    assert_eq!(rig.send(request(Method::GET, "/admin/v1/status", Some(&next.reveal()))).await.status(), 200);
}
