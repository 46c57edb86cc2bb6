//! Decides which providers get ill and what they say of it, which calls are watched for stalls, and which clients speak the
//! OpenAI API, whose requests may be sent again. Drawn apart from the rest of a plan; some seeds have nothing of it.

use iop_edge_core::catalog::{RetryCause, RetryOn};
use iop_execution::Health;

use crate::sim::openai::HttpPlan;
use crate::sim::plan::{Plan, Trouble};
use crate::sim::provider::Ending;
use crate::sim::rng::Rng;
use crate::sim::world::Answer;

/// Adds all that to a plan.
pub fn extend(plan: &mut Plan, rng: &mut Rng) {
    if rng.permille(250) {
        return;
    }
    let (stalls, ill) = (rng.permille(800), rng.permille(800) && !plan.calm);
    for provider in &mut plan.providers {
        if stalls && rng.permille(800) {
            provider.stall = rng.range(1_000..=5_000);
            provider.first_response = rng.pick(&[0, 0, 3_000, 8_000]);
            provider.probe_timeout = rng.pick(&[0, 0, 1_000, 3_000]);
        }
        if ill && rng.permille(200) {
            provider.answer = answer(rng);
        }
    }
    for model in &mut plan.models {
        model.retry_on = rng.maybe(500, |rng| {
            let wanted: Vec<_> = RetryCause::ALL.iter().copied().filter(|_| rng.permille(500)).collect();
            RetryOn::of(&wanted)
        });
    }
    clients(plan, rng);
    if ill {
        episodes(plan, rng);
    }
}

fn clients(plan: &mut Plan, rng: &mut Rng) {
    let (share, faults) = (rng.pick(&[0, 300, 600, 1_000]), rng.pick(&[0, 300, 600]));
    for (_, client) in &mut plan.clients {
        if !rng.permille(share) {
            continue;
        }
        let http = HttpPlan {
            stream: rng.permille(600),
            extra: u32::try_from(rng.range(0..=3)).unwrap(),
            keepalive: rng.pick(&[0, 300, 2_000, 10_000]),
        };
        client.work.form = http.form();
        client.http = Some(http);
        client.work.bad = rng.pick(&[1, 1, 2, usize::MAX]);
        if rng.permille(faults) {
            let endings = [Ending::Broken, Ending::Busy, Ending::Down, Ending::Unreachable, Ending::Hang, Ending::Hang];
            client.work.ending = rng.pick(&endings);
            if rng.permille(600) {
                client.work.pieces = 0;
            }
        }
        if client.work.ending == Ending::Hang && client.leave.is_none() {
            client.leave = Some(45_000);
        }
        // What only the engine's own API has.
        (client.direct, client.wire, client.avoid, client.cancel) = (None, None, None, None);
        (client.priority, client.principal, client.prefix) = (0, None, 0);
    }
}

fn episodes(plan: &mut Plan, rng: &mut Rng) {
    let last = plan.horizon;
    for _ in 0..rng.count(2..=8) {
        let provider = rng.count(0..=plan.providers.len() - 1);
        let (from, longest) = (rng.range(200..=last), rng.pick(&[1_500, 8_000, 30_000]));
        let to = from + rng.range(500..=longest);
        if plan.providers[provider].stall == 0 && rng.permille(700) {
            plan.providers[provider].stall = rng.range(1_000..=5_000);
        }
        if rng.permille(500) {
            // One call's probe finds it gone, that of the next one does not.
            let (gone, back) = (Answer::Is(Health::Unavailable, 0), Answer::Is(Health::Available, 0));
            let at = from + plan.providers[provider].stall + rng.range(50..=2_500);
            plan.troubles.push((from, Trouble::Ill { provider, answer: gone }));
            plan.troubles.push((at, Trouble::Says { provider, answer: back }));
            plan.troubles.push((to.max(at) + rng.range(500..=5_000), Trouble::Well { provider }));
            continue;
        }
        plan.troubles.push((from, Trouble::Ill { provider, answer: answer(rng) }));
        if rng.permille(300) {
            plan.troubles.push((rng.range(from..=to), Trouble::Says { provider, answer: answer(rng) }));
        }
        plan.troubles.push((to, Trouble::Well { provider }));
    }
    plan.troubles.retain(|(at, _)| *at < last);
    plan.troubles.sort_by_key(|(at, _)| *at);
}

fn answer(rng: &mut Rng) -> Answer {
    let health = rng.pick(&[Health::Available, Health::Unavailable, Health::Unavailable, Health::Unknown]);
    let after = rng.pick(&[0, 0, 0, 300, 2_500, 4_500]);
    rng.pick(&[
        Answer::Is(health, after),
        Answer::Is(health, after),
        Answer::Is(health, after),
        Answer::Is(health, after),
        Answer::Never,
        Answer::Panics,
    ])
}
