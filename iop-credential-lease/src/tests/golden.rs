//! The golden set: leases, what a Node knows, and what must come of each. This test makes the set again and runs it;
//! `tests/credential/opener.py`, written from `docs/credential-lease.md`, runs the same file.

use curve25519_dalek::Scalar;
use ed25519_dalek::SigningKey;
use hpke::Serializable;
use serde_json::{Value, json};
use sha2::{Digest, Sha512};

use super::support::*;
use crate::format::parse;
use crate::{
    Binding, IssuerKey, KeyId, LeaseError, LeaseId, MemoryReplayStore, NodeName, NodeView, OpenedCredential,
    PrincipalName, ProfileName, ProviderCredential, RouteName, RunName, SealedLease, SlotName, SlotState, SlotStatus,
    SlotTable, TargetName, TimePolicy, TrustedIssuers, UpstreamOrigin, verify,
};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/credential/golden.json");
/// Set it to write the file anew.
const REWRITE: &str = "IOP_REGEN";

/// What a Node knows, unless a case says otherwise. 64-bit numbers are texts: not every JSON reader has them.
fn node(all: &Fixture) -> Value {
    let names = binding().names().map(|(field, name)| (field.as_str().to_owned(), json!(name)));
    json!({
        "recipient_private": to_hex(&all.key.private().to_bytes()),
        "recipient_public": to_hex(all.key.public_bytes()),
        "trusted_issuers": [to_hex(&all.issuer.public_bytes())],
        "generation": GENERATION.to_string(),
        "now_ms": NOW,
        "max_ttl_ms": 300_000,
        "future_skew_ms": 5_000,
        "replay_entries": 65_536,
        "slots": { "acme-main": { "revision": REVISION.to_string(), "status": "enabled" } },
        "expected": names.into_iter().collect::<serde_json::Map<_, _>>(),
    })
}

struct Set {
    cases: Vec<Value>,
}

impl Set {
    fn case(&mut self, name: &str, lease: &SealedLease, node: Value, outcome: Value) {
        self.cases.push(json!({
            "name": name, "lease": to_hex(lease.as_bytes()), "node": node, "outcome": outcome,
        }));
    }

    fn refused(&mut self, name: &str, lease: &SealedLease, node: Value, error: &str) {
        self.case(name, lease, node, json!({ "refused": error }));
    }
}

/// The signature with the group's order added to its second half: the same equation, another spelling.
fn with_order_added(lease: &SealedLease) -> SealedLease {
    let order = hex("edd3f55c1a631258d69cf7a2def9de1400000000000000000000000000000010");
    let mut bytes = lease.as_bytes().to_vec();
    let start = bytes.len() - 32;
    let mut carry = 0;
    for (byte, add) in bytes[start..].iter_mut().zip(order) {
        let sum = u16::from(*byte) + u16::from(add) + carry;
        *byte = sum.to_le_bytes()[0];
        carry = sum >> 8;
    }
    SealedLease::new(bytes).unwrap()
}

/// A signature whose first half is the neutral point. The equation holds, and only strict verification refuses it.
fn with_neutral_first_half(lease: &SealedLease) -> SealedLease {
    let key = SigningKey::from_bytes(&[1; 32]);
    let text = crate::format::signed_text(&unsigned(lease));
    let mut neutral = [0; 32];
    neutral[0] = 1;
    let hash = Sha512::new().chain_update(neutral).chain_update(key.verifying_key().as_bytes()).chain_update(&text);
    let second_half = Scalar::from_bytes_mod_order_wide(&hash.finalize().into()) * key.to_scalar();
    let signature = [neutral, second_half.to_bytes()].concat();
    let loose = ed25519_dalek::Signature::from_slice(&signature).unwrap();
    assert!(ed25519_dalek::Verifier::verify(&key.verifying_key(), &text, &loose).is_ok(), "the case tells something");
    SealedLease::new([unsigned(lease), signature].concat()).unwrap()
}

fn made() -> Value {
    let all = Fixture::new();
    let second = IssuerKey::from_seed(&[5; 32]);
    let good = all.lease();
    let body = unsigned(&good);
    let claims_end = parse(good.as_bytes()).unwrap().claims_end;
    let changed = |at: usize, byte: u8| {
        let mut bytes = body.clone();
        bytes[at] = byte;
        all.signed(&bytes)
    };
    let bearer = json!({ "opened": { "header": "authorization", "value": "Bearer sk-example" } });
    let mut set = Set { cases: Vec::new() };

    set.case("valid_bearer", &good, json!({}), bearer.clone());
    let header = all.lease_of(&ProviderCredential::header("x-api-key", b"Key one").unwrap(), binding());
    set.case("valid_header", &header, json!({}), json!({ "opened": { "header": "x-api-key", "value": "Key one" } }));
    let long = "k".repeat(8_189);
    let longest = all.lease_of(&ProviderCredential::bearer(long.as_bytes()).unwrap(), binding());
    let value = json!({ "opened": { "header": "authorization", "value": format!("Bearer {long}") } });
    set.case("valid_longest_secret", &longest, json!({}), value);
    set.case("valid_in_its_last_millisecond", &good, json!({ "now_ms": NOW + TTL - 1 }), bearer.clone());
    set.case("valid_at_the_limit_of_skew", &good, json!({ "now_ms": NOW - 5_000 }), bearer.clone());
    let both = json!({ "trusted_issuers": [to_hex(&second.public_bytes()), to_hex(&all.issuer.public_bytes())] });
    set.case("valid_while_issuers_rotate", &good, both.clone(), bearer);

    let unsigned_change = |at: usize, byte: u8| {
        let mut bytes = good.as_bytes().to_vec();
        bytes[at] = byte;
        SealedLease::new(bytes).unwrap()
    };
    set.refused("malformed_magic", &unsigned_change(0, b'X'), json!({}), "malformed");
    set.refused(
        "malformed_too_short",
        &SealedLease::new(good.as_bytes().slice(..471)).unwrap(),
        json!({}),
        "malformed",
    );
    set.refused(
        "malformed_signed_byte_after_the_end",
        &all.signed(&[&body[..], &[0]].concat()),
        json!({}),
        "malformed",
    );
    set.refused("malformed_signed_space_in_a_name", &changed(87, b' '), json!({}), "malformed");
    set.refused("malformed_signed_empty_name", &changed(86, 0), json!({}), "malformed");
    set.refused("malformed_signed_ciphertext_length", &changed(claims_end + 33, 15), json!({}), "malformed");
    let backwards = all.lease_with(|claims| claims.expires_at_ms = claims.issued_at_ms);
    set.refused("malformed_ends_when_it_begins", &backwards, json!({}), "malformed");
    set.refused("unsupported_version", &unsigned_change(4, 2), json!({}), "unsupported_version");
    set.refused("unsupported_suite", &unsigned_change(5, 2), json!({}), "unsupported_version");
    let stranger = json!({ "trusted_issuers": [to_hex(&second.public_bytes())] });
    set.refused("unknown_issuer", &good, stranger, "unknown_issuer");
    set.refused("bad_signature", &unsigned_change(good.as_bytes().len() - 64, 0), json!({}), "bad_signature");
    set.refused("bad_signature_second_spelling", &with_order_added(&good), json!({}), "bad_signature");
    set.refused("bad_signature_low_order", &with_neutral_first_half(&good), json!({}), "bad_signature");
    set.refused("bad_signature_changed_claim", &unsigned_change(61, 0xff), json!({}), "bad_signature");
    let other_recipient = all.lease_with(|claims| claims.recipient = KeyId([0; 16]));
    set.refused("wrong_recipient", &other_recipient, json!({}), "wrong_recipient");
    set.refused("not_yet_valid", &good, json!({ "now_ms": NOW - 5_001 }), "not_yet_valid");
    set.refused("expired", &good, json!({ "now_ms": NOW + TTL }), "expired");
    set.refused("ttl_too_long", &good, json!({ "max_ttl_ms": 59_999 }), "ttl_too_long");
    set.refused("clock_unavailable", &good, json!({ "now_ms": null }), "clock_unavailable");
    for (field, name) in binding().names() {
        let expected = json!({ "expected": { field.as_str(): format!("{name}x") } });
        let error = format!("binding_mismatch:{}", field.as_str());
        set.refused(&format!("binding_mismatch_{}", field.as_str()), &good, expected, &error);
    }
    let slot = |revision: u64, status: &str| json!({ "slots": { "acme-main": { "revision": revision.to_string(), "status": status } } });
    set.refused("stale_revision", &good, slot(REVISION + 1, "enabled"), "stale_revision");
    set.refused("disabled", &good, slot(REVISION, "disabled"), "disabled");
    set.refused("revoked", &good, slot(REVISION, "revoked"), "revoked");
    set.refused("revoked_because_not_listed", &good, json!({ "slots": null }), "revoked");
    set.refused("stale_generation", &good, json!({ "generation": (GENERATION + 1).to_string() }), "stale_generation");
    let used = json!({ "used_before": [to_hex(good.as_bytes())] });
    set.refused("replayed", &good, used, "replayed");
    let other = all.lease_with(|claims| claims.id = LeaseId([8; 16]));
    let full = json!({ "replay_entries": 1, "used_before": [to_hex(good.as_bytes())] });
    set.refused("replay_store_full", &other, full, "replay_store_full");
    let last = body[body.len() - 1];
    let broken = changed(body.len() - 1, !last);
    set.refused("open_failed_ciphertext", &broken, json!({}), "open_failed");
    let burnt = json!({ "used_before": [to_hex(broken.as_bytes())] });
    set.refused("replayed_after_it_did_not_open", &good, burnt, "replayed");
    set.refused("open_failed_expiry_changed_after_sealing", &changed(69, body[69] + 1), json!({}), "open_failed");
    let mut taken = body.clone();
    taken[6..22].copy_from_slice(second.id().as_bytes());
    set.refused("open_failed_signed_by_a_second_issuer", &signed_by(&second, &taken), both, "open_failed");
    let mut low = body.clone();
    low[claims_end..claims_end + 32].fill(0);
    set.refused("open_failed_low_order", &all.signed(&low), json!({}), "open_failed");
    let sealed = |plaintext: &[u8]| {
        let bytes = all.issuer.seal_and_sign(&all.claims(), &all.recipient(), plaintext, &[4; 32]).unwrap();
        SealedLease::new(bytes).unwrap()
    };
    let mut padding = ProviderCredential::bearer(b"sk").unwrap().plaintext().to_vec();
    padding[255] = 1;
    set.refused("open_failed_padding", &sealed(&padding), json!({}), "open_failed");
    let block = ProviderCredential::bearer(b"sk").unwrap().plaintext().to_vec();
    set.refused("open_failed_a_block_too_many", &sealed(&[&block[..], &[0; 256]].concat()), json!({}), "open_failed");
    set.refused("open_failed_kind", &sealed(&[3; 256]), json!({}), "open_failed");

    let late_and_foreign = json!({ "now_ms": NOW + TTL, "expected": { "node": "other" } });
    set.refused("order_time_before_binding", &good, late_and_foreign, "expired");
    let foreign_and_off = json!({ "generation": "0", "slots": null, "expected": { "run_id": "other" } });
    set.refused("order_binding_before_slot", &good, foreign_and_off, "binding_mismatch:run_id");
    set.refused("order_slot_before_generation", &good, json!({ "generation": "0", "slots": null }), "revoked");

    json!({
        "about": "Credential leases, version 1, and what must come of each. Made by the test golden of iop-credential-lease; docs/credential-lease.md says how to read it. Every key in here is an example.",
        "node": node(&all),
        "cases": set.cases,
    })
}

fn merge(into: &mut Value, from: &Value) {
    for (key, value) in from.as_object().unwrap() {
        match into.get_mut(key) {
            Some(known) if key == "expected" => merge(known, value),
            _ => into[key] = value.clone(),
        }
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn expected(names: &Value) -> Binding {
    Binding {
        principal: PrincipalName::new(text(&names["principal"])).unwrap(),
        route: RouteName::new(text(&names["route"])).unwrap(),
        slot: SlotName::new(text(&names["slot"])).unwrap(),
        profile: ProfileName::new(text(&names["profile"])).unwrap(),
        target: TargetName::new(text(&names["target"])).unwrap(),
        node: NodeName::new(text(&names["node"])).unwrap(),
        upstream: UpstreamOrigin::new(text(&names["upstream"])).unwrap(),
        run: RunName::new(text(&names["run_id"])).unwrap(),
    }
}

/// Runs one case as it stands in the file.
fn outcome(node: &Value, lease: &str) -> Value {
    let fixture = Fixture::new();
    let keys = node["trusted_issuers"].as_array().unwrap();
    let issuers = TrustedIssuers::new(keys.iter().map(|key| hex(text(key)).try_into().unwrap())).unwrap();
    let mut slots = SlotTable::default();
    let listed = node["slots"].as_object().into_iter().flatten().map(|(name, state)| {
        let status = match text(&state["status"]) {
            "enabled" => SlotStatus::Enabled,
            "disabled" => SlotStatus::Disabled,
            _ => SlotStatus::Revoked,
        };
        (SlotName::new(name).unwrap(), SlotState { revision: text(&state["revision"]).parse().unwrap(), status })
    });
    slots.replace(listed).unwrap();
    let number = |key: &str| node[key].as_u64().unwrap();
    let view = NodeView {
        now_ms: node["now_ms"].as_u64(),
        policy: TimePolicy::new(number("max_ttl_ms"), number("future_skew_ms")),
        issuers: &issuers,
        recipient: fixture.key.id(),
        generation: text(&node["generation"]).parse().unwrap(),
        slots: &slots,
    };
    let replay = MemoryReplayStore::new(usize::try_from(number("replay_entries")).unwrap());
    let names = expected(&node["expected"]);
    let used = |lease: &str| -> Result<OpenedCredential, LeaseError> {
        let lease = SealedLease::new(hex(lease)).unwrap();
        verify(&lease, &names, &view)?.open(&fixture.key, &view, &replay, &Place)
    };
    for before in node["used_before"].as_array().into_iter().flatten() {
        let _ = used(text(before));
    }
    match used(lease) {
        Ok(opened) => {
            let value = std::str::from_utf8(opened.expose()).unwrap();
            json!({ "opened": { "header": opened.header_name(), "value": value } })
        }
        Err(LeaseError::BindingMismatch(field)) => json!({ "refused": format!("binding_mismatch:{field}") }),
        Err(error) => json!({ "refused": error.as_str() }),
    }
}

#[test]
fn the_committed_set_is_the_one_this_code_makes() {
    // CRD-14, CRD-1: the bytes of version 1 never change.
    let made = made();
    if std::env::var_os(REWRITE).is_some() {
        std::fs::write(PATH, format!("{made:#}\n")).unwrap();
    }
    let committed: Value = serde_json::from_str(&std::fs::read_to_string(PATH).unwrap()).unwrap();
    assert_eq!(committed["node"], made["node"]);
    let (committed, made) = (committed["cases"].as_array().unwrap(), made["cases"].as_array().unwrap());
    assert_eq!(committed.len(), made.len());
    for (committed, made) in committed.iter().zip(made) {
        assert!(committed == made, "{} differs; if the format is meant to change, it is another version", made["name"]);
    }
}

#[test]
fn each_case_of_the_set_comes_out_as_it_says() {
    // CRD-14, CRD-5
    let set: Value = serde_json::from_str(&std::fs::read_to_string(PATH).unwrap()).unwrap();
    let mut refusals = std::collections::BTreeSet::new();
    for case in set["cases"].as_array().unwrap() {
        let mut node = set["node"].clone();
        merge(&mut node, &case["node"]);
        assert_eq!(outcome(&node, text(&case["lease"])), case["outcome"], "{}", case["name"]);
        refusals.extend(case["outcome"]["refused"].as_str().map(str::to_owned));
    }
    let plain: Vec<_> = LeaseError::PLAIN.iter().map(|error| error.as_str()).collect();
    assert!(plain.iter().all(|error| refusals.contains(*error)), "a case for each refusal");
    assert_eq!(refusals.len(), plain.len() + 8, "and for each bound name");
}
