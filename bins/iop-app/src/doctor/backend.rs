//! Decides what is told of a backend: whether it answers, with which models, and what it is.

use std::time::Duration;

use iop_execution::Redacted;
use iop_wire::ProviderConfig;

use super::Report;
use crate::config::secret::{read_secret, resolve_path};
use crate::up::probe::{Asked, Found, Probed, ask};

/// How long a backend may take to list its models.
const PATIENCE: Duration = Duration::from_secs(5);
/// Models that are named before the rest is counted.
const SHOWN: usize = 4;

/// Looks at a provider as its Node would reach it.
pub(super) async fn examine(provider: &ProviderConfig, report: &mut Report) {
    let check = format!("backend {}", provider.provider_id);
    if provider.base_url.is_empty() {
        return report.ok(check, format!("kind {}: it is inside the Node", provider.kind));
    }
    let key = match key_of(&provider.auth) {
        Ok(key) => key,
        Err(problem) => {
            let next = format!("`auth: {{ bearer: \"{}\" }}` is resolved on this machine: set it here", provider.auth);
            return report.fail(check, problem, next);
        }
    };
    let asked = Asked { url: provider.base_url.clone(), key, patience: PATIENCE };
    let (probed, version) = ask(provider.provider_id.as_str(), &asked).await;
    if probed.found == Found::Unauthorized && provider.credential.is_some() {
        let lent = format!("{} answers; its key is lent by the Edge, call by call, and not known here", probed.url);
        return report.ok(check, lent);
    }
    let before = report.findings.len();
    tell(&check, &probed, version.as_deref(), report);
    let Found::Backend(models) = &probed.found else { return };
    if report.findings.get(before).is_none_or(|finding| finding.verdict != super::Verdict::Ok) {
        return;
    }
    let missing: Vec<_> = provider
        .targets
        .iter()
        .map(|target| target.as_str())
        .filter(|target| !models.iter().any(|model| model == target))
        .collect();
    if !missing.is_empty() {
        report.warn(check, format!("it does not list {}", missing.join(", ")), "compare `targets` with its models");
    } else if provider.kind == "openai_compat" && probed.kind != provider.kind {
        let next = format!("`kind: {}` knows its health, capacity and context length", probed.kind);
        report.warn(check, format!("it is {}, and config says kind openai_compat", probed.kind), next);
    }
}

/// Looks at backends that were named on the command line.
pub(super) async fn examine_urls(urls: &[String], report: &mut Report) {
    for url in urls {
        let asked = Asked { url: url.clone(), key: None, patience: PATIENCE };
        let (probed, version) = ask(url, &asked).await;
        tell(&format!("backend {url}"), &probed, version.as_deref(), report);
    }
}

/// The key of a provider, from this machine's environment.
fn key_of(reference: &str) -> Result<Option<Redacted<String>>, String> {
    match reference.split_once(':') {
        None => Ok(None),
        Some(("env", name)) => match std::env::var(name) {
            Ok(key) => Ok(Some(Redacted::new(key))),
            Err(_) => Err(format!("the environment variable {name} is not set on this machine")),
        },
        Some((_, path)) => {
            read_secret(&resolve_path(std::path::Path::new(""), path)).map(|key| Some(Redacted::new(key)))
        }
    }
}

fn tell(check: &str, probed: &Probed, version: Option<&str>, report: &mut Report) {
    let url = &probed.url;
    match &probed.found {
        Found::Backend(models) if models.is_empty() => {
            report.warn(check, format!("{url} answers and lists no model"), "load a model there");
        }
        Found::Backend(models) => {
            let shown: Vec<_> = models.iter().take(SHOWN).map(String::as_str).collect();
            let more = models.len() - shown.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let version = version.map(|version| format!(" {version}")).unwrap_or_default();
            report.ok(check, format!("{url}: {}{version}, {}{more}", probed.kind, shown.join(", ")));
        }
        Found::Iop => report.fail(check, format!("{url} is an Edge itself"), "name the model server, not IOP"),
        Found::Unauthorized => report.fail(
            check,
            format!("{url} wants a key, or another one"),
            "name it under `auth: { bearer: \"env:NAME\" }` of the provider, or lend it from a credential slot",
        ),
        Found::Loading => report.warn(check, format!("{url} is loading its model"), "look again in a minute"),
        Found::Other(what) => {
            let next = "compare `base_url` with the address at which it serves its OpenAI API";
            report.fail(check, format!("{url} {what}"), next);
        }
        Found::Silent => report.fail(
            check,
            format!("{url} takes connections and answers nothing within {} s", PATIENCE.as_secs()),
            "it hangs, or its machine is overloaded: look at its log, restart it",
        ),
        Found::Nothing => {
            let next = "start it, or correct `base_url`; a server in a container may listen to its own loopback only";
            report.fail(check, format!("nothing answers at {url}"), next);
        }
    }
}
