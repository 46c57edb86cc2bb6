use super::*;

mod model;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    Hello,
    Claim,
    Ready,
    WrongReady,
    Drain,
    Close,
}

const INPUTS: [Input; 6] = [Input::Hello, Input::Claim, Input::Ready, Input::WrongReady, Input::Drain, Input::Close];

fn node() -> NodeId {
    NodeId::new("n").unwrap()
}

const INSTANCE: Instance = Instance { id: [1; 16], ordinal: 1 };

fn config() -> NodeConfigPayload {
    NodeConfigPayload { revision: 1, providers: Vec::new() }
}

fn ready(node: &str) -> NodeReadyRequest {
    NodeReadyRequest { node_id: NodeId::new(node).unwrap(), config_revision: 1, providers: Vec::new() }
}

fn apply(registry: &mut Registry, id: ConnectionId, input: Input, now: Instant) -> String {
    match input {
        Input::Hello => format!("{:?}", registry.hello(id, INSTANCE)),
        Input::Claim => match registry.registering(id) {
            Err(illegal) => format!("Err({illegal:?})"),
            Ok(_) => format!("{:?}", registry.claim(id, node(), config(), now).map(|_| ())),
        },
        Input::Ready => format!("{:?}", registry.ready(id, &ready("n")).map(|(outcome, _)| kind(&outcome))),
        Input::WrongReady => format!("{:?}", registry.ready(id, &ready("other")).map(|(outcome, _)| kind(&outcome))),
        Input::Drain => format!("{:?}", registry.drain(id).map(|claim| claim.is_some())),
        Input::Close => match registry.close(id) {
            Ended::Unknown => "Unknown".into(),
            Ended::Unclaimed => "Unclaimed".into(),
            Ended::NotReady(_) => "NotReady".into(),
            Ended::WasReady(_) => "WasReady".into(),
        },
    }
}

fn kind(outcome: &ReadyOutcome) -> &'static str {
    match outcome {
        ReadyOutcome::First(_) => "First",
        ReadyOutcome::Again => "Again",
        ReadyOutcome::Mismatch => "Mismatch",
    }
}

#[test]
fn every_phase_answers_every_input_as_the_table_says() {
    // REG-1, REG-3, W2, W10
    use Input::{Claim, Close, Drain, Hello, Ready};
    let (ok, illegal) = ("Ok(())", "Err(Illegal)");
    let table: [(&[Input], [&str; 6]); 6] = [
        (&[], [ok, illegal, illegal, illegal, illegal, "Unclaimed"]),
        (&[Hello], [illegal, ok, illegal, illegal, illegal, "Unclaimed"]),
        (&[Hello, Claim], [illegal, illegal, "Ok(\"First\")", "Ok(\"Mismatch\")", illegal, "NotReady"]),
        (&[Hello, Claim, Ready], [illegal, illegal, "Ok(\"Again\")", "Ok(\"Mismatch\")", "Ok(true)", "WasReady"]),
        (
            &[Hello, Claim, Ready, Drain],
            [illegal, illegal, "Ok(\"Again\")", "Ok(\"Mismatch\")", "Ok(false)", "WasReady"],
        ),
        (&[Hello, Close], [illegal, illegal, illegal, illegal, illegal, "Unknown"]),
    ];
    let now = Instant::now();
    for (path, answers) in table {
        for (input, answer) in INPUTS.into_iter().zip(answers) {
            let mut registry = Registry::default();
            let (id, _) = registry.open(PeerIdentity::default(), 7, now).unwrap();
            for step in path {
                apply(&mut registry, id, *step, now);
            }
            assert_eq!(apply(&mut registry, id, input, now), answer, "after {path:?}: {input:?}");
        }
    }
}

#[test]
fn whatever_two_connections_do_a_node_has_one_owner_and_only_it_can_be_dispatched_to() {
    // REG-2, FEN-1, FEN-8: every sequence of five inputs over two connections that said hello
    let now = Instant::now();
    let steps: Vec<(usize, Input)> = (0..2).flat_map(|c| INPUTS[1..].iter().map(move |input| (c, *input))).collect();
    let mut sequence = [0; 5];
    loop {
        let mut registry = Registry::default();
        let ids = [0, 1].map(|_| registry.open(PeerIdentity::default(), 7, now).unwrap().0);
        ids.iter().for_each(|id| registry.hello(*id, INSTANCE).unwrap());
        let mut generations = Vec::new();
        for step in sequence {
            let (connection, input) = steps[step];
            apply(&mut registry, ids[connection], input, now);
            let claims: Vec<_> = registry.connections.values().filter_map(|c| c.phase.claim()).collect();
            assert!(claims.len() <= 1, "two owners after {sequence:?}");
            assert_eq!(registry.owners.len(), claims.len());
            if let Some(claim) = claims.first() {
                let generation = claim.generation;
                if generations.last() != Some(&generation) {
                    assert!(generations.iter().all(|old| *old < generation), "generations rise");
                    generations.push(generation);
                }
                let ready = registry.dispatchable(&node(), generation).is_some();
                assert_eq!(ready, registry.node_phase(&node()) == (true, false));
                let stale = Generation(generation.0 - 1);
                assert_eq!(registry.dispatchable(&node(), stale), None, "an old generation gets nothing");
            }
        }
        let Some(place) = sequence.iter().rposition(|step| step + 1 < steps.len()) else {
            break;
        };
        sequence[place] += 1;
        sequence[place + 1..].fill(0);
    }
}

#[test]
fn the_place_of_a_node_is_given_back_by_its_owner_only() {
    // REG-2, FEN-2
    let now = Instant::now();
    let mut registry = Registry::default();
    let [first, second] = [0, 1].map(|_| registry.open(PeerIdentity::default(), 7, now).unwrap().0);
    for id in [first, second] {
        registry.hello(id, INSTANCE).unwrap();
    }
    assert_eq!(registry.claim(first, node(), config(), now), Ok(now + READY_TIMEOUT));
    assert_eq!(registry.claim(second, node(), config(), now), Err(Duplicate));
    assert_eq!(registry.close(second), Ended::Unclaimed);
    assert_eq!(registry.owner(&node()), Some(first));
    assert!(matches!(registry.close(first), Ended::NotReady(_)));
    assert_eq!(registry.owner(&node()), None);
}

#[test]
fn unregistered_connections_are_bounded() {
    // REG-8
    let now = Instant::now();
    let mut registry = Registry::default();
    let ids: Vec<_> =
        (0..MAX_UNREGISTERED).map(|_| registry.open(PeerIdentity::default(), 7, now).unwrap().0).collect();
    assert_eq!(registry.open(PeerIdentity::default(), 7, now), Err(Crowded));
    registry.hello(ids[0], INSTANCE).unwrap();
    registry.claim(ids[0], node(), config(), now).unwrap();
    assert!(registry.open(PeerIdentity::default(), 7, now).is_ok(), "a registered one takes no slot");
}
