//! Decides what `iop up` says when it serves.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::probe::{Found, Probed};
use super::{Access, Asked, Up};
use crate::term::table;

/// Models that are named; the rest is counted.
const SHOWN_MODELS: usize = 12;

/// `host:port` under which this machine reaches a listener. With TLS it is a name that development certificates hold.
pub(super) fn reachable(address: SocketAddr, tls: bool) -> String {
    let ip = match address.ip() {
        ip if tls && (ip.is_loopback() || ip.is_unspecified()) => return format!("localhost:{}", address.port()),
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port()).to_string()
}

/// What was found, a line each.
pub(super) fn backends(probed: &[Probed]) -> String {
    let rows: Vec<_> = probed
        .iter()
        .map(|probed| {
            let found = match &probed.found {
                Found::Backend(models) if models.is_empty() => "no models: load one".to_owned(),
                Found::Backend(models) if models.len() == 1 => "1 model".to_owned(),
                Found::Backend(models) => format!("{} models", models.len()),
                Found::Iop => "is IOP itself: skipped".to_owned(),
                Found::Unauthorized => "asks for a key: skipped".to_owned(),
                Found::Loading => "is loading its model: served as soon as it is there".to_owned(),
                Found::Other(what) => format!("{what}: skipped"),
                Found::Silent => "takes connections but does not answer (hung, or no HTTP): skipped".to_owned(),
                Found::Nothing => "no answer: skipped".to_owned(),
            };
            vec![probed.name.clone(), probed.url.clone(), found]
        })
        .collect();
    table(&rows)
}

pub(super) fn banner(up: &Up) -> String {
    let mut out = String::new();
    // Writing to a String can't fail.
    let _infallible = write(up, &mut out);
    out
}

fn write(up: &Up, out: &mut String) -> std::fmt::Result {
    if !up.probed.is_empty() {
        writeln!(out, "backends:\n{}", backends(&up.probed))?;
    }
    match up.demo {
        None => {}
        Some(Asked::Yes) => writeln!(out, "serving the built-in demo model iop-demo, which is no language model\n")?,
        Some(Asked::No) => {
            let why = if up.probed.is_empty() { "no backend" } else { "no backend with a model" };
            writeln!(out, "{why} was found: serving the built-in demo model iop-demo, which is no language model")?;
            writeln!(
                out,
                "start Ollama, vLLM, llama.cpp, LM Studio or SGLang and run `iop up` again, or give --backend URL\n"
            )?;
        }
    }
    if let Some(wanted) = up.moved_from {
        writeln!(out, "port {} is taken: using {} instead\n", wanted.port(), up.address.port())?;
    }
    writeln!(out, "base url: {}", up.base_url)?;
    if up.address.ip().is_unspecified() {
        writeln!(out, "          (from other machines: with the name or address of this one)")?;
    }
    let key = match &up.access {
        Access::Open => {
            writeln!(out, "api key: any value, e.g. iop (open to every program on this machine; --api-key sets one)")?;
            None
        }
        Access::Given(key) => {
            writeln!(out, "api key: the one you gave")?;
            Some(key)
        }
        Access::Made(key) => {
            writeln!(out, "api key: {} (made just now, shown once)", key.expose())?;
            Some(key)
        }
    };
    writeln!(out, "models: {}", models(&up.models))?;
    if let Some(address) = up.metrics {
        writeln!(out, "metrics: http://{address}/metrics")?;
    }
    let model = up.models.first().map_or("MODEL", String::as_str);
    let model = serde_json::Value::from(model);
    let body = format!(r#"{{"model":{model},"stream":true,"messages":[{{"role":"user","content":"Hello!"}}]}}"#);
    write!(out, "\ntry it:\n  curl -N {}/chat/completions -H 'content-type: application/json'", up.base_url)?;
    if let Some(cert) = &up.tls_cert {
        write!(out, " --cacert {}", quoted(&cert.display().to_string()))?;
    }
    match (&up.access, key) {
        (Access::Made(_), Some(key)) => {
            write!(out, " -H {}", quoted(&format!("Authorization: Bearer {}", key.expose())))?
        }
        (_, Some(_)) => write!(out, " -H \"Authorization: Bearer $IOP_API_KEY\"")?,
        (_, None) => {}
    }
    write!(out, " -d {}\n\nCtrl-C stops it.", quoted(&body))
}

fn models(names: &[String]) -> String {
    match names.len() {
        0 => "none yet".to_owned(),
        count if count > SHOWN_MODELS => {
            format!("{}, and {} more", names[..SHOWN_MODELS].join(", "), count - SHOWN_MODELS)
        }
        _ => names.join(", "),
    }
}

/// One argument of a POSIX shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
