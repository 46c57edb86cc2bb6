//! Decides what must hold after every window, and what must hold at the end: the engines' books against what really
//! happened at links, providers and clients.

use std::sync::Arc;

use iop_edge_core::snapshot::{EdgeSnapshot, ProviderHealth, ProviderSnapshot};
use iop_execution::ProviderId;

use crate::sim::history::Who;
use crate::sim::net::Conn;
use crate::sim::stage::{Stage, index};
use crate::sim::world::{self, Call, Facts, Wants};

/// After every window.
pub(super) fn after_window(stage: &Stage) {
    let Some(edge) = stage.edge.as_ref().filter(|edge| !edge.host.is_paused()) else { return };
    let snapshot = edge.host.inside(|| edge.edge.snapshot());
    let mut problems = Vec::new();
    for provider in snapshot.nodes.iter().flat_map(|node| &node.providers) {
        places(stage, provider, &mut problems);
    }
    queues(stage, &snapshot, &mut problems);
    let mut facts = stage.world.facts();
    waits(&facts, &snapshot, edge.host.clock(), &mut problems);
    calls(stage, &facts, &mut problems);
    hopes(stage, &facts, &snapshot, &mut problems);
    health(stage, &mut facts, &snapshot, &mut problems);
    let quarantined = snapshot.nodes.iter().flat_map(|node| &node.providers).map(|own| own.in_use.quarantined).sum();
    if std::mem::replace(&mut facts.quarantined, quarantined) < quarantined {
        facts.note(Who::Edge, "quarantined", "", [u64::from(quarantined), 0]);
    }
    for (client, node, since) in std::mem::take(&mut facts.disconnects) {
        if !facts.fenced_since(node, since) {
            problems.push(format!("client {client} ended as disconnected, but n{node} was connected all the time"));
        }
    }
    if !problems.is_empty() {
        problems[0].push_str(&format!("\n{snapshot:?}"));
    }
    facts.broken.append(&mut problems);
}

/// I4, I5: places in use are exactly the requests that were sent and have no end, and never too many.
fn places(stage: &Stage, provider: &ProviderSnapshot, problems: &mut Vec<String>) {
    let id = provider.provider.as_str();
    let (used, limits) = (provider.in_use, provider.effective);
    let at = &stage.plan.providers[index(id)];
    let conns = stage.net.conns();
    let own = || conns.iter().filter(|conn| conn.node == at.node);
    let open: usize = own().filter(|conn| conn.is_current()).map(|conn| conn.open_at(id)).sum();
    let behind = own().any(|conn| conn.is_behind());
    let in_use = used.in_use() as usize;
    if in_use < open || (in_use > open && !behind) {
        problems.push(format!("I4: {id} has {in_use} places in use and {open} requests without an end"));
    }
    if used.quarantined > used.in_use() {
        problems.push(format!("LEA-6: {id} has more places quarantined than in use"));
    }
    if stage.world.facts().reconfigured {
        return;
    }
    if is_lowered(provider) {
        // It takes nothing new, and what runs there runs on (HLT-4).
        if limits.capacity > 0 {
            problems.push(format!("HLT-4: {id} is lowered and has {limits:?}"));
        }
        return;
    }
    if provider.connected && (used.in_use() > limits.capacity || used.long > limits.long) {
        problems.push(format!("LEA-2: {id} has {used:?} of {limits:?}"));
    }
    if provider.connected && limits.capacity != at.capacity {
        problems.push(format!("FEN-5: {id} is connected with {limits:?}, not {} places", at.capacity));
    }
    if !provider.connected && in_use > 0 {
        problems.push(format!("FEN-2: {id} is offline and has {in_use} places in use"));
    }
}

/// Evidence has lowered it.
pub(super) fn is_lowered(provider: &ProviderSnapshot) -> bool {
    provider.health == ProviderHealth::Unavailable
}

/// I7: health is what the evidence says that the Edge was told on the present connection, and nothing else.
fn health(stage: &Stage, facts: &mut Facts, snapshot: &EdgeSnapshot, problems: &mut Vec<String>) {
    let conns = stage.net.conns();
    for node in &snapshot.nodes {
        let number = index(node.node.as_str());
        let mut current = conns.iter().filter(|conn| conn.node == number && conn.is_current());
        let (Some(conn), None) = (current.next(), current.next()) else { continue };
        for provider in node.providers.iter().filter(|provider| provider.connected) {
            let (id, is) = (provider.provider.as_str(), is_lowered(provider));
            let must = conn.must_be_lowered(id, is);
            let was = facts.lowered.get(id).copied();
            match (was, is) {
                (None, true) => facts.note(Who::Edge, "lowered", "", [index(id) as u64, 0]),
                (Some(of), false) => {
                    let how = if of == conn.id { "answer" } else { "new generation" };
                    facts.note(Who::Edge, "raised", how, [index(id) as u64, 0]);
                }
                (Some(_), true) | (None, false) => {}
            }
            // Evidence of an older generation is none.
            let same = was.filter(|of| *of == conn.id).is_some();
            if same != is && !conn.may_have_moved(id, is) {
                let how = if is { "lowered" } else { "raised" };
                problems.push(format!("I7: {id} was {how}, and nothing that was told allows it"));
            }
            if is {
                facts.lowered.insert(id.to_owned(), conn.id);
            } else {
                facts.lowered.remove(id);
            }
            // What is damaged may be refused, and so is what is told of a provider that config has taken away.
            if must != is && !conn.is_damaged() && !facts.reconfigured {
                let (said, told) = if is { ("lowered", "is fine") } else { ("fine", "is gone") };
                problems.push(format!("I7: {id} is {said}, but what the Edge was told is that it {told}"));
            }
        }
    }
}

/// I10: nobody waits beyond the bound.
fn queues(stage: &Stage, snapshot: &EdgeSnapshot, problems: &mut Vec<String>) {
    for group in &snapshot.models {
        let bound = stage.plan.models.iter().find(|model| model.name == group.model.as_str());
        let bound = bound.map_or(0, |model| model.max_waiting);
        if group.waiting > bound && !stage.world.facts().reconfigured {
            problems.push(format!("I10: {} wait for {}, and {bound} may", group.waiting, group.model));
        }
    }
}

/// I11, EDG-3: nobody waits too long; who has no answer waits in a queue.
fn waits(facts: &Facts, snapshot: &EdgeSnapshot, clock: u64, problems: &mut Vec<String>) {
    let submitted = || facts.clients.iter().filter(|(_, client)| client.stage == world::Stage::Submitted);
    for (id, client) in submitted() {
        if clock > client.wait_until {
            problems.push(format!("I11: client {id} waits since {}, and it is {clock}", client.since));
        }
    }
    let open = facts.clients.iter().filter(|(_, client)| client.stage == world::Stage::Open);
    for (id, client) in open {
        if client.deadline.is_some_and(|deadline| clock > deadline) {
            problems.push(format!("client {id} has no end after its deadline: {client:?}, and it is {clock}"));
        }
    }
    let waiting: usize = snapshot.models.iter().map(|model| model.waiting).sum();
    let count = submitted().count();
    if waiting != count {
        problems.push(format!("I10: {waiting} wait in queues, but {count} clients have no answer"));
    }
}

/// FEN-2, FEN-3: nobody waits for a model that no provider can serve now.
fn hopes(stage: &Stage, facts: &Facts, snapshot: &EdgeSnapshot, problems: &mut Vec<String>) {
    if facts.reconfigured {
        return;
    }
    let able = |at: usize, wants: &Wants| {
        let plan = &stage.plan.providers[at];
        let shown = snapshot.nodes.iter().find(|node| index(node.node.as_str()) == plan.node);
        let ready = shown.is_some_and(|node| {
            let mut own = node.providers.iter();
            let usable = own.any(|own| own.provider.as_str() == plan.id && own.connected && !is_lowered(own));
            usable && !node.draining
        });
        ready && (!wants.tunnel || (plan.tunnels && !plan.run_only))
    };
    for (id, _) in facts.clients.iter().filter(|(_, client)| client.stage == world::Stage::Submitted) {
        let Some(wants) = facts.wants.get(id) else { continue };
        let Some(model) = stage.plan.models.iter().find(|model| model.name == wants.model) else { continue };
        let all: Vec<_> = model.candidates.iter().map(|(at, _)| *at).filter(|at| able(*at, wants)).collect();
        let avoided = |at: &usize| {
            let hint = wants.avoid.as_ref();
            hint.is_some_and(|(provider, fallback)| !fallback && *provider == stage.plan.providers[*at].id)
        };
        if model.absence == 0 && all.iter().all(avoided) {
            problems.push(format!("FEN-3: client {id} waits, and nobody can serve it"));
        }
    }
}

/// NOD-5, EXE-6: what runs in a process belongs to the connection that it has, and its end was not told yet.
fn calls(stage: &Stage, facts: &Facts, problems: &mut Vec<String>) {
    let conns = stage.net.conns();
    for (number, call) in &facts.calls {
        let current = conns.iter().find(|conn| conn.process == call.process && conn.is_current());
        if current.is_some_and(|conn| !conn.has_open(call.run_id)) {
            problems
                .push(format!("LEA-6, NOD-5: call {number} at p{} runs, and nobody holds its place", call.provider));
        }
        // I8: attempts run side by side only where the Edge could not know it: a Node was a suspect, or a connection is over.
        let Some(asking) = facts.askings.get(&call.client) else { continue };
        let of_current = |number: &u64| {
            let call = facts.calls.get(number)?;
            let is = |conn: &&Arc<Conn>| conn.process == call.process && conn.is_current();
            conns.iter().find(is).map(|_| call)
        };
        let Some(call) = of_current(number) else { continue };
        let mut later = asking.calls.iter().skip_while(|other| *other != number).skip(1).filter_map(of_current);
        let node_of = |call: &Call| stage.plan.providers[call.provider].node;
        let suspect = |call: &Call| facts.suspect_since(node_of(call), call.since);
        if later.any(|later| !suspect(call) && !suspect(later)) {
            problems.push(format!("I8: call {number} for client {} runs beside a later one", call.client));
        }
    }
}

/// Everything that was asked for is over, and everybody is back.
pub(super) fn is_at_rest(stage: &Stage) -> Result<(), String> {
    let Some(edge) = &stage.edge else { return Err("no edge".to_owned()) };
    {
        let facts = stage.world.facts();
        let open = facts.clients.iter().find(|(_, client)| !matches!(client.stage, world::Stage::Done(_)));
        if let Some((id, client)) = open {
            return Err(format!("client {id} is {:?}", client.stage));
        }
        if let Some((number, call)) = facts.calls.iter().next() {
            return Err(format!("call {number} runs at p{}", call.provider));
        }
    }
    let snapshot = edge.host.inside(|| edge.edge.snapshot());
    if !snapshot.is_at_rest() {
        return Err(format!("{snapshot:?}"));
    }
    if let Some(node) = snapshot.nodes.iter().find(|node| !node.connected || node.draining) {
        return Err(format!("{} is not ready", node.node));
    }
    // The last config is in force everywhere (REG-7). Until then a provider that was away for a while is not seen, lowered or not.
    for plan in &stage.plan.providers {
        let id = ProviderId::new(&plan.id).map_err(|error| error.to_string())?;
        let shown = snapshot.provider(&id).filter(|provider| provider.connected).map(|provider| provider.effective);
        if shown.is_none_or(|shown| shown.capacity != plan.capacity) {
            return Err(format!("REG-7: {id} has {shown:?}, not {}", plan.capacity));
        }
    }
    let mut providers = snapshot.nodes.iter().flat_map(|node| &node.providers);
    if let Some(provider) = providers.find(|provider| provider.cooling.is_some()) {
        return Err(format!("{} is cooling", provider.provider));
    }
    let mut providers = snapshot.nodes.iter().flat_map(|node| &node.providers);
    if let Some(provider) = providers.find(|provider| is_lowered(provider)) {
        return Err(format!("HLT-6: {} is lowered", provider.provider));
    }
    if let Some(node) = stage.nodes.iter().find(|node| node.is_ending()) {
        return Err(format!("a process of n{} is ending", node.node));
    }
    // Nor is there a connection whose other end is gone without a word.
    let alive = |process| stage.nodes.iter().any(|node| node.process == process);
    match stage.net.conns().iter().find(|conn| !conn.is_sound() || !alive(conn.process)) {
        Some(conn) => Err(format!("connection {} of n{} is dead", conn.id, conn.node)),
        None => Ok(()),
    }
}

/// At the very end.
pub(super) fn at_rest(stage: &Stage) -> Result<(), String> {
    is_at_rest(stage)?;
    let Some(edge) = &stage.edge else { return Ok(()) };
    // The timer, the listener, and one task for each connection.
    let (tasks, expected) = (edge.host.tasks(), 2 + stage.plan.nodes.len());
    if tasks != expected {
        return Err(format!("I10: {tasks} tasks at the Edge, not {expected}"));
    }
    match stage.nodes.iter().find(|node| node.host.tasks() != 1) {
        Some(node) => Err(format!("I10: {} tasks at n{}, not 1", node.host.tasks(), node.node)),
        None => Ok(()),
    }
}
