use iop_execution::{NodeId, Target};
use iop_wire::{ProviderConfig, WorkloadIdentity};

use super::*;
use crate::catalog::{Catalog, CatalogError, ModelGroup, NodeEntry, ProviderEntry, QueueDefaults};
use crate::token::{Token, TokenKind};

fn secret(text: &str) -> Arc<dyn CredentialSource> {
    Arc::new(SlotSecret::new(text.as_bytes().to_vec()))
}

fn slot(name: &str, secret_text: &str) -> CredentialSlot {
    CredentialSlot::new(SlotName::new(name).unwrap(), 1, secret(secret_text))
}

fn profile(name: &str, form: CredentialForm) -> CredentialProfile {
    CredentialProfile::new(ProfileName::new(name).unwrap(), form)
}

fn route(name: &str, principals: Scope<&str>, models: Scope<&str>, slots: &[&str]) -> CredentialRoute {
    let principals = match principals {
        Scope::All => Scope::All,
        Scope::Only(names) => Scope::Only(names.iter().map(|name| PrincipalName::new(name).unwrap()).collect()),
    };
    let models = match models {
        Scope::All => Scope::All,
        Scope::Only(names) => Scope::Only(names.iter().map(|name| ModelName::new(name).unwrap()).collect()),
    };
    let slots = slots.iter().map(|slot| SlotName::new(slot).unwrap()).collect();
    CredentialRoute::new(RouteName::new(name).unwrap(), principals, models, slots)
}

fn credentials() -> Credentials {
    Credentials {
        issuer: Some(Arc::new(IssuerKey::generate().unwrap())),
        slots: vec![slot("acme", "sk-SENTINEL"), slot("other", "key SENTINEL")],
        profiles: vec![
            profile("bearer", CredentialForm::Bearer),
            profile("x-key", CredentialForm::Header("x-key".into())),
        ],
        routes: vec![
            route("a", Scope::Only(vec!["team-a"]), Scope::Only(vec!["m"]), &["acme"]),
            route("all", Scope::All, Scope::Only(vec!["free"]), &["acme", "other"]),
        ],
        ..Credentials::default()
    }
}

fn provider(slot: &str, profile: &str) -> ProviderConfig {
    let mut config = ProviderConfig::new(ProviderId::new("p").unwrap(), "openai_compat").unwrap();
    config.base_url = "https://api.example.com/v1".into();
    config.credential = Some(CredentialUse { slot: slot.into(), profile: profile.into() });
    config
}

fn build(credentials: Credentials, provider: ProviderConfig) -> Result<Catalog, CatalogError> {
    build_named(credentials, provider, "n", "m")
}

fn build_named(
    credentials: Credentials,
    provider: ProviderConfig,
    node: &str,
    target: &str,
) -> Result<Catalog, CatalogError> {
    let token = Token::generate(TokenKind::Node).unwrap();
    let candidate = crate::catalog::Candidate::new(provider.provider_id.clone(), Target::new(target).unwrap());
    let entries = vec![ProviderEntry::new(provider)];
    let identities = vec![WorkloadIdentity::parse("spiffe://iop.local/iop/node/n").unwrap()];
    let node = NodeEntry::new(NodeId::new(node).unwrap(), token.id().clone(), token.hash(), entries)
        .with_identities(identities);
    let model = ModelGroup::new(ModelName::new("m").unwrap(), vec![candidate], QueueDefaults::default());
    Catalog::builder().node(node).model(model).credentials(credentials).build()
}

fn refusal(credentials: Credentials, provider: ProviderConfig) -> CredentialError {
    match build(credentials, provider).unwrap_err() {
        CatalogError::Credentials(error) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn what_does_not_fit_together_is_refused_when_the_catalog_is_built() {
    // CRD-11, CRD-16
    assert!(build(credentials(), provider("acme", "bearer")).is_ok());
    assert!(build(credentials(), provider("other", "x-key")).is_ok());
    let change = |change: fn(&mut Credentials)| {
        let mut changed = credentials();
        change(&mut changed);
        refusal(changed, provider("acme", "bearer"))
    };
    let id = || ProviderId::new("p").unwrap();
    assert_eq!(
        refusal(credentials(), provider("acne", "bearer")),
        CredentialError::UnknownSlot { provider: id(), slot: "acne".into() }
    );
    assert_eq!(
        refusal(credentials(), provider("acme", "query")),
        CredentialError::UnknownProfile { provider: id(), profile: "query".into() }
    );
    let mut both = provider("acme", "bearer");
    both.auth = "env:KEY".into();
    assert_eq!(refusal(credentials(), both), CredentialError::SlotAndAuth(id()));
    let mut nowhere = provider("acme", "bearer");
    nowhere.base_url.clear();
    assert_eq!(refusal(credentials(), nowhere), CredentialError::NoOrigin(id()));
    assert_eq!(change(|all| all.issuer = None), CredentialError::NoIssuer(id()));
    assert_eq!(change(|all| all.also_trusted = vec![[0; 32]]), CredentialError::Issuers(UntrustedIssuer::Weak));
    let others = || (0..8).map(|_| IssuerKey::generate().unwrap().public_bytes()).collect();
    let mut nine = credentials();
    nine.also_trusted = others();
    assert_eq!(refusal(nine, provider("acme", "bearer")), CredentialError::Issuers(UntrustedIssuer::TooMany));
    assert_eq!(change(|all| all.ttl_ms = 300_001), CredentialError::Ttl);
    assert_eq!(change(|all| all.slots[0].revision = 0), CredentialError::ZeroRevision(SlotName::new("acme").unwrap()));
    for (twice, what) in [
        (change(|all| all.slots.push(all.slots[0].clone())), "credential slot acme"),
        (change(|all| all.profiles.push(all.profiles[0].clone())), "credential profile bearer"),
        (change(|all| all.routes.push(all.routes[0].clone())), "credential route a"),
    ] {
        assert_eq!(twice, CredentialError::Duplicate(what.into()));
    }
    let stray = change(|all| all.routes[0].slots = vec![SlotName::new("gone").unwrap()]);
    assert!(matches!(stray, CredentialError::UnknownRouteSlot { .. }), "{stray}");
}

#[test]
fn a_node_that_can_not_prove_itself_has_no_managed_provider() {
    // CRD-10
    let mut catalog = Catalog::builder().credentials(credentials());
    let token = Token::generate(TokenKind::Node).unwrap();
    let entries = vec![ProviderEntry::new(provider("acme", "bearer"))];
    let mut node = NodeEntry::new(NodeId::new("n").unwrap(), token.id().clone(), token.hash(), entries);
    let error = catalog.clone().node(node.clone()).build().unwrap_err();
    assert_eq!(error, CatalogError::Credentials(CredentialError::NoIdentity(ProviderId::new("p").unwrap())));
    node.enabled = false;
    catalog = catalog.node(node);
    assert!(catalog.build().is_ok(), "one that may not register needs none");
}

#[test]
fn names_that_a_lease_can_not_hold_are_found_before_a_request_finds_them() {
    // CRD-2, CRD-15
    for (node, target, field) in [("two words", "m", BindingField::Node), ("n", "modèle", BindingField::Target)] {
        let error = build_named(credentials(), provider("acme", "bearer"), node, target).unwrap_err();
        let provider = ProviderId::new("p").unwrap();
        assert_eq!(error, CatalogError::Credentials(CredentialError::Unbindable { provider, field }));
    }
}

#[test]
fn a_secret_that_its_profile_can_not_carry_is_refused_and_never_told() {
    // CRD-9, CRD-11
    let error = refusal(credentials(), provider("other", "bearer"));
    assert!(matches!(error, CredentialError::Unusable { source: InvalidCredential::Bytes, .. }), "{error}");
    let all = format!("{error}{error:?}{:?}{:?}", credentials(), provider("other", "bearer"));
    assert!(!all.contains("SENTINEL"), "{all}");
    let mut unused = credentials();
    unused.slots[1].status = SlotStatus::Revoked;
    assert!(build(unused, provider("other", "bearer")).is_ok(), "nobody looks at a revoked secret");
}

#[test]
fn who_may_use_what_is_decided_in_the_order_of_the_rule() {
    // CRD-15
    let all = credentials();
    let ask = |caller: Option<&str>, model: &str, slot: &str, profile: &str| {
        let caller = caller.map(|name| Principal::new(name).unwrap());
        all.allow(caller.as_ref(), model, slot, profile).map(|allowed| allowed.route.name.as_str().to_owned())
    };
    assert_eq!(ask(Some("team-a"), "m", "acme", "bearer"), Ok("a".into()));
    assert_eq!(ask(Some("team-b"), "free", "other", "x-key"), Ok("all".into()));
    for (caller, model, slot, profile, denied) in [
        (None, "free", "acme", "bearer", Denied::Barred(BindingField::Principal)),
        (Some("two words"), "free", "acme", "bearer", Denied::Barred(BindingField::Principal)),
        (Some("team-b"), "m", "acme", "bearer", Denied::Barred(BindingField::Route)),
        (Some("team-a"), "x", "acme", "bearer", Denied::Barred(BindingField::Route)),
        (Some("team-a"), "m", "other", "bearer", Denied::Barred(BindingField::Slot)),
    ] {
        assert_eq!(ask(caller, model, slot, profile), Err(denied), "{caller:?} {model} {slot}");
    }
    let unknown = ask(Some("team-a"), "m", "acme", "none").unwrap_err();
    assert_eq!(unknown.reason().to_string(), "binding_mismatch (profile)");
    let mut changed = credentials();
    for (status, reason) in
        [(SlotStatus::Disabled, CredentialReason::Disabled), (SlotStatus::Revoked, CredentialReason::Revoked)]
    {
        changed.slots[0].status = status;
        let caller = Principal::new("team-a").unwrap();
        let denied = changed.allow(Some(&caller), "m", "acme", "bearer").err();
        assert_eq!(denied, Some(Denied::Refused(reason)));
    }
}
