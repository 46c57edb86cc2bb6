use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::{ModelName, NodeId};

use super::*;
use crate::testfleet::{CREATED, Fleet};

/// An engine that takes every catalog, or none.
#[derive(Default)]
struct Engine {
    seen: Mutex<Vec<Catalog>>,
    refuses: AtomicBool,
}

impl Engine {
    fn reloader(self: &Arc<Self>, fleet: &Fleet) -> Reloader {
        let this = Arc::clone(self);
        let apply = move |catalog: Catalog| {
            if this.refuses.load(Ordering::SeqCst) {
                return Err(ApplyError::ShuttingDown);
            }
            let mut change = ConfigChange::default();
            change.revision = catalog.revision();
            let known = catalog.nodes().iter().map(|node| node.id.clone());
            change.nodes_added = known.filter(|id| id.as_str() == "gpu-3").collect();
            this.seen.lock().unwrap().push(catalog);
            Ok(change)
        };
        let (loaded, runtime, key) = (fleet.loaded.clone(), fleet.runtime.clone(), fleet.admin.clone());
        Reloader::with_apply(loaded, CREATED, runtime, key, Box::new(apply))
    }

    fn seen(&self) -> usize {
        self.seen.lock().unwrap().len()
    }
}

async fn status_with(fleet: &Fleet, key: &Token) -> u16 {
    let request = Request::get("/v1/models").header("authorization", format!("Bearer {}", key.reveal()));
    fleet.runtime.openai().answer(request.body(Full::<Bytes>::default()).unwrap()).await.status().as_u16()
}

#[tokio::test]
async fn a_good_config_is_taken_whole_with_the_next_revision_and_the_old_created() {
    // CFG-2
    let (fleet, engine) = (Fleet::new(), Arc::new(Engine::default()));
    let reloader = engine.reloader(&fleet);
    assert_eq!(reloader.in_force(), InForce { revision: 1, last: None });
    let key = Token::generate(TokenKind::ApiKey).unwrap();
    let added = format!("{{ id: {}, hash: \"{}\" }}, {{ id", key.id().as_str(), key.hash());
    fleet.edit("{ id", &added);
    let hash = Token::generate(TokenKind::Node).unwrap().hash();
    fleet.edit("models:", &format!("  - {{ id: gpu-3, token_hash: \"{hash}\" }}\nmodels:"));
    fleet.edit("models:\n", "queue: { timeout_ms: 5 }\nmodels:\n");
    assert_eq!(status_with(&fleet, &key).await, 401);

    let reloaded = reloader.reload().await.unwrap();
    assert_eq!(reloaded.to_string(), "node added: gpu-3; settings changed: auth.api_keys, queue");
    {
        let seen = engine.seen.lock().unwrap();
        assert_eq!((seen[0].revision(), seen[0].created(), seen[0].nodes().len()), (2, CREATED, 3));
        assert_eq!(seen[0].queue().timeout, Duration::from_millis(5));
    }
    assert_eq!(status_with(&fleet, &key).await, 200, "a new key needs no restart");
    assert_eq!(status_with(&fleet, &fleet.client).await, 200);
    let last = reloader.in_force();
    assert_eq!(last.revision, 2);
    assert!(last.last.is_some_and(|last| last.applied && last.summary.contains("gpu-3")));

    let again = reloader.reload().await.unwrap();
    assert_eq!((again.change.revision, engine.seen()), (3, 2));
    let text = fleet.runtime.metrics().render(&fleet.runtime.gauges());
    assert!(
        text.contains("iop_config_revision 3") && text.contains("iop_config_reloads_total{result=\"applied\"} 2"),
        "{text}"
    );
}

#[tokio::test]
async fn a_bad_config_changes_nothing_and_is_told_as_check_tells_it() {
    // CFG-2, BIN-4
    let (fleet, engine) = (Fleet::new(), Arc::new(Engine::default()));
    let reloader = engine.reloader(&fleet);
    let other = Token::generate(TokenKind::ApiKey).unwrap();
    fleet.edit(&fleet.client.hash().to_string(), &other.hash().to_string());
    fleet.edit("capacity: 8", "capcity: 8");
    let error = reloader.reload().await.unwrap_err();
    assert!(error.to_string().ends_with("edge.yaml: 1 error; nothing was changed"), "{error}");
    let ReloadError::Invalid(problems) = error else { panic!("{error}") };
    assert_eq!(problems.to_string(), EdgeConfig::load(&fleet.path).1.to_string());
    assert!(problems.to_string().contains("did you mean `capacity`?"), "{problems}");
    assert_eq!((engine.seen(), reloader.in_force().revision), (0, 1));
    assert_eq!(status_with(&fleet, &fleet.client).await, 200, "the old key is still in force");
    assert!(reloader.in_force().last.is_some_and(|last| !last.applied));
    let text = fleet.runtime.metrics().render(&fleet.runtime.gauges());
    assert!(text.contains("iop_config_reloads_total{result=\"refused\"} 1"), "{text}");

    std::fs::remove_file(&fleet.path).unwrap();
    assert!(matches!(reloader.reload().await, Err(ReloadError::Invalid(_))), "a file that is gone changes nothing");
    assert_eq!(engine.seen(), 0);
}

#[tokio::test]
async fn what_needs_a_restart_refuses_the_whole_file_by_name() {
    // CFG-2
    let (fleet, engine) = (Fleet::new(), Arc::new(Engine::default()));
    let reloader = engine.reloader(&fleet);
    for (key, section) in [
        ("edge_id", "edge_id: other"),
        ("listen.openai", "listen: { openai: 127.0.0.1:1 }"),
        ("listen.nodes", "listen: { nodes: 127.0.0.1:1 }"),
        ("listen.admin", "listen: { admin: 127.0.0.1:1 }"),
        ("limits.connections", "limits: { connections: 7 }"),
        ("limits.connections_per_address", "limits: { connections_per_address: 7 }"),
        ("link.congestion", "link: { congestion: bbr }"),
        ("observability.log", "observability: { log: json }"),
        ("observability.filter", "observability: { filter: debug }"),
    ] {
        fleet.edit("auth:", &format!("{section}\nqueue: {{ timeout_ms: 7 }}\nauth:"));
        let error = reloader.reload().await.unwrap_err();
        assert!(error.to_string().contains(&format!("{key} needs a restart; nothing was changed")), "{error}");
        fleet.edit(&format!("{section}\nqueue: {{ timeout_ms: 7 }}\n"), "");
    }
    assert_eq!((engine.seen(), reloader.in_force().revision), (0, 1));
    // The default, written out, is no change.
    fleet.edit("auth:", "edge_id: edge\nlisten: { admin: 127.0.0.1:9190 }\nauth:");
    assert!(reloader.reload().await.unwrap().to_string().starts_with("no change in "));
}

#[test]
fn certificates_need_a_restart_too() {
    // CFG-2
    let old = EdgeConfig::default();
    let mut new = old.clone();
    let pair = crate::config::edge::TlsPair { cert: "a".into(), key: "b".into() };
    let nodes = crate::config::edge::NodesTls { cert: "a".into(), key: "b".into(), client_ca: None };
    (new.tls.openai, new.tls.nodes) = (Some(pair), Some(nodes));
    new.trust_domain = Some("other".into());
    assert_eq!(compare(&old, &new).restart, ["tls.openai", "tls.nodes", "trust_domain"]);
    // The words that allow an insecure listener concern the check only.
    let mut new = old.clone();
    new.listen.openai.insecure_plaintext = true;
    assert_eq!(compare(&old, &new), Differences::default());
}

#[tokio::test]
async fn what_the_engine_refuses_leaves_the_keys_as_they_were() {
    // CFG-2
    let (fleet, engine) = (Fleet::new(), Arc::new(Engine::default()));
    let reloader = engine.reloader(&fleet);
    engine.refuses.store(true, Ordering::SeqCst);
    let other = Token::generate(TokenKind::ApiKey).unwrap();
    fleet.edit(&fleet.client.hash().to_string(), &other.hash().to_string());
    assert!(matches!(reloader.reload().await, Err(ReloadError::Refused(ApplyError::ShuttingDown))));
    assert_eq!(status_with(&fleet, &fleet.client).await, 200);
    assert_eq!(reloader.in_force().revision, 1);
    engine.refuses.store(false, Ordering::SeqCst);
    assert_eq!(reloader.reload().await.unwrap().change.revision, 2);
    assert_eq!(status_with(&fleet, &fleet.client).await, 401);
}

#[test]
fn a_summary_is_one_line_and_counts_what_it_does_not_name() {
    // CFG-2
    let mut change = ConfigChange::default();
    change.nodes_removed = vec![NodeId::new("a").unwrap()];
    change.models_changed = (0..9).map(|n| ModelName::new(format!("m{n}")).unwrap()).collect();
    let reloaded = Reloaded { change, settings: Vec::new(), warnings: Problems::of("edge.yaml") };
    assert_eq!(reloaded.to_string(), "node removed: a; models changed: m0, m1, m2, m3, m4 and 4 more");
}

#[tokio::test]
async fn a_new_admin_key_is_in_force_at_once_and_none_closes_the_api() {
    // CFG-2, SEC-4
    let (fleet, engine) = (Fleet::new(), Arc::new(Engine::default()));
    let reloader = engine.reloader(&fleet);
    let next = Token::generate(TokenKind::Admin).unwrap();
    fleet.edit(&fleet.key.hash().to_string(), &next.hash().to_string());
    assert_eq!(reloader.reload().await.unwrap().settings, ["admin"]);
    assert!(!fleet.admin.opens(&fleet.key) && fleet.admin.opens(&next));
    fleet.edit(&format!("admin: {{ key_hash: \"{}\" }}\n", next.hash()), "");
    reloader.reload().await.unwrap();
    assert!(!fleet.admin.opens(&next));
}

#[tokio::test]
async fn recovery_and_its_timers_need_no_restart() {
    // CFG-2, REC-4, REC-5, REC-8, WIR-14
    use iop_edge_core::catalog::{RetryCause, RetryOn};
    let (fleet, engine) = (Fleet::new(), Arc::new(Engine::default()));
    let reloader = engine.reloader(&fleet);
    let openai = || fleet.runtime.openai().config();
    assert_eq!((openai().max_extra_attempts, openai().keepalive_after), (2, Duration::from_secs(20)));
    let before = openai();
    fleet.edit(
        "models:\n",
        "recovery: { max_extra_attempts: 0, keepalive_after_ms: 5000 }\nhealth: { dispatch_ack_timeout_ms: 400 }\nmodels:\n",
    );
    assert_eq!(reloader.reload().await.unwrap().to_string(), "settings changed: health, recovery");
    assert_eq!((openai().max_extra_attempts, openai().keepalive_after), (0, Duration::from_secs(5)));
    assert_eq!(before.max_extra_attempts, 2, "a request keeps what it began with");
    fleet.edit("max_extra_attempts: 0", "retry_on: [http_429]");
    assert_eq!(reloader.reload().await.unwrap().to_string(), "setting changed: recovery");
    let seen = engine.seen.lock().unwrap();
    assert_eq!(seen[0].dispatch_ack_timeout(), Duration::from_millis(400));
    assert_eq!((seen[0].retry_on(), seen[1].retry_on()), (RetryOn::default(), RetryOn::of(&[RetryCause::Http429])));
}

#[tokio::test]
async fn a_secret_that_cant_be_loaded_keeps_nobody_from_revoking_another() {
    // CRD-8
    let (fleet, engine) = (Fleet::new(), Arc::new(Engine::default()));
    let reloader = engine.reloader(&fleet);
    let dir = fleet.path.parent().unwrap();
    iop_edge_core::catalog::IssuerKey::create(&dir.join("issuer.pem")).unwrap();
    for slot in ["a", "b"] {
        std::fs::write(dir.join(format!("{slot}.key")), "sk-1").unwrap();
    }
    let slots = "{ name: a, secret: \"file:a.key\" }, { name: b, secret: \"command:cat b.key\" }";
    fleet.edit("models:\n", &format!("credentials: {{ issuer_key: issuer.pem, slots: [ {slots} ] }}\nmodels:\n"));
    reloader.reload().await.unwrap();
    std::fs::remove_file(dir.join("b.key")).unwrap();
    fleet.edit("secret: \"file:a.key\"", "secret: \"file:a.key\", status: revoked");
    let kept = reloader.reload().await.unwrap();
    fleet.edit("command:cat b.key\"", "command:cat b.key\", revision: 2");
    let refused = reloader.reload().await.unwrap();
    std::fs::write(dir.join("b.key"), "sk-2").unwrap();
    reloader.reload().await.unwrap();
    let seen = engine.seen.lock().unwrap();
    let status = |at: usize| {
        let slots = &seen[at].credentials().slots;
        [slots[0].status, slots[1].status]
    };
    use iop_edge_core::catalog::SlotStatus::{Disabled, Enabled, Revoked};
    assert_eq!(
        [0, 1, 2, 3].map(status),
        [[Enabled, Enabled], [Revoked, Enabled], [Revoked, Disabled], [Revoked, Enabled]]
    );
    assert!(!kept.warnings.to_string().contains("slot b: "), "{}", kept.warnings);
    assert!(refused.warnings.to_string().contains("slot b: `cat`: failed"), "{}", refused.warnings);
}
