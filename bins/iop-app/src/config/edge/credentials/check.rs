//! Decides what of `credentials:` must fit together, with the keys of clients and with the providers that use it.

use std::path::Path;

use iop_adapters::http::Origin;
use iop_edge_core::catalog::{CredentialForm, CredentialSource, IssuerKey, PrincipalName, SlotName, SlotSecret};

use super::super::check::Unique;
use super::resolve_public_key;
use crate::config::problem::{Position, Problems, did_you_mean};
use crate::config::secret::{SecretReference, readable_by_all, resolve_path};
use crate::config::tree::{Tree, Value};

/// How a key that signs is made.
const NEW_KEY: &str = "iop lease issuer-key new --out lease-issuer.pem";

/// What a secret that can't be loaded does.
const REFUSED: &str = "an Edge that has not loaded it refuses the requests that need it; then `iop reload`";

pub(in crate::config::edge) fn check(tree: &Tree, base: &Path, problems: &mut Problems) {
    let credentials = tree.get("credentials");
    let slots = credentials.map(|all| slots(all, base, problems)).unwrap_or_default();
    let profiles = credentials.map(|all| profiles(all, problems)).unwrap_or_default();
    if let Some(credentials) = credentials {
        issuers(credentials, base, problems);
        routes(credentials, tree, &slots, problems);
    }
    let managed =
        tree.get("tls").and_then(|tls| tls.get("nodes")).is_some_and(|nodes| nodes.get("client_ca").is_some());
    let signs = credentials.is_some_and(|all| all.get("issuer_key").is_some());
    for provider in tree.list("nodes").iter().flat_map(|node| node.list("providers")) {
        if let Some(wanted) = provider.get("credential") {
            one_provider(provider, wanted, (&slots, &profiles), signs, problems);
            if !managed {
                let message =
                    "a provider with `credential` needs Nodes that prove who they are: set `tls.nodes.client_ca`";
                let suggestion =
                    "tls: { nodes: { cert: …, key: …, client_ca: … } }, and a certificate for each Node".to_owned();
                problems.error(wanted.at, message, Some(suggestion));
            }
        }
    }
}

/// A name that a lease can hold.
fn bindable(what: &str, name: &str, at: Position, problems: &mut Problems) {
    if SlotName::new(name).is_err() {
        let message = format!("the name of a {what} has 1 to 255 visible ASCII characters, and no space");
        problems.error(at, message, None);
    }
}

fn slots<'a>(credentials: &'a Tree, base: &Path, problems: &mut Problems) -> Unique<'a> {
    let mut names = Unique::default();
    for slot in credentials.list("slots") {
        if let Some((name, at)) = slot.text("name") {
            names.add("credential slot", name, at, problems);
            bindable("credential slot", name, at, problems);
        }
        let unused = slot.text("status").is_some_and(|(status, _)| status != "enabled");
        let Some((secret, at)) = slot.text("secret").filter(|_| !unused) else { continue };
        let Ok(reference) = SecretReference::parse(secret) else { continue }; // said by the table
        // Variables and programs may be others where the config is checked than where it runs.
        if let SecretReference::File(path) = &reference {
            match reference.resolve(base) {
                // No other slot, and nobody who revokes one, waits until it can be read.
                Err(message) => problems.warning(at, message, Some(REFUSED.to_owned())),
                Ok(secret) => {
                    readable_by_all(&resolve_path(base, path), at, problems);
                    // Every form takes what a bearer token is made of, and more.
                    let form = CredentialForm::Header("x".to_owned());
                    if let Err(error) = SlotSecret::new(secret).credential(&form) {
                        problems.warning(at, error.to_string(), Some(REFUSED.to_owned()));
                    }
                }
            }
        }
    }
    names
}

fn profiles<'a>(credentials: &'a Tree, problems: &mut Problems) -> Unique<'a> {
    let mut names = Unique::default();
    for profile in credentials.list("profiles") {
        if let Some((name, at)) = profile.text("name") {
            names.add("credential profile", name, at, problems);
            bindable("credential profile", name, at, problems);
        }
        match (profile.text("kind"), profile.text("header")) {
            (Some(("header", at)), None) => {
                let suggestion = "kind: header, header: x-api-key".to_owned();
                problems.error(at, "kind `header` needs the name of the header", Some(suggestion));
            }
            (Some(("bearer", _)), Some((_, at))) => {
                problems.error(at, "kind `bearer` has its header: `authorization`", Some("leave it out".to_owned()));
            }
            (Some(("header", _)), Some((header, at))) => {
                let form = CredentialForm::Header(header.to_owned());
                if let Err(error) = SlotSecret::new(b"x".to_vec()).credential(&form) {
                    problems.error(at, error.to_string(), Some("for example x-api-key".to_owned()));
                }
            }
            (Some(_) | None, _) => {}
        }
    }
    names
}

fn issuers(credentials: &Tree, base: &Path, problems: &mut Problems) {
    if let Some((path, at)) = credentials.text("issuer_key") {
        let path = resolve_path(base, path);
        if let Err(error) = IssuerKey::load(&path) {
            problems.error(at, format!("{}: {error}", path.display()), Some(NEW_KEY.to_owned()));
        }
    } else if !credentials.list("slots").is_empty() {
        let message = "`credentials` has slots and no `issuer_key`: no lease can be signed";
        problems.error(credentials.at, message, Some(NEW_KEY.to_owned()));
    }
    for key in credentials.list("previous_issuers") {
        if let Value::Text(text) = &key.value
            && let Err(message) = resolve_public_key(base, text)
        {
            let suggestion = "previous_issuers: [\"file:keys/old-issuer.pem\"]".to_owned();
            problems.error(key.at, message, Some(suggestion));
        }
    }
}

fn routes(credentials: &Tree, tree: &Tree, slots: &Unique<'_>, problems: &mut Problems) {
    let clients = tree.get("auth").map(|auth| auth.list("api_keys")).unwrap_or_default();
    let named: Vec<_> = clients.iter().filter_map(|key| key.text("principal").or_else(|| key.text("id"))).collect();
    let principals: Vec<_> = named.iter().map(|(name, _)| *name).collect();
    let models = tree.get("models").filter(|models| matches!(models.value, Value::List(_)));
    let auto = |model: &Tree| matches!(&model.value, Value::Text(word) if word == "auto");
    let explicit = models.filter(|models| !models.items().iter().any(auto));
    let known: Vec<_> = explicit
        .iter()
        .flat_map(|models| models.items())
        .filter_map(|model| model.text("name"))
        .map(|(name, _)| name)
        .collect();
    let mut names = Unique::default();
    for route in credentials.list("routes") {
        if let Some((name, at)) = route.text("name") {
            names.add("credential route", name, at, problems);
            bindable("credential route", name, at, problems);
        }
        for (slot, at) in texts(route, "slots") {
            if !slots.has(slot) {
                let message = format!("no credential slot is named `{}`", slot.escape_debug());
                problems.error(at, message, did_you_mean(slot, &slots.names()));
            }
        }
        for (principal, at) in texts(route, "principals").filter(|(name, _)| *name != "*") {
            bindable("principal", principal, at, problems);
            if !principals.contains(&principal) {
                let message = format!("no API key has the principal `{}`", principal.escape_debug());
                problems.warning(at, message, did_you_mean(principal, &principals));
            }
        }
        for (model, at) in texts(route, "models").filter(|(name, _)| *name != "*" && explicit.is_some()) {
            if !known.contains(&model) {
                let message = format!("no model `{}` is configured", model.escape_debug());
                problems.error(at, message, did_you_mean(model, &known));
            }
        }
    }
    let for_all = |route: &Tree| texts(route, "principals").any(|(name, _)| name == "*");
    if credentials.list("routes").iter().any(for_all) {
        for (name, at) in named.into_iter().filter(|(name, _)| PrincipalName::new(*name).is_err()) {
            let name = name.escape_debug();
            let message = format!("the principal `{name}` can't stand in a lease: no route lets it use a slot");
            let suggestion = "1 to 255 visible ASCII characters, for example team-a";
            problems.warning(at, message, Some(suggestion.to_owned()));
        }
    }
    if !credentials.list("routes").is_empty() && clients.is_empty() {
        let message = "no API key is configured: requests have no principal, and no route lets them use a slot";
        problems.warning(credentials.at("routes"), message, Some("add keys under `auth.api_keys`".to_owned()));
    }
    for slot in credentials.list("slots") {
        let Some((name, at)) = slot.text("name") else { continue };
        let routed = credentials.list("routes").iter().any(|route| texts(route, "slots").any(|(slot, _)| slot == name));
        if !routed {
            let message = format!("no route names the credential slot `{}`: nobody may use it", name.escape_debug());
            problems.warning(
                at,
                message,
                Some(format!("routes: [ {{ name: default, principals: [\"*\"], slots: [{name}] }} ]")),
            );
        }
    }
}

fn texts<'a>(of: &'a Tree, list: &str) -> impl Iterator<Item = (&'a str, Position)> {
    of.list(list).iter().filter_map(|item| match &item.value {
        Value::Text(text) => Some((text.as_str(), item.at)),
        _ => None,
    })
}

fn one_provider(
    provider: &Tree,
    wanted: &Tree,
    (slots, profiles): (&Unique<'_>, &Unique<'_>),
    signs: bool,
    problems: &mut Problems,
) {
    for (what, known) in [("slot", slots), ("profile", profiles)] {
        if let Some((name, at)) = wanted.text(what)
            && !known.has(name)
        {
            let message = format!("no credential {what} is named `{}`", name.escape_debug());
            problems.error(at, message, did_you_mean(name, &known.names()));
        }
    }
    if let Some(auth) = provider.get("auth") {
        let message = "a provider has its key from the Node (`auth`) or from the Edge (`credential`), not both";
        problems.error(auth.at, message, Some("take one of them out".to_owned()));
    }
    if !signs {
        let message = "a provider with `credential` needs `credentials.issuer_key`: no lease can be signed";
        problems.error(wanted.at, message, Some(NEW_KEY.to_owned()));
    }
    if let Some((kind @ ("ollama" | "demo"), at)) = provider.text("kind") {
        let message = format!("a provider of kind `{kind}` can't be called with a `credential`");
        problems.error(at, message, Some("kind: openai_compat".to_owned()));
    }
    match provider.text("base_url") {
        None => problems.error(wanted.at, "a provider without `base_url` can't have a `credential`", None),
        Some((url, at)) => {
            if Origin::parse(url).is_ok_and(|origin| !origin.is_private()) && url.starts_with("http://") {
                let message =
                    "the provider's key would travel over `http://` to a machine outside: anybody between reads it";
                problems.warning(at, message, Some("use https://".to_owned()));
            }
        }
    }
    let models = provider.list("targets");
    if models.is_empty() {
        let message = "a provider with `credential` is asked for no list of models, because that would need its key";
        let suggestion = "name them: `targets: [ … ]`, or in the candidates of a model group".to_owned();
        if provider.get("targets").is_none() {
            problems.warning(wanted.at, message, Some(suggestion));
        }
    }
}
