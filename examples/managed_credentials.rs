//! A provider's key on the Edge, lent to a Node for one call at a time: the backend sees it; the Node's config, the wire in clear
//! and the client never do. Rotated, the next call has the new one; revoked, there is no call.
//!
//! Run it: `cargo run -p iop-examples --example managed_credentials`

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use iop_adapters::{OpenAiCompat, OpenAiCompatConfig};
use iop_edge_core::Edge;
use iop_edge_core::api::Submit;
use iop_edge_core::catalog::{
    Candidate, Catalog, CredentialForm, CredentialProfile, CredentialRoute, CredentialSlot, Credentials, IssuerKey,
    ModelGroup, NodeEntry, ProfileName, ProviderEntry, QueueDefaults, RouteName, Scope, SlotName, SlotSecret,
    SlotStatus,
};
use iop_edge_core::token::{Token, TokenKind};
use iop_examples::{Ca, Failure, backend_with_key, node_uri};
use iop_execution::{ModelName, NodeId, Principal, ProviderId, Redacted, RunEventKind, Target};
use iop_node_core::{CUSTOM_KIND, LeaseIssuers, Node};
use iop_wire::link::grpc::{GrpcConnector, GrpcListener};
use iop_wire::{CredentialUse, ProviderConfig, WorkloadIdentity};
use rcgen::ExtendedKeyUsagePurpose;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let (ca, token, issuer) =
        (Ca::new("the fleet's CA")?, Token::generate(TokenKind::Node)?, Arc::new(IssuerKey::generate()?));
    let backend = backend_with_key().await?;
    let fleet = |revision, secret, status| catalog(revision, &token, &issuer, &backend, secret, status);
    let edge = Edge::builder(fleet(1, "sk-first", SlotStatus::Enabled)?).build();
    tokio::spawn(edge.drive());
    // The link proves who is at both ends: a lease is sealed to this connection, and to nothing else.
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let attaching = edge.clone();
    let attach = move |link| drop(tokio::spawn(attaching.attach(link)));
    tokio::spawn(GrpcListener::new(listener).with_tls(ca.edge("edge")?).serve(attach, CancellationToken::new()));

    // The Node has no key of the backend, only the will to take leases of its Edge.
    let own = ca.issue(&node_uri("gpu-1"), ExtendedKeyUsagePurpose::ClientAuth)?;
    let connector = GrpcConnector::tls(address, ca.node(own, "edge")?, None)?;
    let config = OpenAiCompatConfig::new(backend.as_str()).with_lent_key(true);
    let node = Node::builder(Redacted::new(token.reveal()), Arc::new(connector))
        .provider("acme", Arc::new(OpenAiCompat::new(config)?))
        .lease_issuers(LeaseIssuers::OfEdge)
        .build()?;
    let (mut status, stop) = (node.status(), CancellationToken::new());
    let serving = tokio::spawn(node.serve(stop.clone()));
    println!("node ready: {}", status.wait_ready().await);

    ask(&edge, "team-a").await?;
    ask(&edge, "team-b").await?;
    edge.apply_config(fleet(2, "sk-second", SlotStatus::Enabled)?)?;
    tokio::time::sleep(TOLD).await;
    println!("rotated:");
    ask(&edge, "team-a").await?;
    edge.apply_config(fleet(3, "sk-second", SlotStatus::Revoked)?)?;
    tokio::time::sleep(TOLD).await;
    println!("revoked:");
    ask(&edge, "team-a").await?;

    stop.cancel();
    serving.await??;
    Ok(())
}

/// For the Node to hear of a new config. Until it has, the Edge goes on with the old revision.
const TOLD: Duration = Duration::from_millis(300);

async fn ask(edge: &Edge, principal: &str) -> Result<(), Failure> {
    let mut submit = Submit::to_model(ModelName::new("large")?);
    submit.principal = Some(Principal::new(principal)?);
    let input = r#"{"messages":[{"role":"user","content":"hello"}]}"#;
    let (_, mut events) = edge.submit_run(submit, input.into()).await?;
    while let Some(event) = events.next().await {
        match event.kind {
            RunEventKind::Delta(text) => println!("  {principal} is told: {text}"),
            RunEventKind::Error(failure) => println!("  {principal} is refused: {failure}"),
            _ => {}
        }
    }
    Ok(())
}

/// One Node with one provider, whose calls need the credential of one slot; only team-a may use it.
fn catalog(
    revision: u64,
    token: &Token,
    issuer: &Arc<IssuerKey>,
    backend: &str,
    secret: &str,
    status: SlotStatus,
) -> Result<Catalog, Failure> {
    let mut provider = ProviderConfig::new(ProviderId::new("acme")?, CUSTOM_KIND)?;
    backend.clone_into(&mut provider.base_url);
    provider.targets = vec![Target::new("large")?];
    provider.credential = Some(CredentialUse { slot: "acme".to_owned(), profile: "bearer".to_owned() });
    let node =
        NodeEntry::new(NodeId::new("gpu-1")?, token.id().clone(), token.hash(), vec![ProviderEntry::new(provider)])
            .with_identities(vec![WorkloadIdentity::parse(&node_uri("gpu-1"))?]);

    let secret = Arc::new(SlotSecret::new(secret.as_bytes().to_vec()));
    let mut credentials = Credentials::default();
    credentials.issuer = Some(Arc::<IssuerKey>::clone(issuer));
    credentials.slots = vec![CredentialSlot::new(SlotName::new("acme")?, revision, secret).with_status(status)];
    credentials.profiles = vec![CredentialProfile::new(ProfileName::new("bearer")?, CredentialForm::Bearer)];
    let team = Scope::Only(vec![iop_edge_core::catalog::PrincipalName::new("team-a")?]);
    let (name, slots) = (RouteName::new("default")?, vec![SlotName::new("acme")?]);
    credentials.routes = vec![CredentialRoute::new(name, team, Scope::All, slots)];

    let candidate = Candidate::new(ProviderId::new("acme")?, Target::new("large")?);
    let model = ModelGroup::new(ModelName::new("large")?, vec![candidate], QueueDefaults::default());
    let catalog = Catalog::builder().revision(revision).require_identity(true);
    Ok(catalog.credentials(credentials).node(node).model(model).build()?)
}
