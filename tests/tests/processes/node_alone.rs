//! Decides what a Node process does on its machine beside talking to its Edge: it listens on nothing, and leaves one file.

use std::path::Path;

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::fleet::{Fleet, Plan};
use iop_tests::machine::eventually;
use iop_tests::wire_client::Request;
use rusqlite::{Connection, OpenFlags};

use crate::{PROGRAMS, finish, fleet, hello, provider, says};

/// Sockets of a process that wait for somebody to connect or send: listening TCP, and UDP without a peer.
fn open_to_others(pid: u32) -> Vec<String> {
    let own: Vec<_> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    assert!(!own.is_empty(), "it has a connection to its Edge");
    let mut found = Vec::new();
    for (table, waiting) in [("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")] {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let columns: Vec<_> = line.split_whitespace().collect();
            if columns[3] == waiting && own.iter().any(|inode| inode == columns[9]) {
                found.push(format!("{table} {}", columns[1]));
            }
        }
    }
    found
}

#[tokio::test]
#[cfg_attr(not(target_os = "linux"), ignore = "it reads /proc")]
async fn a_node_listens_on_nothing() {
    // BIN-2, NOD-1; field report 69: users ask for connections from the worker to the server only
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    let mut fleet = fleet(provider(&backend, 4, &["m"])).await;
    let mut client = fleet.client().await;
    assert_eq!(read(&client.ask(&Request::chat("m", false)).await), Outcome::Whole { text: "Hello".to_owned() });
    let (node, edge) = (fleet.node(0).pid(), fleet.edge().pid());
    assert_eq!(open_to_others(node), [""; 0]);
    assert!(open_to_others(edge).len() >= 3, "the same look finds an Edge's listeners");
}

fn holds(folder: &Path, text: &str) -> bool {
    ["iop.db", "iop.db-wal"].iter().any(|name| {
        let bytes = std::fs::read(folder.join(name)).unwrap_or_default();
        bytes.windows(text.len()).any(|window| window == text.as_bytes())
    })
}

/// How the runs of the journal ended, as another program reads it. Nothing while there is no journal yet.
fn statuses(folder: &Path) -> Vec<String> {
    let journal = Connection::open_with_flags(folder.join("iop.db"), OpenFlags::SQLITE_OPEN_READ_ONLY);
    let read = journal.and_then(|journal| {
        let mut rows = journal.prepare("SELECT status FROM iop_runs ORDER BY id")?;
        rows.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()
    });
    read.unwrap_or_default()
}

#[tokio::test]
async fn a_node_writes_down_what_it_ran_and_a_crash_shows() {
    // NOD-7, CRD-9
    let held = Answer::events().write(says("SENTINEL-OUTPUT")).pause().write(finish());
    let backend = ScriptedBackend::builder().model("m", hello()).model("held", held).start().await.unwrap();
    let mut fleet = fleet(provider(&backend, 4, &["m", "held"])).await;
    let folder = fleet.folder().path().to_path_buf();
    let written = async |expected: &[&str]| {
        let what = format!("{expected:?} in the journal");
        eventually(&what, || async { (statuses(&folder) == expected).then_some(()) }).await;
    };
    let mut client = fleet.client().await;
    assert_eq!(read(&client.ask(&Request::chat("m", true)).await), Outcome::Whole { text: "Hello".to_owned() });
    written(&["completed"]).await;
    client.send(&Request::chat("held", true)).await;
    let _head = client.head().await;
    client.read_until("SENTINEL-OUTPUT").await;
    written(&["completed", "running"]).await;
    fleet.kill_node(0).await;
    assert_eq!(statuses(&folder), ["completed", "running"], "nobody was there to say how it ended");
    fleet.start_node(0);
    fleet.ready().await;
    written(&["completed", "interrupted"]).await;
    fleet.node(0).signal("TERM");
    assert_eq!(fleet.node(0).exit_code().await, 0);
    for secret in ["SENTINEL-OUTPUT", "Hello", "messages", &fleet.api_key()] {
        assert!(!holds(&folder, secret), "{secret}");
    }
}

#[tokio::test]
async fn a_journal_that_can_not_be_written_is_told_and_nothing_else_happens() {
    // NOD-7
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    let mut fleet = fleet(provider(&backend, 4, &["m"])).await;
    fleet.kill_node(0).await;
    std::fs::write(
        fleet.folder().path().join("iop.db"),
        "no database at all, and somebody needs it as it is".repeat(99),
    )
    .unwrap();
    // With what the killed process left beside it, SQLite would make a database of that again.
    for beside in ["iop.db-journal", "iop.db-wal", "iop.db-shm"] {
        let _ = std::fs::remove_file(fleet.folder().path().join(beside));
    }
    fleet.start_node(0);
    fleet.ready().await;
    fleet.node(0).find("word of it", |line| line.contains("the run journal can't be written").then_some(())).await;
    let mut client = fleet.client().await;
    assert_eq!(read(&client.ask(&Request::chat("m", true)).await), Outcome::Whole { text: "Hello".to_owned() });
    fleet.node(0).signal("TERM");
    assert_eq!(fleet.node(0).exit_code().await, 0);
}

#[tokio::test]
async fn sighup_makes_a_node_read_its_certificates_again_and_what_it_can_not_use_changes_nothing() {
    // BIN-5, CRD-10
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    // What crosses the Node's Drain is sent again.
    let plan = Plan::new(vec![provider(&backend, 4, &["m"])]).recovering();
    let mut fleet = Fleet::start(PROGRAMS, plan).await;
    let ca = fleet.folder().path().join("ca.pem");
    let good = std::fs::read(&ca).unwrap();
    let mut client = fleet.client().await;
    for (text, told) in [(&b"no certificate"[..], "the old stays in force"), (&good[..], "renewed")] {
        std::fs::write(&ca, text).unwrap();
        fleet.node(0).signal("HUP");
        fleet.node(0).find(told, |line| line.contains(told).then_some(())).await;
        assert_eq!(read(&client.ask(&Request::chat("m", true)).await), Outcome::Whole { text: "Hello".to_owned() });
    }
    fleet.node(0).signal("TERM");
    assert_eq!(fleet.node(0).exit_code().await, 0);
}
