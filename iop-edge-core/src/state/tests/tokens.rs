//! Which secrets of a Node's token are accepted, and what happens when none is.

use iop_wire::RegisterResponse;

use super::*;
use crate::observe::Refusal;
use crate::token::TokenSecrets;

const SECOND: u64 = 1_000_000;

/// Registers n1 with this token at [`SECOND`] under a catalog that accepts these secrets: what it is told, and what the
/// operator sees.
fn outcome(secrets: Option<TokenSecrets>, text: String) -> (bool, Option<Refusal>) {
    let now = Instant::now();
    let mut node = node_entry("n1", &[("a", 1, 0)]);
    node.token = secrets;
    let mut state = new_state(Catalog::builder().revision(7).node(node).build().unwrap());
    let id = state.handle_opened(PeerIdentity::default(), 99, now).unwrap();
    state.handle_hello(id, &hello(), now);
    let mut request = register("n1");
    request.token = Redacted::new(text);
    state.handle_register(id, &request, 5, SECOND, now);
    let mut told = None;
    let mut seen = None;
    for effect in effects(&mut state) {
        match effect {
            Effect::Send { message, .. } => {
                if let ToNode::RegisterResponse(RegisterResponse { outcome, .. }) = *message {
                    told = Some(outcome.is_ok());
                }
            }
            Effect::Observe(Observation::RegistrationRefused { reason }) => seen = Some(reason),
            _ => {}
        }
    }
    (told.unwrap(), seen)
}

#[test]
fn a_rotated_token_registers_with_either_secret_and_an_expired_one_with_none() {
    // CRD-12, REG-6
    let (new, old) = (secret("n1"), secret("n1").replace('s', "o"));
    let hash = |text: &str| Token::parse(TokenKind::Node, text).unwrap().hash();
    let rotated = |until| TokenSecrets::new(hash(&new)).with_previous(hash(&old), until);
    for (secrets, text, want) in [
        (Some(rotated(SECOND + 1)), &new, (true, None)),
        (Some(rotated(SECOND + 1)), &old, (true, None)),
        (Some(rotated(SECOND)), &old, (false, Some(Refusal::ExpiredToken))),
        (Some(rotated(SECOND)), &new, (true, None)),
        (Some(rotated(SECOND + 1).expiring(Some(SECOND))), &new, (false, Some(Refusal::ExpiredToken))),
        (Some(rotated(SECOND + 1).expiring(Some(SECOND))), &old, (false, Some(Refusal::ExpiredToken))),
        (Some(TokenSecrets::new(hash(&new))), &old, (false, Some(Refusal::UnknownToken))),
        (None, &new, (false, Some(Refusal::UnknownToken))),
    ] {
        assert_eq!(outcome(secrets, text.clone()), want, "{secrets:?}");
    }
}

#[test]
fn a_token_without_an_id_in_its_record_is_found_by_any_secret_of_it() {
    // CRD-12
    let (new, old) = (secret("n1"), secret("n1").replace('s', "o"));
    let hash = |text: &str| Token::parse(TokenKind::Node, text).unwrap().hash();
    for (text, unix_time, refused) in [(&new, 10, false), (&old, 9, false), (&old, 10, true)] {
        let now = Instant::now();
        let mut node = node_entry("n1", &[("a", 1, 0)]);
        (node.token_id, node.token) = (None, Some(TokenSecrets::new(hash(&new)).with_previous(hash(&old), 10)));
        let mut state = new_state(Catalog::builder().revision(7).node(node).build().unwrap());
        let id = state.handle_opened(PeerIdentity::default(), 99, now).unwrap();
        state.handle_hello(id, &hello(), now);
        let mut request = register("n1");
        request.token = Redacted::new(text.clone());
        state.handle_register(id, &request, 5, unix_time, now);
        let is_refusal = |effect: &Effect| matches!(effect, Effect::Observe(Observation::RegistrationRefused { .. }));
        assert_eq!(effects(&mut state).iter().any(is_refusal), refused, "{unix_time}");
    }
}

#[test]
fn a_revoked_token_ends_the_session_of_its_node() {
    // CRD-12, CFG-2
    let now = Instant::now();
    let mut state = new_state(catalog());
    connect(&mut state, "n1", now);
    effects(&mut state);
    let mut node = node_entry("n1", &[("a", 1, 0)]);
    node.token = None;
    state.apply_config(Arc::new(Catalog::builder().revision(8).node(node).build().unwrap()), now).unwrap();
    let closed = effects(&mut state).iter().any(|effect| matches!(effect, Effect::Close { .. }));
    assert!(closed && !state.is_ready());
}
