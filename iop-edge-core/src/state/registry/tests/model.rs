//! The registry beside a table of what each connection is.

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::*;

const CONNECTIONS: usize = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    Hello,
    Register,
    Challenging(usize),
    Pending(usize),
    Ready(usize),
    Draining(usize),
    Gone,
}

impl Is {
    const fn claims(self) -> Option<usize> {
        match self {
            Self::Pending(node) | Self::Ready(node) | Self::Draining(node) => Some(node),
            Self::Hello | Self::Register | Self::Challenging(_) | Self::Gone => None,
        }
    }
}

#[derive(Debug, Clone)]
struct Model {
    connections: Vec<Is>,
    /// Generation of each Node's present owner.
    generations: [Option<u64>; 2],
    claims: u64,
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Open,
    Hello(usize),
    Claim(usize, usize),
    Challenge(usize, usize),
    Ready(usize, usize),
    Drain(usize),
    Close(usize),
}

impl Model {
    fn owner(&self, node: usize) -> Option<usize> {
        self.connections.iter().position(|is| is.claims() == Some(node))
    }

    fn is(&self, connection: usize) -> Is {
        self.connections.get(connection).copied().unwrap_or(Is::Gone)
    }
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Op;

    fn init_state() -> BoxedStrategy<Self> {
        Just(Self { connections: Vec::new(), generations: [None; 2], claims: 0 }).boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Op> {
        let (one, both) = (0..CONNECTIONS, (0..CONNECTIONS, 0..2_usize));
        prop_oneof![
            2 => Just(Op::Open),
            3 => one.clone().prop_map(Op::Hello),
            4 => both.clone().prop_map(|(connection, node)| Op::Claim(connection, node)),
            2 => both.clone().prop_map(|(connection, node)| Op::Challenge(connection, node)),
            3 => both.prop_map(|(connection, node)| Op::Ready(connection, node)),
            1 => one.clone().prop_map(Op::Drain),
            2 => one.prop_map(Op::Close),
        ]
        .boxed()
    }

    fn preconditions(model: &Self, op: &Op) -> bool {
        !matches!(op, Op::Open) || model.connections.len() < CONNECTIONS
    }

    fn apply(mut model: Self, op: &Op) -> Self {
        let next = match *op {
            Op::Open => {
                model.connections.push(Is::Hello);
                return model;
            }
            Op::Hello(c) => (
                c,
                match model.is(c) {
                    Is::Hello => Is::Register,
                    same => same,
                },
            ),
            Op::Challenge(c, node) => {
                let waits = model.connections.contains(&Is::Challenging(node));
                (
                    c,
                    match model.is(c) {
                        Is::Register if !waits => Is::Challenging(node),
                        same => same,
                    },
                )
            }
            Op::Claim(c, node) => {
                let free = model.owner(node).is_none();
                let may = match model.is(c) {
                    Is::Register => true,
                    Is::Challenging(wanted) => wanted == node,
                    _ => false,
                };
                if free && may {
                    model.claims += 1;
                    model.generations[node] = Some(model.claims);
                }
                (c, if free && may { Is::Pending(node) } else { model.is(c) })
            }
            Op::Ready(c, node) => (
                c,
                match model.is(c) {
                    Is::Pending(own) if own == node => Is::Ready(own),
                    same => same,
                },
            ),
            Op::Drain(c) => (
                c,
                match model.is(c) {
                    Is::Ready(node) => Is::Draining(node),
                    same => same,
                },
            ),
            Op::Close(c) => {
                if let Some(node) = model.is(c).claims() {
                    model.generations[node] = None;
                }
                (c, Is::Gone)
            }
        };
        if let Some(is) = model.connections.get_mut(next.0) {
            *is = next.1;
        }
        model
    }
}

struct Real {
    registry: Registry,
    ids: Vec<ConnectionId>,
    now: Instant,
}

fn name(node: usize) -> NodeId {
    NodeId::new(["a", "b"][node]).unwrap()
}

impl StateMachineTest for Real {
    type SystemUnderTest = Self;
    type Reference = Model;

    fn init_test(_: &Model) -> Self {
        Self { registry: Registry::default(), ids: Vec::new(), now: Instant::now() }
    }

    fn apply(mut real: Self, after: &Model, op: Op) -> Self {
        let Self { registry, ids, now, .. } = &mut real;
        let id = |c: usize| ids.get(c).copied().unwrap_or(ConnectionId(999));
        match op {
            Op::Open => ids.push(registry.open(PeerIdentity::default(), 7, *now).unwrap().0),
            Op::Hello(c) => drop(registry.hello(id(c), INSTANCE)),
            Op::Challenge(c, node) => {
                let challenge = Challenge { node: name(node), edge_time_ms: 0, since: *now };
                registry.challenge(id(c), challenge);
            }
            Op::Claim(c, node) => {
                // Only a connection that may register, or one that waits for exactly this Node, ever asks.
                let waits = registry.challenging(id(c)).map(|challenge| challenge.node == name(node));
                if waits.unwrap_or_else(|| registry.registering(id(c)).is_ok()) {
                    let _taken = registry.claim(id(c), name(node), config(), *now);
                }
            }
            Op::Ready(c, node) => {
                let outcome = registry.ready(id(c), &ready(name(node).as_str()));
                let first = matches!(outcome, Ok((ReadyOutcome::First(_), _)));
                assert!(!first || after.is(c) == Is::Ready(node), "REG-3");
            }
            Op::Drain(c) => drop(registry.drain(id(c))),
            Op::Close(c) => {
                registry.close(id(c));
                assert_eq!(registry.close(id(c)), Ended::Unknown, "FEN-2: a second end finds nothing");
            }
        }
        real
    }

    fn check_invariants(real: &Self, model: &Model) {
        let registry = &real.registry;
        for node in 0..2 {
            let owner = model.owner(node);
            assert_eq!(registry.owner(&name(node)), owner.map(|c| real.ids[c]), "REG-2, REG-5: one owner");
            let is = owner.map_or(Is::Gone, |c| model.is(c));
            let phase = (matches!(is, Is::Ready(_) | Is::Draining(_)), matches!(is, Is::Draining(_)));
            assert_eq!(registry.node_phase(&name(node)), phase, "REG-2");
            for generation in 1..=model.claims {
                let current = model.generations[node] == Some(generation) && matches!(is, Is::Ready(_));
                let target = registry.dispatchable(&name(node), Generation(generation));
                assert_eq!(target.is_some(), current, "FEN-1, FEN-8");
            }
        }
        assert_eq!(registry.last_generation, model.claims, "FEN-1: strictly rising, one per claim");
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    // REG-1, REG-2, REG-3, REG-5, FEN-1, FEN-2, FEN-8
    #[test]
    fn the_registry_is_what_its_model_says(sequential 1..100 => Real);
}
