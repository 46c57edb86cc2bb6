//! Decides how a running Edge process is operated: SIGHUP, and the commands of `iop` as people type them.

use iop_edge_core::token::{Token, TokenKind};
use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::fleet::{Fleet, Plan};
use iop_tests::process::Process;
use iop_tests::wire_client::Request;

use crate::{PROGRAMS, finish, hello, provider, says, soon};

async fn says_hello(fleet: &Fleet, model: &str) -> bool {
    read(&fleet.ask(&Request::chat(model, true)).await) == (Outcome::Whole { text: "Hello".to_owned() })
}

fn edit(fleet: &Fleet, from: &str, to: &str) {
    let text = std::fs::read_to_string(fleet.folder().path().join("edge.yaml")).unwrap();
    assert!(text.contains(from), "{from} is not in {text}");
    fleet.folder().write("edge.yaml", &text.replacen(from, to, 1));
}

/// A fleet whose admin key is in `admin.key`, with model `m`.
async fn operated(backend: &ScriptedBackend) -> Fleet {
    operated_as(Plan::new(vec![provider(backend, 4, &["m"])])).await
}

/// A fleet whose admin key is in `admin.key`.
async fn operated_as(plan: Plan) -> Fleet {
    let key = Token::generate(TokenKind::Admin).unwrap();
    let plan = plan.with(&format!("admin: {{ key_hash: \"{}\" }}", key.hash()));
    let fleet = Fleet::start(PROGRAMS, plan).await;
    fleet.folder().write("admin.key", &key.reveal());
    fleet
}

/// What `iop` prints in the fleet's folder, and its exit code.
async fn iop(fleet: &Fleet, arguments: &[&str]) -> (i32, String) {
    let admin = format!("http://{}", fleet.admin());
    let mut process = Process::start(PROGRAMS.iop, arguments, fleet.folder().path(), &[("IOP_ADMIN", &admin)]);
    let code = process.exit_code().await;
    (code, process.lines().join("\n"))
}

#[tokio::test]
async fn sighup_with_a_bad_config_changes_nothing_and_says_why() {
    // BIN-5, CFG-2
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    let mut fleet = operated(&backend).await;
    edit(&fleet, "capacity: 4", "capcity: 4");
    fleet.edge().signal("HUP");
    fleet.edge().find("the mistake", |line| line.contains("did you mean `capacity`?").then_some(())).await;
    let line = fleet.edge().find("the outcome", |line| line.contains("not reloaded").then(|| line.to_owned())).await;
    assert!(line.contains("edge.yaml: 1 error, 1 warning; nothing was changed"), "{line}");
    assert!(says_hello(&fleet, "m").await);
    fleet.edge().signal("TERM");
    assert_eq!(fleet.edge().exit_code().await, 0);
}

#[tokio::test]
async fn sighup_takes_a_new_config_without_a_restart() {
    // BIN-5, CFG-2
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    let mut fleet = operated(&backend).await;
    edit(&fleet, "models:\n", "models:\n  - { name: house, candidates: [ { provider: p, target: m } ] }\n");
    assert!(!says_hello(&fleet, "house").await);
    fleet.edge().signal("HUP");
    let line = fleet.edge().find("the outcome", |line| line.contains("reloaded").then(|| line.to_owned())).await;
    assert!(line.contains("config reloaded: ") && line.contains("house"), "{line}");
    assert!(says_hello(&fleet, "house").await && says_hello(&fleet, "m").await);
}

#[tokio::test]
async fn every_command_for_operators_answers_people_and_programs() {
    // BIN-3, SEC-4
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    let fleet = operated(&backend).await;
    for (command, words) in [
        ("status", ["state      ready", "1 of 1 ready", "0/4 in use"]),
        ("nodes", ["NODE", "node-0", "0/4"]),
        ("models", ["MODEL", "available", "node-0"]),
        ("runs", ["no request", "waits", "runs"]),
    ] {
        let (code, text) = iop(&fleet, &[command]).await;
        assert!(code == 0 && words.iter().all(|word| text.contains(word)), "{command}: {code} {text}");
        let (code, text) = iop(&fleet, &[command, "--json"]).await;
        assert!(code == 0 && serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{command}: {code} {text}");
        assert!(!text.contains('\x1b'), "no colours in a pipe");
    }
    let (code, text) = iop(&fleet, &["drain", "node-7"]).await;
    assert!(code == 1 && text.contains("no such Node") && text.contains("`iop nodes`"), "{code} {text}");
    let (code, text) = iop(&fleet, &["cancel", "abcd"]).await;
    assert!(code == 1 && text.contains("`iop runs`"), "{code} {text}");
    edit(&fleet, "capacity: 4", "capcity: 4");
    let (code, text) = iop(&fleet, &["reload"]).await;
    assert!(code == 2 && text.contains("did you mean `capacity`?"), "{code} {text}");
    for (kind, words) in [
        ("node", ["iopn_", "token_hash: "]),
        ("api-key", ["iopk_", "id: "]),
        ("admin", ["iopa_", "admin: { key_hash: "]),
    ] {
        let mut made = Process::start(PROGRAMS.edge, &["hash", "--new", kind], fleet.folder().path(), &[]);
        let code = made.exit_code().await;
        let text = made.lines().join("\n");
        assert!(code == 0 && words.iter().all(|word| text.contains(word)), "{kind}: {text}");
    }
    let stranger = Token::generate(TokenKind::Admin).unwrap().reveal();
    fleet.folder().write("other.key", &stranger);
    let (code, text) = iop(&fleet, &["status", "--key-file", "other.key"]).await;
    assert!(
        code == 2 && text.contains("another admin key than other.key") && !text.contains(&stranger[14..]),
        "{text}"
    );
}

#[tokio::test]
async fn lists_of_keys_and_leases_show_what_the_running_edge_counts_and_do_without_it() {
    // BIN-3, CRD-12, CRD-13
    let held = Answer::events().pause().write(says("late")).write(finish());
    let backend = ScriptedBackend::builder().model("m", hello()).model("held", held).start().await.unwrap();
    let mut fleet = operated_as(Plan::new(vec![provider(&backend, 4, &["m", "held"])]).keyed()).await;
    let key = fleet.api_key();
    edit(&fleet, "\" } ] }", "\", limits: { requests_per_minute: 9, tokens_per_minute: 5000, concurrent: 2 } } ] }");
    let (code, text) = iop(&fleet, &["reload"]).await;
    assert_eq!(code, 0, "{text}");
    assert!(matches!(read(&fleet.ask(&Request::chat("m", false).key(&key)).await), Outcome::Whole { .. }));
    let mut waiting = fleet.client().await;
    waiting.send(&Request::chat("held", true).key(&key)).await;
    soon("the backend has it", backend.wait_for(|traffic| traffic.waiting == 1)).await;

    let (code, text) = iop(&fleet, &["key", "list"]).await;
    let row = text.lines().find(|line| line.starts_with(&key[5..13])).unwrap_or_default();
    // Five tokens were reported; the other request holds back what its prompt is estimated at.
    assert!(
        code == 0 && row.contains("2 of 9 requests, 5 + ") && row.contains(" held of 5000 tokens, 1 of 2 now"),
        "{text}"
    );
    let (code, text) = iop(&fleet, &["lease", "status", "--json"]).await;
    let status: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(code == 0 && status["leases"]["issued"] == 0 && status["leases"]["uptime_ms"].as_u64() > Some(0), "{text}");

    backend.release();
    let admin = fleet.admin();
    fleet.kill_edge().await;
    let at = format!("http://{admin}");
    for arguments in [["key", "list"], ["lease", "status"]] {
        let mut process = Process::start(PROGRAMS.iop, &arguments, fleet.folder().path(), &[("IOP_ADMIN", &at)]);
        let code = process.exit_code().await;
        let lines = process.lines();
        let told =
            lines.iter().filter(|line| line.contains("only what stands in the files: no Edge answers at")).count();
        // Without an issuer key there is nothing to say of leases.
        let (wanted, shown) = if arguments[0] == "key" { (1, &key[5..13]) } else { (0, "no issuer key") };
        assert!(code == 0 && told == wanted && lines.iter().any(|line| line.contains(shown)), "{lines:?}");
    }
}
