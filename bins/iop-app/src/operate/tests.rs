use std::cell::RefCell;

use super::*;
use crate::admin::view::{
    CandidateView, ConfigView, LastReloadView, ModelView, NodeCounts, ProblemView, ProviderCounts, ProviderView,
    RequestCounts, RunView,
};
use crate::exit::Exit;

fn provider(id: &str, status: &str, in_use: u32, capacity: u32) -> ProviderView {
    ProviderView { id: id.to_owned(), status: status.to_owned(), in_use, capacity, ..ProviderView::default() }
}

#[test]
fn the_state_is_one_screen() {
    // BIN-3
    let view = StatusView {
        edge: "edge-1".to_owned(),
        version: "1.2.3".to_owned(),
        uptime_ms: 134_000,
        ready: true,
        config: ConfigView {
            revision: 3,
            last_reload: Some(LastReloadView { applied: true, age_ms: 9_900, summary: "node added: gpu-3".to_owned() }),
        },
        nodes: NodeCounts { configured: 3, ready: 1, draining: 1, suspect: 1 },
        providers: ProviderCounts {
            configured: 4,
            ready: 2,
            cooling: 1,
            unhealthy: 1,
            places: 64,
            in_use: 12,
            quarantined: 2,
        },
        requests: RequestCounts { in_flight: 13, waiting: 3 },
    };
    let expected = "\
edge       edge-1 1.2.3, up 2m14s
state      ready
config     revision 3, reloaded 9.9s ago: node added: gpu-3
nodes      1 of 3 ready, 1 draining, 1 suspect
providers  2 of 4 ready, 1 cooling, 1 unhealthy
places     12/64 in use, 2 quarantined
requests   13 in flight, 3 waiting
";
    assert_eq!(show::status(&view, false), expected);
    let bad = StatusView { ready: false, ..StatusView::default() };
    assert!(show::status(&bad, true).contains("\x1b[31mnot ready: no provider can take work\x1b[0m"));
}

#[test]
fn nodes_are_a_table_of_their_providers_with_what_is_special_about_them() {
    // BIN-3, HLT-4
    let busy = ProviderView {
        cooling_ms: Some(4_000),
        quarantined: 1,
        penalty: 120,
        long_capacity: 2,
        long_in_use: 1,
        ..provider("gpu-1-vllm", "ready", 3, 8)
    };
    let down = ProviderView { health: "unavailable".to_owned(), ..provider("y", "unavailable", 1, 0) };
    let node = |id: &str, status: &str, providers| NodeView {
        id: id.to_owned(),
        status: status.to_owned(),
        providers,
        ..NodeView::default()
    };
    let mut nodes = vec![
        node("gpu-1", "ready", vec![busy, provider("gpu-1-b", "ready", 0, 16)]),
        node("gpu-22", "unavailable", vec![provider("x", "unavailable", 0, 0)]),
        node("gpu-3", "ready", vec![down]),
        node("new", "disabled", vec![]),
    ];
    nodes[0].suspect = true;
    let expected = "\
NODE    STATUS         PROVIDER    STATUS       IN USE  NOTES
gpu-1   ready, silent  gpu-1-vllm  ready        3/8     long 1/2, busy, asked again in 4.0s, 1 quarantined, recent failures count as 12% load
                       gpu-1-b     ready        0/16
gpu-22  unavailable    x           unavailable  -
gpu-3   ready          y           unavailable  1/0     unhealthy: stalled and does not answer; the edge asks until it does
new     disabled
";
    assert_eq!(show::nodes(&NodesView { nodes }, false), expected);
    assert!(show::nodes(&NodesView::default(), false).contains("iop reload"));
}

#[test]
fn models_and_runs_are_tables_too() {
    // BIN-3
    let candidate = |provider: &str, target: &str, weight| CandidateView {
        provider: provider.to_owned(),
        node: "gpu-1".to_owned(),
        target: target.to_owned(),
        weight,
        status: "ready".to_owned(),
    };
    let models = ModelsView {
        models: vec![
            ModelView {
                name: "llama".to_owned(),
                available: true,
                strategy: "ordered".to_owned(),
                candidates: vec![candidate("one", "llama", 1), candidate("two", "org/llama", 3)],
                waiting: 2,
                oldest_wait_ms: 1_500,
            },
            ModelView {
                name: "solo".to_owned(),
                candidates: vec![candidate("one", "solo", 1)],
                ..ModelView::default()
            },
        ],
    };
    let expected = "\
MODEL  STATUS       WAITING         STRATEGY  NODE   PROVIDER  STATUS  TARGET     WEIGHT
llama  available    2, oldest 1.5s  ordered   gpu-1  one       ready
                                              gpu-1  two       ready   org/llama  3
solo   unavailable  0                         gpu-1  one       ready
";
    assert_eq!(show::models(&models, false), expected);
    let runs = RunsView {
        runs: vec![
            RunView {
                id: "0123456789abcdef0123456789abcdef".to_owned(),
                model: Some("llama".to_owned()),
                principal: Some("team-a".to_owned()),
                stage: "dispatched".to_owned(),
                node: Some("gpu-1".to_owned()),
                provider: Some("one".to_owned()),
                age_ms: 42_000,
            },
            RunView { id: "f".repeat(32), stage: "waiting".to_owned(), age_ms: 340, ..RunView::default() },
        ],
        more: true,
    };
    let expected = "\
RUN           MODEL  PRINCIPAL  STAGE       NODE   PROVIDER  AGE
0123456789ab  llama  team-a     dispatched  gpu-1  one       42s
ffffffffffff  -      -          waiting     -      -         340ms
… and more: --limit N shows up to 1000, oldest first
";
    assert_eq!(show::runs(&runs, false), expected);
}

#[test]
fn a_run_is_named_by_as_much_of_its_id_as_names_no_other() {
    // BIN-3
    let run = |id: &str| RunView { id: format!("{id:0<32}"), ..RunView::default() };
    let all = RunsView { runs: vec![run("abcd1"), run("abcd2"), run("beef")], more: false };
    assert_eq!(one_run("BEEF", &all), Ok(format!("{:0<32}", "beef")));
    assert_eq!(one_run("abcd2", &all), Ok(format!("{:0<32}", "abcd2")));
    for (bad, exit) in [("abcd", Exit::Usage), ("bee", Exit::Usage), ("xyzw", Exit::Usage), ("0000", Exit::Fatal)] {
        let failure = one_run(bad, &all).unwrap_err();
        assert!(failure.exit == exit && failure.hint.is_some(), "{bad}");
    }
}

fn draining(running: u32) -> NodeView {
    NodeView { id: "gpu-1".to_owned(), draining: true, connected: true, running, ..NodeView::default() }
}

#[tokio::test(start_paused = true)]
async fn a_drain_waits_until_nothing_runs_and_tells_each_change_once() {
    // BIN-3
    let looks = RefCell::new([3, 3, 2, 2, 0].into_iter());
    let told = RefCell::new(Vec::new());
    let began = Instant::now();
    let look = || std::future::ready(Ok(looks.borrow_mut().next().map(draining)));
    let done = idle(draining(3), look, |line| told.borrow_mut().push(line)).await;
    assert!(done.is_ok_and(|view| view.running == 0));
    assert_eq!(began.elapsed(), LOOK_EVERY * 5);
    assert_eq!(*told.borrow(), ["gpu-1: 2 running"]);
    // Somebody else put it back, or took it out of the config.
    for other in [Some(NodeView { draining: false, ..draining(3) }), None] {
        let look = || std::future::ready(Ok(other.clone()));
        assert!(idle(draining(3), look, |_| {}).await.is_err());
    }
}

#[test]
fn ids_are_escaped_for_the_path_and_mistakes_look_as_check_prints_them() {
    // BIN-3, BIN-4
    assert_eq!(segment("gpu-1.a_b~"), "gpu-1.a_b~");
    assert_eq!(segment("a/b?c é%"), "a%2Fb%3Fc%20%C3%A9%25");
    let mut problems = crate::config::Problems::of("edge.yaml");
    problems.error(crate::config::Position { line: 9, column: 3 }, "wrong", Some("right".to_owned()));
    problems.warning(crate::config::Position::default(), "odd", None);
    assert_eq!(show::problems("edge.yaml", &ProblemView::all(&problems)), problems.to_string());
}

#[test]
fn a_node_out_of_service_says_how_it_comes_back() {
    // BIN-3
    assert_eq!(show::in_service(&draining(1)), "gpu-1 drains: 1 request running. `iop resume gpu-1` puts it back");
    assert!(show::in_service(&draining(0)).contains("nothing runs there"));
    let back = NodeView { draining: false, ..draining(0) };
    assert_eq!(show::in_service(&back), "gpu-1 is in service");
    assert!(show::in_service(&NodeView { connected: false, ..back }).contains("as soon as it connects"));
}
