use std::sync::{Arc, Mutex};
use std::time::Duration;

use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{SessionId, Usage};
use iop_node_core::journal::{Closed, EntryKey, Opened};
use iop_node_core::{RunJournal, RunPath};
use iop_wire::*;

use crate::support::*;

#[derive(Debug, Default)]
struct Notes(Mutex<Vec<(u64, String)>>);

impl Notes {
    fn add(&self, entry: u64, note: String) {
        self.0.lock().unwrap().push((entry, note));
    }

    fn of(&self, entry: u64) -> Vec<String> {
        self.0.lock().unwrap().iter().filter(|(of, _)| *of == entry).map(|(_, note)| note.clone()).collect()
    }
}

impl RunJournal for Notes {
    fn opened(&self, entry: Opened) -> EntryKey {
        let key = self.0.lock().unwrap().iter().filter(|(_, note)| note.starts_with("opened")).count() as u64;
        let session = entry.session_id.as_ref().map_or("-", SessionId::as_str);
        let (path, background) = (entry.path.as_str(), entry.background);
        self.add(key, format!("opened {path} {} {} {session} {background}", entry.adapter, entry.target));
        EntryKey(key)
    }
    fn started(&self, entry: EntryKey) {
        self.add(entry.0, "started".into());
    }
    fn closed(&self, entry: EntryKey, closed: Closed) {
        let code = closed.error_code().map_or("-", iop_execution::FailureCode::as_str);
        let tokens = closed.usage.output_tokens;
        self.add(entry.0, format!("closed {} {code} {tokens:?}", closed.outcome.as_str()));
    }
}

fn noted(provider: ScriptedProvider) -> (Harness, Arc<Notes>) {
    let notes = Arc::new(Notes::default());
    let journal = Arc::clone(&notes) as Arc<dyn RunJournal>;
    let provider = provider.into_parts().0;
    (Harness::with(|node| node.provider("a", provider).journal(journal)), notes)
}

#[tokio::test(start_paused = true)]
async fn runs_and_tunnels_are_noted_alike_and_refused_ones_are_not() {
    // NOD-7
    let script = Script::text("x").usage(Usage { output_tokens: Some(7), ..Usage::default() });
    let (mut node, notes) = noted(ScriptedProvider::new(script).with_tunnels());
    let mut conn = node.ready_with(ProviderConfig { capacity: 1, ..config() }).await;
    let session_id = Some(SessionId::new("s-1").unwrap());
    conn.send_run(DispatchHead { session_id, background: true, ..head(1) });
    conn.expect_accepted(1).await;
    let _ = conn.rest(1).await;
    conn.send(tunnel(2, 4));
    conn.send(chunk(2, "body", true));
    conn.expect_accepted(2).await;
    while !conn.frame(2).await.is_terminal() {}
    conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: 4, deadline_ms: 100, ..head(3) } }));
    conn.expect_accepted(3).await;
    conn.run(4).await;
    assert_eq!(conn.failure(4).await.code, iop_execution::FailureCode::Busy);
    let _ = conn.failure(3).await;
    assert_eq!(notes.of(0), ["opened run a t s-1 true", "started", "closed completed - Some(7)"]);
    assert_eq!(notes.of(1), ["opened tunnel a t - false", "started", "closed completed - Some(7)"]);
    assert_eq!(notes.of(2), ["opened run a t - false", "closed failed deadline_exceeded None"], "its body never came");
    assert_eq!(notes.of(3), [""; 0]);
    assert_eq!(RunPath::Run.as_str(), "run");
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_cancelled_or_loses_its_connection_is_closed_in_the_journal() {
    // NOD-7, NOD-9
    for policy in [CancelPolicy::Abort, CancelPolicy::Drain] {
        let (mut node, notes) = noted(ScriptedProvider::new(Script::text("x").ignore_cancel()));
        let mut conn = node.ready_with(ProviderConfig { cancel_policy: policy, ..config() }).await;
        conn.run(1).await;
        conn.run(2).await;
        settle().await;
        conn.send(cancel(1));
        let _ = conn.rest(1).await;
        drop(conn);
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(notes.of(0).pop().unwrap(), "closed cancelled - None");
        assert_eq!(notes.of(1).pop().unwrap(), "closed abandoned - None");
    }
}
