//! Decides how the state of an Edge looks to people: aligned columns, places as `3/8`, times as `2m14s`.

use iop_edge_core::snapshot::ProviderHealth;

use crate::admin::view::{ModelsView, NodeView, NodesView, ProblemView, ProviderView, RunsView, StatusView};
use crate::term::{Cell, Paint, columns, human};

/// Hex digits of a run id that are shown; `iop cancel` takes as many.
const SHOWN_ID: usize = 12;

fn status_cell(status: &str) -> Cell {
    let paint = match status {
        "ready" => Paint::Good,
        "draining" => Paint::Warn,
        "unavailable" => Paint::Bad,
        _ => Paint::Dim,
    };
    Cell::painted(status, paint)
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// Words that are said only when their number is not 0.
fn with_extras(first: String, extras: &[(u64, &str)]) -> String {
    let extras = extras.iter().filter(|(number, _)| *number > 0).map(|(number, what)| format!(", {number} {what}"));
    extras.fold(first, |text, extra| text + &extra)
}

/// `iop status`.
#[must_use]
pub fn status(view: &StatusView, colours: bool) -> String {
    let wide = |number: usize| number as u64;
    let (nodes, providers) = (&view.nodes, &view.providers);
    let all_of = |ready: usize, all: usize| match (ready, all) {
        (_, 0) => Paint::Warn,
        (0, _) => Paint::Bad,
        (ready, all) if ready < all => Paint::Warn,
        (_, _) => Paint::Good,
    };
    let ready = if view.ready {
        Cell::painted("ready", Paint::Good)
    } else {
        Cell::painted("not ready: no provider can take work", Paint::Bad)
    };
    let reload = view.config.last_reload.as_ref();
    let config = match reload {
        None => Cell::plain(format!("revision {}", view.config.revision)),
        Some(last) => {
            let (how, paint) = if last.applied { ("reloaded", Paint::Plain) } else { ("reload refused", Paint::Bad) };
            let (revision, ago) = (view.config.revision, human(last.age_ms));
            Cell::painted(format!("revision {revision}, {how} {ago} ago: {}", last.summary), paint)
        }
    };
    let rows = [
        ("edge", Cell::plain(format!("{} {}, up {}", view.edge, view.version, human(view.uptime_ms)))),
        ("state", ready),
        ("config", config),
        (
            "nodes",
            Cell::painted(
                with_extras(
                    format!("{} of {} ready", nodes.ready, nodes.configured),
                    &[(wide(nodes.draining), "draining"), (wide(nodes.suspect), "suspect")],
                ),
                all_of(nodes.ready, nodes.configured),
            ),
        ),
        (
            "providers",
            Cell::painted(
                with_extras(
                    format!("{} of {} ready", providers.ready, providers.configured),
                    &[(wide(providers.cooling), "cooling"), (wide(providers.unhealthy), "unhealthy")],
                ),
                all_of(providers.ready, providers.configured),
            ),
        ),
        (
            "places",
            Cell::plain(with_extras(
                format!("{}/{} in use", providers.in_use, providers.places),
                &[(providers.quarantined, "quarantined")],
            )),
        ),
        ("requests", Cell::plain(format!("{} in flight, {} waiting", view.requests.in_flight, view.requests.waiting))),
    ];
    let rows: Vec<_> = rows.into_iter().map(|(name, cell)| vec![Cell::painted(name, Paint::Dim), cell]).collect();
    columns(&["", ""], &rows, colours)
}

fn places(provider: &ProviderView) -> String {
    match (provider.capacity, provider.in_use) {
        (0, 0) => "-".to_owned(),
        (capacity, in_use) => format!("{in_use}/{capacity}"),
    }
}

fn provider_notes(provider: &ProviderView) -> String {
    let mut notes = Vec::new();
    if provider.long_capacity > 0 && provider.long_capacity < provider.capacity {
        notes.push(format!("long {}/{}", provider.long_in_use, provider.long_capacity));
    }
    if provider.health == ProviderHealth::Unavailable.as_str() {
        notes.push("unhealthy: stalled and does not answer; the edge asks until it does".to_owned());
    }
    if let Some(cooling) = provider.cooling_ms {
        notes.push(format!("busy, asked again in {}", human(cooling)));
    }
    if provider.quarantined > 0 {
        notes.push(format!("{} quarantined", provider.quarantined));
    }
    if provider.penalty > 0 {
        notes.push(format!("recent failures count as {}% load", provider.penalty.div_ceil(10)));
    }
    notes.join(", ")
}

/// `iop nodes`: a row for each provider.
#[must_use]
pub fn nodes(view: &NodesView, colours: bool) -> String {
    if view.nodes.is_empty() {
        return "no node is configured: add one under `nodes:` in edge.yaml, then `iop reload`\n".to_owned();
    }
    let mut rows = Vec::new();
    for node in &view.nodes {
        let mut first = vec![Cell::plain(&node.id), status_cell(&node.status)];
        if node.suspect {
            first[1] = Cell::painted(format!("{}, silent", node.status), Paint::Warn);
        }
        if node.providers.is_empty() {
            rows.push(std::mem::take(&mut first));
        }
        for provider in &node.providers {
            let mut row = std::mem::take(&mut first);
            row.resize(2, Cell::plain(""));
            row.extend([
                Cell::plain(&provider.id),
                status_cell(&provider.status),
                Cell::plain(places(provider)),
                Cell::painted(provider_notes(provider), Paint::Warn),
            ]);
            rows.push(row);
        }
    }
    columns(&["NODE", "STATUS", "PROVIDER", "STATUS", "IN USE", "NOTES"], &rows, colours)
}

/// `iop models`: a row for each candidate.
#[must_use]
pub fn models(view: &ModelsView, colours: bool) -> String {
    if view.models.is_empty() {
        return "no model: none is configured, and no connected provider lists one; `iop nodes` says who is connected\n"
            .to_owned();
    }
    let mut rows = Vec::new();
    for model in &view.models {
        let served = if model.available {
            Cell::painted("available", Paint::Good)
        } else {
            Cell::painted("unavailable", Paint::Bad)
        };
        let waiting = match model.waiting {
            0 => "0".to_owned(),
            waiting => format!("{waiting}, oldest {}", human(model.oldest_wait_ms)),
        };
        let strategy = if model.candidates.len() > 1 { model.strategy.as_str() } else { "" };
        let mut first = vec![Cell::plain(&model.name), served, Cell::plain(waiting), Cell::plain(strategy)];
        if model.candidates.is_empty() {
            rows.push(std::mem::take(&mut first));
        }
        for candidate in &model.candidates {
            let mut row = std::mem::take(&mut first);
            row.resize(4, Cell::plain(""));
            let weight = if candidate.weight == 1 { String::new() } else { candidate.weight.to_string() };
            let target = if candidate.target == model.name { "" } else { candidate.target.as_str() };
            row.extend([
                Cell::plain(&candidate.node),
                Cell::plain(&candidate.provider),
                status_cell(&candidate.status),
                Cell::plain(target),
                Cell::plain(weight),
            ]);
            rows.push(row);
        }
    }
    let head = ["MODEL", "STATUS", "WAITING", "STRATEGY", "NODE", "PROVIDER", "STATUS", "TARGET", "WEIGHT"];
    columns(&head, &rows, colours)
}

/// `iop runs`: a row for each request, oldest first.
#[must_use]
pub fn runs(view: &RunsView, colours: bool) -> String {
    if view.runs.is_empty() {
        return "no request waits or runs\n".to_owned();
    }
    let rows: Vec<_> = view
        .runs
        .iter()
        .map(|run| {
            let paint = match run.stage.as_str() {
                "waiting" | "cancelling" => Paint::Warn,
                "quarantined" => Paint::Bad,
                _ => Paint::Plain,
            };
            let or_dash = |text: &Option<String>| Cell::plain(text.as_deref().unwrap_or("-"));
            vec![
                Cell::plain(run.id.get(..SHOWN_ID).unwrap_or(&run.id)),
                or_dash(&run.model),
                or_dash(&run.principal),
                Cell::painted(&run.stage, paint),
                or_dash(&run.node),
                or_dash(&run.provider),
                Cell::plain(human(run.age_ms)),
            ]
        })
        .collect();
    let mut text = columns(&["RUN", "MODEL", "PRINCIPAL", "STAGE", "NODE", "PROVIDER", "AGE"], &rows, colours);
    if view.more {
        text.push_str("… and more: --limit N shows up to 1000, oldest first\n");
    }
    text
}

/// One line for a Node that was taken out of service or put back.
#[must_use]
pub fn in_service(node: &NodeView) -> String {
    let running = count(node.running as usize, "request");
    match (node.draining, node.connected, node.running) {
        (true, _, 0) => format!("{} drains: nothing runs there. `iop resume {}` puts it back", node.id, node.id),
        (true, ..) => format!("{} drains: {running} running. `iop resume {}` puts it back", node.id, node.id),
        (false, true, _) => format!("{} is in service", node.id),
        (false, false, _) => format!("{} is in service as soon as it connects", node.id),
    }
}

/// Mistakes of a config as `check` prints them.
#[must_use]
pub fn problems(file: &str, problems: &[ProblemView]) -> String {
    let mut out = String::new();
    for problem in problems {
        out.push_str(file);
        if problem.line > 0 {
            out.push_str(&format!(":{}:{}", problem.line, problem.column));
        }
        out.push_str(&format!(": {}: {}\n", problem.severity, problem.message));
        if let Some(suggestion) = &problem.suggestion {
            out.push_str(&format!("    {suggestion}\n"));
        }
    }
    out
}
