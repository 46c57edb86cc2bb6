use std::num::NonZeroU32;

use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{Capabilities, provider::TargetInfo};
use iop_wire::CancelPolicy;

use super::*;

fn config(key: &str) -> ProviderConfig {
    ProviderConfig {
        provider_id: ProviderId::new(format!("p-{key}")).unwrap(),
        adapter: AdapterKey::new(key).unwrap(),
        kind: "demo".into(),
        base_url: String::new(),
        wire: WireMode::Auto,
        capacity: 0,
        long_capacity: 0,
        targets: vec![],
        response_stall_timeout_ms: 0,
        first_response_timeout_ms: 0,
        stall_per_1k_prompt_ms: 0,
        close_grace_ms: 0,
        probe_timeout_ms: 0,
        terminal_linger_ms: 0,
        cancel_policy: CancelPolicy::Abort,
        auth: String::new(),
        credential: None,
    }
}

fn payload(providers: Vec<ProviderConfig>) -> NodeConfigPayload {
    NodeConfigPayload { revision: 1, providers }
}

fn provider(capabilities: Capabilities) -> Arc<dyn Provider> {
    ScriptedProvider::new(Script::text("x")).with_capabilities(capabilities).into_parts().0
}

fn target(name: &str) -> Target {
    Target::new(name).unwrap()
}

fn keys<'a>(configs: impl IntoIterator<Item = &'a ProviderConfig>) -> Vec<&'a str> {
    configs.into_iter().map(|config| config.adapter.as_str()).collect()
}

#[test]
fn the_smaller_of_config_and_backend_counts_and_sixteen_if_neither_speaks() {
    // LEA-8
    for (configured, backend, want) in [(0, 0, 16), (3, 0, 3), (0, 4, 4), (3, 4, 3), (5, 4, 4)] {
        assert_eq!(effective_capacity(configured, NonZeroU32::new(backend)), want);
    }
    let mut adapters = Adapters::new();
    adapters.install(config("a"), provider(Capabilities::runs_only().with_max_concurrency(NonZeroU32::new(2))));
    let adapter = Arc::clone(adapters.by_key(&AdapterKey::new("a").unwrap()).unwrap());
    assert_eq!(adapter.gate().capacity(), 2);
    assert_eq!(adapters.ready(&payload(vec![config("a")]))[0].max_concurrency, 2);
}

#[test]
fn an_equal_config_keeps_the_instance_and_any_difference_replaces_it() {
    // EXE-14, NOD-4
    let mut adapters = Adapters::new();
    for key in ["kept", "changed", "gone"] {
        adapters.install(config(key), provider(Capabilities::runs_only()));
    }
    let kept = Arc::clone(adapters.by_key(&AdapterKey::new("kept").unwrap()).unwrap());
    let mut changed = config("changed");
    changed.base_url = "http://127.0.0.1:1".into();
    let new = payload(vec![config("kept"), changed, config("new"), config("kept")]);
    let plan = adapters.plan(&new);
    assert_eq!(keys(&plan.build), ["changed", "new"]);
    assert_eq!(keys(&plan.duplicates), ["kept"]);
    let gone = adapters.leave(&new);
    let mut left = keys(gone.iter().map(|adapter| adapter.config()));
    left.sort_unstable();
    assert_eq!(left, ["changed", "gone"]);
    assert!(gone.iter().all(|adapter| adapter.is_draining()));
    assert!(Arc::ptr_eq(&kept, adapters.by_key(&AdapterKey::new("kept").unwrap()).unwrap()) && !kept.is_draining());
    assert!(adapters.by_key(&AdapterKey::new("changed").unwrap()).is_none());
    assert_eq!(adapters.ready(&new).len(), 1, "what is not installed is not ready");
    assert_eq!(adapters.take_all().len(), 1);
    assert!(adapters.ready(&new).is_empty());
}

#[test]
fn an_instance_that_takes_a_backend_over_shares_its_places() {
    // REG-7, LEA-5
    let at = |key: &str, url: &str, capacity| ProviderConfig { base_url: url.into(), capacity, ..config(key) };
    let (here, there) = ("http://127.0.0.1:1", "http://127.0.0.1:2");
    let place =
        |adapters: &Adapters, key: &str| adapters.by_key(&AdapterKey::new(key).unwrap()).unwrap().gate().clone();
    let mut adapters = Adapters::new();
    adapters.install(at("a", here, 2), provider(Capabilities::runs_only()));
    let running = place(&adapters, "a").try_enter().unwrap();
    for (key, url, free) in [("a", here, 1), ("renamed", here, 1), ("a", there, 2), ("renamed", there, 2)] {
        let new = payload(vec![at(key, url, 3)]);
        let _leaving = adapters.leave(&new);
        adapters.install(at(key, url, 2), provider(Capabilities::runs_only()));
        let gate = place(&adapters, key);
        let taken: Vec<_> = std::iter::from_fn(|| gate.try_enter()).collect();
        assert_eq!(taken.len(), free, "{key} {url}");
    }
    drop(running);
}

#[test]
fn a_provider_of_the_program_is_stopped_when_nothing_uses_it_any_more() {
    // REG-7: one object may serve under several configs, one after the other or at once
    let own = provider(Capabilities::runs_only());
    let mut adapters = Adapters::new();
    assert!(!adapters.uses(&own));
    adapters.install(config("a"), Arc::clone(&own));
    let changed = ProviderConfig { capacity: 1, ..config("a") };
    let old = adapters.leave(&payload(vec![changed.clone()]));
    assert!(adapters.uses(&own), "while it is leaving, too");
    adapters.install(changed, Arc::clone(&own));
    assert!(!adapters.left(&old[0]), "its successor is the same object");
    let last = adapters.take_all();
    assert!(adapters.left(&last[0]) && !adapters.uses(&own));
}

#[test]
fn ready_lists_what_the_backend_has_as_far_as_the_config_lets_it() {
    // EXE-2
    let listed = Capabilities::runs_only()
        .with_tunnels()
        .with_features(true, true)
        .with_targets(vec![TargetInfo::new(target("x")).with_context_length(Some(8192)), TargetInfo::new(target("y"))]);
    let mut restricted = config("b");
    restricted.targets = vec![target("y"), target("z")];
    restricted.wire = WireMode::Run;
    let all = payload(vec![config("a"), restricted.clone()]);
    let mut adapters = Adapters::new();
    adapters.install(config("a"), provider(listed.clone()));
    adapters.install(restricted, provider(listed));
    let ready = adapters.ready(&all);
    assert_eq!(ready[0].provider_id.as_str(), "p-a");
    assert!(ready[0].tunnels && ready[0].runs && ready[0].tools && ready[0].reasoning);
    let targets: Vec<_> = ready[0].targets.iter().map(|t| (t.target.as_str(), t.context_length)).collect();
    assert_eq!(targets, [("x", 8192), ("y", 0)]);
    assert!(!ready[1].tunnels, "the config forces runs");
    assert_eq!(ready[1].targets.iter().map(|t| t.target.as_str()).collect::<Vec<_>>(), ["y"]);
    assert!(!adapters.by_key(&AdapterKey::new("b").unwrap()).unwrap().serves(&target("x")));
}

#[test]
fn a_long_list_of_targets_stays_within_one_message() {
    // WIR-8
    let many = (0..4000).map(|at| TargetInfo::new(target(&format!("{at:0100}")))).collect();
    let mut adapters = Adapters::new();
    adapters.install(config("a"), provider(Capabilities::runs_only().with_targets(many)));
    let ready = adapters.ready(&payload(vec![config("a")]));
    let bytes: usize = ready[0].targets.iter().map(|t| t.target.as_str().len() + READY_TARGET_OVERHEAD).sum();
    assert!(!ready[0].targets.is_empty() && bytes <= MAX_READY_TARGET_BYTES);
}

#[test]
fn close_grace_has_a_default_and_a_bound() {
    // WDG-3
    for (ms, want) in [(0, 5_000), (1, 1), (60_000, 60_000), (u64::MAX, 60_000)] {
        let mut adapters = Adapters::new();
        let mut config = config("a");
        config.close_grace_ms = ms;
        adapters.install(config, provider(Capabilities::runs_only()));
        let adapter = adapters.by_key(&AdapterKey::new("a").unwrap()).unwrap();
        assert_eq!(adapter.close_grace(), Duration::from_millis(want));
    }
}

#[derive(Debug)]
struct Panicking;

#[iop_execution::async_trait]
impl Provider for Panicking {
    fn capabilities(&self) -> Capabilities {
        panic!("scripted")
    }

    async fn execute(
        &self,
        _: iop_execution::RunRequest,
        _: &mut iop_execution::EventSink,
    ) -> Result<iop_execution::Completion, iop_execution::ProviderError> {
        Err(iop_execution::ProviderError::unsupported("panics"))
    }
}

#[test]
fn an_adapter_that_panics_when_asked_what_it_can_do_is_left_out_of_ready() {
    // NOD-1: one bad adapter must not end the Node
    let config = ProviderConfig::new(ProviderId::new("p").unwrap(), "custom").unwrap();
    let payload = NodeConfigPayload { revision: 1, providers: vec![config.clone()] };
    let mut adapters = Adapters::default();
    adapters.install(config, Arc::new(Panicking));
    assert!(adapters.ready(&payload).is_empty());
}
