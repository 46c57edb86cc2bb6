use super::*;
use crate::state::tests::{group, node_entry, provider_config};

fn base() -> CatalogBuilder {
    Catalog::builder().node(node_entry("n1", &[("a", 2, 1)])).node(node_entry("n2", &[("b", 1, 0)]))
}

fn model(name: &str) -> ModelName {
    ModelName::new(name).unwrap()
}

fn provider(id: &str) -> ProviderId {
    ProviderId::new(id).unwrap()
}

#[test]
fn a_good_catalog_builds_and_gives_each_node_its_enabled_providers() {
    // REG-1
    let mut node = node_entry("n1", &[("a", 1, 0), ("b", 1, 0)]);
    node.providers[1].enabled = false;
    let catalog = Catalog::builder().revision(3).node(node).model(group("m", &["a"])).build().unwrap();
    let config = catalog.node_config(&catalog.nodes()[0]);
    assert_eq!(config.revision, 3);
    assert_eq!(config.providers.iter().map(|p| p.provider_id.as_str()).collect::<Vec<_>>(), ["a"]);
    assert_eq!(catalog.queue(), QueueDefaults { max_waiting: 1024, timeout: Duration::from_secs(30) });
}

#[test]
fn every_mistake_is_named() {
    // CFG-1
    let mut alias = group("m2", &["a"]);
    alias.aliases = vec![model("m1")];
    let mut weightless = group("m", &["a"]);
    weightless.candidates[0].weight = 0;
    let mut hasty = group("m", &["a"]);
    hasty.queue_timeout = Duration::ZERO;
    let mut same_adapter = node_entry("n3", &[("c", 1, 0), ("d", 1, 0)]);
    same_adapter.providers[1].config.adapter = AdapterKey::new("c").unwrap();
    let mut stall = provider_config("c", 1, 0);
    stall.response_stall_timeout_ms = 999;
    let mut stalling = node_entry("n3", &[]);
    stalling.providers = vec![ProviderEntry::new(stall)];
    let mut same_token = node_entry("n3", &[]);
    same_token.token_id = node_entry("n1", &[]).token_id;

    let node = |id: &str| NodeId::new(id).unwrap();
    let (name, id) = (model("m"), provider("a"));
    let cases = [
        (base().node(node_entry("n1", &[])), CatalogError::DuplicateNode(node("n1"))),
        (base().node(same_token), CatalogError::DuplicateToken(node("n3"))),
        (base().node(node_entry("n3", &[("a", 1, 0)])), CatalogError::DuplicateProvider(id.clone())),
        (
            base().node(same_adapter),
            CatalogError::DuplicateAdapter { node: node("n3"), adapter: AdapterKey::new("c").unwrap() },
        ),
        (base().node(node_entry("n3", &[("c", 1, 2)])), CatalogError::LongCapacity(provider("c"))),
        (base().model(group("m1", &["a"])).model(alias), CatalogError::DuplicateModel(model("m1"))),
        (base().model(group("m", &[])), CatalogError::NoCandidates(name.clone())),
        (
            base().model(group("m", &["zz"])),
            CatalogError::UnknownProvider { model: name.clone(), provider: provider("zz") },
        ),
        (
            base().model(group("m", &["a", "a"])),
            CatalogError::DuplicateCandidate { model: name.clone(), provider: id.clone() },
        ),
        (base().model(weightless), CatalogError::ZeroWeight { model: name.clone(), provider: id }),
        (base().model(hasty), CatalogError::ZeroQueueTimeout(name)),
    ];
    for (builder, error) in cases {
        assert_eq!(builder.build().map(|_| ()), Err(error));
    }
    assert!(matches!(base().node(stalling).build(), Err(CatalogError::StallTimeout { .. })));
}

#[test]
fn a_config_that_its_node_can_not_be_told_is_refused() {
    // WIR-8, WIR-15
    let many = |count: usize| {
        let mut node = node_entry("n3", &[]);
        node.providers = (0..count).map(|at| ProviderEntry::new(provider_config(&format!("p{at}"), 1, 0))).collect();
        node
    };
    let id = NodeId::new("n3").unwrap();
    assert!(base().node(many(MAX_LIST)).build().is_ok());
    let refused = base().node(many(MAX_LIST + 1)).build().map(|_| ());
    assert_eq!(refused, Err(CatalogError::TooManyProviders(id.clone())));
    let mut off = many(MAX_LIST + 1);
    off.providers[0].enabled = false;
    assert!(base().node(off).build().is_ok(), "a provider that is off is not told");

    let with = |change: &dyn Fn(&mut ProviderConfig)| {
        let mut node = many(1);
        change(&mut node.providers[0].config);
        base().node(node).build().map(|_| ())
    };
    let targets = |count, len| {
        move |config: &mut ProviderConfig| {
            config.targets = (0..count).map(|at| Target::new(format!("{at:0len$}")).unwrap()).collect();
        }
    };
    assert_eq!(with(&targets(MAX_TARGETS, 4)), Ok(()));
    assert_eq!(with(&targets(MAX_TARGETS + 1, 4)), Err(CatalogError::TooManyTargets(provider("p0"))));
    let problem = "the message is larger than allowed";
    let too_large = CatalogError::NodeConfig { node: id.clone(), problem };
    assert_eq!(with(&targets(MAX_TARGETS, 256)), Err(too_large));
    let problem = "base_url is no valid text";
    let long_url = with(&|config| config.base_url = "x".repeat(8 * 1024 + 1));
    assert_eq!(long_url, Err(CatalogError::NodeConfig { node: id, problem }));
}
